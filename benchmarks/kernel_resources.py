"""Compile every Triton kernel of the runtime for GPUs that this machine need not have, and list what each needs.

    python -m benchmarks.kernel_resources [--capability 80 90 100 120] [--only NAME ...] [--csv FILE]

The runtime's own launchers are called at the shapes of real models, with tensors that have no memory; a Triton driver
in place of CUDA's compiles each launch (`tests/support/triton_target.py`). `--only` takes parts of names of models or
kernels. Exit status 1 if a kernel needs more shared memory than its GPU has, or spills more than
allowed here.

Compiled: the figures depend on the versions of Triton and its assembler, and not on the machine.
"""

# mypy: disable-error-code="import-untyped"

from __future__ import annotations

import argparse
import csv
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # before Triton is imported: interpreted kernels are not compiled

import numpy as np
import torch
import triton
from torch import Tensor

from lockstep.host.engine_options import Numerics
from lockstep.runtime import triton_trial_kernel
from lockstep.runtime.attention.rules import LayerRules
from lockstep.runtime.attention.triton_backend import TritonAttention
from lockstep.runtime.draft_tree import shape_of, tree_rows
from lockstep.runtime.forward import ForwardBatch
from lockstep.runtime.kv_pool import KvPool
from lockstep.runtime.lora.batch import HIGH_TILE, LOW_TILE, AdapterBatch
from lockstep.runtime.lora.kernels import add_lora_triton
from lockstep.runtime.models import elementwise_kernels, grouped_kernel
from lockstep.runtime.quantized import fp8_kernels
from lockstep.runtime.quantized import kernels as quantized
from lockstep.runtime.sampling import kernels as sampling
from lockstep.runtime.sampling.table import SamplingTable
from tests.support.triton_target import MACHINES, Compiled, compiling

CAPABILITIES = (80, 90, 100, 120)
FP8_CAPABILITY = 89
META = torch.device("meta")
BF16, FP32 = torch.bfloat16, torch.float32
LAID_OUT = (((128,), torch.int64), ((3, 8), torch.int32))  # tokens and tiles of a batch with adapters
PAGE, CONTEXT, PREFILL, DRAFTED = 16, 8192, 4096, 6
BRANCHES = np.array([0, 0, 1, 0, 1, 3, 2, 5], np.int32)  # parents of a tree of 8 drafts
SPILLS_MAX_BYTES = {80: 256, 90: 0, 100: 0, 120: 256}  # by capability; fast attention has a bound of its own
FAST_SPILLS_MAX_BYTES = {80: 16, 90: 0, 100: 0, 120: 16}


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model's layers on one rank. Source: the config.json of each, on Hugging Face."""

    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    inner: int  # of one expert, where there are experts
    experts: int = 0
    vocab: int = 151_936
    rule: LayerRules | None = None


