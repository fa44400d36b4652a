"""Given embeddings, where the runtime's packages are absent. What models compute is in tests/runtime."""

from __future__ import annotations

import base64
import io
import json
import re
import sys
from typing import Any

import numpy as np
import pytest

from lockstep.host.media.given import BadEmbeddings, embedded_prompt, embedded_size, rows_of

HEADER = json.dumps({"rows": {"dtype": "F32", "shape": [1, 2], "data_offsets": [0, 8]}}).encode()
FILE = len(HEADER).to_bytes(8, "little") + HEADER + np.ones(2, np.float32).tobytes()


def text(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


@pytest.fixture(autouse=True)
def _without_safetensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)


def test_safetensors_are_refused_by_name_where_the_package_is_absent() -> None:
    with pytest.raises(BadEmbeddings, match=r"is safetensors, but the package safetensors is not installed"):
        rows_of(text(FILE))


@pytest.mark.parametrize("raw", [b"", b"\0", b"PK\x03\x04 a file of torch.save"])
def test_other_files_are_refused_as_such(raw: bytes) -> None:
    with pytest.raises(BadEmbeddings, match=r"neither a \.npy file nor safetensors"):
        rows_of(text(raw))


def npy(values: Any, version: tuple[int, int] = (1, 0)) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, np.asarray(values), version)
    return file.getvalue()


ROWS = np.array([[0.5, -1.0, 2.0], [4.0, 8.0, -16.0]])
READ: list[tuple[Any, bool, list[Any]]] = [
    (ROWS.tolist(), False, [ROWS]),
    ([[1, 2.5]], False, [[[1, 2.5]]]),
    ([[[1, 2]], [[3, 4], [5, 6]]], True, [[[1, 2]], [[3, 4], [5, 6]]]),
    (text(npy(ROWS.astype(np.float16))), False, [ROWS]),
    (text(npy(np.asfortranarray(ROWS, np.float32))), False, [ROWS]),
    (text(npy(ROWS, (2, 0))), False, [ROWS]),
    ([text(npy(ROWS)), [[7]]], True, [ROWS, [[7]]]),
    ([[[7]], text(npy(ROWS))], True, [[[7]], ROWS]),
]
SHAPE, NOT_FINITE = "it must be numbers [positions, hidden]", "a number that is no finite float32"
REFUSED: list[tuple[Any, str]] = [
    ([], "should be a list of rows of numbers"),
    ({"a": 1}, "should be a list of rows of numbers"),
    ([1, 2], "has at row 0 no list of numbers"),
    ([[], [1]], "has at row 0 no list of numbers"),
    ([[1], []], "has at row 1 no list of numbers"),
    ([[1], [True]], "has at row 1 no list of numbers"),
    ([[1, "a"]], "has at row 0 no list of numbers"),
    ([[1], [2], [1, 2]], "has at row 2 2 numbers, but 1 at row 0"),
    ([[[1]], [[2, 3], [4]]], "has in prompt 1 at row 1 1 numbers, but 2 at row 0"),
    ([[[1]], []], "has in prompt 1 no rows"),
    ([[[1]], "!"], "has in prompt 1 no valid base64"),
    ([[10**400]], "has an integer beyond 64 bits"),
    ([[1], [1e39]], f"has at row 1 {NOT_FINITE}"),
    ([[1], [float("nan")]], f"has at row 1 {NOT_FINITE}"),
    ("!", "has no valid base64"),
    (text(npy([[1, 2]])), "has 16 bytes for int64 of shape [1, 2]; give floats"),
    (text(npy(ROWS)[:-1]), "has 47 bytes for float64 of shape [2, 3]; give floats"),
    (text(npy(ROWS)[:20]), "has no readable .npy file"),
    (text(npy([1.0])), f"has float64 of shape [1]; {SHAPE}"),
    (text(npy(np.empty((0, 3)))), f"has float64 of shape [0, 3]; {SHAPE}"),
    (text(npy([[1.0], [np.inf]])), f"has at row 1 {NOT_FINITE}"),
]


@pytest.mark.parametrize(("given", "several", "rows"), READ)
def test_rows_are_read_from_json_and_files(given: Any, several: bool, rows: list[Any]) -> None:
    found = rows_of(given)
    assert found.several == several
    assert [one.dtype for one in found.prompts] == ["float32"] * len(rows)
    for one, expected in zip(found.prompts, rows, strict=True):
        np.testing.assert_array_equal(one.numpy(), expected)


@pytest.mark.parametrize(("given", "message"), REFUSED)
def test_what_is_no_rows_of_finite_numbers_is_refused(given: Any, message: str) -> None:
    with pytest.raises(BadEmbeddings, match=f"^{re.escape(message)}"):
        rows_of(given)


def test_equal_embeddings_have_equal_digests_as_prompts() -> None:
    prompts = [embedded_prompt(rows) for rows in (ROWS, ROWS.astype(np.float32), ROWS.tolist(), ROWS[:, :2], ROWS[:1])]
    digests = [one.spans[0].digest for one in prompts]
    assert digests[0] == digests[1] == digests[2]
    assert len(set(digests)) == 3
    assert [(one.spans[0].start, one.spans[0].stop, one.ids) for one in prompts[2:]] == [
        (0, 2, [0, 0]),
        (0, 2, [0, 0]),
        (0, 1, [0]),
    ]
    assert [embedded_size(one) for one in prompts] == [3, 3, 3, 2, 3]
    assert prompts[0].contents[0].positions == 2
