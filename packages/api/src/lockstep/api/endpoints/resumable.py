"""Requests whose answers are kept: with the header `Idempotency-Key`, with `X-Resumable`, and background responses.

    request ──> KeptAnswers.begin ──> a task runs the handler, and writes its answer ──> file
    client  <── reads the file <─────────────────────────────────────────────────────── file
    GET /v1/streams/{id}, Last-Event-ID: N   the events after N

The task does not depend on the client's connection. A worker that replaces another one, and a server that is started on
the same journal, continue the answers in progress: the handler runs again, with the same ids, seeds and cuts, and its
first events, which the file has, are left out (`answer_run`). The engine's requests are taken over where they still
exist, and made anew otherwise.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from lockstep.api.endpoints.answer_run import RUN, AnswerRun, Cut
from lockstep.api.endpoints.errors import ApiError
from lockstep.api.endpoints.fields import name_ignored
from lockstep.api.endpoints.http import ClientLeft, EventStream, JsonResponse, error_response, unless_left
from lockstep.api.endpoints.kept_answers import (
    Content,
    End,
    Head,
    KeptAnswer,
    KeptRequest,
    NoRoom,
    Record,
    Submitted,
)
from lockstep.api.endpoints.schemas import Body
from lockstep.api.endpoints.server import GENERATION, Call, Server
from lockstep.api.processes.text_jobs import packed, unpacked
from lockstep.api.processes.text_processes import TENANT

log = logging.getLogger("lockstep.worker")

KEY, RESUMABLE, STREAM_ID, LAST = "Idempotency-Key", "X-Resumable", "X-Stream-Id", "Last-Event-ID"
KEY_CHARACTERS = 256
KEPT_HEADERS = ("x-session-id", "x-smg-routing-key")
"""Headers of a request that its handler reads, and that a later run must have, too."""

NONE_KEPT = "this server keeps no answers (--kept-answers 0)"
WATCH_S = 1.0  # between two checks whether an answer is still read

Handler = Callable[[Server, Any], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class KeptName:
    """What a request whose answer is to be kept gets.

    Args:
        name: id of the answer.
        secret: from which its ids and seeds are drawn; not used if the answer is known already.
    """

    name: str
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(32))


def kept_name(server: Server, request: Request, body: Body, tenant: str) -> KeptName | None:
    """Return the id of the answer of a request that is to be kept; None for other requests. Raises ApiError."""
    key, background = request.headers.get(KEY), bool(getattr(body, "background", None))
    resumable = request.headers.get(RESUMABLE, "").lower() in ("1", "true")
    if key is None and not resumable and not background:
        return None
    if server.answers is None:
        if key is None and not resumable:
            return None
        raise ApiError(400, f"`{RESUMABLE if key is None else KEY}`: {NONE_KEPT}; leave it out", KEY)
    if background:
        secret = secrets.token_bytes(32)
        return KeptName(f"resp_{AnswerRun(secret, 0.0).draw('response', 24).hex()}", secret)
    if key is None:
        return KeptName(f"ans_{secrets.token_hex(16)}")
    if not 0 < len(key) <= KEY_CHARACTERS:
        raise ApiError(400, f"`{KEY}` has {len(key)} characters, must have 1 to {KEY_CHARACTERS}", KEY)
    return KeptName("key_" + sha256(f"{tenant}\0{key}".encode("utf-8", "surrogatepass")).hexdigest()[:40])


async def respond_kept(server: Server, call: Call[Any], path: str, handler: Handler, kept: KeptName) -> Response:
    """Return the kept answer of a request, after its first run has begun. Raises ApiError, ClientLeft."""
    answers = server.answers
    assert answers is not None
    name = kept.name
    try:
        body = packed(call.body.model_dump(exclude_unset=True))
    except OverflowError:
        raise ApiError(400, "a number is beyond 64 bits") from None
    digest = sha256(path.encode() + b"\0" + body).digest()
    headers = tuple((one, call.request.headers[one]) for one in KEPT_HEADERS if one in call.request.headers)
    lasting = bool(getattr(call.body, "background", None))
    request = KeptRequest(path, call.tenant, digest, body, headers, kept.secret, time.time(), lasting)
    try:
        answer = answers.begin(name, request)
    except NoRoom as error:
        raise ApiError(503, str(error)) from error
    except OSError as error:
        raise ApiError(503, f"the answer cannot be kept: {error}") from error
    if answer is not None:
        start(server, answer, request, call.body, handler)
    found = answers.find(call.tenant, name)
    if found is None:
        raise ApiError(503, "the answer ended while it was looked for; repeat the request")
    if answer is None:
        earlier = answers.request_of(found)
        if earlier is not None and earlier.digest != digest:
            raise ApiError(422, f"`{KEY}` was used for another request; take a new key", KEY)
    response = await unless_left(call.request, reply(server, answers.follow(found), name))
    if lasting and isinstance(response, EventStream) and not getattr(call.body, "stream", None):
        first = await anext(response.events)
        await response.events.aclose()
        _, _, data = first.partition(b"\ndata: ")
        began = msgspec.json.decode(data)["response"]
        return JsonResponse(began | {"status": "queued"}, headers={STREAM_ID: name})
    return response


async def reply(
    server: Server, records: AsyncGenerator[Record, None], name: str, after: int = -1, *, always_stream: bool = False
) -> Response:
    """Return the response that a kept answer has, once its head is known.

    Args:
        after: number of the last event that the client has.
        always_stream: raise ApiError, 400, for an answer that is no stream.
    """
    head: Head | None = None
    async for record in records:
        if isinstance(record, Head):
            head = record
            break
        if isinstance(record, End):
            raise ApiError(503, record.error or "the answer ended without a result")
    if head is None:
        raise ApiError(503, "the answer ended without a result")
    about = {**dict(head.headers), STREAM_ID: name}
    if head.stream:
        return EventStream(_numbered(records, after), over=lambda: None, headers=about)
    if always_stream:
        raise ApiError(400, f"answer {name} is no stream; leave out `stream`")
    data = b""
    async for record in records:
        if isinstance(record, Content):
            data = record.data
        if isinstance(record, End) and record.error:
            raise ApiError(503, record.error)
    return Response(data, status_code=head.status, headers=about)


async def _numbered(records: AsyncGenerator[Record, None], after: int) -> AsyncGenerator[bytes, None]:
    """Yield the events behind number `after`, each with its number as its id."""
    number = -1
    try:
        async for record in records:
            if isinstance(record, Content):
                number += 1
                if number > after:
                    yield b"id: %d\n" % number + record.data
            elif isinstance(record, End) and record.error:
                error = msgspec.json.encode(ApiError(503, record.error).body())
                yield b"data: " + error + b"\n\ndata: [DONE]\n\n"
    finally:
        await records.aclose()


# ------------------------------------------------------------------------------------------------------------- the task


def start(
    server: Server,
    answer: KeptAnswer,
    request: KeptRequest,
    body: Body,
    handler: Handler,
    earlier: Earlier | None = None,
    submitted: Callable[[], object] = lambda: None,
) -> None:
    """Run a handler, and keep its answer.

    Args:
        earlier: what earlier runs of the request have written.
        submitted: called once the engine has its requests, or the run failed before.
    """
    task = asyncio.ensure_future(_run(server, answer, request, body, handler, earlier or Earlier(), submitted))
    server.kept_runs.add(task)
    task.add_done_callback(server.kept_runs.discard)


@dataclass
class Earlier:
    """The records of earlier runs of a request."""

    origins: tuple[str, ...] = ()
    head: Head | None = None
    cuts: list[Cut] = field(default_factory=list)
    events: int = 0
    ended: bool = False

    @classmethod
    def of(cls, records: list[Record]) -> Earlier:
        """Read the records."""
        found = cls()
        for record in records:
            match record:
                case Submitted():
                    found.origins = record.origins
                case Head():
                    found.head = record
                case Content():
                    found.events += 1
                    if record.cut and (not found.cuts or found.cuts[-1] != record.cut):
                        found.cuts.append(record.cut)
                case End():
                    found.ended = True
                case KeptRequest():
                    pass
        return found


async def _run(
    server: Server,
    answer: KeptAnswer,
    request: KeptRequest,
    body: Body,
    handler: Handler,
    earlier: Earlier,
    submitted: Callable[[], object],
) -> None:
    answers = server.answers
    assert answers is not None

    def record_origins(origins: tuple[str, ...]) -> None:
        if origins != earlier.origins:
            answer.append(Submitted(origins))
        submitted()

    TENANT.set(request.tenant)
    watching = asyncio.ensure_future(_watch(server, answer, request, asyncio.current_task()))
    ended = False
    try:
        while True:
            run = AnswerRun(request.secret, request.created_s, earlier.cuts, earlier.origins, record_origins)
            run.leaving = lambda: _leaving(server)
            RUN.set(run)
            call = Call(_request(request), body, request.tenant, time.monotonic())
            try:
                ended = await _written(server, answer, call, handler, earlier)
                break
            except _Later as later:
                submitted()
                await asyncio.sleep(later.seconds)
    except asyncio.CancelledError:
        if not _leaving(server):
            answer.discard()
            ended = True
        raise
    except OSError as error:
        log.error("answer %s cannot be written: %s", answer.name, error)
    except Exception:  # an error of one request; other requests continue
        log.exception("a kept answer failed")
        answer.append(End("the server failed; its log has the cause"))
        answer.discard()
        ended = True
    finally:
        watching.cancel()
        submitted()
        answers.writing.pop(answer.name, None)
        if not ended:
            answer.close()


class _Later(Exception):
    """Raised when a later run of an answer in progress is refused for now; it is tried again after `seconds`."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds


