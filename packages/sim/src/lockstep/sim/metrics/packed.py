"""Batches and CPU intervals of a run in packed rows of integers, with the texts of their codes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lockstep.core.contract.commands import (
    Int64s,
)
from lockstep.sim.metrics.columns import BATCH_COLUMNS, CPU_COLUMNS, LAUNCHED, MODE, WORK
from lockstep.sim.metrics.packed_rows import PART_ROWS, PackedRows


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """The long lists of a run: rows of integers, and the texts of their codes."""

    batches: PackedRows  # BATCH_COLUMNS
    modes: tuple[str, ...]
    cpu: PackedRows  # CPU_COLUMNS
    works: tuple[str, ...]

    @classmethod
    def join(cls, parts: Sequence[Packed | JoinedPacked]) -> Packed:
        """Join the lists of several engines: batches by launch, CPU intervals engine by engine."""
        modes, works = Codes(), Codes()
        batches, cpu = PackedRows(*BATCH_COLUMNS), PackedRows(*CPU_COLUMNS)
        launched = [
            recoded(columns, MODE, np.array([modes[mode] for mode in part.modes], np.int64))
            for part in parts
            for columns in part.batches.parts()
        ]
        if launched:
            columns = [np.concatenate(column) for column in zip(*launched, strict=True)]
            order = np.argsort(columns[LAUNCHED], kind="stable")
            for start in range(0, len(order), PART_ROWS):
                rows = order[start : start + PART_ROWS]
                batches.add_columns(*(column[rows] for column in columns))
                batches.pack()
        for part in parts:
            codes = np.array([works[work] for work in part.works], np.int64)
            for done in part.cpu.parts():
                cpu.add_columns(*recoded(done, WORK, codes))
                cpu.pack()
        return cls(batches, tuple(modes), cpu, tuple(works))


class JoinedPacked:
    """The long lists of several engines as one, joined at first use.

    Joining needs some 200 bytes for each batch for a while, and a report of latencies does not read these lists.
    """

    def __init__(self, parts: Sequence[Packed | JoinedPacked]) -> None:
        self._parts = parts

    @cached_property
    def _whole(self) -> Packed:
        return Packed.join(self._parts)

    @property
    def batches(self) -> PackedRows:
        """See Packed."""
        return self._whole.batches

    @property
    def modes(self) -> tuple[str, ...]:
        """See Packed."""
        return self._whole.modes

    @property
    def cpu(self) -> PackedRows:
        """See Packed."""
        return self._whole.cpu

    @property
    def works(self) -> tuple[str, ...]:
        """See Packed."""
        return self._whole.works


def recoded(columns: tuple[Int64s, ...], place: int, codes: Int64s) -> tuple[Int64s, ...]:
    """Return the columns with the codes of one column translated by `codes`."""
    return *columns[:place], codes[columns[place]], *columns[place + 1 :]


class Codes(dict[str, int]):
    """A number for each text, in order of first lookup."""

    def __missing__(self, text: str) -> int:
        self[text] = code = len(self)
        return code


def coded(column: Int64s, names: Sequence[str], codes: Codes) -> Int64s:
    """Return a column of indices into `names` as a column of `codes`. New codes are numbered in order of appearance."""
    if not all(name in codes for name in names):
        _, first = np.unique(column, return_index=True)
        for at in np.sort(first).tolist():
            codes[names[column[at]]]
    return np.array([codes.get(name, -1) for name in names], np.int64)[column]
