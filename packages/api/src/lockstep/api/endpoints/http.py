"""HTTP below the endpoints: bounded bodies, answers as JSON or as a stream of events, and disconnected clients."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import msgspec
from pydantic import ValidationError
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from lockstep.api.endpoints.errors import ApiError
from lockstep.api.endpoints.fields import ignored_by, unserved_fields
from lockstep.api.endpoints.schemas import Body, id_fields, known_fields, row_fields
from lockstep.api.processes.text_jobs import JobError, ParseBody
from lockstep.api.processes.text_processes import PARSED_AT_ONCE_BYTES, TextProcesses, TooManyJobs
from lockstep.api.settings import Limits

BodyType = TypeVar("BodyType", bound=Body)
Result = TypeVar("Result")

PROBLEMS_SHOWN = 3
FIELDS_MAX = 512  # fields of a body
TEXT_CHARACTERS = 4 * 2**20
"""Texts up to this length are passed on by the process that parses a body; longer ones only if they could fit."""

TOO_MANY_BYTES = "the bodies that are being received are too large in all; try again"

OBJECT_EXPECTED = re.compile(r"a valid dictionary( or instance of \w+)?")


class ClientLeft(Exception):
    """Raised when the client has left, so no answer can be sent."""


class Incoming:
    """Facts of a connection about one of its requests, beyond those of ASGI; `protocol.py` records them.

    Attributes:
        whole: whether the body has arrived up to its end.
        left: whether the connection is closed.
    """

    def __init__(self, abort: Callable[[], object], join_writes: Callable[[Scope], object]) -> None:
        """Begin without a body.

        Args:
            abort: closes the connection at once, discarding unsent bytes.
            join_writes: makes the head and the body of the response to the request of this scope one write.
        """
        self.abort, self.join_writes = abort, join_writes
        self.whole = self.left = False
        self._waiting: Callable[[], object] | None = None

    def when_left(self, call: Callable[[], object] | None) -> None:
        """Have `call` called when the connection is closed; None: nothing. The last call of this method counts."""
        self._waiting = call
        if self.left and call is not None:
            call()

    def leave(self) -> None:
        """Record that the connection is closed."""
        self.left = True
        if self._waiting is not None:
            self._waiting()


INCOMING = "lockstep.incoming"
"""Key of the `Incoming` in a request's scope. Requests of batches have none, since no connection brought them."""


class IndexedHeaders(Headers):
    """Headers in which a name is found at once, not by a search. Of headers with one name the first counts."""

    def __init__(self, scope: Scope) -> None:
        super().__init__(scope=scope)
        self._first: dict[bytes, bytes] = {}
        for name, value in scope["headers"]:
            self._first.setdefault(name, value)

    def __getitem__(self, key: str) -> str:
        return self._first[key.lower().encode("latin-1")].decode("latin-1")

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and key.lower().encode("latin-1") in self._first

    def get(self, key: str, default: Any = None) -> Any:
        """Return the first value of a name, or `default`."""
        value = self._first.get(key.lower().encode("latin-1"))
        return default if value is None else value.decode("latin-1")


class IndexedRequest(Request):
    """A request whose handlers read many headers."""

    @property
    def headers(self) -> Headers:
        if not hasattr(self, "_headers"):
            self._headers = IndexedHeaders(self.scope)
        return self._headers


class JsonResponse(Response):
    """A JSON answer."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer, by one write where the connection allows it."""
        incoming: Incoming | None = scope.get(INCOMING)
        if incoming is not None:
            incoming.join_writes(scope)
        await super().__call__(scope, receive, send)


def error_response(error: ApiError, kind: Literal["openai", "anthropic"] = "openai") -> JsonResponse:
    """Return an error as an answer, in the shape of this API."""
    body = error.anthropic() if kind == "anthropic" else error.body()
    return JsonResponse(body, status_code=error.status, headers=error.headers())


# --------------------------------------------------------------------------------------------------------------- bodies


