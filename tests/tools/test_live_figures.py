"""What a sender records of a stream, sends to a server, and reports of a run, without a server."""

from __future__ import annotations

import json
from array import array
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lockstep.core.contract.errors import ConfigError
from lockstep.sim.results.text import duration
from lockstep.tools.live import Asking, Sender, Sent, TokenIdPrompts, summary, summary_lines


def taken(*events: Any) -> tuple[Sent, list[str], list[int]]:
    """Return what is recorded of events, which arrive at 10, 20, 30 ... us."""
    times, one, texts, ids = iter(range(10, 1000, 10)), Sent("r", 0), list[str](), list[int]()
    sender = cast(Any, SimpleNamespace(_now_us=lambda: next(times)))
    for event in events:
        Sender._take(sender, one, event if isinstance(event, bytes) else json.dumps(event).encode(), texts, ids)
    return one, texts, ids


def chunk(**fields: Any) -> dict[str, Any]:
    return {"choices": [fields]}


def test_messages_of_a_stream_are_recorded_with_their_times() -> None:
    last = {**chunk(text="c", finish_reason="stop"), "usage": {"completion_tokens": 4, "prompt_tokens": 7}}
    one, texts, ids = taken(chunk(text="a"), chunk(text="b", finish_reason=None), last, b"[DONE]")
    expected = Sent("r", 0, first_us=10, last_us=30, messages=3, output_tokens=4, prompt_tokens=7, ended_us=40)
    expected.finish_reason = "stop"
    expected.message_us, expected.message_tokens = array("q", [10, 20, 30]), array("i", [-1, -1, 4])
    assert one == expected
    assert (texts, ids) == (["a", "b", "c"], [])


def test_token_ids_are_counted_and_texts_of_a_chat_are_read() -> None:
    one, texts, ids = taken(
        chunk(text="", token_ids=[5, 6]),
        chunk(delta={"content": "x"}, token_ids=[7]),
        chunk(delta={"reasoning_content": "y"}),
        chunk(delta={}, finish_reason="length"),
    )
    assert (texts, ids) == (["", "x", "y"], [5, 6, 7])
    assert list(one.message_tokens) == [2, 3, 3]
    assert (one.messages, one.finish_reason, one.ended_us, one.output_tokens) == (3, "length", 40, 0)


@pytest.mark.parametrize(
    ("event", "fields"),
    [
        (b"[DONE]", {}),
        (b"[1]", {}),
        ({"choices": None, "usage": None}, {}),
        (chunk(delta=None), {}),
        (b"{", {"error": "not JSON: b'{'", "kind": "stream"}),
        ({"error": "x" * 300, "usage": {"prompt_tokens": 3}}, {"error": "x" * 200, "kind": "stream"}),
        ({"usage": {"prompt_tokens_details": {"cached_tokens": 0}}}, {"cached_tokens": 0}),
        ({"usage": {"prompt_tokens_details": {"cached_tokens": 9}, "prompt_tokens": 12}},
         {"cached_tokens": 9, "prompt_tokens": 12}),
        ({"usage": {"prompt_tokens_details": None, "completion_tokens": 2}}, {"output_tokens": 2}),
    ],
)  # fmt: skip
def test_events_without_a_message_change_only_what_they_state(event: Any, fields: dict[str, Any]) -> None:
    one, texts, ids = taken(event)
    assert one == Sent("r", 0, **fields)
    assert (texts, ids) == ([], [])


def test_figures_that_an_event_does_not_state_stay() -> None:
    first = {"usage": {"completion_tokens": 2, "prompt_tokens": 5, "prompt_tokens_details": {"cached_tokens": 4}}}
    one, _, _ = taken(first, {"usage": {}}, {})
    assert (one.output_tokens, one.prompt_tokens, one.cached_tokens) == (2, 5, 4)


SENT = [
    Sent("a", 1_000, sent_us=1_100, first_us=5_000, last_us=9_000, output_tokens=5, prompt_tokens=7),
    Sent("b", 0, sent_us=0, first_us=0, last_us=0, output_tokens=1),
    Sent("c", 0, sent_us=10, first_us=20, last_us=30, output_tokens=9, error="x" * 70),
    Sent("d", 90),
    Sent("e", 20, sent_us=30, last_us=50, output_tokens=3),  # answered in one piece, without a message
]


