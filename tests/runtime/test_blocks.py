"""A model that answers in blocks, on a CPU: its tokens are those of a plain loop over transformers' layers."""

from __future__ import annotations

import random
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file  # noqa: E402

from lockstep.core.contract.errors import ConfigError  # noqa: E402
from lockstep.runtime import LLM, Params  # noqa: E402
from lockstep.runtime.attention import Needs, choose  # noqa: E402
from lockstep.runtime.attention.rules import BLOCKS  # noqa: E402
from lockstep.runtime.models import build_model  # noqa: E402
from tests.support.small_llm import write_weights  # noqa: E402
from tests.support.small_runtime import SMALL_QWEN3  # noqa: E402

BLOCK, MASK, THRESHOLD = 4, 299, 0.95
SMALL_SDAR: dict[str, Any] = SMALL_QWEN3 | {
    "architectures": ["SDARForCausalLM"],
    "model_type": "sdar",
    "block_size": BLOCK,
    "mask_token_id": MASK,
}
SETTINGS: dict[str, Any] = {
    "page_size": 8,
    "pages": 20,
    "chunked_prefill_size": 16,
    "max_running_requests": 12,
    "reserve": "on_demand",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_weights(tmp_path_factory.mktemp("sdar"), SMALL_SDAR)
    tensors = load_file(path / "model.safetensors")
    tensors["lm_head.weight"] *= 6  # so that the model is sure of some tokens, and not of others
    save_file(tensors, path / "model.safetensors")
    return path


@pytest.fixture(scope="module")
def plain(folder: Path) -> Any:
    """The same layers by transformers, without blocks: each pass is given a mask."""
    config = transformers.Qwen3Config(**{key: SMALL_SDAR[key] for key in SMALL_QWEN3 if key != "architectures"})
    config._attn_implementation = "eager"
    model = transformers.Qwen3ForCausalLM(config)
    model.load_state_dict(load_file(folder / "model.safetensors"), strict=True)
    return model.float().eval()


class Plain:
    """A request alone, every pass over all tokens."""

    def __init__(self, model: Any, threshold: float = THRESHOLD) -> None:
        self.model, self.threshold, self.passes, self.masks = model, threshold, 0, 0
        self.logits = lru_cache(maxsize=None)(self._logits)

    def _logits(self, tokens: tuple[int, ...]) -> Any:
        at = torch.arange(len(tokens))
        seen = at[None, :] // BLOCK <= at[:, None] // BLOCK
        mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
        with torch.no_grad():
            found = self.model(torch.tensor([tokens]), attention_mask=mask[None, None]).logits[0]
        found[:, MASK] = -torch.inf
        return found

    def answer(self, prompt: list[int], count: int, stops: tuple[int, ...] = ()) -> list[int]:
        tokens = list(prompt)
        while len(tokens) < len(prompt) + count:
            start = len(tokens) // BLOCK * BLOCK
            block: list[int | None] = [*tokens[start:], *[None] * (start + BLOCK - len(tokens))]
            self.masks += block.count(None)
            while None in block:
                fed = tuple(MASK if token is None else token for token in block)
                chances, drawn = self.logits((*tokens[:start], *fed))[start:].softmax(1).max(1)
                self.passes += 1
                masks = [i for i, token in enumerate(block) if token is None]
                likeliest = max(masks, key=lambda i: float(chances[i]))
                for i in masks:
                    if float(chances[i]) > self.threshold or i == likeliest:
                        block[i] = int(drawn[i])
            tokens = [*tokens[:start], *(token for token in block if token is not None)]
            ended = [i for i in range(len(prompt), len(tokens)) if tokens[i] in stops]
            if ended:
                return tokens[len(prompt) : ended[0] + 1][:count]
        return tokens[len(prompt) : len(prompt) + count]


def asked_of(count: int) -> list[tuple[list[int], Params]]:
    """Prompts of which many share a beginning, of any length within a block, with answers of up to six blocks."""
    rng = random.Random(11)
    beginnings = [[rng.randrange(3, MASK) for _ in range(rng.randrange(40))] for _ in range(5)]
    return [
        (
            rng.choice(beginnings) + [rng.randrange(3, MASK) for _ in range(rng.randrange(1, 20))],
            Params(max_new_tokens=rng.randrange(1, 24), ignore_eos=number % 2 == 0),
        )
        for number in range(count)
    ]


def test_200_requests_equal_a_plain_loop_over_all_tokens(folder: Path, plain: Any) -> None:
    """With shared prefixes, chunks, retractions, and streams that are closed within their answers."""
    asked, reference = asked_of(200), Plain(plain)
    with LLM(folder, **SETTINGS) as llm:
        pending = [llm.ask(prompt, params) for prompt, params in asked]
        for prompt, _ in asked[:8]:
            stream = llm.stream(prompt, Params(max_new_tokens=40, ignore_eos=True))
            first = next(stream).token_ids
            stream.close()
            assert first == reference.answer(prompt, len(first))
        found = [llm.wait(one).token_ids for one in pending]
        counts = llm.stats().engine.counts
    for (prompt, params), tokens in zip(asked, found, strict=True):
        stops = () if params.ignore_eos else (SMALL_SDAR["eos_token_id"],)
        assert tokens == reference.answer(prompt, params.max_new_tokens, stops), prompt
    assert counts.cached_tokens > 0
    assert counts.retractions > 0
    assert counts.finished["cancelled"] == 8
    # Some passes replaced several masks, and some only the likeliest.
    assert reference.masks > reference.passes > reference.masks / BLOCK


@pytest.mark.parametrize(("threshold", "passes"), [(0.0, 2), (1.0, BLOCK + 1), (0.3, None)])
def test_the_threshold_decides_how_many_tokens_stay(
    folder: Path, plain: Any, threshold: float, passes: int | None
) -> None:
    prompt = [5, 6, 7, 8]
    with LLM(folder, diffusion_threshold=threshold, **SETTINGS) as llm:
        (found,) = llm.generate([prompt], Params(max_new_tokens=4 * BLOCK, ignore_eos=True))
        launches = llm.stats().engine.launches - 1  # without the prompt
    reference = Plain(plain, threshold)
    assert found.token_ids == reference.answer(prompt, 4 * BLOCK)
    assert launches == reference.passes + 4  # and one for the KV of each block
    if passes is not None:
        assert launches == 4 * passes


def test_draws_of_a_request_are_its_own(folder: Path) -> None:
    """By seed and position: with other requests beside it, and alone."""
    asked = [(prompt, Params(max_new_tokens=12, temperature=1.0, seed=3)) for prompt, _ in asked_of(6)]
    with LLM(folder, **SETTINGS) as llm:
        together = [one.token_ids for one in llm.generate([one for one, _ in asked], [params for _, params in asked])]
        alone = [llm.generate([prompt], params)[0].token_ids for prompt, params in asked]
        greedy = llm.generate([asked[0][0]], Params(max_new_tokens=12))[0].token_ids
    assert together == alone
    assert together[0] != greedy
    assert all(MASK not in tokens for tokens in together)


def test_settings_follow_from_the_model(folder: Path) -> None:
    with LLM(folder, pages=40) as llm:
        assert llm.config.block_tokens == BLOCK
        assert (llm.config.overlap_depth, llm.config.batching, llm.config.page_size) == (0, "prefill_first", 16)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"overlap_depth": 1}, "`overlap_depth` is 1, but `diffusion` is set"),
        ({"speculative_method": "ngram"}, "`speculative_method` is ngram, but `diffusion` is set"),
        ({"page_size": 2}, "`page_size` must be a multiple of `diffusion.block_tokens` 4, got `2`"),
        ({"max_loras": 2}, "`max_loras` is 2, but SDARForCausalLM answers in blocks"),
        ({"diffusion_threshold": 1.5}, "`diffusion_threshold` must be from 0 (every token stays) to 1, got `1.5`"),
        ({"debug": True}, "`debug` is on, but SDARForCausalLM answers in blocks"),
    ],
    ids=str,
)
def test_options_that_do_not_go_with_blocks_are_refused_by_name(
    folder: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        LLM(folder, **{"pages": 40, **options}).start()
    assert message in str(refused.value)


def test_a_threshold_without_blocks_is_refused(tmp_path: Path) -> None:
    write_weights(tmp_path, SMALL_QWEN3)
    with pytest.raises(ConfigError, match="but Qwen3ForCausalLM does not answer in blocks"):
        LLM(tmp_path, pages=40, diffusion_threshold=0.5).start()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 6}, "`block_size` must be a power of two of at least 2, got 6"),
        ({"block_size": None}, "`block_size`"),
        ({"mask_token_id": 300}, "`mask_token_id` must be below `vocab_size` 300, got 300"),
    ],
    ids=str,
)
def test_a_config_without_blocks_is_one_error(changes: dict[str, Any], message: str) -> None:
    config = {name: value for name, value in (SMALL_SDAR | changes).items() if value is not None}
    with pytest.raises(ConfigError) as refused:
        build_model(config, random_weights_seed=0)
    assert message in str(refused.value)