@dataclass
class BodyReader:
    """Reads the bodies of one worker's requests.

    Args:
        processes: parse bodies that are too large for the event loop.
        strict: refuse unknown fields.
        characters_max: returns the length of the longest text that could fit. Raises ApiError while there is no engine.
    Attributes:
        open_bytes: bytes of the bodies that are being received.
    """

    processes: TextProcesses
    limits: Limits
    strict: bool
    characters_max: Callable[[], int] = lambda: 0
    open_bytes: int = 0

    async def read(
        self,
        request: Request,
        schema: type[BodyType],
        *,
        bytes_max: int | None = None,
        optional: bool = False,
    ) -> BodyType:
        """Return the body of a request. Raises ApiError: 408, 413, 415, 503, 400 with the invalid field; ClientLeft.

        Args:
            bytes_max: greatest size; None: that of the limits.
            optional: whether an absent body stands for all defaults.
        """
        if (
            optional
            and request.headers.get("content-length", "0") == "0"
            and "transfer-encoding" not in request.headers
        ):
            return schema()
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
            raise ApiError(415, f"the body must be application/json, got {kind[:60] or 'no Content-Type'!r}")
        most = self.limits.body_bytes_max
        parts = await self._parts(request, most if bytes_max is None else min(bytes_max, most))
        return await self.checked(request, parts, schema)

    async def checked(self, request: Request, parts: list[bytes], schema: type[BodyType]) -> BodyType:
        """Return a body, and record its fields without effect in the request. Raises ApiError, as `read` does."""
        given = await self._parsed(parts, schema)
        if isinstance(given, dict) and len(given) > FIELDS_MAX:
            raise ApiError(400, f"the body has {len(given)} fields, at most {FIELDS_MAX} are allowed")
        body = checked_body(schema, given)
        ignored_by(request).extend(unserved_fields(body, strict=self.strict))
        return body

    async def _parsed(self, parts: list[bytes], schema: type[Body]) -> Any:
        """Return the value of a body, with arrays for token ids if it is large. Raises ApiError."""
        size = sum(map(len, parts))
        if size > PARSED_AT_ONCE_BYTES:
            limits = self.limits
            known, ids, rows = known_fields(schema), id_fields(schema), row_fields(schema)
            longest = max(self.characters_max(), TEXT_CHARACTERS)
            job = ParseBody(
                *(known, ids, size, FIELDS_MAX, limits.ids_max, limits.values_max, longest),
                rows=rows,
                numbers_max=limits.embedding_numbers_max,
            )
            return await in_process(self.processes.parse(job, parts))
        try:
            return msgspec.json.decode(b"".join(parts))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ApiError(400, f"Invalid JSON: {error}") from None

    async def _parts(self, request: Request, bytes_max: int) -> list[bytes]:
        seconds = self.limits.body_s
        too_large = ApiError(413, f"the body is larger than the limit of {bytes_max} bytes")
        given = request.headers.get("content-length", "")
        if given.isdigit() and int(given[:20]) > bytes_max:
            raise too_large
        incoming: Incoming | None = request.scope.get(INCOMING)
        if incoming is not None and incoming.whole:
            return [await self._whole(request, bytes_max, too_large)]
        parts, size = [], 0
        try:
            async with asyncio.timeout(seconds):
                async for part in request.stream():
                    size += len(part)
                    self.open_bytes += len(part)
                    if size > bytes_max:
                        raise too_large
                    if self.open_bytes > self.limits.bodies_bytes_max:
                        raise ApiError(503, TOO_MANY_BYTES)
                    parts.append(part)
        except TimeoutError:
            raise ApiError(408, f"the body took longer than its limit of {seconds:g} s") from None
        except ClientDisconnect:
            raise ClientLeft from None
        finally:
            self.open_bytes -= size
        return parts

    async def _whole(self, request: Request, bytes_max: int, too_large: ApiError) -> bytes:
        """Return a body that has arrived. It needs no time limit."""
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        body: bytes = message.get("body", b"")
        if len(body) > bytes_max:
            raise too_large
        if self.open_bytes + len(body) > self.limits.bodies_bytes_max:
            raise ApiError(503, TOO_MANY_BYTES)
        return body


def checked_body(schema: type[BodyType], given: Any) -> BodyType:
    """Return a body with checked fields. Raises ApiError, 400, with the invalid field."""
    try:
        return schema.model_validate(given)
    except ValidationError as error:
        raise _bad_body(error) from None


