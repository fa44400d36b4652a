"""Sliding windows, caps on scores, sinks: plain torch against its definition, Triton's kernels against plain torch."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the runtime needs torch")

from lockstep.core.contract.errors import ConfigError  # noqa: E402
from lockstep.runtime.attention import Needs, choose, make  # noqa: E402
from lockstep.runtime.attention.reference import ReferenceAttention  # noqa: E402
from lockstep.runtime.attention.rules import LayerRules, names_of  # noqa: E402
from tests.support.interpreter import mend_products  # noqa: E402
from tests.support.passes import RULES, Pass, defined, forget_before, make_pass  # noqa: E402

SPANS = [((0, 5), (3, 40), (90, 101)), ((0, 1), (7, 8), (64, 65), (150, 151))]


def passed(spans: Any, **options: Any) -> Pass:
    extends = sum(stop - start > 1 for start, stop in spans)
    return make_pass(spans, extend_rows=extends, page_size=4, **options)


@pytest.mark.parametrize("spans", SPANS)
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_plain_torch_computes_what_is_defined(rule: LayerRules, spans: Any) -> None:
    made = passed(spans)
    if rule.window is not None:
        forget_before(made, rule.window)
    out = ReferenceAttention(made.pool, rules=[rule]).run(0, made.query, made.key, made.value, made.batch)
    torch.testing.assert_close(out.double(), defined(made, rule), atol=3e-6, rtol=3e-6)


@pytest.mark.parametrize("sms", [1, 16])
@pytest.mark.parametrize("numerics", ["fast", "invariant"])
@pytest.mark.parametrize("spans", SPANS)
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_triton_computes_the_same(
    rule: LayerRules, spans: Any, numerics: Any, sms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="these kernels need triton")
    from lockstep.runtime.attention.triton_backend import TritonAttention

    mend_products(monkeypatch)
    made, twin = passed(spans), passed(spans)
    if rule.window is not None:
        forget_before(made, rule.window)
    want = ReferenceAttention(twin.pool, rules=[rule]).run(0, twin.query, twin.key, twin.value, twin.batch)
    backend = TritonAttention(made.pool, 4, numerics=numerics, piece=64, rules=[rule])
    backend.sms = sms
    backend.plan(made.batch)
    backend.workspace.fill_(torch.nan)
    out = backend.run(0, made.query, made.key, made.value, made.batch)
    torch.testing.assert_close(out, want, atol=5e-6, rtol=5e-6)


def test_decoded_and_extended_tokens_have_the_same_bits_under_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="these kernels need triton")
    from lockstep.runtime.attention.triton_backend import TritonAttention

    mend_products(monkeypatch)
    rule = RULES["all"]
    whole, again = passed([(150, 160)]), passed([(159, 160)])
    outs = []
    for made, sms in ((whole, 1), (again, 1), (passed([(159, 160)]), 16)):
        if made is not whole:  # the same row, of which only the last token is new
            made.pool, made.batch.page_table, made.batch.rows = (
                whole.pool, whole.batch.page_table, whole.batch.rows,
            )  # fmt: skip
            made.query, made.key, made.value = whole.query[-1:], whole.key[-1:], whole.value[-1:]
            made.batch.slots = whole.batch.slots[-1:]
        backend = TritonAttention(made.pool, 4, numerics="invariant", piece=64, rules=[rule])
        backend.sms = sms
        backend.plan(made.batch)
        outs.append(backend.run(0, made.query, made.key, made.value, made.batch)[-1])
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


def test_a_backend_names_the_rules_that_it_lacks() -> None:
    rules = [RULES["window"], RULES["all"]]
    assert names_of(rules) == ("sliding windows", "a cap on scores", "attention sinks", "a scale by layer")
    assert names_of([RULES["plain"]]) == ()
    needs = Needs(torch.device("cpu"), torch.bfloat16, 64, 16, special=names_of(rules))
    with pytest.raises(ConfigError, match="flashinfer cannot run here: it is not called here with sliding windows, a "):
        choose("flashinfer", needs)
    made = passed(SPANS[0])
    assert isinstance(make("reference", made.pool, 4, rules=rules), ReferenceAttention)
