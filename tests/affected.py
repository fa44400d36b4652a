"""Run the tests that a change may affect.

    python3 dev.py test --affected                 files that differ from `main`, uncommitted ones too
    python3 dev.py test --affected --base HEAD~3   from another commit
    python3 dev.py test --affected --list          name the test files and the reasons, run nothing
    python3 dev.py test --affected --record        record what each test file runs: the suite once, under coverage

A test file is affected if it imports a changed module, itself or through others. A test file that starts processes may
run any module, so it is affected by each. A changed file that is no module (a scenario, a page, a table) affects the
test files that name it or its folder. What all tests depend on (`conftest.py`, `pyproject.toml`, pinned versions)
affects all.

A record narrows this down: a recorded test file is affected only if a function that it has run, in whichever process,
or the rest of a module that it has imported, is another one now.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from hashlib import blake2b
from pathlib import Path

import coverage

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / ".mutants/affected.json"
SOURCES = ("packages/*/src", "tools/src")
OTHERS = ("tests", "benchmarks", "examples")
EVERYTHING = ("tests/conftest.py", "pyproject.toml", "constraints.txt")
STARTS_PROCESSES = ("sys.executable", "Popen(")  # texts of tests that run commands of the product
INTERFACE = "lockstep"  # the package whose attributes are the functions of the commands
REST = "the rest of the module"

Digests = dict[str, dict[str, str]]  # by file and function


# ---------------------------------------------------------------------------------------------------------- the imports


@cache
def modules() -> dict[str, str]:
    """Return every module of the repository, by name: its path relative to the root."""
    found: dict[str, str] = {}
    roots = [(folder, folder) for pattern in SOURCES for folder in ROOT.glob(pattern)]
    roots += [(ROOT, ROOT / name) for name in OTHERS]
    for base, folder in roots:
        for path in folder.rglob("*.py"):
            name = ".".join(path.relative_to(base).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = path.relative_to(ROOT).as_posix()
    return found


def imported_by(path: str, *, typing: bool = False) -> set[str]:
    """Return the names that a file imports, anywhere in it. `typing`: those for type checkers, not the others."""
    found: set[str] = set()
    waiting: list[tuple[ast.AST, bool]] = [(ast.parse(_text(path)), False)]
    while waiting:
        node, guarded = waiting.pop()
        if isinstance(node, ast.Import) and guarded == typing:
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level and guarded == typing:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            guarded = True
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            inner = getattr(node, name, ())
            waiting += [(one, guarded) for one in inner] if isinstance(inner, list) else []
    return found


@cache
def graph() -> dict[str, set[str]]:
    """Return the files that each file imports, packages around them included."""
    known = modules()
    found: dict[str, set[str]] = {}
    for path in known.values():
        names = imported_by(path)
        if INTERFACE in names:  # its functions are imported by name when they are used
            names |= imported_by(known[INTERFACE], typing=True)
        files = {known[name] for name in names if name in known}
        for name in names:
            parts = name.split(".")
            files.update(known[one] for i in range(1, len(parts)) if (one := ".".join(parts[:i])) in known)
        found[path] = files
    return found


@cache
def reached(path: str) -> frozenset[str]:
    """Return a file and everything that it imports, itself or through others."""
    seen, waiting = {path}, [path]
    while waiting:
        for one in graph().get(waiting.pop(), ()):
            if one not in seen:
                seen.add(one)
                waiting.append(one)
    return frozenset(seen)


def files_of_tests() -> list[str]:
    """Return all test files."""
    return sorted(
        path for path in modules().values() if path.startswith("tests/") and Path(path).name.startswith("test_")
    )


# ------------------------------------------------------------------------------------------------------------ selection


def changed_since(base: str) -> list[str]:
    """Return the files that differ from the point at which this branch left `base`, untracked ones included."""

    def git(*arguments: str) -> list[str]:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"`--base` must name a commit, got `{base}`: {done.stderr.strip()}")
        return done.stdout.splitlines()

    (fork,) = git("merge-base", base, "HEAD")
    return sorted({*git("diff", "--name-only", fork), *git("ls-files", "--others", "--exclude-standard")})


def affected(changed: Iterable[str], record: dict[str, Digests]) -> dict[str, str]:
    """Return the affected test files, each with the reason.

    Args:
        record: by test file, what it has run; see `recorded`.
    """
    changed = list(changed)
    everything = next((path for path in changed if path in EVERYTHING), "")
    found: dict[str, str] = {}
    now = _Now()
    for test in files_of_tests():
        if everything:
            found[test] = everything
        elif test in record:
            why = now.difference(record[test]) or next((path for path in changed if _is_named(path, test)), "")
            if test in changed or why:
                found[test] = why or "itself"
        elif why := next((path for path in changed if _concerns(path, test)), ""):
            found[test] = why
    return found


def _concerns(path: str, test: str) -> bool:
    """Whether a changed file may affect a test file, judged by imports and names."""
    files = reached(test)
    if path in files:
        return True
    product = path.endswith(".py") and not path.startswith(OTHERS)
    if product and _starts_processes(test):
        return True
    return _is_named(path, test)


@cache
def _starts_processes(test: str) -> bool:
    """Whether a test file, or a file of tests that it imports, runs commands."""
    texts = (_text(one) for one in reached(test) if one.startswith("tests/") and one != "tests/affected.py")
    return any(mark in text for text in texts for mark in STARTS_PROCESSES)


def _is_named(path: str, test: str) -> bool:
    """Whether the test file, or a file of tests that it imports, names a file that is no module, or its folder."""
    if path.endswith(".py"):
        return False
    names = [Path(path).name, *(f'"{part}"' for part in Path(path).parent.parts), f"{Path(path).parent.as_posix()}/"]
    texts = (_text(one) for one in reached(test) if one.startswith("tests/"))
    return any(name in text for text in texts for name in names if name not in ("./", '"tests"', "tests/"))


@cache
def _text(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


# --------------------------------------------------------------------------------------------------------------- record


def functions_of(source: str) -> dict[str, tuple[range, str]]:
    """Return the lines and the digest of each function of a module, by name, and of `REST`."""
    found: dict[str, tuple[range, str]] = {}

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for statement in body:
            if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = range(statement.body[0].lineno, (statement.end_lineno or statement.lineno) + 1)
                found[f"{prefix}{statement.name}"] = lines, _digest(ast.dump(ast.Module(statement.body, [])))
                statement.body = []
            elif isinstance(statement, ast.ClassDef):
                visit(statement.body, f"{prefix}{statement.name}.")

    tree = ast.parse(source)
    visit(tree.body, "")
    found[REST] = range(0), _digest(ast.dump(tree))
    return found


def _digest(text: str) -> str:
    return blake2b(text.encode(), digest_size=8).hexdigest()


class _Now:
    """The functions of the files as they are now."""

    def __init__(self) -> None:
        self._files: dict[str, dict[str, str]] = {}

    def difference(self, recorded: Digests) -> str:
        """Return what a test file has run and is another one now; empty: nothing."""
        for path, functions in recorded.items():
            if path not in self._files:
                there = (ROOT / path).exists()
                own = functions_of(_text(path)) if there else {}
                self._files[path] = {name: digest for name, (_, digest) in own.items()}
            now = self._files[path]
            for name, digest in functions.items():
                if now.get(name) != digest:
                    return f"{path}: {name}"
        return ""


def recorded(test: str, folder: Path) -> Digests | None:
    """Run a test file under coverage, the processes that it starts too. Returns what was run; None: it failed."""
    settings, data = folder / "settings", folder / "data"
    sources = ",".join(str(one) for pattern in SOURCES for one in ROOT.glob(pattern))
    settings.write_text(
        f"[run]\ndata_file = {data}\nparallel = true\npatch = subprocess\nsource = {sources},{ROOT / 'tests'}\n"
    )
    command = [sys.executable, "-m", "coverage", "run", f"--rcfile={settings}", "-m", "pytest", "-q", test]
    if subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode not in (0, 5):
        return None
    combined = coverage.CoverageData(str(folder / "combined"))
    for part in folder.glob("data.*"):
        one = coverage.CoverageData(str(part))
        one.read()
        combined.update(one)
    found: Digests = {}
    for name in sorted(combined.measured_files()):
        path = Path(name).relative_to(ROOT).as_posix()
        lines = set(combined.lines(name) or ())
        if lines:
            functions = functions_of(_text(path)).items()
            found[path] = {one: digest for one, (own, digest) in functions if one == REST or not lines.isdisjoint(own)}
    return found


def read_record() -> dict[str, Digests]:
    """Return the record; empty if there is none."""
    kept: dict[str, Digests] = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    return kept


def make_record(tests: Iterable[str]) -> Iterator[str]:
    """Record test files, one after the other. Yields the name of each that fails."""
    from tempfile import TemporaryDirectory

    kept = read_record()
    RECORD.parent.mkdir(exist_ok=True)
    for test in tests:
        with TemporaryDirectory() as folder:
            found = recorded(test, Path(folder))
        if found is None:
            kept.pop(test, None)
            yield test
        else:
            kept[test] = found
        RECORD.write_text(json.dumps(kept))


def main() -> int:
    """Run the command line; arguments that are none of these are options of pytest."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="main", help="commit or branch that the change is compared with")
    parser.add_argument("--list", action="store_true", help="name the test files and the reasons, run nothing")
    parser.add_argument("--record", action="store_true", help="run all test files, or the named ones, and record them")
    asked, arguments = parser.parse_known_args()
    if asked.record:
        named = [one for one in arguments if one in files_of_tests()]
        failed = list(make_record(named or files_of_tests()))
        for test in failed:
            print(f"{test} failed and is not recorded")
        return 1 if failed else 0
    chosen = affected(changed_since(asked.base), read_record())
    print(
        f"{len(chosen)} of {len(files_of_tests())} test files are affected by the change since {asked.base}", flush=True
    )
    if asked.list:
        for test, why in chosen.items():
            print(f"  {test}: {why}")
    if asked.list or not chosen:
        return 0
    pytest = [sys.executable, "-m", "pytest", *arguments, *chosen]
    return subprocess.call(pytest, cwd=ROOT, env=os.environ)


if __name__ == "__main__":
    sys.exit(main())
