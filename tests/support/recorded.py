"""Journals for the tests of tools: a scenario's run, or a simulated one, written as a host would."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lockstep.core.contract.config import HybridMemory, SchedConfig
from lockstep.core.contract.events import ChangeRole, CloseSession, Grammar, LoadAdapterControl, OpenSession, PromptSpan
from lockstep.core.journal.records import JournalHeader
from lockstep.core.journal.writer import JournalWriter
from lockstep.tools.narration import wait_by_cause
from lockstep.tools.request_timeline import RequestTimeline
from lockstep.tools.waits import Waited
from tests.support.fleet.fleet import Fleet
from tests.support.fleet.wires import Wire
from tests.support.rank_group import RankGroup
from tests.support.scenario import Run, parse, play
from tests.support.served import Asked

SCENARIOS = Path(__file__).parents[1] / "scenarios"


def record_model(
    folder: Path, asked: list[tuple[str, dict[str, Any]]], kind: str = "", rounds: int = 1, **settings: Any
) -> Path:
    """Let the demo model answer on the CPU, and keep the journal of its engine.

    Args:
        asked: prompts, each with fields of `Params`.
        rounds: how often all prompts are submitted; in the first round grammars are late, since they are compiled.
        kind: how the weights are stored, one of `tests.support.quantize.KINDS`; empty: as they are.
    """
    from lockstep.runtime import LLM, Params
    from lockstep.runtime.llm import demo_folder
    from tests.support.quantize import write

    with TemporaryDirectory() as temporary:
        model = write(demo_folder(), kind, Path(temporary) / "demo-fp8") if kind else None
        with LLM(model, device="cpu", journal=folder, max_running_requests=4, **settings) as llm:
            prompts, params = [prompt for prompt, _ in asked], [Params(**wanted) for _, wanted in asked]
            answers = [answer for _ in range(rounds) for answer in llm.generate(prompts, params)]
    if failed := [answer.error for answer in answers if answer.error]:
        raise SystemExit(failed[0])
    return folder


def record_required_call(folder: Path) -> Path:
    """Answers that must be tool calls: grammars derived from `tool_choice`."""
    from lockstep.api.endpoints.chat_tools import Tools
    from lockstep.api.settings import Limits

    weather = {"properties": {"city": {"enum": ["Rome", "Paris"]}}, "required": ["city"], "additionalProperties": False}
    given = [
        {"type": "function", "function": {"name": "get_weather", "parameters": weather}},
        {"type": "function", "function": {"name": "get_time"}},
    ]
    choices = (Tools(given, "required", parallel=False), Tools(given, "get_weather", named=True), Tools(given))
    asked: list[tuple[str, dict[str, Any]]] = []
    for tools in choices:
        grammar = tools.grammar(Limits()).get("grammar")
        wanted = {} if grammar is None else {"grammar": (grammar.kind, grammar.source)}
        asked.append(("What is the weather like?", {"max_new_tokens": 40, **wanted}))
    return record_model(folder, asked, overlap_depth=1, chunked_prefill_size=16)


def record_run(folder: Path, run: Run) -> Path:
    """Write the events of a scenario's run, with their digests, as a journal."""
    header = JournalHeader(config=run.config, seed=0, host={"kind": "scenario"})
    with JournalWriter.create(folder, header) as journal:
        for event, digest in zip(run.events, run.digests, strict=True):
            journal.append(event, digest)  # type: ignore[arg-type]
    return folder


def record_text(folder: Path, text: str) -> Path:
    """Play a scenario's text and write it as a journal, without comparing its output."""
    run = Run()
    play(parse(text), run)
    return record_run(folder, run)


def record_scenario(folder: Path, name: str) -> Path:
    """Record the run of a file in tests/scenarios, such as `admission/running_limit`."""
    return record_text(folder, (SCENARIOS / f"{name}.txt").read_text())


