"""PD multiplexing: shares of the device, layers of a launch, what does not go together, and random histories.

What happens to requests between two parts of their prompts is shown in `tests/scenarios/multiplexing/`.
"""

from __future__ import annotations

import random
from typing import Any

import msgspec
import numpy as np
import pytest

from lockstep.core import Engine, SchedConfig
from lockstep.core.contract.commands import BatchPlan, LaunchBatch
from lockstep.core.contract.config import BlockDiffusion, CacheTiers, HybridMemory
from lockstep.core.contract.errors import ConfigError, ContractError
from lockstep.core.contract.events import BatchFinished, LaneReady, RequestArrived, TokenRuns
from lockstep.core.contract.multiplexing import Division, Multiplexing, even_divisions
from lockstep.core.journal.snapshot import dump, restore
from lockstep.core.scheduler.decode_run import DecodeRun
from tests.support.driver.draw import multiplexed, pressed_actions, pressed_config, random_actions, random_config
from tests.support.driver.run import run_actions

SHARES = Multiplexing(layers=8, sms=132, divisions=(Division(104, 28), Division(80, 52, 4)), token_budget=40)
CONFIG = SchedConfig(page_size=4, pages=64, overlap_depth=0, multiplexing=SHARES)


@pytest.mark.parametrize(
    ("sms", "major", "groups", "expected"),
    [
        (132, 9, 8, [(112, 20, 0), (104, 28, 12), (96, 36, 18), (88, 44, 24), (80, 52, 30), (72, 60, 36)]),
        (132, 9, 3, [(72, 60, 0)]),
        (108, 8, 4, [(74, 34, 0), (54, 54, 36)]),
        (40, 8, 8, [(24, 16, 0), (22, 18, 24), (20, 20, 36)]),
    ],
    ids=str,
)
def test_a_device_is_divided_by_its_architecture(
    sms: int, major: int, groups: int, expected: list[tuple[int, int, int]]
) -> None:
    found = even_divisions(sms, major, groups)
    assert [(one.prefill_sms, one.decode_sms, one.decode_rows) for one in found] == expected
    SchedConfig(multiplexing=Multiplexing(layers=1, sms=sms, divisions=found))


def test_divisions_of_the_device_follow_the_index_that_sglang_computes() -> None:
    found = even_divisions(132, 9, 8, 36)
    for rows in range(80):
        index = max(1, min(6, rows * 6 // 36))
        assert Multiplexing(layers=1, sms=132, divisions=found).division_for(rows) == found[index - 1]


@pytest.mark.parametrize(("sms", "groups"), [(24, 8), (132, 2)])
def test_a_device_that_cannot_be_divided_is_refused(sms: int, groups: int) -> None:
    with pytest.raises(ConfigError, match=f"got {sms} SMs in {groups} groups"):
        even_divisions(sms, 9, groups)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 0}, "`multiplexing.layers` must be a whole number of at least 1, got `0`"),
        ({"token_budget": True}, "`multiplexing.token_budget` must be a whole number of at least 1, got `True`"),
        ({"divisions": (Division(120, 20),)}, "has 120:20:0, but both shares have at least one of the 132 SMs"),
        ({"divisions": (Division(132, 0),)}, "has 132:0:0"),
        ({"divisions": (Division(9, 9, 4), Division(8, 8, 4))}, "has 8:8:4 behind a division from 4 decode rows on"),
    ],
    ids=str,
)
def test_shares_that_the_device_does_not_have_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        SchedConfig(multiplexing=msgspec.structs.replace(SHARES, **changes))
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("pp_size", {"pp_size": 2}),
        ("dp_ranks", {"dp_ranks": 2}),
        ("role", {"role": "decode"}),
        ("two_batch_overlap", {"two_batch_overlap": True}),
        ("batching", {"batching": "mixed"}),
        ("prefill_decode_interval", {"prefill_decode_interval": 1}),
        ("overlap_consecutive_prefills", {"overlap_consecutive_prefills": False}),
        ("chunk_target_us", {"chunk_target_us": 5000}),
        ("same_step_sharing", {"same_step_sharing": True}),
        ("speculative_method", {"speculative_method": "ngram"}),
        ("jump_forward_tokens", {"jump_forward_tokens": 4}),
        ("diffusion", {"diffusion": BlockDiffusion(4), "overlap_depth": 0}),
        ("hybrid", {"hybrid": HybridMemory(state_slots=8, checkpoint_tokens=64)}),
        (
            "enable_priority_preemption",
            {"enable_priority_preemption": True, "schedule_policy": "priority", "retraction_policy": "priority"},
        ),
        ("expert_load_interval", {"expert_load_interval": 100}),
    ],
)
def test_what_does_not_go_with_multiplexing_is_refused_by_name(name: str, settings: dict[str, Any]) -> None:
    SchedConfig(**settings)
    with pytest.raises(ConfigError, match=f"`multiplexing` is set and `{name}` is"):
        SchedConfig(multiplexing=SHARES, **settings)


