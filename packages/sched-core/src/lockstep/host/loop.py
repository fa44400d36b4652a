"""The host loop of the contract for a real device: receive facts, step the engine, journal, perform commands.

    submit, cancel, control ──> inbox ─┐
    executor.ready() ─────────────────>├─ fold(event): step, journal, perform      one thread: the caller of `run`
    wake_at_us ───────────────────────>┘      │
                                              ├─ LaunchBatch, SampleBatch ──> executor
                                              └─ StreamTokens, FinishRequest, RejectRequest ──> the request's sink

Any thread may submit, cancel and send control requests; everything else happens in the thread of `run`. A record leaves
the process before any command that follows from it is performed.

Failures and their effects:

- a model that raises: its batch ends with BatchFinished(error=...), the requests in it with reason "error";
- a command that this host does not support (media, weights, adapters, grammars without encoder, loader or compiler):
  answered with the error event that the contract defines for it;
- a lost device, an impossible plan, a journal that cannot be written, an error in host or core: `run` raises, the sink
  of every open request receives `failed`, and requests are refused from then on. No request waits for ever.
"""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from queue import Empty

import msgspec
import numpy as np

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
    RowTaken,
    SampleBatch,
    StartProfile,
    StartTransfer,
    Step,
    StopProfile,
    StreamTokens,
    SwapWeights,
    WriteToStorage,
)
from lockstep.core.contract.errors import ConfigError, ContractError, LockstepError
from lockstep.core.contract.events import (
    AdapterLoaded,
    BatchFinished,
    BatchId,
    ClockAdvanced,
    Control,
    ControlRequested,
    Drain,
    ExpertsMoved,
    GrammarReady,
    HostTimeClamped,
    LaneReady,
    LoadAdapterControl,
    MediaEncoded,
    ObservedEvent,
    PromptSpan,
    RequestArrived,
    RequestCancelled,
    RequestId,
    TokenIds,
    TokensForced,
    WeightsSwapped,
)
from lockstep.core.contract.samples import sample_count, sample_of
from lockstep.core.journal.sinks import JournalSink
from lockstep.core.scheduler.engine import Engine
from lockstep.core.scheduler.intake import ReceiveSkipper
from lockstep.host.adapters import AdaptersLog, KnownAdapters
from lockstep.host.batches import (
    BatchExecutor,
    BatchResult,
    ContextOf,
    Float32s,
    Int32s,
    RowContext,
    row_context,
    sampled_spans,
)
from lockstep.host.cache_moves import CacheMoves, name_adapter
from lockstep.host.clock import HostClock as HostClock
from lockstep.host.drafts import DraftCounts
from lockstep.host.errors import EngineStopped
from lockstep.host.expert_load import ExpertMeasuring
from lockstep.host.handover.results import unpacked
from lockstep.host.handover.wire import PromptResults
from lockstep.host.idle_check import IdleCheck
from lockstep.host.inbox import Inbox
from lockstep.host.media.content import EncoderInput
from lockstep.host.services import DeviceServices, EarlierGeneration, Observer, RequestServices, TextWatch
from lockstep.host.sinks import Kept, drop_behind_the_end, taken_from, with_logprobs
from lockstep.host.sinks import ResultExtras as ResultExtras
from lockstep.host.sinks import Sink as Sink
from lockstep.host.sinks import TokenLogprobs as TokenLogprobs
from lockstep.host.sinks import UnsentOutput as UnsentOutput
from lockstep.host.stop_regexes import watched_field
from lockstep.host.weights import MaintenanceAnswer, WeightsLog, answer_to

log = logging.getLogger("lockstep.host")

TAKEN_BYTES = 4 * 65_536  # token ids of prompts that are taken in before results of the device come first
IDLE_S = 0.5  # longest sleep with nothing to do; any item in the inbox ends it
SENT_S = 1.0  # longest wait of `fail` for tokens that are being sent, should a sink block
NOT_PROFILED = nullcontext()


@dataclass(slots=True)
class _OpenRequest:
    """The host's record of a request that has not ended."""

    event: RequestArrived
    sink: Sink
    extras: ResultExtras = field(default_factory=ResultExtras)
    logprobs: dict[int, Kept] = field(default_factory=dict)  # by output number
    watch: TextWatch | None = None


@dataclass(frozen=True, slots=True)
class _Submitted:
    event: RequestArrived
    sinks: tuple[Sink, ...]
    contents: tuple[EncoderInput, ...] = ()


@dataclass(frozen=True, slots=True)
class _Cancel:
    request_id: RequestId


@dataclass(frozen=True, slots=True)
class _ControlItem:
    control: Control
    answer: Future[ControlAnswered]


@dataclass(frozen=True, slots=True)
class _Fact:
    """An event from another thread, without its time."""

    make: Callable[[int], ObservedEvent]


NO_REQUEST_SERVICES, NO_DEVICE_SERVICES, FIRST_GENERATION = RequestServices(), DeviceServices(), EarlierGeneration()


