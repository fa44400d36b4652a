"""Audio clips of requests: what is decoded, and hostile ones. Each ends with one error within the limits."""

from __future__ import annotations

import base64
import io
import struct
import time

import numpy as np
import pytest

soundfile = pytest.importorskip("soundfile", reason="audio clips are decoded by soundfile")
pytest.importorskip("soxr", reason="their sampling rate is changed by soxr")

from lockstep.api.processes.wire import EngineInfo  # noqa: E402
from lockstep.host.media.audio import decode_audio  # noqa: E402
from lockstep.host.media.conversation import check_count, with_media  # noqa: E402
from lockstep.host.media.processor import MediaError  # noqa: E402
from lockstep.host.media.source import MediaLimits, read_media  # noqa: E402

LIMITS = MediaLimits(audio_bytes=400_000, audio_seconds=5.0, audios=2)
RATE = 16_000
TONE = (0.3 * np.sin(np.arange(2 * RATE) / 5)).astype(np.float32)


def saved(samples: object = TONE, form: str = "WAV", rate: int = RATE, **options: str) -> bytes:
    out, shape = io.BytesIO(), np.shape(samples)
    with soundfile.SoundFile(out, "w", rate, 1 if len(shape) == 1 else shape[1], format=form, **options) as file:
        values = np.asarray(samples, np.float32)
        for at in range(0, len(values), 1 << 16):
            file.write(values[at : at + (1 << 16)])
    return out.getvalue()


def stating(size: int) -> bytes:
    """A WAV file whose header states so many bytes of samples."""
    raw = bytearray(saved())
    raw[40:44] = struct.pack("<I", size)
    return bytes(raw)


def flac_stating(samples: int) -> bytes:
    """A FLAC file whose header states so many samples."""
    raw = bytearray(saved(form="FLAC"))
    packed = int.from_bytes(raw[18:26], "big") >> 36 << 36 | samples
    raw[18:26] = packed.to_bytes(8, "big")
    return bytes(raw)


SILENCE = np.zeros(600 * RATE, np.float32)


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (lambda: stating(2 * 10**9), "cut short: its header states 2,000,000,000 bytes"),
        (lambda: flac_stating(10**9), r"62,500.0 s or more, at most 5 .*\(audio_seconds_max\)"),
        (lambda: saved(SILENCE, "FLAC"), "600.0 s or more"),
        (lambda: saved(SILENCE, "OGG"), "600.0 s or more"),
        (lambda: saved(SILENCE, "MP3"), "600.0 s or more"),
        (lambda: saved()[:20_000], "cut short"),
        (lambda: saved(form="FLAC")[:8_000], "cannot be decoded"),
        (lambda: saved(form="MP3")[:2_000], "cut short"),
        (lambda: saved(form="OGG")[:2_000], "cannot be decoded"),
        (lambda: b"RIFF\x00\x00\x00\x00WAVEfmt ", "cannot be decoded"),
        (lambda: b"", "none of WAV, MP3, FLAC, OGG"),
        (lambda: b"\x89PNG\r\n\x1a\n" + bytes(60), "none of WAV, MP3, FLAC, OGG"),
        (lambda: b"ID3" + bytes(2_000), "cannot be decoded"),
        (lambda: b"\xff\xfb" + b"\x90" * 4_000, "cannot be decoded"),
        (lambda: saved(form="AIFF"), "none of WAV, MP3, FLAC, OGG"),
        (lambda: saved(TONE[:0]), "has no samples"),
        (lambda: saved([np.nan] * 100, subtype="FLOAT"), "no finite numbers"),
        (lambda: saved(np.zeros((10, 9))), "has 9 channels"),
        (lambda: saved(TONE[:9], rate=500), "500 samples per second"),
        (lambda: saved(TONE[:9], rate=10**6), "1,000,000 samples per second"),
    ],
    ids=[
        "10^9 samples", "10^9 samples of FLAC", "silence in FLAC", "silence in Ogg", "silence in MP3", "WAV cut short",
        "FLAC cut short", "MP3 cut short", "Ogg cut short", "header only", "nothing", "picture", "tag only",
        "no frames", "AIFF", "no samples", "no numbers", "channels", "low rate", "high rate",
    ],
)  # fmt: skip
def test_a_hostile_clip_is_one_error(raw: object, why: str) -> None:
    assert callable(raw)
    given = raw()
    began = time.monotonic()
    with pytest.raises(MediaError, match=why):
        decode_audio(given, RATE, LIMITS)
    assert time.monotonic() - began < 10


