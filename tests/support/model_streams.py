"""Streams of the torch demo model, compared with answers of the same server before any engine was killed.

The expected tokens come from the model, so wrong KV, wrong rows and wrong matcher states after a recovery change an
answer. Each request is answered alone and again beside all others; a request whose answers differ has a near tie that
the sums of a CPU decide by the batch, and is left out.
"""

from __future__ import annotations

import http.client
import json
import math
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.support.kills import TIMEOUT_S, Tally
from tests.support.live_server import LiveServer

DEMO = ("--device", "cpu", "--numerics", "invariant", "--shutdown-s", "1")
LOGPROB_ERROR = 1e-3  # a CPU's sums depend on the batch
TEXTS = ("def f(", "import ", "class A", "return ", "for i in", "Returns the number of")
QUESTIONS = ("What does len do?", "Name a list.", "Numbers")
SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 6},
        "b": {"type": "string", "maxLength": 20},
    },
    "required": ["a", "b"],
    "additionalProperties": False,
}


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A streamed request: its route and its body."""

    path: str
    body: dict[str, Any]


@dataclass(slots=True)
class Choice:
    """One sample of an answer."""

    text: str = ""
    end: str = ""
    tokens: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tops: list[list[float]] = field(default_factory=list)  # logprobs of the likeliest tokens, by position


@dataclass(slots=True)
class Answer:
    """The content of a stream."""

    choices: dict[int, Choice] = field(default_factory=dict)
    usage: dict[str, int] = field(default_factory=dict)
    fault: str = ""  # kind and text of the error that ended the stream
    done: bool = False


def requests_of(seed: int, count: int) -> list[Asked]:
    """Return requests of all kinds: completions and chats, greedy and drawn, samples, stop texts and grammars."""
    rng = random.Random(seed)
    return [KINDS[number % len(KINDS)](rng) for number in range(count)]


def _completion(rng: random.Random, **fields: Any) -> Asked:
    common = {"prompt": rng.choice(TEXTS), "max_tokens": rng.randint(15, 60), "temperature": 0, "logprobs": 2}
    return Asked(path="/v1/completions", body={**common, **_streamed(), **fields})


def _chat(rng: random.Random, **fields: Any) -> Asked:
    messages = [{"role": "user", "content": rng.choice(QUESTIONS)}]
    common = {"messages": messages, "max_tokens": rng.randint(15, 60), "temperature": 0}
    return Asked(
        path="/v1/chat/completions", body={**common, "logprobs": True, "top_logprobs": 2, **_streamed(), **fields}
    )


def _streamed() -> dict[str, Any]:
    return {"stream": True, "stream_options": {"include_usage": True}}


def _drawn(rng: random.Random) -> dict[str, Any]:
    return {"temperature": round(rng.uniform(0.6, 1.0), 1), "seed": rng.randrange(2**31)}


def _json_schema() -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}}


KINDS: list[Callable[[random.Random], Asked]] = [
    lambda rng: _completion(rng, ignore_eos=True),
    lambda rng: _completion(rng, ignore_eos=True, n=2, **_drawn(rng)),
    lambda rng: _chat(rng, ignore_eos=True),
    lambda rng: _chat(rng, max_tokens=80, **_json_schema(), **_drawn(rng)),
    lambda rng: _completion(rng, stop=["\n\n"], min_tokens=10, **_drawn(rng)),
    lambda rng: _completion(rng, structured_outputs={"regex": "[a-z]{3,30}( [a-z]{2,9}){2,5}"}),
    lambda rng: _chat(rng, **_drawn(rng)),
    lambda rng: _completion(rng, ignore_eos=True, presence_penalty=1.0, top_k=20, **_drawn(rng)),
]


def read_stream(url: str, asked: Asked, heard: Callable[[], object] = lambda: None) -> Answer:
    """Send a request and read its stream to the end. `heard` is called for each message with a choice."""
    answer = Answer()
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=TIMEOUT_S)
    try:
        connection.request("POST", asked.path, json.dumps(asked.body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            answer.fault = f"refused: {response.status} {response.read()[:300]!r}"
            return answer
        while line := response.readline():
            if line == b"data: [DONE]\n":
                answer.done = True
            elif line.startswith(b"data: "):
                message = json.loads(line[6:])
                if "error" in message:
                    answer.fault = f"error: {message['error']['message']}"
                    return answer
                _take(answer, message)
                if message["choices"]:
                    heard()
    except (OSError, http.client.HTTPException) as error:
        answer.fault = f"broken: {type(error).__name__}: {error}"
        return answer
    finally:
        connection.close()
    if not answer.done:
        answer.fault = "broken: no [DONE]"
    return answer


def _take(answer: Answer, message: dict[str, Any]) -> None:
    if usage := message.get("usage"):
        answer.usage = {name: usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
    for one in message["choices"]:
        choice = answer.choices.setdefault(one["index"], Choice())
        choice.text += one.get("text", one.get("delta", {}).get("content")) or ""
        choice.end = one["finish_reason"] or choice.end
        beside = one.get("logprobs") or {}
        if "content" in beside:
            for token in beside["content"] or ():
                choice.tokens.append(token["token"])
                choice.logprobs.append(token["logprob"])
                choice.tops.append([top["logprob"] for top in token["top_logprobs"]])
        else:
            choice.tokens += beside.get("tokens", ())
            choice.logprobs += beside.get("token_logprobs", ())
            choice.tops += [sorted(tops.values(), reverse=True) for tops in beside.get("top_logprobs", ())]


def difference(found: Answer, wanted: Answer) -> str:
    """Return in which part two answers differ; empty if they are equal."""
    if found.fault:
        return found.fault
    if found.choices.keys() != wanted.choices.keys():
        return f"samples: {sorted(found.choices)} for {sorted(wanted.choices)}"
    for index, one in found.choices.items():
        other = wanted.choices[index]
        for name in ("text", "tokens", "end"):
            if getattr(one, name) != getattr(other, name):
                return f"{name}: sample {index}: {getattr(one, name)!r} for {getattr(other, name)!r}"
        for name, mine, others in (("logprobs", [one.logprobs], [other.logprobs]), ("tops", one.tops, other.tops)):
            if [len(row) for row in mine] != [len(row) for row in others]:
                return f"{name}: sample {index}: another number of them"
            for row, expected in zip(mine, others, strict=True):
                if not all(math.isclose(a, b, abs_tol=LOGPROB_ERROR) for a, b in zip(row, expected, strict=True)):
                    return f"{name}: sample {index}: {row} for {expected}"
    return "" if found.usage == wanted.usage else f"usage: {found.usage} for {wanted.usage}"


def read_all(url: str, asked: Sequence[Asked], heard: Callable[[], object] = lambda: None) -> list[Answer]:
    """Return the answers of requests that are sent at once."""
    answers = [Answer(fault="broken: not read") for _ in asked]

    def read(number: int) -> None:
        answers[number] = read_stream(url, asked[number], heard)

    threads = [threading.Thread(target=read, args=(number,)) for number in range(len(asked))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


class ModelStreams:
    """Requests with the answers that an engine gave which was not killed.

    Args:
        server: with the demo model; no engine of it was killed yet.
    """

    def __init__(self, server: LiveServer, asked: Sequence[Asked]) -> None:
        self.url = server.url
        alone = [read_stream(server.url, one) for one in asked]
        together = read_all(server.url, asked)
        for answer in (*alone, *together):
            assert not answer.fault, answer.fault
        pairs = zip(asked, alone, together, strict=True)
        self.expected = [(one, answer) for one, answer, other in pairs if not difference(other, answer)]

    def client(self, rng: random.Random, _name: str, tally: Tally) -> None:
        """Send one of the requests and compare its answer: `kills.Client`."""
        asked, wanted = rng.choice(self.expected)

        def heard() -> None:
            tally.heard_s = time.monotonic()

        found = read_stream(self.url, asked, heard)
        if problem := difference(found, wanted):
            kind, _, what = problem.partition(": ")
            tally.fault(kind, f"{what} for {asked.body}")
        if not found.fault:
            with tally.lock:
                tally.requests += 1
                tally.tokens += found.usage["completion_tokens"]
