"""Prompts with pictures: tokens of transformers, and the encoder as the scheduler orders it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU runtime is not installed")
pytest.importorskip("transformers", reason="the models run by transformers' code")
pytest.importorskip("PIL", reason="images are decoded by Pillow")

from lockstep.core.contract.commands import EncodeMedia  # noqa: E402
from lockstep.core.contract.errors import ConfigError  # noqa: E402
from lockstep.core.contract.events import MediaEncoded  # noqa: E402
from lockstep.core.journal.replay import fold  # noqa: E402
from lockstep.host.media.conversation import with_media  # noqa: E402
from lockstep.host.media.processor import read_processor  # noqa: E402
from lockstep.runtime import LLM, Params  # noqa: E402
from lockstep.runtime.from_transformers.media_encoder import LibraryEncoder  # noqa: E402
from lockstep.runtime.media_share import EncoderShare  # noqa: E402
from lockstep.runtime.models import read_settings  # noqa: E402
from tests.support.architectures import REQUESTS  # noqa: E402
from tests.support.pictures import (  # noqa: E402
    FAMILIES,
    conversations,
    data_url,
    greedy_pictures,
    picture,
    save_family,
    serve_pictures,
)
from tests.support.thread_ranks import ranks_as_threads  # noqa: E402

SOME = ("Qwen2.5-VL", "Qwen3-VL", "LLaVA-1.5", "Idefics 3", "Pixtral", "Mistral 3")
"""Three axes of positions, features behind the first layers, one tile, several tiles with tokens between them, rows
with a token behind each, and such rows of merged patches."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that saves a family once, and answers its conversations by transformers."""
    made: dict[str, tuple[Path, Any, list[list[int]]]] = {}

    def save(name: str) -> tuple[Path, Any, list[list[int]]]:
        if name not in made:
            folder = tmp_path_factory.mktemp("family")
            model, processor = save_family(folder, name)
            asked = conversations(REQUESTS, FAMILIES[name].pictures_max)
            made[name] = (folder, asked, greedy_pictures(folder, model, processor, asked))
        return made[name]

    return save


@pytest.mark.parametrize("name", SOME)
def test_tokens_are_those_of_transformers(name: str, saved: Any) -> None:
    folder, asked, answers = saved(name)
    assert len(set(map(tuple, answers))) > REQUESTS // 2
    served = serve_pictures(folder, asked, overlap_depth=1, **FAMILIES[name].settings)
    assert served.answers == answers
    assert served.cached_tokens
    assert served.retractions
    assert served.encoded == len({number for _, numbers, _ in asked for number in numbers})


def test_little_room_and_a_budget_change_no_token(saved: Any) -> None:
    folder, asked, answers = saved("Qwen3-VL")
    with LLM(folder, device="cpu") as llm:
        prompts = [llm.chat_prompt(messages) for messages, _, _ in asked]
    needed = [sum(one.positions for one in prompt.contents) for prompt in prompts if not isinstance(prompt, list)]
    served = serve_pictures(folder, asked, encoder_cache_tokens=max(needed), encoder_budget_tokens=16)
    assert served.answers == answers
    assert served.encoded > 4  # pictures were dropped and encoded again


RANKS: list[tuple[str, dict[str, Any]]] = [
    ("Qwen2.5-VL", {}),
    ("Qwen2.5-VL", {"encoder_data_parallel": False}),
    ("Qwen3-VL MoE", {}),
    ("Qwen3.5 MoE with pictures", {}),
]


