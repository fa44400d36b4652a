"""Staging memory whose owner sends a slot on request, on the same or another machine.

    receiver ──slot, bytes──> sender          16 bytes, little endian
             <──the bytes────

Both ends first prove that they have the secret in the address, which came over the link of the hosts. LOCKSTEP_KV_HOST
is the address of this machine on which other machines can reach it; without it only this machine can.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import threading
from contextlib import suppress

import torch
from torch import Tensor

from lockstep.core.contract.errors import ConfigError
from lockstep.host.handover.link import exactly, prove
from lockstep.host.handover.wire import StagingPlace
from lockstep.runtime.transfer.transports import TransferFailed, pin, unpin

ASKED = struct.Struct("<QQ")
STALL_S = 30.0  # a sender or receiver that moves nothing for this time is lost
BUFFER_BYTES = 4 << 20  # of each socket, as far as the kernel allows it


class _Memory:
    def __init__(self, count: int, size: int, device: torch.device) -> None:
        self.memory = torch.empty((count, size), dtype=torch.uint8)
        self._pinned = pin(self.memory, device)

    def close(self) -> None:
        if self._pinned:
            unpin(self.memory)
            self._pinned = False


class TcpStaging(_Memory):
    """The sender's side: `transports.Staging`."""

    def __init__(self, slots: int, slot_bytes: int, device: torch.device) -> None:
        super().__init__(slots, slot_bytes, device)
        host = os.environ.get("LOCKSTEP_KV_HOST", "127.0.0.1")
        self._secret, self._open = secrets.token_bytes(32), list[socket.socket]()
        self._listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        try:
            self._listener.bind((host, 0))
            self._listener.listen(64)
        except OSError as error:
            self._listener.close()
            raise ConfigError(
                f"`LOCKSTEP_KV_HOST`: {host} cannot be listened on: {error.strerror}\nhint: an address of this machine"
            ) from error
        port = self._listener.getsockname()[1]
        self.place = StagingPlace("tcp", f"{host}|{port}|{self._secret.hex()}", slots, slot_bytes)
        threading.Thread(target=self._accept, name="kv-tcp", daemon=True).start()

    def slot(self, number: int) -> Tensor:
        """See `transports.Staging`."""
        return self.memory[number]

    def close(self) -> None:
        """See `transports.Staging`."""
        for one in (self._listener, *self._open):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        super().close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self._open.append(sock)
            threading.Thread(target=self._serve, args=(sock,), name="kv-tcp-send", daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        slots, slot_bytes = self.place.slots, self.place.slot_bytes
        data = self.memory.numpy()
        with suppress(OSError), sock:
            _prepare(sock)
            prove(sock, self._secret, server=True)
            sock.settimeout(None)
            while (asked := exactly(sock, ASKED.size)) is not None:
                slot, size = ASKED.unpack(asked)
                if slot >= slots or size > slot_bytes:
                    return
                sock.sendall(memoryview(data[slot, :size]))


class TcpReader(_Memory):
    """The receiver's side: `transports.Reader`."""

    def __init__(self, place: StagingPlace, device: torch.device) -> None:
        super().__init__(1, place.slot_bytes, device)
        host, port, secret = place.address.split("|")
        sock: socket.socket | None = None
        try:
            self._socket = sock = socket.create_connection((host, int(port)), STALL_S)
            _prepare(sock)
            prove(sock, bytes.fromhex(secret), server=False)
        except OSError as error:
            if sock is not None:
                sock.close()
            raise ConfigError(
                f"the staging memory of the prefill engine at {host}:{port} cannot be reached: {error}\n"
                "hint: LOCKSTEP_KV_HOST on its machine is the address for other machines"
            ) from error

    def read(self, slot: int, size: int) -> Tensor:
        """See `transports.Reader`."""
        wanted, at = memoryview(self.memory[0, :size].numpy()), 0
        try:
            self._socket.sendall(ASKED.pack(slot, size))
            while at < size:
                new = self._socket.recv_into(wanted[at:])
                if not new:
                    raise TransferFailed("the prefill engine closed its connection")
                at += new
        except TimeoutError as error:
            raise TransferFailed(f"the prefill engine sent nothing for {STALL_S:g} s") from error
        except OSError as error:
            raise TransferFailed(f"the connection to the prefill engine failed: {error}") from error
        return self.memory[0, :size]

    def close(self) -> None:
        """See `transports.Reader`."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        super().close()


def _prepare(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        sock.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
    sock.settimeout(STALL_S)


def make_staging(slots: int, slot_bytes: int, device: torch.device) -> TcpStaging:
    """See `transports.make_staging`."""
    return TcpStaging(slots, slot_bytes, device)


def open_reader(place: StagingPlace, device: torch.device) -> TcpReader:
    """See `transports.open_reader`."""
    return TcpReader(place, device)
