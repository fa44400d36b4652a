"""Layers of pipeline stages, against a search through all numbers of layers of the stage that drafts."""

from __future__ import annotations

import pytest

from lockstep.core.cluster.stage_layers import even_layers, layers_of_stages

LAYERS = (1, 2, 7, 16, 28, 32, 61, 64, 80, 126)
STAGES = (1, 2, 3, 4, 8, 16)


def most_of_others(layers: int, stages: int) -> int:
    """The most layers of a stage that does not draft: a sixteenth more than its share, or one layer more."""
    return max(layers * 17 // (stages * 16), layers // stages + 1)


@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize("layers", LAYERS)
def test_stages_differ_by_one_layer_and_later_ones_have_more(layers: int, stages: int) -> None:
    even = even_layers(layers, stages)
    assert (len(even), sum(even)) == (stages, layers)
    assert even[0] == layers // stages
    assert even[-1] == -(-layers // stages)
    assert max(even) - min(even) <= 1
    assert layers_of_stages(layers, stages) == layers_of_stages(layers, stages, first=True) == even


@pytest.mark.parametrize("beside", [0.25, 1.0, 2.5, 6.0, 40.0])
@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize("layers", [one for one in LAYERS if one >= 16])
def test_a_stage_that_drafts_has_the_layers_that_make_the_busiest_stage_least_busy(
    layers: int, stages: int, beside: float
) -> None:
    found = layers_of_stages(layers, stages, beside)
    assert layers_of_stages(layers, stages, beside, first=True) == [found[-1], *found[:-1]]
    if stages == 1:
        assert found == [layers]
        return
    *others, drafting = found
    assert (sum(found), others) == (layers, even_layers(layers - drafting, stages - 1))
    tried = {}
    for own in range(1, layers // stages + 1):
        rest = even_layers(layers - own, stages - 1)
        if max(rest) <= most_of_others(layers, stages):
            tried[own] = max(*rest, own + beside)
    least = min(tried.values())
    assert drafting == max(own for own, busiest in tried.items() if busiest == least)
