"""The tables of routes and their access. A route that is in none of these tables does not exist.

The access of a route is `public` (health; no key, no detail), `user` (any key, if the server has keys) or `admin` (an
operator's key, on a separate Unix socket, if one is configured). Access is checked in the handler of each route and not
by comparing paths, so no spelling of a path can avoid the check.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, compile_path
from starlette.routing import Route as StarletteRoute
from starlette.types import Receive, Scope, Send

from lockstep.api.endpoints import (
    batches_api,
    compat_api,
    control_api,
    control_schemas,
    conversations_api,
    embeddings_api,
    expert_api,
    files_api,
    generate_api,
    messages_api,
    native_api,
    openai_api,
    responses_api,
    resumable,
    schemas,
    scoring_api,
    ui,
)
from lockstep.api.endpoints.batch_run import ENDPOINTS
from lockstep.api.endpoints.description import description_of, operation_of
from lockstep.api.endpoints.errors import CLIENT_LEFT, ApiError
from lockstep.api.endpoints.fields import name_ignored
from lockstep.api.endpoints.http import ClientLeft, EventStream, IndexedRequest, error_response
from lockstep.api.endpoints.schemas import Body
from lockstep.api.endpoints.server import GENERATION, Call, Server
from lockstep.api.observability.logs import EXTRA
from lockstep.api.observability.served import Served
from lockstep.api.processes.text_processes import TENANT
from lockstep.api.settings import is_loopback

log = logging.getLogger("lockstep.http")

Access = Literal["public", "user", "admin"]
Handler = Callable[[Server, Any], Awaitable[Response]]

HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^:\[\]/@\s]+))(?::\d+)?")
"""A host with its port: an address in brackets, or a name."""

LABEL = re.compile(r"[\x21-\x7e]{1,128}")
"""Valid values of X-Request-Id, a client's name for its request. It is returned and logged, and has no other effect."""


JSON, EVENTS, HTML = "application/json", "text/event-stream", "text/html"

SMALL_BYTES, OPERATORS_BYTES, ITEMS_BYTES = 64 * 2**10, 2**20, 4 * 2**20
"""Greatest bodies of routes without prompts, and of routes for operators."""


@dataclass(frozen=True, slots=True)
class HttpRoute:
    """One route."""

    method: Literal["GET", "POST", "DELETE"]
    path: str
    access: Access
    handler: Handler
    body: type[Body] | None = None
    optional: bool = False  # whether an absent body stands for all defaults
    errors: Literal["openai", "anthropic"] = "openai"  # shape of the errors
    bytes_max: int | None = None  # of the body; None: the limit of bodies with prompts
    drains: bool = False  # whether the route with a body is served while the server drains
    keeps: bool = False  # whether answers can be kept: `resumable`
    media: tuple[str, ...] = (JSON,)  # media types of its answers; (): they are empty
    form: dict[str, Any] | None = None  # schema of a body that the handler reads as a form


CONVERSATION = "/v1/conversations/{conversation_id}"

