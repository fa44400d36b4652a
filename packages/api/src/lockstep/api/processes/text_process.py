"""A text process of an API worker: `python -m lockstep.api.processes.text_process FOLDER NUMBER JOB_S`.

It parses large bodies, renders long conversations, decodes media and tokenises long texts, one job after the other. Its
standard input is a socket to its worker. It ends when the worker closes the socket, by SIGPROF in a job that takes more
than JOB_S seconds of processor time, and after a job that made it grow by more than GROWTH_BYTES: memory that Python
has taken for millions of small objects is not given back otherwise.
"""

from __future__ import annotations

import gc
import logging
import os
import resource
import signal
import socket
import sys
from array import array
from pathlib import Path
from typing import Any

import msgspec

from lockstep.api.engines import media_limits, model_folder, text_of
from lockstep.api.observability.logs import start_log
from lockstep.api.processes.children import read_settings
from lockstep.api.processes.text_jobs import (
    SIZE,
    DecodeTokens,
    Done,
    EncodePair,
    EncodeText,
    Job,
    JobError,
    ParseBody,
    RenderChat,
    RenderMedia,
    packed,
    parse_body,
    token_ids,
)
from lockstep.api.settings import ServeSettings
from lockstep.api.text.plain_text import Texts
from lockstep.api.text.rendering import RenderingError
from lockstep.core.contract.errors import ConfigError
from lockstep.host.media.processor import MediaProcessor

log = logging.getLogger("lockstep.worker")

GROWTH_BYTES = 256 * 2**20  # beyond the memory before the first job
MEMORY_BYTES = 4 * 2**30  # beyond it, for one job; the kernel refuses more
NICE = 15  # streams come first
COLLECT_JOBS = 64  # jobs between two garbage collections, which are off meanwhile: JSON has no cycles


def main(arguments: list[str]) -> int:
    """Do jobs until the worker closes the socket. Returns the exit status."""
    settings = read_settings(Path(arguments[0]))
    start_log(settings.log_level, f"text process {arguments[1]}", settings.log_format)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(NICE)
    worker = socket.socket(fileno=0)
    text = text_of(settings)
    reader = ProcessorOfModel(settings, text)
    gc.collect()
    gc.freeze()
    gc.disable()
    job_s = float(arguments[2])
    before = _size_bytes()
    if before:
        resource.setrlimit(resource.RLIMIT_AS, (_size_bytes(0) + MEMORY_BYTES,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    jobs = 0
    while (head := _received(worker, SIZE.size)) is not None:
        raw = _received(worker, *SIZE.unpack(head))
        if raw is None:
            break
        job = msgspec.msgpack.decode(raw, type=Job)
        body = _received(worker, job.size) if isinstance(job, ParseBody) else b""
        if body is None:
            break
        if isinstance(job, RenderMedia) and reader.load():  # libraries that stay
            before = _size_bytes()
        signal.setitimer(signal.ITIMER_PROF, job_s)  # SIGPROF ends this process, whatever it runs
        done = _done(text, job, body, reader)
        signal.setitimer(signal.ITIMER_PROF, 0)
        del raw, job, body
        jobs += 1
        if jobs % COLLECT_JOBS == 0:
            gc.collect()
        last = _size_bytes() - before > GROWTH_BYTES
        answer = msgspec.msgpack.encode(msgspec.structs.replace(done, last=last))
        worker.sendall(SIZE.pack(len(answer)) + answer)
        if last:
            break
    return 0


class ProcessorOfModel:
    """The processor of media, made for the first job that needs it: the import of its libraries takes seconds."""

    def __init__(self, settings: ServeSettings, text: Texts | None) -> None:
        self._settings, self._text = settings, text
        self.limits = media_limits(settings)
        self._made: MediaProcessor | str | None = None  # or why it cannot be made

    def load(self) -> bool:
        """Make the processor. Returns whether this was the first call."""
        if self._made is not None:
            return False
        try:
            text = self._text
            assert text is not None, "a worker without a tokenizer sends no texts"
            self._made = MediaProcessor(model_folder(self._settings), lambda one: text.encode(one, special=False))
        except ConfigError as error:
            log.error("%s", error)
            self._made = str(error)
        return True

    def processor(self) -> MediaProcessor:
        """Return the processor. Raises RenderingError if it cannot be made."""
        self.load()
        if isinstance(self._made, MediaProcessor):
            return self._made
        raise RenderingError(f"this server cannot read media: {self._made}", "messages")


def _done(text: Texts | None, job: Job, body: bytes | bytearray, reader: ProcessorOfModel) -> Done:
    try:
        if isinstance(job, RenderMedia):
            if job.chat is None:
                return Done()
            assert text is not None, "a worker without a tokenizer sends no texts"
            return Done(value=msgspec.msgpack.encode(job.chat.with_media(text, reader)))
        return Done(value=packed(_result(text, job, body)))
    except (JobError, RenderingError) as error:
        return Done(error=error.message, field=error.field)
    except OverflowError:
        return Done(error="a number is beyond 64 bits")
    except MemoryError:
        return Done(error="the request takes too much memory")
    except Exception as error:  # any other error of one request fails this request only
        log.exception("a %s failed", type(job).__name__)
        return Done(error=f"the request could not be read: {type(error).__name__}")


def _result(text: Texts | None, job: Job, body: bytes | bytearray) -> Any:
    if isinstance(job, ParseBody):
        return parse_body(job, body)
    assert text is not None, "a worker without a tokenizer sends no texts"
    match job:
        case EncodeText():
            return array("i", text.encode(job.text, special=job.special))
        case EncodePair():
            ids, types = text.encode_pair(job.first, job.second, job.most)
            return array("i", ids), bytes(types)
        case DecodeTokens():
            return (text.verbatim() if job.verbatim else text).decode(token_ids(job.ids))
        case RenderChat():
            written, ids = job.chat.rendered(text)
            return written, array("i", ids)


def _received(worker: socket.socket, size: int) -> bytearray | None:
    """Return so many bytes from the worker; None if it closed the socket."""
    found = bytearray(size)
    view, at = memoryview(found), 0
    while at < size:
        count = worker.recv_into(view[at:])
        if not count:
            return None
        at += count
    return found


def _size_bytes(column: int = 1) -> int:
    """Return the memory of this process, resident (column 1) or in all (column 0); 0 where it is unknown."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[column]) * resource.getpagesize()
    except OSError:
        return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
