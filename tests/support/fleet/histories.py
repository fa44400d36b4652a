"""Random histories of prefill and decode engines: settings, arrivals, faults, and rest.

Everything is drawn from the generators that are passed; what is drawn by a generator of its own leaves the rest of a
seed's history as it is without it.
"""

from __future__ import annotations

import dataclasses
import random
from hashlib import sha256
from typing import Any, get_args

import msgspec

from lockstep.core.contract.config import CacheTiers, Role, SchedConfig, WritePolicy
from lockstep.core.contract.events import (
    ChangeRole,
    CloseSession,
    Grammar,
    LoadAdapterControl,
    OpenSession,
    Pause,
    PromptSpan,
    Resume,
    SamplingParams,
    UnloadAdapterControl,
    UpdateWeights,
)
from tests.support.driver.draw import drafting, pipelined
from tests.support.fleet.fleet import Fleet
from tests.support.hybrids import pools, splitting
from tests.support.served import Asked
from tests.support.tagged_kv import COMPLETED

TROUBLES = ("cancel", "repeat", "link_down", "restart", "error", "lose", "clock", "pause", "resume", "weights", "late")
"""What a history may have beside requests; each seed leaves some out, since they hide one another."""

KIND_TROUBLES = ("adapter", "unload", "session", "close", "role", "role")
"""Further features of histories whose requests are of every kind."""

ADAPTERS = ("law", "med")
SESSIONS = ("s", "t")
ENDS = (
    "cancelled",
    "transfer",
    "error",
    "draining",
    "too_long",
    "bad_request",
    "session_closed",
    "media",
    "grammar timeout",
)
"""Finish reasons of a request that did not get its whole answer."""

EXPECTED_MARKS = (
    *(f"cancelled at p while {state}" for state in ("bootstrap", "accepted", "waiting", "sending", "in_flight")),
    *(f"cancelled at d while {state}" for state in ("awaited", "preallocating", "receiving", "ready", "running")),
    *(f"d ended ({reason})" for reason in ("length", "stop", "cancelled", "transfer", "error")),
    *(f"d retracted ({reason})" for reason in ("pages", "forced", "pause", "restart", "weights")),
    "d over (abandoned)",
    "d quarantined (abandoned)",
    "d over (done)",
    "lost (accepted)",
    "lost (offered)",
    "p quarantined (abandoned)",
    *(f"{kind} in a pass of all" for kind in ("d ran decode", "d ran idle", "d ran prebuilt", "p ran extend")),
    "results passed on",
    "p sending (part_given)",
    "read in quarantine",
    "repeated while it lives",
    "written in quarantine",
    "adapters differ",
    "adapter not loaded at d",
    "became decode",
    "became prefill",
    "came too late for the role",
    "d ended (grammar)",
    "encoded at d",
    "encoded at p",
    "p ended (computed)",
    "samples that were sent less",
    "turn with kept tokens",
    "positions of windows moved",
    "states moved",
)
"""Marks that a campaign must reach, or its histories are too tame."""

TIMEOUTS_US = (None, 1_000, 100_000)
PREEMPTING = {
    "retraction_policy": "priority",
    "enable_priority_preemption": True,
    "priority_preemption_threshold": 1,
}


