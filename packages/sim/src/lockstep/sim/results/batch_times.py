"""Durations of batches on a device, from a journal or from a file of `lockstep replay PLANS --on-hardware`.

times = read_batch_times("measured.jsonl")            # or of_journal(run)
predicted_us = predict(cost, times.batches)
for row in error_rows(times.batches, predicted_us):   # by kind and size
    ...

The file is JSON lines: a header that describes model, device and engine, then one batch per line. Its `predicted_us` is
the prediction of the model named in the header at the time of writing, for information only; a calibration predicts
again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from lockstep.core.contract.commands import BatchPlan, Mode, Ranks, Step
from lockstep.core.contract.events import BatchFinished, ObservedEvent
from lockstep.core.journal.replay import fold
from lockstep.sim.cost import BatchShape, CalibrationError, CostModel
from lockstep.sim.host.batch_shapes import extend_shape_of

Float64s = NDArray[np.float64]

FORMAT = "lockstep-batch-times"
VERSION = 1
OUTLIER = 2.0  # factor from the usual duration of batches of the same kind and size, up or down
USUAL_MIN = 5  # batches of a kind and size that are needed to find an outlier among them


class BatchTime(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A batch and its duration on the device."""

    batch_id: int
    mode: Mode
    shape: BatchShape  # of the first pass
    steps: int = 1  # passes; each has the same rows one position later
    took_us: float
    predicted_us: float = 0.0  # 0: no prediction

    @property
    def passes(self) -> list[BatchShape]:
        """The shape of every pass."""
        context, rows = self.shape.decode_context_tokens, self.shape.decode_rows
        return [replace(self.shape, decode_context_tokens=context + more * rows) for more in range(self.steps)]

    @property
    def size(self) -> int:
        """New tokens of an extend or mixed batch, rows of a decode."""
        shape = self.shape
        return shape.decode_rows if self.mode == "decode" else shape.extend_tokens + shape.decode_rows


class BatchTimesHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """First line of a file: what ran, and on which device."""

    format: str = FORMAT
    version: int = VERSION
    model: str  # catalogue name or path
    gpu: str  # catalogue name
    tp: int = 1
    weights_dtype: str = ""  # "": the checkpoint's own
    engine: str = "lockstep"
    engine_version: str = ""
    device: str = ""  # name reported by the driver
    plans: str = ""  # name of the run that the plans come from
    calibration: str = ""  # calibration of the model behind `predicted_us`
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise CalibrationError(f"`format` must be {FORMAT}, got `{self.format}`")
        if self.version != VERSION:
            raise CalibrationError(f"`version` {self.version} is not one this release reads, which is {VERSION}")


@dataclass(frozen=True)
class BatchTimes:
    """Batches in the order of their ends."""

    batches: Sequence[BatchTime]
    left_out: int = 0  # batches without times, or whose times are not those of their rows; see `BatchFold`
    measured: BatchTimesHeader | None = None  # of times read from a file


def batch_time(plan: BatchPlan, took_us: float, predicted_us: float = 0.0) -> BatchTime:
    """Return the BatchTime of a plan that was run."""
    return BatchTime(
        batch_id=plan.batch_id,
        mode=plan.mode,
        shape=extend_shape_of(plan),
        steps=plan.steps,
        took_us=took_us,
        predicted_us=predicted_us,
    )


def shape_of_pass(own: BatchShape, agreed: Ranks) -> BatchShape | None:
    """Return the shape of a pass of data-parallel ranks, from the batch of the slowest; see `cluster.data_parallel`.

    A pass lasts as long as that rank. Rows of other ranks are computed in its MLPs; their context is not in its
    journal, and counts as that of its own rows.
    Args:
        own: the batch of one rank.
    Returns: None if another rank has more tokens.
    """
    tokens = own.extend_tokens + own.decode_rows + own.draft_tokens
    if tokens < max(agreed.tokens):
        return None
    others = sum(agreed.tokens) - tokens
    if agreed.extends or not own.decode_rows:  # rows that decode are extends by one token
        return replace(own, extend_tokens=own.extend_tokens + others, own=own)
    padded = agreed.padding == "max_length"
    rows = len(agreed.tokens) * own.decode_rows if padded else own.decode_rows + others
    return replace(
        own,
        decode_rows=rows,
        decode_context_tokens=own.decode_context_tokens * rows // own.decode_rows,
        sampled_rows=rows,
        own=own,
    )


