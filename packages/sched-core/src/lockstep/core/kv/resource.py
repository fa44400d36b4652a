"""Resources: what a request must get before it runs.

Admission calls `fits` of every resource in one order. If the request fits everywhere, each resource charges the planned
extend (`reserve`), the request gets a row, and each resource takes what belongs to the row (`take`). A resource
releases that when the row is free (`release`), after the last launched batch that names the row is collected. So a
resource does not depend on batches in flight.

    waiting --fits: no--> Deferral, the request stays in the queue
       |
       `--fits: yes, all--> reserve, take --runs, leaves its row--> deferred free --batch collected--> release

A new kind of memory is a subclass and a line in `lockstep.core.scheduler.admission.RESOURCES`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from msgspec import Struct

from lockstep.core.contract.config import SchedConfig
from lockstep.core.kv.memory import Memory
from lockstep.core.kv.radix import Match
from lockstep.core.kv.running_view import EngineView
from lockstep.core.requests.budget import Deferral, PrefillBudget
from lockstep.core.requests.table import Int32s, Request


class AdmissionView(EngineView, Protocol):
    """What resources read of the scheduler."""

    @property
    def memory(self) -> Memory:
        """Rows, pages, radix cache, adapters and tiers."""

    @property
    def now_us(self) -> int:
        """Time of the event that is being folded, microseconds since the journal began."""

    @property
    def active(self) -> int:
        """Requests with a row: being prefilled or decoded, or kept until their KV is sent."""

    @property
    def sending(self) -> int:
        """Active requests with a computed prompt that only has to be sent yet."""

    @property
    def transfers_hold_pages(self) -> bool:
        """Whether a transfer keeps pages beside the rows of running requests."""

    @property
    def available_pages(self) -> int:
        """Pages of the device that can be allocated: free ones, and cached ones without a lock."""

    def row_available(self) -> bool:
        """Whether a row of the request table is free."""

    def place_available(self) -> bool:
        """Whether the microbatch whose launch is planned has a free place."""

    def match(self, request: Request) -> Match:
        """Return the cached prefix of a waiting request, as far as the request may use it."""

    def lacks_state(self, path: Int32s) -> bool:
        """Whether no state slot is available for a request that starts behind the cached pages `path`."""

    def window_room(self, request: Request, start: int, take: int, path: Int32s, budget: PrefillBudget) -> int:
        """Return how many of `take` tokens, from position `start` on, sliding windows have pages for.

        Args:
            path: the cached pages in front of the request, if it has no row yet.
        """


class ExtendShare(Struct):
    """The share of an extend with which a waiting request would start. Resources fill and limit it in their order."""

    view: AdmissionView  # the state in which the request would start: the scheduler, or a projection of it
    request: Request
    budget: PrefillBudget
    parts: int  # requests in the extend so far
    may_split: bool  # whether the prompt may be computed in chunks
    match: Match | None = None
    cached_tokens: int = 0
    locked_pages: int = 0  # cached pages of the match without a lock: this request will lock them
    new_tokens: int = 0  # tokens to compute, in all chunks
    take: int = 0  # tokens to compute in this extend


class Resource:
    """One thing that a request must get before it runs. Subclasses override what they need; the rest does nothing.

    Methods that a subclass does not override are never called, so an absent hook costs nothing.
    """

    name = ""
    """Key of `dump` in a snapshot; empty: the resource has no state beside that of `Memory`."""

    def __init__(self, view: AdmissionView) -> None:
        """Called once per engine. Settings may change while it runs, so read `view.config` at each use."""
        self.view = view
        self.memory = view.memory

    @classmethod
    def exists(cls, config: SchedConfig) -> bool:
        """Whether an engine with these settings has the resource. If not, admission has no such step."""
        return True

    def fits(self, share: ExtendShare) -> Deferral | None:
        """Return why the request of this share cannot start; None if it can. Changes nothing but the share.

        What a resource can supply is read from `share.view`. Preemption passes a projection of the scheduler, so the
        rules of admission also decide whether retracting some requests would be enough.
        """
        return None

    def reserve(self, share: ExtendShare) -> None:
        """Charge the share of an admitted request to the planned extend."""

    def take(self, row: int, request: Request) -> None:
        """Take what a request with this row needs. Also called for a request whose KV was received."""

    def release(self, row: int) -> None:
        """Release what a row had. The row is free: no launched batch names it."""

    def void(self) -> None:
        """Reset the state: the memory of the device is lost. Rows are released one by one before this call."""

    def dump(self) -> Any:
        """Return the state in builtins, for a snapshot."""

    def load(self, state: Any) -> None:
        """Take over the state that `dump` returned."""

    def check(self, rows: Mapping[int, Request | None]) -> None:
        """Raise InvariantError unless the state follows from the rows that are not free.

        Args:
            rows: the holder of each row that is not free; None for a row of a deferred free.
        """


def overrides(resource: Resource, hook: str) -> bool:
    """Whether a resource overrides a hook."""
    return getattr(type(resource), hook) is not getattr(Resource, hook)
