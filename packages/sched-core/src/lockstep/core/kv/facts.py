"""Facts that several invariants need, gathered once per check."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.events import RequestId
from lockstep.core.kv.radix import RadixCache
from lockstep.core.kv.running_view import EngineView, of_all_microbatches
from lockstep.core.requests.batching import InFlight
from lockstep.core.requests.radix_node import RadixNode
from lockstep.core.requests.table import Int32s, Request, RequestState


class Facts:
    """One state of an engine. Nothing of it outlives the check."""

    def __init__(
        self,
        engine: EngineView,
        radix: RadixCache,
        free: Int32s,
        blocked: Mapping[RequestId, Request],
        *,
        launch_found_nothing: bool,
    ) -> None:
        """Gather the facts.

        Args:
            radix: the radix cache of the device.
            free: ids of the free pages of the device.
            blocked: accepted requests with prerequisites.
            launch_found_nothing: whether the last event offered a free launch slot and nothing was launched.
        """
        running_batch, positions = engine.all_running
        self.config: SchedConfig = engine.config
        self.requests: Mapping[RequestId, Request] = engine.requests
        self.in_flight: Sequence[InFlight] = engine.in_flight
        self.running = of_all_microbatches(engine)
        self.radix = radix
        self.free = free
        self.blocked = blocked
        self.launch_found_nothing = launch_found_nothing
        self.cached = radix.nodes()  # every node of the radix cache of the device
        self.holders = [  # requests with rows
            request for request in engine.requests.values() if request.state is not RequestState.WAITING
        ]
        self.positions: list[int] = positions.tolist()  # the next position of each decoding request
        stands = dict(zip(running_batch.rows.tolist(), self.positions, strict=True))
        self.computed = [  # by holder: positions with launched KV
            stands.get(request.row, request.computed) if request.state is RequestState.RUNNING else request.computed
            for request in self.holders
        ]
        self._paths: dict[RadixNode, tuple[bytes, bytes]] = {}

    def path(self, handle: RadixNode) -> tuple[bytes, bytes]:
        """Return the path to a handle: its page ids and its tokens, both packed int32."""
        found = self._paths.get(handle)
        if found is None:
            pages, tokens, node = [handle.pages.tobytes()], [handle.key], handle
            while (parent := node.parent) is not None:
                pages.append(parent.pages.tobytes())
                tokens.append(parent.key)
                node = parent
            found = self._paths[handle] = b"".join(reversed(pages)), b"".join(reversed(tokens))
        return found

    @cached_property
    def is_cached(self) -> NDArray[np.bool_]:
        """Whether a page of the device is in the radix cache, bool [pages]."""
        return pages_in(self.cached, self.config.pages)


def pages_in(nodes: list[RadixNode], pages: int) -> NDArray[np.bool_]:
    """Return for each page whether one of the nodes owns it, bool [pages]."""
    found = np.zeros(pages, np.bool_)
    for node in nodes:
        found[node.pages] = True
    return found
