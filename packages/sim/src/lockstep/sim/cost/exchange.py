"""What the GPUs of one stage tell each other where they do more than add up: attention shards, experts by all-to-all.

    plain, and ep alone       all-reduce after attention, all-reduce after the feed-forward: every rank has every row,
                              so experts need no dispatch, and the sum over ranks is the combine
    attention_dp              ... attention of own rows | all-gather | feed-forward of all rows | reduce-scatter | ...
    attention_dp, moe_a2a     ... attention of own rows | dispatch | experts | combine | ...

Where the heads of a shard are on several GPUs, a reduce-scatter among them comes behind attention and an all-gather
before the next layer: together the bytes of the all-reduce they replace.
"""

from __future__ import annotations

from collections.abc import Callable

from lockstep.sim.cost.expert_balance import spread_of
from lockstep.sim.cost.experts import expected_max_load
from lockstep.sim.cost.hardware import GpuSpec, all_gather_of
from lockstep.sim.cost.models import ACTIVATION_BYTES, ModelSpec, ceil_div
from lockstep.sim.cost.parallel import Parallelism

FP8_SCALE_TOKENS = 128  # values that share a float32 scale in a row dispatched as fp8
SCALE_BYTES = 4


class Exchange:
    """Collectives of one pass.

    Args:
        fp8: rows are dispatched to experts as fp8 with scales, as they are wanted there; combined they are bf16.
        rate: gives a rate or latency by name and notes that it was used.
        all_reduce_us: of so many bytes over all GPUs of the stage.
    """

    def __init__(
        self,
        model: ModelSpec,
        gpu: GpuSpec,
        split: Parallelism,
        *,
        fp8: bool,
        rate: Callable[[str], float],
        all_reduce_us: Callable[[float], float],
    ) -> None:
        self._split, self._experts = split, model.experts
        self._all_reduce_us = all_reduce_us
        self._row_bytes = model.hidden * ACTIVATION_BYTES
        self._layers = model.layers
        self._a2a_layers = model.moe_layers if split.moe_a2a else 0
        self.lines = {n: all_gather_of(gpu, n) for n in sorted({split.attention_tp, split.tp} - {1})}
        if split.moe_a2a:
            self._dispatch_bytes = float(self._row_bytes)
            if fp8:
                self._dispatch_bytes = model.hidden * (1.0 + SCALE_BYTES / FP8_SCALE_TOKENS)
            self._lines_of = {
                name: tuple(
                    (rate(f"{name}{mode}_us"), rate(f"{name}{gbs}_gbs") * 1e3)
                    for mode, gbs in (("_latency", ""), ("_low_latency", "_low_latency"))
                )
                for name in ("dispatch", "combine")
            }
        other = self._layers - self._a2a_layers
        if split.attention_dp > 1:
            self.calls = 2 * self._layers * (2 if split.attention_tp > 1 else 1)
        else:
            self.calls = 2 * other + 4 * self._a2a_layers

    @property
    def operations(self) -> list[tuple[str, int]]:
        """What ranks do together in a pass, and how many of them."""
        found = [(name, gpus) for gpus in self.lines for name in ("all_gather", "reduce_scatter")]
        if self._split.attention_dp == 1 and self._layers > self._a2a_layers:
            found.append(("all_reduce", self._split.tp))
        return found + [(name, self._split.ep) for name in ("dispatch", "combine") if self._a2a_layers]

    def terms_us(
        self, tokens: int, own_tokens: int, ratio: Callable[[str, int, int], float] | None = None
    ) -> dict[str, float]:
        """Return the time of all collectives of a pass, logits aside, by kind.

        Args:
            own_tokens: those of the shard with the most; without shards, all.
            ratio: by what to multiply an operation among so many GPUs of the rows of so many tokens.
        """
        split, terms = self._split, {"all_gather": 0.0, "reduce_scatter": 0.0}
        other = self._layers - self._a2a_layers
        for name in terms:

            def once_us(rows: int, gpus: int, name: str = name) -> float:
                return self.gather_us(rows, gpus) * (ratio(name, gpus, rows) if ratio and gpus > 1 else 1.0)

            if split.attention_dp > 1:
                terms[name] = self._layers * once_us(own_tokens, split.attention_tp)
                terms[name] += other * once_us(tokens, split.tp)
            else:
                terms[name] = self._a2a_layers * once_us(tokens, split.tp)
        if split.attention_dp == 1:
            reduce_us = self._all_reduce_us(tokens * self._row_bytes)
            terms["all_reduce"] = 2 * other * reduce_us * (ratio("all_reduce", split.tp, tokens) if ratio else 1.0)
        if self._a2a_layers:
            rows = ceil_div(own_tokens, split.attention_tp)
            for name in ("dispatch", "combine"):
                terms[name] = self._a2a_layers * self.all_to_all_us(name, rows, tokens)
        return terms

    def gather_us(self, tokens: float, gpus: int) -> float:
        """Return the time in which `gpus` GPUs gather `tokens` rows from each other, or reduce and scatter them."""
        if gpus == 1:
            return 0.0
        line = self.lines[gpus]
        return line.latency_us + (gpus - 1) / gpus * tokens * self._row_bytes / (line.gbs * 1e3)

    def all_to_all_us(self, name: str, rows: int, tokens: int) -> float:
        """Return the time to dispatch or combine once, for `rows` rows of one rank and `tokens` of all.

        The faster of two kernels: one sends a row once to every rank that wants it, the other, with less latency, once
        for every expert. Uneven routing makes the fullest rank receive so much more than it would if routing were even.
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
        return min(
            latency + skew * rows * elsewhere * row_bytes / rate,
            low_latency + skew * rows * experts.per_token * row_bytes / low_rate,
        )
