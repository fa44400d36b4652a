"""Jump-forward: tokens that a grammar forces are computed at once, and all answers stay the same."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from lockstep.core.contract.commands import BatchPlan, SampleBatch, Step
from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.errors import ConfigError, ContractError
from lockstep.core.contract.events import (
    BatchFinished,
    Grammar,
    GrammarReady,
    LaneReady,
    RequestArrived,
    RequestCancelled,
    TokenRuns,
    TokensForced,
)
from lockstep.core.journal import snapshot
from lockstep.core.scheduler.engine import Engine
from tests.support.driver.draw import under_grammars, without_halves
from tests.support.driver.run import run_actions

GRAMMAR = Grammar("regex", "g", b"g")


def test_histories_with_forced_tokens_replay_and_survive_snapshots() -> None:
    """Faults, cancels, restarts and snapshots between any two events; tagged KV reports a wrong cell."""
    from tests.swarm import history

    marks, seed = Counter[str](), 0
    while marks["histories"] < 18:
        config, actions = history(seed)
        seed += 1
        apart = config.hybrid is not msgspec.UNSET or config.block_tokens or config.multiplexes
        if config.decode_steps_per_launch == 1 and not apart:
            config = replace(without_halves(config), jump_forward_tokens=1 + seed % 7)
            if seed % 3 == 0 and not config.speculates:
                config = replace(config, speculative_method="eagle")
            driver = run_actions(config, under_grammars(actions), replay=True)
            marks.update(driver.marks)
            marks["histories"] += 1
    wanted = ["verify batch with forced tokens", "mixed batch with forced tokens", "forced tokens beside drafts"]
    wanted += ["dead row verified", "retracted (pages)", "finished (grammar)", "finished (stop)"]
    assert not [mark for mark in wanted if not marks[mark]], marks


# ------------------------------------------------------------------------------------------------------- single steps


def ids(*tokens: int) -> bytes:
    return np.array(tokens, np.int32).tobytes()


def running(max_new: int = 12, **settings: Any) -> Engine:
    """One request with a grammar and one output token."""
    fields = {name: settings.pop(name) for name in ("stop_texts", "stop_token_ids") if name in settings}
    engine = Engine(SchedConfig(**{"page_size": 4, "pages": 16, "jump_forward_tokens": 8, **settings}))
    engine.step(
        RequestArrived(
            time_us=0, request_id=0, prompt=TokenRuns((100, 3)), max_new_tokens=max_new, grammar=GRAMMAR, **fields
        )
    )
    engine.step(GrammarReady(0, b"g"))
    engine.step(BatchFinished(0, launch(engine)[0].batch_id, ids(7)))
    return engine


def launch(engine: Engine) -> tuple[BatchPlan, Step]:
    step = engine.step(LaneReady(0))
    plan = step.launched()
    assert plan is not None
    return plan, step


def force(engine: Engine, *tokens: int, first: int = 1, generation: int = 0) -> None:
    engine.step(TokensForced(0, generation, ((0, first, ids(*tokens)),)))


def test_forced_tokens_are_one_launch_and_one_result() -> None:
    engine = running()
    force(engine, 8, 9, 10)
    plan, step = launch(engine)
    assert (plan.mode, plan.starts.tolist(), plan.stops.tolist()) == ("verify", [3], [7])
    assert plan.speculation is not None
    assert (plan.speculation.method, plan.speculation.forced_of(0)) == ("forced", [8, 9, 10])
    assert SampleBatch(plan.batch_id, ((0, 0, (7, 8, 9, 10)),)) in step.commands
    step = engine.step(BatchFinished(0, plan.batch_id, ids(8, 9, 10, 11), accepted=ids(4)))
    (said,) = [command for command in step.commands if type(command).__name__ == "StreamTokens"]
    assert said.tokens.tolist() == [8, 9, 10, 11]
    assert not engine.jump_forward.forced
    plan, _ = launch(engine)
    assert (plan.mode, plan.starts.tolist()) == ("decode", [7])


def test_forced_tokens_are_dropped_with_their_request() -> None:
    engine = running()
    force(engine, 8, 9, 10)
    assert engine.jump_forward.forced
    engine.step(RequestCancelled(0, 0))
    assert not engine.jump_forward.forced


@pytest.mark.parametrize(
    ("settings", "tokens", "stops"),
    [
        ({"jump_forward_tokens": 2}, [8, 9, 10, 11], [6]),  # as many as a launch may compute
        ({"max_new": 4}, [8, 9, 10, 11], [6]),  # the last token is sampled, and never fed back
        ({"stop_token_ids": (9,)}, [8, 9, 10], [5]),  # it may end the answer
        ({"stop_texts": ("x",)}, [8, 9, 10], [4]),  # the host examines each token by itself
    ],
)
def test_fewer_are_computed_where_they_must_not_or_cannot(
    settings: dict[str, Any], tokens: list[int], stops: list[int]
) -> None:
    engine = running(**settings)
    force(engine, *tokens)
    assert launch(engine)[0].stops.tolist() == stops


def test_fewer_are_computed_where_pages_lack() -> None:
    engine = Engine(SchedConfig(page_size=4, pages=4, jump_forward_tokens=8, reserve="on_demand"))
    engine.step(RequestArrived(time_us=0, request_id=0, prompt=TokenRuns((100, 3)), max_new_tokens=9, grammar=GRAMMAR))
    engine.step(RequestArrived(time_us=0, request_id=1, prompt=TokenRuns((200, 7)), max_new_tokens=3))
    engine.step(GrammarReady(0, b"g"))
    plan, _ = launch(engine)
    assert plan.request_ids.tolist() == [0, 1]
    engine.step(BatchFinished(0, plan.batch_id, ids(7, 6)))
    force(engine, *range(8, 14))  # six would open two pages, and one is free
    assert launch(engine)[0].stops.tolist() == [7, 8]


def test_a_snapshot_has_the_forced_tokens() -> None:
    engine = running(jump_forward_tokens=2)
    force(engine, 8, 9, 10, 11)
    engine = snapshot.restore(snapshot.dump(engine))
    plan, _ = launch(engine)
    again = snapshot.restore(snapshot.dump(engine))
    for one in (engine, again):
        one.step(BatchFinished(0, plan.batch_id, ids(8, 9, 10), accepted=ids(3)))
        assert launch(one)[0].speculation.forced_of(0) == [11]  # type: ignore[union-attr]
    assert again.digest == engine.digest


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (TokensForced(0, 0, ((0, 2, ids(8)),)), "forced from output 2 on, but it has 1"),
        (TokensForced(0, 0, ((0, 1, b"xyz"),)), "are no token ids"),
        (TokensForced(0, 0, ((0, 1, b""),)), "are no token ids"),
        (TokensForced(0, 1, ((0, 1, ids(8)),)), "tokens forced in generation 1, but this is 0"),
    ],
)
def test_what_cannot_be_forced_is_refused(event: TokensForced, message: str) -> None:
    engine = running()
    before = snapshot.dump(engine)
    with pytest.raises(ContractError, match=message):
        engine.step(event)
    assert snapshot.dump(engine) == before


def test_tokens_that_were_forced_to_be_others_are_refused() -> None:
    engine = running()
    force(engine, 8, 9)
    plan, _ = launch(engine)
    with pytest.raises(ContractError, match="which was forced to be"):
        engine.step(BatchFinished(0, plan.batch_id, ids(8, 10, 11), accepted=ids(3)))
    with pytest.raises(ContractError, match="reports 2 tokens of sampling row 0, which samples 3 to 3"):
        engine.step(BatchFinished(0, plan.batch_id, ids(8, 9), accepted=ids(2)))
    waiting = running(overlap_depth=1)  # the next token is in flight, and it is also the forced one
    plan, _ = launch(waiting)
    force(waiting, 8, 9)
    with pytest.raises(ContractError, match="which was forced to be"):
        waiting.step(BatchFinished(0, plan.batch_id, ids(9)))


def test_of_requests_that_have_ended_nothing_is_forced() -> None:
    engine = running(max_new=2)
    plan, _ = launch(engine)
    engine.step(BatchFinished(0, plan.batch_id, ids(8)))
    force(engine, 9, first=2)
    assert not engine.jump_forward.forced
    assert not engine.requests


def test_settings_omit_it_unless_it_is_on() -> None:
    assert SchedConfig(jump_forward_tokens=0) == SchedConfig()
    assert b"jump" not in msgspec.msgpack.encode(SchedConfig())
    with pytest.raises(ConfigError, match="`jump_forward_tokens` must be a whole number from 0 to 64, got `65`"):
        SchedConfig(jump_forward_tokens=65)
    with pytest.raises(ConfigError, match="`jump_forward_tokens` is 4, but `decode_steps_per_launch` is 2"):
        SchedConfig(jump_forward_tokens=4, decode_steps_per_launch=2)
    with pytest.raises(ContractError, match="`jump_forward_tokens` is 0"):
        force(running(jump_forward_tokens=0), 8)
