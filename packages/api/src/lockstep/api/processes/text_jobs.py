"""Messages between an API worker and its text processes, and the jobs themselves.

    worker ──size of the job, job, body──> text process        frames on a socket pair; a size is 8 bytes, little-endian
           <──size, result─────────────

A body is sent behind its job as it was received. Token ids are int32 in both directions: a list of a million ids costs
the worker nothing until it is copied to the engine.
"""

from __future__ import annotations

import struct
from array import array
from typing import Any

import msgspec

from lockstep.api.text.rendering import Conversation

SIZE = struct.Struct("<Q")
IDS_CODE = 1
"""Extension type of MessagePack for token ids: int32, little-endian."""

IDS_MIN = 16
"""Shorter lists of token ids remain lists."""

SHOWN_BYTES = 4096
"""Greatest JSON of an unknown field that is parsed. Of a larger one only the name counts."""


class ParseBody(msgspec.Struct, frozen=True, tag="parse"):
    """Parse the JSON object that follows.

    Args:
        known: names of the fields of the endpoint.
        refused: names of fields that the endpoint refuses.
        ids: those of `known` that may have token ids.
        size: bytes of the body.
        fields_max: greatest number of fields.
        values_max: greatest number of values, where a list of token ids is one value.
    """

    known: frozenset[str]
    refused: frozenset[str]
    ids: frozenset[str]
    size: int
    fields_max: int
    values_max: int


class EncodeText(msgspec.Struct, frozen=True, tag="encode"):
    """Tokenise a text."""

    text: str
    special: bool


class DecodeTokens(msgspec.Struct, frozen=True, tag="decode"):
    """Convert token ids, int32, to text."""

    ids: bytes


class RenderChat(msgspec.Struct, frozen=True, tag="chat"):
    """Render a conversation, and tokenise it."""

    chat: Conversation


Job = ParseBody | EncodeText | DecodeTokens | RenderChat


class Done(msgspec.Struct, frozen=True):
    """The result of a job.

    Args:
        error: why the job failed, for the client; empty: it did not.
        field: the client's field that is at fault.
        value: MessagePack: the parsed body, the token ids, the text, or text and token ids.
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
    """Return a value as MessagePack. Arrays of token ids are in it as int32."""
    return msgspec.msgpack.encode(value, enc_hook=_packed_ids)


def unpacked(raw: bytes) -> Any:
    """Return the value of `packed`."""
    return msgspec.msgpack.decode(raw, ext_hook=_unpacked_ids)


def _packed_ids(value: Any) -> Any:
    if isinstance(value, array):
        return msgspec.msgpack.Ext(IDS_CODE, value.tobytes())
    raise NotImplementedError(f"a {type(value).__name__} in a message")


def _unpacked_ids(code: int, data: memoryview) -> Any:
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
    values = 0
    for name, written in fields.items():
        if name not in job.known and memoryview(written).nbytes > SHOWN_BYTES:
            found[name] = "..." if name in job.refused else None
            continue
        try:
            value = msgspec.json.decode(written)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise JobError(f"Invalid JSON: {error}") from None
        if name in job.ids:
            value = _ids_of(value, name)
        elif isinstance(value, dict):
            value = {inner: _ids_of(one, inner) if inner in job.ids else one for inner, one in value.items()}
        found[name] = value
        values += _count(value, name, job.values_max - values)
    return found


def _ids_of(value: Any, name: str) -> Any:
    """Return a value with arrays for its lists of token ids."""
    if not isinstance(value, list) or len(value) < IDS_MIN:
        return [_ids_of(one, name) if isinstance(one, list) else one for one in value] if _nested(value) else value
    kinds = set(map(type, value))
    if kinds == {int}:
        try:
            ids = array("i", value)
        except OverflowError:
            ids = array("i", [-1])
        if min(ids) < 0:
            raise JobError(f"`{name}`: Token ids should be 0 to {2**31 - 1}", name)
        return ids
    return [_ids_of(one, name) for one in value] if kinds == {list} else value


def _nested(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(one, list) for one in value)


def _count(value: Any, name: str, most: int) -> int:
    """Return the number of values in a value. Raises JobError if there are more than `most`, or for a huge number."""
    count, level = 0, [value]
    while level:
        count += len(level)
        if count > most:
            message = f"`{name}` has too many values; lists of token ids aside, a body may have `values_max` in all"
            raise JobError(message, name)
        inner: list[Any] = []
        for one in level:
            if isinstance(one, dict):
                inner += one.values()
            elif isinstance(one, list):
                inner += one
            elif isinstance(one, int) and not -(2**63) <= one < 2**64:
                raise JobError(f"`{name}` has a number beyond 64 bits", name)
        level = inner
    return count
