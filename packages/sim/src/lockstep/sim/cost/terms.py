"""The time of a batch as a sum of cost terms: one list of terms that every cost model and every breakdown reads.

    term      name          | scope   | us of a batch                        | constants with sources | kernels
              "qkv"           tokens    layers * (latency + max(...))          bf16_gemm_tflops, ...    36
              "all_reduce"    tokens    ...                                    all_reduce line          72
              "attention_..." decode    ...

`TermSum` is a cost model made of such a list. The roofline builds its list from the builders in `roofline.TERMS`; the
measured model takes the roofline's list and replaces terms by name; a pipeline sums the lists of its stages; a
calibration scales terms by name. A new term is one builder in `roofline.TERMS` and appears in all of them.

`TermSum.batch_us` is the hot path: it caches sums per number of tokens and per number of sampled rows. `terms_us` is
the breakdown: it evaluates each term separately and reads none of the cached sums, so each checks the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from lockstep.sim.cost.errors import CatalogueError
from lockstep.sim.cost.hardware import Constant, GpuSpec, achieved
from lockstep.sim.cost.model import BatchShape, Duration
from lockstep.sim.cost.models import ceil_div

TermUs = Callable[[BatchShape, BatchShape], float]
"""Function that returns the microseconds of a term, given the whole batch and its part on the shard with the most rows.

The second argument is called `own`.
"""

Bends = Callable[[int], tuple[int, ...]]
"""Function that returns the contexts at which a term may bend downwards.

Its argument is a number of decode rows, or of new tokens of one extend row; the batch has no other rows. Between two of
the contexts, the microseconds of the batch are a convex function of its context: a sum of lines and of maxima of lines.
"""

Scope = Literal["tokens", "decode", "extend", "rows", "sampled", "adapters"]
"""The inputs of a term. They determine when the term is evaluated and how the sum of its scope is cached.

