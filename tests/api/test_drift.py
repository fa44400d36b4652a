"""A server with a calibration reports measured over predicted batch times."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the server is not installed")
pytest.importorskip("simpy", reason="the simulator is not installed")

from prometheus_client.parser import text_string_to_metric_families

from lockstep.api.engines import build_engine, check_names
from lockstep.api.observability.drift import DriftMeter
from lockstep.api.observability.metrics import Metrics
from lockstep.api.processes.wire import RATIOS, Gauges
from lockstep.api.settings import ServeSettings
from lockstep.core.contract.errors import ConfigError
from lockstep.core.contract.events import BatchFinished
from lockstep.core.journal.reader import read_journal
from lockstep.core.journal.replay import fold
from lockstep.sim.catalogue import load_gpu, load_model
from lockstep.sim.cli.calibrate import calibrate
from lockstep.sim.cost import UNCALIBRATED, Calibration, roofline_model
from lockstep.sim.results.batch_times import of_journal, predict
from tests.support.live_server import serving, until
from tests.support.recorded import record_simulation

WORKLOAD = "gen:n=40,rate=60,input=uniform:20:400,output=uniform:2:20"


def told(meter: DriftMeter, folder: Path, slower: float = 1.0) -> DriftMeter:
    """A meter that has received the events of a journal, with every batch `slower` times as long."""
    for event, step in fold(folder):
        seen = event
        if isinstance(event, BatchFinished):
            took_us = round((event.finished_us - event.started_us) * slower)
            started_us = round(event.started_us * slower)
            seen = BatchFinished(
                event.time_us, event.batch_id, event.tokens, started_us, started_us + took_us, event.generation
            )
        meter.fold(seen, step)
    return meter


@pytest.mark.parametrize("steps", [1, 3])
def test_times_of_the_simulator_are_those_predicted(steps: int, tmp_path: Path) -> None:
    folder = record_simulation(tmp_path, WORKLOAD, batching="mixed", decode_steps_per_launch=steps)
    cost = roofline_model(load_model("qwen3-0.6b"), load_gpu("h200"))
    found = {one.kind: one for one in told(DriftMeter(cost), folder).read()}
    times = of_journal(folder)
    assert set(found) == {"extend", "decode", "mixed"}
    for kind, one in found.items():
        batches = [batch for batch in times.batches if batch.mode == kind]
        assert sum(one.counts) == len(batches) > 0
        assert one.measured_s == pytest.approx(sum(batch.took_us for batch in batches) / 1e6)
        assert one.predicted_s == pytest.approx(predict(cost, batches).sum() / 1e6)
        assert one.ratios / len(batches) == pytest.approx(1.0, abs=0.01)


def test_a_slower_device_is_seen_in_every_figure(tmp_path: Path) -> None:
    folder = record_simulation(tmp_path, WORKLOAD)
    cost = roofline_model(load_model("qwen3-0.6b"), load_gpu("h200"))
    for one in told(DriftMeter(cost), folder, slower=1.3).read():
        assert one.measured_s / one.predicted_s == pytest.approx(1.3, rel=0.02)
        assert one.counts[RATIOS.index(1.5)] == sum(one.counts)
    for one in told(DriftMeter(cost, speed=2.0), folder).read():  # predictions are halved, the measured times are not
        assert one.measured_s / one.predicted_s == pytest.approx(2.0, rel=0.02)


def test_failed_and_lost_batches_are_not_counted(tmp_path: Path) -> None:
    folder = record_simulation(tmp_path, WORKLOAD)
    meter = DriftMeter(roofline_model(load_model("qwen3-0.6b"), load_gpu("h200")))
    for event, step in fold(folder):
        if isinstance(event, BatchFinished):
            event = BatchFinished(event.time_us, event.batch_id, error="broken")
        meter.fold(event, step)
    assert meter.read() == ()


def test_prometheus_gets_a_histogram_by_kind(tmp_path: Path) -> None:
    folder = record_simulation(tmp_path, WORKLOAD)
    drift = told(DriftMeter(roofline_model(load_model("qwen3-0.6b"), load_gpu("h200"))), folder, slower=1.07).read()
    metrics = Metrics(("vllm",))
    metrics.name_model("m")
    text = metrics.exposition(Gauges(0, 0, 10, 0.0, 0, 0, 0, True, drift)).decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    samples = families["lockstep_batch_time_ratio"].samples
    buckets = {
        float(one.labels["le"]): one.value
        for one in samples
        if one.name.endswith("_bucket") and one.labels["kind"] == "decode"
    }
    decodes = next(sum(one.counts) for one in drift if one.kind == "decode")
    assert buckets[1.05] == 0
    assert buckets[1.1] == buckets[float("inf")] == decodes
    measured = {one.labels["kind"]: one.value for one in families["lockstep_batch_seconds"].samples}
    assert measured == {one.kind: pytest.approx(one.measured_s) for one in drift}
    assert "lockstep_batch_predicted_seconds" in families
    assert not any(name.startswith("vllm:batch") for name in families)
    nothing = metrics.exposition(Gauges(0, 0, 10, 0.0, 0, 0, 0, True)).decode()
    assert "lockstep_batch" not in nothing


def test_a_calibration_that_is_none_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="`calibration`: unknown calibration `nope`"):
        check_names(ServeSettings(emulate="qwen3-0.6b@h200", calibration="nope"))


def test_a_calibration_of_another_device_is_refused() -> None:
    pytest.importorskip("torch", reason="the GPU runtime is not installed")
    with pytest.raises(ConfigError, match="`calibration` vllm-h100 was made on H100-SXM, and this engine runs on cpu"):
        build_engine(ServeSettings(device="cpu", calibration="vllm-h100"))


def figures(url: str) -> dict[str, float]:
    """Batches counted, by kind."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=120) as answer:
        text = answer.read().decode()
    return {
        one.labels["kind"]: one.value
        for family in text_string_to_metric_families(text)
        for one in family.samples
        if one.name == "lockstep_batch_time_ratio_count"
    }


