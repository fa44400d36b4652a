"""Work in other processes of this machine, started afresh (spawn), so that they share nothing with this one.

Arguments and results are plain: numbers, text, bytes. The process that starts others ends them, whatever they are
doing.
"""

from __future__ import annotations

import multiprocessing
import signal
from concurrent.futures import ProcessPoolExecutor


def fresh_processes(jobs: int) -> ProcessPoolExecutor:
    """Up to `jobs` processes that leave Ctrl-C to this one. End them by `end_processes`."""
    spawned = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(jobs, mp_context=spawned, initializer=_ignore_interrupts)


def end_processes(pool: ProcessPoolExecutor) -> None:
    """End all of them now, with what they are doing."""
    workers = list((pool._processes or {}).values())  # 3.14 can terminate them by itself
    pool.shutdown(wait=False, cancel_futures=True)
    for worker in workers:
        worker.terminate()
    for worker in workers:
        worker.join()


def _ignore_interrupts() -> None:
    """Ctrl-C reaches every process of a terminal; the one that started the others answers it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
