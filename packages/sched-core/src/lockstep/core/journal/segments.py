"""The folder of a journal: names of its files, the list of its segments, and the lock of its single writer."""

from __future__ import annotations

import fcntl
import os
import re
from pathlib import Path

from lockstep.core.journal.records import JournalCorrupt, JournalError

_SEGMENT_NAME = re.compile(r"\d{8}\.log")
SNAPSHOT_NAME = re.compile(r"snapshot-\d{12,}")


RECORDING_NAME = "recording.jsonl"
"""The file in a run folder without a journal, of a host that records another engine's scheduler."""


def segment_name(segment: int) -> str:
    """Return the file name of segment number `segment`."""
    return f"{segment:08d}.log"


def snapshot_name(sequence: int) -> str:
    """Return the file name of the snapshot to which record `sequence` refers."""
    return f"snapshot-{sequence:012d}"


def find_journal(folder: Path) -> Path:
    """Return the folder of segments, given a run folder or this folder itself. Raises JournalError if there is none."""
    if not folder.exists():
        raise JournalError(f"{folder} does not exist")
    if not folder.is_dir():
        raise JournalError(f"{folder} is a file, expected a run folder or its journal folder")
    for candidate in (folder / "journal", folder):
        if candidate.is_dir() and any(candidate.glob("*.log")):
            return candidate
    if (folder / RECORDING_NAME).is_file():
        raise JournalError(
            f"{folder} holds no journal but a recording of another engine's scheduler: it has no decisions to replay\n"
            "hint: `lockstep explain` reads it, other commands read what `lockstep journal convert` writes"
        )
    raise JournalError(f"{folder} holds no journal: expected journal/{segment_name(0)} in it")


def list_segments(folder: Path, first_segment: int) -> list[Path]:
    """Return the paths of all segments from `first_segment` on, in order.

    Raises: JournalCorrupt for a wrong file name or a missing segment; JournalError if there is no segment.
    """
    names = sorted(path.name for path in folder.glob("*.log"))
    for name in names:
        if not _SEGMENT_NAME.fullmatch(name):
            raise JournalCorrupt(str(folder / name), 0, "segment name", f"expected one like {segment_name(0)}")
    names = [name for name in names if name >= segment_name(first_segment)]
    if not names:
        raise JournalError(f"{folder} has no segment {first_segment}")
    for segment, name in enumerate(names, int(names[0].removesuffix(".log"))):
        if name != segment_name(segment):
            raise JournalCorrupt(str(folder / segment_name(segment)), 0, "missing segment", f"the next one is {name}")
    return [folder / name for name in names]


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def lock_folder(folder_file: int, folder: Path) -> None:
    """Lock a journal for this process. The lock ends with the descriptor, so a crashed writer leaves no lock.

    Raises: JournalError if another process holds the lock.
    """
    try:
        fcntl.flock(folder_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise JournalError(f"{folder} is being written by another process") from error
