"""A worker's run of a batch: its requests, a bounded number at a time, and the lines of their results.

    file of requests ──> validated as a whole ──> handler of the endpoint ──> .output or .error ──> files of results

Each result is appended before the next request of its place begins, so a later run leaves out the requests whose
results are there. A request that is refused for now (429, 503) waits and is tried again, until the batch expires.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from lockstep.api.endpoints.errors import ApiError
from lockstep.api.endpoints.fields import name_ignored
from lockstep.api.endpoints.http import ClientLeft, EventStream, error_response
from lockstep.api.endpoints.server import Call, Server
from lockstep.api.endpoints.stored_files import StoredFiles
from lockstep.api.processes.text_processes import TENANT

log = logging.getLogger("lockstep.worker")

Handler = Callable[[Server, Any], Awaitable[Response]]
TENANT_FIELD = "lockstep_tenant"
"""Field of a stored batch, hidden from clients: the tenant, under whose limits it runs."""
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
ERRORS_MAX = 20  # invalid lines that are reported
LINES_AT_ONCE = 64  # read between two turns of other requests
LOOK_S = 0.5  # between two checks whether the batch is to be cancelled, and two writes of its counts
CUSTOM_ID_CHARACTERS = 512
LINE_BYTES_MAX = 4 * 2**20  # read and decoded at once, beside streams


class Line(msgspec.Struct, frozen=True):
    """One request of a batch."""

    custom_id: str
    method: Literal["POST"]
    url: str
    body: msgspec.Raw


class Result(msgspec.Struct, frozen=True):
    """What a later run reads of a result."""

    custom_id: str


_lines = msgspec.json.Decoder(Line)
_results = msgspec.json.Decoder(Result)


class _Stopped(Exception):
    """Raised when a batch ends before all of its requests have results; `status` is its state then."""

    def __init__(self, status: Literal["cancelled", "expired"]) -> None:
        super().__init__(status)
        self.status = status


def start(server: Server, tenant: str, batch: dict[str, Any], release: Callable[[], None]) -> None:
    """Run a batch, whose lock this worker has."""
    assert server.files is not None
    run = BatchRun(server, server.files, tenant, dict(batch))

    async def running() -> None:
        try:
            await run.run()
        except asyncio.CancelledError:
            raise
        except Exception:  # an error of one batch; other requests continue
            log.exception("batch %s failed", batch["id"])
            run.fail("server_error", "the server failed; its log has the cause")
        finally:
            release()

    task = asyncio.ensure_future(running())
    server.batch_runs.add(task)
    task.add_done_callback(server.batch_runs.discard)


def continue_batches(server: Server) -> None:
    """Continue the batches whose worker has ended."""
    assert server.files is not None
    for batch, release in server.files.abandoned_batches():
        tenant = str(batch.pop(TENANT_FIELD, ""))
        log.warning("batch %s is continued", batch["id"])
        start(server, tenant, batch, release)


@dataclass
class BatchRun:
    """The run of one batch."""

    server: Server
    files: StoredFiles
    tenant: str
    batch: dict[str, Any]
    done: set[str] = field(default_factory=set)  # custom ids with results
    written_s: float = 0.0

    async def run(self) -> None:
        """Run the batch to its end. Raises OSError."""
        TENANT.set(self.tenant)
        try:
            total = await self._validated()
        except (ApiError, OSError) as error:
            self.fail("invalid_input", str(error))
            return
        if total is None:
            return
        counts = self.batch["request_counts"]
        counts |= {"total": total, "completed": self._resumed("output"), "failed": self._resumed("error")}
        self._put(status="in_progress", in_progress_at=self.batch["in_progress_at"] or int(time.time()))
        status: Literal["completed", "cancelled", "expired"] = "completed"
        try:
            await self._answer_all()
        except _Stopped as stopped:
            status = stopped.status
        except ApiError as error:
            self.fail("limit_exceeded", error.message)
            return
        self._put(status="finalizing", finalizing_at=int(time.time()))
        self._finish(status)

    def fail(self, code: str, message: str, line: int | None = None) -> None:
        """End the batch with an error."""
        error = {"code": code, "message": message, "param": None, "line": line}
        self.batch["errors"] = {"object": "list", "data": [error]}
        with contextlib.suppress(OSError):
            self._finish("failed")

    # -------------------------------------------------------------------------------------------------------- the lines

    async def _raw_lines(self) -> AsyncIterator[tuple[int, bytes]]:
        """Yield number and bytes of the lines of the input that are not empty. Raises OSError, ApiError."""
        most = min(LINE_BYTES_MAX, self.server.limits.body_bytes_max)
        with self.files.open(self.tenant, self.batch["input_file_id"]) as file:
            number = 0
            while raw := file.readline(most + 1):
                number += 1
                if len(raw) > most:
                    raise ApiError(400, f"line {number} has more than {most} bytes")
                if number % LINES_AT_ONCE == 0 or len(raw) > 2**16:
                    await asyncio.sleep(0)
                if raw.strip():
                    yield number, raw

    async def _validated(self) -> int | None:
        """Return the number of requests; None if a line is invalid, and the batch failed. Raises OSError, ApiError."""
        errors: list[dict[str, Any]] = []
        known, most = set[str](), self.server.limits.batch_requests_max
        async for number, raw in self._raw_lines():
            problem = self._problem(raw, known)
            if problem is not None:
                errors.append({"code": problem[0], "message": problem[1], "param": problem[2], "line": number})
                if len(errors) == ERRORS_MAX:
                    break
            if len(known) > most:
                raise ApiError(400, f"the file has more than limits.batch_requests_max, {most}, requests")
        if not known and not errors:
            raise ApiError(400, "the file has no requests")
        if errors:
            self.batch["errors"] = {"object": "list", "data": errors}
            self._finish("failed")
            return None
        return len(known)

    def _problem(self, raw: bytes, known: set[str]) -> tuple[str, str, str | None] | None:
        """Return code, message and field of what is wrong with a line; None: nothing. Adds its id to those known."""
        endpoint = self.batch["endpoint"]
        try:
            line = _lines.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            return "invalid_json_line", f"this line is no request: {error}", None
        if line.url != endpoint:
            message = f"`url` is {line.url[:60]!r}, but the endpoint of the batch is {endpoint}"
            return "mismatched_url", message, "url"
        if not 0 < len(line.custom_id) <= CUSTOM_ID_CHARACTERS:
            return "invalid_custom_id", f"`custom_id` must have 1 to {CUSTOM_ID_CHARACTERS} characters", "custom_id"
        if line.custom_id in known:
            return "duplicate_custom_id", f"`custom_id` {line.custom_id[:60]!r} is used twice", "custom_id"
        if not bytes(line.body).lstrip().startswith(b"{"):
            return "invalid_request", "`body` must be a JSON object", "body"
        known.add(line.custom_id)
        return None

    def _resumed(self, kind: Literal["output", "error"]) -> int:
        """Return the number of results that earlier runs have written. A torn last line is cut off. Raises OSError."""
        path, count, at = self._path(kind), 0, 0
        if not path.exists():
            return 0
        with path.open("r+b") as file:
            for raw in file:
                if not raw.endswith(b"\n"):
                    file.truncate(at)
                    break
                self.done.add(_results.decode(raw).custom_id)
                count, at = count + 1, at + len(raw)
        return count

    # ----------------------------------------------------------------------------------------------------- the requests

    async def _answer_all(self) -> None:
        """Answer the requests without results. Raises _Stopped, ApiError, OSError."""
        free = asyncio.Semaphore(self.server.limits.batch_open_max)
        tasks = set[asyncio.Task[None]]()
        failed: list[BaseException] = []

        def ended(task: asyncio.Task[None]) -> None:
            tasks.discard(task)
            free.release()
            if not task.cancelled() and (error := task.exception()) is not None:
                failed.append(error)

        try:
            async for _, raw in self._raw_lines():
                line = _lines.decode(raw)
                if line.custom_id in self.done:
                    continue
                while True:
                    self._check(failed)
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(free.acquire(), LOOK_S)
                        break
                tasks.add(task := asyncio.ensure_future(self._answer(line)))
                task.add_done_callback(ended)
            while tasks:
                self._check(failed)
                await asyncio.wait(tasks, timeout=LOOK_S)
            self._check(failed, complete=True)
        finally:
            for task in list(tasks):
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _check(self, failed: list[BaseException], *, complete: bool = False) -> None:
        """Write the counts, and raise why the batch stops: _Stopped, or what a request raised."""
        if failed:
            raise failed[0]
        if complete:
            return
        if self.files.batch_path(self.tenant, self.batch["id"], "cancel").exists():
            raise _Stopped("cancelled")
        if time.time() > self.batch["expires_at"]:
            raise _Stopped("expired")
        if time.monotonic() - self.written_s >= LOOK_S:
            self._put()

    async def _answer(self, line: Line) -> None:
        """Run one request, and write its result. Raises ApiError beyond the tenant's bytes, OSError."""
        while True:
            response = await self._response(line)
            if response.status_code not in (429, 503):
                break
            await asyncio.sleep(float(response.headers.get("retry-after", "1")))
        kind: Literal["output", "error"] = "output" if response.status_code == 200 else "error"
        request_id = secrets.token_hex(16)
        answer = {"status_code": response.status_code, "request_id": request_id, "body": msgspec.Raw(response.body)}
        result = {
            "id": f"batch_req_{request_id}",
            "custom_id": line.custom_id,
            "response": answer,
            "error": None,
        }
        descriptor = os.open(self._path(kind), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, msgspec.json.encode(result) + b"\n")
        finally:
            os.close(descriptor)
        self.batch["request_counts"]["completed" if kind == "output" else "failed"] += 1

    async def _response(self, line: Line) -> Response:
        """Return the answer to one request, or its error."""
        handler, schema = self.server.batched[line.url]
        request = _request(line.url)
        try:
            body = await self.server.bodies.checked(request, [bytes(line.body)], schema)
            if getattr(body, "stream", None):
                raise ApiError(400, "`stream` must be false in a batch", "stream")
            response = await handler(self.server, Call(request, body, self.tenant, time.monotonic()))
        except ApiError as error:
            return error_response(error)
        except ClientLeft:
            return error_response(ApiError(503, "the request was cancelled"))
        assert not isinstance(response, EventStream)
        name_ignored(request, response)
        return response

    # ------------------------------------------------------------------------------------------------------- the result

    def _path(self, kind: Literal["output", "error"]) -> Path:
        return self.files.batch_path(self.tenant, self.batch["id"], kind)

    def _put(self, **changed: Any) -> None:
        """Store the batch, and check the tenant's bytes. Raises OSError, ApiError."""
        self.batch |= changed
        self.files.put_batch(self.tenant, {**self.batch, TENANT_FIELD: self.tenant})
        self.written_s = time.monotonic()
        if not changed:
            self.files.check_bytes(self.files.of(self.tenant))

    def _finish(self, status: Literal["completed", "cancelled", "expired", "failed"]) -> None:
        """Make the results files of the tenant, and store the end of the batch. Raises OSError."""
        folder, expires = self.files.of(self.tenant), self.batch.get("output_expires_after")
        for kind in ("output", "error"):
            path = self.files.batch_path(self.tenant, self.batch["id"], kind)
            if path.exists():
                number = sha256(f"{self.batch['id']} {kind}".encode()).hexdigest()[:32]  # the same one in a later run
                stored = folder / f"file-{number}.data"
                with contextlib.suppress(FileExistsError):
                    os.link(path, stored)
                name = f"{self.batch['id']}_{kind}.jsonl"
                kept_s = None if expires is None else expires["seconds"]
                known = self.files.publish(stored, name=name, purpose="batch_output", kept_s=kept_s)
                self.batch[f"{kind}_file_id"] = known["id"]
        self._put(status=status, **{f"{status}_at": int(time.time())})
        for suffix in ("output", "error", "cancel", "lock"):
            self.files.batch_path(self.tenant, self.batch["id"], suffix).unlink(missing_ok=True)


def _request(path: str) -> Request:
    """Return a request for a handler, with a client that never leaves."""

    async def receive() -> Any:
        await asyncio.Event().wait()

    return Request({"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": []}, receive)
