"""Small models with audio and images, with their processors."""

from __future__ import annotations

import json
from pathlib import Path

from tests.vllm.features import save_model, small

AUDIO_TOKEN = 5
IMAGE_TOKEN = 2047
IMAGE_SIDE = 32  # pixels


def qwen2_audio(folder: Path) -> Path:
    """Save a small Qwen2-Audio, which has about 25 positions for each second of audio. Returns its folder."""
    import transformers
    from safetensors.torch import load_file, save_file

    encoder = {"d_model": 64, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 64}
    config = transformers.Qwen2AudioConfig(
        text_config=transformers.Qwen2Config(**small(hidden_size=128)),
        audio_config=transformers.Qwen2AudioEncoderConfig(**encoder, num_mel_bins=128),
        audio_token_index=AUDIO_TOKEN,
    )
    path = save_model(folder / "audio", config, auto="AutoModelForMultimodalLM")
    weights = path / "model.safetensors"  # saved under names that vLLM does not read
    tensors = {name.replace("model.model.model", "model.model"): one for name, one in load_file(weights).items()}
    save_file(tensors, weights, metadata={"format": "pt"})
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    names = tokenizer.convert_ids_to_tokens([AUDIO_TOKEN, AUDIO_TOKEN + 1, AUDIO_TOKEN + 2])
    transformers.Qwen2AudioProcessor(
        feature_extractor=transformers.WhisperFeatureExtractor(feature_size=128),
        tokenizer=tokenizer,
        audio_token=names[0],
        audio_bos_token=names[1],
        audio_eos_token=names[2],
    ).save_pretrained(path)
    return path


def blip2(folder: Path) -> Path:
    """Save a small BLIP-2, which puts 16 positions for an image before the text. Returns its folder.

    Of vLLM's models with images it is one that requires no torchvision. Its processor would add the token of an image
    behind the vocabulary, where the model has no row: the last word of the vocabulary becomes that token.
    """
    import transformers

    tower = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = transformers.OPTConfig(
        **small(num_attention_heads=2, ffn_dim=128, word_embed_proj_dim=64), architectures=["OPTForCausalLM"]
    )
    config = transformers.Blip2Config(
        vision_config=tower | {"image_size": IMAGE_SIDE, "patch_size": 8},
        qformer_config=tower | {"encoder_hidden_size": 64, "cross_attention_frequency": 1},
        text_config=text.to_dict(),
        num_query_tokens=16,
        image_token_index=IMAGE_TOKEN,
    )
    path = save_model(folder / "blip2", config, auto="AutoModelForImageTextToText")
    file = path / "tokenizer.json"
    settings = json.loads(file.read_text())
    model = settings["model"]
    word = next(word for word, token in model["vocab"].items() if token == IMAGE_TOKEN)
    del model["vocab"][word]
    model["vocab"]["<image>"] = IMAGE_TOKEN
    model["merges"] = [merge for merge in model["merges"] if "".join(merge) != word]
    file.write_text(json.dumps(settings))
    transformers.Blip2Processor(
        image_processor=transformers.BlipImageProcessorPil(size={"height": IMAGE_SIDE, "width": IMAGE_SIDE}),
        tokenizer=transformers.AutoTokenizer.from_pretrained(path),
        num_query_tokens=16,
    ).save_pretrained(path)
    return path
