"""Every control in any state, each against each, each twice: all are answered once, and all requests end (L8)."""

from __future__ import annotations

from itertools import product

import pytest

from lockstep.core.admin.control import HANDLERS
from lockstep.core.contract.commands import ControlAnswered, Step
from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.errors import ContractError
from lockstep.core.contract.events import (
    CancelAll,
    CancelMany,
    ChangeRole,
    CloseSession,
    Control,
    ControlRequested,
    Drain,
    Flush,
    FlushUnused,
    GetState,
    LoadAdapterControl,
    MemorySwitched,
    Observed,
    OpenSession,
    Pause,
    Profile,
    RecordExpertLoad,
    ReleaseMemory,
    RequestArrived,
    RequestCancelled,
    Resume,
    ResumeMemory,
    SlowDown,
    SwitchRole,
    TokenRuns,
    TransferAdvanced,
    UnloadAdapterControl,
    UpdateWeights,
    WeightsSwapped,
)
from lockstep.core.journal import snapshot
from lockstep.core.kv.memory import Memory
from lockstep.core.scheduler.engine import Engine
from tests.support.driver.actions import CONTROLS, Action
from tests.support.driver.driver import Driver
from tests.support.tagged_kv import KvError

CONFIG = SchedConfig(
    page_size=2, pages=24, overlap_depth=2, chunked_prefill_size=4, max_running_requests=4, max_loras=2
)

ANSWER_LATER = (HANDLERS[Drain], HANDLERS[UpdateWeights], HANDLERS[UnloadAdapterControl])

LONG: Action = ("arrive", 1, 13, 4, {})
SHORT: Action = ("arrive", 101, 3, 6, {})
TURN: Action = ("arrive", 201, 3, 3, {"session": "s"})
ON_LAW: Action = ("arrive", 301, 3, 3, {"adapter": "law"})
LOAD: Action = ("load_adapter", 0, 0, False)
LOADED: Action = ("adapter_loaded", 0)
READY: Action = ("ready",)
FINISH: Action = ("finish",)

STATES: dict[str, list[Action]] = {
    "idle": [],
    "waiting": [SHORT, SHORT],
    "prefilling": [LONG, READY, FINISH],
    "running": [SHORT, SHORT, READY, FINISH, READY, FINISH],
    "three batches in flight": [SHORT, READY, READY, READY],
    "its last row freed later": [SHORT, READY, READY, READY, ("cancel", 0)],
    "turns running and waiting": [TURN, TURN, READY, READY],
    "a session at rest": [TURN, *[READY, FINISH] * 6],
    "an adapter under way": [LOAD, ON_LAW, SHORT, READY],
    "running on an adapter": [LOAD, ON_LAW, ON_LAW, LOADED, READY, READY],
}

ASKED: tuple[Control, ...] = (
    Flush(),
    FlushUnused(),
    Pause("admission"),
    Pause("in_place"),
    Pause("retract"),
    Pause("cancel"),
    Resume(),
    Drain(),
    CancelAll(),
    UpdateWeights(0, "w", "wait"),
    UpdateWeights(0, "w", "in_place"),
    ReleaseMemory(("kv_cache",)),
    ResumeMemory(("weights", "kv_cache")),
    Profile("start", 2),
    SlowDown(7),
    OpenSession("t", 40, None, "s"),
    CloseSession("s"),
    LoadAdapterControl("law", 1),
    LoadAdapterControl("med", 1, pinned=True),
    UnloadAdapterControl("law"),
    ChangeRole("decode", 1_000),
)


def driver_in(state: str) -> Driver:
    """Return a driver with session s open, after the actions of a state."""
    driver = Driver(CONFIG)
    driver.control.ask(OpenSession("s", 60))
    for action in STATES[state]:
        driver.do(action)
    return driver


def ask(driver: Driver, control: Control) -> None:
    """Submit a control; new weights get a version above all earlier ones."""
    if control in CONTROLS:
        driver.control.control(CONTROLS.index(control))
    else:
        driver.control.ask(control)


@pytest.mark.parametrize("first", ASKED, ids=str)
def test_each_control_against_each_twice_in_any_state_is_answered_and_all_ends(first: Control) -> None:
    for state, second in product(STATES, ASKED):
        driver = driver_in(state)
        try:
            for control in (first, second, first, second):
                ask(driver, control)
                driver.do(READY)
            driver.settle()
        except AssertionError as error:
            error.add_note(f"{state}: {first}, then {second}")
            raise


@pytest.mark.parametrize("first", [control for control in ASKED if HANDLERS[type(control)] in ANSWER_LATER], ids=str)
def test_a_restart_between_two_controls_loses_no_answer(first: Control) -> None:
    for state, second in product(STATES, ASKED):
        driver = driver_in(state)
        ask(driver, first)
        driver.recovery.restart()
        ask(driver, second)
        driver.control.order_done()
        driver.settle()
        driver.replayed()


