"""KV in host memory and storage: what is loaded is what was written, so every answer is that of an engine without.

The exact tests run the sum model, whose arithmetic has no rounding: a page of other tokens, or one that is read too
early, gives other tokens, and the canary reads the tag of every slot beside.
"""

from __future__ import annotations

import errno
import os
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU runtime is not installed")

from lockstep.core.contract.config import CacheTiers  # noqa: E402
from lockstep.core.contract.errors import ConfigError, ContractError  # noqa: E402
from lockstep.core.contract.events import OpenSession, RequestAdmitted, RequestRetracted  # noqa: E402
from lockstep.core.journal.records import JournalHeader  # noqa: E402
from lockstep.core.journal.replay import replay  # noqa: E402
from lockstep.core.journal.writer import JournalWriter  # noqa: E402
from lockstep.host.cache_moves import Move, MoveEnd  # noqa: E402
from lockstep.host.page_store import FolderStore  # noqa: E402
from lockstep.host.startup import Keeper  # noqa: E402
from lockstep.runtime import LLM, Params  # noqa: E402
from lockstep.runtime.llm import demo_folder  # noqa: E402
from lockstep.runtime.tiers.identity import Identity, weights_digest  # noqa: E402
from lockstep.runtime.tiers.mover import CpuCopies, HostMover, Named, make_host_blocks, runs  # noqa: E402
from lockstep.runtime.tiers.page_parts import PageParts, parts_of  # noqa: E402
from tests.support.adapters import write_adapter  # noqa: E402
from tests.support.small_runtime import Answer, Foreseeing, SmallRuntime, alone, small_config  # noqa: E402

HOST_PAGES = 400
ROOM = 10**8  # bytes
POLICIES = ["write_through", "write_through_selective", "write_back"]


class LateMover(HostMover):
    """Copies as late as a busy machine does: each move of a thread waits a random time before it begins."""

    delays = random.Random(3)

    def _copied(self, move: Move, copy: Any) -> MoveEnd:
        time.sleep(self.delays.random() * 0.003)
        return super()._copied(move, copy)

    def _fetch(self, move: Move, named: Named) -> MoveEnd:
        time.sleep(self.delays.random() * 0.003)
        return super()._fetch(move, named)


class Tiered(SmallRuntime):
    """The small runtime with host memory below it, and storage if `folder` is given."""

    def __init__(
        self,
        *,
        tiers: dict[str, Any] | None = None,
        folder: Path | None = None,
        bytes_max: int = ROOM,
        weights: bytes = b"",
        **settings: Any,
    ) -> None:
        storage: dict[str, Any] = {"storage": True, "prefetch_tokens_min": 4} if folder is not None else {}
        below = CacheTiers(**{"host_pages": HOST_PAGES, "load_tokens_min": 4, **storage, **(tiers or {})})
        super().__init__(tiers=below, **settings)
        executor = self.executor
        pages = parts_of(executor.attention.pool, executor.drafter, executor.canary)
        store = None if folder is None else FolderStore(folder, bytes_max=bytes_max)
        self.mover = LateMover({"page": pages}, {"page": below.host_pages}, executor.lane, store, Identity(weights))
        self.host.moves.mover = self.mover

    @property
    def counts(self) -> Any:
        return self.host.moves.counts

    @property
    def store(self) -> Any:
        return self.mover.store_counts

    def ends(self) -> None:
        self.mover.close()


def shared_prompts(seed: int, count: int) -> list[tuple[list[int], int]]:
    """Prompts that begin alike, in groups, of which a small pool forgets some before they are asked again."""
    rng = random.Random(seed)
    beginnings = [[rng.randrange(97) for _ in range(rng.randrange(8, 40))] for _ in range(12)]
    return [
        (rng.choice(beginnings) + [rng.randrange(97) for _ in range(rng.randrange(1, 20))], rng.randrange(1, 16))
        for _ in range(count)
    ]


