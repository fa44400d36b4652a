"""Host memory and storage in the simulator: links keep their bandwidth, and answers are those without them."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from lockstep.core.contract.commands import (
    BlockFetch,
    BlockStore,
    CancelPrefetch,
    Command,
    CopyToHost,
    Int32s,
    LoadFromHost,
    PrefetchFromStorage,
    WriteToStorage,
)
from lockstep.core.contract.errors import ConfigError
from lockstep.core.contract.events import BlocksFound, HostCopyFinished, PrefetchFinished
from lockstep.core.journal.replay import replay
from lockstep.sim.catalogue import load_gpu, load_model
from lockstep.sim.cost.parallel import Parallelism
from lockstep.sim.host.cache_tiers import SimulatedStorage, TierLinks
from lockstep.sim.host.links import Link
from lockstep.sim.host.page_bytes import PageBytes
from lockstep.sim.plan.question import parse_search
from lockstep.sim.run.assemble import assemble
from lockstep.sim.run.simulate import Run, simulate
from lockstep.sim.scenario.scenario import Scenario
from lockstep.sim.scenario.tier_options import HostTiers, host_tiers

AGAIN = "gen:n=60,rate=3,turns=uniform:3:5,think=lognormal:4s:1,input=lognormal:1500:0.5,output=lognormal:60:0.5"
SMALL = {"pages": 1200, "page_size": 16}


def pages(count: int) -> Int32s:
    return np.arange(count, dtype=np.int32)


def run(tiers: dict[str, object], folder: Path | None = None, **settings: object) -> Run:
    scenario = Scenario(
        model="qwen3-8b", gpu="h100", workload=AGAIN, settings={**SMALL, **settings}, tiers=tiers, seed=3
    )
    return simulate(assemble(scenario, {}), folder=folder)


def answers(run: Run) -> list[tuple[str, int, int, str]]:
    """The answers of all turns, in the order of their names: the order of arrivals follows from the ends of answers."""
    requests = run.data.requests
    columns = (requests.label, requests.prompt_tokens, requests.output_tokens, requests.finish_reason)
    return sorted(zip(*(column.tolist() for column in columns), strict=True))


def test_a_link_carries_one_transfer_after_another() -> None:
    link = Link(gbs=2.0, latency_us=5.0)
    assert link.send(0, 8_000) == 9  # 2,000 bytes per microsecond
    assert link.send(1, 2_000) == 10  # behind it; the latencies overlap
    assert link.send(100, 2_000) == 106
    assert (link.bytes, link.busy_us, link.transfers) == (12_000, 6.0, 3)
    assert link.cut_short(100, 2_000) == 0
    assert link.send(100, 2_000) == 106, "what was cut short makes room"


def test_a_page_weighs_what_its_ranks_hold() -> None:
    model, page_bytes = load_model("qwen3-8b"), 16 * 36 * 2 * 8 * 128 * 2
    assert PageBytes.of(model, Parallelism(), "bf16", 16) == (page_bytes, page_bytes)
    assert PageBytes.of(model, Parallelism(tp=4), "bf16", 16) == (page_bytes, page_bytes // 4)
    assert PageBytes.of(model, Parallelism(tp=2, pp=2), "bf16", 16) == (page_bytes, page_bytes // 4)
    assert PageBytes.of(model, Parallelism(tp=2, attention_dp=2), "fp8", 16) == (page_bytes // 2, page_bytes // 2)


def test_lanes_answer_in_time_and_storage_has_what_was_written() -> None:
    tiers = HostTiers(host_cache_gb=1, host_link_gbs=1, storage_gb=4e-6, storage_gbs=1, storage_latency_us=7)
    links = TierLinks(tiers, PageBytes(1_000, 500), load_gpu("h100"))
    keys = tuple(bytes([i]) for i in range(6))
    assert links.begin(CopyToHost(0, pages(4), pages(4)), 0) is None
    assert links.begin(CopyToHost(1, pages(4), pages(4), given_up=True), 0) == 14, "no batch before it was read"
    assert links.begin(LoadFromHost(2, pages(2), pages(2)), 0) is None  # the other direction: 1 us and 10 to begin
    links.begin(WriteToStorage(3, keys, pages(6)), 0)  # the first 4 fit
    order = [(links.next_us, links.take(links.next_us)) for _ in range(4)]
    assert [time_us for time_us, _ in order] == [12, 13, 14, 15], "the load waits for the pages to have been read"
    assert [key in links.stored for key in keys] == [True] * 4 + [False] * 2
    links.begin(PrefetchFromStorage(4, keys[:4], pages(4)), 20)
    links.begin(CancelPrefetch(4), 22)
    assert links.take(30) == PrefetchFinished(30, 4, 2), "two of four pages had come"
    links.begin(PrefetchFromStorage(5, (keys[0], keys[4]), pages(2)), 40)
    links.begin(CancelPrefetch(4), 41)  # too late
    assert links.take(50) == PrefetchFinished(50, 5, 1), "up to the first that is missing"


def test_copies_begin_after_the_latency_of_the_link() -> None:
    tiers = HostTiers(host_cache_gb=1, host_link_gbs=1, host_link_latency_us=300)
    links = TierLinks(tiers, PageBytes(1_000, 500), load_gpu("h100"))
    links.begin(CopyToHost(0, pages(4), pages(4)), 0)
    links.begin(LoadFromHost(1, pages(2), pages(2)), 0)
    assert [(links.next_us, type(links.take(links.next_us))) for _ in range(2)] == [
        (301, HostCopyFinished),
        (302, HostCopyFinished),
    ]


def test_random_latencies_have_their_mean_and_are_drawn_from_key_and_transfer_alone() -> None:
    def waits(key: str, spread: float) -> list[int]:
        link = Link(1e6, 5_000.0, spread=spread, key=key)
        return [link.send(now_us, 1) - now_us for now_us in range(0, 3_000_000, 1_000)]

    varied = waits("1 a", 0.5)
    assert waits("1 a", 0.5) == varied != waits("1 b", 0.5)
    assert sum(varied) / len(varied) == pytest.approx(5_000.0, rel=0.05)
    assert float(np.std(varied)) == pytest.approx(2_500.0, rel=0.15)
    assert set(waits("1 a", 0.0)) == {5_000}


def test_blocks_weigh_in_storage_and_on_its_way() -> None:
    """Pages of 1,000 bytes, states of 500, and room for 4,000."""
    tiers = HostTiers(host_cache_gb=1, host_link_gbs=1, storage_gb=4e-6, storage_gbs=1, storage_latency_us=7)
    links = TierLinks(tiers, PageBytes(1_000, 1_000), load_gpu("h100"), {"state": PageBytes(500, 500)})
    pages_of, states_of = (b"p0", b"p1"), (b"s0", b"s1")
    links.begin(WriteToStorage(0, pages_of, pages(2), 0, (BlockStore("state", states_of, pages(2)),)), 0)
    assert links.take(links.next_us).time_us == 7 + 3
    fetch = BlockFetch("state", states_of, (False, False), 1, pages(1))
    links.begin(PrefetchFromStorage(1, pages_of, pages(2), 0, (fetch,)), 20)
    assert links.next_us in (29, 30)  # two pages and the second one's state
    found = (BlocksFound("state", (1,)),)
    assert links.take(30) == PrefetchFinished(30, 1, 2, blocks=found)
    links.begin(PrefetchFromStorage(2, pages_of, pages(2), 0, (fetch,)), 40)
    links.begin(CancelPrefetch(2), 41)
    assert links.take(42) == PrefetchFinished(42, 2, 1), "what is cut short has brought no companion"
    links.begin(WriteToStorage(3, (b"p2", b"p3"), pages(2)), 60)
    links.take(links.next_us)
    assert [key in links.stored for key in (*pages_of, *states_of)] == [True, False, False, True]


@pytest.mark.parametrize(
    "tiers",
    [
        {"host_cache_gb": 40.0},
        {"host_cache_gb": 5.0, "host_write_policy": "write_back", "host_link_gbs": 2.0},
        {"host_cache_gb": 2.0, "storage_gb": 50.0, "host_write_policy": "write_through_selective"},
    ],
)
def test_answers_are_those_without_tiers_and_the_journal_replays(tiers: dict[str, object], tmp_path: Path) -> None:
    plain, tiered = run({}), run(tiers, tmp_path)
    assert answers(plain) == answers(tiered)
    replay(tmp_path)
    cache = tiered.data.summary["cache"]
    assert "bytes_moved" not in plain.data.summary["cache"]
    assert cache["prompt_tokens_from_host"] + cache["prompt_tokens_from_storage"] > 0
    assert cache["hit_ratio"] > plain.data.summary["cache"]["hit_ratio"]
    page_bytes = tiered.setup.host_page_bytes
    assert page_bytes is not None
    assert cache["bytes_moved"]["load"] % page_bytes == 0
    lane = cache["links"]["from_host"]
    assert lane["bytes"] == cache["bytes_moved"]["load"], "of one GPU, and nothing failed"
    assert lane["busy_us"] == pytest.approx(lane["bytes"] / lane["gbs"] / 1e3, rel=1e-3)


POOLED = {"hybrid_memory": "on", "host_cache_gb": 200.0}


@pytest.mark.parametrize(("model", "tp"), [("gpt-oss-20b", 1), ("qwen3-next-80b-a3b", 2)])
@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_windows_and_states_are_loaded_and_carried_with_their_bytes(
    model: str, tp: int, policy: str, tmp_path: Path
) -> None:
    """Pages of the host are used although layers differ; lanes transfer the bytes of the events, of one GPU each."""
    ratio = {"mamba_full_memory_ratio": 0.05} if tp > 1 else {}
    base = Scenario(model=model, gpu="h200", tp=tp, workload=AGAIN, settings=SMALL, seed=3)
    plain = simulate(assemble(replace(base, tiers={"hybrid_memory": "on", **ratio}), {}))
    setup = assemble(replace(base, tiers={**POOLED, **ratio, "host_write_policy": policy}), {})
    tiered = simulate(setup, folder=tmp_path)
    replay(tmp_path)
    assert answers(plain) == answers(tiered)
    cache, before = tiered.data.summary["cache"], plain.data.summary["cache"]
    assert cache["prompt_tokens_from_host"] > 0
    assert cache["hit_ratio"] > 2 * before["hit_ratio"]
    page, beside = setup.host_page_bytes, setup.host_block_bytes
    assert page is not None
    assert beside.keys() == ({"state"} if tp > 1 else {"window"})
    for lane, kind in (("from_host", "load"), ("to_host", "write")):
        assert cache["links"][lane]["bytes"] * tp == cache["bytes_moved"][kind]
    assert cache["bytes_moved"]["load"] > cache["prompt_tokens_from_host"] // 16 * page * 0.8


@pytest.mark.parametrize("model", ["gemma-3-27b", "qwen3-next-80b-a3b"])
def test_host_memory_holds_pages_with_their_share_of_windows_and_states(model: str) -> None:
    setup = assemble(Scenario(model=model, gpu="h200", tp=2, workload=AGAIN, tiers=POOLED), {})
    config, page, beside = setup.config, setup.host_page_bytes, setup.host_block_bytes
    assert page is not None
    assert config.tiers is not msgspec.UNSET
    shares = {"window": config.hybrid.window_pages / config.pages, "state": config.hybrid.state_slots / config.pages}
    taken = config.tiers.host_pages * (page + sum(shares[kind] * size for kind, size in beside.items()))
    assert 0.99 * 200e9 < taken <= 200e9
    full = 10 * 2 * 16 * 128 * 2 if model.startswith("gemma") else 12 * 2 * 2 * 256 * 2
    assert page == 16 * full


@pytest.mark.parametrize(("model", "tp"), [("gpt-oss-20b", 1), ("qwen3-next-80b-a3b", 2)])
def test_windows_and_states_come_back_from_storage_with_their_bytes(model: str, tp: int, tmp_path: Path) -> None:
    """A host that holds few pages: storage returns the others, with their window and state blocks."""
    ratio = {"mamba_full_memory_ratio": 0.05} if tp > 1 else {}
    base = Scenario(model=model, gpu="h200", tp=tp, workload=AGAIN, settings=SMALL, seed=3)
    small = {"hybrid_memory": "on", **ratio, "host_cache_gb": 3.0}
    plain = simulate(assemble(replace(base, tiers=small), {}))
    setup = assemble(replace(base, tiers={**small, "storage_gb": 500.0}), {})
    stored = simulate(setup, folder=tmp_path)
    replay(tmp_path)
    assert answers(plain) == answers(stored)
    cache, before = stored.data.summary["cache"], plain.data.summary["cache"]
    assert cache["prompt_tokens_from_storage"] > 0
    assert cache["hit_ratio"] > before["hit_ratio"]
    for lane, kind in (("from_storage", "prefetch"), ("to_storage", "store")):
        assert cache["links"][lane]["bytes"] == cache["bytes_moved"][kind]
        assert cache["bytes_moved"][kind] > cache["prompt_tokens_from_storage"] // 16 * setup.host_page_bytes


def test_a_slower_link_makes_requests_wait_longer() -> None:
    fast, slow = (run({"host_cache_gb": 40.0, "host_link_gbs": gbs}).data.summary["cache"] for gbs in (450.0, 2.0))
    waits = [one["tiers_wait_us"] / one["requests_waited_for_tiers"] for one in (fast, slow)]
    assert waits[1] > 5 * waits[0] > 0


def test_a_stretch_of_decodes_taken_at_once_changes_nothing() -> None:
    base = Scenario(model="qwen3-8b", gpu="h100", workload=AGAIN, settings=SMALL, tiers={"host_cache_gb": 40.0}, seed=3)
    for scenario in (base, replace(base, model="gpt-oss-20b", tiers=POOLED)):
        setup = assemble(scenario, {})
        assert simulate(setup).data.summary == simulate(setup, check_every=10**9).data.summary


def test_without_tiers_a_run_reports_nothing_of_them() -> None:
    setup = run({}).setup
    assert "tiers" not in setup.about()
    assert "tiers" not in msgspec.to_builtins(setup.config)
    assert "host" not in setup.scenario.command()
    with_tiers = replace(setup.scenario, tiers={"host_cache_gb": 40.0, "storage_gb": 1.0, "storage_latency_us": 5})
    assert "--host-cache-gb 40.0 --storage-gb 1.0 --storage-latency 5us" in with_tiers.command()


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"host_link_gbs": 3.0}, "`host_link_gbs` requires a tier below the device, but `host_cache_gb` is 0"),
        ({"host_cache_gb": -1.0}, "`host_cache_gb` must be at least 0 gigabytes and below 1e9, got `-1.0`"),
        ({"host_cache_gb": 1.0, "storage_latency_spread": 1.0}, "`storage_latency_spread` requires storage"),
        ({"host_cache_gb": 1.0, "host_link_latency_spread": -1.0}, "`host_link_latency_spread` must be from 0 to 10"),
        ({"host_cache_gb": 1.0, "host_link_latency_us": -1}, "`host_link_latency_us` must be at least 0, got `-1`"),
        ({"host_cache_gb": 1.0, "storage_gbs": 3.0}, "`storage_gbs` requires storage, but `storage_gb` is 0"),
        ({"host_cache_gb": 1.0, "host_write_policy": "lazy"}, "`host_write_policy` must be write_through, write_thr"),
    ],
)
def test_what_cannot_be_asked_is_refused_by_name(given: dict[str, object], names: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(names)):
        host_tiers(given)


def test_a_host_that_holds_no_page_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"`host_cache_gb` 0\.001 does not hold one page of 2,359,296 bytes"):
        run({"host_cache_gb": 0.001})


def test_the_end_of_a_path_leaves_storage_before_its_beginning() -> None:
    stored = SimulatedStorage(40)
    stored.write(dict.fromkeys((b"a0", b"a1", b"a2"), 10), (b"a0", b"a1", b"a2"))
    stored.write(dict.fromkeys((b"b0", b"b1"), 10), (b"b0", b"b1"))
    assert [key in stored for key in (b"a0", b"a1", b"a2", b"b0", b"b1")] == [True, True, False, True, True]
    stored.read([b"a0", b"a1"])
    stored.write({b"c0": 10}, (b"c0",))
    assert [key in stored for key in (b"a0", b"a1", b"b0", b"b1", b"c0")] == [True, True, True, False, True]


def test_a_beginning_that_was_written_first_leaves_storage_after_its_end() -> None:
    """A path is written turn by turn, and its later turns count as uses of the earlier ones."""
    stored = SimulatedStorage(40)
    stored.write({b"b0": 10}, (b"b0",))
    stored.write({b"a0": 10, b"a1": 10}, (b"a0", b"a1"))
    stored.read([b"b0"])
    stored.write({b"a2": 10}, (b"a2",), after=b"a1")
    stored.write({b"c0": 10, b"c1": 10}, (b"c0", b"c1"))
    assert [key in stored for key in (b"a0", b"a1", b"a2", b"b0", b"c0", b"c1")] == [
        True,
        True,
        False,
        False,
        True,
        True,
    ]


def test_a_beginning_stays_in_storage_while_prefetches_bring_only_its_continuation() -> None:
    """The host has the beginning, so it is not read again. It is needed as soon as the host has evicted it."""
    tiers = HostTiers(host_cache_gb=1, storage_gb=4e-6)
    links = TierLinks(tiers, PageBytes(1_000, 1_000), load_gpu("h100"))

    def finish() -> None:
        links.take(links.next_us)

    links.begin(WriteToStorage(0, (b"a0",), pages(1)), 0)
    finish()
    links.begin(WriteToStorage(1, (b"a1",), pages(1), after=b"a0"), 0)
    finish()
    links.begin(WriteToStorage(2, (b"b0", b"b1"), pages(2)), 0)
    finish()
    links.begin(PrefetchFromStorage(3, (b"a1",), pages(1)), 0)
    finish()
    links.begin(WriteToStorage(4, (b"c0", b"c1"), pages(2)), 0)
    finish()
    assert [key in links.stored for key in (b"a0", b"a1", b"b0", b"b1")] == [True, True, False, False]


def test_writes_to_storage_name_the_page_in_front_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns of a session are stored one after the other: each write continues at a page that was stored before."""
    begun: list[WriteToStorage] = []
    begin = TierLinks.begin

    def recorded(links: TierLinks, command: Command, now_us: int) -> int | None:
        if isinstance(command, WriteToStorage):
            begun.append(command)
        return begin(links, command, now_us)

    monkeypatch.setattr(TierLinks, "begin", recorded)
    run({"host_cache_gb": 2.0, "storage_gb": 50.0})
    stored: set[bytes] = {b""}
    for write in begun:
        assert write.after in stored
        stored |= set(write.keys)
    assert any(write.after for write in begun)


def test_a_storage_that_holds_no_page_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"`storage_gb` 0\.001 does not hold one page of 2,359,296 bytes"):
        run({"host_cache_gb": 1.0, "storage_gb": 0.001})


def test_a_plan_searches_over_them_and_reads_their_values_as_options_are() -> None:
    assert parse_search(("host-cache-gb=0,1000",)) == (("host_cache_gb", (0.0, 1000.0)),)
    assert parse_search(("storage_latency_us=200us,1ms",)) == (("storage_latency_us", (200, 1000)),)
    with pytest.raises(ConfigError, match="`host_cache_gb` cannot be `much`"):
        parse_search(("host_cache_gb=much",))
