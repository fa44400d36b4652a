"""The samples of an audio clip, by libsndfile, within limits: one channel, at the sampling rate of the model.

The header of a file states how many samples it has. It is checked before anything is decoded, and not trusted: samples
are decoded piece by piece, up to the limit. Channels are averaged and the rate is changed as transformers' `load_audio`
does it, so that the encoder receives the same numbers.
"""

from __future__ import annotations

import io
import math
import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.host.media.processor import MediaError
from lockstep.host.media.source import MediaLimits

FORMATS = ("WAV", "MP3", "FLAC", "OGG")
CHANNELS_MAX = 8
RATE_MIN, RATE_MAX = 1_000, 192_000  # samples of one channel per second
PIECE_SAMPLES = 1 << 16
UNKNOWN_SAMPLES = 1 << 62  # libsndfile's number for a file that does not state it
UNKNOWN_BYTES = (0, 2**32 - 1)  # in the header of a WAV file that was written as a stream
CHUNK = struct.Struct("<4sI")  # of a WAV file: its name, and its bytes

Samples = NDArray[np.float32]


def decode_audio(raw: bytes, rate: int, limits: MediaLimits) -> Samples:
    """Return the samples of an audio clip, float32, at a rate per second. Raises MediaError."""
    import soundfile
    import soxr

    if _format_of(raw) not in FORMATS:
        raise MediaError(f"the audio clip cannot be decoded: it is none of {', '.join(FORMATS)}")
    _check_wav(raw)
    try:
        with soundfile.SoundFile(io.BytesIO(raw)) as file:
            samples = _samples(file, limits)
            given = int(file.samplerate)
    except MediaError:
        raise
    except Exception as error:  # libsndfile's own, and those of files that it reads in part
        why = str(getattr(error, "error_string", error)).strip(" .")  # without the address of the file object
        raise MediaError(f"the audio clip cannot be decoded: {why[:200]}") from None
    if not len(samples):
        raise MediaError("the audio clip has no samples")
    if not np.isfinite(samples).all():
        raise MediaError("the audio clip has samples that are no finite numbers")
    if given == rate:
        return samples
    count = math.ceil(len(samples) * rate / given)
    changed: Samples = soxr.resample(samples, given, rate, quality="soxr_hq")
    return np.ascontiguousarray(np.pad(changed, (0, max(0, count - len(changed))))[:count], np.float32)


def _format_of(raw: bytes) -> str:
    """Return the format of a file by its first bytes; empty if it is none that is read."""
    if raw[:4] == b"RIFF" and raw[8:12] == b"WAVE":
        return "WAV"
    if raw[:3] == b"ID3" or (len(raw) > 1 and raw[0] == 0xFF and raw[1] & 0xE6 == 0xE2):  # layer 3 of MPEG
        return "MP3"
    return {b"fLaC": "FLAC", b"OggS": "OGG"}.get(raw[:4], "")


def _check_wav(raw: bytes) -> None:
    """Check that a WAV file has the bytes that its header states; libsndfile would read what is there.

    Raises: MediaError.
    """
    at = 12
    while raw[:4] == b"RIFF" and at + CHUNK.size <= len(raw):
        name, size = CHUNK.unpack_from(raw, at)
        at += CHUNK.size
        if name == b"data":
            if size not in UNKNOWN_BYTES and size > len(raw) - at:
                stated = f"its header states {size:,} bytes of samples, {len(raw) - at:,} follow"
                raise MediaError(f"the audio clip is cut short: {stated}")
            return
        at += size + size % 2


def _samples(file: Any, limits: MediaLimits) -> Samples:
    """Return the samples of an open file, the mean of its channels. Raises MediaError."""
    if file.format not in FORMATS and file.format not in ("WAVEX", "MPEG"):
        raise MediaError(f"the audio clip is {file.format}, which is not read; give {', '.join(FORMATS)}")
    if file.channels > CHANNELS_MAX or not RATE_MIN <= file.samplerate <= RATE_MAX:
        raise MediaError(
            f"the audio clip has {file.channels} channels of {file.samplerate:,} samples per second; at most "
            f"{CHANNELS_MAX} channels of {RATE_MIN:,} to {RATE_MAX:,} are allowed"
        )
    most = int(limits.audio_seconds * file.samplerate)
    stated = int(file.frames)
    _check_length(stated if stated < UNKNOWN_SAMPLES else 0, most, file.samplerate, limits)
    pieces, count = [], 0
    while len(piece := file.read(PIECE_SAMPLES, dtype="float32", always_2d=True)):
        count += len(piece)
        _check_length(count, most, file.samplerate, limits)
        pieces.append(piece.mean(axis=1) if file.channels > 1 else piece[:, 0])
    if count < stated < UNKNOWN_SAMPLES:
        raise MediaError(f"the audio clip is cut short: its header states {stated:,} samples, {count:,} follow")
    return np.concatenate(pieces) if pieces else np.empty(0, np.float32)


def _check_length(samples: int, most: int, rate: int, limits: MediaLimits) -> None:
    if samples > most:
        raise MediaError(
            f"the audio clip has {samples / rate:,.1f} s or more, at most {limits.audio_seconds:g} are allowed "
            "(audio_seconds_max)"
        )