class Durations:
    """Computes durations of batches in the order of their ends.

    A batch that was launched behind another one begins when that one ends, so its duration excludes the wait.
    """

    def __init__(self) -> None:
        self._free_us = 0

    def took_us(self, started_us: int, finished_us: int) -> int:
        """Return the duration in us of the batch that ends next; 0 if its start and end are unknown."""
        began_us = max(started_us, self._free_us)
        self._free_us = max(self._free_us, finished_us)
        return max(0, finished_us - began_us)


class BatchFold:
    """Pairs the batches of a run with their durations, event by event."""

    def __init__(self) -> None:
        self._running: dict[int, BatchPlan] = {}
        self._durations = Durations()
        # Batches without times, with deferred sampling, with drafts, beside another stream, or on a rank that waited
        # for another one.
        self.left_out = 0

    def observe(self, event: ObservedEvent, step: Step) -> BatchTime | None:
        """Take in an event and its Step. Return the batch that ended, None if none did or its time is unknown."""
        found = self._ended(event) if type(event) is BatchFinished else None
        launched = step.launched()
        if launched is not None and launched.layers is not None:
            self._running.clear()  # what runs has a share of the device from now on
        elif launched is not None and launched.sample_after is None and launched.sms is None:
            self._running[launched.batch_id] = launched
        return found

    def _ended(self, event: BatchFinished) -> BatchTime | None:
        plan = self._running.pop(event.batch_id, None)
        took_us = self._durations.took_us(event.started_us, event.finished_us)
        # The time of drafting is unknown. Plans of a recording show drafts as decode rows of several tokens.
        if plan is not None and took_us and plan.speculation is None:
            decodes = (plan.stops - plan.starts)[plan.extend_rows :]
            one = batch_time(plan, took_us)
            if one.size and (decodes <= plan.steps).all():
                shape = one.shape if plan.ranks is None else shape_of_pass(one.shape, plan.ranks)
                if shape is not None:
                    return replace(one, shape=shape)
        self.left_out += 1
        return None


def of_steps(steps: Iterable[tuple[ObservedEvent, Step]]) -> BatchTimes:
    """Return the batches of a run, with their durations, from its events and Steps."""
    fold_ = BatchFold()
    batches = [one for event, step in steps if (one := fold_.observe(event, step)) is not None]
    return BatchTimes(batches, fold_.left_out)


def of_journal(folder: Path) -> BatchTimes:
    """Fold a run's journal and pair every batch with its duration. Raises: JournalError, Divergence."""
    return of_steps(fold(folder))


# ---------------------------------------------------------------------------------------------------------------- file


def line_of(one: BatchTimesHeader | BatchTime) -> bytes:
    """Return a line of a file: first the header, then each batch."""
    return msgspec.json.encode(one) + b"\n"


