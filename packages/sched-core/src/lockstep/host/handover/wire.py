"""Messages between the hosts of a prefill and a decode engine: typed, bounded in size, and free of code.

    decode ──PeerHello──────────────> prefill      once, for each connection
           <──PeerWelcome────────────
           ──Prefill────────────>              a request, under its room, with the contents of its media
           ──Accept─────────────>              the decode engine has given pages
           <──Offered────────────              the last part of the prompt was ordered
           <──PagesReady─────────              a slot of the sender's staging memory has pages of a room, or windows
                                               of them, or a part of its state
           ──PagesRead──────────>              the slot may be filled again
           <──PromptDone─────────              everything was sent: the first token, and the results of the prompt
           <──Stop───────────────              the prefill engine gives the transfer up
           ──Outcome────────────>              the end of the transfer, which the decode engine alone decides

The frames are those of the ranks' channel: four bytes with the length, little endian, then a msgpack array.
"""

from __future__ import annotations

import struct
from typing import Literal, TypeVar

import msgspec

from lockstep.core.contract.errors import LockstepError
from lockstep.core.contract.events import RequestArrived
from lockstep.host.cache_moves import BlockKind
from lockstep.host.media.content import EncoderInput

PROTOCOL = 3
FRAME_BYTES_MAX = 1 << 30  # longer frames are refused
CONTENTS_BYTES_MAX = FRAME_BYTES_MAX - (1 << 26)  # of media in one message; the rest is for the request itself
LENGTH = struct.Struct("<I")


class LinkError(LockstepError):
    """Raised for a message of another host that cannot be read, or that is not expected."""


