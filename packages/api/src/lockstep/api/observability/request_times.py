"""Times of a request in the engine by phase, and token counts of its batches, from events and Steps.

Runs in the host's thread, like the outbox. Arrivals and admissions are read from Steps, tokens and ends from the sinks.

    arrival -- queue --> admission -- prefill --> first token -- decode --> last token
"""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

from lockstep.api.processes.wire import ITERATION_TOKENS
from lockstep.core.contract.commands import BatchPlan, LaunchBatch, Step
from lockstep.core.contract.events import Observed, RequestAdmitted, RequestArrived, RequestId, RequestRejected
from lockstep.core.contract.samples import sample_count


class RequestTimes(NamedTuple):
    """Times of one request in microseconds; -1 for a phase that did not happen in this generation."""

    queue_us: int = -1
    prefill_us: int = -1
    decode_us: int = -1


class EngineTimes:
    """Derives request times and batch counts from the events of an engine."""

    def __init__(self) -> None:
        self._arrived_us: dict[RequestId, int] = {}
        self._admitted_us: dict[RequestId, int] = {}
        # batches by their tokens; the last bucket has no upper bound
        self.batch_counts = [0] * (len(ITERATION_TOKENS) + 1)
        self.batch_tokens = 0

    def observe(self, event: Observed, step: Step) -> None:
        """Record an event and its Step, before its commands are performed."""
        if type(event) is RequestArrived:
            for sample in range(sample_count(event)):
                self._arrived_us[event.request_id + sample] = event.time_us
        for decided in step.decided:
            if type(decided) is RequestAdmitted:
                # later admissions follow a retraction
                self._admitted_us.setdefault(decided.request_id, decided.time_us)
            elif type(decided) is RequestRejected:
                self.take(decided.request_id, -1, -1)
        for command in step.commands:
            if type(command) is LaunchBatch:
                tokens = new_tokens_of(command.plan)
                self.batch_counts[bisect_left(ITERATION_TOKENS, tokens)] += 1
                self.batch_tokens += tokens

    def take(self, request_id: RequestId, first_us: int, last_us: int) -> RequestTimes:
        """Return the times of a request that ended, and remove its record.

        Args:
            first_us, last_us: engine time of the first and last token; -1 without tokens.
        """
        arrived_us = self._arrived_us.pop(request_id, -1)
        admitted_us = self._admitted_us.pop(request_id, -1)
        if arrived_us < 0 or admitted_us < 0:
            return RequestTimes()
        queue_us = admitted_us - arrived_us
        if first_us < 0:
            return RequestTimes(queue_us)
        return RequestTimes(queue_us, first_us - admitted_us, last_us - first_us)


def new_tokens_of(plan: BatchPlan) -> int:
    """Return the number of new tokens of a plan. With drafts, positions may be unknown, but draft counts are known."""
    if plan.speculation is None:
        return int(plan.stops.sum() - plan.starts.sum())
    extending = slice(plan.extend_rows)
    extended = int(plan.stops[extending].sum() - plan.starts[extending].sum())
    return extended + len(plan.rows) - plan.extend_rows + int(plan.speculation.draft_lengths.sum())
