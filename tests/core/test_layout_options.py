"""Options of an engine's layout: those that go together up to each limit, and those that are refused by name."""

from __future__ import annotations

import re
from typing import Any

import pytest

from lockstep.core.contract.config import OF_RANKS, PP_SIZE_MAX
from lockstep.core.contract.errors import ConfigError
from lockstep.host.engine_options import EngineOptions
from lockstep.host.layout_options import NOT_IN_STAGES, NOT_ON_RANKS, check_layout

RANKS: dict[str, Any] = {"tp": 2, "attention_dp": 2, "rank_schedulers": True}
MOVING: dict[str, Any] = {"tp": 2, "ep": 2, "eplb": True}
SET: dict[str, Any] = {"draft_model": "small", "swa_full_tokens_ratio": 0.5, "pp": 2}

TOGETHER: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({}, {"pp_size": 1, "expert_load_interval": 4, "decode_steps_per_launch": 2, "role": "prefill", "max_loras": 2}),
    ({"cuda_graphs": "on", "draft_model": "small", "swa_full_tokens_ratio": 0.5}, {}),
    ({"pp": 2}, {"pp_size": 2, "expert_load_interval": 0, "decode_steps_per_launch": 1}),
    ({"pp": PP_SIZE_MAX, "cuda_graphs": "off", "piecewise_graph_max_tokens": 0}, {}),
    ({"pp": 2, "ray": "auto"}, {}),
    ({"tp": 2}, {"two_batch_overlap": True, "expert_load_interval": 4}),
    ({"pp": 2}, {"two_batch_overlap": False}),
    ({"tp": 2, "ep": 2, "moe_a2a": True}, {}),
    ({"tp": 2, "encoder_data_parallel": False}, {}),
    ({"encoder_data_parallel": False}, {"role": "decode"}),
    (MOVING, {}),
    (MOVING, {"expert_load_interval": 4}),
    ({**MOVING, "redundant_experts": 4, "eplb_interval": 1, "eplb_imbalance_min": 1.5}, {}),
    (RANKS, {}),
    (RANKS, {"two_batch_overlap": True}),
    ({**RANKS, "draft_model": "d"}, {}),
    ({"pp": 2, "draft_model": "d"}, {}),
    (RANKS, {"speculative_method": "ngram"}),
    (RANKS, {"expert_load_interval": 4, "role": "mixed", "max_loras": 0}),
    ({**RANKS, "cuda_graphs": "off", "ep": 2}, dict.fromkeys(OF_RANKS, 1)),
]
REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"pp": 0}, {}, f"`pp` must be 1 to {PP_SIZE_MAX}, got `0`"),
    ({"pp": PP_SIZE_MAX + 1}, {}, f"`pp` must be 1 to {PP_SIZE_MAX}, got `{PP_SIZE_MAX + 1}`"),
    ({}, {"pp_size": 2}, "`pp_size` is of pipeline stages"),
    *[({"pp": 2, name: SET[name]}, {}, f"`{name}` is {SET[name]}, but `pp` is 2") for name in NOT_IN_STAGES],
    ({"pp": 2, "cuda_graphs": "on"}, {}, "`cuda_graphs` is on, but `pp` is 2"),
    ({"pp": 2, "cuda_graphs": "eager"}, {}, "`cuda_graphs` is eager, but `pp` is 2"),
    ({"pp": 2, "piecewise_graph_max_tokens": 8}, {}, "`piecewise_graph_max_tokens` is 8, but `pp` is 2"),
    ({**RANKS, "piecewise_graph_max_tokens": 8}, {}, "`piecewise_graph_max_tokens` is 8, but `attention_dp` is 2"),
    ({"pp": 2}, {"expert_load_interval": 1}, "`expert_load_interval` is 1, but `pp` is 2"),
    ({"pp": 2}, {"decode_steps_per_launch": 2}, "`decode_steps_per_launch` is 2, but `pp` is 2"),
    ({"ray": "auto"}, {}, "`ray` is auto, but the engine has one stage"),
    ({"pp": 2, "ray": ""}, {}, "`ray` is empty"),
    ({}, {"two_batch_overlap": True}, "`two_batch_overlap` is on, but `tp` is 1"),
    ({"tp": 2, "pp": 2}, {"two_batch_overlap": True}, "`two_batch_overlap` is on, but `pp` is 2"),
    (RANKS, {"two_batch_overlap": True, "expert_load_interval": 1}, "`expert_load_interval` is 1 and `attention_dp`"),
    ({"tp": 4, "ep": 2}, {}, "`ep` must be 1 (each expert split over the ranks) or `tp` 4"),
    ({"tp": 2, "moe_a2a": True}, {}, "`moe_a2a` sends tokens to the ranks of their experts, but `ep` is 1"),
    ({"encoder_data_parallel": False}, {}, "`encoder_data_parallel` is off, but `tp` is 1"),
    ({**RANKS, "encoder_data_parallel": False}, {}, "`encoder_data_parallel` is off, but `attention_dp` is 2"),
    ({"tp": 2, "ep": 2, "redundant_experts": 2}, {}, "`redundant_experts` is 2, but `eplb` is off"),
    ({"eplb_interval": 999}, {}, "`eplb_interval` is 999, but `eplb` is off"),
    ({"eplb_imbalance_min": 1.1}, {}, "`eplb_imbalance_min` is 1.1, but `eplb` is off"),
    ({"tp": 2, "eplb": True}, {}, "`eplb` moves experts between ranks, but `ep` is 1"),
    ({**MOVING, **RANKS}, {}, "`eplb` is on, but `attention_dp` is 2"),
    ({**MOVING, "pp": 2}, {}, "`eplb` is on, but `pp` is 2"),
    ({**MOVING, "eplb_interval": 0}, {}, "`eplb_interval` must be at least 1 batch, got `0`"),
    ({**MOVING, "eplb_imbalance_min": 0.9}, {}, "`eplb_imbalance_min` must be at least 1 (the mean load), got `0.9`"),
    ({**MOVING, "redundant_experts": 3}, {}, "`redundant_experts` must be a multiple of `ep` 2, got `3`"),
    ({**MOVING, "redundant_experts": -2}, {}, "`redundant_experts` must be a multiple of `ep` 2, got `-2`"),
    (MOVING, {"expert_load_interval": 0}, "`eplb` needs the load of experts, but `expert_load_interval` is 0"),
    ({"attention_dp": 0}, {}, "`attention_dp` must be at least 1, got `0`"),
    ({"rank_schedulers": True}, {}, "`rank_schedulers` is on, but `attention_dp` is 1"),
    *[({}, {name: 1}, f"`{name}` is of data-parallel ranks, and the engine has one") for name in OF_RANKS],
    ({"tp": 2, "attention_dp": 2}, {}, "`attention_dp` is 2, but `rank_schedulers` is off"),
    ({**RANKS, "tp": 4}, {}, "`attention_dp` is 2 and `tp` is 4"),
    *[({**RANKS, name: SET[name]}, {}, f"`{name}` is {SET[name]}, but `attention_dp` is 2") for name in NOT_ON_RANKS],
    ({**RANKS, "cuda_graphs": "on"}, {}, "`cuda_graphs` is on, but `attention_dp` is 2"),
    ({**RANKS, "cuda_graphs": "eager"}, {}, "`cuda_graphs` is eager, but `attention_dp` is 2"),
    (RANKS, {"max_loras": 1}, "`max_loras` is 1, but `attention_dp` is 2"),
    ({"tp": 2, "pp": 2, "draft_model": "d"}, {}, "`draft_model` is d, but `tp` is 2: a draft model is not split"),
    ({"pp": 2, "draft_model": "d"}, {"speculative_method": "eagle"}, "`draft_model` is a head, d, but 2 processes"),
    ({**RANKS, "draft_model": "d"}, {"speculative_method": "eagle"}, "`draft_model` is a head, d, but 2 processes"),
    (RANKS, {"speculative_method": "mtp"}, "`speculative_method` is mtp, but 2 processes run the model"),
    ({"draft_model": "d"}, {"speculative_method": "ngram"}, "`draft_model` is d, but `speculative_method` is ngram"),
]


