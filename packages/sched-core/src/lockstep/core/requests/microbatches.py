"""Microbatches: one running batch for each launch slot of an engine (docs/distributed.md).

A decode needs the newest token of its row, so one running batch keeps one pipeline stage busy at a time. An engine with
layers on several stages therefore has `pp_size + pp_async_batch_depth` running batches, and each is launched by itself.
The batch that is launched next enters the first stage while earlier ones are in later stages:

    stage 1   | m0 | m1 | m2 | m0 | m1 ...        m0, m1, m2: decodes of three microbatches
    stage 2   .    | m0 | m1 | m2 | m0 ...

`LaneReady(microbatch)` offers a launch slot of that microbatch and of no other. Each may have `overlap_depth + 1`
batches in flight. The stages run batches in launch order, and results arrive in that order over all microbatches.
Deferred frees therefore do not depend on microbatches.

**Places.** Each microbatch has `pp_max_micro_batch_size` *places*. A request takes one in the microbatch whose launch
admits it, and keeps it until it ends or is retracted. Only the chunked request moves, before it decodes: its next chunk
is launched with the next microbatch that has a free place, and its place moves to that microbatch. So the chunks of a
long prompt follow each other through the stages. If no other microbatch has a place, they wait for the request's own.

**Shared by all microbatches** are the waiting queue, the pages, rows and limits of the engine, and the choice of a
request to retract, made among all members. A decode for which pages were freed by a retraction goes before every
prefill, including those of other microbatches.

The running batches are a list, `states`; `at` is the index of the one whose launch is planned, or was planned last. An
engine without pipeline stages has a list of one, with places for all requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from msgspec import UNSET, Struct, UnsetType
from numpy.typing import NDArray

from lockstep.core.contract.checks import fail, same
from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.errors import ContractError
from lockstep.core.contract.events import BatchFinished, LaneReady, RequestId
from lockstep.core.requests.batching import InFlight
from lockstep.core.requests.retraction import choose_victim, pages_ahead
from lockstep.core.requests.running import RunningState
from lockstep.core.requests.table import EMPTY_BATCH, Int32s, Request, RunningBatch

ENDLESS = 1 << 62  # places in the only running batch of an engine without pipeline stages


class RunningStateImage(Struct, forbid_unknown_fields=True, rename={"running_batch": "cohort"}):
    """A running batch in a snapshot."""

    running_batch: list[RequestId]
    positions: bytes
    horizon: int
    decode_owed: bool
    decode_launches: int
    extended_at: int
    forced_at: int


class MicrobatchesImage(Struct, forbid_unknown_fields=True):
    """All microbatches in a snapshot. The fields are those of `Microbatches`; `columns` has one entry each."""

    at: int
    members: list[tuple[RequestId, int]]
    full: list[int]
    passes: list[tuple[int, int]]
    columns: list[RunningStateImage]


class RunningPart(Struct):
    """The running batches in a snapshot: the one whose launch is planned, and all of them where there are several."""

    running_batch: list[int]
    positions: bytes
    decode_owed: bool
    horizon: int
    decode_launches: int
    extended_at: int
    forced_at: int
    microbatches: MicrobatchesImage | UnsetType = UNSET


OWN: dict[str, str] = {
    "running_batch": "the requests that decode together, as columns",
    "positions": "the next position of each of these requests",
    "horizon": "decode launches until one of them ends by length or outgrows the tables",
    "decode_owed": "pages were freed for its next decode, which goes before any prefill of any microbatch",
    "decode_launches": "its decode launches so far; `prefill_decode_interval` and `retract_every` count them",
    "extended_at": "`decode_launches` at its last extend",
    "forced_at": "`decode_launches` at its last forced retraction",
}
"""The state of each microbatch, see `RunningState`, with meanings. docs/distributed.md contains this table."""


def table_text() -> str:
    """Return OWN as the Markdown table of docs/distributed.md."""
    rows = [("of each microbatch", "means"), ("---", "---"), *((f"`{name}`", text) for name, text in OWN.items())]
    return "\n".join(f"| {name} | {text} |" for name, text in rows)


class Microbatches:
    """The running batches of one engine, and the microbatch in which each running request has its place."""

    def __init__(self, config: SchedConfig) -> None:
        self.several = config.pipelines  # whether there is more than one microbatch
        # places of each microbatch
        self.size = ENDLESS if config.pp_max_micro_batch_size is UNSET else config.pp_max_micro_batch_size
        self.count = config.microbatches
        self.states = [RunningState(config.prefill_decode_interval) for _ in range(self.count)]
        self.at = 0  # the microbatch whose launch is planned, or was planned last
        self.current = self.states[0]  # its running batch
        self.members: dict[RequestId, int] = {}  # microbatch of each running request, in the order of admission
        self.places = [0] * self.count  # taken places by microbatch
        self.passes: list[tuple[int, int]] = []  # end and duration in us of passes that overlap later ones in time
        self.full: set[int] = set()  # microbatches in which admission ran out of memory or places, until a free

    # ---------------------------------------------------------------------------------------------------- the launches

    def turn_to(self, number: int) -> RunningState:
        """Make this microbatch the one whose launch is planned, and return its running batch."""
        self.at = number
        self.current = self.states[number]
        return self.current

    # mechanism: pipeline-stages (decided)
    def next_slot(self, open_slots: Sequence[int], offered: int) -> int:
        """Return the microbatch to offer a slot to: the next open one behind `offered`, the one offered last."""
        behind = [number for number in open_slots if number > offered]
        return (behind or [*open_slots, self.at])[0]

    def check(self, event: LaneReady) -> None:
        """Raise ContractError for a slot of a microbatch that does not exist."""
        if not self.several and event.microbatch:
            raise ContractError(f"LaneReady for microbatch {event.microbatch}: this engine has no pipeline stages")
        if not 0 <= event.microbatch < self.count:
            raise ContractError(f"LaneReady for microbatch {event.microbatch}: there are {self.count}, counted from 0")

    def begin_launch(self, number: int, any_full: bool) -> bool:
        """Turn to the microbatch of an offered slot, or of an agreed round of data-parallel ranks.

        Args:
            any_full: whether any microbatch is full, as of the last launch; false clears `full`.
        Returns: whether admission to this microbatch had run out of memory or places.
        """
        if not any_full:
            self.full.clear()
        self.turn_to(number)
        return number in self.full

    def end_launch(self, full: bool) -> bool:
        """Record whether admission to the microbatch of this launch ran out. Returns: whether any is full."""
        if full:
            self.full.add(self.at)
        else:
            self.full.discard(self.at)
        return bool(self.full)

    def in_flight(self, batches: Iterable[InFlight]) -> int:
        """Return the number of batches in flight of the microbatch whose launch is planned."""
        return sum(batch.plan.microbatch == self.at for batch in batches)

    def ran_undisturbed(self, event: BatchFinished) -> bool:
        """Return whether the duration of a pass of one of several microbatches is its own: a pass behind a longer one
        waits for it at each stage."""
        took_us = event.finished_us - event.started_us
        self.passes = [one for one in self.passes if one[0] > event.started_us]
        longest_us = max([other_us for _, other_us in self.passes], default=0)
        self.passes.append((event.finished_us, took_us))
        return took_us >= longest_us

    def owes_elsewhere(self) -> bool:
        """Return whether a decode of another microbatch is owed and not launched yet."""
        return any(own.decode_owed and own.batch.size and i != self.at for i, own in enumerate(self.states))

    @property
    def decode_launches(self) -> int:
        """Decode launches of all microbatches."""
        return sum(own.decode_launches for own in self.states)

    # ---------------------------------------------------------------------------------------------------------- places

    def has_place(self, request: Request | None = None) -> bool:
        """Return whether the microbatch whose launch is planned has a free place, or contains `request` already."""
        return self.places[self.at] < self.size or (
            request is not None and self.members.get(request.request_id) == self.at
        )

    @property
    def places_available(self) -> int:
        """The free places of all microbatches."""
        return sum(max(self.size - taken, 0) for taken in self.places)

    def free_places(self, in_flight: Iterable[InFlight], leaving: list[Request]) -> int:
        """Return the free places of the planned microbatch once all in flight is delivered and `leaving` have left."""
        return self._free_then(in_flight, leaving)[self.at]

    def has_place_for_newcomer(self, in_flight: Iterable[InFlight], least: Request) -> bool:
        """Return whether a new request is to start in the microbatch whose launch is planned.

        This holds if a place is free there or becomes free with the batches in flight. It also holds if no microbatch
        has such a place, and `least`, the running request that is to be preempted first, has its place there.
        """
        free = self._free_then(in_flight, [])
        return free[self.at] > 0 or (max(free) <= 0 and self.members[least.request_id] == self.at)

    def _free_then(self, in_flight: Iterable[InFlight], leaving: list[Request]) -> list[int]:
        """Return the free places by microbatch once all in flight is delivered and `leaving` have left."""
        free = [self.size - taken for taken in self.places]
        ending = [request for batch in in_flight for request in batch.ending_requests()]
        for request in (*ending, *leaving):
            free[self.members[request.request_id]] += 1
        return free

    def take_place(self, request: Request) -> None:
        """Assign a place in the microbatch whose launch is planned. A place in another microbatch is freed."""
        before = self.members.get(request.request_id)
        if before == self.at:
            return  # the usual case of a later chunk
        if before is not None:
            self.places[before] -= 1
        self.members[request.request_id] = self.at
        self.places[self.at] += 1

    def give_place(self, request: Request) -> None:
        """Free the place of a request that leaves, or that only waits until its KV has been sent."""
        number = self.members.pop(request.request_id, None)
        if number is not None:
            self.places[number] -= 1
        self.full.clear()

    def state_of(self, request: Request) -> RunningState:
        """Return the state of the running batch in which a request has its place."""
        return self.states[self.members[request.request_id]]

    def states_of(self, requests: list[Request]) -> list[RunningState]:
        """Return the states of the running batches in which any of these requests decode, by ascending index."""
        if not self.several:
            return self.states
        numbers = sorted({self.members[request.request_id] for request in requests if request.decodes})
        return [self.states[number] for number in numbers]

    # ---------------------------------------------------------------------------------------------- all running batches

    def pages_of_others(self, page_size: int, ahead: int) -> int:
        """Return the pages that the other microbatches need to decode their next `ahead` tokens."""
        others = [own for i, own in enumerate(self.states) if i != self.at and own.batch.size]
        return sum(pages_ahead(own.batch, own.positions, page_size, ahead) for own in others)

    def together(self) -> tuple[RunningBatch, Int32s]:
        """Return all members of all running batches, and the next position of each. int32 [members]"""
        if not self.several:
            return self.current.batch, self.current.positions
        batch = EMPTY_BATCH
        for own in self.states:
            if own.batch.size:
                batch = batch.joined_by(own.batch)
        return batch, np.concatenate([own.positions for own in self.states])

    def of_current(self) -> NDArray[np.bool_]:
        """Return a mask of the members of the planned microbatch, in the order of `together`. bool [members]"""
        return np.repeat(np.arange(self.count) == self.at, [own.batch.size for own in self.states])

    def victim(self, config: SchedConfig) -> Request:
        """Return the decoding request to retract, see `choose_victim`. The newest is the one admitted last."""
        batch, positions = self.together()
        if self.several and config.retraction_policy == "newest":
            decoding = {request.request_id: request for request in batch.requests}
            return next(decoding[number] for number in reversed(self.members) if number in decoding)
        return batch.requests[choose_victim(config, batch, positions)]

    # --------------------------------------------------------------------------------------------------------- snapshot

    def part(self) -> RunningPart:
        """Return the state for a snapshot."""
        current = self.current
        horizon, decode_owed, decode_launches, extended_at, forced_at = current.numbers
        return RunningPart(
            [request.request_id for request in current.batch.requests],
            current.positions.tobytes(),
            decode_owed,
            horizon,
            decode_launches,
            extended_at,
            forced_at,
            self._image() if self.several else UNSET,
        )

    def load(self, part: RunningPart, requests: Mapping[RequestId, Request]) -> None:
        """Take over the state that `part` returned. Without several microbatches the places are restored apart."""
        if part.microbatches is not UNSET:
            self._load(part.microbatches, requests)
            return
        numbers = (part.horizon, part.decode_owed, part.decode_launches, part.extended_at, part.forced_at)
        self.current.load([requests[number] for number in part.running_batch], part.positions, numbers)

    def check_state(self, in_flight: Sequence[InFlight], holders: list[RequestId], batches_max: int) -> None:
        """S18, S24, S30: a running request has a place in one microbatch, in which it decodes.

        Each microbatch has at most `batches_max` batches in flight.

        Args:
            holders: requests with rows that do not only wait until their KV is sent.
            batches_max: the most batches of one microbatch in flight.
        """
        same("S30 requests with a place", sorted(self.members), sorted(holders))
        places = [list(self.members.values()).count(number) for number in range(self.count)]
        same("S30 places", self.places, places)
        if max(places) > self.size:
            fail(f"S24: {max(places)} requests in a microbatch of {self.size}")
        for number, running in enumerate(self.states):
            for request in running.batch.requests:
                if self.members.get(request.request_id) != number:
                    fail(f"S30: {request.name} decodes in microbatch {number}, its place is in another")
            same(f"S30 positions of microbatch {number}", running.positions.size, running.batch.size)
            launched = [batch for batch in in_flight if batch.plan.microbatch == number]
            if len(launched) > batches_max:
                fail(f"S24: {len(launched)} batches of microbatch {number} in flight")
            for batch in launched:
                for request, row in zip(batch.samplers.requests, batch.samplers.rows.tolist(), strict=True):
                    if row not in batch.dead and self.members.get(request.request_id, number) != number:
                        name, number_of = request.name, batch.plan.batch_id
                        fail(f"S30: batch {number_of} of microbatch {number} samples {name}, of another")

    def _image(self) -> MicrobatchesImage:
        """Return all microbatches for a snapshot."""
        columns = [
            RunningStateImage(
                [request.request_id for request in own.batch.requests], own.positions.tobytes(), *own.numbers
            )
            for own in self.states
        ]
        return MicrobatchesImage(self.at, list(self.members.items()), sorted(self.full), list(self.passes), columns)

    def _load(self, image: MicrobatchesImage, requests: Mapping[RequestId, Request]) -> None:
        """Take over all microbatches of a snapshot."""
        self.full, self.passes = set(image.full), list(image.passes)
        for own, stored in zip(self.states, image.columns, strict=True):
            numbers = (
                stored.horizon,
                stored.decode_owed,
                stored.decode_launches,
                stored.extended_at,
                stored.forced_at,
            )
            members = [requests[request_id] for request_id in stored.running_batch]
            own.load(members, stored.positions, numbers)
        self.members = dict(image.members)
        for number in self.members.values():
            self.places[number] += 1
        self.turn_to(image.at)
