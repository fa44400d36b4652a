"""Sampling settings of each row of the request table: columns on the device, and host copies that decide launches.

    reals  float32 [rows + 1, 6]     temperature and its inverse, log of min_p, three penalties ints   int64   [rows +
    1, 8]     seed in two words, top_k, top_p in units of 2**-24, slots of the following edits  [slots, width]
    per row that has any: ids of tokens with a bias or a ban on their logits seen   int32   [slots, vocab]    per row
    that has penalties: counts of its output tokens, and the tokens of its prompt masks  int32   [slots, words]    per
    row that lists its allowed tokens: a bit for each token, set if allowed

The row behind the last is for padding: greedy, without other settings. Most rows have no edits, penalties or masks.
Therefore these are stored in slots, assigned to rows that need them. Slot 0 is assigned to no row, and rows without a
slot refer to it. The mask of slot 0 allows everything.

A row is set when a request takes it (`BatchPlan.rows_taken`), which the core does only if nothing in flight names it.
`take_row` records the change on the host, and `flush` copies all changes to the device in at most four copies, on the
current stream, which must be the stream that samples. After that only the device changes `seen`, with every token
drawn.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.core.contract.errors import ConfigError
from lockstep.core.contract.events import SamplingParams
from lockstep.runtime.sampling.numerics import SHARE_BITS
from lockstep.runtime.sampling.philox import split_seed
from lockstep.runtime.sampling.processors import Arguments, asked

TEMPERATURE, INVERSE_TEMPERATURE, LOG_MIN_P, FREQUENCY, PRESENCE, REPETITION = range(6)
REALS = 6  # even, because they are copied packed in int64
KEY_LOW, KEY_HIGH, TOP_K, TOP_P, EDITS, EDIT_COUNT, SEEN, MASK = range(8)
INTS = 8

IN_PROMPT = 1 << 30
"""Set in `seen` if the prompt has the token; the lower bits count how often it was in the output."""

PROMPT_TOPS_MAX = 1024
"""Likeliest tokens per position of a prompt. With 8,192 new tokens in a pass they take 64 MiB of device memory."""

SHARE_ALL = 1 << SHARE_BITS
FLOAT32_MAX = float(np.finfo(np.float32).max)

Int64s = NDArray[np.int64]


@dataclass(slots=True)
class SamplingColumns:
    """The device columns, as the kernels and their references use them."""

    reals: Tensor  # float32 [rows + 1, REALS]
    ints: Tensor  # int64 [rows + 1, INTS]
    edit_ids: Tensor  # int32 [slots, width]; a row's ids differ, and behind its EDIT_COUNT its first entry is repeated
    edit_bias: Tensor  # float32 [slots, width]
    edit_until: Tensor  # int64 [slots, width]: the token is banned at lower positions
    seen: Tensor  # int32 [slots, vocab]
    masks: Tensor  # int32 [slots, ceil(vocab / 32)]: token t is bit t % 32 of word t // 32


def check_sampling(sampling: SamplingParams, vocab: int) -> None:
    """Raise ConfigError, with the field, for settings that no sampler supports."""
    _check("temperature", sampling.temperature, 0.0, FLOAT32_MAX, "0 is greedy, 1 the model's own distribution")
    _check("top_p", sampling.top_p, 0.0, 1.0, "1 keeps every token")
    _check("min_p", sampling.min_p, 0.0, 1.0, "0 keeps every token")
    _check("top_k", sampling.top_k, 0, 2**31 - 1, "0 keeps every token")
    _check("top_logprobs", sampling.top_logprobs, 0, vocab, "the model has no more tokens")
    for token in sampling.logprob_token_ids:
        _check("logprob_token_ids token", token, 0, vocab - 1, "use ids of this model's tokenizer")
    top = min(vocab, PROMPT_TOPS_MAX)
    _check("prompt_logprobs", sampling.prompt_top_logprobs, 0, top, "a long prompt has many positions")
    _check("frequency_penalty", sampling.frequency_penalty, -1e6, 1e6, "0 is none, the usual range is -2 to 2")
    _check("presence_penalty", sampling.presence_penalty, -1e6, 1e6, "0 is none, the usual range is -2 to 2")
    _check("repetition_penalty", sampling.repetition_penalty, 1e-6, 1e6, "1 is none, above 1 repeats less")
    for token, bias in sampling.logit_bias:
        _check("logit_bias token", token, 0, vocab - 1, "use ids of this model's tokenizer")
        _check(f"logit_bias of token {token}", bias, -1e6, 1e6, "-100 bans in effect, 100 forces")


def check_allowed(sampling: SamplingParams, vocab: int, min_new_tokens: int, stop_token_ids: Iterable[int]) -> None:
    """Raise ConfigError if `allowed_token_ids` has unknown tokens, or none that may be drawn first.

    Args:
        stop_token_ids: all tokens that end the request, end-of-sequence tokens included.
    """
    if not sampling.allowed_token_ids:
        return
    allowed = np.array(sampling.allowed_token_ids, np.int64)
    for token in (int(allowed.min()), int(allowed.max())):
        _check("allowed_token_ids token", token, 0, vocab - 1, "use ids of this model's tokenizer")
    if min_new_tokens > 0 and set(sampling.allowed_token_ids) <= set(stop_token_ids):
        raise ConfigError(
            f"`allowed_token_ids` has nothing but stop tokens, and `min_new_tokens` {min_new_tokens} bans these at "
            "first\nhint: allow a token that does not end the answer, or set `min_new_tokens` to 0"
        )


def _check(name: str, value: float, low: float, high: float, hint: str) -> None:
    if not low <= value <= high:  # true for NaN, too
        raise ConfigError(f"`{name}` must be in [{low:g}, {high:g}], got `{value}`\nhint: {hint}")


class SamplingTable:
    """Sampling settings and penalty counts of all rows of one engine.

    Args:
        rows_max: rows of the request table. Row `rows_max` is for padding.
        vocab: width of the logits.
        device: device of the logits.
        processors: names of the enabled logit processors, see processors.py.
    """

    def __init__(self, rows_max: int, vocab: int, device: torch.device | str, processors: Iterable[str] = ()) -> None:
        self.rows_max, self.vocab, self.device = rows_max, vocab, torch.device(device)
        self.processors: dict[str, NDArray[np.bool_]] = {name: np.zeros(rows_max + 1, bool) for name in processors}
        self.arguments: dict[str, dict[int, Arguments]] = {name: {} for name in self.processors}  # by requesting row

        self.sampled = np.zeros(rows_max + 1, bool)  # not greedy
        self.limited = np.zeros(rows_max + 1, bool)  # sampled, by top_k or top_p
        self.edited = np.zeros(rows_max + 1, bool)  # has a bias or banned tokens
        self.penalised = np.zeros(rows_max + 1, bool)
        self.masked = np.zeros(rows_max + 1, bool)  # lists its allowed tokens
        self.logprobs = np.zeros(rows_max + 1, bool)  # whether logprobs of its tokens are requested
        self.top_logprobs = np.zeros(rows_max + 1, np.int32)
        self.listed: dict[int, tuple[int, ...]] = {}  # tokens with logprobs of their own, by requesting row

        self._reals = np.zeros((rows_max + 1, REALS), np.float32)
        self._reals[:] = _reals(SamplingParams())
        self._ints = np.zeros((rows_max + 1, INTS), np.int64)
        self._ints[:, TOP_K], self._ints[:, TOP_P] = vocab, SHARE_ALL
        self._edit_slots, self._seen_slots, self._mask_slots = _Slots(), _Slots(), _Slots()

        self._rows_changed: dict[int, None] = {}
        self._edits_changed: dict[int, tuple[Int64s, Int64s, NDArray[np.float32]]] = {}
        self._seen_changed: dict[int, tuple[Int64s, Int64s]] = {}
        self._masks_changed: dict[int, Int64s] = {}

        self.columns = SamplingColumns(
            reals=torch.from_numpy(self._reals.copy()).to(self.device),
            ints=torch.from_numpy(self._ints.copy()).to(self.device),
            edit_ids=torch.zeros((1, 2), dtype=torch.int32, device=self.device),
            edit_bias=torch.zeros((1, 2), dtype=torch.float32, device=self.device),
            edit_until=torch.zeros((1, 2), dtype=torch.int64, device=self.device),
            seen=torch.zeros((1, vocab), dtype=torch.int32, device=self.device),
            masks=torch.full((1, -(-vocab // 32)), -1, dtype=torch.int32, device=self.device),
        )

    def take_row(
        self,
        row: int,
        sampling: SamplingParams | None,
        prompt_token_ids: Sequence[int] | NDArray[np.integer] = (),
        output_token_ids: Sequence[int] | NDArray[np.integer] = (),
        *,
        min_new_tokens: int = 0,
        stop_token_ids: Iterable[int] = (),
        logprobs: bool = False,
    ) -> None:
        """Store the settings of a row's new request; nothing of the previous one remains. None samples greedily.

        Args:
            prompt_token_ids: of the request as it arrived; ids outside of the vocabulary (media) are ignored.
            output_token_ids: output from before a retraction, so that penalties continue with their counts.
            min_new_tokens: `stop_token_ids` (end-of-sequence tokens included) are banned until so many are drawn.
        Raises: ConfigError for invalid settings; the row is then unchanged.
        """
        sampling = sampling or SamplingParams()
        if not 0 <= row < self.rows_max:
            raise ConfigError(f"`row` must be in [0, {self.rows_max - 1}], got `{row}`\nhint: a plan names table rows")
        check_sampling(sampling, self.vocab)
        stops = sorted(set(stop_token_ids)) if min_new_tokens > 0 else []
        for token in stops:
            _check("stop_token_ids", token, 0, self.vocab - 1, "use ids of this model's tokenizer")
        check_allowed(sampling, self.vocab, min_new_tokens, stops)
        wanted = asked(sampling)
        if unknown := sorted(wanted.keys() - self.processors.keys()):
            raise ConfigError(
                f"`logit_processors` must be enabled by the operator, got `{unknown[0]}`; "
                f"enabled: {', '.join(self.processors) or 'none'}\nhint: enable it when the engine starts"
            )

        self._reals[row] = _reals(sampling)
        sampled = bool(self._reals[row, TEMPERATURE] > 0)
        self.sampled[row] = sampled
        self.limited[row] = sampled and (0 < sampling.top_k < self.vocab or sampling.top_p < 1)
        self.logprobs[row] = logprobs or sampling.logprobs_beside > 0
        self.top_logprobs[row] = sampling.top_logprobs
        self.listed.pop(row, None)
        if sampling.logprob_token_ids:
            self.listed[row] = sampling.logprob_token_ids
        for name, uses in self.processors.items():
            uses[row] = name in wanted
            self.arguments[name].pop(row, None)
            if name in wanted:
                self.arguments[name][row] = wanted[name]

        ints = self._ints[row]
        ints[KEY_LOW], ints[KEY_HIGH] = split_seed(sampling.seed)
        ints[TOP_K] = sampling.top_k or self.vocab
        ints[TOP_P] = round(sampling.top_p * SHARE_ALL)
        self._edit(row, sampling, stops, len(prompt_token_ids) + min_new_tokens)
        self._count(row, sampling, prompt_token_ids, output_token_ids)
        self._mask(row, sampling.allowed_token_ids)
        self._rows_changed[row] = None

    def refuse_row(self, row: int) -> None:
        """Set a row whose request cannot be sampled: no token is allowed, so that its draws are invalid."""
        self.take_row(row, None)
        slot = self._mask_slots.give(int(self._ints[row, MASK]), True)
        self._ints[row, MASK], self.masked[row] = slot, True
        self._masks_changed[slot] = np.zeros(self.columns.masks.shape[1], np.int64)

    def clear(self) -> None:
        """Reset every row, as after a restart."""
        flags = (self.sampled, self.limited, self.edited, self.penalised, self.masked, self.logprobs)
        for twin in (*flags, self.top_logprobs):
            twin[:] = 0
        for uses in self.processors.values():
            uses[:] = False
        for arguments in self.arguments.values():
            arguments.clear()
        self.listed.clear()
        self._reals[:] = _reals(SamplingParams())
        self._ints[:] = 0
        self._ints[:, TOP_K], self._ints[:, TOP_P] = self.vocab, SHARE_ALL
        self._edit_slots, self._seen_slots, self._mask_slots = _Slots(), _Slots(), _Slots()
        self._edits_changed.clear()
        self._seen_changed.clear()
        self._masks_changed.clear()
        self._rows_changed = dict.fromkeys(range(self.rows_max + 1))

    def listed_tokens(self, rows: NDArray[np.int32]) -> Int64s | None:
        """Return the tokens whose logprobs rows list, each in its column behind those of the row's likeliest tokens.

        Returns: [rows, most logprobs of a row beside its token's], -1 where a column is not of a listed token; None if
            no row lists any.
        """
        if not self.listed:
            return None
        named = [self.listed.get(row, ()) for row in rows.tolist()]
        if not any(named):
            return None
        tops = self.top_logprobs[rows].tolist()
        found = np.full((len(named), max(top + len(ids) for top, ids in zip(tops, named, strict=True))), -1, np.int64)
        for at, (top, ids) in enumerate(zip(tops, named, strict=True)):
            found[at, top : top + len(ids)] = ids
        return found

    def flush(self) -> None:
        """Copy the changes of `take_row` to the device, on the current stream and without waiting for it."""
        if not self._rows_changed:
            return
        rows = np.fromiter(self._rows_changed, np.int64)
        self._grow()
        reals = self._reals[rows].view(np.int64)
        packed = self.to_device(np.concatenate((rows[:, None], self._ints[rows], reals), axis=1))
        at = packed[:, 0]
        self.columns.ints.index_copy_(0, at, packed[:, 1 : 1 + INTS])
        self.columns.reals.index_copy_(0, at, packed[:, 1 + INTS :].contiguous().view(torch.float32))
        if self._edits_changed:
            self._flush_edits()
        if self._seen_changed:
            self._flush_seen()
        if self._masks_changed:
            self._flush_masks()
        self._rows_changed.clear()

    # ------------------------------------------------------------------------------------------------------- one row

    def _edit(self, row: int, sampling: SamplingParams, stops: Sequence[int], banned_until: int) -> None:
        """Store biases and bans, one entry per id: two entries would be written by two threads."""
        entries = {token: [bias, 0] for token, bias in sampling.logit_bias if bias}
        for token in stops:
            entries.setdefault(token, [0.0, 0])[1] = banned_until
        slot = self._edit_slots.give(int(self._ints[row, EDITS]), bool(entries))
        self._ints[row, EDITS], self._ints[row, EDIT_COUNT] = slot, len(entries)
        self.edited[row] = bool(entries)
        if entries:
            order = sorted(entries)
            self._edits_changed[slot] = (
                np.array(order, np.int64),
                np.array([entries[token][1] for token in order], np.int64),
                np.array([entries[token][0] for token in order], np.float32),
            )

    def _count(
        self,
        row: int,
        sampling: SamplingParams,
        prompt: Sequence[int] | NDArray[np.integer],
        output: Sequence[int] | NDArray[np.integer],
    ) -> None:
        """Store the initial counts of `seen`."""
        repeats = sampling.repetition_penalty != 1
        penalised = repeats or sampling.frequency_penalty != 0 or sampling.presence_penalty != 0
        slot = self._seen_slots.give(int(self._ints[row, SEEN]), penalised)
        self._ints[row, SEEN] = slot
        self.penalised[row] = penalised
        if penalised:
            values = self._counts(output)
            if repeats:
                values[self._counts(prompt) > 0] |= IN_PROMPT
            ids = np.flatnonzero(values)
            self._seen_changed[slot] = (ids, values[ids])

    def _mask(self, row: int, allowed: Sequence[int]) -> None:
        """Store a bit for each token that the row allows."""
        slot = self._mask_slots.give(int(self._ints[row, MASK]), bool(allowed))
        self._ints[row, MASK] = slot
        self.masked[row] = bool(allowed)
        if allowed:
            bits = np.zeros(self.columns.masks.shape[1] * 32, bool)
            bits[np.array(allowed, np.int64)] = True
            self._masks_changed[slot] = np.packbits(bits, bitorder="little").view("<i4").astype(np.int64)

    def _counts(self, ids: Sequence[int] | NDArray[np.integer]) -> Int64s:
        """Return how often each token is in `ids`, int64 [vocab]."""
        array = np.asarray(ids, np.int64)
        return np.bincount(array[(array >= 0) & (array < self.vocab)], minlength=self.vocab)

    # ------------------------------------------------------------------------------------------------------ to device

    def _grow(self) -> None:
        """Enlarge the tables for more slots and for longer lists of edits, to a power of two."""
        columns = self.columns
        seen = columns.seen
        if self._seen_slots.count > len(seen):
            columns.seen = torch.zeros(
                (_power_of_two(self._seen_slots.count), self.vocab), dtype=torch.int32, device=self.device
            )
            columns.seen[: len(seen)] = seen
        masks = columns.masks
        if self._mask_slots.count > len(masks):
            grown = (_power_of_two(self._mask_slots.count), masks.shape[1])
            columns.masks = torch.full(grown, -1, dtype=torch.int32, device=self.device)
            columns.masks[: len(masks)] = masks
        slots, width = columns.edit_ids.shape
        longest = max((len(ids) for ids, _, _ in self._edits_changed.values()), default=0)
        if self._edit_slots.count > slots or longest > width:
            new = (max(slots, _power_of_two(self._edit_slots.count)), max(width, _power_of_two(longest)))
            for name in ("edit_ids", "edit_bias", "edit_until"):
                old: Tensor = getattr(columns, name)
                grown = torch.zeros(new, dtype=old.dtype, device=self.device)
                grown[:slots] = old[:, :1]  # the first entry repeated, behind the others
                grown[:slots, :width] = old
                setattr(columns, name, grown)

    def _flush_edits(self) -> None:
        width = self.columns.edit_ids.shape[1]
        block = np.empty((len(self._edits_changed), 1 + 2 * width + width // 2), np.int64)
        bias = block[:, 1 + 2 * width :].view(np.float32)
        for i, (slot, (ids, until, added)) in enumerate(self._edits_changed.items()):
            n = len(ids)
            block[i, 0] = slot
            for part, values in ((block[i, 1 : 1 + width], ids), (block[i, 1 + width : 1 + 2 * width], until)):
                part[:n], part[n:] = values, values[0]
            bias[i, :n], bias[i, n:] = added, added[0]
        packed = self.to_device(block)
        at = packed[:, 0]
        self.columns.edit_ids.index_copy_(0, at, packed[:, 1 : 1 + width].to(torch.int32))
        self.columns.edit_until.index_copy_(0, at, packed[:, 1 + width : 1 + 2 * width])
        self.columns.edit_bias.index_copy_(0, at, packed[:, 1 + 2 * width :].contiguous().view(torch.float32))
        self._edits_changed.clear()

    def _flush_seen(self) -> None:
        slots = np.fromiter(self._seen_changed, np.int64)
        flat = [slot * self.vocab + ids for slot, (ids, _) in self._seen_changed.items()]
        values = [counts for _, counts in self._seen_changed.values()]
        packed = self.to_device(np.concatenate((slots, *flat, *values)))
        entries = (len(packed) - len(slots)) // 2
        self.columns.seen.index_fill_(0, packed[: len(slots)], 0)
        at, what = packed[len(slots) : len(slots) + entries], packed[len(slots) + entries :]
        self.columns.seen.view(-1).index_copy_(0, at, what.to(torch.int32))
        self._seen_changed.clear()

    def _flush_masks(self) -> None:
        slots = np.fromiter(self._masks_changed, np.int64)
        packed = self.to_device(np.column_stack((slots, np.stack(list(self._masks_changed.values())))))
        self.columns.masks.index_copy_(0, packed[:, 0], packed[:, 1:].to(torch.int32))
        self._masks_changed.clear()

    def to_device(self, array: Int64s) -> Tensor:
        """Copy an array to the device without waiting: from pinned memory, which torch keeps until the copy is done."""
        tensor = torch.from_numpy(array)
        if self.device.type != "cuda":
            return tensor.to(self.device)
        return tensor.pin_memory().to(self.device, non_blocking=True)


class _Slots:
    """Assigns the lowest free number from 1 on; 0 is never assigned."""

    def __init__(self) -> None:
        self.count = 1
        self._free: list[int] = []

    def give(self, held: int, wanted: bool) -> int:
        """Return the slot of a row that has slot `held`: kept, newly assigned, or freed."""
        if held and not wanted:
            heapq.heappush(self._free, held)
            return 0
        if held or not wanted:
            return held
        if self._free:
            return heapq.heappop(self._free)
        self.count += 1
        return self.count - 1


def _reals(sampling: SamplingParams) -> NDArray[np.float32]:
    temperature = float(np.float32(sampling.temperature))
    inverse = 1.0 if temperature == 0 else min(1 / temperature, FLOAT32_MAX)
    log_min_p = math.log(sampling.min_p) if sampling.min_p > 0 else -math.inf
    return np.array(
        (
            temperature,
            inverse,
            log_min_p,
            sampling.frequency_penalty,
            sampling.presence_penalty,
            sampling.repetition_penalty,
        ),
        np.float32,
    )


def _power_of_two(at_least: int) -> int:
    return 1 << max(at_least - 1, 1).bit_length()
