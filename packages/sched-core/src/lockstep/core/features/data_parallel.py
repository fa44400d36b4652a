"""Data-parallel attention: ranks with their own requests run every pass together and agree on it beforehand.

Each rank has its own Engine, journal and KV. Experts, and everything else that the ranks share, need the rows of all
ranks. A free launch slot therefore launches nothing: the rank plans, and reports the size of its plan in a
`ProposeBatch`. The hosts combine the proposals of all ranks into one `RanksAgreed`, equal on every rank, which launches
the plans. A rank without a plan joins with an idle batch if any rank has one.

    LaneReady -> ProposeBatch(5) ->| all ranks |-> RanksAgreed(5) -> LaunchBatch, the same round on every rank

**A proposal binds.** Its plan counts as in flight from then on. A request that leaves in between is dead in it, as in
any launched plan, and the proposed counts stay valid. Nothing is ever undone. Whether prompts go ahead is therefore
decided *before* anything is planned: a rank that could extend, and may have to wait, proposes nothing and reports that
it could (`Wish`). All ranks fold the same reports into the same verdict, plan accordingly in the Step of that
RanksAgreed, and propose again. A round takes two exchanges if a rank could extend, and otherwise one.

**The delayer.** While one rank extends, the others have idle or decode rows in a pass as long as that extend. A rank
with prompts therefore waits, within limits, until every rank has some. `DELAYER` is the state table: the delayer's
state, the situation of the ranks, the state that follows. Prompts go ahead if no rank decodes, or if a rank goes on
with a split prompt, since waiting would gain nothing. Two optional triggers (SGLang's slots and queue) also delay
prompts that every rank has, while there are only few prompts or few places for them: one extend then takes in the
prompts of several.

**Drafts.** A drafter that is a model, or layers of one, also runs its passes with all ranks. Their number follows from
the rank with the longest drafts (`Ranks.draft_passes`); the other ranks run them with fewer rows or none.

**One branch for all.** The form of a pass follows from the reports of all ranks, never from those of one. If any rank
extends, all take the branch of extends. A graph is replayed if all ranks can. An extend behind an extend waits for
results on all ranks or on none. The only clock is that of the first rank.

**Stages.** With pipeline stages, a round concerns one microbatch, the same on all ranks (`slot`). The next round
concerns the next microbatch, after the launch or after finding nothing to run. All ranks launch in the same order, so
the stages meet in the same passes. A rank with nothing to run in a microbatch joins with an idle batch of it. Each
microbatch has its own delay: its decoding requests and its places decide. With a common delay, a microbatch without a
free place would end the waits of the others.
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
from lockstep.core.features import two_batch
from lockstep.core.features.view import LaunchView
from lockstep.core.kv.component import Component, Restored
from lockstep.core.kv.facts import Facts
from lockstep.core.kv.running_view import of_all_microbatches
from lockstep.core.requests.batching import InFlight
from lockstep.core.requests.table import EMPTY_BATCH

Counts = tuple[int, ...]
"""Counts of one rank and pass: new tokens, rows of logits, 1 if it extends, 1 if a CUDA graph can run.

