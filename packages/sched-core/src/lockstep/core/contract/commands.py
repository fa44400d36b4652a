"""Commands: orders to the host, verb first. Each docstring states what must hold before it and which event answers it.

A Step lists its commands in the order in which the host must start them. The executor makes no decisions and the core
uses no tensors, so a recorded sequence of plans runs on a device without a scheduler.
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

NO_SLOT = -1  # no state slot
NO_ROWS: Int32s = np.empty(0, np.int32)
NO_ROWS.flags.writeable = False


class AfterBatch(msgspec.Struct, frozen=True, array_like=True):
    """A start not known yet: the position of row `row` once the result of batch `batch_id` has its accepted tokens."""

    index: int  # position in the plan's rows
    batch_id: BatchId
    row: int


class PageDeltas(msgspec.Struct, frozen=True):
    """Changes of the device's page tables, applied in this order before the batch reads them.

    Runs of consecutive entries of a row come first, each as three numbers: the row, the first index, the count. One
    entry for each decode of the plan that opens a page follows. `pages` has the pages of all these entries, end to end.
    """

    pages: Int32s  # [entries]
    runs: Int32s = NO_ROWS  # [3 x runs]
    opened_rows: Int32s = NO_ROWS  # [opened pages]
    opened_index: Int32s = NO_ROWS  # [opened pages]

    @property
    def rows(self) -> Int32s:
        """The row of each entry: table[rows, index] = pages, in order. int32 [entries]"""
        runs = self.runs.reshape(-1, 3)
        return np.concatenate((runs[:, 0].repeat(runs[:, 2]), self.opened_rows))

    @property
    def index(self) -> Int32s:
        """The index of each entry in the page table of its row. int32 [entries]"""
        spans = self.runs.reshape(-1, 3)[:, 1:].tolist()
        return np.concatenate([np.arange(first, first + n, dtype=np.int32) for first, n in spans] + [self.opened_index])


NO_DELTAS = PageDeltas(NO_ROWS)


class HybridChanges(msgspec.Struct, frozen=True):
    """Changes for layers without full attention: before a batch, and the states that the batch stores (hybrid.py).

    Sliding layers find position p of a row in page `window_of[table[p // page_size]]`, a table by full page that the
    device keeps. A window page belongs to one full page. After its assignment to another, only the new one has it.

    A row that may verify drafts has more slots, listed behind its first one with source -2, which are not initialised.
    A verifying row writes its state behind the newest token and behind each draft to its slots, in this order. Its next
    pass begins with the state behind the last right token. Other passes write the state to the first slot. A verifying
    row may stop before the position of a checkpoint; the slot then holds no state, as the result shows.
    """

    pages: Int32s = NO_ROWS  # [n] full pages, in order: window_of[pages[i]] = window_pages[i]
    window_pages: Int32s = NO_ROWS  # [n]
    state_rows: Int32s = NO_ROWS  # [m] rows that were taken
    state_slots: Int32s = NO_ROWS  # [m] state slots of these rows
    # [m] slots from which the state slots are copied before the batch runs; -1: zeros; -2: see above; the slot itself:
    # it keeps the state that a transfer wrote
    state_sources: Int32s = NO_ROWS
    checkpoint_index: Int32s = NO_ROWS  # [k] indices into the plan's rows of rows that store a checkpoint
    checkpoint_positions: Int32s = NO_ROWS  # [k] numbers of positions behind which their state is copied ...
    checkpoint_slots: Int32s = NO_ROWS  # [k] ... to these slots


class HybridTransfer(msgspec.Struct, frozen=True):
    """The part of a transfer without full attention: the last window's KV of sliding layers, and the prompt's state.

    `window_pages` are the window blocks of the last n pages of the transfer, in order.
    """

    window_pages: Int32s = NO_ROWS  # [n] pages of the sliding layers' pool
    state_slot: int = NO_SLOT  # slot of the state right behind the whole prompt; -1: not in this part, or none


class RowTaken(msgspec.Struct, frozen=True):
    """A row is assigned to a request: the executor resets all state of the row before the batch."""

    row: int
    request_id: RequestId
    epoch: int
    sampling: SamplingParams | None = None
    adapter: str = ""
    grammar: Grammar | None = None
    adapter_version: int = 0
    adapter_slot: int = -1  # the slot into which a LoadAdapter copied it; -1: no adapter
    logprobs: bool = False  # the result contains the logprob of every sampled token
    hidden_states: bool = False  # the result contains the hidden state of every decoded position
    token_type_ids: bytes = b""  # one byte per prompt token


class MediaSpan(msgspec.Struct, frozen=True):
    """Positions [start:stop) of row `index` take embeddings of media, from number `offset` on, in place of tokens."""

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
    """The drafts that a plan's verifying rows, those behind `extend_rows`, verify beside their newest token.

    They are drafted on the device, from the row's position at that time; `BatchFinished.accepted` - 1 of them were
    right. Rows with `forced_lengths` have no drafts: their grammars admit `forced_tokens` only, so that all of these
    are right.

    With `parents` the drafts are a tree, of which a row verifies the first `draft_lengths`. Draft n is at the position
    of its depth; its KV is in the slot of the n-th position behind the newest token. A draft attends to the tokens on
    its path only. One path is right, at most; before anything later runs, the KV of its drafts moves to the slots of
    their positions. `BatchFinished.accepted` ends with the numbers of its drafts.
    """

    draft_tokens: int  # the most of any row
    draft_lengths: Int32s  # [verifying rows] numbers of drafts, forced tokens included
    method: SpeculationMethod
    forced_lengths: Int32s = NO_ROWS  # [verifying rows] 0 or the row's `draft_lengths`; empty: no token is forced
    forced_tokens: Int32s = NO_ROWS  # the forced tokens of all rows, end to end
    parents: Int32s = NO_ROWS  # [draft_tokens] number of the draft before draft 1, 2, ...; 0: the newest; empty: chains

    def path_lengths(self) -> Int32s:
        """Return how many drafts of each row can be right: the length of its longest path. int32 [verifying rows]"""
        if not self.parents.size:
            return self.draft_lengths
        longest: Int32s = np.maximum.accumulate(depths_of(self.parents))
        return longest[self.draft_lengths]

    def forced_of(self, member: int) -> list[int]:
        """Return the forced tokens of a verifying row."""
        if not self.forced_lengths.size:
            return []
        stop = int(self.forced_lengths[: member + 1].sum())
        found: list[int] = self.forced_tokens[stop - int(self.forced_lengths[member]) : stop].tolist()
        return found

    def drafted(self) -> Int32s:
        """Return the number of tokens that a drafter must supply, without forced ones. int32 [verifying rows]"""
        return self.draft_lengths - self.forced_lengths if self.forced_lengths.size else self.draft_lengths


def depths_of(parents: Int32s) -> Int32s:
    """Return how far the newest token and the drafts of a tree are behind the newest token. int32 [1 + drafts]"""
    depths = [0]
    for parent in parents.tolist():
        depths.append(depths[parent] + 1)
    return np.array(depths, np.int32)


class Ranks(msgspec.Struct, frozen=True):
    """The common pass that the data-parallel ranks agreed on, equal in the plan of every rank.

    Gathered rows are padded to the longest rank (`max_length`) or laid end to end (`sum_length`). If any rank extends,
    all run the branch of extends, and rows that decode are extends by one token.
    """

    round: int
    tokens: tuple[int, ...]  # per rank
    padding: Literal["max_length", "sum_length"]
    use_graph: bool
    logit_rows: tuple[int, ...] = ()  # per rank
    extends: bool = False
    draft_passes: int | msgspec.UnsetType = msgspec.UNSET  # passes of a drafter that all ranks run; unset: no drafter

    @property
    def recorded(self) -> tuple[Any, ...]:
        """The values that the digest covers: without `draft_passes` if that is unset."""
        values = astuple(self)
        return values if self.draft_passes is not msgspec.UNSET else values[:-1]


class Halves(msgspec.Struct, frozen=True):
    """Where a plan is divided into two halves, which take turns in every layer. See features/two_batch.py.

    The first half has the first `rows` rows and, of the row behind them, the first `cut` new tokens. All other tokens
    are in the second half. In each layer the first half writes its KV before the second half attends, so a prompt may
    be cut. Of several data-parallel ranks, a half may be empty on some.
    """

    rows: int
    cut: int = 0  # new tokens of row `rows` in the first half; 0: that row is not cut


class BlockPasses(msgspec.Struct, frozen=True):
    """The passes over the blocks of a plan of mode diffusion_extend. See features/diffusion.py.

    The first pass of a block, number 0, fills it: with `given` tokens of the plan's `token_ids`, then with masks. Each
    pass computes the whole block. If it has masks, at least one of them becomes a token, and the row's count in
    `BatchFinished.accepted` is 0. A pass over a block without masks writes its final KV; its count is then that of the
    tokens that were masks. The number of a pass never exceeds that of the masks with which the block began.
    """

    numbers: Int32s  # [rows] passes of each block before this one
    given: Int32s  # [rows] tokens at the beginning of each block that are no masks; 0 unless its pass is the first


class BatchPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One forward pass, complete given the plans before it, and immutable: its arrays are never written again.

    Row i computes the tokens at positions [starts[i]:stops[i]) of request `request_ids[i]`. It reads KV at [0:stops[i])
    and writes KV at [starts[i]:stops[i]), in the pages of its page table after `deltas`.

        0 ............. cached ............ starts ............... stops ........... context max
        | in the radix cache's pages | own | new in this batch | not allocated yet  |

    The new tokens of the first `extend_rows` rows are in `token_ids`, end to end. Every row behind them computes one
    token: the newest one sampled for that row, by a batch delivered or still in flight. The device keeps it by row.
    A plan with `steps` above 1 decodes several times in one launch: a row samples a token for each position of its
    span. A plan with `speculation` verifies: such a row computes drafts behind its newest token, and samples one token
    more than the number of right drafts. Drafts that are a tree also write the slots behind the span of their row. For
    a row in `starts_after`, `starts` and `stops` are lower and upper bounds.
    """

    batch_id: BatchId
    mode: Mode
    rows: Int32s  # [n] request-table rows
    request_ids: Int64s  # [n]
    starts: Int32s  # [n]
    stops: Int32s  # [n]
    extend_rows: int = 0
    token_ids: Int32s = NO_ROWS
    sample_rows: Int32s = NO_ROWS  # indices into `rows` of rows that sample, in the order of BatchFinished
    rows_taken: tuple[RowTaken, ...] = ()
    deltas: PageDeltas = NO_DELTAS
    generation: int = 0
    microbatch: int = 0
    starts_after: tuple[AfterBatch, ...] = ()
    hybrid: HybridChanges | None = None  # only for a model with sliding windows or linear attention
    speculation: Speculation | None = None
    ranks: Ranks | None = None
    sample_after: BatchId | None = None  # sampling must wait until matchers have taken this batch's results
    layers: tuple[int, int] | None = None  # split_prefill: run layers [start:stop) only
    sms: int | None = None  # with multiplexing: SMs of the device that run it; None: all
    ids_digest: bytes = b""  # digest of `request_ids` of a large batch if it is computed already: see digest.py
    steps: int = 1  # forwards; above 1, decode rows feed their own samples back and have spans of up to `steps` tokens
    pooled_rows: Int32s = NO_ROWS  # indices into `rows` of prefill-only rows with prompts that end with this batch
    media_spans: tuple[MediaSpan, ...] = ()
    logprob_spans: tuple[LogprobSpan, ...] = ()
    hidden_spans: tuple[HiddenSpan, ...] = ()
    halves: Halves | None = None  # None: the batch runs as a whole
    blocks: BlockPasses | None = None  # of a model that answers in blocks; `token_ids` are then their given tokens


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
    """Send this rank's proposal to the other data-parallel ranks. Answered by RanksAgreed of the same round.

    RanksAgreed describes the counts. A proposal binds: once all ranks have proposed, each runs its proposal.
    """

    round: int
    counts: tuple[int, ...]
    wish: Wish | None = None  # set if the ranks decide together which of them extend
    generation: int = 0
    microbatch: int = 0  # the microbatch of this round, on every rank


