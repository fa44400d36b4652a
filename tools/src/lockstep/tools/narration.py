"""A request's timeline in sentences: the text of `lockstep explain` about a request and its waits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.events import RequestId
from lockstep.core.contract.render import Names, layers_text
from lockstep.core.contract.text import shown
from lockstep.core.requests.table import NO_REQUEST
from lockstep.sim.results.text import count, duration
from lockstep.tools.request_timeline import (
    Batch,
    Cause,
    Chronicle,
    Message,
    RequestTimeline,
    Retraction,
    RunningRequestLeft,
    Span,
    Wait,
    Work,
)

NAMED = 4  # requests that a sentence names; further ones are counted
CHUNKS_NAMED = 3
MEDIA_SHOWN = 4  # media of a wait that are listed; further ones are counted
GAPS_SHOWN = 3
SPANS_SHOWN = 5  # spans of a wait that are listed one by one; more are summed by cause

Kind = Literal["arrived", "waited", "prefilled", "decoded", "retracted", "ended"]

Metric = Literal["ttft", "tpot", "e2e", "itl"]

DEFERRAL_TEXTS = {
    "running_limit": "max_running_requests{limit} ran already",
    "microbatch": "no place in the microbatch{limit} that was launched was free",
    "rows": "no row of the request table{limit} was free",
    "kv_budget": "its KV did not fit beside what ran",
    "prefill_budget": "the extend was full",
    "pages": "no page was free",
    "window": "no page of the sliding windows was free",
    "state": "no slot of recurrent state was free",
    "transfer": "its KV was being transferred",
    "prefetch": "its prefix was being fetched",
    "proposal_undone": "the ranks agreed to wait for prompts of other ranks",
}
"""Texts by deferral reason, for a request that stops the waiting queue."""

WAITED_FOR = {
    "grammar": "its grammar was being compiled",
    "media": "its media were being encoded",
    "adapter": "no slot for its adapter was free on the device",
    "load": "its prefix was being loaded from host memory to the device",
    "prefetch": "its prefix was being fetched from storage",
    "session": "the previous turn of its session had not ended",
    "bootstrap": "its decode engine had not allocated pages for it",
    "accepted": "no metadata slot for its transfer was free",
    "awaited": "its prefill engine had not computed its prompt",
    "preallocating": "its KV did not fit",
    "receiving": "its KV was being transferred",
    "ready": "no row, or no slot for its adapter, was free",
    "paused": "the engine was paused",
    "closed": "no request was admitted while weights or memory were changed",
    "launch": "it was not refused; the next batch was not planned yet",
}
"""Texts by cause, for a request with a cause of its own or without a particular one."""

OWN_CAUSES = ("prefix", "sample", "session")
"""Causes that name another request, but do not stop the waiting queue."""

SHORT = {
    "running_limit": "running limit",
    "microbatch": "places in microbatches",
    "rows": "rows",
    "kv_budget": "KV budget",
    "prefill_budget": "prefill budget",
    "pages": "pages",
    "window": "window pages",
    "state": "state slots",
    "grammar": "grammar",
    "media": "media",
    "adapter": "adapter",
    "load": "load from the host",
    "prefetch": "fetch from storage",
    "prefix": "prefix being computed",
    "sample": "first sample",
    "session": "session's turn",
    "bootstrap": "pages of the decode engine",
    "accepted": "transfer slots",
    "awaited": "prompt on the prefill engine",
    "preallocating": "room for KV to come",
    "receiving": "KV on the way",
    "ready": "row for KV that came",
    "paused": "pause",
    "closed": "weights or memory",
    "launch": "next launch",
}
"""A cause in a word or two, for tables and pictures."""


class Sentence(NamedTuple):
    """One sentence of a timeline: time, kind, text, and in `more` lines of detail."""

    time_us: int
    kind: Kind
    text: str
    more: tuple[str, ...] = ()


def clock(us: int) -> str:
    """Return a time as text: seconds since the journal began."""
    return f"{us / 1e6:,.3f} s"


def named(requests: Iterable[RequestId], names: Names) -> str:
    """Return the names of requests as `a, b and 12 more`."""
    known = [names.request(request_id) for request_id in requests]
    if len(known) > NAMED + 1:
        return f"{', '.join(known[:NAMED])} and {len(known) - NAMED:,} more"
    return " and ".join(filter(None, (", ".join(known[:-1]), *known[-1:])))


def cause_text(cause: Cause, names: Names) -> str:
    """Return a cause as the rest of the sentence "waited 3 ms: ..."."""
    numbers = (
        f" ({cause.needed_tokens:,} tokens needed, {cause.available_tokens:,} left)" if cause.needed_tokens else ""
    )
    if cause.reason == "prefix":
        return f"{names.request(cause.other)} was computing the prefix that they share"
    if cause.reason == "sample":
        return "the first sample was computing their prompt" + (
            f" ({names.request(cause.other)})" if cause.other != NO_REQUEST else ""
        )
    if cause.reason == "session" and cause.other != NO_REQUEST:
        return f"the previous turn of its session, {names.request(cause.other)}, had not ended"
    if cause.reason in WAITED_FOR and cause.other == NO_REQUEST:
        return WAITED_FOR[cause.reason]
    deferral = deferral_text(cause)
    if cause.other == NO_REQUEST:
        return f"first in the queue, but {deferral}{numbers}"
    return f"behind {names.request(cause.other)}, which could not start: {deferral}{numbers}"


def deferral_text(cause: Cause, otherwise: str = "") -> str:
    """Return the deferral reason that stops the queue as text, with the limit that was reached."""
    text = DEFERRAL_TEXTS.get(cause.reason, otherwise or cause.reason)
    return text.format(limit=f" ({cause.limit:,})" if cause.limit else "")


def cause_key(cause: Cause) -> str:
    """Return a cause without requests and numbers, as the key by which waiting times are summed."""
    short = SHORT.get(cause.reason, cause.reason)
    return f"{_BEHIND}{short}" if cause.other != NO_REQUEST and cause.reason not in OWN_CAUSES else short


_REASONS = {short: reason for reason, short in SHORT.items()}
_BEHIND = "behind another: "


def key_text(key: str) -> str:
    """Return a `cause_key` as text: `in the queue behind another, which could not start: the extend was full`."""
    short = key.removeprefix(_BEHIND)
    reason = _REASONS.get(short, short)
    if short != key:
        return f"in the queue behind another, which could not start: {deferral_text(Cause(reason))}"
    if reason in ("prefix", "sample"):
        return "waiting while another request computed the prefix that they share"
    if reason in WAITED_FOR:
        return f"waiting, as {WAITED_FOR[reason]}"
    return f"first in the queue: {deferral_text(Cause(reason))}"


def wait_by_cause(timeline: RequestTimeline) -> Counter[str]:
    """Return the microseconds that a request waited, by `cause_key`."""
    counter: Counter[str] = Counter()
    for wait in timeline.waits:
        for span in wait.spans:
            counter[cause_key(span.cause)] += span.stop_us - span.start_us
    return counter


# ------------------------------------------------------------------------------------------------------- one request


def headline(timeline: RequestTimeline, names: Names) -> str:
    """Return the request with its token counts and latencies, in one line."""
    name = names.request(timeline.request_id)
    title = name if name == f"r{timeline.request_id}" else f"{name} (r{timeline.request_id})"
    facts = [f"{count(timeline.prompt_tokens, 'prompt token')}, {count(timeline.output_tokens, 'output token')}"]
    if timeline.rejected is not None:
        return f"{title}: rejected ({timeline.rejected.reason})"
    for label, us in (("TTFT", timeline.ttft_us), ("TPOT", timeline.tpot_us), ("end to end", timeline.e2e_us)):
        if us >= 0:
            facts.append(f"{label} {duration(us)}")
    if timeline.ended_us < 0:
        facts.append("still open when the journal ends")
    return f"{title}: " + ", ".join(facts)


def sentences(timeline: RequestTimeline, chronicle: Chronicle, names: Names, config: SchedConfig) -> list[Sentence]:
    """Return the sentences of a timeline in the order of time."""
    found, has_first_token = [_arrival(timeline)], False
    for stay, wait in enumerate(timeline.waits):
        found.append(_waited(wait, names, config, again=stay > 0, media=_media(timeline, wait, chronicle)))
        if wait.admitted is None:
            break
        works = [work for work in timeline.works if work.stay == stay]
        found += _prefilled(wait, [work for work in works if work.extends], timeline, names, again=stay > 0)
        left_us = timeline.waits[stay + 1].start_us if stay + 1 < len(timeline.waits) else timeline.stop_us
        decodes = [work for work in works if not work.extends]
        if not has_first_token and wait.stop_us <= timeline.first_token_us <= left_us:
            found.append(_first_token(timeline, stay))
            has_first_token = True
        if decodes:
            found.append(_decoded(timeline, wait.stop_us, left_us, decodes, chronicle, names))
        if stay < len(timeline.retractions):
            found.append(_retracted(timeline.retractions[stay], names))
    found.append(_end(timeline))
    return found


def _arrival(timeline: RequestTimeline) -> Sentence:
    text = (
        f"arrived (step {timeline.arrived_step:,}) when {count(timeline.running_then, 'request')} ran and "
        f"{timeline.waiting_then:,} waited"
    )
    queued = timeline.queued
    if queued is None:
        return Sentence(timeline.arrived_us, "arrived", text)
    more = [f"{count(queued.prompt_tokens, 'prompt token')}, at most {count(queued.max_new_tokens, 'output token')}"]
    if queued.truncated_tokens:
        more.append(f"{queued.truncated_tokens:,} tokens of its prompt were truncated")
    if timeline.turn is not None:
        turn = timeline.turn
        more.append(
            f"a turn of session {shown(turn.session)}, which kept {turn.kept_tokens:,} tokens: "
            f"{turn.prompt_tokens:,} in all"
        )
    for name, value in (("tenant", timeline.tenant), ("adapter", timeline.adapter), ("priority", timeline.priority)):
        if value not in ("", None):
            more.append(f"{name} {shown(str(value))}")
    return Sentence(timeline.arrived_us, "arrived", text, tuple(more))


def _media(timeline: RequestTimeline, wait: Wait, chronicle: Chronicle) -> list[str]:
    """Return one line for each content that the encoder had to encode for a wait."""
    lines = []
    for kind, tokens, one in chronicle.encodings_of(timeline, wait):
        name = f"{kind} {one.digest.hex()[:8]}, {count(tokens, 'token')}"
        if 0 <= one.done_us <= wait.start_us:
            lines.append(f"{name}: encoded already")
        elif one.done_us < 0:
            lines.append(f"{name}: encoding was requested at {clock(one.asked_us)} and did not end")
        else:
            earlier = ", for another request," if one.asked_us < wait.start_us else ""
            lines.append(f"{name}: encoded from {clock(one.asked_us)}{earlier} to {clock(one.done_us)}")
    return (
        lines if len(lines) <= MEDIA_SHOWN else [*lines[:MEDIA_SHOWN], f"and {len(lines) - MEDIA_SHOWN:,} more media"]
    )


def _waited(wait: Wait, names: Names, config: SchedConfig, *, again: bool, media: Sequence[str]) -> Sentence:
    what = "waited again for" if again else "waited"
    admitted = wait.admitted
    if wait.took_us == 0 and admitted is not None:
        text = "was admitted at once" if not again else "was admitted again at once"
    elif admitted is not None:
        text = f"{what} {duration(wait.took_us)} and was admitted at {clock(wait.stop_us)}"
    else:
        text = f"{what} {duration(wait.took_us)} and was never admitted"
    more = _causes(wait.spans, names) if wait.took_us or admitted is None else []
    more += media
    if wait.made_room:
        more.append(_room(wait.made_room, names))
    if wait.bypassed:
        limit = "" if config.bypass_limit is None else f"; at {config.bypass_limit} it would have gone first"
        more.append(f"{count(wait.bypassed, 'request')} from behind it in the queue went before it{limit}")
    if admitted is not None:
        total = admitted.cached_tokens + admitted.new_tokens
        text += f" (step {wait.admitted_step:,})"
        if admitted.cached_tokens:
            more.append(
                f"{admitted.cached_tokens:,} of {total:,} tokens were in the radix cache, "
                f"{admitted.new_tokens:,} were left to compute"
            )
        else:
            why = "" if config.radix_cache else " (the radix cache is off)"
            more.append(f"no tokens were cached{why}: {count(admitted.new_tokens, 'token')} to compute")
    return Sentence(wait.start_us, "waited", text, tuple(more))


def _causes(spans: Sequence[Span], names: Names) -> list[str]:
    """Return the causes of a wait in order, or of many spans the sums by cause, longest first."""
    if len(spans) <= SPANS_SHOWN:
        return [f"{duration(span.stop_us - span.start_us)}: {cause_text(span.cause, names)}" for span in spans]
    groups: dict[str, list[Span]] = {}
    for span in spans:
        groups.setdefault(cause_key(span.cause), []).append(span)
    lines = []
    for group in sorted(groups.values(), key=lambda group: -sum(span.stop_us - span.start_us for span in group)):
        total_us = sum(span.stop_us - span.start_us for span in group)
        longest = max(group, key=lambda span: span.stop_us - span.start_us)
        if len(group) == 1:
            lines.append(f"{duration(total_us)}: {cause_text(longest.cause, names)}")
            continue
        others = {span.cause.other for span in group} - {NO_REQUEST}
        cause, longest_us = longest.cause, longest.stop_us - longest.start_us
        if len(others) < 2:
            lines.append(f"{duration(total_us)}, in {len(group)} stretches: {cause_text(cause, names)}")
            continue
        what = deferral_text(cause, "its prefix was being computed")
        numbers = f", {cause.needed_tokens:,} tokens needed and {cause.available_tokens:,} left"
        lines.append(
            f"{duration(total_us)}: behind {len(others):,} other requests, each time because {what}; longest behind "
            f"{names.request(cause.other)}: {duration(longest_us)}{numbers if cause.needed_tokens else ''}"
        )
    return lines


def _room(ended: Sequence[RunningRequestLeft], names: Names) -> str:
    last = ended[-1]
    how = "was retracted" if last.how == "retracted" else f"ended ({last.how})"
    ids = list(dict.fromkeys(one.request_id for one in ended))
    if len(ids) == 1:
        return f"at the end of this time {names.request(last.request_id)} {how}"
    left, latest = named(ids, names), names.request(last.request_id)
    return f"at the end of this time {left} left the running batch; the last, {latest}, {how}"


def _prefilled(
    wait: Wait, chunks: Sequence[Work], timeline: RequestTimeline, names: Names, *, again: bool
) -> list[Sentence]:
    if not chunks:
        return []
    begun = [work for work in chunks if work.batch.begins]
    tokens = sum(work.stop - work.start for work in begun)
    first, last = chunks[0].batch, chunks[-1].batch
    kept = timeline.retractions[chunks[0].stay - 1].event.output_tokens if again else 0
    verb = "computed its prompt" + (" and the output it had kept" if kept else " once more" if again else "")
    text = f"{verb}: {count(tokens, 'token')} in {count(len(begun), 'chunk')}"
    if first.layers is not None:
        text += f", by layers in {batches_text(len(chunks))} beside the decodes of others"
    if last.delivered_us >= 0:
        text += f", {duration(last.delivered_us - first.launched_us)} from the first launch to the last result"
    else:
        text += f", but b{last.batch_id} has no result"
    more = [_chunk(work, timeline.request_id, names) for work in chunks[:CHUNKS_NAMED]]
    if len(chunks) > CHUNKS_NAMED:
        more.append(f"and {len(chunks) - CHUNKS_NAMED} more, until b{last.batch_id}")
    return [Sentence(first.launched_us, "prefilled", text, tuple(more))]


def _first_token(timeline: RequestTimeline, stay: int) -> Sentence:
    """Return the parts of the TTFT, up to the stay with the first token."""
    waiting_us = sum(wait.took_us for wait in timeline.waits[: stay + 1])
    chunks = [work.batch.delivered_us for work in timeline.works if work.stay == stay and work.extends]
    there_us = min(chunks[-1], timeline.first_token_us) if chunks else timeline.first_token_us
    prefill = "prefill" if not stay else "prefill, including the prefill lost by retraction"
    parts = [
        f"{duration(waiting_us)} of waiting",
        f"{duration(there_us - timeline.arrived_us - waiting_us)} of {prefill}",
    ]
    held_us = timeline.first_token_us - there_us
    if held_us > 0:
        tokens, why = count(timeline.messages[0].tokens, "token"), "" if timeline.stream else ": no streaming"
        parts.append(f"{duration(held_us)} until its first message, of {tokens}{why}")
    text = f"first token: TTFT {duration(timeline.ttft_us)} = {' + '.join(parts)}"
    return Sentence(timeline.first_token_us, "prefilled", text)


def _chunk(work: Work, request_id: RequestId, names: Names) -> str:
    batch = work.batch
    beside = [other for other in batch.extend_ids if other != request_id]
    decodes = batch.rows - len(batch.extend_ids)
    company = []
    if beside:
        company.append(f"the prompt{'s' if len(beside) > 1 else ''} of {named(beside, names)}")
    if decodes:
        company.append(count(decodes, "decode"))
    took = f", {duration(batch.took_us)} on the device" if batch.took_us else ""
    together = f" together with {' and '.join(company)}" if company else " alone"
    span = f"tokens {work.start:,} to {work.stop:,}"
    if batch.layers is not None:
        span += f" in {layers_text(batch.layers)}"
    return f"b{batch.batch_id} at {clock(batch.launched_us)}: {span}{together}{took}"


def _decoded(
    timeline: RequestTimeline, start_us: int, stop_us: int, decodes: Sequence[Work], chronicle: Chronicle, names: Names
) -> Sentence:
    messages = [message for message in timeline.messages if start_us <= message.time_us <= stop_us]
    first, last = decodes[0].batch, decodes[-1].batch
    end_us = messages[-1].time_us if messages else stop_us
    began_us = max(first.launched_us, messages[0].time_us if messages else 0)  # overlap launches before the token
    took_us = max(end_us - began_us, 0)
    if first.mode == "diffusion_extend":
        blocks = len({work.start for work in decodes})
        text = f"decoded: {count(blocks, 'block')} in {len(decodes):,} passes"
    else:
        tokens = sum(work.stop - work.start for work in decodes)
        text = f"decoded: {count(tokens, 'token')} in {batches_text(len(decodes))}"
    text += f", {duration(took_us)}, b{first.batch_id} to b{last.batch_id}"
    more = []
    mixed = [work.batch for work in decodes if work.batch.mode == "mixed"]
    if mixed:
        prompts = sum(batch.prefill_tokens for batch in mixed)
        more.append(f"{len(mixed):,} of these also computed {count(prompts, 'prompt token')} of other requests")
    out = without(timeline, chronicle, began_us, end_us)
    beside = [batch for batch in out if batch.layers is not None]
    if beside:
        prompts = sum(batch.prefill_tokens for batch in beside)
        owners = named(dict.fromkeys(other for batch in beside for other in batch.extend_ids), names)
        more.append(
            f"{batches_text(len(beside))} with layers of prompts ran beside them: "
            f"{count(prompts, 'prompt token')} of {owners}"
        )
    out = [batch for batch in out if batch.layers is None]
    if out:
        out_us, prompts = sum(batch.took_us for batch in out), sum(batch.prefill_tokens for batch in out)
        owners = named(dict.fromkeys(other for batch in out for other in batch.extend_ids), names)
        computed = f": {count(prompts, 'prompt token')} of {owners}" if prompts else ""
        more.append(f"{batches_text(len(out))} meanwhile ran without it, {duration(out_us)} on the device{computed}")
    more += gap_lines(timeline, messages, chronicle, names)
    return Sentence(began_us, "decoded", text, tuple(more))


def without(timeline: RequestTimeline, chronicle: Chronicle, start_us: int, stop_us: int) -> list[Batch]:
    """Return the batches without a request that were launched and delivered in a time in which it decoded."""
    mine = {work.batch.batch_id for work in timeline.works}
    return [b for b in chronicle.between(start_us, stop_us) if b.batch_id not in mine and b.launched_us >= start_us]


def batches_text(number: int) -> str:
    """Return a number of batches as `1 batch` or `12 batches`."""
    return f"{number:,} batch{'' if number == 1 else 'es'}"


def gap_lines(timeline: RequestTimeline, sent: Sequence[Message], chronicle: Chronicle, names: Names) -> list[str]:
    """Return lines about the longest gaps between two messages, if over twice the median, with the longest batch."""
    gaps = [(after.time_us - before.time_us, before, after) for before, after in pairwise(sent)]
    if len(gaps) < 3:
        return []
    usual_us = sorted(gap[0] for gap in gaps)[len(gaps) // 2]
    long = sorted((gap for gap in gaps if gap[0] > 2 * usual_us), key=lambda gap: (-gap[0], gap[1].time_us))[
        :GAPS_SHOWN
    ]
    mine = {work.batch.batch_id for work in timeline.works}
    lines = []
    for gap_us, before, after in long:
        text = f"{duration(gap_us)} before token {after.offset + 1:,} at {clock(after.time_us)}"
        text += f" (usually {duration(usual_us)})"
        batches = chronicle.between(before.time_us, after.time_us)
        longest = max(batches, key=lambda batch: batch.took_us, default=None)
        if longest is not None and longest.took_us:
            others = [other for other in longest.extend_ids if other != timeline.request_id]
            prompts = (
                f" with {count(longest.prefill_tokens, 'prompt token')} of {named(others, names)}" if others else ""
            )
            part = "" if longest.batch_id in mine else ", which ran without it"
            text += f": b{longest.batch_id} took {duration(longest.took_us)}{prompts}{part}"
        lines.append(text)
    return lines


def _retracted(retraction: Retraction, names: Names) -> Sentence:
    event = retraction.event
    why = {
        "pages": "the next decode of the running batch did not fit into the pages left"
        + (f" ({event.needed_pages:,} needed, {event.available_pages:,} left)" if event.needed_pages else ""),
        "forced": "the setting retract_every forces retractions",
        "pause": "the engine was paused and released its pages",
        "restart": "the engine restarted, and the device's state was lost",
        "prefix_failed": "the batch that computed its cached prefix failed",
        "weights": "weights were replaced",
        "preempted": f"{names.request(event.beneficiary)} has a higher priority and needed the pages",
    }[event.reason]
    text = f"was retracted (step {retraction.step:,}) after {count(event.output_tokens, 'output token')}: {why}"
    more = [f"{count(event.pages_freed, 'page')} freed; the output is kept and its KV is computed again"]
    if event.tokens_discarded:
        was = "was" if event.tokens_discarded == 1 else "were"
        more.append(f"{count(event.tokens_discarded, 'token')} in flight {was} dropped and drawn again later")
    if retraction.gainers:
        more.append(f"the decodes of {named(retraction.gainers, names)} opened pages in the same step")
    return Sentence(event.time_us, "retracted", text, tuple(more))


_ENDS = {
    "length": "its limit of output tokens was reached",
    "stop": "it drew an end token",
    "text_stop": "its text contains a stop text",
    "grammar": "its grammar ended",
    "invalid": "the device returned an invalid token",
    "cancelled": "it was cancelled",
    "timeout": "its deadline passed",
    "out_of_kv": "it alone exceeded the page pool",
    "transfer": "its transfer failed",
    "error": "its batch failed",
    "computed": "its prompt was computed, and no output was requested",
}


def _end(timeline: RequestTimeline) -> Sentence:
    if timeline.rejected is not None:
        text = f"was rejected ({timeline.rejected.reason}): {timeline.rejected.message}"
        return Sentence(timeline.ended_us, "ended", text)
    if timeline.finished is None:
        return Sentence(timeline.stop_us, "ended", "was still open when the journal ends")
    finished = timeline.finished
    text = (
        f"finished ({finished.reason}) with {count(finished.output_tokens, 'output token')}: "
        f"{_ENDS[finished.reason]}; {duration(timeline.e2e_us)} after its arrival"
    )
    more: tuple[str, ...] = ()
    if timeline.retractions:
        again = sum(wait.took_us for wait in timeline.waits[1:])
        more = (f"retracted {count(len(timeline.retractions), 'time')}, after which it waited {duration(again)}",)
    return Sentence(timeline.ended_us, "ended", text, more)


def timeline_text(timeline: RequestTimeline, chronicle: Chronicle, names: Names, config: SchedConfig) -> list[str]:
    """Return a timeline as lines for a terminal."""
    lines = [headline(timeline, names), ""]
    for sentence in sentences(timeline, chronicle, names, config):
        lines.append(f"{clock(sentence.time_us):>14}  {sentence.text}")
        lines += [f"{'':>14}    {line}" for line in sentence.more]
    return lines