async def in_process(work: Awaitable[Result]) -> Result:
    """Wait for a job of a text process. Raises ApiError if it fails."""
    try:
        return await work
    except JobError as error:
        raise ApiError(400, error.message, error.field or None) from None
    except TooManyJobs as error:
        raise ApiError(503, str(error)) from None


def _bad_body(error: ValidationError) -> ApiError:
    """Return the error of an invalid body, in one sentence. Long values are left out."""
    problems, param = [], None
    for problem in error.errors(include_url=False, include_context=False)[:PROBLEMS_SHOWN]:
        # pydantic adds the alternatives of a union, in brackets or as types; clients need fields and indices only
        place = [str(one) for one in problem["loc"] if isinstance(one, int) or str(one).isidentifier()]
        where = ".".join(place)
        param = param or where or None
        given = problem.get("input")
        short = isinstance(given, int | float | None) or (isinstance(given, str) and len(given) <= 60) or not given
        written = repr(given) if short else ""
        got = f", got {written}" if where and 0 < len(written) <= 60 and problem["type"] != "missing" else ""
        message = OBJECT_EXPECTED.sub("a JSON object", problem["msg"].removeprefix("Value error, "))
        problems.append(f"`{where}`: {message}{got}" if where else message)
    return ApiError(400, "; ".join(dict.fromkeys(problems)), param)


# -------------------------------------------------------------------------------------------------------------- answers


async def unless_left(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Run `work` until it ends or the client leaves. The body must have been read. Raises ClientLeft."""
    task = asyncio.current_task()
    assert task is not None
    left = False

    def leave() -> None:
        nonlocal left
        left = True
        task.cancel()

    async def watch() -> None:
        await _left(request.receive)
        leave()

    incoming: Incoming | None = request.scope.get(INCOMING)
    leaving: asyncio.Task[None] | None = None
    if incoming is not None:
        incoming.when_left(leave)
    else:
        leaving = asyncio.ensure_future(watch())
    try:
        return await work
    except asyncio.CancelledError:
        if left and task.uncancel() == 0:
            raise ClientLeft from None
        raise
    finally:
        if leaving is not None:
            leaving.cancel()
        elif incoming is not None:
            incoming.when_left(None)


async def _left(receive: Receive) -> None:
    """Return when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


def event(data: Any) -> bytes:
    """Return one server-sent event."""
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


def named_event(data: dict[str, Any]) -> bytes:
    """Return one server-sent event, named by its `type`."""
    return b"event: " + str(data["type"]).encode() + b"\n" + event(data)


YIELDS_BYTES = 64 * 2**10
"""After so many bytes of a stream other tasks get their turn: the events of many choices may be ready at once."""

DONE = b"data: [DONE]\n\n"


class EventStream(Response):
    """A stream of server-sent events.

    Args:
        events: the events to send. They are closed at the end of the stream in any case.
        over: called at the end in any case.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        *,
        over: Callable[[], object],
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(None, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **(headers or {})})
        del self.headers["content-length"]
        self.events, self.over = events, over
        self.ended: Callable[[bool], object] | None = None  # called at the end with whether everything was sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until all events are sent, or the client has left."""
        sending = asyncio.ensure_future(self._send(send))
        leaving = asyncio.ensure_future(_left(receive))
        all_sent = False
        try:
            await asyncio.wait((sending, leaving), return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
                all_sent = True
        finally:
            if not (sending.done() or leaving.done()):  # cancelled: unsent bytes are discarded
                incoming: Incoming | None = scope.get(INCOMING)
                if incoming is not None:
                    incoming.abort()
                await asyncio.sleep(0)
            leaving.cancel()
            sending.cancel()
            await asyncio.gather(sending, leaving, return_exceptions=True)
            await self.events.aclose()
            self.over()
            if self.ended is not None:
                self.ended(all_sent)

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        unbroken = 0  # bytes since other tasks had their turn
        async for data in self.events:
            await send({"type": "http.response.body", "body": data, "more_body": True})
            unbroken += len(data)
            if unbroken > YIELDS_BYTES:
                unbroken = 0
                await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"", "more_body": False})
