"""The text form of everything: decided events, commands, plans, and the state of an engine.

Prompt, log and test show the same words, and this file is where they come from. Nothing here decides or prints; every
function returns text. Requests go by their label, or r and their id; batches by b and theirs; spans are half-open, so
`a[12:13]` is position 12 of a.

    retracted b after 5 output tokens, 3 pages back
    launch b8 decode a[12:13]
    pages 2/6 free

`debug_line` is what a host prints under LOCKSTEP_DEBUG=1: one line per step, one letter per request.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from lockstep.core.contract.commands import (
    BatchPlan,
    CancelPrefetch,
    CancelTransfer,
    Command,
    CompileGrammar,
    ControlAnswered,
    CopyToHost,
    EncodeMedia,
    FinishRequest,
    FreezeHeap,
    HybridChanges,
    LaunchBatch,
    LoadAdapter,
    LoadFromHost,
    PrefetchFromStorage,
    ProposeBatch,
    RejectRequest,
    ReleaseDeviceMemory,
    ResumeDeviceMemory,
    SampleBatch,
    StartProfile,
    StartTransfer,
    Step,
    StopProfile,
    StreamTokens,
    SwapWeights,
    WriteToStorage,
)
from lockstep.core.contract.events import (
    AdapterEvicted,
    AdapterLoaded,
    AdmissionDeferred,
    BatchFinished,
    BlocksEvicted,
    ControlRequested,
    Decided,
    DecodeSkipped,
    EngineRestarted,
    GrammarReady,
    HostCopyFinished,
    HostPagesEvicted,
    MediaEncoded,
    MemorySwitched,
    Observed,
    PagesEvicted,
    PrefetchFinished,
    PrefillCompleted,
    PrefillNegotiated,
    RanksAgreed,
    RequestAdmitted,
    RequestArrived,
    RequestCancelled,
    RequestFinished,
    RequestId,
    RequestQueued,
    RequestRejected,
    RequestRetracted,
    SessionClosed,
    SessionYielded,
    StorageWritten,
    TierOperationEnded,
    TierOperationStarted,
    TokensForced,
    TransferMoved,
    TurnStarted,
    WeightsSwapped,
)
from lockstep.core.contract.stats import Stats
from lockstep.core.kv.adapters import Adapters
from lockstep.core.kv.block_tiers import HostBlocks
from lockstep.core.kv.hybrid import NONE, Hybrid
from lockstep.core.kv.radix import RadixCache, RadixNode
from lockstep.core.requests.table import VERSION_MARK, Request, RequestState
from lockstep.core.requests.validation import PARTS_MARK, sample_label, samples_asked
from lockstep.core.scheduler.engine import Engine

TOKENS_SHOWN = 8  # runs of one edge of the radix tree, before it is cut short
PAGES_SHOWN = 16  # of one row, one by one; more are shown as runs
REQUESTS_SHOWN = 40  # columns of a debug line, before it counts instead
BAR_WIDTH = 8  # characters of the pages bar

_DEFER_WORDS = {
    "running_limit": "max_running_requests run already",
    "microbatch": "pp_max_micro_batch_size run already in this microbatch",
    "rows": "no row is free",
    "kv_budget": "it does not fit beside what runs",
    "prefill_budget": "this extend is full",
    "pages": "no page is free now",
    "grammar": "its grammar is being compiled",
    "adapter": "there is no place for its adapter yet",
    "transfer": "its KV is on the way",
    "prefetch": "its prefix is being fetched",
    "media": "its media are being encoded",
    "proposal_undone": "the ranks agreed to wait for prompts of others",
    "prefix": "its prefix is being computed",
    "sample": "another sample computes their prompt",
    "load": "its prefix is on the way from host memory",
    "window": "no window page is free for it now",
    "state": "no slot of state is free now",
}


DIRECTIONS = (0x61C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
"""The controls of Unicode's bidirectional algorithm, which would turn around what stands beside them."""

