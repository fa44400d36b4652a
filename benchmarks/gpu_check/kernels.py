"""Every kernel against its reference on this machine: attention in all modes, sampling, grouped products."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu_check.section import Section
from benchmarks.gpu_check.timing import graph_time_us
from lockstep.core.contract.errors import ConfigError
from lockstep.host.engine_options import Numerics
from lockstep.runtime.attention import Needs, choose, make
from lockstep.runtime.attention.reference import ReferenceAttention
from lockstep.runtime.draft_tree import shape_of
from lockstep.runtime.forward import ForwardBatch
from lockstep.runtime.kv_pool import KvPool
from tests.support.passes import Pass, make_pass, with_trees

Mode = Literal["decode", "extend", "mixed", "trees"]
MODES: tuple[Mode, ...] = ("decode", "extend", "mixed")
BRANCHES = np.array([0, 0, 1, 0, 1, 3, 2, 5], np.int32)  # parents of the drafts of a tree

# Largest distance of a token's result from the reference's, as a share of its length: half of the last bit of the
# result, and as much again for the weights, which kernels round before the second product.
FAR = {torch.bfloat16: 6e-3, torch.float16: 1e-3, torch.float32: 1e-5}


@dataclass(frozen=True, slots=True)
class Case:
    """One backend with one shape, for all modes."""

    backend: str
    numerics: Numerics
    dtype: torch.dtype
    page_size: int
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128

    @property
    def name(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        heads = f"{self.heads}/{self.kv_heads}x{self.head_dim}"
        return f"{self.backend} {self.numerics} {dtype} pages of {self.page_size}, heads {heads}"


def cases(section: Section) -> Iterator[Case]:
    """The most used first."""
    if not section.gpu:  # the interpreter, where it is on, is slow
        yield Case("triton", "invariant", torch.float32, 4, 4, 2, 16)
        yield Case("triton", "fast", torch.float32, 4, 4, 2, 16)
        yield Case("reference", "fast", torch.float32, 4, 4, 2, 16)
        return
    for backend in ("triton", "flashinfer"):  # with kernels that may have to be compiled, which takes a minute
        yield Case(backend, "fast", torch.bfloat16, 16)
        yield Case(backend, "invariant", torch.bfloat16, 16)
        for page_size in (1, 64):
            yield Case(backend, "fast", torch.bfloat16, page_size)
        yield Case(backend, "fast", torch.float16, 16)
        yield Case(backend, "fast", torch.bfloat16, 16, heads=8, kv_heads=8, head_dim=64)
        yield Case(backend, "fast", torch.bfloat16, 16, heads=32, kv_heads=2)  # as Qwen3-235B: 16 heads share KV
        yield Case(backend, "fast", torch.bfloat16, 16, heads=16, kv_heads=4, head_dim=256)
        if backend == "triton":
            yield Case(backend, "fast", torch.float32, 16, heads=14, kv_heads=2, head_dim=64)
            yield Case(backend, "fast", torch.bfloat16, 16, heads=28, kv_heads=4, head_dim=80)


def run(section: Section) -> None:
    """Attention, then sampling, then grouped products."""
    with section.trying("sampling kernels"):
        section.needs(10)
        sampling(section)
    with section.trying("grouped products"):
        section.needs(5)
        grouped(section)
    with section.trying("between products"):
        section.needs(5)
        between(section)
    for case in cases(section):
        with section.trying(case.name):
            section.needs(6)
            attention(section, case)
    for backend in ("triton", "flashinfer") if section.gpu else ("reference",):
        name = f"{backend}: pages far behind"
        with section.trying(name):
            section.needs(8)
            far_pages(section, backend, name)


# ---------------------------------------------------------------------------------------------------------- attention


def attention(section: Section, case: Case) -> None:
    """All modes of one case, as launched and replayed in a graph."""
    kind, group = (section.device, case.dtype, case.head_dim, case.page_size), case.heads // case.kv_heads
    try:
        choose(case.backend, Needs(*kind, graphs=section.gpu, numerics=case.numerics, group=group))
    except ConfigError as refusal:
        section.refused(case.name, refusal)
        return
    for mode in MODES:
        section.needs(3)
        far = distance(section, case, mode)
        section.check(
            f"{case.name}: {mode}", far <= FAR[case.dtype], f"off by {far:.2g}, {FAR[case.dtype]:.2g} allowed"
        )
    if case.numerics == "fast":
        with section.trying(f"{case.name}: trees"):
            section.needs(3)
            trees(section, case)
    if section.gpu:
        section.needs(3)
        far = graph_distance(section, case)
        section.check(
            f"{case.name}: decode in a graph",
            far <= FAR[case.dtype],
            f"off by {far:.2g}, {FAR[case.dtype]:.2g} allowed",
        )
    if case.numerics == "invariant":
        section.needs(3)
        bits(section, case)


def trees(section: Section, case: Case) -> None:
    """Rows with trees of drafts beside a prompt; as the choice of a backend for them, with its trial."""
    kind, group = (section.device, case.dtype, case.head_dim, case.page_size), case.heads // case.kv_heads
    name = f"{case.name}: trees"
    try:
        choose(case.backend, Needs(*kind, group=group, trees=True))
    except ConfigError as refusal:
        section.refused(name, refusal)
        return
    far = distance(section, case, "trees")
    section.check(name, far <= FAR[case.dtype], f"off by {far:.2g}, {FAR[case.dtype]:.2g} allowed")


def spans_of(section: Section, mode: Mode) -> tuple[list[tuple[int, int]], int]:
    """First and last position of each row's new tokens, and how many rows extend."""
    rng = np.random.default_rng(5)
    longest, new_max = (20, 6) if section.small else (3000, 400)
    extends = [(int(a), int(a + n)) for a, n in zip(rng.integers(0, longest, 5), rng.integers(1, new_max, 5))]  # noqa: B905
    extends[0] = (0, extends[0][1])
    at = [*rng.integers(0, longest, 9).tolist(), 0, 15, 16]
    decodes = [(one, one + 1) for one in at]
    verified = [extends[0], *((one, one + 1 + drafts) for one, drafts in zip(at, range(9), strict=False))]
    found = {"decode": (decodes, 0), "extend": (extends, 5), "mixed": (extends + decodes, 5)}
    return {**found, "trees": (verified, len(verified))}[mode]


