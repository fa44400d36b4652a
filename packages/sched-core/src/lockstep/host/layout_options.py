"""How the GPUs of an engine share a model, by options of a command line: what goes together.

The options are `tp`, `pp` (pipeline stages), `ep` and `moe_a2a` (experts), `attention_dp` and `rank_schedulers`
(data-parallel ranks), as in the simulator.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from lockstep.core.contract.config import OF_RANKS, PP_SIZE_MAX, STAGES_ONLY
from lockstep.core.contract.errors import ConfigError
from lockstep.host.drafts import DraftingRanks, check_draft_model, draft_method
from lockstep.host.engine_options import GraphMode


class Layout(Protocol):
    """Options of an engine with a model."""

    @property
    def tp(self) -> int: ...
    @property
    def pp(self) -> int: ...
    @property
    def attention_dp(self) -> int: ...
    @property
    def rank_schedulers(self) -> bool: ...
    @property
    def ray(self) -> str | None: ...
    @property
    def ep(self) -> int: ...
    @property
    def moe_a2a(self) -> bool: ...
    @property
    def eplb(self) -> bool: ...
    @property
    def redundant_experts(self) -> int: ...
    @property
    def eplb_interval(self) -> int: ...
    @property
    def eplb_imbalance_min(self) -> float: ...
    @property
    def swa_full_tokens_ratio(self) -> float | None: ...
    @property
    def cuda_graphs(self) -> GraphMode: ...
    @property
    def piecewise_graph_max_tokens(self) -> int | None: ...
    @property
    def draft_model(self) -> str | None: ...
    @property
    def encoder_data_parallel(self) -> bool: ...


NOT_ON_RANKS = {"swa_full_tokens_ratio": None, "pp": 1}
"""Options that data-parallel ranks do not follow yet, with the values that leave them out."""
NOT_IN_STAGES = {"swa_full_tokens_ratio": None}
"""Options that stages do not follow yet, with the values that leave them out."""


def check_layout(given: Layout, sched: Mapping[str, Any], tps: Sequence[int] = ()) -> None:
    """Raise ConfigError for options that do not go together.

    Args:
        tps: `tp` of all engines of a server; empty: of one engine, `tp`.
    """
    _check_stages(given, sched)
    _check_ranks(given, sched)
    _check_halves(given, sched, tps or (given.tp,))
    if given.ray is not None and given.pp == 1:
        raise ConfigError(
            f"`ray` is {given.ray}, but the engine has one stage, which is on this machine\nhint: give --pp N"
        )
    if given.ray == "":
        raise ConfigError("`ray` is empty\nhint: auto, or HOST:PORT")
    if sched.get("role", "mixed") == "mixed":  # the other engines of a server may have several ranks
        _check_encoder(given, tps or (given.tp,))
    for tp in tps or (given.tp,):
        if given.ep not in (1, tp):
            raise ConfigError(
                f"`ep` must be 1 (each expert split over the ranks) or `tp` {tp} (whole experts on each), "
                f"got `{given.ep}`"
            )
    _check_moves(given, sched)
    _check_drafts(given, sched, tps or (given.tp,))
    if given.moe_a2a and given.ep == 1:
        raise ConfigError(
            "`moe_a2a` sends tokens to the ranks of their experts, but `ep` is 1: every rank has a part of each\n"
            "hint: --ep N with --tp N, or leave out --moe-a2a"
        )


def _check_drafts(given: Layout, sched: Mapping[str, Any], tps: Sequence[int]) -> None:
    """Raise ConfigError for a drafter that these ranks and stages do not have."""
    usual = "none" if given.draft_model is None else draft_method(given.draft_model)
    method = sched.get("speculative_method", usual)
    if given.attention_dp > 1:
        check_draft_model(given.draft_model, method, DraftingRanks(1, given.pp, given.attention_dp))
        return
    for tp in tps:
        check_draft_model(given.draft_model, method, DraftingRanks(tp, given.pp))


def _check_encoder(given: Layout, tps: Sequence[int]) -> None:
    """Raise ConfigError if contents of media are not divided between ranks that have none in common."""
    if given.encoder_data_parallel:
        return
    if given.attention_dp > 1 or max(tps) == 1:
        name = "attention_dp" if given.attention_dp > 1 else "tp"
        raise ConfigError(
            f"`encoder_data_parallel` is off, but `{name}` is {getattr(given, name)}: a rank encodes only the contents "
            "of its own requests\nhint: leave it out"
        )


def _check_moves(given: Layout, sched: Mapping[str, Any]) -> None:
    """Raise ConfigError for options of experts that move which do not go together."""
    usual = {"redundant_experts": 0, "eplb_interval": 1000, "eplb_imbalance_min": 1.0}
    for name, meaningless in usual.items():
        if (value := getattr(given, name)) != meaningless and not given.eplb:
            raise ConfigError(f"`{name}` is {value}, but `eplb` is off: experts stay where they are\nhint: --eplb")
    if not given.eplb:
        return
    if given.ep == 1:
        raise ConfigError(
            "`eplb` moves experts between ranks, but `ep` is 1: every rank has a part of each\nhint: --tp N --ep N"
        )
    for name, unset in {"attention_dp": 1, "pp": 1}.items():
        if (value := getattr(given, name)) != unset:
            raise ConfigError(
                f"`eplb` is on, but `{name}` is {value}: one scheduler has to decide for all ranks and stages\n"
                "hint: drop one of the two"
            )
    if given.eplb_interval < 1:
        raise ConfigError(f"`eplb_interval` must be at least 1 batch, got `{given.eplb_interval}`")
    if not given.eplb_imbalance_min >= 1.0:
        raise ConfigError(f"`eplb_imbalance_min` must be at least 1 (the mean load), got `{given.eplb_imbalance_min}`")
    if given.redundant_experts < 0 or given.redundant_experts % given.ep:
        raise ConfigError(
            f"`redundant_experts` must be a multiple of `ep` {given.ep}, got `{given.redundant_experts}`\n"
            f"hint: {given.ep}, one further slot on each rank"
        )
    if sched.get("expert_load_interval") == 0:
        raise ConfigError("`eplb` needs the load of experts, but `expert_load_interval` is 0\nhint: leave it out")


def _check_halves(given: Layout, sched: Mapping[str, Any], tps: Sequence[int]) -> None:
    """Raise ConfigError for halves of batches that have no communication to hide, or that stages do not follow."""
    if not sched.get("two_batch_overlap"):
        return
    if 1 in tps:
        raise ConfigError(
            "`two_batch_overlap` is on, but `tp` is 1: one rank has no communication that a half could hide\n"
            "hint: --tp N, or drop it"
        )
    if given.pp > 1:
        raise ConfigError(
            f"`two_batch_overlap` is on, but `pp` is {given.pp}: microbatches keep the other stages busy already\n"
            "hint: drop one of the two"
        )
    if given.attention_dp > 1 and sched.get("expert_load_interval"):
        raise ConfigError(
            f"`two_batch_overlap` is on, but `expert_load_interval` is {sched['expert_load_interval']} and "
            f"`attention_dp` is {given.attention_dp}: the rows of each rank are not told apart in halves\n"
            "hint: drop one of the two"
        )


def _check_stages(given: Layout, sched: Mapping[str, Any]) -> None:
    """Raise ConfigError for options that stages do not follow, and for settings of stages without stages."""
    if not 1 <= given.pp <= PP_SIZE_MAX:
        raise ConfigError(f"`pp` must be 1 to {PP_SIZE_MAX}, got `{given.pp}`")
    if given.pp == 1:
        for name in STAGES_ONLY:
            if name in sched and (name, sched[name]) != ("pp_size", 1):
                raise ConfigError(
                    f"`{name}` is of pipeline stages, and the engine has one\nhint: give --pp N, or drop it"
                )
        return
    for name, unset in NOT_IN_STAGES.items():
        if (value := getattr(given, name)) != unset:
            raise ConfigError(
                f"`{name}` is {value}, but `pp` is {given.pp}: pipeline stages do not have that yet\n"
                "hint: drop one of the two"
            )
    if given.cuda_graphs in ("on", "eager"):
        raise ConfigError(
            f"`cuda_graphs` is {given.cuda_graphs}, but `pp` is {given.pp}: graphs do not read what other stages send\n"
            "hint: auto, or off"
        )
    if given.piecewise_graph_max_tokens:
        raise ConfigError(
            f"`piecewise_graph_max_tokens` is {given.piecewise_graph_max_tokens}, but `pp` is {given.pp}: graphs do "
            "not read what other stages send\nhint: leave it out"
        )
    if interval := sched.get("expert_load_interval"):
        raise ConfigError(
            f"`expert_load_interval` is {interval}, but `pp` is {given.pp}: the load of experts in several stages is "
            "not measured yet\nhint: drop one of the two"
        )
    if (steps := sched.get("decode_steps_per_launch", 1)) != 1:
        raise ConfigError(
            f"`decode_steps_per_launch` is {steps}, but `pp` is {given.pp}: the steps of one launch would keep all "
            "stages but one idle\nhint: drop one of the two"
        )


def _check_ranks(given: Layout, sched: Mapping[str, Any]) -> None:
    """Raise ConfigError for options that data-parallel ranks do not follow, and for options of ranks without ranks."""
    ranks = given.attention_dp
    if ranks < 1:
        raise ConfigError(f"`attention_dp` must be at least 1, got `{ranks}`")
    if ranks == 1:
        if given.rank_schedulers:
            raise ConfigError(
                "`rank_schedulers` is on, but `attention_dp` is 1: there is one rank\n"
                "hint: --tp N --attention-dp N, or leave out --rank-schedulers"
            )
        for name in OF_RANKS:
            if sched.get(name):
                raise ConfigError(
                    f"`{name}` is of data-parallel ranks, and the engine has one\n"
                    "hint: --tp N --attention-dp N --rank-schedulers, or drop it"
                )
        return
    if not given.rank_schedulers:
        raise ConfigError(
            f"`attention_dp` is {ranks}, but `rank_schedulers` is off: one scheduler for all ranks is simulated only\n"
            "hint: --rank-schedulers"
        )
    if given.tp != ranks:
        raise ConfigError(
            f"`attention_dp` is {ranks} and `tp` is {given.tp}: each rank has the attention of one GPU\n"
            f"hint: --tp {ranks}"
        )
    for name, unset in NOT_ON_RANKS.items():
        if (value := getattr(given, name)) != unset:
            raise ConfigError(
                f"`{name}` is {value}, but `attention_dp` is {ranks}: data-parallel ranks do not have that yet\n"
                "hint: drop one of the two"
            )
    if given.cuda_graphs in ("on", "eager"):
        raise ConfigError(
            f"`cuda_graphs` is {given.cuda_graphs}, but `attention_dp` is {ranks}: graphs do not read the rows of "
            "other ranks\nhint: auto, or off"
        )
    if given.piecewise_graph_max_tokens:
        raise ConfigError(
            f"`piecewise_graph_max_tokens` is {given.piecewise_graph_max_tokens}, but `attention_dp` is {ranks}: "
            "graphs do not read the rows of other ranks\nhint: leave it out"
        )
    adapters = {"lora": getattr(given, "lora", None), "max_loras": sched.get("max_loras")}
    for name, value in adapters.items():
        if value:
            raise ConfigError(
                f"`{name}` is {value}, but `attention_dp` is {ranks}: MLPs compute the rows of all ranks, and adapters "
                "are of the requests of one\nhint: drop one of the two"
            )
