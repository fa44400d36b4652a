"""The `lockstep` command finds, lists and runs the commands of the installed packages, and fails in one clear line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest

from lockstep.core import command

MODULES = {
    "ls_plain": '''
def greet(argv):
    """Say hello.

    At length.
    """
    print("hello", *argv)

def three(argv):
    """Return three."""
    return 3

def count(argv):
    """Print forever."""
    while True:
        print("line")

def interrupted(argv):
    raise KeyboardInterrupt

def misconfigured(argv):
    """Refuse a setting."""
    from lockstep.core.contract.errors import ConfigError
    raise ConfigError("`page_size` must be a power of two, got `24`\\nhint: 16 and 32 are usual")

def leave(argv):
    """Leave with words."""
    raise SystemExit("went away")

number = 7
''',
    "ls_click": '''
import click

@click.command()
@click.option("--rate", type=float, default=1.0)
def rate(rate):
    """Show a rate."""
    click.echo(f"rate {rate}")

@click.command(help="Given as an argument.")
def argument():
    pass

@click.command()
def click_interrupted():
    """Press Ctrl-C."""
    raise KeyboardInterrupt

@click.command()
def click_count():
    """Print forever."""
    while True:
        click.echo("line")
''',
    "ls_broken": '''
import no_such_library

def broken(argv):
    """Need a library that is not there."""
''',
}

ENTRIES = {
    "ls-alpha": {
        "greet": "ls_plain:greet",
        "three": "ls_plain:three",
        "count": "ls_plain:count",
        "interrupted": "ls_plain:interrupted",
        "misconfigured": "ls_plain:misconfigured",
        "leave": "ls_plain:leave",
        "number": "ls_plain:number",
        "twice": "ls_plain:greet",
    },
    "ls-beta": {
        "rate": "ls_click:rate",
        "argument": "ls_click:argument",
        "click-interrupted": "ls_click:click_interrupted",
        "click-count": "ls_click:click_count",
        "broken": "ls_broken:broken",
        "absent": "ls_no_such_module:absent",
        "misspelt": "ls_plain:mispelt",
        "twice": "ls_plain:greet",
    },
}


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the import path that holds two installed distributions."""
    for name, source in MODULES.items():
        (tmp_path / "ls_namespace").mkdir(exist_ok=True)
        (tmp_path / "ls_namespace" / f"{name}.py").write_text(source)
        monkeypatch.delitem(sys.modules, f"ls_namespace.{name}", raising=False)
    monkeypatch.delitem(sys.modules, "ls_namespace", raising=False)
    for distribution, entries in ENTRIES.items():
        folder = tmp_path / f"{distribution.replace('-', '_')}-1.5.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.5\n")
        lines = [f"{name} = ls_namespace.{value}" for name, value in entries.items()]
        (folder / "entry_points.txt").write_text("\n".join([f"[{command.GROUP}]", *lines, ""]))
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def _start(packages: Path, *argv: str, then: str = "") -> subprocess.Popen[str]:
    """The command in its own interpreter; `then` is code to run before leaving it."""
    code = f"import sys\nfrom lockstep.core.command import main\nstatus = main(sys.argv[1:])\n{then}\nsys.exit(status)"
    return subprocess.Popen(
        [sys.executable, "-c", code, *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(packages)},
    )