class StreamTokens(msgspec.Struct, frozen=True):
    """Send new output tokens to clients; the record of the event that caused it must have been written first.

    Request i gets token_counts[i] ids, the first of them output number offsets[i]; `tokens` holds them end to end. A
    client that receives an offset twice drops the second message.
    """

    request_ids: Int64s  # [n]
    offsets: Int32s  # [n]
    token_counts: Int32s  # [n]
    tokens: Int32s  # [sum of token_counts]
    ids_digest: bytes = b""  # digest of `request_ids` of a large batch if it is computed already: see digest.py


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
    """Compile a grammar, outside the host's loop. Answered by GrammarReady."""

    grammar: Grammar


class LoadAdapter(msgspec.Struct, frozen=True):
    """Copy an adapter's weights into `slot`, which no batch uses; overlaps with compute. Answered by AdapterLoaded."""

    adapter: str
    version: int
    slot: int


class StartTransfer(msgspec.Struct, frozen=True):
    """Send positions [start_tokens:stop_tokens), or expect them, in pages of this engine. Answered by TransferAdvanced.

    A prompt is sent in parts, in order, each once batch `after_batch` has succeeded; the `last` one contains the first
    token. KV moves when both sides have started. Positions before the receiver's `start_tokens` are not moved.
    """

    transfer_id: int  # id of the request on this engine
    room: int
    peer: str  # the engine of the other side; empty: the host finds it by the room
    direction: Literal["send", "receive"]
    pages: Int32s
    start_tokens: int
    after_batch: BatchId | None = None
    last: bool = True
    stop_tokens: int = 0
    slot: int = -1  # the metadata slot: the first token and its attributes
    weights_version: int = 0  # send: version of the sent KV; receive: version of the KV that is present already
    cached_tokens: int = 0  # send: prompt tokens found in the radix cache
    adapter_version: int = 0  # version of the request's adapter on this engine; KV of another version is not valid
    hybrid: HybridTransfer | None = None  # only for a model with sliding windows or linear attention


