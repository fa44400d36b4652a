"""Attention of a CPU against its definition: decodes in groups, prompts alone, windows, caps, sinks, KV in fp8."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="the runtime needs torch")

from lockstep.core.contract.errors import ConfigError  # noqa: E402
from lockstep.runtime.attention import UNAVAILABLE_BECAUSE, Needs, choose, make  # noqa: E402
from lockstep.runtime.attention.cpu import GROUP_NUMBERS, CpuAttention  # noqa: E402
from lockstep.runtime.attention.reference import ReferenceAttention  # noqa: E402
from lockstep.runtime.attention.rules import LayerRules  # noqa: E402
from lockstep.runtime.kv_pool import KvPool  # noqa: E402
from lockstep.runtime.processor import multiplies_bfloat16  # noqa: E402
from lockstep.runtime.quantized.fp8 import to_fp8  # noqa: E402
from tests.support.passes import RULES, Pass, defined, forget_before, make_pass  # noqa: E402

CPU = torch.device("cpu")
SPANS = {
    "prompts": [(0, 5), (3, 40), (90, 101)],
    "a long prompt": [(0, 300)],
    "decodes of all lengths": [(0, 1), (7, 8), (64, 65), (150, 151), (148, 149), (1500, 1501), (1490, 1491)],
    "one decode": [(200, 201)],
    "one long decode": [(700, 701)],
    "mixed": [(0, 5), (20, 33), (0, 1), (150, 151), (30, 31)],
}
TOLERANCES = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def passed(spans: Any, **options: Any) -> Pass:
    """Return a pass with rows that extend first, as the batches of the engine have them."""
    return make_pass(spans, extend_rows=sum(stop - start > 1 for start, stop in spans), **options)


def run(made: Pass, rule: LayerRules) -> Any:
    backend = CpuAttention(made.pool, rules=[rule])
    backend.plan(made.batch)
    return backend.run(0, made.query, made.key, made.value, made.batch)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("spans", SPANS.values(), ids=SPANS)
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_it_computes_what_is_defined(rule: LayerRules, spans: Any, dtype: Any) -> None:
    made = passed(spans, dtype=dtype)
    if rule.window is not None:
        forget_before(made, rule.window)
    found = run(made, rule)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), defined(made, rule), atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


spans = st.lists(
    st.tuples(st.integers(0, 90), st.integers(1, 12)).map(lambda pair: (pair[0], sum(pair))), min_size=1, max_size=8
)


@given(
    spans,
    st.sampled_from([(1, 1), (4, 1), (6, 2), (7, 7), (9, 3)]),
    st.sampled_from([8, 16, 80]),
    st.sampled_from([1, 3, 16, 64]),
    st.sampled_from([None, 1, 5, 64]),
)
@settings(max_examples=60, deadline=None)
def test_any_heads_pages_and_windows(spans: Any, heads: Any, head_dim: int, page_size: int, window: Any) -> None:
    spans = sorted(spans, key=lambda span: span[1] - span[0] == 1)
    sizes = {"heads": heads[0], "kv_heads": heads[1], "head_dim": head_dim, "page_size": page_size}
    made = passed(spans, **sizes)
    rule = LayerRules(head_dim**-0.5, window=window)
    torch.testing.assert_close(run(made, rule).double(), defined(made, rule), atol=3e-6, rtol=3e-6)


def test_large_scores_are_as_exact_in_bfloat16_as_in_the_reference() -> None:
    if not multiplies_bfloat16():
        pytest.skip("this processor has no products in bfloat16")
    made = passed([(length, length + 1) for length in range(60, 92)], dtype=torch.bfloat16, head_dim=64)
    rule = LayerRules(1.0)  # scores of up to 30, which bfloat16 rounds to multiples of 1/8
    exact = defined(made, rule)
    mine = (run(made, rule).double() - exact).abs().max()
    reference = ReferenceAttention(made.pool, 1.0)
    theirs = (reference.run(0, made.query, made.key, made.value, made.batch).double() - exact).abs().max()
    assert mine < 3 * theirs + 2**-8  # weights are rounded to bfloat16 before the sum of values, by 2**-9


def test_kv_in_fp8_equals_the_reference() -> None:
    for spans in SPANS.values():
        made = passed(spans)
        scales = (0.5, 2.0)
        pool = KvPool(1, made.pool.pages, 4, 2, 16, torch.float32, CPU, [scales])
        for kept, full, scale in zip(
            (pool.keys[0], pool.values[0]), (made.pool.keys[0], made.pool.values[0]), scales, strict=True
        ):
            kept.copy_(to_fp8(full.nan_to_num(0.0) / scale))
        made.pool = pool
        backend, reference = CpuAttention(pool), ReferenceAttention(pool)
        backend.plan(made.batch)
        found = backend.run(0, made.query, made.key, made.value, made.batch)
        expected = reference.run(0, made.query, made.key, made.value, made.batch)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_similar_lengths_form_a_group_and_others_do_not() -> None:
    spans = [(length - 1, length) for length in (3000, 2900, 2300, 1500, 40, 30, 20)]
    made = passed(spans)
    backend = CpuAttention(made.pool)
    backend.plan(made.batch)
    groups = backend._plans[False, None, None].groups
    assert [len(group.tokens) for group in groups] == [3, 1, 3]  # the last three: little padding
    assert [group.positions for group in groups] == [3000, 1500, 40]


def test_a_group_has_room_for_its_keys() -> None:
    length = GROUP_NUMBERS // (2 * 16) // 3  # three rows fill a group
    made = passed([(length - 1, length)] * 7)
    backend = CpuAttention(made.pool)
    backend.plan(made.batch)
    assert [len(group.tokens) for group in backend._plans[False, None, None].groups] == [3, 3, 1]
    torch.testing.assert_close(
        backend.run(0, made.query, made.key, made.value, made.batch).double(),
        defined(made, LayerRules(0.25)), atol=3e-6, rtol=3e-6,
    )  # fmt: skip


def test_auto_takes_it_on_a_cpu_unless_numerics_are_invariant() -> None:
    assert choose("auto", Needs(CPU, torch.bfloat16, 64, 16)).name == "cpu"
    assert choose("auto", Needs(CPU, torch.float32, 64, 16, numerics="invariant")).name == "reference"
    with pytest.raises(ConfigError, match="numerics are invariant"):
        choose("cpu", Needs(CPU, torch.float32, 64, 16, numerics="invariant"))
    on_gpu = UNAVAILABLE_BECAUSE["cpu"](Needs(torch.device("cuda", 0), torch.float32, 64, 16))
    assert on_gpu is not None
    assert "needs the CPU" in on_gpu
    with pytest.raises(ValueError, match="CUDA graph"):
        make("cpu", passed([(0, 1)]).pool, 4).plan(passed([(0, 1)]).batch, graph=True)
