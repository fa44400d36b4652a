"""Build one rank, or a whole engine, from its settings: load the model, size the KV pool, make the executor.

Every rank of a group runs this code at the same time: rank 0 in the process of `LLM`, the others in `worker.py`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
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
from lockstep.core.contract.hybrid_memory import HybridMemory
from lockstep.host import whole_prompts
from lockstep.host.batches import Int32s, RowContext
from lockstep.host.block_settings import block_settings
from lockstep.host.engine_options import Numerics
from lockstep.host.loop import HostClock
from lockstep.runtime.attention import AttentionBackend, Needs, choose, make
from lockstep.runtime.attention.rules import names_of
from lockstep.runtime.blocks import DeviceBlocks, check_blocks, with_threshold
from lockstep.runtime.canary import Canary
from lockstep.runtime.draft_sources import (
    Draft,
    check_trees,
    draft_of,
    layers_beside,
    make_drafter,
    takes_media,
    taps_of,
)
from lockstep.runtime.executor import Executor, LookAhead, Matchers, RowSampler, RunnableModel
from lockstep.runtime.expert_load import counter_for
from lockstep.runtime.expert_moves import with_placing
from lockstep.runtime.forward import ForwardBatch, RankTokens, WindowedPages
from lockstep.runtime.graphs import (
    ROWS_MAX,
    CudaGraphs,
    DecodeGraphs,
    EagerGraphs,
    GraphOptions,
    expected_bytes,
    graph_sizes,
)
from lockstep.runtime.kv_pool import KvPool, LatentPool
from lockstep.runtime.lora.slots import run_once
from lockstep.runtime.media_ranks import divide_contents, media_of
from lockstep.runtime.memory import MIB, MemoryBudget, explained, size_pool
from lockstep.runtime.memory_saver import MemorySaver, placed
from lockstep.runtime.models import LanguageModel, ModelSettings, Parallel, build_model, stored_dtype
from lockstep.runtime.models.config_reader import DTYPES
from lockstep.runtime.models.draft_heads import DraftHead
from lockstep.runtime.models.packed import pack_matrices, packed_bytes
from lockstep.runtime.models.stage import ExpertSplit, StageLayers
from lockstep.runtime.multiplexing import LayerParts, multiplexing_of
from lockstep.runtime.overlap import CpuLane, CudaLane, StreamLane
from lockstep.runtime.page_bytes import drafting_bytes_of, page_bytes_of, sliding_layers
from lockstep.runtime.pieces import TOKENS_MAX, make_pieces, piece_sizes
from lockstep.runtime.pooling import Pooling
from lockstep.runtime.processor import multiplies_bfloat16
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
from lockstep.runtime.tiers.below import make_mover, with_tiers
from lockstep.runtime.tiers.mover import HostMover
from lockstep.runtime.transfer.blocks import sent_blocks
from lockstep.runtime.transfer.rank import RankPages
from lockstep.runtime.transfer.transports import check_transport
from lockstep.runtime.trial_draws import draw_once, seek_once
from lockstep.runtime.two_batch import InHalves, check_two_batch

log = logging.getLogger("lockstep.runtime")

NARROW_BYTES = 64 * MIB  # of weights, from which on a CPU reads them in bfloat16 by itself


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
    mode = settings.cuda_graphs
    links, experts = None if ranks is None else ranks.links, _experts_of(settings)
    if links is not None or (ranks is not None and ranks.parallel().shared is not None):
        mode = "off"  # graphs read neither what other stages send nor the rows of other ranks
    pooled_windows = settings.swa_full_tokens_ratio is not None
    if pooled_windows and mode in ("on", "eager") and settings.piecewise_graph_max_tokens == 0:
        raise ConfigError(
            f"`cuda_graphs` is {mode} and `piecewise_graph_max_tokens` 0, but with `swa_full_tokens_ratio` layers with "
            "windows have pages of their own, which graphs of whole decodes do not follow\nhint: leave one of the "
            "three out"
        )
    graphs = GraphOptions(
        mode, settings.cuda_graph_max_batch, settings.piecewise_graph_max_tokens, decodes=not pooled_windows
    )
    saver = MemorySaver(device) if settings.memory_saver else None
    few = "a smaller model, a narrower dtype, or a GPU with less on it"
    with explained("the weights", device, few), placed(saver, "weights"):
        model = build_model(
            Path(settings.model),
            choose_dtype(settings.dtype, device, settings.model),
            device,
            random_weights_seed=settings.random_weights_seed,
            parallel=None
            if ranks is None
            else replace(ranks.parallel(), stage=stage_of(settings, ranks), experts=experts),
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
    pick = partial(_kernels, model, settings.attention_backend, settings.numerics, graphs)
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
        check_trees(config, settings.numerics, debug=settings.debug)
    if config.hands_over and isinstance(draft, DraftHead):
        raise ConfigError(
            f"`role` is {config.role} and `speculative_method` {config.speculative_method}: features of a head are not "
            "handed over\nhint: ngram or draft_model between engines"
        )
    if draft is not None:  # it uses the same backend, which may not support its heads
        kind = (device, draft.dtype, draft.head_dim, config.page_size)
        of_draft = Needs(*kind, group=draft.heads // draft.kv_heads, special=names_of(draft.rules))
        choose(kernels.backend, replace(of_draft, numerics=kernels.numerics, trees=config.drafts_trees))
    if settings.host_cache_gb:
        config = with_tiers(settings, config, model, draft)
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


def stage_of(settings: RankSettings, ranks: OtherRanks) -> StageLayers:
    """Return the layers of a rank's stage. The first stage has fewer if it drafts."""
    stage = ranks.place.stage
    return stage if stage.count == 1 else replace(stage, beside=layers_beside(settings))


