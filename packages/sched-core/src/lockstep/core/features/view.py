"""What a feature may read of the scheduler, and the few verbs by which it hands the scheduler a decision.

Features take these types and import nothing of the scheduler; only the scheduler writes scheduler state. A verb is
called where it takes effect, and not returned as a value to be carried out later, because the order of decided events
enters the digest: a session that closes rejects its turns before it is reported as closed, and what a rejection lets
another request do is decided in between.

Every feature is built with the scheduler that it serves. It keeps its own state, and has the hooks that it needs:

    check(event, ...)          before an arrival is accepted: raises RequestRefused
    take_in(request, ...)      an arrival was accepted
    ended(request, step)       a request ends: it is finished or rejected
    settle(step)               after every event, when its effects are known
    restarted(...)             the device is gone
    image(), load(image)       its part of a snapshot
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

from lockstep.core.contract.commands import Step
from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.events import FinishReason, RejectReason, RequestId
from lockstep.core.contract.stats import Stats
from lockstep.core.kv.resource import AdmissionView
from lockstep.core.requests.batching import InFlight
from lockstep.core.requests.running import RunningState
from lockstep.core.requests.table import Int32s, Request, RunningBatch

RetractReason = Literal["pages", "forced", "pause", "restart", "prefix_failed", "weights", "preempted"]


class SchedulerView(AdmissionView, Protocol):
    """The scheduler as features see it: state that they may read, and verbs."""

    # ------------------------------------------------------------------------------------------------------------ state

    @property
    def generation(self) -> int:
        """Restarts of the device so far."""

    @property
    def waiting(self) -> Sequence[Request]:
        """The waiting queue, in the order in which requests began to wait."""

    @property
    def prefilling(self) -> Request | None:
        """The chunked-prefill request: its prompt is not launched to its end."""

    @property
    def admits(self) -> bool:
        """Whether requests may start: no job on the device waits or runs."""

    @property
    def paused(self) -> bool:
        """Whether an operator paused launches and admission."""

    @property
    def idle(self) -> bool:
        """Whether nothing is under way: no request, batch in flight, open transfer or move between cache tiers."""

    @property
    def launches_blocked(self) -> bool:
        """Whether a job on the device forbids launches."""

    @property
    def stands_still(self) -> bool:
        """Whether nothing is launched for now: paused, blocked, or before the end of an operator's gap."""

    def outputs_of(self, request: Request) -> int:
        """Output tokens that were delivered."""

    def computed_of(self, request: Request) -> int:
        """Positions whose KV is launched."""

    def tokens_of(self, request: Request, outputs: int) -> bytes:
        """The prompt and that many output tokens, packed int32."""

    def reserve_of(self, running_batch: RunningBatch, positions: Int32s) -> int:
        """Tokens that `reserve` leaves to a running batch at these positions."""

    # ------------------------------------------------------------------------------------- what other features answer

    def comes_by_transfer(self, request: Request) -> bool:
        """Whether a transfer decides if the prompt is computed here, and when."""

    def waits_for_turn(self, request: Request) -> bool:
        """Whether the request is a turn of a session whose turn before it has not ended."""

    def turn_began(self, request: Request, step: Step) -> None:
        """A turn has its whole prompt now."""

    # ------------------------------------------------------------------------------------------------------------ verbs

    def finish(
        self, request: Request, reason: FinishReason, step: Step, *, flush: bool = False, outputs: int | None = None
    ) -> None:
        """End a request."""

    def reject(self, request_id: RequestId, reason: RejectReason, message: str, step: Step) -> None:
        """Answer a request that never ran with an error."""

    def add_prerequisite(self, request: Request) -> None:
        """Add a prerequisite: the request stays out of the waiting queue until `join_queue` met it."""

    def join_queue(self, request: Request) -> None:
        """One prerequisite is met; after the last one the request joins the waiting queue."""

    def meet_prerequisite(self, request: Request) -> None:
        """One prerequisite is met of a request that does not wait: it takes a row at once."""

    def leave_queue(self, request: Request) -> None:
        """Take a request out of the waiting queue for a new prerequisite."""

    def leave_running(self, requests: list[Request]) -> None:
        """Take those of the requests that decode out of their running batches, all at once."""

    def occupy(self, request: Request) -> None:
        """Count a request as active, with a place in the microbatch whose launch is planned."""

    def give_place(self, request: Request) -> None:
        """Take back the place of a request that stays active only until its KV is sent."""

    def retry_admission(self) -> None:
        """Something came free: try admission again."""

    def set_timer(self, due_us: int, request_id: RequestId) -> None:
        """Look at this request again at `due_us`."""

    def reconfigure(self, config: SchedConfig) -> None:
        """Replace the settings."""


class LaunchView(SchedulerView, Protocol):
    """What data-parallel ranks use beside that: they plan launches, and decide when these take place."""

    @property
    def digests(self) -> bool: ...

    def decode_goes_first(self, running: RunningState) -> bool:
        """Whether decodes go before any prefill."""

    def would_extend(self, running: RunningState) -> bool:
        """Whether an extend could be launched now."""

    def plan_next(self, step: Step, *, extends: bool = True) -> InFlight | None:
        """Plan what runs next; it is in flight from here on, and launched by `launch`."""

    def next_number(self) -> int:
        """The number of the plan that is being made."""

    def put_in_flight(self, batch: InFlight) -> None:
        """Count a batch as in flight."""

    def launch(self, batch: InFlight, step: Step) -> None:
        """Order the launch of a batch that is in flight already."""

    def defer_first(self, step: Step) -> None:
        """Report, once, that the first request of the queue waits for prompts of other ranks."""

    def begin_microbatch(self, number: int) -> None:
        """Turn to a microbatch whose launch is to be planned."""

    def end_microbatch(self) -> None:
        """The launch of that microbatch is planned."""


class AdminView(SchedulerView, Protocol):
    """What control requests and maintenance use beside that."""

    @property
    def blocked(self) -> Mapping[RequestId, Request]:
        """Accepted requests with prerequisites."""

    @property
    def next_batch_id(self) -> int:
        """The number of the next batch, and of the launches so far."""

    def stats(self) -> Stats:
        """How the engine stands now."""

    def cancel_all(self, requests: list[Request], step: Step) -> None:
        """End these requests as cancelled."""

    def retract_all(self, reason: RetractReason, step: Step, *, by_layers: bool = False) -> None:
        """Retract every running request, or only those with prompts computed to some layer."""

    def void_kv(self) -> None:
        """The KV that sessions hold is void."""

    def reset_ratio(self) -> None:
        """Start the new-token ratio again, from the settings."""

    def weights_changed(self, step: Step) -> None:
        """New weights are in place: what depends on those before is computed again."""
