"""Messages between an API worker and its text processes, and the jobs themselves.

    worker ──size of the job, job, body──> text process        frames on a socket pair; a size is 8 bytes, little-endian
           <──size, result─────────────

A body is sent behind its job as it was received. Token ids are int32 in both directions: a list of a million ids costs
the worker nothing until it is copied to the engine.
"""

from __future__ import annotations

import re
import struct
from array import array
from typing import Any, Literal

import msgspec

from lockstep.api.text.rendering import Conversation
from lockstep.host.media.given import BadEmbeddings, GivenRows, rows_of

SIZE = struct.Struct("<Q")
IDS_CODE, ROWS_CODE = 1, 2
"""Extension types of MessagePack: token ids, int32, little-endian; and GivenRows."""

SHOWN_BYTES = 4096
"""Greatest JSON of an unknown field that is parsed. Of a larger one only the name counts."""

UNPARSED = "..."
"""Stands for a larger one. It is not empty, so the field is refused, or named as ignored, like any other value."""


class ParseBody(msgspec.Struct, frozen=True, tag="parse"):
    """Parse the JSON object that follows.

    Args:
        known: names of the fields of the endpoint.
        ids: those of `known` that may have token ids.
        size: bytes of the body.
        fields_max: greatest number of fields.
        rows: those of `known` that may have given embeddings.
        ids_max: greatest number of token ids.
        numbers_max: greatest number of numbers of given embeddings.
        values_max: greatest number of values, where a list of token ids is one value.
        characters_max: length of the longest text that is passed on; a longer one cannot fit any prompt.
    """

    known: frozenset[str]
    ids: frozenset[str]
    size: int
    fields_max: int
    ids_max: int
    values_max: int
    characters_max: int = 2**62
    rows: frozenset[str] = frozenset()
    numbers_max: int = 2**62


class EncodeText(msgspec.Struct, frozen=True, tag="encode"):
    """Tokenise a text."""

    text: str
    special: bool


class EncodePair(msgspec.Struct, frozen=True, tag="pair"):
    """Tokenise two texts as one prompt, of at most so many tokens."""

    first: str
    second: str
    most: int | None


class DecodeTokens(msgspec.Struct, frozen=True, tag="decode"):
    """Convert token ids, int32, to text; with `verbatim` also special tokens."""

    ids: bytes
    verbatim: bool = False


class RenderChat(msgspec.Struct, frozen=True, tag="chat"):
    """Render a conversation, and tokenise it."""

    chat: Conversation


class RenderMedia(msgspec.Struct, frozen=True, tag="media"):
    """Render a conversation with media, decode these, and prepare them for the encoder. None: only make ready."""

    chat: Conversation | None


Job = ParseBody | EncodeText | EncodePair | DecodeTokens | RenderChat | RenderMedia


class Done(msgspec.Struct, frozen=True):
    """The result of a job.

    Args:
        error: why the job failed, for the client; empty: it did not.
        field: the client's field that is at fault.
        value: MessagePack: the parsed body, the token ids, the text, text and token ids, or a MediaPrompt.
        last: the process ends, since it has grown too large.
    """

    error: str = ""
    field: str = ""
    value: bytes = b""
    last: bool = False


class JobError(Exception):
    """A job that failed because of its input. The message is for the client."""

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(message)
        self.message, self.field = message, field


def token_ids(raw: bytes) -> array[int]:
    """Return token ids that were sent as int32."""
    ids = array("i")
    ids.frombytes(raw)
    return ids


def packed(value: Any) -> bytes:
    """Return a value as MessagePack. Arrays of token ids are in it as int32, given embeddings as float32."""
    return msgspec.msgpack.encode(value, enc_hook=_packed_ids)


def unpacked(raw: bytes) -> Any:
    """Return the value of `packed`."""
    return msgspec.msgpack.decode(raw, ext_hook=_unpacked_ids)


def _packed_ids(value: Any) -> Any:
    if isinstance(value, array):
        return msgspec.msgpack.Ext(IDS_CODE, value.tobytes())
    raise NotImplementedError(f"a {type(value).__name__} in a message")


def _unpacked_ids(code: int, data: memoryview) -> Any:
    if code == ROWS_CODE:
        return msgspec.msgpack.decode(data, type=GivenRows)
    if code != IDS_CODE:
        raise ValueError(f"extension {code} in a message")
    return token_ids(bytes(data))


# ----------------------------------------------------------------------------------------------------------- the bodies