class Scene:
    """An engine and a clock, whose batches are launched and delivered one by one."""

    def __init__(self, config: SchedConfig = CONFIG) -> None:
        self.engine, self.now_us, self.arrived = Engine(config), 0, 0

    def fold(self, event: Any) -> list[BatchPlan]:
        step = self.engine.step(event)
        return [command.plan for command in step.commands if isinstance(command, LaunchBatch)]

    def arrive(self, prompt: int, outputs: int) -> None:
        tokens = TokenRuns((1 + 1000 * self.arrived, prompt))
        self.fold(RequestArrived(time_us=self.now_us, request_id=self.arrived, prompt=tokens, max_new_tokens=outputs))
        self.arrived += 1

    def ready(self) -> list[BatchPlan]:
        """Offer slots until nothing is launched."""
        found: list[BatchPlan] = []
        while plans := self.fold(LaneReady(self.now_us)):
            found += plans
        return found

    def deliver(self, batch_id: int) -> None:
        batch = next(one for one in self.engine.in_flight if one.plan.batch_id == batch_id)
        self.fold(BatchFinished(self.now_us, batch_id, np.zeros(batch.tokens, np.int32).tobytes()))


def shape(plan: BatchPlan) -> tuple[str, tuple[int, int] | None, int | None]:
    return plan.mode, plan.layers, plan.sms


def test_a_launch_has_as_many_layers_as_the_budget_allows_and_shares_follow_the_decodes() -> None:
    scene = Scene()
    scene.arrive(10, 30)
    assert [shape(plan) for plan in scene.ready()] == [("split_prefill", (0, 4), None)]
    scene.deliver(0)
    assert [shape(plan) for plan in scene.ready()] == [("split_prefill", (4, 8), None)]
    scene.deliver(1)
    scene.arrive(41, 30)
    assert [shape(plan) for plan in scene.ready()] == [("decode", None, None), ("split_prefill", (0, 1), 104)]
    scene.deliver(2)
    for _ in range(4):
        scene.arrive(1, 30)
    assert [shape(plan) for plan in scene.ready()] == [("decode", None, 28)]
    for batch_id in range(3, 12):
        scene.deliver(batch_id)
        launched = scene.ready()
    assert scene.engine.running_batch.size
    assert launched


def test_a_device_that_is_not_divided_has_plans_without_shares() -> None:
    scene = Scene(msgspec.structs.replace(CONFIG, multiplexing=Multiplexing(layers=8, token_budget=40)))
    scene.arrive(4, 30)
    scene.ready()
    scene.deliver(0)
    scene.arrive(20, 30)
    assert [shape(plan) for plan in scene.ready()] == [("decode", None, None), ("split_prefill", (0, 2), None)]


def test_results_of_a_stream_come_in_its_order_and_those_of_the_other_at_any_time() -> None:
    scene = Scene(msgspec.structs.replace(CONFIG, overlap_depth=1))
    scene.arrive(4, 30)
    scene.ready()
    scene.deliver(0)
    scene.arrive(20, 30)
    launched = [plan.batch_id for plan in scene.ready()]
    assert launched == [1, 2, 3, 4]  # two decodes, two parts of the prompt
    for batch_id, due in ((2, "batch 1 or batch 3"), (4, "batch 1 or batch 3")):
        with pytest.raises(ContractError, match=f"batch {batch_id} finished, but {due} is next in flight"):
            scene.deliver(batch_id)
    for batch_id in (3, 4, 1, 2):
        scene.deliver(batch_id)


def test_a_snapshot_between_two_parts_of_a_prompt_is_restored_as_it_was() -> None:
    scene = Scene()
    scene.arrive(10, 5)
    scene.ready()
    scene.deliver(0)
    assert scene.engine.multiplexer.layer == 4
    data = dump(scene.engine)
    other = restore(data)
    assert dump(other) == data
    assert [request.request_id for request in other.multiplexer.members()] == [0]
    assert other.step(LaneReady(0)).digest == scene.engine.step(LaneReady(0)).digest


def test_no_stretch_of_decodes_begins_beside_a_prompt() -> None:
    scene = Scene()
    scene.arrive(4, 40)
    scene.ready()
    scene.deliver(0)
    scene.ready()
    assert DecodeRun.begin(scene.engine) is not None
    scene.arrive(41, 5)
    scene.ready()
    scene.deliver(2)
    assert scene.engine.multiplexer.parts
    assert len(scene.engine.in_flight) == 1
    assert DecodeRun.begin(scene.engine) is None


def test_settings_and_plans_without_multiplexing_are_what_they_were() -> None:
    assert b"multiplexing" not in msgspec.json.encode(SchedConfig())
    engine = Engine(SchedConfig())
    assert b"split_prefill" not in dump(engine)
    assert not engine.multiplexer.present


@pytest.mark.parametrize("seed", range(24))
def test_random_histories_hold_every_invariant(seed: int) -> None:
    rng = random.Random(seed)
    pressed = seed % 3 == 0
    config = pressed_config(rng) if pressed else random_config(rng)
    config = multiplexed(random.Random(f"multiplexing {seed}"), config)
    if seed % 5 == 0 and config.radix_cache:
        config = msgspec.structs.replace(config, tiers=CacheTiers(host_pages=8, load_tokens_min=1))
    actions = pressed_actions(rng, 120) if pressed else random_actions(rng, 120, adapters=bool(config.max_loras))
    run_actions(config, actions, replay=True)
