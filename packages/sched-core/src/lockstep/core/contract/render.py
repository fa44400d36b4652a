"""The text form of events, commands and plans.

Consoles, logs and tests show the same text. Every function returns text; nothing here decides or prints. A request is
named by its label, or "r" and its id; a batch by "b" and its id. Spans are half-open, so `a[12:13]` is position 12 of
a. The texts of decided events are declared beside their types in events.py; the text of an engine's state is in
scheduler/state_text.py.

    retracted b after 5 output tokens, 3 pages back
    launch b8 decode a[12:13]
    pages 2/6 free

With LOCKSTEP_DEBUG=1 a host prints the output of `debug_line`: one line per step, one letter per request.
"""

from __future__ import annotations

from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from lockstep.core.contract.commands import (
    NO_SLOT,
    BatchPlan,
    CancelPrefetch,
    CancelTransfer,
    Command,
    CompileGrammar,
    ControlAnswered,
    CopyToHost,
    EncodeMedia,
    ExpertRecord,
    FinishRequest,
    FreezeHeap,
    HybridChanges,
    LaunchBatch,
    LoadAdapter,
    LoadFromHost,
    MeasureExpertLoad,
    MoveExperts,
    PrefetchFromStorage,
    ProposeBatch,
    RejectRequest,
    ReleaseDeviceMemory,
    ResumeDeviceMemory,
    SampleBatch,
    StartProfile,
    StartTransfer,
    StopProfile,
    StreamTokens,
    SwapWeights,
    WriteToStorage,
)
from lockstep.core.contract.declarations import DECLARATIONS
from lockstep.core.contract.events import (
    AdapterLoaded,
    BatchFinished,
    ControlRequested,
    Decided,
    EngineRestarted,
    ExpertLoadMeasured,
    ExpertsMoved,
    GrammarReady,
    HostCopyFinished,
    MediaEncoded,
    MemorySwitched,
    Observed,
    PrefetchFinished,
    RanksAgreed,
    RequestArrived,
    RequestCancelled,
    RequestId,
    StorageWritten,
    TokensForced,
    WeightsSwapped,
)
from lockstep.core.contract.samples import sample_count, sample_label
from lockstep.core.contract.stats import Stats
from lockstep.core.contract.text import RequestNames, count, runs, shown


class Names:
    """The displayed names of requests and control requests: a fold over observed events."""

    def __init__(self) -> None:
        self._requests: dict[RequestId, str] = {}
        self._controls: dict[int, str] = {}

    def observe(self, event: Observed) -> None:
        """Store the names that an event contains."""
        match event:
            case RequestArrived():
                for number in range(sample_count(event) if event.label else 0):
                    self._requests[event.request_id + number] = shown(sample_label(event.label, number))
            case ControlRequested():
                name = type(event.control).__name__.removesuffix("Control")
                spaced = "".join(f" {letter.lower()}" if letter.isupper() else letter for letter in name)
                self._controls[event.control_id] = spaced.strip()

    def request(self, request_id: RequestId) -> str:
        """Return the label of a request, or "r" and its id."""
        return self._requests.get(request_id) or f"r{request_id}"

    def control(self, control_id: int) -> str:
        """Return the kind of a control request and its id."""
        return f"{self._controls.get(control_id, 'control')} {control_id}"


# ------------------------------------------------------------------------------------------------------------ one line


def decided_line(event: Decided, names: RequestNames) -> str:
    """Return a decided event in one line, as declared beside its type."""
    return DECLARATIONS[type(event)].text(event, names)