ROUTES = (
    HttpRoute("GET", "/health", "public", native_api.health, media=()),
    HttpRoute("GET", "/health_generate", "public", native_api.health_generate, media=()),
    HttpRoute("GET", "/ready", "public", native_api.ready, media=()),
    HttpRoute("GET", "/ping", "public", native_api.health, media=()),
    HttpRoute("GET", "/version", "user", native_api.server_version),
    HttpRoute("GET", "/metrics", "user", native_api.metrics, media=("text/plain",)),
    HttpRoute("GET", "/v1/models", "user", openai_api.models),
    HttpRoute("GET", "/v1/models/{name:path}", "user", openai_api.model),
    HttpRoute(
        "POST",
        "/v1/completions",
        "user",
        openai_api.completions,
        schemas.CompletionBody,
        keeps=True,
        media=(JSON, EVENTS),
    ),
    HttpRoute(
        "POST", "/v1/chat/completions", "user", openai_api.chat, schemas.ChatBody, keeps=True, media=(JSON, EVENTS)
    ),
    HttpRoute("POST", "/v1/embeddings", "user", embeddings_api.embeddings, schemas.EmbeddingBody),
    HttpRoute(
        "POST", "/v1/responses", "user", responses_api.responses, schemas.ResponseBody, keeps=True, media=(JSON, EVENTS)
    ),
    HttpRoute("GET", "/v1/responses/{response_id}", "user", responses_api.response, media=(JSON, EVENTS)),
    HttpRoute("DELETE", "/v1/responses/{response_id}", "user", responses_api.delete_response),
    HttpRoute("POST", "/v1/responses/{response_id}/cancel", "user", responses_api.cancel_response),
    HttpRoute("GET", "/v1/responses/{response_id}/input_items", "user", responses_api.input_items),
    HttpRoute(
        *("POST", "/v1/messages", "user", messages_api.messages, schemas.MessageBody),
        errors="anthropic",
        keeps=True,
        media=(JSON, EVENTS),
    ),
    HttpRoute(
        *("POST", "/v1/messages/count_tokens", "user", messages_api.count_tokens, schemas.CountBody),
        errors="anthropic",
    ),
    *(HttpRoute("POST", path, "user", scoring_api.score, schemas.ScoreBody) for path in ("/score", "/v1/score")),
    *(
        HttpRoute("POST", path, "user", scoring_api.rerank, schemas.RerankBody)
        for path in ("/rerank", "/v1/rerank", "/v2/rerank")
    ),
    *(
        HttpRoute("POST", path, "user", scoring_api.classify, schemas.ClassifyBody)
        for path in ("/classify", "/v1/classify")
    ),
    *(
        HttpRoute("POST", path, "user", native_api.not_here, schemas.AnyBody, optional=True, bytes_max=SMALL_BYTES)
        for path in ("/pooling", "/v1/moderations")
    ),
    HttpRoute(
        "POST", "/generate", "user", generate_api.generate, schemas.GenerateBody, keeps=True, media=(JSON, EVENTS)
    ),
    HttpRoute("GET", "/v1/streams/{stream_id}", "user", resumable.stream, media=(JSON, EVENTS)),
    HttpRoute("DELETE", "/v1/streams/{stream_id}", "user", resumable.delete_stream),
    HttpRoute("POST", "/v1/responses/input_tokens", "user", compat_api.count_input_tokens, schemas.ResponseBody),
    HttpRoute(
        *("POST", "/v1/conversations", "user", conversations_api.create, schemas.ConversationBody),
        optional=True,
        bytes_max=ITEMS_BYTES,
    ),
    HttpRoute("GET", CONVERSATION, "user", conversations_api.conversation),
    HttpRoute(*("POST", CONVERSATION, "user", conversations_api.describe, schemas.MetadataBody), bytes_max=SMALL_BYTES),
    HttpRoute("DELETE", CONVERSATION, "user", conversations_api.delete),
    HttpRoute("GET", f"{CONVERSATION}/items", "user", conversations_api.list_items),
    HttpRoute(
        *("POST", f"{CONVERSATION}/items", "user", conversations_api.add_items, schemas.ConversationItemsBody),
        bytes_max=ITEMS_BYTES,
    ),
    HttpRoute("GET", f"{CONVERSATION}/items/{{item_id}}", "user", conversations_api.item),
    HttpRoute("DELETE", f"{CONVERSATION}/items/{{item_id}}", "user", conversations_api.delete_item),
    HttpRoute("POST", "/v1/files", "user", files_api.upload, form=files_api.FORM),
    HttpRoute("GET", "/v1/files", "user", files_api.list_files),
    HttpRoute("GET", "/v1/files/{file_id}", "user", files_api.file),
    HttpRoute("DELETE", "/v1/files/{file_id}", "user", files_api.delete_file),
    HttpRoute("GET", "/v1/files/{file_id}/content", "user", files_api.content, media=("application/octet-stream",)),
    HttpRoute("POST", "/v1/batches", "user", batches_api.create, schemas.BatchBody, bytes_max=SMALL_BYTES),
    HttpRoute("GET", "/v1/batches", "user", batches_api.list_batches),
    HttpRoute("GET", "/v1/batches/{batch_id}", "user", batches_api.batch),
    HttpRoute("POST", "/v1/batches/{batch_id}/cancel", "user", batches_api.cancel),
    HttpRoute("GET", "/tokenizer_info", "user", compat_api.tokenizer_info),
    *(HttpRoute("GET", path, "user", compat_api.server_info) for path in ("/server_info", "/get_server_info")),
    HttpRoute("GET", "/v1/loads", "user", compat_api.loads),
    HttpRoute("POST", "/encode", "user", compat_api.encode, schemas.EncodeBody),
    HttpRoute(
        *("POST", "/invocations", "user", compat_api.invocations, compat_api.InvocationBody), media=(JSON, EVENTS)
    ),
    HttpRoute(
        *("POST", "/abort_requests", "user", compat_api.abort_requests, schemas.AbortManyBody),
        bytes_max=SMALL_BYTES,
        drains=True,
        media=(),
    ),
    HttpRoute(
        *("POST", "/abort_request", "user", native_api.abort_request, schemas.AbortBody),
        bytes_max=SMALL_BYTES,
        drains=True,
    ),
    *(
        HttpRoute("POST", path, "user", native_api.tokenize, schemas.TokenizeBody)
        for path in ("/tokenize", "/v1/tokenize")
    ),
    *(
        HttpRoute("POST", path, "user", native_api.detokenize, schemas.DetokenizeBody)
        for path in ("/detokenize", "/v1/detokenize")
    ),
    HttpRoute("GET", "/get_model_info", "user", native_api.model_info),
    HttpRoute("GET", "/model_info", "user", native_api.model_info),
    HttpRoute("GET", "/load", "user", native_api.load),
    HttpRoute("GET", "/get_load", "user", native_api.load),
    HttpRoute("GET", "/usage", "user", native_api.usage),
    HttpRoute("GET", "/", "public", ui.home, media=(HTML,)),
    HttpRoute("GET", "/ui", "public", ui.page, media=(HTML,)),
    HttpRoute("GET", "/ui/requests", "user", ui.requests),
    HttpRoute(
        *("POST", "/open_session", "user", control_api.open_session, control_schemas.OpenSessionBody),
        bytes_max=SMALL_BYTES,
    ),
    HttpRoute(
        *("POST", "/close_session", "user", control_api.close_session, control_schemas.CloseSessionBody),
        bytes_max=SMALL_BYTES,
        drains=True,
    ),
)


