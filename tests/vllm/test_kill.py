"""A vLLM engine that is killed, or stopped by an error of the core, under load: its journal has what was running."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from lockstep.core.journal.reader import read_journal
from lockstep.core.journal.replay import replay
from lockstep.tools.explain import explain
from lockstep.tools.journal import journal
from tests.vllm.served import Server, await_that, serving
from tests.vllm.support import needs_vllm

pytestmark = [needs_vllm, pytest.mark.long]
NAMES = [f"stream-{number}" for number in range(6)]


def command(what: object, *arguments: object) -> str:
    done = CliRunner().invoke(what, [str(one) for one in arguments])  # type: ignore[arg-type]
    assert done.exit_code == 0, done.output
    return done.output


def load(server: Server) -> None:
    """Begin six long answers, and return once each has lasted longer than an item stays in memory: 50 ms."""
    for number, name in enumerate(NAMES):
        server.stream(name, prompt=[5, 6, 7, 20 + number], max_tokens=3000)
    await_that(lambda: all(server.streamed[name] > 100 for name in NAMES), "tokens of every stream")


def test_after_kill_9_one_command_shows_what_was_running(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with serving(tmp_path, {"journal": str(run)}) as server:
        load(server)
        server.engine().kill()
        await_that(lambda: server.process.poll() is not None, "the end of the server")
        emitted = dict(server.streamed)
    replay(run)  # every whole record is decided again
    tail = read_journal(run).tail
    assert not tail.closed
    assert CliRunner().invoke(journal, ["verify", str(run)]).exit_code == 1  # equal, and not closed
    state = json.loads(command(explain, run, "--at", "end", "--json"))
    assert len(state["requests"]) == len(NAMES)
    lost = 0
    for one in state["requests"]:
        (name,) = [name for name in NAMES if one["label"].startswith(f"cmpl-{name}-0-")]
        assert one["phase"] == "decode"
        assert one["prompt_tokens"] == 4
        assert one["computed_tokens"] == one["prompt_tokens"] + one["emitted_tokens"] - 1
        assert one["pages"] == -(-(one["computed_tokens"] + one["in_flight_tokens"]) // 32)
        lost = max(lost, emitted[name] - one["emitted_tokens"])
    assert lost < 100  # tokens of the last 50 ms, which had not reached the file
    (batch,) = state["in_flight"] or [None]
    assert batch is None or "decode" in batch["text"]
    text = command(explain, run, "--at", "end")
    assert "not closed: its writer was killed, could not write, or is still writing" in text
    assert "6 open requests: 6 in decode" in text


def test_a_recording_of_vllms_own_scheduler_shows_it_too(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with serving(tmp_path, {"journal": str(run)}, "--scheduler-cls", "lockstep.vllm.Recorder") as server:
        load(server)
        await_that(lambda: all(server.streamed[name] > 100 for name in NAMES), "a hundred tokens of every stream")
        server.engine().kill()
        await_that(lambda: server.process.poll() is not None, "the end of the server")
    state = json.loads(command(explain, run, "--at", "end", "--json"))
    assert len(state["requests"]) == len(NAMES)
    for one in state["requests"]:
        assert one["phase"] == "decode"
        assert one["emitted_tokens"] > 20
        assert one["computed_tokens"] == one["prompt_tokens"] + one["emitted_tokens"] - 1


PLANTED = """
from lockstep.core.contract.events import BatchFinished
from lockstep.vllm.scheduler import Scheduler


class Planted(Scheduler):
    def _take_in(self, event, samplers=()):
        if isinstance(event, BatchFinished) and event.batch_id == 40:
            event = BatchFinished(event.time_us, 999, event.tokens, generation=event.generation)
        return super()._take_in(event, samplers)
"""


def test_an_error_of_the_core_stops_the_server_and_is_the_end_of_the_journal(tmp_path: Path) -> None:
    """The workers answer a batch that was never launched. No decision follows, and the journal names the event."""
    run = tmp_path / "run"
    (tmp_path / "planted.py").write_text(PLANTED)
    options = ("--scheduler-cls", "planted.Planted")
    with serving(tmp_path, {"journal": str(run)}, *options) as server:
        for name in NAMES:
            server.stream(name, max_tokens=3000)
        await_that(lambda: server.process.poll() is not None, "the end of the server")
        assert "the core refused BatchFinished, the engine stops: ContractError" in server.text()
    text = command(explain, run, "--at", "end")
    assert "it was closed: ContractError: " in text
    assert "the scheduler refused the last event, and the engine stopped: batch b999 finished" in text
    assert "6 open requests" in text
    assert "launched and without a result: b40" in text
