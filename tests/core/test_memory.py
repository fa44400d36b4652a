"""Rows and pages of an engine behind a scenario, as far as no scenario prints them."""

from __future__ import annotations

import numpy as np
import pytest

from lockstep.core.scheduler.engine import Engine
from tests.support.scenario import Run, parse, play


def _engine_behind(scenario: str) -> Engine:
    run = Run()
    play(parse(scenario), run)
    return run.engine


@pytest.mark.parametrize("settings", ["", "hybrid.window_tokens=4 hybrid.window_pages=20"])
def test_the_last_token_of_a_prompt_is_received_though_all_of_it_is_cached(settings: str) -> None:
    engine = _engine_behind(f"""
config page_size=2 pages=24 overlap_depth=0 {settings}

add a prompt=1..9 max_new=1
run
add b prompt=1..8 max_new=1
""")
    assert engine.memory.radix.total_pages == 4
    assert engine.memory.match_to_receive(engine.requests[1]).pages == 3


@pytest.mark.parametrize(("launched", "collected"), [(1, 0), (2, 0), (2, 1), (2, 2), (2, 4)])
def test_a_snapshot_has_the_delivered_outputs_of_a_row_that_is_freed_later(launched: int, collected: int) -> None:
    """One or two batches are in flight when the request is cancelled; what they sample is not known yet."""
    rounds = "collect\nstep\n" * collected
    engine = _engine_behind(f"""
config page_size=2 pages=24 overlap_depth=1

add a prompt=1..5 max_new=9
steps {launched}
{rounds}cancel a
""")
    (image,) = engine.memory.part().deferred_frees
    assert np.frombuffer(image.row_outputs, np.int32).tolist() == [1005 + i for i in range(collected)]


def test_a_part_of_a_prompt_that_ends_in_a_page_of_the_row_changes_no_page_table() -> None:
    engine = _engine_behind("""
config page_size=4 pages=24 overlap_depth=0 chunked_prefill_size=5 max_prefill_tokens=5 chunk_unit=token \
batching=running_first radix_cache=no

add a prompt=1..7 max_new=6
step
collect
step
""")
    (batch,) = engine.in_flight
    assert (batch.plan.starts.tolist(), batch.plan.stops.tolist()) == ([5], [7])
    assert (batch.plan.deltas.pages.size, batch.plan.deltas.runs.size) == (0, 0)
