"""Answers that outlive their connection, their worker and their server; and the same answer to the same key."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server is not installed")
httpx2 = pytest.importorskip("httpx2", reason="a client is not installed")

from lockstep.api.endpoints.kept_answers import KeptAnswers, KeptRequest  # noqa: E402
from tests.support.live_server import (  # noqa: E402
    EMULATED,
    LiveServer,
    children_of_journal,
    metric,
    running,
    serving,
    until,
)

LONG = {"prompt": "hello", "max_tokens": 1500, "ignore_eos": True, "seed": 7, "stream": True}
RESUMABLE = {"X-Resumable": "1"}
LARGE = {"prompt": [7, 8, 9] * 20, "x": " " * 100_000}
"""Fields of a body that a text process reads: its token ids are an array."""


@pytest.fixture(scope="module")
def client(emulated: LiveServer) -> Iterator[Any]:
    with httpx2.Client(base_url=emulated.url, timeout=120) as made:
        yield made


def events_of(lines: Any) -> Iterator[tuple[int, str]]:
    """Number and data of the events in lines of a stream."""
    number = -1
    for line in lines:
        if line.startswith("id: "):
            number = int(line[4:])
        elif line.startswith("data: "):
            yield number, line[6:]


Events = list[tuple[int, str]]
"""Number and data of each event."""


def begun(client: Any, path: str, body: Any, events: int, headers: Any = RESUMABLE) -> tuple[str, Events]:
    """Begin a stream, read some events, and leave. Returns its id and the events."""
    found = []
    with client.stream("POST", path, json=body, headers=headers) as answer:
        assert answer.status_code == 200, answer.read()
        for one in events_of(answer.iter_lines()):
            found.append(one)
            if len(found) == events:
                break
        return answer.headers["X-Stream-Id"], found


def rest(client: Any, name: str, after: int) -> Events:
    headers = {} if after < 0 else {"Last-Event-ID": str(after)}
    with client.stream("GET", f"/v1/streams/{name}", headers=headers) as answer:
        assert answer.status_code == 200, answer.read()
        return list(events_of(answer.iter_lines()))


def texts_of(events: Events) -> dict[int, str]:
    """The text of each choice."""
    found: dict[int, str] = {}
    for _, data in events:
        for choice in [] if data == "[DONE]" else json.loads(data)["choices"]:
            text = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
            found[choice["index"]] = found.get(choice["index"], "") + text
    return found


def whole(client: Any, path: str = "/v1/completions", body: Any = LONG) -> dict[int, str]:
    """The texts of a stream that nothing disturbs."""
    with client.stream("POST", path, json=body) as answer:
        return texts_of([(0, line[6:]) for line in answer.iter_lines() if line.startswith("data: ")])


def test_a_stream_is_taken_up_after_a_lost_connection(client: Any, emulated: LiveServer) -> None:
    name, first = begun(client, "/v1/completions", LONG, 5)
    last = first[-1][0]
    second = rest(client, name, last)
    assert [number for number, _ in first + second] == list(range(len(first) + len(second)))
    assert second[-1][1] == "[DONE]"
    assert texts_of(first + second) == whole(client)
    assert rest(client, name, last) == second  # as often as wanted, after its end, too
    until(lambda: running(emulated) == 0)


def test_a_repeated_key_gives_the_same_answer_and_runs_once(client: Any, emulated: LiveServer) -> None:
    body, key = {"prompt": "hello", "max_tokens": 20, "ignore_eos": True}, {"Idempotency-Key": "once"}
    before = metric(emulated, "lockstep_generation_tokens_total")
    answers = [client.post("/v1/completions", json=body, headers=key) for _ in range(3)]
    assert len({answer.content for answer in answers}) == 1
    assert answers[0].json()["choices"][0]["text"]
    until(lambda: metric(emulated, "lockstep_generation_tokens_total") - before == 20)
    other = client.post("/v1/completions", json={**body, "max_tokens": 21}, headers=key)
    assert (other.status_code, other.json()["error"]["param"]) == (422, "Idempotency-Key")


def test_a_large_request_is_kept(client: Any) -> None:
    body, key = {**LARGE, "max_tokens": 20, "ignore_eos": True, "seed": 1}, {"Idempotency-Key": "large"}
    answers = [client.post("/v1/completions", json=body, headers=key) for _ in range(2)]
    assert answers[0].status_code == 200, answers[0].text
    assert answers[0].content == answers[1].content
    assert [one.headers["X-Ignored-Fields"] for one in answers] == ["x", "x"]
    other = client.post("/v1/completions", json={**body, "prompt": [7, 8, 9] * 21}, headers=key)
    assert (other.status_code, other.json()["error"]["param"]) == (422, "Idempotency-Key")


def test_a_key_that_is_used_twice_at_once_runs_once(client: Any, emulated: LiveServer) -> None:
    body, found = {**LONG, "stream": False, "max_tokens": 600}, []
    threads = [
        threading.Thread(
            target=lambda: found.append(
                httpx2.post(
                    f"{emulated.url}/v1/completions", json=body, headers={"Idempotency-Key": "two"}, timeout=120
                )
            )
        )
        for _ in range(3)
    ]
    before = metric(emulated, "lockstep_generation_tokens_total")
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({answer.content for answer in found}) == 1
    assert found[0].status_code == 200
    until(lambda: metric(emulated, "lockstep_generation_tokens_total") - before == 600)


def test_an_error_is_not_kept(client: Any) -> None:
    key = {"Idempotency-Key": "wrong"}
    wrong = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 10**7}, headers=key)
    assert wrong.status_code == 400
    assert client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers=key).status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 300}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 300}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 300, "store": False}),
        ("/generate", {"text": "hi", "sampling_params": {"max_new_tokens": 300, "ignore_eos": True}}),
    ],
)
def test_streams_of_every_endpoint(client: Any, path: str, body: dict[str, Any]) -> None:
    name, first = begun(client, path, {**body, "stream": True}, 4)
    again = rest(client, name, -1)
    assert again[:4] == first
    assert rest(client, name, first[-1][0]) == again[4:]
    assert [number for number, _ in again] == list(range(len(again)))


def test_a_deleted_stream_is_cancelled(client: Any, emulated: LiveServer) -> None:
    name, _ = begun(client, "/v1/completions", {**LONG, "max_tokens": 30_000}, 2)
    assert client.delete(f"/v1/streams/{name}").json() == {"id": name, "deleted": True}
    until(lambda: running(emulated) == 0)
    assert client.get(f"/v1/streams/{name}").status_code == 404
    assert client.get("/v1/streams/../../x").status_code == 404
    assert client.get("/v1/streams/ans_zz").status_code == 404


def test_a_response_in_the_background_streams_and_is_taken_up(client: Any) -> None:
    body = {"input": "hi", "background": True, "stream": True, "max_output_tokens": 300, "ignore_eos": True}
    with client.stream("POST", "/v1/responses", json=body) as answer:
        first = []
        for one in events_of(answer.iter_lines()):
            first.append(json.loads(one[1]))
            if len(first) == 6:
                break
    assert [event["sequence_number"] for event in first] == list(range(6))
    name = first[0]["response"]["id"]
    url = f"/v1/responses/{name}?stream=true&starting_after=5"
    with client.stream("GET", url) as answer:
        second = [json.loads(data) for _, data in events_of(answer.iter_lines())]
    assert [event["sequence_number"] for event in second] == list(range(6, 6 + len(second)))
    ended = second[-1]["response"]
    assert ended["status"] == "incomplete"
    deltas = [event["delta"] for event in first + second if event["type"] == "response.output_text.delta"]
    assert "".join(deltas) == ended["output"][0]["content"][0]["text"]
    assert client.get(f"/v1/responses/{name}").json() == ended


LIMITS = """
stored_responses = 10
kept_answers = 3
[limits]
kept_unread_s = 2.0
kept_bytes_max = 300000
"""
KEYS = """
[[keys]]
key = "key of tenant a, long enough"
tenant = "a"
[[keys]]
key = "key of tenant b, long enough"
tenant = "b"
"""


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("limited")
    (folder / "serve.toml").write_text(LIMITS)
    (folder / "keys.toml").write_text(KEYS)
    files = ("--config", str(folder / "serve.toml"), "--api-keys", str(folder / "keys.toml"))
    with serving(folder / "log", *EMULATED, *files) as server:
        yield server


@pytest.fixture
def of(limited: LiveServer) -> Iterator[Any]:
    """Returns the client of a tenant."""
    with ExitStack() as stack:

        def client_of(tenant: str) -> Any:
            headers = {"Authorization": f"Bearer key of tenant {tenant}, long enough"}
            return stack.enter_context(httpx2.Client(base_url=limited.url, timeout=120, headers=headers))

        yield client_of


def test_answers_are_private_to_the_key_and_bounded(of: Any) -> None:
    a, b = of("a"), of("b")
    body, key = {"prompt": "a", "max_tokens": 2}, {"Idempotency-Key": "same"}
    first = a.post("/v1/completions", json=body, headers=key)
    name = first.headers["X-Stream-Id"]
    assert a.get(f"/v1/streams/{name}").content == first.content
    assert b.get(f"/v1/streams/{name}").status_code == 404
    assert b.delete(f"/v1/streams/{name}").status_code == 404
    assert b.post("/v1/completions", json=body, headers=key).content != first.content
    for number in range(4):  # three are kept, and the first one is removed
        assert a.post("/v1/completions", json=body, headers={"Idempotency-Key": str(number)}).status_code == 200
    assert a.get(f"/v1/streams/{name}").status_code == 404
    opened = [
        a.stream("POST", "/v1/completions", json={**LONG, "max_tokens": 20_000}, headers=RESUMABLE) for _ in range(4)
    ]
    statuses = [one.__enter__().status_code for one in opened]
    assert statuses == [200, 200, 200, 503]
    for one in opened:
        one.__exit__(None, None, None)


def test_an_answer_that_nothing_reads_is_cancelled(limited: LiveServer, of: Any) -> None:
    b = of("b")
    name, _ = begun(b, "/v1/completions", {**LONG, "max_tokens": 30_000, "prompt": "unread"}, 2)
    folder = list(limited.folder().rglob(f"{name}.*"))
    assert len(folder) == 1
    until(lambda: not folder[0].exists())


@pytest.mark.parametrize("how", ["worker", "server", "restart"])
def test_streams_continue_after_the_end_of_their_worker_or_server(tmp_path: Path, how: str) -> None:
    """Streams, drawn and greedy, with several choices, or with a large body, are cut off and taken up."""
    arguments = (*EMULATED, "--journal", str(tmp_path / "run"), "--shutdown-s", "0")
    bodies = [
        ("/v1/completions", {**LONG, "seed": number, "temperature": number % 2, "n": 1 + number // 3}, 3 + number)
        for number in range(4)
    ]
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1500, "ignore_eos": True, "stream": True}
    bodies += [("/v1/chat/completions", {**chat, "seed": number}, 3 + number) for number in range(4)]
    bodies.append(("/v1/completions", {**LONG, **LARGE}, 4))
    server = LiveServer(*arguments, log=tmp_path / "log")
    try:
        with httpx2.Client(base_url=server.url, timeout=120) as client:
            first = [begun(client, path, body, events) for path, body, events in bodies]
        if how == "worker":
            os.kill(server.children()["worker 0"], signal.SIGKILL)
        else:
            if how == "server":
                for pid in [*server.children().values(), server.process.pid]:
                    os.kill(pid, signal.SIGKILL)
            server.end()
            server = LiveServer(*arguments, log=tmp_path / "log2")
        with httpx2.Client(base_url=server.url, timeout=120) as client:
            until(lambda: server.status_of("/ready") == 200)
            continued = [rest(client, name, before[-1][0]) for name, before in first]
            with ThreadPoolExecutor(len(bodies)) as pool:
                undisturbed = list(pool.map(lambda one: whole(client, *one[:2]), bodies))
            for (_, before), after, alone in zip(first, continued, undisturbed, strict=True):
                numbers = [number for number, _ in before + after]
                assert numbers == list(range(len(numbers))), server.text()
                assert after[-1][1] == "[DONE]"
                assert texts_of(before + after) == alone
                ids = {json.loads(data)["id"] for _, data in before + after if data != "[DONE]"}
                assert len(ids) == 1
        assert "answers in progress are continued" in server.text()
        if how != "worker":
            assert "0 of them were not submitted again" in server.text()
    finally:
        server.end()


def test_a_kept_stream_outlives_an_engine_that_is_given_up(tmp_path: Path) -> None:
    """The server ends with its engine; the next server on the same journal continues the answers."""
    arguments = (*EMULATED, "--journal", str(tmp_path / "run"), "--shutdown-s", "1")
    server = LiveServer(*arguments, "--restarts", "0", log=tmp_path / "log")
    try:
        with httpx2.Client(base_url=server.url, timeout=120) as client:
            name, before = begun(client, "/v1/completions", LONG, 3)
        os.kill(server.children()["engine"], signal.SIGKILL)
        assert server.process.wait(60) == 1
    finally:
        server.end()
    with serving(tmp_path / "log2", *arguments) as server, httpx2.Client(base_url=server.url, timeout=120) as client:
        after = rest(client, name, before[-1][0])
        assert [number for number, _ in before + after] == list(range(len(before) + len(after)))
        assert texts_of(before + after) == whole(client)


def test_an_engine_killed_while_it_waits_for_the_workers_of_a_new_server_is_restarted(tmp_path: Path) -> None:
    """The worker is stopped until the engine was killed, so the engine still waits for the worker's requests."""
    arguments = (*EMULATED, "--journal", str(tmp_path / "run"), "--shutdown-s", "0")
    server = LiveServer(*arguments, log=tmp_path / "log")
    with httpx2.Client(base_url=server.url, timeout=120) as client:
        name, before = begun(client, "/v1/completions", {**LONG, "max_tokens": 20_000}, 3)
    for pid in [*server.children().values(), server.process.pid]:
        os.kill(pid, signal.SIGKILL)
    server.end()

    def disturb() -> None:
        until(lambda: "worker 0" in children_of_journal(tmp_path / "run"), 60)
        worker = children_of_journal(tmp_path / "run")["worker 0"]
        os.kill(worker, signal.SIGSTOP)
        try:
            until(lambda: "waiting up to" in (tmp_path / "log2").read_text(), 60)  # it counts as started
            os.kill(children_of_journal(tmp_path / "run")["engine"], signal.SIGKILL)
        finally:
            os.kill(worker, signal.SIGCONT)

    disturbing = threading.Thread(target=disturb)
    disturbing.start()
    with serving(tmp_path / "log2", *arguments) as server, httpx2.Client(base_url=server.url, timeout=120) as client:
        disturbing.join()
        after = rest(client, name, before[-1][0])
        assert [number for number, _ in before + after] == list(range(len(before) + len(after)))
        assert after[-1][1] == "[DONE]"
        assert "the engine ended with signal SIGKILL" in server.text()


