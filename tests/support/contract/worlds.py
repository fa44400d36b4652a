"""The bounds in which every state of each machine of the contract is gone through, and what each rule is for.

`NEEDED` names, for each rule, a world in which a state is unsafe, or in which something never ends, once that rule is
left out. The other rules are in `OF_FORM`: no state of these machines gets worse without them, for the reason given.
Steps of core and host are held to both.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.support.contract.engine_machine import EngineBounds, EngineMachine
from tests.support.contract.machine import Machine
from tests.support.contract.play import ContractWorld
from tests.support.contract.rank_machine import RankBounds, RankMachine
from tests.support.contract.transfer_machine import TransferBounds, TransferMachine

Inputs = dict[str, int]
TWO = ((0, 1, 2), (0, 1, 2))  # requests of one family: prompts of a token, two outputs
ALIKE = ((0, 2, 2), (0, 2, 2))  # prompts of two tokens, of which one may come from the cache
MACHINES: dict[str, type[Machine]] = {"engine": EngineMachine, "transfers": TransferMachine, "ranks": RankMachine}

ENGINES: dict[str, tuple[EngineBounds, Inputs]] = {
    "plain": (EngineBounds(TWO), {}),
    "cancel": (EngineBounds(TWO), {"cancels": 1}),
    "error and cancel": (EngineBounds(TWO), {"errors": 1, "cancels": 1}),
    "stop and held tokens": (EngineBounds(TWO), {"stops": 1, "holds": 1}),
    "retraction": (EngineBounds(TWO), {"retractions": 1}),
    "retraction and error": (EngineBounds(TWO), {"retractions": 1, "errors": 1}),
    "restart": (EngineBounds(TWO), {"restarts": 1}),
    "restart and cancel": (EngineBounds(TWO), {"restarts": 1, "cancels": 1}),
    "two restarts": (EngineBounds(TWO[:1]), {"restarts": 2, "crashes": 1}),
    "crash": (EngineBounds(TWO), {"crashes": 1}),
    "crash and cancel": (EngineBounds(TWO), {"crashes": 1, "cancels": 1}),
    "two crashes": (EngineBounds(TWO), {"crashes": 2}),
    "shared prefix": (EngineBounds(ALIKE, pages=4), {}),
    "shared prefix and cancel": (EngineBounds(ALIKE, pages=4), {"cancels": 1}),
    "shared prefix and error": (EngineBounds(ALIKE, pages=4), {"errors": 1}),
    "pages of two tokens": (EngineBounds(((0, 3, 2), (0, 2, 3)), page_tokens=2), {"cancels": 1}),
    "depth 0": (EngineBounds(TWO, depth=0), {"cancels": 1, "crashes": 1}),
    "depth 2": (EngineBounds(((0, 1, 3), (0, 1, 2)), pages=4, depth=2), {"cancels": 1}),
}
TRANSFERS: dict[str, tuple[TransferBounds, Inputs]] = {
    "parts": (TransferBounds(((1, 2),), pages=3), {}),
    "parts and cancel": (TransferBounds(((1, 2),), pages=3), {"cancels": 1}),
    "parts and loss": (TransferBounds(((1, 2),), pages=3), {"losses": 1}),
    "parts, cancel and loss": (TransferBounds(((1, 2),), pages=3), {"cancels": 1, "losses": 1}),
    "parts, error and link down": (TransferBounds(((1, 2),), pages=3, depth=1), {"errors": 1, "link_downs": 1}),
    "two and a page": (TransferBounds(((1,), (2,)), pages=1), {"cancels": 1}),
    "two and a page alone": (TransferBounds(((1,), (2,)), pages=1), {}),
    "two": (TransferBounds(((1,), (2,))), {"cancels": 1}),
    "two and loss": (TransferBounds(((1,), (2,)), pages=1), {"losses": 1}),
    "two and link down": (TransferBounds(((1,), (2,)), pages=1), {"link_downs": 1, "cancels": 1}),
    "late allocation": (TransferBounds(((1, 2),), pages=3, allocates_first=False), {"cancels": 1}),
    "two and late allocation alone": (TransferBounds(((1,), (2,)), pages=1, allocates_first=False), {}),
    "two, late allocation": (TransferBounds(((1,), (2,)), pages=1, allocates_first=False), {"cancels": 1}),
}
RANKS: dict[str, tuple[RankBounds, Inputs]] = {
    "plain": (RankBounds(), {"arrivals": 2}),
    "cancel": (RankBounds(), {"arrivals": 2, "cancels": 1}),
    "error": (RankBounds(), {"arrivals": 2, "errors": 1}),
    "loss": (RankBounds(), {"arrivals": 2, "losses": 1}),
    "one": (RankBounds(work=1), {"arrivals": 1}),
    "one and loss": (RankBounds(work=1), {"arrivals": 1, "losses": 1}),
    "depth 0": (RankBounds(depth=0), {"arrivals": 2, "cancels": 1}),
    "three": (RankBounds(ranks=3, work=1), {"arrivals": 2}),
}
ONE_ARRIVAL = "one and loss"

NEEDED: dict[str, dict[str, str]] = {
    "engine": {
        "results once": "plain",
        "results in launch order": "plain",
        "record before commands": "plain",
        "commands before the next event": "cancel",
        "commands in order": "plain",
        "restart generation rises": "restart",
        "restart after a loss": "restart",
        "old results are void": "restart",
        "plans name their generation": "plain",
        "rows are live": "plain",
        "newest samples": "cancel",
        "deferred frees": "cancel",
        "one owner": "plain",
        "cached KV is the prefix": "retraction",
        "delivered KV is shared": "shared prefix and error",
        "late tokens are dropped": "retraction",
        "streams follow": "stop and held tokens",
        "sent before the end": "plain",
        "ends once": "plain",
        "length ends": "plain",
        "cancel closes": "cancel",
        "errors end": "error and cancel",
        "restart requeues": "restart",
    },
    "transfers": {
        "facts wait for their request": "parts and cancel",
        "parts in order": "parts",
        "parts behind their batch": "parts",
        "parts into pages": "late allocation",
        "nothing moves behind the end": "two and a page",
        "done is the last part": "parts",
        "a cancel ends": "parts and cancel",
        "a lost engine ends": "parts and loss",
        "sends behind accepted": "two and a page alone",
        "parts follow": "parts",
        "parts are computed": "parts",
        "received once": "two",
        "late pages behind offered": "two and late allocation alone",
        "accepted is a receive": "two and a page alone",
        "offered is the last part": "two and late allocation alone",
        "quarantine of the receiver": "two and a page",
        "quarantine of the sender": "two",
        "runs behind done": "parts",
        "gives up before it runs": "parts",
        "abandons are cancelled": "parts and cancel",
    },
    "ranks": {
        "joins a round": "plain",
        "quiet behind an empty round": "one",
        "the same on every rank": "plain",
        "agreements in order": "plain",
        "agreements of a generation": ONE_ARRIVAL,
        "all ranks restart": ONE_ARRIVAL,
        "one proposal": "plain",
        "rounds count": "plain",
        "launches behind agreement": "plain",
        "launches on all or none": "plain",
        "a proposal binds": "plain",
        "names the pass": "plain",
    },
}
OF_FORM: dict[str, dict[str, str]] = {
    "engine": {
        "ids rise": "requests have their numbers by position here",
        "only a slot launches": "when a launch is decided costs time, and nothing else",
        "depth": "it bounds what is in flight; every depth is safe",
        "batch ids rise": "results come in order, so that an id that is used twice is told apart by its place",
        "spans follow": "a hole is noticed by 'cached KV is the prefix', a repeated span writes what is there",
        "no pass past the length": "such a row is dead; it costs a forward",
        "tables reach the span": "a row without a page for a position is no row of these machines",
        "retracts what runs": "a request that waits has nothing to lose",
    },
    "transfers": {
        "facts arrive once": "a fact about a transfer that is over is ignored",
        "done behind the result": "a part moves behind the result of its batch here, so done comes behind it, too",
        "halves end once": "clients are in the machine of an engine",
        "finishes behind done": "clients are in the machine of an engine",
    },
    "ranks": {
        "own entry": "noticed by 'the same on every rank'",
        "passes end on all": "a collective has no end before that",
        "proposes in a slot": "when a rank proposes costs time, and nothing else",
        "depth of ranks": "it bounds what is in flight; every depth is safe",
    },
}


def contract_world(name: str, *, lax: str = "") -> ContractWorld:
    """Return a world by its name, without one rule if `lax` is given. Raises: ValueError."""
    kind, _, title = name.removeprefix("contract: ").partition(", ")
    tables = {"engine": ENGINES, "transfers": TRANSFERS, "ranks": RANKS}
    if title not in tables.get(kind, {}):
        names = ", ".join(world.name for world in contract_worlds())
        raise ValueError(f"`world` must name a world of the contract, got `{name}`; they are {names}")
    machine: Machine
    if kind == "engine":
        engine, inputs = ENGINES[title]
        arrivals = {"arrivals": len(engine.arrivals)}
        machine = EngineMachine(engine._replace(inputs=tuple({**arrivals, **inputs}.items())), lax=lax)
    elif kind == "transfers":
        transfers, inputs = TRANSFERS[title]
        machine = TransferMachine(transfers._replace(inputs=tuple(inputs.items())), lax=lax)
    else:
        ranks, inputs = RANKS[title]
        machine = RankMachine(ranks._replace(inputs=tuple(inputs.items())), lax=lax)
    return ContractWorld(f"contract: {kind}, {title}", machine)


def contract_worlds() -> Iterator[ContractWorld]:
    """Yield all worlds of the contract."""
    for kind, table in (("engine", ENGINES), ("transfers", TRANSFERS), ("ranks", RANKS)):
        yield from (contract_world(f"contract: {kind}, {title}") for title in table)
