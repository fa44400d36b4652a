"""Compilation of grammars on trial: the process that is begun, what it does, and the threads that use it."""

from __future__ import annotations

import io
import logging
import os
import queue
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from lockstep.core.contract.commands import CompileGrammar
from lockstep.core.contract.errors import ConfigError
from lockstep.core.contract.events import Grammar
from lockstep.host import grammar_compiler, grammar_trial
from lockstep.host.grammar_compiler import (
    STACK_BYTES,
    WALL_PER_CPU,
    CompileLimits,
    GrammarCompiler,
    TrialSettings,
    read_message,
    write_message,
)
from lockstep.host.grammars import GrammarError, make_grammar

LIMITS = CompileLimits(cpu_s=2.5, memory_bytes=64 * 2**20, source_bytes=4, workers=1)
SETTINGS = TrialSettings("slow", "/models/tokenizer", 70, (2, 3), 2.5, 64 * 2**20, STACK_BYTES // 2)
ANSWER_S = 20.0  # longest wait for a thread of the same process


@pytest.fixture(autouse=True)
def stack() -> Iterator[None]:
    """Leave the stack size of later threads as it was."""
    before = threading.stack_size()
    yield
    threading.stack_size(before)


def messages(*texts: str) -> io.BytesIO:
    """Return a stream of these texts as messages."""
    stream = io.BytesIO()
    for text in texts:
        write_message(stream, msgspec.msgpack.encode(text))
    stream.seek(0)
    return stream


# ------------------------------------------------------------------------------------------------- the trial's process


class Kept(io.BytesIO):
    """A stream whose content can be read behind its end."""

    content = b""
    flushes = 0

    def flush(self) -> None:
        self.flushes += 1
        super().flush()

    def close(self) -> None:
        if not self.closed:
            self.content = self.getvalue()
        super().close()


class Process:
    """A trial process that has written `output`. It has ended with `status`, or runs (None) until it is killed."""

    def __init__(self, output: io.BytesIO, status: int | None) -> None:
        self.stdin, self.stdout, self.status = Kept(), output, status
        self.killed = False
        self.waited = 0

    def wait(self, timeout: float | None = None) -> int:
        if self.status is None:
            assert timeout is not None
            assert 0 < timeout < 1
            raise subprocess.TimeoutExpired("trial", timeout)
        self.waited += 1
        return self.status

    def kill(self) -> None:
        self.killed = True
        self.status = -signal.SIGKILL


def trial_of(
    monkeypatch: pytest.MonkeyPatch, process: Process, limits: CompileLimits = LIMITS
) -> grammar_compiler._Trial:
    monkeypatch.setattr(subprocess, "Popen", lambda *given, **more: process)
    return grammar_compiler._Trial(SETTINGS, limits)


@pytest.mark.parametrize(
    ("output", "status", "why"),
    [
        (messages("no such tokenizer"), 0, "no such tokenizer"),
        (messages("no such tokenizer"), None, "no such tokenizer"),
        (messages(), 1, "it ended"),
        (io.BytesIO(b"\x09\x00\x00\x00short"), 1, "it ended"),
        (io.BytesIO(b"\x09\x00\x00"), 1, "it ended"),
    ],
)
def test_a_trial_that_does_not_start_is_ended(
    output: io.BytesIO, status: int | None, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that goes on after its error is killed. It is waited for, and its pipes are closed."""
    output.seek(0)
    process = Process(io.BytesIO(output.read()), status)
    with pytest.raises(GrammarError, match=f"the process that compiles grammars does not start: {why}"):
        trial_of(monkeypatch, process)
    assert process.waited == 1
    assert process.killed == (status is None)
    assert process.stdin.closed
    assert process.stdout.closed


def test_a_trial_gets_its_settings_and_grammars_and_answers_each(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process(messages("", "it is not a grammar", ""), 0)
    trial: Any = trial_of(monkeypatch, process)
    assert not trial.over
    grammars = [make_grammar("regex", "("), make_grammar("regex", "a")]
    assert [trial.compile(one) for one in grammars] == ["it is not a grammar", ""]
    assert not trial.over
    assert process.waited == 0
    assert trial.kill() == 0
    assert trial.over
    assert process.stdin.flushes == 3
    sent = io.BytesIO(process.stdin.content)
    assert msgspec.msgpack.decode(read_message(sent) or b"", type=TrialSettings) == SETTINGS
    assert [msgspec.msgpack.decode(read_message(sent) or b"", type=Grammar) for _ in grammars] == grammars
    assert read_message(sent) is None
    assert "its process ended with status 0" in trial.compile(grammars[0])  # its pipes are closed


def test_a_trial_is_a_process_of_its_own_session_with_the_paths_of_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[dict[str, Any]] = []

    def popen(command: list[str], **options: Any) -> Process:
        begun.append({"command": command, **options})
        return Process(messages(""), 0)

    monkeypatch.setattr(subprocess, "Popen", popen)
    monkeypatch.setattr(sys, "path", ["", "/a", "/b"])
    grammar_compiler._Trial(SETTINGS, LIMITS)
    [given] = begun
    assert given["command"][1:] == ["-P", "-m", "lockstep.host.grammar_trial"]
    assert given["start_new_session"]
    assert given["env"]["PYTHONPATH"] == f"/a{os.pathsep}/b"


def test_a_trial_that_answered_in_time_is_not_killed_later(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process(messages(""), None)
    trial_of(monkeypatch, process)
    for timer in [one for one in threading.enumerate() if isinstance(one, threading.Timer)]:
        timer.join(ANSWER_S)
        assert not timer.is_alive()
    assert not process.killed


class Blocked(io.BytesIO):
    """Output that ends when its process is killed."""

    process: Process

    def read(self, size: int | None = -1, /) -> bytes:
        if data := super().read(size):
            return data
        timers = [one for one in threading.enumerate() if isinstance(one, threading.Timer)]
        assert all(one.daemon for one in timers), "the interpreter would wait for them"
        for _ in range(1000):
            if self.process.killed:
                return b""
            threading.Event().wait(0.01)
        raise AssertionError("the process was not killed")


def test_a_trial_that_does_not_answer_in_time_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    output = Blocked(messages("").getvalue())
    process = output.process = Process(output, None)
    trial = trial_of(monkeypatch, process, CompileLimits(cpu_s=0.05 / WALL_PER_CPU))
    kills = [process.killed]
    assert "s of CPU time to compile" in trial.compile(make_grammar("regex", "a"))
    kills.append(process.killed)
    assert kills == [False, True]
    assert trial.over


# ------------------------------------------------------------------------------------------------ the engine's threads


class GivenTrial:
    """A trial without a process. It refuses `bad`, is over behind `end`, and cannot compile `break`."""

    def __init__(self) -> None:
        self.over, self.killed = False, False
        self.compiled: list[str] = []

    def compile(self, grammar: Grammar) -> str:
        self.compiled.append(grammar.source)
        self.over = grammar.source == "end"
        if grammar.source == "brk":
            raise ValueError("broken")
        return "refused" if grammar.source in ("bad", "end") else ""

    def kill(self) -> None:
        self.over = self.killed = True


class Compiling:
    """A compiler whose trials have no processes; the first masks are not made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, limits: CompileLimits = LIMITS) -> None:
        self.trials: list[GivenTrial] = []
        self.made: list[str] = []
        self.refuse = ""
        self.settings: list[TrialSettings] = []
        monkeypatch.setattr(grammar_compiler, "_Trial", self._begin)
        monkeypatch.setattr(GrammarCompiler, "_make_first", lambda _, grammar: self.made.append(grammar.source))
        self.compiler = GrammarCompiler(cast(Any, None), "slow", Path("/models/tokenizer"), 70, [2, 3], limits)
        self.answers: queue.SimpleQueue[str] = queue.SimpleQueue()

    def _begin(self, settings: TrialSettings, limits: CompileLimits) -> GivenTrial:
        assert limits == self.compiler.limits
        self.settings.append(settings)
        if self.refuse:
            raise GrammarError(self.refuse)
        self.trials.append(GivenTrial())
        return self.trials[-1]

    def put(self, source: str) -> None:
        self.compiler(CompileGrammar(make_grammar("regex", source)), self.answers.put)

    def answer(self, source: str) -> str:
        self.put(source)
        return self.answers.get(timeout=ANSWER_S)


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiling]:
    compiling = Compiling(monkeypatch)
    yield compiling
    compiling.compiler.close()