def random_fleet(
    rng: random.Random,
    kinds: random.Random | None = None,
    *,
    ranks: bool = False,
    beside: random.Random | None = None,
) -> Fleet:
    """Two prefill and two decode engines, so small that every resource is short now and then.

    `kinds`: draws settings for requests of every kind, and changes nothing else. `ranks`: they are data-parallel ranks
    of one prefill and of one decode engine. `beside`: draws pools beside full attention, of one model for all.
    """
    more: dict[str, Any] = {}
    if kinds is not None:
        more = {
            "max_loras": kinds.choice([None, 1, 2]),
            "encoder_cache_tokens": kinds.choice([None, 8, 30]),
            "session_kv": kinds.choice(["hold", "evictable"]),
            "grammar_timeout_us": kinds.choice([None, 1_000]),
        }
    layers = beside.choice(["window", "state", "both"]) if beside is not None else ""
    window_tokens = beside.choice([1, 2, 4, 5, 8]) if beside is not None and layers != "state" else 0
    page_size = rng.choice([1, 2, 4])
    pages = rng.choice([24, 32, 64]) // page_size + 2
    common: dict[str, Any] = {
        "radix_cache": rng.random() < 0.7,
        "num_reserved_decode_tokens": rng.choice([0, 1, 4, 512]),
        "transfer_allocation": rng.choice(["early", "early", "prefill_complete"]),
        "transfer_failure": rng.choice(["fail", "recompute"]),
        "transfer_slots": rng.choice([None, 1, 2]),
        "bootstrap_timeout_us": rng.choice(TIMEOUTS_US),
        "transfer_timeout_us": rng.choice(TIMEOUTS_US),
        "schedule_policy": rng.choice(["fcfs", "fcfs", "priority"]),
    }

    if kinds is not None and common["radix_cache"]:
        more["retracted_kv"] = kinds.choice(["free", "cache"])

    def config(role: Role) -> SchedConfig:
        made = SchedConfig(
            role=role,
            page_size=page_size,
            pages=rng.choice([pages, pages, 2 * pages]),
            max_running_requests=rng.choice([1, 2, 4]),
            chunked_prefill_size=rng.choice([page_size, 3 * page_size, None]),
            overlap_depth=rng.choice([0, 1, 2]),
            batching=rng.choice(["prefill_first", "mixed", "running_first"]),
            reserve=rng.choice(["ratio", "on_demand", "full"]),
            schedule_conservativeness=rng.choice([0.02, 1.0]),
            retract_every=rng.choice([0, 0, 3]),
            **common,
            **more,
        )
        own = random.Random()
        own.setstate(rng.getstate())
        stages = random.Random(f"stages {own.random()}")  # a generator of its own: all other draws stay the same
        made = drafting(rng, made, 0.3)
        if stages.random() < 0.25:
            made = pipelined(stages, made)
        if beside is not None:
            made = splitting(made)
            sharing = {"same_step_sharing": made.radix_cache and beside.random() < 0.4}
            preempting = made.schedule_policy == "priority" and beside.random() < 0.5
            made = msgspec.structs.replace(
                made,
                hybrid=pools(beside, made, window_tokens, states=layers != "window"),
                **(sharing | (PREEMPTING if preempting else {})),
            )
        if common["radix_cache"] and rng.random() < 0.3:
            host_pages, policy = rng.choice([2, 16]), rng.choice(get_args(WritePolicy))
            tiers = CacheTiers(
                host_pages=host_pages,
                write_policy=policy,
                storage=rng.random() < 0.5,
                load_tokens_min=rng.choice([1, 4]),
                prefetch_tokens_min=1,
            )
            made = msgspec.structs.replace(made, tiers=tiers)
        return made

    def engines(role: Role) -> list[SchedConfig]:
        if not ranks:
            return [config(role) for _ in range(2)]
        one = config(role)  # all ranks must decide alike about an agreement
        overlaps = rng.random() < 0.7
        return [msgspec.structs.replace(one, overlap_consecutive_prefills=overlaps or one.pipelines)] * 2

    return Fleet(engines("prefill"), engines("decode"), ranks=ranks)


def random_asked(rng: random.Random, key: int) -> Asked:
    """A request that fits every engine of `random_fleet`."""
    base = 100 * rng.randint(1, 2)
    most = rng.choice([2, 6, 10])
    prompt = tuple(range(base, base + rng.randint(1, 12)))
    max_new = rng.randint(1, most)
    stops = tuple(rng.sample(range(most), rng.choice([0, 0, 0, 1, 2])))
    return Asked(key, prompt, max_new, rng.choice([0, 0, rng.randint(0, max_new)]), stops, rng.random() < 0.8)


def random_kind(rng: random.Random, prompt_tokens: int) -> dict[str, Any]:
    """Draw what a request requires besides tokens: usually nothing."""
    kind: dict[str, Any] = {}
    if rng.random() < 0.2:
        kind["logprob_start"] = rng.randint(0, prompt_tokens)
    if rng.random() < 0.15:
        kind["return_hidden_states"] = True
    if rng.random() < 0.2:
        kind["sampling"] = SamplingParams(top_logprobs=1)
    return kind


