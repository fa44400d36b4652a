"""A model in this process, with the whole engine around it.

    from lockstep.runtime import LLM, Params

    with LLM() as llm:                                   # the small demo model; or a Hugging Face folder
        for answer in llm.generate(["def ", "import "], Params(max_new_tokens=20)):
            print(answer.text)
        for piece in llm.stream("Returns"):
            print(piece.text, end="")

Requests go through the same scheduler as everywhere: radix cache, chunks, retraction, overlap. The engine runs in a
thread of its own, so any number of threads may ask at once. With `journal` every decision is recorded, and
`lockstep replay` makes them again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from hashlib import blake2b
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self

import msgspec
import numpy as np
import torch
from torch import Tensor

from lockstep.core.commands import FinishRequest, RejectRequest, RowTaken
from lockstep.core.config import SchedConfig
from lockstep.core.engine import Engine
from lockstep.core.errors import ConfigError, LockstepError
from lockstep.core.events import RequestArrived, RequestKind, SamplingParams, TokenIds
from lockstep.core.journal import JournalHeader, JournalWriter
from lockstep.core.requests import prompt_bytes
from lockstep.runtime.attention import Choice, choose, make
from lockstep.runtime.attention.base import Numerics
from lockstep.runtime.canary import Canary
from lockstep.runtime.errors import EngineStopped
from lockstep.runtime.executor import Executor, RowContext
from lockstep.runtime.forward import ForwardBatch
from lockstep.runtime.graphs import (
    ROWS_MAX,
    CudaGraphs,
    DecodeGraphs,
    EagerGraphs,
    GraphMode,
    check_graph_mode,
    expected_bytes,
    graph_sizes,
)
from lockstep.runtime.host import Extras, HostClock, Int32s, NoJournal, RuntimeHost, TokenLogprobs
from lockstep.runtime.kv_pool import KvPool
from lockstep.runtime.memory import MIB, MemoryBudget, explained, size_pool
from lockstep.runtime.models import Decoder, build_model
from lockstep.runtime.models.settings import DTYPES
from lockstep.runtime.overlap import CpuLane, CudaLane, Lane
from lockstep.runtime.sampling import Sampled, Sampler, SamplingTable, check_sampling
from lockstep.runtime.tables import Tables
from lockstep.runtime.text import Message, StopTexts, Text

log = logging.getLogger("lockstep.runtime")

Prompt = str | Sequence[int]


@dataclass(frozen=True, kw_only=True)
class Params:
    """What is wanted of one request. Names and meanings are those of vLLM and SGLang where they have one."""

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int | None = None  # None: one of its own, which follows from the LLM's
    stop: Sequence[str] = ()  # texts; the answer ends in front of the first
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # of each output token, and of so many of the likeliest beside it
    prompt_logprobs: bool = False
    hidden_states: bool = False
    priority: int | None = None


@dataclass(slots=True)
class Answer:
    """What came of one request."""

    request_id: int
    prompt_token_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    text: str | None = None  # None without a tokenizer
    finish_reason: str = ""  # of the core: length, stop, text_stop, computed, ...; or why it was rejected
    error: str = ""  # a sentence, where it was rejected
    cached_tokens: int = 0  # of the prompt
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[dict[int, float]] = field(default_factory=list)
    prompt_logprobs: dict[int, float] = field(default_factory=dict)  # by position
    hidden_states: Any = None  # float32 [positions, hidden]
    vector: Any = None  # float32 [hidden] or, of kind score, [vocabulary]


@dataclass(frozen=True, slots=True)
class Piece:
    """What is new of an answer."""

    text: str
    token_ids: list[int]
    answer: Answer | None = None  # the whole of it, with the last piece


class TableSampler:
    """`sampling` behind the executor's protocol."""

    def __init__(self, table: SamplingTable, sampler: Sampler) -> None:
        self.table, self.sampler = table, sampler

    def take_row(self, taken: RowTaken, context: RowContext) -> None:
        """Settings, and what penalties start with."""
        self.table.take_row(
            taken.row,
            taken.sampling,
            context.tokens[: context.prompt_tokens],
            context.tokens[context.prompt_tokens :],
            min_new_tokens=context.min_new_tokens,
            stop_token_ids=context.stop_token_ids,
            logprobs=taken.logprobs,
        )

    def sample(
        self, logits: Tensor, rows: Tensor, positions: Tensor, rows_host: Int32s, allowed: Tensor | None
    ) -> Sampled:
        """Draw."""
        return self.sampler.sample(logits, rows, positions, rows_host, allowed)


