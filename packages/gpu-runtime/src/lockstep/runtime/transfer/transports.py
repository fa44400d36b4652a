"""Staging memory by which one rank sends pages to the ranks of another engine, and the transports by name.

    sender    Staging: slots of equal size, which it fills
    receiver  Reader: returns the bytes of a slot

The sender fills a slot only while no receiver reads it: the hosts agree about that (`lockstep.host.handover`).
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Protocol, get_args

import torch
from torch import Tensor

from lockstep.core.contract.errors import ConfigError
from lockstep.host.engine_options import TransferTransport
from lockstep.host.handover.wire import StagingPlace

SLOT_BYTES = 4 << 20  # of a slot, unless one page is larger
SLOTS = 8  # for each decode engine
MODULES: dict[str, str] = {"shm": "shared_memory", "tcp": "tcp", "nixl": "nixl"}


class TransferFailed(Exception):
    """Bytes did not arrive: the sender has ended, does not answer, or sent others than it announced."""


class Staging(Protocol):
    """Memory of a sender for one receiver."""

    place: StagingPlace

    def slot(self, number: int) -> Tensor:
        """Return a slot, uint8 [slot bytes], to be filled."""

    def close(self) -> None:
        """Release the memory."""


class Reader(Protocol):
    """The staging memory of a sender, seen by one rank of a receiver. Used by one thread."""

    def read(self, slot: int, size: int) -> Tensor:
        """Return the first bytes of a slot, uint8 [size], valid until the next call. Raises TransferFailed."""

    def close(self) -> None:
        """Release what the reader holds."""


def check_transport(name: str) -> None:
    """Raise ConfigError for an unknown transport, or one whose library is not installed."""
    if name not in MODULES:
        raise ConfigError(f"`transfer_transport` must be {', '.join(get_args(TransferTransport))}, got `{name}`")
    if name == "nixl" and find_spec("nixl") is None:
        raise ConfigError(
            "`transfer_transport` is nixl, which is not installed\nhint: pip install nixl, or shm, or tcp"
        )


def make_staging(name: TransferTransport, slots: int, slot_bytes: int, device: torch.device) -> Staging:
    """Allocate staging memory. Raises ConfigError if that is not possible."""
    check_transport(name)
    made: Staging = import_module(f"lockstep.runtime.transfer.{MODULES[name]}").make_staging(slots, slot_bytes, device)
    return made


def open_reader(place: StagingPlace, device: torch.device) -> Reader:
    """Open the staging memory of a sender. Raises ConfigError if that is not possible."""
    check_transport(place.transport)
    module = import_module(f"lockstep.runtime.transfer.{MODULES[place.transport]}")
    made: Reader = module.open_reader(place, device)
    return made


def pin(memory: Tensor, device: torch.device) -> bool:
    """Register memory with CUDA, so that copies to and from a GPU are fast. Returns whether it was."""
    if device.type != "cuda":
        return False
    status = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
    return int(status) == 0


def unpin(memory: Tensor) -> None:
    """Undo `pin`."""
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
