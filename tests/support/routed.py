"""The facts and decisions of the router of a served run."""

from __future__ import annotations

from pathlib import Path

import msgspec

from lockstep.host.router_journal import RouterRecord


def facts(run: Path) -> list[RouterRecord]:
    """The lines of `router.jsonl` behind its first."""
    lines = (run / "router.jsonl").read_bytes().splitlines()[1:]
    return [msgspec.json.decode(line, type=RouterRecord) for line in lines]
