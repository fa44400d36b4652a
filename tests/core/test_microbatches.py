"""Microbatches: settings, places of requests, events that concern all of them, chunks as long as the first."""

from __future__ import annotations

import random
import re
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from lockstep.core import invariants
from lockstep.core.contract.commands import BatchPlan
from lockstep.core.contract.config import HybridMemory, SchedConfig
from lockstep.core.contract.errors import ConfigError, ContractError
from lockstep.core.contract.events import (
    BatchFinished,
    CancelAll,
    ControlRequested,
    Drain,
    EngineRestarted,
    Flush,
    LaneReady,
    Observed,
    Pause,
    RequestArrived,
    RequestCancelled,
    Resume,
    TokenRuns,
)
from lockstep.core.journal import snapshot
from lockstep.core.journal.sinks import NoJournal
from lockstep.core.scheduler.engine import Engine
from lockstep.core.scheduler.latency import ExtendLatency
from lockstep.host.clock import HostClock
from lockstep.host.engine_options import EngineOptions
from lockstep.host.layout_options import check_layout
from lockstep.host.loop import RuntimeHost
from tests.support.driver.actions import Action
from tests.support.driver.draw import pipelined, random_actions, random_config
from tests.support.driver.driver import Driver
from tests.support.driver.run import run_actions

TWO: dict[str, Any] = {"page_size": 2, "pages": 64, "overlap_depth": 0, "pp_size": 2}


def test_the_statistic_of_decode_launches_is_that_of_all_microbatches() -> None:
    played = Played(pp_max_micro_batch_size=2)
    for max_new in (4, 4, 7):
        played.arrive(2, max_new)
    decodes, launched = 0, [0, 0]
    for _ in range(12):
        for number in range(2):
            plan = played.ready(number)
            if plan is not None:
                decodes += plan.mode == "decode"
                launched[number] += plan.mode == "decode"
                played.finish()
            assert played.engine.stats().decode_launches == decodes
            assert snapshot.restore(snapshot.dump(played.engine)).stats().decode_launches == decodes
    assert min(launched) > 0
    assert launched[0] != decodes


class Played:
    """An engine, and the batches that it launched."""

    def __init__(self, **settings: Any) -> None:
        self.engine = Engine(SchedConfig(**{**TWO, **settings}))
        self.now_us = 0

    def tell(self, event: Observed) -> BatchPlan | None:
        plan = self.engine.step(event).launched()
        invariants.check(self.engine)
        return plan

    def arrive(self, prompt: int, max_new: int, **more: Any) -> int:
        request_id = self.engine.last_request_id + 1
        runs = TokenRuns((1 + 1000 * request_id, prompt))
        self.tell(
            RequestArrived(time_us=self.now_us, request_id=request_id, prompt=runs, max_new_tokens=max_new, **more)
        )
        return request_id

    def ready(self, microbatch: int) -> BatchPlan | None:
        return self.tell(LaneReady(self.now_us, microbatch))

    def finish(self, took_us: int = 0) -> None:
        plan = self.engine.in_flight[0].plan
        started_us, self.now_us = self.now_us, self.now_us + took_us
        tokens = np.full(len(plan.sample_rows), 5, np.int32).tobytes()
        self.tell(BatchFinished(self.now_us, plan.batch_id, tokens, started_us, self.now_us))


@pytest.mark.parametrize(("policy", "expected"), [("length", 0), ("priority", 0), ("newest", 1)])
def test_the_victim_of_all_microbatches_is_that_of_the_policy(policy: str, expected: int) -> None:
    played = Played(retraction_policy=policy, schedule_policy="priority" if policy == "priority" else "fcfs")
    for number, launches in enumerate((1, 3)):  # the newer one has more outputs and is more important
        played.arrive(2, 8, priority=number)
        for _ in range(launches):
            played.ready(number)
            played.finish()
    microbatches = played.engine.microbatches
    assert [own.batch.size for own in microbatches.states] == [1, 1]
    assert microbatches.victim(played.engine.config).request_id == expected


