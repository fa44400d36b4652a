"""Loads of embeddings, scores and rerank: requests without output, several of which arrive together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from lockstep.sim.cli.plan import plan
from lockstep.sim.cli.simulate import simulate

SCORES = "gen:n=120,output=none,items=uniform:5:15,query=fixed:64,input=uniform:100:300"
ENGINE = ("--model", "qwen3-0.6b", "--seed", "3", "--workload", SCORES, "--slo", "e2e_p99=1s")


def simulated(*more: str) -> dict[str, Any]:
    words = [*ENGINE, "--gpu", "l4", "--rate", "3", "--no-intervals", "--json", *more]
    done = CliRunner().invoke(simulate, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    figures: dict[str, Any] = json.JSONDecoder().raw_decode(done.output[done.output.index("{") :])[0]
    return figures


def test_scores_are_simulated_alike_with_and_without_a_journal(tmp_path: Path) -> None:
    fast = simulated()
    kept = simulated("--out", str(tmp_path / "run"), "--no-report", "--no-trace", "--no-requests")
    for name in ("requests", "latency", "cache", "throughput"):
        assert fast[name] == kept[name], name
    assert fast["requests"]["completed"] == 120
    assert fast["latency"]["ttft_us_p50"] is None
    assert fast["latency"]["e2e_us_p99"] > 0
    assert fast["throughput"]["goodput_share"] == 1.0


def test_the_query_of_a_call_is_computed_once_if_its_requests_run_one_after_the_other() -> None:
    apart = simulated("--prefill-max-requests", "1")
    assert 0.15 < apart["cache"]["hit_ratio"] < 0.3, "64 of some 264 tokens, but for the first of a call"
    assert simulated("--prefill-max-requests", "1", "--no-radix-cache")["cache"]["hit_ratio"] == 0.0


def test_a_plan_finds_the_engines_for_a_rate_of_calls(tmp_path: Path) -> None:
    answer = tmp_path / "answer.json"
    words = [
        *ENGINE,
        "--gpus",
        "l4",
        "--rate",
        "20",
        "--quick",
        "--requests",
        "200",
        "--jobs",
        "1",
        "--json",
        str(answer),
    ]
    done = CliRunner().invoke(plan, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "e2e p99" in done.output
    assert answer.stat().st_size