class LLM:
    """A model with its engine.

    Args:
        model: a Hugging Face folder; None is the demo model.
        device: cpu, cuda, cuda:1; auto takes a GPU if there is one.
        dtype: of weights and KV: bfloat16, float16, float32; auto takes that of the folder, on the CPU float32.
        attention_backend, numerics: see `attention.choose`.
        random_weights_seed: fill the model with small random values; only the folder's config.json is read.
        mem_fraction: of a GPU's memory; what weights, activations and graphs leave of it is for KV.
        cuda_graphs: whether decodes are replayed from CUDA graphs: auto, on, off, eager (graphs.GraphMode).
        cuda_graph_max_batch: rows of the largest graph; None: max_running_requests, at most 512.
        seed: what seeds of requests that name none follow from.
        journal: a run folder, in which every fact and decision is recorded.
        debug: check every plan, and verify the tag of every KV slot before it is read. Slow.
        sched: fields of SchedConfig. Sizes not given follow from the model and the device.
    Raises: ConfigError.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        device: str = "auto",
        dtype: str = "auto",
        attention_backend: str = "auto",
        numerics: Numerics = "fast",
        random_weights_seed: int | None = None,
        mem_fraction: float = 0.9,
        cuda_graphs: GraphMode = "auto",
        cuda_graph_max_batch: int | None = None,
        seed: int = 0,
        journal: str | Path | None = None,
        debug: bool = False,
        **sched: Any,
    ) -> None:
        _refuse_unknown(sched)
        folder = demo_folder() if model is None else Path(model)
        where = _device(device)
        check_graph_mode(cuda_graphs, where, cuda_graph_max_batch)
        with explained("the weights", where, "a smaller model, a narrower dtype, or a GPU with less on it"):
            self.model = build_model(folder, _dtype(dtype, where), where, random_weights_seed=random_weights_seed)
        self.text = Text(folder) if (folder / "tokenizer.json").is_file() else None
        self.seed = seed
        pick = partial(_backend, self.model, attention_backend, numerics, cuda_graphs, cuda_graph_max_batch)
        self.config, self.memory, choice, sizes = _sized(self.model, where, mem_fraction, numerics, pick, sched)
        self.attention_backend = choice.name
        clock = HostClock()
        executor = make_executor(
            self.model,
            self.config,
            clock,
            attention_backend=choice.name,
            numerics=numerics,
            debug=debug,
            graph_sizes=sizes,
        )
        self._journal: JournalWriter | None = None
        if journal is not None:
            header = JournalHeader(config=self.config, seed=seed, host={"kind": "runtime", "model": folder.name})
            self._journal = JournalWriter.create(journal, header)
        self.host = RuntimeHost(
            Engine(self.config),
            executor,
            self._journal or NoJournal(),
            clock,
            check_request=self._check,
            watch_text=self._watch if self.text is not None else None,
        )
        self._requests = 0
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._serve, name="lockstep-host", daemon=True)
        self._thread.start()

    # --------------------------------------------------------------------------------------------------- questions

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params | Sequence[Params] | None = None,
        *,
        progress: Callable[[int], object] | None = None,
    ) -> list[Answer]:
        """Answer prompts, text or token ids, all together; answers in their order.

        Args:
            params: for all of them, or one for each.
            progress: called with the number of answers that have ended, after each.
        Raises: EngineStopped if the engine ends first; a prompt that cannot be served has `error` in its answer.
        """
        listed = _listed(prompts)
        return self._await([self.ask(*pair) for pair in zip(listed, _each(params, len(listed)), strict=True)], progress)

    def chat(
        self,
        conversations: Sequence[Message] | Sequence[Sequence[Message]],
        params: Params | Sequence[Params] | None = None,
        *,
        progress: Callable[[int], object] | None = None,
    ) -> list[Answer]:
        """Answer one conversation or several, written by the model's chat template."""
        several = [conversations] if conversations and isinstance(conversations[0], dict) else conversations
        return self.generate([self.chat_prompt(one) for one in several], params, progress=progress)  # type: ignore[arg-type]

    def chat_prompt(self, messages: Sequence[Message]) -> list[int]:
        """The token ids of a conversation, ready for the answer."""
        text = self._needs_text("a conversation")
        return text.encode(text.chat(messages), special=False)

    def stream(self, prompt: Prompt, params: Params | None = None) -> Iterator[Piece]:
        """Answer one prompt piece by piece; the last piece carries the whole answer. Leaving early cancels it."""
        asked = self.ask(prompt, params or Params(), pieces=SimpleQueue())
        assert asked.pieces is not None
        try:
            while True:
                piece = asked.pieces.get()
                if asked.failure:
                    raise EngineStopped(asked.failure)
                assert piece is not None
                yield piece
                if piece.answer is not None:
                    return
        finally:
            if not asked.over.is_set():
                self.host.cancel(asked.answer.request_id)

    def embed(
        self, prompts: Prompt | Sequence[Prompt], *, progress: Callable[[int], object] | None = None
    ) -> list[Answer]:
        """One vector for each prompt, in `vector`: the mean of the last layer's hidden states over all positions."""
        nothing = Params(max_new_tokens=0)
        return self._await([self.ask(prompt, nothing, kind="embed") for prompt in _listed(prompts)], progress)

    def ask(
        self,
        prompt: Prompt,
        params: Params,
        *,
        kind: RequestKind = "generate",
        pieces: SimpleQueue[Piece | None] | None = None,
    ) -> Asked:
        """Send one request without waiting for its answer. With `pieces`, what is new of it is put there."""
        if isinstance(prompt, str):
            ids = self._needs_text("a text prompt").encode(prompt)
        else:
            ids = [int(token) for token in prompt]
        for token in ids:
            if not 0 <= token < 2**31:
                raise ConfigError(f"`prompt` holds {token}, which is no token id")
        with self._lock:
            number = self._requests
            self._requests += 1
        seed = params.seed if params.seed is not None else _seed(self.seed, number)
        request = RequestArrived(
            0,
            request_id=-1,
            prompt=TokenIds(np.array(ids, np.int32).tobytes()),
            max_new_tokens=params.max_new_tokens,
            min_new_tokens=params.min_new_tokens,
            stop_token_ids=tuple(params.stop_token_ids),
            ignore_eos=params.ignore_eos,
            stream=pieces is not None,
            priority=params.priority,
            kind=kind,
            sampling=_sampling(params, seed),
            stop_texts=tuple(params.stop),
            logprob_start=0 if params.prompt_logprobs else len(ids) if params.logprobs is not None else None,
            return_hidden_states=params.hidden_states,
        )
        asked = Asked(Answer(-1, ids), self.text, params.stop, pieces)
        asked.answer.request_id = self.host.submit(request, asked)
        return asked

    def wait(self, asked: Asked) -> Answer:
        """The answer, once it is whole. Raises EngineStopped if the engine ends first."""
        asked.over.wait()
        if asked.failure:
            raise EngineStopped(asked.failure)
        return asked.answer

    def close(self) -> None:
        """End the engine; whoever waits is told."""
        self.host.stop()
        if self._thread is not threading.current_thread():
            self._thread.join()
        if self._journal is not None:
            self._journal.close()

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
            log.error("the engine failed: %s", error)  # and everybody who waits was told
        except Exception:
            log.exception("the engine failed")  # where, is for whoever mends it

    def _await(self, asked: Sequence[Asked], progress: Callable[[int], object] | None) -> list[Answer]:
        """Wait for all, in the order in which they were asked; Ctrl-C cancels what is left."""
        try:
            for ended, one in enumerate(asked):
                self.wait(one)
                if progress is not None:
                    progress(ended + 1)
        except BaseException:
            for one in asked:
                if not one.over.is_set():
                    self.host.cancel(one.answer.request_id)
            raise
        return [one.answer for one in asked]

    def _check(self, request: RequestArrived) -> None:
        """Refuse what this model cannot do, before the engine hears of it."""
        vocabulary = self.model.settings.vocab
        if request.sampling is not None:
            check_sampling(request.sampling, vocabulary)
        largest = int(np.frombuffer(prompt_bytes(request.prompt), np.int32).max(initial=0))
        for name, token in (("prompt", largest), *(("stop_token_ids", one) for one in request.stop_token_ids)):
            if token >= vocabulary:
                raise ConfigError(f"`{name}` holds token {token}, but the model has {vocabulary}")

    def _watch(self, request: RequestArrived) -> StopTexts:
        assert self.text is not None
        ids = np.frombuffer(prompt_bytes(request.prompt), np.int32).tolist()
        return StopTexts(self.text, ids, request.stop_texts)

    def _needs_text(self, what: str) -> Text:
        if self.text is None:
            raise ConfigError(f"{what} needs a tokenizer.json in the model's folder\nhint: give token ids")
        return self.text


