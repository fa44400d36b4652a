"""Qwen-Omni's thinker: clips, pictures and videos in one prompt, as transformers answers, places and encodes them."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU runtime is not installed")
pytest.importorskip("transformers", reason="the models run by transformers' code")
pytest.importorskip("soundfile", reason="audio clips are decoded by soundfile")
pytest.importorskip("soxr", reason="their sampling rate is changed by soxr")
pytest.importorskip("av", reason="videos are decoded by PyAV")

from lockstep.core.contract.errors import ConfigError  # noqa: E402
from lockstep.host.media.content import content_of  # noqa: E402
from lockstep.host.media.frames import OF_MODELS, PillowFrames  # noqa: E402
from lockstep.host.media.processor import MediaError, MediaProcessor, read_processor  # noqa: E402
from lockstep.host.media.thinker import FRAMES_MASK, is_thinker, thinker_of  # noqa: E402
from lockstep.runtime import LLM, Params  # noqa: E402
from lockstep.runtime.models import read_settings  # noqa: E402
from tests.support.architectures import REQUESTS  # noqa: E402
from tests.support.omni import (  # noqa: E402
    CLIPS_MAX,
    OMNI_FAMILIES,
    greedy_omni,
    omni_conversations,
    omni_inputs,
    part_of,
    save_thinker,
    save_whole,
    thinker_fields,
)
from tests.support.pictures import serve_pictures  # noqa: E402
from tests.support.sounds import RATE, loaded_clip, sound_file, sound_part  # noqa: E402

ROOM = {"pages": 1200}
MIXED = (
    [("audio", 1), ("image", 2)],
    [("image", 4), ("audio", 1), ("image", 1)],
    [("video", 0), ("audio", 4), ("image", 1)],
    [("audio", 3), ("video", 2)],
    [("audio", 2)],
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that saves a thinker once, with conversations and transformers' answers to them."""
    made: dict[str, Any] = {}

    def save(name: str) -> Any:
        if name not in made:
            folder = tmp_path_factory.mktemp("thinker")
            model, processor = save_thinker(folder, name)
            asked = omni_conversations(REQUESTS, ("audio", "image"), CLIPS_MAX[name])
            made[name] = (folder, model, processor, asked, greedy_omni(folder, model, processor, asked))
        return made[name]

    return save


def message(*shown: tuple[str, int], text: str = "what?") -> list[dict[str, Any]]:
    """One message with media."""
    parts = [part_of(kind, number) for kind, number in shown]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


@pytest.mark.parametrize("name", OMNI_FAMILIES)
def test_tokens_are_those_of_transformers(name: str, saved: Any) -> None:
    folder, _, _, asked, answers = saved(name)
    assert len(set(map(tuple, answers))) > REQUESTS // 2
    served = serve_pictures(folder, asked, overlap_depth=1, **ROOM)
    assert served.answers == answers
    assert served.cached_tokens
    assert served.retractions
    assert served.encoded == len({one for _, shown, _ in asked for one in shown})


def test_little_room_and_a_budget_change_no_token(saved: Any) -> None:
    folder, _, _, asked, answers = saved("Qwen2.5-Omni")
    with LLM(folder, device="cpu") as llm:
        prompts = [llm.chat_prompt(messages) for messages, _, _ in asked]
    needed = [sum(one.positions for one in prompt.contents) for prompt in prompts if not isinstance(prompt, list)]
    served = serve_pictures(folder, asked, encoder_cache_tokens=max(needed), encoder_budget_tokens=16, **ROOM)
    assert served.answers == answers
    assert served.encoded > len({one for _, shown, _ in asked for one in shown})  # some were encoded again


def test_drafts_do_not_change_tokens(saved: Any) -> None:
    folder, _, _, asked, answers = saved("Qwen2.5-Omni")
    options = {"speculative_method": "ngram", "num_speculative_tokens": 2, "overlap_depth": 1}
    assert serve_pictures(folder, asked, **options, **ROOM).answers == answers


