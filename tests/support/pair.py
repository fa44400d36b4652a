"""A prefill and a decode engine over the small model, in one process, with real links and real transports."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lockstep.host.handover.decode import DecodeSide
from lockstep.host.handover.prefill import PrefillSide
from lockstep.runtime.stages import RankPlace
from lockstep.runtime.transfer.blocks import sent_blocks
from lockstep.runtime.transfer.lead import EngineTransport
from lockstep.runtime.transfer.rank import RankPages
from tests.support.small_runtime import Answer, Ends, SmallRuntime, request

WAIT_S = 60.0


def pages_of(runtime: SmallRuntime, **more: Any) -> RankPages:
    """The pages of a small runtime."""
    executor = runtime.executor
    blocks = sent_blocks(executor.attention.pool, executor.drafter, executor.canary)
    about = {"place": RankPlace(0), "kv_heads": 1, "model": "sum", "checksums": True, **more}
    return RankPages(blocks, runtime.config.page_size, **about)


class Pair:
    """Prefill engines and decode engines with links between them.

    Args:
        settings: of all engines; `prefill` and `decode` add to them.
        pages_per_slot: small, so that prompts take several slots.
    """

    def __init__(
        self,
        folder: Path,
        *,
        prefills: int = 1,
        decodes: int = 1,
        prefill: dict[str, Any] | None = None,
        decode: dict[str, Any] | None = None,
        pages_per_slot: int = 2,
        transport: Any = "shm",
        journals: Sequence[Any] = (),
        **settings: Any,
    ) -> None:
        kept = list(journals) or [None] * (prefills + decodes)
        both = {"radix_cache": True, **settings}
        self.prefills = [
            SmallRuntime(role="prefill", journal=kept[i], **{**both, **(prefill or {})}) for i in range(prefills)
        ]
        self.decodes = [
            SmallRuntime(role="decode", journal=kept[prefills + i], **{**both, **(decode or {})})
            for i in range(decodes)
        ]
        self.transports: list[EngineTransport] = []  # of all engines, in their order
        self.sides: list[PrefillSide] = []
        for number, one in enumerate(self.prefills):
            own = pages_of(one, transport=transport)
            own.pages_per_slot = pages_per_slot
            self.transports.append(EngineTransport(own))
            side = PrefillSide(self.transports[-1], f"unix:{folder}/kv-{number}", number=number)
            one.host.handover = side
            self.sides.append(side)
        self.receivers: list[DecodeSide] = []
        for number, one in enumerate(self.decodes):
            self.transports.append(EngineTransport(pages_of(one, transport=transport)))
            to = DecodeSide(
                self.transports[-1],
                lambda prefill: f"unix:{folder}/kv-{prefill}",
                number=prefills + number,
            )
            one.host.handover = to
            self.receivers.append(to)
        for side, one in zip((*self.sides, *self.receivers), self.runtimes, strict=True):
            side.attach(one.host)
        self.errors: list[BaseException] = []
        self._threads = [threading.Thread(target=self._run, args=(one,), daemon=True) for one in self.runtimes]
        self._next_room = 0

    @property
    def runtimes(self) -> list[SmallRuntime]:
        """All engines, prefill engines first."""
        return [*self.prefills, *self.decodes]

    def _run(self, runtime: SmallRuntime) -> None:
        try:
            runtime.host.run()
        except BaseException as error:
            self.errors.append(error)

    def start(self) -> None:
        """Start all engines."""
        for thread in self._threads:
            thread.start()

    def submit(self, prompt: Sequence[int], count: int, *, prefill: int = 0, decode: int = 0, **more: Any) -> Answer:
        """Submit a request to a pair of engines."""
        answer, room = Answer(), self._next_room
        self._next_room += 1
        self.receivers[decode].route(room, prefill)
        arrived = request(prompt, count, transfer_room=room, **more)
        answer.request_id = self.decodes[decode].host.submit(arrived, Ends(answer))
        return answer

    def wait(self, *answers: Answer, seconds: float = WAIT_S) -> None:
        """Wait for the ends of answers."""
        until = time.monotonic() + seconds
        for one in answers:
            while not one.over.wait(0.05):
                if self.errors:
                    raise self.errors[0]
                assert time.monotonic() < until, f"r{one.request_id} is open: {self.state()}"

    def settle(self, seconds: float = 10.0) -> None:
        """Wait until no transfer is left on any side."""
        until = time.monotonic() + seconds
        while any(one.busy for one in (*self.sides, *self.receivers)) or any(
            one.engine.transfers.all or one.engine.requests for one in self.runtimes
        ):
            if self.errors:
                raise self.errors[0]
            assert time.monotonic() < until, self.state()
            time.sleep(0.005)

    def state(self) -> str:
        """The transfers of all engines, for a message."""
        return "; ".join(
            f"{one.config.role}: " + ", ".join(f"r{t.request_id} {t.state}" for t in one.engine.transfers.all.values())
            for one in self.runtimes
        )

    def stop(self) -> None:
        """End all engines."""
        for one in self.runtimes:
            one.host.stop()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(10.0)
        for side in (*self.receivers, *self.sides):
            side.close()
        if self.errors:
            raise self.errors[0]

    def __enter__(self) -> Pair:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.stop()
            return
        try:
            self.stop()
        except BaseException:
            return


def pages_held(runtime: SmallRuntime) -> int:
    """Pages that are neither free nor in the radix cache alone, of an engine that is idle."""
    memory = runtime.engine.memory
    return runtime.config.pages - memory.available_pages
