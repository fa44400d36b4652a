"""Models by architecture. A new one is a file here that registers a function, and a line among the imports below."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from lockstep.core.contract.errors import ConfigError
from lockstep.host.engine_options import ModelBackend
from lockstep.host.quantization import FIELD, Fp8Activations
from lockstep.runtime.checkpoint import DTYPES as FLOATS
from lockstep.runtime.checkpoint import (
    Checkpoint,
    CheckpointError,
    Tensors,
    fill_randomly,
    load,
    read_config,
    read_generation_config,
    read_json,
)
from lockstep.runtime.models import llama as llama
from lockstep.runtime.models import qwen2 as qwen2
from lockstep.runtime.models import qwen3 as qwen3
from lockstep.runtime.models import qwen3_moe as qwen3_moe
from lockstep.runtime.models import sdar as sdar
from lockstep.runtime.models.config_reader import DTYPES, ConfigReader
from lockstep.runtime.models.decoder import Decoder as Decoder
from lockstep.runtime.models.language_model import LanguageModel as LanguageModel
from lockstep.runtime.models.layers import Maker
from lockstep.runtime.models.layers import Parallel as Parallel
from lockstep.runtime.models.registry import BUILDERS, Builder
from lockstep.runtime.models.settings import ModelSettings as ModelSettings
from lockstep.runtime.models.stage import SPLIT_EXPERTS, ExpertSplit
from lockstep.runtime.quantized.widened import Widened, WidenedTensors, widened_format

MODELOPT = "hf_quant_config.json"
GENERATES, VECTORS_ONLY = "ForCausalLM", "Model"
"""Suffixes of architecture names.

