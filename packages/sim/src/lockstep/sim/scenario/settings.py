"""Command-line forms of the scheduler's settings, and of memory beside and below the pages.

Each setting is an option of its own, or NAME=VALUE within one word, as in `--engines` and `--search`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from functools import cache
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

import click
import msgspec

from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.errors import ConfigError
from lockstep.core.contract.profiles import DEFAULT_PROFILE, PROFILES, profile_settings
from lockstep.core.contract.setting import Setting, SettingField, setting_fields
from lockstep.host.options import OptionField, option_of, options_of, with_flags
from lockstep.sim.scenario.tier_options import HostTiers, HybridShares
from lockstep.sim.scenario.values import KINDS, NONE, DurationType, OrWord, ParamType


def _kind_of(field: SettingField) -> ParamType:
    """The kind of value of a setting on a command line, from its type and, for times, the end of its name."""
    types = get_args(field.type) if get_origin(field.type) in (Union, UnionType) else (field.type,)
    first = types[0]
    if get_origin(first) is tuple:
        first = get_args(first)[0]
    kind = DurationType() if field.name.endswith("_us") else PLAIN_KINDS.get(first, click.STRING)
    return OrWord(kind, none=NONE) if NoneType in types else kind


def _help_of(field: SettingField, setting: Setting) -> str:
    """The help text of a setting with its default without --profile and --engine, and those of other profiles."""
    shown = setting.default
    if not shown and field.default not in (None, (), "", msgspec.UNSET):
        shown = _value_text(field.default)
    by_profile = {
        name: _value_text(settings[field.name]) if field.name in settings else shown
        for name, settings in PROFILES.items()
    }
    usual = by_profile.pop(DEFAULT_PROFILE)
    others = [f"{name}: {text or 'unset'}" for name, text in by_profile.items() if text != usual]
    words = "; ".join([usual or "unset", *others] if others else [usual] if usual else [])
    return f"{setting.help}  [default: {words}]" if words else setting.help


def _value_text(value: Any) -> str:
    return str(value).lower()


PLAIN_KINDS: dict[type, ParamType] = {bool: click.BOOL, int: click.INT, float: click.FLOAT}
SCHEDULER_OPTIONS: tuple[tuple[str, ParamType, str], ...] = tuple(
    (field.name, _kind_of(field), _help_of(field, field.setting))
    for field in setting_fields(SchedConfig).values()
    if field.setting is not None
)
"""The declared fields of SchedConfig, in its order: name, kind of value, help. SchedConfig checks values."""


def flag_of_setting(field: str) -> str:
    """Return the flag of a scheduler setting. `--eos-token-id` is singular, since it is repeated for each token."""
    return option_of(field).removesuffix("s") if field == "eos_token_ids" else option_of(field)


def scheduler_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add one option per scheduler setting to a command. Absent options arrive as None or ()."""
    for field, kind, text in reversed(SCHEDULER_OPTIONS):
        flag = flag_of_setting(field)
        if kind is click.BOOL:
            option = click.option(f"{flag}/--no-{flag[2:]}", field, default=None, help=text)
        elif field == "eos_token_ids":
            option = click.option(flag, field, type=kind, multiple=True, help=text)
        else:
            option = click.option(flag, field, type=kind, default=None, help=text)
        command = option(command)
    return command


def given_settings(options: dict[str, Any]) -> dict[str, Any]:
    """Remove the scheduler settings from a command's options, and return those that were given."""
    values = {field: options.pop(field) for field, _, _ in SCHEDULER_OPTIONS}
    return {
        field: None if value is NONE else value for field, value in values.items() if value is not None and value != ()
    }


def unusual_settings(config: SchedConfig, profile: str) -> dict[str, bool | int | float | str]:
    """Return the settings of an engine that its profile does not have, as far as they are options of `simulate`."""
    usual = type(config)(**profile_settings(profile))
    return {
        name: value
        for name, _, _ in SCHEDULER_OPTIONS
        if (value := getattr(config, name)) != getattr(usual, name) and isinstance(value, bool | int | float | str)
    }


@cache
def tier_fields() -> Mapping[str, OptionField]:
    """Return the options of memory below the device, then those of pools beside full attention, by name."""
    return {**options_of(HostTiers), **options_of(HybridShares)}


def tier_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of memory beside and below the pages to a command. Given options arrive together, in `tiers`.

    They are stored in the context as well, because a stored command line is parsed without running the command.
    """

    def collect(context: click.Context, option: click.Parameter, value: Any) -> None:
        given = {**context.params.get("tiers", {}), **({} if value is None else {option.name: value})}
        context.params["tiers"] = {name: given[name] for name in tier_fields() if name in given}

    def option(*declared: str, **arguments: Any) -> Any:
        return click.option(*declared, expose_value=False, callback=collect, **arguments)

    decorated: Callable[..., Any] = with_flags(option, tier_fields().values(), keep_absent=True, kinds=KINDS)(command)
    return decorated


ALIASES = {"policy": "schedule_policy"}


def setting_names() -> tuple[str, ...]:
    """Return the names of the scheduler settings, as in SchedConfig."""
    return tuple(name for name, _, _ in SCHEDULER_OPTIONS)


def field_of(name: str, others: tuple[str, ...] = ()) -> str:
    """Return the full name of a setting, spelt with - or _, with or without its unit. Raises ConfigError if unknown."""
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
    """Parse one setting of the tiers below the device. Raises ConfigError with name, text and what was expected."""
    kind = click.types.convert_type(KINDS["_us"] if name.endswith("_us") else tier_fields()[name].kind)
    try:
        return kind.convert(text, None, None)
    except click.BadParameter as error:
        raise ConfigError(f"`{name}` cannot be `{text}`: {error.message.removesuffix(f', got `{text}`')}") from None


def parse_setting(name: str, text: str) -> tuple[str, Any]:
    """Parse one scheduler setting. Raises ConfigError with the name, the text and what was expected."""
    field = field_of(name)
    kind = next(kind for known, kind, _ in SCHEDULER_OPTIONS if known == field)
    try:
        value = kind.convert(text, None, None)
    except click.BadParameter as error:
        raise ConfigError(f"`{name}` cannot be `{text}`: {error.message.removesuffix(f', got `{text}`')}") from None
    if field == "eos_token_ids":
        return field, (value,)
    return field, None if value is NONE else value
