"""Commands: orders to the host, verb first. Each docstring states what must hold before it and which event answers it.

A Step lists its commands in the order in which the host must start them. The executor makes no decisions and the core
touches no tensors: a recorded sequence of plans runs on a device with no scheduler at all.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import numpy as np
from msgspec.structs import astuple
from numpy.typing import NDArray

from lockstep.core.contract.events import BatchId, Decided, Grammar, RequestId, SamplingParams, Wish
from lockstep.core.contract.stats import Stats

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]

Mode = Literal[
    "extend", "decode", "mixed", "idle", "prebuilt", "verify", "draft_extend", "split_prefill", "diffusion_extend"
]

SpeculationMethod = Literal["ngram", "draft_model", "eagle", "mtp", "forced"]
"""The source of drafts; "forced": no drafter, all verified tokens were forced by grammars."""

NO_SLOT = -1  # of state: none is named
NO_ROWS: Int32s = np.empty(0, np.int32)
NO_ROWS.flags.writeable = False


class AfterBatch(msgspec.Struct, frozen=True, array_like=True):
    """A start not known yet: the position of row `row` once the result of batch `batch_id` has its accepted tokens."""

    index: int  # position in the plan's rows
    batch_id: BatchId
    row: int


class PageDeltas(msgspec.Struct, frozen=True):
    """Changes of the device's page tables, applied in this order before the batch reads them.

    First whole runs of a row's entries, given by three numbers each: the row, the first index, how many. Then one entry
    for each decode of the plan that begins a page. `pages` has the pages of all of them, end to end.
    """

    pages: Int32s
    runs: Int32s = NO_ROWS  # [3 x runs]
    opened_rows: Int32s = NO_ROWS
    opened_index: Int32s = NO_ROWS

    @property
    def rows(self) -> Int32s:
        """For each page the row of its table: table[rows, index] = pages, in order."""
        runs = self.runs.reshape(-1, 3)
        return np.concatenate((runs[:, 0].repeat(runs[:, 2]), self.opened_rows))

    @property
    def index(self) -> Int32s:
        """For each page its place in the row's table."""
        spans = self.runs.reshape(-1, 3)[:, 1:].tolist()
        return np.concatenate([np.arange(first, first + n, dtype=np.int32) for first, n in spans] + [self.opened_index])


NO_DELTAS = PageDeltas(NO_ROWS)


class HybridChanges(msgspec.Struct, frozen=True):
    """Changes for layers without full attention: before a batch, and the states that the batch stores (hybrid.py).

    Sliding layers find position p of a row in page `window_of[table[p // page_size]]`, a table by full page that the
    device keeps. A window page has one full page: after it is assigned to another, only the new one has it.

    A row that may verify drafts has more slots, named behind its first one, with source -2: nothing is done to them.
    Where it verifies, its state behind the newest token and each draft goes to its slots in this order, and the state
    that its next pass begins with is that behind the last token which was right; other passes leave it in the first.
    A row that verifies may stop before the position of a checkpoint; the slot then holds no state, as the result shows.
    """

    pages: Int32s = NO_ROWS  # [n] full pages, in order: window_of[pages[i]] = window_pages[i]
    window_pages: Int32s = NO_ROWS  # [n]
    state_rows: Int32s = NO_ROWS  # [m] rows that were taken; they compute in ...
    state_slots: Int32s = NO_ROWS  # [m] ... these slots of state, which are made ...
    state_sources: Int32s = NO_ROWS  # [m] ... copies of these before the batch runs; -1: of nothing; -2: see above;
    #                                  itself: of what a transfer has brought there
    checkpoint_index: Int32s = NO_ROWS  # [k] positions in the plan's rows; their states ...
    checkpoint_positions: Int32s = NO_ROWS  # [k] ... right behind so many positions are copied as they pass there ...
    checkpoint_slots: Int32s = NO_ROWS  # [k] ... to these slots


class HybridTransfer(msgspec.Struct, frozen=True):
    """What a transfer moves beside full attention: the last window's KV of sliding layers, and the state of the prompt.

    Positions are those of the pages; `window_pages` are the window blocks of the last n of them, in order.
    """

    window_pages: Int32s = NO_ROWS  # [n] of the sliding layers' pool
    state_slot: int = NO_SLOT  # of the state right behind the whole prompt; -1: not of this part, or none


