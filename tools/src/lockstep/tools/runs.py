"""Shared parts of the tools over a journal: the named run, its replay, the names of requests, and error output.

RUN is a run folder or the `journal` folder in it. A cluster's run has one journal for each engine; most tools require
the folder of one engine. A `Walk` replays strictly and exposes the engine between the steps, so that an explanation
reads the state of the scheduler and never has to guess it.
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
from lockstep.core.journal.records import JournalCorrupt, JournalError, JournalHeader
from lockstep.core.journal.replay import Divergence, engine_at_start, fold
from lockstep.host.host_header import VLLM, HostHeader
from lockstep.host.router_journal import (
    LeftQueue,
    has_queue,
    has_router,
    label_key,
    left_in_queue,
    router_parts,
    routes_of,
)
from lockstep.sim.workload.turns import WorkloadError

EXIT_UNREADABLE = 2
EXIT_DIVERGED = 3

JSON_CONTROLS = {code: f"\\u{code:04x}" for code in CONTROLS}

RUN = click.argument("run", type=click.Path(path_type=Path))
JSON = click.option("--json", "as_json", is_flag=True, help="One JSON object instead of text.")


SALVAGE = "hint: `lockstep journal salvage RUN --out DIR` copies everything before it into a new run folder"


class ToolError(click.ClickException):
    """An expected error, printed as its type's name and its message."""

    def __init__(self, error: Exception, exit_code: int = EXIT_UNREADABLE) -> None:
        super().__init__(str(error))
        self.name = type(error).__name__
        self.exit_code = exit_code  # type: ignore[misc]  # a class attribute in click

    def show(self, file: IO[Any] | None = None) -> None:
        """Print the message on stderr."""
        click.echo(f"{self.name}: {self.message}", file=file or sys.stderr)


def engine_runs(run: Path) -> list[Path]:
    """Return the folders of a cluster's engines, by number; empty for the run of one engine."""
    engines = [path.parent for path in run.glob("engines/*/journal")] if not (run / "journal").is_dir() else []
    return sorted(engines, key=lambda path: (len(path.name), path.name))


def router_runs(run: Path) -> list[Path]:
    """Return the folders of a cluster's run that hold the journal of a router.

    There are none for the run of one engine, and for the data-parallel engines of a vLLM: its front end distributes the
    requests and keeps no journal.
    """
    engines = engine_runs(run)
    if not engines or HostHeader.of(read_journal(engines[0]).header).kind == VLLM:
        return []
    return router_parts(run)


def engine_journal(run: Path) -> Path:
    """Return `run` if it has one journal. Raises ConfigError for a cluster's run, which has several."""
    if engines := engine_runs(run):
        names = ", ".join(engine.name for engine in engines)
        raise ConfigError(
            f"`{run}` is the run of a cluster, with a journal for each of its engines {names}\n"
            f"hint: name one of them, such as {run}/engines/{names.split(',')[0]}"
        )
    return run


class Walk:
    """A strict replay, step by step, with its engine and the names of its requests.

    walk = Walk(run)
    for number, event, step in walk:
        walk.engine          # in its state after this step
    """

    def __init__(self, run: Path, until: int | None = None, *, strict: bool = True) -> None:
        """Open a journal. Raises JournalError if it cannot be read, ConfigError if there are several.

        Args:
            until: the step before which the replay ends.
            strict: compare digests. Without, the replay is a fifth faster, for a run that was just simulated.
        """
        self.folder = engine_journal(run)
        self._journal = read_journal(self.folder)
        self.header: JournalHeader = self._journal.header
        self.engine = engine_at_start(self._journal)
        self.names = Names()
        self.until = until
        self.strict = strict

    @property
    def first_step(self) -> int:
        """The number of the first step that has not expired."""
        return self._journal.first_step

    def __iter__(self) -> Iterator[tuple[int, ObservedEvent, Step]]:
        """Yield number, event and Step. Raises Divergence at the first decision that differs from the recorded one."""
        self.engine, self.names = engine_at_start(self._journal), Names()
        self.engine.digests = self.strict
        folded = fold(self.folder, lambda _: self.engine, until=self.until, strict=self.strict)
        for number, (event, step) in enumerate(folded, self._journal.first_step):
            self.names.observe(event)
            yield number, event, step


def walked(walk: Walk) -> Walk:
    """Replay a walk to its end and return it."""
    for _ in walk:
        pass
    return walk