def _admin(path: str, handler: Handler, body: type[Body] | None = None, *, optional: bool = True) -> HttpRoute:
    return HttpRoute("POST", path, "admin", handler, body, optional, bytes_max=OPERATORS_BYTES)


ADMIN_ROUTES = (
    _admin("/flush_cache", control_api.flush_cache),
    HttpRoute("GET", "/flush_cache", "admin", control_api.flush_cache),
    _admin("/reset_prefix_cache", control_api.flush_cache),
    _admin("/pause", control_api.pause, control_schemas.PauseBody),
    _admin("/pause_generation", control_api.pause, control_schemas.PauseBody),
    _admin("/resume", control_api.resume),
    _admin("/continue_generation", control_api.resume),
    _admin("/is_paused", control_api.is_paused),
    _admin("/drain", control_api.drain),
    _admin("/abort_all", control_api.abort_all),
    _admin("/get_server_info", control_api.server_info),
    _admin("/server_info", control_api.server_info),
    _admin("/set_internal_state", control_api.set_internal_state, control_schemas.StateBody, optional=False),
    _admin("/slow_down", control_api.slow_down, control_schemas.SlowDownBody),
    _admin("/freeze_gc", control_api.freeze_gc),
    _admin("/start_profile", control_api.start_profile, control_schemas.ProfileBody),
    _admin("/stop_profile", control_api.stop_profile),
    *(
        HttpRoute(method, f"/{action}_expert_distribution_record", "admin", handler, bytes_max=OPERATORS_BYTES)
        for action, handler in (
            ("start", expert_api.start_record),
            ("stop", expert_api.stop_record),
            ("dump", expert_api.dump_record),
        )
        for method in ("GET", "POST")
    ),
    _admin("/load_lora_adapter", control_api.load_adapter, control_schemas.LoadLoraBody, optional=False),
    _admin("/unload_lora_adapter", control_api.unload_adapter, control_schemas.UnloadLoraBody, optional=False),
    _admin("/v1/load_lora_adapter", control_api.load_adapter, control_schemas.LoadLoraBody, optional=False),
    _admin("/v1/unload_lora_adapter", control_api.unload_adapter, control_schemas.UnloadLoraBody, optional=False),
    _admin(
        *("/update_weights_from_disk", control_api.update_weights_from_disk, control_schemas.WeightsFromDiskBody),
        optional=False,
    ),
    _admin(
        *("/update_weights_from_tensor", control_api.update_weights_from_tensor, control_schemas.WeightsFromTensorBody),
        optional=False,
    ),
    _admin("/init_weights_update_group", control_api.join_group, control_schemas.JoinGroupBody, optional=False),
    _admin("/destroy_weights_update_group", control_api.leave_group, control_schemas.LeaveGroupBody),
    _admin(
        *(
            "/update_weights_from_distributed",
            control_api.update_weights_from_group,
            control_schemas.WeightsFromGroupBody,
        ),
        optional=False,
    ),
    _admin("/get_weights_by_name", control_api.get_weights_by_name, control_schemas.WeightsByNameBody, optional=False),
    _admin("/collective_rpc", control_api.collective_rpc, control_schemas.RpcBody, optional=False),
    _admin("/release_memory_occupation", control_api.release_memory, control_schemas.MemoryBody),
    _admin("/resume_memory_occupation", control_api.resume_memory, control_schemas.MemoryBody),
    _admin("/sleep", control_api.release_memory, control_schemas.MemoryBody),
    _admin("/wake_up", control_api.resume_memory, control_schemas.MemoryBody),
    _admin("/is_sleeping", control_api.is_sleeping),
)