class Asked:
    """A request on its way: `LLM.ask` gives it, `LLM.wait` takes it. It is the request's sink."""

    def __init__(
        self, answer: Answer, text: Text | None, stops: Sequence[str], pieces: SimpleQueue[Piece | None] | None
    ) -> None:
        self.answer, self.pieces = answer, pieces
        self.over = threading.Event()
        self.failure = ""
        self._watch = StopTexts(text, answer.prompt_token_ids, stops) if text is not None else None
        self._shown = 0  # characters that were given out

    def tokens(self, offset: int, tokens: Int32s, logprobs: TokenLogprobs | None) -> None:
        """Take in new tokens; what was seen before is passed over."""
        repeats = len(self.answer.token_ids) - offset
        new: list[int] = tokens.tolist()[repeats:]
        if self._watch is not None:
            for number, token in enumerate(new, len(self.answer.token_ids)):
                self._watch.push(number, token)
        self.answer.token_ids += new
        if logprobs is not None:
            self.answer.logprobs += logprobs.logprobs.tolist()[repeats:]
            if logprobs.top_ids is not None and logprobs.top_logprobs is not None:
                pairs = zip(logprobs.top_ids.tolist(), logprobs.top_logprobs.tolist(), strict=True)
                self.answer.top_logprobs += [dict(zip(ids, values, strict=True)) for ids, values in pairs][repeats:]
        if self.pieces is not None:
            self.pieces.put(Piece(self._new_text(), new))

    def finished(self, end: FinishRequest, extras: Extras) -> None:
        """The end."""
        answer = self.answer
        answer.finish_reason, answer.cached_tokens = end.reason, end.cached_tokens
        answer.prompt_logprobs = dict(sorted(extras.prompt_logprobs.items()))
        if extras.hidden_states:
            answer.hidden_states = np.stack([extras.hidden_states[p] for p in sorted(extras.hidden_states)])
        if extras.pooled is not None:
            answer.vector = extras.pooled.values
        self._end()

    def rejected(self, end: RejectRequest) -> None:
        """It never ran."""
        self.answer.finish_reason, self.answer.error = end.reason, end.message
        self._end()

    def failed(self, message: str) -> None:
        """The engine ended."""
        self.failure = message
        self.over.set()
        if self.pieces is not None:
            self.pieces.put(None)

    def _end(self) -> None:
        if self._watch is not None:
            self.answer.text = self._watch.decoded[: self._watch.stopped_at()]
        self.over.set()
        if self.pieces is not None:
            self.pieces.put(Piece(self._new_text(), [], self.answer))

    def _new_text(self) -> str:
        """Text that was not given out yet, up to a stop."""
        if self._watch is None:
            return ""
        whole = self._watch.decoded[: self._watch.stopped_at()]
        new, self._shown = whole[self._shown :], max(self._shown, len(whole))
        return new


