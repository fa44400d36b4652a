"""The time of a batch is one list of terms: a term added in one place is in every cost model and every breakdown."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

import lockstep.sim.cost
import lockstep.sim.cost.roofline as roofline_module
from lockstep.sim.catalogue import load_gpu, load_model
from lockstep.sim.cost import (
    UNCALIBRATED,
    BatchShape,
    CalibratedModel,
    CatalogueError,
    Parallelism,
    RooflineModel,
    WeightsDtype,
    decode_shape,
    extend_shape,
    roofline_model,
)
from lockstep.sim.cost.base_model import base_cost_model
from lockstep.sim.cost.calibration import Correction
from lockstep.sim.cost.stages import PipelineModel
from lockstep.sim.cost.tables import MeasuredModel, OperatorTables
from lockstep.sim.cost.terms import LAUNCH, CostTerm, TermSum, TermUs, new_tokens
from tests.support.shapes import shapes

GPU, MODEL = load_gpu("h200"), load_model("deepseek-v3")
SHARDED = Parallelism(tp=8, ep=8, attention_dp=8)
MIXED = BatchShape(
    extend_rows=2, extend_tokens=6000, extend_context_tokens=900, extend_pairs=9_000_000, decode_rows=40,
    decode_context_tokens=60_000, sampled_rows=42,
)  # fmt: skip
CORRECTION = Correction(kernels=1.5, collectives=0.5, step_us=40.0, row_us=2.0, collective_us=3.0)


def measured() -> MeasuredModel:
    return MeasuredModel(roofline_model(MODEL, GPU, 8), OperatorTables(GPU.name, ()))


def calibrated(correction: Correction = CORRECTION) -> CalibratedModel:
    calibration = structs.replace(UNCALIBRATED, engine="lockstep", correction=correction)
    return CalibratedModel(roofline_model(MODEL, GPU, SHARDED), calibration, 1.25)


def pipeline() -> PipelineModel:
    cost = base_cost_model(MODEL, GPU, Parallelism(tp=8, ep=8, attention_dp=2, pp=3))
    assert isinstance(cost, PipelineModel)
    return cost


COSTS: dict[str, Callable[[], Any]] = {
    "plain": lambda: roofline_model(MODEL, GPU, 8),
    "attention_dp": lambda: roofline_model(MODEL, GPU, SHARDED),
    "all-to-all": lambda: roofline_model(MODEL, GPU, Parallelism(tp=8, ep=8, attention_dp=4, moe_a2a=True)),
    "linear attention": lambda: roofline_model(load_model("qwen3-next-80b-a3b"), GPU, 4),
    "measured": measured,
    "pipeline": pipeline,
    "calibrated": calibrated,
}
BUILT: dict[str, Any] = {name: build() for name, build in COSTS.items()}


def check_sum(cost: Any, shape: BatchShape) -> None:
    """Compare the breakdown, with terms evaluated one by one, with `batch_us`, which caches sums."""
    terms: dict[str, float] = cost.terms_us(shape)
    assert sum(terms.values()) == pytest.approx(cost.batch_us(shape).mean_us, rel=1e-9), shape
    assert all(us >= 0.0 for us in terms.values()), terms


@given(st.sampled_from(sorted(BUILT)), shapes(extends_max=3, decodes_max=600, context_tokens_max=50_000))
def test_the_terms_of_every_cost_model_sum_to_the_time_of_the_batch(name: str, shape: BatchShape) -> None:
    check_sum(BUILT[name], shape)


def test_a_batch_that_takes_as_long_as_its_launches_is_summed_from_terms_too() -> None:
    for name, cost in BUILT.items():
        terms = cost.terms_us(extend_shape(1))
        assert terms[LAUNCH] > 1_000.0, name  # kernels are launched one by one
        check_sum(cost, extend_shape(1))


# ------------------------------------------------------------------------------------------------------ one more term


def barrier_us(batch: BatchShape, own: BatchShape) -> float:
    """A term of every scope: 700 us, and 1 us for every new token of the fullest shard."""
    return 700.0 + new_tokens(own)


@pytest.fixture(params=["tokens", "decode", "extend", "rows"])
def one_more_term(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Add a term in the one place where terms are added."""

    def barrier_terms(model: RooflineModel) -> Iterator[CostTerm]:
        yield CostTerm("barrier", request.param, barrier_us)

    monkeypatch.setattr(roofline_module, "TERMS", (*roofline_module.TERMS, barrier_terms))


