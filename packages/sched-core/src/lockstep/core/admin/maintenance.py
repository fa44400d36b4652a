"""Maintenance of the device: new weights, and memory released for a while. One job at a time, in order of request.

    queued --it is the first--> begun --nothing in flight--> ordered --the host's answer--> answered
                                  |                                                            |
       no request is admitted in this time; with "in_place", "retract", "cancel" nothing is launched either

A job is ordered only once nothing is in flight and no adapter is being loaded. So no batch runs on two versions of the
weights, and nothing is written to released memory. "wait" and the release of memory also wait until no request holds a
row. Before the answer nothing is launched and no load begins.

**Weights and KV.** The version is part of the key under which KV is cached (`Memory.keyed`), so no request reads KV of
other weights. Unlocked KV is evicted at the swap. KV that rows still hold ("in_place") is evicted when they are freed;
it mixes versions and is never published.

**Memory.** Releasing kv_cache voids the cached KV. Every launch needs the weights. Releasing weights also voids the
adapter slots; adapters are loaded again when a request waits for them. While any memory is released, nothing is
launched and requests wait. New weights leave the adapter slots valid, since an adapter is added to any weights.

A restart voids an order without an answer: the job is ordered again under the new generation. It keeps completed jobs:
the host starts with the weights of the newest version and with released memory still released.
"""

from __future__ import annotations

import msgspec

from lockstep.core.contract.commands import ControlAnswered, ReleaseDeviceMemory, ResumeDeviceMemory, Step, SwapWeights
from lockstep.core.contract.errors import ContractError
from lockstep.core.contract.events import MemorySwitched, ReleaseMemory, ResumeMemory, UpdateWeights, WeightsSwapped
from lockstep.core.features.view import AdminView
from lockstep.core.kv.component import Component, Restored

MEMORY_TAGS = ("kv_cache", "weights")


class Job(msgspec.Struct):
    """One control request about the device, until it is answered."""

    control_id: int
    control: UpdateWeights | ReleaseMemory | ResumeMemory
    begun: bool = False  # it is the first job, and its mode was applied to the running requests
    ordered: bool = False  # its command was issued and the host has not answered

    @property
    def lets_run(self) -> bool:
        """Whether running requests run to their end before the job is ordered."""
        return not isinstance(self.control, UpdateWeights) or self.control.mode == "wait"


class MaintenanceImage(msgspec.Struct):
    """Maintenance in a snapshot."""

    jobs: list[Job] = []
    released: tuple[str, ...] = ()
    still: bool = False
    admits: bool = True


class MaintenancePart(msgspec.Struct):
    """Maintenance as a field of a snapshot."""

    maintenance: MaintenanceImage


