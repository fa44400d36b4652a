"""Racks: which engines share a scale-up domain, and what a transfer within one takes."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from lockstep.core.contract.errors import ConfigError
from lockstep.sim.catalogue import load_gpu
from lockstep.sim.cli.plan import plan
from lockstep.sim.cli.simulate import simulate
from lockstep.sim.cluster.placement import PlacedEngine, domains_of_engines
from lockstep.sim.cost.hardware import all_reduce_of, domains_of, in_racks, network_of

H200 = load_gpu("h200")


def engines(*roles: str, gpus: int = 4) -> list[PlacedEngine]:
    names = {"p": "prefill", "d": "decode"}
    return [PlacedEngine(H200, gpus, names[role]) for role in roles]


def test_engines_fill_domains_in_order_or_in_proportion() -> None:
    two_and_four = engines(*"ppdddd")
    assert domains_of_engines(two_and_four, "apart") == [0, 1, 2, 3, 4, 5]
    assert domains_of_engines(two_and_four, "packed") == [0, 0, 1, 1, 2, 2]
    mixed = domains_of_engines(two_and_four, "mixed")
    assert {mixed[0], mixed[1]} & set(mixed[2:]), "a prefill engine shares its domain with a decode engine"
    assert max(mixed.count(domain) for domain in set(mixed)) == 2  # two engines of 4 GPUs in a node of 8


def test_an_engine_that_does_not_fit_begins_a_domain_and_a_larger_one_has_several() -> None:
    assert domains_of_engines(engines(*"ppd", gpus=5), "packed") == [0, 1, 2]
    large = [*engines("p", gpus=16), *engines("d", gpus=4)]
    assert domains_of_engines(large, "packed") == [0, 2]
    other = [*engines("p"), PlacedEngine(load_gpu("h100"), 4, "decode")]
    assert domains_of_engines(other, "packed") == [0, 1], "another GPU is in another machine"


def test_ranks_of_an_engine_are_one_engine() -> None:
    ranks = [replace(one, ranks=2) for one in engines(*"ppdddd") for _ in range(2)]
    alone = domains_of_engines(engines(*"ppdddd"), "mixed")
    assert domains_of_engines(ranks, "mixed") == [domain for domain in alone for _ in range(2)]


def test_a_rack_of_another_size_and_another_network_change_the_collectives() -> None:
    assert domains_of(H200, 16) == 2
    assert domains_of(in_racks(H200, 16), 16) == 1
    slow, usual, fast = (all_reduce_of(in_racks(H200, 8, gbs), 16).ring_gbs for gbs in (10.0, None, 200.0))
    assert slow < usual < fast
    assert network_of(in_racks(H200, None, 100.0, 3.0))[0].value == 100.0
    assert (
        all_reduce_of(in_racks(H200, None, None, 3.0), 16).direct_latency_us < all_reduce_of(H200, 16).direct_latency_us
    )


@pytest.mark.parametrize(
    ("gpu", "values", "field"),
    [
        ("h200", (0, None, None), "scale_up_gpus"),
        ("l40s", (8, None, None), "scale_up_gpus"),
        ("h200", (None, 0.0, None), "network_gbs"),
        ("h200", (None, None, 0.0), "network_latency"),
    ],
)
def test_impossible_racks_are_refused(gpu: str, values: tuple[Any, Any, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        in_racks(load_gpu(gpu), *values)


LOAD = "--model llama-3.1-70b --gpu h200 --tp 4 --workload gen:n=40,rate=6,input=fixed:4000,output=fixed:20"


def run(*more: str) -> Result:
    return CliRunner().invoke(simulate, [*LOAD.split(), "--no-intervals", "--json", *more])


def test_transfers_within_a_domain_take_its_links() -> None:
    roles = ("--prefill-engines", "1", "--decode-engines", "1")
    found = {}
    for placement in ("apart", "packed"):
        result = run(*roles, "--placement", placement)
        assert result.exit_code == 0, result.output
        found[placement] = json.loads(result.stdout)
    apart, packed = found["apart"]["transfers"], found["packed"]["transfers"]
    assert "scale_up_bytes" not in apart
    assert packed["scale_up_bytes"] == packed["transferred_bytes"] == apart["transferred_bytes"] > 0
    assert packed["transfer_us_mean"] < 0.5 * apart["transfer_us_mean"]
    assert (packed["domains"], packed["link_busy_share"]) == (1, 0.0)
    assert found["packed"]["about"]["placement"] == "packed"
    assert "--placement packed" in found["packed"]["about"]["command"]


def test_a_placement_needs_roles_and_a_known_name() -> None:
    assert "there are none" in run("--placement", "packed").stderr
    roles = ("--prefill-engines", "1", "--decode-engines", "1")
    assert "must be one of apart, packed, mixed" in run(*roles, "--placement", "near").stderr


def test_a_plan_searches_over_racks_and_placements() -> None:
    asked = "--model llama-3.1-70b --gpus h200 --tp 4 --workload gen:n=30,input=fixed:2000,output=fixed:10"
    asked += " --slo ttft_p90=4s --quick --requests 10 --jobs 1 --rate 1 --engine none"
    result = CliRunner().invoke(
        plan, [*asked.split(), "--search", "prefill_decode=1:1", "--search", "placement=apart,packed"]
    )
    assert result.exit_code == 0, result.output
    assert "placement=packed" in result.output
    assert "Racks, packed: transfers within a domain of 8 GPUs" in result.output
    racks = CliRunner().invoke(plan, [*asked.replace("--tp 4", "--tp 16").split(), "--search", "scale_up_gpus=8,16"])
    assert racks.exit_code == 0, racks.output
    assert "scale_up_gpus=16" in racks.output
    assert "spans 2 nodes of 8 GPUs" in racks.output


def test_experts_over_two_racks_pay_the_network_between_them() -> None:
    experts = "--model deepseek-v3 --gpu h200 --weights-dtype fp8 --tp 16 --ep 16 --moe-a2a --no-intervals --json"
    load = "--workload gen:n=8,rate=50,input=fixed:500,output=fixed:8"
    spans = {}
    for more in ("--scale-up-gpus 16", "--network-gbs 400", "", "--network-gbs 5"):
        result = CliRunner().invoke(simulate, f"{experts} {load} {more}".split())
        assert result.exit_code == 0, result.output
        spans[more] = json.loads(result.stdout)["latency"]["e2e_us_mean"]
    assert list(spans.values()) == sorted(spans.values())
    assert len(set(spans.values())) == len(spans)
