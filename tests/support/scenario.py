"""Scenarios: tests of one engine as text. This module reads them, runs them and prints their output.

A scenario opens with a comment that states its subject, then has blocks with blank lines between them. A block is
commands, a line `----`, and the expected output. A block without `----` is quiet set-up. Comments stay where they are.

    # b has just filled a page and none is free; b has less output than a.
    finish 4
    ----
    retracted b after 5 output tokens, 3 pages back
    launch b8 decode a[12:13]
    pages 2/6 free

Commands that are facts (each is one observed event, and `lockstep.core.invariants.check` runs after it):

    config page_size=2 pages=6    settings, first of all; times as 5ms, `none`, `yes`, `no`, token lists as 7,8;
                                  tiers.host_pages=4 and other fields of CacheTiers, hybrid.state_slots=4 and
                                  other fields of HybridMemory, experts.slots=4 and other fields of ExpertPlacing,
                                  multiplexing.divisions=70:30:0,50:50:4 and other fields of Multiplexing,
                                  diffusion.block_tokens=4
    add a prompt=1..4,50..52 max_new=4 min_new=1 stop=7,8 eos=no stream=no deadline=5ms finish_by=9ms namespace=x
                                  `prompt=a,9` is everything of a so far (prompt and output), then 9; grammar=g names
                                  a grammar by its digest, stop_texts=x,y; other fields of RequestArrived by name
                                  (tenant=x, adapter=y, ...); kind=embed and kind=score have no output; n=3 are the
                                  samples a, a.1 and a.2; types=0011; hidden=yes; spans=2:5:image:cat:3,... is [2:5)
                                  of an image called cat, 3 encoder tokens
    encoded cat [error|late]      MediaEncoded: done, failed, or done before the restart
    step [1], steps 3             LaneReady; of microbatch 1, or of the one behind that which was offered a slot last
    collect [b3] [RESULT]         the oldest batch in flight is delivered; or this one, the oldest of its stream
    finish [N] [RESULT]           collect, then step, as a host does; N times
    run [N]                       steps while they launch, then collect, until nothing is left; N rounds at most
    grammar g [ERROR ...]         GrammarReady: g compiled, or failed for the given reason
    cancel a, cancel r17          RequestCancelled, of the newest request of that name or of an id
    at 5ms, clock 5ms             the next facts happen at 5 ms; the same and a ClockAdvanced
    flush, drain, resume, pause [in_place|retract|cancel]        ControlRequested
    abort a r7, abort all         CancelMany of exactly these, CancelAll
    update 2 [wait|retract|cancel|in_place]     UpdateWeights to version 2
    release kv_cache weights, retake kv_cache   ReleaseMemory, ResumeMemory
    done [ERROR]                  the host answers the oldest order about weights or memory
    profile start [3], profile stop, freeze, slow 5ms, set NAME VALUE, stats, switch_role decode
    record start, record stop, record dump      RecordExpertLoad
    routed 3 1 / 0 4              ExpertLoadMeasured: tokens of the experts of layer 0 / layer 1
    experts_moved [ERROR]         ExpertsMoved, for the newest MoveExperts
    open s capacity=20 timeout=5ms parent=p parent_tokens=4, close s    sessions; `add ... session=s session_start=4`
    load x [version=2] [pinned=yes], unload x                    ControlRequested for an adapter
    loaded x [error]              AdapterLoaded, for the oldest LoadAdapter of that name
    moved [3] [pages=2] [error]   a move between cache tiers ends: the oldest or this one; whole, in part or not at all
    restart                       EngineRestarted with the next generation
    stale                         a result of the generation before arrives late
    snapshot                      the engine is dumped, restored and continues

RESULT is the answer of the device: `error`, or any of `tokens a=7 b=8`, `text_stop=a`, `invalid=a`,
`grammar_ended=a` (from this token on), `forced=a:2` (the next two tokens of a are), `held=a:2` (a's two newest tokens
may begin a stop text), `logprobs` (some bytes of them). A token not given is a pure function of request and
position: the third token of r0, at position 2, is 1002.

Commands that print: pages, tree, host (host memory's tree), hybrid (windows and states), table, queue, flight, owners,
counts, sessions, adapters, plan (the newest). `show streams` (or queued, prefilled, closed, usage, timers) adds lines
that are left out otherwise; `hide streams` leaves them out again.

`finish N` and `run` leave out decodes launched in rounds in which nothing else was decided, but not the last of
`finish N`.
A block in which something happened ends with the state of the pool.

Every scenario is run three times and must print the same: the device as late as it can be; as early as it can be;
and with the engine dumped and restored before every event. At the end its events are folded once more by a new
engine, whose digests must be the same; and an engine at rest must hold nothing.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from lockstep.core import invariants
from lockstep.core.contract.commands import (
    BatchPlan,
    FinishRequest,
    LaunchBatch,
    RejectRequest,
    ReleaseDeviceMemory,
    ResumeDeviceMemory,
    Step,
    StreamTokens,
    SwapWeights,
)
from lockstep.core.contract.config import (
    BlockDiffusion,
    CacheTiers,
    Division,
    ExpertPlacing,
    HybridMemory,
    Multiplexing,
    SchedConfig,
)
from lockstep.core.contract.events import (
    AdapterLoaded,
    BatchFinished,
    CancelAll,
    CancelMany,
    ClockAdvanced,
    CloseSession,
    Control,
    ControlRequested,
    Decided,
    Drain,
    EngineRestarted,
    ExpertLoadMeasured,
    ExpertsMoved,
    Flush,
    FreezeGc,
    GetState,
    Grammar,
    GrammarReady,
    LaneReady,
    LoadAdapterControl,
    MediaEncoded,
    MemorySwitched,
    Observed,
    OpenSession,
    PagesEvicted,
    Pause,
    PrefillCompleted,
    Profile,
    PromptSpan,
    RecordExpertLoad,
    ReleaseMemory,
    RequestArrived,
    RequestCancelled,
    RequestId,
    RequestQueued,
    Resume,
    ResumeMemory,
    SamplingParams,
    SetState,
    SlowDown,
    SwitchRole,
    TokenIds,
    TokenRuns,
    UnloadAdapterControl,
    UpdateWeights,
    WeightsSwapped,
)
from lockstep.core.contract.render import Names, command_line, decided_line, media_name, plan_lines
from lockstep.core.contract.samples import sample_count, sample_label
from lockstep.core.journal import snapshot
from lockstep.core.scheduler.engine import Engine
from lockstep.core.scheduler.state_text import (
    adapter_lines,
    block_lines,
    hybrid_lines,
    in_flight_lines,
    page_owner_lines,
    pages_line,
    queue_line,
    session_lines,
    table_lines,
    tree_lines,
)
from tests.support.tagged_kv import TaggedKv, pure_token
from tests.support.tagged_tiers import TaggedTiers

RULE = "----"
ROUNDS_MAX = 2000


Order = SwapWeights | ReleaseDeviceMemory | ResumeDeviceMemory


class ScenarioError(Exception):
    """A scenario cannot be read, or requires something impossible. The message names the line."""


# ---------------------------------------------------------------------------------------------------------------- text


@dataclass
class Block:
    """Commands and what they print. `head` is everything above the rule, as written."""

    head: list[str]
    checked: bool  # it has a rule, so its output is compared
    expected: list[str] = field(default_factory=list)
    line: int = 1  # of its first line in the file

    def commands(self) -> Iterator[tuple[int, str]]:
        for i, text in enumerate(self.head):
            if text.strip() and not text.lstrip().startswith("#"):
                yield self.line + i, text.strip()


def parse(text: str) -> list[Block]:
    """Return the blocks of a scenario, in order. `unparse` joins them to the original text."""
    blocks: list[Block] = []
    lines: list[str] = []
    first = 1
    for number, line in enumerate([*text.rstrip("\n").split("\n"), ""], start=1):
        if line.strip():
            lines.append(line.rstrip())
            continue
        if lines:
            if RULE in lines:
                at = lines.index(RULE)
                blocks.append(Block(lines[:at], True, lines[at + 1 :], first))
            else:
                blocks.append(Block(lines, False, [], first))
        lines, first = [], number + 1
    return blocks


def unparse(blocks: list[Block]) -> str:
    """The text of a scenario."""
    parts = []
    for block in blocks:
        parts.append("\n".join([*block.head, RULE, *block.expected] if block.checked else block.head))
    return "\n\n".join(parts) + "\n"


# ----------------------------------------------------------------------------------------------------------------- run


@dataclass
class Result:
    """The device's answer to one batch; missing parts are made up."""

    error: bool = False
    tokens: dict[str, int] = field(default_factory=dict)
    text_stops: list[str] = field(default_factory=list)
    invalid: list[str] = field(default_factory=list)
    grammar_ended: list[str] = field(default_factory=list)
    forced: dict[str, int] = field(default_factory=dict)
    held: dict[str, int] = field(default_factory=dict)
    logprobs: bool = False
    batch_id: int | None = None  # None: of the oldest batch in flight


