"""Settings that SchedConfig refuses, with the messages; the profiles."""

from __future__ import annotations

from typing import get_args, get_type_hints

import msgspec
import pytest

from lockstep.core.cluster.router import ROUTER_POLICIES, RouterConfig, policy_settings
from lockstep.core.contract.config import FLOAT_SETTINGS, CacheTiers, SchedConfig
from lockstep.core.contract.errors import ConfigError
from lockstep.core.contract.events import (
    FLOAT_PARAMETERS,
    ControlRequested,
    RequestArrived,
    SamplingParams,
    SetState,
    TokenRuns,
)
from lockstep.core.contract.profiles import PROFILES, profile_settings
from lockstep.core.contract.rank_settings import settings_of_rank
from lockstep.core.contract.runtime_settings import refuse_in_runtime
from lockstep.core.contract.setting import setting_fields
from lockstep.core.journal import snapshot
from lockstep.core.scheduler.engine import Engine

NO_OPTIONS = {
    SchedConfig: {
        "tiers",
        "diffusion",
        "hybrid",
        "experts",
        "multiplexing",
        "dp_ranks",
        "dp_rank",
        "base_beside_loras",
        "tables_append_only",
    },  # fields with options of their own, and fields that are derived from others
    RouterConfig: {"policy"},  # `--router`
}


@pytest.mark.parametrize("struct", NO_OPTIONS, ids=lambda struct: struct.__name__)
def test_every_setting_is_declared_with_its_help(struct: type[msgspec.Struct]) -> None:
    fields = setting_fields(struct)
    assert {name for name, field in fields.items() if field.setting is None} == NO_OPTIONS[struct]
    for name, field in fields.items():
        assert field.setting is None or field.setting.help, name
    if struct is RouterConfig:
        assert {one.policy for one in policy_settings().values()} <= set(ROUTER_POLICIES)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batching": "both"}, "`batching` must be prefill_first, mixed or running_first, got `both`"),
        ({"reserve": "none"}, "`reserve` must be ratio, on_demand or full, got `none`"),
        ({"retraction_policy": "oldest"}, "`retraction_policy` must be length, newest or priority, got `oldest`"),
        (
            {"radix_cache": False, "retracted_kv": "cache"},
            "`retracted_kv` cache leaves KV to the radix cache, but `radix_cache` is off",
        ),
        (
            {**profile_settings("vllm"), "radix_cache": False},
            "`same_step_sharing` is on, `retracted_kv` cache leaves KV to the radix cache, `prefix_dedupl",
        ),
        (
            {**profile_settings("vllm"), "radix_cache": False},
            "hint: take same_step_sharing off, retracted_kv free, prefix_deduplication off; or turn radix_cache on",
        ),
        ({"chunk_unit": "byte"}, "`chunk_unit` must be page or token, got `byte`"),
        ({"retracted_requeue": "middle"}, "`retracted_requeue` must be tail or front, got `middle`"),
        ({"encoder_budget_tokens": 0}, "`encoder_budget_tokens` must be a whole number of at least 1, got `0`"),
        ({"encoder_budget_tokens": None}, "`encoder_budget_tokens` must be a whole number of at least 1, got `None`"),
        ({"prefill_max_requests": 0}, "`prefill_max_requests` must be a whole number of at least 1, got `0`"),
        ({"decode_look_ahead": 0}, "`decode_look_ahead` must be a whole number of at least 1, got `0`"),
        ({"chunk_target_us": 0}, "`chunk_target_us` must be a whole number of at least 1, got `0`"),
        ({"prefill_decode_interval": -1}, "`prefill_decode_interval` must be a whole number, 0 (never) or more"),
        ({"prefill_decode_interval": 1.5}, "`prefill_decode_interval` must be a whole number, 0 (never) or more"),
        ({"retract_every": True}, "`retract_every` must be a whole number, 0 (never) or more, got `True`"),
        ({"truncation_align_size": 24}, "`truncation_align_size` 24 is no multiple of `page_size` 16"),
        (
            {"truncation_align_size": 64, "chunked_prefill_size": 32},
            "`truncation_align_size` 64 exceeds `chunked_prefill_size` 32: no prompt could ever be split",
        ),
        (
            {"truncation_align_size": 64, "max_prefill_tokens": 32},
            "`truncation_align_size` 64 exceeds `max_prefill_tokens` 32: no prompt could ever be split",
        ),
        (
            {"truncation_align_size": 64, "batching": "mixed"},
            "`truncation_align_size` needs `batching` prefill_first, got `mixed`",
        ),
        (
            {"chunk_target_us": 500, "chunked_prefill_size": None},
            "`chunk_target_us` shortens chunks, but `chunked_prefill_size` is none",
        ),
    ],
)
def test_bad_settings_are_refused_by_name_and_value(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        SchedConfig(**settings)  # type: ignore[arg-type]
    assert message in str(refused.value)


@pytest.mark.parametrize("name", PROFILES)
def test_every_profile_is_a_valid_configuration(name: str) -> None:
    settings = profile_settings(name)
    config = SchedConfig(**settings)
    assert {field: getattr(config, field) for field in settings} == settings


def test_the_lockstep_profile_leaves_the_defaults_only_where_it_was_shown_better() -> None:
    better = {"batching": "mixed", "reserve": "on_demand", "chunked_prefill_size": 2048}  # docs/profiles.md
    assert profile_settings("lockstep") == better
    assert SchedConfig(**better).batching == "mixed"


@pytest.mark.parametrize("name", ["encoder_cache_tokens", "encoder_budget_tokens"])
def test_runtimes_take_settings_of_media(name: str) -> None:
    refuse_in_runtime(name)


def test_a_profile_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="`profile` must be lockstep, sglang or vllm, got `orca`"):
        profile_settings("orca")


