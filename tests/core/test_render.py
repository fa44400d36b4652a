"""The texts of render.py, for every decided event and command; scenarios show the rest."""

from __future__ import annotations

import typing
from typing import Any

import numpy as np
import pytest

from lockstep.core.contract.commands import (
    AfterBatch,
    BatchPlan,
    CancelTransfer,
    Command,
    CompileGrammar,
    ControlAnswered,
    FinishRequest,
    FreezeHeap,
    LaunchBatch,
    LoadAdapter,
    MeasureExpertLoad,
    MoveExperts,
    ProposeBatch,
    RejectRequest,
    ReleaseDeviceMemory,
    ResumeDeviceMemory,
    SampleBatch,
    StartProfile,
    StartTransfer,
    Step,
    StopProfile,
    StreamTokens,
    SwapWeights,
)
from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.events import (
    AdapterEvicted,
    AdapterLoaded,
    AdmissionDeferred,
    BatchFinished,
    BlocksEvicted,
    ControlRequested,
    Decided,
    DecodeSkipped,
    DeferReason,
    Drain,
    EngineRestarted,
    ExpertsPlaced,
    Grammar,
    GrammarReady,
    HostPagesEvicted,
    LaneReady,
    LoadAdapterControl,
    MemorySwitched,
    Observed,
    PagesEvicted,
    PrefillCompleted,
    PrefillNegotiated,
    RanksAgreed,
    RequestAdmitted,
    RequestArrived,
    RequestCancelled,
    RequestFinished,
    RequestQueued,
    RequestRejected,
    RequestRetracted,
    SessionClosed,
    SessionYielded,
    TierOperationEnded,
    TierOperationStarted,
    TokenIds,
    TokenRuns,
    TokensForced,
    TransferMoved,
    TurnStarted,
    WeightsSwapped,
    Wish,
    decided_types,
)
from lockstep.core.contract.render import Names, command_line, decided_line, observed_line, plan_lines
from lockstep.core.contract.text import runs
from lockstep.core.scheduler.engine import Engine
from lockstep.core.scheduler.state_text import (
    debug_header,
    debug_line,
    debug_text,
    page_owner_lines,
    queue_line,
    table_lines,
)


def names() -> Names:
    known = Names()
    for request_id, label in ((0, "a"), (1, "b"), (2, "")):
        known.observe(arrived(request_id, label))
    known.observe(ControlRequested(0, 4, Drain()))
    return known


def arrived(request_id: int, label: str = "", prompt: int = 3, max_new: int = 3) -> RequestArrived:
    tokens = TokenRuns((10 * request_id + 1, prompt))
    return RequestArrived(time_us=0, request_id=request_id, prompt=tokens, max_new_tokens=max_new, label=label)


