"""The processor of a model's folder: its class and settings, and the marks of media that it has.

transformers is replaced by a few classes, so that it need not be installed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from lockstep.core.contract.errors import ConfigError
from lockstep.host.media import processor
from lockstep.host.media.frames import PillowFrames
from lockstep.host.media.kinds import KINDS
from lockstep.host.media.processor import FILES, VIDEO_FILE, MediaError, MediaProcessor, read_processor, with_own_videos


class Pictures:
    """A processor of pictures and videos, with its arguments."""

    def __init__(
        self,
        image_processor: Any = None,
        tokenizer: Any = None,
        video_processor: Any = None,
        patch: int = 0,
        inner: Any = None,
        processor_class: Any = None,
    ) -> None:
        self.given = {"image_processor": image_processor, "tokenizer": tokenizer, "patch": patch, "inner": inner}
        self.video_processor = video_processor

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
        """Return what stands for the check of transformers."""
        return "checked"


class Sounds:
    """A processor of audio clips."""

    def __init__(self, feature_extractor: Any = None, tokenizer: Any = None) -> None:
        self.given = {"feature_extractor": feature_extractor, "tokenizer": tokenizer}


class Reader:
    """Reads a part of a folder, and never by code of the folder."""

    def __init__(self, what: str) -> None:
        self.what = what

    def from_pretrained(self, folder: Path, trust_remote_code: bool = True) -> tuple[str, Path]:
        assert not trust_remote_code
        return self.what, folder


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace transformers, without torchvision."""
    names = ("AutoFeatureExtractor", "AutoImageProcessor", "AutoProcessor", "AutoTokenizer")
    top: Any = ModuleType("transformers")
    vars(top).update({name: Reader(name) for name in names}, __version__="9.9")
    top._class_to_module = {"Pictures": "models.pictures", "Sounds": "transformers.models.sounds"}
    listed: Any = ModuleType("transformers.models.auto.processing_auto")
    listed.PROCESSOR_MAPPING_NAMES = {"qwen2_vl": "Pictures", "sounds": "Sounds"}
    for name, module in {
        "transformers": top,
        "transformers.models.auto.processing_auto": listed,
        "transformers.models.pictures": SimpleNamespace(Pictures=Pictures),
        "transformers.models.sounds": SimpleNamespace(Sounds=Sounds),
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(processor, "find_spec", lambda name: None)


def write(folder: Path, **files: Mapping[str, Any]) -> Path:
    """Write files of settings: `model`, `images`, `processor` and `videos`."""
    names = {"model": "config.json", "images": FILES[0], "processor": FILES[1], "videos": VIDEO_FILE}
    for name, content in files.items():
        (folder / names[name]).write_text(json.dumps(content))
    return folder


# --------------------------------------------------------------------------------------------------------------- class


@pytest.mark.parametrize(
    ("files", "kind"),
    [
        ({"images": {"processor_class": "Sounds"}, "model": {"model_type": "qwen2_vl"}}, "Sounds"),
        ({"processor": {"processor_class": "Pictures"}, "model": {"model_type": "sounds"}}, "Pictures"),
        ({"images": {}, "model": {"model_type": "qwen2_vl"}}, "Pictures"),
        ({"processor": {"processor_class": None}, "model": {"model_type": "sounds"}}, "Sounds"),
        ({"images": {}, "model": {"model_type": "qwen2_vl_thinker"}}, "Pictures"),
    ],
)
def test_the_class_of_a_processor_is_that_of_its_folder_or_of_the_model(
    files: dict[str, Any], kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processor, "PillowFrames", lambda *given: given)
    made = read_processor(write(tmp_path, **files))
    assert type(made).__name__ == kind
    assert isinstance(made, Pictures if kind == "Pictures" else Sounds)
    assert made.given["tokenizer"] == ("AutoTokenizer", tmp_path)


def test_a_processor_of_an_unknown_class_is_refused_by_name(tmp_path: Path) -> None:
    for model in ({"model_type": "text"}, {}):
        with pytest.raises(ValueError, match=r"transformers 9\.9 has no processor ``"):
            read_processor(write(tmp_path, images={}, model=model))
    with pytest.raises(ValueError, match=r"transformers 9\.9 has no processor `Other`"):
        with_own_videos("Other")


def test_a_processor_gets_the_settings_and_parts_that_it_takes(tmp_path: Path) -> None:
    """Settings of a part, which are an object, belong to its own reader."""
    write(
        tmp_path,
        images={"processor_class": "Pictures", "patch": 7, "other": 1},
        processor={"patch": 8, "inner": {"a": 1}},
        model={"model_type": "text"},
    )
    made = read_processor(tmp_path)
    assert made.given == {
        "image_processor": ("AutoImageProcessor", tmp_path),
        "tokenizer": ("AutoTokenizer", tmp_path),
        "patch": 8,
        "inner": None,
    }
    assert made.video_processor is None
    write(tmp_path, processor={"processor_class": "Sounds"})
    assert read_processor(tmp_path).given == {
        "feature_extractor": ("AutoFeatureExtractor", tmp_path),
        "tokenizer": ("AutoTokenizer", tmp_path),
    }


def test_with_torchvision_the_library_reads_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "find_spec", lambda name: name == "torchvision" or None)
    assert read_processor(tmp_path) == ("AutoProcessor", tmp_path)


