"""LoRA: an adapter says what the model says with the adapter merged into it, whoever runs beside it.

Tolerance: in float32 logprobs differ by less than 1e-3 from those of the merged model, whose sums have another order;
so greedy tokens are the same, or behind the same tokens as likely.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the GPU runtime is not installed")

from safetensors.torch import load_file, save_file  # noqa: E402

from lockstep.core.errors import ConfigError  # noqa: E402
from lockstep.core.journal import read_journal  # noqa: E402
from lockstep.core.replay import replay  # noqa: E402
from lockstep.host.keeping import Keeper  # noqa: E402
from lockstep.runtime import LLM, Params  # noqa: E402
from lockstep.runtime.checkpoint import CheckpointError  # noqa: E402
from lockstep.runtime.llm import Answer, demo_folder  # noqa: E402
from tests.support.adapters import merged, write_adapter  # noqa: E402

CPU: dict[str, Any] = {"device": "cpu", "grammar_backend": "none"}
TOLERANCE = 1e-3
PROMPTS = ["def f(", "import ", "class A", "return "]


def greedy(adapter: str = "", tokens: int = 8) -> Params:
    return Params(max_new_tokens=tokens, ignore_eos=True, logprobs=2, adapter=adapter)


def same(answer: Answer, expected: Answer) -> None:
    """Equal, up to the first place where two tokens all but tie."""
    assert not answer.error
    assert len(answer.token_ids) == len(expected.token_ids)
    pairs = zip(answer.token_ids, expected.token_ids, answer.logprobs, expected.logprobs, strict=True)
    for ours, theirs, logprob, other in pairs:
        assert logprob == pytest.approx(other, abs=TOLERANCE)
        if ours != theirs:
            return


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of several ranks, of all matrices or some."""
    where = tmp_path_factory.mktemp("adapters")
    return {
        "all": write_adapter(where / "all", 1),
        "few": write_adapter(where / "few", 2, rank=2, modules=("q_proj", "v_proj")),
        "root": write_adapter(where / "root", 3, rank=9, alpha=6, use_rslora=True, modules=("down_proj", "o_proj")),
    }


@pytest.fixture(scope="module")
def expected(adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Answer]]:
    """What the merged models say, and the model alone."""
    where, said = tmp_path_factory.mktemp("merged"), {}
    for name, folder in {"": None, **adapters}.items():
        with LLM(merged(where / name, folder) if folder else demo_folder(), **CPU) as llm:
            said[name] = llm.generate(PROMPTS, greedy())
    return said


def test_adapters_say_what_merged_models_say_alone_and_in_one_batch(
    adapters: dict[str, Path], expected: dict[str, list[Answer]], tmp_path: Path
) -> None:
    with LLM(adapters=adapters, journal=tmp_path, max_loras=4, chunked_prefill_size=16, debug=True, **CPU) as llm:
        for name, answers in expected.items():
            for answer, other in zip(llm.generate(PROMPTS, greedy(name)), answers, strict=True):
                same(answer, other)
        names = [name for _ in PROMPTS for name in expected]
        prompts = [prompt for prompt in PROMPTS for _ in expected]
        together = llm.generate(prompts, [greedy(name) for name in names])
        for answer, name, prompt in zip(together, names, prompts, strict=True):
            same(answer, expected[name][PROMPTS.index(prompt)])
    said = {tuple(token for answer in answers for token in answer.token_ids) for answers in expected.values()}
    assert len(said) == len(expected)  # or all of it shows nothing
    replay(read_journal(tmp_path))
