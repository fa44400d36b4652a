"""Errors of requests: named field, right status, and no effect on other requests."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server is not installed")
httpx2 = pytest.importorskip("httpx2", reason="a client is not installed")

from tests.campaigns import hostile  # noqa: E402
from tests.support.live_server import LiveServer  # noqa: E402

JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def client(emulated: LiveServer) -> Iterator[Any]:
    with httpx2.Client(base_url=emulated.url, timeout=120) as made:
        yield made


def complete(client: Any, **fields: Any) -> Any:
    return client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1, **fields})


def error_of(answer: Any) -> dict[str, Any]:
    (error,) = answer.json().values()
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == answer.status_code
    return error  # type: ignore[no-any-return]


LIMITS = [
    # field, value at its limit, value beyond it
    ("max_tokens", 40_959, 40_960),
    ("n", 128, 129),
    ("stop", ["x"] * 16, ["x"] * 17),
    ("stop", "x" * 512, "x" * 513),
    ("stop_token_ids", list(range(1000, 1064)), list(range(1000, 1065))),
    ("stop_token_ids", [151_935], [151_936]),
    ("logit_bias", {str(i): 1 for i in range(1024)}, {str(i): 1 for i in range(1025)}),
    ("logit_bias", {"151935": 1}, {"151936": 1}),
    ("logit_bias", {"1": 100}, {"1": 100.5}),
    ("temperature", 2, 2.01),
    ("temperature", 0, -0.01),
    ("top_p", 1, 1.01),
    ("top_k", -1, -2),
    ("min_p", 1, 1.5),
    ("presence_penalty", -2, -2.5),
    ("repetition_penalty", 10, 11),
    ("seed", 2**63 - 1, 2**63),
    ("seed", -(2**63), -(2**63) - 1),
    ("user", "u" * 256, "u" * 257),
    ("prompt", [[1]] * 256, [[1]] * 257),
    ("prompt", [[151_935]], [[151_936]]),
    ("prompt", [1] * 40_958, [1] * 40_960),
]


@pytest.mark.parametrize(("name", "most", "beyond"), LIMITS, ids=lambda value: str(value)[:24])
def test_limits(client: Any, name: str, most: Any, beyond: Any) -> None:
    answer = complete(client, **{name: most})
    assert answer.status_code == 200, answer.text
    refused = complete(client, **{name: beyond})
    assert refused.status_code == 400
    error = error_of(refused)
    assert error["type"] == "BadRequestError"
    assert error["param"].partition(".")[0] in (name, "prompt")
    assert len(refused.content) < 1000


def test_prompts_times_samples_are_limited_before_any_is_made(client: Any) -> None:
    assert complete(client, prompt=[[1]] * 4, n=128).status_code == 200
    refused = complete(client, prompt=[[1]] * 5, n=128)
    assert (refused.status_code, error_of(refused)["param"]) == (400, "n")


BAD = [
    b"",
    b"null",
    b"[]",
    b"{",
    b'{"prompt": "a"',
    b'{"prompt": NaN}',
    b'{"prompt": "a", "temperature": NaN}',
    b'{"prompt": "a", "temperature": 1e999}',
    b'{"prompt": "a", "max_tokens": -1}',
    b'{"prompt": "a", "max_tokens": 1.5}',
    b'{"prompt": "a", "max_tokens": "16"}',
    b'{"prompt": "a", "max_tokens": true}',
    b'{"prompt": "a", "n": 0}',
    b'{"prompt": "a", "stream": "yes"}',
    b'{"prompt": "a", "logit_bias": {"1": null}}',
    b'{"prompt": "a", "logit_bias": {"-1": 1}}',
    b'{"prompt": "a", "stop": [1]}',
    b'{"prompt": "a", "stop_token_ids": [-1]}',
    b'{"prompt": "a", "min_tokens": 17}',
    b'{"prompt": "a", "max_tokens": 0}',
    b'{"prompt": "a", "max_tokens": 0, "echo": true, "n": 2}',
    b'{"prompt": "a", "best_of": 2}',
    b'{"prompt": "a", "suffix": "b"}',
    b'{"prompt": "a", "skip_special_tokens": "no"}',
    b'{"prompt": "a", "truncate_prompt_tokens": -2}',
    b'{"prompt": "a", "logprobs": 1}',
    b'{"prompt": "a", "guided_json": {"type": "object"}}',
    b'{"prompt": "a", "seed": 99999999999999999999999999}',
    b'{"prompt": []}',
    b'{"prompt": ""}',
    b'{"prompt": [""]}',
    b'{"prompt": [[]]}',
    b'{"prompt": [1, "a"]}',
    b'{"prompt": [-1]}',
    b'{"prompt": [4294967296]}',
    b'{"prompt": {"a": 1}}',
    b'{"prompt": "\xff\xfe"}',
    b'{"prompt": "a", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
]


@pytest.mark.parametrize("body", BAD, ids=lambda body: body[:50].decode("latin-1"))
def test_a_bad_body_is_refused_in_a_sentence(client: Any, body: bytes) -> None:
    answer = client.post("/v1/completions", content=body, headers=JSON)
    assert answer.status_code == 400, answer.text
    assert error_of(answer)["message"]
    assert len(answer.content) < 1000


def test_statuses_of_http(client: Any) -> None:
    assert client.get("/v1/nothing").status_code == 404
    assert "there is no route /v1/nothing" in error_of(client.get("/v1/nothing"))["message"]
    assert len(client.get("/v1/" + 1000 * "n").content) < 400
    assert (wrong := client.get("/v1/completions")).status_code == 405
    assert (wrong.headers["Allow"], "takes POST" in error_of(wrong)["message"]) == ("POST", True)
    assert client.post("/v1/completions", content=b"prompt=a").status_code == 415
    operators = error_of(client.post("/flush_cache"))["message"]
    assert operators == "/flush_cache is for operators, and served on --admin-socket only"
    for nothing in (b"null", b"[]", b'"a"', b"5"):
        said = error_of(client.post("/v1/completions", content=nothing, headers=JSON))
        assert (said["message"], said["code"]) == ("Input should be a JSON object", 400)
    assert [client.head(path).status_code for path in ("/health", "/ready", "/v1/models")] == [200, 200, 405]
    form = {"content-type": "application/x-www-form-urlencoded"}
    assert client.post("/v1/completions", content=b'{"prompt": "a"}', headers=form).status_code == 415
    assert complete(client, model="gpt-5").status_code == 404
    large = b'{"prompt": "' + b"a" * (32 * 2**20) + b'"}'
    refused = client.post("/v1/completions", content=large, headers=JSON)
    assert refused.status_code == 413
    assert error_of(refused)["type"] == "RequestTooLargeError"


def test_a_body_without_a_length_is_limited_too(client: Any) -> None:
    def parts() -> Iterator[bytes]:
        for _ in range(40):
            yield b" " * 2**20

    closed = (httpx2.WriteError, httpx2.ReadError, httpx2.RemoteProtocolError)
    with contextlib.suppress(*closed):  # the server may close during the send
        assert client.post("/v1/completions", content=parts(), headers=JSON).status_code == 413


def test_a_head_without_an_end_is_cut_off(emulated: LiveServer) -> None:
    host, port = emulated.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=120) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\n")
        sent = 0
        try:
            while sent < 2**22:
                connection.sendall(b"X-Padding: " + b"a" * 4096 + b"\r\n")
                sent += 4096
            answer = connection.recv(4096)
        except OSError:
            answer = b"HTTP/1.1 400"
    assert answer.startswith(b"HTTP/1.1 400")
    assert sent < 2**22


def test_a_request_id_is_given_back_if_it_is_one(client: Any) -> None:
    assert client.get("/v1/models", headers={"X-Request-Id": "mine-17"}).headers["X-Request-Id"] == "mine-17"
    other = client.get("/v1/models", headers={"X-Request-Id": "x" * 129}).headers["X-Request-Id"]
    assert len(other) == 32


def test_invalid_requests_do_not_affect_a_concurrent_stream(client: Any, emulated: LiveServer) -> None:
    """While one request streams, invalid requests of every kind arrive; its answer stays the same."""
    asked = {"prompt": "bystander", "max_tokens": 6000, "temperature": 0, "ignore_eos": True}
    expected = client.post("/v1/completions", json=asked).json()["choices"][0]["text"]
    heard: list[str] = []

    def listen() -> None:
        body = {**asked, "stream": True}
        with httpx2.stream("POST", f"{emulated.url}/v1/completions", json=body, timeout=120) as stream:
            for line in stream.iter_lines():
                if line.startswith("data: {"):
                    heard.append(json.loads(line[6:])["choices"][0]["text"])

    bystander = threading.Thread(target=listen)
    bystander.start()
    poison: list[dict[str, Any]] = [
        {"logit_bias": {"99999999": 100}},
        {"stop_token_ids": list(range(128))},
        {"min_tokens": 10**9},
        {"prompt": [2**31 - 1]},
        {"n": 10**9},
        {"logprobs": 10**6},
        {"prompt": "\ud800"},
        {"stop": ["\ud800"], "max_tokens": 50},
        {"prompt": "a\0b", "stop": "\0", "max_tokens": 50},
        {"top_k": 2**31 - 1, "top_p": 1e-300, "temperature": 1e-300, "max_tokens": 50},
        {"repetition_penalty": 1e-300, "max_tokens": 50},
        {"user": "'; drop table", "cache_salt": "\0", "priority": -(2**63), "max_tokens": 50},
    ]
    bodies = [json.dumps({"prompt": "a", "max_tokens": 1, **fields}).encode() for fields in poison] + BAD
    sent = 0  # bytes sent while the server was reading
    for number, body in enumerate(bodies):
        answer = client.post("/v1/completions", content=body, headers=JSON)
        assert answer.status_code in ((200, 400) if number < len(poison) else (400,))
        sent += bystander.is_alive()
    for number in range(120):  # of every endpoint
        path, body = hostile.body(random.Random(number))
        status = client.post(path, content=body, headers=JSON).status_code
        # 413: more than a small body may have; 415: an upload that is no form; 501: not served, refused by name
        assert status in (200, 400, 404, 413, 501, 415 if path == "/v1/files" else 400), (number, path, status)
        sent += bystander.is_alive()
    assert sent > 5
    bystander.join(120)
    assert "".join(heard) == expected
    assert emulated.status_of("/health") == 200
