"""Host memory and storage below the KV cache: equal answers with pages loaded, and what the copies move.

A pool of the device that holds one prompt at a time, host memory that holds several, and a storage. With `debug`, tags
of all slots move with the pages and are compared before each pass.
"""

from __future__ import annotations

import random
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu_check import shapes
from benchmarks.gpu_check.decode import release
from benchmarks.gpu_check.section import Section
from lockstep.runtime import LLM, Params
from lockstep.runtime.tiers.mover import CpuCopies, CudaCopies, make_host_blocks
from lockstep.runtime.tiers.page_parts import parts_of

GREEDY = Params(max_new_tokens=8, ignore_eos=True)


def run(section: Section) -> None:
    """Answers under each write policy, then from storage; times of a prompt computed, loaded and fetched."""
    folder = shapes.model_folder(section)
    tokens = 160 if section.small else 4000
    rng = random.Random(5)
    prompts = [[rng.randrange(3, 290) for _ in range(tokens)] for _ in range(3)]
    usual: dict[str, Any] = {
        "device": str(section.device),
        "random_weights": 0,
        "page_size": 16,
        "pages": tokens // 16 + 40 // 16 + tokens // 32,
        "context_tokens_max": tokens + 40,
        "max_running_requests": 2,
    }
    host_gb = 0.02 if section.small else 4.0
    with section.trying("the answers without host memory"):
        with LLM(folder, **usual) as llm:
            expected = ask(llm, prompts)
        release(section)
    for policy in ("write_through", "write_back"):
        with section.trying(policy):
            section.needs(15 if section.gpu else 0)
            with LLM(folder, **usual, debug=True, host_cache_gb=host_gb, host_write_policy=policy) as llm:
                same(section, policy, ask(llm, prompts), expected)
                loaded = llm.stats().tiers.host_tokens
            section.check(f"{policy}: pages were loaded", loaded > tokens, f"{loaded} tokens")
            release(section)
    with section.trying("storage"), tempfile.TemporaryDirectory() as kv:
        section.needs(20 if section.gpu else 0)
        below = {"host_cache_gb": host_gb, "storage": kv, "storage_gb": 4 * host_gb, "prefetch_tokens_min": 16}
        for number in range(2):
            with LLM(folder, **usual, **below, prefetch_policy="wait_complete") as llm:
                same(section, f"storage, engine {number}", ask(llm, prompts), expected)
                stats = llm.stats()
                section.put(f"storage.engine {number}", stats.tiers.storage_tokens)
            release(section)
        section.check("pages came from storage", stats.tiers.storage_tokens > tokens, f"{stats.tiers.storage_tokens}")
    with section.trying("rates"):
        section.needs(15 if section.gpu else 0)
        rates(section, folder, usual)
    release(section)


def ask(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    """Answer the prompts in turn, twice, so that each has left the device before it is asked again."""
    return [llm.generate([prompt], GREEDY)[0].token_ids for _ in range(2) for prompt in prompts]


def same(section: Section, name: str, found: list[list[int]], expected: list[list[int]]) -> None:
    wrong = sum(ours != theirs for ours, theirs in zip(found, expected, strict=True))
    section.check(f"{name}: the answers are those without host memory", not wrong, f"{wrong} of {len(found)} differ")


def rates(section: Section, folder: Path, usual: dict[str, Any]) -> None:
    """Bytes per second of copies to and from the host, by mover."""
    import numpy as np

    from lockstep.host.cache_moves import Move

    with LLM(folder, **usual) as llm:
        executor: Any = llm.host.executor
        parts, count = parts_of(executor.attention.pool), usual["pages"] * 3 // 4
        host = make_host_blocks(count, parts.size, pinned=section.gpu)
        copies = (
            CudaCopies({"page": parts}, {"page": host}, executor.lane)
            if section.gpu
            else CpuCopies({"page": parts}, {"page": host})
        )
        pages = np.arange(count, dtype=np.int32)
        move = Move("write", 0, pages, pages)
        for name, copy in (("to host", lambda: copies.start_write(move)()), ("from host", lambda: copies.load(move))):
            copy()
            before = time.perf_counter()
            for _ in range(4):
                copy()
            section.put(f"gbs.{name}", round(4 * count * parts.size / (time.perf_counter() - before) / 1e9, 3))
        copies.close()
