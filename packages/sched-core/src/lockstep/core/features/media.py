"""Media in a prompt: the placeholder ids of their spans, and the encoder output that they need.

**Placeholder ids.** Prefixes are compared token by token, so two spans must have equal ids exactly if they are equal.
31 bits of a digest cannot ensure that. `Placeholders` numbers the contents in order of arrival: a position of a span
holds the negative of its content's number, which is no token id. Numbers are never reused. A dropped content gets a
new number, which costs a cache hit and nothing else.

**Encoder output.** A request with media is held until the encoder has encoded all of them. It takes all the room that
it needs in the encoder cache at once or none, in the order of requests for room. It frees the room when its prompt is
computed or when it leaves. Output that a launched batch may read stays until that batch is collected. So a request that
holds room never waits for room, and a request that waits holds none.

**Encoder budget.** Contents with room wait in a queue for the encoder if there is a budget. The next content is
requested when the contents being encoded leave enough of the budget, or when nothing is being encoded. A content that
no request needs any more leaves this queue. A content that was requested from the encoder is always answered.

    absent --room--> queued --budget: EncodeMedia--> encoding --MediaEncoded--> ready --room is needed--> absent
                        |                                                         unpinned
                        +--unpinned--> absent
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import numpy as np

from lockstep.core.contract.checks import fail
from lockstep.core.contract.commands import EncodeMedia, Step
from lockstep.core.contract.errors import InvariantError
from lockstep.core.contract.events import BatchId, PromptSpan, RequestId
from lockstep.core.kv.component import Component, Restored
from lockstep.core.kv.facts import Facts
from lockstep.core.requests.table import Request

PLACEHOLDERS_MAX = 16_384  # contents with stored numbers
FIRST_PLACEHOLDER = 2  # no placeholder may be -1, which means "no token" elsewhere

Content = tuple[str, bytes, int]  # kind, digest, positions


class Placeholders:
    """Numbers of contents. Equal numbers mean equal contents."""

    def __init__(self) -> None:
        self.numbers: dict[Content, int] = {}  # least recently used first
        self.next = FIRST_PLACEHOLDER

    def laid(self, tokens: bytes, spans: Iterable[PromptSpan]) -> bytes:
        """Return the prompt with placeholders in its spans, as packed int32."""
        ids = np.frombuffer(tokens, np.int32).copy()
        for span in spans:
            ids[span.start : span.stop] = -self._number((span.kind, span.digest, span.stop - span.start))
        return ids.tobytes()

    def _number(self, content: Content) -> int:
        number = self.numbers.pop(content, None)
        if number is None:
            number = self.next
            self.next += 1
        self.numbers[content] = number
        if len(self.numbers) > PLACEHOLDERS_MAX:
            del self.numbers[next(iter(self.numbers))]
        return number


class EncoderEntry(msgspec.Struct):
    """The output of the encoder for one digest, ready or not."""

    tokens: int
    ready: bool = False
    outdated: bool = False  # computed with replaced weights: only for requests that had begun to compute with it


class MediaImage(msgspec.Struct, forbid_unknown_fields=True, rename={"deferred": "fenced", "room_queue": "line"}):
    """Placeholders and the encoder cache. Lists of pairs, because the order in them decides."""

    numbers: list[tuple[Content, int]]
    next: int
    encodings: list[tuple[bytes, EncoderEntry]]
    pins: list[int]
    room_queue: list[int]
    deferred: list[tuple[int, list[bytes]]]
    queued: list[bytes] | msgspec.UnsetType = msgspec.UNSET  # of an encoder with a budget, where anything is
    dropping: list[bytes] | msgspec.UnsetType = msgspec.UNSET


class EncoderPart(msgspec.Struct):
    """Media in a snapshot; None: the engine never had a request with media."""

    media: MediaImage | None = None


class EncoderCache(Component):
    """The bounded cache of encoder output: its entries, the requests that pin them, and those that wait for room."""

    PART = EncoderPart
    EMPTY_AT_REST = ("pins", "room_queue", "deferred", "queued")

    def __init__(self, capacity_tokens: int | None, budget_tokens: int | None = None) -> None:
        self.capacity_tokens = capacity_tokens
        self.placeholders = Placeholders()
        self.budget_tokens = budget_tokens  # tokens encoded at once, except a larger single content; None: no limit
        self.encodings: dict[bytes, EncoderEntry] = {}  # by digest, least recently used first
        self.pins: dict[RequestId, dict[bytes, int]] = {}  # requests with room: tokens by digest
        self.room_queue: dict[RequestId, dict[bytes, int]] = {}  # requests that wait for room, oldest first
        self.deferred: list[tuple[BatchId, list[bytes]]] = []  # digests that batches in flight read for left requests
        self.queued: dict[bytes, None] = {}  # digests with room that wait for the encoder, oldest first
        self.dropping: list[bytes] = []  # dropped digests that the next EncodeMedia reports to the host

    def ask(self, request_id: RequestId, media: dict[bytes, int]) -> None:
        """Queue a request for room for all of `media`, tokens by digest. `serve` assigns the room."""
        self.room_queue[request_id] = media

    def serve(self, step: Step, generation: int) -> list[RequestId]:
        """Assign room to waiting requests, in order, as long as it suffices.

        Returns: the requests that got room and have all their media encoded already.
        """
        done = []
        if self.queued:
            self._forget_unwanted()
            self._order(step, generation)
        while self.room_queue:
            request_id, media = next(iter(self.room_queue.items()))
            dropped = self._droppable(media)
            if dropped is None:
                break
            for digest in dropped:
                del self.encodings[digest]
            self.dropping += dropped
            del self.room_queue[request_id]
            self.pins[request_id] = media
            for digest, tokens in media.items():
                encoding = self.encodings.pop(digest, None)
                if encoding is None:
                    encoding = EncoderEntry(tokens)
                    self.queued[digest] = None
                self.encodings[digest] = encoding
            self._order(step, generation)
            if self._complete(request_id):
                done.append(request_id)
        return done

    def _order(self, step: Step, generation: int) -> None:
        """Order the encoding of queued contents within the budget. The first order names the dropped digests."""
        while self.queued:
            digest = next(iter(self.queued))
            tokens = self.encodings[digest].tokens
            if not self._within_budget(tokens):
                return
            del self.queued[digest]
            step.commands.append(EncodeMedia(digest, tokens, generation, tuple(self.dropping)))
            self.dropping.clear()

    # mechanism: encoder-budget (decided)
    def _within_budget(self, tokens: int) -> bool:
        """Return whether the encoder may begin with `tokens` more."""
        if self.budget_tokens is None:
            return True
        busy = self.encoding_tokens
        return not busy or busy + tokens <= self.budget_tokens

    @property
    def encoding_tokens(self) -> int:
        """Tokens that are being encoded."""
        return sum(one.tokens for digest, one in self.encodings.items() if not one.ready and digest not in self.queued)

    def _forget_unwanted(self) -> None:
        """Free the room of queued contents that no request pins."""
        pinned = {digest for needed in self.pins.values() for digest in needed}
        for digest in [digest for digest in self.queued if digest not in pinned]:
            del self.queued[digest], self.encodings[digest]

    def encoded(self, digest: bytes) -> list[RequestId]:
        """Mark a content as encoded. Returns the requests that have all their media now."""
        self.encodings[digest].ready = True
        return [request_id for request_id in self._needing(digest) if self._complete(request_id)]

    def failed(self, digest: bytes) -> list[RequestId]:
        """Drop a content that could not be encoded. Returns the requests that needed it; they hold no room any more."""
        del self.encodings[digest]
        losers = self._needing(digest)
        for request_id in losers:
            del self.pins[request_id]
        return losers

    def is_encoding(self, digest: bytes) -> bool:
        """Return whether the encoder has been ordered to encode this digest and has not answered."""
        encoding = self.encodings.get(digest)
        return encoding is not None and not encoding.ready and digest not in self.queued

    def has_all(self, request_id: RequestId) -> bool:
        """Return whether all media of the request are encoded and pinned by it."""
        return request_id in self.pins and self._complete(request_id)

    def knows(self, request_id: RequestId) -> bool:
        """Return whether the request has the room that it needs, or waits for room."""
        return request_id in self.pins or request_id in self.room_queue

    def is_outdated(self, request_id: RequestId) -> bool:
        """Return whether the request pins output that was computed with replaced weights."""
        return any(self.encodings[digest].outdated for digest in self.pins.get(request_id, ()))

    def _needing(self, digest: bytes) -> list[RequestId]:
        """Return the requests that pin this digest, in the order in which they got room."""
        return [request_id for request_id, media in self.pins.items() if digest in media]

    def _complete(self, request_id: RequestId) -> bool:
        """Return whether all media that the request pins are encoded."""
        return all(self.encodings[digest].ready for digest in self.pins[request_id])

    def release(self, request_id: RequestId, free_after: BatchId | None = None) -> None:
        """Unpin the media of a request. Batches in flight up to `free_after` may still read them; None: no batch."""
        media = self.pins.pop(request_id, None)
        self.room_queue.pop(request_id, None)
        if media is not None and free_after is not None:
            self.deferred.append((free_after, list(media)))

    def release_deferred(self, batch_id: BatchId) -> None:
        """Free the output that was kept for this collected batch and earlier ones."""
        self.deferred = [entry for entry in self.deferred if entry[0] > batch_id]

    def outdate(self) -> None:
        """Mark all output as computed with replaced weights."""
        for encoding in self.encodings.values():
            encoding.outdated = True

    def void(self) -> None:
        """Drop everything: the device's memory is lost."""
        self.encodings.clear()
        self.pins.clear()
        self.room_queue.clear()
        self.deferred.clear()
        self.queued.clear()
        self.dropping.clear()

    def part(self) -> EncoderPart:
        """Return the state for a snapshot."""
        if not self.placeholders.numbers:
            return EncoderPart()
        return EncoderPart(
            MediaImage(
                numbers=list(self.placeholders.numbers.items()),
                next=self.placeholders.next,
                encodings=list(self.encodings.items()),
                pins=list(self.pins),
                room_queue=list(self.room_queue),
                deferred=list(self.deferred),
                queued=list(self.queued) or msgspec.UNSET,
                dropping=list(self.dropping) or msgspec.UNSET,
            )
        )

    def load(self, part: EncoderPart, restored: Restored) -> None:
        """Take over the state that `part` returned."""
        image = part.media
        if image is None:
            return
        self.placeholders.numbers, self.placeholders.next = dict(image.numbers), image.next
        self.encodings = dict(image.encodings)
        self.pins = {request_id: _media_of(restored.requests[request_id]) for request_id in image.pins}
        self.deferred = list(image.deferred)
        self.room_queue = {request_id: _media_of(restored.requests[request_id]) for request_id in image.room_queue}
        if image.queued is not msgspec.UNSET:
            self.queued = dict.fromkeys(image.queued)
        if image.dropping is not msgspec.UNSET:
            self.dropping = list(image.dropping)

    def check_state(self, facts: Facts) -> None:
        """D11, L2: see `check_room`; requests that hold room, or wait for it, are live."""
        self.check_room()
        for request_id in (*self.pins, *self.room_queue):
            if request_id not in facts.requests:
                fail(f"D11: r{request_id} has ended and holds encoder output, or waits for it")

    def check_room(self) -> None:
        """Raise InvariantError unless pinned output is present, all fits, and the first waiting request lacks room."""
        for request_id, media in self.pins.items():
            for digest, tokens in media.items():
                if digest not in self.encodings or self.encodings[digest].tokens != tokens:
                    raise InvariantError(f"D11: r{request_id} pins encoder output that is not there: {digest.hex()}")
        for free_after, digests in self.deferred:
            if not self.encodings.keys() >= set(digests):
                raise InvariantError(f"S5: encoder output that batch {free_after} may read is not there")
        pinned = {digest for needed in self.pins.values() for digest in needed}
        for digest in self.queued:
            if digest not in pinned or self.encodings[digest].ready:
                raise InvariantError(f"D11: {digest.hex()} is queued for the encoder, but not pinned or ready already")
        if self.queued and self._within_budget(self.encodings[next(iter(self.queued))].tokens):
            raise InvariantError(f"L2: {len(self.queued)} contents wait for an encoder with budget for the first one")
        at, busy = (
            self.budget_tokens,
            [one for d, one in self.encodings.items() if not one.ready and d not in self.queued],
        )
        if at is not None and len(busy) > 1 and sum(one.tokens for one in busy) > at:
            raise InvariantError(f"D11: {sum(one.tokens for one in busy)} tokens being encoded, budget {at}")
        used = sum(encoding.tokens for encoding in self.encodings.values())
        if self.capacity_tokens is not None and used > self.capacity_tokens:
            raise InvariantError(f"D11: {used} tokens of encoder output, encoder_cache_tokens {self.capacity_tokens}")
        if self.room_queue and self._droppable(next(iter(self.room_queue.values()))) is not None:
            raise InvariantError(f"D11: r{next(iter(self.room_queue))} waits for encoder room that can be had")

    def _droppable(self, media: dict[bytes, int]) -> list[bytes] | None:
        """Return the digests to drop so that `media` fit, least recently used first; None if too few can be dropped."""
        pinned = {digest for needed in self.pins.values() for digest in needed}
        pinned.update(digest for _, needed in self.deferred for digest in needed)
        there = {
            digest
            for digest, tokens in media.items()
            if self._tokens(digest) == tokens and not self.encodings[digest].outdated
        }
        idle = [
            digest
            for digest, encoding in self.encodings.items()
            if encoding.ready and digest not in pinned and digest not in there
        ]
        going = [digest for digest in idle if digest in media]  # entries of another size than needed, or outdated ones
        if any(digest in self.encodings and digest not in there and digest not in going for digest in media):
            return None
        if self.capacity_tokens is None:
            return going
        free = self.capacity_tokens - sum(encoding.tokens for encoding in self.encodings.values())
        missing = sum(tokens for digest, tokens in media.items() if digest not in there)
        free += sum(self._tokens(digest) for digest in going)
        for digest in idle:
            if missing <= free:
                break
            if digest not in media:
                going.append(digest)
                free += self._tokens(digest)
        return going if missing <= free else None

    def _tokens(self, digest: bytes) -> int:
        """Return the tokens of room that a digest takes; 0 if it has none."""
        encoding = self.encodings.get(digest)
        return encoding.tokens if encoding is not None else 0


def _media_of(request: Request) -> dict[bytes, int]:
    """Return the media of a request that has some: tokens by digest."""
    assert request.extras is not None
    return request.extras.media
