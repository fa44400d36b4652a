"""Engines of several ranks on CUDA devices that are not there: ranks are threads, NCCL is gloo on their memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the GPU runtime is not installed")
pytest.importorskip("triton", reason="the kernels need Triton")

from lockstep.core.contract.errors import ConfigError  # noqa: E402
from lockstep.runtime import LLM, Params, triton_trial  # noqa: E402
from lockstep.runtime.expert_moves import RankExpertMover  # noqa: E402
from lockstep.runtime.llm import demo_folder  # noqa: E402
from tests.support.adapters import write_adapter  # noqa: E402
from tests.support.architectures import save_architecture  # noqa: E402
from tests.support.fake_cuda import FakeCuda  # noqa: E402
from tests.support.fake_nccl import nccl_by_gloo  # noqa: E402
from tests.support.fake_nixl import nixl_in_process  # noqa: E402
from tests.support.flashinfer_wrappers import flashinfer_alone  # noqa: E402
from tests.support.model_engines import DENSE, EXPERTS, HALVES, engines, ranks_of  # noqa: E402
from tests.support.pictures import conversations, save_family  # noqa: E402
from tests.support.small_llm import write_weights  # noqa: E402
from tests.support.thread_ranks import ranks_as_threads  # noqa: E402

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
SIZES: dict[str, Any] = {
    "pages": 64, "page_size": 16, "max_running_requests": 4, "context_tokens_max": 128, "grammar_backend": "none",
    "chunked_prefill_size": 16,
}  # fmt: skip
GPU: dict[str, Any] = {
    **SIZES, "cuda_graph_max_batch": 4, "warm_up": False, "device": "cuda:0", "dtype": "bfloat16",
    "rank_timeout_s": 120.0,
}  # fmt: skip
PROMPTS = [[5, 6, 7, 8, 5, 6], [9, 10, 11], list(range(20, 44))]
FIVE = Params(max_new_tokens=5, ignore_eos=True)
PLANS = {"attention/flashinfer_backend.py"}  # an event is waited for, of plans long copied
COUNTS = {*PLANS, "models/experts.py"}  # how many rows go to each rank


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Small models, large enough that tokens differ."""
    wide = {"head_dim": 64, "dtype": "bfloat16", "num_hidden_layers": 2}
    return {
        name: write_weights(tmp_path_factory.mktemp(name), {**config, **wide})
        for name, config in (("dense", DENSE), ("experts", EXPERTS))
    }


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return flashinfer_alone(monkeypatch)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """Two devices on which kernels of Triton are counted."""
    monkeypatch.setattr(triton_trial, "_tried", lambda index: None)
    with gpus(2) as one:
        yield one


@contextmanager
def gpus(count: int) -> Iterator[FakeCuda]:
    """A machine with this number of devices, where workers are threads."""
    with FakeCuda(interpret=False, devices=count) as gpu, nccl_by_gloo(gpu), ranks_as_threads():
        yield gpu


def waits_since(gpu: FakeCuda, number: int) -> set[str]:
    """Return the files of the runtime in which a CPU waited for a device, after this number of waits."""
    return {one.where.partition(":")[0] for one in gpu.waits[number:]}


ENGINES: dict[str, tuple[str, int, dict[str, Any], set[str]]] = {
    "two ranks, halves": ("dense", 2, {"tp": 2, **HALVES}, PLANS),
    "whole experts": ("experts", 2, {"tp": 2, "ep": 2}, PLANS),
    "whole experts, sent to": ("experts", 2, {"tp": 2, "ep": 2, "moe_a2a": True}, COUNTS),
    "two stages of two ranks": ("dense", 4, {"pp": 2, "tp": 2}, PLANS),
    "two stages, drafts": ("dense", 2, {"pp": 2, "num_speculative_tokens": 2, "draft_model": "dense"}, PLANS),
}
"""By name: model, devices, options, files in which a rank waits while it serves."""
GRAPHS = ("whole experts",)  # others divide their decodes, or cannot be captured


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path]) -> dict[str, list[list[int]]]:
    """The tokens of one rank on a CPU, by model."""
    found = {}
    for name, folder in folders.items():
        with LLM(folder, device="cpu", attention_backend="reference", dtype="bfloat16", **SIZES) as llm:
            found[name] = [one.token_ids for one in llm.generate(PROMPTS, FIVE)]
    return found


