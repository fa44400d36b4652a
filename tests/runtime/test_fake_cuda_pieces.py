"""Passes in pieces on a CUDA device that is not there: captures, replays, and no launch that waits for the device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the GPU runtime is not installed")
pytest.importorskip("triton", reason="the kernels need Triton")

from lockstep.core.contract.errors import ConfigError  # noqa: E402
from lockstep.runtime import LLM, Params, triton_trial  # noqa: E402
from lockstep.runtime.llm import demo_folder  # noqa: E402
from lockstep.runtime.lora import slots  # noqa: E402
from lockstep.runtime.lora.batch import lay_out  # noqa: E402
from lockstep.runtime.pieces import CapturedPieces, borrowed  # noqa: E402
from tests.support.adapters import write_adapter  # noqa: E402
from tests.support.architectures import save_architecture  # noqa: E402
from tests.support.fake_cuda import DEVICE, FakeCuda  # noqa: E402
from tests.support.flashinfer_wrappers import flashinfer_alone  # noqa: E402
from tests.support.small_llm import write_weights  # noqa: E402
from tests.support.small_runtime import SMALL_QWEN3  # noqa: E402

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
SIZES: dict[str, Any] = {
    "pages": 64, "page_size": 16, "max_running_requests": 4, "context_tokens_max": 128, "grammar_backend": "none",
}  # fmt: skip
GPU: dict[str, Any] = {
    **SIZES, "cuda_graph_max_batch": 2, "piecewise_graph_max_tokens": 16, "warm_up": False, "device": str(DEVICE),
}  # fmt: skip
PROMPTS = [[5, 6, 7, 8, 5, 6], [9, 10, 11], list(range(20, 60))]
TWELVE = Params(max_new_tokens=12, ignore_eos=True)
FOUR = Params(max_new_tokens=4, ignore_eos=True)


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return flashinfer_alone(monkeypatch)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    monkeypatch.setattr(triton_trial, "_tried", lambda index: None)
    with FakeCuda(interpret=False) as one:
        yield one


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_weights(tmp_path_factory.mktemp("model"), {**SMALL_QWEN3, "head_dim": 64, "dtype": "bfloat16"})


# -------------------------------------------------------------------------------------------- results of a whole engine

KINDS: dict[str, dict[str, Any]] = {
    "mixed": {"batching": "mixed", "overlap_depth": 1},
    "drafts": {"speculative_method": "ngram", "num_speculative_tokens": 2, "overlap_depth": 1},
}


@pytest.mark.parametrize("kind", KINDS)
def test_replays_draw_the_tokens_of_a_cpu(flashinfer: ModuleType, folder: Path, kind: str) -> None:
    """Over FlashInfer's calls, which compute in torch; the copy of long plans is waited for, as without pieces."""
    options: dict[str, Any] = {"chunked_prefill_size": 16, "dtype": "bfloat16", **KINDS[kind]}
    with LLM(folder, device="cpu", attention_backend="reference", **SIZES, **options) as llm:
        expected = [one.token_ids for one in llm.generate(PROMPTS, TWELVE)]
    with FakeCuda(interpret=False) as gpu, LLM(folder, **{**GPU, "piecewise_graph_max_tokens": 24}, **options) as llm:
        assert llm.attention_backend == "flashinfer"
        started = len(gpu.waits)
        answers = llm.generate(PROMPTS, TWELVE)
        files = {one.where.partition(":")[0] for one in gpu.waits[started:]}
        executor: Any = llm.host.executor
    assert [one.token_ids for one in answers] == expected
    assert executor.pieces.replays > 5
    assert files <= {"attention/flashinfer_backend.py"}


# ---------------------------------------------------------------------------------------------------- launches of modes


def served(folder: Path, gpu: FakeCuda, params: Any = FOUR, **options: Any) -> tuple[set[str], Any]:
    """Serve two requests. Returns the files in which a CPU waited meanwhile, and the executor."""
    with LLM(folder, **{**GPU, "dtype": "float32", **options}) as llm:
        started = len(gpu.waits)
        answers = llm.generate(PROMPTS[:2], params)
        files = {one.where.partition(":")[0] for one in gpu.waits[started:]}
        executor: Any = llm.host.executor
    assert [(len(one.token_ids), one.error) for one in answers] == [(4, "")] * 2
    return files, executor


def test_verified_drafts_run_in_pieces_without_a_wait(gpu: FakeCuda) -> None:
    options: dict[str, Any] = {"overlap_depth": 2, "speculative_method": "ngram", "num_speculative_tokens": 2}
    files, executor = served(demo_folder(), gpu, **options)
    assert files == set()
    assert executor.pieces.replays == executor.forwards > 0


def test_adapters_run_in_pieces_without_a_wait(gpu: FakeCuda, tmp_path: Path) -> None:
    adapters = {"all": write_adapter(tmp_path / "all", 1), "few": write_adapter(tmp_path / "few", 2, rank=2)}
    params = [Params(max_new_tokens=4, ignore_eos=True, adapter=name) for name in adapters]
    files, executor = served(demo_folder(), gpu, params, lora=adapters, max_loras=2)
    assert files <= {"lora/host_cache.py"}  # in the thread of loads, on a stream of its own
    assert executor.graphs.replays == 0
    assert executor.pieces.replays == executor.forwards > 0
    assert {"shrink_kernel", "expand_kernel"} <= set(gpu.launches)