CONTROLS = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0))} | {
    code: f"\\u{code:04x}" for code in (0x2028, 0x2029, *DIRECTIONS)
}
"""Control characters (C0, DEL, C1), Unicode's ends of lines and DIRECTIONS, as written where nobody must obey them."""


def shown(given: str) -> str:
    """A name that a client gave, for people: controls as `\\x1b`, `\\u202e`. Nothing else shows labels and sessions."""
    return given if given.isprintable() else given.translate(CONTROLS)


class Names:
    """What requests and control requests are called, as people are shown it: a fold over observed events."""

    def __init__(self) -> None:
        self._requests: dict[RequestId, str] = {}
        self._controls: dict[int, str] = {}

    def observe(self, event: Observed) -> None:
        """Learn the names an event brings."""
        match event:
            case RequestArrived():
                for number in range(samples_asked(event) if event.label else 0):
                    self._requests[event.request_id + number] = shown(sample_label(event.label, number))
            case ControlRequested():
                name = type(event.control).__name__.removesuffix("Control")
                words = "".join(f" {letter.lower()}" if letter.isupper() else letter for letter in name)
                self._controls[event.control_id] = words.strip()

    def request(self, request_id: RequestId) -> str:
        return self._requests.get(request_id) or f"r{request_id}"

    def control(self, control_id: int) -> str:
        return f"{self._controls.get(control_id, 'control')} {control_id}"


# ------------------------------------------------------------------------------------------------------------ one line


def decided_line(event: Decided, names: Names) -> str:
    """A decided event in one line."""
    match event:
        case RequestQueued():
            prompt, most = _count(event.prompt_tokens, "prompt token"), _count(event.max_new_tokens, "output token")
            cut = f" ({event.truncated_tokens} cut off)" if event.truncated_tokens else ""
            return f"queued {names.request(event.request_id)} with {prompt}{cut}, at most {most}"
        case RequestRejected():
            return f"rejected {names.request(event.request_id)} ({event.reason}): {event.message}"
        case RequestAdmitted():
            waited = f" after {_ms(event.waited_us)}" if event.waited_us else ""
            cached = f", {_count(event.cached_tokens, 'token')} cached" if event.cached_tokens else ""
            if event.transferred_tokens:
                cached += f", {_count(event.transferred_tokens, 'token')} transferred"
            loaded = f", {event.host_tokens} of them from the host" if event.host_tokens else ""
            stored = f" ({event.storage_tokens} from storage)" if event.storage_tokens else ""
            return f"admitted {names.request(event.request_id)}{waited}{cached}{loaded}{stored}"
        case AdmissionDeferred():
            numbers = (
                f", {event.needed_tokens} tokens wanted, {event.available_tokens} left" if event.needed_tokens else ""
            )
            words = _DEFER_WORDS[event.reason] + (f" by {names.request(event.behind)}" if event.behind >= 0 else "")
            return f"deferred {names.request(event.request_id)} ({event.reason}): {words}{numbers}"
        case PrefillCompleted():
            return f"prefilled {names.request(event.request_id)} in {_count(event.chunks, 'chunk')}"
        case RequestRetracted():
            why = "" if event.reason == "pages" else f" ({event.reason})"
            if event.reason == "preempted":
                why = f" (preempted for {names.request(event.beneficiary)})"
            discarded = f", {_count(event.tokens_discarded, 'token')} discarded" if event.tokens_discarded else ""
            outputs, pages = _count(event.output_tokens, "output token"), _count(event.pages_freed, "page")
            return f"retracted {names.request(event.request_id)} after {outputs}, {pages} back{discarded}{why}"
        case RequestFinished():
            outputs = _count(event.output_tokens, "output token")
            return f"finished {names.request(event.request_id)} with {outputs} ({event.reason})"
        case PagesEvicted():
            return f"evicted {_count(event.pages, 'page')} ({event.reason})"
        case TurnStarted():
            prompt, most = _count(event.prompt_tokens, "prompt token"), _count(event.max_new_tokens, "output token")
            kept = f", {event.kept_tokens} of the session" if event.kept_tokens else ""
            turn = f"{names.request(event.request_id)} in session {shown(event.session)}"
            return f"started {turn} with {prompt}{kept}, at most {most}"
        case SessionYielded():
            return f"session {shown(event.session)} yielded {_count(event.pages, 'page')}"
        case SessionClosed():
            return f"closed session {shown(event.session)} with {_count(event.tokens, 'token')} ({event.reason})"
        case AdapterEvicted():
            return f"evicted {event.adapter} version {event.version} from slot {event.slot}"
        case TierOperationStarted():
            whose = f" for {names.request(event.request_id)}" if event.request_id >= 0 else ""
            return f"began {event.kind} {event.operation} of {_count(event.pages, 'page')}{whose}"
        case TierOperationEnded():
            return f"ended {event.kind} {event.operation} ({event.outcome}), {_count(event.pages_kept, 'page')} kept"
        case BlocksEvicted():
            what = "window page" if event.kind.endswith("window") else "checkpoint"
            return f"evicted {_count(event.count, what)}{' from the host' * event.kind.startswith('host')}"
        case HostPagesEvicted():
            return f"evicted {_count(event.pages, 'page')} from the host"
        case DecodeSkipped():
            needed = _count(event.needed_pages, "page")
            return f"skipped a decode: {needed} short, {event.returning_pages} on the way back"
        case PrefillNegotiated():
            waited = f" after {_count(event.passes, 'pass', 'passes')}" if event.passes else ""
            verdict = f"go ahead{waited}" if event.allowed else f"wait, pass {event.passes}"
            return f"prompts {verdict} ({event.situation}, {_count(event.wanting, 'rank')} could extend)"
        case TransferMoved():
            return f"transfer of {names.request(event.request_id)} is {event.state} ({event.cause})"
    return _fields(event)


