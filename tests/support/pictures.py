"""Small random models that take pictures, with their processors: greedy answers of transformers, and of the engine."""

from __future__ import annotations

import base64
import io
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from lockstep.core.contract.events import RequestRetracted
from lockstep.host.media.conversation import with_media
from lockstep.host.media.processor import read_processor
from lockstep.host.text import Text
from lockstep.runtime import LLM, Params
from tests.support.architectures import DELTA, EXPERTS, SMALL, STIRRED

SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
    "<|video_pad|>", "<image>", "<video>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>",
    "<IMG_CONTEXT>", "<img>", "</img>", "[IMG]", "[IMG_BREAK]", "[IMG_END]", "<|AUDIO|>", "<|audio_bos|>",
    "<|audio_eos|>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)),
)  # fmt: skip
TEXT: dict[str, Any] = {**SMALL, "vocab_size": 256 + len(SPECIAL), "max_position_embeddings": 1024}
VISION: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "initializer_range": 0.3,
}  # fmt: skip
QWEN_VISION: dict[str, Any] = {
    "depth": 2, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3,
    "initializer_range": 0.3,
}  # fmt: skip
MROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 1, 1]}
PIXELS: dict[str, Any] = {"shortest_edge": 64, "longest_edge": 3000}
SHAPES = ((24, 24), (40, 20), (17, 60), (64, 48), (8, 30))
TEMPLATE = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}"
    "{%- if message.content is string %}{{- message.content }}{%- else %}{%- for part in message.content %}"
    "{%- if part.type == 'text' %}{{- part.text }}{%- else %}{{- 'MARK' }}{%- endif %}{%- endfor %}{%- endif %}"
    "{{- '<|im_end|>\\n' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
"""With the mark of a picture in place of MARK."""


def make_tokenizer(**more: Any) -> Any:
    """Return a tokenizer of bytes and the special tokens of all families."""
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(one, special=True, normalized=False) for one in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<|im_end|>", pad_token="<|endoftext|>", model_max_length=1024, **more
    )


def number_of(token: str) -> int:
    """Return the id of a special token."""
    return 256 + SPECIAL.index(token)


@dataclass(frozen=True, slots=True)
class Family:
    """A family of models with pictures: how its small model and its processor are made."""

    make: Callable[[], tuple[Any, Any]]
    mark: str  # of a picture, as the chat template writes it
    pictures_max: int = 3
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the engine


def _marks(*names: str) -> dict[str, int]:
    tokens = {"image": "<|image_pad|>", "video": "<|video_pad|>"}
    marks = {f"{one}_token_id": number_of(tokens[one]) for one in ("image", "video")}
    return marks | {f"vision_{one}_token_id": number_of(f"<|vision_{one}|>") for one in ("start", "end")}


def _qwen(name: str, text: Mapping[str, Any], vision: Mapping[str, Any], **sizes: Any) -> tuple[Any, Any]:
    import transformers

    config = getattr(transformers, f"{name}Config")(
        text_config={**TEXT, **text}, vision_config={**QWEN_VISION, **vision}, **_marks()
    )
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    kind = name if name.startswith("Qwen2") else "Qwen3VL"
    tokens = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}
    tokens |= {"vision_start_token": "<|vision_start|>", "vision_end_token": "<|vision_end|>"}
    tokens |= {"vision_bos_token": "<|vision_start|>", "vision_eos_token": "<|vision_end|>"}
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    images = Qwen2VLImageProcessorPil(patch_size=4, temporal_patch_size=2, merge_size=2, size=PIXELS)
    return model, (f"{kind}Processor", images, tokens)


def _clip_sizes(side: int) -> dict[str, Any]:
    return {"size": {"height": side, "width": side}, "crop_size": {"height": side, "width": side}}


