"""Deliberate bugs in tiers, hybrid memory, sessions, control, ranks and transfers, each one edit of the source.

They are mistakes that a change of these features makes by accident: a condition that looks redundant, a mark that is
not taken back, an index that is one off. An edit names the text that it replaces, so a plant fails where the source has
changed. `tests/test_swarm.py` and `tests/test_explore.py` are the proof that all are found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import FunctionType
from typing import NamedTuple

from lockstep.core.admin.maintenance import Maintenance
from lockstep.core.features import data_parallel
from lockstep.core.features.data_parallel import Rounds
from lockstep.core.features.disaggregation import Transfers
from lockstep.core.features.media import EncoderCache
from lockstep.core.features.multiplexing import Multiplexer
from lockstep.core.features.sessions import Sessions
from lockstep.core.kv.memory import Memory
from lockstep.core.kv.state_pool import StatePool
from lockstep.core.kv.tiers import Tiers
from lockstep.core.kv.window_pool import WindowPool
from lockstep.core.scheduler.results import Results
from tests.support.mutation.live import edited_code

TIERED, HYBRID, ANY, COMMANDED, CONVERSING, MULTIPLEXED, FLEET, RANKS = (
    "tiered",
    "hybrid",
    "any",
    "commanded",
    "conversing",
    "multiplexed",
    "fleet",
    "ranks",
)


class FeaturePlant(NamedTuple):
    """One edit of one function, and what must show it."""

    what: str
    function: Callable[..., object]
    before: str
    after: str
    histories: str  # the kind of random histories
    world: tuple[str, ...] = ()  # features of a small world; of fleets and ranks its name


PLANTS: dict[str, FeaturePlant] = {
    # ----------------------------------------------------------------------------------------------------- multiplexing
    "published_before_its_last_layers": FeaturePlant(
        "KV of some layers is shared as if all were computed.",
        Results.collect,
        "if by_layers and self._multiplexer.is_partial(plan):",
        "if False:",
        MULTIPLEXED,
    ),
    "leaves_with_kv_of_some_layers": FeaturePlant(
        "A request that is cancelled between two parts of its prompt publishes KV that lacks layers.",
        Multiplexer.leave,
        "return found[0].start",
        "return found[0].stop",
        MULTIPLEXED,
    ),
    "freed_by_the_other_stream": FeaturePlant(
        "Rows and pages of one stream are freed by a later result of the other one.",
        Memory.release_deferred,
        "if deferred.free_after not in flying and",
        "if (not flying or deferred.free_after < flying[-1]) and",
        MULTIPLEXED,
    ),
    "layers_of_two_weights": FeaturePlant(
        "New weights come between the layers of a prompt.",
        Maintenance._make_way,
        'job.control.mode == "in_place"',
        'job.control.mode == "never"',
        MULTIPLEXED,
    ),
    "tables_changed_by_the_other_stream": FeaturePlant(
        "A decode carries changes of the page tables of prompts, whose stream does not wait for it.",
        Memory.changes,
        "if one.row in rows]",
        "if True]",
        MULTIPLEXED,
    ),
    # ------------------------------------------------------------------------------------------------------------ tiers
    "copies_while_weights_change": FeaturePlant(
        "Pages are copied to the host while the host replaces the weights or releases the memory of the device.",
        Tiers.back_up,
        "if self.copies_blocked:",
        "if False:",
        TIERED,
    ),
    "store_that_failed_counts": FeaturePlant(
        "Pages that a store did not write stay marked as stored, so that storage never gets them.",
        Tiers._settle_store,
        "self.stored[operation.host_pages[done:]] = False",
        "pass",
        TIERED,
    ),
    "second_load_for_a_request": FeaturePlant(
        "A request that waits for a load of another request begins one more.",
        Tiers.begin_load,
        "if candidate.loaded or candidate.operation != NO_OPERATION:",
        "if candidate.loaded and candidate.operation == NO_OPERATION:",
        TIERED,
    ),
    "prefetches_beyond_their_share": FeaturePlant(
        "Prefetches take more host pages than `prefetch_share` allows.",
        Tiers._look_ahead,
        "most - self.operations.prefetching_pages",
        "most",
        TIERED,
    ),
    "orphan_is_kept": FeaturePlant(
        "A load whose path was invalidated meanwhile is put into the radix cache all the same.",
        Tiers._settle,
        "orphan = handle.invalidated",
        "orphan = False",
        TIERED,
    ),
    # ----------------------------------------------------------------------------------------------------------- hybrid
    "checkpoint_freed_in_flight": FeaturePlant(
        "The checkpoint of a row is given to another row while the batch that writes it is in flight.",
        StatePool._spare,
        "one[2] < oldest",
        "one[2] <= oldest",
        HYBRID,
    ),
    "decode_checkpoint_freed_in_flight": FeaturePlant(
        "An older checkpoint of a decode is freed while the batch that writes it is in flight.",
        StatePool._forget_decodes,
        "one[2] < oldest",
        "one[2] <= oldest",
        HYBRID,
    ),
    "window_of_an_extend_slides": FeaturePlant(
        "The rows of the first prompt in flight are not left out when windows slide.",
        WindowPool.slides_by_growth,
        "for extending in busy:",
        "for extending in busy[1:]:",
        HYBRID,
    ),
    "received_state_owes_nothing": FeaturePlant(
        "A row with a received state leaves no checkpoint at the end of the next page.",
        StatePool.adopt_row,
        "self.owed.add(row)",
        "pass",
        FLEET,
    ),
    # --------------------------------------------------------------------------------------------------------- sessions
    "busy_sessions_yield_first": FeaturePlant(
        "Sessions with a turn give up their KV before idle ones.",
        Sessions._by_use,
        "(not session.idle, session.used)",
        "(session.idle, session.used)",
        CONVERSING,
    ),
    "rewound_turn_keeps_the_output": FeaturePlant(
        "A turn that drops the output of the turn before it keeps it.",
        Sessions.turn_ends,
        "session.output_start = session.length - outputs",
        "session.output_start = session.length",
        CONVERSING,
    ),
    "use_of_a_session_has_no_date": FeaturePlant(
        "The time-out of an idle session counts from its first use.",
        Sessions._use,
        "session.idle_since_us = now_us",
        "pass",
        CONVERSING,
    ),
    "turn_beyond_the_capacity": FeaturePlant(
        "The output of a turn may exceed the capacity of its session.",
        Sessions._compose,
        "room = min(self._scheduler.config.request_tokens_max, capacity) - prompt",
        "room = self._scheduler.config.request_tokens_max - prompt",
        CONVERSING,
    ),
    # -------------------------------------------------------------------------------------------------- media, commands
    "encoder_output_dropped_in_flight": FeaturePlant(
        "Encoder output that a batch in flight reads for a request that has left makes room for other contents.",
        EncoderCache._droppable,
        "pinned.update(digest for _, needed in self.deferred for digest in needed)",
        "pass",
        CONVERSING,
    ),
    "weights_swapped_under_copies": FeaturePlant(
        "New weights are ordered while copies of the device's pages are under way.",
        Maintenance._advance,
        "if self._scheduler.memory.operations.device_busy:",
        "if False:",
        TIERED,
    ),
    "order_lost_in_a_restart": FeaturePlant(
        "An order to the host that a restart has cut off is not given again.",
        Maintenance.restarted,
        "job.ordered = False",
        "pass",
        CONVERSING,
    ),
    # ------------------------------------------------------------------------------------------------------------ ranks
    "extends_of_this_rank_only": FeaturePlant(
        "A rank takes into account whether it extends itself, not whether any rank does.",
        Rounds._fold,
        "any(counts[2] for counts in event.counts)",
        "bool(event.counts[self.rank][2])",
        RANKS,
    ),
    "delay_without_end": FeaturePlant(
        "The wait of prompts for other ranks counts from the pass before, so that its limit in time is never reached.",
        data_parallel.delayed,
        "delay.since_us if delay.passes else time_us",
        "time_us",
        RANKS,
    ),
    # -------------------------------------------------------------------------------------------------------- transfers
    "kv_of_other_weights_accepted": FeaturePlant(
        "A decode engine accepts KV that the prefill engine has computed with other weights.",
        Transfers.advanced,
        "transfer.weights == event.weights_version == self._scheduler.memory.weights_version",
        "transfer.weights == self._scheduler.memory.weights_version",
        FLEET,
    ),
    "first_token_ends_too_early": FeaturePlant(
        "The first token of a received request may end it before `min_new_tokens`.",
        Transfers._begin_output,
        "stops = request.min_new_tokens <= 1",
        "stops = True",
        FLEET,
    ),
}


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Context in which a bug is planted."""
    plant = PLANTS[name]
    function = plant.function
    assert isinstance(function, FunctionType), name
    sound = function.__code__
    function.__code__ = edited_code(function, plant.before, plant.after)
    try:
        yield
    finally:
        function.__code__ = sound


FEATURE_PLANTS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    name: partial(planted, name) for name in PLANTS
}
