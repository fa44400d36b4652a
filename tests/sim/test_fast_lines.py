"""A line of the fast path is the cost model, over the whole range for which it is said to hold."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from lockstep.sim.catalogue import load_gpu, load_model
from lockstep.sim.cost import (
    UNCALIBRATED,
    BatchShape,
    ContextBends,
    CostModel,
    Duration,
    Parallelism,
    extend_shape,
    roofline_model,
)
from lockstep.sim.cost.base_model import base_cost_model
from lockstep.sim.fast.lines import CHUNK, NEVER, line_for, no_lines
from lockstep.sim.fast.state import LINE_ERROR_US
from lockstep.sim.run.assemble import assemble
from lockstep.sim.scenario.scenario import Scenario

LONGEST = 40_000


def decodes(rows: int, context_tokens: int) -> BatchShape:
    return BatchShape(decode_rows=rows, decode_context_tokens=context_tokens, sampled_rows=rows)


class Formula:
    """A cost model of decodes by a formula of rows and context."""

    def __init__(self, formula: Callable[[int, int], float], bends: tuple[int, ...] | None = ()) -> None:
        self.formula, self.bends, self.asked = formula, bends, 0

    def batch_us(self, shape: BatchShape) -> Duration:
        self.asked += 1
        return Duration(self.formula(shape.decode_rows, shape.decode_context_tokens))

    def decode_bends(self, rows: int) -> tuple[int, ...] | None:
        return self.bends

    def chunk_bends(self, tokens: int) -> tuple[int, ...] | None:
        return None

    def describe(self) -> dict[str, object]:
        return {}


@pytest.mark.parametrize(
    ("name", "engine"),
    [
        ("llama-3.1-8b", "none"),
        ("llama-3.1-8b", "vllm"),
        ("gpt-oss-20b", "vllm"),
        ("gemma-3-27b", "none"),
        ("deepseek-v3", "none"),
        ("qwen3.5-27b", "sglang"),
    ],
)
def test_lines_of_the_catalogues_models_are_these_models(name: str, engine: str) -> None:
    model, gpu = load_model(name), load_gpu("h200")
    cost: CostModel = base_cost_model(model, gpu)
    if engine != "none":
        cost = assemble(Scenario(model=name, gpu="h200", workload="gen:rate=1", limit=1, engine=engine), {}).cost
    rng = np.random.default_rng(5)
    lines = no_lines(1, 600)[0]
    for rows, tokens in ((1, 0), (3, 0), (40, 0), (600, 0), (0, 512), (0, 8)):
        for context_tokens in rng.integers(rows, max(rows, 1) * LONGEST, 20).tolist():

            def shape(context: int) -> BatchShape:
                return decodes(rows, context) if rows else extend_shape(tokens, context, sampled=False)  # noqa: B023

            for _ in range(2):  # the second extend by as many tokens has a line
                line_for(cost, lines, shape(context_tokens), LONGEST)
            low, high, at_low, slope, of_tokens = lines[rows or CHUNK].tolist()
            if not rows and model.linear_layers:
                assert high == NEVER
                break  # chunks of linear attention are rounded
            assert low <= context_tokens <= high
            assert of_tokens == tokens
            for other in {int(low), context_tokens, *rng.integers(low, high, 5).tolist(), int(high)}:
                took_us = cost.batch_us(shape(other)).mean_us
                assert abs(at_low + slope * (other - low) - took_us) < LINE_ERROR_US / 2


def test_a_line_ends_where_the_cost_model_bends() -> None:
    floor = Formula(lambda rows, context: max(10_000.0, 3.0 * context))  # bends upwards, which is not stated
    window = Formula(lambda rows, context: 5.0 * min(context, 700) + context, (700,))  # it bends downwards, as stated
    for cost, bend in ((floor, 10_000.0 / 3.0), (window, 700.0)):
        lines = no_lines(1, 8)[0]
        for context_tokens in (20, 690, 710, 3_300, 3_400, 30_000):
            line_for(cost, lines, decodes(8, context_tokens), 5_000)
            low, high = lines[8, :2]
            assert low <= context_tokens <= high
            assert high <= bend or bend <= low


def test_a_line_is_looked_for_once() -> None:
    cost = Formula(lambda rows, context: 7.0 + 0.25 * context)
    lines = no_lines(1, 4)[0]
    for context_tokens in range(0, 8_000, 10):
        line_for(cost, lines, decodes(2, context_tokens), 4_000)
    assert lines[2].tolist() == [0.0, 8_000.0, 7.0, 0.25, 0.0]
    assert cost.asked == 3


@pytest.mark.parametrize(
    "cost",
    [
        Formula(lambda rows, context: context**2.0),
        Formula(lambda rows, context: 2.0 * context, None),
        roofline_model(load_model("llama-3.1-8b"), load_gpu("h200"), Parallelism(tp=2, attention_dp=2)),
    ],
    ids=["curved", "unknown", "shards"],
)
def test_other_cost_models_have_no_line(cost: CostModel) -> None:
    lines = no_lines(1, 4)[0]
    line_for(cost, lines, decodes(3, 500), 4_000)
    assert lines[3, 1] == NEVER
    for context_tokens in (0, 512, 1_024):
        line_for(cost, lines, extend_shape(512, context_tokens, sampled=False), 4_000)
    assert lines[CHUNK, 1] == NEVER
    if isinstance(cost, Formula):
        asked = cost.asked
        line_for(cost, lines, decodes(3, 600), 4_000)
        assert cost.asked == asked  # and none is looked for again


def test_a_calibration_with_a_spread_has_no_line() -> None:
    base = roofline_model(load_model("llama-3.1-8b"), load_gpu("h200"))
    assert isinstance(base, ContextBends)
    assert base.decode_bends(3) == ()
    spread = type(UNCALIBRATED)(engine="none", spread=0.1, residuals=UNCALIBRATED.residuals)
    cost = spread.cost_model(base)
    assert isinstance(cost, ContextBends)
    assert cost.decode_bends(3) is cost.chunk_bends(3) is None
