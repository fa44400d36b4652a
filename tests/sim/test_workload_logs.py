"""Request logs and exports as they are: what is understood of each kind of file, and the error for each bad one.

FILES is the table of docs/workloads.md: every file is written by hand as other tools export it.
"""

from __future__ import annotations

import io
import json
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl
import pytest
from click.testing import CliRunner

from lockstep.sim.cli.simulate import simulate
from lockstep.sim.cli.workload import workload as workload_command
from lockstep.sim.workload import export
from lockstep.sim.workload.log_fields import parse_columns, time_us, unit_of
from lockstep.sim.workload.logs import LogReading
from lockstep.sim.workload.workload import SourceReading, Workload, WorkloadError, open_workload


class Understood(NamedTuple):
    """What a file must be read as."""

    content: str | bytes
    arrivals_s: tuple[float, ...]
    lengths: tuple[tuple[int, int], ...]  # prompt and output tokens
    options: dict[str, Any] = {}  # noqa: RUF012 - read only
    rate: float | None = None  # for files without times
    sessions: int = 0  # turns that follow an earlier one
    shares: bool = False  # whether prompts are known to begin alike
    note: str = ""


def lines(*rows: Any) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def parquet() -> bytes:
    data = io.BytesIO()
    stamps = [datetime(2026, 11, 26, 10, 0, second, tzinfo=UTC) for second in (0, 2)]
    pl.DataFrame({"created_at": stamps, "prompt_tokens": [9, 8], "completion_tokens": [3, 2]}).write_parquet(data)
    return data.getvalue()


USAGE = {"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12}
SYSTEM = "You are a helpful assistant of the support team. " * 8
CHAT = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Where is my order?"}]
OTHER = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "How do I pay?"}]
SPAN = {
    "name": "chat",
    "startTimeUnixNano": "1764151200000000000",
    "endTimeUnixNano": "1764151201500000000",
    "attributes": [
        {"key": "gen_ai.usage.input_tokens", "value": {"intValue": "9"}},
        {"key": "gen_ai.usage.output_tokens", "value": {"intValue": "3"}},
        {"key": "gen_ai.conversation.id", "value": {"stringValue": "c1"}},
    ],
}
LATER = {**SPAN, "startTimeUnixNano": "1764151205000000000", "endTimeUnixNano": "1764151206000000000"}
TWO = ((9, 3), (8, 2))

