"""The user's cache of models: folders that are complete or absent, made by one process at a time."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lockstep.core.contract.errors import ConfigError


def cache_folder() -> Path:
    """Return the folder of cached models: lockstep/models below XDG_CACHE_HOME, or below ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "lockstep" / "models"


def cached(folder: Path, make: Callable[[Path, Path], None]) -> Path:
    """Return `folder`, a folder of the cache; if it is absent, it is made first.

    Other versions of the folder, which lie beside its parent, are removed then: only one is kept.

        cache / <of what> / <version> / <name of the model>

    Args:
        make: fills the folder that is its first argument; the second is an empty folder for files that are dropped.
    Raises: ConfigError if the cache cannot be written; and what `make` raises, which leaves no folder.
    """
    if folder.is_dir():
        return folder
    version = folder.parent
    try:
        version.parent.mkdir(parents=True, exist_ok=True)
        with _locked(version.parent / "lock"):
            if folder.is_dir():  # another process made it meanwhile
                return folder
            with tempfile.TemporaryDirectory(dir=version.parent, prefix=".making-") as scratch:
                made, dropped = Path(scratch, "version", folder.name), Path(scratch, "dropped")
                made.mkdir(parents=True)
                dropped.mkdir()
                make(made, dropped)
                for other in version.parent.iterdir():
                    if other.is_dir() and not other.name.startswith("."):
                        shutil.rmtree(other, ignore_errors=True)
                made.parent.rename(version)
    except OSError as error:
        raise ConfigError(
            f"the cache {version.parent} cannot be written to: {error.strerror or error}\n"
            "hint: XDG_CACHE_HOME names another place"
        ) from error
    return folder


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file, which the end of the process releases too."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
