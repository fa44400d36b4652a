"""What the pieces of a driver share: the engine under test with its devices, and the hooks that a piece may implement.

A *piece* is the part of a driver that concerns one feature: the actions by which a history uses it, what the host does
for its commands, and the checks and marks of each Step. The driver collects the hooks at construction; a hook that a
piece does not override costs nothing. For each event they run in this order:

    before     the engine has not seen the event
    stepped    the engine has decided
    decided    per decided event, by its type
    commands   per command, by its type
    (the tagged devices take part in the Step)
    checked    engine and devices agree again
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from lockstep.core.contract.commands import Step
from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.events import Observed
from lockstep.core.scheduler.engine import Engine
from tests.support.driver.actions import output_token
from tests.support.tagged_kv import TaggedKv
from tests.support.tagged_tiers import TaggedTiers


@dataclass
class RequestRecord:
    """One request from outside: the parameters of its arrival and the tokens that were streamed."""

    prompt_tokens: int
    max_new_tokens: int
    stops_at: int | None  # the number of the output that is STOP_TOKEN
    heeds_stop: bool  # STOP_TOKEN ends it ...
    min_new: int  # ... once it has so many outputs; a grammar's end may come before
    grammar: str = ""
    grammar_ends: int | None = None  # outputs after which its grammar admits nothing more
    watches_text: bool = False
    sent: list[int] = field(default_factory=list)
    ended: str = ""

    def held(self, outputs: int) -> int:
        """How many of its newest tokens may begin a stop text when it has this many outputs."""
        return min(outputs, outputs * 17 % 5) if self.watches_text else 0


class Subject(ABC):
    """The engine under test, its tagged devices, the requests of its history, and what the history has reached."""

    def __init__(self, config: SchedConfig, *, check: bool) -> None:
        self.config = config  # at the start; a history may change settings
        self.engine = Engine(config)
        self.kv = TaggedKv(config, self.token_at)
        self.tiers = TaggedTiers(config.tiers, self.kv) if config.tiers is not msgspec.UNSET else None
        self.check = check
        self.now_us = 0
        self.records: dict[int, RequestRecord] = {}  # by request id
        self.marks: set[str] = set()  # rare branches that were reached

    def token_at(self, request_id: int, position: int) -> int:
        """The token that the device samples for a position of a request."""
        record = self.records[request_id]
        return output_token(request_id, position - record.prompt_tokens, record.stops_at)

    @abstractmethod
    def fold(self, event: Observed) -> None:
        """Pass one event to the engine, and check its Step."""


class Piece:
    """One feature's part of a driver. Subclasses override the hooks that they need."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject

    @property
    def engine(self) -> Engine:
        """The engine under test; a snapshot action replaces it."""
        return self.subject.engine

    def mark(self, reached: str) -> None:
        """Note that a rare branch was reached."""
        self.subject.marks.add(reached)

    def actions(self) -> dict[str, Callable[..., None]]:
        """By name: the actions of this feature."""
        return {}

    def decided(self) -> dict[type, Callable[[Any, Step], None]]:
        """By type of a decided event: what notes or checks it."""
        return {}

    def commands(self) -> dict[type, Callable[[Any], None]]:
        """By type of a command: what the host does."""
        return {}

    def before(self, event: Observed) -> None:
        """Keep what the checks compare the Step with."""

    def stepped(self, event: Observed, step: Step) -> None:
        """Check decisions before the devices take part in the Step."""

    def checked(self, event: Observed, step: Step) -> None:
        """Check engine and devices behind the Step."""

    def at_rest(self) -> None:
        """Check that nothing of this feature is left when the history has ended."""
