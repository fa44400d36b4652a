"""Access to routes: every route, tried without a key, with a user's and with an operator's."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server is not installed")
httpx2 = pytest.importorskip("httpx2", reason="a client is not installed")

from lockstep.api.endpoints.app import ADMIN_ROUTES, ROUTES, HttpRoute, make_app, refuse_undeclared  # noqa: E402
from lockstep.api.endpoints.keys import Key, Keys, read_keys  # noqa: E402
from lockstep.api.endpoints.server import Server  # noqa: E402
from lockstep.api.endpoints.usage import UsageCounter  # noqa: E402
from lockstep.api.observability.metrics import Metrics  # noqa: E402
from lockstep.api.processes.bridge import Bridge, Ticket  # noqa: E402
from lockstep.api.processes.text_processes import TextProcesses  # noqa: E402
from lockstep.api.processes.wire import Submit  # noqa: E402
from lockstep.api.settings import ServeSettings  # noqa: E402
from lockstep.api.text.plain_text import PlainText  # noqa: E402
from lockstep.core.contract.errors import ConfigError  # noqa: E402
from tests.api.test_wire import ABOUT, REQUEST  # noqa: E402

USER, OPERATOR = "sk-a-key-of-a-user", "sk-a-key-of-an-operator"
KEYS = Keys([Key("alice", USER), Key("operator", OPERATOR, admin=True)])

# path: status without a key, with a user's, with an operator's. An invalid body is 400 or 415 once access is granted.
EXPECTED = {
    ("GET", "/health"): (200, 200, 200),
    ("GET", "/ready"): (200, 200, 200),
    ("GET", "/ping"): (200, 200, 200),
    ("GET", "/version"): (401, 200, 200),
    ("GET", "/metrics"): (401, 200, 200),
    ("GET", "/openapi.json"): (401, 200, 200),
    ("GET", "/v1/models"): (401, 200, 200),
    ("GET", "/v1/models/{name:path}"): (401, 404, 404),
    ("POST", "/v1/completions"): (401, 415, 415),
    ("POST", "/v1/chat/completions"): (401, 415, 415),
    ("POST", "/generate"): (401, 415, 415),
    ("POST", "/abort_request"): (401, 415, 415),
    ("POST", "/tokenize"): (401, 415, 415),
    ("POST", "/detokenize"): (401, 415, 415),
    ("POST", "/v1/tokenize"): (401, 415, 415),
    ("POST", "/v1/detokenize"): (401, 415, 415),
    ("POST", "/v1/responses/input_tokens"): (401, 415, 415),
    ("POST", "/v1/conversations"): (401, 400, 400),
    ("GET", "/v1/conversations/{conversation_id}"): (401, 404, 404),
    ("POST", "/v1/conversations/{conversation_id}"): (401, 415, 415),
    ("DELETE", "/v1/conversations/{conversation_id}"): (401, 404, 404),
    ("GET", "/v1/conversations/{conversation_id}/items"): (401, 404, 404),
    ("POST", "/v1/conversations/{conversation_id}/items"): (401, 415, 415),
    ("GET", "/v1/conversations/{conversation_id}/items/{item_id}"): (401, 404, 404),
    ("DELETE", "/v1/conversations/{conversation_id}/items/{item_id}"): (401, 404, 404),
    ("POST", "/v1/files"): (401, 404, 404),  # there is no store
    ("GET", "/v1/files"): (401, 404, 404),
    ("GET", "/v1/files/{file_id}"): (401, 404, 404),
    ("DELETE", "/v1/files/{file_id}"): (401, 404, 404),
    ("GET", "/v1/files/{file_id}/content"): (401, 404, 404),
    ("POST", "/v1/batches"): (401, 415, 415),
    ("GET", "/v1/batches"): (401, 404, 404),
    ("GET", "/v1/batches/{batch_id}"): (401, 404, 404),
    ("POST", "/v1/batches/{batch_id}/cancel"): (401, 404, 404),
    ("GET", "/tokenizer_info"): (401, 200, 200),
    ("GET", "/server_info"): (401, 200, 200),
    ("GET", "/get_server_info"): (401, 200, 200),
    ("GET", "/v1/loads"): (401, 200, 200),
    ("POST", "/abort_requests"): (401, 415, 415),
    ("POST", "/encode"): (401, 415, 415),
    ("POST", "/invocations"): (401, 415, 415),
    ("GET", "/v1/streams/{stream_id}"): (401, 404, 404),
    ("DELETE", "/v1/streams/{stream_id}"): (401, 404, 404),
    ("GET", "/get_model_info"): (401, 200, 200),
    ("GET", "/model_info"): (401, 200, 200),
    ("GET", "/health_generate"): (200, 200, 200),
    ("POST", "/v1/embeddings"): (401, 415, 415),
    ("POST", "/v1/responses"): (401, 415, 415),
    ("GET", "/v1/responses/{response_id}"): (401, 404, 404),
    ("DELETE", "/v1/responses/{response_id}"): (401, 404, 404),
    ("POST", "/v1/responses/{response_id}/cancel"): (401, 404, 404),
    ("GET", "/v1/responses/{response_id}/input_items"): (401, 404, 404),
    ("POST", "/v1/messages"): (401, 415, 415),
    ("POST", "/v1/messages/count_tokens"): (401, 415, 415),
    ("POST", "/open_session"): (401, 415, 415),
    ("POST", "/close_session"): (401, 415, 415),
    ("GET", "/load"): (401, 200, 200),
    ("GET", "/get_load"): (401, 200, 200),
    ("GET", "/usage"): (401, 200, 200),
    ("GET", "/"): (307, 307, 307),  # to /ui
    ("GET", "/ui"): (200, 200, 200),
    ("GET", "/ui/requests"): (401, 200, 200),
    **{
        ("POST", path): (401, 415, 415)
        for path in "/score /v1/score /rerank /v1/rerank /v2/rerank /classify /v1/classify".split()
    },
    **{("POST", path): (401, 501, 501) for path in ("/pooling", "/v1/moderations")},
}
STANDS = "/flush_cache /reset_prefix_cache /pause /pause_generation /resume /continue_generation /is_paused /drain"
STANDS += " /abort_all /get_server_info /server_info /slow_down /freeze_gc /start_profile /stop_profile"
STANDS += " /release_memory_occupation /resume_memory_occupation /sleep /wake_up /is_sleeping"
STANDS += " /destroy_weights_update_group"
NEEDS_BODY = "/set_internal_state /update_weights_from_disk /update_weights_from_tensor /get_weights_by_name"
NEEDS_BODY += " /load_lora_adapter /unload_lora_adapter /v1/load_lora_adapter /v1/unload_lora_adapter"
NEEDS_BODY += " /collective_rpc /init_weights_update_group /update_weights_from_distributed"
EXPECTED_ADMIN = {
    **{("POST", path): (401, 401, 503) for path in STANDS.split()},  # there is no engine
    **{("POST", path): (401, 401, 415) for path in NEEDS_BODY.split()},
    ("GET", "/openapi.json"): (401, 401, 200),
    ("GET", "/flush_cache"): (401, 401, 503),
    **{
        (method, f"/{action}_expert_distribution_record"): (401, 401, 503)
        for action in ("start", "stop", "dump")
        for method in ("GET", "POST")
    },
}


def in_process(folder: Path, routes: tuple[HttpRoute, ...], what: Any, **settings: Any) -> Any:
    """The result of a function of a client of a worker's application, with an engine that is stuck."""

    async def run() -> Any:
        bridge = Bridge(folder, 0)
        bridge.info = ABOUT
        bridge.tickets[-1] = Ticket(-1, Submit(0, -1, REQUEST), [])  # so /health_generate does not wait for a token
        keys = settings.pop("keys", KEYS)
        settings_of = ServeSettings(emulate="qwen3-0.6b@h200", **settings)
        processes, usage = TextProcesses(folder, 1), UsageCounter(folder / "usage")
        server = Server(settings_of, bridge, PlainText(), keys, Metrics(), processes, usage)
        if routes is ADMIN_ROUTES:
            bridge.gone = "it was switched off"
        app = make_app(server, routes)
        try:
            async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://127.0.0.1") as client:
                return await what(client, app)
        finally:
            bridge.close()

    return asyncio.run(run())


