"""Agentic sessions, ServeGen clients, ShareGPT token ids, plain rows: the resulting turns, and the refusals of each."""

from __future__ import annotations

import gzip
import io
import itertools
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
import zstandard

from lockstep.sim.run.fast_runs import share_prefixes
from lockstep.sim.workload.arrivals import TimeWindow
from lockstep.sim.workload.servegen import open_loop_turns
from lockstep.sim.workload.token_runs import TOKEN_IDS, FreshTokens, fresh_tokens, prompt_ids
from lockstep.sim.workload.workload import SourceReading, Workload, WorkloadError, open_workload

AGENTIC = "traces/agentic/agentic_developers.jsonl.gz"
AZURE = "traces/azure/AzureLLMInferenceTrace_code.csv.gz"
LENGTHS = "traces/lengths/vidur_arxiv_summarization_llama2_lengths.csv.gz"
SERVEGEN = "traces/servegen/servegen_deepseek-r1.tar.zst"
SERVEGEN_IMAGES = "traces/servegen/servegen_mm-image.tar.zst"
SHAREGPT = "published/llmservingsim/sharegpt-llama-3.1-8b-300-sps10.jsonl.gz"

LENIENT = SourceReading(skip_bad_rows=True)


def open_text(folder: Path, text: str, **options: object) -> Workload:
    path = folder / "trace"
    path.write_text(text)
    return open_workload(str(path), seed=7, **options)  # type: ignore[arg-type]  # options vary by test


def refusal(folder: Path, text: str, **options: object) -> str:
    with pytest.raises(WorkloadError) as caught:
        open_text(folder, text, **options)
    assert "\nhint: " in str(caught.value)
    return str(caught.value)


# --- agentic sessions


def agentic(trace: str, tokens: int, out: int, runs: list[list[int]], think: float | None, **more: object) -> str:
    row = {"trace": trace, "agent": "", "in": tokens, "out": out, "hash_runs": runs, "think_time": think, **more}
    return json.dumps(row) + "\n"


TWO_SESSIONS = (
    agentic("a", 130, 5, [[1, 2]], 0.0, t=0.0, api_time=2.0)
    + agentic("a", 200, 0, [[1, 2], [7, 1]], 3.0, t=5.0, api_time=None)
    + agentic("a", 64, 9, [[40, 1]], None, agent="helper", t=0.0)
    + agentic("b", 128, 6, [[1, 2]], 0.0, t=0.0, api_time=1.5)
    + agentic("b", 130, 6, [[1, 2]], None, t=4.0)
)


def test_rows_of_an_agentic_session_wait_for_each_other(tmp_path: Path) -> None:
    workload = open_text(tmp_path, TWO_SESSIONS)
    turns = list(workload.turns)
    assert workload.format == "agentic"
    assert [turn.after for turn in turns] == [None, 0, None, None, 3]
    assert [turn.think_us for turn in turns] == [0, 3_000_000, 0, 0, 2_500_000]  # the last: 4 s less 1.5 s of answering
    assert [turn.label for turn in turns] == ["line1", "line2", "line3", "line4", "line5"]
    assert [turn.output_tokens for turn in turns] == [5, 0, 9, 6, 6]


def test_block_ids_mean_the_same_within_a_session_only(tmp_path: Path) -> None:
    first, second, helper, other, other_second = (
        set(prompt_ids(turn.prompt).tolist()) for turn in open_text(tmp_path, TWO_SESSIONS).turns
    )
    assert len(first & second) == 128  # two blocks of 64; the 2 tokens behind them are shared with no other
    assert len(other & other_second) == 128
    assert not (first | second | helper) & (other | other_second)


