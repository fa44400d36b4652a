"""MTP layers of models that transformers' code runs: drafts of transformers' own layer, and answers without drafts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the GPU runtime is not installed")
pytest.importorskip("transformers", reason="the models run by transformers' code")
pytest.importorskip("PIL", reason="images are decoded by Pillow")

from lockstep.core.contract.errors import ConfigError  # noqa: E402
from lockstep.host.media.conversation import with_media  # noqa: E402
from lockstep.host.text import Text  # noqa: E402
from lockstep.runtime import LLM, Params  # noqa: E402
from tests.support.adapters import write_for  # noqa: E402
from tests.support.architectures import (  # noqa: E402
    REQUESTS,
    STIRRED,
    TRACK_INTERVAL,
    greedy_answers,
    mixed_prompts,
    save_architecture,
)
from tests.support.mtp import DirectDrafts, DraftRecorder, TorchMtp, add_mtp, add_tensors, stored_mtp  # noqa: E402
from tests.support.pictures import conversations, greedy_pictures, picture, save_family  # noqa: E402

DRAFTS: dict[str, Any] = {"speculative_method": "mtp", "num_speculative_tokens": 3}
SETTINGS: dict[str, Any] = {
    **STIRRED, **DRAFTS, "pages": 400, "debug": True, "device": "cpu", "mamba_track_interval": TRACK_INTERVAL,
}  # fmt: skip
SCENE = "Qwen3.5 MoE with pictures"


def compare(recorder: DraftRecorder, direct: Mapping[int, Callable[[], DirectDrafts]]) -> int:
    """Compare recorded drafts with those computed directly; `direct`: by request. Returns how many were compared."""
    compared, known = 0, {request: make() for request, make in direct.items()}
    for request, stand, newest, drafts in recorder.found:
        computed = known[request]
        if stand < computed.ids.shape[1]:  # otherwise of a batch that was launched before the end was known
            assert int(computed.ids[0, stand]) == newest
            assert drafts == computed.drafts(stand, len(drafts)), f"request {request}, position {stand}"
            compared += len(drafts)
    return compared


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ...]:
    """A model with pictures and its folder, and conversations with the answers of transformers."""
    folder = tmp_path_factory.mktemp("seeing")
    model, processor = save_family(folder, SCENE)
    layer = TorchMtp(model)
    add_mtp(folder, layer, by_expert=False)
    asked = conversations(REQUESTS, 3)
    return folder, model, processor, layer, asked, greedy_pictures(folder, model, processor, asked)


@pytest.mark.parametrize("depth", [0, 1])
def test_drafts_with_pictures_are_those_of_the_librarys_layer(seeing: tuple[Any, ...], depth: int) -> None:
    """With chunks that end in pictures, prefixes with pictures from the cache, retractions, and wrong drafts."""
    folder, model, processor, layer, asked, greedy = seeing
    with LLM(folder, **SETTINGS, overlap_depth=depth) as llm:
        recorder = DraftRecorder(llm.host.executor)
        params = [Params(max_new_tokens=count, ignore_eos=True) for _, _, count in asked]
        answers = llm.chat([messages for messages, _, _ in asked], params)
        counts = llm.stats().drafts
    assert [answer.token_ids for answer in answers] == greedy
    assert sum(answer.cached_tokens for answer in answers)

    def direct(number: int) -> DirectDrafts:
        messages, numbers, _ = asked[number]
        text, images = Text(folder).chat(with_media(messages)[0]), [picture(one) for one in numbers]
        inputs = processor(text=[text], images=images or None, return_tensors="pt", add_special_tokens=False)
        return DirectDrafts(model, layer, inputs, answers[number].token_ids)

    assert compare(recorder, {number: lambda number=number: direct(number) for number in range(REQUESTS)}) > 100
    assert counts.drafts > counts.right


@pytest.mark.parametrize("name", ["Qwen3-Next", "Qwen3.5", "Qwen3.5 MoE"])
def test_drafts_behind_text_are_those_of_the_librarys_layer(name: str, tmp_path: Path) -> None:
    """With experts stored one by one, and with a dense layer."""
    model = save_architecture(tmp_path, name)
    layer = TorchMtp(model)
    add_mtp(tmp_path, layer, by_expert=True)
    prompts, counts = zip(*mixed_prompts(), strict=True)
    with LLM(tmp_path, **SETTINGS, overlap_depth=1) as llm:
        recorder = DraftRecorder(llm.host.executor)
        answers = llm.generate(prompts, [Params(max_new_tokens=count) for count in counts])
    assert [answer.token_ids for answer in answers] == greedy_answers(model)

    def direct(number: int) -> DirectDrafts:
        return DirectDrafts(model, layer, {"input_ids": torch.tensor([prompts[number]])}, answers[number].token_ids)

    assert compare(recorder, {number: lambda number=number: direct(number) for number in range(REQUESTS)}) > 100


def test_drafts_of_a_row_on_an_adapter_follow_from_the_adapted_model(tmp_path: Path) -> None:
    model = save_architecture(tmp_path / "model", "Qwen3.5")
    layer = TorchMtp(model)
    add_mtp(tmp_path / "model", layer, by_expert=True)
    linear = {
        name: one for name, one in model.named_modules() if isinstance(one, torch.nn.Linear) and name != "lm_head"
    }
    write_for(tmp_path / "all", linear)
    merge = write_for(tmp_path / "law", {name: one for name, one in linear.items() if ".linear_attn." not in name})
    requests = [(prompt, 8) for prompt, _ in mixed_prompts()[:6]]
    prompts, counts = zip(*requests, strict=True)
    with LLM(tmp_path / "model", lora={"law": tmp_path / "law"}, max_loras=2, **SETTINGS) as llm:
        recorder = DraftRecorder(llm.host.executor)
        each = [Params(max_new_tokens=count, ignore_eos=True, adapter="law") for count in counts]
        alone = Params(max_new_tokens=8, ignore_eos=True)
        answers = llm.generate([*prompts, prompts[0]], [*each, alone])
        with pytest.raises(ConfigError, match=r"linear_attn.*not of a matrix that adapters may change here"):
            llm.load_adapter("all", tmp_path / "all")
    merge()
    model.generation_config.eos_token_id = None
    assert [answer.token_ids for answer in answers[:6]] == greedy_answers(model, requests)
    assert answers[6].token_ids != answers[0].token_ids

    def direct(number: int) -> DirectDrafts:
        inputs = {"input_ids": torch.tensor([prompts[number]])}
        return DirectDrafts(model, layer, inputs, answers[number].token_ids)

    recorder.found = [one for one in recorder.found if one[0] < 6]
    assert compare(recorder, {number: lambda number=number: direct(number) for number in range(6)}) > 30


def test_random_weights_draft_and_change_no_token(tmp_path: Path) -> None:
    """Weights that are drawn from a seed need no tensors of a checkpoint."""
    save_architecture(tmp_path, "Qwen3.5")
    prompts, _ = zip(*mixed_prompts()[:4], strict=True)
    answers = []
    for drafts in ({}, DRAFTS):
        with LLM(tmp_path, random_weights=5, device="cpu", mamba_track_interval=16, **drafts) as llm:
            answers.append([one.token_ids for one in llm.generate(prompts, Params(max_new_tokens=9, ignore_eos=True))])
            counts = llm.stats().drafts
    assert answers[0] == answers[1]
    assert counts.drafts


def test_layers_that_cannot_draft_are_one_error(tmp_path: Path) -> None:
    model = save_architecture(tmp_path / "delta", "Qwen3.5")
    with pytest.raises(ConfigError, match=r"mtp.fc.weight: missing"):
        LLM(tmp_path / "delta", device="cpu", **DRAFTS)
    layer = TorchMtp(model)
    tensors = stored_mtp(layer, by_expert=False)
    strange = {**tensors, "mtp.layers.1.self_attn.q_proj.weight": torch.zeros(3)}
    del strange["mtp.layers.0.mlp.up_proj.weight"]
    add_tensors(tmp_path / "delta", strange)
    with pytest.raises(ConfigError, match="cannot be loaded, 2 problems") as raised:
        LLM(tmp_path / "delta", device="cpu", **DRAFTS)
    assert "mtp.layers.0.mlp.up_proj.weight: missing" in str(raised.value)
    assert "mtp.layers.1.self_attn.q_proj.weight: not a tensor of this model" in str(raised.value)
    add_tensors(tmp_path / "delta", tensors)
    for settings, why in (
        ({"tp": 2}, "2 processes run the model: its layer is not split"),
        ({"speculative_topk": 2}, "rows keep the pages of refused branches; this is not supported with `hybrid`"),
        ({"speculative_method": "eagle", "draft_model": tmp_path / "delta"}, "heads of EAGLE-3 read layers"),
    ):
        with pytest.raises(ConfigError, match=why):
            LLM(tmp_path / "delta", device="cpu", mamba_track_interval=16, **{**DRAFTS, **settings})
    save_architecture(tmp_path / "plain", "OLMo")
    with pytest.raises(ConfigError, match="no layer of OlmoForCausalLM is known to be of the kind of an MTP layer"):
        LLM(tmp_path / "plain", device="cpu", **DRAFTS)
