"""Which tiles and how many programs make a decode's attention fastest here: figures to choose constants by.

The constants are those of `attention/triton_backend.py`; nothing is changed by this. It runs on request only:
`--only tuning`, and as far as the budget goes.
"""

from __future__ import annotations

from itertools import product
from typing import Any
from unittest import mock

import torch

from benchmarks.gpu_check import shapes
from benchmarks.gpu_check.attention_times import decode_us, layer_bytes
from benchmarks.gpu_check.section import Section
from benchmarks.gpu_check.shapes import PAGE_SIZE

SHAPES = ((64, 1024), (256, 1024), (16, 1024), (1, 8192))
PROGRAMS_PER_SM = (4, 2, 8)
TILES = ((64, 4, 3), (64, 4, 2), (64, 4, 5), (128, 4, 2), (128, 8, 3), (32, 4, 4))  # positions, warps, stages


def run(section: Section) -> None:
    """The constants as they are come first."""
    if not section.gpu:
        section.skip("tuning", "it is about a GPU")
        return
    from lockstep.runtime.attention import triton_backend

    layer = shapes.Layer.of(section)
    for (positions, warps, stages), per_sm in product(TILES, PROGRAMS_PER_SM):
        name = f"{positions} positions, {warps} warps, {stages} stages, {per_sm} programs an SM"
        if section.left_s() < 6:
            section.skip(f"tiles from {name} on", "no time")
            return
        with section.trying(name):

            def tiling(
                head_dim: int, dtype: torch.dtype, group: int, tile: tuple[int, int, int] = (positions, warps, stages)
            ) -> Any:
                return triton_backend.Tiling(16, *tile)

            changed: dict[str, Any] = {
                "decode_tiling": tiling,
                "positions_per_tile": lambda head_dim, dtype, positions=positions: positions,
            }
            backend = triton_backend.TritonAttention
            with (
                mock.patch.multiple(triton_backend, **changed),
                mock.patch.object(backend, "programs_per_sm", lambda self, tiling, per_sm=per_sm: per_sm),
            ):
                try:
                    for rows, context in SHAPES:
                        us = decode_us(layer, "triton", rows, context, PAGE_SIZE)
                        gbs = round(layer_bytes(layer, rows * context) / us / 1e3)
                        section.put(f"decode.{rows} x {context}.{name}", {"us": round(us, 1), "gbs": gbs})
                except Exception as error:  # for instance more shared memory than there is: then it is no choice
                    section.skip(name, f"{type(error).__name__}: {error}")
