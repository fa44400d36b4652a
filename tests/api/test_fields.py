"""Fields that are not served: refused where they would change the answer, otherwise accepted and named."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server is not installed")
httpx2 = pytest.importorskip("httpx2", reason="a client is not installed")

from starlette.requests import Request  # noqa: E402
from starlette.responses import Response  # noqa: E402

from lockstep.api.endpoints import fields, schemas  # noqa: E402
from lockstep.api.endpoints.errors import ApiError  # noqa: E402
from lockstep.api.endpoints.fields import HEADER, NAMED_MAX, ignore, name_ignored, unserved_fields  # noqa: E402
from tests.support.live_server import LiveServer  # noqa: E402

HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def client(emulated: LiveServer) -> Iterator[Any]:
    with httpx2.Client(base_url=emulated.url, timeout=120) as made:
        yield made


def ignored(answer: Any) -> list[str]:
    assert answer.status_code == 200, answer.text
    named = answer.headers.get(HEADER, "")
    return named.split(", ") if named else []


CODEX = {
    "model": "qwen3-0.6b",
    "instructions": "You are a coding agent.",
    "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Say hello"}]}],
    "tools": [
        {"type": "function", "name": "exec_command", "parameters": {"type": "object"}, "strict": False},
        {
            "type": "namespace",
            "name": "mcp__files",
            "description": "Files",
            "tools": [{"type": "function", "name": "read", "parameters": {"type": "object"}}],
        },
        {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark", "definition": "x"}},
        {"type": "web_search", "external_web_access": False},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "a",
    "client_metadata": {"a": "b"},
    "text": {"verbosity": "low"},
    "service_tier": "auto",
    "max_output_tokens": 3,
}
"""A request with the fields of OpenAI's Codex CLI."""

CLAUDE = {
    "model": "qwen3-0.6b",
    "max_tokens": 3,
    "stream": True,
    "system": [{"type": "text", "text": "You are a coding agent.", "cache_control": {"type": "ephemeral"}}],
    "messages": [{"role": "user", "content": [{"type": "text", "text": "Say hello"}]}],
    "tools": [
        {"name": "Bash", "description": "Runs", "input_schema": {"type": "object"}},
        {"type": "web_search_20250305", "name": "web_search"},
    ],
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
    "metadata": {"user_id": "a"},
}
"""A request with the fields of Anthropic's Claude Code."""


def test_the_fields_of_codex_are_accepted_and_named(client: Any) -> None:
    answer = client.post("/v1/responses", json=CODEX)
    assert {
        "include.reasoning.encrypted_content",
        "client_metadata",
        "prompt_cache_key",
        "service_tier",
        "reasoning.effort",
        "reasoning.summary",
        "text.verbosity",
        "tools.2.format",
        "tools.3.web_search",
    } <= set(ignored(answer))
    # By length, unless the model happens to draw its end token first.
    assert '"type":"response.incomplete"' in answer.text or '"type":"response.completed"' in answer.text


def test_the_fields_of_claude_code_are_accepted_and_named(client: Any) -> None:
    answer = client.post("/v1/messages?beta=true", json=CLAUDE)
    assert set(ignored(answer)) == {
        "context_management",
        "output_config.effort",
        "thinking",
        "tools.1.web_search_20250305",
    }
    assert "message_stop" in answer.text


def test_a_tool_of_the_server_that_must_be_called_is_refused(client: Any) -> None:
    answer = client.post("/v1/responses", json={**CODEX, "tool_choice": {"type": "web_search"}})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "tool_choice"
    refused = {"tools": [{"type": "file_search", "vector_store_ids": ["a"]}]}
    answer = client.post("/v1/responses", json={**CODEX, **refused})
    assert answer.json()["error"]["param"] == "tools.0.type"


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/v1/completions", {"prompt": "a", "max_tokens": 1, "decode_tp_size": 1}, ["decode_tp_size"]),
        ("/v1/completions", {"prompt": "a", "max_tokens": 1, "data_parallel_rank": 0}, []),
        ("/v1/completions", {"prompt": "a", "max_tokens": 1, "a_field": [0]}, ["a_field"]),
        ("/v1/completions", {"prompt": "a", "max_tokens": 1, "a_field": None, "another": []}, []),
        ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 1, "verbosity": "low"}, ["verbosity"]),
        ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 1, "reasoning_effort": "low"}, ["reasoning_effort"]),
        (
            "/v1/chat/completions",
            {"messages": HELLO, "max_tokens": 1, "chat_template_kwargs": {"enable_thinking": False}},
            ["chat_template_kwargs.enable_thinking"],
        ),
        ("/generate", {"text": "a", "sampling_params": {"max_new_tokens": 1, "colour": 1}}, ["sampling_params.colour"]),
        (
            "/generate",
            {"text": ["a", "b"], "sampling_params": [{"max_new_tokens": 1}, {"max_new_tokens": 1, "colour": 1}]},
            ["sampling_params.colour"],
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_field_without_effect_is_named(client: Any, path: str, body: dict[str, Any], named: list[str]) -> None:
    assert ignored(client.post(path, json=body)) == named


@pytest.mark.parametrize("path", ["/v1/completions", "/invocations"])
def test_a_large_field_without_effect_is_named(client: Any, path: str) -> None:
    """A text process does not parse large unknown fields."""
    body = {"prompt": [3, 4, 5] * 30, "max_tokens": 3, "seed": 1}
    more = {"lists": [[]] * 30_000, "long": " " * 10_000, "verbosity": "x" * 10_000, "none": None, "n/a": []}
    small, large = client.post(path, json=body), client.post(path, json={**body, **more})
    assert ignored(large) == ["lists", "long", "verbosity"]
    assert large.json()["choices"] == small.json()["choices"]
    assert large.json()["usage"]["prompt_tokens"] == 90
    refused = client.post(path, json={**body, "suffix": "x" * 100_000})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "suffix")


