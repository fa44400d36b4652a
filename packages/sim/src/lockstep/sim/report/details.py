"""One run in detail: numbers, latencies, load over time, batch by batch, slowest requests, facts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from lockstep.sim.metrics.columns import Requests
from lockstep.sim.metrics.intervals import coverage_text
from lockstep.sim.report.answer import limits, slo_list
from lockstep.sim.report.parts import escape, figure, legend, table
from lockstep.sim.report.payload import Json
from lockstep.sim.report.report_run import ReportRun
from lockstep.sim.results.slo_rows import METRIC_NAMES
from lockstep.sim.results.text import NOTHING, count, digits, duration, percent, span

SLOWEST = 10

LATENCY_CAPTIONS = {
    "ttft": "From a request's arrival to its first output token: the wait before any text appears.",
    "tpot": "The time each token after the first took, averaged over a request: the speed of the text.",
    "itl": "Every single gap between two tokens: the long ones are the stutters a reader notices.",
    "e2e": "From arrival to last token. Long answers take longer, so look here for outliers rather than for speed.",
    "queue": "From arrival until the scheduler first admitted the request; part of the time to first token.",
}

MODE_LEGEND = {
    "extend": ("prefill", "extend: reads prompts"),
    "split_prefill": ("prefill", "split prefill: some layers of a prompt"),
    "mixed": ("mixed", "mixed: both in one batch"),
    "decode": ("decode", "decode: one more token for each answer"),
    "verify": ("decode", "verify: drafts of each answer, and one more token"),
    "diffusion_extend": ("decode", "diffusion_extend: one more pass over the newest block of each answer"),
}


def details(run: ReportRun, data: Json, key: int, *, alone: bool) -> str:
    """Return everything about one run, as HTML; `data` is its payload."""
    heading = "" if alone else f"<h2>{escape(run.name)}</h2>{slo_list(run)}{limits(run)}"
    sections = (_cards(run), _latencies(data), _over_time(run, data), _timeline(data), _slowest(run), _facts(run))
    body = "\n".join(section for section in (heading, *sections) if section)
    return f'<div class="run" id="run-{key}">\n{body}\n</div>'


def _cards(run: ReportRun) -> str:
    def card(name: str, value: str, note: str, unit: str = "") -> str:
        small = f" <small>{unit}</small>" if unit and value != NOTHING else ""
        return f'<div class="card"><dt>{name}</dt><dd>{value}{small}<p>{note}</p></dd></div>'

    def sure(name: str, show: Callable[[float], str], otherwise: str) -> str:
        """Return the interval of an answer, or else a note."""
        ends = run.interval(name)
        if ends is None or run.intervals is None:
            return otherwise
        return f"{coverage_text(run.intervals)}: {span(show(ends[0]), show(ends[1]))}"

    def latency(title: str, name: str, note: str) -> str:
        return card(title, duration(run.summary("latency", name)), sure(name, duration, note))

    requests, throughput = run.data.summary["requests"], run.data.summary["throughput"]
    scheduler = run.data.summary["scheduler"]
    lost = [f"{count(requests[name])} {name}" for name in ("failed", "cancelled", "unfinished") if requests[name]]
    reasons = requests["by_reject_reason"].items()
    rejected = ", ".join(f"{count(number)} {escape(str(reason)).replace('_', ' ')}" for reason, number in reasons)
    per_s = throughput["requests_per_s"]
    rate = f"{digits(per_s)} requests/s" if per_s is not None else "nothing to measure"
    tokens_per_s = throughput["output_tokens_per_s"]
    good = throughput["goodput_share"]
    slowest = "all but the slowest 1 % were faster"
    cards = [
        latency("TTFT p50", "ttft_us_p50", "arrival to first token, median"),
        latency("TTFT p99", "ttft_us_p99", slowest),
        latency("TPOT p50", "tpot_us_p50", "per further token, median"),
        latency("TPOT p99", "tpot_us_p99", slowest),
        latency("End to end p50", "e2e_us_p50", "arrival to last token, median"),
        card("Throughput", digits(tokens_per_s), sure("output_tokens_per_s", digits, rate), "tokens/s"),
    ]
    if run.slos:
        note = f"{percent(good)} of requests met every SLO" if good is not None else "requests that met every SLO"
        cards.append(card("Goodput", digits(throughput["goodput_requests_per_s"]), note, "requests/s"))
    else:
        cards.append(card("Prompts and output", digits(throughput["total_tokens_per_s"]), rate, "tokens/s"))
    bubble_share = run.summary("device", "bubble_share")
    bubbles = "share of the time with a batch running"
    if bubble_share is not None:
        bubbles = f"idle {percent(round(bubble_share, 4))} of the time with work there"
    pipeline = run.summary("device", "pipeline")
    if pipeline is not None:
        bubbles += f"; stages busy {percent(pipeline['stage_busy_share'])} of the time with a batch there"
    retracted = count(scheduler["requests_retracted"], "request")
    kv_mean = percent(run.summary("kv", "used_share_mean"))
    waiting_max = (
        f"{count(scheduler['waiting_max'])} at most" if scheduler["waiting_max"] is not None else "not reported"
    )
    cards += [
        card(
            "Completed",
            count(requests["completed"]),
            ", ".join(lost) or "none failed",
            f"of {count(requests['arrived'])}",
        ),
        card("Rejected", count(requests["rejected"]), rejected or "requests never admitted"),
        card(
            "Waiting, mean", digits(scheduler["waiting_mean"], 2), f"{waiting_max}, in line for admission", "requests"
        ),
        card("GPU busy", percent(run.summary("device", "busy_fraction")), bubbles),
        card(
            "KV memory, peak", percent(run.summary("kv", "used_share_max")), f"held by requests; {kv_mean} on average"
        ),
        card("Cache hit ratio", percent(run.summary("cache", "hit_ratio")), "prompt tokens found in the radix cache"),
        card("Retractions", count(scheduler["retractions"]), f"{retracted} gave memory back"),
        latency("Queued p50", "queue_us_p50", "arrival to admission, median"),
    ]
    media = run.data.summary.get("media")
    if media is not None:
        there = f"{percent(media['embedding_hit_ratio'])} were there already"
        cards.append(card("Media encoded", count(media["encoded"]), there, f"of {count(media['contents'])}"))
        if media["wait_us_p50"] is not None:
            about = f"encoder busy {percent(media['encoder_busy_fraction'])}; p99 {duration(media['wait_us_p99'])}"
            cards.append(card("Waited for media", duration(media["wait_us_p50"]), about, "p50"))
    sessions = run.data.summary.get("sessions")
    if sessions is not None:
        about = f"at most {percent(sessions['held_share_max'])}; {count(sessions['yields'])} times one yielded"
        cards.append(card("KV held by sessions", percent(sessions["held_share_mean"]), about, "between turns, mean"))
    experts = run.data.summary.get("experts")
    if experts is not None and "placements" in experts:
        about = f"{digits(experts['imbalance_after_mean'], 2)} after; {count(experts['moved'])} experts moved"
        before = f"{digits(experts['imbalance_before_mean'], 2)}"
        cards.append(card("Fullest expert rank", before, about, "times the mean, before each placement"))
    samples = run.data.summary.get("samples")
    if samples is not None:
        about = f"of {count(samples['requests'])} requests with several; p99 {duration(samples['e2e_us_p99'])}"
        cards.append(card("All answers", duration(samples["e2e_us_p50"]), about, "p50"))
    adapters = run.data.summary.get("adapters")
    if adapters is not None:
        about = f"of {count(adapters['adapters'])} adapters; {count(adapters['evictions'])} evicted"
        cards.append(
            card("Adapter loads", count(adapters["loads"]), about, f"{duration(adapters['load_us_mean'])} each")
        )
        about = f"of {count(adapters['requests_waited'])} requests; p99 {duration(adapters['wait_us_p99'])}"
        cards.append(card("Waited for adapters", duration(adapters["wait_us_p50"]), about, "p50"))
    remarks = "".join(f"<li>{escape(remark)}</li>" for remark in run.remarks)
    notes = f'<ul class="remarks" aria-label="What to know">{remarks}</ul>' if remarks else ""
    return f'<section><h2 class="unseen">In numbers</h2><dl class="cards">{"".join(cards)}</dl>{notes}</section>'


def _latencies(data: Json) -> str:
    latencies = data["latencies"]
    title = "How long did requests take?"
    if not latencies:
        empty = '<p class="empty">No request was completed, so there is no latency to show.</p>'
        return f'<section><h2>{title}</h2><figure class="wide">{empty}</figure></section>'
    figures = [
        figure(
            metric,
            METRIC_NAMES[metric].capitalize(),
            "share of gaps" if metric == "itl" else "share of requests",
            caption,
            empty="" if metric in latencies else "No request has this value.",
        )
        for metric, caption in LATENCY_CAPTIONS.items()
        if metric in latencies or metric in ("ttft", "tpot")
    ]
    if data["scatter"]:
        figures.append(
            figure(
                "scatter",
                "First token against prompt length",
                "time to first token, log scale",
                "One dot per request. The lower edge is the cost of reading the prompt; dots far above it waited.",
            )
        )
    return f"""<section>
