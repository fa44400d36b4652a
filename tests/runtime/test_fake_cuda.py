"""The engine on a CUDA device that is not there: start, captures, replays, and no launch that waits for the device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the GPU runtime is not installed")
pytest.importorskip("triton", reason="the kernels need Triton")

from lockstep.runtime import LLM, Params, triton_trial  # noqa: E402
from tests.support.fake_cuda import DEVICE, FakeCuda  # noqa: E402

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
SIZES: dict[str, Any] = {
    "pages": 64, "page_size": 16, "max_running_requests": 4, "context_tokens_max": 256, "cuda_graph_max_batch": 2,
    "dtype": "float32", "warm_up": False, "device": str(DEVICE),
}  # fmt: skip


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    monkeypatch.setattr(triton_trial, "_tried", lambda index: None)
    with FakeCuda(interpret=False) as one:
        yield one


def test_what_a_cpu_would_wait_for_is_found(gpu: FakeCuda) -> None:
    some = torch.arange(4, device=DEVICE)
    pinned = torch.empty(4, dtype=torch.int64, pin_memory=True)
    pinned.copy_(some, non_blocking=True)
    pinned.to(DEVICE, non_blocking=True)
    some[1:3] = 7
    some.add_(1)[:, None].sum(0)
    assert gpu.waits == []
    for wait in (
        lambda: some[0].item(),
        lambda: some.tolist(),
        lambda: some.nonzero(),
        lambda: some[some > 2],
        lambda: some.cpu(),
        lambda: torch.ones(4).to(DEVICE, non_blocking=True),
        lambda: torch.equal(some, some),
        lambda: torch.cuda.synchronize(),
    ):
        before = len(gpu.waits)
        wait()
        assert len(gpu.waits) > before
    with pytest.raises(RuntimeError, match="of the CPU"):
        some + torch.ones(4)


def test_a_replay_has_what_python_computed_at_capture(gpu: FakeCuda) -> None:
    length, source = 3, torch.zeros(2, device=DEVICE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()), torch.cuda.graph(graph):
        out = source * 2 + length
    length = 5
    source.fill_(1.0)
    graph.replay()
    assert out.cpu().tolist() == [5.0, 5.0]
    with (
        torch.cuda.stream(torch.cuda.Stream()),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
        pytest.raises(RuntimeError, match="not permitted when stream is capturing"),
    ):
        out.sum().item()


@pytest.mark.parametrize(
    ("options", "params"),
    [
        ({}, Params(max_new_tokens=4, ignore_eos=True)),
        (
            {"overlap_depth": 2, "speculative_method": "ngram", "num_speculative_tokens": 2},
            Params(max_new_tokens=4, ignore_eos=True, temperature=0.8, top_k=5, repetition_penalty=1.1, seed=1),
        ),
    ],
    ids=["graphs", "drafts, sampled"],
)
def test_no_launch_waits_while_requests_are_served(gpu: FakeCuda, options: dict[str, Any], params: Params) -> None:
    """Kernels are counted and not run, so tokens mean nothing; all that launches them, captures and copies runs."""
    with LLM(**SIZES, **options) as llm:
        assert llm.attention_backend == "triton"
        started = len(gpu.waits)
        answers = llm.generate([[5, 6, 7, 8, 5, 6], [9, 10, 11]], params)
        served = gpu.waits[started:]
        replays = llm.host.executor.graphs.replays
    assert [(len(one.token_ids), one.error) for one in answers] == [(4, "")] * 2
    assert served == []
    assert (replays > 0) == (not options)
    assert {"write_kv", "extend", "divide", "add_rms_norm_kernel", "norm_and_turn_kernel", "_draw_kernel"} <= set(
        gpu.launches
    )
