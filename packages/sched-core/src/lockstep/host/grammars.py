"""Grammars in use: the protocol of a grammar library, and one matcher for each row with a grammar.

    Grammar(kind, source, digest) ──backend.compile──> Compiled ──matcher──> Matcher, a row's
                                                           |                  accept(token), fill(mask), is_done()
                              kept by digest, the least recently used is dropped

`llguidance_backend.py` and `xgrammar_backend.py` implement `GrammarBackend`; `grammar_compiler.py` compiles off the
engine's loop. This module imports no torch: masks are bits on the CPU, and the sampler copies them to a device.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Literal, Protocol

import numpy as np

from lockstep.core.contract.commands import RowTaken
from lockstep.core.contract.errors import ConfigError, LockstepError
from lockstep.core.contract.events import Grammar, RequestId
from lockstep.host.bad_words import BadWords
from lockstep.host.batches import Int32s

log = logging.getLogger("lockstep.host")

Kind = Literal["json_schema", "regex", "ebnf", "structural_tag", "bad_words"]
ENDLESS = "bad_words"
"""The kind of grammar that never ends an answer, and needs no library."""

FORCED_MAX = 64  # forced tokens that a matcher returns at once: as many as one launch may compute, see SchedConfig
COMPILED_MAX = 128  # grammars kept; each has a megabyte or two
SOURCE_BYTES_MAX = 16 * 2**20  # sources of all grammars kept
LONGEST_ERROR = 500  # characters of a library's message that a client receives


class GrammarError(LockstepError):
    """A grammar that cannot be compiled. The message is for the client that sent it."""


def make_grammar(kind: Kind, source: str) -> Grammar:
    """Return a grammar with the digest that identifies it: SHA-256 of kind and source."""
    hashed = f"{kind}\0".encode() + source.encode("utf-8", "surrogatepass")
    return Grammar(kind, source, sha256(hashed).digest())


class Matcher(Protocol):
    """The position of one answer in its grammar."""

    def accept(self, token: int) -> bool:
        """Move by a token. Returns False, without a move, if the grammar does not admit it."""

    def rollback(self, tokens: int) -> None:
        """Undo the moves by the last `tokens` tokens."""

    def fill(self, mask: Int32s) -> None:
        """Write the tokens that may come next: int32 [ceil(vocabulary / 32)], bit t % 32 of word t // 32.

        Raises: GrammarError if the mask exceeds a limit of the library.
        """

    def is_done(self) -> bool:
        """Whether only the end may follow."""

    def forced(self) -> Sequence[int]:
        """Return the tokens that must follow, in order: each is the only token in the mask at its place. No move."""


class Compiled(Protocol):
    """A compiled grammar."""

    def matcher(self) -> Matcher:
        """Return a new matcher at the start of the grammar."""


class GrammarBackend(Protocol):
    """A grammar library with the tokenizer of one model. Any thread may compile."""

    name: str

    def compile(self, grammar: Grammar) -> Compiled:
        """Compile a grammar. Raises GrammarError."""


class CompiledGrammars:
    """Compiled grammars by digest, least recently used first. All methods may be called from any thread.

    Args:
        make: returns the library with its tokenizer, which may take seconds. Called for the first grammar.
    """

    def __init__(self, make: Callable[[], GrammarBackend]) -> None:
        self._make = make
        self._backend: GrammarBackend | None = None
        self._making = threading.Lock()
        self._lock = threading.Lock()
        self._kept: OrderedDict[bytes, tuple[Compiled, int]] = OrderedDict()
        self._source_bytes = 0

    def get(self, grammar: Grammar) -> Compiled:
        """Return a compiled grammar; compile it in this thread if it is not kept. Raises GrammarError."""
        with self._lock:
            found = self._kept.get(grammar.digest)
            if found is not None:
                self._kept.move_to_end(grammar.digest)
                return found[0]
        compiled, size = self._compile(grammar), len(grammar.source)
        with self._lock:
            if grammar.digest not in self._kept:
                self._kept[grammar.digest] = compiled, size
                self._source_bytes += size
            while len(self._kept) > COMPILED_MAX or (self._source_bytes > SOURCE_BYTES_MAX and len(self._kept) > 1):
                _, (_, gone) = self._kept.popitem(last=False)
                self._source_bytes -= gone
        return compiled

    def _compile(self, grammar: Grammar) -> Compiled:
        if grammar.kind != ENDLESS:
            return self._library().compile(grammar)
        try:
            return BadWords(grammar.source)
        except ValueError as error:
            raise GrammarError(str(error)) from error

    def __len__(self) -> int:
        return len(self._kept)

    def _library(self) -> GrammarBackend:
        with self._making:
            if self._backend is None:
                try:
                    self._backend = self._make()
                except ConfigError as error:
                    raise GrammarError(str(error)) from error
            return self._backend


class _Row:
    """The matcher of one row."""

    __slots__ = ("endless", "epoch", "matcher", "over", "request_id")

    def __init__(self, request_id: RequestId, epoch: int, matcher: Matcher | None, *, endless: bool) -> None:
        self.request_id, self.epoch, self.matcher, self.endless = request_id, epoch, matcher, endless
        self.over = False  # the answer has ended for the grammar; min_new_tokens or ignore_eos may let it continue


class GrammarMatchers:
    """The matchers of an executor's rows; implements `lockstep.runtime.executor.Matchers`. For one thread.

    A grammar that fails during generation admits no token from then on. Its request ends as invalid; other requests are
    not affected.

    Args:
        vocabulary: number of token ids in the logits.
        end_tokens: token ids that end an answer where its grammar admits the end.
        lenient: a grammar that fails or cannot be compiled admits every token, without an error.
    """

    def __init__(
        self, compiled: CompiledGrammars, vocabulary: int, end_tokens: Sequence[int], *, lenient: bool = False
    ) -> None:
        self._compiled, self._failed = compiled, -1 if lenient else 0  # words of the mask of a failed grammar
        self._level = logging.DEBUG if lenient else logging.ERROR
        self._words, self._vocabulary = -(-vocabulary // 32), vocabulary
        self._ends = frozenset(end_tokens)
        self._rows: dict[int, _Row] = {}
        self._row_of: dict[RequestId, int] = {}

    def take_row(self, taken: RowTaken) -> None:
        """Assign a row to a request, with a matcher if the request has a grammar."""
        before = self._rows.pop(taken.row, None)
        if before is not None and self._row_of.get(before.request_id) == taken.row:
            del self._row_of[before.request_id]
        if taken.grammar is None:
            return
        matcher: Matcher | None = None
        try:
            matcher = self._compiled.get(taken.grammar).matcher()
        except GrammarError as error:  # it was compiled before by another process or within other limits
            message = "r%d ends as invalid: its grammar does not compile any more: %s"
            log.log(self._level, message, taken.request_id, error)
        endless = taken.grammar.kind == ENDLESS
        self._rows[taken.row] = _Row(taken.request_id, taken.epoch, matcher, endless=endless)
        self._row_of[taken.request_id] = taken.row

    def advance(self, request_id: RequestId, epoch: int, tokens: Sequence[int]) -> None:
        """Move a request's matcher by tokens. A call with an older epoch is ignored."""
        row = self._rows.get(self._row_of.get(request_id, -1))
        if row is None or row.epoch != epoch:
            return
        for token in tokens:
            if row.over or row.matcher is None:
                return
            if row.endless:
                row.matcher.accept(token)
            elif token in self._ends or row.matcher.is_done():
                row.over = True
            elif not row.matcher.accept(token):
                log.log(self._level, "r%d ends as invalid: its grammar does not admit token %d", request_id, token)
                row.matcher = None
            elif row.matcher.is_done():
                row.over = True

    def allowed(self, rows: Int32s) -> Int32s | None:
        """Return int32 [rows, ceil(vocabulary / 32)]: one bit for each token that may come next."""
        mask = np.full((len(rows), self._words), -1, np.int32)
        for i, number in enumerate(rows.tolist()):
            row = self._rows.get(number)
            if row is None or row.over:
                continue
            if row.matcher is None:
                mask[i] = self._failed
                continue
            try:
                row.matcher.fill(mask[i])
            except GrammarError as error:
                log.log(self._level, "r%d ends as invalid: its grammar fails: %s", row.request_id, error)
                row.matcher, mask[i] = None, self._failed
        return mask

    def ended(self, row: int, token: int) -> bool:
        """Whether the row's grammar ends with this token. The matcher is not moved."""
        held = self._rows.get(row)
        if held is None or held.matcher is None or held.endless:
            return False
        if held.over or token in self._ends:
            return True
        if not held.matcher.accept(token):
            return False
        done = held.matcher.is_done()
        held.matcher.rollback(1)
        return done

    def forced(self, row: int, token: int) -> list[int]:
        """Return the tokens that the row's grammar forces after this token. The matcher is not moved.

        None of them ends the answer or its grammar: the result of the batch that samples such a token reports the end.
        """
        held = self._rows.get(row)
        if held is None or held.matcher is None or held.over or token in self._ends:
            return []
        if not held.matcher.accept(token):
            return []
        found, moved = [] if held.matcher.is_done() else list(held.matcher.forced()[:FORCED_MAX]), 1
        for number, one in enumerate(found):
            if one in self._ends or one >= self._vocabulary or not held.matcher.accept(one):
                found = found[:number]
                break
            moved += 1
            if held.matcher.is_done():
                found = found[:number]
                break
        held.matcher.rollback(moved)
        return found


def short(message: str) -> str:
    """Return a library's message as one line of at most LONGEST_ERROR characters."""
    line = " ".join(message.split())
    return line if len(line) <= LONGEST_ERROR else line[: LONGEST_ERROR - 3] + "..."
