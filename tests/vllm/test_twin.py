"""A journal of vLLM and the client that loaded it are calibrated, simulated and planned. No vLLM is needed.

`twin/engine` is the journal of vLLM 0.32.0 with the demo model on a processor, `twin/client` the run folder of
`lockstep bench serve` that sent its requests. benchmarks/vllm_twin.py measures longer loads.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from lockstep.core.journal.reader import read_journal
from lockstep.sim.calibrate.engine_run import read_clients
from lockstep.sim.cli.calibrate import calibrate
from lockstep.sim.cli.compare import compare
from lockstep.sim.cli.simulate import simulate
from lockstep.sim.cost import Calibration, CpuModel
from lockstep.sim.results.stored_run import read_run
from lockstep.sim.workload.workload import open_workload
from lockstep.tools.diff import diff
from lockstep.tools.explain import explain
from lockstep.tools.export import export
from lockstep.tools.journal import journal
from lockstep.tools.replay import replay

TWIN = Path(__file__).parent / "twin"
ENGINE, CLIENT = TWIN / "engine", TWIN / "client"


def run(command: Any, *words: object) -> str:
    result = CliRunner().invoke(command, [str(word) for word in words])
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture(scope="module")
def calibration(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The calibration of the journal with its client."""
    out = tmp_path_factory.mktemp("twin") / "twin.json"
    words = ("--from", ENGINE, "--client", CLIENT, "--model", "demo", "--date", "2026-11-26", "--out", out)
    said = run(calibrate, *words)
    assert "the requests of this run, at the client: measured, simulated with this calibration" in said
    return out


def test_the_calibration_has_batches_lane_and_front_end(calibration: Path) -> None:
    found = Calibration.load(calibration)
    assert (found.engine, found.engine_version, found.gpu) == ("vllm", "0.32.0", "cpu-core")
    assert found.sources[0].rows_used > 300
    assert isinstance(found.lane, CpuModel)
    assert 10.0 < found.lane.result_fixed_us < 1_000.0
    assert found.lane.plan_fixed_us == 0.0  # the duration of a batch of vLLM begins with its plan
    assert found.correction.step_us > 500.0
    assert 500.0 < found.correction.frontend_us < 20_000.0
    assert {(one.metric, one.population) for one in found.residuals} >= {("time", "seen"), ("ttft", "seen")}


def test_simulations_of_the_same_requests_are_near_what_the_client_measured(calibration: Path, tmp_path: Path) -> None:
    config = read_journal(ENGINE).header.config
    words = [
        "--model", "demo", "--gpu", "cpu", "--calibration", calibration, "--workload", ENGINE, "--profile", "vllm",
        "--page-size", config.page_size, "--pages", config.pages, "--context-tokens-max", config.context_tokens_max,
        "--max-running-requests", config.max_running_requests, "--max-prefill-tokens", config.max_prefill_tokens,
        "--overlap-depth", config.overlap_depth, "--no-intervals",
    ]  # fmt: skip
    simulated = []
    for seed in range(8):
        run(simulate, *words, "--seed", seed, "--out", tmp_path / f"run-{seed}")
        simulated.append(read_run(tmp_path / f"run-{seed}"))
    measured = read_run(CLIENT)
    # Durations are drawn, and there are 65 batches with prompts, of which some took up to 2.6 times their mean.
    within = {"e2e_us_mean": 0.15, "tpot_us_p50": 0.1, "ttft_us_mean": 0.1, "ttft_us_p90": 0.25, "ttft_us_p50": 0.2}
    for figure, share in within.items():
        found = np.mean([one.summary("latency", figure) for one in simulated])
        assert found == pytest.approx(measured.summary("latency", figure), rel=share), figure


def test_several_folders_of_clients_are_read_as_one_run() -> None:
    once, twice = read_clients([CLIENT]), read_clients([CLIENT, CLIENT])
    assert twice.count == 2 * once.count
    assert np.unique(twice.columns["client"]).tolist() == [0, 1]
    assert len(np.unique(twice.columns["request_id"])) == twice.count


def test_the_journal_is_the_workload_that_the_client_sent() -> None:
    turns, requests = open_workload(str(ENGINE), seed=1).turns, read_run(CLIENT).requests
    assert requests is not None
    assert sorted(turns.prompt_tokens.tolist()) == sorted(requests["prompt_tokens"].tolist())
    assert sorted(turns.output_tokens.tolist()) == sorted(requests["output_tokens"].tolist())


def test_the_journal_is_converted_into_a_run_that_was_measured(tmp_path: Path) -> None:
    said = run(journal, "convert", ENGINE, "--out", tmp_path / "measured")
    measured, client = read_run(tmp_path / "measured"), read_run(CLIENT)
    assert measured.is_measured
    completed = client.summary("requests", "completed")
    assert f"{completed:,} completed" in said
    assert measured.summary("requests", "completed") == completed
    assert 0 < measured.summary("latency", "ttft_us_p50") < client.summary("latency", "ttft_us_p50")
    refused = CliRunner().invoke(journal, ["convert", str(ENGINE)])
    assert refused.exit_code != 0
    assert "a journal needs `--out`" in refused.output


def test_the_journal_is_stepped_through_compared_exported_and_shown_as_a_page(tmp_path: Path) -> None:
    story = CliRunner().invoke(replay, [str(ENGINE), "-i"], input="step 200\nlast\nback 100\nplan\nquit\n")
    assert story.exit_code == 0, story.output
    assert "before step 100" in story.output
    assert "cmpl-" in story.output
    said = run(diff, ENGINE, ENGINE)
    assert "every fact and every decision" in said
    assert "requests.parquet: 60 rows" in run(export, ENGINE, "--out", tmp_path / "tables")
    for page, words in {
        "slow.html": (explain, ENGINE, "--slowest", "ttft", 3),
        "request.html": (explain, ENGINE, "--request", "cmpl-ae8426cbf4989be9"),
    }.items():
        run(*words, "--html", tmp_path / page)
        assert "cmpl-ae8426cbf4989be9" in (tmp_path / page).read_text("utf-8")
    run(journal, "convert", ENGINE, "--out", tmp_path / "measured")
    run(compare, tmp_path / "measured", CLIENT, "--html", tmp_path / "compared.html")
    assert "measured" in (tmp_path / "compared.html").read_text("utf-8")


def test_a_what_if_of_the_journal_takes_the_calibration(calibration: Path) -> None:
    words = (ENGINE, "--what-if", "--policy", "spf", "--model", "demo", "--gpu", "cpu", "--calibration", calibration)
    found = json.loads(run(replay, *words, "--json"))
    assert found
