"""The cost model: sums are consistent, more work is never faster, figures are near published ones."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from lockstep.sim.catalogue import CatalogueError, gpu_names, load_gpu, load_model, model_names
from lockstep.sim.cost import (
    BatchShape,
    CapacityError,
    CostModel,
    CpuModel,
    Duration,
    MemoryNeeds,
    RooflineModel,
    decode_shape,
    extend_shape,
    kv_capacity,
    roofline_model,
)
from lockstep.sim.cost.hardware import all_reduce_of
from lockstep.sim.cost.roofline import Graphs
from tests.support.shapes import shapes

# One model of each kind of attention and feed-forward.
KINDS = ("qwen3-8b", "qwen3-30b-a3b", "deepseek-v3", "gpt-oss-120b", "qwen3-next-80b-a3b", "gemma-3-27b")
MODELS: dict[str, RooflineModel] = {name: roofline_model(load_model(name), load_gpu("h200")) for name in KINDS}
CAPACITY_ERROR_MAX = 0.05  # largest found: 3.1 % (RTX 4090), 1.4 % on H100


@given(st.sampled_from(KINDS), shapes(), st.integers(1, 5000), st.integers(0, 50_000))
def test_more_work_is_never_faster(name: str, shape: BatchShape, new: int, context: int) -> None:
    cost = MODELS[name]
    before = cost.batch_us(shape).mean_us
    one_more_decode = replace(
        shape,
        decode_rows=shape.decode_rows + 1,
        decode_context_tokens=shape.decode_context_tokens + context,
        sampled_rows=shape.sampled_rows + 1,
    )
    one_more_extend = replace(
        shape,
        extend_rows=shape.extend_rows + 1,
        extend_tokens=shape.extend_tokens + new,
        extend_context_tokens=shape.extend_context_tokens + context,
        extend_pairs=shape.extend_pairs + new * context + new * (new + 1) // 2,
    )
    for more in (one_more_decode, one_more_extend, replace(shape, sampled_rows=shape.sampled_rows + 1)):
        assert cost.batch_us(more).mean_us >= before * (1 - 1e-12)
    if shape.decode_rows:
        longer = replace(shape, decode_context_tokens=shape.decode_context_tokens + context)
        assert cost.batch_us(longer).mean_us >= before * (1 - 1e-12)


@given(st.sampled_from(KINDS), shapes())
def test_terms_sum_to_the_batch(name: str, shape: BatchShape) -> None:
    cost = MODELS[name]
    terms = cost.terms_us(shape)
    assert sum(terms.values()) == pytest.approx(cost.batch_us(shape).mean_us)
    assert all(us >= -1e-6 for us in terms.values()), terms


@given(st.sampled_from(KINDS), shapes(), st.sampled_from((1, 2, 4)))
def test_more_ranks_compute_less_and_talk_more(name: str, shape: BatchShape, tp: int) -> None:
    # From Hopper on, switches compute sums: eight GPUs reduce 64 MB faster than four, in the public tables, too.
    model, gpu = load_model(name), load_gpu("a100")
    silent = replace(shape, sampled_rows=0)
    few, many = (roofline_model(model, gpu, ranks).terms_us(silent) for ranks in (tp, 2 * tp))
    for terms in (few, many):
        terms.pop("launch", None)
    assert many.pop("all_reduce", 0.0) >= few.pop("all_reduce", 0.0)
    assert sum(many.values()) <= sum(few.values()) * (1 + 1e-12)


def test_a_mixed_batch_reads_the_weights_once() -> None:
    cost = MODELS["qwen3-8b"]
    extend, decode = extend_shape(64, 1000), decode_shape(32, 1000)
    mixed = replace(
        decode,
        extend_rows=1,
        extend_tokens=extend.extend_tokens,
        extend_context_tokens=extend.extend_context_tokens,
        extend_pairs=extend.extend_pairs,
        sampled_rows=33,
    )
    apart = cost.batch_us(extend).mean_us + cost.batch_us(decode).mean_us
    together = cost.batch_us(mixed).mean_us
    assert max(cost.batch_us(extend).mean_us, cost.batch_us(decode).mean_us) < together < apart


def test_one_decode_row_costs_about_its_bytes() -> None:
    """Between 1.1 and 1.4 of bytes over the measured bandwidth: the rest is the latency of some 400 kernels."""
    model, gpu = load_model("qwen3-8b"), load_gpu("h200")
    context = 1000
    table = model.hidden * model.vocab * 2  # the embedding table is looked up, not read
    moved = model.weights_bytes() - table + context * model.kv_bytes_per_token()
    bytes_us = moved / (gpu.measured["weight_read_gbs"].value * 1e3)
    ratio = roofline_model(model, gpu).batch_us(decode_shape(1, context)).mean_us / bytes_us
    assert 1.1 < ratio < 1.4


def test_a_long_prefill_costs_about_its_flops() -> None:
    model, gpu = load_model("llama-3.1-8b"), load_gpu("h100")
    flops = model.flops_per_token * 8192
    flops_us = flops / (gpu.measured["bf16_gemm_tflops"].value * 1e6)
    assert 1.0 < roofline_model(model, gpu).batch_us(extend_shape(8192)).mean_us / flops_us < 1.5


def test_chunks_cost_at_least_the_whole_prompt() -> None:
    for cost in MODELS.values():
        whole = cost.batch_us(extend_shape(8192)).mean_us
        halves = cost.batch_us(extend_shape(4096)).mean_us + cost.batch_us(extend_shape(4096, 4096)).mean_us
        assert whole < halves < 1.6 * whole, cost.model.name


def test_an_empty_batch_takes_no_time() -> None:
    assert MODELS["qwen3-8b"].batch_us(BatchShape()) == Duration(0.0, 0.0)


def test_sliding_layers_stop_growing_at_the_window() -> None:
    model, gpu = load_model("gemma-3-27b"), load_gpu("h200")
    cost = roofline_model(model, gpu)
    short, long = (cost.terms_us(decode_shape(32, n))["attention_decode"] for n in (2000, 12_000))
    grown_bytes = 32 * 10_000 * model.full_layers * model.kv_values_per_layer() * 2
    assert long - short == pytest.approx(grown_bytes / (gpu.measured["attention_decode_read_gbs"].value * 1e3))


def test_linear_attention_decodes_from_a_fixed_state() -> None:
    model, gpu = load_model("qwen3-next-80b-a3b"), load_gpu("h200")
    cost = roofline_model(model, gpu)
    one, many = (cost.terms_us(decode_shape(rows, 1))["linear_attention"] for rows in (1, 65))
    state_us = 64 * 2 * model.state_bytes_per_request() / (gpu.measured["weight_read_gbs"].value * 1e3)
    assert many - one == pytest.approx(state_us, rel=0.01)


def linear_us(shape: BatchShape, gpu: str = "h100", model: str = "qwen3-next-80b-a3b") -> float:
    """Time of linear attention of one layer."""
    spec = load_model(model)
    return roofline_model(spec, load_gpu(gpu)).terms_us(shape)["linear_attention"] / spec.linear_layers


def prompts(rows: int, tokens: int) -> BatchShape:
    """This number of prompts of this number of tokens each."""
    pairs = rows * tokens * (tokens + 1) // 2
    return BatchShape(extend_rows=rows, extend_tokens=rows * tokens, extend_pairs=pairs, sampled_rows=rows)


def test_a_prompt_through_linear_attention_has_a_latency_and_then_a_rate() -> None:
    gpu, delta = load_gpu("h100"), load_model("qwen3-next-80b-a3b").delta
    assert delta is not None
    latency, chunk = (gpu.measured[f"delta_rule_{name}_us"].value for name in ("latency", "chunk"))
    assert latency + chunk < linear_us(prompts(1, 1)) < latency + chunk + 3.0  # and one state
    work_us = delta.value_heads * delta.chunk_flops / (gpu.measured["delta_rule_tflops"].value * 1e6)
    grown = linear_us(prompts(1, 32_768)) - linear_us(prompts(1, 16_384))
    assert grown == pytest.approx(16_384 * work_us + 256 * chunk)


def test_chunks_of_one_request_follow_one_another() -> None:
    gpu, model = load_gpu("h100"), load_model("qwen3-next-80b-a3b")
    assert model.delta is not None
    one, many = linear_us(prompts(1, 16_384)), linear_us(prompts(16, 1_024))
    state_us = 2 * model.delta.state_bytes / (gpu.measured["weight_read_gbs"].value * 1e3)
    assert one - many == pytest.approx((256 - 16) * gpu.measured["delta_rule_chunk_us"].value - 15 * state_us)
    mixed = replace(prompts(1, 16_384), extend_rows=2, extend_tokens=16_385, extend_pairs=16_384 * 16_385 // 2 + 1)
    assert linear_us(mixed) > one  # one more prompt does not make the long one shorter


def test_little_work_of_the_delta_rule_stays_in_the_cache_of_a_gpu_that_has_one() -> None:
    gpu = load_gpu("l40s")
    cached = gpu.measured["delta_rule_cached_token_heads"].value / 32  # tokens
    chunk_us = gpu.measured["delta_rule_chunk_us"].value
    assert linear_us(prompts(1, 1_024), "l40s") - linear_us(prompts(1, 512), "l40s") == pytest.approx(8 * chunk_us)
    beyond = linear_us(prompts(1, 8_192), "l40s") - linear_us(prompts(1, 4_096), "l40s")
    assert cached < 4_096
    assert beyond > 3 * 64 * chunk_us


def test_launching_latent_attention_bounds_short_prompts_from_below() -> None:
    model, gpu = load_model("deepseek-v3"), load_gpu("h200")
    cost, captured = roofline_model(model, gpu, 8), decode_shape(64, 500)
    floor = cost.constants["latent_eager_us"].value * model.layers
    assert floor < cost.batch_us(extend_shape(1)).mean_us == cost.batch_us(extend_shape(64)).mean_us < 1.3 * floor
    assert cost.batch_us(captured).mean_us < floor  # a CUDA graph needs no launches
    long = extend_shape(8_192)
    assert cost.batch_us(long) == roofline_model(model, gpu, 8, graphs=Graphs(captured=False)).batch_us(long)
    assert cost.terms_us(long)["launch"] == pytest.approx(10.0)


def test_latent_decodes_have_a_latency_and_a_rate_of_their_own() -> None:
    model, gpu = load_model("deepseek-v3"), load_gpu("h200")
    one, two = (roofline_model(model, gpu).terms_us(decode_shape(64, n))["attention_decode"] for n in (10_000, 20_000))
    flops = 64 * 10_000 * 2 * 128 * (2 * 512 + 64)
    per_layer = flops / (gpu.measured["latent_decode_tflops"].value * 1e6)
    assert (two - one) / model.layers == pytest.approx(per_layer)
    assert (2 * one - two) / model.layers == pytest.approx(gpu.measured["latent_decode_latency_us"].value)


@pytest.mark.parametrize("name", ["qwen3-8b", "qwen3-30b-a3b", "gpt-oss-120b", "gemma-3-27b"])
def test_other_models_have_no_cost_of_latents_and_states(name: str) -> None:
    """Their times are compared to the last bit with earlier ones in test_parallel.py."""
    constants = roofline_model(load_model(name), load_gpu("h100")).constants
    assert not [constant for constant in constants if constant.startswith(("latent", "delta"))]


def test_experts_touched_saturate() -> None:
    experts = load_model("qwen3-30b-a3b").experts
    assert experts is not None
    assert experts.touched(1) == pytest.approx(8)
    assert experts.touched(16) == pytest.approx(128 * (1 - (15 / 16) ** 16))
    assert experts.touched(4096) == pytest.approx(128)


def test_eager_launch_bounds_small_batches_from_below() -> None:
    model, gpu = load_model("qwen3-0.6b"), load_gpu("h200")
    graph, eager = roofline_model(model, gpu), roofline_model(model, gpu, graphs=Graphs(captured=False))
    small = decode_shape(1, 10)
    assert eager.batch_us(small).mean_us > 1.2 * graph.batch_us(small).mean_us
    assert eager.batch_us(small).mean_us >= 5.0 * eager.kernels
    large = extend_shape(16_384)
    assert eager.batch_us(large) == graph.batch_us(large)


def test_low_precision_needs_hardware_for_its_flops() -> None:
    model, prompt, row = load_model("qwen3-8b"), extend_shape(4096), decode_shape(1, 100)
    for gpu, gains in (("h100", True), ("a100", False)):
        bf16, fp8 = (roofline_model(model, load_gpu(gpu), weights_dtype=dtype) for dtype in ("bf16", "fp8"))
        assert fp8.batch_us(row).mean_us < 0.8 * bf16.batch_us(row).mean_us
        assert (fp8.batch_us(prompt).mean_us < 0.8 * bf16.batch_us(prompt).mean_us) is gains


@pytest.mark.parametrize("name", ["qwen3-8b", "qwen3-30b-a3b"])
def test_fp8_weights_that_are_widened_take_the_bytes_of_fp8_and_the_flops_of_bf16(name: str) -> None:
    model, gpu, prompt, row = load_model(name), load_gpu("h100"), extend_shape(4096), decode_shape(1, 100)
    plain, rounded = (roofline_model(model, gpu, weights_dtype=dtype) for dtype in ("bf16", "fp8"))
    widened = roofline_model(model, gpu, weights_dtype="fp8", fp8_activations="off")
    assert roofline_model(model, gpu, weights_dtype="fp8", fp8_activations="on").batch_us(prompt) == rounded.batch_us(
        prompt
    )
    assert rounded.batch_us(prompt).mean_us < 0.8 * widened.batch_us(prompt).mean_us
    assert widened.batch_us(prompt).mean_us == pytest.approx(plain.batch_us(prompt).mean_us, rel=0.05)
    assert widened.batch_us(row).mean_us == pytest.approx(rounded.batch_us(row).mean_us, rel=0.1)
    assert widened.batch_us(row).mean_us < 0.8 * plain.batch_us(row).mean_us
    assert widened.describe()["fp8_activations"] == "off"
    assert "fp8_activations" not in rounded.describe()


def test_a_checkpoint_of_fp8_weights_alone_is_priced_as_the_runtime_runs_it(tmp_path: Path) -> None:
    """By the runtime's rule: the activations in config.json, and whether the GPU has fp8."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "head_dim": 64, "vocab_size": 1000}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096}
    config = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], **sizes, **heads}
    weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
    for said, expected in ((None, "bf16"), ({"num_bits": 8, "type": "float", "dynamic": True}, "fp8")):
        group = {"targets": ["Linear"], "weights": weights, "input_activations": said}
        config["quantization_config"] = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}
        folder = tmp_path / expected
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        model = load_model(str(folder))
        assert model.weights_only is (said is None)
        for gpu, products in (("h100", expected), ("a100", "bf16")):
            cost = roofline_model(model, load_gpu(gpu))
            assert {cost.precision_of(one) for one in cost.gemm_matrices if one.kind == "linear"} == {products}


