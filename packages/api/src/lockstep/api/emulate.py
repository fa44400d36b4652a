"""An executor that computes nothing and takes as long as a GPU would, by the simulator's cost model. Imports no torch.

    launch(plan) ──> begins when the batch before it ends ──> ready() once the clock has reached its end

It serves to try clients, routers and settings against a server with realistic timing. Its output is made up: token ids
are a function of prompt, seed and position, so equal requests get equal answers, also after a retraction.
"""

from __future__ import annotations

import threading
import time
import tomllib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import ceil, log, log1p
from operator import itemgetter
from pathlib import Path

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from lockstep.api.text.plain_text import Texts
from lockstep.core.contract.commands import BatchPlan, RowTaken
from lockstep.core.contract.errors import ConfigError, ContractError
from lockstep.core.contract.events import BatchId, RequestId
from lockstep.host.batches import NO_CONTEXT, BatchResult, ContextOf, Int32s, RowContext
from lockstep.host.grammars import GrammarMatchers
from lockstep.host.loop import HostClock
from lockstep.host.weights import Folder, write_source
from lockstep.sim.cost import BatchShape, CostModel
from lockstep.sim.cost.draws import drawn_factor
from lockstep.sim.host.batch_shapes import RowAdapters, extend_shape_of
from lockstep.sim.host.links import Link

UInt64s = NDArray[np.uint64]


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """The tokens of emulated answers.

    Args:
        first, count: ids [first:first + count) are ordinary tokens.
        end: the token that ends an answer.
        mean_tokens: mean length of answers that end by themselves, end token included; lengths are geometric. 0: no
            answer ends by itself.
        closing: tokens that close JSON, the most preferred first: an answer under a grammar takes them once it is long
            enough.
    """

    first: int
    count: int
    end: int
    mean_tokens: int
    closing: tuple[int, ...] = ()

    def key(self, prompt: Int32s, seed: int | None, adapter: str = "") -> int:
        """Return the key that determines an answer: 64 bits. Greedy answers have no seed."""
        hashed = f"{seed} {adapter}".encode() + prompt.astype("<i4", copy=False).tobytes()
        return int.from_bytes(blake2b(hashed, digest_size=8).digest(), "little")

    def length(self, key: int) -> int:
        """Return the number of tokens of an answer, end token included, if nothing else ends it; 0: it does not end."""
        if self.mean_tokens < 2:
            return self.mean_tokens
        uniform = (int(_mixed(np.array([key], np.uint64))[0]) + 0.5) / 2.0**64
        return max(1, ceil(log(uniform) / log1p(-1.0 / self.mean_tokens)))

    def tokens_of(self, keys: UInt64s, numbers: NDArray[np.int64]) -> Int32s:
        """Return output tokens `numbers` of the answers with these `keys`, regardless of their ends."""
        drawn = _mixed(keys + (numbers.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15))
        return (np.uint64(self.first) + drawn % np.uint64(self.count)).astype(np.int32)

    def token_under_grammar(self, allowed: Int32s, key: int, number: int, *, long_enough: bool) -> int:
        """Return output token `number` of an answer under a grammar: one of the ids `allowed` (ascending).

        Key and number determine the token, as they do without a grammar. Until the answer is long enough, it ends only
        if the grammar allows nothing else; after that it ends as soon as the grammar allows.
        """
        if long_enough:
            for token in (self.end, *self.closing):
                at = int(np.searchsorted(allowed, token))
                if at < len(allowed) and allowed[at] == token:
                    return token
        others = allowed[allowed != self.end]
        if not len(others):
            return self.end
        drawn = _mixed(np.array([key], np.uint64) + np.array([number + 1], np.uint64) * np.uint64(0x9E3779B97F4A7C15))
        return int(others[int(drawn[0] % np.uint64(len(others)))])


class ScriptRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One rule of a script: a text that prompts contain, and the answer to them."""

    when: str
    say: str


class Script:
    """Prepared answers of an emulated model to certain prompts, for trying clients of tool calls and the like.

    A script is a TOML file of rules; docs/serving.md shows one. A rule applies if its text occurs in the prompt. Of
    several such rules, the one with the last occurrence is used.
    """

    def __init__(self, text: Texts, answers: Sequence[tuple[str, str]]) -> None:
        self._text = text
        self._answers = [(when, np.array(text.encode(say, special=False), np.int32)) for when, say in answers]

    @classmethod
    def read(cls, path: Path, text: Texts) -> Script:
        """Read a TOML file. Raises ConfigError."""
        try:
            found = tomllib.loads(path.read_text("utf-8")).get("answer", [])
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"`answers`: {path} cannot be read: {error}") from error
        try:
            pairs = [(one.when, one.say) for one in msgspec.convert(found, list[ScriptRule])]
        except msgspec.ValidationError as error:
            raise ConfigError(
                f"`answers`: {path} must have tables [[answer]] with texts `when` and `say`: {error}"
            ) from error
        return cls(text, pairs)

    def answer(self, prompt: Int32s) -> Int32s | None:
        """Return the answer to this prompt; None if no rule matches."""
        text = self._text.decode(prompt.tolist())
        at, answer = max(
            ((text.rfind(when), answer) for when, answer in self._answers), key=itemgetter(0), default=(-1, None)
        )
        return answer if at >= 0 else None


class EmulatedTimes:
    """Durations of emulated batches.

    Args:
        seed: of the spread of the durations.
        speed: factor by which batches are faster than the cost model predicts.
        adapters: whether rows may run on adapters, which the cost model then prices.
    """

    def __init__(self, cost: CostModel, *, seed: int, speed: float = 1.0, adapters: bool = False) -> None:
        self._cost, self._seed, self._speed = cost, seed, speed
        self._adapters = RowAdapters() if adapters else None

    def us(self, plan: BatchPlan) -> float:
        """Return the duration of a plan in microseconds: the cost model's value plus its spread, drawn by batch id.

        Must be called once for each plan, in the order of launches.
        """
        shape = _shape_of(plan)
        if self._adapters is not None:
            self._adapters.take_rows(plan)
            shape = self._adapters.on(plan, shape)
        expected = self._cost.batch_us(shape)
        took_us = expected.mean_us
        for further in range(1, plan.steps):  # each further step has all rows of the launch, one position later
            context_tokens = shape.decode_context_tokens + further * shape.decode_rows
            took_us += self._cost.batch_us(replace(shape, decode_context_tokens=context_tokens)).mean_us
        took_us *= drawn_factor(expected, f"{self._seed} engine", plan.batch_id)
        return max(1.0, took_us / self._speed)


class EmulatedExecutor:
    """An executor that runs plans by the clock; see `lockstep.host.batches.BatchExecutor`.

    Args:
        clock: the host's clock.
        matchers: grammars of rows; without them no row may have a grammar.
        script: prepared answers; other prompts get tokens determined by their key.
    """

    def __init__(
        self,
        times: EmulatedTimes,
        vocabulary: Vocabulary,
        rows_max: int,
        clock: HostClock,
        *,
        matchers: GrammarMatchers | None = None,
        script: Script | None = None,
    ) -> None:
        self._script = script
        self._scripted: dict[int, Int32s] = {}  # prepared answers, by row
        self._times, self._vocabulary, self._clock = times, vocabulary, clock
        self._keys = np.zeros(rows_max, np.uint64)
        self._prompt_tokens = np.zeros(rows_max, np.int64)
        self._lengths = np.zeros(rows_max, np.int64)
        self._matchers = matchers
        self._under_grammar = np.zeros(rows_max, np.bool_)
        self._unsampled: set[BatchId] = set()  # batches in the queue with matchers that have not moved yet
        self._queue: deque[BatchResult] = deque()
        self._free_us = 0.0  # when the last batch launched will have ended, microseconds
        self.weights_version = 0  # tokens depend on the version

    @property
    def in_flight(self) -> int:
        """Number of batches launched and not collected."""
        return len(self._queue)

    def launch(self, plan: BatchPlan, *, deferred: bool = False, contexts: ContextOf | None = None) -> None:
        """Queue a plan after those launched before. Raises ContractError for a grammar without matchers."""
        if self._matchers is None and any(taken.grammar is not None for taken in plan.rows_taken):
            raise ContractError(f"batch {plan.batch_id} takes a row under a grammar, and this engine has no matchers")
        for taken in plan.rows_taken:
            self._take_row(taken, NO_CONTEXT if contexts is None else contexts(taken))
        started_us = max(float(self._clock()), self._free_us)
        self._free_us = started_us + self._times.us(plan)
        result = BatchResult(plan)
        if deferred:
            self._unsampled.add(plan.batch_id)
        else:
            self._sample(result)
        result.started_us, result.finished_us = round(started_us), round(self._free_us)
        self._queue.append(result)

    def sample(self, batch_id: BatchId, advance: Sequence[tuple[RequestId, int, Sequence[int]]]) -> None:
        """Move the matchers, then let a deferred batch sample. Raises ContractError if no such batch waits for it."""
        if batch_id not in self._unsampled or self._matchers is None:
            raise ContractError(f"batch {batch_id} is to be sampled, but was not deferred, or was sampled before")
        for request_id, epoch, tokens in advance:
            self._matchers.advance(request_id, epoch, tokens)
        self._unsampled.discard(batch_id)
        self._sample(next(result for result in self._queue if result.plan.batch_id == batch_id))

    def ready(self) -> bool:
        """Return whether the oldest batch has ended and was sampled."""
        if not self._queue or self._queue[0].plan.batch_id in self._unsampled:
            return False
        return self._clock() >= self._queue[0].finished_us

    def pause_s(self) -> float:
        """Return the seconds until the oldest batch ends."""
        return max(0, self._queue[0].finished_us - self._clock()) / 1e6

    def collect(self) -> BatchResult:
        """Return the results of the oldest batch; sleeps until it ends. Raises ContractError if it was not sampled."""
        if self._queue[0].plan.batch_id in self._unsampled:
            raise ContractError(f"batch {self._queue[0].plan.batch_id} is collected before it was sampled")
        while (pause_s := self.pause_s()) > 0.0:
            time.sleep(pause_s)
        result = self._queue.popleft()
        rows = result.plan.rows[result.plan.sample_rows]
        under = np.flatnonzero(self._under_grammar[rows]).tolist()
        if under and self._matchers is not None:
            ended = [i for i in under if self._matchers.ended(int(rows[i]), int(result.tokens[i]))]
            result.grammar_ended = tuple(ended)
        return result

    def _take_row(self, taken: RowTaken, context: RowContext) -> None:
        if self._matchers is not None:
            self._matchers.take_row(taken)
            self._under_grammar[taken.row] = taken.grammar is not None
        sampling = taken.sampling
        seed = sampling.seed if sampling is not None and sampling.temperature > 0.0 else None
        prompt = context.tokens[: context.prompt_tokens]
        self._scripted.pop(taken.row, None)
        if self._script is not None and (answer := self._script.answer(prompt)) is not None:
            self._scripted[taken.row] = answer
        # tokens depend on the adapter
        adapter = f"{taken.adapter}@{taken.adapter_version}" if taken.adapter else ""
        key = self._vocabulary.key(prompt, seed, adapter)
        self._keys[taken.row] = key
        self._prompt_tokens[taken.row] = context.prompt_tokens
        ends_at = self._vocabulary.length(key)
        self._lengths[taken.row] = max(ends_at, context.min_new_tokens + 1) if ends_at else 0

    def _sample(self, result: BatchResult) -> None:
        """Fill in the tokens of a batch; rows under grammars get tokens that their grammars allow."""
        plan = result.plan
        result.tokens = self._tokens(plan)
        rows = plan.rows[plan.sample_rows]
        under = np.flatnonzero(self._under_grammar[rows])
        if not len(under) or self._matchers is None:
            return
        if plan.steps > 1:
            raise ContractError(f"batch {plan.batch_id} decodes {plan.steps} times under a grammar")
        masks = self._matchers.allowed(rows[under])
        assert masks is not None
        invalid = []
        for i, mask in zip(under.tolist(), masks, strict=True):
            row = rows[i]
            number = int(plan.stops[plan.sample_rows[i]] - self._prompt_tokens[row])
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).astype(np.int32)
            if not len(allowed):
                invalid.append(i)
                continue
            long_enough = 0 < self._lengths[row] <= number + 1
            word = self._vocabulary.token_under_grammar(
                allowed, int(self._keys[row]), number, long_enough=bool(long_enough)
            )
            result.tokens[i] = word
        result.invalid = tuple(invalid)

    def _tokens(self, plan: BatchPlan) -> Int32s:
        """Return the tokens of the sampling rows, the tokens of each row contiguous."""
        rows, stops = plan.rows[plan.sample_rows], plan.stops[plan.sample_rows].astype(np.int64)
        if plan.steps > 1:
            counts = stops - plan.starts[plan.sample_rows]
            ends = np.cumsum(counts)
            rows = np.repeat(rows, counts)
            stops = np.repeat(stops - ends + 1, counts) + np.arange(int(ends[-1]) if len(ends) else 0)
        numbers = stops - self._prompt_tokens[rows]
        keys = self._keys[rows]
        if self.weights_version:
            keys = _mixed(keys + np.uint64(self.weights_version))
        tokens = self._vocabulary.tokens_of(keys, numbers)
        tokens[numbers + 1 == self._lengths[rows]] = self._vocabulary.end
        if self._scripted:
            for i, (row, number) in enumerate(zip(rows.tolist(), numbers.tolist(), strict=True)):
                if (answer := self._scripted.get(row)) is not None:
                    tokens[i] = answer[number] if number < len(answer) else self._vocabulary.end
        return tokens


class EmulatedWeightLoader:
    """A weight loader that only takes the time of its operations; see `lockstep.host.weights`. Nothing is read.

    Weights, `weights_bytes` on each GPU, are copied from host memory over the bus. The KV cache takes no time.

    Args:
        bus_gbs: bandwidth of one GPU in one direction, 1e9 bytes a second.
    """

    def __init__(self, executor: EmulatedExecutor, weights_bytes: float, bus_gbs: float, *, speed: float = 1.0) -> None:
        self._executor = executor
        self.copy_s = weights_bytes / (bus_gbs * 1e9) / speed

    def load_weights(self, version: int, source: str) -> None:
        """Take as long as a copy of all weights."""
        time.sleep(self.copy_s)
        self._executor.weights_version = version

    def switch_memory(self, tags: tuple[str, ...], *, released: bool) -> None:
        """Take as long as a copy of the released or resumed weights, which are kept in the host's memory meanwhile."""
        if "weights" in tags:
            time.sleep(self.copy_s)


