"""The cost model of an engine before calibration: the roofline or measured tables, by pipeline stage."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from lockstep.sim.cost.hardware import GpuSpec
from lockstep.sim.cost.lora import LoraSpec
from lockstep.sim.cost.models import (
    Fp8Activations,
    KvDtype,
    ModelSpec,
    WeightsDtype,
)
from lockstep.sim.cost.parallel import Parallelism, parallelism_of
from lockstep.sim.cost.roofline import roofline_model
from lockstep.sim.cost.stages import PipelineModel, stages_of
from lockstep.sim.cost.tables import BaseModel, MeasuredModel, read_operator_tables


def base_cost_model(
    model: ModelSpec,
    gpu: GpuSpec,
    tp: int | Parallelism = 1,
    *,
    weights_dtype: WeightsDtype | None = None,
    kv_dtype: KvDtype = "bf16",
    operators: Path | None = None,
    fp8_activations: Fp8Activations = "auto",
    lora: LoraSpec | None = None,
) -> BaseModel | PipelineModel:
    """Build the roofline, or with `operators`, a folder of tables, the measured model; a pipeline of several stages.

    Raises:
        CatalogueError: a dtype is not modelled, or an operator table cannot be read.
        CapacityError: the model cannot be split as requested.
    """
    split = parallelism_of(tp)
    stages: list[BaseModel] = []
    for stage in stages_of(model, split):
        one = replace(split, pp=1)
        base = roofline_model(
            stage.model, gpu, one, weights_dtype=weights_dtype, kv_dtype=kv_dtype, fp8_activations=fp8_activations,
            lora=lora,
        )  # fmt: skip
        stages.append(base if operators is None else MeasuredModel(base, read_operator_tables(operators, gpu)))
    return stages[0] if len(stages) == 1 else PipelineModel(stages, split, model, gpu)
