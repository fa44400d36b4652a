"""Staging memory that the other side reads by NIXL: over UCX, from the memory of a GPU or of a CPU.

The sender registers its memory with an agent and describes it in the address: metadata of the agent, address of the
memory, device. A reader adds the agent to its own, and reads a slot into registered memory of its own device by one
transfer of kind READ, without the sender.

Source: nixl 1.5.1, `nixl/_api.py` (nixl_agent: register_memory, add_remote_agent, get_xfer_descs, initialize_xfer,
transfer, check_xfer_state).
"""

from __future__ import annotations

import base64
import time
from contextlib import suppress
from importlib import import_module
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor

from lockstep.core.contract.errors import ConfigError
from lockstep.host.handover.wire import StagingPlace
from lockstep.runtime.transfer.transports import TransferFailed

POLL_S = 20e-6
STALL_S = 30.0


def _agent() -> Any:
    """Return a new NIXL agent over UCX. Raises ConfigError."""
    try:
        api: Any = import_module("nixl._api")
    except ImportError as error:
        raise ConfigError(
            f"`transfer_transport` is nixl, which cannot be loaded: {error}\n"
            "hint: pip install nixl for the CUDA version of this machine, or shm, or tcp"
        ) from error
    try:
        return api.nixl_agent(f"lockstep-{uuid4().hex}", api.nixl_agent_config(backends=["UCX"]))
    except Exception as error:
        raise ConfigError(f"`transfer_transport` is nixl, whose agent does not start: {error}") from error


class _Registered:
    """Memory that an agent may read or write."""

    def __init__(self, count: int, size: int, device: torch.device) -> None:
        self.agent = _agent()
        self.memory = torch.empty((count, size), dtype=torch.uint8, device=device)
        self.kind, self.index = ("VRAM", device.index or 0) if device.type == "cuda" else ("DRAM", 0)
        whole = [(self.memory.data_ptr(), self.memory.numel(), self.index, "")]
        self._registered = self.agent.register_memory(whole, self.kind)

    def close(self) -> None:
        with suppress(Exception):
            self.agent.deregister_memory(self._registered)


class NixlStaging(_Registered):
    """The sender's side: `transports.Staging`."""

    def __init__(self, slots: int, slot_bytes: int, device: torch.device) -> None:
        super().__init__(slots, slot_bytes, device)
        metadata = base64.b64encode(self.agent.get_agent_metadata()).decode()
        address = f"{self.memory.data_ptr()}|{self.kind}|{self.index}|{metadata}"
        self.place = StagingPlace("nixl", address, slots, slot_bytes)

    def slot(self, number: int) -> Tensor:
        """See `transports.Staging`."""
        return self.memory[number]


class NixlReader(_Registered):
    """The receiver's side: `transports.Reader`."""

    def __init__(self, place: StagingPlace, device: torch.device) -> None:
        super().__init__(1, place.slot_bytes, device)
        base, self._their_kind, index, metadata = place.address.split("|", 3)
        self._base, self._their_index, self._slot_bytes = int(base), int(index), place.slot_bytes
        try:
            self._peer = self.agent.add_remote_agent(base64.b64decode(metadata))
        except Exception as error:
            raise ConfigError(f"the NIXL agent of the prefill engine cannot be reached: {error}") from error

    def read(self, slot: int, size: int) -> Tensor:
        """See `transports.Reader`."""
        ours = self.agent.get_xfer_descs([(self.memory.data_ptr(), size, self.index)], self.kind)
        at = self._base + slot * self._slot_bytes
        theirs = self.agent.get_xfer_descs([(at, size, self._their_index)], self._their_kind)
        until_s = time.monotonic() + STALL_S
        try:
            handle = self.agent.initialize_xfer("READ", ours, theirs, self._peer)
            try:
                state = self.agent.transfer(handle)
                while state == "PROC":
                    if time.monotonic() > until_s:
                        raise TransferFailed(f"the prefill engine sent nothing for {STALL_S:g} s")
                    time.sleep(POLL_S)
                    state = self.agent.check_xfer_state(handle)
            finally:
                self.agent.release_xfer_handle(handle)
        except TransferFailed:
            raise
        except Exception as error:
            raise TransferFailed(f"NIXL: {type(error).__name__}: {error}") from error
        if state != "DONE":
            raise TransferFailed(f"NIXL reports {state}")
        return self.memory[0, :size]

    def close(self) -> None:
        """See `transports.Reader`."""
        with suppress(Exception):
            self.agent.remove_remote_agent(self._peer)
        super().close()


def make_staging(slots: int, slot_bytes: int, device: torch.device) -> NixlStaging:
    """See `transports.make_staging`."""
    return NixlStaging(slots, slot_bytes, device)


def open_reader(place: StagingPlace, device: torch.device) -> NixlReader:
    """See `transports.open_reader`."""
    return NixlReader(place, device)
