"""Layouts of an engine over GPUs: nothing is lost between ranks, plain layouts cost as before, batches keep order."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lockstep.core.contract.commands import BatchPlan
from lockstep.core.journal.reader import read_journal
from lockstep.core.journal.replay import replay
from lockstep.sim.catalogue import load_calibration, load_gpu, load_model
from lockstep.sim.cli.calibrate import calibrate
from lockstep.sim.cli.plan import plan as plan_command
from lockstep.sim.cli.simulate import simulate as simulate_command
from lockstep.sim.cluster.intervals import intervals_of
from lockstep.sim.cluster.result import ClusterRun
from lockstep.sim.cluster.scenario import ClusterScenario, parse_engines
from lockstep.sim.cluster.setup import assemble_cluster
from lockstep.sim.cluster.simulate import simulate_cluster
from lockstep.sim.cost import (
    BatchShape,
    CapacityError,
    Parallelism,
    RooflineModel,
    decode_shape,
    extend_shape,
    kv_capacity,
    roofline_model,
)
from lockstep.sim.cost.base_model import base_cost_model
from lockstep.sim.cost.calibration import Case
from lockstep.sim.cost.experts import EXACT_MAX, expected_max_load, expected_max_touched
from lockstep.sim.cost.hardware import (
    MEASURED_ONLY,
    NETWORK_GBS,
    NETWORK_LATENCY_US,
    AllReduce,
    all_gather_of,
    all_reduce_of,
)
from lockstep.sim.cost.models import WEIGHT_BYTES, ceil_div
from lockstep.sim.cost.stages import PipelineModel, stages_of
from lockstep.sim.cost.terms import fullest_shard
from lockstep.sim.host.pipeline import PipelinedDevice
from lockstep.sim.metrics.slo import Slo
from lockstep.sim.plan.question import QUICK, Length, Question, parse_search
from lockstep.sim.plan.search import prepare
from lockstep.sim.run.assemble import assemble
from lockstep.sim.run.simulate import Run, simulate
from lockstep.sim.scenario.scenario import Scenario
from lockstep.sim.scenario.settings import parse_setting
from tests.support.shapes import shapes

KINDS = ("qwen3-8b", "qwen3-30b-a3b", "deepseek-v3", "gpt-oss-120b", "qwen3-next-80b-a3b", "gemma-3-27b")
EXPERT_KINDS = ("qwen3-30b-a3b", "deepseek-v3", "gpt-oss-120b", "qwen3-next-80b-a3b")
LAYOUTS = (
    Parallelism(tp=8, ep=8),
    Parallelism(tp=8, ep=4, expert_cv=0.7),
    Parallelism(tp=8, attention_dp=8),
    Parallelism(tp=8, ep=8, attention_dp=8),
    Parallelism(tp=8, ep=2, attention_dp=4),
    Parallelism(tp=8, ep=8, attention_dp=8, moe_a2a=True),
    Parallelism(tp=8, ep=8, attention_dp=4, moe_a2a=True, expert_cv=1.5),
    Parallelism(tp=8, ep=8, moe_a2a=True),
)
GPU = load_gpu("h200")
ALL_REDUCES_BEFORE = {  # of the catalogue at the time of the figures, when sizes of tables were read as bytes
    "h200": {2: (2.62, 157.0, 12.4, 276.0), 8: (4.24, 98.8, 13.8, 318.0)},
    "l40s": {2: (5.61, 9.82, 19.1, 22.4)},
}
MODELS: dict[tuple[str, Parallelism], RooflineModel] = {
    (name, split): roofline_model(load_model(name), GPU, split)
    for name in ("deepseek-v3", "gpt-oss-120b")
    for split in LAYOUTS
}
any_layout = st.sampled_from(sorted(MODELS, key=str))


# --------------------------------------------------------------------------------------------------- earlier figures


def test_tensor_parallelism_alone_costs_what_it_did_to_the_last_bit() -> None:
    """Compared with figures of the release without other layouts, except where attention has its own constants since.

    Batches of deepseek-v3 and qwen3-next-80b-a3b are compared with the first release with latents and the delta rule.
    """
    before = json.loads((Path(__file__).parent / "cost_before_layouts.json").read_text())
    asked = [
        *(decode_shape(*of) for of in ((1, 10), (7, 1000), (64, 2000), (600, 300))),
        *(extend_shape(17), extend_shape(512, 2048), extend_shape(8192, 0, False)),
        BatchShape(3, 700, 1500, 400_000, 33, 40_000, 34),
    ]
    for name, figures in before.items():
        model, gpu_name, tp, dtype = name.split()
        dtype = None if dtype == "own" else dtype
        lines = ALL_REDUCES_BEFORE[gpu_name].items()
        rates = {rate: value for rate, value in load_gpu(gpu_name).measured.items() if rate not in MEASURED_ONLY}
        all_reduce = {n: AllReduce(*line, source="") for n, line in lines}
        gpu = replace(load_gpu(gpu_name), measured=rates, all_reduce=all_reduce)  # without limits that were found since
        for split in (int(tp[2:]), Parallelism(tp=int(tp[2:]))):
            cost = roofline_model(load_model(model), gpu, split, weights_dtype=dtype)  # type: ignore[arg-type]
            assert [cost.batch_us(shape).mean_us for shape in asked] == figures["batch"], name
            assert [cost.collectives_us(tokens) for tokens in (1, 100, 5000)] == figures["collectives"], name
            assert not set(cost.describe()) & {"ep", "attention_dp", "pp", "moe_a2a", "expert_cv", "all_gather"}
            try:
                kv = kv_capacity(load_model(model), gpu, split, weights_dtype=dtype)  # type: ignore[arg-type]
            except CapacityError:
                assert figures["kv"] is None
            else:
                parts = kv.weights_bytes, kv.activation_bytes, kv.runtime_bytes, kv.state_bytes, kv.kv_bytes
                assert [kv.tokens, *parts] == figures["kv"], name
                assert not set(kv.describe()) & {"shards", "stages_weights_bytes"}
    assert len(before) > 20


def test_one_stage_is_no_pipeline() -> None:
    assert type(base_cost_model(load_model("qwen3-8b"), GPU, Parallelism(tp=2))) is RooflineModel


# -------------------------------------------------------------------------------------------------- uneven experts


@pytest.mark.parametrize(("assignments", "ranks"), [(1, 2), (3, 2), (4, 3), (5, 4), (8, 2)])
def test_even_routing_has_the_multinomial_maximum(assignments: int, ranks: int) -> None:
    outcomes = itertools.product(range(ranks), repeat=assignments)
    expected = sum(max(Counter(outcome).values()) for outcome in outcomes) / ranks**assignments
    assert expected_max_load(assignments, ranks, 4) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("assignments", "ranks", "experts", "cv"),
    [(512, 8, 16, 0.0), (40, 8, 4, 1.0), (4096, 8, 16, 1.0), (4096, 64, 2, 1.7), (65_536, 4, 32, 0.5)],
)
def test_the_maximum_is_that_of_drawn_loads(assignments: int, ranks: int, experts: int, cv: float) -> None:
    rng = np.random.default_rng(3)
    loads = []
    for _ in range(4000):
        popularity = rng.gamma(experts / cv**2, size=ranks) if cv else np.ones(ranks)
        loads.append(rng.multinomial(assignments, popularity / popularity.sum()).max())
    error = np.std(loads) / math.sqrt(len(loads))
    assert abs(expected_max_load(assignments, ranks, experts, cv) - np.mean(loads)) < 4.5 * error


@given(
    st.integers(0, 300),
    st.sampled_from((1, 2, 4, 8, 16, 64)),
    st.sampled_from((1, 2, 16)),
    st.sampled_from((0.0, 0.3, 1.0, 3.0)),
)
def test_the_fullest_rank_has_its_share_at_least_and_never_less_for_more(
    assignments: int, ranks: int, experts: int, cv: float
) -> None:
    load = expected_max_load(assignments, ranks, experts, cv)
    assert assignments / ranks <= load <= assignments
    assert expected_max_load(assignments + 1, ranks, experts, cv) >= load
    assert expected_max_load(assignments, 2 * ranks, experts, cv) <= load + 1e-9
    assert expected_max_load(assignments, ranks, experts, cv + 0.5) >= load * (1 - 2e-3)


def test_conditioning_on_the_sum_is_given_up_where_it_does_not_matter() -> None:
    for ranks, cv in ((2, 0.0), (8, 0.0), (64, 0.0), (8, 1.0)):
        steps = np.diff([expected_max_load(n, ranks, 8, cv) for n in range(EXACT_MAX - 3, EXACT_MAX + 5)])
        assert (steps > 0).all()
        assert steps.max() < 1.35 * steps.min()


def test_experts_touched_on_the_fullest_rank() -> None:
    rng = np.random.default_rng(5)
    for tokens in (1, 4, 16, 64):
        most = []
        for _ in range(800):
            hit = np.zeros(256, bool)
            for _ in range(tokens):
                hit[rng.choice(256, 8, replace=False)] = True
            most.append(hit.reshape(8, 32).sum(axis=1).max())
        assert expected_max_touched(tokens, 8, 256, 8) == pytest.approx(np.mean(most), rel=0.03)
    assert expected_max_touched(10_000, 8, 256, 8) == pytest.approx(32)
    assert expected_max_touched(0, 8, 256, 8) == 0
    assert expected_max_touched(5, 4, 4, 2) == 2
    assert expected_max_touched(64, 8, 256, 8, 2.0) < expected_max_touched(64, 8, 256, 8)


def test_uneven_routing_costs_where_ranks_wait_for_each_other() -> None:
    prompt = extend_shape(8192)
    for split in (Parallelism(tp=8, ep=8), Parallelism(tp=8, ep=8, attention_dp=8, moe_a2a=True)):
        even, uneven = (
            roofline_model(load_model("deepseek-v3"), GPU, replace(split, expert_cv=cv)).terms_us(prompt)
            for cv in (0.0, 1.0)
        )
        assert uneven["experts"] > 1.1 * even["experts"]
        for term in ("dispatch", "combine"):
            assert uneven.get(term, 1.0) >= even.get(term, 1.0)


# ---------------------------------------------------------------------------------------------- nothing is lost


@pytest.mark.parametrize("name", EXPERT_KINDS)
def test_all_ranks_together_hold_every_weight(name: str) -> None:
    model = load_model(name)
    whole = {m.name: m.params for m in model.matrices()}
    for split in LAYOUTS[:5]:
        if model.attention.heads % split.attention_tp or getattr(model.attention, "kv_heads", 64) < split.attention_tp:
            continue
        copies = {m.name: split.tp * m.params / whole[m.name] for m in model.matrices(split)}
        for matrix, count in copies.items():
            own = split.attention_dp
            if matrix in ("router", "shared_gate", "qkv_a"):  # whole on every rank
                own = split.tp
            elif matrix.startswith(("gate", "down", "shared", "expert", "lm_head")):
                own = 1
            assert count == pytest.approx(own, rel=1e-4), (matrix, split)


@pytest.mark.parametrize("name", EXPERT_KINDS)
def test_more_expert_ranks_never_raise_the_weights_of_a_rank(name: str) -> None:
    model = load_model(name)
    for tp, attention_dp in ((8, 1), (8, 8), (16, 4)):
        if model.attention.heads % (tp // attention_dp):
            continue
        bytes_by_ep = [
            model.weights_bytes(None, Parallelism(tp=tp, ep=ep, attention_dp=attention_dp)) for ep in (1, 2, 4, 8)
        ]
        assert bytes_by_ep == sorted(bytes_by_ep, reverse=True), (tp, attention_dp)
    whole_experts = [
        model.weights_bytes(None, Parallelism(tp=n, ep=n, attention_dp=n, moe_a2a=True)) for n in (2, 4, 8, 16)
    ]
    assert whole_experts == sorted(whole_experts, reverse=True)
    assert whole_experts[0] > whole_experts[-1]


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("pp", [2, 3, 4, 7])
def test_stages_have_every_layer_once(name: str, pp: int) -> None:
    model = load_model(name)
    stages = stages_of(model, Parallelism(pp=pp))
    assert len(stages) == pp
    for kind in ("layers", "full_layers", "sliding_layers", "linear_layers", "dense_layers", "moe_layers"):
        assert sum(getattr(stage.model, kind) for stage in stages) == getattr(model, kind)
    sizes = [stage.model.layers for stage in stages]
    assert max(sizes) - min(sizes) <= 1
    for stage in stages:
        for kind in ("full_layers", "sliding_layers", "linear_layers"):
            share = getattr(model, kind) * stage.model.layers / model.layers
            assert abs(getattr(stage.model, kind) - share) <= 2
    dtype = model.checkpoint_dtype
    held = sum(stage.weights_bytes(dtype, Parallelism(pp=pp)) for stage in stages)
    tied_copy = model.hidden * model.vocab * 2 * model.tied_embedding
    assert held == pytest.approx(model.weights_bytes() + tied_copy, abs=pp)
    kv = sum(stage.model.kv_bytes_per_token() for stage in stages)
    assert kv == model.kv_bytes_per_token()
    assert WEIGHT_BYTES[dtype]


def test_shards_do_not_share_kv() -> None:
    """Eight ranks that each cache the latent whole, or an eighth of the requests each."""
    model = load_model("deepseek-v3")
    alike = kv_capacity(model, GPU, 8)
    apart = kv_capacity(model, GPU, Parallelism(tp=8, ep=8, attention_dp=8))
    assert apart.kv_bytes_per_token == alike.kv_bytes_per_token
    assert apart.tokens == 8 * apart.shard_tokens == 8 * apart.kv_bytes // apart.kv_bytes_per_token
    assert 5 < apart.tokens / alike.tokens < 8  # attention's weights are on every rank now
    used = apart.weights_bytes + apart.activation_bytes + apart.runtime_bytes + apart.state_bytes + apart.kv_bytes
    assert 0 <= apart.usable_bytes - used < apart.kv_bytes_per_token * apart.page_tokens
    # Grouped-query attention with a KV head per rank loses only the weights in either layout.
    model = load_model("qwen3-next-80b-a3b")
    heads, shards = (kv_capacity(model, GPU, Parallelism(tp=2, attention_dp=dp)) for dp in (1, 2))
    assert 2 * heads.kv_bytes_per_token == shards.kv_bytes_per_token
    assert shards.state_bytes == pytest.approx(heads.state_bytes, rel=0.01)


def test_the_fullest_stage_decides_how_much_kv_fits() -> None:
    model, split = load_model("llama-3.1-70b"), Parallelism(tp=2, pp=2)
    kv = kv_capacity(model, load_gpu("h100"), split)
    assert kv.weights_bytes in kv.stages_weights_bytes
    assert sum(kv.stages_weights_bytes) * 2 == pytest.approx(model.weights_bytes(), rel=1e-3)
    assert kv.tokens > kv_capacity(model, load_gpu("h100"), 4).tokens * 0.95
    with pytest.raises(CapacityError, match=r"with tp 1, pp 2 \(stage 1 of 2\): per GPU weights 70"):
        kv_capacity(model, load_gpu("l40s"), Parallelism(pp=2))


# ------------------------------------------------------------------------------------------------------- the roofline


@given(any_layout, shapes())
def test_terms_sum_to_the_batch(layout: tuple[str, Parallelism], shape: BatchShape) -> None:
    cost = MODELS[layout]
    terms = cost.terms_us(shape)
    assert sum(terms.values()) == pytest.approx(cost.batch_us(shape).mean_us)
    assert all(us >= -1e-6 for us in terms.values()), terms


@given(any_layout, st.integers(0, 40), st.integers(0, 400), st.integers(1, 2000), st.booleans())
def test_more_rows_are_never_faster(
    layout: tuple[str, Parallelism], extends: int, decodes: int, tokens: int, one_extend: bool
) -> None:
    """Rows of equal length: a shape holds sums, so shards assume rows of equal length."""
    cost = MODELS[layout]

    def rows(extends: int, decodes: int) -> BatchShape:
        pairs = extends * tokens * (tokens + 1) // 2
        return BatchShape(extends, extends * tokens, 0, pairs, decodes, decodes * tokens, extends + decodes)

    before = cost.batch_us(rows(extends, decodes)).mean_us
    after = cost.batch_us(rows(extends + one_extend, decodes + (not one_extend))).mean_us
    assert after >= before * (1 - 1e-12)


@given(shapes(), st.sampled_from((2, 3, 8)))
def test_the_fullest_shard_has_its_share_of_rows_and_tokens(shape: BatchShape, shards: int) -> None:
    own = fullest_shard(shape, shards)
    assert own.extend_rows == ceil_div(shape.extend_rows, shards)
    assert own.decode_rows == ceil_div(shape.decode_rows, shards)
    for name in BatchShape.__struct_fields__:
        if name in ("own", "halves"):  # a rank's share, when it is known and not estimated; tokens of a half
            continue
        assert getattr(shape, name) <= shards * getattr(own, name), name
        assert getattr(own, name) <= getattr(shape, name), name
    assert fullest_shard(shape, 1) == shape


def test_attention_of_shards_reads_an_eighth_of_the_latents() -> None:
    model, batch = load_model("deepseek-v3"), decode_shape(256, 20_000)
    alike = roofline_model(model, GPU, 8).terms_us(batch)
    apart = roofline_model(model, GPU, Parallelism(tp=8, ep=8, attention_dp=8)).terms_us(batch)
    flops_ratio = 8  # heads: a rank has all of them instead of an eighth, of an eighth of the rows
    assert alike["attention_decode"] / 8 <= apart["attention_decode"] <= alike["attention_decode"] / 8 * flops_ratio
    assert "all_reduce" not in apart
    assert apart["all_gather"] == apart["reduce_scatter"] > 0
    whole = roofline_model(model, GPU, Parallelism(tp=8, ep=8, attention_dp=8, moe_a2a=True)).terms_us(batch)
    assert {"dispatch", "combine"} <= set(whole)
    assert whole["all_gather"] < apart["all_gather"] / 10  # the three dense layers are left


def test_exchange_counts_its_collectives() -> None:
    model = load_model("deepseek-v3")
    layers, dense = model.layers, model.dense_layers
    calls = [roofline_model(model, GPU, split).collectives for split in LAYOUTS]
    moe = layers - dense
    assert calls == [2 * layers] * 4 + [4 * layers, 2 * layers, 4 * layers, 2 * dense + 4 * moe]
    cost = roofline_model(model, GPU, LAYOUTS[3])
    terms, names = cost.terms_us(decode_shape(800, 1)), ("all_gather", "reduce_scatter")
    assert {term.name for term in cost.terms if term.is_collective} == {*names}
    assert cost.collectives_us(800) == pytest.approx(sum(terms[name] for name in names))


def test_describe_names_the_layout_and_its_constants() -> None:
    split = Parallelism(tp=8, ep=8, attention_dp=4, moe_a2a=True, expert_cv=0.5)
    described = json.loads(json.dumps(roofline_model(load_model("deepseek-v3"), load_gpu("b200"), split).describe()))
    assert {name: described[name] for name in ("ep", "attention_dp", "moe_a2a", "expert_cv")} == {
        "ep": 8, "attention_dp": 4, "moe_a2a": True, "expert_cv": 0.5,
    }  # fmt: skip
    assert "0.58 x link 900" in described["constants"]["dispatch_gbs"]["source"]
    assert set(described["all_gather"]) == {"2", "8"}


# ------------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("model", "layout", "said"),
    [
        ("deepseek-v3", {"tp": 8, "ep": 3}, "ep 3 does not divide tp 8, .*\nhint: --ep 1, 2, 4, 8"),
        ("deepseek-v3", {"tp": 6, "attention_dp": 4}, "attention_dp 4 does not divide tp 6"),
        ("gpt-oss-20b", {"tp": 64, "ep": 64}, "ep 64 is more than the 32 experts of gpt-oss-20b"),
        ("qwen3.5-397b-a17b", {"tp": 3, "ep": 3, "attention_dp": 3}, "ep 3 does not divide the 512 experts"),
        ("qwen3-8b", {"tp": 2, "ep": 2}, "`ep` is for models with experts, qwen3-8b has none; got `2`"),
        ("qwen3-8b", {"tp": 2, "expert_cv": 0.5}, "`expert_cv` is for models with experts"),
        ("qwen3-8b", {"pp": 37}, "pp 37 is more than the 36 layers of qwen3-8b"),
        ("qwen3-8b", {"pp": 0}, "`pp` must be at least 1, got `0`"),
        ("deepseek-v3", {"tp": 8, "ep": 4, "moe_a2a": True}, "ep = tp > 1, got ep 4 and tp 8\nhint: --ep 8"),
        ("deepseek-v3", {"expert_cv": -1.0}, "`expert_cv` must be from 0 to 8, got `-1.0`"),
        ("llama-3.1-70b", {"tp": 24, "attention_dp": 2}, "tp 24 / attention_dp 2 does not divide"),
    ],
)
def test_impossible_layouts_are_one_error_each(model: str, layout: dict[str, Any], said: str) -> None:
    with pytest.raises(CapacityError, match=said):
        base_cost_model(load_model(model), load_gpu("gb200-nvl72"), Parallelism(**layout))
    with pytest.raises(CapacityError, match=said):
        assemble(Scenario(model=model, gpu="gb200-nvl72", workload="gen:n=1", settings={"pages": 99}, **layout))


def test_a_stage_over_several_domains_pays_for_the_network_between_them() -> None:
    one, two = all_reduce_of(GPU, 8), all_reduce_of(GPU, 16)
    assert two.direct_latency_us == one.direct_latency_us + 2 * NETWORK_LATENCY_US.value

    def all_reduce_us(line: AllReduce, gpus: int, size: float) -> float:
        return line.ring_latency_us + 2 * (gpus - 1) / gpus * size / (line.ring_gbs * 1e3)

    size = 64e6
    network_us = 2 * NETWORK_LATENCY_US.value + 2 * 1 / 2 * (size / 8) / (NETWORK_GBS.value * 1e3)
    assert all_reduce_us(two, 16, size) == pytest.approx(all_reduce_us(one, 8, size) + network_us)
    assert two.source.startswith("2 domains of 8: ")
    gather, gathers = all_gather_of(GPU, 8), all_gather_of(GPU, 16)
    assert gathers.latency_us == gather.latency_us + NETWORK_LATENCY_US.value
    assert gathers.gbs < gather.gbs


def test_wide_expert_parallelism_over_nodes_is_priced_and_named() -> None:
    layouts = [Parallelism(tp=gpus, ep=gpus, attention_dp=gpus, moe_a2a=True) for gpus in (8, 16)]
    near, wide = (base_cost_model(load_model("deepseek-v3"), GPU, layout) for layout in layouts)
    batch = decode_shape(512, 4096)
    assert wide.terms_us(batch)["dispatch"] > near.terms_us(batch)["dispatch"]
    setup = assemble(
        Scenario(model="deepseek-v3", gpu="h200", workload="gen:n=1", tp=16, ep=16, attention_dp=16, moe_a2a=True)
    )
    said = "tp 16 spans 2 nodes of 8 GPUs: the network between them is not measured"
    assert any(said in one for one in setup.doubts())


@pytest.mark.parametrize(("gpu", "doubted"), [("rtx4090", True), ("l40s", False), ("h100", False)])
def test_collectives_over_pcie_that_are_not_measured_are_named(gpu: str, doubted: bool) -> None:
    setup = assemble(Scenario(model="qwen3-8b", gpu=gpu, workload="gen:n=1", tp=4))
    assert any("over PCIe: collectives of" in one for one in setup.doubts()) == doubted
    if doubted:  # of the only measured GPU of this generation over PCIe
        measured, taken = all_reduce_of(load_gpu("l40s"), 4), all_reduce_of(load_gpu(gpu), 4)
        assert taken.ring_gbs == pytest.approx(measured.ring_gbs, rel=0.05)
        assert taken.direct_gbs == pytest.approx(measured.direct_gbs, rel=0.05)


def test_stages_may_span_domains() -> None:
    inside = base_cost_model(load_model("deepseek-v3"), GPU, Parallelism(tp=4, pp=2))
    across = base_cost_model(load_model("deepseek-v3"), GPU, Parallelism(tp=8, pp=2))
    assert isinstance(inside, PipelineModel)
    assert isinstance(across, PipelineModel)
    assert inside.send_us(8192) < across.send_us(8192)
    assert across.describe()["constants"]["send_gbs"]["source"].startswith("estimate")


def test_a_calibration_reports_that_it_has_not_seen_a_layout() -> None:
    chat = "gen:n=5,rate=9"
    scenario = Scenario(
        model="qwen3-30b-a3b", gpu="h100", workload=chat, tp=2, ep=2, calibration="vllm-h100",
    )  # fmt: skip
    said = "the calibration was made without ep: its correction does not cover that"
    assert said in simulate(assemble(scenario)).remarks()
    assert said not in simulate(assemble(replace(scenario, ep=1))).remarks()
    said = "the calibration was made without pp: its correction and intervals do not cover that"
    staged = simulate(assemble(replace(scenario, ep=1, pp=2)))
    assert said.replace("correction and intervals do", "correction does") in staged.remarks()
    bare = replace(scenario, calibration=None, engine="none", ep=1, attention_dp=2)
    assert "engine vllm was measured without attention_dp" in simulate(assemble(replace(bare, engine=None))).remarks()
    said = "intervals are those of engines without attention_dp: they do not cover that"
    runs: list[Run | ClusterRun] = [simulate(assemble(bare))]
    runs.append(simulate_cluster(assemble_cluster(ClusterScenario(base=bare, replicas=2))))
    for run in runs:
        assert said not in run.remarks(), "there are no intervals"
        assert said in replace(run, intervals=intervals_of(run)).remarks()


def test_a_calibration_from_points_with_experts_over_ranks_names_them() -> None:
    calibration = load_calibration("sglang-h100")
    split = Parallelism(tp=4, ep=4)
    seen = type(calibration)(
        **{
            **{name: getattr(calibration, name) for name in calibration.__struct_fields__},
            "notes": (f"on {split}: 6 rows",),
        }
    )
    case = Case("qwen3-32b", "H100-SXM", split)
    assert any("without ep" in line for line in calibration.doubts(case, 1))
    assert not any("without ep" in line for line in seen.doubts(case, 1))


# ----------------------------------------------------------------------------------------------------------- pipelines


def pipeline(name: str = "qwen3-8b", **layout: int) -> PipelineModel:
    cost = base_cost_model(load_model(name), load_gpu("h100"), Parallelism(**layout))
    assert isinstance(cost, PipelineModel)
    return cost


@given(shapes(decodes_max=100), st.sampled_from((2, 3, 4)))
def test_a_batch_alone_takes_its_stages_and_sends(shape: BatchShape, pp: int) -> None:
    cost = pipeline(pp=pp)
    whole = roofline_model(load_model("qwen3-8b"), load_gpu("h100")).batch_us(shape).mean_us
    alone = cost.batch_us(shape).mean_us
    if not shape.extend_rows + shape.decode_rows:
        assert alone == 0
        return
    assert sum(cost.terms_us(shape).values()) == pytest.approx(alone)
    assert alone == pytest.approx(
        sum(cost.stage_us(shape)) + (pp - 1) * cost.send_us(shape.extend_tokens + shape.decode_rows)
    )
    assert alone >= whole * (1 - 1e-9)  # the same work, and the transfers between stages
    assert max(cost.stage_us(shape)) >= whole / pp * 0.98
    assert cost.scaled(1.5).batch_us(shape).mean_us == pytest.approx(1.5 * alone)


class Watched(PipelinedDevice):
    """Records its shapes and the start of each run."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.seen: list[tuple[BatchPlan, BatchShape, int]] = []
        self.ran: list[tuple[int, int]] = []

    def launch(self, plan: BatchPlan, shape: BatchShape, handed_over_us: int) -> None:
        super().launch(plan, shape, handed_over_us)
        self.seen.append((plan, shape, handed_over_us))
        self.ran.append((self.queue[-1].started_us, self.queue[-1].finished_us))


