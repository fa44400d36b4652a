"""Windows and states of hybrid models in host memory and storage: answers are those of transformers alone."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU runtime is not installed")
pytest.importorskip("transformers", reason="models with windows and states run by transformers' code")

from lockstep.core.contract.commands import BlockCopy, BlockFetch, BlockStore  # noqa: E402
from lockstep.core.contract.errors import ConfigError  # noqa: E402
from lockstep.core.contract.events import BlocksFound  # noqa: E402
from lockstep.core.journal.replay import replay  # noqa: E402
from lockstep.core.kv.block_tiers import block_key, host_block_counts  # noqa: E402
from lockstep.host.cache_moves import BlockKind, Move, MoveEnd  # noqa: E402
from lockstep.host.page_store import FolderStore  # noqa: E402
from lockstep.runtime import LLM, Params  # noqa: E402
from lockstep.runtime.canary import Canary  # noqa: E402
from lockstep.runtime.forward import WindowedPages  # noqa: E402
from lockstep.runtime.kv_pool import KvPool  # noqa: E402
from lockstep.runtime.overlap import CpuLane  # noqa: E402
from lockstep.runtime.states.pool import StatePart, StateTensors  # noqa: E402
from lockstep.runtime.tiers import below, mover, page_parts  # noqa: E402
from lockstep.runtime.tiers.identity import Identity  # noqa: E402
from lockstep.runtime.tiers.lead import LeadMover  # noqa: E402
from lockstep.runtime.tiers.mover import HostMover  # noqa: E402
from lockstep.runtime.tiers.page_parts import PageParts, all_parts_of  # noqa: E402
from tests.support.architectures import (  # noqa: E402
    CHUNK,
    TRACK_INTERVAL,
    greedy_answers,
    mixed_prompts,
    save_architecture,
)

CPU = torch.device("cpu")
KINDS: tuple[BlockKind, ...] = ("page", "window", "state")

# -------------------------------------------------------------------------------------------------------------- models

SMALL: dict[str, Any] = {
    "page_size": 4, "pages": 44, "chunked_prefill_size": CHUNK, "max_running_requests": 3, "retract_every": 5,
    "debug": True, "load_tokens_min": 4, "host_cache_gb": 0.02,
}  # fmt: skip
"""A device with room for two of the prompts, beside a host with room for all of them."""
WINDOWS: dict[str, Any] = {"swa_full_tokens_ratio": 0.5}
STATES: dict[str, Any] = {"mamba_track_interval": TRACK_INTERVAL}
NGRAM: dict[str, Any] = {"speculative_method": "ngram", "num_speculative_tokens": 2}
STORED: dict[str, Any] = {"storage_gb": 0.2, "prefetch_policy": "wait_complete", "prefetch_tokens_min": 4}
OPTIONS = {"Gemma 3": WINDOWS, "LFM2": STATES, "Qwen3.5": STATES, "Qwen3-Next": STATES, "Bamba": STATES}

Reference = Callable[[str], tuple[Path, list[list[int]]]]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Each model once, with the answers of transformers."""
    made: dict[str, tuple[Path, list[list[int]]]] = {}

    def of(name: str) -> tuple[Path, list[list[int]]]:
        if name not in made:
            folder = tmp_path_factory.mktemp("model")
            made[name] = folder, greedy_answers(save_architecture(folder, name))
        return made[name]

    return of


def answered(folder: Path, *, rounds: int = 2, cancelled: Sequence[int] = (), **options: Any) -> tuple[list[Any], Any]:
    """Answer the prompts of all tests, some rounds of them. Returns the answers of the last round, and the totals."""
    prompts, counts = zip(*mixed_prompts(), strict=True)
    with LLM(folder, **{**SMALL, **options}) as llm:
        for _ in range(rounds):
            pending = [
                llm._send(llm._request(prompt, params, "generate"), params)
                for prompt, params in zip(prompts, (Params(max_new_tokens=count) for count in counts), strict=True)
            ]
            for number in cancelled:
                llm.host.cancel(pending[number].answer.request_id)
            answers = [llm.wait(one).token_ids for one in pending]
        stats = llm.stats()
        assert llm.host.engine.counts.retractions
        assert llm._live.executor.canary.slots_verified > 1000
    return answers, stats


