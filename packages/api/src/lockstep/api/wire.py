"""What the processes of a server say to each other: typed, bounded, and never code.

    API worker 0 ──Hello, Submit, Cancel, ...──> engine        each arrow is a ZeroMQ socket in a folder that only
    API worker 1 ─────────────────────────────>                its owner can enter; see `sockets.py`
                 <──Welcome, StepAnswers, Answered──
    launcher ──WorkerGone, Stop──> engine;  launcher ──EngineRestarting, EngineGone──> workers

With several engines each has a folder of its own with all of these sockets, and one more socket is the router's, which
says who takes what: `routing`.

    API worker ──Offer, Over, ...──> router ──Routed──> API worker;  engine ──EngineHere──> router

An engine that is restarted has a higher generation. A worker that hears of it greets it, submits again whatever is
open, saying how much of it it has, and ends with Settled. What was sent to the engine before is passed over.

Rules for changing messages: a message is a msgpack array, its first element the name of its type. Fields are only
added at the end and with a default; anything else raises PROTOCOL. Both sides of a server come from one installation,
so a message that cannot be read is a mistake of ours: `WireError` names it, and the process that got it ends. A new
kind of request is one class here, one handler, and one line in the table of whoever gets it (docs/serving.md).
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
from lockstep.host.weights import WeightsRead

PROTOCOL = 1
OVER = -1
MESSAGE_BYTES_MAX = 256 * 2**20
"""A prompt of a million tokens is 4 MB; the logprobs of one are the most that a message can have to carry."""

Int32s = NDArray[np.int32]


class WireError(LockstepError):
    """A message between processes that cannot be read, or that nobody here expects."""


# --------------------------------------------------------------------------------------------------------- to an engine


class ToEngine(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """From a worker, or about one. `worker` is who gets the answer."""

    worker: int


class Hello(ToEngine, frozen=True):
    """A worker is there, and waits for this generation of the engine or a later one. Answered by Welcome."""

    protocol: int
    generation: int = 0


class Submit(ToEngine, frozen=True):
    """A request, which the worker knows by `ticket`. Its time and its id are filled in by the engine.

    One that an engine before this one was sent already comes `again`, with the output tokens that there are of each
    sample, or OVER of one that has ended. `request.origin` is what it is called in the journal.
    """

    ticket: int
    request: RequestArrived
    start_by_ns: int | None = None  # of the machine's monotonic clock: give up if it has not begun by then,
    finish_by_ns: int | None = None  # or not ended
    generation: int = 0  # of the engine that it is for
    again: bool = False
    have: tuple[int, ...] = ()


class Settled(ToEngine, frozen=True):
    """The worker has submitted again whatever it had open."""

    generation: int


class Cancel(ToEngine, frozen=True):
    """The client of a ticket left. One that is unknown or has ended is passed over."""

    ticket: int


class CancelLabel(ToEngine, frozen=True):
    """Cancel what this tenant has open under a label, whichever worker sent it."""

    label: str
    tenant: str


class Ask(ToEngine, frozen=True):
    """Something other than tokens. Answered by Answered of the same ticket."""

    ticket: int
    control: Control


class ProfileRequest(ToEngine, frozen=True):
    """Begin a profile of the device with these options, or end it. Answered by Answered of the same ticket."""

    ticket: int
    options: dict[str, bool | int | tuple[str, ...]] | None


class ReadWeights(ToEngine, frozen=True):
    """What the first rows of a tensor hold. Answered by Answered of the same ticket."""

    ticket: int
    name: str
    rows: int


class JoinGroup(ToEngine, frozen=True):
    """Meet a trainer that will send weights; rank 0 is the trainer. Answered by Answered of the same ticket."""

    ticket: int
    name: str
    address: str
    port: int
    rank: int
    ranks: int
    backend: Literal["gloo", "nccl"] = "gloo"


class LeaveGroup(ToEngine, frozen=True):
    """Leave it. Answered by Answered of the same ticket."""

    ticket: int
    name: str


class LoadLora(ToEngine, frozen=True):
    """Load a LoRA adapter, or a newer version of one. Answered by Answered of the same ticket."""

    ticket: int
    name: str
    path: str
    pinned: bool = False


class UnloadLora(ToEngine, frozen=True):
    """Forget one, once nobody uses it. Answered by Answered of the same ticket."""

    ticket: int
    name: str


class WorkerGone(ToEngine, frozen=True):
    """From the launcher: the process of this worker ended. What it had asked for is cancelled."""


class StopEngine(ToEngine, frozen=True):
    """From the launcher: end."""


EngineMessage = (
    Hello
    | Submit
    | Settled
    | Cancel
    | CancelLabel
    | Ask
    | ProfileRequest
    | ReadWeights
    | JoinGroup
    | LeaveGroup
    | LoadLora
    | UnloadLora
    | WorkerGone
    | StopEngine
)


# ------------------------------------------------------------------------------------------------------ to the router
# Of a server with several engines. What is said of an engine by its number is about one of its lives, a generation.


class ToRouter(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """From a worker, an engine or the launcher."""


class Offer(ToRouter, frozen=True):
    """From a worker: who takes this? Answered by Routed of the same number, once somebody can take it.

    `session` is what requests stay together by, hashed; of a session that is open its engine is the only one.
    """

    worker: int
    number: int
    prompt_tokens: int
    prefix: tuple[int, ...] = ()  # `lockstep.core.cluster.router.prefix_keys`
    session: str = ""
    what: Literal["request", "open", "close"] = "request"  # a request; a session that is to be opened, or closed
    parent: str = ""  # a session that is to be continued in another one
    tenant: str = ""  # where requests wait at the router: whose it is,
    label: str = ""  # by what it may be cancelled, hashed with the tenant,
    priority: int | None = None  # and how it stands among those of its tenant


class OfferClosed(ToRouter, frozen=True):
    """From a worker: nothing more comes of what it offered under this number."""

    worker: int
    number: int
    output_tokens: int


class Withdraw(ToRouter, frozen=True):
    """From a worker: whatever waits under this label is not wanted any more, whichever worker offered it."""

    label: str


class SessionOver(ToRouter, frozen=True):
    """From a worker: this session is not open, or not any more."""

    session: str


class Drained(ToRouter, frozen=True):
    """From a worker: an engine is to get nothing new, or something again."""

    engine: int
    draining: bool


class EngineHere(ToRouter, frozen=True):
    """From an engine that can take requests."""

    engine: int
    generation: int
    cache_tokens: int  # that its radix cache can hold
    sessions: tuple[str, ...]  # that are open, hashed
    draining: bool


class EngineLost(ToRouter, frozen=True):
    """From the launcher: an engine ended. The next one has this generation; None: there is none."""

    engine: int
    next_generation: int | None


class WorkerLost(ToRouter, frozen=True):
    """From the launcher: a worker ended, and with it whatever it had offered."""

    worker: int


class StopRouter(ToRouter, frozen=True):
    """From the launcher: end."""


RouterMessage = (
    Offer | OfferClosed | Withdraw | SessionOver | Drained | EngineHere | EngineLost | WorkerLost | StopRouter
)


# ---------------------------------------------------------------------------------------------------------- to a worker


class EngineInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What an engine is, for whoever checks requests before they go there."""

    model: str  # what it is called where nobody gave it a name
    kind: str  # model, or emulated
    vocabulary: int
    request_tokens_max: int  # prompt and output together
    prompt_tokens_max: int  # with room for one token of output
    eos_token_ids: tuple[int, ...]
    logprobs: bool  # whether tokens can come with their logprobs
    settings: dict[str, Any]  # of the scheduler, for people
    device: str
    generates: bool = True  # whether it has a head that says which token comes next
    vector_size: int = 0  # of an embedding; 0: there are none
    matryoshka: tuple[int, ...] | None = None  # shorter embeddings that it was trained for; () any, None none
    logit_processors: tuple[str, ...] = ()  # that requests may ask for
    able: tuple[str, ...] = ()  # what an operator may ask of the device: "profile"
    grammars: str = ""  # the library that keeps answers to grammars; "" for none,
    no_grammars: str = "this engine has no grammar backend; leave it out"  # and then why, with what to do
    weights_version: int = 0  # when a worker was welcomed; later it is in Gauges