class CancelTransfer(msgspec.Struct, frozen=True):
    """Stop a transfer and report its failure to the other side, whatever its state.

    Its pages stay quarantined until TransferAdvanced has status done, failed or link_down.
    """

    transfer_id: int


class BlockCopy(msgspec.Struct, frozen=True):
    """Window blocks or state blocks that a copy between device and host moves with its pages (hybrid.py).

    They are numbered apart from the pages, and have arrived if the whole copy has.
    """

    kind: Literal["window", "state"]
    device: Int32s  # [n] window pages or state slots
    host: Int32s  # [n] places in the host's pool of this kind


class CopyToHost(msgspec.Struct, frozen=True):
    """Copy device pages to host pages, beside the batches. Answered by HostCopyFinished.

    The KV of the pages is computed. If they are `given_up`, a later batch or load may write them, and must not begin
    before they have been read. Otherwise the pages keep their content until the answer. The same holds for `blocks`; a
    copy may have blocks and no page.
    """

    copy_id: int
    device_pages: Int32s
    host_pages: Int32s
    given_up: bool = False
    generation: int = 0
    blocks: tuple[BlockCopy, ...] = ()


class LoadFromHost(msgspec.Struct, frozen=True):
    """Copy host pages to device pages, beside the batches. Answered by HostCopyFinished.

    No batch reads or writes these device pages before the answer. The same holds for `blocks`; a load may have blocks
    and no page.
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
    seen: int  # pages with blocks that a continuing request reads: those of a window; 1 for state
    host: Int32s  # [at most seen] free places in the host's pool of this kind


class PrefetchFromStorage(msgspec.Struct, frozen=True):
    """Fetch pages by their chained SHA-256 keys into host pages, from the first on. Answered by PrefetchFinished.

    With `blocks`, it fetches the pages up to the last one after which a request could continue with the blocks that
    storage has, and these blocks. `keys` are then those of the last pages of the same path, and may be empty.
    """

    prefetch_id: int
    keys: tuple[bytes, ...]
    host_pages: Int32s
    generation: int = 0
    blocks: tuple[BlockFetch, ...] = ()
    reached: int = 0  # pages of the last part in `blocks` after which a request could continue without the prefetch


class CancelPrefetch(msgspec.Struct, frozen=True):
    """Stop a prefetch for which no request waits. PrefetchFinished still answers it, with the pages fetched so far.

    The answer of the prefetch may be on its way already.
    """

    prefetch_id: int


class BlockStore(msgspec.Struct, frozen=True):
    """Window blocks or state blocks that a write to storage includes. They are written if the whole write is."""

    kind: Literal["window", "state"]
    keys: tuple[bytes, ...]
    host: Int32s  # [as keys] places in the host's pool of this kind


class WriteToStorage(msgspec.Struct, frozen=True):
    """Write host pages to storage under their chained SHA-256 keys, from the first on. Answered by StorageWritten.

    Content that storage has under a key already is equal and need not be written. A write may have blocks and no page.
    A write uses the pages in front of it: a storage that evicts by age keeps them longer than the written ones.
    """

    write_id: int
    keys: tuple[bytes, ...]
    host_pages: Int32s
    generation: int = 0
    blocks: tuple[BlockStore, ...] = ()
    after: bytes = b""  # key of the page in front of the first one, which was written before; b"": the path begins here


class EncodeMedia(msgspec.Struct, frozen=True):
    """Run the encoder over one span. Answered by MediaEncoded."""

    digest: bytes
    encoder_tokens: int
    generation: int = 0
    drop: tuple[bytes, ...] = ()  # digests of encoder output to drop first for room; no launched batch reads them


class SwapWeights(msgspec.Struct, frozen=True):
    """Load weights; nothing is in flight, and nothing is launched before the answer. Answered by WeightsSwapped.

    If loading fails, the host must restore the previous weights, or restart the engine.
    """

    version: int
    source: str
    generation: int = 0


class ReleaseDeviceMemory(msgspec.Struct, frozen=True):
    """Release the memory of `tags`; nothing is in flight and no KV is needed. Answered by MemorySwitched."""

    tags: tuple[str, ...]
    generation: int = 0


class ResumeDeviceMemory(msgspec.Struct, frozen=True):
    """Allocate the memory of `tags` again, possibly at other addresses; weights have the content they had.

    Answered by MemorySwitched. A host whose CUDA graphs hold addresses keeps these, or refuses the release.
    """

    tags: tuple[str, ...]
    generation: int = 0


class StartProfile(msgspec.Struct, frozen=True):
    """Start the device's profiler, before the next launch."""


