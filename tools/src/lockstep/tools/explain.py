"""`lockstep explain`: the reasons behind a request, a step or a slow period. Argument parsing and printing only.

The reasons are those that the scheduler recorded with its decisions. The journal is replayed strictly, so they are the
reasons of the run. docs/replay.md shows how to read the output.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from pathlib import Path
from typing import Any

import click
import numpy as np

from lockstep.core.contract.errors import ConfigError
from lockstep.core.contract.events import RequestId
from lockstep.core.contract.text import shown
from lockstep.host.recording import has_recording
from lockstep.host.router_journal import LeftQueue, label_key
from lockstep.sim.metrics.columns import Requests
from lockstep.sim.metrics.fold import MetricsFold
from lockstep.sim.results.text import count, duration, percent
from lockstep.tools import recording
from lockstep.tools.narration import Metric, clock, headline, sentences, timeline_text, wait_by_cause
from lockstep.tools.request_timeline import Chronicle, RequestTimeline
from lockstep.tools.runs import JSON, RUN, Walk, locate_request, print_json, refusals
from lockstep.tools.state_at import EngineState, lines_of, state_at
from lockstep.tools.timeline_picture import text_lines, write_page
from lockstep.tools.why_step import StepReason, why_step

COLUMNS = {"ttft": "ttft_us", "tpot": "tpot_us", "e2e": "e2e_us", "itl": "itl_us_max"}
SHOWN_IN_FULL = 3  # of the slowest requests
REQUESTS_SHOWN = 64  # open requests of a state
LEFT = {"cancelled": "was cancelled in the router's queue", "line_full": "was rejected because the queue was full"}
"""The ends of a request in the waiting queue of a router, by reason."""


@click.command(context_settings={"max_content_width": 120})
@RUN
@click.option("--request", "request_name", metavar="ID", help="Explain a request, by id (17 or r17) or label.")
@click.option("--step", "step_number", type=click.IntRange(0), metavar="N", help="Explain step N.")
@click.option("--at", "at", metavar="end|N", help="Show what the engine was doing at the end, or before step N.")
@click.option(
    "--slowest",
    type=(click.Choice(list(COLUMNS)), click.IntRange(1, 1000)),
    metavar="METRIC K",
    help="Explain the K requests with the longest ttft, tpot, e2e or itl (longest gap), with waits by cause.",
)
@click.option(
    "--html", "html_file", type=click.Path(path_type=Path), metavar="FILE", help="Write a page with pictures."
)
@click.option("--overwrite", is_flag=True, help="Replace FILE.")
@JSON
def explain(
    run: Path,
    request_name: str | None,
    step_number: int | None,
    at: str | None,
    slowest: tuple[Metric, int] | None,
    html_file: Path | None,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Explain the times of a request, the decisions of a step, or the waits of the slowest requests.

    `--at end` shows what an engine was doing that was killed: open requests with their phase, tokens and pages, and the
    batches without a result.

    \b
    lockstep explain runs/chat --request 17
    lockstep explain runs/chat --slowest ttft 10 --html slow.html
    lockstep explain runs/chat --step 4821
    lockstep explain runs/chat --at end
    """
    chosen = sum(option is not None for option in (request_name, step_number, at, slowest))
    if chosen != 1:
        raise click.UsageError("Give one of --request ID, --step N, --at end|N and --slowest METRIC K.")
    if html_file is not None and (step_number is not None or at is not None):
        raise click.UsageError("--html goes with --request and --slowest: a step has no timeline.")
    if html_file is not None and html_file.exists() and not overwrite:
        raise click.UsageError(f"{html_file} exists\nhint: choose another file, or add --overwrite")
    with refusals():
        if has_recording(run):
            if at is not None:
                recording.show_end(run, at, as_json=as_json, most=REQUESTS_SHOWN)
                return
            if step_number is not None or html_file is not None or as_json:
                raise ConfigError(
                    f"`{run}` is a recording: it has neither steps nor pictures\n"
                    "hint: use --request, --slowest or --at end"
                )
            recording.show(run, request_name, slowest)
            return
        if at is not None:
            _show_state(state_at(run, at), as_json)
            return
        if step_number is not None:
            _show_step(why_step(run, step_number), as_json)
            return
        if request_name is not None:
            place = locate_request(run, request_name)
            if isinstance(place, LeftQueue):
                _show_left(place, request_name, html_file, as_json)
                return
            run, request_id = place
            ids, title = [request_id], f"Request {request_name}"
        else:
            assert slowest is not None
            ids, title = _slowest(run, *slowest), f"The {slowest[1]} requests with the longest {slowest[0]}"
        chronicle, walk = chronicle_of(run, ids)
        timelines = [chronicle.timelines[request_id] for request_id in ids]
        if html_file is not None:
            about = f"{walk.folder}: seed {walk.header.seed}; replayed decision by decision"
            write_page(html_file, title, timelines, chronicle, walk.names, walk.header.config, about)
    if as_json:
        described = [_described(timeline, chronicle, walk) for timeline in timelines]
        print_json({"requests": described} if slowest is not None else described[0])
    elif slowest is None:
        _show_timeline(timelines[0], chronicle, walk)
    else:
        _show_slowest(timelines, slowest[0], chronicle, walk)
    if html_file is not None:
        click.echo(f"{html_file} written, {html_file.stat().st_size:,} bytes", err=True)