@pytest.mark.parametrize(("name", "options"), RANKS, ids=[f"{name} {[*more]}" for name, more in RANKS])
def test_two_ranks_answer_as_one(
    name: str, options: dict[str, Any], saved: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank has a part of the decoder, and the whole encoder; contents that come together are divided."""
    folder, asked, answers = saved(name)
    shared: list[tuple[int, int]] = []  # contents that rank 0 encoded, of how many
    exchange = EncoderShare.exchange

    def watched(share: EncoderShare, digests: Any, owners: Any, own: Any) -> Any:
        shared.append((len(own), len(digests)))
        return exchange(share, digests, owners, own)

    monkeypatch.setattr(EncoderShare, "exchange", watched)
    some = (15, 2, 3, 1, 0)  # the first has three pictures, so that there is a group of at least three
    served = serve_pictures(folder, [asked[number] for number in some], tp=2, overlap_depth=1, **options)
    assert served.answers == [answers[number] for number in some]
    assert served.encoded == len({number for one in some for number in asked[one][1]}) == 4
    if options:
        assert not shared
    else:
        assert sum(of for _, of in shared) == served.encoded
        assert 0 < sum(own for own, _ in shared) < served.encoded


def test_contents_are_divided_or_not_by_an_option_that_needs_an_encoder() -> None:
    with pytest.raises(ConfigError, match=r"`encoder_data_parallel` is off, but Qwen3ForCausalLM here has no encoder"):
        LLM(tp=2, device="cpu", encoder_data_parallel=False)


def test_a_picture_that_a_worker_cannot_encode_ends_its_request_on_all_ranks(saved: Any, tmp_path: Path) -> None:
    """Rank 0 could encode it."""
    folder, asked, answers = saved("Qwen2.5-VL")
    assert len(set(asked[3][1])) == 2, "one picture for each rank"
    with ranks_as_threads(), LLM(folder, tp=2, device="cpu", debug=True) as llm:
        encode, failing = LibraryEncoder.encode, set[bytes]()

        def encode_or_fail(encoder: LibraryEncoder, content: Any) -> Any:
            if encoder is not llm.model.media_encoder:
                failing.add(content.digest)
                raise ZeroDivisionError("planted")
            return encode(encoder, content)

        with pytest.MonkeyPatch.context() as planted:
            planted.setattr(LibraryEncoder, "encode", encode_or_fail)
            failed = llm.chat(asked[3][0], Params(max_new_tokens=4))[0]
        assert failed.finish_reason == "media"
        assert "ZeroDivisionError: planted" in failed.error
        assert failing
        again = llm.chat(asked[3][0], Params(max_new_tokens=asked[3][2], ignore_eos=True))[0]
    assert again.token_ids == answers[3]


def test_drafts_do_not_change_tokens(saved: Any) -> None:
    folder, asked, answers = saved("Qwen3-VL")
    options = {"speculative_method": "ngram", "num_speculative_tokens": 2, "overlap_depth": 1}
    assert serve_pictures(folder, asked, **options).answers == answers


def with_picture(number: int, text: str = "what?") -> list[dict[str, Any]]:
    """One message with one picture."""
    parts = [{"type": "image_url", "image_url": {"url": data_url(picture(number))}}, {"type": "text", "text": text}]
    return [{"role": "user", "content": parts}]


def test_a_journal_has_digests_only_and_replays(saved: Any, tmp_path: Path) -> None:
    folder, _, _ = saved("Qwen3-VL")
    journal = tmp_path / "journal"
    with LLM(folder, device="cpu", journal=journal) as llm:
        first, again = (llm.chat(with_picture(3), Params(max_new_tokens=4, n=2))[0] for _ in range(2))
        assert first.token_ids == again.token_ids == again.others[0].token_ids
        assert again.cached_tokens > 35
        assert not llm.media.contents  # no request is open
    pairs = list(fold(journal))
    assert sum(isinstance(one, EncodeMedia) for _, step in pairs for one in step.commands) == 1
    assert [event.error for event, _ in pairs if isinstance(event, MediaEncoded)] == [""]


def test_new_weights_encode_again(saved: Any) -> None:
    folder, _, _ = saved("Qwen3-VL")
    ordered: list[Any] = []
    with LLM(folder, device="cpu") as llm:
        llm.host.observe = lambda _, step: ordered.extend(one for one in step.commands if isinstance(one, EncodeMedia))
        before = llm.chat(with_picture(3), Params(max_new_tokens=4))[0]
        llm.update_weights(folder)
        after = llm.chat(with_picture(3), Params(max_new_tokens=4))[0]
    assert before.token_ids == after.token_ids
    assert len(ordered) == 2


def test_a_picture_that_cannot_be_encoded_ends_its_request_only(saved: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _, _ = saved("LLaVA-1.5")
    with LLM(folder, device="cpu") as llm:
        monkeypatch.setattr(llm.model.base, "get_image_features", lambda **_: 1 / 0)
        failed = llm.chat(with_picture(3), Params(max_new_tokens=4))[0]
        assert failed.finish_reason == "media"
        assert "ZeroDivisionError" in failed.error
        assert not llm.chat([{"role": "user", "content": "hello"}], Params(max_new_tokens=4))[0].error
        assert not llm.media.contents


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]}],
         "cannot be decoded"),
        ([{"role": "user", "content": "<image>"}], ""),
        ([{"role": "user", "content": [{"type": "text", "text": "<image>"}, *with_picture(1)[0]["content"]]}],
         "has 1 images, and its text has 2 marks"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "has no `image_url.url`"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/hostname"}}]}],
         "reads no files"),
    ],
)  # fmt: skip
def test_bad_pictures_are_refused(saved: Any, messages: list[dict[str, Any]], why: str) -> None:
    folder, _, _ = saved("LLaVA-1.5")
    with LLM(folder, device="cpu") as llm:
        if not why:  # a mark of a picture in text, without one, is text
            assert llm.chat_prompt(messages)
            return
        with pytest.raises(ConfigError, match=why):
            llm.chat_prompt(messages)


def test_several_pictures_of_a_model_that_mixes_them_are_refused(saved: Any) -> None:
    folder, _, _ = saved("LLaVA-OneVision")
    with LLM(folder, device="cpu") as llm:
        assert not llm.chat(with_picture(1), Params(max_new_tokens=2))[0].error
        with pytest.raises(ConfigError, match="takes one image"):
            llm.chat([*with_picture(1), *with_picture(2)])


def test_prompt_logprobs_of_pictures_are_refused(saved: Any) -> None:
    folder, _, _ = saved("LLaVA-1.5")
    with LLM(folder, device="cpu") as llm:
        answer = llm.chat(with_picture(1), Params(max_new_tokens=2, prompt_logprobs=0))[0]
        assert "`prompt_logprobs` are of tokens" in answer.error
        assert len(llm.chat(with_picture(1), Params(max_new_tokens=2, logprobs=1))[0].logprobs) == 2


def test_a_text_model_refuses_pictures_by_name() -> None:
    with LLM(device="cpu") as llm, pytest.raises(ConfigError, match="takes text only"):
        llm.chat(with_picture(1))


def test_a_model_whose_text_the_library_does_not_split_is_refused_by_name(saved: Any) -> None:
    folder, _, _ = saved("Qwen3-VL")
    with pytest.raises(ConfigError, match="no plan to split Qwen3VLForConditionalGeneration over ranks"):
        read_settings(folder, 2, "transformers")


@pytest.mark.parametrize("name", ["Qwen3-VL", "LLaVA-1.5"])
def test_vectors_of_conversations_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """The mean of the hidden states, with a picture cached by an answer before, and beside others."""
    model, processor = save_family(tmp_path, name)
    conversations_ = [with_picture(3), with_picture(5, "which one is it?"), [{"role": "user", "content": "hello"}]]
    with LLM(tmp_path, device="cpu", chunked_prefill_size=16, page_size=4, pages=400) as llm:
        prompts = [llm.chat_prompt(one, generation_prompt=False) for one in conversations_]
        llm.generate([prompts[0]], Params(max_new_tokens=2))
        found = llm.embed(prompts)
        texts = [llm.text.chat(with_media(one)[0], add_generation_prompt=False) for one in conversations_]
    for text, numbers, one in zip(texts, ([3], [5], []), found, strict=True):
        images = [picture(number) for number in numbers] or None
        inputs = processor(text=[text], images=images, return_tensors="pt", add_special_tokens=False)
        if hasattr(model.model, "rope_deltas"):
            model.model.rope_deltas = None
        with torch.inference_mode():
            states = model.model(**inputs).last_hidden_state[0]
        assert not one.error
        np.testing.assert_allclose(one.vector, states.mean(0), atol=2e-4)


@pytest.mark.parametrize("name", ["Pixtral", "Mistral 3"])
def test_states_with_pictures_of_five_shapes_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model, processor = save_family(tmp_path, name)
    asked = [with_picture(number) for number in range(5)]
    with LLM(tmp_path, device="cpu", chunked_prefill_size=16, page_size=4, pages=600) as llm:
        prompts: list[Any] = [llm.chat_prompt(one, generation_prompt=False) for one in asked]
        found = llm.embed(prompts)
    for number, (prompt, one) in enumerate(zip(prompts, found, strict=True)):
        inputs = processor(text=[prompt.text.replace(mark_of(prompt), "[IMG]")], images=[picture(number)],
                           return_tensors="pt", add_special_tokens=False)  # fmt: skip
        assert prompt.ids == inputs["input_ids"][0].tolist()
        with torch.inference_mode():
            states = model.model(**inputs).last_hidden_state[0]
        np.testing.assert_allclose(one.vector, states.mean(0), atol=2e-4)


def mark_of(prompt: Any) -> str:
    """Return the text of the only picture of Pixtral's in a prompt."""
    text: str = prompt.text
    end = "[IMG_END]"
    return text[text.index("[IMG]") : text.index(end) + len(end)]


def test_the_processor_of_pixtral_leaves_no_stand_in_for_modules_of_transformers(tmp_path: Path) -> None:
    save_family(tmp_path, "Pixtral")
    assert isinstance(
        read_processor(tmp_path), sys.modules["transformers.models.pixtral.processing_pixtral"].PixtralProcessor
    )
    found = sys.modules.get("transformers.models.pixtral.image_processing_pixtral")
    assert found is None or found.__name__.endswith("image_processing_pixtral")


def test_pixels_of_pixtral_are_those_of_transformers_with_torchvision() -> None:
    """Pillow rounds and clips a pixel after each direction, torchvision after both; noise is the worst case."""
    pytest.importorskip("torchvision", reason="transformers' processor of Pixtral needs it")
    from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
    from transformers.models.pixtral.image_processing_pixtral import PixtralImageProcessor

    for edge, patch in ((48, 4), (1024, 16), (1540, 28)):
        settings: Any = {"size": {"longest_edge": edge}, "patch_size": {"height": patch, "width": patch}}
        own, expected = PixtralImageProcessorPil(**settings), PixtralImageProcessor(**settings)
        for number in range(5):
            found, made = (one([picture(number)], return_tensors="np") for one in (own, expected))
            assert found["image_sizes"].tolist() == made["image_sizes"].tolist()
            apart = np.abs(np.asarray(found["pixel_values"]) - made["pixel_values"]) * 255 * max(own.image_std)
            assert apart.mean() < 0.5
            assert np.quantile(apart, 0.97) < 2.01
