"""A page as a browser renders it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

needs_chromium = pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")


def dom_of(page: Path | str, profile: Path, *, virtual_ms: int = 2000) -> str:
    """The document after its scripts have run, which must not have complained.

    Args:
        page: a file, or a URL.
        profile: a folder for the browser.
    """
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
             "--disable-component-update", "--disable-sync", f"--user-data-dir={profile}",
             "--enable-logging=stderr", "--v=0", f"--virtual-time-budget={virtual_ms}", "--dump-dom"]  # fmt: skip
    done = subprocess.run(
        ["chromium", *flags, page if isinstance(page, str) else page.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        errors="replace",
    )
    assert "CONSOLE" not in done.stderr, done.stderr
    return done.stdout
