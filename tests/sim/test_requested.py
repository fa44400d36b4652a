"""Every option of `lockstep simulate` is kept by the command line in a run folder, and read back from it."""

from __future__ import annotations

import click
import pytest

from lockstep.core.contract.errors import ConfigError
from lockstep.host.options import options_of
from lockstep.sim.cli.requested import requested_of
from lockstep.sim.cli.run_options import RunOptions
from lockstep.sim.cli.simulate import simulate
from lockstep.sim.cli.stored_command import requested_by_command
from lockstep.sim.cluster.scenario import ClusterScenario
from lockstep.sim.scenario.scenario import Scenario
from lockstep.sim.scenario.settings import SCHEDULER_OPTIONS, tier_fields

PLAIN = "lockstep simulate --model qwen3-8b --gpu h200 --workload gen:n=20,rate=4"
CLUSTER = f"{PLAIN} --replicas 2"
AFFINE = f"{CLUSTER} --router prefix_affinity"
ROLES = "lockstep simulate --model qwen3-8b --gpu h200 --workload gen:n=20 --prefill-engines 1 --decode-engines 1"
NEW = {
    "model": (PLAIN.replace("qwen3-8b", "qwen3-32b"), PLAIN),
    "gpu": (PLAIN.replace("h200", "b200"), PLAIN),
    "workloads": (PLAIN.replace("n=20", "n=30"), PLAIN),
    "engines": (PLAIN.replace("--gpu h200", "--engines 2xh200:tp=2:weight=1.5:page_size=32"), CLUSTER),
    "prefill_engines": (ROLES.replace("prefill-engines 1", "prefill-engines 2"), ROLES),
    "decode_engines": (ROLES.replace("decode-engines 1", "decode-engines 2"), ROLES),
    "link_gbs": (f"{ROLES} --link-bandwidth 12.5", ROLES),
    "link_latency_us": (f"{ROLES} --link-latency 2ms", ROLES),
    "placement": (f"{ROLES} --placement mixed", ROLES),
    "pp_layer_partition": (f"{PLAIN} --pp 2 --pp-layer-partition 17,19", f"{PLAIN} --pp 2"),
    "lora_targets": (f"{PLAIN} --adapters 4 --lora-targets q_proj,v_proj", f"{PLAIN} --adapters 4"),
    "router": (f"{CLUSTER} --router least_tokens", CLUSTER),
    "price": (f"{CLUSTER} --autoscale open_requests=4 --price 8h=1.5,20h=0.5", f"{CLUSTER} --autoscale open_requests=4"),  # noqa: E501
    "hop_us": (f"{CLUSTER} --router-hop 300us", CLUSTER),
    "report_interval_us": (
        f"{CLUSTER} --router total_requests --router-report-interval 1s",
        f"{CLUSTER} --router total_requests",
    ),
    "report_delay_us": (
        f"{CLUSTER} --router total_requests --router-report-interval 1s --router-report-delay 5ms",
        f"{CLUSTER} --router total_requests --router-report-interval 1s",
    ),
    "router_load_bound": (f"{AFFINE} --router-load-bound 1.75", AFFINE),
    "router_load_floor": (f"{AFFINE} --router-load-floor 9", AFFINE),
    "router_block_tokens": (f"{AFFINE} --router-block-tokens 64", AFFINE),
    "router_sessions_max": (
        f"{CLUSTER} --router session_sticky --router-sessions-max 77",
        f"{CLUSTER} --router session_sticky",
    ),
}  # fmt: skip
"""Options that require others, by name: a command line with the option, and the same without it."""
TIER_VALUES = {"duration": "3ms", float: "2.5", int: "3"}
NOT_KEPT = tuple(options_of(RunOptions))
VALUES = {"float": "2.5", "integer": "3", "duration": "3ms", "text": "word"}
MORE = {
    "tp": "2",
    "ep": "2",
    "attention_dp": "2",
    "pp": "2",
    "expert_cv": "0.4",
    "redundant_experts": "8",
    "eplb_interval": "200",
    "eplb_imbalance_min": "1.2",
    "expert_drift": "0.125",
    "pdmux_sm_groups": "4",
    "pdmux_decode_divisor": "16",
    "pdmux_divisions": "112:20:0,96:36:10",
    "pdmux_token_budget": "4096",
    "engine": "sglang",
    "replicas": "3",
    "scaling": "open_requests=4.5,minimum=1,start=0s,interval=50ms,tolerance=0.2",
    "dispatch": "open=8,waiting=3,share.a=2",
    "rate": "6.5",
    "rate_scale": "1.3333333333333333",
    "time_window": "600..1200",
    "concurrency": "6",
    "limit": "11",
    "warm_up": "5",
    "seed": "12",
    "max_new_tokens": "99",
    "grammar_compile_us": "7ms",
    "receive_interval": "4",
    "pue": "1.25",
    "scale_up_gpus": "16",
    "network_gbs": "12.5",
    "network_latency_us": "3us",
    "grid_gco2_per_kwh": "60.0",
    "mem_fraction": "0.8123456789",
    "weights_dtype": "fp8",
    "kv_dtype": "fp8",
    "fp8_activations": "off",
    "operators": "some folder/tables",
    "calibration": "vllm-h100",
    "profile": "vllm",
    "acceptance": "0.8,0.7",
    "acceptance_spread": "0.25",
    "draft_model": "qwen3-0.6b",
    "grammar_forces": "0.25x3",
    "diffusion_block": "32",
    "diffusion_iterations": "4..12",
    "media": "image=0.3x1..4:1024x768/200",
    "mm_encoder_tp_mode": "data",
    "encoder_gpus": "1",
    "adapters": "0.8x40:zipf:1.2",
    "max_lora_rank": "32",
    "samples": "0.3x2..8",
    "sample": "spread",
    "columns": "arrival=ts:ms,input=n",
    "tokenizer": "a folder",
    "chars_per_token": "3.5",
    "slos": "ttft_p99=500ms",
    "schedule_policy": "lpm",
    **{
        name: TIER_VALUES.get("duration" if name.endswith("_us") else field.kind, "a word")
        for name, field in tier_fields().items()
    },
}
"""A value of each other option that takes one."""
OF_PARSING = ("save_options", "help_all")  # they act while the command line is parsed
OPTIONS: dict[str, click.Option] = {
    str(one.name): one for one in simulate.params if isinstance(one, click.Option) and one.name not in OF_PARSING
}
SCHEDULER = {name: kind for name, kind, _ in SCHEDULER_OPTIONS}


