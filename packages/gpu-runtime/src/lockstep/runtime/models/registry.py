"""The functions that build models, by architecture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lockstep.runtime.models.language_model import LanguageModel
from lockstep.runtime.models.layers import Maker

Builder = Callable[[Mapping[str, Any], Maker], LanguageModel]

BUILDERS: dict[str, Builder] = {}  # by `architectures[0]` of config.json


def architecture(name: str) -> Callable[[Builder], Builder]:
    """Register the builder of the architecture of this name. It returns a model with empty weights."""

    def register(builder: Builder) -> Builder:
        if name in BUILDERS:
            raise ValueError(f"{name} is built by {BUILDERS[name].__name__} already")
        BUILDERS[name] = builder
        return builder

    return register
