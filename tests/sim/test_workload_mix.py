"""Several workloads as one: times, tenants, sessions, token ids; and workloads as columns."""

from __future__ import annotations

import json
import shlex
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from lockstep.sim.cli.simulate import simulate
from lockstep.sim.run.assemble import assemble
from lockstep.sim.scenario.scenario import Scenario
from lockstep.sim.workload.mix import mix_of, mix_turns
from lockstep.sim.workload.token_runs import prompt_ids
from lockstep.sim.workload.turns import Turn, TurnLabel, Turns, TurnsBuilder, TurnStart
from lockstep.sim.workload.workload import WorkloadError, open_workload

CONSTANT = "gen:n=4,arrivals=constant,rate=1,input=fixed:10,output=fixed:5"
SESSIONS = "gen:n=6,turns=fixed:3,arrivals=constant,rate=0.5,input=fixed:7,output=fixed:3,think=fixed:1s"


def refusal(spec: str, **options: object) -> str:
    with pytest.raises(WorkloadError) as caught:
        open_workload(spec, seed=7, **options)  # type: ignore[arg-type]  # options vary by test
    assert "\nhint: " in str(caught.value)
    return str(caught.value)


# --- mixes


def test_sources_begin_together_and_are_tenants() -> None:
    workload = open_workload(f"mix:a={CONSTANT};b={CONSTANT}@2", seed=7)
    assert (workload.format, workload.name) == ("mix", "a+b")
    turns = list(workload.turns)
    assert [(turn.arrival_us, turn.tenant) for turn in turns] == [
        (0, "a"), (0, "b"), (500_000, "b"), (1_000_000, "a"), (1_000_000, "b"), (1_500_000, "b"),
        (2_000_000, "a"), (3_000_000, "a"),
    ]  # fmt: skip
    assert [turn.index for turn in turns] == list(range(8))
    assert len({turn.label for turn in turns}) == 8


def test_no_two_sources_share_a_token() -> None:
    shared = "gen:n=50,shared_prefix=64x2,input=fixed:10,output=fixed:5"
    workload = open_workload(f"mix:a={shared};b={shared}", seed=7)
    ids: dict[str, set[int]] = {"a": set(), "b": set()}
    for turn in workload.turns:
        ids[turn.tenant] |= set(prompt_ids(turn.prompt).tolist())
        ids[turn.tenant] |= set(range(turn.output_first_token, turn.output_first_token + turn.output_tokens))
    assert not ids["a"] & ids["b"]
    assert workload.summary().sharing_ratio == pytest.approx(1 - (4 * 64 + 100 * 10) / (100 * 74))


def test_equal_specs_at_two_places_are_different_requests() -> None:
    spec = "gen:n=50,input=lognormal:900:0.75"
    workload = open_workload(f"mix:a={spec};b={spec}", seed=7)
    lengths = {name: [turn.prompt_tokens for turn in workload.turns if turn.tenant == name] for name in "ab"}
    assert lengths["a"] != lengths["b"]
    assert open_workload(f"mix:a={spec};b={spec}", seed=7).digest == workload.digest
    assert open_workload(f"mix:a={spec};b={spec}", seed=8).digest != workload.digest


def test_sessions_stay_together_in_a_mix() -> None:
    workload = open_workload(f"mix:chat={SESSIONS};one={CONSTANT}", seed=7)
    turns = list(workload.turns)
    by_clock = [turn.arrival_us for turn in turns if turn.after is None]
    assert by_clock == sorted(by_clock)
    for turn in turns:
        if turn.after is not None:
            before = turns[turn.after]
            assert turn.after < turn.index
            assert (before.tenant, turn.tenant, turn.think_us) == ("chat", "chat", 1_000_000)
            assert turn.prompt_tokens == before.prompt_tokens + before.output_tokens + 7


