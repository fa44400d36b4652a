"""Prefill and decode on different engines: stories in which others broke, equivalence, random histories with faults.

Every engine's invariants are checked after every event, every cell that is read is checked against its prefix, and
every part that moves against what both engines keep (`tests/support/fleet.py`).
"""

from __future__ import annotations

import dataclasses
import random
from itertools import product
from typing import Any

import numpy as np
import pytest

from lockstep.core.contract.commands import ControlAnswered
from lockstep.core.contract.config import CacheTiers, HybridMemory, SchedConfig
from lockstep.core.contract.errors import ConfigError, ContractError, InvariantError
from lockstep.core.contract.events import (
    ChangeRole,
    ControlRequested,
    Drain,
    FinishReason,
    Grammar,
    LaneReady,
    LoadAdapterControl,
    OpenSession,
    Pause,
    PromptSpan,
    ReleaseMemory,
    RequestArrived,
    Resume,
    SamplingParams,
    SwitchRole,
    TokenRuns,
    TransferAdvanced,
    UpdateWeights,
)
from lockstep.core.features import disaggregation
from lockstep.core.kv.memory import Memory
from lockstep.core.scheduler.engine import Engine
from tests.support.fleet import Fleet, run_history
from tests.support.served import Answer, Asked, serve

SMALL: dict[str, Any] = {"page_size": 2, "pages": 32, "max_running_requests": 4, "num_reserved_decode_tokens": 2}


def fleet(*, prefills: int = 1, decodes: int = 1, restores: bool = True, **settings: Any) -> Fleet:
    common = {**SMALL, **settings}
    own = {"chunked_prefill_size": 4, "overlap_depth": 1}
    return Fleet(
        [SchedConfig(role="prefill", **(own | common)) for _ in range(prefills)],
        [SchedConfig(role="decode", **(own | common)) for _ in range(decodes)],
        restores=restores,
    )


def asked(key: int, prompt: int = 4, max_new: int = 4, **more: Any) -> Asked:
    return Asked(key, tuple(range(100 * (key + 1), 100 * (key + 1) + prompt)), max_new, **more)


def state(made: Fleet, name: str, request_id: int = 0) -> str:
    transfers = made.members[name].engine.transfers
    assert transfers.hands_over
    transfer = transfers.all.get(request_id)
    return transfer.state if transfer is not None else "over"


def free_pages(made: Fleet, name: str) -> set[int]:
    return set(made.members[name].engine.memory.pool.free_ids().tolist())


def hear(made: Fleet, status: str, name: str) -> None:
    """The host of an engine hears the first fact of this status that is on its way to it."""
    made.tell(next(told for told in made.told if (told.status, told.to) == (status, name)))


def to_receiving(made: Fleet, one: Asked) -> None:
    """A prompt of one batch is computed, and nothing of it has moved."""
    made.arrive(one)
    hear(made, "accepted", "p0")
    assert made.ready("p0")
    made.finish("p0")


# -------------------------------------------------------------------------------------------------------------- the way


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


# -------------------------------------------------------------------------------------------------- equal to one engine


@pytest.mark.parametrize("seed", range(12))
def test_answers_are_those_of_one_engine(seed: int) -> None:
    """Over page sizes, chunks, overlap, allocation, radix cache and retractions; two engines of each kind."""
    rng = random.Random(seed)
    everybody = [
        Asked(
            key,
            tuple(range(100 * rng.randint(1, 2), 100 * rng.randint(3, 4)))[: rng.randint(1, 12)],
            rng.randint(1, 8),
            stops=tuple(rng.sample(range(8), rng.choice([0, 0, 1]))),
            stream=rng.random() < 0.8,
        )
        for key in range(8)
    ]
    alone = serve(SchedConfig(page_size=2, pages=200), everybody)
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
        for one in everybody:
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


# -------------------------------------------------------------------------- script 14: locks go without any new arrival


@pytest.mark.parametrize("ends", ["done", "failed"])
def test_what_a_cancelled_transfer_held_comes_back_without_an_arrival(ends: str) -> None:
    """Script 14: a cancelled transfer holds pages and a lock; one decode goes on to the edge of the pool."""
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
    """Script 15: A is cancelled while it is on its way, B comes, and A's writer lands late, never or twice."""
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
    """Script 18, S28: a time-out is an event of the one core's journal; who folds it decides alike."""
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

    A is over at once; its pages are nobody's until n + 1 is delivered, and no transfer is given them before.
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


