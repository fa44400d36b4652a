"""What a request must get before it runs, as a protocol: `Resource`.

Admission asks every resource in one order whether a request fits (`fits`). Where all agree, each of them charges the
extend that is planned (`reserve`), the request gets a row, and what belongs to the row is taken with it (`take`). It
is given back when the row is free again (`release`), which is when the last launched batch that names the row has been
collected: a resource needs no notion of batches in flight.

    waiting --fits: no--> Deferral, the request waits on
       |
       `--fits: yes, all--> reserve, take --runs, leaves its row--> deferred free --batch collected--> release

A new kind of memory is a subclass and a line in `lockstep.core.scheduler.admission.RESOURCES`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

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


class ExtendShare:
    """How a waiting request would join an extend. Resources fill it in and narrow it in the order of admission."""

    __slots__ = (
        "budget",
        "cached_tokens",
        "locked_pages",
        "match",
        "may_split",
        "new_tokens",
        "parts",
        "request",
        "take",
        "view",
    )

    def __init__(
        self, view: AdmissionView, request: Request, budget: PrefillBudget, parts: int, may_split: bool
    ) -> None:
        """Create the share of a request before any resource has seen it.

        Args:
            view: the state in which the request would start: the scheduler, or a projection of it.
            parts: requests in the extend so far.
            may_split: whether the prompt may be computed in chunks.
        """
        self.view = view
        self.request = request
        self.budget = budget
        self.parts = parts
        self.may_split = may_split
        self.match: Match | None = None
        self.cached_tokens = 0
        self.locked_pages = 0  # cached pages of the match that no lock holds so far
        self.new_tokens = 0  # still to compute, all chunks together
        self.take = 0  # of these, in this extend


class Resource:
    """One thing that a request must get before it runs. Subclasses override what they need; the rest does nothing.

    Methods that a subclass does not override are never called, so an absent hook costs nothing.
    """

    name = ""
    """Key of `dump` in a snapshot; empty: there is nothing to store beside what `Memory` stores."""

    def __init__(self, view: AdmissionView) -> None:
        """Built once for an engine. Settings may change while it runs: read `view.config` anew each time."""
        self.view = view
        self.memory = view.memory

    @classmethod
    def exists(cls, config: SchedConfig) -> bool:
        """Whether an engine with these settings has the resource; without it the loop of admission leaves it out."""
        return True

    def fits(self, share: ExtendShare) -> Deferral | None:
        """Return why the request of this share cannot start; None if it can. Changes nothing but the share.

        What a resource can supply is read from `share.view`. Preemption passes a projection of the scheduler, so the
        rules of admission also decide whether retracting some requests would be enough.
        """
        return None

    def reserve(self, share: ExtendShare) -> None:
        """The request is admitted: charge its share to the extend that is planned."""

    def take(self, row: int, request: Request) -> None:
        """The request got this row. Also called for a request whose KV was received from another engine."""

    def release(self, row: int) -> None:
        """The row is free: no launched batch names it any more."""

    def void(self) -> None:
        """The device's memory is gone, with what lies in it. Rows are released one by one before this is called."""

    def dump(self) -> Any:
        """The state in builtins, for a snapshot."""

    def load(self, state: Any) -> None:
        """Become what `dump` described."""

    def check(self, rows: Mapping[int, Request | None]) -> None:
        """Raise InvariantError unless the state follows from the rows that are not free.

        Args:
            rows: the holder of each; None where only a deferred free keeps the row.
        """


def overrides(resource: Resource, hook: str) -> bool:
    """Whether a resource has its own version of a hook."""
    return getattr(type(resource), hook) is not getattr(Resource, hook)