def record_simulation(
    folder: Path, workload: str, seed: int = 7, grammar_forces: str | None = None, pp: int = 1, **settings: Any
) -> Path:
    """Simulate a small model and write the run's journal."""
    from lockstep.sim.run.assemble import assemble
    from lockstep.sim.run.simulate import simulate
    from lockstep.sim.scenario.scenario import Scenario

    scenario = Scenario(
        engine="none",  # the times of batches are those of a bare cost model
        model="qwen3-0.6b",
        gpu="h200",
        workload=workload,
        seed=seed,
        settings=settings,
        grammar_forces=grammar_forces,
        pp=pp,
    )
    simulate(assemble(scenario, environ={}), folder=folder)
    return folder


def waited_by(story: RequestTimeline) -> Waited:
    """Return the waits before the first token, by cause, as a request timeline reports them."""
    first_us = story.first_token_us
    before = [wait for i, wait in enumerate(story.waits) if not i or first_us < 0 or wait.start_us < first_us]
    until_us = first_us if first_us >= 0 else sys.maxsize  # a decode engine's requests may continue to wait behind it
    cut = [
        replace(wait, spans=[replace(span, stop_us=min(span.stop_us, until_us)) for span in wait.spans])
        for wait in before
    ]
    by_cause = {cause: us for cause, us in wait_by_cause(replace(story, waits=cut)).items() if us > 0}
    admitted = story.waits[0].admitted if story.waits else None
    retracted = [
        each
        for each in story.retractions
        if first_us < 0 or each.event.time_us < first_us or not each.event.output_tokens
    ]
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


