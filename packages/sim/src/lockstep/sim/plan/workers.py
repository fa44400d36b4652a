"""Pools of workers that run trials: in this process, in other processes of this machine, or on a Ray cluster.

A pool accepts trials and returns their results in any order. Its kind and size affect only the duration of a plan,
because a search waits for the results that it needs, not for the first ones to arrive.
"""

from __future__ import annotations

import queue
import socket
import subprocess
import sys
from collections import deque
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from types import TracebackType
from typing import Any, Protocol

from lockstep.core.contract.errors import ConfigError
from lockstep.sim.plan.trial import Trial, TrialResult, decode_result, encode_trial, run_encoded, run_trial
from lockstep.sim.run.process_pool import end_processes, fresh_processes

RAY_TIMEOUT_S = 5.0  # until the head of a cluster accepts a connection, and until its greeting
RAY_JOIN_TIMEOUT_S = 30.0  # until Ray is loaded and has joined; 14 s were measured on a busy machine
RAY_HINT = (
    "start it there with `ray start --head --port PORT`; `auto` joins the one of this machine, `local` starts one"
)


class WorkerPool(Protocol):
    """Runs trials. A context manager that ends running trials on exit."""

    size: int  # trials that run in parallel
    running: dict[str, Trial]  # key -> trial that was submitted and has no result yet

    def submit(self, trial: Trial) -> None:
        """Schedule a trial."""

    def next_result(self) -> tuple[Trial, TrialResult]:
        """Wait for the result of any submitted trial. Raises the error of the trial."""

    def __enter__(self) -> WorkerPool: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None: ...


class Alone:
    """Runs one trial after another in this process."""

    size = 1

    def __init__(self) -> None:
        self.running: dict[str, Trial] = {}
        self._queue: deque[Trial] = deque()

    def submit(self, trial: Trial) -> None:
        """See WorkerPool."""
        self.running[trial.key] = trial
        self._queue.append(trial)

    def next_result(self) -> tuple[Trial, TrialResult]:
        """See WorkerPool. Raises KeyboardInterrupt if Ctrl-C ended the simulation."""
        trial = self._queue.popleft()
        result = run_trial(trial)
        if result.interrupted:
            raise KeyboardInterrupt
        del self.running[trial.key]
        return trial, result

    def __enter__(self) -> Alone:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._queue.clear()


class Processes:
    """Runs trials in processes of this machine, started by spawn, so that they share nothing with this one."""

    def __init__(self, jobs: int) -> None:
        self.size = jobs
        self.running: dict[str, Trial] = {}
        self._pool = fresh_processes(jobs)
        self._done: queue.SimpleQueue[tuple[Trial, Future[bytes]]] = queue.SimpleQueue()

    def submit(self, trial: Trial) -> None:
        """See WorkerPool."""
        self.running[trial.key] = trial
        self._pool.submit(run_encoded, encode_trial(trial)).add_done_callback(
            lambda future: self._done.put((trial, future))
        )

    def next_result(self) -> tuple[Trial, TrialResult]:
        """See WorkerPool. Raises OSError if a process died, for example killed by the system for lack of memory."""
        trial, future = self._done.get()
        try:
            result = decode_result(future.result())
        except BrokenProcessPool as error:
            raise OSError(
                f"a process that simulated {trial.base.gpu} died; was it killed for lack of memory?\n"
                f"hint: --jobs {max(self.size - 1, 1)}, or --requests with fewer; with --out nothing done is lost"
            ) from error
        if result.interrupted:
            raise KeyboardInterrupt
        del self.running[trial.key]
        return trial, result

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        end_processes(self._pool)


