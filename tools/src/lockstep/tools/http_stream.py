"""A small HTTP/1.1 client for streams of server-sent events, on asyncio alone, so that it can send at exact times.

Connections are kept open for later requests. Bodies may be chunked, counted, or end with the connection. Lengths are
bounded, so that a server cannot fill the memory of the measuring process.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import NamedTuple
from urllib.parse import urlsplit

from lockstep.core.contract.errors import ConfigError

LINE_BYTES_MAX = 1 << 20
HEADERS_MAX = 200
LABEL = re.compile(r"[\x21-\x7e]{1,128}")  # what servers take as X-Request-Id
TOO_LONG_IDLE = 408
"""Status with which a server closes a connection after a long idle time. It has not read the request (RFC 9110)."""


class ServerAddress(NamedTuple):
    """The address of a server."""

    host: str
    port: int
    path: str  # prefix of every request's path, without a slash at its end
    tls: bool

    @classmethod
    def parse(cls, url: str) -> ServerAddress:
        """Parse an http or https URL. Raises ConfigError for any other text."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"`--to` cannot be `{url}`: {error}\nhint: such as http://127.0.0.1:8000") from error
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ConfigError(f"`--to` must be the URL of a server, got `{url}`\nhint: such as http://127.0.0.1:8000")
        tls = parts.scheme == "https"
        path = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port or (443 if tls else 80), path, tls)


class HttpError(Exception):
    """An answer that is not HTTP, or a broken connection."""


class Response:
    """The head of an answer. The body can be read piece by piece or line by line."""

    def __init__(self, status: int, headers: dict[str, str], reader: asyncio.StreamReader) -> None:
        self.status = status
        self._headers = headers
        self._reader = reader
        self.reusable = headers.get("connection", "").lower() != "close"
        self._left = b""
        self.ended = False  # whether the body was read to its end

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body in the pieces in which it is received."""
        if "chunked" in self._headers.get("transfer-encoding", "").lower():
            while True:
                size = await _line(self._reader)
                try:
                    count = int(size.split(b";")[0], 16)
                except ValueError as error:
                    raise HttpError(f"a chunk of size {size[:20]!r}") from error
                if count:
                    yield await self._reader.readexactly(count)
                await _line(self._reader)
                if not count:
                    self.ended = True
                    return
        length = self._headers.get("content-length")
        if length is None:
            self.reusable = False
        left = int(length) if length is not None else 1 << 62
        while left:
            piece = await self._reader.read(min(left, 1 << 16))
            if not piece:
                if length is not None:
                    raise HttpError("the connection broke off inside a body")
                return
            left -= len(piece)
            yield piece
        self.ended = True

    async def lines(self) -> AsyncIterator[bytes]:
        """Yield the lines of the body without line ends."""
        async for piece in self.pieces():
            self._left += piece
            *lines, self._left = self._left.split(b"\n")
            if len(self._left) > LINE_BYTES_MAX:
                raise HttpError(f"a line of more than {LINE_BYTES_MAX:,} bytes")
            for line in lines:
                yield line.rstrip(b"\r")
        if self._left:
            yield self._left.rstrip(b"\r")


class HttpClient:
    """Connections to one server."""

    def __init__(self, target: ServerAddress, headers: dict[str, str]) -> None:
        self.target = target
        self._headers = headers
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self._tls = ssl.create_default_context() if target.tls else None

    async def warm(self, connections: int) -> None:
        """Open connections before they are needed. Raises OSError if the server cannot be reached."""
        for _ in range(connections):
            self._idle.append(await self._connect())

    @asynccontextmanager
    async def request(
        self, method: str, path: str, body: bytes, on_sent: Callable[[], None] | None = None, label: str = ""
    ) -> AsyncIterator[Response]:
        """Send a request and yield the head of its answer. The connection is kept if the body was read to its end.

        A kept connection that the server has closed is replaced. Only then is a request written twice.

        Args:
            on_sent: called when the request has been written.
            label: the client's name for the request, sent as X-Request-Id if it is printable ASCII without spaces.
        Raises: OSError or HttpError.
        """
        lines = [f"{method} {self.target.path}{path} HTTP/1.1", f"Host: {self.target.host}:{self.target.port}"]
        lines += [f"{name}: {value}" for name, value in self._headers.items()]
        if LABEL.fullmatch(label):
            lines.append(f"X-Request-Id: {label}")
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}", "", ""]
        message = "\r\n".join(lines).encode() + body
        while True:
            kept = bool(self._idle)
            reader, writer = self._idle.pop() if kept else await self._connect()
            whole = False
            try:
                writer.write(message)
                if on_sent is not None:
                    on_sent()
                try:
                    response = await _head(reader)
                except (HttpError, OSError):
                    if kept:
                        continue
                    raise
                if kept and response.status == TOO_LONG_IDLE:
                    continue
                yield response
                whole = response.ended and response.reusable
                return
            finally:
                if whole:
                    self._idle.append((reader, writer))
                else:
                    writer.close()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(self.target.host, self.target.port, ssl=self._tls, limit=LINE_BYTES_MAX)

    def close(self) -> None:
        """Close the kept connections."""
        for _, writer in self._idle:
            with suppress(OSError):
                writer.close()
        self._idle.clear()


async def _line(reader: asyncio.StreamReader) -> bytes:
    try:
        line = await reader.readuntil(b"\n")
    except asyncio.IncompleteReadError as error:
        raise HttpError("the connection broke off") from error
    except asyncio.LimitOverrunError as error:
        raise HttpError("a line without an end") from error
    return line.rstrip(b"\r\n")


async def _head(reader: asyncio.StreamReader) -> Response:
    status = await _line(reader)
    words = status.split(b" ", 2)
    if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not words[1].isdigit():
        raise HttpError(f"expected an HTTP status, got {status[:40]!r}")
    headers: dict[str, str] = {}
    while line := await _line(reader):
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.strip().lower()] = value.strip()
        if len(headers) > HEADERS_MAX:
            raise HttpError(f"more than {HEADERS_MAX} headers")
    return Response(int(words[1]), headers, reader)
