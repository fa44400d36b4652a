"""Rooms between a prefill and a decode engine, as section 6 of docs/contract.md has them.

    prefill engine ──send parts──> hosts ──write──> pages of the decode engine
          <── accepted ──            ── offered ──>
          <────── done, failed or link_down ──────>     exactly one, the same, to each side that has begun

Requests, the choice of pages and the moment of each decision are free within the rules. A request has a *chain*: for
each page of its prompt the number of what the page must contain. Ghosts: the cells of both engines' pages.

    ("p" or "d", event, commands)    an event and the Step of one engine
    ("stage", room, part)            pages of a part are read           ("move", room, part)   and written
    ("read", room)                   pages are read in vain, of a transfer that is being given up
    ("stop", room)                   a cancel reaches the writer
    ("done", room)                   everything has arrived
    ("link_down",), ("lose", side)   everything on the link ends
    ("cut", room), ("lost", room)    the sender's host, the receiver's host finds the link of one room broken
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations
from typing import Any, ClassVar, NamedTuple

from tests.support.contract.machine import Machine
from tests.support.driver.actions import Action
from tests.support.explorer.world import Left, Move

FINAL = ("done", "failed", "link_down")
SIDES = ("p", "d")
FINISHED = ("length", "stop")


class ModelPart(NamedTuple):
    """A part of a prompt that the prefill engine ordered to be sent."""

    start: int
    stop: int
    pages: tuple[int, ...]
    last: bool
    ready: bool  # its batch succeeded


class Half(NamedTuple):
    """One engine's half of a request."""

    phase: str = "absent"  # open, ended
    heard: str = ""  # the final fact
    cancelled: bool = False  # CancelTransfer was ordered
    void: bool = False  # its engine restarted since it arrived: its pages are those of a lost device


class Room(NamedTuple):
    """One request on both engines."""

    chain: tuple[int, ...]
    tokens: int  # of its prompt
    p: Half = Half()
    d: Half = Half()
    accepted: bool = False  # heard by the prefill engine
    offered: bool = False  # heard by the decode engine
    computed: int = 0  # positions launched
    parts: tuple[ModelPart, ...] = ()
    receive: tuple[int, ...] | None = None
    start: int = 0  # the first position to receive
    staged: tuple[tuple[int | None, ...], ...] = ()  # of each part that was read: what was in its pages
    moved: int = 0  # parts that were written
    outcome: str = ""  # as the receiver's host has decided it
    p_cut: bool = False  # the sender's host has found its link broken
    ran: bool = False  # the decode engine has launched it, by received KV or by its own


class TransferState(NamedTuple):
    """Both engines, their hosts, and what is on the way."""

    rooms: tuple[Room, ...]
    p_cells: tuple[int | None, ...]
    d_cells: tuple[int | None, ...]
    flight: tuple[tuple[int, tuple[int, ...]], ...] = ()  # of the prefill engine: number, rooms in it
    told: tuple[tuple[str, int, str], ...] = ()  # facts on the way: side, room, status
    stops: tuple[int, ...] = ()  # rooms whose writers are to stop
    lost: tuple[str, ...] = ()  # engines whose device was lost, before their restart is folded
    fault: str = ""


class TransferBounds(NamedTuple):
    """Sizes of both engines."""

    chains: tuple[tuple[int, ...], ...] = ()  # of the requests that arrive while it is explored
    page_tokens: int = 1
    pages: int = 2  # of each engine
    depth: int = 0
    allocates_first: bool = True  # pages are allocated before the prompt is computed
    inputs: tuple[tuple[str, int], ...] = ()  # cancels, errors, link_downs, losses


