"""Rank 0 of a tensor-parallel group: it starts the workers, tells them every plan, and ends with the first of them.

    rank 0, the user's process                       ranks 1, 2, ...: worker.py, a process each

    RuntimeHost ──> LeadExecutor ──orders, socket pair──> Follower        no rank but the first has a scheduler
                        │         <──what was drawn, last words──  │
                        v                                          v
                    Executor  <───────sums and joins───────>   Executor   one GPU each; gloo on the CPU

Plans go over a channel of their own and not through a collective: a collective that cannot complete cannot be left.
What can happen to a worker, and how rank 0 hears of it:

| a worker | shows as | then |
|---|---|---|
| is killed, crashes | its channel ends; its exit status says how | |
| raises | its last word, Failed, with the error | |
| stops answering | no answer to the oldest batch for `timeout_s` | |
| draws other tokens than rank 0 | the digests in Collected differ | |

Each becomes `failure`, one sentence, the first one wins; and all workers are killed, so that a thread that waits for
them in a collective comes back. The host finds the failure at its next look at the executor. If it does not within
GRACE_S, since some kernel never ends, `on_stuck` is called, which fails the waiting requests; while rank 0 still
starts, its process ends.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TypeVar

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from lockstep.core.contract.commands import BatchPlan, RowTaken
from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.errors import ConfigError
from lockstep.core.contract.events import BatchId, RequestId
from lockstep.host.batches import NO_CONTEXT, BatchResult, ContextOf
from lockstep.runtime.collectives import START_S, CollectiveFailed, Collectives
from lockstep.runtime.errors import DeviceLost, RankLost
from lockstep.runtime.executor import Executor, Matchers
from lockstep.runtime.live import LiveModel
from lockstep.runtime.lora.host_cache import HostAdapterCache, answering
from lockstep.runtime.models import ModelSettings
from lockstep.runtime.models.layers import Parallel
from lockstep.runtime.rank_wire import (
    AdapterDone,
    Channel,
    Chosen,
    Collect,
    Collected,
    CommandDone,
    Commit,
    Discard,
    Doing,
    Failed,
    ForgetAdapter,
    LackAdapter,
    Mask,
    Order,
    PlaceAdapter,
    PlanChain,
    Prepare,
    RankSettings,
    ReadAdapter,
    Ready,
    Sample,
    Sized,
    Start,
    StopWorker,
    Switch,
    ToLead,
    ToWorker,
    WorkerSetup,
    drawn_digest,
    in_turn,
)

log = logging.getLogger("lockstep.runtime")

Int32s = NDArray[np.int32]
T = TypeVar("T")

TIMEOUT_S = 300.0  # for one batch; the first one may compile kernels
GRACE_S = 10.0  # from a failure to the moment at which the host must have found it
CAUSE_S = 5.0  # rank 0 waits so long for the reason why a collective failed
LAST_WORD_S = 1.0  # a collective that failed elsewhere is blamed only if nothing better came within this time
END_S = 5.0  # a worker that was told to stop is killed after this time
POLL_S = 0.2


def check_split(model: ModelSettings, ranks: int) -> None:
    """Raise ConfigError, naming the fields of config.json, if so many ranks cannot share a model."""
    if ranks < 1:
        raise ConfigError(f"`tp` must be at least 1, got `{ranks}`")
    shared = {"num_attention_heads": model.heads}
    if model.experts is None or model.experts.dense_layers:
        shared["intermediate_size"] = model.intermediate
    if model.experts is not None:
        shared["moe_intermediate_size"] = model.experts.intermediate
    wrong = [f"`{name}` {size} is not divided by {ranks}" for name, size in shared.items() if size % ranks]
    if model.kv_heads % ranks and ranks % model.kv_heads:
        wrong.append(f"`num_key_value_heads` {model.kv_heads} is neither divided by {ranks} nor divides it")
    if wrong:
        sizes = [size for size in range(1, model.heads + 1) if not any(n % size for n in shared.values())]
        fitting = [size for size in sizes if not (model.kv_heads % size and size % model.kv_heads)]
        raise ConfigError(
            f"`tp` {ranks} does not fit this model: {'; '.join(wrong)}\nhint: it can be {', '.join(map(str, fitting))}"
        )


def rank_device(first: torch.device, rank: int, ranks: int) -> torch.device:
    """The device of a rank, given that of rank 0: the GPUs behind it. Raises ConfigError if there are too few."""
    if first.type != "cuda":
        return first
    index, count = first.index or 0, torch.cuda.device_count()
    if index + ranks > count:
        raise ConfigError(
            f"`tp` {ranks} from cuda:{index} on needs {index + ranks} GPUs, but torch sees {count}\n"
            "hint: a smaller tp, or CUDA_VISIBLE_DEVICES"
        )
    return torch.device("cuda", index + rank)


@dataclass(slots=True)
class _Worker:
    """One worker as rank 0 sees it. What changes is guarded by the group's lock."""

    rank: int
    process: subprocess.Popen[bytes]
    channel: Channel
    doing: str = "starting"
    chosen: Chosen | None = None
    sized: Sized | None = None
    ready: bool = False
    launched: deque[BatchId] = field(default_factory=deque)  # and not answered
    drawn: dict[BatchId, bytes] = field(default_factory=dict)  # what it drew, where rank 0 has not said yet
    done: CommandDone | None = None  # its answer to the last change of weights or memory
    waited_s: float = 0.0  # spent waiting since it said something, or was told something
    threads: list[threading.Thread] = field(default_factory=list)

    def described(self) -> str:
        """Its rank and process."""
        return f"rank {self.rank} (process {self.process.pid})"

    def busy(self) -> str:
        """What it was doing, for a message about its end."""
        if self.doing:
            return f"while {self.doing}"
        if not self.launched:
            return "with nothing to do"
        if len(self.launched) == 1:
            return f"with batch {self.launched[0]} in flight"
        return f"with batches {self.launched[0]} to {self.launched[-1]} in flight"