@pytest.mark.parametrize("overlap_depth", [0, 1, 2])
@pytest.mark.parametrize("batching", ["prefill_first", "mixed"])
@pytest.mark.parametrize("steps", [1, 3])
def test_batches_keep_the_order_of_stages_and_of_tokens(
    monkeypatch: pytest.MonkeyPatch, overlap_depth: int, batching: str, steps: int
) -> None:
    if steps > 1 and batching == "mixed":
        pytest.skip("several decodes a launch are of decode batches")
    devices: list[Watched] = []

    def watch(*args: Any, **more: Any) -> Watched:
        devices.append(Watched(*args, **more))
        return devices[-1]

    monkeypatch.setattr("lockstep.sim.run.simulate.device_type_of", lambda cost: watch)
    scenario = Scenario(
        model="qwen3-8b",
        gpu="h100",
        pp=3,
        workload="gen:n=24,rate=30,input=uniform:100:2500,output=uniform:1:40",
        settings={
            "overlap_depth": overlap_depth,
            "batching": batching,
            "chunked_prefill_size": 700,
            "decode_steps_per_launch": steps,
        },
    )
    run = simulate(assemble(scenario), check_every=40)
    assert run.data.summary["requests"]["completed"] == 24
    (device,) = devices
    cost = pipeline(pp=3)
    ready_us: dict[int, int] = {}
    free_us = [0.0] * 3
    overlapping = 0
    for (plan, shape, handed_over_us), (begun_us, finished_us) in zip(device.seen, device.ran, strict=True):
        tokens = shape.extend_tokens + shape.decode_rows
        needed_us = [ready_us.get(row, 0) for row in plan.rows[plan.extend_rows :].tolist()]
        assert begun_us >= handed_over_us
        assert begun_us >= max(needed_us, default=0)  # the newest token of every decoding row was sampled
        assert begun_us >= free_us[0] - 1
        assert finished_us >= free_us[2]
        overlapping += begun_us < free_us[2] - 1
        took_us = cost.stage_us(shape)
        # The shortest way: no other batch in the stages, and for several decodes as many passes through them.
        assert finished_us - begun_us >= plan.steps * sum(took_us) + (plan.steps - 1) * cost.send_us(tokens) - 2
        free_us = [begun_us + plan.steps * took_us[0], 0.0, finished_us]
        for row in plan.rows[plan.sample_rows].tolist():
            ready_us[row] = finished_us + math.floor(cost.send_us(1))
    assert (overlapping > 0) == (overlap_depth > 0)


