"""Pages of windows and states between prefill and decode engines: every answer is that of transformers' own code.

The canary compares the tags of all pages, window pages and states that a pass reads, also of those that were sent. So
a state of another chunk, a window of another page or a slot of another request ends the engine before a wrong token.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU runtime is not installed")
pytest.importorskip("transformers", reason="models with windows and states run by transformers' code")

from lockstep.core.contract.commands import HybridTransfer, StartTransfer  # noqa: E402
from lockstep.core.contract.errors import ConfigError  # noqa: E402
from lockstep.core.journal.replay import replay  # noqa: E402
from lockstep.host.handover.decode import DecodeSide  # noqa: E402
from lockstep.host.handover.kv import Fetch, blocks_of, given_blocks  # noqa: E402
from lockstep.host.handover.wire import BlockLayout, PageLayout, StagingPlace  # noqa: E402
from lockstep.runtime import LLM, Params  # noqa: E402
from lockstep.runtime.canary import Canary  # noqa: E402
from lockstep.runtime.forward import WindowedPages  # noqa: E402
from lockstep.runtime.kv_pool import KvPool  # noqa: E402
from lockstep.runtime.stages import RankPlace  # noqa: E402
from lockstep.runtime.states.pool import StatePart, StateTensors  # noqa: E402
from lockstep.runtime.tiers.page_parts import PageParts  # noqa: E402
from lockstep.runtime.transfer import blocks as blocks_module  # noqa: E402
from lockstep.runtime.transfer.blocks import SentBlocks, sent_blocks  # noqa: E402
from lockstep.runtime.transfer.lead import EngineTransport, SlotSender  # noqa: E402
from lockstep.runtime.transfer.rank import RankPages  # noqa: E402
from lockstep.runtime.transfer.slices import heads_of, sources_of  # noqa: E402
from tests.support.architectures import (  # noqa: E402
    STIRRED,
    TRACK_INTERVAL,
    WINDOW_SHARE,
    greedy_answers,
    mixed_prompts,
    save_architecture,
)
from tests.support.model_engines import engines  # noqa: E402

CPU = torch.device("cpu")
HEADS, PAGES, WINDOWS, SLOTS, PAGE_SIZE = 4, 12, 7, 5, 4
STATES = [
    StatePart(0, "conv", 0, (6, 3), torch.bfloat16),
    StatePart(0, "recurrent", 0, (2, 4, 4), torch.float32),
    StatePart(2, "recurrent", 0, (2, 4, 4), torch.float32),
]


# ------------------------------------------------------------------------------------------------------ bytes of ranks


@dataclass
class Rank:
    """The memory of one rank of a model of three layers, of which the second has a window."""

    pages: RankPages
    pool: KvPool
    canary: Canary

    def tensors(self) -> dict[str, list[Any]]:
        """All tensors by kind of blocks; the last one has the tags."""
        pool, states = self.pool, self.pool.states
        assert states is not None
        return {
            "page": [pool.keys[0], pool.values[0], pool.keys[2], pool.values[2], self.canary.tags.view(-1, PAGE_SIZE)],
            "window": [pool.keys[1], pool.values[1], self.canary.window_tags.view(-1, PAGE_SIZE)],
            "state": [*states.tensors.values(), self.canary.state_tags],
        }


def rank_of(rank: int, ranks: int, *, filled: bool, window_tokens: int = 9) -> Rank:
    """One rank, filled so that every head of every block has numbers of its own."""
    own = heads_of(rank, ranks, HEADS)
    pages = WindowedPages(PAGES, WINDOWS, frozenset({1}))
    pool = KvPool(3, pages, PAGE_SIZE, len(own), 8, torch.float32, CPU)
    pool.states = StateTensors(STATES, SLOTS, CPU)
    canary = Canary(2, PAGES, PAGE_SIZE, 64, CPU, window_tokens, WINDOWS, SLOTS)
    about: dict[str, Any] = {"place": RankPlace(rank, ranks), "kv_heads": HEADS, "model": "m", "checksums": True}
    made = Rank(
        RankPages(sent_blocks(pool, None, canary), PAGE_SIZE, window_tokens=window_tokens, **about), pool, canary
    )
    made.pages.pages_per_slot = 4  # less memory
    for number, tensor in enumerate(one for some in made.tensors().values() for one in some) if filled else ():
        if tensor.dim() == 4 and tensor.shape[1] == PAGE_SIZE and tensor.shape[2] == len(own):
            whole = torch.arange(len(tensor) * PAGE_SIZE * HEADS * 8).view(len(tensor), PAGE_SIZE, HEADS, 8)
            tensor.copy_(whole[:, :, own.start : own.stop] + 1000 * number)
        else:
            tensor.copy_((torch.arange(tensor.numel()).view(tensor.shape) % 101 + number).to(tensor.dtype))
    return made


@pytest.mark.parametrize(("senders", "receivers"), [(1, 1), (2, 2), (2, 1), (1, 2)])
def test_every_rank_gets_its_heads_of_windows_and_the_whole_state(
    senders: int, receivers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks_module, "SLOT_BYTES", 200)  # the sender cuts a state into pieces
    sending = [rank_of(rank, senders, filled=True) for rank in range(senders)]
    monkeypatch.undo()
    places = tuple(one.pages.open_staging(0) for one in sending)
    kinds = [one.kind for one in places[0].beside]
    assert kinds == ["window", "state", "state"]
    sender = SlotSender(None, 0, places)  # type: ignore[arg-type]
    assert sender.pages_per_slot == 4
    assert all(one >= 1 for one in sender.beside_per_slot)
    for rank in range(receivers):
        got, right = (rank_of(rank, receivers, filled=filled) for filled in (False, True))
        before = {kind: [one.clone() for one in some] for kind, some in got.tensors().items()}
        got.pages.open_sender(1, sending[0].pages.layout, places)
        moved = {"page": ([3, 9], [1, 5]), "window": ([6, 2, 0], [4, 0, 3]), "state": ([4], [2])}
        for block, kind in enumerate(["page", *kinds]):
            there, here = (np.array(some, np.int32) for some in moved[kind])
            sums = tuple(one.pages.stage(0, block, there, block) for one in sending)
            got.pages.fetch(1, Fetch(block, len(there), 0, here, sums, block))
        for kind, (there, here) in moved.items():
            others = [one for one in range({"page": PAGES, "window": WINDOWS, "state": SLOTS}[kind]) if one not in here]
            columns = got.tensors()[kind], right.tensors()[kind], before[kind]
            for now, full, old in zip(*columns, strict=True):
                assert torch.equal(now[here], full[there]), kind
                assert torch.equal(now[others], old[others]), kind
        got.pages.close_all()
    for one in sending:
        one.pages.close_all()


def test_engines_with_other_blocks_are_refused_with_the_difference() -> None:
    ours, other = rank_of(0, 1, filled=False).pages.layout, rank_of(0, 1, filled=False, window_tokens=5).pages.layout
    window, state = ours.beside

    def refused(theirs: PageLayout, why: str) -> None:
        place = StagingPlace("shm", "", 1, 1, theirs.page_bytes, theirs.parts, theirs.beside)
        with pytest.raises(ConfigError, match=why):
            sources_of(theirs, [place], ours, 0)

    refused(other, "the prefill engine has `window_tokens` 5, the decode engine 9")
    refused(
        msgspec.structs.replace(ours, beside=(state,)), r"only one has model keys 1 \(window\), model values 1 \(win"
    )
    refused(msgspec.structs.replace(ours, beside=(window,)), r"only one has state 0 conv 0 \(state\)")
    smaller = tuple(msgspec.structs.replace(one, size=one.size // 2) for one in state.parts)
    cut = BlockLayout("state", state.block_bytes, smaller)
    refused(msgspec.structs.replace(ours, beside=(window, cut)), "`state 0 conv 0` of a state has 18 bytes there")


def test_what_is_sent_of_a_part() -> None:
    """The decode engine has two pages of the prompt; windows are those of the last pages."""
    layout = PageLayout("m", 4, 8, beside=(BlockLayout("window", 8), BlockLayout("state", 8), BlockLayout("state", 8)))
    windows = np.array([7, 8, 9], np.int32)
    part = StartTransfer(
        0, 0, "", "send", np.arange(20, 24, dtype=np.int32), 5, stop_tokens=18, hybrid=HybridTransfer(windows, 3)
    )
    found = [(first, blocks.tolist()) for first, blocks in blocks_of(part, layout, 3)]
    assert found == [(3, [22, 23]), (3, [8, 9]), (0, [3]), (0, [3])]
    assert [one.tolist() for _, one in blocks_of(part, layout, 0)] == [[20, 21, 22, 23], [7, 8, 9], [3], [3]]
    early = msgspec.structs.replace(part, hybrid=None)
    assert [one.tolist() for _, one in blocks_of(early, layout, 0)] == [[20, 21, 22, 23], [], [], []]
    assert given_blocks(part, "window", 4)[0] == 2


# -------------------------------------------------------------------------------------------------------- whole engines

W: dict[str, Any] = {"swa_full_tokens_ratio": WINDOW_SHARE}
S: dict[str, Any] = {"mamba_track_interval": TRACK_INTERVAL}
NGRAM: dict[str, Any] = {"speculative_method": "ngram", "num_speculative_tokens": 2}
TWO: dict[str, Any] = {"tp": 2}
CHECKED: dict[str, Any] = {**STIRRED, "debug": True, "device": "cpu", "grammar_backend": "none"}
CHECKED["transfer_failure"] = "fail"
RETRACTED = CHECKED.pop("retract_every")

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "windows": ("Gemma 3", {}, {}, {**W, "overlap_depth": 0}),
    "windows, overlap": ("gpt-oss", {}, {}, {**W, "overlap_depth": 1}),
    "windows, overlap of 2, tcp": ("Gemma 2", {}, {}, {**W, "overlap_depth": 2, "transfer_transport": "tcp"}),
    "windows, drafts": ("Gemma 3", {}, {}, {**W, **NGRAM, "overlap_depth": 1}),
    "windows, tp 2 to 1": ("Gemma 3", TWO, {}, W),
    "convolutions": ("LFM2", {}, {}, {**S, "overlap_depth": 0}),
    "convolutions, overlap of 2, tcp": ("LFM2", {}, {}, {**S, "overlap_depth": 2, "transfer_transport": "tcp"}),
    "convolutions, drafts": ("LFM2", {}, {}, {**S, **NGRAM, "overlap_depth": 1}),
    "linear attention": ("Qwen3-Next", {}, {}, {**S, "overlap_depth": 1}),
    "linear attention, drafts": ("Qwen3.5", {}, {}, {**S, **NGRAM}),
    "linear attention, tp 2 to 2": ("Qwen3.5", TWO, TWO, S),
    "state space": ("Bamba", {}, {}, {**S, "overlap_depth": 1}),
}
"""By name: architecture, options of the prefill and of the decode engine, and of both."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, list[list[int]]]]:
    """Return the folder of a small model and transformers' answers to `mixed_prompts`, each made once."""

    @cache
    def made(name: str) -> tuple[Path, list[list[int]]]:
        folder = tmp_path_factory.mktemp("model")
        return folder, greedy_answers(save_architecture(folder, name))

    return made


