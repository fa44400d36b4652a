"""Two-batch overlap: a large batch runs as two halves, one of which computes while the other communicates.

    first half    attention | all-to-all | experts   | all-to-all | attention ...
    second half             | attention  | all-to-all| experts    | all-to-all ...

It hides collectives of ranks that share a model: sums after attention and MLPs, or the sends of experts. Each half
reads all weights, and has smaller products, so that halves with few tokens lose more than they hide. Batches are split
from a number of tokens on (`two_batch_decode_tokens`, `two_batch_prefill_tokens`), which leaves half as many in each.

Rows keep their order. Decodes are divided by rows. A batch with prompts is divided by tokens: between two rows if
neither half then has less than `SHARE_MIN` of the tokens, otherwise in the middle, through a prompt. A row that decodes
has one token and is never cut.

**Ranks.** Data-parallel ranks split a pass all together, because collectives of the first halves meet. Each rank
divides its own rows exactly in the middle. So the sizes of all halves follow from the numbers of tokens that the ranks
have agreed on, and no further exchange is needed. A pass is split if every rank that has tokens has enough of them;
ranks without tokens take part in both halves.
"""

from __future__ import annotations

import numpy as np
from msgspec.structs import replace

from lockstep.core.contract.commands import NO_ROWS, BatchPlan, Halves
from lockstep.core.contract.config import SchedConfig

SHARE_MIN = 0.48  # of the tokens, in the smaller half, if no prompt is cut: SGLang's default


# mechanism: two-batch-overlap (decided)
def halves_of(config: SchedConfig, plan: BatchPlan) -> Halves | None:
    """Return where a plan is divided, given the ranks that have agreed on it; None: it runs as a whole."""
    ranks = plan.ranks
    if ranks is not None:
        least = _least(config, extends=ranks.extends)
        return None if any(0 < tokens < least for tokens in ranks.tokens) else _middle(plan)
    if not plan.extend_rows:
        return halves_of_decodes(config, len(plan.rows))
    ends = np.cumsum(plan.stops - plan.starts)
    tokens = int(ends[-1])
    if tokens < _least(config, extends=plan.mode != "prebuilt"):  # rows of a prebuilt batch decode
        return None
    inner = ends[:-1]
    if inner.size:
        smaller = np.minimum(inner, tokens - inner)
        best = int(smaller.argmax())
        if smaller[best] >= SHARE_MIN * tokens:
            return Halves(best + 1)
    return _middle(plan)


def halves_of_decodes(config: SchedConfig, rows: int) -> Halves | None:
    """Return where a batch of decodes of one engine is divided; None: it runs as a whole."""
    if not config.splits_batches or rows < _least(config, extends=False):
        return None
    return Halves(rows // 2)


def _least(config: SchedConfig, *, extends: bool) -> int:
    """Return the number of tokens from which on a batch is split."""
    least = config.two_batch_prefill_tokens if extends else config.two_batch_decode_tokens
    assert isinstance(least, int), "filled in with the overlap"
    return least


def _middle(plan: BatchPlan) -> Halves:
    """Return the division of a plan behind half of its tokens."""
    ends = np.cumsum(plan.stops - plan.starts)
    if not ends.size:
        return Halves(0)
    middle = int(ends[-1]) // 2
    rows = int(np.searchsorted(ends, middle, side="right"))
    return Halves(rows, middle - (int(ends[rows - 1]) if rows else 0))


def first_half_tokens(tokens: tuple[int, ...]) -> tuple[int, ...]:
    """Return the tokens of each data-parallel rank in the first half of a pass, given those in the pass."""
    return tuple(count // 2 for count in tokens)


def divided(plan: BatchPlan) -> tuple[BatchPlan, BatchPlan]:
    """Return the halves of a plan as plans: rows, positions, new tokens and sampling rows. A cut row is in both.

    Changes of tables, spans and all else are those of the whole plan, and left out.
    """
    assert plan.halves is not None
    rows, cut = plan.halves.rows, plan.halves.cut
    behind = rows + (cut > 0)  # rows of the first half
    counts = plan.stops[: plan.extend_rows] - plan.starts[: plan.extend_rows]
    tokens = int(counts[:rows].sum()) + cut
    first_stops, second_starts = plan.stops[:behind].copy(), plan.starts[rows:].copy()
    if cut:
        first_stops[rows] = second_starts[0] = plan.starts[rows] + cut
    sampling = plan.sample_rows
    nothing = replace(
        plan,
        halves=None,
        ranks=None,
        rows_taken=(),
        hybrid=None,
        pooled_rows=NO_ROWS,
        media_spans=(),
        logprob_spans=(),
        hidden_spans=(),
        ids_digest=b"",
    )
    first = replace(
        nothing,
        rows=plan.rows[:behind],
        request_ids=plan.request_ids[:behind],
        starts=plan.starts[:behind],
        stops=first_stops,
        extend_rows=min(plan.extend_rows, behind),
        token_ids=plan.token_ids[:tokens],
        sample_rows=sampling[sampling < rows],
    )
    second = replace(
        nothing,
        rows=plan.rows[rows:],
        request_ids=plan.request_ids[rows:],
        starts=second_starts,
        stops=plan.stops[rows:],
        extend_rows=max(plan.extend_rows - rows, 0),
        token_ids=plan.token_ids[tokens:],
        sample_rows=sampling[sampling >= rows] - np.int32(rows),
    )
    return first, second
