"""Decodes padded to the sizes of graphs equal unpadded ones, and a replay depends on its buffers alone.

Without a GPU, `EagerGraphs` runs the padded pass; `TracedGraphs` goes further: it records the tensor operations of one
pass, with the tensors at their places, and replays those. Values that Python computed are constants, as in a graph.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU runtime is not installed")

from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402

from lockstep.core.contract.errors import ConfigError  # noqa: E402
from lockstep.core.contract.events import RequestRetracted  # noqa: E402
from lockstep.core.journal.replay import fold, replay  # noqa: E402
from lockstep.host.loop import HostClock  # noqa: E402
from lockstep.runtime import LLM, Params  # noqa: E402
from lockstep.runtime.assembly import make_executor, make_pool  # noqa: E402
from lockstep.runtime.attention import make  # noqa: E402
from lockstep.runtime.graphs import (  # noqa: E402
    DecodeGraphs,
    EagerGraphs,
    Recorder,
    check_graph_mode,
    expected_bytes,
    graph_sizes,
)
from lockstep.runtime.models import build_model  # noqa: E402
from lockstep.runtime.overlap import CpuLane  # noqa: E402
from lockstep.runtime.tables import DeviceTables, ForwardPass  # noqa: E402
from tests.runtime.test_attention import flashinfer as flashinfer  # noqa: E402
from tests.runtime.test_host import RETRACTING, SETTINGS, random_requests  # noqa: E402
from tests.support.small_runtime import SAMPLED, SMALL_QWEN3, Answer, SmallRuntime, alone, small_config  # noqa: E402

CPU = torch.device("cpu")


class TracedGraphs:
    """Records the tensor operations of one call, and repeats them, as a CUDA graph would."""

    def record(self, run: Callable[[], None]) -> Callable[[], object]:
        run()

        def traced() -> tuple[()]:
            run()
            return ()

        recorded = make_fx(traced)()
        return lambda: recorded()


RECORDERS: dict[str, Callable[[], Recorder]] = {"eager": EagerGraphs, "traced": TracedGraphs}


def test_sizes_are_those_of_the_field() -> None:
    assert graph_sizes(1) == (1,)
    assert graph_sizes(3) == (1, 2, 3)
    assert graph_sizes(40) == (1, 2, 4, 8, 16, 24, 32, 40)
    assert graph_sizes(256)[-3:] == (240, 248, 256)
    assert graph_sizes(300)[-4:] == (256, 272, 288, 300)
    assert len(graph_sizes(512)) == 51
    with pytest.raises(ConfigError, match="`cuda_graph_max_batch` must be 1 or more, got `0`"):
        graph_sizes(0)


@pytest.mark.parametrize("recorder", RECORDERS)
@pytest.mark.parametrize("name", SETTINGS)
def test_every_request_is_answered_as_if_it_were_alone(name: str, recorder: str) -> None:
    """With the canary on, in any setting of the scheduler: mixed batches in between, several steps, retractions."""
    runtime = SmallRuntime(graphs=RECORDERS[recorder](), eos_token_ids=(5,), **SETTINGS[name])
    requests = random_requests(len(name), 14)
    answers = [runtime.submit(prompt, count) for prompt, count in requests]
    runtime.run()
    for answer, (prompt, count) in zip(answers, requests, strict=True):
        assert answer.tokens == alone(prompt, count, stops=(5,))
    assert bool(runtime.decided(RequestRetracted)) == (name in RETRACTING)
    graphs = runtime.executor.graphs
    assert graphs is not None
    decoding = sum(plan.mode == "decode" for plan in runtime.plans)
    assert graphs.replays >= decoding > 5
    assert graphs.replays < runtime.executor.forwards


def test_batches_larger_than_the_largest_graph_run_without() -> None:
    runtime = SmallRuntime(graphs=TracedGraphs(), graph_sizes=(1, 2, 3))
    requests = random_requests(3, 8)
    answers = [runtime.submit(prompt, count) for prompt, count in requests]
    runtime.run()
    assert [answer.tokens for answer in answers] == [alone(*one) for one in requests]
    assert runtime.executor.graphs is not None
    small = sum(plan.mode == "decode" and len(plan.rows) <= 3 for plan in runtime.plans)
    large = sum(plan.mode == "decode" and len(plan.rows) > 3 for plan in runtime.plans)
    assert runtime.executor.graphs.replays == small > 0
    assert large > 0


@pytest.mark.parametrize("recorder", RECORDERS)
def test_what_comes_beside_tokens_is_the_same(recorder: str) -> None:
    """Hidden states leave the buffer before the next replay overwrites it."""

    def run(graphs: Recorder | None) -> list[Answer]:
        runtime = SmallRuntime(graphs=graphs, overlap_depth=2)
        answers = [
            runtime.submit(prompt, count, return_hidden_states=True, sampling=SAMPLED, logprob_start=0)
            for prompt, count in random_requests(11, 6)
        ]
        runtime.run()
        return answers

    for found, expected in zip(run(RECORDERS[recorder]()), run(None), strict=True):
        assert found.tokens == expected.tokens
        assert found.logprobs == expected.logprobs
        assert found.extras is not None
        assert expected.extras is not None
        assert found.extras.prompt_logprobs == expected.extras.prompt_logprobs
        assert found.extras.hidden_states.keys() == expected.extras.hidden_states.keys()
        for position, states in expected.extras.hidden_states.items():
            np.testing.assert_array_equal(found.extras.hidden_states[position], states)


def test_padding_writes_to_the_scratch_page_only() -> None:
    """Three rows in a graph of eight, after one of eight: every other slot keeps its content."""
    runtime = SmallRuntime(graphs=TracedGraphs(), graph_sizes=(8,))
    executor = runtime.executor
    graphs, tables, pool = executor.graphs, executor.tables, executor.attention.pool  # type: ignore[attr-defined]
    assert graphs is not None
    tables.page_table[:8, :2] = torch.arange(16, dtype=torch.int32).view(8, 2)
    for rows, stops in ((np.arange(8), np.arange(1, 9)), (np.array([6, 0, 3]), np.array([5, 8, 2]))):
        one = ForwardPass(
            rows.astype(np.int32), (stops - 1).astype(np.int32), stops.astype(np.int32), 0, *_no_extends(rows)
        )
        tensors = _on_device(one)
        pool.values[0].fill_(-1.0)
        with torch.inference_mode():
            graphs.run(one, tensors)
        written = set(torch.nonzero(pool.values[0].view(-1) != -1.0)[:, 0].tolist())
        at = stops - 1
        slots = {int(8 * row + position) for row, position in zip(rows, at, strict=True)}
        padded = {pool.scratch_page * pool.page_size} if len(rows) < 8 else set()
        assert written == slots | padded


def _no_extends(rows: Any) -> tuple[Any, Any]:
    return np.empty(0, np.int32), np.arange(len(rows), dtype=np.int32)


def _on_device(one: ForwardPass) -> Any:
    class Given:
        rows = torch.from_numpy(one.rows)
        lengths = torch.from_numpy(one.stops)

    return Given


def test_a_page_table_that_grew_ends_the_graphs(caplog: pytest.LogCaptureFixture) -> None:
    """No graph reads the old table: decodes continue without graphs, and the log reports it once."""
    runtime = SmallRuntime(graphs=TracedGraphs())
    first = [runtime.submit(prompt, count) for prompt, count in random_requests(3, 4)]
    runtime.run()
    assert runtime.executor.graphs is not None
    replays = runtime.executor.graphs.replays
    runtime.executor.tables.width *= 2
    with caplog.at_level(logging.WARNING):
        second = [runtime.submit(prompt, count) for prompt, count in random_requests(4, 4)]
        runtime.run()
    assert [answer.tokens for answer in first] == [alone(*one) for one in random_requests(3, 4)]
    assert [answer.tokens for answer in second] == [alone(*one) for one in random_requests(4, 4)]
    assert replays == runtime.executor.graphs.replays > 0
    assert [record.message for record in caplog.records] == [
        "the page table grew to 48 pages a row; decodes run without graphs"
    ]


def test_a_capture_that_fails_reports_what_to_do() -> None:
    class Full:
        """Graphs with room for two sizes."""

        left = 2

        def record(self, run: Callable[[], None]) -> Callable[[], object]:
            if not self.left:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nand more")
            self.left -= 1
            return run

    with pytest.raises(ConfigError) as raised:
        SmallRuntime(graphs=Full())
    assert str(raised.value) == (
        "the CUDA graph of 2 rows could not be captured (2 of 4 were, up to 8 rows): OutOfMemoryError: CUDA out of "
        "memory. Tried to allocate 2.00 GiB.\nhint: --cuda-graph-max-batch N captures fewer, a smaller --mem-fraction "
        "leaves them more room, --no-cuda-graphs does without"
    )


def test_expected_bytes_share_the_pool_of_the_largest() -> None:
    assert expected_bytes([700, 20], 10) == 700 + 9 * 20
    assert expected_bytes([700], 1) == 700


# -------------------------------------------------------------------------------------------------------- real models

EXPERTS: dict[str, Any] = {
    **SMALL_QWEN3,
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
SMALL: dict[str, Any] = {"page_size": 4, "pages": 160, "chunked_prefill_size": 16, "max_running_requests": 12}


def hidden_states(config: dict[str, Any], backend: str, sizes: tuple[int, ...]) -> list[Any]:
    """Hidden states of two consecutive batches, of different rows and lengths, over a pool with arbitrary content."""
    torch.manual_seed(0)
    model = build_model(config, torch.float32, random_weights_seed=3)
    pool = make_pool(model, 40, 4)
    generator = torch.Generator().manual_seed(1)
    for kept in (*pool.keys, *pool.values):
        kept.normal_(generator=generator)
    tables = DeviceTables(6, 40, 4, CPU, context_tokens=20)
    tables.page_table[:6] = torch.randperm(40, generator=generator)[:30].view(6, 5)
    tables.newest[:6] = torch.tensor([5, 6, 7, 8, 9, 10])
    attention = make(backend, pool, model.heads, scale=model.scale)
    graphs = DecodeGraphs(model, attention, tables, sizes, EagerGraphs())
    graphs.prepare(CpuLane(HostClock()))
    found = []
    for rows, stops in (([4, 0, 2, 5], [9, 1, 14, 20]), ([1, 2, 0], [16, 15, 2])):
        ends = np.array(stops, np.int32)
        one = ForwardPass(np.array(rows, np.int32), ends - 1, ends, 0, *_no_extends(rows))
        with torch.inference_mode():
            found.append(graphs.run(one, _on_device(one)).clone())
    return found


@pytest.mark.parametrize("config", [SMALL_QWEN3, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("backend", ["reference", "triton", "flashinfer"])
def test_hidden_states_of_a_model_are_those_of_the_unpadded_pass(
    config: dict[str, Any], backend: str, request: pytest.FixtureRequest
) -> None:
    """Triton's kernels run in its interpreter, FlashInfer's wrappers are those of test_attention.

    Padding rows are in the same tiles and experts as the others.
    """
    if backend == "triton":
        pytest.importorskip("triton", reason="triton is not installed")
    if backend == "flashinfer":
        request.getfixturevalue("flashinfer")
    expected = hidden_states(config, "reference", (3, 4))
    for found, wanted in zip(hidden_states(config, backend, (8,)), expected, strict=True):
        torch.testing.assert_close(found, wanted, atol=2e-6, rtol=2e-6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("model")
    (path / "config.json").write_text(json.dumps(SMALL_QWEN3))
    return path


def test_an_llm_gives_the_same_and_decides_the_same(folder: Path, tmp_path: Path) -> None:
    """Sampled and greedy, with retractions, every KV slot verified; both runs replay."""
    prompts = [[3 + n, 17, 9, n] for n in range(9)]
    params = [Params(max_new_tokens=6 + n, temperature=n % 2 * 0.8, seed=n, ignore_eos=True) for n in range(9)]

    def run(mode: Any) -> tuple[list[list[int]], Any]:
        journal = tmp_path / mode
        with LLM(
            folder, random_weights=3, cuda_graphs=mode, debug=True, journal=journal, retract_every=5, **SMALL
        ) as llm:
            answers = llm.generate(prompts, params)
            graphs = llm.host.executor.graphs
        assert replay(journal).digest
        assert any(isinstance(event, RequestRetracted) for _, step in fold(journal) for event in step.decided)
        return [answer.token_ids for answer in answers], graphs

    plain, none = run("off")
    padded, graphs = run("eager")
    assert padded == plain
    assert none is None
    assert graphs.replays > 10
    assert graphs.sizes.tolist() == [1, 2, 4, 8, 12]


def test_graphs_of_a_model_depend_on_their_buffers_only(folder: Path) -> None:
    """The operations of the whole model, traced, with an attention of fixed width."""

    class FixedWidth:
        """Every row gathers its whole page table, and reads the positions below its length."""

        name, graphs = "fixed width", True

        def __init__(self, pool: Any) -> None:
            self.pool = pool

        def plan(self, batch: Any, graph: bool = False) -> None:
            assert not batch.extend_rows or not graph

        def run(self, layer: int, query: Any, key: Any, value: Any, batch: Any) -> Any:
            self.pool.write(layer, key, value, batch)
            counts = torch.from_numpy(batch.lengths_host - batch.starts_host)
            tables = batch.page_table.index_select(0, batch.rows).long()
            if batch.extend_rows:
                tables = tables.repeat_interleave(counts, 0)
            heads = query.shape[1] // self.pool.kv_heads
            dense = (len(tables), -1, self.pool.kv_heads, self.pool.head_dim)
            keys = self.pool.keys[layer][tables].view(dense).repeat_interleave(heads, 2)
            values = self.pool.values[layer][tables].view(dense).repeat_interleave(heads, 2)
            scores = torch.einsum("thd,tphd->thp", query, keys) * self.pool.head_dim**-0.5
            seen = torch.arange(keys.shape[1]) <= batch.positions[:, None]
            weights = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1)
            return torch.einsum("thp,tphd->thd", weights, values)

    def tokens(recorder: Recorder | None) -> list[list[int]]:
        config = small_config(pages=80)
        executor = make_executor(build_model(folder, random_weights_seed=3), config, CpuLane(HostClock()))
        pool = executor.attention.pool  # type: ignore[attr-defined]
        executor.attention = FixedWidth(pool)
        if recorder is not None:
            tables = DeviceTables(config.rows_max, config.pages, 4, CPU, context_tokens=config.context_tokens_max)
            executor.tables = tables
            executor.graphs = DecodeGraphs(executor.model, executor.attention, tables, (2, 5), recorder)
            executor.graphs.prepare(executor.lane)
        runtime = SmallRuntime(pages=80, check=False)
        runtime.host.executor = executor
        answers = [runtime.submit([token % 90 for token in prompt], count) for prompt, count in random_requests(2, 5)]
        runtime.run()
        if recorder is not None:
            assert executor.graphs is not None
            assert executor.graphs.replays > 10
        return [answer.tokens for answer in answers]

    assert tokens(TracedGraphs()) == tokens(None)


# ------------------------------------------------------------------------------------------------------------ options


def test_modes_that_cannot_be_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="`cuda_graphs` must be one of auto, on, off, eager, got `yes`"):
        LLM(folder, device="cpu", cuda_graphs="yes")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="`cuda_graphs` is on, which needs a CUDA device, this is `cpu`"):
        LLM(folder, device="cpu", cuda_graphs="on")
    with pytest.raises(ConfigError, match="`cuda_graph_max_batch` is 8, but there are no CUDA graphs on `cpu`"):
        LLM(folder, device="cpu", cuda_graph_max_batch=8)
    with pytest.raises(ConfigError, match="`cuda_graph_max_batch` is 8, but `cuda_graphs` is off"):
        check_graph_mode("off", torch.device("cuda"), 8)


def test_a_limit_of_rows_is_kept(folder: Path) -> None:
    with LLM(folder, random_weights=3, device="cpu", cuda_graphs="eager", cuda_graph_max_batch=4, **SMALL) as llm:
        assert llm.host.executor.graphs is not None
        assert llm.host.executor.graphs.sizes.tolist() == [1, 2, 4]
        llm.generate([[5 + n, 6] for n in range(7)], Params(max_new_tokens=5, ignore_eos=True))


def test_requests_are_answered_in_time_by_a_lane_that_runs_at_collection() -> None:
    runtime = SmallRuntime(graphs=TracedGraphs(), run_at="collection", overlap_depth=2)
    requests = random_requests(9, 10)
    answers = [runtime.submit(prompt, count) for prompt, count in requests]
    runtime.run()
    assert [answer.tokens for answer in answers] == [alone(*one) for one in requests]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_captured_decodes_report_the_same_on_a_gpu() -> None:
    """The demo model in float32 by Triton's kernels, every slot verified."""

    def run(mode: Any) -> tuple[list[list[int]], Any]:
        options: dict[str, Any] = {"dtype": "float32", "attention_backend": "triton", "debug": True}
        with LLM(device="cuda", cuda_graphs=mode, max_running_requests=12, pages=300, **options) as llm:
            prompts = [[3 + n, 17, 9, n] for n in range(9)]
            answers = llm.generate(prompts, [Params(max_new_tokens=9 + n, ignore_eos=True) for n in range(9)])
            return [answer.token_ids for answer in answers], llm.host.executor.graphs  # type: ignore[attr-defined]

    plain, none = run("off")
    captured, graphs = run("on")
    assert captured == plain
    assert none is None
    assert graphs.replays > 10
    assert graphs.bytes > 0