def test_a_microbatch_has_an_open_slot_up_to_its_depth_and_while_it_has_something_to_launch() -> None:
    played = Played(overlap_depth=1)
    assert played.engine.open_slots() == []
    played.arrive(2, 8)
    assert played.engine.open_slots() == [0, 1]
    played.ready(0)
    assert played.engine.open_slots() == [0], "one batch of its one decoding request is in flight"
    played.ready(0)
    assert played.engine.open_slots() == []
    played.finish()
    assert played.engine.open_slots() == [0]


@pytest.mark.parametrize(
    ("settings", "counts"),
    [
        ({"pp_size": 1, "overlap_depth": 1, "chunk_target_us": 5000}, True),
        ({"pp_size": 2, "pp_dynamic_chunking": True}, False),
    ],
)
def test_a_pass_beside_a_longer_one_counts_for_the_latency_of_a_single_stage_only(
    settings: dict[str, Any], counts: bool
) -> None:
    """With several stages it has waited for the longer one at each of them."""
    played = Played(**settings)
    for prompt in (12, 4):
        played.arrive(prompt, 3)
        assert played.ready((len(played.engine.in_flight)) % settings["pp_size"]) is not None
    played.tell(BatchFinished(1000, 0, bytes(4), 0, 1000))
    before = list(played.engine.latency.sums)
    played.tell(BatchFinished(1100, 1, bytes(4), 500, 1100))
    assert (list(played.engine.latency.sums) != before) == counts


# ------------------------------------------------------------------------------------------------------------ settings


def test_settings_have_the_values_of_sglang() -> None:
    config = SchedConfig(pp_size=4, max_running_requests=100)
    assert (config.pp_async_batch_depth, config.pp_max_micro_batch_size, config.pp_dynamic_chunking) == (0, 25, False)
    assert config.microbatches == 4
    assert SchedConfig(pp_size=4, pp_async_batch_depth=2).microbatches == 6
    assert SchedConfig(pp_size=8, max_running_requests=3).pp_max_micro_batch_size == 1


def test_one_stage_is_written_as_it_always_was() -> None:
    one = SchedConfig(pp_size=1)
    assert one == SchedConfig()
    assert b"pp_" not in msgspec.json.encode(one)
    assert not Engine(one).microbatches.several
    assert b"microbatch" not in snapshot.dump(Engine(one))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pp_size": 0}, "`pp_size` must be a whole number of at least 2 and at most 64, got `0`"),
        ({"pp_size": 2.0}, "`pp_size` must be"),
        ({"pp_size": 2, "pp_max_micro_batch_size": 0}, "`pp_max_micro_batch_size` must be a whole number of at least"),
        ({"pp_size": 2, "pp_async_batch_depth": -1}, "`pp_async_batch_depth` must be"),
        ({"pp_size": 2, "pp_dynamic_chunking": 1}, "`pp_dynamic_chunking` must be true or false"),
        ({"pp_async_batch_depth": 1}, "`pp_async_batch_depth` is 1, but there is one stage"),
        ({"pp_max_micro_batch_size": 4}, "`pp_max_micro_batch_size` is 4, but there is one stage"),
        ({"pp_dynamic_chunking": True}, "`pp_dynamic_chunking` is True, but there is one stage"),
        ({"pp_size": 2, "pp_dynamic_chunking": True, "chunked_prefill_size": None}, "nothing is split"),
        ({"pp_size": 2, "pp_dynamic_chunking": True, "truncation_align_size": 32}, "`truncation_align_size` is 32"),
        ({"pp_size": 2, "overlap_consecutive_prefills": False}, "`overlap_consecutive_prefills` is False"),
    ],
)
def test_setting_under_which_nothing_could_run_is_refused_at_start(settings: dict[str, Any], message: str) -> None:
    """A15 (SG#23799): microbatches without a place were accepted, and all requests waited without end."""
    with pytest.raises(ConfigError, match=re.escape(message)):
        SchedConfig(**settings)


