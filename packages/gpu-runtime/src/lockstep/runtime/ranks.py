"""Rank 0 of an engine of several ranks: starts the workers, sends them every plan, and ends with the first of them.

Ranks split the layers of a model (`tp`), and pipeline stages have some of the layers each (`pp`, stages.py).

    rank 0, the user's process                       ranks 1, 2, ...: worker.py, a process each

    RuntimeHost ──> LeadExecutor ──orders, socket pair──> Follower        only rank 0 has a scheduler
                         │         <──digests, errors───  │
                         v                                v
                      Executor  <───────sums and joins───────>   Executor   one GPU each; gloo on the CPU

Plans have their own channel instead of a collective, because a thread cannot leave a collective that cannot complete.
Failures of a worker, and how rank 0 detects them:

| a worker | detected by |
|---|---|
| is killed, crashes | its channel closes; its exit status has the reason |
| raises | its last message, Failed, with the error |
| stops responding | no answer to the oldest batch for `timeout_s` |
| draws other tokens than rank 0 | different digests in Collected |

The first failure becomes `failure`, one sentence. All workers are then killed, so that a thread that waits for them in
a collective returns. The host finds the failure in its next call of the executor. If it does not within GRACE_S,
because a kernel never ends, `on_stuck` is called, which fails the waiting requests; while rank 0 still starts, its
process ends.
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
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from lockstep.core.contract.events import BatchId, PromptSpan, RequestId
from lockstep.host.batches import NO_CONTEXT, BatchResult, ContextOf
from lockstep.host.cache_moves import MoveEnd
from lockstep.host.media.content import EncoderInput
from lockstep.host.recovery import OUTSIDE_SIGNALS
from lockstep.runtime.collectives import LOOPBACK, START_S, CollectiveFailed
from lockstep.runtime.errors import DeviceLost, RankLost
from lockstep.runtime.executor import Executor, Matchers
from lockstep.runtime.live import LiveModel
from lockstep.runtime.lora.host_cache import HostAdapterCache, answering
from lockstep.runtime.media import DeviceMedia
from lockstep.runtime.models import ModelSettings
from lockstep.runtime.models.layers import Parallel
from lockstep.runtime.processor import threads_of_rank
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
    EncodeContents,
    Failed,
    ForgetAdapter,
    HoldContents,
    LackAdapter,
    Mask,
    Moved,
    Order,
    PlaceAdapter,
    PlanChain,
    Prepare,
    RankSettings,
    ReadAdapter,
    Ready,
    ReleaseContents,
    Sample,
    Sized,
    Start,
    StopWorker,
    Switch,
    Told,
    ToLead,
    ToWorker,
    TransferDone,
    WorkerSetup,
    drawn_digest,
    in_turn,
)
from lockstep.runtime.ray_ranks import LOST, RayNodes, RayProcess
from lockstep.runtime.stages import RankEnds, RankPlace, StageLinks

log = logging.getLogger("lockstep.runtime")

Int32s = NDArray[np.int32]
T = TypeVar("T")

TIMEOUT_S = 300.0  # for one batch; the first one may compile kernels
GRACE_S = 10.0  # from a failure to the time at which the host must have found it
CAUSE_S = 5.0  # limit of rank 0's wait for the reason why a collective failed
LAST_WORD_S = 1.0  # a collective that failed elsewhere is reported only if no better reason arrives within this time
END_S = 5.0  # a worker is killed this long after its StopWorker message
POLL_S = 0.2


def check_split(model: ModelSettings, ranks: int, ep: int = 1) -> None:
    """Raise ConfigError, with the fields of config.json, if `ranks` ranks cannot split a model.

    Args:
        ep: ranks over which whole experts are divided; 1: every rank has a part of each.
    """
    if ranks < 1:
        raise ConfigError(f"`tp` must be at least 1, got `{ranks}`")
    if ep > 1 and (model.experts is None or model.backend == "transformers"):
        runs = " run by transformers' code" if model.backend == "transformers" else ""
        raise ConfigError(
            f"`ep` is {ep}, but {model.architecture}{runs} has no experts that ranks could divide\nhint: leave it out"
        )
    if model.backend == "transformers":
        return  # its plan is checked with the model
    shared = {"num_attention_heads": model.heads}
    if model.experts is None or model.experts.dense_layers:
        shared["intermediate_size"] = model.intermediate
    if model.experts is not None and ep > 1:
        shared["num_experts"] = model.experts.experts
    elif model.experts is not None:
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


def rank_device(first: torch.device, rank: int, tp: int, pp: int = 1) -> torch.device:
    """Return the device of a rank, counted from that of rank 0. Raises ConfigError if there are too few GPUs."""
    if first.type != "cuda":
        return first
    index, count, ranks = first.index or 0, torch.cuda.device_count(), tp * pp
    if index + ranks > count:
        what, smaller = (f"`tp` {tp}", "tp") if pp == 1 else (f"`tp` {tp} x `pp` {pp}", "tp or pp")
        raise ConfigError(
            f"{what} from cuda:{index} on needs {index + ranks} GPUs, but torch sees {count}\n"
            f"hint: a smaller {smaller}, or CUDA_VISIBLE_DEVICES"
        )
    return torch.device("cuda", index + rank)


@dataclass(slots=True)
class _Worker:
    """Rank 0's state of one worker. The group's lock guards all that changes."""

    rank: int
    process: subprocess.Popen[bytes] | RayProcess
    channel: Channel
    where: str = ""  # " on 10.0.0.2", if that is not the machine of rank 0
    doing: str = "starting"
    chosen: Chosen | None = None
    sized: Sized | None = None
    stage: str = ""  # ", stage 1 of 4": behind its name, where there are several
    ready: bool = False
    launched: deque[BatchId] = field(default_factory=deque)  # batches launched and not answered
    drawn: dict[BatchId, bytes] = field(default_factory=dict)  # the worker's digests that rank 0 still lacks
    done: CommandDone | None = None  # answer to the newest change of weights or memory
    waited_s: float = 0.0  # time waited since the last message from or to it
    threads: list[threading.Thread] = field(default_factory=list)

    def described(self) -> str:
        """Return rank, stage and process."""
        return f"rank {self.rank}{self.stage} (process {self.process.pid}{self.where})"

    def state(self) -> str:
        """Return the state of the process, if it is on this machine."""
        return "" if self.where else _state(self.process.pid)

    def busy(self) -> str:
        """Return the current activity, for a message about its end."""
        if self.doing:
            return f"while {self.doing}"
        if not self.launched:
            return "with nothing to do"
        if len(self.launched) == 1:
            return f"with batch {self.launched[0]} in flight"
        return f"with batches {self.launched[0]} to {self.launched[-1]} in flight"


class RankGroup:
    """The workers, and rank 0's end of the collectives. The constructor returns once all ranks have joined.

    Args:
        device: device of rank 0. `cuda` is the first GPU, stored in `self.device`.
        timeout_s: limit for a batch, in which every rank must return its result.
    Raises: ConfigError; RankLost if a worker ends before it has started.
    """

    def __init__(
        self,
        tp: int,
        device: torch.device,
        settings: RankSettings,
        *,
        pp: int = 1,
        timeout_s: float = TIMEOUT_S,
        ray: str | None = None,
    ) -> None:
        if not timeout_s > 0:
            raise ConfigError(
                f"`rank_timeout_s` must be above 0, got `{timeout_s}`\nhint: {TIMEOUT_S:g} is the default"
            )
        self.place, self.timeout_s = RankPlace(0, tp, pp), timeout_s
        ranks = self.ranks = self.place.ranks
        self.matchers = None  # rank 0 has its own
        self.failure = ""  # why the group has ended
        self.on_stuck: Callable[[str], None] | None = None
        self.on_moved: Callable[[MoveEnd], None] | None = None  # receives the ends of moves on the workers
        self.on_transferred: Callable[[TransferDone], None] | None = None  # and of their orders of transfers
        self._kind = ""  # of the failure
        self._lock = threading.Condition()  # guards the fields below, and the workers
        self._failed = threading.Event()
        self._noticed = threading.Event()  # rank 0 has found the failure, or has ended
        self._closing = False
        self._adapter_answers: dict[int, list[str]] = {}  # by ticket: errors of the workers so far, "" for success
        self._tickets = 0
        self._drawn: dict[BatchId, tuple[bytes, int]] = {}  # rank 0's digest, and the number of workers without one
        self._chain = PlanChain()
        self._folder = Path(tempfile.mkdtemp(prefix="lockstep-ranks-"))  # of mode 0700
        self._workers: list[_Worker] = []
        self._ends: RankEnds | None = None
        self._nodes: RayNodes | None = None  # of the stages on other machines
        self._watcher = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._threads = torch.get_num_threads()  # of this process before and behind this group
        threads = self._threads
        if device.type == "cpu":
            threads = threads_of_rank(ranks if ray is None else tp)
            torch.set_num_threads(threads)
        try:
            if ray is not None:
                self._nodes = RayNodes(ray, self.place, gpus=device.type == "cuda")
            devices = self._devices(device)
            self.device = devices[0]
            self._workers += [self._spawn(rank) for rank in range(1, ranks)]
            self._watcher.start()
            store, host = str(self._folder / "store"), LOOPBACK
            if self._nodes is not None:
                host = self._nodes.host
                store = f"{host}|{self._nodes.store.port}|ranks"
            for worker in self._workers:
                given = WorkerSetup(
                    rank=worker.rank,
                    tp=tp,
                    pp=pp,
                    device=str(devices[worker.rank]),
                    threads=threads,
                    store=store,
                    timeout_s=self._collective_s,
                    settings=settings,
                )
                self._send(worker, given)
            self._ends = self._while_alive(lambda: RankEnds(store, self.place, devices[0], self._collective_s, host))
        except BaseException:
            self.close()
            raise

    @property
    def _collective_s(self) -> float:
        """Limit of a collective in seconds: longer than the group's, which has a better reason."""
        return self.timeout_s + 2 * GRACE_S

    # ---------------------------------------------------------------------------------------------------- for rank 0

    def parallel(self) -> Parallel:
        """Return rank 0's part of the layers of its stage."""
        assert self._ends is not None
        return self._ends.parallel()

    @property
    def links(self) -> StageLinks | None:
        """The ends of rank 0 to the other stages; None: there is one stage."""
        return None if self._ends is None else self._ends.links

    def compare(self, chosen: str) -> None:
        """Raise ConfigError if a rank has another choice, because its passes and rank 0's would wait for each other.

        RankLost.
        """
        self._until(lambda worker: worker.chosen is not None, "to choose its attention backend")
        for worker in self._workers:
            if worker.chosen is not None and worker.chosen.chosen != chosen:
                raise ConfigError(
                    f"`attention_backend` came to {chosen} on rank 0 and to {worker.chosen.chosen} on rank "
                    f"{worker.rank}\nhint: name one that all of the GPUs can run"
                )

    def agree(self, config: SchedConfig) -> SchedConfig:
        """Return the settings of all ranks: the pool has the size of the smallest. Raises RankLost."""
        self._until(lambda worker: worker.sized is not None, "to report how many pages of KV fit")
        sized = [worker.sized for worker in self._workers if worker.sized is not None]
        pages = min([config.pages, *(one.pages for one in sized)])
        agreed = msgspec.structs.replace(config, pages=pages)
        if (hybrid := config.hybrid) is not msgspec.UNSET and pages < config.pages:
            windows = max(1, hybrid.window_pages * pages // config.pages) if hybrid.window_pages else 0
            slots = max(1 + config.states_per_row, hybrid.state_slots * pages // config.pages)
            fewer = msgspec.structs.replace(
                hybrid, window_pages=windows, state_slots=slots if hybrid.state_slots else 0
            )
            agreed = msgspec.structs.replace(agreed, hybrid=fewer)
        for worker in self._workers:
            self._send(worker, Start(agreed))
        return agreed

    def lead(self, executor: Executor) -> LeadExecutor:
        """Wait for the workers' executors; return an executor that runs rank 0's together with them."""
        self._until(lambda worker: worker.ready, "to make its executor")
        return LeadExecutor(executor, self)

    def check(self) -> None:
        """Raise RankLost if the group has ended."""
        if self.failure:
            self._noticed.set()
            raise self._lost()

    def explain(self, error: DeviceLost) -> DeviceLost:
        """Return the error for rank 0 to raise instead of `error`: its cause, if that is on another rank."""
        if isinstance(error, CollectiveFailed):
            self._failed.wait(CAUSE_S)
        self._noticed.set()
        if not self.failure:
            self._fail(f"rank 0: {error}")
        return error if self.failure.endswith(str(error)) else self._lost()

    def _lost(self) -> RankLost:
        """Return the error of the failure."""
        error = RankLost(self.failure)
        error.killed = self._kind == "killed"
        return error

    def launch(self, order: Order) -> None:
        """Send every worker the order that rank 0 is about to launch."""
        sealed = self._chain.seal(order)
        for worker in self._workers:
            with self._lock:
                worker.launched.append(order.plan.batch_id)
            self._send(worker, sealed)

    def tell(self, message: Told) -> None:
        """Send a message to every worker."""
        for worker in self._workers:
            self._send(worker, message)

    def change(self, message: Prepare | Commit | Discard | Switch, what: str) -> None:
        """Send every worker a change of weights or memory; `changed` returns the answers."""
        for worker in self._workers:
            with self._lock:
                worker.done, worker.doing = None, what
            self._send(worker, message)

    def changed(self, version: int) -> str:
        """Wait for all answers. Returns the first error, or "".

        Raises: RankLost, also if a rank has weights of another version.
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
        """Run a step for an adapter on all ranks, on rank 0 by `own`. Raises ConfigError if a rank fails; RankLost."""
        with self._lock:
            ticket, self._tickets = self._tickets, self._tickets + 1
            errors = self._adapter_answers[ticket] = []
        for worker in self._workers:
            self._send(worker, make(ticket))
        error: ConfigError | None = None
        try:
            own()
        except ConfigError as raised:
            error = raised
        with self._lock:
            while not self.failure and len(errors) < len(self._workers):
                self._lock.wait(POLL_S)
            del self._adapter_answers[ticket]
        self.check()
        if error is not None:
            raise error
        if wrong := next(filter(None, errors), ""):
            raise ConfigError(wrong)

    def check_sampled(self, result: BatchResult) -> None:
        """Compare rank 0's digest of a batch with those of the workers, now or when they arrive."""
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
        """End the workers.

        With `stuck`, a thread of rank 0 does not return, and the process will end without waiting for it.
        """
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
        torch.set_num_threads(self._threads)
        if self._ends is not None and not stuck:
            self._ends.close()
        if self._nodes is not None:
            self._nodes.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        if stuck:
            end_hard_at_exit("a thread of rank 0")

    # -------------------------------------------------------------------------------------------------------- inside

    def _devices(self, first: torch.device) -> list[torch.device]:
        """Return the device of each rank, as its process sees it. A process of Ray sees only its own GPU."""
        tp, pp, nodes = self.place.tp, self.place.pp, self._nodes
        if nodes is None:
            return [rank_device(first, rank, tp, pp) for rank in range(self.ranks)]
        elsewhere = torch.device("cuda", 0) if first.type == "cuda" else first
        return [elsewhere if nodes.has(rank) else rank_device(first, rank, tp) for rank in range(self.ranks)]

    def _spawn(self, rank: int) -> _Worker:
        """Start a worker in a new interpreter, because a forked one would have lost torch's threads."""
        if self._nodes is not None and self._nodes.has(rank):
            remote, connection = self._nodes.take(rank)
            return self._served(rank, remote, connection, f" on {remote.node}")
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
        return self._served(rank, process, ours)

    def _served(
        self, rank: int, process: subprocess.Popen[bytes] | RayProcess, ours: socket.socket, where: str = ""
    ) -> _Worker:
        """Return a worker whose messages and output are received."""
        worker = _Worker(rank, process, Channel(ours, ToLead, self.timeout_s), where)
        if self.place.pp > 1:
            stage = RankPlace(rank, self.place.tp, self.place.pp).stage
            worker.stage = f", stage {stage.number + 1} of {stage.count}"
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
            raise self.explain(CollectiveFailed(f"{worker.described()} does not receive: {error}")) from error

    def _until(self, there: Callable[[_Worker], bool], what: str) -> None:
        """Wait for all workers, which start at the same time as rank 0."""
        until = time.monotonic() + START_S
        with self._lock:
            while not self.failure and (late := [worker for worker in self._workers if not there(worker)]):
                if not self._lock.wait(max(0.0, until - time.monotonic())) and time.monotonic() > until:
                    self._fail(f"{late[0].described()} took more than {START_S:g} s longer than rank 0 {what}")
        self._raise_at_start()

    def _while_alive(self, run: Callable[[], T]) -> T:
        """Call a function that waits for all ranks, until it returns or a rank ends."""
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
        """Process the messages of a worker until its channel closes."""
        while True:
            try:
                message = worker.channel.receive()
            except msgspec.DecodeError as error:
                self._fail(f"{worker.described()} sent an unreadable message: {error}")
                return
            if message is None:
                break
            self._take_in(worker, message)
        if self._closing:
            return
        try:
            status = worker.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._fail(f"{worker.described()} closed its channel {worker.busy()}, but still runs")
            return
        worker.threads[1].join(LAST_WORD_S)  # log what it wrote before its end is reported
        kind = "killed" if -status in OUTSIDE_SIGNALS else "other"
        self._fail(f"{worker.described()} {_exit_text(status)} {worker.busy()}", kind)

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
                    self._adapter_answers.get(ticket, []).append(error)  # nothing waits after the group has ended
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
        if isinstance(message, Moved) and self.on_moved is not None:
            self.on_moved(MoveEnd(message.number, message.pages_done, message.error, blocks=message.blocks))
        if isinstance(message, TransferDone) and self.on_transferred is not None:
            self.on_transferred(message)
        if isinstance(message, Failed):
            log.debug("%s\n%s", worker.described(), message.trace)
            if message.kind == "collective":
                self._failed.wait(LAST_WORD_S)  # the failure of the rank that ended first is the reason
            self._fail(f"{worker.described()} failed {worker.busy()}: {message.message}", message.kind)

    def _compare(self, worker: _Worker, batch_id: BatchId, ours: bytes, theirs: bytes) -> None:
        if ours != theirs:
            self._fail(
                f"{worker.described()} drew other tokens than rank 0 in batch {batch_id}: expected digest "
                f"{ours.hex()}, found {theirs.hex()}; the ranks do not compute the same"
            )

    def _forward(self, worker: _Worker) -> None:
        """Copy the output of a worker to this process's log."""
        printed: IO[bytes] | None = worker.process.stdout
        if printed is None:  # Ray keeps the output
            return
        with printed:
            for line in printed:
                log.warning("rank %d: %s", worker.rank, line.decode("utf-8", "replace").rstrip())

    def _watch(self) -> None:
        """Detect ranks that do not respond; after a failure, report it to the host."""
        before = time.monotonic()
        while not self._failed.wait(POLL_S):
            if self._closing:
                return
            now = time.monotonic()
            passed, before = min(now - before, 5 * POLL_S), now  # the workers may have been paused as well
            with self._lock:
                late = [worker for worker in self._workers if worker.launched]
                for worker in late:
                    worker.waited_s += passed
                late = [worker for worker in late if worker.waited_s > self.timeout_s]
            if late:
                names = ", ".join(worker.described() + worker.state() for worker in late)
                self._fail(f"batch {late[0].launched[0]} did not come back in {self.timeout_s:g} s from {names}")
        if self._noticed.wait(GRACE_S):
            return
        if self.on_stuck is not None:
            self.on_stuck(self.failure)
        elif not self._noticed.wait(START_S):  # during start only the constructor waits
            shutil.rmtree(self._folder, ignore_errors=True)
            log.critical("%s; rank 0 does not return from its start, and ends", self.failure)
            _end_hard()

    def _fail(self, message: str, kind: str = "other") -> None:
        """End the group because of a failure. Calls that wait for a worker return."""
        with self._lock:
            if self.failure or self._closing:
                return
            self.failure, self._kind = message, kind
            self._lock.notify_all()
        self._failed.set()
        for worker in self._workers:
            worker.process.kill()
        if self._ends is not None:
            threading.Thread(target=self._ends.abort, name="ranks abort", daemon=True).start()


class LeadExecutor:
    """Rank 0's executor, with every call repeated on the workers. The host uses it as an ordinary executor."""

    def __init__(self, executor: Executor, group: RankGroup) -> None:
        self.executor, self.group = executor, group
        if executor.matchers is not None:
            executor.matchers = ShownMasks(executor.matchers, group)

    @property
    def in_flight(self) -> int:
        """Number of batches launched and not collected."""
        return self.executor.in_flight

    def launch(self, plan: BatchPlan, *, deferred: bool = False, contexts: ContextOf | None = None) -> None:
        """Launch on all ranks; see `Executor.launch`. Also raises RankLost."""
        row_contexts = tuple(NO_CONTEXT if contexts is None else contexts(taken) for taken in plan.rows_taken)
        self.group.launch(Order(plan, deferred, row_contexts))
        with self._explained():
            self.executor.launch(plan, deferred=deferred, contexts=in_turn(row_contexts))

    def sample(self, batch_id: BatchId, advance: Sequence[tuple[RequestId, int, Sequence[int]]]) -> None:
        """Sample on all ranks; see `Executor.sample`."""
        self.group.tell(Sample(batch_id))
        with self._explained():
            self.executor.sample(batch_id, advance)

    def ready(self) -> bool:
        """Return whether the oldest batch is ready; see `Executor.ready`.

        Raises RankLost also when nothing is in flight.
        """
        self.group.check()
        with self._explained():
            return self.executor.ready()

    def pause_s(self) -> float:
        """Return the pause until the next call of `ready`; see `Executor.pause_s`."""
        with self._explained():
            return self.executor.pause_s()

    def collect(self) -> BatchResult:
        """Collect on all ranks; see `Executor.collect`."""
        self.group.tell(Collect())
        with self._explained():
            result = self.executor.collect()
        self.group.check_sampled(result)
        return result

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except DeviceLost as error:
            raise self.group.explain(error) from error


class LeadMedia:
    """Contents of open requests on all ranks: `lockstep.host.media.encoding.MediaEncoder`.

    Every rank has the whole encoder. It encodes its share of contents that are ordered together (`media_share.py`), or
    all of them.
    """

    def __init__(self, media: DeviceMedia, group: RankGroup) -> None:
        self.media, self.group = media, group

    def hold(self, request_id: RequestId, contents: Iterable[EncoderInput]) -> None:
        """Keep the contents of a request on all ranks until `release`."""
        held = tuple(contents)
        self.group.tell(HoldContents(request_id, held))
        self.media.hold(request_id, held)

    def release(self, request_id: RequestId, spans: Iterable[PromptSpan]) -> None:
        """Forget the contents that no other request has, on all ranks."""
        listed = tuple(spans)
        self.group.tell(ReleaseContents(request_id, listed))
        self.media.release(request_id, listed)

    def encode(self, digests: Sequence[bytes], drop: Iterable[bytes]) -> list[str]:
        """Drop outputs, then encode contents together, on all ranks.

        Returns: for each of them why it cannot be encoded, or "". Ranks that divide the contents have the same result.
            Of ranks that encode all of them it is that of rank 0; the others have the same encoder.
        Raises: DeviceLost; RankLost if the ranks divide them differently, or one of them has ended.
        """
        dropped = tuple(drop)
        self.group.tell(EncodeContents(tuple(digests), dropped))
        try:
            return self.media.encode(digests, dropped)
        except DeviceLost as error:
            raise self.group.explain(error) from error


class LeadModel:
    """The weights and the memory of all ranks: `lockstep.host.weights.WeightLoader`.

    Either all ranks change, or none.
    """

    def __init__(self, live: LiveModel, group: RankGroup) -> None:
        self.live, self.group = live, group

    def load_weights(self, version: int, source: str) -> None:
        """Read the weights on all ranks, then commit them on all.

        Raises ConfigError if a rank cannot read them; RankLost.
        """
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
        """Switch on all ranks, or on none. Raises ConfigError if a rank fails; RankLost."""
        self.live.switch_memory(tags, released=released)
        self.group.change(Switch(tags, released), "giving memory back" if released else "taking memory again")
        error = self.group.changed(self.live.version)
        if error:
            self.live.switch_memory(tags, released=not released)
            self.group.change(Switch(tags, not released), "undoing that")
            if undone := self.group.changed(self.live.version):
                raise RankLost(
                    f"memory of {', '.join(tags)} could not be switched, and the change not undone: {undone}"
                )
            raise ConfigError(error)


class LeadAdapters:
    """The adapter loader of all ranks. `place` has ended once every rank has the adapter in its slot."""

    def __init__(self, cache: HostAdapterCache, group: RankGroup) -> None:
        self.cache, self.group = cache, group
        self._thread = ThreadPoolExecutor(1, "lockstep-adapters")

    def read(self, name: str, version: int, source: str) -> None:
        """Read an adapter on all ranks, or on none. Raises ConfigError with all problems; RankLost."""
        try:
            self.group.about_adapter(
                lambda ticket: ReadAdapter(ticket, name, version, source),
                lambda: self.cache.read(name, version, source),
            )
        except ConfigError:
            self.forget(name, version)
            raise

    def lack(self, name: str, version: int, why: str) -> None:
        """See `HostAdapterCache.lack`."""
        self.group.tell(LackAdapter(name, version, why))
        self.cache.lack(name, version, why)

    def place(self, name: str, version: int, slot: int, done: Callable[[BaseException | None], None]) -> None:
        """Copy an adapter into a slot on all ranks, while batches run."""

        def work() -> None:
            self.group.about_adapter(
                lambda ticket: PlaceAdapter(ticket, name, version, slot),
                lambda: self.cache.place(name, version, slot),
            )

        self._thread.submit(answering, work, done)

    def forget(self, name: str, version: int | None = None) -> None:
        """See `HostAdapterCache.forget`."""
        self.group.tell(ForgetAdapter(name, version))
        self.cache.forget(name, version)

    def close(self) -> None:
        """Cancel loads that have not started."""
        self._thread.shutdown(wait=False, cancel_futures=True)


class ShownMasks:
    """Rank 0's matchers. Their masks are sent to the workers, ahead of the pass or the draw that needs them."""

    def __init__(self, matchers: Matchers, group: RankGroup) -> None:
        self._matchers, self._group = matchers, group

    def take_row(self, taken: RowTaken) -> None:
        """Start the matcher of a row's new request."""
        self._matchers.take_row(taken)

    def advance(self, request_id: RequestId, epoch: int, tokens: Sequence[int]) -> None:
        """Move a matcher."""
        self._matchers.advance(request_id, epoch, tokens)

    def allowed(self, rows: Int32s) -> Int32s | None:
        """Return the mask of allowed next tokens, and send it to every rank."""
        mask = self._matchers.allowed(rows)
        self._group.tell(Mask(len(rows), None if mask is None else mask.astype("<i4").tobytes()))
        return mask

    def ended(self, row: int, token: int) -> bool:
        """Return whether the row's grammar allows nothing behind this token."""
        return self._matchers.ended(row, token)

    def forced(self, row: int, token: int) -> list[int]:
        """Return the tokens that the grammar forces behind this token.

        The core plans them, so every rank receives them.
        """
        return self._matchers.forced(row, token)


def _exit_text(status: int) -> str:
    """Describe how a process ended."""
    if status == LOST:
        return "was lost with its node"
    if status == -signal.SIGKILL:
        return "was ended by SIGKILL (the kernel does that when memory runs out)"
    if status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    return f"ended with status {status}"


def _state(pid: int) -> str:
    """Describe the state of a process that does not respond, if the system reports it: stopped, waiting for a disk."""
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
    state = {"T": "stopped", "t": "stopped by a debugger", "D": "waiting for a disk or a driver"}.get(letter)
    return f", which is {state}" if state else ""


def end_hard_at_exit(what: str) -> None:
    """At exit, end the process without waiting for `what`, for which torch would wait."""
    log.error("%s does not return; when the program ends, its process ends with status 1", what)
    atexit.register(_end_hard)


def _end_hard() -> None:
    """End a process with a thread that does not return, for which torch would wait."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    logging.shutdown()
    os._exit(1)
