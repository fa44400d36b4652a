"""Media on several engines: ranks, pipelines, and separate prefill and decode engines.

Data-parallel ranks have requests and encoders of their own; in pipelines the first stage encodes. In every layout a
client gets the tokens and the end that one plain engine gives it; the orders of encoders equal their work, once for
each content that a cache has room for; and requests that are cancelled, or with media that cannot be encoded, end
properly.
"""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lockstep.core import invariants
from lockstep.core.contract.commands import StreamTokens
from lockstep.core.contract.errors import ConfigError
from lockstep.core.contract.events import (
    MediaEncoded,
    RequestArrived,
    RequestCancelled,
    RequestFinished,
    RequestRejected,
)
from lockstep.core.journal.sinks import NoJournal
from lockstep.host.router_journal import NoRouterJournal
from lockstep.sim.cli.simulate import simulate as simulate_command
from lockstep.sim.cluster.data_parallel import RankCluster
from lockstep.sim.cluster.handover import HandoverCluster
from lockstep.sim.cluster.result import ClusterRun
from lockstep.sim.cluster.scenario import ClusterScenario, EngineGroup
from lockstep.sim.cluster.setup import ClusterSetup, assemble_cluster
from lockstep.sim.cluster.simulate import simulate_cluster
from lockstep.sim.cost import CapacityError
from lockstep.sim.host.encoder_lane import EncoderLane
from lockstep.sim.run.assemble import assemble
from lockstep.sim.run.simulate import Run, simulate
from lockstep.sim.scenario.scenario import Scenario
from lockstep.tools.explain import explain
from lockstep.tools.journal import journal
from lockstep.tools.runs import Walk

MODEL = "qwen3-vl-30b-a3b"
IMAGES = "image=0.7x1..3:640x480/18"
TOKENS = 300  # of one of these images
SMALL = "gen:n=24,rate=40,input=uniform:1:500,output=uniform:1:20"
RANKS: dict[str, Any] = {"tp": 4, "ep": 4, "attention_dp": 4, "rank_schedulers": True}

Answers = dict[str, tuple[str, tuple[int, ...]]]


def scenario(**fields: Any) -> Scenario:
    return Scenario(**{"model": MODEL, "gpu": "h200", "workload": SMALL, "media": IMAGES, **fields})


def answers_of(folders: Sequence[Path]) -> Answers:
    """The answers of clients: by label the finish reason, and the tokens."""
    found: Answers = {}
    for folder in folders:
        labels: dict[int, str] = {}
        tokens: dict[int, list[int]] = {}
        for _, event, step in Walk(folder):
            if isinstance(event, RequestArrived):
                labels[event.request_id] = event.label
                tokens[event.request_id] = []
            for command in step.commands:
                if isinstance(command, StreamTokens):
                    for request_id, token in zip(command.request_ids.tolist(), command.tokens.tolist(), strict=True):
                        tokens[request_id].append(token)
            for decided in step.decided:
                if isinstance(decided, RequestFinished | RequestRejected):
                    assert labels[decided.request_id] not in found, "it ends once"
                    found[labels[decided.request_id]] = (decided.reason, tuple(tokens[decided.request_id]))
    return found


def plain_answers(folder: Path, **fields: Any) -> Answers:
    """The answers of one engine without sharing."""
    simulate(assemble(scenario(**fields), {}), folder=folder)
    return answers_of([folder])


def distinct(run: ClusterRun, engine: int) -> int:
    """Contents that the requests of an engine have."""
    turns = {turn.label: turn for turn in run.setup.workload.turns}
    labels = run.engines[engine].data.requests.label
    return len({media.digest for label in labels for media in turns[str(label)].media})


