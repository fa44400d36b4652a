"""The text form of `--admission`, `open=64,waiting=1000,order=priority,share.team-a=2`; see docs/routing.md."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from lockstep.core.cluster.dispatch import WAITING_MAX, DispatchConfig
from lockstep.core.contract.errors import ConfigError

COUNTS = {"open": "open_max", "waiting": "waiting_max"}
SHARE = "share."
WORDS = {
    "`tenant_weights`: that of `": f"`{SHARE}",
    **{f"`{field}`": f"`{word}`" for word, field in COUNTS.items()},
}
"""Field names in errors of DispatchConfig, and the words of `--admission` that replace them."""

EXAMPLE = "open=64,waiting=1000,order=priority,share.TENANT=2"


def parse_admission(text: str) -> DispatchConfig:
    """Read `open=64,waiting=1000,order=priority,share.TENANT=2`. Raises ConfigError."""
    settings: dict[str, Any] = {}
    weights: dict[str, float] = {}
    for name, value in pairs("admission", text):
        try:
            if name in COUNTS:
                settings[COUNTS[name]] = int(value)
            elif name == "order":
                settings[name] = value
            elif name.startswith(SHARE):
                weights[name.removeprefix(SHARE)] = float(value)
            else:
                raise ConfigError(f"`admission` has `{name}={value}`, expected open, waiting, order or share.TENANT")
        except ValueError as error:
            raise ConfigError(f"`admission`: `{name}` cannot be `{value}`: {error}") from error
    if "open_max" not in settings:
        raise ConfigError(f"`admission` has no limit, got `{text}`\nhint: open=64, requests open per engine")
    try:
        return DispatchConfig(**settings, tenant_weights=weights)
    except ConfigError as error:
        message = str(error)
        for field, word in WORDS.items():
            message = message.replace(field, word)
        raise ConfigError(f"`admission`: {message}\nhint: such as {EXAMPLE}") from error


def admission_word(config: DispatchConfig) -> str:
    """Return the text that `parse_admission` reads as this config."""
    words = [f"open={config.open_max}"]
    words += [f"waiting={config.waiting_max}"] if config.waiting_max != WAITING_MAX else []
    words += [] if isinstance(config.order, msgspec.UnsetType) else [f"order={config.order}"]
    for tenant, weight in config.tenant_weights.items():
        short = f"{weight:g}"
        words.append(f"{SHARE}{tenant}={short if float(short) == weight else repr(weight)}")
    return ",".join(words)


def pairs(option: str, text: str) -> Iterator[tuple[str, str]]:
    """Yield the (name, value) pairs of NAME=VALUE texts separated by commas. Raises ConfigError for a repeated name."""
    seen: set[str] = set()
    for item in text.split(","):
        name, equals, value = item.strip().partition("=")
        if not equals or not value or name in seen:
            problem = "twice" if equals and value else "without a value"
            raise ConfigError(f"`{option}` has `{item.strip()}` {problem}\nhint: write NAME=VALUE once for each")
        seen.add(name)
        yield name, value
