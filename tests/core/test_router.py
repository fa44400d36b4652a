"""The router: the engine that it chooses for each request, and the invariants after every fact."""

from __future__ import annotations

from math import ceil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.core.cluster.router import (
    ROUTER_POLICIES,
    EngineChanged,
    EngineShare,
    LoadReported,
    RequestEnded,
    RequestOffered,
    RequestRouted,
    Router,
    RouterConfig,
    RouterFact,
    engine_of_room,
    prefix_keys,
)
from lockstep.core.contract.errors import ConfigError, ContractError


class Told:
    """A router with short methods for its facts; ids and times count up."""

    def __init__(self, policy: str = "least_requests", engines: int | tuple[EngineShare, ...] = 3, **settings: object):
        shares = (EngineShare(),) * engines if isinstance(engines, int) else engines
        self.router = Router(RouterConfig(policy=policy, **settings), shares)  # type: ignore[arg-type]
        self.time_us = 0
        self.next_id = 0

    def offer(self, prompt: str = "", tokens: int = 100, session: str = "", **more: object) -> RequestRouted:
        """A prompt is spelt with one letter per block."""
        self.time_us += 1
        keys = tuple(int.from_bytes(prompt[:stop].encode(), "big") for stop in range(1, len(prompt) + 1))
        offered = RequestOffered(
            time_us=self.time_us,
            request_id=self.next_id,
            prompt_tokens=tokens,
            prefix=keys,
            session=session,
            **more,  # type: ignore[arg-type]
        )
        self.next_id += 1
        routed = self.router.step(offered)
        assert routed is not None
        return routed

    def engines(self, count: int, **offer: object) -> list[int | None]:
        return [self.offer(**offer).engine for _ in range(count)]  # type: ignore[arg-type]

    def end(self, request_id: int, output_tokens: int = 10) -> None:
        self.time_us += 1
        fact = RequestEnded(time_us=self.time_us, request_id=request_id, output_tokens=output_tokens)
        assert self.router.step(fact) is None

    def report(self, engine: int, *, requests: int, measured_us: int, tokens: int = 0) -> None:
        self.time_us += 1
        self.router.step(
            LoadReported(time_us=self.time_us, engine=engine, measured_us=measured_us, requests=requests, tokens=tokens)
        )

    def change(self, engine: int, state: str) -> None:
        self.time_us += 1
        self.router.step(EngineChanged(time_us=self.time_us, engine=engine, state=state))  # type: ignore[arg-type]


# -------------------------------------------------------------------------------------------------- policies by example


def test_round_robin_goes_round_and_weights_interleave() -> None:
    assert Told("round_robin").engines(5) == [0, 1, 2, 0, 1]
    heavy = (EngineShare(weight=3), EngineShare(weight=1))
    assert Told("round_robin", heavy).engines(8) == [0, 0, 1, 0, 0, 0, 1, 0]


def test_least_requests_fills_the_emptiest_and_of_equals_the_one_chosen_longest_ago() -> None:
    told = Told("least_requests")
    assert told.engines(3) == [0, 1, 2]
    told.end(1)
    assert told.offer().engine == 1
    told.end(2), told.end(0)
    assert told.engines(2) == [0, 2]  # both empty; 0 was chosen before 2


@pytest.mark.parametrize("policy", ["least_requests", "least_tokens", "total_requests", "total_tokens"])
def test_of_engines_with_equal_load_the_one_chosen_longest_ago_is_taken_and_at_first_the_lowest(policy: str) -> None:
    told = Told(policy, 4)
    chosen = []
    for request_id in range(12):
        chosen.append(told.offer(tokens=0).engine)
        told.end(request_id, 0)  # all are empty again
    assert chosen == [0, 1, 2, 3] * 3
    told = Told(policy, 4)
    told.router.step(EngineChanged(time_us=told.time_us, engine=0, state="draining"))
    assert told.engines(3) == [1, 2, 3]


def test_least_requests_counts_per_weight() -> None:
    told = Told("least_requests", (EngineShare(weight=1), EngineShare(weight=3)))
    assert sorted(told.engines(8), key=str) == [0, 0, 1, 1, 1, 1, 1, 1]


def test_least_tokens_sees_long_prompts_and_learns_how_long_answers_are() -> None:
    told = Told("least_tokens", 2)
    assert told.offer(tokens=5_000).engine == 0
    assert told.engines(4, tokens=500) == [1, 1, 1, 1]
    for request_id in range(5):
        told.end(request_id, output_tokens=4_000)
    assert told.router.open_tokens == [0, 0]
    told.offer(tokens=10)
    assert max(told.router.open_tokens) > 3_000


