"""Every architecture through the whole engine, at every depth, with and without sharing inside a step."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch", reason="the GPU runtime is not installed")

from lockstep.core.contract.events import RequestRetracted  # noqa: E402
from lockstep.runtime import LLM, Params  # noqa: E402
from tests.runtime.test_models import SMALL, save_model  # noqa: E402
from tests.support.architectures import greedy_answers  # noqa: E402

ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3-moe")
REQUESTS = 64
STIRRED: dict[str, Any] = {
    "page_size": 4, "pages": 240, "chunked_prefill_size": 40, "max_running_requests": 20, "retract_every": 4,
}  # fmt: skip


def random_requests() -> list[tuple[list[int], int]]:
    """Prompts that begin alike, in groups, and lengths."""
    rng, vocabulary = random.Random(5), int(SMALL["vocab_size"])
    beginnings = [[rng.randrange(2, vocabulary) for _ in range(rng.randrange(24))] for _ in range(6)]
    return [
        (
            rng.choice(beginnings) + [rng.randrange(2, vocabulary) for _ in range(rng.randrange(1, 20))],
            rng.randrange(1, 13),
        )
        for _ in range(REQUESTS)
    ]


class Reference(NamedTuple):
    """A model that transformers saved, and its own answers."""

    folder: Path
    answers: list[list[int]]


@pytest.fixture(scope="module", params=ARCHITECTURES)
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Greedy answers of transformers' `generate`, one request at a time; once for all cells of an architecture."""
    folder = tmp_path_factory.mktemp("model")
    model = save_model(folder, request.param)
    answers = greedy_answers(model, random_requests())
    assert len({token for answer in answers for token in answer}) > 20, (
        "a model that says the same whatever it is asked"
    )
    return Reference(folder, answers)


@pytest.mark.parametrize("sharing", [False, True], ids=["", "same-step sharing"])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_greedy_tokens_are_those_of_transformers(reference: Reference, depth: int, sharing: bool) -> None:
    """With chunks, cached prefixes, and a retraction every few decodes."""
    decided: list[Any] = []
    with LLM(reference.folder, overlap_depth=depth, same_step_sharing=sharing, **STIRRED) as llm:
        llm.host.observe = lambda _, step: decided.extend(step.decided)
        prompts, counts = zip(*random_requests(), strict=True)
        answers = llm.generate(prompts, [Params(max_new_tokens=count) for count in counts])
    assert [answer.token_ids for answer in answers] == reference.answers
    assert any(answer.cached_tokens for answer in answers)
    assert sum(isinstance(one, RequestRetracted) for one in decided) > 3
