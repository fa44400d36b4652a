"""Which rank of an engine encodes which of the contents that are encoded together: for the runtime and the simulator.

    costs     900  100  400  100  500              positions that the encoder computes
    rank 0    900            100                   longest first, each to the rank with the least so far
    rank 1              400       500  100

Equal costs keep their order, and of equal loads the lower rank is next. So ranks that have the same contents in the
same order compute the same division, and exchange nothing for it.
"""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.host.media.content import EncoderInput

GRIDS = ("image_grid_thw", "video_grid_thw")  # patches along time, height and width, one row for each part
SOUND = "input_features"
FRAMES_PER_POSITION = 2  # of a spectrum: the second convolution of Whisper's encoder has stride 2
PATCH_PIXELS = 14 * 14  # of encoders of tiles of one size, where only the number of tiles differs


# mechanism: encoder-division (decided)
def divided(costs: Sequence[int], ranks: int) -> list[int]:
    """Return the rank that encodes each content, by the costs of contents that are encoded together."""
    owners, loads = [0] * len(costs), [0] * ranks
    for number in sorted(range(len(costs)), key=lambda number: costs[number], reverse=True):
        owners[number] = rank = loads.index(min(loads))
        loads[rank] += costs[number]
    return owners


def encoder_positions(content: EncoderInput) -> int:
    """Return the positions that an encoder computes for a content, by the shapes of its arrays; at least 1.

    Padding counts: an encoder of sound computes whole windows.
    """
    grids = [content.arrays[name].numpy().reshape(-1, 3) for name in GRIDS if name in content.arrays]
    if grids:
        return max(1, sum(int(grid.prod(axis=1).sum()) for grid in grids))
    shapes = {name: one.shape for name, one in content.arrays.items()}
    if (sound := shapes.get(SOUND)) is not None:
        return max(1, _product(sound[:-2]) * sound[-1] // FRAMES_PER_POSITION)
    return max(1, max((_product(shape) for shape in shapes.values()), default=0) // (3 * PATCH_PIXELS))


def _product(shape: Sequence[int]) -> int:
    size = 1
    for one in shape:
        size *= one
    return size
