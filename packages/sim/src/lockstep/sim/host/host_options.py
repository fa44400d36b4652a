"""What a simulated host is configured with: its options, its optional features, its links to other engines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lockstep.core.scheduler.engine import Engine
from lockstep.sim.host.device import Device
from lockstep.sim.host.ports import MetricsSink, Observer, RankExchange, TransferPort

if TYPE_CHECKING:
    from lockstep.sim.host.adapters import AdapterLane
    from lockstep.sim.host.cache_tiers import TierLinks
    from lockstep.sim.host.encoder_lane import EncoderLane
    from lockstep.sim.host.forcing import Forcing
    from lockstep.sim.host.sessions import Conversations
    from lockstep.sim.host.speculation import SpeculationModel

GRAMMAR_COMPILE_US = 50_000  # an estimate: JSON schemas of a few dozen fields, compiled beside the loop
ADAPTER_LOAD_US = 20_000  # an estimate: 200 MB from host memory to the device at an effective 10 GB/s over PCIe


@dataclass(frozen=True, kw_only=True)
class HostWatch:
    """Callbacks of one host. None of them changes anything."""

    check: Callable[[Engine], object] | None = None  # e.g. `lockstep.core.invariants.self_check`
    check_every: int = 1  # events between two calls of `check`
    on_finish: Callable[[int], None] | None = None  # called with the number of requests that ended, after each
    observer: Observer | None = None  # receives every step but those of uniform stretches of decodes


NOT_WATCHED = HostWatch()


@dataclass(frozen=True, kw_only=True)
class HostLinks:
    """How one engine is connected to the other engines of its cluster."""

    port: TransferPort | None = None  # of a prefill or decode engine: where its KV goes and comes from
    exchange: RankExchange | None = None  # of one of several data-parallel ranks: the other ranks
    device_type: type[Device] | None = None  # what runs batches; None: a device of its own, see `device_type_of`
    wrap_metrics: Callable[[MetricsSink], MetricsSink] | None = None  # puts a sink in front of the engine's metrics


ALONE = HostLinks()


@dataclass(frozen=True, kw_only=True)
class HostFeatures:
    """Models of the optional features of one engine. A feature that the engine does not use is None."""

    speculation: SpeculationModel | None = None  # acceptance and cost of drafts, where the config has a method
    forcing: Forcing | None = None  # what grammars force, where the engine computes forced tokens together
    tiers: TierLinks | None = None  # links to the cache tiers; an engine with tiers needs them
    encoder: EncoderLane | None = None  # where requests have media
    adapters: AdapterLane | None = None  # adapters known from the beginning, and their loads
    conversations: Conversations | None = None  # where turns are of sessions that the engine keeps
    state_copy_us: float = 0.0  # a copy of one request's recurrent state


PLAIN = HostFeatures()


@dataclass(frozen=True, kw_only=True)
class HostOptions:
    """Options of one host.

    `max_new_tokens` is the limit of every request with any output; None is the turn's own length. With a limit, a turn
    whose length is below it ends with EOS_TOKEN_ID, which must be among the config's `eos_token_ids`.
    `decode_runs` takes uniform stretches of decodes in one go and changes only the time that this takes. It has no
    effect with `watch.check`, because the engine is not up to date inside such a stretch.
    """

    seed: int = 0
    name: str = "engine0"
    max_new_tokens: int | None = None
    grammar_compile_us: int = GRAMMAR_COMPILE_US  # beside the lane
    adapter_load_us: int = ADAPTER_LOAD_US  # without `features.adapters`; loads overlap with everything
    receive_interval: int = 1  # launches between two looks for arrivals, see `intake.ReceiveSkipper`
    decode_runs: bool = True
    watch: HostWatch = NOT_WATCHED
    links: HostLinks = ALONE
    features: HostFeatures = PLAIN