def command_line(command: Command, names: Names) -> str:
    """A command in one line."""
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
            text = f"encode {media_name(command.digest)}, {_count(command.encoder_tokens, 'token')}"
            return f"{text}, {dropped}" if dropped else text
        case LoadAdapter():
            return f"load {command.adapter} version {command.version} into slot {command.slot}"
        case ControlAnswered():
            verdict = "done" if command.ok else f"refused, {command.message}"
            if command.stats is not None:
                verdict = stats_text(command.stats)
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
            asks = ", and could extend" if command.wish is not None and command.wish.wants else ""
            where = f" in microbatch {command.microbatch}" if command.microbatch else ""
            return f"propose {_count(command.counts[0], 'token')} for round {command.round}{where}{asks}"
        case CancelPrefetch(prefetch_id):
            return f"cancel prefetch {prefetch_id}"
        case WriteToStorage():
            what = f"host pages {runs(command.host_pages.tolist())}" if command.keys else "no host page"
            beside = "".join(f", {_of_host(one.kind, one.host)}" for one in command.blocks)
            return f"store {command.write_id}: {what}{beside}"
    assert_never(command)


def observed_line(event: Observed, names: Names) -> str:
    """An observed event in one line."""
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
            told = [
                f"{names.request(request_id)} {len(ids) // 4} from output {first} on"
                for request_id, first, ids in event.forced
            ]
            return f"forced {', '.join(told)}"
        case MediaEncoded():
            return f"encoded {media_name(event.digest)}" + (f" with error: {event.error}" if event.error else "")
        case ControlRequested():
            return f"asked {names.control(event.control_id)}"
        case AdapterLoaded():
            verdict = f"not loaded: {event.error}" if event.error else "loaded"
            return f"{event.adapter} version {event.version} {verdict}"
        case EngineRestarted():
            return f"restarted as generation {event.generation}"
        case WeightsSwapped(_, version, error):
            return f"weights {version} " + (f"not swapped: {error}" if error else "swapped")
        case MemorySwitched(_, tags, released, error):
            done = f"not switched: {error}" if error else "given back" if released else "taken again"
            return f"memory of {', '.join(tags)} {done}"
        case HostCopyFinished(_, number, pages, error):
            return f"copy {number} moved {_count(pages, 'page')}" + (f": {error}" if error else "")
        case PrefetchFinished(_, number, pages, error):
            beside = "".join(f", {_count(len(one.indices), _KINDS[one.kind])}" for one in event.blocks)
            return f"prefetch {number} brought {_count(pages, 'page')}{beside}" + (f": {error}" if error else "")
        case StorageWritten(_, number, pages, error):
            return f"store {number} wrote {_count(pages, 'page')}" + (f": {error}" if error else "")
    return _fields(event)


