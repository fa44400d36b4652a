"""Requests: their lifecycle, their rows, and the columns of requests that decode together.

A waiting request is a plain object. Admission assigns a *row* to it: its index in the page table and the output table,
kept until nothing in flight uses it. Once its whole prompt is launched, it joins the *running batch*, the requests that
decode together. Their facts are columns in batch order, so that one decode step costs a few array operations.

    WAITING --admitted--> PREFILLING --prompt launched--> RUNNING --finished--> FINISHED
       ^                       |                             |
       +-------retracted-------+-----------------------------+      cancel, time-out and error finish from anywhere
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from lockstep.core.contract.digest import ids_digest
from lockstep.core.contract.errors import InvariantError
from lockstep.core.contract.events import (
    Decided,
    DeferReason,
    PrefillCompleted,
    Prompt,
    PromptSpan,
    RequestAdmitted,
    RequestArrived,
    RequestFinished,
    RequestId,
    RequestQueued,
    RequestRejected,
    RequestRetracted,
    TokenDigest,
    TokenIds,
    TokenRuns,
)
from lockstep.core.requests.radix_node import Found, RadixNode
from lockstep.core.requests.rules import ONE as ONE
from lockstep.core.requests.rules import ZERO as ZERO

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]

NO_ROW = -1
TOKEN_IDS = 2**31  # ids fit an int32
NO_IDS = np.empty(0, np.int32)
FLAT_ROWS_MIN = 256  # number of table entries from which on one flat index array costs less than a pair of them
ROW_PADDING = 16  # entries, a cache line; rows a power of two apart would share few sets of the cache
HAS_GRAMMAR, WATCHES_TEXT, HAS_CADENCE = 1, 2, 4  # bits of RunningBatch.special
FACTS = 7  # columns of a running batch
NO_TOKEN = -1  # fills the stop-token columns of requests with fewer stop tokens
OUTPUTS_MAX = 2**31 - 1
NO_REQUEST: RequestId = -1
VERSION_MARK = "\0"  # between a namespace and the version of the weights, in the keys of the radix cache


class Adapter(NamedTuple):
    """A version of an adapter (LoRA), applied to the rows of a request."""

    name: str
    version: int


BASE = Adapter("", 0)
"""The model without an adapter."""


class RequestState(IntEnum):
    """The lifecycle position of a request. FINISHED is final."""

    ARRIVING = 0  # between its arrival and its acceptance or rejection, inside one step
    WAITING = 1
    PREFILLING = 2
    RUNNING = 3
    FINISHED = 4


_S = RequestState

TRANSITIONS: dict[tuple[RequestState, type[Decided]], RequestState] = {
    (_S.ARRIVING, RequestQueued): _S.WAITING,
    (_S.ARRIVING, RequestRejected): _S.FINISHED,
    (_S.WAITING, RequestAdmitted): _S.PREFILLING,
    (_S.WAITING, RequestRejected): _S.FINISHED,  # its deadline passed, or its grammar failed
    (_S.WAITING, RequestFinished): _S.FINISHED,  # cancelled or timed out while it waited
    (_S.PREFILLING, PrefillCompleted): _S.RUNNING,
    (_S.PREFILLING, RequestRetracted): _S.WAITING,
    (_S.PREFILLING, RequestFinished): _S.FINISHED,
    (_S.RUNNING, RequestRetracted): _S.WAITING,
    (_S.RUNNING, RequestFinished): _S.FINISHED,
}


class Extras(msgspec.Struct):
    """Rare features that a request uses, and how far their results were delivered. Ordinary requests have none."""

    pooled: bool = False  # the result is one vector over all positions, so all of them are computed together
    spans: tuple[PromptSpan, ...] = ()
    token_type_ids: bytes = b""
    logprobs: bool = False  # logprobs of its output are requested
    logprobs_from: int | None = None  # position from which prompt logprobs are still due; None: none are due
    hidden_from: int | None = None  # position from which hidden states are still due; None: none are due
    leader: RequestId = NO_REQUEST  # the leading sample, whose prompt it waits for
    awaits_media: bool = False  # it waits for its encoded media, before the waiting queue

    @property
    def media(self) -> dict[bytes, int]:
        """The media that need an encoder: encoder tokens by digest."""
        return {span.digest: span.encoder_tokens for span in self.spans if span.encoder_tokens}

    @property
    def cacheable_tokens(self) -> int | None:
        """Leading tokens for which only KV is needed, so that cached KV suffices; None: all of them."""
        if self.pooled:
            return 0
        wanted = [start for start in (self.logprobs_from, self.hidden_from) if start is not None]
        return min(wanted) if wanted else None


class Accepted(NamedTuple):
    """The parts of a valid, supported and fitting arrival that its `Request` stores."""

    tokens: bytes  # the prompt's ids, packed int32
    namespace: str
    adapter: Adapter
    max_new_tokens: int
    truncated_tokens: int
    extras: Extras | None


class Request:
    """One prompt and its continuation. While the request has a row, output beyond `tokens` is in the output table."""

    __slots__ = (
        "adapter",
        "arrived_us",
        "behind",
        "bypassed",
        "cached_tokens",
        "chunks",
        "computed",
        "deadline_us",
        "decodes",
        "deferred",
        "epoch",
        "extras",
        "finish_by_us",
        "grammar",
        "grammar_due_us",
        "grammar_outputs",
        "handle",
        "ignore_eos",
        "label",
        "matched",
        "max_new_tokens",
        "min_new_tokens",
        "namespace",
        "open_prerequisites",
        "outputs",
        "prefilled_before",
        "priority",
        "prompt_tokens",
        "protected_pages",
        "request_id",
        "routing_key",
        "row",
        "sampling",
        "sent",
        "session",
        "session_after",
        "session_start",
        "state",
        "stop_token_ids",
        "stream_every",
        "streams",
        "tenant",
        "tokens",
        "waiting_since_us",
        "watches_text",
    )

    def __init__(
        self,
        arrived: RequestArrived,
        accepted: Accepted,
        stops: tuple[int, ...],
        stream_every: int,
        prefilled_before: int,
    ) -> None:
        self.request_id: RequestId = arrived.request_id
        self.label = arrived.label
        self.namespace = accepted.namespace
        self.tenant = arrived.tenant
        self.routing_key = arrived.routing_key
        self.adapter = accepted.adapter
        self.priority = arrived.priority
        self.arrived_us = arrived.time_us
        self.waiting_since_us = arrived.time_us
        self.deadline_us = arrived.deadline_us
        self.finish_by_us = arrived.finish_by_us
        self.max_new_tokens = accepted.max_new_tokens
        self.min_new_tokens = min(arrived.min_new_tokens, accepted.max_new_tokens)
        self.ignore_eos = arrived.ignore_eos
        self.stop_token_ids = stops
        # the host searches its text for stop texts and regexes, and may hold tokens back
        self.watches_text = bool(arrived.stop_texts or arrived.stop_regexes)
        self.sent = 0  # output tokens sent so far, if `watches_text`; otherwise `delivery.sent_by` computes them
        self.grammar = arrived.grammar
        self.grammar_due_us: int | None = None  # while its grammar is compiled: when the request is rejected, in us
        self.grammar_outputs = OUTPUTS_MAX  # output tokens that its matcher takes: the grammar ended with the last one
        self.sampling = arrived.sampling
        self.session = arrived.session  # the session of this turn; "" once the session is closed
        self.session_start, self.session_after = arrived.session_start, arrived.session_after
        self.streams = arrived.stream
        self.stream_every = stream_every
        self.tokens = accepted.tokens  # int32 ids of its prompt and of the output it had when it began to wait
        self.prompt_tokens = len(accepted.tokens) // 4
        self.outputs = 0  # output tokens in `tokens`; SchedulerState.outputs_of counts all
        self.state = RequestState.ARRIVING
        self.open_prerequisites = 0  # prerequisites that are still missing before it may join the waiting queue
        self.epoch = 0  # rises whenever it leaves a row; RowTaken carries it to the executor
        self.row = NO_ROW
        self.decodes = False  # whether it is a member of a running batch
        self.computed = 0  # positions with launched KV; of a member of a running batch see RunningState.positions
        self.chunks = 0
        self.handle: RadixNode | None = None  # its lock on the radix cache
        self.protected_pages = 0  # leading pages of its row that the radix cache owns
        self.cached_tokens = -1  # cached tokens of its prompt at its first admission; -1: never admitted
        self.matched: Found | None = None  # its prefix in the radix cache at the last match, see ordering.matched
        self.prefilled_before = prefilled_before  # `prefilled_tokens` of the ordering when it arrived
        self.bypassed = 0  # requests behind it in the waiting queue that were admitted before it
        self.behind: RequestId = -1  # the request that computes its prefix, at its last deferral for that reason
        self.extras = msgspec.structs.replace(accepted.extras) if accepted.extras is not None else None
        self.deferred: DeferReason | None = None  # the last reported deferral reason of this request alone

    @property
    def name(self) -> str:
        """The client's label, or "r" and the request id."""
        return self.label or f"r{self.request_id}"

    @property
    def ran(self) -> bool:
        """Whether the request was ever admitted."""
        return self.cached_tokens >= 0

    @property
    def limit(self) -> int:
        """Positions of prompt and output together at which the request ends by length."""
        return self.prompt_tokens + self.max_new_tokens

    @property
    def reach(self) -> int:
        """The most positions that are computed for the request: its last token is never fed back."""
        return max(self.limit - 1, self.prompt_tokens)

    @property
    def extend_stop(self) -> int:
        """Positions that extends must compute before the request can decode: its prompt and its kept output."""
        return self.prompt_tokens + self.outputs

    @property
    def prefill_only(self) -> bool:
        """Whether the request ends when its prompt is computed, without drawing a token."""
        return not self.max_new_tokens

    @property
    def cacheable_tokens(self) -> int:
        """Leading tokens with KV that may come from the radix cache: all but the last, fewer if results are due."""
        most = len(self.tokens) // 4 - 1
        limit = self.extras.cacheable_tokens if self.extras is not None else None
        return most if limit is None else min(most, limit)

    @property
    def needs_plain_extend(self) -> bool:
        """Whether the extends of this request must not share a batch with decodes.

        This holds if more than KV is due for their positions, or if embeddings take the place of tokens. Media do not
        require it, since placeholders represent them.
        """
        extras = self.extras
        if extras is None:
            return False
        return extras.cacheable_tokens is not None or any(span.kind == "embedding" for span in extras.spans)

    def leave_session(self) -> None:
        """Detach the request from its closed session: it goes on, or ends, like a request without a session."""
        self.session = ""

    def advance(self, event: Decided) -> None:
        """Move to the state that TRANSITIONS has for `event`. Raises InvariantError for a pair that is not there."""
        following = TRANSITIONS.get((self.state, type(event)))
        if following is None:
            raise InvariantError(f"{self.name} cannot take {type(event).__name__} while {self.state.name}")
        self.state = following