def test_sessions_begin_at_once_or_at_a_rate(tmp_path: Path) -> None:
    at_once = open_text(tmp_path, TWO_SESSIONS)
    assert {turn.arrival_us for turn in at_once.turns} == {0}
    assert at_once.notes == ("the file does not record when its 2 sessions begin: all at once",)
    drawn = open_text(tmp_path, TWO_SESSIONS, rate=0.1)
    starts_us = [turn.arrival_us for turn in drawn.turns.by_clock()]
    assert starts_us[0] == starts_us[1] == 0  # a helper begins with its session
    assert starts_us[2] > 0
    faster = [turn.arrival_us for turn in open_text(tmp_path, TWO_SESSIONS, rate=0.1, rate_scale=2.0).turns.by_clock()]
    assert faster[2] == pytest.approx(starts_us[2] / 2, abs=1)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (agentic("", 64, 1, [[1, 1]], 0), "column `trace`: expected the name of the session"),
        (agentic("a", 64, -1, [[1, 1]], 0), "column `out`"),
        (agentic("a", 64, 1, [[1, 2]], 0), "column `hash_runs`: expected runs of 1 blocks, one per 64 tokens of `in`"),
        (agentic("a", 64, 1, [[1, 0]], 0), "column `hash_runs`: expected pairs"),
        (agentic("a", 64, 1, [[1]], 0), "column `hash_runs`: expected a list of pairs"),
        (agentic("a", 64, 1, [["x", 1]], 0), "column `hash_runs`: expected a list of pairs"),
        (agentic("a", 64, 1, [[1, 1]], -1), "column `think_time`: expected a time in seconds"),
        (agentic("a", 64, 1, [[1, 1]], 0, t="noon"), "column `t`"),
        (agentic("a", 64, 1, [[1, 1]], 0, agent=5), "column `agent`"),
    ],
)
def test_a_bad_agentic_row_is_refused(tmp_path: Path, row: str, says: str) -> None:
    assert f"line 2, {says}" in refusal(tmp_path, agentic("a", 64, 1, [[1, 1]], 0) + row)
    assert open_text(tmp_path, agentic("a", 64, 1, [[1, 1]], 0) + row, reading=LENIENT).skipped.count == 1


def test_ids_beyond_what_can_be_numbered_are_refused(tmp_path: Path) -> None:
    assert "more than 1,073,741,824 tokens" in refusal(tmp_path, agentic("a", 64, 1, [[2**40, 1]], 0))


def test_the_agentic_trace_is_read_whole(data: Path) -> None:
    workload = open_workload(str(data / AGENTIC), seed=1)
    turns = workload.turns
    assert (workload.format, len(turns), len(turns.by_clock_rows)) == ("agentic", 21_560, 349)  # 336 and 13 helpers
    assert int((turns.output_tokens == 0).sum()) == 12
    rows = [json.loads(line) for line in gzip.decompress((data / AGENTIC).read_bytes()).splitlines()]
    by_label = {turn.label: turn for turn in turns}
    for line, row in enumerate(rows, 1):
        turn = by_label[f"line{line}"]
        blocks = sum(count for _, count in row["hash_runs"])
        assert blocks == row["in"] // 64  # rounded down
        assert sum(turn.prompt[1::2]) == turn.prompt_tokens == row["in"]
        if row["think_time"] is not None and turn.after is not None:
            assert turn.think_us == round(row["think_time"] * 1e6)
    # The hits of an unbounded cache equal those in the file, in whole blocks.
    hits = sum(64 * row["hit_blocks"] for row in rows) / sum(row["in"] for row in rows)
    assert workload.summary().sharing_ratio == pytest.approx(hits, abs=1e-9)


# --- ServeGen clients

WINDOWS = "0,0,0,,0,0\n600,2.0,1.0,Gamma,1.0,0.5\n1200,0,0,,0,0\n1800,1.0,3.0,Weibull,0.5,0.5\n"
LENGTH_WINDOWS = {
    "0": {"input_tokens": "{10: 0.5, 20: 0.5}", "output_tokens": "{7: 1.0}", "reason_ratio": "{}"},
    "1800": {"input_tokens": "{500: 1.0}", "output_tokens": "{9: 2.0, 11: 0.0}"},
}


def client(folder: Path, number: int, windows: str = WINDOWS, lengths: object = LENGTH_WINDOWS) -> Path:
    inner = folder / "service" / "data"
    inner.mkdir(parents=True, exist_ok=True)
    (inner / f"chunk-{number}-trace.csv").write_text(windows)
    (inner / f"chunk-{number}-dataset.json").write_text(json.dumps(lengths))
    return folder / "service"


