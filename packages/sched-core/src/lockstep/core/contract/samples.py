"""Parallel samples: one arrival with several request ids, and the request of each id."""

from __future__ import annotations

import msgspec

from lockstep.core.contract.events import RequestArrived, SamplingParams

SAMPLES_MAX = 128
"""The most samples of one arrival. An arrival with a number outside 1 to this takes one id and is rejected."""


def sample_count(event: RequestArrived) -> int:
    """Return the number of request ids that an arrival takes, its own included."""
    return event.parallel_samples if 1 <= event.parallel_samples <= SAMPLES_MAX else 1


def sample_of(event: RequestArrived, number: int) -> RequestArrived:
    """Return sample `number` of an arrival as a request of its own, with its id, seed, label and transfer room."""
    if not number:
        return event
    sampling = event.sampling or SamplingParams()
    return msgspec.structs.replace(
        event,
        request_id=event.request_id + number,
        sampling=msgspec.structs.replace(sampling, seed=sampling.seed + number),
        label=sample_label(event.label, number),
        transfer_room=event.transfer_room + number if event.transfer_room is not None else None,
    )


def sample_label(label: str, number: int) -> str:
    """Return the label of sample `number` of a request with this label."""
    return f"{label}.{number}" if label and number else label