@pytest.mark.parametrize("params", [{"repetition_penalty": 1.2}, {"logprobs": 1}, {"logprobs": 0}], ids=str)
def test_requests_that_need_single_tokens_are_refused(folder: Path, params: dict[str, Any]) -> None:
    with LLM(folder, **SETTINGS) as llm:
        (answer,) = llm.generate([[5, 6, 7]], Params(max_new_tokens=4, **params))
    assert answer.finish_reason == "unsupported"
    assert "is not supported by a model that answers in blocks" in answer.error


def test_backends_without_a_mask_by_block_are_refused() -> None:
    needs = Needs(torch.device("cpu"), torch.float32, 16, 8, special=(BLOCKS,))
    assert choose("auto", needs).name == "cpu"
    for name in ("triton", "flashinfer"):
        with pytest.raises(ConfigError, match="in both directions"):
            choose(name, needs)


def test_the_backend_of_a_cpu_equals_the_reference(folder: Path) -> None:
    found = []
    for backend in ("cpu", "reference"):
        with LLM(folder, attention_backend=backend, **SETTINGS) as llm:
            outputs = llm.generate([prompt for prompt, _ in asked_of(10)], [params for _, params in asked_of(10)])
            found.append([one.token_ids for one in outputs])
    assert found[0] == found[1]
