"""HTTP below the application: deadlines for heads and bodies, and a bounded number of connections.

connection ──head_s──> headers ──body_s──> body ──> the application
     │                    └ larger than HEAD_BYTES_MAX: 400        a late head: 408; a late body: 408 by the
     └ beyond connections_max: 503, and closed                     application, or closed BODY_GRACE_S later
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from lockstep.api.endpoints.http import ABORT
from lockstep.api.settings import Limits

SEND_BYTES_MAX = 128 * 1024  # unsent bytes of a connection in the kernel, for a client that reads slowly
CLOSE_S = 30.0  # time for a client to read the rest of the last answer
HEAD_BYTES_MAX = 64 * 1024  # request line and headers together
BODY_GRACE_S = 5.0  # time for the application to refuse a late body itself


class BoundedProtocol(HttpToolsProtocol):
    """An HTTP connection with limits. `bounded_by` makes a subclass with the values."""

    limits = Limits()
    _head_bytes = 0
    _in_head = True
    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Set the deadline of the first head; refuse a connection beyond `connections_max`."""
        super().connection_made(transport)
        connection = transport.get_extra_info("socket")
        if connection is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES_MAX)
        if len(self.connections) > self.limits.connections_max:
            self._refuse(b"503 Service Unavailable", b"The server has reached its limit of connections.")
            return
        self._expect(self.limits.head_s)

    def connection_lost(self, exc: Exception | None) -> None:
        """Drop the deadline."""
        self._expect(None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse received bytes; refuse a head that is too large."""
        if self._in_head:
            self._head_bytes += len(data)
            if self._late is None:  # the next head on a kept connection
                self._expect(self.limits.head_s)
        super().data_received(data)
        if self._in_head and self._head_bytes > HEAD_BYTES_MAX and not self.transport.is_closing():
            self.send_400_response(f"Request line and headers are larger than {HEAD_BYTES_MAX} bytes.")

    def on_headers_complete(self) -> None:
        """Set the deadline of the body."""
        self._in_head, self._head_bytes = False, 0
        self.scope[ABORT] = self.transport.abort  # type: ignore[literal-required]  # called for a stream that its client does not read
        self._expect(self.limits.body_s + BODY_GRACE_S)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Drop the deadline; the next head begins."""
        self._in_head = True
        self._expect(None)
        super().on_message_complete()

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection, after CLOSE_S even if the client never reads the rest of the last answer."""
        super().timeout_keep_alive_handler()
        self.loop.call_later(CLOSE_S, self.transport.abort)

    def _expect(self, seconds: float | None) -> None:
        """Set the deadline of the next part; None: no deadline."""
        if self._late is not None:
            self._late.cancel()
        self._late = None if seconds is None else self.loop.call_later(seconds, self._is_late)

    def _is_late(self) -> None:
        self._late = None
        if self.transport.is_closing():
            return
        if self._in_head:
            self._refuse(b"408 Request Timeout", b"The headers took too long.")
        else:
            self.transport.close()

    def _refuse(self, status: bytes, why: bytes) -> None:
        self.transport.write(
            b"HTTP/1.1 " + status + b"\r\nContent-Type: text/plain; charset=utf-8\r\nRetry-After: 1\r\n"
            b"Content-Length: " + str(len(why)).encode() + b"\r\nConnection: close\r\n\r\n" + why
        )
        self.transport.close()


def bounded_by(limits: Limits) -> type[BoundedProtocol]:
    """Return a protocol class with these limits."""
    return type("BoundedProtocol", (BoundedProtocol,), {"limits": limits})