DECIDED = {
    "queued a with 9 prompt tokens, at most 1 output token": RequestQueued(0, 0, 9, 1),
    "rejected r2 (queue_full): too many": RequestRejected(0, 2, "queue_full", "too many"),
    "admitted b": RequestAdmitted(0, 1, 0, 0, 9, 0),
    "admitted b after 1.5 ms, 4 tokens cached": RequestAdmitted(0, 1, 0, 4, 9, 1500),
    "deferred b (rows): no row is free": AdmissionDeferred(0, 1, "rows"),
    "prefilled a in 2 chunks": PrefillCompleted(0, 0, 2),
    "retracted b after 5 output tokens, 3 pages back": RequestRetracted(0, 1, 5, 3, 0),
    "retracted b after 1 output token, 1 page back, 2 tokens discarded (pause)": RequestRetracted(
        0, 1, 1, 1, 2, "pause"
    ),
    "finished a with 7 output tokens (length)": RequestFinished(0, 0, "length", 7, 0),
    "evicted 1 page (decode)": PagesEvicted(0, 1, "decode"),
    "prompts wait, pass 2 (mixed, 1 rank could extend)": PrefillNegotiated(0, 4, "mixed", False, 1, 2, 80),
    "prompts go ahead after 1 pass (all, 4 ranks could extend)": PrefillNegotiated(0, 4, "all", True, 4, 1, 80),
    "skipped a decode: 1 page short, 2 on the way back": DecodeSkipped(0, 1, 2),
    "started a in session s with 9 prompt tokens, 5 of the session, at most 1 output token": TurnStarted(
        0, 0, "s", 5, 9, 1
    ),
    "session s yielded 1 page": SessionYielded(0, "s", 1),
    "closed session s with 12 tokens (timeout)": SessionClosed(0, "s", 12, "timeout"),
    "retracted b after 1 output token, 1 page back (preempted for a)": RequestRetracted(0, 1, 1, 1, 0, "preempted", 0),
    "place experts by load in 2 layers, 3 moves: 1.67 to 1.17 times the mean": ExpertsPlaced(0, 2, 3, 1667, 1167),
    "evicted law version 2 from slot 1": AdapterEvicted(0, "law", 2, 1),
    "transfer of a is ready (done)": TransferMoved(0, 0, "ready", "done"),
    "admitted b, 8 tokens cached, 4 of them from the host (2 from storage)": RequestAdmitted(0, 1, 0, 8, 9, 0, 0, 4, 2),
    "began load 3 of 1 page for b": TierOperationStarted(0, 3, "load", 1, 1),
    "ended write 2 (partial), 1 page kept": TierOperationEnded(0, 2, "write", "partial", 1),
    "evicted 2 pages from the host": HostPagesEvicted(0, 2),
    "evicted 2 window pages": BlocksEvicted(0, "window", 2),
    "evicted 1 checkpoint": BlocksEvicted(0, "state", 1),
    "evicted 1 checkpoint from the host": BlocksEvicted(0, "host state", 1),
}


@pytest.mark.parametrize("text", DECIDED)
def test_decided_event_in_one_line(text: str) -> None:
    assert decided_line(DECIDED[text], names()) == text


def test_every_decided_event_has_words() -> None:
    assert {type(event) for event in DECIDED.values()} == set(decided_types())


@pytest.mark.parametrize("reason", typing.get_args(DeferReason))
def test_every_reason_to_defer_has_words(reason: DeferReason) -> None:
    assert decided_line(AdmissionDeferred(0, 0, reason), names()).startswith(f"deferred a ({reason}): ")


def plan(**fields: object) -> BatchPlan:
    values: dict[str, typing.Any] = {
        "batch_id": 8,
        "mode": "decode",
        "rows": np.array([0, 3], np.int32),
        "request_ids": np.array([0, 1], np.int64),
        "starts": np.array([12, 4], np.int32),
        "stops": np.array([13, 5], np.int32),
        "sample_rows": np.array([0, 1], np.int32),
    }
    return BatchPlan(**(values | fields))