class RankGroup:
    """The workers, and rank 0's end of the collectives. Returns once all ranks have met.

    Args:
        device: of rank 0. `cuda` is the first GPU; `self.device` says so.
        timeout_s: in which a batch must come back from every rank.
    Raises: ConfigError; RankLost when a worker ends before it has begun.
    """

    def __init__(
        self, ranks: int, device: torch.device, settings: RankSettings, *, timeout_s: float = TIMEOUT_S
    ) -> None:
        if not timeout_s > 0:
            raise ConfigError(
                f"`rank_timeout_s` must be above 0, got `{timeout_s}`\nhint: {TIMEOUT_S:g} is the default"
            )
        self.ranks, self.timeout_s = ranks, timeout_s
        self.matchers = None  # rank 0 has its own
        self.failure = ""  # why the group has ended
        self.on_stuck: Callable[[str], None] | None = None
        self._kind = ""  # of the failure
        self._lock = threading.Condition()  # of everything below, and of the workers
        self._failed = threading.Event()
        self._noticed = threading.Event()  # rank 0 has noticed, or has ended
        self._closing = False
        self._adapter_answers: dict[int, list[str]] = {}  # by ticket: what workers said, until all have
        self._tickets = 0
        self._drawn: dict[BatchId, tuple[bytes, int]] = {}  # what rank 0 drew, and how many have not said yet
        self._chain = PlanChain()
        self._folder = Path(tempfile.mkdtemp(prefix="lockstep-ranks-"))  # of mode 0700
        self._workers: list[_Worker] = []
        self._collectives: Collectives | None = None
        self._watcher = threading.Thread(target=self._watch, name="ranks", daemon=True)
        try:
            devices = [rank_device(device, rank, ranks) for rank in range(ranks)]
            self.device = devices[0]
            self._workers += [self._spawn(rank) for rank in range(1, ranks)]
            self._watcher.start()
            store = str(self._folder / "store")
            for worker in self._workers:
                given = WorkerSetup(
                    rank=worker.rank,
                    ranks=ranks,
                    device=str(devices[worker.rank]),
                    threads=torch.get_num_threads(),
                    store=store,
                    timeout_s=self._collective_s,
                    settings=settings,
                )
                self._send(worker, given)
            self._collectives = self._while_alive(lambda: Collectives(store, 0, ranks, devices[0], self._collective_s))
        except BaseException:
            self.close()
            raise

    @property
    def _collective_s(self) -> float:
        """Seconds until a collective gives up by itself: later than the group, which has the reason."""
        return self.timeout_s + 2 * GRACE_S

    # ---------------------------------------------------------------------------------------------------- for rank 0

    def parallel(self) -> Parallel:
        """Rank 0's part of the model."""
        assert self._collectives is not None
        return self._collectives.parallel()

    def compare(self, chosen: str) -> None:
        """Raise ConfigError if a rank chose otherwise: its passes would wait for ours, and ours for its. RankLost."""
        self._until(lambda worker: worker.chosen is not None, "to choose its attention backend")
        for worker in self._workers:
            if worker.chosen is not None and worker.chosen.chosen != chosen:
                raise ConfigError(
                    f"`attention_backend` came to {chosen} on rank 0 and to {worker.chosen.chosen} on rank "
                    f"{worker.rank}\nhint: name one that all of the GPUs can run"
                )

    def agree(self, config: SchedConfig) -> SchedConfig:
        """What holds on all ranks: the pool is as large as the smallest has room for. Raises RankLost."""
        self._until(lambda worker: worker.sized is not None, "to say how many pages of KV fit")
        said = [worker.sized for worker in self._workers if worker.sized is not None]
        agreed = msgspec.structs.replace(config, pages=min([config.pages, *(one.pages for one in said)]))
        for worker in self._workers:
            self._send(worker, Start(agreed))
        return agreed

    def lead(self, executor: Executor) -> LeadExecutor:
        """Rank 0's executor together with those of the workers, which are there when this returns."""
        self._until(lambda worker: worker.ready, "to make its executor")
        return LeadExecutor(executor, self)

    def check(self) -> None:
        """Raise RankLost if the group has ended."""
        if self.failure:
            self._noticed.set()
            raise RankLost(self.failure)

    def explain(self, error: DeviceLost) -> DeviceLost:
        """What rank 0 raises instead of `error`: the reason for it, if that lies with another rank."""
        if isinstance(error, CollectiveFailed):
            self._failed.wait(CAUSE_S)
        self._noticed.set()
        if not self.failure:
            self._fail(f"rank 0: {error}")
        return error if self.failure.endswith(str(error)) else RankLost(self.failure)

    def launch(self, order: Order) -> None:
        """Tell every worker what rank 0 is about to launch."""
        sealed = self._chain.seal(order)
        for worker in self._workers:
            with self._lock:
                worker.launched.append(order.plan.batch_id)
            self._send(worker, sealed)

    def tell(self, message: Mask | Sample | Collect | LackAdapter | ForgetAdapter) -> None:
        """The same to every worker."""
        for worker in self._workers:
            self._send(worker, message)

    def change(self, message: Prepare | Commit | Discard | Switch, what: str) -> None:
        """Tell every worker to change weights or memory; `changed` has the answers."""
        for worker in self._workers:
            with self._lock:
                worker.done, worker.doing = None, what
            self._send(worker, message)

    def changed(self, version: int) -> str:
        """Wait for all answers. Returns the first error, or nothing.

        Raises: RankLost, also where a rank has other weights than this version.
        """
        self._until(lambda worker: worker.done is not None, "to change its weights or its memory")
        for worker in self._workers:
            if worker.done is not None and worker.done.version != version:
                has = worker.done.version
                self._fail(f"{worker.described()} has weights {has}, and rank 0 has weights {version}")
        self.check()
        errors = [worker.done.error for worker in self._workers if worker.done is not None and worker.done.error]
        return errors[0] if errors else ""

    def about_adapter(self, make: Callable[[int], ReadAdapter | PlaceAdapter], own: Callable[[], None]) -> None:
        """Do something about an adapter on all ranks, here by `own`. Raises ConfigError where one cannot; RankLost."""
        with self._lock:
            ticket, self._tickets = self._tickets, self._tickets + 1
            said = self._adapter_answers[ticket] = []
        for worker in self._workers:
            self._send(worker, make(ticket))
        error: ConfigError | None = None
        try:
            own()
        except ConfigError as raised:
            error = raised
        with self._lock:
            while not self.failure and len(said) < len(self._workers):
                self._lock.wait(POLL_S)
            del self._adapter_answers[ticket]
        self.check()
        if error is not None:
            raise error
        if wrong := next(filter(None, said), ""):
            raise ConfigError(wrong)

    def drew(self, result: BatchResult) -> None:
        """Compare what rank 0 drew with what the workers drew, or will have drawn."""
        batch_id, drawn = result.plan.batch_id, drawn_digest(result)
        with self._lock:
            missing = sum(batch_id not in worker.drawn for worker in self._workers)
            others = [(worker, worker.drawn.pop(batch_id)) for worker in self._workers if batch_id in worker.drawn]
            if missing:
                self._drawn[batch_id] = (drawn, missing)
        for worker, theirs in others:
            self._compare(worker, batch_id, drawn, theirs)
        self.check()

    def close(self, *, stuck: bool = False) -> None:
        """End the workers. With `stuck`, rank 0 has a thread that does not come back: the process will end hard."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
        self._noticed.set()
        for worker in self._workers:
            if not self.failure:
                with contextlib.suppress(OSError):
                    worker.channel.send(StopWorker())
        until = time.monotonic() + END_S
        for worker in self._workers:
            try:
                worker.process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()
            for thread in worker.threads:
                thread.join(END_S)
            worker.channel.close()
        if self._watcher.is_alive():
            self._watcher.join()
        if self._collectives is not None and not stuck:
            self._collectives.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        if stuck:
            end_hard_at_exit("a thread of rank 0")

    # -------------------------------------------------------------------------------------------------------- inside

    def _spawn(self, rank: int) -> _Worker:
        """Start a worker: a new interpreter, since a forked one would have torch's threads half."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "lockstep.runtime.worker", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            )
        worker = _Worker(rank, process, Channel(ours, ToLead, self.timeout_s))
        for name, run in (("listen", self._listen), ("log", self._forward)):
            thread = threading.Thread(target=run, args=(worker,), name=f"rank {rank} {name}", daemon=True)
            worker.threads.append(thread)
            thread.start()
        return worker

    def _send(self, worker: _Worker, message: ToWorker) -> None:
        self.check()
        worker.waited_s = 0.0
        try:
            worker.channel.send(message)
        except OSError as error:
            raise self.explain(CollectiveFailed(f"{worker.described()} takes nothing in: {error}")) from error

    def _until(self, there: Callable[[_Worker], bool], what: str) -> None:
        """Wait for all workers, which have as much to do as rank 0 had."""
        until = time.monotonic() + START_S
        with self._lock:
            while not self.failure and (late := [worker for worker in self._workers if not there(worker)]):
                if not self._lock.wait(max(0.0, until - time.monotonic())) and time.monotonic() > until:
                    self._fail(f"{late[0].described()} took more than {START_S:g} s longer than rank 0 {what}")
        self._raise_at_start()

    def _while_alive(self, run: Callable[[], T]) -> T:
        """Run something that waits for all ranks, but no longer than they live."""
        done: list[T] = []
        errors: list[BaseException] = []

        def attempt() -> None:
            try:
                done.append(run())
            except BaseException as error:
                errors.append(error)
            finally:
                with self._lock:
                    self._lock.notify_all()

        threading.Thread(target=attempt, name="ranks meet", daemon=True).start()
        with self._lock:
            while not (done or errors or self.failure):
                self._lock.wait()
        if errors and isinstance(errors[0], DeviceLost):
            raise self.explain(errors[0]) from errors[0]
        if errors:
            raise errors[0]
        self._raise_at_start()
        return done[0]

    def _raise_at_start(self) -> None:
        if self.failure and self._kind == "config":
            raise ConfigError(self.failure)
        self.check()

    # --------------------------------------------------------------------------------------------- in their threads

    def _listen(self, worker: _Worker) -> None:
        """Take in what a worker says, until it says nothing any more."""
        while True:
            try:
                message = worker.channel.receive()
            except msgspec.DecodeError as error:
                self._fail(f"{worker.described()} sent what cannot be read: {error}")
                return
            if message is None:
                break
            self._take_in(worker, message)
        if self._closing:
            return
        try:
            status = worker.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._fail(f"{worker.described()} closed its channel {worker.busy()}, but lives on")
            return
        worker.threads[1].join(LAST_WORD_S)  # what it wrote before comes before what we say of it
        self._fail(f"{worker.described()} {_how(status)} {worker.busy()}")

    def _take_in(self, worker: _Worker, message: ToLead) -> None:
        compared: tuple[BatchId, bytes, bytes] | None = None
        with self._lock:
            worker.waited_s = 0.0
            match message:
                case Doing(what):
                    worker.doing = what
                case Chosen():
                    worker.chosen = message
                case Sized():
                    worker.sized = message
                case Ready():
                    worker.ready, worker.doing = True, ""
                case CommandDone():
                    worker.done, worker.doing = message, ""
                case AdapterDone(ticket, error):
                    self._adapter_answers.get(ticket, []).append(error)  # no call waits where the group has ended
                case Collected(batch_id, drawn):
                    if batch_id in worker.launched:
                        worker.launched.remove(batch_id)
                    if batch_id in self._drawn:
                        ours, missing = self._drawn.pop(batch_id)
                        if missing > 1:
                            self._drawn[batch_id] = (ours, missing - 1)
                        compared = (batch_id, ours, drawn)
                    else:
                        worker.drawn[batch_id] = drawn
            self._lock.notify_all()
        if compared is not None:
            batch_id, ours, theirs = compared
            self._compare(worker, batch_id, ours, theirs)
        if isinstance(message, Failed):
            log.debug("%s\n%s", worker.described(), message.trace)
            if message.kind == "collective":
                self._failed.wait(LAST_WORD_S)  # the rank that was lost first is the reason
            self._fail(f"{worker.described()} failed {worker.busy()}: {message.message}", message.kind)

    def _compare(self, worker: _Worker, batch_id: BatchId, ours: bytes, theirs: bytes) -> None:
        if ours != theirs:
            self._fail(
                f"{worker.described()} drew other tokens than rank 0 in batch {batch_id}: expected digest "
                f"{ours.hex()}, found {theirs.hex()}; the ranks do not compute the same"
            )

    def _forward(self, worker: _Worker) -> None:
        """What a worker prints goes to our log."""
        printed: IO[bytes] | None = worker.process.stdout
        assert printed is not None
        with printed:
            for line in printed:
                log.warning("rank %d: %s", worker.rank, line.decode("utf-8", "replace").rstrip())

    def _watch(self) -> None:
        """Find ranks that do not answer; after a failure, report it to the host."""
        before = time.monotonic()
        while not self._failed.wait(POLL_S):
            if self._closing:
                return
            now = time.monotonic()
            passed, before = min(now - before, 5 * POLL_S), now  # if we were stopped, they may have been as well
            with self._lock:
                late = [worker for worker in self._workers if worker.launched]
                for worker in late:
                    worker.waited_s += passed
                late = [worker for worker in late if worker.waited_s > self.timeout_s]
            if late:
                names = ", ".join(worker.described() + _state(worker.process.pid) for worker in late)
                self._fail(f"batch {late[0].launched[0]} did not come back in {self.timeout_s:g} s from {names}")
        if self._noticed.wait(GRACE_S):
            return
        if self.on_stuck is not None:
            self.on_stuck(self.failure)
        elif not self._noticed.wait(START_S):  # it still starts: only the call of the constructor waits
            shutil.rmtree(self._folder, ignore_errors=True)
            log.critical("%s; rank 0 does not come back from its start, and ends", self.failure)
            _end_hard()

    def _fail(self, message: str, kind: str = "other") -> None:
        """The group has ended. Calls that wait for a worker return."""
        with self._lock:
            if self.failure or self._closing:
                return
            self.failure, self._kind = message, kind
            self._lock.notify_all()
        self._failed.set()
        for worker in self._workers:
            worker.process.kill()
        if self._collectives is not None:
            threading.Thread(target=self._collectives.abort, name="ranks abort", daemon=True).start()


