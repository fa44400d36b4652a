"""A connection between the hosts of two engines. The kernel reports the end of a process as the end of its connections.

    address    unix:/path          a socket in a folder that only this user can read
               tcp:host:port       both ends prove that they have the same secret, by HMAC of a fresh number

Messages are sent by a thread of the link, so a peer that reads nothing stops no sender.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue

from lockstep.core.contract.errors import ConfigError
from lockstep.host.handover.wire import FRAME_BYTES_MAX, LENGTH, LinkError, LinkMessage, encode

log = logging.getLogger("lockstep.host")

CONNECT_S = 5.0  # to connect, and to prove the secret
NONCE_BYTES = 32
END = b""  # in place of a frame: the link ends behind those before


def exactly(sock: socket.socket, count: int) -> bytes | None:
    """Return the next bytes of a socket; None if the other end closed it. Raises OSError."""
    parts = bytearray(count)
    view, at = memoryview(parts), 0
    while at < count:
        new = sock.recv_into(view[at:])
        if not new:
            return None
        at += new
    return bytes(parts)


def _proof(secret: bytes, nonce: bytes, role: bytes) -> bytes:
    return hmac.digest(secret, role + nonce, "sha256")


def prove(sock: socket.socket, secret: bytes, *, server: bool) -> None:
    """Exchange proofs of the secret with the other end. Raises OSError if the other end does not have it."""
    mine, other = (b"server", b"client") if server else (b"client", b"server")
    nonce = secrets.token_bytes(NONCE_BYTES)
    sock.sendall(nonce)
    theirs = exactly(sock, NONCE_BYTES)
    if theirs is None:
        raise OSError("the other end closed the connection")
    sock.sendall(_proof(secret, theirs, mine))
    proof = exactly(sock, NONCE_BYTES)
    if proof is None or not hmac.compare_digest(proof, _proof(secret, nonce, other)):
        raise OSError("the other end does not have the secret of this server")


class PeerLink:
    """One end of a connection.

    Args:
        opened: makes the connection, in the link's thread.
        received: called in the link's thread with each frame. A LinkError ends the link.
        lost: called once, in the link's thread, after the last frame, with the reason.
    """

    def __init__(
        self,
        name: str,
        opened: Callable[[], socket.socket],
        received: Callable[[PeerLink, bytes], None],
        lost: Callable[[PeerLink, str], None],
    ) -> None:
        self.name = name
        self._opened, self._received, self._lost = opened, received, lost
        self._socket: socket.socket | None = None
        self._closed = threading.Event()
        self._outgoing: SimpleQueue[bytes | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"link-{name}", daemon=True)

    def start(self) -> None:
        """Connect, and begin to read and to send."""
        self._thread.start()

    def send(self, message: LinkMessage) -> None:
        """Send a message, in the order of the calls. Messages to a link that has ended are dropped."""
        frame = encode(message)
        self._outgoing.put(LENGTH.pack(len(frame)) + frame)

    def end(self) -> None:
        """End the link behind the messages sent so far; `lost` is called in its thread."""
        self._outgoing.put(END)

    def close(self) -> None:
        """End the link; `lost` is called in its thread."""
        self._closed.set()
        self._outgoing.put(None)
        if self._socket is not None:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def join(self, seconds: float) -> None:
        """Wait up to `seconds` until the link's thread has ended."""
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(seconds)

    def _run(self) -> None:
        reason = "the connection was closed"
        try:
            self._socket = self._opened()
            threading.Thread(target=self._send_all, name=f"link-{self.name}-out", daemon=True).start()
            while not self._closed.is_set():
                head = exactly(self._socket, LENGTH.size)
                if head is None:
                    break
                (length,) = LENGTH.unpack(head)
                if length > FRAME_BYTES_MAX:
                    raise LinkError(f"a message of {length:,} bytes")
                frame = exactly(self._socket, length)
                if frame is None:
                    break
                self._received(self, frame)
        except (OSError, LinkError) as error:
            reason = str(error)
        finally:
            self.close()
            if self._socket is not None:
                self._socket.close()
            self._lost(self, reason)

    def _send_all(self) -> None:
        assert self._socket is not None
        try:
            while (frame := self._outgoing.get()) is not None:
                if frame is END:
                    self.close()
                    return
                self._socket.sendall(frame)
        except OSError:
            self.close()


class Listener:
    """Accepts the links of decode engines, in a thread of its own.

    Args:
        address: unix:PATH, or tcp:HOST:PORT with port 0 for a free one; `address` then has the real one.
        accepted: called with each new socket.
    Raises: ConfigError.
    """

    def __init__(self, address: str, secret: bytes, accepted: Callable[[socket.socket], None]) -> None:
        self._secret, self._accepted = secret, accepted
        family, place = parsed(address)
        self._path = place if isinstance(place, str) else None
        if self._path is not None:
            with suppress(FileNotFoundError):
                Path(self._path).unlink()  # of an engine that was killed
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._socket.bind(place)
            self._socket.listen(64)
        except OSError as error:
            self._socket.close()
            raise ConfigError(f"transfers: {address} cannot be listened on: {error.strerror or error}") from error
        self.address = address if self._path is not None else "tcp:{}:{}".format(*self._socket.getsockname()[:2])
        threading.Thread(target=self._run, name="links", daemon=True).start()

    def close(self) -> None:
        """Accept no more links."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        if self._path is not None:
            with suppress(OSError):
                Path(self._path).unlink()

    def _run(self) -> None:
        while True:
            try:
                sock, _ = self._socket.accept()
            except OSError:
                return
            try:
                _prepare(sock, self._secret, server=True)
            except OSError as error:
                log.warning("a connection of another engine was refused: %s", error)
                sock.close()
                continue
            self._accepted(sock)


def connect(address: str, secret: bytes) -> socket.socket:
    """Connect to the listener of a prefill engine. Raises OSError."""
    family, place = parsed(address)
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.settimeout(CONNECT_S)
        sock.connect(place)
        _prepare(sock, secret, server=False)
    except OSError:
        sock.close()
        raise
    return sock


def _prepare(sock: socket.socket, secret: bytes, *, server: bool) -> None:
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.settimeout(CONNECT_S)
        prove(sock, secret, server=server)
    sock.settimeout(None)


def parsed(address: str) -> tuple[socket.AddressFamily, str | tuple[str, int]]:
    """Return family and address for the socket module. Raises ConfigError."""
    kind, _, place = address.partition(":")
    if kind == "unix" and place:
        return socket.AF_UNIX, place
    host, _, port = place.rpartition(":")
    if kind == "tcp" and host and port.isdecimal():
        return socket.AF_INET6 if ":" in host else socket.AF_INET, (host.strip("[]"), int(port))
    raise ConfigError(f"transfers: the address `{address}` is neither unix:PATH nor tcp:HOST:PORT")