def _transfer_text(command: StartTransfer, names: Names) -> str:
    span = f"{names.request(command.transfer_id)}[{command.start_tokens}:{command.stop_tokens}]"
    where = f"room {command.room}, slot {command.slot}, pages {runs(command.pages.tolist())}"
    if (beside := command.hybrid) is not None:
        where += f", window pages {runs(beside.window_pages.tolist())}" if beside.window_pages.size else ""
        where += f", state in slot {beside.state_slot}" if beside.state_slot != NONE else ""
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
    """What a plan computes: `b8 decode a[12:13]`. Says who samples unless everybody does."""
    ids, starts, stops = plan.request_ids.tolist(), plan.starts.tolist(), plan.stops.tolist()
    spans = [f"{names.request(r)}[{start}:{stop}]" for r, start, stop in zip(ids, starts, stops, strict=True)]
    where = f" in microbatch {plan.microbatch}" if plan.microbatch else ""
    text = f"b{plan.batch_id} {plan.mode} {' '.join(spans)}".rstrip() + where
    if len(plan.sample_rows) == len(plan.rows):
        return text
    samplers = [names.request(ids[i]) for i in plan.sample_rows.tolist()]
    text = f"{text}, samples {' '.join(samplers) or 'nobody'}"
    completed = [names.request(ids[i]) for i in plan.pooled_rows.tolist()]
    return f"{text}, completes {' '.join(completed)}" if completed else text


def plan_lines(plan: BatchPlan, names: Names) -> list[str]:
    """A whole plan: rows, what changed about them, page-table changes and new tokens."""
    lines = [f"plan {plan_text(plan, names)}"]
    if plan.ranks is not None:
        shared = "a graph" if plan.ranks.use_graph else "the branch of extends" * plan.ranks.extends or "no graph"
        tokens = "+".join(map(str, plan.ranks.tokens))
        lines.append(f"  round {plan.ranks.round} of all ranks: {tokens} tokens, {plan.ranks.padding}, {shared}")
    for taken in plan.rows_taken:
        grammar = f", grammar {_grammar(taken.grammar.digest)}" if taken.grammar is not None else ""
        runs_on = f", on {taken.adapter} in slot {taken.adapter_slot}" if taken.adapter else ""
        whose = f"{names.request(taken.request_id)}, epoch {taken.epoch}"
        lines.append(f"  row {taken.row} taken by {whose}{grammar}{runs_on}")
    deltas = plan.deltas
    for row in dict.fromkeys(deltas.rows.tolist()):
        mine = deltas.rows == row
        entries = zip(deltas.index[mine].tolist(), deltas.pages[mine].tolist(), strict=True)
        lines.append(f"  row {row} table " + " ".join(f"{index}:{page}" for index, page in entries))
    lines += _hybrid_changes(plan.hybrid, plan.rows.tolist()) if plan.hybrid is not None else []
    at = 0
    for i in range(plan.extend_rows):
        count = int(plan.stops[i] - plan.starts[i])
        lines.append(f"  row {plan.rows[i]} new tokens {runs(plan.token_ids[at : at + count].tolist())}")
        at += count
    for i in range(plan.extend_rows, len(plan.rows)):
        drafts = plan.speculation.draft_lengths[i - plan.extend_rows] if plan.speculation is not None else 0
        forced = plan.speculation.forced_of(i - plan.extend_rows) if plan.speculation is not None else []
        beside = f" and forced {runs(forced)}" if forced else f" and {drafts} drafts" if drafts else ""
        lines.append(f"  row {plan.rows[i]} newest sampled token{beside}")
    rows = plan.rows.tolist()
    for media in plan.media_spans:
        name, last = media_name(media.digest), media.offset + media.stop - media.start - 1
        lines.append(f"  row {rows[media.index]} [{media.start}:{media.stop}) {name} {media.offset}..{last}")
    for wanted in plan.logprob_spans:
        lines.append(f"  row {rows[wanted.index]} logprobs from {wanted.start} of {runs(wanted.targets.tolist())}")
    for hidden in plan.hidden_spans:
        lines.append(f"  row {rows[hidden.index]} hidden states from {hidden.start}")
    for after in plan.starts_after:
        lines.append(f"  row {plan.rows[after.index]} starts where b{after.batch_id} leaves row {after.row}")
    return lines