def locate_request(run: Path, name: str) -> tuple[Path, RequestId] | LeftQueue:
    """Return the engine folder and the id of the request with this name, or its record in the router's queue.

    A number is an id of requests.csv if a simulation wrote the run; otherwise an id of an engine.
    Raises: ConfigError if no request, or several requests have the name: engines of a server number their requests
        independently.
    """
    engines = engine_runs(run)
    if not engines:
        return run, find_request(run, name)
    all_named = [(engine, _named(engine, name)) for engine in engines]
    found = [(engine, request_id) for engine, named in all_named for request_id in named.by_label]
    left = left_in_queue(run) if has_router(run) else []
    if not found:
        lost = [one for one in left if one.label == label_key(name, one.tenant)]
        if lost:
            return lost[-1]
        number = _number(name)
        if number is not None and (run / "metrics.json").is_file() and has_router(run) and has_queue(run):
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
            find_request(found[0][0], name)  # raises with a list of them
        raise ConfigError(
            f"`--request` {name} is the name of a request of each of the engines {names}\n"
            f"hint: name one, such as {found[0][0]}"
        )
    if left:
        ended = f"{len(left):,} request{' was' if len(left) == 1 else 's were'} cancelled or rejected"
        raise ConfigError(
            f"`--request` must be the id or the label of a request of this run, got `{name}`\n"
            f"hint: {ended} in the router's queue and never reached an engine: they are found by their labels"
        )
    raise _no_such_request(name, sum(named.arrived for _, named in all_named))


class _Named(NamedTuple):
    """The requests of a journal with a name, and the number of all its requests."""

    by_label: list[RequestId]
    by_id: RequestId | None
    arrived: int


def _number(name: str) -> int | None:
    """Return the id in `17` or `r17`; None for other text."""
    digits = name.removeprefix("r")
    return int(digits) if digits.isascii() and digits.isdigit() else None


VLLM_ENDPOINTS = ("chatcmpl", "cmpl", "embd", "pooling", "classify", "score")
"""The first parts of vLLM's request ids; all but those of `chatcmpl` end with the number of the prompt."""
VLLM_LABEL = re.compile(r"(?:\d+_)?(.+)-[0-9a-f]{8}", re.DOTALL)
"""A request id inside of vLLM: the number of the sample if there are several, the client's id, and random digits."""


def clients_ids(label: str) -> set[str]:
    """Return the names that a client of vLLM has for the request of this label.

    These are the id of the answer, for /v1/completions with and without the number of the prompt, and what the client
    sent as X-Request-Id, or vLLM drew in its place. For `cmpl-mine-0-1a2b3c4d`: `cmpl-mine-0`, `cmpl-mine`, `mine`.
    """
    match = VLLM_LABEL.fullmatch(label)
    if match is None:
        return {label}
    endpoint, _, rest = match[1].partition("-")
    if endpoint not in VLLM_ENDPOINTS:
        return {match[1]}
    names = {match[1], rest}
    whole, _, number = rest.rpartition("-")
    if endpoint != "chatcmpl" and whole and number.isdigit():
        names |= {f"{endpoint}-{whole}", whole}
    return names


def _named(run: Path, name: str) -> _Named:
    by_label: list[RequestId] = []
    by_id, wanted, arrived = None, _number(name), 0
    opened = read_journal(engine_journal(run))
    of_vllm = HostHeader.of(opened.header).kind == VLLM
    for record in opened.events():
        event = record.event
        if not isinstance(event, RequestArrived):
            continue
        for sample in range(sample_count(event)):
            arrived += 1
            if event.request_id + sample == wanted:
                by_id = wanted
            label = sample_label(event.label, sample) if event.label else ""
            if label and (label == name or (of_vllm and name in clients_ids(label))):
                by_label.append(event.request_id + sample)
    return _Named(by_label, by_id, arrived)


def find_request(run: Path, name: str) -> RequestId:
    """Return the request with the label `name`, or with this id as `17` or `r17`. Raises ConfigError if not unique."""
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
        f"hint: {arrived:,} requests arrived; `lockstep journal dump RUN` or requests.csv lists them"
    )


@contextmanager
def refusals() -> Iterator[None]:
    """Turn expected errors into one message and an exit status."""
    try:
        with divergences():
            yield
    except (JournalError, ConfigError, WorkloadError) as error:
        if isinstance(error, JournalCorrupt) and "\nhint: " not in str(error):
            error.args = (f"{error}\n{SALVAGE}",)
        raise ToolError(error) from error


@contextmanager
def divergences() -> Iterator[None]:
    """Turn Divergence alone into one message and an exit status."""
    try:
        yield
    except Divergence as error:
        raise ToolError(error, EXIT_DIVERGED) from error


def print_json(content: object) -> None:
    """Print one JSON object on stdout."""
    click.echo(json_line(content))


def json_line(content: object) -> str:
    """Return JSON that is safe in a terminal: with DEL and C1 characters escaped, in addition to C0."""
    return msgspec.json.encode(content).decode().translate(JSON_CONTROLS)