CASES: list[tuple[str, dict[str, Any]]] = [
    ("Gemma 3", {"host_write_policy": "write_through", "overlap_depth": 0}),
    ("Gemma 3", {"host_write_policy": "write_back", "overlap_depth": 2}),
    ("Gemma 3", {"host_write_policy": "write_through_selective", "overlap_depth": 1, **NGRAM}),
    ("LFM2", {"host_write_policy": "write_through", "overlap_depth": 2, "same_step_sharing": True}),
    ("LFM2", {"host_write_policy": "write_back", "overlap_depth": 1, "decode_steps_per_launch": 3}),
    ("Qwen3.5", {"host_write_policy": "write_back", "overlap_depth": 0}),
    (
        "Qwen3-Next",
        {"host_write_policy": "write_through", "overlap_depth": 1, "max_mamba_cache_size": 40, **NGRAM},
    ),
    ("Bamba", {"host_write_policy": "write_through", "overlap_depth": 1}),
]


@pytest.mark.parametrize(("name", "options"), CASES, ids=[f"{name} {number}" for number, (name, _) in enumerate(CASES)])
def test_answers_are_those_of_transformers(
    name: str, options: dict[str, Any], reference: Reference, tmp_path: Path
) -> None:
    """With shared prefixes that come from the host, retractions, cancels, and the tags of all that is read."""
    folder, right = reference(name)
    leaving = random.Random(name).sample(range(len(right)), 3)
    answers, stats = answered(folder, **OPTIONS[name], **options, cancelled=leaving, journal=tmp_path / "run")
    for number, (answer, expected) in enumerate(zip(answers, right, strict=True)):
        assert answer == (expected[: len(answer)] if number in leaving else expected)
    kind = "window" if name == "Gemma 3" else "state"
    assert stats.tiers.host_tokens > 100
    assert stats.tiers.blocks["load", kind] > 5
    assert stats.tiers.blocks["write", kind] > 5
    replay(tmp_path / "run")


