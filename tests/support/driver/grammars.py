"""Grammars that constrain outputs, and their compilation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lockstep.core.contract.commands import CompileGrammar, Step
from lockstep.core.contract.events import GrammarReady, RequestAdmitted
from tests.support.driver.actions import GRAMMARS
from tests.support.driver.piece import Piece, Subject


class GrammarPiece(Piece):
    """Grammars that a compiler compiles, or rejects."""

    def __init__(self, subject: Subject) -> None:
        super().__init__(subject)
        self.compiling: list[str] = []  # names of the grammars that are being compiled
        self.invalid: set[str] = set()

    def actions(self) -> dict[str, Callable[..., None]]:
        return {"compiled": self.compiled, "compiled_again": self.compiled_again}

    def compiled(self, choice: int, error: str = "") -> None:
        """The compiler answers an order, perhaps when no request waits for it any more."""
        if not self.compiling:
            return
        name = self.compiling.pop(choice % len(self.compiling))
        waiting = any(self.subject.records[request_id].grammar == name for request_id in self.engine.blocked)
        self.mark(("grammar refused" if error else "grammar compiled") if waiting else "grammar compiled in vain")
        if error and self.engine.grammars.known[name.encode()].error is None:
            self.invalid.add(name)
        self.subject.fold(GrammarReady(self.subject.now_us, name.encode(), error))

    def compiled_again(self, choice: int, error: str = "") -> None:
        """A repeated answer, or one for a grammar that was never requested."""
        name = f"g{choice % GRAMMARS}"
        if name not in self.compiling:
            self.subject.fold(GrammarReady(self.subject.now_us, name.encode(), error))

    def commands(self) -> dict[type, Callable[[Any], None]]:
        return {CompileGrammar: lambda command: self.compiling.append(command.grammar.source)}

    def decided(self) -> dict[type, Callable[[Any, Step], None]]:
        return {RequestAdmitted: self._admitted}

    def _admitted(self, event: RequestAdmitted, step: Step) -> None:
        grammar = self.subject.records[event.request_id].grammar
        assert grammar not in self.invalid, f"r{event.request_id} runs under an invalid grammar"
