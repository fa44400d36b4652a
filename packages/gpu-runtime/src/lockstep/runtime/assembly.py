"""Build one rank, or a whole engine, from its settings: load the model, size the KV pool, make the executor.

Every rank of a group runs this code at the same time: rank 0 in the process of `LLM`, the others in `worker.py`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
import torch
from torch import Tensor

from lockstep.core.contract.commands import RowTaken
from lockstep.core.contract.config import Multiplexing, SchedConfig
from lockstep.core.contract.errors import ConfigError
from lockstep.core.contract.events import SamplingParams
from lockstep.core.contract.hybrid_memory import HybridMemory
from lockstep.host import whole_prompts
from lockstep.host.batches import Int32s, RowContext
from lockstep.host.block_settings import block_settings
from lockstep.host.engine_options import GraphMode, Numerics
from lockstep.host.loop import HostClock
from lockstep.host.page_store import open_store
from lockstep.host.tier_options import cache_tiers
from lockstep.runtime.attention import AttentionBackend, Needs, choose, make
from lockstep.runtime.attention.rules import names_of
from lockstep.runtime.blocks import DeviceBlocks, check_blocks, with_threshold
from lockstep.runtime.canary import Canary
from lockstep.runtime.draft_model import ModelDrafter
from lockstep.runtime.draft_sources import Draft, check_trees, draft_of, takes_media
from lockstep.runtime.drafting import Drafter, DraftingRows, NgramDrafter
from lockstep.runtime.executor import Executor, LookAhead, Matchers, RowSampler, RunnableModel
from lockstep.runtime.expert_load import counter_for
from lockstep.runtime.expert_moves import with_placing
from lockstep.runtime.forward import ForwardBatch, RankTokens, WindowedPages
from lockstep.runtime.graphs import (
    ROWS_MAX,
    CudaGraphs,
    DecodeGraphs,
    EagerGraphs,
    expected_bytes,
    graph_sizes,
)
from lockstep.runtime.head_drafter import HeadDrafter
from lockstep.runtime.kv_pool import KvPool, LatentPool
from lockstep.runtime.lora.slots import run_once
from lockstep.runtime.media_ranks import divide_contents, media_of
from lockstep.runtime.memory import MIB, MemoryBudget, explained, size_pool
from lockstep.runtime.memory_saver import MemorySaver, placed
from lockstep.runtime.models import LanguageModel, Parallel, build_model, stored_dtype
from lockstep.runtime.models.config_reader import DTYPES
from lockstep.runtime.models.draft_heads import DraftHead
from lockstep.runtime.models.packed import pack_matrices, packed_bytes
from lockstep.runtime.models.stage import ExpertSplit
from lockstep.runtime.multiplexing import LayerParts, multiplexing_of
from lockstep.runtime.overlap import CpuLane, CudaLane, StreamLane
from lockstep.runtime.pooling import Pooling
from lockstep.runtime.processor import multiplies_bfloat16
from lockstep.runtime.quantized.fp8_format import FP8
from lockstep.runtime.rank_wire import RankSettings
from lockstep.runtime.sampling import (
    LogitProcessor,
    Sampled,
    Sampler,
    SamplingTable,
    processors,
)
from lockstep.runtime.stages import RankPlace, StageLinks
from lockstep.runtime.states.pool import StateTensors, slot_bytes_of
from lockstep.runtime.states.slots import RowSlots
from lockstep.runtime.tables import DeviceTables, check_page_table
from lockstep.runtime.tiers.identity import Identity, random_weights_digest, weights_digest
from lockstep.runtime.tiers.mover import HostMover
from lockstep.runtime.tiers.page_parts import parts_of
from lockstep.runtime.transfer.rank import RankPages, parts_in
from lockstep.runtime.transfer.transports import check_transport
from lockstep.runtime.two_batch import InHalves, check_two_batch

log = logging.getLogger("lockstep.runtime")

NARROW_BYTES = 64 * MIB  # of weights, from which on a CPU reads them in bfloat16 by itself

DEAREST_SAMPLING = SamplingParams(
    temperature=1.0,
    seed=1,
    top_p=0.9,
    min_p=0.01,
    repetition_penalty=1.1,
    frequency_penalty=0.1,
    logit_bias=((0, 1.0),),
    allowed_token_ids=(0,),
    top_logprobs=1,
)
"""Parameters that use every step of sampling; a draw with them takes the most device memory."""


class TableSampler:
    """The executor's sampler protocol, implemented by `sampling`."""

    def __init__(self, table: SamplingTable, sampler: Sampler) -> None:
        self.table, self.sampler = table, sampler

    def take_row(self, taken: RowTaken, context: RowContext) -> None:
        """Store the sampling settings of a row and the tokens that its penalties count.

        A row with settings that cannot be sampled ends as invalid; other rows are not affected. Hosts check settings
        before a request reaches the engine. This covers settings that pass that check, or that come from a journal.
        """
        try:
            prompt = context.tokens[: context.prompt_tokens]
            self.table.take_row(
                taken.row,
                taken.sampling,
                prompt[prompt >= 0] if context.spans else prompt,  # without placeholders of media
                context.tokens[context.prompt_tokens :],
                min_new_tokens=context.min_new_tokens,
                stop_token_ids=context.stop_token_ids,
                logprobs=taken.logprobs,
            )
        except Exception as error:
            why = str(error).partition("\n")[0] if isinstance(error, ConfigError) else repr(error)
            log.error("r%d cannot be sampled, and ends as invalid: %s", taken.request_id, why)
            self.table.refuse_row(taken.row)

    def remembers(self, rows_host: Int32s) -> bool:
        """Return whether a row of `rows_host` has penalties, which count every drawn token."""
        return bool(self.table.penalised[rows_host].any())

    def sample(
        self, logits: Tensor, rows: Tensor, positions: Tensor, rows_host: Int32s, allowed: Tensor | None
    ) -> Sampled:
        """Draw one token per row; see `Sampler.sample`."""
        return self.sampler.sample(logits, rows, positions, rows_host, allowed)