def prompt_bytes(prompt: Prompt) -> bytes:
    """Return the prompt's ids as packed int32. Call prompt_length first, which validates the prompt.

    Raises: ValueError for a TokenDigest, which has no ids.
    """
    match prompt:
        case TokenIds(ids):
            return ids
        case TokenRuns(runs):
            return expand_runs(runs).tobytes()
        case TokenDigest():
            raise ValueError("the prompt's tokens were not kept (journal content: digests), only their digest")


def prompt_length(prompt: Prompt) -> int:
    """Return the number of tokens of a prompt without expanding it. Raises ValueError for a malformed prompt."""
    match prompt:
        case TokenIds(ids):
            if len(ids) % 4:
                raise ValueError(f"prompt ids must be packed int32, got {len(ids)} bytes")
            return len(ids) // 4
        case TokenRuns(runs):
            for first, count in _pairs(runs):
                if count < 1 or not 0 <= first <= TOKEN_IDS - count:
                    raise ValueError(
                        f"a run of {count} ids from {first} on; ids are 0 to {TOKEN_IDS - 1}, counts from 1"
                    )
            return sum(runs[1::2])
        case TokenDigest(tokens):
            return tokens


def expand_runs(runs: tuple[int, ...]) -> Int32s:
    """Expand (first, count, first, count, ...) to int32 ids."""
    pieces = [np.arange(first, first + count, dtype=np.int32) for first, count in _pairs(runs)]
    return pieces[0] if len(pieces) == 1 else np.concatenate((NO_IDS, *pieces))


