"""What is sent of an executor's memory: full pages, pages of layers with windows, and slots of states.

    page       keys and values of layers that keep every token | the drafter's | tags of the canary
    window     keys and values of layers with windows          | tags
    state 1    states of some layers
    state 2    states of further layers                        | tags

A state can be larger than all pages of a prompt, so it is sent in pieces of whole tensors that fit into a slot of
staging memory. Every rank has whole states: transformers' plans split no layer that keeps one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from lockstep.host.cache_moves import BlockKind
from lockstep.host.handover.wire import BlockLayout, LayoutPart
from lockstep.runtime.canary import Canary
from lockstep.runtime.drafting import Drafter
from lockstep.runtime.kv_pool import KvPool
from lockstep.runtime.tiers.page_parts import PageParts, parts_of, state_parts_of, window_parts_of
from lockstep.runtime.transfer.transports import SLOT_BYTES

OF_LAYER = re.compile(r"model (keys|values) ([0-9]+)")
"""Names of parts that `parts_of` gives to the KV of the model, by the number of the layer in this rank's pool."""


@dataclass(frozen=True, slots=True)
class SentBlocks:
    """Blocks of one kind on one rank, or one piece of each.

    Args:
        memory: the parts of a block, by the number of the page or slot.
        parts: the same, as layouts of other engines name them.
    """

    kind: BlockKind
    memory: PageParts
    parts: tuple[LayoutPart, ...]

    @property
    def layout(self) -> BlockLayout:
        """The blocks as a message contains them."""
        return BlockLayout(self.kind, self.memory.size, self.parts)


def sent_blocks(
    pool: KvPool,
    drafter: Drafter | None = None,
    canary: Canary | None = None,
    first_layer: int = 0,
    scales: Sequence[tuple[float, float]] | None = None,
) -> tuple[SentBlocks, ...]:
    """Return the blocks of an executor's memory, full pages first.

    Args:
        first_layer: number in the model of the first layer of the pool.
        scales: of keys and values that are stored in fp8, by layer of the pool; None: KV is stored as it is.
    """

    def in_pages(kind: BlockKind, memory: PageParts) -> SentBlocks:
        return SentBlocks(kind, memory, parts_in(memory, first_layer, scales))

    found = [in_pages("page", parts_of(pool, drafter, canary))]
    if pool.sliding:
        found.append(in_pages("window", window_parts_of(pool, canary)))
    if pool.states is not None:
        states = [(one.name, one.tensor) for one in state_parts_of(pool.states, canary).parts]
        found += [_piece(some) for some in _pieces(states)]
    return tuple(found)


def _pieces(states: list[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
    """Yield the tensors of a slot in pieces of SLOT_BYTES at most, a larger tensor by itself."""
    some, size = list[tuple[str, Tensor]](), 0
    for name, tensor in states:
        more = tensor[0].numel() * tensor.element_size()
        if some and size + more > SLOT_BYTES:
            yield some
            some, size = [], 0
        some.append((name, tensor))
        size += more
    yield some


def _piece(tensors: list[tuple[str, Tensor]]) -> SentBlocks:
    memory = PageParts(tensors)
    parts = tuple(LayoutPart(one.name, str(one.tensor.dtype), one.offset, one.size, 0) for one in memory.parts)
    return SentBlocks("state", memory, parts)


def parts_in(
    pages: PageParts, first_layer: int = 0, scales: Sequence[tuple[float, float]] | None = None
) -> tuple[LayoutPart, ...]:
    """Return the parts of a page as a layout contains them. Tensors of KV are [pages, page size, heads, head size].

    Args:
        first_layer: number in the model of the first layer that the pages have.
        scales: of keys and values that are stored in fp8, by layer of the pages; None: KV is stored as it is.
    """
    found = []
    for one in pages.parts:
        heads = one.tensor.shape[2] if one.tensor.dim() == 4 else 0
        name, dtype = one.name, str(one.tensor.dtype)
        if (of_layer := OF_LAYER.fullmatch(name)) is not None:
            kind, layer = of_layer[1], int(of_layer[2])
            name = f"model {kind} {first_layer + layer}"
            if scales is not None:
                dtype += f" x {scales[layer][kind == 'values']!r}"
        found.append(LayoutPart(name, dtype, one.offset, one.size, heads))
    return tuple(found)