def passes(section: Section, case: Case, spans: Sequence[tuple[int, int]], extending: int, **more: Any) -> Pass:
    """The same numbers each time."""
    return make_pass(
        spans,
        extend_rows=extending,
        heads=case.heads,
        kv_heads=case.kv_heads,
        head_dim=case.head_dim,
        page_size=case.page_size,
        dtype=case.dtype,
        device=str(section.device),
        **more,
    )


def reference(made: Pass) -> Tensor:
    """What must come out, in fp64."""
    return ReferenceAttention(made.pool).run(0, made.query.double(), made.key, made.value, made.batch)


def off(found: Tensor, wanted: Tensor) -> float:
    """Largest distance of a token's heads from those wanted, as a share of their length; not a number counts as 1."""
    distances = (found.double() - wanted.double()).norm(dim=-1) / wanted.double().norm(dim=-1).clamp(min=1e-30)
    return float(distances.nan_to_num(1.0).max())


def distance(section: Section, case: Case, mode: Mode) -> float:
    """Of one pass; 1 if the KV of the new tokens is not where it should be."""
    made, twin = (passes(section, case, *spans_of(section, mode)) for _ in range(2))
    if mode == "trees":
        for one in (made, twin):
            counts = (one.batch.lengths_host - one.batch.starts_host)[1:].tolist()
            with_trees(one, 1, shape_of(BRANCHES), [range(count) for count in counts])
    backend = make(case.backend, made.pool, case.heads, numerics=case.numerics)
    backend.plan(made.batch)
    found = backend.run(0, made.query, made.key, made.value, made.batch)
    wanted = reference(twin)
    for kept, expected in ((made.pool.keys[0], twin.pool.keys[0]), (made.pool.values[0], twin.pool.values[0])):
        if not torch.equal(kept.nan_to_num(7.0), expected.nan_to_num(7.0)):
            return 1.0
    return off(found, wanted)


