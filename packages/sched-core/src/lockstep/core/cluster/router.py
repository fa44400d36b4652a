"""Routing of requests to the engines of a cluster: a pure function of the router's facts, like the engines' own core.

    router = Router(RouterConfig(policy="prefix_affinity"), (EngineShare(), EngineShare(weight=2.0)))
    routed = router.step(RequestOffered(time_us=5, request_id=0, prompt_tokens=900, prefix=keys))
    routed.engine                               # None: no engine takes requests now
    router.step(RequestEnded(time_us=90_000, request_id=0, output_tokens=210))

Facts go in one at a time, decisions come out; a simulated cluster and a server are two hosts of it. Every request and
the end of every answer pass through the router, so it counts them itself. If several routers send to the same engines,
no router has all requests. Then engines report their load, and `total_requests` and `total_tokens` use the last report
and the requests sent since. The router has no clock, no randomness, and no order by hashes.

**Named engines and rooms.** A request may name its engine; the name is checked, and no policy applies. The halves of a
disaggregated request meet in a numbered room; both sides find the prefill engine by one rule, `engine_of_room`.

**Load** is open requests per weight. A request without another rule is sent to the engine with the least load; of
equals to the one that was chosen longest ago.

**Prefix affinity with a load bound.** The router records, per engine, which blocks of prompts were sent there, up to
the tokens of KV that the engine has. The oldest blocks are dropped first, and the end of a prompt before its beginning.
This approximates the engine's radix cache at the cost of a dictionary. A request is sent to the engine that received
the longest beginning of its prompt before, among the engines with a load within the bound:

    open + 1 <= max(load_floor, ceil(load_bound * (all open + 1) * weight / all weights))

With a `load_bound` of at least 1, at least one engine is always within the bound. This is the bound of Mirrokni, Thorup
and Zadimoghaddam, "Consistent Hashing with Bounded Loads" (SODA 2018, arXiv 1608.01350), applied to a match instead of
a hash. A hash of the prompt's beginning sends all prompts with the same beginning to one engine, however long the
common part is. A match follows growing conversations, uses further engines of a prefix once the bound has created them,
and drops blocks that the engine evicted. Below `load_floor` requests no engine counts as overloaded, so prefixes are
not spread needlessly.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable, Sequence
from hashlib import blake2b
from math import ceil, isfinite
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import msgspec

from lockstep.core.contract.errors import ConfigError, ContractError
from lockstep.core.contract.setting import Setting, setting_fields

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

RouterPolicy = Literal[
    "round_robin",
    "least_requests",
    "least_tokens",
    "prefix_affinity",
    "session_sticky",
    "total_requests",
    "total_tokens",
    "follow_bootstrap_room",
    "decode_round_robin",
]
ROUTER_POLICIES: tuple[RouterPolicy, ...] = get_args(RouterPolicy)

IN_TURN: tuple[RouterPolicy, ...] = ("round_robin", "follow_bootstrap_room", "decode_round_robin")
"""Policies by which the engine of a request depends on the requests before it, and on no end or report."""

EngineState = Literal["up", "draining", "recovering", "down"]
"""States of an engine. "up" takes requests; "draining" finishes its requests and takes no new ones; "recovering" has
lost its cache and will continue its requests and sessions; "down" has lost these too.
"""

Half = Literal["", "prefill", "decode"]
"""Which half of a disaggregated request; empty for a whole request."""

RouteReason = Literal[
    "policy",
    "session",
    "prefix",
    "bound",
    "room",
    "named",
    "no_engine",
    "unknown_engine",
    "engine_not_up",
    "waits",
    "line_full",
    "lost",
]
"""The reason of a routing decision.

