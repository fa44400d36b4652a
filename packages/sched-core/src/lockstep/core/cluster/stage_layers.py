"""How the layers of a model are divided among pipeline stages, for the simulator and for ranks on a device.

Stages differ by at most one layer, unless one of them drafts: it is busy for `beside` more layers, and has as many
layers fewer as make the busiest stage least busy. The other stages take over a sixteenth of their layers at most, or
one layer: in a pass of prompts and in memory, the drafter amounts to less than in a pass of decodes (decision 0098).
"""

from __future__ import annotations

TAKEN_OVER = 1 / 16  # share of its layers that a stage takes over, at most, from a stage that drafts


def even_layers(layers: int, stages: int) -> list[int]:
    """Return the layers of each stage, which differ by one at most; later stages have more."""
    return [layers * (number + 1) // stages - layers * number // stages for number in range(stages)]


def layers_of_stages(layers: int, stages: int, beside: float = 0.0, *, first: bool = False) -> list[int]:
    """Return the layers of each stage.

    Args:
        beside: work of the stage that drafts, in layers of equal cost; 0: no stage drafts.
        first: the first stage drafts, not the last one.
    """
    even, others = even_layers(layers, stages), stages - 1
    if not beside or not others:
        return even
    most = max(int(layers / stages * (1.0 + TAKEN_OVER)), layers // stages + 1)
    drafting = min(
        range(min(even), max(layers - others * most, 1) - 1, -1),
        key=lambda own: max(-(-(layers - own) // others), own + beside),
    )
    rest = even_layers(layers - drafting, others)
    return [drafting, *rest] if first else [*rest, drafting]