@pytest.mark.parametrize("name", ["pp_size", "pp_async_batch_depth", "pp_max_micro_batch_size", "pp_dynamic_chunking"])
def test_settings_of_stages_need_stages(name: str) -> None:
    with pytest.raises(ConfigError, match=f"`{name}` is of pipeline stages, and the engine has one"):
        check_layout(EngineOptions(), {name: 2})
    check_layout(EngineOptions(pp=2), {name: 2})


@pytest.mark.parametrize(
    ("options", "sched", "name"),
    [
        ({"pp": 0}, {}, "pp"),
        ({"pp": 2, "swa_full_tokens_ratio": 0.5}, {}, "swa_full_tokens_ratio"),
        ({"pp": 2, "cuda_graphs": "eager"}, {}, "cuda_graphs"),
        ({"pp": 2}, {"decode_steps_per_launch": 2}, "decode_steps_per_launch"),
    ],
)
def test_what_stages_do_not_have_is_refused_by_name(options: dict[str, Any], sched: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError, match=f"^`{name}`"):
        check_layout(EngineOptions(**options), sched)


def test_slots_are_offered_in_turn_to_microbatches_with_work_and_room() -> None:
    played = Played(pp_max_micro_batch_size=2)
    several, engine = played.engine.microbatches, played.engine
    assert engine.open_slots() == []
    assert several.next_slot([], 0) == several.at
    for _ in range(3):
        played.arrive(3, 8)
    assert engine.open_slots() == [0, 1]
    assert [several.next_slot([0, 1], offered) for offered in (-1, 0, 1)] == [0, 1, 0]
    assert played.ready(0) is not None
    assert engine.open_slots() == [1], "the first has as many batches in flight as it may"
    assert played.ready(1) is not None
    assert engine.open_slots() == []
    played.finish()
    assert engine.open_slots() == [0]


class Launches:
    """An executor that runs nothing."""

    in_flight = 0

    def __init__(self) -> None:
        self.launched: list[int] = []  # microbatches

    def ready(self) -> bool:
        return False

    def launch(self, plan: BatchPlan, **_: Any) -> None:
        self.launched.append(plan.microbatch)


class OfferingHost:
    """A host of three microbatches. A test sets which of them may have a launch, and sends its facts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        engine, self.executor = Engine(SchedConfig(**{**TWO, "pp_size": 3})), Launches()
        self.open = [0, 1, 2]
        monkeypatch.setattr(Engine, "open_slots", lambda _: self.open)
        self.offered: list[int] = []
        self.host = RuntimeHost(engine, cast(Any, self.executor), NoJournal(), HostClock(), observe=self._observe)

    def _observe(self, event: Observed, _: Any) -> None:
        if isinstance(event, LaneReady):
            self.offered.append(event.microbatch)

    def offers(self) -> list[int]:
        """Let the host take in what was sent, and offer slots while it may, at most ten. Returns the microbatches."""
        self.offered = []
        self.host._take_in()
        while self.host._may_launch() and len(self.offered) < 10:
            self.host._launch()
        return self.offered


def test_each_open_slot_is_offered_once_in_vain_until_the_next_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine has no request, so no slot has a launch."""
    given = OfferingHost(monkeypatch)
    assert given.offers() == [0, 1, 2]
    assert given.offers() == []
    given.host.cancel(99)
    assert given.offers() == [0, 1, 2]
    given.open = [1]
    assert given.offers() == []
    given.host.cancel(99)
    assert given.offers() == [1]
    given.open = [0, 1]
    given.host.cancel(99)
    assert given.offers() == [0, 1]
    given.open = []
    given.host.cancel(99)
    assert given.offers() == []
    assert not given.executor.launched


