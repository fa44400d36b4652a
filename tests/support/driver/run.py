"""A whole history: a list of actions through a driver, and the shortest list that still fails."""

from __future__ import annotations

from lockstep.core.contract.config import SchedConfig
from tests.support.driver.actions import Action
from tests.support.driver.driver import Driver


def run_actions(config: SchedConfig, actions: list[Action], *, replay: bool = False) -> Driver:
    """Safety mode through all actions, then liveness mode. Raises AssertionError (or InvariantError, which is one)."""
    driver = Driver(config)
    for action in actions:
        driver.do(action)
    driver.settle()
    driver.kv.check_plans_unchanged()
    if replay:
        driver.replayed()
    return driver


def shrunk(config: SchedConfig, actions: list[Action]) -> list[Action]:
    """A shorter list that still fails, by delta debugging: drop ever smaller stretches while the failure stays."""
    size = max(1, len(actions) // 2)
    while size >= 1:
        at = 0
        while at < len(actions):
            candidate = actions[:at] + actions[at + size :]
            if _fails(config, candidate):
                actions = candidate
            else:
                at += size
        size //= 2
    return actions


def _fails(config: SchedConfig, actions: list[Action]) -> bool:
    try:
        run_actions(config, actions)
    except Exception:
        return True
    return False