@pytest.mark.parametrize("name", OMNI_FAMILIES)
def test_positions_and_states_are_those_of_transformers(name: str, saved: Any) -> None:
    """Of media of all kinds in several orders, by prompts in chunks of which some come from the cache."""
    folder, model, processor, _, _ = saved(name)
    mixed = [*MIXED, [("audio", 1), ("audio", 3), ("image", 2)]][: 5 + (CLIPS_MAX[name] > 1)]
    asked = [message(*shown) for shown in mixed]
    with LLM(folder, device="cpu", chunked_prefill_size=32, page_size=4, **ROOM) as llm:
        prompts: list[Any] = [llm.chat_prompt(one, generation_prompt=False) for one in asked]
        llm.generate([prompts[2]], Params(max_new_tokens=2))
        found = llm.embed(prompts)
        encoder: Any = llm.model.media_encoder
        places = []
        for prompt in prompts:
            contents = {one.digest: one for one in prompt.contents}
            places.append(encoder.places([(span, contents[span.digest]) for span in prompt.spans], len(prompt.ids)))
    for messages, shown, prompt, one, of_prompt in zip(asked, mixed, prompts, found, places, strict=True):
        inputs = omni_inputs(folder, processor, messages, shown, add_generation_prompt=False)
        assert prompt.ids == inputs["input_ids"][0].tolist()
        lengths = inputs[FRAMES_MASK].sum(-1) if FRAMES_MASK in inputs else None
        expected, _ = model.model.get_rope_index(
            inputs["input_ids"],
            inputs.get("image_grid_thw"),
            inputs.get("video_grid_thw"),
            inputs["attention_mask"],
            audio_seqlens=lengths,
            second_per_grids=inputs.get("video_second_per_grid"),
        )
        np.testing.assert_array_equal(of_prompt, expected[:, 0].numpy())
        model.model.rope_deltas = None
        with torch.inference_mode():
            states = model.model(**inputs).last_hidden_state[0]
        assert not one.error
        np.testing.assert_allclose(one.vector, states.mean(0), atol=3e-4)


@pytest.mark.parametrize("name", OMNI_FAMILIES)
def test_features_of_a_clip_are_those_of_transformers(name: str, saved: Any) -> None:
    """Of a clip alone, without the frames by which its extractor fills the window."""
    folder, model, processor, _, _ = saved(name)
    with LLM(folder, device="cpu") as llm:
        prompts: list[Any] = [llm.chat_prompt(message(("audio", number))) for number in range(5)]
        encoder: Any = llm.model.media_encoder
        for number, prompt in enumerate(prompts):
            (content,) = prompt.contents
            mark = "<|audio_bos|><|AUDIO|><|audio_eos|>"
            made = processor(text=[mark], audio=[loaded_clip(number)], sampling_rate=RATE, return_tensors="pt")
            frames = int(made[FRAMES_MASK].sum())
            assert content.arrays["input_features"].shape == (1, 16, frames)
            with torch.inference_mode():
                expected = model.model.get_audio_features(made["input_features"], made[FRAMES_MASK]).last_hidden_state
                features, _ = encoder.encode(content)
            np.testing.assert_allclose(features, expected, atol=1e-5)


def test_a_whole_model_is_served_as_its_thinker(tmp_path: Path, saved: Any) -> None:
    _, _, _, asked, answers = saved("Qwen2.5-Omni")
    save_thinker(tmp_path, "Qwen2.5-Omni")
    save_whole(tmp_path, "Qwen2.5-Omni")
    settings = read_settings(tmp_path)
    assert settings.architecture == "Qwen2_5OmniThinkerForConditionalGeneration"
    assert settings.media == ("image", "audio", "video")
    some = slice(3, 8)
    assert serve_pictures(tmp_path, asked[some], **ROOM).answers == answers[some]


def test_a_config_of_a_whole_model_keeps_what_holds_for_all_of_it() -> None:
    inner = {"model_type": "qwen2_5_omni_thinker", "dtype": "float32", "text_config": {}}
    whole = {"model_type": "qwen2_5_omni", "eos_token_id": 5, "torch_dtype": "bfloat16", "thinker_config": inner}
    found = thinker_of(whole)
    assert found["architectures"] == ["Qwen2_5OmniThinkerForConditionalGeneration"]
    assert (found["eos_token_id"], found["torch_dtype"], found["model_type"]) == (5, "bfloat16", inner["model_type"])
    assert thinker_of(inner) is inner
    assert is_thinker(whole)
    assert is_thinker(inner)
    assert not is_thinker({"model_type": "qwen2_5_vl", "audio_start_token_id": 1})


