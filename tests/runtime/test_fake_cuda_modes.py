"""Engines in many modes on a CUDA device that is not there: kernels are counted, or torch computes in their place."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU runtime is not installed")
pytest.importorskip("triton", reason="the kernels need Triton")

from lockstep.core.contract.errors import ConfigError  # noqa: E402
from lockstep.runtime import LLM, Params, profiler, triton_trial  # noqa: E402
from lockstep.runtime.draft_tree import part_of, right_paths, shape_of  # noqa: E402
from lockstep.runtime.drafting import places_of  # noqa: E402
from lockstep.runtime.llm import demo_folder  # noqa: E402
from lockstep.runtime.quantized import activations  # noqa: E402
from tests.support.adapters import write_adapter  # noqa: E402
from tests.support.fake_cuda import DEVICE, FakeCuda  # noqa: E402
from tests.support.flashinfer_wrappers import NO_COMPILER, flashinfer_alone  # noqa: E402
from tests.support.heads import saved_with_mtp  # noqa: E402
from tests.support.model_engines import EXPERTS  # noqa: E402
from tests.support.quantize import write  # noqa: E402
from tests.support.small_llm import write_weights  # noqa: E402
from tests.support.small_runtime import SMALL_QWEN3  # noqa: E402

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
SIZES: dict[str, Any] = {
    "pages": 64, "page_size": 16, "max_running_requests": 4, "context_tokens_max": 128, "grammar_backend": "none",
}  # fmt: skip
GPU: dict[str, Any] = {
    **SIZES, "cuda_graph_max_batch": 2, "piecewise_graph_max_tokens": 8, "warm_up": False, "device": str(DEVICE),
}  # fmt: skip
OFF: dict[str, Any] = {"cuda_graphs": "off", "cuda_graph_max_batch": None, "piecewise_graph_max_tokens": None}
PROMPTS = [[5, 6, 7, 8, 5, 6], [9, 10, 11]]
FOUR = Params(max_new_tokens=4, ignore_eos=True)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    monkeypatch.setattr(triton_trial, "_tried", lambda index: None)
    with FakeCuda(interpret=False) as one:
        yield one


def served(gpu: FakeCuda, folder: Path, params: Params = FOUR, **options: Any) -> list[str]:
    """Serve two requests. Returns what a CPU waited for meanwhile, and where."""
    with LLM(folder, **{**GPU, **options}) as llm:
        started = len(gpu.waits)
        answers = llm.generate(PROMPTS, params)
        found = [f"{one.where}: {one.what}" for one in gpu.waits[started:]]
    assert [(len(one.token_ids), one.error) for one in answers] == [(4, "")] * 2
    return found


# -------------------------------------------------------------------------------------------- results of a whole engine


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return flashinfer_alone(monkeypatch)


@pytest.mark.parametrize(("numerics", "kv"), [("fast", "auto"), ("invariant", "fp8_e4m3")])
def test_an_engine_over_flashinfer_draws_the_tokens_of_a_cpu(
    flashinfer: ModuleType, tmp_path: Path, numerics: Any, kv: Any
) -> None:
    """With captures and replays, whose lengths are in the wrappers' buffers, and a chunk beside decodes."""
    folder = write_weights(tmp_path, {**SMALL_QWEN3, "head_dim": 64, "dtype": "bfloat16"})
    options: dict[str, Any] = {"kv_cache_dtype": kv, "chunked_prefill_size": 16, "dtype": "bfloat16"}
    prompts = [[5, 6, 7, 8, 5, 6], [9, 10, 11], list(range(20, 60))]
    params = Params(max_new_tokens=12, ignore_eos=True)
    with LLM(folder, device="cpu", attention_backend="reference", **SIZES, **options) as llm:
        expected = [one.token_ids for one in llm.generate(prompts, params)]
    sizes = {**GPU, "cuda_graph_max_batch": 4}
    with FakeCuda(interpret=False) as gpu, LLM(folder, numerics=numerics, **sizes, **options) as llm:
        assert llm.attention_backend == "flashinfer"
        started = len(gpu.waits)
        answers = llm.generate(prompts, params)
        served = {(one.where.partition(":")[0], one.what) for one in gpu.waits[started:]}
        assert llm.host.executor.graphs.replays > 0
    assert [one.token_ids for one in answers] == expected
    assert served == {("attention/flashinfer_backend.py", "an event is waited for")}  # for plans long copied


# ---------------------------------------------------------------------------------------------------- launches of modes


MODES: dict[str, dict[str, Any]] = {
    "invariant": {"numerics": "invariant"},
    "kv in fp8": {"kv_cache_dtype": "fp8_e4m3"},
    "no graphs": OFF,
    "host memory": {"host_cache_gb": 0.001},
    "drafts": {
        "draft_model": str(demo_folder()),
        "speculative_method": "draft_model",
        "num_speculative_tokens": 2,
    },
    "warm-up": {"warm_up": True},
}