class EmulatedAdapterCache:
    """An adapter cache that only takes the time of its loads; see `lockstep.host.adapters`. Nothing is read.

    Args:
        size: bytes of a slot on one GPU, which one load transfers.
        link: from host to device. Loads use it one after the other. Each GPU has its own link.
    """

    def __init__(self, size: int, link: Link, clock: HostClock, *, speed: float = 1.0) -> None:
        self._size, self._link, self._clock, self._speed = size, link, clock, speed

    def read(self, name: str, version: int, source: str) -> None:
        """Do nothing: there is nothing to read."""

    def lack(self, name: str, version: int, why: str) -> None:
        """Do nothing: no adapter is ever missing."""

    def place(self, name: str, version: int, slot: int, done: Callable[[BaseException | None], None]) -> None:
        """Call `done` after the duration of the copy, queued after earlier copies. Loads overlap with batches."""
        now_us = self._clock()
        done_us = self._link.send(round(now_us * self._speed), self._size) / self._speed
        timer = threading.Timer((done_us - now_us) / 1e6, done, (None,))
        timer.daemon = True
        timer.start()

    def forget(self, name: str, version: int | None = None) -> None:
        """Do nothing: nothing is kept."""


def emulated_source(path: str | Path) -> str:
    """Return the source text of a folder, which need not exist."""
    return write_source(Folder(str(path)))


def _shape_of(plan: BatchPlan) -> BatchShape:
    if plan.mode != "decode":
        return extend_shape_of(plan)
    rows, context_tokens = len(plan.rows), int(np.add.reduce(plan.starts))
    return BatchShape(decode_rows=rows, decode_context_tokens=context_tokens, sampled_rows=rows)


def _mixed(values: UInt64s) -> UInt64s:
    """Mix bits so that they look independent. Source: Steele, Lea, Flood: SplitMix64 (OOPSLA 2014), its finaliser."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
