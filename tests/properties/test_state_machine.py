"""Any order of arrivals, cancels, results, clock, control and restarts keeps every invariant, and everything ends.

Hypothesis builds histories rule by rule and shrinks a failing one to its shortest form. For volume see tests/swarm.py.
"""

from __future__ import annotations

import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from lockstep.core.contract.events import PromptSpan
from tests.support.driver.actions import CONTROLS, SESSIONS, STOP_TOKEN
from tests.support.driver.draw import random_config
from tests.support.driver.driver import Driver

small = st.integers(min_value=0, max_value=25)


class EngineMachine(RuleBasedStateMachine):
    """Small rules over one engine; the driver checks invariants, streams and the tagged KV after each event."""

    driver: Driver | None = None

    @initialize(seed=st.integers(min_value=0, max_value=2**32))
    def start(self, seed: int) -> None:
        self.driver = Driver(random_config(random.Random(seed)))

    def do(self, *action: object) -> None:
        assert self.driver is not None
        self.driver.do(action)

    @rule(
        base=st.sampled_from([1, 2, 1001]),
        tokens=st.integers(min_value=1, max_value=40),
        max_new=st.integers(min_value=1, max_value=20),
        stream=st.booleans(),
        ignore_eos=st.booleans(),
        stops_at=st.none() | st.integers(min_value=0, max_value=8),
    )
    def arrive(
        self, base: int, tokens: int, max_new: int, stream: bool, ignore_eos: bool, stops_at: int | None
    ) -> None:
        options = {"stream": stream, "ignore_eos": ignore_eos, "stops_at": stops_at}
        if stops_at is not None and not ignore_eos:
            options["stop_token_ids"] = (STOP_TOKEN,)
        self.do("arrive", base, tokens, max_new, options)

    @rule(
        tokens=st.integers(min_value=1, max_value=40),
        kind=st.sampled_from(["embed", "score", "generate"]),
        logprob_start=st.none() | st.integers(min_value=0, max_value=40),
    )
    def arrive_for_its_prompt_alone(self, tokens: int, kind: str, logprob_start: int | None) -> None:
        self.do("arrive", 1, tokens, 0, {"kind": kind, "logprob_start": logprob_start})

    @rule(samples=st.integers(min_value=2, max_value=4), tokens=st.integers(min_value=1, max_value=40))
    def arrive_for_samples(self, samples: int, tokens: int) -> None:
        self.do("arrive", 1, tokens, 5, {"parallel_samples": samples})

    @rule(which=st.integers(min_value=0, max_value=2), encoder_tokens=st.integers(min_value=0, max_value=5))
    def arrive_with_an_image(self, which: int, encoder_tokens: int) -> None:
        spans = (PromptSpan(2, 7, "image", bytes([which]) * 32, encoder_tokens),)
        self.do("arrive", 1, 10, 5, {"spans": spans})

    @rule(error=st.booleans())
    def encode(self, error: bool) -> None:
        self.do("encode", error)

    @rule(deadline=small, finish=small)
    def arrive_in_a_hurry(self, deadline: int, finish: int) -> None:
        self.do("arrive", 1, 10, 5, {"deadline_in_us": deadline, "finish_in_us": finish})

    @rule(grammar=st.sampled_from(["g0", "g1"]), ends=st.none() | st.integers(1, 6), min_new=st.integers(0, 5))
    def arrive_constrained(self, grammar: str, ends: int | None, min_new: int) -> None:
        options = {"grammar": grammar, "grammar_ends": ends, "min_new_tokens": min_new, "stop_texts": ("END",)}
        self.do("arrive", 1, 10, 8, options)

    @rule(choice=small, error=st.sampled_from(["", "", "unbalanced"]))
    def compiled(self, choice: int, error: str) -> None:
        self.do("compiled", choice, error)

    @rule(choice=small, error=st.sampled_from(["", "unbalanced"]))
    def compiled_again(self, choice: int, error: str) -> None:
        self.do("compiled_again", choice, error)

    @rule()
    def ready(self) -> None:
        self.do("ready")

    @rule()
    def finish(self) -> None:
        self.do("finish")

    @rule(times=st.integers(min_value=2, max_value=12))
    def run_a_while(self, times: int) -> None:
        for _ in range(times):
            self.do("ready")
            self.do("finish")

    @precondition(lambda self: self.driver is not None and self.driver.kv.stream)
    @rule(trouble=st.sampled_from(["error", "invalid", "text_stop"]), choice=small)
    def finish_in_trouble(self, trouble: str, choice: int) -> None:
        self.do("finish", trouble, choice)

    @precondition(lambda self: self.driver is not None and self.driver.engine.requests)
    @rule(choice=small)
    def cancel(self, choice: int) -> None:
        self.do("cancel", choice)

    @rule(choice=small)
    def cancel_again(self, choice: int) -> None:
        self.do("cancel_again", choice)

    @rule(us=small)
    def clock(self, us: int) -> None:
        self.do("clock", us)

    @rule(us=small)
    def wait(self, us: int) -> None:
        self.do("wait", us)

    @rule(index=st.integers(min_value=0, max_value=len(CONTROLS) - 1))
    def control(self, index: int) -> None:
        self.do("control", index)

    @rule(choice=small, capacity=st.sampled_from([20, 1000]), timeout=st.none() | small, branch=st.booleans())
    def open_session(self, choice: int, capacity: int, timeout: int | None, branch: bool) -> None:
        self.do("session_open", choice, capacity, timeout, branch)

    @rule(
        session=st.sampled_from(SESSIONS),
        tokens=st.integers(min_value=1, max_value=12),
        max_new=st.integers(min_value=1, max_value=8),
        start=st.none() | small,
    )
    def take_turn(self, session: str, tokens: int, max_new: int, start: int | None) -> None:
        self.do("arrive", 1, tokens, max_new, {"session": session, "session_start": start})

    @rule(choice=small)
    def close_session(self, choice: int) -> None:
        self.do("session_close", choice)

    @rule(choice=small)
    def cancel_many(self, choice: int) -> None:
        self.do("cancel_many", choice)

    @rule(error=st.sampled_from(["", "", "no room"]))
    def order_done(self, error: str) -> None:
        self.do("order_done", error)

    @rule()
    def restart(self) -> None:
        self.do("restart")

    @rule()
    def late_result(self) -> None:
        self.do("late")

    @rule()
    def snapshot(self) -> None:
        self.do("snapshot")

    def teardown(self) -> None:
        if self.driver is not None:
            self.driver.settle()
            self.driver.replayed()


TestEngine = EngineMachine.TestCase
TestEngine.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
