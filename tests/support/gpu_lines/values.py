"""What an expression may be: a set of `None`, `False`, `True` and anything else, as bits."""

from __future__ import annotations

NOTHING = 0  # not computed, or by no code that runs
NONE, FALSE, TRUE, OTHER = 1, 2, 4, 8
BOOL = FALSE | TRUE


def may_hold(value: int) -> bool:
    """Return whether a condition with this value may hold."""
    return bool(value & (TRUE | OTHER))


def may_fail(value: int) -> bool:
    """Return whether a condition with this value may fail."""
    return bool(value & (NONE | FALSE | OTHER))


def negated(value: int) -> int:
    """Return `not value`."""
    return (FALSE if may_hold(value) else 0) | (TRUE if may_fail(value) else 0)


def is_none(value: int) -> int:
    """Return `value is None`."""
    return (TRUE if value & (NONE | OTHER) else 0) | (FALSE if value & (FALSE | TRUE | OTHER) else 0)


def of_constant(value: object) -> int:
    """Return what a literal is."""
    if value is None:
        return NONE
    return OTHER if not isinstance(value, bool) else TRUE if value else FALSE
