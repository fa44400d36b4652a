"""A measured run, replayed by the simulator: its arrivals, lengths and prompts on a setup, with any calibration.

    server = ReplayedServer.of(scenario, turns_of_run(run))
    replay = server.play(run, calibration)            # times of each request
    replay = server.play(run, calibration, rows=60)   # the first 60 requests, and what they wait for

An open loop is replayed by its measured times of sending. A closed loop starts its next request when an answer ends, at
the simulated time, because measured times would give away how fast the server was.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from simpy import Environment, Event

from lockstep.core.contract.commands import Step
from lockstep.core.contract.events import ObservedEvent, RequestArrived, RequestId
from lockstep.core.journal.sinks import NoJournal
from lockstep.core.scheduler.engine import Engine
from lockstep.sim.calibrate.load_runs import Floats, LoadRun
from lockstep.sim.cost import Calibration, CalibrationError, CpuModel
from lockstep.sim.cost.base_model import base_cost_model
from lockstep.sim.cost.stages import PipelineModel
from lockstep.sim.cost.tables import BaseModel
from lockstep.sim.host.arrivals import Arrivals, arrival_of
from lockstep.sim.host.engine_host import EngineHost
from lockstep.sim.host.ports import NEVER_US
from lockstep.sim.run.assemble import assemble
from lockstep.sim.run.setup import Setup
from lockstep.sim.run.simulate import collecting_seldom, host_of, watch_of
from lockstep.sim.scenario.scenario import Scenario
from lockstep.sim.workload.turns import Turn, Turns
from lockstep.sim.workload.workload import Workload

BEYOND_S = 5.0  # a replay of the first requests goes on for so long behind their measured end: then none is later


@dataclass(frozen=True, eq=False)
class SimulatedTimes:
    """The simulated times of requests, [n] in the order of sending, in seconds.

    A time that had not come when the replay stopped is the time of the stop.
    """

    ttft_s: Floats
    e2e_s: Floats
    queue_s: Floats  # from sending to the first admission
    end_s: float  # last event, since the first request

    def tpot_s(self, output_tokens: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Floats:
        """Return the time per output token behind the first, [n]; NaN for answers of one token."""
        tpot: Floats = (self.e2e_s - self.ttft_s) / np.where(output_tokens > 1, output_tokens - 1, np.nan)
        return tpot


class InOrderLoop:
    """A closed loop in the order of its turns: the next one is sent `gap_us` after any answer.

    The counterpart of `arrivals.Arrivals`. Sessions are not distinguished: a client with `concurrency` workers sends
    the next request of its list.
    """

    settled_until_us = NEVER_US  # there is no other source of requests
    never_sent = 0

    def __init__(self, turns: Turns, concurrency: int, gap_us: int) -> None:
        self._turns = turns
        self._gap_us = gap_us
        self.expected = len(turns)
        self.arrived = 0  # also the next request id
        self.open_turns: dict[RequestId, Turn] = {}
        self._due_us = [0] * min(concurrency, len(turns))  # ascending: answers end in the order of time
        self.next_us = 0

    def _look_ahead(self) -> None:
        self.next_us = self._due_us[0] if self._due_us and self.awaits_answers else NEVER_US

    def take(self, max_new_tokens: int | None) -> RequestArrived:
        """Return the next turn, due at `next_us`."""
        time_us = self._due_us.pop(0)
        request_id, turn = self.arrived, self._turns[self.arrived]
        self.arrived += 1
        self.open_turns[request_id] = turn
        self._look_ahead()
        return arrival_of(turn, time_us, request_id, max_new_tokens)

    def answered(self, request_id: RequestId, now_us: int) -> None:
        """Record the end of an answer: the next turn of the list becomes due."""
        del self.open_turns[request_id]
        self._due_us.append(now_us + self._gap_us)
        self._look_ahead()

    def broke_off(self, request_id: RequestId, now_us: int) -> None:
        """Record the rejection of a request: the next turn of the list becomes due."""
        self.answered(request_id, now_us)

    @property
    def awaits_answers(self) -> bool:
        """Whether more turns will be sent."""
        return self.arrived < self.expected

    def more(self, env: Environment) -> Event | None:
        """Return the event to wait for when nothing more is due; None: there will be no more requests."""
        return None


class _Stop:
    """An observer that stops the host at a time."""

    def __init__(self, at_us: int) -> None:
        self._at_us = at_us
        self.host: EngineHost | None = None

    def observe(self, event: ObservedEvent, step: Step, engine: Engine) -> None:
        """Receive one event and its Step."""
        if event.time_us > self._at_us and self.host is not None:
            self.host.stop_requested = True


@dataclass(frozen=True, eq=False)
class ReplayedServer:
    """The server of a run, set up in the simulator."""

    setup: Setup  # as `lockstep simulate` has it without a calibration of the user
    base: BaseModel  # the cost model that a calibration corrects

    @classmethod
    def of(cls, scenario: Scenario, turns: Turns, name: str) -> ReplayedServer:
        """Assemble a scenario with the requests of a run as its workload.

        Raises: ConfigError, CatalogueError, CapacityError; CalibrationError with pipeline stages, whose corrections are
            not known.
        """
        workload = Workload(name, name, "measured", "", turns)
        setup = assemble(scenario, {}, workload=workload)
        base = base_cost_model(
            setup.model,
            setup.gpu,
            scenario.parallelism,
            weights_dtype=scenario.weights_dtype,
            kv_dtype=scenario.kv_dtype,
            fp8_activations=scenario.fp8_activations,
        )
        if isinstance(base, PipelineModel):
            raise CalibrationError(
                f"`pp` is {scenario.pp}: what an engine adds to each stage cannot be fitted\n"
                "hint: calibrate with a run on one stage"
            )
        return cls(setup, base)

    def play(
        self, run: LoadRun, calibration: Calibration | None, *, rows: int | None = None, factor: float = 1.0
    ) -> SimulatedTimes:
        """Replay a run.

        Args:
            calibration: correction of the cost model; None: what `lockstep simulate` uses without a calibration.
            rows: number of first requests that are of interest; those behind them are sent as long as they matter.
            factor: on all times of batches.
        """
        setup = self.setup
        if calibration is not None:
            cost, cpu = calibration.cost_model(self.base, factor), calibration.cpu_model(CpuModel())
            setup = replace(setup, cost=cost, cpu=cpu, calibration=calibration)
        elif factor != 1.0:
            setup = setup.slowed(factor)
        turns, stop_us, source = self._source(run, rows)
        env = Environment()
        stop = None if stop_us is None else _Stop(stop_us)
        host, metrics = host_of(setup, source, NoJournal(), env=env, watch=watch_of(0, None, stop))
        if stop is not None:
            stop.host = host
        with collecting_seldom():
            env.process(host.run())
            env.run()
        data = metrics.result()
        requests, end_us = data.requests, data.span_us[1]
        lost = requests.ended_us >= 0
        if (lost & ~requests.completed).any():
            row = int(np.argmax(lost & ~requests.completed))
            raise CalibrationError(
                f"{run.name}: request {row} is not answered in the simulation: {requests.finish_reason[row]}\n"
                "hint: set --pages, --context-tokens-max or --max-running-requests as the server had them"
            )
        count = len(turns) if rows is None else min(rows, len(turns))
        sent_us = np.full(count, end_us, np.int64)
        known = min(count, len(requests.request_id))
        sent_us[:known] = requests.arrival_us[:known]
        columns = []
        for since_us in (requests.ttft_us, requests.e2e_us, requests.queue_us):
            since = np.maximum(end_us - sent_us, 0).astype(np.float64)
            since[:known] = np.where(since_us[:known] >= 0, since_us[:known], since[:known])
            columns.append(since / 1e6)
        ttft_s, e2e_s, queue_s = columns
        return SimulatedTimes(ttft_s, e2e_s, queue_s, (end_us - data.span_us[0]) / 1e6)

    def _source(self, run: LoadRun, rows: int | None) -> tuple[Turns, int | None, Arrivals | InOrderLoop]:
        """Return the turns to send, when to stop (us, None: at the end) and the source of requests."""
        turns = self.setup.workload.turns
        if run.concurrency is not None or not run.requests.has_clock:
            concurrency = len(turns) if run.concurrency is None else run.concurrency
            if rows is not None:
                turns = turns.head(rows + concurrency)
            return turns, None, InOrderLoop(turns, concurrency, round(1e6 * run.gap_s))
        if rows is None:
            return turns, None, Arrivals(turns)
        stops_s = run.requests.sent_s[:rows] + run.requests.e2e_s[:rows]
        stop_us = round(1e6 * (float(stops_s.max()) + BEYOND_S))
        turns = turns.head(max(rows, int(np.searchsorted(turns.arrival_us, stop_us))))
        return turns, stop_us, Arrivals(turns)