<div class="section-head"><div><h2>{title}</h2>
<p class="lead">A curve is the share of completed requests that were at least this fast. A steep curve means that
requests are alike; a long tail to the right means that some waited much longer than most.</p></div>
<label class="toggle"><input type="checkbox" data-log checked>log scale</label></div>
<div class="grid2">{"".join(figures)}</div>
</section>"""


def _over_time(run: ReportRun, data: Json) -> str:
    series, pages = run.data.series, run.summary("kv", "pages")
    if run.summary("requests", "arrived") == 0:
        return ""

    def unless(known: bool, reason: str) -> str:
        return "" if known else reason

    has_gauges = not np.isnan(series.running).all()
    has_pages = not np.isnan(series.kv_used_pages).all()
    has_device = run.summary("device", "busy_fraction") is not None
    width = duration(int(series.t_us[1] - series.t_us[0])) if series.t_us.size > 1 else "the whole run"
    free = [("free", "free")] if pages else []
    figures = [
        figure(
            "load",
            "Requests running and waiting",
            "requests",
            "A waiting queue that keeps growing means more load than this server can carry.",
            legend=legend(("line decode", "running"), ("line dash prefill", "waiting")),
            empty=unless(has_gauges, "The host reported no queue lengths."),
        ),
        figure(
            "kv",
            "KV memory",
            f"pages, of {count(pages)}" if pages else "pages",
            "When held pages leave no room, cached ones are evicted; when those are gone, requests are retracted.",
            legend=legend(*free, ("cached", "cached, not in use"), ("used", "held by requests")),
            empty=unless(has_pages, "The host reported no page counts."),
        ),
        figure(
            "tokens",
            "Tokens computed, by phase",
            "tokens per second",
            "Prefill reads prompts, decode writes answers. Bursts of prefill slow the answers that share the GPU.",
            legend=legend(("prefill", "prefill"), ("decode", "decode")),
        ),
        figure("output", "Output", "tokens per second", "Tokens delivered to clients, all requests together."),
        figure(
            "gpu",
            "GPU busy",
            f"share of {width}",
            "Less than full means no work, or a CPU that was not ready with the next batch.",
            empty=unless(has_device, "The host reported no device times."),
        ),
    ]
    return f"""<section>
