"""Prefill and decode engines in the simulator: links, the client's measures, the run folder, refusals."""

from __future__ import annotations

import json
import shlex
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from simpy import Environment

from lockstep.core.contract.errors import ConfigError
from lockstep.core.journal.replay import replay
from lockstep.host.router_check import verify_router
from lockstep.sim.cli.simulate import simulate
from lockstep.sim.cluster.network import Links, later
from lockstep.sim.cluster.result import ClusterRun
from lockstep.sim.cluster.run_folder import write_cluster_run
from lockstep.sim.cluster.scenario import ClusterScenario, EngineGroup
from lockstep.sim.cluster.setup import assemble_cluster
from lockstep.sim.cluster.simulate import simulate_cluster
from lockstep.sim.scenario.scenario import Scenario
from lockstep.tools.journal import journal


def cluster(
    workload: str = "gen:n=40,rate=20",
    *,
    prefills: int = 2,
    decodes: int = 2,
    settings: dict[str, Any] | None = None,
    **more: Any,
) -> ClusterScenario:
    groups = tuple(
        EngineGroup(count=count, gpu="h200", settings={"role": role, **(settings or {})})
        for role, count in (("prefill", prefills), ("decode", decodes))
    )
    links = {name: more.pop(name) for name in ("link_gbs", "link_latency_us", "hop_us") if name in more}
    base = Scenario(model="llama-3.1-8b", gpu="h200", workload=workload, **more)
    return ClusterScenario(base=base, engines=groups, **links)


def run(scenario: ClusterScenario, folder: Path | None = None) -> ClusterRun:
    return simulate_cluster(assemble_cluster(scenario), folder=folder, check_every=10)


# -------------------------------------------------------------------------------------------------------------- links


def ends_of(flows: list[tuple[int, int, int, float]], out: list[float], into: list[float]) -> list[int]:
    """The end time of each flow (start, source, target, bytes)."""
    env = Environment()
    links = Links(env, out, into)
    ends = [0] * len(flows)

    def begin(number: int, source: int, target: int, size: float) -> None:
        links.start(source, target, size, lambda: ends.__setitem__(number, int(env.now)))

    for number, (start_us, source, target, size) in enumerate(flows):
        later(env, start_us, partial(begin, number, source, target, size))
    env.run()
    assert sum(links.sent_bytes) == pytest.approx(sum(size for *_, size in flows))
    return ends


def test_one_flow_has_the_link_to_itself() -> None:
    assert ends_of([(5, 0, 1, 1000.0)], [10.0, 10.0], [10.0, 10.0]) == [105]


def test_flows_share_what_is_tightest_and_take_over_what_comes_free() -> None:
    # both into engine 2: 5 each until the short one is through at 100, then 10 for the 500 that are left
    assert ends_of([(0, 0, 2, 500.0), (0, 1, 2, 1000.0)], [10.0] * 3, [10.0] * 3) == [100, 150]
    # the first two share engine 0's way out; the third is alone on its way and gets all that 2 can take beside 5
    assert ends_of([(0, 0, 2, 100.0), (0, 0, 3, 100.0), (0, 1, 2, 150.0)], [10.0] * 4, [20.0] * 4) == [20, 20, 15]


def test_flow_that_comes_later_slows_what_is_under_way() -> None:
    assert ends_of([(0, 0, 1, 1000.0), (50, 0, 1, 250.0)], [10.0] * 2, [10.0] * 2) == [125, 100]


# ----------------------------------------------------------------------------------------------- the client's measures


def test_answers_are_as_long_as_those_of_mixed_engines() -> None:
    done = run(cluster())
    mixed = simulate_cluster(assemble_cluster(ClusterScenario(base=cluster().base, replicas=4)))
    for name in ("arrived", "completed"):
        assert done.data.summary["requests"][name] == mixed.data.summary["requests"][name] == 40
    assert done.data.summary["throughput"]["output_tokens"] == mixed.data.summary["throughput"]["output_tokens"]
    assert done.data.summary["transfers"]["transfers"] == 40


def test_slow_link_is_seen_in_the_first_token_and_nowhere_else() -> None:
    """One request: TTFT grows by the longer time of its bytes and by the latency of messages; later times do not."""
    fast, slow = (
        run(cluster("gen:n=1,rate=1,input=fixed:1024,output=fixed:16", link_gbs=gbs, link_latency_us=latency))
        for gbs, latency in ((1000.0, 0), (1.0, 1000))
    )
    tokens, kv_bytes = 1024, 131_072
    bytes_us = tokens * kv_bytes / 1e3 - tokens * kv_bytes / 1e6
    ttft = [one.data.summary["latency"]["ttft_us_p50"] for one in (fast, slow)]
    assert ttft[1] - ttft[0] == pytest.approx(bytes_us + 2 * 1000, abs=100)
    last = [one.data.summary["latency"]["e2e_us_p50"] for one in (fast, slow)]
    assert last[1] - last[0] == pytest.approx(ttft[1] - ttft[0], abs=100), "what follows takes as long"
    assert slow.data.summary["transfers"]["transferred_bytes"] == tokens * kv_bytes


def test_chunks_travel_while_the_next_is_computed() -> None:
    """Of a prompt in eight chunks only the last part is waited for, if the link is as fast as the engine."""
    whole, parts = (
        run(
            cluster(
                "gen:n=1,rate=1,input=fixed:16384,output=fixed:4",
                link_gbs=20.0,
                settings={"chunked_prefill_size": size, "max_prefill_tokens": 16384},
            )
        )
        for size in (16384, 2048)
    )
    waited = [one.data.summary["transfers"]["transfer_us_p50"] for one in (whole, parts)]
    assert waited[1] < waited[0] / 4


