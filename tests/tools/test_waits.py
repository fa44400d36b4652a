"""The waits of all requests, folded in one pass, equal those of the timeline of each."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from lockstep.core.contract.events import RequestArrived, RequestId
from lockstep.core.contract.samples import sample_count
from lockstep.core.requests.table import NO_REQUEST
from lockstep.sim.run.assemble import assemble
from lockstep.sim.run.simulate import simulate
from lockstep.sim.scenario.scenario import Scenario
from lockstep.tools.narration import DEFERRAL_TEXTS, OWN_CAUSES, SHORT, cause_key, key_text
from lockstep.tools.recorded_waits import waits_of
from lockstep.tools.request_timeline import Cause, Chronicle
from lockstep.tools.runs import Walk
from lockstep.tools.waits import Waited, WaitFold
from tests.support.recorded import waited_by

GOLDEN = Path(__file__).parents[1] / "golden"

BUSY = (
    "gen:n=80,rate=300,turns=uniform:1:3,think=lognormal:50ms:1,shared_prefix=64x3,input=lognormal:120:0.8,"
    "output=lognormal:30:0.8,max_total=900"
)
TIGHT = {"pages": 70, "max_running_requests": 8, "chunked_prefill_size": 128}


def by_timelines(folder: Path) -> Mapping[RequestId, Waited]:
    """The waits of all requests in a journal, by their timelines."""
    ids = {
        event.request_id + sample
        for _, event, _ in Walk(folder)
        if isinstance(event, RequestArrived)
        for sample in range(sample_count(event))
    }
    chronicle, walk = Chronicle(ids), Walk(folder)
    for number, event, step in walk:
        chronicle.observe(number, event, step, walk.engine)
    return {request_id: waited_by(timeline) for request_id, timeline in chronicle.close().timelines.items()}


@pytest.mark.parametrize("name", sorted(path.parent.name for path in GOLDEN.glob("*/journal")))
def test_it_agrees_with_timelines(name: str) -> None:
    assert waits_of(GOLDEN / name) == by_timelines(GOLDEN / name)


@pytest.mark.parametrize(
    "settings",
    [
        TIGHT,
        {**TIGHT, "schedule_policy": "lpm", "prefix_deduplication": "defer"},
        {**TIGHT, "pages": 40, "retracted_requeue": "front", "stream_interval": 7},
        {**TIGHT, "overlap_depth": 0, "waiting_timeout_us": 150_000},
    ],
    ids=["fcfs", "lpm", "retractions", "timeouts"],
)
def test_it_gives_the_same_beside_a_simulation(tmp_path: Path, settings: dict[str, object]) -> None:
    """Steps of uniform decodes, which the fold does not receive there, change no wait."""
    scenario = Scenario(model="qwen3-0.6b", gpu="h200", workload=BUSY, settings=settings)
    live, without = WaitFold(), WaitFold()
    simulate(assemble(scenario, environ={}), folder=tmp_path / "run", observer=live)
    simulate(assemble(scenario, environ={}), observer=without)
    found = live.close()
    assert without.close() == found
    assert found == by_timelines(tmp_path / "run")
    assert waits_of(tmp_path / "run") == found
    assert sum(one.queue_us > 0 for one in found.values()) > 20


def test_it_looks_at_a_simulation_without_a_trace_in_it(tmp_path: Path) -> None:
    scenario = Scenario(model="qwen3-0.6b", gpu="h200", workload=BUSY, settings=TIGHT)
    simulate(assemble(scenario, environ={}), folder=tmp_path / "alone")
    simulate(assemble(scenario, environ={}), folder=tmp_path / "seen", observer=WaitFold())
    alone, seen = ((tmp_path / name / "journal" / "00000000.log").read_bytes() for name in ("alone", "seen"))
    assert alone == seen


def test_every_cause_has_words() -> None:
    for reason in (*SHORT, *DEFERRAL_TEXTS):
        for other in (NO_REQUEST, 3):
            words = key_text(cause_key(Cause(reason, other)))
            behind = other != NO_REQUEST and reason not in OWN_CAUSES
            assert words.startswith("in the queue behind another, which could not start: ") == behind
            assert len(words) > 25
            assert reason not in words or "_" not in reason or reason == "running_limit"
            assert "{" not in words
