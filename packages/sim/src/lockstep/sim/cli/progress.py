"""A progress bar on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.progress import Progress

LINE_EVERY_S = 10.0  # between two lines about progress where stderr is not a terminal


class ProgressLines:
    """Prints a line on stderr at most every LINE_EVERY_S seconds, the first one after that time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began_s = self._last_s = clock()

    def line(self, text: str) -> None:
        """Print the text with the time since the beginning, if it is time."""
        now_s = self._clock()
        if now_s - self._last_s >= LINE_EVERY_S:
            self._last_s = now_s
            click.echo(f"{text}, {now_s - self._began_s:.0f} s", err=True)


@contextmanager
def terminal_bar(*, remaining: bool = False) -> Iterator[Progress | None]:
    """Show a progress bar until the block ends; yield None if stderr is not a terminal.

    The caller adds the bar's tasks and their texts. The bar is removed at the end.

    Args:
        remaining: show the remaining time instead of the elapsed time.
    """
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    clock = TimeRemainingColumn() if remaining else TimeElapsedColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), clock)
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        yield bar
