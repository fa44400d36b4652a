"""`lockstep bench serve` sends the requests of a simulation with the same arguments, and its measures are the same."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from lockstep.sim.cli.simulate import simulate
from lockstep.sim.host.arrivals import Arrivals
from lockstep.sim.metrics.slo import Slo
from lockstep.sim.results.compare import compare, read_runs
from lockstep.sim.results.stored_run import read_run
from lockstep.sim.scenario.scenario import Scenario
from lockstep.sim.workload.workload import open_workload
from lockstep.tools.bench import bench
from lockstep.tools.bench_run import measure
from lockstep.tools.http_stream import ServerAddress
from lockstep.tools.live import WORDS, Asking, Sender, Sent, TokenIdPrompts
from tests.support.null_server import await_asked, null_server, requested_of

SESSIONS = "gen:n=40,rate=100,turns=uniform:1:3,think=fixed:20ms,shared_prefix=16x2,input=fixed:24,output=fixed:5"


@pytest.fixture
def server() -> Iterator[str]:
    with null_server() as url:
        yield url


def run_bench(*arguments: object) -> Result:
    return CliRunner().invoke(bench, ["serve", *(str(argument) for argument in arguments)])


def sent(number: int, due_us: int, messages: list[tuple[int, int]], **more: Any) -> Sent:
    """A request that was answered, unless `more` has other fields; messages are (when, output tokens so far)."""
    one = Sent(f"r{number}", due_us, turn_tokens=10, request_id=number, sent_us=due_us + 100, status=200)
    one.message_us = array("q", [when for when, _ in messages])
    one.message_tokens = array("i", [tokens for _, tokens in messages])
    if messages:
        one.first_us, one.last_us, one.output_tokens = messages[0][0], messages[-1][0], messages[-1][1]
        one.ended_us = one.last_us + 50
    for name, value in more.items():
        setattr(one, name, value)
    return one


def measured(*requests: Sent, slos: tuple[str, ...] = (), warm_up: int = 0) -> Any:
    workload = open_workload("gen:n=2", seed=7)
    sender = Sender(ServerAddress("h", 1, "", False), Arrivals(workload.turns), workload.turns, "m", Asking(), 1.0)
    sender.sent = list(requests)
    scenario = Scenario(
        model="", gpu="", workload="gen:n=2", slos=tuple(Slo.parse(one) for one in slos), warm_up=warm_up
    )
    return measure(sender, scenario, workload, url="http://h:1", interrupted=False, command="").metrics


def test_latencies_are_those_of_the_metrics_page() -> None:
    found = measured(
        sent(0, 1_000, [(5_000, 1), (6_000, 2), (9_000, 5)], prompt_tokens=7, cached_tokens=4, finish_reason="stop"),
        sent(1, 2_000, [(4_000, 1)], prompt_tokens=9, cached_tokens=0),
        slos=("ttft=3ms",),
    )
    latency = found["latency"]
    assert (latency["ttft_us_min"], latency["ttft_us_max"]) == (2_000, 4_000)  # from its due time
    assert latency["tpot_us_max"] == latency["tpot_us_min"] == 1_000  # (9,000 - 5,000) / (5 - 1)
    assert (latency["itl_us_p50"], latency["itl_us_max"]) == (1_000, 1_000)  # 3 tokens after 3,000 us are 3 gaps
    assert (latency["e2e_us_min"], latency["e2e_us_max"]) == (2_050, 8_050)
    assert latency["queue_us_p50"] is None  # no client can measure it
    assert found["throughput"]["makespan_us"] == 8_050
    assert (found["throughput"]["prompt_tokens"], found["throughput"]["output_tokens"]) == (16, 6)
    assert found["throughput"]["good_requests"] == 1
    assert found["cache"]["hit_ratio"] == 0.25
    assert found["requests"]["by_finish_reason"] == {"length": 1, "stop": 1}
    assert found["generator"]["late_us_max"] == 100
    assert found["scheduler"]["retractions"] is None


def test_tokens_of_messages_are_shared_out_where_a_server_reports_only_their_sum() -> None:
    found = measured(sent(0, 0, [(1_000, -1), (3_000, -1)], output_tokens=4))
    assert found["latency"]["itl_us_max"] == 1_000
    assert found["throughput"]["output_tokens"] == 4


def test_errors_count_as_what_they_are() -> None:
    found = measured(
        sent(0, 0, [(1_000, 1)]),
        sent(1, 0, [], error="full", kind="status 503", status=503),
        sent(2, 0, [], error="too long", kind="status 400", status=400),
        sent(3, 0, [(500, 1)], error="no end", kind="timeout"),
        sent(4, 0, [(500, 1)], error="ConnectionResetError: ", kind="connection"),
        sent(5, 0, [(500, 1)], error="interrupted", kind="interrupted"),
        sent(6, 0, [], error="broken", kind="status 500", status=500),
    )
    requests = found["requests"]
    assert (requests["arrived"], requests["completed"], requests["unfinished"]) == (7, 1, 1)
    assert requests["by_reject_reason"] == {"bad_request": 1, "queue_full": 1}
    assert requests["by_finish_reason"] == {"error": 2, "length": 1, "timeout": 1}
    assert requests["failed"] == 5  # all but the answered one and the client's own error
    assert {kind: errors["count"] for kind, errors in found["errors"].items()} == {
        "connection": 1, "interrupted": 1, "status 400": 1, "status 500": 1, "status 503": 1, "timeout": 1,
    }  # fmt: skip
    assert found["errors"]["status 400"]["examples"] == ["too long"]


def test_a_warm_up_is_not_measured() -> None:
    found = measured(sent(0, 0, [(9_000, 1)]), sent(1, 0, [(1_000, 1)], cached_tokens=5, prompt_tokens=10), warm_up=1)
    assert found["requests"]["arrived"] == 1
    assert found["latency"]["ttft_us_max"] == 1_000
    assert found["generator"]["sent"] == 1
    assert found["cache"]["hit_ratio"] == 0.5


def test_prompts_of_ids_are_of_the_vocabulary_and_share_what_they_shared() -> None:
    form = TokenIdPrompts(2048)
    first, second = form.of((0, 600, 5_000, 20)), form.of((0, 600, 9_000, 20))
    assert len(first) == len(second) == 620
    assert first[:600] == second[:600]
    assert first[600:604] != second[600:604]
    assert min(first) >= 256
    assert max(first) < 1_792
    assert form.of((0, 600, 5_000, 20), 590) == first[590:]
    blocks = np.array(form.of((0, 512 * 400))).reshape(400, 512)
    assert len(np.unique(blocks[:, :16], axis=0)) == 400  # no page of one is a page of another


def test_a_run_stands_beside_its_simulation(server: str, tmp_path: Path) -> None:
    real, simulated = tmp_path / "real", tmp_path / "simulated"
    result = run_bench("--to", server, "--workload", SESSIONS, "--slo", "ttft_p99=1s", "--out", real)
    assert result.exit_code == 0, result.output
    assert "40 of 40 requests completed" in result.stdout
    assert "generator: sent" in result.stdout
    words = ["--model", "qwen3-0.6b", "--gpu", "h200", "--workload", SESSIONS, "--slo", "ttft_p99=1s"]
    done = CliRunner().invoke(simulate, [*words, "--out", str(simulated)])
    assert done.exit_code == 0, done.output
    found = compare(read_runs([real, simulated]))
    assert not found.warnings
    assert not found.settings
    assert any("measured at a server" in note for note in found.notes)
    assert found.figure("ttft_us_p50").values[0] is not None
    assert found.pairs[0] is not None
    assert found.pairs[0].matched_by == "label"
    run = read_run(real)
    assert run.is_measured
    assert run.requests is not None
    assert len(run.requests["label"]) == 40
    twin = read_run(simulated).requests
    assert twin is not None
    assert set(run.requests["label"]) == set(twin["label"])
    again = run_bench("--to", server, "--workload", SESSIONS, "--out", real)
    assert again.exit_code == 2
    assert "already holds a run" in again.stderr


def test_a_closed_loop_keeps_so_many_sessions_open(server: str, tmp_path: Path) -> None:
    words = ("--workload", "gen:n=50,output=fixed:4", "--concurrency", 3, "--limit", 60)
    result = run_bench("--to", server, *words, "--out", tmp_path / "run", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["requests"]["completed"] == 60
    assert found["about"]["workload"]["concurrency"] == 3
    requests = read_run(tmp_path / "run").requests
    assert requests is not None
    starts = np.sort(requests["arrival_us"])
    ends = np.sort(requests["arrival_us"] + requests["e2e_us"])
    open_at = np.arange(1, 61) - np.searchsorted(ends, starts, side="right")
    assert open_at.max() == 3
    assert found["about"]["not_sent"] == 0


def test_rates_windows_and_bodies_arrive(server: str, tmp_path: Path) -> None:
    words = ("--workload", "gen:n=40,rate=10,output=fixed:2", "--time-window", "0..2", "--rate-scale", 4)
    result = run_bench("--to", server, *words, "--body", '{"top_p": 0.5}', "--no-ignore-eos", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    turns = open_workload("gen:n=40,rate=10,output=fixed:2", seed=7, time_window="0..2", rate_scale=4.0).turns
    assert found["requests"]["arrived"] == len(turns) < 40
    assert found["about"]["measured"]["fields"] == {"top_p": 0.5}
    command = shlex.split(found["about"]["command"])
    assert command[command.index("--body") + 1] == '{"top_p": 0.5}'
    assert "--no-ignore-eos" in command
    asked = requested_of(server)
    assert {one["top_p"] for one in asked} == {0.5}
    assert not any("ignore_eos" in one for one in asked)


def test_what_cannot_be_is_refused_by_name(server: str, tmp_path: Path) -> None:
    gen = ("--workload", "gen:n=2,rate=10")
    for words, said in (
        (("--to", "http://127.0.0.1:1", *gen), "cannot be reached"),
        (("--to", "ftp://x", *gen), "`--to` must be the URL"),
        (("--to", f"{server}/elsewhere", *gen), "is not an OpenAI-compatible server"),
        (("--to", server, *gen, "--model", "other"), "`--model` other is not served at"),
        (("--to", server, *gen, "--prompts", "ids"), "`--prompts` ids needs the size of the vocabulary"),
        (("--to", server, *gen, "--prompts", "words", "--vocab", 9), "`--vocab` 9 is for prompts of token ids"),
        (("--to", server, *gen, "--chat", "--prompts", "ids"), "`--prompts` ids cannot be messages"),
        (("--to", server, *gen, "--body", "[1]"), "`--body` must be an object"),
        (("--to", server, *gen, "--body", "{"), "`--body` is not JSON"),
        *((("--to", server, *gen, "--timeout", wrong), "`--timeout` must be") for wrong in (0, -1, "nan", "inf")),
        (("--to", server, *gen, "--vocab", 0), "`vocab` must be at least 16 tokens, got `0`"),
        (("--to", server, *gen, "--concurrency", 2, "--rate", 3), "two kinds of load"),
        (("--to", server, *gen, "--slo", "ttft"), "there is no `=`"),
        (("--to", server, *gen, "--slo", "call_p99=1s"), "those of a call do not arrive together"),
        (("--to", server, "--workload", tmp_path / "nothing"), "no such file"),
    ):
        result = run_bench(*words)
        assert result.exit_code == 2, result.output
        assert said in result.stderr
        assert result.stdout == ""


def test_requests_that_fail_are_named_by_kind(server: str) -> None:
    result = run_bench("--to", server, "--workload", "gen:n=3,rate=100", "--body", '{"prompt": "fail"}')
    assert result.exit_code == 1
    assert "3 status 503: " in result.stdout
    words = ("--workload", "gen:n=2,rate=100,output=fixed:2", "--timeout", 0.3)
    result = run_bench("--to", server, *words, "--body", '{"prompt": "hang"}', "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["errors"]["timeout"]["count"] == 2


def test_ctrl_c_stops_sending_and_writes_the_run(server: str, tmp_path: Path) -> None:
    words = [sys.executable, "-c", "from lockstep.tools.bench import bench; bench()", "serve", "--to", server]
    words += ["--workload", "gen:n=5000,rate=10,input=fixed:4,output=fixed:2", "--out", str(tmp_path / "run")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as done:
        assert done.stderr is not None
        assert "null at" in done.stderr.readline()
        await_asked(server, 5)
        done.send_signal(signal.SIGINT)
        said, _ = done.communicate(timeout=120)
    assert done.returncode == 130
    assert "interrupted: the figures end there" in said
    assert "were not sent" in said
    assert read_run(tmp_path / "run").about["interrupted"] is True


def test_one_request_is_a_workload(server: str, tmp_path: Path) -> None:
    (tmp_path / "one.csv").write_text("arrival_s,input_tokens,output_tokens\n0.0,20,5\n")
    words = ("--workload", tmp_path / "one.csv", "--slo", "ttft_p99=10s", "--out", tmp_path / "run")
    result = run_bench("--to", server, *words)
    assert result.exit_code == 0, result.output
    assert "1 of 1 requests completed" in result.output
    assert read_run(tmp_path / "run").requests is not None


def test_ctrl_c_while_the_only_request_has_no_answer(server: str, tmp_path: Path) -> None:
    (tmp_path / "one.csv").write_text("arrival_s,input_tokens,output_tokens\n0.0,20,5\n")
    words = ["serve", "--to", server, "--workload", str(tmp_path / "one.csv"), "--body", '{"prompt": "hang"}']
    run = [sys.executable, "-c", "from lockstep.tools.bench import bench; bench()", *words]
    with subprocess.Popen(run, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as done:
        assert done.stderr is not None
        assert "null at" in done.stderr.readline()
        await_asked(server, 1)
        done.send_signal(signal.SIGINT)
        said, also = done.communicate(timeout=120)
    assert done.returncode == 130, said + also
    assert "interrupted: the figures end there; 1 request" in said
    assert "Traceback" not in also


def test_a_mistake_of_ours_ends_the_run(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> bytes:
        raise AssertionError("a mistake")

    monkeypatch.setattr(Sender, "_take", broken)
    result = run_bench("--to", server, "--workload", "gen:n=3,rate=100,output=fixed:2")
    assert isinstance(result.exception, AssertionError)
    assert WORDS.answer([" a", " b"], ()) == " a b"