<h2>What was the server doing?</h2>
<p class="lead">All charts over time share one clock. Point at one to read it, drag across it to zoom them all,
double-click to see everything again.</p>
<div class="grid2">{"".join(figures)}</div>
</section>"""


def _timeline(data: Json) -> str:
    gpu, cpu = data["timeline"]["gpu"], data["timeline"]["cpu"]
    if gpu is None and cpu is None:
        return ""
    merged = " and ".join(
        f"{count(kept['spans'])} {noun} as {count(kept['shown'])}"
        for kept, noun in ((gpu, "batches"), (cpu, "CPU intervals"))
        if kept is not None and kept["shown"] < kept["spans"]
    )
    note = f"To keep this file small, neighbours of one kind are merged: it shows {merged}." if merged else ""
    lanes = gpu["lanes"] if gpu else []
    kinds = legend(*(MODE_LEGEND.get(lane, ("", lane.replace("_", " "))) for lane in lanes)) if lanes else ""
    return f"""<section>
<h2>Batch by batch</h2>
<p class="lead">Work of the CPU and the GPU at each moment. While the GPU runs one batch, the CPU should already
prepare the next: a gap on the GPU below work on the CPU is a bubble.</p>
<figure class="wide">
<div class="controls" role="group" aria-label="Timeline view">
<button type="button" data-act="in" aria-label="Zoom in">+</button>
<button type="button" data-act="out" aria-label="Zoom out">&minus;</button>
<button type="button" data-act="left" aria-label="Move to earlier">&larr;</button>
<button type="button" data-act="right" aria-label="Move to later">&rarr;</button>
<button type="button" data-act="close">Show 200 ms</button>
<button type="button" data-act="reset">Show everything</button>
<span class="timeline-range" data-range></span></div>
{kinds}
<div class="timeline" data-chart="timeline"></div>
<figcaption>Wheel or pinch to zoom, drag to move, point at a box to see which batch it is. Zoomed out, the height of
a column is the share of its time in which the lane was at work. {note}</figcaption>
</figure>
</section>"""


def _slowest(run: ReportRun) -> str:
    requests = run.data.requests
    rows = np.flatnonzero(requests.completed & (requests.ttft_us >= 0))
    if rows.size == 0:
        return ""
    rows = rows[np.argsort(-requests.ttft_us[rows], kind="stable")][:SLOWEST]
    columns: tuple[tuple[str, Callable[[int], str]], ...] = (
        ("arrived<small>after start</small>", lambda i: duration(requests.arrival_us[i])),
        ("queued", lambda i: duration(requests.queue_us[i])),
        ("TTFT", lambda i: duration(requests.ttft_us[i])),
        ("TPOT", lambda i: duration(requests.tpot_us[i])),
        ("end to end", lambda i: duration(requests.e2e_us[i])),
        ("prompt<small>tokens</small>", lambda i: count(requests.prompt_tokens[i])),
        ("cached<small>tokens</small>", lambda i: count(max(0, requests.cached_tokens[i]))),
        ("output<small>tokens</small>", lambda i: count(requests.output_tokens[i])),
        ("retracted<small>times</small>", lambda i: count(requests.retractions[i])),
    )
    head = '<th scope="col">request</th>' + "".join(f'<th scope="col">{name}</th>' for name, _ in columns)
    lines = [
        f'<tr><th scope="row">{_name(requests, i)}</th>{"".join(f"<td>{show(i)}</td>" for _, show in columns)}'
        f'<td class="text">{escape(str(requests.finish_reason[i]).replace("_", " "))}</td></tr>'
        for i in rows.tolist()
    ]
    which = f"The {len(lines)} completed requests" if len(lines) > 1 else "The completed request"
    return f"""<section>