def test_chunks_of_a_prompt_follow_each_other_without_a_gap() -> None:
    """Eight chunks through two stages take nine stage times, not sixteen."""
    scenario = Scenario(
        model="qwen3-8b", gpu="h100", workload="gen:n=1,input=fixed:8192,output=fixed:1", pp=2,
        settings={"chunked_prefill_size": 1024, "overlap_depth": 2},
    )  # fmt: skip
    piped = simulate(assemble(scenario)).data
    alone = simulate(assemble(replace(scenario, pp=1))).data
    ratio = piped.summary["latency"]["ttft_us_p50"] / alone.summary["latency"]["ttft_us_p50"]
    assert 9 / 16 * 0.95 < ratio < 9 / 16 * 1.25
    told = piped.summary["device"]["pipeline"]
    assert told["stages"] == 2
    assert told["stage_busy_share"] > 0.8


def test_decodes_of_the_same_rows_leave_stages_idle_and_that_is_reported() -> None:
    scenario = Scenario(
        model="qwen3-8b", gpu="h100", workload="gen:n=64,rate=inf,input=fixed:100,output=fixed:400", pp=4
    )
    run = simulate(assemble(scenario))
    device = run.data.summary["device"]
    told = device["pipeline"]
    assert device["busy_fraction"] > 0.95  # in each stage-time some stage has the batch
    assert 0.2 < told["stage_busy_share"] < 0.3  # a quarter each
    idle_us = 4 * device["busy_us"] - sum(told["stage_busy_us"])
    assert told["pipeline_bubble_us"] == pytest.approx(idle_us, abs=4)
    assert any(line.startswith("pp 4: at most 2 batches") for line in run.remarks())
    whole = simulate(assemble(replace(scenario, pp=1))).data.summary
    assert "pipeline" not in whole["device"]


