"""Sessions that the server keeps, in the simulator: turns carry only new tokens, and KV is held between them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from lockstep.core.cluster.router import RouterConfig
from lockstep.core.contract.commands import Step
from lockstep.core.contract.errors import ConfigError
from lockstep.core.contract.events import CloseSession, ControlRequested, ObservedEvent, OpenSession, RequestArrived
from lockstep.core.scheduler.engine import Engine
from lockstep.sim.cli.plan import plan
from lockstep.sim.cluster.scenario import ClusterScenario
from lockstep.sim.cluster.setup import assemble_cluster
from lockstep.sim.cluster.simulate import simulate_cluster
from lockstep.sim.results.stored_run import read_run
from lockstep.sim.run.assemble import assemble
from lockstep.sim.run.run_folder import write_run
from lockstep.sim.run.simulate import Run, simulate
from lockstep.sim.scenario.scenario import Scenario
from lockstep.sim.workload.server_sessions import with_server_sessions
from lockstep.sim.workload.token_runs import prompt_ids, runs_behind
from lockstep.sim.workload.turns import TurnLabel, TurnsBuilder, TurnStart
from lockstep.sim.workload.workload import open_workload

CHAT = "gen:n=80,rate=20,turns=uniform:1:5,think=fixed:30ms,input=uniform:20:200,output=uniform:4:40"


def asked(*, on: bool = True, **fields: Any) -> Scenario:
    settings = {"pages": 4000, **fields.pop("settings", {})}
    names = {"model": "qwen3-8b", "gpu": "h200", "workload": CHAT, "server_sessions": on, "settings": settings}
    return Scenario(**(names | fields))


def ran(folder: Path | None = None, **fields: Any) -> Run:
    return simulate(assemble(asked(**fields), {}), folder=folder, check_every=5)


class Noting:
    """Counts of sessions, and the maximum that they held."""

    def __init__(self) -> None:
        self.open: dict[str, int] = {}
        self.opened = 0
        self.turns: list[RequestArrived] = []
        self.held_max = 0

    def observe(self, event: ObservedEvent, step: Step, engine: Engine) -> None:
        if isinstance(event, RequestArrived):
            self.turns.append(event)
            assert not event.session or event.session in self.open
        if isinstance(event, ControlRequested) and isinstance(event.control, OpenSession):
            assert event.control.session not in self.open
            self.open[event.control.session] = event.time_us
            self.opened += 1
        if isinstance(event, ControlRequested) and isinstance(event.control, CloseSession):
            del self.open[event.control.session]
        self.held_max = max(self.held_max, engine.sessions.pages_held_alone())


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("fields", [{}, {"concurrency": 6, "limit": 90}, {"settings": {"overlap_depth": 2}}])
def test_where_there_is_room_turns_cost_what_whole_prompts_do(seed: int, fields: dict[str, Any]) -> None:
    whole, kept = ran(on=False, seed=seed, **fields).data, ran(seed=seed, **fields).data
    assert kept.summary["latency"] == whole.summary["latency"]
    assert kept.summary["cache"] == whole.summary["cache"]
    assert kept.requests.prompt_tokens.tolist() == whole.requests.prompt_tokens.tolist()
    assert kept.summary["requests"]["completed"] == kept.summary["requests"]["arrived"]
    assert kept.summary["kv"]["used_pages_max"] >= whole.summary["kv"]["used_pages_max"]


@pytest.mark.parametrize("seed", range(3))
def test_a_turn_brings_what_its_session_lacks_and_sessions_end_with_their_last(seed: int) -> None:
    setup, told = assemble(asked(seed=seed), {}), Noting()
    data = simulate(setup, observer=told, check_every=20).data
    by_label = {turn.label: turn for turn in setup.workload.turns}
    for event in told.turns:
        turn = by_label[event.label]
        own = tuple(runs_behind(turn.prompt, turn.session_kept))
        assert event.prompt.runs == own  # type: ignore[union-attr]
        assert event.session == turn.session
        assert event.session_start == (turn.session_kept if turn.session and turn.after is not None else None)
    assert not told.open
    several = {turn.session for turn in by_label.values() if turn.session}
    assert told.opened == len(several) == data.summary["sessions"]["closed"]
    sessions = data.summary["sessions"]
    assert sessions["turns"] == sum(bool(turn.session) for turn in by_label.values())
    assert sessions["kept_tokens"] == sum(turn.session_kept for turn in by_label.values())
    assert sessions["prompt_tokens"] == sum(turn.prompt_tokens for turn in by_label.values() if turn.session)
    assert 0 < sessions["held_pages_mean"] <= sessions["held_pages_max"] <= told.held_max
    assert sessions["held_share_max"] == pytest.approx(sessions["held_pages_max"] / 4000, abs=1e-6)


def test_held_kv_yields_where_pages_lack_and_evictable_kv_is_never_held() -> None:
    long = "gen:n=60,rate=20,turns=fixed:4,think=fixed:1s,input=fixed:150,output=fixed:20"
    tight, wide = (ran(workload=long, settings={"pages": pages}).data.summary for pages in (120, 4000))
    assert tight["sessions"]["yields"] > 0 == wide["sessions"]["yields"]
    assert tight["cache"]["hit_ratio"] < wide["cache"]["hit_ratio"]
    assert tight["requests"]["completed"] == 60
    free = ran(workload=long, settings={"session_kv": "evictable"}).data.summary
    assert free["sessions"]["held_pages_max"] == 0
    assert free["latency"] == wide["latency"]


def test_without_sessions_nothing_is_reported_of_them() -> None:
    plain = ran(on=False)
    assert "sessions" not in plain.metrics()
    assert "server_sessions" not in plain.about()
    assert "--server-sessions" not in plain.setup.scenario.command()
    assert "--server-sessions" in asked().command()
    single = ran(workload="gen:n=20,rate=20,input=fixed:64,output=fixed:8")
    assert "sessions" not in single.data.summary


def test_an_edited_history_is_kept_up_to_where_it_was_edited() -> None:
    builder = TurnsBuilder()

    def append(number: int, after: int, prompt: list[int], output_first_token: int) -> None:
        builder.append(
            TurnStart(0, after, think_us=9),
            TurnLabel("r{0}", number),
            prompt=prompt,
            prompt_tokens=sum(prompt[1::2]),
            output_tokens=5,
            output_first_token=output_first_token,
        )

    append(0, -1, [0, 50], 50)
    edited = [0, 30, 100, 40]  # 30 unchanged tokens
    append(1, 0, edited, 200)
    again = [0, 30, 100, 40]  # no new token: the last one is sent
    append(2, 1, again, 300)
    append(3, -1, [400, 9], 409)
    turns = with_server_sessions(builder.build())
    assert [(turn.session, turn.session_kept, turn.session_last) for turn in turns] == [
        ("s0", 0, False), ("s0", 30, False), ("s0", 69, True), ("", 0, True),
    ]  # fmt: skip


def test_where_several_wait_for_one_answer_there_is_no_session() -> None:
    turns = open_workload("gen:sessions=3,turns=fixed:3,rate=1", seed=1).turns
    after = turns.after.copy()
    after[2] = 0
    forked = with_server_sessions(replace(turns, after=after))
    assert [turn.session for turn in forked] == ["", "", "", *["s3"] * 3, *["s6"] * 3]
    assert all(prompt_ids(turn.prompt).size == turn.prompt_tokens for turn in forked)
    assert np.all(forked.session_kept[:3] == 0)  # type: ignore[index]


@pytest.mark.parametrize("fields", [{}, {"adapters": "3"}, {"settings": {"speculative_method": "ngram"}}])
def test_uniform_stretches_of_decodes_change_no_times(fields: dict[str, Any]) -> None:
    setup = assemble(asked(**fields), {})
    quick, slow = simulate(setup).data.summary, simulate(setup, check_every=1).data.summary
    for part in ("requests", "latency", "throughput", "cache"):
        assert quick[part] == slow[part]


def test_a_run_is_read_back_and_clusters_keep_turns_where_their_session_is(tmp_path: Path) -> None:
    run = ran(tmp_path / "run")
    write_run(tmp_path / "run", run)
    assert read_run(tmp_path / "run").summary("sessions", "turns") == run.data.summary["sessions"]["turns"]
    assert "KV held by sessions" in (tmp_path / "run" / "report.html").read_text()
    sticky = ClusterScenario(base=asked(), replicas=2, router=RouterConfig(policy="session_sticky"))
    two = simulate_cluster(assemble_cluster(sticky, {})).data.summary
    assert two["requests"]["completed"] == 80
    assert two["sessions"]["turns"] == run.data.summary["sessions"]["turns"]
    with pytest.raises(ConfigError, match="a turn has to come where its session is\nhint: --router session_sticky"):
        assemble_cluster(ClusterScenario(base=asked(), replicas=2), {})


def test_a_plan_may_have_a_load_of_sessions() -> None:
    words = "--model qwen3-8b --gpus h200 --slo ttft_p99=2s --load sessions --sessions 3 --quick --jobs 1".split()
    words += ["--requests", "20", "--workload", CHAT, "--server-sessions"]
    done = CliRunner().invoke(plan, words)
    assert done.exit_code == 0, done.output
    assert "--server-sessions" in done.output


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"samples": "2"}, "`server_sessions` is on, and `samples` is `2`: the two are not simulated together"),
        ({"max_new_tokens": 9}, "and `max_new_tokens` is `9`"),
        ({"media": "image=1:64x64", "model": "qwen2.5-vl-7b"}, "and `media` is `image=1:64x64`"),
        ({"settings": {"role": "prefill"}}, "and `role` is `prefill`"),
    ],
)
def test_what_is_not_simulated_is_refused_by_name(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        ran(**fields)
