"""Messages between the processes of a server: typed, bounded in size, and free of code.

    API worker 0 ──Hello, Submit, Cancel, ...──> engine        each arrow is a ZeroMQ socket in a folder with mode
    API worker 1 ─────────────────────────────>                0700; see `sockets.py`
                 <──Welcome, StepAnswers, Answered──
    launcher ──WorkerGone, StopEngine──> engine;  launcher ──EngineRestarting, EngineGone──> workers

With several engines, each engine has a folder of its own with all of these sockets. One more socket belongs to the
router, which assigns requests to engines: `routing`.

    API worker ──Offer, OfferClosed, ...──> router ──Routed──> API worker;  engine ──EngineHere──> router

A restarted engine has a higher generation. A worker that receives its generation sends Hello, submits each open
request again with the number of output tokens that it has, and ends with Settled. Messages to an earlier generation are
ignored.

Rules for changing messages: a message is a msgpack array with the name of its type as first element. Fields are only
added at the end and with a default; any other change raises PROTOCOL. All processes of a server come from one
installation, so an unreadable message is a programming error: `WireError` names it, and the process that received it
ends. A new kind of request is one class here, one handler, and one line in the table of its receiver
(docs/serving.md).
"""

from __future__ import annotations

from typing import Any, Literal, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from lockstep.core.contract.errors import LockstepError
from lockstep.core.contract.events import Control, RequestArrived
from lockstep.core.contract.stats import Stats
from lockstep.host.adapters import KnownAdapters
from lockstep.host.media.content import EncoderInput
from lockstep.host.media.kinds import KINDS
from lockstep.host.weights import WeightsRead

PROTOCOL = 1
OVER = -1
MESSAGE_BYTES_MAX = 256 * 2**20
"""A prompt of a million tokens is 4 MB; the logprobs of such a prompt are the largest content of a message."""

Int32s = NDArray[np.int32]


class WireError(LockstepError):
    """Raised for a message between processes that cannot be read, or that its receiver does not expect."""


# --------------------------------------------------------------------------------------------------------- to an engine


