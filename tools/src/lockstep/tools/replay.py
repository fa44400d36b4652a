"""`lockstep replay`: a strict replay of a journal, whole, up to a step or a break, or interactively step by step.

Argument parsing, the prompt and its output. Steps are taken in stepping.py, conditions are parsed in conditions.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import click

from lockstep.core.contract.errors import ConfigError
from lockstep.core.contract.events import ClockAdvanced, HostTimeClamped, LaneReady
from lockstep.core.contract.render import decided_line, observed_line, plan_lines, stats_text
from lockstep.core.journal.reader import read_journal
from lockstep.core.journal.replay import Divergence, event_line
from lockstep.core.scheduler.state_text import (
    adapter_lines,
    in_flight_lines,
    page_owner_lines,
    pages_line,
    queue_line,
    session_lines,
    table_lines,
    tree_lines,
)
from lockstep.host.options import Option, options_of, take, with_flags
from lockstep.tools.conditions import Condition
from lockstep.tools.decision_text import decision_of, decisions_text, exact_text
from lockstep.tools.drift import state_lines
from lockstep.tools.journal import print_divergence, verify_all, verify_run
from lockstep.tools.narration import clock
from lockstep.tools.runs import EXIT_DIVERGED, RUN, Walk, engine_journal, print_json, refusals
from lockstep.tools.stepping import Stepper, TakenStep
from lockstep.tools.why_step import short_plan, why_step

HELP = """step [N], back [N]      move N steps forward or back (1)
goto N                  move before step N
continue [COND]         step until COND or a break holds, or to the end
break COND              stop where a condition over decided events holds; `breaks` lists them, `clear [N]` drops them
last, plan              the last step: its decisions; the batch it launched, with its page tables
why                     the reasons of the last step
pages, queue, table, flight, owners, tree, sessions, adapters, stats      the state
help, quit              an empty line repeats the previous command