class NoSampler:
    """The sampler of a pipeline stage before the last one, which draws nothing."""

    def take_row(self, taken: RowTaken, context: RowContext) -> None:
        """Do nothing: the last stage stores the settings."""

    def remembers(self, rows_host: Int32s) -> bool:
        """Return False: no draw changes a later one here."""
        return False

    def sample(
        self, logits: Tensor, rows: Tensor, positions: Tensor, rows_host: Int32s, allowed: Tensor | None
    ) -> Sampled:
        """Raise: only the last stage samples."""
        raise AssertionError("a stage before the last one sampled")


NO_SAMPLER = NoSampler()


class OtherRanks(Protocol):
    """What a rank needs from the other ranks while it is assembled; `ranks.RankGroup` on rank 0."""

    @property
    def matchers(self) -> Matchers | None:
        """Matchers for this rank's executor; None on rank 0, which uses its own or none."""

    @property
    def place(self) -> RankPlace:
        """The place of this rank in the engine."""

    @property
    def links(self) -> StageLinks | None:
        """The ends of this rank to the other pipeline stages; None: there is one stage."""

    def parallel(self) -> Parallel:
        """Return this rank's part of the tensor-parallel model."""

    def compare(self, chosen: str) -> None:
        """Compare the choices of all ranks before any of them runs a pass.

        Raises ConfigError on rank 0 if they differ.
        """

    def agree(self, config: SchedConfig) -> SchedConfig:
        """Return the settings that hold on all ranks, given those that this rank computed."""


@dataclass(frozen=True, slots=True)
class Assembled:
    """One rank, or a whole engine, up to its executor."""

    model: LanguageModel
    config: SchedConfig
    memory: MemoryBudget
    attention_backend: str
    logit_processors: dict[str, LogitProcessor]
    executor: Executor
    mover: HostMover | None = None  # of pages between the tiers; None: there is only the device
    transfers: RankPages | None = None  # of pages between engines; None: the engine hands nothing over


def assemble(
    settings: RankSettings, device: torch.device, clock: HostClock, ranks: OtherRanks | None = None
) -> Assembled:
    """Load the model, size the KV pool, and make the executor. All ranks of a group do this at the same time.

    Passes that are run in here, to measure memory or to capture a graph, run on all ranks, because layers sum over the
    ranks.
    """
    with current(device):
        return _assemble(settings, device, clock, ranks)


