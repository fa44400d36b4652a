"""Media that are added to a workload: turns with images, videos or sounds, their sizes, and how many are equal.

    parse_media("image=0.3x1..4:1024x768/200:zipf;audio=0.05:12s")
    with_media(turns, specs, encoders, seed=7)

    # | system prompt, history | text | image | image | question |      a turn
    #                                                            | answer | text | image | question |     the next

The placeholders of media lengthen a prompt by a number of tokens that depends on the model. New media precede the last
text of their turn, and keep their place in the prompts of later turns. Placeholders get unused token ids, which serve
only to count what prompts share; the scheduler numbers contents by their digests.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from lockstep.core.contract.errors import ConfigError
from lockstep.sim.cost.encoder import KINDS, Encoders, MediaContent, MediaKind
from lockstep.sim.workload.arrivals import random_stream
from lockstep.sim.workload.lengths import parse_duration_us
from lockstep.sim.workload.servegen import QUESTION_TOKENS
from lockstep.sim.workload.token_runs import TOKEN_IDS, append_run, common_tokens, cut_runs, runs_behind
from lockstep.sim.workload.turn_media import MediaColumns
from lockstep.sim.workload.turns import LENGTH_TOKENS_MAX, Turns

RECORDED = "recorded"
SEPARATOR = ";"
EXAMPLES = {"image": "image=0.3x1..4:1024x768", "video": "video=0.05:1280x720:10s", "audio": "audio=0.1:12s"}
SIDE_MAX = 32_768  # pixels
COUNT_MAX = 1_000
CONTENTS_MAX = 1_000_000
_SPEC = re.compile(
    r"(?P<kind>image|video|audio)=(?P<share>[0-9.eE-]+)(?:x(?P<low>[0-9]+)(?:\.\.(?P<high>[0-9]+))?)?"
    r"(?::(?P<width>[0-9]+)x(?P<height>[0-9]+))?(?::(?P<took>[0-9.]+[a-z]+))?"
    r"(?:/(?P<contents>[0-9]+)(?::zipf(?::(?P<exponent>[0-9.]+))?)?)?"
)


class MediaSpec(NamedTuple):
    """One kind of media of a workload."""

    kind: MediaKind
    share: float  # of the turns
    low: int  # per turn with media, at least
    high: int  # per turn with media, at most
    width: int = 0  # pixels
    height: int = 0
    seconds: float = 0.0
    contents: int = 0  # different contents, up to CONTENTS_MAX; 0: no two are equal
    exponent: float = 0.0  # content k (from 1) is chosen with weight 1 / k**exponent

    def content(self, encoders: Encoders) -> MediaContent:
        """Return the content as an encoder sees it. Raises CatalogueError for a kind that the model does not take."""
        if self.kind == "image":
            return encoders.image(self.width, self.height)
        if self.kind == "video":
            return encoders.video(self.width, self.height, self.seconds)
        return encoders.sound(self.seconds)


def parse_media(text: str) -> tuple[MediaSpec, ...]:
    """Parse `KIND=SHARE[xLOW[..HIGH]][:WxH][:TIME][/CONTENTS[:zipf[:EXPONENT]]]`, several with `;`. Raises ConfigError.

    `recorded` yields no spec: recorded media belong to the workload itself.
    """
    parts = [part.strip() for part in text.split(SEPARATOR)]
    if RECORDED in parts and len(parts) > 1:
        raise ConfigError(
            f"`media` cannot be `{text}`: {RECORDED} excludes other media, as it means all media of the workload\n"
            f"hint: --media {RECORDED}, or leave it out"
        )
    return () if text == RECORDED else tuple(map(_parse_one, parts))


def _parse_one(text: str) -> MediaSpec:
    kind = text.partition("=")[0]
    example = EXAMPLES.get(kind, EXAMPLES["image"])

    def refuse(problem: str) -> ConfigError:
        return ConfigError(f"`media` cannot be `{text}`: {problem}\nhint: such as --media {example}; docs/workloads.md")

    found = _SPEC.fullmatch(text)
    if found is None:
        raise refuse(
            "expected KIND=SHARE[xLOW[..HIGH]][:WIDTHxHEIGHT][:TIME][/CONTENTS[:zipf[:EXPONENT]]], or recorded"
        )
    try:
        share = float(found["share"])
        exponent = float(found["exponent"] or 1.0) if ":zipf" in text else 0.0
        seconds = parse_duration_us(found["took"]) / 1e6 if found["took"] else 0.0
        low = int(found["low"] or 1)
        high = int(found["high"] or low)
        width, height = int(found["width"] or 0), int(found["height"] or 0)
        contents = int(found["contents"] or 0)
    except ValueError as error:  # such as integers of thousands of digits
        raise refuse(str(error)) from None
    if not 0.0 < share <= 1.0:
        raise refuse("the share of turns is above 0 and at most 1")
    if not 1 <= low <= high <= COUNT_MAX:
        raise refuse(f"a turn has 1 to {COUNT_MAX:,} of them")
    if (found["kind"] != "audio") != bool(found["width"]):
        raise refuse("pictures have a size in pixels, sounds have none")
    if found["width"] and not (1 <= width <= SIDE_MAX and 1 <= height <= SIDE_MAX):
        raise refuse(f"sides have 1 to {SIDE_MAX:,} pixels")
    if (found["kind"] != "image") != bool(found["took"]):
        raise refuse("videos and sounds last some time, images none")
    if not 0.0 <= exponent <= 10.0:
        raise refuse("the exponent is at most 10")
    if found["contents"] is not None and not 1 <= contents <= CONTENTS_MAX:
        raise refuse(f"there are 1 to {CONTENTS_MAX:,} different contents; without /CONTENTS no two are equal")
    name: MediaKind = KINDS[KINDS.index(found["kind"])]
    return MediaSpec(name, share, low, high, width, height, seconds, contents, exponent)


class _Item(NamedTuple):
    """One content in one turn, before token `at` of its text."""

    at: int
    content: int
    spec: int


# mechanism: media-spans (simulated)
def with_media(turns: Turns, specs: Sequence[MediaSpec], encoders: Encoders, *, seed: int) -> Turns:
    """Return the same turns with media added, and with prompts that include the placeholders.

    Each choice (turn, count, content) has its own random stream, so it does not depend on the model.

    Raises: CatalogueError for media that the model does not take, ConfigError for a prompt that is too long.
    """
    seen = [spec.content(encoders) for spec in specs]
    own = _drawn(turns, specs, seed)
    texts = turns.prompts(np.arange(len(turns)))
    afters, text_tokens, outputs = turns.after.tolist(), turns.prompt_tokens.tolist(), turns.output_tokens.tolist()
    fresh = _ids_stop(turns)
    items: list[list[_Item]] = []  # of each turn, those of earlier turns included
    ids: dict[tuple[int, int], int] = {}  # (turn, place) of a new item -> first placeholder id
    origin: list[list[tuple[int, int]]] = []  # of each item, the (turn, place) that introduced it
    runs_first: list[int] = []
    runs_tokens: list[int] = []
    run_stops: list[int] = []
    prompt_tokens: list[int] = []
    columns: list[tuple[int, int, int]] = []  # start, spec, content
    stops: list[int] = []
    for row, (text, after, length) in enumerate(zip(texts, afters, text_tokens, strict=True)):
        kept: list[_Item] = []
        owners: list[tuple[int, int]] = []
        new = length
        if after >= 0:
            if items[after]:
                common = common_tokens(texts[after], text)
                kept = [item for item in items[after] if item.at < common]
                owners = origin[after][: len(kept)]
            new = length - text_tokens[after] - outputs[after]
        at = length - (min(QUESTION_TOKENS, new) if 0 < new <= length else min(QUESTION_TOKENS, length))
        for place, (spec, content) in enumerate(own.get(row, ())):
            kept = [*kept, _Item(at, content, spec)]
            owners = [*owners, (row, place)]
            if fresh + seen[spec].tokens > TOKEN_IDS:
                fresh = 0  # ids restart, as those of text do when all were used
            ids[row, place] = fresh
            fresh += seen[spec].tokens
        items.append(kept)
        origin.append(owners)
        prompt, grown = _expanded(text, kept, [ids[owner] for owner in owners], seen, columns)
        if length + grown > LENGTH_TOKENS_MAX:
            raise ConfigError(
                f"`media` make a prompt of {length + grown:,} tokens, which no context holds\n"
                "hint: fewer or smaller ones"
            )
        runs_first += prompt[::2]
        runs_tokens += prompt[1::2]
        run_stops.append(len(runs_first))
        prompt_tokens.append(length + grown)
        stops.append(len(columns))
    rows = np.array(columns, np.int64).reshape(-1, 3)
    by_spec = np.array([(KINDS.index(one.kind), one.tokens, one.segments) for one in seen], np.int64)[rows[:, 1]]
    media = MediaColumns(
        stops=np.array(stops, np.int64),
        kind=by_spec[:, 0].astype(np.int8),
        start=rows[:, 0].astype(np.int32),
        tokens=by_spec[:, 1].astype(np.int32),
        segments=by_spec[:, 2].astype(np.int32),
        content=rows[:, 2],
        salt=f"media/{seed}",
    )
    return replace(
        turns,
        prompt_tokens=np.array(prompt_tokens, np.int32),
        run_stops=np.array(run_stops, np.int64),
        run_first_token=np.array(runs_first, np.int64).astype(np.int32),
        run_tokens=np.array(runs_tokens, np.int64).astype(np.int32),
        media=media,
    )


def _drawn(turns: Turns, specs: Sequence[MediaSpec], seed: int) -> dict[int, list[tuple[int, int]]]:
    """Draw the media of each turn: number of the spec and number of the content, in order."""
    found: dict[int, list[tuple[int, int]]] = {}
    base = 0
    for number, spec in enumerate(specs):
        stream = f"media/{number}/{spec.kind}"
        has = random_stream(seed, f"{stream}/share").random_sample(len(turns)) < spec.share
        counts = random_stream(seed, f"{stream}/count").randint(spec.low, spec.high + 1, len(turns))
        counts[~has] = 0
        total = int(counts.sum())
        chosen = _chosen(spec, total, random_stream(seed, f"{stream}/content"))
        at = 0
        for row in np.flatnonzero(counts).tolist():
            stop = at + int(counts[row])
            found.setdefault(row, []).extend((number, base + content) for content in chosen[at:stop])
            at = stop
        base += max(spec.contents, total)
    return found


def _chosen(spec: MediaSpec, total: int, random: np.random.RandomState) -> list[int]:
    """Draw `total` contents of a spec."""
    if not spec.contents:
        return list(range(total))
    if spec.exponent:
        # Python's power is the same on all processors; numpy's may differ in the last digit, which would change the
        # draws.
        each = np.fromiter((k**-spec.exponent for k in range(1, spec.contents + 1)), np.float64, spec.contents)
    else:
        each = np.ones(spec.contents)
    weights = np.cumsum(each)
    picked: list[int] = np.searchsorted(weights, random.random_sample(total) * weights[-1], side="right").tolist()
    return picked


def _expanded(
    text: Sequence[int],
    items: Sequence[_Item],
    ids: Sequence[int],
    seen: Sequence[MediaContent],
    columns: list[tuple[int, int, int]],
) -> tuple[list[int], int]:
    """Return the runs of a prompt with placeholders, and the number of these. Appends their places to `columns`."""
    if not items:
        return list(text), 0
    prompt: list[int] = []
    done = grown = 0
    rest = list(text)
    for item, first in zip(items, ids, strict=True):
        for run_first, run_tokens in _pairs(cut_runs(rest, item.at - done)):
            append_run(prompt, run_first, run_tokens)
        rest = runs_behind(rest, item.at - done)
        done = item.at
        columns.append((item.at + grown, item.spec, item.content))
        append_run(prompt, first, seen[item.spec].tokens)
        grown += seen[item.spec].tokens
    for run_first, run_tokens in _pairs(rest):
        append_run(prompt, run_first, run_tokens)
    return prompt, grown


def _pairs(runs: Sequence[int]) -> zip[tuple[int, int]]:
    return zip(runs[::2], runs[1::2], strict=True)


def _ids_stop(turns: Turns) -> int:
    prompts = turns.run_first_token.astype(np.int64) + turns.run_tokens
    answers = turns.output_first_token.astype(np.int64) + turns.output_tokens
    return int(max(prompts.max(), answers.max()))


def describe_media(columns: MediaColumns, turns: int) -> str:
    """Return a sentence for the notes of a workload."""
    counts = np.diff(columns.stops, prepend=0)
    different = len(np.unique(columns.content))
    by_kind = np.bincount(columns.kind, minlength=len(KINDS)).tolist()
    kinds = [f"{count:,} x {KINDS[kind]}" for kind, count in enumerate(by_kind) if count]
    per = math.fsum(columns.tokens.tolist()) / max(len(columns.tokens), 1)
    return (
        f"{int((counts > 0).sum()):,} of {turns:,} prompts have media: {', '.join(kinds)}, {different:,} of them "
        f"different, {per:,.0f} tokens each on average"
    )
