"""Prompts with audio clips: tokens and hidden states of transformers, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU runtime is not installed")
pytest.importorskip("transformers", reason="the models run by transformers' code")
pytest.importorskip("soundfile", reason="audio clips are decoded by soundfile")
pytest.importorskip("soxr", reason="their sampling rate is changed by soxr")

from lockstep.core.contract.errors import ConfigError  # noqa: E402
from lockstep.host.media.processor import MediaProcessor  # noqa: E402
from lockstep.runtime import LLM, Params  # noqa: E402
from lockstep.runtime.from_transformers.media_encoder import served_kinds  # noqa: E402
from tests.support.architectures import REQUESTS  # noqa: E402
from tests.support.pictures import data_url, picture, serve_pictures  # noqa: E402
from tests.support.sounds import (  # noqa: E402
    CLIPS,
    RATE,
    clip_part,
    greedy_sounds,
    save_sound_family,
    sound_conversations,
    sound_file,
    sound_inputs,
    sound_part,
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The folder of a model with sound, conversations, and transformers' answers to them."""
    folder = tmp_path_factory.mktemp("family")
    model, processor = save_sound_family(folder)
    asked = sound_conversations(REQUESTS)
    return folder, model, processor, asked, greedy_sounds(folder, model, processor, asked)


def test_tokens_are_those_of_transformers(saved: Any) -> None:
    folder, _, _, asked, answers = saved
    assert len(set(map(tuple, answers))) > REQUESTS // 2
    heard = {number for _, numbers, _ in asked for number in numbers}
    assert len(heard) == len(CLIPS)
    served = serve_pictures(folder, asked, overlap_depth=1)
    assert served.answers == answers
    assert served.cached_tokens
    assert served.retractions
    assert served.encoded == len(heard)


def test_little_room_and_a_budget_change_no_token(saved: Any) -> None:
    folder, _, _, asked, answers = saved
    with LLM(folder, device="cpu") as llm:
        prompts = [llm.chat_prompt(messages) for messages, _, _ in asked]
    needed = [sum(one.positions for one in prompt.contents) for prompt in prompts if not isinstance(prompt, list)]
    served = serve_pictures(folder, asked, encoder_cache_tokens=max(needed), encoder_budget_tokens=16)
    assert served.answers == answers
    assert served.encoded > len(CLIPS)  # clips were dropped and encoded again


def hearing(*numbers: int, text: str = "what?") -> list[dict[str, Any]]:
    """One message with clips."""
    return [{"role": "user", "content": [*map(clip_part, numbers), {"type": "text", "text": text}]}]


def test_hidden_states_are_those_of_transformers(saved: Any) -> None:
    """The mean of the hidden states, for each clip, for two in a prompt, and for a clip cached by an answer before."""
    folder, model, processor, _, _ = saved
    heard = [(number,) for number in range(len(CLIPS))] + [(3, 1)]
    asked = [hearing(*numbers) for numbers in heard]
    with LLM(folder, device="cpu", chunked_prefill_size=16, page_size=4, pages=400) as llm:
        prompts = [llm.chat_prompt(one, generation_prompt=False) for one in asked]
        assert llm.generate([prompts[4]], Params(max_new_tokens=2))[0].token_ids
        found = llm.embed(prompts)
    for messages, numbers, prompt, one in zip(asked, heard, prompts, found, strict=True):
        inputs = sound_inputs(folder, processor, messages, numbers, add_generation_prompt=False)
        assert not isinstance(prompt, list)
        assert prompt.ids == inputs["input_ids"][0].tolist()
        with torch.inference_mode():
            states = model.model(**inputs).last_hidden_state[0]
        assert not one.error
        np.testing.assert_allclose(one.vector, states.mean(0), atol=2e-4)


def test_a_clip_is_cached_by_its_content(saved: Any) -> None:
    folder = saved[0]
    with LLM(folder, device="cpu", page_size=4) as llm:
        first, again, other = (llm.chat(hearing(one), Params(max_new_tokens=4))[0] for one in (4, 4, 3))
        assert first.token_ids == again.token_ids
        assert again.cached_tokens > 25
        assert other.cached_tokens < 25
        assert not llm.media.contents  # no request is open


