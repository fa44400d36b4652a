"""Trees of drafts in the kernels of GPUs: Triton's in the interpreter, FlashInfer's by what its kernel reads."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="the runtime needs torch")
pytest.importorskip("triton", reason="these kernels need triton")

from lockstep.runtime.attention import make  # noqa: E402
from lockstep.runtime.attention.reference import ReferenceAttention  # noqa: E402
from lockstep.runtime.attention.rules import LayerRules  # noqa: E402
from lockstep.runtime.attention.tree_masks import hidden_bits, path_words  # noqa: E402
from lockstep.runtime.attention.triton_backend import TritonAttention  # noqa: E402
from lockstep.runtime.draft_tree import TreeRows, TreeShape, shape_of  # noqa: E402
from tests.support.flashinfer_wrappers import Wrapper, flashinfer_with_events  # noqa: E402
from tests.support.interpreter import mend_products  # noqa: E402
from tests.support.passes import RULES, Pass, defined_in_trees, make_pass, path_to, with_trees  # noqa: E402

MANY = 4  # simulated multiprocessors, so that a few rows are divided among programs
BRANCHES = [0, 0, 1, 2, 2, 4, 0]
Case = tuple[list[int], list[tuple[int, int]], list[tuple[int, list[int]]]]
"""Parents of a tree, spans of rows without one, and where each row's tree stands with the numbers that it computes."""


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Random trees: rows compute the first drafts, as those that verify, or drafts of one depth, as a head does."""
    size = draw(st.integers(1, 12))
    parents = [draw(st.integers(0, number)) for number in range(size)]
    depths = shape_of(np.array(parents, np.int32)).depths
    others = draw(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 12)), max_size=2))
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        numbers = list(range(1 + draw(st.integers(0, size))))
        if draw(st.booleans()):
            depth = draw(st.integers(0, int(depths.max())))
            numbers = np.flatnonzero(depths == depth).tolist()
        rows.append((draw(st.integers(0, 90)), numbers))
    return parents, [(start, start + new) for start, new in others], rows


LONG = [number // 3 for number in range(80)]  # more slots than one word has
EXAMPLES: list[Case] = [
    ([0], [], [(0, [0, 1])]),  # nothing before the tree
    (BRANCHES, [(0, 7), (30, 31)], [(31, list(range(8))), (3, [0]), (62, [3, 4, 7])]),  # across pages and tiles
    (LONG, [], [(50, list(range(81))), (1, list(range(40)))]),
    (LONG, [(0, 3)], [(5, [26, 27, 28, 70, 79])]),
]


def tree_pass(case: Case, heads: tuple[int, int] = (4, 2), **options: Any) -> Pass:
    parents, others, rows = case
    spans = [*others, *((stand, stand + numbers[-1] + 1) for stand, numbers in rows)]
    made = make_pass(spans, extend_rows=len(spans), heads=heads[0], kv_heads=heads[1], **options)
    shape = shape_of(np.array(parents, np.int32))
    return with_trees(made, len(others), shape, [numbers for _, numbers in rows])


def ran(made: Pass, backend: TritonAttention, sms: int) -> torch.Tensor:
    """The kernels' results, with outputs and workspace full of NaN beforehand."""
    backend.sms = sms
    backend.plan(made.batch)
    backend.workspace.fill_(torch.nan)
    return backend.run(0, made.query, made.key, made.value, made.batch)


@pytest.fixture(autouse=True)
def _mended_products(monkeypatch: pytest.MonkeyPatch) -> None:
    mend_products(monkeypatch)


@given(
    cases(),
    st.sampled_from([(1, 1), (2, 1), (3, 3), (8, 2), (7, 1)]),
    st.sampled_from([1, 3, 16, 64]),
    st.sampled_from([1, MANY]),
)
@example(EXAMPLES[0], (2, 1), 1, 1)
@example(EXAMPLES[1], (8, 2), 16, 1)
@example(EXAMPLES[1], (4, 2), 4, MANY)
@example(EXAMPLES[2], (2, 1), 3, 1)
@example(EXAMPLES[3], (2, 1), 16, MANY)
@settings(max_examples=4, deadline=None)
def test_a_token_of_a_tree_attends_to_its_path(case: Case, heads: tuple[int, int], page_size: int, sms: int) -> None:
    made = tree_pass(case, heads, page_size=page_size)
    rule = LayerRules(made.pool.head_dim**-0.5)
    out = ran(made, TritonAttention(made.pool, heads[0]), sms)
    torch.testing.assert_close(out.double(), defined_in_trees(made, rule), atol=5e-6, rtol=5e-6)


