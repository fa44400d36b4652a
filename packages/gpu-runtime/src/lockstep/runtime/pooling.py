"""Pooling of a prompt's hidden states to one vector: the settings of a folder, and options that replace them.

Embedding models are folders of sentence-transformers. Its `modules.json` lists the steps in order, each with its own
folder:

    [{"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"},
     {"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
     {"idx": 2, "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}]

and `1_Pooling/config.json` names the mode, as `"pooling_mode_lasttoken": true` or as `"pooling_mode": "lasttoken"`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from lockstep.core.contract.errors import ConfigError

PoolingMode = Literal["mean", "last", "first"]
MODES: dict[str, PoolingMode] = {
    "mean": "mean",
    "mean_tokens": "mean",
    "lasttoken": "last",
    "cls_token": "first",
    "cls": "first",
}
"""Supported modes by their names in sentence-transformers."""

MODULES, CONFIG = "modules.json", "1_Pooling/config.json"
NOT_DONE_HINT = "hint: give `pooling` mean, last or first to override it"


class Pooling(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Pooling of kind embed: the `mean` over all positions of the prompt, or the state of the `last` or `first`."""

    mode: PoolingMode = "mean"
    normalize: bool = False  # scale to length 1


def choose_pooling(folder: Path, mode: str | None = None, normalize: bool | None = None) -> Pooling:
    """Return the given options, completed by the settings of the folder; by default the mean, not normalised.

    Raises: ConfigError for an unknown mode, and for a folder that requires an unsupported step.
    """
    if mode is not None and mode not in get_args(PoolingMode):
        raise ConfigError(f"`pooling` must be {' or '.join(get_args(PoolingMode))}, got `{mode}`")
    found = Pooling()
    if mode is None:
        found = _read(folder)
    elif normalize is None:
        found = Pooling(normalize="Normalize" in dict(_modules(folder)))
    chosen: Any = mode or found.mode
    return Pooling(chosen, found.normalize if normalize is None else normalize)


def _read(folder: Path) -> Pooling:
    modules = _modules(folder)
    unknown = [kind for kind, _ in modules if kind not in ("Transformer", "Pooling", "Normalize")]
    if unknown:
        raise ConfigError(
            f"{folder / MODULES} has a module `{unknown[0]}`, which is not supported here\n{NOT_DONE_HINT}"
        )
    paths = [folder / path / "config.json" for kind, path in modules if kind == "Pooling"]
    if not modules and (folder / CONFIG).is_file():
        paths = [folder / CONFIG]
    if not paths:
        return Pooling(normalize="Normalize" in dict(modules))
    file = paths[0]
    config = _json(file, dict)
    named = [str(config["pooling_mode"])] if config.get("pooling_mode") else []
    named += [name.removeprefix("pooling_mode_") for name, on in config.items() if on is True and "_mode_" in name]
    if len(named) != 1 or named[0] not in MODES:
        modes = " and ".join(named) or "no mode"
        raise ConfigError(f"{file} requires {modes}; supported is one of {', '.join(MODES)}\n{NOT_DONE_HINT}")
    return Pooling(MODES[named[0]], "Normalize" in dict(modules))


def _modules(folder: Path) -> list[tuple[str, str]]:
    """Return kind and folder of each module, in order; empty if the folder is not of sentence-transformers."""
    if not (folder / MODULES).is_file():
        return []
    found = []
    for one in _json(folder / MODULES, list):
        if not isinstance(one, dict) or not isinstance(one.get("type"), str) or not isinstance(one.get("path"), str):
            raise ConfigError(f"{folder / MODULES} must list modules with `type` and `path`, got `{one}`")
        path = Path(one["path"])
        if path.is_absolute() or ".." in path.parts:
            raise ConfigError(f"{folder / MODULES} names `{path}`, which is not in this folder")
        found.append((one["type"].rpartition(".")[2], one["path"]))
    return found


def _json(file: Path, kind: type) -> Any:
    try:
        data = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: {error}") from error
    if not isinstance(data, kind):
        raise ConfigError(f"{file} must hold a JSON {'object' if kind is dict else 'array'}, got {type(data).__name__}")
    return data