def parse_body(job: ParseBody, raw: bytes | bytearray) -> Any:
    """Return the value of a body, with arrays for token ids. Raises JobError.

    Values of unknown fields are skipped without being parsed; each of the others is parsed by itself.
    """
    try:
        fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    except msgspec.ValidationError:
        return []  # valid JSON, but not an object
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise JobError(f"Invalid JSON: {error}") from None
    if len(fields) > job.fields_max:
        raise JobError(f"the body has {len(fields)} fields, at most {job.fields_max} are allowed")
    found: dict[str, Any] = {}
    values = job.values_max
    for name, written in fields.items():
        raw_value = bytes(written)
        if name not in job.known and len(raw_value) > SHOWN_BYTES:
            found[name] = UNPARSED
        elif name in job.ids and (kind := _kind_of_ids(raw_value)) is not None:
            if raw_value.count(b",") >= job.ids_max:
                raise JobError(f"`{name}` has more than {job.ids_max} token ids (ids_max)", name)
            found[name] = _ids(raw_value, name, kind)
        elif name in job.rows and OF_ROWS.match(raw_value):
            found[name] = _given(raw_value, name, job.numbers_max)
        else:
            values -= _values(raw_value)
            if values < 0:
                message = (
                    f"`{name}` has too many values; a body may have {job.values_max} in all (values_max), where a list "
                    "of token ids is one value"
                )
                raise JobError(message, name)
            try:
                value = msgspec.json.decode(raw_value)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise JobError(f"Invalid JSON: {error}") from None
            if len(raw_value) > job.characters_max:
                _check_length(value, name, job.characters_max)
            found[name] = value
    return found


def _check_length(value: Any, name: str, most: int) -> None:
    """Raise JobError if a value contains a text of more than `most` characters."""
    level = [value]
    while level:
        inner: list[Any] = []
        for one in level:
            if isinstance(one, str):
                if len(one) > most:
                    raise JobError(f"`{name}` has {len(one)} characters, and at most {most} can fit", name)
            elif isinstance(one, dict):
                inner += one.values()
            elif isinstance(one, list):
                inner += one
        level = inner


STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"')
OF_ROWS = re.compile(rb'\s*(\[\s*\[|\[?\s*")')  # a list of lists, a text or a list of texts
OF_IDS, OF_ID_LISTS = re.compile(rb"\s*\[\s*[-0-9]"), re.compile(rb"\s*\[\s*\[\s*[-0-9]")


def _values(raw: bytes) -> int:
    """Return the most values that some JSON can have, without parsing it: numbers may take microseconds each."""
    plain = STRING.sub(b"", raw)
    return 1 + plain.count(b",") + plain.count(b"[") + plain.count(b"{")


def _kind_of_ids(raw: bytes) -> Literal["ids", "lists"] | None:
    """Return whether a value begins as a list of token ids, or a list of such lists; None for any other value."""
    if OF_IDS.match(raw):
        return "ids"
    return "lists" if OF_ID_LISTS.match(raw) else None


def _given(raw: bytes, name: str, most: int) -> msgspec.msgpack.Ext:
    """Return given embeddings as they are sent. Raises JobError."""
    too_many = JobError(f"`{name}` has more than {most} numbers (embedding_numbers_max)", name)
    if (raw.count(b",") + 1 if b'"' not in raw else len(raw) * 3 // 4 // 8) > most:
        raise too_many
    try:
        given = rows_of(msgspec.json.decode(raw))
        if sum(len(one.data) for one in given.prompts) > 4 * most:
            raise too_many
        return msgspec.msgpack.Ext(ROWS_CODE, msgspec.msgpack.encode(given))
    except (msgspec.DecodeError, RecursionError) as error:
        raise JobError(f"Invalid JSON: {error}") from None
    except BadEmbeddings as error:
        raise JobError(f"`{name}` {error}", name) from None


def _ids(raw: bytes, name: str, kind: Literal["ids", "lists"]) -> Any:
    """Return token ids as an array, or a list of arrays. Raises JobError for anything else."""
    try:
        if kind == "ids":
            lists = [msgspec.json.decode(raw, type=list[int])]
        else:
            lists = msgspec.json.decode(raw, type=list[list[int]])
        arrays = [array("i", one) for one in lists]
    except (msgspec.DecodeError, RecursionError) as error:
        raise JobError(f"`{name}` should be token ids: {error}", name) from None
    except OverflowError:
        arrays = [array("i", [-1])]
    if any(len(one) and min(one) < 0 for one in arrays):
        raise JobError(f"`{name}`: Token ids should be 0 to {2**31 - 1}", name)
    return arrays[0] if kind == "ids" else arrays
