"""Closed loops: the requested number of concurrent sessions, with any cancellations, and their measures."""

from __future__ import annotations

import json
import os
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner

from lockstep.core.contract.errors import ConfigError
from lockstep.core.contract.events import RequestArrived
from lockstep.sim.cli.simulate import simulate as command
from lockstep.sim.cluster.scenario import ClusterScenario
from lockstep.sim.cluster.setup import assemble_cluster
from lockstep.sim.cluster.simulate import simulate_cluster
from lockstep.sim.host.closed_loop import ConcurrentSessions
from lockstep.sim.metrics.slo import Slo
from lockstep.sim.run.assemble import assemble
from lockstep.sim.run.simulate import Run, simulate
from lockstep.sim.scenario.scenario import Scenario
from lockstep.sim.workload.workload import Turns, open_workload

CHAT = "gen:n=300,turns=uniform:2:8,input=fixed:300,output=fixed:20,think=uniform:100ms:3s"
SINGLE = "gen:n=50,input=fixed:300,output=fixed:20"


def turns_of(spec: str) -> Turns:
    return open_workload(spec, seed=7, rate=float("inf")).turns


def run(workload: str, concurrency: int, **changes: object) -> Run:
    asked: dict[str, object] = {"model": "qwen3-8b", "gpu": "h100", "limit": 200}
    return simulate(assemble(Scenario(workload=workload, concurrency=concurrency, **asked | changes), {}))  # type: ignore[arg-type]


def played(loop: ConcurrentSessions, service_us: int, *, breaks_off: int = 0) -> tuple[list[RequestArrived], list[int]]:
    """Answer every request after `service_us`, except each `breaks_off`-th, which is cancelled.

    Returns the arrivals, and after each the number of requests that were open or in think time.
    """
    arrivals: list[RequestArrived] = []
    in_progress = []
    answers: list[tuple[int, int]] = []
    while True:
        if answers and answers[0][0] <= loop.next_us:
            now_us, request_id = answers.pop(0)
            if breaks_off and request_id % breaks_off == breaks_off - 1:
                loop.broke_off(request_id, now_us)
            else:
                loop.answered(request_id, now_us)
            continue
        if not loop.awaits_answers and not answers:
            return arrivals, in_progress
        event = loop.take(None)
        arrivals.append(event)
        answers.append((event.time_us + service_us, event.request_id))
        in_progress.append(len(loop.open_turns) + len(loop._to_come) + len(loop._begins_us))


@pytest.mark.parametrize("breaks_off", [0, 3])
@pytest.mark.parametrize("spec", [CHAT, SINGLE])
def test_as_many_sessions_are_in_progress_as_were_requested(spec: str, breaks_off: int) -> None:
    arrivals, in_progress = played(ConcurrentSessions(turns_of(spec), 12, 400, 3), 50_000, breaks_off=breaks_off)
    assert len(arrivals) == 400
    assert [event.request_id for event in arrivals] == list(range(400))
    assert set(in_progress) == {12}
    assert all(before.time_us <= after.time_us for before, after in pairwise(arrivals))


def test_a_session_goes_on_where_it_is_after_its_answer_and_its_pause() -> None:
    turns = turns_of(CHAT)
    loop = ConcurrentSessions(turns, 5, 300, 3)
    of_turn = {}
    answered_us: dict[int, int] = {}
    arrivals, _ = played_with_turns(loop, of_turn)
    answered_us = {of_turn[event.request_id].index: event.time_us + 50_000 for event in arrivals}
    follow_ups = 0
    for event in arrivals:
        turn = of_turn[event.request_id]
        if turn.after is not None:
            assert event.time_us == answered_us[turn.after] + turn.think_us
            follow_ups += 1
    assert follow_ups > 100


def played_with_turns(loop: ConcurrentSessions, of_turn: dict[int, object]) -> tuple[list[RequestArrived], list[int]]:
    take = loop.take

    def remembering(max_new_tokens: int | None) -> RequestArrived:
        event = take(max_new_tokens)
        of_turn[event.request_id] = loop.open_turns[event.request_id]
        return event

    loop.take = remembering  # type: ignore[method-assign]
    return played(loop, 50_000)