class Maintenance(Component):
    """The jobs of one engine in order, and the released memory."""

    PART = MaintenancePart

    def __init__(self, scheduler: AdminView) -> None:
        self._scheduler = scheduler
        self.jobs: list[Job] = []
        self.released: tuple[str, ...] = ()  # tags of MEMORY_TAGS
        self.still = False  # whether launches are blocked
        self.admits = True  # whether requests may be admitted

    def part(self) -> MaintenancePart:
        """Return the state for a snapshot."""
        return MaintenancePart(MaintenanceImage(self.jobs, self.released, self.still, self.admits))

    def load(self, part: MaintenancePart, restored: Restored) -> None:
        """Take over the state that `part` returned."""
        image = part.maintenance
        self.jobs, self.released, self.still, self.admits = image.jobs, image.released, image.still, image.admits
        self.block_copies()

    def newest_version(self) -> int:
        """Return the newest version among the current weights and those of queued jobs."""
        queued = [job.control.version for job in self.jobs if isinstance(job.control, UpdateWeights)]
        return queued[-1] if queued else self._scheduler.memory.weights_version

    # mechanism: weights-and-memory (decided)
    def advance(self, step: Step) -> None:
        """Begin and order the jobs that are possible now; answer jobs without work. Called after every event."""
        self._advance(step)
        head = self.jobs[0] if self.jobs else None
        self.still = bool(self.released) or (head is not None and (head.ordered or not head.lets_run))
        self.admits = not self.jobs and not self.released
        self.block_copies()

    def block_copies(self) -> None:
        """Block copies from the device while the host changes it. Transfers may still end meanwhile."""
        if self._scheduler.memory.tiers.present:
            self._scheduler.memory.tiers.copies_blocked = bool(self.jobs) and self.jobs[0].ordered

    def _advance(self, step: Step) -> None:
        while self.jobs and not self.jobs[0].ordered:
            job = self.jobs[0]
            refused = self._refusal(job)
            if refused or self._is_done(job):
                self._answer(step, refused)
                continue
            if not job.begun:
                job.begun = True
                self._make_way(job, step)
            adapters = self._scheduler.memory.adapters
            if self._scheduler.in_flight or (job.lets_run and self._scheduler.active) or adapters.loading:
                return
            if job.lets_run and self._scheduler.transfers_hold_pages:
                return
            if self._scheduler.memory.operations.device_busy:
                return
            self._order(job, step)

    def swapped(self, event: WeightsSwapped, step: Step) -> None:
        """Take in that the host loaded the weights, or kept the previous ones after an error.

        Raises: ContractError for an answer to another order.
        """
        if event.generation < self._scheduler.generation:
            return  # an answer from before a restart is void
        control = self._ordered(event)
        if not isinstance(control, UpdateWeights) or control.version != event.version:
            raise ContractError(f"weights {event.version} were swapped, but {control} was ordered")
        if not event.error:
            self._scheduler.void_kv()
            self._scheduler.memory.change_weights(event.version, step)
            self._scheduler.weights_changed(step)
        self._answer(step, event.error)
        self.advance(step)

    def switched(self, event: MemorySwitched, step: Step) -> None:
        """Take in that the host released or resumed memory, or failed to do so.

        Raises: ContractError for an answer to another order.
        """
        if event.generation < self._scheduler.generation:
            return  # an answer from before a restart is void
        control = self._ordered(event)
        expected = ReleaseMemory if event.released else ResumeMemory
        if not isinstance(control, expected) or event.tags != self._to_switch(control):
            raise ContractError(f"memory of {event.tags} was switched, but {control} was ordered")
        if not event.error:
            left = [tag for tag in self.released if tag not in event.tags]
            self.released = (*left, *event.tags) if event.released else tuple(left)
        self._answer(step, event.error)
        self.advance(step)

    def restarted(self) -> None:
        """Let an order without an answer be issued again to the new device."""
        for job in self.jobs:
            job.ordered = False

    def _ordered(self, event: WeightsSwapped | MemorySwitched) -> UpdateWeights | ReleaseMemory | ResumeMemory:
        """Return the control of the ordered job. Raises ContractError if no job is ordered."""
        if event.generation > self._scheduler.generation:
            raise ContractError(
                f"{type(event).__name__} of generation {event.generation}, this is {self._scheduler.generation}"
            )
        if not self.jobs or not self.jobs[0].ordered:
            raise ContractError(f"{type(event).__name__}, but nothing of the kind was ordered")
        return self.jobs[0].control

    def _make_way(self, job: Job, step: Step) -> None:
        """Retract or cancel the running requests if the job's mode requires it."""
        if isinstance(job.control, UpdateWeights) and job.control.mode == "retract":
            self._scheduler.retract_all("weights", step)
        elif isinstance(job.control, UpdateWeights) and job.control.mode == "cancel":
            self._scheduler.cancel_all(list(self._scheduler.requests.values()), step)
        elif isinstance(job.control, UpdateWeights) and job.control.mode == "in_place":
            self._scheduler.retract_all("weights", step, by_layers=True)  # all layers of a prompt have equal weights

    def _refusal(self, job: Job) -> str:
        if isinstance(job.control, UpdateWeights) and "weights" in self.released:
            return "the memory of the weights is released; resume it first"
        return ""

    def _is_done(self, job: Job) -> bool:
        """Return whether a job has no work left: all its tags are in the requested state."""
        return not isinstance(job.control, UpdateWeights) and not self._to_switch(job.control)

    def _order(self, job: Job, step: Step) -> None:
        """Issue the command of a job to the host."""
        generation = self._scheduler.generation
        match job.control:
            case UpdateWeights(version, source):
                step.commands.append(SwapWeights(version, source, generation))
            case ReleaseMemory():
                tags = self._to_switch(job.control)
                if "kv_cache" in tags:
                    self._scheduler.void_kv()
                    self._scheduler.memory.empty_cache("release", step)
                if "weights" in tags:
                    self._scheduler.memory.adapters.void()
                step.commands.append(ReleaseDeviceMemory(tags, generation))
            case ResumeMemory():
                step.commands.append(ResumeDeviceMemory(self._to_switch(job.control), generation))
        job.ordered = True

    def _to_switch(self, control: ReleaseMemory | ResumeMemory) -> tuple[str, ...]:
        """Return the requested tags that are not in the requested state already."""
        released = isinstance(control, ReleaseMemory)
        return tuple(tag for tag in dict.fromkeys(control.tags) if (tag in self.released) != released)

    def _answer(self, step: Step, refused: str) -> None:
        step.commands.append(ControlAnswered(self.jobs.pop(0).control_id, not refused, refused))

    def objection(self, control: UpdateWeights | ReleaseMemory | ResumeMemory) -> str:
        """Return the reason why a job can never be done as requested, or ""."""
        if isinstance(control, UpdateWeights):
            newest = self.newest_version()
            if control.version <= newest:
                expected = f"it must be above {newest}, the newest weights there are or to come"
                return f"`version` is {control.version}; {expected}"
            return "" if control.source else "`source` is empty; name what to load"
        if not control.tags:
            return f"`tags` is empty; name {' or '.join(MEMORY_TAGS)}"
        for tag in control.tags:
            if tag not in MEMORY_TAGS:
                return f"`tags` has {tag!r}; known are {', '.join(MEMORY_TAGS)}"
        return ""
