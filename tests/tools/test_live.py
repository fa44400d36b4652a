"""`lockstep replay TRACE --to URL` sends requests at their times, with the prefixes they share, and reports its lag."""

from __future__ import annotations

import asyncio
import gc
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from lockstep.core.contract.errors import ConfigError
from lockstep.sim.workload.token_runs import prompt_ids
from lockstep.sim.workload.workload import open_workload
from lockstep.tools import live
from lockstep.tools.http_stream import HttpClient, ServerAddress
from lockstep.tools.replay import replay
from tests.support.null_server import CROWD, await_asked, null_server, requested_of
from tests.support.recorded import record_simulation

SESSIONS = "gen:n=40,rate=100,turns=uniform:1:3,think=fixed:20ms,shared_prefix=16x2,input=fixed:24,output=fixed:5"


@pytest.fixture
def server() -> Iterator[str]:
    with null_server() as url:
        yield url


def run_live(*arguments: object) -> Result:
    return CliRunner().invoke(replay, [str(argument) for argument in arguments])


def test_every_request_is_sent_at_its_moment_and_answered(server: str, tmp_path: Path) -> None:
    lines = tmp_path / "sent.jsonl"
    result = run_live(SESSIONS, "--to", server, "--out", lines, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["requests"], found["sent"], found["answered"], found["failed"]) == (40, 40, 40, {})
    assert found["output_tokens"] == 200
    assert found["model"] == "null"
    sent = {one["label"]: one for one in map(json.loads, lines.read_text().splitlines())}
    for turn in open_workload(SESSIONS, seed=7).turns:
        one = sent[turn.label]
        if turn.after is None:
            assert one["due_us"] == turn.arrival_us
        assert one["sent_us"] >= one["due_us"]
        assert one["messages"] == turn.output_tokens
    late = sorted(one["sent_us"] - one["due_us"] for one in sent.values())
    assert found["late_us"]["max"] == late[-1]
    assert late[0] <= found["late_us"]["p50"] <= late[-1]


