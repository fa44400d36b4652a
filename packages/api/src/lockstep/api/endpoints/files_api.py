"""/v1/files: OpenAI's files, which batches read and write.

    POST /v1/files (multipart: file, purpose, expires_after[seconds])      a file
    GET /v1/files?purpose=&order=&after=&limit=                            the files of this key, in pages
    GET, DELETE /v1/files/{id}; GET /v1/files/{id}/content

Files are private to the key's tenant, and bounded: `--stored-files`, `limits.file_bytes_max` for one of them,
`limits.files_bytes_max` for all, `limits.file_kept_s` until each expires.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from lockstep.api.endpoints.conversations_api import listed
from lockstep.api.endpoints.errors import ApiError
from lockstep.api.endpoints.http import ClientLeft, JsonResponse
from lockstep.api.endpoints.schemas import EXPIRES_MAX_S, EXPIRES_MIN_S
from lockstep.api.endpoints.server import Call, Server
from lockstep.api.endpoints.stored_files import ENDED, StoredFiles

NONE_STORED = "this server stores no files (--stored-files 0)"
PURPOSES = ("batch", "user_data")
"""Purposes of uploaded files; files of the other ones would be used by services that only OpenAI has."""
FORM: dict[str, Any] = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "contentMediaType": "application/octet-stream"},
        "purpose": {"enum": list(PURPOSES)},
    },
}
NAME_CHARACTERS = 256
FORM_FIELDS = 8
FORM_BYTES = 64 * 2**10  # of a form besides the file's content
PART_BYTES = 2**18
LISTED = 10_000  # files in one list, as at OpenAI


def stored(server: Server) -> StoredFiles:
    """Return the store. Raises ApiError if there is none."""
    if server.files is None:
        raise ApiError(404, NONE_STORED)
    return server.files


def _found(server: Server, call: Call[Any]) -> tuple[StoredFiles, dict[str, Any]]:
    """Return the store, and what is known of the file of the request's path. Raises ApiError, 404."""
    name, files = str(call.request.path_params["file_id"]), stored(server)
    found = files.find(call.tenant, name, "file-")
    if found is None:
        raise ApiError(404, f"there is no file {name[:80]!r} here, or it has expired")
    return files, found


async def upload(server: Server, call: Call[None]) -> Response:
    """Store a file."""
    if server.draining:
        raise ApiError(503, "the server is about to stop")
    files = stored(server)
    async with _Form(server, call.request) as form:
        content, purpose = form.get("file"), form.get("purpose")
        if not isinstance(content, UploadFile):
            raise ApiError(400, "`file` is missing: a part of the form with a file name", "file")
        if not isinstance(purpose, str) or purpose not in PURPOSES:
            raise ApiError(400, f"`purpose` must be {' or '.join(PURPOSES)}, got {str(purpose)[:60]!r}", "purpose")
        name = content.filename or "file"
        if len(name) > NAME_CHARACTERS:
            raise ApiError(400, f"the name of `file` has {len(name)} characters, at most {NAME_CHARACTERS}", "file")
        known = await asyncio.to_thread(
            files.add, call.tenant, content.file, name=name, purpose=purpose, kept_s=_expires_s(form)
        )
    return JsonResponse(known)


def _expires_s(form: FormData) -> int | None:
    """Return the seconds of `expires_after`; None without. Raises ApiError."""
    anchor, given = form.get("expires_after[anchor]"), form.get("expires_after[seconds]")
    if anchor is None and given is None:
        return None
    if anchor != "created_at":
        message = f"`expires_after[anchor]` must be created_at, got {str(anchor)[:60]!r}"
        raise ApiError(400, message, "expires_after")
    text = str(given)
    if not (text.isascii() and text.isdigit() and len(text) < 9 and EXPIRES_MIN_S <= int(text) <= EXPIRES_MAX_S):
        message = f"`expires_after[seconds]` must be {EXPIRES_MIN_S} to {EXPIRES_MAX_S}, got {text[:60]!r}"
        raise ApiError(400, message, "expires_after")
    return int(text)


