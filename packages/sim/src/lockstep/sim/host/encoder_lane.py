"""The encoder of a simulated engine: orders in, answers out, each at its time.

    GPU      | decode | encode a, b  | decode | ...          on the engine's GPUs: a group at a time, batches wait

    encoder  | a      | c | e                                on GPUs of its own: each takes what comes next
             | b   | d    |

    rank 0   | pass | encode a, b  |      | pass |           data-parallel ranks: each on its own GPUs, side by side;
    rank 1   | pass | encode c |          | pass |           the next pass begins when the last rank is there

On the engine's GPUs the encoder begins, once the batches that were handed over have run, with all that it was asked for
by then; what is asked for meanwhile is the next group. How much that can be is the scheduler's `encoder_budget_tokens`.
GPUs of its own have the encoder whole, take one content at a time, and send what came out over the network. Ranks of an
engine share them.
"""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heappop, heappush
from typing import Protocol

from lockstep.core.contract.commands import EncodeMedia
from lockstep.core.contract.events import MediaEncoded, RequestId
from lockstep.sim.cost.encoder import EncoderCost, MediaContent
from lockstep.sim.cost.hardware import NETWORK_GBS, NETWORK_LATENCY_US

NEVER_US = 2**62
ENCODER_GPUS_MAX = 1024


class MediaSink(Protocol):
    """What a host reports about media; `MetricsFold` implements it."""

    def encoder_interval(self, start_us: int, stop_us: int, contents: int, tokens: int, gpus: int) -> None:
        """Take in what the encoder does without a break; `gpus` of its own, or 0."""

    def media_wait(self, request_id: RequestId, waited_us: int) -> None:
        """Take in for how long a request was held for its media."""


class EncoderLane:
    """What encodes for one engine. `gpus` of its own; 0: those of the engine."""

    def __init__(self, cost: EncoderCost, contents: Mapping[bytes, MediaContent], gpus: int, sink: MediaSink) -> None:
        self.gpus = gpus
        self.sink = sink
        self.waiting: list[EncodeMedia] = []
        self._cost, self._contents = cost, contents
        self._due: list[tuple[int, int, EncodeMedia]] = []  # heap: when, count
        self._count = 0
        self._busy_until_us = 0  # with a group, on the engine's GPUs
        self._free_us = [0] * gpus

    def share_gpus(self, other: EncoderLane) -> None:
        """Encode on the same GPUs of their own as another rank of the engine. Before either has begun anything."""
        self._free_us = other._free_us

    @property
    def next_us(self) -> int:
        """When the next answer comes."""
        return self._due[0][0] if self._due else NEVER_US

    def begin(self, command: EncodeMedia) -> None:
        """Take an order. It is begun by `start`."""
        self.waiting.append(command)

    def start(self, now_us: int, device_free_us: int) -> int:
        """Begin what can be begun. Returns before when no batch may begin: 0 where none has to wait.

        Args:
            device_free_us: when the batches that were handed over will have run; NEVER_US: not known yet, ask again.
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
        """Encode on the GPU that is free first, and send what came out."""
        content = self._contents[command.digest]
        gpu = self._free_us.index(min(self._free_us))
        started_us = max(now_us, self._free_us[gpu])
        self._free_us[gpu] = stop_us = started_us + max(1, round(self._cost.single_us(content)))
        size = content.tokens * self._cost.encoders.embedding_bytes
        self._answer(stop_us + round(NETWORK_LATENCY_US.value + size / (NETWORK_GBS.value * 1e3)), command)
        self.sink.encoder_interval(started_us, stop_us, 1, content.tokens, self.gpus)

    def _answer(self, at_us: int, command: EncodeMedia) -> None:
        heappush(self._due, (at_us, self._count, command))
        self._count += 1

    def take(self, now_us: int) -> MediaEncoded:
        """Return the next answer, with the time at which the engine takes it in."""
        command = heappop(self._due)[2]
        return MediaEncoded(now_us, command.digest, generation=command.generation)
