"""Pipeline stages of one engine: which layers a rank has, and what stages send each other.

    rank       4, 5            2, 3            0, 1             pp 3, tp 2: rank 0 and its peers sample
    stage   | stage 0 |     | stage 1 |     | stage 2 |
            | embed   | ──> | layers  | ──> | layers  |          hidden states, to the next stage
            | layers  |     |         |     | logits  |
                 ^               ^               |
                 `---------------`---------------'               drawn tokens, to all stages before

Every stage receives every plan and runs it on its own layers, in launch order. The last stage samples. The stages
before it store the drawn tokens as if they had drawn them, so their tables stay equal. A draft model is on the first
stage, which sends its drafts ahead of the hidden states (stage_drafts.py). All receives are begun when a plan is
launched, so that bytes move while other batches are computed.

A stage is a tensor-parallel group of its own. Ranks of the same number in their groups form a *column*, and only ranks
of one column send to each other. Columns use gloo on a CPU and NCCL between GPUs. Hidden states and tokens have a
process group each, because NCCL runs the sends and receives of one pair of ranks in the order in which they were begun.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.core.contract.config import PP_SIZE_MAX
from lockstep.core.contract.errors import ConfigError
from lockstep.runtime.collectives import LOOPBACK, CollectiveFailed, Collectives, process_group
from lockstep.runtime.models.layers import Parallel
from lockstep.runtime.models.settings import ModelSettings
from lockstep.runtime.models.stage import StageLayers

UNWAITED = 64  # sends of drawn tokens, or of drafts, that are not waited for; batches in flight are fewer


@dataclass(frozen=True, slots=True)
class RankPlace:
    """The place of a rank in an engine of `tp` x `pp` ranks. The first `tp` ranks are the last stage, which samples."""

    rank: int
    tp: int = 1
    pp: int = 1

    @property
    def ranks(self) -> int:
        """Number of ranks of the engine."""
        return self.tp * self.pp

    @property
    def stage(self) -> StageLayers:
        """The stage of the rank."""
        return StageLayers(self.pp - 1 - self.rank // self.tp, self.pp)

    @property
    def column(self) -> int:
        """Number of the rank in its tensor-parallel group."""
        return self.rank % self.tp


# mechanism: pipeline-stages (executed)
class StageLinks:
    """What one rank sends to the other stages of its column, and receives from them.

    Args:
        store: of this column, see `collectives.process_group`; names with this beginning are used.
        host: address of this machine to which gloo is bound.
    Raises: CollectiveFailed.
    """

    def __init__(self, store: str, stage: StageLayers, device: torch.device, timeout_s: float, host: str) -> None:
        self.stage, self.device = stage, device
        self._width, self._dtype = 0, torch.float32
        self._groups: list[Any] = []
        for what in ("hidden", "drawn"):
            with self._explained("meeting"):
                made = process_group(f"{store}.{what}", stage.number, stage.count, device, timeout_s, host)
            self._groups.append(made)
        self._hidden_sends: deque[tuple[Any, Tensor]] = deque()  # gloo reads a tensor until its send has ended
        self._drawn_sends: deque[tuple[Any, Tensor]] = deque()
        self._draft_sends: deque[tuple[Any, Tensor]] = deque()

    def send_hidden(self, hidden: Tensor) -> None:
        """Begin to send the result of a pass to the next stage."""
        with self._explained("send"):
            work = self._groups[0].send([hidden], self.stage.number + 1, 0)
        self._hidden_sends.append((work, hidden))

    def sent(self) -> None:
        """Wait until the oldest result has been sent. Called when its batch is collected."""
        with self._explained("send"):
            self._hidden_sends.popleft()[0].wait()

    def take_sizes(self, width: int, dtype: torch.dtype) -> None:
        """Store the hidden size and the dtype of the model."""
        self._width, self._dtype = width, dtype

    def expect_hidden(self, tokens: int) -> Callable[[], Tensor]:
        """Begin to receive the result of the stage before, [2, tokens, hidden]; the returned function waits for it."""
        into = torch.empty((2, tokens, self._width), dtype=self._dtype, device=self.device)
        return self._expect(0, into, self.stage.number - 1)

    def send_drawn(self, drawn: Tensor) -> None:
        """Begin to send the drawn tokens of a batch, int32 [values], to all stages before."""
        self._send_small(1, drawn, range(self.stage.number), self._drawn_sends)

    def expect_drawn(self, values: int) -> Callable[[], Tensor]:
        """Begin to receive the drawn tokens of a batch from the last stage; the returned function waits for them."""
        return self._expect(1, torch.empty(values, dtype=torch.int32, device=self.device), self.stage.count - 1)

    def send_drafts(self, drafts: Tensor) -> None:
        """Begin to send the drafts of a pass, int32 [rows, most], to all later stages. Called before `send_hidden`."""
        self._send_small(0, drafts, range(self.stage.number + 1, self.stage.count), self._draft_sends)

    def expect_drafts(self, rows: int, most: int) -> Callable[[], Tensor]:
        """Begin to receive the drafts of a pass from the first stage; the returned function waits for them.

        Called before `expect_hidden` of the same pass, because both are sent in one group.
        """
        return self._expect(0, torch.empty((rows, most), dtype=torch.int32, device=self.device), 0)

    def abort(self) -> None:
        """Release threads that wait for stages that have ended. gloo detects the end itself, NCCL's kernels do not."""
        if self.device.type == "cuda":
            for group in self._groups:
                group.abort()

    def close(self) -> None:
        """Leave the groups, without waiting for the other stages."""
        self.abort()
        self._groups = []

    def _send_small(self, group: int, sent: Tensor, stages: Sequence[int], sends: deque[tuple[Any, Tensor]]) -> None:
        """Begin to send a small tensor to some stages, and keep it until that has ended."""
        while len(sends) > UNWAITED:
            with self._explained("send"):
                sends.popleft()[0].wait()
        for stage in stages:
            with self._explained("send"):
                sends.append((self._groups[group].send([sent], stage, 0), sent))

    def _expect(self, group: int, into: Tensor, source: int) -> Callable[[], Tensor]:
        with self._explained("receive"):
            work = self._groups[group].recv([into], source, 0)

        def wait() -> Tensor:
            with self._explained("receive"):
                work.wait()
            return into

        return wait

    def _explained(self, what: str) -> _Explained:
        return _Explained(f"a {what} between the {self.stage.count} stages failed on stage {self.stage.number}")


