"""Data-parallel attention with a scheduler per rank: ranks agree on every pass and run it together.

`--attention-dp N` alone simulates an engine whose single scheduler spreads rows evenly over shards. With
`--rank-schedulers` each of the N shards is a rank with its own scheduler, CPU lane, cache and journal, as in a server.
Requests are routed to ranks, and all ranks share one clock:

    rank 0   plan |-> proposes .        . agreed | pass ............................... | results
    rank 1      plan |-> proposes       . agreed    | pass ........................... | results
                                `exchange`            begins when the last rank is ready, ends on all ranks at once

The time of a pass is that of attention on its slowest rank, plus that of all other terms for the rows of all ranks,
padded as they agreed.

With pipeline stages a pass goes through one stage after another, and the next pass follows it. A pass enters the first
stage when the last rank has handed it over and the newest tokens of its decode rows are back on every rank. Each stage
has GPUs of every rank.
"""

from __future__ import annotations

import functools
import math
from collections import Counter, deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace
from simpy import Environment, Event

from lockstep.core.cluster.router import Router
from lockstep.core.contract.commands import BatchPlan, ProposeBatch, Ranks, Step
from lockstep.core.contract.events import (
    BatchId,
    DelaySituation,
    ObservedEvent,
    PrefillNegotiated,
    RanksAgreed,
    RequestArrived,
    RequestId,
)
from lockstep.core.features.data_parallel import draft_passes_of
from lockstep.core.journal.sinks import JournalSink
from lockstep.sim.cluster.metrics import combine
from lockstep.sim.cluster.shared_clock import Routing, SharedClock, SharedFeed, report_of
from lockstep.sim.cost import BatchShape, CostModel
from lockstep.sim.cost.draws import drawn_factor
from lockstep.sim.cost.stages import PipelineModel
from lockstep.sim.host.batch_shapes import as_decodes, state_copies
from lockstep.sim.host.device import Device, Running, Untimed
from lockstep.sim.host.engine_host import EngineHost
from lockstep.sim.host.host_options import HostLinks
from lockstep.sim.host.pipeline import with_stages
from lockstep.sim.host.ports import NEVER_US, MetricsSink, TransferPort
from lockstep.sim.host.speculation import DraftCost, widths_of
from lockstep.sim.host.stages import StageNotes, Stages
from lockstep.sim.metrics.fold import MetricsFold
from lockstep.sim.run.simulate import host_of, watch_of
from lockstep.sim.workload.turns import Turn

if TYPE_CHECKING:
    from lockstep.host.router_journal import NoRouterJournal, RouterJournal
    from lockstep.sim.cluster.result import ClusterRun
    from lockstep.sim.cluster.setup import ClusterSetup
    from lockstep.sim.run.setup import Setup

EXCHANGE_US = 60
"""Time from the last proposal until every rank has all proposals.

An estimate for a gather of a few numbers by gloo within one host.
"""

# --------------------------------------------------------------------------------------------------- the cost of a pass


# mechanism: padding-of-ranks (simulated)
def pass_shape(cost: CostModel, shapes: Sequence[BatchShape], agreed: Ranks) -> BatchShape:
    """Return the shape of a pass of all ranks, with the shape of the slowest rank as `own`.

    Args:
        shapes: shape of each rank's batch; empty for an idle rank.
    """
    if any(shape.halves is not None for shape in shapes):
        nothing = BatchShape()
        parts = zip(*(shape.halves or (nothing, nothing) for shape in shapes), strict=True)
        first, second = (pass_shape(cost, part, agreed) for part in parts)
        whole = pass_shape(cost, [replace(shape, halves=None) for shape in shapes], agreed)
        return replace(whole, halves=(first, second))
    ranks = len(shapes)
    padded = agreed.padding == "max_length"  # no rank extends in such a pass

    def total(name: str) -> int:
        values = [getattr(shape, name) for shape in shapes]
        return ranks * max(values) if padded else sum(values)

    together = BatchShape(
        extend_rows=sum(shape.extend_rows for shape in shapes),
        extend_tokens=sum(shape.extend_tokens for shape in shapes),
        extend_context_tokens=sum(shape.extend_context_tokens for shape in shapes),
        extend_pairs=sum(shape.extend_pairs for shape in shapes),
        decode_rows=total("decode_rows"),
        decode_context_tokens=sum(shape.decode_context_tokens for shape in shapes),
        sampled_rows=total("sampled_rows"),
        draft_tokens=total("draft_tokens"),
    )
    candidates = {max(shapes, key=lambda shape: shape.decode_context_tokens), max(shapes, key=_tokens_of)}
    if agreed.extends:
        candidates.add(max(shapes, key=lambda shape: shape.extend_pairs))
    seen = [replace(together, own=own) for own in sorted(candidates, key=msgspec.structs.astuple)]
    return max(seen, key=lambda shape: cost.batch_us(shape).mean_us)


