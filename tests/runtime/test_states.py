"""Layers that keep a state: slots, checkpoints and copies of the plans, executed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU runtime is not installed")
pytest.importorskip("transformers", reason="models with states run by transformers' code")

from lockstep.core.contract.commands import BatchPlan, HybridChanges  # noqa: E402
from lockstep.core.contract.errors import ConfigError  # noqa: E402
from lockstep.runtime import LLM  # noqa: E402
from lockstep.runtime.errors import PlanError  # noqa: E402
from lockstep.runtime.from_transformers.mixers import RowStates  # noqa: E402
from lockstep.runtime.models import build_model  # noqa: E402
from lockstep.runtime.states import slots as slots_module  # noqa: E402
from lockstep.runtime.states.pool import StatePart, StateTensors, slot_bytes_of  # noqa: E402
from lockstep.runtime.states.slots import RowSlots  # noqa: E402
from lockstep.runtime.tables import ForwardPass, passes_of  # noqa: E402
from tests.support.architectures import (  # noqa: E402
    HYBRIDS,
    STIRRED,
    TRACK_INTERVAL,
    greedy_answers,
    save_architecture,
    serve,
)
from tests.support.model_passes import Passes  # noqa: E402

CPU = torch.device("cpu")
KV_BYTES = 2 * 4 * 2 * 8 * 4  # of a page of LFM2's one layer with attention: keys and values, 4 tokens, 2 heads of 8


@pytest.fixture(scope="module", params=HYBRIDS)
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    folder = tmp_path_factory.mktemp("model")
    return folder, greedy_answers(save_architecture(folder, request.param))


@pytest.fixture(scope="module")
def lfm(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """The smallest of the architectures: two short convolutions around a layer with attention."""
    folder = tmp_path_factory.mktemp("model")
    return folder, greedy_answers(save_architecture(folder, "LFM2"))


def test_tokens_are_those_of_transformers(reference: tuple[Path, list[list[int]]]) -> None:
    """With chunks, prefixes that continue from checkpoints, retractions, and the tags of all slots that are read."""
    folder, answers = reference
    served = serve(folder, overlap_depth=1, mamba_track_interval=TRACK_INTERVAL)
    assert served.answers == answers
    assert served.cached_tokens
    assert served.retractions


@pytest.mark.parametrize(
    "options",
    [
        {"overlap_depth": 0},
        {"overlap_depth": 2, "same_step_sharing": True},
        {"overlap_depth": 1, "decode_steps_per_launch": 3},
        {"overlap_depth": 0, "speculative_method": "ngram", "num_speculative_tokens": 2},
        {"overlap_depth": 1, "speculative_method": "ngram", "num_speculative_tokens": 3},
        {"overlap_depth": 1, "max_mamba_cache_size": 13},
    ],
    ids=["", "sharing", "steps", "drafts", "drafts in overlap", "one checkpoint"],
)
def test_tokens_with_other_features(lfm: tuple[Path, list[list[int]]], options: dict[str, Any]) -> None:
    folder, answers = lfm
    served = serve(folder, mamba_track_interval=TRACK_INTERVAL, **options)
    assert served.answers == answers
    assert served.cached_tokens
    assert served.retractions


def test_with_few_slots_requests_wait(lfm: tuple[Path, list[list[int]]]) -> None:
    """Four of twelve requests run at once, and no slot is left for a checkpoint."""
    folder, answers = lfm
    assert serve(folder, mamba_track_interval=TRACK_INTERVAL, max_mamba_cache_size=4).answers == answers


@pytest.mark.parametrize("name", ["Jamba", "LFM2", "Qwen3.5 MoE"])
def test_chunks_of_any_length_leave_the_same_logits(name: str, tmp_path: Path) -> None:
    """Rows of several lengths in a pass, each continued from its state."""
    model = save_architecture(tmp_path, name)
    passes = Passes(build_model(tmp_path, torch.float32, backend="transformers"))
    tokens = [[3 + (number * (row + 2)) % 90 for number in range(20)] for row in range(3)]
    found: dict[int, list[Any]] = {0: [], 1: [], 2: []}
    for chunk in ({0: (0, 7), 1: (0, 9), 2: (0, 1)}, {0: (7, 8), 2: (1, 14), 1: (9, 12)}, {1: (12, 20), 0: (8, 20)}):
        ran = passes.run({row: tokens[row][start:stop] for row, (start, stop) in chunk.items()})
        for row, logits in ran.items():
            found[row].append(logits)
    for row, parts in found.items():
        got = torch.cat(parts)
        with torch.inference_mode():
            want = model(torch.tensor([tokens[row][: len(got)]]), use_cache=False).logits[0]
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("what", ["slot", "copy", "zeros"])
def test_a_wrong_state_shows_in_the_canary(
    what: str, lfm: tuple[Path, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rows in one slot, a copy of another checkpoint, a slot that is not cleared."""
    right = RowSlots.take_in

    def wrong(self: RowSlots, plan: BatchPlan) -> slots_module.PlannedStates:
        planned = right(self, plan)
        nothing = np.empty(0, np.int64)
        if what == "slot":
            planned.slots[plan.rows] = planned.slots[plan.rows[0]]
        elif what == "zeros":
            planned = replace(planned, cleared=nothing)
        else:
            planned = replace(planned, sources=(planned.sources + 1) % self.pool.slots)
        return planned

    monkeypatch.setattr(RowSlots, "take_in", wrong)
    with pytest.raises(Exception, match="begins with a state which is not that of its tokens"):
        serve(lfm[0], mamba_track_interval=TRACK_INTERVAL)


