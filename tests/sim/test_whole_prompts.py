"""Encoders and cross-encoders in `simulate` and `plan`: prompts computed whole, without KV."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from lockstep.core.contract.errors import ConfigError
from lockstep.core.contract.events import RequestArrived
from lockstep.core.journal.replay import replay
from lockstep.host.whole_prompts import GPU_PREFILL_TOKENS, check_whole_prompts
from lockstep.sim.catalogue import load_gpu, load_model
from lockstep.sim.catalogue.listing import modelled_as, room_on
from lockstep.sim.cli.plan import plan
from lockstep.sim.cli.simulate import simulate as simulate_command
from lockstep.sim.cost import BatchShape, CapacityError
from lockstep.sim.cost.model import extend_shape
from lockstep.sim.cost.models import ModelSpec
from lockstep.sim.cost.roofline import RooflineModel, roofline_model
from lockstep.sim.metrics.columns import Requests
from lockstep.sim.metrics.fold import MetricsFold
from lockstep.sim.metrics.latency import call_us, lasts_of_calls, measure_slo, meets_every
from lockstep.sim.metrics.slo import Slo
from lockstep.sim.metrics.value_counts import ValueCounts
from lockstep.sim.run.assemble import assemble
from lockstep.sim.run.simulate import arrivals_of, simulate
from lockstep.sim.scenario.scenario import Scenario

RERANK = "gen:n=120,rate=4,output=none,items=uniform:5:15,query=fixed:32,input=uniform:100:300"
CALLS = "gen:output=none,items=uniform:5:15,query=fixed:32,input=uniform:100:300"


def scenario(**more: Any) -> Scenario:
    return Scenario(**{"model": "bge-reranker-v2-m3", "gpu": "l4", "workload": RERANK, **more})


def roofline(model: ModelSpec) -> RooflineModel:
    return roofline_model(model, load_gpu("l4"))


def one_way(model: ModelSpec) -> ModelSpec:
    """The same model, in which a token attends to those before it."""
    assert model.whole is not None
    return replace(model, whole=replace(model.whole, bidirectional=False))


# ---------------------------------------------------------------------------------------------------------------- costs


def test_attention_in_both_directions_has_a_square_of_pairs() -> None:
    model, tokens = load_model("bge-reranker-v2-m3"), 8000
    cost = roofline(model)
    both = cost.terms_us(extend_shape(tokens, sampled=False))
    one = roofline(one_way(model)).terms_us(extend_shape(tokens, sampled=False))
    extra = cost.constants["attention_prefill_extra_keys"].value * tokens
    latency_us = model.layers * cost.constants["attention_prefill_latency_us"].value
    ratio = (both.pop("attention_prefill") - latency_us) / (one.pop("attention_prefill") - latency_us)
    assert ratio == pytest.approx((tokens**2 + extra) / (tokens * (tokens + 1) / 2 + extra))
    assert both.keys() == one.keys()
    for name in both:
        assert name == "launch" or both[name] == one[name], name


def test_prompts_side_by_side_do_not_attend_to_each_other() -> None:
    cost = roofline(load_model("bge-m3"))
    alone = extend_shape(1000, sampled=False)
    together = BatchShape(extend_rows=8, extend_tokens=8000, extend_pairs=8 * alone.extend_pairs)
    whole = extend_shape(8000, sampled=False)
    latency_us = 24 * cost.constants["attention_prefill_latency_us"].value
    parts = [cost.terms_us(one)["attention_prefill"] - latency_us for one in (alone, together, whole)]
    assert parts[1] == pytest.approx(8 * parts[0])
    assert parts[2] > 5 * parts[1]


def test_a_window_bounds_the_pairs_of_local_layers() -> None:
    config = {
        "model_type": "modernbert",
        "hidden_size": 768,
        "num_hidden_layers": 22,
        "num_attention_heads": 12,
        "intermediate_size": 1152,
        "vocab_size": 50368,
        "max_position_embeddings": 8192,
        "local_attention": 128,
    }
    from lockstep.sim.cost.families import model_from_config

    model = model_from_config(config, "modernbert", "modernbert")
    assert (model.full_layers, model.sliding_layers) == (8, 14)
    wide = model_from_config({**config, "local_attention": 16384}, "wide", "wide")
    shape = extend_shape(8000, sampled=False)
    local, full = (roofline(one).terms_us(shape)["attention_prefill"] for one in (model, wide))
    assert local < full / 2


def test_nothing_is_sampled_and_the_head_runs_once_per_prompt() -> None:
    cost = roofline(load_model("bge-reranker-v2-m3"))
    names = {term.name for term in cost.terms}
    assert "pooling_and_head" in names
    assert not names & {"logits_and_sampling", "head", "lm_head"}
    one = BatchShape(extend_rows=1, extend_tokens=4096, extend_pairs=4096 * 4097 // 2)
    many = BatchShape(extend_rows=512, extend_tokens=4096, extend_pairs=512 * 8 * 9 // 2)
    assert cost.terms_us(many)["pooling_and_head"] > cost.terms_us(one)["pooling_and_head"]
    vectors = roofline(load_model("bge-m3"))
    assert vectors.terms_us(one)["pooling_and_head"] < cost.terms_us(one)["pooling_and_head"]
    spec = load_model("bge-reranker-v2-m3")
    assert spec.flops_per_token == 2 * 24 * (4 * 1024 * 1024 + 2 * 1024 * 4096)


def test_pages_take_no_memory_and_count_the_tokens_of_a_batch() -> None:
    setup = assemble(scenario(), {})
    assert setup.kv is not None
    assert (setup.kv.kv_bytes, setup.kv.kv_bytes_per_token) == (0, 0)
    assert setup.kv.weights_bytes == 2 * setup.model.params
    assert setup.config.pages == 8192 // 16 * 256 == setup.kv.pages
    assert setup.config.max_prefill_tokens == GPU_PREFILL_TOKENS
    assert setup.config.chunked_prefill_size is None
    assert not setup.config.radix_cache
    assert any("no encoder was measured" in line for line in setup.doubts())
    assert assemble(scenario(settings={"pages": 600, "max_running_requests": 8}), {}).config.pages == 600


def test_a_model_that_does_not_fit_is_refused() -> None:
    with pytest.raises(CapacityError, match="does not fit on 1 x L4"):
        assemble(scenario(mem_fraction=0.05), {})


def test_the_catalogue_says_what_it_is() -> None:
    reranker, vectors = load_model("bge-reranker-v2-m3"), load_model("bge-m3")
    assert any("gives 1 label" in line for line in modelled_as(reranker))
    assert any("gives vectors" in line for line in modelled_as(vectors))
    assert room_on(vectors, [load_gpu("l4")]) == [{"gpu": "L4", "tp": 1, "kv_tokens": 0, "kv_bytes_per_gpu": 0}]


# ----------------------------------------------------------------------------------------------------------- simulation


@pytest.mark.parametrize("profile", ["lockstep", "sglang", "vllm"])
def test_every_profile_computes_prompts_whole(profile: str, tmp_path: Path) -> None:
    run = simulate(assemble(scenario(profile=profile), {}), folder=tmp_path)
    assert run.data.summary["requests"]["completed"] == 120
    assert run.data.summary["cache"]["hit_ratio"] == 0
    batches = run.data.batches
    assert batches.new_tokens.sum() == run.data.requests.prompt_tokens.sum()
    assert set(batches.mode.tolist()) == {"extend"}
    replay(tmp_path / "journal")


def test_the_fast_path_and_the_core_decide_alike(tmp_path: Path) -> None:
    fast, kept = simulate(assemble(scenario(), {})), simulate(assemble(scenario(), {}), folder=tmp_path)
    for name in ("requests", "latency", "throughput", "scheduler"):
        assert fast.data.summary[name] == kept.data.summary[name], name
    np.testing.assert_array_equal(fast.data.requests.e2e_us, kept.data.requests.e2e_us)


@pytest.mark.parametrize(("model", "kind"), [("bge-reranker-v2-m3", "score"), ("bge-m3", "embed")])
@pytest.mark.parametrize("concurrency", [None, 3])
def test_requests_have_the_kind_that_a_server_makes(model: str, kind: str, concurrency: int | None) -> None:
    event = arrivals_of(assemble(scenario(model=model, concurrency=concurrency), {})).take(None)
    assert isinstance(event, RequestArrived)
    assert (event.kind, event.max_new_tokens) == (kind, 0)
    decoder = arrivals_of(assemble(scenario(model="qwen3-0.6b"), {})).take(None)
    assert isinstance(decoder, RequestArrived)
    assert decoder.kind == "generate"


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"tp": 2}, "tp 2 is not possible: bge-reranker-v2-m3 computes prompts whole, each engine on one GPU"),
        ({"settings": {"speculative_method": "ngram"}}, "`speculative_method` is ngram, but bge-reranker-v2-m3"),
        ({"settings": {"chunked_prefill_size": 512}}, "`chunked_prefill_size` is 512"),
        ({"settings": {"radix_cache": True}}, "`radix_cache` is True"),
        ({"settings": {"decode_steps_per_launch": 4}}, "`decode_steps_per_launch` is 4"),
        ({"settings": {"jump_forward_tokens": 8}}, "`jump_forward_tokens` is 8"),
        ({"settings": {"role": "prefill"}}, "`role` is prefill"),
        ({"tiers": {"host_cache_gb": 4.0}}, r"`host_cache_gb` is 4.0"),
        ({"tiers": {"hybrid_memory": "on"}}, "`hybrid_memory` is on, but bge-reranker-v2-m3 keeps no KV"),
        ({"server_sessions": True}, "`server_sessions` is on"),
        ({"samples": "2"}, "`samples` is 2"),
        ({"adapters": "3"}, "`adapters` is 3"),
        ({"media": "image=1:64x64"}, "`media` is image=1:64x64"),
        ({"max_new_tokens": 4}, "`max_new_tokens` is 4"),
        ({"draft_model": "qwen3-0.6b"}, "`draft_model` is qwen3-0.6b"),
        (
            {"weights_dtype": "fp8"},
            "`weights_dtype` is fp8, but bge-reranker-v2-m3 computes prompts whole",
        ),
        ({"kv_dtype": "fp8"}, "`kv_dtype` is fp8"),
        ({"slos": (Slo.parse("ttft_p99=1s"),)}, "`slo` ttft_p99=1s: requests to bge-reranker-v2-m3 have no tokens"),
        ({"workload": "gen:n=30"}, "`workload` has 30 requests with output, but bge-reranker-v2-m3 gives labels"),
        ({"workload": "gen:n=30", "model": "bge-m3"}, "bge-m3 gives vectors of whole prompts"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(options: dict[str, Any], why: str) -> None:
    with pytest.raises((ConfigError, CapacityError), match=why) as refused:
        assemble(scenario(**options), {})
    assert "hint: " in str(refused.value)


def test_a_model_of_whole_prompts_drafts_nothing() -> None:
    settings = {"speculative_method": "draft_model"}
    with pytest.raises(ConfigError, match="`draft_model` is bge-m3, which predicts no tokens"):
        assemble(scenario(model="qwen3-8b", gpu="h100", draft_model="bge-m3", settings=settings), {})


def test_options_at_their_neutral_values_are_accepted() -> None:
    check_whole_prompts({"role": "mixed", "decode_steps_per_launch": 1, "prefix_deduplication": "off"}, "it")
    check_whole_prompts({"schedule_policy": "priority", "radix_cache": False, "speculative_method": "none"}, "it")


# ---------------------------------------------------------------------------------------------------------------- calls


def requests_of(ends: list[tuple[int, int, str, str]]) -> Requests:
    """Requests by arrival, time to the end (-1: none), reason of the end, and tenant."""
    empty = MetricsFold().result(()).requests.columns()
    count = len(ends)
    columns = {name: np.zeros(count, column.dtype) for name, column in empty.items()}
    columns["arrival_us"] = np.array([one[0] for one in ends], np.int64)
    columns["e2e_us"] = np.array([one[1] for one in ends], np.int64)
    columns["finish_reason"] = np.array([one[2] for one in ends], object)
    columns["tenant"] = np.array([one[3] for one in ends], object)
    return Requests(**columns)


def test_a_call_ends_with_its_last_request() -> None:
    found = requests_of(
        [
            (10, 5, "computed", ""),
            (10, 9, "computed", ""),
            (10, 4, "computed", "other"),
            (20, 3, "computed", ""),
            (20, 7, "timeout", ""),
            (30, 2, "computed", ""),
            (30, -1, "", ""),
            (40, 6, "computed", ""),
            (40, 1, "cancelled", ""),
            (50, -1, "rejected_too_long", ""),
        ]
    )
    np.testing.assert_array_equal(call_us(found), [9, 9, 4, np.inf, np.inf, np.inf, np.inf, 6, 6, np.nan])
    assert lasts_of_calls(found).tolist() == [False, True, True, False, True, False, True, False, True, True]
    no_gaps = ValueCounts.of(np.zeros(0))
    assert measure_slo(Slo.parse("call_p50=1s"), found, no_gaps) == 9  # of 4, 6, 9 and two that failed
    assert measure_slo(Slo.parse("call=1s"), found, no_gaps) == np.inf
    good = meets_every([Slo.parse("call_p99=6us")], found)
    assert good.tolist() == [False, False, True, False, False, False, False, True, False, False]


def test_calls_are_bounded_by_simulate(tmp_path: Path) -> None:
    slos = tuple(map(Slo.parse, ("call_p99=1s", "e2e_p99=1s", "call=1s")))
    run = simulate(assemble(scenario(slos=slos), {}))
    measured = [one["measured_us"] for one in run.data.summary["slos"]]
    requests = run.data.requests
    by_call: dict[int, int] = {}
    for at, took in zip(requests.arrival_us.tolist(), requests.e2e_us.tolist(), strict=True):
        by_call[at] = max(by_call.get(at, 0), took)
    assert measured[0] == pytest.approx(float(np.percentile(list(by_call.values()), 99)), abs=1)
    assert measured[2] == max(by_call.values())
    assert len(by_call) < 30


# ----------------------------------------------------------------------------------------------------------------- plan


def planned(*more: str) -> tuple[int, str]:
    words = ["--model", "bge-reranker-v2-m3", "--gpus", "l4", "--workload", CALLS, "--quick", "--jobs", "1", *more]
    done = CliRunner().invoke(plan, words)
    return done.exit_code, done.output


def test_a_plan_finds_the_largest_rate_of_rerank_calls(tmp_path: Path) -> None:
    answer = tmp_path / "answer.json"
    code, text = planned("--slo", "call_p99=1s", "--requests", "300", "--json", str(answer))
    assert code == 0, text
    assert "Rates are calls per second" in text
    assert "call p99" in text
    assert "lockstep serve --model FOLDER --set batching=mixed --set reserve=on_demand\n" in text
    assert "emulate:" not in text
    found = json.loads(answer.read_text())
    best = next(one for one in found["configurations"] if one["number"] == found["winner"])["best"]
    assert 2 < best["rate"] < 60, "calls of some ten requests, about 2,300 tokens"
    assert len(found["serve"]) == 1


def test_a_plan_refuses_what_makes_no_sense() -> None:
    for words, why in (
        (("--slo", "ttft_p99=1s"), "only their whole time can be bounded"),
        (("--slo", "call_p99=1s", "--search", "prefill_decode=mixed,1:1"), "`prefill_decode` divides prompts"),
        (("--slo", "call_p99=1s", "--search", "chunked_prefill_size=512,1024"), "`chunked_prefill_size` is 512"),
    ):
        code, text = planned(*words, "--rate", "5")
        assert (code, why in text) == (2, True), text


def test_several_gpus_of_an_engine_are_listed_as_unfit() -> None:
    code, text = planned("--slo", "call_p99=1s", "--rate", "2", "--search", "tp=1,2", "--requests", "200")
    assert code == 0
    assert "tp 2 is not possible" in text.replace("\n", " ")


def test_the_command_says_what_is_simulated() -> None:
    words = ["--model", "bge-m3", "--gpu", "l4", "--workload", RERANK, "--no-intervals", "--slo", "call_p99=1s"]
    done = CliRunner().invoke(simulate_command, words, catch_exceptions=False)
    assert "whole prompts without KV, up to 16,384 tokens at once" in done.output
    assert "call_p99=1s" in done.output
