"""Triton's attention kernels: equal to the reference in the interpreter, and compiled for GPUs of other machines."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="the runtime needs torch")
pytest.importorskip("triton", reason="these kernels need triton")


from lockstep.runtime.attention import kernels  # noqa: E402
from lockstep.runtime.attention.reference import ReferenceAttention  # noqa: E402
from lockstep.runtime.attention.triton_backend import Split, TritonAttention, divide_reference  # noqa: E402
from lockstep.runtime.kv_pool import KvPool  # noqa: E402
from lockstep.runtime.quantized.fp8 import to_fp8  # noqa: E402
from tests.support.interpreter import mend_products  # noqa: E402
from tests.support.passes import RULES, Pass, defined, make_pass  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
MANY = 16  # simulated multiprocessors, so that a few rows are divided among programs


def expected(made: Pass) -> torch.Tensor:
    """The results of the reference, on a pool of its own."""
    keys, values = made.pool.keys[0].clone(), made.pool.values[0].clone()
    reference = ReferenceAttention(made.pool)
    reference.plan(made.batch)
    out = reference.run(0, made.query, made.key, made.value, made.batch)
    made.pool.keys[0], made.pool.values[0] = keys, values
    return out


def run(made: Pass, backend: TritonAttention, sms: int, graph: bool = False) -> torch.Tensor:
    """The kernels, with outputs and workspace full of NaN beforehand."""
    backend.sms = sms
    backend.plan(made.batch, graph)
    backend.workspace.fill_(torch.nan)
    empty = torch.empty
    try:
        torch.empty = lambda *args, **options: empty(*args, **options).fill_(torch.nan)
        return backend.run(0, made.query, made.key, made.value, made.batch)
    finally:
        torch.empty = empty


def agree(made: Pass, sms: int = 1, **options: object) -> TritonAttention:
    """Run both; outputs and pools must be equal."""
    reference = expected(made)
    backend = TritonAttention(made.pool, made.query.shape[1], **options)
    out = run(made, backend, sms)
    tolerance = TOLERANCE[made.query.dtype]
    torch.testing.assert_close(out, reference, atol=tolerance, rtol=tolerance)
    return backend


def kv_after(made: Pass) -> list[torch.Tensor]:
    return [made.pool.keys[0].nan_to_num(7e4), made.pool.values[0].nan_to_num(7e4)]


@pytest.fixture(autouse=True)
def _mended_products(monkeypatch):
    mend_products(monkeypatch)


@st.composite
def rows(draw: st.DrawFn) -> tuple[list[tuple[int, int]], int]:
    """Spans of a small pass and how many of them extend."""
    extends = draw(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 12)), max_size=2))
    decodes = draw(st.lists(st.integers(0, 80), min_size=0 if extends else 1, max_size=3))
    return [(start, start + new) for start, new in extends] + [(at, at + 1) for at in decodes], len(extends)


@given(
    rows(),
    st.sampled_from([(1, 1), (2, 1), (3, 3), (8, 2), (7, 1)]),
    st.sampled_from([1, 3, 16, 64]),
    st.sampled_from([16, 24]),
    st.sampled_from(["fast", "invariant"]),
    st.sampled_from([1, MANY]),
)
@example(([(0, 1)], 1), (2, 1), 1, 16, "fast", 1)  # one token, nothing before it
@example(([(0, 64), (16, 32)], 2), (2, 1), 16, 16, "fast", 1)  # pages full to the last slot
@example(([(30, 34), (62, 70)], 2), (2, 1), 16, 16, "fast", 1)  # the first tile ends between the new tokens
@example(([(60, 68)], 1), (2, 1), 16, 16, "invariant", 1)  # a piece that is outside the first tokens' view
@example(([(63, 64), (64, 65), (127, 128)], 0), (4, 2), 64, 16, "invariant", MANY)  # ends of pages and pieces
@settings(max_examples=8)
def test_kernels_equal_the_reference(spans, heads, page_size, head_dim, numerics, sms):
    spans, extend_rows = spans
    made = make_pass(
        spans,
        extend_rows=extend_rows,
        heads=heads[0],
        kv_heads=heads[1],
        head_dim=head_dim,
        page_size=page_size,
        device=DEVICE,
    )
    agree(made, sms, numerics=numerics, piece=64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_head_dims_and_half_precision(dtype, head_dim):
    made = make_pass([(3, 9), (37, 38)], extend_rows=1, head_dim=head_dim, page_size=16, dtype=dtype, device=DEVICE)
    agree(made)


def test_a_decode_shared_out_between_programs_is_merged():
    spans = [(0, 3), (0, 1), (130, 131), (300, 301)]
    made = make_pass(spans, extend_rows=1, page_size=16, device=DEVICE)
    backend = agree(made, MANY)
    assert shares(backend.decodes) == [1, 5, 10]  # tiles of 32 positions: 1, 5 and 10
    assert backend.extends is None  # all of it is one tile
    made = make_pass(spans, extend_rows=1, page_size=16, device=DEVICE)
    backend = agree(made, MANY, numerics="invariant", piece=64)
    assert (shares(backend.decodes), backend.decodes.cells) == ([1, 3, 5], 9)
    made = make_pass([(0, 1), (300, 301)], extend_rows=0, page_size=16, device=DEVICE)
    backend = agree(made, 2, numerics="invariant", piece=64)
    assert (shares(backend.decodes), backend.decodes.cells) == ([1, 3], 6)  # two pieces to an item


def shares(split: Split) -> list[int]:
    """The items of each row, as the device divided them."""
    (divided,) = split.divided.values()
    ends = divided[1 : 1 + split.count].tolist()
    return [end - before for before, end in zip([0, *ends], ends, strict=False)]


@given(st.lists(st.integers(1, 400), min_size=1, max_size=9), st.integers(1, 12), st.sampled_from([2, 128]))
@example([400, *[1] * 8], 4, 128)  # a long row beside short ones, more rows than programs at once
@example([7] * 8, 8, 128)  # all even: no row is divided
@settings(max_examples=6)
def test_rows_are_divided_as_the_reference_divides(lengths, slots, most):
    batch = make_pass([(one - 1, one) for one in lengths], extend_rows=0, device=DEVICE).batch
    out = torch.full((1 + 2 * len(lengths),), -1, dtype=torch.int32, device=DEVICE)
    kernels.divide[(1,)](
        out, batch.indptr, batch.lengths, 0, len(lengths), slots, most, BLOCK_N=4, SPLIT=0, WINDOW=0, ROWS=4
    )
    each, items = divide_reference(-(-np.array(lengths) // 4), slots, most)
    assert out.tolist() == [each, *np.cumsum(items).tolist(), *np.cumsum(items).tolist()]
    assert items.max() <= most
    assert items.sum() <= len(lengths) + 2 * slots


def test_a_long_row_is_divided_among_many_short_ones():
    """The time of the longest item is near the mean of a multiprocessor, whatever the number of rows."""
    units = np.array([1563, *[16] * 127])  # 100,000 positions, and 127 rows of 1,000
    each, items = divide_reference(units, 50, 128)
    assert (items[1:] == 1).all()
    assert each <= units.sum() / 50
    assert divide_reference(np.full(128, 16), 50, 128)[0] == 16  # even rows stay whole
    assert divide_reference(np.array([1563]), 50, 128)[1].sum() == 49  # one row has all, 32 units to an item


@pytest.mark.parametrize("name", ["plain", "all"])
def test_drafts_to_verify_are_shared_out_between_programs(name):
    """A short extend of a long row is divided by positions, whatever windows, caps and sinks its layers have."""
    spans = [(290, 296), (0, 5), (40, 43)]
    for numerics in ("fast", "invariant"):
        made = make_pass(spans, extend_rows=3, page_size=16, device=DEVICE)
        expected = defined(made, RULES[name])
        backend = TritonAttention(made.pool, 4, numerics=numerics, piece=64, rules=(RULES[name],))
        out = run(made, backend, MANY)
        assert backend.extends.items > len(spans)
        torch.testing.assert_close(out.double(), expected.to(out.device), atol=1e-5, rtol=1e-5)


def test_new_keys_and_values_go_to_their_slots_and_nowhere_else():
    spans = [(0, 5), (6, 9), (15, 16)]
    mine = make_pass(spans, extend_rows=2, device=DEVICE)
    theirs = make_pass(spans, extend_rows=2, device=DEVICE)
    theirs.pool.write(0, theirs.key, theirs.value, theirs.batch)
    run(mine, TritonAttention(mine.pool, 4), 1)
    assert all(torch.equal(a, b) for a, b in zip(kv_after(mine), kv_after(theirs), strict=True))


def in_fp8(made: Pass, key_scale: float, value_scale: float, *, exact: bool = True) -> Pass:
    """The same pass with KV in fp8; new keys and values are exact in fp8, unless `exact` is false."""
    old = made.pool
    sizes = (1, old.pages, old.page_size, old.kv_heads, old.head_dim)
    made.pool = KvPool(*sizes, old.dtype, torch.device(DEVICE), [(key_scale, value_scale)])
    made.pool.keys[0] = to_fp8(old.keys[0].float() / key_scale)
    made.pool.values[0] = to_fp8(old.values[0].float() / value_scale)
    if exact:
        made.key = (to_fp8(made.key.float() / key_scale).float() * key_scale).to(old.dtype)
        made.value = (to_fp8(made.value.float() / value_scale).float() * value_scale).to(old.dtype)
    return made


@pytest.mark.parametrize(
    ("dtype", "numerics", "sms"), [(torch.float32, "fast", MANY), (torch.bfloat16, "invariant", 1)]
)
def test_kv_in_fp8(dtype, numerics, sms):
    made = make_pass([(3, 9), (0, 4), (70, 71)], extend_rows=2, page_size=16, dtype=dtype, device=DEVICE)
    agree(in_fp8(made, 0.5, 0.0625), sms, numerics=numerics, piece=64)


def test_what_is_written_to_fp8_is_rounded_and_never_more_than_its_largest():
    mine, theirs = (make_pass([(0, 5), (15, 16)], extend_rows=1, device=DEVICE) for _ in range(2))
    for made in (mine, theirs):
        made.key[0] *= 1e4
        in_fp8(made, 0.5, 0.25, exact=False)
    theirs.pool.write(0, theirs.key, theirs.value, theirs.batch)
    run(mine, TritonAttention(mine.pool, 4), 1)
    slots = theirs.batch.slots
    found, expected = (
        [one.cpu().view(-1, 2, 16).float()[slots.cpu()] for one in (p.keys[0], p.values[0])]
        for p in (mine.pool, theirs.pool)
    )
    for a, b, scale, new in zip(found, expected, (0.5, 0.25), (mine.key, mine.value), strict=True):
        assert a.abs().max() <= 448
        # Triton's interpreter rounds ties differently, and loses the carry if a number is rounded up to a power of two.
        sure = (b.abs() > 2**-6) & ((b.to(torch.float8_e4m3fn).view(torch.uint8) & 7) != 0)
        assert sure.sum() > 100
        assert torch.allclose(a[sure], b[sure], rtol=0.13)
        assert torch.allclose(b * scale, new.cpu().clamp(-448 * scale, 448 * scale), rtol=2**-4, atol=scale * 2**-10)


def test_views_of_one_projection_need_no_copy():
    spans = [(2, 9), (15, 16)]
    made = make_pass(spans, extend_rows=1, device=DEVICE)
    reference = expected(made)
    together = torch.cat([made.query, made.key, made.value], 1)
    made.query, made.key, made.value = together.split([4, 2, 2], 1)
    assert not made.query.is_contiguous()
    torch.testing.assert_close(run(made, TritonAttention(made.pool, 4), 1), reference, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("sms", [1, MANY])
def test_padding_rows_of_a_graph_are_harmless(sms):
    """Two padding rows compute a token at position 0 of the scratch page, NaN before; the other rows are unaffected."""
    made = make_pass([(37, 38), (5, 6)], extend_rows=0, page_size=16, device=DEVICE)
    reference = expected(made)
    batch, pool = made.batch, made.pool
    scratch_row = torch.full_like(batch.page_table[:1], pool.scratch_page)
    batch.page_table = torch.cat([batch.page_table, scratch_row])
    row, slot = len(batch.page_table) - 1, pool.scratch_page * pool.page_size
    batch.rows = torch.cat([batch.rows, torch.full_like(batch.rows, row)])
    batch.slots = torch.cat([batch.slots, torch.full_like(batch.slots, slot)])
    batch.lengths = torch.cat([batch.lengths, torch.ones_like(batch.lengths)])
    batch.indptr = torch.arange(5, dtype=torch.int32, device=DEVICE)
    batch.starts_host = np.concatenate([batch.starts_host, [0, 0]]).astype(np.int32)
    batch.lengths_host = np.concatenate([batch.lengths_host, [1, 1]]).astype(np.int32)
    made.query, made.key, made.value = (torch.cat([one, one]) for one in (made.query, made.key, made.value))
    out = run(made, TritonAttention(pool, 4), sms, graph=True)
    torch.testing.assert_close(out[:2], reference, atol=2e-6, rtol=2e-6)


def test_what_a_graph_launches_depends_on_rows_alone():
    """Capture happens at one length, replay at any other: programs and workspace are those of the longest."""
    seen = set()
    for length in (3, 60):
        made = make_pass([(length, length + 1), (80, 81)], extend_rows=0, page_size=16, device=DEVICE)
        for numerics in ("fast", "invariant"):
            backend = TritonAttention(made.pool, 4, numerics=numerics, piece=64)
            backend.sms = MANY
            backend.plan(made.batch, graph=True)
            split = backend.decodes
            seen.add((numerics, split.items, split.cells, split.tiling, backend.workspace.numel()))
    assert len(seen) == 2


def test_a_graph_reads_the_division_that_is_made_before_its_replay():
    """Another pass with more rows between two replays does not move it."""
    made = make_pass([(300, 301), (90, 91)], extend_rows=0, page_size=16, device=DEVICE)
    backend = TritonAttention(made.pool, 4)
    backend.sms = MANY
    backend.plan(made.batch, graph=True)
    captured = backend.decodes.divided[0]
    before = shares(backend.decodes)
    larger = make_pass([(300, 301)] * 5, extend_rows=0, page_size=16, device=DEVICE)
    backend.plan(larger.batch)
    made.batch.lengths.copy_(torch.tensor([33, 200]))
    backend.plan(made.batch, graph=True)
    assert backend.decodes.divided[0] is captured
    assert shares(backend.decodes) != before


def test_workspaces_of_graphs_stay_where_they_were():
    made = make_pass([(3, 4)], extend_rows=0, page_size=16, device=DEVICE)
    backend = TritonAttention(made.pool, 4)
    backend.sms = MANY
    backend.plan(made.batch, graph=True)
    captured = backend.workspace
    larger = make_pass([(300, 301), (90, 91)], extend_rows=0, page_size=16, device=DEVICE)
    backend.plan(larger.batch)
    assert backend.workspace.numel() > captured.numel()
    assert any(captured is kept for kept in backend.graph_workspaces)


def rows_alone_and_together(spans: Sequence[tuple[int, int]], extend_rows: int, sms: Sequence[int]) -> None:
    """Each row's outputs have the same bits alone and among the others, for any number of multiprocessors."""
    together = make_pass(spans, extend_rows=extend_rows, page_size=16, device=DEVICE)
    out = run(together, TritonAttention(together.pool, 4, numerics="invariant", piece=64), sms[0])
    for row, span in enumerate(together.spans()):
        alone = make_pass(spans, extend_rows=extend_rows, page_size=16, only=[row], device=DEVICE)
        again = run(alone, TritonAttention(alone.pool, 4, numerics="invariant", piece=64), sms[1])
        assert torch.equal(out[span], again), f"row {row}"


