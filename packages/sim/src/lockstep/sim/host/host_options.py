"""Configuration of a simulated host: options, optional features, links to other engines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lockstep.core.scheduler.engine import Engine
from lockstep.sim.host.device import Device
from lockstep.sim.host.ports import HostRecord, MetricsSink, Observer, RankExchange, TransferPort

if TYPE_CHECKING:
    from lockstep.sim.host.adapters import AdapterLane
    from lockstep.sim.host.blocks import BlockRows
    from lockstep.sim.host.cache_tiers import TierLinks
    from lockstep.sim.host.encoder_lane import EncoderLane
    from lockstep.sim.host.expert_traffic import ExpertTraffic
    from lockstep.sim.host.forcing import Forcing
    from lockstep.sim.host.sessions import Conversations
    from lockstep.sim.host.speculation import SpeculationModel

GRAMMAR_COMPILE_US = 50_000  # estimate: JSON schemas of a few dozen fields, compiled in parallel to the loop
ADAPTER_LOAD_US = 20_000  # estimate: 200 MB from host memory to the device at an effective 10 GB/s over PCIe


@dataclass(frozen=True, kw_only=True)
class HostWatch:
    """Callbacks of one host. None of them changes the engine or the host."""

    check: Callable[[Engine], object] | None = None  # e.g. `lockstep.core.invariants.self_check`
    check_every: int = 1  # events between two calls of `check`
    on_finish: Callable[[int], None] | None = None  # called after each end of a request with the number of ends
    observer: Observer | None = None  # receives every step outside uniform stretches of decodes


NOT_WATCHED = HostWatch()


@dataclass(frozen=True, kw_only=True)
class HostLinks:
    """Connections of one engine to the other engines of its cluster."""

    port: TransferPort | None = None  # transfers of KV; None: neither a prefill nor a decode engine
    exchange: RankExchange | None = None  # exchange with the other data-parallel ranks; None: there are none
    device_type: Callable[..., Device] | None = None  # builds the device; None: `Device`
    wrap_metrics: Callable[[MetricsSink], MetricsSink] | None = None  # puts a sink in front of the engine's metrics


ALONE = HostLinks()


@dataclass(frozen=True, kw_only=True)
class HostFeatures:
    """Models of the optional features of one engine. A feature that the engine does not use is None."""

    speculation: SpeculationModel | None = None  # acceptance and cost of drafts; required if the engine verifies drafts
    blocks: BlockRows | None = None  # passes of blocks; required if the model answers in blocks
    forcing: Forcing | None = None  # tokens that grammars force; required if the engine computes them together
    tiers: TierLinks | None = None  # links to the cache tiers; required if the engine has tiers
    encoder: EncoderLane | None = None  # required if requests have media
    adapters: AdapterLane | None = None  # adapters registered at the start, and their loads
    conversations: Conversations | None = None  # sessions that the engine keeps; None: it keeps none
    experts: ExpertTraffic | None = None  # required if the load of experts is measured
    record: HostRecord | None = None  # facts of a recorded run in place of all models above; None: nothing is recorded
    state_copy_us: float = 0.0  # copy of one request's recurrent state


PLAIN = HostFeatures()


@dataclass(frozen=True, kw_only=True)
class HostOptions:
    """Options of one host.

    `max_new_tokens` is the limit of every request with output; None: the limit is the turn's own length. With a limit,
    a shorter turn ends with EOS_TOKEN_ID, which must be among the config's `eos_token_ids`. `decode_runs` simulates
    uniform stretches of decodes in one go, which changes the wall-clock time of the simulation only. It has no effect
    with `watch.check`, because the engine is not up to date inside such a stretch.
    """

    seed: int = 0
    name: str = "engine0"
    max_new_tokens: int | None = None
    grammar_compile_us: int = GRAMMAR_COMPILE_US  # time to compile a grammar, in parallel to the CPU lane
    adapter_load_us: int = ADAPTER_LOAD_US  # time of a load without `features.adapters`; such loads run in parallel
    frontend_us: int = 0  # from the engine's last token to the arrival of the client's next request, without think time
    tenants_of_engines: frozenset[str] = frozenset()  # their think times have the front end in them already
    receive_interval: int = 1  # launches between two receptions of arrivals, see `intake.ReceiveSkipper`
    decode_runs: bool = True
    watch: HostWatch = NOT_WATCHED
    links: HostLinks = ALONE
    features: HostFeatures = PLAIN
