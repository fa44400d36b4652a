"""`lockstep journal` reports the content and the end of a journal, in words, in JSON and in its exit status."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result

from lockstep.core.contract.commands import Step
from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.events import LaneReady, ObservedEvent, RequestArrived, RequestCancelled, TokenIds
from lockstep.core.journal.reader import read_journal
from lockstep.core.journal.records import JournalHeader
from lockstep.core.journal.replay import replay
from lockstep.core.journal.writer import JournalWriter
from lockstep.tools import journal as tool

Lockstep = Callable[..., Result]


class ChainEngine:
    """A deterministic engine whose digest is a chain over its events; `salt` makes another engine of it."""

    def __init__(self, salt: bytes = b"") -> None:
        self.state = salt

    def step(self, event: ObservedEvent, /) -> Step:
        self.state = blake2b(self.state + msgspec.msgpack.encode(event), digest_size=16).digest()
        return Step(digest=self.state)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Four events, a snapshot after the second, closed."""
    folder = tmp_path / "run"
    engine = ChainEngine()
    header = JournalHeader(config=SchedConfig(pages=64), seed=7, host={"kind": "sim", "rate": 6.5})
    events: list[ObservedEvent] = [
        RequestArrived(time_us=1000, request_id=1, prompt=TokenIds(bytes(400)), max_new_tokens=4, label="hello"),
        LaneReady(1000),
        RequestCancelled(2500, 1),
        LaneReady(1_501_000),
    ]
    with JournalWriter.create(folder, header) as writer:
        for number, event in enumerate(events):
            if number == 2:
                writer.snapshot(b"state", engine.state)
            writer.append(event, engine.step(event).digest)
    return folder


@pytest.fixture
def journal(monkeypatch: pytest.MonkeyPatch) -> Lockstep:
    monkeypatch.setattr(tool, "replay", functools.partial(replay, make_engine=lambda _: ChainEngine()))

    def invoke(*arguments: object) -> Result:
        return CliRunner().invoke(tool.journal, [str(argument) for argument in arguments])

    return invoke


def segment(run: Path) -> Path:
    return run / "journal/00000000.log"


def tear(run: Path, size: int = 5) -> None:
    with segment(run).open("ab") as file:
        file.write(b"\xf5" * size)


def damage(run: Path) -> None:
    data = bytearray(segment(run).read_bytes())
    data[60] ^= 1
    segment(run).write_bytes(data)


# ---------------------------------------------------------------------------------------------------------------- info


def test_info_shows_header_counts_duration_and_tail(run: Path, journal: Lockstep) -> None:
    result = journal("info", run)
    assert (result.exit_code, result.stderr) == (0, "")
    rows = {line.split("  ")[0].strip(): line.split("  ")[-1].strip() for line in result.stdout.splitlines()}
    assert rows["seed"] == "7"
    assert rows["host kind"] == "sim"
    assert rows["config"] == "pages=64"
    assert rows["duration"] == "1.500000 s from first to last event"
    assert rows["events"] == "4 in 7 records"
    assert rows["tail"] == "clean, ended: closed"
    assert [line.split() for line in result.stdout.splitlines() if "LaneReady" in line] == [["LaneReady", "2"]]


def test_info_as_json_has_the_whole_config(run: Path, journal: Lockstep) -> None:
    content = json.loads(journal("info", run, "--json").stdout)
    assert content["header"]["config"] == json.loads(msgspec.json.encode(SchedConfig(pages=64)))
    assert content["events_by_type"] == {"LaneReady": 2, "RequestArrived": 1, "RequestCancelled": 1}
    assert content["other_records"] == {"header": 1, "snapshot": 1, "end": 1}
    assert (content["duration_us"], content["end_reason"], content["tail"]["verdict"]) == (1_500_000, "closed", "clean")


def test_info_of_an_empty_journal(tmp_path: Path, journal: Lockstep) -> None:
    JournalWriter.create(tmp_path, JournalHeader(config=SchedConfig())).close()
    result = journal("info", tmp_path)
    assert "0 in 2 records" in result.stdout
    assert "all defaults" in result.stdout


