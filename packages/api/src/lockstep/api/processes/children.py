"""How the processes of a server begin: their settings, their log, and whose children they are."""

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
"""An engine's, where another one would end alike: settings that cannot be, a journal that cannot be gone on with."""


def write_settings(folder: Path, settings: ServeSettings) -> None:
    """Leave settings for the processes to come."""
    path = folder / SETTINGS_FILE
    path.touch(mode=0o600)
    path.write_bytes(msgspec.json.encode(settings))


def read_settings(folder: Path) -> ServeSettings:
    """What `write_settings` left."""
    return msgspec.json.decode((folder / SETTINGS_FILE).read_bytes(), type=ServeSettings)


def say_ready(folder: Path, worker: int) -> None:
    """Leave word for the launcher that a worker has met its engines."""
    (folder / f"ready-{worker}").touch(mode=0o600)


def is_ready(folder: Path, worker: int) -> bool:
    """Whether it left word."""
    return (folder / f"ready-{worker}").exists()


def begin(folder: Path, role: str) -> ServeSettings:
    """Read the settings and set up a child: Ctrl-C is its parent's business, and without a parent it ends."""
    settings = read_settings(folder)
    start_log(settings.log_level, role, settings.log_format)
    signal.signal(signal.SIGINT, lambda *_: None)  # not SIG_IGN, which their own children would inherit
    threading.Thread(target=_end_with_parent, args=(folder,), name="parent", daemon=True).start()
    return settings


def _end_with_parent(folder: Path) -> None:
    """The parent holds the other end of stdin and never writes: it is closed when the parent is gone."""
    os.read(0, 1)
    logging.getLogger("lockstep.serve").error("the process that started this one is gone")
    shutil.rmtree(folder, ignore_errors=True)  # which the parent would have done
    os._exit(1)
