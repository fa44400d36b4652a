"""The folder of a journal: names of its files, the list of its segments, and the lock of its one writer."""

from __future__ import annotations

import fcntl
import os
import re
from pathlib import Path

from lockstep.core.journal.records import JournalCorrupt, JournalError

_SEGMENT_NAME = re.compile(r"\d{8}\.log")
SNAPSHOT_NAME = re.compile(r"snapshot-\d{12,}")


def segment_name(segment: int) -> str:
    """The file name of segment number `segment`."""
    return f"{segment:08d}.log"


def snapshot_name(sequence: int) -> str:
    """The file name of the snapshot that record `sequence` refers to."""
    return f"snapshot-{sequence:012d}"


def find_journal(folder: Path) -> Path:
    """The folder of segments of a run, given either of the two."""
    if not folder.exists():
        raise JournalError(f"{folder} does not exist")
    if not folder.is_dir():
        raise JournalError(f"{folder} is a file, expected a run folder or its journal folder")
    for candidate in (folder / "journal", folder):
        if candidate.is_dir() and any(candidate.glob("*.log")):
            return candidate
    raise JournalError(f"{folder} holds no journal: expected journal/{segment_name(0)} in it")


def list_segments(folder: Path, first_segment: int) -> list[Path]:
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
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def lock_folder(folder_file: int, folder: Path) -> None:
    """Let one process at a time change a journal. The lock goes with the descriptor, so a dead writer holds none."""
    try:
        fcntl.flock(folder_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise JournalError(f"{folder} is being written by another process") from error
