"""The engine on a CUDA device that is not there: start, captures, replays, and no launch that waits for the device."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU runtime is not installed")
pytest.importorskip("triton", reason="the kernels need Triton")

from lockstep.runtime import LLM, Params, triton_trial  # noqa: E402
from lockstep.runtime.attention.kernels import write_kv  # noqa: E402
from lockstep.runtime.models.expert_slots import ExpertSlots, move_experts  # noqa: E402
from tests.support.fake_cuda import DEVICE, FakeCuda  # noqa: E402
from tests.support.model_engines import EXPERTS  # noqa: E402
from tests.support.small_llm import write_weights  # noqa: E402

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
SIZES: dict[str, Any] = {
    "pages": 64, "page_size": 16, "max_running_requests": 4, "context_tokens_max": 256, "cuda_graph_max_batch": 2,
    "dtype": "float32", "warm_up": False, "device": str(DEVICE), "piecewise_graph_max_tokens": 8,
}  # fmt: skip


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    monkeypatch.setattr(triton_trial, "_tried", lambda index: None)
    with FakeCuda(interpret=False) as one:
        yield one


@pytest.mark.parametrize("inference", [False, True])
def test_what_a_cpu_would_wait_for_is_found(gpu: FakeCuda, inference: bool) -> None:
    """In inference mode, too, in which torch dispatches some operations whole that it otherwise takes apart."""
    with torch.inference_mode(inference):
        waits_are_found(gpu)


def waits_are_found(gpu: FakeCuda) -> None:
    some = torch.arange(4, device=DEVICE)
    pinned = torch.empty(4, dtype=torch.int64, pin_memory=True)
    pinned.copy_(some, non_blocking=True)
    pinned.to(DEVICE, non_blocking=True)
    some[1:3] = 7
    some.add_(1)[:, None].sum(0)
    assert gpu.waits == []
    for wait in (
        lambda: some[0].item(),
        lambda: bool(some[0] > 1),
        lambda: int(some[1]),
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


def test_a_replay_copies_where_a_view_was_not_possible(gpu: FakeCuda) -> None:
    """`reshape` and `contiguous` give a view or a copy; inference mode dispatches them whole."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.inference_mode():
        given = torch.zeros(2, 3, device="cuda")
        with torch.cuda.stream(stream), torch.cuda.graph(graph):
            copied = given.movedim(0, 1).reshape(6)
            whole = given.movedim(0, 1).contiguous()
            viewed = given.reshape(6)
        given.copy_(torch.arange(6.0, device="cuda").view(2, 3))
        graph.replay()
        assert [one.tolist() for one in (copied, whole.view(6))] == [[0, 3, 1, 4, 2, 5]] * 2
        assert viewed.tolist() == [0, 1, 2, 3, 4, 5]


def test_what_depends_on_the_current_device_is_found() -> None:
    """It is cuda:0 in a new thread, whatever the thread has that started it."""
    with FakeCuda(interpret=False, devices=2) as gpu:
        with pytest.raises(RuntimeError, match="invalid device ordinal 2"):
            torch.ones(1, device="cuda:2")
        torch.cuda.set_device(1)
        with ThreadPoolExecutor(1) as pool:
            assert [one.device.index for one in (torch.ones(1, device="cuda"), torch.cuda.Stream())] == [1, 1]
            assert pool.submit(lambda: torch.ones(1, device="cuda").device.index).result() == 0
            assert pool.submit(lambda: torch.cuda.current_stream().device.index).result() == 0
        here, there = torch.arange(4, device="cuda:1"), torch.arange(4, device="cuda:0")
        with pytest.raises(RuntimeError, match="tensors of several devices"):
            here + there
        assert there.to("cuda:1", non_blocking=True).add_(here).cpu().tolist() == [0, 2, 4, 6]
        with torch.cuda.stream(torch.cuda.Stream("cuda:0")):
            assert torch.cuda.current_device() == 0
            with pytest.raises(RuntimeError, match="write_kv on cuda:0: argument 0 is a tensor of cuda:1"):
                write_kv[(1,)](here.float(), here.float(), here.float(), here.float(), here, 4, 4, D=4, BLOCK_D=4)
        assert torch.cuda.current_device() == 1
        event = torch.cuda.Event()
        event.record()
        with torch.cuda.device(0), pytest.raises(RuntimeError, match="an event of cuda:1 is recorded on a stream of"):
            event.record()
        assert gpu.launches["write_kv"] == 0


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


def test_experts_are_counted_in_graphs_and_read_without_a_wait(gpu: FakeCuda, tmp_path: Path) -> None:
    """Three decoding rows are padded to four in a graph; the padding is not counted."""
    write_weights(tmp_path, EXPERTS)
    sizes = {**SIZES, "context_tokens_max": 128, "cuda_graph_max_batch": 4, "grammar_backend": "none"}
    with LLM(tmp_path, **sizes, expert_load_interval=2) as llm:
        llm.start_expert_record()
        started = len(gpu.waits)
        llm.generate([[5, 6, 7, 8], [9, 10, 11], [12, 13]], Params(max_new_tokens=4, ignore_eos=True))
        served = gpu.waits[started:]
        record, replays = llm.expert_record(), llm.host.executor.graphs.replays
    assert served == []
    assert replays == 3
    tokens = 4 + 3 + 2 + 3 * 3  # of the prompts, and drawn ones but the last
    assert record.counts.sum(1).tolist() == [tokens * EXPERTS["num_experts_per_tok"]] * 2


def test_experts_move_without_a_wait_and_graphs_read_the_new_slots(gpu: FakeCuda) -> None:
    slots = ExpertSlots(4, 6, 0, 2, DEVICE)
    weights, experts = torch.zeros(3, 2, 2, device=DEVICE), torch.tensor([[2, 0], [2, 1]]).to(DEVICE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()), torch.cuda.graph(graph), torch.inference_mode():
        chosen = slots.slots_of(experts)
    before = len(gpu.waits)

    def all_to_all(rows: Any, sends: list[int], receives: list[int]) -> Any:
        assert sends == [0, len(rows)]
        return torch.ones(sum(receives), *rows.shape[1:], device=DEVICE)

    with torch.inference_mode():
        move_experts(slots, np.array([0, 2, 3, 1, 2, 3], np.int32), [weights], all_to_all)
        graph.replay()
    assert gpu.waits[before:] == []
    assert chosen.cpu().tolist() == [[1, 0], [4, 3]]
    assert weights.cpu()[:, 0, 0].tolist() == [0.0, 1.0, 1.0]  # experts 2 and 3 came from the other rank
