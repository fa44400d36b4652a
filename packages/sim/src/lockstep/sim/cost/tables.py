"""Operator tables: measured kernel times on a GPU, and a roofline that they correct shape by shape.

tables = read_operator_tables(Path("aic_ops"), gpu)          # the files of this GPU
cost = MeasuredModel(roofline_model(model, gpu, tp), tables)       # a CostModel
cost.batch_us(shape)
cost.extrapolated                                            # operators with shapes that were not measured

A table has times of single shapes. Each row gives the ratio of the measured time to the roofline's time of the same
operator. For other shapes the logarithm of that ratio is interpolated, weighted by inverse squared distance, over the
NEIGHBOURS rows that are nearest in the logarithms of the shape. The shape of a row gets exactly the row's latency. Far
from all rows the result follows the roofline, scaled. Such a shape is reported: it is more than FAR_OCTAVES from the
nearest row, or outside the table.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.sim.cost.collective_tables import DTYPE_COLUMNS, add_operations
from lockstep.sim.cost.errors import CatalogueError
from lockstep.sim.cost.hardware import GpuSpec
from lockstep.sim.cost.lora import LoraCost
from lockstep.sim.cost.model import BatchShape
from lockstep.sim.cost.models import (
    ACTIVATION_BYTES,
    WEIGHT_BYTES,
    AttentionShape,
    LatentAttention,
)
from lockstep.sim.cost.roofline import RooflineModel
from lockstep.sim.cost.terms import TermSum, TermUs, new_tokens

Float64s = NDArray[np.float64]
Bools = NDArray[np.bool_]
Columns = dict[str, NDArray[Any]]
NEIGHBOURS = 6
FAR_OCTAVES = 1.0  # a factor of two in one dimension
EXACT = 1e-6  # squared octaves; a shape nearer than this to a row is the row's own shape
HINT = "hint: docs/cost-models.md, section 3, describes operator tables"
MS = 1e3  # latencies in tables are milliseconds
# Columns that a table of each operator must have, besides `latency` in milliseconds. Other columns are ignored.
OPERATORS: dict[str, tuple[str, ...]] = {
    "gemm": ("gemm_dtype", "m", "n", "k"),
    "moe": (
        "moe_dtype", "num_tokens", "hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size",
    ),
    "context_attention": ("batch_size", "isl", "num_heads", "num_key_value_heads", "head_dim", "kv_cache_dtype"),
    "generation_attention": ("batch_size", "step", "num_heads", "num_key_value_heads", "head_dim", "kv_cache_dtype"),
    "context_mla": ("batch_size", "isl", "num_heads", "kv_cache_dtype"),
    "generation_mla": ("batch_size", "step", "num_heads", "kv_cache_dtype"),
    "custom_allreduce": ("num_gpus", "message_size"),
    "nccl": ("num_gpus", "message_size"),
}  # fmt: skip
TEXT_COLUMNS = (
    "gemm_dtype", "moe_dtype", "kv_cache_dtype", "attn_dtype", "distribution", "backend", "allreduce_dtype",
    "nccl_dtype", "op_name",
)  # fmt: skip
# Names of dtypes in the tables, preferred ones first.
GEMM_DTYPES = {"bf16": ("bfloat16", "float16"), "fp8": ("fp8_block", "fp8"), "fp4": ("nvfp4",)}
GEMM_WEIGHT_BYTES = {"bf16": 2.0, "fp8": 1.0, "fp4": WEIGHT_BYTES["nvfp4"]["linear"]}
MOE_DTYPES = {
    "bf16": ("bfloat16", "float16"),
    "fp8": ("fp8_block", "fp8"),
    "mxfp4": ("w4a16_mxfp4",),
    "nvfp4": ("nvfp4",),
    "int4": ("int4_wo",),
}
TABLE_KV_DTYPES = {"bf16": ("bfloat16", "float16"), "fp8": ("fp8",)}
DISTRIBUTION = "power_law_1.01"  # distribution of tokens over experts, if a table has several: real routing is uneven


@dataclass(frozen=True, eq=False)
class TableFile:
    """The rows of one operator, read from one file."""

    operator: str
    file: str
    sha256: str
    columns: Columns
    latency_us: Float64s


@dataclass(frozen=True, eq=False)
class OperatorTables:
    """All tables of one GPU."""

    gpu: str
    files: tuple[TableFile, ...]

    def of(self, operator: str) -> TableFile | None:
        """Return the table of an operator, None if there is none."""
        return next((table for table in self.files if table.operator == operator), None)

    def describe(self) -> list[dict[str, Any]]:
        """Return operator, name, digest and number of rows of each file, for a run's metrics.json."""
        return [
            {"operator": t.operator, "file": t.file, "sha256": t.sha256, "rows": len(t.latency_us)} for t in self.files
        ]


