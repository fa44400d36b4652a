"""Token ids for a journal that holds no text and still replays decision for decision.

The core compares token ids in two places only: prefixes in the radix cache, and stop tokens. So the journal may hold
any other ids for which both comparisons have the same outcome. Id i of a text becomes a keyed hash of ids 0 to i: equal
prefixes stay equal, and after the first difference all ids differ. The key is drawn at random for each journal and is
not stored. A stop token of its own request is kept as it is.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
from msgspec.structs import replace

from lockstep.core.contract.commands import Command, FinishRequest, RejectRequest, StreamTokens
from lockstep.core.contract.events import BatchFinished, RequestArrived, RequestId, TokenIds

KEY_BYTES = 32
STATE_BYTES = 16
MARK = 1 << 30
"""Set in every pseudonym and in no token id: a pseudonym never equals a stop token."""


class Pseudonyms:
    """Replaces the token ids of events, which must be passed in the order in which the core folds them."""

    def __init__(self, key: bytes | None = None) -> None:
        self._key = os.urandom(KEY_BYTES) if key is None else key
        self._states: dict[RequestId, bytes] = {}  # by request, behind its newest token
        self._stops: dict[RequestId, tuple[int, ...]] = {}

    def arrived(self, event: RequestArrived) -> RequestArrived:
        """Return the arrival with pseudonyms for its prompt and its namespace."""
        namespace, prompt, state = event.namespace, event.prompt, b""
        if namespace:
            namespace = blake2b(namespace.encode(), key=self._key, digest_size=STATE_BYTES).hexdigest()
        if isinstance(prompt, TokenIds):
            ids, state = self._chain(np.frombuffer(prompt.ids, np.int32).tolist())
            prompt = TokenIds(np.array(ids, np.int32).tobytes())
        self._states[event.request_id] = state
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
        found: list[int] = []
        at = 0
        for request_id, count in zip(samplers, counts, strict=True):
            stops, state = self._stops.get(request_id, ()), self._states.get(request_id, b"")
            for number, token in enumerate(tokens[at : at + count]):
                (pseudonym,), state = self._chain([token], state)
                found.append(token if token in stops else pseudonym)
                if number < kept.get(request_id, 0):
                    self._states[request_id] = state
            at += count
        return replace(event, tokens=np.array(found, np.int32).tobytes())

    def forget(self, commands: Sequence[Command]) -> None:
        """Keep nothing of requests that these commands end."""
        for command in commands:
            if isinstance(command, FinishRequest | RejectRequest):
                self._states.pop(command.request_id, None)
                self._stops.pop(command.request_id, None)

    def _chain(self, ids: list[int], state: bytes = b"") -> tuple[list[int], bytes]:
        """Return the pseudonyms of consecutive ids behind `state`, and the state behind the last one."""
        found, key = [], self._key
        for token in ids:
            state = blake2b(state + token.to_bytes(4, "little"), key=key, digest_size=STATE_BYTES).digest()
            found.append(int.from_bytes(state[:4], "little") & (MARK - 1) | MARK)
        return found, state