COMMANDS: dict[str, Command] = {
    "launch b8 decode a[12:13] b[4:5]": LaunchBatch(plan()),
    "launch b8 decode a[12:13] b[4:5], sampled in this step": LaunchBatch(plan(), sample="deferred"),
    "launch b8 decode a[12:13] b[4:5], sampled after b7": LaunchBatch(plan(sample_after=7), sample="deferred"),
    "sample b8, matcher a.1 takes 7..8": SampleBatch(8, ((0, 1, (7, 8)),)),
    "sample b8, no matcher moves": SampleBatch(8, ()),
    "compile json, json_schema": CompileGrammar(Grammar("json_schema", "{}", b"json")),
    "compile 00ff1020, regex": CompileGrammar(Grammar("regex", "a+", b"\x00\xff\x10\x20\x30")),
    "launch b8 decode a[12:13] b[4:5], samples b": LaunchBatch(plan(sample_rows=np.array([1], np.int32))),
    "launch b8 decode a[12:13] b[4:5], samples none": LaunchBatch(plan(sample_rows=np.array([], np.int32))),
    "stream a 3: 7..8, r2 0: 5": StreamTokens(
        np.array([0, 2], np.int64),
        np.array([3, 0], np.int32),
        np.array([2, 1], np.int32),
        np.array([7, 8, 5], np.int32),
    ),
    "close a (stop)": FinishRequest(0, "stop", 3, 4, 0),
    "refuse b (too_long)": RejectRequest(1, "too_long", "far too long"),
    "load law version 2 into slot 1": LoadAdapter("law", 2, 1),
    "answered drain 4: done": ControlAnswered(4, True),
    "answered control 5: refused, not idle": ControlAnswered(5, False, "not idle"),
    "propose 3 tokens for round 1": ProposeBatch(1, (3, 1, 1, 0)),
    "propose 0 tokens for round 1, and could extend": ProposeBatch(1, (0, 0, 0, 1), Wish(True, False, False, 2, 0, 9)),
    "swap weights to version 2 from file": SwapWeights(2, "file"),
    "give back the memory of kv_cache, weights": ReleaseDeviceMemory(("kv_cache", "weights")),
    "take the memory of weights again": ResumeDeviceMemory(("weights",)),
    "start the profiler": StartProfile(),
    "stop the profiler": StopProfile(),
    "freeze the heap": FreezeHeap(),
    "measure the load of experts": MeasureExpertLoad(),
    "move experts 3: layers 0 2": MoveExperts(3, (0, 2), np.zeros((2, 4), np.int32)),
    "receive a[4:9], room 7, slot 1, pages 3..4 9": StartTransfer(
        0, 7, "p0", "receive", np.array([3, 4, 9], np.int32), 4, stop_tokens=9, slot=1
    ),
    "send a[4:9] behind b8, room 7, slot 1, pages 3, the last part": StartTransfer(
        0, 7, "d0", "send", np.array([3], np.int32), 4, 8, stop_tokens=9, slot=1
    ),
    "cancel the transfer of a": CancelTransfer(0),
}


@pytest.mark.parametrize("text", COMMANDS)
def test_command_in_one_line(text: str) -> None:
    assert command_line(COMMANDS[text], names()) == text


OBSERVED: dict[str, Observed] = {
    "ranks agreed on round 3: 3+0 tokens": RanksAgreed(0, 3, ((3, 1, 1, 0), (0, 0, 0, 1))),
    "grammar g compiled": GrammarReady(0, b"g"),
    "grammar g did not compile: unbalanced": GrammarReady(0, b"g", "unbalanced"),
    "forced a 2 from output 3 on, b 1 from output 0 on": TokensForced(0, 0, ((0, 3, bytes(8)), (1, 0, bytes(4)))),
    "arrived a": arrived(0),
    "cancelled b": RequestCancelled(0, 1),
    "batch b3 finished": BatchFinished(0, 3),
    "batch b3 finished with error: lost": BatchFinished(0, 3, error="lost"),
    "law version 2 loaded": AdapterLoaded(0, "law", 2),
    "law version 2 not loaded: no room": AdapterLoaded(0, "law", 2, "no room"),
    "asked drain 4": ControlRequested(0, 4, Drain()),
    "restarted as generation 2": EngineRestarted(0, 2),
    "weights 2 swapped": WeightsSwapped(0, 2),
    "weights 2 not swapped: torn": WeightsSwapped(0, 2, "torn"),
    "memory of kv_cache given back": MemorySwitched(0, ("kv_cache",), True),
    "memory of kv_cache taken again": MemorySwitched(0, ("kv_cache",), False),
    "memory of kv_cache not switched: full": MemorySwitched(0, ("kv_cache",), False, "full"),
    "LaneReady(time_us=0, microbatch=0)": LaneReady(0),
}


@pytest.mark.parametrize("text", OBSERVED)
def test_observed_event_in_one_line(text: str) -> None:
    assert observed_line(OBSERVED[text], names()) == text


def test_plan_that_starts_after_a_batch_names_it() -> None:
    waiting = plan(starts_after=(AfterBatch(index=1, batch_id=7, row=3),))
    assert "  row 3 starts where b7 leaves row 3" in plan_lines(waiting, names())


