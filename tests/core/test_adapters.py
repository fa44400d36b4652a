"""Impossible facts about adapters are refused."""

from __future__ import annotations

import numpy as np
import pytest

from lockstep.core.contract.commands import ControlAnswered
from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.errors import ConfigError, ContractError
from lockstep.core.contract.events import (
    AdapterLoaded,
    ControlRequested,
    LaneReady,
    LoadAdapterControl,
    RequestAdmitted,
    RequestArrived,
    TokenIds,
)
from lockstep.core.invariants import check
from lockstep.core.journal import snapshot
from lockstep.core.scheduler.engine import Engine


@pytest.mark.parametrize(
    "event",
    [
        AdapterLoaded(0, "law", 1),
        AdapterLoaded(0, "med", 2),
        AdapterLoaded(0, "med", 1, generation=1),
    ],
)
def test_load_that_was_not_ordered_is_refused_and_changes_nothing(event: AdapterLoaded) -> None:
    engine = Engine(SchedConfig(max_loras=2))
    engine.step(ControlRequested(0, 0, LoadAdapterControl("law", 1)))
    engine.step(ControlRequested(0, 1, LoadAdapterControl("med", 1, pinned=True)))
    before = snapshot.dump(engine)
    with pytest.raises(ContractError):
        engine.step(event)
    assert snapshot.dump(engine) == before


def test_name_with_a_zero_character_is_refused() -> None:
    """The character separates the version of the weights from the parts that the core adds to a namespace."""
    (answer,) = Engine(SchedConfig(max_loras=2)).step(ControlRequested(0, 0, LoadAdapterControl("a\0", 1))).commands
    assert answer == ControlAnswered(
        0, False, "`adapter` holds a zero character, which separates it from what the core adds"
    )


def test_settings_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_loras"):
        SchedConfig(max_loras=-1)
    with pytest.raises(ConfigError, match="`max_loras` must be a whole number, 0"):
        SchedConfig(max_loras=1.5)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="bypass_limit"):
        SchedConfig(bypass_limit=-1)


def with_adapters(**settings: object) -> Engine:
    """Return an engine with two adapters on the device and two places for them."""
    engine = Engine(SchedConfig(page_size=4, pages=64, max_loras=2, overlap_depth=0, **settings))  # type: ignore[arg-type]
    for number, name in enumerate(("law", "med")):
        engine.step(ControlRequested(0, number, LoadAdapterControl(name, 1, pinned=number == 0)))
    for number, name in enumerate(("law", "med", "")):
        engine.step(arrived(number, adapter=name))
        if name:
            engine.step(AdapterLoaded(0, name, 1))
    return engine


def arrived(request_id: int, adapter: str) -> RequestArrived:
    prompt = TokenIds(np.arange(6, dtype=np.int32).tobytes())
    return RequestArrived(0, request_id=request_id, prompt=prompt, max_new_tokens=4, adapter=adapter)


@pytest.mark.parametrize(("beside", "admitted"), [(False, [0, 1]), (True, [0, 1, 2])])
def test_base_model_runs_beside_all_adapters_if_it_does_not_count(beside: bool, admitted: list[int]) -> None:
    engine = with_adapters(base_beside_loras=beside)
    step = engine.step(LaneReady(1))
    assert [one.request_id for one in step.decided if isinstance(one, RequestAdmitted)] == admitted
    check(engine)
    restored = snapshot.restore(snapshot.dump(engine))
    assert snapshot.dump(restored) == snapshot.dump(engine)
    assert restored.memory.adapters.base_counts is not beside


def test_base_beside_loras_is_left_out_of_journals_unless_it_is_on() -> None:
    assert SchedConfig(max_loras=2, base_beside_loras=False) == SchedConfig(max_loras=2)
    with pytest.raises(ConfigError, match="or true with `max_loras`; got `True` with `None`"):
        SchedConfig(base_beside_loras=True)
    with pytest.raises(ConfigError, match="`base_beside_loras` must be false, or true with"):
        SchedConfig(max_loras=2, base_beside_loras=1)  # type: ignore[arg-type]
