"""A recorded run, simulated with its own facts, is the same run: every event, decision and command."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner, Result

from lockstep.core.contract.commands import EncodeMedia, FinishRequest, RejectRequest, StreamTokens
from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.errors import ConfigError
from lockstep.core.contract.events import BatchFinished, GrammarReady, LaneReady
from lockstep.core.journal import snapshot
from lockstep.core.journal.reader import read_journal
from lockstep.core.journal.records import JournalError, JournalHeader
from lockstep.core.journal.replay import fold
from lockstep.core.journal.writer import JournalWriter
from lockstep.core.scheduler.engine import Engine
from lockstep.host.host_header import EMULATED, RUNTIME, SIMULATOR, VLLM, HostHeader
from lockstep.sim.cluster.scenario import ClusterScenario, EngineGroup
from lockstep.sim.cluster.setup import assemble_cluster
from lockstep.sim.cluster.simulate import simulate_cluster
from lockstep.sim.host.engine_host import EngineHost
from lockstep.sim.rerun.facts import RecordedDevice, RecordedFacts
from lockstep.sim.rerun.record import NotDrawnError, RecordedPass, RecordedPasses
from lockstep.sim.rerun.rerun import rerun, same
from lockstep.sim.run.assemble import assemble
from lockstep.sim.run.simulate import simulate
from lockstep.sim.scenario.scenario import Scenario
from lockstep.tools.replay import replay
from tests.golden.test_golden import FOLDER, NAMES

HOSTS = (SIMULATOR, RUNTIME, EMULATED)
OF_HOSTS = [name for name in NAMES if HostHeader.of(read_journal(FOLDER / name).header).kind in HOSTS]


def run_of(*words: object) -> Result:
    return CliRunner().invoke(replay, [str(word) for word in (*words, "--in-simulator")])


def test_journals_of_all_hosts_are_among_the_golden_ones() -> None:
    kinds = {HostHeader.of(read_journal(FOLDER / name).header).kind for name in OF_HOSTS}
    assert kinds == set(HOSTS)
    assert {"served", "tight", "structured-output", "jump-forward", "ngram-drafts", "draft-trees"} <= set(OF_HOSTS)


@pytest.mark.parametrize("name", OF_HOSTS)
def test_the_simulator_decides_as_the_host_that_wrote_the_journal(name: str) -> None:
    done = rerun(FOLDER / name)
    assert done.difference is None
    results = sum(isinstance(event, BatchFinished) for event, _ in fold(FOLDER / name))
    assert done.made["BatchFinished"] == results > 0
    assert sum(done.made.values()) + sum(done.given.values()) + sum(done.answers.values()) == done.run.steps


CHAT = "gen:n=24,rate=20,turns=uniform:2:3,think=lognormal:200ms:1,input=lognormal:150:0.5,output=lognormal:12:0.5"
FEATURES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "media": ("answers", "MediaEncoded", {"model": "qwen2.5-vl-7b", "media": "image=0.5x1..2:448x448/4"}),
    "adapters": ("answers", "AdapterLoaded", {"adapters": "5", "settings": {"max_loras": 2}}),
    "host": ("answers", "HostCopyFinished", {"settings": {"pages": 60}, "tiers": {"host_cache_gb": 1.0}}),
    "storage": (
        "answers",
        "StorageWritten",
        {"settings": {"pages": 60}, "tiers": {"host_cache_gb": 0.2, "storage_gb": 4.0}},
    ),
    "sessions": ("given", "ControlRequested", {"server_sessions": True}),
    "samples": ("given", "RequestArrived", {"samples": "0.5x2..3"}),
    "hybrid": ("made", "BatchFinished", {"model": "gpt-oss-20b", "tiers": {"hybrid_memory": "on"}}),
    "blocks": ("made", "BatchFinished", {"diffusion_block": 8}),
    "experts": (
        "answers",
        "ExpertsMoved",
        {"model": "qwen3-30b-a3b", "tp": 4, "ep": 4, "attention_dp": 4, "moe_a2a": True, "expert_cv": 1.0, "eplb": True,
         "redundant_experts": 16, "eplb_interval": 25, "expert_drift": 0.3},
    ),
}  # fmt: skip
"""Options of a simulation, with a type of event that follows from them, and where it comes from."""


@pytest.mark.parametrize("name", FEATURES)
def test_a_simulation_with_a_feature_is_the_same_with_its_own_facts(name: str, tmp_path: Path) -> None:
    where, event, options = FEATURES[name]
    scenario = Scenario(**{"model": "qwen3-8b", "gpu": "h200", "workload": CHAT, "engine": "none", **options})
    simulate(assemble(scenario, {}), folder=tmp_path)
    done = rerun(tmp_path)
    assert done.difference is None
    assert getattr(done, where)[event] > 2


def test_engines_that_hand_requests_over_are_simulated_one_by_one(tmp_path: Path) -> None:
    """Facts of the other engine are given."""
    groups = tuple(EngineGroup(count=1, gpu="h200", settings={"role": role}) for role in ("prefill", "decode"))
    base = Scenario(model="qwen3-8b", gpu="h200", workload=CHAT)
    simulate_cluster(assemble_cluster(ClusterScenario(base=base, engines=groups)), folder=tmp_path)
    for engine in ("0", "1"):
        done = rerun(tmp_path / "engines" / engine)
        assert done.difference is None
        assert done.given["TransferAdvanced"] > 10
    assert "is the run of a cluster" in run_of(tmp_path).stderr


@pytest.mark.parametrize(
    "name", ["tight", "overlap-2", "speculation", "microbatches", "structured-output", "jump-forward"]
)
@pytest.mark.parametrize("step", [30, 61])
def test_a_journal_without_its_first_segments_begins_with_its_snapshot(name: str, step: int, tmp_path: Path) -> None:
    journal, engine, open_then = read_journal(FOLDER / name), Engine(read_journal(FOLDER / name).header.config), 0
    with JournalWriter.create(tmp_path, journal.header) as writer:
        for record in journal.events():
            engine.step(record.event)
            writer.append(record.event, record.digest)
            if record.step == step - 1:
                open_then = len(engine.requests)
                writer.begin_segment(snapshot.dump(engine), engine.digest)
                writer.drop_before(1, {path.name for path in (tmp_path / "journal").glob("snapshot-*")})
        writer.close("closed")
    assert open_then
    done = rerun(tmp_path)
    assert done.difference is None
    assert (done.run.first_step, done.run.closed) == (step, True)
    assert done.run.steps == journal.tail.steps - step


# ----------------------------------------------------------------------------------------------------- planted errors


def found_in(name: str) -> tuple[str, str]:
    """Return the text of the difference that is found, and the types of the two events."""
    done = rerun(FOLDER / name)
    assert done.difference is not None, "the planted error is not found"
    recorded, simulated = done.difference.recorded, done.difference.simulated
    result = run_of(FOLDER / name)
    assert result.exit_code == 3
    types = [type(one.event).__name__ if one is not None else "" for one in (recorded, simulated)]
    return result.output, " ".join(types)


def test_a_result_with_its_rows_in_another_order_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    ordered = RecordedFacts._passes_of
    monkeypatch.setattr(RecordedFacts, "_passes_of", lambda facts, batch: ordered(facts, batch)[::-1])
    text, types = found_in("plain")
    assert types == "BatchFinished BatchFinished"
    assert "the simulator differs from the journal in step" in text
    assert "state before\n  pages " in text


def test_a_host_that_offers_no_slot_behind_a_fact_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a host that overlooks that a compiled grammar is new."""
    whole = EngineHost._fold

    def overlooks(host: Any, event: Any, came_us: int | None = None) -> Any:
        step = whole(host, event, came_us)
        host._nothing_new = host._nothing_new or isinstance(event, GrammarReady)
        return step

    monkeypatch.setattr(EngineHost, "_fold", overlooks)
    text, types = found_in("structured-output")
    assert types.startswith("LaneReady")
    assert "LaneReady" in text


