"""The worlds that are explored: each feature alone and each two together, with nothing, one or two batches behind one.

A *feature* changes the settings, the fields of requests, and what may come from outside. A world of two features has
both. Two that the core refuses together make no world; `refused` has the reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from lockstep.core.contract.config import CacheTiers, Division, HybridMemory, Multiplexing, SchedConfig
from lockstep.core.contract.errors import ConfigError
from lockstep.core.contract.events import (
    Flush,
    Pause,
    PromptSpan,
    ReleaseMemory,
    UpdateWeights,
)
from tests.support.driver.actions import CONTROLS, STOP_TOKEN, Action
from tests.support.explorer.world import World

DEPTHS = (0, 1, 2)  # of overlap
PAGE_TOKENS = 2
IMAGE = PromptSpan(0, 2, "image", bytes(32), 2)

Options = dict[str, Any]


@dataclass(frozen=True)
class Feature:
    """What a feature adds to a world of two requests."""

    settings: Options = field(default_factory=dict)
    each: Options = field(default_factory=dict)  # fields of both requests
    first: Options = field(default_factory=dict)  # fields of the first one only
    second: Options = field(default_factory=dict)
    lengths: tuple[tuple[int, int], ...] = ()  # of both: prompt and output tokens; empty: as without it
    inputs: Options = field(default_factory=dict)  # fields of the world
    third: bool = False  # a third request, like the second


FEATURES: dict[str, Feature] = {
    "plain": Feature(),
    "cancel": Feature(inputs={"cancels": 1}),
    "batch error": Feature(inputs={"batch_errors": 1}),
    "invalid row": Feature(inputs={"odd_rows": 1}),
    "restart": Feature(inputs={"restarts": 1}),
    "three requests": Feature(third=True),
    "chunks": Feature({"chunked_prefill_size": 2}, lengths=((5, 2), (4, 2))),
    "mixed batches": Feature({"chunked_prefill_size": 2, "batching": "mixed"}, lengths=((5, 2), (4, 2))),
    "running first": Feature({"chunked_prefill_size": 2, "batching": "running_first"}, lengths=((5, 2), (4, 2))),
    "retraction": Feature({"pages": 4}, lengths=((3, 4), (2, 5))),
    "same-step sharing": Feature({"same_step_sharing": True}, lengths=((4, 2), (5, 2))),
    "one row": Feature({"max_running_requests": 1}),
    "no radix cache": Feature({"radix_cache": False}),
    "priority preemption": Feature(
        {
            "max_running_requests": 1,
            "schedule_policy": "priority",
            "retraction_policy": "priority",
            "enable_priority_preemption": True,
            "priority_preemption_threshold": 0,
            "default_priority_value": 0,
        },
        first={"priority": 0},
        second={"priority": 5},
        lengths=((3, 4), (2, 2)),
    ),
    "full reserve": Feature({"reserve": "full"}),
    "end token": Feature({"eos_token_ids": (STOP_TOKEN,)}, first={"stops_at": 1}),
    "least output": Feature(first={"stops_at": 0, "min_new_tokens": 2}, each={"stop_token_ids": (STOP_TOKEN,)}),
    "stop text": Feature(first={"stop_texts": ("END",)}, inputs={"odd_rows": 1}),
    "steps per launch": Feature({"decode_steps_per_launch": 2}, lengths=((3, 4), (4, 3))),
    "grammar": Feature(first={"grammar": "g", "grammar_ends": 2}, inputs={"refusals": 1}),
    "jump forward": Feature({"jump_forward_tokens": 2}, each={"grammar": "g"}, lengths=((3, 4), (4, 3))),
    "drafts": Feature({"speculative_method": "ngram", "num_speculative_tokens": 2}, lengths=((3, 4), (4, 3))),
    "samples": Feature(first={"parallel_samples": 2}),
    "embedding": Feature(first={"kind": "embed", "max_new": 0}),
    "media": Feature({"encoder_cache_tokens": 3}, each={"spans": (IMAGE,)}, inputs={"refusals": 1}),
    "adapters": Feature(
        {"max_loras": 1},
        first={"adapter": "law"},
        second={"adapter": "med"},
        inputs={
            "refusals": 1,
            "commands": (("load_adapter", 0, 0, False), ("load_adapter", 1, 0, False), ("unload_adapter", 0)),
        },
    ),
    "session": Feature(
        each={"session": "s"},
        inputs={"commands": (("session_open", 0, 60, None, False), ("session_close", 0))},
    ),
    "host memory": Feature(
        {"pages": 4, "tiers": CacheTiers(host_pages=3, write_policy="write_through")}, inputs={"refusals": 1}
    ),
    "storage": Feature(
        {
            "pages": 4,
            "tiers": CacheTiers(
                host_pages=2, write_policy="write_back", storage=True, prefetch_tokens_min=1, load_tokens_min=0
            ),
        },
        lengths=((4, 1), (5, 1)),
    ),
    "windows": Feature({"hybrid": HybridMemory(window_tokens=3, window_pages=6), "chunked_prefill_size": 4}),
    "states": Feature({"hybrid": HybridMemory(state_slots=3, checkpoint_tokens=2), "chunked_prefill_size": 4}),
    "layers": Feature(
        {"multiplexing": Multiplexing(layers=2, sms=2, divisions=(Division(1, 1),), token_budget=1)},
        lengths=((3, 2), (2, 2)),
    ),
    "stages": Feature({"pp_size": 2}),
    "pause": Feature(inputs={"controls": (Pause("in_place"),)}),
    "pause and retract": Feature(inputs={"controls": (Pause("retract"),)}),
    "flush": Feature(inputs={"controls": (Flush(),)}),
    "new weights": Feature(inputs={"controls": (UpdateWeights(0, "w", "wait"),)}),
    "new weights in place": Feature(inputs={"controls": (UpdateWeights(0, "w", "in_place"),)}),
    "memory given back": Feature(inputs={"controls": (ReleaseMemory(("kv_cache",)),)}),
    "waiting time-out": Feature({"waiting_timeout_us": 10, "max_running_requests": 1}, inputs={"timed": True}),
    "running time-out": Feature({"running_timeout_us": 10}, inputs={"timed": True}),
    "grammar time-out": Feature({"grammar_timeout_us": 10}, first={"grammar": "g"}, inputs={"timed": True}),
}
LENGTHS = ((3, 2), (4, 2))
SETTINGS: Options = {
    "page_size": PAGE_TOKENS,
    "pages": 12,
    "max_running_requests": 3,
    "max_prefill_tokens": 8,
    "context_tokens_max": 64,
    "reserve": "on_demand",
}
LIMITS = {"pages", "chunked_prefill_size", "max_running_requests"}  # of two features the smaller one holds


def worlds(*, pairs: bool = True) -> Iterator[World]:
    """Yield the worlds of each feature and, with `pairs`, of each two."""
    sets = [(name,) for name in FEATURES] + (list(combinations(FEATURES, 2)) if pairs else [])
    for names in sets:
        for depth in DEPTHS:
            if "plain" not in names or len(names) == 1:
                try:
                    yield world(names, depth)
                except ConfigError:
                    continue


def refused() -> dict[tuple[str, str], str]:
    """Pairs of features that no engine has, and the message of the core."""
    found = {}
    for pair in combinations(FEATURES, 2):
        try:
            world(pair, DEPTHS[1])
        except ConfigError as error:
            found[pair] = str(error).splitlines()[0]
    return found


def world(names: tuple[str, ...], depth: int) -> World:
    """Return the world of some features. Raises: ConfigError if the core refuses them together."""
    features = [FEATURES[name] for name in names]
    settings = {**SETTINGS, "overlap_depth": depth}
    for feature in features:
        for name, value in feature.settings.items():
            smaller = name in settings and name in LIMITS
            settings[name] = min(settings[name], value) if smaller else value
    _require_one_each(names, features)
    lengths = next((feature.lengths for feature in features if feature.lengths), LENGTHS)
    firsts = [{**feature.each, **feature.first} for feature in features]
    seconds = [{**feature.each, **feature.second} for feature in features]
    arrivals = [_arrival(lengths[0], firsts), _arrival(lengths[1], seconds)]
    if any(feature.third for feature in features):
        arrivals.append(arrivals[1])
    inputs: Options = {}
    for feature in features:
        for name, value in feature.inputs.items():
            inputs[name] = inputs[name] + value if name in inputs and name != "timed" else value
    for control in inputs.get("controls", ()):
        assert control in CONTROLS
    name = f"{' + '.join(names)}, depth {depth}"
    return World(name, SchedConfig(**settings), tuple(arrivals), **inputs)


def _require_one_each(names: tuple[str, ...], features: list[Feature]) -> None:
    """Two features that set different values of one setting make no world."""
    for one, other in combinations(features, 2):
        for name in one.settings.keys() & other.settings.keys() - LIMITS:
            if one.settings[name] != other.settings[name]:
                raise ConfigError(f"`{name}` of {names[0]} is `{one.settings[name]}`, of {names[1]} another")


def _arrival(lengths: tuple[int, int], parts: list[Options]) -> Action:
    options: Options = {}
    for part in parts:
        options |= part
    tokens, outputs = lengths
    if options.get("kind") == "embed":
        options = {name: value for name, value in options.items() if name not in ("grammar", "grammar_ends")}
    return ("arrive", 100, tokens, options.pop("max_new", outputs), options)