def test_invariant_rows_have_the_same_bits_alone_and_in_a_batch():
    rows_alone_and_together([(90, 97), (0, 3), (150, 151), (20, 21)], 2, (1, MANY))
    rows_alone_and_together([(150, 151), (64, 65), (20, 21)], 0, (MANY, 1))


def test_invariant_tokens_have_the_same_bits_decoded_and_in_chunks_of_any_size():
    """A retraction relies on this: KV of output that is recomputed by an extend equals the KV written by decodes."""
    whole = make_pass([(0, 100)], extend_rows=1, page_size=16, device=DEVICE)
    out = run(whole, TritonAttention(whole.pool, 4, numerics="invariant", piece=64), 1)
    for start, stop, extend_rows, sms in ((61, 67, 1, 1), (99, 100, 0, 1), (99, 100, 0, MANY), (70, 71, 0, MANY)):
        part = make_pass([(0, 100)], extend_rows=1, page_size=16, device=DEVICE)
        again = make_pass([(start, stop)], extend_rows=extend_rows, page_size=16, device=DEVICE)
        again.pool = part.pool  # the same keys and values, computed up to `stop`
        part.pool.write(0, part.key, part.value, part.batch)
        again.batch.page_table, again.batch.rows = part.batch.page_table, part.batch.rows
        again.batch.slots = part.batch.slots[start:stop]
        again.query, again.key, again.value = (one[start:stop] for one in (part.query, part.key, part.value))
        got = run(again, TritonAttention(again.pool, 4, numerics="invariant", piece=64), sms)
        assert torch.equal(got, out[start:stop]), (start, stop, extend_rows, sms)


