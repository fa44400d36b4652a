"""The text of a step's decisions, to compare two engines: a digest shows only that decisions differ.

*Exact* text has all that a digest covers: decided events, plans with their page tables, and the requests that receive
tokens. *Logical* text leaves out values that follow from the clock and from numbering: times, rows, pages. Neither has
token ids.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from lockstep.core.contract.commands import LaunchBatch, Step, StreamTokens
from lockstep.core.contract.errors import ConfigError
from lockstep.core.contract.events import ObservedEvent, RequestAdmitted
from lockstep.core.contract.render import Names, command_line, decided_line, plan_lines, plan_text
from lockstep.core.journal.replay import event_line

_TOKEN_LINES = (" new tokens ", " newest sampled token")


class Decision(NamedTuple):
    """The decisions of one step of a journal, as exact text."""

    number: int
    event: str
    lines: tuple[str, ...]

    def text(self) -> str:
        """Return the step as in a file of decisions."""
        return "\n".join([f"step {self.number} {self.event}", *(f"  {line}" for line in self.lines)])


def exact_text(step: Step, names: Names) -> tuple[str, ...]:
    """Return all that the digest of a step covers, one line for each decision."""
    lines = []
    for decided in step.decided:
        row = f" to row {decided.row}" if isinstance(decided, RequestAdmitted) else ""
        lines.append(decided_line(decided, names) + row)
    for command in step.commands:
        match command:
            case StreamTokens():
                ids, offsets, counts = (
                    column.tolist() for column in (command.request_ids, command.offsets, command.token_counts)
                )
                parts = [f"{names.request(r)} {o}+{n}" for r, o, n in zip(ids, offsets, counts, strict=True)]
                lines.append(f"stream {' '.join(parts)}")
            case LaunchBatch(plan, _):
                lines.append(command_line(command, names))
                rest = plan_lines(plan, names)[1:]
                lines += [line.strip() for line in rest if not any(mark in line for mark in _TOKEN_LINES)]
            case _:
                lines.append(command_line(command, names))
    return tuple(lines)


def logical_text(step: Step, names: Names) -> tuple[str, ...]:
    """Return the decided events and the launch of a step, without times and page numbers."""
    lines = []
    for decided in step.decided:
        if isinstance(decided, RequestAdmitted):
            decided = msgspec.structs.replace(decided, waited_us=0)
        lines.append(decided_line(decided, names))
    plan = step.launched()
    if plan is not None:
        lines.append(f"launch {plan_text(plan, names)}")
    return tuple(lines)


def decision_of(number: int, event: ObservedEvent, step: Step, names: Names) -> Decision:
    """Return the decisions of a step as exact text. Prompts and outputs in its event are counted, not shown."""
    return Decision(number, event_line(event), exact_text(step, names))


# ------------------------------------------------------------------------------------------------ a file of decisions


def decisions_text(decisions: Iterator[Decision]) -> str:
    """Return decisions as the content of a file, one step after the other, without steps that decided nothing."""
    return "".join(decision.text() + "\n" for decision in decisions if decision.lines)


def read_decisions(path: Path) -> dict[int, Decision]:
    """Read a file of `decisions_text`, by step. Raises ConfigError for any other file."""
    found: dict[int, Decision] = {}
    head, lines = "", []
    for at, line in enumerate([*path.read_text("utf-8").splitlines(), "step"], start=1):
        if line.startswith("  "):
            lines.append(line[2:])
            continue
        if head:
            _, number, event = head.split(" ", 2)
            found[int(number)] = Decision(int(number), event, tuple(lines))
        if line != "step" and not (line.startswith("step ") and line.split(" ")[1].isdigit() and line.count(" ") > 1):
            raise ConfigError(
                f"`{path}` line {at} must be `step N EVENT` or a decision, indented by two, got `{line[:60]}`\n"
                "hint: `lockstep replay RUN --decisions FILE` writes such a file"
            )
        head, lines = line, []
    return found