@pytest.mark.parametrize("name", ENGINES)
def test_ranks_draw_the_tokens_of_a_cpu(
    name: str, flashinfer: ModuleType, folders: dict[str, Path], expected: dict[str, list[list[int]]]
) -> None:
    """Over FlashInfer's calls and NCCL's groups; collectives are captured in graphs and run again in their replays."""
    model, devices, options, waits = ENGINES[name]
    if "draft_model" in options:
        options = {**options, "draft_model": str(folders[options["draft_model"]])}
    with gpus(devices) as gpu, LLM(folders[model], **GPU, **options) as llm:
        assert llm.attention_backend == "flashinfer"
        started = len(gpu.waits)
        answers = llm.generate(PROMPTS, FIVE)
        served = waits_since(gpu, started)
        graphs = llm.host.executor.executor.graphs  # type: ignore[attr-defined]
        assert not llm.config.speculates or llm.stats().drafts.right > 0
    assert (graphs is not None and graphs.replays > 0) == (name in GRAPHS)
    assert [one.token_ids for one in answers] == expected[model]
    assert served == waits


LIBRARY: dict[str, tuple[dict[str, Any], set[str]]] = {
    "OLMo 2": ({"hidden_size": 256}, PLANS),  # queries and keys are joined, and so are norms over all heads
    "Qwen3.5": ({"head_dim": 64}, PLANS),
    "Gemma 2": ({"head_dim": 64}, set()),
}
"""Models that run by transformers' code: settings, files in which a rank waits while it serves."""


def on_a_cpu_and_on_gpus(
    folder: Path, answer: Callable[[LLM], list[Any]], **options: Any
) -> tuple[list[list[int]], list[list[int]], set[str]]:
    """Return the tokens of two ranks on a CPU, those of two ranks on GPUs, and the files in which the latter waited.

    Sums of two ranks have the same bits on both. On GPUs prompts run in pieces, collectives among them.
    """
    both = {"tp": 2, "dtype": "bfloat16", **options}
    with LLM(folder, device="cpu", attention_backend="reference", **{**SIZES, **both}) as llm:
        expected = [one.token_ids for one in answer(llm)]
    with gpus(2) as gpu, LLM(folder, **{**GPU, **both, "cuda_graph_max_batch": None}) as llm:
        started = len(gpu.waits)
        return expected, [one.token_ids for one in answer(llm)], waits_since(gpu, started)


@pytest.mark.parametrize("name", LIBRARY)
def test_ranks_of_a_library_model_draw_the_tokens_of_ranks_on_a_cpu(
    name: str, flashinfer: ModuleType, tmp_path: Path
) -> None:
    pytest.importorskip("transformers", reason="the models run by transformers' code")
    settings, waits = LIBRARY[name]
    save_architecture(tmp_path, name, **settings)
    expected, found, served = on_a_cpu_and_on_gpus(tmp_path, lambda llm: llm.generate(PROMPTS, FIVE))
    assert found == expected
    assert served == waits


def test_ranks_divide_pictures_and_draw_the_tokens_of_ranks_on_a_cpu(flashinfer: ModuleType, tmp_path: Path) -> None:
    """Only the library's encoder and the notes that go ahead of its outputs are waited for."""
    pytest.importorskip("transformers", reason="the models run by transformers' code")
    pytest.importorskip("PIL", reason="images are decoded by Pillow")
    save_family(tmp_path, "Qwen2.5-VL")
    asked = [one for one, _, _ in conversations(8, 1)][:4]
    expected, found, served = on_a_cpu_and_on_gpus(tmp_path, lambda llm: llm.chat(asked, FIVE), context_tokens_max=512)
    assert found == expected
    assert served == {"from_transformers/media_encoder.py", "media_share.py"}


def test_graphs_of_experts_that_are_sent_to_are_refused(flashinfer: ModuleType, folders: dict[str, Path]) -> None:
    options = {**GPU, "tp": 2, "ep": 2, "moe_a2a": True, "cuda_graphs": "on"}
    with gpus(2), pytest.raises(ConfigError, match=r"`cuda_graphs` is on, but .*\nhint: auto, or off"):
        LLM(folders["experts"], **options)


