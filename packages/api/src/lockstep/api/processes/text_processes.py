"""A worker's text processes: work on large requests that would hold up the streams of the worker.

    body of more than PARSED_AT_ONCE_BYTES, long text, long conversation
        ──> the queue of its tenant ──> a free process ──> result

Python runs one thread at a time, so a body that takes a second to parse in any thread of the worker delays every token
of every stream by a second. Processes are started when they are needed, and serve the tenants in turn. A job that takes
more than JOB_S of processor time ends its process, which runs at a low priority: on a busy machine it may wait long.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import subprocess
import sys
from array import array
from collections import OrderedDict, deque
from collections.abc import Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import msgspec

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
    unpacked,
)
from lockstep.api.text.rendering import Conversation
from lockstep.host.media.content import MediaPrompt

log = logging.getLogger("lockstep.worker")

PARSED_AT_ONCE_BYTES = 64 * 2**10
"""Bodies up to this size are parsed in the event loop, in a few milliseconds at worst."""

TENANT: ContextVar[str] = ContextVar("tenant", default="")
"""The tenant of the request that this task serves: text processes serve tenants in turn."""

JOB_S = 60.0  # of processor time, without the import of libraries before the job
STALLED_S = 600.0  # of a job with its start of a process, whatever it waits for
WAITING_MAX = 1024  # jobs without a process
PIECE_BYTES = 2**18  # of a body, written at once


class TooManyJobs(Exception):
    """Raised when a job cannot even wait. The message is for the client."""


class _Process:
    """One text process."""

    def __init__(self, process: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.process, self.reader, self.writer = process, reader, writer

    async def run(self, job: Job, body: Sequence[bytes]) -> Done:
        """Send a job, and wait for its result. Raises OSError, EOFError if the process ends."""
        try:
            packed = msgspec.msgpack.encode(job)
        except OverflowError:
            return Done(error="a number is beyond 64 bits")
        self.writer.write(SIZE.pack(len(packed)))
        for part in (packed, *body):
            for at in range(0, len(part), PIECE_BYTES):
                self.writer.write(memoryview(part)[at : at + PIECE_BYTES])
                await self.writer.drain()
        (size,) = SIZE.unpack(await self.reader.readexactly(SIZE.size))
        return msgspec.msgpack.decode(await self.reader.readexactly(size), type=Done)

    def end(self) -> None:
        """End the process."""
        self.writer.close()
        self.process.kill()
        self.process.wait()


class TextProcesses:
    """The text processes of one worker.

    Args:
        folder: of the server's settings.
        most: number of processes at the same time.
        job_s: seconds of processor time that a job may take.
    Attributes:
        jobs: results so far.
    """

    def __init__(self, folder: Path, most: int, job_s: float = JOB_S) -> None:
        self._folder, self._most, self._job_s = folder, most, job_s
        self._free: list[_Process] = []
        self._running = 0  # processes that exist or are being started
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()  # by tenant
        self._count = 0  # of all that wait
        self._tasks: set[asyncio.Task[Done]] = set()
        self._started = 0
        self._closed = False
        self.jobs = 0

    async def parse(self, job: ParseBody, body: Sequence[bytes]) -> Any:
        """Return the value of a JSON body, with arrays for token ids. Raises JobError, TooManyJobs."""
        return unpacked(await self._result(job, body))

    async def encode(self, text: str, *, special: bool) -> array[int]:
        """Return the token ids of a text. Raises JobError, TooManyJobs."""
        ids: array[int] = unpacked(await self._result(EncodeText(text, special), ()))
        return ids

    async def encode_pair(self, first: str, second: str, most: int | None) -> tuple[array[int], bytes]:
        """Return the token ids of two texts in one prompt, and their types. Raises JobError, TooManyJobs."""
        ids, types = unpacked(await self._result(EncodePair(first, second, most), ()))
        return ids, types

    async def decode(self, ids: Sequence[int], *, verbatim: bool = False) -> str:
        """Return the text of token ids, with `verbatim` also of special tokens. Raises JobError, TooManyJobs."""
        text: str = unpacked(await self._result(DecodeTokens(array("i", ids).tobytes(), verbatim), ()))
        return text

    async def chat(self, chat: Conversation) -> tuple[str, array[int]]:
        """Return a conversation as text and as token ids. Raises JobError, TooManyJobs."""
        written, ids = unpacked(await self._result(RenderChat(chat), ()))
        return written, ids

    async def media(self, chat: Conversation) -> MediaPrompt:
        """Return a conversation with its media. Raises JobError, TooManyJobs."""
        return msgspec.msgpack.decode(await self._result(RenderMedia(chat), ()), type=MediaPrompt)

    async def prepare_media(self) -> None:
        """Start a process and import what media need, which takes seconds, before the first request with any."""
        with contextlib.suppress(JobError, TooManyJobs):
            await self._result(RenderMedia(None), ())

    async def close(self) -> None:
        """End the processes."""
        self._closed = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for one in self._free:
            one.end()

    async def _result(self, job: Job, body: Sequence[bytes]) -> bytes:
        if self._count >= WAITING_MAX:
            raise TooManyJobs("too many large requests wait to be read")
        task = asyncio.ensure_future(self._job(job, body))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        done = await asyncio.shield(task)  # a client that leaves does not cost the process
        self.jobs += 1
        if done.error:
            raise JobError(done.error, done.field)
        return done.value

    async def _job(self, job: Job, body: Sequence[bytes]) -> Done:
        await self._turn()
        process, kept = None, False
        try:
            process = self._free.pop() if self._free else await self._start()
            async with asyncio.timeout(STALLED_S):
                done = await process.run(job, body)
            kept = not (done.last or self._closed)
            return done
        except TimeoutError:
            log.error("a %s has no result after %g s, and its process is ended", type(job).__name__, STALLED_S)
            return Done(error=f"the request was not read within {STALLED_S:g} s")
        except (OSError, asyncio.IncompleteReadError, msgspec.DecodeError) as error:
            if process is not None:
                process.end()
            if process is not None and process.process.returncode == -signal.SIGPROF:
                log.warning("a %s took more than %g s of processor time", type(job).__name__, self._job_s)
                return Done(error=f"the request takes longer than {self._job_s:g} s of processor time to read")
            log.error("a text process ended during a %s: %s", type(job).__name__, error)
            return Done(error="the request takes too much memory or stack to read")
        finally:
            if process is not None and kept:
                self._free.append(process)
            elif process is not None:
                process.end()
            self._over()

    async def _turn(self) -> None:
        """Wait until a process is free, or may be started."""
        if self._running < self._most:
            self._running += 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(TENANT.get(), deque()).append(turn)
        self._count += 1
        await turn

    def _over(self) -> None:
        """Give the place of a job to the next one, of the next tenant in turn."""
        while self._waiting:
            tenant, queue = next(iter(self._waiting.items()))
            turn = queue.popleft()
            self._count -= 1
            self._waiting.move_to_end(tenant)
            if not queue:
                del self._waiting[tenant]
            if not turn.done():
                turn.set_result(None)
                return
        self._running -= 1

    async def _start(self) -> _Process:
        here, there = socket.socketpair()
        self._started += 1
        arguments = ["-m", "lockstep.api.processes.text_process", str(self._folder), str(self._started)]
        arguments.append(str(self._job_s))
        with there:
            process = subprocess.Popen([sys.executable, *arguments], stdin=there.fileno())
        with contextlib.suppress(OSError):
            here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, PIECE_BYTES)
        reader, writer = await asyncio.open_connection(sock=here, limit=PIECE_BYTES)
        return _Process(process, reader, writer)