@contextmanager
def pair_of(
    model: Path, folder: Path, prefill: dict[str, Any], decode: dict[str, Any], **both: Any
) -> Iterator[tuple[LLM, LLM, DecodeSide]]:
    """A prefill and a decode engine whose requests are retracted again and again."""
    stirred = {"retract_every": RETRACTED, "num_reserved_decode_tokens": 8, **decode}
    with engines(folder, prefill, stirred, **{"model": model, **CHECKED, **both}) as (first, second):
        assert isinstance(second.handover, DecodeSide)
        yield first, second, second.handover


def settled(*llms: LLM) -> None:
    """Wait until nothing is under way, and check that no page, window or slot is left in use."""
    until = time.monotonic() + 20.0
    for llm in llms:
        while llm.host.engine.requests or llm.host.engine.transfers.all or llm.stats().engine.in_flight:
            assert time.monotonic() < until, llm.host.engine.transfers.all
            time.sleep(0.02)
        stats, memory = llm.stats().engine, llm.host.engine.memory
        assert stats.pages == stats.pages_free + stats.pages_cached
        memory.hybrid.check_at_rest()


def ask_all(llm: LLM, cancels: float = 0.0) -> list[tuple[list[int], str]]:
    """Send `mixed_prompts`, cancel a share of them at random times. Returns tokens and reasons."""
    rng, pending = random.Random(3), []
    for prompt, count in mixed_prompts():
        pending.append(llm.ask(prompt, Params(max_new_tokens=count)))
        if rng.random() < cancels:
            time.sleep(rng.random() * 0.05)
            llm.host.cancel(rng.choice(pending).answer.request_id)
    answers = [llm.wait(one) for one in pending]
    return [(one.token_ids, one.finish_reason) for one in answers]


