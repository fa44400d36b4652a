"""Cost models: the time of a batch and of the scheduler in microseconds, the KV capacity in bytes, with sources.

model, gpu = load_model("qwen3-8b"), load_gpu("h200")          # lockstep.sim.catalogue
cost = roofline_model(model, gpu)
cost.batch_us(decode_shape(rows=64, context_tokens=2000))      # Duration(mean_us, spread_us)
kv_capacity(model, gpu).tokens
"""

from lockstep.sim.cost.calibration import UNCALIBRATED, CalibratedModel, Calibration
from lockstep.sim.cost.capacity import KvCapacity, MemoryNeeds, kv_capacity
from lockstep.sim.cost.cpu import CpuModel
from lockstep.sim.cost.errors import CalibrationError, CapacityError, CatalogueError
from lockstep.sim.cost.hardware import Constant, GpuSpec
from lockstep.sim.cost.model import BatchShape, ContextBends, CostModel, Duration, decode_shape, extend_shape
from lockstep.sim.cost.models import KvDtype, ModelSpec, WeightsDtype
from lockstep.sim.cost.parallel import Parallelism
from lockstep.sim.cost.roofline import RooflineModel, roofline_model

__all__ = [
    "UNCALIBRATED",
    "BatchShape",
    "CalibratedModel",
    "Calibration",
    "CalibrationError",
    "CapacityError",
    "CatalogueError",
    "Constant",
    "ContextBends",
    "CostModel",
    "CpuModel",
    "Duration",
    "GpuSpec",
    "KvCapacity",
    "KvDtype",
    "MemoryNeeds",
    "ModelSpec",
    "Parallelism",
    "RooflineModel",
    "WeightsDtype",
    "decode_shape",
    "extend_shape",
    "kv_capacity",
    "roofline_model",
]