def command_lines(name: str) -> list[tuple[str, str]]:
    """With the option, and without, as often as it has kinds of values."""
    option = OPTIONS[name]
    if name in NEW:
        return [NEW[name]]
    if option.is_flag or option.is_bool_flag:
        return [(f"{PLAIN} {flag}", PLAIN) for flag in (*option.opts[:1], *option.secondary_opts[:1])]
    if name in MORE:
        return [(f"{PLAIN} {option.opts[0]} '{MORE[name]}'", PLAIN)]
    kinds = SCHEDULER[name].name.split("|")
    return [(f"{PLAIN} {option.opts[0]} {VALUES.get(kind, kind)}", PLAIN) for kind in kinds]


@pytest.mark.parametrize("name", sorted(set(OPTIONS) - set(NOT_KEPT)))
def test_the_value_of_an_option_is_read_back_from_the_command_of_a_run(name: str) -> None:
    for with_it, without in command_lines(name):
        asked = requested_by_command(with_it)
        assert asked != requested_by_command(without), with_it
        assert requested_by_command(asked.command()) == asked
        assert requested_by_command(asked.command()).command() == asked.command()


def test_options_of_a_run_alone_are_not_kept() -> None:
    assert set(NOT_KEPT) < set(OPTIONS)
    for name in NOT_KEPT:  # the simulation is the same with any value
        option = OPTIONS[name]
        words = option.opts[0] if option.is_flag else f"{option.opts[0]} 7"
        assert requested_by_command(f"{PLAIN} {words}") == requested_by_command(PLAIN)


def test_an_unknown_option_is_no_scenario() -> None:
    options = simulate.make_context("lockstep simulate", PLAIN.split()[2:]).params
    known = {name: options[name] for name in options if name not in NOT_KEPT}
    assert requested_of(known) == requested_by_command(PLAIN)
    with pytest.raises(TypeError, match="new_option"):
        requested_of({**known, "new_option": 1})


def test_one_engine_and_several() -> None:
    assert isinstance(requested_by_command(PLAIN), Scenario)
    for line in (CLUSTER, ROLES, f"{PLAIN} --router-hop 0ms", f"{PLAIN} --rank-schedulers"):
        assert isinstance(requested_by_command(line), ClusterScenario)
    with pytest.raises(ConfigError, match="not made by `lockstep simulate`, but by `lockstep bench`"):
        requested_by_command("lockstep bench serve --to http://127.0.0.1:8000")
    with pytest.raises(click.UsageError, match="must be given together"):
        requested_by_command(ROLES.replace("--decode-engines 1", ""))