@pytest.mark.usefixtures("one_more_term")
@pytest.mark.parametrize("name", sorted(COSTS))
def test_a_term_added_in_one_place_is_in_every_cost_model_and_its_breakdown(name: str) -> None:
    before, cost = BUILT[name], COSTS[name]()
    own = cost.own_shape(MIXED) if isinstance(cost, TermSum) else None
    terms: dict[str, float] = cost.terms_us(MIXED)
    added_us = cost.batch_us(MIXED).mean_us - before.batch_us(MIXED).mean_us
    assert added_us == pytest.approx(terms["barrier"])
    if own is not None:
        assert added_us == pytest.approx(barrier_us(MIXED, own))
        assert (new_tokens(own) < new_tokens(MIXED)) == (name in ("attention_dp", "all-to-all"))
    check_sum(cost, MIXED)


@pytest.mark.usefixtures("one_more_term")
def test_every_stage_of_a_pipeline_has_the_new_term() -> None:
    cost = pipeline()
    before_us, after_us = BUILT["pipeline"].stage_us(MIXED), cost.stage_us(MIXED)
    shard = cost.stages[0].own_shape(MIXED)
    assert [b - a for a, b in zip(before_us, after_us, strict=True)] == pytest.approx([barrier_us(MIXED, shard)] * 3)


@pytest.mark.usefixtures("one_more_term")
def test_a_calibration_scales_the_new_term_by_name() -> None:
    cost = calibrated()
    base = cost.base
    assert cost.terms_us(MIXED)["barrier"] == pytest.approx(1.25 * 1.5 * base.terms_us(MIXED)["barrier"])


def test_a_new_collective_is_counted_and_scaled_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def terms(model: RooflineModel) -> Iterator[CostTerm]:
        yield CostTerm("barrier", "tokens", barrier_us, kernels=7, is_collective=True)

    before = BUILT["plain"]
    monkeypatch.setattr(roofline_module, "TERMS", (*roofline_module.TERMS, terms))
    cost = roofline_model(MODEL, GPU, 8)
    assert (cost.collectives, cost.kernels) == (before.collectives + 7, before.kernels + 7)
    assert cost.collectives_us(500) == pytest.approx(before.collectives_us(500) + 1200.0)
    corrected = CalibratedModel(cost, structs.replace(UNCALIBRATED, engine="lockstep", correction=CORRECTION))
    assert corrected.terms_us(decode_shape(500, 9))["barrier"] == pytest.approx(0.5 * 1200.0)
    check_sum(corrected, decode_shape(500, 9))


def test_tables_replace_terms_by_name() -> None:
    base = roofline_model(MODEL, GPU, SHARDED)
    zero: TermUs = lambda batch, own: 0.0  # noqa: E731
    without = TermSum(base.with_terms({"experts": zero}), base.shards, base.launching)
    saved_us = base.batch_us(MIXED).mean_us - without.batch_us(MIXED).mean_us
    assert saved_us == pytest.approx(base.terms_us(MIXED)["experts"])
    with pytest.raises(CatalogueError, match=r"there is no cost term expert\nhint: terms are qkv_a, .*experts"):
        base.with_terms({"expert": zero})


# -------------------------------------------------------------------------------------------------- a term left out


def test_every_builder_of_terms_is_listed() -> None:
    """A builder is a function or method with a name that ends with `_terms` and cost terms as its annotated result."""
    makes = ("Iterable[CostTerm]", "Iterator[CostTerm]")
    places = [vars(roofline_module), vars(RooflineModel)]
    found = [one for place in places for name, one in place.items() if name.endswith("_terms") and callable(one)]
    builders = {one for one in found if one.__annotations__.get("return") in makes and not inspect.isabstract(one)}
    assert builders == set(roofline_module.TERMS)


def leave_out(cost: TermSum, where: str) -> None:
    """Leave the term `barrier`, one of the rows, out of the sum of the hot path or out of the breakdown."""
    if where == "batch_us":
        cost._has_rows = False
    else:
        cost.terms = tuple(term for term in cost.terms if term.name != "barrier")


