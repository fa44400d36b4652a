"""Every command and every option that README.md and docs/ name exists, and the commands that can run do run.

Command lines of code blocks run as printed, in a folder with small files under the names that they read. Simulations
are cut to a few requests. Commands that need a model folder, a GPU or a server are parsed by the real command, with a
callback that does nothing; `serve` prints a dry run.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
from collections.abc import Iterator
from importlib.metadata import entry_points
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

click = pytest.importorskip("click", reason="the simulator is not installed")
pytest.importorskip("lockstep.tools.journal", reason="the tools are not installed")
pytest.importorskip("lockstep.api.serve", reason="the server is not installed")

from lockstep.core.command import GROUP, main  # noqa: E402
from tests.support.documented import (  # noqa: E402
    PAGES,
    ROOT,
    Command,
    commands,
    inline_codes,
    lines_of,
    write_files,
    write_recording,
)


def examples_of_help() -> list[Command]:
    """Return the command lines in the help of all commands."""
    found = []
    for entry in entry_points(group=GROUP):
        if entry.name in NEED_MODEL and not MODEL:
            continue
        left = [entry.load()]
        while left:
            command = left.pop()
            left += getattr(command, "commands", {}).values()
            found += [Command(f"{entry.name} --help", line) for line in lines_of(command.help or "")]
    return found


MODEL = find_spec("torch") is not None and find_spec("lockstep.runtime") is not None
COMMANDS = {entry.name for entry in entry_points(group=GROUP)}
NEED_MODEL = {"generate", "demo-model"}
ALL = [*commands(), *examples_of_help()]
SHOWN = [one for one in ALL if not one.inline]
INLINE = [one for one in ALL if one.inline]

WHOLE = os.environ.get("LOCKSTEP_DOCUMENTED") == "whole"  # make docs-test: as long as they are printed
REQUESTS = 30  # of a simulation, instead of as many as printed
RUN_REQUESTS = 400  # of the stored run that other commands read; steps up to `--step 4821`
PARSED = {  # commands whose callback does nothing: they require what a test does not have
    "bench": "a server",
    "demo-model": "hours of training",
    "calibrate points": "published measurements",
    "calibrate requests": "results of a load generator",
    "calibrate operators": "operator tables",
    "calibrate acceptance": "a run with drafts",
    "calibrate journal": "a run of a server",
    "journal salvage": "a corrupt journal",
    "journal forget": "a run with tenants",
}
STORED = (
    "fcfs lpm before after real simulated served 0192 today vllm twin measured client demo/40-per-s h100 h200 b200"
).split()
"""Names of stored runs besides runs/chat."""
PLACEHOLDERS = {"DEMO": "demo", "RUN": "runs/chat", "fair": "lpm"}  # names that a page explains where it prints them
OF_OTHERS = {
    "--shm-size",
    "--format",
    "--unix-socket",
    "--output-file",
    "--output-details",
    "--scheduler-recv-interval",
}  # docker, curl, SGLang
OF_GENERATE = {"--debug"}  # options of `lockstep generate` alone, known even where its package is not installed
OF_VLLM = {
    f"--{name}"
    for name in "async-scheduling disable-hybrid-kv-cache-manager enable-chunked-prefill enable-prefix-caching"
    " long-prefill-token-threshold max-model-len max-num-batched-tokens max-num-seqs no-async-scheduling"
    " kv-transfer-config no-enable-prefix-caching pipeline-parallel-size prefill-schedule-interval save-detailed"
    " save-result scheduler-cls scheduling-policy additional-config watermark".split()
}
BASES = {
    "simulate": "--model qwen3-8b --gpu h100 --workload team-a=gen:n=30,rate=20",
    "plan": "--model qwen3-8b --gpus h100 --workload mix:team-a=gen:n=90,input=fixed:300,output=fixed:30@1"
    " --slo ttft_p99=1s",
    "serve": "--emulate qwen3-8b@h200",
}
MODELS = {"hybrid.md": "gemma-3-27b"}  # of a page where arguments are left out
LONG = {"--rank-schedulers", "sessions", "agents.jsonl.gz", "agentic_developers.jsonl.gz"}  # plans that take seconds


def leaf(words: list[str]) -> tuple[Any, int]:
    """Return the click command that a command line reaches, and the number of words of its name."""
    found = [entry for entry in entry_points(group=GROUP) if entry.name == words[0]]
    assert found, f"there is no command `lockstep {words[0]}`"
    command, depth = found[0].load(), 1
    while hasattr(command, "commands") and depth < len(words) and words[depth] in command.commands:
        command, depth = command.commands[words[depth]], depth + 1
    return command, depth


def flags(command: Any) -> set[str]:
    """Return all options of a command, and of its subcommands."""
    own = {flag for one in command.params for flag in (*one.opts, *one.secondary_opts)} | {"--help"}
    return own.union(*(flags(one) for one in getattr(command, "commands", {}).values()))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that the commands read."""
    folder = tmp_path_factory.mktemp("documented")
    write_files(folder)
    before = Path.cwd()
    os.chdir(folder)
    try:
        scenario = f"simulate --model qwen3-8b --gpu h100 --workload gen:n={RUN_REQUESTS},rate=6 --out runs/chat"
        assert main(scenario.split()) == 0
        for name in STORED:
            shutil.copytree(folder / "runs" / "chat", folder / "runs" / name)
        for line in (
            "workload fit conversation_trace.jsonl.gz -o chat.json",
            "workload fit AzureLLMInferenceTrace_code.csv.gz -o code.json",
        ):
            assert main(line.split()) == 0, line
        write_recording(folder / "runs" / "own")
        for line in (
            "journal convert runs/own --model qwen3-8b --gpu h100",
            "calibrate --from runs/chat --date 2026-11-22 --out mine.json",
            "catalogue gpus h100 -o card.json",
        ):
            assert main(line.split()) == 0, line
        shutil.copy("mine.json", "vllm-h100.json")
        shutil.copy("mine.json", "twin.json")
        of_client = Path("runs/client/metrics.json")
        metrics = json.loads(of_client.read_text())
        metrics["about"]["measured"] = {"url": "http://127.0.0.1:8000"}
        of_client.write_text(json.dumps(metrics))
        Path("serve.toml").write_text('emulate = "qwen3-8b@h200"\n')
        Path("keys.toml").write_text("[[keys]]\ntenant = 'team-a'\nkey = 'sk-a-key-for-the-test'\n")
        Path("questions.jsonl").write_text('{"prompt": "import "}\n')
    finally:
        os.chdir(before)
    return folder


