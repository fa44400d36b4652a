"""Reads the JSON of a model's folder field by field. Problems are collected, and raised together."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch

from lockstep.core.contract.errors import ConfigError

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
COUNT_MAX = 2**31 - 1


class ConfigReader:
    """Fields of one object. A field that is absent or null has its default; without a default it is a problem.

    Args:
        where: the file, for messages.
        inside: name of the field that holds the object; empty for the file itself.
        problems: list to which problems are added; objects inside this one share it.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        where: str = "config.json",
        *,
        inside: str = "",
        problems: list[str] | None = None,
    ) -> None:
        self.config, self.where, self.inside = config, where, inside
        self.problems: list[str] = [] if problems is None else problems

    def called(self, name: str) -> str:
        """Return a field's name in a message."""
        return f"`{self.inside}.{name}`" if self.inside else f"`{name}`"

    def has(self, name: str) -> bool:
        """Return whether a field has a value."""
        return self.config.get(name) is not None

    def wrong(self, name: str, must: str) -> None:
        """Add the problem that a field must have another value."""
        self.problems.append(f"{self.called(name)} must be {must}, got {_shown(self.config.get(name))}")

    def count(self, name: str, default: int | None = None, *, also: str = "") -> int:
        """Return a positive whole number; `also` is an alternative name of the field. Returns 1 if it is invalid."""
        name = name if self.has(name) or not self.has(also) else also
        value = self.config.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= COUNT_MAX:
            self.wrong(name, "a positive whole number")
            return 1
        return value

    def number(self, name: str, default: float | None = None, *, least: float | None = None) -> float:
        """Return a positive number, or one of at least `least`. Returns the default, or 1, if it is invalid."""
        value = self.config.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, int | float) and not isinstance(value, bool) and value <= sys.float_info.max:
            if value > 0 if least is None else value >= least:
                return float(value)
        self.wrong(name, "a positive number" if least is None else f"a number of at least {least:g}")
        return 1.0 if default is None else default

    def number_or_none(self, name: str, *, least: float | None = None) -> float | None:
        """Return the result of `number`, or None if the field is absent."""
        return self.number(name, least=least) if self.has(name) else None

    def flag(self, name: str, default: bool = False) -> bool:
        """Return true or false."""
        value = self.config.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.wrong(name, "true or false")
            return default
        return value

    def texts(self, name: str) -> list[str]:
        """Return a list of texts; empty if it is absent or invalid."""
        value = self.config.get(name)
        if value is None:
            return []
        if not isinstance(value, list | tuple) or not all(isinstance(one, str) for one in value):
            self.wrong(name, "a list of texts")
            return []
        return list(value)

    def numbers_from_0(self, name: str) -> list[int]:
        """Return a list of whole numbers, none below 0; empty if it is absent or invalid."""
        value = self.config.get(name)
        if value is None:
            return []
        if not isinstance(value, list | tuple) or not all(_whole(one) and one >= 0 for one in value):
            self.wrong(name, "a list of whole numbers from 0 on")
            return []
        return list(value)

    def only(self, name: str, *allowed: object) -> None:
        """Check a setting that supports only the values `allowed`; an absent setting means the first."""
        if self.config.get(name, allowed[0]) not in allowed:
            self.wrong(name, " or ".join(_shown(one) for one in allowed))

    def dtype(self) -> torch.dtype:
        """Return `dtype`, called `torch_dtype` in older folders; float32 if neither is given."""
        name = "dtype" if self.config.get("dtype") or not self.config.get("torch_dtype") else "torch_dtype"
        value = self.config.get(name) or "float32"
        if not isinstance(value, str) or value not in DTYPES:
            self.wrong(name, ", ".join(DTYPES))
            return torch.float32
        return DTYPES[value]

    def end_tokens(self) -> tuple[int, ...]:
        """Return `eos_token_id`, one or several. They are not compared with the vocabulary."""
        value = self.config.get("eos_token_id")
        values = list(value) if isinstance(value, list | tuple) else [] if value is None else [value]
        if not all(_whole(one) for one in values):
            self.wrong("eos_token_id", "token ids")
            return ()
        return tuple(values)

    def check(self) -> None:
        """Raise ConfigError with all problems."""
        if self.problems:
            raise ConfigError("\n  ".join([f"{self.where} describes a model that cannot be served:", *self.problems]))


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    """Return a value approximately as in JSON."""
    if value is None:
        return "`null`"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"
