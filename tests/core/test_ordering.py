"""The waiting queue: policies as functions, data remembered from a pass, the bypass limit, policies of packages."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.core.contract.config import SCHEDULE_POLICIES, SchedConfig
from lockstep.core.contract.errors import ConfigError, PolicyError
from lockstep.core.contract.events import (
    BatchFinished,
    LaneReady,
    PromptSpan,
    RequestAdmitted,
    RequestArrived,
    TokenIds,
    TokenRuns,
    UpdateWeights,
)
from lockstep.core.journal import snapshot
from lockstep.core.requests.rules import LPM_FALLBACK_WAITING
from lockstep.core.scheduler import ordering
from lockstep.core.scheduler.engine import Engine
from lockstep.core.scheduler.ordering import POLICIES, Ordering, Policy, WaitingQueue
from tests.support import guide
from tests.support.driver.actions import CONTROLS, Action
from tests.support.driver.run import run_actions


def waiting_engine(count: int, **settings_: object) -> Engine:
    """An engine in which r0 runs and this number of requests wait: prompts of 8 to 11 tokens, with 2 to 5 outputs."""
    config: dict[str, object] = {"page_size": 2, "pages": 4096, "overlap_depth": 0, "max_running_requests": 1}
    engine = Engine(SchedConfig(**(config | settings_)))  # type: ignore[arg-type]
    for i in range(count + 1):
        prompt = TokenRuns((1 + i % 3, 8 + i % 4))
        engine.step(RequestArrived(time_us=i, request_id=i, prompt=prompt, max_new_tokens=2 + i % 4))
        if not i:
            engine.step(LaneReady(0))
    return engine


def test_every_column_of_the_waiting_queue_is_in_line_order() -> None:
    values = {
        "request_ids": ("request_id", [3, 9, 4, 7, 5]),
        "prompt_tokens": ("prompt_tokens", [30, 90, 40, 70, 50]),
        "max_new_tokens": ("max_new_tokens", [31, 91, 41, 71, 51]),
        "priority": ("priority", [1, None, 4, 7, 5]),
        "tenant": ("tenant", ["c", "i", "d", "g", "e"]),
        "routing_key": ("routing_key", ["x", "", "y", "z", "w"]),
        "output_tokens": ("outputs", [0, 8, 0, 2, 0]),
        "waiting_since_us": ("waiting_since_us", [100, 200, 300, 400, 500]),
        "bypassed": ("bypassed", [5, 4, 0, 1, 2]),
        "admitted_before": ("cached_tokens", [-1, 0, 16, -1, -1]),
        "prefilled_since_arrival": ("prefilled_before", [10, 20, 30, 40, 50]),
    }
    names, columns = [name for name, _ in values.values()], [column for _, column in values.values()]
    requests: Any = [SimpleNamespace(**dict(zip(names, row, strict=True))) for row in zip(*columns, strict=True)]
    scheduler: Any = SimpleNamespace(config=SchedConfig(), now_us=1000)
    line = WaitingQueue(requests, scheduler, prefilled_tokens=100)
    expected = {column: tuple(of) for column, (_, of) in values.items()}
    expected["admitted_before"] = (False, True, True, False, False)
    expected["prefilled_since_arrival"] = (90, 80, 70, 60, 50)
    expected["waited_us"] = (900, 800, 700, 600, 500)
    assert {column: getattr(line, column) for column in expected} == expected


def order_of(engine: Engine) -> list[int]:
    """The order in which a pass would consider the waiting requests."""
    order = [request.request_id for request in engine.ordering.turn(engine)]
    engine.ordering.close()
    return order


def bypassed_to_the_limit(engine: Engine, request_id: int) -> None:
    """Let this waiting request leave the queue for an instant in which later ones bypass it as often as they may."""
    request = engine.requests[request_id]
    assert engine.config.bypass_limit is not None
    request.bypassed = engine.config.bypass_limit
    engine.add_prerequisite(request)
    engine.leave_queue(request)
    engine.join_queue(request)


def counted(monkeypatch: pytest.MonkeyPatch, name: str) -> list[int]:
    """A list that grows by one with every call of a policy."""
    calls: list[int] = []
    policy = POLICIES[name]

    def counting(line: WaitingQueue) -> object:
        calls.append(len(line))
        return policy(line)

    monkeypatch.setitem(POLICIES, name, counting)
    return calls


# ---- policies


def test_there_is_a_function_for_every_name() -> None:
    assert tuple(POLICIES) == SCHEDULE_POLICIES
    assert all(policy.__doc__ for policy in POLICIES.values())


@pytest.mark.parametrize("name", SCHEDULE_POLICIES)
@pytest.mark.parametrize("waiting", [1, 2, 7, 129])
def test_a_policy_names_every_position_once(name: str, waiting: int) -> None:
    engine = waiting_engine(waiting, schedule_policy=name)
    assert sorted(order_of(engine)) == list(range(1, waiting + 1))


@pytest.mark.parametrize("name", ["lpm", "hrrn"])
def test_a_long_line_is_not_matched(name: str) -> None:
    engine = waiting_engine(LPM_FALLBACK_WAITING + 1, schedule_policy=name)
    assert order_of(engine) == list(range(1, LPM_FALLBACK_WAITING + 2))
    assert all(request.matched is None for request in engine.waiting)


def test_a_shuffle_is_a_function_of_seed_and_id() -> None:
    orders = {seed: order_of(waiting_engine(40, schedule_policy="random", schedule_seed=seed)) for seed in range(4)}
    assert orders[1] == order_of(waiting_engine(40, schedule_policy="random", schedule_seed=1))
    assert len({tuple(order) for order in orders.values()}) == 4
    fewer = order_of(waiting_engine(30, schedule_policy="random", schedule_seed=1))
    assert fewer == [request_id for request_id in orders[1] if request_id <= 30]


def test_a_shuffle_favours_no_request() -> None:
    """Over many seeds each of eight comes first about equally often."""
    firsts = [int(ordering._mixed(range(8), seed).argmin()) for seed in range(4000)]
    counts = np.bincount(firsts, minlength=8)
    assert counts.min() > 400, counts
    assert counts.max() < 600, counts


# ---- remembered data


@pytest.mark.parametrize("name", [name for name in SCHEDULE_POLICIES if name != "fcfs"])
def test_nothing_is_ordered_again_while_nothing_has_changed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = counted(monkeypatch, name)
    engine = waiting_engine(5, schedule_policy=name)
    first = order_of(engine)
    calls.clear()
    for time_us in range(10, 15):
        engine.now_us = time_us
        assert order_of(engine) == first
    assert not calls
    engine.step(RequestArrived(time_us=20, request_id=99, prompt=TokenRuns((5, 5)), max_new_tokens=3))
    order_of(engine)
    assert calls == [6]


def test_a_policy_that_looked_at_the_clock_is_asked_when_time_has_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    def longest_wait(line: WaitingQueue) -> list[int]:
        calls.append(max(line.waited_us))
        return list(range(len(line)))

    calls: list[int] = []
    monkeypatch.setitem(POLICIES, "lof", longest_wait)
    engine = waiting_engine(3, schedule_policy="lof")
    calls.clear()
    order_of(engine)
    order_of(engine)
    engine.now_us += 7
    order_of(engine)
    assert calls == [2, 9]


def test_only_requests_whose_part_of_the_tree_changed_are_matched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = waiting_engine(0, schedule_policy="lpm")
    radix = engine.memory.radix

    def tokens(*ids: int) -> bytes:
        return np.array(ids, np.int32).tobytes()

    for first in (10, 20):
        radix.insert("", tokens(first, first, first, first), engine.memory.pool.alloc(2))
    for i, prompt in enumerate([(10, 10, 10, 10, 7, 7, 1), (20, 20, 20, 20, 7, 7, 1), (10, 10, 9, 9, 1)], start=1):
        arrived = RequestArrived(time_us=0, request_id=i, prompt=TokenIds(tokens(*prompt)), max_new_tokens=1)
        engine.step(arrived)
    assert order_of(engine) == [1, 2, 3]  # 2, 2 and 1 pages are cached of them

    found: list[bytes] = []
    find = type(radix).find

    def noting(radix_: object, namespace: str, wanted: bytes, *rest: object) -> object:
        found.append(wanted)
        return find(radix_, namespace, wanted, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(type(radix), "find", noting)
    radix.insert("", tokens(30, 30), engine.memory.pool.alloc(1))
    assert order_of(engine) == [1, 2, 3]
    assert not found
    radix.insert("", tokens(20, 20, 20, 20, 7, 7), engine.memory.pool.alloc(3))
    assert order_of(engine) == [2, 1, 3]
    assert found == [tokens(20, 20, 20, 20, 7, 7, 1)]


def test_a_refresh_of_cached_prefixes_does_not_hide_that_they_have_changed() -> None:
    engine = waiting_engine(0, schedule_policy="lpm")
    radix = engine.memory.radix
    long, short = (np.array(ids, np.int32).tobytes() for ids in ((10, 10, 10, 10), (20, 20)))
    radix.insert("", short, engine.memory.pool.alloc(1))
    for i, prompt in enumerate((long, short), start=1):
        prompt += np.array((7, 7, 1), np.int32).tobytes()
        engine.step(RequestArrived(time_us=0, request_id=i, prompt=TokenIds(prompt), max_new_tokens=1))
    assert order_of(engine) == [2, 1]
    radix.insert("", long, engine.memory.pool.alloc(2))
    engine.ordering.refresh(radix)
    assert order_of(engine) == order_of(snapshot.restore(snapshot.dump(engine))) == [1, 2]


def test_an_order_is_kept_while_every_cached_prefix_ends_where_it_did(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = counted(monkeypatch, "lpm")
    engine = waiting_engine(0, schedule_policy="lpm")
    radix, alloc = engine.memory.radix, engine.memory.pool.alloc
    first, second = (np.array([one] * 4, np.int32).tobytes() for one in (10, 20))
    other, rest = (np.array([one] * 2, np.int32).tobytes() for one in (8, 7))
    radix.insert("", first, alloc(2))
    for i, prompt in enumerate((first, second), start=1):
        engine.step(RequestArrived(time_us=0, request_id=i, prompt=TokenIds(prompt + rest + other), max_new_tokens=1))
    assert order_of(engine) == [1, 2]
    calls.clear()
    radix.insert("", other, alloc(1))
    assert order_of(engine) == [1, 2]
    radix.insert("", first + other, alloc(3))  # below the prefix of request 1, which goes on with other tokens
    assert order_of(engine) == [1, 2]
    assert not calls
    radix.insert("", second + rest, alloc(3))
    assert order_of(engine) == [2, 1]
    assert calls == [2]


@pytest.mark.parametrize("deduplication", ["off", "last", "defer"])
@pytest.mark.parametrize("name", SCHEDULE_POLICIES)
def test_the_first_requests_are_those_of_a_pass(name: str, deduplication: str) -> None:
    """Also if one that is not at the head of the queue must not be bypassed any more."""
    engine = waiting_engine(4, schedule_policy=name, prefix_deduplication=deduplication, bypass_limit=2)
    bypassed_to_the_limit(engine, 3)
    found = [request.request_id for request in engine.ordering.first(engine, 2)]
    of_a_pass = order_of(engine)  # it ends behind a request that must not be bypassed and is not admitted
    assert found[: len(of_a_pass)] == of_a_pass[:2]


def test_a_restored_engine_considers_first_what_must_not_be_bypassed_any_more() -> None:
    engine = waiting_engine(4, schedule_policy="lof", bypass_limit=2)
    bypassed_to_the_limit(engine, 1)
    assert order_of(engine) == order_of(snapshot.restore(snapshot.dump(engine))) == [1]


def test_a_restored_engine_orders_alike_without_stored_orders() -> None:
    for name in SCHEDULE_POLICIES:
        engine = waiting_engine(20, schedule_policy=name)
        expected = order_of(engine)
        assert order_of(snapshot.restore(snapshot.dump(engine))) == expected


# ---- bypass


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**32),
    limit=st.sampled_from([None, 0, 1, 2, 3, 7]),
    policy=st.sampled_from([*SCHEDULE_POLICIES, "newest-first"]),
    deduplication=st.sampled_from(["off", "last", "defer"]),
)
def test_no_request_is_bypassed_more_often_than_the_limit(
    seed: int, limit: int | None, policy: str, deduplication: str
) -> None:
    """The driver counts bypasses from decided events, and holds the count and the limit after every step."""
    rng = random.Random(seed)
    config = SchedConfig(
        page_size=4,
        pages=80,
        schedule_policy="lof" if policy == "newest-first" else policy,
        prefix_deduplication=deduplication,  # type: ignore[arg-type]
        bypass_limit=limit,
        max_running_requests=rng.choice([1, 2, 6]),
        overlap_depth=rng.choice([0, 1, 2]),
        chunked_prefill_size=rng.choice([None, 16]),
        retracted_requeue=rng.choice(["tail", "front"]),
        schedule_conservativeness=0.02,
    )
    arrive = [
        ("arrive", 1 + 1000 * rng.randrange(2), rng.randint(1, 60), rng.randint(1, 40), {"priority": rng.randint(0, 3)})
        for _ in range(60)
    ]
    actions = [
        rng.choice([arrive[i % 60], ("ready",), ("ready",), ("finish",), ("finish",), ("cancel", i), ("snapshot",)])
        if rng.random() < 0.97
        else ("control", rng.choice([1, 2, 4]))
        for i in range(250)
    ]
    with pytest.MonkeyPatch.context() as patch:
        if policy == "newest-first":
            patch.setitem(POLICIES, "lof", lambda line: range(len(line) - 1, -1, -1))
        run_actions(config, actions, replay=True)


@settings(max_examples=25)
@given(seed=st.integers(0, 2**32), policy=st.sampled_from(["lof", "spf", "priority"]))
def test_no_request_is_bypassed_more_often_because_its_media_were_encoded_again(seed: int, policy: str) -> None:
    """New weights take requests out of the waiting queue until their image is encoded once more."""
    rng = random.Random(seed)
    config = SchedConfig(
        page_size=4,
        pages=80,
        schedule_policy=policy,
        bypass_limit=1,
        max_running_requests=rng.choice([1, 2]),
        overlap_depth=0,
        encoder_cache_tokens=8,
        schedule_conservativeness=0.02,
    )
    image = PromptSpan(start=0, stop=1, kind="image", digest=bytes(32), encoder_tokens=2)
    new_weights = [CONTROLS.index(UpdateWeights(0, "w", mode)) for mode in ("retract", "in_place")]
    actions: list[Action] = []
    for i in range(200):
        spans = (image,) if rng.random() < 0.5 else ()
        others = {"priority": rng.randint(0, 3), "spans": spans}
        arrive: Action = ("arrive", 1 + 1000 * i, rng.randint(1, 8), rng.randint(1, 12), others)
        update: Action = ("control", rng.choice(new_weights))
        may_come: list[Action] = [arrive, ("ready",), ("finish",), ("encode", False), ("order_done", ""), update]
        actions += rng.choices(may_come, weights=[4, 6, 5, 2, 2, 1])
    run_actions(config, actions)


def test_a_request_that_waits_for_its_encoding_again_is_counted_at_its_place_in_the_queue() -> None:
    """A sample is retracted, its image has left the encoder's cache, and another one occupies the encoder to 18 us."""
    image = PromptSpan(start=1, stop=2, kind="image", digest=bytes(32), encoder_tokens=3)
    other = PromptSpan(start=1, stop=2, kind="image", digest=bytes(32), encoder_tokens=5)
    config = SchedConfig(page_size=64, pages=8, retract_every=3, encoder_cache_tokens=8)
    actions: list[Action] = [
        ("arrive", 1, 2, 119, {"parallel_samples": 4, "spans": (image,)}),
        ("encode", False),
        ("ready",),
        ("ready",),
        ("arrive", 1001, 2, 1, {"deadline_in_us": 18, "spans": (other,)}),
        *[("finish",), ("ready",)] * 2,
        ("finish",),
        ("wait", 25),
        ("ready",),
    ]
    driver = run_actions(config, actions, replay=True)
    assert "retracted (forced)" in driver.marks