# ----------------------------------------------------------------------------------------------------- putting together


def make_executor(
    model: Decoder,
    config: SchedConfig,
    clock: HostClock,
    *,
    attention_backend: str = "reference",
    numerics: Numerics = "fast",
    debug: bool = False,
    lane: Lane | None = None,
    graph_sizes: Sequence[int] = (),
) -> Executor:
    """The executor of a model under these settings, with its pool, tables and sampler.

    Args:
        graph_sizes: decodes are padded up to these numbers of rows, and on a GPU captured.
    """
    device = model.device
    with explained(f"{config.pages:,} KV pages", device, "fewer `pages`, or a smaller mem_fraction"):
        pool = make_pool(model, config.pages, config.page_size)
    attention = make(
        attention_backend, pool, model.heads, scale=model.scale, numerics=numerics, graphs=bool(graph_sizes)
    )
    table = SamplingTable(config.rows_max, model.settings.vocab, device)
    context = config.context_tokens_max if graph_sizes else None
    tables = Tables(config.rows_max, config.pages, config.page_size, device, context_tokens=context, debug=debug)
    canary = None
    if debug:
        canary = Canary(config.rows_max, config.pages, config.page_size, config.context_tokens_max, device)
    gpu = device.type == "cuda"
    if lane is None:
        lane = CudaLane(device, clock) if gpu else CpuLane(clock)
    graphs = None
    if graph_sizes:
        graphs = DecodeGraphs(model, attention, tables, graph_sizes, CudaGraphs() if gpu else EagerGraphs())
        graphs.prepare(lane)
        log.info(
            "%d graphs for decodes of up to %d rows, %.0f MiB", len(graph_sizes), graph_sizes[-1], graphs.bytes / MIB
        )
    return Executor(model, attention, TableSampler(table, Sampler(table)), tables, lane, canary=canary, graphs=graphs)