@pytest.mark.parametrize(
    ("source", "size"), [("aaaa", 4), ("aaaaa", 5), ("éé", 4), ("éé.", 5), ("a\ud800", 4), ("aa\ud800", 5)]
)
def test_a_source_may_have_as_many_bytes_as_the_limit(source: str, size: int, given: Compiling) -> None:
    assert given.answer(source) == ("" if size == 4 else "it has 5 bytes, at most 4 are compiled")
    assert given.made == ([source] if size == 4 else [])
    assert len(given.trials) == (size == 4)


def test_one_trial_compiles_grammars_until_it_is_over(given: Compiling) -> None:
    """The first masks are made of grammars that passed. The stack of other threads stays as it was."""
    before = threading.stack_size()
    assert [given.answer(source) for source in ("a", "bad", "b", "end", "c")] == ["", "refused", "", "refused", ""]
    assert [one.compiled for one in given.trials] == [["a", "bad", "b", "end"], ["c"]]
    assert given.made == ["a", "b", "c"]
    assert given.settings == [SETTINGS, SETTINGS]
    assert cast(Any, given.compiler)._trials == set(given.trials[1:])
    assert threading.stack_size() == before
    assert not given.trials[0].killed
    assert [one.name for one in given.compiler._threads] == ["lockstep-grammar-0"]
    assert given.compiler._threads[0].daemon


