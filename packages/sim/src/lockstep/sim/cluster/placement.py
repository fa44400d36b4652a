"""Racks: which engines share a scale-up domain (an NVLink node or rack), and how KV moves within and between domains.

    apart    every transfer crosses the network between domains, wherever the engines are (the default)
    packed   engines fill domains in the order of their numbers: prefill engines first
    mixed    engines fill domains so that each has prefill and decode engines in proportion

A domain has `scale_up_gpus` GPUs. An engine that does not fit into the rest of a domain begins the next one; an engine
larger than a domain has several for itself. Transfers within a domain use its links at the rate of sends between two
GPUs (`send_gbs` of the GPU), for each GPU of the engine; transfers between domains use `link_gbs`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from simpy import Environment

from lockstep.sim.cluster.network import Links
from lockstep.sim.cluster.scenario import USUAL_PLACEMENT
from lockstep.sim.cost.hardware import GpuSpec, achieved, scale_up_gpus


@dataclass(frozen=True)
class PlacedEngine:
    """An engine to be placed, or one of its ranks, which has an entry of its own.

    Args:
        gpus: GPUs of the whole engine.
        ranks: entries of the engine, one behind the other.
    """

    gpu: GpuSpec
    gpus: int
    role: str
    ranks: int = 1


def domains_of_engines(engines: Sequence[PlacedEngine], placement: str) -> list[int]:
    """Return, by entry, the number of the domain in which its engine begins; with `apart`, each engine has its own."""
    ranks = engines[0].ranks
    whole = _domains_of_whole(engines[::ranks], placement)
    return [domain for domain in whole for _ in range(ranks)]


def _domains_of_whole(engines: Sequence[PlacedEngine], placement: str) -> list[int]:
    if placement == USUAL_PLACEMENT:
        return list(range(len(engines)))
    found, domain, used, before = [0] * len(engines), 0, 0, None
    for number in _order(engines, placement):
        one = engines[number]
        size = scale_up_gpus(one.gpu)
        if before is not None and (used + one.gpus > size or one.gpu != before):
            domain, used = domain + 1, 0
        found[number], used, before = domain, used + one.gpus, one.gpu
        if used > size:  # the next engine begins a domain of its own
            domain, used = domain + (used - 1) // size, size
    return found


def _order(engines: Sequence[PlacedEngine], placement: str) -> list[int]:
    """Return the numbers of the engines in the order in which they fill domains."""
    if placement == "packed":
        return list(range(len(engines)))
    roles = [one.role for one in engines]
    nth = dict.fromkeys(roles, 0)
    at: list[tuple[float, int]] = []
    for number, role in enumerate(roles):
        at.append(((nth[role] + 0.5) / roles.count(role), number))
        nth[role] += 1
    return [number for _, number in sorted(at)]


class Ways:
    """The links between engines: of the network, and within each domain."""

    def __init__(
        self, env: Environment, network: Links, latency_us: int, engines: Sequence[PlacedEngine], placement: str
    ) -> None:
        """Set up the ways of placed engines.

        Args:
            network: links between domains, by entry of `engines`.
            latency_us: of a message over the network.
        """
        self.network = network
        self.inside: Links | None = None
        self._domains = domains_of_engines(engines, placement)
        self._network_latency_us = latency_us
        self._inside_latency_us = round(max(achieved(one.gpu, "send_latency_us").value for one in engines))
        if placement != USUAL_PLACEMENT:
            speeds = [achieved(one.gpu, "send_gbs").value * 1e3 * one.gpus / one.ranks for one in engines]
            self.inside = Links(env, speeds, speeds)

    def between(self, source: int, target: int) -> tuple[Links, int]:
        """Return the links from one engine to another, and the latency of a message in microseconds."""
        if self.inside is not None and self._domains[source] == self._domains[target]:
            return self.inside, self._inside_latency_us
        return self.network, self._network_latency_us

    @property
    def sent_bytes(self) -> float:
        """Bytes sent over all links."""
        inside = 0.0 if self.inside is None else sum(self.inside.sent_bytes)
        return sum(self.network.sent_bytes) + inside

    def describe(self, makespan_us: int | None) -> dict[str, float | int | None]:
        """Return the busy shares of the links, and with domains the bytes that stayed within one."""

        def share(links: Links) -> float | None:
            return round(links.busy_us / makespan_us, 6) if makespan_us else None

        found: dict[str, float | int | None] = {"link_busy_share": share(self.network)}
        if self.inside is not None:
            found |= {
                "scale_up_bytes": round(sum(self.inside.sent_bytes)),
                "scale_up_busy_share": share(self.inside),
                "domains": len(set(self._domains)),
            }
        return found