def test_prefix_affinity_follows_the_longest_prefix_and_forks_go_with_their_trunk() -> None:
    told = Told("prefix_affinity")
    trunk = told.offer("abc")
    assert (trunk.engine, trunk.reason, trunk.matched_tokens) == (0, "policy", 0)
    assert told.offer("xyz").engine == 1
    longer = told.offer("abcde")
    assert (longer.engine, longer.reason, longer.matched_tokens) == (0, "prefix", 3 * 256)
    assert told.offer("xyzz").engine == 1
    assert told.offer("q").engine == 2


def test_prefix_affinity_makes_a_second_home_at_the_bound_and_then_uses_both() -> None:
    told = Told("prefix_affinity", 2, load_bound=1.0, load_floor=2)
    assert told.engines(2, prompt="ab") == [0, 0]
    third = told.offer("ab")
    assert (third.engine, third.reason) == (1, "bound")
    fourth = told.offer("ab")
    assert (fourth.engine, fourth.reason, fourth.matched_tokens) == (1, "prefix", 512)


def test_prefix_affinity_reads_the_load_of_each_engine_a_few_times_for_a_request() -> None:
    reads = 0

    class CountedLoads(list[int]):
        def __getitem__(self, engine: int) -> int:  # type: ignore[override]
            nonlocal reads
            reads += 1
            return super().__getitem__(engine)

    for engines in (8, 64):
        told = Told("prefix_affinity", engines)
        told.engines(4 * engines, prompt="ab")
        told.router.open_requests = CountedLoads(told.router.open_requests)
        reads = 0
        told.offer("ab")
        assert engines <= reads <= 4 * engines


def test_prefix_affinity_drops_blocks_that_the_engine_must_have_evicted_ends_first() -> None:
    told = Told("prefix_affinity", (EngineShare(cache_tokens=4 * 256), EngineShare(cache_tokens=4 * 256)))
    assert told.offer("abcd").engine == 0
    told.end(0)
    assert told.offer("xy").engine == 1
    told.end(1)
    assert told.offer("abq").matched_tokens == 512  # to 0, which now forgets d, the end of the oldest used prompt
    told.end(2)
    assert told.offer("abcd").matched_tokens == 768


def test_a_session_keeps_its_engine_while_it_lives_and_moves_once_it_does_not() -> None:
    told = Told("session_sticky")
    home = told.offer(session="s").engine
    told.engines(5)
    assert [told.offer(session="s").reason, told.offer(session="s").engine] == ["session", home]
    assert home is not None
    told.change(home, "draining")
    moved = told.offer(session="s")
    assert moved.engine != home
    assert moved.reason == "policy"
    told.change(home, "up")
    assert told.offer(session="s").engine == moved.engine


def test_sessions_beyond_the_limit_are_forgotten_the_longest_silent_first() -> None:
    told = Told("session_sticky", sessions_max=2)
    for session in ("a", "b", "a", "c"):
        told.offer(session=session)
    assert told.offer(session="a").reason == "session"
    assert told.offer(session="b").reason == "policy"


def test_total_requests_uses_the_last_report_and_requests_sent_since() -> None:
    told = Told("total_requests", 2)
    told.engines(2)  # without a report: open requests
    told.report(0, requests=5, measured_us=told.time_us)
    told.report(1, requests=3, measured_us=told.time_us)
    assert told.engines(3) == [1, 1, 0]
    told.report(1, requests=9, measured_us=told.time_us - 1)  # the last two offers are not in it
    assert told.router.load_requests()[:2] == [6, 9]
    told.report(1, requests=0, measured_us=0)  # an older report that arrived late: ignored
    assert told.router.load_requests()[1] == 9
    told.end(0), told.end(1)  # an end counts when the engine reports it, not before
    assert told.router.load_requests()[:2] == [6, 9]
    told.change(1, "down")
    told.change(1, "up")
    assert told.router.load_requests()[1] == 0


def test_total_tokens_counts_reported_tokens_and_prompts_sent_since() -> None:
    told = Told("total_tokens", 2)
    told.report(0, requests=1, tokens=1_000, measured_us=0)
    told.report(1, requests=50, tokens=100, measured_us=0)
    assert told.engines(3, tokens=600) == [1, 1, 0]
    assert told.router.load_tokens() == [1_600, 1_300]


def test_a_named_engine_is_taken_whatever_the_policy_and_checked() -> None:
    for policy in ROUTER_POLICIES:
        told = Told(policy)
        assert [told.offer(named=2).reason for _ in range(3)] == ["named"] * 3
        assert told.router.open_requests == [0, 0, 3]
        assert [(one.engine, one.reason) for one in (told.offer(named=3), told.offer(named=-1))] == [
            (None, "unknown_engine")
        ] * 2
        told.change(2, "down")
        assert (told.offer(named=2).engine, told.offer(named=2).reason) == (None, "engine_not_up")