def make_pool(model: Decoder, pages: int, page_size: int) -> KvPool:
    """A pool for the model's KV."""
    return KvPool(model.layers, pages, page_size, model.kv_heads, model.head_dim, model.dtype, model.device)


def demo_folder() -> Path:
    """The folder of the demo model."""
    from lockstep.runtime.demo_model import demo_model_folder

    return demo_model_folder()


Picked = tuple[Choice, tuple[int, ...]]
"""The attention backend, and the numbers of rows that get graphs."""


def _backend(
    model: Decoder,
    requested: str,
    numerics: Numerics,
    mode: GraphMode,
    graph_rows_max: int | None,
    config: SchedConfig,
) -> Picked:
    """An attention backend that can run in graphs, if there are to be any."""
    ask = partial(choose, requested, model.device, model.dtype, model.head_dim, config.page_size, numerics=numerics)
    sizes = graph_sizes(min(ROWS_MAX if graph_rows_max is None else graph_rows_max, config.max_running_requests))
    if mode == "eager":
        return ask(), sizes
    if mode == "off" or model.device.type != "cuda":
        return ask(), ()
    try:
        return ask(graphs=True), sizes
    except ConfigError as error:
        if mode == "on":
            raise
        choice = ask()  # raises if graphs are not what is wrong
        log.info("no CUDA graphs: %s", str(error).partition("\n")[0])
        return choice, ()