def serve(runtime: SmallRuntime, requests: Sequence[tuple[list[int], int]], *, cancels: bool = True) -> None:
    """Send the requests a few at a time; every answer is that of a request alone. Some leave early."""
    at = 0
    while at < len(requests):
        some, answers = requests[at : at + 5], list[Answer]()
        for number, (prompt, count) in enumerate(some):
            answer = runtime.submit(prompt, count)
            answers.append(answer)
            if cancels and number == 2 and at % 10 == 0:
                leave_after(runtime, answer, 3)
        if cancels and at % 15 == 5:
            runtime.host.cancel(answers[1].request_id)  # before it runs, perhaps while it waits for a load
        runtime.run()
        for answer, (prompt, count) in zip(answers, some, strict=True):
            assert answer.tokens == alone(prompt, count)[: len(answer.tokens)]
            assert answer.reason in ("length", "cancelled")
            assert answer.reason == "cancelled" or len(answer.tokens) == count
        at += len(some)


def leave_after(runtime: SmallRuntime, answer: Answer, tokens: int) -> None:
    def take(offset: int, new: list[int], logprobs: Any) -> None:
        Answer.take(answer, offset, new, logprobs)
        if len(answer.tokens) >= tokens:
            runtime.host.cancel(answer.request_id)

    answer.on_tokens = take


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "depth 2, retractions": {"overlap_depth": 2, "retract_every": 3},
    "mixed, shared in the same step": {"batching": "mixed", "same_step_sharing": True, "overlap_depth": 1},
    "short of pages": {"pages": 24, "reserve": "on_demand", "overlap_depth": 1},
    "several steps": {"decode_steps_per_launch": 3},
    "drafts": {"speculative_method": "ngram", "num_speculative_tokens": 3, "overlap_depth": 1},
}


CASES = [
    (name, policy, ("launch", "collection")[(at + number) % 2])
    for at, name in enumerate(SETTINGS)
    for number, policy in enumerate(POLICIES)
]
"""Each setting under each policy; both ways of a lane for each setting and each policy."""


@pytest.mark.parametrize(("name", "policy", "run_at"), CASES)
def test_200_requests_are_answered_as_without_host_memory(name: str, policy: str, run_at: Any, tmp_path: Path) -> None:
    more = dict(SETTINGS[name])
    tiers = {"write_policy": policy}
    settings: dict[str, Any] = {"pages": 40, "retract_every": 7, **more}
    config = small_config(tiers=CacheTiers(host_pages=HOST_PAGES, load_tokens_min=4, **tiers), **settings)
    kind: dict[str, Any] = {"drafter": Foreseeing} if name == "drafts" else {}
    with JournalWriter.create(tmp_path, JournalHeader(config=config)) as journal:
        runtime = Tiered(tiers=tiers, journal=journal, run_at=run_at, **kind, **settings)
        serve(runtime, shared_prompts(len(name), 200))
    assert replay(tmp_path).digest == runtime.engine.digest
    assert runtime.counts.pages["load"] > 20
    assert sum(event.host_tokens for event in runtime.decided(RequestAdmitted)) == runtime.counts.host_tokens > 80
    assert runtime.decided(RequestRetracted)
    assert runtime.executor.canary is not None
    assert runtime.executor.canary.slots_verified > 5000
    runtime.ends()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_new_engine_finds_its_prefixes_in_a_folder(policy: str, tmp_path: Path) -> None:
    """The first engine writes, the second has an empty device and an empty host."""
    requests = shared_prompts(4, 60)
    settings: dict[str, Any] = {"pages": 40, "retract_every": 7, "overlap_depth": 1}
    tiers = {"write_policy": policy, "prefetch_policy": "wait_complete"}
    first = Tiered(tiers=tiers, folder=tmp_path, **settings)
    serve(first, requests)
    first.ends()
    assert first.store.pages_written > 30
    second = Tiered(tiers=tiers, folder=tmp_path, **settings)
    serve(second, requests)
    second.ends()
    assert second.store.pages_read > 20
    assert second.counts.storage_tokens > 100
    assert second.store.pages_written < first.store.pages_written
    assert first.store.pages_damaged == second.store.pages_damaged == 0


