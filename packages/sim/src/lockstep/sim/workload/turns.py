"""Turns: the requests of a workload, one by one and as columns, and the error for an unusable workload.

A workload of a million turns is a few arrays. `Turns` is an ordinary sequence that makes a `Turn` on access:

    turns[3]                 # a Turn
    for turn in turns: ...   # made in blocks, none is kept
    turns.by_clock()         # iterator over turns that arrive by the clock, in order
    turns.follow_ups(3)      # indices of the turns that follow turn 3

A column with equal rows is stored once, so an open-loop turn with one run takes about 40 bytes.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from lockstep.sim.workload.turn_media import MediaColumns, TurnMedia

LENGTH_TOKENS_MAX = 2**24  # of one prompt or one output; beyond any context window, so more is an error
TIME_US_MAX = 2**53  # 285 years: covers times since 1970, and is exact as a float

_BLOCK_TURNS = 2_048  # turns made at a time

Int64s = NDArray[np.int64]
Int32s = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Turn:
    """One future request: its time, its tokens, and the number of its output tokens. With 0 only the prompt is run.

    A turn with `after` is the next turn of a session (closed loop): its user reads the answer of turn `after`, thinks
    for `think_us`, and sends. Every other turn arrives by the clock, independent of the server (open loop).
    """

    index: int  # position in the workload, 0..n-1
    arrival_us: int  # us since the workload's start; 0 and ignored if `after` is set
    prompt: tuple[int, ...]  # runs of token ids, (first_token, count, ...); see token_runs.py
    prompt_tokens: int  # sum of the counts
    output_tokens: int  # tokens that the model will produce
    output_first_token: int  # output token i is output_first_token + i
    label: str  # opaque name for people
    tenant: str = ""
    after: int | None = None  # index of the turn with the answer that starts the think time
    think_us: int = 0
    grammar: str = ""  # name of the grammar of its output; "" for none
    media: tuple[TurnMedia, ...] = ()  # in the prompt, with their placeholders, by position
    adapter: str = ""  # name of its adapter; "" for the base model
    samples: int = 1  # samples of the request, each of `output_tokens`; see samples.py
    samples_first_token: int = 0  # of the second sample; the others follow it
    session: str = ""  # session of the server, see server_sessions.py; "" for none
    session_kept: int = 0  # prompt tokens that the session has
    session_last: bool = False  # no turn follows


@dataclass(frozen=True, kw_only=True, eq=False)
class Turns(Sequence[Turn]):
    """All turns of a workload, one column per field of `Turn`, [n] each.

    Turns that arrive by the clock are in ascending order of arrival, and a turn comes after its `after`.
    """

    arrival_us: Int64s
    prompt_tokens: Int32s
    output_tokens: Int32s
    output_first_token: Int32s
    after: Int32s  # -1: arrives by the clock
    think_us: Int64s
    run_stops: Int64s  # [n]; turn i's prompt is the runs [run_stops[i - 1]:run_stops[i]), from 0 for i = 0
    run_first_token: Int32s  # [runs]
    run_tokens: Int32s  # [runs]
    label_form: NDArray[np.int32]  # into `label_forms`
    label_number: Int32s
    label_part: Int32s
    tenant: Int32s  # into `tenants`
    grammar: Int32s  # into `grammars`
    label_forms: tuple[str, ...]  # for str.format with number and part: "line{0}", "s{0}t{1}"
    tenants: tuple[str, ...]
    grammars: tuple[str, ...]
    media: MediaColumns | None = None  # None: no turn has media
    adapter: Int32s | None = None  # into `adapters`; None: no turn has an adapter
    adapters: tuple[str, ...] = ("",)
    samples: Int32s | None = None  # None: each turn has one
    samples_first_token: Int32s | None = None
    session: Int32s | None = None  # index of the turn that opens it; -1: none; None: the server keeps no sessions
    session_kept: Int32s | None = None
    session_last: NDArray[np.bool_] | None = None

    def __len__(self) -> int:
        return len(self.arrival_us)

    @overload
    def __getitem__(self, index: int) -> Turn: ...
    @overload
    def __getitem__(self, index: slice) -> list[Turn]: ...
    def __getitem__(self, index: int | slice) -> Turn | list[Turn]:
        if isinstance(index, slice):
            return list(self._made(np.arange(len(self), dtype=np.int64)[index]))
        position = range(len(self))[index]
        return next(self._made(np.array([position], dtype=np.int64)))

    def __iter__(self) -> Iterator[Turn]:
        return self._made(np.arange(len(self), dtype=np.int64))

    def __eq__(self, other: object) -> bool:
        """Return whether the turns equal those of any sequence."""
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(mine == theirs for mine, theirs in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]  # like a list

    def __repr__(self) -> str:
        return f"<{len(self):,} turns>"

    @property
    def nbytes(self) -> int:
        """Memory of all columns in bytes; a column with equal rows counts one row."""
        columns = (getattr(self, field.name) for field in fields(self))
        return sum(
            column.itemsize if column.strides == (0,) else column.nbytes
            for column in columns
            if isinstance(column, np.ndarray)
        ) + (self.media.nbytes if self.media is not None else 0)

    def by_clock(self) -> Iterator[Turn]:
        """Return an iterator over the turns that arrive by the clock, in order of arrival, each made on demand."""
        return self._made(self.by_clock_rows)

    @cached_property
    def by_clock_rows(self) -> Int64s:
        """Indices of the turns that arrive by the clock."""
        return np.flatnonzero(self.after < 0)

    def follow_ups(self, index: int) -> Sequence[int]:
        """Return the indices of the turns whose `after` is `index`, in order."""
        waiting_for, order = self._follow_ups
        start, stop = np.searchsorted(waiting_for, (index, index + 1)).tolist()
        indices: list[int] = order[start:stop].tolist()
        return indices

    @cached_property
    def _follow_ups(self) -> tuple[Int32s, Int64s]:
        rows = np.flatnonzero(self.after >= 0)
        order = rows[np.argsort(self.after[rows], kind="stable")]
        return self.after[order], order

    @cached_property
    def run_starts(self) -> Int64s:
        """Index of the first run of each turn, [n]."""
        return np.concatenate((np.zeros(1, np.int64), self.run_stops[:-1]))

    def prompts(self, rows: Int64s) -> list[tuple[int, ...]]:
        """Return the prompts of `rows`, as `Turn.prompt`."""
        starts, stops = self.run_starts[rows], self.run_stops[rows]
        if len(rows) == 0 or (stops[:-1] != starts[1:]).any():
            return [tuple(self._runs(start, stop)) for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)]
        first = int(starts[0])  # neighbours: one slice for all of them
        runs = self._runs(first, int(stops[-1]))
        bounds = zip((2 * (starts - first)).tolist(), (2 * (stops - first)).tolist(), strict=True)
        return [tuple(runs[start:stop]) for start, stop in bounds]

    def _runs(self, start: int, stop: int) -> list[int]:
        """Return runs [start:stop) as (first_token, count, first_token, count, ...)."""
        pairs = np.stack((self.run_first_token[start:stop], self.run_tokens[start:stop]), axis=1)
        runs: list[int] = pairs.ravel().tolist()
        return runs

    def labels(self, rows: Int64s) -> list[str]:
        """Return the labels of `rows`."""
        codes, numbers, parts = self.label_form[rows], self.label_number[rows], self.label_part[rows]
        columns = zip(codes.tolist(), numbers.tolist(), parts.tolist(), strict=True)
        forms = self.label_forms
        return [forms[code].format(number, part) for code, number, part in columns]

    @cached_property
    def labels_differ(self) -> bool:
        """Whether all labels differ, decided from the columns; False may mean unknown."""
        parts = np.stack((self.label_form, self.label_number, self.label_part), axis=1)
        return len(self.label_forms) == 1 and len(np.unique(parts, axis=0)) == len(self)

    def _made(self, rows: Int64s) -> Iterator[Turn]:
        """Make the turns of `rows`, a block at a time."""
        tenants, grammars, adapters = self.tenants, self.grammars, self.adapters
        size = 16  # grows, so that reading one turn does not make a whole block
        start = 0
        while start < len(rows):
            block = rows[start : start + size]
            start += size
            size = min(2 * size, _BLOCK_TURNS)
            yield from map(
                Turn,
                block.tolist(),
                self.arrival_us[block].tolist(),
                self.prompts(block),
                self.prompt_tokens[block].tolist(),
                self.output_tokens[block].tolist(),
                self.output_first_token[block].tolist(),
                self.labels(block),
                [tenants[code] for code in self.tenant[block].tolist()],
                [after if after >= 0 else None for after in self.after[block].tolist()],
                self.think_us[block].tolist(),
                [grammars[code] for code in self.grammar[block].tolist()],
                self.media.of(block) if self.media is not None else [()] * len(block),
                [""] * len(block)
                if self.adapter is None
                else [adapters[code] for code in self.adapter[block].tolist()],
                [1] * len(block) if self.samples is None else self.samples[block].tolist(),
                [0] * len(block) if self.samples_first_token is None else self.samples_first_token[block].tolist(),
                *self._sessions(block),
            )

    def _sessions(self, block: Int64s) -> tuple[list[str], list[int], list[bool]]:
        """Return the session columns of turns: names, kept tokens, and whether each is the last turn."""
        if self.session is None or self.session_kept is None or self.session_last is None:
            return [""] * len(block), [0] * len(block), [False] * len(block)
        names = [f"s{root}" if root >= 0 else "" for root in self.session[block].tolist()]
        return names, self.session_kept[block].tolist(), self.session_last[block].tolist()

    # --- other turns out of these

    def take(self, rows: Int64s) -> Turns:
        """Return the turns at `rows`, in that order and renumbered. A turn must come after its `after`."""
        place = np.full(len(self) + 1, -1, np.int32)  # the last entry is for -1
        place[rows] = np.arange(len(rows), dtype=np.int32)
        after = self.after[rows]
        new_after = place[after]
        lost = (after >= 0) & ((new_after < 0) | (new_after >= np.arange(len(rows))))
        if lost.any():
            raise ValueError(f"turn {rows[np.argmax(lost)]} is taken without, or before, the turn it waits for")
        runs = self.run_stops[rows] - self.run_starts[rows]
        run_stops = np.cumsum(runs)
        picked = np.repeat(self.run_starts[rows] - (run_stops - runs), runs) + np.arange(runs.sum())
        taken: dict[str, Any] = {
            field.name: column[rows]
            for field in fields(self)
            if isinstance(column := getattr(self, field.name), np.ndarray) and not field.name.startswith("run_")
        }
        taken |= {"after": new_after, "run_stops": run_stops}
        taken |= {name: getattr(self, name)[picked] for name in ("run_first_token", "run_tokens")}
        folded: dict[str, Any] = {name: _folded(column) for name, column in taken.items()}
        return replace(self, **folded, media=self.media.take(rows) if self.media is not None else None)

    def head(self, count: int) -> Turns:
        """Return the first `count` turns, or all."""
        if count >= len(self):
            return self
        runs = int(self.run_stops[count - 1]) if count else 0
        cut: dict[str, Any] = {
            field.name: column[: runs if field.name in ("run_first_token", "run_tokens") else count]
            for field in fields(self)
            if isinstance(column := getattr(self, field.name), np.ndarray)
        }
        if self.media is not None:
            cut["media"] = self.media.take(np.arange(count))
        return replace(self, **cut)

    def at(self, arrival_us: Int64s) -> Turns:
        """Return the same turns at other times, [n]; times of follow-ups are ignored."""
        return replace(self, arrival_us=np.where(self.after < 0, arrival_us, 0))

    def root(self) -> Int64s:
        """Return the index of the turn that opens each turn's session, [n]; a turn by the clock is its own."""
        root = np.where(self.after < 0, np.arange(len(self)), self.after).astype(np.int64)
        while True:
            further = root[root]
            if np.array_equal(further, root):
                return root
            root = further