# ---------------------------------------------------------------------------------------------------------------- dump


def test_dump_has_one_line_per_record(run: Path, journal: Lockstep) -> None:
    lines = journal("dump", run / "journal").stdout.splitlines()
    assert lines[0].split() == ["record", "step", "t_ms", "event"]
    assert [line.split()[:2] for line in lines[1:]] == [
        ["0", "-"],
        ["1", "0"],
        ["2", "1"],
        ["3", "-"],
        ["4", "2"],
        ["5", "3"],
        ["6", "-"],
    ]
    assert "RequestArrived request_id=1 prompt=(TokenIds ids=<400 bytes>) max_new_tokens=4 label='hello'" in lines[2]
    assert "snapshot after 2 steps in snapshot-000000000003" in lines[4]
    assert lines[-1].endswith("end: closed")


def test_dump_of_a_span_is_half_open(run: Path, journal: Lockstep) -> None:
    lines = journal("dump", run, "--from", 1, "--until", 3).stdout.splitlines()[1:]
    assert [line.split()[0] for line in lines] == ["2", "3", "4"]


def test_dump_as_jsonl_names_every_field(run: Path, journal: Lockstep) -> None:
    lines = [json.loads(line) for line in journal("dump", run, "--jsonl").stdout.splitlines()]
    assert [line["kind"] for line in lines] == ["header", "event", "event", "snapshot", "event", "event", "end"]
    arrived = lines[1]
    assert (arrived["step"], arrived["type"], arrived["fields"]["max_new_tokens"]) == (0, "RequestArrived", 4)
    assert arrived["fields"]["prompt"]["type"] == "TokenIds"
    assert bytes.fromhex(arrived["digest"])
    assert lines[3]["snapshot"]["steps"] == 2


def test_dump_of_a_torn_journal_reports_it_on_stderr(run: Path, journal: Lockstep) -> None:
    tear(run)
    result = journal("dump", run)
    assert result.exit_code == 0
    assert "torn" in result.stderr
    assert "torn" not in result.stdout


