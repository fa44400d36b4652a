"""The bytes that a video file states, which a file that is cut short does not have."""

from __future__ import annotations

import pytest

from lockstep.host.media.video import SEGMENT, _stated_bytes

HEAD = b"\x1a\x45\xdf\xa3" + bytes(20)


def webm(size: int, length: int, body: int) -> bytes:
    """Return a file whose segment states a size in so many bytes."""
    return HEAD + SEGMENT + (1 << 7 * length | size).to_bytes(length, "big") + bytes(body)


@pytest.mark.parametrize("length", range(1, 9))
def test_a_segment_of_webm_states_its_size_in_one_to_eight_bytes(length: int) -> None:
    most = (1 << 7 * length) - 2  # all ones: of a stream
    for size in {size for size in (0, 1, 33, 77, 126, most - 1, most) if size <= most}:
        assert _stated_bytes(webm(size, length, 40), "matroska") == len(HEAD) + 4 + length + size
    assert _stated_bytes(webm(most + 1, length, 40), "matroska") == 0


def test_a_file_without_a_segment_states_nothing() -> None:
    assert _stated_bytes(HEAD + bytes(40), "matroska") == 0
    assert _stated_bytes(HEAD + SEGMENT + bytes(40), "matroska") == 0


def box(name: bytes, size: int, *, long: bool = False) -> bytes:
    """Return a part of an MP4 file."""
    head = (1).to_bytes(4, "big") + name + size.to_bytes(8, "big") if long else size.to_bytes(4, "big") + name
    return head + bytes(max(0, min(size, 200) - len(head)))


def test_parts_of_mp4_state_their_sizes_one_after_the_other() -> None:
    assert _stated_bytes(box(b"ftyp", 20) + box(b"moov", 33), "mp4") == 53
    assert _stated_bytes(box(b"ftyp", 20) + box(b"mdat", 100, long=True) + box(b"moov", 8), "mp4") == 128
    assert _stated_bytes(box(b"ftyp", 20) + box(b"mdat", 1_000), "mp4") == 1_020
    assert _stated_bytes(box(b"ftyp", 20) + box(b"mdat", 2**40, long=True), "mp4") == 20 + 2**40
    assert _stated_bytes(box(b"ftyp", 20) + bytes(7), "mp4") == 20
    for size in (0, 7):  # up to the end, or nothing that can be read
        assert _stated_bytes(box(b"ftyp", 20) + box(b"mdat", size) + bytes(20), "mp4") == 0
