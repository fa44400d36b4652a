"""A row keeps nothing of its previous request: with any fields of that request, the next one gets its answer alone.

There is one row, so all requests take it one after another.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the GPU runtime is not installed")

from lockstep.runtime import LLM, Params
from tests.support.small_runtime import SMALL_QWEN3

PROMPT = [5, 6, 7, 8]
PLAIN = Params(max_new_tokens=12, ignore_eos=True)
DRAWN = Params(max_new_tokens=12, ignore_eos=True, temperature=1.0, seed=7)
SPECIAL: dict[str, dict[str, Any]] = {
    "constrained": {"allowed_token_ids": [40, 41]},
    "biased": {"logit_bias": dict.fromkeys(range(60, 90), 100.0)},
    "banned": {"logit_bias": dict.fromkeys(range(250), -100.0)},
    "penalised": {"repetition_penalty": 10.0, "frequency_penalty": 2.0, "presence_penalty": 2.0},
    "cut to the likeliest": {"temperature": 2.0, "top_k": 1, "top_p": 0.01, "min_p": 0.9},
    "asked for logprobs": {"logprobs": 5, "prompt_logprobs": 3},
    "with an end of its own": {"stop_token_ids": list(range(64)), "min_new_tokens": 10},
    "with hidden states": {"hidden_states": True},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    (path / "config.json").write_text(json.dumps(SMALL_QWEN3))
    return path


def engine(folder: Path) -> LLM:
    one_row = {"max_running_requests": 1, "request_rows": 1, "pages": 64, "page_size": 4, "radix_cache": False}
    return LLM(folder, random_weights=3, device="cpu", **one_row)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with engine(folder) as made:
        yield made


@pytest.fixture(scope="module")
def fresh(folder: Path) -> list[Any]:
    """The answers of plain requests that are the first of an engine."""
    answers = []
    for params in (PLAIN, DRAWN):
        with engine(folder) as made:
            answers.append(made.generate([PROMPT], params)[0].token_ids)
    return answers


@pytest.mark.parametrize("name", SPECIAL)
def test_the_next_request_gets_its_answer_alone(llm: LLM, fresh: list[Any], name: str) -> None:
    special = Params(**{"max_new_tokens": 12, "temperature": 1.0, "seed": 1, **SPECIAL[name]})
    for params, expected in zip((PLAIN, DRAWN), fresh, strict=True):
        before = llm.generate([[9, 9, 9]], special)[0]
        assert before.finish_reason in ("length", "stop")
        after = llm.generate([PROMPT], params)[0]
        assert after.token_ids == expected
        assert after.logprobs == []
        assert after.hidden_states is None


def test_one_that_was_cancelled_leaves_nothing_either(llm: LLM, fresh: list[Any]) -> None:
    special = Params(max_new_tokens=60, temperature=1.0, seed=1, allowed_token_ids=[40, 41])
    stream = llm.stream([9, 9, 9], special)
    next(stream)
    stream.close()
    assert llm.generate([PROMPT], PLAIN)[0].token_ids == fresh[0]


def test_a_vector_leaves_nothing_either(llm: LLM, fresh: list[Any]) -> None:
    assert llm.embed([[9, 9, 9]])[0].vector is not None
    assert llm.generate([PROMPT], DRAWN)[0].token_ids == fresh[1]
