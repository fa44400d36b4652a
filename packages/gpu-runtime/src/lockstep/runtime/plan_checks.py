"""Plans that an executor cannot run are refused before anything of them is done."""

from __future__ import annotations

from lockstep.core.contract.commands import BatchPlan
from lockstep.runtime.errors import PlanError

MODES = frozenset({"extend", "decode", "mixed", "prebuilt", "verify"})
IN_BLOCKS = "diffusion_extend"  # the mode of a pass over blocks
IDLE = "idle"  # the mode of a data-parallel rank with nothing to run


def refuse_unknown(plan: BatchPlan, ranks: int = 1, *, layers: bool = False, in_blocks: bool = False) -> None:
    """Raise PlanError for a plan with a feature that this executor does not support.

    Args:
        ranks: data-parallel ranks of the executor.
        layers: whether it runs some layers of a prompt at a time.
        in_blocks: whether its model answers in blocks.
    """
    modes = (MODES if ranks == 1 else MODES | {IDLE}) | ({IN_BLOCKS} if in_blocks else set())
    if layers:
        modes |= {"split_prefill"}
    if plan.mode not in modes:
        raise PlanError(f"batch {plan.batch_id} has mode {plan.mode!r}; this executor runs {', '.join(sorted(modes))}")
    if (plan.blocks is not None) != (plan.mode == IN_BLOCKS):
        raise PlanError(f"batch {plan.batch_id} has `blocks` without mode {IN_BLOCKS!r}, or that mode without `blocks`")
    if plan.layers and not layers:
        raise PlanError(f"batch {plan.batch_id} has `layers`, which this executor does not support")
    if plan.ranks is not None and len(plan.ranks.tokens) != ranks:
        raise PlanError(
            f"batch {plan.batch_id} has `ranks` of {len(plan.ranks.tokens)} ranks, and this executor is of {ranks}"
        )
    if plan.speculation is None and (plan.starts_after or plan.mode == "verify"):
        what = "`starts_after`" if plan.starts_after else "mode 'verify'"
        raise PlanError(f"batch {plan.batch_id} has {what}, but no `speculation` with what it verifies")
    if plan.steps > 1 and plan.speculation is not None:
        raise PlanError(f"batch {plan.batch_id} both verifies drafts and has {plan.steps} steps")
    if plan.steps > 1 and plan.mode != "decode":
        raise PlanError(
            f"batch {plan.batch_id} has {plan.steps} steps in mode {plan.mode!r}; only decodes have several"
        )


def refuse_blocks(plan: BatchPlan, *, windows: bool, states: bool) -> None:
    """Raise PlanError for a plan with states or window pages that the model of this executor does not have."""
    assert plan.hybrid is not None
    if (plan.hybrid.state_rows.size or plan.hybrid.checkpoint_index.size) and not states:
        raise PlanError(f"batch {plan.batch_id} has states of layers, but the model here keeps none")
    if plan.hybrid.pages.size and not windows:
        raise PlanError(f"batch {plan.batch_id} gives out window pages, but the model here has none")
