"""Messages between rank 0 and the workers of its engine: typed, over one socket pair each.

    4 bytes      length bytes
    | length   | message, msgpack |          little endian; never a pickle

Every order for the device is part of a chain. Rank 0 hashes what it sends; each worker decodes an order, encodes it
again and hashes that; both hashes include the previous value. So a plan that was lost, doubled, moved or decoded
differently is refused before it runs, and does not have to be noticed in a wrong answer.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from hashlib import blake2b
from typing import Any, Literal, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

from lockstep.core.contract.commands import BatchPlan
from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.events import BatchId, BlocksFound, PromptSpan, RequestId
from lockstep.host.batches import BatchResult, ContextOf, RowContext
from lockstep.host.cache_moves import Move
from lockstep.host.engine_options import RankOptions
from lockstep.host.handover.kv import Fetch
from lockstep.host.handover.wire import PageLayout, StagingPlace
from lockstep.host.media.content import EncoderInput
from lockstep.runtime.collectives import LOOPBACK
from lockstep.runtime.errors import RankLost
from lockstep.runtime.pooling import Pooling

MESSAGE_BYTES_MAX = 1 << 30  # longer messages are refused
DIGEST_BYTES = 16
NO_CHAIN = bytes(DIGEST_BYTES)

_LENGTH = struct.Struct("<I")

# --------------------------------------------------------------------------------------------------------- to a worker


class RankSettings(RankOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of every rank's part of the model, its pool and its executor. See `EngineConfig` for the fields."""

    model: str
    random_weights_seed: int | None
    pooling: Pooling
    debug: bool
    sched: dict[str, Any]  # fields of SchedConfig, as given


class WorkerSetup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """The first message: the rank and the settings of the worker."""

    rank: int
    tp: int
    pp: int
    device: str
    threads: int  # torch's CPU threads: the same number on all ranks, since some results depend on it
    store: str  # by which the ranks find each other: a file in a folder of this user, or HOST|PORT|NAME
    timeout_s: float
    settings: RankSettings