def test_any_error_of_a_compilation_becomes_its_answer(given: Compiling, caplog: pytest.LogCaptureFixture) -> None:
    given.refuse = "it does not start"
    assert given.answer("a") == "it does not start"
    assert not caplog.records
    given.refuse = ""
    with caplog.at_level(logging.ERROR):
        assert given.answer("brk") == "ValueError: broken"
    assert "a grammar could not be compiled" in caplog.text
    assert given.answer("a") == ""


def test_a_closed_compiler_ends_its_trials_and_answers_nothing_more(given: Compiling) -> None:
    assert given.answer("a") == ""
    given.compiler.close()
    assert given.trials[0].killed
    assert not any(one.is_alive() for one in given.compiler._threads)
    given.put("b")
    with pytest.raises(queue.Empty):
        given.answers.get(timeout=0.05)
    late = cast(GivenTrial, given.compiler._begin())
    assert late.killed, "a trial that was begun meanwhile"


def test_a_grammar_that_is_compiled_at_the_end_has_no_answer(given: Compiling, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, closed = threading.Event(), threading.Event()

    def compiled(trial: GivenTrial, grammar: Grammar) -> str:
        begun.set()
        assert closed.wait(ANSWER_S)
        return ""

    monkeypatch.setattr(GivenTrial, "compile", compiled)
    monkeypatch.setattr(GivenTrial, "kill", lambda trial: closed.set())
    given.put("a")
    given.put("b")
    assert begun.wait(ANSWER_S)
    given.compiler.close()
    with pytest.raises(queue.Empty):
        given.answers.get(timeout=0.05)
    assert len(given.trials) == 1


def test_a_grammar_that_is_taken_behind_the_end_is_not_compiled(given: Compiling) -> None:
    given.compiler._closed = True
    for source in ("a", "b"):
        given.compiler._queue.put((make_grammar("regex", source), given.answers.put))
    given.compiler._work()
    assert not given.trials
    assert given.answers.empty()


def test_as_many_threads_as_workers_are_started_once(monkeypatch: pytest.MonkeyPatch) -> None:
    given = Compiling(monkeypatch, CompileLimits(workers=3))
    assert not given.compiler._threads
    given.answer("a")
    threads = given.compiler._threads
    given.answer("b")
    assert given.compiler._threads is threads
    assert len(threads) == 3
    given.compiler.close()
    assert not any(one.is_alive() for one in threads)


class FirstTokens:
    """A matcher that admits the last two tokens of a vocabulary of 66, and the end behind each of them."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def fill(self, mask: Any) -> None:
        assert mask.tolist() == [0, 0, 0]
        mask[2] = 0b11

    def accept(self, token: int) -> bool:
        self.calls.append(("accept", token))
        return token == 65

    def is_done(self) -> bool:
        self.calls.append(("is_done",))
        return True

    def rollback(self, tokens: int) -> None:
        self.calls.append(("rollback", tokens))


def test_first_masks_and_ends_are_made_where_a_grammar_is_compiled() -> None:
    matcher = FirstTokens()
    found: Any = SimpleNamespace(get=lambda _: SimpleNamespace(matcher=lambda: matcher))
    compiler = GrammarCompiler(found, "slow", Path("/models/tokenizer"), 66, [2, 3], LIMITS)
    compiler._make_first(make_grammar("regex", "a"))
    assert matcher.calls == [("accept", 64), ("accept", 65), ("is_done",), ("rollback", 1)]


def test_the_library_is_made_before_the_first_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    made: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()

    def make_backend(*given: Any) -> Backend:
        made.put(given)
        return Backend()

    monkeypatch.setattr(grammar_compiler, "make_backend", make_backend)
    grammar_compiler.make_compilers("slow", Path("/models/tokenizer"), 70, [2, 3], LIMITS)
    assert made.get(timeout=ANSWER_S) == ("slow", Path("/models/tokenizer"), 70, [2, 3])


# ------------------------------------------------------------------------------------------------ within the process


class Backend:
    """A library whose grammars are errors with the names of their sources, or whole ones."""

    name = "slow"

    def compile(self, grammar: Grammar) -> Any:
        errors: dict[str, BaseException] = {
            "refused": GrammarError("no rule"),
            "silent": GrammarError(""),
            "large": MemoryError(),
            "other": KeyError("x" * 600),
            "exit": SystemExit(),
        }
        if grammar.source == "late":
            threading.Event().wait(0.05)
        if grammar.source in errors:
            raise errors[grammar.source]
        return SimpleNamespace(matcher=lambda: AnyToken(words=3))


class AnyToken:
    """A matcher that admits every token of masks of so many words."""

    def __init__(self, words: int) -> None:
        self.words = words

    def fill(self, mask: Any) -> None:
        assert mask.shape == (self.words,)
        mask[:] = np.int32(-1)

    def accept(self, token: int) -> bool:
        assert token not in SETTINGS.end_tokens
        return True

    def is_done(self) -> bool:
        return False


class Calls:
    """What the trial process orders of its kernel, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, given: io.BytesIO) -> None:
        self.made: list[tuple[Any, ...]] = []
        self.outputs = io.BytesIO()

        def note(name: str) -> Any:
            return lambda *what: self.made.append((name, *what))

        system = SimpleNamespace(stdin=SimpleNamespace(buffer=given), stdout=SimpleNamespace(buffer=self.outputs))
        monkeypatch.setattr(grammar_trial, "sys", system)
        monkeypatch.setattr(grammar_trial, "os", SimpleNamespace(nice=note("nice")))
        monkeypatch.setattr(signal, "signal", note("signal"))
        monkeypatch.setattr(signal, "setitimer", note("timer"))
        monkeypatch.setattr(resource, "setrlimit", note("limit"))

    @property
    def answers(self) -> list[str]:
        self.outputs.seek(0)
        found = []
        while (message := read_message(self.outputs)) is not None:
            found.append(msgspec.msgpack.decode(message, type=str))
        return found


