"""Pools beside full attention: every token is that of one plain engine, and every pool gives only blocks that all have.

The driver compares every streamed token with a pure function of request and position, and every cell and state that a
batch reads with the prefix it must hold; invariants over all pools are checked after each event. So a history that ends
well here equals that of one plain engine.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any, cast

import numpy as np
import pytest
from msgspec import UNSET
from msgspec.structs import replace

from lockstep.core import invariants
from lockstep.core.contract.commands import BlockFetch, LaunchBatch, PrefetchFromStorage
from lockstep.core.contract.config import HybridMemory, SchedConfig
from lockstep.core.contract.errors import ConfigError, InvariantError
from lockstep.core.contract.events import (
    BatchFinished,
    BlocksFound,
    LaneReady,
    RequestAdmitted,
    RequestArrived,
    TokenRuns,
)
from lockstep.core.kv import block_tiers, tiers
from lockstep.core.kv.block_tiers import HostBlocks, in_storage
from lockstep.core.kv.operations import Kind, MovedBlocks
from lockstep.core.scheduler.engine import Engine
from tests.support.driver.actions import Action
from tests.support.driver.run import run_actions
from tests.support.hybrids import hybrid, hybrid_history
from tests.support.tagged_hybrid import HybridError
from tests.support.tagged_kv import KvError
from tests.support.tiered import moving, returning, tiered

SEEDS = 9
STORED_SEEDS = 16
FETCHED = (
    "blocks alone fetched",
    "blocks alone stored",
    "blocks fetched",
    "blocks loaded",
    "blocks stored",
)
REACHED = (
    "checkpoint left",
    "deferred (state)",
    "deferred (window)",
    "evicted (state)",
    "evicted (window)",
    "retracted (pages)",
    "started from a checkpoint",
)


def test_tokens_windows_states_and_books_hold_in_every_pool() -> None:
    marks: Counter[str] = Counter()
    for seed in range(SEEDS):
        config, actions = hybrid_history(random.Random(seed))
        try:
            marks.update(run_actions(config, actions, replay=seed % 4 == 0).marks)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}\n{config.hybrid}") from error
    missed = [mark for mark in REACHED if not marks[mark]]
    assert not missed, f"too tame: never reached {missed}, of {sorted(marks)}"


def test_the_last_token_needs_no_window_page() -> None:
    """A history in which the running batch was promised a page for it, and a prompt completed beside it was not."""
    config, actions = hybrid_history(random.Random(3007), pairs=False)
    assert config.reserve == "full"
    run_actions(config, actions)


def test_a_page_that_a_newcomer_shares_is_not_counted_as_coming_free() -> None:
    """A history in which a decode was about to free a page that a newcomer's match had just locked."""
    config, actions = hybrid_history(random.Random(5167), pairs=False)
    assert config.batching == "running_first"
    run_actions(config, actions)


def over_storage(seed: int) -> tuple[SchedConfig, list[Action]]:
    """A history of repeated prompts, with pools beside full attention, over host memory and storage."""
    rng = random.Random(f"storage {seed}")
    config, actions = returning(rng)
    config, actions = tiered(rng, config), moving(rng, actions)
    assert config.tiers is not UNSET
    return hybrid(rng, replace(config, tiers=replace(config.tiers, storage=True))), actions


def serve_over_storage(seeds: range) -> Counter[str]:
    """The marks that these histories reached."""
    marks: Counter[str] = Counter()
    for seed in seeds:
        marks.update(run_actions(*over_storage(seed), replay=seed % 4 == 0).marks)
    return marks


def test_tokens_windows_states_and_books_hold_over_storage() -> None:
    marks = serve_over_storage(range(STORED_SEEDS))
    missed = [mark for mark in FETCHED if not marks[mark]]
    assert not missed, f"{STORED_SEEDS} histories did not reach {missed}"


def _one_key_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "block_key", lambda kind, key: key)
    monkeypatch.setattr(block_tiers, "block_key", lambda kind, key: key)


def _stored_without_a_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostBlocks, "end_read", lambda self, moved, host: None)
    to_store = HostBlocks.to_store

    def planted(self: HostBlocks, host: Any) -> list[MovedBlocks]:
        found = to_store(self, host)
        for one in found:
            self.pools[one.kind].locks[host[one.index]] -= 1
        return found

    monkeypatch.setattr(HostBlocks, "to_store", planted)