class RuntimeHost:
    """One engine, its executor and its journal.

    Args:
        clock: the clock of the executor's lane, so that all times have one origin.
        observe: called with each event and its Step, e.g. to fold metrics.
    Attributes:
        performed: called after the commands of an event, once its sinks have received everything, e.g. to send it.
    """

    def __init__(
        self,
        engine: Engine,
        executor: BatchExecutor,
        journal: JournalSink,
        clock: HostClock,
        *,
        requests: RequestServices = NO_REQUEST_SERVICES,
        device: DeviceServices = NO_DEVICE_SERVICES,
        earlier: EarlierGeneration = FIRST_GENERATION,
        observe: Observer | None = None,
    ) -> None:
        self.engine, self.executor, self.journal, self.clock = engine, executor, journal, clock
        self.failure = ""  # why the host ended; "" while it accepts requests
        self.error: BaseException | None = None  # that ended the host; None if it was stopped, or ended from outside
        self.batches = 0
        self.drafts = DraftCounts()
        self.turns = 0  # turns of the loop: several per second unless a call does not return
        self.events = 0  # that the engine has stepped
        self.idle_check: IdleCheck | None = None  # set before `run`
        self._check_request = requests.check
        self._watch_text = requests.watch_text
        self._compile_grammar = requests.compile_grammar
        self._skipper = ReceiveSkipper(requests.receive_interval) if requests.receive_interval != 1 else None
        self._receives = True  # whether messages are received although batches run
        self._profiler = device.profiler
        self._weight_loader = device.weight_loader
        self._maintaining = False
        self.weights = WeightsLog() if earlier.weights is None else earlier.weights
        self._adapters = device.adapters
        self.adapters_log = AdaptersLog() if earlier.adapters is None else earlier.adapters
        self.adapters = KnownAdapters(0, self.adapters_log.entries())  # replaced, never changed: for any thread
        self._orders = tuple(earlier.orders)
        self.observe = observe
        self.performed: Callable[[], object] | None = None
        self._inbox: Inbox[_Submitted | _Cancel | _ControlItem | _Fact | None] = Inbox()
        self._gate = threading.Lock()  # ids are assigned in the order of the inbox; after the end the inbox gets no
        #                                items; code that removes an entry of `_open` or `_answers` must answer it
        self._sending = threading.RLock()  # held while sinks receive tokens, so that no end comes to them meanwhile
        self._next_request_id = engine.last_request_id + 1
        waiting = [*engine.controls.drains, *(job.control_id for job in engine.maintenance.jobs)]
        self._next_control_id = max(waiting, default=-1) + 1  # answers to earlier control requests are dropped
        self._open: dict[RequestId, _OpenRequest] = {}
        self._answers: dict[int, Future[ControlAnswered]] = {}
        self.moves = CacheMoves(device.mover, lambda make: self._inbox.put(_Fact(make)))
        tiers = engine.config.tiers
        self._stores = tiers is not msgspec.UNSET and tiers.storage
        self.handover = device.handover
        self._encoder = device.encoder
        self._agreement = device.agreement
        self._proposed: tuple[int, dict[RequestId, RowContext]] = (-1, {})  # the last batch proposed, and its contexts
        self._experts, self._expert_mover = ExpertMeasuring(device.experts), device.expert_mover
        self._wake_at_us: int | None = None
        self._nothing_new = False  # since the last LaneReady that launched nothing
        self._to_encode: list[EncodeMedia] = []  # ordered, and given to the encoder before anything is launched
        self._sinkless: dict[RequestId, tuple[PromptSpan, ...]] = {}  # media of requests whose sink has failed
        self._unread: dict[RequestId, tuple[PromptSpan, ...]] = {}  # media of ended requests, to be released
        self._offered, self._tried = -1, 0  # the last offered microbatch; microbatches offered in vain since an event
        self._stop = threading.Event()

    # ------------------------------------------------------------------------------------------- from any thread

    def submit(self, request: RequestArrived, *sinks: Sink, contents: Sequence[EncoderInput] = ()) -> RequestId:
        """Send a request; the host sets its time and its id. A request with n samples takes n ids and needs n sinks.

        Args:
            contents: of its spans.
        Returns: its id, or the id of its first sample.
        Raises: EngineStopped; ValueError for a wrong number of sinks.
        """
        samples = sample_count(request)
        if len(sinks) != samples:
            raise ValueError(f"a request of {samples} samples needs as many sinks, got {len(sinks)}")
        with self._gate:
            self._refuse_after_end()
            request_id = self._next_request_id
            self._next_request_id += samples
            named = msgspec.structs.replace(request, request_id=request_id)
            self._inbox.put(_Submitted(named, sinks, tuple(contents)))
        return request_id

    def adopt(
        self,
        event: RequestArrived,
        sinks: Sequence[Sink],
        unsent: Sequence[UnsentOutput | None],
        contents: Sequence[EncoderInput] = (),
    ) -> None:
        """Resume a request that the engine accepted before a restart. Call it before `run`.

        Args:
            contents: of its spans.
            event: the arrival with its id.
            sinks: one for each sample.
            unsent: for each sample, the output that its sink has not received; None if the sink has received the end.
        Raises: ContractError if the engine does not have the request.
        """
        for number, (sink, remaining) in enumerate(zip(sinks, unsent, strict=True)):
            if remaining is None:
                continue
            request_id = event.request_id + number
            opened = _OpenRequest(sample_of(event, number), sink, logprobs=remaining.logprobs)
            if remaining.tokens:
                logprobs = (
                    taken_from(opened.logprobs, remaining.offset, len(remaining.tokens)) if opened.logprobs else None
                )
                sink.tokens(remaining.offset, remaining.tokens, logprobs)
            request = self.engine.requests.get(request_id)
            match remaining.end:
                case FinishRequest():
                    opened.extras.weights = remaining.weights
                    sink.finished(remaining.end, opened.extras)
                case RejectRequest():
                    sink.rejected(remaining.end)
                case None if request is None:
                    raise ContractError(f"request {request_id} cannot be resumed: the engine does not have it")
                case None:
                    if watched_field(event) and self._watch_text is not None:
                        opened.watch = self._watch_text(opened.event)
                        outputs = np.frombuffer(request.tokens, np.int32)[request.prompt_tokens :]
                        for at, token in enumerate(outputs.tolist()):
                            opened.watch.push(at, token)
                    self._open[request_id] = opened
                    if self._encoder is not None and contents:
                        self._encoder.hold(request_id, contents)

    def cancel(self, request_id: RequestId) -> None:
        """Cancel a request whose client left. Ids of unknown or ended requests are ignored."""
        self._inbox.put(_Cancel(request_id))

    def ask(
        self, control: Control, answered: Callable[[Future[ControlAnswered]], object] | None = None
    ) -> Future[ControlAnswered]:
        """Send a control request; the future receives its answer.

        Args:
            answered: called in the host's thread with the answer. A callback added to the future later may be called
                in the thread that adds it.
        Raises: EngineStopped.
        """
        answer: Future[ControlAnswered] = Future()
        if answered is not None:
            answer.add_done_callback(answered)
        with self._gate:
            self._refuse_after_end()
            self._inbox.put(_ControlItem(control, answer))
        return answer

    def drain(self) -> Future[ControlAnswered]:
        """Reject new requests. The future is answered once all accepted requests have ended."""
        return self.ask(Drain())

    def put_fact(self, make: Callable[[int], ObservedEvent]) -> None:
        """Send a fact to the engine; `make` is called in the host's thread with its time."""
        self._inbox.put(_Fact(make))

    def wake(self) -> None:
        """End a wait of the loop, which then looks again whether a slot can be offered. From any thread."""
        self._inbox.put(None)

    def oldest_batch(self) -> BatchId | None:
        """Return the batch that is collected next; None if none is in flight. From any thread."""
        try:
            return self.engine.in_flight[0].plan.batch_id
        except IndexError:  # the host's thread may collect it at this moment
            return None

    def stop(self) -> None:
        """End `run` before the next fact. The sinks of open requests receive `failed`."""
        self._stop.set()
        self._inbox.put(None)

    def _refuse_after_end(self) -> None:
        if self.failure:
            raise EngineStopped(self.failure)

    # --------------------------------------------------------------------------------------------------- the loop

    def run(self, *, until_idle: bool = False) -> None:
        """Serve until `stop`, or with `until_idle` until all requests submitted so far have ended.

        After `stop` or an error the host has ended; after `until_idle` it may run again.
        Raises: the error that ends the engine, after all open sinks received it.
        """
        try:
            orders, self._orders = self._orders, ()
            for command in orders:
                self._perform(command)
            while not self._stop.is_set():
                self.turns += 1
                self._take_in()
                if self._stop.is_set():
                    break
                self._encode()
                if self._may_launch():
                    self._launch()
                elif self.executor.in_flight:
                    self._await_result()
                elif self._experts.due:
                    self._fold(self._experts.event(self._now()))
                elif until_idle and not self._has_work() and self._inbox.empty():
                    return
                else:
                    self._sleep()
        except BaseException as error:
            self.error = error
            self._end(f"the engine failed: {type(error).__name__}: {error}")
            raise
        self._end("the engine was stopped")

    def fail(self, message: str) -> None:
        """Report a failure of the engine to all open sinks when its own thread cannot. From any thread."""
        try:
            self._end(f"the engine failed: {message}", stuck=True)
        finally:
            self._stop.set()  # after `_end`, or the engine's own thread might report its end first

    def _end(self, message: str, *, stuck: bool = False) -> None:
        """Refuse requests from now on, and report the end to all open sinks. Flush recorded events if possible."""
        with self._gate:
            if self.failure:
                return
            self.failure = message
            waiting: list[Sink] = [request.sink for request in self._open.values()]
            answers = list(self._answers.values())
            self._open.clear()
            self._answers.clear()
        if self._profiler is not None and not stuck:
            self._profiler.stop()  # its trace up to here may show the cause
        with suppress(Empty):  # the host's own thread may take items at the same time
            while True:
                match self._inbox.get_nowait():
                    case _Submitted(_, sinks):
                        waiting += sinks
                    case _ControlItem(_, answer) if answer.set_running_or_notify_cancel():
                        answers.append(answer)
        if stuck and self._sending.acquire(timeout=SENT_S):  # tokens that are being sent come first
            self._sending.release()
        for sink in waiting:
            try:
                sink.failed(message)
            except Exception:
                log.exception("a sink failed while it received the end: %s", message)
        if not stuck:  # only the thread of `run` may use the journal's writer
            try:
                self.journal.flush()
            except LockstepError as error:
                log.error("the end of the journal is lost: %s", error)
        for answer in answers:
            answer.set_exception(EngineStopped(message))
        if self.handover is not None:
            self.handover.end_links()
        if self.performed is not None:
            self.performed()

    def _take_in(self) -> None:
        """Fold all facts: items sent up to now, results of the device, a wake time that has passed."""
        waits = self.executor.in_flight and not self._receives
        sent = (
            0 if waits else self._inbox.qsize()
        )  # excludes items sent meanwhile: an endless sender must not keep the device idle
        taken = 0
        while not self._stop.is_set():
            if sent and taken < TAKEN_BYTES:
                sent -= 1
                try:
                    item = self._inbox.get_nowait()
                except Empty:  # `fail` removed the items
                    return
                if isinstance(item, _Submitted) and isinstance(item.event.prompt, TokenIds):
                    taken += len(item.event.prompt.ids)
                self._receive(item)
            elif self.executor.ready():
                self._collect()
            elif self._experts.ready:
                self._fold(self._experts.event(self._now()))
            elif self._wake_at_us is not None and self.clock() >= self._wake_at_us:
                self._fold(ClockAdvanced(self._now()))
            else:
                return

    def _has_work(self) -> bool:
        handing_over = self.handover is not None and self.handover.busy
        return bool(self.engine.requests or self._maintaining or self.moves.open or handing_over)

    def _may_launch(self) -> bool:
        ranks = self._agreement
        if ranks is not None and ranks.pending:
            return False
        if self._nothing_new and not (ranks is not None and ranks.take_wanted()):
            return False
        if self.engine.microbatches.several:
            return bool(self.engine.open_slots())
        return len(self.engine.in_flight) < self.engine.config.launches_max

    # mechanism: receive-interval (executed)
    def _launch(self) -> None:
        """Offer a free launch slot to the engine; with pipeline stages, the slot of the next microbatch in turn."""
        several, tried = self.engine.microbatches, self._tried
        if several.several:
            self._offered = several.next_slot(self.engine.open_slots(), self._offered)
            plan = self._fold(LaneReady(self._now(), self._offered)).launched()
            if plan is None:
                self._tried = tried + 1
                if self._tried < len(self.engine.open_slots()):
                    return  # another microbatch may have a launch
        else:
            plan = self._fold(LaneReady(self._now())).launched()
        self._nothing_new = plan is None
        if self._skipper is not None:
            self._receives = self._skipper.due(None if plan is None else plan.mode)

    def _await_result(self) -> None:
        """Wait for the result of the oldest batch, an item of the inbox if it is received now, or the wake time.

        While the other ranks have not proposed, a CPU's result waits too: otherwise batches would never overlap there.
        """
        pause_s = self.executor.pause_s()
        if not pause_s and self._agreement is not None and self._agreement.pending and not self.executor.ready():
            pause_s = IDLE_S
        if pause_s and self._receives:
            self._listen(pause_s)
        else:
            self._collect()

    # mechanism: idle-check (executed)
    def _sleep(self) -> None:
        """Wait for an item of the inbox or the wake time. No batch is in flight."""
        if self.idle_check is not None and not self._has_work() and self._inbox.empty():
            self.idle_check.look(self.events)
        self._listen(IDLE_S)

    def _listen(self, timeout_s: float) -> None:
        """Receive the next item of the inbox if one arrives within `timeout_s` seconds and before the wake time."""
        if self._wake_at_us is not None:
            timeout_s = min(timeout_s, max(0, self._wake_at_us - self.clock()) / 1e6)
        try:
            self._receive(self._inbox.get(timeout_s))
        except Empty:
            return

    def _now(self) -> int:
        """Return the time for the next event. A fall of the clock is folded first."""
        now_us = self.clock()
        back_us = self.clock.clamped()
        if back_us:
            self._fold(HostTimeClamped(now_us, back_us))
        return now_us

    def _fold(self, event: ObservedEvent) -> Step:
        """Step the engine with an event, record it, and perform the commands."""
        try:
            step = self.engine.step(event)
        except Exception:
            self.journal.append_unsealed(event)
            raise
        if isinstance(event, ControlRequested | WeightsSwapped):
            self.weights.fold(self.engine, event)
        if self._adapters is not None:
            gone = self.adapters_log.fold(self.engine, event)
            if gone or (isinstance(event, ControlRequested) and isinstance(event.control, LoadAdapterControl)):
                self.adapters = self.adapters.next(self.adapters_log, gone)
            for name in gone:
                self._adapters.forget(name)
        self.events += 1
        self.moves.counts.fold(step)
        self.journal.append(event, step.digest)
        if step.commands:
            self.journal.flush()
        self._wake_at_us = step.wake_at_us
        self._nothing_new, self._tried = self._agreement is not None and self._agreement.fold(event, step), 0
        if self.observe is not None:
            self.observe(event, step)
        if self.handover is not None:
            self.handover.decided(step)
        for command in step.commands:
            self._perform(command)
        if step.commands and self.performed is not None:
            self.performed()
        return step

    # ---------------------------------------------------------------------------------------------------- facts

    def _receive(self, item: _Submitted | _Cancel | _ControlItem | _Fact | None) -> None:
        match item:
            case _Submitted(event, sinks, contents):
                event = msgspec.structs.replace(event, time_us=self._now())
                with self._gate:
                    ended = self.failure
                    if not ended:
                        for number, sink in enumerate(sinks):
                            self._open[event.request_id + number] = _OpenRequest(sample_of(event, number), sink)
                if ended:  # `fail` was called from another thread
                    for sink in sinks:
                        sink.failed(ended)
                    return
                if self.handover is not None:
                    self.handover.arriving(event, contents)
                refused = self._refusal(event)
                if refused is None:
                    if self._encoder is not None and contents:
                        for number in range(len(sinks)):
                            self._encoder.hold(event.request_id + number, contents)
                    self._fold(name_adapter(event, self.adapters_log) if self._stores else event)
                    if self.handover is not None:
                        ids = range(event.request_id, event.request_id + len(sinks))
                        self.handover.arrived(event, [one for one in ids if one in self.engine.transfers.all])
                    return
                if self.handover is not None:
                    self.handover.arrived(event, [])
                for number in range(len(sinks)):
                    self._reject(RejectRequest(event.request_id + number, *refused))
                if self.performed is not None:
                    self.performed()
            case _Cancel(request_id):
                self._fold(RequestCancelled(self._now(), request_id))
            case _ControlItem(control, answer):
                if not answer.set_running_or_notify_cancel():  # from here on the future cannot be cancelled
                    return
                control_id = self._next_control_id
                self._next_control_id += 1
                with self._gate:
                    ended = self.failure
                    if not ended:
                        self._answers[control_id] = answer
                if ended:
                    answer.set_exception(EngineStopped(ended))
                    return
                self._fold(ControlRequested(self._now(), control_id, control))
            case _Fact(make):
                self._fold(make(self._now()))

    def _refusal(self, event: RequestArrived) -> tuple[str, str] | None:
        """Return reason and message if this host cannot serve a request. The engine then never receives it."""
        if self._watch_text is None and (name := watched_field(event)):
            return "unsupported", f"`{name}` need a tokenizer, and this engine has no tokenizer"
        try:
            if self._check_request is not None:
                self._check_request(event)
        except ConfigError as error:
            return "bad_request", str(error).partition("\nhint: ")[0]
        except Exception as error:  # an error about one request ends only this request
            log.exception("a request could not be checked")
            return "bad_request", f"the request could not be checked: {type(error).__name__}: {error}"
        return None

    def _collect(self) -> None:
        """Collect the oldest batch and fold its result."""
        result = self.executor.collect()
        plan, now_us = result.plan, self._now()
        if result.error:
            for request_id in plan.request_ids.tolist():
                if (request := self._open.get(request_id)) is not None:
                    request.extras.error = result.error
            self._fold(BatchFinished(now_us, plan.batch_id, generation=plan.generation, error=result.error))
            if self.handover is not None:
                self.handover.collected(result)
            return
        text_stops, text_held = self._watch(result)
        self._keep(result)
        if plan.speculation is not None:
            self.drafts.fold(plan, result.accepted)
        finished_us = min(result.finished_us, now_us)
        forced = self._forced(result)
        self._fold(
            BatchFinished(
                now_us,
                plan.batch_id,
                result.tokens.astype("<i4", copy=False).tobytes(),
                min(result.started_us, finished_us),
                finished_us,
                plan.generation,
                invalid=result.invalid,
                text_stops=text_stops,
                accepted=result.accepted_bytes(),
                grammar_ended=result.grammar_ended,
                logprobs=b"" if result.logprobs is None else result.logprobs.astype("<f4", copy=False).tobytes(),
                text_held=text_held,
                top_ids=b"" if result.top_ids is None else result.top_ids.astype("<i4", copy=False).tobytes(),
                top_logprobs=b""
                if result.top_logprobs is None
                else result.top_logprobs.astype("<f4", copy=False).tobytes(),
            )
        )
        if self.handover is not None:
            self.handover.collected(result)

        forced = tuple([one for one in forced if one[0] in self.engine.requests])
        if forced:
            self._fold(TokensForced(now_us, plan.generation, forced))

    def extras_of(self, request_id: RequestId) -> ResultExtras | None:
        """Return the results of an open request so far. Only for the host's thread."""
        opened = self._open.get(request_id)
        return None if opened is None else opened.extras

    def take_first_token(self, request_id: RequestId, token: int, results: PromptResults) -> tuple[bool, bool]:
        """Add a token and results of a prompt that another engine computed, before the engine steps them.

        Only for the host's thread.

        Returns: whether the token's text contains a stop text, and whether it may begin one.
        """
        opened = self._open.get(request_id)
        if opened is None:
            return False, False
        kept = unpacked(results, opened.extras)
        if kept is not None:
            opened.logprobs[0] = kept
        if self._watch_text is None or not watched_field(opened.event):
            return False, False
        opened.watch = self._watch_text(opened.event)
        stopped, held = opened.watch.push(0, token)
        return stopped, bool(held)

    def _forced(self, result: BatchResult) -> tuple[tuple[RequestId, int, bytes], ...]:
        """Return the tokens that grammars force after a result: request id, output number, int32 ids.

        Call it before the engine steps the result.
        """
        if not result.forced:
            return ()
        plan = result.plan
        positions, counts = sampled_spans(self.engine, plan, result.accepted)
        found = []
        for i, ids in result.forced:
            request = self.engine.requests.get(int(plan.request_ids[plan.sample_rows[i]]))
            if request is not None:
                found.append((request.request_id, int(positions[i] + counts[i]) - request.prompt_tokens, ids))
        return tuple(found)

    def _watch(self, result: BatchResult) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
        """Return the sampling rows whose text contains a stop text, and (row, tokens) whose tokens may begin one."""
        plan = result.plan
        stops, held = list[int](), list[tuple[int, int]]()
        samplers = self.engine.in_flight[0].samplers
        if self._watch_text is None or plan.steps > 1 or not samplers.watched:
            return (), ()
        firsts = result.firsts()  # rows with stop texts have one token: they verify no drafts
        for i in samplers.watches_text.nonzero()[0].tolist():
            number = int(plan.sample_rows[i])
            request = self._open.get(int(plan.request_ids[number]))
            if request is None:
                continue
            if request.watch is None:
                request.watch = self._watch_text(request.event)
            output = int(plan.stops[number]) - self._prompt_tokens(plan, number)
            stopped, behind = request.watch.push(output, int(result.tokens[firsts[i]]))
            if stopped:
                stops.append(i)
            elif behind:
                held.append((i, behind))
        return tuple(stops), tuple(held)

    def _prompt_tokens(self, plan: BatchPlan, number: int) -> int:
        return self.engine.requests[int(plan.request_ids[number])].prompt_tokens

    def _keep(self, result: BatchResult) -> None:
        """Store results beside tokens by request, until the request ends or its tokens are sent."""
        plan = result.plan
        for judged in result.prompt_logprobs:
            if (request := self._open.get(judged.request_id)) is not None:
                for i, logprob in enumerate(judged.logprobs.tolist()):
                    request.extras.prompt_logprobs[judged.start + i + 1] = logprob
                if judged.top_ids is not None and judged.top_logprobs is not None:
                    pairs = zip(judged.top_ids.tolist(), judged.top_logprobs.tolist(), strict=True)
                    for i, (ids, logprobs) in enumerate(pairs):
                        request.extras.prompt_top_logprobs[judged.start + i + 1] = dict(zip(ids, logprobs, strict=True))
        for hidden in result.hidden_states:
            if (request := self._open.get(hidden.request_id)) is not None:
                for i, state in enumerate(hidden.states):
                    request.extras.hidden_states[hidden.start + i] = state
        for pooled in result.pooled:
            if (request := self._open.get(pooled.request_id)) is not None:
                request.extras.pooled = pooled
        if result.logprobs is None:
            return
        positions, counts = sampled_spans(self.engine, plan, result.accepted)
        at = 0
        for i, number in enumerate(plan.sample_rows.tolist()):
            count = int(counts[i])
            request = self._open.get(int(plan.request_ids[number]))
            if (
                request is not None
                and int(plan.request_ids[number]) in self.engine.requests
                and with_logprobs(request.event)
            ):
                first = int(positions[i]) - self._prompt_tokens(plan, number)
                most = request.event.sampling.logprobs_beside if request.event.sampling is not None else 0
                for j in range(count):
                    tops: tuple[Int32s | None, Float32s | None] = (None, None)
                    if most and result.top_ids is not None and result.top_logprobs is not None:
                        tops = (result.top_ids[at + j, :most], result.top_logprobs[at + j, :most])
                    request.logprobs[first + j] = (float(result.logprobs[at + j]), *tops)
            at += count

    # ------------------------------------------------------------------------------------------------- commands

    def _perform(self, command: Command) -> None:
        match command:
            case LaunchBatch(plan, sample):
                self.batches += 1
                with NOT_PROFILED if self._profiler is None else self._profiler.batch(plan):
                    self.executor.launch(plan, deferred=sample == "deferred", contexts=self._contexts_of(plan))
                self._release_media()
            case ProposeBatch() if self._agreement is not None:
                self._keep_contexts()
                self._agreement.propose(command)
            case SampleBatch(batch_id, advance):
                self.executor.sample(batch_id, advance)
            case StreamTokens():
                with self._sending:
                    self._stream(command)
            case FinishRequest(request_id):
                if (request := self._taken_out(request_id)) is not None:
                    drop_behind_the_end(request.extras, command)
                    request.extras.weights = self.weights.of(request_id)
                    try:
                        request.sink.finished(command, request.extras)
                    except Exception:
                        log.exception("the sink of r%d failed at its end", request_id)
            case RejectRequest():
                self._reject(command)
            case ControlAnswered(control_id):
                with self._gate:
                    answer = self._answers.pop(control_id, None)
                if answer is not None:
                    answer.set_result(command)
            case CompileGrammar():
                self._compile(command)
            case LoadAdapter():
                self._load_adapter(command)
            case EncodeMedia():
                self._to_encode.append(command)
            case SwapWeights() | ReleaseDeviceMemory() | ResumeDeviceMemory():
                self._encode()  # as ordered, ahead of the change
                self._maintain(command)
            case CopyToHost() | LoadFromHost() | PrefetchFromStorage() | WriteToStorage() | CancelPrefetch():
                self.moves.begin(command)
            case StartTransfer() | CancelTransfer() if self.handover is not None:
                self.handover.perform(command)
            case MeasureExpertLoad() if self._experts.meter is not None:
                self._experts.begin()
            case MoveExperts(move_id, layers, placement, generation) if self._expert_mover is not None:
                self._expert_mover.move(layers, placement)
                self._inbox.put(_Fact(lambda now: ExpertsMoved(now, move_id, generation=generation)))
            case StartProfile() if self._profiler is not None:
                self._profiler.start()
            case StopProfile() if self._profiler is not None:
                self._profiler.stop()
            case StartProfile() | StopProfile():
                log.warning("a profile was requested, but this runtime has no profiler")
            case FreezeHeap():
                gc.collect()
                gc.freeze()
            case _:
                # An engine on this host refuses the features with other commands in its settings: docs/contract.md.
                raise ContractError(f"the engine ordered {type(command).__name__}, which this host does not support")

    def _encode(self) -> None:
        """Encode the contents that were ordered since the last call, as one group, which ranks may divide."""
        orders, self._to_encode = self._to_encode, []
        if not orders:
            return
        errors = ["this runtime has no encoder"] * len(orders)
        if self._encoder is not None:
            errors = self._encoder.encode([one.digest for one in orders], [gone for one in orders for gone in one.drop])
        for order, error in zip(orders, errors, strict=True):
            self._inbox.put(_Fact(partial(_encoded, order, error)))

    def _load_adapter(self, order: LoadAdapter) -> None:
        """Start the copy of an adapter into its slot. `place` does it in another thread."""
        generation = self.engine.generation

        def done(error: BaseException | None) -> None:
            if error is None or isinstance(error, ConfigError):
                message = "" if error is None else str(error).partition("\nhint: ")[0]
                self._inbox.put(_Fact(partial(self._adapter_loaded, order, generation, message)))
            else:  # the content of device memory is unknown, so the host must end
                self._inbox.put(_Fact(partial(_raise, error)))

        if self._adapters is None:
            done(ConfigError("this runtime has no adapters"))
        else:
            self._adapters.place(order.adapter, order.version, order.slot, done)

    def _adapter_loaded(self, order: LoadAdapter, generation: int, error: str, now_us: int) -> AdapterLoaded:
        if error:
            log.warning("adapter %s could not be loaded: %s", order.adapter, error)
            failed = (order.adapter, order.version)
            for request in self.engine.waiting:
                if request.adapter == failed and (opened := self._open.get(request.request_id)) is not None:
                    opened.extras.error = error
        return AdapterLoaded(now_us, order.adapter, order.version, error, generation)

    def _maintain(self, order: SwapWeights | ReleaseDeviceMemory | ResumeDeviceMemory) -> None:
        """Change weights or memory of the device in another thread, so that requests can arrive and be cancelled.

        The engine launches no batch meanwhile.
        """
        loader = self._weight_loader
        if loader is None:
            what = "change its weights" if isinstance(order, SwapWeights) else "release or resume its memory"
            self._inbox.put(_Fact(partial(answer_to, order, f"this runtime cannot {what} while it runs")))
            return
        self._maintaining = True

        def work() -> None:
            error = ""
            try:
                match order:
                    case SwapWeights(version, source):
                        loader.load_weights(version, source)
                    case ReleaseDeviceMemory(tags) | ResumeDeviceMemory(tags):
                        loader.switch_memory(tags, released=isinstance(order, ReleaseDeviceMemory))
            except ConfigError as raised:
                error = str(raised).partition("\nhint: ")[0]
            except BaseException as raised:  # the content of device memory is unknown, so the host must end
                self._inbox.put(_Fact(partial(_raise, raised)))
                return
            self._inbox.put(_Fact(partial(self._worked, order, error)))

        threading.Thread(target=work, name="lockstep-device", daemon=True).start()

    def _worked(
        self, order: SwapWeights | ReleaseDeviceMemory | ResumeDeviceMemory, error: str, now_us: int
    ) -> MaintenanceAnswer:
        self._maintaining = False
        if error:
            log.warning("%s failed: %s", type(order).__name__, error)
        return answer_to(order, error, now_us)

    def _context(self, taken: RowTaken) -> RowContext:
        """Return the context of a request that takes a row, for the executor."""
        opened = self._open.get(taken.request_id)  # None after its sink has failed or the host has ended
        return row_context(self.engine.requests[taken.request_id], "generate" if opened is None else opened.event.kind)

    def _keep_contexts(self) -> None:
        """Keep the contexts of a proposed batch: its requests may end before the other ranks have proposed."""
        batch = None if self.engine.ranks is None else self.engine.ranks.held
        if batch is not None and batch.plan.batch_id != self._proposed[0]:
            self._proposed = batch.plan.batch_id, {one.request_id: self._context(one) for one in batch.plan.rows_taken}

    def _contexts_of(self, plan: BatchPlan) -> ContextOf:
        """Return how the executor finds the contexts of the requests that take rows in a plan."""
        proposed, kept = self._proposed
        return (lambda taken: kept[taken.request_id]) if plan.batch_id == proposed else self._context

    def _taken_out(self, request_id: RequestId, *, ended: bool = True) -> _OpenRequest | None:
        """Remove an open request. From then on only the caller may call its sink.

        Its media are released when it has `ended` in the engine, which may read them until then.
        """
        with self._gate:
            opened = self._open.pop(request_id, None)
        if self._encoder is None:
            return opened
        spans = self._sinkless.pop(request_id, ()) if opened is None else opened.event.spans
        if spans and ended:
            self._unread[request_id] = spans
            self._release_media()
        elif spans:
            self._sinkless[request_id] = spans
        return opened

    def _release_media(self) -> None:
        """Release the media of ended requests. A proposed batch may still read them, until its launch."""
        ranks = self.engine.ranks
        if self._encoder is None or not self._unread or (ranks is not None and ranks.held is not None):
            return
        for request_id, spans in self._unread.items():
            self._encoder.release(request_id, spans)
        self._unread.clear()

    def _stream(self, command: StreamTokens) -> None:
        """Send tokens to their sinks. A decode sends to every request, which takes most of the loop's time."""
        find, first = self._open.get, 0
        ids, offsets, tokens = command.request_ids.tolist(), command.offsets.tolist(), command.tokens.tolist()
        for request_id, offset, count in zip(ids, offsets, command.token_counts.tolist(), strict=True):
            stop = first + count
            if (request := find(request_id)) is not None:
                kept = request.logprobs
                try:
                    request.sink.tokens(offset, tokens[first:stop], taken_from(kept, offset, count) if kept else None)
                except Exception:
                    log.exception("the sink of r%d failed: the request is cancelled", request_id)
                    self._taken_out(request_id, ended=False)
                    self.cancel(request_id)
            first = stop

    def _reject(self, command: RejectRequest) -> None:
        if (request := self._taken_out(command.request_id)) is not None:
            try:
                request.sink.rejected(command)
            except Exception:
                log.exception("the sink of r%d failed when it was rejected", command.request_id)

    def _compile(self, command: CompileGrammar) -> None:
        digest = command.grammar.digest

        def answer(error: str) -> None:
            self._inbox.put(_Fact(lambda now: GrammarReady(now, digest, error)))

        if self._compile_grammar is None:
            answer("this runtime has no grammar compiler")
        else:
            self._compile_grammar(command, answer)


def _raise(error: BaseException, now_us: int) -> ObservedEvent:
    """Raise an error of another thread in the host's thread."""
    raise error


def _encoded(order: EncodeMedia, error: str, now_us: int) -> MediaEncoded:
    return MediaEncoded(now_us, order.digest, error, order.generation)
