"""Command-line forms of the scheduler's settings, and of memory beside and below the pages.

Each setting is an option of its own, or NAME=VALUE within one word, as in `--engines` and `--search`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import click
import msgspec

from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.errors import ConfigError
from lockstep.host.options import OptionField, option_of, options_of, with_flags
from lockstep.sim.scenario.tier_options import HostTiers, HybridShares
from lockstep.sim.scenario.values import KINDS, NONE, DurationType, OrWord, ParamType

# One row per field of SchedConfig, in its order: (field, type of the value, help). SchedConfig checks and has defaults.
SCHEDULER_OPTIONS: tuple[tuple[str, ParamType, str], ...] = (
    ("page_size", click.INT, "tokens per KV page, a power of two"),
    ("pages", click.INT, "KV pages in the pool  [default: what fits beside the weights]"),
    ("radix_cache", click.BOOL, "keep the KV of finished prompts for later requests with the same prefix"),
    ("same_step_sharing", click.BOOL, "share a prompt's KV with requests launched behind it, before it is computed"),
    (
        "waiting_prefix_refresh",
        click.INT,
        "count cached prefixes of the waiting queue as used every so many launches; 0: never",
    ),
    ("radix_capacity_pages", OrWord(click.INT, none=NONE), "cap on pages the radix cache may keep"),
    ("context_tokens_max", click.INT, "prompt and output together, per request  [default: the model's context]"),
    ("max_running_requests", click.INT, "requests that hold a row and are not finished"),
    ("request_rows", OrWord(click.INT, none=NONE), "rows of the request table"),
    ("max_queued_requests", OrWord(click.INT, none=NONE), "waiting requests beyond this are rejected"),
    ("waiting_timeout_us", OrWord(DurationType(), none=NONE), "a request not admitted by then is rejected, e.g. 30s"),
    ("running_timeout_us", OrWord(DurationType(), none=NONE), "a request not finished by then is ended, e.g. 10min"),
    (
        "schedule_policy",
        click.STRING,
        "order of the waiting queue: fcfs, lpm, ...: docs/scheduling.md, docs/policies.md",
    ),
    ("schedule_conservativeness", click.FLOAT, "scales the output expected of running requests"),
    ("chunk_target_us", OrWord(DurationType(), none=NONE), "shorten chunks so that a pass stays under this, e.g. 20ms"),
    ("max_prefill_tokens", click.INT, "new tokens one extend may take in all"),
    ("chunked_prefill_size", OrWord(click.INT, none=NONE), "new tokens of one extend before a prompt is split"),
    ("chunk_unit", click.STRING, "what these two count in, and where a prompt may be split: page or token"),
    ("retracted_requeue", click.STRING, "where a retracted request waits: tail or front"),
    ("retracted_kv", click.STRING, "KV of a request retracted for pages: free, or cache (left to the radix cache)"),
    ("batching", click.STRING, "prefill_first, mixed (decodes join an extend), or running_first (vLLM's one budget)"),
    ("reserve", click.STRING, "room left for running requests: ratio, on_demand or full"),
    ("retraction_policy", click.STRING, "the request that gives pages back: length (fewest outputs) or newest"),
    ("prefill_max_requests", OrWord(click.INT, none=NONE), "requests that one extend may take in"),
    ("truncation_align_size", OrWord(click.INT, none=NONE), "prompts are split at multiples of so many tokens"),
    ("decode_look_ahead", click.INT, "tokens of every running request that must fit before a decode"),
    ("prefill_decode_interval", click.INT, "decodes between two extends while any request decodes, at least"),
    ("retract_every", click.INT, "force one retraction every so many decodes, for testing; 0 is never"),
    ("overlap_depth", click.INT, "batches launched beyond the one running: 0, 1 or 2"),
    ("decode_steps_per_launch", click.INT, "decodes in one launch: multi-step scheduling"),
    ("overlap_consecutive_prefills", click.BOOL, "launch an extend behind an extend in flight"),
    ("stream_interval", click.INT, "tokens between two messages of a streaming request"),
    ("force_stream_interval", click.INT, "the same for a request that does not stream"),
    ("eos_token_ids", click.INT, "the model's end tokens; give the option once for each"),
    ("schedule_policy_version", click.STRING, "version that a policy of an installed package must have"),
    ("schedule_seed", click.INT, "shuffles the waiting queue under policy random"),
    ("schedule_low_priority_values_first", click.BOOL, "under policy priority, 0 goes before 1"),
    ("default_priority_value", OrWord(click.INT, none=NONE), "priority of requests that come without"),
    ("prefix_deduplication", click.STRING, "requests whose prefix another one computes: off, last or defer"),
    ("bypass_limit", OrWord(click.INT, none=NONE), "requests from behind that may go before one that waits"),
    ("session_kv", click.STRING, "KV of sessions between turns: hold (until pages lack) or evictable"),
    ("max_sessions", click.INT, "sessions open at once"),
    (
        "grammar_timeout_us",
        OrWord(DurationType(), none=NONE),
        "a request whose grammar is not compiled by then is rejected",
    ),
    ("max_input_tokens", OrWord(click.INT, none=NONE), "the longest prompt, in tokens"),
    ("truncate_input", click.STRING, "which end a longer prompt loses: left, right, or no (it is rejected)"),
    ("isolate_tenants", click.BOOL, "no tenant ever hits a prefix of another one"),
    ("encoder_cache_tokens", OrWord(click.INT, none=NONE), "encoder output of media kept at once, in tokens"),
    ("enable_priority_preemption", click.BOOL, "less important requests make room for more important ones"),
    ("priority_preemption_threshold", click.INT, "and are less important by more than this"),
    ("speculative_method", click.STRING, "source of drafts: ngram, draft_model, eagle, mtp or none  [default: none]"),
    ("num_speculative_tokens", click.INT, "drafts of a request in one launch, at most  [default: 3]"),
    ("speculative_min_chance", click.FLOAT, "drafts less likely to count are left out  [default: none is]"),
    ("speculative_max_batch_size", click.INT, "no drafts while more requests decode  [default: no limit]"),
    (
        "jump_forward_tokens",
        click.INT,
        "tokens that a grammar forces, computed in one launch, at most  [default: none]",
    ),
    ("max_loras", OrWord(click.INT, none=NONE), "adapters that run together, the base model as one; 0 is no LoRA"),
    ("role", click.STRING, "prefill or decode, of engines in a cluster; or mixed  [default: mixed]"),
    ("transfer_allocation", click.STRING, "decode engines give pages early or prefill_complete  [default: early]"),
    ("transfer_failure", click.STRING, "a request whose KV does not come: fail or recompute  [default: fail]"),
    ("num_reserved_decode_tokens", click.INT, "left to each request that decodes when pages are given  [default: 512]"),
    ("transfer_slots", OrWord(click.INT, none=NONE), "metadata slots  [default: twice max-running-requests]"),
    ("bootstrap_timeout_us", OrWord(DurationType(), none=NONE), "without a message of the other half  [default: 300s]"),
    ("transfer_timeout_us", OrWord(DurationType(), none=NONE), "until a transfer has ended  [default: 300s]"),
    ("prefill_delayer", click.BOOL, "of ranks: prompts wait until every rank has some  [default: no]"),
    ("prefill_delayer_max_delay_passes", click.INT, "but for so many passes at most  [default: 30]"),
    ("prefill_delayer_max_delay_us", DurationType(), "and for so long  [default: 5s]"),
    (
        "prefill_delayer_token_usage_low_watermark",
        OrWord(click.FLOAT, none=NONE),
        "and not while a rank that has some uses less of its KV than this share  [default: none]",
    ),
    ("prefill_delayer_slots", click.BOOL, "also until as many may start at once as did lately  [default: no]"),
    (
        "prefill_delayer_queue_min_ratio",
        click.FLOAT,
        "also until this share of the running batch waits  [default: none]",
    ),
    ("prefill_full_skip_passes", click.INT, "so many passes while some ranks are full, others not  [default: 0]"),
    ("encoder_budget_tokens", click.INT, "encoder tokens of media in the making at once  [default: no limit]"),
    ("pp_size", click.INT, "as --pp: a running batch per stage (microbatches)  [default: one running batch]"),
    ("pp_async_batch_depth", click.INT, "and so many more, whose results are on their way  [default: 0]"),
    ("pp_max_micro_batch_size", click.INT, "requests in each  [default: max-running-requests shared out over stages]"),
    ("pp_dynamic_chunking", click.BOOL, "chunks of a prompt that take as long as its first  [default: no]"),
)


def scheduler_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add one option per scheduler setting to a command. Absent options arrive as None or ()."""
    defaults = {field.name: field.default for field in msgspec.structs.fields(SchedConfig)}
    for field, kind, text in reversed(SCHEDULER_OPTIONS):
        if defaults[field] not in (None, ()) and "default" not in text:
            text += f"  [default: {str(defaults[field]).lower()}]"
        flag = option_of(field)
        if kind is click.BOOL:
            option = click.option(f"{flag}/--no-{flag[2:]}", field, default=None, help=text)
        elif field == "eos_token_ids":
            option = click.option(flag.removesuffix("s"), field, type=kind, multiple=True, help=text)
        else:
            option = click.option(flag, field, type=kind, default=None, help=text)
        command = option(command)
    return command