def command_line(command: Command, names: Names) -> str:
    """Return a command in one line."""
    match command:
        case LaunchBatch(plan, sample):
            return f"launch {plan_text(plan, names)}" + (_deferred(plan) if sample == "deferred" else "")
        case SampleBatch(batch_id, advance):
            moves = [f"matcher {names.request(r)}.{epoch} takes {runs(tokens)}" for r, epoch, tokens in advance]
            return f"sample b{batch_id}, {', '.join(moves) or 'no matcher moves'}"
        case CompileGrammar(grammar):
            return f"compile {_grammar(grammar.digest)}, {grammar.kind}"
        case StreamTokens():
            return "stream " + ", ".join(_stream_parts(command, names))
        case FinishRequest():
            return f"close {names.request(command.request_id)} ({command.reason})"
        case RejectRequest():
            return f"refuse {names.request(command.request_id)} ({command.reason})"
        case EncodeMedia():
            dropped = ", ".join(f"dropping {media_name(digest)}" for digest in command.drop)
            text = f"encode {media_name(command.digest)}, {count(command.encoder_tokens, 'token')}"
            return f"{text}, {dropped}" if dropped else text
        case LoadAdapter():
            return f"load {command.adapter} version {command.version} into slot {command.slot}"
        case ControlAnswered():
            verdict = "done" if command.ok else f"refused, {command.message}"
            if command.stats is not None:
                verdict = stats_text(command.stats)
            if command.experts is not None:
                verdict = _experts_text(command.experts)
            return f"answered {names.control(command.control_id)}: {verdict}"
        case SwapWeights(version, source):
            return f"swap weights to version {version} from {source}"
        case ReleaseDeviceMemory(tags):
            return f"give back the memory of {', '.join(tags)}"
        case ResumeDeviceMemory(tags):
            return f"take the memory of {', '.join(tags)} again"
        case StartTransfer():
            return _transfer_text(command, names)
        case CancelTransfer():
            return f"cancel the transfer of {names.request(command.transfer_id)}"
        case StartProfile():
            return "start the profiler"
        case StopProfile():
            return "stop the profiler"
        case MeasureExpertLoad():
            return "measure the load of experts"
        case MoveExperts():
            return f"move experts {command.move_id}: layers {runs(command.layers)}"
        case FreezeHeap():
            return "freeze the heap"
        case CopyToHost():
            given_up = ", given up" if command.given_up else ""
            beside = "".join(f", {_blocks(one.kind, one.device, one.host)}" for one in command.blocks)
            return f"write {command.copy_id}: {_moves(command.device_pages, command.host_pages)}{beside}{given_up}"
        case LoadFromHost():
            beside = "".join(f", {_blocks(one.kind, one.host, one.device)}" for one in command.blocks)
            return f"load {command.copy_id}: {_moves(command.host_pages, command.device_pages)}{beside}"
        case PrefetchFromStorage():
            where = f"host pages {runs(command.host_pages.tolist())}" if command.keys else "no host page"
            room = "".join(f", {_of_host(one.kind, one.host)}" for one in command.blocks)
            return f"prefetch {command.prefetch_id}: into {where}{room}"
        case ProposeBatch():
            extends = ", and could extend" if command.wish is not None and command.wish.wants else ""
            where = f" in microbatch {command.microbatch}" if command.microbatch else ""
            return f"propose {count(command.counts[0], 'token')} for round {command.round}{where}{extends}"
        case CancelPrefetch(prefetch_id):
            return f"cancel prefetch {prefetch_id}"
        case WriteToStorage():
            what = f"host pages {runs(command.host_pages.tolist())}" if command.keys else "no host page"
            beside = "".join(f", {_of_host(one.kind, one.host)}" for one in command.blocks)
            return f"store {command.write_id}: {what}{beside}"
    assert_never(command)