def test_f8_f10_dead_prefill_engine_holds_up_nobody() -> None:
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
    assert made.ready("d0"), "who is ready runs to its end first"


# ------------------------------------------------------------------------------------------------------------ the rules


def test_reserve_is_left_to_each_that_runs_or_will() -> None:
    made = fleet(pages=40, page_size=1, num_reserved_decode_tokens=8)
    for key in range(3):
        made.arrive(asked(key, prompt=6, max_new=8))
    # the first is alone; the second wants 7 + 8 of 33 - 8 left; the third 7 + 8 of 26 - 16
    assert [state(made, "d0", key) for key in range(3)] == ["receiving", "receiving", "preallocating"]
    made.settle()


@pytest.mark.parametrize("failure", ["fail", "recompute"])
def test_all_output_is_reserved_where_that_is_the_policy(failure: str) -> None:
    """With reserve full nobody is retracted for pages, whoever comes by transfer or computes its prompt here."""
    made = fleet(restores=False, reserve="full", num_reserved_decode_tokens=0, transfer_failure=failure)
    for key in range(3):
        made.arrive(asked(key, max_new=28))
    if failure == "recompute":
        made.settle_until(lambda: state(made, "d0") == "receiving")
        made.link_down("p0", "d0")
    made.settle()
    assert [made.answers[key].reason for key in range(3)] == (["length"] * 3)
    assert not made.marks["d retracted (pages)"]


def test_nobody_new_is_given_pages_while_somebody_retracted_waits() -> None:
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
    """Its host has it from the prefill engine: also when the request is retracted, and its prompt is."""
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


def test_results_of_a_prompt_that_did_not_come_are_computed_here() -> None:
    made = fleet(transfer_failure="recompute")
    made.arrive(asked(0, prompt=10), logprob_start=2, return_hidden_states=True)
    made.settle_until(lambda: state(made, "p0") == "in_flight")
    made.link_down("p0", "d0")
    made.settle()
    story = made.members["d0"].kv.stories[0]
    assert story.logprobs == list(range(2, 9))
    assert not made.marks["results passed on"]


def test_executor_of_the_decode_engine_is_told_whose_tokens_want_logprobs() -> None:
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


# ----------------------------------------------------------------------------------------------- requests of every kind


def samples(key: int, number: int, **more: Any) -> list[Asked]:
    first = asked(key, **more)
    return [first, *(dataclasses.replace(first, key=key + i) for i in range(1, number))]


@pytest.mark.parametrize("radix", [True, False])
@pytest.mark.parametrize("allocation", ["early", "prefill_complete"])
def test_samples_are_transfers_of_their_own(allocation: str, radix: bool) -> None:
    """With a radix cache, the ones behind the first wait for it on both sides, and only what is not shared is sent."""
    made = fleet(transfer_allocation=allocation, radix_cache=radix)
    four = samples(0, 4, prompt=7)
    made.arrive(four[0], samples=four[1:])
    made.settle()
    assert made.answers == {one.key: one.answer for one in four}
    sent = [sum(part.command.stop_tokens - part.command.start_tokens for part in wire.parts) for wire in made.wires]
    starts = [wire.receive.start_tokens for wire in made.wires if wire.receive is not None]
    assert starts == ([0, 6, 6, 6] if radix else [0, 0, 0, 0])
    assert sent == ([7, 1, 1, 1] if radix and allocation == "early" else sent)
    made.replay()


@pytest.mark.parametrize("name", ["p0", "d0"])
def test_sample_that_leads_and_leaves_hands_the_lead_on(name: str) -> None:
    made = fleet(transfer_slots=1)
    three = samples(0, 3, prompt=7)
    first = made.arrive(three[0], samples=three[1:])
    made.cancel(first, name)
    made.settle()
    assert made.answers[0].reason in ("cancelled", "transfer")
    assert [made.answers[key] for key in (1, 2)] == [three[key].answer for key in (1, 2)]


def test_samples_that_are_refused_are_refused_on_both_sides() -> None:
    made = Fleet(
        [SchedConfig(role="prefill", max_input_tokens=5, **SMALL)], [SchedConfig(role="decode", **SMALL)], restores=True
    )
    two = samples(0, 2, prompt=6)
    made.arrive(two[0], samples=two[1:])
    made.settle()
    assert {one.reason for one in made.answers.values()} == {"transfer"}
    made.check_agreed()


