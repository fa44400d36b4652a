"""KV cache groups of vLLM as the pools of the core.

vLLM allocates the blocks of all groups from one pool. The core has a pool of pages for layers with full attention, and
one of window pages for layers with a sliding window. So the blocks are divided at start:

    block    0      | 1 ... pages | window pages, first group | window pages, second group | ... | unused
             null   | full group  |

Page p is block p + 1. Window page w is one block in each window group, at the same place of its part. In the table of a
window group, entry i is the block of the window page that belongs to full page i, and the null block where that page
has none: no later token reads there.

A model fits if its groups have one block size, one of them has full attention, and the others have windows of one
length. Every window page serves all window groups, so that their tables are equal but for the offset.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.core.contract.config import HybridMemory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lockstep.core.contract.commands import HybridChanges
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

NULL_BLOCK = 0
FIRST_BLOCK = 1
NO_WINDOW = -1


class KvGroups:
    """The groups of one engine, and which window page each full page has."""

    def __init__(self, kinds: Sequence[bool], pages: int, window_pages: int) -> None:
        """
        Args:
            kinds: whether each group has a sliding window; empty for a model without KV cache.
            pages: of the full group.
            window_pages: of each window group; 0 if there is none.
        """
        self.pages = pages
        self.window_pages = window_pages
        self._offsets: list[int | None] = []  # of each group: None for the full one, else the block of window page 0
        at = FIRST_BLOCK + pages
        for window in kinds:
            self._offsets.append(at if window else None)
            at += window_pages if window else 0
        self.has_windows = any(kinds)
        self._window_of = [NO_WINDOW] * pages if self.has_windows else []  # by full page
        self._page_of = [NO_WINDOW] * window_pages  # by window page

    def assign(self, changes: HybridChanges) -> None:
        """Take in which full pages get which window pages with a plan, in this order."""
        for page, window in zip(changes.pages.tolist(), changes.window_pages.tolist(), strict=True):
            before = self._page_of[window]
            if before != NO_WINDOW and self._window_of[before] == window:
                self._window_of[before] = NO_WINDOW
            self._window_of[page], self._page_of[window] = window, page

    def windows_of(self, blocks: list[int]) -> list[int]:
        """Return the window pages of full pages, given as blocks; NO_WINDOW where a page has none."""
        window_of = self._window_of
        return [window_of[block - FIRST_BLOCK] for block in blocks] if self.has_windows else []

    def tables(self, blocks: list[int], windows: list[int]) -> tuple[list[int], ...]:
        """Return block tables, or what is added to them, by group.

        Args:
            blocks: of the full group.
            windows: the window pages of these, as `windows_of` returned them.
        """
        return tuple(
            list(blocks)
            if offset is None
            else [NULL_BLOCK if window == NO_WINDOW else offset + window for window in windows]
            for offset in self._offsets
        )


def window_tokens(kv_cache_config: KVCacheConfig) -> int:
    """Return the length of the windows, in tokens, of a model with a full group and window groups; 0 for any other."""
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    if len(specs) < 2:
        return 0
    lengths = {length_of(spec) for spec in specs}
    full = sum(length_of(spec) == 0 for spec in specs)
    if full != 1 or len(lengths) != 2 or len({spec.block_size for spec in specs}) != 1:
        return 0
    return max(lengths)


def length_of(spec: KVCacheSpec) -> int:
    """Return the window of a group's layers in tokens: 0 for full attention, -1 for what is neither."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec

    if type(spec) is SlidingWindowSpec and not spec.extra_retained_tokens:
        return int(spec.sliding_window)
    full = type(spec) in (FullAttentionSpec, MLAAttentionSpec)
    return 0 if full and spec.sliding_window is None and spec.attention_chunk_size is None else -1


MEAN_TOKENS_MIN = 1024


def divided(
    blocks: int, groups: int, tokens: int, page_size: int, context_tokens: int, ahead: int, mean_tokens: int = 0
) -> tuple[int, int]:
    """Return how many pages and window pages to make of vLLM's blocks.

    While a request of mean length decodes, it holds its pages, and as many window pages as a window has; the two pools
    are in this proportion. A request of the whole context fits if the blocks allow.

    Args:
        blocks: of all groups, without the null block.
        groups: with windows.
        tokens: of a window.
        ahead: positions that one launch moves a row, and those in flight.
        mean_tokens: of a request, prompt and output; 0: an estimate of four windows, at least MEAN_TOKENS_MIN and at
            most half the context.
    """
    row = HybridMemory(window_tokens=tokens, window_pages=1).row_pages_max(page_size, ahead)
    context_pages = -(-context_tokens // page_size)
    mean_tokens = mean_tokens or min(max(4 * tokens, MEAN_TOKENS_MIN), context_tokens // 2)
    share = min(row * page_size / mean_tokens, 1.0)
    pages = int(blocks / (1 + groups * share))
    most = blocks - groups * (row + 1)  # window pages for one decode and a page of a prompt
    pages = min(max(pages, context_pages), most)
    return pages, (blocks - pages) // groups
