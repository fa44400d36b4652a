"""ServeGen clients: recorded behaviour of many clients of a service over a day, and requests drawn from it.

A client is two files, in a folder or a tar archive of any depth:

    chunk-7-trace.csv       window start s, requests/s, CV of the gaps, Gamma or Weibull, shape, scale; no header
    chunk-7-dataset.json    {"0": {"input_tokens": "{45: 0.009, ...}", "output_tokens": ...}, "21600": ...}

Source of the format: ServeGen (Xiang et al., arXiv 2505.09999). A window lasts until the next one starts, and the last
window as long as the previous one. Windows of rate zero are silent and have neither process nor parameters.

Requests of a client are a renewal process in *operational* time, which runs at the client's rate and stops in silent
windows. Gaps have mean 1 and the shape of the window in which they begin, so every window has its recorded number of
requests on average. The recorded scale is ignored, because it describes only the requests within a window, and together
with the shape it contradicts the rate if a window is half empty. Lengths are drawn from the histograms of input and
output independently, because their joint distribution is not recorded.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from lockstep.sim.cost.encoder import KINDS
from lockstep.sim.workload.arrivals import TimeWindow, random_stream
from lockstep.sim.workload.token_runs import fresh_tokens
from lockstep.sim.workload.turn_media import MediaColumns
from lockstep.sim.workload.turns import LENGTH_TOKENS_MAX, TIME_US_MAX, Int64s, Turns, WorkloadError

Floats = NDArray[np.float64]

PROCESSES = ("Gamma", "Weibull")
REQUESTS_MAX = 50_000_000

_TRACE_FILE = re.compile(r"(?:^|/)(chunk-(\d+)-)trace\.csv$")
_TRACE_COLUMNS = 6
_BIN = re.compile(r"\s*(\d{1,9})\s*:\s*([0-9.eE+-]{1,40})\s*")
_WINDOW_DEFAULT_S = 600.0
_BURN_IN = 10.0  # times cv**2: length of the burn-in before time 0, after which the start of the process has no effect
_BURN_IN_MAX = 10_000
_BLOCK_GAPS = 65_536  # drawn at a time


class Window(NamedTuple):
    start_s: float
    rate: float  # requests per second; 0: silent
    process: str  # "" if silent
    shape: float


class Histogram(NamedTuple):
    """Lengths and their cumulated probabilities, up to 1."""

    tokens: Int64s
    cumulated: Floats

    def draw(self, random: np.random.RandomState, count: int) -> Int64s:
        return self.tokens[np.searchsorted(self.cumulated, random.random_sample(count), side="right")]


class MediaPart(NamedTuple):
    """Tokens of media among the parts of the input."""

    part: int
    kind: int  # into KINDS
    counts: Histogram | None  # contents per request; None: not recorded, so one


class ServeGenClient(NamedTuple):
    number: int
    windows: tuple[Window, ...]
    lengths: Mapping[float, tuple[tuple[Histogram, ...], Histogram]]  # window start in s -> parts of the input, output
    media: Mapping[float, tuple[MediaPart, ...]] = {}  # window start in s -> parts that are media


class ServeGen(NamedTuple):
    clients: tuple[ServeGenClient, ...]
    notes: tuple[str, ...]


def servegen_files(folder: Path) -> dict[str, bytes]:
    """Return the files of clients below a folder, by relative path; empty without any. Raises: WorkloadError."""
    try:
        paths = sorted(path for path in folder.rglob("chunk-*-*") if path.is_file())
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
    except OSError as error:
        raise WorkloadError(
            str(error.filename or folder), f"cannot be read: {error.strerror}", "name a folder"
        ) from None


def read_servegen(source: str, files: Mapping[str, bytes]) -> ServeGen:
    """Check every window and histogram of every client. Raises: WorkloadError, with file, line and column."""
    clients = []
    for name in files:
        if found := _TRACE_FILE.search(name):
            dataset = f"{name[: found.start(1)]}{found[1]}dataset.json"
            if dataset not in files:
                raise WorkloadError(f"{source}: {dataset}", "no such file", f"it has the lengths of {name}")
            windows = _windows(f"{source}: {name}", files[name])
            clients.append(ServeGenClient(int(found[2]), windows, *_lengths(f"{source}: {dataset}", files[dataset])))
    if not clients:
        hint = "expected chunk-N-trace.csv and chunk-N-dataset.json, as ServeGen publishes them"
        raise WorkloadError(source, "no file of a ServeGen client in it", hint)
    numbers = [client.number for client in clients]
    if len(set(numbers)) < len(numbers):
        twice = next(number for number in numbers if numbers.count(number) > 1)
        raise WorkloadError(source, f"client {twice} occurs twice", "name the folder or archive of one service")
    clients.sort(key=lambda client: client.number)
    if not any(window.rate for client in clients for window in client.windows):
        raise WorkloadError(source, "every window of every client has rate zero", "is this the right file?")
    silent = sum(not window.rate for client in clients for window in client.windows)
    windows_all = sum(len(client.windows) for client in clients)
    note = f"drawn from {windows_all:,} rate windows of {len(clients)} clients, {silent:,} of them silent"
    return ServeGen(tuple(clients), (note,))


# --- files ------------------------------------------------------------------------------------------------------------


def _windows(where: str, data: bytes) -> tuple[Window, ...]:
    windows: list[Window] = []
    try:
        for cells in (reader := csv.reader(io.StringIO(data.decode("utf-8-sig")))):
            if cells:
                windows.append(_window(f"{where}, line {reader.line_num}", cells, windows[-1] if windows else None))
    except (UnicodeDecodeError, csv.Error) as error:
        raise WorkloadError(where, f"not readable as CSV: {error}", "fetch it again") from None
    if not windows:
        raise WorkloadError(where, "the file is empty", "a client has at least one rate window")
    return tuple(windows)


def _window(where: str, cells: list[str], before: Window | None) -> Window:
    if len(cells) != _TRACE_COLUMNS:
        expected = "window start, rate, CV, process, shape, scale"
        raise WorkloadError(where, f"expected {expected}, got {len(cells)} values", "is this a ServeGen trace file?")
    start_s = _cell(where, "window start", cells[0], "seconds", TIME_US_MAX / 1e6)
    rate = _cell(where, "rate", cells[1], "requests per second", 1e6)
    _cell(where, "CV", cells[2], "a coefficient of variation", 1e6)
    shape = _cell(where, "shape", cells[4], "the shape of the gaps", 1e6)
    _cell(where, "scale", cells[5], "the scale of the gaps", 1e12)
    if before is not None and start_s <= before.start_s:
        raise WorkloadError(
            f"{where}, column `window start`", f"`{cells[0]}` is not after the window above", "sort them"
        )
    process = cells[3].strip()
    if rate and process not in PROCESSES:
        hint = "an empty process is allowed in windows of rate zero only"
        raise WorkloadError(f"{where}, column `process`", f"expected Gamma or Weibull, got `{process}`", hint)
    if rate and shape < 1e-3:
        hint = "it is 1/CV**2 of Gamma gaps"
        raise WorkloadError(f"{where}, column `shape`", f"expected at least 0.001, got `{cells[4]}`", hint)
    return Window(start_s, rate, process, shape)


def _cell(where: str, column: str, text: str, what: str, most: float) -> float:
    try:
        if 0 <= (value := float(text)) <= most:
            return value
    except ValueError:
        pass
    problem = f"expected {what}, a number from 0 to {most:g}, got `{text[:80]}`"
    raise WorkloadError(f"{where}, column `{column}`", problem, "correct the row")


def _lengths(
    where: str, data: bytes
) -> tuple[dict[float, tuple[tuple[Histogram, ...], Histogram]], dict[float, tuple[MediaPart, ...]]]:
    """Return the histograms of a client by window start, and its media parts. A window without requests has none."""
    try:
        content: Any = msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        raise WorkloadError(where, f"not JSON: {error}", "fetch it again") from None
    if not isinstance(content, dict) or not content:
        raise WorkloadError(where, "expected an object with a member per window", "is this a ServeGen dataset file?")
    lengths, media = {}, {}
    for start, columns in content.items():
        start_s = _cell(where, "window start", start, "seconds", TIME_US_MAX / 1e6)
        if not isinstance(columns, dict):
            raise WorkloadError(f"{where}, window {start}", "expected an object of histograms", "fetch it again")
        names = [name for name in ("input_tokens", "text_tokens") if name in columns]
        if not names or "output_tokens" not in columns:
            missing = "output_tokens" if names else "input_tokens"
            hint = "expected input_tokens (or text_tokens and media) and output_tokens"
            raise WorkloadError(f"{where}, window {start}", f"no histogram `{missing}`", hint)
        names += [name for name in ("image_tokens", "audio_tokens", "video_tokens") if name in columns]
        inputs = [_histogram(f"{where}, window {start}, `{name}`", columns[name]) for name in names]
        output = _histogram(f"{where}, window {start}, `output_tokens`", columns["output_tokens"])
        if output is not None and all(inputs):
            lengths[start_s] = (tuple(histogram for histogram in inputs if histogram is not None), output)
            media[start_s] = tuple(
                MediaPart(names.index(f"{kind}_tokens"), number, _count(f"{where}, window {start}", kind, columns))
                for number, kind in enumerate(KINDS)
                if f"{kind}_tokens" in names
            )
    return lengths, media


def _count(where: str, kind: str, columns: Mapping[str, object]) -> Histogram | None:
    """Return the histogram of the contents of a kind per request; None if it is not recorded."""
    name = f"{kind}_count"
    return _histogram(f"{where}, `{name}`", columns[name]) if name in columns else None


def _histogram(where: str, text: object) -> Histogram | None:
    """Parse `{45: 0.009, 46: 0.011}`; None if it is empty."""
    if type(text) is not str or not (text.strip().startswith("{") and text.strip().endswith("}")):
        raise WorkloadError(
            where, f"expected a histogram such as {{45: 0.2, 46: 0.8}}, got `{str(text)[:60]}`", "fetch it again"
        )
    items = text.strip()[1:-1].split(",")
    if items == [""]:
        return None
    tokens, weights = [], []
    for item in items:
        found = _BIN.fullmatch(item)
        weight = float(found[2]) if found and _is_number(found[2]) else math.nan
        if found is None or not 0 <= weight <= 1e12 or int(found[1]) > LENGTH_TOKENS_MAX:
            problem = f"expected TOKENS: WEIGHT, tokens up to {LENGTH_TOKENS_MAX:,}, got `{item.strip()[:60]}`"
            raise WorkloadError(where, problem, "fetch it again")
        tokens.append(int(found[1]))
        weights.append(weight)
    total = sum(weights)
    if not total > 0:
        raise WorkloadError(where, "all weights are zero", "a window without requests has an empty histogram, {}")
    cumulated = np.cumsum(weights) / total
    # no probability may remain after the last length because of rounding
    cumulated[np.flatnonzero(weights)[-1] :] = 1.0
    return Histogram(np.array(tokens, np.int64), cumulated)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


# --- requests ---------------------------------------------------------------------------------------------------------


QUESTION_TOKENS = 32  # text tokens after the media of a prompt


def turns_of_servegen(
    source: str,
    content: ServeGen,
    *,
    seed: int,
    media: bool = False,
    window: TimeWindow | None = None,
    limit: int | None = None,
) -> Turns:
    """Draw the requests of all clients, each from its own random streams; the first at 0. The tenant is `clientN`.

    Args:
        media: make the tokens of images, sounds and videos spans of the prompts, as many as the counts, with equal
            parts of the tokens and distinct contents. Lengths and times do not change.
        window: keep the requests that arrive in it, counted from the first request of all; the first kept one is at 0.
            They have the times and lengths that they have without a window. Those before are drawn and not kept, those
            behind are not drawn.
        limit: keep this number of first requests.
    Raises: WorkloadError if there is no request, or too many are to be kept.
    """
    drawn = [
        _ClientArrivals(client, random_stream(seed, f"servegen/{client.number}/arrivals")) for client in content.clients
    ]
    firsts = [one.first_us for one in drawn if one.first_us is not None]
    if not firsts:
        raise WorkloadError(source, "its rates are so low that no request was drawn", "try another --seed")
    first_us = min(firsts)
    start_us = first_us + (0 if window is None else window.start_us)
    stop_us = None if window is None or window.stop_us is None else first_us + window.stop_us
    times, inputs, outputs, tenants = [], [], [], []
    spans: list[NDArray[np.int64]] = []
    for tenant, one in enumerate(drawn):
        kept = one.keep(source, start_us, stop_us, limit)
        input_tokens, output_tokens = _draw_lengths(f"{source}: client {one.client.number}", one.client, kept, seed)
        if media:
            spans.append(_draw_media(one.client, kept, seed))
        times.append(kept.arrivals_us)
        inputs.append(input_tokens)
        outputs.append(output_tokens)
        tenants.append(np.full(len(kept.arrivals_us), tenant, np.int32))
    arrival_us = np.concatenate(times)
    if not len(arrival_us):
        problem = f"nothing arrives in the window {window}: the first arrival is at 0, the last before it"
        raise WorkloadError(source, problem, "widen --time-window")
    order = np.argsort(arrival_us, kind="stable")[:limit]
    turns = open_loop_turns(
        arrival_us[order] - arrival_us[order[0]],
        np.concatenate(inputs)[order],
        np.concatenate(outputs)[order],
        tenant=np.concatenate(tenants)[order],
        tenants=tuple(f"client{client.number}" for client in content.clients),
    )
    if not media or not sum(int(one.sum()) for one in spans):
        return turns
    return replace(turns, media=_media_of(turns, np.concatenate(spans)[order], f"servegen/{seed}"))


class _Kept(NamedTuple):
    """The kept arrivals of a client, and how many came before them by the window of lengths that they began in."""

    arrivals_us: Int64s
    skipped: Int64s  # [windows of lengths]


class _ClientArrivals:
    """The arrivals of one client, drawn in blocks as far as they are needed."""

    def __init__(self, client: ServeGenClient, random: np.random.RandomState) -> None:
        self.client = client
        self._blocks = _arrival_blocks(client.windows, random)
        self._first = next(self._blocks, None)

    @property
    def first_us(self) -> int | None:
        """The first arrival, in us from the start of the record; None if there is none."""
        return None if self._first is None else int(self._first[0])

    def keep(self, source: str, start_us: int, stop_us: int | None, limit: int | None) -> _Kept:
        """Return the arrivals in [start_us:stop_us), the first `limit` of them. May be called once."""
        if limit is None:
            count = _expected(self.client.windows, start_us, stop_us)
            if count > REQUESTS_MAX:
                problem = f"client {self.client.number} sends {count:,.0f} requests, at most {REQUESTS_MAX:,} are drawn"
                raise WorkloadError(source, problem, "--limit, or a shorter --time-window")
        starts_s = np.array(sorted(self.client.lengths))
        skipped = np.zeros(max(len(starts_s), 1), np.int64)
        kept: list[Int64s] = [np.empty(0, np.int64)]
        count_kept = 0
        block = self._first
        while block is not None and (stop_us is None or block[0] < stop_us):
            low = int(np.searchsorted(block, start_us))
            high = len(block) if stop_us is None else int(np.searchsorted(block, stop_us))
            if low:
                skipped += np.bincount(_length_windows(starts_s, block[:low]), minlength=len(skipped))
            kept.append(block[low:high])
            count_kept += high - low
            if high < len(block) or (limit is not None and count_kept >= limit):
                break
            block = next(self._blocks, None)
        return _Kept(np.concatenate(kept)[:limit], skipped)


def _length_windows(starts_s: Floats, arrivals_us: Int64s) -> Int64s:
    """Return for each arrival the index of the last window of lengths that began before it."""
    found: Int64s = np.maximum(np.searchsorted(starts_s, arrivals_us / 1e6, side="right") - 1, 0)
    return found


def _expected(windows: tuple[Window, ...], start_us: int, stop_us: int | None) -> float:
    """Return the expected number of requests in [start_us:stop_us)."""
    edges = np.array([windows[0].start_s, *_stops_s(windows).tolist()])
    rates = np.array([window.rate for window in windows])
    passed = np.concatenate((np.zeros(1), np.cumsum(rates * np.diff(edges))))
    until_s = edges[-1] if stop_us is None else stop_us / 1e6
    return float(np.interp(until_s, edges, passed) - np.interp(start_us / 1e6, edges, passed))


def _draw_media(client: ServeGenClient, kept: _Kept, seed: int) -> NDArray[np.int64]:
    """Draw int64 [requests, kinds, 2]: tokens of each kind, the same as in the input, and their number of contents."""
    found = np.zeros((len(kept.arrivals_us), len(KINDS), 2), np.int64)
    starts_s = np.array(sorted(client.lengths))
    which = _length_windows(starts_s, kept.arrivals_us)
    for window in np.unique(which).tolist():
        rows, skipped = np.flatnonzero(which == window), int(kept.skipped[window])
        for part, kind, count in client.media[starts_s[window]]:
            histogram = client.lengths[starts_s[window]][0][part]
            random = _behind(random_stream(seed, f"servegen/{client.number}/input/{window}/{part}"), skipped)
            found[rows, kind, 0] = histogram.draw(random, len(rows))
            random = _behind(random_stream(seed, f"servegen/{client.number}/count/{window}/{kind}"), skipped)
            found[rows, kind, 1] = 1 if count is None else count.draw(random, len(rows))
    found[:, :, 1] = np.clip(found[:, :, 1], found[:, :, 0] > 0, found[:, :, 0])
    return found


def _media_of(turns: Turns, drawn: NDArray[np.int64], salt: str) -> MediaColumns:
    """Return media spans before the last text of each prompt, kind by kind."""
    text = turns.prompt_tokens - drawn[:, :, 0].sum(axis=1)
    totals, counts = drawn[:, :, 0].ravel(), drawn[:, :, 1].ravel()
    row_and_kind = np.repeat(np.arange(len(counts)), counts)
    number = np.arange(len(row_and_kind)) - np.repeat(np.cumsum(counts) - counts, counts)
    total, count, row = totals[row_and_kind], counts[row_and_kind], row_and_kind // len(KINDS)
    tokens = total * (number + 1) // count - total * number // count
    before = np.cumsum(tokens) - tokens  # including those of earlier requests
    stops = np.cumsum(drawn[:, :, 1].sum(axis=1))
    first = np.concatenate((np.zeros(1, np.int64), np.append(before, 0)[stops[:-1]]))
    start = np.maximum(text - QUESTION_TOKENS, 0)[row] + before - first[row]
    return MediaColumns(
        stops=stops,
        kind=(row_and_kind % len(KINDS)).astype(np.int8),
        start=start.astype(np.int32),
        tokens=tokens.astype(np.int32),
        segments=np.ones(len(tokens), np.int32),
        content=np.arange(len(tokens), dtype=np.int64),
        salt=salt,
    )


def open_loop_turns(
    arrival_us: Int64s,
    input_tokens: Int64s,
    output_tokens: Int64s,
    *,
    tenant: NDArray[np.int32] | None = None,
    tenants: tuple[str, ...] = ("",),
) -> Turns:
    """Return turns that share nothing, labelled r0, r1, ...; the arguments are columns of Turns."""
    count = len(arrival_us)
    lengths = np.stack((input_tokens, output_tokens), axis=1).ravel()  # ids in order of use
    first_tokens = fresh_tokens(0, lengths)
    prompt_first, output_first = first_tokens[::2], first_tokens[1::2]
    none = np.broadcast_to(np.zeros(1, np.int32), count)
    return Turns(
        arrival_us=arrival_us,
        prompt_tokens=input_tokens.astype(np.int32),
        output_tokens=output_tokens.astype(np.int32),
        output_first_token=output_first.astype(np.int32),
        after=np.broadcast_to(np.full(1, -1, np.int32), count),
        think_us=np.broadcast_to(np.zeros(1, np.int64), count),
        run_stops=np.arange(1, count + 1),
        run_first_token=prompt_first.astype(np.int32),
        run_tokens=input_tokens.astype(np.int32),
        label_form=np.broadcast_to(np.zeros(1, np.int32), count),
        label_number=np.arange(count, dtype=np.int32),
        label_part=none,
        tenant=none if tenant is None else tenant,
        grammar=none,
        label_forms=("r{0}",),
        tenants=tenants,
        grammars=("",),
    )


def _stops_s(windows: tuple[Window, ...]) -> Floats:
    """Return the end of each window in s, [windows]."""
    starts = [window.start_s for window in windows]
    last = starts[-1] - starts[-2] if len(starts) > 1 else _WINDOW_DEFAULT_S
    return np.array([*starts[1:], starts[-1] + last])


def _arrival_blocks(windows: tuple[Window, ...], random: np.random.RandomState) -> Iterator[Int64s]:
    """Yield the times of one client's requests in ascending order, in us from the start of the record; no empty block.

    Drawing stops where the iteration does.
    """
    starts_s, stops_s = np.array([window.start_s for window in windows]), _stops_s(windows)
    rates = np.array([window.rate for window in windows])
    passed = np.concatenate((np.zeros(1), np.cumsum(rates * (stops_s - starts_s))))  # operational time at each start
    active = np.flatnonzero(rates).tolist()
    now = _renewed(windows[active[0]], random) if active else 0.0  # the next request, in operational time
    for n in active:
        stop = passed[n + 1]
        while now < stop:
            count = min(_BLOCK_GAPS, int(1.1 * (stop - now)) + 16)
            moments = now + np.concatenate((np.zeros(1), np.cumsum(_gaps(windows[n], count, random))))
            inside = min(int(np.searchsorted(moments, stop)), count)  # the last one only starts the next draws
            if inside:
                times_s = starts_s[n] + (moments[:inside] - passed[n]) / rates[n]
                yield np.minimum(times_s * 1e6, float(TIME_US_MAX)).astype(np.int64)
            now = float(moments[inside])


def _renewed(window: Window, random: np.random.RandomState) -> float:
    """Return the first request after time 0 of a process that began long before, in operational time."""
    _, cv = _moments(window)
    now = -min(_BURN_IN_MAX, _BURN_IN * max(1.0, cv * cv))
    while now < 0:
        moments = now + np.cumsum(_gaps(window, 256, random))
        now = float(moments[min(int(np.searchsorted(moments, 0.0)), 255)])
    return now


def _moments(window: Window) -> tuple[float, float]:
    """Return mean and CV of gaps of scale 1."""
    shape = window.shape
    if window.process == "Gamma":
        return shape, shape**-0.5
    mean, log_square = math.lgamma(1 + 1 / shape), math.lgamma(1 + 2 / shape)
    return math.exp(mean), math.sqrt(max(0.0, math.expm1(min(700.0, log_square - 2 * mean))))


def _gaps(window: Window, count: int, random: np.random.RandomState) -> Floats:
    """Draw gaps of mean 1 and the window's shape."""
    draw = random.standard_gamma if window.process == "Gamma" else random.weibull
    return draw(window.shape, count) / _moments(window)[0]


