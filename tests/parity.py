"""docs/parity.md: where each mechanism is decided, simulated, executed and reachable, and the test that guards it.

    python -m tests.parity                    write docs/parity.md
    python -m tests.parity --check            take each mechanism out, in a copy; its test must fail, and pass with it
    python -m tests.parity --check NAME ...   the same for some of them
    python -m tests.parity --commands         run the commands, and keep a line that each of them printed

A mechanism is marked in the sources by comments above the functions and classes that decide, simulate and execute it:

    # mechanism: bypass-limit (decided)
    def _urgent_first(self, ...):

`tests/data/parity.toml` has the rest of its row: what it is, a command, the test, and the statement with which the
deciding function returns early when the mechanism is taken out. Where the simulator or the server runs the scheduler
itself, without code for this mechanism, the row has `simulated = "core"` or `executed = "core"`; where a place is left
out, it has the reason. `tests/test_parity.py` checks that the page and everything in it is current.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import click
from click.testing import CliRunner

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "parity.md"
ROWS = ROOT / "tests" / "data" / "parity.toml"
PRINTED = ROOT / "tests" / "data" / "parity_printed.json"
MARK = re.compile(r"^\s*# mechanism: ([a-z0-9-]+) \((decided|simulated|executed)\)$")
MARK_LIKE = re.compile(r"#\s*mechanism\s*:")
PLACES = ("decided", "simulated", "executed")
COMMAND_S = 300.0
HEAD = """# Parity

Every mechanism of the scheduler and of the server around it: where it is decided, simulated and executed, how a user
reaches it, and the test that fails when it is taken out. `python -m tests.parity` writes this page from marks in the
sources (`# mechanism: NAME (decided)`) and from `tests/data/parity.toml`; `tests/test_parity.py` checks that it is
current, and that every file, function, option and test in it exists. `make parity` takes each mechanism out, one after
the other, by letting its deciding function return early in a copy of the packages, and requires that its test fails
there and passes with it.

*The core*: the simulator, or the server, runs the scheduler itself, without code of its own for this mechanism. `...`
in a command stands for `--model qwen3-8b --gpu h100 --no-intervals`; a request is sent to `lockstep serve --emulate
qwen3-0.6b@h200` with the options in front of it. The line below a command is what it printed.
"""


@dataclass(frozen=True)
class Place:
    """A function or class with a mark."""

    path: str  # relative to the root of the repository
    symbol: str  # qualified name

    def __str__(self) -> str:
        short = re.sub(r"^(packages/[^/]+|tools)/src/lockstep/", "", self.path)
        return f"`{short}: {self.symbol}`"


@dataclass
class Mechanism:
    """One row of the table."""

    name: str
    what: str
    group: str
    command: str
    shows: str  # regular expression of the line of the command's output that the page quotes
    test: str
    out: str  # statement with which the deciding function begins when the mechanism is taken out
    out_at: str = ""  # PATH: SYMBOL of another function that returns early instead
    simulated: str = ""  # "core", or why it is not simulated
    executed: str = ""  # "core", or why it is not executed
    places: dict[str, list[Place]] = field(default_factory=lambda: defaultdict(list))

    @property
    def removed(self) -> Place:
        """The function that returns early when the mechanism is taken out."""
        if self.out_at:
            path, _, symbol = self.out_at.partition(": ")
            return Place(path, symbol)
        return self.places["decided"][0]

    def place(self, where: str) -> str:
        """Return the cell of the table for a place."""
        if found := self.places.get(where):
            return ", ".join(map(str, found))
        return {"core": "the core", "": "missing"}.get(reason := getattr(self, where, ""), f"no: {reason}")


def sources() -> Iterator[Path]:
    """Yield the Python files of all packages."""
    for folder in sorted([*ROOT.glob("packages/*/src"), *ROOT.glob("tools/src")]):
        yield from sorted(folder.rglob("*.py"))


def marks_of(path: Path) -> Iterator[tuple[str, str, Place]]:
    """Yield name, place and symbol of the marks of a file. Raises ValueError for a mark above no function or class."""
    text = path.read_text(encoding="utf-8")
    if not MARK_LIKE.search(text):
        return
    relative = path.relative_to(ROOT).as_posix()
    at = dict(_symbols(ast.parse(text).body, ""))
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        if not MARK_LIKE.search(line):
            continue
        found = MARK.match(line)
        if found is None:
            raise ValueError(f"{relative}:{number}: not a mark: {line.strip()}")
        below = number + 1
        while below <= len(lines) and MARK.match(lines[below - 1]):
            below += 1
        if below not in at:
            raise ValueError(f"{relative}:{number}: the mark is above no function or class")
        yield found[1], found[2], Place(relative, at[below])


def _symbols(body: list[ast.stmt], inside: str) -> Iterator[tuple[int, str]]:
    """Yield first line, decorators included, and qualified name of all functions and classes."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
            yield first, inside + node.name
            if isinstance(node, ast.ClassDef):
                yield from _symbols(node.body, f"{inside}{node.name}.")


