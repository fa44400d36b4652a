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
determines a history; `--seeds-from` draws others.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lockstep.core.journal.snapshot import dump
from tests.support.recorded_histories import difference, digest_of, engines_of, kind_of, read, recordings, write


class Entry(msgspec.Struct, frozen=True):
    """What one history came to. Digests of several engines are joined by spaces."""

    seed: int
    kind: str
    steps: int
    digest: str  # hex
    snapshot: str  # hex


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
    stored = read(path)
    failed: set[int] = set()
    for recording in stored:
        if found := difference(recording):
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
        write(options.record, recordings(seeds))
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
