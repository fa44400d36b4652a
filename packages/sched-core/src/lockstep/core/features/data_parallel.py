"""Data-parallel attention: ranks with requests of their own that run every pass together, and agree on it before.

Each rank has an Engine, a journal and KV of its own; experts, and whatever else all ranks share, need the rows of all.
So a slot that is free launches nothing: the rank plans, and says in a `ProposeBatch` how much that is. The hosts turn
the proposals of all ranks into one `RanksAgreed`, the same for each, and only that launches. A rank with nothing to
run joins with an idle batch as soon as any rank has something.

    LaneReady -> ProposeBatch(5) ->| all ranks |-> RanksAgreed(5) -> LaunchBatch, the same round on every rank

**A proposal binds.** Its plan counts as in flight from then on, so a request that leaves in between is dead in it like
in any launched plan, and its counts stay true. Nothing is ever undone. Whatever decides whether prompts go ahead is
therefore asked *before* anything is planned: a rank that could extend, and may be told not to, proposes nothing and
reports that it could (`Wish`). All fold the same wishes into the same verdict, plan accordingly in the Step of that
RanksAgreed, and propose again: two exchanges where a rank could extend, one everywhere else.

**The delayer.** While one rank extends, the others have idle or decode rows in a pass as long as that extend. So a rank
with prompts waits, within limits, until every rank has some. `DELAYER` is the table of that: how ranks stand, and what
follows. It never delays prompts in vain: prompts go ahead where no rank decodes, or where a rank goes
on with a prompt that is split. If asked to it waits for more: where every rank has prompts, but only few of them or few
places for them, so that one extend takes in what would have been several (SGLang's slot and queue triggers).

**Drafts.** A drafter that is a model, or layers of one, runs its passes with all ranks, too. How many follows from the
rank with the longest drafts (`Ranks.draft_passes`); the others run them with what they have, or with nothing.

**One branch for all.** What a pass looks like follows from what all ranks said, never from what one of them has: if
any extends all take the branch of extends, a graph is replayed if all can, and an extend behind an extend waits for
results on all ranks or on none. The only clock is that of the first rank.

**Stages.** Where ranks are pipelined, a round is of one microbatch, the same on all ranks (`slot`), and of the next one
once that has launched or has found nothing: all launch in the same order, so stages meet in the same passes. A rank
that has nothing in a microbatch joins with an idle batch of it. The delayer's table is that of each microbatch: its
decoding requests and its places decide what waits; one without a free place would otherwise end the waits of the
others.
"""

from __future__ import annotations

from collections import deque
from hashlib import blake2b
from typing import Literal, NamedTuple, get_args

import msgspec
import numpy as np
from msgspec import UNSET
from msgspec.structs import astuple, replace

from lockstep.core.contract.checks import fail
from lockstep.core.contract.commands import (
    NO_ROWS,
    BatchPlan,
    HiddenSpan,
    HybridChanges,
    LogprobSpan,
    ProposeBatch,
    Ranks,
    Step,
)
from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.digest import DIGEST_BYTES, EMPTY_DIGEST
from lockstep.core.contract.errors import ContractError
from lockstep.core.contract.events import DelaySituation, PrefillNegotiated, RanksAgreed, Wish
from lockstep.core.features.view import LaunchView
from lockstep.core.kv.component import Component, Restored
from lockstep.core.kv.facts import Facts
from lockstep.core.kv.running_view import of_all_microbatches
from lockstep.core.requests.batching import InFlight
from lockstep.core.requests.table import EMPTY_BATCH

Counts = tuple[int, ...]
"""Of one rank and pass: new tokens, rows of logits, 1 if it extends, 1 if a CUDA graph can run.

Where settings ask for more (`SchedConfig.ranks_tell_more`) there are three more: passes of the drafter that it needs,
requests that wait, and the most of them that one of its latest extends took in.
"""

