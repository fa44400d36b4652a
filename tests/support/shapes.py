"""Batch shapes for tests of cost models."""

from __future__ import annotations

from hypothesis import strategies as st

from lockstep.sim.cost import BatchShape


@st.composite
def shapes(
    draw: st.DrawFn, extends_max: int = 4, decodes_max: int = 600, context_tokens_max: int = 100_000
) -> BatchShape:
    """The shape of a batch with limits on the rows that extend and that decode."""
    extends = draw(st.lists(st.tuples(st.integers(1, 8192), st.integers(0, context_tokens_max)), max_size=extends_max))
    decodes = draw(st.lists(st.integers(1, context_tokens_max), max_size=decodes_max))
    return BatchShape(
        extend_rows=len(extends),
        extend_tokens=sum(new for new, _ in extends),
        extend_context_tokens=sum(before for _, before in extends),
        extend_pairs=sum(new * before + new * (new + 1) // 2 for new, before in extends),
        decode_rows=len(decodes),
        decode_context_tokens=sum(decodes),
        sampled_rows=len(extends) + len(decodes),
    )