def assert_work_is_conserved(run: ClusterRun, *, all_fit: bool) -> None:
    """Encoders computed the ordered items; where nothing is evicted, each content once per cache."""
    tables = []
    for engine, one in enumerate(run.engines):
        media, table = one.data.summary.get("media"), one.data.encoder
        if media is None:
            assert table is None
            continue
        done = np.empty((0, 4), np.int64) if table is None else table
        assert (int(done[:, 2].sum()), int(done[:, 3].sum())) == (media["encoded"], media["encoded_tokens"])
        if all_fit:
            assert media["encoded"] == distinct(run, engine)
            assert media["reused"] == media["contents"] - media["encoded"]
        if not one.setup.scenario.encoder_gpus and one.setup.scenario.pp == 1:
            batches = one.data.batches
            for start_us, stop_us, *_ in done.tolist():
                overlap = (batches.started_us < stop_us) & (batches.finished_us > start_us)
                assert not overlap.any(), "a GPU does one thing at a time"
        tables.append(done)
    together = run.data.summary["media"]
    asked = [turn.media for turn in run.setup.workload.turns if turn.media]
    assert together["requests"] == len(asked)
    assert together["contents"] == sum(len({media.digest for media in one}) for one in asked)
    assert together["prompt_tokens"] == sum(media.tokens for one in asked for media in one)
    assert together["encoded"] == sum(int(table[:, 2].sum()) for table in tables)
    assert together["encoder_busy_us"] == sum(int((table[:, 1] - table[:, 0]).sum()) for table in tables)


def at_once(run: ClusterRun) -> int:
    """Contents that were encoded at the same time, at most."""
    assert run.data.encoder is not None
    moments = [(stop, -1) for _, stop, *_ in run.data.encoder.tolist()]
    moments += [(start, 1) for start, *_ in run.data.encoder.tolist()]
    return int(np.cumsum([change for _, change in sorted(moments)]).max())


def engine_folders(folder: Path, run: ClusterRun) -> list[Path]:
    return [folder / "engines" / str(engine) for engine in range(len(run.engines))]


# --------------------------------------------------------------------------------------------------------------- ranks

caches = st.sampled_from([{}, {"encoder_cache_tokens": 6 * TOKENS}, {"encoder_budget_tokens": 2 * TOKENS}])
workloads = st.builds(
    "gen:n={},rate={},turns={},think=lognormal:20ms:1,input=uniform:1:500,output={}".format,
    st.integers(6, 30),
    st.sampled_from([5, 40, 400]),
    st.sampled_from(["fixed:1", "uniform:1:2"]),
    st.sampled_from(["fixed:1", "uniform:1:30"]),
)


@settings(deadline=None, max_examples=8)
@given(
    workload=workloads,
    scheduler=caches,
    attention_dp=st.sampled_from([2, 4]),
    encoder=st.sampled_from([{}, {"encoder_gpus": 1}, {"encoder_gpus": 3}, {"mm_encoder_tp_mode": "data"}]),
    replicas=st.sampled_from([1, 2]),
    overlap=st.sampled_from([0, 1]),
    stages=st.sampled_from([(1, {}), (2, {}), (2, {"pp_size": 2})]),
    seed=st.integers(0, 9),
)
def test_ranks_answer_as_one_engine_and_encode_what_they_are_asked(
    tmp_path_factory: pytest.TempPathFactory,
    workload: str,
    scheduler: dict[str, Any],
    attention_dp: int,
    encoder: dict[str, Any],
    replicas: int,
    overlap: int,
    stages: tuple[int, dict[str, int]],
    seed: int,
) -> None:
    if attention_dp == 4 and "mm_encoder_tp_mode" in encoder:
        encoder = {}  # a rank has one GPU
    common: dict[str, Any] = {"workload": workload, "seed": seed, "tp": 4, "ep": 4}
    base = scenario(
        **common,
        **encoder,
        attention_dp=attention_dp,
        rank_schedulers=True,
        pp=stages[0],
        settings={**scheduler, **stages[1], "overlap_depth": overlap},
    )
    folder = tmp_path_factory.mktemp("ranks")
    run = simulate_cluster(
        assemble_cluster(ClusterScenario(base=base, replicas=replicas), {}), folder=folder, check_every=20
    )
    assert answers_of(engine_folders(folder, run)) == plain_answers(tmp_path_factory.mktemp("plain"), **common)
    if "media" not in run.data.summary:
        return
    assert_work_is_conserved(run, all_fit="encoder_cache_tokens" not in scheduler)
    gpus = encoder.get("encoder_gpus", 0)
    assert run.data.summary["media"]["encoder_gpus"] % max(gpus, 1) == 0
    if gpus:
        assert run.data.summary["media"]["encoder_gpus"] <= gpus * replicas
        assert at_once(run) <= gpus * replicas, "ranks of an engine share its encoder's GPUs"