EXPOSED = ("X-Request-Id", "X-Ignored-Fields", "X-Stream-Id", "Retry-After")
"""Headers of answers that web pages of allowed origins may read."""

OPERATORS_PATHS = frozenset(route.path for route in ADMIN_ROUTES)


def keeping_routes() -> dict[str, tuple[Handler, type[Body]]]:
    """Return the handlers, and the schemas of the bodies, of the routes whose answers can be kept, by path."""
    return {one.path: (one.handler, one.body) for one in ROUTES if one.keeps and one.body is not None}


def batched_routes() -> dict[str, tuple[Handler, type[Body]]]:
    """Return the handlers, and the schemas of the bodies, of the routes that batches may call, by path."""
    return {one.path: (one.handler, one.body) for one in ROUTES if one.path in ENDPOINTS and one.body is not None}


Endpoint = Callable[[Request], Awaitable[Response]]


class Application(FastAPI):
    """An application in which a route with a fixed path is found at once.

    FastAPI's own way to an endpoint takes longer than many requests. Nothing on it applies to these endpoints, which
    read their bodies and answer their errors themselves.

    Attributes:
        fixed: endpoints by method and path.
    """

    def __init__(self) -> None:
        super().__init__(title="Lockstep", docs_url=None, redoc_url=None, openapi_url=None)
        self.fixed: dict[tuple[str, str], Endpoint] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        endpoint = self.fixed.get((scope["method"], scope["path"])) if scope["type"] == "http" else None
        if endpoint is None:
            await super().__call__(scope, receive, send)
        else:
            response = await endpoint(IndexedRequest(scope, receive, send))
            await response(scope, receive, send)