def test_samples_have_rooms_of_their_own() -> None:
    made = fleet()
    made.arrive(asked(9), samples=samples(10, 2)[:1])
    event = RequestArrived(
        time_us=0, request_id=2, prompt=TokenRuns((1, 4)), max_new_tokens=2, transfer_room=0, parallel_samples=2
    )
    commands = made.members["d0"].engine.step(event).commands
    assert [type(command).__name__ for command in commands] == ["CancelTransfer", "RejectRequest"] * 2


@pytest.mark.parametrize("recompute", [False, True])
def test_media_stay_with_whoever_computes_the_prompt(recompute: bool) -> None:
    """The decode engine needs no encoder, until it computes a prompt itself."""
    made = fleet(encoder_cache_tokens=8, transfer_failure="recompute")
    picture = PromptSpan(1, 4, "image", bytes(32), 5)
    made.arrive(asked(0, prompt=7), spans=(picture,))
    if recompute:
        made.settle_until(lambda: bool(made.members["p0"].encoding))
        made.link_down("p0", "d0")
    made.settle()
    assert made.answers[0] == asked(0).answer
    assert (made.marks["encoded at p"], made.marks["encoded at d"]) == (1, int(recompute))


def test_media_of_a_retracted_request_are_encoded_again() -> None:
    made = fleet(encoder_cache_tokens=8, radix_cache=False)
    made.arrive(asked(0, prompt=7, max_new=8), spans=(PromptSpan(1, 4, "image", bytes(32), 5),))
    made.settle_until(lambda: len(made.sent[0]) >= 3)
    made.control("d0", Pause("retract"))
    made.control("d0", Resume())
    made.settle()
    assert made.answers[0] == asked(0, max_new=8).answer
    assert made.marks["encoded at d"] == 1


def test_nobody_waits_for_an_encoder_while_others_wait_for_its_room() -> None:
    """Two engines in different orders: what one holds, the encoder's room, must not be what the other waits for."""
    made = fleet(encoder_cache_tokens=5, pages=5, num_reserved_decode_tokens=0, bootstrap_timeout_us=None)
    first, second = (PromptSpan(1, 4, "image", bytes([i] * 32), 5) for i in (0, 1))
    one = made.arrive(asked(0, prompt=7, max_new=2), spans=(first,), late="d0")
    two = made.arrive(asked(1, prompt=7, max_new=2), spans=(second,), late="p0")
    made.arrive_at(one, "d0")
    made.arrive_at(two, "p0")
    made.settle()
    assert made.answers == {key: asked(key, max_new=2).answer for key in (0, 1)}


def loaded(made: Fleet, name: str = "law", version: int = 1, members: tuple[str, ...] = ("p0", "d0")) -> None:
    for member in members:
        made.control(member, LoadAdapterControl(name, version))


def test_adapters_are_loaded_on_both_sides() -> None:
    made = fleet(max_loras=1)
    for name in ("law", "med"):
        loaded(made, name)
    for key, name in enumerate(["law", "", "med", "law"]):
        made.arrive(asked(key, prompt=6), adapter=name)
    made.settle()
    assert made.answers == {key: asked(key).answer for key in range(4)}
    made.replay()


@pytest.mark.parametrize("failure", ["fail", "recompute"])
def test_kv_of_another_version_of_an_adapter_is_no_good(failure: str) -> None:
    made = fleet(max_loras=1, transfer_failure=failure)
    loaded(made)
    loaded(made, version=2, members=("d0",))
    made.arrive(asked(0), adapter="law")
    made.settle()
    assert made.answers[0] == (asked(0).answer if failure == "recompute" else Answer("transfer", ()))
    assert made.marks["adapters differ"] == 1


