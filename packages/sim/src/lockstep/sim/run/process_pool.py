"""Worker processes on this machine, started by `spawn`, so that they share nothing with the parent process.

Arguments and results are plain: numbers, text, bytes. The parent process ends its workers at any point of their work,
and they end by themselves if it is killed. They do not import the main module of the parent process, which `spawn` does
otherwise: a script or a notebook that calls `lockstep.plan` needs no `if __name__ == "__main__"`.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.connection import wait
from multiprocessing.context import SpawnContext, SpawnProcess
from types import ModuleType
from typing import Any


class _MainlessProcess(SpawnProcess):
    """A process that starts without the main module of its parent."""

    @staticmethod
    def _Popen(process_obj: Any) -> Any:  # noqa: N802 - the name in multiprocessing
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")  # without a file or a spec, so nothing is imported for it
        try:
            return SpawnProcess._Popen(process_obj)
        finally:
            sys.modules["__main__"] = main


class _MainlessContext(SpawnContext):
    """The context of such processes."""

    Process = _MainlessProcess


def fresh_processes(jobs: int) -> ProcessPoolExecutor:
    """Return a pool of up to `jobs` processes that ignore Ctrl-C. Call `end_processes` to end them."""
    return ProcessPoolExecutor(jobs, mp_context=_MainlessContext(), initializer=_begin)


def end_processes(pool: ProcessPoolExecutor) -> None:
    """Terminate all processes of a pool at once, also in the middle of their work."""
    workers = list((pool._processes or {}).values())  # 3.14 can terminate them by itself
    pool.shutdown(wait=False, cancel_futures=True)
    for worker in workers:
        worker.terminate()
    for worker in workers:
        worker.join()


def _begin() -> None:
    """Ignore Ctrl-C, which reaches every process of a terminal and which the parent handles; end with the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_after, args=(parent.sentinel,), name="end-with-parent", daemon=True).start()


def _end_after(sentinel: int) -> None:
    """End this process after its parent: the pipe of its tasks is open in the other workers, and would never close."""
    wait([sentinel])
    os._exit(1)