OWN = "Qwen2VLVideoProcessor"


@pytest.mark.parametrize(
    ("files", "name"),
    [
        ({"videos": {"video_processor_type": OWN}, "processor": {"video_processor_type": "Other"}}, OWN),
        ({"processor": {"video_processor": {"video_processor_type": OWN}, "video_processor_type": "Other"}}, OWN),
        ({"images": {"video_processor_type": OWN}}, OWN),
        ({"images": {"video_processor_type": "Other"}, "model": {"model_type": "qwen2_vl"}}, None),
        ({"images": {}, "model": {"model_type": "qwen3_vl"}}, "Qwen3VLVideoProcessor"),
        ({"images": {}, "model": {"model_type": "qwen2_5_omni_thinker"}}, OWN),
        ({"images": {}}, None),
    ],
)
def test_videos_are_read_by_the_class_that_the_folder_or_the_model_has(
    files: dict[str, Any], name: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processor, "PillowFrames", lambda kind, given: (kind, given))
    monkeypatch.setattr(processor, "with_own_videos", lambda _: Pictures)
    found = read_processor(write(tmp_path, **{"model": {"model_type": "text"}, **files})).video_processor
    assert (found and found[0]) == name
    if found and "videos" in files:
        assert found[1] == files["videos"]


def test_the_processor_of_videos_may_be_another_one_or_none() -> None:
    made = with_own_videos("Pictures")()
    frames = PillowFrames.__new__(PillowFrames)
    assert type(made).__name__ == "Pictures"
    assert made.check_argument_for_proper_class("video_processor", frames) is object
    assert made.check_argument_for_proper_class("video_processor", None) is object
    assert made.check_argument_for_proper_class("video_processor", "other") == "checked"
    assert made.check_argument_for_proper_class("image_processor", None) == "checked"


def test_a_module_stands_in_for_another_one_until_its_end() -> None:
    """One that is imported already is left as it is."""
    with processor._by_pillow(("lockstep_absent", "json.tool")):
        assert import_module("lockstep_absent") is sys.modules["json.tool"]
    assert "lockstep_absent" not in sys.modules
    with processor._by_pillow(("lockstep_absent", "json.tool")):
        assert "lockstep_absent" in sys.modules, "the second module is imported by now"
    with pytest.raises(KeyError), processor._by_pillow(("lockstep_absent", "json.tool")):
        raise KeyError
    assert "lockstep_absent" not in sys.modules
    with processor._by_pillow(("json", "json.tool")):
        assert sys.modules["json"] is json
    assert sys.modules["json"] is json
    with processor._by_pillow(None):
        assert "lockstep_absent" not in sys.modules


# --------------------------------------------------------------------------------------------------------------- marks


def made_of(folder: Path, monkeypatch: pytest.MonkeyPatch, config: Mapping[str, Any], **parts: Any) -> MediaProcessor:
    """Return the processor of media of a folder whose processor has these parts."""
    monkeypatch.setattr(processor, "read_processor", lambda _: SimpleNamespace(**parts))
    return MediaProcessor(write(folder, images={}, model=config), lambda text: [])