def test_rate_window_and_limit_are_of_the_whole_mix() -> None:
    spec = f"mix:a={CONSTANT};b={CONSTANT}@2"
    assert [turn.arrival_us for turn in open_workload(spec, seed=7, rate_scale=2.0).turns][:4] == [
        0,
        0,
        250_000,
        500_000,
    ]
    assert open_workload(spec, seed=7, rate=10.0).summary().arrivals_per_s == pytest.approx(10)
    whole = list(open_workload(spec, seed=7).turns)
    limited = list(open_workload(spec, seed=7, limit=3).turns)
    assert [(turn.arrival_us, turn.tenant) for turn in limited] == [
        (turn.arrival_us, turn.tenant) for turn in whole[:3]
    ]
    window = list(open_workload(spec, seed=7, time_window="1..2").turns)
    assert [(turn.arrival_us, turn.tenant) for turn in window] == [(0, "a"), (0, "b"), (500_000, "b")]
    only_a = list(open_workload(spec, seed=7, time_window="2..9").turns)
    assert [turn.tenant for turn in only_a] == ["a", "a"]
    assert "nothing arrives in the window 9..10" in refusal(spec, time_window="9..10")


def test_tenants_of_a_source_are_kept_behind_its_name(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("arrival_s,input_tokens,output_tokens,tenant\n0,5,1,x\n1,5,1,y\n")
    workload = open_workload(f"mix:{path};gen:n=1", seed=7)
    assert {turn.tenant for turn in workload.turns} == {"rows/x", "rows/y", "generated"}


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("mix:", "names no workload"),
        (f"mix:{CONSTANT};", "names no workload"),
        ("mix:a=", "names no workload"),
        (f"mix:{CONSTANT}@fast", "has the rate `fast`"),
        (f"mix:{CONSTANT}@0", "has the rate `0`"),
        (f"mix:{CONSTANT}@-1", "has the rate `-1`"),
        (f"mix:{CONSTANT}@nan", "has the rate `nan`"),
        (f"mix:{CONSTANT};{CONSTANT}", "two sources are called `generated`"),
        (f"mix:a={CONSTANT};a={CONSTANT}", "two sources are called `a`"),
        (f"mix:a=mix:{CONSTANT}", "is a mix itself"),
        ("mix:a=absent.csv", "absent.csv: no such file"),
    ],
)
def test_a_bad_mix_is_refused(spec: str, says: str) -> None:
    assert says in refusal(spec)


def test_several_workloads_of_a_command_line_are_a_mix() -> None:
    assert mix_of(["trace.csv"]) == "trace.csv"
    assert mix_of([CONSTANT]) == CONSTANT
    assert mix_of(["chat=trace.csv"]) == "mix:chat=trace.csv"
    assert mix_of(["a=x.csv@3", CONSTANT]) == f"mix:a=x.csv@3;{CONSTANT}"
    with pytest.raises(WorkloadError, match="contains `;`"):
        mix_of(["a;b.csv", "c.csv"])


def test_ids_that_do_not_fit_are_moved_together() -> None:
    far = TurnsBuilder()
    for number, first in enumerate((2**30, 2**30 + 2**29)):
        far.append(
            TurnStart(number),
            TurnLabel("r{0}", number),
            prompt=(0, 8, first, 4),
            prompt_tokens=12,
            output_tokens=2,
            output_first_token=first + 4,
        )
    turns = far.build()
    mixed = mix_turns("mix:a;b", ["a", "b"], [turns, turns])
    ids = [set(prompt_ids(turn.prompt).tolist()) for turn in mixed]
    tenants = [turn.tenant for turn in mixed]
    assert tenants == ["a", "b", "a", "b"]
    assert len(ids[0] & ids[2]) == len(ids[1] & ids[3]) == 8
    assert not (ids[0] | ids[2]) & (ids[1] | ids[3])
    assert all(turn.output_first_token == max(prompt) + 1 for turn, prompt in zip(mixed, ids, strict=True))


def test_a_run_of_a_mix_can_be_repeated_from_its_command() -> None:
    spec = f"mix:a={CONSTANT};b={CONSTANT}@2"
    scenario = Scenario(
        model="qwen3-8b", gpu="h200", workload=spec, rate=6.123456789, time_window="0..3", settings={"pages": 4096}
    )
    command = scenario.command()
    assert f"--workload '{spec}'" in command
    assert "--rate 6.123456789" in command
    assert "--time-window 0..3" in command
    about = assemble(scenario, {}).about()["workload"]
    assert about["tenants"] == ["a", "b"]
    assert (about["rate"], about["time_window"], about["limit"]) == (6.123456789, "0..3", None)