def test_two_engines_use_one_folder_at_the_same_time(tmp_path: Path) -> None:
    requests = shared_prompts(5, 80)
    engines = [Tiered(folder=tmp_path, pages=40, tiers={"host_pages": 60}, bytes_max=40_000) for _ in range(2)]
    for at in range(0, len(requests), 10):
        for runtime in engines:
            serve(runtime, requests[at : at + 10])
    for runtime in engines:
        runtime.ends()
    assert engines[1].counts.storage_tokens > 0, "it has what the other one wrote"
    assert sum(runtime.store.pages_removed for runtime in engines) > 0
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.kv")) <= 40_000 * (1 + 2 / 16)
    assert sum(runtime.store.pages_damaged for runtime in engines) == 0


def test_turns_of_sessions_come_back_from_host_memory(tmp_path: Path) -> None:
    """KV of sessions may be evicted between their turns, and is loaded again with the whole conversation."""
    config: dict[str, Any] = {"pages": 40, "session_kv": "evictable", "retract_every": 7}
    runtime = Tiered(**config)
    names = [f"s{number}" for number in range(6)]
    opened = [runtime.host.ask(OpenSession(name, 90)) for name in names]
    runtime.run()
    assert all(one.result(10.0).ok for one in opened)
    rng, said = random.Random(8), {name: list[int]() for name in names}
    for _ in range(5):
        turns = {name: [rng.randrange(97) for _ in range(rng.randrange(3, 9))] for name in names}
        answers = {name: runtime.submit(own, 4, session=name) for name, own in turns.items()}
        runtime.run()
        for name, own in turns.items():
            said[name] += own
            assert answers[name].tokens == alone(said[name], 4), name
            said[name] += answers[name].tokens
    assert runtime.counts.pages["load"] > 10
    assert runtime.executor.canary is not None
    assert runtime.executor.canary.slots_verified > 500
    runtime.ends()


