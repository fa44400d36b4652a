"""A model in this process, with the whole engine around it.

    from lockstep.runtime import LLM, Params

    with LLM() as llm:                                   # the small demo model; or a Hugging Face folder
        for answer in llm.generate(["def ", "import "], Params(max_new_tokens=20)):
            print(answer.text)
        for piece in llm.stream("Returns"):
            print(piece.text, end="")

Requests use the same scheduler as on a server: radix cache, chunks, retraction, overlap. The engine runs in a thread of
its own, so any number of threads may send requests at once. With `journal` every decision is recorded, and
`lockstep journal verify` derives the decisions again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import chain
from numbers import Integral
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Literal, Self, cast

import msgspec
import numpy as np

from lockstep.core.admin.maintenance import MEMORY_TAGS
from lockstep.core.contract.commands import ControlAnswered, ExpertRecord
from lockstep.core.contract.errors import ConfigError, LockstepError
from lockstep.core.contract.events import (
    Control,
    GetState,
    Profile,
    RecordExpertLoad,
    ReleaseMemory,
    RequestArrived,
    RequestKind,
    ResumeMemory,
    TokenIds,
    UpdateWeights,
)
from lockstep.core.contract.rank_settings import settings_of_rank
from lockstep.core.contract.samples import sample_count
from lockstep.core.contract.stats import Stats
from lockstep.core.journal.records import JournalHeader
from lockstep.core.journal.sinks import NoJournal
from lockstep.core.journal.writer import JournalWriter
from lockstep.core.requests.table import prompt_bytes
from lockstep.core.requests.validation import stop_tokens_of
from lockstep.core.scheduler.engine import Engine
from lockstep.host.adapters import LORA_OFF, LORAS, AdapterRegistry, source_of
from lockstep.host.batches import Int32s
from lockstep.host.cache_moves import MoveCounts
from lockstep.host.drafts import DraftCounts, DraftingRanks, check_draft_model, draft_method
from lockstep.host.durable import DurableJournal
from lockstep.host.errors import EngineStopped
from lockstep.host.expert_load import ExpertMeter, ExpertMover
from lockstep.host.grammar_backends import choose_backend
from lockstep.host.grammar_compiler import make_compilers
from lockstep.host.grammars import make_grammar
from lockstep.host.handover.decode import DecodeSide
from lockstep.host.handover.prefill import PrefillSide
from lockstep.host.host_header import RUNTIME, HostHeader
from lockstep.host.loop import HostClock, RuntimeHost
from lockstep.host.media.content import EncoderInput, MediaPrompt
from lockstep.host.media.conversation import as_config_error, prompt_with, with_media
from lockstep.host.media.encoding import MediaEncoder
from lockstep.host.media.kinds import KINDS
from lockstep.host.media.processor import MediaError, MediaProcessor
from lockstep.host.media.source import MediaLimits
from lockstep.host.page_store import StoreCounts
from lockstep.host.services import DeviceServices, EarlierGeneration, RequestServices
from lockstep.host.stop_regexes import Watch, watch_of
from lockstep.host.text import Message, Text
from lockstep.host.weights import (
    Folder,
    Source,
    WeightLoader,
    WeightsLog,
    WeightsRead,
    check_lasting,
    read_source,
    stamp_of,
    write_source,
)
from lockstep.runtime import watchdog
from lockstep.runtime.assembly import assemble, choose_device, device_name, usual_context
from lockstep.runtime.bubbles import BubbleTimer, DeviceTime
from lockstep.runtime.data_ranks import DataRanks, FixedWeights, check_shared
from lockstep.runtime.draft_sources import check_draft_fits
from lockstep.runtime.engine_config import LORA_RANK_MAX, EngineConfig
from lockstep.runtime.expert_meter import DeviceMeter, LeadMeter
from lockstep.runtime.expert_moves import LeadExpertMover, RankExpertMover
from lockstep.runtime.graphs import (
    check_graph_mode,
)
from lockstep.runtime.live import LiveModel
from lockstep.runtime.lora.host_cache import HostAdapterCache, LocalAdapters
from lockstep.runtime.memory_saver import check_memory_saver
from lockstep.runtime.models import read_settings
from lockstep.runtime.models.stage import ExpertSplit
from lockstep.runtime.outputs import (
    OutputDelta,
    PendingRequest,
    RequestOutput,
    Scored,
    scored_at_once,
    scored_by_label,
)
from lockstep.runtime.params import (
    ClassifiedPrompt,
    Params,
    Prompt,
    check_params,
    listed_prompts,
    params_of_each,
    sampling_of,
    seed_of,
    token_ids_of,
    types_of,
    with_embeddings,
)
from lockstep.runtime.pooling import choose_pooling
from lockstep.runtime.profiler import TorchProfiler, options_of
from lockstep.runtime.quantized.activations import choose_activations
from lockstep.runtime.rank_wire import RankSettings
from lockstep.runtime.ranks import GRACE_S, LeadAdapters, LeadMedia, LeadModel, RankGroup, check_split, end_hard_at_exit
from lockstep.runtime.sampling import (
    check_allowed,
    check_sampling,
    processors,
)
from lockstep.runtime.sources import find_model
from lockstep.runtime.stages import check_stages
from lockstep.runtime.tiers.lead import LeadMover
from lockstep.runtime.transfer.lead import EngineTransport
from lockstep.runtime.warmup import warm_up as run_warm_up
from lockstep.runtime.weights_group import Backend

log = logging.getLogger("lockstep.runtime")

LIMITS = MediaLimits(images=64, audios=64, videos=64)
"""Limits of media in `LLM.chat`."""
UpdateMode = Literal["wait", "retract", "cancel", "in_place"]
JOIN_S = 0.2  # interval of the checks whether the engine's thread can still end


@dataclass(frozen=True, slots=True)
class LlmStats:
    """State of an LLM at one moment."""

    engine: Stats
    device: DeviceTime
    batches: int  # launched so far
    drafts: DraftCounts  # results of verified drafts
    tiers: MoveCounts  # moves between the device, host memory and storage
    store: StoreCounts | None  # of the storage, on rank 0; None without storage


class LLM:
    """A model with its engine.

    Args:
        model: a Hugging Face folder, a GGUF file, or the name of a published model (`sources`); None: the demo model.
        config: settings of the engine.
        options: fields of `EngineConfig`, and of SchedConfig, by name; they override those of `config`.
    Raises: ConfigError; RankLost if another rank fails before the engine runs.
    """

    def __init__(self, model: str | Path | None = None, config: EngineConfig | None = None, **options: Any) -> None:
        config = (EngineConfig() if config is None else config).with_options(options)
        config.check()
        self._media_processor: MediaProcessor | None = None
        keeper, journal, text, seed = config.keeper, config.journal, config.text, config.seed
        tp, draft_model = config.tp, config.draft_model
        fp8_activations, backend = config.fp8_activations, config.model_backend
        sched = dict(config.sched)
        if config.pp > 1:
            sched = {"pp_size": config.pp} | sched
        if config.data_rank is not None:
            sched = settings_of_rank(sched, config.data_rank.ranks, usual={}) | {"dp_rank": config.data_rank.rank}
        packages = processors.versions(config.logit_processors)
        if draft_model is not None:
            sched = {"speculative_method": draft_method(draft_model)} | sched
        folder = demo_folder() if model is None else find_model(model)
        self.folder = folder
        where = choose_device(config.device)
        check_graph_mode(config.cuda_graphs, where, config.cuda_graph_max_batch, config.piecewise_graph_max_tokens)
        check_memory_saver(config.memory_saver, where)
        self.pooling = choose_pooling(folder, config.pooling, config.normalize)
        if not 1 <= config.max_lora_rank <= LORA_RANK_MAX:
            raise ConfigError(f"`max_lora_rank` must be 1 to {LORA_RANK_MAX}, got `{config.max_lora_rank}`")
        if config.lora:
            sched.setdefault("max_loras", LORAS)
        sources = {name: source_of(path) for name, path in config.lora.items()}
        if keeper is not None and keeper.config is not None:
            sched = keeper.settings(sched)
            sched.pop("experts", None)
            sched.pop("multiplexing", None)
            sched.pop("tiers", None)  # they follow from the options again; the keeper compares them
        if sources and not sched["max_loras"]:
            raise ConfigError("`lora` names adapters, but `max_loras` is 0, which is no LoRA\nhint: leave it out")
        of_draft = DraftingRanks(1, config.pp, tp) if config.data_rank is not None else DraftingRanks(tp, config.pp)
        check_draft_model(draft_model, sched.get("speculative_method"), of_draft)
        weights = WeightsLog() if keeper is None else keeper.weights
        if weights.version:
            check_lasting(weights.version, read_source(weights.source))
        drafts_from = None if draft_model is None else str(find_model(draft_model, setting="draft_model").resolve())
        shared = config.rank_options() | {
            "logit_processors": tuple(config.logit_processors),
            "draft_model": drafts_from,
        }
        settings = RankSettings(
            model=str(folder.resolve()),
            random_weights_seed=config.random_weights,
            pooling=self.pooling,
            debug=config.debug,
            sched=sched,
            **shared,
        )
        self.text = Text(folder) if text is None and (folder / "tokenizer.json").is_file() else text
        self.seed = seed
        clock = HostClock(start_us=0 if keeper is None else keeper.start_us)
        self._bubbles = BubbleTimer()
        self._profiler = TorchProfiler(where)
        self.group: RankGroup | None = None
        self.data_ranks: DataRanks | None = None
        self._journal: JournalWriter | DurableJournal | None = None
        with ExitStack() as undo:
            if fp8_activations == "on":  # before ranks are started
                choose_activations(fp8_activations, read_settings(folder, backend=backend).quantization, where)
            if config.data_rank is not None:
                check_shared(read_settings(folder, backend=backend), config.attention_dp)
                self.data_ranks = DataRanks(config.data_rank, where, config.rank_timeout_s)
                undo.callback(self.data_ranks.close, leaving=False)
            elif tp != 1 or config.pp != 1:
                of_model = read_settings(folder, backend=backend)
                check_split(of_model, tp, config.ep)
                check_stages(of_model, config.pp)
                if drafts_from is not None:  # another rank has the draft model
                    longest = sched.get("context_tokens_max", usual_context(of_model, where))
                    check_draft_fits(drafts_from, of_model, backend, longest)
                read_settings(folder, tp, backend, ExpertSplit(config.ep, config.moe_a2a))
                self.group = RankGroup(
                    tp, where, settings, pp=config.pp, timeout_s=config.rank_timeout_s, ray=config.ray
                )
                undo.callback(self.group.close)
                where = self.group.device
            made = assemble(settings, where, clock, self.group or self.data_ranks)
            self.model, self.config, self.memory = made.model, made.config, made.memory
            self.attention_backend, self.logit_processors = made.attention_backend, made.logit_processors
            self.grammars = None
            if (
                (named := choose_backend(config.grammar_backend))
                and self.text is not None
                and self.model.settings.generates
            ):
                vocabulary, ends = self.model.settings.vocab, self.config.eos_token_ids
                self.grammars = make_compilers(
                    named, folder / "tokenizer.json", vocabulary, ends, config.grammar_limits
                )
                undo.callback(self.grammars.compiler.close)
                made.executor.matchers = self.grammars.matchers
            executor = made.executor if self.group is None else self.group.lead(made.executor)
            warm_up = where.type == "cuda" if config.warm_up is None else config.warm_up
            meter: ExpertMeter | None = None
            if made.executor.loads is not None:
                of_rank = DeviceMeter(made.executor.loads, made.executor.lane)
                meter = LeadMeter(of_rank, self.group) if self.group and made.executor.loads.sums else of_rank
            mover_of_experts: ExpertMover | None = None
            if config.eplb:
                assert self.group is not None
                mover_of_experts = LeadExpertMover(RankExpertMover(self.model, made.executor.lane), self.group)
            if self.model.settings.generates and warm_up:
                run_warm_up(executor, self.config, clock, self.model.settings.vocab)
                if meter is not None:  # what was routed so far is of no request
                    meter.begin()
                    meter.read()
            self._mover = made.mover
            if made.mover is not None:
                undo.callback(made.mover.close)
            mover = made.mover if made.mover is None or self.group is None else LeadMover(made.mover, self.group)
            self._live = LiveModel(self.model, made.executor, made.mover)
            self.handover: PrefillSide | DecodeSide | None = None
            if made.transfers is not None:
                if config.hand_over is None and config.start:
                    raise ConfigError(
                        f"`role` is {self.config.role}, but there are no other engines here\n"
                        "hint: lockstep serve --prefill-engines 1 --decode-engines 1"
                    )
                if config.hand_over is not None:
                    self.handover = config.hand_over(EngineTransport(made.transfers, self.group))
                    undo.callback(self.handover.close)
            self.media = media = made.executor.media
            weight_loader: WeightLoader = self._live
            if self.data_ranks is not None:
                weight_loader = FixedWeights(self._live, "data-parallel ranks share them")
            elif self.group is not None:
                weight_loader = LeadModel(self._live, self.group)
            if config.eplb:
                weight_loader = FixedWeights(weight_loader, "experts move between ranks")
            agreement = None if self.data_ranks is None else self.data_ranks.agreement
            encoder: MediaEncoder | None = (
                media if media is None or self.group is None else LeadMedia(media, self.group)
            )
            engine = Engine(self.config)
            if journal is not None or keeper is not None:
                host = HostHeader(
                    kind=RUNTIME,
                    model=model_name(folder),
                    gpu=device_name(where),
                    tp=tp,
                    layout=layout_of(config),
                    logit_processors=packages or None,
                    kv_cache_dtype=None if config.kv_cache_dtype == "auto" else config.kv_cache_dtype,
                    fp8_activations=self.model.activations or None,
                )
                header = JournalHeader(config=self.config, seed=seed, host=host.entries())
                if keeper is not None:
                    engine, self._journal = keeper.begin(header)
                else:
                    assert journal is not None
                    self._journal = JournalWriter.create(journal, header)
                undo.callback(self._journal.close)
            self._bubbles.resume(len(engine.requests), engine.now_us)
            self._host_adapters: LocalAdapters | LeadAdapters | None = None
            if self.config.max_loras:
                cache = HostAdapterCache(self.model)
                self._host_adapters = LocalAdapters(cache) if self.group is None else LeadAdapters(cache, self.group)
                undo.callback(self._host_adapters.close)
            if weights.version:
                weight_loader.load_weights(weights.version, weights.source)
            if released := engine.maintenance.released:
                weight_loader.switch_memory(released, released=True)
            self.host = RuntimeHost(
                engine,
                executor,
                self._journal or NoJournal(),
                clock,
                requests=RequestServices(
                    check=self._check,
                    watch_text=self._watch if self.text is not None else None,
                    compile_grammar=None if self.grammars is None else self.grammars.compiler,
                    receive_interval=config.receive_interval,
                ),
                device=DeviceServices(
                    *(self._profiler, weight_loader, self._host_adapters, mover, self.handover, encoder, agreement),
                    experts=meter,
                    expert_mover=mover_of_experts,
                ),
                earlier=EarlierGeneration(weights) if keeper is None else keeper.earlier_generation(),
                observe=self._bubbles.fold,
            )
            self.adapter_registry: AdapterRegistry | None = None
            if self._host_adapters is not None:
                self.adapter_registry = AdapterRegistry(self.host, self._host_adapters, source_of)
                self.adapter_registry.begin(sources, restarted=keeper is not None and keeper.death is not None)
            if self.group is not None:
                self.group.on_stuck = self.host.fail
            undo.pop_all()
        own_limit_s = config.batch_timeout_s if self.group is None else 0  # a group has its own watchdog
        self._watchdog = watchdog.Watchdog(self.host.oldest_batch, self.host.fail, own_limit_s)
        self._requests = 0
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._serve, name="lockstep-host", daemon=True)
        if config.start:
            self.start()

    def start(self) -> None:
        """Start the engine's thread, for an LLM made with `start=False`."""
        if self.handover is not None:
            self.handover.attach(self.host)
        if self.data_ranks is not None:
            self.data_ranks.agreement.attach(self.host, lambda: self.host.engine.generation)
        self._thread.start()

    # --------------------------------------------------------------------------------------------------- questions

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params | Sequence[Params] | None = None,
        *,
        progress: Callable[[int], object] | None = None,
    ) -> list[RequestOutput]:
        """Answer prompts, all at the same time. Returns the answers in the order of the prompts.

        Args:
            prompts: texts, token ids, or given embeddings, floats [positions, hidden] of numpy or torch.
            params: for all of them, or one for each.
            progress: called after each answer that ends, with the number that have ended.
        Raises: ConfigError for an invalid prompt or invalid parameters, before any request is sent; EngineStopped if
            the engine ends first. A prompt that cannot be served has `error` in its answer.
        """
        listed = listed_prompts(prompts)
        return self._answers(zip(listed, params_of_each(params, len(listed)), strict=True), "generate", progress)

    def chat(
        self,
        conversations: Sequence[Message] | Sequence[Sequence[Message]],
        params: Params | Sequence[Params] | None = None,
        *,
        progress: Callable[[int], object] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, formatted by the model's chat template."""
        one = bool(conversations) and isinstance(conversations[0], Mapping)
        several = cast("Sequence[Sequence[Message]]", [conversations] if one else conversations)
        return self.generate([self.chat_prompt(messages) for messages in several], params, progress=progress)

    def chat_prompt(self, messages: Sequence[Message], *, generation_prompt: bool = True) -> list[int] | MediaPrompt:
        """Return the token ids of a conversation, up to the start of the answer; with media also these.

        Without `generation_prompt` they end at the last message, as for a vector of the conversation.

        Images are parts of type image_url, as in OpenAI's API, with a data URL; audio clips parts of type input_audio,
        videos parts of type video_url.
        Raises: ConfigError.
        """
        if not messages:
            raise ConfigError("`messages` is empty\nhint: give at least one, of role user")
        text = self._needs_text("a conversation")
        try:
            shown, media = with_media(messages)
            for one in media:
                if why := self.no_media or self.model.settings.no_kind(one.kind):
                    raise ConfigError(f"`messages` has {KINDS[one.kind].several}: {why}")
            written = text.chat(shown, add_generation_prompt=generation_prompt)
            if not media:
                return text.encode(written, special=False)
            return prompt_with(self._processor(), written, media, LIMITS)
        except MediaError as error:
            raise as_config_error(error) from error

    def _processor(self) -> MediaProcessor:
        """Return the processor of the model's media, which is made at first use. Raises ConfigError."""
        with self._lock:
            if self._media_processor is None:
                text = self._needs_text("a conversation with media")
                self._media_processor = MediaProcessor(self.folder, lambda one: text.encode(one, special=False))
            return self._media_processor

    def stream(self, prompt: Prompt, params: Params | None = None) -> Iterator[OutputDelta]:
        """Answer one prompt piece by piece; the last piece carries the whole answer.

        Closing the iterator early cancels the request.

        Raises: the errors of `ask` and `wait`.
        """
        if params is not None and params.n != 1:
            raise ConfigError(f"`n` is {params.n}, but a stream is of one answer\nhint: generate")
        tokens: SimpleQueue[list[int] | None] = SimpleQueue()
        pending = self.ask(prompt, params or Params(), tokens=tokens)
        try:
            while (new := tokens.get()) is not None:
                yield OutputDelta(pending.spell(new), new)
            answer = self.wait(pending)
            yield OutputDelta(pending.spell(()), [], answer)
        finally:
            if not pending.over.is_set():
                self.host.cancel(pending.answer.request_id)

    def embed(
        self, prompts: Prompt | Sequence[Prompt], *, progress: Callable[[int], object] | None = None
    ) -> list[RequestOutput]:
        """Return one vector per prompt, in `vector`: the normed hidden states of the last layer, pooled.

        A prompt's vector uses no KV of the radix cache, which stores no hidden states; all positions are computed.
        """
        nothing = Params(max_new_tokens=0)
        return self._answers([(prompt, nothing) for prompt in listed_prompts(prompts)], "embed", progress)

    def classify(
        self,
        prompts: ClassifiedPrompt | Sequence[ClassifiedPrompt],
        *,
        progress: Callable[[int], object] | None = None,
    ) -> list[RequestOutput]:
        """Return the logits of the labels of a model that classifies, in `vector`: float32 [labels].

        Args:
            prompts: text, token ids, or a pair of texts, such as a query and a document for a cross-encoder.
        Raises: the errors of `generate`.
        """
        if not self.model.settings.labels:
            raise ConfigError(f"{self.model.settings.architecture} has no head of labels\nhint: score, embed")
        pair = isinstance(prompts, tuple) and len(prompts) == 2 and all(isinstance(one, str) for one in prompts)
        listed: Any = [prompts] if pair else listed_prompts(cast("Any", prompts))
        params, requests = Params(max_new_tokens=0), []
        for one in listed:
            if isinstance(one, tuple) and len(one) == 2 and isinstance(one[0], str):
                ids, types = self._needs_text("a pair of texts").encode_pair(*one)
                made = self._request(ids, params, "score")
                made = msgspec.structs.replace(made, token_type_ids=types_of(types, self.model.settings.token_types))
            else:
                made = self._request(self._prompt(one), params, "score")
            requests.append((made, params))
        return self._served(requests, progress)

    def score(
        self,
        prompts: Prompt | Sequence[Prompt],
        labels: Sequence[str | Sequence[int] | int],
        *,
        progress: Callable[[int], object] | None = None,
    ) -> list[Scored]:
        """Return the logprob of each label behind each prompt: the sum over the label's tokens.

        If all labels have one token, each prompt is one request, scored at its last position. Otherwise each pair of
        prompt and label is one request, and requests of one prompt share its KV. The text of a label is tokenized on
        its own.

        Args:
            labels: text, token ids, or one token id each; the same for all prompts.
            progress: called after each request that ends, with the number that have ended.
        Raises: the errors of `generate`; a prompt that cannot be served has `error`.
        """
        if self.model.settings.labels:
            raise ConfigError(f"{self.model.settings.architecture} has labels of its own\nhint: classify")
        ids = [self._ids_of_label(label) for label in labels]
        if not ids:
            raise ConfigError("`labels` is empty, so that there is nothing to compare\nhint: give a text or token ids")
        asked = [self._prompt(prompt) for prompt in listed_prompts(prompts)]
        if any(isinstance(one, MediaPrompt) for one in asked):
            raise ConfigError("labels are judged behind texts or token ids\nhint: leave images and embeddings out")
        listed = [self._ids(prompt) for prompt in asked]
        if empty := [number for number, prompt in enumerate(listed) if not prompt]:
            raise ConfigError(f"prompt {empty[0]} has no tokens, behind which a label could be judged")
        params = Params(max_new_tokens=0)
        if all(len(label) == 1 for label in ids):
            requests = [(self._request(prompt, params, "score"), params) for prompt in listed]
            tokens = [label[0] for label in ids]
            return [scored_at_once(one, tokens) for one in self._served(requests, progress)]
        requests = []
        for prompt in listed:
            for label in ids:
                request = self._request(prompt + label, params, "generate")
                requests.append((msgspec.structs.replace(request, logprob_start=len(prompt) - 1), params))
        answers, count = self._served(requests, progress), len(ids)
        return [scored_by_label(prompt, answers[i * count : (i + 1) * count]) for i, prompt in enumerate(listed)]

    def ask(
        self,
        prompt: Prompt,
        params: Params,
        *,
        kind: RequestKind = "generate",
        tokens: SimpleQueue[list[int] | None] | None = None,
    ) -> PendingRequest:
        """Send one request without waiting for its answer.

        New tokens are put into `tokens`, followed by None after the last. If the request has several answers, they are
        those of the first.

        Raises: ConfigError for an invalid prompt or invalid parameters; EngineStopped.
        """
        prompt = self._prompt(prompt)
        request = self._request(prompt, params, kind, stream=tokens is not None)
        return self._send(request, params, tokens, contents=contents_of(prompt))

    def wait(self, pending: PendingRequest) -> RequestOutput:
        """Wait for the whole answer and return it. Raises EngineStopped if the engine ends first."""
        for one in pending.samples:
            one.over.wait()
            if one.failure:
                raise EngineStopped(one.failure)
            one.spell_rest()
        return pending.answer

    def stats(self) -> LlmStats:
        """Return the state of the engine, and how the device's time was used so far. Raises EngineStopped."""
        answer = self.host.ask(GetState()).result()
        assert answer.stats is not None
        drafts = self.host.drafts
        drafts = replace(drafts, right_by_position=list(drafts.right_by_position))
        tiers, store = deepcopy(self.host.moves.counts), None if self._mover is None else self._mover.store_counts
        return LlmStats(answer.stats, self._bubbles.read(), self.host.batches, drafts, tiers, deepcopy(store))

    def start_profile(self, folder: str | Path, **options: Any) -> None:
        """Record the activity of CPU and GPU from the next launch on, into files of `folder`.

        Args:
            options: fields of `profiler.ProfileOptions`: start_step, steps, activities, record_shapes, with_stack,
                by_stage.
        Raises: ConfigError, also while a profile runs; EngineStopped.
        """
        wanted = options_of(folder, **options)
        if self._profiler.over:
            self.stop_profile()
        self._profiler.configure(wanted)
        launches = None if wanted.steps is None or wanted.by_stage else wanted.start_step + wanted.steps
        answer = self.host.ask(Profile("start", launches)).result()
        if not answer.ok:
            raise ConfigError(answer.message)

    def stop_profile(self) -> list[Path]:
        """End the profile if it is still recording. Returns its files. Raises ConfigError if there is none."""
        answer = self.host.ask(Profile("stop")).result()
        if self._profiler.error:
            raise ConfigError(f"the profile failed: {self._profiler.error}")
        if not answer.ok and not self._profiler.files:
            raise ConfigError(answer.message)
        return list(self._profiler.files)

    def start_expert_record(self) -> None:
        """Begin a record of the tokens routed to each expert. Raises ConfigError if they are not counted."""
        self._ordered(RecordExpertLoad("start"))

    def stop_expert_record(self) -> None:
        """Stop the record. Raises ConfigError if there is none."""
        self._ordered(RecordExpertLoad("stop"))

    def expert_record(self) -> ExpertRecord:
        """Return the counts of the record, which goes on if it is not stopped. Raises ConfigError if there is none."""
        record = self._ordered(RecordExpertLoad("dump")).experts
        assert record is not None
        return record

    # ------------------------------------------------------------------------------------------- weights and memory

    def update_weights(
        self, source: str | Path | Source, *, version: int | None = None, mode: UpdateMode = "wait"
    ) -> int:
        """Replace the weights while requests are open. Returns the version of the new weights.

        Args:
            source: a folder of the same model; or tensors of it, see `lockstep.host.weights`.
            version: a number above all earlier ones; None: the next.
            mode: what happens to running requests: wait for their end; retract them, which continue with the new
                weights after their KV is computed again; cancel them; or in_place: they continue with KV of both.
        Raises: ConfigError with all problems; the weights are then unchanged.
        """
        if isinstance(source, str | Path):
            folder = Path(source).resolve()
            source = Folder(str(folder), stamp_of(folder))
        if version is None:
            version = self.stats().engine.weights_version + 1
        self._ordered(UpdateWeights(version, write_source(source), mode))
        return version

    def weights(self, name: str, rows: int = 100) -> WeightsRead:
        """Return the first rows of a tensor, by its name in a checkpoint. Raises ConfigError."""
        return self._live.read(name, rows)

    def join_group(self, name: str, address: str, port: int, rank: int, ranks: int, backend: Backend = "gloo") -> None:
        """Connect to the group of a trainer, see `weights_group`. Raises ConfigError."""
        self._live.join_group(name, address, port, rank, ranks, backend)

    def leave_group(self, name: str) -> None:
        """Leave a group. Raises ConfigError if this engine has not joined it."""
        self._live.leave_group(name)

    def release_memory(self, *tags: str) -> None:
        """Release the memory of kv_cache and weights, or of the named tags, once nothing runs. Requests wait meanwhile.

        Raises: ConfigError.
        """
        self._ordered(ReleaseMemory(tags or MEMORY_TAGS))

    def resume_memory(self, *tags: str) -> None:
        """Allocate the memory again; requests continue. Raises ConfigError."""
        self._ordered(ResumeMemory(tags or MEMORY_TAGS))

    # ---------------------------------------------------------------------------------------------------- adapters

    def load_adapter(self, name: str, folder: str | Path, *, pinned: bool = False) -> int:
        """Add a LoRA adapter, or a newer version of one, while requests run. Returns its version.

        Requests that arrived before keep their version. The adapter is read now, and copied to the device when a
        request needs it; with `pinned` it is copied at once, and keeps its slot.

        Raises: ConfigError with all problems.
        """
        return self._desk().load(name, folder, pinned=pinned)

    def unload_adapter(self, name: str) -> None:
        """Remove an adapter; returns once no request uses it. New requests on it are refused from now on.

        Raises: ConfigError if there is no such adapter.
        """
        self._desk().unload(name)

    def adapters(self) -> dict[str, str]:
        """Return the folders of the loaded adapters, by name."""
        return {one.name: one.path for one in self.host.adapters.entries}

    def _desk(self) -> AdapterRegistry:
        if self.adapter_registry is None:
            raise ConfigError(LORA_OFF)
        return self.adapter_registry

    def _ordered(self, control: Control) -> ControlAnswered:
        answer = self.host.ask(control).result()
        if not answer.ok:
            raise ConfigError(answer.message)
        return answer

    def close(self) -> None:
        """End the engine; waiting calls raise EngineStopped."""
        self.host.stop()
        own = self._thread is threading.current_thread()
        if not own:
            self._join()
        self._watchdog.close()
        if self.grammars is not None:
            self.grammars.compiler.close()
        if self._host_adapters is not None:
            self._host_adapters.close()
        stuck = not own and self._thread.is_alive()
        if self.handover is not None and not stuck:
            self.handover.close()
        if self._mover is not None and not stuck:
            self._mover.close()
        if self.data_ranks is not None:
            self.data_ranks.close(leaving=self.host.error is None)
        if self.group is not None:
            self.group.close(stuck=stuck)
        elif stuck:
            end_hard_at_exit("a thread of the engine")
        self._live.close()
        if self._journal is not None and not stuck:
            self._journal.close()

    def _join(self) -> None:
        """Wait for the engine's thread, but only for a limited time if it waits for a rank or a kernel."""
        while self._thread.is_alive() and not self._watchdog.fired and not (self.group and self.group.failure):
            self._thread.join(JOIN_S)
        if self._thread.ident is not None:
            self._thread.join(GRACE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ----------------------------------------------------------------------------------------------------- inside

    def _serve(self) -> None:
        """Run the engine, in its own thread."""
        try:
            self.host.run()
        except LockstepError as error:
            log.debug("the engine failed: %s", error)  # waiting and later calls raise it
        except Exception:
            log.exception("the engine failed")  # with the traceback
        finally:
            if self.host.error is not None and self.data_ranks is not None:
                self.data_ranks.close(leaving=False)  # now, because the other ranks wait for this one

    def _request(
        self, prompt: str | Sequence[int] | MediaPrompt, params: Params, kind: RequestKind, *, stream: bool = False
    ) -> RequestArrived:
        """Make a request without sending it. Raises ConfigError if prompt or parameters are invalid."""
        check_params(params)
        ids = self._ids(prompt)
        return RequestArrived(
            0,
            request_id=-1,
            spans=prompt.spans if isinstance(prompt, MediaPrompt) else (),
            prompt=TokenIds(np.array(ids, np.int32).tobytes()),
            max_new_tokens=params.max_new_tokens,
            min_new_tokens=params.min_new_tokens,
            stop_token_ids=tuple(params.stop_token_ids),
            ignore_eos=params.ignore_eos,
            stream=stream,
            priority=params.priority,
            kind=kind,
            sampling=sampling_of(params),
            stop_texts=tuple(params.stop),
            logprob_start=0
            if params.prompt_logprobs is not None
            else len(ids)
            if params.logprobs is not None
            else None,
            return_hidden_states=params.hidden_states,
            parallel_samples=params.n,
            adapter=params.adapter,
            grammar=None if params.grammar is None else make_grammar(*params.grammar),
        )

    def _prompt(self, prompt: Prompt) -> str | Sequence[int] | MediaPrompt:
        """Return a prompt with given embeddings, if it is any, as media. Raises ConfigError."""
        return with_embeddings(prompt, self.model.embedding_size, self.no_embeddings)

    def _ids(self, prompt: str | Sequence[int] | MediaPrompt) -> list[int]:
        if isinstance(prompt, MediaPrompt):
            return prompt.ids
        return self._needs_text("a text prompt").encode(prompt) if isinstance(prompt, str) else token_ids_of(prompt)

    def _ids_of_label(self, label: str | Sequence[int] | int) -> list[int]:
        """Return the token ids of a label, at least one, all in the model's vocabulary. Raises ConfigError."""
        if isinstance(label, str):
            ids = self._needs_text("a label's text").encode(label, special=False)
        else:
            ids = token_ids_of(cast("Sequence[int]", [label] if isinstance(label, Integral) else label))
        if not ids:
            raise ConfigError(f"`labels` holds {label!r}, which has no tokens")
        if max(ids) >= self.model.settings.vocab:
            raise ConfigError(f"`labels` holds token {max(ids)}, but the model has {self.model.settings.vocab}")
        return ids

    def _send(
        self,
        request: RequestArrived,
        params: Params,
        tokens: SimpleQueue[list[int] | None] | None = None,
        *,
        contents: Sequence[EncoderInput] = (),
    ) -> PendingRequest:
        """Send a request; a request without a seed gets one derived from the LLM's seed."""
        with self._lock:
            number = self._requests
            self._requests += 1
        if params.seed is None:
            params = replace(params, seed=seed_of(self.seed, number))
            request = msgspec.structs.replace(request, sampling=sampling_of(params))
        ids = np.frombuffer(prompt_bytes(request.prompt), np.int32).tolist()
        pending, *others = (
            PendingRequest(RequestOutput(-1, ids), self.text, request.stop_texts, None if number else tokens)
            for number in range(sample_count(request))
        )
        pending.samples += others
        pending.answer.others = [one.answer for one in others]
        first = self.host.submit(request, *pending.samples, contents=contents)
        for number, one in enumerate(pending.samples):
            one.answer.request_id = first + number
        return pending

    def _answers(
        self,
        wanted: Iterable[tuple[Prompt, Params]],
        kind: RequestKind,
        progress: Callable[[int], object] | None,
    ) -> list[RequestOutput]:
        """Answer all prompts, in order. All of them are checked before any request is sent."""
        pairs = [(self._prompt(prompt), params) for prompt, params in wanted]
        contents = [contents_of(prompt) for prompt, _ in pairs]
        return self._served(
            [(self._request(prompt, params, kind), params) for prompt, params in pairs], progress, contents
        )

    def _served(
        self,
        requests: Sequence[tuple[RequestArrived, Params]],
        progress: Callable[[int], object] | None,
        contents: Sequence[Sequence[EncoderInput]] = (),
    ) -> list[RequestOutput]:
        """Send all requests, and wait for them in order; if that fails, the rest is cancelled."""
        pending: list[PendingRequest] = []
        try:
            for number, (request, params) in enumerate(requests):
                pending.append(self._send(request, params, contents=contents[number] if contents else ()))
            for ended, one in enumerate(pending):
                self.wait(one)
                if progress is not None:
                    progress(ended + 1)
        except BaseException:  # Ctrl-C included
            for one in chain.from_iterable(each.samples for each in pending):
                if not one.over.is_set():
                    self.host.cancel(one.answer.request_id)
            raise
        return [one.answer for one in pending]

    def _check(self, request: RequestArrived) -> None:
        """Raise ConfigError for a request that this model cannot serve, before it reaches the engine."""
        vocabulary = self.model.settings.vocab
        ids = request_ids(request)
        if request.spans:
            self._check_media(request)
            ids = ids.copy()
            for span in request.spans:
                ids[span.start : span.stop] = 0  # ignored there
        if request.grammar is not None and self.grammars is None:
            raise ConfigError(f"`grammar` asks for structured output: {self.no_grammars}")
        settings = self.model.settings
        if request.token_type_ids and max(request.token_type_ids) >= settings.token_types:
            most = f"types below {settings.token_types}" if settings.token_types else "no token types"
            raise ConfigError(f"`token_type_ids` holds {max(request.token_type_ids)}, but this model has {most}")
        scores = request.kind == "score" and not settings.labels
        needs_logits = request.max_new_tokens or scores or request.logprob_start is not None
        if needs_logits and not self.model.settings.generates:
            raise ConfigError(
                "this model has no `lm_head`: it gives vectors (`embed`), but neither tokens nor logprobs"
            )
        if request.sampling is not None:
            check_sampling(request.sampling, vocabulary)
            stops = stop_tokens_of(request, self.config)
            check_allowed(request.sampling, vocabulary, request.min_new_tokens, stops)
            processors.check_asked(request.sampling, self.logit_processors)
        largest = int(ids.max(initial=0))
        for name, token in (("prompt", largest), *(("stop_token_ids", one) for one in request.stop_token_ids)):
            if token >= vocabulary:
                raise ConfigError(f"`{name}` holds token {token}, but the model has {vocabulary}")

    def _check_media(self, request: RequestArrived) -> None:
        """Raise ConfigError for a request with media that this model cannot serve."""
        given = all(span.kind == "embedding" for span in request.spans)
        if why := self.no_embeddings if given else self.no_media:
            raise ConfigError(f"the prompt has {'given embeddings' if given else 'media'}: {why}")
        start = request.logprob_start
        if start is not None and start < len(request_ids(request)) - 1:
            raise ConfigError("`prompt_logprobs` are of tokens, and this prompt has media\nhint: leave them out")

    @property
    def no_media(self) -> str:
        """Return why prompts may not have media here; empty if they may."""
        settings = self.model.settings
        if self.media is not None and self.model.media_encoder is not None:
            return ""
        if not settings.media:
            return settings.media_refused or f"{settings.architecture} takes text only"
        return "the draft model (draft_model) takes no media"

    @property
    def no_embeddings(self) -> str:
        """Return why prompts may not be given embeddings here; empty if they may."""
        if not self.model.embedding_size:
            return f"{self.model.settings.architecture} needs the tokens themselves"
        return "the draft model (draft_model) knows tokens only" if self.media is None else ""

    @property
    def no_grammars(self) -> str:
        """Return why structured output is not available, and how to enable it; empty if it is available."""
        if self.grammars is not None:
            return ""
        if self.text is None:
            return "it needs a tokenizer.json in the model's folder, and there is none"
        return "this engine has no grammar backend; install llguidance, and leave --grammar-backend at auto"

    def _watch(self, request: RequestArrived) -> Watch:
        assert self.text is not None
        ids = np.frombuffer(prompt_bytes(request.prompt), np.int32).tolist()
        return watch_of(self.text, ids, request.stop_texts, request.stop_regexes)

    def _needs_text(self, what: str) -> Text:
        if self.text is None:
            raise ConfigError(f"{what} needs a tokenizer.json in the model's folder\nhint: give token ids")
        return self.text


def request_ids(request: RequestArrived) -> Int32s:
    """Return the tokens of a request's prompt, int32."""
    ids: Int32s = np.frombuffer(prompt_bytes(request.prompt), np.int32)
    return ids


def contents_of(prompt: str | Sequence[int] | MediaPrompt) -> tuple[EncoderInput, ...]:
    """Return the contents of a prompt's media."""
    return prompt.contents if isinstance(prompt, MediaPrompt) else ()


def model_name(folder: Path) -> str:
    """Return the name of a folder's model: the name of the folder, and `demo` for the demo model."""
    from lockstep.runtime.demo_model import COMMITTED

    name = folder.resolve()
    return "demo" if name == COMMITTED.resolve() else name.name


def layout_of(config: EngineConfig) -> dict[str, int | bool]:
    """Return how GPUs share the model beside `tp`, by the names of the simulator, for the header of the journal."""
    given = {"pp": (config.pp, 1), "ep": (config.ep, 1), "moe_a2a": (config.moe_a2a, False)}
    given["attention_dp"] = (config.attention_dp, 1)
    return {name: value for name, (value, usual) in given.items() if value != usual}


def demo_folder() -> Path:
    """Return the folder of the demo model."""
    from lockstep.runtime.demo_model import demo_model_folder

    return demo_model_folder()
