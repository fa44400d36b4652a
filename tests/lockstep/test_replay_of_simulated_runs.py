"""A journal written by the simulator replays decision for decision, and is the same journal on every machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from simpy import Environment

from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.digest import step_digest
from lockstep.core.journal import snapshot
from lockstep.core.journal.records import JournalHeader
from lockstep.core.journal.replay import fold, replay
from lockstep.core.journal.writer import JournalWriter
from lockstep.core.scheduler.engine import Engine
from lockstep.sim.catalogue import load_gpu, load_model
from lockstep.sim.cost import CpuModel, roofline_model
from lockstep.sim.host.arrivals import Arrivals
from lockstep.sim.host.engine_host import EngineHost
from lockstep.sim.metrics.fold import MetricsFold
from lockstep.sim.metrics.run_data import RunData
from lockstep.sim.run.assemble import assemble
from lockstep.sim.run.simulate import simulate
from lockstep.sim.scenario.scenario import Scenario
from lockstep.sim.workload.workload import open_workload

WORKLOAD = (
    "gen:n=120,rate=40,turns=uniform:1:3,think=lognormal:200ms:1,shared_prefix=128x3,input=lognormal:150:0.8,"
    "output=lognormal:40:0.8,max_total=1500"
)
TINY = {"pages": 120, "max_running_requests": 24, "schedule_conservativeness": 0.1}

CONFIGS: dict[str, dict[str, Any]] = {
    "overlap 0": {"overlap_depth": 0},
    "overlap 1": {"overlap_depth": 1},
    "overlap 2": {"overlap_depth": 2},
    "page 1": {"page_size": 1},
    "lpm, small chunks": {"schedule_policy": "lpm", "chunked_prefill_size": 128, "max_prefill_tokens": 256},
    "no radix cache": {"radix_cache": False},
    "tiny pool": TINY,
    "tiny pool, overlap 0, page 1": {**TINY, "pages": 1920, "page_size": 1, "overlap_depth": 0},
    "tiny pool, overlap 2, front": {**TINY, "overlap_depth": 2, "retracted_requeue": "front"},
    "forced retractions": {"retract_every": 7},
    "timeouts": {"max_running_requests": 3, "waiting_timeout_us": 400_000, "running_timeout_us": 900_000},
    "queue limit, long intervals": {"max_running_requests": 3, "max_queued_requests": 4, "stream_interval": 8},
}


def scenario(settings: dict[str, Any], **more: Any) -> Scenario:
    return Scenario(model="qwen3-0.6b", gpu="h200", workload=WORKLOAD, settings=settings, engine="none", **more)


def measured_again(folder: Path, pages: int) -> RunData:
    """The metrics of a journal, computed from the journal alone."""
    metrics = MetricsFold(kv_pages=pages)
    for event, step in fold(folder):
        metrics.observe(event, step)
    return metrics.result()


@pytest.mark.parametrize("name", CONFIGS)
def test_simulated_runs_replay_strictly(name: str, tmp_path: Path) -> None:
    run = simulate(assemble(scenario(CONFIGS[name]), environ={}), folder=tmp_path)
    requests = run.data.summary["requests"]
    assert requests["arrived"] + run.never_sent == 120
    assert requests["unfinished"] == 0
    done = replay(tmp_path)
    assert done.batches == run.batches
    assert done.tail is not None
    assert done.tail.closed
    assert done.digest
    if name.startswith(("tiny", "forced")):
        assert run.data.summary["scheduler"]["retractions"] > 0
    if name.startswith("timeouts"):
        assert requests["failed"] > 0

    # A fold over the journal measures the same as the live metrics, except for facts that only the host has.
    again = measured_again(tmp_path, run.setup.config.pages).summary
    for part in ("requests", "latency", "throughput", "cache", "device"):
        assert again[part] == run.data.summary[part]


@pytest.mark.parametrize(
    "name", ["overlap 1", "tiny pool, overlap 2, front", "timeouts", "queue limit, long intervals"]
)
def test_a_run_without_a_journal_decides_and_measures_the_same(name: str, tmp_path: Path) -> None:
    setup = assemble(scenario(CONFIGS[name]), environ={})
    kept, unkept = simulate(setup, folder=tmp_path), simulate(setup)
    assert unkept.metrics() == kept.metrics()
    assert (unkept.batches, unkept.rejected) == (kept.batches, kept.rejected)
    for column in kept.data.requests.__dataclass_fields__:
        first, second = getattr(kept.data.requests, column), getattr(unkept.data.requests, column)
        np.testing.assert_array_equal(first, second, err_msg=column)

    # Engines are in the same state as those of the other run, and give the same outputs, except for the digest.
    digesting, plain = Engine(setup.config), Engine(setup.config, digests=False)
    for event, step in fold(tmp_path):
        expected, said = digesting.step(event), plain.step(event)
        assert expected.digest == step.digest
        assert said.digest == b""
        assert step_digest(bytes(16), said) == step_digest(bytes(16), expected)
    plain.digest = digesting.digest
    assert snapshot.dump(plain) == snapshot.dump(digesting)


def test_early_ends_replay_strictly(tmp_path: Path) -> None:
    run = simulate(assemble(scenario({"overlap_depth": 2}, max_new_tokens=400), environ={}), folder=tmp_path)
    assert run.data.summary["requests"]["by_finish_reason"] == {"stop": 120}
    assert replay(tmp_path).batches == run.batches


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_cancelled_requests_replay_strictly(depth: int, tmp_path: Path) -> None:
    config = SchedConfig(overlap_depth=depth, pages=200)
    turns = open_workload(WORKLOAD, seed=7).turns
    env = Environment()
    with JournalWriter.create(tmp_path, JournalHeader(config=config)) as journal:
        host = EngineHost(
            env,
            Engine(config),
            Arrivals(turns, {turn.index: 3000 * (turn.index % 40) for turn in turns if turn.index % 3 == 0}),
            roofline_model(load_model("qwen3-0.6b"), load_gpu("h200")),
            CpuModel(),
            journal,
            MetricsFold(kv_pages=config.pages),
        )
        env.process(host.run())
        env.run()
    assert replay(tmp_path).digest == host.engine.digest
    reasons = measured_again(tmp_path, config.pages).summary["requests"]["by_finish_reason"]
    assert reasons["cancelled"] > 5
    assert reasons["length"] > 5


def test_journals_are_equal_byte_by_byte_whatever_the_hash_seed(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from lockstep.sim.run.assemble import assemble;"
        "from lockstep.sim.run.simulate import simulate; from lockstep.sim.scenario.scenario import Scenario;"
        f"asked = Scenario(model='qwen3-0.6b', gpu='h200', workload={WORKLOAD!r}, settings={TINY!r}, engine='none');"
        "simulate(assemble(asked), folder=Path(sys.argv[1]))"
    )
    journals = []
    for seed in ("1", "4242"):
        folder = tmp_path / seed
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        subprocess.run([sys.executable, "-c", program, str(folder)], check=True, env=environment)
        journals.append([path.read_bytes() for path in sorted((folder / "journal").iterdir())])
        assert replay(folder).steps > 1000
    assert journals[0] == journals[1]