def _sized(
    model: Decoder,
    device: torch.device,
    mem_fraction: float,
    numerics: Numerics,
    pick: Callable[[SchedConfig], Picked],
    sched: dict[str, Any],
) -> tuple[SchedConfig, MemoryBudget, Choice, tuple[int, ...]]:
    """Scheduler settings, with sizes that fit the model and the device."""
    gpu = device.type == "cuda"
    given: dict[str, Any] = {
        "overlap_depth": 1 if gpu else 0,
        "max_running_requests": 256 if gpu else 32,
        "chunked_prefill_size": 8192 if gpu else 1024,
        "eos_token_ids": model.settings.end_tokens,
        **sched,
    }
    given.setdefault("context_tokens_max", min(model.settings.context_tokens, 32768 if gpu else 4096))
    if given["context_tokens_max"] > model.settings.context_tokens:
        raise ConfigError(
            f"`context_tokens_max` {given['context_tokens_max']} is more than the model's "
            f"{model.settings.context_tokens}\nhint: leave it out to take the model's"
        )
    without_pages = SchedConfig(**{"pages": 1 << 20, **given})
    page_size, context = without_pages.page_size, without_pages.context_tokens_max
    page_bytes = KvPool.bytes_per_page(model.layers, page_size, model.kv_heads, model.head_dim, model.dtype)
    choice, sizes = pick(without_pages)
    if "pages" in given:
        budget = MemoryBudget(0, 0, model.weight_bytes, 0, 0, page_bytes, without_pages.pages)
        return without_pages, budget, choice, sizes
    chunk = min(without_pages.chunked_prefill_size or context, without_pages.max_prefill_tokens, context)
    budget = size_pool(
        page_bytes=page_bytes,
        weight_bytes=model.weight_bytes,
        device=device,
        mem_fraction=mem_fraction,
        largest_pass=lambda: _run_once(model, choice.name, chunk, page_size, without_pages.max_running_requests),
        graphs=lambda: _graph_bytes(model, choice.name, numerics, sizes, page_size, context),
        pages_least=-(-context // page_size),
    )
    log.info("memory\n%s", budget.table())
    return SchedConfig(**{**given, "pages": budget.pages}), budget, choice, sizes


def _graph_bytes(
    model: Decoder, backend: str, numerics: Numerics, sizes: tuple[int, ...], page_size: int, context: int
) -> int:
    """What graphs of these sizes are going to take: the two largest are captured, over a pool of one page."""
    if not sizes:
        return 0
    attention = make(
        backend, make_pool(model, 1, page_size), model.heads, scale=model.scale, numerics=numerics, graphs=True
    )
    tables = Tables(1, 1, page_size, model.device, context_tokens=context)
    graphs = DecodeGraphs(model, attention, tables, sizes[-2:], CudaGraphs())
    return expected_bytes(graphs.prepare(CudaLane(model.device, HostClock())), len(sizes))


def _run_once(model: Decoder, backend: str, tokens: int, page_size: int, samples: int) -> None:
    """One extend of so many tokens over a pool of its own, with logits of so many rows."""
    device, pages = model.device, -(-tokens // page_size)
    pool = make_pool(model, pages, page_size)
    attention = make(backend, pool, model.heads, scale=model.scale)
    positions = torch.arange(tokens, device=device)
    batch = ForwardBatch(
        token_ids=torch.zeros(tokens, dtype=torch.int64, device=device),
        positions=positions,
        slots=positions,
        rows=torch.zeros(1, dtype=torch.int32, device=device),
        indptr=torch.tensor([0, tokens], dtype=torch.int32, device=device),
        lengths=torch.tensor([tokens], dtype=torch.int32, device=device),
        page_table=torch.arange(pages, dtype=torch.int32, device=device)[None],
        logits_at=positions[:samples],
        extend_rows=1,
        starts_host=np.zeros(1, np.int32),
        lengths_host=np.array([tokens], np.int32),
    )
    with torch.inference_mode():
        attention.plan(batch)
        hidden = model.forward(batch, attention)
        model.logits(hidden.index_select(0, batch.logits_at)).softmax(-1)


def _refuse_unknown(sched: dict[str, Any]) -> None:
    """Raise ConfigError for a setting that SchedConfig does not have."""
    names = [one.name for one in msgspec.structs.fields(SchedConfig)]
    for name in sched:
        if name not in names:
            near = get_close_matches(name, names)
            hint = f"did you mean {' or '.join(near)}?" if near else "docs/scheduling.md lists all settings"
            raise ConfigError(f"there is no setting `{name}`\nhint: {hint}")


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"`device` must be auto, cpu or cuda, got `{name}`") from error
    if device.type not in ("cpu", "cuda") or (device.type == "cuda" and not torch.cuda.is_available()):
        raise ConfigError(f"`device` is {name}, which torch {torch.__version__} cannot use here\nhint: --device cpu")
    return device


def _dtype(name: str, device: torch.device) -> torch.dtype | None:
    if name == "auto":
        return torch.float32 if device.type == "cpu" else None
    if name not in DTYPES:
        raise ConfigError(f"`dtype` must be auto, {', '.join(DTYPES)}, got `{name}`")
    return DTYPES[name]


def _seed(seed: int, number: int) -> int:
    """The seed of request `number` of an LLM with this seed; 63 bits."""
    return int.from_bytes(blake2b(f"{seed} {number}".encode(), digest_size=8).digest(), "little") >> 1


def _sampling(params: Params, seed: int) -> SamplingParams:
    return SamplingParams(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        repetition_penalty=params.repetition_penalty,
        seed=seed,
        logit_bias=tuple(sorted(params.logit_bias.items())),
        top_logprobs=params.logprobs or 0,
    )


def _listed(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """One prompt or several, as several."""
    if isinstance(prompts, str) or (len(prompts) and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return prompts  # type: ignore[return-value]


def _each(params: Params | Sequence[Params] | None, count: int) -> Sequence[Params]:
    """Parameters for each of so many prompts."""
    if params is None or isinstance(params, Params):
        return [params or Params()] * count
    if len(params) != count:
        raise ConfigError(f"`params` must be one for all or one for each of {count} prompts, got {len(params)}")
    return params
