"""Models that run by transformers' code: windows, caps, sinks, latent attention, states, pictures, sound, video.

Small random models, made here. The truth is transformers' greedy answer on the CPU in float32. On a GPU few answers
may differ, since sums of another order turn a tie.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch

from benchmarks.gpu_check.decode import release
from benchmarks.gpu_check.section import Section

TEXT = (
    "Mistral", "Gemma 2", "gpt-oss", "DeepSeek-V3", "Mixtral",  # windows, caps, sinks, latent attention, experts
    "Qwen3-Next", "LFM2", "Granite 4 (hybrid)", "Nemotron-H",  # layers that keep a state
)  # fmt: skip
PICTURES = ("Qwen3-VL", "LLaVA-1.5")
SMALL = ("Gemma 2", "LFM2")
DRAFTS: dict[str, Any] = {"speculative_method": "ngram", "num_speculative_tokens": 3}
DIFFER_MAX = 0.1  # share of answers; all are equal on a CPU


def run(section: Section) -> None:
    """Serve each family, with retractions, chunks, prefixes from the cache and every slot verified."""
    if find_spec("transformers") is None:
        section.skip("families", "transformers is not installed")
        return
    from tests.support import architectures

    known = {*architectures.ARCHITECTURES, *architectures.HYBRIDS}
    for name in SMALL if section.small else TEXT:
        with section.trying(name):
            if name not in known:
                raise ValueError(f"no architecture {name}; there are {', '.join(sorted(known))}")
            section.needs(8 if section.gpu else 0)
            text(section, name)
        release(section)
    with section.trying("drafts of a long prompt"):
        section.needs(8 if section.gpu else 0)
        text(section, "Llama", **DRAFTS)
    if find_spec("PIL") is None:
        section.skip("pictures", "Pillow is not installed")
        return
    for name in PICTURES[: 1 if section.small else None]:
        with section.trying(name):
            section.needs(10 if section.gpu else 0)
            pictures(section, name)
        release(section)
    if section.gpu and torch.cuda.device_count() > 1:
        with section.trying("pictures divided over two ranks"):
            section.needs(15)
            pictures(section, "Qwen3-VL MoE", tp=2)
        release(section)
    for what, package, compared in (("sound", "soundfile", sounds), ("video", "av", videos)):
        if find_spec(package) is None:
            section.skip(what, f"{package} is not installed")
            continue
        with section.trying(what):
            section.needs(10 if section.gpu else 0)
            compared(section)
        release(section)


def text(section: Section, name: str, **options: Any) -> None:
    """Compare the answers of one architecture."""
    from tests.support.architectures import HYBRIDS, TRACK_INTERVAL, greedy_answers, save_architecture, serve

    folder = section.part.with_suffix("") / re.sub(r"\W", "-", name)
    folder.mkdir(parents=True, exist_ok=True)
    expected = greedy_answers(save_architecture(folder, name))
    if name in HYBRIDS:
        options = {"mamba_track_interval": TRACK_INTERVAL, **options}
    compare(section, name, expected, lambda: serve(folder, device=str(section.device), **options))


def pictures(section: Section, name: str, **options: Any) -> None:
    """Compare the answers of one family to prompts with pictures."""
    from tests.support.architectures import REQUESTS
    from tests.support.pictures import FAMILIES, conversations, greedy_pictures, save_family, serve_pictures

    folder = section.part.with_suffix("") / re.sub(r"\W", "-", name)
    folder.mkdir(parents=True, exist_ok=True)
    model, processor = save_family(folder, name)
    asked = conversations(REQUESTS, FAMILIES[name].pictures_max)
    expected = greedy_pictures(folder, model, processor, asked)
    compare(section, name, expected, lambda: serve_pictures(folder, asked, device=str(section.device), **options))


def sounds(section: Section) -> None:
    """Compare the answers of Qwen2-Audio to prompts with audio clips."""
    from tests.support.architectures import REQUESTS
    from tests.support.pictures import serve_pictures
    from tests.support.sounds import greedy_sounds, save_sound_family, sound_conversations

    folder = section.part.with_suffix("") / "sound"
    folder.mkdir(parents=True, exist_ok=True)
    model, processor = save_sound_family(folder)
    asked = sound_conversations(REQUESTS)
    expected = greedy_sounds(folder, model, processor, asked)
    compare(section, "Qwen2-Audio", expected, lambda: serve_pictures(folder, asked, device=str(section.device)))


def videos(section: Section) -> None:
    """Compare the answers of Qwen2.5-VL, whose positions along time count seconds, to prompts with videos."""
    from tests.support.architectures import REQUESTS
    from tests.support.pictures import serve_pictures
    from tests.support.videos import greedy_videos, save_video_family, video_conversations

    folder = section.part.with_suffix("") / "video"
    folder.mkdir(parents=True, exist_ok=True)
    model, processor = save_video_family(folder, "Qwen2.5-VL")
    asked = video_conversations(REQUESTS)
    expected = greedy_videos(folder, model, processor, asked)
    served = {"pages": 1200, "device": str(section.device)}
    compare(section, "videos of Qwen2.5-VL", expected, lambda: serve_pictures(folder, asked, **served))


def compare(section: Section, name: str, expected: list[list[int]], served: Callable[[], Any]) -> None:
    """Check the share of answers that differ."""
    found = served().answers
    differ = sum(ours != theirs for ours, theirs in zip(found, expected, strict=True))
    allowed = int(DIFFER_MAX * len(expected)) if section.gpu else 0
    section.check(f"{name}: tokens of transformers", differ <= allowed, f"{differ} of {len(expected)} answers differ")