def servegen(folder: Path, seed: int = 7, **options: object) -> Workload:
    return open_workload(str(client(folder, 0)), seed=seed, **options)  # type: ignore[arg-type]  # options vary


def test_servegen_windows_of_rate_zero_are_silent(tmp_path: Path) -> None:
    workload = servegen(tmp_path)
    assert workload.notes == ("drawn from 4 rate windows of 1 clients, 2 of them silent",)
    first_us = workload.turns.arrival_us
    # Time 0 is the first arrival, soon after 600 s; the record has no arrivals between 1,200 and 1,800 s.
    early, late = first_us[first_us < 600e6], first_us[first_us >= 600e6]
    assert late.min() >= 1_170e6
    assert len(early) == pytest.approx(1200, abs=150)
    assert len(late) == pytest.approx(600, abs=250)
    assert set(workload.turns.prompt_tokens[: len(early)].tolist()) == {10, 20}
    assert {(turn.prompt_tokens, turn.output_tokens) for turn in workload.turns[len(early) :]} == {(500, 9)}
    assert {turn.tenant for turn in workload.turns} == {"client0"}


@pytest.mark.parametrize(("window", "limit"), [("5m..30m", None), ("20m..", 40), (None, 500), ("0..10s", None)])
def test_a_window_of_a_servegen_service_is_a_part_of_the_whole(
    tmp_path: Path, window: str | None, limit: int | None
) -> None:
    client(tmp_path, 1, "0,0.5,1.0,Gamma,2.0,0.5\n900,0.2,1,Gamma,1,1\n")
    whole, part = servegen(tmp_path), servegen(tmp_path, time_window=window, limit=limit)
    kept = whole.turns
    if window is not None:
        span = TimeWindow.parse(window)
        stop_us = span.stop_us if span.stop_us is not None else 2**62
        kept = kept.take(np.flatnonzero((kept.arrival_us >= span.start_us) & (kept.arrival_us < stop_us)))
    kept = kept.head(limit or len(kept))
    assert (part.turns.arrival_us == kept.arrival_us - kept.arrival_us[0]).all()
    for column in ("prompt_tokens", "output_tokens", "tenant"):
        assert (getattr(part.turns, column) == getattr(kept, column)).all()
    if window is None:
        assert part.turns == kept  # labels and token ids, too


def test_a_servegen_client_of_any_size_is_drawn_as_far_as_it_is_kept(tmp_path: Path) -> None:
    busy = "0,100000,1.0,Gamma,1.0,1.0\n900,100000,1.0,Gamma,1.0,1.0\n"  # 180 million requests
    folder = str(client(tmp_path, 0, busy))
    with pytest.raises(
        WorkloadError, match=r"client 0 sends 1[78].,...,... requests, at most 50,000,000 are drawn\nhint: --limit"
    ):
        open_workload(folder, seed=7)
    assert len(open_workload(folder, seed=7, limit=1_000).turns) == 1_000
    turns = open_workload(folder, seed=7, time_window="1s..2s", limit=None).turns
    assert len(turns) == pytest.approx(100_000, rel=0.02)
    assert turns.arrival_us[-1] < 1_000_000


def test_a_window_behind_the_last_servegen_request_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match=r"nothing arrives in the window 3000\.\.3600"):
        servegen(tmp_path, time_window="50m..1h")


def test_servegen_depends_on_the_seed_and_on_nothing_else(tmp_path: Path) -> None:
    assert servegen(tmp_path).digest == servegen(tmp_path).digest != servegen(tmp_path, seed=8).digest


@pytest.mark.parametrize("compress", [bytes, gzip.compress, zstandard.ZstdCompressor().compress])
def test_a_servegen_archive_is_its_folder(tmp_path: Path, compress: object) -> None:
    folder = client(tmp_path, 3)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.add(folder, "anything")
    path = tmp_path / "clients.bin"
    path.write_bytes(compress(buffer.getvalue()))  # type: ignore[operator]
    assert open_workload(str(path), seed=7).digest == open_workload(str(folder), seed=7).digest


