"""The collectives of one stage with attention shards or experts by all-to-all, where all-reduces do not suffice.

    plain, and ep alone       all-reduce after attention, all-reduce after the feed-forward: every rank has every row,
                              so experts need no dispatch, and the sum over ranks is the combine
    attention_dp              ... attention of own rows | all-gather | feed-forward of all rows | reduce-scatter | ...
    attention_dp, moe_a2a     ... attention of own rows | dispatch | experts | combine | ...

If the heads of a shard are split over several GPUs, a reduce-scatter among these GPUs follows attention and an
all-gather precedes the next layer. Together they move as many bytes as the all-reduce that they replace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from lockstep.sim.cost.expert_balance import spread_of
from lockstep.sim.cost.experts import expected_max_load
from lockstep.sim.cost.hardware import GpuSpec, all_gather_of, domains_of, network_of
from lockstep.sim.cost.model import BatchShape
from lockstep.sim.cost.models import ACTIVATION_BYTES, ModelSpec, ceil_div
from lockstep.sim.cost.parallel import Parallelism
from lockstep.sim.cost.terms import Constants, CostTerm, TermUs, new_tokens

RatioOf = Callable[[str, int, int], float]
"""Function (operation, GPUs, tokens) that returns the factor by which the operation's time is corrected."""

FP8_SCALE_TOKENS = 128  # values that share a float32 scale in a row dispatched as fp8
SCALE_BYTES = 4


class Exchange:
    """Collectives of one pass.

    Args:
        fp8: rows are dispatched as fp8 with scales, for experts that compute in fp8; combined rows are bf16.
        all_reduce_us: function that returns the time of an all-reduce over all GPUs of the stage, given its bytes.
    """

    def __init__(
        self,
        model: ModelSpec,
        gpu: GpuSpec,
        split: Parallelism,
        *,
        fp8: bool,
        all_reduce_us: Callable[[float], float],
    ) -> None:
        self._split, self._experts = split, model.experts
        self._domains = domains_of(gpu, split.ep)
        self._network_gbs, self._network_us = (one.value for one in network_of(gpu))
        self._all_reduce_us = all_reduce_us
        self._row_bytes = model.hidden * ACTIVATION_BYTES
        self._layers = model.layers
        self._constants = Constants(gpu)
        self._a2a_layers = model.moe_layers if split.moe_a2a else 0
        self.lines = {n: all_gather_of(gpu, n) for n in sorted({split.attention_tp, split.tp} - {1})}
        if split.moe_a2a:
            self._dispatch_bytes = float(self._row_bytes)
            if fp8:
                self._dispatch_bytes = model.hidden * (1.0 + SCALE_BYTES / FP8_SCALE_TOKENS)
            self._lines_of = {
                name: tuple(
                    (self._constants.rate(f"{name}{mode}_us"), self._constants.us_rate(f"{name}{gbs}_gbs", 1e3))
                    for mode, gbs in (("_latency", ""), ("_low_latency", "_low_latency"))
                )
                for name in ("dispatch", "combine")
            }

    @property
    def operations(self) -> list[tuple[str, int]]:
        """The operations of a pass with the number of GPUs that take part in each."""
        found = [(name, gpus) for gpus in self.lines for name in ("all_gather", "reduce_scatter")]
        if self._split.attention_dp == 1 and self._layers > self._a2a_layers:
            found.append(("all_reduce", self._split.tp))
        return found + [(name, self._split.ep) for name in ("dispatch", "combine") if self._a2a_layers]

    def terms(self) -> Iterator[CostTerm]:
        """Yield one term per kind of collective, the gathering of logits excluded."""
        for name, calls in self._calls().items():
            yield CostTerm(name, "tokens", self.term_us(name), self._constants.read, calls, is_collective=True)

    def _calls(self) -> dict[str, int]:
        """Return how often each collective is called in a pass."""
        split, a2a = self._split, self._a2a_layers
        other = self._layers - a2a
        if split.attention_dp > 1:
            gathers = self._layers * (split.attention_tp > 1) + other
            calls = {"all_gather": gathers, "reduce_scatter": gathers}
        else:
            calls = {"all_gather": a2a, "reduce_scatter": a2a, "all_reduce": 2 * other}
        return calls | ({"dispatch": a2a, "combine": a2a} if a2a else {})

    def term_us(self, name: str, ratio: RatioOf | None = None) -> TermUs:
        """Return the time of all collectives of one kind in a pass.

        Args:
            ratio: correction of all-gathers, reduce-scatters and all-reduces; None: no correction.
        """
        split, layers, a2a = self._split, self._layers, self._a2a_layers
        other = layers - a2a

        def gathers_us(rows: int, gpus: int) -> float:
            return self.gather_us(rows, gpus) * (ratio(name, gpus, rows) if ratio and gpus > 1 else 1.0)

        def us(batch: BatchShape, own: BatchShape) -> float:
            tokens, own_tokens = new_tokens(batch), new_tokens(own)
            if name in ("dispatch", "combine"):
                return a2a * self.all_to_all_us(name, ceil_div(own_tokens, split.attention_tp), tokens)
            if name == "all_reduce":
                reduce_us = self._all_reduce_us(tokens * self._row_bytes)
                return 2 * other * reduce_us * (ratio(name, split.tp, tokens) if ratio else 1.0)
            if split.attention_dp > 1:
                return layers * gathers_us(own_tokens, split.attention_tp) + other * gathers_us(tokens, split.tp)
            return a2a * gathers_us(tokens, split.tp)

        return us

    def gather_us(self, tokens: float, gpus: int) -> float:
        """Return the time of an all-gather or a reduce-scatter of `tokens` rows among `gpus` GPUs."""
        if gpus == 1:
            return 0.0
        line = self.lines[gpus]
        return line.latency_us + (gpus - 1) / gpus * tokens * self._row_bytes / (line.gbs * 1e3)

    def all_to_all_us(self, name: str, rows: int, tokens: int) -> float:
        """Return the time of one dispatch or combine, for `rows` rows of one rank and `tokens` rows of all ranks.

        It is that of the faster of two kernels: one sends a row once to every rank that needs it; the other, with less
        latency, sends it once for every expert. Uneven routing lengthens both by the ratio of the fullest rank's load
        to its load under even routing.
        """
        experts, split = self._experts, self._split
        assert experts is not None
        row_bytes = self._dispatch_bytes if name == "dispatch" else float(self._row_bytes)
        spread = spread_of(experts, split)
        own = spread.slots // split.ep
        assignments = tokens * experts.per_token
        skew = expected_max_load(assignments, split.ep, own, spread.load_cv)
        skew /= expected_max_load(assignments, split.ep, own)
        elsewhere = (split.ep - 1) * (1.0 - (1.0 - 1.0 / split.ep) ** experts.per_token)
        (latency, rate), (low_latency, low_rate) = self._lines_of[name]
        once_us = skew * rows * elsewhere * row_bytes / rate
        each_us = skew * rows * experts.per_token * row_bytes / low_rate
        if self._domains > 1:
            # Over the network a row is sent once to every other domain that needs it, or once for every expert there.
            domains = (self._domains - 1) * (1.0 - (1.0 - 1.0 / self._domains) ** experts.per_token)
            there = experts.per_token * (1.0 - 1.0 / self._domains)
            network_us_per_byte = 1.0 / (self._network_gbs * 1e3)
            latency += self._network_us
            low_latency += self._network_us
            once_us = max(once_us, skew * rows * domains * row_bytes * network_us_per_byte)
            each_us = max(each_us, skew * rows * there * row_bytes * network_us_per_byte)
        return min(latency + once_us, low_latency + each_us)
