"""Version and commit of the simulator."""

from __future__ import annotations

import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def code_version() -> str:
    """Return the version of the installed simulator."""
    try:
        return version("lockstep-sim")
    except PackageNotFoundError:
        return "source"


@cache
def code_commit() -> str | None:
    """Return the commit of this checkout, with `-dirty` after local changes; None for an installed package."""
    root = Path(__file__).resolve().parents[5]
    if not (root / ".git").exists() or not (root / "packages" / "sim").is_dir():
        return None
    describe = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(describe, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
