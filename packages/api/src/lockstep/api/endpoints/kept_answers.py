"""Answers in files, so that a stream can be taken up again, and a repeated request has the same answer.

    FOLDER/<tenant>/<id>.open      an answer in progress, locked by the worker that makes it
    FOLDER/<tenant>/<id>.ended     a complete answer

A file is a sequence of records, each with its length and checksum, that is only appended to: the request, the engine's
requests, the head of the answer, its events, its end. A torn record at the end is cut off by the next writer. Readers
of any worker follow a file while it grows. When a worker dies its locks are free: the worker that takes a lock
continues the answer. Limits apply to each tenant.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import re
import secrets
import struct
import time
from collections.abc import AsyncGenerator, Iterator
from hashlib import sha256
from io import FileIO
from pathlib import Path
from zlib import crc32

import msgspec

from lockstep.api.endpoints.answer_run import Cut

log = logging.getLogger("lockstep.worker")

FRAME = struct.Struct("<II")  # length and checksum of a record
ID = re.compile(r"[a-z]+_[0-9a-f]{8,64}")
READ_BYTES = 2**18  # read at once, between which other requests proceed
LOOK_S = 0.02  # between two looks at a file that another process writes
FRESH, FRESH_S = ".fresh", 60.0
"""Suffix of a file that `begin` prepares, and the age in seconds beyond which it was abandoned."""
STOPS = "the server stops"
READ_S = 1.0  # between two marks of a reader


class KeptRequest(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The request of an answer: everything that a later run needs."""

    path: str
    tenant: str
    digest: bytes  # of path and body
    body: bytes  # MessagePack, with token ids as `text_jobs.packed` writes them
    headers: tuple[tuple[str, str], ...]
    secret: bytes
    created_s: float
    lasting: bool = False  # whether it goes on without readers