def _behind(random: np.random.RandomState, draws: int) -> np.random.RandomState:
    """Return a random stream behind a number of draws of `Histogram.draw`."""
    while draws > 0:
        random.random_sample(min(draws, _BLOCK_GAPS))
        draws -= _BLOCK_GAPS
    return random


def _draw_lengths(where: str, client: ServeGenClient, kept: _Kept, seed: int) -> tuple[Int64s, Int64s]:
    """Draw input and output tokens of each request, from the histograms of the last window that began before it."""
    arrivals_us = kept.arrivals_us
    if len(arrivals_us) and not client.lengths:
        raise WorkloadError(where, "it sends requests, but all its histograms are empty", "remove its two files")
    inputs, outputs = np.zeros(len(arrivals_us), np.int64), np.zeros(len(arrivals_us), np.int64)
    starts_s = np.array(sorted(client.lengths))
    which = _length_windows(starts_s, arrivals_us)
    for window in np.unique(which).tolist():
        rows, skipped = np.flatnonzero(which == window), int(kept.skipped[window])
        parts, output = client.lengths[starts_s[window]]
        for n, part in enumerate(parts):
            random = _behind(random_stream(seed, f"servegen/{client.number}/input/{window}/{n}"), skipped)
            inputs[rows] += part.draw(random, len(rows))
        random = _behind(random_stream(seed, f"servegen/{client.number}/output/{window}"), skipped)
        outputs[rows] = output.draw(random, len(rows))
    return np.clip(inputs, 1, LENGTH_TOKENS_MAX), np.clip(outputs, 0, LENGTH_TOKENS_MAX)