@pytest.mark.parametrize(("routes", "expected"), [(ROUTES, EXPECTED), (ADMIN_ROUTES, EXPECTED_ADMIN)])
def test_every_route_with_every_key(tmp_path: Path, routes: Any, expected: Any) -> None:
    async def try_all(client: Any, app: Any) -> dict[tuple[str, str], tuple[int, ...]]:
        found: dict[tuple[str, str], tuple[int, ...]] = {}
        for route in app.routes:
            for method in route.methods - {"HEAD"}:
                path = route.path.replace("{name:path}", "a/b")
                statuses = []
                for key in (None, USER, OPERATOR):
                    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
                    statuses.append((await client.request(method, path, headers=headers)).status_code)
                found[method, route.path] = tuple(statuses)
        return found

    assert in_process(tmp_path, routes, try_all) == expected


def test_no_spelling_of_a_path_gets_around_the_key(tmp_path: Path) -> None:
    async def try_all(client: Any, app: Any) -> list[int]:
        paths = ("//v1/models", "/v1//models", "/v1/models/", "/V1/models", "/v1/%6dodels", "/health/../v1/models")
        found = [(await client.get(path, follow_redirects=True)).status_code for path in paths]
        found += [(await client.get("/v1/models", headers={"Host": "localhost/health?"})).status_code]
        return found

    assert set(in_process(tmp_path, ROUTES, try_all)) <= {401, 404}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Host": "localhost"}, 200),
        ({"Host": "LOCALHOST:8000", "Origin": "http://localhost:8000"}, 200),
        ({"Host": "127.0.0.1:80"}, 200),
        ({"Host": "[::1]:8000", "Origin": "https://[::1]"}, 200),
        ({"Host": "models.example.com:443"}, 200),
        ({"Host": "evil.example"}, 403),
        ({"Host": "evil.example:8000"}, 403),
        ({"Host": "127.0.0.1.evil.example"}, 403),
        ({"Host": "localhost.evil.example"}, 403),
        ({"Host": "0.0.0.0:8000"}, 403),
        ({"Host": ""}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://localhost@evil.example"}, 403),
        ({"Origin": "http://localhost.evil.example:80"}, 403),
    ],
    ids=str,
)
def test_without_keys_pages_of_other_sites_are_refused(tmp_path: Path, headers: dict[str, str], status: int) -> None:
    async def ask(client: Any, app: Any) -> list[int]:
        found = [(await client.get(path, headers=headers)).status_code for path in ("/v1/models", "/health")]
        found.append((await client.post("/v1/completions", headers=headers, json={"prompt": ""})).status_code)
        return found

    said = in_process(tmp_path, ROUTES, ask, keys=None, allowed_hosts=("models.example.com",))
    assert said == [status, 200, 400 if status == 200 else status]


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer ", "Bearer x", f"Basic {USER}", USER, f"Bearer {USER}x"])
def test_an_invalid_key_gives_no_access(header: str) -> None:
    assert KEYS.tenant_of(header) is None