def far_pages(section: Section, backend: str, name: str) -> None:
    """A pool of more than 2 ** 31 numbers: its last pages must give the bits that the first ones give."""
    dtype, page_size = (torch.bfloat16, 16) if section.gpu else (torch.float32, 4)
    case = Case(backend, "fast", dtype, page_size) if section.gpu else Case(backend, "fast", dtype, page_size, 4, 2, 16)
    kind = (section.device, dtype, case.head_dim, page_size)
    try:
        choose(backend, Needs(*kind, group=case.heads // case.kv_heads))
    except ConfigError as refusal:
        section.refused(name, refusal)
        return
    near, far = (passes(section, case, *spans_of(section, "mixed")) for _ in range(2))
    pages = (1 << 31) // (page_size * case.kv_heads * case.head_dim) + 64 if section.gpu else 4 * near.pool.pages
    size = 2 * pages * page_size * case.kv_heads * case.head_dim * dtype.itemsize
    if section.gpu and torch.cuda.mem_get_info(section.device)[0] < 1.1 * size:
        section.skip(name, f"a pool of {size >> 20:,} MiB does not fit")
        return
    pool = KvPool(1, pages, page_size, case.kv_heads, case.head_dim, dtype, section.device)
    moved_by = pages - near.pool.pages
    for whole, part in ((pool.keys[0], near.pool.keys[0]), (pool.values[0], near.pool.values[0])):
        whole[moved_by:pages] = part[:-1]
    far.pool, batch = pool, far.batch
    batch.slots += moved_by * page_size
    batch.page_table += moved_by * (batch.page_table < near.pool.pages).to(torch.int32)
    results = []
    for made in (near, far):
        attending = make(backend, made.pool, case.heads)
        attending.plan(made.batch)
        results.append(attending.run(0, made.query, made.key, made.value, made.batch))
    differ = int((results[0] != results[1]).flatten(1).any(1).sum())
    section.check(name, not differ, f"{differ} of {len(results[0])} tokens differ in a pool of {size >> 20:,} MiB")


def graph_distance(section: Section, case: Case) -> float:
    """Of replays with other lengths than at capture, the largest."""
    spans = [(2999, 3000), (40, 41), (700, 701), (1, 2), (1023, 1024)]
    made, twin = (passes(section, case, spans, 0) for _ in range(2))
    backend = make(case.backend, made.pool, case.heads, numerics=case.numerics, graph_rows=len(spans))
    stream = torch.cuda.Stream(section.device)
    stream.wait_stream(torch.cuda.current_stream(section.device))
    worst = 0.0
    with torch.cuda.stream(stream):
        backend.plan(made.batch, graph=True)
        for _ in range(2):
            backend.run(0, made.query, made.key, made.value, made.batch)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            out = backend.run(0, made.query, made.key, made.value, made.batch)
        for lengths in ([3000, 41, 701, 2, 1024], [5, 33, 640, 1, 1000], [1600, 1, 16, 2, 17]):
            for one in (made, twin):
                move(one, lengths, case.page_size)
            backend.plan(made.batch, graph=True)
            graph.replay()
            worst = max(worst, off(out, reference(twin)))
        stream.synchronize()
    return worst


def move(made: Pass, lengths: Sequence[int], page_size: int) -> None:
    """Let each row decode at another place, in front of the one it was made for."""
    host = np.array(lengths, np.int32)
    made.batch.lengths_host, made.batch.starts_host = host, host - 1
    made.batch.lengths.copy_(torch.from_numpy(host))
    last = made.batch.lengths.long() - 1
    pages = made.batch.page_table[made.batch.rows.long(), last // page_size]
    made.batch.slots.copy_(pages.long() * page_size + last % page_size)


def bits(section: Section, case: Case) -> None:
    """With invariant numerics: whether a decode has the same bits alone and in a batch, and a row in any chunks."""
    spans = [(7, 8), (0, 1), (15, 16)] if section.small else [(700, 701), (1023, 1024), (2500, 2501), (0, 1), (15, 16)]

    def decoded(only: Sequence[int] | None = None) -> Tensor:
        made = passes(section, case, spans, 0, only=only)
        backend = make(case.backend, made.pool, case.heads, numerics=case.numerics)
        backend.plan(made.batch)
        return backend.run(0, made.query, made.key, made.value, made.batch)

    together = decoded()
    same = sum(torch.equal(decoded([row])[0], together[row]) for row in range(len(spans)))
    section.check(f"{case.name}: bits alone and in a batch", same == len(spans), f"{same} of {len(spans)} rows equal")
    if case.backend != "triton":
        return
    cuts = (0, 9, 17, 18) if section.small else (0, 1300, 2599, 2600)
    made, twin = (passes(section, case, [(0, cuts[-1]), (3, 12)], 2) for _ in range(2))
    backend = make(case.backend, made.pool, case.heads, numerics=case.numerics)
    backend.plan(made.batch)
    whole = backend.run(0, made.query, made.key, made.value, made.batch)[: cuts[-1]]
    cut = chunked(twin, make(case.backend, twin.pool, case.heads, numerics=case.numerics), cuts)
    differ = int((cut != whole).flatten(1).any(1).sum())
    section.check(
        f"{case.name}: bits in one chunk, in two, and decoded",
        not differ,
        f"{differ} of {len(whole)} tokens differ, by {off(cut, whole):.2g}",
    )


def chunked(made: Pass, backend: Any, cuts: Sequence[int]) -> Tensor:
    """Row 0 of a pass, one part after the other; a part of one token is decoded."""
    batch, parts = made.batch, []
    for start, stop in pairwise(cuts):
        tokens = slice(start, stop)
        part = ForwardBatch(
            token_ids=batch.token_ids[tokens],
            positions=batch.positions[tokens],
            slots=batch.slots[tokens],
            rows=batch.rows[:1],
            indptr=torch.tensor([0, stop - start], dtype=torch.int32, device=batch.slots.device),
            lengths=torch.tensor([stop], dtype=torch.int32, device=batch.slots.device),
            page_table=batch.page_table,
            logits_at=batch.logits_at,
            extend_rows=int(stop - start > 1),
            starts_host=np.array([start], np.int32),
            lengths_host=np.array([stop], np.int32),
        )
        backend.plan(part)
        parts.append(backend.run(0, made.query[tokens], made.key[tokens], made.value[tokens], part))
    return torch.cat(parts)


# ----------------------------------------------------------------------------------------------- sampling and experts


def sampling(section: Section) -> None:
    """Kernels of sampling draw what their references draw, to the bit; and what they take."""
    try:
        from lockstep.runtime.sampling import kernels
    except ModuleNotFoundError as error:
        section.skip("sampling kernels", f"{error.name} is not installed")
        return
    if not kernels.runs_on(section.device):
        section.skip("sampling kernels", "they need a CUDA device, or TRITON_INTERPRET=1")
        return
    sizes = [(1, 151_936), (16, 151_936), (64, 151_936), (256, 151_936)] if section.gpu else [(3, 700)]
    for samples, vocab in sizes:
        name = f"sampling, {samples} rows of {vocab}"
        with section.trying(name):
            section.needs(5 if section.gpu else 0)
            times = kernels.check_and_time(samples, vocab, section.device.type, repeats=10)
            section.put(f"sampling_us.{samples}", {kernel: round(us, 1) for kernel, us in times.items()})
            section.check(name, True, "every kernel equals its reference to the bit")


def grouped(section: Section) -> None:
    """Products of rows with the matrix of their group, by whichever kernel is taken and by ours."""
    from lockstep.runtime.models.grouped import grouped_linear, grouped_linear_reference

    device = section.device
    if not section.gpu:
        section.skip("grouped products", "on a CPU the reference is what runs")
        return
    from lockstep.runtime.models.grouped_kernel import grouped_linear_triton

    generator = torch.Generator(device).manual_seed(3)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for rows in (16, 700):
            counts = torch.bincount(torch.randint(0, 32, (rows,), generator=generator, device=device), minlength=32)
            counts[5] = 0
            ends = counts.cumsum(0).to(torch.int32)
            given = torch.randn(int(ends[-1]), 512, generator=generator, device=device).to(dtype)
            weights = (torch.randn(32, 384, 512, generator=generator, device=device) * 512**-0.5).to(dtype)
            wanted = grouped_linear_reference(given.double(), weights.double(), ends)
            for label, function in (("chosen", grouped_linear), ("ours", grouped_linear_triton)):
                far = off(function(given, weights, ends), wanted)
                name = f"grouped product, {label}, {rows} rows of {str(dtype).removeprefix('torch.')}"
                section.check(name, far <= FAR[dtype], f"off by {far:.2g}")


def between(section: Section) -> None:
    """What lies between the products of a layer: sums with norms, turned heads, gates; and what it takes in a graph."""
    from lockstep.runtime.models import elementwise

    if not section.gpu:
        section.skip("between products", "on a CPU torch does it")
        return
    from lockstep.runtime.models import elementwise_kernels as ours

    device, heads, kv_heads, half, hidden, inner = section.device, 32, 8, 64, 4096, 12288
    generator = torch.Generator(device).manual_seed(5)
    for dtype in (torch.bfloat16, torch.float32):
        for rows in (1, 64, 256, 2048):

            def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
                return torch.randn(*shape, generator=generator, device=device).to(dtype)

            residual, added, weight = normal(rows, hidden), normal(rows, hidden), normal(hidden)
            qkv, weights = normal(rows, (heads + 2 * kv_heads) * 2 * half), (normal(2 * half), normal(2 * half))
            turns, gate_up = (normal(rows, 1, half), normal(rows, 1, half)), normal(rows, 2 * inner)
            pairs: dict[str, tuple[Any, Any, tuple[Any, ...]]] = {
                "add_rms_norm": (
                    ours.add_rms_norm_triton, elementwise.add_rms_norm_reference, (residual, added, weight, 1e-6)
                ),
                "norm_and_turn": (
                    ours.norm_and_turn_triton,
                    elementwise.norm_and_turn_reference,
                    (qkv, heads, kv_heads, weights, 1e-6, *turns),
                ),
                "silu_and_mul": (ours.silu_and_mul_triton, elementwise.silu_and_mul_reference, (gate_up,)),
            }  # fmt: skip
            for name, (kernel, reference_of, given) in pairs.items():
                found, wanted = kernel(*given), reference_of(*(exact(one) for one in given))
                both = zip(found, wanted, strict=True) if isinstance(found, tuple) else [(found, wanted)]
                far = max(off(one, other) for one, other in both)
                kind = str(dtype).removeprefix("torch.")
                section.check(f"{name}, {rows} rows of {kind}", far <= FAR[dtype], f"off by {far:.2g}")
                if dtype == torch.bfloat16:
                    with torch.cuda.device(device):
                        us = graph_time_us(partial(kernel, *given), device)
                    section.put(f"between_us.{rows}.{name}", round(us, 2))


def exact(given: Any) -> Any:
    """Tensors in fp64, one by one or in pairs."""
    if isinstance(given, tuple):
        return tuple(exact(one) for one in given)
    return given.double() if isinstance(given, Tensor) else given
