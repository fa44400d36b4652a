"""Sessions and operator's requests: each over its own socket, each checked by its effect."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server is not installed")
httpx2 = pytest.importorskip("httpx2", reason="a client is not installed")

from tests.support.live_server import EMULATED, LiveServer, ask_operator, serving, until  # noqa: E402

ALICE, BOB, OPERATOR = "sk-a-key-of-alice", "sk-a-key-of-bob-xx", "sk-a-key-of-an-operator"
KEYS = "".join(
    f"[[keys]]\ntenant = '{name}'\nkey = '{key}'\nadmin = {admin}\n"
    for name, key, admin in (("alice", ALICE, "false"), ("bob", BOB, "false"), ("operator", OPERATOR, "true"))
)
ENDLESS = {"prompt": "a", "max_tokens": 30_000, "ignore_eos": True}
Post = Callable[..., tuple[int, Any]]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("control")
    (folder / "keys.toml").write_text(KEYS)
    access = ("--api-keys", str(folder / "keys.toml"), "--admin-socket", str(folder / "admin"))
    with serving(folder / "log", *EMULATED, *access, "--set", "max_sessions=4") as made:
        yield made


@pytest.fixture
def operator(server: LiveServer) -> Post:
    def post(path: str, body: Any = None) -> tuple[int, Any]:
        return ask_operator(server.log.parent / "admin", path, OPERATOR, body)

    return post


def client_of(server: LiveServer, key: str) -> Any:
    return httpx2.Client(base_url=server.url, headers={"Authorization": f"Bearer {key}"}, timeout=120)


@pytest.fixture
def alice(server: LiveServer) -> Iterator[Any]:
    with client_of(server, ALICE) as made:
        yield made


def state(operator: Post) -> Any:
    return operator("/get_server_info")[1]["state"]


# ------------------------------------------------------------------------------------------------------------- sessions


TURN = {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}


def turn(client: Any, session: str, text: str, **more: Any) -> Any:
    body = {"text": text, "sampling_params": TURN}
    names = {"offset": "offset", "replace": "replace", "drop_previous_output": "drop_previous_output", "after": "rid"}
    offset = {field: more.pop(name) for name, field in names.items() if name in more}
    return client.post("/generate", json={**body, "session_params": {"id": session, **offset}, **more})


def test_a_session_keeps_the_conversation(alice: Any, operator: Post) -> None:
    session = alice.post("/open_session", json={"capacity_of_str_len": 4000}).json()
    assert len(session) == 32
    assert state(operator)["sessions"] == 1
    first = turn(alice, session, "hello").json()
    second = turn(alice, session, " again").json()
    assert first["meta_info"]["prompt_tokens"] == 5
    assert second["meta_info"]["prompt_tokens"] == 5 + 4 + 6
    whole = [*b"hello", *first["output_ids"], *b" again"]
    alone = alice.post("/generate", json={"input_ids": whole, "sampling_params": TURN}).json()
    assert alone["output_ids"] == second["output_ids"]
    back = turn(alice, session, " again", offset=9).json()
    assert back["output_ids"] == second["output_ids"]
    assert turn(alice, session, " again", offset=0).json()["meta_info"]["prompt_tokens"] == 6
    assert turn(alice, session, " once more", replace=True).json()["meta_info"]["prompt_tokens"] == 10
    assert turn(alice, session, "!", replace=False).json()["meta_info"]["prompt_tokens"] == 10 + 4 + 1
    assert alice.post("/close_session", json={"session_id": session}).status_code == 200
    assert state(operator)["sessions"] == 0
    gone = turn(alice, session, "hello")
    assert (gone.status_code, gone.json()["error"]["message"]) == (400, f"`session` is '{session}', which is not open")


def test_a_turn_may_drop_the_output_of_the_turn_before(alice: Any) -> None:
    session = alice.post("/open_session", json={"capacity_of_str_len": 4000}).json()
    turn(alice, session, "hello")
    dropped = turn(alice, session, " again", drop_previous_output=True).json()
    assert dropped["meta_info"]["prompt_tokens"] == 5 + 6
    whole = alice.post("/generate", json={"input_ids": [*b"hello again"], "sampling_params": TURN}).json()
    assert dropped["output_ids"] == whole["output_ids"]
    assert turn(alice, session, "!", drop_previous_output=False).json()["meta_info"]["prompt_tokens"] == 11 + 4 + 1
    assert turn(alice, session, "?", drop_previous_output=True).json()["meta_info"]["prompt_tokens"] == 11 + 4 + 1 + 1
    assert alice.post("/close_session", json={"session_id": session}).status_code == 200


def test_a_turn_continues_from_a_turn_before(alice: Any) -> None:
    session = alice.post("/open_session", json={"capacity_of_str_len": 4000}).json()
    turn(alice, session, "hello", rid="first")
    second = turn(alice, session, " again", rid="second").json()
    turn(alice, session, " and again", rid="third")
    other = turn(alice, session, " again", rid="fourth", after="first").json()
    assert other["output_ids"] == second["output_ids"]
    assert other["meta_info"]["prompt_tokens"] == 5 + 4 + 6
    assert turn(alice, session, "!", after="fourth").json()["meta_info"]["prompt_tokens"] == 15 + 4 + 1
    gone = turn(alice, session, "!", after="third")  # its tokens were cut off
    assert (gone.status_code, "which is no completed turn" in gone.json()["error"]["message"]) == (400, True)
    both = turn(alice, session, "!", after="first", offset=3)
    assert (both.status_code, both.json()["error"]["param"]) == (400, "session_params.offset")
    assert alice.post("/close_session", json={"session_id": session}).status_code == 200


def test_a_session_is_its_tenants(server: LiveServer, alice: Any) -> None:
    assert alice.post("/open_session", json={"capacity_of_str_len": 4000, "session_id": "mine"}).json() == "mine"
    again = alice.post("/open_session", json={"capacity_of_str_len": 4000, "session_id": "mine"})
    assert (again.status_code, again.json()["error"]["message"]) == (400, "`session` is 'mine', which is open already")
    with client_of(server, BOB) as bob:
        assert turn(bob, "mine", "what did she say?").status_code == 400
        assert bob.post("/close_session", json={"session_id": "mine"}).status_code == 400
        assert bob.post("/open_session", json={"capacity_of_str_len": 100, "parent": "mine"}).status_code == 400
        assert bob.post("/open_session", json={"capacity_of_str_len": 4000, "session_id": "mine"}).status_code == 200
        assert turn(bob, "mine", "hello").json()["meta_info"]["prompt_tokens"] == 5
        assert bob.post("/close_session", json={"session_id": "mine"}).status_code == 200
    turn(alice, "mine", "hello")
    fork = alice.post("/open_session", json={"capacity_of_str_len": 4000, "parent": "mine"}).json()
    assert turn(alice, fork, "!").json()["meta_info"]["prompt_tokens"] == 5 + 4 + 1
    for one in ("mine", fork):
        assert alice.post("/close_session", json={"session_id": one}).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/open_session", {}, "capacity_of_str_len"),
        ("/open_session", {"capacity_of_str_len": 2**20 + 1}, "capacity_of_str_len"),
        ("/open_session", {"capacity_of_str_len": 100, "timeout": 3601}, "timeout"),
        ("/open_session", {"capacity_of_str_len": 100, "session_id": "a\0b"}, "session_id"),
        ("/open_session", {"capacity_of_str_len": 100, "streaming": True}, "streaming"),
        ("/generate", {"text": ["a", "b"], "session_params": {"id": "x"}}, "session_params"),
        ("/generate", {"text": "a", "session_params": {"id": "x"}, "sampling_params": {"n": 2}}, "session_params"),
        (
            "/generate",
            {"text": "a", "session_params": {"id": "x", "drop_previous_output": True, "offset": 3}},
            "session_params.drop_previous_output",
        ),
        (
            "/generate",
            {"text": "a", "session_params": {"id": "x", "replace": True, "offset": 3}},
            "session_params.offset",
        ),
        ("/generate", {"text": "a", "session_params": {}}, "session_params.id"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_invalid_sessions(alice: Any, path: str, body: Any, param: str) -> None:
    answer = alice.post(path, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_the_number_of_sessions_is_limited(alice: Any) -> None:
    made = [alice.post("/open_session", json={"capacity_of_str_len": 100}) for _ in range(5)]
    assert [one.status_code for one in made] == [200] * 4 + [400]
    assert "max_sessions 4" in made[4].json()["error"]["message"]
    for one in made[:4]:
        alice.post("/close_session", json={"session_id": one.json()})


def test_a_session_without_a_turn_ends_by_itself(alice: Any, operator: Post) -> None:
    assert alice.post("/open_session", json={"capacity_of_str_len": 100, "timeout": 0.2}).status_code == 200
    until(lambda: state(operator)["sessions"] == 0)


# ------------------------------------------------------------------------------------------------------------- operator


def endless(server: LiveServer, said: list[Any]) -> threading.Thread:
    """A thread with a client that waits for an endless answer."""

    def ask() -> None:
        with client_of(server, ALICE) as client:
            said.append(client.post("/v1/completions", json=ENDLESS, timeout=120).json())

    thread = threading.Thread(target=ask)
    thread.start()
    return thread


def test_pause_retract_resume_and_abort(server: LiveServer, operator: Post) -> None:
    said: list[Any] = []
    thread = endless(server, said)
    until(lambda: state(operator)["running"] == 1)
    assert operator("/is_paused") == (200, {"is_paused": False})
    assert operator("/pause", {"mode": "retract"})[0] == 200
    assert operator("/is_paused") == (200, {"is_paused": True})
    now = state(operator)
    assert (now["paused"], now["running"], now["waiting"], now["counts"]["retractions"]) == (True, 0, 1, 1)
    assert server.status_of("/health") == 200
    assert operator("/continue_generation")[0] == 200
    until(lambda: state(operator)["running"] == 1)
    assert operator("/flush_cache")[0] == 400  # not idle
    assert operator("/pause", {"mode": "sideways"})[1]["error"]["param"] == "mode"
    assert operator("/abort_all")[0] == 200
    thread.join(120)
    assert said[0]["choices"][0]["finish_reason"] == "abort"
    until(lambda: operator("/reset_prefix_cache")[0] == 200)  # the batch in flight may end after the answer


def test_drain_ends_with_the_last_request(server: LiveServer, operator: Post, alice: Any) -> None:
    said: list[Any] = []
    drained: list[int] = []
    thread = endless(server, said)
    until(lambda: state(operator)["running"] == 1)
    draining = threading.Thread(target=lambda: drained.append(operator("/drain")[0]))
    draining.start()
    until(lambda: state(operator)["draining"])
    refused = alice.post("/v1/completions", json={"prompt": "a"})
    assert (refused.status_code, refused.headers["Retry-After"]) == (503, "1")
    assert not drained
    operator("/abort_all")
    draining.join(120)
    thread.join(120)
    assert drained == [200]
    until(lambda: server.status_of("/ready") == 503)
    assert operator("/resume")[0] == 200
    assert alice.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200


def test_settings_that_may_change(operator: Post) -> None:
    changed = {"max_running_requests": 7, "schedule_conservativeness": 0.5}
    assert operator("/set_internal_state", {"server_args": changed}) == (200, {"updated": True, "server_args": changed})
    status, said = operator("/set_internal_state", {"server_args": {"page_size": 1}})
    assert status == 400
    assert "`page_size` cannot change at run time" in said["error"]["message"]
    assert operator("/freeze_gc")[0] == 200
    assert operator("/set_internal_state", {"server_args": {"max_running_requests": 256}})[0] == 200


def test_slowing_down_is_slower(operator: Post, alice: Any) -> None:
    def launches() -> int:
        before = state(operator)["launches"]
        time.sleep(1.0)
        return int(state(operator)["launches"] - before)

    stream = alice.stream("POST", "/v1/completions", json={**ENDLESS, "stream": True})
    with stream as answer:
        lines = answer.iter_lines()  # kept: dropping it closes the connection
        next(lines)
        assert operator("/slow_down", {"forward_sleep_time": 0.5})[0] == 200
        until(lambda: launches() <= 3)  # repeated, since this process may be late
        assert operator("/slow_down")[0] == 200
        until(lambda: launches() > 4)


def test_a_client_that_leaves_costs_no_more_than_what_is_in_flight(operator: Post, alice: Any) -> None:
    """With a tenth of a second between launches, two more may start before the engine receives the cancellation."""

    def launches() -> int:
        until(lambda: state(operator)["idle"])  # the stream of the test before may still be cancelled
        cancelled = state(operator)["counts"]["finished"]["cancelled"]
        with alice.stream("POST", "/v1/completions", json={**ENDLESS, "stream": True}) as answer:
            lines = answer.iter_lines()
            next(lines)
            before = state(operator)["launches"]
        until(lambda: state(operator)["idle"])
        now = state(operator)
        assert now["counts"]["finished"]["cancelled"] == cancelled + 1
        return int(now["launches"] - before)

    assert operator("/slow_down", {"forward_sleep_time": 0.1})[0] == 200
    until(lambda: launches() <= 3)  # repeated, since this process may be late
    assert operator("/slow_down")[0] == 200


def test_without_slots_there_is_no_lora(operator: Post) -> None:
    status, said = operator("/load_lora_adapter", {"lora_name": "law", "lora_path": "of/law"})
    assert (status, "LoRA is off; start with --lora NAME=PATH" in said["error"]["message"]) == (400, True)
    assert operator("/v1/unload_lora_adapter", {"lora_name": "law"})[0] == 404


@pytest.mark.parametrize(
    ("path", "what"),
    [
        ("/get_weights_by_name", "no weights"),
        ("/start_profile", "--profile-dir"),
    ],
)
def test_operations_without_support_in_the_runtime_are_refused(operator: Post, path: str, what: str) -> None:
    status, said = operator(path, {} if path == "/start_profile" else {"name": "model.norm.weight"})
    assert (status, said["error"]["type"]) == (501, "NotImplementedError")
    assert what in said["error"]["message"]
    now = state(operator)
    assert (now["paused"], now["draining"], now["weights_version"], now["memory_released"]) == (False, False, 0, [])


# --------------------------------------------------------------------------------------------------------------- health


def test_health_probes_only_an_idle_engine(server: LiveServer, operator: Post, alice: Any) -> None:
    def admitted() -> int:
        return int(state(operator)["counts"]["admitted"])

    def admitted_by_five() -> int:
        before = admitted()
        assert [server.status_of("/health_generate") for _ in range(5)] == [200] * 5
        return admitted() - before

    assert admitted_by_five() > 0
    until(lambda: admitted_by_five() <= 2)  # a result is valid for a second
    with alice.stream("POST", "/v1/completions", json={**ENDLESS, "stream": True}) as answer:
        lines = answer.iter_lines()  # kept: dropping it closes the connection
        next(lines)
        before = admitted()
        assert [server.status_of("/health_generate") for _ in range(20)] == [200] * 20
        assert admitted() == before
        load = alice.get("/load").json()
        assert (load["server_load"], load["waiting_prompt_tokens"]) == (1, 0)
    until(lambda: alice.get("/get_load").json()["server_load"] == 0)


def test_a_request_that_takes_longer_than_it_may_ends(alice: Any, operator: Post) -> None:
    late = alice.post("/v1/completions", json=ENDLESS, headers={"X-Request-Timeout": "0.3"})
    assert (late.status_code, late.json()["error"]["message"]) == (504, "the request ran out of time")
    until(lambda: state(operator)["running"] == 0)
    assert operator("/pause")[0] == 200
    queued = alice.post("/generate", json={"text": "a", "queue_timeout_s": 0.2})
    assert operator("/resume")[0] == 200
    assert queued.status_code == 504
    for header in ("X-Request-Timeout", "X-Queue-Timeout"):
        for value in ("soon", "-1", "nan", "0", "inf"):
            bad = alice.post("/v1/completions", json={"prompt": "a"}, headers={header: value})
            assert (bad.status_code, bad.json()["error"]["param"]) == (400, header)
    assert alice.post("/v1/completions", json={"prompt": "a", "timeout_s": 0}).status_code == 400
    fine = {"X-Request-Timeout": "30", "X-Queue-Timeout": "30"}
    assert alice.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers=fine).status_code == 200