class ToEngine(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """A message to an engine, from a worker or about one. `worker` is the worker that receives the answer."""

    worker: int


class Hello(ToEngine, frozen=True):
    """A worker started, and waits for this generation of the engine or a later one. Answered by Welcome."""

    protocol: int
    generation: int = 0


class Submit(ToEngine, frozen=True):
    """A request, identified to its worker by `ticket`. The engine fills in its time and its id.

    A request that was sent to an earlier generation has `again` set. `have` is the number of output tokens that the
    worker received of each sample, or OVER for a sample that has ended. `request.origin` is its name in the journal.
    """

    ticket: int
    request: RequestArrived
    # monotonic clock of the machine, ns: the request is cancelled if it has not started, or not ended, by then
    start_by_ns: int | None = None
    finish_by_ns: int | None = None
    generation: int = 0  # of the engine to which the ticket was sent
    again: bool = False
    have: tuple[int, ...] = ()
    kept: bool = False  # the request outlives its worker, and another worker may take it over by its origin
    prefill: int = -1  # engine that computes the prompt; -1: the engine itself
    contents: tuple[EncoderInput, ...] = ()  # of the spans of the request; they enter no journal


class Settled(ToEngine, frozen=True):
    """The worker has submitted all of its open requests again."""

    generation: int


class Cancel(ToEngine, frozen=True):
    """The client of a ticket left. A ticket that is unknown or has ended is ignored."""

    ticket: int


class CancelLabel(ToEngine, frozen=True):
    """Cancel the open requests of this tenant with this label, from all workers."""

    label: str
    tenant: str


class Ask(ToEngine, frozen=True):
    """A control request, which produces no tokens. Answered by Answered with the same ticket."""

    ticket: int
    control: Control


class ProfileRequest(ToEngine, frozen=True):
    """Begin a profile of the device with these options, or end it. Answered by Answered with the same ticket."""

    ticket: int
    options: dict[str, bool | int | tuple[str, ...]] | None


class ReadWeights(ToEngine, frozen=True):
    """Read the first rows of a tensor. Answered by Answered with the same ticket."""

    ticket: int
    name: str
    rows: int


class CallFunction(ToEngine, frozen=True):
    """Call an enabled function of an installed package: `rpc`. Answered by Answered with the same ticket.

    `arguments` is JSON: the list of positional arguments, and the object of named ones.
    """

    ticket: int
    name: str
    arguments: bytes


class JoinGroup(ToEngine, frozen=True):
    """Join the group of a trainer that will send weights; rank 0 is the trainer. Answered by Answered with the same
    ticket.
    """

    ticket: int
    name: str
    address: str
    port: int
    rank: int
    ranks: int
    backend: Literal["gloo", "nccl"] = "gloo"


class LeaveGroup(ToEngine, frozen=True):
    """Leave the group of a trainer. Answered by Answered with the same ticket."""

    ticket: int
    name: str


class LoadLora(ToEngine, frozen=True):
    """Load a LoRA adapter, or a newer version of one. Answered by Answered with the same ticket."""

    ticket: int
    name: str
    path: str
    pinned: bool = False


class UnloadLora(ToEngine, frozen=True):
    """Unload a LoRA adapter once no request uses it. Answered by Answered with the same ticket."""

    ticket: int
    name: str


class WorkerGone(ToEngine, frozen=True):
    """From the launcher: the process of this worker ended. The engine cancels its open requests."""


class StopEngine(ToEngine, frozen=True):
    """From the launcher: end the engine process."""


EngineMessage = (
    Hello
    | Submit
    | Settled
    | Cancel
    | CancelLabel
    | Ask
    | ProfileRequest
    | ReadWeights
    | CallFunction
    | JoinGroup
    | LeaveGroup
    | LoadLora
    | UnloadLora
    | WorkerGone
    | StopEngine
)


# ------------------------------------------------------------------------------------------------------ to the router
# Messages of servers with several engines. Each message about an engine is about one generation of it.


class ToRouter(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """A message to the router, from a worker, an engine or the launcher."""


class Offer(ToRouter, frozen=True):
    """From a worker: assign a request or a session to an engine. Answered by Routed with the same number.

    The answer is sent once an engine can take the offer. `session` is the hashed key of requests that are assigned
    together; an open session belongs to one engine.
    """

    worker: int
    number: int
    prompt_tokens: int
    prefix: tuple[int, ...] = ()  # `lockstep.core.cluster.router.prefix_keys`
    session: str = ""
    purpose: Literal["request", "open", "close"] = "request"  # a request; opening a session; closing a session
    parent: str = ""  # session that a session is branched from
    tenant: str = ""  # of the request, for the waiting queue of the router
    label: str = ""  # name for cancellation, hashed with the tenant
    priority: int | None = None  # among the requests of the tenant
    output: bool = True  # whether the request has output, which a decode engine computes
    samples: int = 1
    named: int | None = None  # engine that the client requests; the request waits while it restarts


class OfferClosed(ToRouter, frozen=True):
    """From a worker: the offer with this number has ended."""

    worker: int
    number: int
    output_tokens: int


class Withdraw(ToRouter, frozen=True):
    """From a worker: withdraw the requests that wait under this label, offered by any worker."""

    label: str


class SessionOver(ToRouter, frozen=True):
    """From a worker: this session is not open, or no longer open."""

    session: str


class Drained(ToRouter, frozen=True):
    """From a worker: an engine is to receive no new requests, or to receive requests again."""

    engine: int
    draining: bool


class InputBlocked(ToRouter, frozen=True):
    """From a worker: assign no request until the same worker sends InputReleased with this number."""

    worker: int
    number: int


class InputReleased(ToRouter, frozen=True):
    """From a worker: end an InputBlocked. Requests are assigned again once no block is left."""

    worker: int
    number: int


class EngineHere(ToRouter, frozen=True):
    """From an engine: it can take requests."""

    engine: int
    generation: int
    cache_tokens: int  # capacity of its radix cache, tokens
    sessions: tuple[str, ...]  # hashed names of open sessions
    draining: bool


class EngineLost(ToRouter, frozen=True):
    """From the launcher: an engine ended. `next_generation` is that of its successor; None: there is no successor."""

    engine: int
    next_generation: int | None


class WorkerLost(ToRouter, frozen=True):
    """From the launcher: a worker ended. Its offers are removed."""

    worker: int


class PromptOver(ToRouter, frozen=True):
    """From a prefill engine: its part of the request in this room has ended."""

    room: int


class StopRouter(ToRouter, frozen=True):
    """From the launcher: end the thread of the router."""


RouterMessage = (
    Offer
    | OfferClosed
    | Withdraw
    | SessionOver
    | Drained
    | InputBlocked
    | InputReleased
    | EngineHere
    | EngineLost
    | WorkerLost
    | PromptOver
    | StopRouter
)


# ---------------------------------------------------------------------------------------------------------- to a worker


NO_MEDIA = "this model takes text only"
NO_EMBEDDINGS = "an emulated engine takes tokens only"


class EngineInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Properties of an engine, by which workers check requests before they submit them."""

    model: str  # name used where the operator configured none
    kind: str  # "model" or "emulated"
    vocabulary: int
    request_tokens_max: int  # prompt plus output
    prompt_tokens_max: int  # leaves room for one output token
    eos_token_ids: tuple[int, ...]
    logprobs: bool  # whether tokens can carry logprobs
    settings: dict[str, Any]  # of the scheduler, for display
    device: str
    generates: bool = True  # whether the model has a head that predicts the next token
    vector_size: int = 0  # size of an embedding; 0: the model has no embeddings
    # sizes of shorter embeddings that the model was trained for; () any size, None no other
    matryoshka: tuple[int, ...] | None = None
    logit_processors: tuple[str, ...] = ()  # names that requests may use
    able: tuple[str, ...] = ()  # device functions that an operator may use: "profile", "experts"
    grammars: str = ""  # name of the grammar library; "": none
    no_grammars: str = "this engine has no grammar backend; leave it out"  # cause and remedy, if there is none
    media: tuple[str, ...] = ()  # kinds of media that prompts may have: image, audio, video
    no_media: str = NO_MEDIA  # why they may not, if there are none
    no_kinds: dict[str, str] = msgspec.field(default_factory=dict)  # of kinds that only the model takes
    labels: tuple[str, ...] = ()  # of a model that classifies prompts; (): it does not
    activation: str = ""  # from logits of labels to scores: sigmoid, softmax or identity
    token_types: int = 0  # number of types that tokens of a prompt may have
    embedding_size: int = 0  # numbers of a given embedding, in place of a token; 0: prompts are tokens
    no_embeddings: str = NO_EMBEDDINGS  # why prompts are tokens only, if they are
    weights_version: int = 0  # when the worker was welcomed; Gauges carry later versions

    def why_no(self, kind: str) -> str:
        """Return why prompts may not have media of a kind; empty if they may."""
        if kind in self.media:
            return ""
        if not self.media and not self.no_kinds:
            return self.no_media
        known = " and ".join(KINDS[one].several for one in (*self.media, *self.no_kinds))
        return self.no_kinds.get(kind) or f"this model takes {known} only"


RATIOS = (0.25, 0.5, 0.67, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.25, 1.5, 2.0, 4.0)
"""Upper bounds of the buckets in which batches are counted by measured / predicted time; one more bucket is above."""


class BatchDrift(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Batches of one kind since the engine started, by measured over predicted time."""

    kind: str  # extend, decode or mixed
    counts: tuple[int, ...]  # batches by bucket of RATIOS, each batch in one bucket
    ratios: float  # sum of measured / predicted
    measured_s: float  # sum
    predicted_s: float


class DraftFigures(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Totals since the engine started; see `lockstep.host.drafts.DraftCounts`."""

    verifications: int
    drafts: int
    right: int
    right_by_position: tuple[int, ...]


class TierFigures(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Totals since the engine started; see `lockstep.host.cache_moves.MoveCounts` and `page_store.StoreCounts`."""

    moves: tuple[tuple[str, str, int], ...]  # kind, outcome, ended moves
    pages: tuple[tuple[str, int], ...]  # kind, pages that its moves brought
    host_tokens: int
    storage_tokens: int
    store: tuple[tuple[str, int], ...] = ()  # name and value of each count of the storage; empty without storage
    blocks: tuple[tuple[str, str, int], ...] = ()  # kind of move, window or state, how many its moves brought


class TransferFigures(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Totals of a decode engine since it started; see `lockstep.host.handover.decode.TransferCounts`."""

    done: int
    failed: int
    pages: int


ITERATION_TOKENS = (1, 8, *(16 * 2**power for power in range(11)))
"""Upper bounds of the buckets in which batches are counted by their tokens, as in vLLM."""


class CheckFigures(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Totals since the engine started; see `lockstep.host.idle_check.CheckCounts`."""

    checks: int
    failures: int
    seconds: float


class ExpertFigures(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Totals since the engine began, and the imbalance of its newest measurements."""

    measurements: int
    tokens: int  # routed, counted once for each expert of each layer
    imbalance: float  # load of the fullest expert over the mean, as a mean over the layers


class Gauges(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """State of an engine, sent a few times a second while it works and once when it becomes idle."""

    waiting: int
    running: int
    pages: int
    token_usage: float  # share of the page pool that is neither free nor evictable
    cached_tokens: int  # since the engine started: prompt tokens found in the radix cache
    new_tokens: int  # since the engine started: prompt tokens that were computed
    retractions: int
    accepting: bool  # whether new requests are taken
    drift: tuple[BatchDrift, ...] = ()  # by kind of batch; empty without a calibration
    page_size: int = 0  # tokens per page
    # since the engine started: batches by their tokens, per bucket of ITERATION_TOKENS
    batch_counts: tuple[int, ...] = ()
    batch_tokens: int = 0  # sum over these batches
    pages_cached: int = 0  # pages used by the radix cache only
    restarts: int = 0  # engine generations before this one
    weights_version: int = 0
    drafts: DraftFigures | None = None  # None: the engine verifies no drafts
    forced_tokens: int | None = None  # tokens that grammars forced; None: jump-forward is off
    tiers: TierFigures | None = None  # None: the engine has no memory below the device
    transfers: TransferFigures | None = None  # None: it receives no KV of other engines
    checks: CheckFigures | None = None  # None: its invariants are not checked while it is idle
    experts: ExpertFigures | None = None  # None: the load of experts was not measured


class ExpertRecordMessage(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A record of the load of experts; see `lockstep.core.contract.commands.ExpertRecord`."""

    recording: bool
    duration_us: int
    batches: int
    layers: int
    counts: bytes  # int64 [layers, experts]


class ToWorker(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """A message to the worker of this number. A worker that receives a message for another worker ends."""

    worker: int


class Welcome(ToWorker, frozen=True):
    """Answers Hello, once the engine can take requests."""

    protocol: int
    info: EngineInfo
    generation: int = 0
    adapters: KnownAdapters = KnownAdapters()
    gauges: Gauges | None = None  # sent last; None: the engine has sent none yet


class LogprobsMessage(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Logprobs of the tokens of one entry of StepAnswers, in its order. Arrays are packed, little-endian."""

    entry: int
    logprobs: bytes  # float32 [tokens]
    top_ids: bytes = b""  # int32 [tokens, tops]
    top_logprobs: bytes = b""  # float32 [tokens, tops]


class SampleEnded(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The end of a sample. Each sample has exactly one such message."""

    ticket: int
    sample: int
    reason: str  # of FinishRequest or RejectRequest; "engine" if the engine ended first
    error: str = ""  # a sentence, if the request was rejected or failed
    rejected: bool = False
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    prompt_positions: bytes = b""  # int32: prompt positions of the logprobs that follow
    prompt_logprobs: bytes = b""  # float32
    prompt_top_ids: bytes = b""  # int32 [positions, tops]: the likeliest tokens at these positions
    prompt_top_logprobs: bytes = b""  # float32
    vector: bytes = b""  # float32: result of a request of kind embed
    queue_us: int = -1  # from arrival at the engine to admission; -1 if unknown
    prefill_us: int = -1  # from admission to the first token
    decode_us: int = -1  # from the first token to the last
    weights: tuple[tuple[int, int], ...] = ()  # (first output token, weights version) of each span
    hidden: bytes = b""  # float32 [computed positions, hidden_size]: hidden states of the last layer, by position
    hidden_size: int = 0


class StepAnswers(ToWorker, frozen=True):
    """Results of one engine step for a worker: new tokens of its samples, then the samples that ended.

    Entry i is counts[i] tokens for sample samples[i] of tickets[i], the first of which is output number offsets[i].
    Offsets that were received before are repeats. `tokens` is the concatenation of all entries.
    """

    tickets: bytes = b""  # int64
    samples: bytes = b""  # int32, as are the following
    offsets: bytes = b""
    counts: bytes = b""
    tokens: bytes = b""
    logprobs: tuple[LogprobsMessage, ...] = ()
    ended: tuple[SampleEnded, ...] = ()
    gauges: Gauges | None = None


class Answered(ToWorker, frozen=True):
    """The answer to `Ask`, or to another control message, with the same ticket."""

    ticket: int
    ok: bool
    message: str = ""
    stats: Stats | None = None
    weights: WeightsRead | None = None
    experts: ExpertRecordMessage | None = None


class AdaptersKnown(ToWorker, frozen=True):
    """The adapters that requests may name, sent whenever they change."""

    adapters: KnownAdapters


class EngineRestarting(ToWorker, frozen=True):
    """The engine ended, and the next generation is starting. Open requests stay open.

    Args:
        generation: of the next engine.
        blocked: why the next engine cannot start yet; new requests are refused until it serves. Empty: it starts now.
    """

    generation: int
    message: str
    blocked: str = ""


class EngineGone(ToWorker, frozen=True):
    """The engine ended for good, and open requests end without an answer."""

    message: str


class Routed(ToWorker, frozen=True):
    """From the router: this engine takes the offer. `fresh`: the session of the offer is new to the router.

    Engine -1: no engine takes it; `refused` is the cause, a reason of RejectRequest or "cancelled". With prefill and
    decode engines, `prefill` computes the prompt and sends its KV to `engine` in `room`.
    """

    number: int
    engine: int
    fresh: bool = False
    refused: str = ""
    prefill: int = -1
    room: int = -1


WorkerMessage = Welcome | StepAnswers | Answered | AdaptersKnown | EngineRestarting | EngineGone


# ------------------------------------------------------------------------------------------------------- bytes and back

Message = TypeVar("Message")
AnyToWorker = TypeVar("AnyToWorker", bound=ToWorker)

_encoder = msgspec.msgpack.Encoder()
_to_engine: msgspec.msgpack.Decoder[EngineMessage] = msgspec.msgpack.Decoder(EngineMessage)
_to_worker: msgspec.msgpack.Decoder[WorkerMessage] = msgspec.msgpack.Decoder(WorkerMessage)
_to_router: msgspec.msgpack.Decoder[RouterMessage] = msgspec.msgpack.Decoder(RouterMessage)
_routed: msgspec.msgpack.Decoder[Routed] = msgspec.msgpack.Decoder(Routed)


def encode(message: ToEngine | ToWorker | ToRouter) -> bytes:
    """Encode a message as bytes."""
    return _encoder.encode(message)


def read_by_engine(frame: bytes) -> EngineMessage:
    """Decode a message to an engine. Raises WireError, with the type of the message."""
    return _read(_to_engine, frame, "the engine")


def read_by_worker(frame: bytes, worker: int) -> WorkerMessage:
    """Decode a message to this worker. Raises WireError, with the type of the message."""
    return _for(worker, _read(_to_worker, frame, f"worker {worker}"))


def read_routed(frame: bytes, worker: int) -> Routed:
    """Decode a message from the router to this worker. Raises WireError, with the type of the message."""
    return _for(worker, _read(_routed, frame, f"worker {worker}"))


def read_by_router(frame: bytes) -> RouterMessage:
    """Decode a message to the router. Raises WireError, with the type of the message."""
    return _read(_to_router, frame, "the router")


def _for(worker: int, message: AnyToWorker) -> AnyToWorker:
    if message.worker != worker:
        raise WireError(f"worker {worker} got {type(message).__name__} for worker {message.worker}")
    return message


def _read(decoder: msgspec.msgpack.Decoder[Message], frame: bytes, receiver: str) -> Message:
    try:
        return decoder.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WireError(f"{receiver} got {_called(frame)}, which it cannot read: {error}") from error


def _called(frame: bytes) -> str:
    """Return the name of the message type in a frame, for error messages."""
    try:
        match msgspec.msgpack.decode(frame):
            case [str(name), *_]:
                return f"a message {name[:40]!r}"
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    return f"{len(frame)} bytes that are not a message ({frame[:16].hex()}...)"