class Submitted(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The names of the engine's requests of this answer."""

    origins: tuple[str, ...]


class Head(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Status and headers of the answer."""

    status: int
    headers: tuple[tuple[str, str], ...]
    stream: bool


class Content(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """One event of a stream, or a whole body. `cut` is the state of its choices afterwards."""

    data: bytes
    cut: Cut = ()


class End(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The answer is complete; `error` is why the rest is missing, "" for nothing."""

    error: str = ""


Record = KeptRequest | Submitted | Head | Content | End
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record)


class NoRoom(Exception):
    """Raised when a tenant's answers in progress leave no room for another one."""


class KeptAnswer:
    """One answer in this process: its writer, if `locked`, or a reader."""

    def __init__(self, path: Path, descriptor: int, *, locked: bool) -> None:
        self.path, self.locked = path, locked
        self.name = path.stem
        self.descriptor = descriptor
        self.readers = 0
        self.size = 0
        self.grown = asyncio.Event()  # set whenever records were appended by this process
        self.closed = False

    def records(self) -> list[Record]:
        """Read all records. A torn tail is cut off if this process is the writer."""
        raw = _read_all(self.descriptor)
        found, at = _parsed(raw)
        if self.locked and at < len(raw):
            os.ftruncate(self.descriptor, at)
        self.size = at
        return found

    def append(self, record: Record) -> None:
        """Write a record. Raises OSError."""
        data = _encoder.encode(record)
        framed = FRAME.pack(len(data), crc32(data)) + data
        os.pwrite(self.descriptor, framed, self.size)
        self.size += len(framed)
        self.grown.set()

    def end(self, error: str = "") -> None:
        """Write the end, and release the lock. Raises OSError."""
        self.append(End(error))
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile
            self.path.rename(self.path.with_suffix(".ended"))
        self.close()

    def discard(self) -> None:
        """Remove an answer that must not be given again."""
        self.path.unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        """Close the file, which releases its lock; records are read through other descriptors."""
        os.close(self.descriptor)
        self.closed = True
        self.grown.set()

    def unread_s(self) -> float:
        """Return the seconds since a reader of any process last marked the file; 0 with readers in this process."""
        if self.readers:
            return 0.0
        return max(0.0, time.time() - os.fstat(self.descriptor).st_atime)


def _read_all(descriptor: int, offset: int = 0) -> bytes:
    parts = []
    while part := os.pread(descriptor, 2**20, offset):
        parts.append(part)
        offset += len(part)
    return b"".join(parts)


def _parsed(raw: bytes) -> tuple[list[Record], int]:
    """Return the complete records, and the offset behind them."""
    found: list[Record] = []
    at = 0
    while at + FRAME.size <= len(raw):
        length, checksum = FRAME.unpack_from(raw, at)
        data = raw[at + FRAME.size : at + FRAME.size + length]
        if len(data) < length or crc32(data) != checksum:
            break
        found.append(_decoder.decode(data))
        at += FRAME.size + length
    return found, at


class KeptAnswers:
    """A worker's access to the answers.

    Args:
        folder: made with mode 0700.
        most, bytes_max, kept_s: limits of each tenant: answers, their bytes, seconds from an answer's end.
    """

    def __init__(self, folder: Path, *, most: int, bytes_max: int, kept_s: float) -> None:
        self.folder, self.most, self.bytes_max, self.kept_s = folder, most, bytes_max, kept_s
        folder.mkdir(mode=0o700, exist_ok=True, parents=True)
        self.writing: dict[str, KeptAnswer] = {}  # by name: answers that this process makes
        self.closing = False  # whether readers are sent away, since the server stops

    def _of(self, tenant: str) -> Path:
        return self.folder / sha256(tenant.encode("utf-8", "surrogatepass")).hexdigest()[:24]

    def begin(self, name: str, request: KeptRequest) -> KeptAnswer | None:
        """Create an answer; None if it exists. Raises NoRoom, OSError."""
        folder = self._of(request.tenant)
        folder.mkdir(mode=0o700, exist_ok=True)
        if (folder / f"{name}.ended").exists():
            return None
        self._make_room(folder, len(request.body))
        path, fresh = folder / f"{name}.open", folder / f"{name}.{secrets.token_hex(8)}{FRESH}"
        # the file has its lock and its request before it has its name, so no other worker takes it for abandoned
        descriptor = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        answer = KeptAnswer(path, descriptor, locked=True)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            answer.append(request)
            os.link(fresh, path)
        except BaseException as error:
            os.close(descriptor)
            if isinstance(error, FileExistsError):
                return None
            raise
        finally:
            fresh.unlink(missing_ok=True)
        self.writing[name] = answer
        return answer

    def _make_room(self, folder: Path, coming: int) -> None:
        """Remove expired answers, and beyond the limits those that ended first. Raises NoRoom."""
        ended, used, count, now_s = [], coming, 1, time.time()
        for path in folder.iterdir():
            with contextlib.suppress(FileNotFoundError):
                about = path.stat()
                used, count = used + about.st_size, count + 1
                if path.suffix == ".ended":
                    ended.append((about.st_mtime, about.st_size, path))
        for mtime, size, path in sorted(ended):
            if count <= self.most and used <= self.bytes_max and now_s - mtime <= self.kept_s:
                return
            path.unlink(missing_ok=True)
            used, count = used - size, count - 1
        if count > self.most or used > self.bytes_max:
            raise NoRoom(f"{count - 1} answers of this key are in progress or kept, and there is no room for more")

    def find(self, tenant: str, name: str) -> Path | None:
        """Return the file of a tenant's answer; None without."""
        if ID.fullmatch(name) is None:
            return None
        folder = self._of(tenant)
        for suffix in (".open", ".ended", ".open", ".ended"):  # it may be renamed between two looks
            path = folder / f"{name}{suffix}"
            with contextlib.suppress(FileNotFoundError):
                ended_s = path.stat().st_mtime
                return path if suffix == ".open" or time.time() - ended_s <= self.kept_s else None
        return None

    def request_of(self, path: Path) -> KeptRequest | None:
        """Return the request of an answer; None if it is not readable."""
        with contextlib.suppress(OSError), path.open("rb") as file:
            head = file.read(FRAME.size)
            if len(head) == FRAME.size:
                found, _ = _parsed(head + file.read(FRAME.unpack(head)[0]))
                if found and isinstance(found[0], KeptRequest):
                    return found[0]
        return None

    def abandoned(self) -> Iterator[KeptAnswer]:
        """Lock and yield the answers in progress whose worker has ended."""
        for path in self.folder.glob(f"*/*{FRESH}"):  # left by a worker that ended between two lines of `begin`
            with contextlib.suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > FRESH_S:
                    path.unlink(missing_ok=True)
        for path in sorted(self.folder.glob("*/*.open")):
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                continue
            if not path.exists():  # it ended between the look and the lock
                os.close(descriptor)
                continue
            answer = self.writing[path.stem] = KeptAnswer(path, descriptor, locked=True)
            yield answer

    def remove(self, path: Path) -> None:
        """Remove an answer. Its writer, if there is one, notices within a second."""
        path.unlink(missing_ok=True)

    def send_readers_away(self) -> None:
        """End the reading of all answers, since the server stops."""
        self.closing = True
        for one in self.writing.values():
            one.grown.set()

    def follow(self, path: Path) -> AsyncGenerator[Record, None]:
        """Return the records of an answer from its first one on, as they are written, until its end.

        The file is opened at once, so it may be renamed or removed afterwards. Raises OSError.
        """
        try:
            file = path.open("rb", buffering=0)
        except FileNotFoundError:
            file = path.with_suffix(".ended").open("rb", buffering=0)
        return self._records(file, path.stem)

    async def _records(self, file: FileIO, name: str) -> AsyncGenerator[Record, None]:
        descriptor = file.fileno()
        writer = self.writing.get(name)
        if writer is not None:
            writer.readers += 1
        offset, marked_s, most = 0, 0.0, READ_BYTES
        try:
            while True:
                if writer is not None:
                    writer.grown.clear()
                raw = os.pread(descriptor, most, offset)
                found, used = _parsed(raw)
                offset += used
                # a record that is longer than what was read is read at once
                most = READ_BYTES if used or len(raw) < most else 2 * most
                for record in found:
                    yield record
                    if isinstance(record, End):
                        return
                if self.closing:
                    yield End(f"{STOPS}; the answer continues with its next start: GET /v1/streams/{name}")
                    return
                now_s = time.time()
                if now_s - marked_s >= READ_S:
                    marked_s = now_s
                    about = os.fstat(descriptor)
                    if not about.st_nlink and writer is None:  # removed, and not written by this process
                        yield End("the answer was removed")
                        return
                    with contextlib.suppress(PermissionError):
                        os.utime(descriptor, ns=(time.time_ns(), about.st_mtime_ns))
                if found or most > READ_BYTES:
                    await asyncio.sleep(0)
                elif writer is not None and writer.closed:
                    yield End("the answer was interrupted; it continues with the next start of a worker")
                    return
                elif writer is not None:
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(writer.grown.wait(), READ_S)
                else:
                    await asyncio.sleep(LOOK_S)
        finally:
            if writer is not None:
                writer.readers -= 1
            file.close()
