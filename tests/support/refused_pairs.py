"""Pairs of features that engines on tensors refuse by name, and the words of their errors."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lockstep.core.contract.errors import ConfigError
from lockstep.runtime import LLM
from lockstep.runtime.llm import demo_folder
from tests.support.adapters import write_adapter
from tests.support.architectures import save_architecture
from tests.support.model_engines import CPU, EXPERTS, HALVES
from tests.support.small_llm import write_weights


@dataclass(frozen=True, kw_only=True)
class Refused:
    """Options that an engine refuses together.

    Args:
        name: the pair, as in the table of docs/distributed.md.
        words: a part of the error, as a regular expression.
        model: the model of the engine; `windows` has pages of windows of their own.
    """

    name: str
    options: dict[str, Any]
    words: str
    model: Literal["demo", "experts", "windows"] = "demo"


RANKS: dict[str, Any] = {"tp": 2, "attention_dp": 2, "rank_schedulers": True}
DRAFTER: dict[str, Any] = {"speculative_method": "draft_model", "draft_model": "demo"}
NGRAM: dict[str, Any] = {"speculative_method": "ngram", "num_speculative_tokens": 3}
WINDOWS: dict[str, Any] = {"swa_full_tokens_ratio": 0.5}
ON_RANKS = "data-parallel attention with `--pp`, pages of windows or a head that drafts"
IN_STAGES = "stages with pages of windows or a head that drafts"
SPLIT = "a draft model with `--tp`"
IN_HALVES = "halves with drafts, forced tokens, several steps, stages, pools of windows or states"
REFUSED: list[Refused] = [
    Refused(
        name="data-parallel attention with adapters", options={**RANKS, "max_loras": 2},
        words="adapters are of the requests of one",
    ),
    *(
        Refused(name=ON_RANKS, options={**RANKS, **options}, words=words)
        for options, words in (
            ({"pp": 2}, "`pp` is 2, but `attention_dp` is 2"),
            (WINDOWS, "`swa_full_tokens_ratio` is 0.5, but `attention_dp` is 2"),
            ({"speculative_method": "mtp"}, "`speculative_method` is mtp, but 2 processes run the model"),
            ({**DRAFTER, "speculative_method": "eagle"}, "`draft_model` is a head, .*, but 2 processes"),
        )
    ),
    *(
        Refused(name=IN_STAGES, options={"pp": 2, **options}, words=words)
        for options, words in (
            (WINDOWS, "`swa_full_tokens_ratio` is 0.5, but `pp` is 2"),
            ({"speculative_method": "mtp"}, "`speculative_method` is mtp, but 2 processes run the model"),
            ({**DRAFTER, "speculative_method": "eagle"}, "`draft_model` is a head, .*, but 2 processes"),
        )
    ),
    Refused(
        name=SPLIT, options={"tp": 2, "pp": 2, **DRAFTER}, words="`tp` is 2: a draft model is not split",
    ),
    Refused(
        name="stages with several steps per launch", options={"pp": 2, "decode_steps_per_launch": 3},
        words="would keep all stages but one idle",
    ),
    Refused(
        name="adapters in folders with experts", options={"lora": {"a": ""}}, words="mlp.experts", model="experts"
    ),
    *(
        Refused(name=IN_HALVES, options={"tp": 2, **HALVES, **options}, words=f"`two_batch_overlap` is on.*{words}")
        for options, words in (
            (NGRAM, "rows that verify drafts have several tokens"),
            ({"jump_forward_tokens": 4}, "rows with forced tokens have several tokens"),
            ({"decode_steps_per_launch": 3}, "the steps of one launch"),
            ({"pp": 2}, "microbatches keep the other stages busy"),
        )
    ),
    Refused(
        name=IN_HALVES, options={"tp": 2, **HALVES, **WINDOWS}, words="which is not split in halves", model="windows",
    ),
]  # fmt: skip


def refusal(one: Refused, folder: Path) -> str:
    """Return the error of an engine with refused options, in an empty folder.

    Raises: AssertionError if the engine starts, or its error has other words.
    """
    model = demo_folder()
    if one.model != "demo":
        model = folder / "model"
        model.mkdir()
        if one.model == "experts":
            write_weights(model, EXPERTS)
        else:
            save_architecture(model, "Gemma 3")
    options = dict(one.options)
    if "draft_model" in options:
        options["draft_model"] = str(demo_folder())
    if "lora" in options:
        options["lora"] = {"a": write_adapter(folder / "adapter", 1, model=model)}
    try:
        with LLM(model, **{**CPU, "pages": 64, "page_size": 16, **options}):
            raise AssertionError(f"{one.name}: an engine with {one.options} starts")
    except ConfigError as error:
        if not re.search(one.words, str(error), re.DOTALL):
            raise AssertionError(f"{one.name}: the error has other words: {error}") from error
        return str(error)