def test_adapter_of_those_who_hold_pages_goes_before_that_of_the_line() -> None:
    """L6: otherwise one waits with its pages for an adapter, and the other for pages with its adapter on the device."""
    made = fleet(max_loras=1, transfer_failure="recompute")
    for name in ("law", "med"):
        loaded(made, name)
    first = made.arrive(asked(0, prompt=6, max_new=3), adapter="law")
    made.arrive(asked(1, prompt=6, max_new=3), adapter="med")
    made.control("d0", Pause("in_place"))
    made.drop(first)
    device = made.members["d0"].kv
    made.settle_until(lambda: state(made, "d0", 1) == "ready")
    assert (device.slots, [load.adapter for load in device.loads]) == ({0: ("med", 1)}, ["med"])
    assert [request.adapter.name for request in made.members["d0"].engine.waiting] == ["law"]
    made.control("d0", Resume())
    made.settle()
    assert made.answers == {key: asked(key, max_new=3).answer for key in (0, 1)}


def test_adapter_that_cannot_be_loaded_ends_who_is_ready() -> None:
    made = fleet(max_loras=1)
    loaded(made)
    made.arrive(asked(0), adapter="law")
    made.settle_until(lambda: bool(made.members["p0"].kv.loads))
    made.answer(made.members["p0"], made.members["p0"].answers_due()[0])
    made.settle_until(lambda: bool(made.members["d0"].kv.loads))
    assert state(made, "d0") == "ready"
    made.answer(made.members["d0"], made.members["d0"].answers_due()[0], error="no")
    assert made.answers[0].reason == "error"
    made.settle()


@pytest.mark.parametrize("jumps", [0, 5])
@pytest.mark.parametrize(("ends", "min_new"), [(1, 0), (3, 0), (1, 4), (3, 4), (20, 0)])
def test_grammar_goes_on_where_the_first_token_left_it(ends: int, min_new: int, jumps: int) -> None:
    made = fleet(jump_forward_tokens=jumps)
    one = asked(0, max_new=6, min_new=min_new)
    wire = made.arrive(one, grammar=Grammar("regex", "a", b"a"), grammar_ends=ends)
    made.settle()
    assert made.answers[0] == wire.wanted
    assert made.answers[0].reason == ("grammar" if ends < 6 else "length")


@pytest.mark.parametrize("kind", ["generate", "embed", "score"])
def test_request_that_wants_no_token_ends_on_its_prefill_engine(kind: str) -> None:
    made = fleet()
    made.arrive_alone(asked(0, prompt=9), "p0", kind=kind)
    made.settle()
    assert made.answers[0] == Answer("computed", ())


# ------------------------------------------------------------------------------------------------------------- sessions


def turn(made: Fleet, key: int, prompt: int = 4, max_new: int = 3, **more: Any) -> Any:
    return made.arrive(asked(key, prompt=prompt, max_new=max_new), session="s", **more)


@pytest.mark.parametrize("allocation", ["early", "prefill_complete"])
def test_turns_are_sent_what_the_session_does_not_have(allocation: str) -> None:
    """The session lives on the decode engine; the prefill engine gets whole prompts, once they are known."""
    made = fleet(transfer_allocation=allocation, bootstrap_timeout_us=5_000)
    made.control("d0", OpenSession("s", 60))
    wires = [turn(made, key) for key in range(3)]
    made.clock(4_000)
    made.settle()
    assert made.answers == {key: asked(key, max_new=3).answer for key in range(3)}
    assert [wire.turn.kept_tokens for wire in wires] == [0, 7, 14]
    assert [wire.receive.start_tokens for wire in wires] == [0, 6, 12]
    assert made.members["d0"].engine.sessions.open["s"].length == 21
    made.replay()


def test_sessions_may_be_rewound_and_branched_where_they_live() -> None:
    made = fleet()
    made.control("d0", OpenSession("s", 60))
    turn(made, 0)
    made.settle()
    made.control("d0", OpenSession("branch", 60, None, "s", 5))
    wires = [turn(made, 1, session_start=2), made.arrive(asked(2, max_new=3), session="branch")]
    made.settle()
    assert [wire.turn.kept_tokens for wire in wires if wire.turn is not None] == [2, 5]
    assert [made.answers[key] for key in (1, 2)] == [asked(key, max_new=3).answer for key in (1, 2)]


def test_turn_waits_for_its_time_and_for_nobody_elsewhere_meanwhile() -> None:
    """Behind a long turn, with allocation prefill_complete: the time its prefill engine has begins with its turn."""
    made = fleet(transfer_allocation="prefill_complete", bootstrap_timeout_us=1_000, transfer_timeout_us=None)
    made.control("d0", OpenSession("s", 60))
    turn(made, 0, max_new=8)
    made.settle_until(lambda: len(made.sent[0]) > 1)
    turn(made, 1)
    made.clock(3_000)
    made.settle()
    assert made.answers[1] == asked(1, max_new=3).answer


