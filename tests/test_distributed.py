"""Prefill and decode on different engines: failures of other engines, equivalence, random histories with faults.

Every engine's invariants are checked after every event, every cell that is read is checked against its prefix, and
every part that moves against what both engines keep (`tests/support/fleet/`).
"""

from __future__ import annotations

import random
from itertools import product
from typing import Any

import numpy as np
import pytest

from lockstep.core.contract.commands import StreamTokens
from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.errors import ContractError
from lockstep.core.contract.events import (
    BatchFinished,
    Drain,
    FinishReason,
    Grammar,
    LaneReady,
    Pause,
    ReleaseMemory,
    RequestArrived,
    Resume,
    SamplingParams,
    SwitchRole,
    TokenRuns,
    TransferAdvanced,
    UpdateWeights,
)
from tests.support.fleet.fleet import Fleet
from tests.support.handover import SMALL, asked, fleet, free_pages, hear, state, to_receiving
from tests.support.served import Answer, Asked, serve

# ------------------------------------------------------------------------------------------------- states of a transfer


def test_request_goes_its_way() -> None:
    made = fleet()
    wire = made.arrive(asked(0, prompt=7, max_new=3))
    assert (state(made, "p0"), state(made, "d0")) == ("bootstrap", "receiving")
    assert not made.ready("p0")
    hear(made, "accepted", "p0")
    assert state(made, "p0") == "waiting"
    assert made.ready("p0")
    assert state(made, "p0") == "sending", "a chunk is on its way while the prompt is not done"
    assert made.ready("p0")
    assert state(made, "p0") == "in_flight"
    made.finish("p0")
    made.move(wire)
    made.finish("p0")
    assert made.members["p0"].engine.requests, "it stays until the writer has ended"
    made.move(wire)
    hear(made, "done", "p0")
    assert not made.members["p0"].engine.requests
    hear(made, "done", "d0")
    assert state(made, "d0") == "ready"
    assert made.sent[0] == [1000], "the first token is streamed when it comes"
    assert made.ready("d0")
    made.settle()
    assert made.answers[0] == asked(0, max_new=3).answer


def test_chunks_move_before_the_prompt_is_computed() -> None:
    made = fleet(chunked_prefill_size=2)
    wire = made.arrive(asked(0, prompt=9))
    hear(made, "accepted", "p0")
    for _ in range(3):
        made.ready("p0")
        made.finish("p0")
        made.move(wire)
    assert wire.moved == 3
    assert state(made, "p0") == "sending"
    made.settle()
    assert made.answers[0] == asked(0).answer


def test_only_what_the_decode_engine_lacks_is_sent() -> None:
    made = fleet()
    prompt = tuple(range(100, 111))
    made.arrive(Asked(0, prompt, 3))
    made.settle()
    wire = made.arrive(Asked(1, (*prompt, 7, 8), 3))
    made.settle()
    assert wire.receive is not None
    assert wire.receive.start_tokens == 10
    assert [(part.command.start_tokens, part.command.stop_tokens) for part in wire.parts] == [(10, 13)]
    assert made.answers[1] == Asked(1, prompt, 3).answer


def test_pages_are_given_when_the_prompt_is_computed() -> None:
    made = fleet(transfer_allocation="prefill_complete")
    made.arrive(asked(0))
    assert (state(made, "p0"), state(made, "d0")) == ("waiting", "awaited")
    assert made.ready("p0")
    made.finish("p0")
    assert state(made, "d0") == "awaited"
    hear(made, "offered", "d0")
    assert state(made, "d0") == "receiving"
    made.settle()
    assert made.answers[0] == asked(0).answer


@pytest.mark.parametrize(
    ("one", "reason"), [(asked(0, max_new=1), "length"), (asked(0, max_new=5, stops=(0,)), "stop")]
)
def test_first_token_may_be_the_last(one: Asked, reason: FinishReason) -> None:
    made = fleet()
    made.arrive(one)
    made.settle()
    assert made.answers[0] == one.answer
    assert made.answers[0].reason == reason
    assert made.members["d0"].kv.forwards == 0