class Run:
    """One run of a scenario: a host that passes facts from text."""

    def __init__(self, *, eager: bool = False, restore: bool = False, script: Run | None = None) -> None:
        self.eager = eager
        self.restore = restore
        self.script = script  # an earlier run with the tokens of this one
        self.decisions: list[Decided] = []
        self.transitions: list[tuple[object, type[Decided]]] = []
        self.events: list[Observed] = []
        self.digests: list[bytes] = []
        self.forced: set[tuple[RequestId, int]] = set()  # positions where a grammar admits one token only
        self.drawn: dict[tuple[RequestId, int], int] = dict(script.drawn) if script is not None else {}
        self.names = Names()
        self.ids: dict[str, RequestId] = {}
        self.media: dict[str, str] = {}  # name in the output: name in the scenario
        self.now_us = 0
        self.next_request = 0
        self.next_control = 0
        self.shown: set[str] = set()
        self.voided: list[tuple[BatchPlan, int]] = []
        self.orders: list[Order] = []  # about weights and memory, not answered yet
        self.newest_plan: BatchPlan | None = None
        self.microbatch = -1  # the one that was offered a slot last
        self.started = False

    def start(self, config: SchedConfig) -> None:
        self.config = config
        self.engine = Engine(config)
        self.kv = TaggedKv(config, self._sample, force=lambda *place: place in self.forced, eager=self.eager)
        self.tiers = TaggedTiers(config.tiers, self.kv) if config.tiers is not msgspec.UNSET else None
        self.started = True

    # ---- facts

    def fold(self, event: Observed) -> Step:
        """Pass one fact to the engine, and check its Step."""
        if self.restore:
            self._snapshot()
        states = {request_id: request.state for request_id, request in self.engine.requests.items()}
        step = self.engine.step(event)
        self.names.observe(event)
        if self.tiers is not None:
            self.tiers.before(event, step)
        self.kv.observe(event, step)
        if self.tiers is not None:
            self.tiers.observe(event, step)
        self.events.append(event)
        self.digests.append(step.digest)
        self.decisions += step.decided
        self._note_transitions(states, step)
        self.newest_plan = step.launched() or self.newest_plan
        self.orders += [command for command in step.commands if isinstance(command, Order)]
        invariants.check(self.engine)
        invariants.check_wake(self.engine, step)
        return step

    def _note_transitions(self, states: dict[RequestId, Any], step: Step) -> None:
        """Record the (state, decided event) pairs, for the test that all of TRANSITIONS is reached."""
        from lockstep.core.requests.table import TRANSITIONS, RequestState

        for decided in step.decided:
            request_id = getattr(decided, "request_id", None)
            if request_id is not None:
                state = states.get(request_id, RequestState.ARRIVING)
                if (state, type(decided)) in TRANSITIONS:
                    self.transitions.append((state, type(decided)))
                    states[request_id] = TRANSITIONS[state, type(decided)]

    def _sample(self, request_id: RequestId, position: int) -> int:
        return self.drawn.get((request_id, position), pure_token(request_id, position))

    def _snapshot(self) -> None:
        data = snapshot.dump(self.engine)
        self.engine = snapshot.restore(data)
        if snapshot.dump(self.engine) != data:
            raise ScenarioError("an engine restored from a snapshot dumps to other bytes")

    def collect(self, result: Result) -> Step:
        """Deliver the oldest batch in flight."""
        if not self.kv.stream:
            raise ScenarioError("nothing is in flight")
        flying = {one.plan.batch_id: one.plan for one in self.kv.stream}
        if result.batch_id is not None and result.batch_id not in flying:
            raise ScenarioError(f"b{result.batch_id} is not in flight")
        plan = self.kv.stream[0].plan if result.batch_id is None else flying[result.batch_id]
        samplers = [int(plan.request_ids[i]) for i in plan.sample_rows.tolist()]
        stops = [int(plan.stops[i]) for i in plan.sample_rows.tolist()]
        for name, token in result.tokens.items():
            self.drawn[self.ids[name], stops[self._sampler(samplers, name, plan)]] = token
        for name in result.grammar_ended:
            story = self.kv.stories[self.ids[name]]
            story.grammar_ends = stops[self._sampler(samplers, name, plan)] + 1 - story.prompt_tokens
        for name, count in result.forced.items():
            first = stops[self._sampler(samplers, name, plan)] + 1
            self.forced |= {(self.ids[name], position) for position in range(first, first + count)}
        error = "the device is lost" if result.error else ""
        event = self.kv.finished(self.now_us, error=error, batch_id=plan.batch_id)
        event = msgspec.structs.replace(
            event,
            text_stops=tuple(self._sampler(samplers, name, plan) for name in result.text_stops),
            invalid=tuple(self._sampler(samplers, name, plan) for name in result.invalid),
            text_held=tuple((self._sampler(samplers, name, plan), held) for name, held in result.held.items()),
            logprobs=b"\0" * 4 if result.logprobs else b"",
        )
        step = self.fold(event)
        if (forced := self.kv.tell_forced(self.now_us)) is not None:
            self.fold(forced)
        return step

    def _sampler(self, samplers: list[RequestId], name: str, plan: BatchPlan) -> int:
        if name not in self.ids or self.ids[name] not in samplers:
            raise ScenarioError(f"b{plan.batch_id}, the oldest batch in flight, samples no token for `{name}`")
        return samplers.index(self.ids[name])

    def lane_ready(self, microbatch: int | None = None) -> Step:
        """Offer a slot: of this microbatch, or of the next one."""
        following = (self.microbatch + 1) % self.config.microbatches
        self.microbatch = following if microbatch is None else microbatch
        return self.fold(LaneReady(self.now_us, self.microbatch))

    # ---- commands

    def perform(self, text: str) -> list[str]:
        """Carry out one command line; return what it prints."""
        verb, *words = text.split()
        if verb == "config":
            if self.started:
                raise ScenarioError("`config` comes once, before everything else")
            self.start(config_of(words))
            return []
        if not self.started:
            self.start(SchedConfig())
        handler: Callable[[list[str]], list[str]] | None = getattr(self, f"do_{verb}", None)
        if handler is None:
            known = " ".join(sorted(name[3:] for name in dir(self) if name.startswith("do_")))
            raise ScenarioError(f"no command `{verb}`; commands are config {known}")
        return handler(words)

    def do_add(self, words: list[str]) -> list[str]:
        label, *settings = words
        event = self._arrival(label, settings)
        self.next_request = event.request_id + sample_count(event)
        for number in range(sample_count(event)):
            self.ids[sample_label(label, number)] = event.request_id + number
        return self._say(self.fold(event))

    def do_step(self, words: list[str]) -> list[str]:
        return self._say(self.lane_ready(int(words[0]) if words else None))

    def do_steps(self, words: list[str]) -> list[str]:
        return [line for _ in range(int(words[0])) for line in self._say(self.lane_ready())]

    def do_collect(self, words: list[str]) -> list[str]:
        return self._say(self.collect(result_of(words)))

    def do_finish(self, words: list[str]) -> list[str]:
        rounds = 1
        if words and words[0].isdecimal():
            rounds, words = int(words[0]), words[1:]
        lines = []
        for i in range(rounds):
            microbatch = self.kv.stream[0].plan.microbatch if self.kv.stream else None
            collected, stepped = self.collect(result_of(words)), self.lane_ready(microbatch)
            lines += self._say(collected, stepped, quiet=i + 1 < rounds)
        return lines

    def do_run(self, words: list[str]) -> list[str]:
        lines = []
        bounded = bool(words)
        for _ in range(int(words[0]) if words else ROUNDS_MAX):
            steps, in_vain = [self.lane_ready()], 0
            while in_vain < self.config.microbatches:
                in_vain = in_vain + 1 if steps[-1].launched() is None else 0
                if in_vain < self.config.microbatches:
                    steps.append(self.lane_ready())
            lines += self._say(*steps, quiet=True)
            if not self.kv.stream:
                return lines
            lines += self._say(self.collect(Result()), quiet=True)
        if not bounded:
            raise ScenarioError(f"`run` did not come to an end within {ROUNDS_MAX} rounds")
        return lines

    def do_grammar(self, words: list[str]) -> list[str]:
        name, *error = words
        return self._say(self.fold(GrammarReady(self.now_us, name.encode(), " ".join(error))))

    def do_cancel(self, words: list[str]) -> list[str]:
        (name,) = words
        known = self.ids.get(name)
        request_id = known if known is not None else int(name.removeprefix("r"))
        return self._say(self.fold(RequestCancelled(self.now_us, request_id)))

    def do_encoded(self, words: list[str]) -> list[str]:
        error = "the encoder says no" if words[1:] == ["error"] else ""
        generation = self.engine.generation - (words[1:] == ["late"])
        return self._say(self.fold(MediaEncoded(self.now_us, digest_of(words[0]), error, generation)))

    def do_at(self, words: list[str]) -> list[str]:
        self.now_us = us(words[0])
        return []

    def do_clock(self, words: list[str]) -> list[str]:
        self.now_us = us(words[0])
        return self._say(self.fold(ClockAdvanced(self.now_us)))

    def do_flush(self, words: list[str]) -> list[str]:
        return self._control(Flush())

    def do_drain(self, words: list[str]) -> list[str]:
        return self._control(Drain())

    def do_resume(self, words: list[str]) -> list[str]:
        return self._control(Resume())

    def do_pause(self, words: list[str]) -> list[str]:
        return self._control(msgspec.convert(["Pause", *words], Pause))

    def do_abort(self, words: list[str]) -> list[str]:
        if words == ["all"]:
            return self._control(CancelAll())
        ids = [self.ids[word] if word in self.ids else int(word.removeprefix("r")) for word in words]
        return self._control(CancelMany(tuple(ids)))

    def do_update(self, words: list[str]) -> list[str]:
        return self._control(
            msgspec.convert(["UpdateWeights", int(words[0]), f"v{words[0]}", *words[1:]], UpdateWeights)
        )

    def do_release(self, words: list[str]) -> list[str]:
        return self._control(ReleaseMemory(tuple(words)))

    def do_retake(self, words: list[str]) -> list[str]:
        return self._control(ResumeMemory(tuple(words)))

    def do_done(self, words: list[str]) -> list[str]:
        if not self.orders:
            raise ScenarioError("nothing about weights or memory was ordered")
        return self._say(self.fold(answer_to(self.orders.pop(0), self.now_us, " ".join(words))))

    def do_profile(self, words: list[str]) -> list[str]:
        return self._control(msgspec.convert(["Profile", words[0], *map(int, words[1:])], Profile))

    def do_record(self, words: list[str]) -> list[str]:
        return self._control(msgspec.convert(["RecordExpertLoad", *words], RecordExpertLoad))

    def do_routed(self, words: list[str]) -> list[str]:
        counts = np.array([layer.split() for layer in " ".join(words).split("/")], np.int64)
        return self._say(self.fold(ExpertLoadMeasured(self.now_us, len(counts), counts.tobytes())))

    def do_experts_moved(self, words: list[str]) -> list[str]:
        placer = self.engine.experts.placer
        return self._say(
            self.fold(ExpertsMoved(self.now_us, placer.orders - 1, " ".join(words), self.engine.generation))
        )

    def do_freeze(self, words: list[str]) -> list[str]:
        return self._control(FreezeGc())

    def do_stats(self, words: list[str]) -> list[str]:
        return self._control(GetState())

    def do_set(self, words: list[str]) -> list[str]:
        name, text = words
        value = None if text == "none" else float(text) if "." in text else int(text)
        return self._control(SetState(name, value))

    def do_slow(self, words: list[str]) -> list[str]:
        return self._control(SlowDown(us(words[0])))

    def do_switch_role(self, words: list[str]) -> list[str]:
        return self._control(msgspec.convert(["SwitchRole", *words], SwitchRole))

    def do_open(self, words: list[str]) -> list[str]:
        name, *settings = words
        fields: dict[str, Any] = {"capacity_tokens": 1000}
        for setting in settings:
            key, _, value = setting.partition("=")
            key = {"capacity": "capacity_tokens", "timeout": "timeout_us"}.get(key, key)
            fields[key] = us(value) if key == "timeout_us" else int(value) if value.isdecimal() else value
        return self._control(OpenSession("" if name == "none" else name, **fields))

    def do_close(self, words: list[str]) -> list[str]:
        return self._control(CloseSession(words[0]))

    def do_load(self, words: list[str]) -> list[str]:
        name, *settings = words
        values = dict(setting.split("=") for setting in settings)
        version, pinned = int(values.get("version", 1)), yes(values.get("pinned", "no"))
        return self._control(LoadAdapterControl(name, version, pinned))

    def do_unload(self, words: list[str]) -> list[str]:
        (name,) = words
        return self._control(UnloadAdapterControl(name))

    def do_loaded(self, words: list[str]) -> list[str]:
        name, *trouble = words
        load = next((load for load in self.kv.loads if load.adapter == name), None)
        if load is None:
            raise ScenarioError(f"no load of `{name}` waits for an answer")
        error = "the device has no room" if trouble else ""
        return self._say(self.fold(AdapterLoaded(self.now_us, name, load.version, error, self.engine.generation)))

    def do_moved(self, words: list[str]) -> list[str]:
        if self.tiers is None or not self.tiers.moves:
            raise ScenarioError("nothing moves between tiers")
        number = int(words.pop(0)) if words and words[0].isdecimal() else next(iter(self.tiers.moves))
        if number not in self.tiers.moves:
            raise ScenarioError(f"operation {number} is not under way, {list(self.tiers.moves)} are")
        move = self.tiers.moves[number]
        values = dict(word.split("=") for word in words if "=" in word)
        pages = int(values.get("pages", self.tiers.found(move)))
        error = "the device says no" if "error" in words else ""
        return self._say(self.fold(self.tiers.answer(move, self.now_us, 0 if error else pages, error)))

    def do_host(self, words: list[str]) -> list[str]:
        tiers = self.engine.memory.tiers
        if not tiers.present:
            raise ScenarioError("there is no host tier: give the config tiers.host_pages")
        beside = block_lines(tiers.blocks) if tiers.blocks is not None else []
        return [*tree_lines(tiers.host), f"host pages {tiers.pool.free_count}/{tiers.pool.total} free", *beside]

    def do_hybrid(self, words: list[str]) -> list[str]:
        hybrid = self.engine.memory.hybrid
        if not hybrid.present:
            raise ScenarioError("all layers have full attention: give the config hybrid.window_tokens or state_slots")
        return hybrid_lines(hybrid)

    def do_restart(self, words: list[str]) -> list[str]:
        self.voided = [(launched.plan, self.engine.generation) for launched in self.kv.stream]
        self.orders = []
        return self._say(self.fold(EngineRestarted(self.now_us, self.engine.generation + 1)))

    def do_stale(self, words: list[str]) -> list[str]:
        plan, generation = self.voided.pop(0)
        tokens = np.zeros(len(plan.sample_rows), np.int32).tobytes()
        return self._say(self.fold(BatchFinished(self.now_us, plan.batch_id, tokens, generation=generation)))

    def do_snapshot(self, words: list[str]) -> list[str]:
        self._snapshot()
        return []

    def do_show(self, words: list[str]) -> list[str]:
        self.shown |= set(words)
        return []

    def do_hide(self, words: list[str]) -> list[str]:
        self.shown -= set(words)
        return []

    def do_pages(self, words: list[str]) -> list[str]:
        return [pages_line(self.engine)]

    def do_owners(self, words: list[str]) -> list[str]:
        return page_owner_lines(self.engine, self.names)

    def do_adapters(self, words: list[str]) -> list[str]:
        return adapter_lines(self.engine.memory.adapters)

    def do_tree(self, words: list[str]) -> list[str]:
        return tree_lines(self.engine.memory.radix)

    def do_table(self, words: list[str]) -> list[str]:
        return table_lines(self.engine, self.names)

    def do_queue(self, words: list[str]) -> list[str]:
        return [queue_line(self.engine, self.names)]

    def do_flight(self, words: list[str]) -> list[str]:
        return in_flight_lines(self.engine, self.names)

    def do_plan(self, words: list[str]) -> list[str]:
        if self.newest_plan is None:
            return ["plan none yet"]
        return self._by_name(plan_lines(self.newest_plan, self.names))

    def do_sessions(self, words: list[str]) -> list[str]:
        return session_lines(self.engine, self.names)

    def do_counts(self, words: list[str]) -> list[str]:
        cached = self.engine.memory.radix.total_pages * self.config.page_size
        return [f"forwards {self.kv.forwards}, tokens cached {cached}, discarded {self.engine.tokens_discarded}"]

    # ---- helpers

    def _control(self, control: Control) -> list[str]:
        event = ControlRequested(self.now_us, self.next_control, control)
        self.next_control += 1
        return self._say(self.fold(event))

    def _arrival(self, label: str, settings: list[str]) -> RequestArrived:
        fields: dict[str, Any] = {"prompt": TokenRuns((1, 1)), "max_new_tokens": 1, "label": label}
        fields["request_id"] = self.next_request
        for setting in settings:
            name, _, value = setting.partition("=")
            match name:
                case "prompt":
                    fields["prompt"] = self._prompt(value)
                case "max_new" | "min_new":
                    fields[f"{name}_tokens"] = int(value)
                case "stop":
                    fields["stop_token_ids"] = tuple(map(int, value.split(",")))
                case "eos":
                    fields["ignore_eos"] = not yes(value)
                case "stream":
                    fields["stream"] = yes(value)
                case "deadline" | "finish_by":
                    fields[f"{name}_us"] = us(value)
                case "stop_texts":
                    fields["stop_texts"] = tuple(value.split(","))
                case "grammar":
                    fields["grammar"] = Grammar("regex", value, value.encode())
                case "id":
                    fields["request_id"] = int(value)
                case "kind":
                    fields["kind"] = value
                    if value != "generate":
                        fields["max_new_tokens"] = 0
                case "n":
                    fields["parallel_samples"] = int(value)
                case "types":
                    fields["token_type_ids"] = bytes(map(int, value))
                case "hidden":
                    fields["return_hidden_states"] = yes(value)
                case "top_logprobs":
                    fields["sampling"] = SamplingParams(top_logprobs=int(value))
                case "spans":
                    fields["spans"] = tuple(self._span(*part.split(":")) for part in value.split(","))
                case _ if name in RequestArrived.__struct_fields__:
                    fields[name] = int(value) if value.removeprefix("-").isdecimal() else value
                case _:
                    raise ScenarioError(f"a request has no `{name}`")
        return RequestArrived(time_us=self.now_us, **fields)

    def _span(self, start: str, stop: str, kind: Any, name: str, encoder_tokens: str = "0") -> PromptSpan:
        digest = digest_of(name)
        self.media[media_name(digest)] = name
        return PromptSpan(int(start), int(stop), kind, digest, int(encoder_tokens))

    def _prompt(self, text: str) -> TokenRuns | TokenIds:
        ids: list[int] = []
        for part in text.split(",") if text != "none" else []:
            first, dots, last = part.partition("..")
            if part in self.ids:
                ids += self.kv.stories[self.ids[part]].tokens
            elif dots:
                ids += range(int(first), int(last) + 1)
            else:
                ids.append(int(part))
        return TokenIds(np.array(ids, np.int32).tobytes())

    def _say(self, *steps: Step, quiet: bool = False) -> list[str]:
        """The lines of some steps. `quiet`: leave a decode out if nothing else was decided."""
        lines = []
        decided = [event for step in steps for event in step.decided if self._says(event)]
        happened = any(not isinstance(event, PagesEvicted) for event in decided)
        for step in steps:
            lines += [decided_line(event, self.names) for event in step.decided if self._says(event)]
            for command in step.commands:
                match command:
                    case StreamTokens():
                        visible = "streams" in self.shown
                    case FinishRequest() | RejectRequest():
                        visible = "closed" in self.shown
                    case LaunchBatch(plan):
                        visible = happened or not quiet or plan.mode != "decode"
                    case _:
                        visible = True
                if visible:
                    lines.append(command_line(command, self.names))
                if isinstance(command, FinishRequest) and "usage" in self.shown:
                    lines.append(usage_line(command, self.names))
        if "timers" in self.shown and steps[-1].wake_at_us is not None:
            lines.append(f"wake at {steps[-1].wake_at_us / 1000:g} ms")
        return self._by_name(lines)

    def _by_name(self, lines: list[str]) -> list[str]:
        """Return media by the names in the scenario."""
        for hexadecimal, name in self.media.items():
            lines = [line.replace(hexadecimal, name) for line in lines]
        return lines

    def _says(self, decided: Decided) -> bool:
        match decided:
            case RequestQueued():
                asked = next(
                    event.max_new_tokens
                    for event in reversed(self.events)
                    if isinstance(event, RequestArrived) and event.request_id <= decided.request_id
                )
                return decided.max_new_tokens != asked or decided.truncated_tokens > 0 or "queued" in self.shown
            case PrefillCompleted():
                return "prefilled" in self.shown
        return True


