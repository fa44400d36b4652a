"""Observation of a server: the log, the live page, the dashboard, spans."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import signal
import sys
import threading
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs lockstep-api")

from prometheus_client import Counter, Histogram

from lockstep.api.observability.batched import BatchedCounter, BatchedHistogram, BatchedLabels, ManyHistogram
from lockstep.api.observability.logs import EXTRA, JsonFormatter
from lockstep.api.observability.metrics import ITL_S, Metrics
from lockstep.api.observability.served import RECENT, Recent, Served
from lockstep.api.processes.wire import DraftFigures, Gauges, TierFigures
from lockstep.api.serve import check
from lockstep.api.settings import read_settings
from lockstep.core.contract.errors import ConfigError
from lockstep.host.page_store import StoreCounts
from tests.support.browser import dom_of, needs_chromium
from tests.support.live_server import EMULATED, LiveServer, serving, until

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD = ROOT / "docs" / "grafana" / "lockstep.json"
ONLY_WITH_A_CALIBRATION = {"lockstep_batch_seconds_total", "lockstep_batch_predicted_seconds_total"}


def values_of(figure: Counter | Histogram) -> dict[tuple[str, ...], float]:
    """The values of a figure by name and labels, without the times at which its parts were made."""
    found = ((one.name, *one.labels.values(), one.value) for one in figure.collect()[0].samples)
    return {(name, *labels): value for name, *labels, value in found if not name.endswith("_created")}


def test_values_added_together_count_as_one_by_one() -> None:
    values = [-1.0, 0.0, 0.01, math.nextafter(0.01, 1.0), 0.025, 0.3, 0.3, 80.0, 80.5]
    one_by_one = Histogram("times", "Times.", buckets=ITL_S, registry=None)
    together = ManyHistogram("times", "Times.", buckets=ITL_S, registry=None)
    collected = BatchedHistogram(together)
    collected.observe(values[0])
    collected.observe_many(values[1:])
    for value in values:
        one_by_one.observe(value)
    for _ in range(2):  # what was added is not added again
        collected.add_all()
        assert values_of(together) == pytest.approx(values_of(one_by_one))


def test_increments_added_together_count_as_one_by_one() -> None:
    total, labelled = Counter("all", "T.", registry=None), Counter("named", "N.", ("name",), registry=None)
    collected, names = BatchedCounter(total), BatchedLabels(labelled)
    for amount in (3, 0, 4):
        collected.inc(amount)
    for name in ("a", "b", "a"):
        names.inc(name)
    for _ in range(2):
        collected.add_all()
        names.add_all()
    assert values_of(total) == {("all_total",): 7.0}
    assert values_of(labelled) == {("named_total", "a"): 2.0, ("named_total", "b"): 1.0}


def complete(url: str, label: str, **headers: str) -> dict[str, str]:
    """Request a completion, and return the headers of its answer."""
    body = {"prompt": "a prompt of a few words", "max_tokens": 6, "ignore_eos": True, "stream": True}
    headers |= {"Content-Type": "application/json", "X-Request-Id": label}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        answer.read()
        return dict(answer.headers)


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=120) as answer:
        return answer.read().decode()


# ------------------------------------------------------------------------------------------------------------- the log


def test_a_line_of_json_holds_the_fields_of_a_record() -> None:
    form = JsonFormatter("worker 3")
    record = logging.LogRecord("lockstep.http", logging.INFO, "f", 1, "%s %d\n", ("GET", 200), None)
    setattr(record, EXTRA, {"request_id": "r-1", "status": 200})
    line = form.format(record)
    assert "\n" not in line
    said = json.loads(line)
    assert (said["level"], said["process"], said["logger"]) == ("info", "worker 3", "lockstep.http")
    assert (said["message"], said["request_id"], said["status"]) == ("GET 200\n", "r-1", 200)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", said["time"])
    try:
        raise ValueError("this")
    except ValueError:
        record = logging.LogRecord("l", logging.ERROR, "f", 1, "it failed", (), sys.exc_info())
    assert "ValueError: this" in json.loads(form.format(record))["exception"]


def test_every_line_of_a_server_is_json_with_the_request_id_of_its_client(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with serving(log, *EMULATED, "--speed", "20", "--log-format", "json") as server:
        assert complete(server.url, "mine-1")["x-request-id"] == "mine-1"
        until(lambda: "mine-1" in server.text())
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert {"engine", "worker 0"} <= {line["process"] for line in lines}
    (line,) = [line for line in lines if line.get("request_id") == "mine-1"]
    assert (line["path"], line["status"], line["output_tokens"]) == ("/v1/completions", 200, 6)
    assert line["took_us"] >= line["queue_us"] + line["prefill_us"] + line["decode_us"] > 0
    assert line["label"].startswith("cmpl-")


# ------------------------------------------------------------------------------------------------------- the live page


def test_only_the_last_requests_are_kept_and_a_tenant_sees_its_own() -> None:
    recent = Recent()

    class Stands:  # stands for a generation, with the fields that a row reads
        choices: tuple[Any, ...] = ()

    served = {"method": "POST", "path": "/p", "status": 200, "arrived_s": 0.0, "ended_s": 0.5, "headers": {}}
    recent.add(Served(request_id="none", tenant="a", **served))  # never reached the engine
    recent.add(Served(request_id="empty", tenant="a", generation=Stands(), **served))  # type: ignore[arg-type]  # see Stands
    assert recent.of(None) == []
    for number in range(RECENT + 5):
        recent._rows.append(("a" if number % 2 else "b", {"request_id": str(number)}))
    assert len(recent.of(None)) == RECENT
    assert recent.of(None)[0] == {"request_id": str(RECENT + 4)}
    assert {int(row["request_id"]) % 2 for row in recent.of("a")} == {1}


def test_the_page_loads_nothing_from_elsewhere(emulated: LiveServer) -> None:
    page = (files("lockstep.api.endpoints") / "ui.html").read_text("utf-8")
    assert not re.search(r"(?:https?:)?//[a-z]", page)
    with urllib.request.urlopen(f"{emulated.url}/ui", timeout=120) as answer:
        assert answer.read().decode() == page
        policy = answer.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "connect-src 'self'" in policy


@needs_chromium
def test_the_page_shows_load_and_the_phases_of_a_request(emulated: LiveServer, tmp_path: Path) -> None:
    for number in range(3):
        complete(emulated.url, f"seen-{number}")
    rows = {row["request_id"]: row for row in json.loads(get(f"{emulated.url}/ui/requests"))["requests"]}
    row = rows["seen-1"]
    assert [rows[f"seen-{number}"]["status"] for number in range(3)] == [200] * 3
    dom = dom_of(f"{emulated.url}/ui#seen-1", tmp_path / "profile", virtual_ms=6000).split("<script>")[0]
    assert "qwen3-0.6b on 1 x H200-SXM, emulated" in dom
    for title in (
        "KV pool in use",
        "TTFT p99",
        "ITL p50",
        "output tokens per s",
        "running",
        "waiting",
        "batches per s",
        "tokens per batch",
    ):
        assert title in dom
    for number in range(3):
        assert f'href="#seen-{number}"' in dom
    assert 'class="chosen"' in dom
    assert f"lockstep explain RUN --request {row['label']}" in dom
    assert "It waited" in dom
    assert "It ended with: length." in dom
    assert dom.count("<svg") == 7


@needs_chromium
def test_with_keys_the_page_requires_one(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[[keys]]\ntenant = "alice"\nkey = "sk-a-key-of-alice"\n')
    keys.chmod(0o600)
    with serving(tmp_path / "log", *EMULATED, "--api-keys", str(keys)) as server:
        dom = dom_of(f"{server.url}/ui", tmp_path / "profile", virtual_ms=4000).split("<script>")[0]
    assert "a key is needed" in dom
    assert '<form id="door">' in dom
    assert "KV pool in use" not in dom


# --------------------------------------------------------------------------------------------------------------- spans


@pytest.fixture
def collector() -> Iterator[tuple[str, list[bytes]]]:
    """The address of a collector, and the list of bodies posted to it."""
    posted: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posted.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1/traces", posted
    server.shutdown()
    thread.join()
    server.server_close()


def test_each_request_is_a_span_below_that_of_its_client(collector: tuple[str, list[bytes]], tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs lockstep-api[otel]")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    endpoint, posted = collector
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    with serving(tmp_path / "log", *EMULATED, "--otlp-endpoint", endpoint, "--shutdown-s", "1") as server:
        complete(server.url, "traced", traceparent=f"00-{trace}-{parent}-01")
        get(f"{server.url}/v1/models")  # no request of the engine: has no span
    found = {}
    for data in posted:
        message = ExportTraceServiceRequest.FromString(data)
        for group in message.resource_spans:
            assert {one.key: one.value.string_value for one in group.resource.attributes}["service.name"] == "lockstep"
            found |= {span.name: span for scope in group.scope_spans for span in scope.spans}
    assert set(found) == {"POST /v1/completions", "queue", "prefill", "decode"}
    whole = found["POST /v1/completions"]
    assert (whole.trace_id.hex(), whole.parent_span_id.hex()) == (trace, parent)
    said = {one.key: one.value for one in whole.attributes}
    assert said["gen_ai.request.id"].string_value == "traced"
    assert said["gen_ai.usage.completion_tokens"].int_value == 6
    assert said["gen_ai.request.model"].string_value == "qwen3-0.6b"
    at_ns = whole.start_time_unix_nano
    for name in ("queue", "prefill", "decode"):
        assert found[name].parent_span_id == whole.span_id
        assert at_ns <= found[name].start_time_unix_nano <= found[name].end_time_unix_nano
        at_ns = found[name].end_time_unix_nano
    assert at_ns <= whole.end_time_unix_nano


def test_spans_without_the_sdk_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    settings = read_settings(None, {"emulate": "qwen3-0.6b@h200", "otlp_endpoint": "http://127.0.0.1:4318/v1/traces"})
    with pytest.raises(ConfigError, match=r"`otlp_endpoint` needs OpenTelemetry's SDK.*\n.*lockstep-api\[otel\]"):
        check(settings)
    wrong = read_settings(None, {"emulate": "qwen3-0.6b@h200", "otlp_endpoint": "localhost:4318"})
    with pytest.raises(ConfigError, match="`otlp_endpoint` must be a URL, got `localhost:4318`"):
        check(wrong)


# ------------------------------------------------------------------------------------------------------- the dashboard


def test_every_metric_of_the_dashboard_is_there(emulated: LiveServer) -> None:
    complete(emulated.url, "for-the-dashboard")
    shown = get(f"{emulated.url}/metrics")
    there = set(re.findall(r"^(lockstep_[a-z_0-9]+)", shown, re.MULTILINE))
    dashboard = json.loads(DASHBOARD.read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries += [one["query"]["query"] for one in dashboard["templating"]["list"] if one["type"] == "query"]
    asked = set(re.findall(r"lockstep_[a-z_0-9]+", " ".join(queries)))
    assert len(asked) > 20
    assert asked - there == ONLY_WITH_A_CALIBRATION
    labels = set(re.findall(r"by \(([a-z_]+)\)", " ".join(queries))) - {"kind"}
    assert labels == {"le", "finished_reason", "status", "engine"}
    for label in labels:
        assert f'{label}="' in shown
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)


def test_an_idle_engine_reports_its_state_from_the_start(tmp_path: Path) -> None:
    def figures() -> dict[str, float]:
        lines = re.findall(r"^lockstep_(\w+)\{[^}]*\} (\S+)$", get(f"{server.url}/metrics"), re.MULTILINE)
        return {name: float(value) for name, value in lines}

    with serving(tmp_path / "log", *EMULATED, "--check-idle-s", "0.01") as server:
        first = figures()
        assert (first["num_requests_running"], first["engine_restarts_total"]) == (0, 0)
        until(lambda: figures().get("invariant_checks_total", 0) >= 1)  # without a request
        assert figures()["invariant_failures_total"] == 0
        os.kill(server.children()["engine"], signal.SIGKILL)
        until(lambda: figures().get("engine_restarts_total") == 1)
        assert {"kv_cache_usage_perc", "num_requests_waiting"} <= set(figures())


VLLM = """e2e_request_latency_seconds_bucket time_to_first_token_seconds_bucket inter_token_latency_seconds_bucket
request_queue_time_seconds_sum request_prefill_time_seconds_sum request_decode_time_seconds_sum
request_inference_time_seconds_bucket request_time_per_output_token_seconds_bucket request_prompt_tokens_bucket
request_generation_tokens_bucket request_max_num_generation_tokens_sum iteration_tokens_total_bucket prompt_tokens_total
generation_tokens_total prompt_tokens_cached_total num_requests_running num_requests_waiting kv_cache_usage_perc
prefix_cache_queries_total prefix_cache_hits_total num_preemptions_total"""
SGLANG = """num_running_reqs num_queue_reqs num_used_tokens token_usage cache_hit_rate
time_to_first_token_seconds_bucket
inter_token_latency_seconds_bucket e2e_request_latency_seconds_bucket queue_time_seconds_bucket
prompt_tokens_total generation_tokens_total cached_tokens_total num_requests_total num_aborted_requests_total
num_retracted_reqs_total"""


def test_several_engines_show_the_drafts_of_each() -> None:
    metrics = Metrics(("vllm",))
    metrics.name_model("m")
    said = [
        Gauges(0, 1, 100, 0.1, 0, 0, 0, True, drafts=DraftFigures(*counts), forced_tokens=forced)
        for counts, forced in (((10, 30, 12, (8, 4)), 5), ((4, 12, 2, (2,)), 0))
    ]
    text = metrics.exposition(*said, up=(True, True)).decode()

    def figure(name: str, engine: int, more: str = "") -> float:
        found = re.search(rf'^{name}{{engine="{engine}",model_name="m"{more}}} (\S+)$', text, re.MULTILINE)
        assert found is not None, (name, engine)
        return float(found[1])

    for prefix in ("lockstep_", "vllm:"):
        assert [figure(f"{prefix}spec_decode_num_drafts_total", one) for one in (0, 1)] == [10, 4]
        assert [figure(f"{prefix}spec_decode_num_accepted_tokens_total", one) for one in (0, 1)] == [12, 2]
    by_position = "lockstep_spec_decode_num_accepted_tokens_per_pos_total"
    assert [figure(by_position, 0, f',position="{at}"') for at in (0, 1)] == [8, 4]
    assert [figure("lockstep_accepted_length_mean", one) for one in (0, 1)] == [2.2, 1.5]
    assert [figure("lockstep_forced_tokens_total", one) for one in (0, 1)] == [5, 0]


def test_damage_of_the_storage_is_counted_by_engine() -> None:
    metrics = Metrics(("vllm",))
    metrics.name_model("m")
    store = asdict(StoreCounts(pages_read=7, pages_damaged=2, writes_failed=1, bytes_stored=4096))
    moves, beside = (("load", "done", 3), ("store", "failed", 1)), (("load", "window", 5), ("write", "state", 2))
    figures = TierFigures(moves, (("load", 12),), 192, 96, tuple(store.items()), beside)
    text = metrics.exposition(Gauges(0, 1, 100, 0.1, 0, 0, 0, True, tiers=figures), up=(True,)).decode()
    for name, value in (
        ('lockstep_storage_pages_total{engine="0",event="damaged",model_name="m"}', 2),
        ('lockstep_storage_pages_total{engine="0",event="failed",model_name="m"}', 1),
        ('lockstep_storage_bytes{engine="0",model_name="m"}', 4096),
        ('lockstep_tier_moves_total{engine="0",kind="store",model_name="m",outcome="failed"}', 1),
        ('lockstep_tier_pages_total{engine="0",kind="load",model_name="m"}', 12),
        ('lockstep_tier_blocks_total{block="window",engine="0",kind="load",model_name="m"}', 5),
        ('lockstep_tier_blocks_total{block="state",engine="0",kind="write",model_name="m"}', 2),
        ('lockstep_prompt_tokens_from_storage_total{engine="0",model_name="m"}', 96),
    ):
        assert f"\n{name} {value:.1f}\n" in text, name
    assert "vllm:storage" not in text


def test_metrics_have_the_names_of_other_dashboards() -> None:
    metrics = Metrics(("vllm", "sglang"))
    metrics.name_model("m")
    gauges = Gauges(3, 2, 100, 0.25, 40, 60, 5, True, page_size=16, batch_counts=(1,) * 14, batch_tokens=99)
    text = metrics.exposition(gauges).decode()
    for prefix, names in (("vllm", VLLM), ("sglang", SGLANG)):
        for name in names.split():
            assert f'\n{prefix}:{name}{{engine="0"' in text or f"\n{prefix}:{name}{{" in text, f"{prefix}:{name}"
    labels = 'engine="0",model_name="m"'
    assert re.search(r"\nsglang:num_used_tokens\{[^}]*\} 400\.0\n", text), labels
    assert re.search(r"\nsglang:cache_hit_rate\{[^}]*\} 0\.4\n", text)
    assert re.search(r"\nvllm:num_requests_waiting\{[^}]*\} 3\.0\n", text)
    assert "vllm:num_requests_total" not in text
    assert "vllm:kv_used_tokens" not in text