def _pairs(runs: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    if len(runs) % 2:
        raise ValueError(f"token runs must be pairs of first id and count, got {len(runs)} numbers")
    return zip(runs[0::2], runs[1::2], strict=True)


class RequestTable:
    """Rows of requests: a mirror of the device's page table, the output tokens, and the holder of each row.

    `pages` int32 [rows, pages_width] and `outputs` int32 [rows, outputs_width] grow by doubling. The pages of a row are
    valid up to the launched positions of its holder, its outputs up to the delivered tokens. The rest is stale data of
    earlier holders.
    """

    def __init__(self, rows_max: int, page_size: int) -> None:
        self.rows_max = rows_max
        self.page_size = page_size
        rows = min(rows_max, 64)
        self.holders: list[Request | None] = [None] * rows
        self.free_rows: list[int] = list(range(rows - 1, -1, -1))
        self.pages: Int32s = _table(rows, 16)
        self.outputs: Int32s = _table(rows, 64)
        self.spare: Int32s = np.zeros(rows, np.int32)  # pages of each row behind those of its positions: refused drafts

    @property
    def rows_available(self) -> int:
        """Rows that are free or can be added."""
        return len(self.free_rows) + self.rows_max - len(self.holders)

    def row_available(self) -> bool:
        """Return whether a row is free or can be added."""
        return bool(self.free_rows) or len(self.holders) < self.rows_max

    def take_row(self, request: Request) -> int:
        """Assign a row to the request, copy its kept output into the output table, and return the row."""
        if not self.free_rows:
            self._add_rows()
        row = self.free_rows.pop()
        self.reserve(0, request.outputs + 1)
        self.outputs[row, : request.outputs] = np.frombuffer(request.tokens, np.int32)[request.prompt_tokens :]
        self.holders[row] = request
        request.row = row
        return row

    def free_row(self, row: int) -> None:
        """Free the row. The request that held it may have another row by now."""
        self.holders[row] = None
        self.free_rows.append(row)

    def reserve(self, pages: int, outputs: int) -> None:
        """Make every row wide enough for this many pages and output tokens."""
        if pages > self.pages.shape[1]:
            self.pages = _widened(self.pages, self.pages.shape[0], _doubled(self.pages.shape[1], pages))
        if outputs > self.outputs.shape[1]:
            self.outputs = _widened(self.outputs, self.outputs.shape[0], _doubled(self.outputs.shape[1], outputs))

    def write_outputs(self, rows: Int32s, numbers: Int32s, tokens: Int32s) -> None:
        """Set outputs[rows, numbers] = tokens; int32 [n] all three."""
        if rows.size < FLAT_ROWS_MIN:
            self.outputs[rows, numbers] = tokens
            return
        flat, first = _flat(self.outputs, rows)
        flat[first + numbers] = tokens

    def write_runs(self, rows: Int32s, numbers: Int32s, tokens: Int32s) -> None:
        """Set outputs[rows, numbers] = tokens; int32 [members], [launches, members] and [launches, members]."""
        self.outputs[rows, numbers] = tokens

    def write_pages(self, rows: Int32s, index: Int32s, pages: Int32s) -> None:
        """Set pages[rows, index] = pages; int32 [n] all three."""
        if rows.size < FLAT_ROWS_MIN:
            self.pages[rows, index] = pages
            return
        flat, first = _flat(self.pages, rows)
        flat[first + index] = pages

    def held_pages(self, row: int, computed: int) -> int:
        """Return how many pages a row holds whose holder has `computed` positions."""
        return -(-computed // self.page_size) + int(self.spare[row])

    def spare_of(self, rows: Int32s) -> Int32s | None:
        """Return the pages of rows behind those of their positions, int32 [rows]; None if no row has any."""
        return self.spare[rows] if self.spare.any() else None

    def row_image(self, row: int, pages: int, outputs: int) -> tuple[bytes, bytes]:
        """Return the first pages and outputs of a row, packed int32."""
        return self.pages[row, :pages].tobytes(), self.outputs[row, :outputs].tobytes()

    def load_row(self, row: int, holder: Request, pages: bytes, outputs: bytes) -> None:
        """Restore a row: its holder, and what `row_image` returned."""
        self.holders[row] = holder
        self.pages[row, : len(pages) // 4] = np.frombuffer(pages, np.int32)
        self.outputs[row, : len(outputs) // 4] = np.frombuffer(outputs, np.int32)

    def resize(self, rows: int, pages_width: int, outputs_width: int) -> None:
        """Replace the tables by empty ones of this shape, to restore them from a snapshot."""
        self.holders = [None] * rows
        self.pages = _table(rows, pages_width)
        self.outputs = _table(rows, outputs_width)
        self.spare = np.zeros(rows, np.int32)

    def first_tokens(self, row: int, known: bytes, prompt_tokens: int, count: int) -> bytes:
        """Return the first `count` tokens of a row's holder as packed int32.

        Args:
            known: packed int32 tokens that the holder had when it took the row; its later output follows.
        """
        have = len(known) // 4
        if count <= have:
            return known[: 4 * count]
        return known + self.outputs[row, have - prompt_tokens : count - prompt_tokens].tobytes()

    def _add_rows(self) -> None:
        have = len(self.holders)
        rows = min(self.rows_max, have * 2)
        if rows == have:
            raise InvariantError(f"all {have} rows are taken; admission must check row_available first")
        self.holders.extend([None] * (rows - have))
        self.free_rows.extend(range(rows - 1, have - 1, -1))
        self.outputs = _widened(self.outputs, rows, self.outputs.shape[1])
        self.pages = _widened(self.pages, rows, self.pages.shape[1])
        self.spare = np.concatenate((self.spare, np.zeros(rows - have, np.int32)))


def _doubled(width: int, wanted: int) -> int:
    while width < wanted:
        width *= 2
    return width


def _table(rows: int, width: int) -> Int32s:
    """Return zeros, int32 [rows, width], with `ROW_PADDING` unused entries in memory behind each row."""
    return np.zeros((rows, width + ROW_PADDING), np.int32)[:, :width]


def _flat(table: Int32s, rows: Int32s) -> tuple[Int32s, NDArray[np.int64]]:
    """Return the memory of a table of `_table`, int32 [n], and where each of `rows` begins in it."""
    padded: Int32s = table.base  # type: ignore[assignment]  # the array that `_table` made
    return padded.reshape(-1), rows * np.int64(padded.shape[1])


def _widened(table: Int32s, rows: int, width: int) -> Int32s:
    wider = _table(rows, width)
    wider[: table.shape[0], : table.shape[1]] = table
    return wider


class RunningBatch:
    """The requests that decode together, as columns in batch order. Immutable: a change of membership makes a new one.

    Every plan launched from it shares its arrays. The changing position of each member is `RunningState.positions`.
    """

    __slots__ = (
        "_ids_digest",
        "constrained",
        "everyone",
        "facts",
        "ignores_eos",
        "limits",
        "ones",
        "prompts",
        "request_ids",
        "requests",
        "rows",
        "size",
        "steady",
        "stops",
        "watched",
    )

    def __init__(self, requests: list[Request], request_ids: Int64s, facts: Int32s, stops: Int32s) -> None:
        self.requests = requests
        self.size = len(requests)
        self.request_ids = request_ids
        self._ids_digest: bytes | None = None
        self.facts = facts  # [FACTS, size]; each column of the batch is one row of this array
        self.rows: Int32s = facts[0]
        self.prompts: Int32s = facts[1]
        self.limits: Int32s = facts[2]  # positions of prompt and output together at which each member ends by length
        self.ignores_eos: Int32s = facts[5]  # 0 or 1
        self.stops = stops  # [size, widest] stop tokens, NO_TOKEN where a request has fewer
        special = int(np.bitwise_or.reduce(facts[6])) if np.count_nonzero(facts[6]) else 0
        self.constrained = bool(special & HAS_GRAMMAR)
        self.watched = bool(special & WATCHES_TEXT)
        self.steady = not special & (WATCHES_TEXT | HAS_CADENCE)  # every token of every member is sent at once
        self.everyone: Int32s = _counting(self.size)
        self.ones: Int32s = _ones(self.size)

    @property
    def min_new(self) -> Int32s:
        """Per member: output tokens before which only its length ends the request."""
        column: Int32s = self.facts[3]
        return column

    @property
    def every(self) -> Int32s:
        """Per member: tokens between messages; negative: the request does not stream, see `delivery.sent_by`."""
        column: Int32s = self.facts[4]
        return column

    @property
    def special(self) -> Int32s:
        """Per member: the bits HAS_GRAMMAR, WATCHES_TEXT, HAS_CADENCE of rarely used features."""
        column: Int32s = self.facts[6]
        return column

    @property
    def has_grammar(self) -> NDArray[np.bool_]:
        """Per member: whether a grammar constrains its output."""
        has: NDArray[np.bool_] = self.special & HAS_GRAMMAR != 0
        return has

    @property
    def watches_text(self) -> NDArray[np.bool_]:
        """Per member: whether the host searches its output for stop texts."""
        watches: NDArray[np.bool_] = self.special & WATCHES_TEXT != 0
        return watches

    @property
    def ids_digest(self) -> bytes:
        """Digest of `request_ids`, which replaces them in the digests of steps of large batches."""
        if self._ids_digest is None:
            self._ids_digest = ids_digest(self.request_ids)
        return self._ids_digest

    @staticmethod
    def of(requests: list[Request]) -> RunningBatch:
        """Return the running batch of these requests, in this order."""
        facts = [
            (
                r.row,
                r.prompt_tokens,
                r.limit,
                r.min_new_tokens,
                r.stream_every if r.streams else -r.stream_every,
                r.ignore_eos,
                HAS_GRAMMAR * (r.grammar is not None)
                + WATCHES_TEXT * r.watches_text
                + HAS_CADENCE * (r.stream_every != 1 or not r.streams),
            )
            for r in requests
        ]
        return RunningBatch(
            requests,
            np.array([r.request_id for r in requests], np.int64),
            np.array(facts, np.int32).reshape(-1, FACTS).T.copy(),
            _stops(requests),
        )

    def joined_by(self, other: RunningBatch) -> RunningBatch:
        """Return a running batch with these members, followed by those of `other`."""
        if not self.size:
            return other
        widest = max(self.stops.shape[1], other.stops.shape[1])
        return RunningBatch(
            self.requests + other.requests,
            np.concatenate((self.request_ids, other.request_ids)),
            np.concatenate((self.facts, other.facts), axis=1),
            np.concatenate((_padded(self.stops, widest), _padded(other.stops, widest)))
            if widest
            else _no_stops(self.size + other.size),
        )

    def only(self, staying: NDArray[np.intp]) -> RunningBatch:
        """Return a running batch of the members at these indices, which ascend."""
        return RunningBatch(
            list(map(self.requests.__getitem__, staying.tolist())),
            self.request_ids.take(staying),
            self.facts.take(staying, axis=1),
            _trimmed(self.stops.take(staying, axis=0)),
        )


def _trimmed(stops: Int32s) -> Int32s:
    """Return `stops` without the columns that none of its members uses."""
    return stops[:, (stops != NO_TOKEN).any(axis=0)] if stops.shape[1] else stops


def _no_stops(size: int) -> Int32s:
    return np.empty((size, 0), np.int32)


def _stops(requests: list[Request]) -> Int32s:
    widest = max([len(r.stop_token_ids) for r in requests], default=0)
    if not widest:
        return _no_stops(len(requests))
    stops = np.full((len(requests), widest), NO_TOKEN, np.int32)
    for i, request in enumerate(requests):
        stops[i, : len(request.stop_token_ids)] = request.stop_token_ids
    return stops


def _padded(stops: Int32s, widest: int) -> Int32s:
    if stops.shape[1] == widest:
        return stops
    wider = np.full((stops.shape[0], widest), NO_TOKEN, np.int32)
    wider[:, : stops.shape[1]] = stops
    return wider


_COUNTING: Int32s = np.arange(4096, dtype=np.int32)
_ONES: Int32s = np.ones(4096, np.int32)
_COUNTING.flags.writeable = _ONES.flags.writeable = False


def _counting(size: int) -> Int32s:
    """Return the read-only array 0, 1, 2, ... size - 1."""
    return _COUNTING[:size] if size <= _COUNTING.size else np.arange(size, dtype=np.int32)


def _ones(size: int) -> Int32s:
    """Return a read-only array of `size` ones."""
    return _ONES[:size] if size <= _ONES.size else np.ones(size, np.int32)


EMPTY_BATCH = RunningBatch.of([])


GONE = Request.__new__(Request)
"""Holder of a restored row whose request has ended while a batch or a deferred free still names the row."""
GONE.request_id, GONE.row, GONE.extras = NO_REQUEST, NO_ROW, None