class StopProfile(msgspec.Struct, frozen=True):
    """Stop the profiler after every batch launched so far, and write its trace."""


class FreezeHeap(msgspec.Struct, frozen=True):
    """Collect garbage once, then exclude the remaining objects from later collections."""


class MeasureExpertLoad(msgspec.Struct, frozen=True):
    """Report the tokens routed to each expert by the batches launched so far. Answered by ExpertLoadMeasured.

    The counters begin again at 0 behind these batches. No second order is given before the answer.
    """

    generation: int = 0


class MoveExperts(msgspec.Struct, frozen=True):
    """Copy experts between ranks: behind the batches launched so far, in front of all later ones.

    Answered by ExpertsMoved. No second order is given before the answer.
    """

    move_id: int
    layers: tuple[int, ...]  # numbers among the layers with experts
    placement: Int32s  # [as layers, slots]: the expert in each slot; the slots of a rank are contiguous
    generation: int = 0


class ExpertRecord(msgspec.Struct, frozen=True):
    """The load of experts while it was recorded."""

    recording: bool  # whether the record goes on
    duration_us: int
    batches: int  # launched meanwhile
    counts: Int64s  # [layers, experts], tokens routed to each expert; [0, 0]: none were


class ControlAnswered(msgspec.Struct, frozen=True):
    """Answer a ControlRequested: done, or refused with the reason.

    GetState is answered with `stats`, the dump of a record of the load of experts with `experts`.
    """

    control_id: int
    ok: bool
    message: str = ""
    stats: Stats | None = None
    experts: ExpertRecord | None = None


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
    | MeasureExpertLoad
    | MoveExperts
    | ControlAnswered
)


class Step(msgspec.Struct):
    """The decided events and commands that follow from one observed event."""

    decided: list[Decided] = msgspec.field(default_factory=list)
    commands: list[Command] = msgspec.field(default_factory=list)
    digest: bytes = b""  # chained over the logical decisions of this Step and all before it
    wake_at_us: int | None = None  # the host sends ClockAdvanced at this time, no earlier; None: no request
    time_us: int = 0  # time of the observed event

    def wake_by(self, time_us: int) -> None:
        """Request a ClockAdvanced at this time, or at an earlier one."""
        if self.wake_at_us is None or time_us < self.wake_at_us:
            self.wake_at_us = time_us

    def launched(self) -> BatchPlan | None:
        """Return the plan that this Step launches; None if it launches none."""
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