def test_sessions_yield_pages_to_those_whose_kv_is_to_come() -> None:
    made = fleet(pages=12, num_reserved_decode_tokens=0)
    made.control("d0", OpenSession("s", 20))
    turn(made, 0, prompt=8, max_new=4)
    made.settle()
    made.arrive(asked(1, prompt=18, max_new=3))
    made.settle()
    assert made.answers[1] == asked(1, max_new=3).answer


def test_sessions_are_not_opened_on_prefill_engines() -> None:
    made = fleet()
    refused = made.control("p0", OpenSession("s", 60))
    assert refused is not None
    assert "prefill engine" in refused.message


def test_retracted_kv_comes_back_from_host_memory() -> None:
    """The decode engine's own: what was sent and what it computed, on the host before its pages went to others."""
    tiers = CacheTiers(host_pages=64, load_tokens_min=1, prefetch_tokens_min=1)
    made = fleet(retracted_kv="cache", tiers=tiers, pages=16, num_reserved_decode_tokens=0)
    for key in (0, 1):
        made.arrive(asked(key, prompt=8, max_new=12))
    made.settle()
    assert made.answers == {key: asked(key, max_new=12).answer for key in (0, 1)}
    assert made.marks["d retracted (pages)"]
    assert made.marks["d LoadFromHost"]


@pytest.mark.parametrize("chunk", [2, 4])
def test_prompt_that_is_cached_already_does_not_need_its_pages_twice(chunk: int) -> None:
    """Hidden states of all of it are wanted, so it is computed again: its own pages are read, the cache has others."""
    made = fleet(pages=7, page_size=2, chunked_prefill_size=chunk, num_reserved_decode_tokens=0)
    made.arrive(asked(0, prompt=12, max_new=1))
    made.settle()
    made.arrive(Asked(1, asked(0, prompt=12).prompt, 1), return_hidden_states=True)
    made.settle()
    assert made.answers[1].reason == "length"


# ---------------------------------------------------------------------------------------------------- changing the role


def test_role_changes_once_everybody_has_ended() -> None:
    made = fleet(prefills=2, decodes=2)
    made.arrive(asked(0, max_new=12))
    made.settle_until(lambda: len(made.sent[0]) > 2)
    made.control("d0", ChangeRole("prefill", 1_000_000))
    made.control("p0", ChangeRole("decode", 1_000_000))
    assert made.members["p0"].engine.config.role == "decode", "nothing was left to do there"
    late = made.arrive(asked(1), "p1", "d0")
    assert made.answers[late.asked.key].reason == "draining"
    made.settle()
    assert made.answers[0] == asked(0, max_new=12).answer
    assert made.members["d0"].engine.config.role == "prefill"
    made.arrive(asked(2), "d0", "p0")
    made.settle()
    assert made.answers[2] == asked(2).answer
    made.replay()


def test_who_is_left_when_the_time_is_over_is_sent_elsewhere() -> None:
    made = fleet(decodes=2)
    made.arrive(asked(0, max_new=20))
    made.settle_until(lambda: len(made.sent[0]) > 2)
    to_come = made.arrive(asked(1, prompt=8))
    made.control("d0", ChangeRole("prefill", 500))
    made.clock(499)
    assert 0 not in made.answers
    made.clock(1)
    assert [made.answers[key].reason for key in (0, 1)] == ["transfer", "transfer"]
    assert not made.members["d0"].engine.requests
    assert made.members["d0"].engine.config.role == "decode", "a batch is in flight, and a writer has not ended"
    assert state(made, "d0", to_come.ids["d0"]) == "quarantined"
    made.settle()
    assert made.members["d0"].engine.config.role == "prefill"
    again = made.arrive(asked(2, max_new=20), "p0", "d1")
    made.settle()
    assert made.answers[again.asked.key] == again.wanted


def test_resume_ends_a_change_of_the_role() -> None:
    made = fleet()
    made.arrive(asked(0))
    made.control("d0", ChangeRole("prefill", 1_000))
    made.control("d0", Resume())
    assert made.members["d0"].controls[0] == ControlAnswered(0, False, "resumed before everything had ended")
    made.settle()
    assert made.answers[0] == asked(0).answer