IMAGES = {"image_token": "<i>", "image_processor": object()}


@pytest.mark.parametrize(
    ("config", "parts", "marks"),
    [
        ({"image_token_id": 5, "image_token_index": 6}, {**IMAGES, "image_token_id": 7}, {"image": ("<i>", 5)}),
        ({"image_token_index": 6}, {**IMAGES, "image_token_id": 7}, {"image": ("<i>", 6)}),
        ({}, {**IMAGES, "image_token_id": 7}, {"image": ("<i>", 7)}),
        ({"image_token_id": 5}, {**IMAGES, "boi_token": "<boi>"}, {"image": ("<boi>", 5)}),
        (
            {"audio_token_id": 5, "video_token_id": 6},
            {"audio_token": "<a>", "feature_extractor": object(), "video_token": "<v>", "video_processor": object(),
             "boi_token": "<boi>", **IMAGES},
            {"audio": ("<a>", 5), "video": ("<v>", 6)},
        ),
        ({"audio_token_id": 5}, {"audio_token": "<a>", "feature_extractor": object()}, {"audio": ("<a>", 5)}),
        ({"image_token_id": 5, "video_token_id": 6}, {**IMAGES, "video_token": "<v>"}, {"image": ("<i>", 5)}),
        ({"image_token_id": 5, "video_token_id": 6}, {**IMAGES, "video_processor": object()}, {"image": ("<i>", 5)}),
    ],
)  # fmt: skip
def test_the_marks_of_media_are_those_with_a_token_and_a_part(
    config: dict[str, Any],
    parts: dict[str, Any],
    marks: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert made_of(tmp_path, monkeypatch, config, **parts)._marks == marks


def test_a_processor_without_marks_is_refused_with_what_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"config\.json of .* has no `image_token_id`"):
        made_of(tmp_path, monkeypatch, {}, **IMAGES)
    with pytest.raises(ConfigError, match="is SimpleNamespace, which takes no media"):
        made_of(tmp_path, monkeypatch, {"image_token_id": 5})


def test_only_a_thinker_has_tokens_in_front_of_media(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {"image_token_id": 5, "vision_start_token_id": 8, "audio_start_token_id": 9}
    assert made_of(tmp_path, monkeypatch, fields, **IMAGES)._starts == {}
    thinker = {"model_type": "qwen2_5_omni", "thinker_config": fields}
    assert made_of(tmp_path, monkeypatch, thinker, **IMAGES)._starts == {"image": 8, "audio": 9, "video": 8}


def test_a_folder_that_cannot_be_read_is_refused_with_a_short_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"has no processor of media \(preprocessor_config\.json or processor_config"):
        MediaProcessor(tmp_path, lambda text: [])

    def fails(_: Path) -> Any:
        raise KeyError("x\n y" * 200)

    monkeypatch.setattr(processor, "read_processor", fails)
    with pytest.raises(ConfigError) as raised:
        MediaProcessor(write(tmp_path, images={}, model={}), lambda text: [])
    why = str(raised.value).partition(" cannot be made: ")[2]
    assert why.startswith("KeyError: ")
    assert len(why) == len("KeyError: ") + 300
    assert "\n" not in why
    monkeypatch.setattr(processor, "read_processor", lambda _: SimpleNamespace(**IMAGES))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json of .* cannot be read"):
        MediaProcessor(tmp_path, lambda text: [])


def test_an_error_of_a_medium_has_its_message_and_number() -> None:
    error = MediaError("too large", 2)
    assert (str(error), error.message, error.where) == ("too large", "too large", 2)
    assert MediaError("no mark").where is None


def test_media_of_other_kinds_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = made_of(tmp_path, monkeypatch, {"image_token_id": 5}, **IMAGES)
    with pytest.raises(MediaError, match=f"{KINDS['audio'].several} are not read for this model, "
                                         f"{KINDS['image'].several} are"):  # fmt: skip
        made.check("audio")
    with pytest.raises(MediaError, match="not installed"):
        made.check("image")
