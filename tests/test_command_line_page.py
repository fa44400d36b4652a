"""docs/command-line.md: every command has its exit statuses there, and each is produced; completion of shells."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lockstep.tools.journal", reason="the tools are not installed")

from lockstep.core.command import COMPLETE, GROUP, main
from lockstep.core.journal.reader import read_journal
from lockstep.core.journal.writer import JournalWriter
from tests.json_schemas import LOAD, prepared

PAGE = Path(__file__).resolve().parents[1] / "docs" / "command-line.md"
NEED_MODEL = {"generate", "demo-model"}
STATUSES = ("0", "1", "2", "3")
OF_REPLAY = (
    "replay RUN", "replay RUN --what-if", "replay RUN --in-simulator", "replay TRACE --to URL",
    "replay RUN --on-hardware",
)  # fmt: skip

PLAN = f"plan --model qwen3-8b --gpus h100 --workload {LOAD} --quick --requests 20 --jobs 1 --rate 1"
SIMULATE = f"simulate --model qwen3-8b --gpu h100 --workload {LOAD} --no-intervals --fail-on-slo"
NO_SERVER = "http://127.0.0.1:9"
CASES = {
    ("plan", "0"): f"{PLAN} --slo ttft_p99=5s",
    ("plan", "3"): f"{PLAN} --slo ttft_p99=1us",
    ("simulate", "0"): f"{SIMULATE} --slo ttft_p99=5s",
    ("simulate", "3"): f"{SIMULATE} --slo ttft_p99=1us",
    ("replay RUN", "0"): "replay run",
    ("replay RUN", "1"): "replay open",
    ("replay RUN", "2"): "replay none",
    ("replay RUN", "3"): "replay changed",
    ("replay RUN --what-if", "0"): "replay run --what-if --max-running-requests 2",
    ("replay RUN --what-if", "2"): "replay none --what-if",
    ("replay RUN --what-if", "3"): "replay changed --what-if --max-running-requests 2",
    ("replay TRACE --to URL", "2"): f"replay {LOAD} --to {NO_SERVER}",
    ("replay RUN --in-simulator", "0"): "replay run --in-simulator",
    ("replay RUN --in-simulator", "1"): "replay open --in-simulator",
    ("replay RUN --in-simulator", "2"): "replay none --in-simulator",
    ("replay RUN --in-simulator", "3"): "replay changed --in-simulator",
    ("replay RUN --on-hardware", "2"): "replay none --on-hardware",
    ("diff", "0"): "diff run run",
    ("diff", "1"): "diff run other",
    ("diff", "2"): "diff run none",
    ("diff", "3"): "diff changed other",
    ("explain", "2"): "explain run --request 4711",
    ("explain", "3"): "explain changed --step 200",
    ("export", "2"): "export none --out tables",
    ("export", "3"): "export changed --out tables",
    ("journal info", "2"): "journal info none",
    ("journal dump", "2"): "journal dump none",
    ("journal check", "0"): "journal check run",
    ("journal check", "1"): "journal check torn",
    ("journal check", "2"): "journal check corrupt",
    ("journal verify", "0"): "journal verify run",
    ("journal verify", "1"): "journal verify open",
    ("journal verify", "2"): "journal verify corrupt",
    ("journal verify", "3"): "journal verify changed",
    ("journal salvage", "0"): "journal salvage corrupt --out saved",
    ("journal salvage", "2"): "journal salvage run --out saved",
    ("journal forget", "2"): "journal forget run --tenant stranger --out forgotten",
    ("journal convert", "2"): "journal convert none",
    ("bench serve", "2"): f"bench serve --to {NO_SERVER} --workload {LOAD}",
    ("serve", "2"): "serve --emulate qwen3-8b",
    ("compare", "2"): "compare run none",
    ("workload describe", "2"): "workload describe none.csv",
    ("workload import", "2"): "workload import none.csv -o out.jsonl.gz",
    ("workload fit", "2"): "workload fit none.csv -o out.json",
    ("catalogue models", "2"): "catalogue models none",
    ("catalogue gpus", "2"): "catalogue gpus none",
    ("catalogue engines", "2"): "catalogue engines none",
    ("calibrate points", "2"): "calibrate points none.csv --engine vllm --date 2026-11-26 --out mine.json",
    ("calibrate operators", "2"): "calibrate operators none --gpu h100 --date 2026-11-26 --out card.json",
    ("calibrate journal", "2"): "calibrate journal none --date 2026-11-26 --out mine.json",
    ("calibrate requests", "2"): "calibrate requests none.jsonl --date 2026-11-26 --out mine.json",
    ("calibrate acceptance", "2"): "calibrate acceptance none",
    ("completion", "2"): "completion tcsh",
    ("demo", "2"): "demo --out taken",
}
"""A command line for each status of the table."""

ELSEWHERE = {
    ("replay TRACE --to URL", "0"): "tests/tools/test_live.py: a server",
    ("replay TRACE --to URL", "1"): "tests/tools/test_live.py: a server that answers nothing",
    ("replay RUN --on-hardware", "0"): "tests/tools/test_on_hardware.py: torch",
    ("journal forget", "0"): "tests/tools/test_forget.py: a run with tenants",
    ("bench serve", "0"): "tests/tools/test_bench.py: a server",
    ("bench serve", "1"): "tests/tools/test_bench.py: a server that answers nothing",
    ("serve", "0"): "tests/api/test_processes.py: signals",
    ("serve", "1"): "tests/api/test_processes.py: an engine that ends for good",
    ("generate", "0"): "tests/runtime/test_llm.py: a model",
    ("generate", "1"): "tests/runtime/test_llm.py: a model",
}
"""Statuses that another file of the tests produces, because they need more than a run folder."""


def table() -> dict[str, dict[str, str]]:
    """Return the table of the page: command, status, meaning."""
    found = {}
    for line in PAGE.read_text("utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `") and len(cells) == 1 + len(STATUSES):
            found[cells[0].strip("`")] = dict(zip(STATUSES, cells[1:], strict=True))
    return found


def names(command: Any, name: str) -> Iterator[str]:
    """Yield the names of a command without subcommands, or of its subcommands."""
    below = getattr(command, "commands", {})
    for one, other in below.items():
        yield from names(other, f"{name} {one}")
    if not below:
        yield name


def test_every_command_has_a_row() -> None:
    rows = set(table())
    assert rows >= set(OF_REPLAY)
    expected = set()
    for entry in entry_points(group=GROUP):
        if entry.name == "replay" or entry.name in NEED_MODEL:
            continue
        expected |= set(names(entry.load(), entry.name))
    assert rows - set(OF_REPLAY) - NEED_MODEL == expected


def test_every_status_of_the_table_is_produced_by_a_test() -> None:
    stated = {(command, status) for command, row in table().items() for status, meaning in row.items() if meaning}
    assert stated == set(CASES) | set(ELSEWHERE)
    root = PAGE.parents[1]
    for where in ELSEWHERE.values():
        assert (root / where.partition(":")[0]).is_file(), where


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Runs: complete, without an end, with a torn record, corrupt, and with a digest that no replay gives."""
    at = tmp_path_factory.mktemp("statuses")
    with prepared(at):
        segment = next((at / "run" / "journal").glob("*.log")).name
        for name in ("open", "torn", "corrupt"):
            shutil.copytree("run", name)
        records = [record.offset for record in read_journal(at / "run").records()]
        log = at / "open" / "journal" / segment
        log.write_bytes(log.read_bytes()[: records[len(records) // 2]])
        log = at / "torn" / "journal" / segment
        log.write_bytes(log.read_bytes()[:-3])
        log = at / "corrupt" / "journal" / segment
        data = bytearray(log.read_bytes())
        data[records[len(records) // 2] + 20] ^= 0xFF
        log.write_bytes(data)
        shutil.copytree("run", "changed", ignore=shutil.ignore_patterns("journal"))
        journal = read_journal(at / "run")
        with JournalWriter.create(at / "changed", journal.header) as writer:
            for record in journal.events():
                writer.append(record.event, record.digest if record.step != 100 else bytes(16))
        Path("taken").write_text("not a folder")
        yield at


@pytest.mark.parametrize(("command", "status"), CASES)
def test_a_command_ends_with_the_status_of_the_table(
    command: str, status: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree("tables", ignore_errors=True)
    shutil.rmtree("saved", ignore_errors=True)
    found = main(CASES[command, status].split())
    problems = capsys.readouterr().err
    assert found == int(status), problems
    if status == "2":
        assert "Traceback" not in problems
        assert problems.strip(), "a wrong command line has a message"


# ---------------------------------------------------------------------------------------------------------- completion


def completed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, line: str) -> list[str]:
    """Return the completions of the last word of a line, by the protocol of the scripts for bash."""
    words = line.split(" ")
    monkeypatch.setenv(COMPLETE, "bash_complete")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
    assert main([]) == 0
    return [one.partition(",")[2] for one in capsys.readouterr().out.split()]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("lockstep pl", {"plan"}),
        ("lockstep journal ver", {"verify"}),
        ("lockstep plan --prefill-decode-", {"--prefill-decode-interval"}),
        ("lockstep plan --model qwen3-8", {"qwen3-8b"}),
        ("lockstep plan --gpus h100,mi3", {"h100,mi300x", "h100,mi355x"}),
        ("lockstep simulate --router prefix", {"prefix_affinity"}),
        ("lockstep simulate --schedule-policy lp", {"lpm"}),
        ("lockstep completion ", {"bash", "fish", "zsh"}),
        ("lockstep nothing --", set()),
    ],
)
def test_a_word_is_completed(
    line: str, expected: set[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = set(completed(capsys, monkeypatch, line))
    assert found == expected if expected else not found


SCRIPT = """
eval "$(lockstep completion {shell})"
{ask}
"""
ASKED: dict[str, str] = {
    "bash": 'COMP_WORDS=(lockstep pl) COMP_CWORD=1; _lockstep_completion lockstep pl lockstep; echo "${COMPREPLY[@]}"',
    "fish": "complete --do-complete 'lockstep pl'",
    # zsh completes only while a line is edited, so the function is called by hand and prints what it would offer
    "zsh": (
        "words=(lockstep pl); CURRENT=2; _describe() { print -l -- $completions_with_descriptions };"
        " _lockstep_completion"
    ),
}
BEFORE = {
    "zsh": "compdef() { }"
}  # in place of that of compinit, which needs a terminal where its folders belong to another user


@pytest.mark.parametrize("shell", ASKED)
def test_the_script_of_a_shell_completes(shell: str, make_path: Callable[[], dict[str, str]]) -> None:
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"{shell} is not installed")
    script = BEFORE.get(shell, "") + SCRIPT.format(shell=shell, ask=ASKED[shell])
    done = subprocess.run(
        [program, "-c", script], capture_output=True, text=True, timeout=120, env=make_path(), check=True
    )
    assert "plan" in done.stdout, done.stderr


@pytest.fixture
def make_path() -> Callable[[], dict[str, str]]:
    """The environment with `lockstep` of this interpreter on the path."""
    beside = Path(sys.executable).parent
    if not (beside / "lockstep").exists():
        pytest.skip("`lockstep` is not installed as a program")
    return lambda: {**os.environ, "PATH": f"{beside}{os.pathsep}{os.environ.get('PATH', '')}"}


@pytest.mark.parametrize(
    ("shell", "registered"),
    [
        ("bash", r"complete .*-F _lockstep_completion lockstep"),
        ("fish", r"complete .*--command lockstep"),
        ("zsh", r"compdef _lockstep_completion lockstep"),
    ],
)
def test_a_shell_has_a_script(shell: str, registered: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Where the shell is not installed, its script is at least the one for `lockstep`."""
    assert main(["completion", shell]) == 0
    assert re.search(registered, capsys.readouterr().out)
