"""The trial process of `grammar_compiler.py`: compiles grammars one after the other, within limits of the kernel.

It compiles a grammar, follows it for some tokens, and writes the error or an empty string. Too much CPU time ends the
process by SIGPROF, too much memory or stack by a signal from within the library. It ends with its parent process.
"""

from __future__ import annotations

import os
import random
import resource
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from lockstep.core.contract.errors import LockstepError
from lockstep.core.contract.events import Grammar
from lockstep.host.batches import Int32s
from lockstep.host.grammar_backends import make_backend
from lockstep.host.grammar_compiler import TrialSettings, read_message, write_message
from lockstep.host.grammars import Compiled, GrammarBackend, GrammarError, Matcher


def main() -> None:
    """Read settings, then grammars, from stdin; write one text for each to stdout."""
    inputs, outputs = sys.stdin.buffer, sys.stdout.buffer
    first = read_message(inputs)
    if first is None:
        return
    settings = msgspec.msgpack.decode(first, type=TrialSettings)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    os.nice(NICE)
    try:
        backend = make_backend(settings.backend, Path(settings.tokenizer), settings.vocabulary, settings.end_tokens)
        _limit_memory(settings.memory_bytes)
    except (LockstepError, OSError, ValueError) as error:
        write_message(outputs, msgspec.msgpack.encode(str(error)))
        return
    write_message(outputs, msgspec.msgpack.encode(""))
    while (message := read_message(inputs)) is not None:
        grammar = msgspec.msgpack.decode(message, type=Grammar)
        signal.setitimer(signal.ITIMER_PROF, settings.cpu_s)
        problem = _in_a_thread(backend, grammar, settings)
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        write_message(outputs, msgspec.msgpack.encode(problem))


NICE = 15  # tokens of other requests come first

WALKS, WALK_TOKENS = 2, 48
"""Number and length of the drawn answers in which a grammar must not reach a limit of its library: about 10 ms."""


TOKEN_S, MEAN_S = 0.05, 0.002
"""CPU time that finding the tokens that may come next may take: at one place, and again on average over all places but
the beginnings of the answers. A grammar's first mask is made where it is compiled, the others in the engine's thread.
"""


def _fill_s(matcher: Matcher, mask: Int32s) -> float:
    """Find the tokens that may come next, and return the CPU time that it took."""
    began_s = time.thread_time()
    matcher.fill(mask)
    return time.thread_time() - began_s


def try_out(compiled: Compiled, words: int, end_tokens: Sequence[int] = ()) -> None:
    """Follow a grammar for the beginnings of some drawn answers. Raises GrammarError at a limit of the library.

    A grammar with nested repetitions compiles, and may reach the limit only in an answer.

    Args:
        words: int32 words of a mask.
        end_tokens: tokens that are drawn by no answer.
    """
    draw = random.Random(0)
    mask = np.zeros(words, np.int32)
    ends = np.zeros(32 * words, np.bool_)
    ends[[token for token in end_tokens if token < len(ends)]] = True
    goes_on = ~np.packbits(ends, bitorder="little").view(np.int32)
    total_s, masks = 0.0, 0
    for walk in range(WALKS):
        matcher, taken = compiled.matcher(), list[int]()
        for number in range(WALK_TOKENS):
            took_s = _fill_s(matcher, mask)
            if took_s > TOKEN_S:  # on a busy machine a cold cache is as slow: only what is slow twice counts
                again = compiled.matcher()
                if all(again.accept(token) for token in taken):
                    took_s = min(took_s, _fill_s(again, mask))
            if took_s > TOKEN_S:
                raise GrammarError(f"the tokens that may follow take {took_s:.2f} s to find, more than {TOKEN_S} s")
            if took_s > MEAN_S:  # states that are made once do not count
                took_s = min(took_s, _fill_s(matcher, mask))
            if walk or number:
                total_s, masks = total_s + took_s, masks + 1
            if not mask.any():
                raise GrammarError("it admits no token")
            mask &= goes_on
            places = mask.nonzero()[0]
            if not len(places):
                break
            place = int(places[draw.randrange(len(places))])
            bits = [bit for bit in range(32) if int(mask[place]) >> bit & 1]
            taken.append(32 * place + draw.choice(bits))
            if not matcher.accept(taken[-1]) or matcher.is_done():
                break
    if masks and (mean_s := total_s / masks) > MEAN_S:
        raise GrammarError(
            f"the tokens that may follow take {1000 * mean_s:.0f} ms to find at each place of an answer, more than "
            f"{1000 * MEAN_S:g} ms; use fewer alternatives"
        )


def _limit_memory(beside_bytes: int) -> None:
    """Limit the address space of the process to its present size and `beside_bytes` more."""
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if Path("/proc/self/statm").exists() else 0
    if pages:
        most = pages * resource.getpagesize() + beside_bytes
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _in_a_thread(backend: GrammarBackend, grammar: Grammar, settings: TrialSettings) -> str:
    """Compile a grammar on a thread with a smaller stack than that of the engine's compiling threads."""
    found: list[str] = []

    def attempt() -> None:
        try:
            try_out(backend.compile(grammar), -(-settings.vocabulary // 32), settings.end_tokens)
            found.append("")
        except GrammarError as error:
            found.append(str(error) or "it is not a grammar")
        except MemoryError:
            found.append("it takes too much memory to compile")
        except Exception as error:  # any error of the library becomes the answer
            found.append(f"{type(error).__name__}: {error}"[:500])

    threading.stack_size(settings.stack_bytes)
    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join()
    return found[0] if found else "it cannot be compiled"


if __name__ == "__main__":
    main()