class TransferMachine(Machine):
    """Two engines."""

    ends = False  # slots may be offered again and again
    rules: ClassVar[dict[str, str]] = {
        # of the hosts
        "facts wait for their request": "facts about a request that has not arrived yet wait until it has",
        "facts arrive once": "each side receives exactly one of done, failed and link_down",
        "parts in order": "parts move in the order of the parts",
        "parts behind their batch": "a part moves once its batch has succeeded",
        "parts into pages": "a part moves once the receiver has pages",
        "nothing moves behind the end": "after the end of a transfer nothing is written",
        "done is the last part": "done when everything has arrived",
        "done behind the result": "the sender's engine receives done behind the result of that batch",
        "accepted is a receive": "the sender's engine receives accepted when StartTransfer(receive) was ordered",
        "offered is the last part": "the receiver's engine receives offered when the last part was ordered",
        "a cancel ends": "once nothing more is written both engines receive failed, unless it was done already",
        "a lost engine ends": "the loss of an engine ends every transfer on it as link_down, on both sides",
        # of the cores
        "sends behind accepted": "the prompt is computed once the decode engine has pages",
        "parts follow": "parts have no gap, and the last one ends with the prompt",
        "parts are computed": "the pages of a part have the KV of its positions, computed by the batch it names",
        "received once": "pages are given to a transfer once",
        "late pages behind offered": "with transfer_allocation prefill_complete pages are given behind offered",
        "quarantine of the receiver": "until its end, or a restart of this side, its pages are used for nothing else",
        "quarantine of the sender": "until its end, or a restart of this side, its pages are used for nothing else",
        "runs behind done": "a row that received its KV runs once everything has arrived",
        "gives up before it runs": "a request computes its prompt itself once no transfer writes its pages",
        "abandons are cancelled": "CancelTransfer for each transfer that is given up before its end",
        "halves end once": "exactly one RequestFinished or RequestRejected closes every request",
        "finishes behind done": "a request is finished by the transfer only when that is done",
    }

    def __init__(self, bounds: TransferBounds, *, lax: str = "") -> None:
        super().__init__(lax=lax)
        self.bounds = bounds

    def first(self) -> TransferState:
        void = (None,) * self.bounds.pages
        return TransferState((), void, void)

    def inputs(self) -> dict[str, int]:
        return dict(self.bounds.inputs)

    def is_idle(self, state: TransferState) -> bool:
        if state.flight or state.told or state.stops or state.lost:
            return False
        return all(
            half.phase == "ended" and (half.heard or not begun)
            for room in state.rooms
            for half, begun in ((room.p, room.parts), (room.d, room.receive))
        )

    # --------------------------------------------------------------------------------------------------------- a step

    def after(self, state: TransferState, action: Action) -> TransferState:
        match action:
            case ("room", chain, tokens):
                return state._replace(rooms=(*state.rooms, Room(chain, tokens)))
            case ("stage", number, at):
                return self._stage(state, number, at)
            case ("read", number):
                self._check_readable(state.rooms[number], number)
                return state
            case ("move", number, at):
                return self._moved(state, number, at)
            case ("lost", number):
                return self._over(state, number, "link_down")
            case ("stop", number):
                state = state._replace(stops=tuple(one for one in state.stops if one != number))
                return state if self.lax == "a cancel ends" else self._over(state, number, "failed")
            case ("link_down",):
                for number in range(len(state.rooms)):
                    state = self._over(state, number, "link_down")
                return state
            case ("cut", number):
                return self._cut(state, number)
            case ("done", number):
                room = state.rooms[number]
                whole = room.parts and room.parts[-1].last and room.moved == len(room.parts)
                self.need("done is the last part", whole, f"{number}")
                return self._over(state, number, "done")
            case ("lose", side):
                return self._lose(state, side)
            case (side, event, commands):
                return self._step(state, side, event, commands)
        raise ValueError(f"no step is named {action[0]}")

    def _step(self, state: TransferState, side: str, event: Action, commands: tuple[Action, ...]) -> TransferState:
        match event:
            case ("arrive", number):
                assert _half(state, side, number).phase == "absent"
                state = _with_half(state, side, number, phase="open")
            case ("told", number, status):
                state = self._hear(state, side, number, status)
            case ("result", error):
                state = self._collect(state, error)
            case ("restart",):
                state = state._replace(lost=tuple(one for one in state.lost if one != side))
                for number in range(len(state.rooms)):
                    state = _with_half(state, side, number, void=_half(state, side, number).phase != "absent")
                if side == "p":
                    state = state._replace(flight=())
        for command in commands:
            match command:
                case ("launch", number, rows):
                    state = self._launch_prompts(state, number, rows) if side == "p" else self._run(state, rows)
                case ("send", number, *part):
                    state = self._send(state, number, *part)
                case ("receive", number, pages, start):
                    state = self._receive(state, number, pages, start)
                case ("cancel_transfer", number):
                    state = _with_half(state, side, number, cancelled=True)
                    if not state.rooms[number].outcome and number not in state.stops:
                        state = state._replace(stops=tuple(sorted((*state.stops, number))))
                case ("end", number, reason):
                    state = self._end(state, side, number, reason)
        return state

    def _hear(self, state: TransferState, side: str, number: int, status: str) -> TransferState:
        room, fact = state.rooms[number], (side, number, status)
        self.need("facts wait for their request", _half(state, side, number).phase != "absent", f"{fact}")
        match status:
            case "accepted":
                self.need("accepted is a receive", room.receive is not None, f"{fact}")
                room = room._replace(accepted=True)
            case "offered":
                self.need("offered is the last part", room.parts and room.parts[-1].last, f"{fact}")
                room = room._replace(offered=True)
            case _:
                self.need("facts arrive once", fact in state.told, f"{fact} of {state.told}")
                if status == "done" and side == "p":
                    ready = room.parts and room.parts[-1].ready
                    self.need("done behind the result", ready, f"{fact}")
        told = list(state.told)
        if fact in told:
            told.remove(fact)
        state = state._replace(told=tuple(told), rooms=_put(state.rooms, number, room))
        return _with_half(state, side, number, heard=status) if status in FINAL else state

    def _end(self, state: TransferState, side: str, number: int, reason: str) -> TransferState:
        half, room = _half(state, side, number), state.rooms[number]
        self.need("halves end once", half.phase == "open", f"{side} {number} ends by {reason}")
        begun = room.receive is not None if side == "d" else True
        given_up = half.heard == "" and (begun or not room.ran)
        self.need("abandons are cancelled", not given_up or half.cancelled, f"{side} {number} ends by {reason}")
        if reason in FINISHED:
            self.need("finishes behind done", half.heard == "done" or (side == "d" and room.ran), f"{side} {number}")
        return _with_half(state, side, number, phase="ended")

    # ---------------------------------------------------------------------------------------------- the prefill engine

    def _launch_prompts(self, state: TransferState, batch: int, rows: tuple[Any, ...]) -> TransferState:
        cells, rooms = list(state.p_cells), list(state.rooms)
        for number, start, stop, pages in rows:
            room, size = rooms[number], self.bounds.page_tokens
            sends_late = not self.bounds.allocates_first
            self.need("sends behind accepted", room.accepted or sends_late, f"{number} is computed")
            for index in range(start // size, len(pages)):
                for other, one in enumerate(state.rooms):
                    sent = {page for part in one.parts for page in part.pages}
                    open_for = other != number and one.parts and not one.p.heard and not one.p.void
                    clash = open_for and pages[index] in sent
                    self.need("quarantine of the sender", not clash, f"page {pages[index]} of {other} for {number}")
                cells[pages[index]] = room.chain[index]
            rooms[number] = room._replace(computed=stop)
        numbers = tuple(row[0] for row in rows)
        return state._replace(
            p_cells=tuple(cells),
            rooms=tuple(rooms),
            flight=(*state.flight, (batch, numbers)) if numbers else state.flight,
        )

    def _send(
        self, state: TransferState, number: int, start: int, stop: int, pages: tuple[int, ...], batch: int | None
    ) -> TransferState:
        room, size = state.rooms[number], self.bounds.page_tokens
        before = room.parts[-1].stop if room.parts else room.start if self.bounds.allocates_first else 0
        self.need("parts follow", start == before < stop <= room.computed, f"{number}: [{start}:{stop}) after {before}")
        self.need("parts follow", not room.parts or not room.parts[-1].last, f"{number} sends more than its prompt")
        first = start // size
        held = tuple(state.p_cells[page] for page in pages)
        needed = room.chain[first : -(-stop // size)]
        self.need("parts are computed", held == needed, f"{number}: pages {pages} have {held}, needed are {needed}")
        flying = [one for one, _ in state.flight]
        self.need("parts are computed", batch is None or batch in flying or batch < min(flying, default=batch + 1))
        part = ModelPart(start, stop, pages, stop == room.tokens, batch not in flying)
        state = state._replace(rooms=_put(state.rooms, number, room._replace(parts=(*room.parts, part))))
        if part.last and not room.outcome and not self.bounds.allocates_first:
            state = _tell(state, "d", number, "offered")
        return state

    def _collect(self, state: TransferState, error: bool) -> TransferState:
        (_, numbers), flight = state.flight[0], state.flight[1:]
        rooms = list(state.rooms)
        for number in numbers:
            room = rooms[number]
            parts = tuple(part._replace(ready=part.ready or not error) for part in room.parts)
            later = any(number in others for _, others in flight)
            if later:  # its newest part belongs to a later batch
                parts = (*parts[:-1], room.parts[-1]) if room.parts else parts
            rooms[number] = room._replace(parts=parts)
        return state._replace(flight=flight, rooms=tuple(rooms))

    # ----------------------------------------------------------------------------------------------- the decode engine

    def _receive(self, state: TransferState, number: int, pages: tuple[int, ...], start: int) -> TransferState:
        room = state.rooms[number]
        self.need("received once", room.receive is None, f"{number} is given {pages}")
        is_due = room.offered or self.bounds.allocates_first
        self.need("late pages behind offered", is_due, f"{number} is given {pages}")
        self._check_open(state, number, pages)
        cells = _put_all(state.d_cells, pages, None)
        room = room._replace(receive=pages, start=start)
        state = state._replace(rooms=_put(state.rooms, number, room), d_cells=cells)
        return state if room.outcome else _tell(state, "p", number, "accepted")

    def _check_open(self, state: TransferState, number: int, pages: tuple[int, ...]) -> None:
        """No page of `pages` is one that another transfer writes, or that waits for its row."""
        for other, one in enumerate(state.rooms):
            if other == number or one.receive is None or one.d.void:
                continue
            waits = one.d.heard == "done" and not one.ran and one.d.phase == "open"
            clash = set(pages) & set(one.receive) if not one.d.heard or waits else ()
            self.need("quarantine of the receiver", not clash, f"pages {clash} of {other} are used for {number}")

    def _run(self, state: TransferState, rows: tuple[Any, ...]) -> TransferState:
        for number, received, written in rows:
            room = state.rooms[number]
            self._check_open(state, number, written)
            if received and not room.ran:
                self.need("runs behind done", room.d.heard == "done", f"{number}")
                expected = room.chain[room.start // self.bounds.page_tokens :]
                held = tuple(state.d_cells[page] for page in room.receive or ())[: len(expected)]
                if held != expected:
                    state = state._replace(fault=f"{number} runs on {held}, needed are {expected}")
            elif not room.ran:
                beside = room.d.cancelled and not set(written) & set(room.receive or ())
                is_free = room.receive is None or room.d.heard or room.d.void or beside
                self.need("gives up before it runs", is_free, f"{number} computes its prompt")
            cells = _put_all(state.d_cells, written, -1 - number)
            state = state._replace(rooms=_put(state.rooms, number, room._replace(ran=True)), d_cells=cells)
        return state

    # ------------------------------------------------------------------------------------------------------- the hosts

    def _stage(self, state: TransferState, number: int, at: int) -> TransferState:
        """Pages of a part are read, on the prefill engine."""
        room = state.rooms[number]
        self._check_readable(room, number)
        self.need("parts in order", at == len(room.staged), f"part {at} of {number} after {len(room.staged)}")
        part = room.parts[at]
        self.need("parts behind their batch", part.ready, f"part {at} of {number}")
        self.need("parts into pages", room.receive is not None, f"part {at} of {number}")
        read = tuple(state.p_cells[page] if part.ready else None for page in part.pages)
        staged = (*room.staged[:at], *((),) * (at - len(room.staged)), read, *room.staged[at + 1 :])
        return state._replace(rooms=_put(state.rooms, number, room._replace(staged=staged)))

    def _check_readable(self, room: Room, number: int) -> None:
        """The sender may read its own pages until its engine has received the end."""
        is_over = room.p.heard or room.p_cut
        self.need("nothing moves behind the end", not is_over, f"{number} is over for its sender")

    def _moved(self, state: TransferState, number: int, at: int) -> TransferState:
        """What was read of a part is written, on the decode engine."""
        room, size = state.rooms[number], self.bounds.page_tokens
        self.need("nothing moves behind the end", not room.outcome, f"{number} is {room.outcome}")
        self.need("parts in order", at == room.moved, f"part {at} of {number} after {room.moved}")
        part, cells = room.parts[at], list(state.d_cells)
        for index, content in enumerate(room.staged[at], part.start // size):
            to = index - room.start // size
            for page in (room.receive or ())[to : to + 1] if to >= 0 else ():
                owner = next((i for i, one in enumerate(state.rooms) if i != number and _needs(one, page)), None)
                if owner is not None:
                    state = state._replace(fault=f"a part of {number} is written to page {page} of {owner}")
                cells[page] = content
        moved = room._replace(moved=min(room.moved + 1, len(room.parts)))
        return state._replace(d_cells=tuple(cells), rooms=_put(state.rooms, number, moved))

    def _over(self, state: TransferState, number: int, outcome: str) -> TransferState:
        room = state.rooms[number]
        if room.outcome:
            return state
        state = state._replace(rooms=_put(state.rooms, number, room._replace(outcome=outcome)))
        for side in SIDES if not room.p_cut else ("d",):
            state = _tell(state, side, number, outcome)
        return state

    def _cut(self, state: TransferState, number: int) -> TransferState:
        """The sender's host finds the link broken. What the receiver's host has decided does not reach it any more."""
        room = state.rooms[number]
        due = ("p", number, room.outcome)
        if room.p_cut or (room.outcome and due not in state.told):
            return state
        told = [one for one in state.told if one != due]
        state = state._replace(told=tuple(told), rooms=_put(state.rooms, number, room._replace(p_cut=True)))
        return _tell(state, "p", number, "link_down")

    def _lose(self, state: TransferState, side: str) -> TransferState:
        if self.lax != "a lost engine ends":
            for number in range(len(state.rooms)):
                state = self._over(state, number, "link_down")
        void = (None,) * self.bounds.pages
        state = state._replace(p_cells=void) if side == "p" else state._replace(d_cells=void)
        gone = tuple(one for one in state.told if one[0] != side or one[2] in FINAL)
        return state._replace(lost=(*state.lost, side), told=gone)

    # --------------------------------------------------------------------------------------------------------- safety

    def unsafe(self, state: TransferState) -> str:
        if state.fault:
            return state.fault
        for number, room in enumerate(state.rooms):
            if "done" in (room.p.heard, room.d.heard) and room.outcome != "done":
                return f"{number} is {room.outcome}, and a side heard done"
            if {room.p.heard, room.d.heard} == {"done", "failed"}:
                return f"the sides of {number} heard done and failed"
        return ""

    def at_rest(self, state: TransferState) -> str:
        for number, room in enumerate(state.rooms):
            if (room.parts and not room.p.heard) or (room.receive is not None and not room.d.heard):
                return f"{number} keeps its pages: {room}"
        return ""

    def canonical(self, state: TransferState) -> object:
        """Number the pages of each engine as a walk meets them."""
        p, d = _Renamed(), _Renamed()
        rooms = [
            room._replace(
                parts=tuple(part._replace(pages=p.of(part.pages)) for part in room.parts),
                receive=None if room.receive is None else d.of(room.receive),
            )
            for room in state.rooms
        ]
        return (rooms, p.columns(state.p_cells), d.columns(state.d_cells), *state[3:])

    # ------------------------------------------------------------------------------------------------------ exploring

    def moves(self, state: TransferState, left: Left) -> Iterator[Move]:
        if len(state.rooms) < len(self.bounds.chains):
            chain = self.bounds.chains[len(state.rooms)]
            yield Move(("room", chain, len(chain) * self.bounds.page_tokens))
        if left.has("link_downs") and any(not room.outcome for room in state.rooms):
            yield Move(("link_down",), "link_downs")
        if left.has("link_downs"):
            yield from (Move(("cut", number), "link_downs") for number in range(len(state.rooms)))
        yield from (Move(("lost", number)) for number, room in enumerate(state.rooms) if room.p_cut)
        if left.has("losses"):
            yield from (Move(("lose", side), "losses") for side in SIDES if not state.lost)
        yield from (Move(("stop", number)) for number in state.stops)
        yield from (Move(("done", number)) for number, room in enumerate(state.rooms) if not room.outcome)
        for number, room in enumerate(state.rooms):
            yield from (Move(("stage", number, at)) for at in range(len(room.parts)))
            yield from (Move(("move", number, at)) for at in range(len(room.staged)))
        for side in SIDES:
            if side in state.lost:
                ends = [("end", i, "transfer") for i in self._open(state, side)]
                stops = [("cancel_transfer", i) for _, i, _ in ends if not _half(state, side, i).heard]
                yield Move((side, ("restart",), (*stops, *ends)))
                continue
            yield from self._facts(state, side)
            for number in self._open(state, side):
                if left.has("cancels"):
                    yield Move((side, ("cancel", number), self._gives_up(state, side, number, "cancelled")), "cancels")
        yield from self._of_prefill(state, left)
        yield from self._of_decode(state)

    def _open(self, state: TransferState, side: str) -> list[int]:
        return [number for number in range(len(state.rooms)) if _half(state, side, number).phase == "open"]

    def _gives_up(self, state: TransferState, side: str, number: int, reason: str) -> tuple[Action, ...]:
        heard = _half(state, side, number).heard or self.lax == "abandons are cancelled"
        return (*(() if heard else (("cancel_transfer", number),)), ("end", number, reason))

    def _facts(self, state: TransferState, side: str) -> Iterator[Move]:
        for number in range(len(state.rooms)):
            if _half(state, side, number).phase == "absent":
                yield Move((side, ("arrive", number), ()))
        known = list(state.told)
        for number, room in enumerate(state.rooms):
            if self.lax == "facts arrive once" and room.outcome:
                known.append((side, number, room.outcome))
            if self.lax == "accepted is a receive" and side == "p" and not room.accepted:
                known.append(("p", number, "accepted"))
            if self.lax == "offered is the last part" and side == "d" and not room.offered:
                known.append(("d", number, "offered"))
        for one, number, status in dict.fromkeys(known):
            if one != side:
                continue
            event, is_open = ("told", number, status), _half(state, side, number).phase == "open"
            ends: tuple[Action, ...] = ()
            if is_open and status in FINAL and side == "p":
                ends = (("end", number, "length" if status == "done" else "transfer"),)
            elif is_open and status in ("failed", "link_down"):
                if not state.rooms[number].ran:  # it ends, or computes its prompt itself
                    yield Move((side, event, ()))
                    ends = (("end", number, "transfer"),)
            yield Move((side, event, ends))

    def _of_prefill(self, state: TransferState, left: Left) -> Iterator[Move]:
        if "p" in state.lost:
            return
        if state.flight:
            for error in (False, True) if left.has("errors") else (False,):
                commands: tuple[Action, ...] = ()
                if error:
                    rooms = [one for one in state.flight[0][1] if _half(state, "p", one).phase == "open"]
                    commands = tuple(act for one in rooms for act in self._gives_up(state, "p", one, "error"))
                yield Move(("p", ("result", error), commands), "errors" if error else "")
        if len(state.flight) > self.bounds.depth:
            return
        size = self.bounds.page_tokens
        for number in self._open(state, "p"):
            room = state.rooms[number]
            index = room.computed // size
            if room.computed == room.tokens or room.p.heard or room.p.cancelled:
                continue
            own = tuple(page for part in room.parts for page in part.pages)
            busy = {
                page
                for i in self._open(state, "p")
                if i != number
                for part in state.rooms[i].parts
                for page in part.pages
            }
            batch = 1 + max((one for one, _ in state.flight), default=-1)
            for page in range(self.bounds.pages):
                if page in own or page in busy:
                    continue
                rows = ((number, room.computed, room.computed + size, (*own, page)),)
                part = ("send", number, index * size, (index + 1) * size, (page,), batch)
                if self.lax == "parts follow":
                    yield Move(("p", ("slot",), (("launch", batch, rows),)))
                if self.lax == "parts are computed":
                    other = (*part[:4], ((page + 1) % self.bounds.pages,), batch)
                    yield Move(("p", ("slot",), (("launch", batch, rows), other)))
                yield Move(("p", ("slot",), (("launch", batch, rows), part)))

    def _of_decode(self, state: TransferState) -> Iterator[Move]:
        if "d" in state.lost:
            return
        used = {page for i in self._open(state, "d") for page in state.rooms[i].receive or ()}
        for number in self._open(state, "d"):
            room = state.rooms[number]
            slots = [page for page in range(self.bounds.pages) if page not in used]
            again = self.lax == "received once" and not room.ran
            if (room.receive is None or again) and not room.d.heard and not room.d.cancelled:
                for pages in permutations(slots, len(room.chain)):
                    yield Move(("d", ("slot",), (("receive", number, pages, 0),)))
            if room.ran:
                yield Move(("d", ("slot",), (("end", number, "length"),)))
            elif room.d.heard == "done" or self.lax == "runs behind done":
                yield Move(("d", ("slot",), (("launch", 0, ((number, True, ()),)),)))
            elif room.d.heard or self.lax == "gives up before it runs":
                for pages in permutations([*slots, *(room.receive or ())], len(room.chain)):
                    if pages == tuple(sorted(pages)):
                        yield Move(("d", ("slot",), (("launch", 0, ((number, False, pages),)),)))


class _Renamed:
    """Pages of one engine, numbered as a walk meets them."""

    def __init__(self) -> None:
        self._known: dict[int, int] = {}

    def of(self, pages: tuple[int, ...]) -> tuple[int, ...]:
        """Return the new numbers."""
        return tuple(self._known.setdefault(page, len(self._known)) for page in pages)

    def columns(self, cells: tuple[int | None, ...]) -> list[tuple[int, int]]:
        """Return what is in the pages, in the new order; equal ones that nothing holds are alike."""
        none = -1_000_000
        return sorted(
            (self._known.get(page, len(cells)), none if cell is None else cell) for page, cell in enumerate(cells)
        )


def _needs(room: Room, page: int) -> bool:
    """Whether a page was given to a request of the decode engine that has not run yet."""
    waits = room.d.phase == "open" and not room.d.void and not room.ran
    return waits and page in (room.receive or ()) and room.outcome in ("", "done")


def _half(state: TransferState, side: str, number: int) -> Half:
    return state.rooms[number].p if side == "p" else state.rooms[number].d


def _with_half(state: TransferState, side: str, number: int, **fields: Any) -> TransferState:
    room = state.rooms[number]._replace(**{side: _half(state, side, number)._replace(**fields)})
    return state._replace(rooms=_put(state.rooms, number, room))


def _tell(state: TransferState, side: str, number: int, status: str) -> TransferState:
    return state._replace(told=tuple(sorted((*state.told, (side, number, status)))))


def _put(rooms: tuple[Room, ...], number: int, room: Room) -> tuple[Room, ...]:
    return (*rooms[:number], room, *rooms[number + 1 :])


def _put_all(cells: tuple[int | None, ...], pages: tuple[int, ...], content: int | None) -> tuple[int | None, ...]:
    return tuple(content if page in pages else cell for page, cell in enumerate(cells))
