"""The processor of a model's folder: media as arrays for its encoder, and the tokens that stand for them in a prompt.

transformers' processor prepares one medium at a time, so that equal media have equal contents wherever they occur. Its
text for a medium, in which the model's placeholder is repeated, replaces the mark of the chat template:

    <|vision_start|><|image_pad|><|vision_end|>   ──>   <|vision_start|><|image_pad|> ... <|image_pad|><|vision_end|>
                                                                        |<---------- span --------->|

A span reaches from the first placeholder of a medium to the last one; tokens between them (breaks of rows, names of
tiles) belong to it.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lockstep.core.contract.errors import ConfigError
from lockstep.core.contract.events import PromptSpan
from lockstep.host.media.content import EncoderInput, MediaPrompt, content_of
from lockstep.host.media.frames import MEANS, OF_MODELS, FrameSampling, PillowFrames, VideoFrames
from lockstep.host.media.kinds import KINDS, Kind
from lockstep.host.media.thinker import FRAMES_MASK, STARTS, SUFFIX, is_thinker, thinker_of

NOT_OF_THE_ENCODER = frozenset(("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"))
TOGETHER = "batch_num_images"
"""An argument of encoders (LLaVA-OneVision) whose features of an image depend on the number of images beside it."""
FILES = ("preprocessor_config.json", "processor_config.json")
VIDEO_FILE = "video_preprocessor_config.json"
PIXTRAL = "transformers.models.pixtral"
PILLOW_TWINS = {
    f"{PIXTRAL}.processing_pixtral": (f"{PIXTRAL}.image_processing_pixtral", f"{PIXTRAL}.image_processing_pil_pixtral")
}
"""Module of a processor -> a module that it imports, which needs torchvision, and one that has the same function."""
FRAMES_PER_S = 2.0  # of a video, for a processor that states no rate
SPECTRUM = "input_features"  # array of an audio clip, [1, bins, frames]


class MediaError(Exception):
    """Media or a prompt with media that cannot be used. The message is for the client.

    Args:
        where: which medium, counted from 0; None: the prompt.
    """

    def __init__(self, message: str, where: int | None = None) -> None:
        super().__init__(message)
        self.message, self.where = message, where


def has_processor(folder: Path) -> bool:
    """Return whether a model's folder has the settings of a processor."""
    return any((folder / name).is_file() for name in FILES)


def lacking_packages(kind: str) -> str:
    """Return which packages media of a kind need that are not installed, and how to install them; empty: none."""
    lacking = [one for one in KINDS[kind].packages if find_spec(one) is None]
    names = " and ".join({"PIL": "Pillow"}.get(one, one) for one in lacking)
    verb = "is" if len(lacking) == 1 else "are"
    return f'{names} {verb} not installed: pip install "lockstep-core[{KINDS[kind].extra}]"' if lacking else ""


def read_processor(folder: Path) -> Any:
    """Return the processor of a folder. Without torchvision it takes videos if `PillowFrames` has their class."""
    from transformers import AutoFeatureExtractor, AutoImageProcessor, AutoProcessor, AutoTokenizer

    if find_spec("torchvision") is not None:
        return AutoProcessor.from_pretrained(folder, trust_remote_code=False)
    read: dict[str, Any] = {}
    for name in FILES:
        if (folder / name).is_file():
            read |= json.loads((folder / name).read_bytes())
    config = json.loads((folder / "config.json").read_bytes())
    kind = with_own_videos(str(read.get("processor_class") or _processor_name(config)))
    accepted = signature(kind.__init__).parameters
    settings = {name: value for name, value in read.items() if name in accepted and not isinstance(value, dict)}
    if "video_processor" in accepted:
        settings["video_processor"] = _frames(folder, config, read)
    for name, reader in (("image_processor", AutoImageProcessor), ("feature_extractor", AutoFeatureExtractor)):
        if name in accepted:
            settings[name] = reader.from_pretrained(folder, trust_remote_code=False)
    return kind(tokenizer=AutoTokenizer.from_pretrained(folder, trust_remote_code=False), **settings)


def _processor_name(config: Mapping[str, Any]) -> str:
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    return str(PROCESSOR_MAPPING_NAMES.get(_model_type(config), ""))


def _model_type(config: Mapping[str, Any]) -> str:
    """Return the type of the whole model, by which transformers lists processors."""
    return str(config.get("model_type")).removesuffix(SUFFIX)


def _frames(folder: Path, config: Mapping[str, Any], read: Mapping[str, Any]) -> PillowFrames | None:
    """Return a processor of videos; None for a class that is not done here."""
    given = dict(read)
    if (folder / VIDEO_FILE).is_file():
        given = json.loads((folder / VIDEO_FILE).read_bytes())
    elif isinstance(inner := read.get("video_processor"), Mapping):
        given = dict(inner)
    name = str(given.get("video_processor_type") or OF_MODELS.get(_model_type(config)))
    return PillowFrames(name, given) if name in MEANS else None


