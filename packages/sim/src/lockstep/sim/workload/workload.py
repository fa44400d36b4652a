"""A workload: all future requests, in order, with a digest that identifies them.

    workload = open_workload("conversation_trace.jsonl.gz", seed=7, rate=6.5)
    workload = open_workload("gen:n=500,rate=4,input=lognormal:900:0.75", seed=7)
    workload = open_workload("mix:chat=conversation_trace.jsonl.gz@3;code=azure.csv@1.5", seed=7)

Traces are read by traces.py and servegen.py, journals by journal_turns.py and recording_turns.py, specs by generate.py,
fitted models by fitted.py, mixes by mix.py. All become turns here, and no later code depends on the kind.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, NoReturn

import msgspec
import numpy as np

from lockstep.host.recording import has_recording
from lockstep.sim.workload.arrivals import RATE_MIN, TimeWindow, mean_rate, stretch
from lockstep.sim.workload.fitted import WorkloadModel, draw_model, is_model, parse_model, parse_model_spec
from lockstep.sim.workload.generate import PREFIX, generate, parse_spec, with_rate
from lockstep.sim.workload.journal_turns import is_journal, turns_of_journal
from lockstep.sim.workload.logs import LogReading
from lockstep.sim.workload.mix import (
    MIX_PREFIX,
    check_names,
    mix_turns,
    parse_mix,
    seed_of_source,
    tenant_of_source,
)
from lockstep.sim.workload.recording_turns import turns_of_recording
from lockstep.sim.workload.sampling import spread_sample
from lockstep.sim.workload.servegen import read_servegen, servegen_files, turns_of_servegen
from lockstep.sim.workload.summary import LengthSummary, WorkloadSummary, summarize
from lockstep.sim.workload.token_runs import prompt_ids
from lockstep.sim.workload.trace_files import is_tar, read_bytes, tar_files
from lockstep.sim.workload.trace_turns import turns_of_trace
from lockstep.sim.workload.traces import USUAL_LOG, SkippedRows, read_trace
from lockstep.sim.workload.turns import TIME_US_MAX, Int64s, Turn, Turns, WorkloadError

__all__ = [
    "LengthSummary",
    "SkippedRows",
    "SourceReading",
    "TimeWindow",
    "Turn",
    "Turns",
    "Workload",
    "WorkloadError",
    "WorkloadSummary",
    "open_workload",
    "prompt_ids",
    "workload_digest",
]

_ENDINGS = (".gz", ".zst", ".tar", ".tgz", ".csv", ".json", ".jsonl", ".txt")
DRAWN = ("generated", "fitted", "servegen")
"""Formats whose requests are drawn, so that a beginning is like the rest."""

_DIGEST_TURNS = 4_096  # per block of the digest


@dataclass(frozen=True)
class Workload:
    name: str  # of the file, without endings; or "generated"; or the names of a mix, joined by +
    source: str  # path or spec, as given
    format: str  # of trace_formats.FORMATS, or "journal", "servegen", "generated", "fitted" or "mix"
    digest: str  # BLAKE2b-128 of the turns, hexadecimal; equal digests mean equal workloads
    turns: Turns  # turns by the clock in ascending order; a turn comes after its `after`
    skipped: SkippedRows = field(default=SkippedRows())
    notes: tuple[str, ...] = ()  # changes to a trace that are not in its file, one sentence each
    has_clock: bool = True  # whether requests or sessions have start times; otherwise these are drawn
    tenants_of_engines: frozenset[str] = frozenset()
    """Tenants whose turns were read off a journal: times between turns are those at an engine, front end included."""
    is_drawn: bool = True  # whether it may depend on the seed

    def summary(self) -> WorkloadSummary:
        """Return counts, duration, lengths and sharing, computed at each call."""
        return summarize(self.turns)


class _Content(NamedTuple):
    """Content of a source, before anything is cut or stretched."""

    name: str
    format: str
    turns: Turns
    skipped: SkippedRows = SkippedRows()
    notes: tuple[str, ...] = ()
    own_rate: float | None = None  # arrivals per second for which the turns were drawn; None: measure them
    at_rate: bool = False  # whether `rate` and `rate_scale` are already applied
    has_clock: bool = True
    tenants_of_engines: frozenset[str] = frozenset()
    is_cut: bool = False  # whether `time_window` and `limit` are already applied
    is_drawn: bool = True  # whether it may depend on the seed


@dataclass(frozen=True)
class SourceReading:
    """How the files of a workload are read. Specs that begin with `gen:` have none.

    Args:
        skip_bad_rows: leave bad rows out and count them in `Workload.skipped`, instead of raising.
        recorded_media: media tokens of a trace that separates them from text, such as ServeGen's, become spans of
            prompts; otherwise they are tokens like any other.
        log: how a request log is read where its content does not decide.
        spread: `limit` keeps a sample of the whole trace instead of its first turns: see sampling.py.
    """

    skip_bad_rows: bool = False
    recorded_media: bool = False
    spread: bool = False
    log: LogReading = USUAL_LOG


STRICT = SourceReading()


class _Request(NamedTuple):
    """Arguments of open_workload."""

    spec: str
    seed: int
    rate: float | None
    rate_scale: float
    limit: int | None
    time_window: TimeWindow | None
    reading: SourceReading

    @property
    def target_rate(self) -> float | None:
        return None if self.rate is None else self.rate * self.rate_scale


def open_workload(
    spec: str,
    *,
    seed: int,
    rate_scale: float = 1.0,
    limit: int | None = None,
    rate: float | None = None,
    time_window: TimeWindow | str | None = None,
    digest: bool = True,
    reading: SourceReading = STRICT,
) -> Workload:
    """Read a trace or a journal, generate from a `gen:` spec, draw from a fitted model, or mix several with `mix:`.

    Args:
        seed: seed of everything that is drawn. Nothing is drawn for a trace with recorded arrivals.
        rate: arrivals per second. All arrivals of a trace are stretched by one factor, including bursts and silences;
            for a generator it replaces the rate of the spec. `math.inf` makes all turns arrive at once. Think times are
            never stretched.
        rate_scale: factor on the recorded rate, or on `rate`: 2 halves every gap.
        limit: keep only this number of first turns, by arrival. The whole file is checked nevertheless.
        time_window: keep the turns that arrive in this window, such as `10m..1h`; the first of them is at time 0. The
            window is in the workload's own time, which begins with the first arrival and does not depend on `rate` and
            `rate_scale`. Sessions that begin in it are kept whole. `limit` applies afterwards.
        digest: compute the digest, which takes most of the time; without it the digest is "".
        reading: how the files are read.
    Raises: WorkloadError, before anything is simulated.
    """
    if isinstance(time_window, str):
        try:
            time_window = TimeWindow.parse(time_window)
        except ValueError as error:
            raise WorkloadError(spec, f"`time_window` cannot be `{time_window}`: {error}", "try 10m..1h") from None
    _check_arguments(spec, rate_scale, limit, rate)
    asked = _Request(spec, seed, rate, rate_scale, limit, time_window, reading)
    content = _open(asked)
    if reading.recorded_media and content.turns.media is None:
        hint = "such as --media image=0.3x1..4:1024x768, which adds some"
        raise WorkloadError(spec, "`media` is recorded, but this workload does not separate media from text", hint)
    turns = content.turns
    if time_window is not None and not content.is_cut:
        turns = _cut_to_window(spec, turns, time_window)
    if reading.spread and content.format in DRAWN:
        problem = f"`sample` is spread, which is for recorded requests, and these are {content.format}"
        raise WorkloadError(spec, problem, "leave out --sample: other requests of a generator are drawn alike")
    if limit is not None and not content.is_cut:
        turns = spread_sample(turns, limit) if reading.spread else turns.head(limit)
    if not content.at_rate:
        turns = turns.at(_rescaled(asked, turns, content.own_rate))
    _check_duration(spec, turns)
    name = workload_digest(turns) if digest else ""
    return Workload(
        content.name,
        spec,
        content.format,
        name,
        turns,
        content.skipped,
        content.notes,
        content.has_clock,
        content.tenants_of_engines,
        content.is_drawn,
    )


def workload_digest(turns: Turns) -> str:
    """Return the BLAKE2b-128 of the msgpack form of every field of every turn, in order, without file names."""
    digest = hashlib.blake2b(_array_header(len(turns)), digest_size=16)
    encode = msgspec.msgpack.Encoder().encode
    for start in range(0, len(turns), _DIGEST_TURNS):
        rows = np.arange(start, min(start + _DIGEST_TURNS, len(turns)))
        afters = [None if after < 0 else after for after in turns.after[rows].tolist()]
        block: list[tuple[object, ...]] = list(
            zip(
                turns.arrival_us[rows].tolist(),
                turns.prompts(rows),
                turns.output_tokens[rows].tolist(),
                turns.output_first_token[rows].tolist(),
                turns.labels(rows),
                [turns.tenants[code] for code in turns.tenant[rows].tolist()],
                afters,
                turns.think_us[rows].tolist(),
                strict=True,
            )
        )
        if turns.grammars != ("",):
            grammars = [turns.grammars[code] for code in turns.grammar[rows].tolist()]
            block = [(*turn, grammar) if grammar else turn for turn, grammar in zip(block, grammars, strict=True)]
        if turns.media is not None:
            media = turns.media.of(rows)
            block = [(*turn, "media", items) if items else turn for turn, items in zip(block, media, strict=True)]
        if turns.adapter is not None:
            adapters = [turns.adapters[code] for code in turns.adapter[rows].tolist()]
            block = [(*turn, "adapter", name) if name else turn for turn, name in zip(block, adapters, strict=True)]
        if turns.samples is not None:
            samples = turns.samples[rows].tolist()
            block = [(*turn, "samples", n) if n > 1 else turn for turn, n in zip(block, samples, strict=True)]
        digest.update(encode(block)[len(_array_header(len(block))) :])
    return digest.hexdigest()


def _array_header(count: int) -> bytes:
    """Return the msgpack header of an array of `count` items."""
    if count < 16:
        return bytes([0x90 | count])
    return b"\xdc" + count.to_bytes(2, "big") if count < 2**16 else b"\xdd" + count.to_bytes(4, "big")


# --- sources ----------------------------------------------------------------------------------------------------------


def _open(asked: _Request) -> _Content:
    if asked.spec.startswith(MIX_PREFIX):
        return _open_mix(asked)
    if asked.spec.startswith(PREFIX):
        if asked.reading.log != USUAL_LOG:
            problem = "`columns`, `tokenizer` and `chars_per_token` are about files of requests"
            raise WorkloadError(asked.spec, problem, "leave them out for a generator")
        return _open_generator(asked)
    path = Path(asked.spec)
    if path.is_dir() and (is_journal(path) or has_recording(path)):
        turns, found = turns_of_journal(path) if is_journal(path) else turns_of_recording(path)
        tenants = frozenset(turns.tenants)
        return _Content(path.resolve().name, "journal", turns, notes=tuple(found), tenants_of_engines=tenants)
    if path.is_dir():
        return _open_servegen(asked, path.name, servegen_files(path))
    data = read_bytes(path)
    name = _name_of(path)
    if is_tar(data):
        return _open_servegen(asked, name, tar_files(path, data))
    if is_model(data):
        return _open_model(asked, name, parse_model(asked.spec, data), None, None)
    trace = read_trace(path, data, skip_bad_rows=asked.reading.skip_bad_rows, log=asked.reading.log)
    turns, notes = turns_of_trace(asked.spec, trace, seed=asked.seed, rate=asked.target_rate)
    at_rate = not trace.has_clock and asked.rate is not None  # drawn at that rate
    return _Content(
        name,
        trace.format.name,
        turns,
        trace.skipped,
        notes,
        at_rate=at_rate,
        has_clock=trace.has_clock,
        is_drawn=at_rate and asked.rate != math.inf,
    )


def _name_of(path: Path) -> str:
    """Return the file's name without endings that describe its format."""
    name = path.name
    while (ending := Path(name).suffix) in _ENDINGS:
        name = name.removesuffix(ending)
    return name


