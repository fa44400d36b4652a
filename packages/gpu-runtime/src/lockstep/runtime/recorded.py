"""A model with its executor for the plans of any journal: `lockstep.host.recorded` runs them on it.

The scheduler's settings are the journal's. The pool has only the pages that its plans name, so that the plans of a
large simulated device may fit a small one.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from lockstep.core.contract.commands import BatchPlan
from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.errors import ConfigError
from lockstep.host.engine_options import RankOptions
from lockstep.host.grammar_backends import choose_backend, make_backend
from lockstep.host.grammars import CompiledGrammars, GrammarBackend, GrammarMatchers
from lockstep.host.loop import HostClock
from lockstep.runtime.assembly import Assembled, assemble, choose_device, choose_dtype, device_name, weights_of
from lockstep.runtime.kv_pool import KvPool
from lockstep.runtime.llm import demo_folder, model_name
from lockstep.runtime.memory import MIB, free_bytes_of
from lockstep.runtime.models import read_settings
from lockstep.runtime.models.settings import ModelSettings
from lockstep.runtime.pooling import choose_pooling
from lockstep.runtime.quantized.fp8_format import FP8
from lockstep.runtime.rank_wire import RankSettings
from lockstep.runtime.sources import find_model
from lockstep.runtime.warmup import warm_up

USUAL = RankOptions()
LORA_RANK = 16  # of adapters of a journal: their slots hold zeros, and take the same time


@dataclass(slots=True)
class Extent:
    """The device resources that plans need."""

    batches: int = 0
    pages: int = 0
    context_tokens: int = 0  # of the longest request

    def see(self, plan: BatchPlan) -> None:
        """Add a plan."""
        self.batches += 1
        if len(plan.deltas.pages):
            self.pages = max(self.pages, int(plan.deltas.pages.max()) + 1)
        if len(plan.stops):
            self.context_tokens = max(self.context_tokens, int(plan.stops.max()))


@dataclass(frozen=True, slots=True)
class PlansRunner:
    """A model that is ready to run a journal's plans."""

    made: Assembled
    model: str  # `demo`, or the folder's name
    folder: Path
    device: str  # the driver's name of the device; `cpu` for a processor
    notes: tuple[str, ...]


def make_runner(
    extent: Extent,
    config: SchedConfig,
    options: RankOptions = USUAL,
    *,
    model: Path | None = None,
    device: str = "auto",
    random_weights: int | None = None,
) -> PlansRunner:
    """Load the model, make its pool, and run a few requests, so that no batch waits for what happens once.

    Args:
        config: of the journal. The rest is as in `LLM`, but for `max_lora_rank`, which is LORA_RANK.
    Raises: ConfigError if the model is too short for the journal's requests, or its pool too large for the device.
    """
    if config.shares_passes:
        raise ConfigError(
            f"this journal is of rank {config.dp_rank} of {config.dp_ranks} data-parallel ones, whose passes no "
            "runtime shares yet\nhint: take a journal of one engine"
        )
    folder = demo_folder() if model is None else find_model(model)
    settings, where = read_settings(folder, backend=options.model_backend), choose_device(device)
    name = model_name(folder)
    if extent.context_tokens > settings.context_tokens:
        raise ConfigError(
            f"`model` {name} takes {settings.context_tokens:,} tokens, but a request of this journal gets to "
            f"{extent.context_tokens:,}\nhint: give a model with a longer context, or plans of shorter requests"
        )
    pages = max(extent.pages, -(-min(config.request_tokens_max, settings.context_tokens) // config.page_size))
    pages = min(pages, config.pages)
    wanted = choose_dtype(options.dtype, where, folder) or settings.dtype
    if options.kv_cache_dtype == "fp8_e4m3":
        wanted = FP8
    page_bytes = KvPool.bytes_per_page(settings.layers, config.page_size, settings.kv_heads, settings.head_dim, wanted)
    free_bytes = free_bytes_of(where)
    if free_bytes is not None and (pages + 1) * page_bytes > free_bytes:
        raise ConfigError(
            f"the plans of this journal name {pages:,} pages of {config.page_size} tokens, "
            f"{pages * page_bytes / MIB:,.0f} MiB of KV with {name}, but {where} has {free_bytes / MIB:,.0f} MiB free\n"
            "hint: a smaller model, or plans of a run with fewer `pages`"
        )
    sched = {one: getattr(config, one) for one in config.__struct_fields__}
    sched |= {"pages": pages, "context_tokens_max": min(config.context_tokens_max, settings.context_tokens)}
    sched["eos_token_ids"] = ()  # those are of the journal's model; plans determine when a request ends
    clock = HostClock()
    made = assemble(
        RankSettings(
            model=str(folder.resolve()),
            random_weights_seed=random_weights,
            pooling=choose_pooling(folder),
            debug=False,
            sched=sched,
            **msgspec.structs.asdict(msgspec.structs.replace(options, max_lora_rank=LORA_RANK)),
        ),
        where,
        clock,
    )
    grammars = choose_backend("auto") if (folder / "tokenizer.json").is_file() else ""
    made.executor.matchers = _matchers(grammars, folder, settings)
    if made.model.settings.generates:
        warm_up(made.executor, made.config, clock, made.model.settings.vocab)
    notes = (
        f"{str(made.model.dtype).removeprefix('torch.')}, attention by {made.attention_backend}, "
        f"torch {torch.__version__}" + (f", {torch.get_num_threads()} threads" if where.type == "cpu" else ""),
        *([f"weights {weights_of(made.model)}"] if made.model.settings.quantization else []),
        *(["KV in fp8"] if made.model.kv_scales is not None else []),
    )
    return PlansRunner(made, name, folder, device_name(where), notes)


def _matchers(backend: str, folder: Path, settings: ModelSettings) -> GrammarMatchers:
    """Return the journal's grammars with this model's tokenizer.

    A grammar that cannot be compiled allows every token.
    """

    def library() -> GrammarBackend:
        if not backend:
            raise ConfigError("no library of grammars is installed, or the folder has no tokenizer.json")
        return make_backend(backend, folder / "tokenizer.json", settings.vocab, settings.end_tokens)

    return GrammarMatchers(CompiledGrammars(library), settings.vocab, settings.end_tokens, lenient=True)
