"""Plans by hand: their execution, the refused ones, and the errors that the canary finds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

torch = pytest.importorskip("torch", reason="the GPU runtime is not installed")

from lockstep.core.contract.commands import (  # noqa: E402
    AfterBatch,
    BatchPlan,
    HybridChanges,
    PageDeltas,
    RowTaken,
    Speculation,
)
from lockstep.core.contract.errors import ConfigError, ContractError  # noqa: E402
from lockstep.core.contract.events import Grammar, RequestArrived, RequestId  # noqa: E402
from lockstep.core.requests.table import prompt_bytes  # noqa: E402
from lockstep.host.batches import ContextOf, RowContext  # noqa: E402
from lockstep.host.loop import HostClock  # noqa: E402
from lockstep.runtime import tables as tables_module  # noqa: E402
from lockstep.runtime.canary import Canary, CanaryError, mix  # noqa: E402
from lockstep.runtime.errors import PlanError  # noqa: E402
from lockstep.runtime.executor import Executor  # noqa: E402
from lockstep.runtime.overlap import CpuLane, WhenToRun  # noqa: E402
from lockstep.runtime.tables import FIRST_WIDTH, DeviceTables, check_page_table, last_entries  # noqa: E402
from tests.support.small_runtime import CPU, SmallRuntime, alone, make_executor, request, small_config  # noqa: E402

PROMPTS: dict[RequestId, list[int]] = {0: [5, 6, 7, 8, 9], 1: [11, 12], 2: [5, 6, 7, 8, 1, 2]}
ARRIVALS: dict[RequestId, RequestArrived] = {number: request(prompt, 9) for number, prompt in PROMPTS.items()}


def ints(*values: int) -> Any:
    return np.array(values, np.int32)


def deltas(*runs: tuple[int, int, Sequence[int]], opened: Sequence[tuple[int, int, int]] = ()) -> PageDeltas:
    """Runs of (row, first index, pages); opened entries of (row, index, page)."""
    pages = [page for _, _, run in runs for page in run] + [page for _, _, page in opened]
    return PageDeltas(
        ints(*pages),
        ints(*(number for row, first, run in runs for number in (row, first, len(run)))),
        ints(*(row for row, _, _ in opened)),
        ints(*(index for _, index, _ in opened)),
    )


def plan(batch_id: int, mode: Any, spans: Sequence[tuple[int, int, int, int]], **more: Any) -> BatchPlan:
    """Spans are (row, request, start, stop). Every row samples unless given otherwise; extend rows get their prompt."""
    rows, ids, starts, stops = zip(*spans, strict=True) if spans else ((), (), (), ())
    extending = {"extend": len(rows), "decode": 0}.get(mode, more.pop("extend_rows", 0))
    prompts = [token for _, one, start, stop in spans[:extending] for token in PROMPTS[one][start:stop]]
    given = {
        "extend_rows": extending,
        "token_ids": ints(*prompts),
        "sample_rows": np.arange(len(rows), dtype=np.int32),
        **more,
    }
    return BatchPlan(
        batch_id=batch_id,
        mode=mode,
        rows=ints(*rows),
        request_ids=np.array(ids, np.int64),
        starts=ints(*starts),
        stops=ints(*stops),
        **given,
    )


def executor(run_at: WhenToRun = "launch", *, canary: bool = True, **settings: Any) -> Executor:
    return make_executor(small_config(**settings), CpuLane(HostClock(), run_at=run_at), canary=canary)


def contexts_of(arrivals: Mapping[RequestId, RequestArrived]) -> ContextOf:
    """The contexts that a host would pass for requests without further fields."""

    def context(taken: RowTaken) -> RowContext:
        event = arrivals[taken.request_id]
        prompt = np.frombuffer(prompt_bytes(event.prompt), np.int32)
        return RowContext(prompt, len(prompt), event.kind, event.namespace)

    return context


def run(device: Executor, *plans: BatchPlan) -> list[list[int]]:
    """Launch all, then collect all."""
    for one in plans:
        device.launch(one, contexts=contexts_of(ARRIVALS))
    return [device.collect().tokens.tolist() for _ in plans]


BOTH = (RowTaken(3, 0, 0), RowTaken(1, 1, 0))
EXTEND = plan(0, "extend", [(3, 0, 0, 5), (1, 1, 0, 2)], rows_taken=BOTH, deltas=deltas((3, 0, [9, 4]), (1, 0, [2])))


@pytest.mark.parametrize("run_at", ["launch", "collection"])
def test_a_decode_reads_tokens_that_are_not_known_when_it_is_launched(run_at: WhenToRun) -> None:
    """Three batches are launched before any result; the rows of a mixed batch come in any order."""
    first, second = alone(PROMPTS[0], 4), alone(PROMPTS[1], 4)
    decode = plan(1, "decode", [(1, 1, 2, 3), (3, 0, 5, 6)])
    mixed = plan(
        2,
        "mixed",
        [(0, 2, 0, 6), (3, 0, 6, 7), (1, 1, 3, 4)],
        extend_rows=1,
        rows_taken=(RowTaken(0, 2, 0),),
        deltas=deltas((0, 0, [30, 31])),
    )
    steps = plan(
        3, "decode", [(3, 0, 7, 8), (0, 2, 6, 9), (1, 1, 4, 4 + 2)], steps=3,
        deltas=deltas(opened=[(0, 2, 33), (1, 1, 34)]),
    )  # fmt: skip
    third = alone(PROMPTS[2], 4)
    assert run(executor(run_at), EXTEND, decode, mixed, steps) == [
        [first[0], second[0]],
        [second[1], first[1]],
        [third[0], first[2], second[2]],
        [first[3], *third[1:4], *alone(PROMPTS[1], 5)[3:5]],
    ]


def test_a_chunk_before_the_last_samples_nothing() -> None:
    taken = (RowTaken(2, 0, 0),)
    first = plan(0, "extend", [(2, 0, 0, 4)], rows_taken=taken, deltas=deltas((2, 0, [1])), sample_rows=ints())
    last = plan(1, "extend", [(2, 0, 4, 5)], deltas=deltas((2, 1, [7])))
    assert run(executor(), first, last) == [[], alone(PROMPTS[0], 1)]


def test_a_row_that_changes_hands_starts_anew() -> None:
    """Nothing of the row's page table and newest token remains, and the tables grow with a long request."""
    device = executor(context_tokens_max=96, page_size=4)
    run(device, EXTEND)
    long = list(range(80))
    PROMPTS[7], ARRIVALS[7] = long, request(long, 2)
    pages = list(range(20, 40))
    again = plan(1, "extend", [(3, 7, 0, 80)], rows_taken=(RowTaken(3, 7, 0),), deltas=deltas((3, 0, pages)))
    assert run(device, again) == [alone(long, 1)]
    assert device.tables.page_table.shape[1] == 2 * FIRST_WIDTH
    assert device.tables.page_table[3, :21].tolist() == [*pages, device.tables.page_count]
    assert device.tables.page_table[1, :2].tolist() == [2, device.tables.page_count]