def _open_generator(asked: _Request) -> _Content:
    if (named := parse_model_spec(asked.spec)) is not None:
        path = Path(named.file)
        data = read_bytes(path)
        if not is_model(data):
            hint = "`lockstep workload fit TRACE -o FILE` makes one; a trace is named without gen:file="
            raise WorkloadError(asked.spec, f"`{path}` is not a fitted model", hint)
        return _open_model(asked, _name_of(path), parse_model(str(path), data), named.turns, named.rate)
    spec = parse_spec(asked.spec)
    if asked.time_window is None:
        spec = with_rate(spec, rate=asked.rate, rate_scale=asked.rate_scale)
        return _Content("generated", "generated", generate(spec, seed=asked.seed, limit=asked.limit), at_rate=True)
    return _Content("generated", "generated", generate(spec, seed=asked.seed), own_rate=spec.rate)


def _open_model(asked: _Request, name: str, model: WorkloadModel, turns: int | None, rate: float | None) -> _Content:
    """Draw `turns` turns at `rate`; by default the number and the rate of the trace."""
    source = model.provenance.get("source", "a trace")
    notes = (f"drawn from a model fitted to {source}, digest {model.provenance.get('digest', 'unknown')}",)
    own_rate = model.arrivals.rate if rate is None else rate
    if asked.time_window is not None:
        drawn = draw_model(model, seed=asked.seed, turns=turns, rate=own_rate)
        return _Content(name, "fitted", drawn, notes=notes, own_rate=own_rate)
    if asked.limit is not None:
        turns = min(model.turns if turns is None else turns, asked.limit)
    target = own_rate if asked.rate is None else asked.rate
    target = None if target is None else target * asked.rate_scale
    return _Content(
        name, "fitted", draw_model(model, seed=asked.seed, turns=turns, rate=target), notes=notes, at_rate=True
    )