The variants of a family differ in whether they have the output projection, `lm_head`.
"""


def build_model(
    source: str | Path | Mapping[str, Any],
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    *,
    random_weights_seed: int | None = None,
    parallel: Parallel | None = None,
    kv_fp8: bool = False,
    fp8_activations: Fp8Activations = "off",
    backend: ModelBackend = "auto",
) -> LanguageModel:
    """Return a model ready to run, without gradients.

    Args:
        source: a Hugging Face folder; or the content of its config.json, which needs `random_weights_seed`.
        dtype: dtype of the parameters; None: that of config.json.
        random_weights_seed: fill with small random values instead of the folder's; only config.json is read.
        parallel: this rank's part, and the functions that combine partial results; None: the whole model.
        kv_fp8: store its KV in fp8, with the scales of the folder, or 1.
        fp8_activations: whether rows are rounded to fp8 before products with fp8 weights: quantized/activations.py.
        backend: the code that runs it: our own, or that of transformers; auto: our own for the architectures here.
    Raises: ConfigError for settings that are not supported; its subclass CheckpointError for tensors.
    """
    config: Mapping[str, Any]
    if isinstance(source, Mapping):
        folder, (config, widened) = None, _split_widened(source)
    else:
        folder = Path(source)
        config, widened = _split_widened(_with_other_files(read_config(folder), folder))
    if folder is None and random_weights_seed is None:
        raise ConfigError("a config without a folder has no weights\nhint: give `random_weights_seed`")
    if dtype is None:
        dtype = ConfigReader(config).dtype()  # an invalid one is reported when the model is made, with all problems
    if dtype not in DTYPES.values():
        raise ConfigError(f"`dtype` must be {', '.join(DTYPES)}, got `{dtype}`")
    parallel = parallel or Parallel()
    with torch.no_grad():
        maker = Maker(dtype, torch.device(device), parallel, fp8_activations=fp8_activations)
        if random_weights_seed is not None or folder is None:
            model = _builder(config, backend)(config, maker)
            fill_randomly(model.tensors(), random_weights_seed or 0, rank=parallel.rank, ranks=parallel.ranks)
            if kv_fp8:
                model.kv_scales = ((1.0, 1.0),) * model.layers
        else:
            with Checkpoint(folder) as checkpoint:
                model = _for_tensors(config, maker, checkpoint, backend)
                tensors: Tensors = checkpoint if widened is None else WidenedTensors(checkpoint, widened)
                wanted = model.named_as(tensors.stored.keys(), list(model.tensors()))
                load(wanted, tensors, rank=parallel.rank, ranks=parallel.ranks, surplus=model.surplus)
                if kv_fp8:
                    prefix = "model." if "embed_tokens.weight" in checkpoint.stored else ""
                    model.kv_scales = read_kv_scales(checkpoint, model.layers, prefix, model.first_layer)
        model.prepare()
    model.eval()
    return model


def _for_tensors(
    config: Mapping[str, Any], maker: Maker, checkpoint: Checkpoint, backend: ModelBackend
) -> LanguageModel:
    """Return the model that a checkpoint fills.

    Embedding models are saved without `model.` and often without `lm_head`, whatever `architectures` names.
    """
    bare = "embed_tokens.weight" in checkpoint.stored
    name, untied = _named(config), not config.get("tie_word_embeddings")
    if bare and untied and "lm_head.weight" not in checkpoint.stored and name.endswith(GENERATES):
        config = {**config, "architectures": [name.removesuffix(GENERATES) + VECTORS_ONLY]}
    return _builder(config, backend)(config, maker)


def read_kv_scales(
    checkpoint: Checkpoint, layers: int, prefix: str = "", first: int = 0
) -> tuple[tuple[float, float], ...]:
    """Return the scales of keys and values by layer; 1 for layers without scales in the checkpoint.

    compressed-tensors calls them `self_attn.k_scale`, ModelOpt `self_attn.k_proj.k_scale`; values likewise.

    Args:
        prefix: prefix that the names of the checkpoint lack.
        first: the first of the layers.
    Raises: CheckpointError for invalid scales, and for layers with a scale of keys or values only.
    """
    problems: list[str] = []

    def scale(layer: int, which: str) -> float | None:
        around = f"model.layers.{layer}.self_attn".removeprefix(prefix)
        names = (f"{around}.{which}_scale", f"{around}.{which}_proj.{which}_scale")
        name = next((one for one in names if one in checkpoint.stored), None)
        if name is None:
            return None
        stored = checkpoint.stored[name]
        if stored.shape not in ((), (1,)) or stored.dtype not in FLOATS:
            problems.append(f"{name}: expected [] {'/'.join(FLOATS)}, found {stored}")
            return 1.0
        value = float(checkpoint.read(name).float().reshape(()))
        if not 0.0 < value < math.inf:
            problems.append(f"{name}: a scale must be above 0, got {value:g}")
        return value

    found = []
    for layer in range(first, first + layers):
        key, value = scale(layer, "k"), scale(layer, "v")
        if (key is None) != (value is None):
            problems.append(f"layer {layer} has a scale of keys or of values, but not of both")
        found.append((1.0 if key is None else key, 1.0 if value is None else value))
    if problems:
        raise CheckpointError(checkpoint.folder, problems, "without fp8 KV (kv_cache_dtype auto) they are not read")
    return tuple(found)


def read_settings(
    folder: str | Path, ranks: int = 1, backend: ModelBackend = "auto", experts: ExpertSplit = SPLIT_EXPERTS
) -> ModelSettings:
    """Return the settings in a folder's config.json, without making a model. Raises ConfigError.

    Args:
        ranks: number of ranks that split the model; raises also if they cannot split its quantised matrices.
        backend: see `build_model`.
        experts: how ranks share experts.
    """
    config, _ = _split_widened(_with_other_files(read_config(Path(folder)), Path(folder)))
    parallel = Parallel() if ranks == 1 else Parallel(0, ranks, lambda one: one, lambda one: one, experts=experts)
    make = Maker(device=torch.device("meta"), parallel=parallel)
    return _builder(config, backend)(config, make).settings


@dataclass(frozen=True, slots=True)
class PassWeights:
    """Bytes of weights that one pass of a whole model reads.

    Args:
        layers: of all layers; of_layer: of one layer, on average; logits: of the output projection.
    """

    layers: int
    of_layer: float
    logits: int


def weights_read(folder: str | Path, backend: ModelBackend = "auto") -> PassWeights:
    """Return the bytes of the weights of a folder's model, by its config.json alone. Raises ConfigError."""
    config, _ = _split_widened(_with_other_files(read_config(Path(folder)), Path(folder)))
    model = _builder(config, backend)(config, Maker(ConfigReader(config).dtype(), torch.device("meta"), Parallel()))
    sizes = {"layers": 0, "embed_tokens": 0, "lm_head": 0}
    for one in model.tensors():
        kind = next((name for name in ("embed_tokens", "lm_head") if name in one.name), "layers")
        sizes[kind] += one.into.numel() * one.into.element_size()
    logits = sizes["lm_head"] or sizes["embed_tokens"]
    return PassWeights(sizes["layers"], sizes["layers"] / model.settings.layers, logits)


