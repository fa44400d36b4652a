"""How the GPUs of an engine share a model, by options of a command line: what goes together.

The options are `tp`, `pp` (pipeline stages), `ep` and `moe_a2a` (experts), as in the simulator.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from lockstep.core.contract.config import PP_SIZE_MAX, STAGES_ONLY
from lockstep.core.contract.errors import ConfigError
from lockstep.host.engine_options import GraphMode


class Layout(Protocol):
    """Options of an engine with a model."""

    @property
    def tp(self) -> int: ...
    @property
    def pp(self) -> int: ...
    @property
    def ray(self) -> str | None: ...
    @property
    def ep(self) -> int: ...
    @property
    def moe_a2a(self) -> bool: ...
    @property
    def swa_full_tokens_ratio(self) -> float | None: ...
    @property
    def cuda_graphs(self) -> GraphMode: ...
    @property
    def draft_model(self) -> str | None: ...


NOT_IN_STAGES = {"swa_full_tokens_ratio": None, "draft_model": None}
"""Options that stages do not follow yet, with the values that leave them out."""


def check_layout(given: Layout, sched: Mapping[str, Any], tps: Sequence[int] = ()) -> None:
    """Raise ConfigError for options that do not go together.

    Args:
        tps: `tp` of all engines of a server; empty: of one engine, `tp`.
    """
    _check_stages(given, sched)
    if given.ray is not None and given.pp == 1:
        raise ConfigError(
            f"`ray` is {given.ray}, but the engine has one stage, which is on this machine\nhint: give --pp N"
        )
    if given.ray == "":
        raise ConfigError("`ray` is empty\nhint: auto, or HOST:PORT")
    for tp in tps or (given.tp,):
        if given.ep not in (1, tp):
            raise ConfigError(
                f"`ep` must be 1 (each expert split over the ranks) or `tp` {tp} (whole experts on each), "
                f"got `{given.ep}`"
            )
    if given.moe_a2a and given.ep == 1:
        raise ConfigError(
            "`moe_a2a` sends tokens to the ranks of their experts, but `ep` is 1: every rank has a part of each\n"
            "hint: --ep N with --tp N, or leave out --moe-a2a"
        )


def _check_stages(given: Layout, sched: Mapping[str, Any]) -> None:
    """Raise ConfigError for options that stages do not follow, and for settings of stages without stages."""
    if not 1 <= given.pp <= PP_SIZE_MAX:
        raise ConfigError(f"`pp` must be 1 to {PP_SIZE_MAX}, got `{given.pp}`")
    if given.pp == 1:
        for name in STAGES_ONLY:
            if name in sched and (name, sched[name]) != ("pp_size", 1):
                raise ConfigError(
                    f"`{name}` is of pipeline stages, and the engine has one\nhint: give --pp N, or drop it"
                )
        return
    for name, unset in NOT_IN_STAGES.items():
        if (value := getattr(given, name)) != unset:
            raise ConfigError(
                f"`{name}` is {value}, but `pp` is {given.pp}: pipeline stages do not have that yet\n"
                "hint: drop one of the two"
            )
    if given.cuda_graphs in ("on", "eager"):
        raise ConfigError(
            f"`cuda_graphs` is {given.cuda_graphs}, but `pp` is {given.pp}: graphs do not read what other stages send\n"
            "hint: auto, or off"
        )
    if (steps := sched.get("decode_steps_per_launch", 1)) != 1:
        raise ConfigError(
            f"`decode_steps_per_launch` is {steps}, but `pp` is {given.pp}: the steps of one launch would keep all "
            "stages but one idle\nhint: drop one of the two"
        )