def ask(url: str, model: str, prompt: str, tokens: int) -> None:
    body = json.dumps({"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True})
    request = urllib.request.Request(
        f"{url}/v1/completions", body.encode(), {"Content-Type": "application/json"}, method="POST"
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        assert answer.status == 200


def test_an_emulated_server_counts_its_batches(tmp_path: Path) -> None:
    as_it_is = tmp_path / "as-it-is.json"
    calibration = Calibration(engine="lockstep", gpu="H200-SXM", residuals=UNCALIBRATED.residuals)
    calibration.save(as_it_is)
    arguments = ("--emulate", "qwen3-0.6b@h200", "--calibration", str(as_it_is))
    with serving(tmp_path / "log", *arguments) as server:
        ask(server.url, "qwen3-0.6b", "hello", 12)
        until(lambda: figures(server.url).get("decode", 0) >= 11)
        assert figures(server.url)["extend"] == 1


def test_a_calibration_from_production_predicts_batches(tmp_path: Path) -> None:
    """The full cycle: serve with a journal, calibrate from it, serve with the calibration, read the drift."""
    pytest.importorskip("torch", reason="the GPU runtime is not installed")
    from click.testing import CliRunner

    journal, made = tmp_path / "run", tmp_path / "mine.json"
    with serving(tmp_path / "log", "--device", "cpu", "--journal", str(journal)) as server:
        for number in range(4):
            ask(server.url, "demo", f"Return the {'x ' * 20 * number}", 30)
        assert figures(server.url) == {}
    header = read_journal(journal).header
    assert (header.host["model"], header.host["gpu"]) == ("demo", "cpu")
    arguments = ["--from", str(journal), "--date", "2026-11-22", "--out", str(made)]
    result = CliRunner().invoke(calibrate, arguments)
    assert result.exit_code == 0, result.output
    assert any(line.split()[:2] == ["all", "median"] for line in result.stdout.splitlines())

    from tests.support.adapters import write_adapter

    adapter = f"law={write_adapter(tmp_path / 'law', 1)}"
    with serving(tmp_path / "log", "--device", "cpu", "--calibration", str(made), "--lora", adapter) as server:
        ask(server.url, "demo", "Return the", 30)
        until(lambda: figures(server.url).get("decode", 0) >= 29)
        ask(server.url, "law", "Return the", 30)
        until(lambda: figures(server.url).get("decode", 0) >= 58)
        assert "batches are predicted by the calibration lockstep" in server.text()
