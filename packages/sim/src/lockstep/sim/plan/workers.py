"""Where trials run: in this process, in other processes of this machine, or on a Ray cluster.

A crew takes trials and hands back results as they come. Which crew it is, and how many hands it has, decides how long a
plan takes and nothing else: whoever asks waits for the results it needs, not for whichever come first.
"""

from __future__ import annotations

import multiprocessing
import queue
import signal
from collections import deque
from types import TracebackType
from typing import Any, Protocol

from lockstep.core.errors import ConfigError
from lockstep.sim.plan.trial import Trial, TrialResult, decode_result, encode_trial, run_encoded, run_trial


class Crew(Protocol):
    """Runs trials. A context manager: leaving it ends what still runs."""

    def submit(self, trial: Trial) -> None:
        """Have a trial run, some time."""

    def next_result(self) -> tuple[Trial, TrialResult]:
        """Wait for any of the trials that were submitted. Raises what the trial raised."""

    def __enter__(self) -> Crew: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None: ...


class Alone:
    """This process, one trial after another."""

    def __init__(self) -> None:
        self._line: deque[Trial] = deque()

    def submit(self, trial: Trial) -> None:
        """See Crew."""
        self._line.append(trial)

    def next_result(self) -> tuple[Trial, TrialResult]:
        """See Crew. Raises KeyboardInterrupt if Ctrl-C ended the simulation."""
        trial = self._line.popleft()
        result = run_trial(trial)
        if result.interrupted:
            raise KeyboardInterrupt
        return trial, result

    def __enter__(self) -> Alone:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._line.clear()


class Processes:
    """Processes of this machine, started afresh (spawn), so that they share nothing with this one."""

    def __init__(self, jobs: int) -> None:
        self._pool = multiprocessing.get_context("spawn").Pool(jobs, initializer=_ignore_interrupts)
        self._done: queue.SimpleQueue[tuple[Trial, bytes | BaseException]] = queue.SimpleQueue()

    def submit(self, trial: Trial) -> None:
        """See Crew."""
        self._pool.apply_async(
            run_encoded,
            (encode_trial(trial),),
            callback=lambda data: self._done.put((trial, data)),
            error_callback=lambda error: self._done.put((trial, error)),
        )

    def next_result(self) -> tuple[Trial, TrialResult]:
        """See Crew."""
        trial, data = self._done.get()
        if isinstance(data, BaseException):
            raise data
        result = decode_result(data)
        if result.interrupted:
            raise KeyboardInterrupt
        return trial, result

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._pool.terminate()
        self._pool.join()


def _ignore_interrupts() -> None:
    """Ctrl-C reaches every process of a terminal; the one that started the others answers it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class OnRay:
    """A Ray cluster. Its machines need lockstep-sim of the same version, and files under the same paths."""

    def __init__(self, address: str) -> None:
        ray = _ray()
        try:
            ray.init(address=address, log_to_driver=False, configure_logging=False)
        except (ConnectionError, ValueError, RuntimeError) as error:
            hint = "`local` starts one on this machine; `auto` or HOST:PORT joins one"
            raise ConfigError(f"no Ray cluster at `{address}`: {error}\nhint: {hint}") from None
        self._ray = ray
        self._run = ray.remote(run_encoded)
        self._trials: dict[Any, Trial] = {}

    def submit(self, trial: Trial) -> None:
        """See Crew."""
        self._trials[self._run.remote(encode_trial(trial))] = trial

    def next_result(self) -> tuple[Trial, TrialResult]:
        """See Crew."""
        ready, _ = self._ray.wait(list(self._trials), num_returns=1)
        trial = self._trials.pop(ready[0])
        return trial, decode_result(self._ray.get(ready[0]))

    def __enter__(self) -> OnRay:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for reference in self._trials:
            self._ray.cancel(reference, force=True)
        self._ray.shutdown()


def _ray() -> Any:
    try:
        import ray  # type: ignore[import-not-found,unused-ignore]  # an extra
    except ImportError:
        raise ConfigError("`--ray` needs Ray, which is not installed\nhint: pip install 'lockstep-sim[ray]'") from None
    return ray


def crew_of(jobs: int, ray_address: str | None) -> Crew:
    """Who runs the trials."""
    if ray_address is not None:
        return OnRay(ray_address)
    return Alone() if jobs == 1 else Processes(jobs)
