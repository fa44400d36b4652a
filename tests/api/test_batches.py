"""/v1/files and /v1/batches, driven by OpenAI's client."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server is not installed")
openai = pytest.importorskip("openai", reason="OpenAI's client is not installed")
httpx2 = pytest.importorskip("httpx2", reason="a client is not installed")

from tests.support.live_server import EMULATED, LiveServer, serving, until  # noqa: E402

CONFIG = """
stored_files = 5
[limits]
file_bytes_max = 20000
files_bytes_max = 60000
batches_max = 2
batch_requests_max = 50
"""
KEYS = "".join(f"[[keys]]\nkey = 'key of tenant {name}, long enough'\ntenant = '{name}'\n" for name in "abcdef")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("batches")
    (folder / "serve.toml").write_text(CONFIG)
    (folder / "keys.toml").write_text(KEYS)
    files = ("--config", str(folder / "serve.toml"), "--api-keys", str(folder / "keys.toml"))
    with serving(folder / "log", *EMULATED, *files) as started:
        yield started


def client_of(server: LiveServer, tenant: str = "a") -> Any:
    key = f"key of tenant {tenant}, long enough"
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=60)


def lines_of(count: int, url: str = "/v1/chat/completions", **fields: Any) -> bytes:
    """The file of a batch, with requests whose answers have 3 tokens."""
    found = []
    for number in range(count):
        body = {"messages": [{"role": "user", "content": f"question {number}"}], "max_tokens": 3, "temperature": 0}
        if url == "/v1/completions":
            body = {"prompt": f"question {number}", "max_tokens": 3, "temperature": 0}
        body |= {"ignore_eos": True, **fields}
        found.append(json.dumps({"custom_id": f"r{number}", "method": "POST", "url": url, "body": body}))
    return "\n".join(found).encode() + b"\n"


def begun(client: Any, content: bytes, endpoint: str = "/v1/chat/completions") -> Any:
    source = client.files.create(file=("requests.jsonl", content), purpose="batch")
    return client.batches.create(input_file_id=source.id, endpoint=endpoint, completion_window="24h")


def ended(client: Any, name: str) -> Any:
    until(lambda: client.batches.retrieve(name).status in ("completed", "failed", "expired", "cancelled"), 60)
    return client.batches.retrieve(name)


def results(client: Any, name: str) -> dict[str, Any]:
    """The lines of a file of results, by custom id."""
    lines = [json.loads(line) for line in client.files.content(name).text.splitlines()]
    found = {line["custom_id"]: line for line in lines}
    assert len(found) == len(lines)
    return found


def test_files_are_stored_listed_read_and_deleted(server: LiveServer) -> None:
    client, other = client_of(server, "b"), client_of(server, "c")
    content = bytes(range(256)) * 10
    first = client.files.create(file=("a name.jsonl", content), purpose="batch")
    assert (first.object, first.bytes, first.filename, first.purpose) == ("file", 2560, "a name.jsonl", "batch")
    second = client.files.create(
        file=("b", b"x"), purpose="user_data", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert second.expires_at - second.created_at == 3600
    assert client.files.retrieve(first.id) == first
    assert client.files.content(first.id).read() == content
    assert {one.id for one in client.files.list()} == {first.id, second.id}
    assert [one.id for one in client.files.list(purpose="batch")] == [first.id]
    assert [one.id for one in client.files.list(limit=1, order="asc")] in (
        [first.id, second.id],
        [second.id, first.id],
    )
    for ask in (other.files.retrieve, other.files.content, other.files.delete):
        with pytest.raises(openai.NotFoundError):
            ask(first.id)
    assert list(other.files.list()) == []
    assert client.files.delete(first.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.content(first.id)


def test_files_are_bounded(server: LiveServer) -> None:
    client = client_of(server, "d")
    with pytest.raises(openai.APIStatusError) as large:
        client.files.create(file=("a", b"x" * 90_000), purpose="batch")
    assert (large.value.status_code, "file_bytes_max" in large.value.message) == (413, True)
    for number in range(3):
        client.files.create(file=(f"{number}", b"x" * 19_000), purpose="batch")
    with pytest.raises(openai.BadRequestError, match="files_bytes_max"):
        client.files.create(file=("more", b"x" * 19_000), purpose="batch")
    assert len(list(client.files.list())) == 3
    for number in range(2):
        client.files.create(file=(f"{number}", b"x"), purpose="batch")
    with pytest.raises(openai.BadRequestError, match="may store no more"):
        client.files.create(file=("more", b"x"), purpose="batch")


@pytest.mark.parametrize(
    ("sent", "status", "said"),
    [
        ({"files": {"file": b"x"}, "data": {"purpose": "fine-tune"}}, 400, "purpose"),
        ({"files": {"file": b"x"}}, 400, "purpose"),
        ({"files": {"other": b"x"}, "data": {"purpose": "batch"}}, 400, "file"),
        ({"json": {"file": "x", "purpose": "batch"}}, 415, "multipart"),
        ({"content": b"no form", "headers": {"Content-Type": "multipart/form-data; boundary=b"}}, 400, ""),
        ({"content": b"no form", "headers": {"Content-Type": "multipart/form-data"}}, 400, ""),
        ({"content": b"--b\r\n\r\n" * 9, "headers": {"Content-Type": "multipart/form-data; boundary=b"}}, 400, ""),
        ({"files": {"file": b"x"}, "data": {str(number): "x" for number in range(30)}}, 400, ""),
        (
            {"files": {"file": b"x"}, "data": {"purpose": "batch", "expires_after[seconds]": "9"}},
            400,
            "expires_after",
        ),
    ],
)
def test_a_form_that_is_not_valid_is_refused(server: LiveServer, sent: Any, status: int, said: str) -> None:
    headers = {"Authorization": "Bearer key of tenant b, long enough", **sent.pop("headers", {})}
    answer = httpx2.post(f"{server.url}/v1/files", headers=headers, timeout=60, **sent)
    assert answer.status_code == status, answer.text
    assert said in answer.json()["error"]["message"]


def test_a_batch_answers_every_request(server: LiveServer) -> None:
    client = client_of(server)
    batch = begun(client, lines_of(40))
    assert (batch.object, batch.status, batch.endpoint) == ("batch", "validating", "/v1/chat/completions")
    batch = ended(client, batch.id)
    assert batch.status == "completed"
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed, batch.error_file_id) == (40, 40, 0, None)
    found = results(client, batch.output_file_id)
    assert set(found) == {f"r{number}" for number in range(40)}
    question = [{"role": "user", "content": "question 7"}]
    alone = client.chat.completions.create(
        model="qwen3-0.6b", messages=question, max_tokens=3, temperature=0, extra_body={"ignore_eos": True}
    )
    answer = found["r7"]["response"]
    assert answer["status_code"] == 200
    assert answer["body"]["choices"][0]["message"]["content"] == alone.choices[0].message.content
    assert client.files.retrieve(batch.output_file_id).purpose == "batch_output"
    assert batch.id in {one.id for one in client.batches.list()}
    with pytest.raises(openai.NotFoundError):
        client_of(server, "c").batches.retrieve(batch.id)
    for one in (batch.input_file_id, batch.output_file_id):
        client.files.delete(one)


def test_requests_that_fail_are_in_the_file_of_errors(server: LiveServer) -> None:
    client = client_of(server, "e")
    content = lines_of(2, "/v1/completions")
    for name, fields in (("long", {"max_tokens": 10**7}), ("stream", {"stream": True}), ("model", {"model": "x"})):
        body = {"prompt": "a", **fields}
        content += json.dumps({"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body}).encode()
        content += b"\n"
    batch = ended(client, begun(client, content, "/v1/completions").id)
    counts = batch.request_counts
    assert (batch.status, counts.completed, counts.failed) == ("completed", 2, 3)
    assert set(results(client, batch.output_file_id)) == {"r0", "r1"}
    found = results(client, batch.error_file_id)
    assert {name: line["response"]["status_code"] for name, line in found.items()} == {
        "long": 400,
        "stream": 400,
        "model": 404,
    }
    assert found["stream"]["response"]["body"]["error"]["param"] == "stream"


@pytest.mark.parametrize(
    ("content", "code", "line"),
    [
        (lines_of(2) + b"no json\n", "invalid_json_line", 3),
        (lines_of(1) + lines_of(1), "duplicate_custom_id", 2),
        (lines_of(2, "/v1/completions"), "mismatched_url", 1),
        (lines_of(1).replace(b'"POST"', b'"GET"'), "invalid_json_line", 1),
        (b"\n\n", "invalid_input", None),
        (lines_of(51), "invalid_input", None),
    ],
)
def test_a_file_that_is_not_valid_fails_the_batch(
    server: LiveServer, content: bytes, code: str, line: int | None
) -> None:
    client = client_of(server, "f")
    batch = ended(client, begun(client, content).id)
    assert batch.status == "failed"
    assert (batch.errors.data[0].code, batch.errors.data[0].line) == (code, line)
    client.files.delete(batch.input_file_id)


def test_a_batch_is_cancelled_with_its_results_so_far(server: LiveServer) -> None:
    client = client_of(server, "c")
    batch = begun(
        client,
        lines_of(3, max_tokens=2) + lines_of(9, max_tokens=30_000).replace(b'"custom_id": "r', b'"custom_id": "long'),
    )
    until(lambda: client.batches.retrieve(batch.id).request_counts.completed == 3)
    assert client.batches.retrieve(batch.id).request_counts.failed == 0
    with pytest.raises(openai.BadRequestError, match="cancel that"):
        client.files.delete(batch.input_file_id)
    assert client.batches.cancel(batch.id).status == "cancelling"
    batch = ended(client, batch.id)
    assert (batch.status, batch.request_counts.completed) == ("cancelled", 3)
    assert set(results(client, batch.output_file_id)) == {"r0", "r1", "r2"}
    with pytest.raises(openai.BadRequestError, match="no longer"):
        client.batches.cancel(batch.id)
    open_batches = [begun(client, lines_of(1, max_tokens=30_000)) for _ in range(1)]
    for one in open_batches:
        client.batches.cancel(one.id)
        ended(client, one.id)


@pytest.mark.parametrize("killed", ["worker", "engine", "server"])
def test_a_batch_survives(tmp_path: Path, killed: str) -> None:
    """Every request has one result, and those that had one before the kill keep it."""
    arguments = (*EMULATED, "--speed", "0.3", "--journal", str(tmp_path / "run"), "--shutdown-s", "0")
    server = LiveServer(*arguments, log=tmp_path / "log")
    try:
        client = client_of(server)
        batch = begun(client, lines_of(200, max_tokens=60))
        until(lambda: client.batches.retrieve(batch.id).request_counts.completed >= 20)
        if killed == "server":
            for pid in [*server.children().values(), server.process.pid]:
                os.kill(pid, signal.SIGKILL)
            server.end()
            server = LiveServer(*arguments, log=tmp_path / "log2")
            client = client_of(server)
        else:
            os.kill(server.children()["worker 0" if killed == "worker" else "engine"], signal.SIGKILL)
            time.sleep(0.5)
            client = client_of(server).with_options(max_retries=10)
        last = ended(client, batch.id)
        assert (last.status, last.request_counts.completed, last.request_counts.total) == ("completed", 200, 200)
        assert set(results(client, last.output_file_id)) == {f"r{number}" for number in range(200)}
        if killed != "engine":
            assert "is continued" in server.text()
    finally:
        server.end()
