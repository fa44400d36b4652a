"""Token ids for a journal that holds no text and still replays decision for decision.

The core compares token ids in two places only: prefixes in the radix cache, and stop tokens. So the journal may hold
any other ids for which both comparisons have the same outcome. Id i of a text becomes a keyed hash of ids 0 to i: equal
prefixes stay equal, and after the first difference all ids differ. The key is drawn at random for each journal and is
not stored. A stop token of its own request is kept as it is.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
from msgspec.structs import replace

from lockstep.core.contract.commands import Command, FinishRequest, RejectRequest, StreamTokens
from lockstep.core.contract.events import BatchFinished, RequestArrived, RequestId, TokenIds

KEY_BYTES = 32
NAMESPACE_BYTES = 16
TURN = 64
"""Token ids that are hashed in one turn, about 50 us: the scheduling thread may wait as long for Python's lock."""
MARK = 1 << 30
"""Set in every pseudonym and in no token id: a pseudonym never equals a stop token."""


class Pseudonyms:
    """Replaces the token ids of events, which must be passed in the order in which the core folds them."""

    def __init__(self, key: bytes | None = None, pause: Callable[[], None] = lambda: None) -> None:
        """
        Args:
            pause: called after each TURN of ids. A thread beside others sleeps there for a moment.
        """
        self._key = os.urandom(KEY_BYTES) if key is None else key
        self._pause = pause
        self._turn = 0  # ids so far
        self._nothing: Any = blake2b(key=self._key, digest_size=4)  # the hash of no text; copied, never changed
        self._texts: dict[RequestId, Any] = {}  # by request, the hash of its ids up to the newest
        self._stops: dict[RequestId, tuple[int, ...]] = {}

    def arrived(self, event: RequestArrived) -> RequestArrived:
        """Return the arrival with pseudonyms for its prompt and its namespace."""
        namespace, prompt, text = event.namespace, event.prompt, self._nothing.copy()
        if namespace:
            namespace = blake2b(namespace.encode(), key=self._key, digest_size=NAMESPACE_BYTES).hexdigest()
        if isinstance(prompt, TokenIds):
            prompt = TokenIds(self._continued(text, prompt.ids))
        self._texts[event.request_id] = text
        self._stops[event.request_id] = event.stop_token_ids
        return replace(event, prompt=prompt, namespace=namespace)

    def finished(
        self, event: BatchFinished, samplers: Sequence[RequestId], commands: Sequence[Command]
    ) -> BatchFinished:
        """Return the result with pseudonyms for its tokens.

        Args:
            samplers: the request of each sampling row.
            commands: those of the Step that folded the event. Tokens that it streams are outputs of their requests.
        """
        kept: dict[RequestId, int] = {}
        for command in commands:
            if isinstance(command, StreamTokens):
                kept.update(zip(command.request_ids.tolist(), command.token_counts.tolist(), strict=True))
        tokens = np.frombuffer(event.tokens, np.int32).tolist()
        counts = np.frombuffer(event.accepted, np.int32).tolist() if event.accepted else [1] * len(samplers)
        found: list[bytes] = []
        at = 0
        for request_id, count in zip(samplers, counts, strict=True):
            stops, text = self._stops.get(request_id, ()), self._texts.get(request_id) or self._nothing.copy()
            most = kept.get(request_id, 0)
            for number in range(at, at + count):
                one = event.tokens[4 * number : 4 * number + 4]
                if number - at >= most:  # dropped: the text of the request goes on without it
                    text = text.copy()
                pseudonym = self._continued(text, one)
                found.append(one if tokens[number] in stops else pseudonym)
            at += count
        return replace(event, tokens=b"".join(found))

    def forget(self, commands: Sequence[Command]) -> None:
        """Keep nothing of requests that these commands end."""
        for command in commands:
            if isinstance(command, FinishRequest | RejectRequest):
                self._texts.pop(command.request_id, None)
                self._stops.pop(command.request_id, None)

    def _continued(self, text: Any, ids: bytes) -> bytes:
        """Add consecutive ids to a text, and return their pseudonyms.

        Args:
            text: the hash of the ids in front; it is changed.
            ids: int32 each.
        Returns: int32 for each id.
        """
        update, copied = text.update, text.copy
        found: list[bytes] = []
        for at in range(0, len(ids), 4):
            update(ids[at : at + 4])
            found.append(copied().digest())
            self._turn += 1
            if not self._turn % TURN:
                self._pause()
        return (np.frombuffer(b"".join(found), np.int32) & (MARK - 1) | MARK).tobytes()