class RowTaken(msgspec.Struct, frozen=True):
    """A row gets a new request: the executor resets all state of the row before the batch."""

    row: int
    request_id: RequestId
    epoch: int
    sampling: SamplingParams | None = None
    adapter: str = ""
    grammar: Grammar | None = None
    adapter_version: int = 0
    adapter_slot: int = -1  # where a LoadAdapter put it; -1 for the model itself
    logprobs: bool = False  # every token it samples comes with its logprob
    hidden_states: bool = False  # every position it decodes comes with its hidden state
    token_type_ids: bytes = b""  # one byte per prompt token


class MediaSpan(msgspec.Struct, frozen=True):
    """Positions [start:stop) of row `index` take the embeddings of `digest` from number `offset` on, not of tokens."""

    index: int  # position in the plan's rows
    start: int
    stop: int
    digest: bytes
    offset: int


class LogprobSpan(msgspec.Struct, frozen=True):
    """A request for prompt logprobs of row `index`: at each position from `start` on, that of the next prompt token.

    `targets` are these tokens, because the last of them may belong to a later chunk.
    """

    index: int  # position in the plan's rows
    start: int
    targets: Int32s


class HiddenSpan(msgspec.Struct, frozen=True):
    """A request for the hidden states of row `index`, at its new positions from `start` on."""

    index: int  # position in the plan's rows
    start: int


class Speculation(msgspec.Struct, frozen=True):
    """What a plan's verifying rows, those behind `extend_rows`, verify beside their newest token: drafts.

    They are drafted on the device, from the row's position at that time; `BatchFinished.accepted` - 1 of them were
    right. Rows with `forced_lengths` have no drafts: their grammars admit `forced_tokens` only, so that all of these
    are right.
    """

    draft_tokens: int  # per row, at most
    draft_lengths: Int32s  # per verifying row, forced ones included
    method: SpeculationMethod
    forced_lengths: Int32s = NO_ROWS  # per verifying row: 0, or all that `draft_lengths` has; empty where nothing is
    forced_tokens: Int32s = NO_ROWS  # of these, end to end

    def forced_of(self, member: int) -> list[int]:
        """The forced tokens of a verifying row."""
        if not self.forced_lengths.size:
            return []
        stop = int(self.forced_lengths[: member + 1].sum())
        found: list[int] = self.forced_tokens[stop - int(self.forced_lengths[member]) : stop].tolist()
        return found

    def drafted(self) -> Int32s:
        """Tokens per verifying row that a drafter must supply: all but the forced ones."""
        return self.draft_lengths - self.forced_lengths if self.forced_lengths.size else self.draft_lengths


class Ranks(msgspec.Struct, frozen=True):
    """What the data-parallel ranks agreed to run together: the same in the plan of every rank.

    Where ranks gather rows they do so with those of each padded to the most of any (`max_length`), or laid end to end
    (`sum_length`). If any of them extends, all run the branch of extends, and rows that decode are extends by a token.
    """

    round: int
    tokens: tuple[int, ...]  # per rank
    padding: Literal["max_length", "sum_length"]
    use_graph: bool
    logit_rows: tuple[int, ...] = ()  # per rank
    extends: bool = False
    draft_passes: int | msgspec.UnsetType = msgspec.UNSET  # of a drafter that all ranks run together; unset: none is

    @property
    def recorded(self) -> tuple[Any, ...]:
        """The values that the digest covers: without `draft_passes` where it is unset."""
        values = astuple(self)
        return values if self.draft_passes is not msgspec.UNSET else values[:-1]


class BatchPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One forward pass, complete given the plans before it, and immutable: its arrays are never written again.

    Row i computes the tokens at positions [starts[i]:stops[i]) of request `request_ids[i]`, reading KV at [0:stops[i])
    and writing it at [starts[i]:stops[i]), in the pages its table holds after `deltas`.

        0 ............. cached ............ starts ............... stops ........... context max
        | in the radix cache's pages | own | new in this batch | not allocated yet  |

    The first `extend_rows` rows find their new tokens in `token_ids`, end to end. Every row behind them computes one
    token: the newest one sampled for that row, by a batch delivered or still in flight. The device keeps it by row.
    A plan with `steps` above 1 decodes so often in one launch: a row samples a token for each position of its span.
    A plan with `speculation` verifies: behind its newest token such a row computes drafts, and samples one token more
    than the drafts that were right.
    For a row named in `starts_after`, `starts` has the least possible position and `stops` the greatest.
    """

    batch_id: BatchId
    mode: Mode
    rows: Int32s  # [n] request-table rows
    request_ids: Int64s  # [n]
    starts: Int32s  # [n]
    stops: Int32s  # [n]
    extend_rows: int = 0
    token_ids: Int32s = NO_ROWS
    sample_rows: Int32s = NO_ROWS  # positions in `rows` that sample a token, in the order BatchFinished reports them
    rows_taken: tuple[RowTaken, ...] = ()
    deltas: PageDeltas = NO_DELTAS
    generation: int = 0
    microbatch: int = 0
    starts_after: tuple[AfterBatch, ...] = ()
    hybrid: HybridChanges | None = None  # of a model with sliding windows or linear attention
    speculation: Speculation | None = None
    ranks: Ranks | None = None
    sample_after: BatchId | None = None  # sampling must wait until this batch's results moved the grammars
    layers: tuple[int, int] | None = None  # split prefill: run layers [start:stop) only
    ids_digest: bytes = b""  # of `request_ids`, where they are many and it is known: see digest.py
    steps: int = 1  # forwards: above 1, decode rows feed their own samples back and have spans of up to so many tokens
    pooled_rows: Int32s = (
        NO_ROWS  # positions in `rows` that end with this batch, their prompts computed, no token drawn
    )
    media_spans: tuple[MediaSpan, ...] = ()
    logprob_spans: tuple[LogprobSpan, ...] = ()
    hidden_spans: tuple[HiddenSpan, ...] = ()


class LaunchBatch(msgspec.Struct, frozen=True):
    """Run a plan behind the batches launched before it. Answered by one BatchFinished with the same batch_id.

    With sample="deferred" the forward runs now and sampling waits for a SampleBatch.
    """

    plan: BatchPlan
    sample: Literal["immediate", "deferred"] = "immediate"


class SampleBatch(msgspec.Struct, frozen=True):
    """Move the matchers by `grammar_advance`, then sample a deferred batch. Follows the result it depends on."""

    batch_id: BatchId
    grammar_advance: tuple[tuple[RequestId, int, tuple[int, ...]], ...]  # (request, epoch, tokens)


class ProposeBatch(msgspec.Struct, frozen=True):
    """Send the other data-parallel ranks what this one runs next. Answered by RanksAgreed of the same round.

    RanksAgreed describes the counts. A proposal binds: once all ranks have proposed, each runs its proposal.
    """

    round: int
    counts: tuple[int, ...]
    wish: Wish | None = None  # where ranks decide together which of them extend
    generation: int = 0
    microbatch: int = 0  # the microbatch of this round, on every rank


class StreamTokens(msgspec.Struct, frozen=True):
    """Send new output tokens to clients; the record of the event behind it must have been written first.

    Request i gets token_counts[i] ids, the first of them output number offsets[i]; `tokens` holds them end to end.
    A client that sees an offset twice drops the second.
    """

    request_ids: Int64s
    offsets: Int32s
    token_counts: Int32s
    tokens: Int32s
    ids_digest: bytes = b""  # of `request_ids`, where they are many and it is known: see digest.py


class FinishRequest(msgspec.Struct, frozen=True):
    """Close a request's stream, after every StreamTokens before it."""

    request_id: RequestId
    reason: str
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int


class RejectRequest(msgspec.Struct, frozen=True):
    """Answer a request with an error; it will never run."""

    request_id: RequestId
    reason: str
    message: str


class CompileGrammar(msgspec.Struct, frozen=True):
    """Compile off the loop. Answered by GrammarReady."""

    grammar: Grammar


class LoadAdapter(msgspec.Struct, frozen=True):
    """Copy an adapter's weights into `slot`, which no batch uses; overlaps with compute. Answered by AdapterLoaded."""

    adapter: str
    version: int
    slot: int