def test_numbers_are_shown_as_runs_and_long_lists_are_cut() -> None:
    assert runs([1, 2, 3, 7, 9, 10]) == "1..3 7 9..10"
    assert runs([]) == ""
    assert runs(range(0, 100, 2)) == "0 2 4 6 8 10 12 14 and 42 more"


# ------------------------------------------------------------------------------------------------------ debug log


def engine_with(*requests: RequestArrived, **settings: Any) -> tuple[Engine, list[str]]:
    """An engine with these requests waiting, and the debug lines of a run of it."""
    values = {"page_size": 2, "pages": 8, "overlap_depth": 0, "max_running_requests": 2, **settings}
    engine = Engine(SchedConfig(**values))
    for event in requests:
        engine.step(event)
    lines = []
    for turn in range(20):
        ready = LaneReady(2800 * turn, turn % engine.config.microbatches)
        step = engine.step(ready)
        lines.append(debug_line(engine, ready, step))
        launched = step.launched()
        if launched is None:
            break
        tokens = np.zeros(len(launched.sample_rows), np.int32).tobytes()
        finished = BatchFinished(2800 * turn, launched.batch_id, tokens)
        lines.append(debug_line(engine, finished, engine.step(finished)))
    return engine, lines


def test_debug_line_has_time_batch_letters_and_pages() -> None:
    _, lines = engine_with(arrived(0, "a", max_new=2), arrived(1, "b", max_new=1), arrived(2, "c", max_new=1))
    assert lines[0] == "     0.0  b0 extend 6t       E E w      ####.... 4/8"
    assert lines[1].split()[1:4] == [":", ".", "w"]
    assert lines[2].split()[:6] == ["2.8", "b1", "extend", "3t", ":", "E"]


def test_debug_line_counts_when_there_are_too_many_to_show() -> None:
    _, lines = engine_with(*(arrived(i, prompt=1, max_new=1) for i in range(60)))
    assert "E2 w58" in lines[0]
    _, lines = engine_with(*(arrived(i, prompt=1, max_new=1) for i in range(41)))
    assert "E2 w39" in lines[0]
    _, lines = engine_with(*(arrived(i, prompt=1, max_new=1) for i in range(40)))
    assert "E E " + " ".join("w" * 38) in lines[0]


def test_debug_line_distinguishes_decodes_from_prompts_of_the_same_batch() -> None:
    requests = [arrived(0, "a", max_new=3), arrived(1, "b", prompt=4, max_new=1)]
    _, lines = engine_with(*requests, batching="mixed", max_prefill_tokens=4)
    assert [line.split()[1:6] for line in lines[0:3:2]] == [
        ["b0", "extend", "3t", "E", "w"],
        ["b1", "mixed", "3t", "D", "E"],
    ]
    _, lines = engine_with(requests[0])
    assert [line.split()[4] for line in lines[0:5:2]] == ["E", "D", "D"]


def test_debug_line_marks_retracted_requests() -> None:
    _, lines = engine_with(
        arrived(0, "a", prompt=4, max_new=6),
        arrived(1, "b", prompt=4, max_new=6),
        pages=6,
        reserve="on_demand",
        batching="mixed",
    )
    assert [line[29:38].split() for line in lines if " r " in line] == [["D", "r"]]


def test_debug_line_names_the_microbatch_behind_the_first() -> None:
    requests = [arrived(0, "a", max_new=1), arrived(1, "b", max_new=1)]
    _, lines = engine_with(*requests, pp_size=2, max_prefill_tokens=4)
    assert [line.split()[1:5] for line in lines[0:3:2]] == [["b0", "extend", "3t", "E"], ["b1", "extend", "3t", "m1"]]


