"""Microbatches: the launch slots of an engine whose layers are spread over pipeline stages (docs/distributed.md).

Who decodes needs its newest token first, so one running batch keeps one stage busy at a time. Here there are
`pp_size + pp_async_batch_depth` running batches instead, each with launches of its own, and whoever is launched next
enters the first stage while the others go on behind it:

    stage 1   | m0 | m1 | m2 | m0 | m1 ...        m0, m1, m2: decodes of three microbatches
    stage 2   .    | m0 | m1 | m2 | m0 ...

`LaneReady(microbatch)` offers a slot of that microbatch and of no other. Each may have `overlap_depth + 1` batches in
flight. The stages run batches in the order of their launches, so results come in that order, whosever they are: fences
and leases need to know nothing of microbatches.

**Who belongs where.** A request takes a *place* in the microbatch whose launch admits it, of `pp_max_micro_batch_size`,
and keeps it until it ends or is retracted. Only the one whose prompt is split moves, before it decodes: its next chunk
goes with whichever microbatch is launched next and has a place, and its place goes along. So the chunks of a long
prompt follow each other through the stages; where no other microbatch has a place, they wait for its own.

**What is shared**: the line, the pages, rows and limits of the engine, and who gives pages back, who is chosen among
all who decode. What somebody gave pages up for goes before every prefill, of other microbatches too.

The engine has the columns of one microbatch at a time, `at`; `turn_to` puts them away and gets another's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from msgspec import UNSET, Struct
from numpy.typing import NDArray

from lockstep.core.contract.commands import NO_ROWS
from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.errors import ContractError
from lockstep.core.contract.events import BatchFinished, LaneReady, RequestId
from lockstep.core.requests.retraction import choose_victim, pages_ahead
from lockstep.core.requests.table import EMPTY_BATCH, Int32s, Request, RunningBatch

if TYPE_CHECKING:
    from lockstep.core.scheduler.engine import Engine


class MicrobatchState(Struct):
    """What each microbatch has of its own: the fields of Engine by these names, while it is not its turn."""

    running_batch: RunningBatch
    positions: Int32s
    horizon: int
    decode_owed: bool
    decode_launches: int
    extended_at: int
    forced_at: int


class ColumnsImage(Struct, forbid_unknown_fields=True, rename={"running_batch": "cohort"}):
    running_batch: list[RequestId]
    positions: bytes
    horizon: int
    decode_owed: bool
    decode_launches: int
    extended_at: int
    forced_at: int


class MicrobatchesImage(Struct, forbid_unknown_fields=True):
    at: int
    members: list[tuple[RequestId, int]]
    full: list[int]
    passes: list[tuple[int, int]]
    columns: list[ColumnsImage]


OWN: dict[str, str] = {
    "running_batch": "who decodes together, as columns",
    "positions": "where each of them decodes next",
    "horizon": "its decodes until one of them ends by length or outgrows the tables",
    "decode_owed": "somebody gave pages up for its next decode: that goes before any prefill, anywhere",
    "decode_launches": "its decodes so far, by which `prefill_decode_interval` and `retract_every` count",
    "extended_at": "how many these were when it last extended",
    "forced_at": "and when it was last made to retract somebody",
}
"""What each microbatch has of its own, as Columns has it; docs/distributed.md shows it."""

NUMBERS = tuple(name for name in OWN if name not in ("running_batch", "positions"))


def table_text() -> str:
    """OWN in Markdown; what docs/distributed.md shows."""
    rows = [("of each microbatch", "means"), ("---", "---"), *((f"`{name}`", text) for name, text in OWN.items())]
    return "\n".join(f"| {name} | {text} |" for name, text in rows)


class Microbatches:
    """Who runs in which microbatch, and the columns of those whose turn it is not."""

    def __init__(self, config: SchedConfig) -> None:
        assert config.pp_max_micro_batch_size is not UNSET
        self.size = config.pp_max_micro_batch_size  # places in each
        self.count = config.microbatches
        self.at = 0  # whose columns the engine has
        interval = config.prefill_decode_interval
        self.columns = [MicrobatchState(EMPTY_BATCH, NO_ROWS, 0, False, 0, -interval, -1) for _ in range(self.count)]
        self.members: dict[RequestId, int] = {}  # where each has its place, in the order of their admissions
        self.places = [0] * self.count  # taken, by microbatch
        self.passes: list[tuple[int, int]] = []  # end and duration of the newest: those that later ones ran beside
        self.full: set[int] = set()  # where admission ran out of memory or places; not tried again before somebody left

    # ------------------------------------------------------------------------------------------------- whose turn it is

    def turn_to(self, engine: Engine, number: int) -> None:
        """Give the engine the columns of a microbatch, and take back those that it has."""
        if number != self.at:
            self._write_back(engine)
            own = self.columns[number]
            for name in OWN:
                setattr(engine, name, getattr(own, name))
            self.at = number

    def _write_back(self, engine: Engine) -> None:
        own = self.columns[self.at]
        for name in OWN:
            setattr(own, name, getattr(engine, name))

    def check(self, event: LaneReady) -> None:
        """Raise ContractError for a slot of a microbatch that does not exist."""
        if not 0 <= event.microbatch < self.count:
            raise ContractError(f"LaneReady for microbatch {event.microbatch}: there are {self.count}, counted from 0")

    def begin_launch(self, engine: Engine, number: int) -> None:
        """A slot of a microbatch is offered, or ranks have agreed on what runs in it.

        Between launches `Engine.batch_is_full` says whether any is full: whoever clears it clears it for all.
        """
        if not engine.batch_is_full:
            self.full.clear()
        self.turn_to(engine, number)
        engine.batch_is_full = self.at in self.full

    def end_launch(self, engine: Engine) -> None:
        """Note whether its admission ran out."""
        if engine.batch_is_full:
            self.full.add(self.at)
        else:
            self.full.discard(self.at)
        engine.batch_is_full = bool(self.full)

    def in_flight(self, engine: Engine) -> int:
        """Batches in flight of the microbatch whose turn it is."""
        return sum(batch.plan.microbatch == self.at for batch in engine.in_flight)

    def has_work(self, engine: Engine, number: int) -> bool:
        """Whether a launch of a microbatch could find anything: a host need not offer slots to others."""
        decodes = (engine.running_batch if number == self.at else self.columns[number].running_batch).size > 0
        ready = engine.transfers is not None and bool(engine.transfers.ready)
        return decodes or bool(engine.waiting) or engine.prefilling is not None or ready

    def ran_undisturbed(self, event: BatchFinished) -> bool:
        """Whether a pass took as long as it does by itself: one behind a longer one waits for it at each stage."""
        took_us = event.finished_us - event.started_us
        self.passes = [one for one in self.passes if one[0] > event.started_us]
        longest_us = max([other_us for _, other_us in self.passes], default=0)
        self.passes.append((event.finished_us, took_us))
        return took_us >= longest_us

    def owes_elsewhere(self) -> bool:
        """Whether pages were given up for the decode of another microbatch, which is still to come."""
        return any(own.decode_owed and own.running_batch.size and i != self.at for i, own in enumerate(self.columns))

    # ------------------------------------------------------------------------------------------------ who belongs where

    def has_place(self, request: Request | None = None) -> bool:
        """Whether somebody may join the microbatch whose turn it is, or this request stay in it."""
        return self.places[self.at] < self.size or (
            request is not None and self.members.get(request.request_id) == self.at
        )

    def free_places(self, engine: Engine, leaving: list[Request]) -> int:
        """Places in the microbatch whose turn it is once all in flight is delivered and these have left."""
        return self._free_then(engine, leaving)[self.at]

    def has_place_for_newcomer(self, engine: Engine, least: Request) -> bool:
        """Whether a newcomer is to start in the microbatch whose turn it is: a place is free there or comes free; or
        none does anywhere, and `least`, who is to leave first of all who decode, has one.
        """
        free = self._free_then(engine, [])
        return free[self.at] > 0 or (max(free) <= 0 and self.members[least.request_id] == self.at)

    def _free_then(self, engine: Engine, leaving: list[Request]) -> list[int]:
        """Free places by microbatch once all in flight is delivered and these have left."""
        free = [self.size - taken for taken in self.places]
        ending = [request for batch in engine.in_flight for request in batch.ending_requests()]
        for request in (*ending, *leaving):
            free[self.members[request.request_id]] += 1
        return free

    def take_place(self, request: Request) -> None:
        """It belongs to the microbatch whose turn it is, from now on."""
        before = self.members.get(request.request_id)
        if before is not None:
            self.places[before] -= 1
        self.members[request.request_id] = self.at
        self.places[self.at] += 1

    def give_place(self, request: Request) -> None:
        """It leaves, or only waits until its KV has been sent. Whoever was found too many may be tried again."""
        number = self.members.pop(request.request_id, None)
        if number is not None:
            self.places[number] -= 1
        self.full.clear()

    # ------------------------------------------------------------------------------------------------------- everybody

    def pages_of_others(self, engine: Engine) -> int:
        """Pages without which the microbatches whose turn it is not do not decode."""
        page_size, ahead = engine.config.page_size, engine.ahead
        others = [own for i, own in enumerate(self.columns) if i != self.at and own.running_batch.size]
        return sum(pages_ahead(own.running_batch, own.positions, page_size, ahead) for own in others)

    def running_batches(self, engine: Engine) -> tuple[RunningBatch, ...]:
        """Who decodes, by microbatch."""
        return tuple(
            [engine.running_batch if i == self.at else own.running_batch for i, own in enumerate(self.columns)]
        )

    def positions(self, engine: Engine) -> list[Int32s]:
        """Where they stand, by microbatch."""
        return [engine.positions if i == self.at else own.positions for i, own in enumerate(self.columns)]

    def together(self, engine: Engine) -> tuple[RunningBatch, Int32s]:
        """All who decode, and where each stands."""
        everybody = EMPTY_BATCH
        for running_batch in self.running_batches(engine):
            if running_batch.size:
                everybody = everybody.joined_by(running_batch)
        return everybody, np.concatenate(self.positions(engine))

    def mine(self, engine: Engine) -> NDArray[np.bool_]:
        """Which of all who decode, as `together` has them, do so in the microbatch whose turn it is."""
        return np.repeat(
            np.arange(self.count) == self.at, [running_batch.size for running_batch in self.running_batches(engine)]
        )

    def stands_at(self, engine: Engine, request: Request) -> int:
        """The next position of one that decodes."""
        number = self.members[request.request_id]
        running_batch, positions = self.running_batches(engine)[number], self.positions(engine)[number]
        return int(positions[(running_batch.rows == request.row).argmax()])

    def whose(self, requests: list[Request]) -> list[int]:
        """The microbatches in which some of these decode."""
        return sorted({self.members[request.request_id] for request in requests if request.decodes})

    def victim(self, engine: Engine) -> Request:
        """Who gives its pages back, of all who decode: as `choose_victim`; the newest is who was admitted last."""
        running_batch, positions = self.together(engine)
        if engine.config.retraction_policy != "newest":
            return running_batch.requests[choose_victim(engine.config, running_batch, positions)]
        return next(one for one in map(engine.requests.__getitem__, reversed(self.members)) if one.decodes)

    def decode_launches(self, engine: Engine) -> int:
        """Of all microbatches."""
        others = sum(own.decode_launches for i, own in enumerate(self.columns) if i != self.at)
        return engine.decode_launches + others

    # --------------------------------------------------------------------------------------------------------- snapshot

    def image(self, engine: Engine) -> MicrobatchesImage:
        """All of it."""
        self._write_back(engine)
        columns = [
            ColumnsImage(
                [request.request_id for request in own.running_batch.requests],
                own.positions.tobytes(),
                *(getattr(own, name) for name in NUMBERS),
            )
            for own in self.columns
        ]
        return MicrobatchesImage(self.at, list(self.members.items()), sorted(self.full), list(self.passes), columns)

    def load(self, image: MicrobatchesImage, engine: Engine) -> None:
        """Take up what `image` described; the engine has the columns of `at` already."""
        self.at, self.members, self.full = image.at, dict(image.members), set(image.full)
        self.passes = list(image.passes)
        self.places = [0] * self.count
        for number in self.members.values():
            self.places[number] += 1
        for i, (own, told) in enumerate(zip(self.columns, image.columns, strict=True)):
            own.positions = np.frombuffer(told.positions, np.int32)
            own.running_batch = RunningBatch.of([engine.requests[request_id] for request_id in told.running_batch])
            for name in NUMBERS:
                setattr(own, name, getattr(told, name))
            for member in own.running_batch.requests:
                member.decodes = True
            if i == self.at:
                own.running_batch, own.positions = engine.running_batch, engine.positions