def test_of_two_entries_for_one_place_the_later_wins() -> None:
    changes = deltas((3, 0, [9, 4, 5]), (1, 0, [2]), (3, 1, [7, 8]), opened=[(1, 1, 6), (3, 2, 10)])
    rows, index, pages = last_entries(changes)
    table = dict(zip(zip(rows.tolist(), index.tolist(), strict=True), pages.tolist(), strict=True))
    assert table == {(3, 0): 9, (3, 1): 7, (3, 2): 10, (1, 0): 2, (1, 1): 6}
    assert len(rows) == 5


WRONG: dict[str, tuple[BatchPlan, str]] = {
    "no request": (
        plan(1, "decode", [(2, 2, 6, 7)]),
        "batch 1 runs r2 in row 2, which no request holds",
    ),
    "another": (
        plan(1, "decode", [(3, 2, 6, 7)]),
        "batch 1 runs r2 in row 3, which r0 holds",
    ),
    "outside": (
        plan(1, "decode", [(99, 2, 6, 7)]),
        "batch 1 names rows outside 0 to 15: 99",
    ),
    "taken outside": (
        plan(1, "extend", [(99, 2, 0, 6)], rows_taken=(RowTaken(99, 2, 0),)),
        "batch 1 takes row 99, but there are rows 0 to 15",
    ),
    "twice": (
        plan(1, "decode", [(3, 0, 5, 6), (3, 0, 6, 7)]),
        "batch 1 names a row twice: 3, 3",
    ),
    "no such page": (
        plan(1, "decode", [(3, 0, 5, 6)], deltas=deltas((3, 2, [64]))),
        "batch 1 gives out pages outside 0 to 63: 64",
    ),
    "a table without a request": (
        plan(1, "decode", [(3, 0, 5, 6)], deltas=deltas((5, 2, [6]))),
        "batch 1 changes the page table of row 5, which no request holds",
    ),
    "no page": (
        plan(1, "decode", [(3, 0, 8, 9)]),
        "batch 1 reads row 3 up to position 9, where its table has no page",
    ),
    "empty": (
        plan(1, "decode", [(3, 0, 5, 5)]),
        "batch 1 has an empty span: 5 to 5",
    ),
    "too far": (
        plan(1, "decode", [(3, 0, 5, 7)]),
        "batch 1 decodes more than 1 tokens of a row: 2",
    ),
    "ids": (
        plan(1, "extend", [(3, 0, 0, 5)], token_ids=ints(1, 2)),
        "batch 1 has 2 token ids for 5 new tokens",
    ),
    "verify": (
        plan(1, "verify", [(3, 0, 5, 6)]),
        "batch 1 has mode 'verify', but no `speculation` with what it verifies",
    ),
    "hybrid": (
        plan(1, "decode", [(3, 0, 5, 6)], hybrid=HybridChanges(ints(1), ints(2))),
        "batch 1 gives out window pages, but the model here has none",
    ),
    "after": (
        plan(1, "decode", [(3, 0, 5, 6)], starts_after=(AfterBatch(0, 0, 3),)),
        "batch 1 has `starts_after`, but no `speculation` with what it verifies",
    ),
    "drafts without a drafter": (
        plan(1, "verify", [(3, 0, 5, 7)], speculation=Speculation(3, ints(1), "ngram")),
        "batch 1 verifies drafts, but this executor has no drafter",
    ),
    "another mode": (
        plan(1, "draft_extend", [(3, 0, 5, 6)]),
        "batch 1 has mode 'draft_extend'; this executor runs decode, extend, mixed, prebuilt, verify",
    ),
    "steps": (
        plan(1, "extend", [(3, 0, 0, 5)], steps=2),
        "batch 1 has 2 steps in mode 'extend'; only decodes have several",
    ),
    "grammar": (
        plan(1, "extend", [(3, 0, 0, 5)], rows_taken=(RowTaken(3, 0, 1, grammar=Grammar("regex", "a", b"a")),)),
        "batch 1 takes a row under a grammar, but this executor has no matchers",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_is_refused_with_one_sentence(name: str) -> None:
    wrong, message = WRONG[name]
    device = executor()
    device.launch(EXTEND, contexts=contexts_of(ARRIVALS))
    with pytest.raises(PlanError) as raised:
        device.launch(wrong, contexts=contexts_of(ARRIVALS))
    assert str(raised.value) == message
    assert device.collect().tokens.tolist() == [alone(PROMPTS[0], 1)[0], alone(PROMPTS[1], 1)[0]]


@pytest.mark.parametrize("run_at", ["launch", "collection"])
def test_nothing_behind_a_batch_that_waits_to_be_sampled_runs_before_it(run_at: WhenToRun) -> None:
    device = executor(run_at)
    device.launch(EXTEND, deferred=True, contexts=contexts_of(ARRIVALS))
    device.launch(plan(1, "decode", [(3, 0, 5, 6)]))
    if run_at == "launch":
        assert device.forwards == 1
    with pytest.raises(ContractError, match="batch 0 is collected, but waits to be sampled"):
        device.collect()
    with pytest.raises(ContractError, match="batch 1 is to be sampled, but was not deferred"):
        device.sample(1, ())
    device.sample(0, ())
    assert device.collect().tokens.tolist() == [alone(PROMPTS[0], 1)[0], alone(PROMPTS[1], 1)[0]]
    assert device.collect().tokens.tolist() == alone(PROMPTS[0], 2)[1:]
    assert not device.in_flight


# ---------------------------------------------------------------------------------------------------------- the canary


SHARED = plan(
    1, "extend", [(0, 2, 4, 6)], rows_taken=(RowTaken(0, 2, 0),), deltas=deltas((0, 0, [9]), (0, 1, [31]))
)  # r2 begins as r0 does, for one page


def test_a_prefix_that_is_shared_is_found_in_order() -> None:
    device = executor()
    assert run(device, EXTEND, SHARED)[1] == alone(PROMPTS[2], 1)
    assert device.canary is not None
    assert device.canary.slots_verified == 5 + 2 + 6


@pytest.mark.parametrize("run_at", ["launch", "collection"])
def test_a_page_of_another_request_is_found_at_the_first_read(run_at: WhenToRun) -> None:
    device = executor(run_at)
    wrong = replace(SHARED, deltas=deltas((0, 0, [2]), (0, 1, [31])))
    with pytest.raises(CanaryError, match="r2 in row 0 reads position 0, in page 0 of its table, which is not"):
        run(device, EXTEND, wrong)


def test_a_page_given_to_a_second_writer_is_found_when_the_first_reads_again() -> None:
    device = executor()
    writer = plan(1, "extend", [(0, 2, 0, 6)], rows_taken=(RowTaken(0, 2, 0),), deltas=deltas((0, 0, [30, 4])))
    reader = plan(2, "decode", [(1, 1, 2, 3), (3, 0, 5, 6)])
    with pytest.raises(CanaryError, match="batch 2: r0 in row 3 reads position 4, in page 1"):
        run(device, EXTEND, writer, reader)


def test_what_a_failed_batch_wrote_may_be_read_only_by_requests_launched_before() -> None:
    device = executor("collection")
    device.model.fail_at = lambda batch: RuntimeError("no") if batch.count == 2 else None  # type: ignore[attr-defined]
    told = contexts_of(ARRIVALS)
    device.launch(EXTEND, contexts=told)
    device.launch(plan(1, "decode", [(3, 0, 5, 6)]))
    assert device.collect().error == "RuntimeError: no"
    device.launch(plan(2, "decode", [(3, 0, 6, 7)]))
    assert not device.collect().error
    with pytest.raises(CanaryError, match=r"batch 2: r0 in row 3 reads position 0, .* which a failed batch wrote"):
        device.collect()


@pytest.mark.parametrize("place", ["lane.begin", "lane.upload", "tables.fold"])
@pytest.mark.parametrize("canary", [False, True])
@pytest.mark.parametrize("run_at", ["launch", "collection"])
def test_changes_of_a_batch_that_failed_early_are_made_before_anything_else_runs(
    run_at: WhenToRun, canary: bool, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row 3 goes from r0 to r1, whose decode is launched behind: it must not write into the pages that r0 left."""
    device = executor(run_at, canary=canary)
    run(device, EXTEND)
    part: Any = getattr(device, place.partition(".")[0])
    inner, calls = getattr(part, place.partition(".")[2]), []

    def fails_twice(*given: Any) -> Any:
        calls.append(given)
        if len(calls) < 3:
            raise RuntimeError("out of pinned memory")
        return inner(*given)

    monkeypatch.setattr(part, place.partition(".")[2], fails_twice)
    told = contexts_of(ARRIVALS)
    taken = (RowTaken(3, 1, 0),)
    device.launch(plan(1, "extend", [(3, 1, 0, 2)], rows_taken=taken, deltas=deltas((3, 0, [30]))), contexts=told)
    device.launch(plan(2, "decode", [(3, 1, 2, 3)]), contexts=told)
    device.launch(plan(3, "decode", [(3, 1, 3, 4)]), contexts=told)
    assert [device.collect().error for _ in range(3)] == ["RuntimeError: out of pinned memory"] * 2 + [""]
    assert device.tables.page_table[3, :2].tolist() == [30, device.tables.page_count]
    assert run(device, replace(SHARED, batch_id=4)) == [alone(PROMPTS[2], 1)]


def test_kv_of_another_namespace_is_not_its_own() -> None:
    """The core includes the version of the weights in the namespace."""
    device = executor()
    device.launch(EXTEND, contexts=contexts_of(ARRIVALS))
    device.collect()
    device.launch(SHARED, contexts=contexts_of({2: replace(ARRIVALS[2], namespace="tenant")}))
    with pytest.raises(CanaryError, match="reads position 0"):
        device.collect()


def test_tags_distinguish_sequences_by_every_token_and_place() -> None:
    canary = Canary(2, 4, 4, 16, CPU)
    tags = set()
    for tokens in ([1, 2, 3], [2, 1, 3], [1, 2, 4], [0, 2, 3], [3, 2, 1]):
        canary.take_row(0, "", np.array(tokens, np.int32))
        tags.add(int(canary.chains[0, 2]))
    assert len(tags) == 5
    grid = mix(torch.arange(300).repeat_interleave(300), torch.arange(300).repeat(300))
    assert len(grid.unique()) == 90_000


def test_a_page_freed_too_early_by_the_scheduler_is_found() -> None:
    """A planted bug: a page is given to a second request while another reads it. No other check would report it."""
    runtime = SmallRuntime(check=False, pages=64)
    memory = runtime.engine.memory
    stolen: list[int] = []

    class Forgetful:
        """A page pool that once gives out a page that is still read."""

        def __getattr__(self, name: str) -> Any:
            return getattr(pool, name)

        def alloc(self, count: int) -> Any:
            pages = pool.alloc(count)
            if len(runtime.plans) >= 4 and not stolen:
                stolen.append(int(memory.table.pages[runtime.engine.running_batch.rows[-1], 0]))
                pages = np.array([stolen[0], *pages[1:]], np.int32)
            return pages

    pool, memory.pool = memory.pool, Forgetful()  # type: ignore[assignment]
    for n in range(3):
        runtime.submit([n, 1, 2, 3, 4], 30)
    with pytest.raises(CanaryError, match="which is not its KV"):
        runtime.run()
    assert stolen


def test_tables_that_are_as_wide_as_they_can_be_never_grow() -> None:
    tables = DeviceTables(2, 8, 4, CPU, context_tokens=30)
    assert tables.width == 8
    assert tables.page_table.shape == (3, 8)


def test_tables_with_more_places_than_int32_counts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Places in a page table are int32, and would become negative."""
    with pytest.raises(ConfigError) as raised:
        check_page_table(4096, 1 << 20, 1)
    first, hint = str(raised.value).splitlines()
    assert first == (
        "`context_tokens_max` 1,048,576 with `page_size` 1 makes 1,048,576 pages a request; for 4,096 request rows "
        "that is a page table of more than 2,147,483,648 places"
    )
    assert hint.startswith("hint: a larger page_size")
    check_page_table(4095, 1 << 19, 1)
    monkeypatch.setattr(tables_module, "ENTRIES_MAX", 16 * (FIRST_WIDTH + 4))
    with pytest.raises(ConfigError, match="is a page table of more than 320 places"):
        DeviceTables(16, 8, 4, CPU, context_tokens=4 * FIRST_WIDTH + 20)
    tables = DeviceTables(15, 64, 4, CPU)  # and one that grows, up to the limit
    tables.take_in(plan(0, "decode", [(3, 0, 4 * FIRST_WIDTH, 4 * FIRST_WIDTH + 1)]))
    assert tables.width == FIRST_WIDTH + 4
    with pytest.raises(PlanError, match="batch 1 needs 21 pages of a row, but tables have 20 at most"):
        tables.take_in(plan(1, "decode", [(3, 0, 80, 81)]))
