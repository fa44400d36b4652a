"""Sessions: conversations with tokens, and as far as memory allows KV, that are kept between turns.

A turn is a request that names its session. Its prompt consists of the session's tokens (all of them, or the first
`session_start`: a rewind) and its own tokens behind them. From then on it is a request like any other.

    arrives --> held until the turn before it has ended, first come first served --> waiting queue --> ... --> ends

**Tokens.** After a completed turn, its prompt and output are the tokens of the session. A turn that was cancelled,
timed out, failed or was rejected leaves the session unchanged, so the next turn starts from the same tokens.

**KV.** A session locks the cached path of its tokens (`session_kv` hold), from the publication of a turn's KV to the
end of the next completed turn. Such pages are *session-held*: they belong to the radix cache and are not evictable.
When an admission or a decode lacks pages, sessions yield before any request is retracted: idle sessions first, and of
these the least recently used first. A session that yielded keeps its tokens; its next turn computes the KV that the
cache has lost. With `session_kv` evictable, sessions lock nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from lockstep.core.contract.checks import fail, same
from lockstep.core.contract.commands import Step
from lockstep.core.contract.events import (
    DROP_OUTPUT,
    BatchId,
    FinishReason,
    OpenSession,
    PromptSpan,
    RequestArrived,
    RequestId,
    SessionClosed,
    SessionYielded,
    TurnStarted,
)
from lockstep.core.features.prerequisites import Prerequisites, has_media
from lockstep.core.features.view import SchedulerView
from lockstep.core.kv.component import Component, Restored
from lockstep.core.kv.deferred import NO_BATCH
from lockstep.core.kv.facts import Facts
from lockstep.core.kv.memory import Memory
from lockstep.core.requests.budget import Deferral, PrefillBudget
from lockstep.core.requests.extras import put_behind, spans_within
from lockstep.core.requests.radix_node import RadixNode
from lockstep.core.requests.table import Request
from lockstep.core.requests.validation import RequestRefused, refuse_spans, refuse_too_long

ENDS_MAX = 1024
"""Completed turns of a session behind which a later turn may continue; the oldest are forgotten first."""

COMPLETED: tuple[FinishReason, ...] = ("length", "stop", "text_stop", "grammar", "computed")
"""Finish reasons of a completed turn, after which its tokens are those of the session."""


@dataclass(slots=True)
class Session:
    """One conversation."""

    name: str
    capacity_tokens: int  # prompt and output of any turn together
    timeout_us: int | None
    idle_since_us: int
    used: int  # number of its last use, rising over all sessions
    tokens: bytes = b""  # packed int32 ids of prompt and output of the last completed turn
    namespace: str = ""  # namespace of the turn that computed them
    handle: RadixNode | None = None  # its lock on their cached path
    turn: RequestId | None = None  # the turn that may run
    queue: deque[RequestId] = field(default_factory=deque)  # later turns, which are held
    spans: tuple[PromptSpan, ...] = ()  # spans of media in its tokens
    output_start: int = 0  # number of its tokens before the output of the last completed turn
    ends: dict[str, int] = field(
        default_factory=dict
    )  # tokens up to the end of completed turns, by label, oldest first

    @property
    def length(self) -> int:
        """Number of its tokens."""
        return len(self.tokens) // 4

    @property
    def idle(self) -> bool:
        """Whether the session has no turn, running or held."""
        return self.turn is None and not self.queue

    @property
    def due_us(self) -> int | None:
        """Time in us at which the session times out; None: it does not."""
        return self.idle_since_us + self.timeout_us if self.idle and self.timeout_us is not None else None


class SessionImage(msgspec.Struct, forbid_unknown_fields=True):
    """A session in a snapshot."""

    name: str
    capacity_tokens: int
    timeout_us: int | None
    idle_since_us: int
    used: int
    tokens: bytes
    namespace: str
    handle: int | None  # number of the radix node
    turn: int | None
    queue: list[int]
    spans: tuple[PromptSpan, ...] = ()
    output_start: int = 0
    ends: list[tuple[str, int]] | msgspec.UnsetType = msgspec.UNSET  # of turns with labels


class SessionsPart(msgspec.Struct):
    """Sessions in a snapshot."""

    sessions: list[SessionImage]
    session_uses: int
    sessions_unsettled: list[tuple[int, str]]


class Sessions(Component):
    """The sessions of one engine."""

    PART = SessionsPart

    def __init__(self, scheduler: SchedulerView, prerequisites: Prerequisites) -> None:
        self._scheduler = scheduler
        self._prerequisites = prerequisites
        self.open: dict[str, Session] = {}
        self.free: list[str] = []  # sessions with a next turn that may start; emptied within the step
        # sessions with KV that is published once this batch is collected
        self.unsettled: list[tuple[BatchId, str]] = []
        self.due_us: int | None = None  # the earliest timeout of all sessions
        self.uses = 0

    # -------------------------------------------------------------------------------------------------- open and close

    def begin(self, control: OpenSession) -> str:
        """Open a session. Returns the reason against it, or ""."""
        refused = self._objection(control)
        if refused:
            return refused
        session = Session(control.session, control.capacity_tokens, control.timeout_us, self._scheduler.now_us, 0)
        self._use(session, self._scheduler.now_us)
        if control.parent:
            parent = self.open[control.parent]
            most = parent.length if control.parent_tokens is None else control.parent_tokens
            session.tokens, session.namespace = self._kept_tokens(parent, most), parent.namespace
            session.spans = spans_within(parent.spans, most)
            session.output_start = min(parent.output_start, most)
            session.ends = {label: tokens for label, tokens in parent.ends.items() if tokens <= most}
            self._hold_cached(session)
        self.open[control.session] = session
        self._look_ahead()
        return ""

    def _objection(self, control: OpenSession) -> str:
        most = self._scheduler.config.max_sessions
        if not control.session:
            return "`session` is empty; give it a name"
        if control.session in self.open:
            return f"`session` is {control.session!r}, which is open already"
        if len(self.open) >= most:
            return f"{len(self.open)} sessions are open already (max_sessions {most})"
        if control.capacity_tokens < 2:
            return f"`capacity_tokens` must be at least 2, a prompt and an output token, got {control.capacity_tokens}"
        if control.timeout_us is not None and control.timeout_us < 1:
            return f"`timeout_us` must be at least 1 or left out, got {control.timeout_us}"
        if control.parent_tokens is not None and not control.parent:
            return f"`parent_tokens` is {control.parent_tokens}, but no `parent` is named"
        if control.parent and control.parent not in self.open:
            return f"`parent` is {control.parent!r}, which is not open"
        if control.parent and control.parent_tokens is not None:
            have, asked = self.open[control.parent].length, control.parent_tokens
            if not 0 <= asked <= have:
                return f"`parent_tokens` must be 0 to {have}, the tokens of {control.parent!r}, got {asked}"
        return ""

    def end(self, name: str, reason: Literal["closed", "timeout"], step: Step) -> str:
        """Close a session. Held turns are rejected; a running turn goes on as a request without a session.

        Returns: the reason against it, or "".
        """
        session = self.open.get(name)
        if session is None:
            return f"`session` is {name!r}, which is not open"
        if session.turn is not None:
            self._scheduler.requests[session.turn].leave_session()
        for request_id in list(session.queue):
            self._scheduler.requests[request_id].leave_session()
            self._scheduler.reject(request_id, "session_closed", f"session {name!r} was closed before its turn", step)
        self._release_kv(session, self._scheduler.memory)
        self._scheduler.retry_admission()
        del self.open[name]
        self.unsettled = [entry for entry in self.unsettled if entry[1] != name]
        step.decided.append(SessionClosed(self._scheduler.now_us, name, session.length, reason))
        self._look_ahead()
        return ""

    def expire(self, step: Step) -> None:
        """Close the sessions that have timed out without a turn."""
        for session in list(self.open.values()):
            if session.due_us is not None and session.due_us <= self._scheduler.now_us:
                self.end(session.name, "timeout", step)

    # ----------------------------------------------------------------------------------------------------------- turns

    def waits_for_turn(self, request: Request) -> bool:
        """Return whether a request is a turn and waits for the turn before it, so that its prompt is incomplete."""
        return bool(request.session) and self.open[request.session].turn != request.request_id

    def check(self, event: RequestArrived) -> None:
        """Raise RequestRefused for a turn of a session that is not open, or with an invalid `session_start`."""
        if event.session_after and (event.session_start is not None or not event.session):
            other = "no `session` is named" if not event.session else f"`session_start` is {event.session_start}"
            raise RequestRefused("bad_request", f"`session_after` is {event.session_after!r}, but {other}")
        if not event.session:
            if event.session_start is not None:
                raise RequestRefused(
                    "bad_request", f"`session_start` is {event.session_start}, but no `session` is named"
                )
            return
        if event.session not in self.open:
            raise RequestRefused("bad_request", f"`session` is {event.session!r}, which is not open")
        if event.session_start is not None and event.session_start < 0 and event.session_start != DROP_OUTPUT:
            raise RequestRefused("bad_request", f"`session_start` must be 0 or more, got {event.session_start}")

    def take_in(self, request: Request) -> None:
        """Hold an accepted turn until its session is free."""
        session = self.open[request.session]
        session.queue.append(request.request_id)
        if session.turn is None:
            self.free.append(session.name)
        self._look_ahead()

    # mechanism: sessions (decided)
    def start_turns(self, step: Step) -> None:
        """Let the next turn of every free session join the waiting queue. Called at the end of a step."""
        while self.free:
            session = self.open.get(self.free.pop(0))
            if session is None or session.turn is not None or not session.queue:
                continue
            request = self._scheduler.requests[session.queue.popleft()]
            session.turn = request.request_id
            self._use(session, self._scheduler.now_us)
            try:
                kept = self._compose(session, request)
            except RequestRefused as refused:
                self._scheduler.reject(request.request_id, refused.reason, refused.message, step)
                continue
            started = TurnStarted(
                self._scheduler.now_us,
                request.request_id,
                session.name,
                kept,
                request.prompt_tokens,
                request.max_new_tokens,
            )
            step.decided.append(started)
            if has_media(request) and not self._scheduler.comes_by_transfer(request):
                self._prerequisites.await_media(request, step)
            self._scheduler.join_queue(request)
            self._scheduler.turn_began(request, step)
        self._look_ahead()

    def _compose(self, session: Session, request: Request) -> int:
        """Put the session's tokens in front of a turn's own tokens.

        Returns: how many tokens of the session these are.
        Raises: RequestRefused for a start behind the session's tokens, or a prompt that is too long.
        """
        start = request.session_start
        kept = session.length if start is None else session.output_start if start == DROP_OUTPUT else start
        if request.session_after:
            if request.session_after not in session.ends:
                what = f"`session_after` is {request.session_after!r}, which is no completed turn in the tokens of"
                raise RequestRefused("bad_request", f"{what} session {session.name!r}")
            kept = session.ends[request.session_after]
        if kept > session.length:
            raise RequestRefused(
                "bad_request", f"`session_start` is {kept}, but session {session.name!r} has {session.length} tokens"
            )
        prompt, capacity = kept + request.prompt_tokens, session.capacity_tokens
        answers = not request.prefill_only
        own = request.extras.spans if request.extras is not None else ()
        refuse_too_long(prompt, answers, self._scheduler.config, (*spans_within(session.spans, kept), *own))
        if prompt + answers > capacity:
            needs = "and needs room for one more, " if answers else ""
            raise RequestRefused(
                "too_long",
                f"the prompt has {prompt} tokens, {kept} of the session among them, {needs}"
                f"more than the {capacity} of session {session.name!r}",
            )
        put_behind(request, kept, session.spans)
        if request.extras is not None:
            refuse_spans(request.extras.spans, prompt, self._scheduler.config)
        request.tokens = self._kept_tokens(session, kept) + request.tokens
        request.prompt_tokens = prompt
        room = min(self._scheduler.config.request_tokens_max, capacity) - prompt
        request.max_new_tokens = min(request.max_new_tokens, room)
        request.min_new_tokens = min(request.min_new_tokens, request.max_new_tokens)
        return kept

    def _kept_tokens(self, session: Session, kept: int) -> bytes:
        """Return the first `kept` tokens of a session, packed int32.

        A span that is cut short is another content than the whole one. With its old placeholders the same content
        behind it would have the ids of the whole content followed by a part of it, at other embeddings.
        """
        tokens = session.tokens[: 4 * kept]
        cut = [span for span in session.spans if span.start < kept < span.stop]
        return self._prerequisites.media.placeholders.laid(tokens, spans_within(cut, kept)) if cut else tokens

    def turn_ends(self, request: Request, reason: str, outputs: int) -> None:
        """Take over tokens and KV of a turn that is about to end and still has its row."""
        session = self.open[request.session]
        if session.turn != request.request_id:
            session.queue.remove(request.request_id)
            self._use(session, self._scheduler.now_us)
            self._look_ahead()
            return
        session.turn = None
        self._use(session, self._scheduler.now_us)
        self.free.append(session.name)
        if reason in COMPLETED:
            before, session.tokens = session.tokens, self._scheduler.tokens_of(request, outputs)
            _note_end(session, before, request.label)
            session.output_start = session.length - outputs
            session.namespace = request.namespace
            session.spans = request.extras.spans if request.extras is not None else ()
            self._release_kv(session, self._scheduler.memory)
            if request.handle is not None and self._scheduler.config.session_kv == "hold":
                if not self._scheduler.memory.is_stale(request.namespace):
                    self._take_hold(session, request.handle, self._scheduler.memory)  # KV that is published so far
                free_after = self._scheduler.in_flight[-1].plan.batch_id if self._scheduler.in_flight else NO_BATCH
                self.unsettled.append((free_after, session.name))
        self._look_ahead()

    # -------------------------------------------------------------------------------------------------------------- KV

    def settle(self, batch_id: BatchId) -> None:
        """Lock the whole KV of ended turns that is published now that batch `batch_id` is collected."""
        due = [name for free_after, name in self.unsettled if free_after <= batch_id]
        self.unsettled = [entry for entry in self.unsettled if entry[0] > batch_id]
        for name in due:
            self._hold_cached(self.open[name])

    def make_room(self, memory: Memory, pages: int, step: Step) -> int:
        """Let sessions yield until `pages` more pages are available. Returns how many more are available."""
        before = memory.available_pages
        for session in self._by_use():
            if memory.available_pages - before >= pages:
                break
            self._yield_one(session, memory, step)
        return memory.available_pages - before

    # mechanism: session-yield (decided)
    def give_way(self, request: Request, deferral: Deferral, budget: PrefillBudget, step: Step) -> bool:
        """Let sessions yield as far as the admission of a request needs; none if that would not suffice.

        Returns: whether any session yielded.
        """
        holders = self._by_use()
        if deferral.reason not in ("kv_budget", "pages") or not holders:
            return False
        memory = self._scheduler.memory
        before, room = memory.available_pages, _room_for(memory, request)
        lacking = self._lacking(request, deferral, budget)
        yielded = self.yield_until(memory, lambda: _room_for(memory, request) - room >= lacking, step)
        if yielded:
            budget.gain(memory.available_pages - before)
        return yielded

    def yield_until(self, memory: Memory, enough: Callable[[], bool], step: Step) -> bool:
        """Let sessions yield until `enough` returns true; none if it never does. Returns: whether any yielded."""
        yielding: list[Session] = []
        for session in self._by_use():
            if enough():
                break
            assert session.handle is not None
            memory.unlock(session.handle)
            yielding.append(session)
        helped = enough()
        for session in yielding:
            assert session.handle is not None
            memory.lock_node(session.handle)
            if helped:
                self._yield_one(session, memory, step)
        return helped and bool(yielding)

    def _lacking(self, request: Request, deferral: Deferral, budget: PrefillBudget) -> int:
        """Return the pages that a deferral for KV lacks."""
        page_size, memory = self._scheduler.config.page_size, self._scheduler.memory
        if deferral.reason == "pages":
            return -(-deferral.needed // page_size) - deferral.available // page_size
        match = memory.match(request)
        cached, locking = (match.pages, match.evictable_pages) if match is not None else (0, 0)
        new_tokens = len(request.tokens) // 4 - cached * page_size
        if not self._scheduler.active:
            return -(-new_tokens // page_size) - (memory.available_pages - locking)
        wanted = budget.wanted(new_tokens, request.max_new_tokens - request.outputs)
        return -(-(wanted + 1 - (budget.total - locking * page_size)) // page_size)

    def lose_kv(self) -> None:
        """Unlock the KV of all sessions, which is void. Their tokens stay."""
        for session in self.open.values():
            self._release_kv(session, self._scheduler.memory)
        self.unsettled = []
        self._scheduler.retry_admission()

    def handles(self) -> list[RadixNode]:
        """Return the radix nodes that sessions lock, one per session with a lock."""
        return [session.handle for session in self.open.values() if session.handle is not None]

    def pages_held_alone(self) -> int:
        """Return the number of cached pages that sessions lock and no request locks."""
        counts: dict[int, int] = {}  # by node number: locks of sessions at this node or below it
        nodes: dict[int, RadixNode] = {}
        for handle in self.handles():
            node: RadixNode | None = handle
            while node is not None:
                counts[node.number] = counts.get(node.number, 0) + 1
                nodes[node.number] = node
                node = node.parent
        return sum(len(node.pages) for number, node in nodes.items() if node.lock_count == counts[number])

    def _by_use(self) -> list[Session]:
        """Return the sessions that lock KV, in the order in which they yield."""
        holders = (session for session in self.open.values() if session.handle is not None)
        return sorted(holders, key=lambda session: (not session.idle, session.used))

    def _yield_one(self, session: Session, memory: Memory, step: Step) -> None:
        before = memory.available_pages
        self._release_kv(session, memory)
        step.decided.append(SessionYielded(step.time_us, session.name, memory.available_pages - before))

    def _hold_cached(self, session: Session) -> None:
        """Lock the part of the session's tokens that is in the radix cache."""
        memory = self._scheduler.memory
        if not memory.radix.present or self._scheduler.config.session_kv != "hold" or not session.tokens:
            return
        pages = session.length // self._scheduler.config.page_size
        match = memory.radix.match(memory.keyed(session.namespace), session.tokens, pages)
        handle = memory.radix.lock(match) if match.pages else None
        self._release_kv(session, memory)
        session.handle = handle

    def _take_hold(self, session: Session, node: RadixNode, memory: Memory) -> None:
        if node.stop:
            memory.lock_node(node)
            session.handle = node

    def _release_kv(self, session: Session, memory: Memory) -> None:
        if session.handle is not None:
            memory.unlock(session.handle)
            session.handle = None

    # ------------------------------------------------------------------------------------------- timeouts and snapshots

    def _use(self, session: Session, now_us: int) -> None:
        self.uses += 1
        session.used = self.uses
        session.idle_since_us = now_us

    def _look_ahead(self) -> None:
        """Update the earliest timeout of all sessions."""
        dues = [session.due_us for session in self.open.values() if session.due_us is not None]
        self.due_us = min(dues, default=None)

    def part(self) -> SessionsPart:
        """Return the state for a snapshot."""
        images = [
            SessionImage(
                session.name,
                session.capacity_tokens,
                session.timeout_us,
                session.idle_since_us,
                session.used,
                session.tokens,
                session.namespace,
                session.handle.number if session.handle is not None else None,
                session.turn,
                list(session.queue),
                session.spans,
                session.output_start,
                list(session.ends.items()) or msgspec.UNSET,
            )
            for session in self.open.values()
        ]
        return SessionsPart(images, self.uses, list(self.unsettled))

    def load(self, part: SessionsPart, restored: Restored) -> None:
        """Take over the state that `part` returned."""
        for image in part.sessions:
            self.open[image.name] = Session(
                image.name,
                image.capacity_tokens,
                image.timeout_us,
                image.idle_since_us,
                image.used,
                image.tokens,
                image.namespace,
                restored.nodes[image.handle] if image.handle is not None else None,
                image.turn,
                deque(image.queue),
                image.spans,
                image.output_start,
                {} if image.ends is msgspec.UNSET else dict(image.ends),
            )
        self._look_ahead()
        self.uses, self.unsettled = part.session_uses, part.sessions_unsettled

    def blocked_requests(self) -> list[RequestId]:
        """Return the turns that wait for the turn before them."""
        return [request_id for session in self.open.values() for request_id in session.queue]

    def due_times(self) -> Iterator[tuple[int, str]]:
        """Yield the timeouts of idle sessions."""
        for session in self.open.values():
            if session.timeout_us is not None and session.turn is None and not session.queue:
                yield session.idle_since_us + session.timeout_us, f"session {session.name} times out"

    def check_state(self, facts: Facts) -> None:
        """S1, S13, S15: a session locks a path of its own tokens; its turns are live, all but the first are blocked.

        KV of replaced weights is cached only as long as it is locked.
        """
        memory = self._scheduler.memory
        turns: list[int] = []
        for session in self.open.values():
            turns += [*session.queue] if session.turn is None else [session.turn, *session.queue]
            if session.handle is not None and not session.tokens.startswith(facts.path(session.handle)[1]):
                fail(f"S13: session {session.name!r} holds KV of other tokens than its own")
            if max(session.ends.values(), default=0) > session.length:
                fail(f"S13: session {session.name!r} has {session.length} tokens, and a turn that ended behind them")
            for request_id in session.queue:
                if request_id not in facts.blocked:
                    fail(f"S15: r{request_id} is behind a turn of session {session.name!r}, but is not held")
        same("S15 turns of sessions", sorted(turns), sorted(r.request_id for r in facts.requests.values() if r.session))
        same("S15 sessions that are free", self.free, [])
        stale = {namespace for namespace in {node.namespace for node in facts.cached} if memory.is_stale(namespace)}
        if stale:
            for node in facts.cached:
                if node.namespace in stale and not node.lock_count:
                    fail(f"S13: {node} of namespace {node.namespace!r} is cached, weights are {memory.weights_version}")


def _note_end(session: Session, before: bytes, label: str) -> None:
    """Record the end of a completed turn, and forget ends of turns whose tokens the session has no more.

    Args:
        before: tokens of the session before this turn.
    """
    session.ends = {
        name: tokens for name, tokens in session.ends.items() if session.tokens.startswith(before[: 4 * tokens])
    }
    if label:
        session.ends.pop(label, None)
        session.ends[label] = session.length
        if len(session.ends) > ENDS_MAX:
            del session.ends[next(iter(session.ends))]


def _room_for(memory: Memory, request: Request) -> int:
    """Return the pages that are available for a request once its own cached prefix is locked."""
    match = memory.match(request)
    return memory.available_pages - (match.evictable_pages if match is not None else 0)
