"""The catalogue: public models, GPUs and calibrations by name, each number with its source.

`models/<name>.json` has the fields of a Hugging Face config.json; `gpus/<name>.json` has data-sheet peaks, measured
medians and prices of a GPU, and `cpus/<name>.json` those of a processor; `calibrations/<name>.json` has a correction
fitted to public serving points of an engine. The functions also accept paths: `load_model("path/to/config.json")`,
`load_gpu("path/to/gpu.json")`.
"""

from __future__ import annotations

import difflib
import json
import re
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from lockstep.sim.cost.calibration import Calibration
from lockstep.sim.cost.encoder import Encoders, encoders_from_config
from lockstep.sim.cost.engines import EngineSpec, release_key
from lockstep.sim.cost.errors import CalibrationError, CatalogueError
from lockstep.sim.cost.families import model_from_config
from lockstep.sim.cost.hardware import GpuSpec, gpu_from_json
from lockstep.sim.cost.models import ModelSpec

__all__ = [
    "CatalogueError",
    "calibration_names",
    "engine_names",
    "gpu_entry",
    "gpu_names",
    "load_calibration",
    "load_encoders",
    "load_engine",
    "load_gpu",
    "load_model",
    "model_names",
]


def model_names() -> tuple[str, ...]:
    """Return the names of the catalogue's models, sorted."""
    return tuple(sorted(_entries("models")))


def gpu_names() -> tuple[str, ...]:
    """Return the names of the catalogue's GPUs, sorted."""
    return tuple(sorted({str(entry["name"]) for entry in _gpus().values()}))


def load_model(name_or_path: str) -> ModelSpec:
    """Return a model by catalogue name, Hugging Face name, or path to a config.json or its folder.

    Raises: CatalogueError if it is unknown, malformed, or of a kind that is not modelled.
    """
    path = _local(name_or_path, "config.json")
    if path is not None:
        name = path.parent.resolve().name if path.name == "config.json" else path.stem
        return model_from_config(_read(path), name, str(path))
    known = _entries("models")
    wanted = _model_key(name_or_path)
    if wanted in known:
        return model_from_config(_read(known[wanted]), wanted, f"catalogue model {wanted}")
    raise _unknown("model", name_or_path, wanted, model_names(), "the path of a Hugging Face config.json or its folder")


def load_encoders(name_or_path: str) -> Encoders | None:
    """Return the media encoders of a model, by the names of `load_model`; None if the model accepts text only.

    Raises: CatalogueError if the model is unknown or malformed, or an encoder is not modelled.
    """
    path = _local(name_or_path, "config.json")
    if path is not None:
        name = path.parent.resolve().name if path.name == "config.json" else path.stem
        return encoders_from_config(_read(path), name, str(path))
    known, wanted = _entries("models"), _model_key(name_or_path)
    if wanted in known:
        return encoders_from_config(_read(known[wanted]), wanted, f"catalogue model {wanted}")
    raise _unknown("model", name_or_path, wanted, model_names(), "the path of a Hugging Face config.json or its folder")


def load_gpu(name_or_path: str) -> GpuSpec:
    """Return a GPU by catalogue name or alias, in any case, or by the path of a JSON file like those in `gpus/`.

    `cpu-core`, alias `cpu`, is an estimate of one core of a processor, for use until it is calibrated; it is not in
    `gpu_names`.
    Raises: CatalogueError if the name is unknown or the entry malformed.
    """
    path = _local(name_or_path, "gpu.json")
    if path is not None:
        return gpu_from_json(_read(path), str(path))
    wanted = _gpu_key(name_or_path)
    entry = _gpus().get(wanted) or _named(_entries("cpus")).get(wanted)
    if entry is not None:
        return gpu_from_json(entry, f"catalogue GPU {entry['name']}")
    close_to = {alias: str(entry["name"]) for alias, entry in _gpus().items()}
    raise _unknown(
        "GPU", name_or_path, wanted, gpu_names(), "the path of a JSON file like catalogue/gpus/*.json", close_to
    )


def gpu_entry(name_or_path: str) -> dict[str, Any]:
    """Return the entry of a GPU as its file has it, under the names of `load_gpu`. Raises CatalogueError."""
    load_gpu(name_or_path)
    path = _local(name_or_path, "gpu.json")
    return (
        _read(path)
        if path is not None
        else dict(_gpus().get(_gpu_key(name_or_path)) or _named(_entries("cpus"))["cpu"])
    )


def calibration_names() -> tuple[str, ...]:
    """Return the names of the catalogue's calibrations, sorted."""
    return tuple(sorted(_entries("calibrations")))


