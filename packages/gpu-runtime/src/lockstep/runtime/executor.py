"""Runs plans on the device, one after another: fold, forward, sample, store the newest token of each row.

The executor makes no decisions and needs no scheduler: it also runs a recorded list of plans. `collect` returns each
launched batch once, in launch order.

    launch(plan) ──pack──> | queue | ──fold, forward──> logits ──(SampleBatch)──> tokens ──copy──> collect()

A batch with deferred sampling keeps its logits until `sample` is called for it. The batches behind it stay in the queue
until then, because a decode reads the newest token of its row, which is not drawn yet.

A pipeline stage (`RunnableModel.links`) runs each pass on its own layers, between a receive and a send of hidden
states. Stages before the last one do not sample: they take over the drawn tokens when a later plan needs them, or at
`collect`.

An exception of the model affects only its batch. `collect` returns that batch with `error`, and its changes of the
tables are folded before the next batch runs. An error of the plan itself (PlanError) or of the device (DeviceLost) is
raised, and ends the engine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.core.contract.commands import BatchPlan, RowTaken
from lockstep.core.contract.errors import ContractError
from lockstep.core.contract.events import BatchId, RequestId, RequestKind
from lockstep.core.requests.delivery import step_numbers
from lockstep.host.batches import (
    NO_CONTEXT,
    BatchResult,
    ContextOf,
    HiddenStates,
    Int32s,
    Pooled,
    PromptLogprobs,
    RowContext,
)
from lockstep.host.media.content import EncoderInput
from lockstep.runtime.attention.base import AttentionBackend
from lockstep.runtime.blocks import DeviceBlocks
from lockstep.runtime.canary import Canary
from lockstep.runtime.draft_tree import TreeRows, moves_of, part_of, right_paths, tree_rows
from lockstep.runtime.drafting import Drafter, DraftingRows, TreeDrafter, kept_samples, places_of, right_ones
from lockstep.runtime.errors import DeviceLost, PlanError
from lockstep.runtime.expert_load import ExpertCounter
from lockstep.runtime.forward import ForwardBatch, RankTokens
from lockstep.runtime.graphs import DecodeGraphs
from lockstep.runtime.hidden_rows import hidden_wanted
from lockstep.runtime.lora.batch import lay_out
from lockstep.runtime.media import DeviceMedia
from lockstep.runtime.multiplexing import LayerParts
from lockstep.runtime.overlap import POLL_S, Download, StreamLane
from lockstep.runtime.pieces import PieceGraphs
from lockstep.runtime.plan_checks import IDLE, refuse_blocks, refuse_unknown
from lockstep.runtime.pooling import Pooling
from lockstep.runtime.sampling import Sampled, logprobs_of
from lockstep.runtime.sampling.passes import joined_passes, reported_logprobs
from lockstep.runtime.sent_draws import drawn_values, packed_drawn, samples_of, unpacked_drawn
from lockstep.runtime.stage_drafts import ReceivedDrafts, drafted_of
from lockstep.runtime.stages import StageLinks
from lockstep.runtime.states.slots import PlannedStates, RowSlots
from lockstep.runtime.tables import (
    NONE,
    DeviceTables,
    ForwardPass,
    PackedPlan,
    PassTensors,
    VerifyingTensors,
    VerifyRows,
)
from lockstep.runtime.two_batch import InHalves

NO_LOGITS = np.empty((0, 0), np.float32)
JUDGED_AT_ONCE = 256  # prompt positions per chunk of logits: [256, vocabulary] float32


# ----------------------------------------------------------------------------------------------------------- interfaces


class Model(Protocol):
    """A causal language model over a paged pool."""

    def forward(self, batch: ForwardBatch, attention: AttentionBackend) -> Tensor:
        """Return the normed hidden states of the last layer for the new tokens: [tokens, hidden]."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Return float32 logits [samples, vocabulary] for hidden states [samples, hidden]."""


class SharedModel(Model, Protocol):
    """A model whose MLPs are split over data-parallel ranks, which run every pass together."""

    def join(self, tokens: RankTokens) -> None:
        """Compute this rank's part of a pass in which it has no rows."""


class RowSampler(Protocol):
    """Draws tokens by row. The state of a row is reset when a request takes the row."""

    def take_row(self, taken: RowTaken, context: RowContext) -> None:
        """Store the settings, the counts for penalties and the seed of a row's new request. Called in launch order."""

    def remembers(self, rows_host: Int32s) -> bool:
        """Return whether a token drawn for one of these rows changes the draw of its next token."""

    def sample(
        self, logits: Tensor, rows: Tensor, positions: Tensor, rows_host: Int32s, allowed: Tensor | None
    ) -> Sampled:
        """Draw a token for each row.

        Args:
            logits: float32 [samples, vocabulary]; may be overwritten.
            rows: int32 [samples]; rows_host: the same on the CPU, except where the device replaced a row by the padding
                row. A row occurs at most once if `remembers` is true for any of them.
            positions: int64 [samples], positions in their requests of the tokens to draw.
            allowed: int32 [samples, ceil(vocabulary / 32)]: bit t % 32 of word t // 32 is set if token t may be
                drawn; None: all tokens may be drawn.
        """


class Matchers(Protocol):
    """The host's grammar matchers, by row. A matcher is in its initial state when a request takes its row."""

    def take_row(self, taken: RowTaken) -> None:
        """Start the matcher of a row's new request, which may have no grammar."""

    def advance(self, request_id: RequestId, epoch: int, tokens: Sequence[int]) -> None:
        """Move a matcher by tokens; an entry of an older epoch is ignored."""

    def allowed(self, rows: Int32s) -> Int32s | None:
        """Return int32 [rows, ceil(vocabulary / 32)] with a bit per allowed next token.

        None if all tokens are allowed.
        """

    def ended(self, row: int, token: int) -> bool:
        """Return whether the row's grammar allows nothing behind this token. The matcher is not moved."""

    def forced(self, row: int, token: int) -> list[int]:
        """Return the tokens that the row's grammar forces behind this one. The matcher is not moved."""


