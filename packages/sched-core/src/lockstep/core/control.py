"""Requests about the engine itself: flush, pause, resume, drain, restart. Each is answered exactly once.

running --Pause--> paused --Resume--> running      a second Pause changes the mode only by doing more
open --Drain--> draining --everything ended--> answered; Resume, or a Pause that keeps work, ends the wait unanswered
                                               by what was asked: it is answered with ok=False
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.core.commands import ControlAnswered, Step
from lockstep.core.errors import ContractError
from lockstep.core.events import (
    ControlRequested,
    Drain,
    EngineRestarted,
    Flush,
    Pause,
    Resume,
)

if TYPE_CHECKING:
    from lockstep.core.engine import Engine


def apply(engine: Engine, event: ControlRequested, step: Step) -> None:
    """Do what was asked, or refuse with the reason; every path answers, except a Drain with something to wait for."""
    match event.control:
        case Flush():
            _flush(engine, event.control_id, step)
        case Pause(mode):
            _pause(engine, mode, step)
            _answer(step, event.control_id)
        case Resume():
            engine.paused = False
            engine.draining = False
            answer_drains(engine, step, ok=False, message="resumed before everything had ended")
            _answer(step, event.control_id)
        case Drain():
            _drain(engine, event.control_id, step)
        case unsupported:
            _answer(step, event.control_id, f"{type(unsupported).__name__} is not supported yet")


def answer_drains(engine: Engine, step: Step, *, ok: bool, message: str = "") -> None:
    """Answer everybody who waits for the end of a drain."""
    for control_id in engine.drains:
        step.commands.append(ControlAnswered(control_id, ok, message))
    engine.drains = []


def _flush(engine: Engine, control_id: int, step: Step) -> None:
    if engine.requests or engine.in_flight:
        waiting = len(engine.waiting)
        running = len(engine.requests) - waiting
        _answer(step, control_id, f"not idle: {waiting} waiting, {running} running, {len(engine.in_flight)} in flight")
        return
    engine.memory.flush(step)
    _answer(step, control_id)


def _pause(engine: Engine, mode: str, step: Step) -> None:
    engine.paused = True
    if mode == "cancel":
        engine.break_ranks(list(engine.requests.values()))
        for request in list(engine.requests.values()):
            engine.finish(request, "cancelled", step, flush=True)
    elif mode == "retract":
        running = [request for request in engine.requests.values() if request.row >= 0]
        engine.break_ranks(running)
        for request in running:
            engine.retract(request, "pause", step)
    if engine.requests:
        answer_drains(engine, step, ok=False, message="paused before everything had ended")


def _drain(engine: Engine, control_id: int, step: Step) -> None:
    if engine.paused and engine.requests:
        _answer(step, control_id, f"paused with {len(engine.requests)} requests unfinished; resume first")
        return
    engine.draining = True
    engine.drains.append(control_id)  # answered by the engine once nothing is left, perhaps in this very step


def _answer(step: Step, control_id: int, refused: str = "") -> None:
    step.commands.append(ControlAnswered(control_id, not refused, refused))


def restart(engine: Engine, event: EngineRestarted, step: Step) -> None:
    """The device state is gone: nothing is in flight or cached, and unfinished requests wait again, first.

    Tokens delivered so far are kept; those sampled in flight are drawn again. Results of older generations are void.
    """
    if event.generation <= engine.generation:
        raise ContractError(f"restart into generation {event.generation}, but this is generation {engine.generation}")
    engine.now_us = event.time_us
    running = [request for request in engine.requests.values() if request.row >= 0]
    line = engine.waiting
    engine.waiting = []
    engine.break_ranks(running)
    for request in running:
        engine.retract(request, "restart", step)
    engine.in_flight.clear()
    engine.generation = event.generation
    engine.waiting = sorted(engine.waiting, key=lambda request: request.request_id) + line
    engine.batch_is_full = False
    engine.memory.void(step)