class LeadExecutor:
    """Rank 0's executor, each call of which the workers make as well. To the host it is an executor like any other."""

    def __init__(self, executor: Executor, group: RankGroup) -> None:
        self.executor, self.group = executor, group
        if executor.matchers is not None:
            executor.matchers = ShownMasks(executor.matchers, group)

    @property
    def in_flight(self) -> int:
        """Batches launched and not collected."""
        return self.executor.in_flight

    def launch(self, plan: BatchPlan, *, deferred: bool = False, contexts: ContextOf | None = None) -> None:
        """As `Executor.launch`, on all ranks. Raises RankLost beside what that raises."""
        told = tuple(NO_CONTEXT if contexts is None else contexts(taken) for taken in plan.rows_taken)
        self.group.launch(Order(plan, deferred, told))
        with self._explained():
            self.executor.launch(plan, deferred=deferred, contexts=in_turn(told))

    def sample(self, batch_id: BatchId, advance: Sequence[tuple[RequestId, int, Sequence[int]]]) -> None:
        """As `Executor.sample`."""
        self.group.tell(Sample(batch_id))
        with self._explained():
            self.executor.sample(batch_id, advance)

    def ready(self) -> bool:
        """As `Executor.ready`; also where nothing is in flight, RankLost says that a worker has ended."""
        self.group.check()
        with self._explained():
            return self.executor.ready()

    def pause_s(self) -> float:
        """As `Executor.pause_s`."""
        with self._explained():
            return self.executor.pause_s()

    def collect(self) -> BatchResult:
        """As `Executor.collect`."""
        self.group.tell(Collect())
        with self._explained():
            result = self.executor.collect()
        self.group.drew(result)
        return result

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except DeviceLost as error:
            raise self.group.explain(error) from error