def test_a_room_leads_to_the_same_engine_from_both_sides() -> None:
    prefill, decode = Told("follow_bootstrap_room"), Told("decode_round_robin")
    rooms = [7, 8, 7, 2**63 + 5]
    assert [prefill.offer(room=room).engine for room in rooms] == [engine_of_room(room, 3) for room in rooms]
    assert [decode.offer(room=room, half="prefill").engine for room in rooms] == [1, 2, 1, (2**63 + 5) % 3]
    assert [decode.offer(room=7, half="decode").engine for _ in range(4)] == [0, 1, 2, 0]
    assert prefill.engines(3) == [0, 1, 2]  # without a room: in turn
    prefill.change(1, "draining")
    gone = prefill.offer(room=7)  # the other half would find no other engine there
    assert (gone.engine, gone.reason) == (None, "engine_not_up")


# -------------------------------------------------------------------------------------------- engines added and removed


@pytest.mark.parametrize("policy", ROUTER_POLICIES)
def test_no_request_goes_to_an_engine_that_is_not_up(policy: str) -> None:
    told = Told(policy)
    told.engines(6, prompt="ab", session="s")
    told.change(1, "draining")
    told.change(2, "down")
    assert set(told.engines(6, prompt="ab", session="s")) == {0}
    told.change(0, "draining")
    no_engine = told.offer("ab", session="s")
    assert (no_engine.engine, no_engine.reason) == (None, "no_engine")
    told.change(1, "up")
    assert told.offer("ab", session="s").engine == 1


def test_an_engine_that_went_down_is_empty_when_it_comes_back() -> None:
    told = Told("prefix_affinity", 2, load_floor=0, load_bound=1.0)
    told.engines(4, prompt="ab")
    told.change(0, "down")
    assert told.router.open_requests[0] == 0
    assert told.router.open_tokens[0] == 0
    told.change(0, "up")
    told.end(0)  # the end of a request that was lost: ignored
    assert told.router.open_requests == [0, 2]
    assert told.offer("ab").matched_tokens == 0  # 1 is over the bound, and 0 lost its cache


def test_facts_that_cannot_be_are_refused() -> None:
    told = Told()
    told.offer()
    with pytest.raises(ContractError, match="time ran backwards"):
        told.router.step(RequestEnded(time_us=0, request_id=0))
    with pytest.raises(ContractError, match="request id 0 does not increase after 0"):
        told.router.step(RequestOffered(time_us=5, request_id=0, prompt_tokens=1))
    with pytest.raises(ContractError, match="there is no engine 3: the router has 0 to 2"):
        told.router.step(EngineChanged(time_us=5, engine=3, state="up"))


