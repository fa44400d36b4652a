"""Hybrid models in the simulator: bytes of a token and of a request, the split of memory, and equal answers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lockstep.core.contract.commands import BatchPlan
from lockstep.core.contract.errors import ConfigError
from lockstep.core.journal.replay import replay
from lockstep.sim.catalogue import load_gpu, load_model
from lockstep.sim.cluster.result import ClusterRun
from lockstep.sim.cluster.scenario import ClusterScenario, EngineGroup
from lockstep.sim.cluster.setup import assemble_cluster
from lockstep.sim.cluster.simulate import simulate_cluster
from lockstep.sim.cost import BatchShape
from lockstep.sim.cost.errors import CapacityError
from lockstep.sim.cost.parallel import Parallelism
from lockstep.sim.cost.stages import PipelineModel, stages_of
from lockstep.sim.host.batch_shapes import state_copies
from lockstep.sim.host.hybrid_memory import state_copies_us, state_copy_us, window_tokens_of
from lockstep.sim.host.pipeline import PipelinedDevice
from lockstep.sim.plan.question import parse_search
from lockstep.sim.run.assemble import assemble
from lockstep.sim.run.setup import Setup
from lockstep.sim.run.simulate import Run, simulate
from lockstep.sim.scenario.scenario import Scenario
from tests.support.quality import quality_of

AGAIN = "gen:n=40,rate=4,turns=uniform:2:4,think=lognormal:3s:1,input=lognormal:900:0.5,output=lognormal:60:0.5"

# By model: window, bytes per token of full layers and of sliding ones, bytes of state per request. By hand, from
# layers x 2 (key and value) x KV heads x head_dim x 2 B, and layers x (heads x 128 x 128 x 4 B + 3 x channels x 2 B).
WEIGHS = {
    "gemma-3-27b": (1024, 10 * 2 * 16 * 128 * 2, 52 * 2 * 16 * 128 * 2, 0),
    "gpt-oss-120b": (128, 18 * 2 * 8 * 64 * 2, 18 * 2 * 8 * 64 * 2, 0),
    "qwen3-next-80b-a3b": (0, 12 * 2 * 2 * 256 * 2, 0, 36 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)),
}


def asked(model: str, tp: int, given: dict[str, object]) -> Run:
    scenario = Scenario(model=model, gpu="h200", tp=tp, workload=AGAIN, tiers=given, seed=3)
    return simulate(assemble(scenario, {}))


@pytest.mark.parametrize("model", WEIGHS)
def test_sizes_of_pools_follow_from_layers_and_ratios(model: str) -> None:
    window, full, sliding, state = WEIGHS[model]
    setup = assemble(Scenario(model=model, gpu="h200", tp=2, workload=AGAIN, tiers={"hybrid_memory": "on"}), environ={})
    kv, hybrid = setup.kv, setup.config.hybrid
    assert kv is not None
    assert (kv.kv_bytes_per_token, kv.window_bytes_per_token) == (full // 2, sliding // 2), "half on each of two"
    assert kv.state_bytes_per_request == state // 2
    assert (hybrid.window_tokens, hybrid.window_pages, hybrid.state_slots) == (window, kv.window_pages, kv.state_slots)
    assert setup.config.pages == kv.pages
    left = kv.usable_bytes - kv.weights_bytes - kv.activation_bytes - kv.runtime_bytes
    assert left - 16 * (full + sliding) - state < kv.kv_bytes + kv.state_bytes <= left
    if window:
        assert kv.window_pages == int(0.8 * kv.pages)
        assert kv.kv_bytes == 16 * (kv.pages * full + kv.window_pages * sliding) // 2
    if state:
        assert kv.state_bytes == kv.state_slots * state // 2
        assert kv.state_bytes == pytest.approx(0.9 * kv.kv_bytes, rel=0.01)


def answers(run: Run) -> list[tuple[str, int, int, str]]:
    requests = run.data.requests
    columns = (requests.label, requests.prompt_tokens, requests.output_tokens, requests.finish_reason)
    return sorted(zip(*(column.tolist() for column in columns), strict=True))


@pytest.mark.parametrize(
    ("model", "tp", "sizes"),
    [("gpt-oss-20b", 1, {"swa_full_tokens_ratio": 0.05}), ("qwen3-next-80b-a3b", 2, {"mamba_full_memory_ratio": 0.05})],
)
def test_answers_are_those_without_pools_of_their_own(model: str, tp: int, sizes: dict[str, object]) -> None:
    plain = asked(model, tp, {})
    pooled = asked(model, tp, {"hybrid_memory": "on", **sizes})
    assert answers(pooled) == answers(plain)
    assert pooled.data.summary["cache"]["hit_ratio"] > 0.2


def test_a_run_replays_and_reports_what_it_was(tmp_path: Path) -> None:
    scenario = Scenario(
        model="gpt-oss-20b", gpu="rtx4090", workload=AGAIN, tiers={"hybrid_memory": "on", "mamba_track_interval": 64}
    )
    setup = assemble(scenario, environ={})
    assert "--hybrid-memory on --mamba-track-interval 64" in scenario.command()
    simulate(setup, folder=tmp_path / "run")
    replay(tmp_path / "run")
    described = setup.about()["kv_capacity"]
    assert described["window_pages"] == setup.config.hybrid.window_pages
    assert "state_slots" not in described


def test_copies_of_states_take_the_time_of_their_bytes() -> None:
    model, gpu = load_model("qwen3-next-80b-a3b"), load_gpu("h200")
    state = WEIGHS["qwen3-next-80b-a3b"][3]
    read_gbs = gpu.measured["weight_read_gbs"].value if "weight_read_gbs" in gpu.measured else 0.8 * gpu.memory_gbs
    assert state_copy_us(model, gpu, Parallelism(tp=2)) == pytest.approx(2 * (state // 2) / (read_gbs * 1e3))
    assert state_copy_us(load_model("qwen3-8b"), gpu, Parallelism()) == 0.0


@pytest.mark.parametrize("microbatches", [{}, {"pp_size": 2}])
def test_each_stage_copies_the_states_of_its_layers(
    monkeypatch: pytest.MonkeyPatch, microbatches: dict[str, int]
) -> None:
    copied = 0

    class Counting(PipelinedDevice):
        def launch(self, plan: BatchPlan, shape: BatchShape, handed_over_us: int) -> None:
            nonlocal copied
            before = sum(self.stages.busy_us)
            super().launch(plan, shape, handed_over_us)
            copies = state_copies(plan)
            spent = sum(self.stages.busy_us) - before - sum(setup.cost.stage_us(shape))
            assert spent == pytest.approx(copies * sum(each), abs=1e-3), f"batch {plan.batch_id} has {copies} copies"
            copied += copies

    monkeypatch.setattr("lockstep.sim.run.simulate.device_type_of", lambda cost: Counting)
    fields: dict[str, Any] = {"model": "qwen3-next-80b-a3b", "gpu": "h200", "tp": 2, "workload": AGAIN, "seed": 3}
    setup = assemble(Scenario(**fields, pp=2, settings=microbatches, tiers={"hybrid_memory": "on"}), {})
    each = state_copies_us(setup.model, setup.gpu, setup.split)
    assert sum(each) == pytest.approx(state_copy_us(setup.model, setup.gpu, Parallelism(tp=2)))
    assert isinstance(setup.cost, PipelineModel)
    run = simulate(setup, check_every=20)
    assert copied > 40
    assert run.data.summary["requests"]["completed"] == len(run.data.requests.label)


def test_a_plan_can_search_it() -> None:
    assert parse_search(("hybrid_memory=off,on", "swa_full_tokens_ratio=0.2,0.8")) == (
        ("hybrid_memory", ("off", "on")),
        ("swa_full_tokens_ratio", (0.2, 0.8)),
    )


@pytest.mark.parametrize(
    ("model", "given", "settings", "said"),
    [
        ("qwen3-8b", {"hybrid_memory": "on"}, {}, "all layers of qwen3-8b have full attention"),
        ("gpt-oss-20b", {"hybrid_memory": "maybe"}, {}, "`hybrid_memory` must be on or off, got `maybe`"),
        ("gpt-oss-20b", {"swa_full_tokens_ratio": 0.5}, {}, "hint: add --hybrid-memory on"),
        ("gpt-oss-20b", {"hybrid_memory": "on", "swa_full_tokens_ratio": 2.0}, {}, "got `2.0`"),
        ("gpt-oss-20b", {"hybrid_memory": "on"}, {"chunked_prefill_size": None}, "hint: set chunked_prefill_size"),
    ],
)
def test_what_cannot_be_is_named(model: str, given: dict[str, object], settings: dict[str, object], said: str) -> None:
    with pytest.raises((ConfigError, CapacityError)) as error:
        assemble(Scenario(model=model, gpu="h200", workload=AGAIN, tiers=given, settings=settings), environ={})
    assert said in str(error.value)


@pytest.mark.parametrize("model", ["gpt-oss-120b", "qwen3-next-80b-a3b"])
def test_each_stage_has_room_for_what_its_layers_keep(model: str) -> None:
    scenario = Scenario(model=model, gpu="h200", pp=3, workload=AGAIN, tiers={"hybrid_memory": "on"})
    setup = assemble(scenario, environ={})
    kv = setup.kv
    assert kv is not None
    assert len(kv.stages_left_bytes) == 3
    fullest = 0.0
    for stage, left in zip(stages_of(setup.model, setup.split), kv.stages_left_bytes, strict=True):
        each = stage.model.kv_values_per_layer(setup.split) * 2
        taken = 16 * each * (kv.pages * stage.model.full_layers + kv.window_pages * stage.model.sliding_layers)
        taken += kv.state_slots * stage.model.state_bytes_per_request(setup.split)
        assert taken <= left
        fullest = max(fullest, taken / left)
    assert fullest > 0.99, "no stage is full"


@pytest.mark.parametrize(
    "beside", [{"pp": 2}, {"pp": 2, "settings": {"pp_size": 2}}, {"settings": {"speculative_method": "ngram"}}]
)
def test_answers_beside_stages_and_drafts_are_the_same(beside: dict[str, Any]) -> None:
    fields: dict[str, Any] = {"model": "qwen3-next-80b-a3b", "gpu": "h200", "tp": 2, "workload": AGAIN, "seed": 3}
    plain = simulate(assemble(Scenario(**fields), {}))
    shares = {"hybrid_memory": "on", "mamba_full_memory_ratio": 0.05}
    pooled = simulate(assemble(Scenario(**fields, **beside, tiers=shares), {}))
    assert answers(pooled) == answers(plain)


# -------------------------------------------------------------------------------------- prefill and decode engines


def handed_over(model: str, tp: int, workload: str, tiers: dict[str, object], **settings: object) -> ClusterRun:
    groups = tuple(EngineGroup(count=1, gpu="h200", settings={"role": role}) for role in ("prefill", "decode"))
    base = Scenario(model=model, gpu="h200", tp=tp, workload=workload, tiers=tiers, settings=settings, seed=3)
    return simulate_cluster(assemble_cluster(ClusterScenario(base=base, engines=groups)), check_every=10)


@pytest.mark.parametrize(("model", "tp"), [("gemma-3-27b", 1), ("gpt-oss-20b", 1), ("qwen3-next-80b-a3b", 4)])
def test_of_a_prompt_the_last_window_is_sent_and_one_state(model: str, tp: int) -> None:
    """Prompts of 2,005 tokens: the last page has 5, and its boundary is 2,000. By hand, in pages of 16."""
    spec = load_model(model)
    each = spec.kv_values_per_layer() * 2
    run = handed_over(model, tp, "gen:n=5,rate=2,input=fixed:2005,output=fixed:20", {"hybrid_memory": "on"})
    transfers = run.data.summary["transfers"]
    window = window_tokens_of(spec)
    sent = 2005 - max(2000 - (window - 1), 0) // 16 * 16 if window else 0
    state = spec.state_bytes_per_request()
    assert transfers["transferred_tokens"] == 5 * 2005
    assert transfers["transferred_window_tokens"] == 5 * sent
    assert transfers["transferred_states"] == 5 * (state > 0)
    whole = 2005 * spec.full_layers * each + sent * spec.sliding_layers * each + state
    assert transfers["transferred_bytes"] == 5 * whole
    rows = run.data.requests
    assert (rows.output_tokens == 20).all()


def test_a_cluster_adds_up_what_one_engine_alone_had_to_evict() -> None:
    """Only the prefill engine, which has every prompt's windows, runs short of them: the decode engine counts none."""
    tiers = {"hybrid_memory": "on", "swa_full_tokens_ratio": 0.2}
    run = handed_over("gemma-3-27b", 1, AGAIN.replace("input=lognormal:900", "input=lognormal:2500"), tiers)
    prefill, decode = (one.data.summary["cache"].get("window_pages_evicted") for one in run.engines)
    assert prefill > 0
    assert decode is None
    assert run.data.summary["cache"]["window_pages_evicted"] == prefill


