"""Start of a server's child processes: their settings, their log, and their end when the parent process ends."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import threading
from pathlib import Path

import msgspec

from lockstep.api.observability.logs import start_log
from lockstep.api.settings import ServeSettings

SETTINGS_FILE = "settings.json"
EXIT_FOR_GOOD = 3
"""Exit status of an engine if its successor would fail alike: impossible settings, or a journal that cannot be
continued.
"""

EXIT_RANK_KILLED = 5
"""Exit status of an engine of several ranks one of which was killed from outside."""

EXIT_UNWRITABLE = 4
"""Exit status of an engine whose journal cannot be written, which may be temporary: the disk is full."""


def write_settings(folder: Path, settings: ServeSettings) -> None:
    """Write the settings file that child processes read, with mode 0600."""
    path = folder / SETTINGS_FILE
    path.touch(mode=0o600)
    path.write_bytes(msgspec.json.encode(settings))


def read_settings(folder: Path) -> ServeSettings:
    """Read the settings file that `write_settings` wrote."""
    return msgspec.json.decode((folder / SETTINGS_FILE).read_bytes(), type=ServeSettings)


def mark_ready(folder: Path, worker: int) -> None:
    """Mark a worker as connected to its engines, by a file that the launcher polls."""
    (folder / f"ready-{worker}").touch(mode=0o600)


def is_ready(folder: Path, worker: int) -> bool:
    """Return whether `mark_ready` was called for a worker."""
    return (folder / f"ready-{worker}").exists()


def begin(folder: Path, role: str) -> ServeSettings:
    """Set up a child process and return its settings. The process ignores SIGINT, and ends when its parent ends."""
    settings = read_settings(folder)
    start_log(settings.log_level, role, settings.log_format)
    signal.signal(signal.SIGINT, lambda *_: None)  # not SIG_IGN, which child processes of this one would inherit
    threading.Thread(target=_end_with_parent, args=(folder,), name="parent", daemon=True).start()
    return settings


def _end_with_parent(folder: Path) -> None:
    """End this process when stdin closes: the parent holds the other end and never writes to it."""
    os.read(0, 1)
    logging.getLogger("lockstep.serve").error("the parent process has ended")
    shutil.rmtree(folder, ignore_errors=True)  # the parent ended without removing it
    os._exit(1)