def _experts_of(settings: RankSettings) -> ExpertSplit:
    return ExpertSplit(settings.ep, settings.moe_a2a, settings.eplb, settings.redundant_experts)


def make_transfers(
    settings: RankSettings, model: LanguageModel, config: SchedConfig, executor: Executor, ranks: OtherRanks | None
) -> RankPages:
    """Make the transfers of a rank of a prefill or decode engine. Raises ConfigError."""
    check_transport(settings.transfer_transport)
    computed = (type(model).__name__, str(model.dtype), settings.numerics, executor.attention.name)
    pool, drafter, canary = executor.attention.pool, executor.drafter, executor.canary
    return RankPages(
        sent_blocks(pool, drafter, canary, model.first_layer, model.kv_scales),
        config.page_size,
        place=RankPlace(0) if ranks is None else ranks.place,
        kv_heads=model.settings.kv_heads,
        model=" ".join(computed),
        window_tokens=0 if config.hybrid is msgspec.UNSET else config.hybrid.window_tokens,
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
        piece_sizes: numbers of tokens, ascending, up to which other passes are padded and run in pieces; empty: no
            pass runs in pieces.
    """

    backend: str = "reference"
    numerics: Numerics = "fast"
    graph_sizes: tuple[int, ...] = ()
    piece_sizes: tuple[int, ...] = ()

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
        "a smaller mem_fraction or max_running_requests, or fewer `pages` or graphs (cuda_graph_max_batch, "
        "piecewise_graph_max_tokens)",
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
        plans = (config.drafts_max + 2) * (config.overlap_depth + 1)

        def of_drafts(one: Draft) -> AttentionBackend:
            return kernels.attention(make_pool(one, config.pages, config.page_size), one, plans_in_flight=plans)

        drafter = make_drafter(draft, config, lane, model.links, of_drafts)
        canary = None
        if debug:
            windows = (0, 0) if hybrid is None else (hybrid.window_tokens, window_pages)
            sizes = (config.rows_max, config.pages, config.page_size, config.context_tokens_max)
            canary = Canary(*sizes, device, *windows, state_slots=slots)
        media = media_of(model, lane, config.rows_max) if takes_media(draft) else None
        loads = counter_for(model, config, most_pass_tokens(config))
        recorder = CudaGraphs() if gpu and (graph_sizes or kernels.piece_sizes) else EagerGraphs()
        pieces = make_pieces(model, attention, kernels.piece_sizes, recorder, lane, taps_of(draft))
        graphs = None
        if graph_sizes:
            graphs = DecodeGraphs(model, attention, tables, graph_sizes, recorder)
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
                pieces=pieces,
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
    graphs: GraphOptions,
    config: SchedConfig,
) -> PassKernels:
    """Choose the kernels: a backend that can run in graphs, if they are enabled and possible, and sizes of graphs."""
    mode, tokens_max = graphs.mode, graphs.piece_tokens_max
    needs = Needs(
        model.device,
        model.dtype,
        model.head_dim,
        config.page_size,
        numerics=numerics,
        group=model.heads // model.kv_heads,
        kv_fp8=model.kv_scales is not None,
        special=names_of(model.rules),
        trees=config.drafts_trees,
    )
    rows_max = min(ROWS_MAX if graphs.rows_max is None else graphs.rows_max, config.max_running_requests)
    sizes = graph_sizes(rows_max) if graphs.decodes else ()
    pieces = piece_sizes(min(TOKENS_MAX if tokens_max is None else tokens_max, most_pass_tokens(config)))
    if mode == "eager":
        return PassKernels(choose(requested, needs).name, numerics, sizes, pieces)
    if mode == "off" or model.device.type != "cuda":
        return PassKernels(choose(requested, needs).name, numerics)
    if (why := model.uncapturable_because) and mode == "on":
        raise ConfigError(f"`cuda_graphs` is on, but {why}\nhint: auto, or off")
    if why:
        log.info("no CUDA graphs: %s", why)
        return PassKernels(choose(requested, needs).name, numerics)
    try:
        return PassKernels(choose(requested, replace(needs, graphs=True)).name, numerics, sizes, pieces)
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
    given.setdefault("context_tokens_max", usual_context(model.settings, device))
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
    elsewhere = method == "draft_model" and not model.stage.is_first
    if draft is None and without_pages.speculates and method != "ngram" and not elsewhere:  # a journal executed again
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
    page_bytes += drafting_bytes_of(draft, without_pages, elsewhere=elsewhere)
    kernels = pick(without_pages)
    if ranks is not None:
        rounded = f", rows in fp8, {model.activations}" if model.activations else ""
        cut = f", {len(kernels.piece_sizes)} sizes of pieces" if kernels.piece_sizes else ""
        ranks.compare(f"{kernels.backend} with {len(kernels.graph_sizes)} graphs{cut}{rounded}")
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
        graphs=lambda: _graph_bytes(model, kernels, page_size, context, taps_of(draft)),
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


def usual_context(model: ModelSettings, device: torch.device) -> int:
    """Return `context_tokens_max` where none is given."""
    return min(model.context_tokens, 32768 if device.type == "cuda" else 4096)


def largest_pass_tokens(config: SchedConfig) -> int:
    """Return the new tokens of the largest pass.

    Without chunks the first prompt runs whole, over any budget of a pass.
    """
    chunk = config.chunked_prefill_size
    if chunk is None:
        return max(config.context_tokens_max, config.max_prefill_tokens)
    return min(chunk, config.max_prefill_tokens)


def most_pass_tokens(config: SchedConfig) -> int:
    """Return the most new tokens of a pass: the largest extend beside a decode, with its drafts, of every row."""
    return largest_pass_tokens(config) + config.rows_max * (1 + config.beside_newest_max)


def _graph_bytes(model: LanguageModel, kernels: PassKernels, page_size: int, context: int, taps: Sequence[int]) -> int:
    """Estimate the bytes of the graphs: capture the two largest of both kinds over a pool of one page."""
    sizes, cut_sizes = kernels.graph_sizes, kernels.piece_sizes
    if not sizes and not cut_sizes:
        return 0
    attention = kernels.attention(make_pool(model, 1, page_size), model, graph_rows=kernels.graph_rows)
    recorder, lane, expected = CudaGraphs(), CudaLane(model.device, HostClock()), 0
    pieces = make_pieces(model, attention, cut_sizes[-2:], recorder, lane, taps)
    if pieces is not None:
        kinds = len(cut_sizes) * len(pieces.kinds) // len(pieces.sizes)
        expected += expected_bytes(pieces.grown, kinds)
    if sizes:
        tables = DeviceTables(1, 1, page_size, model.device, context_tokens=context)
        graphs = DecodeGraphs(model, attention, tables, sizes[-2:], recorder)
        expected += expected_bytes(graphs.prepare(lane), len(sizes))
    return expected


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
        seek_once(samples, context, page_size, drafts, device)
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
            draw_once(model.logits(hidden.index_select(0, batch.logits_at)))


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
