"""Contents of media that ranks divide: every rank gets the outputs of all, failures included, or the engine ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU runtime is not installed")

from lockstep.core.contract.errors import ConfigError  # noqa: E402
from lockstep.core.contract.events import PromptSpan  # noqa: E402
from lockstep.host.media.content import EncoderInput, content_of  # noqa: E402
from lockstep.host.media.division import divided, encoder_positions  # noqa: E402
from lockstep.runtime.collectives import Collectives  # noqa: E402
from lockstep.runtime.errors import DeviceLost, RankLost  # noqa: E402
from lockstep.runtime.media import DeviceMedia  # noqa: E402
from lockstep.runtime.media_share import NOTE_BYTES, EncoderShare, Output  # noqa: E402
from lockstep.runtime.overlap import CpuLane  # noqa: E402

HIDDEN = 8
SIZES = (4, 12, 6, 6, 2)  # positions of contents


def content(number: int, size: int, kind: str = "image") -> EncoderInput:
    return content_of([9] * size, {"values": np.full((size, HIDDEN), number), "image_grid_thw": [[1, 1, size]]}, kind)


CONTENTS = [content(number, size) for number, size in enumerate(SIZES)]
DIGESTS = [one.digest for one in CONTENTS]
OWNERS = divided(SIZES, 2)


class CountingEncoder:
    """Encodes the numbers of a content, with features for one deeper layer of contents with an even number."""

    token_bytes = HIDDEN * 4

    def __init__(self, fails: Sequence[bytes] = (), error: BaseException | None = None) -> None:
        self.encoded: list[bytes] = []
        self._fails, self._error = fails, error or ConfigError("the encoder made 3 embeddings for 4 positions")

    def encode(self, content: EncoderInput) -> Output:
        self.encoded.append(content.digest)
        if content.digest in self._fails:
            raise self._error
        values = torch.from_numpy(content.arrays["values"].numpy().astype(np.float32))
        return values, ((-values - 1,) if not int(values[0, 0]) % 2 else ())

    def places(self, spans: Sequence[tuple[PromptSpan, EncoderInput]], tokens: int) -> None:
        return None


@contextmanager
def ranks(folder: Path, encoders: Sequence[CountingEncoder], contents: Any = None) -> Iterator[list[DeviceMedia]]:
    """Media of ranks that are threads, over gloo."""
    count = len(encoders)

    def make(rank: int) -> tuple[DeviceMedia, Collectives]:
        group = Collectives(str(folder / "store"), rank, count, torch.device("cpu"), 5.0)
        lane = CpuLane(lambda: 0)
        media = DeviceMedia(encoders[rank], lane, 4)
        media.share = EncoderShare(group.parallel(), lane, HIDDEN, torch.float32)
        media.hold(1, CONTENTS if contents is None else contents[rank])
        return media, group

    with ThreadPoolExecutor(count) as pool:
        made = list(pool.map(make, range(count)))
    try:
        yield [media for media, _ in made]
    finally:
        for _, group in made:
            group.close()


def on_all(medias: Sequence[DeviceMedia], act: Callable[[DeviceMedia], Any]) -> list[Any]:
    """What an action returns, or raises, on each rank."""

    def attempt(media: DeviceMedia) -> Any:
        try:
            return act(media)
        except DeviceLost as error:
            return error

    with ThreadPoolExecutor(len(medias)) as pool:
        return list(pool.map(attempt, medias))


def assert_whole(media: DeviceMedia, numbers: Sequence[int]) -> None:
    """Every output is that of its own content, in memory of its own."""
    assert set(media.outputs) == {DIGESTS[number] for number in numbers}
    for number in numbers:
        (first, deeper), size = media.outputs[DIGESTS[number]], SIZES[number]
        assert first.shape == (size, HIDDEN)
        assert (first == number).all()
        assert [(one == -number - 1).all().item() for one in deeper] == [True] * (1 - number % 2)
        assert first.untyped_storage().nbytes() <= 4 * HIDDEN * size * (1 + len(deeper))


def test_each_rank_encodes_its_share_and_has_all_outputs(tmp_path: Path) -> None:
    encoders = [CountingEncoder(), CountingEncoder()]
    with ranks(tmp_path, encoders) as medias:
        assert on_all(medias, lambda one: one.encode(DIGESTS, ())) == [[""] * 5] * 2
        for rank, media in enumerate(medias):
            assert encoders[rank].encoded == [d for d, owner in zip(DIGESTS, OWNERS, strict=True) if owner == rank]
            assert_whole(media, range(5))
        assert on_all(medias, lambda one: one.encode(DIGESTS[:1] * 2, DIGESTS[1:4])) == [["", ""]] * 2
        for media in medias:
            assert_whole(media, (0, 4))
    assert sum(len(one.encoded) for one in encoders) == 6


def test_more_ranks_than_contents(tmp_path: Path) -> None:
    encoders = [CountingEncoder() for _ in range(3)]
    with ranks(tmp_path, encoders) as medias:
        assert on_all(medias, lambda one: one.encode(DIGESTS[:1], ())) == [[""]] * 3
        for media in medias:
            assert_whole(media, (0,))
    assert [len(one.encoded) for one in encoders] == [1, 0, 0]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_content_that_fails_on_its_rank_fails_on_all(rank: int, tmp_path: Path) -> None:
    """The other rank would encode it, and is not asked to."""
    failed = OWNERS.index(rank)
    encoders = [CountingEncoder(DIGESTS[failed : failed + 1] if one == rank else ()) for one in range(2)]
    with ranks(tmp_path, encoders) as medias:
        errors = on_all(medias, lambda one: one.encode(DIGESTS, ()))
        assert errors[0] == errors[1]
        assert [number for number, why in enumerate(errors[0]) if why] == [failed]
        assert errors[0][failed] == "the encoder made 3 embeddings for 4 positions"
        for media in medias:
            assert_whole(media, [number for number in range(5) if number != failed])


def test_a_long_reason_is_cut_between_letters(tmp_path: Path) -> None:
    encoders = [CountingEncoder(DIGESTS[1:2], ValueError("é" * NOTE_BYTES)) for _ in range(2)]
    with ranks(tmp_path, encoders) as medias:
        first, second = on_all(medias, lambda one: one.encode(DIGESTS[1:2], ()))
    assert first == second
    assert first[0].startswith("ValueError: éé")
    assert len(first[0].encode()) <= NOTE_BYTES


def test_a_content_that_one_rank_lacks_fails_on_all_or_ends_the_engine(tmp_path: Path) -> None:
    """Without the content its cost is unknown, so the division differs, unless it is the only content."""
    lacking = [CONTENTS, CONTENTS[:1] + CONTENTS[2:]]
    with ranks(tmp_path, [CountingEncoder(), CountingEncoder()], lacking) as medias:
        found = on_all(medias, lambda one: one.encode(DIGESTS, ()))
        assert all(isinstance(one, RankLost) for one in found), found
    (tmp_path / "other").mkdir()
    nothing: list[list[EncoderInput]] = [[], []]
    with ranks(tmp_path / "other", [CountingEncoder(), CountingEncoder()], nothing) as medias:
        found = on_all(medias, lambda one: one.encode(DIGESTS, ()))
    assert found == [["its content is not here any more"] * 5] * 2


def test_ranks_that_divide_differently_are_lost(tmp_path: Path) -> None:
    with ranks(tmp_path, [CountingEncoder(), CountingEncoder()]) as medias:
        share = medias[1].share
        assert share is not None
        share.owners = lambda costs: [1 - owner for owner in divided(costs, 2)]  # type: ignore[method-assign]
        found = on_all(medias, lambda one: one.encode(DIGESTS, ()))
    assert [type(one) for one in found] == [RankLost] * 2
    assert "rank 1 divides 5 contents of media differently than rank 0" in str(found[0])
    assert "rank 0 divides 5 contents of media differently than rank 1" in str(found[1])


def test_contents_in_another_order_are_noticed(tmp_path: Path) -> None:
    with ranks(tmp_path, [CountingEncoder(), CountingEncoder()]) as medias:
        orders = {id(medias[0]): DIGESTS, id(medias[1]): DIGESTS[::-1]}
        found = on_all(medias, lambda one: one.encode(orders[id(one)], ()))
    assert [type(one) for one in found] == [RankLost] * 2


def test_a_rank_that_ends_while_others_wait_for_its_share_ends_them(tmp_path: Path) -> None:
    encoders = [CountingEncoder(), CountingEncoder(DIGESTS, DeviceLost("planted"))]
    with ranks(tmp_path, encoders) as medias:
        found = on_all(medias, lambda one: one.encode(DIGESTS, ()))
    assert [isinstance(one, DeviceLost) for one in found] == [True] * 2
    assert "planted" in str(found[1])


def test_costs_are_positions_of_the_encoder() -> None:
    assert [encoder_positions(one) for one in CONTENTS] == list(SIZES)