def _hybrid_changes(changes: HybridChanges, rows: list[int]) -> list[str]:
    lines = []
    if changes.pages.size:
        windows = zip(changes.pages.tolist(), changes.window_pages.tolist(), strict=True)
        lines.append("  windows of pages " + " ".join(f"{page}:{window}" for page, window in windows))
    for row, slot, source in zip(changes.state_rows, changes.state_slots, changes.state_sources, strict=True):
        made = "behind a draft" if source < NONE else "from zeros" if source == NONE else f"a copy of {source}"
        made = "as it came" if source == slot else made
        lines.append(f"  row {row} state in slot {slot}, {made}")
    kept = zip(changes.checkpoint_index, changes.checkpoint_positions, changes.checkpoint_slots, strict=True)
    lines += [f"  row {rows[i]} leaves its state at {position} in slot {slot}" for i, position, slot in kept]
    return lines


def hybrid_lines(hybrid: Hybrid) -> list[str]:
    """Windows and states: which full pages have a window page or a checkpoint, and what is free."""
    lines = []
    if (window := hybrid.window) is not None:
        have = (window.window_of >= 0).nonzero()[0].tolist()
        shown = " ".join(f"{page}:{window.window_of[page]}" + "*" * bool(window.locks[page]) for page in have)
        free = f"window pages {window.pool.free_count}/{window.pool.total} free, {window.evictable} evictable"
        lines += [f"windows of pages {shown or 'none'}", free]
    if (states := hybrid.states) is not None:
        have = (states.checkpoint_of >= 0).nonzero()[0].tolist()
        shown = " ".join(f"{page}:{states.checkpoint_of[page]}" for page in have)
        lines += [f"checkpoints of pages {shown or 'none'}", f"slots {states.pool.free_count}/{states.pool.total} free"]
    return lines


def block_lines(blocks: HostBlocks) -> list[str]:
    """Which pages of the host have a window page or a state, and what is free."""
    lines = []
    for kind, pool in blocks.pools.items():
        have = (pool.of >= 0).nonzero()[0].tolist()
        shown = " ".join(f"{page}:{pool.of[page]}" + "*" * bool(pool.locks[page]) for page in have)
        free = f"{kind}s of the host {pool.pool.free_count}/{pool.pool.total} free"
        lines += [f"{kind}s of host pages {shown or 'none'}", free]
    return lines


def _deferred(plan: BatchPlan) -> str:
    return ", sampled in this step" if plan.sample_after is None else f", sampled after b{plan.sample_after}"


def media_name(digest: bytes) -> str:
    """A digest, short."""
    return f"media {digest.hex()[:8]}"


def _grammar(digest: bytes) -> str:
    """A digest by its first bytes; as text where it is one, as in tests."""
    text = digest.decode("ascii", "replace")
    return text if text.isprintable() and text.isascii() else digest[:4].hex()


def _stream_parts(command: StreamTokens, names: Names) -> list[str]:
    parts, at = [], 0
    columns = (command.request_ids, command.offsets, command.token_counts)
    for request_id, offset, count in zip(*(column.tolist() for column in columns), strict=True):
        parts.append(f"{names.request(request_id)} {offset}: {runs(command.tokens[at : at + count].tolist())}")
        at += count
    return parts


# ----------------------------------------------------------------------------------------------------------- the state