def _tokens_of(shape: BatchShape) -> int:
    return shape.extend_tokens + shape.decode_rows + shape.draft_tokens


class Share(NamedTuple):
    """One rank's part of a pass."""

    plan: BatchPlan
    shape: BatchShape
    handed_over_us: int
    draft_us: float
    copies: float  # number of state copies
    tokens: bytes  # see `Running`
    accepted: bytes


class PassCounts:
    """Counts of passes and ranks, for metrics.json."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.passes = 0
        self.exchanges = 0
        self.extending = 0  # passes in which at least one rank extends
        self.extending_ranks = 0  # ranks that extend, summed over these passes
        self.converted = 0  # ranks that only decode, summed over these passes
        self.idle = 0  # idle ranks, summed over all passes
        self.graphs = 0  # passes that replay a graph
        self.padded = 0  # passes padded to the longest rank
        self.tokens = 0
        self.padding_tokens = 0
        self.draft_passes = 0  # passes of a drafter that all ranks run together
        self.draft_passes_joined = 0  # passes of these that a rank did not need itself, summed over ranks
        self.late_us = 0  # time from a rank's readiness to that of the last rank, summed over ranks
        self.situations: Counter[DelaySituation] = Counter()
        self.delayed_passes = 0
        self.waits_us: list[int] = []  # wait of prompts before each release
        self.wanting_first = 0  # ranks that could extend when the latest wait began
        self.joined = 0  # ranks that became able to extend during a wait

    def launched(self, shares: Sequence[Share]) -> None:
        """Count a pass that begins."""
        agreed = shares[0].plan.ranks
        assert agreed is not None
        self.passes += 1
        self.idle += sum(share.plan.mode == "idle" for share in shares)
        self.graphs += agreed.use_graph
        self.tokens += sum(agreed.tokens)
        if agreed.padding == "max_length":
            self.padded += 1
            self.padding_tokens += max(agreed.tokens) * self.ranks - sum(agreed.tokens)
        if agreed.extends:
            extending = sum(share.plan.extend_rows > 0 for share in shares)
            self.extending += 1
            self.extending_ranks += extending
            self.converted += sum(share.plan.mode == "mixed" and not share.plan.extend_rows for share in shares)
        last_us = max(share.handed_over_us for share in shares)
        self.late_us += sum(last_us - share.handed_over_us for share in shares)

    def drafted(self, shares: Sequence[Share], passes: int) -> None:
        """Count passes of the drafter that all ranks ran."""
        self.draft_passes += passes
        self.draft_passes_joined += sum(passes - draft_passes_of(share.plan) for share in shares)

    def decided(self, event: PrefillNegotiated) -> None:
        """Count a decision of all ranks about prompts; call it once per decision."""
        self.situations[event.situation] += 1
        self.delayed_passes += not event.allowed
        if event.passes == 1 and not event.allowed:
            self.wanting_first = event.wanting
        if event.allowed and event.passes:
            self.waits_us.append(event.waited_us)
            self.joined += max(event.wanting - self.wanting_first, 0)

    def describe(self) -> dict[str, Any]:
        """Return all counts; times in microseconds."""
        waits = np.array(self.waits_us or [0])
        return {
            "ranks": self.ranks,
            "passes": self.passes,
            "exchanges": self.exchanges,
            "passes_extending": self.extending,
            "extending_rank_share": _share(self.extending_ranks, self.extending * self.ranks),
            "decodes_converted": self.converted,
            "idle_share": _share(self.idle, self.passes * self.ranks),
            "graph_share": _share(self.graphs, self.passes),
            "passes_max_length": self.padded,
            "padding_share": _share(self.padding_tokens, self.tokens + self.padding_tokens),
            **(
                {
                    "draft_passes": self.draft_passes,
                    "draft_passes_joined_share": _share(self.draft_passes_joined, self.draft_passes * self.ranks),
                }
                if self.draft_passes
                else {}
            ),
            "late_us_mean": _share(self.late_us, self.passes * self.ranks),
            "prompts_by_situation": dict(sorted(self.situations.items())),
            "passes_prompts_waited": self.delayed_passes,
            "prompts_released": len(self.waits_us),
            "ranks_joined": self.joined,
            "release_wait_us_mean": round(float(waits.mean()), 3) if self.waits_us else None,
            "release_wait_us_max": int(waits.max()) if self.waits_us else None,
        }


def _share(part: int, whole: int) -> float | None:
    return round(part / whole, 6) if whole else None


def summed(counts: Sequence[PassCounts]) -> dict[str, Any]:
    """Return the sum of the counts of several engines, described; see `PassCounts.describe`."""
    all_of = PassCounts(counts[0].ranks)
    for one in counts:
        for name, value in vars(one).items():
            if name != "ranks":
                setattr(all_of, name, getattr(all_of, name) + value)
    return all_of.describe()


# --------------------------------------------------------------------------------------------------------- the exchange


@dataclass(eq=False)
class SharedPass:
    """A pass that all ranks have handed over. It runs after the passes before it."""

    shares: Sequence[Share]  # by rank
    took_us: float  # time of the pass, sampling included
    sampling_us: float  # sampling time within `took_us`, if any rank defers its sampling; else 0.0
    held_us: int = 0  # earliest start in any stage
    encoded_us: int = 0  # earliest start in the first of several stages
    shape: BatchShape | None = None  # shape of all ranks together
    draft_us: float = 0.0  # drafting time, in the last stage
    copies: float = 0.0  # state copies of the rank with the most
    started_us: int | None = None
    ends_us: dict[int, int] = field(default_factory=dict)  # by rank, as far as known

    def end_us(self, rank: int, sampled_us: dict[tuple[int, BatchId], int]) -> int | None:
        """Return when a rank has its tokens; None while its sampling is deferred.

        Args:
            sampled_us: earliest times of deferred samplings, by rank and batch; the entry of this pass is removed.
        """
        assert self.started_us is not None
        plan = self.shares[rank].plan
        if plan.sample_after is None:
            return self.started_us + max(1, round(self.took_us))
        may_us = sampled_us.pop((rank, plan.batch_id), None)
        if may_us is None:
            return None
        ready_us = max(self.started_us + self.took_us - self.sampling_us, may_us)
        return max(self.started_us + 1, round(ready_us + self.sampling_us))


class RankDevice(Device):
    """The GPUs of one rank. A pass begins when all ranks have handed over their batches and sampled the last pass."""

    group: SimulatedRanks
    rank: int

    def __init__(self, cost: CostModel, rows_max: int, *, seed: int, name: str, early_eos: bool) -> None:
        super().__init__(cost, rows_max, seed=seed, name=name, early_eos=early_eos)
        # With stages, by row: when its newest token is at the first stage.
        self.token_back_us = np.zeros(rows_max, np.float64)

    def shape_of(self, plan: BatchPlan) -> BatchShape:
        """Return the shape of a plan. In a prebuilt batch, rows with transferred KV count as decode rows."""
        shape = super().shape_of(plan)
        return as_decodes(shape) if plan.mode == "prebuilt" else shape

    def launch(self, plan: BatchPlan, shape: BatchShape, handed_over_us: int) -> None:
        """Hand `plan` over, to run with the plans of the other ranks after the passes before."""
        draft_us = 0.0
        if self.speculation is not None:
            draft_us = self.speculation.drafter.draft_us(shape, draft_passes_of(plan), widths_of(plan.speculation))
        copies = state_copies(plan) if self.state_copy_us else 0.0
        tokens = self._sample(plan).tobytes() if plan.rows.size else b""
        accepted = b"" if plan.speculation is None else self._accepted(plan)
        if plan.sample_after is not None:
            self.untimed.append(Untimed(plan, handed_over_us, 0.0, 0.0, tokens, None, accepted))
        self.group.handed_over(self.rank, Share(plan, shape, handed_over_us, draft_us, copies, tokens, accepted))

    def hold_until(self, us: int) -> None:
        """Delay the start of batches handed over from now on to `us`, on every rank."""
        self.group.hold_until(us)

    def encode_until(self, us: int) -> None:
        """Delay batches on the GPUs that encode, those of the first stage, to `us`."""
        self.group.encode_until(us)

    @property
    def encoder_free_us(self) -> int:
        """Time at which this rank will have run all its batches; NEVER_US while a batch waits for other ranks."""
        return self.group.free_us(self.rank)

    def sample(self, batch_id: BatchId, at_us: int) -> None:
        """Let this rank sample a deferred batch, because its matchers have moved."""
        waiting = [one for one in self.untimed if one.plan.batch_id != batch_id]
        if len(waiting) < len(self.untimed):
            self.untimed = deque(waiting)
            self.group.may_sample(self.rank, batch_id, at_us)


# mechanism: prefill-delayer (simulated)
class SimulatedRanks:
    """The ranks of one engine: their proposals, their batches handed over, and the times of their passes."""

    def __init__(
        self, env: Environment, cost: CostModel, ranks: int, *, seed: int, name: str, drafter: DraftCost | None = None
    ) -> None:
        self.env = env
        self.role = "mixed"
        self._drafter = drafter
        self.counts = PassCounts(ranks)
        self.ports: list[RankPort] = []
        self._cost = cost
        self._key = f"{seed} {name}"
        self._free_us = 0
        self.stages = Stages(cost) if isinstance(cost, PipelineModel) else None
        self._held_us = 0  # earliest start of passes handed over from now on
        self._encoded_us = 0  # earliest start of these passes in the first stage
        self._proposals: dict[int, tuple[ProposeBatch, int]] = {}  # by rank: proposal, and its time
        self._there: list[deque[Share]] = [deque() for _ in range(ranks)]  # by rank: batches of incomplete passes
        self._passes: deque[SharedPass] = deque()  # passes handed over by all ranks, with an end not known yet
        self._sampled_us: dict[tuple[int, BatchId], int] = {}  # earliest times of deferred samplings
        self._begun = 0  # passes so far, for their random durations

    def proposed(self, rank: int, command: ProposeBatch, time_us: int) -> None:
        """Record a rank's proposal.

        The first proposal of a round requests those of the other ranks; the last one sends the agreement to all ranks.
        """
        first = not self._proposals
        self._proposals[rank] = command, time_us
        if len(self._proposals) == len(self.ports):
            self._agree()
        elif first:
            for port in self.ports:
                if port.rank not in self._proposals:
                    port.deliver(time_us, None)

    def _agree(self) -> None:
        self.counts.exchanges += 1
        proposals = [self._proposals[rank] for rank in range(len(self.ports))]
        self._proposals = {}
        agreed_us = max(time_us for _, time_us in proposals) + EXCHANGE_US
        commands = [command for command, _ in proposals]
        event = RanksAgreed(
            time_us=agreed_us,
            round=commands[0].round,
            counts=tuple(command.counts for command in commands),
            wishes=tuple(command.wish for command in commands if command.wish is not None),
            generation=commands[0].generation,
        )
        for port in self.ports:
            port.deliver(agreed_us, event)

    def handed_over(self, rank: int, share: Share) -> None:
        """Record a batch that a rank hands over. When all ranks have handed over theirs, the pass is queued."""
        self._there[rank].append(share)
        if not all(self._there):
            return
        shares = [there.popleft() for there in self._there]
        agreed = shares[0].plan.ranks
        assert agreed is not None
        together = pass_shape(self._cost, [share.shape for share in shares], agreed)
        expected = self._cost.batch_us(together)
        draft_us, copies = self._draft_us(together, shares, agreed), max(share.copies for share in shares)
        # Ranks copy states in parallel, so the rank with the most copies counts.
        drawn_us = expected.mean_us * drawn_factor(expected, self._key, self._begun)
        took_us = drawn_us + draft_us + copies * self.ports[0].device.state_copy_us
        self._begun += 1
        sampling_us = 0.0
        if any(share.plan.sample_after is not None for share in shares):
            sampling_us = expected.mean_us - self._cost.batch_us(replace(together, sampled_rows=0)).mean_us
        self._passes.append(
            SharedPass(shares, took_us, sampling_us, self._held_us, self._encoded_us, together, draft_us, copies)
        )
        self._time()

    def hold_until(self, us: int) -> None:
        """Delay passes handed over from now on to `us`, because a rank's GPUs copy pages or encode media."""
        self._held_us = max(self._held_us, us)

    def encode_until(self, us: int) -> None:
        """Delay passes to `us` because a rank's GPUs encode media; of several stages, in the first only."""
        if self.stages is None:
            self.hold_until(us)
        else:
            self._encoded_us = max(self._encoded_us, us)

    def free_us(self, rank: int) -> int:
        """Return when the GPUs that encode will have run all batches of a rank; NEVER_US if not known yet."""
        if self._there[rank] or self._passes:
            return NEVER_US
        return self._free_us if self.stages is None else math.ceil(self.stages.free_us[0])

    def may_sample(self, rank: int, batch_id: BatchId, at_us: int) -> None:
        """Record that a rank may sample a deferred batch from `at_us` on."""
        self._sampled_us[rank, batch_id] = at_us
        self._time()

    def _time(self) -> None:
        """Compute starts and ends of passes as far as they are known, and queue the results on the ranks' devices.

        A pass begins when every rank has sampled in the pass before.
        """
        while self._passes:
            one = self._passes[0]
            if one.started_us is None:
                one.started_us = self._begin(one)
                self.counts.launched(one.shares)
            for port, share in zip(self.ports, one.shares, strict=True):
                plan = share.plan
                end_us = one.end_us(port.rank, self._sampled_us) if port.rank not in one.ends_us else None
                if end_us is None:
                    continue
                one.ends_us[port.rank] = end_us
                port.host.device.queue.append(
                    Running(
                        plan.batch_id,
                        plan.generation,
                        len(plan.rows),
                        one.started_us,
                        end_us,
                        share.tokens,
                        share.accepted,
                    )
                )
                port.feed.poke()
            if len(one.ends_us) < len(one.shares):
                return
            self._free_us = max(one.ends_us.values())
            if self.stages is not None:
                self._left(one, self.stages)
            self._passes.popleft()

    def _begin(self, one: SharedPass) -> int:
        """Return the start of a pass, after the passes before it. With stages, also compute its `took_us`."""
        there_us = max(share.handed_over_us for share in one.shares)
        if self.stages is None:
            return max(self._free_us, one.held_us, there_us)
        assert one.shape is not None
        cost = self.stages.cost
        begins_us = float(max(there_us, one.encoded_us))
        for port, share in zip(self.ports, one.shares, strict=True):
            decoding = share.plan.rows[share.plan.extend_rows :]
            if decoding.size:
                begins_us = max(begins_us, float(port.device.token_back_us[decoding].max()))
        times_us = cost.stage_us(one.shape)
        times_us[-1] += one.draft_us - one.sampling_us  # the forward pass may run before a deferred sampling
        send_us = cost.send_us(_tokens_of(one.shape))
        started_us, left_us, spans = self.stages.run(
            begins_us, self.stages.with_copies(times_us, one.copies), send_us, float(one.held_us)
        )
        begun_us = round(started_us)
        one.took_us = left_us + one.sampling_us - begun_us
        for port, share in zip(self.ports, one.shares, strict=True):
            if port.device.notes is not None:
                port.device.notes.add(share.plan, send_us, spans)
        return begun_us

    def _left(self, one: SharedPass, stages: Stages) -> None:
        """Send the tokens of a pass that left the last stage back to the first stage."""
        assert one.shape is not None
        if one.sampling_us:
            stages.sampled(float(self._free_us), one.sampling_us)
        back_us = stages.cost.send_us(max(one.shape.sampled_rows, 1))
        for port, share in zip(self.ports, one.shares, strict=True):
            if share.plan.sample_rows.size:
                port.device.token_back_us[share.plan.rows[share.plan.sample_rows]] = one.ends_us[port.rank] + back_us

    def _draft_us(self, together: BatchShape, shares: Sequence[Share], agreed: Ranks) -> float:
        """Return the time of drafting.

        Ranks that run a drafter together run as many passes as the rank with the most drafts needs, over all rows.
        """
        if agreed.draft_passes is msgspec.UNSET or self._drafter is None:
            return max(share.draft_us for share in shares)
        self.counts.drafted(shares, agreed.draft_passes)
        widths = [widths_of(share.plan.speculation) for share in shares]
        widest = tuple(max(of_depth) for of_depth in zip_longest(*widths, fillvalue=0))
        return self._drafter.draft_us(together, agreed.draft_passes, widest)


