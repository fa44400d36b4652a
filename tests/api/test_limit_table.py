"""The most expensive bodies to validate, in the fewest bytes: refused quickly, and without much memory.

A list with a million errors was once answered after two minutes and four gigabytes: each error was reported, and for a
field of several types once for each type.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server is not installed")
httpx2 = pytest.importorskip("httpx2", reason="a client is not installed")

from tests.support.live_server import LiveServer  # noqa: E402

MANY = 300_000
JSON = {"content-type": "application/json"}


def repeated(field: str, item: str, path: str = "/v1/completions", front: str = '"prompt": "a"') -> tuple[str, bytes]:
    """A body with a list of this length."""
    return path, f'{{{front}, "{field}": [{",".join([item] * MANY)}]}}'.encode()


def named(field: str, value: str, path: str = "/v1/completions", front: str = '"prompt": "a"') -> tuple[str, bytes]:
    """A body with an object of this size."""
    inner = ",".join(f'"{number}": {value}' for number in range(MANY))
    return path, f'{{{front}, "{field}": {{{inner}}}}}'.encode()


HI = '"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1'
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
COSTLY = {
    "prompts of several kinds": repeated("prompt", '1, "a"'),
    "prompts of no kind": repeated("prompt", "null"),
    "prompts in lists": repeated("prompt", "[null]"),
    "many prompts": repeated("prompt", '"a"'),
    "many prompts of ids": repeated("prompt", "[1]"),
    "ids that are none": repeated("prompt", "-1"),
    "embeddings that are none": repeated("input_embeds", "[null]", "/generate", '"stream": false'),
    "embeddings of several sizes": repeated("input_embeds", "[1], [1, 2]", "/generate", '"stream": false'),
    "embeddings of no prompts": repeated("input_embeds", "[[]]", "/generate", '"stream": false'),
    "a longer prompt than fits": repeated("prompt", "1"),
    "stops that are none": repeated("stop", "1"),
    "many stops": repeated("stop", '"a"'),
    "stop tokens that are none": repeated("stop_token_ids", '"a"'),
    "allowed tokens that are none": repeated("allowed_token_ids", "0.5"),
    "biases that are none": named("logit_bias", '"x"'),
    "biases too large": named("logit_bias", "1e9"),
    "many biases": named("logit_bias", "1"),
    "processors that are none": named("logit_processors", "1"),
    "many processors": named("logit_processors", "{}"),
    "messages that are none": repeated("messages", "1", CHAT, '"n": 1'),
    "messages that are empty": repeated("messages", "{}", CHAT, '"n": 1'),
    "many messages": repeated("messages", '{"role": "user", "content": ""}', CHAT, '"n": 1'),
    "tools that are none": repeated("tools", "1", CHAT, HI),
    "many tools": repeated("tools", "{}", CHAT, HI),
    "items that are none": repeated("input", "1", RESPONSES, '"user": "a"'),
    "many items": repeated("input", "{}", RESPONSES, '"user": "a"'),
    "metadata": named("metadata", "1", RESPONSES, '"input": "a"'),
    "blocks that are none": repeated("system", "1", MESSAGES, HI),
    "many stop sequences": repeated("stop_sequences", '"a"', MESSAGES, HI),
    "tokens that are none": repeated("tokens", "null", "/detokenize", '"model": null'),
    "texts that are none": repeated("text", "1", "/generate", '"stream": false'),
    "ids that are texts": repeated("input_ids", '"a"', "/generate", '"stream": false'),
    "labels that are none": repeated("label_token_ids", "0.5", "/score", '"query": "a", "items": ["b"]'),
    "documents that are none": repeated("documents", "1", "/rerank", '"query": "a"'),
    "many documents": repeated("documents", '""', "/rerank", '"query": "a"'),
    "a longer text than fits": ("/v1/completions", b'{"prompt": "' + b"word " * (MANY * 5) + b'"}'),
    "a longer conversation than fits": (CHAT, HI.encode().join((b"{", b"}")).replace(b"hi", b"word " * (MANY * 5))),
    "a longer text to count": (MESSAGES + "/count_tokens", b"{%s}" % HI.encode().replace(b"hi", b"word " * (MANY * 5))),
    "depth": ("/v1/completions", b'{"prompt": ' + b"[" * MANY + b"]" * MANY + b"}"),
    "objects in objects": ("/v1/completions", b'{"x":' * MANY + b"1" + b"}" * MANY),
    "fields": ("/v1/completions", json.dumps({f"f{n}": 1 for n in range(MANY)}).encode()),
    "digits": ("/v1/completions", b'{"prompt": "a", "seed": 1' + b"0" * MANY + b"}"),
    "a long name": ("/v1/completions", b'{"prompt": "a", "stop": [1], "' + b"x" * MANY + b'": 1}'),
    "a long wrong value": ("/v1/completions", b'{"prompt": "a", "stream": "' + b"x" * MANY + b'"}'),
}


@pytest.fixture(scope="module")
def client(emulated: LiveServer) -> Iterator[Any]:
    with httpx2.Client(base_url=emulated.url, timeout=120) as made:
        yield made


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("name", COSTLY)
def test_the_most_expensive_bodies_are_refused_quickly(client: Any, emulated: LiveServer, name: str) -> None:
    path, body = COSTLY[name]
    worker = Path(f"/proc/{emulated.children()['worker 0']}")
    (worker / "clear_refs").write_text("5")  # resets the mark of the highest memory use
    before_kb = memory_kb(worker)
    began_s = time.monotonic()
    answer = client.post(path, content=body, headers=JSON)
    took_s = time.monotonic() - began_s
    assert answer.status_code == 400, answer.text[:500]
    assert len(answer.content) < 1500
    assert took_s < 60.0
    grown_kb = memory_kb(worker) - before_kb
    assert grown_kb * 1024 < 100e6 + 20 * len(body)


def memory_kb(process: Path) -> int:
    """The highest memory use of the worker since the mark was set, in kB."""
    (line,) = [line for line in (process / "status").read_text().splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1])


def test_a_field_that_stands_there_twice_is_taken_once(client: Any) -> None:
    body = b'{"prompt": "a", "max_tokens": 1, "max_tokens": 3, "ignore_eos": true}'
    said = client.post("/v1/completions", content=body, headers=JSON).json()
    assert said["usage"]["completion_tokens"] == 3