@pytest.mark.parametrize("name", list(CASES))
def test_a_model_answers_as_transformers(
    name: str, saved: Callable[[str], tuple[Path, list[list[int]]]], tmp_path: Path
) -> None:
    architecture, prefill, decode, both = CASES[name]
    model, right = saved(architecture)
    journals = [tmp_path / "a", tmp_path / "b"]
    own = [{**one, "journal": journal} for one, journal in zip((prefill, decode), journals, strict=True)]
    with pair_of(model, tmp_path, *own, **both) as (first, second, side):
        assert [tokens for tokens, _ in ask_all(second)] == right
        again = [tokens for tokens, _ in ask_all(second)]  # most prompts are cached on both engines by now
        assert again == right
        settled(first, second)
        assert (side.counts.done, side.counts.failed) == (2 * len(right), 0)
        moved, stats = side.counts.blocks, second.stats().engine.counts
        if "swa_full_tokens_ratio" in both:
            assert 0 < moved["window"] < moved["page"]
        else:
            assert moved["state"] == 2 * len(right)
        assert moved["page"] < 2 * sum(-(-len(prompt) // PAGE_SIZE) for prompt, _ in mixed_prompts())
        assert stats.retractions
    assert [replay(journal).digest for journal in journals] == [llm.host.engine.digest for llm in (first, second)]


@pytest.mark.parametrize("name", ["windows", "convolutions"])
def test_cancels_at_any_time_leave_no_block(
    name: str, saved: Callable[[str], tuple[Path, list[list[int]]]], tmp_path: Path
) -> None:
    architecture, _, _, both = CASES[name]
    model, right = saved(architecture)
    with pair_of(model, tmp_path, {}, {}, **{**both, "overlap_depth": 1}) as (first, second, _):
        ended = set()
        for _ in range(2):
            for (tokens, reason), whole in zip(ask_all(second, cancels=0.4), right, strict=True):
                ended.add(reason)
                assert tokens == (whole[: len(tokens)] if reason == "cancelled" else whole)
        assert "cancelled" in ended
        settled(first, second)


# ------------------------------------------------------------------------------------------------------------- failures


def rank_pages(llm: LLM) -> RankPages:
    """The memory of the first rank of an engine, as transfers see it."""
    transport = llm.handover._kv  # type: ignore[union-attr]
    assert isinstance(transport, EngineTransport)
    return transport._own


@pytest.mark.parametrize("failure", ["recompute", "fail"])
@pytest.mark.parametrize("name", ["windows", "convolutions"])
def test_a_changed_byte_of_a_window_or_state_costs_no_token_and_no_block(
    name: str, failure: str, saved: Callable[[str], tuple[Path, list[list[int]]]], tmp_path: Path
) -> None:
    architecture, _, _, both = CASES[name]
    model, right = saved(architecture)
    with pair_of(model, tmp_path, {}, {}, **{**both, "transfer_failure": failure}) as (first, second, side):
        own, rng, spoiled = rank_pages(first), random.Random(2), list[int]()
        stage = own.stage

        def stage_wrongly(number: int, slot: int, pages: Any, block: int = 0) -> int:
            checksum = stage(number, slot, pages, block)
            if block and rng.random() < 0.3:
                own._stagings[number].slot(slot)[rng.randrange(8)] ^= 1
                spoiled.append(block)
            return checksum

        own.stage = stage_wrongly  # type: ignore[method-assign]
        answers = ask_all(second)
        assert len(spoiled) > 2
        assert side.counts.failed > 2
        for (tokens, reason), whole in zip(answers, right, strict=True):
            assert tokens == whole or (failure == "fail" and (reason, tokens) == ("transfer", []))
        assert ("transfer" in {reason for _, reason in answers}) == (failure == "fail")
        settled(first, second)


@pytest.mark.parametrize("name", ["windows", "convolutions"])
def test_links_that_break_and_transfers_that_stall_leave_no_block(
    name: str, saved: Callable[[str], tuple[Path, list[list[int]]]], tmp_path: Path
) -> None:
    architecture, _, _, both = CASES[name]
    model, right = saved(architecture)
    options = {**both, "transfer_failure": "recompute"}
    with pair_of(model, tmp_path, {}, {"transfer_timeout_us": 500_000}, **options) as (first, second, side):
        own, rng, over = rank_pages(first), random.Random(4), threading.Event()
        stage = own.stage

        def stage_late(number: int, slot: int, pages: Any, block: int = 0) -> int:
            if block and rng.random() < 0.1:
                over.wait(1.0)  # beyond the time limit
            return stage(number, slot, pages, block)

        own.stage = stage_late  # type: ignore[method-assign]

        def cut() -> None:
            while not over.wait(0.3):
                for peer in list(side._peers.values()):
                    peer.link.close()

        thread = threading.Thread(target=cut)
        thread.start()
        found = [tokens for tokens, _ in ask_all(second)]
        over.set()
        thread.join()
        assert found == right
        assert side.counts.failed
        settled(first, second)


# ------------------------------------------------------------------------------------------------------- planted faults


def with_other_windows(command: Any, earlier: list[Any]) -> Any:
    """Windows of the page behind, in place of each page's own."""
    windows = command.hybrid.window_pages
    return msgspec.structs.replace(command.hybrid, window_pages=np.roll(windows, 1))


def with_another_slot(command: Any, earlier: list[Any]) -> Any:
    """The state of a request before."""
    slots = [one.state_slot for one in earlier if one.state_slot >= 0]
    mine = command.hybrid.state_slot
    return msgspec.structs.replace(command.hybrid, state_slot=next((one for one in slots if one != mine), mine))


PLANTS: dict[str, Callable[[Any, list[Any]], Any]] = {
    "windows shifted": with_other_windows,
    "slot of another request": with_another_slot,
}


def change_parts(prefill: LLM, change: Callable[[Any, list[Any]], Any]) -> None:
    """Change what a prefill engine reads, from the blocks of a part and of all parts before."""
    side, earlier = prefill.handover, list[Any]()
    assert side is not None
    perform = side.perform

    def changed(command: Any) -> None:
        if isinstance(command, StartTransfer) and command.hybrid is not None:
            earlier.append(command.hybrid)
            command = msgspec.structs.replace(command, hybrid=change(command, earlier[:-1]))
        perform(command)

    side.perform = changed  # type: ignore[method-assign]


def read_early(prefill: LLM) -> None:
    """Send the states that were there before the newest batch, as if a copy did not wait for it."""
    executor, own = prefill._live.executor, rank_pages(prefill)
    states, canary = prefill._live.pool.states, executor.canary
    assert states is not None
    assert canary is not None
    tensors = [*states.tensors.values(), canary.state_tags]
    assert {len(one) for one in tensors} == {len(canary.state_tags)}, "a row for each slot"
    before: list[list[Any]] = [[one.clone() for one in tensors]]
    launch, stage = executor.launch, own.stage

    def launched(*given: Any, **more: Any) -> None:
        before.append([one.clone() for one in tensors])
        launch(*given, **more)

    def stage_early(number: int, slot: int, pages: Any, block: int = 0) -> int:
        if not block:
            return stage(number, slot, pages, block)
        rows = torch.as_tensor(np.asarray(pages, np.int64))  # only of this state: a batch may be writing others
        now = [one[rows].clone() for one in tensors]
        for tensor, old in zip(tensors, before[-1], strict=True):
            tensor[rows] = old[rows]
        checksum = stage(number, slot, pages, block)
        for tensor, new in zip(tensors, now, strict=True):
            tensor[rows] = new
        return checksum

    executor.launch, own.stage = launched, stage_early  # type: ignore[method-assign]


def without_tags(blocks: tuple[SentBlocks, ...]) -> tuple[SentBlocks, ...]:
    """Leave out the tags of the canary beside full pages."""
    left = [blocks[0]]
    for one in blocks[1:]:
        tensors = [(part.name, part.tensor) for part in one.memory.parts if part.name != "tags"]
        left.append(SentBlocks(one.kind, PageParts(tensors), one.parts[: len(tensors)]))
    return tuple(left)


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        ("windows shifted", "windows"),
        ("no tags", "windows"),
        ("slot of another request", "convolutions"),
        ("state before the last chunk", "convolutions"),
        ("no tags", "convolutions"),
    ],
)
def test_a_planted_fault_ends_the_engine(
    fault: str,
    name: str,
    saved: Callable[[str], tuple[Path, list[list[int]]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    architecture, _, _, both = CASES[name]
    model, _ = saved(architecture)
    if fault == "no tags":
        monkeypatch.setattr("lockstep.runtime.assembly.sent_blocks", lambda *given: without_tags(sent_blocks(*given)))
    with pair_of(model, tmp_path, {}, {}, **both) as (first, second, _):
        if fault in PLANTS:
            change_parts(first, PLANTS[fault])
        elif fault == "state before the last chunk":
            read_early(first)
        why = "which is not its KV" if name == "windows" else "begins with a state which is not that of its tokens"
        with pytest.raises(Exception, match=why):
            ask_all(second)