IDLE: Counts = (0, 0, 0, 1)
OF_THE_PASS = len(IDLE)
RECENT_EXTENDS = 16  # with requests that are looked at: SGLang's window
NO_IDS = np.empty(0, np.int64)
NO_IDS.flags.writeable = False

DelayState = Literal["free", "delaying"]

DELAYER: dict[tuple[DelayState, DelaySituation], DelayState] = {
    ("free", "none"): "free",
    ("free", "along"): "free",
    ("free", "idle"): "free",
    ("free", "full"): "delaying",
    ("free", "all"): "free",
    ("free", "starved"): "free",
    ("free", "mixed"): "delaying",
    ("free", "slots"): "delaying",
    ("free", "queue"): "delaying",
    ("free", "open"): "free",
    ("delaying", "none"): "free",
    ("delaying", "along"): "free",
    ("delaying", "idle"): "free",
    ("delaying", "full"): "delaying",
    ("delaying", "all"): "free",
    ("delaying", "starved"): "free",
    ("delaying", "mixed"): "delaying",
    ("delaying", "slots"): "delaying",
    ("delaying", "queue"): "delaying",
    ("delaying", "spent"): "free",
    ("delaying", "open"): "free",
}
"""The state of the delayer, how ranks stand, the state that follows. Prompts wait in `delaying`, else they go ahead."""

SITUATIONS: dict[DelaySituation, str] = {
    "none": "no rank could extend",
    "along": "a rank goes on with a split prompt, so this pass is an extend whatever the others do",
    "idle": "no rank has anything to decode",
    "full": "some ranks run as many requests as they may, others do not (`prefill_full_skip_passes`)",
    "all": "every rank could extend",
    "starved": "a rank that could extend uses less of each of its pools than the low watermark",
    "mixed": "some ranks could extend, others could not",
    "slots": "every rank could, with room for fewer requests than an extend took in lately (`prefill_delayer_slots`)",
    "queue": "every rank could, with fewer requests waiting than `prefill_delayer_queue_min_ratio` of those that run",
    "spent": "prompts have waited for as many passes, or as long, as they may",
    "open": "some ranks could extend, and no rule says that they wait",
}
"""How ranks stand, in the order in which they are looked at."""


class Delay(NamedTuple):
    """How long prompts have waited for those of other ranks."""

    passes: int = 0  # in a row; 0: no prompt waits
    since_us: int = 0  # by the first rank's clock

    @property
    def state(self) -> DelayState:
        return "delaying" if self.passes else "free"


def situation_of(
    config: SchedConfig, delay: Delay, counts: tuple[Counts, ...], wishes: tuple[Wish, ...]
) -> DelaySituation:
    """How the ranks stand, by what they have planned and what they said beside that."""
    waited_us = wishes[0].time_us - delay.since_us if delay.passes else 0
    skips, full = config.prefill_full_skip_passes, sum(wish.full for wish in wishes)
    passes_max, us_max = config.prefill_delayer_max_delay_passes, config.prefill_delayer_max_delay_us
    if not any(wish.wants for wish in wishes):
        return "none"
    if any(own[2] for own in counts):
        return "along"
    if not any(own[0] for own in counts) and not any(wish.running for wish in wishes):
        return "idle"
    uneven = skips is not UNSET and skips > 0 and 0 < full < len(wishes)
    if uneven and skips is not UNSET and delay.passes < skips:
        return "full"
    if passes_max is UNSET or us_max is UNSET:
        return "spent" if uneven else "open"
    waits: DelaySituation | None = "mixed"
    if all(wish.wants for wish in wishes):
        waits = _trigger(config, counts, wishes)
    if waits is None:
        return "all"
    if any(wish.starved for wish in wishes):
        return "starved"
    return "spent" if delay.passes >= passes_max or waited_us >= us_max else waits


