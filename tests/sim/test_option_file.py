"""Options in a TOML file: equal to those of a command line, checked with line numbers, saved and read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from lockstep.sim.cli.help_groups import FIRST, GROUPS
from lockstep.sim.cli.plan import plan
from lockstep.sim.cli.simulate import simulate

RUN = """
model = "qwen3-8b"
gpu = "h100"
workload = "gen:n=20,rate=5,input=fixed:100,output=fixed:5"
slo = ["ttft_p99=10s"]
seed = 3
host-cache-gb = 4
page_size = 16
intervals = false
overlap-depth = 1
"""
WORDS = [
    "--model", "qwen3-8b", "--gpu", "h100", "--workload", "gen:n=20,rate=5,input=fixed:100,output=fixed:5",
    "--slo", "ttft_p99=10s", "--seed", "3", "--host-cache-gb", "4", "--page-size", "16", "--no-intervals",
    "--overlap-depth", "1",
]  # fmt: skip
QUESTION = """
model = "qwen3-8b"
gpus = ["h100", "h200"]
workload = "gen:input=uniform:200:800,output=uniform:5:15"
slo = ["ttft_p90=1s"]
rate = 4
quick = true
requests = 40
engine = "none"

[search]
tp = [1, 2]
policy = "fcfs"

[price]
h100 = 2.5
"""


def ran(command: Any, *arguments: str) -> Result:
    return CliRunner().invoke(command, list(arguments))


def test_a_run_from_a_file_is_that_of_the_same_command_line(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(RUN)
    by_file, by_words = ran(simulate, str(tmp_path / "run.toml"), "--json"), ran(simulate, *WORDS, "--json")
    assert by_file.exit_code == 0, by_file.output
    assert by_file.stdout == by_words.stdout
    assert json.loads(by_file.stdout)["about"]["tiers"]["host_cache_gb"] == 4


def test_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(RUN)
    done = ran(simulate, str(tmp_path / "run.toml"), "--json", "--seed", "9")
    assert json.loads(done.stdout)["about"]["seed"] == 9


def test_a_question_from_a_file_and_the_saved_one_have_the_same_answer(tmp_path: Path) -> None:
    question, saved = tmp_path / "question.toml", tmp_path / "saved.toml"
    question.write_text(QUESTION)
    done = ran(plan, str(question), "--save", str(saved), "--jobs", "1", "--confidence", "0.9")
    assert done.exit_code == 0, done.output
    assert "h100 tp=1 schedule_policy=fcfs" in done.stdout
    assert "h200 tp=2 schedule_policy=fcfs" in done.stdout
    text = saved.read_text()
    assert 'search = ["tp=1,2", "policy=fcfs"]' in text
    assert 'confidence = "0.9"' in text
    again = ran(plan, str(saved))
    assert again.stdout == done.stdout


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('model = "a"\n\nmodell = "b"\n', "line 3: `modell` is no option of plan\nhint: did you mean `model`?"),
        ('rate = 4\nsessions = "many"\n', "line 2: `sessions` cannot be `many`: "),
        ("quick = 3\n", "line 1: `quick` must be true or false, got `3`"),
        ("rate = 4\n[model]\nname = 1\n", "line 2: `model` is a table\nhint: only search and price may be tables"),
        ("max-gpus = 4\nmax_gpus = 5\n", "line 2: `max_gpus` is given twice"),
        ("rate = \n", "Invalid value (at line 1, column 8)"),
    ],
)
def test_a_bad_file_is_one_error_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "question.toml"
    path.write_text(text)
    done = ran(plan, str(path))
    assert done.exit_code == 2
    assert message in done.output
    assert str(path) in done.output


def test_a_file_that_is_missing_is_one_error(tmp_path: Path) -> None:
    done = ran(plan, str(tmp_path / "none.toml"))
    assert "cannot be read: No such file or directory\nhint: options begin with --" in done.output


def test_requests_in_place_of_a_file_of_options_are_named(tmp_path: Path) -> None:
    path = tmp_path / "usage.csv"
    path.write_text("ts,prompt_tokens,completion_tokens\n0,9,3\n")
    done = ran(plan, str(path))
    assert f"hint: a file of options is TOML; requests are given as --workload {path}" in done.output


# ----------------------------------------------------------------------------------------------------------------- help


@pytest.mark.parametrize(("command", "name"), [(plan, "plan"), (simulate, "simulate")])
def test_help_has_the_options_that_matter_and_help_all_has_each_once_in_a_group(command: Any, name: str) -> None:
    short, full = ran(command, "--help").stdout, ran(command, "--help-all").stdout
    assert len(short.splitlines()) < 60
    assert "--help-all" in short
    flags = [one.opts[-1] for one in command.params if one.opts[-1].startswith("--")]
    shown = [line.split()[0].rstrip(",") for line in full.splitlines() if line.startswith("  --")]
    assert {flag.split("/")[0] for flag in flags} <= {word.split("/")[0] for word in (*shown, "--help")} | {"--out"}
    for heading in GROUPS:
        assert full.count(f"{heading}:\n") == 1
    assert set(FIRST[name]) <= {one.name for one in command.params}