@dataclass(slots=True)
class _Launched:
    """A batch in the queue or on the device."""

    plan: BatchPlan
    packed: PackedPlan
    contexts: list[RowContext]  # of `plan.rows_taken`
    may_sample: bool
    states: PlannedStates | None = None
    allowed: Int32s | None = None
    begun: Any = None
    entered: Any = None  # with several stages: when it was sent to all of them, from which its time counts
    laid: list[PassTensors] = field(default_factory=list)
    logits: Tensor | None = None  # of a computed batch that may not sample yet
    wanted: dict[str, Tensor] = field(default_factory=dict)  # results to copy to the CPU
    download: Download | None = None
    error: str = ""
    scored: list[int] = field(default_factory=list)  # rows of the plan whose last logits are requested
    prompt_tops: list[int] = field(default_factory=list)  # requested number of likeliest tokens, by span of the plan
    given: dict[bytes, EncoderInput] = field(default_factory=dict)  # embeddings that it reads
    behind_failure: bool = False  # launched before the failure of an earlier batch was known
    hidden: Callable[[], Tensor] | None = None  # waits for the result of the stage before
    drawn: Callable[[], Tensor] | None = None  # waits for the tokens that the last stage drew

    @property
    def over(self) -> bool:
        """Return whether the device has no more work for this batch."""
        return self.download is not None or bool(self.error)


# --------------------------------------------------------------------------------------------------------- the executor


@dataclass(frozen=True, slots=True)
class RunnableModel:
    """A model with what its passes run on.

    Args:
        graphs: prepared; decodes that they hold are replayed.
        pieces: prepared; other passes that they hold run in pieces.
        split: the model is one rank's part. A pass that raises leaves the ranks out of step, and ends the engine.
        links: to the other pipeline stages; None: there is one stage.
        ranks: data-parallel ranks that run every pass together; 1: plans that name ranks are refused.
        rank: which of them this one is.
        loads: counts the tokens routed to each expert; None: they are not counted.
        states: slots of the layers that keep states; None: the model has none.
        halves: runs passes as two halves; None: plans with `halves` are refused.
        layers: keeps hidden states between parts of a prompt's layers; None: plans with `layers` are refused.
        blocks: of a model that answers in blocks; None: plans with blocks are refused.
        media: contents of requests and output of the encoder; None: plans with media are refused.
    """

    model: Model
    attention: AttentionBackend
    graphs: DecodeGraphs | None = None
    split: bool = False
    states: RowSlots | None = None
    media: DeviceMedia | None = None
    links: StageLinks | None = None
    ranks: int = 1
    rank: int = 0
    loads: ExpertCounter | None = None
    halves: InHalves | None = None
    layers: LayerParts | None = None
    blocks: DeviceBlocks | None = None
    pieces: PieceGraphs | None = None


@dataclass(frozen=True, slots=True)
class LookAhead:
    """Sources of tokens beyond the next one. With either of them the tables track the position of each row.

    Args:
        drafter: of plans that verify drafts. None: such plans are refused.
        jumps: report the tokens that grammars force.
    """

    drafter: Drafter | None = None
    jumps: bool = False


NO_LOOK_AHEAD = LookAhead()


