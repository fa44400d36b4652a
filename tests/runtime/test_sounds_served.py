"""Audio clips over HTTP: `input_audio` and `audio_url` of chat completions, hostile clips, and limits of the server."""

from __future__ import annotations

import base64
import json
import struct
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the GPU runtime is not installed")
pytest.importorskip("transformers", reason="the model runs by transformers' code")
pytest.importorskip("fastapi", reason="the server is not installed")
pytest.importorskip("soundfile", reason="audio clips are decoded by soundfile")
pytest.importorskip("soxr", reason="their sampling rate is changed by soxr")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

from lockstep.runtime import LLM, Params  # noqa: E402
from tests.support.live_server import serving  # noqa: E402
from tests.support.pictures import data_url, picture  # noqa: E402
from tests.support.sounds import RATE, clip, clip_part, save_sound_family, sound_file, sound_part  # noqa: E402


def asked(url: str, *parts: dict[str, Any], **body: Any) -> tuple[int, Any]:
    """Status and answer of a chat with these parts."""
    message = {"role": "user", "content": [*parts, {"type": "text", "text": "what?"}]}
    sent = json.dumps({"messages": [message], "max_tokens": 8, "temperature": 0, "ignore_eos": True, **body}).encode()
    request = urllib.request.Request(f"{url}/v1/chat/completions", sent, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def stating(size: int) -> bytes:
    """A clip whose header states so many bytes of samples."""
    raw = bytearray(clip(0))
    raw[40:44] = struct.pack("<I", size)
    return bytes(raw)


def test_clips_are_served_and_hostile_ones_are_one_error_each(tmp_path: Path) -> None:
    folder = tmp_path / "sounds"
    folder.mkdir()
    save_sound_family(folder)
    parts = [clip_part(3), clip_part(1)]
    with LLM(folder, device="cpu") as llm:
        message = {"role": "user", "content": [*parts, {"type": "text", "text": "what?"}]}
        wanted = llm.chat([message], Params(max_new_tokens=8, ignore_eos=True))[0].text
    file = tmp_path / "serve.toml"
    file.write_text("[limits]\naudio_seconds_max = 30.0\naudio_bytes_max = 3_000_000\naudios_max = 2\n")
    options = (str(file), "--model", str(folder), "--device", "cpu", "--set=page_size=4")
    with serving(tmp_path / "log", *options) as server:
        for _ in range(2):
            status, said = asked(server.url, *parts)
            assert status == 200, said
            assert said["choices"][0]["message"]["content"] == wanted
        assert said["usage"]["prompt_tokens_details"]["cached_tokens"] > 25
        raw = base64.b64encode(clip(1)).decode()
        by_url = {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{raw}"}}
        status, said = asked(server.url, parts[0], by_url)
        assert said["choices"][0]["message"]["content"] == wanted
        silence = np.zeros(600 * RATE, np.float32)
        for bad, field, why in (
            (sound_part(stating(2 * 10**9)), "input_audio", "cut short: its header states 2,000,000,000 bytes"),
            (sound_part(sound_file(silence, form="FLAC"), "flac"), "input_audio", "600.0 s or more, at most 30"),
            (sound_part(sound_file(silence, form="MP3"), "mp3"), "input_audio", "600.0 s or more, at most 30"),
            (sound_part(sound_file(silence[: 2 * RATE])), "input_audio", "this model takes the first 1 s"),
            (sound_part(clip(1)[:1000]), "input_audio", "cut short"),
            (sound_part(b"\x89PNG" + bytes(99)), "input_audio", "none of WAV, MP3, FLAC, OGG"),
            (sound_part(bytes(3_100_000)), "input_audio", "more than 3,000,000 bytes (audio_bytes_max)"),
            (sound_part(clip(1), "pcm16"), "input_audio", "`input_audio.format` must be one of wav, mp3"),
            ({"type": "input_audio"}, "input_audio", "has no `input_audio.data`"),
            ({"type": "audio_url", "audio_url": {"url": "http://127.0.0.1/"}}, "audio_url", "fetches no audio clips"),
            ({"type": "image_url", "image_url": {"url": data_url(picture(1))}}, "image_url", "takes audio clips only"),
        ):
            status, refused = asked(server.url, clip_part(0), bad)
            assert status == 400, refused
            assert refused["error"]["param"] == f"messages.0.content.1.{field}", refused
            assert why in refused["error"]["message"]
        status, refused = asked(server.url, *parts, clip_part(0))
        assert (status, refused["error"]["param"]) == (400, "messages")
        assert "has 3 audio clips, at most 2 are allowed (audios_max)" in refused["error"]["message"]
        status, said = asked(server.url, *parts)
        assert said["choices"][0]["message"]["content"] == wanted  # after all of these