def test_requests_of_an_earlier_server_are_continued_by_every_generation(tmp_path: Path) -> None:
    """All open requests come from the server before, and the engine is killed twice."""
    arguments = (*EMULATED, "--speed", "0.2", "--journal", str(tmp_path / "run"), "--shutdown-s", "0")
    server = LiveServer(*arguments, log=tmp_path / "log")
    with httpx2.Client(base_url=server.url, timeout=120) as client:
        name, before = begun(client, "/v1/completions", {**LONG, "max_tokens": 3000}, 3)
    for pid in [*server.children().values(), server.process.pid]:
        os.kill(pid, signal.SIGKILL)
    server.end()
    with serving(tmp_path / "log2", *arguments) as server, httpx2.Client(base_url=server.url, timeout=120) as client:
        for generation in (1, 2):
            until(lambda: running(server) == 1)
            os.kill(server.children()["engine"], signal.SIGKILL)
            until(lambda wanted=f"engine {generation}: recovered": wanted in server.text())
        after = rest(client, name, before[-1][0])
        assert [number for number, _ in before + after] == list(range(len(before) + len(after)))
        assert after[-1][1] == "[DONE]"
        recovered = [line for line in server.text().splitlines() if "recovered 1 requests" in line]
        assert len(recovered) == 3
        assert all("0 of them were not submitted again" in line for line in recovered), recovered


