"""A resource is one class and one line: quota, deferral, release, snapshot and check of one that does not exist."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from lockstep.core import invariants
from lockstep.core.contract.config import CacheTiers, HybridMemory, SchedConfig
from lockstep.core.contract.errors import InvariantError
from lockstep.core.contract.events import AdmissionDeferred, LaneReady, RequestAdmitted, RequestCancelled
from lockstep.core.journal import snapshot
from lockstep.core.kv.adapters import NoAdapters
from lockstep.core.kv.hybrid import FullAttention
from lockstep.core.kv.no_tiers import NoTiers
from lockstep.core.kv.radix import NoRadixCache
from lockstep.core.kv.resource import ExtendShare, Resource, overrides
from lockstep.core.requests.budget import Deferral
from lockstep.core.requests.table import Request
from lockstep.core.scheduler import admission
from lockstep.core.scheduler.engine import Engine
from tests.core.test_engine import arrived, decoding, fold, run_to_end
from tests.support.driver.draw import random_actions, random_config
from tests.support.driver.run import run_actions
from tests.support.tagged_kv import TaggedKv

QUOTA = 3


class Tickets(Resource):
    """At most three requests have a ticket at once; a ticket belongs to a row."""

    name = "tickets"

    def __init__(self, view: Any) -> None:
        super().__init__(view)
        self.rows: set[int] = set()
        self.given = 0  # in total

    def fits(self, share: ExtendShare) -> Deferral | None:
        if len(self.rows) < QUOTA:
            return None
        return Deferral("adapter", limit=QUOTA, lasts=True)  # a reason that no engine without LoRA gives

    def take(self, row: int, request: Request) -> None:
        self.rows.add(row)
        self.given += 1

    def release(self, row: int) -> None:
        self.rows.remove(row)

    def dump(self) -> Any:
        return {"rows": sorted(self.rows), "given": self.given}

    def load(self, state: Any) -> None:
        self.rows, self.given = set(state["rows"]), state["given"]

    def check(self, rows: Mapping[int, Request | None]) -> None:
        if self.rows != rows.keys():
            raise InvariantError(f"S37: rows {sorted(self.rows)} have tickets, rows {sorted(rows)} are not free")


class LeakyTickets(Tickets):
    """A resource whose tickets are never released."""

    def release(self, row: int) -> None:
        pass


@pytest.fixture
def with_resource(monkeypatch: pytest.MonkeyPatch) -> Callable[[type[Resource]], None]:
    """Engines built from here on have this resource as well: the single line that a new resource requires."""

    def add(kind: type[Resource]) -> None:
        at = admission.RESOURCES.index(admission.RequestRows)
        monkeypatch.setattr(admission, "RESOURCES", (*admission.RESOURCES[:at], kind, *admission.RESOURCES[at:]))

    return add


def test_every_resource_is_in_the_loop_of_admission() -> None:
    def all_below(kind: type[Resource]) -> set[type[Resource]]:
        return {kind}.union(*map(all_below, kind.__subclasses__())) if kind.__subclasses__() else {kind}

    of_the_core = {kind for kind in all_below(Resource) - {Resource} if kind.__module__.startswith("lockstep.core.")}
    assert of_the_core == set(admission.RESOURCES)


def of_kind(engine: Engine, kind: type[Resource]) -> Any:
    (found,) = [one for one in engine.admission.resources if isinstance(one, kind)]
    return found


def small_config(**settings: Any) -> SchedConfig:
    return SchedConfig(page_size=2, pages=64, max_running_requests=8, overlap_depth=1, **settings)


def test_a_new_resource_defers_with_its_reason_and_comes_back_when_a_row_is_free(
    with_resource: Callable[[type[Resource]], None],
) -> None:
    with_resource(Tickets)
    engine = Engine(small_config())
    kv = TaggedKv(engine.config)
    tickets = of_kind(engine, Tickets)
    for number in range(QUOTA + 1):
        fold(engine, kv, arrived(number, prompt=4, max_new=3))
    step = fold(engine, kv, LaneReady(0))
    decided = [event for event in step.decided if isinstance(event, RequestAdmitted | AdmissionDeferred)]
    assert [event.request_id for event in decided] == list(range(QUOTA + 1))
    deferred = decided[-1]
    assert isinstance(deferred, AdmissionDeferred)
    assert (deferred.reason, deferred.limit) == ("adapter", QUOTA)
    assert engine.batch_is_full
    run_to_end(engine, kv)
    assert (tickets.given, tickets.rows) == (QUOTA + 1, set())
    invariants.check_quiescent(engine)


def test_admission_pauses_while_a_request_that_has_ended_keeps_its_row() -> None:
    """The batch in flight names the row. Admission is examined again once the row is free."""
    config = SchedConfig(page_size=2, pages=64, max_running_requests=2, request_rows=2, overlap_depth=1)
    engine, kv = decoding(config)
    fold(engine, kv, LaneReady(100))
    fold(engine, kv, RequestCancelled(100, 0))
    fold(engine, kv, arrived(2, time_us=100))
    fold(engine, kv, kv.finished(100))
    step = fold(engine, kv, LaneReady(100))
    (deferred,) = [event for event in step.decided if isinstance(event, AdmissionDeferred)]
    assert (deferred.request_id, deferred.reason, deferred.limit) == (2, "rows", 2)
    assert engine.batch_is_full
    fold(engine, kv, kv.finished(100))
    assert not engine.batch_is_full
    run_to_end(engine, kv)
    invariants.check_quiescent(engine)


def test_a_new_resource_is_part_of_snapshots(with_resource: Callable[[type[Resource]], None]) -> None:
    plain = snapshot.dump(Engine(small_config()))
    with_resource(Tickets)
    engine = Engine(small_config())
    kv = TaggedKv(engine.config)
    for number in range(2):
        fold(engine, kv, arrived(number, prompt=4, max_new=3))
    fold(engine, kv, LaneReady(0))
    image = snapshot.dump(engine)
    restored = snapshot.restore(image)
    assert snapshot.dump(restored) == image
    assert of_kind(restored, Tickets).rows == of_kind(engine, Tickets).rows != set()
    invariants.check(restored)
    assert b"tickets" in image
    assert b"resources" not in plain  # the snapshot of an engine without it is unchanged


def test_a_new_resource_passes_random_histories(with_resource: Callable[[type[Resource]], None]) -> None:
    with_resource(Tickets)
    waits = 0
    for seed in range(12):
        rng = random.Random(seed)
        driver = run_actions(random_config(rng), random_actions(rng, 60), replay=True)
        tickets = of_kind(driver.engine, Tickets)
        assert not tickets.rows
        waits += tickets.given > QUOTA
    assert waits


def test_a_resource_whose_release_is_left_out_is_noticed(with_resource: Callable[[type[Resource]], None]) -> None:
    with_resource(LeakyTickets)
    engine = Engine(small_config())
    kv = TaggedKv(engine.config)
    fold(engine, kv, arrived(0, prompt=4, max_new=1))
    run_to_end(engine, kv)
    with pytest.raises(InvariantError, match=r"S37: rows \[0\] have tickets, rows \[\] are not free"):
        invariants.check(engine)


def test_hooks_that_a_resource_does_not_override_are_not_called() -> None:
    engine = Engine(small_config())
    called = [type(one).__name__ for one in engine.admission.resources if overrides(one, "take")]
    assert called == []
    with_lora = Engine(small_config(max_loras=2))
    assert [type(one).__name__ for one in with_lora.admission.resources if overrides(one, "take")] == ["AdapterSlots"]


def test_an_engine_has_the_resources_that_its_settings_name() -> None:
    def names(**settings: Any) -> list[str]:
        return [type(one).__name__ for one in Engine(small_config(**settings)).admission.resources]

    always = names()
    assert always == [
        *("RunningLimit", "RequestRows", "ExtendBudget", "CachedPrefix", "KvReserve", "ChunkTokens", "DevicePages")
    ]
    assert set(names(max_loras=2)) - set(always) == {"AdapterSlots"}
    assert set(names(tiers=CacheTiers(host_pages=8))) - set(always) == {"TierMoves"}
    windows = HybridMemory(window_tokens=4, window_pages=32)
    assert set(names(hybrid=windows, chunked_prefill_size=8)) - set(always) == {"WindowPages"}
    states = HybridMemory(state_slots=16, checkpoint_tokens=8)
    assert set(names(hybrid=states, chunked_prefill_size=8)) - set(always) == {"StateSlots"}
    assert set(names(pp_size=2)) - set(always) == {"MicrobatchPlaces"}


def test_what_an_engine_does_not_have_is_a_null_object() -> None:
    memory = Engine(small_config(radix_cache=False)).memory
    kinds = [type(part) for part in (memory.radix, memory.adapters, memory.tiers, memory.hybrid)]
    assert kinds == [NoRadixCache, NoAdapters, NoTiers, FullAttention]
    assert not any(part.present for part in (memory.radix, memory.adapters, memory.tiers, memory.hybrid))
    assert [part.dump() or None for part in (memory.radix, memory.adapters, memory.tiers, memory.hybrid)] == [None] * 4
