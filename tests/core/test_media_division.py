"""Division of media over the ranks of an encoder, by the positions that it computes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.host.media.content import content_of
from lockstep.host.media.division import divided, encoder_positions


def test_the_longest_goes_first_to_the_rank_with_the_least() -> None:
    assert divided([900, 100, 400, 100, 500], 2) == [0, 0, 1, 1, 1]
    assert divided([5, 5, 5, 5], 2) == [0, 1, 0, 1]
    assert divided([1, 2, 3], 1) == [0, 0, 0]
    assert divided([], 4) == []


@given(costs=st.lists(st.integers(0, 5000), max_size=40), ranks=st.integers(1, 9))
def test_no_rank_has_more_than_the_mean_and_one_content(costs: list[int], ranks: int) -> None:
    owners = divided(costs, ranks)
    loads = [sum(cost for cost, owner in zip(costs, owners, strict=True) if owner == rank) for rank in range(ranks)]
    assert sum(loads) == sum(costs)
    assert max(loads) <= sum(costs) / ranks + max(costs, default=0)


@pytest.mark.parametrize(
    ("arrays", "positions"),
    [
        ({"pixel_values": np.zeros((24, 96)), "image_grid_thw": [[1, 4, 6]]}, 24),
        ({"pixel_values_videos": np.zeros((48, 96)), "video_grid_thw": [[2, 4, 6]], "second_per_grid_ts": [1.0]}, 48),
        ({"pixel_values": np.zeros((60, 96)), "image_grid_thw": [[1, 4, 6], [1, 6, 6]]}, 60),
        ({"input_features": np.zeros((1, 80, 3000)), "feature_attention_mask": np.ones((1, 3000), bool)}, 1500),
        ({"pixel_values": np.zeros((1, 3, 28, 28))}, 4),
        ({"pixel_values": np.zeros((1, 5, 3, 28, 28)), "pixel_attention_mask": np.ones((1, 5, 28, 28), bool)}, 20),
        ({"pixel_values": np.zeros((1, 3, 2, 2))}, 1),
        ({}, 1),
    ],
    ids=["patches", "frames", "two parts", "sound", "one tile", "tiles", "tiny", "nothing"],
)
def test_positions_follow_from_the_shapes_of_arrays(arrays: dict[str, object], positions: int) -> None:
    assert encoder_positions(content_of([7, 7], arrays)) == positions