def record_fleet(folder: Path, name: str, **decode: Any) -> Path:
    """The journal of one engine, `p0` or `d0`, of a fleet: chunks, prefixes, cancels, a link that fails.

    `decode`: more settings of the decode engine; pools beside full attention are the prefill engine's, too.
    """
    common: dict[str, Any] = {"page_size": 2, "pages": 40, "max_running_requests": 3, "num_reserved_decode_tokens": 4}
    hybrid = {key: value for key, value in decode.items() if key == "hybrid"}
    fleet = Fleet(
        [SchedConfig(role="prefill", chunked_prefill_size=4, **common, **hybrid)],
        [SchedConfig(role="decode", transfer_failure="recompute", **common, **decode)],
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
    return journal_of(fleet, name, folder)


def record_kinds(folder: Path, name: str) -> Path:
    """The journal of one engine of a fleet whose requests are of every kind, and which then changes its role."""
    common = {"page_size": 2, "pages": 40, "max_running_requests": 3, "num_reserved_decode_tokens": 4, "max_loras": 1}
    fleet = Fleet(
        [SchedConfig(role="prefill", chunked_prefill_size=4, **common)],
        [SchedConfig(role="decode", transfer_failure="recompute", jump_forward_tokens=3, **common)],
    )
    for member in fleet.members:
        fleet.control(member, LoadAdapterControl("law", 1))
    fleet.control("d0", OpenSession("s", 60))
    asked = [Asked(key, tuple(range(100, 107)), 3 + key % 4) for key in range(8)]
    picture = PromptSpan(1, 4, "image", bytes(32), 5)
    fleet.arrive(asked[0], samples=[asked[4]])
    fleet.arrive(asked[1], session="s")
    fleet.arrive(asked[2], session="s", adapter="law")
    fleet.arrive(asked[3], grammar=Grammar("regex", "a", b"a"), grammar_ends=5, adapter="law")
    fleet.arrive(asked[5], spans=(picture,))
    fleet.arrive_alone(asked[6], "p0", kind="embed")
    fleet.settle()
    fleet.control("d0", CloseSession("s"))
    fleet.arrive(asked[7], spans=(picture,))
    fleet.settle_until(lambda: bool(fleet.sent[7]))
    fleet.control("d0", ChangeRole("prefill", 500))
    fleet.control("p0", ChangeRole("decode", 500))
    fleet.clock(1_000)
    fleet.settle()
    fleet.arrive(Asked(8, tuple(range(100, 107)), 4), "d0", "p0")
    fleet.settle()
    return journal_of(fleet, name, folder)


def journal_of(fleet: Fleet, name: str, folder: Path) -> Path:
    """The journal of one engine of a fleet, up to now."""
    member = fleet.members[name]
    with JournalWriter.create(folder, JournalHeader(config=member.config, host={"kind": "fleet"})) as journal:
        for event, digest in member.events:
            journal.append(event, digest)  # type: ignore[arg-type]
    return folder


def record_decode_rank(folder: Path) -> Path:
    """The journal of the second of two decode ranks, whose prompts two prefill ranks compute."""
    common = {"page_size": 2, "pages": 40, "max_running_requests": 3, "num_reserved_decode_tokens": 4}
    prefill = SchedConfig(role="prefill", chunked_prefill_size=4, **common)
    decode = SchedConfig(role="decode", transfer_failure="recompute", **common)
    fleet = Fleet([prefill] * 2, [decode] * 2, ranks=True)
    for key in range(8):
        base = 100 * (key % 2 + 1)
        one = Asked(key, tuple(range(base, base + 5 + key)), 3 + key % 4, stops=(1,) if key == 5 else ())
        wire = fleet.arrive(one, f"p{key // 2 % 2}", f"d{1 - key % 3 // 2}")
        fleet.settle_until(partial(_is_received, wire))
        if key in (1, 4):
            fleet.cancel(wire, wire.decode.name)
        if key == 6:
            fleet.link_down("p1", "d1")
        fleet.clock(1_000)
    fleet.settle()
    member = fleet.members["d1"]
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
    return _record_member(folder, group, 1)


def record_hybrid_rank(folder: Path) -> Path:
    """The journal of the second of two ranks, with windows and states: cut chunks, no slot, full ranks, a restart."""
    config = SchedConfig(
        page_size=2,
        pages=40,
        max_running_requests=4,
        chunked_prefill_size=8,
        overlap_depth=1,
        dp_ranks=2,
        prefill_delayer=True,
        prefill_delayer_max_delay_passes=2,
        prefill_full_skip_passes=2,
        prefill_delayer_token_usage_low_watermark=0.2,
        hybrid=HybridMemory(window_tokens=5, window_pages=13, state_slots=5, checkpoint_tokens=4),
    )
    group = RankGroup([config] * 2)
    rng = random.Random(5)
    for key in range(24):
        base = 100 * (key % 4 // 2)
        group.arrive(key % 2, Asked(key, tuple(range(base, base + 6 + key % 9)), 3 + key % 7))
        if key == 13:
            group.restart()
        for _ in range(16):
            group.do_something(rng)
    group.settle()
    for mark in ("deferred (state)", "deferred (window)", "started from a checkpoint", "evicted (window)"):
        assert group.marks[mark], mark
    return _record_member(folder, group, 1)


def record_structured_rank(folder: Path) -> Path:
    """The journal of the first of two ranks: grammars, forced tokens, drafts of layers that both run, the triggers."""
    config = SchedConfig(
        page_size=2,
        pages=60,
        max_running_requests=4,
        dp_ranks=2,
        speculative_method="mtp",
        num_speculative_tokens=2,
        jump_forward_tokens=4,
        prefill_delayer=True,
        prefill_delayer_max_delay_passes=3,
        prefill_delayer_slots=True,
        prefill_delayer_queue_min_ratio=1.0,
    )
    group = RankGroup([config] * 2)
    rng = random.Random(3)
    for key in range(18):
        asked = Asked(key, tuple(range(100 * key, 100 * key + 3 + key % 4)), 6 + key % 9)
        group.arrive(key % 2, asked, grammar=f"g{key % 3}" if key % 5 < 3 else "", ends=7 if key == 5 else None)
        for _ in range(14):
            group.do_something(rng)
    group.settle()
    return _record_member(folder, group, 0)


def _record_member(folder: Path, group: RankGroup, rank: int) -> Path:
    member = group.members[rank]
    with JournalWriter.create(folder, JournalHeader(config=member.config, host={"kind": "rank"})) as journal:
        for event, digest in member.events:
            journal.append(event, digest)  # type: ignore[arg-type]
    return folder
