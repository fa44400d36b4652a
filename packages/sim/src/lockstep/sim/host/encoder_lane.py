"""The encoder of a simulated engine: `EncodeMedia` commands in, `MediaEncoded` answers out, each at its time.

    GPU      | decode | encode a, b  | decode | ...          on the engine's GPUs: one group at a time, batches wait

    encoder  | a      | c | e                                on separate GPUs: each encodes the next content
             | b   | d    |

    rank 0   | pass | encode a, b  |      | pass |           data-parallel ranks: each on its own GPUs, in parallel;
    rank 1   | pass | encode c |          | pass |           the next pass begins when all ranks are ready

On the engine's GPUs the encoder starts when the batches handed over have run. It encodes all contents ordered by then
as one group; contents ordered meanwhile form the next group. The scheduler's `encoder_budget_tokens` limits a group.
Separate GPUs each have the whole encoder, encode one content at a time, and send the embeddings over the network. The
ranks of an engine share these GPUs.
"""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heappop, heappush
from typing import Protocol

from lockstep.core.contract.commands import EncodeMedia
from lockstep.core.contract.events import MediaEncoded, RequestId
from lockstep.sim.cost.encoder import EncoderCost, MediaContent
from lockstep.sim.cost.hardware import network_of

NEVER_US = 2**62
ENCODER_GPUS_MAX = 1024


class MediaSink(Protocol):
    """Receives the measurements of media; `MetricsFold` implements it."""

    def encoder_interval(self, start_us: int, stop_us: int, contents: int, tokens: int, gpus: int) -> None:
        """Record an interval in which the encoder works without a break; `gpus`: its separate GPUs, or 0."""

    def media_wait(self, request_id: RequestId, waited_us: int) -> None:
        """Record for how long a request waited for its media."""


# mechanism: encoder-budget (simulated)
class EncoderLane:
    """The encoder of one engine.

    Args:
        contents: contents of the workload by digest.
        gpus: number of its separate GPUs; 0: it runs on the engine's GPUs.
    """

    def __init__(self, cost: EncoderCost, contents: Mapping[bytes, MediaContent], gpus: int, sink: MediaSink) -> None:
        self.gpus = gpus
        self.sink = sink
        self.waiting: list[EncodeMedia] = []
        self._cost, self._contents = cost, contents
        self._due: list[tuple[int, int, EncodeMedia]] = []  # heap: us, count
        self._count = 0
        self._busy_until_us = 0  # end of the group on the engine's GPUs
        self._free_us = [0] * gpus  # by separate GPU

    def share_gpus(self, other: EncoderLane) -> None:
        """Use the separate GPUs of another rank of the engine. Call it before either lane has started a content."""
        self._free_us = other._free_us

    @property
    def next_us(self) -> int:
        """Time of the next answer; NEVER_US if none is due."""
        return self._due[0][0] if self._due else NEVER_US

    def begin(self, command: EncodeMedia) -> None:
        """Accept an order. `start` begins to encode it."""
        self.waiting.append(command)

    def start(self, now_us: int, device_free_us: int) -> int:
        """Begin to encode the waiting contents, if a GPU is free for them.

        Args:
            device_free_us: end of the batches handed over; NEVER_US: not known yet, and nothing is begun.
        Returns: the time before which no batch may begin; 0 if batches need not wait.
        """
        if self.gpus:
            for command in self.waiting:
                self._send(command, now_us)
            self.waiting.clear()
            return 0
        if not self.waiting or self._busy_until_us > now_us or device_free_us == NEVER_US:
            return 0
        group = [self._contents[command.digest] for command in self.waiting]
        started_us = max(now_us, device_free_us)
        self._busy_until_us = stop_us = started_us + max(1, round(self._cost.group_us(group)))
        for command in self.waiting:
            self._answer(stop_us, command)
        self.waiting.clear()
        tokens = sum(content.tokens for content in group)
        self.sink.encoder_interval(started_us, stop_us, len(group), tokens, self.gpus)
        return stop_us

    def _send(self, command: EncodeMedia, now_us: int) -> None:
        """Encode on the separate GPU that is free first, and send the embeddings over the network."""
        content = self._contents[command.digest]
        gpu = self._free_us.index(min(self._free_us))
        started_us = max(now_us, self._free_us[gpu])
        self._free_us[gpu] = stop_us = started_us + max(1, round(self._cost.single_us(content)))
        size = content.tokens * self._cost.encoders.embedding_bytes
        rate, latency = network_of(self._cost.gpu)
        self._answer(stop_us + round(latency.value + size / (rate.value * 1e3)), command)
        self.sink.encoder_interval(started_us, stop_us, 1, content.tokens, self.gpus)

    def _answer(self, at_us: int, command: EncodeMedia) -> None:
        heappush(self._due, (at_us, self._count, command))
        self._count += 1

    def take(self, now_us: int) -> MediaEncoded:
        """Return the next answer, dated `now_us`."""
        command = heappop(self._due)[2]
        return MediaEncoded(now_us, command.digest, generation=command.generation)
