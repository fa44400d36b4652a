"""The state of a worker that every endpoint uses."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import nan
from typing import Any, Generic, TypeVar

from msgspec import structs
from starlette.requests import Request
from starlette.responses import Response

from lockstep.api.endpoints.errors import ApiError
from lockstep.api.endpoints.fields import ignore
from lockstep.api.endpoints.generation import Generation, GenerationRequest, Prompt, unavailable
from lockstep.api.endpoints.http import BodyReader, in_process
from lockstep.api.endpoints.kept_answers import KeptAnswers
from lockstep.api.endpoints.keys import Keys
from lockstep.api.endpoints.schemas import Body
from lockstep.api.endpoints.stored_conversations import StoredConversations
from lockstep.api.endpoints.stored_files import StoredFiles
from lockstep.api.endpoints.stored_responses import StoredResponses
from lockstep.api.endpoints.usage import UsageCounter
from lockstep.api.engines import formats_of
from lockstep.api.observability.metrics import Metrics
from lockstep.api.observability.served import Recent, Watcher
from lockstep.api.processes.bridge import EngineUnavailable
from lockstep.api.processes.cluster_bridge import Engines
from lockstep.api.processes.text_processes import TextProcesses
from lockstep.api.processes.wire import EngineInfo
from lockstep.api.settings import Limits, ServeSettings
from lockstep.api.text.plain_text import Texts
from lockstep.api.text.token_names import TokenNames

BodyType = TypeVar("BodyType", bound=Body | None)


TOGETHER, TOGETHER_CHARACTERS = "X-Session-Id", 256
"""Header with the key of requests that should run on one engine of several, and its greatest length."""

URL_CHARACTERS = 256  # of a data URL, in front of the data
AT_ONCE_CHARACTERS, AT_ONCE_TOKENS = 4096, 1024
"""Text up to this length is tokenised in the event loop, in well under a millisecond, and tokens are made text."""

YIELDS_CHARACTERS = 256
"""After a longer text other tasks get their turn: a request may have many texts."""

ROUTING, ROUTING_CHARACTERS = "X-SMG-Routing-Key", 256
"""SGLang's header for `routing_key`, and its greatest length."""

RANK = "X-data-parallel-rank"
"""vLLM's header for `data_parallel_rank`."""

CHARACTERS_MIN = 2**20
"""Text up to this length is always tokenised, since some tokenizers drop characters; longer text may be refused."""


GENERATION = "lockstep.generation"
"""Key of the newest generation in the scope of the request that began it."""


@dataclass(frozen=True, slots=True)
class Call(Generic[BodyType]):
    """One HTTP request, with access granted and its body read."""

    request: Request
    body: BodyType
    tenant: str
    arrived_s: float  # time.monotonic

    def ignore(self, name: str) -> None:
        """Record that a field is accepted without effect; the answer and the log name it."""
        ignore(self.request, name)