def _leaving(server: Server) -> bool:
    """Return whether the server stops, also since its last engine was given up. The next server continues answers."""
    return server.draining or bool(server.bridge.gone)


async def _written(server: Server, answer: KeptAnswer, call: Call[Any], handler: Handler, earlier: Earlier) -> bool:
    """Run the handler, and write its answer. Returns whether the file was closed. Raises OSError, _Later."""
    request = call.request
    try:
        response = await handler(server, call)
    except (ApiError, ClientLeft) as error:
        refused = error if isinstance(error, ApiError) else ApiError(503, "the request was cancelled")
        if _leaving(server) and refused.status == 503:
            return False
        if refused.status in (429, 503) and earlier.head is not None:  # the client has a part of the answer
            raise _Later(refused.retry_after_s) from None
        answer.append(Head(refused.status, (("content-type", "application/json"),), False))
        shaped = error_response(refused, "anthropic" if "/messages" in str(request.scope["path"]) else "openai")
        answer.append(Content(bytes(shaped.body)))
        answer.append(End())
        answer.discard()  # a repeated request runs again
        return True
    name_ignored(request, response)
    headers = tuple((name, value) for name, value in response.headers.items() if name != "content-length")
    stream = isinstance(response, EventStream)
    if earlier.head is None:
        answer.append(Head(response.status_code, headers, stream))
    if not isinstance(response, EventStream):
        if server.bridge.gone and response.status_code >= 500:
            return False
        answer.append(Content(bytes(response.body)))
        answer.end()
        return True
    number, most = 0, server.limits.kept_bytes_max
    try:
        async for data in response.events:
            number += 1
            if server.bridge.gone:  # this event may be the error that its requests have ended with
                return False
            if number <= earlier.events:
                continue
            answer.append(Content(data, cut_of(request)))
            if answer.size > most:
                answer.end(f"the answer is longer than limits.kept_bytes_max, {most}")
                return True
    finally:
        await response.events.aclose()
        response.over()
    answer.end()
    return True