class RankPort:
    """One rank's end of the exchange, with facts on their way to it."""

    host: EngineHost
    device: RankDevice

    def __init__(self, group: SimulatedRanks, rank: int, feed: SharedFeed) -> None:
        self.group, self.rank, self.feed = group, rank, feed
        self.next_us = NEVER_US
        self._inbox: deque[tuple[int, RanksAgreed | None]] = deque()
        group.ports.append(self)

    def joins(self, host: EngineHost) -> None:
        """Connect the rank's host, whose device runs every pass with the devices of the other ranks."""
        device = host.device
        assert isinstance(device, RankDevice)
        device.group, device.rank, self.host, self.device = self.group, self.rank, host, device
        if (stages := self.group.stages) is not None:
            device.stages = stages
            device.notes = StageNotes(len(stages.busy_us)) if device.notes_times else None

    def deliver(self, time_us: int, event: RanksAgreed | None) -> None:
        """Queue an agreement; None: the information that another rank waits for this rank's proposal."""
        self._inbox.append((time_us, event))
        self.next_us = self._inbox[0][0]
        self.feed.poke()

    def take(self, now_us: int) -> RanksAgreed | None:
        """Return the next fact, due at `next_us`."""
        _, event = self._inbox.popleft()
        self.next_us = self._inbox[0][0] if self._inbox else NEVER_US
        return None if event is None else replace(event, time_us=now_us)

    def propose(self, command: ProposeBatch, now_us: int) -> None:
        """Pass this rank's proposal to the group."""
        self.group.proposed(self.rank, command, now_us)

    def pause(self, next_us: int) -> Event:
        """Return the event to wait for: `next_us`, or an earlier fact for this rank."""
        return self.feed.pause(self.group.env, next_us)