tokens     depends only on the numbers of new tokens of `batch` and of `own`; cached per pair of these numbers
decode     evaluated if `own` has decode rows
extend     evaluated if `own` has extend tokens
rows       evaluated for every batch that has tokens
sampled    depends only on the number of sampled rows of `batch`; cached per number
adapters   evaluated if tokens of `batch` run on an adapter
"""
SCOPES: tuple[Scope, ...] = ("tokens", "decode", "extend", "rows", "sampled", "adapters")
ATTENTION_PREFILL = "attention_prefill"  # the term of attention of extend rows, in layers that keep KV
LAUNCH = "launch"  # the name of the launching time in a breakdown; it is not a term of the list: see `Launching`


@dataclass(frozen=True, slots=True)
class CostTerm:
    """One summand of the time of a batch."""

    name: str  # unique in a list; the key in breakdowns, operator tables and corrections
    scope: Scope
    us: TermUs
    constants: Mapping[str, Constant] = field(default_factory=dict)  # the inputs of `us`, with sources
    kernels: int = 0  # launches per batch; the eager launching time counts them
    is_collective: bool = False  # communication between GPUs; a correction has a separate weight for it
    decode_bends: Bends | None = None  # for decode rows, of a term with scope `decode` or `rows`; None: not known
    chunk_bends: Bends | None = None  # for one extend row, of a term with scope `extend` or `rows`; None: not known


def never(rows_or_tokens: int) -> tuple[int, ...]:
    """Return the bends of a term that is convex over all contexts."""
    return ()


class Constants:
    """Reads the constants of a GPU for one term and records each constant that was read."""

    def __init__(self, gpu: GpuSpec) -> None:
        self._gpu = gpu
        self.read: dict[str, Constant] = {}

    def note(self, name: str, constant: Constant) -> float:
        """Record a constant that does not belong to the GPU, and return its value."""
        self.read[name] = constant
        return constant.value

    def rate(self, name: str) -> float:
        """Record a rate or a latency of the GPU, and return its value."""
        return self.note(name, achieved(self._gpu, name))

    def us_rate(self, name: str, per_us: float) -> float:
        """Return a rate per microsecond, and record it.

        Args:
            per_us: factor of the unit: 1e3 turns GB/s into bytes per us, 1e6 turns TFLOP/s into FLOPs per us.
        """
        return self.rate(name) * per_us


@dataclass(frozen=True, slots=True)
class Launching:
    """The time that launching adds to the sum of the terms.

    A batch with no rows but decode rows, and at most `graph_rows_max` of these, is replayed as a CUDA graph. Any other
    batch takes at least the time in which the CPU launches its kernels one by one.
    """

    cuda_graph: bool
    graph_rows_max: int
    eager_us: float  # CPU time to launch all kernels of a batch without adapters, one by one
    adapters_us: float  # CPU time to launch the kernels of adapters in addition
    fixed_us: float  # added to every forward pass

    def floor_us(self, shape: BatchShape) -> float:
        """Return the least time of the kernels of a batch; 0 if a graph is replayed."""
        if shape.adapter_tokens:  # a batch with a row on an adapter is not replayed from a graph
            return self.eager_us + self.adapters_us
        rows = shape.decode_rows if shape.own is None else shape.own.decode_rows  # each rank captures its own graphs
        graph = self.cuda_graph and not shape.extend_tokens and rows <= self.graph_rows_max
        return 0.0 if graph else self.eager_us

    def launched_us(self, shape: BatchShape, us: float) -> float:
        """Return the time of a batch with terms that sum to `us`."""
        return max(us, self.floor_us(shape)) + self.fixed_us

    def added_us(self, shape: BatchShape, us: float) -> float:
        """Return the time that launching adds to terms that sum to `us`: the entry `launch` of a breakdown."""
        return max(0.0, self.floor_us(shape) - us) + self.fixed_us


class TermSum:
    """A cost model that is the sum of a list of terms, and of launching. Only its caches of sums change.

    Args:
        shards: shards that rows are spread over; terms receive the shape of the fullest shard as `own`.
    Raises: CatalogueError if two terms have the same name, or a term has an unknown scope.
    """

    def __init__(self, terms: Iterable[CostTerm], shards: int, launching: Launching) -> None:
        self.terms: tuple[CostTerm, ...] = tuple(terms)
        self.shards, self.launching = shards, launching
        names = [term.name for term in self.terms]
        twice = sorted({name for name in (*names, LAUNCH) if (*names, LAUNCH).count(name) > 1})
        if twice:
            raise CatalogueError(f"names of cost terms must differ, got {', '.join(twice)} more than once")
        for term in self.terms:
            if term.scope not in SCOPES or (term.is_collective and term.scope != "tokens"):
                scopes = "`tokens`, for it is a collective" if term.is_collective else f"one of {', '.join(SCOPES)}"
                raise CatalogueError(f"the scope of the cost term {term.name} must be {scopes}, got `{term.scope}`")
        self.collectives = sum(term.kernels for term in self.terms if term.is_collective)
        self._decode_sum, self._extend_sum = self._summed("decode"), self._summed("extend")
        self._rows_sum, self._sampled_sum = self._summed("rows"), self._summed("sampled")
        self._adapters_sum = self._summed("adapters")
        self._attention_prefill = next((term.us for term in self.terms if term.name == ATTENTION_PREFILL), None)
        self._has_rows = any(term.scope == "rows" for term in self.terms)
        self._eager_us, self._fixed_us = launching.eager_us, launching.fixed_us
        self._graph_rows_max = launching.graph_rows_max if launching.cuda_graph else -1
        # Keys are new tokens; with several shards, new tokens of the batch and of its fullest shard.
        self._tokens_us: dict[int | tuple[int, int], float] = {}
        self._communication_us: dict[int | tuple[int, int], float] = {}  # the sum of the collectives alone
        self._sampled_us: dict[int, float] = {}  # by sampled rows

    def _summed(self, scope: Scope) -> TermUs:
        """Return one function that computes the sum of the terms of a scope."""
        parts = [term.us for term in self.terms if term.scope == scope]
        if len(parts) == 1:
            return parts[0]
        if len(parts) == 2:
            first, second = parts
            return lambda batch, own: sum((first(batch, own), second(batch, own)), 0.0)
        if len(parts) == 3:  # a tuple takes a third of the time of a generator, and `sum` rounds alike
            first, second, third = parts
            return lambda batch, own: sum((first(batch, own), second(batch, own), third(batch, own)), 0.0)
        return lambda batch, own: sum((us(batch, own) for us in parts), 0.0)

    # --- the cost model -----------------------------------------------------------------------------------------------

    def batch_us(self, shape: BatchShape) -> Duration:
        """Return the time of one forward pass and its sampling. The hot path: a few dozen float operations."""
        extend_tokens, decode_rows = shape.extend_tokens, shape.decode_rows
        tokens = extend_tokens + decode_rows + shape.draft_tokens
        if not tokens:
            return Duration(0.0)
        own = shape
        key: int | tuple[int, int] = tokens
        if self.shards > 1:
            own = self.own_shape(shape)
            key = tokens, own.extend_tokens + own.decode_rows + own.draft_tokens
        us = self._tokens_us.get(key)
        if us is None:
            us = self._remember_tokens(key, shape, own)
        if own.decode_rows:
            us += self._decode_sum(shape, own)
        if own.extend_tokens:
            us += self._extend_sum(shape, own)
        if self._has_rows:
            us += self._rows_sum(shape, own)
        if shape.sampled_rows:
            sampled_us = self._sampled_us.get(shape.sampled_rows)
            if sampled_us is None:
                sampled_us = self._sampled_us[shape.sampled_rows] = self._sampled_sum(shape, own)
            us += sampled_us
        if shape.adapter_tokens or own is not shape:
            if shape.adapter_tokens:
                us += self._adapters_sum(shape, own)
            return Duration(self.launching.launched_us(shape, us))
        # `Launching.launched_us` without its calls: `batch_us` runs once or twice per batch.
        if us < self._eager_us and (extend_tokens or decode_rows > self._graph_rows_max):
            us = self._eager_us
        return Duration(us + self._fixed_us)

    def decode_bends(self, rows: int) -> tuple[int, ...] | None:
        """Return the contexts between which the time of a batch of decodes is convex, see `ContextBends`."""
        return self._bends([term.decode_bends for term in self.terms if term.scope in ("decode", "rows")], rows)

    def chunk_bends(self, tokens: int) -> tuple[int, ...] | None:
        """Return the contexts between which the time of an extend of one prompt is convex, see `ContextBends`."""
        return self._bends([term.chunk_bends for term in self.terms if term.scope in ("extend", "rows")], tokens)

    def _bends(self, of_terms: list[Bends | None], rows_or_tokens: int) -> tuple[int, ...] | None:
        """Return the bends of all terms; None if those of a term are not known."""
        at = set[int]()
        for bends in of_terms:
            if bends is None or self.shards > 1:
                return None  # the part of the fullest shard is rounded
            at.update(bends(rows_or_tokens))
        return tuple(sorted(at))

    def terms_us(self, shape: BatchShape) -> dict[str, float]:
        """Return the time by term, and the launching time as `launch`; empty for an empty batch.

        Every term is evaluated separately, without cached sums. tests/sim/test_cost_terms.py verifies that the values
        sum to `batch_us`.
        """
        if not new_tokens(shape):
            return {}
        own = self.own_shape(shape)
        terms = {term.name: term.us(shape, own) for term in self.terms if _applies(term.scope, shape, own)}
        terms[LAUNCH] = self.launching.added_us(shape, sum(terms.values()))
        return terms

    def launched_us(self, shape: BatchShape, us: float) -> float:
        """Return the time of a batch with terms that sum to `us`: at least the time of launching its kernels."""
        return self.launching.launched_us(shape, us)

    def collectives_us(self, tokens: int) -> float:
        """Return the time of the collectives of a batch with `tokens` new tokens, the gathering of logits excluded.

        Tokens are assumed to be spread evenly over shards.
        """
        if not self.collectives:
            return 0.0
        batch, own, key = self._even(tokens)
        us = self._communication_us.get(key)
        if us is None:
            self._remember_tokens(key, batch, own)
            us = self._communication_us[key]
        return us

    @property
    def collective_names(self) -> frozenset[str]:
        """The terms that are collectives."""
        return frozenset(term.name for term in self.terms if term.is_collective)

    def collective_terms_us(self, tokens: int) -> dict[str, float]:
        """Return the time of each collective of `collectives_us`, evaluated separately."""
        batch, own, _ = self._even(tokens)
        return {term.name: term.us(batch, own) for term in self.terms if term.is_collective}

    def attention_prefill_us(self, shape: BatchShape) -> float:
        """Return the time of attention of the extend rows of a batch; 0 if there are none, or the model has no KV."""
        if self._attention_prefill is None or not shape.extend_tokens:
            return 0.0
        return self._attention_prefill(shape, self.own_shape(shape))

    # --- parts --------------------------------------------------------------------------------------------------------

    def own_shape(self, shape: BatchShape) -> BatchShape:
        """Return the part of a batch on the shard with the most rows; with one shard, the whole batch."""
        if self.shards == 1:
            return shape
        return fullest_shard(shape, self.shards) if shape.own is None else shape.own

    def term(self, name: str) -> CostTerm:
        """Return a term by name. Raises KeyError for an unknown name."""
        return {term.name: term for term in self.terms}[name]

    def with_terms(self, replaced: Mapping[str, TermUs]) -> tuple[CostTerm, ...]:
        """Return the terms, with the `us` of those named in `replaced` exchanged; the bends of these are not known.

        Raises: CatalogueError for a name that no term has.
        """
        unknown = replaced.keys() - {term.name for term in self.terms}
        if unknown:
            names = ", ".join(term.name for term in self.terms)
            raise CatalogueError(f"there is no cost term {', '.join(sorted(unknown))}\nhint: terms are {names}")
        return tuple(
            replace(term, us=replaced[term.name], decode_bends=None, chunk_bends=None)
            if term.name in replaced
            else term
            for term in self.terms
        )

    def forget(self) -> None:
        """Drop all cached sums."""
        self._tokens_us.clear()
        self._communication_us.clear()
        self._sampled_us.clear()

    def _even(self, tokens: int) -> tuple[BatchShape, BatchShape, int | tuple[int, int]]:
        """Return a batch of `tokens` new tokens, one shard's even part of it, and the cache key of both."""
        batch = BatchShape(decode_rows=tokens)
        if self.shards == 1:
            return batch, batch, tokens
        own_tokens = ceil_div(tokens, self.shards)
        return batch, BatchShape(decode_rows=own_tokens), (tokens, own_tokens)

    def _remember_tokens(self, key: int | tuple[int, int], batch: BatchShape, own: BatchShape) -> float:
        """Sum the terms of scope `tokens`, and separately the collectives among them; store both sums."""
        us = communication_us = 0.0
        for term in self.terms:
            if term.scope == "tokens":
                term_us = term.us(batch, own)
                us += term_us
                if term.is_collective:
                    communication_us += term_us
        self._tokens_us[key], self._communication_us[key] = us, communication_us
        return us


