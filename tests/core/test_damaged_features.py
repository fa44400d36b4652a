"""Each kind of damage to the state of a feature is found by `invariants.check`, with the name of the property.

The engines are those of scenarios, behind their last line. `test_invariants.py` damages requests, pages and the tree.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from msgspec.structs import replace

from lockstep.core import invariants
from lockstep.core.contract.errors import InvariantError
from lockstep.core.contract.events import LaneReady
from lockstep.core.kv.deferred import Lent
from lockstep.core.kv.operations import Operation
from lockstep.core.kv.state_pool import StatePool
from lockstep.core.kv.window_pool import WindowPool
from lockstep.core.scheduler.engine import Engine
from tests.support.scenario import Run, parse, play
from tests.support.small_ranks import asked, group, offer

Damage = Callable[[Engine], None]

ADAPTERS = """
config page_size=2 pages=16 overlap_depth=0 max_loras=2

load x
add a prompt=1..3 max_new=6 adapter=x
loaded x
step
"""
WINDOWS = """
config page_size=2 pages=20 overlap_depth=0 hybrid.window_tokens=5 hybrid.window_pages=20

add a prompt=1..9 max_new=4
step
"""
PAGES_OF_ONE_TOKEN = """
config page_size=1 pages=20 overlap_depth=0 hybrid.window_tokens=2 hybrid.window_pages=20

add a prompt=1..5 max_new=4
step
"""
FULL_RESERVE = """
config page_size=2 pages=40 overlap_depth=0 reserve=full hybrid.window_tokens=5 hybrid.window_pages=5

add a prompt=1..4 max_new=9
step
"""
STATES = """
config page_size=2 pages=20 overlap_depth=0 max_running_requests=2 hybrid.state_slots=4 hybrid.checkpoint_tokens=4

add a prompt=1..5 max_new=4
step
"""
STORED = """
config page_size=2 pages=8 overlap_depth=0 hybrid.state_slots=2 hybrid.checkpoint_tokens=4 \
tiers.host_pages=12 tiers.storage=yes tiers.load_tokens_min=1 tiers.prefetch_tokens_min=1

add a prompt=1..5 max_new=1
moved
run
moved
moved
add d prompt=31..35 max_new=1
moved
run
moved
moved
add c prompt=1..9 max_new=1
"""
LOADED = """
config page_size=1 pages=8 overlap_depth=0 tiers.host_pages=20 tiers.load_tokens_min=1 tiers.load_timeout_us=5ms

add a prompt=1..5 max_new=1
run
moved
add x prompt=21..28 max_new=1
run
moved
add b prompt=1..5 max_new=1
step
"""
LAYERS = """
config page_size=2 pages=40 overlap_depth=0 multiplexing.layers=4 \
multiplexing.sms=100 multiplexing.divisions=70:30:0,60:40:2 multiplexing.token_budget=16

add a prompt=1..4 max_new=9
step
"""
STAGES = """
config page_size=2 pages=16 pp_size=2 overlap_depth=0

add a prompt=1..3 max_new=3
step
add b prompt=11..13 max_new=3
step
step 0
finish
finish
"""
THREE_ON_STAGES = """
config page_size=2 pages=16 pp_size=2 overlap_depth=0 pp_max_micro_batch_size=2

add a prompt=1..3 max_new=1
step
add b prompt=11..13 max_new=3
add c prompt=21..23 max_new=3
step
"""
MEDIA = """
config page_size=2 pages=32 overlap_depth=0 encoder_cache_tokens=8

add a prompt=1..8 max_new=3 spans=2:5:image:cat:4
"""
SAMPLES = """
config page_size=2 pages=32 overlap_depth=0

add a prompt=1..7 max_new=2 n=3
"""
CHUNKS = """
config page_size=2 pages=16 overlap_depth=0 chunked_prefill_size=4

add a prompt=1..8 max_new=2
step
collect
"""
TRANSFERS = """
config page_size=2 pages=4 overlap_depth=0 role=decode num_reserved_decode_tokens=2

add a prompt=1..4 max_new=2 transfer_room=1
add b prompt=11..14 max_new=2 transfer_room=2
"""
BLOCKS = """
config page_size=4 pages=12 overlap_depth=0 diffusion.block_tokens=4 context_tokens_max=64

