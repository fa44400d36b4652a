"""GGUF files as Hugging Face folders: a file is widened once, by transformers' reader, and then served as any folder.

The quantised matrices become bfloat16 (float16 and float32 files keep their dtype), so a widened model takes the time
and the memory of an unquantised one. The reader runs in a process of its own (`widen.py`), without network: it imports
transformers, needs the whole model in memory once, and may fail in any way on a damaged file.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from lockstep.core.contract.errors import ConfigError
from lockstep.runtime.sources.cache import cache_folder, cached

MAGIC = b"GGUF"
LAYOUT = 1  # of widened folders; a change makes all of them anew
NEEDED = ("gguf", "transformers")
EXTRA = "lockstep-runtime[gguf]"
SPLIT = re.compile(r"-\d{5}-of-\d{5}$")  # the end of the name of one file of several
SHOWN_LINES = 3


class GgufError(ConfigError):
    """A GGUF file that cannot be served."""

    def __init__(self, file: Path, why: str, hint: str = "") -> None:
        super().__init__(f"`{file}` cannot be read: {why}" + (f"\nhint: {hint}" if hint else ""))


def gguf_of(path: Path, setting: str = "model") -> Path | None:
    """Return the GGUF file that a path names: the file itself, or the only one in a folder; None if there is none.

    Raises: ConfigError for a folder with several of them.
    """
    if path.is_file():
        return path
    files = sorted(path.glob("*.gguf")) if path.is_dir() else []
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise ConfigError(f"`{setting}`: {path} has {len(files)} GGUF files: {names}\nhint: name one of them")
    return files[0] if files else None


def widened(file: Path, say: Callable[[str], None]) -> Path:
    """Return the Hugging Face folder of a GGUF file, from the cache; it is made on first use and when the file changed.

    Raises: GgufError if the file is damaged, holds no language model, or needs what the reader would leave out;
        ConfigError if the packages of the extra are missing.
    """
    file = file.resolve()
    _check_begin(file)
    facts = file.stat()
    of_file = hashlib.sha256(os.fsencode(file)).hexdigest()[:16]
    stamp = hashlib.sha256(f"{facts.st_size}/{facts.st_mtime_ns}/{LAYOUT}".encode()).hexdigest()[:16]
    folder = cache_folder() / "gguf" / of_file / stamp / file.stem
    return cached(folder, lambda made, _: widen_into(made, file, say))


def widen_into(folder: Path, file: Path, say: Callable[[str], None]) -> None:
    """Write the Hugging Face folder of a GGUF file. Raises GgufError, ConfigError."""
    _check_begin(file)
    check_installed(str(file))
    say(f"widening {file.name}, {file.stat().st_size / 1e6:,.0f} MB, to a Hugging Face folder in the cache, once")
    command = [sys.executable, "-m", "lockstep.runtime.sources.widen", str(file), str(folder)]
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        command, env=os.environ | offline, capture_output=True, text=True, errors="replace", check=False
    )
    if done.returncode == 0:
        return
    try:
        problem = json.loads(done.stdout.strip().splitlines()[-1])
        why, hint = str(problem["why"]), str(problem["hint"])
    except (IndexError, ValueError, KeyError, TypeError):  # the process ended without an answer
        lines = done.stderr.strip().splitlines()[-SHOWN_LINES:]
        why = f"its reader ended with status {done.returncode}: " + " ".join(lines)
        hint = "a negative status is a signal; 9 is a lack of memory: the widened model must fit once"
    raise GgufError(file, why, hint)


def check_installed(what: str) -> None:
    """Raise ConfigError unless the packages of the extra `gguf` are installed."""
    missing = []
    for name in NEEDED:
        try:
            version(name)
        except PackageNotFoundError:
            missing.append(name)
    if missing:
        names = " and ".join(missing)
        raise ConfigError(
            f"`{what}` is read by {' and '.join(NEEDED)}, but {names} is not installed\n"
            f"hint: pip install {' '.join(missing)}, or {EXTRA}"
        )


def _check_begin(file: Path) -> None:
    """Raise GgufError unless the file begins as a GGUF file, and is not one of several."""
    try:
        with file.open("rb") as opened:
            begin = opened.read(len(MAGIC))
    except OSError as error:
        raise GgufError(file, error.strerror or str(error)) from error
    if begin != MAGIC:
        raise GgufError(file, "it is not a GGUF file", "give a GGUF file, or a folder with config.json")
    if SPLIT.search(file.stem):
        raise GgufError(file, "it is one of several files", "join them by llama.cpp's `llama-gguf-split --merge`")
