"""A long prompt found in host memory or in storage, against computing it; and the bytes per second of the copies.

    python benchmarks/cache_tiers.py [--rounds 5] [--tokens 4000] [--run FOLDER] [--device cpu]

The demo model on one device. Each round asks a new prompt (computed), then others until it has left the device, with
storage also host memory, and then the prompt again (loaded). TTFT is the time from the request to its first token, in
this process; a round's two times are taken within seconds of each other. Copies are compared with a plain copy of as
many bytes in one piece, storage with plain files in the same folder. Files are in the system's page cache.

With --run the journals of both parts are kept, in FOLDER/host and FOLDER/storage, to be simulated (docs/validation.md).
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lockstep.host.cache_moves import Move
from lockstep.host.page_store import FolderStore
from lockstep.runtime import LLM, Params
from lockstep.runtime.tiers.mover import CpuCopies, CudaCopies, make_host_blocks
from lockstep.runtime.tiers.page_parts import parts_of

PAGE_SIZE = 16
GREEDY = Params(max_new_tokens=2, ignore_eos=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--run", type=Path)
    arguments = parser.parse_args()
    rounds, tokens, device = arguments.rounds, arguments.tokens, arguments.device
    pages = -(-tokens // PAGE_SIZE)
    rng = random.Random(1)

    def prompt() -> list[int]:
        return [rng.randrange(3, 2000) for _ in range(tokens)]

    with tempfile.TemporaryDirectory() as folder:
        for name, host_pages, others in (("host memory", 12 * pages, 1), ("storage", 2 * pages + 8, 3)):
            below: dict[str, Any] = {}
            if name == "storage":
                below = {"storage": folder, "storage_gb": 20.0, "prefetch_policy": "wait_complete"}
            run = None if arguments.run is None else arguments.run / name.split()[0]
            with LLM(
                device=device,
                page_size=PAGE_SIZE,
                pages=pages + 16,
                max_running_requests=2,
                cuda_graphs="off",
                host_cache_gb=host_pages * page_bytes() / 1e9,
                journal=run,
                **below,
            ) as llm:
                ttft(llm, prompt())
                found = [one_round(llm, prompt, others) for _ in range(rounds)]
                stats = llm.stats()
                if name == "host memory":
                    copies(llm, pages)
            computed, loaded = (statistics.median(times) for times in zip(*found, strict=True))
            ratio = statistics.median(first / second for first, second in found)
            print(
                f"{tokens:,} tokens, {name}: TTFT {1e3 * computed:.0f} ms computed, {1e3 * loaded:.1f} ms loaded, "
                f"{ratio:.0f} times faster (median of {rounds} rounds; "
                f"{stats.tiers.host_tokens:,} tokens from the host, {stats.tiers.storage_tokens:,} of them stored)"
            )


def page_bytes() -> int:
    """Bytes of a page of the demo model on a CPU, float32."""
    return 2 * 4 * PAGE_SIZE * 2 * 64 * 4


def one_round(llm: LLM, prompt: Callable[[], list[int]], others: int) -> tuple[float, float]:
    """Return the TTFT of a new prompt, and that of the same prompt once it has left the device."""
    asked = prompt()
    computed = ttft(llm, asked)
    for _ in range(others):
        ttft(llm, prompt())
    while llm.host.moves.open:
        time.sleep(0.001)
    return computed, ttft(llm, asked)


def ttft(llm: LLM, prompt: list[int]) -> float:
    """Return the seconds from a request to its first token; the request has ended by then."""
    before = time.perf_counter()
    stream = llm.stream(prompt, GREEDY)
    next(stream)
    took = time.perf_counter() - before
    for _ in stream:
        pass
    return took


def copies(llm: LLM, count: int) -> None:
    """Print the rates of copies between the pool and host pages, and of a folder."""
    executor: Any = llm.host.executor
    parts, gpu = parts_of(executor.attention.pool), llm.model.device.type == "cuda"
    host = make_host_blocks(count, parts.size, pinned=gpu)
    by = (
        CudaCopies({"page": parts}, {"page": host}, executor.lane)
        if gpu
        else CpuCopies({"page": parts}, {"page": host})
    )
    order = np.random.default_rng(1).permutation(count).astype(np.int32)
    move, size = Move("write", 0, order, order[::-1].copy()), count * parts.size
    source, target = torch.empty(size, dtype=torch.uint8).random_(), torch.empty(size, dtype=torch.uint8)
    plain = rate(size, lambda: target.copy_(source))
    shown = {"to the host": rate(size, lambda: by.start_write(move)())}
    shown["from the host"] = rate(size, lambda: by.load(move))
    for name, found in shown.items():
        print(f"{name}: {found:.2f} GB/s, {found / plain:.2f} of a plain copy ({plain:.2f}), {parts.size:,} B a page")
    with tempfile.TemporaryDirectory() as folder:
        path, keys = Path(folder), [number.to_bytes(32, "little") for number in range(count)]
        views = [memoryview(host[page].numpy()) for page in range(count)]
        (path / "plain").mkdir()

        def write_plain() -> None:
            for number, view in enumerate(views):
                (path / "plain" / str(number)).write_bytes(view)

        def read_plain() -> None:
            for number in range(count):
                (path / "plain" / str(number)).read_bytes()

        def write() -> None:
            store = FolderStore(path / str(random.random()), bytes_max=10**12)
            for key, view in zip(keys, views, strict=True):
                store.write(key, view)
            stores.append(store)

        stores: list[FolderStore] = []
        for name, own, other in (
            ("to storage", write, write_plain),
            (
                "from storage",
                lambda: [stores[0].read(key, view) for key, view in zip(keys, views, strict=True)],
                read_plain,
            ),
        ):
            ours, theirs = rate(size, own), rate(size, other)
            print(f"{name}: {ours:.2f} GB/s, {ours / theirs:.2f} of plain files ({theirs:.2f})")
    by.close()


def rate(size: int, run: Callable[[], object]) -> float:
    """Return GB/s of the best of five runs, after one."""
    run()
    best = float("inf")
    for _ in range(5):
        before = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - before)
    return size / best / 1e9


if __name__ == "__main__":
    main()