# ------------------------------------------------------------------------------------------------ sizes and settings


def test_slots_and_pages_share_memory(lfm: tuple[Path, list[list[int]]]) -> None:
    folder, _ = lfm
    ratio = 0.01  # with `pages` given there is a slot for each request all the same, and one more
    with LLM(folder, **STIRRED, mamba_track_interval=16, mamba_full_memory_ratio=ratio) as llm:
        hybrid, pool = llm.config.hybrid, llm._live.pool
        assert (hybrid.state_slots, hybrid.checkpoint_tokens) == (STIRRED["max_running_requests"] + 1, 16)
        assert len(pool.keys) == 1  # of three layers, only one attends
        assert pool.states.slots == hybrid.state_slots
        slot_bytes = slot_bytes_of(pool.states.parts)
        assert slot_bytes == 2 * 32 * 3 * 4  # two layers, 32 channels, a kernel of three inputs
    with LLM(folder, page_size=4, mamba_full_memory_ratio=0.5) as llm:
        pages, slots = llm.config.pages, llm.config.hybrid.state_slots
        assert slots == int(pages * KV_BYTES * 0.5 / slot_bytes)
        assert (pages + 1) * KV_BYTES + slots * slot_bytes <= 256 << 20
        assert (pages + 3) * KV_BYTES * 1.5 > 256 << 20


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"mamba_track_interval": 6}, "`mamba_track_interval` must be a multiple of `page_size` 4, got `6`"),
        ({"mamba_full_memory_ratio": 0.0}, "`mamba_full_memory_ratio` must be above 0, got `0.0`"),
        ({"max_mamba_cache_size": 1}, "`max_mamba_cache_size` must be at least 2"),
        ({"swa_full_tokens_ratio": 0.5}, "Lfm2ForCausalLM has no sliding windows"),
        ({"cuda_graphs": "eager"}, "`cuda_graphs` is eager, but layers of Lfm2ForCausalLM keep states"),
    ],
)
def test_settings_that_do_not_fit_states_are_refused(
    options: dict[str, Any], why: str, lfm: tuple[Path, list[list[int]]]
) -> None:
    with pytest.raises(ConfigError, match=why):
        LLM(lfm[0], page_size=4, **options)


def test_a_draft_model_with_states_is_refused(lfm: tuple[Path, list[list[int]]], tmp_path: Path) -> None:
    save_architecture(tmp_path, "Llama")
    with pytest.raises(ConfigError, match="`draft_model` is a Lfm2ForCausalLM, whose layers keep states"):
        LLM(tmp_path, speculative_method="draft_model", draft_model=str(lfm[0]))


def test_memory_that_was_given_back_holds_no_states(lfm: tuple[Path, list[list[int]]]) -> None:
    folder, answers = lfm
    from lockstep.runtime import Params
    from tests.support.architectures import mixed_prompts

    prompts, counts = zip(*mixed_prompts()[:4], strict=True)
    params = [Params(max_new_tokens=count) for count in counts]
    with LLM(folder, **STIRRED, debug=True, mamba_track_interval=TRACK_INTERVAL) as llm:
        first = [answer.token_ids for answer in llm.generate(prompts, params)]
        llm.release_memory()
        assert all(not one.untyped_storage().size() for one in llm._live.pool.states.tensors.values())
        llm.resume_memory()
        again = [answer.token_ids for answer in llm.generate(prompts, params)]
    assert first == again == answers[:4]


# ------------------------------------------------------------------------------------------------------------ the parts


