"""What every tool over a journal begins with: the named run, its replay, the names of requests, and how errors are
shown.

RUN is a run folder or the `journal` folder in it; a cluster's run has one journal for each engine, and is asked for one
of them. A `Walk` replays strictly and shows the engine between the steps, so that an explanation can look at what the
scheduler saw, and never has to guess it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

import click
import msgspec

from lockstep.core.contract.commands import Step
from lockstep.core.contract.errors import ConfigError
from lockstep.core.contract.events import ObservedEvent, RequestArrived, RequestId
from lockstep.core.contract.render import Names
from lockstep.core.contract.samples import sample_count, sample_label
from lockstep.core.contract.text import CONTROLS
from lockstep.core.journal.reader import read_journal
from lockstep.core.journal.records import JournalError, JournalHeader
from lockstep.core.journal.replay import Divergence, engine_at_start, fold
from lockstep.host.router_journal import FILE, LeftQueue, has_queue, label_key, left_in_queue, routes_of
from lockstep.sim.workload.turns import WorkloadError

EXIT_UNREADABLE = 2
EXIT_DIVERGED = 3

JSON_CONTROLS = {code: f"\\u{code:04x}" for code in CONTROLS}

RUN = click.argument("run", type=click.Path(path_type=Path))
JSON = click.option("--json", "as_json", is_flag=True, help="One JSON object instead of text.")


class ToolError(click.ClickException):
    """What cannot be read or done, shown in the error's own words, its type's name in front."""

    def __init__(self, error: Exception, exit_code: int = EXIT_UNREADABLE) -> None:
        super().__init__(str(error))
        self.name = type(error).__name__
        self.exit_code = exit_code  # type: ignore[misc]  # of the class in click, of each here

    def show(self, file: IO[Any] | None = None) -> None:
        """Print the message on stderr."""
        click.echo(f"{self.name}: {self.message}", file=file or sys.stderr)


def engine_runs(run: Path) -> list[Path]:
    """The folders of a cluster's engines, by number; none for the run of one engine."""
    engines = [path.parent for path in run.glob("engines/*/journal")] if not (run / "journal").is_dir() else []
    return sorted(engines, key=lambda path: (len(path.name), path.name))


def engine_journal(run: Path) -> Path:
    """The folder of the one journal that `run` names. Raises ConfigError for a cluster's run, which has several."""
    if engines := engine_runs(run):
        names = ", ".join(engine.name for engine in engines)
        raise ConfigError(
            f"`{run}` is the run of a cluster, with a journal for each of its engines {names}\n"
            f"hint: name one of them, such as {run}/engines/{names.split(',')[0]}"
        )
    return run


class Walk:
    """A strict replay, step by step, with its engine and the names of its requests at hand.

    walk = Walk(run)
    for number, event, step in walk:
        walk.engine          # as it stands behind this step
    """

    def __init__(self, run: Path, until: int | None = None, *, strict: bool = True) -> None:
        """Raises JournalError if there is no journal to read, ConfigError if there are several.

        Args:
            until: the step before which it ends.
            strict: compare digests; without, which is a fifth faster, for a run that was simulated a moment ago.
        """
        self.folder = engine_journal(run)
        self._journal = read_journal(self.folder)
        self.header: JournalHeader = self._journal.header
        self.engine = engine_at_start(self._journal)
        self.names = Names()
        self.until = until
        self.strict = strict

    def __iter__(self) -> Iterator[tuple[int, ObservedEvent, Step]]:
        """Raises Divergence at the first decision that is not the recorded one."""
        self.engine, self.names = engine_at_start(self._journal), Names()
        self.engine.digests = self.strict
        folded = fold(self.folder, lambda _: self.engine, until=self.until, strict=self.strict)
        for number, (event, step) in enumerate(folded, self._journal.first_step):
            self.names.observe(event)
            yield number, event, step


def walked(walk: Walk) -> Walk:
    """The same, at its end."""
    for _ in walk:
        pass
    return walk


