"""Assignment of a workload's requests to LoRA adapters.

parse_adapters("0.8x40:zipf:1.2")        # 0.8 of the sessions on one of 40 adapters, number k with weight 1 / k**1.2
with_adapters(turns, spec, seed=7)       # the same turns; all turns of a session on one adapter
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from lockstep.core.contract.errors import ConfigError
from lockstep.sim.workload.arrivals import random_stream
from lockstep.sim.workload.turns import Turns

TENANTS = "tenants"  # each tenant on the adapter of its name
RECORDED = "recorded"  # as the requests of a journal
ADAPTERS_MAX = 100_000
EXAMPLE = "--adapters 0.8x40:zipf, or --adapters tenants; docs/workloads.md"
_SPEC = re.compile(r"(?:(?P<share>[0-9.eE-]+)x)?(?P<count>[0-9]+)(?::zipf(?::(?P<exponent>[0-9.]+))?)?")


class AdapterSpec(NamedTuple):
    """Assignment of sessions to adapters."""

    share: float = 1.0  # of the sessions; the others run on the base model
    adapters: int = 0  # number of adapters; 0: each tenant has its own
    exponent: float = 0.0  # adapter k (from 1) is chosen with weight 1 / k**exponent
    recorded: bool = False  # adapters are those of the recorded workload


def parse_adapters(text: str) -> AdapterSpec:
    """Parse `[SHAREx]COUNT[:zipf[:EXPONENT]]`, `tenants`, or `recorded`. Raises ConfigError."""
    if text in (TENANTS, RECORDED):
        return AdapterSpec(recorded=text == RECORDED)

    def refuse(problem: str) -> ConfigError:
        return ConfigError(f"`adapters` cannot be `{text}`: {problem}\nhint: such as {EXAMPLE}")

    found = _SPEC.fullmatch(text)
    if found is None:
        raise refuse("expected [SHAREx]COUNT[:zipf[:EXPONENT]], tenants, or recorded")
    try:
        share, count = float(found["share"] or 1.0), int(found["count"])
        exponent = float(found["exponent"] or 1.0) if ":zipf" in text else 0.0
    except ValueError as error:
        raise refuse(str(error)) from None
    if not 0.0 < share <= 1.0:
        raise refuse("the share of sessions is above 0 and at most 1")
    if not 1 <= count <= ADAPTERS_MAX:
        raise refuse(f"there are 1 to {ADAPTERS_MAX:,} adapters")
    if not 0.0 <= exponent <= 10.0:
        raise refuse("the exponent is at most 10")
    return AdapterSpec(share, count, exponent)


def with_adapters(turns: Turns, spec: AdapterSpec, *, seed: int) -> Turns:
    """Return the same turns, each on the adapter of its session. The choice does not depend on lengths of turns."""
    if spec.recorded:
        if turns.adapter is None:
            raise ConfigError(
                f"`adapters` is {RECORDED}, but no request of this workload has a recorded adapter\n"
                "hint: --adapters 40:zipf draws them"
            )
        return turns
    if not spec.adapters:
        if not any(turns.tenants):
            raise ConfigError(
                f"`adapters` is {TENANTS}, but no request of this workload has a tenant\n"
                "hint: --adapters 40:zipf draws them"
            )
        return replace(turns, adapter=turns.tenant, adapters=turns.tenants)
    root = turns.root()
    has = random_stream(seed, "adapters/share").random_sample(len(turns)) < spec.share
    # Python's power is the same on all processors; numpy's may differ in the last digit, which would change the draws.
    weights = np.cumsum(
        np.fromiter((k**-spec.exponent for k in range(1, spec.adapters + 1)), np.float64, spec.adapters)
    )
    draws = random_stream(seed, "adapters/which").random_sample(len(turns)) * weights[-1]
    drawn = np.where(has, np.searchsorted(weights, draws, side="right") + 1, 0)[root]
    used, codes = np.unique(np.append(drawn, 0), return_inverse=True)  # 0, the base model, is the first name
    names = tuple(f"adapter{number}" if number else "" for number in used.tolist())
    return replace(turns, adapter=codes[:-1].astype(np.int32), adapters=names)


def adapters_in(turns: Turns) -> tuple[str, ...]:
    """Return the names of the adapters in use."""
    if turns.adapter is None:
        return ()
    return tuple(sorted({turns.adapters[code] for code in np.unique(turns.adapter).tolist()} - {""}))


def describe_adapters(turns: Turns) -> str:
    """Return a sentence for the notes of a workload."""
    assert turns.adapter is not None
    counts = np.bincount(turns.adapter, minlength=len(turns.adapters))
    on = {name: int(count) for name, count in zip(turns.adapters, counts.tolist(), strict=True) if name and count}
    most = max(on.values(), default=0)
    return (
        f"{sum(on.values()):,} of {len(turns):,} requests run on {len(on):,} different adapters, "
        f"the most popular of which has {most:,}"
    )
