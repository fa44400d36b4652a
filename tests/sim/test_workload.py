"""Traces become turns: identity of tokens, counts on real data, and every kind of invalid file."""

from __future__ import annotations

import gzip
import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from lockstep.sim.workload.token_runs import TOKEN_IDS, FreshTokens, append_run, prompt_ids
from lockstep.sim.workload.workload import SourceReading, Workload, WorkloadError, open_workload

MOONCAKE = "traces/mooncake/conversation_trace.jsonl.gz"
AZURE = "traces/azure/AzureLLMInferenceTrace_code.csv.gz"

AZURE_CSV = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
2023-11-16 18:17:04.0319600,110,27
"""
VIDUR_CSV = """\
arrived_at,num_prefill_tokens,num_decode_tokens
0.5,374,44
1.25,396,109
"""


def mooncake_line(timestamp: object, input_length: object, output_length: object, hash_ids: object) -> str:
    columns = ("timestamp", "input_length", "output_length", "hash_ids")
    return json.dumps(dict(zip(columns, (timestamp, input_length, output_length, hash_ids), strict=True))) + "\n"


MOONCAKE_JSONL = (
    mooncake_line(0, 1100, 5, [0, 1, 2])
    + mooncake_line(0, 1500, 6, [0, 1, 3])
    + mooncake_line(3000, 1600, 7, [0, 7, 8, 9])
)


def write(folder: Path, text: str | bytes, name: str = "trace.csv") -> str:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return str(path)


LENIENT = SourceReading(skip_bad_rows=True)


def open_text(folder: Path, text: str | bytes, **options: object) -> Workload:
    return open_workload(write(folder, text), seed=1, **options)  # type: ignore[arg-type]  # options vary by test


def refusal(folder: Path, text: str | bytes, **options: object) -> str:
    with pytest.raises(WorkloadError) as caught:
        open_text(folder, text, **options)
    return str(caught.value)


# --- formats


def test_azure_rows_become_turns_counted_from_the_first_arrival(tmp_path: Path) -> None:
    workload = open_text(tmp_path, AZURE_CSV)
    assert workload.format == "azure"
    assert [turn.arrival_us for turn in workload.turns] == [0, 52_000, 52_000]
    assert [(turn.prompt_tokens, turn.output_tokens) for turn in workload.turns] == [(4808, 10), (3180, 8), (110, 27)]
    assert [turn.label for turn in workload.turns] == ["line2", "line3", "line4"]


def test_azure_times_may_carry_a_zone(tmp_path: Path) -> None:
    text = "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.009930+00:00,1,1\n2024-05-10 00:00:01Z,1,1\n"
    assert open_text(tmp_path, text).turns[1].arrival_us == 990_070


def test_vidur_rows_become_turns(tmp_path: Path) -> None:
    workload = open_text(tmp_path, VIDUR_CSV)
    assert workload.format == "vidur"
    assert [(turn.arrival_us, turn.prompt_tokens) for turn in workload.turns] == [(0, 374), (750_000, 396)]


def test_columns_may_stand_in_any_order_among_others(tmp_path: Path) -> None:
    text = '\ufeffid, num_decode_tokens ,arrived_at,num_prefill_tokens\r\n"a,b",44,0,"374.0"\r\n\r\n'
    turn = open_text(tmp_path, text).turns[0]
    assert (turn.prompt_tokens, turn.output_tokens) == (374, 44)


@pytest.mark.parametrize("compress", [bytes, gzip.compress, zstandard.ZstdCompressor().compress])
def test_compression_is_detected_by_content_and_changes_nothing(tmp_path: Path, compress: object) -> None:
    plain = open_text(tmp_path, MOONCAKE_JSONL)
    assert open_text(tmp_path, compress(MOONCAKE_JSONL.encode())).digest == plain.digest  # type: ignore[operator]
    assert plain.format == "mooncake"


def test_zstandard_files_of_several_frames_are_read_whole(tmp_path: Path) -> None:
    head, tail = AZURE_CSV[:60].encode(), AZURE_CSV[60:].encode()
    compress = zstandard.ZstdCompressor().compress
    assert len(open_text(tmp_path, compress(head) + compress(tail)).turns) == 3


# --- identity of tokens


def test_rows_that_share_hash_ids_share_exactly_those_tokens(tmp_path: Path) -> None:
    first, second, third = open_text(tmp_path, MOONCAKE_JSONL).turns
    assert first.prompt == (0, 1100)  # ids 0, 1 and 76 tokens of 2, merged
    assert second.prompt == (0, 1024, 3 * 512, 1500 - 1024)
    assert third.prompt == (0, 512, 7 * 512, 1600 - 512)
    ids = [set(prompt_ids(turn.prompt).tolist()) for turn in (first, second, third)]
    assert ids[0] & ids[1] == set(range(1024))
    assert ids[0] & ids[2] == ids[1] & ids[2] == set(range(512))


def test_unrelated_content_never_collides(tmp_path: Path) -> None:
    for text in (AZURE_CSV, VIDUR_CSV):
        turns = open_text(tmp_path, text).turns
        contents = [turn.prompt for turn in turns] + [(turn.output_first_token, turn.output_tokens) for turn in turns]
        ids = np.concatenate([prompt_ids(runs) for runs in contents])
        assert len(np.unique(ids)) == len(ids)
    turns = open_text(tmp_path, MOONCAKE_JSONL).turns
    assert min(turn.output_first_token for turn in turns) >= 10 * 512


def test_large_hash_ids_are_numbered_anew_with_sharing_kept(tmp_path: Path) -> None:
    text = mooncake_line(0, 1024, 1, [2**60, 5]) + mooncake_line(0, 1024, 1, [2**60, 2**61])
    workload = open_text(tmp_path, text)
    assert [turn.prompt for turn in workload.turns] == [(0, 1024), (0, 512, 1024, 512)]
    assert "numbered anew" in workload.notes[0]


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 5)), min_size=1, max_size=60))
def test_runs_merge_where_they_touch_and_spell_the_same_tokens(pieces: list[tuple[int, int]]) -> None:
    runs: list[int] = []
    for first_token, count in pieces:
        append_run(runs, first_token, count)
    spelled = [first_token + i for first_token, count in pieces for i in range(count)]
    ids = prompt_ids(runs)
    assert ids.dtype == np.int32
    assert ids.tolist() == spelled
    firsts, counts = runs[::2], runs[1::2]
    assert all(first + count != after for first, count, after in zip(firsts, counts, firsts[1:], strict=False))


def test_the_highest_token_id_still_fits_int32() -> None:
    assert prompt_ids((TOKEN_IDS - 2, 2)).tolist() == [2**31 - 2, 2**31 - 1]
    assert prompt_ids((TOKEN_IDS - 2, 2) * 20).tolist() == [2**31 - 2, 2**31 - 1] * 20


def test_fresh_tokens_begin_again_behind_shared_content_only_when_exhausted() -> None:
    fresh = FreshTokens(TOKEN_IDS - 10)
    assert [fresh.take(4), fresh.take(6)] == [TOKEN_IDS - 10, TOKEN_IDS - 6]
    assert fresh.take(3) == TOKEN_IDS - 9  # -10 is the first id of an earlier assignment


# --- time, rate, limit


def test_rows_out_of_order_are_sorted_stably_and_it_is_reported(tmp_path: Path) -> None:
    text = VIDUR_CSV + "0.5,7,7\n2,8,8\n"
    workload = open_text(tmp_path, text)
    assert [turn.prompt_tokens for turn in workload.turns] == [374, 7, 396, 8]
    assert [turn.index for turn in workload.turns] == [0, 1, 2, 3]
    assert workload.notes == ("sorted by arrival: 1 rows precede the row above them, the first in line 4",)


def test_rate_stretches_the_whole_and_rate_scale_multiplies(tmp_path: Path) -> None:
    arrivals = [0.0, 0.1, 4.0]
    text = "arrived_at,num_prefill_tokens,num_decode_tokens\n" + "".join(f"{at},5,5\n" for at in arrivals)
    assert [turn.arrival_us for turn in open_text(tmp_path, text, rate=2.0).turns] == [0, 25_000, 1_000_000]
    assert [turn.arrival_us for turn in open_text(tmp_path, text, rate_scale=2.0).turns] == [0, 50_000, 2_000_000]
    assert open_text(tmp_path, text, rate=1.0, rate_scale=4.0).summary().arrivals_per_s == pytest.approx(4)
    assert open_text(tmp_path, text, rate=math.inf).summary().duration_us == 0


def test_limit_keeps_the_first_by_arrival_and_their_tokens(tmp_path: Path) -> None:
    for text in (AZURE_CSV, MOONCAKE_JSONL):
        whole = open_text(tmp_path, text).turns
        assert open_text(tmp_path, text, limit=2).turns == whole[:2]
        assert open_text(tmp_path, text, limit=99).turns == whole


def test_rate_of_a_limited_trace_is_the_rate_requested(tmp_path: Path) -> None:
    assert open_text(tmp_path, AZURE_CSV, limit=2, rate=5.0).summary().duration_us == 200_000


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"rate_scale": 0.0}, "`rate_scale` must be"),
        ({"rate_scale": math.nan}, "`rate_scale` must be"),
        ({"rate": 0.0}, "`rate` must be"),
        ({"rate": math.nan}, "`rate` must be"),
        ({"limit": 0}, "`limit` must be at least 1, got `0`"),
        ({"rate": 1e-6, "rate_scale": 1e-6}, "285 years"),
    ],
)
def test_impossible_options_are_refused(tmp_path: Path, options: dict[str, object], says: str) -> None:
    assert says in refusal(tmp_path, AZURE_CSV, **options)


def test_a_trace_of_one_instant_has_no_rate_to_stretch(tmp_path: Path) -> None:
    text = mooncake_line(0, 5, 5, [0]) * 2
    assert "all 2 arrive at one instant" in refusal(tmp_path, text, rate=2.0)
    assert len(open_text(tmp_path, text, rate=2.0, limit=1).turns) == 1


# --- digest


def test_digest_names_content_and_not_the_file(tmp_path: Path) -> None:
    first = open_workload(write(tmp_path, AZURE_CSV, "a.csv"), seed=1)
    second = open_workload(write(tmp_path, AZURE_CSV, "b.csv"), seed=2)
    assert (first.digest, first.name, second.name) == (second.digest, "a", "b")
    assert open_text(tmp_path, AZURE_CSV.replace(",27", ",28")).digest != first.digest
    assert open_text(tmp_path, AZURE_CSV, rate_scale=2.0).digest != first.digest


def test_only_a_workload_from_which_something_is_drawn_depends_on_the_seed(tmp_path: Path) -> None:
    clock = write(tmp_path, AZURE_CSV, "clock.csv")
    lengths = write(tmp_path, "num_prefill_tokens,num_decode_tokens\n5,5\n6,6\n7,7\n", "lengths.csv")
    drawn = []
    for source, rate in (
        (clock, None),
        (clock, 4.0),
        (lengths, float("inf")),
        (lengths, 4.0),
        ("gen:n=9,input=uniform:1:99", 4.0),
    ):
        one, other = (open_workload(source, seed=seed, rate=rate) for seed in (1, 2))
        assert one.is_drawn == other.is_drawn == (one.digest != other.digest)
        drawn.append(one.is_drawn)
    assert drawn == [False, False, False, True, True]


def test_digest_of_a_known_file_never_changes(tmp_path: Path) -> None:
    # Journals and reports name workloads by digest. If this moves, every recorded digest has lost its meaning.
    assert open_text(tmp_path, MOONCAKE_JSONL).digest == "f9acead472213e15d4a9ddb1b47f6ca9"


# --- bad rows

GOOD_AZURE_ROW = "2023-11-16 18:17:03.9799600,4808,10"
BAD_AZURE_ROWS = {
    "2023-11-16 18:17:03,12.5,10": ("ContextTokens", "12.5"),
    "2023-11-16 18:17:03,many,10": ("ContextTokens", "many"),
    "2023-11-16 18:17:03,-3,10": ("ContextTokens", "-3"),
    "2023-11-16 18:17:03,0,10": ("ContextTokens", "0"),
    "2023-11-16 18:17:03,NaN,10": ("ContextTokens", "NaN"),
    "2023-11-16 18:17:03,inf,10": ("ContextTokens", "inf"),
    "2023-11-16 18:17:03,99999999999,10": ("ContextTokens", "99999999999"),
    "2023-11-16 18:17:03,5,-1": ("GeneratedTokens", "-1"),
    "2023-11-16 18:17:03,5,": ("GeneratedTokens", ""),
    "2023-11-16 18:17:03,5": ("GeneratedTokens", "2023-11-16 18:17:03,5"),
    "2023-11-16 18:17:03,5,5,5": ("GeneratedTokens", "2023-11-16 18:17:03,5,5,5"),
    "yesterday,5,5": ("TIMESTAMP", "yesterday"),
    "nan,5,5": ("TIMESTAMP", "nan"),
}
GOOD_VIDUR_ROW = "0.5,374,44"
BAD_VIDUR_ROWS = {
    "nan,5,5": ("arrived_at", "nan"),
    "inf,5,5": ("arrived_at", "inf"),
    "-1,5,5": ("arrived_at", "-1"),
    "1e300,5,5": ("arrived_at", "1e300"),
    ",5,5": ("arrived_at", ""),
    "1,0,5": ("num_prefill_tokens", "0"),
    "1,5,-1": ("num_decode_tokens", "-1"),
}
GOOD_MOONCAKE_ROW = mooncake_line(0, 600, 5, [0, 1]).strip()
BAD_MOONCAKE_ROWS = {
    mooncake_line(0, 600, 5, [0]).strip(): ("hash_ids", "1 ids: [0]"),
    mooncake_line(0, 600, 5, [0, 1, 2]).strip(): ("hash_ids", "3 ids: [0, 1, 2]"),
    mooncake_line(0, 600, 5, []).strip(): ("hash_ids", "0 ids: []"),
    mooncake_line(0, 600, 5, [0, -1]).strip(): ("hash_ids", "[0, -1]"),
    mooncake_line(0, 600, 5, [0, "1"]).strip(): ("hash_ids", "[0, '1']"),
    mooncake_line(0, 600, 5, [0, True]).strip(): ("hash_ids", "[0, True]"),
    mooncake_line(0, 600, 5, 7).strip(): ("hash_ids", "7"),
    mooncake_line(0, 0, 5, []).strip(): ("input_length", "0"),
    mooncake_line(0, None, 5, [0]).strip(): ("input_length", "None"),
    mooncake_line(0, True, 5, [0]).strip(): ("input_length", "True"),
    mooncake_line(0, 600, -1, [0, 1]).strip(): ("output_length", "-1"),
    mooncake_line(-1, 600, 5, [0, 1]).strip(): ("timestamp", "-1"),
    mooncake_line(10**400, 600, 5, [0, 1]).strip(): ("timestamp", "1000000000"),
    mooncake_line([], 600, 5, [0, 1]).strip(): ("timestamp", "[]"),
    '{"timestamp": NaN, "input_length": 600}': ("(all)", '{"timestamp": NaN, "input_length": 600}'),
    '{"timestamp": 0, "input_length": 600, "output_length": 5}': ("hash_ids", '{"timestamp": 0'),
    '{"timestamp": 0, "inp': ("(all)", '{"timestamp": 0, "inp'),
    "[0, 600, 5]": ("(all)", "[0, 600, 5]"),
}
BAD_ROWS = [
    pytest.param(header + good, bad, column, value, id=f"{column}-{value or 'empty'}")
    for header, good, bad_rows in (
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", GOOD_AZURE_ROW, BAD_AZURE_ROWS),
        ("arrived_at,num_prefill_tokens,num_decode_tokens\n", GOOD_VIDUR_ROW, BAD_VIDUR_ROWS),
        ("", GOOD_MOONCAKE_ROW, BAD_MOONCAKE_ROWS),
    )
    for bad, (column, value) in bad_rows.items()
]


@pytest.mark.parametrize(("good", "bad", "column", "value"), BAD_ROWS)
def test_a_bad_row_is_refused_with_its_place_or_skipped(
    tmp_path: Path, good: str, bad: str, column: str, value: str
) -> None:
    text = f"{good}\n\n{bad}\n{good.splitlines()[-1]}\n"
    line = text.splitlines().index(bad) + 1
    message = refusal(tmp_path, text)
    assert f"trace.csv, line {line}, column `{column}`: expected " in message
    assert f", got `{value}" in message
    assert "--skip-bad-rows" in message

    workload = open_text(tmp_path, text, reading=LENIENT)
    assert len(workload.turns) == 2
    assert workload.skipped.count == 1
    assert f"line {line}, column `{column}`" in workload.skipped.examples[0]


def test_an_output_of_no_tokens_is_a_prompt_and_nothing_more(tmp_path: Path) -> None:
    turns = open_text(tmp_path, AZURE_CSV.replace(",27", ",0")).turns
    assert [turn.output_tokens for turn in turns] == [10, 8, 0]
    assert "`-1`" in refusal(tmp_path, AZURE_CSV.replace(",27", ",-1"))


def test_only_the_first_few_skipped_rows_are_kept_as_messages(tmp_path: Path) -> None:
    workload = open_text(tmp_path, AZURE_CSV + "bad,1,1\n" * 100, reading=LENIENT)
    assert (workload.skipped.count, len(workload.skipped.examples)) == (100, 5)


def test_bad_rows_behind_the_limit_are_still_refused(tmp_path: Path) -> None:
    assert "line 5" in refusal(tmp_path, AZURE_CSV + "bad,1,1\n", limit=1)


# --- bad files


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "the file is empty"),
        ("\n \n", "the file is empty"),
        ("arrived_at,num_prefill_tokens,num_decode_tokens\n", "a header and no rows"),
        ("num_prefill_tokens,num_decode_tokens\n5,5\n", "it has lengths but no arrival times"),
        (
            "arrived_at,num_prefill_tokens\n5,5\n",
            "column `num_decode_tokens`: expected the columns num_prefill_tokens, ",
        ),
        ("TIMESTAMP,ContextTokens\n", "column `GeneratedTokens`"),
        ('{"timestamp": 0, "input_length": 6, "output_length": 5}\n', "column `hash_ids`"),
        ("when,how\n1,2\n", "unknown format"),
        ('{"prompt": "hello"}\n', "is text, and no column has the number of its tokens"),
        ("[" + "1," * 100_000 + "1]", "unknown format"),
        ('{"timestamp": 0, ', "not valid JSON"),
        (b"\x81\x00\xff\xfe", "not text: byte 0"),
        (b"PAR1\x00\x00", "not readable as Parquet"),
        (gzip.compress(AZURE_CSV.encode(), mtime=0)[:-12], "the compressed data ends too early"),
        (gzip.compress(AZURE_CSV.encode(), mtime=0)[:12], "the compressed data ends too early"),
        (gzip.compress(AZURE_CSV.encode(), mtime=0)[:-8] + b"\x00" * 8, "the compressed data is damaged"),
        (zstandard.ZstdCompressor().compress(AZURE_CSV.encode())[:-6], "the compressed data ends too early"),
        (zstandard.ZstdCompressor().compress(AZURE_CSV.encode())[:8] + b"\xff" * 40, "the compressed data is damaged"),
        (AZURE_CSV + '"' + "x" * 200_000, "not readable as CSV"),
    ],
)
def test_a_bad_file_is_refused_whether_or_not_rows_may_be_skipped(tmp_path: Path, text: str | bytes, says: str) -> None:
    assert says in refusal(tmp_path, text)
    assert "\nhint: " in refusal(tmp_path, text, reading=LENIENT)


def test_an_unknown_format_lists_the_known_ones(tmp_path: Path) -> None:
    message = refusal(tmp_path, "when,how\n1,2\n")
    assert all(name in message for name in ("mooncake", "azure", "vidur", "ContextTokens"))


def test_a_file_of_bad_rows_only_is_refused(tmp_path: Path) -> None:
    text = "arrived_at,num_prefill_tokens,num_decode_tokens\n1,0,5\n1,5,x\n"
    assert "no usable row: all 2 are bad, first: " in refusal(tmp_path, text, reading=LENIENT)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match=r"absent\.csv: no such file\nhint: .*gen:"):
        open_workload(str(tmp_path / "absent.csv"), seed=1)
    with pytest.raises(WorkloadError, match="no file of a ServeGen client"):
        open_workload(str(tmp_path), seed=1)


# --- summary


def test_summary_counts_shared_tokens_once(tmp_path: Path) -> None:
    summary = open_text(tmp_path, MOONCAKE_JSONL).summary()
    assert (summary.turns, summary.follow_ups, summary.duration_us) == (3, 0, 3_000_000)
    assert (summary.prompt.min, summary.prompt.p50, summary.prompt.max) == (1100, 1500, 1600)
    assert summary.sharing_ratio == pytest.approx((1024 + 512) / (1100 + 1500 + 1600))


# --- real data


def test_the_mooncake_trace_is_read_whole(data: Path) -> None:
    workload = open_workload(str(data / MOONCAKE), seed=1)
    assert (workload.name, workload.format, len(workload.turns)) == ("conversation_trace", "mooncake", 12_031)
    assert workload.notes == ()
    assert all(sum(turn.prompt[1::2]) == turn.prompt_tokens for turn in workload.turns)
    assert len({turn.arrival_us for turn in workload.turns}) == 1_180
    summary = workload.summary()
    assert (summary.prompt.min, summary.prompt.max, summary.duration_us) == (891, 126_195, 3_536_999_000)


def test_sharing_in_the_mooncake_trace_equals_the_published_oracle(data: Path) -> None:
    oracles = json.loads((data / "published/prefix_cache_oracles.json").read_text())
    rows = oracles["traces"]["mooncake_conversation_trace"]
    unbounded = next(row for row in rows if row["capacity_blocks"] is None)
    summary = open_workload(str(data / MOONCAKE), seed=1).summary()
    assert summary.sharing_ratio == pytest.approx(unbounded["hit_tokens"] / unbounded["total_input_tokens"], abs=1e-6)


def test_prefixes_in_the_mooncake_trace_are_those_of_its_hash_ids(data: Path) -> None:
    lines = gzip.decompress((data / MOONCAKE).read_bytes()).splitlines()
    rows = [json.loads(line) for line in lines[:400]]
    turns = open_workload(str(data / MOONCAKE), seed=1, limit=400).turns
    for row, turn in zip(rows, turns, strict=True):
        blocks = prompt_ids(turn.prompt)[::512] // 512
        assert blocks.tolist() == row["hash_ids"]


def test_the_azure_trace_is_read_whole(data: Path) -> None:
    workload = open_workload(str(data / AZURE), seed=1)
    assert (workload.format, len(workload.turns), workload.notes) == ("azure", 8_819, ())
    arrivals_us = [turn.arrival_us for turn in workload.turns]
    silences_us = [later - earlier for earlier, later in itertools.pairwise(arrivals_us)]
    assert 217 <= max(silences_us) / 1e6 < 218