@pytest.mark.parametrize(
    ("windows", "lengths", "says"),
    [
        ("", LENGTH_WINDOWS, "the file is empty"),
        ("0,0,0,,0\n", LENGTH_WINDOWS, "line 1: expected window start, rate, CV, process, shape, scale, got 5 values"),
        ("0,-1,1,Gamma,1,1\n", LENGTH_WINDOWS, "line 1, column `rate`"),
        ("0,nan,1,Gamma,1,1\n", LENGTH_WINDOWS, "line 1, column `rate`"),
        ("0,1,1,Pareto,1,1\n", LENGTH_WINDOWS, "column `process`: expected Gamma or Weibull, got `Pareto`"),
        ("0,1,1,,1,1\n", LENGTH_WINDOWS, "column `process`"),
        ("0,1,1,Gamma,0,1\n", LENGTH_WINDOWS, "column `shape`"),
        ("600,1,1,Gamma,1,1\n0,1,1,Gamma,1,1\n", LENGTH_WINDOWS, "line 2, column `window start`"),
        ("0,0,0,,0,0\n", LENGTH_WINDOWS, "every window of every client has rate zero"),
        ("0,1e5,1,Gamma,1,1\n9e5,1,1,Gamma,1,1\n", LENGTH_WINDOWS, "client 0 sends"),
        (WINDOWS, {}, "a member per window"),
        (WINDOWS, {"0": {"output_tokens": "{1: 1}"}}, "no histogram `input_tokens`"),
        (WINDOWS, {"0": {"input_tokens": "{1: 1}"}}, "no histogram `output_tokens`"),
        (WINDOWS, {"0": {"input_tokens": "{1: x}", "output_tokens": "{1: 1}"}}, "expected TOKENS: WEIGHT"),
        (WINDOWS, {"0": {"input_tokens": "{1: -1}", "output_tokens": "{1: 1}"}}, "expected TOKENS: WEIGHT"),
        (WINDOWS, {"0": {"input_tokens": "{99999999: 1}", "output_tokens": "{1: 1}"}}, "tokens up to 16,777,216"),
        (WINDOWS, {"0": {"input_tokens": "{1: 0.0}", "output_tokens": "{1: 1}"}}, "all weights are zero"),
        (WINDOWS, {"0": {"input_tokens": "__import__('os')", "output_tokens": "{1: 1}"}}, "expected a histogram"),
        (WINDOWS, {"0": {"input_tokens": "{}", "output_tokens": "{}"}}, "all its histograms are empty"),
        (WINDOWS, {"x": {"input_tokens": "{1: 1}", "output_tokens": "{1: 1}"}}, "column `window start`"),
    ],
)
def test_a_bad_servegen_client_is_refused(tmp_path: Path, windows: str, lengths: object, says: str) -> None:
    with pytest.raises(WorkloadError) as caught:
        open_workload(str(client(tmp_path, 0, windows, lengths)), seed=7)
    assert says in str(caught.value)
    assert "\nhint: " in str(caught.value)


def test_a_servegen_client_without_lengths_or_a_folder_without_clients_is_refused(tmp_path: Path) -> None:
    folder = client(tmp_path, 0)
    (folder / "data" / "chunk-0-dataset.json").unlink()
    with pytest.raises(WorkloadError, match=r"chunk-0-dataset\.json: no such file"):
        open_workload(str(folder), seed=7)
    (folder / "data" / "chunk-0-trace.csv").unlink()
    with pytest.raises(WorkloadError, match="no file of a ServeGen client"):
        open_workload(str(folder), seed=7)


