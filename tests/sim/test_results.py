"""Results: tables that are legible without colour, JSON without NaN, null for absent values, a trace that loads."""

from __future__ import annotations

import csv
import dataclasses
import gzip
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console, RenderableType

from lockstep.core.contract.commands import BatchPlan, LaunchBatch, Mode, Step, StreamTokens
from lockstep.core.contract.events import (
    BatchFinished,
    LaneReady,
    RequestAdmitted,
    RequestArrived,
    RequestFinished,
    RequestRejected,
    TokenRuns,
)
from lockstep.sim.metrics.fold import MetricsFold
from lockstep.sim.metrics.run_data import RunData
from lockstep.sim.metrics.slo import Slo
from lockstep.sim.results.perfetto import COUNTERS, ENGINE, GPU, write_trace
from lockstep.sim.results.results import (
    rates_table,
    requests_frame,
    show_rate,
    show_us,
    summary_table,
    write_metrics_json,
    write_requests,
)


def small_run(slo: str = "ttft_p99=500ms") -> RunData:
    """r1 is answered with two tokens, r2 is rejected, r3 still waits; two batches overlap by 10 us."""
    fold = MetricsFold(kv_pages=64)
    for request_id, label in ((1, 'a "quoted", name'), (2, ""), (3, "naïve")):
        event = RequestArrived(
            time_us=request_id, request_id=request_id, prompt=TokenRuns((0, 10)), max_new_tokens=2, label=label
        )
        fold.observe(event, Step())
    fold.observe(LaneReady(4), Step(decided=[RequestRejected(4, 2, "too_long", "10 tokens")]))
    fold.observe(LaneReady(5), Step(decided=[RequestAdmitted(5, 1, 0, 4, 6, 4)]))
    fold.gauge(5, waiting=1, running=1, free_pages=60, cached_pages=1)
    fold.cpu_interval(4, 6, "plan")
    one = np.ones(1, np.int32)
    ids = np.array([1], np.int64)
    batches: tuple[tuple[Mode, int, int], ...] = (("extend", 10, 110), ("decode", 100, 130))
    for batch_id, (mode, start_us, stop_us) in enumerate(batches):
        plan = BatchPlan(
            batch_id=batch_id, mode=mode, rows=one, request_ids=ids, starts=one * (4 + 6 * batch_id),
            stops=one * (10 + batch_id), extend_rows=1 - batch_id,
        )  # fmt: skip
        fold.observe(LaneReady(start_us - 5), Step(commands=[LaunchBatch(plan)]))
        command = StreamTokens(ids, one * batch_id, one, one)
        fold.observe(BatchFinished(stop_us + 1, batch_id, b"", start_us, stop_us), Step(commands=[command]))
    fold.observe(LaneReady(131), Step(decided=[RequestFinished(131, 1, "length", 2, 4)]))
    return fold.result([Slo.parse(slo)])


def shown(renderable: RenderableType, width: int = 120) -> str:
    """What a terminal without colour shows."""
    file = io.StringIO()
    Console(file=file, width=width, no_color=True).print(renderable)
    return file.getvalue()


# ------------------------------------------------------------------------------------------------------------- tables


def test_summary_table_names_every_latency_and_what_was_met() -> None:
    text = shown(summary_table(small_run()))
    for word in ("TTFT", "TPOT", "ITL", "end to end", "goodput", "prefix cache hits", "1 rejected too_long"):
        assert word in text
    assert "110 us" in text  # the one TTFT
    assert "40.0 %" in text  # 4 of 10 prompt tokens were cached
    # r3 was never answered, so half of the requests that count failed.
    assert "too many failed" in text
    assert "NO" in text


def test_turns_that_were_never_sent_stand_beside_the_requests_that_arrived() -> None:
    run = small_run()
    arrived = run.summary["requests"]["arrived"]
    assert "never sent" not in shown(summary_table(run))
    text = " ".join(shown(summary_table(run, never_sent=1_856)).split())
    assert f"of {arrived} that arrived; 1,856 of {1_856 + arrived:,} turns were never sent" in text


