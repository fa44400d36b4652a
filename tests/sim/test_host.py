"""The simulated host: facts in order, one batch at a time on the device, and the tokens of the workload."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pytest
from simpy import Environment

from lockstep.core import invariants
from lockstep.core.contract.commands import BatchPlan, FinishRequest, LaunchBatch, LoadAdapter, Step, StreamTokens
from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.errors import ContractError
from lockstep.core.contract.events import (
    AdapterLoaded,
    BatchFinished,
    ClockAdvanced,
    ControlRequested,
    GrammarReady,
    LaneReady,
    LoadAdapterControl,
    Observed,
    RequestArrived,
    RequestCancelled,
    RequestFinished,
    RequestRejected,
)
from lockstep.core.scheduler.engine import Engine
from lockstep.sim.cost import BatchShape, CpuModel, Duration
from lockstep.sim.host.arrivals import Arrivals
from lockstep.sim.host.device import EOS_TOKEN_ID
from lockstep.sim.host.engine_host import EngineHost
from lockstep.sim.host.host_options import HostOptions, HostWatch
from lockstep.sim.workload.turns import Turn
from lockstep.sim.workload.workload import open_workload


class Clockwork:
    """A cost model with numbers for mental arithmetic: 1,000 us and 10 us per token.

    It records the shapes it receives.
    """

    def __init__(self, spread_us: float = 0.0) -> None:
        self.spread_us = spread_us
        self.shapes: list[BatchShape] = []

    def batch_us(self, shape: BatchShape) -> Duration:
        self.shapes.append(shape)
        return Duration(1000.0 + 10.0 * (shape.extend_tokens + shape.decode_rows), self.spread_us)

    def describe(self) -> dict[str, Any]:
        return {"kind": "clockwork"}


class Recorder:
    """A journal and a metrics fold that keep everything."""

    def __init__(self) -> None:
        self.events: list[Observed] = []
        self.measured: list[Observed] = []  # the same, as the metrics receive them
        self.steps: list[Step] = []
        self.digests: list[bytes] = []
        self.cpu: list[tuple[int, int, str]] = []
        self.gauges: list[tuple[int, int, int, int, int]] = []

    def append(self, event: Observed, digest: bytes) -> None:
        self.events.append(event)
        self.digests.append(digest)

    def append_unsealed(self, event: Observed) -> None:
        raise AssertionError(event)

    def observe(self, event: Observed, step: Step) -> None:
        self.measured.append(event)
        self.steps.append(step)

    def gauge(self, time_us: int, waiting: int, running: int, free_pages: int, cached_pages: int) -> None:
        self.gauges.append((time_us, waiting, running, free_pages, cached_pages))

    def cpu_interval(self, start_us: int, stop_us: int, what: str) -> None:
        self.cpu.append((start_us, stop_us, what))

    def of(self, kind: type[Observed]) -> list[Any]:
        return [event for event in self.events if type(event) is kind]

    def plans(self) -> list[BatchPlan]:
        return [c.plan for step in self.steps for c in step.commands if isinstance(c, LaunchBatch)]

    def tokens(self) -> dict[int, list[int]]:
        """The tokens that each request was sent, in order."""
        sent: dict[int, list[int]] = {}
        for step in self.steps:
            for command in step.commands:
                if isinstance(command, StreamTokens):
                    start = 0
                    for request_id, offset, count in zip(
                        command.request_ids.tolist(),
                        command.offsets.tolist(),
                        command.token_counts.tolist(),
                        strict=True,
                    ):
                        have = sent.setdefault(request_id, [])
                        assert offset == len(have)
                        have += command.tokens[start : start + count].tolist()
                        start += count
        return sent

    def finished(self) -> dict[int, FinishRequest]:
        return {c.request_id: c for step in self.steps for c in step.commands if isinstance(c, FinishRequest)}


def in_order_of_arrival(turns: Sequence[Turn], recorder: Recorder) -> list[Turn]:
    """The turns that arrived: position i is that of request i. Their labels must differ."""
    turn_of = {turn.label: turn for turn in turns}
    assert len(turn_of) == len(turns)
    return [turn_of[event.label] for event in recorder.of(RequestArrived)]


FREE_CPU = CpuModel(plan_fixed_us=0, plan_row_us=0, result_fixed_us=0, result_row_us=0, arrival_us=0)


def play(
    turns: Sequence[Turn],
    *,
    cpu: CpuModel = FREE_CPU,
    cost: Clockwork | None = None,
    cancel_after_us: Mapping[int, int] | None = None,
    max_new_tokens: int | None = None,
    seed: int = 0,
    name: str = "engine0",
    decode_runs: bool | None = None,
    receive_interval: int = 1,
    **settings: Any,
) -> tuple[EngineHost, Recorder]:
    """Run turns to the end, with the invariants checked on the way unless `decode_runs` is given."""
    recorder, env = Recorder(), Environment()
    host = EngineHost(
        env,
        Engine(SchedConfig(**settings)),
        Arrivals(turns, cancel_after_us),
        cost or Clockwork(),
        cpu,
        recorder,
        recorder,
        HostOptions(
            seed=seed,
            name=name,
            max_new_tokens=max_new_tokens,
            decode_runs=bool(decode_runs),
            receive_interval=receive_interval,
            watch=HostWatch(check=invariants.check if decode_runs is None else None, check_every=11),
        ),
    )
    env.process(host.run())
    env.run()
    fresh = Engine(host.engine.config)
    assert [fresh.step(event).digest for event in recorder.events] == recorder.digests
    return host, recorder


def turn(index: int, arrival_us: int = 0, prompt_tokens: int = 100, output_tokens: int = 3, **more: Any) -> Turn:
    first = 1_000_000 * (index + 1)
    prompt = (first, prompt_tokens)
    return Turn(index, arrival_us, prompt, prompt_tokens, output_tokens, first + 500_000, f"t{index}", **more)


def workload(spec: str) -> Sequence[Turn]:
    return open_workload(spec, seed=11).turns


CHAT = (
    "gen:n=50,rate=20,turns=uniform:1:3,think=lognormal:300ms:1,shared_prefix=64x3,input=lognormal:80:1,"
    "output=uniform:1:60,max_total=600"
)
REQUESTS = 50
CONFIGS: list[dict[str, Any]] = [
    {"overlap_depth": 0},
    {"overlap_depth": 1},
    {"overlap_depth": 2},
    {"overlap_depth": 1, "page_size": 1, "pages": 700},
    {"overlap_depth": 2, "pages": 40, "max_running_requests": 8},
    {"overlap_depth": 1, "schedule_policy": "lpm", "chunked_prefill_size": 32, "stream_interval": 5},
]


# ------------------------------------------------------------------------------------------------------ order and time


@pytest.mark.parametrize("settings", CONFIGS)
def test_times_never_decrease_and_the_device_runs_one_batch_at_a_time(settings: dict[str, Any]) -> None:
    host, recorder = play(workload(CHAT), cpu=CpuModel(), **settings)
    times = [event.time_us for event in recorder.events]
    assert times == sorted(times)
    assert host.ended == REQUESTS
    finished = recorder.of(BatchFinished)
    assert [event.batch_id for event in finished] == list(range(len(recorder.plans())))
    for before, after in pairwise(finished):
        assert before.finished_us <= after.started_us
    assert all(event.started_us < event.finished_us <= event.time_us for event in finished)
    for before_cpu, after_cpu in pairwise(recorder.cpu):
        assert before_cpu[1] <= after_cpu[0]


@pytest.mark.parametrize("settings", CONFIGS)
def test_every_request_is_sent_the_tokens_of_its_turn(settings: dict[str, Any]) -> None:
    _, recorder = play(workload(CHAT), cpu=CpuModel(), **settings)
    sent = recorder.tokens()
    for request_id, of in enumerate(in_order_of_arrival(workload(CHAT), recorder)):
        assert sent[request_id] == list(range(of.output_first_token, of.output_first_token + of.output_tokens))


@pytest.mark.parametrize("settings", CONFIGS)
def test_the_cost_model_is_queried_for_the_batch_that_runs(settings: dict[str, Any]) -> None:
    cost = Clockwork()
    _, recorder = play(workload(CHAT), cost=cost, **settings)
    for plan, shape in zip(recorder.plans(), cost.shapes, strict=True):
        new = (plan.stops - plan.starts).astype(np.int64)
        start, extending = plan.starts.astype(np.int64), plan.extend_rows
        assert shape == BatchShape(
            extend_rows=extending,
            extend_tokens=int(new[:extending].sum()),
            extend_context_tokens=int(start[:extending].sum()),
            extend_pairs=int((new * start + new * (new + 1) // 2)[:extending].sum()),
            decode_rows=len(plan.rows) - extending,
            decode_context_tokens=int(start[extending:].sum()),
            sampled_rows=len(plan.sample_rows),
        )


@pytest.mark.parametrize("settings", CONFIGS)
def test_an_idle_engine_is_not_polled_again_before_something_new(settings: dict[str, Any]) -> None:
    _, recorder = play(workload(CHAT), cpu=CpuModel(), **settings)
    idle = False
    for event, step in zip(recorder.events, recorder.steps, strict=True):
        if type(event) is LaneReady:
            assert not idle
            idle = step.launched() is None
        else:
            idle = False


@pytest.mark.parametrize("settings", CONFIGS)
@pytest.mark.parametrize("cpu", [CpuModel(), FREE_CPU, CpuModel(result_fixed_us=3000)])
def test_stretches_of_decodes_change_nothing(settings: dict[str, Any], cpu: CpuModel) -> None:
    turns = workload(CHAT.replace("rate=20", "rate=3"))
    (in_one_go, fast), (step_by_step, slow) = [
        play(turns, cpu=cpu, cost=Clockwork(30.0), decode_runs=runs, **settings) for runs in (True, False)
    ]
    assert fast.events == slow.events
    assert fast.digests == slow.digests
    assert fast.cpu == slow.cpu
    assert fast.gauges == slow.gauges
    assert fast.tokens() == slow.tokens()
    assert in_one_go.env.now == step_by_step.env.now
    invariants.check_quiescent(in_one_go.engine)


@pytest.mark.parametrize("settings", CONFIGS)
def test_stretches_of_decodes_change_nothing_for_a_host_that_seldom_looks(settings: dict[str, Any]) -> None:
    turns = workload(CHAT.replace("rate=20", "rate=3"))
    (_, fast), (_, slow) = [
        play(turns, cost=Clockwork(30.0), decode_runs=runs, receive_interval=7, **settings) for runs in (True, False)
    ]
    assert fast.events == slow.events
    assert fast.digests == slow.digests
    assert fast.tokens() == slow.tokens()


def test_a_host_that_seldom_looks_sees_arrivals_after_so_many_decodes_or_after_an_extend() -> None:
    turns = [turn(0, output_tokens=40), turn(1, 5_500)]
    _, recorder = play(turns, receive_interval=8, overlap_depth=0)
    kinds = [type(event) for event in recorder.events]
    at = [i for i, kind in enumerate(kinds) if kind is RequestArrived][1]
    decodes = [plan.mode for step in recorder.steps[:at] if (plan := step.launched()) is not None].count("decode")
    assert decodes == 8  # it arrived during the fourth, and the host had read its socket before the extend
    launched = [step.launched() for step in recorder.steps[at:]]
    assert next(plan for plan in launched if plan is not None).mode == "extend"
    assert recorder.events[at].time_us > 5_500
    assert recorder.measured[at].time_us == 5_500  # its client has waited since then


def test_arrivals_keep_their_own_time_while_the_lane_is_busy() -> None:
    cpu = CpuModel(plan_fixed_us=400, plan_row_us=0, result_fixed_us=0, result_row_us=0, arrival_us=50)
    turns = [turn(0), turn(1, 120), turn(2, 130), turn(3, 140)]
    _, recorder = play(turns, cpu=cpu, overlap_depth=0)
    # 0 arrives and costs 50 us; planning takes until 450; the others came meanwhile and are folded then.
    assert [event.time_us for event in recorder.of(RequestArrived)] == [0, 120, 130, 140]
    first = recorder.of(BatchFinished)[0]
    assert (first.started_us, first.finished_us) == (450, 450 + 1000 + 10 * 100)
    assert recorder.cpu[:5] == [
        (0, 50, "arrival"),
        (50, 450, "plan"),
        (450, 500, "arrival"),
        (500, 550, "arrival"),
        (550, 600, "arrival"),
    ]


def test_all_arrivals_of_one_instant_are_seen_by_the_first_launch() -> None:
    _, recorder = play([turn(i) for i in range(10)])
    assert [type(event) for event in recorder.events[:11]] == [RequestArrived] * 10 + [LaneReady]
    assert len(recorder.plans()[0].rows) == 10


def test_a_result_is_noticed_when_the_lane_is_free() -> None:
    cpu = CpuModel(plan_fixed_us=5000, plan_row_us=0, result_fixed_us=0, result_row_us=0, arrival_us=0)
    _, recorder = play([turn(0)], cpu=cpu, overlap_depth=1)
    first = recorder.of(BatchFinished)[0]
    assert first.finished_us == 5000 + 2000
    assert first.time_us == 10_000  # the second plan was being made


@pytest.mark.parametrize(("depth", "gap_us"), [(0, 100), (1, 0), (2, 0)])
def test_overlap_hides_the_lane_behind_the_device(depth: int, gap_us: int) -> None:
    cpu = CpuModel(plan_fixed_us=60, plan_row_us=0, result_fixed_us=40, result_row_us=0, arrival_us=0)
    _, recorder = play([turn(0, output_tokens=20)], cpu=cpu, overlap_depth=depth)
    finished = recorder.of(BatchFinished)
    gaps = {after.started_us - before.finished_us for before, after in pairwise(finished)}
    assert gaps == {gap_us}


def test_never_more_in_flight_than_the_depth_allows() -> None:
    for depth in (0, 1, 2):
        _, recorder = play(workload(CHAT), overlap_depth=depth)
        in_flight = most = 0
        for event, step in zip(recorder.events, recorder.steps, strict=True):
            in_flight += (step.launched() is not None) - (type(event) is BatchFinished)
            most = max(most, in_flight)
        assert most == depth + 1


# ------------------------------------------------------------------------------------------------------- sessions, ends


def test_the_next_turn_comes_after_the_answer_and_a_thought() -> None:
    turns = [turn(0), turn(1, after=0, think_us=7000), turn(2, after=1, think_us=0), turn(3, 1)]
    host, recorder = play(turns)
    assert (host.arrivals.open_turns, host.arrivals.never_sent) == ({}, 0)
    ends = {
        decided.request_id: decided.time_us
        for step in recorder.steps
        for decided in step.decided
        if isinstance(decided, RequestFinished)
    }
    assert [of.index for of in in_order_of_arrival(turns, recorder)] == [0, 3, 1, 2]  # request ids count arrivals
    arrived = [event.time_us for event in recorder.of(RequestArrived)]
    assert arrived == [0, 1, ends[0] + 7000, ends[2]]


def test_a_rejected_turn_ends_its_session() -> None:
    turns = [turn(0, prompt_tokens=600), turn(1, after=0), turn(2, 5)]
    host, recorder = play(turns, context_tokens_max=500)
    assert host.rejected == {"too_long": 1}
    assert host.arrivals.never_sent == 1
    assert host.ended == 2
    assert list(recorder.finished()) == [1]


def test_a_cancelled_turn_ends_at_the_given_time_and_its_session_sends_no_more() -> None:
    turns = [turn(0, output_tokens=100), turn(1, after=0), turn(2)]
    host, recorder = play(turns, cancel_after_us={0: 5500})
    assert recorder.of(RequestCancelled) == [RequestCancelled(5500, 0)]
    assert recorder.finished()[0].reason == "cancelled"
    assert host.arrivals.never_sent == 1
    assert recorder.finished()[1].reason == "length"


def test_a_cancel_after_the_end_does_nothing() -> None:
    host, recorder = play([turn(0)], cancel_after_us={0: 60_000_000})
    assert recorder.finished()[0].reason == "length"
    assert host.ended == 1


def test_answers_that_do_not_fit_are_clamped_and_counted() -> None:
    host, recorder = play([turn(0, output_tokens=50), turn(1, output_tokens=20)], context_tokens_max=120)
    assert host.clamped == 1
    assert {id_: command.output_tokens for id_, command in recorder.finished().items()} == {0: 20, 1: 20}


def test_a_prompt_that_can_never_run_is_rejected_and_the_rest_goes_on() -> None:
    host, recorder = play([turn(0, prompt_tokens=10_000), turn(1)], pages=20)
    assert host.rejected.total() == 1
    assert recorder.finished()[1].reason == "length"


def test_the_clock_is_advanced_for_deadlines() -> None:
    # One request may run, for over 40 ms; the other gives up after 9.5 ms, in the middle of a batch.
    turns = [turn(0, output_tokens=40), turn(1, 100)]
    _, recorder = play(turns, max_running_requests=1, waiting_timeout_us=9_500)
    rejected = [d for step in recorder.steps for d in step.decided if isinstance(d, RequestRejected)]
    assert [(decided.request_id, decided.reason, decided.time_us) for decided in rejected] == [(1, "deadline", 9_600)]
    assert ClockAdvanced(9_600) in recorder.events


def test_answers_shorter_than_their_limit_end_with_an_end_token() -> None:
    turns = workload(CHAT)
    _, recorder = play(turns, max_new_tokens=100, eos_token_ids=(EOS_TOKEN_ID,), cpu=CpuModel())
    sent, finished = recorder.tokens(), recorder.finished()
    for request_id, of in enumerate(in_order_of_arrival(turns, recorder)):
        assert len(sent[request_id]) == of.output_tokens
        assert sent[request_id][-1] == EOS_TOKEN_ID
        assert finished[request_id].reason == "stop"
        assert EOS_TOKEN_ID not in sent[request_id][:-1]


def test_answers_longer_than_their_limit_are_cut() -> None:
    _, recorder = play([turn(0, output_tokens=50)], max_new_tokens=10, eos_token_ids=(EOS_TOKEN_ID,))
    assert (recorder.finished()[0].reason, recorder.finished()[0].output_tokens) == ("length", 10)


def test_turns_without_output_end_when_their_prompt_is_computed() -> None:
    turns = [turn(0, output_tokens=0), turn(1, output_tokens=3), turn(2, output_tokens=0, after=0)]
    _, recorder = play(turns, max_new_tokens=10, eos_token_ids=(EOS_TOKEN_ID,))
    assert [finish.reason for _, finish in sorted(recorder.finished().items())] == ["computed", "stop", "computed"]
    assert list(recorder.tokens()) == [1]


def test_a_limit_needs_an_end_token() -> None:
    with pytest.raises(ContractError, match="eos_token_ids"):
        play([turn(0)], max_new_tokens=10)


# ----------------------------------------------------------------------------------------------------------- randomness


def durations(seed: int, name: str, spread_us: float = 100.0) -> list[int]:
    _, recorder = play(workload(CHAT), cost=Clockwork(spread_us), seed=seed, name=name)
    return [event.finished_us - event.started_us for event in recorder.of(BatchFinished)]


def test_spread_is_drawn_from_seed_engine_and_batch_alone() -> None:
    assert durations(1, "a") == durations(1, "a")
    assert durations(1, "a")[:50] != durations(2, "a")[:50]
    assert durations(1, "a")[:50] != durations(1, "b")[:50]
    assert min(durations(1, "a", spread_us=50_000.0)) >= 1  # no batch takes no time

    # Another load: batch 0 has another length, but the same draw.
    one, many = [play(turns, cost=Clockwork(50.0), seed=3)[1] for turns in ([turn(0)], [turn(0), turn(1)])]
    lengths = [recorder.of(BatchFinished)[0].finished_us for recorder in (one, many)]
    assert lengths[1] - lengths[0] == 1000


# ---------------------------------------------------------------------------------------------------------------- hooks


def test_checks_and_finishes_are_reported_as_asked() -> None:
    recorder, env, checked, ended = Recorder(), Environment(), [], []
    host = EngineHost(
        env,
        Engine(SchedConfig()),
        Arrivals([turn(i, i * 10) for i in range(5)]),
        Clockwork(),
        FREE_CPU,
        recorder,
        recorder,
        HostOptions(watch=HostWatch(check=checked.append, check_every=4, on_finish=ended.append)),
    )
    env.process(host.run())
    env.run()
    assert len(checked) == len(recorder.events) // 4
    assert ended == [1, 2, 3, 4, 5]


def test_a_stop_comes_between_two_events() -> None:
    recorder, env = Recorder(), Environment()
    host = EngineHost(env, Engine(SchedConfig()), Arrivals(workload(CHAT)), Clockwork(), FREE_CPU, recorder, recorder)
    process = env.process(host.run())
    env.run(until=300_000)
    host.stop_requested = True
    env.run(until=process)
    assert 0 < host.ended < REQUESTS
    assert host.engine.digest == recorder.digests[-1]


def test_two_engines_share_one_clock() -> None:
    env = Environment()
    recorders: list[Recorder] = []
    for _ in range(2):
        recorder = Recorder()
        host = EngineHost(
            env, Engine(SchedConfig()), Arrivals(workload(CHAT)), Clockwork(), CpuModel(), recorder, recorder
        )
        env.process(host.run())
        recorders.append(recorder)
    env.run()
    alone = play(workload(CHAT), cpu=CpuModel())[1]
    assert recorders[0].digests == recorders[1].digests == alone.digests


def test_deferred_batch_is_sampled_when_the_result_before_it_was_taken_in() -> None:
    """b1's forward runs right behind b0; its sampling waits until the lane has taken in b0's result."""
    cpu = CpuModel(plan_fixed_us=0, plan_row_us=0, result_fixed_us=1500, result_row_us=0, arrival_us=0)
    _, recorder = play([turn(0, output_tokens=4, grammar="json")], cpu=cpu, overlap_depth=1)
    (ready,) = recorder.of(GrammarReady)
    assert ready.time_us == 50_000
    spans = [(event.started_us - 50_000, event.finished_us - 50_000) for event in recorder.of(BatchFinished)]
    # Forwards of 1,000 us and 10 per token. The lane takes in b0 until 3,500 and b1 until 5,000, and then launches two:
    # b2 can sample at once, b3 waits until b2, finished at 6,010, is taken in.
    assert spans == [(0, 2000), (2000, 3500), (5000, 6010), (6010, 7510)]
    assert recorder.tokens() == {0: [1_500_000 + i for i in range(4)]}


def test_constrained_and_plain_requests_share_batches_under_overlap() -> None:
    """With any deferral, all requests get the tokens of the workload, and batches end in order."""
    turns = workload("gen:n=60,rate=200,input=uniform:10:60,output=uniform:1:30,grammars=0.4x3")
    assert {turn.grammar for turn in turns} == {"", "grammar0", "grammar1", "grammar2"}
    for depth in range(3):
        host, recorder = play(turns, cpu=CpuModel(), overlap_depth=depth)
        assert host.ended == len(turns)
        assert [len(tokens) for _, tokens in sorted(recorder.tokens().items())] == [t.output_tokens for t in turns]
        finished = [event.finished_us for event in recorder.of(BatchFinished)]
        assert finished == sorted(finished)
        assert len(recorder.of(GrammarReady)) == 3


# ------------------------------------------------------------------------------------------------------------- adapters


class OnAdapters(Arrivals):
    """Loads two adapters before anything else; every other request uses one of them."""

    def __init__(self, turns: Sequence[Turn]) -> None:
        super().__init__(turns)
        self.controls = [LoadAdapterControl("law", 1), LoadAdapterControl("med", 1)]
        self.next_us = 0

    def take(self, max_new_tokens: int | None) -> Any:
        if self.controls:
            control = self.controls.pop()
            if not self.controls:
                self._look_ahead()
            return ControlRequested(0, len(self.controls), control)
        event = super().take(max_new_tokens)
        if isinstance(event, RequestArrived):
            adapter = ("", "law", "", "med")[event.request_id % 4]
            event = msgspec.structs.replace(event, adapter=adapter)
        return event


@pytest.mark.parametrize("decode_runs", [False, True])
def test_adapters_are_loaded_while_others_run(decode_runs: bool) -> None:
    recorder, env = Recorder(), Environment()
    engine = Engine(SchedConfig(max_loras=2))
    arrivals = OnAdapters([turn(i, 5_000 * i, output_tokens=40) for i in range(12)])
    host = EngineHost(
        env,
        engine,
        arrivals,
        Clockwork(),
        FREE_CPU,
        recorder,
        recorder,
        HostOptions(decode_runs=decode_runs, adapter_load_us=7_000),
    )
    env.process(host.run())
    env.run()
    assert host.ended == 12
    asked = [
        event.time_us
        for event, step in zip(recorder.events, recorder.steps, strict=True)
        for command in step.commands
        if isinstance(command, LoadAdapter)
    ]
    answered = [event.time_us for event in recorder.of(AdapterLoaded)]
    assert answered == [time_us + 7_000 for time_us in asked]
    assert any(event.time_us in range(asked[0], answered[0]) for event in recorder.of(BatchFinished))
    assert {len(sent) for sent in recorder.tokens().values()} == {40}


def test_adapters_cost_the_same_time_in_decode_runs_and_without() -> None:
    journals = []
    for decode_runs in (False, True):
        recorder, env = Recorder(), Environment()
        arrivals = OnAdapters([turn(i, 5_000 * i, output_tokens=400) for i in range(6)])
        host = EngineHost(
            env, Engine(SchedConfig(max_loras=1)), arrivals, Clockwork(), CpuModel(), recorder, recorder,
            HostOptions(decode_runs=decode_runs),
        )  # fmt: skip
        env.process(host.run())
        env.run()
        journals.append((recorder.events, recorder.digests))
    assert journals[0] == journals[1]
