"""Prompts with videos: tokens and hidden states of transformers, frames and patches, hostile files."""

from __future__ import annotations

import io
import time
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU runtime is not installed")
pytest.importorskip("transformers", reason="the models run by transformers' code")
pytest.importorskip("av", reason="videos are decoded by PyAV")
pytest.importorskip("PIL", reason="frames are resized by Pillow")

from lockstep.core.contract.errors import ConfigError  # noqa: E402
from lockstep.host.media import processor  # noqa: E402
from lockstep.host.media.frames import MEANS, FrameSampling, PillowFrames  # noqa: E402
from lockstep.host.media.processor import MediaError  # noqa: E402
from lockstep.host.media.source import MediaLimits  # noqa: E402
from lockstep.host.media.video import decode_video  # noqa: E402
from lockstep.runtime import LLM, Params  # noqa: E402
from lockstep.runtime.models import read_settings  # noqa: E402
from tests.support.pictures import serve_pictures  # noqa: E402
from tests.support.sounds import sound_file, sound_part  # noqa: E402
from tests.support.videos import (  # noqa: E402
    FILMS,
    SAMPLING,
    film,
    greedy_videos,
    save_video_family,
    video_conversations,
    video_file,
    video_inputs,
    video_part,
)

REQUESTS = 18
SOME = ("Qwen2.5-VL", "Qwen3-VL")
"""Positions of time by seconds; frames between their times as text, features behind the first layers."""
LIMITS = MediaLimits(video_seconds=60.0, video_pixels=1_000_000)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that saves a family once, and answers its conversations by transformers."""
    made: dict[str, Any] = {}

    def save(name: str) -> Any:
        if name not in made:
            folder = tmp_path_factory.mktemp("family")
            model, library = save_video_family(folder, name)
            asked = video_conversations(REQUESTS)
            made[name] = (folder, model, library, asked, greedy_videos(folder, model, library, asked))
        return made[name]

    return save


@pytest.mark.parametrize("name", SOME)
def test_tokens_are_those_of_transformers(name: str, saved: Any) -> None:
    folder, _, _, asked, answers = saved(name)
    assert len(set(map(tuple, answers))) > REQUESTS // 2
    served = serve_pictures(folder, asked, pages=1200, overlap_depth=1)
    assert served.answers == answers
    assert served.cached_tokens
    assert served.retractions
    assert served.encoded == len({one for _, shown, _ in asked for one in shown})


def test_little_room_and_a_budget_change_no_token(saved: Any) -> None:
    folder, _, _, asked, answers = saved("Qwen3-VL")
    with LLM(folder, device="cpu") as llm:
        prompts = [llm.chat_prompt(messages) for messages, _, _ in asked]
    needed = [sum(one.positions for one in prompt.contents) for prompt in prompts if not isinstance(prompt, list)]
    served = serve_pictures(folder, asked, pages=1200, encoder_cache_tokens=max(needed), encoder_budget_tokens=16)
    assert served.answers == answers
    assert served.encoded > len({one for _, shown, _ in asked for one in shown})  # some were encoded again


@pytest.mark.parametrize("name", SOME)
def test_hidden_states_are_those_of_transformers(name: str, saved: Any) -> None:
    """The mean of the hidden states, for each film, for two in a prompt, and for one cached by an answer before."""
    folder, model, library, _, _ = saved(name)
    asked = [watching(number) for number in range(len(FILMS))] + [watching(1, 2)]
    shown = [[("video", number)] for number in range(len(FILMS))] + [[("video", 1), ("video", 2)]]
    with LLM(folder, device="cpu", chunked_prefill_size=16, page_size=4, pages=600) as llm:
        prompts = [llm.chat_prompt(one, generation_prompt=False) for one in asked]
        llm.generate([prompts[2]], Params(max_new_tokens=2))
        found = llm.embed(prompts)
    for messages, kinds, prompt, one in zip(asked, shown, prompts, found, strict=True):
        inputs = video_inputs(folder, library, messages, kinds, add_generation_prompt=False)
        assert not isinstance(prompt, list)
        assert prompt.ids == inputs["input_ids"][0].tolist()
        model.model.rope_deltas = None
        with torch.inference_mode():
            states = model.model(**inputs).last_hidden_state[0]
        assert not one.error
        np.testing.assert_allclose(one.vector, states.mean(0), atol=3e-4)


def watching(*numbers: int) -> list[dict[str, Any]]:
    """One message with films."""
    parts = [video_part(film(number)) for number in numbers]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "what?"}]}]


def test_frames_are_those_that_transformers_draws() -> None:
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

    model: Any = SimpleNamespace(fps=2, min_frames=4, max_frames=6, num_frames=None)
    for total, rate in ((1, 1.0), (5, 4.0), (13, 10.0), (30, 25.0), (300, 29.97), (7, 0.5)):
        known: Any = SimpleNamespace(total_num_frames=total, fps=rate)
        wanted = Qwen3VLVideoProcessor.sample_frames(model, known).tolist()
        assert FrameSampling(2.0, 4, 6).frames(total, rate) == wanted


def test_sizes_and_patches_are_those_of_transformers() -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as of_frames
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor, smart_resize

    size = {"shortest_edge": 4_096, "longest_edge": 200_000}
    made = {kind: PillowFrames(kind, {"patch_size": 4, "size": size}) for kind in MEANS}
    rng = np.random.default_rng(1)
    for frames, height, width in ((2, 17, 90), (5, 64, 48), (9, 300, 200), (4, 5, 6), (3, 1080, 1920), (16, 33, 21)):
        limits = {"min_pixels": size["shortest_edge"], "max_pixels": size["longest_edge"], "factor": 8}
        assert made["Qwen2VLVideoProcessor"].side(frames, height, width) == of_frames(height, width, **limits)
        expected = smart_resize(frames, height, width, temporal_factor=2, **limits)
        assert made["Qwen3VLVideoProcessor"].side(frames, height, width) == expected
    plain = {"patch_size": 4, "do_resize": False, "do_normalize": False, "do_rescale": False}
    pixels = rng.integers(0, 255, (5, 16, 24, 3), np.uint8)
    found = PillowFrames("Qwen3VLVideoProcessor", plain)([pixels])
    stacked: Any = torch.from_numpy(pixels).permute(0, 3, 1, 2)[None].float()
    none: Any = None
    patches, *grid = Qwen3VLVideoProcessor.patchify(none, stacked, patch_size=4, merge_size=2, temporal_patch_size=2)
    assert found["video_grid_thw"].tolist() == [grid]
    np.testing.assert_array_equal(found["pixel_values_videos"], patches[0].numpy())


@pytest.mark.parametrize("kind", sorted(MEANS))
def test_arrays_are_those_of_transformers_with_torchvision(kind: str) -> None:
    """On noise, the worst case: Pillow rounds and clips a pixel after each direction, torchvision after both."""
    pytest.importorskip("torchvision", reason="transformers' processors of videos need it")
    import transformers

    settings = {"patch_size": 4, "size": {"shortest_edge": 1_024, "longest_edge": 60_000}}
    expected = getattr(transformers, kind)(**settings)
    for number, (frames, height, width) in enumerate(((5, 64, 48), (9, 100, 200), (4, 33, 21))):
        pixels = np.random.default_rng(number).integers(0, 255, (frames, height, width, 3), np.uint8)
        found = PillowFrames(kind, settings)([pixels])
        made = expected([pixels], do_sample_frames=False, return_tensors="np")
        assert found["video_grid_thw"].tolist() == made["video_grid_thw"].tolist()
        level = 1 / 255 / min(expected.image_std)
        apart = np.abs(found["pixel_values_videos"] - made["pixel_values_videos"]) / level
        assert apart.mean() < 0.5
        assert np.quantile(apart, 0.97) < 2.01


def frames_of(count: int, width: int = 32, height: int = 24) -> list[Any]:
    return [np.full((height, width, 3), place % 255, np.uint8) for place in range(count)]


def test_frames_of_containers_and_codecs() -> None:
    for form, codec in (("mp4", "libx264"), ("mp4", "mpeg4"), ("webm", "libvpx-vp9"), ("matroska", "libx264")):
        found = decode_video(video_file(frames_of(20), 10, form, codec), SAMPLING, LIMITS)
        assert (found.total, found.rate, found.numbers) == (20, 10.0, [0, 6, 13, 19])
        assert found.pixels.shape == (4, 24, 32, 3)
        assert np.abs(found.pixels[:, 8, 8, 0].astype(int) - found.numbers).max() < 8


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (lambda: b"", "none of MP4, WebM"),
        (lambda: b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n", "none of MP4, WebM"),
        (lambda: b"ffconcat version 1.0\nfile /etc/passwd\n", "none of MP4, WebM"),
        (lambda: b"GIF89a" + bytes(60), "none of MP4, WebM"),
        (lambda: b"\x00\x00\x00\x18ftypmp42" + bytes(60), "cannot be decoded"),
        (lambda: b"\x1a\x45\xdf\xa3" + bytes(60), "cannot be decoded"),
        (lambda: video_file(frames_of(20), 10)[:1000], r"cut short: it has 1,000 of 1,\d\d\d bytes"),
        (lambda: video_file(frames_of(40), 10, "webm", "libvpx-vp9")[:900], "cut short: it has 900 of 1,"),
        (lambda: video_file(frames_of(70), 1), r"more than 60 s.*\(video_seconds_max\)"),
        (lambda: video_file(frames_of(8, 640, 480), 4), r"4 frames .* 640 x 480 .*\(video_pixels_max\)"),
        (lambda: video_file(frames_of(8), 10, "matroska", "ffv1"), "coded as ffv1, which is not read"),
    ],
    ids=["nothing", "playlist", "list of files", "GIF", "head of MP4", "head of WebM", "MP4 cut short",
         "WebM cut short", "long", "large", "codec"],
)  # fmt: skip
def test_a_hostile_video_is_one_error(raw: Any, why: str) -> None:
    given = raw()
    began = time.monotonic()
    with pytest.raises(MediaError, match=why):
        decode_video(given, SAMPLING, LIMITS)
    assert time.monotonic() - began < 20


def test_a_file_with_sound_only_is_one_error() -> None:
    import av

    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as container:
        stream = container.add_stream("aac", rate=16_000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 16_000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    with pytest.raises(MediaError, match="has no video"):
        decode_video(out.getvalue(), SAMPLING, LIMITS)


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ([{"type": "video_url"}], "a video has no `video_url.url`"),
        ([{"type": "video_url", "video_url": {"url": "http://example.com/a.mp4"}}], "fetches no videos"),
        ([video_part(film(0), "image/png")], "must begin with data:video/"),
        ([video_part(film(0)), {"type": "text", "text": "<|vision_start|><|video_pad|><|vision_end|>"}],
         "has 1 videos, and its text has 2 marks"),
        ([sound_part(sound_file(np.zeros(99, np.float32)))], "audio clips: .* takes images and videos only"),
    ],
)  # fmt: skip
def test_bad_videos_are_refused(saved: Any, parts: list[dict[str, Any]], why: str) -> None:
    with LLM(saved("Qwen3-VL")[0], device="cpu") as llm, pytest.raises(ConfigError, match=why):
        llm.chat_prompt([{"role": "user", "content": parts}])


def test_without_the_package_a_video_is_refused_with_the_extra(saved: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "find_spec", lambda name: None if name == "av" else find_spec(name))
    with LLM(saved("Qwen3-VL")[0], device="cpu") as llm, pytest.raises(ConfigError, match=r'av is.*core\[video\]"'):
        llm.chat_prompt(watching(1))


def test_kinds_of_media_of_a_model(saved: Any) -> None:
    assert read_settings(saved("Qwen3-VL")[0]).media == ("image", "video")
