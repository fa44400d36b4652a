"""Adapters (LoRA) in the simulator: the cost of their products, the size of slots, loads and waits."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner

from lockstep.core.contract.commands import LaunchBatch, LoadAdapter, Step
from lockstep.core.contract.errors import ConfigError
from lockstep.core.contract.events import AdapterLoaded, ControlRequested, ObservedEvent, RequestArrived
from lockstep.core.journal.reader import read_journal
from lockstep.core.scheduler.engine import Engine
from lockstep.sim.catalogue import load_calibration, load_gpu, load_model
from lockstep.sim.cli.plan import plan
from lockstep.sim.cli.simulate import simulate as simulate_command
from lockstep.sim.cluster.scenario import ClusterScenario
from lockstep.sim.cluster.setup import assemble_cluster
from lockstep.sim.cluster.simulate import simulate_cluster
from lockstep.sim.cost import (
    BatchShape,
    CapacityError,
    CatalogueError,
    CostModel,
    Duration,
    MemoryNeeds,
    kv_capacity,
    roofline_model,
)
from lockstep.sim.cost.base_model import base_cost_model
from lockstep.sim.cost.lora import TARGETS, LoraCost, LoraSpec, products_of, slot_bytes
from lockstep.sim.cost.parallel import Parallelism
from lockstep.sim.host.adapters import parse_targets
from lockstep.sim.plan.trial import Trial
from lockstep.sim.results.compare import compare
from lockstep.sim.results.stored_run import read_run
from lockstep.sim.run.assemble import assemble
from lockstep.sim.run.run_folder import write_run
from lockstep.sim.run.setup import Setup
from lockstep.sim.run.simulate import Run, simulate
from lockstep.sim.scenario.scenario import Scenario
from lockstep.sim.workload.adapters import parse_adapters, with_adapters
from lockstep.sim.workload.turns import Turns
from lockstep.sim.workload.workload import open_workload, workload_digest

SMALL = "gen:n=60,rate=30,input=uniform:20:200,output=uniform:4:40"
MODEL, H200 = load_model("qwen3-8b"), load_gpu("h200")
ONE = Parallelism()


def asked(adapters: str | None = "6:zipf", **fields: Any) -> Scenario:
    settings = {"max_loras": 3, **fields.pop("settings", {})} if adapters else fields.pop("settings", {})
    return Scenario(
        **{"model": "qwen3-8b", "gpu": "h200", "workload": SMALL, "adapters": adapters, "settings": settings, **fields}
    )


def ran(adapters: str | None = "6:zipf", folder: Path | None = None, **fields: Any) -> Run:
    return simulate(assemble(asked(adapters, **fields), {}), folder=folder, check_every=7)


def turns_of(workload: str = SMALL, seed: int = 7) -> Turns:
    return open_workload(workload, seed=seed).turns


def shapes(count: int, seed: int, *, on_adapters: bool = False) -> list[BatchShape]:
    """Passes of all kinds."""
    draw, found = random.Random(seed), []
    for _ in range(count):
        decodes, extends = draw.choice([0, 1, 8, 300, 700]), draw.choice([0, 0, 1, 4])
        tokens = extends * draw.choice([1, 100, 2000])
        drafts = draw.choice([0, 0, 3]) * decodes
        news = tokens + decodes + drafts
        shape = BatchShape(
            extend_rows=extends,
            extend_tokens=tokens,
            extend_pairs=tokens * (tokens + 1) // 2,
            decode_rows=decodes,
            decode_context_tokens=decodes * draw.randrange(1, 5000),
            sampled_rows=decodes + drafts + extends,
            draft_tokens=drafts,
        )
        if on_adapters and news:
            some = draw.randint(1, news)
            shape = msgspec.structs.replace(shape, adapter_tokens=some, adapters=draw.randint(1, min(some, 64)))
        found.append(shape)
    return found


# ---------------------------------------------------------------------------------------------------------------- cost


def test_slots_weigh_what_their_matrices_do() -> None:
    # Qwen3-8B: hidden 4,096, 32 heads and 8 KV heads of 128, feed-forward 12,288, 36 layers; rank 16, two bytes.
    qkv = 3 * 4096 + (4096 + 1024 + 1024)
    o, gate_up, down = 4096 + 4096, 2 * 4096 + 2 * 12288, 12288 + 4096
    assert slot_bytes(MODEL, ONE, LoraSpec(1)) == 36 * 16 * (qkv + o + gate_up + down) * 2 == 87_293_952
    # Two ranks share the outputs of q, k, v, gate and up, and the inputs of o and down.
    halves = (3 * 4096 + (2048 + 512 + 512)) + (2048 + 4096) + (2 * 4096 + 2 * 6144) + (6144 + 4096)
    assert slot_bytes(MODEL, Parallelism(tp=2), LoraSpec(1)) == 36 * 16 * halves * 2
    few = LoraSpec(1, 8, parse_targets("v_proj,q_proj"))
    assert slot_bytes(MODEL, ONE, few) == 36 * 8 * (2 * 4096 + 4096 + 1024) * 2


def test_a_product_is_one_launch_and_each_of_its_parts_another() -> None:
    cost = LoraCost(MODEL, H200, ONE, LoraSpec(4))
    assert cost.kernels == 36 * ((1 + 3) + (1 + 1) + (1 + 2) + (1 + 1))
    assert [product.name for product in cost.products] == ["lora_qkv", "lora_o", "lora_gate_up", "lora_down"]


def test_experts_take_no_adapters_and_layers_of_linear_attention_neither() -> None:
    sparse = products_of(load_model("qwen3-30b-a3b"), ONE, TARGETS)
    assert [product.name for product in sparse] == ["lora_qkv", "lora_o"]
    mixed = load_model("qwen3.5-27b")
    by_name = {product.name: product.layers for product in products_of(mixed, ONE, TARGETS)}
    assert by_name["lora_qkv"] == mixed.attention_layers < mixed.layers == by_name["lora_down"]


def test_products_take_at_least_what_they_move_and_what_they_launch() -> None:
    cost = LoraCost(MODEL, H200, ONE, LoraSpec(8))
    read_us = cost.slot_bytes / (H200.measured["weight_read_gbs"].value * 1e3)
    for adapters in (1, 4, 8):
        floor_us = cost.kernels * H200.measured["bf16_gemm_latency_us"].value + adapters * read_us
        assert floor_us < cost.products_us(adapters, adapters) < 1.2 * floor_us


@pytest.mark.parametrize("tp", [1, 4])
def test_more_tokens_adapters_and_rank_never_take_less(tp: int) -> None:
    draw = random.Random(tp)
    costs = [LoraCost(MODEL, H200, Parallelism(tp=tp), LoraSpec(8, rank)) for rank in (1, 8, 16, 32, 64, 256)]
    for _ in range(300):
        tokens = draw.randint(1, 10 ** draw.randint(1, 5))
        adapters = draw.randint(1, min(tokens, 100))
        times = [cost.products_us(tokens, adapters) for cost in costs]
        assert times == sorted(times)
        for cost, us in zip(costs, times, strict=True):
            assert us <= cost.products_us(tokens + draw.randint(0, 99), adapters)
            assert us <= cost.products_us(tokens + 5, adapters + draw.randint(0, 5))


@pytest.mark.parametrize("layout", [{}, {"tp": 2}, {"tp": 2, "pp": 2}])
def test_room_for_adapters_changes_no_pass_without_any(layout: dict[str, int]) -> None:
    split = Parallelism(**layout)
    without = base_cost_model(MODEL, H200, split)
    with_room = base_cost_model(MODEL, H200, split, lora=LoraSpec(8, 64))
    for shape in shapes(100, 1):
        assert with_room.batch_us(shape) == without.batch_us(shape)
        assert with_room.terms_us(shape) == without.terms_us(shape)
    for shape in shapes(100, 2, on_adapters=True):
        alone = msgspec.structs.replace(shape, adapter_tokens=0, adapters=0)
        us = with_room.batch_us(shape).mean_us
        assert us > without.batch_us(alone).mean_us or not shape.sampled_rows
        assert sum(with_room.terms_us(shape).values()) == pytest.approx(us)


def test_a_decode_with_adapters_is_launched_kernel_by_kernel() -> None:
    small = load_model("qwen3-0.6b")
    cost = roofline_model(small, H200, lora=LoraSpec(4))
    decode = BatchShape(decode_rows=1, decode_context_tokens=10, sampled_rows=1)
    on_one = msgspec.structs.replace(decode, adapter_tokens=1, adapters=1)
    assert cost.lora is not None
    launches = cost.kernels + cost.lora.kernels
    assert cost.batch_us(on_one).mean_us == pytest.approx(5.0 * launches + 10.0)
    assert cost.batch_us(decode).mean_us < 5.0 * cost.kernels
    calibrated = load_calibration("vllm-h100").cost_model(cost)
    assert calibrated.batch_us(on_one).mean_us > calibrated.batch_us(decode).mean_us


def test_a_model_without_room_refuses_adapters() -> None:
    with pytest.raises(CapacityError, match="give it a LoraSpec"):
        roofline_model(MODEL, H200).batch_us(BatchShape(decode_rows=1, adapter_tokens=1, adapters=1))


@pytest.mark.parametrize("layout", [{}, {"tp": 2}, {"tp": 2, "pp": 2}])
def test_slots_are_taken_from_the_pages(layout: dict[str, int]) -> None:
    split = Parallelism(**layout)
    for spec in (LoraSpec(1), LoraSpec(32), LoraSpec(8, 128)):
        without, beside = kv_capacity(MODEL, H200, split), kv_capacity(MODEL, H200, split, needs=MemoryNeeds(lora=spec))
        taken = beside.weights_bytes - without.weights_bytes
        layers = Parallelism(tp=split.tp)
        assert taken == spec.slots * slot_bytes(MODEL, layers, spec) // split.pp
        page = without.page_tokens * without.kv_bytes_per_token
        assert abs(taken - (without.pages - beside.pages) * page) < page


# ------------------------------------------------------------------------------------------------------------ workload


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "expected"),
        ("0", "there are 1 to 100,000 adapters"),
        ("1.5x4", "the share of sessions is above 0 and at most 1"),
        ("0x4", "the share of sessions is above 0"),
        ("4:zipf:11", "the exponent is at most 10"),
        ("4:flat", "expected"),
        ("9" * 5000, "Exceeds the limit|there are"),
        ("..x4", "could not convert"),
    ],
)
def test_what_cannot_be_read_is_refused_with_an_example(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as refused:
        parse_adapters(text)
    assert "hint: such as --adapters 0.8x40:zipf" in str(refused.value)


def test_all_of_a_session_runs_on_one_adapter() -> None:
    turns = turns_of("gen:n=300,rate=10,turns=uniform:1:5,input=fixed:20,output=fixed:5")
    on = with_adapters(turns, parse_adapters("0.5x10:zipf:2"), seed=3)
    by_session: dict[int, set[str]] = {}
    for turn, root in zip(on, turns.root().tolist(), strict=True):
        by_session.setdefault(root, set()).add(turn.adapter)
    assert all(len(names) == 1 for names in by_session.values())
    counts = Counter(name for names in by_session.values() for name in names)
    assert 0.3 < counts[""] / len(by_session) < 0.7
    assert counts["adapter1"] > counts["adapter2"] > counts["adapter5"]
    assert with_adapters(turns, parse_adapters("0.5x10:zipf:2"), seed=3) == on
    assert with_adapters(turns, parse_adapters("0.5x10:zipf:2"), seed=4) != on
    assert [replace(turn, adapter="") for turn in on] == list(turns)


def test_each_tenant_may_have_its_own() -> None:
    mixed = turns_of(
        "mix:law=gen:n=20,rate=5,input=fixed:9,output=fixed:3;med=gen:n=20,rate=5,input=fixed:9,output=fixed:3"
    )
    on = with_adapters(mixed, parse_adapters("tenants"), seed=7)
    assert all(turn.adapter == turn.tenant in ("law", "med") for turn in on)
    with pytest.raises(ConfigError, match="no request of this workload has a tenant"):
        with_adapters(turns_of(), parse_adapters("tenants"), seed=7)
    with pytest.raises(ConfigError, match="no request of this workload has a recorded adapter"):
        with_adapters(turns_of(), parse_adapters("recorded"), seed=7)


def test_digest_names_the_adapters() -> None:
    turns = turns_of()
    assert workload_digest(with_adapters(turns, parse_adapters("0.01x3"), seed=7)) != workload_digest(turns)
    unused = replace(turns, adapter=np.zeros(len(turns), np.int32), adapters=("",))
    assert workload_digest(unused) == workload_digest(turns)
    one = with_adapters(turns, parse_adapters("3"), seed=7)
    assert one.head(10)[9].adapter == one[9].adapter == one.take(np.array([9]))[0].adapter


# ---------------------------------------------------------------------------------------------------------------- runs


class Noting:
    """A cost model that records the shapes it receives."""

    def __init__(self, cost: CostModel) -> None:
        self.cost, self.asked = cost, list[BatchShape]()

    def batch_us(self, shape: BatchShape) -> Duration:
        self.asked.append(shape)
        return self.cost.batch_us(shape)

    def describe(self) -> dict[str, Any]:
        return self.cost.describe()


class Expecting:
    """Expected costs of plans, counted row by row; and the adapters in the facts."""

    def __init__(self) -> None:
        self.slots: dict[int, int] = {}
        self.expected: list[tuple[int, int]] = []
        self.arrived: dict[int, str] = {}
        self.rows: dict[int, int] = {}
        self.loads: list[tuple[int, str]] = []
        self.loaded: list[tuple[int, str]] = []
        self.registered: list[str] = []

    def observe(self, event: ObservedEvent, step: Step, engine: Engine) -> None:
        if isinstance(event, RequestArrived):
            self.arrived[event.request_id] = event.adapter
        if isinstance(event, AdapterLoaded):
            self.loaded.append((event.time_us, event.adapter))
        if isinstance(event, ControlRequested):
            self.registered.append(msgspec.to_builtins(event.control)[1])
        for command in step.commands:
            if isinstance(command, LoadAdapter):
                self.loads.append((event.time_us, command.adapter))
            if isinstance(command, LaunchBatch):
                self.launched(command)

    def launched(self, command: LaunchBatch) -> None:
        plan = command.plan
        for taken in plan.rows_taken:
            self.slots[taken.row] = taken.adapter_slot
            assert (taken.adapter_slot >= 0) == bool(self.arrived[taken.request_id])
        tokens, used = 0, set()
        for i, row in enumerate(plan.rows.tolist()):
            slot = self.slots[row]
            if slot < 0:
                continue
            used.add(slot)
            drafts = plan.speculation.draft_lengths.tolist() if plan.speculation is not None else []
            extends = i < plan.extend_rows
            tokens += int(plan.stops[i] - plan.starts[i]) if extends else 1
            tokens += drafts[i - plan.extend_rows] if drafts and not extends else 0
        self.expected.append((tokens, len(used)))


def noted(setup: Setup) -> tuple[Run, Noting, Expecting]:
    cost, observer = Noting(setup.cost), Expecting()
    return simulate(replace(setup, cost=cost), observer=observer), cost, observer


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"overlap_depth": 2, "chunked_prefill_size": 64, "batching": "mixed"},
        {"speculative_method": "ngram", "num_speculative_tokens": 2},
    ],
)
def test_passes_cost_by_the_rows_in_them(seed: int, settings: dict[str, Any]) -> None:
    share = random.Random(seed).choice(["", "0.5x", "0.9x"])
    setup = assemble(asked(f"{share}5", seed=seed, settings=settings), {})
    _, cost, observer = noted(setup)
    launches = [(shape.adapter_tokens, shape.adapters) for shape in cost.asked]
    if "speculative_method" in settings:  # a drafter has shapes of its own
        launches = [pair for pair in launches if pair in set(observer.expected)]
    assert Counter(launches) >= Counter(observer.expected)
    assert max(adapters for _, adapters in launches) <= 3
    assert observer.registered == sorted(set(observer.arrived.values()) - {""})


def test_loads_go_one_after_the_other_beside_what_runs() -> None:
    setup = assemble(asked("6", workload="gen:n=40,rate=400,input=fixed:20,output=fixed:60"), {})
    run, _, observer = noted(setup)
    load_us = setup.slot_bytes / (H200.datasheet["pcie_gbs"].value * 0.85e3)
    assert len(observer.loads) == len(observer.loaded) == run.data.summary["adapters"]["loads"] >= 6
    assert [name for _, name in observer.loads] == [name for _, name in observer.loaded]
    ends = [time_us for time_us, _ in observer.loaded]
    for (began_us, _), (end_us, _) in zip(observer.loads, observer.loaded, strict=True):
        assert end_us - began_us >= int(load_us)
    assert all(later - earlier >= int(load_us) - 1 for earlier, later in pairwise(ends))
    told = run.data.summary["adapters"]
    assert told["adapters"] == 6
    assert told["requests"] == 40
    assert told["evictions"] == told["loads"] - 3
    assert told["load_us_mean"] >= load_us
    assert told["requests_waited"]


def test_as_many_slots_as_adapters_load_each_once() -> None:
    told = ran("6", settings={"max_loras": 8}).data.summary["adapters"]
    assert (told["loads"], told["evictions"], told["loads_failed"]) == (6, 0, 0)
    tight = ran("6", settings={"max_loras": 2}).data.summary
    assert tight["adapters"]["loads"] > 6
    assert tight["adapters"]["requests_waited"] > told["requests_waited"]


def test_without_adapters_nothing_is_reported_of_them(tmp_path: Path) -> None:
    plain = ran(None)
    assert "adapters" not in plain.metrics()
    assert "adapters" not in plain.about()
    assert "lora" not in plain.about()["cost_model"]
    with_slots = ran(None, settings={"max_loras": 3})  # slots that no request uses
    assert with_slots.data.summary == plain.data.summary
    assert "--adapters" not in plain.setup.scenario.command()


@pytest.mark.parametrize("fields", [{}, {"tp": 2, "pp": 2}, {"tiers": {"host_cache_gb": 2.0}}])
def test_uniform_stretches_of_decodes_change_nothing(fields: dict[str, Any]) -> None:
    setup = assemble(asked("0.7x4", settings={"pages": 400}, **fields), {})
    quick, slow = simulate(setup), simulate(setup, check_every=1)
    assert quick.data.summary == slow.data.summary


def test_equal_runs_write_equal_journals_and_are_read_back(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_run(tmp_path / name, ran(folder=tmp_path / name))
    journals = [next((tmp_path / name / "journal").glob("*.log")).read_bytes() for name in ("a", "b")]
    assert journals[0] == journals[1]
    assert read_journal(tmp_path / "a").header.host["adapters"] == "6:zipf"
    page = (tmp_path / "a" / "report.html").read_text()
    assert "Adapter loads" in page
    assert "Waited for adapters" in page
    write_run(tmp_path / "wide", ran(max_lora_rank=32))
    found = compare([read_run(tmp_path / "a"), read_run(tmp_path / "wide")])
    assert ("max_lora_rank", (16, 32)) in [(one.name, one.values) for one in found.settings]
    assert "adapter loads" in [figure.title for figure in found.figures]


def test_a_closed_loop_a_cluster_and_engines_by_role_have_adapters_too() -> None:
    loop = ran("4", concurrency=4, limit=50).data.summary["adapters"]
    assert loop["requests"] == 50
    base = asked("6")
    two = simulate_cluster(assemble_cluster(ClusterScenario(base=base, replicas=2), {})).data.summary
    assert two["adapters"]["requests"] == 60
    assert 0 < two["adapters"]["adapters"] <= 6
    words = f"simulate --model qwen3-8b --gpu h200 --workload {SMALL} --adapters 6 --max-loras 3".split()
    done = CliRunner().invoke(
        simulate_command, [*words[1:], "--prefill-engines", "1", "--decode-engines", "1", "--json"]
    )
    assert done.exit_code == 0, done.output
    told = msgspec.json.decode(done.stdout)["adapters"]
    assert told["requests"] == 60
    assert told["loads"] >= 12  # of each engine separately


def test_a_plan_prices_adapters_and_reports_how_they_are_served() -> None:
    words = "--model qwen3-8b --gpus h200 --slo ttft_p99=2s --rate 4 --quick --requests 20 --jobs 1".split()
    words += ["--workload", "gen:input=fixed:64,output=fixed:4", "--adapters", "5", "--max-lora-rank", "32"]
    done = CliRunner().invoke(plan, words)
    assert done.exit_code == 0, done.output
    assert "--lora NAME=ADAPTER_FOLDER --max-lora-rank 32" in done.output
    assert "the time of what adapters add to products" in done.output
    assert "--adapters 5" in done.output
    base = Scenario(model="m", gpu="g", workload="w", rate=1.0, limit=1, seed=1)
    assert not any("lora" in name for name in Trial(base=base, replicas=1).record())
    several = Trial(base=replace(base, adapters="5", max_lora_rank=8), replicas=1)
    assert several.scenario().base.max_lora_rank == several.record()["max_lora_rank"] == 8


def test_the_command_runs_it_again() -> None:
    scenario = asked("0.5x9:zipf:1.5", max_lora_rank=64, lora_targets="q_proj,v_proj")
    assert "--adapters 0.5x9:zipf:1.5 --max-lora-rank 64 --lora-targets q_proj,v_proj" in scenario.command()


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"adapters": None, "max_lora_rank": 8}, "`max_lora_rank` is about adapters, and there are none, got `8`"),
        ({"adapters": None, "lora_targets": "q_proj"}, "`lora_targets` is about adapters, and there are none"),
        ({"max_lora_rank": 0}, "`max_lora_rank` must be from 1 to 512, got `0`"),
        ({"max_lora_rank": 513}, "`max_lora_rank` must be from 1 to 512"),
        ({"lora_targets": "q_proj,lm_head"}, "`lm_head` is no target\nhint: all, or some of q_proj"),
        ({"lora_targets": "q_proj,q_proj"}, "`q_proj` is twice there"),
        ({"settings": {"max_loras": 0}}, "`max_loras` is none: no adapter has a place\nhint: --max-loras 8"),
        ({"model": "deepseek-v3", "tp": 8, "gpu": "h200"}, "latent attention, with other matrices than"),
        ({"model": "qwen3-30b-a3b", "lora_targets": "up_proj"}, "has no matrix that adapters of up_proj change"),
        ({"tp": 2, "attention_dp": 2, "model": "qwen3-30b-a3b"}, "`attention_dp` is 2: adapters of data-parallel"),
        ({"settings": {"max_loras": 4000}}, r"room for adapters (.|\n)*hint: lower --max-loras or"),
    ],
)
def test_what_cannot_be_is_refused_by_name(fields: dict[str, Any], problem: str) -> None:
    fields = dict(fields)
    with pytest.raises((ConfigError, CatalogueError, CapacityError), match=problem):
        ran(fields.pop("adapters", "6"), **fields)