def test_two_ranks_answer_as_one(saved: Any) -> None:
    folder, _, _, asked, answers = saved("Qwen2.5-Omni")
    some = slice(4, 8)
    assert serve_pictures(folder, asked[some], tp=2, overlap_depth=1, **ROOM).answers == answers[some]


def test_media_that_are_not_between_their_tokens_are_refused(saved: Any) -> None:
    folder = saved("Qwen2.5-Omni")[0]
    with LLM(folder, device="cpu") as llm:
        text = llm.text
        made = MediaProcessor(folder, lambda one: text.encode(one, special=False))
    samples = np.zeros(RATE // 2, np.float32)
    between = "<|audio_bos|><|AUDIO|><|audio_eos|>"
    assert made.prompt(f"{between}{between}", [("audio", samples)] * 2).spans
    for wrong in ("a<|AUDIO|>b", "<|vision_start|><|AUDIO|>b", "<|AUDIO|>b", "<|audio_bos|><|AUDIO|>"):
        with pytest.raises(MediaError, match=r"between the tokens of its start \(`audio_start_token_id`"):
            made.prompt(wrong, [("audio", samples)])
    with pytest.raises(MediaError, match="between the tokens of its start"):  # no end of the first one
        made.prompt(f"<|audio_bos|><|AUDIO|>{between}", [("audio", samples)] * 2)


def test_a_config_without_the_start_of_pictures_is_refused_by_name(tmp_path: Path) -> None:
    fields = thinker_fields("Qwen2.5-Omni")
    del fields["vision_start_token_id"]
    config = {"model_type": "qwen2_5_omni_thinker", **fields}
    config |= {"architectures": ["Qwen2_5OmniThinkerForConditionalGeneration"]}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    settings = read_settings(tmp_path)
    assert settings.media == ("audio",)
    assert "pictures with positions of three axes without `vision_start_token_id`" in settings.media_refused


def test_positions_between_whole_numbers_end_the_request(saved: Any) -> None:
    folder = saved("Qwen3-Omni")[0]
    with LLM(folder, device="cpu", **ROOM) as llm:
        prompt: Any = llm.chat_prompt(message(("video", 0)))
        (content,) = prompt.contents
        arrays = {name: one.numpy() for name, one in content.arrays.items()}
        ids = np.frombuffer(content.ids, "<i4").tolist()
        arrays["video_second_per_grid"] = np.array([0.7], np.float32)
        encoder: Any = llm.model.media_encoder
        with pytest.raises(ConfigError, match="the positions of the video are no whole numbers"):
            encoder.encode(content_of(ids, arrays, "video"))


def test_a_clip_longer_than_the_window_is_refused(saved: Any) -> None:
    long = sound_part(sound_file(np.zeros(3 * RATE + 1600, np.float32)))
    with LLM(saved("Qwen2.5-Omni")[0], device="cpu") as llm, pytest.raises(ConfigError, match="takes the first 3 s"):
        llm.chat_prompt([{"role": "user", "content": [long]}])


def test_processors_of_videos_are_those_that_transformers_lists(saved: Any) -> None:
    """Folders of Qwen's that name no processor of videos get the one of transformers' table."""
    import transformers

    auto = Path(transformers.__file__).parent / "models/auto"
    text = "".join((auto / name).read_text() for name in ("auto_mappings.py", "video_processing_auto.py"))
    listed = dict(re.findall(r'\("(\w+)", \{"torchvision": "(\w+VideoProcessor)"', text))
    assert {name: listed[name] for name in OF_MODELS} == OF_MODELS
    if find_spec("torchvision") is None:
        assert isinstance(read_processor(saved("Qwen2.5-Omni")[0]).video_processor, PillowFrames)


def test_frames_have_the_size_that_the_processor_gives() -> None:
    frames = np.zeros((4, 24, 32, 3), np.uint8)
    made = PillowFrames("Qwen2VLVideoProcessor", {"size": {"shortest_edge": 784, "longest_edge": 1568}})
    given = {"shortest_edge": 128 * 28 * 28, "longest_edge": 768 * 28 * 28}
    assert made([frames])["video_grid_thw"].tolist() == [[2, 2, 2]]
    assert made([frames], size=given)["video_grid_thw"].prod() // 2 >= 4 * 128
    assert made([frames])["video_grid_thw"].tolist() == [[2, 2, 2]]
