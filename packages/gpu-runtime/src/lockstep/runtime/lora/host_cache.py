"""Adapters of one rank in host memory, and their copies into slots while batches run.

    read(name, version, source)   a folder into host memory, before the adapter is passed to the engine    caller's
    thread place(name, version, slot)    from host memory into a slot that no batch uses                          own
    thread forget(name)                  all versions, once no request uses the name

A copy to a GPU runs on its own stream, from pinned memory. It has ended when `place` returns, and the engine launches
no batch with the slot before that. So nothing on the stream of the forward passes waits for it.
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
from lockstep.runtime.models import LanguageModel

log = logging.getLogger("lockstep.runtime")


class HostAdapterCache:
    """Adapters of this rank in host memory. Safe to use from any thread."""

    def __init__(self, model: LanguageModel) -> None:
        self._model, self._lock = model, threading.Lock()
        self._kept: dict[tuple[str, int], AdapterWeights | str] = {}  # or why it could not be read
        gpu = model.device.type == "cuda"
        self._stream = torch.cuda.Stream(model.device) if gpu else None

    def read(self, name: str, version: int, source: str) -> None:
        """Read a folder. Raises ConfigError with all problems."""
        model, parallel = self._model, self._model.parallel
        folder = folder_of(source)
        try:
            found = read_adapter(
                folder,
                model.targets,
                model.adapter_rank,
                rank=parallel.rank,
                ranks=parallel.ranks,
                elsewhere=model.has_elsewhere,
            )
        except (OSError, MemoryError, RuntimeError) as error:
            reason = str(error).partition("\n")[0]
            raise CheckpointError(folder, [f"{type(error).__name__}: {reason}"]) from error
        with self._lock:
            self._kept[name, version] = found
        log.info("adapter %s, version %d: rank %d, %.1f MB", name, version, found.rank, found.nbytes / 1e6)

    def lack(self, name: str, version: int, why: str) -> None:
        """Record that an adapter of the previous engine cannot be read again. Requests on it end with this reason."""
        with self._lock:
            self._kept[name, version] = why

    def place(self, name: str, version: int, slot: int) -> None:
        """Copy an adapter into a slot and wait for the copy. Raises ConfigError if the adapter was not read."""
        with self._lock:
            found = self._kept.get((name, version), "it was not read")
        if isinstance(found, str):
            raise ConfigError(f"adapter {name!r}, version {version}, cannot be loaded: {found}")
        stream = self._stream
        with nullcontext() if stream is None else torch.cuda.stream(stream), torch.no_grad():
            there = {id(into) for into, _, _ in found.parts}
            for target in self._model.targets:  # clear what only the slot's previous adapter changed
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
        """Drop one version, or all."""
        with self._lock:
            for key in [key for key in self._kept if key[0] == name and version in (None, key[1])]:
                del self._kept[key]


class LocalAdapters:
    """The adapter loader of an engine of one rank: `lockstep.host.adapters.AdapterLoader`."""

    def __init__(self, cache: HostAdapterCache) -> None:
        self.cache = cache
        self._thread = ThreadPoolExecutor(1, "lockstep-adapters")

    def read(self, name: str, version: int, source: str) -> None:
        """See `HostAdapterCache.read`."""
        self.cache.read(name, version, source)

    def lack(self, name: str, version: int, why: str) -> None:
        """See `HostAdapterCache.lack`."""
        self.cache.lack(name, version, why)

    def place(self, name: str, version: int, slot: int, done: Callable[[BaseException | None], None]) -> None:
        """Copy an adapter into a slot in a thread, while batches run; then call `done`."""
        self._thread.submit(answering, lambda: self.cache.place(name, version, slot), done)

    def forget(self, name: str, version: int | None = None) -> None:
        """See `HostAdapterCache.forget`."""
        self.cache.forget(name, version)

    def close(self) -> None:
        """Cancel loads that have not started."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def answering(work: Callable[[], object], done: Callable[[BaseException | None], None]) -> None:
    """Call `work`, then report its outcome to `done`."""
    try:
        work()
    except BaseException as error:
        done(error)
    else:
        done(None)
