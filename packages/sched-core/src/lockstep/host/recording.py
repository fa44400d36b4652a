"""A recording of another engine's scheduler: what arrived, what was planned, what came of it. No decision of the core.

A recorder writes `recording.jsonl` in a run folder, one JSON array per line: the header, then records in the order of
their times. The file holds no token ids. Prompts are described by their lengths and by hashes of their blocks, which
show which prompts share a prefix. A last line that is cut short is left out by the reader.

    writer = RecordingWriter(Path("runs/engine"), RecordingHeader(engine="vllm", ...))
    writer.append(Planned(time_us=20, batch=0, rows=((0, 0, 512, 0),)))     # never waits and never raises
    header, records = read_recording(Path("runs/engine"))
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from lockstep.core.journal.records import JournalError
from lockstep.core.journal.segments import RECORDING_NAME
from lockstep.host.queued_writer import QueuedWriter

FILE = RECORDING_NAME
VERSION = 1
QUEUE_RECORDS_MAX = 65_536


class RecordingError(JournalError):
    """A recording that cannot be written or read."""


class RecordingHeader(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="recording"):
    """First line: which engine, and its sizes."""

    version: int = VERSION
    engine: str
    engine_version: str = ""
    model: str = ""
    page_size: int = 0  # tokens
    pages: int = 0
    context_tokens_max: int = 0
    max_running_requests: int = 0
    batch_tokens_max: int = 0
    overlap_depth: int = 0
    gpu: str = ""  # name of the device
    tp: int = 1


class Arrived(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="arrived"):
    """A request reached the scheduler. Requests are numbered from 0 in the order of these records."""

    time_us: int
    name: str
    prompt_tokens: int
    max_new_tokens: int
    priority: int = 0
    blocks: tuple[int, ...] = ()  # per whole page of the prompt, a hash of the prompt up to its end


class Planned(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="planned"):
    """A pass was planned."""

    time_us: int
    batch: int
    rows: tuple[tuple[int, int, int, int], ...]  # request, tokens with KV before it, new tokens, drafts among these
    retracted: tuple[int, ...] = ()  # requests that were preempted to plan it
    running: int = 0  # requests, behind this plan
    waiting: int = 0
    kv_usage: float = 0.0  # share of the pages in use


class PassFinished(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="finished"):
    """The result of a pass was on the host."""

    time_us: int
    batch: int
    started_us: int  # when the device was free and the pass planned
    tokens: tuple[tuple[int, int], ...]  # request, new output tokens


class Ended(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="ended"):
    """A request ended."""

    time_us: int
    request: int
    reason: str


Entry = Arrived | Planned | PassFinished | Ended


class _RecordingFile:
    """The file of a recording, as `QueuedWriter` writes it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def write(self, item: Entry) -> None:
        """Write a record."""
        self._file.write(msgspec.json.encode(item) + b"\n")

    def flush(self) -> None:
        """Hand what is buffered to the operating system."""
        self._file.flush()

    def close(self, failure: str) -> None:
        """Close the file."""
        self._file.close()


class RecordingWriter:
    """Writes records on a thread of its own. If the queue is full or the disk fails, recording ends with a report."""

    def __init__(self, folder: Path, header: RecordingHeader, failed: Callable[[str], None]) -> None:
        """
        Args:
            failed: called once with the reason if recording ends early.
        Raises: RecordingError if the file exists or cannot be made.
        """
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            file = (folder / FILE).open("xb")
            file.write(msgspec.json.encode(header) + b"\n")
            file.flush()
        except OSError as error:
            raise RecordingError(
                f"cannot begin {folder / FILE}: {error.strerror or error}\nhint: choose another run folder"
            ) from error
        self._writer = QueuedWriter(
            "lockstep-recording", _RecordingFile(file), QUEUE_RECORDS_MAX, failed, items="records"
        )

    def append(self, record: Entry) -> None:
        """Record an entry. Never waits and never raises."""
        self._writer.append(record)

    def close(self) -> None:
        """Write what is queued, and close the file."""
        self._writer.close()


def has_recording(folder: Path) -> bool:
    """Whether the run folder holds a recording."""
    return (folder / FILE).is_file()


def read_recording(folder: Path) -> tuple[RecordingHeader, Iterator[Entry]]:
    """Return the header of a recording and an iterator over its records.

    Raises: RecordingError with file and line, also while iterating.
    """
    path = folder / FILE
    try:
        with path.open("rb") as file:
            header = msgspec.json.decode(file.readline(), type=RecordingHeader)
    except OSError as error:
        raise RecordingError(f"{path}: {error.strerror or error}") from error
    except msgspec.MsgspecError as error:
        raise RecordingError(f"{path}: line 1: not the header of a recording: {error}") from error
    if header.version != VERSION:
        raise RecordingError(f"{path}: version {header.version} is not one this release reads, which is {VERSION}")
    return header, _entries(path)


def _entries(path: Path) -> Iterator[Entry]:
    decode = msgspec.json.Decoder(Entry).decode
    with path.open("rb") as file:
        next(file)
        for number, line in enumerate(file, 2):
            if not line.endswith(b"\n"):
                return  # the recorder was killed in the middle of a record
            try:
                yield decode(line)
            except msgspec.MsgspecError as error:
                raise RecordingError(f"{path}: line {number}: {error}") from error
