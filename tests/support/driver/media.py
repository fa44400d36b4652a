"""Media of prompts, and the encoder that computes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lockstep.core.contract.commands import EncodeMedia, Step
from lockstep.core.contract.events import MediaEncoded, Observed, RequestRetracted
from tests.support.driver.piece import Piece, Subject


class MediaPiece(Piece):
    """Media that an encoder computes."""

    def __init__(self, subject: Subject) -> None:
        super().__init__(subject)
        self.encoding: list[EncodeMedia] = []  # requested of the encoder and not answered

    def actions(self) -> dict[str, Callable[..., None]]:
        return {"encode": self.encode}

    def encode(self, error: bool = False) -> None:
        """The encoder answers its oldest order, which may be from before a restart."""
        if self.encoding:
            command = self.encoding.pop(0)
            late = command.generation != self.engine.generation
            self.mark("encoder output of an older generation ignored" if late else "media encoded")
            message = "the encoder says no" if error else ""  # its bytes are part of the digests of histories
            self.subject.fold(MediaEncoded(self.subject.now_us, command.digest, message, command.generation))

    def commands(self) -> dict[type, Callable[[Any], None]]:
        return {EncodeMedia: lambda command: self.encoding.append(command)}

    def checked(self, event: Observed, step: Step) -> None:
        media = self.engine.media
        if any(isinstance(command, EncodeMedia) for command in step.commands):
            if any(isinstance(decided, RequestRetracted) for decided in step.decided):
                self.mark("retraction asks for media again")
        if media.deferred:
            self.mark("encoder output freed later")
        if media.encodings and any(encoding.outdated for encoding in media.encodings.values()):
            self.mark("encoder output outdated by new weights")
