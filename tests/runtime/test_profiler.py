"""Traces between launches: their contents, their beginning and end, and that serving never depends on them."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the GPU runtime is not installed")

from click.testing import CliRunner  # noqa: E402

from lockstep.core.contract.errors import ConfigError  # noqa: E402
from lockstep.core.contract.events import Profile  # noqa: E402
from lockstep.runtime import LLM, Params  # noqa: E402
from lockstep.runtime.generate import generate  # noqa: E402
from tests.support.small_runtime import SmallRuntime  # noqa: E402

FOUR = Params(max_new_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(page_size=16, pages=64, overlap_depth=0) as made:
        yield made


def events(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path) as file:
        found: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return found


def batches(path: Path) -> list[str]:
    """Launches of a trace, in order: mode, rows and new tokens."""
    spans = [event for event in events(path) if " new tokens" in event.get("name", "") and event.get("ph") == "X"]
    return [span["name"].partition(" b")[0] for span in sorted(spans, key=lambda span: span["ts"])]


def test_a_profile_records_the_launches_that_were_requested(llm: LLM, tmp_path: Path) -> None:
    llm.start_profile(tmp_path, start_step=1, steps=2, record_shapes=True, with_stack=True)
    llm.generate([[5, 6, 7]], FOUR)
    (path,) = llm.stop_profile()
    assert path == tmp_path / "trace-01.json.gz"
    assert batches(path) == ["decode", "decode"]
    operators = [event for event in events(path) if event.get("cat") == "cpu_op"]
    assert any(event["args"].get("Input Dims") for event in operators)
    assert any("executor.py" in event.get("name", "") for event in events(path))
    llm.start_profile(tmp_path, steps=1)
    llm.generate([[5, 6, 8]], FOUR)
    assert llm.stop_profile() == [tmp_path / "trace-02.json.gz"]
    assert batches(tmp_path / "trace-02.json.gz") == ["extend"]
    plain = events(tmp_path / "trace-02.json.gz")
    assert not any(event["args"].get("Input Dims") for event in plain if event.get("cat") == "cpu_op")


def test_extends_and_decodes_go_into_files_of_their_own(llm: LLM, tmp_path: Path) -> None:
    llm.start_profile(tmp_path, steps=3, by_stage=True)
    for number in range(4):
        llm.generate([[9, number, 7]], FOUR)  # an extend and three decodes each
    files = [path.name.removesuffix(".json.gz") for path in llm.stop_profile()]
    assert files == ["extend-01", "decode-01", "extend-02", "extend-03"]
    assert [batches(tmp_path / f"{name}.json.gz") for name in files] == [
        ["extend"],
        ["decode"] * 3,
        ["extend"],
        ["extend"],
    ]


def test_a_profile_by_stage_that_is_over_makes_room_for_the_next(llm: LLM, tmp_path: Path) -> None:
    llm.start_profile(tmp_path / "a", steps=1, by_stage=True)
    llm.generate([[4, 4, 7]], FOUR)
    llm.start_profile(tmp_path / "b", steps=1)
    with pytest.raises(ConfigError, match="a profile is running already\nhint: stop it first"):
        llm.start_profile(tmp_path / "c")
    assert llm.stop_profile() == []
    assert len(list((tmp_path / "a").iterdir())) == 2


def test_what_cannot_be_recorded_is_reported_by_name(llm: LLM, tmp_path: Path) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"start_step": -1}, "`start_step` must be at least 0, got `-1`"),
        ({"steps": 0}, "`steps` must be at least 1, got `0`"),
        ({"activities": ("npu",)}, "`activities` must be of cpu, gpu, got `npu`"),
        ({"activities": ("gpu",)}, "`activities` names gpu, but the model is on `cpu`"),
        ({"folder": __file__}, f"`folder` {__file__} of a profile is a file"),
        ({"stacks": True}, "there is no option `stacks` of a profile"),
    ]
    for given, said in wrong:
        with pytest.raises(ConfigError) as caught:
            llm.start_profile(**{"folder": tmp_path, **given})
        assert str(caught.value).startswith(said)
    with pytest.raises(ConfigError, match="no profile is running"):
        LLM.stop_profile(llm)


def test_a_trace_that_cannot_be_written_ends_nothing_but_itself(llm: LLM, tmp_path: Path) -> None:
    llm.start_profile(tmp_path / "traces", steps=1)
    (tmp_path / "traces").write_text("")  # a file in place of the folder
    (answer,) = llm.generate([[3, 6, 7]], FOUR)
    assert len(answer.token_ids) == 4
    with pytest.raises(ConfigError, match="the profile failed: lost a recording: FileExistsError"):
        llm.stop_profile()


def test_an_engine_that_ends_leaves_what_was_recorded(tmp_path: Path) -> None:
    with LLM(page_size=16, pages=64, overlap_depth=0) as llm:
        llm.start_profile(tmp_path)
        llm.generate([[5, 6, 7]], FOUR)
    assert batches(tmp_path / "trace-01.json.gz") == ["extend", "decode", "decode", "decode"]


def test_a_host_without_a_profiler_answers_and_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    runtime = SmallRuntime()
    asked = runtime.host.ask(Profile("start", launches=1))
    answer = runtime.submit([1, 2, 3], 3)
    runtime.run()
    assert asked.result(timeout=0).ok
    assert len(answer.tokens) == 3
    assert caplog.text.count("this runtime has no profiler") == 2


def test_the_command_reports_where_traces_are_and_how_long_the_device_waited(tmp_path: Path) -> None:
    common = ["--set", "pages=64", "--max-new-tokens", "5", "--ignore-eos", "--prompt", "def", "--prompt", "import"]
    profile = ["--profile", str(tmp_path), "--profile-steps", "2", "--profile-by-stage"]
    result = CliRunner().invoke(generate, [*common, *profile], standalone_mode=False)
    assert result.return_value == 0, result.output
    names = {path.name for path in tmp_path.iterdir()}  # of another extend, too, if the second prompt came too late
    assert {"decode-01.json.gz", "extend-01.json.gz"} <= names
    (said,) = re.findall(r"^profile: (.+)$", result.stderr, re.MULTILINE)
    assert {Path(path).name for path in said.split(", ")} == names
    (batches,) = re.findall(r"2 answers, 10 output tokens in (\d+) batches and ", result.stderr)
    assert 5 <= int(batches) <= 10
    assert "% of that time" in result.stderr
    llm_quiet = CliRunner().invoke(generate, [*common, "--quiet"], standalone_mode=False)
    assert llm_quiet.stderr == ""


def test_stats_describe_engine_and_device(llm: LLM) -> None:
    before = llm.stats()
    llm.generate([[5, 6, 9]], FOUR)
    after = llm.stats()
    assert after.engine.counts.finished["length"] == before.engine.counts.finished.get("length", 0) + 1
    assert after.batches == before.batches + 4
    assert after.device.busy_us > before.device.busy_us
    assert after.device.bubble_share is not None
    assert 0 <= after.device.bubble_share < 1