class StartTransfer(msgspec.Struct, frozen=True):
    """Send positions [start_tokens:stop_tokens), or expect them, in pages of this engine. Answered by TransferAdvanced.

    A prompt is sent in parts, in order, each once batch `after_batch` has succeeded; the `last` one takes along the
    first token. It moves when both sides have started; what lies before the receiver's `start_tokens` is not moved.
    """

    transfer_id: int  # of the request on this engine
    room: int
    peer: str  # the engine with the other half; empty: the host finds it by the room
    direction: Literal["send", "receive"]
    pages: Int32s
    start_tokens: int
    after_batch: BatchId | None = None
    last: bool = True
    stop_tokens: int = 0
    slot: int = -1  # of the metadata: the first token and its attributes
    weights_version: int = 0  # send: of the KV; receive: of the KV that is present already
    cached_tokens: int = 0  # send: of the prompt, found in the radix cache
    adapter_version: int = 0  # of the request's adapter on this engine; KV of another version is not valid
    hybrid: HybridTransfer | None = None  # of a model with sliding windows or linear attention


class CancelTransfer(msgspec.Struct, frozen=True):
    """Stop a transfer and report its failure to the other side, whatever its state.

    Its pages stay quarantined until TransferAdvanced has status done, failed or link_down.
    """

    transfer_id: int


class BlockCopy(msgspec.Struct, frozen=True):
    """Window blocks or state blocks that a copy between device and host moves with its pages (hybrid.py).

    They have numbers of their own, and have arrived if the whole copy has.
    """

    kind: Literal["window", "state"]
    device: Int32s  # [n] window pages or slots
    host: Int32s  # [n] of the host's pool of the kind


class CopyToHost(msgspec.Struct, frozen=True):
    """Copy device pages to host pages, beside the batches. Answered by HostCopyFinished.

    The KV of the pages is computed. If they are `given_up`, a later batch or load may write them, so that none of these
    may begin before the pages are read. Otherwise the pages keep their content until the answer. The same holds for
    `blocks`; a copy may have blocks and no page.
    """

    copy_id: int
    device_pages: Int32s
    host_pages: Int32s
    given_up: bool = False
    generation: int = 0
    blocks: tuple[BlockCopy, ...] = ()


class LoadFromHost(msgspec.Struct, frozen=True):
    """Copy host pages to device pages, beside the batches: none reads or writes these before the answer.

    Answered by HostCopyFinished. The same holds for `blocks`; a load may have blocks and no page.
    """

    copy_id: int
    host_pages: Int32s
    device_pages: Int32s
    generation: int = 0
    blocks: tuple[BlockCopy, ...] = ()


class BlockFetch(msgspec.Struct, frozen=True):
    """Window blocks or state blocks that a prefetch may bring with its pages, from the last part of its path.

    A request that continues after a page needs the blocks of the last `seen` pages up to it, or of all if fewer.
    """

    kind: Literal["window", "state"]
    keys: tuple[bytes, ...]  # by page of the path's last part, which begins with the first block that may be needed
    there: tuple[bool, ...]  # [as keys] whether the device or the host already has the block
    seen: int  # pages
    host: Int32s  # room for them: places of the host's pool of the kind, [at most seen]


class PrefetchFromStorage(msgspec.Struct, frozen=True):
    """Fetch pages by their chained SHA-256 keys into host pages, from the first on. Answered by PrefetchFinished.

    With `blocks`, it fetches up to the last page after which a request could continue with the blocks that storage has,
    and these blocks; `keys` are then those of the last pages of the same path, and may be none.
    """

    prefetch_id: int
    keys: tuple[bytes, ...]
    host_pages: Int32s
    generation: int = 0
    blocks: tuple[BlockFetch, ...] = ()
    reached: int = 0  # pages of the last part that `blocks` names, after which a request could continue without it


class CancelPrefetch(msgspec.Struct, frozen=True):
    """Stop a prefetch for which no request waits. It is still answered by PrefetchFinished, with what came so far.

    The answer of the prefetch may be under way already.
    """

    prefetch_id: int