@pytest.mark.parametrize(
    ("answer", "sent"),
    [({"text_stop": True}, "text_stop"), ({"text_held": True}, "")],
)
def test_text_of_the_first_token_is_looked_at(answer: dict[str, Any], sent: str) -> None:
    made = fleet()
    made.arrive(asked(0), stop_texts=("x",))
    engine = made.members["d0"].engine
    event = TransferAdvanced(0, 0, "p0", 0, 0, "done", first_token=5, **answer)
    commands = engine.step(event).commands
    streamed = [command for command in commands if type(command).__name__ == "StreamTokens"]
    ended = [command.reason for command in commands if type(command).__name__ == "FinishRequest"]  # type: ignore[union-attr]
    assert (len(streamed), ended) == ((1, ["text_stop"]) if sent else (0, []))


def test_first_token_of_a_request_that_does_not_stream_is_sent_with_its_second() -> None:
    made = fleet(force_stream_interval=2)
    made.arrive(asked(0, stream=False))
    engine = made.members["d0"].engine
    commands = engine.step(TransferAdvanced(0, 0, "p0", 0, 0, "done", first_token=5)).commands
    assert not any(isinstance(command, StreamTokens) for command in commands)
    plan = engine.step(LaneReady(0)).launched()
    assert plan is not None
    (command,) = engine.step(BatchFinished(0, plan.batch_id, np.array([6], np.int32).tobytes())).commands
    assert isinstance(command, StreamTokens)
    assert (command.offsets.tolist(), command.tokens.tolist()) == ([0], [5, 6])


# -------------------------------------------------------------------------------------------------- equal to one engine


@pytest.mark.parametrize("seed", range(12))
def test_answers_are_those_of_one_engine(seed: int) -> None:
    """Over page sizes, chunks, overlap, allocation, radix cache and retractions; two engines of each kind."""
    rng = random.Random(seed)
    requests = [
        Asked(
            key,
            tuple(range(100 * rng.randint(1, 2), 100 * rng.randint(3, 4)))[: rng.randint(1, 12)],
            rng.randint(1, 8),
            stops=tuple(rng.sample(range(8), rng.choice([0, 0, 1]))),
            stream=rng.random() < 0.8,
        )
        for key in range(8)
    ]
    alone = serve(SchedConfig(page_size=2, pages=200), requests)
    cells = list(product(("early", "prefill_complete"), (True, False), (0, 1, 2), (0, 3)))
    for allocation, radix, depth, retract in rng.sample(cells, 4):
        made = fleet(
            prefills=2,
            decodes=2,
            restores=False,
            page_size=rng.choice([1, 2, 4]),
            pages=24,
            transfer_allocation=allocation,
            radix_cache=radix,
            overlap_depth=depth,
            retract_every=retract,
            chunked_prefill_size=rng.choice([4, 8, None]),
            schedule_conservativeness=0.02,
        )
        for one in requests:
            made.arrive(one, f"p{rng.randrange(2)}", f"d{rng.randrange(2)}")
            for _ in range(rng.randrange(6)):
                made.do_something(rng)
        made.settle(rng)
        assert made.answers == alone.answers
        made.replay()


# ------------------------------------------------------------------------------------- script 3: two loads, seven pages


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("reserved", [0, 1, 512])
def test_two_loads_that_fill_the_pool_do_not_wait_for_each_other(order: tuple[int, int], reserved: int) -> None:
    """Script 3, F20: A needs four pages and one more, B three and one more, of seven."""
    made = fleet(page_size=2, pages=7, num_reserved_decode_tokens=reserved)
    for key, prompt in ((0, 8), (1, 6)):
        made.arrive(asked(key, prompt=prompt, max_new=3))
    rng = random.Random(0)
    for _ in range(100):
        first = [told for told in made.told if told.wire.room == order[0]]
        if first:
            made.tell(first[0])
        made.do_something(rng)
    made.settle()
    for key in (0, 1):
        assert made.answers[key] == asked(key, max_new=3).answer
    assert not made.marks["d retracted (pages)"]


# --------------------------------------------------------------------- script 14: locks are released without an arrival


@pytest.mark.parametrize("ends", ["done", "failed"])
def test_what_a_cancelled_transfer_held_comes_back_without_an_arrival(ends: str) -> None:
    """Script 14: a cancelled transfer holds pages and a lock; one decode runs to the edge of the pool."""
    made = fleet(page_size=2, pages=12, num_reserved_decode_tokens=0, transfer_timeout_us=None)
    made.arrive(asked(0, prompt=4, max_new=18))
    made.settle_until(lambda: made.sent[0] != [])
    wire = made.arrive(asked(1, prompt=6, max_new=2))
    assert state(made, "d0", 1) == "receiving"
    made.cancel(wire, "d0")
    while made.ready("d0") or made.finish("d0"):
        pass
    assert 0 not in made.answers, "it needs the pages that are quarantined, and waits for them"
    if ends == "done":
        made.settle_until(lambda: wire.outcome is not None, stops=False)
    made.settle()
    assert made.answers[0] == asked(0, max_new=18).answer