def test_dump_into_a_closed_pipe_is_quiet(tmp_path: Path) -> None:
    with JournalWriter.create(tmp_path, JournalHeader(config=SchedConfig())) as writer:
        for number in range(20_000):
            writer.append(LaneReady(number), bytes(16))
    command = [sys.executable, "-m", "lockstep.tools.journal", "dump", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    dump = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
    assert dump.stdout is not None
    assert dump.stderr is not None
    assert dump.stdout.readline().split()[0] == b"record"
    dump.stdout.close()
    assert dump.stderr.read() == b""
    dump.stderr.close()
    dump.wait(120)


# --------------------------------------------------------------------------------------------------------------- check


def test_check_of_a_clean_journal(run: Path, journal: Lockstep) -> None:
    result = journal("check", run)
    assert (result.exit_code, result.stdout, result.stderr) == (0, "clean, closed; 7 records, 4 events\n", "")


def test_check_of_a_torn_tail_reports_how_to_repair_and_repairs(run: Path, journal: Lockstep) -> None:
    whole = segment(run).read_bytes()
    tear(run)
    result = journal("check", run)
    assert result.exit_code == 1
    expected = f"torn: 00000000.log is whole up to offset {len(whole)}, then 5 bytes (header short)"
    assert result.stdout.startswith(expected)
    assert f"lockstep journal check {run} --repair" in result.stderr
    result = journal("check", run, "--repair")
    assert result.exit_code == 0
    assert result.stdout.splitlines()[1] == "repaired: cut 5 bytes off 00000000.log"
    assert segment(run).read_bytes() == whole
    assert journal("check", run).exit_code == 0


def test_check_as_json(run: Path, journal: Lockstep) -> None:
    tear(run)
    result = journal("check", run, "--json")
    content = json.loads(result.stdout)
    assert (result.exit_code, content["verdict"], content["repaired"], content["steps"]) == (1, "torn", False, 4)
    damage(run)
    result = journal("check", run, "--json")
    assert (result.exit_code, json.loads(result.stdout)["reason"]) == (2, "payload checksum")


def test_check_of_corruption_names_the_offset_and_repair_refuses(run: Path, journal: Lockstep) -> None:
    damage(run)
    data = segment(run).read_bytes()
    for arguments in ([run], [run, "--repair"]):
        result = journal("check", *arguments)
        assert (result.exit_code, result.stdout) == (2, "")
        assert result.stderr.startswith(f"JournalCorrupt: {segment(run)} is corrupt at offset 0: payload checksum: ")
    assert segment(run).read_bytes() == data


def test_repair_refuses_while_a_writer_is_at_work(tmp_path: Path, journal: Lockstep) -> None:
    with JournalWriter.create(tmp_path, JournalHeader(config=SchedConfig())):
        tear(tmp_path)
        result = journal("check", tmp_path, "--repair")
        assert result.exit_code == 2
        assert "is being written by another process" in result.stderr


# -------------------------------------------------------------------------------------------------------------- verify


def test_verify_of_an_equal_journal(run: Path, journal: Lockstep) -> None:
    result = journal("verify", run)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith("equal: 4 events, 4 steps, 0 batches, final digest ")
    assert journal("verify", run, "--until", 1).stdout.startswith("equal: 1 event, 1 step, ")
    assert json.loads(journal("verify", run, "--json").stdout)["verdict"] == "equal"


def test_verify_of_a_torn_journal_reports_how_far_it_went(run: Path, journal: Lockstep) -> None:
    tear(run)
    result = journal("verify", run)
    assert result.exit_code == 1
    assert result.stdout.startswith("equal so far: 4 events, ")
    assert "verified up to the last whole record" in result.stdout


def test_verify_of_a_journal_cut_between_two_records_is_not_equal(run: Path, journal: Lockstep) -> None:
    data = segment(run).read_bytes()
    offsets = [record.offset for record in read_journal(run).records()]
    for number, offset in enumerate(offsets[1:], 1):
        segment(run).write_bytes(data[:offset])
        result = journal("verify", run)
        assert result.exit_code == 1, f"cut in front of record {number}: {result.output}"
        assert result.stdout.startswith("equal so far: ")
        assert "not closed: the writer was killed or is still writing, or the end is missing" in result.stdout
        content = json.loads(journal("verify", run, "--json").stdout)
        assert (content["verdict"], content["closed"], content["torn_tail"]) == ("not closed", False, False)


def test_verify_of_a_journal_without_its_last_segment_is_not_equal(tmp_path: Path, journal: Lockstep) -> None:
    long_journal(tmp_path, snapshots=0)
    segments = sorted((tmp_path / "journal").glob("*.log"))
    assert len(segments) > 3
    for path in reversed(segments[1:]):
        path.unlink()
        result = journal("verify", tmp_path)
        assert (result.exit_code, result.stdout.split(":")[0]) == (1, "equal so far")


# ----------------------------------------------------------------------------------------------------------- snapshots


def long_journal(folder: Path, *, snapshots: int, state_of: Callable[[bytes], bytes] = lambda state: state) -> None:
    """200 events; so many segments that begin with a snapshot, or several without any."""
    engine = ChainEngine()
    with JournalWriter.create(folder, JournalHeader(config=SchedConfig()), segment_bytes=4096) as writer:
        for number in range(200):
            if snapshots and number and number % (200 // (snapshots + 1)) == 0 and writer.segment < snapshots:
                writer.begin_segment(engine.state, state_of(engine.state))
            writer.append(LaneReady(number), engine.step(LaneReady(number)).digest)


def snapshots_of(run: Path) -> list[Path]:
    return sorted((run / "journal").glob("snapshot-*"))


@pytest.mark.parametrize("command", ["check", "verify"])
def test_a_snapshot_that_is_altered_or_missing_is_reported(command: str, tmp_path: Path, journal: Lockstep) -> None:
    long_journal(tmp_path, snapshots=5)
    assert journal(command, tmp_path).exit_code == 0
    assert len(snapshots_of(tmp_path)) == 5
    for path in snapshots_of(tmp_path):
        data = path.read_bytes()
        path.write_bytes(data[:3] + bytes((data[3] ^ 4,)) + data[4:])
        result = journal(command, tmp_path)
        assert (result.exit_code, f"snapshot {path.name}, after " in result.stderr) == (2, True), result.output
        assert "is altered" in result.stderr
        path.unlink()
        result = journal(command, tmp_path)
        assert (result.exit_code, "is missing" in result.stderr) == (2, True), result.output
        assert "so nothing can be replayed" not in result.stderr
        faults = json.loads(journal(command, tmp_path, "--json").stdout)["snapshot_faults"]
        assert [(one["file"], one["fault"]) for one in faults] == [(path.name, "missing")]
        path.write_bytes(data)
    assert journal(command, tmp_path).exit_code == 0


def test_an_expired_journal_whose_snapshots_are_gone_cannot_be_replayed(tmp_path: Path, journal: Lockstep) -> None:
    long_journal(tmp_path, snapshots=5)
    (tmp_path / "journal/00000000.log").unlink()
    assert journal("check", tmp_path).exit_code == 0
    opening, *others = snapshots_of(tmp_path)
    for path in others:
        path.unlink()
    assert journal("check", tmp_path).stderr.count(" is missing") == 4
    opening.unlink()
    result = journal("check", tmp_path)
    assert result.exit_code == 2
    assert f"snapshot {opening.name}, after 33 events, is missing; the events before it have expired" in result.stderr
    assert journal("verify", tmp_path).exit_code == 2


def test_old_snapshots_of_a_long_journal_may_be_missing_and_the_newest_two_not(
    tmp_path: Path, journal: Lockstep
) -> None:
    long_journal(tmp_path, snapshots=40)
    assert len(snapshots_of(tmp_path)) == 40
    for path in snapshots_of(tmp_path)[:-2:2]:  # as `DurableJournal.expire` does
        path.unlink()
    assert journal("check", tmp_path).exit_code == 0
    for path in snapshots_of(tmp_path)[-2:]:
        data = path.read_bytes()
        path.unlink()
        assert journal("check", tmp_path).exit_code == 2
        path.write_bytes(data)


def test_a_snapshot_of_another_state_than_the_replay_has_is_reported(tmp_path: Path, journal: Lockstep) -> None:
    long_journal(tmp_path, snapshots=2, state_of=lambda state: state[::-1])
    assert journal("check", tmp_path).exit_code == 0  # the stored files are the content
    result = journal("verify", tmp_path)
    many = len(snapshots_of(tmp_path))
    assert (result.exit_code, result.stderr.count(" is of another state")) == (2, many), result.output


def test_verify_of_another_engine_diverges(run: Path, journal: Lockstep, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool, "replay", functools.partial(replay, make_engine=lambda _: ChainEngine(b"other")))
    result = journal("verify", run)
    assert (result.exit_code, result.stdout) == (3, "")
    assert result.stderr.startswith("Divergence: step 0 (record 1) gave digest ")
    assert "lockstep journal dump" in result.stderr
    content = json.loads(journal("verify", run, "--json").stdout)
    assert (content["verdict"], content["step"], content["sequence"]) == ("diverged", 0, 1)


# -------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("command", ["info", "dump", "check", "verify"])
def test_what_is_no_journal_is_one_clear_error(command: str, tmp_path: Path, journal: Lockstep) -> None:
    for path, message in [(tmp_path / "none", "does not exist"), (tmp_path, "holds no journal: expected journal/")]:
        result = journal(command, path)
        assert (result.exit_code, result.stdout.count("\n") <= 1) == (2, True)
        assert result.stderr == f"JournalError: {result.stderr[14:]}"
        assert message in result.stderr
        assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("command", ["info", "dump", "check", "verify"])
def test_corruption_is_one_clear_error_for_every_command(command: str, run: Path, journal: Lockstep) -> None:
    damage(run)
    result = journal(command, run)
    assert result.exit_code == 2
    assert result.stderr.startswith("JournalCorrupt: ")


def test_help_is_the_docstring(journal: Lockstep) -> None:
    text = journal("--help").stdout
    assert "lockstep journal verify RUN    replay every event and compare every digest" in text
    assert "Exit status: 0 no problem" in text