def chronicle_of(run: Path, ids: list[RequestId]) -> tuple[Chronicle, Walk]:
    """Replay a run; return the timelines of requests, and the replay at its end."""
    chronicle, walk = Chronicle(ids), Walk(run)
    for number, event, step in walk:
        chronicle.observe(number, event, step, walk.engine)
    return chronicle.close(), walk


def measured(run: Path) -> Requests:
    """Return the latencies of a journal's requests, defined in docs/metrics.md."""
    metrics, walk = MetricsFold(), Walk(run)
    for _, event, step in walk:
        metrics.observe(event, step)
    return metrics.result().requests


def _slowest(run: Path, metric: Metric, most: int) -> list[RequestId]:
    requests = measured(run)
    values = getattr(requests, COLUMNS[metric]).astype(float)
    known = np.flatnonzero(np.isfinite(values) & (values >= 0))
    if not known.size:
        raise ConfigError(f"no request of `{run}` has a {metric}\nhint: `lockstep journal info` shows its content")
    order = known[np.argsort(-values[known], kind="stable")][:most]
    ids: list[RequestId] = requests.request_id[order].tolist()
    return ids


def _show_left(left: LeftQueue, name: str, html_file: Path | None, as_json: bool) -> None:
    """Print the record of a request that ended in the waiting queue of a router. Raises ConfigError with --html."""
    if html_file is not None:
        raise ConfigError(
            f"request {shown(name)} ended in the router's queue: it has no timeline\nhint: leave out --html"
        )
    if as_json:
        about = left._asdict() | {"label": name if left.label == label_key(name, left.tenant) else ""}
        print_json({"left_in_queue": about, "waited_us": left.left_us - left.came_us})
        return
    tenant = f" of tenant {shown(left.tenant)}" if left.tenant else ""
    waited = duration(left.left_us - left.came_us)
    _wrap(
        f"request {shown(name)}{tenant} arrived at the router at {clock(left.came_us)} with "
        f"{count(left.prompt_tokens, 'prompt token')}, and {LEFT.get(left.reason, left.reason)} {waited} later. It "
        "never reached an engine."
    )


def _show_timeline(timeline: RequestTimeline, chronicle: Chronicle, walk: Walk) -> None:
    for line in timeline_text(timeline, chronicle, walk.names, walk.header.config):
        _wrap(line)
    click.echo()
    for line in text_lines(timeline, chronicle):
        click.echo(line)
    click.echo("w waits, E extends, D decodes, - batches without it, | tokens sent")