def _llava() -> tuple[Any, Any]:
    import transformers
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    config = transformers.LlavaConfig(
        text_config={**TEXT, "model_type": "llama"},
        vision_config={**VISION, "model_type": "clip_vision_model", "image_size": 24, "patch_size": 6},
        image_token_index=number_of("<image>"),
        image_token_id=number_of("<image>"),
        image_seq_length=16,
    )
    images = CLIPImageProcessorPil(size={"shortest_edge": 24}, crop_size={"height": 24, "width": 24})
    more = {"patch_size": 6, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    tokens = {"image_token": "<image>"}
    return transformers.LlavaForConditionalGeneration(config), ("LlavaProcessor", images, tokens, more)


def _onevision() -> tuple[Any, Any]:
    import transformers
    from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil

    pinpoints = [[24, 24], [24, 48], [48, 24], [48, 48]]
    config = transformers.LlavaOnevisionConfig(
        text_config={**TEXT, "model_type": "qwen2"},
        vision_config={**VISION, "model_type": "siglip_vision_model", "image_size": 24, "patch_size": 6,
                       "vision_use_head": False},
        image_token_id=number_of("<image>"),
        video_token_id=number_of("<video>"),
        image_grid_pinpoints=pinpoints,
        vision_feature_layer=-1,
    )  # fmt: skip
    images = LlavaOnevisionImageProcessorPil(size={"height": 24, "width": 24}, image_grid_pinpoints=pinpoints)
    more = {"num_image_tokens": 16, "vision_feature_select_strategy": "full"}
    tokens = {"image_token": "<image>", "video_token": "<video>"}
    kind = "LlavaOnevisionProcessor"
    return transformers.LlavaOnevisionForConditionalGeneration(config), (kind, images, tokens, more)


def _idefics(name: str) -> tuple[Any, Any]:
    import importlib

    import transformers

    config = getattr(transformers, f"{name}Config")(
        text_config={**TEXT, "model_type": "llama"},
        vision_config={**VISION, "image_size": 24, "patch_size": 4},
        image_token_id=number_of("<image>"),
        scale_factor=2,
        pad_token_id=0,
    )
    module = importlib.import_module(f"transformers.models.{name.lower()}.image_processing_pil_{name.lower()}")
    kind = getattr(module, f"{name}ImageProcessorPil")
    images = kind(size={"longest_edge": 48}, max_image_size={"longest_edge": 24})
    tokens = {
        "image_token": "<image>", "fake_image_token": "<fake_token_around_image>",
        "global_image_token": "<global-img>", "end_of_utterance_token": "<end_of_utterance>",
    }  # fmt: skip
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    return model, (f"{name}Processor", images, tokens, {"image_seq_len": 9})


def _internvl() -> tuple[Any, Any]:
    import transformers
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

    config = transformers.InternVLConfig(
        text_config={**TEXT, "model_type": "qwen2"},
        vision_config={**VISION, "image_size": [24, 24], "patch_size": [4, 4]},
        image_token_id=number_of("<IMG_CONTEXT>"),
        downsample_ratio=0.5,
    )
    images = GotOcr2ImageProcessorPil(size={"height": 24, "width": 24}, crop_to_patches=True, max_patches=4)
    tokens = {
        "start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    }  # fmt: skip
    model = transformers.InternVLForConditionalGeneration(config)
    return model, ("InternVLProcessor", images, tokens, {"image_seq_length": 9})


def _pixtral(name: str, merge: int) -> tuple[Any, Any]:
    import transformers
    from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

    vision = {**VISION, "model_type": "pixtral", "image_size": 48, "patch_size": 4}
    mark = {"image_token_index": number_of("[IMG]")}
    if name == "Llava":
        mark |= {"image_token_id": number_of("[IMG]"), "vision_feature_select_strategy": "full"}
    more = {"spatial_merge_size": merge} if merge > 1 else {}
    text = {**TEXT, "model_type": "mistral"}
    config = getattr(transformers, f"{name}Config")(
        text_config=text, vision_config=vision, vision_feature_layer=-1, **mark, **more
    )
    images = PixtralImageProcessorPil(size={"longest_edge": 48 // merge * merge}, patch_size={"height": 4, "width": 4})
    written = {"patch_size": 4, "spatial_merge_size": merge}
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    return model, ("PixtralProcessor", images, {"image_token": "[IMG]"}, written)


QWEN3 = {"head_dim": 8, "rope_parameters": MROPE}
QWEN3_VISION = {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 32, "num_position_embeddings": 64}
DEEP = {**QWEN3_VISION, "deepstack_visual_indexes": [0]}
SCENE = {**DELTA, "rope_parameters": {**MROPE, "partial_rotary_factor": 0.5}}
PAD = "<|vision_start|><|image_pad|><|vision_end|>"

FAMILIES: dict[str, Family] = {
    "Qwen2-VL": Family(
        lambda: _qwen("Qwen2VL", {"rope_parameters": MROPE}, {"embed_dim": 32, "hidden_size": 32, "mlp_ratio": 2}), PAD
    ),
    "Qwen2.5-VL": Family(
        lambda: _qwen(
            "Qwen2_5_VL",
            {"rope_parameters": MROPE},
            {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 32, "window_size": 16,
             "fullatt_block_indexes": [1]},
        ),
        PAD,
    ),
    "Qwen3-VL": Family(lambda: _qwen("Qwen3VL", QWEN3, DEEP), PAD),
    "Qwen3-VL MoE": Family(lambda: _qwen("Qwen3VLMoe", {**QWEN3, **EXPERTS}, DEEP), PAD),
    "Qwen3.5 with pictures": Family(
        lambda: _qwen("Qwen3_5", SCENE, QWEN3_VISION), PAD, settings={"mamba_track_interval": 8}
    ),
    "Qwen3.5 MoE with pictures": Family(
        lambda: _qwen("Qwen3_5Moe", SCENE, QWEN3_VISION), PAD, settings={"mamba_track_interval": 8}
    ),
    "LLaVA-1.5": Family(_llava, "<image>"),
    "LLaVA-OneVision": Family(_onevision, "<image>", pictures_max=1),
    "Idefics 3": Family(lambda: _idefics("Idefics3"), "<image>"),
    "SmolVLM": Family(lambda: _idefics("SmolVLM"), "<image>"),
    "InternVL 3": Family(_internvl, "<IMG_CONTEXT>"),
    "Pixtral": Family(lambda: _pixtral("Llava", 1), "[IMG]", settings={"pages": 600}),
    "Mistral 3": Family(lambda: _pixtral("Mistral3", 2), "[IMG]"),
}  # fmt: skip


def save_family(folder: Path, name: str) -> tuple[Any, Any]:
    """Save a small random model with its processor in a folder, and return both."""
    import transformers

    transformers.logging.disable_progress_bar()
    torch.manual_seed(7)
    family = FAMILIES[name]
    model, (kind, images, tokens, *more) = family.make()
    model = model.float().eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "bias" in parameter_name or "norm" in parameter_name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    tokenizer = make_tokenizer(extra_special_tokens=tokens)
    template = TEMPLATE.replace("MARK", family.mark)
    images.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    written = {"processor_class": kind, **dict(*more)}
    (folder / "processor_config.json").write_text(json.dumps(written), encoding="utf-8")
    processor = read_processor(folder)
    processor.chat_template = template
    return model, processor


def picture(number: int) -> Image.Image:
    """Return a picture of random pixels, of one of five shapes."""
    rng = random.Random(number)
    width, height = SHAPES[number % len(SHAPES)]
    return Image.frombytes("RGB", (width, height), bytes(rng.randrange(256) for _ in range(3 * width * height)))


def data_url(image: Image.Image) -> str:
    """Return a picture as a data URL, in PNG."""
    out = io.BytesIO()
    image.save(out, "PNG")
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()


def conversations(count: int, pictures_max: int) -> list[tuple[list[dict[str, Any]], list[int], int]]:
    """Return conversations with 0 to `pictures_max` pictures, the pictures' numbers, and numbers of tokens to draw."""
    rng, made = random.Random(5), []
    for number in range(count):
        numbers = [rng.randrange(4) for _ in range(number % (pictures_max + 1))]
        parts: list[dict[str, Any]] = [{"type": "text", "text": "See: "[: rng.randrange(6)]}]
        for one in numbers:
            parts.append({"type": "image_url", "image_url": {"url": data_url(picture(one))}})
            parts.append({"type": "text", "text": "and more "[: rng.randrange(9)]})
        parts.append({"type": "text", "text": "what is this?"[: rng.randrange(1, 13)]})
        made.append(([{"role": "user", "content": parts}], numbers, rng.randrange(4, 12)))
    return made


def greedy_pictures(folder: Path, model: Any, processor: Any, asked: Sequence[Any]) -> list[list[int]]:
    """Return the answers of transformers' `generate` to conversations, one at a time."""
    answers = []
    model.generation_config.eos_token_id = None
    for messages, numbers, count in asked:
        text = Text(folder).chat(with_media(messages)[0])
        images = [picture(one) for one in numbers]
        inputs = processor(text=[text], images=images or None, return_tensors="pt", add_special_tokens=False)
        if hasattr(model.model, "rope_deltas"):
            model.model.rope_deltas = None
        with torch.inference_mode():
            said = model.generate(**inputs, max_new_tokens=count, do_sample=False, pad_token_id=0)
        answers.append(said[0, inputs["input_ids"].shape[1] :].tolist())
    return answers


@dataclass(frozen=True, slots=True)
class ServedPictures:
    """What the engine answered, and what happened meanwhile."""

    answers: list[list[int]]
    cached_tokens: int
    retractions: int
    encoded: int


def serve_pictures(folder: Path, asked: Sequence[Any], **options: Any) -> ServedPictures:
    """Answer conversations by an engine with chunks, cached prefixes, retractions and the canary."""
    decided: list[Any] = []
    ordered: list[Any] = []
    settings: Mapping[str, Any] = {**STIRRED, "pages": 400, "debug": True, "device": "cpu", **options}
    with LLM(folder, **settings) as llm:

        def observe(_: Any, step: Any) -> None:
            decided.extend(step.decided)
            ordered.extend(step.commands)

        llm.host.observe = observe
        params = [Params(max_new_tokens=count, ignore_eos=True) for _, _, count in asked]
        answers = llm.chat([messages for messages, _, _ in asked], params)
    for answer in answers:
        assert not answer.error, answer.error
    return ServedPictures(
        [answer.token_ids for answer in answers],
        sum(answer.cached_tokens for answer in answers),
        sum(isinstance(one, RequestRetracted) for one in decided),
        sum(type(one).__name__ == "EncodeMedia" for one in ordered),
    )