class LeadModel:
    """The weights and the memory of all ranks: `lockstep.host.weights.Hands`. Either all change, or none."""

    def __init__(self, live: LiveModel, group: RankGroup) -> None:
        self.live, self.group = live, group

    def load_weights(self, version: int, source: str) -> None:
        """All ranks read; then all put it in place. Raises ConfigError where one cannot; RankLost."""
        self.group.change(Prepare(source), "reading new weights")
        error = ""
        try:
            self.live.prepare(source)
        except ConfigError as raised:
            error = str(raised)
        theirs = self.group.changed(self.live.version)
        if error or theirs:
            self.live.discard()
            self.group.change(Discard(), "forgetting weights")
            self.group.changed(self.live.version)
            raise ConfigError(error or theirs)
        self.group.change(Commit(version), f"putting weights {version} in place")
        self.live.commit(version)
        self.group.changed(version)

    def switch_memory(self, tags: tuple[str, ...], *, released: bool) -> None:
        """On all ranks, or on none. Raises ConfigError where one cannot; RankLost."""
        self.live.switch_memory(tags, released=released)
        self.group.change(Switch(tags, released), "giving memory back" if released else "taking memory again")
        error = self.group.changed(self.live.version)
        if error:
            self.live.switch_memory(tags, released=not released)
            self.group.change(Switch(tags, not released), "undoing that")
            if undone := self.group.changed(self.live.version):
                raise RankLost(f"memory of {', '.join(tags)} could not be switched, nor that be undone: {undone}")
            raise ConfigError(error)