@settings(
    max_examples=8,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    deadline=None,
)
@given(
    pp=st.sampled_from((2, 4)),
    scheduler=st.sampled_from(
        [{}, {"overlap_depth": 0}, {"overlap_depth": 2}, {"batching": "mixed", "chunked_prefill_size": 128},
         {"pages": 90, "reserve": "on_demand", "context_tokens_max": 1024}]
    ),
    grammars=st.booleans(),
    seed=st.integers(0, 3),
)  # fmt: skip
def test_stretches_of_decodes_and_running_ahead_change_nothing(
    tmp_path_factory: pytest.TempPathFactory, pp: int, scheduler: dict[str, Any], grammars: bool, seed: int
) -> None:
    spec = "gen:n=40,rate=40,turns=uniform:1:3,think=exponential:80ms,input=uniform:1:700,output=uniform:1:40"
    spec += ",grammars=0.3x4" if grammars else ""
    scenario = Scenario(model="qwen3-8b", gpu="h100", workload=spec, pp=pp, seed=seed, settings=scheduler)
    folder = tmp_path_factory.mktemp("runs")
    simulate(assemble(scenario), folder=folder / "stretches")
    simulate(assemble(scenario), folder=folder / "checked", check_every=10**9)
    assert journal_of(folder / "stretches") == journal_of(folder / "checked")
    assert replay(folder / "stretches").events > 40
    setup = assemble_cluster(ClusterScenario(base=scenario, replicas=2))
    lazy = simulate_cluster(setup, folder=folder / "lazy")
    eager = simulate_cluster(setup, folder=folder / "eager", eager=True)
    assert lazy.data.summary == eager.data.summary
    for engine in "01":
        assert journal_of(folder / "lazy" / "engines" / engine) == journal_of(folder / "eager" / "engines" / engine)
    told = lazy.data.summary["device"]["pipeline"]
    assert told["stages"] == 2 * pp