def given_settings(options: dict[str, Any]) -> dict[str, Any]:
    """Remove the scheduler settings from a command's options, and return those that were given."""
    values = {field: options.pop(field) for field, _, _ in SCHEDULER_OPTIONS}
    return {
        field: None if value is NONE else value for field, value in values.items() if value is not None and value != ()
    }


@cache
def tier_fields() -> Mapping[str, OptionField]:
    """Return the options of memory below the device, then those of pools beside full attention, by name."""
    return {**options_of(HostTiers), **options_of(HybridShares)}


def tier_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of memory beside and below the pages to a command. Given options arrive together, in `tiers`.

    They are stored in the context as well, because a stored command line is parsed without running the command.
    """

    def collect(context: click.Context, option: click.Parameter, value: Any) -> None:
        given = {**context.params.get("tiers", {}), **({} if value is None else {option.name: value})}
        context.params["tiers"] = {name: given[name] for name in tier_fields() if name in given}

    def option(*declared: str, **arguments: Any) -> Any:
        return click.option(*declared, expose_value=False, callback=collect, **arguments)

    decorated: Callable[..., Any] = with_flags(option, tier_fields().values(), keep_absent=True, kinds=KINDS)(command)
    return decorated


ALIASES = {"policy": "schedule_policy"}


def setting_names() -> tuple[str, ...]:
    """Return the names of the scheduler settings, as in SchedConfig."""
    return tuple(name for name, _, _ in SCHEDULER_OPTIONS)


def field_of(name: str, others: tuple[str, ...] = ()) -> str:
    """Return the full name of a setting, spelt with - or _, with or without its unit. Raises ConfigError if unknown."""
    known = setting_names()
    key = name.strip().lower().replace("-", "_")
    key = ALIASES.get(key, key)
    if key in known or key in others:
        return key
    if f"{key}_us" in known:
        return f"{key}_us"
    names = (*others, *ALIASES, *known)
    close = difflib.get_close_matches(key, names, n=1)
    hint = f"did you mean `{close[0]}`? " if close else ""
    raise ConfigError(f"unknown setting `{name}`\nhint: {hint}settings are {', '.join(names)}")


def parse_tier(name: str, text: str) -> Any:
    """Parse one setting of the tiers below the device. Raises ConfigError with name, text and what was expected."""
    kind = click.types.convert_type(KINDS["_us"] if name.endswith("_us") else tier_fields()[name].kind)
    try:
        return kind.convert(text, None, None)
    except click.BadParameter as error:
        raise ConfigError(f"`{name}` cannot be `{text}`: {error.message.removesuffix(f', got `{text}`')}") from None


def parse_setting(name: str, text: str) -> tuple[str, Any]:
    """Parse one scheduler setting. Raises ConfigError with the name, the text and what was expected."""
    field = field_of(name)
    kind = next(kind for known, kind, _ in SCHEDULER_OPTIONS if known == field)
    try:
        value = kind.convert(text, None, None)
    except click.BadParameter as error:
        raise ConfigError(f"`{name}` cannot be `{text}`: {error.message.removesuffix(f', got `{text}`')}") from None
    if field == "eos_token_ids":
        return field, (value,)
    return field, None if value is NONE else value