@pytest.mark.parametrize(("options", "sched"), TOGETHER)
def test_options_that_go_together_are_accepted(options: dict[str, Any], sched: dict[str, Any]) -> None:
    check_layout(EngineOptions(**options), sched)


@pytest.mark.parametrize(("options", "sched", "message"), REFUSED)
def test_options_that_contradict_each_other_are_refused_by_name(
    options: dict[str, Any], sched: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_layout(EngineOptions(**options), sched)


def test_every_engine_of_a_server_is_checked() -> None:
    experts = EngineOptions(tp=2, ep=2)
    check_layout(experts, {}, (2, 2))
    with pytest.raises(ConfigError, match=r"`ep` must be 1 .* or `tp` 4"):
        check_layout(experts, {}, (2, 4))
    check_layout(EngineOptions(), {"two_batch_overlap": True}, (2, 4))
    with pytest.raises(ConfigError, match="`two_batch_overlap` is on, but `tp` is 1"):
        check_layout(EngineOptions(tp=2), {"two_batch_overlap": True}, (2, 1))


def test_adapters_are_refused_on_ranks() -> None:
    class WithAdapters(EngineOptions, frozen=True, kw_only=True):
        lora: tuple[str, ...] = ()

    check_layout(WithAdapters(**RANKS), {})
    with pytest.raises(ConfigError, match=r"`lora` is \('a',\), but `attention_dp` is 2"):
        check_layout(WithAdapters(**RANKS, lora=("a",)), {})