def test_data_parallel_ranks_draw_the_tokens_of_a_cpu(
    flashinfer: ModuleType, folders: dict[str, Path], expected: dict[str, list[list[int]]], tmp_path: Path
) -> None:
    """Ranks without a request compute the experts of the others' rows."""
    options = {name: GPU[name] for name in ("dtype", "warm_up")} | {"device": "cuda", "ep": 2}
    sched = {name: SIZES[name] for name in ("pages", "page_size", "max_running_requests", "chunked_prefill_size")}
    with gpus(2) as gpu, ranks_of(folders["experts"], 2, tmp_path, options, sched) as llms:
        assert [str(llm.model.device) for llm in llms] == ["cuda:0", "cuda:1"]
        started = len(gpu.waits)
        pending = [llms[number % 2].ask(prompt, FIVE) for number, prompt in enumerate(PROMPTS)]
        found = [llms[number % 2].wait(one).token_ids for number, one in enumerate(pending)]
        served = waits_since(gpu, started)
    assert found == expected["experts"]
    assert served == PLANS


def test_a_decode_engine_on_another_gpu_draws_the_tokens_of_a_cpu(
    flashinfer: ModuleType, folders: dict[str, Path], expected: dict[str, list[list[int]]], tmp_path: Path
) -> None:
    """KV goes over NIXL from the two ranks of a prefill engine, half of the heads each, to a decode engine of one."""
    prefill = {"device": "cuda:0", "tp": 2, "cuda_graph_max_batch": None}
    both = {**GPU, "model": folders["dense"], "transfer_transport": "nixl", "transfer_checksums": True}
    with (
        gpus(3) as gpu,
        nixl_in_process() as nixl,
        engines(tmp_path, prefill, {"device": "cuda:2"}, **both) as (_, second),
    ):
        started = len(gpu.waits)
        found = [one.token_ids for one in second.generate(PROMPTS, FIVE)]
        served = waits_since(gpu, started)
        agents = len(nixl)
    assert found == expected["dense"]
    assert {name for name in served if not name.startswith("transfer/")} == PLANS  # transfers wait in their threads
    assert agents == 4  # of two ranks that send, and for each of them one that reads


def test_what_ranks_change_beside_their_passes(
    gpu: FakeCuda, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adapters, pages in host memory and new weights, in threads whose current device is at first that of rank 0."""
    adapters = {"all": write_adapter(tmp_path / "all", 1), "few": write_adapter(tmp_path / "few", 2, rank=2)}
    sizes = {**GPU, "dtype": "float32", "pages": 10, "cuda_graph_max_batch": 2}
    with LLM(demo_folder(), tp=2, lora=adapters, max_loras=2, host_cache_gb=0.001, **sizes) as llm:
        started = len(gpu.waits)
        params = [Params(max_new_tokens=5, ignore_eos=True, adapter=name) for name in ("all", "few", "")]
        for first in (3, 70, 3):  # the pages of the first prompts are evicted, and loaded again
            prompts = [[first + number, *range(first, first + 40)] for number in range(3)]
            answers = llm.generate(prompts, params)
            assert [(len(one.token_ids), one.error) for one in answers] == [(5, "")] * 3
        assert waits_since(gpu, started) == {"lora/host_cache.py", "tiers/mover.py"}
        llm.update_weights(demo_folder())
        answers = llm.generate(PROMPTS, FIVE)
        assert [(len(one.token_ids), one.error) for one in answers] == [(5, "")] * 3
    assert {"shrink_kernel", "expand_kernel"} <= set(gpu.launches)


def test_experts_move_between_gpus(gpu: FakeCuda, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Their load is measured in graphs, and weights go over NCCL, without a wait."""
    moved: list[str] = []
    move = RankExpertMover.move

    def counted(mover: Any, *given: Any) -> None:
        moved.append(str(mover._lane.device))
        move(mover, *given)

    monkeypatch.setattr(RankExpertMover, "move", counted)
    moving = {"tp": 2, "ep": 2, "eplb": True, "redundant_experts": 2, "eplb_interval": 4, "expert_load_interval": 2}
    with LLM(folders["experts"], **GPU, **moving) as llm:
        started = len(gpu.waits)
        answers = llm.generate(PROMPTS, Params(max_new_tokens=9, ignore_eos=True))
        served = waits_since(gpu, started)
    assert [(len(one.token_ids), one.error) for one in answers] == [(9, "")] * 3
    assert set(moved) == {"cuda:0", "cuda:1"}
    assert served == set()
