"""A rank other than the first: `python -m lockstep.runtime.worker FD`, started by `ranks.py` only.

On another machine a process of Ray starts it with HOST|PORT|RANK instead of FD (ray_ranks.py).

It makes its part of the model, then carries out rank 0's messages in order: the same launches, samples and results. It
makes no decisions, receives no requests and keeps no journal.

Every rank draws every token. Logits are joined on all ranks with the same bits, and a draw is a function of them, the
row's settings, the seed and the position. So each device has the next token of a row without another message. The drawn
tokens are compared afterwards, by digest.

If rank 0 ends in any way, the channel closes or the parent process changes. A separate thread then ends this process,
wherever the main thread may be waiting.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from lockstep.core.contract.commands import RowTaken
from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.errors import ConfigError
from lockstep.core.contract.events import RequestId
from lockstep.host.cache_moves import MoveEnd
from lockstep.host.loop import HostClock
from lockstep.runtime.assembly import assemble
from lockstep.runtime.collectives import CollectiveFailed
from lockstep.runtime.errors import RankLost
from lockstep.runtime.executor import Executor
from lockstep.runtime.expert_meter import DeviceMeter
from lockstep.runtime.expert_moves import RankExpertMover
from lockstep.runtime.live import LiveModel
from lockstep.runtime.lora.host_cache import HostAdapterCache
from lockstep.runtime.models.layers import Parallel
from lockstep.runtime.rank_wire import (
    AdapterDone,
    AdapterUpdate,
    Channel,
    Chosen,
    CloseTransfers,
    Collect,
    Collected,
    CommandDone,
    Commit,
    Discard,
    Doing,
    EncodeContents,
    Failed,
    FailureKind,
    FetchPages,
    ForgetAdapter,
    HoldContents,
    LackAdapter,
    Launch,
    Mask,
    MeasureExperts,
    Moved,
    MoveLayers,
    Moving,
    OpenSender,
    OpenStaging,
    PlaceAdapter,
    PlanChain,
    Prepare,
    ReadAdapter,
    Ready,
    ReleaseContents,
    Sample,
    Sized,
    StagePages,
    Start,
    StopWorker,
    Switch,
    ToWorker,
    TransferOrder,
    WorkerSetup,
    drawn_digest,
    in_turn,
)
from lockstep.runtime.ray_ranks import connect
from lockstep.runtime.stages import RankEnds, RankPlace
from lockstep.runtime.tiers.mover import HostMover
from lockstep.runtime.transfer.follow import TransferOrders
from lockstep.runtime.transfer.rank import RankPages

Int32s = NDArray[np.int32]
T = TypeVar("T")

PARENT_S = 1.0  # interval of checks for the parent process
FAILED = 1
OF_OTHER_THREADS = TransferOrder | CloseTransfers | AdapterUpdate
"""Orders that threads of links and adapters send, also between a plan and its mask."""
REMOVALS_MAX = 10  # of a folder: a store that is being closed by another thread makes its file again


class Orders:
    """The messages of rank 0, in order. Ends the process when rank 0 has ended."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.folder: Path | None = None  # of all ranks; a worker removes it when rank 0 has ended
        self._inbox: SimpleQueue[Any] = SimpleQueue()
        self._kept: deque[Any] = deque()  # orders that came before a mask
        threading.Thread(target=self._receive, name="orders", daemon=True).start()
        threading.Thread(target=self._watch, args=(os.getppid(),), name="parent", daemon=True).start()

    def next(self) -> Any:
        """Return the next message."""
        return self._kept.popleft() if self._kept else self._received()

    def expect(self, kind: type[T]) -> T:
        """Return the next message, which must be of this kind."""
        return self._checked(self.next(), kind)

    def mask(self) -> Mask:
        """Return the next mask.

        It is sent by the thread of the plans. Orders that other threads of rank 0 sent before it are kept for `next`.
        """
        while isinstance(message := self._received(), OF_OTHER_THREADS):
            self._kept.append(message)
        return self._checked(message, Mask)

    def _received(self) -> Any:
        """Return the next message from the channel, or raise what ends this rank."""
        message = self._inbox.get()
        if isinstance(message, Exception):
            raise message
        return message

    @staticmethod
    def _checked(message: Any, kind: type[T]) -> T:
        if not isinstance(message, kind):
            raise RankLost(f"rank 0 sent {type(message).__name__} where {kind.__name__} was due")
        return message

    def fail(self, error: BaseException) -> None:
        """Make the receiver of the next message raise this error. Called from any thread."""
        self._inbox.put(error if isinstance(error, Exception) else RankLost(repr(error)))

    def _receive(self) -> None:
        try:
            while (message := self.channel.receive()) is not None:
                self._inbox.put(message)
        except Exception as error:  # not a message of this protocol
            self._inbox.put(RankLost(f"rank 0 sent an unreadable message: {error}"))
            return
        self.leave()

    def _watch(self, parent: int) -> None:
        """End with the parent. The channel stays open if rank 0 had forked and its child still runs."""
        while os.getppid() == parent:
            time.sleep(PARENT_S)
        self.leave()

    def leave(self) -> None:
        """Clean up and end the process, after rank 0 has ended."""
        for _ in range(REMOVALS_MAX):
            if self.folder is None or not self.folder.exists():
                break
            shutil.rmtree(self.folder, ignore_errors=True)
        os._exit(FAILED)