def load_calibration(name_or_path: str) -> Calibration:
    """Return a calibration by name, such as vllm-h100, or by the path of a file that `lockstep calibrate` wrote.

    Raises: CalibrationError if it is unknown or malformed.
    """
    known = _entries("calibrations")
    name = name_or_path.strip().lower()
    if name in known:
        return Calibration.from_bytes(known[name].read_bytes(), f"catalogue calibration {name}")
    if name_or_path.endswith(".json") or Path(name_or_path).exists():
        return Calibration.load(name_or_path)
    raise CalibrationError(
        f"unknown calibration `{name_or_path}`\nknown: {', '.join(calibration_names())}\n"
        "hint: anything else can be given as the path of a file, which `lockstep calibrate` makes"
    )


def engine_names() -> tuple[str, ...]:
    """Return the names of the catalogue's engines, sorted."""
    return tuple(sorted(_entries("engines")))


def load_engine(name: str) -> tuple[EngineSpec, str]:
    """Return an engine by name, and the release that the name has behind an @, such as vllm@0.12; empty: none.

    Raises: CatalogueError if it is unknown or malformed.
    """
    wanted, _, release = name.strip().lower().partition("@")
    known = _entries("engines")
    if wanted not in known or (release and not release_key(release)):
        what = f"release `{release}` has no number" if wanted in known else f"known: {', '.join(engine_names())}"
        raise CatalogueError(
            f"`engine` must be an engine of the catalogue, with @RELEASE if need be, got `{name}`; {what}\n"
            "hint: --engine vllm or vllm@0.12; none is the lower bound: kernels without an engine"
        )
    return EngineSpec.from_bytes(known[wanted].read_bytes(), f"catalogue engine {wanted}"), release


def _model_key(name: str) -> str:
    """Convert a Hugging Face name to a catalogue name: Qwen/Qwen3-8B to qwen3-8b, llama3.1-8b to llama-3.1-8b."""
    key = name.strip().rsplit("/", 1)[-1].lower().replace("_", "-").replace(" ", "-")
    key = re.sub(r"^(meta-)?llama-?(?=\d)", "llama-", key)
    key = re.sub(r"-v0\.\d$", "", key)
    return re.sub(r"-(instruct|it|chat|hf)$", "", key)


def _gpu_key(name: str) -> str:
    key = name.strip().lower().replace("_", "-").replace(" ", "-")
    return key.removeprefix("nvidia-").removeprefix("amd-").removeprefix("geforce-")


@cache
def _entries(folder: str) -> dict[str, Traversable]:
    found = files(__name__).joinpath(folder).iterdir()
    return {entry.name.removesuffix(".json"): entry for entry in found if entry.name.endswith(".json")}


@cache
def _gpus() -> dict[str, dict[str, Any]]:
    """Return every GPU's entry by name and by each alias, in the form of `_gpu_key`."""
    return _named(_entries("gpus"))


def _named(entries: dict[str, Traversable]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for file in entries.values():
        entry = _read(file)
        for alias in (entry["name"], *entry.get("aliases", ())):
            found[_gpu_key(alias)] = entry
    return found


def _local(name: str, default_file: str) -> Path | None:
    """Return the file that `name` is the path of, None if it is not a path. Raises CatalogueError if it is missing."""
    path = Path(name).expanduser()
    if path.is_dir() and (path / default_file).is_file():
        return path / default_file
    if path.is_file():
        return path
    if name.startswith(("/", "./", "../", "~")) or name.endswith(".json"):
        raise CatalogueError(f"no such file: `{name}` (expected a JSON file, or a folder with {default_file})")
    return None


def _read(file: Traversable | Path) -> dict[str, Any]:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CatalogueError(
            f"{file}: not readable as JSON: {error}\nhint: is it the right file, and whole?"
        ) from error
    if not isinstance(data, dict):
        raise CatalogueError(
            f"{file}: expected a JSON object, got `{type(data).__name__}`\nhint: is it the right file?"
        )
    return data


def _unknown(
    what: str, given: str, key: str, known: tuple[str, ...], path: str, close_to: dict[str, str] | None = None
) -> CatalogueError:
    names = close_to or {name: name for name in known}
    close = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
    guess = f"did you mean `{names[close[0]]}`? " if close else ""
    if what == "GPU" and (counted := re.fullmatch(r"(\d+) ?x ?(\D.*)|(.*\S) ?x ?(\d+)", given)):
        number, name = counted[1] or counted[4], counted[2] or counted[3]
        guess = f"for an engine on {number} of them `{name}` with --tp {number}; "
    return CatalogueError(
        f"unknown {what} `{given}`\nknown: {', '.join(known)}\nhint: {guess}anything else can be given as {path}"
    )