def read_operator_tables(folder: Path, gpu: GpuSpec) -> OperatorTables:
    """Read the tables of `gpu` among the CSV files of a folder, plain or gzipped.

    A file is called `OPERATOR_perf.csv` or `OPERATOR.csv`. Words that each end in `__` may precede the name; the first
    word is then the GPU, and files of other GPUs are skipped: `h100_sxm__gemm__sglang_0.5.14__gemm_perf.csv.gz`.
    If an operator has several files, the last by name is read, which is the newest version.
    Raises: CatalogueError if there is no table of this GPU, or a file cannot be read; the message has file, row and
        column.
    """
    return _read_folder(folder, gpu.name, gpu.aliases, folder.absolute())


@cache
def _read_folder(folder: Path, gpu: str, aliases: tuple[str, ...], _place: Path) -> OperatorTables:
    """Read a folder. `_place` is its absolute path: a part of the cache's key, because `folder` may be relative."""
    found: dict[str, Path] = {}
    try:
        paths = sorted(path for path in folder.iterdir() if path.name.endswith((".csv", ".csv.gz")))
    except OSError as error:
        raise CatalogueError(f"{folder}: {error.strerror or error}\nhint: a folder with operator tables") from error
    for path in paths:
        words = path.name.removesuffix(".gz").removesuffix(".csv").removesuffix("_perf").split("__")
        if words[-1] in OPERATORS and (len(words) == 1 or _is_gpu(words[0], gpu, aliases)):
            found[words[-1]] = path
    if not found:
        raise CatalogueError(
            f"{folder}: no operator table of {gpu}\n"
            f"hint: files are called OPERATOR.csv, with OPERATOR one of {', '.join(OPERATORS)}"
        )
    return OperatorTables(gpu, tuple(_read(path, operator) for operator, path in sorted(found.items())))


def _is_gpu(word: str, gpu: str, aliases: tuple[str, ...]) -> bool:
    return word.lower().replace("_", "-") in (gpu.lower(), gpu.lower().removesuffix("-sxm"), *aliases)


def _read(path: Path, operator: str) -> TableFile:
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.name.endswith(".gz") else data).decode()
    except OSError as error:
        raise CatalogueError(f"{path}: cannot be read: {error.strerror or error}\n{HINT}") from error
    except (EOFError, zlib.error, UnicodeDecodeError) as error:
        raise CatalogueError(f"{path}: not a CSV file, plain or gzipped: {error}\n{HINT}") from error
    header, rows = _rows(path, text)
    for name in (*OPERATORS[operator], "latency"):
        if name not in header:
            raise CatalogueError(f"{path}: column `{name}` is missing\n{HINT}")
    if not rows:
        raise CatalogueError(f"{path}: a header and no rows\n{HINT}")
    short = next((number for number, row in enumerate(rows, start=2) if len(row) != len(header)), None)
    if short is not None:
        found = len(rows[short - 2])
        raise CatalogueError(f"{path}, row {short}: expected {len(header)} columns, got {found}\nhint: is it cut off?")
    columns: Columns = {}
    wanted = {*OPERATORS[operator], "latency", "window_size", *TEXT_COLUMNS}
    for name, values in zip(header, zip(*rows, strict=True), strict=True):
        if name in TEXT_COLUMNS:
            columns[name] = np.array(values)
        elif name in wanted:
            columns[name] = _numbers(path, name, values)
    latency_us = columns.pop("latency") * MS
    if operator in DTYPE_COLUMNS:
        add_operations(path, operator, columns)
    return TableFile(operator, path.name, hashlib.sha256(data).hexdigest(), columns, latency_us)


