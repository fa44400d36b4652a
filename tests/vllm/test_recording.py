"""The journal of a vLLM engine: whole records, no token ids, and serving that continues when it cannot be written."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner

from lockstep.core.contract.commands import LaunchBatch, Step
from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.errors import LockstepError
from lockstep.core.contract.events import BatchFinished, LaneReady, ObservedEvent, RequestArrived, TokenIds
from lockstep.core.journal.reader import read_journal
from lockstep.core.journal.records import EndRecord, EventRecord, JournalError, JournalHeader, UnsealedRecord
from lockstep.core.journal.replay import replay
from lockstep.core.journal.writer import JournalWriter
from lockstep.core.scheduler.engine import Engine
from lockstep.tools.explain import explain
from lockstep.tools.journal import journal
from lockstep.vllm import recording
from lockstep.vllm.metrics import NAME, reported
from lockstep.vllm.pseudonyms import Pseudonyms
from lockstep.vllm.recording import Recording

HEADER = JournalHeader(config=SchedConfig(page_size=2, pages=64, radix_cache=True), host={"kind": "vllm"})
PROMPT = [1001, 1002, 1003, 1004, 1005]


class Served:
    """An engine that serves one request after another, recorded."""

    def __init__(self, folder: Path, *, pseudonyms: bool = True) -> None:
        self.engine = Engine(HEADER.config)
        self.recording = Recording(folder, HEADER, Pseudonyms() if pseudonyms else None)
        self._time_us = 0

    def fold(self, event: ObservedEvent, samplers: tuple[int, ...] = ()) -> Step:
        step = self.engine.step(event)
        self.recording.append(event, step, samplers)
        return step

    def now(self) -> int:
        self._time_us += 1
        return self._time_us

    def serve(self, request_id: int, tokens: int = 3) -> None:
        prompt = TokenIds(np.array(PROMPT, np.int32).tobytes())
        arrived = RequestArrived(
            time_us=self.now(), request_id=request_id, prompt=prompt, max_new_tokens=tokens, label=f"cmpl-{request_id}"
        )
        self.fold(arrived)
        for number in range(tokens):
            (launch,) = [one for one in self.fold(LaneReady(self.now())).commands if isinstance(one, LaunchBatch)]
            token = np.array([1500 + number], np.int32).tobytes()
            self.fold(BatchFinished(self.now(), launch.plan.batch_id, token), (request_id,))


def events_of(folder: Path) -> int:
    return sum(isinstance(record, EventRecord) for record in read_journal(folder).records())


@pytest.mark.parametrize("pseudonyms", [True, False])
def test_the_journal_replays_and_prefixes_are_shared(pseudonyms: bool, tmp_path: Path) -> None:
    served = Served(tmp_path, pseudonyms=pseudonyms)
    served.serve(0)
    served.serve(1)
    served.recording.close()
    replay(tmp_path)
    assert read_journal(tmp_path).tail.closed
    assert served.engine.counts.cached_tokens == 4  # two whole pages of the prompt


@pytest.mark.parametrize("pseudonyms", [True, False])
def test_token_ids_are_in_the_journal_only_if_asked_for(pseudonyms: bool, tmp_path: Path) -> None:
    served = Served(tmp_path, pseudonyms=pseudonyms)
    served.serve(0)
    served.recording.close()
    held = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    for token in [*PROMPT, 1500, 1501, 1502]:
        assert (np.int32(token).tobytes() in held) is not pseudonyms


def test_events_reach_the_file_while_others_keep_coming(tmp_path: Path) -> None:
    served = Served(tmp_path)
    for number in range(400):
        served.serve(number, tokens=1)
        if events_of(tmp_path):
            break
        time.sleep(0.005)
    else:
        pytest.fail("no event of 2 s was written: the journal was flushed only in pauses")
    served.recording.close()
    replay(tmp_path)


class Gate:
    """A journal that writes nothing before it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open, original = threading.Event(), JournalWriter.append

        def append(writer: JournalWriter, event: ObservedEvent, digest: bytes) -> None:
            self.open.wait()
            original(writer, event, digest)

        monkeypatch.setattr(JournalWriter, "append", append)


def test_a_full_queue_ends_recording_and_not_serving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gate = Gate(monkeypatch)
    monkeypatch.setattr(recording, "QUEUE_EVENTS_MAX", 4)
    served = Served(tmp_path)
    with caplog.at_level(logging.ERROR, "vllm.lockstep"):
        for number in range(5):
            served.serve(number)
    assert served.engine.counts.finished["length"] == 5
    assert [record.getMessage() for record in caplog.records] == [
        "the journal ends here, serving goes on: 4 events wait to be written"
    ]
    gate.open.set()
    served.recording.close()
    replay(tmp_path)  # the records are whole
    assert 4 <= events_of(tmp_path) <= 5


