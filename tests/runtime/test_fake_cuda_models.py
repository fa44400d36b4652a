"""Models of many kinds on the second of two CUDA devices that are not there: passes launch and copy without a wait."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the GPU runtime is not installed")
pytest.importorskip("triton", reason="the kernels need Triton")
pytest.importorskip("transformers", reason="the models run by transformers' code")
pytest.importorskip("PIL", reason="images are decoded by Pillow")

from lockstep.runtime import LLM, Params, triton_trial  # noqa: E402
from lockstep.runtime.llm import demo_folder  # noqa: E402
from tests.support.adapters import write_for  # noqa: E402
from tests.support.architectures import save_architecture  # noqa: E402
from tests.support.fake_cuda import FakeCuda  # noqa: E402
from tests.support.fake_nixl import nixl_in_process  # noqa: E402
from tests.support.flashinfer_wrappers import flashinfer_alone  # noqa: E402
from tests.support.heads import saved_head  # noqa: E402
from tests.support.model_engines import engines  # noqa: E402
from tests.support.mtp import TorchMtp, add_mtp  # noqa: E402
from tests.support.pictures import conversations, save_family  # noqa: E402
from tests.support.small_llm import write_weights  # noqa: E402
from tests.support.small_runtime import SMALL_QWEN3  # noqa: E402

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
GPU: dict[str, Any] = {
    "pages": 64, "page_size": 16, "max_running_requests": 4, "context_tokens_max": 112, "grammar_backend": "none",
    "warm_up": False, "device": "cuda:1", "piecewise_graph_max_tokens": 8,
}  # fmt: skip
BLOCKS: dict[str, Any] = {
    **SMALL_QWEN3, "architectures": ["SDARForCausalLM"], "model_type": "sdar", "block_size": 4, "mask_token_id": 299,
}  # fmt: skip
PROMPTS = [[5, 6, 7, 8, 5, 6], [9, 10, 11]]
THREE = Params(max_new_tokens=3, ignore_eos=True)
MTP: dict[str, Any] = {"speculative_method": "mtp", "num_speculative_tokens": 2, "mamba_track_interval": 16}


def hybrid_with_an_adapter(folder: Path) -> dict[str, Any]:
    """A model with states, its MTP layer, and an adapter of its matrices outside of linear attention."""
    model = save_architecture(folder / "model", "Qwen3.5")
    add_mtp(folder / "model", TorchMtp(model), by_expert=True)
    linear = {name: one for name, one in model.named_modules() if isinstance(one, torch.nn.Linear)}
    write_for(folder / "law", {name: one for name, one in linear.items() if ".mlp." in name})
    return {"model": folder / "model", "lora": {"law": folder / "law"}, "max_loras": 2, **MTP}


def with_a_head(folder: Path) -> dict[str, Any]:
    """The demo model with a head of EAGLE-3, whose vocabulary is smaller."""
    head = saved_head(folder / "head", 3, draft_vocab=64)
    return {"model": demo_folder(), "draft_model": str(head), "num_speculative_tokens": 2}


def in_blocks(folder: Path) -> dict[str, Any]:
    """A model that answers in blocks."""
    return {"model": write_weights(folder, BLOCKS)}


def with_window_pages(folder: Path) -> dict[str, Any]:
    """A model whose layers with windows have pages of their own."""
    save_architecture(folder, "Gemma 3")
    return {"model": folder, "swa_full_tokens_ratio": 0.5}


def with_experts(folder: Path) -> dict[str, Any]:
    """A model of experts that runs by transformers' code, in graphs."""
    save_architecture(folder, "gpt-oss")
    return {"model": folder, "cuda_graph_max_batch": 2}


KINDS: list[tuple[Callable[[Path], dict[str, Any]], set[str], set[str]]] = [
    (hybrid_with_an_adapter, {"shrink_kernel", "expand_kernel", "extend"}, {"lora/host_cache.py"}),
    (with_a_head, {"add_rms_norm_kernel", "attend_split"}, set()),
    (in_blocks, {"add_rms_norm_kernel"}, set()),
    (with_window_pages, {"extend"}, set()),
    (with_experts, {"extend", "attend_split"}, set()),
]
"""A folder and options, kernels that are launched among others, and files in which threads of loads wait."""


@pytest.fixture
def no_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_trial, "_tried", lambda index: None)


@pytest.mark.usefixtures("no_trial")
@pytest.mark.parametrize(("make", "kernels", "waits"), KINDS, ids=[make.__name__ for make, *_ in KINDS])
def test_passes_of_models_do_not_wait(
    make: Callable[[Path], dict[str, Any]], kernels: set[str], waits: set[str], tmp_path: Path
) -> None:
    options = make(tmp_path)
    params = [THREE, Params(max_new_tokens=3, ignore_eos=True, adapter="law") if "lora" in options else THREE]
    with FakeCuda(interpret=False, devices=2) as gpu, LLM(dtype="float32", **{**GPU, **options}) as llm:
        started = len(gpu.waits)
        answers = llm.generate(PROMPTS, params)
        served = {one.where.partition(":")[0] for one in gpu.waits[started:]}
        drafts, graphs = llm.stats().drafts.drafts, llm.host.executor.graphs
    assert [(len(one.token_ids), one.error) for one in answers] == [(3, "")] * 2
    assert served <= waits
    assert kernels <= set(gpu.launches)
    assert (drafts > 0) == ("num_speculative_tokens" in options)
    assert (graphs is not None and graphs.replays > 0) == ("cuda_graph_max_batch" in options)