def _open_servegen(asked: _Request, name: str, files: Mapping[str, bytes]) -> _Content:
    content = read_servegen(asked.spec, files)
    turns = turns_of_servegen(
        asked.spec,
        content,
        seed=asked.seed,
        media=asked.reading.recorded_media,
        window=asked.time_window,
        limit=asked.limit,
    )
    return _Content(name, "servegen", turns, notes=content.notes, is_cut=True)


def _open_mix(asked: _Request) -> _Content:
    sources = parse_mix(asked.spec)
    opened = [
        open_workload(
            source.workload,
            seed=seed_of_source(asked.seed, place),
            rate=source.rate,
            reading=_reading_of(asked.reading, source.workload),
            digest=False,
        )
        for place, source in enumerate(sources)
    ]
    names = [source.name or workload.name for source, workload in zip(sources, opened, strict=True)]
    check_names(asked.spec, names)
    skipped = SkippedRows(
        sum(workload.skipped.count for workload in opened),
        tuple(example for workload in opened for example in workload.skipped.examples),
    )
    notes = tuple(f"{name}: {note}" for name, workload in zip(names, opened, strict=True) for note in workload.notes)
    parts = [workload.turns for workload in opened]
    if asked.time_window is not None:  # sources start together, so each can be cut on its own
        parts = [part.take(_rows_in(part, asked.time_window)) for part in parts]
    if asked.limit is not None and not asked.reading.spread:
        parts = [part.head(asked.limit) for part in parts]
    left = [(name, part) for name, part in zip(names, parts, strict=True) if len(part)]
    if not left:
        _raise_empty_window(asked.spec, asked.time_window, max(int(w.turns.arrival_us.max()) for w in opened))
    turns = mix_turns(asked.spec, [name for name, _ in left], [part for _, part in left])
    at_engines = frozenset(
        tenant_of_source(name, tenant)
        for name, workload in zip(names, opened, strict=True)
        for tenant in workload.tenants_of_engines
    )
    return _Content("+".join(names), "mix", turns, skipped, notes, tenants_of_engines=at_engines)