def test_products_in_fp8_that_cannot_be_are_refused() -> None:
    model = load_model("qwen3-8b")
    with pytest.raises(CatalogueError, match="`fp8_activations` is on, but weights are bf16"):
        roofline_model(model, load_gpu("h100"), fp8_activations="on")
    with pytest.raises(CatalogueError, match=r"`fp8_activations` is on, but A100.* has no fp8 tensor cores"):
        roofline_model(model, load_gpu("a100"), weights_dtype="fp8", fp8_activations="on")
    with pytest.raises(CatalogueError, match="`fp8_activations` must be auto, on or off, got `yes`"):
        roofline_model(model, load_gpu("h100"), fp8_activations="yes")  # type: ignore[arg-type]


@pytest.mark.parametrize("gpu", gpu_names())
@pytest.mark.parametrize("name", model_names())
def test_every_model_has_a_cost_on_every_gpu(name: str, gpu: str) -> None:
    cost: CostModel = roofline_model(load_model(name), load_gpu(gpu))
    assert 100 < cost.batch_us(decode_shape(8, 500)).mean_us < 10e6
    assert cost.batch_us(decode_shape(8, 500)).spread_us == 0


def test_describe_gives_every_constant_a_source_and_survives_json() -> None:
    described = json.loads(json.dumps(roofline_model(load_model("deepseek-v3"), load_gpu("b200"), tp=8).describe()))
    assert described["kind"] == "roofline"
    assert described["weights_dtype"] == "fp8"
    assert all(constant["source"] for constant in described["constants"].values())
    assert "0.55 x data sheet" in described["constants"]["latent_decode_tflops"]["source"]
    assert described["all_reduce"]["source"]


