"""Random settings of an engine, and random lists of actions for a driver.

Everything is drawn from the generator that is passed. A later setting is drawn from a generator of its own
(`random.Random()` with a copied state, or a seed string), so that the other settings and actions of a seed stay as they
are.
"""

from __future__ import annotations

import random
from typing import Any

import msgspec

from lockstep.core.contract.config import (
    SCHEDULE_POLICIES,
    Batching,
    Division,
    Multiplexing,
    Reserve,
    SchedConfig,
)
from lockstep.core.contract.events import Pause, PromptSpan, Resume
from tests.support.driver.actions import (
    ADAPTERS,
    CONTROLS,
    GRAMMARS,
    LETTING_GO,
    PRIORITIES,
    SESSIONS,
    STOP_TOKEN,
    Action,
)


def random_config(rng: random.Random) -> SchedConfig:
    """Settings that favour 0, 1, the edge and one beyond it."""
    page_size = rng.choice([1, 1, 2, 4, 16, 64])
    chunk = rng.choice([None, page_size, 3 * page_size, max(page_size, 64)])
    radix = rng.random() < 0.85
    policies = [policy for policy in SCHEDULE_POLICIES if radix or policy not in ("lpm", "dfs-weight")]
    policy = rng.choice(["fcfs", "priority", rng.choice(policies), rng.choice(policies)])
    preempts = policy == "priority" and rng.random() < 0.7
    batching: Batching = rng.choice(["prefill_first", "prefill_first", "mixed", "running_first"])
    input_tokens = rng.choice([page_size, page_size + 1, 64, 4096])
    may_align = batching == "prefill_first" and min(chunk or input_tokens, input_tokens) >= 2 * page_size
    config = SchedConfig(
        page_size=page_size,
        pages=rng.choice([2, 3, rng.randint(2, 12), rng.randint(8, 80), max(2, 150 // page_size)]),
        radix_cache=radix,
        same_step_sharing=radix and rng.random() < 0.3,
        radix_capacity_pages=rng.choice([None, None, 1, 5]) if radix else None,
        context_tokens_max=rng.choice([8, 60, 200, 10**6]),
        max_running_requests=rng.choice([1, 2, 4, 16]),
        max_queued_requests=rng.choice([None, None, 1, 4]),
        waiting_timeout_us=rng.choice([None, None, 40]),
        running_timeout_us=rng.choice([None, None, 90]),
        schedule_policy=policy,
        enable_priority_preemption=preempts,
        priority_preemption_threshold=rng.choice([0, 1, 10]),
        schedule_conservativeness=rng.choice([0.02, 0.02, 0.3, 1.0, 2.0]),
        max_prefill_tokens=input_tokens,
        chunked_prefill_size=chunk,
        retracted_requeue=rng.choice(["tail", "front"]),
        batching=batching,
        truncation_align_size=rng.choice([None, 2 * page_size]) if may_align else None,
        reserve=rng.choice(["ratio", "ratio", "ratio", "on_demand", "full"]),
        retraction_policy="priority" if preempts else rng.choice(["length", "newest", "priority"]),
        prefill_max_requests=rng.choice([None, None, 1, 2]),
        decode_steps_per_launch=rng.choice([1, 1, 1, 1, 2, 4]),
        chunk_target_us=rng.choice([None, None, 3]) if chunk else None,
        decode_look_ahead=rng.choice([1, 1, 2, 5]),
        prefill_decode_interval=rng.choice([0, 0, 0, 1, 3]),
        waiting_prefix_refresh=rng.choice([0, 0, 1, 3]) if radix else 0,
        overlap_consecutive_prefills=rng.random() < 0.8,
        retract_every=rng.choice([0, 0, 0, 1, 3]),
        overlap_depth=rng.choice([0, 1, 2]),
        stream_interval=rng.choice([1, 1, 3]),
        force_stream_interval=rng.choice([2, 50]),
        eos_token_ids=rng.choice([(), (STOP_TOKEN,), (STOP_TOKEN, 8)]),
        grammar_timeout_us=rng.choice([None, None, 30]),
        max_input_tokens=rng.choice([None, None, None, 2, 20]),
        truncate_input=rng.choice(["no", "left", "right"]),
        isolate_tenants=rng.choice([False, True]),
        encoder_cache_tokens=rng.choice([None, 3, 5, 8]),
        **_random_order(rng, radix, preempts),
        session_kv=rng.choice(["hold", "hold", "evictable"]),
        max_sessions=rng.choice([2, 1024]),
        max_loras=rng.choice([None, None, None, 1, 2, 3]),
        **_beside(rng, radix),
    )
    return drafting(rng, config, 0.3)


def _random_order(rng: random.Random, radix: bool, preempts: bool = False) -> dict[str, Any]:
    """Settings of the waiting line that go with any policy."""
    return {
        "schedule_seed": rng.choice([0, 1, 2**63 - 1]),
        "schedule_low_priority_values_first": rng.random() < 0.3,
        "default_priority_value": rng.choice([None, None, 0, 1]),
        "prefix_deduplication": rng.choice(["off", "last", "defer", "defer"]) if radix else "off",
        "bypass_limit": rng.choice([None, 1 if preempts else 0, 1, 2, 5, 256]),
    }


def _beside(rng: random.Random, radix: bool) -> dict[str, Any]:
    """Later settings, drawn beside the others: a seed's other settings and its actions stay what they were."""
    own = random.Random()
    own.setstate(rng.getstate())
    return {
        "chunk_unit": own.choice(["page", "page", "token"]),
        "retracted_kv": own.choice(["free", "free", "cache"]) if radix else "free",
        "encoder_budget_tokens": own.choice([msgspec.UNSET, 1, 4]),
    }


def drafting(rng: random.Random, config: SchedConfig, share: float) -> SchedConfig:
    """The settings, for a share of the seeds with drafts, or jumps; nothing else is drawn differently."""
    own = random.Random()
    own.setstate(rng.getstate())
    drawn = own.random()
    if config.decode_steps_per_launch > 1:
        return config
    jumps = random.Random(f"jumps {drawn}")
    if jumps.random() < 0.4:
        config = msgspec.structs.replace(config, jump_forward_tokens=jumps.choice([1, 2, 5, 16]))
    if config.isolate_tenants and config.radix_cache and jumps.random() < 0.5:
        config = msgspec.structs.replace(config, cache_guarantee=jumps.choice([0.2, 0.6, 1.0]))
    chunk = config.chunked_prefill_size
    if chunk is not None and jumps.random() < 0.3:
        config = msgspec.structs.replace(config, chunked_prefill_size_min=jumps.randint(config.page_size, chunk))
    if drawn >= share:
        return config
    config = msgspec.structs.replace(
        config,
        speculative_method="ngram",
        num_speculative_tokens=own.choice([1, 2, 3, 8]),
        speculative_min_chance=own.choice([msgspec.UNSET, msgspec.UNSET, 0.2, 0.6]),
        speculative_max_batch_size=own.choice([msgspec.UNSET, msgspec.UNSET, msgspec.UNSET, 2]),
    )
    trees = random.Random(f"trees {drawn}")
    apart = config.jumps or config.hands_over or config.hybrid is not msgspec.UNSET
    return config if apart or trees.random() < 0.5 else with_trees(config, trees)


def with_trees(config: SchedConfig, rng: random.Random) -> SchedConfig:
    """Return the settings, of an engine that verifies drafts, with trees instead of chains."""
    return msgspec.structs.replace(
        config,
        speculative_method="eagle",
        num_speculative_tokens=(drafts := rng.choice([1, 2, 3, 8, 19])),
        speculative_topk=rng.choice([2, 3, 8]),
        speculative_num_steps=rng.choice([msgspec.UNSET, 1, max(drafts // 2, 1), drafts]),
    )


def with_chains(config: SchedConfig) -> SchedConfig:
    """Return the settings with chains of drafts instead of trees, which do not go with pools of their own."""
    return msgspec.structs.replace(config, speculative_topk=msgspec.UNSET, speculative_num_steps=msgspec.UNSET)


def without_halves(config: SchedConfig) -> SchedConfig:
    """Return the settings without batches in halves, which have no rows of several tokens."""
    unset = msgspec.UNSET
    return msgspec.structs.replace(
        config, two_batch_overlap=unset, two_batch_decode_tokens=unset, two_batch_prefill_tokens=unset
    )


def in_halves(rng: random.Random, config: SchedConfig) -> SchedConfig:
    """The settings, for a share of the seeds and where they go together, with batches that run as two halves."""
    apart = config.speculates or config.jumps or config.pipelines or config.hybrid is not msgspec.UNSET
    if apart or config.decode_steps_per_launch > 1 or rng.random() < 0.8:
        return config
    least = {"two_batch_decode_tokens": rng.choice([2, 3, 6]), "two_batch_prefill_tokens": rng.choice([2, 5, 16])}
    return msgspec.structs.replace(config, two_batch_overlap=True, **least)


def pipelined(rng: random.Random, config: SchedConfig) -> SchedConfig:
    """The settings with microbatches, and without what does not go with them."""
    splits = config.chunked_prefill_size is not None and config.truncation_align_size is None
    return msgspec.structs.replace(
        config,
        overlap_consecutive_prefills=True,
        pp_size=rng.choice([2, 2, 3]),
        pp_async_batch_depth=rng.choice([0, 0, 1]),
        pp_max_micro_batch_size=rng.choice([msgspec.UNSET, 1, 2, 1 if config.enable_priority_preemption else 16]),
        pp_dynamic_chunking=splits and rng.random() < 0.3,
    )


def pressed_config(rng: random.Random) -> SchedConfig:
    """Settings under which running requests outgrow the pool, or just do not: short prompts, long outputs."""
    page_size = rng.choice([1, 2, 4])
    preempts = rng.random() < 0.5
    reserve: Reserve = rng.choice(["ratio", "ratio", "on_demand", "full"])
    config = SchedConfig(
        page_size=page_size,
        pages=rng.randint(40, 80) // page_size,
        max_running_requests=rng.choice([4, 8]),
        schedule_conservativeness=0.02,
        batching=rng.choice(["prefill_first", "mixed", "running_first"]),
        reserve=reserve,
        retract_every=rng.choice([0, 5]) if reserve == "full" else 0,
        retraction_policy="priority" if preempts else rng.choice(["length", "newest", "priority"]),
        retracted_requeue=rng.choice(["tail", "front"]),
        chunked_prefill_size=rng.choice([None, 4, 8]),
        overlap_depth=rng.choice([0, 1, 2]),
        radix_cache=(radix := rng.random() < 0.7),
        schedule_policy="priority" if preempts else rng.choice(["fcfs", "lof", "priority", "spf"]),
        **_random_order(rng, radix, preempts),
        enable_priority_preemption=preempts,
        **_beside(rng, radix),
    )
    return drafting(rng, config, 0.4)


def pressed_actions(rng: random.Random, count: int) -> list[Action]:
    """Draw requests that arrive slowly, one or three at a time, each of which needs much of the pool."""
    names = rng.choices(["arrive", "ready", "finish", "cancel", "snapshot"], [0.6, 6, 5, 0.1, 0.1], k=count)
    actions: list[Action] = []
    for name in names:
        if name == "arrive":
            for _ in range(rng.choice([1, 1, 3])):
                options = {"priority": rng.choice(PRIORITIES)}
                actions.append(("arrive", 1 + rng.randrange(3), rng.randint(1, 12), rng.randint(10, 39), options))
        else:
            actions.append(_random_action(rng, name, 3, 3, 1))
    return actions


def commanded_config(rng: random.Random) -> SchedConfig:
    """Room for all prompts and few places: requests are split, preempted for a place, paused and cancelled."""
    page_size = rng.choice([1, 2, 4])
    return SchedConfig(
        page_size=page_size,
        pages=rng.randint(200, 400) // page_size,
        max_running_requests=rng.choice([1, 2, 3]),
        schedule_policy="priority",
        retraction_policy="priority",
        enable_priority_preemption=True,
        default_priority_value=0,
        chunked_prefill_size=rng.choice([None, 4, 8]),
        batching=rng.choice(["prefill_first", "mixed", "running_first"]),
        overlap_depth=rng.choice([0, 1, 2]),
        radix_cache=rng.random() < 0.7,
        eos_token_ids=(STOP_TOKEN,),
    )


def commanded_actions(rng: random.Random, count: int) -> list[Action]:
    """Draw requests of all priorities, and commands that reach them in every state."""
    names = ["arrive", "ready", "finish", "cancel", "cancel_many", "pause", "wait"]
    actions: list[Action] = []
    for name in rng.choices(names, [1.2, 6, 5, 0.4, 0.1, 0.3, 0.5], k=count):
        if name == "arrive":
            tokens, most = rng.randint(1, 24), rng.randint(4, 24)
            options: dict[str, Any] = {"priority": rng.choice(PRIORITIES)}
            if rng.random() < 0.5:
                options |= {"stops_at": rng.randrange(most), "min_new_tokens": rng.randint(0, most)}
            actions.append((name, 1 + 1000 * rng.randrange(3), tokens, most, options))
        elif name == "pause":
            pause = CONTROLS.index(Pause(rng.choice(("in_place", "retract", "retract", "cancel"))))
            actions += [("control", pause), ("ready",), ("control", CONTROLS.index(Resume()))]
        else:
            actions.append(_random_action(rng, name, 24, 24, 3))
    return actions


def crowded_config(rng: random.Random) -> SchedConfig:
    """A pool with room for a few long prompts, so that many wait for their turn."""
    page_size = rng.choice([1, 4, 16])
    return SchedConfig(
        page_size=page_size,
        pages=rng.randint(200, 400) // page_size,
        max_running_requests=rng.choice([2, 4, 8]),
        schedule_policy=rng.choice(SCHEDULE_POLICIES),
        chunked_prefill_size=rng.choice([None, 16, 48]),
        max_prefill_tokens=rng.choice([64, 4096]),
        overlap_depth=rng.choice([0, 1, 2]),
        same_step_sharing=rng.random() < 0.5,
        **_random_order(rng, radix=True),
    )


def crowded_actions(rng: random.Random, count: int) -> list[Action]:
    """Many requests with long prompts that begin alike, and short outputs."""
    names = ["arrive", "ready", "finish", "wait", "cancel", "snapshot", "trouble"]
    weights = [3, 5, 4, 1, 0.2, 0.2, rng.choice([0, 0.8])]
    return [_random_action(rng, name, 90, 4, 2) for name in rng.choices(names, weights, k=count)]


def random_actions(rng: random.Random, count: int, *, adapters: bool = False) -> list[Action]:
    """A history with random features left out altogether: features suppress one another (Groce et al., ISSTA 2012).

    With `adapters`, some requests come for one.
    """
    weights = {
        "arrive": rng.choice([0.3, 0.7, 2, 6]),
        "ready": rng.choice([4, 8]),
        "finish": rng.choice([2, 5, 8]),
        "wait": rng.choice([0, 1, 3]),
        "clock": rng.choice([0, 0, 1]),
        "cancel": rng.choice([0, 0, 1, 3]),
        "cancel_again": rng.choice([0, 0, 0.3]),
        "trouble": rng.choice([0, 0, 0.5, 2]),
        "control": rng.choice([0, 0, 0.5, 1]),
        "cancel_many": rng.choice([0, 0, 0.2]),
        "session_open": rng.choice([0, 0.3, 0.6]),
        "session_close": rng.choice([0, 0, 0.1]),
        "order_done": rng.choice([0.3, 1, 3]),
        "order_late": 0.05,
        "restart": rng.choice([0, 0, 0, 0.2]),
        "late": 0.1,
        "late_load": 0.1,
        "load_adapter": rng.choice([0, 0.2, 1]) if adapters else 0.01,
        "unload_adapter": rng.choice([0, 0, 0.3]) if adapters else 0.01,
        "adapter_loaded": rng.choice([0.5, 3, 6]) if adapters else 0,
        "encode": rng.choice([0.3, 2]),
        "snapshot": rng.choice([0, 0, 0.3]),
        "compiled": rng.choice([0, 0.5, 3]),
        "compiled_again": rng.choice([0, 0, 0.3]),
    }
    longest = rng.choice([3, 3, 20, 70])
    most_outputs = rng.choice([3, 40, 120])
    bases = rng.choice([1, 2, 50])
    sessions = rng.choice([0.1, 0.6]) if weights["session_open"] else 0.0  # share of the arrivals that are turns
    constrained = rng.choice([0.0, 0.0, 0.3, 0.9])
    kinds = rng.choice([0.0, 0.0, 0.2, 0.6])
    names = rng.choices(list(weights), list(weights.values()), k=count)
    share = rng.choice([0.3, 0.9]) if adapters else 0.01
    shares = {"sessions": sessions, "constrained": constrained, "kinds": kinds, "adapters": share}
    first = [("load_adapter", index, 0, False) for index in range(len(ADAPTERS))] if adapters else []
    return [*first, *(_random_action(rng, name, longest, most_outputs, bases, **shares) for name in names)]


def _random_action(
    rng: random.Random,
    name: str,
    longest: int,
    most_outputs: int,
    bases: int,
    *,
    sessions: float = 0.0,
    constrained: float = 0.0,
    kinds: float = 0.0,
    adapters: float = 0.0,
) -> Action:
    match name:
        case "arrive":
            options: dict[str, Any] = {"stream": rng.random() < 0.8, "ignore_eos": rng.random() < 0.2}
            if rng.random() < 0.3:
                options["stops_at"] = rng.randint(0, 10)
                options["stop_token_ids"] = rng.choice([(), (STOP_TOKEN,), (STOP_TOKEN, 8, 9)])
                if options["ignore_eos"]:
                    options["stop_token_ids"] = ()
            if rng.random() < 0.1:
                options["deadline_in_us"] = rng.randint(0, 30)
            if rng.random() < 0.1:
                options["finish_in_us"] = rng.randint(0, 60)
            if rng.random() < 0.1:
                options["namespace"] = rng.choice(["tenant-a", "tenant-b"])
            if rng.random() < 0.4:
                options["priority"] = rng.choice(PRIORITIES)
                options["routing_key"] = rng.choice(["", "a", "b"])
                options["tenant"] = options["routing_key"]
            if rng.random() < sessions:
                options["session"] = rng.choice(SESSIONS)
                if rng.random() < 0.3:
                    options["session_start"] = rng.randrange(100)
            if rng.random() < adapters:
                options["adapter"] = rng.choice(ADAPTERS)
            tokens = rng.randint(0 if rng.random() < 0.02 else 1, longest)
            max_new = rng.choice([1, rng.randint(1, most_outputs), rng.randint(1, most_outputs)])
            if rng.random() < 0.2:
                options["min_new_tokens"] = rng.choice([1, rng.randint(1, max_new)])
            if rng.random() < 0.2:
                options["stop_texts"] = ("END",)
            if rng.random() < constrained:
                options["grammar"] = f"g{rng.randrange(GRAMMARS)}"
                options["grammar_ends"] = rng.choice([None, rng.randint(1, 10)])
            if rng.random() < kinds:
                max_new = _ask_more(rng, options, tokens, max_new)
            return ("arrive", 1 + 1000 * rng.randrange(bases), tokens, max_new, options)
        case "encode":
            return (name, rng.random() < 0.1)
        case "cancel" | "cancel_again" | "cancel_many" | "session_close":
            return (name, rng.randrange(100))
        case "session_open":
            capacity, timeout = rng.choice([1, 20, 60, 1000]), rng.choice([None, None, 30])
            return (name, rng.randrange(100), capacity, timeout, rng.random() < 0.3)
        case "order_done":
            return (name, "no room" if rng.random() < 0.1 else "")
        case "compiled" | "compiled_again":
            return (name, rng.randrange(100), "unbalanced" if rng.random() < 0.3 else "")
        case "trouble":
            return ("finish", rng.choice(["error", "invalid", "text_stop"]), rng.randrange(100))
        case "load_adapter":
            return (name, rng.randrange(len(ADAPTERS)), rng.choice([-1, 0, 0, 1, 1]), rng.random() < 0.3)
        case "unload_adapter":
            return (name, rng.randrange(len(ADAPTERS)))
        case "adapter_loaded":
            return (name, rng.randrange(100), rng.choice(["", "", "", "", "no room"]))
        case "wait" | "clock":
            return (name, rng.randint(0, 25))
        case "control":
            return (name, rng.choice([*range(len(CONTROLS)), *LETTING_GO * 2]))
        case _:
            return (name,)


def _ask_more(rng: random.Random, options: dict[str, Any], tokens: int, max_new: int) -> int:
    """Make a request one of the less usual kinds. Returns the number of tokens that it requires."""
    if rng.random() < 0.4:
        options["kind"] = rng.choice(["embed", "score", "generate"])
        max_new = 0
        options.pop("min_new_tokens", None)
    elif rng.random() < 0.5:
        options["parallel_samples"] = rng.choice([2, 3, 4, 4, 129])
    if rng.random() < 0.3:
        options["logprob_start"] = rng.randint(0, tokens)
    if rng.random() < 0.2:
        options["return_hidden_states"] = True
    if rng.random() < 0.2:
        options["token_type_ids"] = bytes(rng.choice([0, 1]) for _ in range(tokens))
    if rng.random() < 0.4 and tokens:
        at, spans = 0, []
        for _ in range(rng.randint(1, 2)):
            start = rng.randint(at, max(at, tokens - 1))
            stop = min(tokens, start + rng.randint(1, 5))
            at = stop
            kind, encoder_tokens = rng.choice([("image", 3), ("image", 5), ("audio", 0), ("embedding", 0)])
            digest = bytes([rng.randrange(3)]) * 32
            if start < stop:
                spans.append(PromptSpan(start, stop, kind, digest, encoder_tokens))
        options["spans"] = tuple(spans)
    if rng.random() < 0.2:
        options["tenant"] = rng.choice(["x", "y"])
    return max_new


def under_grammars(actions: list[Action]) -> list[Action]:
    """Return the actions with a grammar for half of the arrivals, compiled right after the arrival."""
    found: list[Action] = []
    for number, action in enumerate(actions):
        if action[0] == "arrive" and number % 2 and not action[-1].get("kind"):
            options = {**action[-1], "grammar": "g", "grammar_ends": None if number % 3 else 1 + number % 13}
            found.append((*action[:-1], options))
            found.append(("compiled", 1))
        else:
            found.append(action)
    return found


def multiplexed(rng: random.Random, config: SchedConfig) -> SchedConfig:
    """The settings with prompts by layers beside decodes, and without what does not go with them."""
    unset = msgspec.UNSET
    layers, sms = rng.choice([1, 2, 3, 8]), rng.choice([2, 10, 132])
    rows = sorted(rng.sample(range(6), rng.choice([0, 1, 1, 2, 3])))
    divisions = [Division(decodes := rng.randint(1, sms - 1), sms - decodes, row) for row in rows]
    return msgspec.structs.replace(
        with_chains(without_halves(config)),
        speculative_method=unset,
        num_speculative_tokens=unset,
        speculative_min_chance=unset,
        speculative_max_batch_size=unset,
        jump_forward_tokens=unset,
        batching="prefill_first",
        same_step_sharing=False,
        enable_priority_preemption=False,
        chunk_target_us=None,
        prefill_decode_interval=0,
        overlap_consecutive_prefills=True,
        multiplexing=Multiplexing(
            layers=layers, sms=sms, divisions=tuple(divisions), token_budget=rng.choice([1, 8, 40, 400])
        ),
    )