class Executor:
    """Runs plans on one device.

    Args:
        matchers: of grammars. None: plans that take a row under a grammar are refused.
        canary: verifies the tag of every KV slot before it is read; for debugging.
        pooling: of requests of kind embed; None is the mean.
    """

    def __init__(
        self,
        runnable: RunnableModel,
        sampler: RowSampler,
        tables: DeviceTables,
        lane: StreamLane,
        *,
        matchers: Matchers | None = None,
        canary: Canary | None = None,
        pooling: Pooling | None = None,
        ahead: LookAhead = NO_LOOK_AHEAD,
    ) -> None:
        self.model, self.attention, self.sampler = runnable.model, runnable.attention, sampler
        self.graphs, self.split, self.states = runnable.graphs, runnable.split, runnable.states
        self.media, self.loads, self.halves = runnable.media, runnable.loads, runnable.halves
        self.links, self.ranks, self.rank = runnable.links, runnable.ranks, runnable.rank
        self.layers, self.blocks, self.pieces = runnable.layers, runnable.blocks, runnable.pieces
        self.samples = self.links is None or self.links.stage.is_last  # whether this stage draws the tokens
        self.tables, self.lane, self.matchers, self.canary = tables, lane, matchers, canary
        self.pooling, self.drafter, self.jumps = pooling or Pooling(), ahead.drafter, ahead.jumps
        self.forwards = 0
        self._queue: deque[_Launched] = deque()
        self._unfolded: deque[_Launched] = deque()  # begun, and not folded into the tables: failed, or newest
        self._kinds: list[RequestKind] = ["generate"] * tables.count  # as of the newest plan that was folded
        self._prompt_tops = [0] * tables.count  # requested likeliest tokens per prompt token, as of the same plan
        self._sums: dict[int, Tensor] = {}  # float32 [hidden], by row of kind embed: a sum, or the first state
        self._types: dict[int, NDArray[np.uint8]] = {}  # types of prompt tokens, by row

    @property
    def in_flight(self) -> int:
        """Number of batches launched and not collected."""
        return len(self._queue)

    # ------------------------------------------------------------------------------------------------ for the host

    def launch(self, plan: BatchPlan, *, deferred: bool = False, contexts: ContextOf | None = None) -> None:
        """Queue a plan behind those launched before. Returns at once.

        With `deferred`, its tokens are drawn only after `sample` is called for it. `contexts` returns further data of
        the rows that the plan takes.
        Raises: PlanError for a plan that no executor can run; DeviceLost.
        """
        refuse_unknown(plan, self.ranks, layers=self.layers is not None, in_blocks=self.blocks is not None)
        if plan.media_spans and self.media is None:
            raise PlanError(f"batch {plan.batch_id} has `media_spans`, but this executor has no encoder")
        if plan.hybrid is not None:
            refuse_blocks(plan, windows=self.tables.window_of is not None, states=self.states is not None)
        if plan.speculation is not None and self.drafter is None and plan.speculation.drafted().any():
            raise PlanError(f"batch {plan.batch_id} verifies drafts, but this executor has no drafter")
        if self.matchers is None and any(taken.grammar is not None for taken in plan.rows_taken):
            raise PlanError(f"batch {plan.batch_id} takes a row under a grammar, but this executor has no matchers")
        if plan.halves is not None and self.halves is None:
            raise PlanError(f"batch {plan.batch_id} has `halves`, but this executor runs no halves")
        packed = self.tables.take_in(plan)
        row_contexts = [NO_CONTEXT if contexts is None else contexts(taken) for taken in plan.rows_taken]
        states = None if self.states is None else self.states.take_in(plan)
        launched = _Launched(plan, packed, row_contexts, not deferred, states)
        if plan.media_spans and self.media is not None:
            launched.given = self.media.given(plan)
        if self.matchers is not None:
            for taken in plan.rows_taken:
                self.matchers.take_row(taken)
            if not deferred:
                launched.allowed = self._allowed(plan)
        self._queue.append(launched)
        if self.links is not None:
            self._expect(launched, self.links)
        if self.lane.eager:
            self._advance(len(self._queue))

    def sample(self, batch_id: BatchId, advance: Sequence[tuple[RequestId, int, Sequence[int]]]) -> None:
        """Move the matchers, then sample a deferred batch.

        Raises ContractError if no such batch waits to be sampled.
        """
        launched = next((one for one in self._queue if one.plan.batch_id == batch_id), None)
        if launched is None or launched.may_sample:
            raise ContractError(f"batch {batch_id} is to be sampled, but was not deferred, or was sampled before")
        if self.matchers is not None:
            for request_id, epoch, tokens in advance:
                self.matchers.advance(request_id, epoch, tokens)
            launched.allowed = self._allowed(launched.plan)
        launched.may_sample = True
        if self.lane.eager:
            self._advance(len(self._queue))

    def ready(self) -> bool:
        """Return whether the results of the oldest batch are on the CPU. Raises DeviceLost."""
        if not self._queue:
            return False
        oldest = self._queue[0]
        return bool(oldest.error) or (oldest.download is not None and oldest.download.ready())

    def pause_s(self) -> float:
        """Return the seconds until the next call of `ready`; 0 on a CPU, which computes in `collect`.

        Raises DeviceLost.
        """
        return 0.0 if self.lane.device.type == "cpu" or self.ready() else POLL_S

    def collect(self) -> BatchResult:
        """Wait for the results of the oldest batch and return them. Raises DeviceLost if they cannot arrive."""
        self._advance(1)
        launched = self._queue[0]
        if self.links is not None and not self.samples:
            self._take_over(launched)
            with self.lane.stream():  # which may reuse the memory of the result only behind its send
                self.links.sent()
        if launched.error:
            self._queue.popleft()
            for behind in self._queue:
                behind.behind_failure = True
            return BatchResult(launched.plan, error=launched.error)
        if launched.download is None:
            raise ContractError(f"batch {launched.plan.batch_id} is collected, but waits to be sampled")
        arrays = launched.download.wait()
        self._queue.popleft()
        if self.canary is not None and launched.plan.mode != IDLE:
            self.canary.judge(launched.plan, arrays["canary"], behind_failure=launched.behind_failure)
        return self._result(launched, arrays)

    # -------------------------------------------------------------------------------------------------- on the device

    def _advance(self, batches: int) -> None:
        """Launch as much as possible of the first `batches` batches on the device, in order."""
        for launched in list(self._queue)[:batches]:
            if launched.over:
                continue
            try:
                with self.lane.stream(), torch.inference_mode():
                    if launched.begun is None:
                        self._unfolded.append(launched)
                        launched.begun = self.lane.begin()
                        if not self.samples:
                            self._take_over_for(launched.plan)
                        self._compute(launched)
                    if not self.samples:
                        continue
                    if not launched.may_sample:
                        return
                    self._finish(launched)
            except (DeviceLost, ContractError):
                raise
            except Exception as error:  # of the model, a kernel, or memory: the batch fails
                self.lane.check()
                launched.error = f"{type(error).__name__}: {error}".partition("\n")[0]
                if self.split:
                    raise DeviceLost(f"batch {launched.plan.batch_id} failed: {launched.error}") from error
                launched.logits, launched.wanted = None, {}
                if self.canary is not None:
                    with self.lane.stream():
                        self._spoil(launched)

    def _expect(self, launched: _Launched, links: StageLinks) -> None:
        """Begin to receive what other stages will send for a batch."""
        one = launched.packed.passes[0]
        launched.entered = self.lane.begin()
        with self.lane.stream():
            if isinstance(self.drafter, ReceivedDrafts):
                self.drafter.expect(one)
            if not links.stage.is_first:
                launched.hidden = links.expect_hidden(int(one.indptr[-1]))
            if not links.stage.is_last and (values := drawn_values(one)):
                launched.drawn = links.expect_drawn(values)

    def _take_over_for(self, plan: BatchPlan) -> None:
        """Take over the tokens of all batches up to the last one that sampled a row of this plan."""
        rows, last = plan.rows, -1
        for number, one in enumerate(self._queue):
            if one.plan is plan:
                break
            if not one.over and np.isin(one.plan.rows[one.plan.sample_rows], rows).any():
                last = number
        for one in list(self._queue)[: last + 1]:
            self._take_over(one)

    def _take_over(self, launched: _Launched) -> None:
        """Store the tokens that the last stage drew for a batch, and start the copy of them. Raises DeviceLost."""
        if launched.over:
            return
        with self.lane.stream(), torch.inference_mode():
            launched.logits = None
            if launched.drawn is not None:
                one, tensors = launched.packed.passes[0], launched.laid[0]
                found = unpacked_drawn(launched.drawn(), one, len(tensors.sampled_rows))
                if one.verifying is not None:
                    places_host, _ = places_of(samples_of(one))
                    last = self.lane.upload(places_host).gather(1, (found["accepted"].to(torch.int64) - 1)[:, None])
                    self.tables.verified(tensors, found["tokens"], last[:, 0])
                else:
                    self.tables.sampled(tensors, found["tokens"])
                launched.wanted |= found
            launched.download = self.lane.download(launched.wanted, launched.begun)
            launched.wanted = {}

    def _compute(self, launched: _Launched) -> None:
        """Fold a plan, after those that failed before they were folded, and run its first pass up to the logits."""
        while self._unfolded:
            one = self._unfolded[0]
            one.laid = self.tables.fold(one.packed, self.lane.upload(one.packed.flat))
            self._unfolded.popleft()
            self._take_rows(one)
            self._take_states(one)
            if one.error:
                self._spoil(one)
        launched.logits = self._pass(launched, 0)

    def _spoil(self, failed: _Launched) -> None:
        """Mark the KV slots of a failed batch as not written."""
        if self.canary is not None:
            views = [self.tables.window_view(tensors.rows, tensors.slots) for tensors in failed.laid]
            slots = [tensors.slots for tensors in failed.laid]
            of_windows = [None if view is None else view.slots for view in views]
            self.canary.spoil(list(zip(slots, of_windows, strict=True)))
            if failed.states is not None:
                self.canary.spoil_states(self.lane.upload(failed.states.written()))

    def _take_rows(self, launched: _Launched) -> None:
        """Reset the state by row outside of the tables, for the rows that a plan takes."""
        for taken, context in zip(launched.plan.rows_taken, launched.contexts, strict=True):
            self.sampler.take_row(taken, context)
            self._kinds[taken.row] = context.kind
            self._prompt_tops[taken.row] = 0 if taken.sampling is None else taken.sampling.prompt_top_logprobs
            self._sums.pop(taken.row, None)
            self._types.pop(taken.row, None)
            if taken.token_type_ids:
                self._types[taken.row] = np.frombuffer(taken.token_type_ids, np.uint8)
            if self.media is not None:
                self.media.take_row(taken.row, context.spans, context.prompt_tokens)
            if self.canary is not None:
                self.canary.take_row(taken.row, context.namespace, context.tokens, context.spans)

    def _take_states(self, launched: _Launched) -> None:
        """Clear or copy the states with which the rows that a plan takes begin."""
        if self.states is None or launched.states is None:
            return
        taken = np.array([one.row for one in launched.plan.rows_taken], np.int64)
        self.states.restart(taken, self.lane.upload)
        changed = self.states.fold(launched.states, self.lane.upload)
        if self.canary is not None:
            self.canary.take_states(*changed)

    def _pass(self, launched: _Launched, number: int) -> Tensor:
        """Run one pass and keep the requested parts of its hidden states. Returns the logits of its sampling rows."""
        if self.drafter is not None or launched.packed.passes[number].verifying is not None:
            self._draft(launched, number)
        if self.blocks is not None and launched.plan.blocks is not None:
            launched.laid[number] = self.blocks.begin(launched.plan, launched.laid[number])
        reads = self.drafter is not None and self.drafter.reads_layers
        one, tensors = launched.packed.passes[number], launched.laid[number]
        ranks = self._rank_tokens(launched.plan, one)
        if self.loads is not None:
            self.loads.begin(int(one.indptr[-1]), ranks)
        halves = self.halves if launched.plan.halves is not None else None
        if launched.plan.mode == IDLE:
            assert ranks is not None
            if halves is not None:
                halves.join(ranks)
            else:
                cast("SharedModel", self.model).join(ranks)
            self.forwards += 1
            return self.lane.upload(NO_LOGITS)
        media = None  # also for a later stage, which receives hidden states
        if self.media is not None and launched.hidden is None:
            media = self.media.rows(launched.plan, one, launched.given)
        offsets = None if self.media is None else self.media.offsets(one)
        graphs = self.graphs if one.adapter_slots is None and offsets is None and not reads else None
        if graphs is not None and (halves is not None or not graphs.holds(one)):
            graphs = None
        batch, received = None, None  # made once for all readers, because laying out adapters takes time
        if launched.hidden is not None:
            received, launched.hidden = launched.hidden(), None
        if graphs is None or self.drafter is not None or self.canary is not None:
            batch = self._batch(launched.states, one, tensors, received)
            batch.media, batch.rope_offsets, batch.ranks = media, offsets, ranks
            batch.rope_offsets_before = self.media.offsets(one, back=1) if reads and self.media is not None else None
            batch.token_types = self._token_types(one)
            if self.layers is not None and launched.plan.layers is not None:
                batch.layers, batch.hidden = launched.plan.layers, self.layers.before(launched.plan)
            self._before_pass(launched, batch)
        if graphs is not None:
            hidden = graphs.run(one, tensors)
        elif halves is not None and launched.plan.halves is not None:
            assert batch is not None
            hidden = halves.forward(batch, launched.plan.halves, one.adapter_slots)
        elif batch is not None and self.pieces is not None and self.pieces.holds(batch):
            hidden = self.pieces.run(batch)
        else:
            assert batch is not None
            self.attention.plan(batch)
            hidden = self.model.forward(batch, self.attention)
            if batch.states is not None and batch.states.copies is not None:
                batch.states.pool.copy(*batch.states.copies)
        if reads:
            assert self.drafter is not None
            assert batch is not None
            self.drafter.computed(batch, hidden)
        self.forwards += 1
        if self.links is not None and not self.samples:
            self.links.send_hidden(hidden)
            return hidden
        if self.layers is not None and self.layers.keeps(launched.plan, hidden):
            return self.lane.upload(NO_LOGITS)
        samples = len(tensors.sampled_rows)
        if len(one.logprob_targets):
            plan = launched.plan
            launched.prompt_tops = [self._prompt_tops[int(plan.rows[span.index])] for span in plan.logprob_spans]
            tops = max(launched.prompt_tops)
            launched.wanted |= self._judge(hidden, tensors.logits_at[samples:], tensors.logprob_targets, tops)
        self._keep_hidden(launched, number, hidden)
        if launched.plan.extend_rows:
            self._pool(launched, one, hidden, None if batch is None else batch.scores)
        return self.model.logits(hidden.index_select(0, tensors.logits_at[:samples]))

    def _token_types(self, one: ForwardPass) -> Tensor | None:
        """Return the types of the tokens of a pass, int64 [tokens]; None if no prompt in it has types."""
        rows = one.rows.tolist()
        if not self._types or not any(row in self._types for row in rows):
            return None
        types = np.zeros(int(one.indptr[-1]), np.int64)
        for i, row in enumerate(rows[: one.extend_rows]):
            if (of_row := self._types.get(row)) is not None:
                known = of_row[one.starts[i] : one.stops[i]]
                types[one.indptr[i] : one.indptr[i] + len(known)] = known
        return self.lane.upload(types)

    def _rank_tokens(self, plan: BatchPlan, one: ForwardPass) -> RankTokens | None:
        """Return the new tokens of all data-parallel ranks in a pass; None: this rank runs alone.

        Passes that no rank agreed on are those in which all ranks warm up, in the same way.
        """
        own = int(one.indptr[-1])
        if self.ranks == 1:
            return None
        if plan.ranks is None:
            return RankTokens((own,) * self.ranks, padded=True)
        if plan.ranks.tokens[self.rank] != own:
            raise PlanError(
                f"batch {plan.batch_id} has {own} tokens, and rank {self.rank} agreed on {plan.ranks.tokens[self.rank]}"
            )
        return RankTokens(plan.ranks.tokens, padded=plan.ranks.padding == "max_length")

    def _before_pass(self, launched: _Launched, batch: ForwardBatch) -> None:
        """Pass the batch to the drafter, and verify its KV slots with the canary."""
        if self.drafter is not None:
            self.drafter.observe_batch(batch)
        if self.canary is not None:
            found = self.canary.check(batch)
            before = launched.wanted.get("canary")
            launched.wanted["canary"] = found if before is None else torch.cat((before, found))

    def _draft(self, launched: _Launched, number: int) -> None:
        """Add the drafts that a pass verifies to its input tokens."""
        one, tensors = launched.packed.passes[number], launched.laid[number]
        verifying, there = one.verifying, tensors.verifying
        if verifying is not None and there is not None:
            stands_host = verifying.most
            if not verifying.exact and (self.attention.exact_lengths or self.canary is not None):
                stands_host = there.stands.cpu().numpy().astype(np.int32)  # waits for the batch before this one
                behind = len(one.rows) - len(verifying.rows)
                starts, stops = one.starts.copy(), one.stops.copy()
                starts[behind:], stops[behind:] = stands_host, stands_host + verifying.counts
                launched.packed.passes[0] = replace(one, starts=starts, stops=stops)
            newest = self.tables.newest.index_select(0, there.rows)
            fed = newest[:, None]
            if verifying.drafts.any():
                fed = torch.cat((fed, self._guessed(verifying, there, newest, stands_host)), 1)
            given = torch.cat((tensors.given_ids, fed[there.members, there.numbers]))
            launched.laid[0] = replace(tensors, given_ids=given)

    def _guessed(self, verifying: VerifyRows, there: VerifyingTensors, newest: Tensor, stands_host: Int32s) -> Tensor:
        """Return the drafts of each row, int64 [rows, most]: guesses, or tokens that its grammar forces."""
        drafted = drafted_of(verifying)
        guessed = newest.new_zeros(len(newest), 0)
        if drafted.any():
            assert self.drafter is not None
            reach = there.stands + self.lane.upload(drafted)
            offsets = None if self.media is None else self.media.offsets_behind(verifying.rows)
            table = self.tables.page_table
            drafting = DraftingRows(there.rows, there.stands, newest, table, drafted, reach, stands_host, offsets)
            if verifying.tree is not None:
                return cast("TreeDrafter", self.drafter).draft_tree(drafting, verifying.tree)
            guessed = self.drafter.draft(drafting)
        if not verifying.forced.size:
            return guessed
        width = int(verifying.drafts.max())
        given = np.zeros((len(drafted), width), np.int64)
        is_given = np.arange(width) < verifying.forced[:, None]
        given[is_given] = verifying.forced_tokens
        guessed = torch.nn.functional.pad(guessed, (0, width - guessed.shape[1]))
        return torch.where(self.lane.upload(is_given), self.lane.upload(given), guessed)

    # mechanism: chunks (executed)
    def _batch(
        self, states: PlannedStates | None, one: ForwardPass, tensors: PassTensors, hidden: Tensor | None
    ) -> ForwardBatch:
        """Return the pass as a batch for the model and the attention backend."""
        return ForwardBatch(
            token_ids=self.tables.token_ids(tensors),
            positions=tensors.positions,
            slots=tensors.slots,
            rows=tensors.rows,
            indptr=tensors.indptr,
            lengths=tensors.lengths,
            page_table=self.tables.page_table,
            logits_at=tensors.logits_at,
            extend_rows=one.extend_rows,
            starts_host=one.starts,
            lengths_host=one.stops,
            hidden=hidden,
            tree=_tree_of(one),
            windows=self.tables.window_view(tensors.rows, tensors.slots),
            states=None
            if self.states is None or states is None
            else self.states.view(states, one, tensors, self.lane.upload),
            adapters=None
            if one.adapter_slots is None
            else lay_out(one.adapter_slots, one.stops - one.starts, self.lane.upload),
        )

    def _finish(self, launched: _Launched) -> None:
        """Sample, run the other passes of a plan with several steps, and start the copy of the results."""
        logits, launched.logits = launched.logits, None
        plan = launched.plan
        logprobs_requested = bool(self.tables.with_logprobs[plan.rows[plan.sample_rows]].any())
        drawn: dict[str, list[Tensor]] = {}
        for number, (one, tensors) in enumerate(zip(launched.packed.passes, launched.laid, strict=True)):
            if number:
                logits = self._pass(launched, number)
            assert logits is not None
            if not len(one.sample_rows):
                continue
            if self.blocks is not None and launched.plan.blocks is not None:
                drawn |= self.blocks.draw(one, tensors, logits, self.sampler)
                continue
            if one.verifying is not None:
                self._verify(launched, one, tensors, logits, drawn, logprobs_requested)
                continue
            allowed = None if launched.allowed is None else self.lane.upload(launched.allowed)
            rows_host = one.rows[one.sample_rows]
            sampled = self.sampler.sample(logits, tensors.sample_rows, tensors.sampled_positions, rows_host, allowed)
            self.tables.sampled(tensors, sampled.tokens)
            drawn.setdefault("tokens", []).append(sampled.tokens)
            drawn.setdefault("invalid", []).append(sampled.invalid)
            if logprobs_requested:
                for name, part in reported_logprobs(sampled).items():
                    drawn.setdefault(name, []).append(part)
        for name, parts in drawn.items():
            if (joined := joined_passes(parts)).numel():  # top logprobs have width 0 if no row requested them
                launched.wanted[name] = joined
        if self.links is not None and drawn:
            self.links.send_drawn(packed_drawn(launched.wanted))
        begun = launched.begun if launched.entered is None else launched.entered
        launched.download = self.lane.download(launched.wanted, begun)
        launched.wanted = {}

    # mechanism: jump-forward (executed)
    def _verify(
        self,
        launched: _Launched,
        one: ForwardPass,
        tensors: PassTensors,
        logits: Tensor,
        drawn: dict[str, list[Tensor]],
        logprobs_requested: bool,
    ) -> None:
        """Draw behind every verified token, and count the right drafts. All drawn tokens are copied to the CPU."""
        assert one.samples is not None
        rows_host, samples = one.rows[one.sample_rows].repeat(one.samples), len(logits)
        places_host, there_host = places_of(one.samples)
        fed = self.tables.token_ids(tensors).index_select(0, tensors.logits_at[:samples])
        allowed = _masks(launched.allowed, one, logits.shape[1])
        if not self.sampler.remembers(rows_host):
            masks = None if allowed is None else self.lane.upload(allowed)
            sampled = self.sampler.sample(logits, tensors.sample_rows, tensors.sampled_positions, rows_host, masks)
            found = {"tokens": sampled.tokens, "invalid": sampled.invalid}
            found |= reported_logprobs(sampled) if logprobs_requested else {}
        else:
            turns = [places_host[there_host[:, number], number] for number in range(places_host.shape[1])]
            before = [turn - 1 for turn in turns]
            if (tree := one.verifying.tree if one.verifying is not None else None) is not None:
                before[1:] = [
                    places_host[there_host[:, number], int(tree.parents[number - 1])]
                    for number in range(1, places_host.shape[1])
                ]
            in_turn = list(zip(turns, before, strict=True))
            found = self._draw_in_turn(in_turn, tensors, logits, fed, rows_host, allowed, logprobs_requested)
        places, there = self.lane.upload(places_host), self.lane.upload(there_host)
        if one.verifying is not None and one.verifying.tree is not None:
            parents, deepest = part_of(one.verifying.tree, places_host.shape[1])
            real, above = self.lane.upload(np.flatnonzero(there_host)), self.lane.upload(parents)
            paths = right_paths(above, deepest, found["tokens"], found["invalid"], fed, places, there, real)
            self.tables.verified(tensors, found["tokens"], paths.last)
            self._move(*moves_of(paths, places, tensors.slots.index_select(0, tensors.logits_at[:samples])))
            found = {name: part.index_select(0, paths.order) for name, part in found.items()}
            found |= {"accepted": paths.accepted.to(torch.int32), "paths": paths.path.to(torch.int32)}
            drawn |= {name: [part] for name, part in found.items()}
            return
        accepted = right_ones(found["tokens"], found["invalid"], fed, places, there)
        if (forced := _forced_by_sampler(one)) is not None:  # always right; a row that cannot draw one is invalid
            accepted = torch.maximum(accepted, self.lane.upload((forced + 1).astype(np.int64)))
        last = places.gather(1, (accepted - 1)[:, None])[:, 0]
        self.tables.verified(tensors, found["tokens"], last)
        if self.states is not None and launched.states is not None:
            sampling = one.rows[one.sample_rows].astype(np.int64)
            self.states.verified(launched.states, sampling, accepted, self.lane.upload)
        found["accepted"] = accepted.to(torch.int32)
        drawn |= {name: [part] for name, part in found.items()}

    def _move(self, source: Tensor, target: Tensor) -> None:
        """Move the KV of right drafts, and what else belongs to their slots, to the slots of their positions."""
        self.attention.pool.move(source, target)
        if self.drafter is not None:
            self.drafter.moved(source, target)

    # mechanism: several-decodes (executed)
    def _draw_in_turn(
        self,
        turns: list[tuple[NDArray[np.int64], NDArray[np.int64]]],
        tensors: PassTensors,
        logits: Tensor,
        fed: Tensor,
        rows_host: Int32s,
        allowed: Int32s | None,
        logprobs_requested: bool,
    ) -> dict[str, Tensor]:
        """Draw the tokens of each row one after another, so that penalties count no token behind a wrong draft.
        Args:
            turns: samples that are drawn together: the first of each row, then the second of rows with a second, ...;
                and for each the sample behind the token before it.
        Returns: the results by sample, by name.
        """
        parts: dict[str, list[Tensor]] = {}
        tokens = torch.zeros(len(logits), dtype=torch.int32, device=logits.device)
        going = torch.ones(len(logits), dtype=torch.bool, device=logits.device)
        for number, (turn, before) in enumerate(turns):
            at = self.lane.upload(turn)
            rows = tensors.sample_rows.index_select(0, at)
            if number:  # a row with a wrong draft draws in the padding row, which is never read
                last = self.lane.upload(before)
                still = going.index_select(0, last) & (fed.index_select(0, at) == tokens.index_select(0, last))
                going.index_copy_(0, at, still)
                rows = torch.where(still, rows, self.tables.count)
            masks = None if allowed is None else self.lane.upload(allowed[turn])
            positions = tensors.sampled_positions.index_select(0, at)
            sampled = self.sampler.sample(logits.index_select(0, at), rows, positions, rows_host[turn], masks)
            tokens.index_copy_(0, at, sampled.tokens)
            parts.setdefault("invalid", []).append(sampled.invalid)
            for name, part in reported_logprobs(sampled).items() if logprobs_requested else ():
                parts.setdefault(name, []).append(part)
        in_order = self.lane.upload(np.argsort(np.concatenate([turn for turn, _ in turns])))
        return {"tokens": tokens} | {
            name: joined_passes(some).index_select(0, in_order) for name, some in parts.items()
        }

    # mechanism: prompt-logprobs (executed)
    def _judge(self, hidden: Tensor, at: Tensor, targets: Tensor, tops: int) -> dict[str, Tensor]:
        """Compute logprobs of the target tokens, and of the `tops` likeliest tokens, a chunk of positions at a time.

        Returns: by name: float32 [targets]; if tops > 0 also int32 and float32 [targets, tops].
        """
        parts: dict[str, list[Tensor]] = {}
        for first in range(0, len(targets), JUDGED_AT_ONCE):
            logits = self.model.logits(hidden.index_select(0, at[first : first + JUDGED_AT_ONCE]))
            found = logprobs_of(logits, targets[first : first + JUDGED_AT_ONCE], tops)
            parts.setdefault("prompt_logprobs", []).append(found.chosen)
            if found.top_ids is not None and found.top is not None:
                parts.setdefault("prompt_top_ids", []).append(found.top_ids)
                parts.setdefault("prompt_top_logprobs", []).append(found.top)
        return {name: torch.cat(some) for name, some in parts.items()}

    def _keep_hidden(self, launched: _Launched, number: int, hidden: Tensor) -> None:
        """Keep the hidden states of this pass that requests need."""
        for i, first, last in hidden_wanted(launched.plan, launched.packed.passes[number], self.tables):
            # A copy even of float32, because the next replay of a graph overwrites its hidden states.
            launched.wanted[f"hidden {number} {i}"] = hidden[first:last].to(torch.float32, copy=True)
            if (there := launched.laid[number].verifying) is not None:
                launched.wanted["stands"] = there.stands

    # mechanism: vectors (executed)
    def _pool(self, launched: _Launched, one: ForwardPass, hidden: Tensor, by_labels: Tensor | None) -> None:
        """Sum hidden states of rows of kind embed, and keep the vectors and scores of prompts that end in this pass.

        Args:
            by_labels: float32 [rows, labels], of a model that classifies prompts; None: scores are logits of tokens.
        """
        indptr, rows = one.indptr, one.rows.tolist()
        for i in range(one.extend_rows):
            if self._kinds[rows[i]] == "embed" and self.pooling.mode == "first" and not one.starts[i]:
                self._sums[rows[i]] = hidden[int(indptr[i])].to(torch.float32, copy=True)
            elif self._kinds[rows[i]] == "embed" and self.pooling.mode == "mean":
                new = hidden[int(indptr[i]) : int(indptr[i + 1])].to(torch.float32).sum(0)
                before = self._sums.get(rows[i])
                self._sums[rows[i]] = new if before is None else before + new
        pooled = launched.plan.pooled_rows
        launched.scored = [i for i in pooled.tolist() if self._kinds[rows[i]] == "score"]
        if launched.scored and by_labels is not None:
            launched.wanted["scores"] = by_labels.index_select(0, self.lane.upload(np.array(launched.scored)))
        elif launched.scored:
            last = self.lane.upload(indptr[np.array(launched.scored) + 1].astype(np.int64) - 1)
            launched.wanted["scores"] = self.model.logits(hidden.index_select(0, last))
        for i in pooled.tolist():
            if self._kinds[rows[i]] == "embed":
                if self.pooling.mode == "last":
                    vector = hidden[int(indptr[i + 1]) - 1].to(torch.float32, copy=True)
                else:
                    vector = self._sums.pop(rows[i]) / (int(one.stops[i]) if self.pooling.mode == "mean" else 1)
                if self.pooling.normalize:
                    vector = torch.nn.functional.normalize(vector, dim=0)
                launched.wanted[f"pooled {i}"] = vector

    # ---------------------------------------------------------------------------------------------------- results

    def _allowed(self, plan: BatchPlan) -> Int32s | None:
        """Return the allowed next tokens of a plan's sampling rows, or None if no row is under a grammar."""
        rows = plan.rows[plan.sample_rows]
        if self.matchers is None or not self.tables.under_grammar[rows].any():
            return None
        if plan.steps > 1:
            raise PlanError(
                f"batch {plan.batch_id} decodes {plan.steps} times under a grammar, which must take each token"
            )
        return self.matchers.allowed(rows)

    def _result(self, launched: _Launched, arrays: dict[str, NDArray[Any]]) -> BatchResult:
        """Build the result of a batch from the arrays on the CPU."""
        assert launched.download is not None
        plan, passes = launched.plan, launched.packed.passes
        result = BatchResult(plan)
        result.started_us, result.finished_us = launched.download.times_us()
        if "tokens" in arrays:
            result.tokens, result.logprobs = arrays["tokens"], arrays.get("logprobs")
            result.top_ids, result.top_logprobs = arrays.get("top_ids"), arrays.get("top_logprobs")
            result.invalid = tuple(np.flatnonzero(arrays["invalid"]).tolist())
            if self.blocks is not None and plan.blocks is not None:
                self.blocks.fill(result, arrays)
            if "accepted" in arrays:
                samples = passes[0].samples
                assert samples is not None
                _verified(result, samples, arrays, _forced_by_sampler(passes[0]))
            if plan.steps > 1:
                drawn_by = np.concatenate([np.flatnonzero(plan.stops - plan.starts > n) for n in range(len(passes))])
                by_row = np.argsort(drawn_by, kind="stable")
                result.tokens = result.tokens[by_row]
                result.invalid = tuple(np.unique(drawn_by[arrays["invalid"]]).tolist())
                if result.logprobs is not None:
                    result.logprobs = result.logprobs[by_row]
                if result.top_ids is not None and result.top_logprobs is not None:
                    result.top_ids, result.top_logprobs = result.top_ids[by_row], result.top_logprobs[by_row]
        if self.matchers is not None:
            rows = plan.rows[plan.sample_rows]
            under = np.flatnonzero(self.tables.under_grammar[rows]) if plan.steps == 1 and len(result.tokens) else NONE
            result.look_at_grammars(under.tolist(), self.matchers, jumps=self.jumps)
        if not self.samples:
            return result
        first = 0
        for span, tops in zip(plan.logprob_spans, launched.prompt_tops, strict=True):
            stop = first + len(span.targets)
            judged = PromptLogprobs(
                int(plan.request_ids[span.index]), span.start, arrays["prompt_logprobs"][first:stop]
            )
            if tops:
                ids, logprobs = arrays["prompt_top_ids"], arrays["prompt_top_logprobs"]
                judged = replace(judged, top_ids=ids[first:stop, :tops], top_logprobs=logprobs[first:stop, :tops])
            result.prompt_logprobs.append(judged)
            first = stop
        for name, array in arrays.items():
            match name.split():
                case ["hidden", number, i]:
                    one = passes[int(number)]
                    request_id = int(plan.request_ids[np.flatnonzero(plan.rows == one.rows[int(i)])[0]])
                    start = int(one.stops[int(i)]) - len(array)
                    if one.verifying is not None and int(i) >= plan.extend_rows:
                        start = int(arrays["stands"][int(i) - plan.extend_rows])
                        sampler = int(np.flatnonzero(plan.sample_rows == int(i))[0])
                        if "paths" in arrays:
                            path = arrays["paths"][sampler]
                            array = array[np.concatenate((np.zeros(1, np.int64), path[path > 0]))]
                        array = array[: int(arrays["accepted"][sampler])]
                    result.hidden_states.append(HiddenStates(request_id, start, array))
                case ["scores"]:
                    ids = plan.request_ids[launched.scored].tolist()
                    result.pooled += [Pooled(one, "score", logits) for one, logits in zip(ids, array, strict=True)]
                case ["pooled", i]:
                    result.pooled.append(Pooled(int(plan.request_ids[int(i)]), "embed", array))
        return result


