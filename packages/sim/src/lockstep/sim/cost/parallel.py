"""The layout of one engine over GPUs: tensor, expert, attention-data and pipeline parallelism.

`tp` GPUs form one stage, as in SGLang; `ep` and `attention_dp` divide these GPUs and add none. An engine has `pp`
stages of `tp` GPUs:

    tp 8, ep 4, attention_dp 2     attention: 2 shards of 4 GPUs, each with its own rows and their KV
                                   experts:   4 groups of 2 GPUs; a group holds a quarter of the experts, each GPU of it
                                              half of their width
                                   the rest (dense feed-forward, logits): over all 8
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from lockstep.sim.cost.errors import CapacityError

EPLB_INTERVAL = 1000  # SGLang's eplb_rebalance_num_iterations


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallelism:
    """The GPUs of an engine, and the assumptions about its experts.

    Raises: CapacityError for values that contradict each other or are out of range.
    """

    tp: int = 1  # GPUs of a stage
    ep: int = 1  # groups that the experts are divided among
    attention_dp: int = 1  # shards that the rows, and so KV, are divided among
    pp: int = 1  # stages that the layers are divided among
    moe_a2a: bool = False  # rows go to their experts by all-to-all instead of all-gather; needs ep = tp
    expert_cv: float = 0.0  # standard deviation of the experts' popularity over its mean; 0: routing is even
    eplb: bool = False  # experts are placed by their load, and moved as it changes; see `expert_balance.py`
    redundant_experts: int = 0  # slots of a layer for copies of experts, all ranks together; with `eplb` only
    eplb_interval: int = EPLB_INTERVAL  # passes between two rebalancings
    expert_drift: float = 0.0  # share of the experts whose popularity is drawn again in the next interval
    measured: tuple[float, float] | None = None  # load_cv and slot_cv of a placement: `expert_balance.Spread`
    pp_layer_partition: str | None = None  # layers of each stage, such as `17,17,17,13`; None: see `stages.layers_of`
    drafter_layers: float = 0.0  # layers of equal cost to the work of the stage that drafts beside its layers, if any
    drafts_first: bool = False  # the first stage drafts, with a draft model, and not the last one, with a head

    def __post_init__(self) -> None:
        for name in COUNTS:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                option = f"--{name.replace('_', '-')}"
                raise CapacityError(f"`{name}` must be at least 1, got `{value}`\nhint: leave out {option}")
        for name, what in (("ep", "experts are split"), ("attention_dp", "rows are split")):
            value = getattr(self, name)
            if self.tp % value:
                raise CapacityError(
                    f"{name} {value} does not divide tp {self.tp}, the GPUs over which {what}\n"
                    f"hint: --{name.replace('_', '-')} {', '.join(map(str, divisors(self.tp)))}"
                )
        if self.moe_a2a and (self.ep != self.tp or self.tp == 1):
            raise CapacityError(
                f"`moe_a2a` needs whole experts on every GPU, so ep = tp > 1, got ep {self.ep} and tp {self.tp}\n"
                f"hint: --ep {max(self.tp, 2)}{'' if self.tp > 1 else ' --tp 2'}, or leave out --moe-a2a"
            )
        if not 0.0 <= self.expert_cv <= EXPERT_CV_MAX:
            raise CapacityError(
                f"`expert_cv` must be from 0 to {EXPERT_CV_MAX:g}, got `{self.expert_cv}`\nhint: 0 is even routing"
            )
        self._check_eplb()

    def _check_eplb(self) -> None:
        if self.redundant_experts < 0:
            raise CapacityError(f"`redundant_experts` must be at least 0, got `{self.redundant_experts}`")
        if self.eplb_interval < 1:
            raise CapacityError(f"`eplb_interval` must be at least 1 pass, got `{self.eplb_interval}`")
        if not 0.0 <= self.expert_drift <= 1.0:
            raise CapacityError(f"`expert_drift` must be from 0 to 1, got `{self.expert_drift}`")
        if not self.eplb:
            usual = {"redundant_experts": 0, "eplb_interval": EPLB_INTERVAL, "expert_drift": 0.0}
            for name, meaningless in usual.items():
                value = getattr(self, name)
                if value != meaningless:
                    option = f"--{name.replace('_', '-')}"
                    raise CapacityError(f"`{name}` is for --eplb, got `{value}` without it\nhint: leave out {option}")
        elif self.ep == 1 or not self.expert_cv:
            raise CapacityError(
                f"`eplb` has nothing to balance with ep {self.ep} and expert_cv {self.expert_cv:g}\n"
                "hint: --ep above 1 and --expert-cv above 0, or leave out --eplb"
            )

    @property
    def gpus(self) -> int:
        """GPUs of the engine."""
        return self.tp * self.pp

    @property
    def attention_tp(self) -> int:
        """GPUs that the heads of one shard are split over."""
        return self.tp // self.attention_dp

    @property
    def expert_tp(self) -> int:
        """GPUs that the width of one expert is split over."""
        return self.tp // self.ep

    @property
    def is_plain(self) -> bool:
        """Whether the layout is tensor parallelism alone."""
        return not self.describe()

    def describe(self) -> dict[str, Any]:
        """Return the options that differ from their defaults, `tp` excluded: empty for plain tensor parallelism."""
        return {name: getattr(self, name) for name in BESIDES_TP if self._is_set(name)}

    def _is_set(self, name: str) -> bool:
        if name == "pp_layer_partition" and self.pp == 1:
            return False  # a part of a pipeline
        return bool(getattr(self, name) != getattr(USUAL, name))

    def __str__(self) -> str:
        """Return the layout as text, such as `tp 8, ep 8, attention_dp 4`."""
        named = self.describe().items()
        words = [
            name if value is True else f"{name} {value if isinstance(value, str) else f'{value:g}'}"
            for name, value in named
        ]
        return ", ".join([f"tp {self.tp}", *words])


COUNTS = ("tp", "ep", "attention_dp", "pp")  # the fields that are counts of at least 1
BESIDES_TP = tuple(
    field.name
    for field in fields(Parallelism)
    if field.name not in ("tp", "drafter_layers", "drafts_first", "measured")
)
EXPERT_CV_MAX = 8.0
USUAL = Parallelism()


def parallelism_of(tp: int | Parallelism) -> Parallelism:
    """Return `tp` itself if it is a layout, else the layout of `tp` GPUs with plain tensor parallelism."""
    return tp if isinstance(tp, Parallelism) else Parallelism(tp=tp)


def divisors(count: int) -> list[int]:
    """Return the whole numbers that divide `count`, ascending."""
    return [n for n in range(1, count + 1) if count % n == 0]