LEFT_OUT = "Left out"


def left_out() -> dict[str, str]:
    """Return what other engines have and this one has not, with the reasons."""
    given: dict[str, str] = tomllib.loads(ROWS.read_text(encoding="utf-8"))[LEFT_OUT]
    return given


@cache
def mechanisms() -> dict[str, Mechanism]:
    """Return all rows by name, in their order. Raises ValueError for a mark without a row."""
    given = tomllib.loads(ROWS.read_text(encoding="utf-8"))
    rows = {
        name: Mechanism(name=name, group=group, **row)
        for group, mine in given.items()
        if group != LEFT_OUT
        for name, row in mine.items()
    }
    for path in sources():
        for name, where, place in marks_of(path):
            if name not in rows:
                raise ValueError(f"{place.path}: {place.symbol} is marked as {name}, which has no row in {ROWS.name}")
            rows[name].places[where].append(place)
    return rows


def page() -> str:
    """Return docs/parity.md."""
    printed = json.loads(PRINTED.read_text(encoding="utf-8")) if PRINTED.exists() else {}
    text, rows = [HEAD], mechanisms()
    for group in dict.fromkeys(one.group for one in rows.values()):
        text.append(f"## {group}\n")
        text.append("| mechanism | decided | simulated | executed | test |\n|---|---|---|---|---|")
        mine = [one for one in rows.values() if one.group == group]
        for one in mine:
            cells = (f"**{one.name}**: {one.what}", *map(one.place, PLACES), f"`{one.test}`")
            text.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        text.append("\n```")
        for one in mine:
            text.append(f"{one.command}    # {one.name}")
            if line := printed.get(one.name):
                text.append(f"    {line}")
        text.append("```\n")
    text.append("## Left out\n\n| what | reason |\n|---|---|")
    text += [f"| {what} | {reason} |" for what, reason in left_out().items()]
    return "\n".join(text) + "\n"


# ------------------------------------------------------------------------------------------------------ taking them out


def copied(folder: Path) -> Path:
    """Copy the packages into one namespace, as an installation has them."""
    for source in sorted([*ROOT.glob("packages/*/src/lockstep"), *ROOT.glob("tools/src/lockstep")]):
        shutil.copytree(
            source, folder / "lockstep", dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__", "*.pyc")
        )
    return folder


def taken_out(text: str, symbol: str, statement: str) -> str:
    """Return a source in which a function begins with a statement. Raises ValueError if it has no such function."""
    body: list[ast.stmt] = ast.parse(text).body
    node: ast.stmt | None = None
    for name in symbol.split("."):
        found = [one for one in body if getattr(one, "name", None) == name]
        if not found:
            raise ValueError(f"there is no {symbol}")
        node = found[-1]
        body = node.body if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) else []
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        raise ValueError(f"{symbol} is no function")
    first = node.body[1] if ast.get_docstring(node) is not None and len(node.body) > 1 else node.body[0]
    lines = text.splitlines(keepends=True)
    lines.insert(first.lineno - 1, f"{' ' * first.col_offset}{statement}\n")
    return "".join(lines)


def run_test(copy: Path, test: str) -> subprocess.CompletedProcess[str]:
    """Run a test of the repository on the packages of a copy."""
    words = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", test]
    env = {**os.environ, "PYTHONPATH": str(copy)}
    return subprocess.run(words, env=env, cwd=ROOT, capture_output=True, text=True, check=False)


