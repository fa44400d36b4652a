"""Token budgets of an extend: which requests may start, and how long the next chunk is.

Three budgets limit an extend, all in tokens:

    total    KV that the pool can still allocate, minus the *reserve*, which running requests need before they end.
             `current` is the same without the reserve. It only decides whether the queue is examined further.
    input    new tokens that one extend may take (`max_prefill_tokens`)
    chunk    new tokens before a prompt is split (`chunked_prefill_size`)

Input and chunk are charged in whole pages or in tokens (`chunk_unit`). Each decode in the same pass takes one token of
both. The reserve is a policy:

    ratio      the remaining output of a running request, clipped, times the *new-token ratio*. The ratio is an
               optimistic share, because most requests end early. It decays over decode launches and is raised by a
               retraction, which shows that it was too low. A request admitted in this pass is charged in full. This is
               SGLang's PrefillAdder. Without a radix cache, a request that ignores end tokens is admitted by the times
               at which the running requests end: see `lasts_with`.
    on_demand  the pages that the next decode needs. A request starts if its whole prompt fits beside them, and is
               retracted when it outgrows the pool. This is vLLM's rule.
    full       every page that an active request will still open. No request is ever retracted for pages. This is the
               rule of mini-sglang.

The ratio is an estimate in tokens, with a page of slack for each admitted request. The other two count pages and are
exact.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.events import DeferReason
from lockstep.core.requests import rules
from lockstep.core.requests.rules import CLIP_MAX_NEW_TOKENS as CLIP_MAX_NEW_TOKENS
from lockstep.core.requests.rules import (
    NEW_TOKEN_RATIO_DECAY_STEPS,
    NEW_TOKEN_RATIO_INIT,
    NEW_TOKEN_RATIO_MIN_FACTOR,
    NO_LIMIT,
    RESERVES,
    beside_decodes,
    charged_total,
    clipped_output,
    covers,
    ratio_after_decode,
    ratio_after_retraction,
    reserved_by_ratio,
    shortened,
    verdict,
    wanted,
)
from lockstep.core.requests.rules import aligned as aligned
from lockstep.core.requests.rules import ceil_to as ceil_to
from lockstep.core.requests.table import ONE, Int32s, Request, RunningBatch

IGNORE_EOS_RESERVE_TOKENS = 1  # tokens per running request that must stay free at every moment


class Deferral(NamedTuple):
    """The reason for which a request is not admitted, with the two numbers that were compared, in tokens; 0: none."""

    reason: DeferReason
    needed: int = 0
    available: int = 0
    limit: int = 0  # requests at once, if the reason is a limit of that kind
    own: bool = False  # the reason concerns this request alone, so later ones may pass; a shortage stops the queue
    lasts: bool = False  # the reason holds until something is freed: admission pauses while requests are active


class NewTokenRatio:
    """The share of the remaining output of running requests that is reserved. Between `floor` and 1."""

    def __init__(self, conservativeness: float) -> None:
        self.initial = min(1.0, NEW_TOKEN_RATIO_INIT * conservativeness)
        self.floor = self.initial * NEW_TOKEN_RATIO_MIN_FACTOR
        self.decay = (self.initial - self.floor) / NEW_TOKEN_RATIO_DECAY_STEPS
        self.value = self.initial

    def decoded(self, launches: int = 1) -> None:
        """Lower the ratio by one step for each decode that was launched without a retraction."""
        while launches and self.value != self.floor:
            self.value = ratio_after_decode(self.value, self.decay, self.floor)
            launches -= 1

    def retracted(self, outputs: int, max_new_tokens: int, survivors: int) -> None:
        """Set the ratio after a retraction to the share that the survivors used, plus RETRACT_DECODE_STEPS steps each.

        Args:
            outputs: output tokens of all survivors together.
            max_new_tokens: the limit of output tokens of all survivors together.
            survivors: the number of running requests that were not retracted.
        """
        self.value = ratio_after_retraction(outputs, max_new_tokens, survivors)

    def idle(self) -> None:
        """Reset the ratio to its initial value: no request runs."""
        self.value = self.initial


def reserve_by_ratio(remaining: NDArray[np.int32], ignores_eos: NDArray[np.int32], ratio: float) -> int:
    """Return the tokens to reserve for n running requests.

    Args:
        remaining: int32 [n], output tokens up to the limit of each.
        ignores_eos: int32 [n], 1 for a request that ignores end tokens and so runs to its limit, else 0.
    """
    clipped = clipped_output(remaining)
    certain = int(clipped.dot(ignores_eos))  # 32 bits suffice for half a million rows of 4,096 tokens
    return reserved_by_ratio(certain, int(np.add.reduce(clipped)) - certain, ratio)


def lasts(left: NDArray[np.float64], held: NDArray[np.int32], free: int) -> bool:
    """Return whether `free` tokens of KV suffice until the last of n requests has ended; each end frees KV.

    Args:
        left: [n], tokens that each request will still sample; requests with none left do not count.
        held: [n], tokens that each request holds now. Its end frees them and the tokens that it wrote until then.
    """
    order = left.argsort(kind="stable")
    order = order[left[order] > 0]
    left, held = left[order], held[order]
    running = np.arange(len(left), 0, -1)  # requests that run when each one ends, itself included
    before = held.cumsum() - held  # tokens freed by requests that ended earlier
    return bool((free + before - left * running > IGNORE_EOS_RESERVE_TOKENS * running).all())


def lasts_with(running_batch: RunningBatch, positions: Int32s, joining: list[Request], ratio: float, free: int) -> bool:
    """Return whether `free` tokens of KV last for a running batch and the requests that join it, see `lasts`.

    A request that ignores end tokens runs to its limit. Every other request is expected to produce the share `ratio` of
    its limit.

    Args:
        positions: int32 [members], the next position of each member of the running batch.
    """
    outputs = positions + ONE - running_batch.prompts
    expected = (running_batch.limits - running_batch.prompts) * np.where(running_batch.ignores_eos, 1.0, ratio)
    left = [one.max_new_tokens * (1.0 if one.ignore_eos else ratio) - one.outputs for one in joining]
    held = np.array([len(one.tokens) // 4 for one in joining], np.int32)
    return lasts(
        np.concatenate((expected - outputs, left)), np.concatenate((running_batch.prompts + outputs, held)), free
    )


def counts_on_ends(config: SchedConfig, request: Request) -> bool:
    """Return whether a request is admitted by the times at which the running requests end (`lasts_with`).

    This holds for a request that ignores end tokens, without a radix cache and with the reserve by new-token ratio.
    """
    return request.ignore_eos and not config.radix_cache and config.reserve == "ratio"


class PrefillBudget:
    """The tokens that one extend may still take. `set_aside` is in pages; `chunk` None: prompts are never split."""

    __slots__ = (
        "align",
        "beyond",
        "chunk",
        "current",
        "input",
        "newcomers",
        "page_size",
        "policy",
        "reserve",
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
        self.reserve = RESERVES[config.reserve]
        self.align = config.split_tokens  # a prompt is split at multiples of this, in tokens
        self.unit = config.chunk_unit_tokens  # `input` and `chunk` are charged in multiples of this, in tokens
        # tokens that must fit beyond those being computed: of further decodes, or the first of a block
        self.beyond = config.decode_look_ahead - 1 or int(config.block_tokens > 0)
        self.set_aside = 0  # pages reserved for the decodes of the same pass
        self.newcomers: list[Request] = []  # requests in this extend that are not in the running batch yet

    def shorten(self, tokens: int | None) -> None:
        """Limit the chunk to `tokens`, but to no less than one unit of splitting. None leaves it as it is."""
        if tokens is not None and self.chunk is not None:
            self.chunk = shortened(self.chunk, tokens, self.align)

    def share_with(self, members: int, decode_tokens: int, set_aside: int) -> None:
        """Subtract the decodes of the same pass and reserve `set_aside` pages for them.

        Input and chunk keep at least one page, so that a prompt always progresses. KV is charged one token for each
        decode: drafts are optional, and the output that they become is in the reserve already.

        Args:
            members: requests of the running batch.
            decode_tokens: tokens that the pass computes for them, drafts included.
        """
        if self.policy == "ratio":  # under the other policies the reserve contains the pages of decodes
            self.total -= members
            self.current -= members
        self.input = beside_decodes(self.input, decode_tokens, self.page_size)
        if self.chunk is not None:
            self.chunk = beside_decodes(self.chunk, decode_tokens, self.page_size)
        self.set_aside = set_aside

    def verdict(self) -> int:
        """Return whether another candidate may be considered at all, see `rules.verdict`."""
        return verdict(self.total, self.current, self.input, NO_LIMIT if self.chunk is None else self.chunk)

    def regain(self, tokens: int, unreserved: int, set_aside: int) -> None:
        """Add the tokens of preempted requests to the budget.

        Args:
            tokens: tokens of KV that the requests freed.
            unreserved: tokens that are no longer reserved for them.
            set_aside: pages that the decodes of this pass need now.
        """
        self.total += tokens + unreserved
        self.current += tokens
        self.set_aside = set_aside

    def gain(self, pages: int) -> None:
        """Add pages that came free while the extend is planned."""
        self.hold(-pages * self.page_size)

    def hold(self, tokens: int) -> None:
        """Subtract cached tokens that a candidate locks: they can no longer be evicted."""
        self.total -= tokens
        self.current -= tokens

    def promise(self, new_tokens: int, remaining_output: int) -> None:
        """Under the policy `full`, charge an admitted request for its whole prompt and output at once.

        Its chunks then cost nothing of `total`.
        """
        self.total -= self.wanted(new_tokens, remaining_output)

    def charge(self, new_tokens: int, output_tokens: int) -> None:
        """Charge an extend of `new_tokens`, and the output behind it (0 unless the extend completes the prompt)."""
        self.total -= charged_total(self.reserve, new_tokens, output_tokens, self.page_size)
        pages = ceil_to(new_tokens, self.page_size)
        self.current -= pages
        charged = pages if self.unit == self.page_size else ceil_to(new_tokens, self.unit)
        self.input -= charged
        if self.chunk is not None:
            self.chunk -= charged

    def wanted(self, new_tokens: int, remaining_output: int) -> int:
        """Return the tokens of `total` that a candidate needs to start: its whole prompt, and output by the policy."""
        return wanted(self.reserve, new_tokens, remaining_output, self.page_size, self.beyond)

    def has(self, wanted: int, locking: int) -> bool:
        """Return whether `total` covers `wanted` tokens after the candidate has locked `locking` cached tokens."""
        return covers(self.reserve, self.total - locking, wanted)


def chunk_tokens(start: int, new_tokens: int, budget: PrefillBudget, first: bool, may_split: bool) -> int:
    """Return how many of a prompt's new tokens, from `start` on, the next extend takes.

    It takes all of them, or those up to an aligned position, or 0.

    Args:
        first: whether the batch is still empty.
        may_split: whether no other request of the batch is split.
    """
    chunk = NO_LIMIT if budget.chunk is None else budget.chunk
    return rules.chunk_tokens(start, new_tokens, budget.input, chunk, budget.unit, budget.align, first, may_split)
