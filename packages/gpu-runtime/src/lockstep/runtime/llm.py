"""A model in this process, with the whole engine around it.

    from lockstep.runtime import LLM, Params

    with LLM() as llm:                                   # the small demo model; or a Hugging Face folder
        for answer in llm.generate(["def ", "import "], Params(max_new_tokens=20)):
            print(answer.text)
        for piece in llm.stream("Returns"):
            print(piece.text, end="")

Requests go through the same scheduler as everywhere: radix cache, chunks, retraction, overlap. The engine runs in a
thread of its own, so any number of threads may ask at once. With `journal` every decision is recorded, and
`lockstep journal verify` makes them again.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from hashlib import blake2b
from itertools import chain
from numbers import Integral
from operator import index
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Annotated, Any, Literal, Self, cast

import msgspec
import numpy as np

from lockstep.core.admin.maintenance import MEMORY_TAGS
from lockstep.core.contract.commands import FinishRequest, RejectRequest
from lockstep.core.contract.config import SchedConfig, refuse_simulated_only
from lockstep.core.contract.errors import ConfigError, LockstepError
from lockstep.core.contract.events import (
    Control,
    GetState,
    Profile,
    ReleaseMemory,
    RequestArrived,
    RequestKind,
    ResumeMemory,
    SamplingParams,
    TokenIds,
    UpdateWeights,
)
from lockstep.core.contract.samples import SAMPLES_MAX, sample_count
from lockstep.core.contract.stats import Stats
from lockstep.core.journal.records import JournalHeader
from lockstep.core.journal.sinks import NoJournal
from lockstep.core.journal.writer import JournalWriter
from lockstep.core.requests.table import prompt_bytes
from lockstep.core.requests.validation import stop_tokens_of
from lockstep.core.scheduler.engine import Engine
from lockstep.host.adapters import LORA_OFF, LORAS, AdapterRegistry, source_of
from lockstep.host.batches import Float32s
from lockstep.host.drafts import DraftCounts
from lockstep.host.durable import DurableJournal
from lockstep.host.errors import EngineStopped
from lockstep.host.grammar_backends import BackendName, choose_backend
from lockstep.host.grammar_compiler import CompileLimits, make_compilers
from lockstep.host.grammars import Kind, make_grammar
from lockstep.host.loop import HostClock, ResultExtras, RuntimeHost, TokenLogprobs
from lockstep.host.quantization import Fp8Activations
from lockstep.host.startup import Keeper
from lockstep.host.text import Message, StopTexts, Text
from lockstep.host.weights import (
    Folder,
    Source,
    WeightsLog,
    WeightsRead,
    check_lasting,
    read_source,
    stamp_of,
    write_source,
)
from lockstep.runtime import watchdog
from lockstep.runtime.assembly import assemble, check_draft_model, choose_device, device_name
from lockstep.runtime.attention.base import Numerics
from lockstep.runtime.bubbles import BubbleTimer, DeviceTime
from lockstep.runtime.graphs import (
    GraphMode,
    check_graph_mode,
)
from lockstep.runtime.live import LiveModel
from lockstep.runtime.lora.host_cache import HostAdapterCache, LocalAdapters
from lockstep.runtime.models import read_settings
from lockstep.runtime.pooling import PoolingMode, choose_pooling
from lockstep.runtime.profiler import TorchProfiler, options_of
from lockstep.runtime.quantized.activations import check_fp8_activations, choose_activations
from lockstep.runtime.rank_wire import RankSettings
from lockstep.runtime.ranks import GRACE_S, TIMEOUT_S, LeadAdapters, LeadModel, RankGroup, check_split, end_hard_at_exit
from lockstep.runtime.sampling import (
    check_allowed,
    check_sampling,
    processors,
)
from lockstep.runtime.sampling.processors import Arguments
from lockstep.runtime.warmup import warm_up as run_warm_up
from lockstep.runtime.weights_group import Backend

log = logging.getLogger("lockstep.runtime")

Prompt = str | Sequence[int]
UpdateMode = Literal["wait", "retract", "cancel", "in_place"]
LORA_RANK_MAX = 512
KV_CACHE_DTYPES = ("auto", "fp8_e4m3")
JOIN_S = 0.2  # between two looks at whether the engine's thread will ever end
Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
"""What a journal can hold."""


@dataclass(frozen=True, kw_only=True)
class Params:
    """What is wanted of one request. Names and meanings are those of vLLM and SGLang where they have one."""

    n: Int64 = 1  # answers to the prompt, whose KV they share; answer k is drawn with seed + k
    max_new_tokens: Int64 = 128
    min_new_tokens: Int64 = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: Int64 = 0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[Int64, float] = field(default_factory=dict)
    allowed_token_ids: Sequence[Int64] | None = None  # nothing else is drawn; None: every token may be
    seed: Int64 | None = None  # None: one of its own, which follows from the LLM's
    stop: Sequence[str] = ()  # texts; the answer ends in front of the first
    stop_token_ids: Sequence[Int64] = ()
    ignore_eos: bool = False
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] | None = (
        None  # of each output token, and of so many of the likeliest beside it
    )
    prompt_logprobs: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] | None = (
        None  # of each prompt token, and of so many of the likeliest in its place
    )
    hidden_states: bool = False
    priority: Int64 | None = None
    logit_processors: Mapping[str, Arguments] = field(default_factory=dict)  # those enabled, by name, with arguments
    adapter: str = ""  # the name of one that is loaded; "": the model alone
    grammar: tuple[Kind, str] | None = None  # what the answer must keep to: ("json_schema", '{"type": "object"}')


@dataclass(slots=True)
class RequestOutput:
    """What came of one request."""

    request_id: int
    prompt_token_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    text: str | None = None  # None without a tokenizer
    finish_reason: str = ""  # of the core: length, stop, text_stop, computed, ...; or why it was rejected
    error: str = ""  # a sentence, where it was rejected or failed
    cached_tokens: int = 0  # of the prompt
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[dict[int, float]] = field(default_factory=list)
    prompt_logprobs: dict[int, float] = field(
        default_factory=dict
    )  # of the token at position p, by p; none of the first
    prompt_top_logprobs: dict[int, dict[int, float]] = field(default_factory=dict)  # by p: by token, likeliest first
    hidden_states: Float32s | None = None  # [positions, hidden]
    vector: Float32s | None = None  # [hidden] or, of kind score, [vocabulary]
    weights: tuple[
        tuple[int, int], ...
    ] = ()  # (first output token, version of the weights that drew it and those behind)
    others: list[RequestOutput] = field(default_factory=list)  # to the same prompt, where `Params.n` asked for several


@dataclass(frozen=True, slots=True)
class Scored:
    """How likely the labels are behind one prompt."""

    prompt_token_ids: list[int]
    logprobs: list[float] = field(default_factory=list)  # of each label as a whole, given the prompt
    token_logprobs: list[list[float]] = field(default_factory=list)  # of its tokens
    error: str = ""  # a sentence, where the prompt was rejected or failed


@dataclass(frozen=True, slots=True)
class LlmStats:
    """How an LLM stands."""

    engine: Stats
    device: DeviceTime
    batches: int  # launched so far
    drafts: DraftCounts  # what became of them, where drafts are verified


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """What is new of an answer."""

    text: str
    token_ids: list[int]
    answer: RequestOutput | None = None  # the whole of it, with the last piece


class LLM:
    """A model with its engine.

    Args:
        model: a Hugging Face folder; None is the demo model.
        device: cpu, cuda, cuda:1; auto takes a GPU if there is one.
        dtype: of weights and KV: bfloat16, float16, float32; auto takes that of the folder, on the CPU float32. Of
            quantised weights (docs/runtime.md) that of what they are multiplied with.
        kv_cache_dtype: auto, that of the model; fp8_e4m3, with scales of the folder or 1: half the bytes or fewer.
        fp8_activations: whether rows are rounded to fp8 where they meet fp8 weights: auto (as the checkpoint says,
            where the GPU multiplies fp8 by fp8), on, off.
        attention_backend, numerics: see `attention.choose`.
        random_weights_seed: fill the model with small random values; only the folder's config.json is read.
        mem_fraction: of a GPU's memory; what weights, activations and graphs leave of it is for KV.
        cuda_graphs: whether decodes are replayed from CUDA graphs: auto, on, off, eager (graphs.GraphMode).
        cuda_graph_max_batch: rows of the largest graph; None: max_running_requests, at most 512.
        seed: what seeds of requests that name none follow from.
        journal: a run folder, in which every fact and decision is recorded.
        keeper: in place of `journal`, keeps one that the engine begins again from, with the settings it had.
        start: whether the engine runs at once; else when `start` is called, after requests from before were taken up.
        warm_up: run a few requests first, so that none waits for a kernel to be compiled; None: on a GPU.
        pooling: how `embed` makes one vector of a prompt: mean, last; None: as the folder says (1_Pooling), or mean.
        normalize: whether to scale that vector to length 1; None: as the folder says (modules.json), or not.
        logit_processors: names of those of installed packages that requests may ask for: docs/sampling.md.
        grammar_backend: what keeps answers to grammars: auto (llguidance, if installed), llguidance, xgrammar, none.
        grammar_limits: what one grammar may take to compile.
        text: the tokenizer; None: that of the folder, if it has one.
        debug: check every plan, and verify the tag of every KV slot before it is read. Slow.
        adapters: LoRA adapters, folders as PEFT writes them by name; others may be loaded later.
        max_lora_rank: of those; slots on the device have room for it.
        tensor_parallel: over so many ranks the model is split: GPUs from `device` on, or processes on the CPU.
        draft_model: folder of a small model of the same vocabulary, whose guesses are verified; stands for
            `speculative_method="draft_model"`. Not with `tensor_parallel`.
        batch_timeout_s: an engine whose oldest batch does not come back for so long has failed; 0: never. With ranks
            the time is `rank_timeout_s`.
        rank_timeout_s: a rank from which no batch comes back for so long has failed, and so has the engine.
        sched: fields of SchedConfig. Sizes not given follow from the model and the device; with `adapters`, `max_loras`
            is 8 unless given.
    Raises: ConfigError; RankLost when another rank fails before it has begun.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        device: str = "auto",
        dtype: str = "auto",
        kv_cache_dtype: str = "auto",
        fp8_activations: Fp8Activations = "auto",
        attention_backend: str = "auto",
        numerics: Numerics = "fast",
        random_weights_seed: int | None = None,
        mem_fraction: float = 0.9,
        cuda_graphs: GraphMode = "auto",
        cuda_graph_max_batch: int | None = None,
        seed: int = 0,
        journal: str | Path | None = None,
        keeper: Keeper | None = None,
        start: bool = True,
        pooling: PoolingMode | None = None,
        normalize: bool | None = None,
        logit_processors: Sequence[str] = (),
        grammar_backend: BackendName = "auto",
        grammar_limits: CompileLimits | None = None,
        text: Text | None = None,
        warm_up: bool | None = None,
        debug: bool = False,
        adapters: Mapping[str, str | Path] | None = None,
        max_lora_rank: int = 16,
        tensor_parallel: int = 1,
        draft_model: str | Path | None = None,
        batch_timeout_s: float = watchdog.TIMEOUT_S,
        rank_timeout_s: float = TIMEOUT_S,
        **sched: Any,
    ) -> None:
        _refuse_unknown(sched)
        for name, value in (
            ("tensor_parallel", tensor_parallel),
            ("seed", seed),
            ("random_weights_seed", random_weights_seed),
            ("cuda_graph_max_batch", cuda_graph_max_batch),
            ("max_lora_rank", max_lora_rank),
        ):
            _check_whole(name, value, optional=name not in ("tensor_parallel", "seed", "max_lora_rank"))
        if kv_cache_dtype not in KV_CACHE_DTYPES:
            raise ConfigError(f"`kv_cache_dtype` must be {' or '.join(KV_CACHE_DTYPES)}, got `{kv_cache_dtype}`")
        check_fp8_activations(fp8_activations)
        watchdog.check_timeout(batch_timeout_s)
        if journal is not None and any((Path(journal) / "journal").glob("*.log")):  # before a model is loaded in vain
            raise ConfigError(f"`journal`: {journal} already holds a journal\nhint: choose another run folder")
        packages = processors.versions(logit_processors)
        if draft_model is not None:
            sched = {"speculative_method": "draft_model"} | sched
        folder = demo_folder() if model is None else Path(model)
        where = choose_device(device)
        check_graph_mode(cuda_graphs, where, cuda_graph_max_batch)
        self.pooling = choose_pooling(folder, pooling, normalize)
        if not 1 <= max_lora_rank <= LORA_RANK_MAX:
            raise ConfigError(f"`max_lora_rank` must be 1 to {LORA_RANK_MAX}, got `{max_lora_rank}`")
        if adapters:
            sched.setdefault("max_loras", LORAS)
        sources = {name: source_of(path) for name, path in (adapters or {}).items()}
        if keeper is not None and keeper.config is not None:
            sched = keeper.settings(sched)
        if sources and not sched["max_loras"]:
            raise ConfigError("`adapters` are named, but `max_loras` is 0, which is no LoRA\nhint: leave it out")
        check_draft_model(draft_model, sched.get("speculative_method"), tensor_parallel)
        weights = WeightsLog() if keeper is None else keeper.weights
        if weights.version:
            check_lasting(weights.version, read_source(weights.source))
        settings = RankSettings(
            model=str(folder.resolve()),
            dtype=dtype,
            attention_backend=attention_backend,
            numerics=numerics,
            random_weights_seed=random_weights_seed,
            mem_fraction=mem_fraction,
            cuda_graphs=cuda_graphs,
            cuda_graph_max_batch=cuda_graph_max_batch,
            logit_processors=tuple(logit_processors),
            pooling=self.pooling,
            debug=debug,
            max_lora_rank=max_lora_rank,
            sched=sched,
            draft_model=None if draft_model is None else str(Path(draft_model).resolve()),
            kv_cache_dtype=kv_cache_dtype,
            fp8_activations=fp8_activations,
        )
        self.text = Text(folder) if text is None and (folder / "tokenizer.json").is_file() else text
        self.seed = seed
        clock = HostClock(start_us=0 if keeper is None else keeper.start_us)
        self._bubbles = BubbleTimer()
        self._profiler = TorchProfiler(where)
        self.group: RankGroup | None = None
        self._journal: JournalWriter | DurableJournal | None = None
        with ExitStack() as undo:
            if fp8_activations == "on":  # before ranks are started
                choose_activations(fp8_activations, read_settings(folder).quantization, where)
            if tensor_parallel != 1:
                check_split(read_settings(folder), tensor_parallel)
                read_settings(folder, tensor_parallel)
                self.group = RankGroup(tensor_parallel, where, settings, timeout_s=rank_timeout_s)
                undo.callback(self.group.close)
                where = self.group.device
            made = assemble(settings, where, clock, self.group)
            self.model, self.config, self.memory = made.model, made.config, made.memory
            self.attention_backend, self.logit_processors = made.attention_backend, made.logit_processors
            self.grammars = None
            if (named := choose_backend(grammar_backend)) and self.text is not None and self.model.settings.generates:
                vocabulary, ends = self.model.settings.vocab, self.config.eos_token_ids
                self.grammars = make_compilers(named, folder / "tokenizer.json", vocabulary, ends, grammar_limits)
                undo.callback(self.grammars.compiler.close)
                made.executor.matchers = self.grammars.matchers
            executor = made.executor if self.group is None else self.group.lead(made.executor)
            if self.model.settings.generates and (where.type == "cuda" if warm_up is None else warm_up):
                run_warm_up(executor, self.config, clock, self.model.settings.vocab)
            self._live = LiveModel(self.model, made.executor)
            hands = self._live if self.group is None else LeadModel(self._live, self.group)
            engine = Engine(self.config)
            if journal is not None or keeper is not None:
                host: dict[str, str | int | float] = {"kind": "runtime", "model": model_name(folder)}
                host |= {"gpu": device_name(where), "tp": tensor_parallel}
                if packages:
                    host["logit_processors"] = packages
                if kv_cache_dtype != "auto":
                    host["kv_cache_dtype"] = kv_cache_dtype
                if self.model.activations:
                    host["fp8_activations"] = self.model.activations
                header = JournalHeader(config=self.config, seed=seed, host=host)
                if keeper is not None:
                    engine, self._journal = keeper.begin(header)
                else:
                    assert journal is not None
                    self._journal = JournalWriter.create(journal, header)
                undo.callback(self._journal.close)
            self._shelf: LocalAdapters | LeadAdapters | None = None
            if self.config.max_loras:
                shelf = HostAdapterCache(self.model)
                self._shelf = LocalAdapters(shelf) if self.group is None else LeadAdapters(shelf, self.group)
                undo.callback(self._shelf.close)
            if weights.version:
                hands.load_weights(weights.version, weights.source)
            if released := engine.maintenance.released:
                hands.switch_memory(released, released=True)
            self.host = RuntimeHost(
                engine,
                executor,
                self._journal or NoJournal(),
                clock,
                check_request=self._check,
                watch_text=self._watch if self.text is not None else None,
                compile_grammar=None if self.grammars is None else self.grammars.compiler,
                profiler=self._profiler,
                weight_loader=hands,
                weights=weights,
                adapters=self._shelf,
                adapters_log=None if keeper is None else keeper.adapters,
                orders=() if keeper is None else keeper.orders,
                observe=self._bubbles.fold,
            )
            self.adapter_desk: AdapterRegistry | None = None
            if self._shelf is not None:
                self.adapter_desk = AdapterRegistry(self.host, self._shelf, source_of)
                self.adapter_desk.begin(sources, restarted=keeper is not None and keeper.death is not None)
            if self.group is not None:
                self.group.on_stuck = self.host.fail
            undo.pop_all()
        own_limit_s = batch_timeout_s if self.group is None else 0  # a group watches itself
        self._watchdog = watchdog.Watchdog(self.host.oldest_batch, self.host.fail, own_limit_s)
        self._requests = 0
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._serve, name="lockstep-host", daemon=True)
        if start:
            self.start()

    def start(self) -> None:
        """Run the engine, if that was left to the caller."""
        self._thread.start()

    # --------------------------------------------------------------------------------------------------- questions

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params | Sequence[Params] | None = None,
        *,
        progress: Callable[[int], object] | None = None,
    ) -> list[RequestOutput]:
        """Answer prompts, text or token ids, all together; answers in their order.

        Args:
            params: for all of them, or one for each.
            progress: called with the number of answers that have ended, after each.
        Raises: ConfigError, before any of them is sent, for a prompt or parameters that are none; EngineStopped if the
            engine ends first. A prompt that cannot be served has `error` in its answer.
        """
        listed = _listed(prompts)
        return self._answers(zip(listed, _each(params, len(listed)), strict=True), "generate", progress)

    def chat(
        self,
        conversations: Sequence[Message] | Sequence[Sequence[Message]],
        params: Params | Sequence[Params] | None = None,
        *,
        progress: Callable[[int], object] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, written by the model's chat template."""
        one = bool(conversations) and isinstance(conversations[0], Mapping)
        several = cast("Sequence[Sequence[Message]]", [conversations] if one else conversations)
        return self.generate([self.chat_prompt(messages) for messages in several], params, progress=progress)

    def chat_prompt(self, messages: Sequence[Message]) -> list[int]:
        """The token ids of a conversation, ready for the answer. Raises ConfigError."""
        if not messages:
            raise ConfigError("`messages` is empty\nhint: give at least one, of role user")
        text = self._needs_text("a conversation")
        return text.encode(text.chat(messages), special=False)

    def stream(self, prompt: Prompt, params: Params | None = None) -> Iterator[OutputDelta]:
        """Answer one prompt piece by piece; the last piece carries the whole answer. Leaving early cancels it.

        Raises: as `ask` and `wait`.
        """
        if params is not None and params.n != 1:
            raise ConfigError(f"`n` is {params.n}, but a stream is of one answer\nhint: generate")
        tokens: SimpleQueue[list[int] | None] = SimpleQueue()
        asked = self.ask(prompt, params or Params(), tokens=tokens)
        try:
            while (new := tokens.get()) is not None:
                yield OutputDelta(asked.spell(new), new)
            answer = self.wait(asked)
            yield OutputDelta(asked.spell(()), [], answer)
        finally:
            if not asked.over.is_set():
                self.host.cancel(asked.answer.request_id)

    def embed(
        self, prompts: Prompt | Sequence[Prompt], *, progress: Callable[[int], object] | None = None
    ) -> list[RequestOutput]:
        """One vector for each prompt, in `vector`: the last layer's hidden states, normed and pooled.

        A prompt's vector takes nothing from the radix cache, which holds no hidden states; all positions are computed.
        """
        nothing = Params(max_new_tokens=0)
        return self._answers([(prompt, nothing) for prompt in _listed(prompts)], "embed", progress)

    def score(
        self,
        prompts: Prompt | Sequence[Prompt],
        labels: Sequence[Prompt | int],
        *,
        progress: Callable[[int], object] | None = None,
    ) -> list[Scored]:
        """How likely each of some labels is behind each prompt, as its logprob: the sum over the label's tokens.

        Where all labels are of one token, each prompt is one request, judged at its last position. Else each label of
        each prompt is one, all of which share the prompt's KV. A label's text is put into tokens by itself.

        Args:
            labels: text, token ids, or one token id each; the same for all prompts.
            progress: called with the number of requests that have ended, after each.
        Raises: as `generate`; a prompt that cannot be served has `error`.
        """
        ids = [self._ids_of_label(label) for label in labels]
        if not ids:
            raise ConfigError("`labels` is empty, so that there is nothing to compare\nhint: give a text or token ids")
        listed = [self._ids(prompt) for prompt in _listed(prompts)]
        if empty := [number for number, prompt in enumerate(listed) if not prompt]:
            raise ConfigError(f"prompt {empty[0]} has no tokens, behind which a label could be judged")
        params = Params(max_new_tokens=0)
        if all(len(label) == 1 for label in ids):
            requests = [(self._request(prompt, params, "score"), params) for prompt in listed]
            tokens = [label[0] for label in ids]
            return [_scored_at_once(one, tokens) for one in self._served(requests, progress)]
        requests = []
        for prompt in listed:
            for label in ids:
                request = self._request(prompt + label, params, "generate")
                requests.append((msgspec.structs.replace(request, logprob_start=len(prompt) - 1), params))
        answers, count = self._served(requests, progress), len(ids)
        return [_scored_by_label(prompt, answers[i * count : (i + 1) * count]) for i, prompt in enumerate(listed)]

    def ask(
        self,
        prompt: Prompt,
        params: Params,
        *,
        kind: RequestKind = "generate",
        tokens: SimpleQueue[list[int] | None] | None = None,
    ) -> PendingRequest:
        """Send one request without waiting for its answer. New tokens are put into `tokens`, and None behind the last;
        of several answers, those of the first.

        Raises: ConfigError for a prompt or parameters that are none; EngineStopped.
        """
        return self._send(self._request(prompt, params, kind, stream=tokens is not None), params, tokens)

    def wait(self, asked: PendingRequest) -> RequestOutput:
        """The answer, once it is whole. Raises EngineStopped if the engine ends first."""
        for one in asked.samples:
            one.over.wait()
            if one.failure:
                raise EngineStopped(one.failure)
            one.spell_rest()
        return asked.answer

    def stats(self) -> LlmStats:
        """How the engine stands, and what became of the device's time so far. Raises EngineStopped."""
        answered = self.host.ask(GetState()).result()
        assert answered.stats is not None
        drafts = self.host.drafts
        drafts = replace(drafts, right_by_position=list(drafts.right_by_position))
        return LlmStats(answered.stats, self._bubbles.read(), self.host.batches, drafts)

    def start_profile(self, folder: str | Path, **options: Any) -> None:
        """Record what CPU and GPU do from the next launch on, into files of `folder`.

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
        answered = self.host.ask(Profile("start", launches)).result()
        if not answered.ok:
            raise ConfigError(answered.message)

    def stop_profile(self) -> list[Path]:
        """End the profile, if it has not ended by itself. Returns its files. Raises ConfigError if there is none."""
        answered = self.host.ask(Profile("stop")).result()
        if self._profiler.error:
            raise ConfigError(f"the profile failed: {self._profiler.error}")
        if not answered.ok and not self._profiler.files:
            raise ConfigError(answered.message)
        return list(self._profiler.files)

    # ------------------------------------------------------------------------------------------- weights and memory

    def update_weights(
        self, source: str | Path | Source, *, version: int | None = None, mode: UpdateMode = "wait"
    ) -> int:
        """Put other weights in place while requests are there. Returns their version.

        Args:
            source: a folder of the same model; or tensors of it, see `lockstep.host.weights`.
            version: above those there were; None: the next.
            mode: what becomes of requests that run: wait for their end, retract (they go on with the new weights, their
                KV computed again), cancel, or in_place (they go on with KV of both).
        Raises: ConfigError with everything that does not fit; then the weights before are in place.
        """
        if isinstance(source, str | Path):
            folder = Path(source).resolve()
            source = Folder(str(folder), stamp_of(folder))
        if version is None:
            version = self.stats().engine.weights_version + 1
        self._ordered(UpdateWeights(version, write_source(source), mode))
        return version

    def weights(self, name: str, rows: int = 100) -> WeightsRead:
        """The first rows of a tensor, by the name it has in a checkpoint. Raises ConfigError."""
        return self._live.read(name, rows)

    def join_group(self, name: str, address: str, port: int, rank: int, ranks: int, backend: Backend = "gloo") -> None:
        """Meet a trainer: `weights_group`. Raises ConfigError."""
        self._live.join_group(name, address, port, rank, ranks, backend)

    def leave_group(self, name: str) -> None:
        """Raises ConfigError for a group that it is not in."""
        self._live.leave_group(name)

    def release_memory(self, *tags: str) -> None:
        """Give the memory of kv_cache and weights back, or of what is named, once nothing runs. Requests wait then.

        Raises: ConfigError.
        """
        self._ordered(ReleaseMemory(tags or MEMORY_TAGS))

    def resume_memory(self, *tags: str) -> None:
        """Take it again; requests go on. Raises ConfigError."""
        self._ordered(ResumeMemory(tags or MEMORY_TAGS))

    # ---------------------------------------------------------------------------------------------------- adapters

    def load_adapter(self, name: str, folder: str | Path, *, pinned: bool = False) -> int:
        """Make a LoRA adapter known, or a newer version of it, while requests run. Returns its version.

        Requests that came before keep the version that they came with. It is read now, and copied to the device when it
        is wanted; with `pinned` at once, and stays there.

        Raises: ConfigError with everything that does not fit.
        """
        return self._desk().load(name, folder, pinned=pinned)

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter; returns once no request uses it any more. New ones are refused from now on.

        Raises: ConfigError for one that is not there.
        """
        self._desk().unload(name)

    def adapters(self) -> dict[str, str]:
        """Folders of the adapters that are loaded, by name."""
        return {one.name: one.path for one in self.host.adapters.entries}

    def _desk(self) -> AdapterRegistry:
        if self.adapter_desk is None:
            raise ConfigError(LORA_OFF)
        return self.adapter_desk

    def _ordered(self, control: Control) -> None:
        answered = self.host.ask(control).result()
        if not answered.ok:
            raise ConfigError(answered.message)

    def close(self) -> None:
        """End the engine; whoever waits is told."""
        self.host.stop()
        own = self._thread is threading.current_thread()
        if not own:
            self._join()
        self._watchdog.close()
        if self.grammars is not None:
            self.grammars.compiler.close()
        if self._shelf is not None:
            self._shelf.close()
        stuck = not own and self._thread.is_alive()
        if self.group is not None:
            self.group.close(stuck=stuck)
        elif stuck:
            end_hard_at_exit("a thread of the engine")
        self._live.close()
        if self._journal is not None and not stuck:
            self._journal.close()

    def _join(self) -> None:
        """Wait for the engine's thread, but not for ever for one that waits for a rank or for a kernel."""
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
        """The engine's thread."""
        try:
            self.host.run()
        except LockstepError as error:
            log.debug("the engine failed: %s", error)  # everybody who waits was told; who comes later will be
        except Exception:
            log.exception("the engine failed")  # where, is for whoever mends it

    def _request(self, prompt: Prompt, params: Params, kind: RequestKind, *, stream: bool = False) -> RequestArrived:
        """A request, not sent yet. Raises ConfigError if prompt or parameters are none."""
        _check_params(params)
        ids = self._ids(prompt)
        return RequestArrived(
            0,
            request_id=-1,
            prompt=TokenIds(np.array(ids, np.int32).tobytes()),
            max_new_tokens=params.max_new_tokens,
            min_new_tokens=params.min_new_tokens,
            stop_token_ids=tuple(params.stop_token_ids),
            ignore_eos=params.ignore_eos,
            stream=stream,
            priority=params.priority,
            kind=kind,
            sampling=_sampling(params),
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

    def _ids(self, prompt: Prompt) -> list[int]:
        return self._needs_text("a text prompt").encode(prompt) if isinstance(prompt, str) else _token_ids(prompt)

    def _ids_of_label(self, label: Prompt | int) -> list[int]:
        """Token ids of a label, at least one and all of this model. Raises ConfigError."""
        if isinstance(label, str):
            ids = self._needs_text("a label's text").encode(label, special=False)
        else:
            ids = _token_ids(cast("Sequence[int]", [label] if isinstance(label, Integral) else label))
        if not ids:
            raise ConfigError(f"`labels` holds {label!r}, which has no tokens")
        if max(ids) >= self.model.settings.vocab:
            raise ConfigError(f"`labels` holds token {max(ids)}, but the model has {self.model.settings.vocab}")
        return ids

    def _send(
        self, request: RequestArrived, params: Params, tokens: SimpleQueue[list[int] | None] | None = None
    ) -> PendingRequest:
        """Send a request; one without a seed of its own is given the next of the LLM's."""
        with self._lock:
            number = self._requests
            self._requests += 1
        if params.seed is None:
            params = replace(params, seed=_seed(self.seed, number))
            request = msgspec.structs.replace(request, sampling=_sampling(params))
        ids = np.frombuffer(prompt_bytes(request.prompt), np.int32).tolist()
        asked, *others = (
            PendingRequest(RequestOutput(-1, ids), self.text, request.stop_texts, None if number else tokens)
            for number in range(sample_count(request))
        )
        asked.samples += others
        asked.answer.others = [one.answer for one in others]
        first = self.host.submit(request, *asked.samples)
        for number, one in enumerate(asked.samples):
            one.answer.request_id = first + number
        return asked

    def _answers(
        self,
        wanted: Iterable[tuple[Prompt, Params]],
        kind: RequestKind,
        progress: Callable[[int], object] | None,
    ) -> list[RequestOutput]:
        """Answers in order; nothing is sent before all of it is known to be a request."""
        return self._served([(self._request(prompt, params, kind), params) for prompt, params in wanted], progress)

    def _served(
        self, requests: Sequence[tuple[RequestArrived, Params]], progress: Callable[[int], object] | None
    ) -> list[RequestOutput]:
        """Send all, and wait for them in order; what is left is cancelled."""
        asked: list[PendingRequest] = []
        try:
            for request, params in requests:
                asked.append(self._send(request, params))
            for ended, one in enumerate(asked):
                self.wait(one)
                if progress is not None:
                    progress(ended + 1)
        except BaseException:  # Ctrl-C as well
            for one in chain.from_iterable(each.samples for each in asked):
                if not one.over.is_set():
                    self.host.cancel(one.answer.request_id)
            raise
        return [one.answer for one in asked]

    def _check(self, request: RequestArrived) -> None:
        """Refuse what this model cannot do, before the engine hears of it."""
        vocabulary = self.model.settings.vocab
        if request.grammar is not None and self.grammars is None:
            raise ConfigError(f"`grammar` asks for structured output: {self.no_grammars}")
        asks = request.max_new_tokens or request.kind == "score" or request.logprob_start is not None
        if asks and not self.model.settings.generates:
            raise ConfigError(
                "this model has no `lm_head`: it gives vectors (`embed`), but neither tokens nor logprobs"
            )
        if request.sampling is not None:
            check_sampling(request.sampling, vocabulary)
            stops = stop_tokens_of(request, self.config)
            check_allowed(request.sampling, vocabulary, request.min_new_tokens, stops)
            processors.check_asked(request.sampling, self.logit_processors)
        largest = int(np.frombuffer(prompt_bytes(request.prompt), np.int32).max(initial=0))
        for name, token in (("prompt", largest), *(("stop_token_ids", one) for one in request.stop_token_ids)):
            if token >= vocabulary:
                raise ConfigError(f"`{name}` holds token {token}, but the model has {vocabulary}")

    @property
    def no_grammars(self) -> str:
        """Why there is no structured output, and what to do; "" where there is."""
        if self.grammars is not None:
            return ""
        if self.text is None:
            return "it needs a tokenizer.json in the model's folder, and there is none"
        return "this engine has no grammar backend; install llguidance, and leave --grammar-backend at auto"

    def _watch(self, request: RequestArrived) -> StopTexts:
        assert self.text is not None
        ids = np.frombuffer(prompt_bytes(request.prompt), np.int32).tolist()
        return StopTexts(self.text, ids, request.stop_texts)

    def _needs_text(self, what: str) -> Text:
        if self.text is None:
            raise ConfigError(f"{what} needs a tokenizer.json in the model's folder\nhint: give token ids")
        return self.text


FAILURES = {"invalid": "the model's logits were no numbers, or nothing was allowed to be said"}
"""What is said of an answer that ended for such a reason."""


class PendingRequest:
    """A request on its way: `LLM.ask` gives it, `LLM.wait` takes it. It is the request's sink.

    The host's thread only keeps tokens; their text is written by the thread that asks for it.
    """

    def __init__(
        self,
        answer: RequestOutput,
        text: Text | None,
        stops: Sequence[str],
        tokens: SimpleQueue[list[int] | None] | None,
    ) -> None:
        self.answer = answer
        self.samples = [self]  # and those of the other answers to the same prompt, in order
        self.over = threading.Event()
        self.failure = ""
        self._tokens = tokens
        self._watch = StopTexts(text, answer.prompt_token_ids, stops) if text is not None else None
        self._spelled = 0  # tokens
        self._shown = 0  # characters that were given out

    # ------------------------------------------------------------------------------------------ in the host's thread

    def tokens(self, offset: int, tokens: list[int], logprobs: TokenLogprobs | None) -> None:
        """Take in new tokens; what was seen before is passed over."""
        ids = self.answer.token_ids
        repeats = len(ids) - offset
        new = tokens[repeats:] if repeats else tokens
        ids += new
        if logprobs is not None:
            self.answer.logprobs += logprobs.logprobs.tolist()[repeats:]
            if logprobs.top_ids is not None and logprobs.top_logprobs is not None:
                pairs = zip(logprobs.top_ids.tolist(), logprobs.top_logprobs.tolist(), strict=True)
                self.answer.top_logprobs += [dict(zip(ids, values, strict=True)) for ids, values in pairs][repeats:]
        if self._tokens is not None:
            self._tokens.put(new)

    def finished(self, end: FinishRequest, extras: ResultExtras) -> None:
        """The end."""
        answer = self.answer
        answer.finish_reason, answer.cached_tokens = end.reason, end.cached_tokens
        answer.error = extras.error if end.reason == "error" else FAILURES.get(end.reason, "")
        answer.prompt_logprobs = dict(sorted(extras.prompt_logprobs.items()))
        answer.prompt_top_logprobs = dict(sorted(extras.prompt_top_logprobs.items()))
        if extras.hidden_states:
            answer.hidden_states = np.stack([extras.hidden_states[p] for p in sorted(extras.hidden_states)])
        if extras.pooled is not None:
            answer.vector = extras.pooled.values
        answer.weights = extras.weights
        self._end()

    def rejected(self, end: RejectRequest) -> None:
        """It never ran."""
        self.answer.finish_reason, self.answer.error = end.reason, end.message
        self._end()

    def failed(self, message: str) -> None:
        """The engine ended."""
        self.failure = message
        self._end()

    def _end(self) -> None:
        self.over.set()
        if self._tokens is not None:
            self._tokens.put(None)

    # --------------------------------------------------------------------------------- in the thread of whoever waits

    def spell(self, tokens: Sequence[int]) -> str:
        """Text that these tokens, the next ones, add to what was given out; nothing behind a stop."""
        self._push(tokens)
        whole = self._text()
        new, self._shown = whole[self._shown :], max(self._shown, len(whole))
        return new

    def spell_rest(self) -> None:
        """Write the text of the whole answer."""
        if self._watch is not None:
            self._push(self.answer.token_ids[self._spelled :])
            self.answer.text = self._text()

    def _push(self, tokens: Sequence[int]) -> None:
        if self._watch is not None:
            for number, token in enumerate(tokens, self._spelled):
                self._watch.push(number, token)
            self._spelled += len(tokens)

    def _text(self) -> str:
        return "" if self._watch is None else self._watch.decoded[: self._watch.stopped_at()]


def model_name(folder: Path) -> str:
    """What a folder's model is called: by its folder, and the demo model `demo`."""
    from lockstep.runtime.demo_model import COMMITTED

    name = folder.resolve()
    return "demo" if name == COMMITTED.resolve() else name.name


def demo_folder() -> Path:
    """The folder of the demo model."""
    from lockstep.runtime.demo_model import demo_model_folder

    return demo_model_folder()


def _scored_at_once(answer: RequestOutput, tokens: list[int]) -> Scored:
    """What the logits of a prompt's last position say of these tokens."""
    if answer.error or answer.vector is None:
        return Scored(answer.prompt_token_ids, error=answer.error or f"it ended with reason {answer.finish_reason}")
    logits = answer.vector.astype(np.float64)
    largest = logits.max()
    logprobs = (logits[tokens] - largest - np.log(np.exp(logits - largest).sum())).tolist()
    return Scored(answer.prompt_token_ids, logprobs, [[one] for one in logprobs])


def _scored_by_label(prompt: list[int], answers: Sequence[RequestOutput]) -> Scored:
    """What came of the labels of one prompt, each judged behind it."""
    for answer in answers:
        missing = len(answer.prompt_token_ids) - len(prompt) - len(answer.prompt_logprobs)
        if answer.error or missing:
            return Scored(prompt, error=answer.error or f"a label ended with reason {answer.finish_reason}")
    tokens = [list(answer.prompt_logprobs.values()) for answer in answers]
    return Scored(prompt, [sum(one) for one in tokens], tokens)


def _refuse_unknown(sched: dict[str, Any]) -> None:
    """Raise ConfigError for a setting that SchedConfig does not have."""
    names = [one.name for one in msgspec.structs.fields(SchedConfig)]
    for name in sched:
        refuse_simulated_only(name)
        if name not in names:
            near = get_close_matches(name, names)
            hint = f"did you mean {' or '.join(near)}?" if near else "docs/scheduling.md lists all settings"
            raise ConfigError(f"there is no setting `{name}`\nhint: {hint}")


def _check_whole(name: str, value: object, *, optional: bool) -> None:
    """Raise ConfigError, naming the field and the type, for what is no whole number."""
    if (value is None and optional) or (isinstance(value, int) and not isinstance(value, bool)):
        return
    expected = "a whole number" + (" or None" if optional else "")
    raise ConfigError(f"`{name}` must be {expected}, got `{value}`, which is of type {type(value).__name__}")


def _seed(seed: int, number: int) -> int:
    """The seed of request `number` of an LLM with this seed; 63 bits."""
    return int.from_bytes(blake2b(f"{seed} {number}".encode(), digest_size=8).digest(), "little") >> 1


def _sampling(params: Params) -> SamplingParams:
    """As the engine is told. A whole number is made one with a point, which it is to whoever reads it back."""
    return SamplingParams(
        temperature=float(params.temperature),
        top_p=float(params.top_p),
        top_k=params.top_k,
        min_p=float(params.min_p),
        frequency_penalty=float(params.frequency_penalty),
        presence_penalty=float(params.presence_penalty),
        repetition_penalty=float(params.repetition_penalty),
        seed=params.seed or 0,
        logit_bias=tuple(sorted((token, float(bias)) for token, bias in params.logit_bias.items())),
        top_logprobs=params.logprobs or 0,
        logit_processors=tuple((name, _json(name, given)) for name, given in sorted(params.logit_processors.items())),
        allowed_token_ids=tuple(sorted(set(params.allowed_token_ids or ()))),
        prompt_top_logprobs=params.prompt_logprobs or 0,
    )


def _json(name: str, arguments: Arguments) -> str:
    """Arguments of a logit processor as a journal holds them."""
    try:
        return json.dumps(arguments, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"`logit_processors`: the arguments of `{name}` must be a JSON object: {error}") from error


def _listed(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """One prompt or several, as several: a text, or something that begins with a number, is one."""
    one = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], Integral))
    return cast("Sequence[Prompt]", [prompts] if one else prompts)