def pages_line(engine: Engine) -> str:
    """How the pool stands. Cached pages are those of the radix cache that nobody holds; they can be had at once."""
    cached = engine.memory.radix.evictable_pages
    text = f"pages {engine.memory.pool.free_count}/{engine.config.pages} free"
    if cached:
        text += f", {cached} cached"
    by_sessions = engine.sessions.pages_held_alone()
    return f"{text}, {by_sessions} held by sessions" if by_sessions else text


def session_lines(engine: Engine, names: Names) -> list[str]:
    """Every session: what it keeps and holds, whose turn it is and who waits behind."""
    lines, page_size = [], engine.config.page_size
    for session in engine.sessions.open.values():
        text = f"session {shown(session.name)}: {session.length} of {session.capacity_tokens} tokens"
        if session.handle is not None:
            text += f", {session.handle.stop * page_size} held"
        if session.turn is not None:
            text += f", turn {names.request(session.turn)}"
        if session.queue:
            text += ", then " + " ".join(map(names.request, session.queue))
        lines.append(text)
    return lines or ["sessions none"]


def stats_text(stats: Stats) -> str:
    """An engine's statistics in one line."""
    counts = stats.counts
    ended = " ".join(f"{reason} {count}" for reason, count in {**counts.finished, **counts.rejected}.items())
    return (
        f"{stats.waiting} waiting, {stats.held} held, {stats.prefilling} prefilling, {stats.running} running, "
        f"{stats.in_flight} in flight; pages {stats.pages_free} free, {stats.pages_cached} cached, "
        f"{stats.pages_session_held} held by {_count(stats.sessions, 'session')}, usage {stats.token_usage:.0%}, "
        f"hits {stats.cache_hit_ratio:.0%}; {_count(stats.launches, 'launch', 'launches')}, "
        f"{_count(counts.retractions, 'retraction')}, {stats.tokens_discarded} discarded, "
        f"{counts.pages_evicted} evicted; ended {ended or 'nobody'}"
    )


