"""One data-parallel rank of an engine: what it shares with the others, each of which is an engine process of its own.

    engine process 0          engine process 1          attention_dp 2, tp 2
    RuntimeHost, journal      RuntimeHost, journal      each with requests, KV and prefix cache of its own
         | <──── proposals (host/rank_agreement.py) ───> |
    attention, embeddings     attention, embeddings     whole on every rank
    MLPs, experts <──── rows of all ranks ────> MLPs, experts      split over the ranks

Ranks meet at the hub of the first of them, then in a group for their collectives. If one ends, all of them do.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch

from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.errors import ConfigError
from lockstep.host.rank_agreement import RankAgreement, RankHub
from lockstep.host.weights import WeightLoader
from lockstep.runtime.collectives import START_S, CollectiveFailed, Collectives
from lockstep.runtime.errors import RankLost
from lockstep.runtime.executor import Matchers
from lockstep.runtime.models import Parallel
from lockstep.runtime.models.layers import SharedRows
from lockstep.runtime.models.settings import ModelSettings
from lockstep.runtime.stages import RankPlace, StageLinks

CAUSE_S = 5.0  # limit of the wait for the reason why a collective failed

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class DataRank:
    """Which data-parallel rank an engine is, and where it meets the others.

    Args:
        folder: of the first rank's socket, which only this user can read.
    """

    rank: int
    ranks: int
    folder: Path


class DataRanks:
    """The other data-parallel ranks, as seen by one of them while it is assembled and while it runs.

    The constructor returns once all ranks have joined.

    Args:
        timeout_s: limit for one collective on the CPU; with NCCL, the time after which torch itself aborts.
    Raises: ConfigError; PeerRankLost if a rank does not come; CollectiveFailed.
    """

    matchers: Matchers | None = None  # every rank has those of its own requests
    links: StageLinks | None = None

    def __init__(self, seat: DataRank, device: torch.device, timeout_s: float) -> None:
        self.seat, self.place = seat, RankPlace(0)
        self._stores: list[Path] = []
        self._closed = False
        self._hub: RankHub | None = None
        self._collectives: Collectives | None = None
        address = f"unix:{seat.folder / 'ranks'}"
        if seat.rank == 0:
            self._hub = RankHub(address, seat.ranks, self._store)
        try:
            self.agreement = RankAgreement(address, seat.rank, seat.ranks, START_S)
            self._collectives = Collectives(self.agreement.store, seat.rank, seat.ranks, device, timeout_s)
        except BaseException:
            self.close(leaving=False)
            raise

    def parallel(self) -> Parallel:
        """Return this rank's part of the MLPs, and what is around them."""
        group, rank = self._collectives, self.seat.rank
        assert group is not None
        reduce, gather = self._explained(group.all_reduce), self._explained(group.all_gather)
        shared = SharedRows(rank, self._explained(group.gather_rows), reduce)
        return Parallel(
            rank, self.seat.ranks, reduce, gather, self._explained(group.all_to_all), shared=shared, turns=group.turns
        )

    def compare(self, chosen: str) -> None:
        """Do nothing: attention is whole on each rank, so ranks may choose different kernels for it."""

    def agree(self, config: SchedConfig) -> SchedConfig:
        """Return the settings of this rank, whose pool may have another size than those of other ranks."""
        return config

    def close(self, *, leaving: bool) -> None:
        """Leave the other ranks, which end, too, unless this one is stopped (`leaving`). Can be called again."""
        if self._closed:
            return
        self._closed = True
        if hasattr(self, "agreement"):
            self.agreement.close(leaving=leaving)
        if self._hub is not None:
            self._hub.close(leaving=leaving)
        if self._collectives is not None:
            self._collectives.close()
        for store in self._stores:
            with suppress(OSError):
                store.unlink()

    def _store(self) -> str:
        store = self.seat.folder / f"ranks-{secrets.token_hex(8)}"
        self._stores.append(store)
        return str(store)

    def _explained(self, run: Callable[P, T]) -> Callable[P, T]:
        """Return a collective that raises RankLost, with the reason, if it fails because another rank has ended."""

        def explained(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                return run(*args, **kwargs)
            except CollectiveFailed as error:
                if self.agreement.ended.wait(CAUSE_S):
                    lost = RankLost(self.agreement.reason or "the engine of another rank was stopped")
                    lost.killed = True  # the cause lies in another process
                    raise lost from error
                raise

        return explained


class FixedWeights:
    """The weights of a rank, which cannot be changed.

    Args:
        why: data-parallel ranks would run a pass with old ones; experts that moved are in other slots.
    """

    def __init__(self, loader: WeightLoader, why: str) -> None:
        self._loader, self._why = loader, why

    def load_weights(self, version: int, source: str) -> None:
        """Raise ConfigError."""
        raise ConfigError(f"weights are not changed while {self._why}\nhint: start the server anew")

    def switch_memory(self, tags: tuple[str, ...], *, released: bool) -> None:
        """Release or allocate the memory of the KV; raise ConfigError for that of the weights."""
        if released and "weights" in tags:
            raise ConfigError(f"weights are not released while {self._why}\nhint: release kv_cache alone")
        self._loader.switch_memory(tags, released=released)


def check_shared(model: ModelSettings, ranks: int) -> None:
    """Raise ConfigError if data-parallel ranks cannot share the MLPs of a model."""
    if model.backend == "transformers":
        raise ConfigError(
            f"`attention_dp` is {ranks}, but {model.architecture} runs by transformers' code, in which ranks share "
            "nothing\nhint: dp gives several whole engines"
        )
