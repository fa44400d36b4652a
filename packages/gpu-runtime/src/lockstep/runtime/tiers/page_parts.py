"""The bytes of a page, of a page of windows and of a slot of states: one part in each tensor that has something for it.

    page p     | keys 0 | values 0 | keys 1 | ... | the drafter's KV, or the tokens of its slots | tags of the canary |
    window w   | keys and values of the layers with sliding windows | tags |
    state s    | convolutions and recurrences of all layers that keep states | tag |

On the host each lies in one piece, in this order. So a copy to or from storage is one read or write, and a copy over
a GPU's link is one transfer of a page, however many layers it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor

from lockstep.host.cache_moves import BlockKind
from lockstep.runtime.canary import Canary
from lockstep.runtime.draft_model import ModelDrafter
from lockstep.runtime.drafting import Drafter, NgramDrafter
from lockstep.runtime.head_drafter import HeadDrafter
from lockstep.runtime.kv_pool import KvPool
from lockstep.runtime.stage_drafts import SentDrafts
from lockstep.runtime.states.pool import StateTensors

WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)
"""Types in which bytes are copied, the widest first."""


def words_of(size: int) -> torch.dtype:
    """Return the widest type of which `size` bytes are a whole number."""
    return next(one for one in WORDS if size % one.itemsize == 0)


@dataclass(frozen=True, slots=True)
class Part:
    """The bytes of one tensor in every page.

    Args:
        name: names the content, in the identity of stored pages.
        tensor: [pages, ...], contiguous.
        offset: of the part in a page, bytes.
    """

    name: str
    tensor: Tensor
    offset: int
    size: int

    @property
    def words(self) -> torch.dtype:
        """The widest type in which the part can be copied."""
        return words_of(gcd(self.offset, self.size))

    def on_device(self) -> Tensor:
        """Return the part of all pages of the device, [pages, words]."""
        return self.tensor.flatten(1).view(torch.uint8).view(self.words)

    def of(self, pages: Tensor) -> Tensor:
        """Return the part of pages that lie in one piece, uint8 [pages, page bytes]: [pages, words]."""
        return pages[:, self.offset : self.offset + self.size].view(self.words)


class PageParts:
    """All parts of a page, or of a block of another kind.

    Args:
        tensors: by name; the first dimension of each is the page. Released and resumed memory keeps these tensors.
    """

    def __init__(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        self.parts: list[Part] = []
        offset = 0
        for name, tensor in tensors:
            size = tensor[0].numel() * tensor.element_size()
            self.parts.append(Part(name, tensor, offset, size))
            offset += size
        self.size = -(-offset // 8) * 8  # a whole number of the widest words
        self.device = tensors[0][1].device

    def layout(self) -> str:
        """Return names, types and shapes of the parts, which differ if the bytes of a page mean something else."""
        parts = [f"{one.name} {one.tensor.dtype} {tuple(one.tensor.shape[1:])}" for one in self.parts]
        return "\n".join(parts)

    def gather(self, pages: Tensor, into: Tensor) -> None:
        """Copy pages of the device into one piece each.

        Args:
            pages: int64 [n], on the device.
            into: uint8 [n, page bytes], on the device.
        """
        for part in self.parts:
            part.of(into).copy_(part.on_device().index_select(0, pages))

    def scatter(self, pages: Tensor, given: Tensor) -> None:
        """Copy pages that lie in one piece, uint8 [n, page bytes], into pages of the device, int64 [n]."""
        for part in self.parts:
            part.on_device().index_copy_(0, pages, part.of(given))


def all_parts_of(
    pool: KvPool, drafter: Drafter | None = None, canary: Canary | None = None
) -> dict[BlockKind, PageParts]:
    """Return the parts of a page, of a window and of a state of an executor's memory, as far as it has them."""
    found: dict[BlockKind, PageParts] = {"page": parts_of(pool, drafter, canary)}
    if pool.sliding:
        found["window"] = window_parts_of(pool, canary)
    if pool.states is not None:
        found["state"] = state_parts_of(pool.states, canary)
    return found


def window_parts_of(pool: KvPool, canary: Canary | None = None) -> PageParts:
    """Return the parts of a page of the layers with sliding windows, which have pages of their own."""
    tensors = _of_pool("model", pool, windows=True)
    if canary is not None:
        tensors.append(("tags", canary.window_tags.view(-1, pool.page_size)))
    return PageParts(tensors)


def state_parts_of(states: StateTensors, canary: Canary | None = None) -> PageParts:
    """Return the parts of a slot of states."""
    tensors = [(f"state {part.layer} {part.kind} {part.number}", states.tensors[part.key]) for part in states.parts]
    if canary is not None:
        tensors.append(("tags", canary.state_tags[:, None]))
    return PageParts(tensors)


def parts_of(pool: KvPool, drafter: Drafter | None = None, canary: Canary | None = None) -> PageParts:
    """Return the parts of a page of an executor's memory, without layers whose windows have pages of their own."""
    tensors = _of_pool("model", pool)
    drafter = drafter.drafter if isinstance(drafter, SentDrafts) else drafter
    if isinstance(drafter, ModelDrafter):
        tensors += _of_pool("draft", drafter.attention.pool)
    elif isinstance(drafter, HeadDrafter):
        tensors += _of_pool("draft", drafter.attention.pool)
        tensors.append(("features", drafter.features.view(-1, pool.page_size, drafter.features.shape[1])))
    elif isinstance(drafter, NgramDrafter):
        tensors.append(("tokens", drafter.tokens.view(-1, pool.page_size)))
    if canary is not None:
        tensors.append(("tags", canary.tags.view(-1, pool.page_size)))
    return PageParts(tensors)


def _of_pool(name: str, pool: KvPool, *, windows: bool = False) -> list[tuple[str, Tensor]]:
    """Return keys and values of the layers whose windows have pages of their own, or of all others."""
    found = []
    for layer, (keys, values) in enumerate(zip(pool.keys, pool.values, strict=True)):
        if (layer in pool.sliding) != windows:
            continue
        found.append((f"{name} keys {layer}", keys))
        if not pool.shared:
            found.append((f"{name} values {layer}", values))
    return found
