"""The benchmarks run, at sizes that allow no conclusions on times."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
WORKLOADS = """
def prompt(number, tokens):
    return list(range(1000 * number + 10, 1000 * number + 10 + tokens))

def w1_prompts(R, ctx):
    return [prompt(i, ctx) for i in range(R)]

def w2_prompts(G, K, prefix, uniq):
    return [prompt(i % G, prefix) + prompt(100 + i, uniq) for i in range(G * K)]

def w3_requests(n, lo=2, hi=9):
    return [(prompt(0, 20) + prompt(1 + i, 20), lo + i % (hi - lo)) for i in range(n)]
"""


def test_scheduler_speed_runs_every_workload(tmp_path: Path) -> None:
    (tmp_path / "workloads.py").write_text(WORKLOADS)
    figures = tmp_path / "figures.json"
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "scheduler_speed.py", "--small", "--rounds", "1", "--json", figures],
        env=os.environ | {"LOCKSTEP_PEERS": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(figures.read_text())["rows"]
    assert {row["workload"] for row in rows} == {"w1", "w2", "w3", "w6", "w7"}
    assert {row["through"] for row in rows if row["workload"] == "w1"} == {"Engine.step", "DecodeRun"}


def test_missing_workloads_are_named(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "scheduler_speed.py", "--small"],
        env=os.environ | {"LOCKSTEP_PEERS": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (1, f"LOCKSTEP_PEERS is {tmp_path}, which has no workloads.py\n")


def test_two_checkouts_are_measured_alternately(tmp_path: Path) -> None:
    (tmp_path / "workloads.py").write_text(WORKLOADS)
    figures = tmp_path / "figures.json"
    python = ["--python-here", sys.executable, "--python-there", sys.executable]
    options = ["scheduler", "--rounds", "1", "--small", "--json", figures]
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "alternate.py", BENCHMARKS.parent, *options, *python],
        env=os.environ | {"LOCKSTEP_PEERS": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    costs = json.loads(figures.read_text())["scheduler"]
    assert list(costs["before"][0]) == list(costs["after"][0])
    assert "all: geometric mean of " in done.stdout
    assert "not compared" not in done.stdout


def test_profiles_compares_every_variant(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "profiles.py", "--case", "chat-h100", "--limit", "8", "--json", figures],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(figures.read_text())["rows"]
    assert {row["variant"] for row in rows if row["load"] == "beyond"} >= {"lockstep", "sglang", "vllm"}
    assert len({row["variant"] for row in rows if row["load"] == "knee"}) > 20


def test_profiles_names_the_missing_traces() -> None:
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "profiles.py", "--case", "code-h100"],
        env={name: value for name, value in os.environ.items() if name != "LOCKSTEP_DATA"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (1, "LOCKSTEP_DATA is not set: it names the folder with traces/\n")


MAKE_WORKLOAD = """
import sys
lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
lines += [f"2024-01-01 00:00:{i % 60:02}.{i // 60:03}000,20,3" for i in range(int(sys.argv[3]))]
open(sys.argv[1], "w").write("\\n".join([lines[0], *sorted(lines[1:])]))
"""


def test_memory_growth_compares_the_shortest_with_the_longest(tmp_path: Path) -> None:
    (tmp_path / "make_workload.py").write_text(MAKE_WORKLOAD)
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "memory_growth.py", "--n", "4", "2"],
        env=os.environ | {"LOCKSTEP_PEERS": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "bytes per finished request between 2 and 4; the bar of 1,024 is " in done.stdout, done.stderr
    assert done.returncode == ("missed" in done.stdout)
    same = [sys.executable, BENCHMARKS / "memory_growth.py", "--n", "4", "4"]
    refused = subprocess.run(same, capture_output=True, text=True, check=False)
    assert (refused.returncode, refused.stderr) == (2, "--n 4 4: growth needs two different lengths above 0\n")


def test_serving_points_tests_one_half_by_the_other(tmp_path: Path) -> None:
    (tmp_path / "published").mkdir()
    rows = [
        f"sglang,1,Qwen/Qwen3-8B,H100,{tp},,bf16,64,{osl},unknown,{users},{20 + users},{6 + users / 10},"
        for tp in (1, 2)
        for osl in (8, 12)
        for users in (1, 2)
    ]
    header = "engine,engine_version,model,gpu,tp,dp,precision,isl,osl,length_dist,concurrency,ttft_ms,tpot_ms,suspect"
    (tmp_path / "published" / "serving_points.csv").write_text("\n".join((header, *rows)) + "\n")
    figures = tmp_path / "figures.json"
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "serving_points.py", "--seeds", "2", "--limit", "8", "--json", figures],
        env=os.environ | {"LOCKSTEP_DATA": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(figures.read_text())
    assert [half["time"]["count"] for half in found["halves"]] == [4, 4]
    assert len(found["rows"]) == found["points"] == 8
    assert done.stdout.splitlines()[-1] in ("bar met", "bar MISSED")


def test_host_loop_measures_every_phase(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="the GPU runtime is not installed")
    figures = tmp_path / "figures.json"
    done = subprocess.run(
        [
            sys.executable,
            BENCHMARKS / "host_loop.py",
            "--running",
            "2",
            "--steps",
            "20",
            "--rounds",
            "1",
            "--json",
            str(figures),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(figures.read_text())["rows"]
    phases = {name: us for name, us in row.items() if name not in ("running", "in_all")}
    assert min(phases.values()) > 0
    assert sum(phases.values()) == pytest.approx(row["in_all"], abs=0.01)
