"""Facts about adapters that cannot be."""

from __future__ import annotations

import pytest

from lockstep.core.contract.commands import ControlAnswered
from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.errors import ConfigError, ContractError
from lockstep.core.contract.events import AdapterLoaded, ControlRequested, LoadAdapterControl
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
    """It separates the version of the weights from what the core adds to a namespace."""
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
