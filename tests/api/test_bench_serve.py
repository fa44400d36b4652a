"""`lockstep bench serve` on live servers: prompts of exact lengths, and a real run beside its simulation."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from lockstep.sim.cli.calibrate import calibrate
from lockstep.sim.cli.simulate import simulate
from lockstep.sim.results.compare import compare, read_runs
from lockstep.sim.results.stored_run import read_run
from lockstep.sim.workload.workload import open_workload
from lockstep.tools.bench import bench
from lockstep.tools.replay import replay
from tests.support.live_server import LiveServer, serving

ROOT = Path(__file__).resolve().parents[2]
SESSIONS = "gen:n=30,rate=20,turns=uniform:2:3,think=fixed:100ms,shared_prefix=64x2,input=fixed:48,output=fixed:12"
SCHEDULER = (
    *("--pages", "4095", "--context-tokens-max", "4096", "--max-running-requests", "32"),
    *("--chunked-prefill-size", "1024", "--overlap-depth", "0"),
)
"""Settings that `lockstep serve` gives the demo model on the CPU, in the header of its journal."""


def run(command: object, *arguments: object) -> Result:
    result = CliRunner().invoke(command, [str(argument) for argument in arguments])  # type: ignore[arg-type]  # click's
    assert result.exit_code == 0, result.output
    return result


def test_prompts_of_ids_are_as_long_as_in_the_workload(emulated: LiveServer, tmp_path: Path) -> None:
    words = ("serve", "--to", emulated.url, "--workload", SESSIONS, "--out", tmp_path / "run", "--json")
    found = json.loads(run(bench, *words).stdout)
    assert found["about"]["measured"]["prompts"] == "ids"
    turns = open_workload(SESSIONS, seed=7).turns
    requests = read_run(tmp_path / "run").requests
    assert requests is not None
    tokens = dict(zip(requests["label"].tolist(), requests["prompt_tokens"].tolist(), strict=True))
    assert tokens == {turn.label: turn.prompt_tokens for turn in turns}
    assert set(requests["output_tokens"].tolist()) == {12}
    later = sum(turn.prompt_tokens for turn in turns if turn.after is not None)
    # Later turns begin with the turn before and the answer that came, to whole pages and but for its last token.
    assert found["cache"]["prompt_tokens_cached"] > 0.6 * later


def test_words_and_chats_are_measured_too(emulated: LiveServer) -> None:
    words = ("--workload", "gen:n=5,rate=50,input=fixed:20,output=fixed:6", "--json")
    for kind in (("--prompts", "words"), ("--chat",)):
        found = json.loads(run(bench, "serve", "--to", emulated.url, *kind, *words).stdout)
        assert found["requests"]["completed"] == 5
        assert found["throughput"]["output_tokens"] == 30
        assert found["latency"]["ttft_us_p50"] > 0
        assert found["about"]["measured"]["prompts"] == "words"


def test_a_served_run_verifies_and_stands_beside_its_simulation(tmp_path: Path) -> None:
    """The walk-through of docs/benchmarking.md, with a load that takes seconds."""
    pytest.importorskip("torch", reason="needs the runtime")
    from lockstep.runtime.demo_model import demo_model_folder

    rows = [
        {"timestamp": 1500 * (number // 4), "input_length": 700 + 512 * number, "output_length": 1024,
         "hash_ids": [0, *range(10 * number + 1, 10 * number + (700 + 512 * number - 1) // 512 + 1)]}
        for number in range(12)
    ]  # fmt: skip
    trace, small = tmp_path / "trace.jsonl", tmp_path / "small.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    scale = [sys.executable, str(ROOT / "examples" / "scale_mooncake.py"), str(trace), "--by", "32"]
    small.write_bytes(subprocess.run([*scale, "--outputs-by", "16"], capture_output=True, check=True).stdout)
    load = ("--workload", small, "--slo", "ttft_p99=60s")
    journal, real, simulated = (tmp_path / name for name in ("journal", "real", "simulated"))
    with serving(tmp_path / "log", "--journal", str(journal)) as server:
        run(bench, "serve", "--to", server.url, *load, "--out", real)
    assert "equal: " in run(replay, journal).stdout

    machine = ("--model", demo_model_folder(), "--gpu", "cpu-core")
    calibration = tmp_path / "mine.json"
    run(calibrate, "journal", journal, *machine, "--date", "2026-11-22", "--out", calibration)
    run(simulate, *machine, "--calibration", calibration, *load, *SCHEDULER, "--out", simulated)
    found = compare(read_runs([real, simulated]))
    assert not found.warnings
    assert not found.settings
    pairs = found.pairs[0]
    assert pairs is not None
    assert pairs.completed_in_both == 12
    cached = found.figure("hit_ratio").values
    # the first block of every prompt is shared; of four concurrent requests, timing decides which computes it
    assert cached[0]
    assert cached[1]