With `SchedConfig.ranks_tell_more` three more follow: passes of the drafter that the plan needs, waiting requests, and
the most requests of any of the latest RECENT_EXTENDS extends of this rank.
"""

IDLE: Counts = (0, 0, 0, 1)
OF_THE_PASS = len(IDLE)  # how many of the counts every rank reports; the three of `ranks_tell_more` follow
RECENT_EXTENDS = 16  # the latest extends with requests that are considered: SGLang's window
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
"""The next state by (state of the delayer, situation of the ranks). Prompts wait in `delaying`, else they go ahead."""

SITUATIONS: dict[DelaySituation, str] = {
    "none": "no rank could extend",
    "along": "a rank goes on with a split prompt, so this pass is an extend whatever the other ranks run",
    "idle": "no rank has requests that decode",
    "full": "some ranks run as many requests as they may, others do not (`prefill_full_skip_passes`)",
    "all": "every rank could extend",
    "starved": "a rank that could extend uses less of each of its pools than the low watermark",
    "mixed": "some ranks could extend, others could not",
    "slots": "every rank could, with room for fewer requests than a recent extend took in (`prefill_delayer_slots`)",
    "queue": "every rank could, with fewer waiting requests than `prefill_delayer_queue_min_ratio` of the running ones",
    "spent": "prompts have waited for as many passes, or as long, as they may",
    "open": "some ranks could extend, and no rule delays them",
}
"""Situations of the ranks and their meanings, in the order in which they are tested."""


class Delay(NamedTuple):
    """How long prompts have waited for prompts of other ranks."""

    passes: int = 0  # consecutive delayed passes; 0: no prompt waits
    since_us: int = 0  # start of the wait in us, by the first rank's clock

    @property
    def state(self) -> DelayState:
        return "delaying" if self.passes else "free"


# mechanism: prefill-delayer (decided)
def situation_of(
    config: SchedConfig, delay: Delay, counts: tuple[Counts, ...], wishes: tuple[Wish, ...]
) -> DelaySituation:
    """Return the situation of the ranks, from the counts of their plans and their `Wish` reports, one each per rank."""
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
    """Return why prompts wait though every rank has some; None: they do not. SGLang's rules, on maxima over ranks."""
    slots, ratio = config.prefill_delayer_slots, config.prefill_delayer_queue_min_ratio
    most = config.max_running_requests
    if config.pp_max_micro_batch_size is not UNSET:
        most = min(most, config.pp_max_micro_batch_size)
    if config.hybrid is not UNSET and config.hybrid.state_slots:
        rows = config.hybrid.state_slots // config.states_per_row  # of all microbatches
        most = min(most, -(-rows // config.microbatches))
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
    """Return whether no new request may run, on this rank or in the microbatch of the round."""
    if scheduler.active >= scheduler.config.max_running_requests:
        return True
    if not scheduler.microbatches.has_place():
        return True
    hybrid = scheduler.memory.hybrid
    return hybrid.full(of_all_microbatches(scheduler))


def delayed(delay: Delay, situation: DelaySituation, time_us: int) -> Delay:
    """Return the delay after this situation, by DELAYER. `time_us` is the time of the first rank."""
    if DELAYER[delay.state, situation] == "free":
        return Delay()
    return Delay(delay.passes + 1, delay.since_us if delay.passes else time_us)


# mechanism: padding-of-ranks (decided)
def padding_of(tokens: tuple[int, ...], extends: bool) -> Literal["max_length", "sum_length"]:
    """Return the padding mode of a pass with `tokens` per rank: SGLang's rule.

    `max_length` pads each rank to the longest one. `sum_length` lays rows end to end and adds them up, which moves all
    rows twice. The former moves less unless the ranks differ much, as extends do.
    """
    even = 2 * sum(tokens) > max(tokens) * len(tokens)
    return "max_length" if even and not extends else "sum_length"


def counts_of(batch: InFlight | None) -> Counts:
    """Return the counts of a plan. A CUDA graph can run unless the rank extends; an idle rank does not prevent one."""
    if batch is None:
        return IDLE
    plan = batch.plan
    logits = batch.samplers.size if batch.steps is None else int(batch.steps.sum())
    if plan.speculation is not None and plan.speculation.parents.size:  # logits behind every draft of a tree
        logits = batch.samplers.size + int(plan.speculation.draft_lengths.sum())
    logits += sum(len(span.targets) for span in plan.logprob_spans)
    tokens = plan.stops - plan.starts
    if plan.speculation is not None:  # the starts of these rows may be unknown, their numbers of tokens are known
        tokens = np.concatenate((tokens[: plan.extend_rows], plan.speculation.draft_lengths + np.int32(1)))
    # prebuilt rows decode: their first token came from a prefill engine
    extends = plan.extend_rows > 0 and plan.mode != "prebuilt"
    return int(tokens.sum()), logits, int(extends), int(not extends)


def draft_passes_of(plan: BatchPlan) -> int:
    """Return the passes of the drafter that a plan needs: the length of its longest path of drafts."""
    if plan.speculation is None:
        return 0
    tree = plan.speculation.parents.size > 0  # without forced tokens
    return int((plan.speculation.path_lengths() if tree else plan.speculation.drafted()).max(initial=0))


class HeldImage(msgspec.Struct, forbid_unknown_fields=True):
    """The fields of a proposed plan that a snapshot stores; those of a launched plan it omits."""

    logprob_spans: list[tuple[int, int, bytes]]
    hidden_spans: tuple[HiddenSpan, ...]
    hybrid: tuple[bytes, ...] | msgspec.UnsetType = UNSET  # the columns of HybridChanges


class RoundsImage(msgspec.Struct, forbid_unknown_fields=True):
    """`Rounds` in a snapshot."""

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
    slot: int | msgspec.UnsetType = UNSET  # set only with several microbatches
    delays: list[tuple[int, int]] | msgspec.UnsetType = UNSET  # by microbatch; set only with several of them


class RanksPart(msgspec.Struct):
    """Rounds as a field of a snapshot, of one of several data-parallel ranks."""

    ranks: RoundsImage | msgspec.UnsetType = UNSET


class Rounds(Component):
    """The rounds of one rank: its proposal, and what all ranks have decided so far."""

    PART = RanksPart

    def __init__(self, config: SchedConfig, scheduler: LaunchView) -> None:
        self._scheduler = scheduler
        assert config.dp_ranks is not UNSET
        assert config.dp_rank is not UNSET
        self.ranks, self.rank = config.dp_ranks, config.dp_rank
        self.slots = config.microbatches
        self.slot = 0  # the microbatch of the current round
        self.rules_delay = config.prefill_delayer is True or bool(config.prefill_full_skip_passes)
        self.round = 0  # number of the round that is proposed, or to be proposed next
        self.proposed: Counts | None = None  # the proposal of this rank that no RanksAgreed has answered yet
        self.wish: Wish | None = None  # the `Wish` of that proposal
        self.held: InFlight | None = None  # the proposed plan, maybe from an earlier exchange; last in `in_flight`
        self.awaits_results = False  # all ranks wait until nothing launched is in flight
        self.decided = False  # whether the ranks decided about prompts in the exchange before this one
        self.extended = False  # whether any rank extends in the pass launched last
        self.delays = [Delay()] * self.slots  # by microbatch
        self.tells_more, self.drafts_together = config.ranks_tell_more, config.ranks_draft_together
        self.recent: deque[int] = deque(maxlen=RECENT_EXTENDS)  # requests of each of the latest extends of this rank
        self.digest = EMPTY_DIGEST  # digest of all common decisions: equal on every rank after every round

    @property
    def delay(self) -> Delay:
        """How long prompts have waited in the microbatch of the round."""
        return self.delays[self.slot]

    def launched(self) -> int:
        """Return the number of batches of the round's microbatch that are launched and not delivered."""
        in_flight = len(self._scheduler.in_flight)
        if self._scheduler.microbatches.several:
            in_flight = sum(batch.plan.microbatch == self.slot for batch in self._scheduler.in_flight)
        return in_flight - (self.held is not None)

    def restarted(self, generation: int) -> None:
        """Restart the rounds after the loss of every rank's device. Waits for other ranks are void."""
        # A new digest, since some ranks may have been a round ahead of others.
        self.digest = blake2b(_encode(generation), digest_size=DIGEST_BYTES).digest()
        self.round, self.proposed, self.wish, self.held = 0, None, None, None
        self.awaits_results = self.decided = self.extended = False
        self.slot, self.delays = 0, [Delay()] * self.slots
        self.recent.clear()

    # ------------------------------------------------------------------------------------------------------- proposals

    def join_in(self, step: Step) -> bool:
        """Propose without planning: the engine launches nothing for now, or has no free slot. Returns False."""
        if self._may_propose():
            self._propose(step, wants=False)
        return False

    def take_part(self, step: Step) -> bool:
        """Plan and propose if a slot is free. Returns whether there was a slot and nothing to run."""
        if not self._may_propose():
            return self.awaits_results
        wants, running = False, self._scheduler.microbatches.current
        if self.held is None:
            wants = (
                self._reports_first()
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
            return False  # the offered slot is of a microbatch that the round does not concern
        if self.awaits_results and self.launched():
            return False
        self.awaits_results = False
        return True

    def _reports_first(self) -> bool:
        """Return whether this rank reports a possible extend before it plans one, since the ranks may delay it."""
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
        """Take in the proposals of all ranks: launch, or decide whether prompts go ahead and propose again.

        Returns: whether prompts may go ahead and there is nothing to run.
        Raises: ContractError, changing nothing, for an event that contradicts the proposal of this rank.
        """
        if event.generation < self._scheduler.generation:
            return False  # an event from before a restart is void
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
                self.awaits_results = True  # no rank launches behind that extend, whichever rank ran it
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
            lengths = sorted({len(counts) for counts in event.counts})
            raise ContractError(f"round {event.round} has {lengths} counts of a rank, expected {len(self.proposed)}")
        if event.counts[self.rank] != self.proposed:
            raise ContractError(
                f"round {event.round} has counts {event.counts[self.rank]} of rank {self.rank}, "
                f"which proposed {self.proposed}"
            )
        wish = event.wishes[self.rank] if event.wishes else None
        if wish != self.wish:
            raise ContractError(f"round {event.round} has {wish} of rank {self.rank}, which proposed {self.wish}")

    def _decide(self, event: RanksAgreed, step: Step) -> bool:
        """Decide whether prompts go ahead, equally on every rank; then plan and propose accordingly.

        Returns: whether prompts may go ahead and there is nothing to run.
        """
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
        if self._scheduler.config.splits_batches:
            batch.plan = replace(batch.plan, halves=two_batch.halves_of(self._scheduler.config, batch.plan))
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
            fail("S29: the proposed plan is not the newest in flight")
        proposed = self.proposed[:OF_THE_PASS] if self.proposed is not None else None
        if proposed is not None and proposed != (IDLE if self.held is None else counts_of(self.held)):
            fail(f"S5: the plan of round {self.round} differs from its proposal {self.proposed}")
        config = facts.config
        limits = (config.prefill_delayer_max_delay_passes, config.prefill_full_skip_passes)
        most = sum(limit for limit in limits if isinstance(limit, int))
        longest = max(delay.passes for delay in self.delays)
        if longest > most:
            fail(f"L5: prompts wait for {longest} passes, at most {most} are allowed")


_encode = msgspec.msgpack.Encoder().encode


# ------------------------------------------------------------------------------------------------ the table, as text


def diagram() -> str:
    """Return the state diagram of `DELAYER` in Mermaid, as docs/distributed.md contains it."""
    arrows: dict[tuple[str, str], list[str]] = {}
    for (state, situation), following in DELAYER.items():
        arrows.setdefault((state, following), []).append(situation)
    lines = [f"    {state} --> {to}: {', '.join(situations)}" for (state, to), situations in arrows.items()]
    return "\n".join(("stateDiagram-v2", *lines))


def table_text() -> str:
    """Return `DELAYER` as the Markdown table of docs/distributed.md."""
    rows = [["situation", "means", *get_args(DelayState)], ["---"] * 4]
    for situation, meaning in SITUATIONS.items():
        found = [DELAYER.get((state, situation)) for state in get_args(DelayState)]
        rows.append([f"`{situation}`", meaning, *("" if to is None else f"`{to}`" for to in found)])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)
