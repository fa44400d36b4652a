"""The journal of a vLLM engine, written by a thread beside the scheduling loop.

The scheduling thread only appends to a bounded queue. If the queue is full, or the disk fails, recording ends with one
message in vLLM's log; serving goes on. What the journal holds up to there stays readable.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.core.contract.commands import Command, Step
from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.events import BatchFinished, ObservedEvent, RequestArrived, RequestId
from lockstep.core.journal.records import JournalHeader
from lockstep.core.journal.writer import JournalWriter
from lockstep.host.host_header import VLLM, HostHeader
from lockstep.host.queued_writer import QueuedWriter
from lockstep.vllm.pseudonyms import Pseudonyms

if TYPE_CHECKING:
    from lockstep.vllm.settings import VllmSettings
    from vllm.config import VllmConfig

logger = logging.getLogger("vllm.lockstep")

Entry = tuple[ObservedEvent, bytes, tuple[Command, ...], tuple[RequestId, ...]]
"""An event, the digest of its Step (empty: its step raised), the commands of that Step, the sampling rows' requests."""

QUEUE_EVENTS_MAX = 65_536  # events that wait to be written; at some hundred steps a second, minutes of a stalled disk


class NoRecording:
    """Without a journal."""

    present = False
    failure = ""

    def append(self, event: ObservedEvent, step: Step, samplers: tuple[RequestId, ...] = ()) -> None:
        """Nothing is recorded."""

    def append_refused(self, event: ObservedEvent) -> None:
        """Nothing is recorded."""

    def close(self) -> None:
        """Nothing is open."""


class _JournalTarget:
    """The journal, as `QueuedWriter` writes it."""

    def __init__(self, writer: JournalWriter, pseudonyms: Pseudonyms | None) -> None:
        self._writer, self._pseudonyms = writer, pseudonyms

    def write(self, item: Entry) -> None:
        """Append an event, with pseudonyms for its token ids."""
        event, digest, commands, samplers = item
        if self._pseudonyms is not None:
            event = disguised(event, commands, samplers, self._pseudonyms)
        if digest:
            self._writer.append(event, digest)
        else:
            self._writer.append_unsealed(event)

    def flush(self) -> None:
        """Hand what is buffered to the operating system."""
        self._writer.flush()

    def close(self, failure: str) -> None:
        """Close the journal, with the reason if it ends early."""
        self._writer.close(failure or "closed")


class Recording:
    """Writes events and digests to a journal, in order, on a thread of its own."""

    present = True

    def __init__(self, folder: Path, header: JournalHeader, pseudonyms: Pseudonyms | None) -> None:
        """
        Args:
            pseudonyms: replaces token ids; None: the journal holds the token ids themselves.
        Raises: JournalError if the journal cannot be begun.
        """
        target = _JournalTarget(JournalWriter.create(folder, header, durability="interval"), pseudonyms)
        self._writer: QueuedWriter[Entry] = QueuedWriter(
            "lockstep-journal", target, QUEUE_EVENTS_MAX, _report, items="events"
        )

    @property
    def failure(self) -> str:
        """Why recording ended early; empty while it has not."""
        return self._writer.failure

    def append(self, event: ObservedEvent, step: Step, samplers: tuple[RequestId, ...] = ()) -> None:
        """Record an event with the digest of its Step. Never waits and never raises.

        Args:
            samplers: of a BatchFinished, the request of each sampling row.
        """
        self._writer.append((event, step.digest, tuple(step.commands), samplers))

    def append_refused(self, event: ObservedEvent) -> None:
        """Record an event that the core refused: the last one of the journal."""
        self._writer.append((event, b"", (), ()))

    def close(self) -> None:
        """Write what is queued, and close the journal."""
        self._writer.close()


def _report(why: str) -> None:
    logger.error("the journal ends here, serving goes on: %s", why)


def disguised(
    event: ObservedEvent, commands: tuple[Command, ...], samplers: tuple[RequestId, ...], pseudonyms: Pseudonyms
) -> ObservedEvent:
    """Return the event as the journal gets it: with pseudonyms instead of token ids."""
    if isinstance(event, RequestArrived):
        event = pseudonyms.arrived(event)
    elif isinstance(event, BatchFinished):
        event = pseudonyms.finished(event, samplers, commands)
    pseudonyms.forget(commands)
    return event


def begin_recording(
    settings: VllmSettings, config: SchedConfig, vllm_config: VllmConfig, version: str
) -> Recording | NoRecording:
    """Begin the journal that the settings name, if they name one.

    Engine i of a data-parallel front end writes to the folder of that name with -i behind it, engine 0 to the folder.
    """
    if not settings.journal:
        return NoRecording()
    host = HostHeader(
        kind=VLLM,
        vllm=version,
        model=vllm_config.model_config.model,
        gpu=device_name(),
        tp=vllm_config.parallel_config.tensor_parallel_size,
        profile=settings.profile,
        tokens="kept" if settings.journal_tokens else "pseudonyms",
    )
    header = JournalHeader(config=config, host=host.entries())
    pseudonyms = None if settings.journal_tokens else Pseudonyms()
    engine = vllm_config.parallel_config.data_parallel_index
    return Recording(Path(f"{settings.journal}-{engine}" if engine else settings.journal), header, pseudonyms)


def device_name() -> str:
    """Return the driver's name of the device that vLLM runs on; "cpu" on a processor."""
    from vllm.platforms import current_platform

    return "cpu" if current_platform.is_cpu() else str(current_platform.get_device_name())
