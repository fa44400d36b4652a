"""Answered HTTP requests, as the live page and the spans show them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.api.endpoints.generation import Generation

RECENT = 100


@dataclass(frozen=True, slots=True)
class Phases:
    """Times of a request by phase in the engine; microseconds, -1 for a phase that did not happen or is unknown."""

    queue_us: int = -1
    prefill_us: int = -1
    decode_us: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """An answered request.

    Args:
        request_id: value of the header X-Request-Id.
        generation: its generation; None if it was answered before one started.
    """

    request_id: str
    method: str
    path: str
    status: int
    tenant: str
    arrived_s: float  # time.monotonic
    ended_s: float
    headers: Mapping[str, str]
    generation: Generation | None = None
    ended_at_s: float = field(default_factory=time.time)  # seconds since the epoch

    @property
    def took_s(self) -> float:
        return self.ended_s - self.arrived_s

    @property
    def phases(self) -> Phases:
        """The phases of the first answer to the request."""
        ended = None if self.generation is None else self.generation.choices[0].reply.ended
        return Phases() if ended is None else Phases(ended.queue_us, ended.prefill_us, ended.decode_us)

    @property
    def label(self) -> str:
        """The label in the engine and its journal, as used by `lockstep explain RUN --request LABEL`."""
        return "" if self.generation is None else self.generation.parameters.label

    def row(self) -> dict[str, Any]:
        """Return the request as a JSON object."""
        row: dict[str, Any] = {
            "request_id": self.request_id,
            "path": self.path,
            "status": self.status,
            "at_s": round(self.ended_at_s - self.took_s, 3),
            "took_us": round(self.took_s * 1e6),
        }
        if self.generation is None:
            return row
        usage, phases = self.generation.usage(), self.phases
        reasons = [choice.reply.ended.reason for choice in self.generation.choices if choice.reply.ended is not None]
        return row | {
            "label": self.label,
            "engine": self.generation.choices[0].ticket.engine if self.generation.choices else -1,
            "stream": self.generation.parameters.stream,
            "answers": len(self.generation.choices),
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
            "reasons": list(dict.fromkeys(reasons)),
            "queue_us": phases.queue_us,
            "prefill_us": phases.prefill_us,
            "decode_us": phases.decode_us,
        }


Watcher = Callable[[Served], object]


class Recent:
    """The last requests that reached the engine."""

    def __init__(self) -> None:
        self._rows: deque[tuple[str, dict[str, Any]]] = deque(maxlen=RECENT)

    def add(self, served: Served) -> None:
        """Add a request."""
        if served.generation is not None and served.generation.choices:
            self._rows.append((served.tenant, served.row()))

    def of(self, tenant: str | None) -> list[dict[str, Any]]:
        """Return the rows of one tenant, or of all tenants (None), the newest first."""
        return [row for owner, row in reversed(self._rows) if tenant is None or owner == tenant]