def page_owner_lines(engine: Engine, names: Names) -> list[str]:
    """Every page and who owns it: the pool, the radix cache, a request, or work in flight."""
    page_size = engine.config.page_size
    owners: dict[str, list[int]] = {"free": engine.memory.pool.free_ids().tolist(), "radix cache": []}
    owners["radix cache"] = [page for node in engine.memory.radix.walk() for page in node.pages.tolist()]
    for request in _with_rows(engine):
        held = -(-engine.computed_of(request) // page_size)
        private = engine.memory.table.pages[request.row, request.protected_pages : held].tolist()
        owners[names.request(request.request_id)] = private
    for deferred in engine.memory.deferred_frees:
        held = -(-deferred.computed // page_size)
        private = engine.memory.table.pages[deferred.row, deferred.protected_pages : held].tolist()
        owners[f"left behind in row {deferred.row} until b{deferred.free_after}"] = private
    for free_after, pages in engine.memory.deferred_pages:
        owners.setdefault(f"duplicates until b{free_after}", []).extend(pages.tolist())
    loads = [one for one in engine.memory.tiers.operations.values() if one.kind == "load"]
    owners |= {f"load {load.number}": load.device_pages.tolist() for load in loads}
    return [f"pages of {owner}: {runs(sorted(pages))}" for owner, pages in owners.items() if pages]


def table_lines(engine: Engine, names: Names) -> list[str]:
    """The request table: one line per row in use. `*` marks pages that the radix cache owns, `cached` a run of them."""
    page_size, lines = engine.config.page_size, []
    for request in sorted(_with_rows(engine), key=lambda request: request.row):
        computed = engine.computed_of(request)
        table = engine.memory.table.pages[request.row, : -(-computed // page_size)].tolist()
        lines.append(
            f"row {request.row} {names.request(request.request_id)} {request.state.name.lower()} "
            f"computed {computed} outputs {engine.outputs_of(request)} pages {_pages(table, request.protected_pages)}"
        )
    for deferred in sorted(engine.memory.deferred_frees, key=lambda deferred: deferred.row):
        lines.append(f"row {deferred.row} left behind until b{deferred.free_after}, computed {deferred.computed}")
    return lines or ["table is empty"]


def queue_line(engine: Engine, names: Names) -> str:
    """The waiting line, first to be considered first; then those who are held until they may join it."""
    waiting = [names.request(request.request_id) for request in engine.waiting]
    held = [names.request(request_id) for request_id in engine.held]
    return "waiting " + (" ".join(waiting) or "nobody") + (f", held {' '.join(held)}" if held else "")


def adapter_lines(adapters: Adapters) -> list[str]:
    """The slots of the device, and adapters on their way out."""
    if not adapters.present:
        return ["adapters are off"]
    lines = []
    for i, slot in enumerate(adapters.slots):
        if slot.adapter is None:
            lines.append(f"slot {i} free")
            continue
        rows = adapters.users.get(slot.adapter, 0)
        use = "loading" if slot.loading else f"used by {_count(rows, 'row')}" if rows else "idle"
        lines.append(f"slot {i} {slot.adapter.name} version {slot.adapter.version}, {use}")
    return lines + [f"{name} is being unloaded" for name in adapters.withdrawals]


def in_flight_lines(engine: Engine, names: Names) -> list[str]:
    """Batches launched and not collected, oldest first; rows whose request has left are named dead."""
    lines = []
    for batch in engine.in_flight:
        ids, rows = batch.plan.request_ids.tolist(), batch.plan.rows.tolist()
        dead = [names.request(ids[i]) for i, row in enumerate(rows) if row in batch.dead]
        lines.append(f"in flight {plan_text(batch.plan, names)}" + (f", dead {' '.join(dead)}" if dead else ""))
    return lines or ["in flight nothing"]


def tree_lines(radix: RadixCache) -> list[str]:
    """The radix tree: tokens and pages of each edge, how often it is held, one level of indent per node."""
    if not radix.present:
        return ["tree is off"]
    lines: list[str] = []
    roots = [node for node in radix.walk() if node.parent is None]
    for root in roots:
        if len(roots) > 1 or root.namespace:
            namespace, _, version = root.namespace.partition(VERSION_MARK)
            namespace = namespace.removeprefix(PARTS_MARK)
            lines.append(f"namespace {namespace!r}" + (f", weights {version}" if version else ""))
        _tree(root, 0, lines)
    return lines or ["tree is empty"]


def _tree(node: RadixNode, depth: int, lines: list[str]) -> None:
    if node.parent is not None:
        tokens = np.frombuffer(node.key, np.int32).tolist()
        held = f", held {node.lock_count}" if node.lock_count else ""
        hidden = ", hidden" if node.invalidated else ""
        lines.append(f"{'  ' * (depth - 1)}[{runs(tokens)}] pages {runs(node.pages.tolist())}{held}{hidden}")
    for child in node.children.values():
        _tree(child, depth + 1, lines)


def _with_rows(engine: Engine) -> list[Request]:
    return [request for request in engine.requests.values() if request.state is not RequestState.WAITING]


# ------------------------------------------------------------------------------------------------------- watch it think


def debug_header(engine: Engine, step: Step) -> str:
    """What the columns of `debug_line` are, for the same step. Print it first, and again when it changes."""
    letters = _letters(engine, step, None)
    named = {request_id: request.name[:1] for request_id, request in engine.requests.items()}
    columns = " ".join(named.get(request_id, "-") for request_id in letters)
    return f"{'t_ms':>8}  {'batch':<18} {columns if len(letters) <= REQUESTS_SHOWN else 'requests':<9}  pages free"


def debug_line(engine: Engine, event: Observed, step: Step) -> str:
    """One step in one line: time, the batch launched, a letter per request in the order of their ids, and the pages.

    w waiting, E extending, D decoding, : running and not in this batch, r retracted by this step, . ended by it.
    The bar shows pages in use as #, cached as =, free as a dot. With many requests the letters become counts.
    """
    plan = step.launched()
    batch = ""
    if plan is not None:
        batch = f"b{plan.batch_id} {plan.mode} {int((plan.stops - plan.starts).sum())}t"
        batch += f" m{plan.microbatch}" if plan.microbatch else ""
    letters = list(_letters(engine, step, plan).values())
    if len(letters) > REQUESTS_SHOWN:
        text = " ".join(f"{letter}{letters.count(letter)}" for letter in "EDw:r." if letter in letters)
    else:
        text = " ".join(letters)
    free, total = engine.memory.pool.free_count, engine.config.pages
    return f"{event.time_us / 1000:8.1f}  {batch:<18} {text:<9}  {_bar(engine)} {free}/{total}"


def debug_text(engine: Engine, event: Observed, step: Step, names: Names, level: int) -> list[str]:
    """What LOCKSTEP_DEBUG shows of a step: 1 the line, 2 adds decisions, 3 the tables, 4 the pages."""
    lines = [debug_line(engine, event, step)]
    if level >= 2:
        lines += [f"          {observed_line(event, names)}"]
        lines += [f"          {decided_line(decided, names)}" for decided in step.decided]
    if level >= 3:
        lines += [f"          {queue_line(engine, names)}"]
        lines += [f"          {line}" for line in table_lines(engine, names) + in_flight_lines(engine, names)]
        if engine.memory.adapters.present:
            lines += [f"          {line}" for line in adapter_lines(engine.memory.adapters)]
    if level >= 4:
        lines += [f"          {line}" for line in page_owner_lines(engine, names) + tree_lines(engine.memory.radix)]
    return lines


def _letters(engine: Engine, step: Step, plan: BatchPlan | None) -> dict[RequestId, str]:
    """A letter for every request that lives or ended in this step, in the order of their ids."""
    letters: dict[RequestId, str] = {}
    for request_id, request in engine.requests.items():
        letters[request_id] = "w" if request.state is RequestState.WAITING else ":"
    if plan is not None:
        for i, request_id in enumerate(plan.request_ids.tolist()):
            letters[request_id] = "E" if i < plan.extend_rows else "D"
    for decided in step.decided:
        match decided:
            case RequestRetracted():
                letters[decided.request_id] = "r"
            case RequestFinished() | RequestRejected():
                letters[decided.request_id] = "."
    return dict(sorted(letters.items()))


def _bar(engine: Engine) -> str:
    total = engine.config.pages
    cached = engine.memory.radix.evictable_pages
    used = total - engine.memory.pool.free_count - cached
    width = min(BAR_WIDTH, total)
    full = -(-used * width // total)
    kept = min(-(-cached * width // total), width - full)
    return ("#" * full + "=" * kept).ljust(width, ".")


# -------------------------------------------------------------------------------------------------------------- numbers


def runs(numbers: Iterable[int], shown: int = TOKENS_SHOWN) -> str:
    """Numbers with consecutive ones as `first..last`; past `shown` runs the rest is counted."""
    parts: list[tuple[int, int]] = []
    for number in numbers:
        if parts and parts[-1][1] + 1 == number:
            parts[-1] = (parts[-1][0], number)
        else:
            parts.append((number, number))
    texts = [f"{first}" if first == last else f"{first}..{last}" for first, last in parts[:shown]]
    rest = sum(last - first + 1 for first, last in parts[shown:])
    return " ".join(texts) + (f" and {rest} more" if rest else "")


def _pages(table: list[int], cached: int) -> str:
    """Pages in their order, of which the radix cache owns the first `cached`."""
    if len(table) > PAGES_SHOWN:
        parts = (f"{runs(table[:cached])} cached" if cached else "", runs(table[cached:]))
        return ", ".join(filter(None, parts))
    return " ".join(f"{page}*" if i < cached else f"{page}" for i, page in enumerate(table)) or "none"


def _count(number: int, thing: str, things: str = "") -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {things or thing + 's'}"


def _ms(us: int) -> str:
    return f"{us / 1000:g} ms"


def _fields(record: object) -> str:
    return repr(record)
