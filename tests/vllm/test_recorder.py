"""`lockstep.vllm.Recorder` records vLLM's own scheduler, and other commands read the recording."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from lockstep.host.recording import FILE, Arrived, Ended, PassFinished, Planned, RecordingHeader, read_recording
from lockstep.sim.cli.calibrate import calibrate
from lockstep.sim.cli.compare import compare
from lockstep.sim.cli.workload import workload
from lockstep.sim.results.batch_times import read_batch_times
from lockstep.tools.explain import explain
from lockstep.tools.journal import journal
from lockstep.tools.replay import replay
from tests.vllm.support import (
    OWN,
    SMALL_POOL,
    different,
    engine,
    mixed_requests,
    model_folder,
    needs_vllm,
    run,
    scheduler_of,
)

RECORDER = "lockstep.vllm.Recorder"


def command(what: object, *arguments: object) -> str:
    done = CliRunner().invoke(what, [str(one) for one in arguments])  # type: ignore[arg-type]
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "async"])
def recorded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded") / "run"
    requests = mixed_requests(40, seed=7)
    with engine(model_folder("demo"), scheduler=OWN, overlap=request.param, **SMALL_POOL) as llm:
        own = run(llm, requests, {1: 1, 5: 3})
    settings = {"journal": str(folder)}
    options = {"overlap": request.param, "settings": settings, **SMALL_POOL}
    with engine(model_folder("demo"), scheduler=RECORDER, **options) as llm:
        answers = run(llm, requests, {1: 1, 5: 3})
        name = type(scheduler_of(llm)).__name__
    assert name == ("AsyncSchedulerRecorder" if request.param else "SchedulerRecorder")
    assert different(requests, answers, own) == []
    return folder


@needs_vllm
def test_every_request_has_an_arrival_passes_tokens_and_an_end(recorded: Path) -> None:
    header, records = read_recording(recorded)
    assert (header.engine, header.page_size, header.pages) == ("vllm", 32, 59)
    found = list(records)
    arrived = [one for one in found if isinstance(one, Arrived)]
    assert len(arrived) == 40
    assert [one.time_us for one in found] == sorted(one.time_us for one in found)
    assert sorted(one.request for one in found if isinstance(one, Ended)) == list(range(40))
    planned = {one.batch for one in found if isinstance(one, Planned) and one.rows}
    collected = [one for one in found if isinstance(one, PassFinished)]
    assert {one.batch for one in collected} <= planned
    assert all(one.started_us < one.time_us for one in collected)
    assert any(one.retracted for one in found if isinstance(one, Planned))


@needs_vllm
def test_other_commands_read_it(recorded: Path, tmp_path: Path) -> None:
    story = command(explain, recorded, "--request", 17)
    assert "first token, TTFT" in story
    assert "computed tokens 0 to" in story or "cached" in story
    assert command(explain, recorded, "--slowest", "ttft", 3).count("first token") == 3
    converted = command(journal, "convert", recorded, "--model", "qwen3-8b", "--gpu", "h100")
    assert "40 requests arrived" in converted
    assert len(read_batch_times(recorded / "batches.jsonl").batches) > 20
    assert command(compare, recorded, shutil.copytree(recorded, tmp_path / "other"))
    assert command(workload, "describe", recorded / "requests.jsonl")
    command(workload, "fit", recorded, "--out", tmp_path / "load.json")
    assert json.loads((tmp_path / "load.json").read_text())
    words = ("--from", recorded, "--model", "demo", "--date", "2026-11-26", "--out", tmp_path / "twin.json")
    assert "measured, simulated with this calibration" in command(calibrate, *words)
    assert json.loads((recorded / "metrics.json").read_text())["requests"]["arrived"] == 40


def test_a_recording_that_breaks_off_is_read_up_to_its_last_whole_record(tmp_path: Path) -> None:
    import msgspec

    lines = [
        RecordingHeader(engine="vllm", page_size=2),
        Arrived(time_us=5, name="cmpl-1-0a1b2c3d", prompt_tokens=3, max_new_tokens=4),
        Planned(time_us=9, batch=0, rows=((0, 0, 3, 0),), running=1),
    ]
    (tmp_path / FILE).write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in lines) + b'["finis')
    story = command(explain, tmp_path, "--request", "cmpl-1")
    assert "was still open when the recording ends" in story
    state = command(explain, tmp_path, "--at", "end")
    assert "1 open request" in state
    assert "launched and without a result: b" in state
    for what, arguments in ((journal, ["verify"]), (journal, ["info"]), (replay, [])):
        refused = CliRunner().invoke(what, [*arguments, str(tmp_path)])
        assert refused.exit_code == 2
        assert "a recording of another engine's scheduler: it has no decisions to replay\nhint: " in refused.output


def test_equal_prefixes_have_equal_ids_in_the_trace(tmp_path: Path) -> None:
    import msgspec

    from lockstep.tools.recording import ReadRecording, trace_rows

    lines = [RecordingHeader(engine="vllm", page_size=256)]
    entries = []
    for number, blocks in enumerate([(7, 8, 9, 10), (7, 8, 9, 11)]):
        entries.append(Arrived(time_us=number, name=str(number), prompt_tokens=1100, max_new_tokens=1, blocks=blocks))
    entries.append(PassFinished(time_us=9, batch=0, started_us=3, tokens=((0, 1), (1, 1))))
    (tmp_path / FILE).write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in [*lines, *entries]))
    first, second = trace_rows(ReadRecording(tmp_path).read())
    assert first["hash_ids"][0] == second["hash_ids"][0]  # blocks 7 and 8: 512 tokens
    assert not set(first["hash_ids"][1:]) & set(second["hash_ids"][1:])
    assert len(first["hash_ids"]) == 3
