"""hashes.txt: the versions of constraints.txt with hashes, for everything that a server runs except torch."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = {"hatchling", "trove-classifiers"}
"""Packages that build the others."""


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(path: Path) -> dict[str, str]:
    """Version by name."""
    return {normal(name): version for name, version in re.findall(r"^([\w.-]+)==(\S+)", path.read_text(), re.MULTILINE)}


HASHED, CONSTRAINTS = pins(ROOT / "hashes.txt"), pins(ROOT / "constraints.txt")


def test_versions_are_those_that_the_tests_pass_with() -> None:
    assert {name: CONSTRAINTS.get(name) for name in HASHED} == HASHED
    assert set(HASHED) >= BUILD


def test_every_version_has_hashes_and_nothing_else() -> None:
    for block in re.split(r"\n(?=\S)", (ROOT / "hashes.txt").read_text().strip()):
        if not block.startswith("#"):
            first, *lines = block.splitlines()
            assert first.endswith(" \\"), first
            assert lines, first
            for line in lines:
                assert re.fullmatch(r"    --hash=sha256:[0-9a-f]{64}( \\)?", line), line


def test_every_requirement_of_a_served_package_is_there() -> None:
    left_out = {"torch"}
    for package in ("sched-core", "sim", "gpu-runtime", "api"):
        project = tomllib.loads((ROOT / "packages" / package / "pyproject.toml").read_text())["project"]
        extras = project.get("optional-dependencies", {})
        needed = [
            *project.get("dependencies", []),
            *(one for name in ("model", "otel") for one in extras.get(name, [])),
        ]
        for requirement in needed:
            name = normal(re.match(r"[\w.-]+", requirement)[0])  # type: ignore[index]
            assert name in HASHED or name in left_out or name.startswith("lockstep"), requirement