def test_a_damaged_archive_is_refused(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.add(client(tmp_path, 0), "service")
    path = tmp_path / "clients.tar"
    path.write_bytes(buffer.getvalue()[:2_000])
    with pytest.raises(WorkloadError, match=r"archive is damaged|no such file|no file of a ServeGen client"):
        open_workload(str(path), seed=7)


@pytest.mark.parametrize(
    ("file", "clients", "silent", "expected"),
    [(SERVEGEN, 73, "7,401", 1_383_669), (SERVEGEN_IMAGES, 35, "2,946", 818_610)],
)
def test_the_servegen_services_send_as_many_requests_as_recorded(
    data: Path, file: str, clients: int, silent: str, expected: int
) -> None:
    workload = open_workload(str(data / file), seed=1, digest=False)
    assert workload.notes[0].endswith(f"of {clients} clients, {silent} of them silent")
    turns = workload.turns
    assert len(turns) == pytest.approx(expected, rel=0.02)  # windows times rates
    assert 86_000e6 < turns.arrival_us[-1] < 86_400e6
    assert turns.nbytes < 64 * len(turns)


def test_a_window_of_time_of_a_service_is_an_hour_of_its_day(data: Path) -> None:
    workload = open_workload(str(data / SERVEGEN), seed=1, time_window="10h..11h")
    assert 3_590e6 < workload.turns.arrival_us[-1] <= 3_600e6
    assert workload.turns.arrival_us[0] == 0


# --- ShareGPT token ids


def sharegpt(prompt: list[int], at_ns: int = 0, **more: object) -> str:
    row = {"input_toks": len(prompt), "output_toks": 2, "arrival_time_ns": at_ns, "input_tok_ids": prompt, **more}
    return json.dumps(row) + "\n"


def test_prompts_with_token_ids_share_what_they_begin_with_alike(tmp_path: Path) -> None:
    prompts = [[5, 6, 7, 8], [5, 6, 9], [9, 5, 6, 7], [5, 6], [5, 6, 7, 8], [2**31 - 1, 0]]
    workload = open_text(tmp_path, "".join(sharegpt(prompt, n * 1000) for n, prompt in enumerate(prompts)))
    ids = [prompt_ids(turn.prompt).tolist() for turn in workload.turns]
    assert workload.format == "sharegpt"
    assert [turn.arrival_us for turn in workload.turns] == [0, 1, 2, 3, 4, 5]
    for one, one_ids in zip(prompts, ids, strict=True):
        for other, other_ids in zip(prompts, ids, strict=True):
            common = next(
                (n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
            )
            assert one_ids[:common] == other_ids[:common]
            assert not set(one_ids[common:]) & set(other_ids[common:])


def test_token_counts_do_without_token_ids(tmp_path: Path) -> None:
    text = '{"input_toks": 5, "output_toks": 0, "arrival_time_ns": 3}\n' * 2
    assert [turn.prompt_tokens for turn in open_text(tmp_path, text).turns] == [5, 5]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (sharegpt([1, 2], input_toks=3), "column `input_tok_ids`: expected 3 ids, as in `input_toks`, got `2 ids`"),
        (sharegpt([1, -2]), "column `input_tok_ids`: expected a list of token ids"),
        (sharegpt([1, 2**31]), "column `input_tok_ids`: expected token ids below 2**31"),
        (sharegpt([1], output_tok_ids=[1]), "column `output_tok_ids`: expected 2 ids"),
        (sharegpt([1], arrival_time_ns=-5), "column `arrival_time_ns`: expected a time in nanoseconds"),
    ],
)
def test_a_bad_sharegpt_row_is_refused(tmp_path: Path, row: str, says: str) -> None:
    assert f"line 2, {says}" in refusal(tmp_path, sharegpt([1]) + row)


def test_the_sharegpt_requests_are_read_whole(data: Path) -> None:
    workload = open_workload(str(data / SHAREGPT), seed=1)
    rows = [json.loads(line) for line in gzip.decompress((data / SHAREGPT).read_bytes()).splitlines()]
    prompts = sorted(row["input_tok_ids"] for row in rows)
    shared = sum(
        next((n for n, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))
        for one, two in itertools.pairwise(prompts)
    )
    summary = workload.summary()
    assert (len(workload.turns), shared) == (300, 20_069)
    assert summary.sharing_ratio == pytest.approx(shared / sum(map(len, prompts)))


# --- lengths alone, and plain rows