@pytest.mark.parametrize("stages", [{}, {"pp": 2}, {"pp": 2, "settings": {"pp_size": 2}}], ids=str)
def test_ranks_encode_side_by_side_and_the_next_pass_waits_for_all_of_them(stages: dict[str, Any]) -> None:
    base = scenario(
        **RANKS, **stages, media="image=1x2:1280x960", workload="gen:n=16,rate=200,input=fixed:64,output=fixed:40"
    )
    run = simulate_cluster(assemble_cluster(ClusterScenario(base=base), {}), check_every=20)
    assert at_once(run) > 1
    assert run.data.encoder is not None
    for one in run.engines:  # all run every pass, so no pass begins while any rank encodes
        batches = one.data.batches
        for start_us, stop_us, *_ in run.data.encoder.tolist():
            assert not ((batches.started_us >= start_us) & (batches.started_us < stop_us)).any()


def test_a_rank_has_the_encoder_on_its_own_gpus() -> None:
    """On four GPUs a rank has it whole; of two ranks with two GPUs, each has it split, or whole on both GPUs."""
    setups = {
        (ranks, mode): assemble_cluster(
            ClusterScenario(base=scenario(**{**RANKS, "attention_dp": ranks}, mm_encoder_tp_mode=mode)), {}
        ).engines[0]
        for ranks, mode in ((4, "weights"), (2, "weights"), (2, "data"))
    }
    costs = {}
    for key, setup in setups.items():
        assert setup.encoding is not None
        costs[key] = setup.encoding.cost
    whole = costs[4, "weights"].encoders.weights_bytes
    assert {key: (cost.tp, cost.weights_bytes()) for key, cost in costs.items()} == {
        (4, "weights"): (1, whole),
        (2, "weights"): (2, -(-whole // 2)),
        (2, "data"): (2, whole),
    }
    text = assemble_cluster(ClusterScenario(base=scenario(**RANKS, media=None)), {}).engines[0].kv
    seen = setups[4, "weights"].kv
    assert text is not None
    assert seen is not None
    assert seen.weights_bytes == text.weights_bytes + whole
    with pytest.raises(ConfigError, match=r"but a rank has one: `tp` is 4, `attention_dp` 4\nhint: leave it out"):
        assemble_cluster(ClusterScenario(base=scenario(**RANKS, mm_encoder_tp_mode="data")), {})


def test_ranks_report_where_they_encode() -> None:
    run = simulate_cluster(assemble_cluster(ClusterScenario(base=scenario(**RANKS)), {}))
    assert any("each rank's GPUs, for its own requests" in line for line in run.remarks())


# -------------------------------------------------------------------------------------------------------------- stages


def staged(folder: Path | None = None, check_every: int = 0, **fields: Any) -> Run:
    return simulate(assemble(scenario(**{"pp": 2, **fields}), {}), folder=folder, check_every=check_every)


def first_stage_spans(run: Run) -> list[tuple[int, int]]:
    """When the first stage ran a batch; of an engine with microbatches, whose device notes it."""
    assert run.data.stages is not None
    return list(zip(run.data.stages.start_us[:, 0].tolist(), run.data.stages.stop_us[:, 0].tolist(), strict=True))


@settings(deadline=None, max_examples=8)
@given(
    workload=workloads,
    scheduler=caches,
    layout=st.sampled_from(
        [{"pp": 2}, {"pp": 3}, {"pp": 2, "tp": 2}, {"pp": 2, "tp": 2, "mm_encoder_tp_mode": "data"}]
    ),
    microbatches=st.booleans(),
    encoder_gpus=st.sampled_from([0, 0, 1]),
    seed=st.integers(0, 9),
)
def test_stages_answer_as_one_engine_and_the_first_one_encodes(
    tmp_path_factory: pytest.TempPathFactory,
    workload: str,
    scheduler: dict[str, Any],
    layout: dict[str, Any],
    microbatches: bool,
    encoder_gpus: int,
    seed: int,
) -> None:
    if "mm_encoder_tp_mode" in layout:
        encoder_gpus = 0
    common: dict[str, Any] = {"workload": workload, "seed": seed}
    pp_size = {"pp_size": layout["pp"]} if microbatches else {}
    folder = tmp_path_factory.mktemp("stages")
    run = staged(folder, 20, **common, **layout, encoder_gpus=encoder_gpus, settings={**scheduler, **pp_size})
    assert answers_of([folder]) == plain_answers(tmp_path_factory.mktemp("plain"), **common)
    media = run.data.summary.get("media")
    if media is None:
        return
    assert run.data.encoder is not None
    assert int(run.data.encoder[:, 2].sum()) == media["encoded"]
    assert int(run.data.encoder[:, 3].sum()) == media["encoded_tokens"]
    if "encoder_cache_tokens" not in scheduler:
        assert media["encoded"] == len({one.digest for turn in run.setup.workload.turns for one in turn.media})
    if microbatches and not encoder_gpus:
        for start_us, stop_us, *_ in run.data.encoder.tolist():
            assert not any(start < stop_us - 1 and stop > start_us + 1 for start, stop in first_stage_spans(run))


def test_later_stages_go_on_while_the_first_one_encodes() -> None:
    run = staged(
        media="image=0.3x2:1280x960",
        workload="gen:n=40,rate=30,input=fixed:300,output=fixed:60",
        settings={"pp_size": 2},
    )
    assert run.data.encoder is not None
    assert run.data.stages is not None
    later = zip(run.data.stages.start_us[:, 1].tolist(), run.data.stages.stop_us[:, 1].tolist(), strict=True)
    encodes = [(start, stop) for start, stop, *_ in run.data.encoder.tolist()]
    assert any(start < stop_us and stop > start_us for start, stop in later for start_us, stop_us in encodes)


def test_the_first_stage_has_the_encoder_beside_its_layers() -> None:
    """The first stage then has less room for KV; the room of the others is unchanged."""
    seen, apart, text = (staged(**fields).setup for fields in ({}, {"encoder_gpus": 1}, {"media": None}))
    assert seen.encoding is not None
    encoders, kvs = seen.encoding.cost.encoders, [one.kv for one in (seen, apart, text)]
    weights = [kv.stages_weights_bytes for kv in kvs if kv is not None]
    left = [kv.stages_left_bytes for kv in kvs if kv is not None]
    assert weights[0] == (weights[2][0] + encoders.weights_bytes, weights[2][1])
    assert weights[1] == weights[2]
    cache = 16_384 * encoders.embedding_bytes
    assert left[2][0] - left[1][0] == cache
    assert left[2][0] - left[0][0] == cache + encoders.weights_bytes
    assert left[0][1] == left[1][1] == left[2][1]
    assert seen.config.pages < text.config.pages
    with pytest.raises(
        CapacityError, match=r"leaves in its first stage .* GB for KV; its encoder takes 1\.1 GB of them"
    ):
        staged(settings={"encoder_cache_tokens": 40_000_000})


# --------------------------------------------------------------------------------------------------------------- roles


def roles(counts: tuple[int, int], scheduler: dict[str, Any], **fields: Any) -> ClusterSetup:
    """The roles of this number of prefill and decode engines."""
    groups = tuple(
        EngineGroup(count=number, gpu="h200", settings={"role": role, **scheduler})
        for role, number in zip(("prefill", "decode"), counts, strict=True)
    )
    return assemble_cluster(ClusterScenario(base=scenario(**fields), engines=groups), {})


def of_role(run: ClusterRun, role: str) -> list[int]:
    return [engine for engine, one in enumerate(run.setup.engines) if one.config.role == role]


@settings(deadline=None, max_examples=8)
@given(
    workload=workloads,
    scheduler=caches,
    sides=st.sampled_from([(1, 1), (2, 1), (1, 2)]),
    layout=st.sampled_from(
        [
            {},
            {"encoder_gpus": 1},
            {"pp": 2},
            {"tp": 2, "attention_dp": 2, "rank_schedulers": True},
            {"tp": 2, "mm_encoder_tp_mode": "data"},
        ]
    ),
    allocation=st.sampled_from(["early", "prefill_complete"]),
    seed=st.integers(0, 9),
)
def test_prefill_and_decode_engines_answer_as_one_and_prefill_engines_encode(
    tmp_path_factory: pytest.TempPathFactory,
    workload: str,
    scheduler: dict[str, Any],
    sides: tuple[int, int],
    layout: dict[str, Any],
    allocation: str,
    seed: int,
) -> None:
    common: dict[str, Any] = {"workload": workload, "seed": seed}
    setup = roles(sides, {**scheduler, "transfer_allocation": allocation}, **common, **layout)
    folder = tmp_path_factory.mktemp("roles")
    run = simulate_cluster(setup, folder=folder, check_every=20)
    told = [engine_folders(folder, run)[engine] for engine in of_role(run, "decode")]
    assert answers_of(told) == plain_answers(tmp_path_factory.mktemp("plain"), **common)
    if "media" in run.data.summary:
        assert_work_is_conserved(run, all_fit="encoder_cache_tokens" not in scheduler)
        for engine in of_role(run, "decode"):
            assert "media" not in run.engines[engine].data.summary, "KV comes with placeholders only"


def test_a_decode_engine_encodes_what_it_computes_itself(tmp_path: Path) -> None:
    """The prompt of a request that is retracted there is computed again, and so are its media."""
    setup = roles(
        (1, 1),
        {"retract_every": 5, "pages": 1500},
        media="image=1:640x480/4",
        workload="gen:n=12,rate=100,input=fixed:200,output=fixed:40",
    )
    run = simulate_cluster(setup, folder=tmp_path, check_every=20)
    told = answers_of(engine_folders(tmp_path, run)[1:])
    assert len(told) == 12
    assert {reason for reason, _ in told.values()} == {"length"}
    prefill, decode = (one.data.summary["media"] for one in run.engines)
    together = run.data.summary["media"]
    assert decode["encoded"] == decode["contents"] > 0
    assert decode["reused"] == decode["requests"] == 0
    assert prefill["encoded"] == 4
    assert together["encoded"] == prefill["encoded"] + decode["encoded"]
    assert together["requests"] == 12
    assert together["reused"] == prefill["reused"] == 8


# ------------------------------------------------------------------------------------------- cancellations and failures


def refusing(monkeypatch: pytest.MonkeyPatch, one_in: int) -> set[bytes]:
    """Encoders that fail for some contents; returns the contents that they were ordered."""
    refused: set[bytes] = set()
    take = EncoderLane.take

    def fail(self: EncoderLane, now_us: int) -> MediaEncoded:
        event = take(self, now_us)
        if event.digest[0] % one_in:
            return event
        refused.add(event.digest)
        return MediaEncoded(now_us, event.digest, "no such picture", event.generation)

    monkeypatch.setattr(EncoderLane, "take", fail)
    return refused


def made(setup: ClusterSetup) -> Any:
    """The cluster of a setup, not run yet."""
    journals: list[Any] = [NoJournal()] * len(setup.engines)
    if setup.hands_over:
        return HandoverCluster(setup, journals, (NoRouterJournal(), NoRouterJournal()), check_every=25)
    return RankCluster(setup, journals, NoRouterJournal(), check_every=25)


def cancelling(cluster: Any, after_us: Sequence[int]) -> Counter[str]:
    """Cancel requests this long after their arrival, the n-th after the n-th duration. Counts the outcomes."""
    happened: Counter[str] = Counter()
    waits = {turn.label: us for turn, us in zip(cluster.setup.workload.turns, cycle(after_us), strict=False)}
    route = cluster.clock._route

    def leave(request_id: int) -> None:
        left = False
        for feed in cluster.feeds:
            turn = feed.open_turns.get(request_id)
            if turn is not None:
                feed.add(RequestCancelled(int(cluster.env.now), request_id), turn)
                left = True
        happened["left" if left else "had ended"] += 1

    def routed(event: RequestArrived, turn: Any) -> None:
        route(event, turn)
        if waits[turn.label]:
            cluster.clock.at(event.time_us + waits[turn.label], lambda: leave(event.request_id))

    cluster.clock._route = routed
    return happened


def assert_no_request_is_lost(cluster: Any) -> None:
    """All requests have ended, and nothing is held, encoded or kept for any."""
    for host in cluster.clock.hosts:
        engine = host.engine
        assert not engine.requests
        assert not engine.media.pins
        assert not engine.media.room_queue
        assert not engine.media.queued
        assert not engine.media.deferred
        assert all(encoding.ready for encoding in engine.media.encodings.values()), "every order was answered"
        assert host.encoder is not None
        assert not host.encoder.waiting
        assert host.encoder.next_us > 2**61
        invariants.check(engine)


@settings(deadline=None, max_examples=8)
@given(
    scheduler=caches,
    encoder=st.sampled_from([{}, {"encoder_gpus": 1}]),
    one_in=st.sampled_from([2, 4, 1000]),
    after_us=st.lists(st.sampled_from([0, 0, 1, 3_000, 12_000, 60_000, 400_000]), min_size=1, max_size=5),
    seed=st.integers(0, 9),
)
def test_no_request_on_a_rank_is_lost_by_leaving_or_by_media_that_cannot_be_encoded(
    scheduler: dict[str, Any], encoder: dict[str, Any], one_in: int, after_us: list[int], seed: int
) -> None:
    base = scenario(**RANKS, **encoder, settings=scheduler, seed=seed)
    setup = assemble_cluster(ClusterScenario(base=base), {})
    with pytest.MonkeyPatch.context() as patch:
        refused = refusing(patch, one_in)
        cluster = made(setup)
        cancelling(cluster, after_us)
        cluster.run()
    assert_no_request_is_lost(cluster)
    data = cluster.result(False, 0.0).data
    ends = Counter(data.requests.finish_reason.tolist())
    assert sum(ends.values()) == 24
    assert set(ends) <= {"length", "cancelled", "rejected_media"}
    needing = sum(any(media.digest in refused for media in turn.media) for turn in setup.workload.turns)
    assert ends["rejected_media"] <= needing
    if not any(after_us):
        assert ends["rejected_media"] == needing


@example(  # the router received an end after a later arrival
    scheduler={},
    failure="fail",
    allocation="early",
    ranks={"tp": 2, "attention_dp": 2, "rank_schedulers": True},
    one_in=2,
    after_us=[0, 0, 1],
    seed=7,
)
@settings(deadline=None, max_examples=8)
@given(
    scheduler=caches,
    failure=st.sampled_from(["fail", "recompute"]),
    allocation=st.sampled_from(["early", "prefill_complete"]),
    ranks=st.sampled_from([{}, {"tp": 2, "attention_dp": 2, "rank_schedulers": True}]),
    one_in=st.sampled_from([2, 4, 1000]),
    after_us=st.lists(st.sampled_from([0, 0, 1, 3_000, 12_000, 60_000, 400_000]), min_size=1, max_size=5),
    seed=st.integers(0, 9),
)
def test_no_request_between_engines_is_lost_by_leaving_or_by_media_that_cannot_be_encoded(
    scheduler: dict[str, Any],
    failure: str,
    allocation: str,
    ranks: dict[str, Any],
    one_in: int,
    after_us: list[int],
    seed: int,
) -> None:
    about = {**scheduler, "transfer_failure": failure, "transfer_allocation": allocation}
    setup = roles((1, 1), about, seed=seed, **ranks)
    with pytest.MonkeyPatch.context() as patch:
        refused = refusing(patch, one_in)
        cluster = made(setup)
        cancelling(cluster, after_us)
        cluster.run()
    assert_no_request_is_lost(cluster)
    assert not cluster.fabric.rooms
    ends = Counter(cluster.result(False, 0.0).data.requests.finish_reason.tolist())
    assert sum(ends.values()) == 24
    assert set(ends) <= {"length", "cancelled", "transfer", "rejected_media"}
    if not any(after_us):
        needing = sum(any(media.digest in refused for media in turn.media) for turn in setup.workload.turns)
        assert ends["transfer" if failure == "fail" else "rejected_media"] == needing


# ---------------------------------------------------------------------------------------------------------- run folders


def invoked(command: Any, words: Sequence[str]) -> str:
    done = CliRunner().invoke(command, list(words))
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.mark.parametrize(
    "layout",
    [
        ["--attention-dp", "2", "--rank-schedulers"],
        ["--pp", "2", "--pp-size", "2", "--replicas", "2"],
        ["--attention-dp", "2", "--rank-schedulers", "--pp", "2", "--pp-size", "2"],
        ["--prefill-engines", "1", "--decode-engines", "1"],
    ],
    ids=["ranks", "stages", "ranks in stages", "roles"],
)
def test_run_folder_replays_and_explains_waits_for_media(layout: list[str], tmp_path: Path) -> None:
    words = f"--model {MODEL} --gpu h200 --tp 2 --no-intervals --no-report --no-trace --media image=1:640x480/3".split()
    words += ["--workload", "gen:n=8,rate=40,input=fixed:64,output=fixed:8", *layout]
    shown = invoked(simulate_command, [*words, "--out", str(tmp_path)])
    assert "embedding cache hits" in shown
    assert "router: equal" in invoked(journal, ["verify", str(tmp_path)])
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    again = invoked(simulate_command, [*shlex.split(metrics["about"]["command"])[2:], "--json", "--no-intervals"])
    assert json.loads(again)["media"] == metrics["media"]
    asked = tmp_path / "engines" / "0" if "--prefill-engines" in layout else tmp_path
    told = invoked(explain, [str(asked), "--request", "0"])
    assert "its media were being encoded" in told
    assert "300 tokens: encoded from" in told