def test_an_empty_list_of_choices_is_refused(client: Any) -> None:
    answer = client.post("/v1/completions", json={"prompt": "a", "guided_choice": []})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "guided_choice")


def test_a_field_without_effect_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    request = Request({"type": "http", "path": "/v1/completions", "headers": []})
    ignore(request, "seldom")
    fields._logged.discard("seldom")
    with caplog.at_level(logging.WARNING, "lockstep.http"):
        for _ in range(3):
            name_ignored(request, Response())
    assert [one.getMessage() for one in caplog.records] == [
        "the field `seldom` of /v1/completions has no effect on this server; this is logged once"
    ]


def test_names_of_clients_cannot_break_the_header() -> None:
    request = Request({"type": "http", "path": "/", "headers": []})
    for number in range(NAMED_MAX + 3):
        ignore(request, f"a\r\nSet-Cookie: {number}, é" + "x" * 500)
    response = Response()
    name_ignored(request, response)
    header = response.headers[HEADER]
    assert header.isascii()
    assert header.isprintable()
    assert len(header.split(", ")) == NAMED_MAX + 1
    assert header.endswith("and 3 more")


BODIES = [one for one in vars(schemas).values() if isinstance(one, type) and issubclass(one, schemas.Body)]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_each_known_field_is_either_served_or_refused_or_named(body: type[schemas.Body]) -> None:
    assert not set(body.model_fields) & (set(body.REFUSED) | body.COMFORT)
    assert not set(body.REFUSED) & body.COMFORT
    for name in body.COMFORT:
        made = body.model_construct(**dict.fromkeys(body.model_fields))
        object.__setattr__(made, "__pydantic_extra__", {name: "x"})
        assert unserved_fields(made, strict=True) == [name]
    for name in body.REFUSED:
        made = body.model_construct(**dict.fromkeys(body.model_fields))
        object.__setattr__(made, "__pydantic_extra__", {name: "a value that no server knows"})
        with pytest.raises(ApiError, match=f"`{name}`"):
            unserved_fields(made, strict=False)


@pytest.mark.parametrize(
    ("path", "body", "param", "said"),
    [
        ("/v1/embeddings", {"messages": HELLO, "input": "a"}, "input", "both are given"),
        ("/v1/embeddings", {"input": [{"image": "https://a/b.png"}]}, "input", "images"),
        ("/v1/embeddings", {"input": "a", "token_type_ids": [[0]]}, "token_type_ids", "pairs of texts"),
        ("/v1/embeddings", {}, "input", "missing"),
        ("/encode", {"text": "a", "is_cross_encoder_request": True}, "is_cross_encoder_request", "pairs of texts"),
        ("/encode", {"text": "a", "image_data": "x"}, "image_data", "not supported"),
        ("/generate", {"input_embeds": [[0.5]], "text": "a"}, "text", "give one of"),
        ("/generate", {"input_embeds": [[0.5]]}, "input_embeds", "an emulated engine takes tokens only"),
        ("/v1/completions", {"prompt_embeds": "AA=="}, "prompt_embeds", "neither a .npy file nor safetensors"),
        ("/v1/completions", {"prompt": "a", "prompt_embeds": [[0.5]]}, "prompt", "give either"),
        ("/generate", {"text": "a", "token_ids_logprob": [1]}, "token_ids_logprob", "return_logprob"),
        ("/v1/completions", {"prompt": "a", "bad_words": ["b"]}, "bad_words", "no logits"),
        ("/v1/completions", {"prompt": "a", "use_beam_search": True}, "use_beam_search", "no logits"),
    ],
)
def test_what_is_not_served_is_refused_with_the_reason(
    client: Any, path: str, body: dict[str, Any], param: str, said: str
) -> None:
    answer = client.post(path, json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert said in error["message"]