def journal_of(folder: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted((folder / "journal").glob("*.log"))]


# --------------------------------------------------------------------------------------------------- from end to end


def test_a_run_names_its_layout_everywhere(tmp_path: Path) -> None:
    words = ["--model", "deepseek-v3", "--gpu", "h200", "--tp", "8", "--ep", "8", "--attention-dp", "4", "--pp", "2"]
    words += ["--expert-cv", "0.5", "--workload", "gen:n=6,rate=9", "--out", str(tmp_path / "run"), "--no-intervals"]
    done = CliRunner().invoke(simulate_command, words)
    assert done.exit_code == 0, done.output
    assert "attention_dp 4: rows are taken as spread evenly" in done.output
    told = json.loads((tmp_path / "run" / "metrics.json").read_text())["about"]
    layout = {"tp": 8, "ep": 8, "attention_dp": 4, "pp": 2, "expert_cv": 0.5}
    assert {name: told[name] for name in layout} == layout
    assert "--tp 8 --ep 8 --attention-dp 4 --pp 2 --expert-cv 0.5" in told["command"]
    assert {name: told["cost_model"][name] for name in layout} == layout
    assert told["kv_capacity"]["shards"] == 4
    header = read_journal(tmp_path / "run").header
    assert {name: header.host[name] for name in layout} == layout
    assert (
        "16 x H200-SXM (tp 8, ep 8, attention_dp 4, pp 2, expert_cv 0.5)" in (tmp_path / "run/report.html").read_text()
    )


