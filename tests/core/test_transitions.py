"""The lifecycle of a request, exhaustively: every pair of state and decided event either has a new state or raises."""

from __future__ import annotations

import typing
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from lockstep.core.contract.errors import InvariantError
from lockstep.core.contract.events import Decided, RequestArrived, RequestId, TokenRuns, decided_types
from lockstep.core.requests.table import BASE, TRANSITIONS, Request, RequestState
from lockstep.core.requests.validation import Accepted
from tests.support.records import is_spelt_out
from tests.support.scenario import Run, parse, play

DECIDED: tuple[type[Decided], ...] = decided_types()
PAIRS = list(product(RequestState, DECIDED))
SCENARIOS = Path(__file__).parent.parent / "scenarios"


def request_in(state: RequestState) -> Request:
    arrived = RequestArrived(time_us=0, request_id=17, prompt=TokenRuns((1, 3)), max_new_tokens=1)
    request = Request(arrived, Accepted(b"\0" * 12, "", BASE, 1, 0, None), (), stream_every=1, prefilled_before=0)
    request.state = state
    return request


def event_of(kind: type[Decided]) -> Decided:
    """Return a decided event of this type; its content has no effect on the lifecycle."""
    values: dict[type, Any] = {int: 0, str: "", RequestId: 17}
    hints = typing.get_type_hints(kind)
    return kind(**{name: values.get(hints[name], "pages") for name in kind.__struct_fields__})


@pytest.mark.parametrize(("state", "kind"), PAIRS, ids=lambda value: getattr(value, "name", None) or value.__name__)
def test_pair_moves_by_the_table_or_raises_with_both_names(state: RequestState, kind: type[Decided]) -> None:
    request = request_in(state)
    following = TRANSITIONS.get((state, kind))
    if following is not None:
        request.advance(event_of(kind))
        assert request.state is following
    else:
        with pytest.raises(InvariantError, match=f"r17 cannot take {kind.__name__} while {state.name}"):
            request.advance(event_of(kind))
        assert request.state is state


def test_finished_absorbs() -> None:
    assert not [kind for (state, kind) in TRANSITIONS if state is RequestState.FINISHED]


def test_every_state_is_reached_from_arriving() -> None:
    reached = {RequestState.ARRIVING}
    for _ in RequestState:
        reached |= {following for (state, _), following in TRANSITIONS.items() if state in reached}
    assert reached == set(RequestState)


def test_scenarios_reach_every_pair_of_the_table() -> None:
    reached = set()
    for path in sorted(SCENARIOS.rglob("*.txt")):
        text = path.read_text()
        if not is_spelt_out(text):
            run = Run()
            play(parse(text), run)
            reached |= set(run.transitions)
    missing = [f"{state.name} {kind.__name__}" for state, kind in TRANSITIONS if (state, kind) not in reached]
    assert not missing, f"no scenario takes {', '.join(missing)}"