def _numbers(path: Path, name: str, values: Sequence[str]) -> Float64s:
    try:
        numbers = np.array(values, np.float64)
    except ValueError:
        numbers = np.array([_float(value) for value in values])
    good = np.isfinite(numbers) & ((numbers > 0) | (name == "window_size"))  # 0 and -1: no window
    if not good.all():
        row = int(np.argmin(good))
        raise CatalogueError(
            f"{path}, row {row + 2}: `{name}` must be a number above 0, got `{values[row]}`\nhint: leave the row out"
        )
    return numbers


def _float(text: str) -> float:
    """Return the number that a text spells, NaN if it spells none."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def _rows(path: Path, text: str) -> tuple[list[str], list[list[str]]]:
    """Return the header and all other lines of a CSV file."""
    try:
        lines = list(csv.reader(text.splitlines()))
    except csv.Error as error:
        raise CatalogueError(f"{path}: not a CSV file: {error}\n{HINT}") from error
    if not lines:
        raise CatalogueError(f"{path}: is empty\n{HINT}")
    return lines[0], lines[1:]


class Ratios:
    """The ratio measured / roofline as a function of the shape, interpolated between the rows of a table."""

    def __init__(self, shapes: Float64s, ratios: Float64s) -> None:
        """`shapes` is float64 [rows, dimensions], above 0; `ratios` float64 [rows], above 0."""
        self._points = np.log2(shapes)
        self._logs = np.log(ratios)
        self._low, self._high = self._points.min(axis=0), self._points.max(axis=0)

    def at(self, shapes: Float64s) -> tuple[Float64s, Bools]:
        """Return for each shape the logarithm of the ratio, and whether the shape is far from all measured shapes."""
        wanted = np.log2(np.atleast_2d(shapes))
        logs, far = np.empty(len(wanted)), np.empty(len(wanted), np.bool_)
        neighbours = min(NEIGHBOURS, len(self._logs))
        for i, point in enumerate(wanted):
            distances = ((self._points - point) ** 2).sum(axis=1)
            nearest = np.argpartition(distances, neighbours - 1)[:neighbours]
            squared = distances[nearest]
            if squared.min() < EXACT:
                logs[i] = self._logs[nearest[squared < EXACT]].mean()
            else:
                logs[i] = (self._logs[nearest] / squared).sum() / (1.0 / squared).sum()
            outside = (point < self._low - 1e-9).any() or (point > self._high + 1e-9).any()
            far[i] = outside or squared.min() > FAR_OCTAVES**2
        return logs, far


class RatioCurve:
    """A ratio as a function of one number, stored at half octaves and interpolated between them."""

    def __init__(self, ratio_of: Callable[[Float64s], tuple[Float64s, Bools]], octaves: int) -> None:
        self._octaves = np.arange(0.0, octaves + 0.5, 0.5)
        self._logs, self._far = ratio_of(2.0**self._octaves)

    def at(self, value: float) -> tuple[float, bool]:
        """Return the ratio, and whether `value` is far from all measured values."""
        octave = min(max(math.log2(value), 0.0), float(self._octaves[-1]))
        log = float(np.interp(octave, self._octaves, self._logs))
        return math.exp(log), bool(self._far[round(2 * octave)]) or value > 2.0 ** self._octaves[-1]


RatiosOfTwo = Callable[[Float64s, Float64s], tuple[Float64s, Bools]]


class Grid:
    """A ratio as a function of two numbers, stored at powers of two and interpolated bilinearly.

    It stores plain floats instead of arrays, because it is read for one pair of numbers per batch.
    """

    def __init__(self, ratio_of: RatiosOfTwo, x_max: int, y_max: int) -> None:
        x, y = np.meshgrid(np.arange(x_max + 1.0), np.arange(y_max + 1.0), indexing="ij")
        logs, far = ratio_of(np.exp2(x.ravel()), np.exp2(y.ravel()))
        self._x_max, self._y_max = x_max, y_max
        self._along: dict[float, tuple[list[float], list[bool]]] = {}  # by x
        self._logs: list[list[float]] = logs.reshape(x.shape).tolist()
        self._far: list[list[bool]] = far.reshape(x.shape).tolist()

    def at(self, x: float, y: float) -> tuple[float, bool]:
        """Return the ratio, and whether (x, y) is far from all measured shapes. Outside the grid its edge applies."""
        along = self._along.get(x)
        if along is None:
            along = self._along[x] = self._along_y(x)
        logs, far = along
        v = math.log2(y) if y > 1.0 else 0.0
        if v >= self._y_max:
            return math.exp(logs[-1]), True
        j = int(v)
        t = v - j
        return math.exp((1.0 - t) * logs[j] + t * logs[j + 1]), far[j + (t > 0.5)]

    def _along_y(self, x: float) -> tuple[list[float], list[bool]]:
        u = min(max(math.log2(x), 0.0), self._x_max)
        i = min(int(u), self._x_max - 1)
        s = u - i
        logs = [(1.0 - s) * low + s * high for low, high in zip(self._logs[i], self._logs[i + 1], strict=True)]
        beyond = math.log2(x) > self._x_max
        return logs, [beyond or far for far in self._far[i + (s > 0.5)]]


TOKEN_OCTAVES = 16  # curves along tokens end at 65,536 tokens of a batch
ROW_OCTAVES = 11
CONTEXT_OCTAVES = 18
PROMPT_OCTAVES = 15


class MeasuredModel(TermSum):
    """A roofline with terms corrected by operator tables. Terms without a table are unchanged: see `without_table`.

    Real kernels are not monotone: a batch of 65 rows may take less time than one of 64. So may batches here.
    """

    def __init__(self, base: RooflineModel, tables: OperatorTables, distribution: str = DISTRIBUTION) -> None:
        if tables.gpu != base.gpu.name:
            raise CatalogueError(f"the operator tables are of {tables.gpu}, the model runs on {base.gpu.name}")
        self.base, self.tables, self.distribution = base, tables, distribution
        self.model, self.gpu, self.tp, self.split = base.model, base.gpu, base.tp, base.split
        self.extrapolated: set[str] = set()  # operators evaluated for a shape far from every row of their table
        self.without_table: list[str] = []
        curves = self._gemm_curves()
        experts = self._expert_curve()
        self._collective_curves = self._curves_of_collectives()
        decode, extend = self._attention_grids()
        measured = {name: self._by_tokens(name, curve) for name, curve in curves.items()}
        if experts is not None:
            measured["experts"] = self._by_tokens("experts", experts)
        measured |= self._measured_collectives()
        if decode is not None:
            measured["attention_decode"] = self._by_decode_rows(decode)
        if extend is not None:
            measured["attention_prefill"] = self._by_extend_rows(extend)
        super().__init__(base.with_terms(measured), base.shards, base.launching)

    @property
    def lora(self) -> LoraCost | None:
        """The cost of adapters. It is the roofline's, because no table has their kernels."""
        return self.base.lora

    def describe(self) -> dict[str, Any]:
        """Return the roofline's description, the tables with digests, and operators without a table or far from it."""
        return {
            **self.base.describe(),
            "kind": "measured",
            "tables": self.tables.describe(),
            "distribution": self.distribution,
            "without_table": self.without_table,
            "extrapolated": sorted(self.extrapolated),
        }

    def forget(self) -> None:
        """Drop cached sums, and the names of extrapolated operators."""
        super().forget()
        self.extrapolated.clear()

    # --- terms: the time of the roofline times the ratio of a table ---------------------------------------------------

    def _by_tokens(self, name: str, curve: RatioCurve) -> TermUs:
        """Return the term of a matrix or of the experts, corrected by a curve along the tokens that it multiplies."""
        roofline_us = self.base.term(name).us

        def us(batch: BatchShape, own: BatchShape) -> float:
            ratio, far = curve.at(self.base.seen_tokens(name, new_tokens(batch), new_tokens(own)))
            if far:
                self.extrapolated.add(name)
            return roofline_us(batch, own) * ratio

        return us

    def _measured_collectives(self) -> dict[str, TermUs]:
        """Return the terms of all collectives by name; a collective without a table is not corrected."""
        exchange = self.base.exchange
        if exchange is not None:
            names = [term.name for term in self.base.terms if term.is_collective]
            return {name: exchange.term_us(name, self._collective_ratio) for name in names}
        if self.tp == 1:
            return {}
        roofline_us = self.base.term("all_reduce").us

        def us(batch: BatchShape, own: BatchShape) -> float:
            return roofline_us(batch, own) * self._collective_ratio("all_reduce", self.tp, new_tokens(batch))

        return {"all_reduce": us}

    def _by_decode_rows(self, grid: Grid) -> TermUs:
        """Return the term of decode attention, corrected by a grid over rows and their mean context."""
        roofline_us = self.base.decode_attention_us

        def us(batch: BatchShape, own: BatchShape) -> float:
            ratio, far = grid.at(own.decode_rows, max(own.decode_context_tokens / own.decode_rows, 1.0))
            if far:
                self.extrapolated.add("attention_decode")
            return roofline_us(batch, own) * ratio

        return us

    def _by_extend_rows(self, grid: Grid) -> TermUs:
        """Return the term of extend attention, corrected by a grid over rows and their mean new tokens."""
        roofline_us = self.base.extend_attention_us

        def us(batch: BatchShape, own: BatchShape) -> float:
            ratio, far = grid.at(own.extend_rows, own.extend_tokens / own.extend_rows)
            # Tables have whole prompts only, so attention to a long context before the new tokens is an extrapolation.
            if far or own.extend_context_tokens > own.extend_tokens:
                self.extrapolated.add("attention_prefill")
            return roofline_us(batch, own) * ratio

        return us

    # --- tables against the roofline's formulas -----------------------------------------------------------------------

    def _rows(
        self, operator: str, name: str, head_dim: int | None = None, **texts: tuple[str, ...]
    ) -> tuple[Columns, Float64s] | None:
        """Return columns and latencies (us) of an operator's rows that fit the model; None if there are no such rows.

        Args:
            name: the term, which is added to `without_table` if there are no rows.
            head_dim: size of a head; rows with this size are preferred, where the table has some.
            texts: for each text column, the accepted values, preferred ones first. The first value that occurs is
                used. Columns are filtered one after another, because not every pair of dtypes has rows of every size.
        """
        table = self.tables.of(operator)
        if table is not None:
            mask = np.ones(len(table.latency_us), np.bool_)
            if "window_size" in table.columns:
                mask &= table.columns["window_size"] == 0
            if head_dim is not None and (mask & (table.columns["head_dim"] == head_dim)).any():
                mask &= table.columns["head_dim"] == head_dim
            for column, choices in texts.items():
                if column in table.columns:
                    chosen = next((c for c in choices if (mask & (table.columns[column] == c)).any()), choices[0])
                    mask &= table.columns[column] == chosen
            if mask.any():
                return {n: v[mask] for n, v in table.columns.items()}, table.latency_us[mask]
        if name not in self.without_table:
            self.without_table.append(name)
        return None

    def _gemm_curves(self) -> dict[str, RatioCurve]:
        lines = {}
        for m in self.base.gemm_matrices:
            precision = self.base.precision_of(m)
            found = self._rows("gemm", m.name, gemm_dtype=GEMM_DTYPES[precision])
            if found is None:
                continue
            c, latency_us = found
            # The table's weights have the precision of its GEMM.
            table_us = self.base.gemm_us(precision, c["m"], c["k"], c["n"], GEMM_WEIGHT_BYTES[precision])
            ratios = Ratios(np.column_stack([c["m"], c["n"], c["k"]]), latency_us / table_us)

            def ratio_of(tokens: Float64s, m: Any = m, ratios: Ratios = ratios) -> tuple[Float64s, Bools]:
                sizes = (np.full_like(tokens, m.outputs), np.full_like(tokens, m.inputs))
                return ratios.at(np.column_stack([tokens, *sizes]))

            lines[m.name] = RatioCurve(ratio_of, TOKEN_OCTAVES)
        return lines

    def _expert_curve(self) -> RatioCurve | None:
        e = self.model.experts
        if e is None:
            return None
        dtype = self.base.weights_dtype
        if dtype == "fp8" and not self.base.fp8_products:  # tables have fp8 by fp8 only
            self.without_table.append("experts")
            return None
        found = self._rows("moe", "experts", moe_dtype=MOE_DTYPES[dtype], distribution=(self.distribution, "balanced"))
        if found is None:
            return None
        c, latency_us = found
        alike = c["moe_ep_size"] == self.split.ep
        c, latency_us = {name: values[alike] for name, values in c.items()}, latency_us[alike]
        if not len(latency_us):
            self.without_table.append("experts")
            return None
        width = np.ceil(c["inter_size"] / c["moe_tp_size"])
        table_us = self.base.experts_us(
            c["num_tokens"], c["hidden_size"], width, c["topk"], c["num_experts"], self.split.ep
        )
        shapes = np.column_stack([c["num_tokens"], c["hidden_size"], width, c["topk"], c["num_experts"]])
        ratios = Ratios(shapes, latency_us / table_us)
        own = [self.model.hidden, math.ceil(e.ffn / self.split.expert_tp), e.per_token, e.count]

        def ratio_of(tokens: Float64s) -> tuple[Float64s, Bools]:
            return ratios.at(np.column_stack([tokens, *(np.full_like(tokens, value) for value in own)]))

        return RatioCurve(ratio_of, TOKEN_OCTAVES)

    def _curves_of_collectives(self) -> dict[tuple[str, int], RatioCurve]:
        """Return curves along tokens by operation and number of GPUs; operations without one join `without_table`."""
        if self.tp == 1:
            return {}
        exchange = self.base.exchange
        wanted = [("all_reduce", self.tp)] if exchange is None else exchange.operations
        lines = {}
        for operation, gpus in wanted:
            line = self._collective_curve(operation, gpus)
            if line is not None:
                lines[operation, gpus] = line
            elif operation not in self.without_table:
                self.without_table.append(operation)
        return lines

    def _collective_curve(self, operation: str, gpus: int) -> RatioCurve | None:
        """Return the curve of one collective, None without a table. Each size uses the fastest measured kernel."""
        best: dict[float, float] = {}
        for operator in DTYPE_COLUMNS:
            table = self.tables.of(operator)
            if table is None:
                continue
            c = table.columns
            mask = (c["num_gpus"] == gpus) & (c["operation"] == operation)
            if "backend" in c:  # rows of graph replay are preferred, because decodes run in a graph
                graph = np.char.endswith(c["backend"], "graph")
                mask &= graph if (mask & graph).any() else ~graph
            mask &= c["element_bytes"] == ACTIVATION_BYTES
            for size, us in zip(c["message_bytes"][mask].tolist(), table.latency_us[mask].tolist(), strict=True):
                best[size] = min(us, best.get(size, math.inf))
        if not best:
            return None
        sizes = np.array(sorted(best))
        token_bytes = self.base.all_reduce_bytes(1)
        if operation == "all_reduce":
            line_us = [self.base.all_reduce_us(size) for size in sizes]
        else:
            assert self.base.exchange is not None
            line_us = [self.base.exchange.gather_us(size / token_bytes, gpus) for size in sizes]
        ratios = Ratios(sizes[:, None], np.array([best[size] for size in sizes]) / np.array(line_us))
        return RatioCurve(lambda tokens: ratios.at((tokens * token_bytes)[:, None]), TOKEN_OCTAVES)

    def _collective_ratio(self, operation: str, gpus: int, tokens: int) -> float:
        curve = self._collective_curves.get((operation, gpus))
        if curve is None:
            return 1.0
        ratio, far = curve.at(tokens)
        if far:
            self.extrapolated.add(operation)
        return ratio

    def _attention_grids(self) -> tuple[Grid | None, Grid | None]:
        a = self.model.attention
        heads_tp = self.split.attention_tp
        heads = a.heads // heads_tp
        latent = isinstance(a, LatentAttention)
        kv = TABLE_KV_DTYPES[self.base.kv_dtype]
        own: list[float] = [heads]
        if isinstance(a, AttentionShape):
            own += [max(1, a.kv_heads // heads_tp), a.head_dim]

        def shape_of(c: Columns) -> list[Float64s]:
            return [c["num_heads"]] if latent else [c["num_heads"], c["num_key_value_heads"], c["head_dim"]]

        def grid(ratios: Ratios, x_max: int, y_max: int) -> Grid:
            def ratio_of(x: Float64s, y: Float64s) -> tuple[Float64s, Bools]:
                return ratios.at(np.column_stack([x, y, *(np.full_like(x, value) for value in own)]))

            return Grid(ratio_of, x_max, y_max)

        decode = extend = None
        head_dim = None if isinstance(a, LatentAttention) else a.head_dim
        found = self._rows(
            "generation_mla" if latent else "generation_attention", "attention_decode", head_dim, kv_cache_dtype=kv
        )
        if found is not None:
            c, latency_us = found
            context = c["step"] + 1.0
            table_us = self.base.one_layer_decode_us(c["batch_size"] * context, *shape_of(c))
            ratios = Ratios(np.column_stack([c["batch_size"], context, *shape_of(c)]), latency_us / table_us)
            decode = grid(ratios, ROW_OCTAVES, CONTEXT_OCTAVES)
        found = self._rows(
            "context_mla" if latent else "context_attention", "attention_prefill", head_dim,
            kv_cache_dtype=kv, attn_dtype=("bfloat16", "float16", "fp8"),
        )  # fmt: skip
        if found is not None:
            c, latency_us = found
            table_us = self.base.one_layer_extend_us(c["batch_size"], c["isl"], *shape_of(c))
            ratios = Ratios(np.column_stack([c["batch_size"], c["isl"], *shape_of(c)]), latency_us / table_us)
            extend = grid(ratios, ROW_OCTAVES - 3, PROMPT_OCTAVES)
        return decode, extend


BaseModel = RooflineModel | MeasuredModel
"""The cost models of one stage, which a calibration can correct."""


@contextmanager
def unnoted(cost: object) -> Iterator[None]:
    """Context in which a cost model does not record extrapolation, for shapes that are not batches of the run."""
    whole = cost if isinstance(cost, MeasuredModel) else getattr(cost, "base", cost)  # the base of a calibrated model
    models = [one for one in (whole, *getattr(whole, "stages", ())) if isinstance(one, MeasuredModel)]
    before = [model.extrapolated.copy() for model in models]
    yield
    for model, names in zip(models, before, strict=True):
        model.forget()
        model.extrapolated |= names
