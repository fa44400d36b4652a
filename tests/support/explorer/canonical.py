"""The canonical form of an engine's state: equal for states from which the same futures follow.

A snapshot also has what no later decision reads (sums, the digest), and numbers of which only the order or the identity
matters: of pages, rows, nodes of the radix cache and batches, and the dates of last uses. Sums are left out; numbers
are given anew in the order in which a fixed walk meets them; dates become ranks. Parts that have no rule here are taken
as they are: states may then count as different that could be one, never the other way round. `search` draws states that
were taken for one and compares what follows from each.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from typing import Any

import msgspec
import numpy as np

from lockstep.core.journal.snapshot import SNAPSHOT_FORMAT
from lockstep.core.scheduler.engine import Engine

State = dict[str, Any]

SUMS = ("format", "digest", "tokens_discarded", "counts", "latency", "host", "pages_width", "outputs_width")
REQUEST_SUMS = ("chunks", "cached_tokens")
_encode = msgspec.msgpack.Encoder(order="deterministic").encode


def key_of(engine: Engine, host: object) -> bytes:
    """Return 16 bytes that name the state of an engine together with the state of its host."""
    return blake2b(_encode((canonical(engine), host)), digest_size=16).digest()


def canonical(engine: Engine) -> State:
    """Return the canonical form in builtins."""
    state: State = msgspec.to_builtins(engine.image(SNAPSHOT_FORMAT, b""), builtin_types=(bytes,))
    state["config"] = blake2b(_encode(state["config"]), digest_size=8).digest()
    for name in SUMS:
        state.pop(name, None)
    _relate_batches(state)
    _relate_launches(state, engine)
    if _is_plain(state):
        _rename_pages(state)
        _rename_rows(state)
        _rename_nodes(state)
    if state.get("ranks"):
        _leave_out_rounds(state)
    for request in state["requests"]:
        for name in REQUEST_SUMS:
            del request[name]
    _rank_uses(state)
    return state


# ------------------------------------------------------------------------------------------------------------- batches


def _relate_batches(state: State) -> None:
    """Count batches from the next one back."""
    following = state.pop("next_batch_id")
    state["refreshed_at"] -= following
    for batch in state["in_flight"]:
        batch["batch_id"] -= following
        if batch["sample_after"] is not None:
            batch["sample_after"] -= following
    for lease in state["leases"]:
        lease["fence"] -= following
    state["fenced_pages"] = [(batch_id - following, pages) for batch_id, pages in state["fenced_pages"]]
    state["pending"] = [(batch_id - following, *rest) for batch_id, *rest in state["pending"]]
    if state.get("media"):
        state["media"]["fenced"] = [(batch_id - following, freed) for batch_id, freed in state["media"]["fenced"]]


def _leave_out_rounds(state: State) -> None:
    """Leave out the numbers of rounds and the digest, which are the same on all ranks; no decision reads them."""
    state["ranks"]["round"], state["ranks"]["digest"] = 0, b""
    for batch in state["in_flight"]:
        if batch.get("ranks"):
            batch["ranks"]["round"] = 0


def _relate_launches(state: State, engine: Engine) -> None:
    """Count launches of decodes from the last one back, as far back as a setting looks."""
    config = engine.config
    runs = [state]
    if state.get("microbatches"):  # the one that was planned last stands in the state, too, which decides nothing
        runs = state["microbatches"]["columns"]
        state["microbatches"]["at"] = 0
        for name in ("cohort", "positions", "horizon", "decode_owed", "decode_launches", "extended_at", "forced_at"):
            state.pop(name)
    for run in runs:
        launches, interval = run["decode_launches"], config.prefill_decode_interval
        run["extended_at"] = min(launches - run["extended_at"], interval)
        run["forced_at"] = launches - run["forced_at"] if config.retract_every else 0
        run["decode_launches"] = launches % config.retract_every if config.retract_every else 0
        run["horizon"] = 0  # follows from the positions and limits of the members
    if config.schedule_policy != "hrrn":
        state["prefilled_tokens"] = 0
        for request in state["requests"]:
            request["prefilled_before"] = 0
    if not config.waiting_prefix_refresh:
        state["refreshed_at"] = 0
    if config.reserve != "ratio":
        state["ratio"] = 0.0


# --------------------------------------------------------------------------------------------------- pages, rows, nodes


def _is_plain(state: State) -> bool:
    """Whether pages, rows and nodes are named by the parts below only: other pools have columns by their numbers."""
    others = ("tiers", "hybrid", "adapters", "spare", "transfers", "media")
    return not any(state.get(name) for name in others) and not state["sessions"]


class _Names:
    """New numbers, in the order in which the old ones are met."""

    def __init__(self) -> None:
        self._known: dict[int, int] = {}

    def of(self, numbers: Iterable[int]) -> list[int]:
        """Return the new numbers. Negative ones stand for nothing and stay."""
        known = self._known
        return [number if number < 0 else known.setdefault(number, len(known)) for number in numbers]

    def packed(self, numbers: bytes) -> list[int]:
        """Return the new numbers of packed int32."""
        return self.of(np.frombuffer(numbers, np.int32).tolist())


def _rename_pages(state: State) -> None:
    """Number pages as requests, deferred frees and the radix cache hold them, and then as they will be allocated."""
    pages = _Names()
    for request in state["requests"]:
        request["row_pages"] = pages.packed(request["row_pages"])
    for lease in state["leases"]:
        lease["row_pages"] = pages.packed(lease["row_pages"])
    if state["radix"] is not None:
        for number, (namespace, nodes) in enumerate(state["radix"]["trees"]):
            renamed = [(*node[:5], pages.packed(node[5]), node[6]) for node in nodes]
            state["radix"]["trees"][number] = (namespace, renamed)
    state["fenced_pages"] = [(batch_id, pages.packed(held)) for batch_id, held in state["fenced_pages"]]
    state["rewrites"] = [(row, first, pages.packed(held)) for row, first, held in state["rewrites"]]
    for batch in state["in_flight"]:
        batch["delta_pages"] = pages.packed(batch["delta_pages"])
    state["pool"] = len(state["pool"]["free"])


def _rename_rows(state: State) -> None:
    """Number rows as requests hold them."""
    rows = _Names()
    for request in state["requests"]:
        (request["row"],) = rows.of((request["row"],))
    for lease in state["leases"]:
        (lease["row"],) = rows.of((lease["row"],))
    for batch in state["in_flight"]:
        for name in ("rows", "opened_rows"):
            batch[name] = rows.packed(batch[name])
        runs = np.frombuffer(batch["delta_runs"], np.int32)
        batch["delta_runs"] = [rows.of(runs[::3].tolist()), runs[1::3].tolist(), runs[2::3].tolist()]
        facts = np.frombuffer(batch["sampler_facts"], np.int32)
        samplers = len(batch["sample_rows"]) // 4
        batch["sampler_facts"] = [rows.of(facts[:samplers].tolist()), facts[samplers:].tolist()]
        batch["dead"] = sorted(rows.of(batch["dead"]))
        for taken in batch["rows_taken"]:
            (taken["row"],) = rows.of((taken["row"],))
    state["rewrites"] = [(rows.of((row,)), first, held) for row, first, held in state["rewrites"]]
    state["free_rows"] = len(state["free_rows"])


def _rename_nodes(state: State) -> None:
    """Number nodes of the radix cache in the order of its walk."""
    nodes = _Names()
    radix = state["radix"]
    if radix is not None:
        for number, (namespace, tree) in enumerate(radix["trees"]):
            radix["trees"][number] = (namespace, [(*nodes.of(node[:2]), *node[2:]) for node in tree])
        radix["next_number"] = 0
    for holder in (*state["requests"], *state["leases"]):
        if holder["handle"] is not None:
            (holder["handle"],) = nodes.of((holder["handle"],))
    state["pending"] = [(batch_id, *nodes.of((node,)), pages) for batch_id, node, pages in state["pending"]]


# --------------------------------------------------------------------------------------------------------- dates of use


def _rank_uses(state: State) -> None:
    """Replace dates of last uses by their ranks, and leave out the clocks that they were read from."""
    radix = state["radix"]
    if radix is not None:
        radix["tick"] = radix["epoch"] = 0
        ranks = _ranks(node[2] for _, tree in radix["trees"] for node in tree)
        radix["trees"] = [
            (namespace, [(*node[:2], ranks[node[2]], *node[3:]) for node in tree]) for namespace, tree in radix["trees"]
        ]
    ranks = _ranks(session["used"] for session in state["sessions"])
    for session in state["sessions"]:
        session["used"] = ranks[session["used"]]
    state["session_uses"] = 0
    if state["adapters"]:
        adapters = state["adapters"]
        ranks = _ranks(used for _, _, used in adapters["slots"])
        adapters["slots"] = [(adapter, loading, ranks[used]) for adapter, loading, used in adapters["slots"]]
        adapters["uses"] = 0


def _ranks(dates: Iterable[int]) -> dict[int, int]:
    return {date: rank for rank, date in enumerate(sorted(set(dates)))}
