"""`lockstep.vllm.Scheduler`: vLLM's scheduler interface over `lockstep.core.Engine`.

One class serves synchronous and asynchronous scheduling: with vLLM's `async_scheduling` the core runs with overlap
depth 1, that is, with up to two batches launched and not delivered. With pipeline stages the core has a microbatch for
each of them, and each may have one batch in flight.

The class only translates and keeps order. An event that the core refuses is a fault of this class or of the workers,
and never ignored: the ContractError names the event, and the engine stops.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from msgspec import UNSET

from lockstep.core.contract.commands import (
    CompileGrammar,
    ControlAnswered,
    CopyToHost,
    EncodeMedia,
    FinishRequest,
    LaunchBatch,
    LoadAdapter,
    LoadFromHost,
    RejectRequest,
    SampleBatch,
    Step,
    StreamTokens,
)
from lockstep.core.contract.errors import ContractError
from lockstep.core.contract.events import (
    AdapterLoaded,
    ClockAdvanced,
    Control,
    ControlRequested,
    EngineRestarted,
    FlushUnused,
    GrammarReady,
    LaneReady,
    MediaEncoded,
    ObservedEvent,
    Pause,
    RequestAdmitted,
    RequestCancelled,
    RequestId,
    RequestRetracted,
    Resume,
)
from lockstep.core.requests.table import NO_REQUEST
from lockstep.core.scheduler.engine import Engine
from lockstep.vllm import versions
from lockstep.vllm.adapters import AdapterNames
from lockstep.vllm.groups import KvGroups, kinds_of
from lockstep.vllm.media import DIGEST_BYTES, EncoderInputs
from lockstep.vllm.plans import OutputBuilder, empty_output
from lockstep.vllm.recording import NoRecording, Recording, begin_recording
from lockstep.vllm.requests import Tracked, arrival
from lockstep.vllm.results import STATUS, ClientOutputs, LaunchedBatch, batch_finished
from lockstep.vllm.settings import read_settings, sched_config
from lockstep.vllm.tiers import HostCopies
from vllm.logger import init_logger
from vllm.multimodal import MULTIMODAL_REGISTRY, MultiModalRegistry
from vllm.multimodal.encoder_budget import MultiModalBudget
from vllm.v1.core.sched.interface import PauseState, SchedulerInterface
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.engine import EngineCoreEventType, EngineCoreOutputs
from vllm.v1.metrics.stats import PrefixCacheStats, SchedulerStats
from vllm.v1.request import Request, RequestStatus
from vllm.v1.spec_decode.metrics import SpecDecodingStats

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
    from vllm.v1.structured_output import StructuredOutputManager

logger = init_logger("vllm.lockstep")


class Scheduler(SchedulerInterface):
    """Schedules vLLM's requests by the decisions of Lockstep's core."""

    connector = None  # vLLM's engine core reads both; of HostTier only the workers have an object
    ec_connector = None

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        structured_output_manager: StructuredOutputManager,
        block_size: int,
        hash_block_size: int | None = None,
        mm_registry: MultiModalRegistry = MULTIMODAL_REGISTRY,
        include_finished_set: bool = False,
        log_stats: bool = False,
    ) -> None:
        """Raises ConfigError for a vLLM version or a configuration that is not supported."""
        version = versions.installed_version()
        versions.check_version(version)
        settings = read_settings(vllm_config.additional_config)
        encoder = None
        if vllm_config.model_config.supports_multimodal_inputs:
            encoder = MultiModalBudget(vllm_config, mm_registry)
        config = sched_config(vllm_config, kv_cache_config, settings, block_size, encoder)
        hybrid = config.hybrid if config.hybrid is not UNSET else None
        self.config = config
        self.log_stats = log_stats
        self.structured_output_manager = structured_output_manager
        self._began = time.monotonic()
        self._recording: Recording | NoRecording = begin_recording(settings, config, vllm_config, version)
        self._engine = Engine(config, digests=self._recording.present)
        self._media = EncoderInputs(
            budget_tokens=0 if encoder is None else encoder.encoder_compute_budget,
            look_ahead=vllm_config.num_prefill_lookahead_tokens,
            key=os.urandom(DIGEST_BYTES),
        )
        self._output_builder = OutputBuilder(
            tokens_max=vllm_config.scheduler_config.max_num_batched_tokens,
            context_tokens_max=vllm_config.model_config.max_model_len,
            groups=KvGroups(
                kinds_of(kv_cache_config),
                config.pages,
                hybrid.window_pages if hybrid is not None else 0,
                hybrid.state_slots if hybrid is not None else 0,
            ),
            drafts_stay=bool(vllm_config.scheduler_config.async_scheduling),
            v2_runner=vllm_config.use_v2_model_runner,
            sends_tokens=vllm_config.parallel_config.pipeline_parallel_size > 1,
            uses_mrope=vllm_config.model_config.uses_mrope,
            media=self._media,
        )
        self._draft_tokens: int = vllm_config.num_speculative_tokens
        self._spec_stats: SpecDecodingStats | None = None
        self.requests: dict[str, Request] = {}
        self._tracked: dict[RequestId, Tracked] = {}
        self._core_ids: dict[str, RequestId] = {}
        self._adapters = AdapterNames()
        self._copies = HostCopies(present=config.tiers is not UNSET)
        self._next_core_id = 0
        self._next_control_id = 0
        self._grammars: dict[bytes, Request] = {}  # requests whose grammar vLLM still compiles, by digest
        self._launched: deque[LaunchedBatch] = deque()  # oldest first
        self._stages: int = vllm_config.parallel_config.pipeline_parallel_size  # and as many microbatches
        self._microbatch = 0  # the newest that was launched
        self._finished_us = 0  # when the newest result came
        self._wake_at_us: int | None = None
        self._stopped = ""  # what the core raised; no event is taken in behind that
        self._outputs = ClientOutputs()
        self._cancelling: set[str] = set()  # requests that vLLM itself ends: no output is due
        self._finished: set[str] = set()  # ended since the last schedule(); the next output names them for the workers
        self._preempted: set[str] = set()  # likewise retracted, for model runner V2
        self._finished_by_client: dict[int, set[str]] | None = {} if include_finished_set else None
        self._pause_state = PauseState.UNPAUSED
        self._prefix_cache = PrefixCacheStats()
        self._answers: dict[int, ControlAnswered] = {}
        logger.info(
            "Lockstep schedules: profile %s, %d pages of %d tokens, overlap depth %d, journal %s",
            settings.profile, config.pages, config.page_size, config.overlap_depth, settings.journal or "off",
        )  # fmt: skip

    # ------------------------------------------------------------------------------------------------- into the core

    def _now_us(self) -> int:
        return int((time.monotonic() - self._began) * 1e6)

    def _take_in(self, event: ObservedEvent, samplers: tuple[RequestId, ...] = ()) -> Step:
        """Fold one event, record it, and carry out what is not specific to the caller."""
        if self._stopped:
            raise ContractError(f"{type(event).__name__} after the engine stopped: {self._stopped}")
        try:
            step = self._engine.step(event)
        except Exception as error:  # any: an event with this outcome is never followed by another
            self._stopped = f"{type(error).__name__}: {error}"
            self._recording.append_refused(event, samplers, error)
            logger.error("the core refused %s, the engine stops: %s", type(event).__name__, self._stopped)
            raise
        self._recording.append(event, step, samplers)
        self._wake_at_us = step.wake_at_us
        for decided in step.decided:
            if isinstance(decided, RequestAdmitted):
                self._admitted(decided)
            elif isinstance(decided, RequestRetracted):
                self._retracted(decided)
        return step

    def _fold(self, event: ObservedEvent) -> None:
        """Fold an event that launches nothing."""
        self._perform(self._take_in(event))

    def _perform(self, step: Step) -> None:
        """Carry out the commands of a step that launches nothing and streams nothing."""
        for command in step.commands:
            match command:
                case FinishRequest():
                    self._finish(command, [])
                case RejectRequest():
                    self._reject(command)
                case ControlAnswered():
                    self._answers[command.control_id] = command
                case CompileGrammar():
                    pass  # vLLM compiles it already; `_poll_grammars` reports the outcome
                case EncodeMedia():
                    self._media.ask(command)
                case CopyToHost() | LoadFromHost():
                    self._copies.order(command)
                case LoadAdapter(adapter, version):
                    self._fold(AdapterLoaded(self._now_us(), adapter, version, generation=self._engine.generation))
                case SampleBatch():
                    pass  # vLLM's engine core samples a deferred batch once the result before it is in
                case _:
                    raise TypeError(f"no handler of {type(command).__name__} outside of a launch")

    def _admitted(self, event: RequestAdmitted) -> None:
        entry = self._tracked[event.request_id]
        request, resumed = entry.request, entry.sent
        request.status = RequestStatus.RUNNING
        if self.log_stats:
            request.record_event(EngineCoreEventType.SCHEDULED)
            self._prefix_cache.record(request.num_tokens, event.cached_tokens, preempted=resumed)
        if request.prefill_stats is not None and not resumed:
            request.prefill_stats.set(request.num_prompt_tokens, min(event.cached_tokens, request.num_prompt_tokens), 0)

    def _retracted(self, event: RequestRetracted) -> None:
        self._preempt(self._tracked[event.request_id].request)

    def _preempt(self, request: Request) -> None:
        request.status = RequestStatus.PREEMPTED
        request.num_preemptions += 1
        self._preempted.add(request.request_id)
        if self.log_stats:
            request.record_event(EngineCoreEventType.PREEMPTED)

    def _finish(self, command: FinishRequest, tokens: list[int], result: ModelRunnerOutput | None = None) -> None:
        """End a request: its client gets an output unless vLLM ended it; the workers free it with the next step."""
        entry = self._forget(command.request_id)
        request = entry.request
        status = STATUS[command.reason]  # type: ignore[index]  # the contract's reasons
        if request.request_id in self._cancelling:
            self._cancelling.discard(request.request_id)
        else:
            self._outputs.add(entry, tokens, result, status)

    def _reject(self, command: RejectRequest) -> None:
        """A request that never ran ended with an error."""
        entry = self._forget(command.request_id)
        if entry.request.request_id in self._cancelling:
            self._cancelling.discard(entry.request.request_id)
            return
        logger.error("request %s is rejected: %s: %s", entry.request.request_id, command.reason, command.message)
        self._outputs.add(entry, [], None, RequestStatus.FINISHED_ERROR)

    def _forget(self, core_id: RequestId) -> Tracked:
        entry = self._tracked.pop(core_id)
        request = entry.request
        del self.requests[request.request_id], self._core_ids[request.request_id]
        self._output_builder.drafts.pop(request.request_id, None)
        self._media.forget(request.request_id)
        self._grammars = {digest: other for digest, other in self._grammars.items() if other is not request}
        self._finished.add(request.request_id)
        self._tell_client(request)
        return entry

    def _tell_client(self, request: Request) -> None:
        """Name an ended request to its client, which counts the requests of each data-parallel engine."""
        if self._finished_by_client is not None:
            self._finished_by_client.setdefault(request.client_index, set()).add(request.request_id)

    # ----------------------------------------------------------------------------------------------------- vLLM's calls

    def add_request(self, request: Request) -> None:
        """Take in a new request. A request that can never run is answered with an error output."""
        if request.resumable:  # an error here would end the engine for all requests
            logger.error(
                "request %s: streaming input (resumable) is not supported by lockstep.vllm", request.request_id
            )
            self._outputs.add(Tracked(request, NO_REQUEST), [], None, RequestStatus.FINISHED_ERROR)
            self._tell_client(request)
            return
        if request.request_id in self.requests:
            raise ValueError(f"request {request.request_id}: a request with this id has not ended")
        core_id = self._next_core_id
        self._next_core_id += 1
        self.requests[request.request_id] = request
        self._core_ids[request.request_id] = core_id
        self._tracked[core_id] = Tracked(request, core_id)
        if self.log_stats:
            request.record_event(EngineCoreEventType.QUEUED)
        adapter, load = self._adapters.name_of(request.lora_request)
        if load is not None:
            self._control(load)
        event = arrival(
            request,
            core_id,
            self._now_us(),
            reads_tokens=self.config.radix_cache,
            adapter=adapter,
            spans=self._media.spans_of(request),
        )
        if event.grammar is not None:
            self._grammars[event.grammar.digest] = request
        self._fold(event)

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus) -> list[Request]:
        """End requests for vLLM: clients that left, and stop strings that the front end found. None: all requests."""
        if request_ids is None:
            names = list(self.requests)
        else:
            names = [request_ids] if isinstance(request_ids, str) else list(dict.fromkeys(request_ids))
        ended = []
        for name in names:
            request = self.requests.get(name)
            if request is None:
                continue
            self._cancelling.add(name)
            self._fold(RequestCancelled(self._now_us(), self._core_ids[name]))
            request.status = finished_status
            ended.append(request)
        return ended

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Plan the next pass. Nothing to run gives an output without tokens."""
        output = empty_output()
        if self._grammars:
            self._poll_grammars()
        for encoded in self._media.answers():
            self._encoded(encoded)
        now_us = self._now_us()
        if self._wake_at_us is not None and self._wake_at_us <= now_us:
            self._fold(ClockAdvanced(now_us))
        step, launch = self._offer_slots(now_us)
        if launch is not None:
            self._launch(launch, output, now_us)
            step.commands.remove(launch)
        else:
            self._output_builder.forget_previous()
            answer = None if self._launched else self._media.answer_one()
            if answer is not None:
                self._encoded(answer)
        self._perform(step)
        output.finished_req_ids, self._finished = self._finished, set()
        output.free_encoder_mm_hashes = self._media.freed()
        output.preempted_req_ids, self._preempted = self._preempted, set()
        self._copies.send(output)
        return output

    def _offer_slots(self, now_us: int) -> tuple[Step, LaunchBatch | None]:
        """Offer the core a launch slot. With pipeline stages, each microbatch without a batch in flight has its turn.

        Returns: the step of the last offer, whose commands are to be carried out, and what it launches.
        """
        if self._stages == 1:
            step = self._take_in(LaneReady(now_us))
            return step, launched_by(step)
        busy = {batch.plan.microbatch for batch in self._launched}
        step = Step()
        for turn in range(1, self._stages + 1):
            microbatch = (self._microbatch + turn) % self._stages
            if microbatch in busy:  # its requests wait for their results
                continue
            self._perform(step)
            step = self._take_in(LaneReady(now_us, microbatch))
            if (launch := launched_by(step)) is not None:
                self._microbatch = microbatch
                return step, launch
        return step, None

    def _encoded(self, command: EncodeMedia) -> None:
        """Answer an order to encode: the workers do so in the pass that needs it."""
        self._fold(MediaEncoded(self._now_us(), command.digest, "", command.generation))

    def _launch(self, launch: LaunchBatch, output: SchedulerOutput, now_us: int) -> None:
        plan, tracked = launch.plan, self._tracked
        self._output_builder.build(plan, tracked, output)
        output.num_spec_tokens_to_schedule = self._draft_tokens
        ids = plan.request_ids[plan.sample_rows].tolist()
        samplers = [tracked[core_id] for core_id in ids]
        if any(entry.request.use_structured_output for entry in samplers):
            output.has_structured_output_requests = True
            output.pending_structured_output_tokens = plan.sample_after is not None
        self._launched.append(LaunchedBatch(plan, samplers, now_us))

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Fold the result of the oldest pass; return what clients get."""
        for answer in self._copies.answers(self._now_us()):  # made before the pass
            self._fold(answer)
        if scheduler_output.total_num_scheduled_tokens:
            self._collect(model_runner_output)
            if scheduler_output.scheduled_spec_decode_tokens and self.log_stats:
                self._count_drafts(scheduler_output, model_runner_output)
        taken = self._outputs.take()
        if self._finished_by_client:
            for client, names in self._finished_by_client.items():
                taken.setdefault(client, EngineCoreOutputs()).finished_requests = names
            self._finished_by_client = {}
        if (stats := self.make_stats()) is not None:
            stats.cudagraph_stats = model_runner_output.cudagraph_stats
            if not taken:
                taken[0] = EngineCoreOutputs()
            next(iter(taken.values())).scheduler_stats = stats
        return taken

    def _collect(self, result: ModelRunnerOutput) -> None:
        batch = self._launched.popleft()
        now_us = self._now_us()
        event, tokens = batch_finished(batch, result, max(batch.launched_us, self._finished_us), now_us)
        self._finished_us = now_us
        alive = self._tracked
        step = self._take_in(event, tuple(entry.core_id for entry in batch.samplers))
        ends = {one.request_id: one for one in step.commands if isinstance(one, FinishRequest)}
        streamed = [one for one in step.commands if isinstance(one, StreamTokens)]
        step.commands = [one for one in step.commands if not isinstance(one, StreamTokens | FinishRequest)]
        due: dict[RequestId, int] = {}
        for message in streamed:
            due.update(zip(message.request_ids.tolist(), message.token_counts.tolist(), strict=True))
        outputs, manager = self._outputs, self.structured_output_manager
        refused: list[str] = []
        if result.prompt_logprobs_dict:  # the workers return them once, even if the token beside them is dropped
            for entry in batch.samplers:
                computed = result.prompt_logprobs_dict.get(entry.request.request_id)
                entry.prompt_logprobs = computed if computed is not None else entry.prompt_logprobs
        for entry, sampled in zip(batch.samplers, tokens, strict=True):
            core_id = entry.core_id
            count = due.get(core_id)
            if count is None:
                continue  # the request left after the launch
            new = sampled if count == len(sampled) else sampled[:count]
            entry.outputs.extend(new)
            entry.tokens.extend(new)
            if entry.request.use_structured_output and not manager.accept_tokens(entry.request, new):
                refused.append(entry.request.request_id)
            end = ends.pop(core_id, None)
            if end is not None:
                self._finish(end, new, result)
            elif core_id in alive:
                outputs.add(entry, new, result)
        for end in ends.values():
            self._finish(end, [], result)
        self._perform(step)
        for name in refused:
            if name in self.requests:
                logger.error("request %s: its grammar refused a token that was sampled under its mask", name)
                entry = self._tracked[self._core_ids[name]]
                self.finish_requests(name, RequestStatus.FINISHED_ERROR)
                self._outputs.add(entry, [], None, RequestStatus.FINISHED_ERROR)

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> GrammarOutput | None:
        """Return the masks of the newest launched pass, in the order of its sampling rows."""
        if not scheduler_output.has_structured_output_requests:
            return None
        names = [
            entry.request.request_id
            for entry in self._launched[-1].samplers
            if entry.request.use_structured_output and entry.request.request_id in self.requests
        ]
        if not names:
            return None
        drafts = scheduler_output.scheduled_spec_decode_tokens
        mask = self.structured_output_manager.grammar_bitmask(self.requests, names, drafts)
        return GrammarOutput(names, mask, [len(drafts.get(name, ())) for name in names])

    def _poll_grammars(self) -> None:
        """Report grammars that vLLM has compiled since the last look, or could not compile."""
        for digest, request in list(self._grammars.items()):
            structured = request.structured_output_request
            grammar = None if structured is None else structured.grammar
            if grammar is None:
                continue
            del self._grammars[digest]
            if not isinstance(grammar, Exception):
                request.status = RequestStatus.WAITING
            self._fold(GrammarReady(self._now_us(), digest, str(grammar) if isinstance(grammar, Exception) else ""))

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """Keep the drafts that the workers propose; the next plan decides how many of them are verified."""
        drafts = self._output_builder.drafts
        for name, tokens in zip(draft_token_ids.req_ids, draft_token_ids.draft_token_ids, strict=True):
            request = self.requests.get(name)
            if request is not None:
                drafts[name] = self.structured_output_manager.validate_tokens(request, tokens)

    def update_draft_token_ids_in_output(
        self, draft_token_ids: DraftTokenIds, scheduler_output: SchedulerOutput
    ) -> None:
        """Leave the placeholders as they are.

        vLLM calls this with asynchronous scheduling, so that the masks of drafts can be computed. Requests with
        structured output have no drafts.
        """

    def _count_drafts(self, output: SchedulerOutput, result: ModelRunnerOutput) -> None:
        """Add the drafts of a pass to vLLM's statistics."""
        if self._spec_stats is None:
            self._spec_stats = SpecDecodingStats.new(self._draft_tokens)
        for name, drafts in output.scheduled_spec_decode_tokens.items():
            right = len(result.sampled_token_ids[result.req_id_to_index[name]]) - 1
            self._spec_stats.observe_draft(num_draft_tokens=len(drafts), num_accepted_tokens=right)

    # -------------------------------------------------------------------------------------------------- control, state

    def _control(self, control: Control) -> ControlAnswered | None:
        """Hand the core an operator's order. Returns its answer, or None if that is still to come."""
        control_id = self._next_control_id
        self._next_control_id += 1
        self._fold(ControlRequested(self._now_us(), control_id, control))
        return self._answers.pop(control_id, None)

    def get_num_unfinished_requests(self) -> int:
        """Return how many requests have work to do."""
        match self._pause_state:
            case PauseState.PAUSED_ALL:
                return 0
            case PauseState.PAUSED_NEW:
                return self._engine.active
        return len(self.requests)

    def has_request(self, request_id: str) -> bool:
        """Whether the request has not ended. vLLM calls this since 0.33."""
        return request_id in self.requests

    def has_finished_requests(self) -> bool:
        """Whether workers or clients are still to be informed of ended requests, or of copies to the host."""
        return bool(self._finished or self._outputs.by_client or self._copies.is_busy)

    @property
    def pause_state(self) -> PauseState:
        """What vLLM paused."""
        return self._pause_state

    def set_pause_state(self, pause_state: PauseState) -> None:
        """Pause or resume. PAUSED_NEW stops admission only: running requests go on, retracted ones wait."""
        if pause_state == self._pause_state:
            return
        if self._pause_state == PauseState.PAUSED_ALL or pause_state == PauseState.UNPAUSED:
            self._control(Resume())
        if pause_state != PauseState.UNPAUSED:
            self._control(Pause("in_place" if pause_state == PauseState.PAUSED_ALL else "admission"))
        self._pause_state = pause_state

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Empty the prefix cache. Returns whether it was emptied: not while requests run, unless they are retracted.

        With `reset_running_requests` all device state counts as lost: every running request is retracted, and results
        of passes in flight are dropped.
        """
        if reset_running_requests:
            running = [one.request for one in self._tracked.values() if one.request.status == RequestStatus.RUNNING]
            self._media.void()
            self._copies.void()
            self._fold(EngineRestarted(self._now_us(), self._engine.generation + 1))
            for request in running:  # the core decides no retraction of each: all of them wait again
                self._preempt(request)
                request.num_computed_tokens = 0
            self._output_builder.forget_previous()
            return True
        answer = self._control(FlushUnused())
        return answer is not None and answer.ok

    def reset_encoder_cache(self) -> None:
        """Encode multimodal items again when they are next needed; the workers' cache is emptied by vLLM."""
        self._media.outdate()

    def get_request_counts(self) -> tuple[int, int]:
        """Return (running, waiting) requests."""
        running = self._engine.active
        return running, len(self.requests) - running

    def get_kv_cache_usage(self) -> float:
        """Return the share of KV blocks that running requests hold."""
        memory = self._engine.memory
        return 1.0 - memory.available_pages / self.config.pages

    def make_stats(self) -> SchedulerStats | None:
        """Return the figures of vLLM's metrics; None if they are not logged."""
        if not self.log_stats:
            return None
        running, waiting = self.get_request_counts()
        stats = SchedulerStats(
            num_running_reqs=running,
            num_waiting_reqs=waiting - len(self._grammars),
            num_skipped_waiting_reqs=len(self._grammars),
            kv_cache_usage=self.get_kv_cache_usage(),
            prefix_cache_stats=self._prefix_cache,
            spec_decoding_stats=self._spec_stats,
        )
        self._prefix_cache, self._spec_stats = PrefixCacheStats(), None
        return stats

    def shutdown(self) -> None:
        """Close the journal."""
        self._recording.close()

    def engine_state(self) -> Any:
        """Return the core, for tests and debuggers; not to be changed."""
        return self._engine


def launched_by(step: Step) -> LaunchBatch | None:
    """Return the launch among the commands of a step."""
    return next((command for command in step.commands if isinstance(command, LaunchBatch)), None)
