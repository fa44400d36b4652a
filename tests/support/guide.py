"""The policy that docs/policies.md explains, as an installed package: its blocks are the files."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "policies.md"


def block(language: str) -> str:
    """The first block of the guide in this language."""
    found = re.search(rf"```{language}\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None, f"{GUIDE} has no block of {language}"
    return found[1]


def install(folder: Path, *, name: str = "", version: str = "", source: str = "") -> None:
    """Lay the guide's package out in `folder` as an installer would; what is given replaces the guide's own."""
    project = tomllib.loads(block("toml"))["project"]
    name, version = name or project["name"], version or project["version"]
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = [f"{entry} = {value}" for entry, value in project["entry-points"]["lockstep.policies"].items()]
    (info / "entry_points.txt").write_text("\n".join(["[lockstep.policies]", *lines, ""]))
    modules = {value.partition(":")[0] for value in project["entry-points"]["lockstep.policies"].values()}
    for module in sorted(modules):
        (folder / f"{module}.py").write_text(source or block("python"))
