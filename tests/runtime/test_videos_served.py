"""Videos over HTTP: `video_url` of chat completions, hostile files, and limits of the server."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="the GPU runtime is not installed")
pytest.importorskip("transformers", reason="the model runs by transformers' code")
pytest.importorskip("fastapi", reason="the server is not installed")
pytest.importorskip("av", reason="videos are decoded by PyAV")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

from lockstep.runtime import LLM, Params  # noqa: E402
from tests.runtime.test_sounds_served import asked  # noqa: E402
from tests.support.live_server import serving  # noqa: E402
from tests.support.pictures import data_url, picture  # noqa: E402
from tests.support.videos import film, save_video_family, video_file, video_part  # noqa: E402


def test_videos_are_served_and_hostile_ones_are_one_error_each(tmp_path: Path) -> None:
    folder = tmp_path / "videos"
    folder.mkdir()
    save_video_family(folder, "Qwen3-VL")
    parts = [video_part(film(1)), {"type": "image_url", "image_url": {"url": data_url(picture(2))}}]
    with LLM(folder, device="cpu") as llm:
        message = {"role": "user", "content": [*parts, {"type": "text", "text": "what?"}]}
        wanted = llm.chat([message], Params(max_new_tokens=8, ignore_eos=True))[0].text
    file = tmp_path / "serve.toml"
    file.write_text(
        "[limits]\nvideo_seconds_max = 30.0\nvideo_bytes_max = 300_000\nvideo_pixels_max = 1_000_000\nvideos_max = 2\n"
    )
    options = (str(file), "--model", str(folder), "--device", "cpu", "--set=page_size=4")
    still = np.zeros((480, 640, 3), np.uint8)
    with serving(tmp_path / "log", *options) as server:
        for _ in range(2):
            status, answer = asked(server.url, *parts)
            assert status == 200, answer
            assert answer["choices"][0]["message"]["content"] == wanted
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 25
        playlist = b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nfile:///etc/hostname\n"
        for bad, why in (
            (video_part(video_file([still[:24, :32]] * 40, 1)), "more than 30 s"),
            (video_part(video_file([still] * 8, 4)), "640 x 480 pixels are kept"),
            (video_part(film(1)[:900]), "cut short"),
            (video_part(playlist), "none of MP4, WebM"),
            (video_part(bytes(400_000)), "more than 300,000 bytes (video_bytes_max)"),
            ({"type": "video_url", "video_url": {"url": "http://127.0.0.1/"}}, "fetches no videos"),
            ({"type": "video_url"}, "has no `video_url.url`"),
        ):
            status, refused = asked(server.url, parts[1], bad)
            assert status == 400, refused
            assert refused["error"]["param"] == "messages.0.content.1.video_url", refused
            assert why in refused["error"]["message"]
        status, refused = asked(server.url, *parts, parts[0], parts[0])
        assert (status, refused["error"]["param"]) == (400, "messages")
        assert "has 3 videos, at most 2 are allowed (videos_max)" in refused["error"]["message"]
