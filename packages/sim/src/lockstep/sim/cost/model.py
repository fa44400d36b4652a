"""The interface of cost models: the shape of a batch goes in, microseconds come out."""

from __future__ import annotations

from typing import Annotated, Any, Protocol, runtime_checkable

import msgspec


class BatchShape(msgspec.Struct, frozen=True, gc=False):
    """The shape of one forward pass: everything that its cost depends on. It has sums over rows, no single rows."""

    extend_rows: int = 0
    extend_tokens: int = 0  # new tokens of all extend rows
    extend_context_tokens: int = 0  # computed tokens before the new ones, summed
    extend_pairs: int = 0  # query-key pairs: sum of new * context + new * (new + 1) / 2
    decode_rows: int = 0
    decode_context_tokens: int = 0  # KV tokens read by decode rows, summed
    sampled_rows: int = 0  # rows that need logits and a token; a row that verifies drafts counts once per position
    draft_tokens: int = 0  # drafts that decode rows verify behind their newest tokens, summed
    adapter_tokens: int = 0  # new tokens that run on an adapter (LoRA), drafts included; other tokens cost no more
    adapters: int = 0  # distinct adapters of these tokens
    own: BatchShape | None = None  # the part of the batch on the slowest shard; None: rows are spread evenly
    halves: tuple[BatchShape, BatchShape] | None = None  # of a batch that runs as two halves: see two_batch.py

    @property
    def completed_prompts(self) -> int:
        """Extend rows that sample a token: prompts whose last chunk is in the batch."""
        return max(self.sampled_rows - self.decode_rows - self.draft_tokens, 0)


class LastingSpread(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """The part of a spread that batches which follow each other have in common, see draws.py."""

    share: Annotated[float, msgspec.Meta(ge=0, le=1)]  # of the variance
    batches: Annotated[int, msgspec.Meta(ge=1)]  # after which it is another one


class Duration(msgspec.Struct, frozen=True, gc=False):
    """A time with its uncertainty. The spread of a roofline is 0."""

    mean_us: float
    spread_us: float = 0.0  # one standard deviation
    lasting: LastingSpread | None = None  # None: the spread of each batch is its own


class CostModel(Protocol):
    """A pure function from a batch shape to a duration: equal shapes give equal durations."""

    def batch_us(self, shape: BatchShape) -> Duration:
        """Return the time on the GPU from the first kernel's start to the sampled tokens' arrival."""
        ...

    def describe(self) -> dict[str, Any]:
        """Return kind, model, GPU and every constant with its source, ready for a run's metrics.json."""
        ...


@runtime_checkable
class ContextBends(Protocol):
    """A cost model whose times have a known form, so that the fast path can compute most of them itself.

    Both functions return contexts, in ascending order, between which the time of a batch is a convex function of its
    context, without a spread. None: the form is not known.
    """

    def decode_bends(self, rows: int) -> tuple[int, ...] | None:
        """Return the contexts for a batch of `rows` decodes and no other rows, by its `decode_context_tokens`.

        The time of such a batch does not fall as its context grows.
        """
        ...

    def chunk_bends(self, tokens: int) -> tuple[int, ...] | None:
        """Return the contexts for an extend of one prompt by `tokens` without sampling, by `extend_context_tokens`."""
        ...


def extend_shape(new_tokens: int, context_tokens: int = 0, sampled: bool = True) -> BatchShape:
    """Return the shape of one extend row: `new_tokens` after `context_tokens` that already have KV."""
    return BatchShape(
        extend_rows=1,
        extend_tokens=new_tokens,
        extend_context_tokens=context_tokens,
        extend_pairs=new_tokens * context_tokens + new_tokens * (new_tokens + 1) // 2,
        sampled_rows=int(sampled),
    )


def decode_shape(rows: int, context_tokens: int) -> BatchShape:
    """Return the shape of `rows` decode rows that read `context_tokens` KV tokens each."""
    return BatchShape(decode_rows=rows, decode_context_tokens=rows * context_tokens, sampled_rows=rows)