def check(names: list[str]) -> int:
    """Take mechanisms out. Return the number of those whose test does not notice, or fails with the mechanism, too."""
    unnoticed = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = copied(Path(folder))
        for one in mechanisms().values():
            if names and one.name not in names:
                continue
            at = one.removed
            path = copy / "lockstep" / re.sub(r"^.*?/src/lockstep/", "", at.path)
            text = path.read_text(encoding="utf-8")
            passes = run_test(copy, one.test)
            path.write_text(taken_out(text, at.symbol, one.out), encoding="utf-8")
            fails = run_test(copy, one.test)
            path.write_text(text, encoding="utf-8")
            noticed = passes.returncode == 0 and fails.returncode == 1
            unnoticed += not noticed
            print(f"{'noticed' if noticed else 'NOT NOTICED':12} {one.name:24} {at.symbol}: {one.out}", flush=True)
            if not noticed:
                print(f"    with it: status {passes.returncode}; without it: status {fails.returncode}; {one.test}")
    return unnoticed


# ------------------------------------------------------------------------------------------------------------- commands


def typed(command: str) -> str:
    """Return a command as it is run: `...` spelt out, `lockstep` of this environment."""
    command = command.replace(" ... ", " --model qwen3-8b --gpu h100 --no-intervals ")
    if command.endswith(" ..."):
        command = command[:-4] + " --model qwen3-8b --gpu h100 --no-intervals"
    return command


def served_options(command: str) -> tuple[list[str], str]:
    """Split `[serve OPTIONS] curl ...` into the options of its server and the request."""
    found = re.fullmatch(r"\[serve([^\]]*)\] (.*)", command, re.DOTALL)
    return (shlex.split(found[1]), found[2]) if found else ([], command)


KEYS = "[[keys]]\ntenant = 'operator'\nkey = 'sk-a-key-of-an-operator'\nadmin = true\n"


def run_commands(names: list[str]) -> int:
    """Run the commands and keep the lines that they show. Return the number of those that show nothing."""
    printed = json.loads(PRINTED.read_text(encoding="utf-8")) if PRINTED.exists() else {}
    missing = 0
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "120"}
        for one in mechanisms().values():
            if names and one.name not in names:
                continue
            where = Path(folder) / one.name
            where.mkdir()
            try:
                said = _output(one.command, where, env)
            except AssertionError as error:  # the server did not start
                said = str(error)
            if line := quoted(said, one.shows):
                printed[one.name] = line
            else:
                missing += 1
                print(f"{one.name}: no line with {one.shows!r} in\n{said[-1500:]}", file=sys.stderr)
    kept = {name: printed[name] for name in mechanisms() if name in printed}
    PRINTED.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return missing


def quoted(said: str, shows: str) -> str:
    """Return the first line with a match, without frames; of JSON only the match. Empty if no line has one."""
    for line in said.splitlines():
        if found := re.search(shows, line):
            text = found[0] if line.startswith("{") else line
            return re.sub(r"\s{2,}", "  ", re.sub("[│┃]", " ", text).strip())[:160]
    return ""


def _output(command: str, folder: Path, env: dict[str, str]) -> str:
    """Return what a command prints, on both streams; of a request, what the server answers."""
    if "curl" not in command:
        _, name, *words = shlex.split(typed(command))
        os.chdir(folder)
        return CliRunner(env=env).invoke(command_of(name), words, prog_name=f"lockstep {name}").output
    from tests.support.live_server import EMULATED, serving

    options, request = served_options(command)
    options = [word.replace("FOLDER", str(folder)) for word in options]
    (folder / "keys.toml").write_text(KEYS)
    with serving(folder / "log", *([] if "--device" in options else EMULATED), *options) as server:
        request = request.replace("http://127.0.0.1:8000", server.url).replace("FOLDER", str(folder))
        return _shell(request, folder, env)


def command_of(name: str) -> click.Command:
    """Return a command of `lockstep`."""
    if name == "serve":
        from lockstep.api.serve import serve

        return serve
    from lockstep.sim.cli.plan import plan
    from lockstep.sim.cli.simulate import simulate

    return {"simulate": simulate, "plan": plan}[name]


def _shell(command: str, folder: Path, env: dict[str, str]) -> str:
    """Return what a line of the shell prints, on both streams."""
    words = ["bash", "-c", command]
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=COMMAND_S, check=False)
    return done.stdout + done.stderr


def main() -> int:
    """Do what the arguments name."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="take mechanisms out")
    parser.add_argument("--commands", action="store_true", help="run the commands")
    parser.add_argument("names", nargs="*", help="mechanisms; all without any")
    given = parser.parse_args()
    wrong = 0
    if given.check:
        wrong += check(given.names)
    if given.commands:
        wrong += run_commands(given.names)
    if not given.check:
        PAGE.write_text(page(), encoding="utf-8")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
