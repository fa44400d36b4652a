"""The experts of a simulated engine: how many tokens each gets, on which rank it is, and the time to move it.

The popularity of experts is drawn from the distribution of `cost/experts.py`. What is routed is drawn by it when the
engine orders a measurement. With a placement (`--eplb`) the traffic begins with the load of an interval before the run,
by which the engine places the experts before its first batch. In each later interval a share `drift` of the experts has
another popularity. After every move, and with every change of popularity, batches take the time of the new imbalance.

    device   | batch 999 | move of 4 layers | batch 1000 ...     the time of the rank that fetches the most experts
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from lockstep.core.cluster.expert_placement import fetched, unbalanced
from lockstep.core.contract.commands import MeasureExpertLoad, MoveExperts
from lockstep.core.contract.events import ExpertLoadMeasured, ExpertsMoved
from lockstep.core.contract.expert_placing import ExpertPlacing
from lockstep.sim.cost import CostModel
from lockstep.sim.cost.expert_balance import SEED, Spread, drawn_popularity, measured_spread
from lockstep.sim.host.device import Device
from lockstep.sim.host.ports import NEVER_US

BEFORE_TOKENS = 1_000_000  # tokens of the interval before the run


class ExpertTraffic:
    """The experts of one engine.

    Args:
        layers, experts, per_token: of the model; cv: variation of the popularity of experts.
        drift: share of the experts whose popularity is drawn again after every interval of the placement.
        placing: None: the experts stay where they are.
        fetch_us: time in which a rank fetches this many experts of one layer.
        cost_of: the cost model of an imbalance.
    """

    def __init__(
        self,
        layers: int,
        experts: int,
        per_token: int,
        *,
        cv: float,
        drift: float = 0.0,
        placing: ExpertPlacing | None = None,
        fetch_us: Callable[[int], float] = float,
        cost_of: Callable[[Spread], CostModel] | None = None,
    ) -> None:
        self._random = np.random.Generator(np.random.Philox(SEED))
        self._shape, self._per_token, self._cv, self._drift = (layers, experts), per_token, cv, drift
        self._placing, self._fetch_us, self._cost_of = placing, fetch_us, cost_of
        self.popularity = drawn_popularity(self._random, self._shape, cv)
        self._placement = np.zeros((0, 0), np.int32)
        if placing is not None:
            self._placement = unbalanced(experts, slots=placing.slots, gpus=placing.ranks, layers=layers)
        self._tokens = 0  # routed since the last measurement
        self._batches = 0  # since the popularity changed
        self._begun = False  # whether a batch was launched
        self._orders: deque[MeasureExpertLoad | MoveExperts] = deque()
        self._answers: deque[ExpertLoadMeasured | ExpertsMoved] = deque()

    def before(self) -> ExpertLoadMeasured | None:
        """Return the load of the interval before the run; None: the experts stay where they are."""
        if self._placing is None:
            return None
        counts = np.rint(self._shares() * (BEFORE_TOKENS * self._per_token)).astype(np.int64)
        return ExpertLoadMeasured(0, self._shape[0], counts.tobytes())

    def begin(self, device: Device) -> None:
        """Change the popularity from that before the run, once the experts are placed."""
        self._change_popularity(device)

    def _shares(self) -> NDArray[np.float64]:
        """Return the share of each expert in the tokens of its layer, [layers, experts]."""
        shares: NDArray[np.float64] = self.popularity / self.popularity.sum(1, keepdims=True)
        return shares

    # mechanism: expert-load (simulated)
    def routed(self, tokens: int, device: Device) -> None:
        """Count a launched batch."""
        self._tokens += tokens
        self._batches += 1
        self._begun = True
        if self._placing is not None and self._batches > self._placing.interval:
            self._change_popularity(device)

    def _change_popularity(self, device: Device) -> None:
        self._batches = 0
        if self._drift:
            again = drawn_popularity(self._random, self._shape, self._cv)
            self.popularity = np.where(self._random.random(self._shape) < self._drift, again, self.popularity)
        self._use_cost(device)

    def _use_cost(self, device: Device) -> None:
        """Let batches launched from now on take the time of the present imbalance."""
        if self._placing is not None and self._cost_of is not None:
            device.cost = self._cost_of(measured_spread(self.popularity, self._placement, self._placing.ranks))

    # --------------------------------------------------------------------------------------------------- for the host

    def order(self, command: MeasureExpertLoad | MoveExperts) -> None:
        """Take an order. It is carried out behind the batches launched up to its answer's first query."""
        self._orders.append(command)

    def due_us(self, now_us: int, device: Device) -> int:
        """Return when the next answer is due; NEVER_US: none is."""
        while self._orders:
            self._carry_out(self._orders.popleft(), now_us, device)
        return self._answers[0].time_us if self._answers else NEVER_US

    def take(self, now_us: int) -> ExpertLoadMeasured | ExpertsMoved:
        """Return the next answer, noticed at `now_us`."""
        answer = self._answers.popleft()
        if isinstance(answer, ExpertsMoved):
            return ExpertsMoved(now_us, answer.move_id, generation=answer.generation)
        return ExpertLoadMeasured(now_us, answer.layers, answer.counts)

    # mechanism: expert-moves (simulated)
    def _carry_out(self, command: MeasureExpertLoad | MoveExperts, now_us: int, device: Device) -> None:
        free_us = max(device.free_us, now_us)
        if isinstance(command, MeasureExpertLoad):
            counts = self._random.multinomial(self._tokens * self._per_token, self._shares()).astype(np.int64)
            self._tokens = 0
            self._answers.append(ExpertLoadMeasured(free_us, len(counts), counts.tobytes()))
            return
        assert self._placing is not None
        layers = list(command.layers)
        most = fetched(self._placement[layers], command.placement, self._placing.ranks).sum(0).max()
        self._placement = self._placement.copy()
        self._placement[layers] = command.placement
        if self._begun:  # weights are loaded to their places before the first batch
            free_us += round(self._fetch_us(int(most)))
            device.hold_until(free_us)
        self._use_cost(device)
        self._answers.append(ExpertsMoved(free_us, command.move_id, generation=command.generation))
