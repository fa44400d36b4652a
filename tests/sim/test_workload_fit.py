"""A fitted model resembles its trace, within stated tolerances; its file is checked; `lockstep workload` shows both."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from lockstep.sim.cli.workload import workload as command
from lockstep.sim.workload.fit import Row, burstiness, compare, fit, rank_correlation
from lockstep.sim.workload.fitted import WorkloadModel, draw_model, parse_model, write_model
from lockstep.sim.workload.reuse import hit_ratio
from lockstep.sim.workload.turns import Turns
from lockstep.sim.workload.workload import WorkloadError, open_workload

MOONCAKE = "traces/mooncake/conversation_trace.jsonl.gz"
AZURE = "traces/azure/AzureLLMInferenceTrace_code.csv.gz"
AGENTIC = "traces/agentic/agentic_developers.jsonl.gz"

CHAT = "gen:n=900,rate=5,turns=uniform:1:4,input=lognormal:300:0.8,output=lognormal:90:0.6,shared_prefix=64x3"


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    turns = open_workload(CHAT, seed=7).turns
    path = tmp_path / "chat.json"
    write_model(path, fit(turns, {"source": "chat", "digest": "d"}))
    return path


@cache
def fitted(path: Path, rate: float | None = None) -> tuple[Turns, WorkloadModel]:
    turns = open_workload(str(path), seed=1, rate=rate, digest=False).turns
    return turns, fit(turns, {})


def rows_of(trace: Turns, model: WorkloadModel, seed: int) -> dict[str, Row]:
    return {row.what: row for row in compare(trace, draw_model(model, seed=seed))}


def assert_within(rows: dict[str, Row], tolerances: dict[str, float]) -> None:
    """Each tolerance holds for every row whose name begins with it; the longest beginning counts."""
    for what, row in rows.items():
        matching = [begin for begin in tolerances if what.startswith(begin)]
        assert matching, f"no tolerance for {what}"
        assert row.off is not None or row.trace == row.generated, row
        assert abs(row.off or 0.0) <= tolerances[max(matching, key=len)], row


# --- resemblance to the trace


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_model_of_the_mooncake_trace_resembles_it(data: Path, seed: int) -> None:
    trace, model = fitted(data / MOONCAKE)
    rows = rows_of(trace, model, seed)
    tolerances = {
        "turns": 0.0, "requests/s": 0.02, "gap cv": 0.05, "dispersion": 0.20, "prompt": 0.03, "output": 0.08,
        "rank correlation": 0.03, "hit ratio": 0.03,
        "dispersion 60 s": 0.40,  # of 58 windows: a fifth of it is chance alone
    }  # fmt: skip
    assert_within(rows, tolerances)
    assert len(np.unique(draw_model(model, seed=seed).arrival_us)) == pytest.approx(1_180, abs=40)  # it keeps the ticks


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_model_of_the_azure_trace_resembles_it(data: Path, seed: int) -> None:
    trace, model = fitted(data / AZURE)
    tolerances = {
        "turns": 0.0, "requests/s": 0.02, "gap cv": 0.20, "dispersion": 0.20, "prompt": 0.03, "output": 0.10,
        "rank correlation": 0.03, "hit ratio": 0.0,
    }  # fmt: skip
    assert_within(rows_of(trace, model, seed), tolerances)


def test_a_model_of_the_agentic_trace_resembles_it(data: Path) -> None:
    trace, model = fitted(data / AGENTIC, rate=0.1)
    rows = rows_of(trace, model, seed=1)
    tolerances = {
        "turns": 0.0, "turns per session": 0.03, "sessions": 0.03, "sessions/s": 0.1, "gap cv": 0.15,
        "dispersion": 0.6,  # of 349 starts, which were drawn for the trace too
        "prompt": 0.40, "prompt p10": 0.12, "prompt p50": 0.12, "prompt mean": 0.20, "output": 0.15,
        "rank correlation": 0.06, "think": 0.10,
        "hit ratio": 0.03, "hit ratio, 1.48M": 0.15, "hit ratio, unbounded": 0.01,
    }  # fmt: skip
    assert_within(rows, tolerances)


def test_the_chosen_arrivals_are_the_simplest_that_are_good_enough(data: Path) -> None:
    model = fitted(data / AZURE)[1].arrivals
    good = [row for row in model.evidence if float(row["error"]) <= 0.15]
    assert model.chosen == min(good, key=lambda row: float(row["numbers"]))["tried"]
    poisson = next(row for row in model.evidence if row["tried"] == "exponential")
    assert float(poisson["error"]) > 2  # so a plain Poisson process would not do


def test_poisson_arrivals_are_found_to_be_poisson() -> None:
    model = fit(open_workload("gen:n=4000,rate=20", seed=7).turns, {}).arrivals
    assert (model.process, model.profile, model.batches) == ("exponential", (), None)


# --- drawing


def test_a_model_is_drawn_at_any_number_rate_and_seed(model_file: Path) -> None:
    drawn = open_workload(str(model_file), seed=7)
    assert (drawn.format, drawn.name, len(drawn.turns)) == ("fitted", "chat", 900)
    assert "fitted to chat, digest d" in drawn.notes[0]
    assert open_workload(str(model_file), seed=7).digest == drawn.digest
    assert open_workload(str(model_file), seed=8).digest != drawn.digest
    spec = f"gen:file={model_file},n=2000,rate=50"
    many = open_workload(spec, seed=7)
    assert len(many.turns) == 2_000
    assert many.summary().arrivals_per_s == pytest.approx(50, rel=0.15)
    assert [turn.prompt for turn in many.turns[:800]] == [turn.prompt for turn in drawn.turns[:800]]
    twice = open_workload(spec, seed=7, rate_scale=2.0).turns.arrival_us
    assert np.abs(twice * 2 - many.turns.arrival_us).max() <= 1
    assert set(open_workload(spec, seed=7, rate=math.inf).turns.arrival_us.tolist()) == {0}
    assert len(open_workload(spec, seed=7, limit=5).turns) == 5
    window = open_workload(spec, seed=7, time_window="2..4", rate=5.0).turns
    inside = [turn for turn in many.turns if turn.after is None and 2e6 <= turn.arrival_us < 4e6]
    assert len(window.by_clock_rows) == len(inside)
    assert window.arrival_us[-1] <= 20e6


def test_sessions_of_a_model_go_on_where_they_were(model_file: Path) -> None:
    turns = list(open_workload(str(model_file), seed=7).turns)
    followed = [turn for turn in turns if turn.after is not None]
    assert len(followed) > 300
    for turn in followed:
        before = turns[turn.after or 0]
        assert turn.prompt_tokens > before.prompt_tokens + before.output_tokens  # as in the spec of the fit
        assert turn.prompt[0] == before.prompt[0]


def test_a_model_of_one_request_is_one_request(tmp_path: Path) -> None:
    model = fit(open_workload("gen:n=1,input=fixed:9,output=fixed:4", seed=7).turns, {})
    write_model(tmp_path / "one.json", model)
    drawn = open_workload(str(tmp_path / "one.json"), seed=1, rate=3.0).turns
    assert [(turn.arrival_us, turn.prompt_tokens, turn.output_tokens) for turn in drawn] == [(0, 9, 4)]


# --- the file


def test_a_model_file_is_the_model(model_file: Path) -> None:
    model = parse_model(str(model_file), model_file.read_bytes())
    assert json.loads(model_file.read_text())["version"] == 1
    assert model == fit(open_workload(CHAT, seed=7).turns, {"source": "chat", "digest": "d"})


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (("version",), 2, "`version` is 2, and this release reads 1"),
        (("turns",), 0, "$.turns"),
        (("turns",), "many", "$.turns"),
        (("extra",), 1, "extra"),
        (("arrivals", "rate"), -1, "$.arrivals.rate"),
        (("arrivals", "process"), "pareto", "$.arrivals.process"),
        (("arrivals", "process"), "empirical", "`arrivals.gaps` is missing"),
        (("arrivals", "shape"), 1e9, "`arrivals.shape` must be from 0.05 to 100"),
        (("arrivals", "gaps"), {"at": [0, 1], "values": [2, 1]}, "`arrivals.gaps`"),
        (("arrivals", "batches"), {"at": [0, 1], "values": [0, 0]}, "`arrivals.batches` is zero throughout"),
        (("arrivals", "profile"), [0, 0], "`arrivals.profile` is zero throughout"),
        (("requests", "lag"), [1], "`requests.lag` has 1 rows"),
        (("requests", "new_tokens"), [-1], "$.requests.new_tokens[0]"),
        (("think",), None, "`think` is missing"),
        (("follow_ups",), {}, "`follow_ups` has no row of kind"),
        (("requests", "kind"), [9], "$.requests.kind[0]"),
    ],
)
def test_a_bad_model_file_is_refused(model_file: Path, path: tuple[str, ...], value: object, says: str) -> None:
    content = json.loads(model_file.read_text())
    place = content
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    model_file.write_text(json.dumps(content))
    with pytest.raises(WorkloadError) as caught:
        open_workload(str(model_file), seed=7)
    assert says in str(caught.value)
    assert "\nhint: write it again with `lockstep workload fit`" in str(caught.value)


def test_a_cut_off_model_file_is_refused(model_file: Path) -> None:
    model_file.write_bytes(model_file.read_bytes()[:-100])
    with pytest.raises(WorkloadError, match="not a fitted model"):
        open_workload(str(model_file), seed=7)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("gen:file=FILE,input=fixed:5", "`input` has no meaning for a fitted model"),
        ("gen:file=FILE,n=0", "`n` cannot be `0`"),
        ("gen:file=FILE,rate=-1", "`rate` cannot be `-1`"),
        ("gen:file=FILE,n=5,n=6", "`n` is given twice"),
        ("gen:file=", "`file` is given twice or has no value"),
        ("gen:file=absent.json", "absent.json: no such file"),
    ],
)
def test_a_bad_spec_of_a_model_is_refused(model_file: Path, spec: str, says: str) -> None:
    with pytest.raises(WorkloadError) as caught:
        open_workload(spec.replace("FILE", str(model_file)), seed=7)
    assert says in str(caught.value)


# --- measures


def test_rank_correlation_is_spearmans() -> None:
    up = np.array([1, 2, 2, 7], np.int32)
    assert rank_correlation(up, up * 3) == pytest.approx(1)
    assert rank_correlation(up, -up) == pytest.approx(-1)
    assert rank_correlation(np.array([1, 2, 3], np.int32), np.array([1, 3, 2], np.int32)) == pytest.approx(0.5)
    assert rank_correlation(up, np.ones(4, np.int32)) is None


def test_burstiness_of_a_beat_and_of_bursts() -> None:
    beat = burstiness(np.arange(0, 1_000 * 10**6, 10**5))
    assert (beat.rate_per_s, beat.gap_cv, beat.dispersion) == (10, 0, (0, 0, 0))
    pairs = burstiness(np.repeat(np.arange(0, 1_000 * 10**6, 10**6), 2))
    assert pairs.gap_cv == pytest.approx(1, abs=0.01)
    assert burstiness(np.zeros(5, np.int64)).rate_per_s is None


def test_hits_at_finite_capacities_are_those_of_the_published_oracles(data: Path) -> None:
    turns = open_workload(str(data / MOONCAKE), seed=1).turns
    oracles = json.loads((data / "published/prefix_cache_oracles.json").read_text())
    rows = oracles["traces"]["mooncake_conversation_trace"]
    checked = 0
    for row in rows:
        if row["leaf_first"] and row["capacity_blocks"]:
            # The published values count blocks of 512 tokens, also a last one of a prompt that is not full.
            assert hit_ratio(turns, 512 * row["capacity_blocks"]) == pytest.approx(row["token_hit_ratio"], abs=0.004)
            checked += 1
    assert checked >= 5


def test_a_cache_evicts_what_was_not_used_for_longest_and_ends_first(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    prompts = [[1, 2, 3, 4], [5, 6, 7], [1, 2, 3, 4], [5, 6, 7]]
    lines = [
        {"arrival_s": n, "input_tokens": len(ids), "output_tokens": 1, "prompt_token_ids": ids}
        for n, ids in enumerate(prompts)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    turns = open_workload(str(path), seed=1).turns
    assert hit_ratio(turns, 7) == pytest.approx(7 / 14)
    assert hit_ratio(turns, 5) == pytest.approx((2 + 1) / 14)  # 1 and 2 remained of the first, then 5 of the second
    assert hit_ratio(turns, 3) == 0


# --- the command


def lockstep_workload(*words: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(command, list(words))
    return result.exit_code, result.stdout, result.stderr


def test_describe_fits_eighty_columns_and_reports_what_there_is(model_file: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"arrival_s": 0, "input_tokens": 5, "output_tokens": 0}\n')
    long_name = "a" * 60
    mix = (f"{long_name}={CHAT}", f"b={CHAT}")
    for words in ((str(model_file),), (str(trace),), mix, ("gen:n=5,rate=inf",), ("gen:n=500,rate=0.001",)):
        status, out, err = lockstep_workload("describe", *words)
        assert (status, err) == (0, "")
        assert max(map(len, out.splitlines())) <= 80
    status, out, _ = lockstep_workload("describe", CHAT)
    assert "900 requests in" in out
    assert "think time: p10" in out
    assert "% of prompt tokens were in an earlier prompt" in out
    assert "arrivals over time" in out


def test_describe_as_json_has_the_same_figures() -> None:
    status, out, _ = lockstep_workload("describe", f"a={CHAT}", f"b={CHAT}@2", "--json", "--limit", "50")
    figures = json.loads(out)
    assert (status, figures["requests"], len(figures["tenants"])) == (0, 50, 2)
    assert figures["sessions"]["turns"]["max"] <= 4
    assert sum(figures["prompt"]["by_power_of_two"].values()) == 50


def test_fit_writes_a_model_and_compares(tmp_path: Path) -> None:
    out = tmp_path / "model.json"
    status, text, err = lockstep_workload("fit", CHAT, "-o", str(out))
    assert status == 0
    assert "<- taken" in text
    assert "hit ratio, unbounded" in text
    assert max(map(len, text.splitlines())) <= 80
    assert str(out) in err
    provenance = json.loads(out.read_text())["provenance"]
    assert provenance["digest"] == open_workload(CHAT, seed=7).digest
    status, _, err = lockstep_workload("fit", CHAT, "-o", str(out))
    assert (status, "--overwrite" in err) == (2, True)
    status, text, _ = lockstep_workload("fit", CHAT, "-o", str(out), "--overwrite", "--json")
    comparison = {row["what"]: row for row in json.loads(text)["comparison"]}
    assert comparison["turns"]["generated"] == 900


def test_bad_workloads_are_one_message(tmp_path: Path) -> None:
    for words in (("describe", str(tmp_path / "absent")), ("fit", "gen:n=x", "-o", str(tmp_path / "o.json"))):
        status, out, err = lockstep_workload(*words)
        assert (status, out) == (2, "")
        assert err.startswith("WorkloadError: ")
        assert err.count("hint: ") == 1
    (tmp_path / "file").touch()
    status, _, err = lockstep_workload("fit", "gen:n=9", "-o", str(tmp_path / "file" / "model.json"))
    assert status == 2
    assert f"`{tmp_path}/file` is a file" in err
    assert lockstep_workload("fit", "gen:n=9", "-o", str(tmp_path / "new" / "folder.json"))[0] == 0
