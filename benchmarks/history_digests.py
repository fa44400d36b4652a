"""Digests of random histories, to hold two versions of the core against each other.

    python benchmarks/history_digests.py --histories 400 --out FILE       draw and run histories, write their digests
    python benchmarks/history_digests.py --histories 400 --compare FILE   the same; status 1 names the first change
    python benchmarks/history_digests.py --histories 400 --record FILE    draw histories, store events and digests
    python benchmarks/history_digests.py --replay FILE                    fold stored events, compare with their digests

`--out` and `--compare` draw histories with the test support of this checkout, as `tests/swarm.py` and
`tests/fleet_swarm.py` do, so two checkouts agree only if they draw alike. `--record` and `--replay` do not depend on
that: a recording holds the configuration and the observed events of every engine. Replay compares the digest of the
Step and the bytes of the snapshot, which holds all of the engine's state, after every 50th Step and after the last one.
Halfway it goes on with an engine that is restored from its snapshot.

Of every 20 histories, 18 are of one engine (cache tiers, pools beside full attention, pipeline microbatches, drafts,
grammars, sessions, adapters), one is of four data-parallel ranks, one of prefill and decode engines. The seed alone
determines a history; `--seeds-from` draws others. Test support is imported in one place, below.
"""

from __future__ import annotations

import argparse
import json
import sys
import zlib
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

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


class Entry(msgspec.Struct, frozen=True):
    """What one history came to. Digests of several engines are joined by spaces."""

    seed: int
    kind: str
    steps: int
    digest: str  # hex
    snapshot: str  # hex


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


def entries(seeds: range) -> Iterator[Entry]:
    """Run the histories of these seeds and digest their ends."""
    for seed in seeds:
        engines = engines_of(seed)
        yield Entry(
            seed,
            kind_of(seed, engines[0][1]),
            sum(len(events) for _, _, _, events in engines),
            " ".join(engine.digest.hex() for _, _, engine, _ in engines),
            " ".join(digest_of(dump(engine)).hex() for _, _, engine, _ in engines),
        )


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


def difference(recording: Recording) -> str:
    """Where a replay first differs from its recording; empty if it does not."""
    first = 1
    for found, expected in zip(folded(recording.config, recording.events), recording.checkpoints, strict=True):
        if found.digest != expected.digest:
            return f"another decision within steps {first} to {found.step}"
        if found.snapshot != expected.snapshot:
            return f"equal decisions up to step {found.step}, but another snapshot"
        first = found.step + 1
    return ""


def compare(found: list[Entry], expected: list[Entry]) -> str:
    """The first history with digests that differ, with both; empty if none does."""
    if len(found) != len(expected):
        return f"{len(found)} histories against {len(expected)}"
    for one, other in zip(found, expected, strict=True):
        if one != other:
            return f"seed {one.seed} ({one.kind}) differs:\n  here {one}\n  file {other}"
    return ""


def replay(path: Path) -> int:
    """Replay every recording of a file, and print the first difference of each history that differs."""
    stored = msgspec.msgpack.decode(zlib.decompress(path.read_bytes()), type=list[Recording])
    failed: set[int] = set()
    for recording in stored:
        try:
            found = difference(recording)
        except Exception as error:  # an engine that cannot fold the events differs too
            found = f"{type(error).__name__}: {error}"
        if found:
            failed.add(recording.seed)
            print(f"seed {recording.seed} ({recording.kind}), {recording.engine}: {found}")
    histories, steps = len({one.seed for one in stored}), sum(one.steps for one in stored)
    print(f"{histories} histories, {len(stored)} engines, {steps:,} steps: {len(failed) or 'none'} differ")
    return int(bool(failed))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--histories", type=int, default=400, help="how many (default 400)")
    parser.add_argument("--seeds-from", type=int, default=0, metavar="SEED", help="the first seed (default 0)")
    modes = parser.add_mutually_exclusive_group(required=True)
    modes.add_argument("--out", type=Path, metavar="FILE", help="write the digests of every history as JSON")
    modes.add_argument("--compare", type=Path, metavar="FILE", help="compare with digests that --out wrote")
    modes.add_argument("--record", type=Path, metavar="FILE", help="store events and digests of every history")
    modes.add_argument("--replay", type=Path, metavar="FILE", help="replay what --record stored and compare")
    options = parser.parse_args()
    seeds = range(options.seeds_from, options.seeds_from + options.histories)
    if options.replay is not None:
        return replay(options.replay)
    if options.record is not None:
        stored = msgspec.msgpack.encode(list(recordings(seeds)))
        options.record.write_bytes(zlib.compress(stored, 9))
        print(f"{options.record}: {len(seeds)} histories, {options.record.stat().st_size:,} bytes")
        return 0
    found = list(entries(seeds))
    if options.out is not None:
        options.out.write_text(json.dumps(msgspec.to_builtins(found), indent=0) + "\n")
        print(f"{options.out}: {len(found)} histories, {sum(entry.steps for entry in found):,} steps")
        return 0
    expected = msgspec.json.decode(options.compare.read_bytes(), type=list[Entry])
    differs = compare(found, expected)
    print(differs or f"{len(found)} histories, {sum(entry.steps for entry in found):,} steps: none differ")
    return int(bool(differs))


if __name__ == "__main__":
    sys.exit(main())