def test_change_of_the_role_is_refused_where_it_cannot_be() -> None:
    made = fleet()
    made.control("d0", OpenSession("s", 10))
    for name, control, message in (
        ("d0", ChangeRole("prefill", 10), "sessions are open"),
        ("p0", ChangeRole("decode", -1), "`within_us` must be 0 or more"),
    ):
        refused = made.control(name, control)
        assert refused is not None
        assert message in refused.message


def test_engine_with_pools_beside_full_attention_may_change_its_role() -> None:
    hybrid = SchedConfig(
        pages=64, page_size=2, chunked_prefill_size=4, hybrid=HybridMemory(window_tokens=4, window_pages=32)
    )
    engine = Engine(hybrid)
    assert engine.step(ControlRequested(0, 0, SwitchRole("decode"))).commands == [ControlAnswered(0, True)]
    assert engine.config.role == "decode"


# ------------------------------------------------------------------------------------ scenarios G and I, of two engines


def test_g1_cancel_reaches_every_batch_in_flight_of_a_prefill_engine() -> None:
    """S30: what is in flight are all batches that were launched; each has a chunk of the one that leaves."""
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
        assert not made.ready("p0"), "nobody is left to run"
    assert not made.movable() or wire in made.stops
    made.settle()
    assert made.answers[0].reason == "transfer"
    made.check_agreed()


def test_g17_cached_tokens_of_both_engines_are_counted_once() -> None:
    """S33: the decode engine tells of those that the prefill engine had, beside its own radix cache."""
    made = fleet()
    for key in (0, 1):
        made.arrive(Asked(key, tuple(range(100, 110)), 3))
        made.settle()
    assert made.cached_tokens == {0: 0, 1: 8}
    assert made.wires[1].receive is not None
    assert made.wires[1].receive.start_tokens == 8, "its own radix cache has as much"


@pytest.mark.parametrize("small", ["prefill", "decode"])
def test_i6_request_that_the_smaller_engine_cannot_hold_ends_on_both(small: str) -> None:
    """S30: what two engines have room for is what the smaller one has."""
    p0 = SchedConfig(role="prefill", **(SMALL | {"pages": 4 if small == "prefill" else 32}))
    d0 = SchedConfig(role="decode", **(SMALL | {"pages": 4 if small == "decode" else 32}))
    made = Fleet([p0], [d0], restores=True)
    made.arrive(asked(0, prompt=10, max_new=4))
    made.arrive(asked(1, prompt=4, max_new=4))
    made.settle()
    assert made.answers[0].reason in ("transfer", "too_long")
    assert made.answers[1] == asked(1).answer
    made.check_agreed()


# ----------------------------------------------------------------------------------------------------- random histories


def ranks(**settings: Any) -> Fleet:
    """One prefill and one decode engine, of two data-parallel ranks each."""
    engines = {role: [SchedConfig(role=role, **{**SMALL, **settings})] * 2 for role in ("prefill", "decode")}
    return Fleet(engines["prefill"], engines["decode"], ranks=True, restores=True)


def offer(made: Fleet, engine: str) -> list[str]:
    """A slot for every rank of an engine. Returns the modes of what they run."""
    names = [name for name in made.members if name[0] == engine]
    for name in names:
        made.ready(name)
    while any(made.hear(name) for name in names):
        pass
    return [made.members[name].engine.in_flight[-1].plan.mode for name in names]


def test_ranks_hand_requests_over_to_ranks() -> None:
    """Each prefill rank sends to the decode rank that a request was routed to; passes are of all ranks of an engine."""
    made = ranks(chunked_prefill_size=4)
    requests = [asked(key, prompt=3 + 2 * key, max_new=3 + key) for key in range(6)]
    for key, one in enumerate(requests):
        made.arrive(one, f"p{key % 2}", f"d{key // 2 % 2}")
    made.settle()
    assert made.answers == {one.key: one.answer for one in requests}
    assert made.marks["d ran prebuilt in a pass of all"]
    made.replay()