FILES: dict[str, Understood] = {
    "usage of OpenAI responses": Understood(
        lines({"id": "a", "created": 1764151200, "usage": USAGE}, {"id": "b", "created": 1764151202, "usage": USAGE}),
        (0, 2), ((9, 3), (9, 3)), note="times are numbers, read as s",
    ),
    "CSV of counts": Understood("ts,prompt_tokens,completion_tokens\n0,9,3\n2.5,8,2\n", (0, 2.5), TWO),
    "JSON lines of counts": Understood(
        lines(
            {"timestamp": 1764151200123, "prompt_tokens": 9, "completion_tokens": 3},
            {"timestamp": 1764151202123, "prompt_tokens": 8, "completion_tokens": 2},
        ),
        (0, 2), TWO, note="times are numbers, read as ms",
    ),
    "plain lengths with ISO times": Understood(
        "timestamp,input_tokens,output_tokens\n2026-11-26T10:00:00Z,9,3\n2026-11-26T10:00:02.5Z,8,2\n", (0, 2.5), TWO
    ),
    "plain JSON lines with a timestamp": Understood(
        lines(
            {"timestamp": "2026-11-26 10:00:00", "input_tokens": 9, "output_tokens": 3},
            {"timestamp": "2026-11-26 10:00:02", "input_tokens": 8, "output_tokens": 2},
        ),
        (0, 2), TWO,
    ),
    "semicolons": Understood(
        "Date;Input Tokens;Output Tokens\n26.11.2026 10:00:00;9;3\n26.11.2026 10:00:02;8;2\n", (0, 2), TWO,
    ),
    "tabs": Understood("time\tinput_tokens\toutput_tokens\n0\t9\t3\n2\t8\t2\n", (0, 2), TWO),
    "ShareGPT": Understood(
        json.dumps([
            {"id": "x", "conversations": [
                {"from": "human", "value": "Hello there, who are you?"}, {"from": "gpt", "value": "A machine."},
                {"from": "human", "value": "Oh."}, {"from": "gpt", "value": "Yes."},
            ]},
            {"id": "y", "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello!"}]},
        ]),
        (), ((8, 2), (15, 1), (2, 2)), {"chars_per_token": 4.0}, rate=1.0, sessions=1,
        note="conversations are sessions; each turn follows the answer before it at once",
    ),
    "chat messages": Understood(
        lines(
            {"created_at": "2026-11-26T10:00:00Z", "messages": CHAT, "response": "Here."},
            {"created_at": "2026-11-26T10:00:02Z", "messages": OTHER, "response": "By card."},
        ),
        (0, 2), ((106, 1), (105, 2)), {"chars_per_token": 4.0}, shares=True, note="4 characters per token",
    ),
    "batch API, requests": Understood(
        lines(
            {"custom_id": "1", "url": "/v1/chat/completions", "body": {"messages": CHAT, "max_tokens": 5}},
            {"custom_id": "2", "url": "/v1/chat/completions", "body": {"messages": OTHER, "max_tokens": 6}},
        ),
        (0, 0), ((106, 5), (105, 6)), {"chars_per_token": 4.0}, rate=float("inf"), shares=True,
        note="2 answers have the length of their limit",
    ),
    "batch API, results": Understood(
        lines(
            {"custom_id": "1", "response": {"status_code": 200, "body": {"created": 1764151200, "usage": USAGE}}},
            {"custom_id": "2", "response": {"status_code": 200, "body": {"created": 1764151201, "usage": USAGE}}},
        ),
        (0, 1), ((9, 3), (9, 3)),
    ),
    "nginx access log": Understood(
        '10.0.0.1 - - [26/Nov/2026:10:00:00 +0000] "POST /v1/chat/completions HTTP/1.1" 200 480 "-" "curl"\n'
        '10.0.0.2 - - [26/Nov/2026:10:00:02 +0000] "POST /v1/chat/completions HTTP/1.1" 200 512 "-" "curl"\n',
        (0, 2), ((700, 120), (700, 120)), {"columns": "input=700,output=120"},
    ),
    "gateway access log with counts": Understood(
        '10.0.0.1 - k [26/Nov/2026:10:00:00 +0000] "POST /v1/x HTTP/1.1" 200 480 prompt_tokens=9 completion_tokens=3\n'
        '10.0.0.1 - k [26/Nov/2026:10:00:02 +0000] "POST /v1/x HTTP/1.1" 200 480 prompt_tokens=8 completion_tokens=2\n',
        (0, 2), TWO,
    ),
    "gateway log in JSON": Understood(
        lines(
            {"@timestamp": "2026-11-26T10:00:00Z", "ms": 900, "llm": {"prompt_tokens": 9, "completion_tokens": 3}},
            {"@timestamp": "2026-11-26T10:00:02Z", "ms": 800, "llm": {"prompt_tokens": 8, "completion_tokens": 2}},
        ),
        (0, 2), TWO,
    ),
    "request log of vLLM": Understood(
        "INFO 11-26 10:00:00 [logger.py:43] Received request cmpl-1: prompt: 'Hi', params: SamplingParams(n=1, "
        "max_tokens=16), prompt_token_ids: [1, 2, 3, 4], prompt_embeds shape: None, lora_request: None.\n"
        "INFO 11-26 10:00:01 [engine.py:317] Added request cmpl-1.\n"
        "INFO 11-26 10:00:02 [logger.py:43] Received request cmpl-2: prompt: 'Ho', params: SamplingParams(n=1, "
        "max_tokens=8), prompt_token_ids: [1, 2, 9], prompt_embeds shape: None, lora_request: None.\n",
        (0, 2), ((4, 16), (3, 8)), shares=True, note="length of their limit",
    ),
    "request log of SGLang": Understood(
        "[2026-11-26 10:00:00] Receive: obj=GenerateReqInput(rid='a1', text='Hi', sampling_params={})\n"
        "[2026-11-26 10:00:01] Receive: obj=GenerateReqInput(rid='b2', text='Ho', sampling_params={})\n"
        "[2026-11-26 10:00:03] Finish: obj=GenerateReqInput(rid='b2', text='Ho'), out={'meta_info': {'id': 'b2', "
        "'prompt_tokens': 8, 'completion_tokens': 2}}\n"
        "[2026-11-26 10:00:04] Finish: obj=GenerateReqInput(rid='a1', text='Hi'), out={'meta_info': {'id': 'a1', "
        "'prompt_tokens': 9, 'completion_tokens': 3}}\n",
        (0, 1), TWO, note="sorted by arrival",
    ),
    "LiteLLM spend logs": Understood(
        lines(
            {"request_id": "1", "startTime": "2026-11-26T10:00:00.000Z", "endTime": "2026-11-26T10:00:01.500Z",
             "prompt_tokens": 9, "completion_tokens": 3, "team_id": "t1", "session_id": "s1"},
            {"request_id": "2", "startTime": "2026-11-26T10:00:05.000Z", "endTime": "2026-11-26T10:00:06.000Z",
             "prompt_tokens": 15, "completion_tokens": 2, "team_id": "t1", "session_id": "s1"},
        ),
        (0,), ((9, 3), (15, 2)), sessions=1, note="the time between an answer and the next turn is kept",
    ),
    "Langfuse observations": Understood(
        json.dumps({"data": [
            {"id": "o1", "type": "GENERATION", "startTime": "2026-11-26T10:00:00Z", "usage": {"input": 9, "output": 3}},
            {"id": "o2", "type": "GENERATION", "startTime": "2026-11-26T10:00:02Z", "usage": {"input": 8, "output": 2}},
        ]}),
        (0, 2), TWO,
    ),
    "OpenTelemetry GenAI spans": Understood(
        json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [SPAN, LATER, {"name": "db", "attributes": []}]}]}]}),
        (0,), ((9, 3), (9, 3)), sessions=1,
    ),
    "BurstGPT": Understood(
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,9,3,12,Conversation log\n"
        "45,GPT-4,8,2,10,API log\n",
        (0, 40), TWO,
    ),
    "Parquet": Understood(parquet(), (0, 2), TWO),
    "own names": Understood(
        "when,n_in,n_out\n1500,9,3\n3500,8,2\n", (0, 2), TWO, {"columns": "arrival=when:ms,input=n_in,output=n_out"}
    ),
    "texts with counts": Understood(
        lines(
            {"ts": 0, "prompt": SYSTEM + "Hello", "prompt_tokens": 100, "completion_tokens": 3},
            {"ts": 1, "prompt": SYSTEM + "Bye", "prompt_tokens": 100, "completion_tokens": 2},
        ),
        (0, 1), ((100, 3), (100, 2)), shares=True,
    ),
    "token ids": Understood(
        lines(
            {"ts": 0, "prompt_token_ids": [5, 6, 7], "completion_tokens": 3},
            {"ts": 1, "prompt_token_ids": [5, 6, 9, 9], "completion_tokens": 2},
        ),
        (0, 1), ((3, 3), (4, 2)), shares=True,
    ),
    "Bedrock invocation logs": Understood(
        lines(
            {"timestamp": "2026-11-26T10:00:00Z", "input": {"inputTokenCount": 9}, "output": {"outputTokenCount": 3}},
            {"timestamp": "2026-11-26T10:00:02Z", "input": {"inputTokenCount": 8}, "output": {"outputTokenCount": 2}},
        ),
        (0, 2), TWO,
    ),
    "an agent's transcript": Understood(
        lines(
            {"type": "user", "timestamp": "2026-11-26T10:00:00Z", "message": {"content": "Mend it."}},
            {"type": "assistant", "timestamp": "2026-11-26T10:00:01Z", "message": {"content": [], "usage": {
                "input_tokens": 4, "cache_read_input_tokens": 1000, "cache_creation_input_tokens": 20,
                "output_tokens": 3}}},
        ),
        (0,), ((1024, 3),), note="1 records without a prompt or its length are no requests, and are left out",
    ),
    "cached tokens beside lengths": Understood(
        lines({"input_tokens": 4, "cache_read_input_tokens": 1000, "output_tokens": 3}), (), ((1004, 3),), rate=1.0,
        note="a prompt is input_tokens and the cached tokens of cache_read_input_tokens",
    ),
    "log of a pod": Understood(
        '2026-11-26T10:00:00.5Z stdout F {"level": "info", "usage": {"prompt_tokens": 9, "completion_tokens": 3}}\n'
        "2026-11-26T10:00:01.5Z stderr F warning: a retry\n"
        '2026-11-26T10:00:02.5Z stdout F {"level": "info", "usage": {"prompt_tokens": 8, "completion_tokens": 2}}\n',
        (0, 2), TWO, note="JSON in lines of a log: 2 records, read as arrival=log_time",
    ),
    "log file of a container": Understood(
        lines(
            {"log": '{"prompt_tokens": 9, "completion_tokens": 3}\n', "stream": "o", "time": "2026-11-26T10:00:00Z"},
            {"log": "ready\n", "stream": "stdout", "time": "2026-11-26T10:00:01Z"},
            {"log": '{"prompt_tokens": 8, "completion_tokens": 2}\n', "stream": "o", "time": "2026-11-26T10:00:02Z"},
        ),
        (0, 2), TWO,
    ),
    "table of psql": Understood(
        "     created_at      | prompt_tokens | completion_tokens\n---------------------+---------------+------------\n"
        " 2026-11-26 10:00:00 |             9 |                 3\n"
        " 2026-11-26 10:00:02 |             8 |                 2\n(2 rows)\n",
        (0, 2), TWO,
    ),
    "table of Markdown": Understood(
        "| time | prompt_tokens | completion_tokens |\n|---|---:|---:|\n| 0 | 9 | 3 |\n| 2 | 8 | 2 |\n", (0, 2), TWO
    ),
    "spreadsheet with AM and thousands": Understood(
        "Date\tPrompt Tokens\tCompletion Tokens\n11/26/2026 10:00:00 AM\t2,432\t3\n11/26/2026 1:00:00 PM\t8\t2\n",
        (0, 10_800), ((2432, 3), (8, 2)),
    ),
    "access log of Ollama": Understood(
        '[GIN] 2026/11/26 - 10:00:00 | 200 |  4.76s |   127.0.0.1 | POST     "/api/chat"\n'
        '[GIN] 2026/11/26 - 10:00:02 | 200 |  3.24s |   127.0.0.1 | POST     "/api/chat"\n',
        (0, 2), ((700, 120), (700, 120)), {"columns": "input=700,output=120"},
    ),
    "a project's name as session": Understood(
        "start_time,end_time,session_id,prompt_tokens,completion_tokens\n0,9,chatbot,9,3\n2,5,chatbot,8,2\n",
        (0, 2), TWO,
        note="1 requests begin before the answer before them with the same session_id has ended",
    ),
    "one response of Anthropic": Understood(
        lines({"content": [{"type": "text", "text": "Hi"}], "usage": {"input_tokens": 9, "output_tokens": 3}}),
        (), ((9, 3),), rate=1.0,
    ),
    "requests by their ids": Understood(
        json.dumps({"a": {"ts": 0, **USAGE}, "b": {"ts": 2, **USAGE}}), (0, 2), ((9, 3), (9, 3)),
    ),
    "a list of any name": Understood(json.dumps({"meta": {"v": 1}, "calls": [{"ts": 0, **USAGE}]}), (0,), ((9, 3),)),
    "UTF-16 of a spreadsheet": Understood(
        "time\tinput_tokens\toutput_tokens\n0\t9\t3\n2\t8\t2\n".encode("utf-16"), (0, 2), TWO
    ),
    "code page of a spreadsheet": Understood(
        "Zeit;Länge;Ausgabe\n26.11.2026 10:00;9;3\n26.11.2026 10:01;8;2\n".encode("cp1252"), (0, 60), TWO,
        {"columns": "arrival=Zeit,input=Länge,output=Ausgabe"},
    ),
    "a name like that of a time": Understood(
        "candidate,input_tokens,output_tokens\n7,9,3\n7,8,2\n", (), TWO, {"columns": "arrival=none"}, rate=1.0
    ),
    "an object over several lines": Understood(
        json.dumps({"requests": [{"ts": 0, "prompt_tokens": 9, "completion_tokens": 3}]}, indent=2), (0,), ((9, 3),)
    ),
}  # fmt: skip


