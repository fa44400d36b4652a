"""An engine with a host and a real journal, each of whose steps must be one that the machine of the contract allows.

The host does what docs/contract.md requires and nothing more, in steps as small as the contract has them: an event is
folded, its record is written, each command is performed; a crash may come between any two. Then the engine is what
`recover` makes of the journal.

    host = EngineHost(config, folder)
    host.arrive(family, prompt, limit)
    host.slot(), host.result(), host.crash() ...
    host.settle()                              everything ends, and nothing is left over
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from lockstep.core import invariants
from lockstep.core.contract.commands import (
    BatchPlan,
    FinishRequest,
    LaunchBatch,
    RejectRequest,
    Step,
    StreamTokens,
)
from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.events import (
    BatchFinished,
    EngineRestarted,
    LaneReady,
    ObservedEvent,
    RequestArrived,
    RequestCancelled,
    RequestQueued,
    RequestRetracted,
    TokenRuns,
)
from lockstep.core.journal.records import JournalHeader
from lockstep.core.journal.writer import JournalWriter
from lockstep.core.scheduler.engine import Engine
from lockstep.host.durable import DurableJournal, Retention
from lockstep.host.recovery import recover
from tests.support.contract.engine_machine import EngineBounds, EngineMachine, EngineState, Token
from tests.support.contract.stepping import stepped
from tests.support.driver.actions import STOP_TOKEN, Action

TURNS_MAX = 2_000
RETENTION = Retention(snapshot_s=1e9)


@dataclass
class _Client:
    """What the client of a request has received."""

    tokens: list[int] = field(default_factory=list)
    ends: int = 0


class EngineHost:
    """One engine under the machine of its contract."""

    def __init__(self, config: SchedConfig, folder: Path, *, check: bool = True) -> None:
        """`check`: all invariants of the core after every event."""
        self.config, self.folder, self.check = config, folder, check
        self.machine = EngineMachine(
            EngineBounds(pages=config.pages, page_tokens=config.page_size, depth=config.overlap_depth)
        )
        self.state: EngineState = self.machine.first()
        self.engine = Engine(config)
        self.journal = DurableJournal(
            JournalWriter.create(folder, JournalHeader(config=config)), self.engine, RETENTION
        )
        self.now_us = 0
        self.device: list[BatchPlan] = []  # launched, without a result
        self.clients: list[_Client] = []
        self.drawn: dict[Token, int] = {}
        self.steps: list[Action] = []  # of the machine, in order
        self.marks: set[str] = set()
        self._tables: dict[int, list[int]] = {}  # by row: its page table, folded from the plans
        self._holders: dict[int, int] = {}  # by row
        self._pending: list[Callable[[], None]] = []
        self._unwritten: tuple[ObservedEvent, bytes] | None = None

    # ---------------------------------------------------------------------------------------------------------- inputs

    def arrive(self, family: int, prompt: int, limit: int) -> None:
        """A request arrives; those of one family have prompts that begin alike."""
        number = self.engine.last_request_id + 1
        event = RequestArrived(
            time_us=self.now_us,
            request_id=number,
            prompt=TokenRuns((1 + 1000 * family, prompt)),
            max_new_tokens=limit,
            stop_token_ids=(STOP_TOKEN,),
            origin=f"client/{number}",
        )
        self.clients.append(_Client())
        self.fold(event, ("arrive", number, family, prompt, limit))

    def cancel(self, choice: int) -> None:
        """A request is cancelled, perhaps one that has ended."""
        if self.clients:
            number = choice % len(self.clients)
            self.fold(RequestCancelled(self.now_us, number), ("cancel", number))

    def slot(self) -> None:
        """Offer a launch slot."""
        self.fold(LaneReady(self.now_us), ("slot",))

    def result(self, *, at: int = 0, stops: int = 0, error: bool = False) -> bool:
        """Deliver a result of the device, `at` behind the oldest one. Returns False if there is none.

        `stops`: bits, by sampling row: the device draws a stop token there.
        """
        self.perform_all()
        if at >= len(self.device):
            return False
        plan = self.device[at]
        event = BatchFinished(
            self.now_us,
            plan.batch_id,
            b"" if error else self._draw(plan, stops),
            generation=plan.generation,
            error="the device failed" if error else "",
        )
        self.fold(event, ("result", plan.batch_id, plan.generation, error))
        self.device.remove(plan)
        return True

    def _draw(self, plan: BatchPlan, stops: int) -> bytes:
        tokens = []
        sampled = zip(plan.request_ids[plan.sample_rows].tolist(), plan.stops[plan.sample_rows].tolist(), strict=True)
        for i, (number, stop) in enumerate(sampled):
            name = number, stop - self.state.core.requests[number].prompt, plan.generation
            token = 1_000_000 + 1000 * len(self.drawn) if not stops >> i & 1 else STOP_TOKEN
            tokens.append(self.drawn.setdefault(name, token))
        return np.array(tokens, np.int32).tobytes()

    def lose(self) -> None:
        """The content of the device is lost, and the process lives on: results may still arrive, late."""
        self.perform_all()
        self.do(("lose",))
        self.restart()

    def restart(self, rise: int = 1) -> None:
        """Fold a restart."""
        generation = self.engine.generation + rise
        self.fold(EngineRestarted(self.now_us, generation), ("restart", generation))
        self._tables, self._holders = {}, {}
        self.marks.add("restarted")

    def crash(self, *, performed: int = 0, torn: int = 0) -> None:
        """The process ends, so many commands after the newest record, -1 before it, or `torn` bytes short of it."""
        if self._unwritten is None or (performed >= 0 and not torn):
            if self._unwritten is not None:
                self.write()
            for _ in range(min(performed, len(self._pending))):
                self.perform()
        elif torn:
            self._append()
            newest = max((self.folder / "journal").glob("*.log"))
            os.truncate(newest, newest.stat().st_size - torn)
            self.marks.add("crashed in a write")
        self.marks.add("crashed with commands left" if self._pending else "crashed")
        self.do(("crash",))
        self.close()
        self._pending, self._unwritten, self.device = [], None, []
        self._recover()
        self.restart()
        self.perform_all()
        self.journal.begin_segment(expire=False)

    def close(self) -> None:
        """Let go of the files of the journal, as the end of a process does: without an end record."""
        self.journal.writer._release()

    def _recover(self) -> None:
        recovered = recover(self.folder)
        self.engine = recovered.engine
        recovered.image.origins = dict(recovered.origins)
        writer = JournalWriter.go_on(recovered.journal)
        self.journal = DurableJournal(writer, self.engine, RETENTION, image=recovered.image)
        del self.clients[len(self.state.clients) :]  # their arrivals are not in the journal: they are sent again
        for name, number, *_ in list(self.state.pending):
            found = recovered.find(f"client/{number}", (0,))
            assert found == number, f"the journal has no request {number}, found {found}"
            answer, client = recovered.answers[number], self.clients[number]
            if name == "stream":
                client.tokens += answer.tokens[len(client.tokens) :]
                self.marks.add("tokens sent again")
            else:
                assert answer.end is not None, f"{number} has ended, and recovery has no end"
                client.ends += 1
                self.marks.add("end sent again")
            self.do(("perform", 0))
            self._compare(number)

    # --------------------------------------------------------------------------------------------------------- a step

    def fold(self, event: ObservedEvent, named: Action) -> Step:
        """Pass an event to the engine. The machine must allow what comes of it."""
        self.perform_all()
        step = stepped(self.engine, event, lambda: self.machine.after(self.state, ("fold", named, (), ())))
        self._unwritten = event, step.digest
        for one in step.decided:
            if isinstance(one, RequestQueued):  # limited by context and pool
                named = (*named[:4], one.max_new_tokens)
        decided = [] if named[0] == "restart" else [one for one in step.decided if isinstance(one, RequestRetracted)]
        commands: list[Action] = []
        for command in step.commands:
            match command:
                case LaunchBatch(plan):
                    commands += self._launched(plan)
                    self._pending.append(lambda plan=plan: self.device.append(plan))
                case StreamTokens():
                    commands += self._streamed(command)
                case FinishRequest(request_id=number, reason=reason) | RejectRequest(number, reason):
                    commands.append(("end", number, reason))
                    self._pending.append(lambda number=number: self._ended(number))
        for one in decided:
            self.marks.add(f"retracted ({one.reason})")
        self.marks |= {f"ended ({one[2]})" for one in commands if one[0] == "end"}
        retracted = tuple(("retract", one.request_id) for one in decided)
        self.do(("fold", named, retracted, tuple(commands)))
        if self.check:
            invariants.check(self.engine)
        return step

    def _launched(self, plan: BatchPlan) -> list[Action]:
        for taken in plan.rows_taken:
            self._holders[taken.row], self._tables[taken.row] = taken.request_id, []
        changed = dict.fromkeys(plan.deltas.rows.tolist())
        for row, index, page in zip(
            plan.deltas.rows.tolist(), plan.deltas.index.tolist(), plan.deltas.pages.tolist(), strict=True
        ):
            table = self._tables[row]
            table[index : index + 1] = [page]
        moved = [
            ("moved", self._holders[row], tuple(self._tables[row]))
            for row in changed
            if row not in set(plan.rows.tolist())
        ]
        if moved:
            self.marks.add("table of another row moved")
        sampled = set(plan.sample_rows.tolist())
        columns = (plan.rows, plan.request_ids, plan.starts, plan.stops)
        rows = []
        for i, (row, number, start, stop) in enumerate(zip(*(one.tolist() for one in columns), strict=True)):
            assert self._holders[row] == number, f"row {row} is {self._holders[row]}'s, and computes {number}"
            pages = tuple(self._tables[row][: -(-stop // self.config.page_size)])
            rows.append((number, start, stop, i in sampled, pages))
            if start and self.state.core.requests[number].phase == "waiting":
                self.marks.add("prefix of the cache")
        self.marks.add(f"launched {plan.mode}")
        return [*moved, ("launch", plan.batch_id, plan.generation, tuple(rows))]

    def _streamed(self, command: StreamTokens) -> list[Action]:
        at, found = 0, []
        columns = (command.request_ids, command.offsets, command.token_counts)
        for number, offset, count in zip(*(one.tolist() for one in columns), strict=True):
            tokens = command.tokens[at : at + count].tolist()
            found.append(("stream", number, offset, count))
            self._pending.append(
                lambda number=number, offset=offset, tokens=tokens: self._received(number, offset, tokens)
            )
            at += count
        return found

    def _received(self, number: int, offset: int, tokens: list[int]) -> None:
        client = self.clients[number]
        assert offset <= len(client.tokens), f"{number} gets output {offset} after {len(client.tokens)}"
        client.tokens[offset:] = tokens

    def _ended(self, number: int) -> None:
        self.clients[number].ends += 1

    # ---------------------------------------------------------------------------------------------------- the machine

    def do(self, action: Action) -> None:
        """Make the same step in the machine. Raises: Forbidden, Unsafe."""
        self.steps.append(action)
        self.state = self.machine.followed(self.state, action)

    def _append(self) -> None:
        assert self._unwritten is not None
        self.journal.append(*self._unwritten)
        self.journal.flush()
        self._unwritten = None

    def write(self) -> None:
        """Write the record of the newest event."""
        self._append()
        self.do(("write",))

    def perform(self, at: int = 0) -> None:
        """Perform the next command."""
        command = self.state.pending[at]
        self.do(("perform", at))
        self._pending.pop(at)()
        if command[0] != "launch":
            self._compare(command[1])

    def perform_all(self) -> None:
        """Write and perform what is left of the newest event."""
        if self._unwritten is not None:
            self.write()
        while self._pending:
            self.perform()

    def _compare(self, number: int) -> None:
        """The client has what the machine's client has, token by token."""
        client, model = self.clients[number], self.state.clients[number]
        if self.state.core.requests[number].left:
            return
        assert client.tokens == [self.drawn[token] for token in model.seen], f"{number}: {client}, expected {model}"
        assert client.ends == model.ends, f"{number}: {client}, expected {model}"

    def settle(self) -> None:
        """Everything that is open ends."""
        for _ in range(TURNS_MAX):
            if self.machine.is_idle(self.state) and not self.engine.requests:
                break
            self.slot()
            self.result()
        self.perform_all()
        assert self.machine.is_idle(self.state), f"not at rest: {self.state.core}"
        wrong = self.machine.at_rest(self.state)
        assert not wrong, wrong
        invariants.check_quiescent(self.engine)