def test_a_request_must_fit_a_shard() -> None:
    small = {"pages": 64, "page_size": 16, "context_tokens_max": 4096}
    scenario = Scenario(
        model="deepseek-v3",
        gpu="h200",
        workload="gen:n=4,rate=9,input=fixed:300,output=fixed:5",
        tp=8,
        attention_dp=4,
        settings=small,
    )
    run = simulate(assemble(scenario))
    assert run.setup.config.context_tokens_max == 16 * 16
    assert run.rejected == {"too_long": 4}
    assert simulate(assemble(replace(scenario, attention_dp=2))).data.summary["requests"]["completed"] == 4


def test_a_journal_of_experts_over_ranks_calibrates_as_such(tmp_path: Path) -> None:
    scenario = Scenario(model="qwen3-30b-a3b", gpu="h100", workload="gen:n=40,rate=9", tp=4, ep=4, engine="none")
    simulate(assemble(scenario), folder=tmp_path / "run")
    words = ["journal", str(tmp_path / "run"), "--date", "2026-11-22", "--out"]
    done = CliRunner().invoke(calibrate, [*words, str(tmp_path / "c.json")])
    assert done.exit_code == 0, done.output
    made = load_calibration(str(tmp_path / "c.json"))
    assert made.notes[0] == "of one run, on tp 4, ep 4: other degrees of parallelism were not seen"
    assert made.notes[1].startswith("error of held-out batches: median 0.0%")
    assert made.correction.kernels == pytest.approx(1.0, abs=0.02)
    again = assemble(replace(scenario, engine=None, calibration=str(tmp_path / "c.json")))
    assert not any("made without" in line for line in again.doubts())
    simulate(assemble(replace(scenario, ep=1, pp=2)), folder=tmp_path / "piped")
    refused = CliRunner().invoke(calibrate, ["journal", str(tmp_path / "piped"), *words[2:], str(tmp_path / "d.json")])
    assert refused.exit_code == 2
    assert "batches of a run with pp 2 overlap" in refused.output