def locate_request(run: Path, name: str) -> tuple[Path, RequestId] | LeftQueue:
    """The engine of a run that had the request of this name, and its id there; or how it ended in the router's line.

    A number is that of requests.csv, where a simulation wrote it; otherwise the id in the engine.
    Raises: ConfigError if there is none of this name, or several, as ids of a server's engines are each engine's own.
    """
    engines = engine_runs(run)
    if not engines:
        return run, find_request(run, name)
    all_named = [(engine, _named(engine, name)) for engine in engines]
    found = [(engine, request_id) for engine, named in all_named for request_id in named.by_label]
    left = left_in_queue(run) if (run / FILE).is_file() else []
    if not found:
        lost = [one for one in left if one.label == label_key(name, one.tenant)]
        if lost:
            return lost[-1]
        number = _number(name)
        if number is not None and (run / "metrics.json").is_file() and (run / FILE).is_file() and has_queue(run):
            route = routes_of(run, [number]).get(number)
            if route is not None:
                return run / "engines" / str(route.engine), route.own_id
            if lost := [one for one in left if one.request_id == number]:
                return lost[0]
        else:
            found = [(engine, named.by_id) for engine, named in all_named if named.by_id is not None]
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(dict.fromkeys(engine.name for engine, _ in found))
        if len({engine for engine, _ in found}) == 1:
            find_request(found[0][0], name)  # which lists them
        raise ConfigError(
            f"`--request` {name} is the name of a request of each of the engines {names}\n"
            f"hint: name one, such as {found[0][0]}"
        )
    if left:
        those = f"{len(left):,} request{' was' if len(left) == 1 else 's were'} cancelled or turned away"
        raise ConfigError(
            f"`--request` must be the id or the label of a request of this run, got `{name}`\n"
            f"hint: {those} in the router's line and never reached an engine: they are found by their labels"
        )
    raise _no_such_request(name, sum(named.arrived for _, named in all_named))


class _Named(NamedTuple):
    """Requests of a journal that a name may mean, and how many there are."""

    by_label: list[RequestId]
    by_id: RequestId | None
    arrived: int


def _number(name: str) -> int | None:
    """`17` of `17` and `r17`."""
    digits = name.removeprefix("r")
    return int(digits) if digits.isascii() and digits.isdigit() else None


VLLM = "vllm"  # `kind` in the header's `host`
VLLM_LABEL = re.compile(r"(?:\d+_)?(.+)-[0-9a-f]{8}", re.DOTALL)
"""A request id inside of vLLM: the number of the sample if there are several, the client's id, and random digits."""


def clients_id(label: str) -> str:
    """Return the id under which a client of vLLM knows the request of this label."""
    match = VLLM_LABEL.fullmatch(label)
    return match[1] if match else label


def _named(run: Path, name: str) -> _Named:
    by_label: list[RequestId] = []
    by_id, wanted, arrived = None, _number(name), 0
    opened = read_journal(engine_journal(run))
    of_vllm = opened.header.host.get("kind") == VLLM
    for record in opened.events():
        event = record.event
        if not isinstance(event, RequestArrived):
            continue
        for sample in range(sample_count(event)):
            arrived += 1
            if event.request_id + sample == wanted:
                by_id = wanted
            label = sample_label(event.label, sample) if event.label else ""
            if label and (label == name or (of_vllm and clients_id(label) == name)):
                by_label.append(event.request_id + sample)
    return _Named(by_label, by_id, arrived)


def find_request(run: Path, name: str) -> RequestId:
    """The request called `name`: by its label, or by its id as `17` or `r17`. Raises ConfigError if none or several."""
    found, by_id, arrived = _named(run, name)
    if len(found) == 1:
        return found[0]
    if len(found) > 1:
        ids = ", ".join(f"r{request_id}" for request_id in found[:8]) + (", ..." if len(found) > 8 else "")
        raise ConfigError(
            f"`--request` {name} is the label of {len(found)} requests: {ids}\nhint: give one of these ids"
        )
    if by_id is not None:
        return by_id
    raise _no_such_request(name, arrived)


def _no_such_request(name: str, arrived: int) -> ConfigError:
    return ConfigError(
        f"`--request` must be the id or the label of a request of this run, got `{name}`\n"
        f"hint: {arrived:,} requests arrived; `lockstep journal dump RUN` or requests.csv name them"
    )


@contextmanager
def refusals() -> Iterator[None]:
    """Turn the errors that are made for people into one message and an exit status."""
    try:
        with divergences():
            yield
    except (JournalError, ConfigError, WorkloadError) as error:
        raise ToolError(error) from error


@contextmanager
def divergences() -> Iterator[None]:
    """The same of replays that decide otherwise, alone."""
    try:
        yield
    except Divergence as error:
        raise ToolError(error, EXIT_DIVERGED) from error


def print_json(content: object) -> None:
    """One JSON object on stdout."""
    click.echo(json_line(content))


def json_line(content: object) -> str:
    """JSON that a terminal can be shown: it escapes C0 by itself, and here DEL and C1 as well."""
    return msgspec.json.encode(content).decode().translate(JSON_CONTROLS)