@pytest.mark.parametrize("where", ["batch_us", "breakdown"])
@pytest.mark.parametrize("name", ["plain", "attention_dp", "measured", "pipeline", "calibrated"])
def test_a_term_left_out_is_noticed_by_the_sum(name: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def terms(model: RooflineModel) -> Iterator[CostTerm]:
        yield CostTerm("barrier", "rows", barrier_us)

    monkeypatch.setattr(roofline_module, "TERMS", (*roofline_module.TERMS, terms))
    cost = COSTS[name]()
    check_sum(cost, MIXED)
    parts = {"calibrated": lambda: cost.base, "pipeline": lambda: cost.stages[1]}
    leave_out(parts.get(name, lambda: cost)(), where)
    with pytest.raises(AssertionError):
        check_sum(cost, MIXED)


# ----------------------------------------------------------------------------------------------------- lists of terms


def test_names_of_terms_differ_and_scopes_are_known() -> None:
    base = roofline_model(MODEL, GPU, 8)
    zero: TermUs = lambda batch, own: 0.0  # noqa: E731
    with pytest.raises(CatalogueError, match="names of cost terms must differ, got experts more than once"):
        TermSum((*base.terms, CostTerm("experts", "rows", zero)), 1, base.launching)
    with pytest.raises(CatalogueError, match="names of cost terms must differ, got launch"):
        TermSum((*base.terms, CostTerm(LAUNCH, "rows", zero)), 1, base.launching)
    with pytest.raises(CatalogueError, match=r"scope of the cost term x must be one of tokens, .*, got `layers`"):
        TermSum((CostTerm("x", "layers", zero),), 1, base.launching)  # type: ignore[arg-type]
    with pytest.raises(CatalogueError, match="`tokens`, for it is a collective, got `rows`"):
        TermSum((CostTerm("x", "rows", zero, is_collective=True),), 1, base.launching)


def test_terms_have_their_own_constants_and_the_model_has_all_of_them() -> None:
    cost = roofline_model(MODEL, GPU, SHARDED)
    by_name = {term.name: set(term.constants) for term in cost.terms}
    assert by_name["attention_decode"] == {
        "attention_decode_read_gbs", "latent_decode_tflops", "latent_decode_latency_us",
    }  # fmt: skip
    assert by_name["experts"] == {"weight_read_gbs", "fp8_moe_tflops", "fp8_gemm_latency_us"}
    launching = {"eager_kernel_us", "latent_eager_us", "forward_fixed_us"}
    assert set(cost.constants) == set[str]().union(*by_name.values()) | launching
    assert set(cost.describe()["constants"]) == set(cost.constants)


def test_experts_in_mxfp4_gain_nothing_from_the_memory_of_an_h200() -> None:
    """Without fp4 products weights are widened by the multiprocessors, which H100 and H200 have in common."""
    gptoss, batch = load_model("gpt-oss-120b"), decode_shape(16, 16_000)

    def experts(gpu: str, dtype: WeightsDtype) -> tuple[float, set[str]]:
        cost = roofline_model(gptoss, load_gpu(gpu), Parallelism(tp=2), weights_dtype=dtype)
        (term,) = (term for term in cost.terms if term.name == "experts")
        return term.us(batch, batch), set(term.constants)

    h100, h200, b200 = (experts(gpu, "mxfp4") for gpu in ("h100", "h200", "b200"))
    assert h200[0] == pytest.approx(h100[0], rel=0.02)
    assert b200[0] < 0.6 * h200[0]
    assert [("widened_read_gbs" in names) for _, names in (h100, h200, b200)] == [False, True, False]
    (wide_h100, _), (wide_h200, read) = experts("h100", "bf16"), experts("h200", "bf16")
    assert wide_h200 < 0.75 * wide_h100
    assert "widened_read_gbs" not in read


def test_a_term_of_tokens_depends_on_numbers_of_tokens_alone() -> None:
    """Sums of these terms are cached by the number of tokens: other sums of a shape must not change them."""
    for name, cost in BUILT.items():
        for term in cost.terms if isinstance(cost, TermSum) else ():
            if term.scope == "tokens":
                assert term.us(decode_shape(500, 9), decode_shape(70, 9)) == term.us(
                    extend_shape(500, 100), extend_shape(70, 1)
                ), (name, term.name)


def test_importing_a_module_of_the_package_gives_the_module() -> None:
    """No function or class that the package exports has the name of one of its modules."""
    for found in pkgutil.iter_modules(lockstep.sim.cost.__path__):
        module = importlib.import_module(f"lockstep.sim.cost.{found.name}")
        assert inspect.ismodule(getattr(lockstep.sim.cost, found.name))
        assert getattr(lockstep.sim.cost, found.name) is module
    assert isinstance(roofline_module, ModuleType)