def test_figures_of_a_run() -> None:
    found = summary(SENT, 6, 3_000_000)
    assert found == {
        "requests": 6,
        "sent": 4,
        "answered": 3,
        "failed": {"x" * 60: 1},
        "span_us": 3_000_000,
        "output_tokens": 9,
        "prompt_tokens": 7,
        "late_us": {"p50": 10.0, "p90": pytest.approx(73.0), "p99": pytest.approx(97.3), "max": 100.0},
        "ttft_us": {"p50": 2_000.0, "p90": pytest.approx(3_600.0), "p99": pytest.approx(3_960.0), "max": 4_000.0},
        "tpot_us": {"p50": 1_000.0, "p90": 1_000.0, "p99": 1_000.0, "max": 1_000.0},
        "e2e_us": {"p50": 30.0, "p90": pytest.approx(6_406.0), "p99": pytest.approx(7_840.6), "max": 8_000.0},
    }
    first, not_sent, failed, header, *rows, last = summary_lines(found, "m", False)
    assert first == "3 of 6 requests answered by m in 3.0 s, 9 tokens (3.0/s)"
    assert not_sent == "2 were not sent"
    assert failed == f"1 failed: {'x' * 60}"
    assert header.split() == ["p50", "p90", "p99", "max"]
    names = {"TTFT": "ttft_us", "TPOT": "tpot_us", "end to end": "e2e_us", "sent after it was due": "late_us"}
    assert rows == [f"{title:<22}{''.join(f'{duration(one):>10}' for one in found[name].values())}"
                    for title, name in names.items()]  # fmt: skip
    assert {len(row) for row in (header, *rows)} == {62}
    assert last == "times count from when a request was due, not from when it was sent"


def test_a_run_without_answers_has_no_times() -> None:
    found = summary([], 0, 0)
    assert found["ttft_us"] == {"p50": None, "p90": None, "p99": None, "max": None}
    first, second, *more = summary_lines(found, "m", True)
    assert first == "interrupted: the figures end there"
    assert second == "0 of 0 requests answered by m in 0.0 s, 0 tokens (0.0/s)"
    assert len(more) == 6


@pytest.mark.parametrize(
    ("asking", "prompt", "fields"),
    [
        (Asking(), "a b", {"prompt": "a b", "max_tokens": 1}),
        (Asking(max_tokens=9, ignore_eos=True), "a", {"prompt": "a", "max_tokens": 9, "ignore_eos": True}),
        (Asking(chat=True), "a", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}),
        (Asking(TokenIdPrompts(64)), [8, 9], {"prompt": [8, 9], "max_tokens": 1, "return_token_ids": True}),
        (Asking(fields={"top_p": 0.5, "temperature": 1}), "a",
         {"prompt": "a", "max_tokens": 1, "top_p": 0.5, "temperature": 1}),
    ],
)  # fmt: skip
def test_the_body_of_a_request(asking: Asking, prompt: Any, fields: dict[str, Any]) -> None:
    turn = cast(Any, SimpleNamespace(output_tokens=0))
    always = {"model": "m", "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    assert json.loads(asking.body("m", turn, prompt)) == always | fields
    assert asking.path == ("/v1/chat/completions" if asking.chat else "/v1/completions")


@pytest.mark.parametrize("vocabulary", [16, 100, 2048])
def test_ids_of_a_prompt_are_mixed_into_the_middle_of_the_vocabulary(vocabulary: int) -> None:
    """The mixing is the finaliser of splitmix64: https://prng.di.unimi.it/splitmix64.c."""

    def mixed(value: int) -> int:
        value = (value + 0x9E3779B97F4A7C15) % 2**64
        value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        return (value ^ value >> 27) * 0x94D049BB133111EB % 2**64

    form = TokenIdPrompts(vocabulary)
    expected = [vocabulary // 8 + (mixed(token) >> 32) % (vocabulary * 3 // 4) for token in range(1_000, 1_200)]
    assert form.of((1_000, 200)) == expected
    assert form.of((1_000, 200), 150) == expected[150:]
    assert form.answer((), ()) is None
    assert form.answer((), (3, 4)) == [3, 4]
    with pytest.raises(ConfigError, match="`vocab` must be at least 16 tokens, got `15`"):
        TokenIdPrompts(15)
