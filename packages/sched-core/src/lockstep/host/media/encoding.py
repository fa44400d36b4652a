"""The interface of what keeps the media of open requests and encodes them; `lockstep.runtime.media` implements it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from lockstep.core.contract.events import PromptSpan, RequestId
from lockstep.host.media.content import EncoderInput


class MediaEncoder(Protocol):
    """Media of open requests. Its methods are called in the host's thread."""

    def hold(self, request_id: RequestId, contents: Iterable[EncoderInput]) -> None:
        """Keep the contents of a request until `release`."""

    def release(self, request_id: RequestId, spans: Iterable[PromptSpan]) -> None:
        """Forget the contents that no other request has."""

    def encode(self, digests: Sequence[bytes], drop: Iterable[bytes]) -> list[str]:
        """Drop outputs, then encode contents together, behind all earlier work.

        Returns: for each of them why it cannot be encoded, or "".
        """
