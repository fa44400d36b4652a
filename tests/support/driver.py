"""Drives an engine through a list of actions and checks everything that can be checked after each of them.

An *action* says what happens next ("finish the oldest batch", "cancel the third live request"); one that is impossible
at the moment does nothing. So every list of actions is a legal history, and a failing one stays legal while it is cut
down. The swarm draws lists from a seed; the Hypothesis machine builds them rule by rule.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from itertools import takewhile
from math import inf
from typing import Any

import msgspec
import numpy as np

from lockstep.core import invariants
from lockstep.core.contract.commands import (
    BatchPlan,
    CompileGrammar,
    ControlAnswered,
    CopyToHost,
    EncodeMedia,
    FinishRequest,
    HybridChanges,
    LaunchBatch,
    LoadAdapter,
    LoadFromHost,
    RejectRequest,
    ReleaseDeviceMemory,
    ResumeDeviceMemory,
    SampleBatch,
    Speculation,
    Step,
    StreamTokens,
    SwapWeights,
    WriteToStorage,
)
from lockstep.core.contract.config import SCHEDULE_POLICIES, Batching, Reserve, SchedConfig
from lockstep.core.contract.events import (
    AdapterEvicted,
    AdapterLoaded,
    AdmissionDeferred,
    BatchFinished,
    BlocksEvicted,
    CancelAll,
    CancelMany,
    ClockAdvanced,
    CloseSession,
    Control,
    ControlRequested,
    DecodeSkipped,
    Drain,
    EngineRestarted,
    Flush,
    FreezeGc,
    GetState,
    Grammar,
    GrammarReady,
    LaneReady,
    LoadAdapterControl,
    MediaEncoded,
    Observed,
    OpenSession,
    PagesEvicted,
    Pause,
    PrefetchFinished,
    PrefillCompleted,
    Profile,
    PromptSpan,
    ReleaseMemory,
    RequestAdmitted,
    RequestArrived,
    RequestCancelled,
    RequestFinished,
    RequestQueued,
    RequestRejected,
    RequestRetracted,
    Resume,
    ResumeMemory,
    SessionClosed,
    SessionYielded,
    SetState,
    SlowDown,
    SwitchRole,
    TierOperationEnded,
    TokenRuns,
    TurnStarted,
    UnloadAdapterControl,
    UpdateWeights,
    WeightsSwapped,
)
from lockstep.core.journal import snapshot
from lockstep.core.requests.retraction import importance
from lockstep.core.requests.table import Request, RequestState
from lockstep.core.requests.validation import samples_asked
from lockstep.core.scheduler.engine import Engine
from tests.support.scenario import Order, answer_to
from tests.support.tagged_kv import TaggedKv
from tests.support.tagged_tiers import TaggedTiers

Action = tuple[Any, ...]

STOP_TOKEN = 7
TOKEN_BASE = 1_000_000
CONTROLS: tuple[Control, ...] = (
    Flush(),
    Pause("in_place"),
    Pause("retract"),
    Pause("cancel"),
    Resume(),
    Drain(),
    CancelAll(),
    UpdateWeights(0, "w", "wait"),  # the driver gives versions
    UpdateWeights(0, "w", "retract"),
    UpdateWeights(0, "w", "cancel"),
    UpdateWeights(0, "w", "in_place"),
    ReleaseMemory(("kv_cache",)),
    ReleaseMemory(("weights", "kv_cache")),
    ResumeMemory(("weights", "kv_cache")),
    ResumeMemory(("weights",)),
    Profile("start", 2),
    Profile("stop"),
    FreezeGc(),
    GetState(),
    SetState("max_running_requests", 1),
    SetState("max_running_requests", 2),
    SetState("schedule_conservativeness", 0.02),
    SetState("page_size", 8),
    SlowDown(7),
    SlowDown(0),
    SwitchRole("mixed"),
)
LETTING_GO = [CONTROLS.index(c) for c in (Resume(), ResumeMemory(("weights", "kv_cache")), SlowDown(0))]
SESSIONS = ("s", "t", "u")
ADAPTERS = ("law", "med", "poem")
PRIORITIES = (None, 0, 3, 5, 11, 20, 100)
QUIESCENCE_STEPS_MAX = 20_000
GRAMMARS = 8  # different ones that requests ask for


def output_token(request_id: int, number: int, stops_at: int | None) -> int:
    """Output `number` of a request: a pure function, so that every schedule must stream the same text."""
    if stops_at is not None and number == stops_at:
        return STOP_TOKEN
    return TOKEN_BASE + (request_id * 7919 + number * 104729) % 900_000


@dataclass
class Story:
    """What the world knows of one request: what it asked and what it was sent."""

    prompt_tokens: int
    max_new_tokens: int
    stops_at: int | None  # the number of the output that is STOP_TOKEN
    heeds_stop: bool  # STOP_TOKEN ends it ...
    min_new: int  # ... once it has so many outputs
    grammar: str = ""
    grammar_ends: int | None = None  # outputs after which its grammar admits nothing more
    watches_text: bool = False

    def held(self, outputs: int) -> int:
        """How many of its newest tokens may begin a stop text when it has this many outputs."""
        return min(outputs, outputs * 17 % 5) if self.watches_text else 0

    sent: list[int] = field(default_factory=list)
    ended: str = ""


class Driver:
    """One engine, a tagged KV pool behind it, and the stories of its requests."""

    def __init__(self, config: SchedConfig, *, check: bool = True) -> None:
        self.config = config  # the first; settings may change on the way
        self.engine = Engine(config)
        self.kv = TaggedKv(config, self.token_at)
        self.tiers = TaggedTiers(config.tiers, self.kv) if config.tiers is not msgspec.UNSET else None
        self.check = check
        self.now_us = 0
        self.steps = 0
        self.stories: dict[int, Story] = {}
        self.voided: list[BatchPlan] = []  # in flight when the device was lost; their results may still come
        self.orders: list[Order] = []  # about weights and memory, not answered yet
        self.controls: dict[int, str] = {}
        self.next_control = 0
        self.events: list[tuple[Observed, bytes]] = []
        self.marks: set[str] = set()
        self.bypassed: Counter[int] = Counter()  # admissions from behind each request since it waits
        self.ran: set[int] = set()  # requests that were admitted at least once
        self.left: set[int] = set()  # requests whose client cancelled
        self.encoding: list[EncodeMedia] = []  # asked of the encoder and not answered
        self.compiling: list[str] = []  # grammars asked for and not answered
        self.invalid_grammars: set[str] = set()
        self.owed: set[int] = set()  # for whom somebody was retracted: their decode comes before any admission
        self.sat_out: set[int] = set()  # microbatches whose last batch was an extend without those who decode
        self.offered = 0  # launch opportunities
        self.chunk_in = -1  # the microbatch that computed the newest chunk of the prompt that is split
        self.voided_loads: list[AdapterLoaded] = []  # answers to loads of a device that was lost
        self.evicted_adapters: set[tuple[str, int]] = set()
        self.made_room: dict[int, int] = {}  # by victim: the request it was last preempted for

    def token_at(self, request_id: int, position: int) -> int:
        """What the device samples for the position of a request."""
        story = self.stories[request_id]
        return output_token(request_id, position - story.prompt_tokens, story.stops_at)

    # -------------------------------------------------------------------------------------------------------- actions

    def do(self, action: Action) -> None:
        """Carry out one action if it is possible now."""
        name, *values = action
        getattr(self, name)(*values)

    def arrive(self, base: int, tokens: int, max_new: int, options: dict[str, Any]) -> None:
        request_id = self.engine.last_request_id + 1
        options = dict(options)
        stops_at = options.pop("stops_at", None)
        deadline = options.pop("deadline_in_us", None)
        if deadline is not None:
            options["deadline_us"] = self.now_us + deadline
        finish_by = options.pop("finish_in_us", None)
        if finish_by is not None:
            options["finish_by_us"] = self.now_us + finish_by
        start = options.get("session_start")
        if start is not None and options["session"] in self.engine.sessions.open:
            options["session_start"] = start % (self.engine.sessions.open[options["session"]].length + 1)
        eos = () if options.get("ignore_eos") else self.engine.config.eos_token_ids
        heeds_stop = STOP_TOKEN in (*eos, *options.get("stop_token_ids", ()))
        min_new = options.get("min_new_tokens", 0)
        grammar, ends = options.pop("grammar", ""), options.pop("grammar_ends", None)
        if grammar:
            options["grammar"] = Grammar("regex", grammar, grammar.encode())
        watches_text = "stop_texts" in options
        prompt = TokenRuns((base, tokens) if tokens else ())
        event = RequestArrived(
            time_us=self.now_us, request_id=request_id, prompt=prompt, max_new_tokens=max_new, **options
        )
        for number in range(samples_asked(event)):
            self.stories[request_id + number] = Story(
                tokens, max_new, stops_at, heeds_stop, min_new, grammar, ends, watches_text
            )
        self.fold(event)
        for number in range(samples_asked(event)):
            if request_id + number in self.kv.stories:
                self.kv.stories[request_id + number].grammar_ends = ends

    def encode(self, error: bool = False) -> None:
        """An encoder is done with what it was asked first; it may have been asked before a restart."""
        if self.encoding:
            command = self.encoding.pop(0)
            late = command.generation != self.engine.generation
            self.marks.add("encoder output of an older generation ignored" if late else "media encoded")
            said = "the encoder says no" if error else ""
            self.fold(MediaEncoded(self.now_us, command.digest, said, command.generation))

    def compiled(self, choice: int, error: str = "") -> None:
        """A grammar that was asked for is answered, perhaps when nobody waits for it any more."""
        if not self.compiling:
            return
        name = self.compiling.pop(choice % len(self.compiling))
        waiting = any(self.stories[request_id].grammar == name for request_id in self.engine.held)
        self.marks.add(
            ("grammar refused" if error else "grammar compiled") if waiting else "grammar compiled for nobody"
        )
        if error and self.engine.grammars.known[name.encode()].error is None:
            self.invalid_grammars.add(name)
        self.fold(GrammarReady(self.now_us, name.encode(), error))

    def compiled_again(self, choice: int, error: str = "") -> None:
        """An answer that came already, or that nobody asked for."""
        name = f"g{choice % GRAMMARS}"
        if name not in self.compiling:
            self.fold(GrammarReady(self.now_us, name.encode(), error))

    def cancel(self, choice: int) -> None:
        live = list(self.engine.requests)
        if live:
            request = self.engine.requests[live[choice % len(live)]]
            held, grammar = request.request_id in self.engine.held, request.grammar
            if grammar is not None and request.request_id in self.engine.grammars.known[grammar.digest].waiting:
                self.marks.add("grammar cancelled while compiling")
            self.marks.add("cancelled while held" if held else f"cancelled while {request.state.name}")
            self.left.add(request.request_id)
            self.fold(RequestCancelled(self.now_us, request.request_id))

    def cancel_again(self, choice: int) -> None:
        """A late echo: the request has ended, or never was."""
        ended = [request_id for request_id in self.stories if request_id not in self.engine.requests]
        self.fold(RequestCancelled(self.now_us, ended[choice % len(ended)] if ended else 10**9))

    def ready(self, *, in_turn: bool = False) -> None:
        """A slot is free: of the next microbatch, or as time will have it."""
        self.offered += 1
        further = 0 if in_turn else self.now_us // 3
        self.fold(LaneReady(self.now_us, (self.offered + further) % self.engine.config.microbatches))

    def finish(self, trouble: str = "", choice: int = 0) -> None:
        """Deliver the oldest batch in flight; with trouble, its execution or one of its tokens went wrong."""
        if not self.kv.stream:
            return
        plan = self.kv.stream[0].plan
        sampled = plan.sample_rows
        samplers = list(zip(plan.request_ids[sampled].tolist(), plan.stops[sampled].tolist(), strict=True))
        rows = len(samplers)
        if trouble == "error":
            self.fold(self.kv.finished(self.now_us, error="the device says no"))
            return
        odd = (choice % rows,) if rows and trouble else ()
        stories = [self.stories[request_id] for request_id, _ in samplers]
        outputs = [stop + 1 - story.prompt_tokens for story, (_, stop) in zip(stories, samplers, strict=True)]
        held = [story.held(have) for story, have in zip(stories, outputs, strict=True)]
        event = self.kv.finished(self.now_us)
        if any(held):
            text_held = tuple((i, count) for i, count in enumerate(held) if count)
            event = msgspec.structs.replace(event, text_held=text_held)
        if trouble == "invalid":
            event = msgspec.structs.replace(event, invalid=odd)
        elif trouble == "text_stop":
            event = msgspec.structs.replace(event, text_stops=tuple(i for i in odd if stories[i].watches_text))
        sent = [len(story.sent) for story in stories]
        self.fold(event)
        if (forced := self.kv.tell_forced(self.now_us)) is not None:
            self.fold(forced)
        for story, have, count, before in zip(stories, outputs, held, sent, strict=True):
            if count and not story.ended:
                assert len(story.sent) <= max(before, have - count), f"{count} of {have} tokens were to be held back"
                if len(story.sent) == have - count:
                    self.marks.add("text held back")

    def clock(self, us: int) -> None:
        self.now_us += us
        self.fold(ClockAdvanced(self.now_us))

    def wait(self, us: int) -> None:
        self.now_us += us

    def control(self, index: int) -> None:
        """Something other than tokens is asked for; weights come in ever newer versions, or now and then an old one."""
        control = CONTROLS[index]
        if isinstance(control, UpdateWeights):
            newest = self.engine.maintenance.newest_version()
            control = msgspec.structs.replace(control, version=newest + (self.next_control % 7 > 0))
        self.ask(control)

    def ask(self, control: Control) -> None:
        self.controls[self.next_control] = type(control).__name__
        self.next_control += 1
        self.fold(ControlRequested(self.now_us, self.next_control - 1, control))

    def cancel_many(self, choice: int) -> None:
        live = list(self.engine.requests)
        ids = [live[(choice + i) % len(live)] for i in range(2)] if live else []
        self.left |= set(ids)
        self.ask(CancelMany((*ids, 10**9)))

    def session_open(self, choice: int, capacity: int, timeout: int | None, branch: bool) -> None:
        parents = list(self.engine.sessions.open) if branch else []
        parent = parents[choice % len(parents)] if parents else ""
        part = choice % (self.engine.sessions.open[parent].length + 1) if parent and choice % 3 else None
        self.ask(OpenSession(SESSIONS[choice % len(SESSIONS)], capacity, timeout, parent, part))

    def session_close(self, choice: int) -> None:
        self.ask(CloseSession(SESSIONS[choice % len(SESSIONS)]))

    def order_done(self, error: str = "") -> None:
        """The host answers the oldest order about weights or memory."""
        if self.orders:
            self.fold(answer_to(self.orders.pop(0), self.now_us, error))

    def order_late(self) -> None:
        """An order from before a restart is answered after all; it is void."""
        if self.engine.generation:
            self.marks.add("answer of an older generation ignored")
            self.fold(WeightsSwapped(self.now_us, 1, generation=self.engine.generation - 1))

    def load_adapter(self, index: int, newer: int, pinned: bool) -> None:
        """Load an adapter: its version again (0), a newer one, or an older one (-1)."""
        name = ADAPTERS[index]
        self.ask(LoadAdapterControl(name, self.kv.versions.get(name, 1) + newer, pinned))

    def unload_adapter(self, index: int) -> None:
        if any(load.adapter == ADAPTERS[index] for load in self.kv.loads):
            self.marks.add("adapter unloaded while loading")
        self.ask(UnloadAdapterControl(ADAPTERS[index]))

    def adapter_loaded(self, choice: int, error: str = "") -> None:
        """A load ends, not necessarily the oldest."""
        if self.kv.loads:
            load = self.kv.loads[choice % len(self.kv.loads)]
            self.marks.add("adapter load failed" if error else "adapter loaded")
            self.fold(AdapterLoaded(self.now_us, load.adapter, load.version, error, self.engine.generation))

    def move(self, choice: int, share: float = 1.0, error: str = "") -> None:
        """A move between cache tiers ends, not necessarily the oldest, with a share of its pages moved."""
        if self.tiers is not None and self.tiers.moves:
            move = list(self.tiers.moves.values())[choice % len(self.tiers.moves)]
            cut = not error and choice % 2 == 1 and self.tiers.cut_short(move)
            answer = self.tiers.answer(move, self.now_us, int(share * self.tiers.found(move)), error, cut=cut)
            self.fold(answer)

    def late_move(self) -> None:
        """A move from before a restart is answered after all; it is void."""
        if self.tiers is not None and self.tiers.voided:
            self.marks.add("move of an older generation ignored")
            self.fold(msgspec.structs.replace(self.tiers.voided.pop(0), time_us=self.now_us))

    def restart(self) -> None:
        """The device and everything in flight on it are gone."""
        self.marks.add("restart with work in flight" if self.kv.stream else "restart")
        self.voided += [launched.plan for launched in self.kv.stream]
        self.orders = []
        self.voided_loads += [
            AdapterLoaded(0, load.adapter, load.version, generation=self.engine.generation) for load in self.kv.loads
        ]
        self.fold(EngineRestarted(self.now_us, self.engine.generation + 1))

    def late(self) -> None:
        """A result from before a restart arrives after all; it is void."""
        if self.voided:
            plan = self.voided.pop(0)
            tokens = np.zeros(len(plan.sample_rows), np.int32).tobytes()
            self.marks.add("result of an older generation ignored")
            self.fold(BatchFinished(self.now_us, plan.batch_id, tokens, generation=plan.generation))

    def late_load(self) -> None:
        """The same for a load."""
        if self.voided_loads:
            self.marks.add("load of an older generation ignored")
            self.fold(msgspec.structs.replace(self.voided_loads.pop(0), time_us=self.now_us))

    def snapshot(self) -> None:
        """Go on with a restored copy."""
        image = snapshot.dump(self.engine)
        self.engine = snapshot.restore(image)
        assert snapshot.dump(self.engine) == image, "a restored engine dumps to other bytes"

    # ----------------------------------------------------------------------------------------------------------- checks

    def fold(self, event: Observed) -> None:
        """Give the engine one event; hold its Step against the stories."""
        chunked = self.engine.prefilling.request_id if self.engine.prefilling is not None else None
        line, held = [request.request_id for request in self.engine.waiting], list(self.engine.held)
        idle, live = not self.engine.in_flight, dict(self.engine.requests)
        unloading = list(self.engine.memory.adapters.withdrawals)
        followers = {
            leader: [one.request_id for one in them] for leader, them in self.engine.prerequisites.followers.items()
        }
        places = self._places()
        step = self.engine.step(event)
        admitted = [event.request_id for event in step.decided if isinstance(event, RequestAdmitted)]
        passed_by = {request_id: self.bypassed.get(request_id, 0) for request_id in admitted}
        self._count_bypasses(line, [one for one in held if one not in self._behind_the_pass(followers, step)], step)
        self.steps += 1
        if isinstance(event, PrefetchFinished) and event.blocks and event.generation == self.engine.generation:
            self.marks.add("companions fetched" if event.pages_done else "companions alone fetched")
        for decided in step.decided:
            if isinstance(decided, RequestQueued):
                self.stories[decided.request_id].prompt_tokens = decided.prompt_tokens
        self.events.append((event, step.digest))
        for command in step.commands:
            match command:
                case StreamTokens():
                    self._streamed(command)
                case FinishRequest():
                    self._ended(command.request_id, command.reason, command.output_tokens)
                case RejectRequest():
                    self._ended(command.request_id, "rejected", 0)
                case EncodeMedia():
                    self.encoding.append(command)
                case ControlAnswered(control_id, ok):
                    name = self.controls.pop(control_id, None)
                    assert name, f"control {control_id} was answered twice"
                    self.marks.add(f"{name} done" if ok else f"{name} refused")
                case SwapWeights() | ReleaseDeviceMemory() | ResumeDeviceMemory():
                    self.orders.append(command)
                case LaunchBatch(plan, sample):
                    assert not self.orders, f"launched while the host works on {self.orders}"
                    if sample == "deferred" and plan.sample_after is not None:
                        self.marks.add("sampling deferred")
                case CompileGrammar(grammar):
                    self.compiling.append(grammar.source)
                case SampleBatch(batch_id):
                    if any(batch.dead and batch.plan.batch_id == batch_id for batch in self.engine.in_flight):
                        self.marks.add("dead row sampled")
        if self.tiers is not None:
            self.tiers.before(event, step)
        self.kv.observe(event, step)
        if self.tiers is not None:
            self.tiers.observe(event, step)
        self._hold_to_promises(step)
        self._hold_to_preemption(step, live, passed_by, idle)
        if places is not None and isinstance(event, LaneReady):
            self._hold_to_places(step, places, event.microbatch)
        if unloading and unloading != list(self.engine.memory.adapters.withdrawals):
            self.marks.add("unload waited for users")
        self._mark(step, chunked)
        if followers:
            for leader in followers.keys() - self.engine.prerequisites.followers.keys():
                self.marks.add("samples follow" if leader in self.engine.requests else "another sample leads")
        if self.check:
            invariants.check(self.engine)

    def _behind_the_pass(self, followers: dict[int, list[int]], step: Step) -> list[int]:
        """Samples whose leader's prompt is shared with what is launched, or was computed: they join behind the pass."""
        done = [event.request_id for event in step.decided if isinstance(event, PrefillCompleted)]
        return [follower for leader in done for follower in followers.get(leader, ())]

    def _count_bypasses(self, line: list[int], held: list[int], step: Step) -> None:
        """L5, counted by other means than the engine's: nobody is passed by more than `bypass_limit` times a wait.

        `held`: who, if held no more, joined the line before anybody left it in this step: an end made that possible.
        """
        limit = self.engine.config.bypass_limit
        turns = [event.request_id for event in step.decided if isinstance(event, TurnStarted)]
        for request_id in held:
            if request_id in self.engine.requests and request_id not in (*self.engine.held, *turns):
                self._join(line, request_id)
        for event in step.decided:
            match event:
                case RequestRetracted(_, request_id) if event.reason != "preempted":  # those join behind the pass
                    front = self.engine.config.retracted_requeue == "front"
                    older = takewhile(lambda other, mine=request_id: other in self.ran and other < mine, line)
                    line.insert(len(list(older)) if front else len(line), request_id)
                case AdmissionDeferred(_, request_id, "media") if request_id in line:  # its media are gone
                    line.remove(request_id)
                case TurnStarted(_, request_id):  # it was held, and joins the line in this very step
                    self._join(line, request_id)
                case RequestRejected(_, request_id) | RequestFinished(_, request_id) if request_id in line:
                    line.remove(request_id)
                case RequestAdmitted(_, request_id):
                    self.ran.add(request_id)
                    ahead = line[: line.index(request_id)]
                    line.remove(request_id)
                    self.bypassed.pop(request_id, None)
                    self.bypassed.update(ahead)
                    if limit is not None and any(self.bypassed[other] >= limit > 0 for other in ahead):
                        self.marks.add("bypass limit reached")
        for request in self.engine.waiting:
            passed = self.bypassed.get(request.request_id, 0)
            assert limit is None or passed <= limit, f"L5: {request.name} was passed by {passed} times"
            assert request.bypassed == passed, f"L5: {request.name} counts {request.bypassed}, it was {passed}"

    def _join(self, line: list[int], request_id: int) -> None:
        """Put a request that is held no more where its arrival puts it."""
        younger = [i for i, other in enumerate(line) if other not in self.ran and other > request_id]
        line.insert(younger[0] if younger else len(line), request_id)

    def _streamed(self, command: StreamTokens) -> None:
        """S20: in order, no gap, no duplicate, and the very tokens of the request."""
        at = 0
        for request_id, offset, count in zip(
            command.request_ids.tolist(), command.offsets.tolist(), command.token_counts.tolist(), strict=True
        ):
            story = self.stories[request_id]
            assert not story.ended, f"r{request_id} got tokens after its end"
            assert offset == len(story.sent), f"r{request_id} got output {offset} after {len(story.sent)}"
            tokens = command.tokens[at : at + count].tolist()
            expected = [output_token(request_id, offset + i, story.stops_at) for i in range(count)]
            assert tokens == expected, f"r{request_id} got {tokens} at {offset}, its tokens are {expected}"
            story.sent += tokens
            at += count

    def _ended(self, request_id: int, reason: str, outputs: int) -> None:
        """S16: once; and everything produced was sent before."""
        story = self.stories[request_id]
        assert not story.ended, f"r{request_id} ended twice: {story.ended}, {reason}"
        story.ended = reason
        if request_id not in self.left:  # only who left may miss tokens
            assert len(story.sent) == outputs, f"r{request_id} ended with {outputs} outputs, {len(story.sent)} sent"
        if reason == "stop":
            assert story.sent[-1] == STOP_TOKEN
            assert story.heeds_stop
        if reason == "length":
            config = self.engine.config
            room = min(config.context_tokens_max, config.pages * config.page_size + 1) - story.prompt_tokens
            asked = min(story.max_new_tokens, room)
            assert outputs == asked, f"S36: r{request_id} ended with {outputs} outputs, of {asked}"
        if reason == "length" and story.heeds_stop and story.stops_at is not None and story.stops_at >= story.min_new:
            assert outputs <= story.stops_at, f"r{request_id} ran past its stop token"
        if story.grammar and story.grammar_ends is not None and reason in ("length", "grammar"):
            assert (outputs >= story.grammar_ends) == (reason == "grammar"), f"S22: r{request_id} ended by {reason}"

    def _hold_to_promises(self, step: Step) -> None:
        """What no single state shows: budgets of each extend, the decode owed after a retraction, timers."""
        config = self.engine.config
        made_room = False
        for event in step.decided:
            match event:
                case TurnStarted():
                    story = self.stories[event.request_id]
                    story.prompt_tokens, story.max_new_tokens = event.prompt_tokens, event.max_new_tokens
                case RequestRetracted(_, request_id, reason="pages"):
                    assert config.reserve != "full", f"r{request_id} was retracted, but all it needed was reserved"
                    made_room = True
                case RequestAdmitted(_, request_id):
                    assert not made_room, f"r{request_id} was admitted in the step that made room for a decode"
                    assert not self.owed, f"r{request_id} was admitted before the decode of {self.owed}"
                    grammar = self.stories[request_id].grammar
                    assert grammar not in self.invalid_grammars, f"r{request_id} runs under an invalid grammar"
                    active, most = self.engine.active, config.max_running_requests
                    assert active <= most, f"S24: r{request_id} is admitted as one of {active}, at most {most} may run"
                case RequestRetracted(_, request_id):
                    self.owed.discard(request_id)
                case RequestFinished(_, request_id, reason):
                    assert reason != "out_of_kv", f"r{request_id} ended {reason}: entry lets nobody in who cannot go on"
                    self.owed.discard(request_id)
        plan = step.launched()
        if made_room:
            self.owed = {request.request_id for request in self.engine.running_batch.requests}
        if plan is not None and plan.mode in ("decode", "verify"):
            self.owed = set()
        if plan is not None and config.decode_look_ahead == config.decode_steps_per_launch == 1:
            self._minimal(step)
        if plan is not None and config.batching != "prefill_first":
            self._sits_out(plan)
        if plan is not None and plan.extend_rows:
            new_tokens = (plan.stops - plan.starts)[: plan.extend_rows].tolist()
            unit = config.chunk_unit_tokens
            charged = sum(-(-tokens // unit) * unit for tokens in new_tokens)
            decodes = len(plan.rows) - plan.extend_rows
            for limit in (config.chunked_prefill_size, config.max_prefill_tokens):
                alone = (
                    limit is config.max_prefill_tokens and config.chunked_prefill_size is None and len(new_tokens) == 1
                )
                if limit is not None and not alone:
                    assert charged <= max(limit - decodes, config.page_size), f"S24: {charged} new tokens"
            if config.prefill_max_requests is not None:
                assert plan.extend_rows <= config.prefill_max_requests
            if decodes:
                self.marks.add("mixed batch")
        wakes = step.wake_at_us if step.wake_at_us is not None else inf
        for request in self.engine.requests.values():
            timers = (request.finish_by_us, request.deadline_us if not request.ran else None, request.grammar_due_us)
            for due in timers:
                assert due is None or wakes <= due, "a timer nobody wakes for"

    def _minimal(self, step: Step) -> None:
        """S27: nobody gives way in vain: with the last victim still there, the decode would not have fit."""
        if self.engine.memory.hybrid.present:
            return  # another pool may have been the short one
        victims = [event for event in step.decided if isinstance(event, RequestRetracted) and event.reason == "pages"]
        for victim in victims[-1:]:
            tokens = self.stories[victim.request_id].prompt_tokens + victim.output_tokens + victim.tokens_discarded
            left, most = self.engine.memory.available_pages, -(-tokens // self.engine.config.page_size)
            assert left <= most, f"S27: {left} pages are left over, r{victim.request_id} gave back {most} at most"

    def _sits_out(self, plan: BatchPlan) -> None:
        """Whoever decodes is in every mixed batch. It sits out once at a time: for an extend that runs alone, or for
        want of pages, unless it goes first."""
        going = self.engine.running_batch.request_ids
        if self.engine.config.speculates:  # who may stand at its end waits for the result that says so
            going = going[self.engine.positions + 1 < self.engine.running_batch.limits]
        left_out = set(going.tolist()) - set(plan.request_ids.tolist())
        if left_out:
            assert plan.microbatch not in self.sat_out, f"r{min(left_out)} sat out twice in a row"
            alone = any(request.needs_plain_extend for request in self.engine.in_flight[-1].requests)
            assert alone or self.engine.config.batching == "mixed", f"r{min(left_out)} runs first, but sits out"
            self.marks.add("decode sits out beside an extend")
        self.sat_out.discard(plan.microbatch)
        if left_out:
            self.sat_out.add(plan.microbatch)

    def _hold_to_preemption(self, step: Step, live: dict[int, Request], passed_by: dict[int, int], idle: bool) -> None:
        """S27, B14: victims are less important by more than the threshold, and start again only after whom they made
        room for. So whenever a request is preempted again, a more important one has started or left in between.

        Of before the step: who was `live`, by how many each it admitted had been passed, whether nothing was in flight.
        """
        engine, threshold = self.engine, self.engine.config.priority_preemption_threshold
        admitted, limit = list(passed_by), engine.config.bypass_limit
        plan = step.launched()
        launched = [] if plan is None else plan.request_ids.tolist()
        urgent = [one for one in admitted if limit is not None and passed_by[one] + len(admitted) > limit]
        for request_id in admitted:
            awaited = engine.requests.get(self.made_room.pop(request_id, -1))
            if awaited is not None and awaited.state is RequestState.WAITING:
                alone = (
                    awaited.deferred in ("adapter", "load", "prefetch") or awaited.behind >= 0 or awaited.holds
                )  # passed by for its own sake
                assert alone or request_id in urgent, f"B14: r{request_id} is back before {awaited.name} started"
        if admitted and self.made_room:
            self.made_room = {victim: other for victim, other in self.made_room.items() if other not in admitted}
        for event in step.decided:
            match event:
                case RequestRetracted(reason="preempted", request_id=victim, beneficiary=beneficiary):
                    above = importance(live[beneficiary], engine.config) - importance(live[victim], engine.config)
                    assert above > threshold, f"S27: r{victim} for r{beneficiary}"
                    assert victim not in admitted, f"S26: r{victim} started in the step that preempted it"
                    goes_on = beneficiary in admitted or beneficiary in launched or self._waits_for_writes()
                    assert not idle or goes_on, f"S8: r{victim} was preempted for nothing"
                    if beneficiary not in admitted:
                        self.made_room[victim] = beneficiary
                    self.marks.add("preemption across priorities")
                    if beneficiary not in admitted:
                        self.marks.add("pages of a preempted request awaited")
        lacking = engine.requests.get(engine.deferred[0]) if engine.deferred is not None else None
        if lacking is not None and engine.config.enable_priority_preemption and step.launched() is not None:
            rank = importance(lacking, engine.config)
            below = [rank - importance(member, engine.config) for member in engine.everybody[0].requests]
            if below and 0 < max(below) <= threshold:
                self.marks.add("preemption refused by threshold")
            if below and max(below) > threshold:
                self.marks.add("preemption would not be enough")

    def _waits_for_writes(self) -> bool:
        """Whether the KV of the retracted, which the radix cache has now, is being written to host memory first."""
        tiers = self.engine.memory.tiers
        return self.engine.config.retracted_kv == "cache" and tiers.device_busy

    def _places(self) -> tuple[dict[int, int], list[int]] | None:
        """Who has a place in which microbatch, and who ends whatever comes back; None: there is but one microbatch."""
        if not self.engine.microbatches.several:
            return None
        ending = [request.request_id for batch in self.engine.in_flight for request in batch.ending_requests()]
        return dict(self.engine.microbatches.members), ending

    def _hold_to_places(self, step: Step, places: tuple[dict[int, int], list[int]], at: int) -> None:
        """S27 of microbatches: a place is had where one is free or comes free, before anybody is preempted for it."""
        (members, ending), several = places, self.engine.microbatches
        victims = [one for one in step.decided if isinstance(one, RequestRetracted) and one.reason == "preempted"]
        victims = [one for one in victims if one.beneficiary not in members]  # the split prompt has a place
        if not victims:
            return
        for event in step.decided:  # whoever left before gave its place
            if isinstance(event, RequestFinished):
                members.pop(event.request_id, None)
        taken = Counter(number for request_id, number in members.items() if request_id not in ending)
        free = [several.size - taken[number] for number in range(several.count)]
        if any(members[victim.request_id] != at for victim in victims):
            self.marks.add("preempted in another microbatch")
        if free[at] > 0:
            return
        assert max(free) <= 0, f"S27: {victims} for a place in microbatch {at}, and there are {free}"
        assert any(members[victim.request_id] == at for victim in victims), f"S27: {victims} have no place in {at}"
        self.marks.add("preempted for a place")

    def _mark(self, step: Step, chunked: int | None) -> None:
        """Rare branches that a campaign must reach, or it was too tame."""
        for event in step.decided:
            match event:
                case RequestRetracted(_, request_id, _, _, discarded, reason):
                    self.marks.add(f"retracted ({reason})")
                    if discarded:
                        self.marks.add(f"retraction with {discarded} tokens in flight")
                    if request_id == chunked:
                        self.marks.add("retraction of a chunked request")
                case PagesEvicted(_, _, reason):
                    self.marks.add(f"evicted ({reason})")
                case RequestRejected(_, _, reason, _):
                    self.marks.add(f"rejected ({reason})")
                case RequestQueued(truncated_tokens=cut) if cut:
                    self.marks.add("prompt truncated")
                case RequestFinished(_, _, reason):
                    self.marks.add(f"finished ({reason})")
                case AdmissionDeferred(reason="prefix"):
                    self.marks.add("deferred (prefix)")
                case DecodeSkipped() if step.launched() is None:
                    self.marks.add("decode waits for fenced pages")
                case SessionYielded():
                    self.marks.add("session yielded")
                case SessionClosed(_, _, _, reason):
                    self.marks.add(f"session closed ({reason})")
                case TurnStarted(_, request_id, name, kept):
                    self.marks.add("turn started")
                    if kept and kept < self.engine.sessions.open[name].length:
                        self.marks.add("turn rewound")
                case AdapterEvicted(_, name, version):
                    self.evicted_adapters.add((name, version))
                case AdmissionDeferred(reason="adapter"):
                    self.marks.add("deferred for its adapter")
                case AdmissionDeferred(reason="load" | "prefetch" as reason):
                    self.marks.add(f"deferred ({reason})")
                case AdmissionDeferred(reason="microbatch"):
                    self.marks.add("deferred (microbatch)")
                case AdmissionDeferred(reason="window" | "state" as reason):
                    self.marks.add(f"deferred ({reason})")
                case BlocksEvicted(_, kind):
                    self.marks.add(f"evicted ({kind})")
                case TierOperationEnded(_, _, kind, outcome):
                    self.marks.add(f"{kind} {outcome}")
                case RequestAdmitted(host_tokens=tokens) if tokens:
                    self.marks.add("started behind loaded pages")
        for command in step.commands:
            if isinstance(command, CopyToHost | LoadFromHost) and command.blocks:
                alone = "" if command.host_pages.size else " alone"
                done = "written" if isinstance(command, CopyToHost) else "loaded"
                self.marks.add(f"companions{alone} {done}")
            if isinstance(command, WriteToStorage) and command.blocks:
                self.marks.add("companions stored" if command.keys else "companions alone stored")
            if isinstance(command, LoadAdapter) and (command.adapter, command.version) in self.evicted_adapters:
                self.marks.add("adapter evicted between two uses")
        memory, media = self.engine.memory, self.engine.media
        if memory.weights_version:
            if any(r.row >= 0 and memory.is_stale(r.namespace) for r in self.engine.requests.values()):
                self.marks.add("running across a change of weights")
        if any(isinstance(command, EncodeMedia) for command in step.commands):
            if any(isinstance(event, RequestRetracted) for event in step.decided):
                self.marks.add("retraction asks for media again")
        plan = step.launched()
        if plan is not None and plan.hybrid is not None:
            self._mark_hybrid(plan.hybrid)
        if plan is not None and plan.speculation is not None:
            self._mark_drafts(plan, plan.speculation)
        if plan is not None and self.engine.microbatches.several:
            self._mark_microbatch(plan, chunked)
        if plan is not None and (plan.logprob_spans or plan.hidden_spans):
            for span in (*plan.logprob_spans, *plan.hidden_spans):
                if span.start > int(plan.starts[span.index]):
                    self.marks.add("results wanted from inside an extend")
        if media.deferred:
            self.marks.add("encoder output fenced")
        for request in self.engine.held.values():
            if request.holds > 1:
                self.marks.add("held for several things")
            if request.session and request.extras is not None and request.extras.awaits_media:
                self.marks.add("turn waits for its media")
        if media.encodings and any(encoding.outdated for encoding in media.encodings.values()):
            self.marks.add("encoder output outdated by new weights")
        if memory.deferred_frees:
            self.marks.add("row leased to work in flight")
        if memory.deferred_pages:
            self.marks.add("duplicate pages fenced")

    def _mark_microbatch(self, plan: BatchPlan, chunked: int | None) -> None:
        flying = {batch.plan.microbatch for batch in self.engine.in_flight}
        if len(flying) == self.engine.config.microbatches:
            self.marks.add("every microbatch in flight")
        if plan.hybrid is not None and len(flying) > 1:
            if plan.hybrid.pages.size:
                self.marks.add("windows opened beside another microbatch")
            if plan.hybrid.checkpoint_slots.size:
                self.marks.add("checkpoint left beside another microbatch")
        if chunked is not None and chunked in plan.request_ids[: plan.extend_rows].tolist():
            if plan.microbatch != self.chunk_in:
                self.marks.add("chunk in another microbatch")
        if self.engine.prefilling is not None:
            self.chunk_in = plan.microbatch

    def _mark_hybrid(self, changes: HybridChanges) -> None:
        if (changes.state_sources >= 0).any():
            self.marks.add("started from a checkpoint")
        if changes.checkpoint_slots.size:
            self.marks.add("checkpoint left")

    def _mark_drafts(self, plan: BatchPlan, speculation: Speculation) -> None:
        drafts, wanted = speculation.draft_lengths, speculation.draft_tokens
        self.marks.add(f"{plan.mode} batch with drafts" if drafts.any() else "drafts left out")
        if plan.starts_after:
            self.marks.add("start left open")
        if speculation.forced_lengths.any():
            self.marks.add(f"{plan.mode} batch with forced tokens")
            if speculation.drafted().any():
                self.marks.add("forced tokens beside drafts")
        flying = self.engine.in_flight
        if len({other.plan.microbatch for other in flying if other.verifies}) > 1:
            self.marks.add("drafts of several microbatches in flight")
        if len({other.plan.microbatch for other in flying}) > 1 and speculation.forced_lengths.any():
            self.marks.add("forced tokens beside another microbatch")
        if any(other.dead for other in self.engine.in_flight if other.verifies):
            self.marks.add("dead row verified")
        if len(plan.rows) - plan.extend_rows < self.engine.running_batch.size:
            self.marks.add("sits out at its end")
        if drafts.size > 1 and 0 < drafts.min() < wanted:
            self.marks.add("fewer drafts")

    def settle(self) -> None:
        """Liveness mode: faults and arrivals stop, completions flow; everything must end, and leave nothing behind."""
        for control in (Resume(), ResumeMemory(("weights", "kv_cache")), SlowDown(0)):
            self.do(("control", CONTROLS.index(control)))
        for _ in range(QUIESCENCE_STEPS_MAX):
            moving = self.tiers is not None and bool(self.tiers.moves)
            if invariants.is_idle(self.engine) and not self.orders and not self.kv.loads and not moving:
                break
            self.now_us += 1
            self.move(0)
            self.order_done()
            self.encode()
            self.adapter_loaded(0)
            in_flight = len(self.kv.stream)
            if self.engine.config.grammar_timeout_us is None:  # otherwise they never come, and that ends too
                self.compiled(0)
            self.ready(in_turn=True)
            if len(self.kv.stream) == in_flight:
                self.finish()
        assert invariants.is_idle(self.engine), (
            f"L1: after {QUIESCENCE_STEPS_MAX} steps {list(self.engine.requests)} have not ended"
        )
        invariants.check_quiescent(self.engine)
        for name in list(self.engine.sessions.open):
            self.ask(CloseSession(name))
        self.do(("control", CONTROLS.index(Flush())))
        if self.check:
            assert self.engine.memory.pool.free_count == self.engine.config.pages, "L9: a flush leaves pages behind"
            tiers = self.engine.memory.tiers
            if tiers.present:
                assert tiers.pool.free_count == tiers.pool.total, "L9: a flush leaves host pages behind"
            self._hybrid_is_free()
        assert not self.controls, f"L8: never answered: {self.controls}"
        unended = [request_id for request_id, story in self.stories.items() if not story.ended]
        assert not unended, f"L1: no terminal event for {unended}"

    def _hybrid_is_free(self) -> None:
        hybrid = self.engine.memory.hybrid
        if hybrid.window is not None:
            pool = hybrid.window.pool
            assert pool.free_count == pool.total, "L9: a flush leaves window pages behind"
        if hybrid.states is not None:
            pool = hybrid.states.pool
            assert pool.free_count == pool.total, "L9: a flush leaves slots of state behind"

    def replayed(self) -> None:
        """S35: the recorded events give the same digests in a fresh engine."""
        engine = Engine(self.config)
        for number, (event, digest) in enumerate(self.events):
            assert engine.step(event).digest == digest, f"S35: replay differs at event {number}, {event}"


# ------------------------------------------------------------------------------------------------------------ the swarm


def random_config(rng: random.Random) -> SchedConfig:
    """Settings that favour 0, 1, the edge and one beyond it."""
    page_size = rng.choice([1, 1, 2, 4, 16, 64])
    chunk = rng.choice([None, page_size, 3 * page_size, max(page_size, 64)])
    radix = rng.random() < 0.85
    policies = [policy for policy in SCHEDULE_POLICIES if radix or policy not in ("lpm", "dfs-weight")]
    policy = rng.choice(["fcfs", "priority", rng.choice(policies), rng.choice(policies)])
    preempts = policy == "priority" and rng.random() < 0.7
    batching: Batching = rng.choice(["prefill_first", "prefill_first", "mixed", "running_first"])
    input_tokens = rng.choice([page_size, page_size + 1, 64, 4096])
    may_align = batching == "prefill_first" and min(chunk or input_tokens, input_tokens) >= 2 * page_size
    config = SchedConfig(
        page_size=page_size,
        pages=rng.choice([2, 3, rng.randint(2, 12), rng.randint(8, 80), max(2, 150 // page_size)]),
        radix_cache=radix,
        same_step_sharing=radix and rng.random() < 0.3,
        radix_capacity_pages=rng.choice([None, None, 1, 5]) if radix else None,
        context_tokens_max=rng.choice([8, 60, 200, 10**6]),
        max_running_requests=rng.choice([1, 2, 4, 16]),
        max_queued_requests=rng.choice([None, None, 1, 4]),
        waiting_timeout_us=rng.choice([None, None, 40]),
        running_timeout_us=rng.choice([None, None, 90]),
        schedule_policy=policy,
        enable_priority_preemption=preempts,
        priority_preemption_threshold=rng.choice([0, 1, 10]),
        schedule_conservativeness=rng.choice([0.02, 0.02, 0.3, 1.0, 2.0]),
        max_prefill_tokens=input_tokens,
        chunked_prefill_size=chunk,
        retracted_requeue=rng.choice(["tail", "front"]),
        batching=batching,
        truncation_align_size=rng.choice([None, 2 * page_size]) if may_align else None,
        reserve=rng.choice(["ratio", "ratio", "ratio", "on_demand", "full"]),
        retraction_policy="priority" if preempts else rng.choice(["length", "newest", "priority"]),
        prefill_max_requests=rng.choice([None, None, 1, 2]),
        decode_steps_per_launch=rng.choice([1, 1, 1, 1, 2, 4]),
        chunk_target_us=rng.choice([None, None, 3]) if chunk else None,
        decode_look_ahead=rng.choice([1, 1, 2, 5]),
        prefill_decode_interval=rng.choice([0, 0, 0, 1, 3]),
        waiting_prefix_refresh=rng.choice([0, 0, 1, 3]) if radix else 0,
        overlap_consecutive_prefills=rng.random() < 0.8,
        retract_every=rng.choice([0, 0, 0, 1, 3]),
        overlap_depth=rng.choice([0, 1, 2]),
        stream_interval=rng.choice([1, 1, 3]),
        force_stream_interval=rng.choice([2, 50]),
        eos_token_ids=rng.choice([(), (STOP_TOKEN,), (STOP_TOKEN, 8)]),
        grammar_timeout_us=rng.choice([None, None, 30]),
        max_input_tokens=rng.choice([None, None, None, 2, 20]),
        truncate_input=rng.choice(["no", "left", "right"]),
        isolate_tenants=rng.choice([False, True]),
        encoder_cache_tokens=rng.choice([None, 3, 5, 8]),
        **_random_order(rng, radix, preempts),
        session_kv=rng.choice(["hold", "hold", "evictable"]),
        max_sessions=rng.choice([2, 1024]),
        max_loras=rng.choice([None, None, None, 1, 2, 3]),
        **_beside(rng, radix),
    )
    return drafting(rng, config, 0.3)


def _random_order(rng: random.Random, radix: bool, preempts: bool = False) -> dict[str, Any]:
    """Settings of the waiting line that go with any policy."""
    return {
        "schedule_seed": rng.choice([0, 1, 2**63 - 1]),
        "schedule_low_priority_values_first": rng.random() < 0.3,
        "default_priority_value": rng.choice([None, None, 0, 1]),
        "prefix_deduplication": rng.choice(["off", "last", "defer", "defer"]) if radix else "off",
        "bypass_limit": rng.choice([None, 1 if preempts else 0, 1, 2, 5, 256]),
    }


def _beside(rng: random.Random, radix: bool) -> dict[str, Any]:
    """Later settings, drawn beside the others: a seed's other settings and its actions stay what they were."""
    own = random.Random()
    own.setstate(rng.getstate())
    return {
        "chunk_unit": own.choice(["page", "page", "token"]),
        "retracted_kv": own.choice(["free", "free", "cache"]) if radix else "free",
        "encoder_budget_tokens": own.choice([msgspec.UNSET, 1, 4]),
    }


def drafting(rng: random.Random, config: SchedConfig, share: float) -> SchedConfig:
    """The settings, for a share of the seeds with drafts, or jumps; nothing else is drawn differently."""
    own = random.Random()
    own.setstate(rng.getstate())
    drawn = own.random()
    if config.decode_steps_per_launch > 1:
        return config
    jumps = random.Random(f"jumps {drawn}")
    if jumps.random() < 0.4:
        config = msgspec.structs.replace(config, jump_forward_tokens=jumps.choice([1, 2, 5, 16]))
    if drawn >= share:
        return config
    return msgspec.structs.replace(
        config,
        speculative_method="ngram",
        num_speculative_tokens=own.choice([1, 2, 3, 8]),
        speculative_min_chance=own.choice([msgspec.UNSET, msgspec.UNSET, 0.2, 0.6]),
        speculative_max_batch_size=own.choice([msgspec.UNSET, msgspec.UNSET, msgspec.UNSET, 2]),
    )


def pipelined(rng: random.Random, config: SchedConfig) -> SchedConfig:
    """The settings with microbatches, and without what does not go with them."""
    splits = config.chunked_prefill_size is not None and config.truncation_align_size is None
    return msgspec.structs.replace(
        config,
        overlap_consecutive_prefills=True,
        pp_size=rng.choice([2, 2, 3]),
        pp_async_batch_depth=rng.choice([0, 0, 1]),
        pp_max_micro_batch_size=rng.choice([msgspec.UNSET, 1, 2, 1 if config.enable_priority_preemption else 16]),
        pp_dynamic_chunking=splits and rng.random() < 0.3,
    )


def pressed_config(rng: random.Random) -> SchedConfig:
    """Settings under which running requests outgrow the pool, or just do not: short prompts, long outputs."""
    page_size = rng.choice([1, 2, 4])
    preempts = rng.random() < 0.5
    reserve: Reserve = rng.choice(["ratio", "ratio", "on_demand", "full"])
    config = SchedConfig(
        page_size=page_size,
        pages=rng.randint(40, 80) // page_size,
        max_running_requests=rng.choice([4, 8]),
        schedule_conservativeness=0.02,
        batching=rng.choice(["prefill_first", "mixed", "running_first"]),
        reserve=reserve,
        retract_every=rng.choice([0, 5]) if reserve == "full" else 0,
        retraction_policy="priority" if preempts else rng.choice(["length", "newest", "priority"]),
        retracted_requeue=rng.choice(["tail", "front"]),
        chunked_prefill_size=rng.choice([None, 4, 8]),
        overlap_depth=rng.choice([0, 1, 2]),
        radix_cache=(radix := rng.random() < 0.7),
        schedule_policy="priority" if preempts else rng.choice(["fcfs", "lof", "priority", "spf"]),
        **_random_order(rng, radix, preempts),
        enable_priority_preemption=preempts,
        **_beside(rng, radix),
    )
    return drafting(rng, config, 0.4)


def pressed_actions(rng: random.Random, count: int) -> list[Action]:
    """A trickle of requests, alone or three at once, that all want much of the pool."""
    names = rng.choices(["arrive", "ready", "finish", "cancel", "snapshot"], [0.6, 6, 5, 0.1, 0.1], k=count)
    actions: list[Action] = []
    for name in names:
        if name == "arrive":
            for _ in range(rng.choice([1, 1, 3])):
                options = {"priority": rng.choice(PRIORITIES)}
                actions.append(("arrive", 1 + rng.randrange(3), rng.randint(1, 12), rng.randint(10, 39), options))
        else:
            actions.append(_random_action(rng, name, 3, 3, 1))
    return actions


def crowded_config(rng: random.Random) -> SchedConfig:
    """A pool with room for a few long prompts, so that many wait for their turn."""
    page_size = rng.choice([1, 4, 16])
    return SchedConfig(
        page_size=page_size,
        pages=rng.randint(200, 400) // page_size,
        max_running_requests=rng.choice([2, 4, 8]),
        schedule_policy=rng.choice(SCHEDULE_POLICIES),
        chunked_prefill_size=rng.choice([None, 16, 48]),
        max_prefill_tokens=rng.choice([64, 4096]),
        overlap_depth=rng.choice([0, 1, 2]),
        same_step_sharing=rng.random() < 0.5,
        **_random_order(rng, radix=True),
    )


def crowded_actions(rng: random.Random, count: int) -> list[Action]:
    """Many requests with long prompts that begin alike, and short outputs."""
    names = ["arrive", "ready", "finish", "wait", "cancel", "snapshot", "trouble"]
    weights = [3, 5, 4, 1, 0.2, 0.2, rng.choice([0, 0.8])]
    return [_random_action(rng, name, 90, 4, 2) for name in rng.choices(names, weights, k=count)]


def random_actions(rng: random.Random, count: int, *, adapters: bool = False) -> list[Action]:
    """A history with random features left out altogether: features suppress one another (Groce et al., ISSTA 2012).

    With `adapters`, some requests come for one.
    """
    weights = {
        "arrive": rng.choice([0.3, 0.7, 2, 6]),
        "ready": rng.choice([4, 8]),
        "finish": rng.choice([2, 5, 8]),
        "wait": rng.choice([0, 1, 3]),
        "clock": rng.choice([0, 0, 1]),
        "cancel": rng.choice([0, 0, 1, 3]),
        "cancel_again": rng.choice([0, 0, 0.3]),
        "trouble": rng.choice([0, 0, 0.5, 2]),
        "control": rng.choice([0, 0, 0.5, 1]),
        "cancel_many": rng.choice([0, 0, 0.2]),
        "session_open": rng.choice([0, 0.3, 0.6]),
        "session_close": rng.choice([0, 0, 0.1]),
        "order_done": rng.choice([0.3, 1, 3]),
        "order_late": 0.05,
        "restart": rng.choice([0, 0, 0, 0.2]),
        "late": 0.1,
        "late_load": 0.1,
        "load_adapter": rng.choice([0, 0.2, 1]) if adapters else 0.01,
        "unload_adapter": rng.choice([0, 0, 0.3]) if adapters else 0.01,
        "adapter_loaded": rng.choice([0.5, 3, 6]) if adapters else 0,
        "encode": rng.choice([0.3, 2]),
        "snapshot": rng.choice([0, 0, 0.3]),
        "compiled": rng.choice([0, 0.5, 3]),
        "compiled_again": rng.choice([0, 0, 0.3]),
    }
    longest = rng.choice([3, 3, 20, 70])
    most_outputs = rng.choice([3, 40, 120])
    bases = rng.choice([1, 2, 50])
    sessions = rng.choice([0.1, 0.6]) if weights["session_open"] else 0.0  # share of the arrivals that are turns
    constrained = rng.choice([0.0, 0.0, 0.3, 0.9])
    kinds = rng.choice([0.0, 0.0, 0.2, 0.6])
    names = rng.choices(list(weights), list(weights.values()), k=count)
    share = rng.choice([0.3, 0.9]) if adapters else 0.01
    shares = {"sessions": sessions, "constrained": constrained, "kinds": kinds, "adapters": share}
    first = [("load_adapter", index, 0, False) for index in range(len(ADAPTERS))] if adapters else []
    return [*first, *(_random_action(rng, name, longest, most_outputs, bases, **shares) for name in names)]


def _random_action(
    rng: random.Random,
    name: str,
    longest: int,
    most_outputs: int,
    bases: int,
    *,
    sessions: float = 0.0,
    constrained: float = 0.0,
    kinds: float = 0.0,
    adapters: float = 0.0,
) -> Action:
    match name:
        case "arrive":
            options: dict[str, Any] = {"stream": rng.random() < 0.8, "ignore_eos": rng.random() < 0.2}
            if rng.random() < 0.3:
                options["stops_at"] = rng.randint(0, 10)
                options["stop_token_ids"] = rng.choice([(), (STOP_TOKEN,), (STOP_TOKEN, 8, 9)])
                if options["ignore_eos"]:
                    options["stop_token_ids"] = ()
            if rng.random() < 0.1:
                options["deadline_in_us"] = rng.randint(0, 30)
            if rng.random() < 0.1:
                options["finish_in_us"] = rng.randint(0, 60)
            if rng.random() < 0.1:
                options["namespace"] = rng.choice(["tenant-a", "tenant-b"])
            if rng.random() < 0.4:
                options["priority"] = rng.choice(PRIORITIES)
                options["routing_key"] = rng.choice(["", "a", "b"])
                options["tenant"] = options["routing_key"]
            if rng.random() < sessions:
                options["session"] = rng.choice(SESSIONS)
                if rng.random() < 0.3:
                    options["session_start"] = rng.randrange(100)
            if rng.random() < adapters:
                options["adapter"] = rng.choice(ADAPTERS)
            tokens = rng.randint(0 if rng.random() < 0.02 else 1, longest)
            max_new = rng.choice([1, rng.randint(1, most_outputs), rng.randint(1, most_outputs)])
            if rng.random() < 0.2:
                options["min_new_tokens"] = rng.choice([1, rng.randint(1, max_new)])
            if rng.random() < 0.2:
                options["stop_texts"] = ("END",)
            if rng.random() < constrained:
                options["grammar"] = f"g{rng.randrange(GRAMMARS)}"
                options["grammar_ends"] = rng.choice([None, rng.randint(1, 10)])
            if rng.random() < kinds:
                max_new = _ask_more(rng, options, tokens, max_new)
            return ("arrive", 1 + 1000 * rng.randrange(bases), tokens, max_new, options)
        case "encode":
            return (name, rng.random() < 0.1)
        case "cancel" | "cancel_again" | "cancel_many" | "session_close":
            return (name, rng.randrange(100))
        case "session_open":
            capacity, timeout = rng.choice([1, 20, 60, 1000]), rng.choice([None, None, 30])
            return (name, rng.randrange(100), capacity, timeout, rng.random() < 0.3)
        case "order_done":
            return (name, "no room" if rng.random() < 0.1 else "")
        case "compiled" | "compiled_again":
            return (name, rng.randrange(100), "unbalanced" if rng.random() < 0.3 else "")
        case "trouble":
            return ("finish", rng.choice(["error", "invalid", "text_stop"]), rng.randrange(100))
        case "load_adapter":
            return (name, rng.randrange(len(ADAPTERS)), rng.choice([-1, 0, 0, 1, 1]), rng.random() < 0.3)
        case "unload_adapter":
            return (name, rng.randrange(len(ADAPTERS)))
        case "adapter_loaded":
            return (name, rng.randrange(100), rng.choice(["", "", "", "", "no room"]))
        case "wait" | "clock":
            return (name, rng.randint(0, 25))
        case "control":
            return (name, rng.choice([*range(len(CONTROLS)), *LETTING_GO * 2]))
        case _:
            return (name,)


def _ask_more(rng: random.Random, options: dict[str, Any], tokens: int, max_new: int) -> int:
    """Make a request one of the less usual kinds. Returns how many tokens it wants."""
    if rng.random() < 0.4:
        options["kind"] = rng.choice(["embed", "score", "generate"])
        max_new = 0
        options.pop("min_new_tokens", None)
    elif rng.random() < 0.5:
        options["parallel_samples"] = rng.choice([2, 3, 4, 4, 129])
    if rng.random() < 0.3:
        options["logprob_start"] = rng.randint(0, tokens)
    if rng.random() < 0.2:
        options["return_hidden_states"] = True
    if rng.random() < 0.2:
        options["token_type_ids"] = bytes(rng.choice([0, 1]) for _ in range(tokens))
    if rng.random() < 0.4 and tokens:
        at, spans = 0, []
        for _ in range(rng.randint(1, 2)):
            start = rng.randint(at, max(at, tokens - 1))
            stop = min(tokens, start + rng.randint(1, 5))
            at = stop
            kind, encoder_tokens = rng.choice([("image", 3), ("image", 5), ("audio", 0), ("embedding", 0)])
            digest = bytes([rng.randrange(3)]) * 32
            if start < stop:
                spans.append(PromptSpan(start, stop, kind, digest, encoder_tokens))
        options["spans"] = tuple(spans)
    if rng.random() < 0.2:
        options["tenant"] = rng.choice(["x", "y"])
    return max_new


def under_grammars(actions: list[Action]) -> list[Action]:
    """The same, with half of the arrivals under a grammar that is compiled soon."""
    found: list[Action] = []
    for number, action in enumerate(actions):
        if action[0] == "arrive" and number % 2 and not action[-1].get("kind"):
            options = {**action[-1], "grammar": "g", "grammar_ends": None if number % 3 else 1 + number % 13}
            found.append((*action[:-1], options))
            found.append(("compiled", 1))
        else:
            found.append(action)
    return found


def run_actions(config: SchedConfig, actions: list[Action], *, replay: bool = False) -> Driver:
    """Safety mode through all actions, then liveness mode. Raises AssertionError (or InvariantError, which is one)."""
    driver = Driver(config)
    for action in actions:
        driver.do(action)
    driver.settle()
    driver.kv.check_plans_unchanged()
    if replay:
        driver.replayed()
    return driver


def shrunk(config: SchedConfig, actions: list[Action]) -> list[Action]:
    """A shorter list that still fails, by delta debugging: drop ever smaller stretches while the failure stays."""
    size = max(1, len(actions) // 2)
    while size >= 1:
        at = 0
        while at < len(actions):
            candidate = actions[:at] + actions[at + size :]
            if _fails(config, candidate):
                actions = candidate
            else:
                at += size
        size //= 2
    return actions


def _fails(config: SchedConfig, actions: list[Action]) -> bool:
    try:
        run_actions(config, actions)
    except Exception:
        return True
    return False
