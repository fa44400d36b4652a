"""Staging memory that two processes of one machine map: no copy between them.

The memory is a file without a name (memfd), which the kernel frees with the last process that has it. A receiver of the
same user opens it by the number of the descriptor in the sender.
"""

from __future__ import annotations

import mmap
import os

import torch
from torch import Tensor

from lockstep.core.contract.errors import ConfigError
from lockstep.host.handover.wire import StagingPlace
from lockstep.runtime.transfer.transports import pin, unpin


class _Mapping:
    """A mapped file as a tensor, uint8 [slots, slot bytes]."""

    def __init__(self, descriptor: int, slots: int, slot_bytes: int, device: torch.device) -> None:
        self._map = mmap.mmap(descriptor, slots * slot_bytes, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self.memory = torch.frombuffer(self._map, dtype=torch.uint8).view(slots, slot_bytes)
        self._pinned = pin(self.memory, device)

    def close(self) -> None:
        """Forget the mapping; it is removed with the last tensor that uses it."""
        if self._pinned:
            unpin(self.memory)
            self._pinned = False


class SharedStaging(_Mapping):
    """The sender's side: `transports.Staging`."""

    def __init__(self, slots: int, slot_bytes: int, device: torch.device) -> None:
        try:
            self._file = os.memfd_create("lockstep-kv", os.MFD_CLOEXEC)
            os.ftruncate(self._file, slots * slot_bytes)
            super().__init__(self._file, slots, slot_bytes, device)
        except OSError as error:
            raise ConfigError(f"{slots * slot_bytes:,} bytes of shared memory cannot be allocated: {error}") from error
        self.place = StagingPlace("shm", f"/proc/{os.getpid()}/fd/{self._file}", slots, slot_bytes)

    def slot(self, number: int) -> Tensor:
        """See `transports.Staging`."""
        return self.memory[number]

    def close(self) -> None:
        """See `transports.Staging`."""
        super().close()
        os.close(self._file)


class SharedReader(_Mapping):
    """The receiver's side: `transports.Reader`."""

    def __init__(self, place: StagingPlace, device: torch.device) -> None:
        try:
            file = os.open(place.address, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError(
                f"the shared memory {place.address} of the prefill engine cannot be opened: {error.strerror}\n"
                "hint: on another machine, or in another container, --transfer-transport tcp"
            ) from error
        try:
            super().__init__(file, place.slots, place.slot_bytes, device)
        finally:
            os.close(file)

    def read(self, slot: int, size: int) -> Tensor:
        """See `transports.Reader`."""
        return self.memory[slot, :size]


def make_staging(slots: int, slot_bytes: int, device: torch.device) -> SharedStaging:
    """See `transports.make_staging`."""
    return SharedStaging(slots, slot_bytes, device)


def open_reader(place: StagingPlace, device: torch.device) -> SharedReader:
    """See `transports.open_reader`."""
    return SharedReader(place, device)