def test_impossible_settings_are_refused() -> None:
    model, gpu = load_model("qwen3-8b"), load_gpu("h100")
    with pytest.raises(CapacityError, match="tp 12 does not divide `num_attention_heads` 32 of qwen3-8b"):
        roofline_model(model, gpu, tp=12)
    with pytest.raises(CapacityError, match=r"tp 12 spans scale-up domains of 8 H100-SXM, .*\nhint: --tp 8 or 16"):
        all_reduce_of(gpu, 12)
    with pytest.raises(CapacityError, match="`tp` must be at least 1, got `0`"):
        roofline_model(model, gpu, tp=0)
    with pytest.raises(CatalogueError, match="`kv_dtype` must be one of bf16, fp8, got `int4`"):
        roofline_model(model, gpu, kv_dtype="int4")  # type: ignore[arg-type]
    with pytest.raises(CatalogueError, match="mxfp4 stores experts only"):
        roofline_model(model, gpu, weights_dtype="mxfp4")


# --- capacity -------------------------------------------------------------------------------------------------------


def test_capacity_agrees_with_published_engines() -> None:
    data = os.environ.get("LOCKSTEP_DATA")
    path = Path(data or ".") / "published" / "kv_capacity.csv"
    if not data or not path.is_file():
        pytest.skip("LOCKSTEP_DATA is not set or has no kv_capacity.csv: capacities not compared")
    compared = 0
    with path.open() as file:
        for row in csv.DictReader(file):
            try:
                model = load_model(row["model"])
            except CatalogueError:
                continue
            tokens = kv_capacity(
                model,
                load_gpu(row["gpu"].split(" ")[0]),
                int(row["tp"]),
                needs=MemoryNeeds(
                    chunk_tokens=int(row["max_num_batched_tokens"]), sampled_rows=int(row["max_num_seqs"])
                ),
            ).tokens
            assert tokens == pytest.approx(int(row["kv_tokens"]), rel=CAPACITY_ERROR_MAX), row
            compared += 1
    assert compared >= 5


