"""Real failures that a scenario cannot show: sweeps over every value near an edge, objects in memory, two processes.

The scenarios are tests/scenarios/museum/; the table in tests/README.md lists where each failure is shown.
"""

from __future__ import annotations

import gc
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from lockstep.core.contract.commands import FinishRequest, RejectRequest
from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.errors import ConfigError
from lockstep.core.contract.events import (
    BatchFinished,
    LaneReady,
    Pause,
    RequestArrived,
    RequestRetracted,
    Resume,
    TokenRuns,
)
from lockstep.core.kv.radix import RadixCache
from lockstep.core.scheduler.engine import Engine
from tests.support.driver.actions import CONTROLS, Action
from tests.support.driver.driver import Driver
from tests.support.driver.run import run_actions

README = Path(__file__).parent / "README.md"
SCENARIOS = Path(__file__).parent / "scenarios"
PAUSE_RETRACT, RESUME = CONTROLS.index(Pause("retract")), CONTROLS.index(Resume())


def arrived(request_id: int, prompt: int, max_new: int) -> RequestArrived:
    return RequestArrived(time_us=0, request_id=request_id, prompt=TokenRuns((1, prompt)), max_new_tokens=max_new)


# ----------------------------------------------------------------------------------------------- the edge of the pool


@pytest.mark.parametrize(
    "settings",
    [
        {"overlap_depth": 0, "radix_cache": False},
        {"overlap_depth": 1, "chunked_prefill_size": 2},
        {"overlap_depth": 2, "chunked_prefill_size": None},
    ],
    ids=["plain", "chunks of a page", "depth two"],
)
def test_every_size_within_two_pages_of_the_edge_ends_or_is_rejected(settings: dict[str, object]) -> None:
    """Script 1: one request near the size of the pool, then an ordinary one, which must always be served."""
    config = SchedConfig(page_size=2, pages=4, context_tokens_max=100, **settings)
    pool = config.pool_tokens
    edge = range(pool - 4, pool + 5)
    for prompt, together in ((p, t) for p in range(1, pool + 5) for t in edge if t > p):
        asked = together - prompt
        driver = run_actions(config, [("arrive", 1, prompt, asked, {}), ("arrive", 100, 4, 4, {})])
        large, small = driver.records.values()
        room = pool + 1 - prompt  # the last token is never fed back
        assert large.ended == ("length" if room >= 1 else "rejected"), f"prompt {prompt}, {asked} output tokens"
        assert len(large.sent) == max(0, min(asked, room)), f"prompt {prompt}, {asked} output tokens"
        assert (small.ended, len(small.sent)) == ("length", 4)


@pytest.mark.parametrize("prompt", [10, *range(4090, 4100)])
def test_what_is_accepted_near_a_pool_of_4096_is_launched_at_once(prompt: int) -> None:
    """Script 1 with the numbers of the report: every accepted request is started by an empty engine."""
    config = SchedConfig(page_size=2, pages=2048, context_tokens_max=10_000)
    for together in range(max(4090, prompt + 1), 4103):
        engine = Engine(config)
        step = engine.step(arrived(0, prompt, together - prompt))
        rejected = any(isinstance(command, RejectRequest) for command in step.commands)
        assert rejected == (prompt > 4096)
        assert rejected or engine.step(LaneReady(0)).launched() is not None


@pytest.mark.parametrize("asked", [4084, 4087, 4088])
def test_output_up_to_the_end_of_the_pool(asked: int) -> None:
    """Script 1 to its end: prompt 10 in a pool of 4,096 gets its whole output, at most 4,087 tokens."""
    engine = Engine(SchedConfig(page_size=2, pages=2048, context_tokens_max=10_000, overlap_depth=0))
    engine.step(arrived(0, 10, asked))
    engine.step(arrived(1, 4, 4))
    ended: list[FinishRequest] = []
    while len(ended) < 2:
        plan = engine.step(LaneReady(0)).launched()
        assert plan is not None
        step = engine.step(BatchFinished(0, plan.batch_id, bytes(4 * len(plan.sample_rows))))
        ended += [command for command in step.commands if isinstance(command, FinishRequest)]
    assert [(end.request_id, end.reason, end.output_tokens) for end in ended] == [
        (0, "length", min(asked, 4087)),
        (1, "length", 4),
    ]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_running_requests", 0),
        ("max_running_requests", -1),
        ("pages", 0),
        ("page_size", 0),
        ("request_rows", 0),
        ("max_queued_requests", 0),
        ("max_prefill_tokens", 0),
        ("max_prefill_tokens", 1),
        ("chunked_prefill_size", 0),
        ("chunked_prefill_size", 1),
        ("context_tokens_max", 1),
        ("schedule_conservativeness", 0.0),
        ("stream_interval", 0),
    ],
)
def test_setting_under_which_nothing_could_run_is_refused_at_start(name: str, value: float) -> None:
    """A15: a limit of zero, or a chunk below a page, would leave every batch full with nothing in it."""
    with pytest.raises(ConfigError, match=f"`{name}`"):
        SchedConfig(**{"page_size": 2, name: value})