<h2>Which requests waited longest?</h2>
<p class="lead">{which} with the longest time to first token.</p>
{table(head + '<th scope="col" class="text">ended by</th>', lines, "Requests that waited longest")}
</section>"""


def _name(requests: Requests, i: int) -> str:
    """Return `r17`, followed by the client's label and tenant if there are any."""
    about = " · ".join(str(part) for part in (requests.label[i], requests.tenant[i]) if part)
    name = f"r{requests.request_id[i]}"
    return f'{name} <small class="label" title="{escape(about)}">{escape(about)}</small>' if about else name


def _facts(run: ReportRun) -> str:
    command = run.facts.get("command", "")
    again = (
        f'<div class="command"><pre>{escape(command)}</pre><button type="button" data-copy hidden>Copy</button></div>'
        if command
        else ""
    )
    facts = "".join(
        f"<div><dt>{escape(name).replace('_', '_<wbr>')}</dt><dd>{escape(str(value))}</dd></div>"
        for name, value in run.facts.items()
        if name != "command"
    )
    if not facts and not again:
        return ""
    return f"""<section>
<h2>How to get the same again</h2>
<p class="lead">The run is a function of these settings: the same command gives the same numbers, to the last digit.</p>
{again}
{f'<dl class="facts">{facts}</dl>' if facts else ""}
</section>"""