def test_sessions_find_their_kv_on_both_sides() -> None:
    done = run(cluster("gen:n=40,rate=10,turns=fixed:4", prefills=1, decodes=1))
    assert done.data.summary["cache"]["hit_ratio"] > 0.3
    assert done.data.summary["transfers"]["tokens_not_sent"] > 0
    assert done.data.summary["requests"]["completed"] == done.data.summary["requests"]["arrived"]


def test_host_tiers_of_engines_with_roles_are_measured() -> None:
    done = run(cluster("gen:n=20,rate=10", tiers={"host_cache_gb": 20.0}))
    for engine in done.engines:
        assert engine.data.summary["cache"]["bytes_moved"]["write"] > 0


def test_crowded_decode_engines_make_prompts_wait_for_pages() -> None:
    done = run(cluster("gen:n=60,rate=400", settings={"pages": 300, "num_reserved_decode_tokens": 64}))
    assert done.data.summary["requests"]["completed"] == 60
    assert done.data.summary["transfers"]["page_wait_us_p99"] > 0


def test_transfers_that_take_too_long_fail_and_everything_comes_back() -> None:
    settings = {"transfer_timeout_us": 20_000}
    done = run(cluster("gen:n=30,rate=200", settings=settings, link_gbs=0.5))
    ended = done.data.summary["requests"]
    assert ended["by_finish_reason"]["transfer"] > 0
    assert done.data.summary["transfers"]["transfers_failed"] > 0


def test_closed_loop_goes_on_behind_each_answer() -> None:
    done = run(cluster("gen:n=30,rate=1", concurrency=4))
    assert done.data.summary["requests"]["completed"] == 30


# ------------------------------------------------------------------------------------------------------ the run folder


def test_run_folder_replays_and_reports_how_to_get_it_again(tmp_path: Path) -> None:
    scenario = cluster(link_gbs=10.0, link_latency_us=40)
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        write_cluster_run(folder, run(scenario, folder), trace=False, report=False)
    for engine in range(4):
        journals = [folder / "engines" / str(engine) for folder in folders]
        assert replay(journals[0]).digest == replay(journals[1]).digest
    assert verify_router(folders[0])[1] == verify_router(folders[0] / "decode")[1] == 40
    metrics = [json.loads((folder / "metrics.json").read_text()) for folder in folders]
    assert metrics[0] == metrics[1]
    words = shlex.split(metrics[0]["about"]["command"])[2:]
    again = CliRunner().invoke(simulate, [*words, "--json", "--no-intervals"])
    assert json.loads(again.stdout)["latency"] == metrics[0]["latency"]
    verified = CliRunner().invoke(journal, ["verify", str(folders[0])])
    assert verified.stdout.count("router: equal") == 2
    over = CliRunner().invoke(
        simulate,
        "--model llama-3.1-8b --gpu h200 --prefill-engines 1 --decode-engines 1 --workload gen:n=3,rate=5 "
        f"--no-intervals --no-report --overwrite --out {folders[0]}".split(),
    )
    assert over.exit_code == 0, over.stderr
    assert "Between prefill and decode engines" in over.stdout


# ------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--gpu h200 --prefill-engines 2", "must be given together"),
        ("--gpu h200 --prefill-engines 2 --decode-engines 0", "`decode_engines` must be at least 1, got `0`"),
        ("--gpu h200 --prefill-engines 2 --decode-engines 1 --replicas 2", "leave out '--replicas'"),
        ("--gpu h200 --link-bandwidth 10", "there are none"),
        ("--gpu h200 --role decode", "`role` is decode, but there is one engine"),
        ("--gpu h200 --replicas 2 --role prefill", "has the roles prefill"),
        ("--engines 2xh200:role=prefill,1xh200", "has the roles mixed, prefill"),
        ("--engines 2xh200:role=both", "`role` must be mixed, prefill or decode, got `both`"),
        ("--gpu h200 --prefill-engines 1 --decode-engines 1 --link-bandwidth 0", "`link_bandwidth` must be from"),
    ],
)
def test_wrong_input_is_refused_by_name(words: str, message: str) -> None:
    asked = f"--model llama-3.1-8b --workload gen:n=2,rate=1 {words}"
    refused = CliRunner().invoke(simulate, asked.split())
    assert refused.exit_code != 0
    assert message in refused.stderr


def test_models_with_state_need_slots_of_its_own() -> None:
    groups = tuple(EngineGroup(count=1, gpu="h200", settings={"role": role}) for role in ("prefill", "decode"))
    base = Scenario(model="qwen3-next-80b-a3b", gpu="h200", workload="gen:n=2,rate=1", tp=4)
    with pytest.raises(ConfigError, match=r"linear-attention state.*\nhint: --hybrid-memory on"):
        assemble_cluster(ClusterScenario(base=base, engines=groups))


def test_pages_of_engines_with_windows_are_equally_large() -> None:
    groups = tuple(
        EngineGroup(count=1, gpu="h200", settings={"role": role, "page_size": size})
        for role, size in (("prefill", 16), ("decode", 32))
    )
    base = Scenario(model="gpt-oss-20b", gpu="h200", workload="gen:n=2,rate=1", tiers={"hybrid_memory": "on"})
    with pytest.raises(ConfigError, match="`page_size` must be the same for all engines, got 16, 32"):
        assemble_cluster(ClusterScenario(base=base, engines=groups))