def test_lengths_alone_need_a_rate(tmp_path: Path, data: Path) -> None:
    with pytest.raises(WorkloadError, match=r"no arrival times, and no `rate` was given\nhint: give --rate"):
        open_workload(str(data / LENGTHS), seed=1)
    workload = open_workload(str(data / LENGTHS), seed=1, rate=5.0)
    assert len(workload.turns) == 28_257
    assert workload.summary().arrivals_per_s == pytest.approx(5.0, rel=0.03)
    assert open_workload(str(data / LENGTHS), seed=1, rate=float("inf"), limit=9).summary().duration_us == 0
    assert "drawn as a Poisson process" in workload.notes[0]


def test_plain_rows_are_read_from_csv_and_from_json(tmp_path: Path) -> None:
    csv = "arrival_ms,input_tokens,output_tokens,tenant\n0,5,1,a\n1500,6,2,b\n"
    lines = [
        {"arrival_s": 0, "input_tokens": 5, "output_tokens": 1, "tenant": "a"},
        {"arrival_s": 1.5, "input_tokens": 6, "output_tokens": 2, "tenant": "b"},
    ]
    jsonl = "".join(json.dumps(line) + "\n" for line in lines)
    first, second = open_text(tmp_path, csv), open_text(tmp_path, jsonl)
    assert first.format == second.format == "plain"
    assert [(turn.arrival_us, turn.tenant) for turn in first.turns] == [(0, "a"), (1_500_000, "b")]
    assert [turn.prompt for turn in first.turns] == [turn.prompt for turn in second.turns]


def test_plain_sessions_are_closed_loops(tmp_path: Path) -> None:
    csv = (
        "arrival_s,input_tokens,output_tokens,session,think_s\n5,10,1,x,\n9,20,1,,\n,30,1,x,2.5\n7,40,1,y,\n,50,1,x,0\n"
    )
    turns = list(open_text(tmp_path, csv).turns)
    assert [turn.prompt_tokens for turn in turns] == [10, 30, 50, 40, 20]
    assert [(turn.after, turn.think_us) for turn in turns] == [(None, 0), (0, 2_500_000), (1, 0), (None, 0), (None, 0)]
    assert [turn.arrival_us for turn in turns] == [0, 0, 0, 2_000_000, 4_000_000]


def test_sessions_without_think_times_are_only_names(tmp_path: Path) -> None:
    workload = open_text(tmp_path, "arrival_s,input_tokens,output_tokens,session\n0,1,1,x\n1,1,1,x\n")
    assert [turn.after for turn in workload.turns] == [None, None]
    assert "without think times" in workload.notes[0]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("input_tokens,output_tokens\n5,5\n", "no `rate` was given"),
        ("arrival_s,input_tokens,output_tokens\n", "a header and no rows"),
        ("arrival_s,input_tokens,output_tokens\n0,5,5\n,5,5\n", "line 3, column `arrival_s`: expected an arrival time"),
        ("arrival_s,arrival_ms,input_tokens,output_tokens\n0,0,5,5\n", "expected one time only, beside `arrival_s`"),
        ("arrival_s,input_tokens,output_tokens,think_s\n0,5,5,1\n", "column `session`"),
        ("arrival_s,input_tokens,output_tokens\n-1,5,5\n", "column `arrival_s`: expected a time in seconds"),
        ("arrival_s,input_tokens,output_tokens\n1e400,5,5\n", "column `arrival_s`"),
        ("arrival_s,input_tokens,output_tokens\n0," + "9" * 5000 + ",5\n", "column `input_tokens`"),
        ("arrival_s,input_tokens,input_tokens,output_tokens\n0,5,5,5\n", "column `input_tokens`: occurs twice"),
        ('{"input_tokens": 5, "output_tokens": 5, "arrival_s": 0, "session": []}\n', "column `session`"),
        ('{"input_tokens": 5, "output_tokens": 5, "arrival_s": 0, "prompt_token_ids": [1]}\n', "expected 5 ids"),
        ('{"input_tokens": 5, "arrival_s": 0}\n', "no column has the tokens of answers"),
        ('{"prompt": "hi", "arrival_s": 0}\n', "--chars-per-token 4 estimates them"),
        ('[{"input_tokens": 5}]\n', "no column has the tokens of answers"),
    ],
)
def test_a_bad_plain_file_is_refused(tmp_path: Path, text: str, says: str) -> None:
    assert says in refusal(tmp_path, text)


