"""A real model behind the server: what it says over HTTP is what it says in this process."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server is not installed")
pytest.importorskip("torch", reason="the GPU runtime is not installed")
openai = pytest.importorskip("openai", reason="the OpenAI client is not installed")

from lockstep.core.journal import read_journal  # noqa: E402
from lockstep.core.replay import replay  # noqa: E402
from lockstep.runtime import LLM, Params  # noqa: E402
from tests.support.live_server import LiveServer, serving  # noqa: E402

HELLO = [{"role": "user", "content": "What does len do?"}]
KEY = "sk-a-key-of-an-operator"
OTHER_KEY = "sk-a-key-of-somebody-else"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("demo")
    (folder / "keys.toml").write_text(
        f"[[keys]]\ntenant = 'tests'\nkey = '{KEY}'\nadmin = true\n[[keys]]\ntenant = 'others'\nkey = '{OTHER_KEY}'\n"
    )
    with serving(
        folder / "log",
        *("--journal", str(folder / "run"), "--api-keys", str(folder / "keys.toml")),
        *("--admin-socket", str(folder / "admin"), "--metrics-compat", "vllm", "--metrics-compat", "sglang"),
    ) as made:
        yield made


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM() as made:
        yield made


def test_answers_are_those_of_the_model(client: Any, llm: LLM) -> None:
    (expected,) = llm.chat(HELLO, Params(max_new_tokens=24))
    asked = {"model": "demo", "messages": HELLO, "max_completion_tokens": 24, "temperature": 0}
    said = client.chat.completions.create(**asked).choices[0]
    assert said.message.content == expected.text
    chunks = client.chat.completions.create(**asked, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected.text
    drawn = Params(max_new_tokens=16, temperature=0.9, top_p=0.9, seed=11)
    (text,) = (one.text for one in llm.generate(["Return the"], drawn))
    params = {"max_tokens": 16, "temperature": 0.9, "top_p": 0.9, "seed": 11}
    assert client.completions.create(model="demo", prompt="Return the", **params).choices[0].text == text


def test_stop_texts_over_the_borders_of_tokens(client: Any, llm: LLM) -> None:
    text = str(llm.generate(["Return the"], Params(max_new_tokens=24))[0].text)
    asked = {"model": "demo", "prompt": "Return the", "temperature": 0, "max_tokens": 24}
    for start in (3, 14, 25):
        stop = text[start : start + 5]
        expected = text[: text.index(stop)]
        said = client.completions.create(**asked, stop=stop).choices[0]
        assert (said.text, said.finish_reason, said.stop_reason) == (expected, "stop", stop)
        pieces = client.completions.create(**asked, stop=stop, stream=True)
        assert "".join(piece.choices[0].text for piece in pieces) == expected


def test_logprobs_of_a_chat(client: Any, llm: LLM) -> None:
    (expected,) = llm.chat(HELLO, Params(max_new_tokens=6, logprobs=3))
    asked = {"model": "demo", "messages": HELLO, "max_completion_tokens": 6, "temperature": 0}
    said = client.chat.completions.create(**asked, logprobs=True, top_logprobs=3).choices[0]
    content = said.logprobs.content
    assert [one.logprob for one in content] == pytest.approx(expected.logprobs, abs=1e-4)
    assert b"".join(bytes(one.bytes) for one in content).decode() == said.message.content
    for one, tops in zip(content, expected.top_logprobs, strict=True):
        assert [top.logprob for top in one.top_logprobs] == pytest.approx(sorted(tops.values(), reverse=True), abs=1e-4)
        assert one.top_logprobs[0].token == one.token  # greedy
    streamed = client.chat.completions.create(**asked, logprobs=True, top_logprobs=3, stream=True)
    pieces = [one for chunk in streamed if chunk.choices[0].logprobs for one in chunk.choices[0].logprobs.content]
    assert [one.token for one in pieces] == [one.token for one in content]


def test_logprobs_of_a_completion_and_its_prompt(client: Any, llm: LLM) -> None:
    (expected,) = llm.generate(["Return the number"], Params(max_new_tokens=4, logprobs=2, prompt_logprobs=0))
    asked = {"model": "demo", "prompt": "Return the number", "max_tokens": 4, "temperature": 0}
    said = client.completions.create(**asked, logprobs=2).choices[0]
    assert said.logprobs.token_logprobs == pytest.approx(expected.logprobs, abs=1e-4)
    assert "".join(said.logprobs.tokens) == said.text
    assert [said.text[offset:][:1] for offset in said.logprobs.text_offset] == [one[:1] for one in said.logprobs.tokens]
    assert all(token in tops for token, tops in zip(said.logprobs.tokens, said.logprobs.top_logprobs, strict=True))
    echoed = client.completions.create(**asked, logprobs=0, echo=True).choices[0]
    first, *others = echoed.logprobs.token_logprobs
    assert first is None
    assert others == pytest.approx([*expected.prompt_logprobs.values(), *expected.logprobs], abs=1e-4)
    assert "".join(echoed.logprobs.tokens) == echoed.text == "Return the number" + said.text


def test_a_key_is_needed(server: LiveServer) -> None:
    stranger = openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0)
    with stranger, pytest.raises(openai.AuthenticationError):
        stranger.models.list()
    assert server.status_of("/metrics") == 401
    assert server.status_of("/health") == 200


def test_tenants_share_no_prefixes(client: Any) -> None:
    asked = {
        "model": "demo",
        "prompt": "Return a list of the names of all of the files in the folder. " * 3,
        "max_tokens": 1,
    }
    cached = [
        one.completions.create(**asked).usage.prompt_tokens_details.cached_tokens
        for one in (client, client, client.with_options(api_key=OTHER_KEY), client.with_options(api_key=OTHER_KEY))
    ]
    assert cached[0] == cached[2] == 0
    assert cached[1] == cached[3] > 0


def test_settings_at_their_ends_hurt_nobody(client: Any) -> None:
    """Whatever they do to their own request, one beside them gets what it gets alone."""
    asked = {"model": "demo", "prompt": "Return the", "temperature": 0, "max_tokens": 40}
    expected = client.completions.create(**asked).choices[0].text
    stream = client.completions.create(**asked, stream=True)
    said = next(stream).choices[0].text
    for more in (
        {"temperature": 1e-300, "top_p": 1e-300, "extra_body": {"top_k": 2**31 - 1, "min_p": 1.0}},
        {"temperature": 2.0, "extra_body": {"repetition_penalty": 1e-5}},
        {"extra_body": {"repetition_penalty": 10, "min_tokens": 8}, "logit_bias": {"2": 100, "0": 100}},
        {"frequency_penalty": -2, "presence_penalty": -2, "seed": 2**63 - 1, "n": 3},
        {"logit_bias": {str(token): -100 for token in range(1024)}, "seed": -(2**63), "n": 2},
        {"prompt": list(range(2048)), "logprobs": 20},
        {"stop": ["\x00", "\ud7ff", "e" * 512], "extra_body": {"stop_token_ids": list(range(64))}},
    ):
        choices = client.completions.create(**{**asked, "max_tokens": 8, "temperature": 1.0, **more}).choices
        assert all(choice.finish_reason in ("length", "stop") for choice in choices)
    assert said + "".join(chunk.choices[0].text for chunk in stream) == expected


def test_figures_under_other_names(client: Any, server: LiveServer) -> None:
    import httpx2

    text = httpx2.get(f"{server.url}/metrics", headers={"Authorization": f"Bearer {KEY}"}).text
    for name in ("vllm:time_to_first_token_seconds_bucket", "vllm:num_requests_running", "sglang:num_running_reqs"):
        assert f"\n{name}{{" in text


def test_an_operator_has_a_socket_of_his_own(server: LiveServer) -> None:
    path = server.log.parent / "admin"
    assert path.stat().st_mode & 0o777 == 0o600

    def post(where: str, key: str) -> tuple[int, Any]:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(path))
            head = f"POST {where} HTTP/1.0\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n\r\n"
            connection.sendall(head.encode())
            raw = b"".join(iter(lambda: connection.recv(65536), b""))
        status, _, body = raw.partition(b"\r\n\r\n")
        return int(status.split()[1]), json.loads(body)

    assert post("/flush_cache", "wrong")[0] == 401
    assert post("/flush_cache", KEY) == (200, {"success": True, "message": ""})
    status, info = post("/get_server_info", KEY)
    assert (status, info["state"]["running"], info["scheduler"]["page_size"]) == (200, 0, 16)
    assert post("/pause", KEY)[0] == post("/resume", KEY)[0] == 200
    assert post("/v1/completions", KEY)[0] == 404
    assert server.status_of("/flush_cache") == 404


def test_at_last_the_journal_replays(server: LiveServer) -> None:
    assert server.end() == 0
    run = server.log.parent / "run"
    assert read_journal(run).header.host["kind"] == "runtime"
    assert replay(run).steps > 100
