"""Conversion of errors into one message and an exit status, without a traceback."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

import click

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


class Refusal(click.ClickException):
    """An invalid request. The message follows the name of the error's type, without a traceback."""

    exit_code = EXIT_USAGE

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.name = type(error).__name__

    def show(self, file: IO[Any] | None = None) -> None:
        """Print the message on stderr."""
        click.echo(f"{self.name}: {self.message}", file=file or sys.stderr)


class Failure(Refusal):
    """A failure of the environment, such as a full disk."""

    exit_code = EXIT_FAILED


@contextmanager
def reading() -> Iterator[None]:
    """Convert errors of a journal that is read into a refusal: the folder that was given is wrong, not the machine."""
    from lockstep.core.journal.records import JournalError

    try:
        yield
    except JournalError as error:
        raise Refusal(error) from error


@contextmanager
def refusals() -> Iterator[None]:
    """Convert errors that carry a message for users into that message and an exit status."""
    try:
        yield
    except BrokenPipeError:  # the reader of the output has closed the pipe; click exits silently
        raise
    except Exception as error:
        from lockstep.core.contract.errors import ConfigError, PolicyError
        from lockstep.core.journal.records import JournalError
        from lockstep.core.journal.replay import Divergence
        from lockstep.sim.cost import CalibrationError, CapacityError, CatalogueError
        from lockstep.sim.workload.workload import WorkloadError

        if isinstance(error, ConfigError | CatalogueError | CapacityError | CalibrationError | WorkloadError):
            raise Refusal(error) from error
        if isinstance(error, JournalError | Divergence | OSError | PolicyError):
            raise Failure(error) from error
        if isinstance(error, MemoryError):
            raise Failure(MemoryError(f"{error}\nhint: lower --limit, --pages or --request-rows")) from error
        raise