def test_damaged_and_missing_files_are_computed_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    requests = shared_prompts(6, 60)
    first = Tiered(folder=tmp_path, pages=40)
    serve(first, requests)
    first.ends()
    rng, damaged = random.Random(1), 0
    for path in sorted(tmp_path.rglob("*.kv")):
        chance = rng.random()
        if chance < 0.2:
            path.unlink()
        elif chance < 0.5:
            content = bytearray(path.read_bytes())
            content[rng.randrange(64, len(content))] ^= 1 << rng.randrange(8)
            path.write_bytes(content[: rng.choice((len(content), len(content) // 2))])
            damaged += 1
    second = Tiered(folder=tmp_path, pages=40, tiers={"prefetch_policy": "wait_complete"})
    serve(second, requests)
    second.ends()
    assert 0 < second.store.pages_damaged <= damaged
    assert caplog.text.count("is damaged and is removed") == second.store.pages_damaged
    assert second.store.pages_read > 0


def test_a_full_disk_stops_no_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "writev", full)
    runtime = Tiered(folder=tmp_path, pages=40)
    serve(runtime, shared_prompts(7, 40))
    runtime.ends()
    assert runtime.store.writes_failed > 0
    assert runtime.counts.moves["store", "failed"] > 0
    assert runtime.counts.host_tokens > 0


def test_a_store_that_raises_what_it_should_not_stops_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> bool:
        raise ZeroDivisionError("a mistake of the store")

    monkeypatch.setattr(FolderStore, "read", broken)
    monkeypatch.setattr(FolderStore, "write", broken)
    runtime = Tiered(folder=tmp_path, pages=40)
    serve(runtime, shared_prompts(8, 20))
    runtime.ends()
    assert runtime.counts.moves["store", "failed"] > 0
    assert runtime.counts.moves["prefetch", "failed"] > 0


def test_a_copy_that_fails_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a device that fails leaves in its memory is unknown."""
    runtime = Tiered(pages=40)

    def lost(move: Move, copy: Any) -> MoveEnd:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(runtime.mover, "_copied", lost)
    answer = runtime.submit(list(range(20)), 30)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        runtime.run()
    assert "illegal memory access" in answer.failure
    runtime.ends()


def test_a_cancelled_prefetch_keeps_what_has_come(tmp_path: Path) -> None:
    first = Tiered(folder=tmp_path, pages=40)
    prompt = list(range(90))
    serve(first, [(prompt, 2)], cancels=False)
    first.ends()
    second = Tiered(folder=tmp_path, pages=40, tiers={"prefetch_policy": "wait_complete"})
    read, there = second.mover._store.read, []  # type: ignore[union-attr]

    def slow(key: bytes, into: memoryview) -> bool:
        there.append(key)
        if len(there) == 5:
            second.host.cancel(leaving.request_id)
        time.sleep(0.02)
        return read(key, into)

    second.mover._store.read = slow  # type: ignore[union-attr,method-assign]
    leaving = second.submit(prompt, 2)
    second.run()
    assert leaving.reason == "cancelled"
    assert 5 <= len(there) < 22
    assert second.counts.moves["prefetch", "cancelled"] == 1
    assert second.counts.pages["prefetch"] == len(there)
    second.mover._store.read = read  # type: ignore[union-attr,method-assign]
    serve(second, [(prompt, 2)], cancels=False)
    second.ends()


def test_other_weights_have_other_pages(tmp_path: Path) -> None:
    prompt = (list(range(40)), 2)
    engines = [Tiered(folder=tmp_path, pages=40, weights=weights) for weights in (b"a", b"b", b"a")]
    for runtime in engines:
        serve(runtime, [prompt], cancels=False)
        runtime.ends()
    assert [runtime.store.pages_read for runtime in engines] == [0, 0, 9]


def test_runs_of_pages_are_those_that_lie_side_by_side_at_both_ends() -> None:
    pages, hosts = np.array([4, 5, 6, 2, 9, 10], np.int32), np.array([1, 2, 5, 6, 7, 8], np.int32)
    assert list(runs(pages)) == [(0, 3), (3, 1), (4, 2)]
    assert list(runs(pages, hosts)) == [(0, 2), (2, 1), (3, 1), (4, 2)]
    assert list(runs(pages[:0])) == []


@pytest.mark.parametrize("count", [1, 7, 40])
def test_pages_come_back_wherever_they_lie(count: int) -> None:
    """Side by side, apart, and many that lie apart; parts of sizes that no wide word divides."""
    rng = np.random.default_rng(count)
    shapes = {"wide": (50, 4, 2, 8), "odd": (50, 3), "flag": (50, 1)}
    tensors = [(name, torch.from_numpy(rng.integers(0, 250, shape).astype(np.uint8))) for name, shape in shapes.items()]
    parts = PageParts(tensors)
    assert [part.words.itemsize for part in parts.parts] == [8, 1, 1]
    host = make_host_blocks(60, parts.size, pinned=False)
    copies = CpuCopies({"page": parts}, {"page": host})
    for order in (np.arange(5, 5 + count), rng.permutation(50)[:count]):
        device, there = order.astype(np.int32), rng.permutation(60)[:count].astype(np.int32)
        before = [tensor.clone() for _, tensor in tensors]
        copies.start_write(Move("write", 0, device, there))
        assert (
            host[int(there[0])].numpy().tobytes()[: parts.parts[0].size] == before[0][int(device[0])].numpy().tobytes()
        )
        for _, tensor in tensors:
            tensor[device] = 255
        copies.load(Move("load", 0, device, there))
        assert all(torch.equal(tensor, kept) for (_, tensor), kept in zip(tensors, before, strict=True))


def test_a_host_without_a_mover_ends_with_the_name_of_the_command() -> None:
    runtime = SmallRuntime(tiers=CacheTiers(host_pages=20))
    runtime.submit(list(range(20)), 4)
    with pytest.raises(ContractError, match="ordered CopyToHost, which this host does not support"):
        runtime.run()


# ------------------------------------------------------------------------------------------------------- a real model

SMALL: dict[str, Any] = {"device": "cpu", "grammar_backend": "none", "page_size": 16, "pages": 70}
SMALL |= {"max_running_requests": 4, "retract_every": 9, "debug": True}
GREEDY = Params(max_new_tokens=8, ignore_eos=True)


def real_prompts(count: int = 30) -> list[list[int]]:
    rng = random.Random(11)
    beginnings = [[rng.randrange(3, 2000) for _ in range(rng.randrange(120, 260))] for _ in range(8)]
    return [rng.choice(beginnings) + [rng.randrange(3, 2000) for _ in range(5)] for _ in range(count)]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    with LLM(**SMALL) as llm:
        return [answer.token_ids for answer in llm.generate(real_prompts(), GREEDY)]


def answers_of(llm: LLM, prompts: Sequence[list[int]] | None = None) -> list[list[int]]:
    return [answer.token_ids for answer in llm.generate(list(prompts or real_prompts()), GREEDY)]


def test_a_model_answers_with_host_memory_and_storage_as_without(expected: list[list[int]], tmp_path: Path) -> None:
    below: dict[str, Any] = {"host_cache_gb": 0.05, "storage": str(tmp_path / "kv"), "storage_gb": 0.2}
    with LLM(**SMALL, **below, journal=tmp_path / "run") as llm:
        assert answers_of(llm) == expected
        stats = llm.stats()
    assert stats.tiers.host_tokens > 500
    assert stats.store is not None
    assert stats.store.pages_written > 60
    replay(tmp_path / "run")
    with LLM(**SMALL, **below, prefetch_policy="wait_complete") as llm:
        assert answers_of(llm) == expected
        stats = llm.stats()
    assert stats.tiers.storage_tokens > 500
    assert stats.store is not None
    assert stats.store.pages_missed + stats.store.pages_damaged <= len(expected)


@pytest.mark.parametrize("split", ["tp", "pp"])
def test_two_ranks_move_their_parts(split: str, expected: list[list[int]], tmp_path: Path) -> None:
    below: dict[str, Any] = {"host_cache_gb": 0.05, "storage": str(tmp_path), "storage_gb": 0.2}
    for number in range(2):
        with LLM(**SMALL, **below, **{split: 2}, prefetch_policy="wait_complete") as llm:
            assert answers_of(llm) == expected
            stats = llm.stats()
        assert stats.tiers.host_tokens > 500
        assert (stats.tiers.storage_tokens > 500) == bool(number)
    files = [path.stat().st_size for path in tmp_path.rglob("*.kv")]
    assert stats.store is not None
    assert len(files) >= 2 * 60, "each rank has files of its own"


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_drafters_have_their_kv_back_with_the_page(method: str, expected: list[list[int]], tmp_path: Path) -> None:
    drafts: dict[str, Any] = {"speculative_method": method, "num_speculative_tokens": 3}
    if method == "draft_model":
        drafts["draft_model"] = str(demo_folder())
    right = []
    for below in ({}, {"host_cache_gb": 0.05, "storage": str(tmp_path), "storage_gb": 0.2}):
        with LLM(**SMALL, **drafts, **below) as llm:
            assert answers_of(llm) == expected
            counts = llm.stats().drafts
            right.append(counts.acceptance_ratio)
    if method == "draft_model":  # a drafter without its KV would guess wrong
        assert right[1] == pytest.approx(right[0], abs=0.02)
        assert right[1] > 0.95


def test_adapters_of_one_name_and_other_weights_share_no_storage(tmp_path: Path) -> None:
    adapters = [write_adapter(tmp_path / str(seed), seed) for seed in (1, 2)]
    prompts, params = real_prompts(6), Params(max_new_tokens=6, ignore_eos=True, adapter="tone")
    below: dict[str, Any] = {"host_cache_gb": 0.05, "storage": str(tmp_path / "kv"), "storage_gb": 0.2}
    below |= {"prefetch_policy": "wait_complete", "prefetch_tokens_min": 16}
    alone_said, said, fetched = [], [], []
    for adapter in adapters:
        with LLM(**SMALL, lora={"tone": adapter}) as llm:
            alone_said.append([one.token_ids for one in llm.generate(prompts, params)])
    for adapter in (*adapters, adapters[0]):
        with LLM(**SMALL, lora={"tone": adapter}, **below) as llm:
            said.append([one.token_ids for one in llm.generate(prompts, params)])
            fetched.append(llm.stats().tiers.storage_tokens)
    assert alone_said[0] != alone_said[1]
    assert said == [*alone_said, alone_said[0]]
    assert fetched[:2] == [0, 0]
    assert fetched[2] > 0


def test_new_weights_use_no_page_of_the_old_ones(tmp_path: Path) -> None:
    """Also after memory was released, and also in the next engine, which starts with those weights."""
    prompts = real_prompts(6)
    below: dict[str, Any] = {"host_cache_gb": 0.05, "storage": str(tmp_path / "kv"), "storage_gb": 0.2}
    below["prefetch_tokens_min"] = 16
    said = {}
    for seed in (1, 2):
        with LLM(**SMALL, random_weights=seed) as llm:
            said[seed] = answers_of(llm, prompts)
    folders = {seed: saved_model(tmp_path / f"model {seed}", seed) for seed in (1, 2)}
    with LLM(folders[1], **SMALL, **below) as llm:
        assert answers_of(llm, prompts) == said[1]
        llm.release_memory()
        llm.resume_memory()
        assert answers_of(llm, prompts) == said[1]
        llm.update_weights(folders[2])
        assert answers_of(llm, prompts) == said[2]
        assert answers_of(llm, prompts) == said[2]
    for seed in (2, 1):
        with LLM(folders[seed], **SMALL, **below, prefetch_policy="wait_complete") as llm:
            assert answers_of(llm, prompts) == said[seed]
    assert weights_digest(folders[1]) != weights_digest(folders[2])


def saved_model(folder: Path, seed: int) -> Path:
    """Write the demo model with random weights of a seed, as a folder."""
    from safetensors.torch import save_file

    from lockstep.runtime.models import build_model

    folder.mkdir()
    config = (demo_folder() / "config.json").read_text()
    (folder / "config.json").write_text(config)
    model = build_model(demo_folder(), torch.float32, torch.device("cpu"), random_weights_seed=seed)
    save_file({want.name: want.into.contiguous().clone() for want in model.tensors()}, folder / "model.safetensors")
    return folder


def test_an_engine_that_restarts_finds_its_prefixes_in_storage(expected: list[list[int]], tmp_path: Path) -> None:
    """Its host memory is empty, and its settings are those of the journal."""
    below: dict[str, Any] = {"host_cache_gb": 0.05, "storage": str(tmp_path / "kv"), "storage_gb": 0.2}
    below |= {"prefetch_policy": "wait_complete", "prefetch_tokens_min": 16}
    for number in range(2):
        keeper = Keeper(tmp_path / "run", death="killed" if number else None)
        with LLM(**SMALL, **below, keeper=keeper, start=False) as llm:
            llm.start()
            assert answers_of(llm) == expected
            stats = llm.stats()
            assert llm.host.engine.generation == number
    assert stats.tiers.storage_tokens > 500
    replay(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"begun with other settings: `tiers`"):
        LLM(**SMALL, **below | {"host_cache_gb": 0.06}, keeper=Keeper(tmp_path / "run"), start=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tiers": 1}, r"`tiers` .* follow from options of the engine\nhint: --host-cache-gb 20"),
        (
            {"storage": "there", "storage_gb": 1},
            r"`storage` requires memory below the device, but `host_cache_gb` is 0",
        ),
        ({"host_cache_gb": 1, "storage_gb": 1}, r"`storage_gb` requires `storage`\nhint: add --storage DIR"),
        ({"host_cache_gb": 1, "storage": "there"}, r"`storage` is there, but `storage_gb` is 0"),
        ({"host_cache_gb": 1, "prefetch_policy": "never"}, r"`prefetch_policy` must be .*, got `never`"),
        ({"host_cache_gb": 1, "host_write_policy": "never"}, r"`host_write_policy` must be .*, got `never`"),
        ({"host_cache_gb": -1}, r"`host_cache_gb` must be at least 0 gigabytes and below 1e9, got `-1`"),
        ({"host_cache_gb": 1e-5}, r"`host_cache_gb` 1e-05 does not hold one page of 65,536 bytes"),
        ({"host_cache_gb": 1e6}, r"`host_cache_gb` needs [\d,]+ MiB on this rank, but [\d,]+ MiB of memory are free"),
        ({"host_cache_gb": 1, "load_tokens_min": -2}, r"`load_tokens_min` must be a whole number of at least 0"),
    ],
)
def test_options_that_cannot_be_are_one_error(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(device="cpu", pages=70, **options)