@pytest.fixture
def folder(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the prepared files, whose files are links, as the working directory."""
    at = tmp_path / "at"
    shutil.copytree(prepared, at, copy_function=os.link)
    monkeypatch.chdir(at)
    return at


def argv_of(command: Command) -> list[str]:
    """Return the arguments, with placeholders replaced and the work cut to what a test has time for."""
    words = [PLACEHOLDERS.get(word, word) for word in command.words]
    base = BASES.get(words[0], "").replace("qwen3-8b", MODELS.get(command.page, "qwen3-8b")).split()
    if "..." in words:  # all arguments, or the value of the option in front of it
        at = words.index("...")
        if words[at - 1].startswith("-"):
            words[at] = base[base.index(words[at - 1]) + 1]
        else:
            words[at : at + 1] = base
    if words[0] == "plan" and not {"--slo"} & set(words):
        words += ["--slo", "ttft_p99=1s"]
    warm_up = int(words[words.index("--warm-up") + 1]) if "--warm-up" in words else 0
    if WHOLE:
        if words[0] == "simulate" and warm_up:  # the stand-in of a trace, repeated, is long enough
            words += ["--limit", str(warm_up + RUN_REQUESTS)]
        return [*words, "--dry-run"] if words[0] == "serve" else words
    match words[0]:
        case "simulate" if "--help" not in words:
            words += ["--limit", str(warm_up + REQUESTS)]
        case "plan":
            words += ["--quick", "--requests", "10", "--jobs", "1"]
        case "serve":
            words += ["--dry-run"]
    return words


def runs(words: list[str]) -> bool:
    """Whether a command runs in a test, or is only parsed."""
    if words[0] in PARSED or " ".join(words[:2]) in PARSED:
        return False
    if words[0] == "serve":
        if {"--calibration", "head"} & set(words):  # a file of that server's own machine; heads that take training
            return False
        return "--emulate" in words or "serve.toml" in words or (MODEL and not {"--model", "--config"} & set(words))
    if words[0] == "generate":
        return MODEL and not {"--model", "--logit-processor", "--tp"} & set(words)
    return not {"--to", "--on-hardware", "measured.jsonl"} & set(words)


@pytest.mark.parametrize("command", SHOWN, ids=lambda command: command.name)
def test_a_command_of_a_page_runs_or_is_parsed(
    command: Command, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = argv_of(command)
    if words[0] in NEED_MODEL and not MODEL:
        pytest.skip("the GPU runtime is not installed")
    if not runs(words):
        monkeypatch.setattr(click.Context, "invoke", lambda *_, **__: 0)
    if words[0] == "plan" and LONG & set(words) and not WHOLE:  # the arguments are checked, and the plan is not made
        answer = SimpleNamespace(winner="")
        monkeypatch.setattr("lockstep.sim.cli.plan.answer_of", lambda *_: answer)
    for flag, found in pairwise(words):
        if flag == "--out" and Path(found).is_dir():
            shutil.rmtree(found)
        elif flag in ("--out", "-o") and Path(found).is_file():
            Path(found).unlink()
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"quit\n")))
    status = main(words)
    assert status in ((0, 3) if words[0] == "plan" else (0,)), capsys.readouterr()


@pytest.mark.parametrize("command", INLINE, ids=lambda command: command.name)
def test_a_command_in_running_text_has_its_options(command: Command) -> None:
    words = re.sub(r"[][]", "", command.text).split()
    if words[0] in NEED_MODEL and not MODEL:
        pytest.skip("the GPU runtime is not installed")
    if words[0] in ("...", "COMMAND"):
        return
    reached, depth = leaf(words)
    wrong = {word for word in words[depth:] if word.startswith("--")} - flags(reached)
    assert not wrong, f"`lockstep {' '.join(words[:depth])}` has no {', '.join(sorted(wrong))}"


def all_flags() -> set[str]:
    """Return the options of all commands, and those that programs of the repository parse."""
    found = OF_OTHERS | OF_VLLM
    for entry in entry_points(group=GROUP):
        if MODEL or entry.name not in NEED_MODEL:
            found |= flags(entry.load())
    for where in ("dev.py", "benchmarks", "tests", "packages/gpu-runtime/src"):
        for path in (ROOT / where).rglob("*.py") if (ROOT / where).is_dir() else [ROOT / where]:
            found |= set(re.findall(r'"(--[a-z][a-z0-9-]+)"', path.read_text(encoding="utf-8")))
    return found


OWNED = re.compile(r"`([^`]*)`((?:,? (?:and )?`--[^`]*`)*) of `(lockstep [a-z ]+)`(?: and `([a-z]+)`)?")
"""Options that the text attributes to a command, or to two: "`--a 1`, `--b` of `lockstep simulate` and `plan`"."""


def options_named(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each option in inline code, with the commands that the text names as its owners."""
    for paragraph in re.split(r"\n\s*\n|\n\|", re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE)):
        for found in OWNED.finditer(paragraph):
            first, more, owner, other = found.groups()
            for code in (first, *re.findall(r"`([^`]*)`", more)):
                for flag in re.findall(r"(?<!\S)--[a-z][a-z0-9-]+", code):
                    yield flag, [owner.removeprefix("lockstep "), *([other] if other else [])]
    for code in inline_codes(text):
        words = code.split()
        for flag in re.findall(r"(?<!\S)--[a-z][a-z0-9-]*[a-z0-9]", code):
            yield flag, [words[0]] if words[0] in COMMANDS else []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_option_of_a_page_is_one_of_the_command_that_it_names(page: Path) -> None:
    known = all_flags() | (set() if MODEL else OF_GENERATE)
    wrong = []
    for flag, owners in options_named(page.read_text(encoding="utf-8")):
        wrong += [f"`{owner}` has no {flag}" for owner in owners if flag not in flags(leaf(owner.split())[0])]
        if not owners and flag not in known:
            wrong.append(f"no command has {flag}")
    if wrong and not MODEL and page.name == "runtime.md":
        pytest.skip("the GPU runtime, whose commands have these options, is not installed")
    assert not wrong, "\n".join(wrong)


def is_module(name: str) -> bool:
    """Return whether this checkout has a module or package of this name, installed or not."""
    path = name.replace(".", "/")
    folders = [ROOT, *ROOT.glob("packages/*/src"), ROOT / "tools" / "src"]
    return any((folder / f"{path}.py").is_file() or (folder / path).is_dir() for folder in folders)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_make_target_and_program_of_a_page_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    codes = "\n".join([*inline_codes(text), *re.findall(r"^ *```.*?^ *```", text, re.DOTALL | re.MULTILINE)])
    wrong = [f"make {name}" for name in re.findall(r"\bmake ([a-z][a-z-]*)", codes) if name not in targets]
    for name in re.findall(r"python3? ((?:benchmarks|tests|examples|docs|packages)/[\w/.-]+\.py)", codes):
        wrong += [name] * (not (ROOT / name).is_file())
    for name in re.findall(r"python3? -m ((?:benchmarks|tests|lockstep)[\w.]*)", codes):
        wrong += [name] * (not is_module(name))
    assert not wrong