@pytest.mark.usefixtures("no_trial")
@pytest.mark.parametrize(
    ("name", "kind", "transport", "options"),
    [
        ("Gemma 3", "window", "shm", {"swa_full_tokens_ratio": 0.5, "chunked_prefill_size": 16}),
        ("Qwen3.5", "state", "nixl", {"mamba_track_interval": 16}),
    ],
)
def test_windows_and_states_go_to_another_gpu(
    name: str, kind: Any, transport: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """The canary compares the tags that were sent; only transfers wait, in threads of their own."""
    save_architecture(tmp_path / "model", name)
    both = {**GPU, "dtype": "float32", "debug": True, "transfer_transport": transport, "transfer_failure": "fail"}
    both |= {"model": tmp_path / "model", **options}
    prompts = [*PROMPTS, list(range(3, 43))]
    with (
        FakeCuda(interpret=False, devices=2) as gpu,
        nixl_in_process() as agents,
        engines(tmp_path, {"device": "cuda:0"}, {}, **both) as (_, second),
    ):
        answers = [one for _ in range(2) for one in second.generate(prompts, THREE)]
        waits = {one.where.partition(":")[0] for one in gpu.waits if one.where.startswith("transfer/")}
        counts = second.handover.counts  # type: ignore[union-attr]
        assert len(agents) == (2 if transport == "nixl" else 0)
    assert [(len(one.token_ids), one.error) for one in answers] == [(3, "")] * 6
    assert (counts.done, counts.failed) == (6, 0)
    assert counts.blocks[kind] >= 6
    assert waits == {"transfer/rank.py"}


HYBRIDS: dict[str, dict[str, Any]] = {
    "Qwen3.5": {"mamba_track_interval": 16},
    "Gemma 3": {"swa_full_tokens_ratio": 0.5},
}


@pytest.mark.parametrize("name", HYBRIDS)
def test_states_and_windows_from_host_memory_give_the_tokens_of_a_cpu(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first prompts are evicted from the device, and come again; the canary compares the tags of what is read."""
    flashinfer_alone(monkeypatch)
    sizes = {"head_dim": 64} if name == "Qwen3.5" else {}
    save_architecture(tmp_path, name, **sizes)
    of_gpu = {one: GPU[one] for one in ("device", "piecewise_graph_max_tokens")}
    both = {one: value for one, value in GPU.items() if one not in of_gpu}
    both |= {"pages": 12, "host_cache_gb": 0.01, "load_tokens_min": 4, "debug": True, "dtype": "bfloat16"}
    both |= HYBRIDS[name]
    prompts = [[[first + number, *range(first, first + 40)] for number in range(3)] for first in (3, 50, 3)]

    def answered(llm: LLM) -> list[list[int]]:
        return [one.token_ids for some in prompts for one in llm.generate(some, THREE)]

    with LLM(tmp_path, device="cpu", attention_backend="reference", **both) as llm:
        expected = answered(llm)
    with FakeCuda(interpret=False, devices=2) as gpu, LLM(tmp_path, **of_gpu, **both) as llm:
        started = len(gpu.waits)
        found, moved = answered(llm), llm.stats().tiers
        served = {one.where.partition(":")[0] for one in gpu.waits[started:]}
    assert found == expected
    assert moved.host_tokens > 0
    assert moved.blocks["load", "state" if name == "Qwen3.5" else "window"] > 0
    assert "tiers/mover.py" in served


@pytest.mark.usefixtures("no_trial")
def test_only_the_encoder_of_pictures_waits(tmp_path: Path) -> None:
    """The library's code reads the sizes of a picture from the device; drafts and experts wait for nothing."""
    model, _ = save_family(tmp_path, "Qwen3.5 MoE with pictures")
    add_mtp(tmp_path, TorchMtp(model), by_expert=False)
    (asked, _, _) = next(one for one in conversations(8, 1) if one[1])
    options = {**GPU, "context_tokens_max": 512, **MTP}
    with FakeCuda(interpret=False, devices=2) as gpu, LLM(tmp_path, dtype="float32", **options) as llm:
        started = len(gpu.waits)
        (answer,) = llm.chat([asked], THREE)
        served = {one.where.partition(":")[0] for one in gpu.waits[started:]}
    assert (len(answer.token_ids), answer.error) == (3, "")
    assert served == {"from_transformers/media_encoder.py"}
