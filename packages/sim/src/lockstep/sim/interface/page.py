"""A page of HTML, shown inline by a notebook."""

from __future__ import annotations

import tempfile
import webbrowser
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.sim.report.parts import escape

PAGE_HEIGHT = 720
"""Height of a report inside a notebook, in CSS pixels."""


@dataclass(frozen=True)
class HtmlPage:
    """A page of HTML that needs no other file."""

    title: str
    text: str = field(repr=False)

    def save(self, path: str | Path) -> Path:
        """Write the page, and return its path."""
        path = Path(path)
        path.write_text(self.text, "utf-8", newline="\n")
        return path

    def open(self) -> None:
        """Show the page in a browser. The file stays in the folder for temporary files."""
        with tempfile.NamedTemporaryFile("w", suffix=".html", delete=False, encoding="utf-8") as file:
            file.write(self.text)
        webbrowser.open(Path(file.name).as_uri())

    def _repr_html_(self) -> str:
        page = escape(self.text)
        style = f"width: 100%; height: {PAGE_HEIGHT}px; border: 0"
        return f'<iframe title="{escape(self.title)}" srcdoc="{page}" style="{style}"></iframe>'