SINKS = torch.empty(64, dtype=BF16, device=META)
MODELS = {
    "Llama-3.1-8B": Shape(32, 8, 128, 4096, 14336, vocab=128_256),
    "Llama-3.1-70B, tp 8": Shape(8, 1, 128, 8192, 3584, vocab=128_256),
    "Qwen2.5-0.5B": Shape(14, 2, 64, 896, 4864),
    "Qwen3-30B-A3B": Shape(32, 4, 128, 2048, 768, experts=128),
    "Phi-3-mini": Shape(32, 32, 96, 3072, 8192, vocab=32_064),
    "Gemma-2-9B": Shape(16, 8, 256, 3584, 14336, vocab=256_000, rule=LayerRules(256**-0.5, window=4096, cap=50.0)),
    "gpt-oss-20b": Shape(64, 8, 64, 2880, 2880, experts=32, rule=LayerRules(0.125, window=128, sinks=SINKS)),
}


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: a kernel in one use, and what it needs."""

    model: str
    use: str
    kernel: str
    capability: int
    registers: int
    stack_bytes: int
    spilled_bytes: int
    shared_bytes: int
    warps: int
    programs_per_sm: int

    @property
    def bad(self) -> str:
        """What is wrong with it; empty: nothing."""
        limit = MACHINES[self.capability].shared_bytes - (1 << 10)
        if self.shared_bytes > limit:
            return f"{self.shared_bytes} bytes of shared memory, there are {limit}"
        bounds = FAST_SPILLS_MAX_BYTES if self.use == "attention fast" else SPILLS_MAX_BYTES
        allowed = bounds.get(self.capability, 0)
        return f"{self.spilled_bytes} bytes spilled, {allowed} allowed" if self.spilled_bytes > allowed else ""


def batch_of(rows: int, new: int, extending: bool) -> ForwardBatch:
    """Return a pass of rows with `new` new tokens each at the end of CONTEXT positions, without memory."""

    def ints(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=META)

    tokens = rows * new
    return ForwardBatch(
        token_ids=ints(tokens, dtype=torch.int64),
        positions=ints(tokens, dtype=torch.int64),
        slots=ints(tokens, dtype=torch.int64),
        rows=ints(rows),
        indptr=ints(rows + 1),
        lengths=ints(rows),
        page_table=ints(rows, CONTEXT // PAGE),
        logits_at=ints(rows, dtype=torch.int64),
        extend_rows=rows if extending else 0,
        starts_host=np.full(rows, CONTEXT - new, np.int32),
        lengths_host=np.full(rows, CONTEXT, np.int32),
    )


def attention(shape: Shape, capability: int, numerics: Numerics, dtype: torch.dtype, fp8: bool) -> None:
    """Launch a prefill, drafts to verify, and decodes of many rows and of few."""
    scales = [(0.5, 0.25)] if fp8 else None
    pool = KvPool(1, 64, PAGE, shape.kv_heads, shape.head_dim, dtype, META, scales)
    backend = TritonAttention(pool, shape.heads, numerics=numerics, rules=() if shape.rule is None else (shape.rule,))
    backend.sms, backend.warpgroups = MACHINES[capability].sms, MACHINES[capability].warpgroups
    for rows, new, extending in ((1, PREFILL, True), (1, DRAFTED, True), (1, 1, False), (2048, 1, False)):
        batch = batch_of(rows, new, extending)
        fused = torch.empty(rows * new, shape.heads + 2 * shape.kv_heads, shape.head_dim, dtype=dtype, device=META)
        query, key, value = fused.split((shape.heads, shape.kv_heads, shape.kv_heads), dim=1)
        backend.plan(batch)
        backend.run(0, query, key, value, batch)


def trees(shape: Shape, capability: int) -> None:
    """Launch trees of drafts to verify, of one row and of many."""
    pool = KvPool(1, 64, PAGE, shape.kv_heads, shape.head_dim, BF16, META)
    backend = TritonAttention(pool, shape.heads, rules=() if shape.rule is None else (shape.rule,))
    backend.sms, backend.warpgroups = MACHINES[capability].sms, MACHINES[capability].warpgroups
    new = 1 + len(BRANCHES)
    for rows in (1, 2048):
        batch = batch_of(rows, new, True)
        batch.tree = tree_rows(0, batch.starts_host, np.full(rows, new, np.int32), shape_of(BRANCHES))
        query = torch.empty(rows * new, shape.heads, shape.head_dim, dtype=BF16, device=META)
        key = torch.empty(rows * new, shape.kv_heads, shape.head_dim, dtype=BF16, device=META)
        backend.plan(batch)
        backend.run(0, query, key, key, batch)


def between(shape: Shape) -> None:
    """Launch the operations between the products of a layer, with and without the parts that some models lack."""
    hidden = torch.empty(64, shape.hidden, dtype=BF16, device=META)
    weight, half = hidden[0], shape.head_dim // 2
    elementwise_kernels.add_rms_norm_triton(hidden, None, weight, 1e-6)
    elementwise_kernels.add_rms_norm_triton(hidden, hidden.clone(), weight, 1e-6)
    qkv = torch.empty(64, (shape.heads + 2 * shape.kv_heads) * shape.head_dim, dtype=BF16, device=META)
    turns = torch.empty(64, 1, half, dtype=FP32, device=META)
    norms = torch.empty(shape.head_dim, dtype=BF16, device=META)
    for weights in (None, (norms, norms.clone())):
        elementwise_kernels.norm_and_turn_triton(qkv, shape.heads, shape.kv_heads, weights, 1e-6, turns, turns.clone())
    elementwise_kernels.silu_and_mul_triton(torch.empty(64, 2 * shape.inner, dtype=BF16, device=META))


def lora(shape: Shape, rank: int, dtype: torch.dtype) -> None:
    """Launch the product of adapters of a layer's q, k and v, for a few tokens of each adapter and for many."""
    sizes = (shape.heads * shape.head_dim, *(shape.kv_heads * shape.head_dim,) * 2)
    down = torch.empty(4, 3 * rank, shape.hidden, dtype=dtype, device=META)
    up = torch.empty(4, sum(sizes), rank, dtype=dtype, device=META)
    for tile in (LOW_TILE, HIGH_TILE):
        tokens, tiles = (torch.empty(*size, dtype=kind, device=META) for size, kind in LAID_OUT)
        batch = AdapterBatch(tokens, tiles, (), tile)
        out = torch.empty(128, sum(sizes), dtype=dtype, device=META)
        add_lora_triton(out, torch.empty(128, shape.hidden, dtype=dtype, device=META), down, up, sizes, batch)