def test_bad_settings_are_named():
    made = make_pass([(0, 1)], extend_rows=1)
    with pytest.raises(ValueError, match="`heads` must be a multiple of the 2 KV heads, got `3`"):
        TritonAttention(made.pool, 3)
    with pytest.raises(ValueError, match="`piece` must be a positive multiple of 64, got `48`"):
        TritonAttention(made.pool, 4, numerics="invariant", piece=48)
    with pytest.raises(ValueError, match="a CUDA graph holds decodes only, got 1 rows that extend"):
        TritonAttention(made.pool, 4).plan(made.batch, graph=True)


def test_where_a_part_of_a_plan_lies_compiles_nothing_anew() -> None:
    """The parts of a plan lie end to end, so each pointer is a multiple of 16 in some batches and not in others."""
    program = (
        "from lockstep.runtime.attention import kernels as attention\n"
        "from lockstep.runtime.sampling import kernels as sampling\n"
        "for module in (attention, sampling):\n"
        "    for name, kernel in vars(module).items():\n"
        "        for p in getattr(kernel, 'params', ()):\n"
        "            if p.name in ('rows', 'indptr', 'lengths', 'rows_ptr', 'positions_ptr'):\n"
        "                print(name, p.name, p.do_not_specialize_on_alignment)\n"
    )
    compiled = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", program], env=compiled, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert [line for line in said if not line.endswith("True")] == []
    assert {
        "extend indptr True",
        "decode rows True",
        "merge indptr True",
        "attend_split lengths True",
        "_draw_kernel positions_ptr True",
    } <= set(said)
