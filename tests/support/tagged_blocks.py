"""Blocks of a tagged device: passes over masks, and cells whose content depends on every token of their block.

A cell of a finished block is tagged by the blocks before it, by all tokens of its own, and by its place: a block's
positions attend to each other in both directions. Every pass but the last of a block leaves garbage, since it attends
to masks; so does an extend that ends within a block. The number of passes is a pure function of request and position.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lockstep.core.contract.commands import BatchPlan

if TYPE_CHECKING:
    from tests.support.tagged_kv import TaggedKv
    from tests.support.tagged_rows import Launched, Row, Story

Passes = Callable[[int, int, int], int]


def pure_passes(request_id: int, start: int, masks: int) -> int:
    """The passes after which a block has no mask: from one to as many as it has masks."""
    return 1 + (request_id * 5 + start * 3 + start // 7) % masks


class TaggedBlocks:
    """What a tagged device does for the rows of a pass over blocks."""

    def __init__(self, kv: TaggedKv, garbage: int, passes: Passes = pure_passes) -> None:
        self.kv, self.size, self.garbage = kv, kv.config.block_tokens, garbage
        self.passes = passes

    def wrong_span(self, plan: BatchPlan, i: int, row: Row, start: int, stop: int) -> str:
        """Return what is wrong with a row of a pass: its span, or which pass it is; nothing: it is right."""
        assert plan.blocks is not None
        number, given = int(plan.blocks.numbers[i]), int(plan.blocks.given[i])
        prompt = self.kv.stories[row.request_id].prompt_tokens
        if start % self.size or stop != start + self.size:
            return "is no block"
        if number != (row.passes if row.reach == stop and row.passes else 0):
            return f"is pass {number}, after {row.passes} of the block up to {row.reach}"
        if not number and not start <= row.reach < stop:
            return f"begins a block, the row stands at {row.reach}"
        if given != (max(prompt - start, 0) if not number else 0):
            return f"is given {given} tokens, the prompt has {prompt}"
        row.passes, row.reach, row.least = number + 1, stop, stop
        return ""

    def compute(self, launched: Launched, i: int, row: Row, at: int) -> list[int]:
        """Compute a block, and return what its cells hold then. The given tokens are at `at` in the plan."""
        plan, story = launched.plan, self.kv.stories[row.request_id]
        assert plan.blocks is not None
        start, stop = int(plan.starts[i]), int(plan.stops[i])
        number, given = int(plan.blocks.numbers[i]), int(plan.blocks.given[i])
        if story.tokens[start : start + given] != plan.token_ids[at : at + given].tolist():
            raise AssertionError(f"b{plan.batch_id} gives r{row.request_id} other tokens at {start} than its own")
        first = max(start, story.prompt_tokens)
        if number < self.passes(row.request_id, start, stop - first):
            launched.accepted[i] = 0
            return [self.garbage] * self.size
        launched.accepted[i] = stop - first
        tokens = [self.kv.sample_at(plan, row, position) for position in range(first, stop)]
        launched.fed_back[i] = tokens
        row.passes = 0
        return [self.garbage] * self.size if row.failed else self.prefix_ids(row, story, stop)[start:stop]

    def prefix_ids(self, row: Row, story: Story, stop: int) -> list[int]:
        """Return what the cells below `stop` must hold; garbage within a block that is not finished."""
        ids, size = row.prefix_ids, self.size
        while len(ids) < stop and len(ids) + size <= len(story.tokens):
            at = len(ids)
            before: object = ids[-1] if ids else (story.namespace, story.adapter, self.kv.weights)
            about = (*story.about[at : at + size], *[None] * (at + size - max(len(story.about), at)))[:size]
            key = (before, tuple(story.tokens[at : at + size]), about)
            ids += [self.kv.number_of((key, place)) for place in range(size)]
        return ids + [self.garbage] * (stop - len(ids))

    def extended(self, ids: list[int], start: int, stop: int) -> list[int]:
        """Return what an extend of [start:stop) writes: garbage in a block that it does not fill."""
        whole = max(stop // self.size * self.size, start)
        return ids[start:whole] + [self.garbage] * (stop - whole)
