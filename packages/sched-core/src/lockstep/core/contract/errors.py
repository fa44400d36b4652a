"""The core's errors. Each message contains the expected value, the actual value, the place, and a remedy."""

from __future__ import annotations


class LockstepError(Exception):
    """Base of every error that the core raises deliberately."""


class ConfigError(LockstepError, ValueError):
    """Settings that cannot work, refused at construction. The message names fields, values and a fix."""


class ContractError(LockstepError):
    """The host broke the contract of `events.py`, for example by the result of a batch that was not launched."""


class InvariantError(LockstepError, AssertionError):
    """An invariant does not hold. This is a bug in the core, never bad input."""


class PolicyError(LockstepError):
    """A policy of an installed package failed, or its result is no order of the waiting queue."""