def make_app(server: Server, routes: tuple[HttpRoute, ...] = ROUTES) -> FastAPI:
    """Return the application of a table of routes, with /openapi.json, which describes them."""
    app = Application()
    foreign = routes is ROUTES and server.settings.cors_origins
    for route in routes:
        named = "{" in route.path
        endpoint = _endpoint(server, route)
        if not named and not foreign:
            app.fixed[route.method, route.path] = endpoint
        app.add_api_route(
            route.path,
            endpoint,
            methods=[route.method],
            operation_id=f"{route.method.lower()}_{re.sub(r'[^a-z0-9]+', '_', route.path.lower()).strip('_')}",
            summary=(route.handler.__doc__ or "").partition("\n")[0],
            openapi_extra=operation_of(route),
            response_model=None,
        )
        if _has_head(route):
            app.add_api_route(
                route.path, _endpoint(server, route), methods=["HEAD"], include_in_schema=False, response_model=None
            )

    made: list[asyncio.Future[bytes]] = []

    async def describe(server: Server, call: Call[None]) -> Response:
        """Return the description of these routes. It is made once, in a thread, since that takes half a second."""
        if not made:
            made.append(asyncio.ensure_future(asyncio.to_thread(description_of, app, routes)))
        return Response(await asyncio.shield(made[0]), media_type=JSON)

    own = HttpRoute("GET", "/openapi.json", "admin" if routes is ADMIN_ROUTES else "user", describe)
    app.add_api_route(own.path, _endpoint(server, own), methods=[own.method], response_model=None)

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message, path, headers = str(error.detail), str(request.scope["path"])[:60], error.headers or {}
        if error.status_code == 404:
            message = f"there is no route {path}; docs/serving.md lists the routes"
            if routes is ROUTES and path in OPERATORS_PATHS:
                message = f"{path} is for operators, and served on --admin-socket only"
        elif error.status_code == 405:
            allowed = ", ".join(methods_of(str(request.scope["path"]), routes))
            message, headers = f"{path} takes {allowed}, not {request.method[:20]}", {"Allow": allowed}
        response = error_response(ApiError(error.status_code, message))
        response.headers.update(headers)
        return response

    app.add_exception_handler(HTTPException, http_error)
    if foreign:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=server.settings.cors_origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=EXPOSED,
        )
    refuse_undeclared(app.routes, (*routes, own))
    return app


def methods_of(path: str, routes: Iterable[HttpRoute]) -> list[str]:
    """Return the methods that a path takes, in the order of the tables. A route without variables comes first."""
    exact = [route for route in routes if route.path == path]
    found = exact or [route for route in routes if compile_path(route.path)[0].match(path)]
    methods = [method for route in found for method in (route.method, *(("HEAD",) if _has_head(route) else ()))]
    return list(dict.fromkeys(methods))


def _has_head(route: HttpRoute) -> bool:
    """Return whether a route also takes HEAD: load balancers use it."""
    return route.method == "GET" and route.access == "public"


def refuse_undeclared(found: list[BaseRoute], declared: tuple[HttpRoute, ...]) -> None:
    """Raise RuntimeError for a route outside the tables, since its access is not declared."""
    known = {(route.method, route.path) for route in declared}
    for one in found:
        methods = (one.methods or set()) - {"HEAD"} if isinstance(one, StarletteRoute) else {"?"}
        for method in methods:
            if (method, getattr(one, "path", "?")) not in known:
                raise RuntimeError(
                    f"{method} {getattr(one, 'path', one)} is in no table of routes, so its access is not declared"
                )


