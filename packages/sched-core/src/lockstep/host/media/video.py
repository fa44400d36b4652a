"""The frames of a video, by FFmpeg's libraries (PyAV), within limits: some of them, spread evenly over its time.

    file ──packets──> frames it has, and their rate ──> which ones are wanted ──> decoded in order, these are kept

Packets are counted before anything is decoded, so that the header need not be trusted. Only two containers and the
usual codecs are tried: other formats of FFmpeg open further files and addresses that a playlist names.
"""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.host.media.frames import FrameSampling, VideoFrames
from lockstep.host.media.processor import MediaError
from lockstep.host.media.source import MediaLimits

FORMATS = ("MP4", "WebM")
CODECS = ("h264", "hevc", "vp8", "vp9", "av1", "libdav1d", "mpeg4")
SEGMENT, HEAD_BYTES = b"\x18\x53\x80\x67", 4096  # the part of WebM with everything, which begins within so many bytes
RATE_MAX = 240.0  # frames per second


def decode_video(raw: bytes, sampling: FrameSampling, limits: MediaLimits) -> VideoFrames:
    """Return frames of a video. Raises MediaError."""
    import av

    form = {b"ftyp": "mp4"}.get(raw[4:8]) or {b"\x1a\x45\xdf\xa3": "matroska"}.get(raw[:4])
    if form is None:
        raise MediaError(f"the video cannot be decoded: it is none of {', '.join(FORMATS)}")
    if _stated_bytes(raw, form) > len(raw):
        raise MediaError(f"the video is cut short: it has {len(raw):,} of {_stated_bytes(raw, form):,} bytes")
    try:
        total, rate = _counted(raw, form, limits, av)
        wanted = sampling.frames(total, rate)
        with _opened(raw, form, av) as container:
            stream = container.streams.video[0]
            stream.codec_context.thread_count = 1
            _check_pixels(stream.width, stream.height, len(wanted), limits)
            kept = list[NDArray[np.uint8]]()
            for number, frame in enumerate(container.decode(stream)):
                if number == wanted[len(kept)]:
                    _check_pixels(frame.width, frame.height, len(wanted), limits)
                    kept.append(frame.to_ndarray(format="rgb24"))
                    if len(kept) == len(wanted):
                        break
    except MediaError:
        raise
    except Exception as error:  # FFmpeg's own, and those of files that it reads in part
        raise MediaError(f"the video cannot be decoded: {str(error)[:200]}") from None
    if len(kept) < len(wanted):
        raise MediaError(f"the video is cut short: {total:,} frames are announced, {wanted[len(kept)]:,} is missing")
    if len({one.shape for one in kept}) > 1:
        raise MediaError("the video changes its size")
    return VideoFrames(np.stack(kept), wanted, total, rate)


def _stated_bytes(raw: bytes, form: str) -> int:
    """Return the bytes of a file by the sizes of its parts, which state more than a file that is cut short has."""
    at = 0
    if form == "matroska":
        at = raw.find(SEGMENT, 0, HEAD_BYTES)
        first = raw[at + 4] if 0 <= at < len(raw) - 12 else 0
        length = 9 - first.bit_length()
        size = int.from_bytes(raw[at + 4 : at + 4 + length], "big") & ((1 << 7 * length) - 1)
        return 0 if not first or size == (1 << 7 * length) - 1 else at + 4 + length + size  # all ones: of a stream
    while at + 8 <= len(raw):
        size = int.from_bytes(raw[at : at + 4], "big")
        if size == 1:  # it follows the name, in 8 bytes
            size = int.from_bytes(raw[at + 8 : at + 16], "big")
        if size < 8:  # up to the end, or nothing that can be read
            return 0
        at += size
    return at


def _opened(raw: bytes, form: str, av: Any) -> Any:
    return av.open(io.BytesIO(raw), format=form, options={"protocol_whitelist": "", "enable_drefs": "0"})


def _counted(raw: bytes, form: str, limits: MediaLimits, av: Any) -> tuple[int, float]:
    """Return the frames of a video, and their rate. Raises MediaError."""
    with _opened(raw, form, av) as container:
        if not container.streams.video:
            raise MediaError("the file has no video")
        stream = container.streams.video[0]
        codec = stream.codec_context.name
        if codec not in CODECS:
            raise MediaError(f"the video is coded as {codec}, which is not read; give {', '.join(CODECS)}")
        most = int(limits.video_seconds * RATE_MAX)
        total, first, last = 0, None, 0.0
        for packet in container.demux(stream):
            if not packet.size:
                continue  # the end
            total += 1
            if packet.pts is not None:
                at = float(packet.pts * packet.time_base)
                first, last = at if first is None else min(first, at), max(last, at)
            if total > most or last - (first or 0.0) > limits.video_seconds:
                raise MediaError(
                    f"the video has more than {limits.video_seconds:g} s, or {most:,} frames (video_seconds_max)"
                )
        rate = float(stream.average_rate or 0) or (total - 1) / max(last - (first or 0.0), 1e-3)
        if not total:
            raise MediaError("the video has no frames")
        if not 0 < rate <= RATE_MAX:
            raise MediaError(f"the video has {rate:g} frames per second, at most {RATE_MAX:g} are allowed")
        return total, rate


def _check_pixels(width: int, height: int, frames: int, limits: MediaLimits) -> None:
    """Check the pixels of the frames that are kept. Raises MediaError."""
    if width * height * frames > limits.video_pixels:
        kept = f"{frames} frames of the video with {width:,} x {height:,} pixels are kept"
        raise MediaError(f"{kept}, at most {limits.video_pixels:,} pixels in all are allowed (video_pixels_max)")