def test_settings_of_a_profile_may_be_changed() -> None:
    profile_settings("vllm")["page_size"] = 64
    assert profile_settings("vllm")["page_size"] == 16


FLOATS: dict[str, dict[str, object]] = {
    "prefetch_share": {"tiers": CacheTiers(host_pages=4, prefetch_share=1)},
    "schedule_conservativeness": {"schedule_conservativeness": 1},
    "watermark and ratio": {
        "dp_ranks": 2,
        "dp_rank": 0,
        "prefill_delayer": True,
        "prefill_delayer_token_usage_low_watermark": 1,
        "prefill_delayer_queue_min_ratio": 1,
    },
}


@pytest.mark.parametrize("name", FLOATS)
def test_whole_number_in_a_setting_of_floats_restores_to_the_same_bytes(name: str) -> None:
    dumped = snapshot.dump(Engine(SchedConfig(page_size=2, pages=24, **FLOATS[name])))  # type: ignore[arg-type]
    assert snapshot.dump(snapshot.restore(dumped)) == dumped


def test_whole_numbers_given_at_run_time_restore_to_the_same_bytes() -> None:
    engine = Engine(SchedConfig(page_size=2, pages=24))
    sampling = SamplingParams(temperature=1, top_p=1, logit_bias=((3, 1),))
    prompt = TokenRuns((1, 4))
    engine.step(RequestArrived(time_us=0, request_id=0, prompt=prompt, max_new_tokens=4, sampling=sampling))
    engine.step(ControlRequested(1, 0, SetState("schedule_conservativeness", 2)))
    dumped = snapshot.dump(engine)
    assert snapshot.dump(snapshot.restore(dumped)) == dumped


@pytest.mark.parametrize("struct", [SchedConfig, CacheTiers, SamplingParams])
def test_every_field_of_floats_stores_floats(struct: type[msgspec.Struct]) -> None:
    stored = {SchedConfig: FLOAT_SETTINGS, CacheTiers: ("prefetch_share",), SamplingParams: FLOAT_PARAMETERS}[struct]
    hints = get_type_hints(struct)
    assert {name for name, hint in hints.items() if hint is float or float in get_args(hint)} == set(stored)


@pytest.mark.parametrize(("ranks", "rows", "queued"), [(1, 250, 10), (2, 125, 5), (3, 84, 4), (8, 32, 2), (16, 16, 1)])
def test_limits_that_do_not_divide_by_the_ranks_are_rounded_up(ranks: int, rows: int, queued: int) -> None:
    """The ranks have at least as many rows and places in their queues as the engine was given, and no rank has none."""
    share = settings_of_rank({"max_running_requests": 250, "max_queued_requests": 10}, ranks, usual={})
    assert share == {"max_running_requests": rows, "max_queued_requests": queued, "dp_ranks": ranks, "dp_rank": 0}