class _Form:
    """The form of a request, with bounds of size and time. Raises ApiError: 400, 408, 413, 415; ClientLeft."""

    def __init__(self, server: Server, request: Request) -> None:
        self._server, self._request = server, request
        self._most = server.limits.file_bytes_max + FORM_BYTES
        self._form: FormData | None = None

    async def __aenter__(self) -> FormData:
        request, limits = self._request, self._server.limits
        kind = request.headers.get("content-type", "")
        if kind.partition(";")[0].strip().lower() != "multipart/form-data":
            raise ApiError(415, f"the body must be multipart/form-data, got {kind[:60] or 'no Content-Type'!r}")
        given = request.headers.get("content-length", "")
        if given.isdigit() and int(given[:20]) > self._most:
            raise self._too_large()
        parser = MultiPartParser(
            request.headers, self._parts(), max_files=1, max_fields=FORM_FIELDS, max_part_size=FORM_BYTES // FORM_FIELDS
        )
        try:
            async with asyncio.timeout(limits.body_s):
                self._form = await parser.parse()
        except TimeoutError:
            raise ApiError(408, f"the body took longer than its limit of {limits.body_s:g} s") from None
        except ClientDisconnect:
            raise ClientLeft from None
        except (MultiPartException, KeyError, UnicodeDecodeError, ValueError) as error:
            raise ApiError(400, f"the form cannot be read: {error}") from None
        return self._form

    async def __aexit__(self, *_: object) -> None:
        if self._form is not None:
            await self._form.close()

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the file is larger than limits.file_bytes_max, {self._server.limits.file_bytes_max}")

    async def _parts(self) -> AsyncGenerator[bytes, None]:
        size = 0
        async for part in self._request.stream():
            size += len(part)
            if size > self._most:
                raise self._too_large()
            yield part


async def list_files(server: Server, call: Call[None]) -> Response:
    """List the files of this key, newest first or by `order`."""
    purpose = call.request.query_params.get("purpose")
    found = await asyncio.to_thread(stored(server).all, call.tenant, "file-")
    return JsonResponse(
        listed([one for one in found if purpose in (None, one["purpose"])], call, shown=LISTED, most=LISTED)
    )


async def file(server: Server, call: Call[None]) -> Response:
    """Describe a file."""
    return JsonResponse(_found(server, call)[1])


async def delete_file(server: Server, call: Call[None]) -> Response:
    """Delete a file, unless a batch in progress reads it."""
    files, known = _found(server, call)
    for batch in await asyncio.to_thread(files.all, call.tenant, "batch_"):
        if batch["input_file_id"] == known["id"] and batch["status"] not in ENDED:
            message = f"{known['id']} is the input of {batch['id']}, which is {batch['status']}; cancel that"
            raise ApiError(400, message)
    files.remove(call.tenant, known["id"])
    return JsonResponse({"id": known["id"], "object": "file", "deleted": True})


class _FileResponse(Response):
    """The content of a file, sent in parts."""

    media_type = "application/octet-stream"

    def __init__(self, parts: AsyncGenerator[bytes, None], size: int) -> None:
        super().__init__(None)
        self.headers["content-length"] = str(size)
        self._parts = parts

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for part in self._parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def content(server: Server, call: Call[None]) -> Response:
    """Return the content of a file."""
    files, known = _found(server, call)
    try:
        opened = files.open(call.tenant, known["id"])
    except OSError:
        raise ApiError(404, f"there is no file {known['id']!r} here, or it has expired") from None

    async def parts() -> AsyncGenerator[bytes, None]:
        with opened:
            while part := await asyncio.to_thread(opened.read, PART_BYTES):
                yield part

    return _FileResponse(parts(), known["bytes"])