def _endpoint(server: Server, route: HttpRoute) -> Endpoint:
    async def endpoint(request: Request) -> Response:
        arrived_s = time.monotonic()
        named = request.headers.get("x-request-id", "")
        label = named if LABEL.fullmatch(named) else secrets.token_hex(16)
        status, tenant = 500, ""
        try:
            tenant = authorise(server, route.access, request)
            TENANT.set(tenant)
            body = None
            if server.draining and route.body is not None and route.access == "user" and not route.drains:
                raise ApiError(503, "the server is about to stop")
            if route.body is not None:
                body = await server.bodies.read(request, route.body, bytes_max=route.bytes_max, optional=route.optional)
            call = Call(request, body, tenant, arrived_s)
            kept = resumable.kept_name(server, request, body, tenant) if route.keeps and body is not None else None
            if kept is None:
                response = await route.handler(server, call)
            else:
                response = await resumable.respond_kept(server, call, route.path, route.handler, kept)
            status = response.status_code
        except ApiError as error:
            response, status = error_response(error, route.errors), error.status
        except ClientLeft:
            response, status = Response(status_code=CLIENT_LEFT), CLIENT_LEFT
        except Exception:  # an error of one request, which is answered; other requests continue
            log.exception("%s %s failed, request %s", route.method, route.path, label)
            response = error_response(ApiError(500, "the server failed; its log has the cause"), route.errors)
        response.raw_headers.append((b"x-request-id", label.encode()))
        name_ignored(request, response)
        if server.draining and not isinstance(response, EventStream):
            response.headers["Connection"] = "close"

        def answered(status: int) -> None:
            server.metrics.answered(route.path, route.method, status)
            if route.access == "public":
                return
            served = Served(
                request_id=label,
                method=route.method,
                path=route.path,
                status=status,
                tenant=tenant,
                arrived_s=arrived_s,
                ended_s=time.monotonic(),
                headers=request.headers,
                generation=request.scope.get(GENERATION),
            )
            if log.isEnabledFor(logging.INFO):
                fields = {"method": served.method, "tenant": tenant, **served.row()}
                took_ms = served.took_s * 1000
                log.info(
                    *("%s %s %d %.1f ms, request %s", route.method, route.path, status, took_ms, label),
                    extra={EXTRA: fields},
                )
            for watcher in server.watchers:
                watcher(served)

        if isinstance(response, EventStream):
            response.ended = lambda all_sent: answered(status if all_sent else CLIENT_LEFT)
        else:
            answered(status)
        return response

    endpoint.__name__ = route.handler.__name__
    return endpoint


def authorise(server: Server, access: Access, request: Request) -> str:
    """Return the tenant of a request. Raises ApiError: 401 without a key for this access, 403 for foreign web pages."""
    if access == "public":
        return ""
    if access == "user" and server.keys is None:
        _refuse_foreign_pages(server, request)
        return ""
    tenant = None
    if server.keys is not None:
        given = request.headers.get("authorization")
        if given is None and "x-api-key" in request.headers:  # sent by clients of Anthropic's API
            given = f"Bearer {request.headers['x-api-key']}"
        tenant = server.keys.tenant_of(given, admin=access == "admin")
    if tenant is None:
        raise ApiError(401, "Unauthorized: send the header `Authorization: Bearer KEY` with a key for this route")
    return tenant


def _refuse_foreign_pages(server: Server, request: Request) -> None:
    """Refuse requests of foreign web pages. Without keys, every process of this machine has access, browsers included.

    A request is refused if its `Origin` is another site, or if its `Host` is a foreign name that resolves to this
    machine. Raises ApiError, 403.
    """
    for header, value in (("Host", request.headers.get("host")), ("Origin", request.headers.get("origin"))):
        if value is None or (header == "Origin" and value in server.settings.cors_origins):
            continue
        found = HOST.fullmatch(value.partition("://")[2] if header == "Origin" else value)
        name = "" if found is None else (found[1] or found[2]).lower()
        if not is_loopback(name) and name not in server.settings.allowed_hosts:
            message = (
                f"the header `{header}` is {value[:60]!r}, and without keys only requests from this machine are allowed"
            )
            raise ApiError(403, f"{message}; --allowed-host allows a name")
