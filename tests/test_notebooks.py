"""The notebooks of examples/ run from a fresh interpreter, and hold no outputs of an earlier run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).resolve().parents[1] / "examples").glob("*.ipynb"))

SHOW = """
def _shown(value):
    show = getattr(value, "_repr_html_", None) or getattr(value, "to_json", None)
    assert value is None or show is None or show()
"""
"""What a notebook does with the last value of a cell: its page is made."""


def script_of(notebook: Path) -> str:
    """Return the code cells of a notebook as one program. The last expression of each cell is shown."""
    parts = [SHOW]
    for cell in json.loads(notebook.read_text("utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            lines = "".join(cell["source"]).rstrip().split("\n")
            starts = max(place for place, line in enumerate(lines) if line[:1] not in (" ", ")", "]", "}", ""))
            last = "\n".join(lines[starts:])
            if not last.startswith(("import ", "from ", "for ", "print(")) and "=" not in last.split("(")[0]:
                lines[starts:] = [f"_shown({last})"]
            parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(notebook: Path, tmp_path: Path) -> None:
    script = tmp_path / f"{notebook.stem}.py"
    script.write_text(script_of(notebook), "utf-8")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_there_are_three_notebooks_without_outputs() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["explain_a_slow_request", "size_a_service", "tune_a_scheduler"]
    for path in NOTEBOOKS:
        cells = json.loads(path.read_text("utf-8"))["cells"]
        assert all(not cell["outputs"] and cell["execution_count"] is None for cell in cells if "outputs" in cell)
