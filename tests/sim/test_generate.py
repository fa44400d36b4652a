"""Generated workloads: the meaning of a spec, refusals, and invariants for every spec and seed."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.sim.workload.generate import parse_spec
from lockstep.sim.workload.lengths import Exponential, Fixed, LogNormal, Uniform
from lockstep.sim.workload.workload import Turn, Workload, WorkloadError, open_workload

ANCHOR = "gen:n=4000,rate=6.45,input=lognormal:900:0.75,output=lognormal:150:0.85,max_total=4096"
SESSIONS = "gen:sessions=30,turns=uniform:2:5,shared_prefix=256x4,prefix_choice=zipf,input=uniform:10:90,think=fixed:2s"


def gen(spec: str, seed: int = 7, **options: float) -> Workload:
    return open_workload(spec, seed=seed, **options)  # type: ignore[arg-type]  # options vary by test


def refusal(spec: str) -> str:
    with pytest.raises(WorkloadError) as caught:
        gen(spec)
    return str(caught.value)


# --- meaning of the keys


def test_defaults_are_a_hundred_requests_of_one_shape() -> None:
    workload = gen("gen:")
    assert (workload.name, workload.format, workload.source) == ("generated", "generated", "gen:")
    assert {(turn.prompt_tokens, turn.output_tokens) for turn in workload.turns} == {(512, 128)}
    assert len(workload.turns) == 100


def test_the_whole_grammar_is_read() -> None:
    spec = parse_spec(
        "gen:n=500,rate=inf,arrivals=gamma,cv=2,input=lognormal:900:0.75,output=uniform:1:9,shared_prefix=256x4,"
        "prefix_choice=zipf:1.5,sessions=100,turns=fixed:3,think=exponential:250ms,max_total=4096"
    )
    assert (spec.n, spec.rate, spec.arrivals, spec.cv) == (500, math.inf, "gamma", 2.0)
    assert (spec.sessions, spec.max_total) == (100, 4096)
    assert (spec.input, spec.output, spec.turns) == (LogNormal(900, 0.75), Uniform(1, 9), Fixed(3))
    assert (spec.think, spec.shared_prefix, spec.prefix_choice) == (Exponential(250_000), (256, 4), 1.5)


def test_requests_without_output_and_the_requests_of_a_call() -> None:
    spec = "gen:n=60,rate=2,output=none,items=uniform:2:9,query=fixed:32,input=uniform:50:90"
    turns = gen(spec).turns
    assert {turn.output_tokens for turn in turns} == {0}
    calls = [list(call) for _, call in itertools.groupby(turns, key=lambda turn: turn.label.partition("i")[0])]
    assert len(turns) == 60
    assert len(calls) > 5
    for call in calls:
        assert [turn.label.partition("i")[2] for turn in call] == [str(number) for number in range(len(call))]
        assert len({turn.arrival_us for turn in call}) == 1, "they arrive together"
        assert all(82 <= turn.prompt_tokens <= 122 for turn in call)
        firsts = {turn.prompt[:1] for turn in call}
        assert len(firsts) == 1, "and begin with the query"
        own = [turn.prompt[2] if len(turn.prompt) > 2 else turn.prompt[0] + 32 for turn in call]
        assert len(set(own)) == len(own), "behind which they differ"
    assert len({call[0].prompt[0] for call in calls}) == len(calls)


def test_one_request_of_a_call_has_its_query_too() -> None:
    assert {turn.prompt_tokens for turn in gen("gen:n=5,items=fixed:1,query=fixed:32,input=fixed:8").turns} == {40}


def test_constant_arrivals_keep_the_beat() -> None:
    assert [turn.arrival_us for turn in gen("gen:n=4,rate=8,arrivals=constant").turns] == [0, 125_000, 250_000, 375_000]


@pytest.mark.parametrize(("process", "cv"), [("poisson", 1.0), ("gamma,cv=0.5", 0.5), ("gamma,cv=3", 3.0)])
def test_gaps_have_the_rate_and_the_variation_requested(process: str, cv: float) -> None:
    turns = gen(f"gen:n=20000,rate=10,arrivals={process}").turns
    gaps_us = [later.arrival_us - turn.arrival_us for turn, later in itertools.pairwise(turns)]
    mean = sum(gaps_us) / len(gaps_us)
    deviation = math.sqrt(sum((gap - mean) ** 2 for gap in gaps_us) / len(gaps_us))
    assert mean == pytest.approx(100_000, rel=0.07)
    assert deviation / mean == pytest.approx(cv, rel=0.07)


def test_the_anchor_workload_has_its_known_means() -> None:
    summary = gen(ANCHOR).summary()
    assert summary.prompt.mean == pytest.approx(1_080, rel=0.05)
    assert summary.output.mean == pytest.approx(216, rel=0.05)
    assert summary.prompt.max + 1 <= 4_096
    assert summary.sharing_ratio == 0


def test_rate_changes_the_arrivals_and_nothing_else() -> None:
    slow, fast = gen(ANCHOR).turns, gen(ANCHOR, rate=12.9).turns
    assert [turn.prompt for turn in slow] == [turn.prompt for turn in fast]
    assert all(abs(one.arrival_us - 2 * two.arrival_us) <= 1 for one, two in zip(slow, fast, strict=True))
    assert gen(ANCHOR, rate_scale=2.0).turns == fast
    assert {turn.arrival_us for turn in gen(ANCHOR, rate=math.inf).turns} == {0}


def test_limit_and_n_cut_one_and_the_same_workload() -> None:
    for spec in (ANCHOR, SESSIONS):
        whole = gen(spec).turns
        assert gen(spec, limit=37).turns == whole[:37]
    assert gen("gen:n=10").turns == gen("gen:n=20").turns[:10]


def test_shared_prefixes_are_the_only_thing_shared() -> None:
    workload = gen("gen:n=200,shared_prefix=256x4,prefix_choice=zipf,input=fixed:44")
    chosen = Counter(turn.prompt[0] for turn in workload.turns)
    assert set(chosen) == {0, 256, 512, 768}
    assert chosen[0] > chosen[768]
    assert {turn.prompt_tokens for turn in workload.turns} == {300}
    assert workload.summary().sharing_ratio == pytest.approx(256 * (200 - 4) / (300 * 200))


def test_each_turn_of_a_session_begins_with_all_of_the_one_before() -> None:
    turns = gen("gen:sessions=1,turns=fixed:3,input=fixed:10,output=fixed:5,think=fixed:2s").turns
    assert [(turn.label, turn.after, turn.arrival_us, turn.think_us) for turn in turns] == [
        ("s0t0", None, 0, 0),
        ("s0t1", 0, 0, 2_000_000),
        ("s0t2", 1, 0, 2_000_000),
    ]
    assert [turn.prompt for turn in turns] == [(0, 10), (0, 25), (0, 40)]
    assert [turn.output_first_token for turn in turns] == [10, 25, 40]


def test_a_session_ends_where_the_next_turn_would_not_fit() -> None:
    turns = gen("gen:sessions=3,turns=fixed:9,input=fixed:10,output=fixed:5,max_total=50").turns
    assert [turn.prompt_tokens + turn.output_tokens for turn in turns] == [15, 30, 45] * 3


def test_n_caps_the_turns_of_all_sessions_together() -> None:
    assert len(gen("gen:n=500,sessions=3,turns=fixed:4").turns) == 12
    assert len(gen("gen:n=10,sessions=3,turns=fixed:4").turns) == 10
    assert len(gen("gen:n=10,turns=fixed:4").turns) == 10


# --- determinism


def test_same_seed_same_workload_and_another_seed_another() -> None:
    assert gen(SESSIONS).digest == gen(SESSIONS).digest
    assert gen(SESSIONS).digest != gen(SESSIONS, seed=8).digest


def test_digest_of_a_known_spec_never_changes() -> None:
    assert gen(SESSIONS).digest == "eb00739f8b5a992213a2bc887da92f87"
    assert gen(ANCHOR).digest == "f6a031198c68a085936019d6260fe717"


@pytest.mark.parametrize("hash_seed", ["1", "2"])
def test_digest_does_not_depend_on_the_hash_seed_of_python(hash_seed: str) -> None:
    program = (
        "import sys; from lockstep.sim.workload.workload import open_workload; "
        "print(open_workload(sys.argv[1], seed=7).digest)"
    )
    environment = os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)}
    printed = subprocess.run(
        [sys.executable, "-c", program, SESSIONS], env=environment, capture_output=True, text=True, check=True
    ).stdout
    assert printed.strip() == gen(SESSIONS).digest


# --- refused


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("gen:inptu=fixed:3", "unknown key `inptu`\nhint: did you mean `input`? known keys: n, rate, "),
        ("gen:zzz=1", "unknown key `zzz`\nhint: known keys: n, rate, "),
        ("gen:n", "`n` has no value\nhint: write n=500"),
        ("gen:n=5,n=6", "`n` is given twice"),
        ("gen:n=0", "`n` cannot be `0`: expected whole numbers from 1"),
        ("gen:n=1e3", "`n` cannot be `1e3`"),
        ("gen:rate=0", "`rate` cannot be `0`: expected arrivals per second"),
        ("gen:rate=nan", "`rate` cannot be `nan`"),
        ("gen:rate=", "`rate` cannot be ``"),
        (
            "gen:rate=fast",
            "`rate` cannot be `fast`: expected arrivals per second, at least 1e-06, or inf\nhint: for ex",
        ),
        ("gen:arrivals=bursty", "`arrivals` cannot be `bursty`: expected one of poisson, gamma, constant"),
        ("gen:arrivals=gamma,cv=0", "`cv` cannot be `0`"),
        ("gen:cv=2", "`cv` has no effect without arrivals=gamma"),
        ("gen:arrivals=poisson,cv=2", "`cv` has no effect without arrivals=gamma"),
        ("gen:input=512", "`input` cannot be `512`: expected fixed:N, uniform:LOW:HIGH"),
        ("gen:input=fixed:-5", "`input` cannot be `fixed:-5`"),
        ("gen:input=uniform:9:3", "expected LOW at most HIGH in uniform:LOW:HIGH; try uniform:3:9"),
        ("gen:input=lognormal:900:75", "expected SIGMA from 0 to 5"),
        ("gen:input=lognormal:900:x", "expected SIGMA from 0 to 5"),
        ("gen:turns=fixed:2,think=lognormal:5:1", "with a unit (us, ms, s, min, h)"),
        ("gen:turns=fixed:2,think=fixed:xs", "with a unit (us, ms, s, min, h)"),
        ("gen:turns=fixed:2,think=fixed:8000000s", "at most a week"),
        ("gen:think=fixed:5s", "`think` has no effect without turns="),
        ("gen:sessions=5", "`sessions` has no effect without turns="),
        ("gen:shared_prefix=256", "`shared_prefix` cannot be `256`: expected TOKENSxPROMPTS"),
        ("gen:shared_prefix=100000x100000", "expected at most 1,073,741,824 tokens"),
        ("gen:prefix_choice=zipf", "`prefix_choice` has no effect without shared_prefix="),
        ("gen:shared_prefix=8x2,prefix_choice=zipf:x", "expected uniform, zipf or zipf:EXPONENT"),
        ("gen:grammars=1.5x2", "expected SHARExGRAMMARS"),
        ("gen:query=fixed:8", "`query` has no effect without items="),
        ("gen:items=fixed:8,turns=fixed:2", "`items` cannot be combined with `turns`"),
        ("gen:output=none,turns=fixed:2", "`turns` cannot be combined with `output` none"),
        ("gen:output=none,grammars=0.5x2", "`grammars` cannot be combined with `output` none"),
        ("gen:shared_prefix=100x2,max_total=101", "leaves no room after a shared prefix of 100 tokens"),
        ("gen:input=fixed:512,max_total=512", "none of 1,000 draws of `input` and `output` fits `max_total` 512"),
    ],
)
def test_a_wrong_spec_is_refused_with_a_way_out(spec: str, says: str) -> None:
    assert says in refusal(spec)


# --- invariants


@st.composite
def lengths(draw: st.DrawFn) -> tuple[str, int, int]:
    """A distribution as text, and its least and greatest length."""
    low = draw(st.integers(1, 300))
    high = draw(st.integers(low, 400))
    return draw(
        st.sampled_from(
            [(f"fixed:{low}", low, low), (f"uniform:{low}:{high}", low, high), (f"lognormal:{low}:0.5", 1, 2**24)]
        )
    )


@given(
    seed=st.integers(-(2**70), 2**70),
    n=st.integers(1, 40),
    arrivals=st.sampled_from(["poisson", "constant", "gamma,cv=0.3", "gamma,cv=8"]),
    rate=st.sampled_from(["0.01", "3", "1e5", "inf"]),
    new=lengths(),
    output=lengths(),
    prefix=st.sampled_from(["", ",shared_prefix=17x3", ",shared_prefix=64x2,prefix_choice=zipf:2"]),
    turns=st.sampled_from(["", ",turns=uniform:1:6", ",turns=fixed:3,think=exponential:1s"]),
    max_total=st.sampled_from(["", ",max_total=6000"]),
)
def test_every_workload_is_consistent(
    seed: int,
    n: int,
    arrivals: str,
    rate: str,
    new: tuple[str, int, int],
    output: tuple[str, int, int],
    prefix: str,
    turns: str,
    max_total: str,
) -> None:
    spec = f"gen:n={n},arrivals={arrivals},rate={rate},input={new[0]},output={output[0]}{prefix}{turns}{max_total}"
    workload = gen(spec, seed)
    assert len(workload.turns) == n
    assert [turn.index for turn in workload.turns] == list(range(n))
    by_the_clock = [turn.arrival_us for turn in workload.turns if turn.after is None]
    assert by_the_clock[0] == 0
    assert by_the_clock == sorted(by_the_clock)
    assert len({turn.label for turn in workload.turns}) == n
    assert 0 <= workload.summary().sharing_ratio < 1
    prefix_tokens = {"": 0, ",shared_prefix=17x3": 17}.get(prefix, 64)
    for turn in workload.turns:
        history_tokens = check_turn(workload, turn) or prefix_tokens
        assert new[1] <= turn.prompt_tokens - history_tokens <= new[2]
        assert output[1] <= turn.output_tokens <= output[2]
        if max_total:
            assert turn.prompt_tokens + turn.output_tokens <= 6000


def check_turn(workload: Workload, turn: Turn) -> int:
    """Compare a turn with the one before it; return the tokens of their common history, 0 for a first turn."""
    assert sum(turn.prompt[1::2]) == turn.prompt_tokens
    assert all(count > 0 for count in turn.prompt[1::2])
    assert max(turn.prompt[::2]) < 2**31
    if turn.after is None:
        assert turn.think_us == 0
        return 0
    before = workload.turns[turn.after]
    assert (turn.after, turn.arrival_us) == (turn.index - 1, 0)
    spelled, history = spell(turn.prompt), spell(before.prompt)
    history += range(before.output_first_token, before.output_first_token + before.output_tokens)
    assert spelled[: len(history)] == history
    return len(history)


def spell(runs: tuple[int, ...]) -> list[int]:
    return [first_token + i for first_token, count in zip(runs[::2], runs[1::2], strict=True) for i in range(count)]
