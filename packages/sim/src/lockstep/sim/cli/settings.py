"""Settings written as NAME=VALUE in one word, as `--engines` and `--search` have them: read as the options are."""

from __future__ import annotations

import difflib
from typing import Any

import click

from lockstep.core.contract.errors import ConfigError

ALIASES = {"policy": "schedule_policy"}


def setting_names() -> tuple[str, ...]:
    """The scheduler settings, by the names of SchedConfig."""
    from lockstep.sim.cli.simulate import SCHEDULER_OPTIONS

    return tuple(name for name, _, _ in SCHEDULER_OPTIONS)


def field_of(name: str, others: tuple[str, ...] = ()) -> str:
    """The name of a setting, spelt with - or _, with or without its unit. Raises ConfigError for an unknown one."""
    known = setting_names()
    key = name.strip().lower().replace("-", "_")
    key = ALIASES.get(key, key)
    if key in known or key in others:
        return key
    if f"{key}_us" in known:
        return f"{key}_us"
    names = (*others, *ALIASES, *known)
    close = difflib.get_close_matches(key, names, n=1)
    hint = f"did you mean `{close[0]}`? " if close else ""
    raise ConfigError(f"unknown setting `{name}`\nhint: {hint}settings are {', '.join(names)}")


def parse_tier(name: str, text: str) -> Any:
    """Read one setting of the tiers below the device. Raises ConfigError naming it, the text, and what was expected."""
    from lockstep.sim.cli.simulate import TIER_OPTIONS

    kind = next(kind for known, kind, _ in TIER_OPTIONS if known == name)
    try:
        return kind.convert(text, None, None)
    except click.BadParameter as error:
        raise ConfigError(f"`{name}` cannot be `{text}`: {error.message.removesuffix(f', got `{text}`')}") from None


def parse_setting(name: str, text: str) -> tuple[str, Any]:
    """Read one scheduler setting. Raises ConfigError naming it, the text, and what was expected."""
    from lockstep.sim.cli.simulate import NONE, SCHEDULER_OPTIONS

    field = field_of(name)
    kind = next(kind for known, kind, _ in SCHEDULER_OPTIONS if known == field)
    try:
        value = kind.convert(text, None, None)
    except click.BadParameter as error:
        raise ConfigError(f"`{name}` cannot be `{text}`: {error.message.removesuffix(f', got `{text}`')}") from None
    if field == "eos_token_ids":
        return field, (value,)
    return field, None if value is NONE else value