def _reading_of(reading: SourceReading, spec: str) -> SourceReading:
    """Return how a source of a mix is read: options about logs are for those that are files."""
    log = USUAL_LOG if spec.startswith(PREFIX) else reading.log
    return SourceReading(skip_bad_rows=reading.skip_bad_rows, log=log)


# --- time -------------------------------------------------------------------------------------------------------------


def _check_arguments(spec: str, rate_scale: float, limit: int | None, rate: float | None) -> None:
    if not 1e-6 <= rate_scale <= 1e6:
        raise WorkloadError(spec, f"`rate_scale` must be from 1e-6 to 1e6, got `{rate_scale}`", "2 halves every gap")
    if rate is not None and not rate >= RATE_MIN:
        hint = "arrivals per second, such as 6.5; inf makes all arrive at once"
        raise WorkloadError(spec, f"`rate` must be at least {RATE_MIN:g}, got `{rate}`", hint)
    if limit is not None and limit < 1:
        raise WorkloadError(spec, f"`limit` must be at least 1, got `{limit}`", "leave it out to keep every request")


def _check_duration(spec: str, turns: Turns) -> None:
    if int(turns.arrival_us.max()) > TIME_US_MAX:
        raise WorkloadError(spec, "lasts more than 285 years at this rate", "raise `rate` or `rate_scale`")


