"""The processor of a model's folder: images as arrays for its encoder, and the tokens that stand for them in a prompt.

transformers' processor prepares one image at a time, so that equal images have equal contents wherever they occur. Its
text for an image, in which the model's placeholder is repeated, replaces the mark of the chat template:

    <|vision_start|><|image_pad|><|vision_end|>   ──>   <|vision_start|><|image_pad|> ... <|image_pad|><|vision_end|>
                                                                        |<---------- span --------->|

A span reaches from the first placeholder of an image to the last one; tokens between them (breaks of rows, names of
tiles) belong to it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.core.contract.errors import ConfigError
from lockstep.core.contract.events import PromptSpan
from lockstep.host.media.content import EncoderInput, MediaPrompt, content_of

NOT_OF_THE_ENCODER = frozenset(("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"))
TOGETHER = "batch_num_images"
"""An argument of encoders (LLaVA-OneVision) whose features of an image depend on the number of images beside it."""
FILES = ("preprocessor_config.json", "processor_config.json")


class MediaError(Exception):
    """Media or a prompt with media that cannot be used. The message is for the client.

    Args:
        where: which image, counted from 0; None: the prompt.
    """

    def __init__(self, message: str, where: int | None = None) -> None:
        super().__init__(message)
        self.message, self.where = message, where


def has_processor(folder: Path) -> bool:
    """Return whether a model's folder has the settings of a processor."""
    return any((folder / name).is_file() for name in FILES)


def read_processor(folder: Path) -> Any:
    """Return the processor of a folder. Without torchvision it takes pictures only: its videos would need it."""
    from transformers import AutoImageProcessor, AutoProcessor, AutoTokenizer

    if find_spec("torchvision") is not None:
        return AutoProcessor.from_pretrained(folder, trust_remote_code=False)
    read: dict[str, Any] = {}
    for name in FILES:
        if (folder / name).is_file():
            read |= json.loads((folder / name).read_bytes())
    config = json.loads((folder / "config.json").read_bytes())
    kind = pictures_only(str(read.get("processor_class") or _processor_name(config)))
    accepted = signature(kind.__init__).parameters
    settings = {name: value for name, value in read.items() if name in accepted and not isinstance(value, dict)}
    if "video_processor" in accepted:
        settings["video_processor"] = None
    return kind(
        image_processor=AutoImageProcessor.from_pretrained(folder, trust_remote_code=False),
        tokenizer=AutoTokenizer.from_pretrained(folder, trust_remote_code=False),
        **settings,
    )


def _processor_name(config: Mapping[str, Any]) -> str:
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    return str(PROCESSOR_MAPPING_NAMES.get(str(config.get("model_type")), ""))


def pictures_only(name: str) -> Any:
    """Return transformers' class of processors of this name, changed so that a processor of videos may be missing."""
    import transformers

    module: Any = transformers  # a lazy module; its attribute would be a stand-in without torchvision
    where = module._class_to_module.get(name)
    if where is None:
        raise ValueError(f"transformers {transformers.__version__} has no processor `{name}`")
    where = where if where.startswith("transformers.") else f"transformers.{where}"
    kind: Any = getattr(import_module(where), name)

    class PicturesOnly(kind):  # type: ignore[misc]  # a class that is known at run time
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            """Let the processor of videos be None."""
            if argument_name == "video_processor" and argument is None:
                return object
            return super().check_argument_for_proper_class(argument_name, argument)

    PicturesOnly.__name__ = name
    return PicturesOnly


class MediaProcessor:
    """Prepares prompts with images for one model.

    Args:
        encode: returns the tokens of a text, without those that are added to every text.
    Raises: ConfigError, from the constructor, if the folder's processor cannot be made.
    """

    def __init__(self, folder: Path, encode: Callable[[str], list[int]]) -> None:
        self._encode = encode
        if not has_processor(folder):
            raise ConfigError(f"{folder} has no processor of images ({' or '.join(FILES)})")
        try:
            self._processor: Any = read_processor(folder)
        except Exception as error:  # the library's own checks, of many types, and packages that it lacks
            why = " ".join(str(error).split())[:300]
            raise ConfigError(f"the processor of {folder} cannot be made: {type(error).__name__}: {why}") from error
        mark = getattr(self._processor, "image_token", None)
        token = getattr(self._processor, "image_token_id", None)
        if not isinstance(mark, str) or getattr(self._processor, "image_processor", None) is None:
            raise ConfigError(f"the processor of {folder} is {type(self._processor).__name__}, which takes no images")
        self.mark = getattr(self._processor, "boi_token", None) or mark
        try:
            placeholder = json.loads((folder / "config.json").read_bytes())
            token = placeholder.get("image_token_id", placeholder.get("image_token_index", token))
        except (OSError, ValueError) as error:
            raise ConfigError(f"config.json of {folder} cannot be read: {error}") from error
        if not isinstance(token, int):
            raise ConfigError(f"config.json of {folder} has no `image_token_id`")
        self.token = token
        """The placeholder of the model, which a prompt has at every position of the encoder's output."""

    def prompt(self, text: str, images: Sequence[Any]) -> MediaPrompt:
        """Return a rendered conversation with its images in place of the marks, in order. Raises MediaError."""
        parts = text.split(self.mark)
        if len(parts) != len(images) + 1:
            raise MediaError(
                f"the conversation has {len(images)} images, and its text has {len(parts) - 1} marks of images "
                f"({self.mark}), which the chat template writes and other text must not contain"
            )
        prepared = [self._prepared(image, number) for number, image in enumerate(images)]
        if len(images) > 1 and any(TOGETHER in arrays for _, _, arrays in prepared):
            raise MediaError("this model takes one image: of several it makes other features than of each one")
        written = parts[0] + "".join(one[0] + after for one, after in zip(prepared, parts[1:], strict=True))
        ids = self._encode(written)
        places = [place for place, token in enumerate(ids) if token == self.token]
        if len(places) != sum(count for _, count, _ in prepared):
            raise MediaError("the text of the conversation contains the model's placeholder of images")
        spans, contents, at = [], dict[bytes, EncoderInput](), 0
        for _, count, arrays in prepared:
            start, stop = places[at], places[at + count - 1] + 1
            content = content_of(ids[start:stop], arrays)
            spans.append(PromptSpan(start, stop, "image", content.digest, content.positions))
            contents[content.digest] = content
            at += count
        return MediaPrompt(written, ids, tuple(spans), tuple(contents.values()))

    def _prepared(self, image: Any, number: int) -> tuple[str, int, dict[str, Any]]:
        """Return the text that replaces the mark of an image, its number of placeholders, and the encoder's arrays."""
        try:
            made = self._processor(
                text=[self.mark],
                images=[[image]],
                add_special_tokens=False,
                return_tensors="np",
                return_text_replacement_offsets=True,
            )
            (replaced,) = made.pop("text_replacement_offsets")[0]
        except Exception as error:  # the library's own checks, of many types
            why = " ".join(str(error).split())[:300]
            raise MediaError(f"the model's processor refuses the image: {why}", number) from error
        count = int((np.asarray(made["input_ids"]) == self.token).sum())
        if not count:
            raise MediaError("the model's processor gives the image no positions", number)
        arrays = {name: np.asarray(value) for name, value in made.items() if name not in NOT_OF_THE_ENCODER}
        return replaced["replacement"], count, arrays
