"""Nodes of the radix cache, as requests refer to them: the path that a request locks, and its longest cached prefix.

`kv/radix.py` builds the tree and is the only module that changes a node.
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray


class RadixNode:
    """One edge of the radix tree, and the handle of the path that ends with it. Only RadixCache changes it."""

    __slots__ = (
        "children",
        "handles",
        "invalidated",
        "key",
        "lock_count",
        "namespace",
        "number",
        "pages",
        "parent",
        "queued",
        "stop",
        "tick",
        "version",
    )

    def __init__(
        self, number: int, parent: RadixNode | None, namespace: str, key: bytes, pages: NDArray[np.int32]
    ) -> None:
        self.number = number  # order of creation; unique in the cache, survives dump and load
        self.namespace = namespace
        self.parent = parent  # None: a root, or evicted
        self.children: dict[bytes, RadixNode] = {}  # by the bytes of their first page, in order of insertion
        self.key = key  # bytes of the tokens of this edge
        self.pages = pages  # int32 [pages of this edge], owned
        self.stop: int = parent.stop + len(pages) if parent is not None else 0  # pages from the root to its end
        self.tick = 0  # of its last use
        self.handles = 0  # locks taken on this node itself
        self.lock_count = 0  # locks taken on it or below
        self.invalidated = False  # hidden from matches: its KV was never computed
        self.queued = False  # whether it has an entry in the queue of leaves
        self.version = 0  # rises with every change that can alter a match ending here; not kept in a dump

    def __repr__(self) -> str:
        return f"RadixNode({self.number}, pages [..{self.stop}), locks {self.lock_count}, tick {self.tick})"


class Found(Struct, frozen=True):
    """The end of the longest cached prefix of some tokens. It is valid while `node` has this `version`."""

    node: RadixNode
    version: int
    pages: int  # from the root; fewer than node.stop if it ends inside the edge
