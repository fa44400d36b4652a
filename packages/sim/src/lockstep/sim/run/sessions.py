"""Checks of options that cannot be combined with server sessions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lockstep.core.contract.errors import ConfigError

if TYPE_CHECKING:
    from lockstep.sim.scenario.scenario import Scenario


def check_server_sessions(scenario: Scenario) -> None:
    """Raise ConfigError for options that are not simulated together with server sessions."""
    if not scenario.server_sessions:
        return
    role = scenario.settings.get("role", "mixed")
    others: dict[str, Any] = {
        "samples": scenario.samples,  # a turn of a session has one answer
        "media": scenario.media,
        "max_new_tokens": scenario.max_new_tokens,  # a shortened answer would not be the prefix of the next turn
        "rank_schedulers": scenario.rank_schedulers or None,
        "role": None if role == "mixed" else role,
    }
    for name, value in others.items():
        if value is not None:
            raise ConfigError(
                f"`server_sessions` is on, and `{name}` is {'on' if value is True else f'`{value}`'}: the two are not "
                "simulated together\nhint: leave out one of them"
            )
