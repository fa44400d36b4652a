"""Drives an engine through a list of actions and checks everything that can be checked after each of them.

The driver passes events to the engine and each Step to the tagged devices; each feature has a piece of its own
(`piece.Piece`). The swarm draws lists of actions from a seed (`draw`); the Hypothesis machine builds them
rule by rule.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lockstep.core import invariants
from lockstep.core.contract.commands import Step
from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.events import Flush, Observed, Resume, ResumeMemory, SlowDown
from lockstep.core.scheduler.engine import Engine
from tests.support.driver.actions import CONTROLS, QUIESCENCE_STEPS_MAX, Action
from tests.support.driver.adapters import AdapterPiece
from tests.support.driver.batches import BatchPiece, LimitPiece
from tests.support.driver.control import ControlPiece
from tests.support.driver.grammars import GrammarPiece
from tests.support.driver.hybrid import HybridPiece
from tests.support.driver.media import MediaPiece
from tests.support.driver.microbatches import MicrobatchPiece
from tests.support.driver.obligations import (
    EndObligations,
    EvictionObligations,
    MatchObligations,
    PauseObligations,
    PreemptionObligations,
    PrefetchObligations,
    RetractionObligations,
    WaitObligations,
)
from tests.support.driver.ordering import PreemptionPiece, QueuePiece
from tests.support.driver.piece import Piece, Subject
from tests.support.driver.quality import QualityPiece
from tests.support.driver.recovery import RecoveryPiece
from tests.support.driver.requests import RequestPiece, SamplePiece
from tests.support.driver.sessions import SessionPiece
from tests.support.driver.speculation import SpeculationPiece
from tests.support.driver.tiers import TierPiece


class Driver(Subject):
    """One engine, its tagged devices, and one piece per feature."""

    def __init__(self, config: SchedConfig, *, check: bool = True) -> None:
        """`check`: all invariants after every event."""
        super().__init__(config, check=check)
        self.steps = 0
        self.events: list[tuple[Observed, bytes]] = []  # with the digest of each Step
        self.step = Step()  # of the newest event
        self.control = ControlPiece(self)
        self.requests = RequestPiece(self, self.control)
        self.samples = SamplePiece(self)
        self.batches = BatchPiece(self)
        self.media = MediaPiece(self)
        self.grammars = GrammarPiece(self)
        self.adapters = AdapterPiece(self, self.control)
        self.sessions = SessionPiece(self, self.control)
        self.moves = TierPiece(self)
        self.recovery = RecoveryPiece(self, self.control, self.adapters)
        self.quality = QualityPiece(self)
        queue = QueuePiece(self, self.samples)
        self.pieces: tuple[Piece, ...] = (
            self.control,
            self.requests,
            self.samples,
            queue,
            self.batches,
            LimitPiece(self),
            PreemptionPiece(self, queue),
            MicrobatchPiece(self),
            SpeculationPiece(self),
            HybridPiece(self),
            self.media,
            self.grammars,
            self.adapters,
            self.sessions,
            self.moves,
            self.recovery,
            EndObligations(self),
            PauseObligations(self),
            RetractionObligations(self),
            MatchObligations(self),
            EvictionObligations(self),
            PreemptionObligations(self),
            PrefetchObligations(self),
            WaitObligations(self),
            self.quality,
        )
        self.actions: dict[str, Callable[..., None]] = {}
        self._decided: dict[type, list[Callable[[Any, Step], None]]] = {}
        self._commands: dict[type, list[Callable[[Any], None]]] = {}
        for piece in self.pieces:
            self.actions |= piece.actions()
            for kind, on_decided in piece.decided().items():
                self._decided.setdefault(kind, []).append(on_decided)
            for kind, on_command in piece.commands().items():
                self._commands.setdefault(kind, []).append(on_command)
        self._before = [piece.before for piece in self.pieces if type(piece).before is not Piece.before]
        self._stepped = [piece.stepped for piece in self.pieces if type(piece).stepped is not Piece.stepped]
        self._checked = [piece.checked for piece in self.pieces if type(piece).checked is not Piece.checked]

    def do(self, action: Action) -> None:
        """Carry out one action if it is possible now."""
        name, *values = action
        self.actions[name](*values)

    def fold(self, event: Observed) -> None:
        """Pass one event to the engine; check its Step against the requests, the devices and the invariants."""
        for before in self._before:
            before(event)
        step = self.step = self.engine.step(event)
        self.steps += 1
        self.events.append((event, step.digest))
        for stepped in self._stepped:
            stepped(event, step)
        for decided in step.decided:
            for on_decided in self._decided.get(type(decided), ()):
                on_decided(decided, step)
        for command in step.commands:
            for on_command in self._commands.get(type(command), ()):
                on_command(command)
        if self.tiers is not None:
            self.tiers.before(event, step)
        self.kv.observe(event, step)
        if self.tiers is not None:
            self.tiers.observe(event, step)
        for checked in self._checked:
            checked(event, step)
        if self.check:
            invariants.check(self.engine)
            invariants.check_wake(self.engine, step)

    def settle(self) -> None:
        """Liveness mode: faults and arrivals stop, completions flow; everything must end, and leave nothing behind."""
        for control in (Resume(), ResumeMemory(("weights", "kv_cache")), SlowDown(0)):
            self.do(("control", CONTROLS.index(control)))
        for _ in range(QUIESCENCE_STEPS_MAX):
            if invariants.is_idle(self.engine) and not self.control.orders and not self.kv.loads:
                if not self.moves.moving:
                    break
            self.now_us += 1
            self.moves.move(0)
            self.control.order_done()
            self.media.encode()
            self.adapters.adapter_loaded(0)
            in_flight = len(self.kv.stream)
            if self.engine.config.grammar_timeout_us is None:  # with a time-out no grammar is compiled: it must end too
                self.grammars.compiled(0)
            self.batches.ready(in_turn=True)
            if len(self.kv.stream) == in_flight:
                self.batches.finish()
        assert invariants.is_idle(self.engine), (
            f"L1: after {QUIESCENCE_STEPS_MAX} steps {list(self.engine.requests)} have not ended"
        )
        invariants.check_quiescent(self.engine)
        self.sessions.close_all()
        self.do(("control", CONTROLS.index(Flush())))
        for piece in self.pieces:
            piece.at_rest()

    def replayed(self) -> None:
        """S35: check that a fresh engine has equal digests for the recorded events."""
        engine = Engine(self.config)
        for number, (event, digest) in enumerate(self.events):
            assert engine.step(event).digest == digest, f"S35: replay differs at event {number}, {event}"