def observed_line(event: Observed, names: Names) -> str:
    """Return an observed event in one line."""
    match event:
        case RequestArrived():
            return f"arrived {names.request(event.request_id)}"
        case RequestCancelled():
            return f"cancelled {names.request(event.request_id)}"
        case BatchFinished():
            return f"batch b{event.batch_id} finished" + (f" with error: {event.error}" if event.error else "")
        case RanksAgreed():
            return f"ranks agreed on round {event.round}: {'+'.join(str(counts[0]) for counts in event.counts)} tokens"
        case GrammarReady():
            verdict = f"did not compile: {event.error}" if event.error else "compiled"
            return f"grammar {_grammar(event.digest)} {verdict}"
        case TokensForced():
            forced = [
                f"{names.request(request_id)} {len(ids) // 4} from output {first} on"
                for request_id, first, ids in event.forced
            ]
            return f"forced {', '.join(forced)}"
        case MediaEncoded():
            return f"encoded {media_name(event.digest)}" + (f" with error: {event.error}" if event.error else "")
        case ControlRequested():
            return f"asked {names.control(event.control_id)}"
        case AdapterLoaded():
            verdict = f"not loaded: {event.error}" if event.error else "loaded"
            return f"{event.adapter} version {event.version} {verdict}"
        case EngineRestarted():
            return f"restarted as generation {event.generation}"
        case ExpertLoadMeasured():
            return f"measured the load of experts in {count(event.layers, 'layer')}"
        case ExpertsMoved(_, number, error):
            return f"experts {number} " + (f"not moved: {error}" if error else "moved")
        case WeightsSwapped(_, version, error):
            return f"weights {version} " + (f"not swapped: {error}" if error else "swapped")
        case MemorySwitched(_, tags, released, error):
            done = f"not switched: {error}" if error else "given back" if released else "taken again"
            return f"memory of {', '.join(tags)} {done}"
        case HostCopyFinished(_, number, pages, error):
            return f"copy {number} moved {count(pages, 'page')}" + (f": {error}" if error else "")
        case PrefetchFinished(_, number, pages, error):
            beside = "".join(f", {count(len(one.indices), _KINDS[one.kind])}" for one in event.blocks)
            return f"prefetch {number} brought {count(pages, 'page')}{beside}" + (f": {error}" if error else "")
        case StorageWritten(_, number, pages, error):
            return f"store {number} wrote {count(pages, 'page')}" + (f": {error}" if error else "")
    return repr(event)


def _transfer_text(command: StartTransfer, names: Names) -> str:
    span = f"{names.request(command.transfer_id)}[{command.start_tokens}:{command.stop_tokens}]"
    where = f"room {command.room}, slot {command.slot}, pages {runs(command.pages.tolist())}"
    if (beside := command.hybrid) is not None:
        where += f", window pages {runs(beside.window_pages.tolist())}" if beside.window_pages.size else ""
        where += f", state in slot {beside.state_slot}" if beside.state_slot != NO_SLOT else ""
    if command.direction == "receive":
        return f"receive {span}, {where}"
    behind = f" behind b{command.after_batch}" if command.after_batch is not None else ""
    return f"send {span}{behind}, {where}" + (", the last part" if command.last else "")


def _moves(sources: NDArray[np.int32], targets: NDArray[np.int32]) -> str:
    return f"pages {runs(sources.tolist())} to {runs(targets.tolist())}" if sources.size else "no page"


def _blocks(kind: str, sources: NDArray[np.int32], targets: NDArray[np.int32]) -> str:
    return f"{_KINDS[kind]}s {runs(sources.tolist())} to {runs(targets.tolist())}"


def _of_host(kind: str, places: NDArray[np.int32]) -> str:
    return f"{_KINDS[kind]}s {runs(places.tolist()) or 'none'} of the host"


_KINDS = {"window": "window page", "state": "state"}


def plan_text(plan: BatchPlan, names: Names) -> str:
    """Return the spans of a plan, as `b8 decode a[12:13]`. Sampling requests are named unless all of them sample."""
    ids, starts, stops = plan.request_ids.tolist(), plan.starts.tolist(), plan.stops.tolist()
    spans = [f"{names.request(r)}[{start}:{stop}]" for r, start, stop in zip(ids, starts, stops, strict=True)]
    if plan.blocks is not None:
        spans = [f"{span} pass {number + 1}" for span, number in zip(spans, plan.blocks.numbers.tolist(), strict=True)]
    where = f" in microbatch {plan.microbatch}" if plan.microbatch else ""
    if plan.halves is not None:
        where += f" in halves: {halves_text(plan)}"
    if plan.layers is not None:
        where += f" in {layers_text(plan.layers)}"
    if plan.sms is not None:
        where += f" on {plan.sms} SMs"
    text = f"b{plan.batch_id} {plan.mode} {' '.join(spans)}".rstrip() + where
    if len(plan.sample_rows) == len(plan.rows):
        return text
    samplers = [names.request(ids[i]) for i in plan.sample_rows.tolist()]
    text = f"{text}, samples {' '.join(samplers) or 'none'}"
    completed = [names.request(ids[i]) for i in plan.pooled_rows.tolist()]
    return f"{text}, completes {' '.join(completed)}" if completed else text