def test_sessions_that_are_played_again_share_nothing_with_the_first_time() -> None:
    turns = turns_of("gen:n=40,turns=fixed:4,input=fixed:300,output=fixed:20")
    of_turn: dict[int, object] = {}
    played_with_turns(ConcurrentSessions(turns, 3, 200, 3), of_turn)
    prompts = Counter(turn.prompt for turn in of_turn.values())  # type: ignore[attr-defined]
    assert set(prompts.values()) == {1}
    labels = Counter(turn.label for turn in of_turn.values())  # type: ignore[attr-defined]
    assert set(labels.values()) == {1}
    assert any("#" in label for label in labels)


def test_the_first_sessions_stand_anywhere_and_the_pace_is_that_of_the_steady_state() -> None:
    """With an instant service, requests of the first seconds come as often as later ones."""
    turns = turns_of("gen:n=4000,turns=fixed:20,input=fixed:100,output=fixed:2,think=exponential:20s")
    arrivals, _ = played(ConcurrentSessions(turns, 400, 4000, 3), 1)
    times_s = [event.time_us / 1e6 for event in arrivals]
    early, late = sum(t < 20 for t in times_s), sum(100 <= t < 120 for t in times_s)
    assert 0.8 < early / late < 1.25


def test_no_session_stands_behind_the_prompt_that_ends_it() -> None:
    turns = turns_of("gen:n=300,turns=fixed:30,input=fixed:900,output=fixed:20,think=fixed:1s")
    loop = ConcurrentSessions(turns, 200, 200, 3, prompt_tokens_max=8192)
    first = [loop.take(None) for _ in range(200)]
    lengths = [loop.open_turns[event.request_id].prompt_tokens for event in first]
    assert 9 * 920 > max(lengths) > 8192  # up to the turn that is refused, and no further
    assert min(lengths) == 900
    assert len(set(lengths)) == 9


def test_sessions_begin_in_the_order_of_time_whichever_end_is_reported_first() -> None:
    """Engines of a cluster are simulated one after another, so ends are not reported in the order of time."""

    def arrivals(ends_us: dict[int, int]) -> list[tuple[int, str]]:
        loop = ConcurrentSessions(turns_of(SINGLE), 3, 9, 3)
        for _ in range(3):
            loop.take(None)
        for request_id, end_us in ends_us.items():
            loop.answered(request_id, end_us)
        return [(event.time_us, event.label) for event in (loop.take(None) for _ in range(3))]

    assert arrivals({0: 30_000, 1: 10_000, 2: 20_000}) == arrivals({1: 10_000, 2: 20_000, 0: 30_000})


def test_equal_seeds_are_equal_loops_and_another_seed_is_another() -> None:
    def times(seed: int) -> list[tuple[int, str]]:
        arrivals, _ = played(ConcurrentSessions(turns_of(CHAT), 8, 200, seed), 50_000)
        return [(event.time_us, event.label) for event in arrivals]

    assert times(3) == times(3)
    assert times(3) != times(4)


def test_requests_that_are_too_long_end_their_session_and_the_load_stays() -> None:
    workload = "gen:n=300,turns=fixed:30,input=fixed:900,output=fixed:20,think=fixed:1s"
    done = run(workload, 6, settings={"context_tokens_max": 8192})
    requests = done.data.summary["requests"]
    assert requests["arrived"] == 200
    assert requests["rejected_too_long"] > 5
    assert requests["unfinished"] == 0
    assert done.never_sent == 0


def test_more_sessions_are_more_load() -> None:
    shares = [run(CHAT, n).data.summary["device"]["busy_fraction"] for n in (2, 8, 32)]
    assert shares == sorted(shares)
    assert shares[0] < 0.5 * shares[-1]


