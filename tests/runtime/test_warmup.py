"""The warm-up runs the code of serving, leaves no state behind, and fails where serving would."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the GPU runtime is not installed")

from lockstep.core.contract.commands import BatchPlan  # noqa: E402
from lockstep.core.contract.errors import ConfigError  # noqa: E402
from lockstep.core.journal.replay import replay  # noqa: E402
from lockstep.runtime import LLM, Params  # noqa: E402
from lockstep.runtime.executor import Executor  # noqa: E402
from lockstep.runtime.models import Decoder  # noqa: E402
from lockstep.runtime.sampling import Sampler, reference  # noqa: E402
from lockstep.runtime.warmup import PROMPT_TOKENS  # noqa: E402

SETTINGS: dict[str, Any] = {"page_size": 16, "pages": 200, "chunked_prefill_size": 256, "max_running_requests": 20}
DRAWN = Params(max_new_tokens=6, temperature=1.0, seed=4, frequency_penalty=0.5, ignore_eos=True)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    """Plans launched and steps of sampling taken."""
    found: dict[str, list[Any]] = {"plans": [], "sampling": []}
    launch, sample = Executor.launch, Sampler.sample

    def launching(self: Executor, plan: BatchPlan, **more: Any) -> None:
        found["plans"].append(plan)
        launch(self, plan, **more)

    def sampling(self: Sampler, logits: Any, rows: Any, positions: Any, rows_host: Any, allowed: Any = None) -> Any:
        table = self.table
        flags = {
            "greedy": ~table.sampled,
            "sampled": table.sampled & ~table.limited,
            "limited": table.limited,
            "edited": table.edited,
            "penalised": table.penalised,
            "logprobs": table.logprobs,
        }
        found["sampling"].append((len(rows_host), {name for name, of_row in flags.items() if of_row[rows_host].any()}))
        return sample(self, logits, rows, positions, rows_host, allowed)

    monkeypatch.setattr(Executor, "launch", launching)
    monkeypatch.setattr(Sampler, "sample", sampling)
    return found


def test_every_size_and_every_step_of_sampling_runs(
    seen: dict[str, list[Any]], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO), LLM(warm_up=True, overlap_depth=1, **SETTINGS):
        pass
    plans = seen["plans"]
    alone = {int((plan.stops - plan.starts)[0]) for plan in plans if plan.mode == "extend" and len(plan.rows) == 1}
    assert {*PROMPT_TOKENS, 256} <= alone
    assert {len(plan.rows) for plan in plans if plan.mode == "decode"} >= {1, 3, 16}
    steps = [kinds for samples, kinds in seen["sampling"] if samples == 1]
    for kind in ("greedy", "sampled", "limited", "edited", "penalised", "logprobs"):
        assert any(kind in kinds for kinds in steps), kind
    assert any(len(kinds) == 6 for samples, kinds in seen["sampling"] if samples == 16)
    assert f"warm-up: {len(plans)} batches of 33 requests took " in caplog.text


def test_it_leaves_nothing_behind(seen: dict[str, list[Any]], tmp_path: Path) -> None:
    """Answers, journal and statistics equal those of an engine without warm-up; `debug` checks rows and slots."""
    prompts = [[5, 6, 7], list(range(40)), [9]]
    with LLM(warm_up=False, **SETTINGS) as llm:
        cold = [answer.token_ids for answer in llm.generate(prompts, DRAWN)]
        launched = len(seen["plans"])
    with LLM(warm_up=True, debug=True, journal=tmp_path, **SETTINGS) as llm:
        before = llm.stats()
        warm = [answer.token_ids for answer in llm.generate(prompts, DRAWN)]
        after = llm.stats()
    assert warm == cold
    assert before.batches == before.engine.counts.admitted == before.device.busy_us == 0
    assert after.batches == replay(tmp_path).batches == launched


def test_nothing_runs_first_on_the_cpu_unless_it_is_requested(seen: dict[str, list[Any]]) -> None:
    with LLM(**SETTINGS):
        pass
    assert seen["plans"] == []


def test_a_small_engine_runs_what_fits(seen: dict[str, list[Any]]) -> None:
    with LLM(warm_up=True, page_size=4, pages=8, context_tokens_max=24, max_running_requests=2):
        pass
    assert seen["plans"]
    assert max(int(plan.stops.max()) for plan in seen["plans"]) <= 24


def test_a_kernel_that_cannot_run_is_known_before_the_first_request(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Any, *_: Any) -> Any:
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(Decoder, "logits", fail)
    with pytest.raises(ConfigError) as caught:
        LLM(warm_up=True, **SETTINGS)
    assert str(caught.value).startswith("the warm-up failed: RuntimeError: no kernel image is available\nhint: ")


def test_a_step_that_fails_is_named_and_the_others_are_served(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("out of shared memory")

    monkeypatch.setattr(reference, "penalise_", fail)
    with LLM(warm_up=True, **SETTINGS) as llm:
        (greedy,) = llm.generate([[5, 6]], Params(max_new_tokens=2, ignore_eos=True))
        (penalised,) = llm.generate([[5, 7]], DRAWN)
    assert "of 33 requests failed, and others like them will: RuntimeError: out of shared memory" in caplog.text
    assert greedy.finish_reason == "length"
    assert penalised.error == "RuntimeError: out of shared memory"


@pytest.mark.parametrize("numerics", ["fast", "invariant"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_prompts_of_the_warm_up_use_every_tile_of_an_extend(head_dim: int, dtype: str, numerics: Any) -> None:
    """With any number of query heads per KV head, and any number of new tokens of a request."""
    pytest.importorskip("triton", reason="its kernels need triton")
    from lockstep.runtime.attention.triton_backend import extend_tiling

    for group in range(1, 17):
        tiles = {
            new: extend_tiling(head_dim, getattr(torch, dtype), group, new, numerics) for new in (*range(1, 300), 8192)
        }
        assert set(tiles.values()) == {tiles[new] for new in (*PROMPT_TOKENS, 8192)}
