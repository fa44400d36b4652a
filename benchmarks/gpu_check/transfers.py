"""KV from one engine to another: equal bytes by each transport, equal answers of two engines on one GPU, and the rates.

Both engines of a pair are in this process, with half of the memory each, and hand requests over by a socket in a
temporary folder. With `debug`, tags of all slots move with the pages and are compared before each pass.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_check import shapes
from benchmarks.gpu_check.decode import release
from benchmarks.gpu_check.section import Section
from lockstep.host.engine_options import TransferTransport
from lockstep.host.handover.decode import DecodeSide
from lockstep.host.handover.kv import Fetch
from lockstep.runtime import LLM, Params
from lockstep.runtime.kv_pool import KvPool
from lockstep.runtime.stages import RankPlace
from lockstep.runtime.transfer.blocks import sent_blocks
from lockstep.runtime.transfer.rank import RankPages
from tests.support.model_engines import engines

GREEDY = Params(max_new_tokens=8, ignore_eos=True)
PAGES = 256
TRANSPORTS: tuple[TransferTransport, ...] = ("shm", "tcp", "nixl")


def run(section: Section) -> None:
    """Bytes of pages by each transport, then answers of a prefill and a decode engine."""
    names = [name for name in TRANSPORTS if name != "nixl" or find_spec("nixl") is not None]
    for name in names:
        with section.trying(f"pages by {name}"):
            pages(section, name)
    folder = shapes.model_folder(section)
    tokens = 160 if section.small else 2000
    rng = random.Random(5)
    prompts = [[rng.randrange(3, 290) for _ in range(tokens)] for _ in range(6)]
    usual: dict[str, Any] = {
        "device": str(section.device),
        "random_weights": 0,
        "page_size": 16,
        "pages": 7 * tokens // 16,
        "context_tokens_max": tokens + 40,
        "max_running_requests": 4,
        "mem_fraction": 0.45,
    }
    with section.trying("the answers of one engine"):
        with LLM(folder, **usual) as llm:
            expected = [one.token_ids for one in llm.generate(prompts, GREEDY)]
        release(section)
    for name in names:
        with section.trying(f"two engines, {name}"):
            section.needs(30 if section.gpu else 0)
            with pair(folder, usual, name) as (llm, side):
                found = [one.token_ids for one in llm.generate(prompts, GREEDY)]
                wrong = sum(ours != theirs for ours, theirs in zip(found, expected, strict=True))
                section.check(f"{name}: the answers are those of one engine", not wrong, f"{wrong} differ")
                done = side.counts.done
                section.check(f"{name}: every prompt was transferred", done == len(prompts), f"{done} were")
            release(section)


def pages(section: Section, name: TransferTransport) -> None:
    """Move pages from one pool to another, compare them, and measure the rate."""
    model = (4, 2, 64) if section.small else (36, 8, 128)
    pools = [KvPool(model[0], PAGES, 16, model[1], model[2], torch.bfloat16, section.device) for _ in range(2)]
    for tensor in (*pools[0].keys, *pools[0].values):
        tensor.normal_()
    about: dict[str, Any] = {"place": RankPlace(0), "kv_heads": model[1], "model": "shape", "transport": name}
    sender, receiver = (RankPages(sent_blocks(pool), 16, **about, checksums=True) for pool in pools)
    rng = np.random.default_rng(1)
    order, into = (rng.permutation(PAGES).astype(np.int32) for _ in range(2))
    place = sender.open_staging(0)
    receiver.open_sender(0, sender.layout, (place,))
    each = sender.pages_per_slot

    def move() -> None:
        for first in range(0, PAGES, each):
            some = into[first : first + each]
            checksum = sender.stage(0, 0, order[first : first + each])
            receiver.fetch(0, Fetch(0, len(some), 0, some, (checksum,) if checksum else ()))

    move()
    at, there = torch.from_numpy(order).long(), torch.from_numpy(into).long()
    same = all(
        torch.equal(ours[at.to(ours.device)], theirs[there.to(theirs.device)])
        for ours, theirs in zip((*pools[0].keys, *pools[0].values), (*pools[1].keys, *pools[1].values), strict=True)
    )
    section.check(f"{name}: the bytes are those that were sent", same, "they differ")
    sender._checksums = False
    before = time.perf_counter()
    for _ in range(4):
        move()
    size = 4 * PAGES * sender.layout.page_bytes
    section.put(f"gbs.{name}", round(size / (time.perf_counter() - before) / 1e9, 3))
    sender.close_all()
    receiver.close_all()


@contextmanager
def pair(folder: Path, usual: dict[str, Any], transport: str) -> Iterator[tuple[LLM, DecodeSide]]:
    """Yield a decode engine whose requests are computed by a prefill engine first, and its side of the transfers."""
    shared = {**usual, "model": folder, "transfer_transport": transport, "debug": True}
    with tempfile.TemporaryDirectory() as sockets, engines(Path(sockets), {}, {}, **shared) as (_, llm):
        side = llm.handover
        assert isinstance(side, DecodeSide)
        yield llm, side
