"""Requests with several answers (n, best_of) in the simulator: the owner of each token, shared pages, continuations."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from lockstep.core.cluster.router import RouterConfig
from lockstep.core.contract.commands import Step, StreamTokens
from lockstep.core.contract.errors import ConfigError
from lockstep.core.contract.events import ObservedEvent, RequestArrived
from lockstep.core.journal.reader import read_journal
from lockstep.core.scheduler.engine import Engine
from lockstep.host.admission_options import parse_admission
from lockstep.sim.cli.plan import plan
from lockstep.sim.cluster.scenario import ClusterScenario
from lockstep.sim.cluster.setup import assemble_cluster
from lockstep.sim.cluster.simulate import simulate_cluster
from lockstep.sim.metrics.samples import measure_samples
from lockstep.sim.results.stored_run import read_run
from lockstep.sim.run.assemble import assemble
from lockstep.sim.run.run_folder import write_run
from lockstep.sim.run.simulate import Run, simulate
from lockstep.sim.scenario.scenario import Scenario
from lockstep.sim.workload.samples import OpenSamples, parse_samples, sample_first_token, with_samples
from lockstep.sim.workload.workload import open_workload, workload_digest
from lockstep.tools.recorded import journal_workload
from lockstep.tools.runs import Walk

SMALL = "gen:n=60,rate=30,turns=uniform:1:3,think=fixed:50ms,input=uniform:20:200,output=uniform:4:40"


def asked(samples: str | None = "0.6x2..5", **fields: Any) -> Scenario:
    settings = {"pages": 2000, **fields.pop("settings", {})}
    names = {"model": "qwen3-8b", "gpu": "h200", "workload": SMALL, "samples": samples, "settings": settings}
    return Scenario(**(names | fields))


def ran(samples: str | None = "0.6x2..5", folder: Path | None = None, **fields: Any) -> Run:
    return simulate(assemble(asked(samples, **fields), {}), folder=folder, check_every=5)


class Streamed:
    """Tokens by request, and arrivals, from the engine's steps."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.arrived: list[RequestArrived] = []

    def observe(self, event: ObservedEvent, step: Step, engine: Engine) -> None:
        if isinstance(event, RequestArrived):
            self.arrived.append(event)
        for command in step.commands:
            if isinstance(command, StreamTokens):
                at = 0
                for request_id, count in zip(command.request_ids.tolist(), command.token_counts.tolist(), strict=True):
                    self.tokens.setdefault(request_id, []).extend(command.tokens[at : at + count].tolist())
                    at += count


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "settings", [{}, {"overlap_depth": 2, "chunked_prefill_size": 64}, {"same_step_sharing": True}]
)
def test_each_answer_has_tokens_of_its_own_and_a_session_goes_on_with_the_first(
    seed: int, settings: dict[str, Any]
) -> None:
    setup = assemble(asked(seed=seed, settings=settings), {})
    told = Streamed()
    run = simulate(setup, observer=told, check_every=10)  # so that it receives every decode
    turns, by_label = setup.workload.turns, {turn.label: turn for turn in setup.workload.turns}
    assert turns.samples is not None
    assert run.data.summary["requests"]["completed"] == int(turns.samples.sum()) > len(turns)
    assert len(told.arrived) == len(turns)
    seen = Counter[int]()
    next_id = 0
    for event in told.arrived:
        turn = by_label[event.label]
        assert (event.request_id, event.parallel_samples) == (next_id, turn.samples)
        next_id += turn.samples
        for sample in range(turn.samples):
            first = sample_first_token(turn, sample)
            assert told.tokens[event.request_id + sample] == list(range(first, first + turn.output_tokens))
            seen.update(range(first, first + turn.output_tokens))
    assert set(seen.values()) == {1}  # and no prompt has them but those that continue
    ids = {token for turn in turns for token in turn.prompt[::2]}
    assert not {turn.samples_first_token for turn in turns if turn.samples > 1} & ids


def test_one_answer_each_is_the_run_without_samples(tmp_path: Path) -> None:
    plain, one = ran(None, tmp_path / "a"), ran("1", tmp_path / "b")
    assert "samples" not in plain.metrics()
    assert "samples" not in plain.about()
    assert "--samples" not in plain.setup.scenario.command()
    assert plain.setup.workload.digest == one.setup.workload.digest
    assert one.data.summary == plain.data.summary
    facts = [[event for _, event, _ in Walk(tmp_path / name)] for name in ("a", "b")]
    assert facts[0] == facts[1]


def test_samples_share_their_prompt_and_compute_their_last_page() -> None:
    one = "gen:n=1,rate=1,input=fixed:640,output=fixed:10"
    for samples in (2, 8):
        cache = ran(str(samples), workload=one).data.summary["cache"]
        assert cache["prompt_tokens_admitted"] == 640 * samples
        assert cache["prompt_tokens_cached"] == (samples - 1) * 624  # pages of 16: the last one is computed
    apart = ran("8", workload=one, settings={"radix_cache": False}).data.summary
    assert apart["cache"]["prompt_tokens_cached"] == 0
    assert apart["kv"]["used_pages_max"] > 4 * ran("8", workload=one).data.summary["kv"]["used_pages_max"]


def test_more_samples_take_longer_and_the_client_waits_for_the_last() -> None:
    found = [ran(str(n)).data.summary for n in (2, 4, 8)]
    for part, n in zip(found, (2, 4, 8), strict=True):
        told = part["samples"]
        assert (told["requests"], told["samples"], told["requests_completed"]) == (60, 60 * n, 60)
        assert told["ttft_us_p50"] <= part["latency"]["ttft_us_p50"]
        assert told["e2e_us_p50"] >= part["latency"]["e2e_us_p50"]
    assert [part["samples"]["e2e_us_mean"] for part in found] == sorted(
        part["samples"]["e2e_us_mean"] for part in found
    )


