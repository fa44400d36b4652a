"""Pipeline parallelism: the layers of a model over stages, and the cost of a batch that goes through them.

    stage 1   | embedding | layers 0 .. 30  | send
    stage 2                                       | layers 31 .. 60 | logits, sampling |

Stages differ by at most one layer, unless one of them drafts, which then has fewer layers (`layers_of`). A model's
counts do not contain the order of its layers, which has little effect: dense feed-forward layers are assumed to come
first (DeepSeek), and kinds of attention to be mixed evenly. A send overlaps with the next batch of its stage: it
lengthens the batch and does not occupy the stage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from msgspec import structs

from lockstep.core.cluster.stage_layers import even_layers, layers_of_stages
from lockstep.sim.cost.errors import CapacityError
from lockstep.sim.cost.hardware import (
    Constant,
    GpuSpec,
    achieved,
    all_gather_of,
    network_of,
    scale_up_gpus,
)
from lockstep.sim.cost.model import BatchShape, CostModel, Duration
from lockstep.sim.cost.models import ACTIVATION_BYTES, WEIGHT_BYTES, ModelSpec, WeightsDtype, check_split
from lockstep.sim.cost.parallel import Parallelism
from lockstep.sim.cost.terms import new_tokens

if TYPE_CHECKING:
    from lockstep.sim.cost.lora import LoraCost

SENT_TENSORS = 2  # the hidden states, and the residual to which they are added later


@dataclass(frozen=True, slots=True)
class Stage:
    """The layers of one stage, as a model of its own, with the ends of the model that the stage has."""

    model: ModelSpec
    is_first: bool  # has the embedding
    is_last: bool  # has the last norm and the logits

    def weights_bytes(self, dtype: WeightsDtype, split: Parallelism) -> int:
        """Return the bytes of weights on one rank of this stage. The first and the last stage have a tied embedding."""
        model, cost, split = self.model, WEIGHT_BYTES[dtype], replace(split, pp=1)
        if self.is_first and self.is_last:
            return model.weights_bytes(dtype, split)
        params = 0.0
        for m in model.matrices(split):
            here = True
            if m.name == "embedding":
                here = self.is_first or (self.is_last and model.tied_embedding)
            elif m.name == "lm_head":
                here = self.is_last
            params += m.params * cost[m.kind] * here
        return int(params) + 2 * (model.vector_params_of(split) - model.hidden * (not self.is_last))

    def logits_bytes(self, dtype: WeightsDtype) -> int:
        """Return the bytes of weights that the logits read, on all ranks: the head, or a tied embedding."""
        name, cost = "embedding" if self.model.tied_embedding else "lm_head", WEIGHT_BYTES[dtype]
        return int(sum(m.params * cost[m.kind] for m in self.model.matrices(Parallelism()) if m.name == name))


def stages_of(model: ModelSpec, split: Parallelism) -> tuple[Stage, ...]:
    """Return the `split.pp` stages in order.

    Raises: CapacityError for a split that is not possible.
    """
    check_split(model, split)
    if split.pp == 1:
        return (Stage(model, True, True),)
    layers = layers_of(model, split)
    kinds = list(_evenly(Counter(full=model.full_layers, sliding=model.sliding_layers, linear=model.linear_layers)))
    stages, start = [], 0
    for number, own in enumerate(layers):
        stop = start + own
        count = Counter(kinds[start:stop])
        dense = max(0, min(stop, model.dense_layers) - start)
        part = replace(
            model,
            full_layers=count["full"],
            sliding_layers=count["sliding"],
            linear_layers=count["linear"],
            dense_layers=dense,
            moe_layers=stop - start - dense if model.moe_layers else 0,
        )
        stages.append(Stage(part, number == 0, number == split.pp - 1))
        start = stop
    return tuple(stages)


def layers_of(model: ModelSpec, split: Parallelism) -> list[int]:
    """Return the layers of each stage: those of `pp_layer_partition`, or a division that makes stages equally busy.

    A stage that drafts is busy for `drafter_layers` more layers; see `core/cluster/stage_layers.py`.
    Raises: CapacityError for a partition that has another number of stages or layers.
    """
    given = split.pp_layer_partition
    if given is not None:
        layers = [int(part) if part.strip().isdecimal() else 0 for part in given.split(",")]
        if len(layers) != split.pp or sum(layers) != model.layers or min(layers) < 1:
            hint = ",".join(map(str, even_layers(model.layers, split.pp)))
            raise CapacityError(
                f"`pp_layer_partition` must be the layers of {split.pp} stages, {model.layers} together, "
                f"got `{given}`\nhint: --pp-layer-partition {hint} is an even division"
            )
        return layers
    return layers_of_stages(model.layers, split.pp, split.drafter_layers, first=split.drafts_first)


def drafter_layers(
    model: ModelSpec, dtype: WeightsDtype, drafter: tuple[ModelSpec, WeightsDtype] | None = None
) -> float:
    """Return to how many layers of a model its logits and one pass of a drafter amount, by the weights that they read.

    Further passes of the drafter, over one token of each row, are not counted: counted in full, they speed up small
    batches of decodes, but prompts and larger batches lose (decision 0098).
    Args:
        drafter: a draft model and the type of its weights; None: a head, which is one layer with the model's logits.
    """
    whole = Parallelism()
    layer = Stage(model, False, False).weights_bytes(dtype, whole) / model.layers
    logits = Stage(model, False, True).logits_bytes(dtype)
    draft = layer + logits
    if drafter is not None:
        small, small_dtype = drafter
        layers = Stage(small, False, False).weights_bytes(small_dtype, whole)
        draft = layers + Stage(small, False, True).logits_bytes(small_dtype)
    return float((logits + draft) / layer)


def _evenly(counts: Counter[str]) -> Iterator[str]:
    """Yield each kind as often as `counts` has it, each time the kind that is furthest behind its share."""
    total, given = sum(counts.values()), Counter[str]()
    for position in range(1, total + 1):
        kind = max(counts, key=lambda k: counts[k] * position / total - given[k])
        given[kind] += 1
        yield kind


@dataclass(frozen=True, slots=True)
class StageLink:
    """The link from one stage to the next: every rank sends its share of the rows, and the receivers gather them."""

    latency_us: Constant
    gbs: Constant
    ranks: int
    gather_latency_us: float
    gather_gbs: float
    row_bytes: int

    @classmethod
    def of(cls, model: ModelSpec, gpu: GpuSpec, split: Parallelism) -> StageLink:
        """Return the link: NVLink or PCIe if all stages are in one scale-up domain, else the network between nodes."""
        inside = split.gpus <= scale_up_gpus(gpu)
        network, latency = network_of(gpu)
        line = all_gather_of(gpu, split.tp) if split.tp > 1 else None
        return cls(
            latency_us=achieved(gpu, "send_latency_us") if inside else latency,
            gbs=achieved(gpu, "send_gbs") if inside else network,
            ranks=split.tp,
            gather_latency_us=line.latency_us if line else 0.0,
            gather_gbs=line.gbs if line else 1.0,
            row_bytes=SENT_TENSORS * model.hidden * ACTIVATION_BYTES,
        )

    def send_us(self, tokens: int) -> float:
        """Return the time from the end of a stage to the start of the next, for the rows of `tokens` tokens."""
        size = tokens * self.row_bytes
        us = self.latency_us.value + size / self.ranks / (self.gbs.value * 1e3)
        if self.ranks > 1:
            us += self.gather_latency_us + (self.ranks - 1) / self.ranks * size / (self.gather_gbs * 1e3)
        return us


class StageModel(CostModel, Protocol):
    """The cost model of a stage: a model of one GPU group, for some of the layers."""

    @property
    def model(self) -> ModelSpec:
        """The model with the layers of the stage alone."""
        ...

    @property
    def lora(self) -> LoraCost | None:
        """The cost of adapters; None without them."""
        ...

    @property
    def collectives(self) -> int:
        """The number of collectives in one forward pass."""
        ...

    def collectives_us(self, tokens: int) -> float:
        """Return the part of `batch_us` that is collectives, for a batch of `tokens` new tokens."""
        ...

    def terms_us(self, shape: BatchShape) -> dict[str, float]:
        """Return the time of a batch by term; the values sum to `batch_us`."""
        ...


# mechanism: chunk-of-equal-cost (simulated)
class PipelineModel:
    """Cost of a batch in a pipeline: `batch_us` for a batch alone in it, `stage_us` if batches share the stages."""

    def __init__(self, stages: Sequence[StageModel], split: Parallelism, model: ModelSpec, gpu: GpuSpec) -> None:
        self.stages, self.split, self.model, self.gpu = tuple(stages), split, model, gpu
        self.tp, self.shards = split.tp, split.attention_dp
        self.link = StageLink.of(model, gpu, split)
        self.factor = 1.0
        self.collectives = sum(stage.collectives for stage in stages)

    def scaled(self, factor: float) -> PipelineModel:
        """Return a copy with every time multiplied by `factor`."""
        other = PipelineModel(self.stages, self.split, self.model, self.gpu)
        other.factor = self.factor * factor
        return other

    def mapped(self, change: Callable[[StageModel, int], StageModel]) -> PipelineModel:
        """Return a copy with each stage replaced by `change(stage, number)`."""
        stages = [change(stage, number) for number, stage in enumerate(self.stages)]
        return PipelineModel(stages, self.split, self.model, self.gpu).scaled(self.factor)

    def stage_us(self, shape: BatchShape) -> list[float]:
        """Return the time of each stage."""
        return [stage.batch_us(seen).mean_us * self.factor for stage, seen in self._by_stage(shape)]

    def _by_stage(self, shape: BatchShape) -> list[tuple[StageModel, BatchShape]]:
        """Return each stage with the shape that it runs: only the last stage samples."""
        inner = structs.replace(shape, sampled_rows=0)
        return [*((stage, inner) for stage in self.stages[:-1]), (self.stages[-1], shape)]

    def send_us(self, tokens: int) -> float:
        """Return the time to send rows of `tokens` tokens to the next stage, or sampled tokens back to the first."""
        return self.link.send_us(tokens) * self.factor

    def batch_us(self, shape: BatchShape) -> Duration:
        """Return the time of one forward pass and its sampling, if no other batch occupies a stage."""
        tokens = new_tokens(shape)
        if not tokens:
            return Duration(0.0)
        return Duration(sum(self.stage_us(shape)) + (len(self.stages) - 1) * self.send_us(tokens))

    def collectives_us(self, tokens: int) -> float:
        """Return the time of the collectives inside stages, the gathering of logits excluded, for `tokens` tokens."""
        return sum(stage.collectives_us(tokens) for stage in self.stages) * self.factor

    def terms_us(self, shape: BatchShape) -> dict[str, float]:
        """Return the time by term, all stages together, with sends as `send`; the values sum to `batch_us`."""
        tokens = new_tokens(shape)
        if not tokens:
            return {}
        terms: dict[str, float] = {}
        for stage, seen in self._by_stage(shape):
            for name, us in stage.terms_us(seen).items():
                terms[name] = terms.get(name, 0.0) + us * self.factor
        terms["send"] = (len(self.stages) - 1) * self.send_us(tokens)
        return terms

    def describe(self) -> dict[str, Any]:
        """Return the description of the first stage, with the figures of all stages and the constants of the link."""
        described = self.stages[0].describe()
        for key in ("extrapolated", "without_table"):
            if key in described:
                described[key] = sorted({name for stage in self.stages for name in stage.describe()[key]})
        if "lora" in described:
            parts = [stage.lora for stage in self.stages if stage.lora is not None]
            described["lora"]["kernels"] = sum(part.kernels for part in parts)
            described["lora"]["slot_bytes"] = max(part.slot_bytes for part in parts)
        described["model"] = {"name": self.model.name, "source": self.model.source, "params": self.model.params}
        described["constants"] = {
            **{name: constant for stage in self.stages for name, constant in stage.describe()["constants"].items()},
            "send_latency_us": {"value": self.link.latency_us.value, "source": self.link.latency_us.source},
            "send_gbs": {"value": self.link.gbs.value, "source": self.link.gbs.source},
        }
        return {
            **described,
            **self.split.describe(),
            "kernels": sum(stage.describe()["kernels"] for stage in self.stages),
            "stage_layers": [stage.model.layers for stage in self.stages],
            **({} if self.factor == 1.0 else {"factor": self.factor}),
        }
