"""HTTP below the application: deadlines and sizes of heads and bodies, clients that do not read, and a bounded number
of connections.

connection ──head_s──> headers ──body_s──> body ──> the application
     │                    │                  │     a late head: 408; a late body: 408 by the application, or closed
     │                    │                  │     BODY_GRACE_S later
     │                    │                  └ chunks with more around them than CHUNKS_SPARE allows: 400
     │                    └ larger than HEAD_BYTES_MAX, no `Host` or several, beyond PIPELINED_MAX: 400
     └ beyond connections_max: 503, and closed

A connection with unsent bytes of answers is aborted if its client does not read READ_BYTES_MIN of them, or the rest,
within `slow_reader_s`. That holds while the application waits until it may write more, and after the last answer.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Any

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from lockstep.api.endpoints.http import INCOMING, Incoming
from lockstep.api.settings import Limits

log = logging.getLogger("lockstep.http")

SEND_BYTES_MAX = 128 * 1024  # unsent bytes of a connection in the kernel, for a client that reads slowly
READ_BYTES_MIN = 16 * 1024  # what a client reads at least within `slow_reader_s` while its connection has unsent bytes
HEAD_BYTES_MAX = 64 * 1024  # request line and headers together
PIECE_BYTES = 4096  # of received bytes that are parsed at once, where what is between bodies is counted
CHUNKS_SPARE, CHUNK_SPARE = 16 * 1024, 16  # bytes around the chunks of a body, and more for each chunk
SMALL_CHUNKS_MAX = 65_536  # chunks of less than CHUNK_SPARE bytes on average: each takes the event loop a microsecond
PIPELINED_MAX = 64  # requests of a connection without a response: each that is read takes the event loop 30 us
BODY_GRACE_S = 5.0  # time for the application to refuse a late body itself


class JoinedWrites:
    """A connection's transport for one response, whose head and body it makes one write.

    Args:
        transport: to write to.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._head: bytes | None = b""  # b"": it follows; None: it was written

    def write(self, data: bytes) -> None:
        """Keep the head until the body follows."""
        if self._head is None:
            self._transport.write(data)
        elif not self._head:
            self._head = data
        else:
            self._transport.write(self._head + data)
            self._head = None

    def close(self) -> None:
        """Write what is left, and close the connection."""
        if self._head:
            self._transport.write(self._head)
        self._transport.close()

    def is_closing(self) -> bool:
        """Return whether the connection is being closed."""
        return self._transport.is_closing()


