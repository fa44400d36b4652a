"""NIXL's agents within one process: a transfer of kind READ copies bytes between addresses that were registered.

with nixl_in_process() as agents:        import nixl._api
    agents["lockstep-..."]               agents by name
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

Range = tuple[int, int, int]  # address, bytes, device


@dataclass
class NixlAgent:
    """`nixl_agent` of nixl/_api.py, with the methods that the runtime calls."""

    name: str
    agents: dict[str, NixlAgent]
    polls: int = 1  # checks of a transfer before it has ended
    fails: str = ""  # the state in which transfers end instead of DONE
    registered: list[tuple[Range, str]] = field(default_factory=list)
    peers: set[str] = field(default_factory=set)

    def register_memory(self, ranges: list[tuple[int, int, int, str]], kind: str) -> list[tuple[Range, str]]:
        """Let memory be read and written."""
        made = [((address, size, device), kind) for address, size, device, _ in ranges]
        self.registered += made
        return made

    def deregister_memory(self, made: list[tuple[Range, str]]) -> None:
        """Undo `register_memory`."""
        for one in made:
            self.registered.remove(one)

    def get_agent_metadata(self) -> bytes:
        """Return what another agent needs to reach this one."""
        return self.name.encode()

    def add_remote_agent(self, metadata: bytes) -> str:
        """Return the name of another agent."""
        name = metadata.decode()
        if name not in self.agents:
            raise RuntimeError("NIXL_ERR_NOT_FOUND")
        self.peers.add(name)
        return name

    def remove_remote_agent(self, name: str) -> None:
        """Undo `add_remote_agent`."""
        self.peers.remove(name)

    def get_xfer_descs(self, ranges: list[Range], kind: str) -> tuple[list[Range], str]:
        """Return ranges as a description."""
        return ranges, kind

    def initialize_xfer(
        self, kind: str, ours: tuple[list[Range], str], theirs: tuple[list[Range], str], peer: str
    ) -> SimpleNamespace:
        """Return a transfer that has not begun."""
        assert kind == "READ"
        assert peer in self.peers
        for there, memory in ((self, ours), (self.agents[peer], theirs)):
            for one in memory[0]:
                if not any(_within(one, whole) and memory[1] == of for whole, of in there.registered):
                    raise RuntimeError("NIXL_ERR_NOT_FOUND")
        return SimpleNamespace(pairs=list(zip(ours[0], theirs[0], strict=True)), left=self.polls, released=False)

    def transfer(self, handle: SimpleNamespace) -> str:
        """Begin."""
        return "PROC"

    def check_xfer_state(self, handle: SimpleNamespace) -> str:
        """Return PROC until the bytes have come."""
        handle.left -= 1
        if handle.left > 0:
            return "PROC"
        if self.fails:
            return self.fails
        for (into, size, _), (source, of, _) in handle.pairs:
            assert size == of
            ctypes.memmove(into, source, size)
        return "DONE"

    def release_xfer_handle(self, handle: SimpleNamespace) -> None:
        """Forget a transfer."""
        handle.released = True


def _within(one: Range, whole: Range) -> bool:
    return whole[0] <= one[0] and one[0] + one[1] <= whole[0] + whole[1] and one[2] == whole[2]


@contextmanager
def nixl_in_process() -> Iterator[dict[str, NixlAgent]]:
    """Let NIXL be installed. Yields the agents by name."""
    agents: dict[str, NixlAgent] = {}

    def agent(name: str, config: Any) -> NixlAgent:
        assert config == ["UCX"]
        agents[name] = NixlAgent(name, agents)
        return agents[name]

    package, api = ModuleType("nixl"), ModuleType("nixl._api")
    package.__spec__ = ModuleSpec("nixl", None)
    package.__path__ = []
    api.__dict__.update(nixl_agent=agent, nixl_agent_config=lambda backends: backends)
    before = {name: sys.modules.pop(name, None) for name in ("nixl", "nixl._api")}
    sys.modules.update({"nixl": package, "nixl._api": api})
    try:
        yield agents
    finally:
        for name, module in before.items():
            del sys.modules[name]
            if module is not None:
                sys.modules[name] = module
