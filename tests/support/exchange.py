"""What data-parallel ranks do together, for tests: rounds of proposals, and passes that end for all or for none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from lockstep.core.contract.commands import Command, LaunchBatch, ProposeBatch, Ranks, Step
from lockstep.core.contract.events import Observed, RanksAgreed
from lockstep.core.features.data_parallel import Rounds
from lockstep.core.requests.batching import InFlight
from tests.support.tagged_kv import TaggedKv


def seen_by_device(kv: TaggedKv, rounds: Rounds, known: InFlight | None, event: Observed, step: Step) -> Step:
    """Return the Step as a rank's tagged device must receive it.

    The device receives a plan when it is proposed, since requests that leave from then on leave a plan in flight. It
    samples nothing before all ranks have agreed. `known` is the proposed plan that it has received.
    """
    held = rounds.held
    if not isinstance(event, RanksAgreed) and held is None:
        return step
    own: list[Command] = []
    for one in step.commands:
        if not isinstance(one, LaunchBatch) or one.plan.mode == "idle":
            own.append(one)
        else:
            kv.agreed(one.plan, deferred=one.sample == "deferred")
    if held is not None and held is not known:
        own.append(LaunchBatch(held.plan, "deferred"))
    return msgspec.structs.replace(step, commands=own)


class Exchange:
    """The ranks of one engine of a fleet."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = list(names)
        self.on_device: dict[str, InFlight | None] = dict.fromkeys(names)  # proposed, and on the tagged stream already
        self.digests: dict[tuple[int, int], bytes] = {}  # by generation and round: what all have decided by then
        self.generation = -1
        self.restart()

    def restart(self) -> None:
        """All begin again. Earlier agreements may still arrive, but do not here."""
        self.generation += 1
        self.round = 0
        self.proposals: dict[str, ProposeBatch] = {}
        self.agreed: dict[str, list[RanksAgreed]] = {name: [] for name in self.names}  # not heard yet
        self.launched: dict[str, list[Ranks]] = {name: [] for name in self.names}
        self.delivered: dict[str, int] = dict.fromkeys(self.names, 0)
        self.on_device = dict.fromkeys(self.names)

    def proposed(self, name: str, command: ProposeBatch, now_us: int) -> None:
        """Record the proposal of a rank; after the last one all ranks have agreed."""
        assert command.round == self.round, f"L11: {name} proposes {command.round}, all are at {self.round}"
        assert name not in self.proposals, f"{name} proposes round {self.round} twice"
        self.proposals[name] = command
        if len(self.proposals) < len(self.names):
            return
        said = [self.proposals[other] for other in self.names]
        counts = tuple(one.counts for one in said)
        wishes = tuple(one.wish for one in said if one.wish is not None)
        self.round, self.proposals = self.round + 1, {}
        for other in self.names:
            self.agreed[other].append(RanksAgreed(now_us, command.round, counts, wishes, self.generation))

    def began(self, name: str, ranks: Ranks | None) -> None:
        """A rank launched its part of a pass."""
        assert ranks is not None, "S29: a batch without an agreement"
        number = len(self.launched[name])
        self.launched[name].append(ranks)
        others = [mine[number] for mine in self.launched.values() if len(mine) > number]
        assert all(other == ranks for other in others), f"S28: {name} runs {ranks}, others {others}"

    def may_end(self, name: str) -> bool:
        """Whether every rank has launched the oldest pass that this one has not noticed the end of."""
        return all(len(mine) > self.delivered[name] for mine in self.launched.values())

    def alike(self, event: RanksAgreed, rounds: Rounds) -> None:
        """S28: check that all ranks have made equal decisions by the end of a round."""
        key: Any = (event.generation, event.round)
        assert self.digests.setdefault(key, rounds.digest) == rounds.digest, f"S28: digests differ in round {key}"
