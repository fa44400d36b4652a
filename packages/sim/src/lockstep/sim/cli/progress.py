"""A bar on stderr, for commands that take a while."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress


@contextmanager
def terminal_bar(*, remaining: bool = False) -> Iterator[Progress | None]:
    """A bar that is gone at the end; None where stderr is no terminal. Its tasks and their texts are the caller's.

    Args:
        remaining: show the time that is left instead of the time that has passed.
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
