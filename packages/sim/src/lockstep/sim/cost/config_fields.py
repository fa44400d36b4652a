"""Typed access to the fields of a config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.sim.cost.errors import CatalogueError


@dataclass(frozen=True, slots=True)
class ConfigFields:
    """Typed access to a config. Every error names the file, the field and the value."""

    where: str
    data: Mapping[str, Any]

    def complain(self, field: str, wanted: str) -> CatalogueError:
        value = self.data.get(field, "nothing")
        return CatalogueError(f"{self.where}: `{field}` must be {wanted}, got `{value}`")

    def whole(self, field: str, default: int | None = None, least: int = 1) -> int:
        value = self.data.get(field)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.complain(field, f"a whole number of at least {least}")
        return value

    def flag(self, field: str, default: bool) -> bool:
        value = self.data.get(field)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.complain(field, "true or false")
        return value

    def any_flag(self, *fields: str) -> bool:
        return any(self.flag(field, False) for field in fields)

    def table(self, field: str) -> Mapping[str, Any]:
        value = self.data.get(field)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.complain(field, "an object")
        return value
