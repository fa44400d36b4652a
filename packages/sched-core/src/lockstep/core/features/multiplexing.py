"""PD multiplexing: the device computes a prefill batch, some layers at a time, beside the decodes of running requests.

    prefill stream | p layers 0-15 | p layers 16-31 | p layers 32-47 | q layers 0-47 ...
    decode stream  | decode | decode | decode | decode | decode | decode + rows of p ...

Each stream has `overlap_depth + 1` launch slots, runs its batches in launch order and delivers results in that order.
Between the streams results come in any order. A LaneReady launches a decode if one can be launched, else layers.

**A split prefill** is a batch of chunks (`ExtendPart`) that is launched in parts of layers. Parts are plans of mode
`split_prefill` with equal spans. Only the part with the last layers samples, and only with its result is the KV
complete. So a prompt is published, and its request joins the running batch, when that result is delivered. The next
split prefill begins behind the launch of the last layers of the one before. It may be the next chunk of a request.

**A request that leaves** in the middle (cancelled, retracted, timed out) is not in the parts that follow. What its row
computed in this split prefill is not published. New weights end a split prefill: its requests wait again, since one
pass must not mix weights.

**Shares of the device.** While prompts and decodes both run, each plan names the SMs that run it, by the number of
requests that decode when it is launched (`Multiplexing.divisions`). A plan that runs alone names none and has the whole
device.

No row is on both streams, and no row of one stream is written by the other. So the streams need no order between them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import UNSET, Struct, UnsetType
from numpy.typing import NDArray

from lockstep.core.contract.checks import fail
from lockstep.core.contract.commands import BatchPlan
from lockstep.core.contract.config import Multiplexing, SchedConfig
from lockstep.core.contract.events import RequestId
from lockstep.core.features.view import SchedulerView
from lockstep.core.kv.component import Component, Restored
from lockstep.core.kv.facts import Facts
from lockstep.core.requests.batching import ExtendPart, InFlight
from lockstep.core.requests.table import EMPTY_BATCH, Int32s, Request, RequestState, RunningBatch


class MultiplexPart(Struct):
    """The split prefill under way in a snapshot: its next layer, and request, start and stop of each chunk."""

    split_prefill: tuple[int, list[tuple[RequestId, int, int]]] | UnsetType = UNSET


class Multiplexer(Component):
    """The split prefill of one engine, as far as its layers are not launched. Without multiplexing there is none."""

    PART = MultiplexPart
    EMPTY_AT_REST = ("parts",)

    def __init__(self, config: SchedConfig, scheduler: SchedulerView) -> None:
        self._scheduler = scheduler
        self._settings: Multiplexing | None = None if config.multiplexing is UNSET else config.multiplexing
        self.present = self._settings is not None
        self.layers = 0 if self._settings is None else self._settings.layers  # of the model
        self.depth = config.overlap_depth
        self.parts: list[ExtendPart] = []  # chunks with layers to launch, of requests that have not left
        self.layer = 0  # the first layer that is not launched

    # ------------------------------------------------------------------------------------------------------ the streams

    def slots(self) -> tuple[bool, bool]:
        """Return whether a launch slot is free on the stream of decodes, and on that of prompts."""
        prompts = sum(batch.plan.layers is not None for batch in self._scheduler.in_flight)
        return len(self._scheduler.in_flight) - prompts <= self.depth, prompts <= self.depth

    def is_partial(self, plan: BatchPlan) -> bool:
        """Whether a plan computes some layers and not the last one, so that its KV is not complete."""
        return plan.layers is not None and plan.layers[1] < self.layers

    def sms_of_prompts(self, decode_rows: int) -> int | None:
        """Return the SMs of the next layers of a prompt beside so many decodes; None: the whole device."""
        assert self._settings is not None
        division = self._settings.division_for(decode_rows) if decode_rows else None
        return None if division is None else division.prefill_sms

    def sms_of_decodes(self, decode_rows: int) -> int | None:
        """Return the SMs of the next decode; None: the whole device, since no prompt is computed."""
        if self._settings is None or not (self.parts or any(b.plan.layers for b in self._scheduler.in_flight)):
            return None
        division = self._settings.division_for(decode_rows)
        return None if division is None else division.decode_sms

    # ------------------------------------------------------------------------------------------------ the split prefill

    def begin(self, parts: list[ExtendPart]) -> None:
        """Begin a split prefill."""
        self.parts, self.layer = parts, 0

    def next_layers(self) -> tuple[int, int]:
        """Return the layers [start:stop) to launch next."""
        assert self._settings is not None
        new_tokens = sum(part.stop - part.start for part in self.parts)
        stop = self.layer + self._settings.layers_at_once(new_tokens)
        return self.layer, min(stop, self.layers)

    def launched(self, plan: BatchPlan) -> None:
        """Go on behind the layers of a plan that is being launched; behind the last ones nothing is left."""
        assert plan.layers is not None
        self.layer = plan.layers[1]
        if not self.is_partial(plan):
            self.parts = []

    def leave(self, request: Request) -> int | None:
        """Take a request that leaves its row out of the split prefill.

        Returns: its positions with KV of all layers, as far as launched; None: it is not in the split prefill.
        """
        found = [part for part in self.parts if part.request is request]
        if not found:
            return None
        self.parts = [part for part in self.parts if part.request is not request]
        return found[0].start

    def members(self) -> list[Request]:
        """Return the requests with layers to launch, in the order of their chunks."""
        return [part.request for part in self.parts]

    def prefilling(self) -> list[Request]:
        """Return the requests in state PREFILLING: the chunked request, and those with layers to launch."""
        split, chunked = self.members(), self._scheduler.prefilling
        return split if chunked is None or chunked in split else [chunked, *split]

    def joining(self) -> tuple[RunningBatch, Int32s]:
        """Return the requests that join the running batch with a result in flight, and the next position of each."""
        batch, positions = EMPTY_BATCH, [np.empty(0, np.int32)]
        for flying in self._scheduler.in_flight if self.present else ():
            if flying.plan.layers is not None and flying.samplers.size:
                going = joins(flying)
                batch = batch.joined_by(flying.samplers.only(going)) if batch.size else flying.samplers.only(going)
                positions.append(flying.sampled_at[going])
        return batch, np.concatenate(positions)

    # ------------------------------------------------------------------------------------------ snapshot and invariants

    def part(self) -> MultiplexPart:
        """Return the state for a snapshot."""
        if not self.parts:
            return MultiplexPart()
        return MultiplexPart((self.layer, [(part.request.request_id, part.start, part.stop) for part in self.parts]))

    def load(self, part: MultiplexPart, restored: Restored) -> None:
        """Take over the state that `part` returned."""
        if part.split_prefill is not UNSET:
            self.layer, parts = part.split_prefill
            self.parts = [ExtendPart(restored.requests[number], start, stop) for number, start, stop in parts]

    def check_state(self, facts: Facts) -> None:
        """S40: the parts of a split prefill follow each other; no row is on both streams; each stream has its slots."""
        rows: dict[bool, list[int]] = {False: [], True: []}
        launched: dict[bool, int] = {False: 0, True: 0}
        done: dict[tuple[int, int], int] = {}  # by row and first new position: the layer behind the newest part
        for batch in facts.in_flight:
            plan = batch.plan
            split = plan.layers is not None
            if (plan.mode == "split_prefill") != split or (split and not self.present):
                fail(f"S40: batch {plan.batch_id} of mode {plan.mode} has layers {plan.layers}")
            launched[split] += 1
            rows[split] += plan.rows.tolist()
            for row, start in zip(plan.rows.tolist(), plan.starts.tolist(), strict=True) if plan.layers else ():
                assert plan.layers is not None
                if plan.layers[0] != done.get((row, start), plan.layers[0]):
                    fail(f"S40: batch {plan.batch_id} begins at layer {plan.layers[0]}, row {row} is at {done}")
                done[row, start] = plan.layers[1]
            if self.is_partial(plan) and (plan.sample_rows.size or plan.pooled_rows.size):
                fail(f"S40: batch {plan.batch_id} samples behind layer {plan.layers}")
        if both := sorted(row for row in rows[True] if row in rows[False]):
            fail(f"S40: rows {both} are on both streams")
        if self.present and max(launched.values()) > self.depth + 1:
            fail(f"S40: {launched[False]} decodes and {launched[True]} parts of prompts in flight")
        for part in self.parts:
            request, stop = part.request, part.stop
            if request.state is not RequestState.PREFILLING or request.computed != stop or not part.start < stop:
                fail(f"S40: {request.name} is {request.state.name} at {request.computed} in [{part.start}:{stop}]")
            if done.get((request.row, part.start), self.layer) != self.layer:
                fail(f"S40: {request.name} goes on at layer {self.layer}, launched are {done}")


def joins(batch: InFlight) -> NDArray[np.intp]:
    """Return the samplers of a batch that decode behind it: they have not left and do not end by length. intp [n]"""
    stays = [
        i
        for i, (request, row) in enumerate(zip(batch.samplers.requests, batch.samplers.rows.tolist(), strict=True))
        if i not in batch.ending and request.row == row and row not in batch.dead
    ]
    return np.array(stays, np.intp)


def oldest_of_streams(in_flight: Sequence[InFlight]) -> list[InFlight]:
    """Return the batches in flight of which a result may be next: the oldest one of each stream."""
    if not in_flight:
        return []
    first = in_flight[0]
    prompts = first.plan.layers is not None
    other = next((batch for batch in in_flight if (batch.plan.layers is not None) != prompts), None)
    return [first] if other is None else [first, other]
