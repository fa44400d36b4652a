"""One engine, its host, its device, its journal and its clients, as docs/contract.md has them.

    fold(event, decided, commands) ──> write ──> perform each command ──> fold ...
                                    crash, at any moment: the engine is what its journal has

The core's choices are free within the rules: any requests in a batch, any pages, any retraction. A page is identified
by what it must contain: its place in a prompt, which requests of one *family* share, or its place in one request.

Tokens are (request, number of the output, generation in which it was drawn). Ghosts: the cells of the device's pages,
the tokens and ends at the clients.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations, product
from typing import Any, ClassVar, NamedTuple

from tests.support.contract.machine import Machine
from tests.support.driver.actions import Action
from tests.support.explorer.world import Left, Move

Token = tuple[int, int, int]
Cell = tuple[int, int, int, int]  # family or -1 - request, index in its pages, positions, the batch that wrote last
LIVE = ("waiting", "running")
UNSENT = ("cancelled", "error")  # reasons of ends before which tokens may be missing


class ModelRow(NamedTuple):
    """A row of a batch."""

    request: int
    epoch: int
    start: int
    stop: int
    samples: bool
    pages: tuple[int, ...]  # its page table up to `stop`


class ModelBatch(NamedTuple):
    """A launched batch."""

    number: int
    generation: int
    rows: tuple[ModelRow, ...]


class ModelRequest(NamedTuple):
    """The core's record of a request."""

    family: int
    prompt: int
    limit: int  # outputs
    phase: str = "waiting"
    kept: tuple[Token, ...] = ()
    sent: int = 0
    at: int = 0  # positions launched since it took its row
    known: int = 0  # positions with tokens, those in flight included
    epoch: int = 0
    pages: tuple[int, ...] = ()
    left: bool = False


class CoreState(NamedTuple):
    """What the journal restores."""

    requests: tuple[ModelRequest, ...]
    content: tuple[Cell | None, ...]  # of pages, behind all launched batches
    flight: tuple[ModelBatch, ...] = ()
    generation: int = 0
    next_batch: int = 0


class ClientState(NamedTuple):
    """What the client of a request has received."""

    seen: tuple[Token, ...] = ()
    ends: int = 0


class EngineState(NamedTuple):
    """Core, host, device and clients."""

    core: CoreState
    journal: CoreState
    cells: tuple[Cell | None, ...]
    pending: tuple[tuple[Any, ...], ...] = ()  # commands that were not performed yet
    written: bool = True
    lost: bool = False  # the device was, and no restart is folded yet
    device: tuple[ModelBatch, ...] = ()  # launched, without a result
    last: ModelBatch | None = None  # that had its result; only where it may be delivered again
    clients: tuple[ClientState, ...] = ()
    fault: str = ""


class EngineBounds(NamedTuple):
    """Sizes of an engine, and what comes from outside while it is explored."""

    arrivals: tuple[tuple[int, int, int], ...] = ()  # (family, prompt tokens, most outputs)
    pages: int = 3
    page_tokens: int = 1
    depth: int = 1
    inputs: tuple[tuple[str, int], ...] = ()  # cancels, errors, stops, holds, retractions, restarts, crashes