def test_slots_are_offered_in_vain_anew_behind_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first offer behind the arrival has a launch, and the next ones have none."""
    given = OfferingHost(monkeypatch)
    given.open = [0, 1]
    assert given.offers() == [0, 1]
    given.open = [0, 2]
    runs = TokenRuns((1, 3))
    given.host.submit(RequestArrived(0, request_id=-1, prompt=runs, max_new_tokens=5), cast(Any, None))
    assert given.offers() == [2, 0, 2]
    assert given.executor.launched == [2]
    assert given.offers() == []


def test_slot_of_a_microbatch_that_does_not_exist_is_refused_and_changes_nothing() -> None:
    played = Played()
    played.arrive(3, 3)
    before = snapshot.dump(played.engine)
    for microbatch in (2, -1):
        with pytest.raises(ContractError, match=f"LaneReady for microbatch {microbatch}: there are 2"):
            played.engine.step(LaneReady(9, microbatch))
    assert snapshot.dump(played.engine) == before


# --------------------------------------------------------------------------------------------------- places of requests


def test_a_microbatch_has_one_batch_in_flight_and_all_have_one_each() -> None:
    played = Played(pp_async_batch_depth=1)
    for microbatch in range(3):
        played.arrive(3, 9)
        plan = played.ready(microbatch)
        assert plan is not None
        assert plan.microbatch == microbatch
        played.arrive(3, 9)
        assert played.ready(microbatch) is None, "its slot is taken, whatever waits"
        played.tell(RequestCancelled(0, played.engine.last_request_id))
    assert [batch.plan.microbatch for batch in played.engine.in_flight] == [0, 1, 2]


def test_a_request_decodes_in_one_microbatch_until_its_end() -> None:
    played, where = Played(), dict[int, set[int]]()
    for turn in range(40):
        if turn % 3 == 0:
            played.arrive(2 + turn % 5, 6)
        plan = played.ready(turn % 2)
        if plan is not None:
            for request_id in plan.request_ids[plan.extend_rows :].tolist():
                where.setdefault(request_id, set()).add(plan.microbatch)
        if turn % 2 and played.engine.in_flight:
            played.finish()
            played.finish() if played.engine.in_flight else None
    assert len(where) > 5
    assert all(len(microbatches) == 1 for microbatches in where.values())
    assert {0} in where.values()
    assert {1} in where.values()


def test_chunk_waits_for_its_own_microbatch_where_the_other_has_no_place() -> None:
    """C4 (SG#23006): a prompt that has a place needs no other one to continue."""
    played = Played(pp_max_micro_batch_size=1, chunked_prefill_size=2, max_prefill_tokens=2)
    one = played.arrive(2, 9)
    assert played.ready(1) is not None
    split = played.arrive(6, 2)
    assert played.ready(0) is not None
    assert played.engine.prefilling is played.engine.requests[split]
    played.finish()
    decode = played.ready(1)
    assert decode is not None, "microbatch 1 has no place for the prompt, and decodes"
    assert decode.request_ids.tolist() == [one]
    played.finish()
    chunk = played.ready(0)
    assert chunk is not None
    assert (chunk.request_ids.tolist(), chunk.starts.tolist()) == ([split], [2])


def test_requests_beyond_the_places_wait_with_a_reason() -> None:
    played = Played(pp_max_micro_batch_size=2)
    for _ in range(5):
        played.arrive(2, 3)
    first, second = played.ready(0), played.ready(1)
    assert first is not None
    assert second is not None
    assert (first.request_ids.tolist(), second.request_ids.tolist()) == ([0, 1], [2, 3])
    assert played.engine.deferred == (4, "microbatch")


# --------------------------------------------------------------------------------------- events for every microbatch


def _three_decode() -> Played:
    played = Played(pp_size=3, pages=256)
    for microbatch in range(3):
        played.arrive(3, 50)
        assert played.ready(microbatch) is not None
    for microbatch in range(3):
        played.finish()
        assert played.ready(microbatch) is not None
    return played


def test_cancel_finds_a_request_in_a_microbatch_that_has_no_slot_now() -> None:
    """G1 (SG#29405)."""
    played = _three_decode()
    assert played.engine.microbatches.at == 2
    played.tell(RequestCancelled(0, 1))
    assert list(played.engine.requests) == [0, 2]
    played.tell(ControlRequested(0, 0, CancelAll()))
    assert not played.engine.requests
    for _ in range(3):
        played.finish()
    invariants.check_quiescent(played.engine)


@pytest.mark.parametrize("mode", ["retract", "cancel"])
def test_pause_stops_every_microbatch(mode: Any) -> None:
    played = _three_decode()
    played.tell(ControlRequested(0, 0, Pause(mode)))
    assert len(played.engine.waiting) == (3 if mode == "retract" else 0)
    while played.engine.in_flight:
        played.finish()
    assert [played.ready(microbatch) for microbatch in range(3)] == [None] * 3
    played.tell(ControlRequested(0, 1, Resume()))
    assert (played.ready(1) is not None) == (mode == "retract")


def test_flush_and_drain_wait_for_every_microbatch() -> None:
    played = _three_decode()
    [refused] = played.engine.step(ControlRequested(0, 0, Flush())).commands
    assert "3 running, 3 in flight" in str(refused)
    assert not played.engine.step(ControlRequested(0, 1, Drain())).commands
    played.tell(ControlRequested(0, 2, CancelAll()))
    answered = [played.engine.controls.drains == []]
    for _ in range(3):
        played.finish()
        answered.append(played.engine.controls.drains == [])
    assert answered == [False, False, False, True]


def test_restart_voids_every_microbatch() -> None:
    played = _three_decode()
    played.tell(EngineRestarted(0, 1))
    assert [request.request_id for request in played.engine.waiting] == [0, 1, 2]
    assert not played.engine.in_flight
    plan = played.ready(2)
    assert plan is not None
    assert plan.request_ids.tolist() == [0, 1, 2], "the microbatch that is offered a slot takes them"


# ----------------------------------------------------------------------------------------------------------- histories


def test_windows_that_another_microbatch_will_let_go_of_are_none_to_start_with() -> None:
    """Its next decode frees a window once it is launched: a prompt had taken the page that this request needs now."""
    config = SchedConfig(
        page_size=2,
        pages=33,
        max_running_requests=8,
        schedule_policy="priority",
        schedule_low_priority_values_first=True,
        schedule_conservativeness=0.02,
        chunked_prefill_size=16,
        batching="running_first",
        reserve="on_demand",
        speculative_method="ngram",
        num_speculative_tokens=8,
        speculative_max_batch_size=2,
        hybrid=HybridMemory(window_tokens=8, window_pages=16),
        pp_size=2,
        pp_max_micro_batch_size=2,
    )
    arrivals: list[Action] = [
        ("arrive", 1, 5, 28, {"priority": 20}),
        ("arrive", 1, 5, 27, {"priority": 0}),
        ("arrive", 3, 4, 34, {"priority": 5}),
    ]
    r, f = "ready", "finish"
    order = (r, f, r, r, f, f, r, r, f, r, f, r, f, r, r, r, r, r, f, f, r, f, r)
    run_actions(config, [*arrivals, *((one,) for one in order)])


@pytest.mark.parametrize("seed", range(12))
def test_random_histories(seed: int) -> None:
    """Every invariant after every event, every token of every request, and equal digests of the replayed events."""
    rng = random.Random(f"microbatches {seed}")
    config = random_config(rng)
    actions = random_actions(rng, 120, adapters=config.max_loras is not None)
    run_actions(pipelined(rng, config), actions, replay=True)


def test_tokens_are_those_of_one_running_batch() -> None:
    """Only times and batches differ: each request gets the same tokens and end as with one running batch."""
    rng = random.Random(3)
    actions: list[Action] = [("arrive", 1 + 7 * i, rng.randint(1, 30), rng.randint(1, 20), {}) for i in range(30)]
    drivers = []
    for stages in (1, 2, 3):
        driver = Driver(SchedConfig(page_size=4, pages=60, chunked_prefill_size=8, pp_size=stages))
        for action in actions:
            driver.do(action)
            driver.do(("ready",))
        driver.settle()
        drivers.append(driver)
    told = [{i: (story.sent, story.ended) for i, story in driver.records.items()} for driver in drivers]
    assert told[0] == told[1] == told[2]
    assert "every microbatch in flight" in drivers[2].marks


# ------------------------------------------------------------------------------------------------------- dynamic chunks


@pytest.mark.parametrize(
    ("passes", "expected"),
    [
        ([(0, 100), (10, 60)], [True, False]),  # the second waits for the first at each stage
        ([(0, 60), (10, 70)], [True, True]),
        ([(0, 100), (100, 130)], [True, True]),  # the first has ended
        ([(1000, 1010), (1005, 1010)], [True, False]),
        ([(0, 100), (80, 100), (90, 140)], [True, False, False]),  # the longest of those before
    ],
)
def test_the_duration_of_a_pass_is_its_own_if_no_longer_one_was_before_it_in_the_stages(
    passes: list[tuple[int, int]], expected: list[bool]
) -> None:
    microbatches = Engine(SchedConfig(**TWO)).microbatches
    found = [microbatches.ran_undisturbed(BatchFinished(stop, 0, b"", start, stop)) for start, stop in passes]
    assert found == expected


def _fitted(per_token_us: float, per_pair_us: float) -> ExtendLatency:
    """A fit to passes of exactly this duration."""
    latency = ExtendLatency()
    for tokens, context in [(64, 0), (128, 0), (256, 512), (512, 64), (300, 1000), (77, 3), (900, 40), (10, 700)]:
        plan = BatchPlan(
            batch_id=0,
            mode="extend",
            rows=np.zeros(1, np.int32),
            request_ids=np.zeros(1, np.int64),
            starts=np.array([context], np.int32),
            stops=np.array([context + tokens], np.int32),
            extend_rows=1,
        )
        pairs = tokens * context + tokens * (tokens + 1) // 2
        latency.observe(plan, round(5000 + per_token_us * tokens + per_pair_us * pairs))
    return latency


def test_chunk_behind_a_context_takes_as_long_as_the_first() -> None:
    per_token, per_pair = 40.0, 0.1
    latency = _fitted(per_token, per_pair)
    first = 1000
    wanted = per_token * first + per_pair * first * (first + 1) / 2
    sizes = []
    for context in (0, 1000, 4000, 16000):
        tokens = latency.tokens_like_first(first, context)
        assert tokens is not None
        took = per_token * tokens + per_pair * (tokens * context + tokens * (tokens + 1) / 2)
        assert took == pytest.approx(wanted, rel=0.02)
        sizes.append(tokens)
    assert sizes[0] == pytest.approx(first, abs=1)
    assert sizes == sorted(sizes, reverse=True)
    assert ExtendLatency().tokens_like_first(first, 0) is None, "too little is known"


def test_chunks_of_a_long_prompt_shrink_as_it_grows() -> None:
    played = Played(pages=8192, context_tokens_max=10_000, chunked_prefill_size=512, pp_dynamic_chunking=True)

    def took(plan: BatchPlan) -> int:
        tokens, start = int(plan.stops[0] - plan.starts[0]), int(plan.starts[0])
        return round(300 + 4 * tokens + 0.02 * (tokens * start + tokens * tokens / 2))

    for prompt in (40, 90, 200, 300, 400, 500, 700, 900, 1200):
        played.arrive(prompt, 1)
        turn = 0
        while played.engine.requests:
            plan = played.ready(turn % 2)
            turn += 1
            if plan is not None:
                played.finish(took(plan))
    played.arrive(9000, 1)
    chunks: list[tuple[int, int]] = []
    turn = 0
    while played.engine.requests:
        plan = played.ready(turn % 2)
        turn += 1
        assert plan is not None
        chunks.append((int(plan.stops[0] - plan.starts[0]), took(plan)))
        played.finish(chunks[-1][1])
    sizes, times = zip(*chunks[:-1], strict=True)
    assert sizes[0] == 512
    assert list(sizes) == sorted(sizes, reverse=True)
    assert sizes[-1] < 200
    assert max(times) < 1.1 * min(times), "without it the last takes four times as long as the first"