def current(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which `device` is the current CUDA device; an empty context for the CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _assemble(settings: RankSettings, device: torch.device, clock: HostClock, ranks: OtherRanks | None) -> Assembled:
    mode, graph_rows_max = settings.cuda_graphs, settings.cuda_graph_max_batch
    links, experts = None if ranks is None else ranks.links, _experts_of(settings)
    if links is not None or (ranks is not None and ranks.parallel().shared is not None):
        mode = "off"  # graphs read neither what other stages send nor the rows of other ranks
    if settings.swa_full_tokens_ratio is not None:
        if mode in ("on", "eager"):
            raise ConfigError(
                f"`cuda_graphs` is {mode}, but with `swa_full_tokens_ratio` layers with windows have pages of their "
                "own, which graphs do not follow\nhint: leave one of the two out"
            )
        mode = "off"
    saver = MemorySaver(device) if settings.memory_saver else None
    few = "a smaller model, a narrower dtype, or a GPU with less on it"
    with explained("the weights", device, few), placed(saver, "weights"):
        model = build_model(
            Path(settings.model),
            choose_dtype(settings.dtype, device, settings.model),
            device,
            random_weights_seed=settings.random_weights_seed,
            parallel=None if ranks is None else replace(ranks.parallel(), stage=ranks.place.stage, experts=experts),
            kv_fp8=settings.kv_cache_dtype == "fp8_e4m3",
            fp8_activations=settings.fp8_activations,
            backend=settings.model_backend,
        )
        if links is not None:
            links.take_sizes(model.settings.hidden, model.dtype)
            model.links = links
        if settings.sched.get("two_batch_overlap"):
            check_two_batch(model.settings)
        if model.settings.quantization is not None:
            log.info("weights as stored: %s", weights_of(model))
        if slots := settings.sched.get("max_loras"):
            model.take_adapters(slots, settings.max_lora_rank)
        pack_matrices(model)
    model.saver = saver
    model.settings = with_threshold(model.settings, settings.diffusion_threshold)
    if model.settings.blocks is not None:
        check_blocks(model.settings.architecture, ranks is not None, settings.sched.get("max_loras"), settings.debug)
    if model.whole_prompts:
        check_whole_prompts(settings, model.settings.architecture)
    if model.states and mode in ("on", "eager"):
        raise ConfigError(
            f"`cuda_graphs` is {mode}, but layers of {model.settings.architecture} keep states, whose slots graphs do "
            "not follow\nhint: auto, or off"
        )
    pick = partial(_kernels, model, settings.attention_backend, settings.numerics, mode, graph_rows_max)
    shares = PoolShares(
        settings.swa_full_tokens_ratio,
        settings.mamba_full_memory_ratio,
        settings.mamba_track_interval,
        settings.max_mamba_cache_size,
    )
    sched = {name: tuple(value) if isinstance(value, list) else value for name, value in settings.sched.items()}
    if isinstance(recorded := sched.get("hybrid"), dict):  # as it came from rank 0
        sched["hybrid"] = msgspec.convert(recorded, HybridMemory)
    sched.pop("diffusion", None)  # of a journal that is executed again: it follows from the model
    sched.pop("experts", None)  # of a journal that is executed again: they follow from the options
    if isinstance(recorded := sched.get("multiplexing"), dict):
        sched["multiplexing"] = msgspec.convert(recorded, Multiplexing)
    sched |= multiplexing_of(settings, model.settings, device)
    draft: Draft | None = None
    if settings.draft_model is not None or sched.get("speculative_method") == "mtp":
        folder = settings.draft_model
        dtype = None if folder is None else choose_dtype(settings.dtype, device, folder)
        draft = draft_of(settings, sched.get("speculative_method"), model, dtype)
    config, memory, kernels = _sized(model, device, settings.mem_fraction, pick, sched, ranks, draft, shares)
    if config.drafts_trees:
        check_trees(config, kernels.backend, debug=settings.debug)
    if config.hands_over and isinstance(draft, DraftHead):
        raise ConfigError(
            f"`role` is {config.role} and `speculative_method` {config.speculative_method}: features of a head are not "
            "handed over\nhint: ngram or draft_model between engines"
        )
    if draft is not None:  # it uses the same backend, which may not support its heads
        kind = (device, draft.dtype, draft.head_dim, config.page_size)
        of_draft = Needs(*kind, group=draft.heads // draft.kv_heads, special=names_of(draft.rules))
        choose(kernels.backend, replace(of_draft, numerics=kernels.numerics))
    if settings.host_cache_gb:
        config = _with_tiers(settings, config, memory.page, model)
    if settings.eplb:
        config = with_placing(settings, config, model)
    if ranks is not None:
        config = ranks.agree(config)
        memory = replace(memory, pages=config.pages)
    enabled = processors.load(settings.logit_processors, model.settings.vocab, device)
    executor = make_executor(
        model,
        config,
        stream_lane(device, clock, links),
        kernels=kernels,
        logit_processors=enabled,
        pooling=settings.pooling,
        debug=settings.debug,
        draft=draft,
    )
    if ranks is not None:
        executor.matchers = ranks.matchers
    divide_contents(executor.media, model, executor.lane, on=settings.encoder_data_parallel)
    if model.adapter_slots and device.type == "cuda":
        with executor.lane.stream(), torch.inference_mode():
            run_once(model.targets, executor.lane.upload)
    mover = make_mover(settings, model, config, executor) if settings.host_cache_gb else None
    transfers = make_transfers(settings, model, config, executor, ranks) if config.hands_over else None
    return Assembled(model, config, memory, kernels.backend, enabled, executor, mover, transfers)


def _experts_of(settings: RankSettings) -> ExpertSplit:
    return ExpertSplit(settings.ep, settings.moe_a2a, settings.eplb, settings.redundant_experts)


def _with_tiers(settings: RankSettings, config: SchedConfig, page_bytes: int, model: LanguageModel) -> SchedConfig:
    """Return the settings of the scheduler with the tiers below the device. Raises ConfigError.

    Args:
        page_bytes: of one page on this rank, whose stage has the layers of `model`.
    """
    if config.hybrid is not msgspec.UNSET:
        raise ConfigError(
            "`host_cache_gb` is given, and this model has sliding windows or states, which this runtime does not move "
            "between tiers yet\nhint: leave out host_cache_gb, or swa_full_tokens_ratio"
        )
    if settings.debug:
        page_bytes += Canary.bytes_per_page(config.page_size)
    of_all = page_bytes * model.parallel.ranks
    if model.stage.count > 1:  # page bytes are proportional to layers, but for some numbers of each token
        of_all = of_all * model.settings.layers // model.layers
    return msgspec.structs.replace(config, tiers=cache_tiers(settings, of_all))


def make_mover(settings: RankSettings, model: LanguageModel, config: SchedConfig, executor: Executor) -> HostMover:
    """Make host memory and storage of a rank. Raises ConfigError if there is no room, or the storage cannot be opened.

    Ranks share a folder, and its bound.
    """
    assert config.tiers is not msgspec.UNSET
    pages = parts_of(executor.attention.pool, executor.drafter, executor.canary)
    store, identity = None, Identity(b"")
    if settings.storage is not None:
        store = open_store(settings.storage, page_bytes=pages.size, bytes_max=int(settings.storage_gb * 1e9))
        shares = model.parallel.shared is not None
        parallel: tuple[int, ...] = (0 if shares else model.parallel.rank, model.parallel.ranks, *((1,) * shares))
        if model.stage.count > 1:
            parallel += (model.stage.number, model.stage.count)
        if settings.ep > 1:
            parallel += (settings.ep, int(settings.moe_a2a))
        computed = (pages.layout(), type(model).__name__, str(model.dtype), model.activations, settings.numerics)
        folder, seed = Path(settings.model), settings.random_weights_seed
        weights = weights_digest(folder) if seed is None else random_weights_digest(folder, seed)
        drafts = None if settings.draft_model is None else weights_digest(Path(settings.draft_model)).hex()
        identity = Identity(weights, (*computed, executor.attention.name, *parallel, drafts))
    made = HostMover(pages, config.tiers.host_pages, executor.lane, store, identity)
    log.info(
        "host memory below the KV cache: %d pages, %.0f MiB%s",
        config.tiers.host_pages,
        config.tiers.host_pages * pages.size / MIB,
        "" if settings.storage is None else f"; storage in {settings.storage}, up to {settings.storage_gb:g} GB",
    )
    return made


def make_transfers(
    settings: RankSettings, model: LanguageModel, config: SchedConfig, executor: Executor, ranks: OtherRanks | None
) -> RankPages:
    """Make the transfers of a rank of a prefill or decode engine. Raises ConfigError."""
    check_transport(settings.transfer_transport)
    if config.hybrid is not msgspec.UNSET:
        raise ConfigError(
            f"`role` is {config.role}, and this model has sliding windows or states in pools of their own, which this "
            "runtime does not hand over yet\nhint: leave out swa_full_tokens_ratio"
        )
    computed = (type(model).__name__, str(model.dtype), settings.numerics, executor.attention.name)
    pages = parts_of(executor.attention.pool, executor.drafter, executor.canary)
    return RankPages(
        pages,
        config.page_size,
        place=RankPlace(0) if ranks is None else ranks.place,
        kv_heads=model.settings.kv_heads,
        model=" ".join(computed),
        parts=parts_in(pages, model.first_layer, model.kv_scales),
        transport=settings.transfer_transport,
        checksums=settings.transfer_checksums or settings.debug,
    )


@dataclass(frozen=True, slots=True)
class PassKernels:
    """The kernels that run the passes of a model.

    Args:
        backend: of attention.
        graph_sizes: numbers of rows, ascending, up to which decodes are padded, and for which graphs are captured on a
            GPU; empty: no graphs.
    """

    backend: str = "reference"
    numerics: Numerics = "fast"
    graph_sizes: tuple[int, ...] = ()

    @property
    def graph_rows(self) -> int:
        """Rows of the largest graph; 0 without graphs."""
        return max(self.graph_sizes, default=0)

    def attention(self, pool: KvPool, model: Draft, **more: Any) -> AttentionBackend:
        """The attention backend of a model over its pool."""
        scale, rules = model.scale, model.rules
        return make(self.backend, pool, model.heads, scale=scale, rules=rules, numerics=self.numerics, **more)


REFERENCE = PassKernels()


def stream_lane(device: torch.device, clock: HostClock, links: StageLinks | None = None) -> StreamLane:
    """The lane that runs passes on a device.

    On a CPU the last of several stages computes when results are collected: a pass waits for the stages before, which
    need the next plans meanwhile.
    """
    if device.type == "cuda":
        return CudaLane(device, clock)
    return CpuLane(clock, run_at="collection" if links is not None and links.stage.is_last else "launch")


def make_executor(
    model: LanguageModel,
    config: SchedConfig,
    lane: StreamLane,
    *,
    kernels: PassKernels = REFERENCE,
    logit_processors: Mapping[str, LogitProcessor] | None = None,
    pooling: Pooling | None = None,
    debug: bool = False,
    draft: Draft | None = None,
) -> Executor:
    """Make the executor of a model under these settings, with its pool, tables and sampler, and without matchers.

    Args:
        lane: see `stream_lane`.
        draft: the model or head that drafts, where the settings require one.
    """
    device = model.device
    gpu = device.type == "cuda"
    hybrid = None if config.hybrid is msgspec.UNSET else config.hybrid
    graph_sizes = kernels.graph_sizes if hybrid is None else ()  # graphs do not follow pages of windows
    rest = explained(
        "tables, workspace and graphs beside the pool",
        device,
        "a smaller mem_fraction or max_running_requests, or fewer `pages` or graphs (cuda_graph_max_batch)",
    )
    with lane.stream(), rest:  # memory is freed to the stream on which it was allocated
        what = f"{config.pages:,} KV pages of {page_bytes_of(model, config.page_size):,} bytes"
        slots, window_pages = (0, 0) if hybrid is None else (hybrid.state_slots, hybrid.window_pages)
        if bool(slots) != bool(model.states) or (window_pages and not sliding_layers(model)):
            raise ConfigError(
                f"`hybrid` of the settings has {slots} slots of states and {window_pages} pages of windows, but "
                f"{model.settings.architecture} here has {len(model.states)} states and {len(sliding_layers(model))} "
                "layers with windows"
            )
        pages = WindowedPages(config.pages)
        if window_pages:
            pages = WindowedPages(config.pages, window_pages, frozenset(sliding_layers(model)))
        with explained(what, device, "fewer `pages`, or a smaller mem_fraction"), placed(model.saver, "kv_cache"):
            pool = make_pool(model, pages, config.page_size, slots)
        states = None
        if pool.states is not None:
            states = RowSlots(pool.states, config.rows_max, config.states_per_row, device)
        attention = kernels.attention(
            pool,
            model,
            graph_rows=kernels.graph_rows,
            plans_in_flight=max(2, config.decode_steps_per_launch) * (config.overlap_depth + 1),
        )
        halves = None
        if config.splits_batches:
            plans = 2 * (config.overlap_depth + 1)
            other = kernels.attention(pool, model, plans_in_flight=plans)
            halves = InHalves(model, (attention, other), model.parallel.turns, lane.upload)
        enabled = logit_processors or {}
        sampler: RowSampler = NO_SAMPLER
        if model.stage.is_last:
            table = SamplingTable(config.rows_max, model.settings.vocab, device, enabled)
            sampler = TableSampler(table, Sampler(table, processors=enabled))
        context = config.context_tokens_max if graph_sizes else None
        tables = DeviceTables(
            config.rows_max,
            pages,
            config.page_size,
            device,
            context_tokens=context,
            debug=debug,
            adapter_slots=model.adapter_slots,
            speculates=config.speculates or config.jumps,
        )
        blocks = None
        if model.settings.blocks is not None:
            blocks = DeviceBlocks(model.settings.blocks, config.rows_max, lane)
        drafter: Drafter | None = None
        if draft is not None:
            plans = (config.drafts_max + 2) * (config.overlap_depth + 1)
            pool_of_drafts = make_pool(draft, config.pages, config.page_size)
            of_drafts = kernels.attention(pool_of_drafts, draft, plans_in_flight=plans)
            if isinstance(draft, DraftHead):
                drafter = HeadDrafter(draft, of_drafts, lane.upload)
            else:
                drafter = ModelDrafter(draft, of_drafts, config.pages)
        elif config.speculates:
            drafter = NgramDrafter((config.pages + 1) * config.page_size, config.page_size, device)
        canary = None
        if debug:
            windows = (0, 0) if hybrid is None else (hybrid.window_tokens, window_pages)
            sizes = (config.rows_max, config.pages, config.page_size, config.context_tokens_max)
            canary = Canary(*sizes, device, *windows, state_slots=slots)
        media = media_of(model, lane, config.rows_max) if takes_media(draft) else None
        rows = largest_pass_tokens(config) + config.rows_max * (1 + config.beside_newest_max)
        loads = counter_for(model, config, rows)
        graphs = None
        if graph_sizes:
            graphs = DecodeGraphs(model, attention, tables, graph_sizes, CudaGraphs() if gpu else EagerGraphs())
            graphs.prepare(lane)
            log.info(
                "%d graphs for decodes of up to %d rows, %.0f MiB",
                len(graph_sizes),
                graph_sizes[-1],
                graphs.bytes / MIB,
            )
        return Executor(
            RunnableModel(
                model,
                attention,
                graphs,
                split=model.is_part,
                states=states,
                media=media,
                links=model.links,
                ranks=1 if model.parallel.shared is None else model.parallel.ranks,
                rank=model.parallel.rank,
                loads=loads,
                halves=halves,
                layers=LayerParts(model.settings.layers) if config.multiplexes else None,
                blocks=blocks,
            ),
            sampler,
            tables,
            lane,
            canary=canary,
            pooling=pooling,
            ahead=LookAhead(drafter, jumps=config.jumps),
        )


def weights_of(model: LanguageModel) -> str:
    """Describe the format of the quantised matrices and of the rows that they multiply; empty without quantisation."""
    if model.settings.quantization is None:
        return ""
    rows = f"fp8, {model.activations}" if model.activations else str(model.dtype).removeprefix("torch.")
    return f"{model.settings.quantization}; multiplied with rows in {rows}"


def make_pool(model: Draft, pages: int | WindowedPages, page_size: int, state_slots: int = 0) -> KvPool:
    """Return a pool for the model's KV, with slots for its states if there are any."""
    sizes = (model.layers, pages, page_size, model.kv_heads, model.head_dim)
    kind = LatentPool if model.shares_kv else KvPool
    pool = kind(*sizes, model.dtype, model.device, model.kv_scales)
    if state_slots:
        assert isinstance(model, LanguageModel)
        pool.states = StateTensors(model.states, state_slots, model.device)
    return pool


@dataclass(frozen=True, slots=True)
class PoolShares:
    """How memory is shared between pages of all layers, pages of windows and slots of states.

    Args:
        windows: window pages for each page; None: layers with windows use the pages of all layers.
        states: bytes of states, as a multiple of the bytes of KV.
        checkpoint_tokens: tokens between two checkpoints of a state.
        slots: slots of states; None: as many as follow.
    """

    windows: float | None = None
    states: float = 0.9
    checkpoint_tokens: int = 256
    slots: int | None = None

    def check(self, config: SchedConfig) -> None:
        """Raise ConfigError for shares of states that cannot be."""
        if not self.states > 0.0:
            raise ConfigError(f"`mamba_full_memory_ratio` must be above 0, got `{self.states}`")
        if self.checkpoint_tokens < 1 or self.checkpoint_tokens % config.page_size:
            raise ConfigError(
                f"`mamba_track_interval` must be a multiple of `page_size` {config.page_size}, "
                f"got `{self.checkpoint_tokens}`"
            )
        if self.slots is not None and self.slots < 1 + config.states_per_row:
            raise ConfigError(
                f"`max_mamba_cache_size` must be at least {1 + config.states_per_row}: a request's states, and a "
                f"checkpoint; got `{self.slots}`"
            )

    def state_slots(self, page_bytes: int, pages: int, slot_bytes: int, config: SchedConfig, *, given: bool) -> int:
        """Return the slots of states beside `pages` pages.

        Args:
            page_bytes: of one page in all layers that attend.
            given: the number of pages was requested, so that nothing was left for states.
        """
        by_ratio = int(pages * page_bytes * self.states / slot_bytes)
        least = config.states_per_row * (config.max_running_requests if given else 1)
        return max(by_ratio, 1 + least)


def page_bytes_of(model: Draft, page_size: int, window_share: float | None = None) -> int:
    """Return the bytes of one page of a pool made by `make_pool`.

    Args:
        window_share: window pages for each page; None: layers with windows use the pages of all layers.
    """
    stored = model.dtype if model.kv_scales is None else FP8
    sliding = 0
    if window_share is not None:
        assert isinstance(model, LanguageModel)
        sliding = len(sliding_layers(model))
    full, windows = (
        KvPool.bytes_per_page(layers, page_size, model.kv_heads, model.head_dim, stored, shared=model.shares_kv)
        for layers in (model.layers - sliding, sliding)
    )
    return full + math.ceil(windows * (window_share or 0.0))


def sliding_layers(model: LanguageModel) -> tuple[int, ...]:
    """Return the layers with sliding windows."""
    return tuple(layer for layer, rule in enumerate(model.rules) if rule.window is not None)


def check_windows(model: LanguageModel, share: float, page_size: int) -> int:
    """Return the window of a model whose layers with windows are to have pages of their own. Raises ConfigError."""
    windows = sorted({rule.window for rule in model.rules if rule.window is not None})
    what = f"`swa_full_tokens_ratio` is {share}"
    if not 0.0 < share <= 1.0:
        raise ConfigError(f"`swa_full_tokens_ratio` must be above 0 and at most 1, got `{share}`")
    if len(windows) != 1 or len(sliding_layers(model)) == model.layers:
        sizes = f"windows of {', '.join(map(str, windows))} tokens" if windows else "no sliding windows"
        all_of_them = " in all of its layers" if windows and len(sliding_layers(model)) == model.layers else ""
        raise ConfigError(
            f"{what}, but {model.settings.architecture} has {sizes}{all_of_them}\n"
            "hint: leave it out; it is for windows of one size in some of the layers"
        )
    return windows[0]


def _kernels(
    model: LanguageModel,
    requested: str,
    numerics: Numerics,
    mode: GraphMode,
    graph_rows_max: int | None,
    config: SchedConfig,
) -> PassKernels:
    """Choose the kernels: a backend that can run in graphs, if they are enabled and possible, and sizes of graphs."""
    needs = Needs(
        model.device,
        model.dtype,
        model.head_dim,
        config.page_size,
        numerics=numerics,
        group=model.heads // model.kv_heads,
        kv_fp8=model.kv_scales is not None,
        special=names_of(model.rules),
    )
    sizes = graph_sizes(min(ROWS_MAX if graph_rows_max is None else graph_rows_max, config.max_running_requests))
    if mode == "eager":
        return PassKernels(choose(requested, needs).name, numerics, sizes)
    if mode == "off" or model.device.type != "cuda":
        return PassKernels(choose(requested, needs).name, numerics)
    if (why := model.uncapturable_because) and mode == "on":
        raise ConfigError(f"`cuda_graphs` is on, but {why}\nhint: auto, or off")
    if why:
        log.info("no CUDA graphs: %s", why)
        return PassKernels(choose(requested, needs).name, numerics)
    try:
        return PassKernels(choose(requested, replace(needs, graphs=True)).name, numerics, sizes)
    except ConfigError as error:
        if mode == "on":
            raise
        without = PassKernels(choose(requested, needs).name, numerics)  # raises if graphs are not the reason
        log.info("no CUDA graphs: %s", str(error).partition("\n")[0])
        return without


def check_whole_prompts(settings: RankSettings, architecture: str) -> None:
    """Raise ConfigError for settings that need KV, of a model that has none."""
    given = {"host_cache_gb": settings.host_cache_gb, "draft_model": settings.draft_model, **settings.sched}
    whole_prompts.check_whole_prompts(given, architecture)
    if settings.numerics == "invariant":
        raise ConfigError(
            f"`numerics` is invariant, but {architecture} computes prompts whole, padded to a length that depends on "
            "the batch\nhint: leave it out"
        )


def _no_kernels(config: SchedConfig) -> PassKernels:
    """Return the kernels of a model that attends by the library's code."""
    return REFERENCE


def _sized(
    model: LanguageModel,
    device: torch.device,
    mem_fraction: float,
    pick: Callable[[SchedConfig], PassKernels],
    sched: dict[str, Any],
    ranks: OtherRanks | None,
    draft: Draft | None,
    shares: PoolShares,
) -> tuple[SchedConfig, MemoryBudget, PassKernels]:
    """Return scheduler settings with sizes that fit the model and the device."""
    gpu = device.type == "cuda"
    given: dict[str, Any] = {
        "overlap_depth": 1 if gpu and model.stage.count == 1 else 0,
        "max_running_requests": 256 if gpu else 32,
        "chunked_prefill_size": 8192 if gpu else 1024,
        "eos_token_ids": model.settings.end_tokens,
        **sched,
    }
    given.setdefault("context_tokens_max", min(model.settings.context_tokens, 32768 if gpu else 4096))
    if model.whole_prompts:
        tokens = whole_prompts.GPU_PREFILL_TOKENS if gpu else whole_prompts.CPU_PREFILL_TOKENS
        given = whole_prompts.whole_prompt_settings(given, tokens)
        pick = _no_kernels
    if model.settings.blocks is not None:
        given = block_settings(given, sched, model.settings.blocks.size)
    if given["context_tokens_max"] > model.settings.context_tokens:
        raise ConfigError(
            f"`context_tokens_max` {given['context_tokens_max']} is more than the model's "
            f"{model.settings.context_tokens}\nhint: leave it out to take the model's"
        )
    without_pages = SchedConfig(**{"pages": 1 << 20, **given})
    method = without_pages.speculative_method
    if draft is None and without_pages.speculates and method != "ngram":  # a journal that is executed again
        raise ConfigError(
            f"`speculative_method` is {method}, but nothing here drafts so\n"
            "hint: ngram needs no model; LLM and lockstep serve take a draft_model"
        )
    if isinstance(draft, LanguageModel) and draft.settings.context_tokens < without_pages.context_tokens_max:
        raise ConfigError(
            f"`draft_model` takes {draft.settings.context_tokens:,} tokens, but `context_tokens_max` is "
            f"{without_pages.context_tokens_max:,}\nhint: a shorter context_tokens_max, or another draft model"
        )
    if strange := [token for token in without_pages.eos_token_ids if token >= model.settings.vocab]:
        raise ConfigError(f"`eos_token_ids` holds token {strange[0]}, but the model has {model.settings.vocab}")
    if isinstance(draft, LanguageModel) and draft.states:
        raise ConfigError(
            f"`draft_model` is a {draft.settings.architecture}, whose layers keep states: only the model itself may\n"
            "hint: another draft model"
        )
    window_share, slot_bytes = shares.windows, slot_bytes_of(model.states)
    page_size, context = without_pages.page_size, without_pages.context_tokens_max
    check_page_table(without_pages.rows_max, context, page_size)
    window = 0 if window_share is None else check_windows(model, window_share, page_size)
    kv_bytes = page_bytes = page_bytes_of(model, page_size, window_share)
    slots, recorded = shares.slots, given.get("hybrid", msgspec.UNSET)
    if recorded is not msgspec.UNSET:  # a journal that is executed again
        slots = recorded.state_slots
    elif slot_bytes:
        shares.check(without_pages)
        if slots is None and "pages" in given:
            slots = shares.state_slots(kv_bytes, without_pages.pages, slot_bytes, without_pages, given=True)
        elif slots is None:
            page_bytes += math.ceil(kv_bytes * shares.states)
    if draft is not None:
        page_bytes += page_bytes_of(draft, page_size)
        page_bytes += HeadDrafter.bytes_of(draft, page_size) if isinstance(draft, DraftHead) else 0
    elif without_pages.speculates:
        page_bytes += NgramDrafter.bytes_of(page_size)
    kernels = pick(without_pages)
    if ranks is not None:
        rounded = f", rows in fp8, {model.activations}" if model.activations else ""
        ranks.compare(f"{kernels.backend} with {len(kernels.graph_sizes)} graphs{rounded}")
    encoder_bytes = 0
    if model.media_encoder is not None:
        encoder_bytes = model.media_encoder.token_bytes * (without_pages.encoder_cache_tokens or 0)
    budget = size_pool(
        page_bytes=page_bytes,
        weight_bytes=sum(
            one.weight_bytes + (packed_bytes(one) if isinstance(one, LanguageModel) else 0)
            for one in (model, draft)
            if one is not None
        )
        + slot_bytes * (slots or 0)
        + encoder_bytes,
        device=device,
        mem_fraction=mem_fraction,
        largest_pass=lambda: _run_once(
            model,
            kernels,
            largest_pass_tokens(without_pages),
            context,
            page_size,
            without_pages.max_running_requests,
            without_pages.beside_newest_max,
            2 if without_pages.splits_batches else 1,
        ),
        graphs=lambda: _graph_bytes(model, kernels, page_size, context),
        pages_least=-(-context // page_size),
        pages=without_pages.pages if "pages" in given else None,
    )
    log.info("memory\n%s", budget.table())
    hybrid: dict[str, Any] = {}
    if window_share is not None:
        hybrid = {
            "window_tokens": window,
            "window_pages": max(1, int(budget.pages * window_share)),
            "chunk_tokens_min": window,
        }
    if slot_bytes:
        if slots is None:
            slots = shares.state_slots(kv_bytes, budget.pages, slot_bytes, without_pages, given=False)
        hybrid |= {"state_slots": slots, "checkpoint_tokens": shares.checkpoint_tokens}
        log.info("%s slots of states of %s bytes, %.0f MiB", slots, slot_bytes, slots * slot_bytes / MIB)
    if hybrid and recorded is msgspec.UNSET:
        given["hybrid"] = HybridMemory(**hybrid)
    return SchedConfig(**{**given, "pages": budget.pages}), budget, kernels


def largest_pass_tokens(config: SchedConfig) -> int:
    """Return the new tokens of the largest pass.

    Without chunks the first prompt runs whole, over any budget of a pass.
    """
    chunk = config.chunked_prefill_size
    if chunk is None:
        return max(config.context_tokens_max, config.max_prefill_tokens)
    return min(chunk, config.max_prefill_tokens)


def _graph_bytes(model: LanguageModel, kernels: PassKernels, page_size: int, context: int) -> int:
    """Estimate the bytes of the graphs: capture the two largest over a pool of one page."""
    sizes = kernels.graph_sizes
    if not sizes:
        return 0
    attention = kernels.attention(make_pool(model, 1, page_size), model, graph_rows=sizes[-1])
    tables = DeviceTables(1, 1, page_size, model.device, context_tokens=context)
    graphs = DecodeGraphs(model, attention, tables, sizes[-2:], CudaGraphs())
    return expected_bytes(graphs.prepare(CudaLane(model.device, HostClock())), len(sizes))


def _run_once(
    model: LanguageModel,
    kernels: PassKernels,
    tokens: int,
    context: int,
    page_size: int,
    samples: int,
    drafts: int = 0,
    backends: int = 1,
) -> None:
    """Run one extend, whose prompts share one page, and a draw. The workspace of the largest graph is allocated, too.

    Args:
        tokens: of the extend.
        context: tokens of its longest prompt.
        samples: rows that are drawn.
        drafts: verified for each of these rows; they are sought first, in the longest context, and drawn behind.
        backends: of attention that the executor has, each with workspaces of its own; the pass runs on the first.
    """
    device = model.device
    if drafts:
        _seek_once(samples, context, page_size, drafts, device)
        samples *= 1 + drafts
    pool = make_pool(model, 1, page_size)
    there = [kernels.attention(pool, model, graph_rows=kernels.graph_rows) for _ in range(backends)]
    attention = there[0]
    starts = np.arange(0, tokens, context)
    lengths = np.diff(np.append(starts, tokens)).astype(np.int32)
    positions = torch.arange(tokens, device=device) % context
    batch = ForwardBatch(
        token_ids=torch.zeros(tokens, dtype=torch.int64, device=device),
        positions=positions,
        slots=positions % page_size,
        rows=torch.arange(len(starts), dtype=torch.int32, device=device),
        indptr=torch.from_numpy(np.append(starts, tokens).astype(np.int32)).to(device),
        lengths=torch.from_numpy(lengths).to(device),
        page_table=torch.zeros((len(starts), -(-min(tokens, context) // page_size)), dtype=torch.int32, device=device),
        logits_at=torch.arange(samples, device=device) % tokens,
        hidden=None
        if model.stage.is_first
        else torch.zeros((2, tokens, model.settings.hidden), dtype=model.dtype, device=device),
        extend_rows=len(starts),
        starts_host=np.zeros(len(starts), np.int32),
        lengths_host=lengths,
        ranks=None if model.parallel.shared is None else RankTokens((tokens,) * model.parallel.ranks, padded=True),
    )
    with torch.inference_mode():
        attention.plan(batch)
        hidden = model.forward(batch, attention)
        if model.settings.generates and model.stage.is_last:
            _draw_once(model.logits(hidden.index_select(0, batch.logits_at)))


def _seek_once(rows: int, context: int, page_size: int, drafts: int, device: torch.device) -> None:
    """Draft once for `rows` rows at the end of the context, all in one page, to measure the drafter's memory."""
    table = torch.zeros((rows, -(-context // page_size)), dtype=torch.int32, device=device)
    stands = torch.full((rows,), context - 1, dtype=torch.int64, device=device)
    with torch.inference_mode():
        NgramDrafter(page_size, page_size, device).draft(
            DraftingRows(
                rows=torch.arange(rows, device=device),
                stands=stands,
                newest=stands,
                page_table=table,
                drafts=np.full(rows, drafts, np.int32),
                reach=stands,
                stands_host=np.full(rows, context - 1, np.int32),
            )
        )


def _draw_once(logits: Tensor) -> None:
    """Draw for `logits` with every sampling step.

    Penalties count by token id, and logprobs need a second copy of the logits.
    """
    count, vocab = logits.shape
    table = SamplingTable(count, vocab, logits.device)
    for row in range(count):
        table.take_row(row, DEAREST_SAMPLING, logprobs=True)
    rows = torch.arange(count, dtype=torch.int32, device=logits.device)
    Sampler(table).sample(logits, rows, rows.long(), np.arange(count, dtype=np.int32))


def choose_device(name: str) -> torch.device:
    """Return the device of `cpu`, `cuda`, `cuda:1` or `auto`; `auto` is a GPU if there is one. Raises ConfigError.

    A GPU is always returned with its number, because the current device may change while the engine runs.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"`device` must be auto, cpu or cuda, got `{name}`") from error
    if device.type not in ("cpu", "cuda") or (device.type == "cuda" and not torch.cuda.is_available()):
        raise ConfigError(f"`device` is {name}, which torch {torch.__version__} cannot use here\nhint: --device cpu")
    if device.type == "cpu":
        return torch.device("cpu")
    index, count = torch.cuda.current_device() if device.index is None else device.index, torch.cuda.device_count()
    if index >= count:
        raise ConfigError(
            f"`device` is {name}, but torch sees {count} GPUs, from cuda:0 on\nhint: CUDA_VISIBLE_DEVICES"
        )
    return torch.device("cuda", index)


def device_name(device: torch.device) -> str:
    """Return the driver's name of a device, such as NVIDIA H200; `cpu` for a processor."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def choose_dtype(name: str, device: torch.device, folder: str | Path) -> torch.dtype | None:
    """Return the dtype of weights and KV; None: that of config.json. Raises ConfigError.

    `auto` on a CPU is float32, or bfloat16 if the folder is in bfloat16, the processor multiplies it, and the weights
    do not fit into its cache: reading them is then most of the time.
    """
    if name == "auto":
        if device.type != "cpu":
            return None
        weights = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
        narrow = weights >= NARROW_BYTES and multiplies_bfloat16() and stored_dtype(folder) == torch.bfloat16
        return torch.bfloat16 if narrow else torch.float32
    if name not in DTYPES:
        raise ConfigError(f"`dtype` must be auto, {', '.join(DTYPES)}, got `{name}`")
    return DTYPES[name]
