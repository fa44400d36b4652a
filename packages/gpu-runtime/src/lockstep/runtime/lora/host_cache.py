"""Adapters of one rank in host memory, and their way into slots while batches run.

    read(name, version, source)   a folder into host memory, before the engine learns of it     in the caller's thread
    place(name, version, slot)    from there into a slot that no batch uses                     in a thread of its own
    forget(name)                  all versions, once the name is in no use

A copy to a GPU runs on a stream of its own, from pinned memory. It is over when `place` answers, and the engine lets
no batch into the slot before that: so nothing on the stream of the forward passes waits for it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import torch

from lockstep.core.contract.errors import ConfigError
from lockstep.host.adapters import folder_of
from lockstep.runtime.checkpoint import CheckpointError
from lockstep.runtime.lora.peft import AdapterWeights, read_adapter
from lockstep.runtime.models import Decoder

log = logging.getLogger("lockstep.runtime")


class HostAdapterCache:
    """What of adapters is on this rank. For any thread."""

    def __init__(self, model: Decoder) -> None:
        self._model, self._lock = model, threading.Lock()
        self._kept: dict[tuple[str, int], AdapterWeights | str] = {}  # or why it could not be read
        gpu = model.device.type == "cuda"
        self._stream = torch.cuda.Stream(model.device) if gpu else None

    def read(self, name: str, version: int, source: str) -> None:
        """Read a folder. Raises ConfigError, with everything in it that does not fit."""
        model, parallel = self._model, self._model.parallel
        folder = folder_of(source)
        try:
            found = read_adapter(folder, model.targets, model.adapter_rank, rank=parallel.rank, ranks=parallel.ranks)
        except (OSError, MemoryError, RuntimeError) as error:
            said = str(error).partition("\n")[0]
            raise CheckpointError(folder, [f"{type(error).__name__}: {said}"]) from error
        with self._lock:
            self._kept[name, version] = found
        log.info("adapter %s, version %d: rank %d, %.1f MB", name, version, found.rank, found.nbytes / 1e6)

    def lack(self, name: str, version: int, why: str) -> None:
        """An adapter of before cannot be read again. Requests on it end with this."""
        with self._lock:
            self._kept[name, version] = why

    def place(self, name: str, version: int, slot: int) -> None:
        """Copy into a slot; it is there when this returns. Raises ConfigError for one that is not on the shelf."""
        with self._lock:
            found = self._kept.get((name, version), "nobody read it")
        if isinstance(found, str):
            raise ConfigError(f"adapter {name!r}, version {version}, cannot be loaded: {found}")
        stream = self._stream
        with nullcontext() if stream is None else torch.cuda.stream(stream), torch.no_grad():
            there = {id(into) for into, _, _ in found.parts}
            for target in self._model.targets:  # what this adapter leaves alone is not left as the one before had it
                if id(target.into) not in there:
                    there.add(id(target.into))
                    target.into.down[slot].zero_()
                    target.into.up[slot].zero_()
            for into, down, up in found.parts:
                into.down[slot].copy_(down, non_blocking=True)
                into.up[slot].copy_(up, non_blocking=True)
            if stream is not None:
                stream.synchronize()

    def forget(self, name: str, version: int | None = None) -> None:
        """Drop all versions, or one."""
        with self._lock:
            for key in [key for key in self._kept if key[0] == name and version in (None, key[1])]:
                del self._kept[key]


class LocalAdapters:
    """The adapter loader of an engine of one rank: `lockstep.host.adapters.AdapterLoader`."""

    def __init__(self, shelf: HostAdapterCache) -> None:
        self.shelf = shelf
        self._thread = ThreadPoolExecutor(1, "lockstep-adapters")

    def read(self, name: str, version: int, source: str) -> None:
        """See `HostAdapterCache.read`."""
        self.shelf.read(name, version, source)

    def lack(self, name: str, version: int, why: str) -> None:
        """See `HostAdapterCache.lack`."""
        self.shelf.lack(name, version, why)

    def place(self, name: str, version: int, slot: int, done: Callable[[BaseException | None], None]) -> None:
        """Copy into a slot beside whatever runs."""
        self._thread.submit(answering, lambda: self.shelf.place(name, version, slot), done)

    def forget(self, name: str, version: int | None = None) -> None:
        """See `HostAdapterCache.forget`."""
        self.shelf.forget(name, version)

    def close(self) -> None:
        """Nothing more is loaded."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def answering(work: Callable[[], object], done: Callable[[BaseException | None], None]) -> None:
    """Work, then report the outcome."""
    try:
        work()
    except BaseException as error:
        done(error)
    else:
        done(None)
