"""Output of a measured run: tables for the terminal, metrics.json, one row per request.

    Console().print(summary_table(run))
    write_metrics_json(out / "metrics.json", run, {"seed": 7, "journal": "runs/0192"})
    write_requests(run, out / "requests.parquet", out / "requests.csv")

The names in metrics.json are defined in docs/metrics.md.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table
from rich.text import Text

from lockstep.sim.metrics.columns import Summary
from lockstep.sim.metrics.intervals import Intervals, intervals_title
from lockstep.sim.metrics.run_data import RunData

if TYPE_CHECKING:
    import polars

NOTHING = "-"  # nothing was measured

METRICS_FORMAT = "lockstep-metrics"
METRICS_VERSION = 1  # of metrics.json and the table of requests; raised when the meaning of a name changes

LATENCIES = {"ttft": "TTFT", "itl": "ITL", "tpot": "TPOT", "e2e": "end to end", "queue": "queue"}
STATISTICS = ("mean", "p50", "p90", "p95", "p99", "max")

# ------------------------------------------------------------------------------------------------------------- tables


def summary_table(run: RunData, *, never_sent: int = 0) -> Table:
    """Return a table of one run: latencies, then counts and rates, then SLOs if there are any.

    Args:
        never_sent: turns of the workload that were not sent because their session broke off.
    """
    summary = run.summary
    page = Table.grid(padding=(1, 0))
    page.add_row(latency_table(summary))
    page.add_row(_facts_table(summary, never_sent))
    if summary["slos"]:
        page.add_row(slo_table(summary))
    return page


def rates_table(rows: Sequence[tuple[float, Summary]], *, title: str | None = None) -> Table:
    """Return a table of several runs of one workload, one line each.

    Args:
        rows: (offered requests per s, summary) of each run, in the order of the lines.
    """
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1))
    for heading in (
        "offered\nreq/s", "TTFT\np50", "\np99", "TPOT\np50", "\np99", "e2e\np99", "output\ntok/s", "goodput\nreq/s",
        "cache\nhits", "KV\npeak", "failed", "meets\nSLO",
    ):  # fmt: skip
        # On a narrow terminal the unit wraps below its number. The minimum width keeps every digit.
        table.add_column(heading, justify="right", min_width=max(map(len, heading.split())))
    for rate, summary in rows:
        latency, throughput = summary["latency"], summary["throughput"]
        table.add_row(
            f"{rate:.4g}",
            show_us(latency["ttft_us_p50"]),
            show_us(latency["ttft_us_p99"]),
            show_us(latency["tpot_us_p50"]),
            show_us(latency["tpot_us_p99"]),
            show_us(latency["e2e_us_p99"]),
            show_rate(throughput["output_tokens_per_s"]),
            show_rate(throughput["goodput_requests_per_s"]),
            show_share(summary["cache"]["hit_ratio"]),
            show_share(summary["kv"]["used_share_max"]),
            str(summary["requests"]["failed"]),
            _show_met(summary["slos"]),
        )
    return table


def latency_table(summary: Summary) -> Table:
    """Return a table with one line per latency of completed requests."""
    table = Table(title="Latency of completed requests", title_justify="left")
    table.add_column("")
    for statistic in STATISTICS:
        table.add_column(statistic, justify="right", no_wrap=True)
    for name, heading in LATENCIES.items():
        latency = summary["latency"]
        table.add_row(heading, *(show_us(latency[f"{name}_us_{statistic}"]) for statistic in STATISTICS))
    return table


INTERVALS_SHOWN = {
    "TTFT p50": "ttft_us_p50", "TTFT p99": "ttft_us_p99", "TPOT p50": "tpot_us_p50", "TPOT p99": "tpot_us_p99",
    "end to end p50": "e2e_us_p50", "end to end p99": "e2e_us_p99",
    "requests per s": "requests_per_s", "output tokens per s": "output_tokens_per_s",
    "goodput, requests per s": "goodput_requests_per_s",
}  # fmt: skip
"""Heading and name in metrics.json; metrics.json has further intervals."""


def intervals_table(intervals: Intervals) -> Table:
    """Return a table of the intervals of a run."""
    title = intervals_title(intervals.describe())
    table = Table(title=title, title_justify="left")
    for heading in ("", "from", "to"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for heading, name in INTERVALS_SHOWN.items():
        ends = intervals.answers[name]
        if ends is not None:
            show = show_us if "_us_" in name else show_rate
            table.add_row(heading, show(ends[0]), show(ends[1]))
    return table


def _facts_table(summary: Summary, never_sent: int) -> Table:
    """Return a table of facts: name, number, explanation."""
    requests, throughput, cache = summary["requests"], summary["throughput"], summary["cache"]
    kv, scheduler, device = summary["kv"], summary["scheduler"], summary["device"]
    table = Table(show_header=False)
    table.add_column("")
    table.add_column("", justify="right", no_wrap=True)
    table.add_column("")

    endings = requests["by_finish_reason"] | {f"rejected {k}": n for k, n in requests["by_reject_reason"].items()}
    of = f"of {requests['arrived']:,} that arrived"
    if never_sent:
        of += f"; {never_sent:,} of {requests['arrived'] + never_sent:,} turns were never sent"
    table.add_row("requests completed", f"{requests['completed']:,}", of)
    table.add_row("requests failed", f"{requests['failed']:,}", "timed out, errors, no room, queue full; see metrics")
    table.add_row("requests unfinished", f"{requests['unfinished']:,}", "")
    table.add_row("how they ended", "", _list_counts(endings))
    table.add_section()
    table.add_row("throughput", show_rate(throughput["requests_per_s"]), "requests per s")
    table.add_row("", show_rate(throughput["output_tokens_per_s"]), "output tokens per s")
    table.add_row("", show_rate(throughput["total_tokens_per_s"]), "tokens per s, prompts included")
    if throughput["good_requests"] is not None:
        share = show_share(throughput["goodput_share"])
        good = show_rate(throughput["goodput_requests_per_s"])
        table.add_row("goodput", good, f"requests per s that met every SLO, {share} of them")
    steady = throughput.get("steady")
    if steady:
        rates = f"{show_rate(steady['output_tokens_per_s'])} output tokens per s"
        good = steady.get("goodput_requests_per_s")
        rates += "" if good is None else f", {show_rate(good)} requests per s within every SLO"
        table.add_row("in steady state", show_rate(steady["requests_per_s"]), f"requests per s; {rates}")
    table.add_row("makespan", show_us(throughput["makespan_us"]), "first arrival to last finish")
    table.add_section()
    hits = f"of {cache['prompt_tokens_admitted']:,} prompt tokens"
    table.add_row("prefix cache hits", show_share(cache["hit_ratio"]), hits)
    table.add_row("KV pages at peak", show_share(kv["used_share_max"]), f"mean {show_share(kv['used_share_mean'])}")
    table.add_row("retractions", f"{scheduler['retractions']:,}", _list_counts(scheduler["retractions_by_reason"]))
    if "speculation" in summary:
        drafts = summary["speculation"]
        shares = ", ".join(show_share(share) for share in drafts["acceptance_by_position"])
        length = drafts["accepted_length_mean"]
        mean = NOTHING if length is None else f"{length:.2f}"
        table.add_row("tokens per verification", mean, f"of a row; drafts right, by position: {shares}")
    if "diffusion" in summary:
        blocks = summary["diffusion"]
        passes, tokens = blocks["passes_per_block"], blocks["tokens_per_pass"]
        about = "" if tokens is None else f"of a row; {tokens:.2f} tokens per pass, blocks of {blocks['block_tokens']}"
        table.add_row("passes per block", NOTHING if passes is None else f"{passes:.2f}", about)
    if "jump_forward" in summary:
        forced = summary["jump_forward"]
        about = f"in {forced['jumps']:,} jumps, {forced['tokens_per_jump_mean']:.2f} at a time"
        table.add_row("tokens forced by grammars", f"{forced['forced_tokens']:,}", about)
    table.add_section()
    table.add_row("GPU busy", show_share(device["busy_fraction"]), _list_counts(device["batches_by_mode"], "batches: "))
    bubble = f"of the time with work; {show_us(device['bubble_us'])} in all"
    table.add_row("GPU bubbles", show_share(device["bubble_share"]), bubble)
    gap = f"p50, between decode batches; p99 {show_us(device['decode_gap_us_p99'])}"
    table.add_row("GPU gap", show_us(device["decode_gap_us_p50"]), gap)
    if "bytes_moved" in cache:
        _add_tiers(table, cache)
    if "media" in summary:
        _add_media(table, summary["media"])
    if "sessions" in summary:
        sessions = summary["sessions"]
        table.add_section()
        kept = sessions["kept_tokens"] / sessions["prompt_tokens"] if sessions["prompt_tokens"] else None
        table.add_row("turns of sessions", f"{sessions['turns']:,}", f"{show_share(kept)} of their prompts was kept")
        yielded = f"of the pages at most; {sessions['yields']:,} times one yielded"
        table.add_row("KV held by sessions", show_share(sessions["held_share_max"]), yielded)
    if "experts" in summary:
        _add_experts(table, summary["experts"])
    if "samples" in summary:
        samples = summary["samples"]
        table.add_section()
        asked = f"answers, of {samples['requests']:,} requests with several"
        table.add_row("samples", f"{samples['samples']:,}", asked)
        first = f"p50, from arrival to the last of them; p99 {show_us(samples['e2e_us_p99'])}"
        table.add_row("all answers", show_us(samples["e2e_us_p50"]), first)
    if "adapters" in summary:
        _add_adapters(table, summary["adapters"])
    if "pipeline" in device:
        pipeline = device["pipeline"]
        idle = (
            f"of the time with a batch in the pipeline; {show_us(pipeline['pipeline_bubble_us'])} of stages idle then"
        )
        table.add_row("stages busy", show_share(pipeline["stage_busy_share"]), idle)
        if "batches_by_microbatch" in pipeline:
            launched = ", ".join(f"{count:,}" for count in pipeline["batches_by_microbatch"])
            table.add_row("microbatches", str(pipeline["microbatches"]), f"batches of each: {launched}")
    return table


def _add_media(table: Table, media: Summary) -> None:
    """Add rows about media: contents encoded, requests with media, waits."""
    table.add_section()
    about = f"images, videos and sounds of {media['requests']:,} requests; {media['prompt_tokens']:,} prompt tokens"
    table.add_row("media", f"{media['contents']:,}", about)
    evicted = f"of media were encoded already; {media['embeddings_evicted']:,} evicted"
    table.add_row("embedding cache hits", show_share(media["embedding_hit_ratio"]), evicted)
    if media["encoder_passes"] is None:  # read from a journal, which does not contain times of the encoder
        return
    where = f"on {media['encoder_gpus']} GPUs of its own" if media["encoder_gpus"] else "on the engine's GPUs"
    did = f"{where}: {media['encoded']:,} encoded in {media['encoder_passes']:,} passes"
    table.add_row("encoder busy", show_share(media["encoder_busy_fraction"]), did)
    waits = f"p50, of {media['requests_waited']:,} requests; p99 {show_us(media['wait_us_p99'])}"
    table.add_row("waited for media", show_us(media["wait_us_p50"]), waits)


def _add_experts(table: Table, experts: Mapping[str, Any]) -> None:
    """Add the rows of the load of experts and of their placements."""
    table.add_section()
    about = f"times the mean load, in {experts['measurements']:,} measurements"
    table.add_row("fullest expert", f"{experts['fullest_expert_mean']:.2f}", about)
    if "placements" in experts:
        before, after = experts["imbalance_before_mean"], experts["imbalance_after_mean"]
        ratios = f"fullest rank {before:.2f} times the mean before, {after:.2f} after"
        table.add_row("experts placed", f"{experts['placements']:,}", f"{ratios}; {experts['moved']:,} experts moved")


def _add_adapters(table: Table, adapters: Summary) -> None:
    """Add rows about adapters: loads, and requests that waited for a load."""
    table.add_section()
    table.add_row("adapters", f"{adapters['adapters']:,}", f"different ones, of {adapters['requests']:,} requests")
    took = f"{show_us(adapters['load_us_mean'])} on average; {adapters['evictions']:,} evicted"
    table.add_row("adapter loads", f"{adapters['loads']:,}", took)
    waits = f"p50, of {adapters['requests_waited']:,} requests; p99 {show_us(adapters['wait_us_p99'])}"
    table.add_row("waited for adapters", show_us(adapters["wait_us_p50"]), waits)


def _add_tiers(table: Table, cache: Summary) -> None:
    """Add rows about the cache tiers below the device."""
    table.add_section()
    for tier in ("host", "storage"):
        tokens = cache[f"prompt_tokens_from_{tier}"]
        share = tokens / cache["prompt_tokens_admitted"] if cache["prompt_tokens_admitted"] else None
        table.add_row(f"from {tier}", show_share(share), f"of prompt tokens; {tokens:,} of those found cached")
    moved = [f"{size / 1e9:,.1f} GB {kind}" for kind, size in cache["bytes_moved"].items()]
    table.add_row("moved", "", ", ".join(moved))
    waited = cache["requests_waited_for_tiers"]
    mean_us = cache["tiers_wait_us"] / waited if waited else None
    table.add_row("waited for tiers", show_us(mean_us), f"on average, of {waited:,} requests that did")


def slo_table(summary: Summary) -> Table:
    """Return a table of bounds, measured values, and whether each bound holds."""
    table = Table(title="SLOs", title_justify="left")
    table.add_column("bound")
    table.add_column("measured", justify="right")
    table.add_column("met")
    for slo in summary["slos"]:
        unmeasured = "nothing measured" if slo["met"] is None else "too many failed"
        measured = unmeasured if slo["measured_us"] is None else show_us(slo["measured_us"])
        table.add_row(slo["slo"], measured, _show_met([slo]))
    return table


def _show_met(slos: Sequence[Mapping[str, Any]]) -> Text:
    """Return a verdict that is readable without its colour."""
    if not slos:
        return Text(NOTHING)
    if any(slo["met"] is None for slo in slos):
        return Text("no data")
    return Text("yes", style="green") if all(slo["met"] for slo in slos) else Text("NO", style="bold red")


def _list_counts(counts: Mapping[str, int], prefix: str = "") -> str:
    return prefix + ", ".join(f"{count:,} {name}" for name, count in counts.items()) if counts else ""


def show_us(us: float | None) -> str:
    """Format a duration in a suitable unit, with three digits: `812 us`, `41.3 ms`, `1.24 s`, `12.5 min`."""
    if us is None:
        return NOTHING
    for unit, size_us, next_us in (("us", 1, 999.5), ("ms", 1e3, 999.5e3), ("s", 1e6, 119.95e6)):
        if us < next_us:
            return f"{_three_digits(us / size_us)} {unit}"
    return f"{_three_digits(us / 60e6)} min"


def show_rate(per_s: float | None) -> str:
    """Format a rate with three digits and thousands separators: `6.45`, `1,361`."""
    return NOTHING if per_s is None else _three_digits(per_s)


def show_share(share: float | None) -> str:
    """Format a share of one in percent: `42.0 %`."""
    return NOTHING if share is None else f"{100 * share:.1f} %"


def _three_digits(value: float) -> str:
    if value == 0 or value >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


# -------------------------------------------------------------------------------------------------------------- files


def write_metrics_json(
    path: Path, run: RunData, about: Mapping[str, Any] | None = None, intervals: Intervals | None = None
) -> None:
    """Write the summary, after `about` (seed, commit, journal, cost model, ...). Raises ValueError for a NaN."""
    metrics = {"about": dict(about or {}), **run.summary}
    if intervals is not None:
        metrics["intervals"] = intervals.describe()
    write_json(path, metrics)


def write_json(path: Path, metrics: Mapping[str, Any]) -> None:
    """Write the contents of a metrics.json. Raises ValueError for a NaN."""
    text = json.dumps(metrics, indent=2, allow_nan=False, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def write_requests(run: RunData, parquet_path: Path | None, csv_path: Path | None = None) -> None:
    """Write one row per request, in order of arrival. Values of what did not happen are null, and empty in CSV."""
    frame = requests_frame(run)
    if parquet_path is not None:
        frame.write_parquet(parquet_path)
    if csv_path is not None:
        frame.write_csv(csv_path)


def requests_frame(run: RunData) -> polars.DataFrame:
    """Return the columns of run.requests, with null for -1, NaN and the reason of an unfinished request."""
    import polars as pl

    frame = pl.DataFrame(
        {
            name: pl.Series(name, column.tolist(), pl.String) if column.dtype.kind in "OT" else pl.Series(name, column)
            for name, column in run.requests.columns().items()
        }
    )
    may_miss = [name for name, dtype in frame.schema.items() if dtype.is_integer() and name != "request_id"]
    return frame.with_columns(
        pl.col("tpot_us", "itl_us_max").fill_nan(None),
        pl.col(may_miss).replace(-1, None),
        pl.col("finish_reason").replace("", None),
    )
