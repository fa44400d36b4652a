"""A fake executor with a tag in every KV cell, which checks every cell that a batch reads.

It folds plans exactly as a real executor does: page tables from deltas, a reset for every row that changes hands, the
newest sampled token by row. Instead of keys and values a cell holds a *prefix id*: a number interned from (the prefix
id before it, the token), starting from the namespace. Where a prompt has a span, its content and number stand for the
token. Equal ids mean equal tokens at equal positions behind equal prefixes, which is what attention needs. So one
comparison per cell finds pages that are shared wrongly, freed too early, read before they were written, or written by
two requests.

    launch(plan) checks the plan at once, and queues it: the stream
    advance(command) moves matchers and lets a deferred batch sample
    execute()        runs the oldest queued plan: the device; returns the tokens it sampled
    deliver(id)      the host passes the result to the core: deferred frees of the batch are due

A row with a grammar has a matcher, here the list of tokens that it has taken in. A row is sampled when its
matcher has taken in exactly the output before; no token is taken in twice, and none after the end of its grammar
(`Story.grammar_ends`).

Tokens are a pure function of (request, position), so a token drawn again after a retraction is the same one.
A test that scripts tokens passes `sample` a function of its own.

A plan with drafts is verified: of a row's drafts the first `accept` are right, and the others leave garbage in their
cells. The next plan must start after the accepted tokens.

Adapters have slots on the device: a load is written into its slot at once and usable when it was answered. The adapters
of a plan's rows must be in the slots of the plan, at most as many as fit; no load touches a slot in use.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import chain
from typing import Any

import msgspec
import numpy as np

from lockstep.core.contract.commands import (
    BatchPlan,
    ControlAnswered,
    EncodeMedia,
    LaunchBatch,
    LoadAdapter,
    ReleaseDeviceMemory,
    ResumeDeviceMemory,
    RowTaken,
    SampleBatch,
    Step,
    SwapWeights,
)
from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.events import (
    AdapterLoaded,
    BatchFinished,
    BatchId,
    ControlRequested,
    EngineRestarted,
    LoadAdapterControl,
    MediaEncoded,
    MemorySwitched,
    Observed,
    OpenSession,
    RequestArrived,
    RequestFinished,
    RequestId,
    RequestQueued,
    RequestRetracted,
    SessionClosed,
    TokensForced,
    TransferAdvanced,
    TransferMoved,
    TurnStarted,
    WeightsSwapped,
)
from lockstep.core.requests.table import Int32s, prompt_bytes
from tests.support.tagged_blocks import TaggedBlocks
from tests.support.tagged_hybrid import TaggedHybrid
from tests.support.tagged_layers import TaggedLayers, of_stream, oldest
from tests.support.tagged_rows import BASE, Kept, Launched, Row, Story
from tests.support.tagged_trees import right_path

Sample = Callable[[RequestId, int], int]
Accept = Callable[[RequestId, int, int], int]
Force = Callable[[RequestId, int], bool]

NOTHING = -1  # a cell, or a table entry, that was never written
GARBAGE = -2  # a cell written by a row whose inputs failed; it may not be read


class KvError(AssertionError):
    """A plan reads, writes or claims something that cannot be right."""


def pure_token(request_id: RequestId, position: int) -> int:
    """The default output token: readable in small tests, distinct nearly everywhere in large ones."""
    return 1000 * (request_id % 1_000_000 + 1) + position % 1000


def pure_accept(request_id: RequestId, position: int, drafts: int) -> int:
    """The number of right drafts of a row behind `position`: none, some or all, by request and position."""
    return min(drafts, (request_id * 7 + position * 5 + position // 3) % 5)


def pure_forced(request_id: RequestId, position: int) -> bool:
    """Whether the grammar of a request admits only one token at a position."""
    return (request_id * 5 + position) % 11 in (2, 3, 4, 7)


COMPLETED = ("length", "stop", "text_stop", "grammar", "computed")


class TaggedKv:
    """A device for one engine. `observe` must receive every observed event and its Step, in order."""

    def __init__(
        self,
        config: SchedConfig,
        sample: Sample = pure_token,
        *,
        accept: Accept = pure_accept,
        force: Force = pure_forced,
        eager: bool = False,
        interned: dict[tuple[object, ...], int] | None = None,
    ) -> None:
        """With `eager`, a plan runs when it is launched; otherwise as late as possible, right before its delivery.

        Devices that share `interned` use the same prefix ids, so that cells may be copied between them.
        """
        self.config = config
        self.sample = sample
        self.accept = accept
        self.force = force
        self.eager = eager
        self.forced: tuple[tuple[RequestId, int, bytes], ...] = ()  # behind the result that was made last
        self.generation = 0
        self.weights = 0  # version of the weights; part of every prefix id
        self.forwards = 0
        self.rows: dict[int, Row] = {}
        self.stories: dict[RequestId, Story] = {}
        self.sessions: dict[str, Kept] = {}  # the kept part of each open session
        self.cells: list[list[int]] = []  # by page and place in it: a prefix id
        self.hybrid: TaggedHybrid | None = None
        if config.hybrid is not msgspec.UNSET:
            self.hybrid = TaggedHybrid(config.hybrid, config.page_size)
        self.layers = TaggedLayers(config)
        self.blocks = TaggedBlocks(self, GARBAGE) if config.block_tokens else None
        self._clear()
        self.stream: deque[Launched] = deque()  # launched and not delivered, oldest first
        self.launched: list[Launched] = []  # all of them, for the comparison at the end
        self.last_batch = -1
        self.versions: dict[str, int] = {}  # of adapters, as a new request gets them
        self.slots: dict[int, tuple[str, int]] = {}  # the adapter in each slot, loads in progress included
        self.loads: list[LoadAdapter] = []  # not answered yet
        self.ordered = False  # the host works on weights or memory
        self.released: list[str] = []  # memory that is given back
        self.encoding: dict[bytes, int] = {}  # what an encoder was ordered last, and with which weights
        self.encoded: dict[bytes, int] = {}  # the encoder output that exists, and with which weights it was made
        self._interned: dict[tuple[object, ...], int] = {} if interned is None else interned

    # ---- actions of the host

    def observe(self, event: Observed, step: Step) -> None:
        """Take in an event that the engine has folded, and the Step that followed."""
        match event:
            case RequestArrived():
                for decided in step.decided:
                    if isinstance(decided, RequestQueued):
                        self.arrived(event, decided)
            case EngineRestarted():
                self.restart(event.generation)
            case MediaEncoded(generation=generation, error="") if generation == self.generation:
                self.encoded[event.digest] = self.encoding[event.digest]
            case WeightsSwapped() if event.generation == self.generation:
                self.ordered = False
                self.weights = self.weights if event.error else event.version
            case MemorySwitched() if event.generation == self.generation:
                self.ordered = False
                if not event.error:
                    left = [tag for tag in self.released if tag not in event.tags]
                    self.released = [*left, *event.tags] if event.released else left
            case ControlRequested(_, control_id, OpenSession() as opening):
                if ControlAnswered(control_id, True) in step.commands:  # before any session ends in this step
                    self._session_opened(opening)
            case AdapterLoaded() if event.generation == self.generation:
                self.loaded(event)
            case ControlRequested(_, control_id, LoadAdapterControl(adapter, version)):
                if ControlAnswered(control_id, True) in step.commands:
                    self.versions[adapter] = version
            case BatchFinished() if event.generation == self.generation:
                if not event.error:
                    self._take_results(self._due(event.batch_id).plan)
                self.deliver(event.batch_id)
        for decided in step.decided:
            match decided:
                case RequestFinished():
                    self._check_results(decided)
                    self._turn_ended(decided)
                    self.leave(decided.request_id)
                case RequestRetracted():
                    self.leave(decided.request_id)
                case TurnStarted():
                    self._turn_started(decided)
                case SessionClosed():
                    self._session_closed(decided.session)
                case TransferMoved(request_id=request_id, state="ready"):
                    assert isinstance(event, TransferAdvanced)
                    self.stories[request_id].tokens.append(event.first_token)  # drawn by the other engine
        for command in step.commands:
            match command:
                case LaunchBatch(plan, sample):
                    self.launch(plan, deferred=sample == "deferred")
                case EncodeMedia(digest):
                    for dropped in command.drop:
                        del self.encoded[dropped]
                    self.encoding[digest] = self.weights
                case SampleBatch():
                    self.advance(command)
                case LoadAdapter():
                    self.load(command)
                case SwapWeights() | ReleaseDeviceMemory() | ResumeDeviceMemory():
                    self._check_order(command)

    def arrived(self, event: RequestArrived, queued: RequestQueued) -> None:
        """Learn the prompt of an accepted request."""
        tokens: list[Any] = np.frombuffer(prompt_bytes(event.prompt), np.int32).tolist()
        cut = queued.truncated_tokens
        tokens = tokens[cut:] if self.config.truncate_input == "left" else tokens[: len(tokens) - cut]
        namespace = (event.namespace, event.tenant if self.config.isolate_tenants else None)
        adapter = (event.adapter, self.versions[event.adapter]) if event.adapter else BASE
        story = Story(namespace, tokens, len(tokens), event.session, adapter)
        story.about = list(event.token_type_ids) or [None] * len(tokens)
        for span in event.spans:
            for i in range(span.stop - span.start):
                tokens[span.start + i] = (span.digest, i)
                story.about[span.start + i] = (story.about[span.start + i], span.kind, span.stop - span.start)
            if span.encoder_tokens:
                story.encoder_digests.add(span.digest)
        story.pooled = event.kind == "embed"
        story.ends_with_prompt = not event.max_new_tokens
        if event.logprob_start is not None:
            story.logprobs_wanted = range(event.logprob_start, len(tokens) - 1)
        story.hidden_wanted = event.return_hidden_states
        self.stories[queued.request_id] = story

    def _session_opened(self, opening: OpenSession) -> None:
        self.sessions[opening.session] = self.sessions.get(opening.parent, Kept()).first(opening.parent_tokens)

    def _session_closed(self, name: str) -> None:
        del self.sessions[name]
        for story in self.stories.values():
            if story.session == name:
                story.session = ""  # another session may get the name

    def _turn_started(self, started: TurnStarted) -> None:
        """A turn's prompt is known: the kept part of the session, and its own tokens."""
        story, kept = self.stories[started.request_id], self.sessions[started.session].first(started.kept_tokens)
        story.tokens, story.about = kept.tokens + story.tokens, kept.about + story.about
        story.encoder_digests |= kept.encoder_digests
        story.prompt_tokens = len(story.tokens)
        wanted, story.hidden_from = story.logprobs_wanted, started.kept_tokens
        story.logprobs_wanted = range(wanted.start + started.kept_tokens, wanted.stop + started.kept_tokens)
        if len(story.tokens) != started.prompt_tokens:
            raise KvError(f"r{started.request_id} starts with {started.prompt_tokens} tokens, not {len(story.tokens)}")

    def _turn_ended(self, finished: RequestFinished) -> None:
        """The tokens of a completed turn are kept by the session."""
        story = self.stories[finished.request_id]
        if story.session in self.sessions and finished.reason in COMPLETED:
            tokens = story.tokens[: story.prompt_tokens + finished.output_tokens]
            about = story.about + [None] * finished.output_tokens
            self.sessions[story.session] = Kept(tokens, about, set(story.encoder_digests))

    def _check_order(self, command: SwapWeights | ReleaseDeviceMemory | ResumeDeviceMemory) -> None:
        """Nothing runs while weights or memory change."""
        if self.stream or self.loads:
            raise KvError(f"{command} with {len(self.stream)} batches and {len(self.loads)} loads on the stream")
        self.ordered = True
        if isinstance(command, ReleaseDeviceMemory):
            if any(row.live for row in self.rows.values()):
                raise KvError(f"{command} while requests hold rows")
            if "kv_cache" in command.tags:
                self._clear()
            if "weights" in command.tags:
                self.slots.clear()

    def load(self, command: LoadAdapter) -> None:
        """Begin to write an adapter into its slot; the content before is lost."""
        if command.slot not in range(self.config.max_loras or 0):
            raise KvError(f"slot {command.slot} of {self.config.max_loras} is loaded")
        if self.ordered or "weights" in self.released:
            raise KvError(f"{command} while weights or memory change, released {self.released}")
        for launched in self.stream:
            for row in launched.plan.rows.tolist():
                if self.rows[row].slot == command.slot:
                    raise KvError(f"slot {command.slot} is loaded while b{launched.plan.batch_id} in flight uses it")
        for holder in self.rows.values():
            if holder.live and holder.slot == command.slot:
                raise KvError(f"slot {command.slot} is loaded while r{holder.request_id} uses it")
        if any(load.slot == command.slot for load in self.loads):
            raise KvError(f"slot {command.slot} is loaded while it is being loaded")
        self.slots[command.slot] = (command.adapter, command.version)
        self.loads.append(command)

    def loaded(self, event: AdapterLoaded) -> None:
        """The engine has processed the end of a load."""
        load = next(load for load in self.loads if (load.adapter, load.version) == (event.adapter, event.version))
        self.loads.remove(load)
        if event.error:
            del self.slots[load.slot]

    def leave(self, request_id: RequestId) -> None:
        """A request left its row; plans in flight may still name it, new ones may not."""
        for row in self.rows.values():
            if row.request_id == request_id:
                row.live = False

    def restart(self, generation: int) -> None:
        """The memory of the device is lost, and the batches that were on the stream with it."""
        self.generation = generation
        self.rows.clear()
        self.stream.clear()
        self.slots.clear()
        self.loads.clear()
        self.ordered = False
        self.encoded.clear()
        self._clear()

    def _clear(self) -> None:
        self.cells = [[NOTHING] * self.config.page_size for _ in range(self.config.pages)]
        if self.hybrid is not None:
            self.hybrid.clear()

    def launch(self, plan: BatchPlan, *, deferred: bool = False) -> None:
        """Put a plan on the stream, after folding its changes to rows and page tables."""
        self._check_head(plan)
        for taken in plan.rows_taken:
            if (old := self.rows.get(taken.row)) is not None and old.live:
                raise KvError(f"b{plan.batch_id}: row {taken.row} is taken while r{old.request_id} still has it")
            if any(taken.row in launched.pages for launched in self.stream):
                raise KvError(f"b{plan.batch_id}: row {taken.row} is taken while a batch in flight still names it")
            self._check_adapter(plan, taken)
            self.layers.at.pop(taken.row, None)
            matcher: list[int] | None = [] if taken.grammar is not None else None
            self.rows[taken.row] = Row(
                taken.request_id,
                taken.epoch,
                taken.adapter_slot,
                matcher=matcher,
                hidden_states=taken.hidden_states,
                weights=self.weights,
            )
        self._apply_deltas(plan)
        pages, tables = {}, {}
        spans = zip(plan.request_ids.tolist(), plan.starts.tolist(), plan.stops.tolist(), strict=True)
        for i, (row, span) in enumerate(zip(plan.rows.tolist(), spans, strict=True)):
            pages[row] = self._check_row(plan, i, row, *span)
            tables[row] = list(self.rows[row].table)
        self._check_writers(plan, pages)
        if self.hybrid is not None:
            self.hybrid.launch(plan, tables, [launched.plan.batch_id for launched in self.stream])
        self._check_adapters(plan)
        self._check_extras(plan)
        if deferred and plan.sample_after is not None:
            self._check_sample_after(plan)
        launched = Launched(plan, snapshot_of(plan), pages, tables, may_sample=not deferred)
        if plan.speculation is not None:
            drafted = plan.speculation.path_lengths() if plan.speculation.parents.size else plan.speculation.drafted()
            launched.drafts = dict(enumerate(drafted.tolist(), plan.extend_rows))
            launched.most = {int(plan.rows[i]): int(plan.stops[i]) for i in launched.drafts}
        self.stream.append(launched)
        self.launched.append(launched)
        beside = of_stream(self.stream, plan)
        mine = [launched for launched in beside if launched.plan.microbatch == plan.microbatch]
        if any(row in other.pages for other in self.stream if other not in beside for row in pages):
            raise KvError(f"b{plan.batch_id} has a row that is on the other stream")
        if len(mine) > self.config.overlap_depth + 1:
            raise KvError(f"{len(mine)} batches on the stream at overlap depth {self.config.overlap_depth}")
        if self.eager:
            self._run_ahead()

    def agreed(self, plan: BatchPlan, *, deferred: bool) -> None:
        """A proposed plan, already on the stream, is launched: it may sample, or waits for matchers."""
        launched = next(one for one in self.stream if one.plan.batch_id == plan.batch_id)
        settled = {name: getattr(plan, name) for name in ("ranks", "mode", "sample_after", "halves")}
        proposed = msgspec.structs.replace(launched.plan, **settled)
        for name in plan.__struct_fields__:
            if snapshot_of(getattr(plan, name)) != snapshot_of(getattr(proposed, name)):
                raise KvError(f"b{plan.batch_id} is launched with another `{name}` than was proposed")
        if deferred and plan.sample_after is not None:
            self._check_sample_after(plan)
        launched.may_sample = not deferred

    def advance(self, command: SampleBatch) -> None:
        """Move matchers by tokens they have not seen, and let the batch sample."""
        launched = next((one for one in self.stream if one.plan.batch_id == command.batch_id), None)
        if launched is None or launched.may_sample:
            raise KvError(f"b{command.batch_id} is to be sampled, but was not deferred, or was sampled before")
        for request_id, epoch, tokens in command.grammar_advance:
            row = next((row for row in self.rows.values() if row.live and row.request_id == request_id), None)
            if row is None or row.epoch != epoch or row.matcher is None:
                raise KvError(f"b{command.batch_id} moves the matcher of r{request_id}.{epoch}, which there is not")
            row.matcher += tokens
            self._check_matcher(request_id, row)
        launched.may_sample = True
        if self.eager:
            self._run_ahead()

    def _run_ahead(self) -> None:
        """Run all plans that can run: up to a batch that may not sample yet, whose forward runs."""
        for first in oldest(self.stream):
            for launched in of_stream(self.stream, first.plan):
                if not launched.executed:
                    self._compute(launched)
                    if not launched.may_sample:
                        break
                    self._sample_all(launched)

    def execute(self, launched: Launched | None = None) -> Int32s:
        """Run a plan, by default the oldest one that has not run. Returns the tokens of its sample_rows, in order."""
        launched = launched or next(launched for launched in self.stream if not launched.executed)
        self._compute(launched)
        if not launched.may_sample:
            raise KvError(f"b{launched.plan.batch_id} was deferred and has not been told to sample")
        return self._sample_all(launched)

    def _compute(self, launched: Launched) -> None:
        if launched.computed:
            return
        launched.computed = True
        plan, at = launched.plan, 0
        if self.hybrid is not None:
            self.hybrid.begin(plan)
        for i, (row_index, start, stop) in enumerate(
            zip(plan.rows.tolist(), plan.starts.tolist(), plan.stops.tolist(), strict=True)
        ):
            row, table = self.rows[row_index], launched.tables[row_index]
            story = self.stories[row.request_id]
            if plan.speculation is not None and i >= plan.extend_rows:
                self._verify(launched, i, row, int(plan.speculation.draft_lengths[i - plan.extend_rows]))
                continue
            if self.blocks is not None and plan.blocks is not None:
                row.failed = row.failed or self._check_reads(plan, row, table, start)
                self._write(table, start, self.blocks.compute(launched, i, row, at))
                at += int(plan.blocks.given[i])
                continue
            row.stands = stop
            if plan.layers is not None and not row.failed:
                self._check_layers(plan, row, table, start, stop)
            if i < plan.extend_rows:
                new = self._new_tokens(plan, i, plan.token_ids[at : at + stop - start].tolist())
                at += stop - start
            elif not row.failed:
                newest = self._newest(plan, row, start)
                fed_back = [self.sample_at(plan, row, position) for position in range(start + 1, stop)]
                launched.fed_back[i] = fed_back
                new = [newest, *fed_back]
            else:
                fed_back = [self.sample(row.request_id, position) for position in range(start + 1, stop)]
                launched.fed_back[i] = fed_back
                new = []
            if not row.failed:
                if new != story.tokens[start:stop]:
                    raise KvError(f"b{plan.batch_id}: r{row.request_id}[{start}:{stop}] is given the tokens {new}, "
                                  f"its own are {story.tokens[start:stop]}")  # fmt: skip
                row.failed = self._check_reads(plan, row, table, start)
                if self.hybrid is not None and not row.failed:
                    expected = self._prefix_ids(row, story, start)
                    row.failed = self.hybrid.read(plan, row_index, start, expected, row.live)
            ids = [GARBAGE] * (stop - start) if row.failed else self._prefix_ids(row, story, stop)[start:stop]
            if self.blocks is not None and not row.failed:
                ids = self.blocks.extended(self._prefix_ids(row, story, stop), start, stop)
            self._write(table, start, ids if row.failed else self.layers.written(plan, ids))
            if self.hybrid is not None:
                self.hybrid.write(plan, i, row_index, start, ids)

    def _verify(self, launched: Launched, i: int, row: Row, drafts: int) -> None:
        """Compute a row's newest token and its drafts, from its position; wrong drafts leave garbage."""
        plan, story = launched.plan, self.stories[row.request_id]
        start = int(plan.starts[i]) if row.failed else row.stands  # a failed batch did not move it
        table = launched.tables[int(plan.rows[i])]
        path = launched.drafts[i]
        if not int(plan.starts[i]) <= start <= int(plan.stops[i]) - 1 - path:
            raise KvError(f"b{plan.batch_id}: r{row.request_id} stands at {start}, its span of {1 + path} lies in "
                          f"[{plan.starts[i]}:{plan.stops[i]})")  # fmt: skip
        if not row.failed and self._newest(plan, row, start) != story.tokens[start]:
            raise KvError(f"b{plan.batch_id}: r{row.request_id} verifies behind another token than its own at {start}")
        assert plan.speculation is not None
        forced = plan.speculation.forced_of(i - plan.extend_rows)
        right = len(forced) if forced else self.accept(row.request_id, start, path)
        if plan.speculation.parents.size:
            launched.right[i] = right_path(plan.speculation.parents, drafts, right, row.request_id + start)
        launched.starts[i], launched.accepted[i] = start, right + 1
        row.stands = start + right + 1
        tokens = [
            self.sample_at(plan, row, position, forced=bool(forced)) for position in range(start + 1, start + right + 1)
        ]
        if forced and (forced != tokens or row.matcher is None):
            raise KvError(f"b{plan.batch_id}: {forced} is forced of r{row.request_id} behind {start}, it says {tokens}")
        if not row.failed:
            row.failed = self._check_reads(plan, row, table, start)
            if self.hybrid is not None and not row.failed:
                expected = self._prefix_ids(row, story, start)
                row.failed = self.hybrid.read(plan, int(plan.rows[i]), start, expected, row.live)
        launched.fed_back[i] = tokens
        ids = [GARBAGE] * (right + 1) if row.failed else self._prefix_ids(row, story, row.stands)[start : row.stands]
        ids += [GARBAGE] * (drafts - right)
        self._write(table, start, ids)
        if self.hybrid is not None:
            self.hybrid.write(plan, i, int(plan.rows[i]), start, ids, right)

    def _write(self, table: list[int], start: int, prefix_ids: list[int]) -> None:
        """Fill the cells of a row from position `start` on."""
        page_size = self.config.page_size
        for position, prefix_id in enumerate(prefix_ids, start):
            self.cells[table[position // page_size]][position % page_size] = prefix_id

    def _sample_all(self, launched: Launched) -> Int32s:
        plan, fed_back = launched.plan, launched.fed_back
        tokens = [
            token for i in plan.sample_rows.tolist() for token in (*fed_back.get(i, ()), *self._sample(launched, i))
        ]
        launched.executed, launched.tokens = True, np.array(tokens, np.int32)
        self.forwards += 1
        return launched.tokens

    def _check_layers(self, plan: BatchPlan, row: Row, table: list[int], start: int, stop: int) -> None:
        page_size = self.config.page_size
        cells = [self.cells[table[position // page_size]][position % page_size] for position in range(start, stop)]
        if wrong := self.layers.unexpected(plan, cells, () if row.live else (GARBAGE,)):
            raise KvError(f"b{plan.batch_id}: r{row.request_id} {wrong}")

    def finished(self, time_us: int, *, error: str = "", batch_id: BatchId | None = None) -> BatchFinished:
        """The event for a batch, by default the oldest, running it first if it has not run. Does not deliver it."""
        launched = self.stream[0] if batch_id is None else self._due(batch_id)
        batch_id = launched.plan.batch_id
        if error:
            launched.computed = launched.executed = True
            self._spoil(launched.plan)
            return BatchFinished(time_us, batch_id, generation=self.generation, error=error)
        tokens = launched.tokens if launched.executed and launched.tokens is not None else self.execute(launched)
        event = BatchFinished(time_us, batch_id, tokens.tobytes(), time_us, time_us, self.generation)
        if launched.plan.speculation is not None or launched.plan.blocks is not None:
            accepted = [launched.accepted.get(i, 1) for i in launched.plan.sample_rows.tolist()]
            for i in launched.plan.sample_rows.tolist():
                accepted += launched.right.get(i, [])
            event = msgspec.structs.replace(event, accepted=np.array(accepted, np.int32).tobytes())
        self.forced = self._forced(launched)
        ended = self._grammars_ended(launched.plan)
        return msgspec.structs.replace(event, grammar_ended=ended) if ended else event

    def tell_forced(self, time_us: int) -> TokensForced | None:
        """Return the tokens that grammars force after the newest result; the host reports them after it."""
        forced, self.forced = self.forced, ()
        return TokensForced(time_us, self.generation, forced) if forced else None

    def _forced(self, launched: Launched) -> tuple[tuple[RequestId, int, bytes], ...]:
        """Requests whose grammars leave no choice behind the token they sample, with the forced tokens."""
        found: list[tuple[RequestId, int, bytes]] = []
        for i in launched.plan.sample_rows.tolist() if self.config.jumps else ():
            row = self.rows[int(launched.plan.rows[i])]
            story = self.stories[row.request_id]
            stop = first = 1 + (
                launched.starts[i] + launched.accepted[i] if i in launched.starts else int(launched.plan.stops[i])
            )
            ends = stop + 100  # the token that ends a grammar is sampled: its result reports it
            if story.grammar_ends is not None:
                ends = story.prompt_tokens + story.grammar_ends - 1
            while row.matcher is not None and stop < ends and self.force(row.request_id, stop):
                stop += 1
            if first < stop and row.live:
                tokens = [self.sample(row.request_id, position) for position in range(first, stop)]
                found.append((row.request_id, first - story.prompt_tokens, np.array(tokens, np.int32).tobytes()))
        return tuple(found)

    def _grammars_ended(self, plan: BatchPlan) -> tuple[int, ...]:
        """Sampling rows whose grammar admits nothing behind the token they sample, or admitted nothing before it."""
        ended = []
        for position, i in enumerate(plan.sample_rows.tolist()):
            row = self.rows[int(plan.rows[i])]
            story = self.stories[row.request_id]
            outputs = int(plan.stops[i]) + 1 - story.prompt_tokens
            if row.matcher is not None and story.grammar_ends is not None and outputs >= story.grammar_ends:
                ended.append(position)
        return tuple(ended)

    def _due(self, batch_id: BatchId) -> Launched:
        """Return a launched plan whose result may be next."""
        for launched in oldest(self.stream):
            if launched.plan.batch_id == batch_id:
                return launched
        raise KvError(f"b{batch_id} is delivered, but it is not the oldest on the stream")

    def deliver(self, batch_id: BatchId) -> None:
        """The engine has taken in the result of the oldest batch: its deferred frees are done."""
        delivered, page_size = self._due(batch_id), self.config.page_size
        self.stream.remove(delivered)
        for i, accepted in delivered.accepted.items() if delivered.plan.blocks is None else ():
            index = int(delivered.plan.rows[i])
            assert delivered.plan.speculation is not None
            right = accepted - 1 - len(delivered.plan.speculation.forced_of(i - delivered.plan.extend_rows))
            row, wrong = self.rows[index], delivered.drafts[i] - right
            row.reach -= wrong
            row.least += right
            for behind in self.stream:
                if index in behind.most:
                    behind.most[index] -= wrong
                    if not self.config.drafts_trees:  # a row with trees keeps its pages
                        behind.pages[index] = set(behind.tables[index][: -(-behind.most[index] // page_size)])
                    if self.hybrid is not None:
                        at_least = delivered.starts[i] + accepted
                        self.hybrid.narrow(behind.plan.batch_id, index, at_least, behind.most[index])

    def check_plans_unchanged(self) -> None:
        """Every plan is unchanged since its launch. Call at the end of a run."""
        for launched in self.launched:
            if snapshot_of(launched.plan) != launched.copy:
                raise KvError(f"the plan of b{launched.plan.batch_id} changed after its launch")

    # ---- checks

    def _check_head(self, plan: BatchPlan) -> None:
        if plan.batch_id <= self.last_batch:
            raise KvError(f"b{plan.batch_id} is launched after b{self.last_batch}")
        if plan.generation != self.generation:
            raise KvError(f"b{plan.batch_id} is of generation {plan.generation}, the device of {self.generation}")
        self.last_batch = plan.batch_id
        rows, starts, stops = plan.rows.tolist(), plan.starts.tolist(), plan.stops.tolist()
        if (not rows) != (plan.mode == "idle") or not len(rows) == len(plan.request_ids) == len(starts) == len(stops):
            columns = (plan.rows, plan.request_ids, plan.starts, plan.stops)
            raise KvError(f"b{plan.batch_id} has columns of {[len(column) for column in columns]} rows")
        if len(set(rows)) != len(rows):
            raise KvError(f"b{plan.batch_id} names a row twice: {rows}")
        whole = {"decode": 0, "extend": len(rows), "split_prefill": len(rows)}
        extending = whole.get(plan.mode, plan.extend_rows)
        if plan.extend_rows != extending:
            raise KvError(f"b{plan.batch_id} is {plan.mode} with {plan.extend_rows} of {len(rows)} rows extending")
        new_tokens = sum(stops[: plan.extend_rows]) - sum(starts[: plan.extend_rows])
        new_tokens += int(plan.blocks.given.sum()) if plan.blocks is not None else 0
        if new_tokens != len(plan.token_ids):
            raise KvError(f"b{plan.batch_id} has {len(plan.token_ids)} token ids for {new_tokens} new tokens")

    def _check_sample_after(self, plan: BatchPlan) -> None:
        """A deferred batch waits for the youngest batch on the stream that samples one of its rows under a grammar."""
        rows = plan.rows[plan.sample_rows[plan.sample_rows >= plan.extend_rows]].tolist()
        matched = {row for row in rows if self.rows[row].matcher is not None}
        after = [
            launched.plan.batch_id
            for launched in self.stream
            if launched.plan.batch_id < plan.batch_id
            and matched & set(launched.plan.rows[launched.plan.sample_rows].tolist())
        ]
        if not after or after[-1] != plan.sample_after:
            raise KvError(f"b{plan.batch_id} waits for b{plan.sample_after}; its rows are sampled by {after}")

    def _check_matcher(self, request_id: RequestId, row: Row) -> None:
        """A matcher has taken in the beginning of the request's output, and not more than the grammar admits."""
        story, seen = self.stories[row.request_id], row.matcher
        assert seen is not None
        outputs = story.tokens[story.prompt_tokens :]
        to_come = range(len(story.tokens), story.prompt_tokens + len(seen)) if self.config.jumps else ()
        outputs += [self.sample(request_id, position) for position in to_come if self.force(request_id, position)]
        outputs = outputs[: story.grammar_ends]
        if seen != outputs[: len(seen)]:
            raise KvError(f"the matcher of r{row.request_id} was moved by {seen}, the output it may see is {outputs}")

    def _check_extras(self, plan: BatchPlan) -> None:
        """Check which requests end by this batch, and the positions that are to be delivered: each once, none again."""
        pooled = plan.pooled_rows.tolist()
        if not set(pooled).isdisjoint(plan.sample_rows.tolist()):
            raise KvError(f"b{plan.batch_id} samples rows that end without a token")
        for i, (request_id, stop) in enumerate(zip(plan.request_ids.tolist(), plan.stops.tolist(), strict=True)):
            story = self.stories[request_id]
            ends = story.ends_with_prompt and stop == story.prompt_tokens and not self.layers.is_partial(plan)
            if (i in pooled) != ends:
                raise KvError(f"b{plan.batch_id} has r{request_id}, to stop at {story.prompt_tokens}, in {pooled}")
        for span in plan.logprob_spans:
            story = self.stories[int(plan.request_ids[span.index])]
            wanted = range(span.start, span.start + len(span.targets))
            if not wanted or wanted.stop > int(plan.stops[span.index]) or set(wanted) & set(story.logprobs):
                raise KvError(f"b{plan.batch_id} requests logprobs of {wanted}, {story.logprobs} were delivered")
            for position, target in zip(wanted, span.targets.tolist(), strict=True):
                if isinstance(story.tokens[position + 1], int) and story.tokens[position + 1] != target:
                    raise KvError(f"b{plan.batch_id} requests the logprob of {target} at {position}")
        for hidden in plan.hidden_spans:
            story = self.stories[int(plan.request_ids[hidden.index])]
            if set(range(hidden.start, int(plan.stops[hidden.index]))) & set(story.hidden):
                raise KvError(f"b{plan.batch_id} requests hidden states that were delivered, from {hidden.start}")

    def _new_tokens(self, plan: BatchPlan, i: int, ids: list[Any]) -> list[Any]:
        """The inputs of the new positions of an extend row: tokens, and embeddings in spans."""
        start, story = int(plan.starts[i]), self.stories[int(plan.request_ids[i])]
        for span in plan.media_spans:
            if span.index == i:
                made_with = self.encoded.get(span.digest, -1)
                if span.digest in story.encoder_digests and made_with < self.rows[int(plan.rows[i])].weights:
                    raise KvError(f"b{plan.batch_id} reads encoder output that is not there: {span.digest.hex()}")
                for number in range(span.stop - span.start):
                    if ids[span.start - start + number] >= 0:
                        raise KvError(f"b{plan.batch_id} has a token where a span is")
                    ids[span.start - start + number] = (span.digest, span.offset + number)
        return ids

    def _take_results(self, plan: BatchPlan) -> None:
        """Deliver the results of a batch for rows with a live request."""
        for span in plan.logprob_spans:
            if self._alive(plan, span.index):
                story = self.stories[int(plan.request_ids[span.index])]
                story.logprobs += range(span.start, span.start + len(span.targets))
        for hidden in plan.hidden_spans:
            if self._alive(plan, hidden.index):
                story = self.stories[int(plan.request_ids[hidden.index])]
                story.hidden += range(hidden.start, int(plan.stops[hidden.index]))
        for i in range(plan.extend_rows, len(plan.rows)):
            if self._alive(plan, i) and self.rows[int(plan.rows[i])].hidden_states:
                start, stop = int(plan.starts[i]), int(plan.stops[i])
                if plan.speculation is not None:
                    start = self.stream[0].starts[i]
                    stop = start + self.stream[0].accepted[i]
                self.stories[int(plan.request_ids[i])].hidden += range(start, stop)

    def _alive(self, plan: BatchPlan, i: int) -> bool:
        row = self.rows[int(plan.rows[i])]
        return row.live and row.request_id == int(plan.request_ids[i])

    def _check_results(self, finished: RequestFinished) -> None:
        """A request with its whole answer got all its results, each position once and in order (S21)."""
        if finished.reason not in COMPLETED:
            return
        story = self.stories[finished.request_id]
        if story.logprobs != list(story.logprobs_wanted):
            raise KvError(f"r{finished.request_id} got logprobs of {story.logprobs}, wanted {story.logprobs_wanted}")
        computed = story.prompt_tokens + max(finished.output_tokens - 1, 0)
        wanted = list(range(story.hidden_from, computed)) if story.hidden_wanted else []
        if story.hidden[: len(wanted)] != wanted or (story.hidden and not wanted):
            raise KvError(f"r{finished.request_id} got hidden states of {story.hidden}, wanted {wanted}")

    def _check_adapter(self, plan: BatchPlan, taken: RowTaken) -> None:
        """A row is taken on the adapter of its request."""
        adapter = self.stories[taken.request_id].adapter
        if (taken.adapter, taken.adapter_version) != adapter or (adapter == BASE) != (taken.adapter_slot < 0):
            raise KvError(f"b{plan.batch_id}: row {taken.row} is taken on {taken.adapter!r} version "
                          f"{taken.adapter_version}, r{taken.request_id} came for {adapter}")  # fmt: skip

    def _check_adapters(self, plan: BatchPlan) -> None:
        """S25: check the slots of the adapters in a plan, and their number: in the plan, and in all running batches."""
        if not self.config.max_loras:
            return
        for row in plan.rows.tolist():
            adapter, slot = self.stories[self.rows[row].request_id].adapter, self.rows[row].slot
            loading = any(load.slot == slot for load in self.loads)
            if adapter != BASE and (self.slots.get(slot) != adapter or loading):
                raise KvError(f"b{plan.batch_id}: row {row} needs {adapter} in slot {slot}, which holds "
                              f"{self.slots.get(slot)}" + (", loading" if loading else ""))  # fmt: skip
        running = {self.stories[row.request_id].adapter for row in self.rows.values() if row.live}
        if len(running) > self.config.max_loras:
            raise KvError(f"b{plan.batch_id}: {sorted(running)} run together, max_loras {self.config.max_loras}")

    def _apply_deltas(self, plan: BatchPlan) -> None:
        deltas = plan.deltas
        for row, index, page in zip(deltas.rows.tolist(), deltas.index.tolist(), deltas.pages.tolist(), strict=True):
            if row not in self.rows or not self.rows[row].live:
                raise KvError(f"b{plan.batch_id} changes the page table of row {row}, which no request has")
            if not 0 <= page < self.config.pages:
                raise KvError(f"b{plan.batch_id} gives row {row} page {page} of {self.config.pages}")
            table = self.rows[row].table
            table.extend([NOTHING] * (index + 1 - len(table)))
            table[index] = page

    def _check_row(self, plan: BatchPlan, i: int, row_index: int, request_id: int, start: int, stop: int) -> set[int]:
        """A row belongs to the plan's request, has a whole page table, and starts at its position.

        Returns its pages.
        """
        row = self.rows.get(row_index)
        if row is None or row.request_id != request_id or not row.live:
            raise KvError(f"b{plan.batch_id} runs r{request_id} in row {row_index}, which it does not have")
        if not 0 <= start < stop:
            raise KvError(f"b{plan.batch_id} has the empty span r{request_id}[{start}:{stop}]")
        if plan.speculation is not None and i >= plan.extend_rows:
            return self._check_verifying(plan, i, row, start, stop)
        if self.blocks is not None and plan.blocks is not None:
            if wrong := self.blocks.wrong_span(plan, i, row, start, stop):
                raise KvError(f"b{plan.batch_id}: r{request_id}[{start}:{stop}] {wrong}")
            return self._pages_to(plan, row, stop)
        if i >= plan.extend_rows and stop - start > plan.steps:
            raise KvError(f"b{plan.batch_id} decodes r{request_id}[{start}:{stop}] in {plan.steps} steps")
        if wrong := self.layers.follow(plan, row_index, (start, stop), self.weights):
            raise KvError(f"b{plan.batch_id}: r{request_id} {wrong}")
        if plan.layers is not None and plan.layers[0]:
            return self._pages_to(plan, row, stop)
        if not row.reach and start and self.stories[request_id].pooled:
            raise KvError(f"b{plan.batch_id} pools r{request_id} without its first {start} positions")
        if row.reach and start != row.reach:
            raise KvError(f"b{plan.batch_id} runs r{request_id} from {start}, but it stands at {row.reach}")
        row.reach = row.least = stop
        return self._pages_to(plan, row, stop)

    def _check_verifying(self, plan: BatchPlan, i: int, row: Row, start: int, stop: int) -> set[int]:
        """Check that a row verifies within its least and greatest position; if they differ, the plan names a batch."""
        assert plan.speculation is not None
        name, drafts = f"b{plan.batch_id}: r{row.request_id}", int(plan.speculation.draft_lengths[i - plan.extend_rows])
        path = int(plan.speculation.path_lengths()[i - plan.extend_rows])
        if (start, stop) != (row.least, row.reach + 1 + path):
            raise KvError(f"{name}[{start}:{stop}] verifies {drafts} drafts, it stands at {row.least} to {row.reach}")
        forced = len(plan.speculation.forced_of(i - plan.extend_rows))
        if not 0 <= drafts <= plan.speculation.draft_tokens or (drafts > forced and row.matcher is not None):
            raise KvError(f"{name} verifies {drafts} drafts, matcher {row.matcher}")
        index = int(plan.rows[i])
        says = [one.plan.batch_id for one in self.stream if drafts_of(one, index)]
        after = [one.batch_id for one in plan.starts_after if (one.index, one.row) == (i, index)]
        if after != says[-1:]:
            raise KvError(f"{name} starts after {after}, the batches that leave it open are {says}")
        row.least, row.reach = row.least + 1 + forced, stop
        return self._pages_to(plan, row, stop + drafts - path)

    def _pages_to(self, plan: BatchPlan, row: Row, stop: int) -> set[int]:
        """The pages of a row's first `stop` positions, all of which it must have."""
        held = row.table[: -(-stop // self.config.page_size)]
        if len(held) * self.config.page_size < stop or NOTHING in held:
            raise KvError(f"b{plan.batch_id}: the page table of r{row.request_id}, {held}, does not reach {stop}")
        return set(held)

    def _check_writers(self, plan: BatchPlan, pages: dict[int, set[int]]) -> None:
        """No page that this plan writes has another owner: live rows, rows of this plan, plans on the stream (S5)."""
        page_size = self.config.page_size
        live = [
            (other_index, other, other.table[: -(-other.reach // page_size)])
            for other_index, other in self.rows.items()
            if other.live and not self.config.multiplexes  # there a table may be stale until its row's next plan
        ]
        stops = plan.stops.copy()
        if plan.speculation is not None:  # branches of a tree lie behind the span of their row
            stops[plan.extend_rows :] += plan.speculation.draft_lengths - plan.speculation.path_lengths()
        for row_index, start, stop in zip(plan.rows.tolist(), plan.starts.tolist(), stops.tolist(), strict=True):
            written = set(self.rows[row_index].table[start // page_size : -(-stop // page_size)])
            for other_index, other, held in live:
                if other_index != row_index and not written.isdisjoint(held):
                    raise KvError(f"b{plan.batch_id} writes pages {sorted(written & set(held))} of r{other.request_id}")
            for launched in self.stream:
                for other_index, used in launched.pages.items():
                    if other_index != row_index and (shared := written & used):
                        raise KvError(f"b{plan.batch_id} writes pages {sorted(shared)}, which row {other_index} of "
                                      f"b{launched.plan.batch_id} in flight uses")  # fmt: skip

    def _check_reads(self, plan: BatchPlan, row: Row, table: list[int], stop: int) -> bool:
        """Every cell below `stop` holds exactly this request's prefix.

        Returns: whether it reads cells of a failed batch, which only a row whose request has left already may do.
        """
        page_size = self.config.page_size
        read = table[: -(-stop // page_size)]
        found = list(chain.from_iterable(map(self.cells.__getitem__, read)))[:stop]
        expected = self._prefix_ids(row, self.stories[row.request_id], stop)[:stop]
        if found == expected:
            return False
        position = next(i for i, pair in enumerate(zip(found, expected, strict=True)) if pair[0] != pair[1])
        if not row.live and found[position] == GARBAGE:
            return True
        what = {NOTHING: "nothing was ever written", GARBAGE: "a failed batch wrote"}.get(
            found[position], "another prefix was written" if found[position] >= 0 else "some layers have no KV"
        )
        raise KvError(f"b{plan.batch_id}: r{row.request_id} reads position {position} in page "
                      f"{table[position // page_size]}, where {what}")  # fmt: skip

    def _spoil(self, plan: BatchPlan) -> None:
        """A batch failed: the KV that its requests computed in it, and in batches behind it, is garbage."""
        failed = set(plan.rows.tolist())
        for row in failed:
            self.rows[row].failed = True
        for launched in self.stream:
            if launched.executed:
                behind = launched.plan
                for i, (row, start, stop) in enumerate(
                    zip(behind.rows.tolist(), behind.starts.tolist(), behind.stops.tolist(), strict=True)
                ):
                    if row in failed:
                        start = launched.starts.get(i, start)
                        stop = start + launched.accepted[i] if i in launched.accepted else stop
                        self._write(launched.tables[row], start, [GARBAGE] * (stop - start))
                        if self.hybrid is not None:
                            self.hybrid.spoil(behind, i, row, start, stop)

    def _newest(self, plan: BatchPlan, row: Row, position: int) -> int:
        if row.newest is None or row.newest[0] != position:
            raise KvError(
                f"b{plan.batch_id} decodes r{row.request_id} at {position}, its newest sample is {row.newest}"
            )
        return row.newest[1]

    def _sample(self, launched: Launched, i: int) -> list[int]:
        plan = launched.plan
        if plan.blocks is not None:
            return []  # its tokens were drawn in the pass
        at = launched.starts[i] + launched.accepted[i] if i in launched.starts else int(plan.stops[i])
        return [self.sample_at(plan, self.rows[int(plan.rows[i])], at)]

    def number_of(self, content: tuple[object, ...]) -> int:
        """Return the prefix id of what a cell holds."""
        return self._interned.setdefault(content, len(self._interned))

    def sample_at(self, plan: BatchPlan, row: Row, position: int, *, forced: bool = False) -> int:
        """Draw the token of a row at a position."""
        story = self.stories[row.request_id]
        token = self.sample(row.request_id, position)
        if row.failed:
            return token
        if row.matcher is not None and row.live and not forced:
            outputs = position - story.prompt_tokens
            must = outputs if story.grammar_ends is None else min(outputs, story.grammar_ends)
            if len(row.matcher) != must:
                raise KvError(f"b{plan.batch_id} samples output {outputs} of r{row.request_id}, whose matcher has seen "
                              f"{len(row.matcher)} of {must}")  # fmt: skip
        if position > len(story.tokens):
            raise KvError(f"b{plan.batch_id} samples r{row.request_id} at {position}, beyond {len(story.tokens)}")
        if position == len(story.tokens):
            story.tokens.append(token)
        elif story.tokens[position] != token:
            raise KvError(f"r{row.request_id} drew {token} at {position}, and {story.tokens[position]} before")
        row.newest = (position, token)
        return token

    def _prefix_ids(self, row: Row, story: Story, stop: int) -> list[int]:
        if self.blocks is not None:
            return self.blocks.prefix_ids(row, story, stop)
        ids = row.prefix_ids
        for position in range(len(ids), min(stop, len(story.tokens))):
            before: object = ids[-1] if ids else (story.namespace, story.adapter, self.weights)
            about = story.about[position] if position < len(story.about) else None
            ids.append(self.number_of((before, story.tokens[position], about)))
        return ids


def drafts_of(launched: Launched, row: int) -> int:
    """The drafts of a row that a plan verifies."""
    return sum(drafts for i, drafts in launched.drafts.items() if int(launched.plan.rows[i]) == row)


def snapshot_of(plan: object) -> bytes:
    """A plan, or a part of it, in bytes, for a later comparison."""
    return msgspec.msgpack.encode(plan, enc_hook=lambda array: array.tobytes())
