"""Videos for small random models of Qwen-VL: greedy answers of transformers to conversations with them."""

from __future__ import annotations

import base64
import io
import json
import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch

from lockstep.host.media.conversation import with_media
from lockstep.host.media.frames import FrameSampling
from lockstep.host.media.processor import read_processor
from lockstep.host.text import Text
from tests.support.pictures import PAD, TEMPLATE, data_url, picture, save_family

FILMS = ((32, 24, 5, 4), (48, 32, 13, 10), (24, 40, 8, 2), (64, 16, 30, 25), (40, 40, 2, 1))
"""Width, height, frames, and frames per second."""
SAMPLING = FrameSampling(2.0, 4, 6)
VIDEO_FAMILIES = ("Qwen2-VL", "Qwen2.5-VL", "Qwen3-VL", "Qwen3.5 with pictures")
VIDEO_PAD = PAD.replace("image", "video")


def save_video_family(folder: Path, name: str) -> tuple[Any, Any]:
    """Save a small random model with its processor, which takes pictures and videos, in a folder; return both."""
    model, _ = save_family(folder, name)
    kind = "Qwen2VLVideoProcessor" if name.startswith("Qwen2") else "Qwen3VLVideoProcessor"
    size = {"shortest_edge": 256, "longest_edge": 4000 if name.startswith("Qwen2") else 12_000}
    settings = {"video_processor_type": kind, "patch_size": 4, "size": size, "max_frames": SAMPLING.most}
    (folder / "video_preprocessor_config.json").write_text(json.dumps(settings), encoding="utf-8")
    shown = f"{{%- elif part.type == 'video' %}}{{{{- '{VIDEO_PAD}' }}}}{{%- else %}}"
    template = TEMPLATE.replace("MARK", PAD).replace("{%- else %}{{- '" + PAD, shown + "{{- '" + PAD)
    assert VIDEO_PAD in template
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return model, read_processor(folder)


@cache
def film(number: int) -> bytes:
    """Return a short film of moving colours as a file: one of five sizes, lengths and rates.

    It is made once, because x264 may write the same frames as other bytes the next time.
    """
    width, height, frames, rate = FILMS[number % len(FILMS)]
    rng = np.random.default_rng(number)
    first = rng.integers(0, 255, (height, width, 3), np.uint8)
    return video_file([np.roll(first, 3 * place, place % 2) for place in range(frames)], rate)


def video_file(frames: Sequence[Any], rate: int, form: str = "mp4", codec: str = "libx264") -> bytes:
    """Return frames, uint8 [height, width, 3] each, as the bytes of a file."""
    out = io.BytesIO()
    with av.open(out, "w", format=form) as container:
        stream = container.add_stream(codec, rate=rate)
        stream.height, stream.width, _ = frames[0].shape
        stream.pix_fmt, stream.codec_context.thread_count = "yuv420p", 1
        for one in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(one, format="rgb24")))
        container.mux(stream.encode())
    return out.getvalue()


def video_part(raw: bytes, kind: str = "video/mp4") -> dict[str, Any]:
    """Return a part of a message with a video."""
    return {"type": "video_url", "video_url": {"url": f"data:{kind};base64,{base64.b64encode(raw).decode()}"}}


def video_conversations(count: int) -> list[tuple[list[dict[str, Any]], list[tuple[str, int]], int]]:
    """Return conversations with 0 to 2 films and pictures, their kinds and numbers, and numbers of tokens to draw."""
    rng, made = random.Random(5), []
    for number in range(count):
        shown = [("image" if rng.random() < 0.3 else "video", rng.randrange(5)) for _ in range(number % 3)]
        parts: list[dict[str, Any]] = [{"type": "text", "text": "See: "[: rng.randrange(6)]}]
        for kind, one in shown:
            url = {"type": "image_url", "image_url": {"url": data_url(picture(one))}}
            parts.append(url if kind == "image" else video_part(film(one)))
            parts.append({"type": "text", "text": "and more "[: rng.randrange(9)]})
        parts.append({"type": "text", "text": "what is this?"[: rng.randrange(1, 13)]})
        made.append(([{"role": "user", "content": parts}], shown, rng.randrange(4, 12)))
    return made


def video_inputs(folder: Path, processor: Any, messages: Any, shown: Sequence[Any], **options: Any) -> Any:
    """Return the inputs of transformers' model for a conversation: films as transformers reads them."""
    from transformers.video_utils import read_video_pyav

    text = Text(folder).chat(with_media(messages)[0], **options)
    read = []
    for one in (one for kind, one in shown if kind == "video"):
        file: Any = io.BytesIO(film(one))
        read.append(read_video_pyav(file, lambda metadata: SAMPLING.frames(metadata.total_num_frames, metadata.fps)))
    given: dict[str, Any] = {"images": [picture(one) for kind, one in shown if kind == "image"] or None}
    if read:
        given |= {"videos": [frames for frames, _ in read], "video_metadata": [known for _, known in read]}
        given["do_sample_frames"] = False
    return processor(text=[text], return_tensors="pt", add_special_tokens=False, **given)


def greedy_videos(folder: Path, model: Any, processor: Any, asked: Sequence[Any]) -> list[list[int]]:
    """Return the answers of transformers' `generate` to conversations, one at a time."""
    answers = []
    model.generation_config.eos_token_id = None
    for messages, shown, count in asked:
        inputs = video_inputs(folder, processor, messages, shown)
        model.model.rope_deltas = None
        with torch.inference_mode():
            said = model.generate(**inputs, max_new_tokens=count, do_sample=False, pad_token_id=0)
        answers.append(said[0, inputs["input_ids"].shape[1] :].tolist())
    return answers
