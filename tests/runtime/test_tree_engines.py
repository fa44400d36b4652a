"""Engines that verify trees of drafts by the kernels of GPUs draw the tokens of an engine without drafts."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the GPU runtime is not installed")
pytest.importorskip("triton", reason="the kernels need Triton")

from lockstep.core.contract.errors import ConfigError  # noqa: E402
from lockstep.runtime import LLM, Params, triton_trial  # noqa: E402
from lockstep.runtime.draft_tree import TreeShape  # noqa: E402
from lockstep.runtime.drafting import DraftingRows  # noqa: E402
from lockstep.runtime.head_drafter import HeadDrafter  # noqa: E402
from lockstep.runtime.llm import demo_folder  # noqa: E402
from tests.support.fake_cuda import DEVICE, FakeCuda  # noqa: E402
from tests.support.flashinfer_wrappers import Wrapper, flashinfer_alone  # noqa: E402
from tests.support.heads import saved_head  # noqa: E402
from tests.support.interpreter import mend_products  # noqa: E402

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
SIZES: dict[str, Any] = {
    "pages": 128, "page_size": 4, "max_running_requests": 4, "context_tokens_max": 128, "warm_up": False,
    "grammar_backend": "none", "radix_cache": False,
}  # fmt: skip
TREE: dict[str, Any] = {"speculative_topk": 3, "num_speculative_tokens": 8, "overlap_depth": 1}
PROMPTS = [[5, 6, 7, 8, 5, 6], list(range(300, 318))]
PARAMS = Params(max_new_tokens=8, ignore_eos=True)


def plain(dtype: str) -> list[list[int]]:
    """The tokens without drafts."""
    with LLM(demo_folder(), device="cpu", attention_backend="reference", dtype=dtype, **SIZES) as llm:
        return [one.token_ids for one in llm.generate(PROMPTS, PARAMS)]


def foreseeing(texts: list[list[int]]) -> Callable[[HeadDrafter, DraftingRows, TreeShape], Any]:
    """A head whose passes run as they are, and whose drafts are then the right tokens on one path of each tree."""
    own = HeadDrafter.draft_tree

    def draft_tree(self: HeadDrafter, rows: DraftingRows, shape: TreeShape) -> Any:
        found = own(self, rows, shape)
        drafts, parents = found.tolist(), shape.parents.tolist()
        for row, (stand, newest) in enumerate(zip(rows.stands.tolist(), rows.newest.tolist(), strict=True)):
            text = next((one for one in texts if one[stand : stand + 1] == [newest]), [])
            number = 0
            for right in text[stand + 1 : stand + 1 + shape.deepest]:
                behind = [draft for draft, parent in enumerate(parents, 1) if parent == number]
                for draft in behind:
                    drafts[row][draft - 1] = (right + draft) % 2048
                if not behind:
                    break
                number = behind[(stand + number) % len(behind)]
                drafts[row][number - 1] = right
        return torch.tensor(drafts).to(found.device)

    return draft_tree


def drafted(head: Path, expected: list[list[int]], patch: pytest.MonkeyPatch, **options: Any) -> list[Any]:
    """Serve with trees. The tokens must be those expected, with many right drafts.

    Returns: what a CPU waited for meanwhile, on a fake device.
    """
    texts = [prompt + tokens for prompt, tokens in zip(PROMPTS, expected, strict=True)]
    patch.setattr(HeadDrafter, "draft_tree", foreseeing(texts))
    gpu: FakeCuda | None = options.pop("gpu", None)
    with LLM(demo_folder(), draft_model=head, **{**SIZES, **TREE, **options}) as llm:
        started = 0 if gpu is None else len(gpu.waits)
        assert [one.token_ids for one in llm.generate(PROMPTS, PARAMS)] == expected
        assert llm.stats().drafts.accepted_length_mean > 1.5
        return [] if gpu is None else gpu.waits[started:]


def test_triton_draws_the_tokens_of_an_engine_without_drafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter, with a chunk of a prompt beside trees."""
    mend_products(monkeypatch)
    options = {"device": "cpu", "attention_backend": "triton", "dtype": "float32", "chunked_prefill_size": 16}
    drafted(saved_head(tmp_path / "head", 2), plain("float32"), monkeypatch, batching="mixed", **options)


def test_flashinfer_draws_the_tokens_of_an_engine_without_drafts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flashinfer_alone(monkeypatch)
    head, expected = saved_head(tmp_path / "head", 2), plain("bfloat16")
    with FakeCuda(interpret=False) as gpu:
        options = {"device": str(DEVICE), "dtype": "bfloat16", "cuda_graph_max_batch": 2, "gpu": gpu}
        waits = drafted(head, expected, monkeypatch, attention_backend="flashinfer", **options)
    assert {one.what for one in waits if one.where.startswith("attention/")} <= {
        "an event is waited for"
    }  # for plans long copied


def test_trees_are_launched_without_a_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are counted and not run, so tokens mean nothing."""
    monkeypatch.setattr(triton_trial, "_tried", lambda index: None)
    head = saved_head(tmp_path / "head", 2)
    options = {"device": str(DEVICE), "dtype": "float32", "cuda_graph_max_batch": 2}
    with FakeCuda(interpret=False) as gpu, LLM(demo_folder(), draft_model=head, **SIZES, **TREE, **options) as llm:
        assert llm.attention_backend == "triton"
        started = len(gpu.waits)
        answers = llm.generate(PROMPTS, PARAMS)
        served = [f"{one.where}: {one.what}" for one in gpu.waits[started:]]
        counts = llm.stats().drafts
    assert [(len(one.token_ids), one.error) for one in answers] == [(8, "")] * 2
    assert counts.drafts > 0
    assert served == []


# ------------------------------------------------------------------------------------------------ choice and refusals


def test_a_flashinfer_whose_masks_are_wrong_is_passed_over_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As a release whose kernel counts where a row's mask begins in elements, or ignores the mask."""
    module: ModuleType = flashinfer_alone(monkeypatch)
    monkeypatch.setattr(triton_trial, "_tried", lambda index: None)
    right = Wrapper._hidden
    monkeypatch.setattr(Wrapper, "_hidden", lambda self, row, new, length: right(self, 0, new, length))
    head = saved_head(tmp_path / "head", 2)
    options = {**SIZES, "device": str(DEVICE), "dtype": "bfloat16", "cuda_graphs": "off"}
    with FakeCuda(interpret=False), caplog.at_level(logging.INFO, "lockstep.runtime"):
        with LLM(demo_folder(), draft_model=head, **options, **TREE) as llm:
            assert llm.attention_backend == "triton"
        with LLM(demo_folder(), draft_model=head, **options) as llm:  # chains need no masks
            assert llm.attention_backend == "flashinfer"
        with pytest.raises(
            ConfigError, match=r"flashinfer cannot run here: a trial with .*, trees of drafts gives wrong"
        ):
            LLM(demo_folder(), draft_model=head, attention_backend="flashinfer", **options, **TREE)
    assert any("triton: flashinfer cannot: a trial with bfloat16" in one for one in caplog.messages), module


def test_invariant_numerics_and_trees_are_one_error(tmp_path: Path) -> None:
    head = saved_head(tmp_path / "head", 1)
    with pytest.raises(
        ConfigError, match="`numerics` is invariant, but with `speculative_topk` 3 sums are in the order"
    ):
        LLM(demo_folder(), device="cpu", attention_backend="reference", draft_model=head, numerics="invariant", **TREE)
