"""A recording of another engine's scheduler: its requests in words, the slowest, the state at its end, as a trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lockstep.core.contract.errors import ConfigError
from lockstep.host.recording import FILE, Arrived, Ended, PassFinished, Planned, RecordingHeader
from lockstep.sim.results.batch_times import read_batch_times
from lockstep.sim.results.recorded_engine import ReadRecording
from lockstep.sim.results.text import duration
from lockstep.tools.recording import convert, find, show_end, slowest, state_at_end, story, trace_rows
from lockstep.tools.state_at import DECODE, PREFILL, WAITING, EngineState, OpenRequest, UnfinishedBatch

MS = 1_000
RECORDS = (
    RecordingHeader(engine="vllm", engine_version="0.9", model="m", page_size=2, pages=50),
    Arrived(time_us=1_000 * MS, name="cmpl-1-0a1b2c3d", prompt_tokens=6, max_new_tokens=3),
    Arrived(time_us=1_500 * MS, name="b", prompt_tokens=1, max_new_tokens=9),
    Planned(time_us=2_000 * MS, batch=0, rows=((0, 2, 4, 0),), running=1, waiting=1, kv_usage=0.25),
    PassFinished(time_us=2_400 * MS, batch=0, started_us=2_000 * MS, tokens=((0, 1),)),
    Planned(time_us=2_500 * MS, batch=1, rows=((0, 6, 1, 0), (1, 0, 1, 0)), running=2, waiting=0, kv_usage=0.5),
    PassFinished(time_us=2_600 * MS, batch=1, started_us=2_500 * MS, tokens=((0, 1), (1, 1))),
    Planned(time_us=2_700 * MS, batch=2, rows=((0, 7, 1, 0),), retracted=(1,), running=1, waiting=1, kv_usage=0.5),
    PassFinished(time_us=2_800 * MS, batch=2, started_us=2_700 * MS, tokens=((0, 1),)),
    Ended(time_us=2_900 * MS, request=0, reason="length"),
    Planned(time_us=3_000 * MS, batch=3, rows=((1, 0, 2, 0),), running=1, waiting=3, kv_usage=0.1),
    PassFinished(time_us=3_100 * MS, batch=3, started_us=3_000 * MS, tokens=((1, 1),)),
    Planned(time_us=3_200 * MS, batch=4, rows=((1, 2, 1, 0),), running=1, kv_usage=0.12),
    Arrived(time_us=3_300 * MS, name="b", prompt_tokens=5, max_new_tokens=2),
)


def write(folder: Path, *records: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / FILE).write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in records))
    return folder


@pytest.fixture
def recording(tmp_path: Path) -> ReadRecording:
    """Request 0 has ended; request 1 was preempted and decodes; request 2, also named b, waits."""
    return ReadRecording(write(tmp_path / "run", *RECORDS)).read()


def at(time: str, text: str) -> str:
    return f"  {time:>12}  {text}"


def test_the_story_of_a_request(recording: ReadRecording) -> None:
    assert list(story(recording, recording.requests[0])) == [
        "cmpl-1-0a1b2c3d (r0): 6 prompt tokens, 3 output tokens; recorded from vllm, without reasons",
        at("1.000 s", "arrived; at most 3 output tokens"),
        at("2.000 s", f"was admitted after {duration(1_000 * MS)}, 2 tokens cached; 1 running, 1 waiting, 25% of the "
           "pages in use"),
        at("2.000 s", "computed tokens 2 to 6 in a pass of 1 row"),
        at("", "decoded in 2 passes"),
        at("2.400 s", f"first token, TTFT {duration(1_400 * MS)}"),
        at("2.900 s", "ended: length"),
    ]  # fmt: skip


def test_the_story_of_a_preempted_request(recording: ReadRecording) -> None:
    assert list(story(recording, recording.requests[1])) == [
        "b (r1): 1 prompt token, 2 output tokens; recorded from vllm, without reasons",
        at("1.500 s", "arrived; at most 9 output tokens"),
        at("2.500 s", f"was admitted after {duration(1_000 * MS)}, 0 tokens cached; 2 running, 0 waiting, 50% of the "
           "pages in use"),
        at("2.500 s", "computed tokens 0 to 1 in a pass of 2 rows"),
        at("2.700 s", "was preempted, 3 requests waiting"),
        at("3.000 s", f"was admitted after {duration(300 * MS)}, 0 tokens cached; 1 running, 3 waiting, 10% of the "
           "pages in use"),
        at("3.000 s", "computed tokens 0 to 2 in a pass of 1 row"),
        at("", "decoded in 1 pass"),
        at("2.600 s", f"first token, TTFT {duration(1_100 * MS)}"),
        at("3.300 s", "was still open when the recording ends"),
    ]  # fmt: skip
    assert list(story(recording, recording.requests[2]))[1:] == [
        at("3.300 s", "arrived; at most 2 output tokens"),
        at("3.300 s", "was still open when the recording ends"),
    ]


def test_the_slowest_are_the_slowest_by_each_measure(recording: ReadRecording) -> None:
    """Gaps of request 0 are 200 and 200 ms, that of request 1 is 500 ms."""
    found = {metric: [one.number for one in slowest(recording, metric, 9)] for metric in ("ttft", "e2e", "itl", "tpot")}
    assert found == {"ttft": [0, 1], "e2e": [0], "itl": [1, 0], "tpot": [1, 0]}
    assert [one.number for one in slowest(recording, "itl", 1)] == [1]


def test_the_mean_gap_is_not_the_longest(tmp_path: Path) -> None:
    """Request 0 has gaps of 1 and 9 ms, request 1 of 6 and 6 ms."""
    records = [Arrived(time_us=0, name=str(number), prompt_tokens=1, max_new_tokens=3) for number in (0, 1)]
    times = ((0, 10), (0, 11), (0, 20), (1, 30), (1, 36), (1, 42))
    results = [PassFinished(time_us=t * MS, batch=t, started_us=0, tokens=((number, 1),)) for number, t in times]
    recording = ReadRecording(write(tmp_path, RECORDS[0], *records, *results)).read()
    assert [one.number for one in slowest(recording, "itl", 2)] == [0, 1]
    assert [one.number for one in slowest(recording, "tpot", 2)] == [1, 0]


def test_a_request_is_found_by_its_number_or_its_names(recording: ReadRecording) -> None:
    for name, number in (("0", 0), ("r1", 1), ("cmpl-1-0a1b2c3d", 0), ("cmpl-1", 0), ("2", 2)):
        assert find(recording, name).number == number
    with pytest.raises(ConfigError, match="`--request` b is the label of 2 requests: r1, r2"):
        find(recording, "b")
    for name in ("3", "r3", "other", "-1"):
        with pytest.raises(ConfigError, match=f"must be a request of this recording, got `{name}`; it has 3"):
            find(recording, name)


def test_the_state_at_the_end(recording: ReadRecording) -> None:
    assert state_at_end(recording) == EngineState(
        title="end of the recording: 13 records, the last at 3.300 s",
        step=13,
        time_us=3_300 * MS,
        ending=("recorded from vllm 0.9, whose decisions have no reasons",),
        requests=(
            OpenRequest(1, "b", DECODE, 1_800 * MS, 1, 2, 1, 2, 9, 2, 0, ""),
            OpenRequest(2, "b", WAITING, 0, 5, 0, 0, 0, 2, 0, 0, ""),
        ),
        in_flight=(UnfinishedBatch(4, 3_200 * MS, "b4 with 1 row, 1 token"),),
        last_result="b3, at 3.100 s",
        pages="12% of 50 pages in use",
    )
    with pytest.raises(ConfigError, match="is a recording: it has no steps"):
        show_end(recording.folder, "7", as_json=False, most=3)


def test_the_state_of_a_prompt_in_chunks(tmp_path: Path) -> None:
    """One chunk of four tokens has its result, the next one of two has not; nothing is known before the first plan."""
    first = Planned(time_us=2, batch=0, rows=((0, 0, 4, 0),), kv_usage=0.3)
    result = PassFinished(time_us=3, batch=0, started_us=2, tokens=())
    next_one = Planned(time_us=4, batch=1, rows=((0, 4, 2, 0),), kv_usage=0.4)
    arrived = Arrived(time_us=1, name="a", prompt_tokens=7, max_new_tokens=1)
    header = msgspec.structs.replace(RECORDS[0], page_size=0)
    state = state_at_end(ReadRecording(write(tmp_path, header, arrived, first, result, next_one)).read())
    assert state.requests == (OpenRequest(0, "a", PREFILL, 3, 7, 4, 2, 0, 1, 0, 0, ""),)
    assert [one.text for one in state.in_flight] == ["b1 with 1 row, 2 tokens"]
    assert state.pages == "40% of 50 pages in use"
    empty = state_at_end(ReadRecording(write(tmp_path, RECORDS[0], arrived)).read())
    assert (empty.last_result, empty.pages, empty.in_flight) == ("", "0% of 50 pages in use", ())
    assert empty.requests == (OpenRequest(0, "a", WAITING, 0, 7, 0, 0, 0, 1, 0, 0, ""),)


def test_the_answered_requests_are_a_trace(recording: ReadRecording) -> None:
    assert list(trace_rows(recording)) == [
        {"timestamp": 1_000, "input_length": 6, "output_length": 3, "hash_ids": [0]},
        {"timestamp": 1_500, "input_length": 1, "output_length": 2, "hash_ids": [1]},
    ]


@pytest.mark.parametrize(
    ("page", "pages", "shared"),
    [
        (256, 4, 2),  # two blocks of the trace are four pages
        (256, 3, 1),  # the hash of the second block is not known
        (512, 2, 2),
        (512, 0, 0),
        (384, 4, 0),  # no block of the trace ends where a page ends
        (0, 0, 0),
    ],
)
def test_equal_prefixes_have_equal_ids_where_their_pages_are_known(
    page: int, pages: int, shared: int, tmp_path: Path
) -> None:
    """Two prompts of 1,100 tokens with equal pages are three blocks of 512; the last one is not whole."""
    header = msgspec.structs.replace(RECORDS[0], page_size=page)
    arrived = [
        Arrived(time_us=n, name=str(n), prompt_tokens=1_100, max_new_tokens=1, blocks=tuple(range(pages)))
        for n in (0, 1)
    ]
    result = PassFinished(time_us=9, batch=0, started_us=3, tokens=((0, 1), (1, 1)))
    first, second = trace_rows(ReadRecording(write(tmp_path, header, *arrived, result)).read())
    assert first["hash_ids"] == [0, 1, 2]
    assert second["hash_ids"] == [*range(shared), *range(3, 6 - shared)]


def test_a_recording_is_converted_for_other_commands(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", *RECORDS)
    summary = convert(folder)
    assert not (folder / "batches.jsonl").exists()
    assert (summary["requests"]["arrived"], summary["requests"]["completed"]) == (3, 1)
    stored = json.loads((folder / "metrics.json").read_text())
    assert stored["requests"] == json.loads(json.dumps(summary["requests"]))
    about = stored["about"]
    assert about["model"] == "m"
    assert about["workload"] == {"name": "recorded from vllm 0.9"}
    assert about["measured"] == msgspec.structs.asdict(RECORDS[0])
    assert about["command"] == f"lockstep journal convert {folder}"
    rows = [json.loads(line) for line in (folder / "requests.jsonl").read_text().splitlines()]
    assert rows == list(trace_rows(ReadRecording(folder).read()))
    assert (folder / "requests.csv").read_text().count("\n") == 4
    convert(folder, model="qwen3-8b")
    assert not (folder / "batches.jsonl").exists()
    convert(folder, model="qwen3-8b", gpu="h100", tp=2)
    times = read_batch_times(folder / "batches.jsonl")
    assert times.measured is not None
    assert (times.measured.model, times.measured.gpu, times.measured.tp) == ("qwen3-8b", "h100", 2)
    assert times.measured.plans == "run"
    assert len(times.batches) == 4
