"""Engine.step where a scenario would not show it as well: refused events, unchanged state, resumed state."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from lockstep.core.contract.commands import ControlAnswered, FinishRequest, RejectRequest, Step, StreamTokens
from lockstep.core.contract.config import BlockDiffusion, SchedConfig
from lockstep.core.contract.digest import EMPTY_DIGEST, step_digest
from lockstep.core.contract.errors import ContractError
from lockstep.core.contract.events import (
    AdapterLoaded,
    AdmissionDeferred,
    BatchFinished,
    ControlRequested,
    EngineRestarted,
    ExpertLoadMeasured,
    HostCopyFinished,
    LaneReady,
    MediaEncoded,
    Observed,
    Pause,
    PrefetchFinished,
    PromptSpan,
    RanksAgreed,
    RequestArrived,
    RequestCancelled,
    RequestFinished,
    RequestRejected,
    RequestRetracted,
    SamplingParams,
    StorageWritten,
    SwitchRole,
    TokenDigest,
    TokenIds,
    TokenRuns,
    TransferAdvanced,
)
from lockstep.core.journal import snapshot
from lockstep.core.scheduler.engine import Engine
from tests.support.tagged_kv import TaggedKv

CONFIG = SchedConfig(page_size=2, pages=16, overlap_depth=1)


def arrived(request_id: int, prompt: int = 3, max_new: int = 4, time_us: int = 0, **fields: object) -> RequestArrived:
    tokens = TokenRuns((100 * request_id + 1, prompt))
    event = RequestArrived(time_us=time_us, request_id=request_id, prompt=tokens, max_new_tokens=max_new)
    return msgspec.structs.replace(event, **fields)


def decoding(config: SchedConfig = CONFIG) -> tuple[Engine, TaggedKv]:
    """An engine at 100 us with r0 and r1 decoding, b0 delivered and b1 in flight."""
    engine, kv = Engine(config), TaggedKv(config)
    for event in (arrived(0), arrived(1), LaneReady(0), LaneReady(0)):
        fold(engine, kv, event)
    fold(engine, kv, kv.finished(100))
    return engine, kv


def fold(engine: Engine, kv: TaggedKv, event: Observed) -> Step:
    step = engine.step(event)
    kv.observe(event, step)
    return step


def run_to_end(engine: Engine, kv: TaggedKv) -> list[Step]:
    """Launch as long as batches are launched, then collect, until nothing is in flight."""
    steps = []
    for _ in range(1000):
        steps.append(fold(engine, kv, LaneReady(engine.now_us)))
        while steps[-1].launched() is not None:
            steps.append(fold(engine, kv, LaneReady(engine.now_us)))
        if not kv.stream:
            return steps
        steps.append(fold(engine, kv, kv.finished(engine.now_us)))
    raise AssertionError("the run did not come to an end")


# ----------------------------------------------------------------------------------------------- impossible facts

TWO_TOKENS = np.zeros(2, np.int32).tobytes()

IMPOSSIBLE: dict[str, tuple[Observed, str]] = {
    "time runs backwards": (LaneReady(99), "time ran backwards: 99 us after 100 us"),
    "a result that was not launched": (
        BatchFinished(100, 2, TWO_TOKENS),
        "batch 2 finished, but batch 1 is next in flight",
    ),
    "a result that came already": (BatchFinished(100, 0, TWO_TOKENS), "batch 0 finished, but batch 1 is next"),
    "too few tokens": (BatchFinished(100, 1, TWO_TOKENS[4:]), "batch 1 has 4 bytes of tokens, expected 8"),
    "too many tokens": (BatchFinished(100, 1, TWO_TOKENS * 2), "batch 1 has 16 bytes of tokens, expected 8"),
    "tokens of a failed batch": (BatchFinished(100, 1, TWO_TOKENS, error="lost"), "expected 0"),
    "a request id again": (arrived(1, time_us=100), "request id 1 does not increase after 1"),
    "a request id below": (arrived(0, time_us=100), "request id 0 does not increase after 1"),
    "a microbatch": (LaneReady(100, microbatch=1), "no pipeline stages"),
    "grammar of a plain row": (BatchFinished(100, 1, TWO_TOKENS, grammar_ended=(0,)), "it has none"),
    "text of a plain row": (BatchFinished(100, 1, TWO_TOKENS, text_stops=(1,)), "without stop texts"),
    "an invalid token of a failed batch": (
        BatchFinished(100, 1, b"", error="lost", invalid=(0,)),
        "names sampling row 0 of 0",
    ),
    "held text of a plain row": (BatchFinished(100, 1, TWO_TOKENS, text_held=((1, 1),)), "without stop texts"),
    "AdapterLoaded": (AdapterLoaded(100, "x", 1), "AdapterLoaded belongs to a feature"),
    "TransferAdvanced": (TransferAdvanced(100, 1, "x", 0, 0, "done"), "TransferAdvanced belongs to a feature"),
    "HostCopyFinished": (HostCopyFinished(100, 1, 1), "HostCopyFinished belongs to a feature"),
    "PrefetchFinished": (PrefetchFinished(100, 1, 1), "PrefetchFinished belongs to a feature"),
    "StorageWritten": (StorageWritten(100, 1, 1), "StorageWritten belongs to a feature"),
    "MediaEncoded": (MediaEncoded(100, b"\1"), "media 01 were encoded, but nothing asked for that"),
    "media of a generation to come": (MediaEncoded(100, b"\1", generation=1), "generation 1, but this is generation 0"),
    "RanksAgreed": (RanksAgreed(100, 0, ()), "RanksAgreed belongs to a feature"),
    "ExpertLoadMeasured": (ExpertLoadMeasured(100, 1, b""), r"0 bytes are no int64 \[1, experts\]"),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_impossible_fact_is_refused_and_changes_nothing(name: str) -> None:
    event, message = IMPOSSIBLE[name]
    engine, _ = decoding()
    before = snapshot.dump(engine)
    with pytest.raises(ContractError, match=message):
        engine.step(event)
    assert snapshot.dump(engine) == before


def test_result_of_an_older_generation_changes_nothing_but_the_clock() -> None:
    engine, _ = decoding()
    engine.step(EngineRestarted(100, generation=1))
    step = engine.step(BatchFinished(101, 1, TWO_TOKENS, generation=0))
    assert not step.decided
    assert not step.commands
    assert engine.now_us == 101


def test_late_cancel_of_an_unknown_id_is_ignored() -> None:
    engine, _ = decoding()
    step = engine.step(RequestCancelled(100, 77))
    assert not step.decided
    assert not step.commands


def test_namespace_with_a_zero_character_is_rejected() -> None:
    """It would change the parts that the core appends to a namespace, such as the version of the weights."""
    (rejected,) = Engine(CONFIG).step(arrived(0, namespace="x\0001")).decided
    assert isinstance(rejected, RequestRejected)
    assert rejected.reason == "bad_request"
    assert "`namespace` holds a zero character" in rejected.message


# ------------------------------------------------------------------------------------------------- admission


def test_refused_admission_leaves_no_trace() -> None:
    """An engine that refuses r2, whose prefix is cached, stays equal to one that never received r2."""
    config = SchedConfig(page_size=2, pages=8, overlap_depth=0)
    cached = TokenIds(np.array([1, 2, 3, 4], np.int32).tobytes())  # the prompt of r0
    engines = []
    for refuses in (False, True):
        engine, kv = Engine(config), TaggedKv(config)
        fold(engine, kv, arrived(0, prompt=4, max_new=1))
        run_to_end(engine, kv)
        fold(engine, kv, arrived(1, prompt=6, max_new=7, ignore_eos=True))
        fold(engine, kv, LaneReady(0))
        if refuses:
            fold(engine, kv, msgspec.structs.replace(arrived(2, max_new=6), prompt=cached))
        for _ in range(3):
            fold(engine, kv, kv.finished(0))
            step = fold(engine, kv, LaneReady(0))
            assert step.launched() is not None
        engines.append(engine)
    without, refusing = engines
    assert refusing.deferred == (2, "kv_budget")
    assert traces(refusing) == traces(without)


def traces(engine: Engine) -> list[object]:
    """All state that an admission changes."""
    return [
        engine.memory.pool.dump(),
        engine.memory.radix.dump(),
        engine.memory.table.free_rows,
        engine.positions.tolist(),
        [request.request_id for request in engine.running_batch.requests],
        engine.active,
        engine.memory.deferred.rows,
        engine.memory.rewrites,
        engine.memory.rows_taken,
        engine.ratio.value,
    ]


UNSUPPORTED: dict[str, object] = {
    "adapter": "law",
    "transfer_room": 0,
    "prompt": TokenDigest(3, b""),
}


@pytest.mark.parametrize("field", UNSUPPORTED)
def test_unsupported_field_is_rejected_by_its_name(field: str) -> None:
    engine = Engine(CONFIG)
    event = msgspec.structs.replace(arrived(0), **{field: UNSUPPORTED[field]})
    step = engine.step(event)
    (rejected,) = step.decided
    assert isinstance(rejected, RequestRejected)
    assert rejected.reason == "unsupported"
    assert f"`{field}`" in rejected.message
    assert [type(command) for command in step.commands] == [RejectRequest]
    assert not engine.requests


def test_samples_take_their_ids_whether_accepted_or_not() -> None:
    engine = Engine(CONFIG)
    engine.step(arrived(0, parallel_samples=4))
    with pytest.raises(ContractError, match="request id 3 does not increase after 3"):
        engine.step(arrived(3))
    assert list(engine.requests) == [0, 1, 2, 3]
    step = engine.step(arrived(4, parallel_samples=3, adapter="law"))
    assert [command.request_id for command in step.commands if isinstance(command, RejectRequest)] == [4, 5, 6]
    with pytest.raises(ContractError):
        engine.step(arrived(6))
    engine.step(arrived(7, parallel_samples=10**9))
    engine.step(arrived(8))
    assert 8 in engine.requests


def test_logprobs_are_taken_in_when_they_were_asked_for() -> None:
    for asked in ({"logprob_start": 3}, {"sampling": SamplingParams(top_logprobs=1)}):
        engine = Engine(CONFIG)
        engine.step(arrived(0))
        engine.step(LaneReady(0))
        engine.step(arrived(1, **asked))
        engine.step(LaneReady(0))
        result = BatchFinished(0, 0, bytes(4), logprobs=bytes(4))
        with pytest.raises(ContractError, match="batch 0 reports logprobs; none were asked for"):
            engine.step(result)
        engine.step(msgspec.structs.replace(result, logprobs=b""))
        engine.step(msgspec.structs.replace(result, batch_id=1))


def test_plan_has_the_extras_of_each_token_of_a_row() -> None:
    engine = Engine(CONFIG)
    engine.step(arrived(0))
    engine.step(arrived(1, logprob_start=3, return_hidden_states=True, token_type_ids=b"\0\1\1"))
    plan = engine.step(LaneReady(0)).launched()
    assert plan is not None
    ordinary, special = plan.rows_taken
    assert (ordinary.logprobs, ordinary.hidden_states, ordinary.token_type_ids) == (False, False, b"")
    assert (special.logprobs, special.hidden_states, special.token_type_ids) == (True, True, b"\0\1\1")


def test_only_requests_for_more_than_kv_or_with_embeddings_need_an_extend_without_decodes() -> None:
    given, image = (PromptSpan(0, 1, "embedding", bytes(32)),), (PromptSpan(0, 1, "image", bytes(32), 1),)
    score: dict[str, object] = {"kind": "score", "max_new_tokens": 0}
    kinds: tuple[dict[str, object], ...] = (
        {},
        score,
        {"logprob_start": 0},
        {"return_hidden_states": True},
        {"spans": given},
        {"spans": image},
    )
    engine = Engine(CONFIG)
    for i, asked in enumerate(kinds):
        engine.step(arrived(i, **asked))
    assert [request.needs_plain_extend for request in engine.requests.values()] == [
        False,
        False,
        True,
        True,
        True,
        False,
    ]


def test_role_is_switched_when_idle_only() -> None:
    engine = Engine(CONFIG)
    assert engine.step(ControlRequested(0, 3, SwitchRole("decode"))).commands == [ControlAnswered(3, True)]
    engine.step(arrived(0, transfer_room=4))
    (answer,) = engine.step(ControlRequested(0, 4, SwitchRole("mixed"))).commands
    message = "not idle: 1 requests, 0 batches in flight, 1 transfers; drain first"
    assert answer == ControlAnswered(4, False, message)


def test_engine_that_became_a_decode_engine_continues_prompts_of_others() -> None:
    engine = Engine(CONFIG)
    engine.step(ControlRequested(0, 3, SwitchRole("decode")))
    engine.step(arrived(0, transfer_room=4))
    engine.step(TransferAdvanced(0, 0, "p0", 0, 0, "done", first_token=7))
    plan = engine.step(LaneReady(0)).launched()
    assert plan is not None
    assert (plan.mode, plan.starts.tolist(), plan.stops.tolist()) == ("prebuilt", [3], [4])


def test_prompts_that_only_have_to_be_sent_leave_their_places_to_others() -> None:
    """Two prompts are computed by one batch. Two more start while both are sent; one that waits behind is queued."""
    places: dict[str, Any] = {"max_running_requests": 2, "request_rows": 8, "max_queued_requests": 2}
    engine = Engine(SchedConfig(page_size=2, pages=32, overlap_depth=0, role="prefill", radix_cache=False, **places))

    def arrive(request_id: int) -> None:
        assert engine.step(arrived(request_id, transfer_room=request_id)).commands == []
        engine.step(TransferAdvanced(0, request_id, "d0", 0, 0, "accepted"))

    for request_id in range(3):
        arrive(request_id)
    assert engine.step(LaneReady(0)).launched() is not None
    assert engine.step(LaneReady(0)).launched() is None
    assert engine.active == 2
    ended = [isinstance(one, FinishRequest) for one in engine.step(BatchFinished(0, 0, TWO_TOKENS)).commands]
    assert (any(ended), engine.sending) == (False, 2)
    for request_id in (3, 4):
        arrive(request_id)
    plan = engine.step(LaneReady(0)).launched()
    assert plan is not None
    assert plan.request_ids.tolist() == [2, 3]


def test_session_start_without_a_session_is_refused() -> None:
    (rejected,) = Engine(CONFIG).step(arrived(0, session_start=2)).decided
    assert isinstance(rejected, RequestRejected)
    assert rejected.reason == "bad_request"


# ------------------------------------------------------------------------------------------------- plans and memory


@pytest.mark.parametrize(
    ("settings", "max_new", "reserved", "opens"),
    [
        ({"reserve": "on_demand"}, 9, 0, 0),  # position 3 is on the second page of the prompt
        ({"reserve": "on_demand", "decode_look_ahead": 2}, 9, 2, 1),  # position 4 is not
        ({"page_size": 8, "context_tokens_max": 64, "diffusion": BlockDiffusion(8)}, 1, 0, 0),  # a block ends behind it
        ({}, 9, 8, 0),  # all output behind the first token
    ],
)
def test_tokens_are_reserved_for_the_output_to_come(
    settings: dict[str, Any], max_new: int, reserved: int, opens: int
) -> None:
    engine = Engine(SchedConfig(**{"page_size": 2, "pages": 16, "overlap_depth": 0, **settings}))
    engine.step(arrived(0, max_new=max_new, ignore_eos=True))
    assert engine.step(LaneReady(0)).launched() is not None
    assert engine.reserve_of(*engine.all_running) == reserved
    assert engine.next_pages(*engine.all_running) == opens


@pytest.mark.parametrize(
    ("settings", "most"),
    [
        ({}, 1),
        ({"decode_steps_per_launch": 3}, 3),
        ({"speculative_method": "eagle", "num_speculative_tokens": 3}, 4),
        ({"speculative_method": "eagle", "speculative_topk": 2, "num_speculative_tokens": 8}, 5),
    ],
)
def test_a_launch_moves_a_request_by_its_steps_or_by_its_drafts(settings: dict[str, Any], most: int) -> None:
    config = SchedConfig(page_size=2, pages=32, overlap_depth=0, **settings)
    engine, kv = Engine(config), TaggedKv(config)
    fold(engine, kv, arrived(0, max_new=30, ignore_eos=True))
    fold(engine, kv, LaneReady(0))
    fold(engine, kv, kv.finished(0))
    plan = fold(engine, kv, LaneReady(0)).launched()
    assert plan is not None
    assert (plan.stops - plan.starts).tolist() == [most]
    assert engine.moves_by == most


def test_no_tokens_are_reserved_for_what_the_spare_pages_of_draft_trees_hold() -> None:
    trees: dict[str, Any] = {"speculative_method": "eagle", "speculative_topk": 2, "num_speculative_tokens": 8}
    config = SchedConfig(page_size=2, pages=32, overlap_depth=0, **trees)
    engine, kv = Engine(config), TaggedKv(config)
    fold(engine, kv, arrived(0, max_new=30, ignore_eos=True))
    for _ in range(2):
        fold(engine, kv, LaneReady(0))
        fold(engine, kv, kv.finished(0))
    running_batch, (position,) = engine.all_running
    (spare,) = engine.memory.table.spare_of(running_batch.rows)
    assert spare > 1
    assert engine.reserve_of(*engine.all_running) == 3 + 30 - position - 1 - 2 * spare


@pytest.mark.parametrize("overlap_depth", [0, 1, 2])
def test_plan_is_never_changed_after_its_launch(overlap_depth: int) -> None:
    config = SchedConfig(page_size=2, pages=24, overlap_depth=overlap_depth, chunked_prefill_size=4)
    engine, kv = Engine(config), TaggedKv(config)
    for request_id in range(5):
        fold(engine, kv, arrived(request_id, prompt=3 + request_id, max_new=3 + 2 * request_id))
    run_to_end(engine, kv)
    assert kv.forwards > 10
    kv.check_plans_unchanged()


def test_plan_arrays_are_not_those_the_engine_moves() -> None:
    engine, kv = decoding()
    plan = kv.launched[-1].plan
    for moving in (engine.positions, engine.memory.table.pages, engine.memory.table.outputs):
        for fixed in (plan.starts, plan.rows, plan.deltas.pages, plan.token_ids):
            assert not np.shares_memory(moving, fixed)


def test_last_request_that_outgrows_the_pool_ends_with_out_of_kv() -> None:
    """Its tokens are streamed before its end, and the same step launches a request that waits for its pages."""
    config = SchedConfig(page_size=2, pages=8, overlap_depth=0, radix_cache=False, stream_interval=9)
    engine, kv = Engine(config), TaggedKv(config)
    fold(engine, kv, arrived(0, prompt=2, max_new=12))
    fold(engine, kv, LaneReady(0))
    engine.memory.pool.alloc(6)  # as if the check at entry had assumed a larger pool
    fold(engine, kv, arrived(1, prompt=3, max_new=2))
    steps = run_to_end(engine, kv)
    (end,) = [
        step
        for step in steps
        if any(isinstance(event, RequestFinished) and event.reason == "out_of_kv" for event in step.decided)
    ]
    plan = end.launched()
    assert plan is not None
    assert plan.request_ids.tolist() == [1]
    streamed = [command for step in steps for command in step.commands if isinstance(command, StreamTokens)]
    assert sum(int(command.token_counts[command.request_ids == 0].sum()) for command in streamed) == 3
    assert not engine.requests

    fold(engine, kv, arrived(2, prompt=2, max_new=2))  # the engine continues
    steps = run_to_end(engine, kv)
    assert any(isinstance(command, FinishRequest) for step in steps for command in step.commands)


# ------------------------------------------------------------------------------------------------- snapshots


def events_of_a_busy_run() -> tuple[SchedConfig, list[Observed]]:
    """A recorded run with chunks, stops, a cancel, a retraction and a restart."""
    config = SchedConfig(page_size=2, pages=20, overlap_depth=2, chunked_prefill_size=4, retract_every=5)
    engine, kv = Engine(config), TaggedKv(config)
    events: list[Observed] = []

    def take(event: Observed) -> Step:
        events.append(event)
        return fold(engine, kv, event)

    for request_id in range(6):
        take(arrived(request_id, prompt=2 + 2 * request_id, max_new=4 + request_id, stream=request_id % 2 == 0))
    for turn in range(120):
        take(LaneReady(turn))
        if turn % 2 and kv.stream:
            take(kv.finished(turn))
        if turn == 9:
            take(RequestCancelled(turn, 2))
        if turn == 15:
            take(EngineRestarted(turn, 1))
    assert not engine.requests
    return config, events


@pytest.mark.parametrize(
    ("event", "telling", "deciding"),
    [
        (RequestRetracted(5, 1, 2, 3, 4), {"needed_pages": 7, "available_pages": 6}, {"pages_freed": 4}),
        (RequestRetracted(5, 1, 2, 3, 4, "preempted", 9), {"needed_pages": 7}, {"beneficiary": 8}),
        (AdmissionDeferred(5, 1, "running_limit"), {"limit": 64}, {"needed_tokens": 64}),
        (AdmissionDeferred(5, 1, "prefix", behind=4), {"limit": 64}, {"behind": -1}),
    ],
)
def test_a_field_that_is_only_a_reason_leaves_the_digest_unchanged(
    event: RequestRetracted | AdmissionDeferred, telling: dict[str, int], deciding: dict[str, int]
) -> None:
    def digest(decided: RequestRetracted | AdmissionDeferred) -> bytes:
        return step_digest(EMPTY_DIGEST, Step(time_us=5, decided=[decided]))

    assert digest(msgspec.structs.replace(event, **telling)) == digest(event)
    assert digest(msgspec.structs.replace(event, **deciding)) != digest(event)


def test_restored_engine_goes_on_with_equal_digests_from_every_point() -> None:
    config, events = events_of_a_busy_run()
    engine = Engine(config)
    dumps, digests = [], []
    for event in events:
        dumps.append(snapshot.dump(engine))
        digests.append(engine.step(event).digest)
    for point in range(0, len(events), 7):
        restored = snapshot.restore(dumps[point])
        assert snapshot.dump(restored) == dumps[point]
        assert [restored.step(event).digest for event in events[point:]] == digests[point:]


def test_equal_events_give_equal_steps() -> None:
    config, events = events_of_a_busy_run()
    one, other = Engine(config), Engine(config)
    for event in events:
        assert one.step(event).digest == other.step(event).digest
    assert snapshot.dump(one) == snapshot.dump(other)


def test_streams_have_neither_gap_nor_double() -> None:
    config, events = events_of_a_busy_run()
    engine = Engine(config)
    sent: dict[int, int] = {}
    for event in events:
        for command in engine.step(event).commands:
            if isinstance(command, StreamTokens):
                columns = (command.request_ids, command.offsets, command.token_counts)
                for request_id, offset, count in zip(*(column.tolist() for column in columns), strict=True):
                    assert offset == sent.get(request_id, 0)
                    sent[request_id] = offset + count
            if isinstance(command, FinishRequest):
                assert command.output_tokens >= sent.get(command.request_id, 0)
                if command.reason == "length":
                    assert command.output_tokens == sent[command.request_id]


def test_bytes_that_are_no_snapshot_are_refused() -> None:
    with pytest.raises(ValueError, match="not a snapshot"):
        snapshot.restore(b"\x93\x01\x02")


def test_snapshot_with_a_field_of_another_version_is_refused() -> None:
    fields = msgspec.msgpack.decode(snapshot.dump(Engine(CONFIG)))
    assert snapshot.restore(msgspec.msgpack.encode(fields)).config == CONFIG
    with pytest.raises(ValueError, match="not a snapshot of an engine: Object contains unknown field `later`"):
        snapshot.restore(msgspec.msgpack.encode(fields | {"later": 1}))


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (AdapterLoaded(6, "law", 1), "AdapterLoaded belongs to a feature"),
        (BatchFinished(6, 0, b""), "batch 0 finished, but nothing is next in flight"),
    ],
)
def test_fact_refused_on_an_idle_device_changes_nothing_either(event: Observed, message: str) -> None:
    engine = Engine(CONFIG)
    engine.step(LaneReady(5))
    before = snapshot.dump(engine)
    with pytest.raises(ContractError, match=message):
        engine.step(event)
    assert snapshot.dump(engine) == before


@pytest.mark.parametrize("field", ["invalid", "text_stops"])
def test_result_for_a_row_that_does_not_sample_is_refused(field: str) -> None:
    engine, _ = decoding()
    before = snapshot.dump(engine)
    with pytest.raises(ContractError):
        engine.step(msgspec.structs.replace(BatchFinished(100, 1, TWO_TOKENS), **{field: (2,)}))
    assert snapshot.dump(engine) == before


def test_restart_into_a_generation_that_was_is_refused() -> None:
    engine, _ = decoding()
    before = snapshot.dump(engine)
    with pytest.raises(ContractError):
        engine.step(EngineRestarted(100, generation=0))
    assert snapshot.dump(engine) == before


@pytest.mark.parametrize("token", [2**31, -1, 2**70])
def test_stop_token_that_is_no_token_is_refused_at_entry(token: int) -> None:
    engine = Engine(CONFIG)
    step = engine.step(arrived(0, stop_token_ids=(token,)))
    assert [command.reason for command in step.commands if isinstance(command, RejectRequest)] == ["bad_request"]


@pytest.mark.parametrize("runs", [(1, 10**13), (2**40, 1), (2**70, 1), (-1, 3), (1, 0), (1,)])
def test_prompt_of_impossible_runs_is_refused_before_it_is_spelled_out(runs: tuple[int, ...]) -> None:
    engine = Engine(CONFIG)
    step = engine.step(msgspec.structs.replace(arrived(0), prompt=TokenRuns(runs)))
    assert [command.reason for command in step.commands if isinstance(command, RejectRequest)] == ["bad_request"]


def test_requests_behind_a_blocked_head_go_on_when_it_is_cancelled() -> None:
    engine = Engine(SchedConfig(page_size=1, pages=100, overlap_depth=0))
    engine.step(arrived(0, prompt=10, max_new=50))
    plan = engine.step(LaneReady(0)).launched()
    assert plan is not None
    engine.step(arrived(1, prompt=60, max_new=30))
    engine.step(arrived(2, prompt=2, max_new=2))
    engine.step(BatchFinished(0, plan.batch_id, b"\5\0\0\0"))
    engine.step(LaneReady(0))
    assert engine.batch_is_full
    engine.step(RequestCancelled(0, 1))
    engine.step(BatchFinished(0, plan.batch_id + 1, b"\5\0\0\0"))
    following = engine.step(LaneReady(0)).launched()
    assert following is not None
    assert following.request_ids.tolist() == [2]


@pytest.mark.parametrize(
    "end", [ControlRequested(0, 0, Pause("cancel")), BatchFinished(0, 5, b"", error="lost")], ids=type
)
def test_end_without_a_token_sends_what_was_held_back(end: Observed) -> None:
    engine = Engine(SchedConfig(page_size=1, pages=100, overlap_depth=0))
    engine.step(arrived(0, prompt=3, max_new=20, stream=False))
    for _ in range(5):
        plan = engine.step(LaneReady(0)).launched()
        assert plan is not None
        assert not engine.step(BatchFinished(0, plan.batch_id, b"\5\0\0\0")).commands
    engine.step(LaneReady(0))
    step = engine.step(end)
    sent = [command.tokens.tolist() for command in step.commands if isinstance(command, StreamTokens)]
    assert sent == [[5] * 5]


def test_long_prompt_does_not_widen_everybodys_row() -> None:
    engine = Engine(SchedConfig(page_size=16, pages=20_000, context_tokens_max=200_000, chunked_prefill_size=None))
    engine.step(arrived(0, prompt=150_000, max_new=10))
    assert engine.step(LaneReady(0)).launched() is not None
    assert engine.memory.table.outputs.nbytes < 100_000
