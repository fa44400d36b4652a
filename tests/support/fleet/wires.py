"""The records of a fleet: its members, and per room the wire between a prefill and a decode engine."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from lockstep.core.contract.commands import (
    CompileGrammar,
    ControlAnswered,
    EncodeMedia,
    StartTransfer,
)
from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.events import (
    AdapterLoaded,
    GrammarReady,
    MediaEncoded,
    Observed,
    PromptSpan,
    TurnStarted,
    WeightsSwapped,
)
from lockstep.core.scheduler.engine import Engine
from tests.support.served import Answer, Asked
from tests.support.tagged_kv import TaggedKv
from tests.support.tagged_tiers import Move, TaggedTiers

Status = Literal["accepted", "offered", "done", "failed", "link_down"]


@dataclass
class Sent:
    """A part of a prompt, as its engine ordered it to be sent."""

    command: StartTransfer
    ready: bool = False  # its batch succeeded


@dataclass(repr=False)  # as of a member
class Wire:
    """One room, as the network sees it."""

    room: int
    asked: Asked
    prefill: Member
    decode: Member
    ids: dict[str, int] = field(default_factory=dict)  # by name of a member, its id of the request
    parts: list[Sent] = field(default_factory=list)
    moved: int = 0  # parts
    receive: StartTransfer | None = None
    generation: int = 0  # of the decode engine when it allocated pages
    outcome: Status | None = None  # the final fact to both sides; from then on no engine writes
    first_token: int | None = None
    cancelled: bool = False  # its client left
    about: dict[str, Any] = field(default_factory=dict)  # further fields of its arrival, on both engines
    group: list[Wire] = field(default_factory=list)  # the samples of its arrival, itself among them
    prompt_tokens: int = 0
    turn: TurnStarted | None = None  # of a session, of which the prefill engine has no record
    spans: tuple[PromptSpan, ...] = ()  # of that turn's whole prompt
    dropped: set[str] = field(default_factory=set)  # engines to which its half never comes
    alone: bool = False  # it ends with its prompt, and goes to a prefill engine only
    grammar_ends: int | None = None  # outputs after which its grammar admits nothing more

    @property
    def wanted(self) -> Answer:
        """The answer that the client must get."""
        asked = self.asked
        if self.alone:
            return Answer("computed", ())
        if self.turn is not None:
            most = self.turn.max_new_tokens
            asked = dataclasses.replace(asked, max_new=most, min_new=min(asked.min_new, most))
        answer, ends = asked.answer, self.grammar_ends  # a grammar's end does not wait for `min_new`
        count = len(answer.tokens)
        if ends is not None and (ends < count or (ends == count and answer.reason == "length")):
            return Answer("grammar", answer.tokens[:ends])
        return answer


@dataclass(repr=False)  # of each line of a traceback, or it would write out all engines
class Member:
    """One engine of a fleet, with its device and the records of its host."""

    name: str
    config: SchedConfig
    engine: Engine
    kv: TaggedKv
    by_id: list[Wire] = field(default_factory=list)  # by request id
    controls: dict[int, ControlAnswered | None] = field(default_factory=dict)
    orders: list[WeightsSwapped] = field(default_factory=list)  # answers to come
    steps: int = 0
    events: list[tuple[Observed, bytes]] = field(default_factory=list)
    tiers: TaggedTiers | None = None
    offered: int = -1  # the microbatch that was offered a slot last
    changing: dict[int, str] = field(default_factory=dict)  # by control id, the role it is to take
    compiling: list[CompileGrammar] = field(default_factory=list)  # not answered, as all that follow
    encoding: list[EncodeMedia] = field(default_factory=list)
    owing: dict[int, int] = field(default_factory=dict)  # by request: where a checkpoint behind a received state is due

    @property
    def sends(self) -> bool:
        """Whether it is a prefill engine now."""
        return self.engine.config.role == "prefill"

    @property
    def kind(self) -> str:
        """p or d: what it is now."""
        return "p" if self.sends else "d"

    def answers_due(self) -> list[Observed]:
        """Return the answers of a compiler, an encoder or the device that could arrive next, one of each kind."""
        due: list[Observed] = [GrammarReady(0, command.grammar.digest) for command in self.compiling[:1]]
        due += [MediaEncoded(0, command.digest, "", command.generation) for command in self.encoding[:1]]
        due += [AdapterLoaded(0, load.adapter, load.version, "", self.engine.generation) for load in self.kv.loads[:1]]
        return due

    def tier_moves(self) -> list[Move]:
        """Copies between the tiers of its cache that are under way."""
        return list(self.tiers.moves.values()) if self.tiers is not None else []


@dataclass(frozen=True)
class Told:
    """A fact on its way to a host."""

    wire: Wire
    to: str
    status: Status