class Verdicts:
    """A metrics sink that also counts the ranks' common decisions about prompts. It is used on the first rank only."""

    def __init__(self, metrics: MetricsSink, counts: PassCounts) -> None:
        self._metrics, self._counts = metrics, counts
        self.gauge = metrics.gauge
        self.cpu_interval = metrics.cpu_interval

    def observe(self, event: ObservedEvent, step: Step) -> None:
        """Record one event and its Step."""
        for decided in step.decided:
            if type(decided) is PrefillNegotiated:
                self._counts.decided(decided)
        self._metrics.observe(event, step)


# -------------------------------------------------------------------------------------------------------------- the run


class Ranked:
    """The ranks of a cluster's engines. Their hosts are created in order, rank after rank."""

    def __init__(self, env: Environment) -> None:
        self.env = env
        self.groups: list[SimulatedRanks] = []

    def host_of(
        self,
        setup: Setup,
        feed: SharedFeed,
        journal: JournalSink,
        *,
        name: str,
        check_every: int,
        port: TransferPort | None = None,
    ) -> tuple[EngineHost, MetricsFold]:
        """Create the host of the next rank; return it with its metrics. The first rank of an engine begins a group."""
        ranks, rank = setup.config.dp_ranks, setup.config.dp_rank
        assert ranks is not msgspec.UNSET
        assert rank is not msgspec.UNSET
        if rank == 0:
            drafter = setup.drafting.drafter if setup.drafting is not None else None
            seed, of = setup.scenario.seed, f"engine{len(self.groups)}"
            self.groups.append(SimulatedRanks(self.env, setup.cost, ranks, seed=seed, name=of, drafter=drafter))
            self.groups[-1].role = str(setup.config.role) if setup.config.hands_over else "mixed"
        group = self.groups[-1]
        exchange = RankPort(group, rank, feed)
        host, metrics = host_of(
            setup,
            feed,
            journal,
            env=self.env,
            name=name,
            watch=watch_of(check_every),
            links=HostLinks(
                port=port,
                exchange=exchange,
                device_type=RankDevice,
                wrap_metrics=functools.partial(Verdicts, counts=group.counts) if rank == 0 else None,
            ),
        )
        exchange.joins(host)
        if host.tiers is not None and rank:
            first = group.ports[0].host.tiers
            assert first is not None
            host.tiers.share_storage(first)
        if host.encoder is not None and rank:
            shared = group.ports[0].host.encoder
            assert shared is not None
            host.encoder.share_gpus(shared)
        return host, metrics


