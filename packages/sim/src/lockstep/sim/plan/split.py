"""The split of requests between engines of a configuration: all prefill and decode, or each engine does one of both.

    mixed            all engines do both
    2:6              two prefill engines for every six decode engines, all with the configuration's `tp`
    1xtp8:2xtp4      each side with its own `tp`
    auto             mixed, and every way to divide the GPUs of --max-gpus

A split describes one replica. For example `1:3` with tp 2 fits twice on 16 GPUs, so 2 prefill and 6 decode engines are
behind the same two routers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from lockstep.core.contract.errors import ConfigError
from lockstep.sim.cluster.scenario import EngineGroup
from lockstep.sim.cluster.setup import REPLICAS_MAX

MIXED = "mixed"
AUTO = "auto"
PREFILL_DECODE = "prefill_decode"
SIDE = re.compile(r"([0-9]+)(?:xtp([0-9]+))?")


class Side(NamedTuple):
    """Engines with one role."""

    engines: int
    tp: int | None = None  # None: the tp of the configuration

    def __str__(self) -> str:
        return f"{self.engines}" if self.tp is None else f"{self.engines}xtp{self.tp}"


@dataclass(frozen=True)
class RoleSplit:
    """A number of prefill engines and of decode engines, in one replica."""

    prefill: Side
    decode: Side

    def __str__(self) -> str:
        return f"{self.prefill}:{self.decode}"

    @property
    def sides(self) -> dict[str, Side]:
        """The sides by role, in the order in which a request visits them."""
        return {"prefill": self.prefill, "decode": self.decode}

    @property
    def names_tp(self) -> bool:
        """Whether both sides have their own `tp`, so that the configuration's `tp` has no effect."""
        return None not in (self.prefill.tp, self.decode.tp)

    def gpus(self, tp: int, pp: int) -> int:
        """Return the number of GPUs of one replica."""
        return sum(side.engines * (tp if side.tp is None else side.tp) * pp for side in self.sides.values())

    def groups(self, gpu: str, replicas: int) -> tuple[EngineGroup, EngineGroup]:
        """Return the two groups of engines for this number of replicas."""
        prefill, decode = (
            EngineGroup(count=side.engines * replicas, gpu=gpu, tp=side.tp, settings={"role": role})
            for role, side in self.sides.items()
        )
        return prefill, decode


def parse_split(text: str) -> RoleSplit | None:
    """Parse `mixed` (None), `2:6` or `1xtp8:2xtp4`. Raises ConfigError."""
    if text == MIXED:
        return None
    matches = [SIDE.fullmatch(side) for side in text.split(":")]
    if len(matches) != 2 or None in matches:
        raise ConfigError(
            f"`{PREFILL_DECODE}` cannot be `{text}`: expected {MIXED}, {AUTO}, or PREFILL:DECODE\n"
            "hint: 2:6 is two prefill engines for six decode engines; 1xtp8:2xtp4 gives each side its own tp"
        )
    sides = [Side(int(match[1]), None if match[2] is None else int(match[2])) for match in matches if match]
    for side in sides:
        if not 1 <= side.engines <= REPLICAS_MAX or side.tp == 0:
            raise ConfigError(
                f"`{PREFILL_DECODE}` cannot be `{text}`: each side has from 1 to {REPLICAS_MAX} engines, "
                "of a tp of at least 1"
            )
    return RoleSplit(*sides)


def all_splits(gpus: int, tp: int, others: Sequence[int], pp: int) -> Iterator[RoleSplit]:
    """Yield every split of this number of GPUs that leaves no room for another engine.

    Args:
        tp: tp of the prefill engines.
        others: possible tp of the decode engines.
    """
    for decode_tp in others:
        prefill_gpus, decode_gpus = tp * pp, decode_tp * pp
        for engines in range(1, (gpus - decode_gpus) // prefill_gpus + 1):
            left = gpus - engines * prefill_gpus
            split = RoleSplit(Side(engines, tp), Side(left // decode_gpus, decode_tp))
            if left % decode_gpus < prefill_gpus:
                yield split if decode_tp != tp else _plain(split)


def _plain(split: RoleSplit) -> RoleSplit:
    """Return the split without a tp that equals the configuration's."""
    return replace(split, prefill=split.prefill._replace(tp=None), decode=split.decode._replace(tp=None))
