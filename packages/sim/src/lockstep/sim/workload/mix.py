"""Several workloads as one; each source is a tenant.

    mix:chat=conversation_trace.jsonl.gz@3;code=azure.csv@1.5;gen:n=500,rate=0.2

A source is `[NAME=]WORKLOAD[@RATE]`. Its requests keep their times, or arrive at RATE per second. All sources start
together and share nothing. The random draws of a source depend on the seed and on its place.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lockstep.sim.workload.arrivals import RATE_MIN
from lockstep.sim.workload.token_runs import TOKEN_IDS
from lockstep.sim.workload.turns import Int32s, Turns, WorkloadError

MIX_PREFIX = "mix:"
SEPARATOR = ";"

_SOURCE = re.compile(r"(?:(?P<name>[A-Za-z0-9_.-]+)=)?(?P<workload>.*?)(?:@(?P<rate>[^@/]*))?", re.DOTALL)
_EXAMPLE = "mix:chat=conversation.jsonl.gz@3;code=azure.csv@1.5"


class MixSource(NamedTuple):
    workload: str
    name: str | None  # of its tenant; None: the name of the workload
    rate: float | None  # requests per second; None: as recorded, or as in its spec


def parse_mix(text: str) -> tuple[MixSource, ...]:
    """Parse `mix:SOURCE;SOURCE;...`. Raises: WorkloadError."""
    return tuple(_parse_source(text, source) for source in text.removeprefix(MIX_PREFIX).split(SEPARATOR))


def mix_of(workloads: Sequence[str]) -> str:
    """Return the spec of a mix of these sources; one source without a name is returned as is. Raises: WorkloadError."""
    if len(workloads) == 1:
        found = _SOURCE.fullmatch(workloads[0])
        named = found is not None and found["name"] and SEPARATOR not in workloads[0]
        return f"{MIX_PREFIX}{workloads[0]}" if named else workloads[0]
    for workload in workloads:
        if SEPARATOR in workload:
            hint = f"`{SEPARATOR}` separates the sources of a mix: rename the file"
            raise WorkloadError(workload, f"contains `{SEPARATOR}`, which cannot be part of one among several", hint)
    return MIX_PREFIX + SEPARATOR.join(workloads)


def _parse_source(text: str, source: str) -> MixSource:
    found = _SOURCE.fullmatch(source.strip())
    if found is None or not found["workload"]:
        raise WorkloadError(text, f"the source `{source}` names no workload", f"for example {_EXAMPLE}")
    name, workload, rate_text = found["name"], found["workload"], found["rate"]
    if workload.startswith(MIX_PREFIX):
        raise WorkloadError(text, f"the source `{source}` is a mix itself", "name its sources here")
    if rate_text is None:
        return MixSource(workload, name, None)
    try:
        rate = float(rate_text)
    except ValueError:
        rate = math.nan
    if not rate >= RATE_MIN:
        hint = "requests per second, such as @1.5, or @inf for all at once"
        raise WorkloadError(text, f"the source `{source}` has the rate `{rate_text}`", hint)
    return MixSource(workload, name, rate)


def seed_of_source(seed: int, place: int) -> int:
    """Return the seed of the source at `place`: equal specs at two places draw different requests."""
    digest = hashlib.blake2b(f"{seed} source {place}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def check_names(text: str, names: Sequence[str]) -> None:
    """Check that every source has a distinct name. Raises: WorkloadError."""
    for place, name in enumerate(names):
        if name in names[:place]:
            hint = f"name them: mix:a={name}...;b={name}..., or with --workload a=... --workload b=..."
            raise WorkloadError(text, f"two sources are called `{name}`", hint)


def tenant_of_source(name: str, tenant: str) -> str:
    """Return the tenant in a mix that a tenant of the source `name` becomes."""
    return f"{name}/{tenant}" if tenant else name


def mix_turns(text: str, names: Sequence[str], sources: Sequence[Turns]) -> Turns:
    """Return all turns of all sources, in order of arrival. The turns of a session are sorted by its first turn.

    The tenant of a turn is the name of its source, or `name/tenant` if the source has tenants. Token ids are shifted so
    that no two sources share one. Raises: WorkloadError if there are not enough ids.
    """
    sources = _with_own_ids(text, sources)
    forms = _Union()
    tenants = _Union()
    grammars = _Union()
    columns: dict[str, list[NDArray[Any]]] = {}
    turns_before = runs_before = 0
    for name, source in zip(names, sources, strict=True):
        form_codes = [forms.code(f"{name}.{form}") for form in source.label_forms]
        tenant_codes = [tenants.code(tenant_of_source(name, tenant)) for tenant in source.tenants]
        grammar_codes = [grammars.code(grammar) for grammar in source.grammars]
        moved = {
            "after": np.where(source.after < 0, -1, source.after + turns_before).astype(np.int32),
            "run_stops": source.run_stops + runs_before,
            "label_form": np.array(form_codes, np.int32)[source.label_form],
            "tenant": np.array(tenant_codes, np.int32)[source.tenant],
            "grammar": np.array(grammar_codes, np.int32)[source.grammar],
        }
        for field in fields(Turns):
            column = moved.get(field.name, getattr(source, field.name))
            if isinstance(column, np.ndarray):
                columns.setdefault(field.name, []).append(column)
        turns_before += len(source)
        runs_before += len(source.run_first_token)
    joined: dict[str, Any] = {name: np.concatenate(parts) for name, parts in columns.items()}
    together = Turns(
        **joined, label_forms=tuple(forms.codes), tenants=tuple(tenants.codes), grammars=tuple(grammars.codes)
    )
    arrivals_us = together.arrival_us[together.root()]
    return together.take(np.argsort(arrivals_us, kind="stable"))


class _Union:
    """Numbers names in order of appearance."""

    def __init__(self) -> None:
        self.codes: dict[str, int] = {}

    def code(self, name: str) -> int:
        return self.codes.setdefault(name, len(self.codes))


def _with_own_ids(text: str, sources: Sequence[Turns]) -> list[Turns]:
    """Shift the ids of each source after those of the previous one, without gaps if they would not fit otherwise."""
    if sum(map(_ids_stop, sources)) >= TOKEN_IDS:
        sources = [_compacted(source) for source in sources]
    stops = [_ids_stop(source) for source in sources]
    if sum(stops) >= TOKEN_IDS:
        problem = f"its sources have {sum(stops):,} different tokens, more than the {TOKEN_IDS:,} token ids"
        raise WorkloadError(text, problem, "take less of each: --limit, --time-window, or smaller n")
    bases = [sum(stops[:place]) for place in range(len(stops))]
    return [
        replace(
            source,
            run_first_token=(source.run_first_token + np.int64(base)).astype(np.int32),
            output_first_token=(source.output_first_token + np.int64(base)).astype(np.int32),
        )
        for source, base in zip(sources, bases, strict=True)
    ]


def _ids_stop(turns: Turns) -> int:
    prompts = turns.run_first_token.astype(np.int64) + turns.run_tokens
    outputs = turns.output_first_token.astype(np.int64) + turns.output_tokens
    return int(max(prompts.max(), outputs.max()))


def _compacted(turns: Turns) -> Turns:
    """Return the same turns with ids from 0 without gaps. Equal ids stay equal, and runs stay runs."""
    firsts = np.concatenate((turns.run_first_token, turns.output_first_token)).astype(np.int64)
    stops = firsts + np.concatenate((turns.run_tokens, turns.output_tokens))
    order = np.argsort(firsts, kind="stable")
    covered_to = np.maximum.accumulate(stops[order])
    opens = np.concatenate(([True], firsts[order][1:] > covered_to[:-1]))  # start of a stretch of ids in use
    begins = firsts[order][opens]
    ends = np.concatenate((covered_to[:-1][opens[1:]], covered_to[-1:]))
    bases = np.concatenate((np.zeros(1, np.int64), np.cumsum(ends - begins)[:-1]))

    def renumbered(column: Int32s) -> Int32s:
        stretch = np.searchsorted(begins, column, side="right") - 1
        moved: Int32s = (column - begins[stretch] + bases[stretch]).astype(np.int32)
        return moved

    return replace(
        turns,
        run_first_token=renumbered(turns.run_first_token),
        output_first_token=renumbered(turns.output_first_token),
    )