def stored_dtype(folder: str | Path) -> torch.dtype:
    """Return the dtype in a folder's config.json; float32 if it has none, or an unknown one. Raises CheckpointError."""
    return ConfigReader(read_config(Path(folder))).dtype()


def _split_widened(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], Widened | None]:
    """Return a config without a quantisation that is widened as tensors are read, and the format of this kind."""
    found = widened_format(config)
    return ({name: value for name, value in config.items() if name != FIELD} if found else config), found


def _with_other_files(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return settings completed by files beside config.json: end tokens, and quantisation in older ModelOpt folders."""
    config = _with_all_end_tokens(config, folder)
    if FIELD in config or not (folder / MODELOPT).is_file():
        return config
    quantization = read_json(folder, MODELOPT).get("quantization")
    if isinstance(quantization, dict):
        quantization = {"quant_method": "modelopt", **quantization}
    return config | {FIELD: quantization}


def _with_all_end_tokens(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return settings with the end tokens of generation_config.json added, where chat models list most of them."""
    of_config = ConfigReader(config)
    found = of_config.end_tokens()
    if of_config.problems:
        return config  # the reader of the model reports it
    reader = ConfigReader(read_generation_config(folder), "generation_config.json")
    more = [token for token in reader.end_tokens() if token not in found]
    reader.check()
    return config | {"eos_token_id": [*found, *more]} if more else config


def _named(config: Mapping[str, Any]) -> str:
    """Return the first of `architectures`, or an empty text. Raises ConfigError."""
    reader = ConfigReader(config)
    names = reader.texts("architectures")
    reader.check()
    return names[0] if names else ""


def _builder(config: Mapping[str, Any], backend: ModelBackend) -> Builder:
    name = named = _named(config)
    if named.endswith(VECTORS_ONLY):
        name = named.removesuffix(VECTORS_ONLY) + GENERATES
    if name in BUILDERS and backend != "transformers":
        return BUILDERS[name]
    known = ", ".join(sorted(BUILDERS))
    if backend == "native":
        raise ConfigError(
            f"`architectures` of config.json must begin with one of {known}, got `{named}`\n"
            "hint: model_backend auto runs others by transformers' code; a model of our own is one file in "
            "lockstep/runtime/models/"
        )
    if find_spec("transformers") is None:
        raise ConfigError(
            f"`architectures` of config.json begins with `{named}`, which transformers' code runs (our own runs "
            f'{known}), but transformers is not installed\nhint: pip install "lockstep-runtime[transformers]"'
        )
    from lockstep.runtime.from_transformers.encoder import TransformersEncoder, is_encoder

    if is_encoder(config):
        return TransformersEncoder
    from lockstep.runtime.from_transformers.decoder import TransformersDecoder

    return TransformersDecoder
