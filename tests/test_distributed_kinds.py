"""Requests of every kind on prefill and decode engines.

The kinds are samples, media, adapters, grammars, prompts without output, and sessions; engines also change their role.

Every engine's invariants are checked after every event (`tests/support/fleet/`).
"""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.core.contract.commands import ControlAnswered
from lockstep.core.contract.config import CacheTiers, HybridMemory, SchedConfig
from lockstep.core.contract.events import (
    ChangeRole,
    ControlRequested,
    Grammar,
    LoadAdapterControl,
    OpenSession,
    Pause,
    PromptSpan,
    RequestArrived,
    Resume,
    SwitchRole,
    TokenRuns,
)
from lockstep.core.scheduler.engine import Engine
from tests.support.fleet.fleet import Fleet
from tests.support.handover import SMALL, asked, fleet, samples, state
from tests.support.served import Answer, Asked


@pytest.mark.parametrize("radix", [True, False])
@pytest.mark.parametrize("allocation", ["early", "prefill_complete"])
def test_samples_are_transfers_of_their_own(allocation: str, radix: bool) -> None:
    """With a radix cache, the other samples wait for the first on both sides, and only unshared pages are sent."""
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
def test_media_stay_with_the_engine_that_computes_the_prompt(recompute: bool) -> None:
    """The decode engine needs no encoder, except when it computes a prompt itself."""
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


def test_media_are_encoded_in_order_of_arrival_after_a_restart() -> None:
    """The first request decodes and the KV of the second arrives when the device is lost; both are computed again."""
    made = fleet(encoder_cache_tokens=16, transfer_failure="recompute")
    first, second = (PromptSpan(1, 4, "image", bytes([i] * 32), 5) for i in (0, 1))
    made.arrive(asked(0, prompt=7, max_new=8), spans=(first,))
    made.settle_until(lambda: len(made.sent[0]) >= 3)
    made.arrive(asked(1, prompt=7), spans=(second,))
    assert state(made, "d0", 1) == "receiving"
    made.restart("d0")
    assert [command.digest for command in made.members["d0"].encoding] == [first.digest, second.digest]
    made.settle()
    assert made.answers == {0: asked(0, max_new=8).answer, 1: asked(1).answer}


def test_output_of_a_request_to_receive_is_reserved_beside_a_prompt_that_is_encoded_again() -> None:
    """With reserve full and 12 pages, a retracted request of 6 pages waits for its image, and another gets pages.

    That one has 3 pages of 8, so its output leaves 4 of the 9 free pages: the retracted one waits until it has ended,
    and neither of them is retracted for pages.
    """
    made = fleet(encoder_cache_tokens=8, radix_cache=False, reserve="full", pages=12)
    made.arrive(asked(0, prompt=7, max_new=6), spans=(PromptSpan(1, 4, "image", bytes(32), 5),))
    made.settle_until(lambda: len(made.sent[0]) == 2)
    made.control("d0", Pause("retract"))
    made.control("d0", Resume())
    made.finish("d0")
    made.arrive(asked(1, max_new=12))
    assert state(made, "d0", 1) == "receiving"
    member = made.members["d0"]
    made.answer(member, member.answers_due()[0])
    assert not made.ready("d0")
    made.settle()
    assert list(made.answers) == [1, 0]
    assert [made.answers[key].reason for key in (0, 1)] == ["length", "length"]
    assert not made.marks["d retracted (pages)"]


def test_no_request_waits_for_an_encoder_while_others_wait_for_its_room() -> None:
    """Two engines in different orders: neither may hold the encoder's room while waiting for that of the other."""
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


def test_adapter_of_requests_with_pages_goes_before_that_of_the_waiting_queue() -> None:
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


def test_adapter_that_cannot_be_loaded_ends_a_ready_request() -> None:
    """The first token, which its cadence has kept back, is sent before the error."""
    made = fleet(max_loras=1)
    loaded(made)
    made.arrive(asked(0, stream=False), adapter="law")
    made.settle_until(lambda: bool(made.members["p0"].kv.loads))
    made.answer(made.members["p0"], made.members["p0"].answers_due()[0])
    made.settle_until(lambda: bool(made.members["d0"].kv.loads))
    assert state(made, "d0") == "ready"
    made.answer(made.members["d0"], made.members["d0"].answers_due()[0], error="no")
    assert made.answers[0] == Answer("error", (1000,))
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
def test_request_without_output_ends_on_its_prefill_engine(kind: str) -> None:
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


def test_turn_waits_for_its_time_and_for_no_other_engine_meanwhile() -> None:
    """Behind a long turn, with allocation prefill_complete: the time limit of its prefill engine begins with it."""
    made = fleet(transfer_allocation="prefill_complete", bootstrap_timeout_us=1_000, transfer_timeout_us=None)
    made.control("d0", OpenSession("s", 60))
    turn(made, 0, max_new=8)
    made.settle_until(lambda: len(made.sent[0]) > 1)
    turn(made, 1)
    made.clock(3_000)
    made.settle()
    assert made.answers[1] == asked(1, max_new=3).answer


def test_sessions_yield_pages_to_requests_with_kv_to_come() -> None:
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
    """KV of the decode engine: received and computed pages, on the host before they went to other requests."""
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
    """Hidden states of the whole prompt are needed, so it is computed again: its own pages are read, not the cached."""
    made = fleet(pages=7, page_size=2, chunked_prefill_size=chunk, num_reserved_decode_tokens=0)
    made.arrive(asked(0, prompt=12, max_new=1))
    made.settle()
    made.arrive(Asked(1, asked(0, prompt=12).prompt, 1), return_hidden_states=True)
    made.settle()
    assert made.answers[1].reason == "length"


# ---------------------------------------------------------------------------------------------------- changing the role


def test_role_changes_once_every_request_has_ended() -> None:
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


def test_requests_left_when_the_time_is_over_are_sent_elsewhere() -> None:
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


def test_tokens_kept_back_are_sent_when_a_change_of_the_role_ends_a_request() -> None:
    """Messages carry eight tokens each. The last one carries those that were drawn since the last message."""
    made = fleet(stream_interval=8)
    made.arrive(asked(0, max_new=20))
    made.settle_until(lambda: bool(made.sent[0]))
    for _ in range(3):
        assert made.ready("d0")
        assert made.finish("d0")
    assert made.sent[0] == [1000]
    made.control("d0", ChangeRole("prefill", 500))
    made.clock(500)
    assert made.answers[0] == Answer("transfer", (1000, 1001, 1002, 1003))
    made.settle()
    assert made.members["d0"].engine.config.role == "prefill"


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