def test_no_request_waits_for_the_answers_of_others(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No request is answered before all were sent, so a client that sends one by one would never end."""
    monkeypatch.setattr(live, "word_of", lambda token: "crowd")
    gen = f"gen:n={CROWD},rate=100,input=fixed:2,output=fixed:2"
    result = run_live(gen, "--to", server, "--timeout", 120, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["answered"] == CROWD


def test_each_request_has_its_label_as_request_id(server: str, tmp_path: Path) -> None:
    """Servers that keep it, such as vLLM, then use the same names as requests.csv."""
    (tmp_path / "two.csv").write_text("arrival_s,input_tokens,output_tokens\n0.0,20,5\n0.0,20,5\n")
    result = run_live(tmp_path / "two.csv", "--to", server, "--json")
    assert result.exit_code == 0, result.output
    assert sorted(one["x_request_id"] for one in requested_of(server)) == ["line2", "line3"]


def test_one_request_is_a_trace(server: str, tmp_path: Path) -> None:
    (tmp_path / "one.csv").write_text("arrival_s,input_tokens,output_tokens\n0.0,20,5\n")
    result = run_live(tmp_path / "one.csv", "--to", server)
    assert result.exit_code == 0, result.output
    assert "1 of 1 request answered" in result.output


def test_nothing_that_was_there_before_is_collected_while_requests_are_due(
    server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Garbage collection of all imported modules takes 25 ms, five times the allowed lateness of a request."""
    frozen: list[int] = []
    converse = live.Sender._converse

    async def seen(*arguments: Any) -> None:
        frozen.append(gc.get_freeze_count())
        await converse(*arguments)

    monkeypatch.setattr(live.Sender, "_converse", seen)
    assert run_live("gen:n=3,rate=50,input=fixed:4,output=fixed:2", "--to", server).exit_code == 0
    assert len(frozen) == 3
    assert min(frozen) > 10_000
    assert gc.get_freeze_count() == 0


def test_prompts_share_what_they_shared_and_go_on_from_real_answers(server: str) -> None:
    assert run_live(SESSIONS, "--to", server).exit_code == 0
    asked = [one["prompt"].split() for one in requested_of(server)]
    turns = open_workload(SESSIONS, seed=7).turns
    roots = [turn for turn in turns if turn.after is None]
    for turn in roots:
        words = [live.word_of(token) for token in prompt_ids(turn.prompt).tolist()]
        assert words in asked
    number = next(at for at, words in enumerate(asked) if any(word.startswith("w") for word in words))
    later = asked[number]
    first = next(at for at, word in enumerate(later) if word.startswith("w"))
    before = asked[int(later[first][1:].split("x")[0]) - 1]
    assert later[:first] == before  # the prompt of the previous turn, then its answer
    assert [word.split("x")[1] for word in later[first : first + 5]] == ["0", "1", "2", "3", "4"]
    assert not any(word.startswith("w") for word in later[first + 5 :])


def test_words_are_as_different_as_ids() -> None:
    assert len({live.word_of(token) for token in range(20_000)}) == 20_000
    assert live.word_of(2**31 - 1)


def test_speed_divides_gaps_and_a_run_can_be_sent(server: str, tmp_path: Path) -> None:
    run = record_simulation(tmp_path / "run", SESSIONS, pages=200)
    lines = tmp_path / "sent.jsonl"
    assert run_live(run, "--to", server, "--speed", 4, "--out", lines, "--max-tokens", 2).exit_code == 0
    sent = [json.loads(line) for line in lines.read_text().splitlines()]
    assert len(sent) == 40
    assert {one["output_tokens"] for one in sent} == {2}
    due = {one["label"]: one["due_us"] for one in sent}
    turns = [turn for turn in open_workload(SESSIONS, seed=7).turns if turn.after is None]
    for turn in turns:
        assert abs(due[turn.label] - turn.arrival_us / 4) < 5_000  # a run has the times at which the host noticed
    assert "--speed stretches a run" in run_live(run, "--to", server, "--rate", 3).stderr


def test_refused_and_broken_answers_are_counted(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "word_of", lambda token: "fail")
    result = run_live("gen:n=3,rate=100,input=fixed:2,output=fixed:2", "--to", server)
    assert result.exit_code == 1
    assert "0 of 3 requests answered" in result.stdout
    assert '3 failed: {"error": {"message": "no"}}' in result.stdout
    monkeypatch.setattr(live, "word_of", lambda token: "hang")
    result = run_live("gen:n=2,rate=100,input=fixed:2,output=fixed:2", "--to", server, "--timeout", 0.3)
    assert "2 failed: no end within 0.3 s" in result.stdout


def test_ctrl_c_stops_sending_and_reports(server: str) -> None:
    words = [sys.executable, "-m", "lockstep.tools.replay", "gen:n=5000,rate=10,input=fixed:4,output=fixed:2"]
    with subprocess.Popen([*words, "--to", server], stdout=subprocess.PIPE, text=True) as done:
        await_asked(server, 5)
        done.send_signal(signal.SIGINT)
        said, _ = done.communicate(timeout=120)
    assert done.returncode == 130
    assert said.startswith("interrupted: ")
    assert "were not sent" in said
    assert "sent after it was due" in said


def test_what_cannot_be_is_refused_by_name(server: str, tmp_path: Path) -> None:
    gen = "gen:n=2,rate=10"
    assert "cannot be reached" in run_live(gen, "--to", "http://127.0.0.1:1").stderr
    assert "`--to` must be the URL" in run_live(gen, "--to", "ftp://x").stderr
    assert "`--speed` must be" in run_live(gen, "--to", server, "--speed", 0).stderr
    assert "no such file" in run_live(tmp_path / "nothing", "--to", server).stderr
    for wrong in (0, "nan", "inf"):
        assert "`--timeout` must be" in run_live(gen, "--to", server, "--timeout", wrong).stderr
    with pytest.raises(ConfigError, match="cannot be"):
        ServerAddress.parse("http://x:99999999")
    assert ServerAddress.parse("https://host/base/v1/") == ServerAddress("host", 443, "/base", True)


def test_a_kept_connection_that_was_closed_is_replaced() -> None:
    """A server that closes idle connections may announce it with a 408 that answers no request."""

    async def run() -> tuple[int, int, bytes]:
        asked = connected = 0

        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal asked, connected
            connected += 1
            if connected <= 2:
                writer.write(b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 3\r\n\r\nidl")
            else:
                await reader.readuntil(b"\r\n\r\n")
                asked += 1
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi")
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        client = HttpClient(ServerAddress("127.0.0.1", server.sockets[0].getsockname()[1], "", False), {})
        await client.warm(2)
        await asyncio.sleep(0.1)
        async with client.request("GET", "/x", b"") as response:
            text = b"".join([piece async for piece in response.pieces()])
        client.close()
        server.close()
        return response.status, asked, text

    assert asyncio.run(run()) == (200, 1, b"hi")