# ---------------------------------------------------------------------------- script 15: late, never and double writers


@pytest.mark.parametrize("writer", ["late", "never", "twice"])
@pytest.mark.parametrize("side", ["p0", "d0"])
def test_newcomer_never_sees_cells_of_a_cancelled_transfer(writer: str, side: str) -> None:
    """Script 15: A is cancelled during its transfer, B arrives, and A's writer ends late, never or twice."""
    made = fleet(page_size=2, pages=8, num_reserved_decode_tokens=0)
    to_receiving(made, asked(0, prompt=6))
    first = made.wires[0]
    pages = set(made.members["d0"].engine.transfers.all[0].pages.tolist())  # type: ignore[union-attr]
    made.cancel(first, side)
    made.arrive(asked(1, prompt=6, max_new=3))
    made.clock(10_000_000)
    if side == "d0":
        assert state(made, "d0") == "quarantined"
        assert pages.isdisjoint(free_pages(made, "d0")), "time lifts no quarantine"
    if writer == "never":
        made.link_down("p0", "d0")
    else:
        made.move(first)
        if writer == "twice":
            made.settle()
            for again in range(len(made.heard)):
                made.repeat(again)
    made.settle()
    if writer == "never":
        assert made.answers[1].reason == "transfer"
        made.arrive(asked(2, prompt=6, max_new=3))
        made.settle()
    assert (
        made.answers[2 if writer == "never" else 1].tokens
        == asked(2 if writer == "never" else 1, max_new=3).answer.tokens
    )


# ------------------------------------------------------------------------------------------ script 18: one core decides


def test_equal_facts_give_equal_decisions_whatever_the_clock() -> None:
    """Script 18, S28: a time-out is an event of the one core's journal; every engine that folds it decides alike."""
    made = fleet(transfer_timeout_us=1_000)
    to_receiving(made, asked(0))
    made.clock(999)
    assert state(made, "d0") == "receiving"
    made.clock(1)
    assert (state(made, "d0"), made.answers[0].reason) == ("quarantined", "transfer")
    made.settle()
    made.replay()


# ------------------------------------------------------------------------------- C20: late writes of a batch in flight


@pytest.mark.parametrize("radix", [False, True])
def test_c20_pages_that_a_batch_in_flight_writes_are_not_received_into(radix: bool) -> None:
    """VL#45357, VA#14055: A ends by a stop token in batch n, while n + 1 writes A's next cell; B's KV needs A's pages.

    A is over at once; its pages have no owner until n + 1 is delivered, and no transfer is given them before.
    """
    made = fleet(page_size=2, pages=5, num_reserved_decode_tokens=0, radix_cache=radix)
    made.arrive(asked(0, prompt=6, max_new=6, stops=(1,)))
    made.settle_until(lambda: state(made, "d0") == "ready")
    assert made.ready("d0")
    assert made.ready("d0")
    held = set(range(5)) - free_pages(made, "d0")
    later = made.arrive(asked(1, prompt=8, max_new=2))
    assert made.finish("d0")
    assert made.answers[0] == asked(0, max_new=6, stops=(1,)).answer
    assert [batch.plan.mode for batch in made.members["d0"].engine.in_flight] == ["decode"]
    assert not made.ready("d0")
    assert later.receive is None, "pages of A are written yet"
    assert made.finish("d0")
    made.ready("d0")
    assert later.receive is not None
    assert held & set(later.receive.pages.tolist()), "B's KV goes where A's was"
    made.settle()
    assert made.answers[1] == asked(1, max_new=2).answer
    made.replay()


# ------------------------------------------------------------------------------------------------ scenario F, by number


def test_f4_slots_come_back_from_every_state() -> None:
    made = fleet(transfer_slots=2)
    for key in range(8):
        wire = made.arrive(asked(key))
        for _ in range(key):
            made.do_something(random.Random(key))
        made.cancel(wire, "p0" if key % 2 else "d0")
        made.settle()
    for name in ("p0", "d0"):
        transfers = made.members[name].engine.transfers
        assert transfers.hands_over
        assert sorted(transfers.free_slots) == [0, 1]