class Start(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """The settings that all ranks agreed on; the executor can be made."""

    config: SchedConfig


class Order(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The arguments of `Executor.launch`."""

    plan: BatchPlan
    deferred: bool
    contexts: tuple[RowContext, ...]  # of `plan.rows_taken`


class Launch(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Launch an order, if the digest is right."""

    order: bytes  # an encoded Order
    digest: bytes  # of the chain up to this order


class HoldContents(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Keep the contents of a request, ahead of the plans that read them: inputs of the encoder, or embeddings."""

    request_id: RequestId
    contents: tuple[EncoderInput, ...]


class ReleaseContents(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Forget the contents of a request that no other request has."""

    request_id: RequestId
    spans: tuple[PromptSpan, ...]


class EncodeContents(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Drop outputs of the encoder, then encode contents together, ahead of the plans that read them."""

    contents: tuple[bytes, ...]  # digests
    drop: tuple[bytes, ...]


class Mask(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Allowed next tokens of the sampling rows of the previously named batch: int32 [rows, words]; None: all tokens."""

    rows: int
    words: bytes | None


class Sample(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Sample a deferred batch."""

    batch_id: BatchId


class Collect(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Collect the oldest batch, and report the digest of its tokens."""


class MeasureExperts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Take part in the sum of all ranks' counts of the tokens routed to each expert."""


class MoveLayers(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Move the experts of layers between the ranks, behind the orders before."""

    layers: tuple[int, ...]
    slots: int
    placement: bytes  # int32 [layers, slots]


class Prepare(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Read this rank's part of new weights.

    Nothing is in flight. This and the next three are answered by CommandDone.
    """

    source: str


class Commit(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Copy the prepared weights into the model."""

    version: int


class Discard(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Drop the prepared weights, because another rank could not prepare them."""


class Switch(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Release the memory of tags, or allocate it again."""

    tags: tuple[str, ...]
    released: bool


class ReadAdapter(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Read this rank's part of an adapter, while batches run. This and the next are answered by AdapterDone."""

    ticket: int
    name: str
    version: int
    source: str


class PlaceAdapter(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Copy an adapter into a slot that no batch uses, while other batches run."""

    ticket: int
    name: str
    version: int
    slot: int


class LackAdapter(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Record that an adapter of the previous engine cannot be read again."""

    name: str
    version: int
    why: str


class ForgetAdapter(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Drop this adapter, or this version of it."""

    name: str
    version: int | None


class Moving(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Move this rank's part of pages between the tiers. Answered by Moved, except for a cancel."""

    move: Move


class OpenStaging(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Allocate staging memory of this rank under a number. This and the next three are answered by TransferDone."""

    ticket: int
    number: int


class OpenSender(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Open the staging memory of a prefill engine under a number."""

    ticket: int
    number: int
    layout: PageLayout
    places: tuple[StagingPlace, ...]


class StagePages(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Copy this rank's part of pages into a slot. `block`: number of the kind of blocks, 0 for full pages."""

    ticket: int
    number: int
    slot: int
    pages: NDArray[np.int32]
    block: int = 0


class FetchPages(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Copy this rank's part of a slot into pages."""

    ticket: int
    number: int
    order: Fetch


class CloseTransfers(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Release what a number stands for, behind the orders before."""

    number: int


class StopWorker(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """End the worker."""


TransferOrder = OpenStaging | OpenSender | StagePages | FetchPages
AdapterUpdate = ReadAdapter | PlaceAdapter | LackAdapter | ForgetAdapter
Told = (
    HoldContents
    | ReleaseContents
    | EncodeContents
    | Mask
    | Sample
    | Collect
    | MeasureExperts
    | MoveLayers
    | LackAdapter
    | ForgetAdapter
    | Moving
    | TransferOrder
    | CloseTransfers
)
"""Messages to every worker that rank 0 sends without waiting for an answer."""
ToWorker = (
    WorkerSetup | Start | Launch | Told | Prepare | Commit | Discard | Switch | ReadAdapter | PlaceAdapter | StopWorker
)

# --------------------------------------------------------------------------------------------------------- to rank 0


class Doing(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """The activity that the worker begins, for a message about its end: `loading the model`."""

    what: str


class Chosen(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """The model is loaded.

    Attention backend and graphs must be equal on all ranks, because their passes sum over the ranks.
    """

    chosen: str  # attention backend and graphs


class Sized(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """The number of pages of KV that fit beside the model."""

    pages: int


class Ready(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """The executor is ready."""


class Collected(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """The worker has collected a batch; `drawn` is the digest of its tokens, which must equal that of rank 0."""

    batch_id: BatchId
    drawn: bytes


class CommandDone(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """The worker has carried out a command, or failed; after a failure its state is unchanged."""

    version: int  # of its weights
    error: str = ""


class AdapterDone(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """The worker has read an adapter or copied it into its slot, or failed."""

    ticket: int
    error: str = ""


class Moved(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """The worker has ended a move of pages; see `lockstep.host.cache_moves.MoveEnd`."""

    number: int
    pages_done: int
    error: str = ""
    blocks: tuple[BlocksFound, ...] = ()


class TransferDone(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """A rank has carried out an order of transfers, or failed. `place`: of its staging memory."""

    ticket: int
    rank: int
    checksum: int = 0
    error: str = ""
    place: StagingPlace | None = None


FailureKind = Literal["config", "collective", "other"]
"""collective: perhaps only because another rank ended."""


class Failed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """The worker's last message, before it ends because of an error."""

    message: str
    kind: FailureKind
    trace: str


ToLead = Doing | Chosen | Sized | Ready | Collected | CommandDone | AdapterDone | Moved | TransferDone | Failed

# --------------------------------------------------------------------------------------------------------- as bytes


def _bytes_of(value: Any) -> bytes:
    if isinstance(value, np.ndarray):
        return value.tobytes()
    raise NotImplementedError(f"{type(value).__name__} does not pass between ranks")


def _array_of(kind: type, value: Any) -> Any:
    """Return a read-only array of the annotated type, e.g. NDArray[np.int32], from its bytes."""
    (dtype,) = get_args(get_args(kind)[1])
    return np.frombuffer(value, dtype)


_encode = msgspec.msgpack.Encoder(enc_hook=_bytes_of, order="deterministic").encode
_read_order = msgspec.msgpack.Decoder(Order, dec_hook=_array_of).decode
_read_by: dict[object, Callable[[bytes], Any]] = {
    kind: msgspec.msgpack.Decoder(kind, dec_hook=_array_of).decode for kind in (ToWorker, ToLead)
}


class PlanChain:
    """The digest of all orders so far. Rank 0 and each worker keep one."""

    def __init__(self) -> None:
        self.digest = NO_CHAIN

    def seal(self, order: Order) -> Launch:
        """Return the message for an order, and add the order to the chain."""
        encoded = _encode(order)
        self._add(encoded)
        return Launch(encoded, self.digest)

    def verify(self, launch: Launch) -> Order:
        """Decode an order and add it to the chain. Raises RankLost if the digests differ."""
        order = _read_order(launch.order)
        self._add(_encode(order))
        if self.digest != launch.digest:
            raise RankLost(
                f"the plan of batch {order.plan.batch_id} is not the one that rank 0 launched: expected digest "
                f"{launch.digest.hex()}, found {self.digest.hex()}; plans were lost, changed or reordered on the way"
            )
        return order

    def _add(self, encoded: bytes) -> None:
        self.digest = blake2b(self.digest + encoded, digest_size=DIGEST_BYTES).digest()


def in_turn(contexts: Iterable[RowContext]) -> ContextOf:
    """Return a function that returns these contexts one after another, in the order of the executor's calls."""
    waiting = iter(contexts)
    return lambda taken: next(waiting)


def drawn_digest(result: BatchResult) -> bytes:
    """Return the digest of a batch's tokens, of its invalid rows, and of the tokens that each verifying row got."""
    invalid = np.array(result.invalid, np.int32)
    if result.accepted is not None:
        invalid = np.concatenate((result.accepted, invalid))
    return blake2b(result.tokens.astype("<i4").tobytes() + invalid.tobytes(), digest_size=DIGEST_BYTES).digest()


class Channel:
    """One end of the socket pair between rank 0 and a worker. One thread receives; any thread may send.

    Args:
        reads: ToLead or ToWorker.
        timeout_s: a peer that receives nothing for this time is lost. `receive` has no limit.
    """

    def __init__(self, end: socket.socket, reads: object, timeout_s: float) -> None:
        self._socket, self._read = end, _read_by[reads]
        # Only sending has a limit: SO_SNDTIMEO, because settimeout would limit receiving as well.
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", max(1, round(timeout_s)), 0))
        self._sending = threading.Lock()

    @property
    def host(self) -> str:
        """Address of this machine that the other end can reach; that of the loopback device for a socket pair."""
        ours = self._socket.getsockname()
        return str(ours[0]) if self._socket.family in (socket.AF_INET, socket.AF_INET6) else LOOPBACK

    def send(self, message: ToWorker | ToLead) -> None:
        """Send a message. Raises OSError if the other end is closed, or receives nothing within the limit."""
        encoded = _encode(message)
        with self._sending:
            self._socket.sendall(_LENGTH.pack(len(encoded)) + encoded)

    def receive(self) -> Any:
        """Return the next message; None if the other end is closed. Raises msgspec.DecodeError for invalid data."""
        head = self._exactly(_LENGTH.size)
        if head is None:
            return None
        (length,) = _LENGTH.unpack(head)
        if length > MESSAGE_BYTES_MAX:
            raise msgspec.DecodeError(f"a message of {length:,} bytes between ranks")
        body = self._exactly(length)
        return None if body is None else self._read(body)

    def close(self) -> None:
        """Shut down both ends: `receive` returns None."""
        with suppress(OSError):  # the other end was closed before
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _exactly(self, count: int) -> bytes | None:
        parts = bytearray()
        while len(parts) < count:
            try:
                new = self._socket.recv(min(count - len(parts), 1 << 20))
            except OSError:  # reset, or closed by `close`
                return None
            if not new:
                return None
            parts += new
        return bytes(parts)