def test_a_cluster_has_engines_of_several_layouts() -> None:
    groups = parse_engines("1xh200:tp=8:ep=8:attention_dp=8,2xh200:tp=4:pp=2", parse_setting)
    assert str(groups[0]) == "1xh200:tp=8:ep=8:attention_dp=8"
    base = Scenario(model="deepseek-v3", gpu="", workload="gen:n=12,rate=20")
    setup = assemble_cluster(ClusterScenario(base=base, engines=groups))
    assert setup.gpus == 8 + 2 * 8
    assert [one["tp"] for one in setup.about()["engines"]] == [8, 4, 4]
    assert setup.about()["engines"][0]["attention_dp"] == 8
    run = simulate_cluster(setup)
    assert run.data.summary["requests"]["completed"] == 12
    assert run.data.summary["device"]["pipeline"]["stages"] == 4


def test_a_plan_prices_all_gpus_of_an_engine_and_lists_what_cannot_be() -> None:
    tiny = replace(QUICK, long=Length(20, 20, 0.0), short=Length(10, 10, 0.0))
    asked = Question(
        model="qwen3-30b-a3b",
        gpus=("h100",),
        workload="gen:input=fixed:500,output=fixed:10",
        slos=(Slo.parse("ttft_p90=2s"),),
        effort=tiny,
        search=parse_search(("tp=1,2", "ep=1,2", "pp=1,2", "moe_a2a=no,yes")),
    )
    candidates, _ = prepare(asked)
    by_name = {c.configuration.name: c for c in candidates}
    assert len(by_name) == 16
    both = by_name["h100 tp=2 ep=2 pp=2 moe_a2a=yes"]
    assert both.gpus == 4
    one = by_name["h100 tp=1 ep=1 pp=1 moe_a2a=no"]
    assert one.usd_per_hour(1) is not None
    assert both.usd_per_hour(1) == pytest.approx(4 * one.usd_per_hour(1))  # type: ignore[operator]
    assert by_name["h100 tp=1 ep=2 pp=1 moe_a2a=no"].unfit.startswith("ep 2 does not divide tp 1")
    assert "moe_a2a" in by_name["h100 tp=2 ep=1 pp=1 moe_a2a=yes"].unfit
    capped, _ = prepare(replace(asked, gpus_max=3))
    assert next(c for c in capped if c.gpus == 4).unfit.startswith("needs 4 GPUs")