class BoundedProtocol(HttpToolsProtocol):
    """An HTTP connection with limits. `bounded_by` makes a subclass with the values."""

    limits = Limits()
    slow_reader_s = 30.0
    _head_bytes = 0
    _in_head = True
    _head_size = 0  # of the headers that were parsed
    _hosts = 0  # headers `Host` of the current head
    _chunked = False  # whether the body has a transfer encoding
    _body_bytes = 0  # of all bodies of the connection, as _chunks
    _chunks = 0
    _spare = 0  # bytes between the chunks of this body, beyond those that every chunk may have
    _late: asyncio.TimerHandle | None = None
    _messages = 0  # received up to their ends
    _unread: asyncio.TimerHandle | None = None  # the next look at the unsent bytes
    _awaited: tuple[bool, int] | None = None  # the part that `_late` waits for: whether it is a head, and its message

    def connection_made(self, transport: Any) -> None:
        """Set the deadline of the first head; refuse a connection beyond `connections_max`."""
        super().connection_made(transport)
        self._open: list[Incoming] = []  # requests without a complete response, the oldest first
        connection = transport.get_extra_info("socket")
        if connection is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES_MAX)
        if len(self.connections) > self.limits.connections_max:
            self._refuse(b"503 Service Unavailable", b"The server has reached its limit of connections.")
            return
        self._await((True, 0))

    def connection_lost(self, exc: Exception | None) -> None:
        """Drop the deadlines, and report the end of the connection to the requests that it brought."""
        self._await(None)
        if self._unread is not None:
            self._unread.cancel()
        super().connection_lost(exc)
        for incoming in self._open:
            incoming.leave()
        self._open.clear()

    def data_received(self, data: bytes) -> None:
        """Parse received bytes; refuse a head that is too large, and a body with too much between its chunks."""
        at = 0
        while at < len(data) and not self.transport.is_closing():
            bounded = self._in_head or self._chunked
            piece = data[at : at + PIECE_BYTES] if bounded else data[at:] if at else data
            at += len(piece)
            self._parse(piece)

    def _parse(self, data: bytes) -> None:
        began_in_head, body, chunks = self._in_head, self._body_bytes, self._chunks
        if began_in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        self._await((self._in_head, self._messages) if self._head_bytes or not self._in_head else None)
        if began_in_head and self._in_head and self._head_bytes > HEAD_BYTES_MAX:
            self.send_400_response(f"Request line and headers are larger than {HEAD_BYTES_MAX} bytes.")
        elif self._chunked and not began_in_head and not self._in_head:
            new = self._body_bytes - body
            self._spare += len(data) - 3 * new - CHUNK_SPARE * (self._chunks - chunks)
            self._spare = max(self._spare, 0)
            if self._spare > CHUNKS_SPARE:
                self.send_400_response("The chunks of the body have too much between them.")
            elif self._chunks > SMALL_CHUNKS_MAX and self._body_bytes < CHUNK_SPARE * self._chunks:
                self.send_400_response(f"The body has too many chunks of less than {CHUNK_SPARE} bytes.")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count the header `Host`, and bytes of headers."""
        self._head_size += len(name) + len(value) + len(b": \r\n")
        self._hosts += name.lower() == b"host"
        self._chunked |= name.lower() == b"transfer-encoding"
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Check the head, and set the deadline of the body."""
        head, hosts = len(self.url) + self._head_size, self._hosts
        self._in_head, self._head_bytes, self._head_size, self._hosts, self._spare = False, 0, 0, 0, 0
        if head > HEAD_BYTES_MAX:
            self._refuse_head(f"Request line and headers are larger than {HEAD_BYTES_MAX} bytes.")
        if hosts > 1 or (not hosts and self.parser.get_http_version() == "1.1"):
            self._refuse_head(f"A request has one header `Host`, this one has {hosts}.")
        if len(self._open) >= PIPELINED_MAX:
            self._refuse_head(f"More than {PIPELINED_MAX} requests wait on this connection.")
        incoming = Incoming(self.transport.abort, self._join_writes)
        self._open.append(incoming)
        self.scope[INCOMING] = incoming  # type: ignore[literal-required]  # a key of this server's own
        super().on_headers_complete()

    def _refuse_head(self, why: str) -> None:
        """Answer 400 and stop the parser: what follows on the connection is not read. Raises ValueError."""
        self.send_400_response(why)
        raise ValueError(why)

    def send_400_response(self, msg: str) -> None:
        """Refuse what was received, once: the first reason counts."""
        if not self.transport.is_closing():
            super().send_400_response(msg)

    def on_chunk_header(self) -> None:
        """Count a chunk."""
        self._chunks += 1

    def on_body(self, body: bytes) -> None:
        """Count bytes of the body."""
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Record that the body is whole; the next head begins."""
        self._in_head, self._chunked = True, False
        self._messages += 1
        self.scope[INCOMING].whole = True  # type: ignore[literal-required]
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Forget the oldest request: responses are sent in order."""
        if self._open:
            del self._open[0]
        super().on_response_complete()
        if self.transport.is_closing():
            self._watch_reader()

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection."""
        super().timeout_keep_alive_handler()
        self._watch_reader()

    def pause_writing(self) -> None:
        """Let the application wait until the client has read."""
        super().pause_writing()
        self._watch_reader()

    def _watch_reader(self) -> None:
        """Begin to look at the unsent bytes, unless that has begun."""
        size = self.transport.get_write_buffer_size()
        if size and self._unread is None:
            self._unread = self.loop.call_later(self.slow_reader_s, self._look_at_reader, size)

    def _look_at_reader(self, before: int) -> None:
        """Abort the connection if its client has read too little, with `before` unsent bytes `slow_reader_s` ago."""
        self._unread = None
        size = self.transport.get_write_buffer_size()
        if not size or not (self.flow.write_paused or self.transport.is_closing()):
            return
        if before - size < READ_BYTES_MIN:
            log.warning("a client read less than %d bytes in %g s: disconnected", READ_BYTES_MIN, self.slow_reader_s)
            self.transport.abort()
        else:
            self._watch_reader()

    def _await(self, part: tuple[bool, int] | None) -> None:
        """Set the deadline of the next part, unless it is set; None: no deadline."""
        if part == self._awaited:
            return
        self._awaited = part
        if self._late is not None:
            self._late.cancel()
            self._late = None
        if part is not None:
            seconds = self.limits.head_s if part[0] else self.limits.body_s + BODY_GRACE_S
            self._late = self.loop.call_later(seconds, self._is_late)

    def _join_writes(self, scope: Scope) -> None:
        """Make the head and the body of a response one write, which saves a system call. A pipelined one keeps two."""
        if self.cycle.scope is scope and scope["method"] != "HEAD":
            self.cycle.transport = JoinedWrites(self.transport)  # type: ignore[assignment]  # the part of it that is used

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


def bounded_by(limits: Limits, slow_reader_s: float) -> type[BoundedProtocol]:
    """Return a protocol class with these limits."""
    return type("BoundedProtocol", (BoundedProtocol,), {"limits": limits, "slow_reader_s": slow_reader_s})
