"""Recordings of random histories: what each engine observed, and the digests that it came to.

A recording does not depend on how histories are drawn: it holds the first configuration of an engine and every event
that the engine observed. An engine that folds the events must come to the same decisions and the same state.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from pathlib import Path

import msgspec

from lockstep.core import Engine, SchedConfig
from lockstep.core.contract.events import Observed, ObservedEvent
from lockstep.core.journal.snapshot import dump, restore
from tests.support import rank_group
from tests.support.driver.run import run_actions
from tests.support.fleet import histories
from tests.swarm import history as swarm_history

CHECKPOINT_STEPS = 50
SEVERAL_AT, CYCLE = 5, 10  # one of every CYCLE seeds has several engines: ranks, or prefill and decode, in turn
FEATURES = {
    "tiers": "tiers",
    "hybrid": "hybrid",
    "drafts": "speculative_method",
}
"""By word in the name of a kind: the setting that is UNSET without it."""

Events = list[tuple[Observed, bytes]]
"""Every observed event of an engine with the digest of its Step."""


class Checkpoint(msgspec.Struct, frozen=True, array_like=True):
    """An engine after every 50th Step and after the last one."""

    step: int  # counted from 1
    digest: bytes  # of the Step, which covers all Steps before it
    snapshot: bytes  # BLAKE2b-128 of the snapshot's bytes


class Recording(msgspec.Struct, frozen=True, array_like=True):
    """What one engine observed in one history, and what it has to come to."""

    seed: int
    kind: str
    engine: str  # its name among the engines of the history
    config: msgspec.Raw
    events: msgspec.Raw
    steps: int
    checkpoints: list[Checkpoint]


def kind_of(seed: int, config: SchedConfig) -> str:
    """Which kind of history a seed has, with the features that it adds to a plain one."""
    if seed % CYCLE == SEVERAL_AT:
        return "ranks" if config.shares_passes else "fleet"
    features = [word for word, name in FEATURES.items() if getattr(config, name) is not msgspec.UNSET]
    features += ["microbatches"] * config.pipelines
    return "+".join(features) or "plain"


def engines_of(seed: int) -> list[tuple[str, SchedConfig, Engine, Events]]:
    """Run the history of a seed. Returns each engine: name, first configuration, state at the end, observed events.

    Raises AssertionError where an invariant or a check of the test support fails.
    """
    number = seed // CYCLE
    if seed % CYCLE == SEVERAL_AT and number % 2 == 0:
        group = rank_group.run_history(number)
        return [(f"rank {one.rank}", one.config, one.engine, one.events) for one in group.members]
    if seed % CYCLE == SEVERAL_AT:
        ranks, hybrid = number % 3 == 2, number % 3 != 2 and number % 4 == 1  # as tests/fleet_swarm.py draws them
        engines = histories.run_history(number, ranks=ranks, hybrid=hybrid)
        return [(one.name, one.config, one.engine, one.events) for one in engines.members.values()]
    config, actions = swarm_history(seed)
    driver = run_actions(config, actions)
    return [("engine", config, driver.engine, driver.events)]


def digest_of(data: bytes) -> bytes:
    return blake2b(data, digest_size=16).digest()


def recordings(seeds: range) -> Iterator[Recording]:
    """Run the histories of these seeds and keep what each engine observed.

    Raises ValueError if a fresh engine that folds the stored events decides otherwise: the store loses something.
    """
    encode = msgspec.msgpack.Encoder(order="deterministic").encode
    for seed in seeds:
        for name, config, _, events in engines_of(seed):
            config_bytes, event_bytes = encode(config), encode([event for event, _ in events])
            checkpoints = folded(config_bytes, event_bytes)
            if any(events[one.step - 1][1] != one.digest for one in checkpoints):
                raise ValueError(f"seed {seed}, {name}: its stored events do not replay")
            kind = kind_of(seed, config)
            raw_config, raw_events = msgspec.Raw(config_bytes), msgspec.Raw(event_bytes)
            yield Recording(seed, kind, name, raw_config, raw_events, len(events), checkpoints)


def folded(config: bytes | msgspec.Raw, events: bytes | msgspec.Raw) -> list[Checkpoint]:
    """Fold stored events through a fresh engine, which halfway is replaced by one restored from its snapshot."""
    engine = Engine(msgspec.msgpack.decode(config, type=SchedConfig))
    observed = msgspec.msgpack.decode(events, type=list[ObservedEvent])
    checkpoints: list[Checkpoint] = []
    for number, event in enumerate(observed, 1):
        digest = engine.step(event).digest
        if number % CHECKPOINT_STEPS == 0 or number == len(observed):
            checkpoints.append(Checkpoint(number, digest, digest_of(dump(engine))))
        if number == len(observed) // 2:
            engine = restore(dump(engine))
    return checkpoints


def difference(recording: Recording, *, snapshots: bool = True) -> str:
    """Return where a replay first differs from its recording; empty if it does not.

    `snapshots`: their bytes are compared too.
    """
    try:
        replayed = folded(recording.config, recording.events)
    except Exception as error:  # an engine that cannot fold the events differs too
        return f"{type(error).__name__}: {error}"
    first = 1
    for found, expected in zip(replayed, recording.checkpoints, strict=True):
        if found.digest != expected.digest:
            return f"another decision within steps {first} to {found.step}"
        if snapshots and found.snapshot != expected.snapshot:
            return f"equal decisions up to step {found.step}, but another snapshot"
        first = found.step + 1
    return ""


def write(path: Path, kept: Iterable[Recording]) -> None:
    """Write recordings to a file."""
    path.write_bytes(zlib.compress(msgspec.msgpack.encode(list(kept)), 9))


def read(path: Path) -> list[Recording]:
    """Return the recordings of a file that `write` wrote."""
    return msgspec.msgpack.decode(zlib.decompress(path.read_bytes()), type=list[Recording])
