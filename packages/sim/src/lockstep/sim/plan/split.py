"""How the engines of a configuration share the work of a request: all do both, or some prefill and others decode.

    mixed            all engines do both
    2:6              two prefill engines for every six decode engines, all of the configuration's `tp`
    1xtp8:2xtp4      each side with a `tp` of its own
    auto             mixed, and every way to share out the GPUs of --max-gpus

A split is of one replica: of `1:3` on 16 GPUs with tp 2 there are two, which is 2 prefill and 6 decode engines behind
the same two routers.
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
    tp: int | None = None  # None: the configuration's

    def __str__(self) -> str:
        return f"{self.engines}" if self.tp is None else f"{self.engines}xtp{self.tp}"


@dataclass(frozen=True)
class RoleSplit:
    """So many prefill engines for so many decode engines."""

    prefill: Side
    decode: Side

    def __str__(self) -> str:
        return f"{self.prefill}:{self.decode}"

    @property
    def sides(self) -> dict[str, Side]:
        """By role, in the order of a request's way."""
        return {"prefill": self.prefill, "decode": self.decode}

    @property
    def names_tp(self) -> bool:
        """Whether the configuration's own `tp` is that of neither side."""
        return None not in (self.prefill.tp, self.decode.tp)

    def gpus(self, tp: int, pp: int) -> int:
        """Of one replica."""
        return sum(side.engines * (tp if side.tp is None else side.tp) * pp for side in self.sides.values())

    def groups(self, gpu: str, replicas: int) -> tuple[EngineGroup, EngineGroup]:
        """The kinds of engines of so many replicas."""
        prefill, decode = (
            EngineGroup(count=side.engines * replicas, gpu=gpu, tp=side.tp, settings={"role": role})
            for role, side in self.sides.items()
        )
        return prefill, decode


def parse_split(text: str) -> RoleSplit | None:
    """Read `mixed` (None), `2:6` or `1xtp8:2xtp4`. Raises ConfigError."""
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
    """Every split of so many GPUs that leaves no room for one more engine, with prefill engines of this `tp`.

    Args:
        others: what the decode engines' tp may be.
    """
    for decode_tp in others:
        prefill_gpus, decode_gpus = tp * pp, decode_tp * pp
        for engines in range(1, (gpus - decode_gpus) // prefill_gpus + 1):
            left = gpus - engines * prefill_gpus
            split = RoleSplit(Side(engines, tp), Side(left // decode_gpus, decode_tp))
            if left % decode_gpus < prefill_gpus:
                yield split if decode_tp != tp else _plain(split)


def _plain(split: RoleSplit) -> RoleSplit:
    """Without the tp that is the configuration's."""
    return replace(split, prefill=split.prefill._replace(tp=None), decode=split.decode._replace(tp=None))