An engine was chosen: "policy", by the policy; "session", by its session; "prefix", by the longest prefix; "bound",
since the engine with a longer prefix is over the bound; "room", by the room; "named", by its name. No engine was
chosen: "no_engine", none takes requests; "unknown_engine", no engine has that number; "engine_not_up", the engine of
the name or room is not up. A `dispatch.Dispatcher` adds: "waits", the request waits; "line_full", the waiting queue is
full; "lost", its engines were lost too often.
"""

ENGINES_MAX = 1024
OUTPUT_TOKENS_FIRST_GUESS = 256  # expected tokens of an answer before any has ended


class RouterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the router. Raises ConfigError for invalid values."""

    policy: RouterPolicy = "least_requests"
    load_bound: Annotated[float, Setting("largest ratio of an engine's load to the mean", policy="prefix_affinity")] = (
        1.25
    )
    load_floor: Annotated[
        int, Setting("open requests up to which no engine counts as overloaded", policy="prefix_affinity")
    ] = 8
    block_tokens: Annotated[
        int, Setting("tokens of a block, the unit in which prompts are compared", policy="prefix_affinity")
    ] = 256
    sessions_max: Annotated[
        int, Setting("sessions kept; the one with the oldest last request is dropped first", policy="session_sticky")
    ] = 100_000

    def __post_init__(self) -> None:
        if self.policy not in ROUTER_POLICIES:
            raise ConfigError(f"`router` must be one of {', '.join(ROUTER_POLICIES)}, got `{self.policy}`")
        if not 1.0 <= self.load_bound <= 1000.0:
            hint = "1.25 is usual; 1 spreads evenly, large values follow prefixes only"
            raise ConfigError(f"`load_bound` must be from 1 to 1000, got `{self.load_bound}`\nhint: {hint}")
        for name, least in (("load_floor", 0), ("block_tokens", 1), ("sessions_max", 1)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ConfigError(f"`{name}` must be a whole number of at least {least}, got `{value}`")


def policy_settings() -> dict[str, Setting]:
    """The settings that some policies read, by the names of RouterConfig, in its order."""
    return {name: field.setting for name, field in setting_fields(RouterConfig).items() if field.setting is not None}


class EngineShare(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Weight and cache size of one engine, for a router."""

    weight: float = 1.0  # relative capacity: an engine of weight 2 takes twice as much as one of weight 1
    cache_tokens: int = 1 << 40  # tokens of KV that its radix cache can hold

    def __post_init__(self) -> None:
        if not (isfinite(self.weight) and self.weight > 0):
            raise ConfigError(f"an engine's `weight` must be above 0 and finite, got `{self.weight}`")
        if self.cache_tokens < 0:
            raise ConfigError(f"an engine's `cache_tokens` must be at least 0, got `{self.cache_tokens}`")


# --------------------------------------------------------------------------------------------------- facts and decision


class RequestOffered(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """A request arrived at the router. Ids are made by the host and strictly increase."""

    time_us: int
    request_id: int
    prompt_tokens: int
    prefix: tuple[int, ...] = ()  # `prefix_keys` of the prompt; read by prefix_affinity only
    session: str = ""  # read by session_sticky only
    only: int | None = None  # the engine that keeps the session's state, under any policy
    tenant: str = ""  # read by a Dispatcher only
    priority: int | None = None  # read by a Dispatcher only: the highest first, where its `order` is priority
    named: int | None = None  # the engine that the client requests, under any policy
    room: int | None = None  # the meeting point of the halves of a disaggregated request
    half: Half = ""


class RequestEnded(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """The last token passed, the request was refused, or the client left. Ids that are not open are ignored."""

    time_us: int
    request_id: int
    output_tokens: int = 0


class EngineChanged(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """An engine is up, drains, recovers, or is down. The host offers the requests of a lost engine again."""

    time_us: int
    engine: int
    state: EngineState


class LoadReported(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """A load report of an engine, measured at an earlier time. A report older than the last one is ignored."""

    time_us: int
    engine: int
    measured_us: int  # requests sent later are not included
    requests: int  # waiting and running requests
    tokens: int  # tokens of the KV of running requests and of waiting prompts


RouterFact = RequestOffered | RequestEnded | EngineChanged | LoadReported


class RequestRouted(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The engine of a request, or the reason why it has none yet."""

    request_id: int
    engine: int | None  # None: no engine; the host may offer the request again under a new id
    reason: RouteReason
    matched_tokens: int = 0  # tokens of the prompt's beginning that were sent to this engine before


class _RoutedRequest(msgspec.Struct, frozen=True):
    """A request that is open on an engine, with its counted tokens."""

    engine: int
    tokens: int
    sent_us: int
    prompt_tokens: int


class _Reported:
    """The last report of one engine, and (time in us, prompt tokens) of the requests sent since."""

    def __init__(self, measured_us: int, requests: int, tokens: int) -> None:
        self.measured_us = measured_us
        self.requests = requests
        self.tokens = tokens
        self.since: deque[tuple[int, int]] = deque()
        self.since_tokens = 0

    def add(self, sent_us: int, tokens: int) -> None:
        self.since.append((sent_us, tokens))
        self.since_tokens += tokens


# ---------------------------------------------------------------------------------------------------------- the policy


class Router:
    """Chooses an engine for each request. It must receive every fact in order."""

    def __init__(self, config: RouterConfig, engines: tuple[EngineShare, ...]) -> None:
        if not 1 <= len(engines) <= ENGINES_MAX:
            raise ConfigError(f"a router needs from 1 to {ENGINES_MAX} engines, got `{len(engines)}`")
        self.config = config
        self.engines = engines
        self.now_us = 0
        self.state: list[EngineState] = ["up"] * len(engines)
        self.open_requests = [0] * len(engines)  # by engine
        self.open_tokens = [0] * len(engines)  # tokens of prompts and expected tokens of answers, by engine
        self.open: dict[int, _RoutedRequest] = {}  # by request id
        self.digest = bytes(16)  # chained over all decisions
        self._weights = [share.weight for share in engines]
        self._up = list(range(len(engines)))
        self._up_weight = sum(self._weights)
        self._up_weights = list(dict.fromkeys(self._weights))  # the different ones
        self._last_request_id = -1
        self._routed = 0
        self._last_chosen = [-1] * len(engines)  # by engine: value of `_routed` when it was last chosen
        self._credit = [0.0] * len(engines)  # credits of round_robin, by engine
        self._ended = 0
        self._output_tokens = 0
        self._sessions: dict[str, int] = {}  # engine of each session; the session with the newest request is last
        self._prefixes = PrefixHomes([share.cache_tokens // config.block_tokens for share in engines])
        self._reported: list[_Reported | None] = [None] * len(engines)

    def step(self, fact: RouterFact) -> RequestRouted | None:
        """Take in one fact; return the routing decision of an offered request.

        Raises: ContractError for an impossible fact: time that runs backwards, an id that does not increase, an engine
            that does not exist.
        """
        if fact.time_us < self.now_us:
            raise ContractError(f"time ran backwards: {fact.time_us} us after {self.now_us} us; the host must clamp")
        match fact:
            case RequestOffered():
                return self._route(fact)
            case RequestEnded():
                self.now_us = fact.time_us
                self._forget_request(fact.request_id, fact.output_tokens)
            case EngineChanged():
                self._change(fact)
            case LoadReported():
                self._learn(fact)
        return None

    def place(self, fact: RequestOffered, now_us: int) -> RequestRouted:
        """Route a request that waited or is sent again: its id need not increase, but must not be open."""
        if fact.request_id in self.open:
            raise ContractError(f"request {fact.request_id} is open on engine {self.open[fact.request_id].engine}")
        if now_us < self.now_us:
            raise ContractError(f"time ran backwards: {now_us} us after {self.now_us} us; the host must clamp")
        self._last_request_id = max(self._last_request_id, fact.request_id)
        return self._placed(fact, now_us)

    def _route(self, fact: RequestOffered) -> RequestRouted:
        if fact.request_id <= self._last_request_id:
            raise ContractError(f"request id {fact.request_id} does not increase after {self._last_request_id}")
        self._last_request_id = fact.request_id
        return self._placed(fact, fact.time_us)

    def _placed(self, fact: RequestOffered, now_us: int) -> RequestRouted:
        self.now_us = now_us
        fixed = self._fixed(fact)
        if fixed is None and not self._up:
            fixed = None, "no_engine"
        if fixed is None:
            engine, reason, matched_tokens = self._chosen(fact)
        elif fixed[0] is None:
            return self._decided(RequestRouted(request_id=fact.request_id, engine=None, reason=fixed[1]))
        else:
            engine, reason, matched_tokens = fixed[0], fixed[1], 0
            self._prefixes.sent(fact.prefix, engine)
        tokens = fact.prompt_tokens + self._output_tokens_expected()
        self.open[fact.request_id] = _RoutedRequest(engine, tokens, now_us, fact.prompt_tokens)
        self.open_requests[engine] += 1
        self.open_tokens[engine] += tokens
        reported = self._reported[engine]
        if reported is not None:
            reported.add(now_us, fact.prompt_tokens)
        self._last_chosen[engine] = self._routed
        self._routed += 1
        routed = RequestRouted(request_id=fact.request_id, engine=engine, reason=reason, matched_tokens=matched_tokens)
        return self._decided(routed)

    def _chosen(self, fact: RequestOffered) -> tuple[int, RouteReason, int]:
        """Return the engine by the policy, the reason, and the prompt tokens that were sent there before."""
        match self.config.policy:
            case "least_requests":
                return self._least(self.open_requests, 1), "policy", 0
            case "least_tokens":
                more = fact.prompt_tokens + self._output_tokens_expected()
                return self._least(self.open_tokens, more), "policy", 0
            case "total_requests":
                return self._least(self.load_requests(), 1), "policy", 0
            case "total_tokens":
                return self._least(self.load_tokens(), fact.prompt_tokens), "policy", 0
            case "session_sticky":
                return *self._by_session(fact.session), 0
            case "prefix_affinity":
                return self._by_prefix(fact.prefix)
            case _:  # in turn, including requests without a room
                return self._in_turn(), "policy", 0

    def _decided(self, routed: RequestRouted) -> RequestRouted:
        engine = -1 if routed.engine is None else routed.engine
        decision = f"{routed.request_id} {engine} {routed.reason} {routed.matched_tokens}"
        self.digest = blake2b(self.digest + decision.encode(), digest_size=16).digest()
        return routed

    # mechanism: named-engine (decided)
    def _fixed(self, fact: RequestOffered) -> tuple[int | None, RouteReason] | None:
        """Return the engine that a request requires, or the reason why it has none; None if the policy decides."""
        if fact.only is not None:
            if not 0 <= fact.only < len(self.engines):
                raise ContractError(f"there is no engine {fact.only}: the router has 0 to {len(self.engines) - 1}")
            return (None, "no_engine") if self.state[fact.only] == "down" else (fact.only, "session")
        reason: RouteReason = "named"
        engine = fact.named
        if engine is not None:
            if not 0 <= engine < len(self.engines):
                return None, "unknown_engine"
        else:
            policy, room = self.config.policy, fact.room
            follows = policy == "follow_bootstrap_room" or (policy == "decode_round_robin" and fact.half == "prefill")
            if not follows or room is None:
                return None
            engine, reason = engine_of_room(room, len(self.engines)), "room"
        return (engine, reason) if self.state[engine] == "up" else (None, "engine_not_up")

    def load_requests(self) -> list[int]:
        """Return the requests on each engine: those of its last report plus those sent since, or the open ones here."""
        return [
            here if reported is None else reported.requests + len(reported.since)
            for here, reported in zip(self.open_requests, self._reported, strict=True)
        ]

    def load_tokens(self) -> list[int]:
        """Return the tokens on each engine: those of its last report plus those sent since, or the open ones here."""
        return [
            here if reported is None else reported.tokens + reported.since_tokens
            for here, reported in zip(self.open_tokens, self._reported, strict=True)
        ]

    def _in_turn(self) -> int:
        """Return the next engine by smooth weighted round robin.

        Each engine is credited its weight. The engine with the highest credit is chosen and loses the sum of weights.
        """
        up, weights, credit = self._up, self._weights, self._credit
        credited = [credit[engine] + weights[engine] for engine in up]
        for engine, more in zip(up, credited, strict=True):
            credit[engine] = more
        chosen = up[credited.index(max(credited))]  # of equals the first
        credit[chosen] -= self._up_weight
        return chosen

    def _least(self, load: list[int], more: int, among: list[int] | None = None) -> int:
        """Return the engine with the least load per weight, `more` added; of equals, the one chosen longest ago.

        `among`: the engines to choose from, in ascending order; None: all that are up.
        """
        engines, weights = self._up if among is None else among, self._weights
        loads: Sequence[float]
        if len(self._up_weights) == 1:  # the order is that of the loads themselves
            loads = load if len(engines) == len(load) else [load[engine] for engine in engines]
        else:
            loads = [(load[engine] + more) / weights[engine] for engine in engines]
        least: Any = min(loads)
        if loads.count(least) == 1:
            return engines[loads.index(least)]
        equal = [engine for engine, one in zip(engines, loads, strict=True) if one == least]
        return min(equal, key=self._last_chosen.__getitem__)

    def _by_session(self, session: str) -> tuple[int, RouteReason]:
        """Return the engine of the session; a new one for its first request, or if its engine is not up."""
        if not session:
            return self._least(self.open_requests, 1), "policy"
        home = self._sessions.pop(session, None)
        stays = home is not None and self.state[home] == "up"
        engine = home if home is not None and stays else self._least(self.open_requests, 1)
        self._sessions[session] = engine
        if len(self._sessions) > self.config.sessions_max:
            del self._sessions[next(iter(self._sessions))]
        return engine, "session" if stays else "policy"

    # mechanism: prefix-affinity (decided)
    def _by_prefix(self, prefix: tuple[int, ...]) -> tuple[int, RouteReason, int]:
        """Return the engine within the bound that received most of this prompt; of equals, the one with least load."""
        config = self.config
        opened, weights = self.open_requests, self._weights
        total = sum([opened[engine] for engine in self._up] if len(self._up) < len(opened) else opened) + 1
        bounds = {weight: self._bound(weight, total) for weight in self._up_weights}
        within = self._up
        if max(opened) >= min(bounds.values()):
            within = [engine for engine in within if opened[engine] < bounds[weights[engine]]]
        lengths = self._prefixes.match(prefix)
        homes, longest, passed_over = within, 0, False
        if lengths:
            longest = max([lengths.get(engine, 0) for engine in within])
            homes = [engine for engine in within if lengths.get(engine, 0) == longest]
            passed_over = max([lengths.get(other, 0) for other in self._up]) > longest
        engine = self._least(opened, 1, homes)
        self._prefixes.sent(prefix, engine)
        reason: RouteReason = "bound" if passed_over else "prefix" if longest else "policy"
        return engine, reason, longest * config.block_tokens

    def _bound(self, weight: float, total: int) -> int:
        """Return the most open requests of an engine if all have `total`, both with the request to be routed."""
        config = self.config
        fair = config.load_bound * total * weight / self._up_weight
        return max(config.load_floor, ceil(fair))

    def _output_tokens_expected(self) -> int:
        """Return the expected tokens of a new answer: the mean of ended answers and one first guess."""
        return (self._output_tokens + OUTPUT_TOKENS_FIRST_GUESS) // (self._ended + 1)

    # ----------------------------------------------------------------------------- what is certain of the next requests

    def sends_elsewhere(self, engine: int) -> int:
        """Return how many of the next requests are certain to be sent to other engines; 0 if that is not known.

        It holds whatever ends on the other engines, as long as no answer of this one ends and no engine changes its
        state or reports. It holds for requests that name no engine, up to the first one that `first_kept` finds.
        """
        policy = self.config.policy
        if policy in IN_TURN or len(self._up_weights) > 1 or len(self._up) < len(self.engines) or any(self._reported):
            return 0
        if policy in ("least_tokens", "total_tokens"):
            load = self.open_tokens[engine]
            return sum([other < load for other in self.open_tokens])  # one each: how much a request adds is not known
        loads, last = self.open_requests, self._last_chosen
        load, chosen = loads[engine], last[engine]
        before = [at for at, other in zip(last, loads, strict=True) if other == load and at < chosen]
        return len(before) + sum([load - other for other in loads if other < load])

    def first_kept(self, engine: int, marks: Iterable[int | str]) -> int | None:
        """Return the place of the first request that this engine may get for its prefix or session; None: no request.

        Args:
            marks: of each request the first key of its `prefix` (prefix_affinity), or its `session` (session_sticky).
        """
        if self.config.policy == "prefix_affinity":
            has = self._prefixes.blocks_of(engine)
            return next((place for place, key in enumerate(marks) if key in has), None)
        homes: dict[Any, int] = self._sessions
        return next((place for place, session in enumerate(marks) if homes.get(session) == engine), None)

    # --------------------------------------------------------------------------------------- reports, ends and changes

    def _learn(self, fact: LoadReported) -> None:
        engine = self._known(fact.engine)
        self.now_us = fact.time_us
        before = self._reported[engine]
        if self.state[engine] == "down" or (before is not None and fact.measured_us < before.measured_us):
            return
        self._reported[engine] = now = _Reported(fact.measured_us, fact.requests, fact.tokens)
        if before is not None:
            sent = list(before.since)
        else:
            here = [at for at in self.open.values() if at.engine == engine]
            sent = [(at.sent_us, at.prompt_tokens) for at in here]
        for sent_us, tokens in sent:
            if sent_us > fact.measured_us:
                now.add(sent_us, tokens)

    def _known(self, engine: int) -> int:
        if not 0 <= engine < len(self.engines):
            raise ContractError(f"there is no engine {engine}: the router has 0 to {len(self.engines) - 1}")
        return engine

    def _forget_request(self, request_id: int, output_tokens: int) -> None:
        gone = self.open.pop(request_id, None)
        if gone is None:
            return
        self.open_requests[gone.engine] -= 1
        self.open_tokens[gone.engine] -= gone.tokens
        self._ended += 1
        self._output_tokens += output_tokens

    def _change(self, fact: EngineChanged) -> None:
        engine = self._known(fact.engine)
        self.now_us = fact.time_us
        self.state[engine] = fact.state
        self._up = [e for e, state in enumerate(self.state) if state == "up"]
        up_weights = [self._weights[e] for e in self._up]
        self._up_weight = sum(up_weights)
        self._up_weights = list(dict.fromkeys(up_weights))
        self._credit[engine] = 0.0
        if fact.state in ("recovering", "down"):
            self._prefixes.lost(engine)
        if fact.state == "down":
            self.open = {request_id: at for request_id, at in self.open.items() if at.engine != engine}
            self.open_requests[engine] = self.open_tokens[engine] = 0
            self._reported[engine] = None
            self._sessions = {session: home for session, home in self._sessions.items() if home != engine}


def engine_of_room(room: int, engines: int) -> int:
    """Return the engine of a room, among `engines` engines. It depends on nothing else, since both halves compute it.

    Source: SGLang.
    """
    return room % engines


class PrefixHomes:
    """Blocks of prompts by the engines to which they were sent, those of each engine in the order of eviction."""

    def __init__(self, blocks_max: list[int]) -> None:
        """Create an empty record. `blocks_max`: the number of blocks that the cache of each engine holds."""
        self._blocks_max = blocks_max
        self._homes: dict[int, int] = {}  # engines of each block key, one bit each
        self._blocks: list[dict[int, None]] = [{} for _ in blocks_max]  # block keys by engine, next to be dropped first

    def match(self, prefix: tuple[int, ...]) -> dict[int, int]:
        """Return how many leading blocks of the prompt each engine has, for engines with any."""
        lengths: dict[int, int] = {}
        having = -1
        length = 0
        for length, key in enumerate(prefix):
            still = having & self._homes.get(key, 0)
            if still != having:
                if length:
                    _note(lengths, having & ~still, length)
                having = still
                if not having:
                    return lengths
        if prefix:
            _note(lengths, having, length + 1)
        return lengths

    def sent(self, prefix: tuple[int, ...], engine: int) -> None:
        """Record a prompt sent to an engine. Its end is dropped before its beginning, like in a radix cache."""
        blocks, homes, bit = self._blocks[engine], self._homes, 1 << engine
        for key in reversed(prefix):
            if key in blocks:
                del blocks[key]
            else:
                homes[key] = homes.get(key, 0) | bit
            blocks[key] = None
        excess = len(blocks) - self._blocks_max[engine]
        if excess > 0:
            for key in [key for key, _ in zip(blocks, range(excess), strict=False)]:
                del blocks[key]
                self._leave(key, bit)

    def blocks_of(self, engine: int) -> Container[int | str]:
        """Return the keys of the blocks that an engine has."""
        return self._blocks[engine]

    def lost(self, engine: int) -> None:
        """Drop the blocks of an engine that lost its cache."""
        for key in self._blocks[engine]:
            self._leave(key, 1 << engine)
        self._blocks[engine] = {}

    def _leave(self, key: int, bit: int) -> None:
        left = self._homes[key] & ~bit
        if left:
            self._homes[key] = left
        else:
            del self._homes[key]


def _note(lengths: dict[int, int], engines: int, length: int) -> None:
    """Record a length for every engine in the bit set `engines`."""
    while engines:
        low = engines & -engines
        lengths[low.bit_length() - 1] = length
        engines ^= low


# -------------------------------------------------------------------------------------------------------- prefix keys

_MIX_1, _MIX_2, _GOLDEN = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0x9E3779B97F4A7C15  # SplitMix64
_MASK = (1 << 64) - 1


def prefix_keys(ids: NDArray[np.int32], block_tokens: int, namespace: str = "") -> tuple[int, ...]:
    """Return one key per whole block of a prompt; each identifies all tokens up to its end.

    Args:
        ids: int32 [tokens].
        namespace: prompts share keys only inside it: tenant, adapter, salt.
    Returns: 64-bit numbers. Equal beginnings have equal keys; different ones collide with a chance of 2**-64. A
        deliberate collision sends a request to the wrong engine, where the radix cache compares tokens.
    """
    import numpy as np  # not at the top: a command line reads names and defaults of this module before it needs arrays

    blocks = len(ids) // block_tokens
    if not blocks:
        return ()
    # Multilinear hashing: the sum of token times a fixed odd weight, modulo 2**64, one sum per block.
    values = ids[: blocks * block_tokens].astype(np.int64).reshape(blocks, block_tokens)
    sums = (values @ _weights(block_tokens)).tolist()
    key = int.from_bytes(blake2b(namespace.encode(), digest_size=8).digest(), "big")
    keys = []
    for total in sums:
        key = _mixed((key * _GOLDEN + total) & _MASK)
        keys.append(key)
    return tuple(keys)


def _mixed(value: int) -> int:
    value = ((value ^ (value >> 30)) * _MIX_1) & _MASK
    value = ((value ^ (value >> 27)) * _MIX_2) & _MASK
    return value ^ (value >> 31)


_WEIGHTS: dict[int, NDArray[np.int64]] = {}


def _weights(block_tokens: int) -> NDArray[np.int64]:
    import numpy as np

    weights = _WEIGHTS.get(block_tokens)
    if weights is None:
        numbers = [_mixed(((place + 1) * _GOLDEN) & _MASK) | 1 for place in range(block_tokens)]
        weights = _WEIGHTS[block_tokens] = np.array(numbers, np.uint64).view(np.int64)
    return weights