class LeadAdapters:
    """Adapters of all ranks: `lockstep.host.adapters.AdapterHands`. One is in a slot once it is there on every rank."""

    def __init__(self, shelf: HostAdapterCache, group: RankGroup) -> None:
        self.shelf, self.group = shelf, group
        self._thread = ThreadPoolExecutor(1, "lockstep-adapters")

    def read(self, name: str, version: int, source: str) -> None:
        """On all ranks, or on none. Raises ConfigError with what does not fit; RankLost."""
        try:
            self.group.about_adapter(
                lambda ticket: ReadAdapter(ticket, name, version, source),
                lambda: self.shelf.read(name, version, source),
            )
        except ConfigError:
            self.forget(name, version)
            raise

    def lack(self, name: str, version: int, why: str) -> None:
        """See `HostAdapterCache.lack`."""
        self.group.tell(LackAdapter(name, version, why))
        self.shelf.lack(name, version, why)

    def place(self, name: str, version: int, slot: int, done: Callable[[BaseException | None], None]) -> None:
        """Copy into a slot on all ranks, beside whatever runs."""

        def work() -> None:
            self.group.about_adapter(
                lambda ticket: PlaceAdapter(ticket, name, version, slot),
                lambda: self.shelf.place(name, version, slot),
            )

        self._thread.submit(answering, work, done)

    def forget(self, name: str, version: int | None = None) -> None:
        """See `HostAdapterCache.forget`."""
        self.group.tell(ForgetAdapter(name, version))
        self.shelf.forget(name, version)

    def close(self) -> None:
        """Nothing more is loaded."""
        self._thread.shutdown(wait=False, cancel_futures=True)


