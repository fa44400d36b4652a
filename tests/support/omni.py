"""Small random thinkers of Qwen-Omni: greedy answers of transformers to conversations with media of all kinds."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from lockstep.host.media.conversation import with_media
from lockstep.host.media.processor import read_processor
from lockstep.host.text import Text
from tests.support.architectures import EXPERTS
from tests.support.pictures import (
    MROPE,
    PAD,
    QWEN_VISION,
    TEMPLATE,
    TEXT,
    data_url,
    make_tokenizer,
    number_of,
    picture,
)
from tests.support.sounds import CLIPS, MARK, RATE, TOKENS, TOWER, clip_part, loaded_clip
from tests.support.videos import SAMPLING, VIDEO_PAD, film, video_part

OMNI_FAMILIES = {"Qwen2.5-Omni": "Qwen2_5Omni", "Qwen3-Omni": "Qwen3OmniMoe"}
"""Name of a family -> what the names of its classes in transformers begin with."""
CLIPS_MAX = {"Qwen2.5-Omni": 2, "Qwen3-Omni": 1}
"""Clips of one conversation: transformers' Qwen3-Omni makes other features of a short clip beside a longer one."""
CONTEXT_TOKENS = 4096
WINDOW_S = 3  # of the feature extractor: clips are padded to it
PIXELS = {"shortest_edge": 28 * 28 * 2, "longest_edge": 28 * 28 * 12}
VISION: dict[str, Any] = {**QWEN_VISION, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 32}
SEES = {
    "Qwen2.5-Omni": {**VISION, "patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1]},
    "Qwen3-Omni": {**VISION, "patch_size": 16, "num_position_embeddings": 64, "deepstack_visual_indexes": [0]},
}
HEARS: dict[str, dict[str, Any]] = {
    "Qwen2.5-Omni": {**TOWER, "n_window": 20, "output_dim": 32},
    "Qwen3-Omni": {**TOWER, "n_window": 50, "n_window_infer": 200, "output_dim": 32, "downsample_hidden_size": 8},
}
THINKS: dict[str, dict[str, Any]] = {
    "Qwen2.5-Omni": {"rope_parameters": MROPE},
    "Qwen3-Omni": {"head_dim": 8, "rope_parameters": MROPE, **EXPERTS},
}
MARKS = {"image": PAD, "video": VIDEO_PAD, "audio": MARK}


def thinker_fields(name: str) -> dict[str, Any]:
    """Return the config of a small thinker, with the fields of the published ones."""
    suffix = "index" if name == "Qwen2.5-Omni" else "id"
    tokens = {"image": "<|image_pad|>", "video": "<|video_pad|>", "audio": "<|AUDIO|>"}
    marks = {f"{kind}_token_{suffix}": number_of(token) for kind, token in tokens.items()}
    for kind, begins in (("vision", "<|vision_start|>"), ("audio", "<|audio_bos|>")):
        marks[f"{kind}_start_token_id"] = number_of(begins)
    for kind, ends in (("vision", "<|vision_end|>"), ("audio", "<|audio_eos|>")):
        marks[f"{kind}_end_token_id"] = number_of(ends)
    return {
        "text_config": {**TEXT, "max_position_embeddings": CONTEXT_TOKENS, **THINKS[name]},
        "vision_config": SEES[name],
        "audio_config": HEARS[name],
        "position_id_per_seconds": 25 if name == "Qwen2.5-Omni" else 13,
        "seconds_per_chunk": 2,
        **marks,
    }


def save_thinker(folder: Path, name: str) -> tuple[Any, Any]:
    """Save a small random thinker with its processor in a folder, and return both."""
    import transformers
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    transformers.logging.disable_progress_bar()
    torch.manual_seed(7)
    begins = OMNI_FAMILIES[name]
    config = getattr(transformers, f"{begins}ThinkerConfig")(**thinker_fields(name))
    model = getattr(transformers, f"{begins}ThinkerForConditionalGeneration")(config).float().eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "bias" in parameter_name or "norm" in parameter_name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    patch = SEES[name]["patch_size"]
    images = Qwen2VLImageProcessorPil(patch_size=patch, temporal_patch_size=2, merge_size=2, size=PIXELS)
    features = transformers.WhisperFeatureExtractor(feature_size=TOWER["num_mel_bins"], chunk_length=WINDOW_S)
    written: dict[str, Any] = {"processor_class": f"{begins}Processor"}  # all in one file, as published
    for one in (images, features):
        one.save_pretrained(folder)
        written |= json.loads((folder / "preprocessor_config.json").read_bytes())
    written |= {"max_frames": SAMPLING.most, "processor_class": f"{begins}Processor"}
    (folder / "preprocessor_config.json").write_text(json.dumps(written), encoding="utf-8")
    tokens = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>", **TOKENS}
    tokens |= {"vision_bos_token": "<|vision_start|>", "vision_eos_token": "<|vision_end|>"}
    make_tokenizer(extra_special_tokens=tokens).save_pretrained(folder)
    shown = "".join(f"{{%- elif part.type == '{kind}' %}}{{{{- '{mark}' }}}}" for kind, mark in MARKS.items())
    template = TEMPLATE.replace("{%- else %}{{- 'MARK' }}", shown)
    assert VIDEO_PAD in template
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    processor = read_processor(folder)
    processor.chat_template = template
    return model, processor


def save_whole(folder: Path, name: str) -> None:
    """Make the folder of a thinker that of the whole model: its config, and `thinker.` in front of its tensors."""
    from safetensors.torch import load_file, save_file

    config = json.loads((folder / "config.json").read_bytes())
    begins = OMNI_FAMILIES[name]
    whole = {
        "architectures": [f"{begins}ForConditionalGeneration"],
        "model_type": config["model_type"].removesuffix("_thinker"),
        "dtype": config["dtype"],
        "enable_audio_output": True,
        "thinker_config": {key: value for key, value in config.items() if key not in ("architectures", "dtype")},
        "talker_config": {"model_type": "of no account"},
    }
    (folder / "config.json").write_text(json.dumps(whole), encoding="utf-8")
    file = folder / "model.safetensors"
    tensors = {f"thinker.{key}": value for key, value in load_file(file).items()}
    save_file({**tensors, "talker.codec_head.weight": torch.zeros(2, 2)}, file, {"format": "pt"})


def omni_conversations(
    count: int, kinds: Sequence[str], clips_max: int
) -> list[tuple[list[dict[str, Any]], list[tuple[str, int]], int]]:
    """Return conversations with 0 to 3 media of these kinds, their kinds and numbers, and numbers of tokens to draw.

    Args:
        clips_max: clips of one conversation; pictures take the place of more.
    """
    rng, made = random.Random(5), []
    for number in range(count):
        shown = [(rng.choice(kinds), rng.randrange(5)) for _ in range(number % 4)]
        clips = [place for place, (kind, _) in enumerate(shown) if kind == "audio"]
        for place in clips[clips_max:]:
            shown[place] = ("image", shown[place][1])
        parts: list[dict[str, Any]] = [{"type": "text", "text": "Now: "[: rng.randrange(6)]}]
        for kind, one in shown:
            parts.append(part_of(kind, one))
            parts.append({"type": "text", "text": "and more "[: rng.randrange(9)]})
        parts.append({"type": "text", "text": "what is this?"[: rng.randrange(1, 13)]})
        made.append(([{"role": "user", "content": parts}], shown, rng.randrange(4, 12)))
    return made


def part_of(kind: str, number: int) -> dict[str, Any]:
    """Return a part of a message with one of the pictures, clips or films."""
    if kind == "image":
        return {"type": "image_url", "image_url": {"url": data_url(picture(number))}}
    return clip_part(number) if kind == "audio" else video_part(film(number))


def omni_inputs(folder: Path, processor: Any, messages: Any, shown: Sequence[Any], **options: Any) -> Any:
    """Return the inputs of transformers' model for a conversation: media as transformers reads them."""
    from transformers.video_utils import read_video_pyav

    text = Text(folder).chat(with_media(messages)[0], **options)
    numbers = {kind: [one for its, one in shown if its == kind] for kind in MARKS}
    given: dict[str, Any] = {"images": [picture(one) for one in numbers["image"]] or None}
    if numbers["audio"]:
        given |= {"audio": [loaded_clip(one % len(CLIPS)) for one in numbers["audio"]], "sampling_rate": RATE}
    read = []
    for one in numbers["video"]:
        file: Any = io.BytesIO(film(one))
        read.append(read_video_pyav(file, lambda metadata: SAMPLING.frames(metadata.total_num_frames, metadata.fps)))
    if read:
        given |= {"videos": [frames for frames, _ in read], "video_metadata": [known for _, known in read]}
        given["do_sample_frames"] = False
    return processor(text=[text], return_tensors="pt", add_special_tokens=False, **given)


def greedy_omni(folder: Path, model: Any, processor: Any, asked: Sequence[Any]) -> list[list[int]]:
    """Return the answers of transformers' `generate` to conversations, one at a time."""
    answers = []
    model.generation_config.eos_token_id = None
    for messages, shown, count in asked:
        inputs = omni_inputs(folder, processor, messages, shown)
        model.model.rope_deltas = None
        with torch.inference_mode():
            said = model.generate(**inputs, max_new_tokens=count, do_sample=False, pad_token_id=0)
        answers.append(said[0, inputs["input_ids"].shape[1] :].tolist())
    return answers