def play(blocks: list[Block], run: Run) -> list[list[str]]:
    """Run all blocks; return what each printed. Raises any error, naming the line."""
    printed = []
    for block in blocks:
        lines: list[str] = []
        folded = len(run.events)
        for number, command in block.commands():
            try:
                lines += run.perform(command)
            except Exception as error:
                error.add_note(f"line {number}: {command}")
                raise
        if len(run.events) > folded:
            lines.append(pages_line(run.engine))
        printed.append(lines)
    return printed


def check_end(run: Run) -> None:
    """Checks after the last block: plans untouched, nothing held at rest, and a second fold with equal digests."""
    run.kv.check_plans_unchanged()
    if invariants.is_idle(run.engine):
        invariants.check_quiescent(run.engine)
    again = Engine(run.config)
    for i, event in enumerate(run.events):
        if again.step(event).digest != run.digests[i]:
            raise AssertionError(f"S35: folding the events again differs at event {i}, {event}")


def run_file(path: Path, *, update: bool = False) -> tuple[str, Run]:
    """Run a scenario in all ways. Returns the difference from the expected output ("" if none) and the first run.

    With `update`, the file is rewritten instead.
    """
    text = path.read_text()
    blocks = parse(text)
    if not blocks or not blocks[0].head[0].startswith("#"):
        raise ScenarioError("a scenario opens with a comment that says what it shows")
    first = Run()
    printed = play(blocks, first)
    check_end(first)
    for block, lines in zip(blocks, printed, strict=True):
        if block.checked:
            block.expected = lines
    fresh = unparse(blocks)
    for other in (Run(eager=True, script=first), Run(restore=True)):
        how = "the device as early as can be" if other.eager else "the engine dumped and restored before every event"
        differs = diff(fresh, _played(parse(text), other), "once", how)
        if differs:
            raise AssertionError(f"the same facts, with {how}, print something else:\n{differs}")
    if update:
        if fresh != text:
            path.write_text(fresh)
        return "", first
    return diff(text, fresh, str(path), "what came out"), first


