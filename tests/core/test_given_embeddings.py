"""Files of given embeddings where the runtime's packages are absent. What models compute is in tests/runtime."""

from __future__ import annotations

import base64
import io
import json
import sys

import numpy as np
import pytest

from lockstep.host.media.given import BadEmbeddings, rows_of

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


def test_npy_needs_no_package() -> None:
    file = io.BytesIO()
    np.save(file, np.ones((2, 3), np.float32))
    assert rows_of(text(file.getvalue())) is not None