def test_part_follows_its_batch_which_follows_the_agreement() -> None:
    """What is only proposed is not sent, nor what left between proposal and launch."""
    made = ranks()
    stays, leaves = made.arrive(asked(0), "p0", "d0"), made.arrive(asked(1), "p1", "d1")
    hear(made, "accepted", "p0")
    hear(made, "accepted", "p1")
    made.ready("p0")
    made.ready("p1")
    assert not stays.parts
    made.cancel(leaves, "p1")
    assert offer(made, "p") == ["extend", "extend"]
    assert [part.command.last for part in stays.parts] == [True]
    assert not leaves.parts
    made.settle()
    assert made.answers[0] == asked(0).answer


def test_rows_whose_kv_came_decode_with_the_others() -> None:
    """A decode rank whose request joins runs no extend: nobody else has to, and a graph can run."""
    made = ranks(overlap_depth=0)
    made.arrive(asked(0, max_new=20), "p0", "d0")
    made.settle_until(lambda: made.members["d0"].engine.running_batch.size == 1)
    while made.hear("d1") or made.finish("d0") or made.finish("d1"):
        pass
    made.arrive(asked(1), "p1", "d1")
    made.settle_until(lambda: bool(made.members["d1"].engine.transfers.ready))  # type: ignore[union-attr]
    while made.hear("d0") or made.hear("d1") or made.finish("d0") or made.finish("d1"):
        pass
    assert offer(made, "d") == ["decode", "prebuilt"]
    agreed = made.exchanges["d0"].launched["d0"][-1]
    assert (agreed.tokens, agreed.extends, agreed.use_graph) == ((1, 1), False, True)
    made.settle()
    assert made.answers[1] == asked(1).answer
    made.replay()


@pytest.mark.parametrize("moment", ["before the pass", "proposed", "in flight"])
@pytest.mark.parametrize("first", ["p0", "p1"])
def test_f6_failed_on_one_rank(first: str, moment: str) -> None:
    """SG#27028: transfers of two ranks fail; one rank polls at once and removes its request, the other polls late.

    Each rank has the requests that were routed to it, so none is removed before its own rank has heard; passes of both
    go on in between. Both ends of both are told once, and nobody is left.
    """
    made = ranks(transfer_slots=2)
    other = "p1" if first == "p0" else "p0"
    for key, rank in enumerate(("p0", "p1")):
        made.arrive(asked(key, prompt=6), rank, f"d{key}")
        hear(made, "accepted", rank)
    if moment == "proposed":
        made.ready(first)
    elif moment == "in flight":
        assert offer(made, "p") == ["extend", "extend"]
    for decode in ("d0", "d1"):
        made.link_down("p0", decode)
        made.link_down("p1", decode)
    hear(made, "link_down", first)
    mine = made.wires[first == "p1"]
    theirs = made.wires[first != "p1"]
    assert mine.ids[first] not in made.members[first].engine.requests
    assert theirs.ids[other] in made.members[other].engine.requests
    made.ready(first)
    made.ready(other)
    while made.hear(first) or made.hear(other) or made.finish(first) or made.finish(other):
        pass
    hear(made, "link_down", other)
    made.settle()
    assert [made.answers[key].reason for key in (0, 1)] == ["transfer"] * 2
    for member in made.members.values():
        assert not member.engine.requests
        assert member.engine.transfers.hands_over
        assert sorted(member.engine.transfers.free_slots) == [0, 1]
    made.replay()


@pytest.mark.parametrize("heard", [0, 1, 2])
def test_f6_failed_while_both_stages_have_a_batch(heard: int) -> None:
    """SG#27028 with its two stages: one core decides for both, so a request that failed is gone from both at once."""
    made = fleet(pp_size=2, overlap_depth=0, chunked_prefill_size=4, transfer_slots=2)
    for key in (0, 1):
        made.arrive(asked(key, prompt=8))
        hear(made, "accepted", "p0")
    while made.ready("p0"):
        pass
    assert len({batch.plan.microbatch for batch in made.members["p0"].engine.in_flight}) == 2
    for _ in range(heard):
        made.finish("p0")
    made.drop(made.wires[0])
    hear(made, "link_down", "p0")
    assert made.answers.keys() == set()
    hear(made, "link_down", "d0")
    assert made.answers[0].reason == "transfer"
    made.settle()
    assert made.answers[1] == asked(1).answer
    for member in made.members.values():
        assert not member.engine.requests
        assert member.engine.transfers.hands_over
        assert sorted(member.engine.transfers.free_slots) == [0, 1]
    made.replay()