def test_windows_with_pages_of_their_own_run_in_pieces(gpu: FakeCuda, tmp_path: Path) -> None:
    save_architecture(tmp_path, "Gemma 3")
    options: dict[str, Any] = {"swa_full_tokens_ratio": 0.5, "context_tokens_max": 112, "cuda_graph_max_batch": None}
    files, executor = served(tmp_path, gpu, **options)
    assert files == set()
    assert executor.graphs is None
    assert executor.pieces.replays == executor.forwards > 0
    with pytest.raises(ConfigError, match="`cuda_graphs` is on and `piecewise_graph_max_tokens` 0, but with `swa_full"):
        LLM(tmp_path, **{**GPU, **options, "piecewise_graph_max_tokens": 0}, cuda_graphs="on")


def test_memory_below_pieces_is_not_given_back(gpu: FakeCuda, tmp_path: Path) -> None:
    save_architecture(tmp_path, "Gemma 3")
    options = {**GPU, "swa_full_tokens_ratio": 0.5, "context_tokens_max": 112, "cuda_graph_max_batch": None}
    with LLM(tmp_path, dtype="float32", **options) as llm:
        assert llm.host.executor.graphs is None  # type: ignore[attr-defined]
        with pytest.raises(ConfigError, match="as CUDA graphs hold its addresses"):
            llm.release_memory()


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
        LLM(demo_folder(), dtype="float32", **GPU)
    assert gpu.capturing is None
    assert str(caught.value).startswith(
        "the CUDA graphs of a pass of 16 tokens could not be captured (0 of 2 passes were, up to 16 tokens); 79,872 of "
        "81,920 MiB of cuda:0 are free: RuntimeError: operation not permitted when stream is capturing"
    )


# --------------------------------------------------------------------------------------------------------------- pieces


def test_pieces_and_calls_alternate_over_the_same_memory() -> None:
    """What is between two cuts is replayed on new inputs; strided tensors and bfloat16 keep their layout."""
    with FakeCuda(), torch.cuda.stream(torch.cuda.Stream()), torch.inference_mode():
        given = torch.arange(12, device=DEVICE).view(3, 2, 2).to(torch.bfloat16)
        result = torch.zeros(3, 2, 2, dtype=torch.bfloat16, device=DEVICE)

        def run(cut: Any) -> None:
            one = given * 2
            first = cut(0, one.transpose(1, 2), one, one)
            second = cut(1, first + 1, first, first)
            result.copy_(second)

        pieces = CapturedPieces(torch.cuda.graph_pool_handle())
        pieces.capture(run)
        given.copy_(torch.arange(12, 24, device=DEVICE).view(3, 2, 2))
        calls: list[tuple[int, Any]] = []

        def attend(layer: int, query: Any, key: Any, value: Any, out: Any) -> None:
            calls.append((layer, query.cpu().clone()))
            out[:2].copy_(query[:2] * 10)

        pieces.replay(attend)
        expected = torch.arange(12, 24).view(3, 2, 2).to(torch.bfloat16) * 2
        assert [layer for layer, _ in calls] == [0, 1]
        assert torch.equal(calls[0][1], expected.transpose(1, 2))
        assert torch.equal(calls[1][1][:2], (expected.transpose(1, 2) * 10 + 1)[:2])
        assert torch.equal(result.cpu()[:2], ((expected.transpose(1, 2) * 10 + 1) * 10)[:2])
        some = torch.zeros(4, dtype=torch.bfloat16, device=DEVICE)
        borrowed(some)[1] = 3.0
        assert some.cpu().tolist() == [0.0, 3.0, 0.0, 0.0]


@pytest.mark.parametrize("of_tokens", [[0, 0, 1, -1, 2, 1], [2, 2, 2], [-1, 1]])
def test_kernels_of_adapters_add_the_same_from_buffers_of_a_fixed_size(
    of_tokens: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles without tokens store nothing; in Triton's interpreter."""
    import numpy as np

    from lockstep.runtime.lora.batch import FixedLayout
    from lockstep.runtime.lora.kernels import add_lora_triton

    draw, size = torch.Generator().manual_seed(1), 8
    down, up, hidden, out = (
        torch.randn(shape, generator=draw) for shape in ((3, 8, 24), (3, 40, 4), (size, 24), (size, 40))
    )
    given = lay_out(np.array(of_tokens, np.int32), np.ones(len(of_tokens), np.int32), torch.from_numpy)
    expected = slots.add_lora_reference(out.clone(), hidden, down, up, (16, 24), given)
    layout = FixedLayout(size, 3, torch.device("cpu"))
    kept = layout.filled(given, lambda one: torch.from_numpy(one.copy()))
    found = add_lora_triton(out.clone(), hidden, down, up, (16, 24), kept)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[len(of_tokens) :], out[len(of_tokens) :], rtol=0, atol=0)
