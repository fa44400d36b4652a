"""Drafts in the simulator: the number of right ones follows from the request alone, and costs are as documented."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.core.contract.errors import ConfigError
from lockstep.core.journal.replay import replay
from lockstep.sim.catalogue import load_gpu, load_model
from lockstep.sim.cost import BatchShape, CapacityError, Parallelism
from lockstep.sim.cost.roofline import roofline_model
from lockstep.sim.cost.stages import PipelineModel
from lockstep.sim.host.pipeline import PipelinedDevice
from lockstep.sim.host.speculation import Acceptance, ModelDraftCost, NgramDraftCost, expected_tokens, parse_rates
from lockstep.sim.run.assemble import assemble
from lockstep.sim.run.simulate import Run, simulate
from lockstep.sim.scenario.scenario import Scenario

EAGLE = {"speculative_method": "eagle", "num_speculative_tokens": 3}


def run(settings: dict[str, Any], folder: Path | None = None, **scenario: Any) -> Run:
    asked = {"model": "qwen3-8b", "gpu": "h200", "workload": "gen:n=40,rate=20,output=fixed:64", **scenario}
    return simulate(assemble(Scenario(settings=settings, **asked), environ={}), folder=folder)


def test_answers_are_the_same_and_come_sooner(tmp_path: Path) -> None:
    """Every answer as long as without drafts, in a run that replays, and again byte for byte."""
    plain, first, again = run({}), run(EAGLE, tmp_path / "a"), run(EAGLE, tmp_path / "b")
    assert (plain.data.requests.output_tokens == first.data.requests.output_tokens).all()
    assert first.data.summary["latency"]["tpot_us_mean"] < 0.8 * plain.data.summary["latency"]["tpot_us_mean"]
    assert "speculation" not in plain.data.summary
    assert [path.read_bytes() for path in sorted((tmp_path / "a" / "journal").iterdir())] == [
        path.read_bytes() for path in sorted((tmp_path / "b" / "journal").iterdir())
    ]
    assert replay(tmp_path / "a").batches == first.batches == again.batches


def test_length_measured_is_the_length_the_rates_mean() -> None:
    summary = run(
        {**EAGLE, "overlap_depth": 0}, acceptance="0.8,0.6,0.5", workload="gen:n=40,rate=20,output=fixed:400"
    ).data.summary
    drafts = summary["speculation"]
    assert drafts["accepted_length_mean"] == pytest.approx(expected_tokens((0.8, 0.6, 0.5), 3), rel=0.03)
    assert drafts["acceptance_by_position"] == pytest.approx([0.8, 0.48, 0.24], abs=0.03)
    assert drafts["tokens_per_batch_mean"] > drafts["accepted_length_mean"]
    assert drafts["drafts"] > drafts["drafts_accepted"] > 0


def test_early_ends_and_clusters_work_with_drafts() -> None:
    from lockstep.sim.cluster.scenario import ClusterScenario
    from lockstep.sim.cluster.setup import assemble_cluster
    from lockstep.sim.cluster.simulate import simulate_cluster

    ended = run(EAGLE, max_new_tokens=256)
    assert ended.data.summary["requests"]["by_finish_reason"] == {"stop": 40}
    base = Scenario(model="qwen3-8b", gpu="h200", workload="gen:n=40,rate=20,output=fixed:64", settings=EAGLE)
    both = simulate_cluster(assemble_cluster(ClusterScenario(base=base, replicas=2), {}))
    assert both.data.summary["requests"]["completed"] == 40
    parts, whole = [one.data.summary["speculation"] for one in both.engines], both.metrics()["speculation"]
    for name in ("rows_verified", "drafts", "drafts_accepted", "verify_batches"):
        assert whole[name] == sum(part[name] for part in parts) > max(part[name] for part in parts) > 0, name
    lengths = [part["accepted_length_mean"] for part in parts]
    assert min(lengths) <= whole["accepted_length_mean"] <= max(lengths)
    assert whole["acceptance_by_position"][0] > whole["acceptance_by_position"][2] > 0
    alone = simulate_cluster(assemble_cluster(ClusterScenario(base=base, replicas=1), {}))
    assert alone.metrics()["speculation"] == alone.engines[0].data.summary["speculation"]


def test_right_drafts_follow_from_request_and_position() -> None:
    acceptance = Acceptance.of("eagle", "0.7", 0.5, 7)
    requests, positions = np.arange(4000, dtype=np.uint64), np.arange(4000, dtype=np.int32) % 50
    chances = np.array([acceptance.chances(request, 3) for request in range(4000)])
    right = acceptance.right(requests, positions, chances, np.full(4000, 3, np.int32))
    order = np.random.Generator(np.random.Philox(1)).permutation(4000)
    shuffled = acceptance.right(requests[order], positions[order], chances[order], np.full(4000, 3, np.int32))
    assert (shuffled == right[order]).all()
    assert np.mean(right >= 1) == pytest.approx(chances[:, 0].mean(), abs=0.03)
    assert 0.08 < chances[:, 0].std() < 0.13  # 0.5 of log-odds around 0.7
    fewer = acceptance.right(requests, positions, chances, np.full(4000, 1, np.int32))
    assert (fewer == np.minimum(right, 1)).all()


def test_drafting_and_verifying_cost_what_they_run() -> None:
    cost = roofline_model(load_model("qwen3-8b"), load_gpu("h200"))
    plain = BatchShape(decode_rows=8, decode_context_tokens=8000, sampled_rows=8)
    verify = BatchShape(decode_rows=8, decode_context_tokens=8000, sampled_rows=32, draft_tokens=24)
    alone, drafted = cost.batch_us(plain).mean_us, cost.batch_us(verify).mean_us
    assert alone < drafted < 1.1 * alone  # eight rows are bound by the weights, not by arithmetic
    crowd = BatchShape(decode_rows=512, decode_context_tokens=512_000, sampled_rows=2048, draft_tokens=1536)
    few = BatchShape(decode_rows=512, decode_context_tokens=512_000, sampled_rows=512)
    assert cost.batch_us(crowd).mean_us > 1.5 * cost.batch_us(few).mean_us  # five hundred are not
    assert sum(cost.terms_us(verify).values()) == pytest.approx(drafted)
    head = ModelDraftCost(cost, 36)
    assert head.draft_us(verify, 0) == 0.0
    assert 2.5 < head.draft_us(verify, 3) / head.draft_us(verify, 1) < 3.1
    assert head.draft_us(verify, 3) < 0.5 * alone
    assert head.slowed(2.0).draft_us(verify, 3) == pytest.approx(2.0 * head.draft_us(verify, 3), rel=0.05)
    assert NgramDraftCost().draft_us(verify, 3) < head.draft_us(verify, 1)


def test_a_drafter_takes_memory() -> None:
    def pages(**more: Any) -> int:
        settings = {"speculative_method": more.pop("method")}
        scenario = Scenario(model="qwen3-8b", gpu="h200", workload="gen:n=1", settings=settings, **more)
        return assemble(scenario, environ={}).config.pages

    assert pages(method="none") == pages(method="ngram") > pages(method="mtp")
    assert pages(method="mtp") > pages(method="draft_model", draft_model="qwen3-0.6b")


@pytest.mark.parametrize("method", ["eagle", "draft_model"])
def test_one_of_several_stages_drafts(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """A pass takes all stages, the sends between them, and drafting: by a head in the last, by a model in the first."""
    devices: list[PipelinedDevice] = []
    passes: list[tuple[Any, BatchShape, Any]] = []

    class Watched(PipelinedDevice):
        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            devices.append(self)

        def launch(self, plan: Any, shape: BatchShape, handed_over_us: int) -> None:
            super().launch(plan, shape, handed_over_us)
            passes.append((plan, shape, self.queue[-1]))

    monkeypatch.setattr("lockstep.sim.run.simulate.device_type_of", lambda cost: Watched)
    setup = assemble(
        Scenario(
            model="qwen3-8b", gpu="h200", pp=2, concurrency=1, workload="gen:n=3,input=fixed:300,output=fixed:40",
            settings={**EAGLE, "speculative_method": method, "overlap_depth": 0},
            draft_model="qwen3-0.6b" if method == "draft_model" else None,
        ),
        environ={},
    )  # fmt: skip
    assert simulate(setup).data.summary["requests"]["completed"] == 3
    (device,), cost, drafting = devices, setup.cost, setup.drafting
    assert isinstance(cost, PipelineModel)
    assert drafting is not None
    busy_us = [0.0, 0.0]
    for plan, shape, ran in passes:
        drafts = 0 if plan.speculation is None else int(plan.speculation.draft_lengths.max())
        assert shape.draft_tokens == drafts
        stages_us, draft_us = cost.stage_us(shape), drafting.drafter.draft_us(shape, drafts)
        assert (draft_us > 0.0) == bool(drafts or shape.extend_tokens), "a prompt is read, too"
        send_us = cost.send_us(shape.extend_tokens + shape.decode_rows + drafts)
        assert ran.finished_us - ran.started_us == pytest.approx(sum(stages_us) + send_us + draft_us, abs=2)
        at = 0 if method == "draft_model" else 1
        busy_us = [busy_us[0] + stages_us[0], busy_us[1] + stages_us[1]]
        busy_us[at] += draft_us
    assert device.stages.busy_us == pytest.approx(busy_us)


@pytest.mark.parametrize("method", ["eagle", "draft_model"])
def test_one_of_several_stages_has_the_drafter(method: str) -> None:
    """The last one a head, the first one a draft model. Of equal stages that one has the least room: the capacity."""
    model = load_model("qwen3-8b")
    more: dict[str, Any] = {"draft_model": "qwen3-0.6b"} if method == "draft_model" else {}
    asked = Scenario(
        model="qwen3-8b", gpu="h200", workload="gen:n=1", pp=2, pp_layer_partition="18,18",
        settings={"overlap_depth": 0},
    )  # fmt: skip
    plain = assemble(asked, environ={}).kv
    drafting = assemble(
        replace(asked, settings={**asked.settings, "speculative_method": method}, **more), environ={}
    ).kv
    assert plain is not None
    assert drafting is not None
    at = 0 if method == "draft_model" else 1
    assert drafting.stages_weights_bytes[1 - at] == plain.stages_weights_bytes[1 - at]
    taken = drafting.stages_weights_bytes[at] - plain.stages_weights_bytes[at]
    one = Parallelism()
    if method == "eagle":  # a layer's share of all weights, and an embedding: that of the model is on the first stage
        embedding = 2 * model.vocab * model.hidden
        assert taken == pytest.approx(model.weights_bytes("bf16", one) / model.layers + embedding, abs=2)
        kv_per_token = model.kv_bytes_per_token("bf16", one) // model.layers
    else:
        small = load_model("qwen3-0.6b")
        assert taken == pytest.approx(small.weights_bytes("bf16", one), abs=2)
        kv_per_token = small.kv_bytes_per_token("bf16", one)
    per_token = model.kv_bytes_per_token("bf16", one) // 2 + kv_per_token
    assert drafting.kv_bytes_per_token == per_token
    assert drafting.pages == (plain.stages_left_bytes[at] - taken) // (per_token * plain.page_tokens)


@pytest.mark.parametrize(
    ("drafter", "layers"),
    [
        ({"method": "eagle"}, [19, 17]),
        ({"method": "draft_model", "draft_model": "qwen3-0.6b"}, [17, 19]),
        ({"method": "ngram"}, [18, 18]),
        ({"method": "none"}, [18, 18]),
        ({"method": "eagle", "pp_layer_partition": "19,17"}, [19, 17]),
        ({"method": "none", "pp_layer_partition": "35,1"}, [35, 1]),
    ],
)
def test_a_stage_that_drafts_has_fewer_layers(drafter: dict[str, Any], layers: list[int]) -> None:
    settings = {"speculative_method": drafter.pop("method")}
    asked = Scenario(model="qwen3-8b", gpu="h200", workload="gen:n=1", pp=2, settings=settings, **drafter)
    assert assemble(asked, environ={}).cost.describe()["stage_layers"] == layers


@pytest.mark.parametrize("load", ["input=fixed:300,output=fixed:60", "input=fixed:3000,output=fixed:30"])
def test_fewer_layers_beside_the_drafter_serve_more(load: str) -> None:
    settings = {"speculative_method": "eagle", "pp_size": 4, "max_running_requests": 32}
    asked = {"model": "qwen3-32b", "pp": 4, "workload": f"gen:n=64,rate=inf,{load}"}
    even, fewer = (run(settings, pp_layer_partition=partition, **asked) for partition in ("16,16,16,16", None))
    assert fewer.setup.cost.describe()["stage_layers"] == [17, 17, 17, 13]
    busiest = [max(each.data.summary["device"]["pipeline"]["stage_busy_us"]) for each in (even, fewer)]
    assert busiest[1] < busiest[0]
    assert even.setup.kv is not None
    assert fewer.setup.kv is not None
    assert fewer.setup.kv.pages > even.setup.kv.pages


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"pp": 2, "pp_layer_partition": "18,17"}, r"layers of 2 stages, 36 together, got `18,17`\nhint: .* 18,18 is"),
        ({"pp": 2, "pp_layer_partition": "12,12,12"}, "layers of 2 stages, 36 together, got `12,12,12`"),
        ({"pp": 2, "pp_layer_partition": "36,0"}, "got `36,0`"),
        ({"pp": 2, "pp_layer_partition": "many"}, "got `many`"),
        ({"pp_layer_partition": "36"}, "`pp_layer_partition` is for several stages, got `36` with pp 1"),
    ],
)
def test_a_partition_that_is_not_one_is_refused(layout: dict[str, Any], message: str) -> None:
    with pytest.raises(CapacityError, match=message):
        assemble(Scenario(model="qwen3-8b", gpu="h200", workload="gen:n=1", **layout), environ={})


@pytest.mark.parametrize("method", ["ngram", "eagle"])
def test_microbatches_verify_drafts_and_give_the_same_answers(tmp_path: Path, method: str) -> None:
    """Each stage is busier than with one running batch, and a replay of the run finds the same batches."""
    # Kernels alone: the costs of an engine's scheduler would be those of the first stage.
    stages = {"pp": 2, "engine": "none", "workload": "gen:n=40,rate=inf,input=fixed:300,output=fixed:64"}
    settings = {"speculative_method": method, "max_running_requests": 16}
    plain, one = run({"max_running_requests": 16}, **stages), run(settings, **stages)
    several = run({**settings, "pp_size": 2}, tmp_path / "several", **stages)
    assert (plain.data.requests.output_tokens == several.data.requests.output_tokens).all()
    busy = [each.data.summary["device"]["pipeline"]["stage_busy_share"] for each in (one, several)]
    assert busy[1] > 1.5 * busy[0]
    first, last = several.data.summary["device"]["pipeline"]["stage_busy_us"]
    assert last > first, "which drafts"
    assert replay(tmp_path / "several").batches == several.batches


@pytest.mark.parametrize(
    ("settings", "more", "said"),
    [
        ({}, {"acceptance": "0.5"}, "`acceptance` is `0.5`, but `speculative_method` is none"),
        (EAGLE, {"draft_model": "qwen3-0.6b"}, "`draft_model` is `qwen3-0.6b`, but `speculative_method` is eagle"),
        ({"speculative_method": "draft_model"}, {}, "needs a `draft_model`"),
        (EAGLE, {"acceptance": "0.5,high"}, "`acceptance` must be chances from 0 to 1"),
        (EAGLE, {"acceptance": "1.5"}, "`acceptance` must be chances from 0 to 1"),
        (EAGLE, {"acceptance_spread": -1.0}, "`acceptance_spread` must be from 0"),
    ],
)
def test_what_cannot_be_is_one_clear_error(settings: dict[str, Any], more: dict[str, Any], said: str) -> None:
    scenario = Scenario(model="qwen3-8b", gpu="h200", workload="gen:n=1", settings=settings, **more)
    with pytest.raises(ConfigError, match=said):
        assemble(scenario, environ={})


def test_rates_are_read() -> None:
    assert parse_rates("0.85, 0.7") == ((0.85,), (0.7,))
    assert parse_rates("0.7/0.1/0.05,0.6") == ((0.7, 0.1, 0.05), (0.6,))


def test_a_plan_reports_what_drafts_bring_and_that_they_are_not_served_yet(tmp_path: Path) -> None:
    from click.testing import CliRunner

    from lockstep.sim.cli.plan import plan

    words = "--model qwen3-8b --gpus h200 --workload gen:input=fixed:64,output=fixed:12 --load sessions --sessions 2"
    words += " --search speculative_method=none,mtp --acceptance 0.9 --slo tpot_p90=1s --quick --requests 10 --all"
    result = CliRunner().invoke(plan, [*words.split(), "--jobs", "1", "--json", str(tmp_path / "plan.json")])
    assert result.exit_code == 0, result.output
    assert "(h200 speculative_method=mtp)" in result.output
    assert "not supported there yet: speculative_method mtp" in result.output
    assert "--set speculative_method" not in result.output
    assert "--speculative-method mtp --acceptance 0.9" in result.output or "--acceptance 0.9" in result.output


def test_a_plan_compares_microbatches_with_drafts(tmp_path: Path) -> None:
    from click.testing import CliRunner

    from lockstep.sim.cli.plan import plan

    words = "--model qwen3-8b --gpus h200 --workload gen:input=fixed:64,output=fixed:12 --load sessions --sessions 2"
    words += " --pp 2 --search pp_size=1,2 --search speculative_method=none,ngram --slo tpot_p90=1s --quick"
    words += " --requests 10 --all"
    result = CliRunner().invoke(plan, [*words.split(), "--jobs", "1", "--json", str(tmp_path / "plan.json")])
    assert result.exit_code == 0, result.output
    told = json.loads((tmp_path / "plan.json").read_text("utf-8"))
    rates = {tuple(one["settings"].values()): one["best"]["goodput_requests_per_s"] for one in told["configurations"]}
    assert rates["2", "ngram"] > rates["2", "none"]
    assert rates["1", "ngram"] > rates["1", "none"]