def layers_text(layers: tuple[int, int]) -> str:
    """Return the layers [start:stop) as `layers 0 to 3`, counted from 0."""
    first, last = layers[0], layers[1] - 1
    return f"layers {first} to {last}" if last > first else f"layer {first}"


def halves_text(plan: BatchPlan) -> str:
    """Return the sizes of the halves of a plan, as `3 + 3 requests`, with the new tokens of a request that is cut."""
    assert plan.halves is not None
    rows, cut = plan.halves.rows, plan.halves.cut
    there = len(plan.rows)
    if not cut:
        return f"{rows} + {there - rows} requests"
    rest = int(plan.stops[rows] - plan.starts[rows]) - cut
    return f"{rows + 1} + {there - rows} requests, the cut one with {cut} + {rest} tokens"


def plan_lines(plan: BatchPlan, names: Names) -> list[str]:
    """Return a whole plan: taken rows, page-table changes, new tokens and extras, one line each."""
    lines = [f"plan {plan_text(plan, names)}"]
    if plan.ranks is not None:
        shared = "a graph" if plan.ranks.use_graph else "the branch of extends" * plan.ranks.extends or "no graph"
        tokens = "+".join(map(str, plan.ranks.tokens))
        lines.append(f"  round {plan.ranks.round} of all ranks: {tokens} tokens, {plan.ranks.padding}, {shared}")
    if plan.halves is not None:
        lines.append(f"  first half: {halves_text(plan)}")
    for taken in plan.rows_taken:
        grammar = f", grammar {_grammar(taken.grammar.digest)}" if taken.grammar is not None else ""
        runs_on = f", on {taken.adapter} in slot {taken.adapter_slot}" if taken.adapter else ""
        request = f"{names.request(taken.request_id)}, epoch {taken.epoch}"
        lines.append(f"  row {taken.row} taken by {request}{grammar}{runs_on}")
    deltas = plan.deltas
    for row in dict.fromkeys(deltas.rows.tolist()):
        of_row = deltas.rows == row
        entries = zip(deltas.index[of_row].tolist(), deltas.pages[of_row].tolist(), strict=True)
        lines.append(f"  row {row} table " + " ".join(f"{index}:{page}" for index, page in entries))
    lines += _hybrid_changes(plan.hybrid, plan.rows.tolist()) if plan.hybrid is not None else []
    at = 0
    for i in range(plan.extend_rows):
        count = int(plan.stops[i] - plan.starts[i])
        lines.append(f"  row {plan.rows[i]} new tokens {runs(plan.token_ids[at : at + count].tolist())}")
        at += count
    for i in range(plan.extend_rows, len(plan.rows)):
        if plan.blocks is not None:
            lines.append(_block_line(plan, i))
            continue
        drafts = plan.speculation.draft_lengths[i - plan.extend_rows] if plan.speculation is not None else 0
        forced = plan.speculation.forced_of(i - plan.extend_rows) if plan.speculation is not None else []
        beside = f" and forced {runs(forced)}" if forced else f" and {drafts} drafts" if drafts else ""
        lines.append(f"  row {plan.rows[i]} newest sampled token{beside}")
    if plan.speculation is not None and plan.speculation.parents.size:
        lines.append(f"  drafts 1, 2, ... are behind {' '.join(map(str, plan.speculation.parents.tolist()))}")
    rows = plan.rows.tolist()
    for media in plan.media_spans:
        name, last = media_name(media.digest), media.offset + media.stop - media.start - 1
        lines.append(f"  row {rows[media.index]} [{media.start}:{media.stop}) {name} {media.offset}..{last}")
    for span in plan.logprob_spans:
        lines.append(f"  row {rows[span.index]} logprobs from {span.start} of {runs(span.targets.tolist())}")
    for hidden in plan.hidden_spans:
        lines.append(f"  row {rows[hidden.index]} hidden states from {hidden.start}")
    for after in plan.starts_after:
        lines.append(f"  row {plan.rows[after.index]} starts where b{after.batch_id} leaves row {after.row}")
    return lines


