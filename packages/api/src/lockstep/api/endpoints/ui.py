"""The live page: one file without external resources, and the list of last requests. It reads /metrics."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from starlette.responses import RedirectResponse, Response

from lockstep.api.endpoints.http import JsonResponse
from lockstep.api.endpoints.server import Call, Server

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


async def page(server: Server, call: Call[None]) -> Response:
    """Return the live page. It contains no data: it fetches all figures with the key that its user enters."""
    return Response(_page(), media_type="text/html; charset=utf-8", headers=HEADERS)


async def home(server: Server, call: Call[None]) -> Response:
    """Redirect from / to the live page."""
    return RedirectResponse("/ui")


async def requests(server: Server, call: Call[None]) -> Response:
    """Return the last requests that this worker answered; with keys, those of the caller's tenant."""
    return JsonResponse(
        {
            "worker": server.bridge.worker,
            "journal": server.settings.journal,
            "model": server.models()[0],
            "device": server.info().device,
            "engines": len(server.bridge.engines),
            "requests": server.recent.of(None if server.keys is None else call.tenant),
        }
    )


@cache
def _page() -> bytes:
    return (files("lockstep.api.endpoints") / "ui.html").read_bytes()