def with_own_videos(name: str) -> Any:
    """Return transformers' class of processors of this name, with which `PillowFrames` may go, or no videos."""
    import transformers

    module: Any = transformers  # a lazy module; its attribute would be a stand-in without torchvision
    where = module._class_to_module.get(name)
    if where is None:
        raise ValueError(f"transformers {transformers.__version__} has no processor `{name}`")
    where = where if where.startswith("transformers.") else f"transformers.{where}"
    with _by_pillow(PILLOW_TWINS.get(where)):
        kind: Any = getattr(import_module(where), name)

    class WithOwnVideos(kind):  # type: ignore[misc]  # a class that is known at run time
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            """Let the processor of videos be another one, or None."""
            if argument_name == "video_processor" and isinstance(argument, PillowFrames | None):
                return object
            return super().check_argument_for_proper_class(argument_name, argument)

    WithOwnVideos.__name__ = name
    return WithOwnVideos


@contextmanager
def _by_pillow(twins: tuple[str, str] | None) -> Iterator[None]:
    """Let imports of the first module of two find the second one."""
    if twins is None or twins[0] in sys.modules:
        yield
        return
    sys.modules[twins[0]] = import_module(twins[1])
    try:
        yield
    finally:
        del sys.modules[twins[0]]


class _Mark(NamedTuple):
    """What stands for a medium of one kind.

    Args:
        text: as the chat template writes it.
        token: the placeholder, which a prompt has at every position of the encoder's output.
    """

    text: str
    token: int