def cut_of(request: Request) -> Cut:
    """Return how far the choices of a request's answer are."""
    generation = request.scope.get(GENERATION)
    return () if generation is None else generation.cut()


async def _watch(server: Server, answer: KeptAnswer, request: KeptRequest, task: asyncio.Task[Any] | None) -> None:
    """Cancel an answer that nothing reads any more, or that was removed."""
    assert task is not None
    while True:
        await asyncio.sleep(WATCH_S)
        removed = not answer.path.exists()
        if removed or (not request.lasting and answer.unread_s() > server.limits.kept_unread_s):
            log.info("answer %s is cancelled: %s", answer.name, "it was removed" if removed else "nothing reads it")
            task.cancel()
            return


def _request(kept: KeptRequest) -> Request:
    """Return a request for a handler, with a client that never leaves."""

    async def receive() -> Any:
        await asyncio.Event().wait()

    headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in kept.headers]
    scope = {"type": "http", "method": "POST", "path": kept.path, "query_string": b"", "headers": headers}
    return Request(scope, receive)


async def continue_answers(server: Server, handlers: dict[str, tuple[Handler, type[Body]]], within_s: float) -> None:
    """Continue the answers in progress whose worker has ended. Returns once the engine has their requests.

    Args:
        handlers: by path.
        within_s: longest wait for the requests to be submitted.
    """
    answers = server.answers
    assert answers is not None
    waiting = []
    for answer in answers.abandoned():
        earlier = Earlier.of(records := answer.records())
        request = records[0] if records else None
        if not isinstance(request, KeptRequest) or request.path not in handlers or earlier.ended:
            if earlier.ended:  # the writer died between the last record and the new name of the file
                answer.path.rename(answer.path.with_suffix(".ended"))
                answer.close()
            else:
                answer.discard()
            answers.writing.pop(answer.name, None)
            continue
        handler, schema = handlers[request.path]
        body = schema.model_validate(unpacked(request.body))
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting.append(done)
        start(server, answer, request, body, handler, earlier, partial(_set, done))
    if waiting:
        log.warning("%d answers in progress are continued", len(waiting))
        await asyncio.wait(waiting, timeout=within_s)