add a prompt=1..6 max_new=7
step
finish
"""
DRAFTS = """
config page_size=2 pages=32 overlap_depth=0 speculative_method=eagle num_speculative_tokens=2

add a prompt=1..3 max_new=9
step
finish
"""
IDLE = """
config page_size=2 pages=16 overlap_depth=0

add a prompt=1..5 max_new=2
run
"""
HYBRID_IDLE = """
config page_size=2 pages=16 overlap_depth=0 hybrid.window_tokens=5 hybrid.window_pages=8 hybrid.state_slots=4 \
hybrid.checkpoint_tokens=4

add a prompt=1..5 max_new=2
run
"""

IDLE_WINDOWS = """
config page_size=2 pages=20 overlap_depth=0 hybrid.window_tokens=5 hybrid.window_pages=20

add a prompt=1..9 max_new=2
run
"""
LOADING = """
config page_size=2 pages=12 overlap_depth=0 tiers.host_pages=20 tiers.load_tokens_min=1

add a prompt=1..9 max_new=1
run
moved
add b prompt=21..43 max_new=1
run
moved
add c prompt=1..9 max_new=1
step
cancel c
"""


def engine_behind(scenario: str) -> Engine:
    run = Run()
    play(parse(scenario), run)
    return run.engine


def window(engine: Engine) -> WindowPool:
    assert engine.memory.hybrid.window is not None
    return engine.memory.hybrid.window


def states(engine: Engine) -> StatePool:
    assert engine.memory.hybrid.states is not None
    return engine.memory.hybrid.states


def operation(engine: Engine, kind: str) -> Operation:
    return next(one for one in engine.memory.operations.values() if one.kind == kind)


def adapter_in_use_is_evicted(engine: Engine) -> None:
    engine.memory.adapters.slots[0].adapter = None


def more_adapters_than_slots(engine: Engine) -> None:
    engine.memory.adapters.slots.clear()


def adapter_on_two_slots(engine: Engine) -> None:
    first, second = engine.memory.adapters.slots
    second.adapter = first.adapter


def withdrawal_unanswered(engine: Engine) -> None:
    engine.memory.adapters.withdrawals["z"] = [7]


def window_of_a_free_page(engine: Engine) -> None:
    pool = window(engine)
    pool.window_of[engine.memory.pool.free_ids()[0]] = pool.pool.alloc(1)[0]


def window_that_a_batch_reads_is_unlocked(engine: Engine) -> None:
    """The batch in flight computes the prompt from its beginning."""
    pool = window(engine)
    pool.first[engine.requests[0].row] = 1
    pool.locks[engine.memory.table.pages[engine.requests[0].row, 0]] = 0
    pool.evictable += 1


def window_locked_twice(engine: Engine) -> None:
    window(engine).locks[engine.memory.table.pages[engine.requests[0].row, 2]] += 1


def reserved_window_page_lost(engine: Engine) -> None:
    """A row may have three window pages more than promised."""
    window(engine).row_pages_max += 3


def free_row_owes_a_checkpoint(engine: Engine) -> None:
    states(engine).owed.add(engine.memory.table.free_rows[0])


def host_checkpoint_moved_away(engine: Engine) -> None:
    """The checkpoint that a prefetch counts on is that of another cached host page."""
    assert engine.memory.tiers.blocks is not None
    pool, prefetch = engine.memory.tiers.blocks.pools["state"], operation(engine, "prefetch")
    assert prefetch.host_handle is not None
    (source,) = engine.memory.tiers.host.pages_of(prefetch.host_handle)[prefetch.blocks[0].counted]
    other = int(np.setdiff1d(engine.memory.tiers.host.nodes()[-1].pages, (pool.of >= 0).nonzero()[0])[0])
    pool.of[other], pool.of[source] = pool.of[source], -1


def waits_for_an_operation_that_ended(engine: Engine) -> None:
    (candidate,) = engine.memory.tiers.candidates.values()
    candidate.operation = 0


def ended_request_has_a_prefetch(engine: Engine) -> None:
    candidates = engine.memory.tiers.candidates
    candidates[99] = candidates[2]


def free_host_page_is_that_of_a_prefetch(engine: Engine) -> None:
    engine.memory.tiers.pool._stack[-1] = operation(engine, "prefetch").host_pages[0]


def free_host_state_is_that_of_a_prefetch(engine: Engine) -> None:
    assert engine.memory.tiers.blocks is not None
    engine.memory.tiers.blocks.pools["state"].pool.free(operation(engine, "prefetch").blocks[0].host)


def host_path_held_for_ever(engine: Engine) -> None:
    load = operation(engine, "load")
    assert load.host_handle is not None
    tiers = engine.memory.tiers
    tiers.host.lock(tiers.host.match("", load.tokens, load.stop))


def load_reads_its_pages_in_another_order(engine: Engine) -> None:
    load = operation(engine, "load")
    load.host_pages = load.host_pages[::-1].copy()


def read_mark_of_an_operation_that_ended(engine: Engine) -> None:
    engine.memory.tiers.loading[operation(engine, "load").host_pages[1]] = 0


def free_page_has_uses(engine: Engine) -> None:
    engine.memory.tiers.uses[engine.memory.pool.free_ids()[0]] = 1


def tokens_of_an_operation_cut(engine: Engine) -> None:
    operation(engine, "prefetch").tokens = operation(engine, "prefetch").tokens[:-4]


def more_parts_than_launches(engine: Engine) -> None:
    engine.multiplexer.depth = -1


def places_exchanged(engine: Engine) -> None:
    members = engine.microbatches.members
    members[0], members[1] = members[1], members[0]


def place_of_a_running_request_lost(engine: Engine) -> None:
    del engine.microbatches.members[0]


def taken_places_miscounted(engine: Engine) -> None:
    engine.microbatches.places[0] += 1


def fewer_places_than_members(engine: Engine) -> None:
    engine.microbatches.size = 1


def position_in_the_wrong_microbatch(engine: Engine) -> None:
    first, second = engine.microbatches.states
    first.positions, second.positions = second.positions[:1], second.positions[1:]


def both_batches_of_one_microbatch(engine: Engine) -> None:
    second = engine.in_flight[1]
    second.plan = replace(second.plan, microbatch=0)


def place_of_a_sampled_request_elsewhere(engine: Engine) -> None:
    """The token in flight is the last of a, so a decodes in no microbatch."""
    engine.microbatches.members[0] = 1
    engine.microbatches.places = [0, 3]
    engine.microbatches.size = 3


def output_pinned_for_ever(engine: Engine) -> None:
    engine.media.pins[99] = {}


def output_of_a_batch_dropped(engine: Engine) -> None:
    engine.media.deferred.append((0, [b"none"]))


def follows_a_request_that_ended(engine: Engine) -> None:
    samples = engine.prerequisites.waiting_samples
    samples[99] = samples.pop(0)


def split_prompt_at_its_end(engine: Engine) -> None:
    assert engine.prefilling is not None
    engine.prefilling.computed = 8


def waiting_request_is_computed(engine: Engine) -> None:
    engine.waiting[0].computed = 2


def transfer_that_waits_for_pages_left_its_queue(engine: Engine) -> None:
    engine.transfers.line.remove(1)


def transfer_with_pages_waits_for_them_too(engine: Engine) -> None:
    engine.transfers.line.append(0)


def pass_over_a_finished_block(engine: Engine) -> None:
    """The first block has two tokens of the prompt and two masks, which take at most three passes."""
    engine.diffusion.passes[engine.running_batch.rows] = 4


def length_that_a_member_has_reached(engine: Engine) -> None:
    _, (position,) = engine.all_running
    engine.requests[0].max_new_tokens = int(position) + 1 - engine.requests[0].prompt_tokens


def drafts_of_a_request_with_a_stop_text(engine: Engine) -> None:
    engine.requests[0].watches_text = True


@pytest.mark.parametrize(
    ("found", "scenario", "damage"),
    [
        ("S25: .* is in use but on no slot of the device", ADAPTERS, adapter_in_use_is_evicted),
        ("S25: .* are in use, max_loras 0", ADAPTERS, more_adapters_than_slots),
        ("S25 adapters on the device: 1, expected 2", ADAPTERS, adapter_on_two_slots),
        ("L8: no request needs 'z' any more", ADAPTERS, withdrawal_unanswered),
        ("S1: pages .* have windows, but are neither held nor cached", WINDOWS, window_of_a_free_page),
        ("S5: a freed windows below page 1; .* 5, .0. are", PAGES_OF_ONE_TOKEN, window_that_a_batch_reads_is_unlocked),
        (r"S9: locks of windows of pages \[2\] are \[2\], held \[1\]$", WINDOWS, window_locked_twice),
        ("S24: window pages held and reserved exceed the pool by 1", FULL_RESERVE, reserved_window_page_lost),
        (r"S1: rows \[.\] read, left or owe checkpoints", STATES, free_row_owes_a_checkpoint),
        ("S5: prefetch 6 needs states of host pages", STORED, host_checkpoint_moved_away),
        ("S32: prefetch 6 has .* bytes of tokens", STORED, tokens_of_an_operation_cut),
        ("L7: r2 waits for operation 0, which has ended", STORED, waits_for_an_operation_that_ended),
        ("S15: r99 does not wait, but is a candidate of the tiers", STORED, ended_request_has_a_prefetch),
        ("S1 host pages: 4 belongs to free and to prefetch 6", STORED, free_host_page_is_that_of_a_prefetch),
        ("S1 states of the host: . belongs to free and to on", STORED, free_host_state_is_that_of_a_prefetch),
        ("S33: device pages that are not cached have uses", STORED, free_page_has_uses),
        ("S9: handles by node are recorded as", LOADED, host_path_held_for_ever),
        (r"S5: load 2 reads host pages \[3, 2, 1, 0\], its path", LOADED, load_reads_its_pages_in_another_order),
        ("S32: host page 1 is marked as being read by 0", LOADED, read_mark_of_an_operation_that_ended),
        ("S40: 0 decodes and 1 parts of prompts in flight", LAYERS, more_parts_than_launches),
        ("S30: . decodes in microbatch ., its place is in another", STAGES, places_exchanged),
        (
            r"S30 requests with a place: \[1, 2\], expected \[0, 1, 2\]",
            THREE_ON_STAGES,
            place_of_a_running_request_lost,
        ),
        (r"S30 places: \[2, 1\], expected \[1, 1\]", STAGES, taken_places_miscounted),
        ("S24: 2 requests in a microbatch of 1", THREE_ON_STAGES, fewer_places_than_members),
        ("S30 positions of microbatch 0: 1, expected 0", f"{THREE_ON_STAGES}step 0", position_in_the_wrong_microbatch),
        ("S24: 2 batches of microbatch 0 in flight", THREE_ON_STAGES, both_batches_of_one_microbatch),
        ("S30: batch 0 of microbatch 0 samples a, of another", THREE_ON_STAGES, place_of_a_sampled_request_elsewhere),
        ("D11: r99 has ended and holds encoder output", MEDIA, output_pinned_for_ever),
        ("S5: encoder output that batch 0 may read is not there", MEDIA, output_of_a_batch_dropped),
        ("S18: a stopped its chunk at 8 of 8", CHUNKS, split_prompt_at_its_end),
        ("S6: a waits but holds row -1, 2 positions computed", SAMPLES, waiting_request_is_computed),
        ("L1: 2 samples follow r99, which has ended", SAMPLES, follows_a_request_that_ended),
        (r"S15 queues of transfers: \[\], expected \[1\]", TRANSFERS, transfer_that_waits_for_pages_left_its_queue),
        (r"S15 queues of transfers: \[0, 1\], expected \[1\]", TRANSFERS, transfer_with_pages_waits_for_them_too),
        ("S39: a has had 4 passes of the block that ends at 8", BLOCKS, pass_over_a_finished_block),
        ("S7: a may be at its end .*, and still decodes", f"{DRAFTS}collect", length_that_a_member_has_reached),
        ("S23: batch 1 verifies drafts of a, which must have none", DRAFTS, drafts_of_a_request_with_a_stop_text),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_damage_to_a_feature_is_named(found: str, scenario: str, damage: Damage) -> None:
    engine = engine_behind(scenario)
    invariants.check(engine)
    damage(engine)
    with pytest.raises(InvariantError, match=f"^{found}"):
        invariants.check(engine)


@pytest.mark.parametrize(("kind", "scenario"), [("load", LOADED), ("prefetch", STORED)])
def test_an_unlimited_wait_is_named_where_the_settings_limit_it(kind: str, scenario: str) -> None:
    engine = engine_behind(scenario)
    step = engine.step(LaneReady(1))
    invariants.check_wake(engine, step)
    (candidate,) = engine.memory.tiers.candidates.values()
    candidate.due_us = None
    with pytest.raises(InvariantError, match=f"^L7: r2 waits for {kind} . without a due time"):
        invariants.check_wake(engine, step)


@pytest.mark.parametrize(
    ("field", "damaged"), [("tokens", (5, 0)), ("tokens", (0, 4)), ("logit_rows", (2, 0)), ("logit_rows", (0, 1))]
)
def test_damage_to_the_counts_that_ranks_agreed_on_is_named(field: str, damaged: tuple[int, int]) -> None:
    """The first of two ranks extends a prompt of four tokens, the second is idle."""
    made = group(overlap_depth=0)
    made.arrive(0, asked(0))
    offer(made)
    engine = made.members[0].engine
    (batch,) = engine.in_flight
    assert batch.plan.ranks is not None
    assert (batch.plan.ranks.tokens, batch.plan.ranks.logit_rows) == ((4, 0), (1, 0))
    batch.plan = replace(batch.plan, ranks=replace(batch.plan.ranks, **{field: damaged}))
    with pytest.raises(InvariantError, match=r"^S29: batch 0 has counts \(4, 1, 1, 0\), the ranks agreed on"):
        invariants.check(engine)


def row_lost(engine: Engine) -> None:
    engine.memory.table.free_rows.pop()


def page_freed_twice(engine: Engine) -> None:
    stack = engine.memory.pool._stack
    stack[-1] = stack[-2]


def window_left_locked(engine: Engine) -> None:
    pool = window(engine)
    pool.quarantined[0] = (pool.window_of >= 0).nonzero()[0][:1].astype(np.int32)
    pool.lock(pool.quarantined[0])


def slots_of_a_transfer_left(engine: Engine) -> None:
    states(engine).incoming[0] = [int(states(engine).pool.alloc(1)[0])]


@pytest.mark.parametrize(
    ("found", "damage"),
    [
        ("L9 locked window pages: 1, expected 0", window_left_locked),
        ("L9 slots of state: 3, expected 4", slots_of_a_transfer_left),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_blocks_that_are_still_held_at_rest_are_named(found: str, damage: Damage) -> None:
    engine = engine_behind(HYBRID_IDLE)
    invariants.check_quiescent(engine)
    damage(engine)
    invariants.check(engine)
    with pytest.raises(InvariantError, match=f"^{found}"):
        invariants.check_quiescent(engine)


@pytest.mark.parametrize("damage", [row_lost, page_freed_twice], ids=lambda one: one.__name__)
def test_damage_is_found_at_rest_too(damage: Damage) -> None:
    engine = engine_behind(IDLE)
    invariants.check_quiescent(engine)
    damage(engine)
    with pytest.raises(InvariantError):
        invariants.check_quiescent(engine)
    with pytest.raises(InvariantError):
        invariants.self_check(engine)


def test_a_row_that_is_still_lent_at_rest_is_named() -> None:
    engine = engine_behind(IDLE)
    engine.memory.deferred.lent[0] = Lent(0, [])
    with pytest.raises(InvariantError, match=r"^L9: `lent` is not empty at rest"):
        engine.memory.check_at_rest()


def test_a_window_that_is_still_locked_at_rest_is_named() -> None:
    engine = engine_behind(IDLE_WINDOWS)
    engine.memory.check_at_rest()
    window(engine).locks[0] = 1
    with pytest.raises(InvariantError, match=r"^L9 locked window pages: 1, expected 0"):
        engine.memory.check_at_rest()


def test_pages_that_a_load_without_a_request_fills_are_counted_at_rest() -> None:
    memory = engine_behind(LOADING).memory
    assert memory.operations.loading_pages == 4
    memory.check_at_rest()
    memory.operations.clear()
    with pytest.raises(InvariantError, match=r"^L9 free pages and cached pages: 8, expected 12"):
        memory.check_at_rest()


def test_whatever_is_empty_at_rest_is_checked_for_every_component() -> None:
    engine = engine_behind(IDLE)
    names = [(component, name) for component in engine.components for name in component.EMPTY_AT_REST]
    assert names
    for component, name in names:
        component.check_at_rest()
        was = getattr(component, name)
        setattr(component, name, ["left"])
        with pytest.raises(InvariantError, match=f"^L9: `{name}` is not empty at rest: \\['left'\\]"):
            component.check_at_rest()
        setattr(component, name, was)