@pytest.mark.usefixtures("packages")
class TestRunning:
    def test_plain_callable_takes_the_rest_of_the_line(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert command.main(["greet", "--loud", "you"]) == 0
        assert capsys.readouterr().out == "hello --loud you\n"

    def test_plain_callable_may_return_a_status(self) -> None:
        assert command.main(["three"]) == 3

    def test_click_command_parses_the_rest_of_the_line(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert command.main(["rate", "--rate", "6.5"]) == 0
        assert capsys.readouterr().out == "rate 6.5\n"

    def test_click_command_has_its_own_help(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert command.main(["rate", "--help"]) == 0
        assert capsys.readouterr().out.startswith("Usage: lockstep rate [OPTIONS]")

    def test_click_reports_its_usage_errors(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert command.main(["rate", "--rate", "fast"]) == 2
        assert "'fast' is not a valid float" in capsys.readouterr().err

    def test_words_of_a_leaving_command_go_to_stderr(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert command.main(["leave"]) == 1
        assert capsys.readouterr().err == "went away\n"

    def test_config_error_is_shown_without_a_traceback(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert command.main(["misconfigured"]) == 2
        shown = capsys.readouterr()
        assert shown.out == ""
        assert shown.err == "ConfigError: `page_size` must be a power of two, got `24`\nhint: 16 and 32 are usual\n"

    @pytest.mark.parametrize("name", ["interrupted", "click-interrupted"])
    def test_interrupt_gives_130(self, name: str) -> None:
        assert command.main([name]) == 130


@pytest.mark.usefixtures("packages")
class TestRefusing:
    def test_unknown_command_names_the_near_ones(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert command.main(["gret"]) == 2
        shown = capsys.readouterr()
        assert shown.out == ""
        assert shown.err.startswith("lockstep: no command `gret`; did you mean `greet`?\n")

    def test_unknown_command_like_nothing_points_to_help(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert command.main(["xyzzy"]) == 2
        assert capsys.readouterr().err == (
            "lockstep: no command `xyzzy`\nhint: `lockstep --help` lists the commands of the installed packages\n"
        )

    def test_option_before_the_command(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert command.main(["--rate", "3"]) == 2
        assert "no option `--rate` before the command" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("name", "reason"),
        [
            ("broken", "ModuleNotFoundError: No module named 'no_such_library'"),
            ("absent", "ModuleNotFoundError: No module named 'ls_namespace.ls_no_such_module'"),
            ("misspelt", "AttributeError: module 'ls_namespace.ls_plain' has no attribute 'mispelt'"),
        ],
    )
    def test_command_that_cannot_be_loaded(self, name: str, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert command.main([name]) == 1
        first_line = capsys.readouterr().err.splitlines()[0]
        assert first_line == f"lockstep: `{name}` from ls-beta 1.5 cannot be loaded: {reason}"

    def test_entry_that_is_no_command(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert command.main(["number"]) == 1
        assert "`number` is of type int, not a command" in capsys.readouterr().err

    def test_command_given_twice_names_both_givers(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert command.main(["twice"]) == 2
        assert "`twice` is provided by ls-alpha 1.5 and ls-beta 1.5" in capsys.readouterr().err


class TestListing:
    @pytest.mark.usefixtures("packages")
    @pytest.mark.parametrize("argv", [[], ["--help"], ["-h"], ["help"]])
    def test_help_lists_every_command_with_its_giver(self, argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        assert command.main(argv) == 0
        rows = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("  ")}
        assert rows["greet"] == ["greet", "Say", "hello.", "ls-alpha"]
        assert rows["rate"] == ["rate", "Show", "a", "rate.", "ls-beta"]
        assert rows["argument"] == ["argument", "Given", "as", "an", "argument.", "ls-beta"]
        assert rows["broken"][-1] == "ls-beta"
        assert "run it to see why" in " ".join(rows["absent"])

    @pytest.mark.usefixtures("packages")
    def test_help_has_its_summaries_in_one_column(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert command.main(["help"]) == 0
        lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.startswith("  ")}
        texts = {"greet": "Say hello.", "click-interrupted": "Press Ctrl-C.", "argument": "Given as an argument."}
        assert len({lines[name].index(text) for name, text in texts.items()}) == 1
        assert lines["greet"].index("ls-alpha") == lines["rate"].index("ls-beta")

    def test_help_imports_no_command_and_no_library(self, packages: Path) -> None:
        for entry_points in packages.glob("*.dist-info/entry_points.txt"):
            lines = entry_points.read_text().splitlines()
            # Commands without a docstring are left out, since those must be imported for their help.
            kept = [line for line in lines if line.startswith(("[", "greet", "three", "rate", "click-count", "broken"))]
            entry_points.write_text("\n".join(kept))
        asked = ["ls_namespace.ls_plain", "ls_namespace.ls_click", "click", "numpy", "msgspec", "lockstep.sim"]
        process = _start(packages, "--help", then=f"print('loaded', *[m for m in {asked} if m in sys.modules])")
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        assert out.splitlines()[-1] == "loaded"

    def test_running_one_command_imports_only_that_one(self, packages: Path) -> None:
        process = _start(packages, "greet", then="print('ls_namespace.ls_click' in sys.modules)")
        out, err = process.communicate(timeout=120)
        assert out == "hello\nFalse\n", err

    def test_version_lists_the_installed_packages(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert command.main(["--version"]) == 0
        names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
        assert {"lockstep-core", "lockstep-sim"} <= set(names)
        assert names == sorted(names)

    def test_version_lists_the_meta_package(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        folder = tmp_path / "lockstep-0.2.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: lockstep\nVersion: 0.2.0\n", encoding="utf-8")
        with patch.object(sys, "path", [str(tmp_path)]):
            assert command.main(["--version"]) == 0
        assert capsys.readouterr().out.split() == ["lockstep", "0.2.0"]

    def test_the_repository_brings_these_commands(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert command.main([]) == 0
        listed = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
        assert {"demo", "journal", "simulate"} <= set(listed)


@pytest.mark.skipif(os.name == "nt", reason="SIGPIPE is a POSIX matter")
@pytest.mark.parametrize("name", ["count", "click-count"])
def test_reader_that_goes_away_ends_the_command_quietly(packages: Path, name: str) -> None:
    process = _start(packages, name)
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline() == "line\n"
    process.stdout.close()
    assert process.wait(timeout=120) == 141
    assert process.stderr.read() == ""
    process.stderr.close()