def test_every_control_that_is_served_is_asked_here_or_by_the_swarm() -> None:
    asked = {type(control) for control in (*CONTROLS, *ASKED)} | {CancelMany}  # which the driver submits with live ids
    asked |= {RecordExpertLoad}  # by tests/scenarios/control/expert_load.txt; here it is always refused
    assert HANDLERS.keys() <= asked
    assert GetState in asked


IMPOSSIBLE: dict[str, tuple[Observed, str]] = {
    "weights that were not ordered": (WeightsSwapped(0, 1), "nothing of the kind was ordered"),
    "memory that was not ordered": (MemorySwitched(0, ("kv_cache",), True), "nothing of the kind was ordered"),
    "of a generation to come": (WeightsSwapped(0, 1, generation=1), "generation 1, this is 0"),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_an_answer_without_an_order_is_refused_and_changes_nothing(name: str) -> None:
    event, message = IMPOSSIBLE[name]
    engine = Engine(CONFIG)
    before = snapshot.dump(engine)
    with pytest.raises(ContractError, match=message):
        engine.step(event)
    assert snapshot.dump(engine) == before


def test_an_answer_to_something_else_is_refused() -> None:
    engine = Engine(CONFIG)
    engine.step(ControlRequested(0, 1, UpdateWeights(3, "w")))
    before = snapshot.dump(engine)
    for event in (WeightsSwapped(0, 2), MemorySwitched(0, ("weights",), True)):
        with pytest.raises(ContractError, match="was ordered"):
            engine.step(event)
        assert snapshot.dump(engine) == before
    assert engine.step(WeightsSwapped(0, 3)).commands
    engine.step(ControlRequested(0, 2, ReleaseMemory(("kv_cache",))))
    with pytest.raises(ContractError, match="was ordered"):
        engine.step(MemorySwitched(0, ("weights",), True))
    with pytest.raises(ContractError, match="was ordered"):
        engine.step(MemorySwitched(0, ("kv_cache",), False))


def test_kv_of_older_weights_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the weight version in the key, a request would read KV of older weights, which the device reports."""
    monkeypatch.setattr(Memory, "keyed", lambda memory, namespace: namespace)
    driver = driver_in("running")
    driver.control.ask(UpdateWeights(1, "w", "in_place"))
    driver.batches.finish()
    driver.control.order_done()
    driver.do(SHORT)
    driver.batches.ready()
    with pytest.raises(KvError, match="reads"):
        driver.settle()


def test_drain_flush_and_switch_of_role_wait_for_a_transfer_that_may_still_be_written() -> None:
    # The client of a request has left while its KV arrives. The sender may write its pages until the transfer ends.
    engine = Engine(SchedConfig(page_size=2, pages=24, role="decode", overlap_depth=0))
    engine.step(RequestArrived(time_us=0, request_id=0, prompt=TokenRuns((1, 4)), max_new_tokens=4, transfer_room=7))
    engine.step(RequestCancelled(2, 0))
    assert (list(engine.requests), list(engine.transfers.all)) == ([], [0])
    assert not engine.idle
    answers = []
    for number, control in enumerate((Flush(), SwitchRole("mixed"), Drain())):
        answers += _answers(engine.step(ControlRequested(3, number, control)))
    assert answers == [
        (0, False, "not idle: 1 transfers are open"),
        (1, False, "not idle: 0 requests, 0 batches in flight, 1 transfers; drain first"),
    ]
    assert _answers(engine.step(TransferAdvanced(4, 0, "p0", 0, 1, "done", first_token=5))) == [(2, True, "")]
    assert engine.idle


def _answers(step: Step) -> list[tuple[int, bool, str]]:
    return [(one.control_id, one.ok, one.message) for one in step.commands if isinstance(one, ControlAnswered)]


def test_paused_admission_lets_running_requests_go_on_and_end() -> None:
    driver = driver_in("running")
    running = [request.request_id for request in driver.engine.requests.values()]
    driver.control.ask(Pause("admission"))
    driver.do(SHORT)
    restored = snapshot.restore(snapshot.dump(driver.engine))
    assert not restored.admits
    for _ in range(20):
        driver.do(READY)
        driver.do(FINISH)
    (waits,) = driver.engine.requests
    assert waits not in running
    assert driver.engine.active == 0
    driver.control.ask(Resume())
    driver.do(READY)
    assert driver.engine.active == 1


def test_flush_of_what_is_unused_needs_no_empty_queue() -> None:
    driver = driver_in("running")
    driver.control.ask(Pause("admission"))
    driver.do(SHORT)
    refused = driver.engine.step(ControlRequested(driver.engine.now_us, 900, FlushUnused()))
    assert not next(one for one in refused.commands if isinstance(one, ControlAnswered)).ok
    for _ in range(20):
        driver.do(READY)
        driver.do(FINISH)
    done = driver.engine.step(ControlRequested(driver.engine.now_us, 901, FlushUnused()))
    assert next(one for one in done.commands if isinstance(one, ControlAnswered)).ok
    assert driver.engine.requests
    assert not driver.engine.memory.radix.evictable_pages
