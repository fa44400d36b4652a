"""Worker processes on this machine, started by `spawn`, so that they share nothing with the parent process.

Arguments and results are plain: numbers, text, bytes. The parent process ends its workers at any point of their work.
"""

from __future__ import annotations

import multiprocessing
import signal
from concurrent.futures import ProcessPoolExecutor


def fresh_processes(jobs: int) -> ProcessPoolExecutor:
    """Return a pool of up to `jobs` processes that ignore Ctrl-C. Call `end_processes` to end them."""
    spawned = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(jobs, mp_context=spawned, initializer=_ignore_interrupts)


def end_processes(pool: ProcessPoolExecutor) -> None:
    """Terminate all processes of a pool at once, also in the middle of their work."""
    workers = list((pool._processes or {}).values())  # 3.14 can terminate them by itself
    pool.shutdown(wait=False, cancel_futures=True)
    for worker in workers:
        worker.terminate()
    for worker in workers:
        worker.join()


def _ignore_interrupts() -> None:
    """Ignore Ctrl-C, which reaches every process of a terminal. The parent process handles it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
