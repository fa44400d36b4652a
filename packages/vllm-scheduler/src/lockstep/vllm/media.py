"""Multimodal inputs: the core decides what is encoded and kept, vLLM's workers encode it in the pass that needs it.

    core                                         this module                       vLLM's workers
    EncodeMedia: room for one content is taken   waits for the encoder's budget
    MediaEncoded: the request may be admitted    answered before a pass
    a plan that computes positions of a span     scheduled_encoder_inputs          encode it before the forward, keep it
    EncodeMedia.drop: the room is needed         free_encoder_mm_hashes            free it

Each item of a request is a span of its prompt. Its digest is a keyed hash of vLLM's identifier of the item: equal items
share the encoder output and the prefix cache, and a journal holds no hash of a content. The core reserves room in the
encoder cache for all items of a request before it admits the request, and frees it when the prompt is computed.

vLLM's encoder runs inside the pass of the request's tokens, so an answer comes before the encoder has run. It means
that the encoder runs in the first pass that computes a position of the span; the core plans no such pass before the
answer. The answers keep the budget of a pass: items that are answered and not encoded have at most
`encoder_budget_tokens` together. Two cases exceed it: a single request with more than that, of which each pass encodes
what its chunk needs, and items of a cancelled request that another request needs afterwards.
"""

from __future__ import annotations

from collections import deque
from hashlib import blake2b
from typing import TYPE_CHECKING, Literal, cast

from lockstep.core.contract.events import PromptSpan

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lockstep.core.contract.commands import EncodeMedia
    from lockstep.vllm.requests import Tracked
    from vllm.multimodal.inputs import MultiModalFeatureSpec
    from vllm.v1.request import Request

DIGEST_BYTES = 32
KINDS = ("audio", "video")  # other modalities are images to the core


class EncoderInputs:
    """Items of all requests that have not ended, and what the workers' encoder cache holds."""

    def __init__(self, *, budget_tokens: int, look_ahead: int, key: bytes) -> None:
        """
        Args:
            budget_tokens: encoder tokens of one pass.
            look_ahead: positions behind those of a pass whose embeddings a drafter reads.
            key: of the digests.
        """
        self._budget_tokens = budget_tokens
        self._look_ahead = look_ahead
        self._key = key
        self._asked: deque[EncodeMedia] = deque()  # not answered, oldest first
        self._answered: dict[bytes, int] = {}  # not encoded: encoder tokens by digest
        self._encoded: dict[bytes, str] = {}  # on the workers: vLLM's identifier by digest
        self._needed: dict[str, set[bytes]] = {}  # digests by request
        self._freed: list[str] = []  # identifiers that the workers are still to free

    def digest(self, feature: MultiModalFeatureSpec) -> bytes:
        """Return the core's digest of an item."""
        return blake2b(feature.identifier.encode(), key=self._key, digest_size=DIGEST_BYTES).digest()

    def spans_of(self, request: Request) -> tuple[PromptSpan, ...]:
        """Return the spans of a request that arrives. They count as needed until `forget`."""
        if not request.mm_features:
            return ()
        spans = []
        for feature in request.mm_features:
            at = feature.mm_position
            kind = feature.modality if feature.modality in KINDS else "image"
            spans.append(
                PromptSpan(
                    at.offset,
                    at.offset + at.length,
                    cast(Literal["image", "audio", "video"], kind),
                    self.digest(feature),
                    at.get_num_embeds(),
                )
            )
        self._needed[request.request_id] = {span.digest for span in spans}
        return tuple(sorted(spans, key=lambda span: span.start))

    def forget(self, request_id: str) -> None:
        """A request ended."""
        self._needed.pop(request_id, None)

    def ask(self, command: EncodeMedia) -> None:
        """Take in an order of the core. What it drops is freed by the workers with the next pass."""
        for digest in command.drop:
            self._answered.pop(digest, None)
            if (identifier := self._encoded.pop(digest, None)) is not None:
                self._freed.append(identifier)
        self._asked.append(command)

    def answers(self) -> Iterator[EncodeMedia]:
        """Return the orders that are to be answered now, oldest first, as far as the budget goes."""
        while self._asked and self._has_budget_for(self._asked[0]):
            yield self._answer()

    def answer_one(self) -> EncodeMedia | None:
        """Return the oldest order whatever the budget; for an engine with nothing else to do."""
        return self._answer() if self._asked else None

    def _answer(self) -> EncodeMedia:
        command = self._asked.popleft()
        self._answered[command.digest] = command.encoder_tokens
        return command

    def _has_budget_for(self, command: EncodeMedia) -> bool:
        """Whether an item fits into a pass beside those that are answered, or they are of one request with it."""
        wanted = [needed for needed in self._needed.values() if command.digest in needed]
        needed = set[bytes]().union(*self._needed.values())
        before = {digest: tokens for digest, tokens in self._answered.items() if digest in needed}
        if not wanted or not before or sum(before.values()) + command.encoder_tokens <= self._budget_tokens:
            return True
        return any(one >= before.keys() for one in wanted)

    def inputs_of(self, entry: Tracked, start: int, stop: int) -> list[int]:
        """Return the numbers of the items that the workers encode before a pass over [start:stop) of a request."""
        found = []
        for number, feature in enumerate(entry.request.mm_features):
            at = feature.mm_position
            if at.offset >= stop + self._look_ahead or at.offset + at.length <= start:
                continue
            digest = self.digest(feature)
            if digest not in self._encoded and at.get_num_embeds():
                self._encoded[digest] = feature.identifier
                self._answered.pop(digest, None)
                found.append(number)
        return found

    def freed(self) -> list[str]:
        """Return the identifiers that the workers free before the next pass, each once."""
        freed, self._freed = self._freed, []
        return freed

    def outdate(self) -> None:
        """Encode every item again when it is next needed: the workers' encoder cache was emptied."""
        self._encoded.clear()
        self._freed.clear()

    def void(self) -> None:
        """Nothing is asked or encoded any more: the core has lost its encoder cache."""
        self._freed += self._encoded.values()
        self._asked.clear()
        self._answered.clear()
        self._encoded.clear()