@pytest.mark.parametrize(
    "fact",
    [
        RequestOffered(time_us=9, request_id=0, prompt_tokens=1),
        RequestEnded(time_us=9, request_id=0),
        EngineChanged(time_us=9, engine=0, state="draining"),
        LoadReported(time_us=9, engine=0, measured_us=9, requests=0, tokens=0),
    ],
    ids=lambda fact: type(fact).__name__,
)
def test_no_fact_of_any_kind_is_older_than_the_one_before(fact: RouterFact) -> None:
    router = Router(RouterConfig(), (EngineShare(),) * 2)
    router.step(fact)
    with pytest.raises(ContractError, match="time ran backwards: 8 us after 9 us"):
        router.step(RequestEnded(time_us=8, request_id=0))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"policy": "random"}, "`router` must be one of round_robin, least_requests"),
        ({"load_bound": 0.9}, "`load_bound` must be from 1 to 1000, got `0.9`"),
        ({"load_bound": float("nan")}, "`load_bound` must be from 1 to 1000"),
        ({"block_tokens": 0}, "`block_tokens` must be a whole number of at least 1, got `0`"),
        ({"sessions_max": 1.5}, "`sessions_max` must be a whole number"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RouterConfig(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("weight", [0.0, -1.0, float("inf"), float("nan")])
def test_weights_must_be_above_zero_and_finite(weight: float) -> None:
    with pytest.raises(ConfigError, match="`weight` must be above 0 and finite"):
        EngineShare(weight=weight)


# ----------------------------------------------------------------------------------------------------------- invariants


@st.composite
def histories(
    draw: st.DrawFn, equal_weights: bool = False
) -> tuple[RouterConfig, tuple[EngineShare, ...], list[RouterFact]]:
    """Draw a router and its facts: requests, ends and engines that change, in any order."""
    config = RouterConfig(
        policy=draw(st.sampled_from(ROUTER_POLICIES)),
        load_bound=draw(st.sampled_from([1.0, 1.25, 3.0])),
        load_floor=draw(st.integers(0, 3)),
        sessions_max=draw(st.integers(1, 4)),
        block_tokens=1,
    )
    weights = draw(st.lists(st.sampled_from([2.0] if equal_weights else [0.5, 1.0, 1.7, 4.0]), min_size=1, max_size=5))
    shares = tuple(EngineShare(weight=weight, cache_tokens=draw(st.integers(0, 12))) for weight in weights)
    facts: list[RouterFact] = []
    ids = 0
    for time_us, kind in enumerate(draw(st.lists(st.integers(0, 9), max_size=60))):
        if kind < 6:
            prompt = draw(st.text("ab", max_size=6))
            keys = tuple(int.from_bytes(prompt[: n + 1].encode(), "big") for n in range(len(prompt)))
            session = draw(st.sampled_from(["", "s", "t", "u", "v", "w"]))
            facts.append(
                RequestOffered(time_us=time_us, request_id=ids, prompt_tokens=len(prompt), prefix=keys, session=session)
            )
            ids += 1
        elif kind < 9:
            facts.append(
                RequestEnded(time_us=time_us, request_id=draw(st.integers(0, max(ids, 1))), output_tokens=kind)
            )
        else:
            engine = draw(st.integers(0, len(shares) - 1))
            facts.append(
                EngineChanged(time_us=time_us, engine=engine, state=draw(st.sampled_from(["up", "draining", "down"])))
            )
    return config, shares, facts


@given(histories())
def test_histories_keep_counts_and_bounds(
    history: tuple[RouterConfig, tuple[EngineShare, ...], list[RouterFact]],
) -> None:
    """Counts equal a plain recount; the bound is never exceeded; sessions stay; equal facts give equal decisions."""
    config, shares, facts = history
    router, again = Router(config, shares), Router(config, shares)
    up = [True] * len(shares)
    open_on: dict[int, int] = {}
    homes: dict[str, int] = {}
    recent: list[str] = []
    for fact in facts:
        routed = router.step(fact)
        assert again.step(fact) == routed
        match fact:
            case RequestOffered():
                assert routed is not None
                if routed.engine is None:
                    assert not any(up)
                    continue
                assert up[routed.engine]
                if config.policy == "prefix_affinity":
                    on_up = sum(up[engine] for engine in open_on.values())
                    weight = sum(share.weight for share, is_up in zip(shares, up, strict=True) if is_up)
                    fair = config.load_bound * (on_up + 1) * shares[routed.engine].weight / weight
                    mine = sum(engine == routed.engine for engine in open_on.values())
                    assert mine + 1 <= max(config.load_floor, ceil(fair))
                if config.policy == "session_sticky" and fact.session:
                    if fact.session in recent and up[homes[fact.session]]:
                        assert routed.engine == homes[fact.session]
                    homes[fact.session] = routed.engine
                    recent = [*(s for s in recent if s != fact.session), fact.session][-config.sessions_max :]
                open_on[fact.request_id] = routed.engine
            case RequestEnded():
                open_on.pop(fact.request_id, None)
            case EngineChanged():
                up[fact.engine] = fact.state == "up"
                if fact.state == "down":
                    open_on = {request: engine for request, engine in open_on.items() if engine != fact.engine}
                    recent = [session for session in recent if homes[session] != fact.engine]
        assert router.open_requests == [list(open_on.values()).count(engine) for engine in range(len(shares))]
        assert all(tokens >= 0 for tokens in router.open_tokens)
    assert router.digest == again.digest


# --------------------------------------------------------------------------------- what is certain of the next requests


def test_requests_go_to_emptier_engines_first_and_to_equal_ones_that_were_chosen_before() -> None:
    told = Told(engines=5)
    told.router.open_requests[:] = [3, 3, 4, 4, 5]
    assert told.router.sends_elsewhere(4) == 6
    assert told.engines(7) == [0, 1, 2, 3, 0, 1, 4]
    assert told.router.open_requests == [5, 5, 5, 5, 6]
    assert told.router.sends_elsewhere(4) == 4
    assert told.router.sends_elsewhere(2) == 0  # of those with 5 it was chosen longest ago
    assert told.router.sends_elsewhere(1) == 3


def test_a_load_in_tokens_is_passed_by_one_request_for_each_emptier_engine() -> None:
    told = Told("least_tokens", engines=3)
    told.router.open_tokens[:] = [100, 200, 5_000]
    assert [told.router.sends_elsewhere(engine) for engine in range(3)] == [0, 1, 2]
    assert told.engines(2, tokens=50_000) == [0, 1]
    assert told.offer(tokens=1).engine == 2


def test_nothing_is_certain_of_engines_of_unequal_weight_reported_loads_and_engines_that_are_not_up() -> None:
    weighted = Told(engines=(EngineShare(weight=1.0), EngineShare(weight=8.0)))
    weighted.router.open_requests[:] = [1, 2]
    assert weighted.router.sends_elsewhere(1) == 0
    assert weighted.offer().engine == 1
    reported = Told("total_requests")
    reported.offer()
    assert reported.router.sends_elsewhere(0) == 2
    reported.report(1, requests=7, measured_us=1)
    reported.report(2, requests=7, measured_us=1)
    assert reported.router.sends_elsewhere(0) == 0
    assert reported.offer().engine == 0
    changed = Told(engines=2)
    changed.offer()
    assert changed.router.sends_elsewhere(0) == 1
    changed.change(1, "draining")
    assert changed.router.sends_elsewhere(0) == 0
    assert changed.offer().engine == 0
    in_turn = Told("round_robin", engines=2)
    in_turn.engines(3)
    assert in_turn.router.sends_elsewhere(0) == 0


@given(histories(equal_weights=True))
def test_no_request_of_those_that_are_certain_to_go_elsewhere_is_sent_to_an_engine(
    history: tuple[RouterConfig, tuple[EngineShare, ...], list[RouterFact]],
) -> None:
    config, shares, facts = history
    router = Router(config, shares)
    certain = [0] * len(shares)  # of the next requests, by engine
    for at, fact in enumerate(facts):
        if isinstance(fact, EngineChanged):
            certain = [0] * len(shares)
        elif isinstance(fact, RequestEnded) and fact.request_id in router.open:
            certain[router.open[fact.request_id].engine] = 0
        routed = router.step(fact)
        if routed is not None:
            assert routed.engine is None or not certain[routed.engine]
            certain = [max(count - 1, 0) for count in certain]
        offered = [one for one in facts[at + 1 :] if isinstance(one, RequestOffered)]
        marks: list[int | str] = [
            one.session if config.policy == "session_sticky" else (*one.prefix, "")[0] for one in offered
        ]
        for engine in range(len(shares)):
            count = router.sends_elsewhere(engine)
            kept = router.first_kept(engine, marks[:count])
            certain[engine] = max(certain[engine], count if kept is None else kept)


def test_digests_of_decisions_are_the_same_in_every_process() -> None:
    """A router's journal has them, and its replay is compared with them: with an engine, and without one."""
    told = Told("round_robin", 2)
    digests = []
    for named in (None, 1, 2):  # by the policy to engine 0; to engine 1; there is no engine 2
        told.offer(named=named)
        digests.append(told.router.digest.hex())
    for engine in (0, 1):
        told.change(engine, "down")
    assert told.offer().reason == "no_engine"
    assert [*digests, told.router.digest.hex()] == DIGESTS


DIGESTS = [
    "6180fa7ad099ca5fbe8a614869de9704",
    "15b9da85584553ca841aa7f283482120",
    "24e9a632afa7013547b87d980476bd6f",
    "1ba500bb1e8fc5f58379d682a9872111",
]


# ---------------------------------------------------------------------------------------------------------- prefix keys


def test_equal_beginnings_have_equal_keys_and_others_do_not() -> None:
    ids = np.arange(1_000, dtype=np.int32)
    other = ids.copy()
    other[600] += 1
    keys, others = prefix_keys(ids, 256), prefix_keys(other, 256)
    assert len(keys) == 3
    assert keys[:2] == others[:2]
    assert keys[2] != others[2]
    assert prefix_keys(ids[:255], 256) == ()
    assert prefix_keys(ids, 256, "tenant")[0] != keys[0]


def test_keys_depend_on_all_that_came_before_and_on_the_order() -> None:
    ids = np.arange(512, dtype=np.int32)
    swapped = np.concatenate((ids[256:], ids[:256]))
    assert not {*prefix_keys(ids, 256)} & {*prefix_keys(swapped, 256)}
    assert prefix_keys(ids[::-1].copy(), 512) != prefix_keys(ids, 512)


def test_keys_are_the_same_in_every_process() -> None:
    """A router's journal is replayed elsewhere: a key may not depend on the process or the machine."""
    assert prefix_keys(np.arange(8, dtype=np.int32), 4, "t") == KEYS


KEYS = (15772422097159419126, 7976596487448935890)