def _block_line(plan: BatchPlan, i: int) -> str:
    assert plan.blocks is not None
    row, number, given = plan.rows[i], int(plan.blocks.numbers[i]), int(plan.blocks.given[i])
    if number:
        return f"  row {row} pass {number + 1} over its block"
    at = int(plan.blocks.given[:i].sum())
    tokens = f"{runs(plan.token_ids[at : at + given].tolist())} and " if given else ""
    return f"  row {row} begins a block: {tokens}{int(plan.stops[i] - plan.starts[i]) - given} masks"


def _hybrid_changes(changes: HybridChanges, rows: list[int]) -> list[str]:
    lines = []
    if changes.pages.size:
        windows = zip(changes.pages.tolist(), changes.window_pages.tolist(), strict=True)
        lines.append("  windows of pages " + " ".join(f"{page}:{window}" for page, window in windows))
    for row, slot, source in zip(changes.state_rows, changes.state_slots, changes.state_sources, strict=True):
        made = "behind a draft" if source < NO_SLOT else "from zeros" if source == NO_SLOT else f"a copy of {source}"
        made = "as it came" if source == slot else made
        lines.append(f"  row {row} state in slot {slot}, {made}")
    kept = zip(changes.checkpoint_index, changes.checkpoint_positions, changes.checkpoint_slots, strict=True)
    lines += [f"  row {rows[i]} leaves its state at {position} in slot {slot}" for i, position, slot in kept]
    return lines


def _deferred(plan: BatchPlan) -> str:
    return ", sampled in this step" if plan.sample_after is None else f", sampled after b{plan.sample_after}"


def media_name(digest: bytes) -> str:
    """Return the displayed name of media: the first four bytes of their digest, in hexadecimal."""
    return f"media {digest.hex()[:8]}"


def _grammar(digest: bytes) -> str:
    """Return the first four bytes of a digest in hexadecimal; a printable digest, as in tests, as text."""
    text = digest.decode("ascii", "replace")
    return text if text.isprintable() and text.isascii() else digest[:4].hex()


def _stream_parts(command: StreamTokens, names: Names) -> list[str]:
    parts, at = [], 0
    columns = (command.request_ids, command.offsets, command.token_counts)
    for request_id, offset, tokens in zip(*(column.tolist() for column in columns), strict=True):
        parts.append(f"{names.request(request_id)} {offset}: {runs(command.tokens[at : at + tokens].tolist())}")
        at += tokens
    return parts


def _experts_text(record: ExpertRecord) -> str:
    routed = f"{count(int(record.counts.sum()), 'token')} routed by {count(record.batches, 'batch', 'batches')}"
    return f"{routed}, {'recording' if record.recording else 'stopped'}"


def stats_text(stats: Stats) -> str:
    """Return an engine's statistics in one line."""
    counts = stats.counts
    ended = " ".join(f"{reason} {count}" for reason, count in {**counts.finished, **counts.rejected}.items())
    return (
        f"{stats.waiting} waiting, {stats.held} held, {stats.prefilling} prefilling, {stats.running} running, "
        f"{stats.in_flight} in flight; pages {stats.pages_free} free, {stats.pages_cached} cached, "
        f"{stats.pages_session_held} held by {count(stats.sessions, 'session')}, usage {stats.token_usage:.0%}, "
        f"hits {stats.cache_hit_ratio:.0%}; {count(stats.launches, 'launch', 'launches')}, "
        f"{count(counts.retractions, 'retraction')}, {stats.tokens_discarded} discarded, "
        f"{counts.pages_evicted} evicted; ended {ended or 'none'}"
    )
