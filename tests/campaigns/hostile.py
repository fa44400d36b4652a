"""Requests that no valid client sends: mutated bodies and mutated HTTP. All are determined by a seed."""

from __future__ import annotations

import json
import random
from copy import deepcopy
from typing import Any

HELLO = [{"role": "user", "content": "hi"}]
ITEMS = [{"type": "message", "role": "user", "content": "hi"}]
VALID: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a", "max_tokens": 2, "temperature": 0.5, "stop": ["x"], "logit_bias": {"5": 1}},
    "/v1/chat/completions": {"messages": HELLO, "max_completion_tokens": 2, "n": 2, "stream": False},
    "/v1/responses": {"input": HELLO, "max_output_tokens": 2, "metadata": {"a": "b"}, "background": False},
    "/v1/responses/resp_1/cancel": {},
    "/v1/responses/input_tokens": {"input": HELLO, "instructions": "be brief"},
    "/v1/conversations": {"items": ITEMS, "metadata": {"a": "b"}},
    "/v1/conversations/resp_1": {"metadata": {"a": "b"}},
    "/v1/conversations/resp_1/items": {"items": ITEMS},
    "/v1/messages": {"messages": HELLO, "max_tokens": 2, "system": "be brief", "stop_sequences": ["x"]},
    "/v1/messages/count_tokens": {"messages": HELLO},
    "/v1/embeddings": {"input": ["a", "b"], "encoding_format": "base64"},
    **{
        path: {"query": "a", "items": ["b", "c"], "label_token_ids": [1, 2], "apply_softmax": True}
        for path in ("/score", "/v1/score")
    },
    **{
        path: {"query": "a", "documents": ["b", {"text": "c"}], "top_n": 1}
        for path in ("/rerank", "/v1/rerank", "/v2/rerank")
    },
    **{path: {"input": "a"} for path in ("/pooling", "/classify", "/v1/classify", "/v1/moderations")},
    "/generate": {"text": "a", "sampling_params": {"max_new_tokens": 2, "top_k": 5}, "rid": "r"},
    "/encode": {"text": "a"},
    "/invocations": {"prompt": "a", "max_tokens": 2},
    **{path: {"prompt": "a"} for path in ("/tokenize", "/v1/tokenize")},
    **{path: {"tokens": [1, 2, 3]} for path in ("/detokenize", "/v1/detokenize")},
    "/abort_request": {"rid": "nobody"},
    "/abort_requests": {"request_ids": ["nobody"]},
    "/v1/files": {"file": "a", "purpose": "batch"},
    "/v1/batches": {"input_file_id": "file-1", "endpoint": "/v1/completions", "completion_window": "24h"},
    "/v1/batches/resp_1/cancel": {},
    "/open_session": {"capacity_of_str_len": 10, "session_id": "s", "timeout": 0.01},
    "/close_session": {"session_id": "s"},
}
NASTY: tuple[Any, ...] = (
    *(None, True, 0, -1, 1, 2**31, 2**63, -(2**63) - 1, 10**30, 0.5, -0.0, 1e308, 1e-320, float("nan"), float("inf")),
    *("", "a", "\0", "\ud800", "é" * 300, "x" * 70_000, "../../etc/passwd", "http://127.0.0.1/", "{{7*7}}"),
    *([], [[]], [None], ["a", 1], list(range(300)), {}, {"a": 1}, {"": None}, [{}] * 50),
)
FIELDS = (
    "max_tokens",
    "n",
    "stop",
    "temperature",
    "stream",
    "logprobs",
    "seed",
    "tools",
    "model",
    "prompt",
    "messages",
)


def body(draw: random.Random) -> tuple[str, bytes]:
    """A path, and a body that is most likely invalid for it."""
    path = draw.choice(sorted(VALID))
    made = json.loads(json.dumps(VALID[path]))
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        _mutate(made, draw)
    said = json.dumps(made).encode()
    match draw.randrange(8):
        case 0:
            said = said[: draw.randrange(len(said) + 1)]
        case 1:
            said = _flipped(said, draw)
        case 2:
            said = said[:-1] + b', "x": ' + b"[" * 5000 + b"]" * draw.choice((0, 4999, 5000)) + b"}"
        case 3:
            name = draw.choice(sorted(VALID[path]) or FIELDS)
            said = said[:-1] + f', "{name}": {json.dumps(draw.choice(NASTY))}'.encode() + b"}"  # the field again
        case _:
            pass
    return path, said


def _mutate(made: Any, draw: random.Random) -> None:
    """Change one value somewhere below."""
    if isinstance(made, dict):
        inner = [value for value in made.values() if isinstance(value, dict | list) and value]
        if inner and draw.random() < 0.4:
            _mutate(draw.choice(inner), draw)
        elif made and draw.random() < 0.2:
            del made[draw.choice(sorted(made))]
        else:
            made[draw.choice((*sorted(made), draw.choice(FIELDS)))] = deepcopy(draw.choice(NASTY))
    elif isinstance(made, list) and made:
        if isinstance(made[0], dict) and draw.random() < 0.7:
            _mutate(draw.choice([one for one in made if isinstance(one, dict)]), draw)
        else:
            made[draw.randrange(len(made))] = deepcopy(draw.choice(NASTY))


def _flipped(said: bytes, draw: random.Random) -> bytes:
    """The bytes with some of them changed."""
    changed = bytearray(said)
    for _ in range(draw.randrange(1, 8)):
        if changed:
            changed[draw.randrange(len(changed))] = draw.randrange(256)
    return bytes(changed)


def http(draw: random.Random) -> bytes:
    """Bytes of a connection that may be valid HTTP."""
    path, content = body(draw)
    lines = [
        f"POST {path} HTTP/1.1".encode(),
        b"Host: a",
        b"Content-Type: application/json",
        b"Content-Length: " + str(len(content)).encode(),
        b"Connection: close",
    ]
    match draw.randrange(10):
        case 0:
            return draw.randbytes(draw.randrange(1, 300))
        case 1:
            lines[3] = b"Content-Length: " + draw.choice(
                (b"-1", b"1e3", b"99999999999999999999", b"0x10", b"", b"5, 6")
            )
        case 2:
            lines.insert(3, b"Transfer-Encoding: " + draw.choice((b"chunked", b"gzip, chunked", b"chunked, identity")))
        case 3:
            lines.append(b"X: " + draw.randbytes(50))
        case 4:
            lines.append(b"X-Padding: " + b"a" * draw.choice((1000, 70_000)))
        case 5:
            lines[0] = draw.choice(
                (b"POST", b"GET / HTTP/9.9", b"BREW /v1/completions HTTP/1.1", b"GET http://b/ HTTP/1.1")
            )
        case 6:
            del lines[draw.randrange(len(lines))]
        case 7:
            lines[3:4] = [b"Transfer-Encoding: chunked"]
            size = draw.choice((b"ffffffffffffffff", b"-5", b"5;" + b"x" * 5000, b"z", f"{len(content):x}".encode()))
            content = size + b"\r\n" + content + b"\r\n0\r\n\r\n"
        case 8:
            lines.append(b"Expect: 100-continue")
        case _:
            return _flipped(b"\r\n".join([*lines, b"", content]), draw)
    return b"\r\n".join([*lines, b"", content])