class MediaProcessor:
    """Prepares prompts with media for one model.

    Args:
        encode: returns the tokens of a text, without those that are added to every text.
    Raises: ConfigError, from the constructor, if the folder's processor cannot be made.
    """

    def __init__(self, folder: Path, encode: Callable[[str], list[int]]) -> None:
        self._encode = encode
        if not has_processor(folder):
            raise ConfigError(f"{folder} has no processor of media ({' or '.join(FILES)})")
        try:
            self._processor: Any = read_processor(folder)
        except Exception as error:  # the library's own checks, of many types, and packages that it lacks
            why = " ".join(str(error).split())[:300]
            raise ConfigError(f"the processor of {folder} cannot be made: {type(error).__name__}: {why}") from error
        try:
            config = thinker_of(json.loads((folder / "config.json").read_bytes()))
        except (OSError, ValueError) as error:
            raise ConfigError(f"config.json of {folder} cannot be read: {error}") from error
        self._starts = {kind: config.get(name) for kind, name in STARTS.items()} if is_thinker(config) else {}
        self._marks: dict[str, _Mark] = {}
        lacking = ""
        for kind, part, first in (
            ("image", "image_processor", "boi_token"),
            ("audio", "feature_extractor", ""),
            ("video", "video_processor", ""),
        ):
            mark = getattr(self._processor, f"{kind}_token", None)
            if not isinstance(mark, str) or getattr(self._processor, part, None) is None:
                continue
            token = getattr(self._processor, f"{kind}_token_id", None)
            token = config.get(f"{kind}_token_id", config.get(f"{kind}_token_index", token))
            if isinstance(token, int):
                self._marks[kind] = _Mark(getattr(self._processor, first, None) or mark if first else mark, token)
            else:
                lacking = f"config.json of {folder} has no `{kind}_token_id`"
        if not self._marks:
            what = f"the processor of {folder} is {type(self._processor).__name__}, which takes no media"
            raise ConfigError(lacking or what)

    @property
    def sampling_rate(self) -> int:
        """Return the samples of audio per second that the model takes."""
        rate: int = self._processor.feature_extractor.sampling_rate
        return rate

    def sampling(self, frames: int) -> FrameSampling:
        """Return which frames of a video the model gets, at most so many."""
        made = self._processor.video_processor
        rate, least = getattr(made, "fps", None) or FRAMES_PER_S, getattr(made, "min_frames", 4)
        return FrameSampling(float(rate), int(least), min(frames, int(getattr(made, "max_frames", frames))))

    def check(self, kind: str) -> None:
        """Raise MediaError for a kind of media that is not read here."""
        if kind not in self._marks:
            known = " and ".join(KINDS[one].several for one in self._marks)
            raise MediaError(f"{KINDS[kind].several} are not read for this model, {known} are")
        if lacking := lacking_packages(kind):
            raise MediaError(lacking)

    # mechanism: media-spans (decided)
    def prompt(self, text: str, media: Sequence[tuple[Kind, Any]]) -> MediaPrompt:
        """Return a rendered conversation with its media in place of the marks, in order. Raises MediaError.

        Args:
            media: images, samples of audio clips at `sampling_rate`, and `VideoFrames`, each with its kind.
        """
        marks = {kind: self._marks[kind].text for kind, _ in media}
        parts = re.split("|".join(f"({re.escape(one)})" for one in marks.values()), text)
        between, step = parts[:: len(marks) + 1], len(marks) + 1
        order = [next(k for k, one in zip(marks, parts[at : at + step - 1], strict=True) if one is not None)
                 for at in range(1, len(parts), step)]  # fmt: skip
        for kind, mark in marks.items():
            given, found = sum(one == kind for one, _ in media), order.count(kind)
            if given != found:
                several = KINDS[kind].several
                raise MediaError(
                    f"the conversation has {given} {several}, and its text has {found} marks of {several} ({mark}), "
                    "which the chat template writes and other text must not contain"
                )
        if order != [kind for kind, _ in media]:
            raise MediaError("the chat template changes the order of media")
        prepared = [self._prepared(kind, value, number) for number, (kind, value) in enumerate(media)]
        if len(media) > 1 and any(TOGETHER in arrays for _, _, arrays in prepared):
            raise MediaError("this model takes one image: of several it makes other features than of each one")
        written = between[0] + "".join(one[0] + after for one, after in zip(prepared, between[1:], strict=True))
        ids = self._encode(written)
        tokens = {self._marks[kind].token for kind in marks}
        places = [place for place, token in enumerate(ids) if token in tokens]
        if len(places) != sum(count for _, count, _ in prepared):
            raise MediaError("the text of the conversation contains the model's placeholder of media")
        spans, contents, at = [], dict[bytes, EncoderInput](), 0
        for (kind, _), (_, count, arrays) in zip(media, prepared, strict=True):
            start, stop = places[at], places[at + count - 1] + 1
            content = content_of(ids[start:stop], arrays, kind)
            spans.append(PromptSpan(start, stop, kind, content.digest, content.positions))
            contents[content.digest] = content
            at += count
        if self._starts:
            self._check_surrounded(ids, spans)
        return MediaPrompt(written, ids, tuple(spans), tuple(contents.values()))

    def _check_surrounded(self, ids: Sequence[int], spans: Sequence[PromptSpan]) -> None:
        """Raise MediaError for a medium without its start token in front of it, and a token of its own behind it."""
        nexts = [span.start - 1 for span in spans[1:]] + [len(ids)]
        for number, (span, behind) in enumerate(zip(spans, nexts, strict=True)):
            if not span.start or ids[span.start - 1] != self._starts[span.kind] or span.stop >= behind:
                raise MediaError(
                    f"the chat template must write a medium between the tokens of its start "
                    f"(`{STARTS[span.kind]}` of config.json) and its end, by which this model counts positions",
                    number,
                )

    def _prepared(self, kind: Kind, value: Any, number: int) -> tuple[str, int, dict[str, Any]]:
        """Return the text that replaces the mark of a medium, its number of placeholders, and the encoder's arrays."""
        found = self._processed(kind, value, number)
        most = getattr(self._processor.feature_extractor, "n_samples", None) if kind == "audio" else None
        if most and len(value) > most and self._processed(kind, value[:most], number)[1] == found[1]:
            rate = self.sampling_rate
            message = f"the audio clip has {len(value) / rate:,.1f} s, and this model takes the first {most / rate:g} s"
            raise MediaError(f"{message}: send it in parts", number)
        return found

    def _processed(self, kind: Kind, value: Any, number: int) -> tuple[str, int, dict[str, Any]]:
        mark, shown = self._marks[kind], KINDS[kind].shown
        given: dict[str, Any] = {"images": [[value]]}
        if kind == "audio":
            given = {"audio": [value], "sampling_rate": self.sampling_rate}
        elif kind == "video":
            given = {"videos": [value.pixels], "video_metadata": [_metadata(value)], "do_sample_frames": False}
        try:
            made = self._processor(
                text=[mark.text],
                add_special_tokens=False,
                return_tensors="np",
                return_text_replacement_offsets=True,
                **given,
            )
            (replaced,) = made.pop("text_replacement_offsets")[0]
        except Exception as error:  # the library's own checks, of many types
            why = " ".join(str(error).split())[:300]
            raise MediaError(f"the model's processor refuses the {shown}: {why}", number) from error
        count = int((np.asarray(made["input_ids"]) == mark.token).sum())
        if not count:
            raise MediaError(f"the model's processor gives the {shown} no positions", number)
        arrays = {name: np.asarray(value) for name, value in made.items() if name not in NOT_OF_THE_ENCODER}
        if self._starts and FRAMES_MASK in arrays:  # padding up to five minutes, which the thinker passes over
            frames = int(arrays[FRAMES_MASK].sum())
            arrays |= {name: arrays[name][..., :frames] for name in (SPECTRUM, FRAMES_MASK)}
        return replaced["replacement"], count, arrays


def _metadata(video: VideoFrames) -> Any:
    """Return what transformers' processors need of a video."""
    from transformers.video_utils import VideoMetadata

    _, height, width, _ = video.pixels.shape
    return VideoMetadata(
        total_num_frames=video.total,
        fps=video.rate,
        width=width,
        height=height,
        duration=video.total / video.rate,
        frames_indices=list(video.numbers),
    )
