"""`lockstep explain` as a function for scripts and notebooks, which the package `lockstep` exports."""

from __future__ import annotations

import io
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.core.contract.errors import ConfigError
from lockstep.sim.interface.options import config_errors
from lockstep.sim.interface.page import HtmlPage
from lockstep.sim.interface.runs import RunFolder
from lockstep.sim.report.parts import escape
from lockstep.tools.explain import explain as command


@dataclass(frozen=True)
class Explanation:
    """The reasons that the scheduler recorded with its decisions."""

    text: str
    page: HtmlPage | None = field(repr=False)  # with a picture of the times; None for a step or a state

    def __str__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return f"<pre>{escape(self.text)}</pre>" if self.page is None else self.page._repr_html_()


def explain(
    run: RunFolder | str | Path,
    *,
    request: int | str | None = None,
    slowest: tuple[str, int] | None = None,
    step: int | None = None,
    at: int | str | None = None,
) -> Explanation:
    """Explain the times of a request, the waits of the slowest requests, the decisions of a step, or a state.

    Args:
        run: a run with a journal: `simulate(..., journal=True)`, a folder of `lockstep serve --journal` or of vLLM.
        request: a request by number or label.
        slowest: a metric, ttft, tpot, e2e or itl, and a number of requests.
        step: the number of a step.
        at: "end", or the number of a step, before which the state is shown.
    Raises: ConfigError if not exactly one of them is given, or the run has no journal or no such request.
    """
    folder = run.folder if isinstance(run, RunFolder) else Path(run)
    if isinstance(run, RunFolder) and not any(folder.glob("**/journal")):
        raise ConfigError(f"`{folder}` has no journal\nhint: simulate with journal=True, or with out=FOLDER")
    given: dict[str, Any] = {"--request": request, "--step": step, "--at": at, "--slowest": slowest}
    words = [str(folder)]
    for flag, value in given.items():
        if value is not None:
            words += [flag, *(map(str, value) if isinstance(value, tuple) else (str(value),))]
    with (
        tempfile.TemporaryDirectory() as name,
        redirect_stdout(io.StringIO()) as printed,
        redirect_stderr(io.StringIO()),
        config_errors(),
    ):
        path = Path(name) / "page.html"
        pictured = request is not None or slowest is not None
        command.main([*words, *(["--html", str(path)] if pictured else [])], standalone_mode=False)
        page = HtmlPage(f"explain {folder}", path.read_text("utf-8")) if path.is_file() else None
    return Explanation(printed.getvalue(), page)
