"""Types of fields of request bodies: lists that are checked as a whole, without a Python step for each item."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import chain
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, Field, PlainValidator, WithJsonSchema

from lockstep.core.contract.text import CONTROLS
from lockstep.host.media.given import BadEmbeddings, GivenRows, rows_of

Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Count = Annotated[int, Field(ge=0, lt=2**31)]
Text = Annotated[str, Field(max_length=2**27)]
Name = Annotated[str, Field(max_length=256)]


def _check_label(value: str) -> str:
    """Check a client's name for its request. Logs and terminals show it, so control characters are refused."""
    for at, character in enumerate(value):
        if ord(character) in CONTROLS:
            raise ValueError(f"Character {at} is a control character, {CONTROLS[ord(character)]}; leave it out")
    return value


Label = Annotated[Name, AfterValidator(_check_label)]

ITEMS_MAX = 2**14
"""Greatest length of a list of objects (messages, parts, tools). Each object costs a microsecond or more to check."""

Item = TypeVar("Item")
Items = Annotated[list[Item], Field(max_length=ITEMS_MAX, fail_fast=True)]
"""A list with only its first error reported: a report of a million errors takes minutes, and gigabytes."""

Objects = Items[dict[str, Any]]


def check_ids(value: Any) -> Sequence[int]:
    """Check a list of token ids, without a Python step for each. An array was checked by `text_jobs`."""
    if isinstance(value, array):
        return value
    if not isinstance(value, list) or not set(map(type, value)) <= {int}:
        raise ValueError("Input should be a list of token ids")
    if value and not 0 <= min(value) <= max(value) < 2**31:
        raise ValueError(f"Token ids should be 0 to {2**31 - 1}")
    return value


def _check_texts(value: Any) -> str | list[str]:
    """Check a text, or a list of texts."""
    if isinstance(value, str) or (isinstance(value, list) and set(map(type, value)) <= {str}):
        return value
    raise ValueError("Input should be a text or a list of texts")


def check_id_lists(value: Any) -> Sequence[Any]:
    """Check token ids, or a list of lists of token ids."""
    if isinstance(value, list) and value and set(map(type, value)) <= {list, array}:
        check_ids(list(chain.from_iterable([one for one in value if isinstance(one, list)])))
        return value
    return check_ids(value)


def check_prompts(value: Any) -> str | Sequence[Any]:
    """Check a text, token ids, or a list of one kind of these."""
    kinds = set(map(type, value)) if isinstance(value, list) else {type(value)}
    if kinds == {int} or (kinds and kinds <= {list, array}):
        return check_id_lists(value)
    if dict in kinds:
        raise ValueError("Objects, such as images, cannot be embedded here: give texts or token ids")
    if not isinstance(value, str) and not (isinstance(value, list) and kinds <= {str}):
        raise ValueError("Input should be a text, a list of texts, token ids, or a list of lists of token ids")
    return value


def _check_rows(value: Any) -> GivenRows:
    """Check given embeddings. Those of a large body were checked by `text_jobs`."""
    if isinstance(value, GivenRows):
        return value
    try:
        return rows_of(value)
    except BadEmbeddings as error:
        raise ValueError(f"Input {error}") from None


def _check_bias(value: Any) -> dict[str, float]:
    """Check biases of logits by token id, which is a text in JSON."""
    if not isinstance(value, dict) or not set(map(type, value.values())) <= {int, float}:
        raise ValueError("Input should be an object of numbers, by token id")
    if value and not -100.0 <= min(value.values()) <= max(value.values()) <= 100.0:
        raise ValueError("A bias should be -100 to 100")
    return value


def _check_arguments(value: Any) -> dict[str, dict[str, Any]]:
    """Check an object of objects."""
    if not isinstance(value, dict) or not set(map(type, value.values())) <= {dict}:
        raise ValueError("Input should be an object of objects, by name")
    return value


def _check_metadata(value: Any) -> dict[str, str]:
    """Check texts by name, within OpenAI's limits of number and length."""
    if not isinstance(value, dict) or len(value) > 16 or not set(map(type, value.values())) <= {str}:
        raise ValueError("Input should be an object of at most 16 texts")
    if any(len(name) > 64 or len(text) > 512 for name, text in value.items()):
        raise ValueError("Names should have at most 64 characters, texts 512")
    return value


def _check_documents(value: Any) -> list[Any]:
    """Check a list of texts or objects, without a Python step for each."""
    if not isinstance(value, list) or not set(map(type, value)) <= {str, dict}:
        raise ValueError("Input should be a list of texts")
    return value


TEXTS_SCHEMA: dict[str, Any] = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
IDS_SCHEMA: dict[str, Any] = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}}
ID_LISTS_SCHEMA: dict[str, Any] = {"anyOf": [IDS_SCHEMA, {"type": "array", "items": IDS_SCHEMA}]}
PROMPTS_SCHEMA = {"anyOf": [TEXTS_SCHEMA, ID_LISTS_SCHEMA]}
ROWS_SCHEMA: dict[str, Any] = {"type": "array", "items": {"type": "array", "items": {"type": "number"}}}
ROW_LISTS_SCHEMA: dict[str, Any] = {"anyOf": [TEXTS_SCHEMA, ROWS_SCHEMA, {"type": "array", "items": ROWS_SCHEMA}]}
BIAS_SCHEMA = {"type": "object", "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}}

OBJECTS_SCHEMA = {"type": "object", "additionalProperties": {"type": "object"}}
DOCUMENTS_SCHEMA = {"type": "array", "items": {"anyOf": [{"type": "string"}, {"type": "object"}]}}
METADATA_SCHEMA = {"type": "object", "maxProperties": 16, "additionalProperties": {"type": "string", "maxLength": 512}}

Arguments = Annotated[dict[str, dict[str, Any]], PlainValidator(_check_arguments), WithJsonSchema(OBJECTS_SCHEMA)]
Metadata = Annotated[dict[str, str], PlainValidator(_check_metadata), WithJsonSchema(METADATA_SCHEMA)]
Documents = Annotated[list[Any], PlainValidator(_check_documents), WithJsonSchema(DOCUMENTS_SCHEMA)]
TokenIdList = Annotated[Sequence[int], PlainValidator(check_ids), WithJsonSchema(IDS_SCHEMA)]
TextOrTexts = Annotated[str | list[str], PlainValidator(_check_texts), WithJsonSchema(TEXTS_SCHEMA)]
IdLists = Annotated[Sequence[Any], PlainValidator(check_id_lists), WithJsonSchema(ID_LISTS_SCHEMA)]
Prompts = Annotated[str | Sequence[Any], PlainValidator(check_prompts), WithJsonSchema(PROMPTS_SCHEMA)]
Embedded = Annotated[GivenRows, PlainValidator(_check_rows), WithJsonSchema(ROW_LISTS_SCHEMA)]
"""Given embeddings: rows of numbers, base64 of a .npy or safetensors file, or a list of these, one for each prompt."""
Biases = Annotated[dict[str, float], PlainValidator(_check_bias), WithJsonSchema(BIAS_SCHEMA)]
