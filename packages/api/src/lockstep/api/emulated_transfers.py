"""Transfers between emulated engines: no bytes, and the time that the bytes of the KV would take. Imports no torch."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from lockstep.host.handover.kv import Fetch, Int32s, PagesStaged
from lockstep.host.handover.wire import PageLayout, StagingPlace
from lockstep.sim.host.links import Link

SLOTS = 64
SLOT_PAGES = 1024


class EmulatedTransport:
    """Transfers of one emulated engine: `lockstep.host.handover.kv.KvTransport`.

    Args:
        model: name of the emulated model.
        page_bytes: of one page on all GPUs.
        gbs: rate at which this engine receives, in 1e9 bytes per second.
        speed: factor by which transfers are faster than that.
    """

    def __init__(self, model: str, page_size: int, page_bytes: int, gbs: float, *, speed: float = 1.0) -> None:
        self.layout = PageLayout(model, page_size, page_bytes)
        self._link, self._speed = Link(gbs), speed
        self._lock = threading.Lock()

    def sender(self, peer: str) -> EmulatedSender:
        """See `KvTransport.sender`."""
        return EmulatedSender()

    def receiver(self, layout: PageLayout, places: tuple[StagingPlace, ...]) -> EmulatedReceiver:
        """See `KvTransport.receiver`."""
        return EmulatedReceiver(self)

    def close(self) -> None:
        """Do nothing: there is no memory."""

    def arrives_s(self, pages: int) -> float:
        """Begin a transfer of pages. Returns the time (time.monotonic, seconds) at which it ends."""
        with self._lock:
            now_us = round(time.monotonic() * 1e6 * self._speed)
            return self._link.send(now_us, pages * self.layout.page_bytes) / self._speed / 1e6


class EmulatedSender:
    """Staging memory without bytes: `lockstep.host.handover.kv.KvSender`."""

    places: tuple[StagingPlace, ...] = (StagingPlace("emulated", "", SLOTS, 0),)
    pages_per_slot: int = SLOT_PAGES
    beside_per_slot: tuple[int, ...] = ()

    def stage(
        self, slot: int, pages: Int32s, done: Callable[[PagesStaged | BaseException], None], block: int = 0
    ) -> None:
        """See `KvSender.stage`."""
        done(PagesStaged())

    def close(self) -> None:
        """Do nothing: there is no memory."""


class EmulatedReceiver:
    """Takes the time of each slot: `lockstep.host.handover.kv.KvReceiver`."""

    def __init__(self, transport: EmulatedTransport) -> None:
        self._transport = transport
        self._thread = ThreadPoolExecutor(1, "emulated-kv")

    def fetch(self, order: Fetch, cancelled: Callable[[], bool], done: Callable[[str], None]) -> None:
        """See `KvReceiver.fetch`."""
        arrives_s = self._transport.arrives_s(len(order.into))

        def wait() -> None:
            if not cancelled():
                time.sleep(max(0.0, arrives_s - time.monotonic()))
            done("")

        self._thread.submit(wait)

    def close(self) -> None:
        """End the thread behind the transfers under way."""
        self._thread.shutdown(wait=False)