class EngineMachine(Machine):
    """One engine."""

    ends = False  # the contract lets a core retract and start again without end; its own liveness: tests/explore.py
    rules: ClassVar[dict[str, str]] = {
        # of the host
        "ids rise": "request ids strictly increase and are never reused",
        "results once": "one BatchFinished per batch",
        "results in launch order": "BatchFinished, oldest first",
        "record before commands": "commands are performed after their event was written to the journal",
        "commands before the next event": "commands are performed before the next event is folded",
        "commands in order": "commands are started in the order of the list",
        "restart generation rises": "EngineRestarted, `generation` rises",
        "restart after a loss": "once the content of the device's memory is lost, EngineRestarted is folded",
        # of the core
        "old results are void": "a result of an older generation is void",
        "only a slot launches": "only LaneReady may launch, and at most one batch",
        "depth": "depth d allows d + 1 batches that are launched and not delivered",
        "batch ids rise": "batch_id rises by one with each launch, also across restarts",
        "plans name their generation": "batches contain the generation",
        "rows are live": "a row computes positions of a request that has not ended; a row at most once",
        "spans follow": "spans of a request are computed in the order of positions, and are never empty",
        "newest samples": "the row that computes the newest known position samples; chunks before the last do not",
        "no pass past the length": "an end by length is known at launch and costs no further forward",
        "tables reach the span": "changes of page tables are folded before the batch reads them",
        "deferred frees": "memory that a batch in flight reads or writes is assigned to no other request",
        "one owner": "a page that a running request holds is written for no other request",
        "cached KV is the prefix": "KV is shared for equal tokens only",
        "delivered KV is shared": "KV is shared only after the batch that computed it was delivered",
        "retracts what runs": "a retraction takes the pages of a running request",
        "late tokens are dropped": "tokens of dead rows are dropped",
        "streams follow": "a stream has no gap and no double",
        "sent before the end": "FinishRequest after every StreamTokens before it",
        "ends once": "exactly one RequestFinished or RequestRejected closes every request",
        "length ends": "a request with its most outputs has ended",
        "cancel closes": "a cancel closes the request in the same Step, and stops streaming at once",
        "errors end": "a failed batch ends its requests",
        "restart requeues": "batches in flight are void, unfinished requests wait again, with all delivered tokens",
    }

    def __init__(self, bounds: EngineBounds, *, lax: str = "") -> None:
        super().__init__(lax=lax)
        self.bounds = bounds

    def first(self) -> EngineState:
        core = CoreState((), (None,) * self.bounds.pages)
        return EngineState(core, core, core.content)

    def inputs(self) -> dict[str, int]:
        return dict(self.bounds.inputs)

    def is_idle(self, state: EngineState) -> bool:
        core = state.core
        busy = state.pending or not state.written or state.lost or core.flight
        return not busy and all(request.phase == "ended" for request in core.requests)

    # --------------------------------------------------------------------------------------------------------- a step

    def after(self, state: EngineState, action: Action) -> EngineState:
        match action:
            case ("fold", event, decided, commands):
                return self._fold(state, event, decided, commands)
            case ("write",):
                return state._replace(written=True, journal=state.core)
            case ("perform", number):
                return self._perform(state, number)
            case ("lose",):
                return state._replace(lost=True, cells=(None,) * self.bounds.pages)
            case ("crash",):
                return self._crash(state)
        raise ValueError(f"no step is named {action[0]}")

    def _fold(
        self, state: EngineState, event: Action, decided: tuple[Action, ...], commands: tuple[Action, ...]
    ) -> EngineState:
        self.need("commands before the next event", not state.pending and state.written, f"{event}")
        self.need("restart after a loss", not state.lost or event[0] == "restart", f"{event}")
        core, ended_before = state.core, {i for i, one in enumerate(state.core.requests) if one.phase == "ended"}
        match event:
            case ("arrive", number, family, prompt, limit):
                self.need("ids rise", number == len(core.requests), f"{number} after {len(core.requests) - 1}")
                core = core._replace(requests=(*core.requests, ModelRequest(family, prompt, limit, known=prompt)))
                state = state._replace(clients=(*state.clients, ClientState()))
            case ("cancel", number) if number < len(core.requests) and number not in ended_before:
                core = _with(core, number, left=True)
                ends = ("end", number, "cancelled") in commands
                self.need("cancel closes", ends, f"{number} goes on")
            case ("result", number, generation, error):
                state, core = self._collect(state, number, generation, error)
            case ("restart", generation):
                self.need("restart generation rises", generation > core.generation, f"{generation}")
                core = self._restarted(core, generation)
                state = state._replace(lost=False, device=tuple(map(_of_no_pages, state.device)))
        for what, number in decided:
            assert what == "retract"
            self.need("retracts what runs", core.requests[number].phase == "running", f"{number}")
            core = _back(core, number)
        pending = []
        launches = [command for command in commands if command[0] == "launch"]
        self.need("only a slot launches", len(launches) <= (event[0] == "slot"), f"{event} launches {len(launches)}")
        for command in commands:
            match command:
                case ("moved", number, pages):
                    core = self._move(core, number, pages)
                case ("launch", number, generation, rows):
                    core = self._launch(core, number, generation, rows)
                    pending.append(("launch", core.flight[-1]))
                case ("stream", number, offset, count):
                    request = core.requests[number]
                    follows = offset == request.sent and 0 < count <= len(request.kept) - offset
                    self.need("streams follow", follows, f"{number} at {offset}, {count}: {request}")
                    pending.append(("stream", number, offset, request.kept[offset : offset + count]))
                    core = _with(core, number, sent=max(offset + count, request.sent))
                case ("end", number, reason):
                    core = self._end(core, number, reason, event)
                    pending.append(("end", number))
        for number, request in enumerate(core.requests):
            full = request.phase in LIVE and len(request.kept) >= request.limit
            self.need("length ends", not full, f"{number} has {len(request.kept)} outputs")
        return state._replace(core=core, pending=(*state.pending, *pending), written=False)

    def _collect(self, state: EngineState, number: int, generation: int, error: bool) -> tuple[EngineState, CoreState]:
        core, device = state.core, state.device
        same = [batch for batch in device if batch.generation == generation]
        drawn = next((batch for batch in same if batch.number == number), None)
        self.need("results once", drawn is not None, f"batch {number} of generation {generation} has no result to come")
        if drawn is None:
            drawn = state.last
            assert drawn is not None
        else:
            self.need("results in launch order", drawn is same[0], f"{number} before {same[0].number}")
            device = tuple(batch for batch in device if batch is not drawn)
        state = state._replace(device=device, last=drawn if self.lax == "results once" else None)
        if (generation != core.generation and self.lax != "old results are void") or not core.flight:
            return state, core
        taken = core.flight[0]
        core = core._replace(flight=core.flight[1:])
        if error:
            state = state._replace(cells=_without(state.cells, taken.number))
            return state, core._replace(content=_without(core.content, taken.number))
        tokens = [
            (row.request, row.stop - core.requests[row.request].prompt, drawn.generation)
            for row in drawn.rows
            if row.samples
        ]
        for row, token in zip([row for row in taken.rows if row.samples], tokens, strict=False):
            request = core.requests[row.request]
            is_live = request.phase == "running" and request.epoch == row.epoch
            if is_live or (self.lax == "late tokens are dropped" and request.phase in LIVE):
                core = _with(core, row.request, kept=(*request.kept, token))
        return state, core

    def _restarted(self, core: CoreState, generation: int) -> CoreState:
        if self.lax == "restart requeues":  # what runs goes on as if its pages were there
            return core._replace(flight=(), generation=generation)
        for number, request in enumerate(core.requests):
            if request.phase in LIVE:
                core = _back(core, number)
        return core._replace(flight=(), generation=generation, content=(None,) * self.bounds.pages)

    def _end(self, core: CoreState, number: int, reason: str, event: Action) -> CoreState:
        request = core.requests[number]
        self.need("ends once", request.phase in LIVE, f"{number} ends by {reason}")
        if reason == "length":
            self.need("length ends", len(request.kept) == request.limit, f"{number} has {len(request.kept)} outputs")
        if reason == "cancelled":
            self.need("cancel closes", event == ("cancel", number), f"{number} is cancelled by {event}")
        if reason == "error":
            self.need("errors end", event[0] == "result" and event[3], f"{number} fails by {event}")
        unsent = len(request.kept) - request.sent
        self.need("sent before the end", not unsent or reason in UNSENT, f"{unsent} tokens of {number}")
        return _with(core, number, phase="ended", pages=(), left=request.left or reason in UNSENT)

    # ---------------------------------------------------------------------------------------------------- a launch

    def _launch(self, core: CoreState, number: int, generation: int, rows: tuple[tuple[Any, ...], ...]) -> CoreState:
        self.need("depth", len(core.flight) <= self.bounds.depth, f"{len(core.flight) + 1} batches in flight")
        self.need("batch ids rise", number == core.next_batch, f"{number}, not {core.next_batch}")
        self.need("plans name their generation", generation == core.generation, f"{generation}")
        self.need("rows are live", rows and len({row[0] for row in rows}) == len(rows), f"{rows}")
        before, launched = core, []
        for one, *_, pages in rows:  # all tables first: changes are folded before the batch reads
            request = before.requests[one]
            self.need("rows are live", request.phase in LIVE, f"{one} is {request.phase}")
            core = _with(core, one, pages=pages, phase="running")
        for one, start, stop, samples, pages in rows:
            self._check_span(before.requests[one], one, start, stop, samples)
            self._check_pages(before, core, one, (start, stop), pages)
            request = core.requests[one]
            known = request.known + samples
            core = _with(core, one, at=stop, known=known)
            launched.append(ModelRow(one, request.epoch, start, stop, samples, pages))
        batch = ModelBatch(number, generation, tuple(launched))
        content = self._written(core, core.content, batch)
        return core._replace(flight=(*core.flight, batch), next_batch=number + 1, content=content)

    def _move(self, core: CoreState, one: int, pages: tuple[int, ...]) -> CoreState:
        """A table changes to pages with equal content, which another request has computed."""
        request, size = core.requests[one], self.bounds.page_tokens
        if request.phase != "running":
            return core
        for index in range(min(len(pages), -(-request.at // size))):
            if request.pages[index] == pages[index]:
                continue
            cell, flying = core.content[pages[index]], {batch.number for batch in core.flight}
            is_it = cell is not None and cell[:2] == self._chain(request, one, index)
            self.need("cached KV is the prefix", is_it, f"{one} has page {pages[index]} at {index} now: {cell}")
            self.need("delivered KV is shared", cell is not None and cell[3] not in flying, f"{one}: {cell}")
        return _with(core, one, pages=pages)

    def _check_span(self, request: ModelRequest, one: int, start: int, stop: int, samples: bool) -> None:
        follows = start == request.at if request.phase == "running" else start % self.bounds.page_tokens == 0
        self.need("spans follow", follows and start < stop <= request.known, f"{one}: [{start}:{stop}) of {request}")
        self.need("newest samples", samples == (stop == request.known), f"{one} at {stop} of {request.known}")
        outputs = request.known - request.prompt
        self.need("no pass past the length", outputs < request.limit, f"{one} has its {outputs} outputs")

    def _check_pages(
        self, before: CoreState, core: CoreState, one: int, span: tuple[int, int], pages: tuple[int, ...]
    ) -> None:
        size, (start, stop) = self.bounds.page_tokens, span
        self.need("tables reach the span", len(pages) == -(-stop // size) == len(set(pages)), f"{one}: {pages}, {span}")
        own = before.requests[one]
        flying = {page for batch in before.flight for row in batch.rows if row.request != one for page in row.pages}
        held = {
            page
            for i, other in enumerate(core.requests)
            if i != one and other.phase == "running"
            for page in other.pages
        }
        for index in range(start // size, len(pages)):
            page = pages[index]
            if own.phase == "running" and index < len(own.pages) and own.pages[index] == page:
                continue
            self.need("deferred frees", page not in flying, f"page {page} for {one}")
            self.need("one owner", page not in held, f"page {page} for {one}")
        for index in range(-(-start // size)):
            cell, (key, at) = before.content[pages[index]], self._chain(own, one, index)
            is_it = cell is not None and cell[:2] == (key, at) and cell[2] >= min(start - index * size, size)
            self.need("cached KV is the prefix", is_it, f"{one} reads page {pages[index]} at {index}: {cell}")
            if cell is not None and (
                own.phase != "running" or own.pages[index : index + 1] != pages[index : index + 1]
            ):
                given = cell[3] not in {batch.number for batch in before.flight}
                self.need("delivered KV is shared", given, f"{one} reads page {pages[index]} of batch {cell[3]}")

    def _chain(self, request: ModelRequest, one: int, index: int) -> tuple[int, int]:
        shared = (index + 1) * self.bounds.page_tokens <= request.prompt
        return (request.family if shared else -1 - one), index

    def _written(self, core: CoreState, cells: tuple[Cell | None, ...], batch: ModelBatch) -> tuple[Cell | None, ...]:
        written, size = list(cells), self.bounds.page_tokens
        for row in batch.rows:
            request = core.requests[row.request]
            for index in range(row.start // size, len(row.pages)):
                key, at = self._chain(request, row.request, index)
                written[row.pages[index]] = key, at, min(row.stop - index * size, size), batch.number
        return tuple(written)

    # ------------------------------------------------------------------------------------------------- host, device

    def _perform(self, state: EngineState, number: int) -> EngineState:
        self.need("record before commands", state.written, f"{state.pending[number]}")
        self.need("commands in order", number == 0, f"{state.pending[number]}")
        command = state.pending[number]
        state = state._replace(pending=(*state.pending[:number], *state.pending[number + 1 :]))
        match command:
            case ("launch", batch):
                if state.lost:  # no result will come
                    return state
                fault = state.fault or self._misread(state, batch)
                cells = self._written(state.core, state.cells, batch)
                return state._replace(device=(*state.device, batch), cells=cells, fault=fault)
            case ("stream", one, offset, tokens):
                client = state.clients[one]
                if state.core.requests[one].left:
                    fault = f"{one} gets tokens although it was cancelled" if client.ends == 0 else ""
                    return state._replace(fault=state.fault or fault)
                if offset > len(client.seen) or client.ends:
                    return state._replace(fault=f"{one} gets output {offset} after {len(client.seen)}")
                if client.seen[offset : offset + len(tokens)] != tokens[: len(client.seen) - offset]:
                    return state._replace(fault=f"{one} gets {tokens} at {offset}, and had {client.seen}")
                return _with_client(state, one, seen=client.seen[:offset] + tokens)
            case ("end", one):
                return _with_client(state, one, ends=state.clients[one].ends + 1)
        raise ValueError(f"no command is named {command[0]}")

    def _misread(self, state: EngineState, batch: ModelBatch) -> str:
        """A row of a live request that reads a cell in which something else is."""
        size = self.bounds.page_tokens
        for row in batch.rows:
            request = state.core.requests[row.request]
            for index in range(-(-row.start // size)):
                cell = state.cells[row.pages[index]]
                needed = (*self._chain(request, row.request, index), min(row.start - index * size, size))
                if cell is None or cell[:2] != needed[:2] or cell[2] < needed[2]:
                    return f"batch {batch.number} reads {cell} for {row.request}, which needs {needed}"
        return ""

    def _crash(self, state: EngineState) -> EngineState:
        """The process ends. What the journal has is sent again from where its client stands."""
        core, pending = state.journal, []
        for one, (request, client) in enumerate(zip(core.requests, state.clients, strict=False)):
            if request.left:
                continue
            if len(client.seen) < request.sent:
                pending.append(("stream", one, len(client.seen), request.kept[len(client.seen) : request.sent]))
            if request.phase == "ended" and not client.ends:
                pending.append(("end", one))
        void = (None,) * self.bounds.pages
        clients = state.clients[: len(core.requests)]
        # The sender of a request that the journal does not have sends it again: it was not accepted.
        return EngineState(core, core, void, tuple(pending), lost=True, clients=clients, fault=state.fault)

    # --------------------------------------------------------------------------------------------------------- safety

    def unsafe(self, state: EngineState) -> str:
        if state.fault:
            return state.fault
        for one, request in enumerate(state.core.requests):
            if [token[:2] for token in request.kept] != [(one, number) for number in range(len(request.kept))]:
                return f"{one} keeps {request.kept}"
        for one, client in enumerate(state.clients):
            if client.ends > 1:
                return f"{one} ended twice"
            recorded = state.journal.requests[one] if one < len(state.journal.requests) else None
            if recorded is not None and recorded.left:
                continue
            kept = recorded.kept if recorded is not None else ()
            if client.seen != kept[: len(client.seen)]:
                return f"{one} has {client.seen}, of which its journal has {kept}"
            if client.ends and (recorded is None or recorded.phase != "ended" or client.seen != kept):
                return f"{one} ended with {client.seen} of {kept}"
        return self._written_twice(state.core)

    def at_rest(self, state: EngineState) -> str:
        for one, (request, client) in enumerate(zip(state.core.requests, state.clients, strict=True)):
            if not request.left and (client.seen != request.kept or client.ends != 1):
                return f"{one} has {client} of {request.kept}"
        return ""

    def _written_twice(self, core: CoreState) -> str:
        size = self.bounds.page_tokens
        for at, batch in enumerate(core.flight):
            for row in batch.rows:
                written = set(row.pages[row.start // size :])
                for beside in core.flight[at:]:
                    for other in beside.rows:
                        if other.request != row.request and (clash := written & set(other.pages)):
                            if beside.number > batch.number and not clash & set(other.pages[other.start // size :]):
                                continue  # it reads what was written before: whether it may is the cells' to show
                            return f"batches {batch.number} and {beside.number} in flight share pages {sorted(clash)}"
        return ""

    # ------------------------------------------------------------------------------------------------------ exploring

    def moves(self, state: EngineState, left: Left) -> Iterator[Move]:
        if left.has("restarts") and not state.lost:
            yield Move(("lose",), "restarts")
        if left.has("crashes") and not state.lost:
            yield Move(("crash",), "crashes")
        if not state.written:
            yield Move(("write",))
        eager = self.lax == "record before commands"
        if state.pending and (state.written or eager):
            anyone = range(len(state.pending)) if self.lax == "commands in order" else (0,)
            yield from (Move(("perform", number)) for number in anyone)
        if (state.pending or not state.written) and self.lax != "commands before the next event":
            return
        for event, decided, commands, spends in self._events(state, left):
            yield Move(("fold", event, decided, commands), spends)

    def _events(self, state: EngineState, left: Left) -> Iterator[tuple[Action, Any, Any, str]]:
        core = state.core
        if state.lost:
            if self.lax != "restart after a loss":
                yield ("restart", core.generation + (self.lax != "restart generation rises")), (), (), ""
                return
        if left.has("arrivals") and (one := len(core.requests)) < len(self.bounds.arrivals):
            yield ("arrive", one, *self.bounds.arrivals[one]), (), (), "arrivals"
        live = [one for one, request in enumerate(core.requests) if request.phase in LIVE]
        if left.has("cancels"):
            for one in live:
                closes = self.lax != "cancel closes"
                yield ("cancel", one), (), (("end", one, "cancelled"),) if closes else (), "cancels"
        yield from self._results(state, left)
        launches = list(self._launches(core)) if len(core.flight) <= self.bounds.depth else []
        yield from ((("slot",), (), (launch,), "") for launch in launches)
        is_stuck = not launches and not core.flight  # then a retraction is no choice: all pages are held by requests
        if left.has("retractions") or is_stuck:
            running = [one for one in live if core.requests[one].phase == "running"]
            spends = "" if is_stuck else "retractions"
            yield from ((("slot",), (("retract", one),), (), spends) for one in running)

    def _results(self, state: EngineState, left: Left) -> Iterator[tuple[Action, Any, Any, str]]:
        seen: set[int] = set()
        due = [*state.device, *([state.last] if state.last is not None else [])]
        for batch in due:
            if batch.generation in seen and self.lax not in ("results in launch order", "results once"):
                continue
            seen.add(batch.generation)
            for error in (False, True) if left.has("errors") else (False,):
                event = ("result", batch.number, batch.generation, error)
                try:
                    _, core = self._collect(state, *event[1:])
                except Exception:  # forbidden; `after` refuses it, too
                    continue
                spends = "errors" if error else ""
                taken = state.core.flight[0] if core.flight != state.core.flight else None
                yield from (
                    (event, (), commands, more or spends) for commands, more in self._commands(core, taken, error, left)
                )

    def _commands(
        self, core: CoreState, taken: ModelBatch | None, error: bool, left: Left
    ) -> Iterator[tuple[tuple[Action, ...], str]]:
        if taken is None:
            yield (), ""
            return
        streams: list[Action] = []
        ends: list[Action] = []
        stops: list[int] = []
        for row in taken.rows:
            request = core.requests[row.request]
            if request.phase not in LIVE or request.epoch != row.epoch:
                continue
            if error:
                ends.append(("end", row.request, "error"))
                continue
            if (count := len(request.kept) - request.sent) > 0:
                offset = request.sent + (self.lax == "streams follow" and count > 1)
                streams.append(("stream", row.request, offset, len(request.kept) - offset))
            if len(request.kept) >= request.limit:
                ends.append(("end", row.request, "length"))
            elif row.samples:
                stops.append(row.request)
        if self.lax == "sent before the end" and ends:
            yield tuple(ends), ""
        if self.lax == "ends once":
            yield (*streams, *ends, *ends), ""
        if self.lax == "length ends" or (self.lax == "errors end" and error):
            yield tuple(streams), ""
        yield (*streams, *ends), ""
        if left.has("stops") and not error:
            yield from (((*streams, *ends, ("end", one, "stop")), "stops") for one in stops)
        if left.has("holds") and streams and not ends and not error:
            yield (), "holds"

    def _launches(self, core: CoreState) -> Iterator[Action]:
        options = [self._spans(core, one) for one in range(len(core.requests))]
        for choice in product(*([None, *found] for found in options)):
            rows = tuple(row for row in choice if row is not None)
            if not rows:
                continue
            if self.lax == "rows are live":
                yield "launch", core.next_batch, core.generation, (*rows, rows[0])
            if self.lax == "plans name their generation":
                yield "launch", core.next_batch, core.generation - 1, rows
            yield "launch", core.next_batch, core.generation, rows

    def _spans(self, core: CoreState, one: int) -> list[tuple[Any, ...]]:
        """Rows of one request: where it stands, or from any part of its prompt that pages hold."""
        request, size = core.requests[one], self.bounds.page_tokens
        if request.phase not in LIVE or request.known - request.prompt >= request.limit:
            return []
        found: list[tuple[Any, ...]] = []
        kept = [request.pages] if request.phase == "running" else [(), *self._cached(core, one)]
        for table in kept:
            start = request.at if request.phase == "running" else len(table) * size
            starts = (start, start + 1) if self.lax == "spans follow" else (start,)
            for first, stop in product(starts, sorted({request.known, min(start + size, request.known)})):
                fresh = -(-stop // size) - len(table)
                if first >= stop or fresh < 0:
                    continue
                for pages in self._unlike(table, fresh, core):
                    if self.lax == "newest samples":
                        found.append((one, first, stop, stop != request.known, (*table, *pages)))
                    found.append((one, first, stop, stop == request.known, (*table, *pages)))
        return found

    def _cached(self, core: CoreState, one: int) -> list[tuple[int, ...]]:
        request, tables = core.requests[one], [()]
        flying = {batch.number for batch in core.flight}
        found: list[tuple[int, ...]] = []
        for index in range((request.known - 1) // self.bounds.page_tokens):
            key = self._chain(request, one, index)
            any_page, any_time = self.lax == "cached KV is the prefix", self.lax == "delivered KV is shared"
            pages = [
                page
                for page, cell in enumerate(core.content)
                if cell and (any_page or cell[:2] == key) and (any_time or cell[3] not in flying)
            ]
            tables = [(*table, page) for table in tables for page in pages if page not in table]  # type: ignore[misc]
            found += tables
        return found

    def _unlike(self, table: tuple[int, ...], count: int, core: CoreState) -> Iterator[tuple[int, ...]]:
        """So many pages beside a table that nothing holds, once for all with equal content."""
        used = {page for request in core.requests for page in request.pages}
        used |= {page for batch in core.flight for row in batch.rows for page in row.pages}
        eager = self.lax in ("deferred frees", "one owner")
        free = [page for page in range(self.bounds.pages) if page not in table and (eager or page not in used)]
        seen: set[object] = set()
        for pages in permutations(free, count):
            name = tuple(page if page in used else core.content[page] for page in pages)
            if name not in seen:
                seen.add(name)
                yield pages

    def canonical(self, state: EngineState) -> object:
        """Number pages as a walk meets them, and batches from the next one back."""
        pages: dict[int, int] = {}
        following = state.core.next_batch

        def renamed(table: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(pages.setdefault(page, len(pages)) for page in table)

        def of_row(row: ModelRow) -> ModelRow:
            is_of_now = int(row.epoch == state.core.requests[row.request].epoch)
            return row._replace(pages=renamed(row.pages), epoch=is_of_now)

        def batches(some: tuple[ModelBatch, ...]) -> list[object]:
            return [(one.number - following, one.generation, [of_row(row) for row in one.rows]) for one in some]

        def of(core: CoreState) -> object:
            requests = [request._replace(pages=renamed(request.pages), epoch=0) for request in core.requests]
            return requests, batches(core.flight), core.generation, core.next_batch - following

        parts: list[object] = [of(state.core)]
        if state.journal is not state.core and state.journal != state.core:
            parts.append(of(state.journal))
        parts.append(batches(state.device))
        parts.append(batches((state.last,)) if state.last is not None else [])
        for command in state.pending:
            parts.append(("launch", batches((command[1],))) if command[0] == "launch" else command)

        flying = {batch.number for some in (state.core.flight, state.journal.flight, state.device) for batch in some}

        def cell(one: Cell | None) -> tuple[int, ...]:
            return () if one is None else (*one[:3], one[3] - following if one[3] in flying else 1)

        columns = [
            (
                pages.get(page, len(pages)),
                cell(state.core.content[page]),
                cell(state.cells[page]),
                cell(state.journal.content[page]),
            )
            for page in range(self.bounds.pages)
        ]
        return parts, sorted(columns), state.written, state.lost, state.clients, state.fault


def _with(core: CoreState, number: int, **fields: Any) -> CoreState:
    requests = list(core.requests)
    requests[number] = requests[number]._replace(**fields)
    return core._replace(requests=tuple(requests))


def _with_client(state: EngineState, number: int, **fields: Any) -> EngineState:
    clients = list(state.clients)
    clients[number] = clients[number]._replace(**fields)
    return state._replace(clients=tuple(clients))


def _back(core: CoreState, number: int) -> CoreState:
    """A request waits again, with what it has."""
    request = core.requests[number]
    known = request.prompt + len(request.kept)
    return _with(core, number, phase="waiting", epoch=request.epoch + 1, at=0, known=known, pages=())


def _of_no_pages(batch: ModelBatch) -> ModelBatch:
    """A batch whose pages are those of a lost device."""
    return batch._replace(rows=tuple(row._replace(pages=()) for row in batch.rows))


def _without(cells: tuple[Cell | None, ...], number: int) -> tuple[Cell | None, ...]:
    """What a batch wrote is void."""
    return tuple(None if cell is not None and cell[3] == number else cell for cell in cells)