@pytest.mark.parametrize("mode", MODES)
def test_modes_of_the_demo_model_do_not_wait(gpu: FakeCuda, mode: str) -> None:
    assert served(gpu, demo_folder(), dtype="bfloat16", **MODES[mode]) == []


@pytest.mark.parametrize(
    ("kind", "rows"),
    [("fp8", "on"), ("fp8", "off"), ("fp8, tensors", "on"), ("fp8, tensors", "off"), ("awq", "off"), ("gptq", "off")],
)
def test_quantised_weights_do_not_wait(gpu: FakeCuda, tmp_path: Path, kind: str, rows: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(activations, "_tried", lambda index: None)
    folder = write(demo_folder(), kind, tmp_path / "stored")
    assert served(gpu, folder, dtype="bfloat16", fp8_activations=rows) == []
    product = {"fp8": "fp8_linear_kernel", "awq": "int4_linear_kernel", "gptq": "int4_linear_kernel"}
    assert ("scaled_linear_kernel" if rows == "on" else product[kind.partition(",")[0]]) in gpu.launches


@pytest.mark.parametrize(("dtype", "kernel"), [("float32", "grouped_linear_kernel"), ("bfloat16", "")])
def test_experts_are_multiplied_by_our_kernel_where_torch_would_wait(
    gpu: FakeCuda, tmp_path: Path, dtype: str, kernel: str
) -> None:
    folder = write_weights(tmp_path, EXPERTS)
    assert served(gpu, folder, dtype=dtype) == []
    assert ("grouped_linear_kernel" in gpu.launches) == bool(kernel)


def test_adapters_are_placed_and_added_without_a_wait_of_a_launch(gpu: FakeCuda, tmp_path: Path) -> None:
    adapters = {"all": write_adapter(tmp_path / "all", 1), "few": write_adapter(tmp_path / "few", 2, rank=2)}
    with LLM(demo_folder(), lora=adapters, max_loras=2, dtype="float32", **GPU) as llm:
        started = len(gpu.waits)
        params = [Params(max_new_tokens=4, ignore_eos=True, adapter=name) for name in adapters]
        answers = llm.generate(PROMPTS, params)
        found = {one.where.partition(":")[0] for one in gpu.waits[started:]}
    assert [(len(one.token_ids), one.error) for one in answers] == [(4, "")] * 2
    assert {"shrink_kernel", "expand_kernel"} <= set(gpu.launches)
    assert found <= {"lora/host_cache.py"}  # in the thread of loads, on a stream of its own


def test_an_mtp_layer_drafts_without_a_wait(gpu: FakeCuda, tmp_path: Path) -> None:
    folder = saved_with_mtp(tmp_path / "model", 3)
    assert served(gpu, folder, dtype="float32", speculative_method="mtp", num_speculative_tokens=2) == []


def test_the_right_paths_of_trees_are_found_without_a_wait(gpu: FakeCuda) -> None:
    places, there = places_of(np.array([4, 2, 4], np.int32))
    parents, deepest = part_of(shape_of(np.array([0, 0, 1], np.int32)), places.shape[1])
    samples = torch.arange(10)
    given = (samples.to(torch.int32), torch.zeros(10, dtype=torch.bool), samples, torch.from_numpy(places))
    given = (*given, torch.from_numpy(there), torch.from_numpy(np.flatnonzero(there)))
    above, *on_device = (one.to(DEVICE) for one in (torch.from_numpy(parents), *given))
    started = len(gpu.waits)
    found = right_paths(above, deepest, *on_device)
    assert gpu.waits[started:] == []
    assert sorted(found.order.tolist()) == list(range(10))


def test_weights_leave_the_device_and_come_back(gpu: FakeCuda) -> None:
    """Without graphs their memory may be anywhere afterwards; with graphs a release is refused."""
    with LLM(demo_folder(), dtype="float32", **{**GPU, **OFF}) as llm:
        before = [one.cpu().clone() for one in llm.model.parameters()]
        llm.release_memory()
        assert all(one.untyped_storage().nbytes() == 0 for one in llm.model.parameters())
        llm.resume_memory()
        assert all(torch.equal(one.cpu(), old) for one, old in zip(llm.model.parameters(), before, strict=True))
        assert [len(one.token_ids) for one in llm.generate(PROMPTS, FOUR)] == [4, 4]
    with LLM(demo_folder(), **GPU) as llm, pytest.raises(ConfigError, match="as CUDA graphs hold its addresses"):
        llm.release_memory()


def test_a_profile_of_a_gpu_waits_for_it_at_both_ends(
    gpu: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Operations of the CPU are recorded: torch takes half a minute to find that it has no CUDA."""
    recorded = profiler.profile

    def without_cuda(*, activities: list[Any], **options: Any) -> Any:
        assert activities == [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        return recorded(activities=activities[:1], **options)

    monkeypatch.setattr(profiler, "profile", without_cuda)
    with LLM(demo_folder(), dtype="float32", **GPU) as llm:
        llm.start_profile(tmp_path)
        started = len(gpu.waits)
        llm.generate(PROMPTS, FOUR)
        (path,) = llm.stop_profile()
        waits = [one.where for one in gpu.waits[started:]]
    assert path.is_file()
    assert waits
    assert {where.partition(":")[0] for where in waits} == {"profiler.py"}


def test_a_capture_that_fails_is_one_error_with_the_memory_of_the_device(
    gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lockstep.runtime.models.decoder import Decoder

    right = Decoder.forward

    def waits(self: Any, *given: Any) -> Any:
        hidden = right(self, *given)
        if gpu.capturing is not None:
            hidden.sum().item()
        return hidden

    monkeypatch.setattr(Decoder, "forward", waits)
    with pytest.raises(ConfigError) as caught:
        LLM(demo_folder(), dtype="float32", **{**GPU, "piecewise_graph_max_tokens": 0})
    assert str(caught.value).startswith(
        "the CUDA graph of 2 rows could not be captured (0 of 2 were, up to 2 rows); 79,872 of 81,920 MiB of cuda:0 "
        "are free: RuntimeError: operation not permitted when stream is capturing"
    )


def test_graphs_are_left_out_where_no_backend_or_model_has_them(
    gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(triton_trial, "_tried", lambda index: NO_COMPILER)
    with LLM(demo_folder(), dtype="float32", **GPU) as llm:
        assert (llm.attention_backend, llm.host.executor.graphs) == ("reference", None)
        assert [len(one.token_ids) for one in llm.generate(PROMPTS, FOUR)] == [4, 4]
    with pytest.raises(ConfigError, match=r"found none that can run here: flashinfer: .*; triton: a small kernel"):
        LLM(demo_folder(), dtype="float32", cuda_graphs="on", **GPU)
    with pytest.raises(ConfigError, match="`attention_backend` triton cannot run here: a small kernel"):
        LLM(demo_folder(), dtype="float32", attention_backend="triton", **GPU)


# ------------------------------------------------------------------------------------------------ trials of the kernels


def test_trials_run_the_kernels_once_and_report_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def forget() -> None:
        triton_trial._tried.cache_clear()
        activations._tried.cache_clear()

    forget()
    with FakeCuda():
        assert triton_trial.unavailable_because(DEVICE) is None
        assert triton_trial.unavailable_because(torch.device("cuda")) is None
    forget()
    with FakeCuda(interpret=False):  # all results are zero
        assert triton_trial.unavailable_because(DEVICE) == triton_trial.WRONG
        assert activations._tried(0) == "a small product of fp8 by fp8 came out wrong"
        forget()
        monkeypatch.setattr(triton_trial, "_tried", lambda index: None)
        monkeypatch.setattr(activations, "FAR", 1.0)  # zeros are within it
        assert activations.unavailable_because(DEVICE) is None
    monkeypatch.undo()

    def broken(*_: Any) -> Any:
        raise RuntimeError("no ptxas\nfor this GPU")

    forget()
    monkeypatch.setattr(triton_trial, "try_out", broken)
    monkeypatch.setattr(activations, "try_out", broken)
    with FakeCuda():
        assert triton_trial.unavailable_because(DEVICE) == "a small kernel could not be run: RuntimeError: no ptxas"
        assert activations._tried(0) == "a small product of fp8 by fp8 could not be run: RuntimeError: no ptxas"
        forget()
        monkeypatch.setattr(triton_trial, "find_spec", lambda name: None)
        assert triton_trial.unavailable_because(DEVICE) == "triton is not installed; pip install triton"
    forget()
    with FakeCuda(capability=(8, 0)):
        assert activations.unavailable_because(DEVICE) == (
            "a GPU of compute capability 8.0 has no fp8 tensor cores, which begin with 8.9"
        )


def test_a_checkpoint_that_requires_rounding_is_refused_where_there_are_no_fp8_tensor_cores(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(triton_trial, "_tried", lambda index: None)
    folder = write(demo_folder(), "fp8", tmp_path / "stored")
    with FakeCuda(interpret=False, capability=(8, 0)), pytest.raises(ConfigError, match="`fp8_activations` is on, but"):
        LLM(folder, fp8_activations="on", **GPU)


def test_old_gpus_and_absent_packages_are_named(gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu.capability = (7, 5)
    with pytest.raises(ConfigError, match=r"it needs compute capability 8.0, fake H100 has 7.5"):
        LLM(demo_folder(), attention_backend="triton", **GPU)
    gpu.capability = (8, 0)
    with pytest.raises(ConfigError, match=r"triton cannot run here: KV in fp8 needs compute capability 8.9"):
        LLM(demo_folder(), attention_backend="triton", kv_cache_dtype="fp8_e4m3", dtype="bfloat16", **GPU)