@dataclass(frozen=True, slots=True)
class _Explained:
    """A context that turns errors of torch into CollectiveFailed."""

    what: str

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, RuntimeError) and not isinstance(error, CollectiveFailed):
            raise CollectiveFailed(f"{self.what}: {str(error).strip().partition(chr(10))[0]}") from error


class RankEnds:
    """A rank's ends of all communication on the device: with its tensor-parallel group, and with the other stages.

    The constructor returns once all ranks have joined.

    Args:
        store: the same for all ranks, see `collectives.process_group`; names with this beginning are used.
        host: address of this machine, on which the ranks of its stage are, for the other stages.
    Raises: CollectiveFailed.
    """

    def __init__(
        self, store: str, place: RankPlace, device: torch.device, timeout_s: float, host: str = LOOPBACK
    ) -> None:
        self.place = place
        self.collectives: Collectives | None = None
        self.links: StageLinks | None = None
        if place.tp > 1:
            group = f"{store}.stage{place.stage.number}"
            self.collectives = Collectives(group, place.column, place.tp, device, timeout_s)
        if place.pp > 1:
            self.links = StageLinks(f"{store}.column{place.column}", place.stage, device, timeout_s, host)

    def parallel(self) -> Parallel:
        """Return this rank's part of the layers of its stage."""
        return Parallel() if self.collectives is None else self.collectives.parallel()

    def abort(self) -> None:
        """Release threads that wait for ranks that have ended."""
        for end in (self.collectives, self.links):
            if end is not None:
                end.abort()

    def close(self) -> None:
        """Leave all groups, without waiting for the other ranks."""
        for end in (self.collectives, self.links):
            if end is not None:
                end.close()


def check_stages(model: ModelSettings, pp: int) -> None:
    """Raise ConfigError, with the fields of config.json, if `pp` stages cannot split a model."""
    if pp > min(model.layers, PP_SIZE_MAX):
        most = min(model.layers, PP_SIZE_MAX)
        raise ConfigError(f"`pp` is {pp}, but {model.architecture} has {model.layers} layers\nhint: at most {most}")
    if pp > 1 and model.backend == "transformers":
        raise ConfigError(
            f"`pp` is {pp}, but {model.architecture} runs by transformers' code, which this runtime does not split "
            "into stages\nhint: tp splits it"
        )