@pytest.mark.parametrize(
    ("pages", "prompt", "bar"), [(16, 12, "===....."), (16, 11, "===....."), (4, 4, "==.."), (24, 2, "=.......")]
)
def test_debug_line_shows_the_share_of_cached_pages(pages: int, prompt: int, bar: str) -> None:
    """The share is rounded up: one page of many is seen."""
    _, lines = engine_with(arrived(0, prompt=prompt, max_new=1), pages=pages)
    assert bar in lines[-1].split()


def test_debug_header_names_the_columns() -> None:
    engine = Engine(SchedConfig())
    for request_id, label in enumerate(["a", "b", ""]):
        engine.step(arrived(request_id, label))
    assert debug_header(engine, Step()).split() == ["t_ms", "batch", "a", "b", "r", "pages", "free"]


def test_debug_levels_add_decisions_then_tables_then_pages() -> None:
    engine = Engine(SchedConfig(page_size=2, pages=8, max_running_requests=1))
    engine.step(arrived(0, "a"))
    engine.step(arrived(1, "b"))
    event = LaneReady(0)
    step = engine.step(event)
    texts = [[line.strip() for line in debug_text(engine, event, step, names(), level)] for level in (1, 2, 3, 4)]
    assert texts[0] == ["0.0  b0 extend 3t       E w        ##...... 6/8"]
    assert texts[1] == [*texts[0], "LaneReady(time_us=0, microbatch=0)", "admitted a", *texts[1][3:]]
    assert texts[2] == [
        *texts[1],
        "waiting b",
        "row 0 a running computed 3 outputs 0 pages 0 1",
        "in flight b0 extend a[0:3]",
    ]
    assert texts[3] == [*texts[2], "pages of free: 2..7", "pages of a: 0..1", "tree is empty"]


def test_debug_tables_have_the_adapter_slots() -> None:
    engine = Engine(SchedConfig(page_size=2, pages=8, max_loras=1))
    event = ControlRequested(0, 1, LoadAdapterControl("law", 1))
    step = engine.step(event)
    texts = [[line.strip() for line in debug_text(engine, event, step, names(), level)] for level in (2, 3)]
    assert "slot 0 free" not in texts[0]
    assert texts[1][-1] == "slot 0 free"


def test_state_of_an_empty_engine_reads_as_empty() -> None:
    engine = Engine(SchedConfig(page_size=2, pages=4))
    assert table_lines(engine, names()) == ["table is empty"]
    assert queue_line(engine, names()) == "waiting none"
    assert page_owner_lines(engine, names()) == ["pages of free: 0..3"]


@pytest.mark.parametrize(
    ("prompt_tokens", "pages"), [(8, "0* 1*"), (9, "0* 1* 2"), (16 * 4, " ".join(f"{i}*" for i in range(16)))]
)
def test_pages_of_a_row_are_named_one_by_one(prompt_tokens: int, pages: str) -> None:
    assert table_with_one_prompt(prompt_tokens).endswith(f"pages {pages}")


@pytest.mark.parametrize(("prompt_tokens", "pages"), [(17 * 4, "0..16 cached"), (33 * 4 + 1, "0..32 cached, 33")])
def test_many_pages_of_a_row_are_named_as_runs(prompt_tokens: int, pages: str) -> None:
    assert table_with_one_prompt(prompt_tokens).endswith(f"pages {pages}")


def table_with_one_prompt(tokens: int) -> str:
    """The line of a request whose prompt was computed in one batch."""
    engine = Engine(SchedConfig(pages=64, page_size=4, overlap_depth=0))
    prompt = TokenIds(np.arange(tokens, dtype=np.int32).tobytes())
    engine.step(RequestArrived(0, request_id=1, prompt=prompt, max_new_tokens=5))
    engine.step(LaneReady(0))
    result = BatchFinished(10, batch_id=0, tokens=np.array([7], np.int32).tobytes(), started_us=0, finished_us=10)
    engine.step(result)
    (line,) = table_lines(engine, names())
    return line


def test_decided_lines_never_raise_for_unknown_requests() -> None:
    for event in DECIDED.values():
        assert isinstance(event, Decided)
        assert decided_line(event, Names())