def test_a_run_in_which_nothing_happened_shows_dashes() -> None:
    text = shown(summary_table(MetricsFold().result()))
    assert "nan" not in text.lower()
    assert "None" not in text


def test_rates_table_has_one_line_per_rate_and_reports_yes_or_no() -> None:
    run = small_run()
    without_slos = {**run.summary, "slos": []}
    met = {**run.summary, "slos": [{**run.summary["slos"][0], "met": True}]}
    text = shown(rates_table([(0.5, met), (6.25, run.summary), (8, without_slos)], title="azure-code"))
    lines = [line.split() for line in text.splitlines() if "110 us" in line]
    assert [line[0] for line in lines] == ["0.5", "6.25", "8"]
    assert [line[-1] for line in lines] == ["yes", "NO", "-"]
    assert "azure-code" in text


def test_rates_table_loses_no_digit_in_a_narrow_terminal() -> None:
    text = shown(rates_table([(0.5, small_run().summary)]), width=80)
    assert "…" not in text
    assert "110" in text


@pytest.mark.parametrize(
    ("us", "text"),
    [
        (None, "-"), (0, "0 us"), (7.25, "7.25 us"), (812.4, "812 us"), (999.7, "1.00 ms"), (41_300, "41.3 ms"),
        (999_600, "1.00 s"), (1_240_000, "1.24 s"), (100_000_000, "100 s"), (750_000_000, "12.5 min"),
    ],
)  # fmt: skip
def test_durations_take_the_unit_that_suits_them(us: float | None, text: str) -> None:
    assert show_us(us) == text


def test_rates_keep_three_digits() -> None:
    assert [show_rate(rate) for rate in (None, 0.0, 6.4512, 99.96, 1361.2)] == ["-", "0", "6.45", "100", "1,361"]


# -------------------------------------------------------------------------------------------------------------- files


def test_metrics_json_holds_the_summary_behind_what_made_it(tmp_path: Path) -> None:
    run = small_run()
    write_metrics_json(tmp_path / "metrics.json", run, {"seed": 7})
    read = json.loads((tmp_path / "metrics.json").read_text(encoding="utf-8"))
    assert read.pop("about") == {"seed": 7}
    assert read == run.summary
    assert read["slos"] == [{"slo": "ttft_p99=500ms", "bound_us": 500_000, "measured_us": None, "met": False}]


def test_metrics_json_refuses_nan(tmp_path: Path) -> None:
    run = dataclasses.replace(small_run(), summary={"x": float("nan")})
    with pytest.raises(ValueError, match="JSON"):
        write_metrics_json(tmp_path / "metrics.json", run)


def test_requests_are_written_with_null_for_what_did_not_happen(tmp_path: Path) -> None:
    pl = pytest.importorskip("polars")
    run = small_run()
    write_requests(run, tmp_path / "requests.parquet", tmp_path / "requests.csv")
    rows = pl.read_parquet(tmp_path / "requests.parquet").to_dicts()
    assert list(rows[0]) == list(run.requests.columns())
    answered, rejected, waiting = rows
    assert (answered["ttft_us"], answered["tpot_us"], answered["finish_reason"]) == (110, 20.0, "length")
    assert (rejected["ttft_us"], rejected["tpot_us"], rejected["finish_reason"]) == (None, None, "rejected_too_long")
    assert (waiting["queue_us"], waiting["ended_us"], waiting["finish_reason"]) == (None, None, None)
    assert waiting["output_tokens"] == 0

    with (tmp_path / "requests.csv").open(encoding="utf-8", newline="") as file:
        written = list(csv.DictReader(file))
    assert [row["label"] for row in written] == ['a "quoted", name', "", "naïve"]
    assert [row["ttft_us"] for row in written] == ["110", "", ""]


