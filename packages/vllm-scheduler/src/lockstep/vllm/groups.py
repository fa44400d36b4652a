"""KV cache groups of vLLM as the pools of the core.

vLLM allocates the blocks of all groups from one pool. The core has a pool of pages for layers with full attention, one
of window pages for layers with a sliding window, and one of state slots for layers with recurrent state. So the blocks
are divided at start:

    block    0      | 1 ... pages | window pages, first group | window pages, second group | ... | unused
             null   | full group  |

    block    0      | 1 ... pages | state slots, first group | state slots, second group | ... | unused

Page p is block p + 1. Window page w is one block in each window group, at the same place of its part. In the table of a
window group, entry i is the block of the window page that belongs to full page i, and the null block where that page
has none: no later token reads there.

State slot s is likewise one block in each group with recurrent state. The table of such a group has one entry, the
block of the slot of the request. vLLM's own scheduler has blocks zeroed in models with recurrent state, because a block
of its pool may have held a state before it holds KV. Here a block serves one kind of layer for the life of the engine.

A model fits if its groups have one block size, one of them has full attention, and the others have windows of one
length; or if at most one has full attention and the others have recurrent state that is not kept in the prefix cache
(`mamba_cache_mode` "none"). A single group without recurrent state counts as one of full attention even if its layers
read windows only: all its blocks are kept, and the workers apply the windows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from lockstep.core.contract.config import HybridMemory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lockstep.core.contract.commands import HybridChanges
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

NULL_BLOCK = 0
FIRST_BLOCK = 1
NO_WINDOW = -1
NO_STATE = -1

Kind = Literal["full", "window", "state", "other"]


class KvGroups:
    """The groups of one engine, which window page each full page has, and which state slot each row has."""

    def __init__(self, kinds: Sequence[Kind], pages: int, window_pages: int = 0, state_slots: int = 0) -> None:
        """
        Args:
            kinds: of each group; empty for a model without KV cache.
            pages: of the full group; of a model without one, the pages that the core counts.
            window_pages: of each window group; 0 if there is none.
            state_slots: of each group with recurrent state; 0 if there is none.
        """
        self.pages = pages
        self.window_pages = window_pages
        sizes = {"full": 0, "window": window_pages, "state": state_slots}
        self._parts: list[tuple[Kind, int]] = []  # of each group: its kind, and the block of its first page or slot
        at = FIRST_BLOCK + (pages if "full" in kinds else 0)
        for kind in kinds:
            self._parts.append((kind, at))
            at += sizes[kind]
        self.has_windows = "window" in kinds
        self.has_states = "state" in kinds
        self._window_of = [NO_WINDOW] * pages if self.has_windows else []  # by full page
        self._page_of = [NO_WINDOW] * window_pages  # by window page
        self._slot_of: dict[int, int] = {}  # state slot by row

    def assign(self, changes: HybridChanges) -> None:
        """Take in which full pages get which window pages with a plan, and which rows get which state slots."""
        for page, window in zip(changes.pages.tolist(), changes.window_pages.tolist(), strict=True):
            before = self._page_of[window]
            if before != NO_WINDOW and self._window_of[before] == window:
                self._window_of[before] = NO_WINDOW
            self._window_of[page], self._page_of[window] = window, page
        self._slot_of.update(zip(changes.state_rows.tolist(), changes.state_slots.tolist(), strict=True))

    def windows_of(self, blocks: list[int]) -> list[int]:
        """Return the window pages of full pages, given as blocks; NO_WINDOW where a page has none."""
        window_of = self._window_of
        return [window_of[block - FIRST_BLOCK] for block in blocks] if self.has_windows else []

    def state_of(self, row: int) -> int:
        """Return the state slot of a row; NO_STATE for a model without recurrent state."""
        return self._slot_of[row] if self.has_states else NO_STATE

    def tables(self, blocks: list[int], windows: list[int], state: int = NO_STATE) -> tuple[list[int], ...]:
        """Return block tables, or what is added to them, by group.

        Args:
            blocks: of the full group.
            windows: the window pages of these, as `windows_of` returned them.
            state: the state slot of a request that is sent whole; NO_STATE if blocks are added to its table.
        """
        found = []
        for kind, at in self._parts:
            match kind:
                case "window":
                    found.append([NULL_BLOCK if window == NO_WINDOW else at + window for window in windows])
                case "state":
                    found.append([at + state] if state != NO_STATE else [])
                case _:
                    found.append(list(blocks))
        return tuple(found)


def kinds_of(kv_cache_config: KVCacheConfig) -> list[Kind]:
    """Return the kind of each group; "other" for what the core has no pool for."""
    groups = kv_cache_config.kv_cache_groups
    return [kind_of(group.kv_cache_spec, alone=len(groups) == 1) for group in groups]


def kind_of(spec: KVCacheSpec, *, alone: bool = False) -> Kind:
    """Return the kind of a group.

    Args:
        alone: whether the model has no other group. Windows then do not matter: every token keeps its block. Without
            vLLM's hybrid manager, full attention and windows are such a group.
    """
    from vllm.v1.kv_cache_interface import (
        ChunkedLocalAttentionSpec,
        FullAttentionSpec,
        MambaSpec,
        MLAAttentionSpec,
        SlidingWindowSpec,
    )

    if alone and type(spec) in (FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec):
        return "full"
    if type(spec) is MambaSpec:
        return "state" if spec.mamba_cache_mode == "none" and not spec.num_speculative_blocks else "other"
    length = length_of(spec)
    return "full" if length == 0 else "window" if length > 0 else "other"


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


def state_groups(kv_cache_config: KVCacheConfig) -> int:
    """Return how many groups have recurrent state if at most one other has full attention; else 0."""
    kinds = kinds_of(kv_cache_config) if kv_cache_config.has_mamba_layers else []
    states = kinds.count("state")
    return states if kinds.count("full") <= 1 and kinds.count("full") + states == len(kinds) else 0


def page_tokens(kv_cache_config: KVCacheConfig, block_size: int) -> int:
    """Return the tokens of a page of the core, given vLLM's block size of the engine.

    With recurrent state that is the block size of the full group: vLLM's is a multiple of those of all groups, and that
    of a state is the longest request. Without a full group the core counts pages that no block belongs to.
    """
    if not state_groups(kv_cache_config):
        return block_size
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups if kind_of(group.kv_cache_spec) == "full"]
    return int(specs[0].block_size) if specs else COUNTED_TOKENS


COUNTED_TOKENS = 16  # of a page that is only counted


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


def divided_by_states(
    blocks: int, groups: int, page_size: int, context_tokens: int, rows: int, mean_tokens: int = 0
) -> tuple[int, int]:
    """Return how many pages and state slots to make of vLLM's blocks.

    A request of mean length holds its pages and one state slot; the two pools are in this proportion. No more slots are
    made than rows can use, and a request of the whole context fits if the blocks allow.

    Args:
        blocks: of all groups, without the null block.
        groups: with recurrent state.
        rows: that the core has at once.
        mean_tokens: of a request, prompt and output; 0: an estimate of MEAN_TOKENS_MIN, at most half the context.
    """
    mean_tokens = mean_tokens or min(MEAN_TOKENS_MIN, context_tokens // 2)
    row_pages, context_pages = -(-mean_tokens // page_size), -(-context_tokens // page_size)
    slots = min(int(blocks / (groups + row_pages)), (blocks - context_pages) // groups, rows)
    slots = max(slots, SLOTS_MIN)
    return blocks - groups * slots, slots


SLOTS_MIN = 2  # the core's least