def random_arrival(fleet: Fleet, rng: random.Random, asked: Asked, names: tuple[str, str], **more: Any) -> None:
    """A request of any kind arrives: of several samples, a turn, on an adapter, with media, under a grammar, alone."""
    drawn, length = rng.random(), len(asked.prompt)
    if rng.random() < 0.3 and fleet.members[names[0]].config.max_loras:
        more["adapter"] = rng.choice([*ADAPTERS, ""])
    if rng.random() < 0.25:
        more["spans"] = random_spans(rng, length)
    if rng.random() < 0.2:
        name = f"g{rng.randrange(4)}"
        more |= {"grammar": Grammar("regex", name, name.encode()), "grammar_ends": rng.choice([1, 2, 5, 20])}
    if drawn < 0.1:
        more.pop("grammar", None), more.pop("grammar_ends", None), more.pop("late", None)
        alone = dataclasses.replace(asked, min_new=0)
        fleet.arrive_alone(alone, names[0], **(more | {"kind": rng.choice(["generate", "embed", "score"])}))
        return
    if drawn < 0.25:
        samples = [
            dataclasses.replace(asked, key=len(fleet.wires) + number, stops=asked.stops if rng.random() < 0.5 else ())
            for number in range(1, rng.choice([2, 3]))
        ]
        fleet.arrive(asked, *names, samples=samples, **more)
        return
    open_there = list(fleet.members[names[1]].engine.sessions.open)
    if drawn < 0.65 and open_there:
        more["session"] = rng.choice(open_there)
        session = fleet.members[names[1]].engine.sessions.open[more["session"]]
        if rng.random() < 0.3:
            more["session_start"] = rng.randint(0, session.length)
        more["late"] = names[1] if more.pop("late", "") == names[1] else ""
    fleet.arrive(asked, *names, **more)