def test_an_empty_run_writes_a_table_without_rows(tmp_path: Path) -> None:
    pytest.importorskip("polars")
    run = MetricsFold().result()
    write_requests(run, tmp_path / "requests.parquet")
    assert requests_frame(run).height == 0
    assert not (tmp_path / "requests.csv").exists()


# -------------------------------------------------------------------------------------------------------------- trace


def read_trace(path: Path) -> dict[str, Any]:
    def refuse(constant: str) -> float:
        raise ValueError(f"{constant} is not JSON")

    with gzip.open(path, "rt", encoding="utf-8") as file:
        trace: dict[str, Any] = json.load(file, parse_constant=refuse)
    return trace


def test_trace_is_valid_and_every_slice_closes(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.json.gz", small_run())
    trace = read_trace(tmp_path / "trace.json.gz")
    assert {event["ph"] for event in trace["traceEvents"]} == {"M", "X", "C", "b", "e"}
    stacks: dict[int, list[tuple[str, int]]] = {}
    for event in trace["traceEvents"]:
        if event["ph"] != "M":
            assert isinstance(event["ts"], int)
        if event["ph"] == "X":
            assert event["dur"] >= 0
        elif event["ph"] == "b":
            stacks.setdefault(event["id"], []).append((event["name"], event["ts"]))
        elif event["ph"] == "e":
            name, start_us = stacks[event["id"]].pop()
            assert name == event["name"]
            assert start_us <= event["ts"]
    assert stacks == {1: [], 2: [], 3: []}


def test_trace_shows_batches_in_lanes_and_requests_in_phases(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.json.gz", small_run())
    events = read_trace(tmp_path / "trace.json.gz")["traceEvents"]
    gpu = [(e["name"], e["tid"], e["ts"], e["dur"]) for e in events if e["ph"] == "X" and e["tid"] >= GPU]
    assert gpu == [("extend", GPU, 10, 100), ("decode", GPU + 1, 100, 30)]  # they overlap: two lanes
    assert [e["name"] for e in events if e["ph"] == "X" and e["tid"] < GPU] == ["plan"]
    extend = next(e for e in events if e["name"] == "extend")
    assert extend["args"] == {"batch": 0, "rows": 1, "new_tokens": 6, "kv_tokens": 10, "launched_us": 5}

    phases = {(e["id"], e["name"], e["ph"]): e["ts"] for e in events if e["ph"] in "be"}
    assert [phases[1, name, ph] for name in ("queue", "prefill", "decode") for ph in "be"] == [1, 5, 5, 111, 111, 131]
    assert (phases[2, "queue", "b"], phases[2, "queue", "e"]) == (2, 4)
    assert (phases[3, "queue", "b"], phases[3, "queue", "e"]) == (3, 131)  # still waiting at the end
    assert (3, "prefill", "b") not in phases
    assert {e["name"] for e in events if e["ph"] == "C"} == set(COUNTERS.values())
    assert {e["pid"] for e in events if e["ph"] == "C"} == {ENGINE}


def test_trace_reports_how_many_requests_it_shows(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.json.gz", small_run(), requests_shown=1, about={"seed": 7})
    trace = read_trace(tmp_path / "trace.json.gz")
    assert trace["otherData"]["requests"] == "1 of 3, the first to arrive"
    assert trace["otherData"]["seed"] == 7
    assert {event["id"] for event in trace["traceEvents"] if event["ph"] == "b"} == {1}


def test_equal_runs_give_equal_files(tmp_path: Path) -> None:
    write_trace(tmp_path / "a.json.gz", small_run())
    write_trace(tmp_path / "b.json.gz", small_run())
    assert (tmp_path / "a.json.gz").read_bytes() == (tmp_path / "b.json.gz").read_bytes()


def test_an_empty_run_gives_a_trace_that_loads(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.json.gz", MetricsFold().result())
    events = read_trace(tmp_path / "trace.json.gz")["traceEvents"]
    assert [event["args"]["name"] for event in events if event["ph"] == "M" and event["tid"] == GPU] == ["GPU"]