def overloaded(batching: str) -> Setup:
    """Few window pages, and requests that arrive faster than they are served."""
    scenario = Scenario(
        model="gemma-3-27b",
        gpu="h200",
        engine="none",
        workload="gen:n=150,rate=20,input=lognormal:1500:0.5,output=lognormal:500:0.4",
        settings={"batching": batching, "max_running_requests": 512},
        tiers={"hybrid_memory": "on", "swa_full_tokens_ratio": 0.2},
        seed=7,
    )
    return assemble(scenario, {})


@pytest.mark.parametrize("batching", ["prefill_first", "mixed"])
def test_prompts_with_few_window_pages_left_do_not_cause_a_storm_of_retractions(batching: str) -> None:
    # Without `chunk_tokens_min`: 84 and 54 retractions, 980 and 1,160 output tokens/s (docs/decisions/0097).
    summary = simulate(overloaded(batching)).data.summary
    assert summary["scheduler"]["retractions"] <= 20
    assert summary["throughput"]["output_tokens_per_s"] > 1_200
    assert summary["latency"]["ttft_us_p50"] < 9_000_000


@pytest.mark.parametrize("batching", ["prefill_first", "mixed"])
def test_the_bounds_of_quality_show_a_storm_of_retractions(batching: str, tmp_path: Path) -> None:
    """Chunks of any size, as before the decision, break the bounds that hold for every history of the swarm."""
    setup = overloaded(batching)
    hybrid = msgspec.structs.replace(setup.config.hybrid, chunk_tokens_min=msgspec.UNSET)
    storm = replace(setup, config=msgspec.structs.replace(setup.config, hybrid=hybrid))
    simulate(setup, folder=tmp_path / "sound")
    simulate(storm, folder=tmp_path / "storm")
    assert not quality_of(tmp_path / "sound").broken()
    broken = quality_of(tmp_path / "storm").broken()
    assert any(one.startswith("retractions by request of a run") for one in broken), broken
