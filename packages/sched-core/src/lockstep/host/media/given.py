"""Embeddings that a client gives in place of tokens: read from JSON or from base64, and as a prompt.

    JSON     [[0.1, ...], [0.2, ...]]             a row of numbers for each position
    base64   "k05VTVBZ..." or "WAAAAAAAAAB7..."   a file of numpy (.npy, floats), or of safetensors with one tensor

A pickle, which torch.save writes, is never read. Values become float32.
"""

from __future__ import annotations

import base64
import binascii
import io
import math
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from lockstep.core.contract.events import PromptSpan
from lockstep.host.media.content import GIVEN, Array, MediaPrompt, array_of, content_of

NPY = b"\x93NUMPY"
SAFETENSORS_HEADER_AT = 8  # bytes before the header, an object in JSON
FLOATS = {"F16": "<f2", "F32": "<f4", "F64": "<f8", "BF16": "<u2"}
"""Types of safetensors -> those of numpy; bfloat16 has none, and is the upper half of a float32."""


class BadEmbeddings(ValueError):
    """Raised for given embeddings that cannot be used. The message goes on after the name of the field."""


class GivenRows(msgspec.Struct, frozen=True):
    """Given embeddings of a body: float32 [positions, hidden] for each prompt.

    Args:
        several: the field had a list of prompts.
    """

    prompts: tuple[Array, ...]
    several: bool


def embedded_prompt(rows: Any) -> MediaPrompt:
    """Return a prompt of given embeddings, numbers [positions, hidden].

    Its digest is that of the values as float32, so that equal embeddings share a prefix, and different ones never do.
    Raises: BadEmbeddings.
    """
    values = _checked(np.asarray(rows), "")
    content = content_of([0] * len(values), {GIVEN: values}, "embedding")
    span = PromptSpan(0, len(values), "embedding", content.digest)
    return MediaPrompt("", [0] * len(values), (span,), (content,))


def embedded_size(prompt: MediaPrompt) -> int | None:
    """Return the numbers in each row of a prompt of given embeddings; None for a prompt with other media."""
    sizes = [one.arrays[GIVEN].shape[1] for one in prompt.contents if GIVEN in one.arrays]
    return sizes[0] if sizes else None


def rows_of(given: Any) -> GivenRows:
    """Return given embeddings from JSON: rows of numbers or a base64 text, or a list of these, one for each prompt.

    Raises: BadEmbeddings.
    """
    if isinstance(given, str):
        return GivenRows((array_of(_decoded(given, "")),), several=False)
    if not isinstance(given, list) or not given:
        raise BadEmbeddings("should be a list of rows of numbers, a row for each position; base64; or a list of these")
    several = isinstance(given[0], str) or (isinstance(given[0], list) and given[0] and isinstance(given[0][0], list))
    if not several:
        return GivenRows((array_of(_listed(given, "")),), several=False)
    made = []
    for number, one in enumerate(given):
        where = f"in prompt {number} "
        made.append(array_of(_decoded(one, where) if isinstance(one, str) else _listed(one, where)))
    return GivenRows(tuple(made), several=True)


def _listed(given: Any, where: str) -> NDArray[np.float32]:
    """Return rows of numbers as an array. Raises BadEmbeddings."""
    if not isinstance(given, list) or not given:
        raise BadEmbeddings(f"has {where}no rows")
    size = len(given[0]) if isinstance(given[0], list) else 0
    for number, row in enumerate(given):
        if not isinstance(row, list) or not row or not set(map(type, row)) <= {int, float}:
            raise BadEmbeddings(f"has {where}at row {number} no list of numbers")
        if len(row) != size:
            raise BadEmbeddings(f"has {where}at row {number} {len(row)} numbers, but {size} at row 0")
    try:
        values = np.array(given, np.float64)
    except OverflowError:
        raise BadEmbeddings(f"has {where}an integer beyond 64 bits") from None
    return _checked(values, where)


def _decoded(text: str, where: str) -> NDArray[np.float32]:
    """Return the rows of a file in base64. Raises BadEmbeddings."""
    try:
        raw = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise BadEmbeddings(f"has {where}no valid base64") from None
    if raw.startswith(NPY):
        return _checked(_npy(raw, where), where)
    if raw[SAFETENSORS_HEADER_AT : SAFETENSORS_HEADER_AT + 1] != b"{":
        raise BadEmbeddings(f"is {where}neither a .npy file nor safetensors; files of torch.save are not read")
    return _checked(_safetensors(raw, where), where)


def _npy(raw: bytes, where: str) -> NDArray[Any]:
    """Return the array of a .npy file. Raises BadEmbeddings."""
    file, read = io.BytesIO(raw), np.lib.format
    try:
        version = read.read_magic(file)
        header = read.read_array_header_1_0 if version == (1, 0) else read.read_array_header_2_0
        shape, fortran, dtype = header(file)
    except ValueError as error:
        raise BadEmbeddings(f"has {where}no readable .npy file: {str(error)[:100]}") from None
    data = raw[file.tell() :]
    if dtype.kind != "f" or math.prod(shape) * dtype.itemsize != len(data):
        raise BadEmbeddings(f"has {where}{len(data)} bytes for {dtype} of shape {list(shape)}; give floats")
    return np.frombuffer(data, dtype).reshape(shape, order="F" if fortran else "C")


def _safetensors(raw: bytes, where: str) -> NDArray[Any]:
    """Return the tensor of a safetensors file. Raises BadEmbeddings."""
    try:
        import safetensors
    except ImportError:
        raise BadEmbeddings(
            f"is {where}safetensors, but the package safetensors is not installed where the server runs; "
            "give a .npy file or rows of numbers"
        ) from None
    read: Callable[[bytes], list[tuple[str, dict[str, Any]]]] = safetensors.deserialize
    try:
        tensors = read(raw)
    except safetensors.SafetensorError as error:
        raise BadEmbeddings(f"has {where}no readable safetensors: {str(error)[:100]}") from None
    if len(tensors) != 1 or tensors[0][1]["dtype"] not in FLOATS:
        found = ", ".join(f"{name} {one['dtype']}" for name, one in tensors[:4])
        raise BadEmbeddings(f"has {where}tensors [{found}]; it must be one of {', '.join(FLOATS)}")
    kind, shape, data = (tensors[0][1][name] for name in ("dtype", "shape", "data"))
    values = np.frombuffer(data, FLOATS[kind]).reshape(shape)
    return (values.astype("<u4") << 16).view("<f4") if kind == "BF16" else values


def _checked(values: NDArray[Any], where: str) -> NDArray[np.float32]:
    """Return rows of finite numbers as float32. Raises BadEmbeddings."""
    if values.ndim != 2 or not values.size or values.dtype.kind not in "fiu":
        shape = f"{values.dtype.name} of shape {list(values.shape)}"
        raise BadEmbeddings(f"has {where}{shape}; it must be numbers [positions, hidden]")
    with np.errstate(over="ignore"):
        made = np.ascontiguousarray(values, np.float32)
    finite = np.isfinite(made).all(axis=1)
    if not finite.all():
        raise BadEmbeddings(f"has {where}at row {int(np.flatnonzero(~finite)[0])} a number that is no finite float32")
    return made