def test_drafts_do_not_change_tokens(saved: Any) -> None:
    folder, _, _, asked, answers = saved
    options = {"speculative_method": "ngram", "num_speculative_tokens": 2, "overlap_depth": 1}
    assert serve_pictures(folder, asked, **options).answers == answers


def test_a_clip_that_cannot_be_encoded_ends_its_request_only(saved: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(saved[0], device="cpu") as llm:
        monkeypatch.setattr(llm.model.base.audio_tower, "forward", lambda *_, **__: 1 / 0)
        failed = llm.chat(hearing(4), Params(max_new_tokens=4))[0]
        assert failed.finish_reason == "media"
        assert "ZeroDivisionError" in failed.error
        assert not llm.chat([{"role": "user", "content": "hello"}], Params(max_new_tokens=4))[0].error
        assert not llm.media.contents


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ([sound_part(b"hello")], r"none of WAV, MP3, FLAC, OGG.*\(medium 0\)"),
        ([clip_part(0), {"type": "input_audio", "input_audio": {"data": "AA=="}}], r"format.*got `None` \(medium 1\)"),
        ([{"type": "input_audio", "input_audio": "AA=="}], "has no `input_audio.data`"),
        ([{"type": "audio_url"}], "an audio clip has no `audio_url.url`"),
        ([{"type": "audio_url", "audio_url": {"url": "http://example.com/a.wav"}}], "fetches no audio clips"),
        ([{"type": "audio_url", "audio_url": {"url": data_url(picture(1))}}], "must begin with data:audio/"),
        ([{"type": "text", "text": "<|AUDIO|>"}, clip_part(1)], "has 1 audio clips, and its text has 2 marks"),
        ([sound_part(sound_file(np.zeros(RATE + 160, np.float32)))], "has 1.0 s, and this model takes the first 1 s"),
        ([sound_part(sound_file(np.zeros(1, np.float32)))], "gives the audio clip no positions"),
        ([{"type": "image_url", "image_url": {"url": data_url(picture(1))}}], "images: .* takes audio clips only"),
    ],
)  # fmt: skip
def test_bad_clips_are_refused(saved: Any, parts: list[dict[str, Any]], why: str) -> None:
    with LLM(saved[0], device="cpu") as llm, pytest.raises(ConfigError, match=why):
        llm.chat_prompt([{"role": "user", "content": parts}])


def test_without_the_packages_a_clip_is_refused_with_the_extra(saved: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.host.media.processor.find_spec", lambda name: None if name == "soxr" else name)
    with LLM(saved[0], device="cpu") as llm, pytest.raises(ConfigError, match=r'soxr is not.*"lockstep-core\[audio\]"'):
        llm.chat_prompt(hearing(1))


def test_two_ranks_answer_as_one(saved: Any) -> None:
    """Each rank has the whole encoder and a part of the decoder."""
    folder, _, _, asked, answers = saved
    some = slice(0, 6)
    served = serve_pictures(folder, asked[some], tp=2, overlap_depth=1)
    assert served.answers == answers[some]
    assert served.encoded == len({number for _, numbers, _ in asked[some] for number in numbers})


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("GraniteSpeech", "sounds need an adapter beside the weights"),
    ],
)
def test_sound_that_would_go_another_way_is_refused_by_name(name: str, why: str) -> None:
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_MAPPING

    config = getattr(transformers, f"{name}Config")()
    kind = getattr(transformers, f"{name}ForConditionalGeneration")
    served, refused = served_kinds(kind, MODEL_MAPPING.get(type(config), kind), config)
    assert "audio" not in served
    assert any(why in one for one in refused)


def test_a_clip_has_the_positions_of_transformers_processor(saved: Any) -> None:
    folder, _, processor, _, _ = saved
    with LLM(folder, device="cpu") as llm:
        text = llm.text
        prepared = MediaProcessor(folder, lambda one: text.encode(one, special=False))
    for seconds in (0.05, 0.3, 0.999, 1.0):
        samples = np.zeros(int(seconds * RATE), np.float32)
        found = prepared.prompt("a<|AUDIO|>b", [("audio", samples)])
        made = processor(text=["a<|AUDIO|>b"], audio=[samples], sampling_rate=RATE, add_special_tokens=False)
        assert found.ids == made["input_ids"][0]
        assert found.spans[0].stop - found.spans[0].start == len(found.ids) - 2