def _fetched_for_the_page_before(monkeypatch: pytest.MonkeyPatch) -> None:
    fetched = HostBlocks.fetched

    def planted(self: HostBlocks, asked: list[MovedBlocks], found: tuple[BlocksFound, ...], path: Any) -> None:
        fetched(self, asked, found, np.roll(path, 1))

    monkeypatch.setattr(HostBlocks, "fetched", planted)


def _room_never_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    fetched = HostBlocks.fetched

    def planted(self: HostBlocks, asked: list[MovedBlocks], found: tuple[BlocksFound, ...], path: Any) -> None:
        if found:
            fetched(self, asked, found, path)

    monkeypatch.setattr(HostBlocks, "fetched", planted)


def _counted_on_without_a_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    to_fetch = HostBlocks.to_fetch

    def planted(self: HostBlocks, hybrid: Any, device: Any, host: Any, *rest: Any) -> Any:
        found = to_fetch(self, hybrid, device, host, *rest)
        self.end_prefetch(found[0], host)
        return found

    monkeypatch.setattr(HostBlocks, "to_fetch", planted)


@pytest.mark.parametrize(
    "plant",
    [
        _one_key_for_all,
        _stored_without_a_lock,
        _counted_on_without_a_lock,
        _fetched_for_the_page_before,
        _room_never_given_back,
    ],
)
def test_a_planted_bug_of_storage_is_found(plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises((InvariantError, KvError, HybridError)):
        serve_over_storage(range(30, 90))  # the rarest mark shows in one of sixty


def admitted(engine: Engine, prompt: tuple[int, ...], request_id: int) -> RequestAdmitted:
    """Serve a prompt, alone, for one token. Returns its admission."""
    runs = TokenRuns(tuple(number for token in prompt for number in (token, 1)))
    engine.step(RequestArrived(time_us=request_id, request_id=request_id, prompt=runs, max_new_tokens=1))
    found: list[RequestAdmitted] = []
    while engine.requests:
        step = engine.step(LaneReady(request_id))
        found += [decided for decided in step.decided if isinstance(decided, RequestAdmitted)]
        for command in step.commands:
            if isinstance(command, LaunchBatch):
                tokens = np.full(len(command.plan.sample_rows), 9, np.int32).tobytes()
                engine.step(BatchFinished(request_id, command.plan.batch_id, tokens))
    invariants.check_quiescent(engine)
    return found[0]


def test_a_match_ends_where_a_list_of_windows_and_states_ends() -> None:
    """Beside full pages that never run out, compared with a model that keeps cached blocks as plain lists."""
    rng = random.Random(11)
    settings = HybridMemory(window_tokens=5, window_pages=24, state_slots=9, checkpoint_tokens=4)
    engine = Engine(SchedConfig(page_size=2, pages=5000, overlap_depth=0, chunked_prefill_size=8, hybrid=settings))
    hybrid = engine.memory.hybrid
    assert hybrid.window is not None
    assert hybrid.states is not None
    shorter = 0
    for number in range(150):
        prompt = tuple(rng.choice((1, 2)) if at % 6 == 0 else at + 10 for at in range(rng.randint(2, 40)))
        packed = np.array(prompt, np.int32).tobytes()
        match = engine.memory.radix.match("", packed, (len(prompt) - 1) // 2)
        path = engine.memory.path_of(match).tolist()
        expected = 0
        for pages in range(1, len(path) + 1):
            seen = path[max(2 * pages - 4, 0) // 2 : pages]  # a token at 2 x pages sees the four before it
            whole = all(hybrid.window.window_of[page] >= 0 for page in seen)
            if whole and hybrid.states.checkpoint_of[path[pages - 1]] >= 0:
                expected = 2 * pages
        assert admitted(engine, prompt, number).cached_tokens == expected
        shorter += 0 < expected < 2 * len(path)
    assert shorter > 5, "no match was cut short"


def test_a_request_continues_where_lists_of_device_and_host_end() -> None:
    """Pages of a path and their window and state blocks are on the device, on the host, on both or nowhere."""
    rng = random.Random(5)
    settings = HybridMemory(window_tokens=5, window_pages=200, state_slots=200, checkpoint_tokens=2)
    config = SchedConfig(page_size=2, pages=200, chunked_prefill_size=8, hybrid=settings)
    reached, loaded = set[int](), 0
    for _ in range(300):
        hybrid, below = Engine(config).memory.hybrid, HostBlocks(config, 200)
        assert hybrid.window is not None
        assert hybrid.states is not None
        device, host = (np.array(rng.sample(range(200), rng.randint(0, 12)), np.int32) for _ in range(2))
        there: dict[str, list[bool]] = {"window": [False] * 12, "state": [False] * 12}
        for path, columns in (
            (device, {"window": hybrid.window.window_of, "state": hybrid.states.checkpoint_of}),
            (host, {kind: pool.of for kind, pool in below.pools.items()}),
        ):
            for kind, of in columns.items():
                for index, page in enumerate(path.tolist()):
                    if rng.random() < 0.6:
                        of[page], there[kind][index] = page, True
        expected = 0
        for pages in range(1, max(device.size, host.size) + 1):
            seen = range(max(2 * pages - 4, 0) // 2, pages)  # a token at 2 x pages sees the four before it
            if all(there["window"][index] for index in seen) and there["state"][pages - 1]:
                expected = pages
        found = below.usable_pages(hybrid, device, host)
        assert found == expected
        reached.add(found)
        for one in below.blocks_to_load(hybrid, device, found) if found else ():
            column = hybrid.blocks_of(one.kind, device)
            assert not any(index < device.size and column[index] >= 0 for index in one.lacking)
            assert all(below.pools[one.kind].of[host[one.lacking]] >= 0), "the host has what the device lacks"
            loaded += one.lacking.size
    assert len(reached) > 8
    assert loaded > 100


def test_storage_brings_the_blocks_of_lists_of_its_content() -> None:
    """Pages, windows and states are in storage, above it or nowhere; a prefetch brings missing ones, and no more."""
    rng = random.Random(17)
    brought = Counter[str]()
    for _ in range(600):
        known, pages, seen = rng.randint(0, 6), rng.randint(0, 8), rng.randint(1, 4)
        length, odds = known + pages, rng.choice([0.5, 0.9])
        keys = tuple(f"page {index}".encode() for index in range(known, length))
        stored = {key for key in keys if rng.random() < 0.9}
        asked = []
        for kind, of_end in (("window", seen), ("state", 1)):
            names = tuple(f"{kind} {index}".encode() for index in range(length))
            stored |= {name for name in names if rng.random() < odds}
            there = tuple(rng.random() < 0.4 for _ in names)
            room = np.arange(rng.choice([of_end, rng.randint(0, of_end)]), dtype=np.int32)
            asked.append(BlockFetch(cast("Kind", kind), names, there, of_end, room))
        expected: tuple[int, tuple[BlocksFound, ...]] = (0, ())
        reached = rng.choice([0, rng.randint(0, length)])
        for end in range(reached + 1, length + 1):
            lacking = {
                one.kind: [index for index in range(max(end - one.seen, 0), end) if not one.there[index]]
                for one in asked
            }
            here = all(key in stored for key in keys[: max(end - known, 0)])
            for one in asked:
                here &= all(one.keys[index] in stored for index in lacking[one.kind])
                here &= len(lacking[one.kind]) <= one.host.size
            if here:
                found = tuple(BlocksFound(kind, tuple(index)) for kind, index in lacking.items() if index)
                expected = max(end - known, 0), found
        order = PrefetchFromStorage(0, keys, np.arange(pages, dtype=np.int32), 0, tuple(asked), reached)
        assert in_storage(order, stored.__contains__) == expected
        brought[f"{min(expected[0], 1)} pages, {len(expected[1])} kinds"] += 1
    assert len(brought) == 6
    assert min(brought.values()) > 10, brought


def test_what_a_decode_holds_of_windows_does_not_grow_with_its_length() -> None:
    """A decode has at most `row_pages_max` window pages, once the batch of its prompt is collected."""
    settings = HybridMemory(window_tokens=20, window_pages=64)
    config = SchedConfig(page_size=4, pages=2000, overlap_depth=2, radix_cache=False, hybrid=settings)
    engine, in_flight, most = Engine(config), list[Any](), 0
    for request_id in range(3):
        runs = TokenRuns((request_id + 1, 50 + request_id))
        engine.step(RequestArrived(time_us=0, request_id=request_id, prompt=runs, max_new_tokens=300))
    window = engine.memory.hybrid.window
    assert window is not None
    for launch in range(280):
        if len(in_flight) > 2:
            plan = in_flight.pop(0)
            engine.step(BatchFinished(launch, plan.batch_id, np.full(len(plan.sample_rows), 9, np.int32).tobytes()))
        in_flight.append(engine.step(LaneReady(launch)).launched())
        if launch > 20:
            most = max(most, window.pool.total - window.pool.free_count)
    assert most == 3 * settings.row_pages_max(4, 2) == 3 * 7


@pytest.mark.parametrize("launches", [{"overlap_depth": 1}, {"overlap_depth": 0, "pp_size": 2}])
def test_windows_of_chunks_in_flight_come_back_once(launches: dict[str, int]) -> None:
    """A decode that lacks a page waits for pages in flight: of two chunks both were counted from the first on."""
    settings = HybridMemory(window_tokens=3, window_pages=20)
    engine = Engine(
        SchedConfig(page_size=2, pages=40, chunked_prefill_size=8, radix_cache=False, hybrid=settings, **launches)
    )
    window = engine.memory.hybrid.window
    assert window is not None
    engine.step(RequestArrived(time_us=0, request_id=0, prompt=TokenRuns((7, 24)), max_new_tokens=4))
    for number in range(2):
        engine.step(LaneReady(0, number if engine.config.pipelines else 0))
    available, returning = window.available, window.returning()
    for number in range(2):
        engine.step(BatchFinished(0, number, b""))
    assert (available, returning, window.available) == (12, 7, 12 + 7)


def test_a_newcomer_is_charged_what_it_opens_and_not_a_window() -> None:
    """A7: two windows of pages, one of them of a decode; a request that opens two pages starts beside it."""
    settings = HybridMemory(window_tokens=32, window_pages=18)
    engine = Engine(SchedConfig(page_size=4, pages=400, overlap_depth=0, reserve="full", hybrid=settings))
    for request_id, (prompt, new) in enumerate(((32, 60), (8, 4))):
        runs = TokenRuns((request_id + 1, prompt))
        engine.step(RequestArrived(time_us=0, request_id=request_id, prompt=runs, max_new_tokens=new))
    step = engine.step(LaneReady(0))
    assert [event.request_id for event in step.decided if isinstance(event, RequestAdmitted)] == [0, 1]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "neither `window_tokens` nor `state_slots`"),
        ({"window_tokens": 8}, "`hybrid.window_pages` 0"),
        ({"window_pages": 8, "state_slots": 4}, "sliding layers need both"),
        ({"state_slots": 1}, "at least 2, got `1`"),
        ({"window_tokens": -1, "window_pages": 4}, "`hybrid.window_tokens` must be a whole number"),
    ],
)
def test_sizes_that_cannot_be_are_named(given: dict[str, int], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        HybridMemory(**given)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"chunked_prefill_size": None}, "hint: set chunked_prefill_size"),
        ({"page_size": 4}, "`hybrid.window_pages` must be at least 5"),
        ({"page_size": 16, "pages": 64}, "`hybrid.checkpoint_tokens` must be a multiple of `page_size` 16"),
        ({"speculative_method": "ngram"}, "`hybrid.state_slots` must be at least 5 with `num_speculative_tokens` 3"),
    ],
)
def test_settings_that_do_not_go_with_it_are_named(settings: dict[str, Any], said: str) -> None:
    sizes = HybridMemory(window_tokens=8, window_pages=3 if "page_size" in settings else 100, state_slots=4)
    sizes = replace(sizes, checkpoint_tokens=8)
    if settings.get("page_size") == 16:
        sizes = replace(sizes, window_pages=4)
    with pytest.raises(ConfigError) as error:
        SchedConfig(**{"page_size": 2, "hybrid": sizes, **settings})
    assert said in str(error.value)