# ------------------------------------------------------------------------------------------------ tokens in flight


class Recorder(Driver):
    """A driver that records the retractions."""

    def __init__(self, config: SchedConfig) -> None:
        super().__init__(config)
        self.retracted: list[RequestRetracted] = []
        self._decided[RequestRetracted].append(lambda event, step: self.retracted.append(event))


@pytest.mark.parametrize("late", [False, True], ids=["resumed at once", "resumed late"])
@pytest.mark.parametrize("in_flight", [0, 1, 2])
@pytest.mark.parametrize("cause", ["pages", "forced", "pause", "restart"])
def test_exactly_the_tokens_in_flight_are_discarded(cause: str, in_flight: int, late: bool) -> None:
    """Script 7: the driver compares every streamed token with the request's tokens without a retraction."""
    config = SchedConfig(
        page_size=1,
        pages=16 if cause == "pages" else 64,
        overlap_depth=2,
        schedule_conservativeness=0.02,
        retract_every=4 if cause == "forced" else 0,
    )
    driver = Recorder(config)
    driver.do(("arrive", 1, 2, 10, {}))
    decode_with(driver, 0)
    driver.do(("arrive", 100, 2, 10, {}))
    decode_with(driver, 0)
    while not driver.retracted:
        decode_with(driver, in_flight)
        if cause == "pause" and len(driver.kv.stream) == in_flight:
            driver.do(("control", PAUSE_RETRACT))
        elif cause == "restart" and len(driver.kv.stream) == in_flight:
            driver.do(("restart",))
        else:
            driver.batches.ready()
    assert {event.reason for event in driver.retracted} == {cause}
    assert [event.tokens_discarded for event in driver.retracted] == [in_flight] * len(driver.retracted)
    if late:
        decode_with(driver, 0)
    driver.do(("control", RESUME))
    driver.settle()
    driver.replayed()
    assert [(story.ended, len(story.sent)) for story in driver.records.values()] == [("length", 10)] * 2
    if cause != "restart":  # results of before a restart never arrive
        assert driver.engine.tokens_discarded == sum(event.tokens_discarded for event in driver.retracted)


def decode_with(driver: Driver, in_flight: int) -> None:
    """Launch if nothing is in flight, and deliver results until so many batches are."""
    if not driver.kv.stream:
        driver.batches.ready()
    while len(driver.kv.stream) > in_flight:
        driver.batches.finish()


# ------------------------------------------------------------------------------------------------- objects left behind


@contextmanager
def no_garbage_collector(spare: int) -> Iterator[None]:
    """Within it, objects are freed by their last reference or not at all; at its end their number is unchanged."""
    gc.collect()
    gc.disable()
    try:
        before = len(gc.get_objects())
        yield
        assert len(gc.get_objects()) - before < spare
    finally:
        gc.enable()


def test_a_hundred_thousand_evicted_prefixes_leave_no_object() -> None:
    """D19: evicted nodes and their parents do not keep each other alive."""
    cache = RadixCache(1)
    rng = np.random.default_rng(19)
    keys = rng.integers(0, 50, (1000, 4)).astype(np.int32)
    pages = np.arange(4, dtype=np.int32)
    with no_garbage_collector(spare=20):
        for i in range(100_000):
            cache.insert("", keys[i % 1000].tobytes(), pages)
            cache.evict(4)


def test_a_thousand_decodes_leave_no_object() -> None:
    """C16: the objects of a batch are freed when its result is taken in; those of a request, when it ends."""
    engine = Engine(SchedConfig(page_size=2, pages=64, overlap_depth=1, radix_cache=False))
    with no_garbage_collector(spare=40):
        for number in range(50):
            engine.step(arrived(number, 3, 20))
            while engine.requests or engine.in_flight:
                while engine.step(LaneReady(0)).launched() is not None:
                    pass
                plan = engine.in_flight[0].plan
                engine.step(BatchFinished(0, plan.batch_id, bytes(4 * len(plan.sample_rows))))
                del plan
    assert engine.next_batch_id >= 1000


