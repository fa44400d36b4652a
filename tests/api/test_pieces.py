"""Pieces of an answer: the search for stop expressions gives other tasks their turn."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server is not installed")

from lockstep.api.endpoints.generation import REGEX_WORK, Choice, Generation, Prompt
from lockstep.api.processes.bridge import Reply
from lockstep.api.processes.wire import SampleEnded
from lockstep.api.text.answer_text import AnswerText
from lockstep.api.text.plain_text import PlainText

TEXT = "number 1, number 2, " * 20
PATTERN = "number 2, number 3"


def choice_of(changed: asyncio.Event, at_once: int) -> Choice:
    """A choice of which all tokens have arrived; the last ones were held back, and complete a stop expression."""
    reply = Reply(changed)
    tokens = list((TEXT + PATTERN[len("number 2, ") :]).encode())
    reply.put(0, tokens, 0.0)
    reply.end(SampleEnded(0, 0, "text_stop", output_tokens=len(tokens)))
    nothing: Any = SimpleNamespace(tokens=0)
    answer = AnswerText(PlainText(), [], regexes=[PATTERN])
    return Choice(0, Prompt([1], None), nothing, reply, answer, nothing, nothing, at_once=at_once)


@pytest.mark.parametrize("at_once", [1, 7, 64, REGEX_WORK])
def test_a_long_search_gives_other_tasks_their_turn(at_once: int) -> None:
    async def read() -> tuple[str, Any, int]:
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        beside = asyncio.create_task(other())
        nothing: Any = SimpleNamespace(observe_tokens=lambda _: None)
        generation = Generation(nothing, nothing, nothing, 0.0)
        generation.choices = [choice_of(generation._changed, at_once)]
        text = "".join([one.text async for new in generation.pieces() for one in new])
        beside.cancel()
        return text, generation.choices[0].answer.stop_reason, turns

    text, reason, turns = asyncio.run(read())
    assert text == TEXT[: -len("number 2, ")]
    assert reason == PATTERN
    assert turns >= (len(TEXT) // at_once if at_once < len(TEXT) else 0)