def test_a_stream_that_does_not_say_its_length_is_read_up_to_the_limit() -> None:
    assert len(decode_audio(stating(2**32 - 1), RATE, LIMITS)) == len(TONE)
    long = bytearray(saved(SILENCE[: 6 * RATE]))
    long[40:44] = struct.pack("<I", 2**32 - 1)
    with pytest.raises(MediaError, match="at most 5 are allowed"):
        decode_audio(bytes(long), RATE, LIMITS)


@pytest.mark.parametrize(
    ("form", "rate", "channels"),
    [("WAV", 44_100, 2), ("FLAC", 8_000, 1), ("MP3", 22_050, 2), ("OGG", 48_000, 2), ("WAV", 16_000, 3)],
)
def test_samples_are_those_that_transformers_loads(form: str, rate: int, channels: int) -> None:
    audio_utils = pytest.importorskip("transformers.audio_utils")
    values = np.random.default_rng(3).normal(0, 0.2, (rate // 2 + 7, channels)).astype(np.float32)
    raw = saved(values, form, rate)
    url = f"data:audio/{form.lower()};base64,{base64.b64encode(raw).decode()}"
    expected = audio_utils.load_audio(url, sampling_rate=RATE, backend="soundfile")
    found = decode_audio(raw, RATE, LIMITS)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, expected)


def test_urls_of_clips() -> None:
    body = base64.b64encode(saved()).decode()
    assert read_media("audio", f"data:audio/wav;base64,{body}", LIMITS) == saved()
    for url, why in (
        (f"data:image/png;base64,{body}", "must begin with data:audio/"),
        (f"data:audio/wav;base64,{'A' * 600_000}", r"more than 400,000 bytes \(audio_bytes_max\)"),
        ("data:audio/wav;base64,A*==", "not base64"),
        ("https://example.com/x.wav", "fetches no audio clips"),
        ("file:///etc/hostname", "reads no files"),
    ):
        with pytest.raises(MediaError, match=why):
            read_media("audio", url, LIMITS)


def test_parts_of_messages_with_clips() -> None:
    parts = [
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "mp3"}},
        {"type": "text", "text": "and"},
        {"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64,BBBB"}},
    ]
    shown, media = with_media([{"role": "user", "content": parts}])
    assert shown[0]["content"] == [{"type": "audio"}, parts[1], {"type": "audio"}]
    assert media == [("audio", "data:audio/mp3;base64,AAAA"), ("audio", "data:audio/wav;base64,BBBB")]
    with pytest.raises(MediaError, match="3 audio clips, at most 2"):
        check_count(["audio"] * 3, LIMITS)
    with pytest.raises(MediaError, match=r"`input_audio.format` must be one of wav, mp3, flac, ogg, got `pcm16`"):
        with_media(
            [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "A", "format": "pcm16"}}]}]
        )


def info(**more: object) -> EngineInfo:
    """An engine with these properties."""
    sizes = dict.fromkeys(("vocabulary", "request_tokens_max", "prompt_tokens_max"), 1)
    known = {"model": "m", "kind": "model", "device": "cpu", "logprobs": True, "eos_token_ids": (), "settings": {}}
    return EngineInfo(**{**known, **sizes, **more})  # type: ignore[arg-type]


def test_a_kind_that_is_not_served_has_a_reason() -> None:
    extra = 'soundfile is not installed: pip install "lockstep-core[audio]"'
    lacking = info(media=("image",), no_kinds={"audio": extra})
    assert [lacking.why_no(kind) for kind in ("image", "audio")] == ["", extra]
    assert lacking.why_no("video") == "this model takes images and audio clips only"
    assert info(no_kinds={"audio": extra}).why_no("audio") == extra
    assert info(no_kinds={"audio": extra}).why_no("image") == "this model takes audio clips only"
    assert info().why_no("audio") == "this model takes text only"