@pytest.mark.parametrize(("name", "value"), [("prefill_delayer", True), ("prefill_full_skip_passes", 2)])
def test_ranks_of_a_role_delay_nothing(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"`{name}` is {value}, but `role` is decode"):
        SchedConfig(dp_ranks=2, role="decode", **{name: value})


@pytest.mark.parametrize("first", [0, 5])
def test_random_histories_with_faults(first: int) -> None:
    for seed in range(first, first + 5):
        run_history(seed, 250).replay()


@pytest.mark.parametrize("seed", [2, 11, 26])
def test_random_histories_of_ranks_with_faults(seed: int) -> None:
    """A prefill and a decode engine of two data-parallel ranks each; whoever restarts takes the others with it."""
    run_history(seed, 250, ranks=True).replay()


@pytest.mark.parametrize(
    ("seed", "steps", "plain"),
    [
        (137, 300, True),  # reserve full: a decode engine gave pages that others were promised
        (30055, 400, True),  # the same of one that computes a prompt, beside KV that is still coming
        (20086, 400, True),  # a transfer ends while weights are changed, and its prompt was written to the host
        (20097, 400, True),  # pages that a write to the host locks are nobody's fault
        (564034194097, 400, False),  # a restart ends transfers, whose prompts are copied to a host that is gone
        (371404835514, 400, False),  # the last of a microbatch gives its pages to another one: that found nothing
        (87027686535, 400, False),  # KV that has come waits for the decode of another microbatch, which is owed pages
    ],
)
def test_history_that_found_something(seed: int, steps: int, plain: bool) -> None:
    run_history(seed, steps, plain=plain)


def test_decode_steps_launched_uniformly_are_the_same() -> None:
    """A stretch of decodes taken in one go stops where a transfer is to be decided about."""
    from lockstep.core.scheduler.decode_run import DecodeRun

    made = fleet(restores=False, bootstrap_timeout_us=None, transfer_timeout_us=None, pages=64)
    made.arrive(asked(0, max_new=20))
    made.settle_until(lambda: len(made.sent[0]) >= 3)
    engine = made.members["d0"].engine
    while len(engine.in_flight) <= engine.config.overlap_depth:
        made.fold(made.members["d0"], LaneReady(made.now_us))
    assert DecodeRun.begin(engine) is not None
    made.arrive(asked(1, prompt=10, max_new=99))
    made.arrive(asked(2, prompt=10, max_new=99))
    made.arrive(asked(3, prompt=10, max_new=99))
    assert state(made, "d0", 3) == "preallocating"
    assert DecodeRun.begin(engine) is None
    assert np.any(engine.positions)


# -------------------------------------------------------------------------------------------- that the detectors detect


def _quarantine_of_the_decode_side_ends_with_the_request(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(disaggregation.RECEIVER, ("receiving", "abandoned"), "over")


def _quarantine_of_the_prefill_side_ends_with_the_request(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(disaggregation.SENDER, ("in_flight", "abandoned"), "over")


def _rows_that_are_read_are_not_pinned(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Memory, "lend", lambda *_: None)


def _no_page_for_the_first_decode(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(disaggregation.Transfers, "_first_stop", staticmethod(lambda request: request.prompt_tokens))


def _slots_are_lost(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(disaggregation.Transfers, "_free_slot", lambda *_: None)


PLANTED = {
    _quarantine_of_the_decode_side_ends_with_the_request: "d0",
    _quarantine_of_the_prefill_side_ends_with_the_request: "p0",
    _rows_that_are_read_are_not_pinned: "p0",
    _no_page_for_the_first_decode: "d0",
    _slots_are_lost: "d0",
}


@pytest.mark.parametrize("plant", PLANTED)
def test_planted_bug_is_found(plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One request that is cancelled on its way, and whose writer is late, is enough to see each of them."""
    plant(monkeypatch)
    with pytest.raises((AssertionError, InvariantError), match=r"S31|L6|S1"):
        _cancelled_on_its_way(PLANTED[plant])


def test_nothing_is_found_without_a_planted_bug() -> None:
    for name in ("p0", "d0"):
        _cancelled_on_its_way(name)


def _cancelled_on_its_way(name: str) -> None:
    made = fleet(restores=False)
    to_receiving(made, asked(0))
    made.cancel(made.wires[0], name)
    made.move(made.wires[0])
    made.settle()
