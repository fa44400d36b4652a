"""Quality of a run: bounds that a sound engine can break only by deciding badly, per run and per request.

No state is wrong in a storm of retractions, or while a request waits beside free memory. `Quality` follows an engine
step by step and measures lost and deferred work; `BOUNDS` has the most of each measure and the reason.

    quality = Quality(engine.config)
    before = quality.before(engine, event)          # what the step is compared with
    quality.observe(engine, event, step, before)
    quality.worst()                                 # by measure; `quality.broken()` names what is out of bounds

A measure is bounded only where the settings do not cause the opposite (`Bound.holds`): a pool that is overcommitted
on purpose (`schedule_conservativeness` 0.02) has retractions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from msgspec import UNSET

from lockstep.core.contract.commands import Step
from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.events import (
    LaneReady,
    Observed,
    RequestAdmitted,
    RequestFinished,
    RequestQueued,
    RequestRetracted,
    TurnStarted,
)
from lockstep.core.journal.records import JournalHeader
from lockstep.core.journal.replay import fold
from lockstep.core.scheduler.engine import Engine


class Before(NamedTuple):
    """State before a step that its measures need."""

    may_launch: bool  # a launch slot was offered that is free, and nothing forbids a launch
    decoding: int  # members of the running batch whose slot it is
    split: int  # the request whose prompt is computed in chunks; -1: none
    fitting: tuple[int, ...]  # waiting requests, if places and full pages suffice for each of them


NOTHING = Before(False, 0, -1, ())


TINY_PAGES = 1000
"""Pages below which a pool does not let a prompt take whole chunks beside active requests."""
SHORT_PROMPT_TOKENS = 16
"""New tokens that a request counts for at least: a retraction repeats its output too, beside which a prompt of one
token weighs nothing."""


class Bound(NamedTuple):
    """The most of one measure, and why more of it shows a bad decision."""

    most: float
    why: str
    holds: Callable[[SchedConfig], bool] = lambda config: True


def _not_tiny(config: SchedConfig) -> bool:
    """Whether the pool has room for the chunks of a prompt beside active requests."""
    return config.pages >= TINY_PAGES


def _usual_reserve(config: SchedConfig) -> bool:
    """Whether the reserve is that of a served engine, and no setting forces retractions.

    Without a reserve (`on_demand`) a pool with room for few requests has to retract some of them.
    """
    overcommits = config.schedule_conservativeness < 0.3 or (config.reserve == "on_demand" and not _not_tiny(config))
    return not overcommits and not config.retract_every


def _in_one_stream(config: SchedConfig) -> bool:
    """Whether a pass has all layers of a prompt. Otherwise a prompt has several, and the next one waits for them."""
    return not config.multiplexes


def _whole_chunks(config: SchedConfig) -> bool:
    """Whether chunks are as long as their budgets allow, and neither the pool nor, without `chunk_tokens_min`, a window
    pool is tiny: of few free pages a prompt takes a few at a time."""
    if not _not_tiny(config) or not _in_one_stream(config):
        return False
    hybrid, aligned = config.hybrid, config.truncation_align_size is not None
    if hybrid is not UNSET and hybrid.chunk_tokens_min is UNSET and 0 < hybrid.window_pages < TINY_PAGES:
        return False
    shortens = config.chunked_prefill_size_min is not UNSET or config.pp_dynamic_chunking is True
    return config.chunk_target_us is None and not aligned and not shortens


@dataclass
class _Story:
    """One request: the work spent on it, and its waits."""

    retractions: int = 0
    lost: bool = False  # it was retracted for pages and has not started again
    resumed_behind: int = 0  # outputs that it had when it started last
    needed_passes: int = 0  # extends that its prompts require, at the length of chunks
    passes: int = 0  # its extends from which decodes were left out
    waits: int = 0  # launches in a row that passed it although it fits
    skipped: int = 0  # launches in a row without its next chunk
    skipped_most: int = 0  # launches after which a running request must have ended


@dataclass
class Quality:
    """The measures of one engine from its first event on."""

    config: SchedConfig
    stories: dict[int, _Story] = field(default_factory=dict)
    most: Counter[str] = field(default_factory=Counter)  # by measure of a request: the worst so far
    admitted: int = 0
    retracted: int = 0
    needed_tokens: int = 0  # new tokens of first admissions, of each at least SHORT_PROMPT_TOKENS
    repeated_tokens: int = 0  # new tokens of admissions after a retraction for pages
    unbounded: set[str] = field(default_factory=set)  # measures that settings of this run put out of bounds

    def __post_init__(self) -> None:
        self._settings(self.config)

    # ------------------------------------------------------------------------------------------------------- measuring

    def before(self, engine: Engine, event: Observed) -> Before:
        """Return what `observe` compares the step of an event with."""
        if not isinstance(event, LaneReady):
            return NOTHING
        running, split = engine.microbatches.states[event.microbatch], engine.prefilling
        free = engine.microbatches.in_flight(engine.in_flight) if engine.microbatches.several else len(engine.in_flight)
        may_launch = not engine.stands_still and free <= engine.config.overlap_depth and engine.admits
        fitting = tuple(self._fitting(engine)) if may_launch and split is None else ()
        return Before(may_launch, running.batch.size, -1 if split is None else split.request_id, fitting)

    def _fitting(self, engine: Engine) -> list[int]:
        """Return the waiting requests if the engine could start any of them, whatever their order: each one fits."""
        config, memory = engine.config, engine.memory
        if memory.hybrid.present or memory.tiers.present or config.max_loras is not None or config.dp_ranks:
            return []
        places = min(config.max_running_requests - engine.active, memory.table.rows_available)
        if places <= 0 or not engine.waiting or engine.microbatches.several:
            return []
        members, positions = engine.all_running
        reserved = int((members.limits - positions).sum()) + 2 * config.page_size * (members.size + 1)
        if config.reserve == "ratio":  # admission pauses by the whole output of a resumed request
            reserved += sum(story.resumed_behind for story in self.stories.values())
            if config.batching != "prefill_first":  # and takes one token for each decode of the pass from the rest
                reserved += members.size
        room = memory.available_pages * config.page_size - reserved
        ready = [one for one in engine.waiting if one.deferred is None and one.behind < 0]
        most = max((len(one.tokens) // 4 + one.max_new_tokens - one.outputs for one in ready), default=0)
        return [one.request_id for one in ready] if most + config.page_size <= room else []

    def observe(self, engine: Engine, event: Observed, step: Step, before: Before) -> None:
        """Take in a step."""
        if engine.config is not self.config:
            self._settings(engine.config)
        started = []
        for decided in step.decided:
            match decided:
                case RequestQueued(request_id=one) | TurnStarted(request_id=one):
                    self.stories.setdefault(one, _Story())
                case RequestAdmitted(request_id=one):
                    started.append(one)
                    self._admitted(decided, engine.requests[one].outputs)
                case RequestRetracted(request_id=one, reason=reason):
                    story = self.stories[one]
                    story.resumed_behind = 0
                    if reason == "pages":
                        self.retracted += 1
                        story.retractions += 1
                        story.lost = True
                        self._at_most("retractions of a request", story.retractions)
                case RequestFinished(request_id=one):
                    self._ended(self.stories.pop(one, None))
        if before.may_launch:
            self._passed(before, step, started)
            self._left_out(engine, before, step)

    def _settings(self, config: SchedConfig) -> None:
        """Note which bounds do not hold under settings, which an operator may change during a run."""
        self.config = config
        self.unbounded |= {name for name, bound in BOUNDS.items() if not bound.holds(config)}

    def _admitted(self, event: RequestAdmitted, outputs: int) -> None:
        story = self.stories.setdefault(event.request_id, _Story())
        story.resumed_behind = outputs
        chunk = min(self.config.chunked_prefill_size or self.config.max_prefill_tokens, self.config.max_prefill_tokens)
        story.needed_passes += 1 + -(-event.new_tokens // chunk)  # what others leave of the first pass, and its own
        if story.lost:
            self.repeated_tokens += event.new_tokens
        else:
            self.admitted += 1
            self.needed_tokens += max(event.new_tokens, SHORT_PROMPT_TOKENS)
        story.lost, story.waits = False, 0

    def _ended(self, story: _Story | None) -> None:
        if story is not None:
            self._at_most("passes of a prompt beyond its length", story.passes - story.needed_passes)

    def _passed(self, before: Before, step: Step, started: list[int]) -> None:
        """Count decodes that pass a request which fits, beyond those that `prefill_decode_interval` requires."""
        plan = step.launched()
        if plan is None:
            return
        passed = () if plan.extend_rows else before.fitting
        for one, story in self.stories.items():
            if one in passed and one not in started:
                story.waits += 1
                due = self.config.prefill_decode_interval
                self._at_most("launches that pass a request which fits", story.waits - due)
            else:
                story.waits = 0

    def _left_out(self, engine: Engine, before: Before, step: Step) -> None:
        """Count extends beside which decodes sit out, and launches without the next chunk of the split prompt."""
        plan = step.launched()
        extended = [] if plan is None else plan.request_ids[: plan.extend_rows].tolist()
        if plan is not None and before.decoding and len(plan.rows) == plan.extend_rows:
            for one in extended:
                self.stories[one].passes += 1
        story = self.stories.get(before.split)
        if story is None:
            return
        if before.split in extended or plan is None:
            story.skipped = 0
            return
        if not story.skipped:
            members, positions = engine.all_running
            story.skipped_most = int((members.limits - positions).max(initial=0))
        story.skipped += 1
        self._at_most("launches without the next chunk", story.skipped - story.skipped_most)

    def _at_most(self, measure: str, value: int) -> None:
        self.most[measure] = max(self.most[measure], value)

    # -------------------------------------------------------------------------------------------------------- judgement

    def worst(self) -> dict[str, float]:
        """Return the worst of each measure whose bound holds under these settings."""
        found: dict[str, float] = {name: float(value) for name, value in self.most.items()}
        if self.admitted >= RUN_REQUESTS_MIN:
            found["retractions by request of a run"] = self.retracted / self.admitted
            found["share of tokens computed twice"] = self.repeated_tokens / max(self.needed_tokens, 1)
        return {name: value for name, value in found.items() if name not in self.unbounded}

    def broken(self) -> list[str]:
        """Return a sentence for each measure that is out of bounds."""
        return [
            f"{name}: {value:g}, at most {BOUNDS[name].most:g}; {BOUNDS[name].why}"
            for name, value in self.worst().items()
            if value > BOUNDS[name].most
        ]


class MeasuredEngine(Engine):
    """An engine that measures the quality of its own run."""

    def __init__(self, config: SchedConfig) -> None:
        super().__init__(config)
        self.quality = Quality(config)

    def step(self, event: Observed) -> Step:
        """Fold an event, and measure the step."""
        before = self.quality.before(self, event)
        step = super().step(event)
        self.quality.observe(self, event, step, before)
        return step


def quality_of(folder: Path) -> Quality:
    """Return the measures of a run, from its journal."""
    engines: list[MeasuredEngine] = []

    def measured(header: JournalHeader) -> MeasuredEngine:
        engines.append(MeasuredEngine(header.config))
        return engines[0]

    for _ in fold(folder, measured):
        pass
    return engines[0].quality


RUN_REQUESTS_MIN = 30
"""Admitted requests from which on shares of a run are judged."""

BOUNDS: dict[str, Bound] = {
    "retractions of a request": Bound(
        4,
        "a retracted request computes its prompt and output again; the reserve is there so that this is rare, and its "
        "new-token ratio rises with each retraction",
        _usual_reserve,
    ),
    "retractions by request of a run": Bound(
        0.25, "in a storm most requests start too early; sound runs at overload have less than 0.1", _usual_reserve
    ),
    "share of tokens computed twice": Bound(
        0.25, "of the new tokens of prompts; a storm of retractions has 0.3 to 0.6", _usual_reserve
    ),
    "passes of a prompt beyond its length": Bound(
        16,
        "decodes sit out beside an extend, so a prompt takes the passes that its length requires, and not one for each "
        "page that comes free",
        _whole_chunks,
    ),
    "launches that pass a request which fits": Bound(
        4,
        "places and pages lie free; an admission may wait for one result and one retry, and not for ends",
        _in_one_stream,
    ),
    "launches without the next chunk": Bound(
        8,
        "a split prompt holds pages; it may wait for the ends of the requests that ran when its wait began",
        lambda config: _not_tiny(config) and _in_one_stream(config),
    ),
}
"""The most of each measure: more than twice the worst that sound runs have shown, and less than a storm has."""
