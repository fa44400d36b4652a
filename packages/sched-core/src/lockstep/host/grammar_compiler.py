"""Compiles grammars off the engine's loop: first in a trial process that may be killed, then in the engine's process.

    CompileGrammar ──> queue ──> a thread ──source──> trial process                   the kernel limits its memory, CPU
                                    |    <──error, ""──                               time and stack
                                    └── compile and keep in the engine's process ──> GrammarReady

A grammar is untrusted input: it may need exponential memory, recurse without end or crash the library. All of this
happens in the trial process. If that process ends, the grammar gets an error, and the next grammar a new process. A
grammar that passed the trial is compiled in a thread of the engine's process, within the same limits. llguidance
releases the interpreter lock meanwhile, so the loop continues.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

import msgspec
import numpy as np

from lockstep.core.contract.commands import CompileGrammar
from lockstep.core.contract.events import Grammar
from lockstep.host.grammar_backends import make_backend
from lockstep.host.grammars import ENDLESS, CompiledGrammars, GrammarError, GrammarMatchers

log = logging.getLogger("lockstep.host")

START_S = 120.0  # until a trial process has started and imported the library; the machine may be busy
WALL_PER_CPU = 60.0  # wall-clock limit over CPU limit; a trial that computes reaches its CPU limit long before
STACK_BYTES = 8 * 2**20  # of the compiling threads; the thread of a trial process has half of it
FIRST_TOKENS = 4  # of a grammar that are read where it is compiled
ENDED_S = 5.0  # wait for each thread in `close`


class TrialSettings(msgspec.Struct, frozen=True, array_like=True):
    """The first message to a trial process."""

    backend: str
    tokenizer: str
    vocabulary: int
    end_tokens: tuple[int, ...]
    cpu_s: float
    memory_bytes: int
    stack_bytes: int


@dataclass(frozen=True, kw_only=True)
class CompileLimits:
    """Limits of the compilation of one grammar, and of compilations at the same time.

    Args:
        cpu_s: seconds of CPU time. The limit of wall-clock time is WALL_PER_CPU times as much.
        memory_bytes: memory beyond what the library uses without a grammar.
        source_bytes: size of the grammar's source. The server checks the same limit before.
        workers: grammars that are compiled at the same time.
    """

    cpu_s: float = 2.0
    memory_bytes: int = 512 * 2**20
    source_bytes: int = 2**20
    workers: int = 2


# mechanism: grammar-compilation (executed)
class GrammarCompiler:
    """A `lockstep.host.loop.GrammarCompiler` with limits. The first grammar starts its processes and threads."""

    def __init__(
        self,
        compiled: CompiledGrammars,
        backend: str,
        tokenizer: Path,
        vocabulary: int,
        end_tokens: Sequence[int],
        limits: CompileLimits | None = None,
    ) -> None:
        self.compiled, self.limits = compiled, limits or CompileLimits()
        self._settings = TrialSettings(
            backend,
            str(tokenizer.resolve()),
            vocabulary,
            tuple(end_tokens),
            self.limits.cpu_s,
            self.limits.memory_bytes,
            STACK_BYTES // 2,
        )
        self._queue: queue.SimpleQueue[tuple[Grammar, Callable[[str], None]] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._trials: set[_Trial] = set()
        self._lock = threading.Lock()
        self._closed = False

    def __call__(self, command: CompileGrammar, answer: Callable[[str], None]) -> None:
        """Queue a grammar. Another thread compiles it and calls `answer` with the error or "".

        One without a library, which takes no time to speak of, is compiled here.
        """
        if command.grammar.kind == ENDLESS:
            try:
                self.compiled.get(command.grammar)
            except GrammarError as error:
                answer(str(error))
            else:
                answer("")
            return
        with self._lock:
            if self._closed:
                return
            if not self._threads:
                before = threading.stack_size(STACK_BYTES)
                self._threads = [
                    threading.Thread(target=self._work, name=f"lockstep-grammar-{number}", daemon=True)
                    for number in range(self.limits.workers)
                ]
                for thread in self._threads:
                    thread.start()
                threading.stack_size(before)
        self._queue.put((command.grammar, answer))

    def close(self) -> None:
        """End the processes. Grammars that are not compiled yet get no answer."""
        with self._lock:
            self._closed = True
            trials, threads = list(self._trials), self._threads
        for _ in threads:
            self._queue.put(None)
        for trial in trials:
            trial.kill()
        for thread in threads:
            thread.join(ENDED_S)

    def _work(self) -> None:
        """Compile queued grammars, in one trial process after the other."""
        trial: _Trial | None = None
        while (item := self._queue.get()) is not None and not self._over():
            grammar, answer = item
            try:
                size = len(grammar.source.encode("utf-8", "surrogatepass"))
                if size > self.limits.source_bytes:
                    error = f"it has {size} bytes, at most {self.limits.source_bytes} are compiled"
                else:
                    if trial is None or trial.over:
                        trial = self._begin()
                    error = trial.compile(grammar)
                    if not error:
                        self._make_first(grammar)
            except GrammarError as failed:
                error = str(failed)
            except Exception as failed:  # every request that waits for it must get an answer
                log.exception("a grammar could not be compiled")
                error = f"{type(failed).__name__}: {failed}"
            if self._over():
                break
            answer(error)
        if trial is not None:
            trial.kill()

    def _make_first(self, grammar: Grammar) -> None:
        """Make the first mask, and read first tokens: both take longest, and all matchers share what is made for them.

        Under a schema of 119 kB a first token takes 70 ms, later ones less than 1 ms.
        """
        mask = np.zeros(-(-self._settings.vocabulary // 32), np.int32)
        matcher = self.compiled.get(grammar).matcher()
        matcher.fill(mask)
        for token in np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))[:FIRST_TOKENS].tolist():
            if matcher.accept(token):
                matcher.is_done()
                matcher.rollback(1)

    def _over(self) -> bool:
        return self._closed

    def _begin(self) -> _Trial:
        trial = _Trial(self._settings, self.limits)
        with self._lock:
            self._trials = {one for one in self._trials if not one.over} | {trial}
            if self._closed:
                trial.kill()
        return trial


@dataclass(frozen=True, slots=True)
class GrammarCompilers:
    """The parts of an engine that serve grammars: matchers and a compiler."""

    backend: str
    matchers: GrammarMatchers
    compiler: GrammarCompiler


def make_compilers(
    backend: str,
    tokenizer: Path,
    vocabulary: int,
    end_tokens: Sequence[int],
    limits: CompileLimits | None = None,
) -> GrammarCompilers:
    """Return matchers and compiler of one engine. The arguments are those of `grammar_backends.make_backend`."""
    compiled = CompiledGrammars(partial(make_backend, backend, tokenizer, vocabulary, end_tokens))
    compiled.prepare()
    compiler = GrammarCompiler(compiled, backend, tokenizer, vocabulary, end_tokens, limits)
    return GrammarCompilers(backend, GrammarMatchers(compiled, vocabulary, end_tokens), compiler)


class _Trial:
    """A process that compiles grammars on trial, until a grammar ends it."""

    def __init__(self, settings: TrialSettings, limits: CompileLimits) -> None:
        self._limits = limits
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "lockstep.host.grammar_trial"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C must reach only the engine
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        self.over = self._late = False
        self._send(msgspec.msgpack.encode(settings))
        if (reply := self._receive(START_S)) != "":
            self.kill()
            raise GrammarError(f"the process that compiles grammars does not start: {reply or 'it ended'}")

    def compile(self, grammar: Grammar) -> str:
        """Compile a grammar on trial. Returns: its error, or an empty string."""
        self._send(msgspec.msgpack.encode(grammar))
        reply = self._receive(self._limits.cpu_s * WALL_PER_CPU)
        if reply is not None:
            return reply
        status = self.kill()
        if self._late or status == -signal.SIGPROF or status is None:
            return f"it takes more than {self._limits.cpu_s:g} s of CPU time to compile"
        return (
            f"it takes more than {self._limits.memory_bytes // 2**20} MiB of memory to compile, or is nested too "
            f"deeply (its process ended with status {status})"
        )

    def kill(self) -> int | None:
        """End the process. Returns its exit status, or None if it was still running and had to be killed."""
        self.over = True
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._ended(self._process.wait(0.2))
        self._process.kill()
        self._ended(self._process.wait())
        return None

    def _end_late(self) -> None:
        self._late = True
        self._process.kill()

    def _ended(self, status: int) -> int:
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        return status

    def _send(self, message: bytes) -> None:
        stream = self._process.stdin
        assert stream is not None
        with contextlib.suppress(OSError, ValueError):  # the process has ended, which `_receive` reports
            write_message(stream, message)

    def _receive(self, seconds: float) -> str | None:
        """Return the next message of the process; None if it sends none in time or has ended."""
        stream = self._process.stdout
        assert stream is not None
        timer = threading.Timer(seconds, self._end_late)
        timer.daemon = True
        timer.start()
        try:
            message = read_message(stream)
        except (OSError, ValueError):
            message = None
        finally:
            timer.cancel()
        return None if message is None else msgspec.msgpack.decode(message, type=str)


def write_message(stream: IO[bytes], message: bytes) -> None:
    """Write a message after its length, 4 bytes little-endian."""
    stream.write(struct.pack("<I", len(message)) + message)
    stream.flush()


def read_message(stream: IO[bytes]) -> bytes | None:
    """Read the next message; None at the end of the stream."""
    head = stream.read(4)
    if len(head) < 4:
        return None
    (size,) = struct.unpack("<I", head)
    message = stream.read(size)
    return message if len(message) == size else None
