"""Which requests may start, and how long the next chunk is.

Three budgets limit an extend, all in tokens:

    total    KV the pool could still give, less what running requests will need before they end (the *reserve*);
             beside it `current`, the same without any reserve, only decides whether to look further
    input    new tokens one extend may take (`max_prefill_tokens`)
    chunk    new tokens before a prompt is split (`chunked_prefill_size`)

Input and chunk count in pages, or in tokens (`chunk_unit`). Decodes that run in the same pass take their token each out
of both. The reserve is a policy:

    ratio      the rest of a running request's output, clipped, times the *new-token ratio*: an optimistic share,
               because most requests end early. The ratio decays while decoding goes well and jumps up when a retraction
               showed it was too low. Requests admitted in the pass itself are charged in full. SGLang's PrefillAdder.
               A request that ignores end tokens, with nothing cached, is admitted by when the others end: `lasts_with`.
    on_demand  the pages that the next decode needs: a request starts whose whole prompt fits beside them, and one that
               outgrows the pool is retracted. vLLM.
    full       every page that an active request will still open: no request is ever retracted for pages. mini-sglang.

The ratio is an estimate in tokens, with a page of slack for each admitted request. The other two count pages and are
exact.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.events import DeferReason
from lockstep.core.requests.table import ONE, Int32s, Request, RunningBatch

NEW_TOKEN_RATIO_INIT = 0.7  # SGLang: SGLANG_INIT_NEW_TOKEN_RATIO
NEW_TOKEN_RATIO_MIN_FACTOR = 0.14  # the floor, as a share of the initial ratio
NEW_TOKEN_RATIO_DECAY_STEPS = 600  # decode launches from the initial ratio to the floor
RETRACT_DECODE_STEPS = 20  # decode steps the ratio after a retraction leaves room for
CLIP_MAX_NEW_TOKENS = 4096  # a longer output is reserved as this many tokens
CLIP: Int32s = np.array(CLIP_MAX_NEW_TOKENS, np.int32)  # the same for columns
IGNORE_EOS_RESERVE_TOKENS = 1  # of each request that runs, to be left over at every moment

Verdict = Literal["continue", "no_tokens", "budget_spent"]


class Deferral(NamedTuple):
    """Why a request is not admitted, with the two numbers that were compared, in tokens, where there were any."""

    reason: DeferReason
    needed: int = 0
    available: int = 0
    limit: int = 0  # of requests at once, if the reason is such a limit
    own: bool = False  # concerns this request alone: requests behind it may pass; a shortage stops the whole queue
    lasts: bool = False  # while requests are active it stays until something comes free: admission pauses


class NewTokenRatio:
    """The share of their remaining output that running requests are expected to need. Between `floor` and 1."""

    def __init__(self, conservativeness: float) -> None:
        self.initial = min(1.0, NEW_TOKEN_RATIO_INIT * conservativeness)
        self.floor = min(1.0, self.initial * NEW_TOKEN_RATIO_MIN_FACTOR)
        self.decay = (self.initial - self.floor) / NEW_TOKEN_RATIO_DECAY_STEPS
        self.value = self.initial

    def decoded(self) -> None:
        """A decode was launched without a retraction."""
        self.value = max(self.value - self.decay, self.floor)

    def retracted(self, outputs: int, max_new_tokens: int, survivors: int) -> None:
        """Memory ran out: set the ratio to what the survivors used, plus some steps. Totals are over the survivors."""
        used = outputs + RETRACT_DECODE_STEPS * survivors
        self.value = min(1.0, used / (max_new_tokens + 1))

    def idle(self) -> None:
        """Nothing runs: forget."""
        self.value = self.initial


def reserve_by_ratio(remaining: NDArray[np.int32], ignores_eos: NDArray[np.int32], ratio: float) -> int:
    """Tokens that running requests will still need: int32 [n] still to come; [n] 1 for those that run to the limit."""
    clipped = np.minimum(remaining, CLIP)
    certain = int(clipped.dot(ignores_eos))  # in 32 bits: half a million rows of 4,096
    return certain + int((int(np.add.reduce(clipped)) - certain) * ratio)


def lasts(left: NDArray[np.float64], held: NDArray[np.int32], free: int) -> bool:
    """Whether `free` tokens of KV suffice until the last of some requests has ended, each end giving its own back.

    Args:
        left: [n], tokens that each will still sample; requests with none left do not count.
        held: [n], tokens that each holds now, and gives back at its end, with what it wrote until then.
    """
    order = left.argsort(kind="stable")
    order = order[left[order] > 0]
    left, held = left[order], held[order]
    running = np.arange(len(left), 0, -1)  # at the end of each, itself among them
    before = held.cumsum() - held  # what those that ended earlier gave back
    return bool((free + before - left * running > IGNORE_EOS_RESERVE_TOKENS * running).all())


def lasts_with(running_batch: RunningBatch, positions: Int32s, joining: list[Request], ratio: float, free: int) -> bool:
    """Whether `free` tokens of KV last for a running batch and the requests that join it, see `lasts`.

    A request that ignores end tokens runs to its limit; of all others' outputs the share `ratio` is expected.

    Args:
        positions: int32 [members], where each member of the cohort decodes next.
    """
    outputs = positions + ONE - running_batch.prompts
    expected = (running_batch.limits - running_batch.prompts) * np.where(running_batch.ignores_eos, 1.0, ratio)
    left = [one.max_new_tokens * (1.0 if one.ignore_eos else ratio) - one.outputs for one in joining]
    held = np.array([len(one.tokens) // 4 for one in joining], np.int32)
    return lasts(
        np.concatenate((expected - outputs, left)), np.concatenate((running_batch.prompts + outputs, held)), free
    )


def counts_on_ends(config: SchedConfig, request: Request) -> bool:
    """Whether a request is admitted by when all running requests will end.

    Of requests that ignore end tokens, where nothing is cached and the reserve follows the new-token ratio.
    """
    return request.ignore_eos and not config.radix_cache and config.reserve == "ratio"


class PrefillBudget:
    """What one extend may still take. All in tokens but `set_aside`; `chunk` None means prompts are never split."""

    __slots__ = (
        "align",
        "beyond",
        "chunk",
        "current",
        "input",
        "newcomers",
        "page_size",
        "policy",
        "set_aside",
        "total",
        "unit",
    )

    def __init__(self, config: SchedConfig, available: int, reserve: int) -> None:
        self.total = available - reserve
        self.current = available
        self.input = config.max_prefill_tokens
        self.chunk = config.chunked_prefill_size
        self.page_size = config.page_size
        self.policy = config.reserve
        self.align = config.split_tokens  # a prompt is split at multiples of this
        self.unit = config.chunk_unit_tokens  # `input` and `chunk` are charged in multiples of this
        self.beyond = config.decode_look_ahead - 1  # tokens that must fit beyond the one being computed
        self.set_aside = 0  # pages that are left to the decodes of the same pass
        self.newcomers: list[Request] = []  # in this extend, without a decode that counts yet

    def shorten(self, tokens: int | None) -> None:
        """Hold the chunk to so many tokens, if that is less, but not to less than one unit of splitting."""
        if tokens is not None and self.chunk is not None:
            self.chunk = min(self.chunk, max(tokens // self.align * self.align, self.align))

    def share_with(self, decodes: int, set_aside: int) -> None:
        """So many decodes run in the same pass; `set_aside` pages are theirs. One page of prompt may always go on."""
        if self.policy == "ratio":  # elsewhere the reserve has their pages
            self.total -= decodes
            self.current -= decodes
        self.input = max(self.input - decodes, self.page_size)
        if self.chunk is not None:
            self.chunk = max(self.chunk - decodes, self.page_size)
        self.set_aside = set_aside

    def verdict(self) -> Verdict:
        """Whether another candidate may be considered at all."""
        if self.total <= 0 or self.current <= 0:
            return "no_tokens"
        if self.input <= 0 or (self.chunk is not None and self.chunk <= 0):
            return "budget_spent"
        return "continue"

    def regain(self, tokens: int, unreserved: int, set_aside: int) -> None:
        """Running requests gave `tokens` back, so many are no longer reserved, and decodes now need `set_aside`."""
        self.total += tokens + unreserved
        self.current += tokens
        self.set_aside = set_aside

    def hold(self, tokens: int) -> None:
        """Cached tokens that a candidate locks cannot be evicted any more."""
        self.total -= tokens
        self.current -= tokens

    def promise(self, new_tokens: int, remaining_output: int) -> None:
        """A newcomer may count on all it will ever need, if that is the policy; its chunks cost no more then."""
        if self.policy == "full":
            self.total -= self.wanted(new_tokens, remaining_output)

    def charge(self, new_tokens: int, output_tokens: int) -> None:
        """Take an extend of `new_tokens`, and the output it may lead to (0 unless it completes the prompt)."""
        pages = ceil_to(new_tokens, self.page_size)
        if self.policy != "full":  # there it was promised
            self.total -= pages
        if output_tokens and self.policy == "ratio":
            self.total -= self.page_size + min(output_tokens, CLIP_MAX_NEW_TOKENS)
        self.current -= pages
        charged = ceil_to(new_tokens, self.unit)
        self.input -= charged
        if self.chunk is not None:
            self.chunk -= charged

    def wanted(self, new_tokens: int, remaining_output: int) -> int:
        """Tokens of `total` that a candidate needs to start: its whole prompt, and its output as the policy says."""
        fed_back = max(remaining_output - 1, 0)  # the last token never is
        if self.policy == "on_demand":
            return ceil_to(new_tokens + min(self.beyond, fed_back), self.page_size)
        if self.policy == "full":
            return ceil_to(new_tokens + fed_back, self.page_size)
        return new_tokens + self.page_size + min(remaining_output, CLIP_MAX_NEW_TOKENS)

    def has(self, wanted: int, locking: int) -> bool:
        """Whether `total` has the `wanted` tokens, once `locking` cached tokens of the candidate's own are held."""
        left = self.total - locking
        return wanted < left if self.policy == "ratio" else wanted <= left  # an estimate must leave something over


def chunk_tokens(start: int, new_tokens: int, budget: PrefillBudget, first: bool, may_split: bool) -> int:
    """How many of a prompt's new tokens, behind `start`, the next extend takes: all; up to an aligned position; or 0.

    `first`: nothing is in the batch yet. `may_split`: no other request of the batch is split.
    """
    whole = ceil_to(new_tokens, budget.unit)
    if budget.chunk is None:
        return new_tokens if first or whole <= budget.input else 0
    limit = min(budget.chunk, budget.input)
    if whole <= limit:
        return new_tokens
    return aligned(start, limit, budget.align) if may_split and limit > 0 else 0


def aligned(start: int, limit: int, align: int) -> int:
    """Tokens from `start` on, at most `limit`, so that the next token's position is a multiple of `align`; or 0."""
    return max((start + limit) // align * align - start, 0)


def ceil_to(tokens: int, unit: int) -> int:
    """Tokens rounded up to whole units."""
    return -(-tokens // unit) * unit