def random_spans(rng: random.Random, length: int) -> tuple[PromptSpan, ...]:
    """One or two of them, of a few contents; a small encoder cache cannot hold them all."""
    cuts = sorted(rng.sample(range(length + 1), min(2 * rng.choice([1, 2]), (length + 1) // 2 * 2)))
    spans = []
    for start, stop in zip(cuts[::2], cuts[1::2], strict=True):
        content = rng.randrange(3)
        spans.append(PromptSpan(start, stop, "image", sha256(bytes([content])).digest(), content * 3))
    return tuple(spans)


def run_history(
    seed: int, steps: int = 400, *, ranks: bool = False, plain: bool = False, hybrid: bool = False
) -> Fleet:
    """One random history: first anything may happen, then faults stop and all must come to rest (L1, L9).

    `plain`: without requests of every kind, and roles that change; nothing else is drawn differently.
    `ranks`: of one prefill and one decode engine. `hybrid`: with pools beside full attention.
    """
    rng = random.Random(seed)
    kinds = random.Random(f"{seed} kinds")  # a generator of its own: everything else happens as without it
    others = None if plain or seed % 4 == 0 else random.Random(f"{seed} others")
    fleet = random_fleet(rng, others, ranks=ranks, beside=random.Random(f"{seed} beside") if hybrid else None)
    troubles = [trouble for trouble in TROUBLES if rng.random() < 0.5]
    arrivals = rng.choice([0.05, 0.2])
    kind_troubles: list[str] = []
    if others is not None:
        kind_troubles = [trouble for trouble in KIND_TROUBLES if others.random() < 0.5]
        for name in ADAPTERS if fleet.members["p0"].config.max_loras else ():
            for member in fleet.members:
                fleet.control(member, LoadAdapterControl(name, 1))
    for _ in range(steps):
        if rng.random() < arrivals and fleet.prefills and fleet.decodes:
            names = rng.choice(fleet.prefills), rng.choice(fleet.decodes)
            late = rng.choice(names) if "late" in troubles and rng.random() < 0.3 else ""
            priority = rng.choice([None, 0, 5, 9])
            asked = random_asked(rng, len(fleet.wires))
            more: dict[str, Any] = {"late": late, "priority": priority, **random_kind(kinds, len(asked.prompt))}
            if others is None:
                fleet.arrive(asked, *names, **more)
            else:
                random_arrival(fleet, others, asked, names, **more)
        elif troubles and rng.random() < 0.15:
            make_trouble(fleet, rng, rng.choice(troubles))
        elif kind_troubles and others is not None and others.random() < 0.05:
            make_trouble(fleet, others, others.choice(kind_troubles))
        else:
            fleet.do_something(rng)
    come_to_rest(fleet, rng)
    return fleet


def make_trouble(fleet: Fleet, rng: random.Random, trouble: str) -> None:
    """Cause one failure or submit one control, if that is possible."""
    name = rng.choice(list(fleet.members))
    match trouble:
        case "cancel" if fleet.wires:
            wire = rng.choice(fleet.wires[-6:])
            fleet.cancel(wire, rng.choice([wire.prefill.name, wire.decode.name]))
        case "repeat":
            fleet.repeat(rng.randrange(1000))
        case "link_down" if rng.random() < 0.3:
            names = list(fleet.members)
            fleet.link_down(rng.choice(fleet.prefills or names), rng.choice(fleet.decodes or names))
        case "restart" if rng.random() < 0.2:
            fleet.restart(name)
        case "error":
            fleet.finish(name, error="the device says no")
        case "lose" if fleet.told:
            told = rng.choice(fleet.told)
            if told.status in ("accepted", "offered"):  # the final fact is repeated until it is received
                fleet.told.remove(told)
                fleet.marks[f"lost ({told.status})"] += 1
        case "clock":
            fleet.clock(rng.choice([1, 500, 2_000]))
        case "pause":
            fleet.control(name, Pause(rng.choice(["in_place", "retract"])))
        case "resume":
            fleet.control(name, Resume())
        case "weights":
            version = 1 + fleet.members[name].engine.maintenance.newest_version()
            fleet.control(name, UpdateWeights(version, "w", rng.choice(["wait", "retract", "in_place"])))
        case "late":
            if waiting := fleet.late_halves():
                fleet.arrive_at(*rng.choice(waiting))
        case "adapter":
            adapter = rng.choice(ADAPTERS)
            newest = max(member.kv.versions.get(adapter, 0) for member in fleet.members.values())
            for member in list(fleet.members) if rng.random() < 0.3 else [name]:
                fleet.control(member, LoadAdapterControl(adapter, newest + 1))
        case "unload" if rng.random() < 0.2:
            fleet.control(name, UnloadAdapterControl(rng.choice(ADAPTERS)))
        case "session" if fleet.decodes:
            parent = rng.choice(["", *SESSIONS])
            timeout = rng.choice([None, None, 5_000])
            fleet.control(rng.choice(fleet.decodes), OpenSession(rng.choice(SESSIONS), 100, timeout, parent))
        case "close" if rng.random() < 0.3:
            fleet.control(name, CloseSession(rng.choice(SESSIONS)))
        case "role" if rng.random() < 0.5:
            role: Role = rng.choice(["prefill", "decode"])
            fleet.control(name, ChangeRole(role, rng.choice([0, 1_000, 10_000_000])))


def come_to_rest(fleet: Fleet, rng: random.Random) -> None:
    """No more trouble: pauses end, every half has arrived, links that lost a message go down; then all must end."""
    for name in fleet.members:
        fleet.control(name, Resume())
    while waiting := fleet.late_halves():
        fleet.arrive_at(*waiting[0])
    for mark in ("lost (accepted)", "lost (offered)"):
        if fleet.marks[mark]:
            for prefill in fleet.members:
                for decode in fleet.members:
                    fleet.link_down(prefill, decode)
    fleet.settle(rng)
    while fleet.told or fleet.stops:  # outcomes that no request waits for any more
        for wire in list(fleet.stops):
            fleet.stop(wire)
        for told in list(fleet.told):
            fleet.tell(told)
    fleet.check_agreed()
    for wire in fleet.wires:
        got, wanted = fleet.answers[wire.asked.key], wire.wanted
        if got.reason in COMPLETED:
            assert got == wanted, f"room {wire.room} got {got}, wanted {wanted}"
        else:
            assert got.tokens == wanted.tokens[: len(got.tokens)], f"room {wire.room} got {got}, wanted {wanted}"
            assert got.reason in ENDS, got
            assert got.reason != "cancelled" or wire.cancelled
