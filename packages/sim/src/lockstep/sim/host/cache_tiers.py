"""Host memory and storage of a simulated engine, and the end times of moves between the tiers.

    tiers = HostTiers(host_cache_gb=1000, storage_gb=20_000)
    tiers.settings(PageBytes.of(...))    -> CacheTiers, for the scheduler: sizes in pages
    TierLinks(tiers, ...)                -> the lanes: commands in, answers out, each at its time

Every GPU has its own link to the host with one lane per direction; all GPUs move their parts of a page in parallel.
Storage has one lane for reads and one for writes, shared by all GPUs of an engine, and evicts the least recently used
keys. Window and state blocks of hybrid models are moved and stored with their own sizes. Two effects are not modelled:
the host's own memory bandwidth, and the overhead of small pages.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush
from typing import Any, NamedTuple

import msgspec

from lockstep.core.contract.commands import (
    CancelPrefetch,
    Command,
    CopyToHost,
    LoadFromHost,
    PrefetchFromStorage,
    WriteToStorage,
)
from lockstep.core.contract.events import HostCopyFinished, PrefetchFinished, StorageWritten
from lockstep.core.kv.block_tiers import in_storage
from lockstep.sim.cost import GpuSpec
from lockstep.sim.host.links import Link
from lockstep.sim.host.page_bytes import PageBytes
from lockstep.sim.scenario.tier_options import HostTiers

PCIE_SHARE = 0.85  # estimate: share of the data sheet's rate that large copies from pinned memory reach
Answer = HostCopyFinished | PrefetchFinished | StorageWritten
NO_BLOCKS: Mapping[str, PageBytes] = {}


# mechanism: storage (simulated)
class SimulatedStorage:
    """The keys in a storage of `bytes_max` bytes with their sizes. The least recently used keys are evicted.

    A use of a page is a use of all pages in front of it, and of keys that are used together the last ones count as used
    first. So the end of a path is evicted before its beginning, without which no prefetch finds the rest.
    """

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.bytes = 0
        self._sizes: OrderedDict[bytes, int] = OrderedDict()  # bytes by key, least recently used first
        self._in_front: dict[bytes, bytes] = {}  # by key of a page: the key of the page in front of it

    def __contains__(self, key: bytes) -> bool:
        return key in self._sizes

    def read(self, keys: Sequence[bytes]) -> None:
        """Mark keys, and the pages in front of the first one, as used. Raises KeyError for a key that is not stored."""
        for key in reversed(keys):
            self._sizes.move_to_end(key)
        if keys:
            self._use_path(self._in_front.get(keys[0], b""))

    def write(self, sizes: dict[bytes, int], keys: Sequence[bytes], after: bytes = b"") -> None:
        """Store each key with its size in bytes; a key that is already stored is marked as used.

        Args:
            keys: consecutive pages of a path, which are among those keys.
            after: the key of the page in front of them; b"": the path begins with them.
        """
        for key, size in reversed(sizes.items()):
            self.bytes += size - self._sizes.pop(key, 0)
            self._sizes[key] = size
        self._in_front.update(zip(keys, (after, *keys), strict=False))
        self._use_path(after)
        while self.bytes > self.bytes_max:
            key, size = self._sizes.popitem(last=False)
            self._in_front.pop(key, None)
            self.bytes -= size

    def _use_path(self, last: bytes) -> None:
        """Mark a page and all pages in front of it as used, as far as they are stored."""
        while last in self._sizes:
            self._sizes.move_to_end(last)
            last = self._in_front.get(last, b"")


class _Prefetch(NamedTuple):
    answer: PrefetchFinished
    size: int
    ends_us: float  # when its last byte has gone over the link


# mechanism: host-cache (simulated)
class TierLinks:
    """The lanes between the tiers of one engine, and the contents of its storage."""

    def __init__(
        self,
        tiers: HostTiers,
        pages: PageBytes,
        gpu: GpuSpec,
        blocks: Mapping[str, PageBytes] = NO_BLOCKS,
        *,
        key: str = "",
    ) -> None:
        """Set up the lanes.

        Args:
            blocks: bytes of a window and of a state block, by kind, if there are any.
            key: what random latencies depend on, such as seed and engine.
        """
        gbs = tiers.host_link_gbs or gpu.datasheet["pcie_gbs"].value * PCIE_SHARE
        self.pages, self.blocks = pages, blocks
        host_us, host_spread = float(tiers.host_link_latency_us), tiers.host_link_latency_spread
        storage_us, storage_spread = float(tiers.storage_latency_us), tiers.storage_latency_spread
        self.down = Link(gbs, host_us, spread=host_spread, key=f"{key} to host")
        self.up = Link(gbs, host_us, spread=host_spread, key=f"{key} from host")
        self.storage_out = Link(tiers.storage_gbs, storage_us, spread=storage_spread, key=f"{key} from storage")
        self.storage_in = Link(tiers.storage_gbs, storage_us, spread=storage_spread, key=f"{key} to storage")
        self.stored = SimulatedStorage(int(tiers.storage_gb * 1e9))
        self.due: list[tuple[int, int, Answer]] = []  # heap: us, count, answer
        self._writes: dict[int, tuple[WriteToStorage, dict[bytes, int]]] = {}  # by number, with bytes by key
        self._prefetches: dict[int, _Prefetch] = {}
        self._count = 0

    def share_storage(self, other: TierLinks) -> None:
        """Use the storage of another rank of the engine, with its lanes."""
        self.storage_out, self.storage_in, self.stored = other.storage_out, other.storage_in, other.stored

    @property
    def next_us(self) -> int:
        """Time at which the next move ends. Raises IndexError if none is under way."""
        return self.due[0][0]

    def begin(self, command: Command, now_us: int) -> int | None:
        """Carry out a command of the tiers; other commands are ignored.

        Returns: the time before which no batch may begin, None if batches need not wait.
        """
        if type(command) is CopyToHost:
            size = len(command.host_pages)
            done_us = self.down.send(now_us, self._on_link(command))
            self._answer(HostCopyFinished(done_us, command.copy_id, size, generation=command.generation))
            if not command.given_up:
                return None
            self.up.free_us = max(self.up.free_us, self.down.free_us)  # a load could overwrite the pages being copied
            return done_us
        if type(command) is LoadFromHost:
            size = len(command.host_pages)
            done_us = self.up.send(now_us, self._on_link(command))
            self._answer(HostCopyFinished(done_us, command.copy_id, size, generation=command.generation))
        elif type(command) is PrefetchFromStorage:
            found, blocks = in_storage(command, self.stored.__contains__)
            self.stored.read(command.keys[:found])
            size = found * self.pages.on_host
            orders = {one.kind: one for one in command.blocks}
            for one in blocks:
                self.stored.read([orders[one.kind].keys[index] for index in one.indices])
                size += len(one.indices) * self.blocks[one.kind].on_host
            done_us = self.storage_out.send(now_us, size)
            answer = PrefetchFinished(done_us, command.prefetch_id, found, generation=command.generation, blocks=blocks)
            self._prefetches[command.prefetch_id] = _Prefetch(answer, size, self.storage_out.free_us)
            self._answer(answer)
        elif type(command) is CancelPrefetch:
            self._cut_short(command.prefetch_id, now_us)
        elif type(command) is WriteToStorage:
            sizes: dict[bytes, int] = {}
            for beside in command.blocks:
                sizes |= dict.fromkeys(beside.keys, self.blocks[beside.kind].on_host)
            sizes |= dict.fromkeys(command.keys, self.pages.on_host)
            done_us = self.storage_in.send(now_us, sum(sizes.values()))
            size = len(command.host_pages)
            self._writes[command.write_id] = command, sizes
            self._answer(StorageWritten(done_us, command.write_id, size, generation=command.generation))
        return None

    def _on_link(self, copy: CopyToHost | LoadFromHost) -> int:
        """Return the bytes of a copy on the link of one GPU."""
        beside = sum(len(one.host) * self.blocks[one.kind].on_link for one in copy.blocks)
        return len(copy.host_pages) * self.pages.on_link + beside

    def take(self, now_us: int) -> Answer:
        """Return the next answer, dated `now_us`, and store what it wrote to storage."""
        _, _, answer = heappop(self.due)
        if type(answer) is StorageWritten:
            write, sizes = self._writes.pop(answer.write_id)
            self.stored.write(sizes, write.keys, write.after)
        elif type(answer) is PrefetchFinished:
            self._prefetches.pop(answer.prefetch_id, None)
        return msgspec.structs.replace(answer, time_us=now_us)

    def _cut_short(self, prefetch_id: int, now_us: int) -> None:
        """End a prefetch now, with the pages that have arrived. Later transfers on the link keep their times."""
        under_way = self._prefetches.pop(prefetch_id, None)
        if under_way is None or under_way.answer.time_us <= now_us:
            return
        answer, size, ends_us = under_way
        if ends_us == self.storage_out.free_us:
            gone = self.storage_out.cut_short(now_us, size)
        else:
            left = min(max(ends_us - now_us, 0.0) * self.storage_out.bytes_per_us, float(size))
            gone = size - round(left)
        self.due = [entry for entry in self.due if entry[2] is not answer]
        heapify(self.due)
        done = min(gone // self.pages.on_host, answer.pages_done)
        self._answer(msgspec.structs.replace(answer, time_us=now_us + 1, pages_done=done, blocks=()))

    def _answer(self, answer: Answer) -> None:
        heappush(self.due, (answer.time_us, self._count, answer))
        self._count += 1

    def describe(self) -> dict[str, Any]:
        """Return rate, transfers, bytes and busy time of each lane, for metrics.json.

        Bytes of the lanes to and from the host are those of one GPU.
        """
        lanes = {"to_host": self.down, "from_host": self.up}
        if self.stored.bytes_max >= self.pages.on_host:
            lanes |= {"to_storage": self.storage_in, "from_storage": self.storage_out}
        return {
            name: {
                "gbs": lane.bytes_per_us / 1e3,
                "transfers": lane.transfers,
                "bytes": lane.bytes,
                "busy_us": round(lane.busy_us),
            }
            for name, lane in lanes.items()
        }