def test_a_plan_names_the_flags_of_its_layout(tmp_path: Path) -> None:
    words = ["--model", "qwen3-30b-a3b", "--gpus", "h100", "--tp", "2", "--pp", "2", "--search", "ep=2", "--jobs", "1"]
    words += [
        "--workload",
        "gen:input=fixed:500,output=fixed:10",
        "--slo",
        "ttft_p90=2s",
        "--quick",
        "--requests",
        "30",
    ]
    done = CliRunner().invoke(plan_command, [*words, "--json", str(tmp_path / "plan.json")])
    assert done.exit_code == 0, done.output
    served = "serve:    lockstep serve --model FOLDER --tp 2 --pp 2 --ep 2 --set batching=mixed "
    assert served in done.output  # the settings of the profile `lockstep`
    assert "emulate:  lockstep serve --emulate qwen3-30b-a3b@h100 --tp 2\n" in done.output
    assert "          not supported there yet: ep 2, pp 2\n" in done.output
    found = json.loads((tmp_path / "plan.json").read_text())
    assert [one["lacks"] for one in found["serve"]] == [[], ["ep 2", "pp 2"]]
    assert found["configurations"][0]["best"]["replicas"] == 1
    assert "--tp 2 --ep 2 --pp 2" in found["simulate"]
    assert "4 GPUs: 1 x (h100 ep=2)" in found["headline"]