class SentMasks:
    """Matchers of this rank's executor. Only rank 0 has real ones; their masks arrive with the orders."""

    def __init__(self, orders: Orders) -> None:
        self._orders = orders

    def take_row(self, taken: RowTaken) -> None:
        """Do nothing: rank 0 takes the row."""

    def advance(self, request_id: RequestId, epoch: int, tokens: Sequence[int]) -> None:
        """Do nothing: rank 0 moves the matcher."""

    def allowed(self, rows: Int32s) -> Int32s | None:
        """Return rank 0's mask for the same rows."""
        mask = self._orders.mask()
        if mask.rows != len(rows):
            raise RankLost(f"rank 0 sent a mask of {mask.rows} rows for {len(rows)}")
        if mask.words is None:
            return None
        return np.frombuffer(mask.words, np.int32).reshape(len(rows), -1)

    def ended(self, row: int, token: int) -> bool:
        """Return False: only rank 0 reports it to the core."""
        return False

    def forced(self, row: int, token: int) -> list[int]:
        """Return nothing: only rank 0 reports forced tokens to the core."""
        return []


class LeadRank:
    """The other ranks as seen by a worker while it is assembled: it follows rank 0."""

    def __init__(self, orders: Orders, ends: RankEnds) -> None:
        self._orders, self._ends = orders, ends
        self.place, self.links = ends.place, ends.links
        self.matchers = SentMasks(orders)

    def parallel(self) -> Parallel:
        """Return this rank's part of the model."""
        return self._ends.parallel()

    def compare(self, chosen: str) -> None:
        """Send the choices of this rank. Rank 0 ends all ranks if they differ."""
        self._orders.channel.send(Chosen(chosen))

    def agree(self, config: SchedConfig) -> SchedConfig:
        """Send the pages that fit here; return the settings that all ranks agreed on."""
        self._orders.channel.send(Sized(config.pages))
        start = self._orders.expect(Start)
        self._orders.channel.send(Doing("making its pool and its executor"))
        return start.config