RATIOS = (0.25, 0.5, 0.67, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.25, 1.5, 2.0, 4.0)
"""Upper bounds of the buckets that batches are counted in, by measured / predicted time; beyond them is one more."""


class BatchDrift(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Batches of one kind since the engine began, by how far the cost model was off."""

    kind: str  # extend, decode, mixed
    counts: tuple[int, ...]  # by bucket of RATIOS, each batch in one
    ratios: float  # sum of measured / predicted
    measured_s: float  # sums
    predicted_s: float


class DraftFigures(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Totals since the engine began; see `lockstep.host.drafts.DraftCounts`."""

    verifications: int
    drafts: int
    right: int
    right_by_position: tuple[int, ...]


ITERATION_TOKENS = (1, 8, *(16 * 2**power for power in range(11)))
"""Upper bounds of the counts of batches by their tokens, as vLLM has them."""


class Gauges(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How an engine stands, a few times a second while it works and once when it comes to rest."""

    waiting: int
    running: int
    pages: int
    token_usage: float  # share of the pool that cannot be had at once
    cached_tokens: int  # since the engine began: prompt tokens found in the radix cache,
    new_tokens: int  # and those that had to be computed
    retractions: int
    accepting: bool  # whether new requests are taken
    drift: tuple[BatchDrift, ...] = ()  # by kind of batch; none without a calibration
    page_size: int = 0  # tokens
    batch_counts: tuple[
        int, ...
    ] = ()  # since the engine began: batches by their tokens, up to ITERATION_TOKENS and more
    batch_tokens: int = 0  # and their tokens
    pages_cached: int = 0  # held by nobody but the radix cache
    restarts: int = 0  # engines before this one
    weights_version: int = 0
    drafts: DraftFigures | None = None  # where drafts are verified
    forced_tokens: int | None = None  # that grammars forced, where these are computed together


class ToWorker(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """To one worker, which it names: a worker that gets what is for another one must not go on."""

    worker: int


class Welcome(ToWorker, frozen=True):
    """Answers Hello, once the engine can take requests."""

    protocol: int
    about: EngineInfo
    generation: int = 0
    adapters: KnownAdapters = KnownAdapters()
    gauges: Gauges | None = None  # as it stood a moment ago; None: it says so once it runs


class LogprobsMessage(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Of the tokens of one entry of StepAnswers, in its order. Arrays are packed, little-endian."""

    entry: int
    logprobs: bytes  # float32 [tokens]
    top_ids: bytes = b""  # int32 [tokens, tops]
    top_logprobs: bytes = b""  # float32 [tokens, tops]


class SampleEnded(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Nothing more comes of a sample. Exactly one of these closes each."""

    ticket: int
    sample: int
    reason: str  # of FinishRequest or RejectRequest; "engine" if the engine ended first
    error: str = ""  # a sentence, where it was rejected or failed
    rejected: bool = False
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    prompt_positions: bytes = b""  # int32: where in the prompt the tokens stand whose logprobs follow
    prompt_logprobs: bytes = b""  # float32
    prompt_top_ids: bytes = b""  # int32 [positions, tops]: the likeliest in their places
    prompt_top_logprobs: bytes = b""  # float32
    vector: bytes = b""  # float32: of a request of kind embed
    queue_us: int = -1  # from its arrival at the engine to its admission; -1 where that is not known,
    prefill_us: int = -1  # from there to its first token,
    decode_us: int = -1  # and from there to its last
    weights: tuple[tuple[int, int], ...] = ()  # (first output token, version of the weights) of each span


class StepAnswers(ToWorker, frozen=True):
    """All that one step of the engine has for a worker: new tokens of its samples, then which of them ended.

    Entry i is counts[i] tokens for sample samples[i] of tickets[i], the first of which is output number offsets[i].
    Offsets seen before are repeats. `tokens` has those of all entries end to end.
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
    """Answers Ask, and whatever else has a ticket of the kind."""

    ticket: int
    ok: bool
    message: str = ""
    stats: Stats | None = None
    weights: WeightsRead | None = None


class AdaptersKnown(ToWorker, frozen=True):
    """Which adapters requests may name, whenever that changes."""

    adapters: KnownAdapters


class EngineRestarting(ToWorker, frozen=True):
    """The engine ended, and the next one is on its way. What is open stays open."""

    generation: int  # of the next
    message: str


class EngineGone(ToWorker, frozen=True):
    """The engine ended, and nothing will come of what is open."""

    message: str


class Routed(ToWorker, frozen=True):
    """From the router: this engine takes it. `fresh`: it was asked about a session that it did not know.

    Engine -1: nobody does, because of what is `refused`, a reason of RejectRequest, or "cancelled".
    """

    number: int
    engine: int
    fresh: bool = False
    refused: str = ""


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
    """A message as bytes."""
    return _encoder.encode(message)


def read_by_engine(frame: bytes) -> EngineMessage:
    """A message to an engine. Raises WireError, which names what came."""
    return _read(_to_engine, frame, "the engine")


def read_by_worker(frame: bytes, worker: int) -> WorkerMessage:
    """A message to this worker. Raises WireError, which names what came."""
    return _for(worker, _read(_to_worker, frame, f"worker {worker}"))


def read_routed(frame: bytes, worker: int) -> Routed:
    """What the router tells this worker. Raises WireError, which names what came."""
    return _for(worker, _read(_routed, frame, f"worker {worker}"))


def read_by_router(frame: bytes) -> RouterMessage:
    """A message to the router. Raises WireError, which names what came."""
    return _read(_to_router, frame, "the router")


def _for(worker: int, message: AnyToWorker) -> AnyToWorker:
    if message.worker != worker:
        raise WireError(f"worker {worker} got {type(message).__name__} for worker {message.worker}")
    return message


def _read(decoder: msgspec.msgpack.Decoder[Message], frame: bytes, who: str) -> Message:
    try:
        return decoder.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WireError(f"{who} got {_called(frame)}, which it cannot read: {error}") from error


def _called(frame: bytes) -> str:
    """What a frame says that it is."""
    try:
        match msgspec.msgpack.decode(frame):
            case [str(name), *_]:
                return f"a message {name[:40]!r}"
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    return f"{len(frame)} bytes that are no message ({frame[:16].hex()}...)"
