"""The setup of a run: the loaded and checked parts of a scenario, and the facts that its run folder records."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from typing import Any

import msgspec

from lockstep.core.contract.config import SchedConfig
from lockstep.core.journal.records import JournalHeader
from lockstep.host.host_header import SIMULATOR, HostHeader
from lockstep.sim.cost import (
    UNCALIBRATED,
    Calibration,
    CapacityError,
    CostModel,
    CpuModel,
    GpuSpec,
    KvCapacity,
    ModelSpec,
)
from lockstep.sim.cost.calibration import Case
from lockstep.sim.cost.engines import NONE
from lockstep.sim.cost.expert_balance import spread_of
from lockstep.sim.cost.hardware import domains_of, network_of, scale_up_gpus
from lockstep.sim.cost.lora import LoraSpec, slot_bytes
from lockstep.sim.cost.models import checked_weights_dtype
from lockstep.sim.cost.parallel import Parallelism
from lockstep.sim.cost.stages import stages_of
from lockstep.sim.host.adapters import AdapterLane, adapter_link, describe_loads
from lockstep.sim.host.blocks import BlockPassModel
from lockstep.sim.host.cache_tiers import TierLinks
from lockstep.sim.host.forcing import Forcing
from lockstep.sim.host.hybrid_memory import (
    block_bytes,
    state_copy_us,
    window_tokens_of,
)
from lockstep.sim.host.page_bytes import PageBytes
from lockstep.sim.host.speculation import Drafting
from lockstep.sim.results.code_version import code_commit, code_version
from lockstep.sim.run.capacity import _capacity
from lockstep.sim.run.encoding import EncoderSetup
from lockstep.sim.run.experts import ExpertSetup
from lockstep.sim.run.layout import layout_of
from lockstep.sim.run.load import describe_load
from lockstep.sim.run.ranks import config_of_engine
from lockstep.sim.scenario.scenario import Scenario
from lockstep.sim.scenario.tier_options import NO_TIERS, HostTiers
from lockstep.sim.workload.adapters import adapters_in
from lockstep.sim.workload.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A scenario with everything that it names, loaded and checked, and the settings computed from it."""

    scenario: Scenario
    model: ModelSpec
    gpu: GpuSpec
    workload: Workload
    cost: CostModel
    cpu: CpuModel
    config: SchedConfig
    kv: KvCapacity | None  # computed capacity; None if `pages` was given
    tiers: HostTiers = NO_TIERS
    calibration: Calibration = UNCALIBRATED  # already applied to `cost` and `cpu`
    debug: int = 0  # level of LOCKSTEP_DEBUG, see watch.py
    overridden: tuple[str, ...] = ()  # names of settings set by environment variables
    drafting: Drafting | None = None  # None: no drafts are verified
    blocks: BlockPassModel | None = None  # None: the model answers token by token
    forcing: Forcing | None = None  # None: forced tokens are not computed together
    encoding: EncoderSetup | None = None  # None: requests have no media
    lora: LoraSpec | None = None  # None: requests use no adapters
    experts: ExpertSetup | None = None  # None: the load of experts is not measured

    @property
    def title(self) -> str:
        return f"{self.model.name} on {self.hardware}"

    @property
    def split(self) -> Parallelism:
        return layout_of(self.scenario, self.model)

    @property
    def host_page_bytes(self) -> int | None:
        """Bytes of a KV page in host memory; None without a host cache."""
        return self._page_bytes.on_host if self.tiers.host_cache_gb else None

    @property
    def _page_bytes(self) -> PageBytes:
        return self._host_bytes[0]

    @property
    def _host_bytes(self) -> tuple[PageBytes, dict[str, PageBytes]]:
        """Bytes of a KV page below the device, and by kind those of a window block and of a state block."""
        page_size, kv_dtype = self.config.page_size, self.scenario.kv_dtype
        if self.config.hybrid is msgspec.UNSET:
            return PageBytes.of(self.model, self.split, kv_dtype, page_size), {}
        return block_bytes(self.model, self.split, kv_dtype, page_size)

    @property
    def host_block_bytes(self) -> dict[str, int]:
        """Bytes of a window block and of a state block in host memory, by kind; empty if the model has none."""
        return {kind: one.on_host for kind, one in self._host_bytes[1].items()}

    def tier_links(self, name: str) -> TierLinks | None:
        """Return new lanes to the cache tiers of an engine, by its name; None if there are no tiers."""
        if not self.tiers.host_cache_gb:
            return None
        key = f"{self.scenario.seed} {name}"
        return TierLinks(self.tiers, self._page_bytes, self.gpu, self._host_bytes[1], key=key)

    @property
    def slot_bytes(self) -> int:
        """Bytes of an adapter slot on one GPU of the stage with the largest slots; 0 if no request uses an adapter."""
        if self.lora is None:
            return 0
        one = replace(self.split, pp=1)
        return max(slot_bytes(stage.model, one, self.lora) for stage in stages_of(self.model, self.split))

    def adapter_lane(self, tiers: TierLinks | None) -> AdapterLane | None:
        """Return a new lane for loads of adapters, None without adapters. It shares the link of the tiers, if any."""
        if self.lora is None:
            return None
        link = adapter_link(self.gpu) if tiers is None else tiers.up
        return AdapterLane(adapters_in(self.workload.turns), self.slot_bytes, link)

    @property
    def state_copy_us(self) -> float:
        """Time to copy one request's recurrent state; 0 without hybrid memory."""
        return state_copy_us(self.model, self.gpu, self.split) if self.config.hybrid is not msgspec.UNSET else 0.0

    @property
    def hardware(self) -> str:
        """Number and name of the GPUs, such as `8 x H200-SXM`, and the layout unless it is plain tensor parallelism."""
        layout = "" if self.split.is_plain else f" ({self.split})"
        return f"{self.split.gpus} x {self.gpu.name}{layout}"

    def slowed(self, factor: float) -> Setup:
        """Return a setup with the time of every batch multiplied by `factor`, and without debug output."""
        drafting = self.drafting.slowed(factor) if self.drafting is not None else None
        encoding = self.encoding.slowed(factor) if self.encoding is not None else None
        cost = UNCALIBRATED.cost_model(self.cost, factor)
        return replace(self, cost=cost, drafting=drafting, encoding=encoding, debug=0)

    def doubts(self, *, has_intervals: bool = True) -> list[str]:
        """Return the assumptions and the limits of the simulation, one sentence each.

        They include settings beyond the limits of the model or of the GPU, which are simulated as given.
        """
        lines = []
        given, context = self.config.context_tokens_max, self.model.context_tokens_max
        if given > context:
            lines.append(f"context_tokens_max {given:,} is beyond the model's {context:,}; simulated all the same")
        if self.kv is None and self.model.whole is None:
            try:
                fits = _capacity(self.scenario, self.model, self.gpu, config_of_engine(self.config)).pages
            except CapacityError:
                fits = 0
            if config_of_engine(self.config).pages > fits:
                lines.append(f"{self.config.pages:,} KV pages do not fit this GPU, {fits:,} do; simulated all the same")
        if self.config.hybrid is msgspec.UNSET and (window_tokens_of(self.model) or self.model.delta is not None):
            lines.append(
                f"{self.model.name} has layers without full attention; --hybrid-memory on gives them own pools"
            )
        if self.model.whole is not None:
            lines.append(
                f"no encoder was measured: {self.model.name} has the kernels and the engine's costs of language "
                "models, and prompts of one pass are not padded to a common length"
            )
        lines += self._layout_doubts()
        if self.encoding is not None:
            lines += self.encoding.doubts(self.config)
        if self.lora is not None:
            lines.append(
                "adapters: their products are uncalibrated; passes with any are launched kernel by kernel, as in this "
                "runtime, where others may replay CUDA graphs"
            )
        if self.drafting is not None and self.calibration.engine != NONE:
            beyond = "; intervals do not cover that" if has_intervals else ""
            lines.append(f"drafts: {self.calibration.engine} was measured without any{beyond}")
        more = self.calibration.doubts(self.case, self.config.overlap_depth, has_intervals=has_intervals)
        return lines + more

    @property
    def case(self) -> Case:
        """What decides whether the errors of the calibration are known for this simulation."""
        turns = self.workload.turns
        return Case(
            self.model.name,
            self.gpu.name,
            self.split,
            checked_weights_dtype(self.model, self.scenario.weights_dtype),
            self.scenario.kv_dtype,
            float(turns.prompt_tokens.mean()) if len(turns) else 0.0,
        )

    @property
    def is_tested(self) -> bool:
        """Whether the coverage of the calibration's intervals was counted on predictions like this simulation.

        No fit has points with drafts, media, adapters, or models that compute prompts whole.
        """
        parts = (self.drafting, self.blocks, self.encoding, self.lora, self.model.whole)
        return all(part is None for part in parts) and self.calibration.covers(self.case)

    def _layout_doubts(self) -> list[str]:
        """Return the assumptions about rows, experts and stages, one sentence each."""
        split, lines = self.split, self._collective_doubts()
        if self.config.shares_passes:
            lines.append(
                f"attention_dp {split.attention_dp}: a scheduler and a prefix cache per rank, which share out the "
                f"engine's limits; a request has to fit the {self.config.pool_tokens:,} tokens of a rank"
            )
        elif split.attention_dp > 1:
            shard_tokens = self.config.pages // split.attention_dp * self.config.page_size
            lines.append(
                f"attention_dp {split.attention_dp}: rows are taken as spread evenly over shards, prefix caches as "
                f"one; a request has to fit the {shard_tokens:,} tokens of a shard"
            )
        if split.ep > 1 and not split.expert_cv:
            lines.append(f"ep {split.ep}: routing is even (--expert-cv 0), so ranks differ by chance alone")
        if self.config.experts is not msgspec.UNSET:
            lines.append(
                f"eplb: experts are placed by the load measured in {split.eplb_interval:,} passes, at first by that of "
                "as many passes before the run"
            )
        elif split.eplb and self.model.experts is not None:
            spread = spread_of(self.model.experts, split)
            lines.append(
                f"eplb: in the long run the fullest rank has {spread.long_run:.2f} times its share, "
                f"{spread.unbalanced:.2f} times without"
            )
        if split.pp > 1 and not self.config.pipelines:
            depth = self.config.overlap_depth
            lines.append(
                f"pp {split.pp}: at most {depth + 1} batches are in the pipeline, and a row decodes again only when "
                "its token is back; engines with a set of rows per stage keep stages busier"
            )
        if self.config.pipelines and self.config.overlap_depth:
            lines.append(
                f"overlap_depth {self.config.overlap_depth} with microbatches: where two batches of one follow each "
                "other, the second keeps the first stage waiting for its tokens; pp_async_batch_depth does not"
            )
        return lines

    def _collective_doubts(self) -> list[str]:
        """Return the assumptions about collectives that were measured on other hardware, or not at all."""
        split, gpu, lines = self.split, self.gpu, []
        domains = max(domains_of(gpu, split.tp), domains_of(gpu, split.ep))
        if domains > 1:
            network, latency = network_of(gpu)
            lines.append(
                f"tp {split.tp} spans {domains} nodes of {scale_up_gpus(gpu)} GPUs: the network between them is not "
                f"measured, taken as {network.value:g} GB/s per GPU and {latency.value:g} us"
            )
        if split.tp > 1 and "scale_up_gbs" not in gpu.datasheet and not gpu.all_reduce:
            lines.append(
                f"tp {split.tp} over PCIe: collectives of {gpu.name} are not measured, and are taken as those of as "
                "many L40S; they depend on the machine's PCIe switches, by a factor of 3 and more"
            )
        return lines

    def header(self, engine: int | None = None, engines: int | None = None) -> JournalHeader:
        """Return the header of the journal. It has no times and no paths: equal runs write equal journals.

        Args:
            engine, engines: in a cluster, the number of this engine and the number of engines.
        """
        return JournalHeader(
            config=self.config,
            seed=self.scenario.seed,
            model_digest=blake2b(repr(asdict(self.model)).encode(), digest_size=16).hexdigest(),
            host=HostHeader(
                kind=SIMULATOR,
                model=self.model.name,
                gpu=self.gpu.name,
                tp=self.scenario.tp,
                layout=self.split.describe(),
                cost=str(self.cost.describe()["kind"]),
                calibration=self.calibration.title,
                workload=self.workload.name,
                workload_digest=self.workload.digest,
                media=self.scenario.media,
                samples=self.scenario.samples,
                server_sessions="on" if self.scenario.server_sessions else None,
                adapters=self.scenario.adapters,
                engine=engine,
                engines=engines,
            ).entries(),
        )

    def about(self) -> dict[str, Any]:
        """Return everything that is needed to repeat the run, and the sources of all constants; for metrics.json."""
        from lockstep.sim.results.results import METRICS_FORMAT, METRICS_VERSION

        workload, scenario = self.workload, self.scenario
        return {
            "format": METRICS_FORMAT,
            "format_version": METRICS_VERSION,
            "command": scenario.command(),
            "seed": scenario.seed,
            "version": code_version(),
            "commit": code_commit(),
            "model": self.model.name,
            "gpu": self.gpu.name,
            "tp": scenario.tp,
            **self.split.describe(),
            "workload": describe_load(scenario, workload),
            "scheduler": msgspec.to_builtins(self.config),
            "max_new_tokens": scenario.max_new_tokens,
            "grammar_compile_us": scenario.grammar_compile_us,
            "receive_interval": scenario.receive_interval,
            "kv_capacity": self.kv.describe() if self.kv is not None else None,
            "cost_model": self.cost.describe(),
            "cpu_model": self.cpu.describe(),
            "calibration": self.calibration.describe(),
            **({} if self.drafting is None else {"speculation": self.drafting.describe()}),
            **({} if self.blocks is None else {"diffusion": self.blocks.describe()}),
            **({} if self.forcing is None else {"grammar_forces": self.forcing.describe()}),
            **({} if self.encoding is None else {"media": self.encoding.describe()}),
            **({} if scenario.samples is None else {"samples": scenario.samples}),
            **({"server_sessions": True} if scenario.server_sessions else {}),
            **({} if self.lora is None else {"adapters": self._describe_adapters(self.lora)}),
            **({"tiers": msgspec.to_builtins(self.tiers)} if self.tiers.host_cache_gb else {}),
            **({"state_copy_us": self.state_copy_us} if self.state_copy_us else {}),
        }

    def _describe_adapters(self, lora: LoraSpec) -> dict[str, Any]:
        """Return the room for adapters and the figures of a load."""
        names = adapters_in(self.workload.turns)
        return {
            "asked": self.scenario.adapters,
            "adapters": len(names),
            "max_loras": lora.slots,
            "max_lora_rank": lora.rank,
            "lora_targets": list(lora.targets),
            **describe_loads(self.slot_bytes, self.gpu),
        }