def _played(blocks: list[Block], run: Run) -> str:
    for block, lines in zip(blocks, play(blocks, run), strict=True):
        if block.checked:
            block.expected = lines
    check_end(run)
    return unparse(blocks)


def diff(old: str, new: str, old_name: str, new_name: str) -> str:
    """A unified diff with whole blocks around each change; "" if there is none."""
    lines = difflib.unified_diff(old.splitlines(), new.splitlines(), old_name, new_name, lineterm="", n=6)
    return "\n".join(lines)


# -------------------------------------------------------------------------------------------------------------- values


def _pairs(words: list[str]) -> Iterator[tuple[str, str]]:
    for word in words:
        name, _, value = word.partition("=")
        yield name, value


def _value(text: str) -> Any:
    if text in ("yes", "no"):
        return yes(text)
    return int(text) if text.isdecimal() else text


def config_of(words: list[str]) -> SchedConfig:
    """SchedConfig from `name=value` words; those of its parts are `tiers.name=value`, ..."""
    values: dict[str, Any] = {}
    of_hybrid = {name.removeprefix("hybrid."): int(text) for name, text in _pairs(words) if name.startswith("hybrid.")}
    of_diffusion = {
        name.removeprefix("diffusion."): int(text) for name, text in _pairs(words) if name.startswith("diffusion.")
    }
    if of_diffusion:
        values["diffusion"] = BlockDiffusion(**of_diffusion)
    of_experts = {
        name.removeprefix("experts."): _value(text) for name, text in _pairs(words) if name.startswith("experts.")
    }
    if of_experts:
        values["experts"] = ExpertPlacing(**of_experts)
    if of_hybrid:
        values["hybrid"] = HybridMemory(**of_hybrid)
    tiers = {name.removeprefix("tiers."): _value(text) for name, text in _pairs(words) if name.startswith("tiers.")}
    if tiers:
        values["tiers"] = CacheTiers(**{n: us(v) if isinstance(v, str) and "_us" in n else v for n, v in tiers.items()})
    shares = {name.removeprefix("multiplexing."): text for name, text in _pairs(words) if "multiplexing." in name}
    if shares:
        divisions = [Division(*map(int, one.split(":"))) for one in shares.pop("divisions").split(",")]
        values["multiplexing"] = Multiplexing(
            divisions=tuple(divisions), **{name: int(text) for name, text in shares.items()}
        )
    for word in words:
        name, _, value = word.partition("=")
        if name.startswith(("tiers.", "hybrid.", "experts.", "diffusion.", "multiplexing.")):
            continue
        if name not in SchedConfig.__struct_fields__:
            raise ScenarioError(f"SchedConfig has no `{name}`")
        if name == "eos_token_ids":
            values[name] = tuple(map(int, value.split(",")))
        elif name.endswith("_us"):
            values[name] = us(value)
        elif value in ("yes", "no"):
            values[name] = yes(value)
        elif value == "none":
            values[name] = None
        elif name in ("schedule_conservativeness", "cache_guarantee"):
            values[name] = float(value)
        else:
            values[name] = int(value) if value.isdecimal() else value
    return SchedConfig(**values)


