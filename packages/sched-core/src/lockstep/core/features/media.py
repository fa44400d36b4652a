"""Spans of a prompt that are not text: the ids that stand for them, and the encoder output they wait for.

**Placeholder ids.** Prefixes are compared token by token, so two spans must have equal ids exactly if they are equal.
No 31 bits of a digest promise that. `Placeholders` numbers the contents as they come: a position of a span holds the
negative of its content's number, which is no token id. Numbers are never used twice; a content that was forgotten gets
a new one, which costs it a cache hit and nothing else.

**Encoder output.** A request with media is held until the encoder has seen all of them. It takes the whole room it
needs in the encoder cache at once or none of it, in the order in which requests asked, and gives it back when its
prompt is computed or it leaves; but what a launched batch may read stays until that is collected. So room taken is
always given back by a request that does not wait for room, and a refused one keeps no part of what it needed.

**Encoder budget.** Having room is not being encoded: with a budget, contents line up for the encoder, and it is asked
for the next one when what it is at leaves enough of the budget, or when it is at nothing. What is not needed any more
leaves that line; what the encoder was asked for, it answers.

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

PLACEHOLDERS_MAX = 16_384  # contents whose numbers are remembered
FIRST_PLACEHOLDER = 2  # so that no placeholder is -1, which means "no token" elsewhere

Content = tuple[str, bytes, int]  # kind, digest, positions


class Placeholders:
    """Which number stands for which content. Equal numbers mean equal contents."""

    def __init__(self) -> None:
        self.numbers: dict[Content, int] = {}  # least recently used first
        self.next = FIRST_PLACEHOLDER

    def laid(self, tokens: bytes, spans: Iterable[PromptSpan]) -> bytes:
        """The prompt with placeholders in its spans."""
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
    """What the encoder made of one digest, or is making of it."""

    tokens: int
    ready: bool = False
    outdated: bool = False  # of weights that were replaced: only for requests that had begun to compute with it


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
    """Encoder output, bounded: what is there, which requests pin it, and which wait for room."""

    PART = EncoderPart
    EMPTY_AT_REST = ("pins", "room_queue", "deferred", "queued")

    def __init__(self, capacity_tokens: int | None, budget_tokens: int | None = None) -> None:
        self.capacity_tokens = capacity_tokens
        self.placeholders = Placeholders()
        self.budget_tokens = budget_tokens  # being encoded at once, unless one content alone is more; None: no limit
        self.encodings: dict[bytes, EncoderEntry] = {}  # least recently used first
        self.pins: dict[RequestId, dict[bytes, int]] = {}  # what each request needs: tokens by digest
        self.room_queue: dict[RequestId, dict[bytes, int]] = {}  # requests that wait for room, oldest first
        self.deferred: list[tuple[BatchId, list[bytes]]] = []  # what work in flight reads for requests that have left
        self.queued: dict[bytes, None] = {}  # has room, and the encoder was not asked for it yet: first come first
        self.dropping: list[bytes] = []  # what went to make room, and the host was not told yet

    def ask(self, request_id: RequestId, media: dict[bytes, int]) -> None:
        """Wait for room for all of these. `serve` gives it."""
        self.room_queue[request_id] = media

    def serve(self, step: Step, generation: int) -> list[RequestId]:
        """Give room to waiting requests, in order, as far as it goes. Returns those with all media there already."""
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
        """Ask the encoder for what is queued, as far as the budget goes; with what it has to give up for that first."""
        while self.queued:
            digest = next(iter(self.queued))
            tokens = self.encodings[digest].tokens
            if not self._within_budget(tokens):
                return
            del self.queued[digest]
            step.commands.append(EncodeMedia(digest, tokens, generation, tuple(self.dropping)))
            self.dropping.clear()

    def _within_budget(self, tokens: int) -> bool:
        """Whether the encoder may begin with so many more."""
        if self.budget_tokens is None:
            return True
        busy = self.encoding_tokens
        return not busy or busy + tokens <= self.budget_tokens

    @property
    def encoding_tokens(self) -> int:
        """What the encoder is at."""
        return sum(one.tokens for digest, one in self.encodings.items() if not one.ready and digest not in self.queued)

    def _forget_unwanted(self) -> None:
        """What is queued without a request gives its room back."""
        pinned = {digest for needed in self.pins.values() for digest in needed}
        for digest in [digest for digest in self.queued if digest not in pinned]:
            del self.queued[digest], self.encodings[digest]

    def encoded(self, digest: bytes) -> list[RequestId]:
        """One is ready. Returns whose media are all there with it."""
        self.encodings[digest].ready = True
        return [request_id for request_id in self._needing(digest) if self._complete(request_id)]

    def failed(self, digest: bytes) -> list[RequestId]:
        """One could not be encoded. Returns the requests that needed it; they hold nothing any more."""
        del self.encodings[digest]
        losers = self._needing(digest)
        for request_id in losers:
            del self.pins[request_id]
        return losers

    def is_encoding(self, digest: bytes) -> bool:
        """Whether an answer for it is due."""
        encoding = self.encodings.get(digest)
        return encoding is not None and not encoding.ready and digest not in self.queued

    def has_all(self, request_id: RequestId) -> bool:
        """Whether all its media are encoded, and kept for it."""
        return request_id in self.pins and self._complete(request_id)

    def knows(self, request_id: RequestId) -> bool:
        """Whether the request has the room it needs, or waits for it."""
        return request_id in self.pins or request_id in self.room_queue

    def _needing(self, digest: bytes) -> list[RequestId]:
        """The requests that pin it, first come first."""
        return [request_id for request_id, media in self.pins.items() if digest in media]

    def _complete(self, request_id: RequestId) -> bool:
        """Whether all media the request pins are encoded."""
        return all(self.encodings[digest].ready for digest in self.pins[request_id])

    def release(self, request_id: RequestId, free_after: BatchId | None = None) -> None:
        """The request needs no encoder output any more; a batch in flight may read it, up to the one named."""
        media = self.pins.pop(request_id, None)
        self.room_queue.pop(request_id, None)
        if media is not None and free_after is not None:
            self.deferred.append((free_after, list(media)))

    def release_deferred(self, batch_id: BatchId) -> None:
        """This batch was collected."""
        self.deferred = [entry for entry in self.deferred if entry[0] > batch_id]

    def outdate(self) -> None:
        """The weights were replaced."""
        for encoding in self.encodings.values():
            encoding.outdated = True

    def void(self) -> None:
        """The device's memory is gone."""
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
        """Raise InvariantError unless what is pinned is there, all of it fits, and no room is kept from the first."""
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
                raise InvariantError(f"D11: {digest.hex()} is queued for the encoder, which nobody needs or has seen")
        if self.queued and self._within_budget(self.encodings[next(iter(self.queued))].tokens):
            raise InvariantError(f"L2: {len(self.queued)} contents wait for an encoder that has time for them")
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
        """What must go so that these fit, least recently used first; None if too little of it can go now."""
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
        going = [digest for digest in idle if digest in media]  # of another size than it is wanted in, or outdated
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
        """Room that a digest takes; 0 if it is not there."""
        encoding = self.encodings.get(digest)
        return encoding.tokens if encoding is not None else 0


def _media_of(request: Request) -> dict[bytes, int]:
    """Return the media of a request that has some: tokens by digest."""
    assert request.extras is not None
    return request.extras.media