def matrices(shape: Shape, kind: str, capability: int) -> None:
    """Launch the products of one format of weights, at few rows and at many, and by groups if there are experts."""
    groups = shape.experts
    outputs, inputs = 2 * shape.inner, shape.hidden
    lead = (groups,) if groups else ()
    ends = torch.empty(groups, dtype=torch.int32, device=META) if groups else None
    for count in (16, 64, 256, 4096):
        rows = torch.empty(count * max(groups, 1), inputs, dtype=BF16, device=META)
        if kind == "int4":
            group = 32 if inputs % 128 else 128
            words = torch.empty(*lead, inputs // 8, outputs, dtype=torch.int32, device=META)
            zeros = torch.empty(*lead, inputs // group, outputs // 8, dtype=torch.int32, device=META)
            by = torch.empty(*lead, inputs // group, outputs, dtype=BF16, device=META)
            quantized.int4_linear(rows, words, zeros, by, group, 1, None, ends)
            if not groups:
                quantized.int4_widened(words, zeros, by, group, 1, BF16)
        elif kind == "bf16":
            if ends is not None:
                weights = torch.empty(groups, outputs, inputs, dtype=BF16, device=META)
                grouped_kernel.grouped_linear_triton(rows, weights, ends)
        else:
            block = (outputs, inputs) if kind == "fp8 whole" else (64, 64) if inputs % 128 else (128, 128)
            weight = torch.empty(*lead, outputs, inputs, dtype=torch.float8_e4m3fn, device=META)
            by = torch.empty(*lead, outputs // block[0], inputs // block[1], dtype=FP32, device=META)
            quantized.fp8_linear(rows, weight, by, block, None, ends)
            if capability >= FP8_CAPABILITY:
                codes, row_scale = fp8_kernels.rounded_rows(rows, block[1])
                fp8_kernels.scaled_linear(codes, row_scale, weight, by, block, None, ends, BF16)


def draws(vocab: int) -> None:
    """Launch every step of sampling, greedy and random."""
    columns = SamplingTable(64, vocab, META).columns
    logits = torch.empty(64, vocab, dtype=FP32, device=META)
    rows = torch.empty(64, dtype=torch.int32, device=META)
    positions = torch.empty(64, dtype=torch.int64, device=META)
    maxima = torch.empty(64, dtype=FP32, device=META)
    sampling.edit_(logits, rows, positions, columns)
    sampling.mask_(logits, torch.empty(64, -(-vocab // 32), dtype=torch.int32, device=META))
    sampling.penalise_(logits, rows, columns)
    floor = sampling.pivots(logits, rows, columns, maxima)
    for limit, random in ((None, False), (None, True), (floor, True)):
        sampling.draw(logits, rows, positions, columns, maxima, limit, random)


def uses(capability: int) -> Iterator[tuple[str, str, Callable[[], None]]]:
    """Yield model, use, and what launches its kernels."""
    for name, shape in MODELS.items():
        for numerics in ("fast", "invariant"):
            yield name, f"attention {numerics}", partial(attention, shape, capability, numerics, BF16, False)
        if capability >= FP8_CAPABILITY:
            yield name, "attention, KV in fp8", partial(attention, shape, capability, "fast", BF16, True)
        yield name, "between products", partial(between, shape)
        yield name, "sampling", partial(draws, shape.vocab)
    for name in ("Llama-3.1-8B", "Gemma-2-9B", "gpt-oss-20b"):
        yield name, "attention fast, trees of drafts", partial(trees, MODELS[name], capability)
    for name in ("Llama-3.1-8B", "Phi-3-mini", "Gemma-2-9B"):
        yield name, "attention in float32", partial(attention, MODELS[name], capability, "fast", FP32, False)
    llama = MODELS["Llama-3.1-8B"]
    for rank in (8, 16, 64, 256, 512):
        yield "Llama-3.1-8B", f"LoRA of rank {rank}, bfloat16", partial(lora, llama, rank, BF16)
    yield "Llama-3.1-8B", "LoRA of rank 512 in float32", partial(lora, llama, 512, FP32)
    for name in ("Llama-3.1-8B", "Qwen3-30B-A3B"):
        for kind in ("fp8 blocks", "fp8 whole", "int4", "bf16"):
            yield name, f"weights in {kind}", partial(matrices, MODELS[name], kind, capability)
    yield "any", "trial", lambda: (triton_trial_kernel.add_one(torch.empty(5, device=META)), None)[1]


def rows_of(capability: int, only: list[str]) -> Iterator[Row]:
    """Compile for one capability; a kernel that several uses compile alike is in the row of the first."""
    seen: set[Any] = set()
    with compiling(capability) as target:
        for model, use, launch in uses(capability):
            target.launches.clear()
            if only and not any(part in model or part in use for part in only):
                continue
            launch()
            found: list[Compiled] = [one for one, _ in target.launches]
            for one in found:
                if one.source in seen:
                    continue
                seen.add(one.source)
                yield Row(
                    model, use, one.kernel, capability, one.registers, one.stack_bytes, one.spilled_bytes,
                    one.shared_bytes, one.warps, one.programs,
                )  # fmt: skip


def every_kernel() -> set[str]:
    """Return the names of all kernels that the runtime launches."""
    from lockstep.runtime.attention import kernels as attending
    from lockstep.runtime.lora import kernels as adapting

    modules = (
        attending, adapting, elementwise_kernels, grouped_kernel, fp8_kernels, quantized, sampling, triton_trial_kernel
    )  # fmt: skip
    found = (one for module in modules for one in vars(module).values() if isinstance(one, triton.JITFunction))
    return {one.__name__ for one in found if not any(p.name == "return" for p in one.params)}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernel_resources", description=__doc__)
    parser.add_argument("--capability", type=int, nargs="+", default=list(CAPABILITIES), choices=sorted(MACHINES))
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="parts of names of models or uses")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="also write all rows to this file")
    arguments = parser.parse_args()
    out = sys.stdout
    rows: list[Row] = []
    for capability in arguments.capability:
        rows.extend(rows_of(capability, arguments.only))
    names = [field.name for field in fields(Row)]
    if arguments.csv is not None:
        with arguments.csv.open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerows([names, *([getattr(row, name) for name in names] for row in rows)])
    print(f"Triton {triton.__version__}, torch {torch.__version__}; {len(rows)} kernels", file=out)
    print(table(rows), file=out)
    bad = [row for row in rows if row.bad]
    for row in bad:
        print(f"sm_{row.capability} {row.kernel} ({row.model}, {row.use}): {row.bad}", file=out)
    return 1 if bad else 0


def table(rows: list[Row]) -> str:
    """Return the largest figures of each kernel and capability, and the fewest programs of a multiprocessor."""
    head = "{:24} {:>4} {:>8} {:>9} {:>8} {:>6} {:>8} {:>6}"
    lines = [head.format("kernel", "sm", "variants", "registers", "spilled", "stack", "shared", "per SM")]
    for kernel in sorted({row.kernel for row in rows}):
        for capability in sorted({row.capability for row in rows}):
            of = [row for row in rows if (row.kernel, row.capability) == (kernel, capability)]
            if of:
                most = [max(getattr(row, name) for row in of) for name in
                        ("registers", "spilled_bytes", "stack_bytes", "shared_bytes")]  # fmt: skip
                least = min(row.programs_per_sm for row in of)
                lines.append(
                    f"{kernel:24} {capability:4} {len(of):8} {most[0]:9} {most[1]:8} {most[2]:6} {most[3]:8} {least:6}"
                )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