def test_capacity_divides_the_memory_without_remainder_lost() -> None:
    c = kv_capacity(load_model("qwen3-8b"), load_gpu("h200"))
    assert c.tokens == c.pages * c.page_tokens
    used = c.weights_bytes + c.activation_bytes + c.runtime_bytes + c.state_bytes + c.kv_bytes
    assert 0 <= c.usable_bytes - used < c.kv_bytes_per_token * c.page_tokens


def test_capacity_grows_with_ranks_and_shrinks_with_kv_width() -> None:
    model, gpu = load_model("llama-3.1-70b"), load_gpu("h100")
    tokens = [kv_capacity(model, gpu, tp).tokens for tp in (4, 8)]
    assert tokens[1] > 2 * tokens[0]  # more ranks also free weight memory
    fp8 = kv_capacity(model, gpu, 4, kv_dtype="fp8").tokens
    assert fp8 == pytest.approx(2 * tokens[0], rel=1e-3)


def test_a_model_that_does_not_fit_is_one_clear_error() -> None:
    with pytest.raises(CapacityError) as caught:
        kv_capacity(load_model("llama-3.1-70b"), load_gpu("h100"))
    message = str(caught.value)
    assert "llama-3.1-70b does not fit on 1 x H100-SXM" in message
    assert "weights 141.1" in message
    assert "raise --tp" in message


def test_linear_state_is_reserved_per_request() -> None:
    model, gpu = load_model("qwen3.5-27b"), load_gpu("h200")
    none, many = (kv_capacity(model, gpu, needs=MemoryNeeds(state_rows=rows)) for rows in (0, 200))
    assert many.state_bytes == 200 * model.state_bytes_per_request()
    assert none.kv_bytes - many.kv_bytes == pytest.approx(many.state_bytes, rel=1e-3)


# --- CPU lane -------------------------------------------------------------------------------------------------------


def test_cpu_lane_is_a_line_in_rows() -> None:
    cpu = CpuModel()
    assert cpu.plan_us(decode_shape(256, 100)) == pytest.approx(120 + 64)
    assert cpu.result_us(1024) == pytest.approx(40 + 256)
    assert CpuModel(plan_fixed_us=10, plan_row_us=0).plan_us(extend_shape(5)) == 10
    assert json.loads(json.dumps(cpu.describe()))["arrival_us"] == cpu.arrival_us
    with pytest.raises(ValueError, match="`plan_row_us` must be at least 0 and finite, got `-1`"):
        CpuModel(plan_row_us=-1)
