"""One engine of a cluster with its own clock, which advances only when its state matters to the rest of the cluster.

Engines interact at the router only: it sends requests, and it receives ends of answers. Between two of these an engine
needs no interleaving with the others. An `EngineLane` is not advanced until its state matters to another part, and then
catches up in one go:

    others   --------a-----------a-----a-----------------a------>   arrivals that were routed to other engines
    lane     ====================================|                  no answer could end before this time

`quiet_until_us` is a lower bound of the time at which the next answer of this engine ends. An arrival before the bound
does not advance the lane. The bound follows from

- the batches in flight: their ends are known, and so is which of them end a request, unless drafts, blocks or early
  ends make the number of tokens a part of the result;
- the launches behind them: each gives a request one token at most, so that no request ends before as many launches as
  it has tokens left. A decode of the same requests takes no less time than the last one, because contexts grow;
- the requests that were sent and have not arrived: a request that will be accepted has launches of its own before its
  end, and changes only launches after its arrival.

`tests/sim/test_cluster_lanes.py` compares the bound with every end, for engines with each feature;
`tests/sim/test_cluster.py` compares the journals with those of advancing every engine at every arrival.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping

from simpy import Environment, Event

from lockstep.core.contract.events import ControlRequested, RequestArrived, RequestCancelled, RequestId, TokenRuns
from lockstep.core.requests.table import VERSION_MARK, prompt_length
from lockstep.sim.cost import BatchShape, ContextBends, CostModel, decode_shape, extend_shape
from lockstep.sim.cost.stages import PipelineModel
from lockstep.sim.cost.tables import unnoted
from lockstep.sim.host.engine_host import EngineHost
from lockstep.sim.host.ports import NEVER_US
from lockstep.sim.workload.turns import Turn

LEAST_SHARE = 0.5  # least time of a launch, as a share of the time of a decode of one row
WAITING_MAX = 32  # waiting requests; with more of them, the next launch is taken to end a request
ROWS_SHARE = 0.9  # least time of a launch with decodes, as a share of the least time of a decode of any rows
LATER_SHARE = 0.9  # least time of a later decode of the same requests, as a share of the last: tables are not monotone

INFINITE_US = float("inf")

Sent = RequestArrived | RequestCancelled | ControlRequested

Ended = Callable[[int, RequestId, int, bool], None]
"""Callback for every request that ends: engine, request, time in us, and whether it was answered."""


class LaneClock(Environment):
    """The clock of one process, with a horizon: at `horizon_us` another part of the cluster acts.

    An `Environment` with a single process needs no queue of events: the time at which it goes on is one number.
    """

    def __init__(self) -> None:
        super().__init__()
        self.horizon_us: float = 0
        self.due_us: float = INFINITE_US  # when the process goes on; infinite while it runs, or waits for `wake`
        self._lane: Iterator[Event] = iter(())
        self._pause = Event(self)  # what the process waits for, a constant

    def start(self, lane: Iterator[Event]) -> None:
        """Set the process of this clock. It begins at the next `step`."""
        self._lane, self.due_us = lane, self._now

    def step(self) -> None:
        """Let the process go on at `due_us`, up to its next pause."""
        self._now, self.due_us = self.due_us, INFINITE_US
        next(self._lane, None)

    def peek(self) -> float:
        """Return the next time at which another part of the cluster acts."""
        return self.horizon_us

    def timeout(self, delay: float = 0, value: object = None) -> Event:  # type: ignore[override]
        """Let the process go on after `delay` us."""
        self.due_us = self._now + delay
        return self._pause

    def wait(self) -> Event:
        """Let the process go on after `wake`."""
        return self._pause

    def wake(self) -> None:
        """Let a process that waits go on at its own time."""
        self.due_us = self._now


class Feed:
    """The requests that were sent to one engine: the counterpart of `arrivals.Arrivals` in a cluster."""

    def __init__(self, engine: int, open_turns: Mapping[RequestId, Turn], ended: Ended, clock: LaneClock) -> None:
        self.open_turns = open_turns  # open turns of the whole cluster
        self.next_us = NEVER_US
        self._engine = engine
        self._ended = ended
        self._clock = clock
        self._queue: deque[Sent] = deque()
        self._awaits = False  # whether the lane waits for the next call of `add`

    def add(self, event: Sent) -> None:
        """Queue a fact. Its time must not be before that of the last one."""
        self._queue.append(event)
        self.next_us = self._queue[0].time_us
        if self._awaits:
            self._clock.wake()
            self._awaits = False

    def take(self, _max_new_tokens: int | None) -> Sent:
        """Return the next fact, due at `next_us`. The cluster has already applied the limit of new tokens."""
        event = self._queue.popleft()
        self.next_us = self._queue[0].time_us if self._queue else NEVER_US
        return event

    @property
    def size(self) -> int:
        """The number of facts that were sent and are not taken yet."""
        return len(self._queue)

    @property
    def settled_until_us(self) -> int:
        """Time from which on the router may send further requests."""
        horizon_us = self._clock.horizon_us
        return int(horizon_us) if horizon_us < NEVER_US else NEVER_US

    def more(self, env: Environment) -> Event | None:
        """Return what to wait for until the next call of `add`."""
        self._awaits = True
        return self._clock.wait()

    def answered(self, request_id: RequestId, now_us: int) -> None:
        """Report the end of an answer to the cluster."""
        self._ended(self._engine, request_id, now_us, True)

    def broke_off(self, request_id: RequestId, now_us: int) -> None:
        """Report the rejection or the cancel of a request to the cluster."""
        self._ended(self._engine, request_id, now_us, False)


class EngineLane:
    """One engine of a cluster.

    Args:
        host: host of the engine, on its own `LaneClock` and with a `Feed`.
        cost: cost model of the engine; with random durations the lower bounds are smaller.
        early_ends: whether answers may end before their length, so that any batch may end an answer.
    """

    def __init__(self, host: EngineHost, feed: Feed, clock: LaneClock, cost: CostModel, *, early_ends: bool) -> None:
        self.host = host
        self.feed = feed
        self.clock = clock
        config, overlaps = host.engine.config, isinstance(cost, PipelineModel)
        # Whether any batch may end any answer, because its result shows how many tokens it has.
        self._ends_early = early_ends or config.speculates or config.jumps or config.block_tokens > 0
        self._one_token = not self._ends_early and config.decode_steps_per_launch == 1  # per request and launch
        self._counts_launches = self._one_token and not config.retract_every and not overlaps
        # Stages overlap, halves of a batch too, moves of experts save time, and not every decode copies states.
        varies = overlaps or config.two_batch_overlap is True or host.experts is not None
        self._known_times = not varies and not host.device.state_copy_us
        shape = BatchShape(decode_rows=1, decode_context_tokens=1)
        with unnoted(cost):
            one_row = cost.batch_us(shape)
            row_us = cost.stage_us(shape)[-1] if isinstance(cost, PipelineModel) else one_row.mean_us
            decodes_us = [cost.batch_us(decode_shape(1 << n, 1)).mean_us for n in range(config.rows_max.bit_length())]
            lengthens = isinstance(cost, ContextBends) and cost.decode_bends(1) is not None
            prompt = cost.batch_us(extend_shape(1, 1))
        self._draws = one_row.spread_us > 0 or prompt.spread_us > 0
        self._least_us = LEAST_SHARE * row_us  # in a pipeline, ends are at least a stage's time apart
        self._decode_us = ROWS_SHARE * min(decodes_us) if self._known_times else self._least_us
        self._later_share = 1.0 if lengthens else LATER_SHARE
        limits = (config.max_queued_requests, config.waiting_timeout_us, config.running_timeout_us)
        self._answers_all = all(limit is None for limit in limits) and not self._draws and not config.multiplexes
        self._prompt_tokens_max, self._tokens_max = config.prompt_tokens_max(True), config.request_tokens_max
        self._page_size = config.page_size
        # Whether a full engine admits no waiting request before another one ends or is retracted.
        self._stays_full = not config.enable_priority_preemption and not host.engine.memory.tiers.present
        # Of the requests in the feed: lower bound of their ends, see `_note`; pages of their prompts; their number.
        self._sent_end_us: float = NEVER_US
        self._sent_pages = self._sent_count = 0
        # Of the requests that the engine has, see `_forecast`.
        self._settled_us: float = NEVER_US
        self._launches = self._members = self._pages = 0
        self._stretch_us = 0.0
        self.quiet_until_us: float = NEVER_US
        clock.start(host.run())
        clock.horizon_us = 0

    def send(self, event: Sent) -> None:
        """Send a request, a cancel or a control request to this engine."""
        self.feed.add(event)
        self._note(event)
        self.quiet_until_us = self._quiet_until_us()

    def advance(self, until_us: float) -> None:
        """Do all work that is due before `until_us`."""
        clock = self.clock
        clock.horizon_us = until_us
        while clock.due_us < clock.horizon_us:  # the end of an answer may lower the horizon
            clock.step()
        if self._sent_count and self.feed.next_us == NEVER_US:
            self._sent_end_us, self._sent_pages, self._sent_count = NEVER_US, 0, 0
        self._forecast()
        self.quiet_until_us = self._quiet_until_us()

    def hold_at(self, until_us: float) -> None:
        """Set the horizon to `until_us`, where another part of the cluster acts."""
        if until_us < self.clock.horizon_us:
            self.clock.horizon_us = until_us

    def _note(self, event: Sent) -> None:
        """Record a lower bound of the end of a request that is in the feed until the lane is advanced.

        A request that is accepted ends no earlier than after as many launches as it has tokens. One that may be
        rejected, or that needs more than a prompt, may end when it arrives; so may requests behind a control request.
        """
        end_us: float = event.time_us
        self._sent_count += 1
        if self._answers_all and type(event) is RequestArrived and is_plain(event):
            tokens = prompt_tokens_of(event)
            if 0 < tokens <= self._prompt_tokens_max and not self.host.engine.controls.draining:
                decodes = min(event.max_new_tokens, self._tokens_max - tokens) - 1 if self._one_token else 0
                end_us += int(self._least_us + max(decodes, 0) * self._decode_us)
                self._sent_pages += -(-tokens // self._page_size)
        if end_us < self._sent_end_us:
            self._sent_end_us = end_us

    def _quiet_until_us(self) -> float:
        """Return a time before which no request of this engine ends; see the module's docstring."""
        wakes_us = self.clock.due_us
        if wakes_us > NEVER_US:
            return NEVER_US  # the engine is idle
        end_us = min(self._own_end_us(), self._sent_end_us)
        if self.host.wake_at_us is not None:
            end_us = min(end_us, self.host.wake_at_us)
        return max(end_us, wakes_us)

    def _own_end_us(self) -> float:
        """Return a lower bound of the first end of a request that the engine has, with the requests in the feed."""
        launches, stretch_us, settled_us = self._launches, self._stretch_us, self._settled_us
        if not launches:
            return settled_us
        if self._sent_count and launches > 1:
            launches = self._launches_with_pages()
        if launches <= 1 or not stretch_us:
            return settled_us + int(self._least_us + (launches - 1) * self._decode_us)
        end_us = settled_us + launches * stretch_us
        from_us = max(self.feed.next_us, settled_us)  # from then on, launches may be others than decodes
        if end_us > from_us:
            left = launches - (from_us - settled_us) / stretch_us
            end_us = from_us + left * max(self._decode_us, ROWS_SHARE * stretch_us)
        return int(end_us)

    def _launches_with_pages(self) -> int:
        """Return the launches up to the first end, at most as many as are sure to have pages; at least 1."""
        growing = self._members + self._sent_count
        if not growing or (self._sent_count and self.host.engine.memory.hybrid.present):
            return 1  # windows and states of prompts may lack where pages do not
        launches = ((self._pages - self._sent_pages) // growing - 1) * self._page_size
        return max(min(self._launches, launches), 1)

    def _forecast(self) -> None:
        """Find out when the engine may end one of the requests that it has, if it gets no others.

        Sets `_settled_us`, the first result that may end a request, or the last one of the batches in flight;
        `_launches`, a lower bound of the launches behind it up to the first one that ends a request, or 0;
        `_stretch_us`, the least time of each of them if they are decodes, or 0; `_members`, the requests that grow
        meanwhile, and `_pages`, the pages that they may take.
        """
        engine, device = self.host.engine, self.host.device
        queue = device.queue
        self._launches, self._stretch_us = 0, 0.0
        if not engine.requests:
            self._settled_us = NEVER_US
            return
        if device.untimed or engine.multiplexer.present:
            self._settled_us = self.clock.due_us
            return
        for batch, running in zip(engine.in_flight, queue, strict=True):
            if self._ends_early or batch.ending or batch.dead or batch.plan.pooled_rows.size:
                self._settled_us = running.finished_us
                return
        self._settled_us = queue[-1].finished_us if queue else self.clock.due_us
        if self._draws:
            return
        self._launches = 1
        if not self._counts_launches or engine.blocked or engine.memory.adapters.present:
            return
        launches, extending = self._launches_by_tokens()
        if launches <= 1 or (extending and engine.memory.hybrid.present):
            return
        self._launches = launches
        self._launches = self._launches_with_pages()
        if queue and not extending and self._known_times:
            newest = engine.in_flight[-1]
            if newest.plan.mode == "decode" and newest.samplers is engine.running_batch:
                # Later contexts are longer.
                self._stretch_us = self._later_share * (queue[-1].finished_us - queue[-1].started_us)

    def _launches_by_tokens(self) -> tuple[int, int]:
        """Return a lower bound of the number of future launches up to the first one that ends a request by length.

        A launch advances each request by one token at most. So none ends before as many launches as it has tokens left,
        whatever else is launched. Sets `_members` and `_pages`.
        Returns: the launches, and the number of requests with prompts that may be part of them.
        """
        engine = self.host.engine
        members, pages = engine.running_batch.size, engine.memory.available_pages
        launches = engine.microbatches.current.horizon if members else NEVER_US
        extending = [] if engine.prefilling is None else [engine.prefilling]
        waiting = engine.waiting
        if waiting and not (engine.batch_is_full and self._stays_full):
            if len(waiting) > WAITING_MAX:
                return 1, len(waiting)
            extending += waiting
        for request in extending:
            launches = min(launches, request.limit - request.extend_stop)
            pages -= -(-request.extend_stop // self._page_size)
        self._members, self._pages = members + len(extending), pages
        return launches, len(extending)


def prompt_tokens_of(event: RequestArrived) -> int:
    """Return the number of tokens of a prompt; 0 if it is malformed."""
    try:
        return prompt_length(event.prompt)
    except ValueError:
        return 0


def is_plain(event: RequestArrived) -> bool:
    """Whether an engine without limits accepts a request of a simulation if its prompt fits.

    It needs nothing but its prompt then: no media, session, adapter, grammar, other samples or timer.
    """
    return (
        event.kind == "generate"
        and event.max_new_tokens > 0
        and event.parallel_samples == 1
        and event.grammar is None
        and event.transfer_room is None
        and event.deadline_us is None
        and event.finish_by_us is None
        and type(event.prompt) is TokenRuns
        and not (event.spans or event.session or event.adapter)
        and VERSION_MARK not in event.tenant
    )