def opened(path: Path, content: str | bytes, rate: float | None = None, **options: Any) -> Workload:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return open_workload(str(path), seed=7, rate=rate, reading=SourceReading(log=LogReading(**options)))


@pytest.mark.parametrize("kind", FILES)
def test_a_file_as_other_tools_write_it_is_understood(tmp_path: Path, kind: str) -> None:
    wanted = FILES[kind]
    assert wanted.content.count(b"\n" if isinstance(wanted.content, bytes) else "\n") < 20  # type: ignore[arg-type]
    began_s = time.perf_counter()
    found = opened(tmp_path / "file", wanted.content, wanted.rate, **wanted.options)
    took_s = time.perf_counter() - began_s
    turns = found.turns
    assert tuple(zip(turns.prompt_tokens.tolist(), turns.output_tokens.tolist(), strict=True)) == wanted.lengths
    if wanted.rate is None:
        assert [round(us / 1e6, 3) for us in turns.arrival_us[turns.by_clock_rows].tolist()] == list(wanted.arrivals_s)
    assert int((turns.after >= 0).sum()) == wanted.sessions
    assert (found.summary().sharing_ratio > 0) == wanted.shares
    notes = "\n".join(found.notes)
    assert found.format != "log" or "read as " in notes
    assert wanted.note in notes
    assert wanted.rate is not None or "Poisson" not in notes
    print(f"{kind}: {took_s:.3f} s; {notes}")