def test_an_answer_is_never_seen_without_its_lock_and_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that starts looks for answers without a writer at every step of another one that begins an answer."""
    limits = {"most": 10, "bytes_max": 2**20, "kept_s": 60.0}
    beginning, starting = KeptAnswers(tmp_path, **limits), KeptAnswers(tmp_path, **limits)
    flock, looks = fcntl.flock, []

    def look(*_: Any) -> None:
        with monkeypatch.context() as undone:
            undone.setattr(fcntl, "flock", flock)
            looks.append([one.name for one in starting.abandoned()])

    def locked(descriptor: int, how: int) -> None:
        look()
        flock(descriptor, how)
        look()

    monkeypatch.setattr(fcntl, "flock", locked)
    request = KeptRequest("/x", "", b"", b"", (), b"", time.time())
    answer = beginning.begin("ans_0123456789", request)
    monkeypatch.setattr(fcntl, "flock", flock)
    assert looks == [[], []]
    assert answer is not None
    assert answer.path.exists()
    assert answer.records() == [request]
    assert beginning.begin("ans_0123456789", request) is None
    assert [one.name for one in answer.path.parent.iterdir()] == ["ans_0123456789.open"]


def test_stored_responses_survive_a_restart(tmp_path: Path) -> None:
    arguments = (*EMULATED, "--journal", str(tmp_path / "run"), "--shutdown-s", "0")
    with serving(tmp_path / "log", *arguments) as server:
        said = httpx2.post(
            f"{server.url}/v1/responses", json={"input": "hi", "max_output_tokens": 3}, timeout=60
        ).json()
    with serving(tmp_path / "log2", *arguments) as server:
        assert httpx2.get(f"{server.url}/v1/responses/{said['id']}", timeout=60).json() == said


def test_web_pages_of_allowed_origins_may_call_the_server(tmp_path: Path) -> None:
    with serving(tmp_path / "log", *EMULATED, "--cors-origin", "https://chat.example") as server:
        wanted = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
        page = {"Origin": "https://chat.example"}
        before = httpx2.options(f"{server.url}/v1/completions", headers={**page, **wanted}, timeout=60)
        assert before.status_code == 200
        assert before.headers["Access-Control-Allow-Origin"] == "https://chat.example"
        body = {"prompt": "a", "max_tokens": 1, "verbosity": "low"}
        answer = httpx2.post(f"{server.url}/v1/completions", json=body, headers=page, timeout=60)
        assert answer.status_code == 200
        assert answer.headers["Access-Control-Allow-Origin"] == "https://chat.example"
        assert "X-Stream-Id" in answer.headers["Access-Control-Expose-Headers"]
        other = {"Origin": "https://evil.example"}
        assert (
            httpx2.options(f"{server.url}/v1/completions", headers={**other, **wanted}, timeout=60).status_code == 400
        )
        assert httpx2.post(f"{server.url}/v1/completions", json=body, headers=other, timeout=60).status_code == 403
        for size, status in ((60_000, 200), (70_000, 400)):  # a preflight has a head like any other request
            asked = {**page, **wanted, "X-Long": "a" * size}
            assert httpx2.options(f"{server.url}/v1/completions", headers=asked, timeout=60).status_code == status


def test_kept_answers_and_a_draining_server(tmp_path: Path) -> None:
    """A kept answer that is read is completed before the server stops; the next server continues one without any."""
    arguments = (*EMULATED, "--journal", str(tmp_path / "run"), "--shutdown-s", "30")
    with serving(tmp_path / "log", *arguments) as server, httpx2.Client(base_url=server.url, timeout=120) as client:
        unread, before = begun(client, "/v1/completions", {**LONG, "max_tokens": 6000}, 3)
        with client.stream("POST", "/v1/completions", json=LONG, headers=RESUMABLE) as answer:
            events = events_of(answer.iter_lines())
            first = next(events)
            server.process.terminate()
            read = [first, *events]
        assert read[-1][1] == "[DONE]"
        server.process.wait(20)  # it does not wait for the other answer
    with serving(tmp_path / "log2", *arguments) as server, httpx2.Client(base_url=server.url, timeout=120) as client:
        after = rest(client, unread, before[-1][0])
        assert [number for number, _ in before + after] == list(range(len(before) + len(after)))
        assert after[-1][1] == "[DONE]"


def test_without_the_flag_no_page_is_allowed(client: Any) -> None:
    page = {"Origin": "https://chat.example"}
    answer = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers=page)
    assert answer.status_code == 403
    assert "Access-Control-Allow-Origin" not in answer.headers
