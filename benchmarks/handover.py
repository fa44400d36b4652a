"""KV between engines: the bytes per second of each transport, against a plain copy and a loopback connection.

    python benchmarks/handover.py [--tokens 4000] [--rounds 5] [--transports shm,tcp]

The pages of a prompt of the demo model (float32, 64 KiB a page) go from one pool into another in one process, as they
do between two: gathered into slots, read by the other side, and scattered into its pages, slot after slot. Pages lie
apart in both pools, the slowest case. The rates that they are compared with move as many bytes in one piece: a plain
copy (memcpy), and a socket on the loopback interface, from one thread to another. All rates are the best of the
rounds, taken in turn.
"""

from __future__ import annotations

import argparse
import socket
import threading
import time
from collections.abc import Callable

import numpy as np
import torch

from lockstep.host.engine_options import TransferTransport
from lockstep.host.handover.kv import Fetch
from lockstep.runtime.kv_pool import KvPool
from lockstep.runtime.stages import RankPlace
from lockstep.runtime.transfer.blocks import sent_blocks
from lockstep.runtime.transfer.rank import RankPages

PAGE_SIZE, LAYERS, KV_HEADS, HEAD_DIM = 16, 4, 2, 64  # of the demo model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--transports", default="shm,tcp", help="nixl, too, where it is installed")
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    count = -(-arguments.tokens // PAGE_SIZE)
    pairs: dict[str, tuple[RankPages, RankPages]] = {}
    for name in arguments.transports.split(","):
        for checked in (False, True):
            pairs[f"{name}{' with checksums' * checked}"] = (
                pages_of(name, count, checked),
                pages_of(name, count, checked),
            )
    size = count * next(iter(pairs.values()))[0].layout.page_bytes
    runs = {"memcpy": memcpy(size), "loopback": loopback(size)}
    runs |= {name: transfer(*pair, count) for name, pair in pairs.items()}
    best = dict.fromkeys(runs, float("inf"))
    for _ in range(arguments.rounds + 1):
        for name, run in runs.items():
            before = time.perf_counter()
            run()
            best[name] = min(best[name], time.perf_counter() - before)
    print(f"{count} pages, {size / 1e6:.1f} MB")
    plain, loop = size / best["memcpy"] / 1e9, size / best["loopback"] / 1e9
    for name, seconds in best.items():
        rate = size / seconds / 1e9
        print(f"{name:22} {rate:6.2f} GB/s  {rate / plain:5.2f} of memcpy  {rate / loop:5.2f} of loopback")


def pages_of(transport: TransferTransport, count: int, checked: bool) -> RankPages:
    """Return the pages of a pool of the demo model."""
    pool = KvPool(LAYERS, 2 * count, PAGE_SIZE, KV_HEADS, HEAD_DIM, torch.float32, torch.device("cpu"))
    about = {"place": RankPlace(0), "kv_heads": KV_HEADS}
    made = RankPages(sent_blocks(pool), PAGE_SIZE, **about, model="demo", transport=transport, checksums=checked)
    if checked:
        return made
    for tensor in (*pool.keys, *pool.values):
        tensor.normal_()
    return made


def transfer(sender: RankPages, receiver: RankPages, count: int) -> Callable[[], None]:
    """Return a function that moves `count` pages, slot after slot: a slot is filled while the one before is read."""
    rng = np.random.default_rng(1)
    order, into = (rng.permutation(2 * count)[:count].astype(np.int32) for _ in range(2))
    place = sender.open_staging(0)
    receiver.open_sender(0, sender.layout, (place,))
    each = sender.pages_per_slot

    def run() -> None:
        filled: list[tuple[int, int]] = []
        ready, free = threading.Semaphore(0), threading.Semaphore(place.slots)

        def fill() -> None:
            for number, first in enumerate(range(0, count, each)):
                free.acquire()
                filled.append((first, sender.stage(0, number % place.slots, order[first : first + each])))
                ready.release()

        thread = threading.Thread(target=fill)
        thread.start()
        for number, first in enumerate(range(0, count, each)):
            ready.acquire()
            some, checksum = into[first : first + each], filled[number][1]
            sums = (checksum,) if checksum else ()
            receiver.fetch(0, Fetch(number % place.slots, len(some), 0, some, sums))
            free.release()
        thread.join()

    return run


def memcpy(size: int) -> Callable[[], None]:
    """Return a function that copies bytes in one piece."""
    source, target = torch.empty(size, dtype=torch.uint8).random_(), torch.empty(size, dtype=torch.uint8)

    def run() -> None:
        target.copy_(source)

    return run


def loopback(size: int) -> Callable[[], None]:
    """Return a function that sends bytes over a socket of the loopback interface."""
    data, into = bytes(size), memoryview(bytearray(size))
    listener = socket.create_server(("127.0.0.1", 0))
    out = socket.create_connection(listener.getsockname())
    taken, _ = listener.accept()

    def run() -> None:
        thread = threading.Thread(target=out.sendall, args=(data,))
        thread.start()
        at = 0
        while at < size:
            at += taken.recv_into(into[at:])
        thread.join()

    return run


if __name__ == "__main__":
    main()
