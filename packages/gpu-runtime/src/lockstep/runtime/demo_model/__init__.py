"""The small model of demos and tests: committed beside this file, with the code that made it.

It has the architecture of Qwen3 (four layers, 2.2 million weights) and continues text in the style of Python's
documentation. Prompted with a function of the standard library, it answers in that style; the answers are not true.

Its training text, and the words in its tokenizer, are Python's: copyright Python Software Foundation, under the PSF
License Agreement (PSF-2.0), https://docs.python.org/3/license.html. The committed files hold no passage of it.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lockstep.core.contract.errors import ConfigError

MADE = "made.json"  # how a demo model was made; its presence marks a folder as one
COMMITTED = Path(__file__).with_name("files")


def demo_model_folder() -> Path:
    """Return the committed demo model, a Hugging Face folder for `build_model`. Its files must not be changed.

    Raises: ConfigError if this installation lacks it.
    """
    if not (COMMITTED / MADE).is_file():
        raise ConfigError(f"no demo model in `{COMMITTED}`\nhint: `lockstep demo-model DIR --train` makes one")
    return COMMITTED


def copy_demo_model(folder: Path) -> bool:
    """Copy the committed demo model to `folder`; return False if it holds that model already.

    Raises: ConfigError if the folder holds anything but a demo model.
    """
    check_folder(folder)
    committed = demo_model_folder()
    if read_made(folder) == read_made(committed):
        return False
    replace_folder(folder, lambda part: shutil.copytree(committed, part, dirs_exist_ok=True))
    return True


def check_folder(folder: Path) -> None:
    """Raise ConfigError unless the folder is absent, empty, or holds a demo model, which may be replaced."""
    if folder.exists() and not (folder.is_dir() and ((folder / MADE).is_file() or not any(folder.iterdir()))):
        raise ConfigError(f"`{folder}` exists and does not hold a demo model\nhint: name a new folder")


def read_made(folder: Path) -> dict[str, Any] | None:
    """Return how the demo model of a folder was made, or None if there is none."""
    try:
        made = json.loads((folder / MADE).read_bytes())
    except (OSError, ValueError):
        return None
    return made if isinstance(made, dict) else None


def replace_folder(folder: Path, fill: Callable[[Path], object]) -> None:
    """Fill a temporary folder beside `folder`, then rename it, so that `folder` never holds half a model."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        part = Path(scratch) / "model"
        part.mkdir(mode=0o755)
        fill(part)
        if folder.exists():
            shutil.rmtree(folder)
        part.rename(folder)
