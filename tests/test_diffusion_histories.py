"""Random histories of an engine whose model answers in blocks: every check after every event."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import FunctionType

import pytest

from lockstep.core.features.diffusion import Diffuser, in_blocks
from lockstep.core.scheduler.state import SchedulerState
from tests.support.blocky import blocky_history
from tests.support.driver.run import run_actions
from tests.support.mutation.live import edited_code

EXPECTED = (
    "finished (length)",
    "finished (stop)",
    "finished (cancelled)",
    "finished (error)",
    "retracted (pages)",
    "retracted (forced)",
    "retraction of a chunked request",
    "turn started",
    "samples follow",
    "restart with work in flight",
    "row kept for work in flight",
)


@pytest.mark.parametrize("first", range(0, 120, 30))
def test_a_model_that_answers_in_blocks_keeps_every_invariant(first: int) -> None:
    for seed in range(first, first + 30):
        run_actions(*blocky_history(seed), replay=seed % 5 == 0)


def test_a_turn_starts_with_blocks_of_the_turn_before() -> None:
    run_actions(*blocky_history(9457))


def test_the_histories_reach_what_blocks_are_about() -> None:
    marks: Counter[str] = Counter()
    for seed in range(40):
        marks.update(run_actions(*blocky_history(seed), replay=False).marks)
    assert not [mark for mark in EXPECTED if not marks[mark]]


PLANTS: dict[str, tuple[Callable[..., object], str, str]] = {
    "tokens behind the length are delivered": (
        Diffuser.settle,
        "np.minimum(counts, samplers.limits - batch.sampled_at)",
        "counts",
    ),
    "a finished block is computed again": (Diffuser.settle, "samplers.rows[counts > 0]", "samplers.rows[counts > 3]"),
    "a page is opened in every pass": (
        Diffuser.members_opening,
        "(self.passes[members.rows] == FINISHED) & ",
        "",
    ),
    "the end of the prompt is not given": (
        Diffuser.next_pass,
        "np.clip(members.prompts - starts, ZERO, self.size)",
        "members.prompts * ZERO",
    ),
    "a prompt begins the block behind its end": (
        Diffuser.begin,
        "np.where(ends == stops, np.int32(FINISHED), ZERO)",
        "np.int32(FINISHED)",
    ),
    "passes are not counted": (in_blocks, "BlockPasses(blocks.passes,", "BlockPasses(blocks.passes * 0,"),
    "tokens of a block that goes on count as output": (
        Diffuser.outputs_of,
        "stop if self.passes[request.row] == FINISHED else stop - int(self.size)",
        "stop",
    ),
    "a pass begins a block whose page is not there": (
        SchedulerState.next_pages,
        "return self.diffusion.members_opening(running_batch, positions).size",
        "return 0",
    ),
}


def _fails(seed: int) -> bool:
    try:
        run_actions(*blocky_history(seed))
    except Exception:  # any error is a finding
        return True
    return False


@pytest.mark.parametrize("name", PLANTS)
def test_histories_find_a_planted_bug(name: str) -> None:
    function, before, after = PLANTS[name]
    assert isinstance(function, FunctionType)
    sound = function.__code__
    function.__code__ = edited_code(function, before, after)
    try:
        assert any(_fails(seed) for seed in range(30))
    finally:
        function.__code__ = sound