BAD: dict[str, tuple[str | bytes, str]] = {
    "an unusual name of the time": (
        lines({"log_stamp": 3, "prompt_tokens": 9, "completion_tokens": 3}),
        "line 1, column `log_stamp`: may be the time of arrival, and has an unusual name\nhint: --columns arrival=",
    ),
    "no times at all": (
        lines({"prompt_tokens": 9, "completion_tokens": 3}),
        "it has lengths but no arrival times, and no `rate` was given\nhint: give --rate",
    ),
    "a time that is none": (
        "ts,prompt_tokens,completion_tokens\n0,9,3\nsoon,9,3\n",
        "line 3, column `ts`: expected a number or a date and time such as 2026-11-26T10:00:00Z, got `soon`",
    ),
    "a count that is none": (
        lines({"ts": 0, "usage": USAGE}, {"ts": 1, "usage": {"prompt_tokens": "many", "completion_tokens": 3}}),
        "line 2, column `usage.prompt_tokens`: expected a whole number of tokens up to 16,777,216, got `many`",
    ),
    "a negative count": (
        "ts,prompt_tokens,completion_tokens\n0,-9,3\n", "line 2, column `prompt_tokens`: expected a whole number"
    ),
    "text without counts": (
        lines({"ts": 0, "messages": CHAT, "completion_tokens": 3}),
        "line 1, column `messages`: is text, and no column has the number of its tokens\nhint: --tokenizer FOLDER",
    ),
    "numbers in a column of texts": (
        "ts,input,output\n0,9,3\n",
        "column `input`: has `9`, but a column of this name is text, and no column has the number of its tokens\nhint:",
    ),
    "no lengths": ("ts,model\n0,qwen\n", "no column has the tokens of prompts, nor their text\nhint: --columns input"),
    "no lengths of answers": (
        "ts,prompt_tokens\n0,9\n", "no column has the tokens of answers, nor their text\nhint: --columns output=NAME"
    ),
    "an access log without lengths": (
        '10.0.0.1 - - [26/Nov/2026:10:00:00 +0000] "POST /v1/x HTTP/1.1" 200 480 "-" "curl"\n',
        "an access log: no column has the tokens of prompts",
    ),
    "totals by the hour": (
        "start_time,num_model_requests,input_tokens,output_tokens\n2026-11-26T10:00:00Z,100,120000,30000\n",
        "generate some of the mean lengths: --workload gen:rate=R,input=exponential:1200,output=exponential:300",
    ),
    "totals of OpenAI's usage API": (
        json.dumps({"object": "page", "data": [{"start_time": 1764151200, "results": [
            {"input_tokens": 120000, "output_tokens": 30000, "num_model_requests": 100}]}]}),
        "column `num_model_requests`: has the number of requests of each row, 100 in all: rows are totals",
    ),
    "names in another language": (
        "Zeit;Eingabe;Ausgabe\n26.11.2026 10:00:00;9;3\n",
        "may be the time of arrival, and has an unusual name\nhint: --columns arrival=Zeit,input=NAME,output=NAME",
    ),
    "an epoch under an unusual name": (
        lines({"timing": {"begun": 1764151200.5}, "prompt_tokens": 9, "completion_tokens": 3}),
        "line 1, column `timing.begun`: may be the time of arrival, and has an unusual name",
    ),
    "a spreadsheet": (b"PK\x03\x04 and more", "is a zip archive or a spreadsheet, which is not read\nhint: unpack it"),
    "a log with bars": (
        "slot launch_slot_: id  0 | task 0 | processing task\nprompt eval time = 244.28 ms / 788 tokens\n",
        "line 1: unknown format, begins with `slot launch_slot_",
    ),
    "a row with a value less": (
        "ts;prompt_tokens;completion_tokens\n0;9;3\n1;9\n", "line 3, column `completion_tokens`: expected 3 values"
    ),
    "a line that is cut off": (
        '{"ts": 0, "prompt_tokens": 9, "completion_tokens": 3}\n{"ts": 1, "prompt_to', "line 2: expected a JSON object"
    ),
    "an array that is cut off": ('[{"ts": 0, "prompt_tokens": 9},\n {"ts": 1,', "line 2: not valid JSON"),
    "a damaged Parquet file": (b"PAR1 and nothing more", "not readable as Parquet"),
    "prose": ("Dear all\nthis is no log\n", "line 1: unknown format, begins with `Dear all`"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_file_is_one_error_with_its_place_and_what_would_be_right(tmp_path: Path, kind: str) -> None:
    content, message = BAD[kind]
    with pytest.raises(WorkloadError) as caught:
        opened(tmp_path / "file", content)
    assert message in str(caught.value)
    assert str(tmp_path / "file") in str(caught.value)
    assert "\nhint: " in str(caught.value)


def test_bad_rows_are_left_out_on_request(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("ts,prompt_tokens,completion_tokens\n0,9,3\nsoon,9,3\n2,8,2\n")
    found = open_workload(str(path), seed=7, reading=SourceReading(skip_bad_rows=True))
    assert len(found.turns) == 2
    assert found.skipped.count == 1
    assert "line 3, column `ts`" in found.skipped.examples[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("arrival", "has `arrival`, expected ROLE=COLUMN"),
        ("when=ts", "roles are arrival,"),
        ("input=a,input=b", "input=b"),
    ],
)
def test_columns_that_cannot_be_read_are_refused(text: str, message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        parse_columns(text)


def test_a_named_column_that_is_missing_is_refused_with_the_columns_there_are(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match=r"there is no column `n_in`, given for input\nhint: columns are ts, x"):
        opened(tmp_path / "f", "ts,x\n0,1\n", columns="input=n_in")


@pytest.mark.parametrize(
    ("column", "value", "unit"),
    [("ts", 12.5, "s"), ("ts", 1764151200, "s"), ("ts", 1764151200123, "ms"), ("ts", 1764151200123456, "us"),
     ("startTimeUnixNano", "1764151200123456789", "ns"), ("arrival_ms", 5, "ms")],
)  # fmt: skip
def test_the_unit_of_a_time_follows_from_its_size_or_its_name(column: str, value: Any, unit: str) -> None:
    assert unit_of(column, [value]) == unit


def test_times_of_any_notation_are_the_same_moment() -> None:
    texts = [
        "2026-11-26T10:00:00Z",
        "2026-11-26 10:00:00,000",
        "26/Nov/2026:10:00:00 +0000",
        "2026-11-26T11:00:00+01:00",
    ]
    assert len({time_us(text, "s") for text in texts}) == 1
    assert time_us("yesterday", "s") is None
    spreadsheet = ["26.11.2026 10:00", "11/26/2026 10:00", "11/26/2026 10:00 AM", "11/26/2026, 10:00:00 AM"]
    assert {time_us(text, "s") for text in spreadsheet} == {time_us(texts[0], "s")}


def test_a_tokenizer_counts_texts_and_finds_shared_prompts(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "c": 2, "[UNK]": 3}, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    rows = lines({"ts": 0, "prompt": "a b c", "output": "b"}, {"ts": 1, "prompt": "a b a a", "output": "b c"})
    found = opened(tmp_path / "log", rows, tokenizer=str(tmp_path))
    assert found.turns.prompt_tokens.tolist() == [3, 4]
    assert found.turns.output_tokens.tolist() == [1, 2]
    assert found.summary().sharing_ratio == pytest.approx(2 / 7)


# --------------------------------------------------------------------------------------------------------------- import


@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz", "jsonl.zst"])
@pytest.mark.parametrize("kind", ["chat messages", "LiteLLM spend logs", "token ids"])
def test_an_imported_file_is_the_same_workload_without_its_texts(tmp_path: Path, kind: str, ending: str) -> None:
    wanted = FILES[kind]
    before = opened(tmp_path / "log", wanted.content, wanted.rate, **wanted.options)
    out = tmp_path / f"out.{ending}"
    export.write_workload(out, before.turns)
    after = open_workload(str(out), seed=7)
    assert after.format == "imported"
    for column in ("arrival_us", "prompt_tokens", "output_tokens", "after", "think_us"):
        assert getattr(after.turns, column).tolist() == getattr(before.turns, column).tolist(), column
    assert after.turns.tenants == before.turns.tenants
    assert after.summary().sharing_ratio == before.summary().sharing_ratio
    assert b"order" not in out.read_bytes()


def test_import_prints_what_was_understood_and_leaves_nothing_behind_after_ctrl_c(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, out = tmp_path / "log.jsonl", tmp_path / "out.jsonl.gz"
    log.write_text(str(FILES["usage of OpenAI responses"].content))
    done = CliRunner().invoke(workload_command, ["import", str(log), "-o", str(out)])
    assert done.exit_code == 0, done.output
    assert "JSON lines: 2 records, read as arrival=created" in done.output
    again = CliRunner().invoke(workload_command, ["import", str(log), "-o", str(out)])
    assert "exists\nhint: choose another --out" in again.output
    out.unlink()

    def interrupted(path: Path, turns: Any) -> None:
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(export, "write_workload", interrupted)
    CliRunner().invoke(workload_command, ["import", str(log), "-o", str(out)])
    assert [path.name for path in tmp_path.iterdir()] == ["log.jsonl"]


def test_simulate_takes_a_log_directly(tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    log.write_text("when,n_in,n_out\n1500,90,3\n3500,80,2\n")
    arguments = ["--model", "qwen3-8b", "--gpu", "h100", "--no-intervals", "--json", "--workload", str(log)]
    done = CliRunner().invoke(simulate, [*arguments, "--columns", "arrival=when:ms,input=n_in,output=n_out"])
    assert done.exit_code == 0, done.output
    metrics = json.loads(done.stdout)
    assert metrics["throughput"]["prompt_tokens"] == 170
    assert "--columns arrival=when:ms,input=n_in,output=n_out" in metrics["about"]["command"]