def new_tokens(shape: BatchShape) -> int:
    """Return the new tokens of a batch: of extend rows, of decode rows, and drafts."""
    return shape.extend_tokens + shape.decode_rows + shape.draft_tokens


def _applies(scope: Scope, batch: BatchShape, own: BatchShape) -> bool:
    match scope:
        case "decode":
            return own.decode_rows > 0
        case "extend":
            return own.extend_tokens > 0
        case "sampled":
            return batch.sampled_rows > 0
        case "adapters":
            return batch.adapter_tokens > 0
        case "tokens" | "rows":
            return True


def fullest_shard(shape: BatchShape, shards: int) -> BatchShape:
    """Return the part of a batch on the shard with the most rows, with rows spread evenly and of equal length."""
    extends, decodes = ceil_div(shape.extend_rows, shards), ceil_div(shape.decode_rows, shards)

    def of_extends(total: int) -> int:
        return ceil_div(total * extends, shape.extend_rows) if extends else 0

    return BatchShape(
        extend_rows=extends,
        extend_tokens=of_extends(shape.extend_tokens),
        extend_context_tokens=of_extends(shape.extend_context_tokens),
        extend_pairs=of_extends(shape.extend_pairs),
        decode_rows=decodes,
        decode_context_tokens=ceil_div(shape.decode_context_tokens * decodes, shape.decode_rows) if decodes else 0,
        sampled_rows=ceil_div(shape.sampled_rows, shards),
        draft_tokens=ceil_div(shape.draft_tokens * decodes, shape.decode_rows) if decodes else 0,
    )