def test_f8_f10_dead_prefill_engine_holds_up_no_request() -> None:
    made = fleet(prefills=2, transfer_slots=4)
    dead = [made.arrive(asked(key), "p0", late="p0") for key in range(2)]
    made.arrive(asked(2), "p1")
    made.settle_until(lambda: 2 in made.answers)
    assert made.answers[2] == asked(2).answer
    made.link_down("p0", "d0")
    for wire in dead:
        made.arrive_at(wire, "p0")
    made.settle()
    assert {made.answers[key].reason for key in (0, 1)} == {"transfer"}


def test_f12_refusal_by_the_prefill_engine_reaches_the_decode_engine() -> None:
    made = Fleet(
        [SchedConfig(role="prefill", max_input_tokens=5, **SMALL)], [SchedConfig(role="decode", **SMALL)], restores=True
    )
    made.arrive(asked(0, prompt=6))
    made.settle()
    assert made.answers[0] == Answer("transfer", ())
    assert made.marks["p ended (too_long)"] == 1


def test_f14_more_important_requests_get_pages_first() -> None:
    made = fleet(schedule_policy="priority", pages=8, num_reserved_decode_tokens=0)
    made.arrive(asked(0, prompt=12, max_new=3), priority=0)
    for key, priority in ((1, 0), (2, 5), (3, 9)):
        made.arrive(asked(key, prompt=12, max_new=3), priority=priority)
    made.settle()
    assert list(made.answers) == [0, 3, 2, 1]


def test_f16_request_that_is_cancelled_while_its_batch_runs_is_freed_once() -> None:
    made = fleet(overlap_depth=2)
    wire = made.arrive(asked(0, prompt=10))
    hear(made, "accepted", "p0")
    while made.ready("p0"):
        pass
    made.cancel(wire, "p0")
    made.settle()
    assert made.answers[0].reason == "transfer"


@pytest.mark.parametrize(
    "action", [Pause("retract"), UpdateWeights(1, "w", "retract"), UpdateWeights(1, "w", "in_place")]
)
def test_f18_received_kv_that_is_given_up_is_computed_again(action: Any) -> None:
    made = fleet(max_running_requests=1)
    for key in range(2):
        made.arrive(asked(key, max_new=6))
    made.settle_until(lambda: state(made, "d0", 1) == "ready" and len(made.sent[0]) > 1)
    made.control("d0", action)
    made.control("d0", Resume())
    assert state(made, "d0", 1) == "over" or isinstance(action, UpdateWeights)
    made.settle()
    for key in range(2):
        assert made.answers[key] == asked(key, max_new=6).answer


def test_f22_request_whose_grammar_never_compiles_parks_alone() -> None:
    made = fleet()
    wire = made.arrive(asked(0), grammar=Grammar("regex", "a", b"a"))
    made.arrive(asked(1))
    made.settle_until(lambda: 1 in made.answers)
    assert made.answers[1] == asked(1).answer
    made.cancel(wire, "d0")
    made.settle()


def test_f24_memory_is_not_released_below_a_transfer() -> None:
    made = fleet()
    to_receiving(made, asked(0))
    for name in ("p0", "d0"):
        assert made.control(name, ReleaseMemory(("kv_cache",))) is None
    assert not made.members["d0"].engine.maintenance.jobs[0].ordered
    made.move(made.wires[0])
    hear(made, "done", "p0")
    assert made.members["p0"].engine.maintenance.jobs[0].ordered
    hear(made, "done", "d0")
    assert made.ready("d0"), "a request that is ready runs to its end first"


# ------------------------------------------------------------------------------------------------------------ the rules


def test_reserve_is_left_to_each_that_runs_or_will() -> None:
    made = fleet(pages=40, page_size=1, num_reserved_decode_tokens=8)
    for key in range(3):
        made.arrive(asked(key, prompt=6, max_new=8))
    # the first is alone; the second needs 7 + 8 of 33 - 8 left; the third 7 + 8 of 26 - 16
    assert [state(made, "d0", key) for key in range(3)] == ["receiving", "receiving", "preallocating"]
    made.settle()


