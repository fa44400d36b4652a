"""/v1/batches: OpenAI's batches. A file of requests, a line for each, becomes a file of answers.

    POST /v1/batches {"input_file_id", "endpoint", "completion_window": "24h"}      a batch
    GET /v1/batches; GET /v1/batches/{id}; POST /v1/batches/{id}/cancel

A worker runs the batch (`batch_run`). When the worker ends, the one in its place continues after the lines that have
results; so does a server that is started again on the same journal.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import Any

from starlette.responses import Response

from lockstep.api.endpoints import batch_run
from lockstep.api.endpoints.conversations_api import listed
from lockstep.api.endpoints.errors import ApiError
from lockstep.api.endpoints.files_api import stored
from lockstep.api.endpoints.http import JsonResponse
from lockstep.api.endpoints.schemas import BatchBody
from lockstep.api.endpoints.server import Call, Server
from lockstep.api.endpoints.stored_files import ENDED

WINDOW_S = 86_400


async def create(server: Server, call: Call[BatchBody]) -> Response:
    """Begin a batch."""
    body, files = call.body, stored(server)
    source = files.find(call.tenant, body.input_file_id, "file-")
    if source is None:
        message = f"`input_file_id`: there is no file {body.input_file_id[:80]!r} here, or it has expired"
        raise ApiError(400, message, "input_file_id")
    if source["purpose"] != "batch":
        message = f"`input_file_id`: the purpose of {source['id']} is {source['purpose']}, must be batch"
        raise ApiError(400, message, "input_file_id")
    known = await asyncio.to_thread(files.all, call.tenant, "batch_")
    open_batches = sum(one["status"] not in ENDED for one in known)
    if open_batches >= server.limits.batches_max:
        message = f"{open_batches} batches of this key are in progress, and limits.batches_max is"
        raise ApiError(429, f"{message} {server.limits.batches_max}; wait for one, or cancel one", retry_after_s=60.0)
    now_s = int(time.time())
    expires = None if body.output_expires_after is None else body.output_expires_after.model_dump(exclude_unset=True)
    times = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
    batch = {
        "id": f"batch_{secrets.token_hex(16)}",
        "object": "batch",
        "endpoint": body.endpoint,
        "errors": None,
        "input_file_id": source["id"],
        "completion_window": body.completion_window,
        "status": "validating",
        "output_file_id": None,
        "error_file_id": None,
        "created_at": now_s,
        "expires_at": now_s + WINDOW_S,
        **{f"{one}_at": None for one in times},
        "request_counts": {"total": 0, "completed": 0, "failed": 0},
        "metadata": body.metadata,
        "output_expires_after": expires,
    }
    release = None
    try:
        release = files.lock(files.batch_path(call.tenant, str(batch["id"]), "lock"))
        await asyncio.to_thread(files.put_batch, call.tenant, {**batch, batch_run.TENANT_FIELD: call.tenant})
    except OSError as error:
        if release is not None:
            release()
        raise ApiError(503, f"the batch cannot be stored: {error.strerror or error}") from error
    assert release is not None  # the id is new
    batch_run.start(server, call.tenant, batch, release)
    return JsonResponse(batch)


def _shown(server: Server, tenant: str, batch: dict[str, Any]) -> dict[str, Any]:
    """Return a batch as clients see it."""
    shown = {name: value for name, value in batch.items() if name != batch_run.TENANT_FIELD}
    if shown["status"] not in ENDED and stored(server).batch_path(tenant, batch["id"], "cancel").exists():
        shown["status"] = "cancelling"
    return shown


def _found(server: Server, call: Call[Any]) -> dict[str, Any]:
    name = str(call.request.path_params["batch_id"])
    found = stored(server).find(call.tenant, name, "batch_")
    if found is None:
        raise ApiError(404, f"there is no batch {name[:80]!r} here")
    return found


async def batch(server: Server, call: Call[None]) -> Response:
    """Describe a batch."""
    return JsonResponse(_shown(server, call.tenant, _found(server, call)))


async def list_batches(server: Server, call: Call[None]) -> Response:
    """List the batches of this key, newest first."""
    known = await asyncio.to_thread(stored(server).all, call.tenant, "batch_")
    return JsonResponse(listed([_shown(server, call.tenant, one) for one in known], call))


async def cancel(server: Server, call: Call[None]) -> Response:
    """Cancel a batch. Its results so far become its files."""
    found, files = _found(server, call), stored(server)
    if found["status"] in ENDED:
        raise ApiError(400, f"{found['id']} is {found['status']}, and can no longer be cancelled")
    try:
        files.batch_path(call.tenant, found["id"], "cancel").touch(mode=0o600)
    except OSError as error:
        raise ApiError(503, f"the batch cannot be cancelled: {error.strerror or error}") from error
    return JsonResponse(_shown(server, call.tenant, found) | {"cancelling_at": int(time.time())})
