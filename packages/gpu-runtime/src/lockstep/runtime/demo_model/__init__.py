"""The small model that everything uses that needs one: committed beside this file, and how it was made.

It has the form of Qwen3 (four layers, 2.2 million weights) and continues texts in the manner of Python's documentation;
prompted with a function of the standard library, it answers in that manner. The answers are not true.

The text it learnt from, and the words in its tokenizer, are Python's: copyright Python Software Foundation, under the
PSF License Agreement (PSF-2.0), https://docs.python.org/3/license.html. The committed files hold no passage of it.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lockstep.core.contract.errors import ConfigError

MADE = "made.json"  # the source of a demo model; marks a folder as one
COMMITTED = Path(__file__).with_name("files")


def demo_model_folder() -> Path:
    """The committed demo model, a Hugging Face folder: pass it to `build_model`. Not to be written to.

    Raises: ConfigError if this installation came without it.
    """
    if not (COMMITTED / MADE).is_file():
        raise ConfigError(f"no demo model in `{COMMITTED}`\nhint: `lockstep demo-model DIR --train` makes one")
    return COMMITTED


def copy_demo_model(folder: Path) -> bool:
    """Put a copy of the committed demo model into `folder`; False if it was there already.

    Raises: ConfigError if the folder holds anything but a demo model.
    """
    check_folder(folder)
    committed = demo_model_folder()
    if read_made(folder) == read_made(committed):
        return False
    replace_folder(folder, lambda part: shutil.copytree(committed, part, dirs_exist_ok=True))
    return True


def check_folder(folder: Path) -> None:
    """Raises: ConfigError unless the folder is absent, empty, or holds a demo model, which may be replaced."""
    if folder.exists() and not (folder.is_dir() and ((folder / MADE).is_file() or not any(folder.iterdir()))):
        raise ConfigError(f"`{folder}` exists and does not hold a demo model\nhint: name a new folder")


def read_made(folder: Path) -> dict[str, Any] | None:
    """From what the demo model of a folder was made, or None."""
    try:
        made = json.loads((folder / MADE).read_bytes())
    except (OSError, ValueError):
        return None
    return made if isinstance(made, dict) else None


def replace_folder(folder: Path, fill: Callable[[Path], object]) -> None:
    """Fill a folder beside `folder`, then put it in its place: `folder` never holds half a model."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        part = Path(scratch) / "model"
        part.mkdir(mode=0o755)
        fill(part)
        if folder.exists():
            shutil.rmtree(folder)
        part.rename(folder)
