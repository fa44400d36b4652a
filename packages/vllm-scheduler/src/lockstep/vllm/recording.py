"""The journal of a vLLM engine, written by a thread beside the scheduling loop.

The scheduling thread only appends to a bounded queue. If the queue is full, or the disk fails, recording ends with one
message in vLLM's log; serving goes on. What the journal holds up to there stays readable.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from lockstep.core.contract.commands import Command, Step
from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.events import BatchFinished, ObservedEvent, RequestArrived, RequestId
from lockstep.core.journal.records import JournalError, JournalHeader
from lockstep.core.journal.writer import JournalWriter
from lockstep.host.host_header import VLLM, HostHeader
from lockstep.host.queued_writer import QueuedWriter
from lockstep.vllm.metrics import reported
from lockstep.vllm.pseudonyms import Pseudonyms
from lockstep.vllm.settings import not_begun, run_folder

if TYPE_CHECKING:
    from lockstep.vllm.settings import VllmSettings
    from vllm.config import VllmConfig

logger = logging.getLogger("vllm.lockstep")


class QueuedEvent(NamedTuple):
    """An event to be written."""

    event: ObservedEvent
    digest: bytes  # of its Step; empty if its step raised
    commands: tuple[Command, ...]  # of that Step
    samplers: tuple[RequestId, ...]  # of a BatchFinished, the request of each sampling row
    refusal: str = ""  # what its step raised


QUEUE_EVENTS_MAX = 65_536  # events that wait to be written; at some hundred steps a second, minutes of a stalled disk
REFUSED_CLOSE_S = 5.0  # how long an engine that stops waits for the disk


class NoRecording:
    """Without a journal."""

    present = False
    failure = ""

    def append(self, event: ObservedEvent, step: Step, samplers: tuple[RequestId, ...] = ()) -> None:
        """Nothing is recorded."""

    def append_refused(self, event: ObservedEvent, samplers: tuple[RequestId, ...], error: Exception) -> None:
        """Nothing is recorded."""

    def close(self) -> None:
        """Nothing is open."""


class _JournalTarget:
    """The journal, as `QueuedWriter` writes it."""

    def __init__(self, writer: JournalWriter, pseudonyms: Pseudonyms | None) -> None:
        self._writer, self._pseudonyms = writer, pseudonyms
        self._refusal = ""

    def write(self, item: QueuedEvent) -> None:
        """Append an event, with pseudonyms for its token ids."""
        event = item.event
        if self._pseudonyms is not None:
            event = disguised(event, item.commands, item.samplers, self._pseudonyms)
        if item.digest:
            self._writer.append(event, item.digest)
        else:
            self._writer.append_unsealed(event)
            self._refusal = item.refusal

    def flush(self) -> None:
        """Hand what is buffered to the operating system."""
        self._writer.flush()

    def close(self, failure: str) -> None:
        """Close the journal, with the reason if it ends early."""
        self._writer.close(failure or self._refusal or "closed")


class Recording:
    """Writes events and digests to a journal, in order, on a thread of its own."""

    present = True

    def __init__(
        self,
        folder: Path,
        header: JournalHeader,
        pseudonyms: Pseudonyms | None,
        failed: Callable[[str], None] | None = None,
    ) -> None:
        """
        Args:
            pseudonyms: replaces token ids; None: the journal holds the token ids themselves.
            failed: called once with the reason if recording ends early; default: an error in vLLM's log.
        Raises: JournalError if the journal cannot be begun.
        """
        target = _JournalTarget(JournalWriter.create(folder, header, durability="interval"), pseudonyms)
        self._writer: QueuedWriter[QueuedEvent] = QueuedWriter(
            "lockstep-journal", target, QUEUE_EVENTS_MAX, failed or _report, items="events"
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
        self._writer.append(QueuedEvent(event, step.digest, tuple(step.commands), samplers))

    def append_refused(self, event: ObservedEvent, samplers: tuple[RequestId, ...], error: Exception) -> None:
        """Record an event whose step raised, and close the journal: its end record has the error.

        It is closed here because vLLM may kill an engine that failed before it shuts down.
        """
        self._writer.append(QueuedEvent(event, b"", (), samplers, f"{type(error).__name__}: {error}"))
        self._writer.close(REFUSED_CLOSE_S)

    def close(self) -> None:
        """Write what is queued, and close the journal."""
        self._writer.close()


def _give_way() -> None:
    """Let the scheduling thread have Python's lock, for which it would otherwise wait for up to 5 ms."""
    time.sleep(1e-6)  # with the resolution of timers 60 us


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
    """Begin the journal that the settings name, if they name one. Raises JournalError if it cannot be begun."""
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
    pseudonyms = None if settings.journal_tokens else Pseudonyms(pause=_give_way)
    try:
        failed = reported(vllm_config.parallel_config.data_parallel_index, _report)
        return Recording(run_folder(settings, vllm_config), header, pseudonyms, failed)
    except JournalError as error:
        raise not_begun(error, settings) from None


def device_name() -> str:
    """Return the driver's name of the device that vLLM runs on; "cpu" on a processor."""
    from vllm.platforms import current_platform

    return "cpu" if current_platform.is_cpu() else str(current_platform.get_device_name())