# --- columns


def test_turns_are_a_sequence() -> None:
    turns = open_workload(SESSIONS, seed=7).turns
    as_list = list(turns)
    assert len(turns) == len(as_list) == 6
    assert [turns[n] for n in range(6)] == as_list
    assert (turns[-1], turns[1:5:2], turns[::-1]) == (as_list[-1], as_list[1:5:2], as_list[::-1])
    assert turns == as_list
    assert as_list[2] in turns
    assert turns.index(as_list[2]) == 2
    assert turns != as_list[:-1]
    with pytest.raises(IndexError):
        turns[6]


def test_turns_by_the_clock_and_behind_others() -> None:
    turns = open_workload(SESSIONS, seed=7).turns
    assert [turn.index for turn in turns.by_clock()] == [0, 3]
    assert [list(turns.follow_ups(n)) for n in range(6)] == [[1], [2], [], [4], [5], []]
    assert turns.root().tolist() == [0, 0, 0, 3, 3, 3]


def test_taking_a_turn_without_the_one_it_waits_for_is_an_error() -> None:
    turns = open_workload(SESSIONS, seed=7).turns
    assert [turn.after for turn in turns.take(np.array([3, 4, 0]))] == [None, 0, None]
    with pytest.raises(ValueError, match="turn 1 is taken without, or before, the turn it waits for"):
        turns.take(np.array([1]))
    with pytest.raises(ValueError, match="turn 4"):
        turns.take(np.array([4, 3]))


def test_a_builder_gives_back_what_it_was_given() -> None:
    builder = TurnsBuilder()
    expected = []
    for n in range(40):
        prompt = (n, 3, 1000 + n, 2) if n % 3 else (n, 5)
        after = n - 1 if n % 4 == 3 else None
        arrival_us = 0 if after is not None else n * 10
        expected.append(
            Turn(
                n,
                arrival_us,
                prompt,
                5,
                n % 5,
                7 + n,
                f"t{n}.{n % 4}",
                f"x{n % 2}",
                after,
                n % 4,
                "g" if n % 7 == 0 else "",
            )
        )
        builder.append(
            TurnStart(arrival_us, -1 if after is None else after, n % 4),
            TurnLabel("t{0}.{1}", n, n % 4),
            prompt=prompt,
            prompt_tokens=5,
            output_tokens=n % 5,
            output_first_token=7 + n,
            tenant=f"x{n % 2}",
            grammar="g" if n % 7 == 0 else "",
        )
    turns = builder.build()
    assert list(turns) == expected
    assert [turns[n] for n in range(40)] == expected


def test_a_turn_takes_forty_bytes_and_going_through_them_keeps_none() -> None:
    turns = open_workload("gen:n=20000", seed=7).turns
    assert isinstance(turns, Turns)
    assert turns.nbytes <= 41 * len(turns)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for turn in turns.by_clock():
        assert turn.prompt_tokens == 512
    grown, peak = (bytes_now - before for bytes_now in tracemalloc.get_traced_memory())
    tracemalloc.stop()
    assert grown < 400_000  # the row numbers of turns that arrive by the clock, which are kept
    assert peak < 4_000_000


def test_the_command_mixes_workloads_and_reports_how_to_repeat_it() -> None:
    words = ["--model", "qwen3-8b", "--gpu", "h200", "--workload", f"a={CONSTANT}", "--workload", f"b={CONSTANT}@2"]
    words += ["--pages", "4096", "--time-window", "0..3s", "--json"]
    result = CliRunner().invoke(simulate, words)
    about = json.loads(result.stdout)["about"]
    assert result.exit_code == 0
    assert (about["workload"]["tenants"], about["workload"]["turns"]) == (["a", "b"], 7)
    again = CliRunner().invoke(simulate, [*shlex.split(about["command"])[2:], "--json"])
    assert json.loads(again.stdout)["about"]["workload"] == about["workload"]