def read_batch_times(path: str | Path) -> BatchTimes:
    """Read a file of batch times. Raises CalibrationError with file and line."""
    decode = msgspec.json.Decoder(BatchTime).decode
    number = 1
    try:
        with Path(path).open("rb") as file:
            measured = msgspec.json.decode(next(file, b""), type=BatchTimesHeader)
            batches = []
            for line in file:
                number += 1
                batch = decode(line)
                if not (batch.took_us > 0.0 and batch.steps > 0 and batch.size > 0):
                    raise CalibrationError("`took_us`, `steps` and the size of a batch must be above 0")
                batches.append(batch)
    except OSError as error:
        raise CalibrationError(
            f"{path}: {error.strerror or error}\nhint: `lockstep replay PLANS --on-hardware --out FILE` makes one"
        ) from error
    except (CalibrationError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CalibrationError(
            f"{path}: line {number}: not one of a file of batch times: {error}\n"
            "hint: `lockstep replay PLANS --on-hardware --out FILE` makes one"
        ) from error
    return BatchTimes(batches, measured=measured)


# -------------------------------------------------------------------------------------------------------------- errors


def predict(cost: CostModel, batches: Sequence[BatchTime]) -> Float64s:
    """Return the time in us that a cost model predicts for each batch."""
    return np.array([sum(cost.batch_us(shape).mean_us for shape in batch.passes) for batch in batches])


@dataclass(frozen=True)
class ErrorRow:
    """Errors of predictions over batches of one kind and size. An error is |predicted / measured - 1|."""

    mode: str
    sizes: str  # such as `17-32 rows`; empty for all sizes
    batches: int
    measured_us: float  # median; so are the next three
    predicted_us: float
    ratio: float  # measured / predicted
    error: float
    error_p95: float


def error_row(mode: str, sizes: str, measured_us: Float64s, predicted_us: Float64s) -> ErrorRow:
    """Return the row of at least one batch."""
    errors = np.abs(predicted_us / measured_us - 1.0)
    return ErrorRow(
        mode,
        sizes,
        len(measured_us),
        float(np.median(measured_us)),
        float(np.median(predicted_us)),
        float(np.median(measured_us / predicted_us)),
        float(np.median(errors)),
        float(np.quantile(errors, 0.95)),
    )


def error_rows(batches: Sequence[BatchTime], predicted_us: Float64s) -> list[ErrorRow]:
    """Return rows by kind and by size in powers of two, then the total of each kind, and the total of all last."""
    if not batches:
        return []
    took_us = np.array([batch.took_us for batch in batches])
    rows = []
    for mode, alike in _by_kind(batches):
        sizes = [(sizes, picked) for sizes, picked in alike if len(alike) > 1]
        rows += [error_row(mode, sizes, took_us[picked], predicted_us[picked]) for sizes, picked in sizes]
        every = [index for _, picked in alike for index in picked]
        only = alike[0][0] if len(alike) == 1 else ""
        rows.append(error_row(mode, only, took_us[every], predicted_us[every]))
    return [*rows, error_row("all", "", took_us, predicted_us)]


@dataclass(frozen=True)
class Outlier:
    """A batch with a far longer or shorter duration than others of its kind and size, relative to the prediction."""

    batch: BatchTime
    predicted_us: float
    times: float  # measured duration over the expected one


def outliers(batches: Sequence[BatchTime], predicted_us: Float64s) -> list[Outlier]:
    """Return batches with measured / predicted beyond OUTLIER times the median of their kind and size, or its inverse.

    The farthest come first. A kind and size with fewer than USUAL_MIN batches has no outliers.
    """
    found = []
    ratios = np.array([batch.took_us for batch in batches]) / predicted_us
    for _, alike in _by_kind(batches):
        for _, picked in alike:
            if len(picked) >= USUAL_MIN:
                times = ratios[picked] / np.median(ratios[picked])
                for index, factor in zip(picked, times.tolist(), strict=True):
                    if not 1.0 / OUTLIER <= factor <= OUTLIER:
                        found.append(Outlier(batches[index], float(predicted_us[index]), factor))
    return sorted(found, key=lambda one: (-abs(math.log(one.times)), one.batch.batch_id))


def _by_kind(batches: Sequence[BatchTime]) -> list[tuple[str, list[tuple[str, list[int]]]]]:
    """Return the indices of batches by kind, then by size in powers of two."""
    keys = [(batch.mode, (batch.size - 1).bit_length()) for batch in batches]
    order = sorted(range(len(batches)), key=keys.__getitem__)
    found: list[tuple[str, list[tuple[str, list[int]]]]] = []
    for (mode, power), group in groupby(order, key=keys.__getitem__):
        unit = "rows" if mode == "decode" else "tokens"
        least, most = (1 << power >> 1) + 1, 1 << power
        sizes = f"{least:,}-{most:,} {unit}" if least < most else f"{most:,} {unit[: -1 if most == 1 else None]}"
        if not found or found[-1][0] != mode:
            found.append((mode, []))
        found[-1][1].append((sizes, list(group)))
    return found