def _trigger(config: SchedConfig, counts: tuple[Counts, ...], wishes: tuple[Wish, ...]) -> DelaySituation | None:
    """Why prompts wait for more of their kind though every rank has some: SGLang's rules, by the most of any rank."""
    slots, ratio = config.prefill_delayer_slots, config.prefill_delayer_queue_min_ratio
    places = config.pp_max_micro_batch_size
    most = config.max_running_requests if places is UNSET else min(places, config.max_running_requests)
    if slots is UNSET and ratio is UNSET:
        return None
    running, waiting, taken = (
        max(wish.running for wish in wishes),
        max(own[OF_THE_PASS + 1] for own in counts),
        max(own[OF_THE_PASS + 2] for own in counts),
    )
    if slots is True and most - running < taken:
        return "slots"
    if ratio is not UNSET and waiting < min(int(running * ratio), taken):
        return "queue"
    return None


def _is_full(scheduler: LaunchView) -> bool:
    """Whether no new request may run: on this rank, or in the microbatch whose turn it is."""
    if scheduler.active >= scheduler.config.max_running_requests:
        return True
    if not scheduler.microbatches.has_place():
        return True
    hybrid = scheduler.memory.hybrid
    return hybrid.full(of_all_microbatches(scheduler))


def delayed(delay: Delay, situation: DelaySituation, time_us: int) -> Delay:
    """What the delayer's table makes of it. `time_us` is that of the first rank."""
    if DELAYER[delay.state, situation] == "free":
        return Delay()
    return Delay(delay.passes + 1, delay.since_us if delay.passes else time_us)


def padding_of(tokens: tuple[int, ...], extends: bool) -> Literal["max_length", "sum_length"]:
    """How rows of the ranks are laid out where all are gathered: SGLang's rule.

    Gathering pads each rank to the longest, and adding up laid-out rows moves everything twice: the former is less
    unless the ranks differ much. Extends differ much.
    """
    even = 2 * sum(tokens) > max(tokens) * len(tokens)
    return "max_length" if even and not extends else "sum_length"


def counts_of(batch: InFlight | None) -> Counts:
    """What a rank says of its plan. All rows that decode by a graph may; nothing to run is no obstacle to one."""
    if batch is None:
        return IDLE
    plan = batch.plan
    logits = batch.samplers.size if batch.steps is None else int(batch.steps.sum())
    logits += sum(len(span.targets) for span in plan.logprob_spans)
    tokens = plan.stops - plan.starts
    if plan.speculation is not None:  # where these rows start may be open: how many they compute is not
        tokens = np.concatenate((tokens[: plan.extend_rows], plan.speculation.draft_lengths + np.int32(1)))
    extends = (
        plan.extend_rows > 0 and plan.mode != "prebuilt"
    )  # these decode, the first time with a token from elsewhere
    return int(tokens.sum()), logits, int(extends), int(not extends)


def draft_passes_of(plan: BatchPlan) -> int:
    """Passes of the drafter that a plan needs: as many as its longest drafts."""
    return 0 if plan.speculation is None else int(plan.speculation.drafted().max(initial=0))


class HeldImage(msgspec.Struct, forbid_unknown_fields=True):
    """What a snapshot keeps of a proposed plan that it does not keep of a launched one."""

    logprob_spans: list[tuple[int, int, bytes]]
    hidden_spans: tuple[HiddenSpan, ...]
    hybrid: tuple[bytes, ...] | msgspec.UnsetType = UNSET  # the columns of HybridChanges


class RoundsImage(msgspec.Struct, forbid_unknown_fields=True):
    """Rounds in a snapshot."""

    round: int
    proposed: Counts | None
    wish: Wish | None
    awaits_results: bool
    decided: bool
    extended: bool
    passes: int
    since_us: int
    digest: bytes
    held: HeldImage | None
    recent: list[int] | msgspec.UnsetType = UNSET
    slot: int | msgspec.UnsetType = UNSET  # of ranks with microbatches
    delays: list[tuple[int, int]] | msgspec.UnsetType = UNSET  # and of each of these


