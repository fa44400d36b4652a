"""Journals for the tests of tools: a scenario's run, or a simulated one, written as a host would."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.core.config import SchedConfig
from lockstep.core.journal import JournalHeader, JournalWriter
from lockstep.tools.story import Story
from lockstep.tools.telling import wait_by_cause
from lockstep.tools.waits import Waited
from tests.support.fleet import Fleet, Wire
from tests.support.rank_group import RankGroup
from tests.support.scenario import Run, parse, play
from tests.support.served import Asked

SCENARIOS = Path(__file__).parents[1] / "scenarios"


def record_run(folder: Path, run: Run) -> Path:
    """Write what a scenario's run was told, and what it decided, as a journal."""
    header = JournalHeader(config=run.config, seed=0, host={"kind": "scenario"})
    with JournalWriter.create(folder, header) as journal:
        for event, digest in zip(run.events, run.digests, strict=True):
            journal.append(event, digest)  # type: ignore[arg-type]
    return folder


def record_story(folder: Path, text: str) -> Path:
    """Play a scenario's text and write it as a journal; what it prints is not looked at."""
    run = Run()
    play(parse(text), run)
    return record_run(folder, run)


def record_scenario(folder: Path, name: str) -> Path:
    """The same of a file in tests/scenarios, such as `admission/running_limit`."""
    return record_story(folder, (SCENARIOS / f"{name}.txt").read_text())


def record_simulation(
    folder: Path, workload: str, seed: int = 7, grammar_forces: str | None = None, **settings: Any
) -> Path:
    """Simulate a small model and write the run's journal."""
    from lockstep.sim.simulate import Scenario, assemble, simulate

    scenario = Scenario(
        model="qwen3-0.6b",
        gpu="h200",
        workload=workload,
        seed=seed,
        settings=settings,
        grammar_forces=grammar_forces,
    )
    simulate(assemble(scenario, environ={}), folder=folder)
    return folder


def waited_by(story: Story) -> Waited:
    """What a story says of waiting until the first token."""
    first_us = story.first_token_us
    before = [wait for i, wait in enumerate(story.waits) if not i or first_us < 0 or wait.start_us < first_us]
    by_cause = {cause: us for cause, us in wait_by_cause(replace(story, waits=before)).items() if us}
    admitted = story.waits[0].admitted if story.waits else None
    retracted = [each for each in story.retractions if first_us < 0 or each.event.time_us < first_us]
    return Waited(
        request_id=story.request_id,
        arrived_us=story.arrived_us,
        waiting_then=story.waiting_then,
        queue_us=story.queue_us,
        first_token_us=first_us,
        cached_tokens=admitted.cached_tokens if admitted is not None else 0,
        retractions=len(retracted),
        bypassed=sum(wait.bypassed for wait in before),
        by_cause=dict(sorted(by_cause.items(), key=lambda item: (-item[1], item[0]))),
    )


def _is_received(wire: Wire) -> bool:
    return wire.receive is not None or wire.outcome is not None


def record_fleet(folder: Path, name: str) -> Path:
    """The journal of one engine, `p0` or `d0`, of a fleet: chunks, prefixes, cancels, a link that fails."""
    common = {"page_size": 2, "pages": 40, "max_running_requests": 3, "num_reserved_decode_tokens": 4}
    fleet = Fleet(
        [SchedConfig(role="prefill", chunked_prefill_size=4, **common)],
        [SchedConfig(role="decode", transfer_failure="recompute", **common)],
    )
    for key in range(8):
        base = 100 * (key % 2 + 1)
        wire = fleet.arrive(Asked(key, tuple(range(base, base + 5 + key)), 3 + key % 4, stops=(1,) if key == 5 else ()))
        fleet.settle_until(partial(_is_received, wire))
        if key in (2, 3):
            fleet.cancel(wire, "d0" if key == 2 else "p0")
        if key == 6:
            fleet.link_down("p0", "d0")
        fleet.clock(1_000)
    fleet.settle()
    member = fleet.members[name]
    with JournalWriter.create(folder, JournalHeader(config=member.config, host={"kind": "fleet"})) as journal:
        for event, digest in member.events:
            journal.append(event, digest)  # type: ignore[arg-type]
    return folder


def record_rank(folder: Path) -> Path:
    """The journal of the second of three ranks: chunks, a delayer, overlap off behind extends, a cancel, a restart."""
    config = SchedConfig(
        page_size=2,
        pages=30,
        max_running_requests=3,
        chunked_prefill_size=6,
        dp_ranks=3,
        overlap_consecutive_prefills=False,
        prefill_delayer=True,
        prefill_delayer_max_delay_passes=3,
        prefill_delayer_token_usage_low_watermark=0.1,
        prefill_full_skip_passes=2,
    )
    group = RankGroup([config] * 3)
    for key in range(14):
        base = 100 * (key % 2 + 1)
        rank = (key * key) % 3
        number = group.arrive(rank, Asked(key, tuple(range(base, base + 2 + key)), 3 + key % 5))
        if key in (4, 9):
            group.ready(rank)
            group.cancel(rank, number)
        if key == 11:
            group.restart()
        for _ in range(3):
            group.turn()
            group.clock(700)
    group.settle()
    member = group.members[1]
    with JournalWriter.create(folder, JournalHeader(config=member.config, host={"kind": "rank"})) as journal:
        for event, digest in member.events:
            journal.append(event, digest)  # type: ignore[arg-type]
    return folder
