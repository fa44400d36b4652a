"""A machine of the contract: states, steps that docs/contract.md allows, and what must hold whatever is done.

A machine has two parts that are written apart. Its *rules* are the obligations of docs/contract.md: a step that breaks
one is `Forbidden`. Its *safety* is what they are for, computed from ghosts that no rule reads: tokens at clients, cells
of pages. The explorer goes through every state that allowed steps reach and checks safety and liveness. Run with one
rule left out (`lax`), it must find a state that is unsafe, or from which nothing ends: so each rule is needed, and no
check is one that cannot fail.

Steps of core and host are compared with the same rules: `after` accepts exactly the steps that the contract allows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar

from tests.support.driver.actions import Action
from tests.support.explorer.world import Left, Move


class Forbidden(Exception):
    """A step that docs/contract.md does not allow."""

    def __init__(self, rule: str, what: str) -> None:
        super().__init__(f"{rule}: {what}" if what else rule)
        self.rule = rule


class Unsafe(AssertionError):
    """A state in which what the rules are for does not hold."""


class Machine(ABC):
    """States are immutable values; machines have none."""

    rules: ClassVar[dict[str, str]]
    """By name: the obligation, in the words of docs/contract.md."""

    ends = True
    """Whether steps alone come to an end. Not if the core may choose for ever, within the contract."""

    def __init__(self, *, lax: str = "") -> None:
        """`lax`: a rule that is left out, so that steps against it are tried, too."""
        if lax and lax not in self.rules:
            raise ValueError(f"`lax` must name a rule, got `{lax}`; the rules are {', '.join(self.rules)}")
        self.lax = lax

    def need(self, rule: str, holds: object, what: str = "") -> None:
        """Refuse a step against a rule. Raises: Forbidden."""
        if not holds and self.rules[rule] and rule != self.lax:
            raise Forbidden(rule, what)

    @abstractmethod
    def first(self) -> Any:
        """Return the state in which nothing has happened."""

    @abstractmethod
    def inputs(self) -> dict[str, int]:
        """By kind: how often an input from outside may come, for `Left`."""

    @abstractmethod
    def moves(self, state: Any, left: Left) -> Iterator[Move]:
        """Yield steps to try in a state, inputs first; those that break a rule are left out by the explorer."""

    @abstractmethod
    def after(self, state: Any, action: Action) -> Any:
        """Return the state behind a step. Raises: Forbidden."""

    def followed(self, state: Any, action: Action) -> Any:
        """Return the state behind a step of the product. Raises: Forbidden, Unsafe."""
        state = self.after(state, action)
        if wrong := self.unsafe(state):
            raise Unsafe(wrong)
        return state

    @abstractmethod
    def unsafe(self, state: Any) -> str:
        """Return what is wrong with a state; "" if it is safe."""

    @abstractmethod
    def is_idle(self, state: Any) -> bool:
        """Whether nothing is left to do."""

    def at_rest(self, state: Any) -> str:
        """Return what is left over in a state with nothing left to do; "" if nothing is."""
        return ""

    def canonical(self, state: Any) -> object:
        """Return a form that is equal for states with the same futures."""
        return state
