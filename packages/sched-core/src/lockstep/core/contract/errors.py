"""The core's errors. Each message states what was expected, what came, where, and what to try."""

from __future__ import annotations


class LockstepError(Exception):
    """Base of every error the core raises on purpose."""


class ConfigError(LockstepError, ValueError):
    """Settings that cannot work, refused at construction. The message names fields, values and a fix."""


class ContractError(LockstepError):
    """The host broke the contract of `events.py`: an impossible fact, such as the result of a batch that was not
    launched."""


class InvariantError(LockstepError, AssertionError):
    """An equation that always holds does not. A bug in the core, never bad input."""


class PolicyError(LockstepError):
    """A policy of an installed package returned something that is no order of the waiting queue, or failed."""
