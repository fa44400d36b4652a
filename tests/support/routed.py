"""The journal of a router: what it received and decided, as records, as JSON, and as earlier versions wrote it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec

from lockstep.host.router_journal import FOLDER, OLD_FILE, RouterHeader, RouterReader, RouterRecord


def facts(run: Path) -> list[RouterRecord]:
    """Return the records of a router, without its settings."""
    return [entry.content for entry in RouterReader(run).entries() if isinstance(entry.content, RouterRecord)]


def lines(run: Path) -> list[dict[str, Any]]:
    """Return the same as dicts, without fields at their defaults."""
    return [msgspec.to_builtins(record) for record in facts(run)]


def raw(run: Path) -> bytes:
    """Return the bytes of all segments."""
    return b"".join(path.read_bytes() for path in sorted((run / FOLDER).glob("*.log")))


def as_old_file(run: Path) -> Path:
    """Replace a router's journal by the file of JSON lines that earlier versions wrote; return it."""
    path, text = run / OLD_FILE, b""
    for _, content in RouterReader(run).entries():
        if isinstance(content, RouterHeader):
            assert not text, "an old file has one router"
        elif content.routed is None and not content.decided:
            content = msgspec.structs.replace(content, digest="")
        text += msgspec.json.encode(content) + b"\n"
    shutil.rmtree(run / FOLDER)
    path.write_bytes(text)
    return path