@pytest.mark.parametrize("failure", ["fail", "recompute"])
def test_all_output_is_reserved_where_that_is_the_policy(failure: str) -> None:
    """With reserve full no request is retracted for pages, whether its prompt is received or computed here."""
    made = fleet(restores=False, reserve="full", num_reserved_decode_tokens=0, transfer_failure=failure)
    for key in range(3):
        made.arrive(asked(key, max_new=28))
    if failure == "recompute":
        made.settle_until(lambda: state(made, "d0") == "receiving")
        made.link_down("p0", "d0")
    made.settle()
    assert [made.answers[key].reason for key in range(3)] == (["length"] * 3)
    assert not made.marks["d retracted (pages)"]


def test_cached_pages_that_a_request_keeps_are_not_free_for_the_rest_of_its_prompt() -> None:
    """Of 12 pages, 4 cache the prompt of the first request, and the second gets 4.

    The third begins with the prompt of the first, keeps these pages and needs 5 more: it waits for the second.
    """
    made = fleet(pages=12, num_reserved_decode_tokens=0)
    made.arrive(asked(0, prompt=8, max_new=2))
    made.settle()
    made.arrive(asked(1, prompt=6))
    third = Asked(2, tuple(range(100, 117)), 2)
    wire = made.arrive(third)
    assert [state(made, "d0", key) for key in (1, 2)] == ["receiving", "preallocating"]
    made.settle()
    assert wire.receive is not None
    assert wire.receive.start_tokens == 8
    assert [made.answers[key] for key in (1, 2)] == [asked(1).answer, third.answer]


def test_reserve_of_all_output_accepts_as_many_as_fit() -> None:
    """With reserve full and 12 pages, three requests of four pages each are received at once, and a fourth waits."""
    made = fleet(reserve="full", pages=12, page_size=2)
    for key in range(4):
        made.arrive(asked(key, prompt=4, max_new=4))
    assert [state(made, "d0", key) for key in range(4)] == ["receiving"] * 3 + ["preallocating"]
    made.settle()
    assert [made.answers[key] for key in range(4)] == [asked(key).answer for key in range(4)]


def test_received_request_waits_while_as_many_run_as_may() -> None:
    """The limit is one request. The request table has a second row, for a batch that outlives its request."""
    made = fleet(max_running_requests=1, overlap_depth=1)
    for key in range(2):
        made.arrive(asked(key, max_new=6))
    made.settle_until(lambda: 0 in made.answers)
    assert state(made, "d0", 1) == "ready"
    assert made.sent[1] == [2000], "its first token came with its KV, and it has decoded nothing"
    assert made.ready("d0")
    made.settle()
    assert made.answers[1] == asked(1, max_new=6).answer


def test_received_request_waits_for_a_row_that_a_batch_in_flight_names() -> None:
    """A request ends by a stop token while its next batch is in flight, and the request table has one row."""
    made = fleet(max_running_requests=1, request_rows=1, overlap_depth=1)
    made.arrive(asked(0, max_new=12, stops=(8,)))
    made.arrive(asked(1))
    made.settle_until(lambda: state(made, "d0", 1) == "ready")
    while 0 not in made.answers:
        while made.ready("d0"):
            pass
        made.finish("d0")
    assert not made.ready("d0"), "no request runs, but the row is not free"
    assert state(made, "d0", 1) == "ready"
    made.finish("d0")
    assert made.ready("d0")
    made.settle()
    assert made.answers[1] == asked(1).answer


def test_no_new_request_is_given_pages_while_a_retracted_one_waits() -> None:
    made = fleet(pages=16, num_reserved_decode_tokens=0)
    for key in range(2):
        made.arrive(asked(key, max_new=12))
    made.settle_until(lambda: len(made.members["d0"].engine.running_batch.requests) == 2)
    made.control("d0", Pause("retract"))
    made.arrive(asked(2))
    made.control("d0", Resume())
    assert state(made, "d0", 2) == "preallocating"
    made.settle()
    assert made.answers[2] == asked(2).answer


def test_failed_transfer_is_computed_here_if_that_is_wanted() -> None:
    made = fleet(transfer_failure="recompute")
    to_receiving(made, asked(0))
    made.link_down("p0", "d0")
    made.settle()
    assert made.answers[0] == asked(0).answer


