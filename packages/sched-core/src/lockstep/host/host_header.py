"""Entries of `host` in a journal's header, in the order in which hosts write them.

    JournalHeader(config=config, host=HostHeader(kind=RUNTIME, model="qwen3-8b", gpu="h200", tp=2).entries())
    HostHeader.of(read_journal(folder).header).kind

A replay needs none of them: they describe the run for users, and tools derive defaults of their options from them. A
host that writes a further entry declares it here; other hosts, such as those of tests, may write any.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from lockstep.core.journal.records import JournalHeader

SIMULATOR, RUNTIME, EMULATED, VLLM = "simulator", "runtime", "emulated", "vllm"
"""Values of `kind`."""

Entry = str | int | float | bool


class HostHeader(msgspec.Struct, frozen=True, kw_only=True):
    """What a host states about itself and its run; entries that are None are left out of the journal.

    Args:
        layout: entries of a model that is split otherwise than by `tp` alone, by the names of the simulator's
            `Parallelism`; each is an entry of its own in the journal.
    """

    kind: str | None = None
    model: str | None = None
    gpu: str | None = None
    tp: int | None = None
    layout: Mapping[str, Entry] = {}
    # of a simulation
    cost: str | None = None  # kind of the cost model
    calibration: str | None = None
    workload: str | None = None
    workload_digest: str | None = None
    media: str | None = None
    samples: str | None = None
    server_sessions: str | None = None  # "on"
    adapters: str | None = None
    engine: int | None = None  # number of this engine in its cluster
    engines: int | None = None  # of the cluster
    # of an engine in real time
    logit_processors: str | None = None  # names and versions of packages
    kv_cache_dtype: str | None = None  # None: that of the model
    fp8_activations: str | None = None  # how rows that meet fp8 weights are rounded; None: they are not
    speed: float | None = None  # of an emulated engine: times faster than its cost model

    # of vLLM with this scheduler
    vllm: str | None = None  # its version
    profile: str | None = None
    tokens: str | None = None  # "kept", or "pseudonyms" in place of token ids

    def entries(self) -> dict[str, Entry]:
        """Return the entries of the journal's header."""
        found: dict[str, Entry] = {}
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if name == "layout":
                found |= value
            elif value is not None:
                found[name] = value
        return found

    @classmethod
    def of(cls, header: JournalHeader) -> HostHeader:
        """Return the entries of a journal's header; those that are not declared are in `layout`."""
        known: dict[str, Any] = {name: value for name, value in header.host.items() if name in cls.__struct_fields__}
        return cls(**known, layout={name: value for name, value in header.host.items() if name not in known})