COND, for example: RequestRetracted and request == r17; AdmissionDeferred and reason == kv_budget; waiting > 50"""


class _Replay(click.Command):
    """Dispatches `--what-if`, `--in-simulator`, `--on-hardware` and `--to` to other commands, loaded lazily."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        if any(word == "--to" or word.startswith("--to=") for word in args):
            from lockstep.tools.live import live

            return live.make_context(f"{info_name}", args, parent, **extra)
        if "--on-hardware" in args:
            from lockstep.tools.on_hardware import on_hardware

            rest = [word for word in args if word != "--on-hardware"]
            return on_hardware.make_context(f"{info_name} --on-hardware", rest, parent, **extra)
        if "--in-simulator" in args:
            from lockstep.tools.in_simulator import in_simulator

            rest = [word for word in args if word != "--in-simulator"]
            return in_simulator.make_context(f"{info_name} --in-simulator", rest, parent, **extra)
        if "--what-if" not in args:
            return super().make_context(info_name, args, parent, **extra)
        from lockstep.tools.what_if import what_if

        rest = [word for word in args if word != "--what-if"]
        return what_if.make_context(f"{info_name} --what-if", rest, parent, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        return super().invoke(ctx) if ctx.command is self else ctx.command.invoke(ctx)


@dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    """Options of `lockstep replay` over a journal."""

    until: Annotated[int | None, Option("stop before step N and show the state there", metavar="N")] = None
    condition: Annotated[
        str | None, Option("stop behind the first step in which COND holds", flag="--break", metavar="COND")
    ] = None
    interactive: Annotated[bool, Option("step forwards and backwards by hand; `help` says how", short="-i")] = False
    decisions_file: Annotated[
        Path | None,
        Option(
            "write every decision in words; as RUN/decisions.txt, a divergence can be told with both",
            flag="--decisions",
            metavar="FILE",
        ),
    ] = None
    overwrite: Annotated[bool, Option("replace FILE")] = False
    as_json: Annotated[bool, Option("one JSON object instead of text", flag="--json")] = False


def _other_command(*declared: str, **arguments: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A flag that makes another command of `replay`: it is in the help of this one, and never reaches it."""
    return click.option(*declared, expose_value=False, **arguments)


@click.command(cls=_Replay, context_settings={"max_content_width": 120})
@RUN
@_other_command("--what-if", is_flag=True, help="the same requests under other settings: --what-if --help")
@_other_command(
    "--on-hardware", is_flag=True, help="run its batches on this machine, and time them: --on-hardware --help"
)
@_other_command(
    "--in-simulator", is_flag=True, help="simulate it with its own facts, and compare every step: --in-simulator --help"
)
@_other_command("--to", metavar="URL", help="send the requests to a server instead: --to URL --help")
@with_flags(click.option, options_of(ReplayOptions).values(), kinds={"until": click.IntRange(0)})
def replay(run: Path, **options: Any) -> None:
    """Decide a run again and compare every digest, or go through it step by step.

    A divergence is shown with the event, the text of both decisions as far as available, the state before and the
    behaviour flags. Exit status: 0 equal; 1 equal, but not closed; 2 unreadable; 3 diverged.

    \b
    lockstep replay runs/chat
    lockstep replay runs/chat --until 48213
    lockstep replay runs/chat --break "RequestRetracted and request == r17"
    lockstep replay runs/chat -i
    lockstep replay runs/chat --what-if --policy lpm --html lpm.html
    lockstep replay runs/chat --in-simulator
    lockstep replay runs/chat --on-hardware
    """
    given = take(ReplayOptions, options)
    until, decisions_file, as_json = given.until, given.decisions_file, given.as_json
    if given.interactive and (as_json or decisions_file is not None):
        raise click.UsageError("--interactive goes with neither --json nor --decisions.")
    if given.condition is not None and (as_json or decisions_file is not None):
        raise click.UsageError("--break goes with neither --json nor --decisions.")
    if decisions_file is not None and decisions_file.exists() and not given.overwrite:
        raise click.UsageError(f"{decisions_file} exists\nhint: choose another file, or add --overwrite")
    with refusals():
        if given.interactive or given.condition is not None:
            _in_hand(run, until, given.condition, given.interactive)
        elif decisions_file is not None:
            _write_decisions(run, until, decisions_file, as_json)
        elif until is None:
            if status := verify_all(run, until, as_json):
                sys.exit(status)
        else:
            status = verify_run(engine_journal(run), until, as_json)
            if not as_json:
                walk = Walk(run, until)
                for _ in walk:
                    pass
                for line in state_lines(walk.engine, walk.names):
                    click.echo(line)
            if status:
                sys.exit(status)


def _write_decisions(run: Path, until: int | None, path: Path, as_json: bool) -> None:
    walk = Walk(run, until)
    try:
        text = decisions_text(decision_of(number, event, step, walk.names) for number, event, step in walk)
    except Divergence as error:
        print_divergence(run, error)
        sys.exit(EXIT_DIVERGED)
    path.write_text(text, "utf-8", newline="\n")
    if as_json:
        is_open = until is None and not read_journal(walk.folder).tail.closed
        print_json({"verdict": "not closed" if is_open else "equal", "decisions": str(path)})
    else:
        click.echo(f"{path} written, {path.stat().st_size:,} bytes", err=True)


def _in_hand(run: Path, until: int | None, condition: str | None, interactive: bool) -> None:
    found = Condition(condition) if condition is not None else None
    hand = Hand(Stepper(run))
    try:
        if found is not None:
            hand.stepper.breaks.append(found)
            _say(hand.go(lambda: hand.stepper.run() if until is None else hand.run_before(until)))
        elif until is not None:
            _say(hand.go(lambda: hand.stepper.go_to(until)))
        if not interactive:
            _say(list(state_lines(hand.stepper.engine, hand.stepper.names)))
            return
        click.echo(f"{run}: before step {hand.stepper.position:,}; `help` lists the commands", err=True)
        for line in _input():
            _say(hand.do(line))
            if hand.done:
                return
    except Divergence as error:
        print_divergence(run, error)
        sys.exit(EXIT_DIVERGED)


def _input() -> Iterator[str]:
    """Yield lines of stdin, with a prompt if it is a terminal."""
    while True:
        if sys.stdin.isatty():
            click.echo("(replay) ", nl=False, err=True)
        line = sys.stdin.readline()
        if not line:
            return
        yield line.strip()


def _say(lines: list[str]) -> None:
    for line in lines:
        click.echo(line)


class Hand:
    """Runs the commands of the interactive prompt. Each returns the lines to print."""

    def __init__(self, stepper: Stepper) -> None:
        self.stepper = stepper
        self.done = False
        self._before = "step"
        self._shows: dict[str, Callable[[], list[str]]] = {
            "pages": lambda: [pages_line(stepper.engine)],
            "queue": lambda: [queue_line(stepper.engine, stepper.names)],
            "table": lambda: table_lines(stepper.engine, stepper.names),
            "flight": lambda: in_flight_lines(stepper.engine, stepper.names),
            "owners": lambda: page_owner_lines(stepper.engine, stepper.names),
            "tree": lambda: tree_lines(stepper.engine.memory.radix),
            "sessions": lambda: session_lines(stepper.engine, stepper.names),
            "adapters": lambda: adapter_lines(stepper.engine.memory.adapters),
            "stats": lambda: [stats_text(stepper.engine.stats())],
            "last": self._last,
            "plan": self._plan,
            "why": self._why,
            "breaks": self._breaks,
            "help": HELP.splitlines,
        }

    def do(self, line: str) -> list[str]:
        """Run one command. An input error is returned as text and changes nothing."""
        line = line or self._before
        verb, _, rest = line.partition(" ")
        rest = rest.strip()
        self._before = line
        try:
            return self._do({"s": "step", "b": "back", "g": "goto", "c": "continue", "q": "quit"}.get(verb, verb), rest)
        except ConfigError as error:
            return str(error).splitlines()

    def _do(self, verb: str, rest: str) -> list[str]:
        stepper = self.stepper
        match verb:
            case "step":
                stop = stepper.position + _number(rest, 1)
                return self.go(lambda: stepper.go_to(stop))
            case "back":
                stop = stepper.position - _number(rest, 1)
                return self.go(lambda: stepper.go_to(stop))
            case "goto":
                return self.go(lambda: stepper.go_to(_number(rest, None)))
            case "continue":
                until = Condition(rest) if rest else None
                return self.go(lambda: stepper.run(until))
            case "break":
                stepper.breaks.append(Condition(rest))
                return self._breaks()
            case "clear":
                if not rest:
                    stepper.breaks.clear()
                elif 1 <= _number(rest, None) <= len(stepper.breaks):
                    del stepper.breaks[_number(rest, None) - 1]
                else:
                    raise ConfigError(f"there is no break `{rest}`\nhint: `breaks` lists them")
                return self._breaks()
            case "quit" | "exit":
                self.done = True
                return []
            case _ if verb in self._shows and not rest:
                return self._shows[verb]()
        raise ConfigError(f"no command `{f'{verb} {rest}'.strip()}`\nhint: `help` lists them")

    def go(self, move: Callable[[], object]) -> list[str]:
        """Move, then return the last step and the new position as text."""
        held = move()
        stepper = self.stepper
        lines = [f"holds: {held.text}"] if isinstance(held, Condition) else []
        if stepper.last is not None:
            lines += self._taken(stepper.last)
        at_end = stepper.ended
        return [*lines, f"at the end, {stepper.position:,} steps" if at_end else f"before step {stepper.position:,}"]

    def run_before(self, until: int) -> Condition | None:
        """Run to a break, but not past step `until`."""
        while self.stepper.position < until and (done := self.stepper.forward()) is not None:
            for condition in self.stepper.breaks:
                if condition.holds(*done, self.stepper.engine, self.stepper.names):
                    return condition
        return None

    def _taken(self, done: TakenStep) -> list[str]:
        names, plan = self.stepper.names, done.step.launched()
        plain = isinstance(done.event, LaneReady | ClockAdvanced | HostTimeClamped)
        what = event_line(done.event) if plain else observed_line(done.event, names)
        lines = [f"step {done.number:,} at {clock(done.event.time_us)}: {what}"]
        lines += [f"  {decided_line(decided, names)}" for decided in done.step.decided]
        return lines + ([f"  launch {short_plan(plan, names)}"] if plan is not None else [])

    def _last(self) -> list[str]:
        last = self.stepper.last
        if last is None:
            return ["no step was taken yet"]
        return list(exact_text(last.step, self.stepper.names)) or ["the last step decided nothing"]

    def _plan(self) -> list[str]:
        last = self.stepper.last
        plan = last.step.launched() if last is not None else None
        return plan_lines(plan, self.stepper.names) if plan is not None else ["the last step launched nothing"]

    def _why(self) -> list[str]:
        if self.stepper.last is None:
            return ["no step was taken yet"]
        reason = why_step(self.stepper.folder, self.stepper.last.number)
        lines = [reason.title]
        for heading, parts in reason.parts.items():
            lines += [heading, *(f"  {part}" for part in parts)] if parts else []
        return lines

    def _breaks(self) -> list[str]:
        return [f"{i}: {each.text}" for i, each in enumerate(self.stepper.breaks, start=1)] or ["no breaks"]


def _number(text: str, default: int | None) -> int:
    if not text and default is not None:
        return default
    if not (text.isascii() and text.replace("_", "").isdigit()):
        raise ConfigError(f"expected a number of steps, got `{text}`")
    return int(text)


if __name__ == "__main__":
    replay()
