"""Small random models that take sound, with their processors: greedy answers of transformers to conversations."""

from __future__ import annotations

import base64
import io
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch

from lockstep.host.media.conversation import with_media
from lockstep.host.media.processor import read_processor
from lockstep.host.text import Text
from tests.support.pictures import TEMPLATE, TEXT, make_tokenizer, number_of

RATE = 16_000
CLIPS = (
    (0.11, 16_000, 1, "WAV"), (0.34, 44_100, 2, "WAV"), (0.5, 8_000, 1, "FLAC"), (0.81, 22_050, 1, "MP3"),
    (1.0, 16_000, 1, "WAV"),
)  # fmt: skip
"""Seconds, samples per second, channels and format."""
TOWER: dict[str, Any] = {
    "num_mel_bins": 16, "d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 48,
    "max_source_positions": 50, "initializer_range": 0.3,
}  # fmt: skip
MARK = "<|audio_bos|><|AUDIO|><|audio_eos|>"
TOKENS = {"audio_token": "<|AUDIO|>", "audio_bos_token": "<|audio_bos|>", "audio_eos_token": "<|audio_eos|>"}


@dataclass(frozen=True, slots=True)
class SoundFamily:
    """A family of models with sound: how its small model is made, and its processor."""

    make: Callable[[], Any]
    processor: str


def _qwen2_audio() -> Any:
    import transformers

    config = transformers.Qwen2AudioConfig(
        text_config={**TEXT, "model_type": "qwen2"},
        audio_config={**TOWER, "model_type": "qwen2_audio_encoder"},
        audio_token_index=number_of("<|AUDIO|>"),
    )
    return transformers.Qwen2AudioForConditionalGeneration(config)


SOUND_FAMILIES: dict[str, SoundFamily] = {"Qwen2-Audio": SoundFamily(_qwen2_audio, "Qwen2AudioProcessor")}


def save_sound_family(folder: Path, name: str = "Qwen2-Audio") -> tuple[Any, Any]:
    """Save a small random model with its processor, whose window is one second, in a folder, and return both."""
    import transformers

    transformers.logging.disable_progress_bar()
    torch.manual_seed(7)
    family = SOUND_FAMILIES[name]
    model = family.make().float().eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "bias" in parameter_name or "norm" in parameter_name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    features = transformers.WhisperFeatureExtractor(feature_size=TOWER["num_mel_bins"], chunk_length=1)
    features.save_pretrained(folder)
    make_tokenizer(extra_special_tokens=TOKENS).save_pretrained(folder)
    template = TEMPLATE.replace("MARK", MARK)
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": family.processor}), encoding="utf-8")
    processor = read_processor(folder)
    processor.chat_template = template
    return model, processor


def clip(number: int) -> bytes:
    """Return a clip of tones and noise as a file: one of five lengths, rates and formats."""
    seconds, rate, channels, form = CLIPS[number % len(CLIPS)]
    rng = np.random.default_rng(number)
    count = int(seconds * rate)
    tones = np.sin(np.outer(np.arange(count) / rate, rng.uniform(600, 18_000, channels)))
    return sound_file((0.4 * tones + rng.normal(0, 0.1, tones.shape)).astype(np.float32), rate, form)


def sound_file(samples: Any, rate: int = RATE, form: str = "WAV", **options: Any) -> bytes:
    """Return samples [samples] or [samples, channels] as the bytes of a file."""
    out, shape = io.BytesIO(), np.shape(samples)
    with soundfile.SoundFile(out, "w", rate, 1 if len(shape) == 1 else shape[1], format=form, **options) as file:
        for at in range(0, len(samples), 1 << 16):
            file.write(samples[at : at + (1 << 16)])
    return out.getvalue()


def sound_part(raw: bytes, form: str = "wav") -> dict[str, Any]:
    """Return a part of a message with a clip, as of OpenAI's API."""
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(raw).decode(), "format": form}}


def clip_part(number: int) -> dict[str, Any]:
    """Return a part of a message with one of the clips."""
    return sound_part(clip(number), CLIPS[number % len(CLIPS)][3].lower())


def sound_conversations(count: int) -> list[tuple[list[dict[str, Any]], list[int], int]]:
    """Return conversations with 0 to 2 clips, the clips' numbers, and numbers of tokens to draw."""
    rng, made = random.Random(5), []
    for number in range(count):
        numbers = [rng.randrange(len(CLIPS)) for _ in range(number % 3)]
        parts: list[dict[str, Any]] = [{"type": "text", "text": "Hear: "[: rng.randrange(7)]}]
        for one in numbers:
            parts.append(clip_part(one))
            parts.append({"type": "text", "text": "and more "[: rng.randrange(9)]})
        parts.append({"type": "text", "text": "what is this?"[: rng.randrange(1, 13)]})
        made.append(([{"role": "user", "content": parts}], numbers, rng.randrange(4, 12)))
    return made


def loaded_clip(number: int) -> Any:
    """Return the samples of a clip as transformers loads them."""
    from transformers.audio_utils import load_audio

    form = CLIPS[number % len(CLIPS)][3].lower()
    url = f"data:audio/{form};base64,{base64.b64encode(clip(number)).decode()}"
    return load_audio(url, sampling_rate=RATE, backend="soundfile")


def sound_inputs(folder: Path, processor: Any, messages: Any, numbers: Sequence[int], **options: Any) -> Any:
    """Return the inputs of transformers' model for a conversation."""
    text = Text(folder).chat(with_media(messages)[0], **options)
    loaded = [loaded_clip(one) for one in numbers]
    more = {"audio": loaded, "sampling_rate": RATE} if loaded else {}
    return processor(text=[text], return_tensors="pt", add_special_tokens=False, **more)


def greedy_sounds(folder: Path, model: Any, processor: Any, asked: Sequence[Any]) -> list[list[int]]:
    """Return the answers of transformers' `generate` to conversations, one at a time."""
    answers = []
    model.generation_config.eos_token_id = None
    for messages, numbers, count in asked:
        inputs = sound_inputs(folder, processor, messages, numbers)
        with torch.inference_mode():
            said = model.generate(**inputs, max_new_tokens=count, do_sample=False, pad_token_id=0)
        answers.append(said[0, inputs["input_ids"].shape[1] :].tolist())
    return answers
