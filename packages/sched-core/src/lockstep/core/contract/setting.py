"""Settings declared beside their fields: help texts of command lines and tables derive from these declarations.

class SchedConfig(msgspec.Struct):
    pages: Annotated[int, Setting("KV pages in the pool")] = 4096

setting_fields(SchedConfig)["pages"].setting.help
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

import msgspec


class Setting(NamedTuple):
    """Declaration of a setting. A field without one is no setting of a command line.

    Args:
        help: in one line, without the unit where the name of the field has it.
        default: in words, where the field's default does not show it, such as unset or None.
        policy: the router's policy that reads it; empty: it does not depend on one.
    """

    help: str
    default: str = ""
    policy: str = ""


class SettingField(NamedTuple):
    """A field of a struct.

    Args:
        type: as annotated, without the declaration.
        setting: None for a field without a declaration.
    """

    name: str
    type: Any
    default: Any
    setting: Setting | None


@cache
def setting_fields(struct: type[msgspec.Struct]) -> Mapping[str, SettingField]:
    """Return the fields of a struct by name, in their order."""
    hints, found = get_type_hints(struct, include_extras=True), {}
    for field in msgspec.structs.fields(struct):
        hint, setting = hints[field.name], None
        if get_origin(hint) is Annotated:
            hint, *notes = get_args(hint)
            setting = next((note for note in notes if isinstance(note, Setting)), None)
        found[field.name] = SettingField(field.name, hint, field.default, setting)
    return MappingProxyType(found)


def one_of(choices: tuple[str, ...]) -> str:
    """Return the choices as a message lists them: `a, b or c`."""
    return f"{', '.join(choices[:-1])} or {choices[-1]}"