# --- windows of time


@pytest.mark.parametrize(
    ("text", "window"),
    [
        ("600..1200", (600_000_000, 1_200_000_000)),
        ("10m..1h30m", (600_000_000, 5_400_000_000)),
        ("..30s", (0, 30_000_000)),
        ("1.5h..", (5_400_000_000, None)),
        ("0..250ms", (0, 250_000)),
    ],
)
def test_windows_are_seconds_or_have_units(text: str, window: tuple[int, int | None]) -> None:
    assert TimeWindow.parse(text) == window
    assert TimeWindow.parse(str(TimeWindow(*window))) == window


@pytest.mark.parametrize(
    "text", ["", "5", "9..5", "5..5", "a..b", "-1..5", "1h30..2h", "5 .. 6", "1e3..", "1x..2x", "nan.."]
)
def test_bad_windows_are_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(WorkloadError, match=r"`time_window` cannot be .*\nhint: "):
        open_workload("gen:n=5", seed=1, time_window=text)


def test_a_window_cuts_before_limit_and_stretching(data: Path) -> None:
    whole = open_workload(str(data / AZURE), seed=1).turns.arrival_us
    cut = open_workload(str(data / AZURE), seed=1, time_window="10m..20m", rate=50.0, limit=100)
    inside = whole[(whole >= 600e6) & (whole < 1200e6)][:100]
    assert len(cut.turns) == 100
    assert cut.summary().arrivals_per_s == pytest.approx(50.0)
    stretched = (inside - inside[0]) * (cut.turns.arrival_us[-1] / (inside[-1] - inside[0]))
    assert np.abs(cut.turns.arrival_us - stretched).max() <= 1


def test_a_window_keeps_sessions_that_begin_in_it_whole() -> None:
    spec = "gen:n=60,turns=fixed:3,arrivals=constant,rate=1,input=fixed:10,output=fixed:5"
    workload = open_workload(spec, seed=1, time_window="5..8")
    assert [turn.label for turn in workload.turns] == [f"s{s}t{t}" for s in (5, 6, 7) for t in range(3)]
    assert [turn.arrival_us for turn in workload.turns.by_clock()] == [0, 1_000_000, 2_000_000]
    assert [turn.after for turn in workload.turns] == [None, 0, 1, None, 3, 4, None, 6, 7]
    faster = open_workload(spec, seed=1, time_window="5..8", rate=2.0)
    assert [turn.arrival_us for turn in faster.turns.by_clock()] == [0, 500_000, 1_000_000]


def test_an_empty_window_reports_where_the_requests_are() -> None:
    with pytest.raises(WorkloadError, match=r"nothing arrives in the window 100\.\.200: .* the last at 9 s"):
        open_workload("gen:n=10,arrivals=constant,rate=1", seed=1, time_window="100..200")


# --- facts of the Azure trace, and ids


def test_the_azure_trace_is_silent_and_then_sends_67_in_a_second(data: Path) -> None:
    arrivals_us = open_workload(str(data / AZURE), seed=1).turns.arrival_us
    assert 217 <= np.diff(arrivals_us).max() / 1e6 < 218
    assert np.bincount(arrivals_us // 10**6).max() == 67


def test_fresh_ids_of_many_are_those_of_one_after_another() -> None:
    counts = np.array([5, 2**30, 2**30 - 6, 1, 7, 2**30], np.int64)
    one_by_one = FreshTokens(3)
    assert fresh_tokens(3, counts).tolist() == [one_by_one.take(count) for count in counts.tolist()]


def test_prompts_without_common_prefix_have_none_after_the_ids_repeat() -> None:
    """A day of 1.4 million requests has more tokens than there are ids; the fast path simulates it anyway."""
    lengths = np.full(5_000, 10**6, np.int64)
    turns = open_loop_turns(np.arange(5_000), lengths, lengths // 3)
    assert lengths.sum() > 2 * TOKEN_IDS
    assert len(np.unique(turns.run_first_token)) == 5_000
    assert not share_prefixes(turns)