def test_the_warm_up_is_simulated_and_not_measured() -> None:
    whole, behind = run(SINGLE, 8), run(SINGLE, 8, warm_up=50, slos=(Slo.parse("ttft_p90=1s"),))
    assert behind.batches == whole.batches
    requests = behind.data.requests
    assert requests.request_id.tolist() == list(range(50, 200))
    assert requests.ttft_us.tolist() == whole.data.requests.ttft_us.tolist()[50:]
    assert behind.data.itl_us.size == sum(n - 1 for n in requests.output_tokens.tolist())
    assert "the first 50 requests are not in the numbers" in behind.remarks()


def test_an_engine_behind_a_router_sees_the_loop_that_it_sees_alone() -> None:
    scenario = Scenario(model="qwen3-8b", gpu="h100", workload=CHAT, concurrency=8, limit=200, warm_up=20)
    alone = simulate(assemble(scenario, {}))
    behind = simulate_cluster(assemble_cluster(ClusterScenario(base=scenario), {}))
    assert behind.data.summary["latency"] == alone.data.summary["latency"]


@pytest.mark.parametrize("router", ["session_sticky", "least_requests"])
def test_engines_that_run_ahead_see_what_those_see_that_are_advanced_at_every_arrival(router: str) -> None:
    from lockstep.core.cluster.router import RouterConfig

    scenario = Scenario(model="qwen3-8b", gpu="h100", workload=CHAT, concurrency=24, limit=300)
    asked = ClusterScenario(base=scenario, replicas=3, router=RouterConfig(policy=router), hop_us=300)  # type: ignore[arg-type]
    ahead = simulate_cluster(assemble_cluster(asked, {}))
    eager = simulate_cluster(assemble_cluster(asked, {}), eager=True)
    assert ahead.data.summary == eager.data.summary
    assert ahead.data.requests.ttft_us.tolist() == eager.data.requests.ttft_us.tolist()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"concurrency": 0}, "`concurrency` must be from 1 to 1,000,000, got `0`"),
        ({"concurrency": 4, "limit": 0}, "`limit` must be at least 1, got `0`"),
        ({"concurrency": 4, "rate": 3.0}, "`concurrency` and `rate` are two kinds of load"),
        ({"concurrency": 4, "rate_scale": 2.0}, "`concurrency` and `rate` are two kinds of load"),
        ({"warm_up": -1}, "`warm_up` must be a number of requests of at least 0, got `-1`"),
        ({"warm_up": 10, "limit": 10}, "`warm_up` must be less than the 10 requests of `limit`, got `10`"),
    ],
)
def test_a_load_that_makes_no_sense_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        assemble(Scenario(model="qwen3-8b", gpu="h100", workload=SINGLE, **changes), {})  # type: ignore[arg-type]


def test_the_command_of_a_closed_loop_repeats_it(tmp_path: Path) -> None:
    arguments = ["--model", "qwen3-8b", "--gpu", "h100", "--workload", CHAT, "--concurrency", "4", "--limit", "90"]
    shown = CliRunner().invoke(command, [*arguments, "--warm-up", "10", "--json", "--no-intervals"])
    assert shown.exit_code == 0, shown.output
    about = json.loads(shown.stdout)["about"]
    assert "--concurrency 4 --warm-up 10 --limit 90" in about["command"]
    assert about["workload"]["concurrency"] == 4
    again = CliRunner().invoke(command, [*about["command"].split()[2:], "--json", "--no-intervals"])
    assert again.stdout == shown.stdout


def test_the_recorded_agents_are_a_closed_loop() -> None:
    if "LOCKSTEP_DATA" not in os.environ:
        pytest.skip("the agentic trace is not here: set LOCKSTEP_DATA")
    trace = Path(os.environ["LOCKSTEP_DATA"]) / "traces" / "agentic" / "agentic_developers.jsonl.gz"
    workload = open_workload(str(trace), seed=7, rate=float("inf"), digest=False)
    assert not workload.has_clock
    arrivals, in_progress = played(ConcurrentSessions(workload.turns, 400, 2000, 3), 2_000_000)  # more than there are
    assert set(in_progress) == {400}
    assert len({event.label for event in arrivals}) == 2000