def answer_to(order: Order, time_us: int, error: str = "") -> WeightsSwapped | MemorySwitched:
    """A host's answer to an order about weights or memory."""
    if isinstance(order, SwapWeights):
        return WeightsSwapped(time_us, order.version, error, order.generation)
    return MemorySwitched(time_us, order.tags, isinstance(order, ReleaseDeviceMemory), error, order.generation)


def result_of(words: list[str]) -> Result:
    """Result from the words behind `collect` or `finish`."""
    result = Result()
    for word in words:
        name, equals, value = word.partition("=")
        if word == "error":
            result.error = True
        elif word == "logprobs":
            result.logprobs = True
        elif name == "text_stop":
            result.text_stops.append(value)
        elif name == "invalid":
            result.invalid.append(value)
        elif name == "grammar_ended":
            result.grammar_ended.append(value)
        elif name == "forced":
            forced, _, count = value.partition(":")
            result.forced[forced] = int(count)
        elif name == "held":
            held, _, count = value.partition(":")
            result.held[held] = int(count)
        elif equals:
            result.tokens[name] = int(value)
        elif word.startswith("b") and word[1:].isdecimal():
            result.batch_id = int(word[1:])
        elif word != "tokens":
            raise ScenarioError(
                f"`{word}` is no result; try error, tokens a=7, text_stop=a, grammar_ended=a, forced=a:2, logprobs"
            )
    return result


def usage_line(command: FinishRequest, names: Names) -> str:
    """The usage that the client is charged for."""
    counts = f"{command.prompt_tokens} prompt, {command.cached_tokens} cached, {command.output_tokens} output"
    return f"usage {names.request(command.request_id)}: {counts}"


def digest_of(name: str) -> bytes:
    """The digest of the media with this name in a scenario."""
    return sha256(name.encode()).digest()


def us(text: str) -> int:
    """Microseconds from `5ms`, `5us` or `2s`."""
    for unit, factor in (("ms", 1000), ("us", 1), ("s", 1_000_000)):
        if text.endswith(unit):
            return round(float(text.removesuffix(unit)) * factor)
    raise ScenarioError(f"`{text}` is no time; write 5ms, 5us or 2s")


def yes(text: str) -> bool:
    if text not in ("yes", "no"):
        raise ScenarioError(f"expected yes or no, got `{text}`")
    return text == "yes"