class OnRay:
    """Runs trials on a Ray cluster. Its nodes need lockstep-sim of the same version, and files under the same paths."""

    def __init__(self, address: str) -> None:
        check_reachable(address)
        ray = _ray()
        if address != "local":
            check_joins(address)
        try:
            ray.init(address=address, log_to_driver=False, configure_logging=False)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise ConfigError(f"no Ray cluster at `{address}`: {error}\nhint: {RAY_HINT}") from None
        self.size = max(int(ray.cluster_resources().get("CPU", 1)), 1)
        self.running: dict[str, Trial] = {}
        self._ray = ray
        self._run = ray.remote(run_encoded)
        self._trials: dict[Any, Trial] = {}

    def submit(self, trial: Trial) -> None:
        """See WorkerPool."""
        self.running[trial.key] = trial
        self._trials[self._run.remote(encode_trial(trial))] = trial

    def next_result(self) -> tuple[Trial, TrialResult]:
        """See WorkerPool."""
        ready, _ = self._ray.wait(list(self._trials), num_returns=1)
        trial = self._trials.pop(ready[0])
        del self.running[trial.key]
        return trial, decode_result(self._ray.get(ready[0]))

    def __enter__(self) -> OnRay:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for reference in self._trials:
            self._ray.cancel(reference, force=True)
        self._ray.shutdown()


def check_reachable(address: str, timeout_s: float = RAY_TIMEOUT_S) -> None:
    """Check that a Ray head responds at HOST:PORT. Ray itself would retry for minutes, and then end the process.

    `local` and `auto` name no host and are not checked. Raises ConfigError.
    """
    if address in ("local", "auto"):
        return
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not (colon and host and port.isascii() and port.isdigit() and 0 < int(port) < 65_536):
        raise ConfigError(f"`ray` must be local, auto or HOST:PORT, got `{address}`\nhint: {RAY_HINT}")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s) as connection:
            connection.sendall(HTTP2_GREETING)
            greeting = connection.recv(FRAME_HEADER_BYTES)
    except OSError as error:
        why = f"no answer within {timeout_s:g} s" if isinstance(error, TimeoutError) else error.strerror or str(error)
        raise ConfigError(f"`ray`: no Ray cluster at `{address}`: {why}\nhint: {RAY_HINT}") from None
    if greeting[FRAME_TYPE:FRAME_HEADER_BYTES] != SETTINGS_FRAME:
        raise ConfigError(f"`ray`: no Ray cluster at `{address}`: another program answers there\nhint: {RAY_HINT}")


# Ray uses gRPC over HTTP/2: both sides begin with a frame of settings (RFC 9113, section 3.4).
FRAME_HEADER_BYTES = 9  # bytes: three of length, one of type, one of flags, four of the stream
FRAME_TYPE = 3
SETTINGS_FRAME = b"\x04\x00\x00\x00\x00\x00"  # type, no flags, stream 0
HTTP2_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00" + SETTINGS_FRAME

JOIN = "import ray, sys; ray.init(address=sys.argv[1], log_to_driver=False, configure_logging=False)"


def check_joins(address: str, timeout_s: float = RAY_JOIN_TIMEOUT_S) -> None:
    """Check that a process can join. Ray waits minutes for an invalid head, and then ends the process.

    Therefore a separate process tries it. Raises ConfigError with the last line of its output.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-c", JOIN, address], capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired as error:
        output = (error.stderr or b"").decode(errors="replace").strip().splitlines()
        why = ": ".join([f"no process could join within {timeout_s:g} s", *output[-1:]])
    else:
        if done.returncode == 0:
            return
        why = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    raise ConfigError(f"`ray`: no Ray cluster at `{address}`: {why}\nhint: {RAY_HINT}")


def _ray() -> Any:
    try:
        import ray  # type: ignore[import-not-found,unused-ignore]  # an extra
    except ImportError:
        raise ConfigError("`--ray` needs Ray, which is not installed\nhint: pip install 'lockstep-sim[ray]'") from None
    return ray


def workers_of(jobs: int, ray_address: str | None) -> WorkerPool:
    """Return the pool that runs the trials: this process, `jobs` processes, or a Ray cluster."""
    if ray_address is not None:
        return OnRay(ray_address)
    return Alone() if jobs == 1 else Processes(jobs)