@pytest.mark.parametrize("error", [JournalError("cannot write: No space left on device"), OSError(5, "I/O error")])
def test_a_failing_disk_ends_recording_and_not_serving(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    original = JournalWriter.append

    def append(writer: JournalWriter, event: ObservedEvent, digest: bytes) -> None:
        if event.time_us > 5:
            raise error
        original(writer, event, digest)

    monkeypatch.setattr(JournalWriter, "append", append)
    served = Served(tmp_path)
    with caplog.at_level(logging.ERROR, "vllm.lockstep"):
        for number in range(3):
            served.serve(number)
        served.recording.close()
        served.serve(3)
    assert served.engine.counts.finished["length"] == 4
    assert served.recording.failure == str(error)
    assert len(caplog.records) == 1
    replay(tmp_path)
    assert events_of(tmp_path) == 5


def test_a_metric_has_which_journals_ended_early() -> None:
    registry = pytest.importorskip("prometheus_client").REGISTRY
    told: list[str] = []
    first, _ = reported(0, told.append), reported(1, told.append)
    assert registry.get_sample_value(NAME, {"engine": "0"}) == 0
    first("No space left on device")
    assert told == ["No space left on device"]
    assert [registry.get_sample_value(NAME, {"engine": str(one)}) for one in range(2)] == [1, 0]


def test_an_event_that_the_core_refuses_is_the_last_record(tmp_path: Path) -> None:
    served = Served(tmp_path)
    served.serve(0)
    wrong = BatchFinished(served.now(), 99, b"")
    with pytest.raises(LockstepError) as raised:
        served.engine.step(wrong)
    served.recording.append_refused(wrong, (), raised.value)  # closes it: vLLM may kill the engine now
    *_, unsealed, end = read_journal(tmp_path).records()
    assert isinstance(unsealed, UnsealedRecord)
    assert unsealed.event == wrong
    assert isinstance(end, EndRecord)
    assert end.reason == f"{type(raised.value).__name__}: {raised.value}"
    shown = CliRunner().invoke(explain, [str(tmp_path), "--at", "end"]).output
    assert "the scheduler refused the last event, and the engine stopped: batch b99 finished" in shown
    assert str(raised.value) in shown


def test_a_refused_result_keeps_its_tokens_and_drafts(tmp_path: Path) -> None:
    """The result has the shape that the core refused, with pseudonyms for its tokens."""
    served = Served(tmp_path)
    served.serve(0)
    wrong = BatchFinished(served.now(), 99, np.array([5, 6], np.int32).tobytes())
    wrong = msgspec.structs.replace(wrong, accepted=np.array([2], np.int32).tobytes())
    served.recording.append_refused(wrong, (0,), ValueError("planted"))
    served.recording.close()
    assert served.recording.failure == ""
    *_, unsealed, _ = read_journal(tmp_path).records()
    assert isinstance(unsealed, UnsealedRecord)
    assert isinstance(unsealed.event, BatchFinished)
    assert len(unsealed.event.tokens) == len(wrong.tokens)
    assert unsealed.event.accepted == wrong.accepted


def test_a_fault_of_the_writing_thread_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def finished(*_: object) -> BatchFinished:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(Pseudonyms, "finished", finished)
    served = Served(tmp_path)
    with caplog.at_level(logging.ERROR, "vllm.lockstep"):
        served.serve(0)
        served.recording.close()
    assert served.recording.failure == "ZeroDivisionError: planted"
    assert len(caplog.records) == 1
    replay(tmp_path)
    assert read_journal(tmp_path).tail.closed


KILLED = """
import sys, time
from pathlib import Path
from tests.vllm.test_recording import Served, events_of
served = Served(Path(sys.argv[1]))
served.serve(0)
served.serve(1, tokens=2)
from lockstep.core.contract.events import LaneReady, RequestArrived, TokenRuns
served.fold(RequestArrived(time_us=90, request_id=2, prompt=TokenRuns((7, 9)), max_new_tokens=4, label="cmpl-2"))
served.fold(LaneReady(91))
while events_of(Path(sys.argv[1])) < 14:
    time.sleep(0.01)
print("written", flush=True)
time.sleep(600)
"""


def test_after_a_kill_the_journal_has_every_record_and_what_was_running(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "written\n"
        process.send_signal(signal.SIGKILL)
    replay(tmp_path)
    runner = CliRunner()
    info = runner.invoke(journal, ["info", str(tmp_path)])
    assert "clean, not closed: the writer was killed" in info.output
    assert runner.invoke(journal, ["verify", str(tmp_path)]).exit_code == 1  # equal, and not closed
    story = runner.invoke(explain, [str(tmp_path), "--request", "cmpl-2"])
    assert story.exit_code == 0, story.output
    assert "still open when the journal ends" in story.output
    assert "b5" in story.output  # the batch that was in flight
    shown = runner.invoke(explain, [str(tmp_path), "--at", "end", "--json"])
    assert shown.exit_code == 0, shown.output
    state = json.loads(shown.stdout)
    (request,) = state["requests"]
    assert (request["label"], request["phase"], request["prompt_tokens"]) == ("cmpl-2", "prefill", 9)
    assert (request["computed_tokens"], request["in_flight_tokens"], request["emitted_tokens"]) == (0, 9, 0)
    assert request["pages"] == 5
    assert [one["batch_id"] for one in state["in_flight"]] == [5]
    text = runner.invoke(explain, [str(tmp_path), "--at", "end"]).output
    assert "not closed: its writer was killed, could not write, or is still writing" in text
    assert "1 open request: 1 in prefill" in text
    assert "launched and without a result: b5" in text
