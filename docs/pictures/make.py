"""Draw the pictures of docs/scheduling.md, docs/profiles.md and docs/validation.md, each from simulations made here.

    pip install matplotlib                 for this script only; no package depends on it
    python docs/pictures/make.py           all of them, beside this file; about a minute
    python docs/pictures/make.py overlap   or some, by name

Equal code gives equal files: seeds are fixed, and the files hold no dates and no random ids. The two pictures that are
not simulated here, `profiles` and `validation`, are drawn from files in benchmarks/results.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import msgspec
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import XAxis, YAxis
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator
from simpy import Environment

from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.events import RequestArrived, RequestCancelled
from lockstep.core.contract.profiles import profile_settings
from lockstep.core.journal.sinks import NoJournal
from lockstep.core.scheduler.engine import Engine
from lockstep.sim.host.arrivals import Arrivals
from lockstep.sim.host.engine_host import EngineHost
from lockstep.sim.metrics.columns import Batches
from lockstep.sim.metrics.fold import MetricsFold
from lockstep.sim.metrics.run_data import RunData
from lockstep.sim.run.assemble import assemble
from lockstep.sim.run.simulate import simulate
from lockstep.sim.scenario.scenario import Scenario

FOLDER = Path(__file__).resolve().parent
RESULTS = FOLDER.parent.parent / "benchmarks" / "results" / "profiles.json"
SERIES = RESULTS.with_name("rtx4090_truth.csv")

STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "lockstep",
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e5e5e5",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.linewidth": 1.6,
}
BLUE, ORANGE, GREEN, RED, GREY, VIOLET = "#3b6fb6", "#e08214", "#2a9d5b", "#c8372d", "#8a8a8a", "#7b4fa3"
COLOURS = (BLUE, ORANGE, GREEN, RED, VIOLET, GREY)

# ------------------------------------------------------------------------------------------------------------ running


# Each picture shows one choice, so what the profile lockstep chooses is undone.
DEFAULTS = {name: getattr(SchedConfig(), name) for name in profile_settings("lockstep")}


def run(
    workload: str,
    *,
    model: str = "llama-3.1-8b",
    gpu: str = "h100-sxm",
    rate: float | None = None,
    max_new_tokens: int | None = None,
    profile: str = "lockstep",
    **settings: Any,
) -> RunData:
    """Simulate and measure."""
    scenario = Scenario(
        model=model,
        gpu=gpu,
        workload=workload,
        rate=rate,
        max_new_tokens=max_new_tokens,
        profile=profile,
        settings=DEFAULTS | settings if profile == "lockstep" else settings,
    )
    return simulate(assemble(scenario, environ={})).data


class WithPriorities(Arrivals):
    """Workloads have no priorities: every tenth request is urgent (2), four in ten are background (0)."""

    def take(self, max_new_tokens: int | None) -> RequestArrived | RequestCancelled:
        event = super().take(max_new_tokens)
        if isinstance(event, RequestArrived):
            return msgspec.structs.replace(event, priority=priority_of(event.request_id))
        return event


def priority_of(request_id: int) -> int:
    digit = request_id * 7 % 10
    return 2 if digit == 0 else 1 if digit < 6 else 0


def run_with_priorities(workload: str, **settings: Any) -> RunData:
    """Simulate with a priority on every request."""
    given = DEFAULTS | settings
    setup = assemble(Scenario(model="llama-3.1-8b", gpu="h100-sxm", workload=workload, settings=given), environ={})
    env, metrics = Environment(), MetricsFold(kv_pages=setup.config.pages)
    arrivals = WithPriorities(setup.workload.turns)
    host = EngineHost(env, Engine(setup.config), arrivals, setup.cost, setup.cpu, NoJournal(), metrics)
    env.process(host.run())
    env.run()
    return metrics.result()


# ------------------------------------------------------------------------------------------------------------ drawing


def figure(
    columns: int = 1, rows: int = 1, *, width: float = 7.5, height: float = 2.9, **more: Any
) -> tuple[Figure, Any]:
    """A white page, which also reads in dark surroundings."""
    page = Figure(figsize=(width, height), facecolor="white", layout="constrained")
    return page, page.subplots(rows, columns, squeeze=False, **more)


def distribution(axes: Axes, values_us: np.ndarray, **style: Any) -> None:
    """The share of requests that waited at most so long, thinned to what an eye can see."""
    share = np.linspace(0, 100, 80)
    axes.plot(np.percentile(values_us, share) / 1e6, share, **style)


def label(axes: Axes, x: str, y: str, title: str = "") -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_title(title, loc="left")


def bars(axes: Axes, names: Sequence[str], values: Sequence[float], form: str = "{:,.0f}", **style: Any) -> None:
    """Bars with their values written on them."""
    drawn = axes.bar(names, values, width=0.6, **style)
    axes.bar_label(drawn, [form.format(value) for value in values], fontsize=7.5, padding=1)
    axes.margins(y=0.15)
    axes.grid(visible=False, axis="x")


def log_scale(axis: XAxis | YAxis) -> None:
    """Logarithmic, with plain numbers at 1, 2 and 5."""
    axis.axes.set_xscale("log") if axis.axis_name == "x" else axis.axes.set_yscale("log")
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_minor_locator(NullLocator())


def ms(value_us: float | None) -> float:
    return (value_us or 0.0) / 1e3


def timeline(axes: Axes, batches: Batches, y: float, window_us: tuple[int, int], height: float = 0.7) -> None:
    """One lane of batches as boxes: extend, decode, mixed."""
    start_us, stop_us = window_us
    shown = (batches.finished_us > start_us) & (batches.started_us < stop_us) & (batches.started_us >= 0)
    only_prefill = batches.prefill_tokens == batches.new_tokens
    kinds = {
        BLUE: batches.prefill_tokens == 0,
        ORANGE: (batches.prefill_tokens > 0) & only_prefill,
        GREEN: (batches.prefill_tokens > 0) & ~only_prefill,
    }
    for colour, kind in kinds.items():
        spans = [
            (round((start - start_us) / 1e3, 2), round((stop - start) / 1e3, 2))
            for start, stop in zip(batches.started_us[shown & kind], batches.finished_us[shown & kind], strict=True)
        ]
        axes.broken_barh(spans, (y, height), facecolors=colour, edgecolors="white", linewidth=0.4)


def swatches(axes: Axes, names: Mapping[str, str], **where: Any) -> None:
    """A legend of colours."""
    handles = [mpl.patches.Patch(color=colour, label=name) for name, colour in names.items()]
    axes.legend(handles=handles, ncols=len(handles), **where)


# ----------------------------------------------------------------------------------------------------------- pictures

SHARED = "gen:n=1500,rate=30,input=lognormal:600:1.1,output=fixed:24,shared_prefix=2048x48,prefix_choice=zipf"
SHARED_PAGES = 3600  # less than half of the shared prefixes: what the order finds cached depends on the order


def ordering() -> Figure:
    """TTFT under four orders of the line, and what bypass_limit bounds."""
    page, ((left, right),) = figure(2, width=8)
    for policy, colour in zip(("fcfs", "lpm", "hrrn", "spf"), COLOURS, strict=False):
        data = run(SHARED, pages=SHARED_PAGES, schedule_policy=policy)
        hits = data.summary["cache"]["hit_ratio"]
        distribution(left, data.requests.ttft_us, color=colour, label=f"{policy}, {100 * hits:.0f} % hits")
    log_scale(left.xaxis)
    left.legend()
    label(left, "TTFT, s", "requests within, %", "schedule_policy")

    limits = (0, 16, 64, 256, 1024, None)
    names = [str(limit).lower() for limit in limits]
    runs = [run(SHARED, pages=SHARED_PAGES, schedule_policy="spf", bypass_limit=limit).requests for limit in limits]
    right.plot(names, [r.ttft_us.max() / 1e6 for r in runs], "o-", color=RED, label="longest")
    right.plot(names, [np.percentile(r.ttft_us, 99) / 1e6 for r in runs], "o-", color=ORANGE, label="p99")
    right.plot(names, [np.percentile(r.ttft_us, 50) / 1e6 for r in runs], "o-", color=BLUE, label="p50")
    log_scale(right.yaxis)
    right.legend()
    label(right, "bypass_limit, requests (spf)", "TTFT, s", "bounded bypass")
    return page


def priority() -> Figure:
    """TTFT by priority, without and with a bound on how often the low ones are passed by."""
    workload = "gen:n=2000,rate=24,input=lognormal:600:0.8,output=lognormal:120:0.6"
    shown = {
        "fcfs": {"schedule_policy": "fcfs"},
        "priority, bypass_limit none": {"schedule_policy": "priority", "bypass_limit": None},
        "priority, bypass_limit 64": {"schedule_policy": "priority", "bypass_limit": 64},
    }
    page, (axes,) = figure(3, width=8.5, sharey=True)
    for panel, (title, settings) in zip(axes, shown.items(), strict=True):
        requests = run_with_priorities(workload, max_running_requests=48, **settings).requests
        classes = np.array([priority_of(request) for request in requests.request_id.tolist()])
        for value, colour in ((2, RED), (1, ORANGE), (0, BLUE)):
            distribution(panel, requests.ttft_us[classes == value], color=colour, label=f"priority {value}")
        log_scale(panel.xaxis)
        label(panel, "TTFT, s", "requests within, %" if panel is axes[0] else "", title)
    axes[0].legend()
    return page


def deduplication() -> Figure:
    """A burst of requests that begin alike: tokens prefilled and TTFT."""
    workload = "gen:n=96,rate=inf,input=lognormal:200:0.5,output=fixed:16,shared_prefix=4096x6"
    kinds = ("off", "last", "defer")
    page, (axes,) = figure(3, width=8.5)
    titles = ("tokens prefilled", "TTFT p50", "TTFT p99")
    for shift, sharing, colour in ((-0.2, False, BLUE), (0.2, True, GREEN)):
        runs = [run(workload, prefix_deduplication=kind, same_step_sharing=sharing) for kind in kinds]
        values = (
            [data.batches.prefill_tokens.sum() / 1e3 for data in runs],
            [ms(data.summary["latency"]["ttft_us_p50"]) for data in runs],
            [ms(data.summary["latency"]["ttft_us_p99"]) for data in runs],
        )
        for panel, column in zip(axes, values, strict=True):
            name = "same_step_sharing" if sharing else "no sharing in flight"
            drawn = panel.bar(np.arange(3) + shift, column, width=0.36, color=colour, label=name)
            panel.bar_label(drawn, [f"{value:,.0f}" for value in column], fontsize=7.5)
    for panel, title, unit in zip(axes, titles, ("thousand tokens", "ms", "ms"), strict=True):
        panel.set_xticks(range(3), kinds)
        panel.margins(y=0.15)
        panel.grid(visible=False, axis="x")
        label(panel, "prefix_deduplication", unit, title)
    axes[0].legend(loc="lower left", facecolor="white", framealpha=0.85, frameon=True, edgecolor="none")
    return page


BATCHINGS = ("prefill_first", "mixed", "running_first")


def batching() -> Figure:
    """Batches one after another while prompts keep coming, and the gaps they leave."""
    page = Figure(figsize=(8, 4.6), facecolor="white", layout="constrained")
    top, bottom = page.subplots(2, 1, height_ratios=(1.2, 1))
    window_us = (3_000_000, 3_500_000)
    workload = "gen:n=60,rate=5,input=lognormal:2500:0.8,output=lognormal:150:0.5"
    for y, kind in enumerate(BATCHINGS):
        data = run(workload, batching=kind, chunked_prefill_size=2048)
        timeline(top, data.batches, y, window_us)
    top.set_yticks([y + 0.35 for y in range(3)], BATCHINGS)
    top.invert_yaxis()
    top.set_xlim(0, (window_us[1] - window_us[0]) / 1e3)
    top.grid(visible=False, axis="y")
    swatches(
        top,
        {"decode": BLUE, "extend: whoever decodes waits": ORANGE, "mixed": GREEN},
        loc="lower right",
        bbox_to_anchor=(1, 1),
    )
    label(top, "time, ms", "", "batches on the GPU")

    rates = (2, 4, 6, 8, 10, 12)
    rated = "gen:n=500,input=lognormal:1500:0.8,output=lognormal:150:0.5"
    for kind, style in zip(BATCHINGS, ("o-", "s-", "x--"), strict=True):
        summaries = [run(rated, rate=rate, batching=kind, chunked_prefill_size=2048).summary for rate in rates]
        p99_ms = [ms(summary["latency"]["itl_us_p99"]) for summary in summaries]
        colour = dict(zip(BATCHINGS, (ORANGE, GREEN, BLUE), strict=True))[kind]
        bottom.plot(rates, p99_ms, style, color=colour, label=kind)
    bottom.legend()
    bottom.set_ylim(bottom=0)
    label(bottom, "requests/s", "ITL p99, ms", "mixed and running_first differ only when pages run out")
    return page


def chunks() -> Figure:
    """What a chunk costs the running batch, and what it costs the new request."""
    workload = "gen:n=700,rate=7,arrivals=gamma,cv=2,input=lognormal:1800:0.9,output=lognormal:100:0.7"
    page, ((left, right),) = figure(2, width=8)
    sizes = (512, 1024, 2048, 4096, 8192)
    for name, colour in (("prefill_first", ORANGE), ("mixed", GREEN)):
        latencies = [run(workload, batching=name, chunked_prefill_size=size).summary["latency"] for size in sizes]
        itl_ms = [ms(latency["itl_us_p99"]) for latency in latencies]
        for panel, statistic in ((left, "ttft_us_p50"), (right, "ttft_us_p99")):
            panel.plot([ms(latency[statistic]) for latency in latencies], itl_ms, "o-", color=colour, label=name)
            for latency, y, size in zip(latencies, itl_ms, sizes, strict=True):
                if name == "prefill_first" and size not in (sizes[0], sizes[-1]):
                    continue
                panel.annotate(f"{size}", (ms(latency[statistic]), y), (4, 4), textcoords="offset points", fontsize=7)
    targets_ms = (20, 30, 45, 80)
    latencies = [
        run(workload, batching="mixed", chunk_target_us=1000 * target).summary["latency"] for target in targets_ms
    ]
    itl_ms = [ms(latency["itl_us_p99"]) for latency in latencies]
    for panel, statistic in ((left, "ttft_us_p50"), (right, "ttft_us_p99")):
        x_ms = [ms(latency[statistic]) for latency in latencies]
        panel.plot(x_ms, itl_ms, "s--", color=VIOLET, label="mixed, chunk_target")
        for x, y, target in zip(x_ms, itl_ms, targets_ms, strict=True):
            panel.annotate(f"{target} ms", (x, y), (4, -9), textcoords="offset points", fontsize=7, color=VIOLET)
        log_scale(panel.yaxis)
        label(panel, f"TTFT {statistic[-3:]}, ms", "ITL p99, ms")
    left.set_title("chunked_prefill_size in tokens; below and left is better", loc="left")
    left.legend()
    return page


PRESSED = "gen:n=260,rate=12,input=lognormal:400:0.6,output=lognormal:500:0.7,max_total=4096"
PRESSED_PAGES = 2600


def reserve() -> Figure:
    """Running requests and free pages when the pool is what lacks."""
    page, axes = figure(3, 2, width=8.5, height=4.2, sharex=True, sharey="row")
    for column, kind in enumerate(("ratio", "on_demand", "full")):
        data = run(PRESSED, pages=PRESSED_PAGES, reserve=kind, max_new_tokens=2048)
        upper, lower = axes[0, column], axes[1, column]
        series, step = data.series, 10
        t_s = series.t_us[::step] / 1e6
        upper.plot(t_s, series.running[::step], color=GREEN, label="running")
        upper.plot(t_s, series.waiting[::step], color=ORANGE, label="waiting")
        lower.fill_between(t_s, series.kv_used_pages[::step], color=BLUE, alpha=0.75, linewidth=0, label="held")
        lower.axhline(PRESSED_PAGES, color=RED, linewidth=1, linestyle="--", label="pool")
        retractions = data.summary["scheduler"]["retractions"]
        upper.set_title(f"{kind}: {retractions} retractions", loc="left")
        ttft_s, took_s = ms(data.summary["latency"]["ttft_us_p99"]) / 1e3, (data.span_us[1] - data.span_us[0]) / 1e6
        lower.set_title(f"TTFT p99 {ttft_s:.1f} s, all done in {took_s:.0f} s", loc="left")
        lower.set_xlabel("time, s")
    axes[0, 0].set_ylabel("requests")
    axes[1, 0].set_ylabel("pages")
    axes[0, 0].legend()
    axes[1, 0].legend(loc="lower right")
    return page


def retraction() -> Figure:
    """Victims of preemption: how often, what is computed again, how late a request gets."""
    page, (axes,) = figure(3, width=8)
    settings = [("length", "tail"), ("length", "front"), ("newest", "tail"), ("newest", "front")]
    names = [f"{policy}\n{requeue}" for policy, requeue in settings]
    colours = (BLUE, BLUE, ORANGE, ORANGE)
    runs = [
        run(
            PRESSED,
            pages=PRESSED_PAGES,
            reserve="on_demand",
            max_new_tokens=2048,
            retraction_policy=policy,
            retracted_requeue=requeue,
        )
        for policy, requeue in settings
    ]
    again = [
        (data.batches.prefill_tokens.sum() - (data.requests.prompt_tokens - data.requests.cached_tokens).sum()) / 1e3
        for data in runs
    ]
    bars(axes[0], names, [data.summary["scheduler"]["retractions"] for data in runs], color=colours)
    bars(axes[1], names, again, color=colours)
    bars(axes[2], names, [data.requests.itl_us_max.max() / 1e6 for data in runs], "{:.1f}", color=colours)
    for panel, title, unit in zip(
        axes,
        ("retractions", "prefilled again", "longest pause of an answer"),
        ("retractions", "thousand tokens", "s"),
        strict=True,
    ):
        label(panel, "retraction_policy, retracted_requeue", unit, title)
    return page


def overlap() -> Figure:
    """CPU and GPU beside each other at three depths."""
    workload = "gen:n=300,rate=120,input=lognormal:200:0.4,output=lognormal:200:0.5"
    page, (axes,) = figure(1, width=8, height=3.2)
    panel = axes[0]
    ticks = []
    window_us = (1_000_000, 1_016_000)
    for depth in (0, 1, 2):
        data = run(workload, model="qwen3-0.6b", gpu="h200-sxm", overlap_depth=depth)
        y = 2.6 * depth
        cpu = data.cpu
        for colour, work in ((GREY, ("plan",)), (VIOLET, ("results", "arrival"))):
            shown = np.isin(cpu.what, work) & (cpu.stop_us > window_us[0]) & (cpu.start_us < window_us[1])
            spans = [
                (round((start - window_us[0]) / 1e3, 3), round((stop - start) / 1e3, 3))
                for start, stop in zip(cpu.start_us[shown], cpu.stop_us[shown], strict=True)
            ]
            panel.broken_barh(spans, (y, 0.7), facecolors=colour)
        timeline(panel, data.batches, y + 0.9, window_us)
        bubbles = 100 * data.summary["device"]["bubble_share"]
        tokens = data.summary["throughput"]["output_tokens_per_s"]
        ticks += [(y + 0.35, "CPU"), (y + 1.25, "GPU")]
        panel.text(0, y - 0.12, f"overlap_depth {depth}: bubbles {bubbles:.1f} %, {tokens:,.0f} tokens/s", fontsize=8.5)
    panel.set_yticks([y for y, _ in ticks], [name for _, name in ticks])
    panel.set_xlim(0, (window_us[1] - window_us[0]) / 1e3)
    panel.invert_yaxis()
    panel.grid(visible=False)
    swatches(
        panel,
        {"decode": BLUE, "extend": ORANGE, "plan": GREY, "results, arrivals": VIOLET},
        loc="lower right",
        bbox_to_anchor=(1, 1),
    )
    label(panel, "time, ms", "")
    return page


def multi_step() -> Figure:
    """Several decodes in one launch: an end by a token is noticed late, a new request waits longer."""
    workload = "gen:n=800,rate=25,input=lognormal:300:0.6,output=lognormal:80:0.7"
    page, (axes,) = figure(3, width=8)
    steps = (1, 4, 8)
    names = [str(count) for count in steps]
    runs = [run(workload, decode_steps_per_launch=count, max_new_tokens=1024) for count in steps]
    delivered = [int(data.requests.output_tokens.sum()) for data in runs]
    # Every completed prompt samples one token; all others come from rows that decode.
    computed = [
        int((data.batches.new_tokens - data.batches.prefill_tokens).sum()) + len(data.requests.request_id)
        for data in runs
    ]
    late = [100 * (done - sent) / done for done, sent in zip(computed, delivered, strict=True)]
    bars(axes[0], names, late, "{:.1f}", color=RED)
    label(axes[0], "decode_steps_per_launch", "tokens computed, %", "dropped behind an end")
    for panel, metric, title in ((axes[1], "ttft", "TTFT"), (axes[2], "itl", "ITL")):
        for statistic, colour in (("p50", BLUE), ("p99", ORANGE)):
            values = [ms(data.summary["latency"][f"{metric}_us_{statistic}"]) for data in runs]
            panel.plot(names, values, "o-", color=colour, label=statistic)
        panel.set_ylim(bottom=0)
        panel.legend()
        label(panel, "decode_steps_per_launch", "ms", title)
    return page


SHOWN = {
    "lockstep": BLUE,
    "sglang": GREY,
    "vllm": ORANGE,
    "mixed 2048": GREEN,
    "on_demand": VIOLET,
    "mixed 45 ms, on_demand": RED,
}


def profiles() -> Figure:
    """Good requests in every case of benchmarks/profiles.py at its three loads."""
    rows = json.loads(RESULTS.read_text())["rows"]
    cases = list(dict.fromkeys(row["case"] for row in rows))
    page, axes = figure(3, -(-len(cases) // 3), width=8.5, height=4.4, sharey=True)
    for panel, case in zip(axes.flat, cases, strict=True):
        for place, (variant, colour) in enumerate(SHOWN.items()):
            points = [row for row in rows if row["case"] == case and row["variant"] == variant]
            x = np.arange(len(points)) + 0.13 * (place - (len(SHOWN) - 1) / 2)
            panel.bar(x, [100 * row["goodput_share"] for row in points], width=0.12, color=colour, label=variant)
            panel.set_xticks(range(len(points)), [f"{row['rate']:g}" for row in points])
        panel.set_title(case, loc="left")
        panel.set_xlabel("requests/s")
        panel.grid(visible=False, axis="x")
    for panel in axes[:, 0]:
        panel.set_ylabel("good requests, %")
    page.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=len(SHOWN))
    return page


def validation() -> Figure:
    """A real run and its replays, second by second."""
    with SERIES.open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    series = {name: np.array([float(row[name]) for row in rows]) for name in rows[0]}
    page, axes = figure(3, width=10)
    panels = (("running", "requests running"), ("waiting", "requests waiting"), ("kv_percent", "used KV, %"))
    shown = (("measured", GREY), ("catalogue", ORANGE), ("calibrated", BLUE))
    for panel, (name, title) in zip(axes[0], panels, strict=True):
        for cost, colour in shown:
            panel.plot(series["t_s"], series[f"{name}_{cost}"], color=colour, label=cost, linewidth=1.1)
        panel.set_ylim(bottom=0)
        label(panel, "seconds", "", title)
    page.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=len(shown))
    return page


PICTURES: dict[str, Callable[[], Figure]] = {
    draw.__name__: draw
    for draw in (
        ordering,
        priority,
        deduplication,
        batching,
        chunks,
        reserve,
        retraction,
        overlap,
        multi_step,
        profiles,
        validation,
    )
}


def as_svg(page: Figure) -> str:
    """The page without dates, in few bytes: coordinates to a tenth of a point, one font family, no names."""
    text = io.StringIO()
    page.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    svg = re.sub(r"<[^>]*>", lambda tag: re.sub(r"(\d\.\d)\d+", r"\1", tag[0]), text.getvalue())
    svg = re.sub(r"<!--.*?-->", "", svg)
    svg = re.sub(r'<g id="[^"]*">', "<g>", svg)
    svg = re.sub(r"font-family: [^;\"]*", "font-family: sans-serif", svg)
    svg = re.sub(r' d="[^"]*"', lambda path: path[0].replace(" \n", "").replace("\n", "").replace(" L ", "L"), svg)
    return "".join(line.strip() + "\n" for line in svg.splitlines() if line.strip())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(PICTURES)}; all if none is named")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.names if name not in PICTURES]
    if unknown:
        parser.error(f"no picture {', '.join(unknown)}; there are {', '.join(PICTURES)}")
    mpl.rcParams.update(STYLE)
    for name in arguments.names or PICTURES:
        path = FOLDER / f"{name}.svg"
        path.write_text(as_svg(PICTURES[name]()))
        print(f"{path.name} {path.stat().st_size / 1e3:.0f} KB", flush=True)


if __name__ == "__main__":
    main()