def test_keys_stand_for_tenants() -> None:
    assert KEYS.tenant_of(f"Bearer {USER}") == "alice"
    assert KEYS.tenant_of(f"bearer  {USER} ") == "alice"
    assert KEYS.tenant_of(f"Bearer {USER}", admin=True) is None
    assert KEYS.tenant_of(f"Bearer {OPERATOR}", admin=True) == "operator"


def test_a_route_of_no_table_is_refused_at_start(tmp_path: Path) -> None:
    async def add(client: Any, app: Any) -> None:
        async def open_door() -> str:
            return "come in"

        refuse_undeclared(app.routes, (*ROUTES, HttpRoute("GET", "/openapi.json", "user", ROUTES[0].handler)))
        app.add_api_route("/debug", open_door)
        with pytest.raises(RuntimeError, match="GET /debug is in no table"):
            refuse_undeclared(app.routes, (*ROUTES, HttpRoute("GET", "/openapi.json", "user", ROUTES[0].handler)))

    in_process(tmp_path, ROUTES, add)


def test_strict_refuses_unknown_fields(tmp_path: Path) -> None:
    async def ask(client: Any, app: Any) -> list[tuple[int, str]]:
        found = []
        for more in ({"a_field_of_others": 1}, {"stream_options": {"include_usages": True}}):
            answer = await client.post("/v1/completions", json={"prompt": "a", **more})
            found.append((answer.status_code, answer.json()["error"]["param"]))
        return found

    said = in_process(tmp_path, ROUTES, ask, strict=True, keys=None)
    assert said == [(400, "a_field_of_others"), (400, "stream_options.include_usages")]


def test_where_no_answers_are_stored_what_needs_them_is_refused_by_name(tmp_path: Path) -> None:
    async def ask(client: Any, app: Any) -> list[tuple[int, str | None]]:
        found = []
        for field, value in (("store", True), ("background", True), ("previous_response_id", "resp_1")):
            answer = await client.post("/v1/responses", json={"input": "a", field: value})
            assert "--stored-responses 0" in answer.json()["error"]["message"]
            found.append((answer.status_code, answer.json()["error"]["param"]))
        again = await client.get("/v1/responses/resp_1")
        assert "--stored-responses 0" in again.json()["error"]["message"]
        return [*found, (again.status_code, None)]

    said = in_process(tmp_path, ROUTES, ask, keys=None, stored_responses=0)
    assert said == [(400, "store"), (400, "background"), (400, "previous_response_id"), (404, None)]


def test_without_keys_every_client_on_this_machine_is_a_user(tmp_path: Path) -> None:
    async def ask(client: Any, app: Any) -> int:
        return int((await client.get("/v1/models")).status_code)

    assert in_process(tmp_path, ROUTES, ask, keys=None) == 200


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "Object missing required field `keys`"),
        ("keys = []", "holds no key"),
        ("[[keys]]\ntenant = 'a'", "missing required field `key`"),
        ("[[keys]]\ntenant = 'a'\nkey = 'short-and-secret'[:8]", "cannot be read"),
        ("[[keys]]\ntenant = 'a'\nkey = 'secret'", "key 1 of .* has less than 16 characters"),
        ("[[keys]]\ntenant = ''\nkey = 'secret secret secret'", "needs a tenant"),
        ("[[keys]]\ntenant = 'a'\nkey = 'secret secret secret'\nadmn = true", "unknown field `admn`"),
    ],
)
def test_a_key_file_that_is_none_is_refused_without_showing_a_key(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said) as caught:
        read_keys(path)
    assert "secret" not in str(caught.value)