class Follower:
    """Carries out rank 0's messages with the executor of this rank."""

    def __init__(
        self,
        executor: Executor,
        orders: Orders,
        live: LiveModel,
        rank: int = 1,
        mover: HostMover | None = None,
        transfers: RankPages | None = None,
    ) -> None:
        self.mover = mover
        self.transfers: TransferOrders | None = None
        if transfers is not None:
            self.transfers = TransferOrders(transfers, rank, orders.channel.send, orders.fail)
        self.executor, self.orders, self.live, self.chain = executor, orders, live, PlanChain()
        self.meter = None if executor.loads is None else DeviceMeter(executor.loads, executor.lane)
        self.experts = RankExpertMover(live.model, executor.lane)
        self.host_adapters = HostAdapterCache(live.model)
        self._adapters = ThreadPoolExecutor(1, "lockstep-adapters")  # so that plans do not wait for a disk

    def run(self) -> None:
        """Carry out messages until StopWorker. Raises any error that ends this rank."""
        while True:
            match self.orders.next():
                case Launch() as launch:
                    order = self.chain.verify(launch)
                    self.executor.launch(order.plan, deferred=order.deferred, contexts=in_turn(order.contexts))
                case HoldContents(request_id, contents) if self.executor.media is not None:
                    self.executor.media.hold(request_id, contents)
                case ReleaseContents(request_id, spans) if self.executor.media is not None:
                    self.executor.media.release(request_id, spans)
                case EncodeContents(contents, drop) if self.executor.media is not None:
                    self.executor.media.encode(contents, drop)
                case Sample(batch_id):
                    self.executor.sample(batch_id, ())
                case Collect():
                    result = self.executor.collect()
                    self.orders.channel.send(Collected(result.plan.batch_id, drawn_digest(result)))
                case MeasureExperts() if self.meter is not None:
                    self.meter.begin()
                case MoveLayers(layers, slots, placement):
                    self.experts.move(layers, np.frombuffer(placement, np.int32).reshape(len(layers), slots))
                case Prepare() | Commit() | Discard() | Switch() as change:
                    error = self._change(change)
                    self.orders.channel.send(CommandDone(self.live.version, error))
                case ReadAdapter() | PlaceAdapter() | LackAdapter() | ForgetAdapter() as about:
                    self._adapters.submit(self._adapter, about)
                case Moving(move) if self.mover is not None:
                    self.mover.begin(move, self._moved)
                case OpenStaging() | OpenSender() | StagePages() | FetchPages() | CloseTransfers() as order if (
                    self.transfers is not None
                ):
                    self.transfers.begin(order)
                case StopWorker():
                    if self.mover is not None:
                        self.mover.close()
                    return
                case other:
                    raise RankLost(f"rank 0 sent {type(other).__name__} to a rank that runs")

    def _change(self, change: Prepare | Commit | Discard | Switch) -> str:
        """Change weights or memory; return the error, or ""."""
        try:
            match change:
                case Prepare(source):
                    self.live.prepare(source)
                case Commit(version):
                    self.live.commit(version)
                case Discard():
                    self.live.discard()
                case Switch(tags, released):
                    self.live.switch_memory(tags, released=released)
        except ConfigError as error:
            return str(error)
        return ""

    def _moved(self, end: MoveEnd) -> None:
        """Report the end of a move, from any thread."""
        if end.failure is not None:
            self.orders.fail(end.failure)
        else:
            self.orders.channel.send(Moved(end.number, end.pages_done, end.error, end.blocks))

    def _adapter(self, about: AdapterUpdate) -> None:
        """Read an adapter, or copy it to the device, in a separate thread.

        Errors other than ConfigError end this rank.
        """
        error = ""
        try:
            match about:
                case ReadAdapter(_, name, version, source):
                    self.host_adapters.read(name, version, source)
                case PlaceAdapter(_, name, version, slot):
                    self.host_adapters.place(name, version, slot)
                case LackAdapter(name, version, why):
                    self.host_adapters.lack(name, version, why)
                case ForgetAdapter(name, version):
                    self.host_adapters.forget(name, version)
        except ConfigError as raised:
            error = str(raised)
        except BaseException as raised:
            self.orders.fail(raised)
            return
        if isinstance(about, ReadAdapter | PlaceAdapter):
            self.orders.channel.send(AdapterDone(about.ticket, error))


def follow(orders: Orders) -> None:
    """Run a rank from its first message to its end."""
    setup = orders.expect(WorkerSetup)
    if "|" not in setup.store:
        orders.folder = Path(setup.store).parent
    torch.set_num_threads(setup.threads)
    device = torch.device(setup.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    send = orders.channel.send
    send(Doing("meeting the other ranks"))
    place = RankPlace(setup.rank, setup.tp, setup.pp)
    ends = RankEnds(setup.store, place, device, setup.timeout_s, orders.channel.host)
    send(Doing("loading the model"))
    assembled = assemble(setup.settings, device, HostClock(), LeadRank(orders, ends))
    send(Ready())
    live = LiveModel(assembled.model, assembled.executor, assembled.mover)
    Follower(assembled.executor, orders, live, setup.rank, assembled.mover, assembled.transfers).run()


def main(arguments: Sequence[str]) -> None:
    """Run the worker, then exit at once: torch may wait for ranks that have ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes at the terminal; rank 0 decides
    if "|" in arguments[0]:
        end = connect(arguments[0])
    else:
        end = socket.socket(fileno=int(arguments[0]))
    orders = Orders(Channel(end, ToWorker, timeout_s=30.0))
    status = 0
    try:
        follow(orders)
    except BaseException as error:
        status = FAILED
        try:
            orders.channel.send(_failed(error))
        except OSError:
            orders.leave()
    os._exit(status)


def _failed(error: BaseException) -> Failed:
    """Return the report to rank 0: one line, and the whole trace for debugging."""
    trace = "".join(traceback.format_exception(error))
    if isinstance(error, ConfigError):
        return Failed(str(error), "config", trace)
    root = error
    while root.__cause__ is not None and not isinstance(root, CollectiveFailed):
        root = root.__cause__
    where = ""
    if not isinstance(root, CollectiveFailed | RankLost) and (frames := traceback.extract_tb(root.__traceback__)):
        where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})"
    reason = str(root).strip().partition("\n")[0]
    kind: FailureKind = "collective" if isinstance(root, CollectiveFailed) else "other"
    return Failed(f"{type(root).__name__}: {reason}{where}", kind, trace)


if __name__ == "__main__":
    main(sys.argv[1:])