class RankCluster:
    """Engines of several ranks behind one router, on one clock. The router chooses among ranks."""

    def __init__(
        self,
        setup: ClusterSetup,
        journals: list[JournalSink],
        router_journal: RouterJournal | NoRouterJournal,
        *,
        check_every: int = 0,
        on_finish: Callable[[int], None] | None = None,
    ) -> None:
        self.setup = setup
        self.clock: SharedClock[RankCluster] = SharedClock(setup, self._route, on_finish)
        self.env = self.clock.env
        self.routing = Routing(Router(setup.scenario.router, setup.shares), router_journal, range(len(setup.engines)))
        self._hop_us = setup.scenario.hop_us
        self.ranks = Ranked(self.env)
        self.feeds: list[SharedFeed] = []
        self.metrics: list[MetricsFold] = []
        for engine, (one, journal) in enumerate(zip(setup.engines, journals, strict=True)):
            feed = SharedFeed(self.env, self._ended)
            host, metrics = self.ranks.host_of(one, feed, journal, name=f"engine{engine}", check_every=check_every)
            self.feeds.append(feed)
            self.clock.hosts.append(host)
            self.metrics.append(metrics)

    @property
    def client_metrics(self) -> list[MetricsFold]:
        """Metrics of the engines that stream to clients, which are all engines."""
        return self.metrics

    @property
    def stop_requested(self) -> bool:
        """Whether a signal handler requested the end of the run; see `SharedClock`."""
        return self.clock.stop_requested

    @stop_requested.setter
    def stop_requested(self, value: bool) -> None:
        self.clock.stop_requested = value

    def run(self, give_up: Callable[[RankCluster], bool] | None = None) -> bool:
        """Route every request and finish every answer. Return whether `give_up` stopped the arrivals early."""
        if self.setup.scenario.report_interval_us:
            self.env.process(self._report())
        return self.clock.run(self, give_up)

    def _report(self) -> Generator[Event, None, None]:
        """Send the load of every rank to the router at intervals; a report arrives after `report_delay_us`."""
        scenario, ranks = self.setup.scenario, list(enumerate(self.clock.hosts))
        while self.clock.goes_on and not self.stop_requested:
            yield self.env.timeout(scenario.report_interval_us)
            now_us = int(self.env.now)
            due_us = now_us + scenario.report_delay_us
            for rank, host in ranks:
                report = report_of(rank, host.engine, now_us, due_us)
                self.clock.at(due_us, functools.partial(self.routing.take_in, report))

    def _route(self, event: RequestArrived, turn: Turn) -> None:
        feed = self.feeds[self.routing.engine_for(event, turn)]
        sent = replace(event, time_us=event.time_us + self._hop_us)
        self.clock.at(sent.time_us, functools.partial(feed.add, sent, turn))

    def _ended(self, request_id: RequestId, now_us: int, answered: bool) -> None:
        """Record the end of a request; the router and the client receive it one hop later."""
        seen_us = now_us + self._hop_us
        output_tokens = self.clock.output_tokens(request_id) if answered else 0
        self.clock.at(seen_us, functools.partial(self.routing.tell_end, seen_us, request_id, output_tokens))
        self.clock.see_end(request_id, seen_us, answered)

    def result(self, stopped_early: bool, began_s: float) -> ClusterRun:
        """Return the measured run."""
        slos = self.setup.scenario.base.slos
        measured = zip(self.metrics, self.clock.hosts, strict=True)
        datas = [with_stages(metrics.result(slos), host) for metrics, host in measured]
        data = combine(datas, hop_us=self._hop_us, slos=slos, encoders=self.setup.encoders)
        data.summary["ranks"] = summed([group.counts for group in self.ranks.groups])
        return self.clock.measured(data, datas, self.routing.by_reason, stopped_early, began_s)