class LinkMessage(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """A message between two hosts."""


class LayoutPart(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The bytes of one tensor in every page of one rank.

    Args:
        name: equal on all ranks that have the part, or other heads of it: layers have their numbers in the model.
        dtype: the number type; of KV that is stored with a scale, also the scale.
        heads: KV heads of this rank; 0: the part is the same on every rank.
    """

    name: str
    dtype: str
    offset: int
    size: int
    heads: int


class BlockLayout(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Blocks beside full pages, on one rank.

    A state has several such layouts if it is larger than a slot of staging memory: each is a piece of it.

    Args:
        block_bytes: of one block, or of the piece.
        parts: of a block, or of the piece, in order.
    """

    kind: BlockKind
    block_bytes: int
    parts: tuple[LayoutPart, ...] = ()


class PageLayout(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The pages of an engine, and of what they are.

    Args:
        model: names the architecture, the number type, and all else that the bytes of KV depend on.
        page_size: tokens of a page.
        page_bytes: of a page on one rank, the first if others do not have the same layers.
        ranks: tensor-parallel ranks, of each stage.
        kv_heads: of the whole model. With more ranks than heads, neighbouring ranks have the same head.
        parts: of a page on that rank, in order.
        beside: blocks of layers without full attention, of the same kinds and number on all ranks.
        window_tokens: positions that layers with windows attend to, if these have pages of their own.
    """

    model: str
    page_size: int
    page_bytes: int
    ranks: int = 1
    kv_heads: int = 0
    parts: tuple[LayoutPart, ...] = ()
    beside: tuple[BlockLayout, ...] = ()
    window_tokens: int = 0


class StagingPlace(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where one rank of the sender puts pages for one receiver.

    Args:
        transport: name of the transport, such as shm.
        address: in the terms of the transport.
        slots: of equal size.
        slot_bytes: of one slot.
        page_bytes: of a page on that rank.
        parts: of a page on that rank, in order.
        beside: blocks of layers without full attention on that rank.
    """

    transport: str
    address: str
    slots: int
    slot_bytes: int
    page_bytes: int = 0
    parts: tuple[LayoutPart, ...] = ()
    beside: tuple[BlockLayout, ...] = ()


# ------------------------------------------------------------------------------------------- from the decode engine


class PeerHello(LinkMessage, frozen=True):
    """The first message of a connection: the number of the decode engine in its server, and its pages."""

    protocol: int
    number: int
    layout: PageLayout


class Prefill(LinkMessage, frozen=True):
    """Compute the prompt of this request. Its samples have consecutive rooms, from `request.transfer_room` on.

    Args:
        contents: of the request's spans: what the encoder receives, or given embeddings.
    """

    request: RequestArrived
    contents: tuple[EncoderInput, ...] = ()


class Accept(LinkMessage, frozen=True):
    """The decode engine has given pages for a room; positions before `start_tokens` are there already."""

    room: int
    start_tokens: int
    adapter_version: int


class PagesRead(LinkMessage, frozen=True):
    """The content of a slot was copied, and the slot may be filled again."""

    slot: int


class Outcome(LinkMessage, frozen=True):
    """The end of a transfer. No slot of this room is read any more."""

    room: int
    status: Literal["done", "failed"]


# ------------------------------------------------------------------------------------------ from the prefill engine


class PeerWelcome(LinkMessage, frozen=True):
    """Answers PeerHello: the pages of the prefill engine, and where each of its ranks puts them.

    A connection that is refused has the reason in `refused`.
    """

    protocol: int
    number: int
    layout: PageLayout
    places: tuple[StagingPlace, ...]
    refused: str = ""


class Offered(LinkMessage, frozen=True):
    """The last part of the prompt of a room was ordered."""

    room: int


class PagesReady(LinkMessage, frozen=True):
    """Pages [first_page:first_page + pages) of a room are in a slot, on every rank.

    `checksums` are the CRC-32 of each rank's bytes; empty: the bytes are not checked. `block` is 0 for full pages, and
    n + 1 for the blocks of `PageLayout.beside[n]`: windows of these pages, or the state behind the prompt as page 0.
    """

    room: int
    slot: int
    first_page: int
    pages: int
    checksums: tuple[int, ...] = ()
    block: int = 0


class PromptResults(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Results of a prompt beside its KV. Arrays are packed, little-endian.

    Args:
        logprob: of the first token; None unless requested.
        top_ids, top_logprobs: int32 and float32, of the likeliest tokens in its place.
        prompt_logprobs: by position.
        prompt_top_logprobs: by position and token.
        hidden_positions, hidden: int32 [n], and float32 [n, hidden]: hidden states at these positions.
    """

    logprob: float | None = None
    top_ids: bytes = b""
    top_logprobs: bytes = b""
    prompt_logprobs: dict[int, float] = {}
    prompt_top_logprobs: dict[int, dict[int, float]] = {}
    hidden_positions: bytes = b""
    hidden: bytes = b""


class PromptDone(LinkMessage, frozen=True):
    """Everything of a room was announced: all of its pages, and its first token with the facts about it."""

    room: int
    first_token: int
    weights_version: int
    cached_tokens: int
    grammar_ended: bool = False
    results: PromptResults = PromptResults()


class Stop(LinkMessage, frozen=True):
    """The prefill engine gives a transfer up, or refuses it. Answered by Outcome, unless that is on its way."""

    room: int
    reason: str = ""


FromDecode = PeerHello | Prefill | Accept | PagesRead | Outcome
FromPrefill = PeerWelcome | Offered | PagesReady | PromptDone | Stop

AnyMessage = TypeVar("AnyMessage")

encode = msgspec.msgpack.Encoder().encode
_from_decode: msgspec.msgpack.Decoder[FromDecode] = msgspec.msgpack.Decoder(FromDecode)
_from_prefill: msgspec.msgpack.Decoder[FromPrefill] = msgspec.msgpack.Decoder(FromPrefill)


def read_from_decode(frame: bytes) -> FromDecode:
    """Decode a message of a decode engine. Raises LinkError."""
    return _read(_from_decode, frame)


def read_from_prefill(frame: bytes) -> FromPrefill:
    """Decode a message of a prefill engine. Raises LinkError."""
    return _read(_from_prefill, frame)


def blocks_in(one: PageLayout | StagingPlace) -> tuple[BlockLayout, ...]:
    """Return the layouts of all blocks of a rank, by their number in messages: full pages first."""
    return BlockLayout("page", one.page_bytes, one.parts), *one.beside


def _read(decoder: msgspec.msgpack.Decoder[AnyMessage], frame: bytes) -> AnyMessage:
    try:
        return decoder.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise LinkError(f"another engine sent a message of {len(frame)} bytes that cannot be read: {error}") from error