def test_what_a_batch_in_flight_is_still_to_compute_is_sent_all_the_same() -> None:
    """A decode engine computes a prompt, whose KV is shared at once; another one begins alike, and the batch fails."""
    made = fleet(same_step_sharing=True, transfer_failure="recompute", chunked_prefill_size=16)
    first = made.arrive(asked(0, prompt=10))
    made.drop(first)
    hear(made, "link_down", "d0")
    assert made.ready("d0")
    second = made.arrive(Asked(1, (*first.asked.prompt, 7, 8), 4))
    assert second.receive is not None
    assert second.receive.start_tokens == 0
    made.finish("d0", error="the device says no")
    made.settle()
    assert made.answers[0].reason == "error"
    assert made.answers[1] == second.wanted
    third = made.arrive(Asked(2, (*first.asked.prompt, 9), 4))
    assert third.receive is not None
    assert third.receive.start_tokens == 10, "what has come is cached"
    made.settle()


def test_kv_of_other_weights_is_no_good() -> None:
    made = fleet()
    to_receiving(made, asked(0))
    made.control("d0", UpdateWeights(1, "w", "in_place"))
    made.ready("d0")
    assert made.members["d0"].engine.memory.weights_version == 1
    made.settle()
    assert made.answers[0].reason == "transfer"


def test_prompt_of_which_a_chunk_has_replaced_weights_is_not_sent_on() -> None:
    """The only request of the prefill engine, in its first row, has one chunk of three when the weights change."""
    made = fleet(transfer_failure="recompute")
    made.arrive(asked(0, prompt=9))
    hear(made, "accepted", "p0")
    assert made.ready("p0")
    made.finish("p0")
    member = made.members["p0"]
    assert [request.row for request in member.engine.requests.values()] == [0]
    made.control("p0", UpdateWeights(1, "w", "in_place"))
    made.settle_until(lambda: member.engine.memory.weights_version == 1)
    assert not member.engine.requests
    made.settle()
    assert made.answers[0] == asked(0).answer
    assert made.marks["p ended (transfer)"] == 1


def test_role_is_switched_once_drained() -> None:
    made = fleet()
    made.arrive(asked(0))
    refused = made.control("p0", SwitchRole("mixed"))
    assert refused is not None
    assert not refused.ok
    made.control("p0", Drain())
    made.settle()
    done = made.control("p0", SwitchRole("decode"))
    assert done is not None
    assert done.ok
    made.control("p0", Resume())
    assert made.members["p0"].engine.transfers.table is made.members["d0"].engine.transfers.table  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("transfer_room", None),
        ("session", "s"),
        ("max_new_tokens", 0),
    ],
)
@pytest.mark.parametrize("name", ["p0", "d0"])
def test_what_does_not_go_between_engines_is_refused_by_name(name: str, field: str, value: Any) -> None:
    made = fleet()
    values = {"transfer_room": 3, "max_new_tokens": 2, field: value}
    event = RequestArrived(time_us=0, request_id=0, prompt=TokenRuns((1, 4)), **values)
    commands = made.members[name].engine.step(event).commands
    assert [getattr(command, "message", "") for command in commands if f"`{field}`" in getattr(command, "message", "")]


@pytest.mark.parametrize("restores", [False, True])
@pytest.mark.parametrize("kind", [{"logprob_start": 1}, {"return_hidden_states": True}])
def test_what_came_with_the_prompt_is_not_computed_again(kind: dict[str, Any], restores: bool) -> None:
    """The host has the prompt's results from the prefill engine: also after a retraction of the request."""
    made = fleet(restores=restores, retract_every=2)
    made.arrive(asked(0, prompt=10, max_new=8), **kind)
    made.arrive(asked(1, prompt=10, max_new=8), **kind)
    made.settle()
    assert made.marks["d retracted (forced)"]
    assert made.marks["results passed on"] == 2
    assert [made.answers[key].reason for key in (0, 1)] == ["length", "length"]
    stories = made.members["d0"].kv.stories
    for request_id in (0, 1):
        assert stories[request_id].logprobs == (list(range(1, 9)) if "logprob_start" in kind else [])
        assert stories[request_id].hidden[:17] == (list(range(17)) if "return_hidden_states" in kind else [])


def test_results_that_came_are_not_computed_again_with_a_received_prompt() -> None:
    """The pages of a request that waits for a row are taken back, so it computes its prompt before it has decoded."""
    made = fleet(max_running_requests=1)
    made.arrive(asked(0, max_new=6))
    made.arrive(asked(1, prompt=10), logprob_start=1, return_hidden_states=True)
    made.settle_until(lambda: state(made, "d0", 1) == "ready")
    made.control("d0", Pause("retract"))
    made.control("d0", Resume())
    assert state(made, "d0", 1) == "over"
    made.settle()
    assert made.answers[1] == asked(1, prompt=10).answer
    story = made.members["d0"].kv.stories[1]
    assert story.logprobs == list(range(1, 9))
    assert story.hidden == list(range(13))


