"""The process that widens a GGUF file: `python -m lockstep.runtime.sources.widen FILE FOLDER`.

It prints nothing on success, and otherwise one line of JSON with `why` and `hint`; the exit status is then 1.

transformers' reader skips what it has no name for, and would leave missing tensors at random values. Both are errors
here: a model that is served computes what its file describes.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

SHOWN = 5
LEFT_OUT = (
    "rope.scaling.",
    "attention.sliding_window",
    "attention.scale",
    "attention.temperature",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "logit_scale",
    "residual_scale",
    "embedding_scale",
)
"""Beginnings of keys, behind the architecture, that change what a model computes. A file with one that has
no name in the reader is refused."""
NEUTRAL = ("none", 0, 1, 0.0, 1.0, "")  # values of such keys that change nothing


class Unreadable(Exception):
    """A file that cannot be served, and what may help."""

    def __init__(self, why: str, hint: str = "") -> None:
        super().__init__(why)
        self.why, self.hint = why, hint


def widen(file: Path, folder: Path) -> None:
    """Write config.json, model.safetensors and the tokenizer of a GGUF file to a folder. Raises Unreadable."""
    from gguf import GGUFReader

    try:
        reader = GGUFReader(file)
        architecture = str(_content(reader, "general.architecture"))
        tensors = [(tensor.name, tensor.tensor_type.name, int(tensor.n_elements)) for tensor in reader.tensors]
    except Exception as error:  # the reader trusts the file, and fails by whatever it meets
        raise Unreadable(f"it is damaged ({_first_line(error)})", "copy or download it again") from error
    _check_whole(reader, tensors)
    import torch  # takes seconds, and so comes behind what needs only the header
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    _check_keys(reader, architecture)
    dtype = _dtype(tensors)
    where = {"gguf_file": file.name, "local_files_only": True}
    try:
        config = AutoConfig.from_pretrained(file.parent, **where)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        read = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model, torch_dtype=dtype)["tensors"]
    except Exception as error:
        raise Unreadable(
            f"transformers' reader fails on architecture `{architecture}`: {_first_line(error)}",
            "a newer transformers, or the model as safetensors",
        ) from error
    _check_tensors(model, read, architecture)
    model.load_state_dict(read, strict=False, assign=True)
    model.tie_weights()
    model.save_pretrained(folder)
    try:
        AutoTokenizer.from_pretrained(file.parent, **where).save_pretrained(folder)
    except Exception as error:
        raise Unreadable(
            f"its tokenizer `{_content(reader, 'tokenizer.ggml.model')}` cannot be read: {_first_line(error)}",
            "a newer transformers, or the model as safetensors",
        ) from error


def _content(reader: Any, key: str) -> Any:
    """Return the value of a key, or None if the file lacks it."""
    field = reader.fields.get(key)
    return None if field is None else field.contents()


def _check_whole(reader: Any, tensors: list[tuple[str, str, int]]) -> None:
    """Raise Unreadable for a file without a model, for a part of one, and for tensors that the reader would skip."""
    if not tensors:
        raise Unreadable("it holds no tensors", "vocabularies alone cannot be served")
    if (_content(reader, "split.count") or 1) > 1:
        raise Unreadable("it is one of several files", "join them by llama.cpp's `llama-gguf-split --merge`")
    if factors := [name for name, _, _ in tensors if name.startswith("rope_")]:
        raise Unreadable(
            f"`{factors[0]}` scales rotary positions, which transformers' reader leaves out",
            "take the model as safetensors",
        )


def _check_keys(reader: Any, architecture: str) -> None:
    """Raise Unreadable for settings that change what a model computes, and that the reader would skip."""
    from transformers.integrations import GGUF_CONFIG_MAPPING

    known = GGUF_CONFIG_MAPPING.get(architecture, {})
    for key in reader.fields:
        name = key.removeprefix(f"{architecture}.")
        if name != key and name.startswith(LEFT_OUT) and name not in known:
            value = _content(reader, key)
            if value not in NEUTRAL:
                raise Unreadable(
                    f"`{key}` is {value}, which transformers' reader leaves out", "take the model as safetensors"
                )


def _dtype(tensors: list[tuple[str, str, int]]) -> Any:
    """Return the torch dtype of the folder: that of most numbers, and bfloat16 instead of quantised ones."""
    import torch

    numbers: Counter[str] = Counter()
    for _, kind, count in tensors:
        numbers[kind] += count
    (most, _) = numbers.most_common(1)[0]
    return {"F32": torch.float32, "F16": torch.float16}.get(most, torch.bfloat16)


def _check_tensors(model: Any, read: dict[str, Any], architecture: str) -> None:
    """Raise Unreadable if tensors of the model are missing, or differ in shape from its settings."""
    expected = model.state_dict()
    tied = set(getattr(model, "_tied_weights_keys", None) or ()) if model.config.tie_word_embeddings else set()
    problems = [f"`{name}` is missing" for name in expected if name not in read and name not in tied]
    problems += [
        f"`{name}` has shape {list(tensor.shape)}, expected {list(expected[name].shape)}"
        for name, tensor in read.items()
        if name in expected and tensor.shape != expected[name].shape
    ]
    if problems:
        more = f", and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        raise Unreadable(
            f"as a model of architecture `{architecture}`, {', '.join(problems[:SHOWN])}{more}",
            "copy or download it again",
        )


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def main() -> int:
    """Widen the file of the command line."""
    file, folder = map(Path, sys.argv[1:])
    with redirect_stdout(sys.stderr):  # stdout is for the answer
        try:
            widen(file, folder)
            return 0
        except Unreadable as problem:
            answer = {"why": problem.why, "hint": problem.hint}
    print(json.dumps(answer))
    return 1


if __name__ == "__main__":
    sys.exit(main())
