"""An installed package that a page of docs explains: its blocks are the files. docs/policies.md has a policy."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "policies.md"


def block(language: str, page: Path = GUIDE) -> str:
    """The first block of a page in this language."""
    found = re.search(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None, f"{page} has no block of {language}"
    return found[1]


def install(folder: Path, *, page: Path = GUIDE, name: str = "", version: str = "", source: str = "") -> None:
    """Lay a page's package out in `folder` as an installer would; given files replace those of the page."""
    project = tomllib.loads(block("toml", page))["project"]
    name, version = name or project["name"], version or project["version"]
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    ((group, entries),) = project["entry-points"].items()
    lines = [f"{entry} = {value}" for entry, value in entries.items()]
    (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))
    modules = {value.partition(":")[0] for value in entries.values()}
    for module in sorted(modules):
        (folder / f"{module}.py").write_text(source or block("python", page))