def _set(done: asyncio.Future[None]) -> None:
    if not done.done():
        done.set_result(None)


# -------------------------------------------------------------------------------------------------------- the endpoints


def after_of(request: Request, parameter: str = "starting_after") -> int:
    """Return the number of the last event that a client has; -1 for none. Raises ApiError."""
    given = request.query_params.get(parameter) or request.headers.get(LAST)
    if given is None:
        return -1
    if not (given.isascii() and given.isdigit() and len(given) < 16):
        raise ApiError(400, f"`{LAST}` must be the number of an event, got {given[:40]!r}", LAST)
    return int(given)


async def stream(server: Server, call: Call[None]) -> Response:
    """Return a kept answer: the events of a stream behind `Last-Event-ID`, as they come, or a whole body."""
    answers, name = server.answers, str(call.request.path_params["stream_id"])
    found = None if answers is None else answers.find(call.tenant, name)
    if answers is None or found is None:
        raise ApiError(404, f"there is no answer {name[:80]!r} here, or it has expired")
    after = after_of(call.request)
    return await unless_left(call.request, reply(server, answers.follow(found), name, after))


async def delete_stream(server: Server, call: Call[None]) -> Response:
    """Delete a kept answer. An answer in progress is cancelled."""
    answers, name = server.answers, str(call.request.path_params["stream_id"])
    found = None if answers is None else answers.find(call.tenant, name)
    if answers is None or found is None:
        raise ApiError(404, f"there is no answer {name[:80]!r} here, or it has expired")
    answers.remove(found)
    return Response(msgspec.json.encode({"id": name, "deleted": True}), media_type="application/json")