class BlockStore(msgspec.Struct, frozen=True):
    """Window blocks or state blocks that a write to storage includes. They are written if the whole write is."""

    kind: Literal["window", "state"]
    keys: tuple[bytes, ...]
    host: Int32s  # [as keys] places of the host's pool of the kind


class WriteToStorage(msgspec.Struct, frozen=True):
    """Write host pages to storage under their chained SHA-256 keys, from the first on. Answered by StorageWritten.

    Content that storage already has under a key may stay: it is equal. A write may have blocks and no page.
    """

    write_id: int
    keys: tuple[bytes, ...]
    host_pages: Int32s
    generation: int = 0
    blocks: tuple[BlockStore, ...] = ()


class EncodeMedia(msgspec.Struct, frozen=True):
    """Run the encoder over one span. Answered by MediaEncoded."""

    digest: bytes
    encoder_tokens: int
    generation: int = 0
    drop: tuple[bytes, ...] = ()  # encoder output to drop first, for room: no launched batch reads it


class SwapWeights(msgspec.Struct, frozen=True):
    """Load weights; nothing is in flight, and nothing is launched before the answer. Answered by WeightsSwapped.

    Where loading fails, the weights before must be in place again, or the engine restarts.
    """

    version: int
    source: str
    generation: int = 0


class ReleaseDeviceMemory(msgspec.Struct, frozen=True):
    """Release the memory of `tags`; nothing is in flight and no KV is needed. Answered by MemorySwitched."""

    tags: tuple[str, ...]
    generation: int = 0


class ResumeDeviceMemory(msgspec.Struct, frozen=True):
    """Take the memory of `tags` again, at the same addresses. Answered by MemorySwitched."""

    tags: tuple[str, ...]
    generation: int = 0


class StartProfile(msgspec.Struct, frozen=True):
    """Start the device's profiler, before the next launch."""


class StopProfile(msgspec.Struct, frozen=True):
    """Stop the profiler after every batch launched so far, and write its trace."""


class FreezeHeap(msgspec.Struct, frozen=True):
    """Collect garbage once, then exclude the remaining objects from later collections."""


class ControlAnswered(msgspec.Struct, frozen=True):
    """Answer a ControlRequested: done, or refused with the reason. GetState is answered with `stats`."""

    control_id: int
    ok: bool
    message: str = ""
    stats: Stats | None = None


Command = (
    LaunchBatch
    | SampleBatch
    | ProposeBatch
    | StreamTokens
    | FinishRequest
    | RejectRequest
    | CompileGrammar
    | LoadAdapter
    | StartTransfer
    | CancelTransfer
    | CopyToHost
    | LoadFromHost
    | PrefetchFromStorage
    | CancelPrefetch
    | WriteToStorage
    | EncodeMedia
    | SwapWeights
    | ReleaseDeviceMemory
    | ResumeDeviceMemory
    | StartProfile
    | StopProfile
    | FreezeHeap
    | ControlAnswered
)


class Step(msgspec.Struct):
    """What follows from one observed event."""

    decided: list[Decided] = msgspec.field(default_factory=list)
    commands: list[Command] = msgspec.field(default_factory=list)
    digest: bytes = b""  # chained over the logical decisions of this Step and all before it
    wake_at_us: int | None = None  # the host answers with ClockAdvanced, no earlier
    time_us: int = 0  # of the event

    def wake_by(self, time_us: int) -> None:
        """Request a ClockAdvanced at this time, or at an earlier one."""
        if self.wake_at_us is None or time_us < self.wake_at_us:
            self.wake_at_us = time_us

    def launched(self) -> BatchPlan | None:
        """The plan this Step launches, if any."""
        for command in self.commands:
            if isinstance(command, LaunchBatch):
                return command.plan
        return None


class DecodeRunRecord(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """A compact record of k uniform decode steps: LaneReady and BatchFinished, k times, nothing else between.

    It expands to exactly those 2k events and Steps. It stops strictly before any arrival, timer, page shortage, flush
    or finish.
    """

    first_batch: BatchId
    launched_us: bytes  # int64 [k]
    started_us: bytes  # int64 [k]
    finished_us: bytes  # int64 [k]
    tokens: bytes  # int32 [k, rows]