def orders(*sources: str) -> io.BytesIO:
    stream = io.BytesIO()
    write_message(stream, msgspec.msgpack.encode(SETTINGS))
    for source in sources:
        write_message(stream, msgspec.msgpack.encode(make_grammar("regex", source)))
    stream.seek(0)
    return stream


def test_a_process_compiles_each_grammar_within_its_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory is limited once the library is there, and the time of each grammar begins anew."""
    calls = Calls(monkeypatch, orders("a", "refused"))
    made: list[tuple[Any, ...]] = []

    def make_backend(*given: Any) -> Backend:
        made.append(given)
        calls.made.append(("library",))
        return Backend()

    monkeypatch.setattr(grammar_trial, "make_backend", make_backend)
    monkeypatch.setattr(grammar_trial, "_limit_memory", lambda most: calls.made.append(("memory", most)))
    grammar_trial.main()
    timed = [("timer", signal.ITIMER_PROF, 2.5), ("timer", signal.ITIMER_PROF, 0.0)]
    assert calls.made == [
        ("signal", signal.SIGINT, signal.SIG_IGN),
        ("signal", signal.SIGPROF, signal.SIG_DFL),
        ("nice", 15),
        ("library",),
        ("memory", 64 * 2**20),
        *timed,
        *timed,
    ]
    assert made == [("slow", Path("/models/tokenizer"), 70, (2, 3))]
    assert calls.answers == ["", "", "no rule"]


def test_a_process_without_its_library_reports_why_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch, orders("a"))

    def make_backend(*_: Any) -> Backend:
        raise ConfigError("no such tokenizer")

    monkeypatch.setattr(grammar_trial, "make_backend", make_backend)
    grammar_trial.main()
    assert calls.answers == ["no such tokenizer"]


def test_a_process_without_orders_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch, io.BytesIO())
    grammar_trial.main()
    assert not calls.made
    assert calls.answers == []


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("a", ""),
        ("late", ""),
        ("refused", "no rule"),
        ("silent", "it is not a grammar"),
        ("large", "it takes too much memory to compile"),
        ("other", f"KeyError: '{'x' * 489}"),
        ("exit", "it cannot be compiled"),
    ],
)
def test_every_end_of_a_compilation_has_its_answer(source: str, error: str) -> None:
    assert grammar_trial._in_a_thread(Backend(), make_grammar("regex", source), SETTINGS) == error
    assert threading.stack_size() == SETTINGS.stack_bytes


@pytest.mark.parametrize("pages", [0, 5])
def test_memory_is_limited_beyond_what_the_process_has(
    pages: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the kernel does not state the size of a process, it is not limited."""
    calls = Calls(monkeypatch, io.BytesIO())
    if pages:
        (tmp_path / "statm").write_text(f"{pages} 3 2 1 0 9 0\n")
    monkeypatch.setattr(grammar_trial, "Path", lambda _: tmp_path / "statm")
    monkeypatch.setattr(resource, "getpagesize", lambda: 4096)
    grammar_trial._limit_memory(1000)
    most = 5 * 4096 + 1000
    sized = [("limit", resource.RLIMIT_AS, (most, most))] if pages else []
    assert calls.made == [*sized, ("limit", resource.RLIMIT_CORE, (0, 0))]