@pytest.mark.parametrize("sms", [1, MANY])
@pytest.mark.parametrize("name", ["window", "window of one", "all"])
def test_windows_caps_and_sinks_go_on_with_trees(name: str, sms: int) -> None:
    """Windows count positions, of which alternatives share one. The last row reads another tile than its tokens."""
    case = (BRANCHES, [(3, 9)], [(61, list(range(8))), (98, [4, 5, 7])])
    made = tree_pass(case, page_size=4)
    backend = TritonAttention(made.pool, 4, rules=(RULES[name],))
    out = ran(made, backend, sms)
    assert (backend.trees is not None) == (sms == MANY)
    torch.testing.assert_close(out.double(), defined_in_trees(made, RULES[name]), atol=1e-5, rtol=1e-5)


def test_layers_with_and_without_windows_have_paths_of_their_own() -> None:
    made = tree_pass((BRANCHES, [], [(61, list(range(8)))]), page_size=4)
    made.pool.keys, made.pool.values, made.pool.scales = made.pool.keys * 2, made.pool.values * 2, [(1.0, 1.0)] * 2
    backend = TritonAttention(made.pool, 4, rules=(RULES["plain"], RULES["window of one"]))
    backend.plan(made.batch)
    for layer, name in enumerate(("plain", "window of one")):
        out = backend.run(layer, made.query, made.key, made.value, made.batch)
        torch.testing.assert_close(out.double(), defined_in_trees(made, RULES[name]), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("sms", [1, MANY])
def test_where_a_tree_stands_is_known_on_the_device_only(sms: int) -> None:
    """The CPU has upper bounds while the batch before is in flight: results are those of the real positions."""
    made = tree_pass(EXAMPLES[1], page_size=4)
    expected = defined_in_trees(made, LayerRules(0.25))
    batch = made.batch
    assert batch.tree is not None
    for row, ahead in enumerate((3, 1, 40)):
        batch.starts_host[2 + row] += ahead
        batch.lengths_host[2 + row] += ahead
        batch.tree.stands[row] += ahead
    backend = TritonAttention(made.pool, 4)
    out = ran(made, backend, sms)
    if sms == MANY:
        assert backend.trees is not None
    torch.testing.assert_close(out.double(), expected, atol=5e-6, rtol=5e-6)


@pytest.mark.parametrize("sms", [1, MANY])
def test_rows_without_trees_have_the_bits_of_a_pass_without_trees(sms: int) -> None:
    made, plain = (
        tree_pass(EXAMPLES[1], page_size=4),
        make_pass([(0, 7), (30, 31)], extend_rows=2, page_size=4),
    )
    count = plain.batch.tokens
    plain.query, plain.key, plain.value = made.query[:count], made.key[:count], made.value[:count]
    table, pool = made.batch.page_table, made.pool
    plain.pool, plain.batch.page_table, plain.batch.rows = pool, table, made.batch.rows[:2]
    plain.batch.slots = made.batch.slots[:count]
    out = ran(made, TritonAttention(pool, 4), sms)
    assert torch.equal(out[:count], ran(plain, TritonAttention(pool, 4), sms))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    made = tree_pass(EXAMPLES[1], (4, 2), page_size=16, dtype=dtype, head_dim=64)
    out = ran(made, TritonAttention(made.pool, 4), MANY)
    torch.testing.assert_close(out.double(), defined_in_trees(made, LayerRules(0.125)), atol=2e-2, rtol=2e-2)


# ------------------------------------------------------------------------------------------------------- bits of paths


def sees(shape: TreeShape, number: int, other: int, window: int | None) -> bool:
    """Whether a token of a tree attends to another, by its path."""
    near = window is None or shape.depths[other] > shape.depths[number] - window
    return other in path_to(shape, number) and bool(near)


@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("parents", [BRANCHES, LONG, [0] * 63, [0] * 64], ids=["few", "long", "63", "64"])
def test_words_have_a_bit_for_each_slot(parents: list[int], window: int | None) -> None:
    shape = shape_of(np.array(parents, np.int32))
    slots = 1 + len(parents)
    numbers = np.arange(slots, dtype=np.int32)
    found = path_words(TreeRows(0, np.zeros(1, np.int32), numbers, shape), window)
    assert found.shape == (slots, 1 + -(-slots // 64))
    assert found[:, 0].tolist() == shape.depths[numbers].tolist()
    for number, words in zip(numbers.tolist(), found[:, 1:].tolist(), strict=True):
        bits = "".join(f"{word % 2**64:064b}"[::-1] for word in words)
        assert [bit == "1" for bit in bits] == [
            other < slots and sees(shape, number, other, window) for other in range(len(bits))
        ]


def test_a_packed_mask_has_a_bit_for_each_position() -> None:
    shape = shape_of(np.array(BRANCHES, np.int32))
    numbers, stands = [[0, 1, 2, 3, 4], [0], [4, 5, 7]], np.array([11, 0, 3], np.int32)
    rows = TreeRows(2, stands, np.concatenate([np.array(one, np.int32) for one in numbers]), shape)
    lengths = np.array([stand + one[-1] + 1 for stand, one in zip(stands, numbers, strict=True)], np.int32)
    counts = np.array([len(one) for one in numbers], np.int32)
    hidden = hidden_bits(rows, counts, lengths)
    mask = np.full(hidden.offsets[-1], 255, np.uint8)
    mask[hidden.at] = hidden.values
    for row, chosen in enumerate(numbers):
        read = np.unpackbits(mask[hidden.offsets[row] : hidden.offsets[row + 1]], bitorder="little")
        read = read[: counts[row] * lengths[row]].reshape(counts[row], lengths[row])
        expected = [
            [at < stands[row] or sees(shape, number, at - stands[row], None) for at in range(lengths[row])]
            for number in chosen
        ]
        assert read.astype(bool).tolist() == expected
    assert len(np.unique(hidden.at)) == len(hidden.at)  # an upload with equal places would be undefined


# ---------------------------------------------------------------------------------------------------------- FlashInfer


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return flashinfer_with_events(monkeypatch)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("case", EXAMPLES)
def test_flashinfer_reads_the_path_of_each_token(flashinfer: ModuleType, case: Case, page_size: int) -> None:
    made, twin = (tree_pass(case, page_size=page_size) for _ in range(2))
    expected = ReferenceAttention(twin.pool).run(0, twin.query, twin.key, twin.value, twin.batch)
    torch.testing.assert_close(expected.double(), defined_in_trees(twin, LayerRules(0.25)), atol=5e-6, rtol=5e-6)
    backend = make("flashinfer", made.pool, 4)
    backend.plan(made.batch)
    out = backend.run(0, made.query, made.key, made.value, made.batch)
    torch.testing.assert_close(out, expected)
    assert backend.masked.calls["backend"] == "fa2"
    assert backend.masked.options["causal"] is False
    assert {"custom_mask", "packed_custom_mask"}.isdisjoint(backend.masked.options)  # `plan` would wait, or miscount
    causal = make_pass([(3, 9)], extend_rows=1, page_size=page_size)
    backend.pool = causal.pool
    backend.plan(causal.batch)  # a pass without trees has no mask
    assert backend.extending is not backend.masked
    assert backend.extending._custom_mask_buf is None


def test_the_bound_calls_include_masked_ones(flashinfer: ModuleType) -> None:
    Wrapper.bound.clear()
    made = tree_pass(EXAMPLES[1], page_size=4)
    backend = make("flashinfer", made.pool, 4)
    backend.plan(made.batch)
    backend.run(0, made.query, made.key, made.value, made.batch)
    assert ("BatchPrefillWithPagedKVCacheWrapper", "plan") in Wrapper.bound