class RanksPart(msgspec.Struct):
    """Rounds as a field of a snapshot, of one of several data-parallel ranks."""

    ranks: RoundsImage | msgspec.UnsetType = UNSET


class Rounds(Component):
    """One rank's part in agreeing on passes: what it proposed, and what all have decided so far."""

    PART = RanksPart

    def __init__(self, config: SchedConfig, scheduler: LaunchView) -> None:
        self._scheduler = scheduler
        assert config.dp_ranks is not UNSET
        assert config.dp_rank is not UNSET
        self.ranks, self.rank = config.dp_ranks, config.dp_rank
        self.slots = config.microbatches
        self.slot = 0  # the microbatch that the round at hand is about
        self.rules_delay = config.prefill_delayer is True or bool(config.prefill_full_skip_passes)
        self.round = 0  # the next to be proposed, or the one proposed
        self.proposed: Counts | None = None  # what this rank has proposed, without an answer yet
        self.wish: Wish | None = None  # said with it
        self.held: InFlight | None = None  # the plan of that, or of the one before that was put off; the last in flight
        self.awaits_results = False  # all wait until nothing launched is in flight
        self.decided = False  # this exchange follows one in which all decided about prompts
        self.extended = False  # any rank extends in the pass launched last
        self.delays = [Delay()] * self.slots  # by microbatch
        self.tells_more, self.drafts_together = config.ranks_tell_more, config.ranks_draft_together
        self.recent: deque[int] = deque(maxlen=RECENT_EXTENDS)  # requests of each of the latest extends of this rank
        self.digest = EMPTY_DIGEST  # of all that was decided by all: equal on every rank after every round

    @property
    def delay(self) -> Delay:
        """How long prompts have waited, in the microbatch that the round is about."""
        return self.delays[self.slot]

    def launched(self) -> int:
        """Batches that are launched and not delivered, in the microbatch that the round is about."""
        mine = len(self._scheduler.in_flight)
        if self._scheduler.microbatches.several:
            mine = sum(batch.plan.microbatch == self.slot for batch in self._scheduler.in_flight)
        return mine - (self.held is not None)

    def restarted(self, generation: int) -> None:
        """The device is gone, of every rank: rounds begin again, and waits for other ranks are void."""
        self.digest = blake2b(
            _encode(generation), digest_size=DIGEST_BYTES
        ).digest()  # some may have been a round ahead
        self.round, self.proposed, self.wish, self.held = 0, None, None, None
        self.awaits_results = self.decided = self.extended = False
        self.slot, self.delays = 0, [Delay()] * self.slots
        self.recent.clear()

    # ------------------------------------------------------------------------------------------------------- proposals

    def join_in(self, step: Step) -> bool:
        """Propose without planning: the engine stands still, or its slots are taken. Returns False."""
        if self._may_propose():
            self._propose(step, wants=False)
        return False

    def take_part(self, step: Step) -> bool:
        """Plan, and propose that, if a slot is free. Returns whether there was a slot and nothing that could be run."""
        if not self._may_propose():
            return self.awaits_results
        wants, running = False, self._scheduler.microbatches.current
        if self.held is None:
            wants = (
                self._asks()
                and not self._scheduler.decode_goes_first(running)
                and self._scheduler.would_extend(running)
            )
            if not wants:
                self.held = self._scheduler.plan_next(step)
        self._propose(step, wants=wants)
        return self.held is None and not wants

    def _may_propose(self) -> bool:
        if self.proposed is not None or self.launched() > self._scheduler.config.overlap_depth:
            return False
        if self._scheduler.microbatches.at != self.slot:
            return False  # another one's slot is offered, whose turn it is not
        if self.awaits_results and self.launched():
            return False
        self.awaits_results = False
        return True

    def _asks(self) -> bool:
        """Whether this rank says that it could extend before it plans to, because it may be told to wait."""
        if self.extended and not self._scheduler.config.overlap_consecutive_prefills:
            return True
        return self.rules_delay and self._scheduler.prefilling is None

    def _propose(self, step: Step, *, wants: bool) -> None:
        config, wish = self._scheduler.config, None
        if self.rules_delay or not config.overlap_consecutive_prefills:
            low = config.prefill_delayer_token_usage_low_watermark
            wish = Wish(
                wants=wants,
                full=_is_full(self._scheduler),
                starved=wants and isinstance(low, float) and self._scheduler.memory.all_below(low),
                running=self._scheduler.running_batch.size,
                in_flight=self.launched(),
                time_us=self._scheduler.now_us,
            )
        self.proposed, self.wish = counts_of(self.held), wish
        if self.tells_more:
            drafts = draft_passes_of(self.held.plan) if self.drafts_together and self.held is not None else 0
            self.proposed += (drafts, len(self._scheduler.waiting), max(self.recent, default=0))
        step.commands.append(ProposeBatch(self.round, self.proposed, wish, self._scheduler.generation, self.slot))

    # ------------------------------------------------------------------------------------------------------ agreements

    def agreed(self, event: RanksAgreed, step: Step) -> bool:
        """All have proposed: launch, or decide together which ranks extend, and propose again.

        Returns whether prompts may go ahead and there is nothing to run.
        Raises: ContractError, changing nothing, for what cannot be.
        """
        if event.generation < self._scheduler.generation:
            return False  # from before a restart: void
        self._check(event)
        if not self._scheduler.microbatches.several:
            return self._fold(event, step)
        self._scheduler.begin_microbatch(self.slot)
        found_nothing = self._fold(event, step)
        self._scheduler.end_microbatch()
        return found_nothing

    def _fold(self, event: RanksAgreed, step: Step) -> bool:
        self.proposed, self.round = None, self.round + 1
        config, extends = self._scheduler.config, any(counts[2] for counts in event.counts)
        wanting = sum(wish.wants for wish in event.wishes)
        if not config.overlap_consecutive_prefills and self.extended and (wanting or extends):
            if any(wish.in_flight for wish in event.wishes):
                self.awaits_results = True  # until then no rank launches behind that extend, whichever rank it was
                self._note(("awaits results", self.round))
                return False
        if wanting:
            return self._decide(event, step)
        if self.delay.passes and not self.decided:
            self.delays[self.slot] = delayed(self.delay, "none", 0)
        self.decided = False
        self._launch(event, extends, step)
        self.slot = (self.slot + 1) % self.slots
        return False

    def _check(self, event: RanksAgreed) -> None:
        if event.generation > self._scheduler.generation:
            raise ContractError(f"ranks of generation {event.generation} agreed, this is {self._scheduler.generation}")
        if self.proposed is None:
            raise ContractError(f"ranks agreed on round {event.round}, for which rank {self.rank} proposed nothing")
        if event.round != self.round:
            raise ContractError(f"ranks agreed on round {event.round}, but rank {self.rank} proposed {self.round}")
        if len(event.counts) != self.ranks or len(event.wishes) not in (0, self.ranks):
            raise ContractError(
                f"round {event.round} has counts of {len(event.counts)} ranks and wishes of {len(event.wishes)}, "
                f"expected {self.ranks}"
            )
        if any(len(counts) != len(self.proposed) for counts in event.counts):
            told = sorted({len(counts) for counts in event.counts})
            raise ContractError(f"round {event.round} has {told} counts of a rank, expected {len(self.proposed)}")
        if event.counts[self.rank] != self.proposed:
            raise ContractError(
                f"round {event.round} says {event.counts[self.rank]} of rank {self.rank}, "
                f"which proposed {self.proposed}"
            )
        wish = event.wishes[self.rank] if event.wishes else None
        if wish != self.wish:
            raise ContractError(f"round {event.round} says {wish} of rank {self.rank}, which said {self.wish}")

    def _decide(self, event: RanksAgreed, step: Step) -> bool:
        """Whether prompts go ahead: the same on every rank. Then plan what is left, and propose that."""
        time_us, before = event.wishes[0].time_us, self.delay
        situation = situation_of(self._scheduler.config, before, event.counts, event.wishes)
        self.delays[self.slot] = delayed(before, situation, time_us)
        allowed = not self.delay.passes
        since = before if allowed else self.delay
        waited_us = time_us - since.since_us if since.passes else 0
        wanting = sum(wish.wants for wish in event.wishes)
        if self.rules_delay:
            step.decided.append(
                PrefillNegotiated(
                    self._scheduler.now_us, event.round, situation, allowed, wanting, since.passes, waited_us
                )
            )
        self._note(("prompts", event.round, situation, allowed, since))
        if not allowed and event.wishes[self.rank].wants:
            self._scheduler.defer_first(step)
        if self.held is None and not self._scheduler.stands_still:
            self.held = self._scheduler.plan_next(step, extends=allowed)
        self.decided = True
        self._propose(step, wants=False)
        return allowed and self.held is None and not self._scheduler.stands_still

    def _launch(self, event: RanksAgreed, extends: bool, step: Step) -> None:
        tokens = tuple(counts[0] for counts in event.counts)
        batch, self.held = self.held, None
        if not any(tokens):
            self._note(("nothing", event.round))
            return
        if batch is None:
            plan = BatchPlan(
                batch_id=self._scheduler.next_number(),
                mode="idle",
                rows=NO_ROWS,
                request_ids=NO_IDS,
                starts=NO_ROWS,
                stops=NO_ROWS,
                generation=self._scheduler.generation,
                microbatch=self.slot,
            )
            batch = InFlight(plan, [], EMPTY_BATCH, [])
            self._scheduler.put_in_flight(batch)
        agreed = Ranks(
            round=event.round,
            tokens=tokens,
            padding=padding_of(tokens, extends),
            use_graph=all(counts[3] for counts in event.counts),
            logit_rows=tuple(counts[1] for counts in event.counts),
            extends=extends,
        )
        if self.drafts_together:
            agreed = replace(agreed, draft_passes=max(counts[OF_THE_PASS] for counts in event.counts))
        plan = batch.plan
        if self.tells_more and plan.extend_rows:
            self.recent.append(plan.extend_rows)
        converts = extends and not plan.extend_rows and len(plan.rows)
        batch.plan = replace(plan, ranks=agreed, mode="mixed" if converts else plan.mode)
        self.extended = extends
        self._note(agreed.recorded)
        self._scheduler.launch(batch, step)

    def _note(self, decided: object) -> None:
        if self.slots > 1:
            decided = self.slot, decided
        if self._scheduler.digests:
            self.digest = blake2b(self.digest + _encode(decided), digest_size=DIGEST_BYTES).digest()

    # ------------------------------------------------------------------------------------------------------- snapshots

    def part(self) -> RanksPart:
        """Return the state for a snapshot."""
        return RanksPart(self._image())

    def _image(self) -> RoundsImage:
        held = None
        if self.held is not None:
            plan = self.held.plan
            spans = [(span.index, span.start, span.targets.tobytes()) for span in plan.logprob_spans]
            held = HeldImage(spans, plan.hidden_spans)
            if plan.hybrid is not None:
                held.hybrid = tuple(column.tobytes() for column in astuple(plan.hybrid))
        return RoundsImage(
            round=self.round,
            proposed=self.proposed,
            wish=self.wish,
            awaits_results=self.awaits_results,
            decided=self.decided,
            extended=self.extended,
            passes=self.delay.passes,
            since_us=self.delay.since_us,
            digest=self.digest,
            held=held,
            recent=list(self.recent) if self.tells_more else UNSET,
            slot=self.slot if self.slots > 1 else UNSET,
            delays=[(delay.passes, delay.since_us) for delay in self.delays] if self.slots > 1 else UNSET,
        )

    def load(self, part: RanksPart, restored: Restored) -> None:
        """Take over the state that `part` returned. Batches in flight are restored before."""
        image = part.ranks
        if image is UNSET:
            return
        self.round, self.proposed, self.wish = image.round, image.proposed, image.wish
        self.awaits_results, self.decided, self.extended = image.awaits_results, image.decided, image.extended
        self.digest = image.digest
        self.slot = image.slot if image.slot is not UNSET else 0
        delays = image.delays if image.delays is not UNSET else [(image.passes, image.since_us)]
        self.delays = [Delay(*delay) for delay in delays]
        self.recent.extend(image.recent if image.recent is not UNSET else ())
        if image.held is not None:
            self.held = self._scheduler.in_flight[-1]
            spans = tuple(LogprobSpan(i, start, np.frombuffer(t, np.int32)) for i, start, t in image.held.logprob_spans)
            columns = image.held.hybrid
            hybrid = None if columns is UNSET else HybridChanges(*(np.frombuffer(one, np.int32) for one in columns))
            self.held.plan = replace(
                self.held.plan, logprob_spans=spans, hidden_spans=image.held.hidden_spans, hybrid=hybrid
            )

    def check_state(self, facts: Facts) -> None:
        """S5, S29: the rank runs what it proposed, and the branch that follows from the proposals of all ranks."""
        for batch in facts.in_flight:
            ranks, plan = batch.plan.ranks, batch.plan
            if (ranks is None) != (batch is self.held):
                fail(f"S29: batch {plan.batch_id} is {'not ' * (ranks is None)}agreed upon, held is {self.held}")
            if ranks is None:
                continue
            own = counts_of(batch)
            if (ranks.tokens[self.rank], ranks.logit_rows[self.rank]) != own[:2]:
                fail(f"S29: batch {plan.batch_id} has counts {own}, the ranks agreed on {ranks}")
            if ranks.draft_passes is not UNSET and ranks.draft_passes < draft_passes_of(plan):
                fail(f"S29: batch {plan.batch_id} needs {draft_passes_of(plan)} drafter passes, {ranks} are agreed")
            if ranks.extends and plan.mode in ("decode", "verify"):
                fail(f"S29: batch {plan.batch_id} is {plan.mode}, but a rank extends in round {ranks.round}")
        if self.held is not None and facts.in_flight[-1] is not self.held:
            fail("S29: what is proposed is not the newest in flight")
        proposed = self.proposed[:OF_THE_PASS] if self.proposed is not None else None
        if proposed is not None and proposed != (IDLE if self.held is None else counts_of(self.held)):
            fail(f"S5: the plan of round {self.round} is not what was proposed, {self.proposed}")
        config = facts.config
        limits = (config.prefill_delayer_max_delay_passes, config.prefill_full_skip_passes)
        most = sum(limit for limit in limits if isinstance(limit, int))
        longest = max(delay.passes for delay in self.delays)
        if longest > most:
            fail(f"L5: prompts wait for {longest} passes, at most {most} are allowed")


_encode = msgspec.msgpack.Encoder().encode


# ------------------------------------------------------------------------------------------------ the table, as text


def diagram() -> str:
    """A state diagram of `DELAYER`, in Mermaid; what docs/distributed.md shows."""
    arrows: dict[tuple[str, str], list[str]] = {}
    for (state, situation), following in DELAYER.items():
        arrows.setdefault((state, following), []).append(situation)
    lines = [f"    {state} --> {to}: {', '.join(situations)}" for (state, to), situations in arrows.items()]
    return "\n".join(("stateDiagram-v2", *lines))


def table_text() -> str:
    """`DELAYER` in Markdown; what docs/distributed.md shows."""
    rows = [["situation", "means", *get_args(DelayState)], ["---"] * 4]
    for situation, meaning in SITUATIONS.items():
        found = [DELAYER.get((state, situation)) for state in get_args(DelayState)]
        rows.append([f"`{situation}`", meaning, *("" if to is None else f"`{to}`" for to in found)])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)