class ShownMasks:
    """Rank 0's matchers; what they allow is sent to the workers, in front of the pass or the draw that needs it."""

    def __init__(self, matchers: Matchers, group: RankGroup) -> None:
        self._matchers, self._group = matchers, group

    def take_row(self, taken: RowTaken) -> None:
        """A row changes hands."""
        self._matchers.take_row(taken)

    def advance(self, request_id: RequestId, epoch: int, tokens: Sequence[int]) -> None:
        """Move a matcher."""
        self._matchers.advance(request_id, epoch, tokens)

    def allowed(self, rows: Int32s) -> Int32s | None:
        """What may come next, here and on every rank."""
        mask = self._matchers.allowed(rows)
        self._group.tell(Mask(len(rows), None if mask is None else mask.astype("<i4").tobytes()))
        return mask

    def ended(self, row: int, token: int) -> bool:
        """Whether the row's grammar admits nothing behind this token."""
        return self._matchers.ended(row, token)

    def forced(self, row: int, token: int) -> list[int]:
        """What must follow this token: the core plans it, and so every rank is told."""
        return self._matchers.forced(row, token)


def _how(status: int) -> str:
    """How a process ended."""
    if status == -signal.SIGKILL:
        return "was ended by SIGKILL (the kernel does that when memory runs out)"
    if status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    return f"ended with status {status}"


def _state(pid: int) -> str:
    """Of a process that does not answer, where the system tells: stopped, waiting for a disk."""
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
    said = {"T": "stopped", "t": "stopped by a debugger", "D": "waiting for a disk or a driver"}.get(letter)
    return f", which is {said}" if said else ""


def end_hard_at_exit(what: str) -> None:
    """Let the process end although `what` does not; torch would wait for it."""
    log.error("%s does not come back; when the program ends, its process ends with status 1", what)
    atexit.register(_end_hard)


def _end_hard() -> None:
    """End a process with a thread that does not come back; torch would wait for it."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    logging.shutdown()
    os._exit(1)
