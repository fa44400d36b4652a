"""Two data-parallel engines behind one front end of vLLM: a journal each, in one run folder that tools read as one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from lockstep.core.contract.events import RequestArrived
from lockstep.core.journal.reader import read_journal
from lockstep.tools.explain import explain
from lockstep.tools.journal import journal
from lockstep.tools.replay import replay
from tests.vllm.served import serving
from tests.vllm.support import needs_vllm

ENGINE = Path(__file__).parent / "twin" / "engine"
NAMES = [f"stream-{number}" for number in range(12)]


def command(what: object, *arguments: object) -> str:
    done = CliRunner().invoke(what, [str(one) for one in arguments])  # type: ignore[arg-type]
    assert done.exit_code == 0, done.output
    return done.output


def test_without_vllm_the_run_of_several_engines_is_verified_without_a_router(tmp_path: Path) -> None:
    for number in range(2):
        shutil.copytree(ENGINE, tmp_path / "run" / "engines" / str(number))
    said = command(journal, "verify", tmp_path / "run")
    assert [line.split(":")[0] for line in said.splitlines()] == ["engine 0", "engine 1"]
    assert "router" not in command(journal, "check", tmp_path / "run")
    assert json.loads(command(journal, "verify", tmp_path / "run", "--json").splitlines()[1])["verdict"] == "equal"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of twelve streams over two engines."""
    folder = tmp_path_factory.mktemp("parallel")
    options = ("--data-parallel-size", "2", "--shutdown-timeout", "30")
    with serving(folder, {"journal": str(folder / "run-{start}")}, *options) as server:
        for number, name in enumerate(NAMES):
            server.stream(name, prompt=[5, 6, 7, 20 + number], max_tokens=200)
        server.join()
        assert all(server.streamed[name] > 0 for name in NAMES)
    (found,) = folder.glob("run-*")  # one time of the start for both engines
    return found


@needs_vllm
@pytest.mark.long
def test_each_engine_has_a_journal_and_they_share_the_requests(run: Path) -> None:
    assert sorted(path.name for path in (run / "engines").iterdir()) == ["0", "1"]
    names: list[set[str]] = []
    for number in range(2):
        events = [one.event for one in read_journal(run / "engines" / str(number)).events()]
        names.append({one.label.rsplit("-", 2)[0] for one in events if isinstance(one, RequestArrived)})
    assert names[0]
    assert names[1]
    assert not names[0] & names[1]
    assert names[0] | names[1] == {f"cmpl-{name}" for name in NAMES}


@needs_vllm
@pytest.mark.long
def test_both_are_verified_and_checked_by_the_name_of_the_run(run: Path) -> None:
    said = command(journal, "verify", run)
    assert [line.split(":")[0] for line in said.splitlines()] == ["engine 0", "engine 1"]
    assert said.count(": equal: ") == 2
    assert command(journal, "check", run).count(": clean, closed; ") == 2


@needs_vllm
@pytest.mark.long
def test_a_request_is_found_in_its_engine(run: Path) -> None:
    for name in NAMES:
        assert name in command(explain, run, "--request", name).splitlines()[0]


@needs_vllm
@pytest.mark.long
@pytest.mark.parametrize("number", [0, 1])
def test_the_tools_for_one_engine_take_its_folder(run: Path, number: int, tmp_path: Path) -> None:
    engine = run / "engines" / str(number)
    assert "what they waited for" in command(explain, engine, "--slowest", "ttft", 3)
    page = tmp_path / "slow.html"
    command(explain, engine, "--slowest", "ttft", 3, "--html", page)
    assert "stream-" in page.read_text("utf-8")
    command(journal, "convert", engine, "--out", tmp_path / "measured")
    metrics = json.loads((tmp_path / "measured/metrics.json").read_text())
    assert 0.0 < metrics["latency"]["ttft_us_mean"] < metrics["latency"]["e2e_us_mean"]
    options = ("--what-if", "--policy", "spf", "--model", "qwen3-8b", "--gpu", "h200")
    assert "ttft" in command(replay, engine, *options).lower()


@needs_vllm
@pytest.mark.long
def test_a_tool_for_one_engine_refuses_the_run_of_two(run: Path) -> None:
    done = CliRunner().invoke(explain, [str(run), "--slowest", "ttft", "3"])
    assert done.exit_code != 0
    assert f"hint: name one of them, such as {run}/engines/0" in done.output