def _cut_to_window(spec: str, turns: Turns, window: TimeWindow) -> Turns:
    """Return the turns that arrive in the window, and the later turns of their sessions; the first arrives at 0."""
    rows = _rows_in(turns, window)
    if not len(rows):
        _raise_empty_window(spec, window, int(turns.arrival_us.max()))
    cut = turns.take(rows)
    return cut.at(cut.arrival_us - cut.arrival_us[0])


def _rows_in(turns: Turns, window: TimeWindow) -> Int64s:
    arrivals_us = turns.arrival_us[turns.root()]
    stop_us = np.iinfo(np.int64).max if window.stop_us is None else window.stop_us
    return np.flatnonzero((arrivals_us >= window.start_us) & (arrivals_us < stop_us))


def _raise_empty_window(spec: str, window: TimeWindow | None, last_us: int) -> NoReturn:
    problem = f"nothing arrives in the window {window}: the first arrival is at 0, the last at {last_us / 1e6:g} s"
    raise WorkloadError(spec, problem, "widen --time-window")


def _rescaled(asked: _Request, turns: Turns, own_rate: float | None) -> Int64s:
    """Return the arrivals stretched to `rate`, then by `rate_scale`."""
    arrivals_us = turns.arrival_us
    if asked.rate is None or asked.rate == math.inf:
        return stretch(arrivals_us, 1 / asked.rate_scale if asked.rate is None else 0.0)
    by_clock_us = arrivals_us[turns.by_clock_rows]
    if len(by_clock_us) == 1:
        return arrivals_us
    recorded = own_rate if own_rate is not None else mean_rate(by_clock_us)
    if recorded == math.inf:
        problem = f"cannot be stretched to {asked.rate:g} requests/s: all {len(by_clock_us)} arrive at one instant"
        raise WorkloadError(
            asked.spec, problem, "leave out --rate, or raise --limit so that it reaches a second instant"
        )
    return stretch(arrivals_us, recorded / (asked.rate * asked.rate_scale))