def test_samples_that_share_a_prompt_in_its_own_batch_join_behind_requests_admitted_with_it() -> None:
    config = SchedConfig(page_size=1, pages=150, same_step_sharing=True)
    actions: list[Action] = [("arrive", 1001, 2, 107, {"parallel_samples": 4}), ("arrive", 1, 1, 0, {})]
    driver = run_actions(config, actions)
    assert "samples follow" in driver.marks


def test_a_stream_of_new_requests_starves_none_and_without_a_limit_does() -> None:
    def admissions_before_r1(limit: int | None) -> int:
        """Longest output first; r1 requests one token, and a request for two tokens always waits behind it."""
        engine = Engine(
            SchedConfig(
                page_size=2, pages=64, overlap_depth=0, schedule_policy="lof", bypass_limit=limit, max_prefill_tokens=2
            )
        )
        admitted: list[int] = []
        for i in range(1, 100):
            engine.step(
                RequestArrived(time_us=0, request_id=i, prompt=TokenRuns((i, 1)), max_new_tokens=1 if i == 1 else 2)
            )
            if i > 1:
                step = engine.step(LaneReady(0))
                admitted += [event.request_id for event in step.decided if isinstance(event, RequestAdmitted)]
                plan = step.launched()
                if plan is not None:
                    tokens = np.zeros(len(plan.sample_rows), np.int32).tobytes()
                    engine.step(BatchFinished(0, plan.batch_id, tokens))
        return admitted.index(1) if 1 in admitted else -1

    assert admissions_before_r1(7) == 7
    assert admissions_before_r1(None) == -1


