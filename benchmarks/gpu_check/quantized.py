"""Products with weights in fewer bits, and attention over KV in fp8: right, and how fast beside bfloat16.

A product is measured three ways: by the kernel that widens tiles as it reads them, by torch behind a widened copy, and
by torch with weights in the dtype of the rows. Where the second overtakes the first is where the runtime should change
over (`FUSED_ROWS_MAX`). Of fp8 weights two ways more round the rows to fp8 first, which is part of their time: by our
kernel, and by torch's product with a scale for each row, where weights have one scale.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - its name everywhere

from benchmarks.gpu_check import shapes
from benchmarks.gpu_check.attention_times import backends, decode_us, layer_bytes
from benchmarks.gpu_check.kernels import FAR, Case, Mode, off, passes, reference, spans_of
from benchmarks.gpu_check.machine import COPY_BYTES, copy_gbs
from benchmarks.gpu_check.section import Section
from benchmarks.gpu_check.timing import graph_time_us
from lockstep.core.contract.errors import ConfigError
from lockstep.host.quantization import Activations, WeightFormat
from lockstep.runtime import triton_trial
from lockstep.runtime.attention import Needs, choose, make
from lockstep.runtime.kv_pool import KvPool
from lockstep.runtime.quantized import activations
from lockstep.runtime.quantized.fp8 import Fp8Matrices, RowRounding, to_codes, to_fp8
from lockstep.runtime.quantized.int4 import Int4Matrices
from lockstep.runtime.quantized.matrices import FUSED_ROWS_MAX, Quantized, StoredMatrix
from tests.support.passes import Pass

FORMATS = {
    "fp8 blocks": WeightFormat(method="fp8", layout="fp8", scale="weight_scale_inv", block=(128, 128)),
    "fp8 tensors": WeightFormat(method="fp8", layout="fp8", scale="weight_scale"),
    "gptq": WeightFormat(method="gptq", layout="gptq", group=128, zero_add=1),
    "awq": WeightFormat(method="awq", layout="awq", group=128),
}
ROWS = (1, 16, 64, 128, 256, 512, 2048)
COPIES = 3  # of a matrix, in turn: one alone may stay in the L2 cache
KV_SCALES = (0.5, 0.25)
EXPERTS, PER_TOKEN = 16, 4


def run(section: Section) -> None:
    """Every format by shape and rows, experts, then attention."""
    layer = shapes.Layer.of(section)
    gbs = copy_gbs(section.device, 1 << 22 if section.small else COPY_BYTES)
    section.put("copy_gbs", round(gbs, 1))
    if (why := unavailable_because(section)) is not None:
        section.skip("our kernels", why)
    elif (why := rounding_unavailable(section)) is not None:
        section.skip("rows in fp8", why)
    for kind in ("fp8 blocks", "gptq") if section.small else FORMATS:
        stored = FORMATS[kind]
        for shape in list(dict.fromkeys(layer.products[:-1]))[: 1 if section.small else None]:
            with section.trying(f"{kind}, {shape[0]} x {shape[1]}"):
                section.needs(3 if section.gpu else 0)
                products(section, kind, stored, shape, layer.dtype, gbs)
        if section.small and kind == "gptq" and unavailable_because(section) is None:
            continue  # the interpreter is slow
        with section.trying(f"{kind}, experts"):
            section.needs(2 if section.gpu else 0)
            experts(section, kind, stored, layer.dtype)
        if stored.layout == "fp8" and rounding_unavailable(section) is None:
            with section.trying(f"{kind}, experts, rows in fp8"):
                section.needs(2 if section.gpu else 0)
                experts(section, kind, stored, layer.dtype, "dynamic")
    with section.trying("change over"):
        change_over(section)
    for backend in backends(section, layer):
        with section.trying(f"KV in fp8, {backend}"):
            section.needs(5 if section.gpu else 0)
            kv(section, layer, backend)


def unavailable_because(section: Section) -> str | None:
    """Why our kernels cannot run here, or None; on a CPU Triton may interpret them."""
    if section.gpu:
        return triton_trial.unavailable_because(section.device)
    interpreted = os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None
    return None if interpreted else "there is no GPU, and Triton's interpreter is off"


def rounding_unavailable(section: Section) -> str | None:
    """Why fp8 cannot be multiplied by fp8 here, or None. The interpreter can, but rounds rows wrongly."""
    return activations.unavailable_because(section.device) if section.gpu else unavailable_because(section)


def made(
    stored: WeightFormat,
    parts: list[StoredMatrix],
    groups: int,
    dtype: torch.dtype,
    device: torch.device,
    rounded: Activations = "",
) -> Quantized:
    """Matrices of random bits, spread like weights."""
    generator = torch.Generator(device).manual_seed(7)
    if stored.layout == "fp8":
        fp8 = Fp8Matrices(parts, groups, 0, 1, dtype, device, stored, RowRounding(rounded))
        for one in fp8.weight.data if groups else [fp8.weight.data]:
            one.copy_(to_fp8(torch.randn(one.shape, generator=generator, device=device) * 64))
        fp8.scale.data.uniform_(2e-4, 4e-4, generator=generator)
        return fp8
    int4 = Int4Matrices(parts, groups, 0, 1, dtype, device, stored)
    for words in (int4.qweight, int4.zeros):
        words.data.random_(-(2**31), 2**31, generator=generator)
    int4.scales.data.uniform_(2e-3, 6e-3, generator=generator)
    return int4


def stored_for(section: Section, stored: WeightFormat) -> WeightFormat:
    """Small matrices have small groups and blocks."""
    if not section.small:
        return stored
    return replace(stored, block=stored.block and (16, 32), group=stored.group and 16)


def products(
    section: Section, kind: str, stored: WeightFormat, shape: tuple[int, int], dtype: torch.dtype, gbs: float
) -> None:
    """One matrix: right at every number of rows, and how long."""
    device, (outputs, inputs) = section.device, shape
    stored = stored_for(section, stored)
    copies = [
        made(stored, [StoredMatrix("w", outputs, inputs)], 0, dtype, device)
        for _ in range(COPIES if section.gpu else 1)
    ]
    weights, wide = copies[0], copies[0].widened(torch.float32)
    plain = [wide.to(dtype) for _ in copies]
    taken = sum(one.numel() * one.element_size() for one in weights.parameters())
    fused = unavailable_because(section) is None and weights.kernel_fits(dtype)

    def by_widening(hidden: Tensor, turn: int) -> Tensor:
        return F.linear(hidden, copies[turn].widened_fast(dtype) if fused else copies[turn].widened(dtype))

    def by_plain_weights(hidden: Tensor, turn: int) -> Tensor:
        return F.linear(hidden, plain[turn])

    def by_kernel(hidden: Tensor, turn: int) -> Tensor:
        return copies[turn].kernel_linear(hidden, None, None)

    for rows in (3,) if section.small else ROWS:
        hidden = torch.randn(rows, inputs, device=device).to(dtype)
        wanted = hidden.double() @ wide.double().t()
        ways: dict[str, Callable[[int], Tensor]] = {
            "widened": partial(by_widening, hidden),
            "plain": partial(by_plain_weights, hidden),
        }
        if fused:
            ways["fused"] = partial(by_kernel, hidden)
        rounding = rounded_ways(section, copies, hidden)
        for name, way in rounding.items():
            far, limit = off(way(0)[:, None], rounded_product(copies[0], hidden)[:, None]), 2 * FAR[dtype]
            section.check(f"{kind} {outputs} x {inputs}, {rows} rows, {name}", far <= limit, f"{far:.2g} off")
        ways |= rounding
        found: dict[str, float] = {"floor_us": round(taken / gbs / 1e3, 1)}
        for name, way in ways.items():
            if name != "plain" and name not in rounding:
                far, limit = off(way(0)[:, None], wanted[:, None]), 2 * FAR[dtype]
                section.check(f"{kind} {outputs} x {inputs}, {rows} rows, {name}", far <= limit, f"{far:.2g} off")

            if fused and not section.gpu:  # a time of the interpreter means nothing, and is long
                continue

            def in_turn(way: Callable[[int], Tensor] = way) -> None:
                for turn in range(len(copies)):
                    way(turn)

            found[f"{name}_us"] = round(graph_time_us(in_turn, device) / len(copies), 1)
        section.put(f"products.{kind}.{outputs} x {inputs}.{rows}", found)


def rounded_ways(section: Section, copies: list[Quantized], hidden: Tensor) -> dict[str, Callable[[int], Tensor]]:
    """Products of rows in fp8, where they can be; under the interpreter rows are rounded by torch."""
    if not isinstance(copies[0], Fp8Matrices) or rounding_unavailable(section) is not None:
        return {}
    from lockstep.runtime.quantized.fp8_kernels import rounded_rows, scaled_linear

    fp8 = [one for one in copies if isinstance(one, Fp8Matrices)]
    run = fp8[0].block[1]
    rounds = rounded_rows if section.gpu else to_codes

    def by_kernel(turn: int) -> Tensor:
        one, (codes, by_row) = fp8[turn], rounds(hidden, run)
        return scaled_linear(codes, by_row, one.weight.data, one.scale.data, one.block, None, None, hidden.dtype)

    ways: dict[str, Callable[[int], Tensor]] = {"rounded": by_kernel}
    if section.gpu and run == fp8[0].inputs:
        of_outputs = [one.scale.data.expand(one.outputs, 1).t().contiguous() for one in fp8]

        def by_torch(turn: int) -> Tensor:
            codes, by_row = rounds(hidden, run)
            weight = fp8[turn].weight.data.t()
            found: Tensor = torch._scaled_mm(codes, weight, by_row, of_outputs[turn], out_dtype=hidden.dtype)
            return found

        try:
            by_torch(0)
        except RuntimeError as error:  # not for every GPU and number of rows
            section.skip("rows in fp8, by torch", str(error).partition("\n")[0])
        else:
            ways["rounded_torch"] = by_torch
    return ways


def rounded_product(weights: Quantized, hidden: Tensor) -> Tensor:
    """What rows in fp8 should give, in float64."""
    assert isinstance(weights, Fp8Matrices)
    codes, by_row = to_codes(hidden, weights.block[1])
    wide = codes.double().view(*by_row.shape, -1) * by_row.double()[..., None]
    return wide.view(hidden.shape) @ weights.widened(torch.float32).double().t()


def experts(section: Section, kind: str, stored: WeightFormat, dtype: torch.dtype, rounded: Activations = "") -> None:
    """Grouped rows, some groups without any."""
    outputs, inputs = (48, 32) if section.small else (1536, 2048)
    parts = [StoredMatrix("w", outputs, inputs)]
    weights = made(stored_for(section, stored), parts, EXPERTS, dtype, section.device, rounded)
    for tokens in (3,) if section.small else (1, 64, 1024):
        generator = torch.Generator().manual_seed(tokens)
        group, _ = torch.randint(0, EXPERTS - 1, (tokens * PER_TOKEN,), generator=generator).sort()
        ends = torch.searchsorted(group, torch.arange(EXPERTS), right=True).int().to(section.device)
        rows = torch.randn(len(group), inputs, generator=generator).to(section.device, dtype)
        of_rows, name = group.tolist(), f"{kind}{', rows in fp8' * bool(rounded)}"
        meeting = rows
        if isinstance(weights, Fp8Matrices) and rounded:
            codes, by_row = to_codes(rows, weights.run)
            meeting = (codes.float().view(*by_row.shape, -1) * by_row[..., None]).view(rows.shape)
        wide = {one: weights.widened(torch.float32, one).double() for one in set(of_rows)}
        wanted = torch.stack([wide[one] @ row for one, row in zip(of_rows, meeting.double(), strict=True)])
        way = weights.grouped if section.gpu or unavailable_because(section) is not None else kernel_of(weights)
        far = off(way(rows, ends)[:, None], wanted[:, None])
        shown = f"{name}, {EXPERTS} experts of {outputs} x {inputs}, {tokens} tokens"
        section.check(shown, far <= 2 * FAR[dtype], f"{far:.2g} off")
        if section.gpu and unavailable_because(section) is None:
            us = graph_time_us(partial(weights.grouped, rows, ends), section.device)
            section.put(f"experts.{name}.{tokens}", {"us": round(us, 1)})


def kernel_of(weights: Quantized) -> Callable[[Tensor, Tensor], Tensor]:
    """The grouped product by the kernel, wherever it runs."""
    if not isinstance(weights, Fp8Matrices) or not weights.activations:
        return lambda rows, ends: weights.kernel_linear(rows, None, ends)
    from lockstep.runtime.quantized.fp8_kernels import scaled_linear

    def way(rows: Tensor, ends: Tensor) -> Tensor:
        codes, by_row = to_codes(rows, weights.run)
        return scaled_linear(
            codes, by_row, weights.weight.data, weights.scale.data, weights.block, None, ends, rows.dtype
        )

    return way


def change_over(section: Section) -> None:
    """The first number of rows of each format at which the widened copy wins over all of its matrices."""
    found: dict[str, Any] = {"now": FUSED_ROWS_MAX}
    for kind, by_shape in section.figures.get("products", {}).items():
        sums: dict[int, list[float]] = {}
        for by_rows in by_shape.values():
            for rows, one in by_rows.items():
                if "fused_us" in one:
                    both = sums.setdefault(int(rows), [0.0, 0.0])
                    both[0] += one["fused_us"]
                    both[1] += one["widened_us"]
        found[kind] = next((rows for rows, (fused, widened) in sorted(sums.items()) if widened < fused), None)
    section.put("change_over_rows", found)


def kv(section: Section, layer: shapes.Layer, backend: str) -> None:
    """Attention over fp8 equals the reference's over the same bits; a decode's time beside that without."""
    case = Case(backend, "fast", layer.dtype, shapes.PAGE_SIZE, layer.heads, layer.kv_heads, layer.head_dim)
    group = case.heads // case.kv_heads
    try:
        choose(backend, Needs(section.device, case.dtype, case.head_dim, case.page_size, group=group, kv_fp8=True))
    except ConfigError as refusal:
        section.refused(f"KV in fp8, {backend}", refusal)
        return
    modes: tuple[Mode, ...] = ("decode", "extend", "mixed")
    for mode in modes:
        one, twin = (in_fp8(section, passes(section, case, *spans_of(section, mode))) for _ in range(2))
        attending = make(backend, one.pool, case.heads)
        attending.plan(one.batch)
        found = attending.run(0, one.query, one.key, one.value, one.batch)
        far, limit = off(found, reference(twin)), FAR[case.dtype]
        section.check(f"KV in fp8, {backend}, {mode}", far <= limit, f"{far:.2g} off")
    for rows, context in ((3, 24),) if section.small else ((16, 1024), (64, 1024), (64, 8192)):
        section.needs(3 if section.gpu else 0)
        plain = decode_us(layer, backend, rows, context, shapes.PAGE_SIZE)
        fp8 = decode_us(layer, backend, rows, context, shapes.PAGE_SIZE, KV_SCALES)
        gbs = layer_bytes(layer, rows * context) / layer.dtype.itemsize / fp8 / 1e3
        found_us = {"plain_us": round(plain, 1), "fp8_us": round(fp8, 1), "fp8_gbs": round(gbs)}
        section.put(f"kv.{backend}.{rows} x {context}", found_us)


def in_fp8(section: Section, one: Pass) -> Pass:
    """The same pass over KV in fp8, new keys and values among what fp8 has, so that rounding decides nothing."""
    old = one.pool
    key_scale, value_scale = KV_SCALES
    sizes = (1, old.pages, old.page_size, old.kv_heads, old.head_dim)
    one.pool = KvPool(*sizes, old.dtype, section.device, [KV_SCALES])
    one.pool.keys[0] = to_fp8(old.keys[0].float() / key_scale)
    one.pool.values[0] = to_fp8(old.values[0].float() / value_scale)
    one.key = (to_fp8(one.key.float() / key_scale).float() * key_scale).to(old.dtype)
    one.value = (to_fp8(one.value.float() / value_scale).float() * value_scale).to(old.dtype)
    return one