def _tree_of(one: ForwardPass) -> TreeRows | None:
    """Return the rows of a pass with trees of drafts; None: they are chains, or there are none."""
    if one.verifying is None or one.verifying.tree is None:
        return None
    first = len(one.rows) - len(one.verifying.rows)
    return tree_rows(first, one.starts[first:], one.verifying.counts, one.verifying.tree)


def _forced_by_sampler(one: ForwardPass) -> Int32s | None:
    """Return the number of forced tokens of each sampler of a pass, int32 [samplers]; None if there are none."""
    verifying = one.verifying
    if verifying is None or not verifying.forced.size:
        return None
    others = np.zeros(len(one.sample_rows) - len(verifying.rows), np.int32)
    return np.concatenate((others, verifying.forced))


def _masks(allowed: Int32s | None, one: ForwardPass, vocabulary: int) -> Int32s | None:
    """Return the tokens allowed behind each verified token: the forced one, or those that the row's matcher allows.

    Args:
        allowed: int32 [samplers, words], masks behind the last token of each sampler; None: all tokens are allowed.
    Returns: int32 [samples, words]; None: all tokens are allowed.
    """
    assert one.samples is not None
    masks = None if allowed is None else allowed.repeat(one.samples, axis=0)
    forced = _forced_by_sampler(one)
    if forced is None or one.verifying is None:
        return masks
    if masks is None:
        masks = np.full((int(one.samples.sum()), -(-vocabulary // 32)), -1, np.int32)
    firsts, tokens = np.cumsum(one.samples) - one.samples, one.verifying.forced_tokens
    at = firsts.repeat(forced) + step_numbers(forced)
    masks[at] = 0
    masks[at, tokens >> 5] = np.left_shift(np.uint32(1), (tokens & 31).astype(np.uint32)).view(np.int32)
    return masks


def _verified(result: BatchResult, samples: Int32s, arrays: dict[str, NDArray[Any]], forced: Int32s | None) -> None:
    """Reduce the results of a verification to the accepted samples."""
    accepted: Int32s = arrays["accepted"]
    kept, firsts = kept_samples(samples, accepted), np.cumsum(samples) - samples
    result.accepted, result.tokens = accepted, result.tokens[kept]
    if "paths" in arrays:
        result.right_drafts = arrays["paths"][arrays["paths"] > 0]
    invalid = arrays["invalid"][firsts]
    if forced is not None:
        invalid = np.where(forced > 0, np.logical_or.reduceat(arrays["invalid"], firsts), invalid)
    result.invalid = tuple(np.flatnonzero(invalid).tolist())
    if result.logprobs is not None:
        result.logprobs = result.logprobs[kept]
    if result.top_ids is not None and result.top_logprobs is not None:
        result.top_ids, result.top_logprobs = result.top_ids[kept], result.top_logprobs[kept]