def test_offers_to_stages_that_stand_still_leave_no_object() -> None:
    """E10: batches in flight are bounded by the slots of the stages, and further offers leave no object."""
    engine = Engine(SchedConfig(page_size=2, pages=64, pp_size=2, overlap_depth=1))
    for number in range(4):
        engine.step(arrived(number, 3, 20))
        engine.step(LaneReady(0, number % 2))
    for microbatch in (0, 1, 0, 1):
        engine.step(LaneReady(0, microbatch))
    assert [batch.plan.microbatch for batch in engine.in_flight] == [0, 1, 0, 1]
    with no_garbage_collector(spare=20):
        for number in range(10_000):
            assert engine.step(LaneReady(0, number % 2)).launched() is None
    assert len(engine.in_flight) == 4


def test_the_evictor_takes_all_that_the_counter_promises() -> None:
    """E12: pages counted as evictable can be evicted, whatever is locked, in one go or in parts."""
    rng = random.Random(12)
    for _ in range(200):
        cache, page = RadixCache(1), 0
        handles = []
        for _ in range(rng.randint(1, 20)):
            key = np.array([rng.randrange(3) for _ in range(rng.randint(1, 8))], np.int32)
            node = cache.insert("", key.tobytes(), np.arange(page, page + len(key), dtype=np.int32)).node
            page += len(key)
            if rng.random() < 0.3:
                cache.lock_node(node)
                handles.append(node)
        while cache.evictable_pages:
            promised, asked = cache.evictable_pages, rng.randint(1, cache.evictable_pages + 2)
            assert len(cache.evict(asked)) == min(asked, promised)
            cache.check(handles)
        assert cache.total_pages == cache.locked_pages


# ------------------------------------------------------------------------------------------------------- two processes

EQUALS = [
    *[("arrive", 1 + 100 * i, 3, 6, {"namespace": name, "tenant": name}) for i, name in enumerate("bdacfe")],
    *[("ready",), ("finish",)] * 6,
    ("control", PAUSE_RETRACT),
    ("control", RESUME),
]
EQUAL_CONFIG = SchedConfig(page_size=2, pages=14, max_running_requests=4, schedule_policy="lpm", retract_every=3)


def digest_of_equals() -> str:
    """Six requests of one instant that differ only in their names, retracted again and again."""
    actions: list[Action] = list(EQUALS)
    return run_actions(EQUAL_CONFIG, actions).engine.digest.hex()


@pytest.mark.parametrize("hash_seed", ["1", "2"])
def test_order_of_equals_is_the_same_in_another_process(hash_seed: str) -> None:
    """B28: the last tie-break is the order of arrival, not an address or a hash."""
    command = [sys.executable, "-c", "from tests.test_museum import digest_of_equals; print(digest_of_equals())"]
    environment = os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        command, env=environment, cwd=README.parent.parent, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == digest_of_equals()


# ----------------------------------------------------------------------------------------------------------- the table

ENTRIES = {
    "A": range(1, 18, 2),
    "B": range(2, 29, 2),
    "C": range(2, 21, 2),
    "D": range(1, 20, 2),
    "E": range(2, 17, 2),
    "F": range(2, 25, 2),
    "G": range(1, 22, 2),
    "H": range(2, 13, 2),
    "I": range(2, 9, 2),
}


def museum_rows() -> dict[str, str]:
    """Rows of the museum's tables in tests/README.md, by the name in their first cell."""
    museum = README.read_text().split("## The museum", 1)[1]
    rows = {}
    for line in museum.splitlines():
        if match := re.match(r"\| (script \d+|[A-I]\d+) \|", line):
            assert match[1] not in rows, f"{match[1]} has two rows"
            rows[match[1]] = line
    return rows


def test_every_script_and_every_failure_has_a_row() -> None:
    expected = [f"script {number}" for number in range(1, 19)]
    expected += [f"{letter}{number}" for letter, numbers in ENTRIES.items() for number in numbers]
    assert list(museum_rows()) == expected


def test_every_scenario_of_the_museum_is_in_its_table() -> None:
    text = "\n".join(museum_rows().values())
    missing = [path.stem for path in (SCENARIOS / "museum").glob("*.txt") if f"`museum/{path.stem}`" not in text]
    assert not missing


def test_every_test_named_in_the_table_exists() -> None:
    tests = "\n".join(path.read_text() for path in README.parent.rglob("test_*.py"))
    for name in re.findall(r"`(test_\w+)`", "\n".join(museum_rows().values())):
        assert f"def {name}(" in tests, f"tests/README.md names {name}, which does not exist"


def test_every_scenario_opens_with_a_public_reference() -> None:
    for path in (SCENARIOS / "museum").glob("*.txt"):
        opening = path.read_text().split("\nconfig")[0]
        assert re.search(r"\b(SG|VL|MS|NV|TR|JX|VA|FS|BI)#\w+", opening), path.stem