def _folded(column: NDArray[Any]) -> NDArray[Any]:
    """Return the column, stored once if all rows are equal. Read-only."""
    if len(column) > 1 and column.strides != (0,) and (column == column[0]).all():
        return np.broadcast_to(column[:1].copy(), column.shape) if column.ndim else column
    column.flags.writeable = False
    return column


class TurnStart(NamedTuple):
    """When a turn is sent: at `arrival_us`, or `think_us` after the answer of turn `after`."""

    arrival_us: int = 0  # since the workload's start; 0 where `after` is set
    after: int = -1  # -1: arrives by the clock
    think_us: int = 0


class TurnLabel(NamedTuple):
    """The label of a turn: `form.format(number, part)`."""

    form: str  # such as "line{0}" or "s{0}t{1}"
    number: int
    part: int = 0


class TurnsBuilder:
    """Collects turns one by one into columns."""

    def __init__(self) -> None:
        self._arrival_us = array("q")
        self._prompt_tokens = array("i")
        self._output_tokens = array("i")
        self._output_first_token = array("i")
        self._after = array("i")
        self._think_us = array("q")
        self._run_stops = array("q")
        self._runs = array("i")  # (first_token, count) pairs, end to end
        self._label_form = array("i")
        self._label_number = array("i")
        self._label_part = array("i")
        self._tenant = array("i")
        self._grammar = array("i")
        self._label_forms: dict[str, int] = {}
        self._tenants: dict[str, int] = {}
        self._grammars: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._arrival_us)

    def append(
        self,
        start: TurnStart,
        label: TurnLabel,
        *,
        prompt: Sequence[int],
        prompt_tokens: int,
        output_tokens: int,
        output_first_token: int,
        tenant: str = "",
        grammar: str = "",
    ) -> None:
        """Add a turn behind the others; `prompt` is runs, and is copied. The other values: see `Turn`."""
        arrival_us, after, think_us = start
        form, number, part = label
        self._arrival_us.append(arrival_us)
        self._prompt_tokens.append(prompt_tokens)
        self._output_tokens.append(output_tokens)
        self._output_first_token.append(output_first_token)
        self._after.append(after)
        self._think_us.append(think_us)
        self._runs.extend(prompt)
        self._run_stops.append(len(self._runs) // 2)
        self._label_form.append(self._label_forms.setdefault(form, len(self._label_forms)))
        self._label_number.append(number)
        self._label_part.append(part)
        self._tenant.append(self._tenants.setdefault(tenant, len(self._tenants)))
        self._grammar.append(self._grammars.setdefault(grammar, len(self._grammars)))

    def build(self) -> Turns:
        """Return the turns so far. The builder must not be used again."""
        runs = np.frombuffer(self._runs, np.int32).reshape(-1, 2)
        return Turns(
            arrival_us=_column(self._arrival_us, np.int64),
            prompt_tokens=_column(self._prompt_tokens, np.int32),
            output_tokens=_column(self._output_tokens, np.int32),
            output_first_token=_column(self._output_first_token, np.int32),
            after=_column(self._after, np.int32),
            think_us=_column(self._think_us, np.int64),
            run_stops=_column(self._run_stops, np.int64),
            run_first_token=runs[:, 0].copy(),
            run_tokens=runs[:, 1].copy(),
            label_form=_column(self._label_form, np.int32),
            label_number=_column(self._label_number, np.int32),
            label_part=_column(self._label_part, np.int32),
            tenant=_column(self._tenant, np.int32),
            grammar=_column(self._grammar, np.int32),
            label_forms=tuple(self._label_forms),
            tenants=tuple(self._tenants),
            grammars=tuple(self._grammars),
        )


def _column(values: array[int], dtype: type[np.signedinteger[Any]]) -> NDArray[Any]:
    return _folded(np.frombuffer(values, dtype).copy())


class WorkloadError(ValueError):
    """An unusable workload: where, what is wrong, and what to try."""

    def __init__(self, where: str, problem: str, hint: str) -> None:
        super().__init__(where, problem, hint)  # all three, so that it survives pickling between processes
        self.where = where
        self.problem = problem
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.where}: {self.problem}\nhint: {self.hint}"
