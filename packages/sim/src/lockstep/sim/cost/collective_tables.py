"""The operation and the bytes of each row in a table of collectives.

Sizes in the tables of ai-dynamo/aiconfigurator count elements, not bytes: collector/network/collect_nccl.py divides by
the element's size, and collect_all_reduce.py sends a tensor of that many elements. The tables confirm it: beyond the
sizes of its own kernel `custom_allreduce` falls back to NCCL, and its times there are within a percent of those of the
all-reduce in `nccl` at the same number.

`nccl` has four operations. The column `op_name` names them. In a table without this column, the rows of one dtype,
number of GPUs and size are in the order in which they were measured (MEASURED_ORDER).
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.sim.cost.errors import CatalogueError

Columns = dict[str, NDArray[Any]]

MEASURED_ORDER = ("all_gather", "alltoall", "reduce_scatter", "all_reduce")
ELEMENT_BYTES = {"half": 2, "float16": 2, "bfloat16": 2, "int8": 1, "fp8": 1, "float": 4, "float32": 4}
DTYPE_COLUMNS = {"custom_allreduce": "allreduce_dtype", "nccl": "nccl_dtype"}
HALF_BYTES = 2  # bytes of an element if no column names its dtype


def add_operations(path: Path, operator: str, columns: Columns) -> None:
    """Add the columns `operation`, `element_bytes` and `message_bytes` (of all ranks together) to a collective's rows.

    Raises: CatalogueError for a dtype of unknown size, and for rows with operations that cannot be determined.
    """
    rows = len(columns["message_size"])
    columns["element_bytes"] = _element_bytes(path, columns.get(DTYPE_COLUMNS[operator]), rows)
    columns["message_bytes"] = columns["message_size"] * columns["element_bytes"]
    if operator == "custom_allreduce":
        columns["operation"] = np.full(rows, "all_reduce")
    elif "op_name" in columns:
        columns["operation"] = columns["op_name"]
    else:
        columns["operation"] = np.array(_operations_by_order(path, columns))


def _element_bytes(path: Path, dtypes: NDArray[Any] | None, rows: int) -> NDArray[np.float64]:
    if dtypes is None:
        return np.full(rows, float(HALF_BYTES))
    for row, dtype in enumerate(dtypes.tolist(), start=2):
        if dtype not in ELEMENT_BYTES:
            raise CatalogueError(
                f"{path}, row {row}: the dtype of a collective must be one of {', '.join(ELEMENT_BYTES)}, got `{dtype}`"
            )
    return np.array([ELEMENT_BYTES[dtype] for dtype in dtypes.tolist()], np.float64)


def _operations_by_order(path: Path, columns: Columns) -> list[str]:
    rows = len(columns["message_size"])
    dtypes = columns["nccl_dtype"].tolist() if "nccl_dtype" in columns else ["half"] * rows
    keys = list(zip(dtypes, columns["num_gpus"].tolist(), columns["message_size"].tolist(), strict=True))
    counts = Counter(keys)
    if set(counts.values()) == {1}:
        return ["all_reduce"] * rows
    seen: Counter[Any] = Counter()
    operations = []
    for row, key in enumerate(keys, start=2):
        if counts[key] != len(MEASURED_ORDER):
            dtype, gpus, size = key
            raise CatalogueError(
                f"{path}, row {row}: {counts[key]} rows of {size:g} {dtype} elements on {gpus:g} GPUs, and no column "
                f"`op_name` names their operations\nhint: add `op_name`, one of {', '.join(MEASURED_ORDER)}"
            )
        operations.append(MEASURED_ORDER[seen[key]])
        seen[key] += 1
    return operations