def test_results_of_a_prompt_that_did_not_come_are_computed_here() -> None:
    made = fleet(transfer_failure="recompute")
    made.arrive(asked(0, prompt=10), logprob_start=2, return_hidden_states=True)
    made.settle_until(lambda: state(made, "p0") == "in_flight")
    made.link_down("p0", "d0")
    made.settle()
    story = made.members["d0"].kv.stories[0]
    assert story.logprobs == list(range(2, 9))
    assert not made.marks["results passed on"]


def test_executor_of_the_decode_engine_receives_the_rows_with_logprobs() -> None:
    made = fleet()
    made.arrive(asked(0), sampling=SamplingParams(top_logprobs=2))
    made.settle_until(lambda: state(made, "d0") == "ready")
    plan = made.fold(made.members["d0"], LaneReady(made.now_us)).launched()
    assert plan is not None
    assert [taken.logprobs for taken in plan.rows_taken] == [True]


IMPOSSIBLE: dict[str, tuple[str, TransferAdvanced]] = {
    "is done, but it is bootstrap": ("p0", TransferAdvanced(0, 0, "d0", 0, 0, "done")),
    "starts at 4 of 4 tokens": ("p0", TransferAdvanced(0, 0, "d0", 0, 0, "accepted", start_tokens=4)),
    "is done with the first token None": ("d0", TransferAdvanced(0, 0, "p0", 0, 0, "done")),
}


@pytest.mark.parametrize("message", IMPOSSIBLE)
def test_impossible_fact_changes_nothing(message: str) -> None:
    from lockstep.core.journal import snapshot

    made = fleet()
    made.arrive(asked(0))
    name, event = IMPOSSIBLE[message]
    engine = made.members[name].engine
    before = snapshot.dump(engine)
    with pytest.raises(ContractError, match=message):
        engine.step(event)
    assert snapshot.dump(engine) == before


# ------------------------------------------------------------------------------------ scenarios G and I, of two engines


def test_g1_cancel_reaches_every_batch_in_flight_of_a_prefill_engine() -> None:
    """S30: all launched batches are in flight; each has a chunk of the cancelled request."""
    made = fleet(overlap_depth=2, batching="mixed")
    wire = made.arrive(asked(0, prompt=12))
    hear(made, "accepted", "p0")
    while made.ready("p0"):
        pass
    engine = made.members["p0"].engine
    assert [list(batch.plan.request_ids) for batch in engine.in_flight] == [[0], [0], [0]]
    assert [part.command.after_batch for part in wire.parts] == [batch.plan.batch_id for batch in engine.in_flight]
    made.cancel(wire, "p0")
    assert state(made, "p0") == "quarantined"
    while made.finish("p0"):
        assert not made.ready("p0"), "no request is left to run"
    assert not made.movable() or wire in made.stops
    made.settle()
    assert made.answers[0].reason == "transfer"
    made.check_agreed()


def test_g17_cached_tokens_of_both_engines_are_counted_once() -> None:
    """S33: the decode engine reports the cached tokens of the prefill engine, beside those of its own radix cache."""
    made = fleet()
    for key in (0, 1):
        made.arrive(Asked(key, tuple(range(100, 110)), 3))
        made.settle()
    assert made.cached_tokens == {0: 0, 1: 8}
    assert made.wires[1].receive is not None
    assert made.wires[1].receive.start_tokens == 8, "its own radix cache has as much"


@pytest.mark.parametrize("small", ["prefill", "decode"])
def test_i6_request_that_the_smaller_engine_cannot_hold_ends_on_both(small: str) -> None:
    """S30: the capacity of two engines is that of the smaller one."""
    p0 = SchedConfig(role="prefill", **(SMALL | {"pages": 4 if small == "prefill" else 32}))
    d0 = SchedConfig(role="decode", **(SMALL | {"pages": 4 if small == "decode" else 32}))
    made = Fleet([p0], [d0], restores=True)
    made.arrive(asked(0, prompt=10, max_new=4))
    made.arrive(asked(1, prompt=4, max_new=4))
    made.settle()
    assert made.answers[0].reason in ("transfer", "too_long")
    assert made.answers[1] == asked(1).answer
    made.check_agreed()