def test_convolution_states_are_the_last_inputs() -> None:
    states = RowStates({})
    first = states.update_conv_state(torch.ones(1, 2, 2), 0, conv_kernel_size=4)
    assert first.shape == (1, 2, 4)  # padded in front
    joined = states.update_conv_state(torch.full((1, 2, 1), 5.0), 0, conv_kernel_size=4)
    assert joined[0, 0].tolist() == [0, 0, 1, 1, 5]
    kept = states.get_conv_state(0)
    assert kept is not None
    assert kept[0, 0].tolist() == [0, 1, 1, 5]


def slots_of(rows: int, by_row: int = 1) -> RowSlots:
    return RowSlots(StateTensors([StatePart(0, "conv", 0, (1,), torch.float32)], 6, CPU), rows, by_row, CPU)


def plan_of(**changes: Any) -> BatchPlan:
    """Two extends of 5 and 3 tokens, and a decode."""
    columns = {name: np.array(column, np.int32) for name, column in changes.items()}
    numbers = (np.array(column, np.int32) for column in ((0, 1, 2), (0, 4, 9), (5, 7, 10)))
    rows, starts, stops = numbers
    return BatchPlan(
        batch_id=3, mode="mixed", rows=rows, request_ids=rows.astype(np.int64), starts=starts, stops=stops,
        extend_rows=2, token_ids=np.zeros(8, np.int32), sample_rows=rows, hybrid=HybridChanges(**columns),
    )  # fmt: skip


def test_tokens_of_equal_length_are_grouped_and_cut_at_checkpoints() -> None:
    slots = slots_of(3)
    plan = plan_of(
        state_rows=[0, 1, 2], state_slots=[5, 4, 3], state_sources=[-1, 2, -1],
        checkpoint_index=[0, 1], checkpoint_positions=[4, 7], checkpoint_slots=[0, 1],
    )  # fmt: skip
    planned = slots.take_in(plan)
    upload = torch.from_numpy
    slots.pool.tensors[0, "conv", 0].copy_(torch.arange(6.0)[:, None])
    slots.fold(planned, upload)
    assert slots.pool.tensors[0, "conv", 0][:, 0].tolist() == [0, 1, 2, 0, 2, 0]  # 5 and 3 cleared, 2 copied to 4
    (one,) = passes_of(plan)
    view = slots.view(planned, one, tensors=None, upload=upload)  # type: ignore[arg-type]
    assert view.begins.tolist() == [5, 4, 3]
    found = [
        (group.length, group.tokens.tolist(), group.reads.tolist(), group.writes.tolist(), group.fresh,
         None if group.kept_in is None else group.kept_in.tolist())
        for group in view.groups
    ]  # fmt: skip
    assert found == [
        (1, [8], [3], [3], False, None),
        (3, [5, 6, 7], [4], [4], False, [1]),  # its checkpoint is behind its last token
        (4, [0, 1, 2, 3], [5], [5], True, [0]),
        (1, [4], [5], [5], False, None),
    ]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"state_rows": [0], "state_slots": [6], "state_sources": [-1]}, "slots of states outside 0 to 5"),
        ({"state_rows": [0], "state_slots": [1], "state_sources": [-1]}, r"runs rows \[1, 2\], which have no slot"),
        (
            {"state_rows": [0, 0], "state_slots": [1, 2], "state_sources": [-1, -2]},
            "gives row 0 more than 1 slots of states",
        ),
    ],
)
def test_impossible_slots_are_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(PlanError, match=f"batch 3 .*{why}|batch 3 {why}"):
        slots_of(3).take_in(plan_of(**changes))


def test_a_row_continues_behind_its_last_right_draft() -> None:
    slots = slots_of(2, by_row=3)
    slots.slots[:] = [[0, 1, 2], [3, 4, 5]]
    rows = np.array([0, 1], np.int64)
    planned = slots_module.PlannedStates(slots.slots, rows, rows[:0], rows[:0], rows[:0], {}, {1: 2})
    upload = torch.from_numpy
    slots.verified(planned, rows, torch.tensor([1, 3]), upload)
    one = ForwardPass(
        np.array([0, 1], np.int32), np.array([4, 9], np.int32), np.array([5, 10], np.int32), 0,
        np.empty(0, np.int32), np.array([0, 1], np.int32),
    )  # fmt: skip
    later = slots_module.PlannedStates(slots.slots, rows, rows[:0], rows[:0], rows[:0], {}, {})
    view = slots.view(later, one, tensors=None, upload=upload)  # type: ignore[arg-type]
    assert view.begins.tolist() == [0, 5]
    assert view.groups[0].writes.tolist() == [0, 3]
    assert slots.view(later, one, tensors=None, upload=upload).begins.tolist() == [0, 3]  # type: ignore[arg-type]