def _show_slowest(timelines: list[RequestTimeline], metric: Metric, chronicle: Chronicle, walk: Walk) -> None:
    start_us = min(timeline.arrived_us for timeline in timelines)
    stop_us = max(timeline.stop_us for timeline in timelines)
    click.echo(f"the {len(timelines)} longest {metric}, of requests open from {clock(start_us)} to {clock(stop_us)}")
    click.echo()
    heads = "".join(f"{head:>10}" for head in ("waited", "prefill", "TTFT", "TPOT", "retracted"))
    click.echo(f"  {'request':<22}{'arrived':>12}{heads}")
    for timeline in timelines:
        queue_us = timeline.queue_us
        prefill_us = timeline.ttft_us - queue_us if queue_us >= 0 and timeline.ttft_us >= 0 else -1
        times = map(duration, (queue_us, prefill_us, timeline.ttft_us, timeline.tpot_us))
        cells = "".join(f"{cell:>10}" for cell in (*times, str(len(timeline.retractions))))
        click.echo(f"  {walk.names.request(timeline.request_id):<22.21}{clock(timeline.arrived_us):>12}{cells}")
    total: Counter[str] = sum((wait_by_cause(timeline) for timeline in timelines), Counter())
    click.echo()
    click.echo(f"what they waited for, {duration(total.total())} together")
    for cause, us in total.most_common():
        if us:
            click.echo(f"  {percent(us / total.total()):>8}  {duration(us):>10}  {cause}")
    batches = chronicle.between(start_us, stop_us)
    prompts = sum(batch.prefill_tokens for batch in batches)
    busy_us = sum(batch.took_us for batch in batches)
    click.echo(
        f"meanwhile {len(batches):,} batches, {duration(busy_us)} on the device, with {count(prompts, 'prompt token')}"
    )
    for timeline in timelines[:SHOWN_IN_FULL]:
        click.echo()
        for line in timeline_text(timeline, chronicle, walk.names, walk.header.config):
            _wrap(line)
    if len(timelines) > SHOWN_IN_FULL:
        click.echo("\nother requests, explained by `lockstep explain RUN --request ID`:")
        for timeline in timelines[SHOWN_IN_FULL:]:
            click.echo(f"  {headline(timeline, walk.names)}")


def _show_step(reason: StepReason, as_json: bool) -> None:
    if as_json:
        print_json(reason.describe())
        return
    click.echo(reason.title)
    for heading, lines in reason.parts.items():
        if lines:
            click.echo(f"\n{heading}")
            for line in lines:
                _wrap(f"  {line}")


def _show_state(state: EngineState, as_json: bool) -> None:
    if as_json:
        print_json(state.describe())
        return
    for line in lines_of(state, REQUESTS_SHOWN):
        click.echo(line)


def _wrap(line: str) -> None:
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    if line[:14].strip() and line[:16].endswith("  "):  # a sentence after its time
        indent = " " * 18
    for part in textwrap.wrap(line, 120, subsequent_indent=indent, break_on_hyphens=False) or [""]:
        click.echo(part)


def _described(timeline: RequestTimeline, chronicle: Chronicle, walk: Walk) -> dict[str, Any]:
    """Return a timeline for --json: figures, waits by cause, and the sentences."""
    narration = sentences(timeline, chronicle, walk.names, walk.header.config)
    return {
        "request_id": timeline.request_id,
        "label": timeline.label,
        "tenant": timeline.tenant,
        "arrived_us": timeline.arrived_us,
        "ended_us": timeline.ended_us if timeline.ended_us >= 0 else None,
        "prompt_tokens": timeline.prompt_tokens,
        "output_tokens": timeline.output_tokens,
        "queue_us": timeline.queue_us if timeline.queue_us >= 0 else None,
        "ttft_us": timeline.ttft_us if timeline.ttft_us >= 0 else None,
        "tpot_us": timeline.tpot_us if timeline.tpot_us >= 0 else None,
        "e2e_us": timeline.e2e_us if timeline.e2e_us >= 0 else None,
        "finish_reason": timeline.finished.reason if timeline.finished is not None else None,
        "reject_reason": timeline.rejected.reason if timeline.rejected is not None else None,
        "retractions": len(timeline.retractions),
        "waited_us_by_cause": dict(wait_by_cause(timeline)),
        "waits": [
            {
                "start_us": wait.start_us,
                "stop_us": wait.stop_us,
                "admitted_step": wait.admitted_step if wait.admitted is not None else None,
                "cached_tokens": wait.admitted.cached_tokens if wait.admitted is not None else None,
                "spans": [{"start_us": s.start_us, "stop_us": s.stop_us, **s.cause._asdict()} for s in wait.spans],
            }
            for wait in timeline.waits
        ],
        "told": [{"time_us": s.time_us, "kind": s.kind, "text": s.text, "more": list(s.more)} for s in narration],
    }


if __name__ == "__main__":
    explain()