@dataclass
class Server:
    """The state of one worker.

    Attributes:
        batched: handler and schema of the endpoints that batches may call, by path.
    """

    settings: ServeSettings
    bridge: Engines
    text: Texts | None
    keys: Keys | None
    metrics: Metrics
    processes: TextProcesses
    usage: UsageCounter | None = None
    responses: StoredResponses | None = None
    answers: KeptAnswers | None = None
    conversations: StoredConversations | None = None
    files: StoredFiles | None = None
    batched: dict[str, tuple[Callable[[Server, Any], Awaitable[Response]], type[Body]]] = field(default_factory=dict)
    batch_runs: set[asyncio.Task[None]] = field(default_factory=set)  # tasks that run batches
    kept_runs: set[asyncio.Task[None]] = field(default_factory=set)  # tasks that make kept answers
    background: set[asyncio.Task[None]] = field(default_factory=set)  # answers made in the background
    watchers: list[Watcher] = field(default_factory=list)  # called with every request that was answered
    on_ready: list[Callable[[], object]] = field(default_factory=list)  # called once, when the engine can take requests
    recent: Recent = field(default_factory=Recent)
    started_s: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False
    probe: asyncio.Future[bool] | None = None  # newest probe of /health_generate
    probed_s: float = 0.0  # when the probe ended, time.monotonic

    def __post_init__(self) -> None:
        self.bodies = BodyReader(self.processes, self.limits, self.settings.strict, self.body_characters_max)
        self.names = TokenNames(self.text)
        self.formats = formats_of(self.settings, self.text)
        self._token_characters = 1 if self.text is None else self.text.characters_max()
        self._prepares_media = False
        self.watchers.append(self.recent.add)
        self.bridge.welcome = self._welcome

    def _welcome(self, info: EngineInfo) -> None:
        name = (self.settings.served_model_name or (info.model,))[0]
        self.metrics.name_model(name, len(self.bridge.engines))
        for one in self.on_ready:
            one()
        if info.media and not self._prepares_media:
            self._prepares_media = True
            task = asyncio.ensure_future(self.processes.prepare_media())
            self.background.add(task)
            task.add_done_callback(self.background.discard)

    @property
    def limits(self) -> Limits:
        return self.settings.limits

    def info(self) -> EngineInfo:
        """Return the properties of the engine. Raises ApiError while there is no engine."""
        if self.bridge.gone:
            raise unavailable(EngineUnavailable(self.bridge.gone))
        if self.bridge.info is None:
            raise unavailable(EngineUnavailable("the engine is starting"))
        return self.bridge.info

    def models(self) -> tuple[str, ...]:
        """Return the names of the model for clients. Raises ApiError while there is no engine."""
        return self.settings.served_model_name or (self.info().model,)

    def model(self, requested: str | None) -> str:
        """Return the model name for the answer. Raises ApiError, 404, for a model that is not served."""
        known = self.models()
        if requested is not None and requested not in known and not self._adapter_named(requested):
            served = ", ".join((*known, *self.bridge.adapters))
            raise ApiError(404, f"The model `{requested}` does not exist; this server has {served}.", "model")
        return known[0] if requested is None else requested

    def _adapter_named(self, requested: str | None) -> str:
        """Return the adapter of a model name: ADAPTER, or MODEL:ADAPTER as in SGLang; empty for none."""
        adapters = self.bridge.adapters
        if not adapters or requested is None or requested in self.models():
            return ""
        model, _, name = requested.partition(":")
        return requested if requested in adapters else name if model in self.models() and name in adapters else ""

    def adapter(self, model: str | None, lora_path: str | None = None) -> str:
        """Return the adapter of a request; empty for the model alone. Raises ApiError if it is not loaded.

        Args:
            lora_path: SGLang's field for the name of an adapter.
        """
        # raises for an adapter that was just unloaded: its requests must not run on the model alone
        self.model(model)
        named = self._adapter_named(model)
        if not lora_path:
            return named
        if lora_path not in self.bridge.adapters:
            loaded = ", ".join(self.bridge.adapters) or "none"
            raise ApiError(
                400, f"`lora_path` is {lora_path[:60]!r}, which is not loaded; loaded: {loaded}", "lora_path"
            )
        if named and named != lora_path:
            raise ApiError(400, f"`model` is {named[:60]!r}, and `lora_path` another adapter; give one", "lora_path")
        return lora_path

    def needs_text(self, what: str) -> Texts:
        """Return the tokenizer. Raises ApiError if the model has none; `what` is the subject of the message."""
        if self.text is None:
            raise ApiError(400, f"{what} needs a tokenizer, and this model has none; give token ids")
        return self.text

    async def encode(self, what: str, prompt: str, *, special: bool) -> Sequence[int]:
        """Tokenise a text, in a text process if it is long. Raises ApiError for text that is too long to fit."""
        text = self.needs_text(what)
        self.check_length(what, len(prompt))
        if len(prompt) > AT_ONCE_CHARACTERS:
            return await in_process(self.processes.encode(prompt, special=special))
        ids = text.encode(prompt, special=special)
        if len(prompt) > YIELDS_CHARACTERS:  # it may be one of many
            await asyncio.sleep(0)
        return ids

    async def encode_pair(self, what: str, first: str, second: str, most: int | None) -> Prompt:
        """Return two texts as one prompt, in a text process if they are long. Raises ApiError, as `encode` does.

        Args:
            most: greatest number of tokens; the longer text is cut. None: nothing is cut.
        """
        text = self.needs_text(what)
        self.check_length(what, len(first) + len(second))
        ids: Sequence[int]
        types: Sequence[int]
        if len(first) + len(second) > AT_ONCE_CHARACTERS:
            ids, types = await in_process(self.processes.encode_pair(first, second, most))
        else:
            ids, types = text.encode_pair(first, second, most)
            await asyncio.sleep(0)  # it may be one of many
        return Prompt(ids, types=bytes(types) if self.info().token_types > 1 and any(types) else b"")

    async def decode(self, what: str, ids: Sequence[int], *, verbatim: bool = False) -> str:
        """Convert token ids to text, in a text process if they are many. Raises ApiError without a tokenizer.

        Args:
            verbatim: decode special tokens, too.
        """
        text = self.needs_text(what)
        if len(ids) > AT_ONCE_TOKENS:
            return await in_process(self.processes.decode(ids, verbatim=verbatim))
        return (text.verbatim() if verbatim else text).decode(ids)

    def characters_max(self) -> int:
        """Return the number of characters of the longest text that could fit, at least CHARACTERS_MIN."""
        return max(CHARACTERS_MIN, self.info().prompt_tokens_max * self._token_characters)

    def body_characters_max(self) -> int:
        """Return the number of characters of the longest text in a body: a medium may be longer than a prompt."""
        by_kind = {
            "image": self.limits.image_bytes_max,
            "audio": self.limits.audio_bytes_max,
            "video": self.limits.video_bytes_max,
        }
        most = max((by_kind[kind] for kind in self.info().media), default=0)
        return max(self.characters_max(), most * 4 // 3 + URL_CHARACTERS if most else 0)

    def check_length(self, what: str, characters: int) -> None:
        """Refuse text that is certainly too long, without tokenising it. Raises ApiError."""
        most = self.characters_max()
        if characters > most:
            raise ApiError(400, f"{what} has {characters} characters, and at most {most} can fit", what.strip("`"))

    def generate(
        self,
        call: Call[BodyType],
        parameters: GenerationRequest,
        prompts: list[Prompt],
        each: Sequence[GenerationRequest] = (),
    ) -> Generation:
        """Send a request to the engine. Raises ApiError.

        Args:
            each: parameters of each prompt, where they differ.
        """
        if self.draining:
            raise ApiError(503, "the server is about to stop")
        start_by_s = _deadline(call, "X-Queue-Timeout", "queue_timeout_s")
        finish_by_s = _deadline(call, "X-Request-Timeout", "timeout_s")
        body = call.body
        if not each and (adapter := self.adapter(getattr(body, "model", None), getattr(body, "lora_path", None))):
            parameters = structs.replace(parameters, adapter=adapter)
        if key := self._routing_key(call):
            parameters = structs.replace(parameters, routing_key=key)
            each = [structs.replace(one, routing_key=key) for one in each]
        generation = Generation(self.bridge, self.metrics, parameters, call.arrived_s, start_by_s, finish_by_s)
        together = getattr(body, "session_id", None) or call.request.headers.get(TOGETHER)
        if together is not None:
            generation.together = f"{call.tenant}\0{together[:TOGETHER_CHARACTERS]}"
        generation.named = self._named_engine(call)
        admit = None
        if self.usage is not None and self.keys is not None:
            admit = partial(self.usage.admit, call.tenant, self.keys.allowance(call.tenant))
        generation.start(prompts, self.text, self.limits, admit=admit, each=each)
        call.request.scope[GENERATION] = generation
        return generation

    def _named_engine(self, call: Call[BodyType]) -> int | None:
        """Return the number of the engine that the client requests, by the field or the header. Raises ApiError."""
        name, number = "data_parallel_rank", getattr(call.body, "data_parallel_rank", None)
        if number is None and (header := call.request.headers.get(RANK)) is not None:
            name, header = RANK, header[:ROUTING_CHARACTERS]
            if not (header.isascii() and header.isdigit()):
                raise ApiError(400, f"`{RANK}` must be the number of an engine, got {header[:40]!r}", RANK)
            number = int(header[:12])
        if number is None:
            return None
        if self.settings.hands_over:
            raise ApiError(400, f"`{name}` is {number}, but the router pairs prefill and decode engines; drop it", name)
        if number >= self.settings.dp:
            last = self.settings.dp - 1
            raise ApiError(400, f"`{name}` is {number}, but this server has engine 0{f' to {last}' * (last > 0)}", name)
        return int(number)

    def _routing_key(self, call: Call[BodyType]) -> str:
        """Return the key of requests that should run together, from the field or the header; "" without."""
        given = getattr(call.body, "routing_key", None) or call.request.headers.get(ROUTING, "")[:ROUTING_CHARACTERS]
        return f"{call.tenant}/{given}" if given else ""


def _deadline(call: Call[BodyType], header: str, name: str) -> float | None:
    """Return the earlier deadline (time.monotonic) of a header and a field; None without both. Raises ApiError."""
    given = call.request.headers.get(header)
    field_s: float | None = getattr(call.body, name, None)
    times = [] if field_s is None else [field_s]
    if given is not None:
        try:
            times.append(float(given[:20]))
        except ValueError:
            times.append(nan)
        if not 0.0 < times[-1] <= 1e6:
            raise ApiError(400, f"the header `{header}` must be seconds above 0, got {given[:40]!r}", header)
    return call.arrived_s + min(times) if times else None