@pytest.mark.parametrize("name", ["Gemma 3", "LFM2"])
def test_a_new_engine_finds_windows_and_states_in_a_folder(name: str, reference: Reference, tmp_path: Path) -> None:
    """Then with files that are gone or damaged, and then with those of another interval of checkpoints."""
    folder, right = reference(name)
    kind = "window" if name == "Gemma 3" else "state"
    stored: dict[str, Any] = {**OPTIONS[name], **STORED, "storage": str(tmp_path), "overlap_depth": 1}
    answers, stats = answered(folder, **stored, rounds=1)
    assert answers == right
    assert stats.store.pages_written > 60
    assert stats.tiers.blocks["store", kind] > 10
    answers, stats = answered(folder, **stored, rounds=1)
    assert answers == right
    assert stats.tiers.storage_tokens > 30
    assert stats.tiers.blocks["prefetch", kind] > 0
    assert stats.store.pages_damaged == 0
    rng, damaged = random.Random(2), 0
    for path in sorted(tmp_path.rglob("*.kv")):
        chance = rng.random()
        if chance < 0.15:
            path.unlink()
        elif chance < 0.4:
            content = bytearray(path.read_bytes())
            content[rng.randrange(64, len(content))] ^= 1 << rng.randrange(8)
            path.write_bytes(content[: rng.choice((len(content), len(content) // 2))])
            damaged += 1
    answers, stats = answered(folder, **stored, rounds=1)
    assert answers == right
    assert 0 < stats.store.pages_damaged <= damaged
    assert stats.store.pages_read > 0


@pytest.mark.parametrize(("name", "kind", "starts"), [("Gemma 3", "window", 1), ("Qwen3.5", "state", 2)])
def test_two_ranks_move_their_parts(name: str, kind: str, starts: int, reference: Reference, tmp_path: Path) -> None:
    """Those of states also from storage, once the engine has started again."""
    folder, right = reference(name)
    for number in range(starts):
        stored: dict[str, Any] = {**STORED, "storage": str(tmp_path), "tp": 2, "device": "cpu"}
        answers, stats = answered(folder, **OPTIONS[name], **stored, rounds=1)
        assert answers == right
        assert (stats.tiers.blocks["prefetch", kind] > 0) == bool(number)
    assert stats.tiers.blocks["load", kind] > 0


# ------------------------------------------------------------------------------------------------------ planted faults


def older_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """A write copies the slot of the checkpoint that was written before."""
    right, before = Move.copied, dict[str, Any]()

    def wrong(self: Move) -> list[Any]:
        found = []
        for kind, device, host in right(self):
            if kind == "state" and self.kind == "write":
                before["now"], device = device, before.get("now", device)[:1].repeat(len(device))
            found.append((kind, device, host))
        return found

    monkeypatch.setattr(Move, "copied", wrong)


def other_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of one layer are loaded into another."""
    right = page_parts.PageParts.__init__

    def wrong(self: PageParts, tensors: Sequence[Any]) -> None:
        right(self, tensors)
        if len(self.parts) > 6:
            first, second = self.parts[0], self.parts[2]
            self.loaded = {first.name: second.tensor, second.name: first.tensor}  # type: ignore[attr-defined]

    def load(self: Any, move: Move) -> None:
        parts = self._parts.get("window")
        swapped = getattr(parts, "loaded", {})
        kept = None if parts is None else list(parts.parts)
        if kept is not None:
            parts.parts = [
                page_parts.Part(one.name, swapped.get(one.name, one.tensor), one.offset, one.size) for one in kept
            ]
        self._copy(move, to_host=False)
        if kept is not None:
            parts.parts = kept

    monkeypatch.setattr(page_parts.PageParts, "__init__", wrong)
    monkeypatch.setattr(mover.CpuCopies, "load", load)


def late_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows and states that are given up are copied behind the batches that overwrite them."""
    right, waiting = HostMover.begin, list[Callable[[], None]]()

    def begin(self: HostMover, move: Move, done: Any) -> None:
        if move.kind == "write" and move.given_up and move.copies:
            waiting.append(lambda: right(self, move, done))
        else:
            while waiting:
                waiting.pop(0)()
            right(self, move, done)

    launch = below.Executor.launch

    def launching(self: Any, plan: Any, **more: Any) -> None:
        launch(self, plan, **more)
        while waiting:
            waiting.pop(0)()

    monkeypatch.setattr(HostMover, "begin", begin)
    monkeypatch.setattr(below.Executor, "launch", launching)


def lost_tags(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tags stay where they are, while windows and states move."""
    right = all_parts_of

    def without(pool: Any, drafter: Any, canary: Any) -> Any:
        return right(pool, drafter, canary) | {
            kind: one for kind, one in right(pool, drafter, None).items() if kind != "page"
        }

    monkeypatch.setattr(below, "all_parts_of", without)


FAULTS: list[tuple[str, str, Callable[[pytest.MonkeyPatch], None], str]] = [
    ("LFM2", "write_through", older_states, "begins with a state which is not that of its tokens"),
    ("Gemma 3", "write_through", other_layers, "tokens"),
    ("LFM2", "write_back", late_copies, "begins with a state which is not that of its tokens"),
    ("Gemma 3", "write_back", late_copies, "which is not its KV"),
    ("LFM2", "write_through", lost_tags, "begins with a state which is not that of its tokens"),
    ("Gemma 3", "write_through", lost_tags, "which is not its KV"),
]


@pytest.mark.parametrize(
    ("name", "policy", "plant", "found"), FAULTS, ids=[f"{one[0]}, {one[2].__name__}" for one in FAULTS]
)
def test_a_planted_fault_is_found(
    name: str,
    policy: str,
    plant: Callable[[pytest.MonkeyPatch], None],
    found: str,
    reference: Reference,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, right = reference(name)
    plant(monkeypatch)
    options: dict[str, Any] = {**OPTIONS[name], "host_write_policy": policy, "overlap_depth": 0}
    if found == "tokens":
        assert answered(folder, **options)[0] != right
        return
    with pytest.raises(Exception, match=found):
        answered(folder, **options)


# --------------------------------------------------------------------------------------------------------------- sizes


def test_host_memory_is_divided_as_that_of_the_device(reference: Reference, caplog: pytest.LogCaptureFixture) -> None:
    folder, _ = reference("LFM2")
    with caplog.at_level("INFO"), LLM(folder, **{**SMALL, "host_cache_gb": 0.001}, **STATES) as llm:
        tiers, hybrid, made = llm.config.tiers, llm.config.hybrid, llm._mover
        counts = host_block_counts(hybrid, llm.config.pages, tiers.host_pages)
        pools = llm.host.engine.memory.tiers.blocks.pools
    assert {kind: pool.pool.total for kind, pool in pools.items()} == counts
    assert counts["state"] == -(-tiers.host_pages * hybrid.state_slots // 44)
    assert {kind: len(one) for kind, one in made.host.items()} == {"page": tiers.host_pages, **counts}
    taken = sum(one.numel() for one in made.host.values())
    assert 0.95e6 < taken <= 1e6 + made.parts["state"].size
    lines = caplog.text.partition("host memory below the KV cache")[2].splitlines()[1:3]
    assert [line.split()[:2] for line in lines] == [
        [f"{tiers.host_pages:,}", "pages"],
        [f"{counts['state']:,}", "states"],
    ]


def test_what_cannot_be_is_refused(reference: Reference) -> None:
    folder, _ = reference("LFM2")
    with pytest.raises(ConfigError, match="stores of packages keep pages of one size, and this model has windows or"):
        LLM(folder, **SMALL, **STATES, storage="redis://there", storage_gb=1)
    with pytest.raises(ConfigError, match=r"`host_cache_gb` 1e-06 does not hold one page of 1,\d+ bytes"):
        LLM(folder, **{**SMALL, "host_cache_gb": 1e-6}, **STATES)


# ----------------------------------------------------------------------------------------------------------- the parts


def numbers(*given: int) -> Any:
    return np.array(given, np.int32)


def some_pools(seed: int) -> dict[BlockKind, PageParts]:
    """20 pages of a layer, 9 windows of two layers, 7 slots of states of two types, all of them with random bytes."""
    pool = KvPool(3, WindowedPages(20, 9, frozenset({0, 2})), 4, 1, 2, torch.float32, CPU)
    states = [StatePart(0, "conv", 0, (3,), torch.float32), StatePart(1, "recurrent", 0, (2, 5), torch.bfloat16)]
    pool.states = StateTensors(states, 7, CPU)
    canary = Canary(2, 20, 4, 32, CPU, 9, 9, state_slots=7)
    found = all_parts_of(pool, None, canary)
    rng = np.random.default_rng(seed)
    for parts in found.values():
        for part in parts.parts:
            part.on_device().view(torch.uint8).copy_(
                torch.from_numpy(rng.integers(0, 250, part.on_device().view(torch.uint8).shape).astype(np.uint8))
            )
    return found


def made_mover(parts: dict[BlockKind, PageParts], store: FolderStore | None = None) -> HostMover:
    return HostMover(parts, {"page": 12, "window": 8, "state": 6}, CpuLane(lambda: 0), store, Identity(b"w"))


def ended(made: Any, move: Move) -> MoveEnd:
    """Return the end of a move."""
    found, over = list[MoveEnd](), threading.Event()

    def done(end: MoveEnd) -> None:
        found.append(end)
        over.set()

    made.begin(move, done)
    assert over.wait(30)
    return found[0]


def bytes_of(parts: PageParts, block: int) -> list[bytes]:
    return [part.on_device()[block].numpy().tobytes() for part in parts.parts]


def test_parts_of_each_kind() -> None:
    found = some_pools(0)
    assert {kind: [part.name for part in one.parts] for kind, one in found.items()} == {
        "page": ["model keys 1", "model values 1", "tags"],
        "window": ["model keys 0", "model values 0", "model keys 2", "model values 2", "tags"],
        "state": ["state 0 conv 0", "state 1 recurrent 0", "tags"],
    }
    page, window, state = (found[kind].size for kind in KINDS)
    assert (page, window, state) == (2 * 32 + 32, 4 * 32 + 32, 12 + 20 + 8)


@pytest.mark.parametrize("given_up", [False, True])
@pytest.mark.parametrize("alone", [False, True])
def test_windows_and_states_come_back_with_their_pages(given_up: bool, alone: bool) -> None:
    parts = some_pools(1)
    made = made_mover(parts)
    device = {"page": numbers() if alone else numbers(3, 4, 9), "window": numbers(8, 0), "state": numbers(6, 2, 3)}
    host = {"page": numbers() if alone else numbers(11, 2, 3), "window": numbers(7, 3), "state": numbers(0, 4, 5)}
    before = {kind: [bytes_of(parts[kind], block) for block in device[kind]] for kind in KINDS}
    copies = tuple(BlockCopy(kind, device[kind], host[kind]) for kind in ("window", "state"))  # type: ignore[arg-type]
    end = ended(made, Move("write", 0, device["page"], host["page"], given_up=given_up, copies=copies))
    assert end == MoveEnd(0, len(device["page"]))
    other = {"page": numbers() if alone else numbers(0, 19, 7), "window": numbers(4, 5), "state": numbers(1, 0, 6)}
    copies = tuple(BlockCopy(kind, other[kind], host[kind]) for kind in ("window", "state"))  # type: ignore[arg-type]
    ended(made, Move("load", 1, other["page"], host["page"], copies=copies))
    assert {kind: [bytes_of(parts[kind], block) for block in other[kind]] for kind in KINDS} == before
    made.close()


def test_given_up_windows_and_states_are_read_before_the_order_returns() -> None:
    parts = some_pools(2)
    made = made_mover(parts)
    before = bytes_of(parts["state"], 5)
    over = threading.Event()
    move = Move("write", 0, given_up=True, copies=(BlockCopy("state", numbers(5), numbers(1)),))
    made.begin(move, lambda end: over.set())
    for part in parts["state"].parts:
        part.on_device().zero_()
    assert over.wait(30)
    ended(made, Move("load", 1, copies=(BlockCopy("state", numbers(5), numbers(1)),)))
    assert bytes_of(parts["state"], 5) == before
    made.close()


PATH = [bytes([number]) * 32 for number in range(4)]
WINDOW_KEYS, STATE_KEYS = (tuple(block_key(kind, key) for key in PATH) for kind in ("window", "state"))


def stored_path(folder: Path) -> tuple[HostMover, FolderStore]:
    """A folder with four pages of a path, all their windows, and the states behind the second and the last page."""
    store = FolderStore(folder, bytes_max=10**8)
    made = made_mover(some_pools(3), store)
    rng = np.random.default_rng(4)
    for one in made.host.values():
        one.copy_(torch.from_numpy(rng.integers(0, 250, one.shape).astype(np.uint8)))
    stores = (
        BlockStore("window", WINDOW_KEYS, numbers(0, 1, 2, 3)),
        BlockStore("state", (STATE_KEYS[1], STATE_KEYS[3]), numbers(1, 3)),
    )
    end = ended(made, Move("store", 0, host_pages=numbers(0, 1, 2, 3), keys=tuple(PATH), stores=stores))
    assert end == MoveEnd(0, 4)
    assert store.counts.pages_written == 10
    return made, store


def fetch(number: int, *, there: bool = False) -> Move:
    """A prefetch of the path; a continuing request reads windows of three pages."""
    windows = BlockFetch("window", WINDOW_KEYS, (there,) * 4, 3, numbers(7, 6, 5))
    states = BlockFetch("state", STATE_KEYS, (False,) * 4, 1, numbers(5))
    return Move("prefetch", number, host_pages=numbers(8, 9, 10, 11), keys=tuple(PATH), fetches=(windows, states))


def damage(made: HostMover, store: FolderStore, key: bytes) -> None:
    from hashlib import sha256

    path = store._path(sha256(made.identity.digest() + key).digest())
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damaged", "pages", "windows", "states"),
    [
        ([], 4, (1, 2, 3), (3,)),
        ([STATE_KEYS[3]], 2, (0, 1), (1,)),
        ([PATH[3]], 2, (0, 1), (1,)),
        ([WINDOW_KEYS[2]], 2, (0, 1), (1,)),
        ([WINDOW_KEYS[0]], 4, (1, 2, 3), (3,)),  # not read behind the last page
        ([WINDOW_KEYS[1]], 0, (), ()),
        ([STATE_KEYS[3], STATE_KEYS[1]], 0, (), ()),
    ],
)
def test_a_damaged_file_is_a_miss_of_the_ends_that_need_it(
    damaged: list[bytes], pages: int, windows: tuple[int, ...], states: tuple[int, ...], tmp_path: Path
) -> None:
    made, store = stored_path(tmp_path)
    for key in damaged:
        damage(made, store, key)
    end = ended(made, fetch(1))
    found = tuple(
        BlocksFound(kind, some)  # type: ignore[arg-type]
        for kind, some in (("window", windows), ("state", states))
        if some
    )
    assert end == MoveEnd(1, pages, blocks=found)
    assert store.counts.pages_damaged == len([key for key in damaged if key != WINDOW_KEYS[0]])
    for index in range(pages):
        assert torch.equal(made.host["page"][8 + index], made.host["page"][index])
    for place, index in zip((7, 6, 5), windows, strict=False):
        assert torch.equal(made.host["window"][place], made.host["window"][index])
    for index in states:
        assert torch.equal(made.host["state"][5], made.host["state"][index])
    made.close()


def test_blocks_that_the_engine_has_are_not_read(tmp_path: Path) -> None:
    made, store = stored_path(tmp_path)
    assert ended(made, fetch(1, there=True)) == MoveEnd(1, 4, blocks=(BlocksFound("state", (3,)),))
    assert store.counts.pages_read == 5
    made.close()


def test_a_cancelled_prefetch_has_brought_pages_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, store = stored_path(tmp_path)
    read, there = store.read, list[bytes]()

    def reading(key: bytes, into: memoryview) -> bool:
        there.append(key)
        if len(there) == 3:
            made.begin(Move("cancel", 1), lambda end: None)
        return read(key, into)

    monkeypatch.setattr(store, "read", reading)
    assert ended(made, fetch(1)) == MoveEnd(1, 3)
    made.close()


def test_a_store_whose_windows_cannot_be_written_has_stored_its_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, store = stored_path(tmp_path / "whole")
    write, there = store.write, list[bytes]()

    def failing(key: bytes, page: memoryview) -> None:
        there.append(key)
        if len(there) == 3:
            raise OSError("no room")
        write(key, page)

    monkeypatch.setattr(store, "write", failing)
    stores = (BlockStore("window", WINDOW_KEYS[:2], numbers(0, 1)),)
    end = ended(made, Move("store", 1, host_pages=numbers(0, 1), keys=tuple(PATH[:2]), stores=stores))
    assert end == MoveEnd(1, 2, "no room")
    made.close()


@pytest.mark.parametrize(
    ("first", "second", "both"),
    [
        (
            MoveEnd(1, 4, blocks=(BlocksFound("state", (3,)),)),
            MoveEnd(1, 4, blocks=(BlocksFound("state", (3,)),)),
            MoveEnd(1, 4, blocks=(BlocksFound("state", (3,)),)),
        ),
        (MoveEnd(1, 4, blocks=(BlocksFound("state", (3,)),)), MoveEnd(1, 2), MoveEnd(1, 2)),
        (MoveEnd(1, 2), MoveEnd(1, 4, blocks=(BlocksFound("state", (3,)),)), MoveEnd(1, 2)),
        (
            MoveEnd(1, 4, blocks=(BlocksFound("state", (3,)),)),
            MoveEnd(1, 4, "lost", blocks=(BlocksFound("state", (3,)),)),
            MoveEnd(1, 4, "lost"),
        ),
    ],
)
def test_ranks_bring_windows_and_states_that_all_of_them_found(first: MoveEnd, second: MoveEnd, both: MoveEnd) -> None:
    class Group:
        ranks = 2
        on_moved: Any = None

        def tell(self, message: Any) -> None:
            self.on_moved(first)

    class Own:
        def begin(self, move: Move, done: Any) -> None:
            done(second)

    lead = LeadMover(Own(), Group())  # type: ignore[arg-type]
    assert ended(lead, fetch(1)) == both
