"""All settings of an engine in this process, except the model's folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

import msgspec

from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.errors import ConfigError
from lockstep.core.contract.runtime_settings import refuse_in_runtime
from lockstep.host.engine_options import EngineOptions, RankOptions
from lockstep.host.grammar_compiler import CompileLimits
from lockstep.host.handover.decode import DecodeSide
from lockstep.host.handover.kv import KvTransport
from lockstep.host.handover.prefill import PrefillSide
from lockstep.host.layout_options import check_layout
from lockstep.host.options import Option, options_of
from lockstep.host.startup import Keeper
from lockstep.host.text import Text
from lockstep.host.tier_options import check_tiers
from lockstep.runtime.data_ranks import DataRank
from lockstep.runtime.pooling import PoolingMode
from lockstep.runtime.quantized.activations import check_fp8_activations
from lockstep.runtime.ranks import TIMEOUT_S
from lockstep.runtime.watchdog import check_timeout

LORA_RANK_MAX = 512
RENAMED = {"tensor_parallel": "tp", "random_weights_seed": "random_weights", "adapters": "lora"}
"""Earlier names of options; an error names the present one."""


class EngineConfig(EngineOptions, frozen=True, kw_only=True):
    """Settings of an engine: of its model, its ranks and the parts around them, by layers (`engine_options`).

    Args:
        sched: fields of SchedConfig. Sizes not given follow from the model and the device; with `lora`, `max_loras`
            is 8 unless given.
        keeper: replaces `journal`: keeps a journal from which the engine starts again, with its previous settings.
        start: whether the engine runs at once; otherwise it runs after `LLM.start`, once earlier requests are restored.
        pooling: how `embed` reduces a prompt to one vector: mean or last; None: as in the folder (1_Pooling), or mean.
        normalize: whether to scale that vector to length 1; None: as in the folder (modules.json), or not.
        grammar_limits: CPU time and memory limits for compiling one grammar.
        text: the tokenizer; None: that of the folder, if it has one.
        lora: LoRA adapters, folders in the format of PEFT, by name; more can be loaded later.
        hand_over: of a prefill or decode engine: makes its side of transfers, given the part that moves pages.
        data_rank: of an engine that is one of several data-parallel ranks: which one.
        draft_model: implies `speculative_method="draft_model"`. Not possible with `tp`; with `pp` it
            is on the first stage, with `attention_dp` whole on each rank.
    """

    sched: Mapping[str, Any] = msgspec.field(default_factory=dict)
    rank_timeout_s: Annotated[
        float, Option("With --tp: seconds within which every rank must return a batch.", flag="--rank-timeout")
    ] = TIMEOUT_S
    journal: Annotated[str | Path | None, Option("A run folder for all facts and decisions.", metavar="DIR")] = None
    warm_up: Annotated[
        bool | None,
        Option("Compile kernels before the first request.", negatable=True, default="on a GPU"),
    ] = None
    debug: Annotated[bool, Option("Check every plan, and every KV slot before it is read. Slow.")] = False
    keeper: Keeper | None = None
    start: bool = True
    pooling: PoolingMode | None = None
    normalize: bool | None = None
    grammar_limits: CompileLimits | None = None
    text: Text | None = None
    lora: Mapping[str, str | Path] = msgspec.field(default_factory=dict)
    hand_over: Callable[[KvTransport], PrefillSide | DecodeSide] | None = None
    data_rank: DataRank | None = None

    def with_options(self, given: Mapping[str, Any]) -> EngineConfig:
        """Return this configuration with fields of it, and of SchedConfig, replaced by name. Raises ConfigError."""
        own = {name: value for name, value in given.items() if name in self.__struct_fields__}
        sched = {**self.sched, **own.pop("sched", {}), **{n: value for n, value in given.items() if n not in own}}
        refuse_unknown(sched)
        return msgspec.structs.replace(self, **own, sched=sched)

    def check(self) -> None:
        """Raise ConfigError for invalid values, before a model is loaded."""
        optional = ("random_weights", "cuda_graph_max_batch", "piecewise_graph_max_tokens")
        for name in ("tp", "pp", "seed", "max_lora_rank", *optional):
            _check_whole(name, getattr(self, name), optional=name in optional)
        for name in ("kv_cache_dtype", "model_backend"):
            known, given = options_of(EngineOptions)[name].choices, getattr(self, name)
            if given not in known:
                raise ConfigError(f"`{name}` must be {' or '.join(known)}, got `{given}`")
        check_layout(self, self.sched)
        if self.attention_dp > 1 and self.data_rank is None:
            raise ConfigError(
                f"`attention_dp` is {self.attention_dp}, but this is one engine in one process, and each rank is one\n"
                f"hint: lockstep serve --tp {self.tp} --attention-dp {self.attention_dp} --rank-schedulers"
            )
        check_fp8_activations(self.fp8_activations)
        check_timeout(self.batch_timeout_s)
        check_tiers(self, RankOptions())
        for name in ("transfer_transport", "transfer_checksums"):
            if self.hand_over is None and getattr(self, name) != getattr(RankOptions(), name):
                raise ConfigError(
                    f"`{name}` is for prefill and decode engines\n"
                    "hint: lockstep serve --prefill-engines 1 --decode-engines 1"
                )
        if self.journal is not None and any((Path(self.journal) / "journal").glob("*.log")):
            raise ConfigError(f"`journal`: {self.journal} already holds a journal\nhint: choose another run folder")

    def rank_options(self) -> dict[str, Any]:
        """Return the options that every rank has, by name."""
        return {name: getattr(self, name) for name in RankOptions.__struct_fields__}


def refuse_unknown(sched: Mapping[str, Any]) -> None:
    """Raise ConfigError for a setting that SchedConfig does not have."""
    names = [one.name for one in msgspec.structs.fields(SchedConfig)]
    for name in sched:
        refuse_in_runtime(name)
        if name not in names:
            near = [RENAMED[name]] if name in RENAMED else get_close_matches(name, names)
            hint = f"did you mean {' or '.join(near)}?" if near else "docs/scheduling.md lists all settings"
            raise ConfigError(f"there is no setting `{name}`\nhint: {hint}")


def _check_whole(name: str, value: object, *, optional: bool) -> None:
    """Raise ConfigError, with the field and the type, unless `value` is a whole number."""
    if (value is None and optional) or (isinstance(value, int) and not isinstance(value, bool)):
        return
    expected = "a whole number" + (" or None" if optional else "")
    raise ConfigError(f"`{name}` must be {expected}, got `{value}`, which is of type {type(value).__name__}")