def test_a_session_waits_for_all_answers() -> None:
    setup = assemble(
        asked(
            "4",
            workload="gen:sessions=5,rate=2,turns=fixed:3,think=fixed:1ms,input=fixed:99,output=fixed:9",
            engine="none",
        ),
        {},
    )
    data = simulate(setup).data
    rows = {label: i for i, label in enumerate(data.requests.label.tolist())}
    for turn in setup.workload.turns:
        if turn.after is None:
            continue
        before = setup.workload.turns[turn.after].label
        ends = [data.requests.ended_us[row] for label, row in rows.items() if label.split(".")[0] == before]
        assert data.requests.arrival_us[rows[turn.label]] == max(ends) + 1000


def test_ends_of_samples_are_one_end() -> None:
    several = OpenSamples()
    several.arrived(4, 3)
    assert several.first_of(6) == 4
    assert several.ended(5, answered=True) is None
    assert several.ended(4, answered=False) is None
    assert several.ended(6, answered=True) == (4, False)
    assert several.ended(9, answered=True) == (9, True)
    several.arrived(10, 2)
    assert several.ended(11, answered=True) is None
    assert several.ended(10, answered=True) == (10, True)


def test_what_did_not_complete_whole_is_not_in_the_times() -> None:
    rows = [np.array(column, np.int64) for column in ([0, 0, 5, 5], [3, 4, 9, -1], [10, 20, 30, -1])]
    told = measure_samples([(0, 2), (2, 2)], *rows, np.array([True, True, True, False]))
    assert (told["requests"], told["samples"], told["requests_completed"]) == (2, 4, 1)
    assert (told["ttft_us_p50"], told["e2e_us_p99"]) == (3.0, 20.0)
    assert measure_samples([], *rows, np.ones(4, bool))["e2e_us_p50"] is None


def test_too_many_at_once_are_turned_away_together() -> None:
    summary = ran(
        "8", settings={"max_queued_requests": 10}, workload="gen:n=10,rate=inf,input=fixed:64,output=fixed:8"
    ).data.summary
    assert summary["requests"]["rejected"] % 8 == 0
    assert summary["requests"]["rejected"] + summary["requests"]["completed"] == 80


@pytest.mark.parametrize(
    "fields",
    [{}, {"settings": {"speculative_method": "ngram"}}, {"adapters": "4"}, {"tp": 2, "pp": 2}, {"max_new_tokens": 60}],
)
def test_uniform_stretches_of_decodes_change_nothing(fields: dict[str, Any]) -> None:
    setup = assemble(asked(**fields), {})
    assert simulate(setup).data.summary == simulate(setup, check_every=1).data.summary


def test_a_closed_loop_and_a_cluster_have_samples_too() -> None:
    loop = ran("3", concurrency=4, limit=50).data.summary
    assert (loop["samples"]["requests"], loop["requests"]["completed"]) == (50, 150)
    two = simulate_cluster(assemble_cluster(ClusterScenario(base=asked("3"), replicas=2), {})).data.summary
    assert (two["samples"]["requests"], two["requests"]["completed"]) == (60, 180)


def test_a_run_is_read_back_with_its_samples(tmp_path: Path) -> None:
    run = ran(folder=tmp_path / "run")
    write_run(tmp_path / "run", run)
    stored = read_run(tmp_path / "run")
    assert stored.summary("samples", "samples") == run.data.summary["samples"]["samples"]
    assert "All answers" in (tmp_path / "run" / "report.html").read_text()
    assert read_journal(tmp_path / "run").header.host["samples"] == "0.6x2..5"
    sent = {turn.label: turn.samples for turn in run.setup.workload.turns}
    assert {turn.label: turn.samples for turn in journal_workload(tmp_path / "run").turns} == sent


def test_a_plan_prices_samples() -> None:
    words = "--model qwen3-8b --gpus h200 --slo ttft_p99=2s --rate 4 --quick --requests 20 --jobs 1".split()
    words += ["--workload", "gen:input=fixed:64,output=fixed:4", "--samples", "4"]
    done = CliRunner().invoke(plan, words)
    assert done.exit_code == 0, done.output
    assert "--samples 4" in done.output


def test_which_turns_have_several_is_drawn_once_and_is_in_the_digest() -> None:
    turns = open_workload("gen:n=400,rate=4,output=uniform:1:9", seed=1).turns
    spec = parse_samples("0.25x2..4")
    drawn = with_samples(turns, spec, seed=3)
    assert drawn == with_samples(turns, spec, seed=3) != with_samples(turns, spec, seed=4)
    assert drawn.samples is not None
    assert set(drawn.samples.tolist()) == {1, 2, 3, 4}
    assert 70 < int((drawn.samples > 1).sum()) < 130
    assert workload_digest(drawn) != workload_digest(turns)
    silent = replace(turns, output_tokens=np.zeros(len(turns), np.int32))
    assert all(turn.samples == 1 for turn in with_samples(silent, spec, seed=3))


@pytest.mark.parametrize("text", ["", "0", "129", "4..2", "2x4", "0x4", "x", "0.5x", "9" * 5000])
def test_what_cannot_be_read_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match=r"`samples` cannot be .*\nhint: such as --samples 4"):
        parse_samples(text)


def test_what_is_not_simulated_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="`samples` is `2`, but `role` is prefill"):
        ran("2", settings={"role": "prefill"})
    line = ClusterScenario(base=asked("2"), replicas=2, router=RouterConfig(), dispatch=parse_admission("open=8"))
    with pytest.raises(ConfigError, match="requests may wait at the router"):
        assemble_cluster(line, {})
