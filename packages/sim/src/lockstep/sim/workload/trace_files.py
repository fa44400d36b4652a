"""Files of traces as bytes: plain, gzip or Zstandard, recognised by their first bytes, not by their name."""

from __future__ import annotations

import gzip
import io
import re
import tarfile
import zlib
from pathlib import Path
from typing import NoReturn

import zstandard

from lockstep.sim.workload.turns import WorkloadError

_CONTROL = re.compile(rb"[\x00-\x08\x0e-\x1f]")  # bytes that no text has
_TAR_MAGIC = slice(257, 262)  # position of `ustar`


def read_bytes(path: Path) -> bytes:
    """Return the content of a file, decompressed. Raises: WorkloadError."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        hint = "check the path; a generated workload begins with gen:, such as gen:n=100,rate=2"
        raise WorkloadError(str(path), "no such file", hint) from None
    except OSError as error:
        raise WorkloadError(str(path), f"cannot be read: {error.strerror}", "name a trace file") from None
    except ValueError as error:  # such as a path with a NUL
        raise WorkloadError(repr(str(path)), f"cannot be read: {error}", "name a trace file") from None
    return _decompress(path, data)


OTHER_KINDS = {
    b"PK\x03\x04": ("a zip archive or a spreadsheet", "unpack it, or save the sheet as CSV"),
    b"\xd0\xcf\x11\xe0": ("an old spreadsheet or document", "save the sheet as CSV"),
    b"SQLite format 3": ("an SQLite database", "export its table: sqlite3 -header -csv FILE 'select * from TABLE'"),
    b"ARROW1": ("an Arrow file", "write it as Parquet: polars.read_ipc(FILE).write_parquet(OTHER)"),
    b"ORC": ("an ORC file", "write it as Parquet"),
    b"%PDF": ("a PDF", "export the data itself, as CSV or JSON"),
}
"""First bytes of files that have requests and are not read, with what they are and what to do."""


def to_text(path: Path, data: bytes) -> str:
    """Decode UTF-8 with or without a byte order mark, UTF-16 with one, and else the Windows code page of spreadsheets.

    Raises: WorkloadError for a file that is no text.
    """
    for start, (what, hint) in OTHER_KINDS.items():
        if data.startswith(start):
            raise WorkloadError(str(path), f"is {what}, which is not read", hint)
    try:
        return data.decode("utf-16" if data.startswith((b"\xff\xfe", b"\xfe\xff")) else "utf-8-sig")
    except UnicodeDecodeError as error:
        if not _CONTROL.search(data):
            return data.decode("cp1252", "replace")
        problem = f"not text: byte {error.start} is not UTF-8"
        raise WorkloadError(str(path), problem, "only plain text, .gz and .zst are read") from None


def is_tar(data: bytes) -> bool:
    """Return whether decompressed bytes are a tar archive."""
    return data[_TAR_MAGIC] == b"ustar"


def tar_files(path: Path, data: bytes) -> dict[str, bytes]:
    """Return the plain files of a tar archive by name. Nothing is written to disk. Raises: WorkloadError."""
    try:
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            files = {}
            for member in archive.getmembers():
                if member.isfile() and (content := archive.extractfile(member)) is not None:
                    files[member.name] = content.read()
            return files
    except (tarfile.TarError, EOFError) as error:
        problem = f"the tar archive is damaged: {error}"
        raise WorkloadError(str(path), problem, "fetch it again, or unpack it and name the folder") from None


def _decompress(path: Path, data: bytes) -> bytes:
    """Undo gzip or Zstandard; anything else is returned as it is."""
    try:
        if data.startswith(b"\x1f\x8b"):
            return gzip.decompress(data)
        if data.startswith(b"\x28\xb5\x2f\xfd"):
            return _decompress_zstd(data)
    except EOFError:
        _raise_broken(path, data, "the compressed data ends too early")
    except (OSError, zlib.error) as error:
        _raise_broken(path, data, f"the compressed data is damaged: {error}")
    return data


def _decompress_zstd(data: bytes) -> bytes:
    parts = []
    rest = data
    while rest:  # a file may hold several frames
        frame = zstandard.ZstdDecompressor().decompressobj()
        try:
            parts.append(frame.decompress(rest))
        except zstandard.ZstdError as error:
            raise OSError(str(error)) from None
        if not frame.eof:
            raise EOFError
        rest = frame.unused_data
    return b"".join(parts)


def _raise_broken(path: Path, data: bytes, problem: str) -> NoReturn:
    raise WorkloadError(str(path), f"{problem} ({len(data):,} bytes)", "fetch or compress the file again") from None