def test_a_host_that_does_not_let_deferred_batches_sample_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RecordedDevice, "sample", lambda *_: None)
    text, types = found_in("grammar")
    assert types.startswith("BatchFinished")
    assert "simulator" in text


def test_an_order_that_is_lost_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.sim.rerun.facts.order_of", lambda command: None)
    _, types = found_in("structured-output")
    assert types.startswith("GrammarReady")


def test_a_changed_decision_of_the_core_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The journal is replayed by the core as it is, the simulation runs with another limit."""
    other = msgspec.structs.replace(read_journal(FOLDER / "plain").header.config, max_running_requests=2)
    monkeypatch.setattr("lockstep.sim.rerun.record.RecordedRun.engine", lambda run: Engine(other))
    text, _ = found_in("plain")
    assert "  simulator deferred" in text


# ---------------------------------------------------------------------------------------------------------- refusals


def with_header(folder: Path, **changes: Any) -> Path:
    """Write a journal with no events."""
    header = JournalHeader(**{"config": SchedConfig(), "seed": 0, **changes})
    with JournalWriter.create(folder, header) as writer:
        writer.close("closed")
    return folder


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: FOLDER / "data-parallel", "data-parallel ranks: which slots it offers depends"),
        (lambda folder: with_header(folder / "run", host={"kind": VLLM}), "was written inside of vLLM"),
        (lambda folder: with_header(folder / "run", content="digests"), "has only digests of prompts and outputs"),
        (lambda folder: folder / "none", "none does not exist"),
    ],
)
def test_a_journal_that_cannot_be_simulated_ends_with_one_error(
    make: Callable[[Path], Path], message: str, tmp_path: Path
) -> None:
    result = run_of(make(tmp_path))
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    with pytest.raises((ConfigError, JournalError)):
        rerun(make(tmp_path / "again"))


def test_a_journal_without_events_is_equal(tmp_path: Path) -> None:
    result = run_of(with_header(tmp_path / "run"))
    assert (result.exit_code, result.stdout.splitlines()[0]) == (
        0,
        "equal: all 0 steps, 0 launches among them, are the same",
    )


def test_a_corrupt_journal_and_an_open_one_have_the_statuses_of_replay(tmp_path: Path) -> None:
    for name in ("open", "corrupt"):
        shutil.copytree(FOLDER / "plain", tmp_path / name)
    log = tmp_path / "open" / "journal" / "00000000.log"
    log.write_bytes(log.read_bytes()[:-30])
    result = run_of(tmp_path / "open")
    assert result.exit_code == 1
    assert result.stdout.startswith("equal so far: ")
    log = tmp_path / "corrupt" / "journal" / "00000000.log"
    data = bytearray(log.read_bytes())
    data[len(data) // 2] ^= 0xFF
    log.write_bytes(data)
    result = run_of(tmp_path / "corrupt")
    assert result.exit_code == 2
    assert "JournalCorrupt" in result.stderr


# ------------------------------------------------------------------------------------------------------------- output


def test_the_output_has_what_was_given_and_what_was_made() -> None:
    result = run_of(FOLDER / "structured-output")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("equal: ")
    assert "answers to its orders" in result.stdout
    assert "GrammarReady" in result.stdout
    found = json.loads(run_of(FOLDER / "structured-output", "--json").stdout)
    assert found["equal"] is True
    assert found["difference"] is None
    steps = [event for event, _ in fold(FOLDER / "structured-output")]
    assert found["steps"] == len(steps)
    assert found["made"]["LaneReady"] == sum(isinstance(event, LaneReady) for event in steps)


# -------------------------------------------------------------------------------------------------------------- passes


def test_passes_over_a_position_come_in_their_order() -> None:
    passes = RecordedPasses()
    plain = [RecordedPass((token,)) for token in (5, 6, 7, 8)]
    several, ended = RecordedPass((9, 10, 11), right=(1, 3)), RecordedPass((12,), grammar_ended=True)
    for position, done in ((4, plain[0]), (5, plain[1]), (9, plain[2]), (5, plain[3]), (6, several), (2, ended)):
        passes.add(3, position, done)
    assert [passes.take(3, position) for position in (2, 4, 5, 5, 6, 9)] == [
        ended, plain[0], plain[1], plain[3], several, plain[2],
    ]  # fmt: skip
    for request, position in ((3, 4), (3, 5), (3, 6), (3, 7), (3, 1), (4, 4)):
        with pytest.raises(NotDrawnError, match=f"position {position} of r{request}"):
            passes.take(request, position)


CHANGES: dict[type[Any], Callable[[Any], Any]] = {
    EncodeMedia: lambda one: msgspec.structs.replace(one, encoder_tokens=one.encoder_tokens + 1),
    StreamTokens: lambda one: msgspec.structs.replace(one, tokens=one.tokens + np.int32(1)),
    FinishRequest: lambda one: RejectRequest(one.request_id, one.reason, ""),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_steps_are_compared_to_the_last_entry(kind: type[Any]) -> None:
    """Also orders and tokens that no digest covers."""
    name = "media-budget" if kind is EncodeMedia else "plain"
    steps, again = ([step for _, step in fold(FOLDER / name)] for _ in range(2))
    assert all(map(same, steps, again))
    found = [(at, i) for at, step in enumerate(steps) for i, one in enumerate(step.commands) if isinstance(one, kind)]
    at, i = found[-1]
    again[at].commands[i] = CHANGES[kind](again[at].commands[i])
    assert [same(one, other) for one, other in zip(steps, again, strict=True)].count(False) == 1
    assert not same(steps[at], again[at])
    assert steps[at].digest == again[at].digest
    assert not same(steps[at].commands, steps[at].commands[:-1])


def test_arrays_of_other_types_are_not_the_same() -> None:
    assert same(np.array([3], np.int32), np.array([3], np.int32))
    assert not same(np.array([3], np.int32), np.array([3], np.int64))