# ---- settings


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        (
            {"schedule_policy": "dfs-weight", "radix_cache": False},
            "`schedule_policy` dfs-weight orders by cached prefix",
        ),
        ({"schedule_policy": "best"}, "`schedule_policy` must be one of fcfs, lpm, .*fair, got `best`"),
        ({"schedule_policy": "lof", "schedule_policy_version": "2"}, "`schedule_policy_version` is 2, but"),
        ({"schedule_seed": -1}, "`schedule_seed` must be 0 to"),
        ({"prefix_deduplication": "first"}, "`prefix_deduplication` must be off, last or defer, got `first`"),
        ({"prefix_deduplication": "defer", "radix_cache": False}, "`prefix_deduplication` defer waits for a prefix"),
        ({"bypass_limit": -1}, "`bypass_limit` must be 0"),
    ],
)
def test_settings_that_cannot_work_are_refused(given_: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SchedConfig(**given_)  # type: ignore[arg-type]


# ---- policies of installed packages


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder whose packages count as installed, and whose modules are forgotten afterwards."""
    before = sys.path.copy()
    sys.path[:] = [str(tmp_path), *(path for path in before if "lockstep_fair" not in path)]
    sys.modules.pop("lockstep_fair", None)
    yield tmp_path
    sys.path[:] = before
    sys.modules.pop("lockstep_fair", None)


def test_the_guide_runs_as_printed() -> None:
    engine = waiting_engine(0, schedule_policy="fair", max_running_requests=10)
    assert engine.config.schedule_policy_version == "1.0"
    for i, tenant in enumerate("aaabbc", start=1):
        prompt = TokenRuns((i, 4))
        engine.step(RequestArrived(time_us=1, request_id=i, prompt=prompt, max_new_tokens=3, tenant=tenant))
    assert order_of(engine) == [1, 4, 6, 2, 5, 3]


def test_every_column_of_the_guide_exists() -> None:
    names = set(vars(WaitingQueue)) | set(vars(ordering.RequestColumns))
    rows = [line for line in guide.GUIDE.read_text().splitlines() if line.startswith("| `")]
    told = {name.strip("`") for row in rows for name in row.split("|")[1].replace(" ", "").split(",")}
    assert told <= names
    columns = {name for name in names if not name.startswith("_")} - {"config", "running", "now_us"}
    assert told == columns


def test_another_version_is_refused(folder: Path) -> None:
    guide.install(folder, version="2.0")
    config = SchedConfig(schedule_policy="fair")
    assert config.schedule_policy_version == "2.0"
    recorded = msgspec.json.decode(msgspec.json.encode(config).replace(b'"2.0"', b'"1.0"'), type=SchedConfig)
    with pytest.raises(ConfigError, match=r"`schedule_policy` fair is required in version 1.0, but lockstep-fair 2.0"):
        Engine(recorded)


def test_a_recorded_policy_can_be_read_without_being_installed(folder: Path) -> None:
    recorded = SchedConfig(schedule_policy="fair", schedule_policy_version="1.0")
    assert msgspec.json.decode(msgspec.json.encode(recorded), type=SchedConfig) == recorded
    with pytest.raises(ConfigError, match=r"fair is required in version 1.0, but no installed package provides it"):
        Engine(recorded)


def test_two_packages_with_one_policy_are_refused(folder: Path) -> None:
    guide.install(folder)
    guide.install(folder, name="lockstep-unfair", version="3.1")
    with pytest.raises(ConfigError, match=r"fair is provided by lockstep-fair 1.0 and by lockstep-unfair 3.1"):
        SchedConfig(schedule_policy="fair")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import nothing_like_it\n", "cannot be loaded from lockstep_fair:fair: ModuleNotFoundError"),
        ("fair = 3\n", "lockstep_fair:fair is no function but int"),
    ],
)
def test_the_error_of_a_policy_that_cannot_be_loaded_has_the_reason(folder: Path, source: str, message: str) -> None:
    guide.install(folder, source=source)
    with pytest.raises(ConfigError, match=message):
        Engine(SchedConfig(schedule_policy="fair"))


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("[0, 0, 2]", r"returned \[0, 0, 2\] for 3 waiting requests; expected each position from 0 to 2 once"),
        ("[0, 1]", r"returned \[0, 1\] for 3"),
        ("[0, 1, 2, 3]", r"returned \[0, 1, 2, 3\] for 3"),
        ("['a', 'b', 'c']", r"returned \['a', 'b', 'c'\] for 3"),
        ("[0.0, 1.0, 2.0]", r"returned \[0.0, 1.0, 2.0\] for 3"),
        ("None", "returned None for 3"),
        ("[7] * 1000", r"returned \[7, 7, .*\.\.\. for 3"),
        ("line.colour", "failed on 3 waiting requests: AttributeError"),
    ],
)
def test_a_policy_that_returns_no_order_is_named(folder: Path, returned: str, message: str) -> None:
    guide.install(folder, source=f"def fair(line):\n    return {returned}\n")
    engine = Engine(SchedConfig(schedule_policy="fair"))
    for i in range(3):
        engine.step(RequestArrived(time_us=0, request_id=i, prompt=TokenRuns((1, 4)), max_new_tokens=1))
    with pytest.raises(PolicyError, match=f"policy `fair` 1.0 {message}"):
        engine.step(LaneReady(0))


def test_positions_may_come_as_an_array(folder: Path) -> None:
    guide.install(folder, source="import numpy as np\n\n\ndef fair(line):\n    return np.arange(len(line))[::-1]\n")
    assert order_of(waiting_engine(3, schedule_policy="fair")) == [3, 2, 1]


def test_a_policy_type_has_the_signature_that_the_core_calls() -> None:
    policy: Policy = ordering.fcfs
    assert list(policy(WaitingQueue([], waiting_engine(0), 0))) == []


def test_a_pass_that_deferred_nothing_for_its_prefix_is_not_tried_again() -> None:
    assert not Ordering(SchedConfig(schedule_policy="lpm", prefix_deduplication="defer")).close()
