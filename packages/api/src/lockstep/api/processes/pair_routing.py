"""The router of a server with prefill and decode engines: two routers, whose decisions together make a pair.

    Offer ──> router of prefill engines ──┐
          └─> router of decode engines  ──┴─> Routed(engine, prefill, room)      once both have decided

The rules are those of the simulator (`sim/cluster/handover.py`): `--router` chooses the prefill engine, and the decode
engine is the one with the fewest tokens. Each router has a journal, in `router/` and in `decode/router/` of the run. A
request counts at its prefill engine until its transfer ends, and at its decode engine until its answer does. A request
without output is computed by its prefill engine alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from lockstep.api.processes.routing import RouterService
from lockstep.api.processes.wire import (
    Drained,
    EngineHere,
    EngineLost,
    Offer,
    OfferClosed,
    PromptOver,
    Routed,
    RouterMessage,
)
from lockstep.core.cluster.router import RouterConfig

DECODE_ROUTER = RouterConfig(policy="least_tokens")
"""Memory is the first limit of a decode engine, so requests go to the engine with the fewest tokens."""

Side = Literal["prefill", "decode"]
Key = tuple[int, int]
"""Worker, and number of its offer."""


@dataclass(slots=True)
class _Pair:
    """An offer, and the engines that were chosen for it."""

    message: Offer
    prefill: Routed | None = None
    decode: Routed | None = None
    room: int = -1
    counted: bool = True  # whether it counts at its prefill engine


class PairRouting:
    """Turns messages into facts for both routers.

    Args:
        prefills: number of prefill engines, which have the first numbers.
        decodes: number of decode engines.
        config: of the router of prefill engines.
        answer: sends a message to a worker.
        run: folder of the journals; None: no journal.
    """

    def __init__(
        self,
        prefills: int,
        decodes: int,
        config: RouterConfig,
        answer: Callable[[Routed], object],
        *,
        run: Path | None = None,
        bytes_max: int = 2**30,
    ) -> None:
        self._prefills, self._answer = prefills, answer
        below = None if run is None else run / "decode"
        if below is not None:
            below.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.prefill = RouterService(
            prefills, config, lambda routed: self._chosen("prefill", routed), run=run, bytes_max=bytes_max
        )
        self.decode = RouterService(
            decodes, DECODE_ROUTER, lambda routed: self._chosen("decode", routed), run=below, bytes_max=bytes_max
        )
        self._pairs: dict[Key, _Pair] = {}
        self._rooms: dict[int, Key] = {}
        self._next_room = 0

    def handle(self, message: RouterMessage) -> None:
        """Handle a message."""
        match message:
            case Offer():
                self._offer(message)
            case OfferClosed():
                self._over(message)
            case PromptOver(room):
                self._prompt_over(room)
            case EngineHere() | EngineLost() | Drained():
                service, first = (self.prefill, 0)
                if message.engine >= self._prefills:
                    service, first = self.decode, self._prefills
                service.handle(msgspec.structs.replace(message, engine=message.engine - first))
            case _:  # about a worker, a session or a label
                self.prefill.handle(message)
                self.decode.handle(message)

    def close(self) -> None:
        """Close the journals."""
        self.prefill.close()
        self.decode.close()

    def _offer(self, message: Offer) -> None:
        if message.purpose != "request":  # sessions are on decode engines
            self._pairs[message.worker, message.number] = _Pair(message, counted=False)
            self.decode.handle(message)
            return
        self._pairs[message.worker, message.number] = _Pair(message)
        self.prefill.handle(message)
        if message.output and (message.worker, message.number) in self._pairs:
            self.decode.handle(message)

    def _chosen(self, side: Side, routed: Routed) -> None:
        """Take in a decision of one router, and answer the worker once the other has decided, too."""
        key = routed.worker, routed.number
        pair = self._pairs.get(key)
        if pair is None:
            return
        if side == "prefill":
            pair.prefill = routed
        else:
            pair.decode = routed
        if pair.message.purpose != "request":
            del self._pairs[key]
            self._answer(msgspec.structs.replace(routed, engine=routed.engine + self._prefills))
        elif not pair.message.output:
            self._answer(routed)
        elif pair.prefill is not None and pair.decode is not None and pair.room < 0:
            pair.room = self._next_room
            self._next_room += pair.message.samples
            self._rooms[pair.room] = key
            chosen = pair.decode
            self._answer(
                msgspec.structs.replace(
                    chosen, engine=chosen.engine + self._prefills, prefill=pair.prefill.engine, room=pair.room
                )
            )

    def _over(self, message: OfferClosed) -> None:
        pair = self._pairs.pop((message.worker, message.number), None)
        if pair is not None:
            self._rooms.pop(pair.room, None)
            if pair.counted:
                own = message if not pair.message.output else msgspec.structs.replace(message, output_tokens=0)
                self.prefill.handle(own)
        self.decode.handle(message)

    def _prompt_over(self, room: int) -> None:
        """Count a request no longer at its prefill engine, whose part of it has ended."""
        key = self._rooms.get(room)
        pair = None if key is None else self._pairs[key]
        if pair is not None and pair.counted:
            pair.counted = False
            self.prefill.handle(OfferClosed(pair.message.worker, pair.message.number, 0))