def _token_ids(prompt: Sequence[int]) -> list[int]:
    """The ids of a prompt. Raises ConfigError for what cannot be one; whether the model has it is seen later."""
    ids = []
    for token in prompt:
        try:
            ids.append(index(token))
        except TypeError as error:
            raise ConfigError(f"`prompt` holds {token!r}, which is no token id") from error
        if not 0 <= ids[-1] < 2**31:
            raise ConfigError(f"`prompt` holds {token}, which is no token id")
    return ids


def _check_params(params: Params) -> None:
    """Raise ConfigError, naming the field, for values that are not of its type, or larger than a journal can hold."""
    try:
        msgspec.convert(vars(params), Params)
    except msgspec.ValidationError as error:
        expected, _, where = str(error).partition(" - at ")
        name = where.partition("$.")[2].rstrip("`").partition("[")[0]
        raise ConfigError(f"`{name}` is {getattr(params, name)!r}: {expected[:1].lower()}{expected[1:]}") from error
    if not 1 <= params.n <= SAMPLES_MAX:
        raise ConfigError(f"`n` must be 1 to {SAMPLES_MAX}, got `{params.n}`")
    if not all(params.stop):
        raise ConfigError("`stop` holds an empty text, which is in front of every answer\nhint: leave it out")
    if params.allowed_token_ids is not None and not len(params.allowed_token_ids):
        raise ConfigError("`allowed_token_ids` is empty, so that nothing could be said\nhint: None allows every token")


def _each(params: Params | Sequence[Params] | None, count: int) -> Sequence[Params]:
    """Parameters for each of so many prompts."""
    if params is None or isinstance(params, Params):
        return [params or Params()] * count
    if len(params) != count:
        raise ConfigError(f"`params` must be one for all or one for each of {count} prompts, got {len(params)}")
    return params
