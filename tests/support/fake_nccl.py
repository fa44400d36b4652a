"""NCCL's process group over gloo: the calls of torch's `ProcessGroupNCCL` on the memory of a fake CUDA device.

    with nccl_by_gloo(gpu):         torch has NCCL; ranks are threads of this process, see `tests.support.fake_cuda`

A tensor that is not of the rank's device is refused, as NCCL refuses it. Without `asyncOp` a call returns nothing,
since kernels are in order on the caller's stream. In a capture a collective is recorded, and runs again at each replay.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any, ClassVar
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.fake_cuda import FakeCuda, OnDevice

LOOPBACK = "127.0.0.1"


class NcclOptions:
    """`ProcessGroupNCCL.Options`."""

    _timeout = timedelta(0)


class NcclByGloo:
    """One rank's end of a group."""

    Options = NcclOptions
    gpu: ClassVar[FakeCuda]
    ends: ClassVar[list[NcclByGloo]] = []  # kept until all ranks are done: the last to leave reads from the others

    def __init__(self, store: Any, rank: int, size: int, options: NcclOptions) -> None:
        assert options._timeout > timedelta(0), "a group without a limit of time"
        gloo = dist.ProcessGroupGloo._Options()
        gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
        gloo._timeout = options._timeout
        self.rank, self.size = rank, size
        self.aborted = self.numbered = False
        self.device: torch.device | None = None  # of this rank, once it is connected
        self._gloo = dist.ProcessGroupGloo(store, rank, size, gloo)
        self._under_way: list[Any] = []  # kept to the end, because gloo cancels a send that nothing refers to
        self.ends.append(self)

    def _set_sequence_number_for_group(self) -> None:
        self.numbered = True

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Connect before the first collective, as all ranks do at the same time."""
        assert self.numbered
        assert device.type == "cuda"
        assert device.index is not None
        with torch._C._DisableTorchDispatch():
            self._gloo.barrier().wait()
        self.device = device

    def abort(self) -> None:
        """End; no collective may follow."""
        self.aborted = True

    def _begun(self, name: str, tensors: Sequence[Any], *rest: Any, options: Any = None) -> Any:
        self._check()
        memory = [self._memory(one) for one in tensors]
        given = [] if options is None else [options]

        def run() -> None:
            with torch._C._DisableTorchDispatch():
                getattr(self._gloo, name)(*memory, *rest, *given).wait()

        self.gpu.run(run)
        return _Done() if options is None or getattr(options, "asyncOp", True) else None

    def _check(self) -> None:
        assert self.device is not None, "the group is not connected"
        if self.aborted:
            raise RuntimeError("NCCL communicator was aborted")

    def _memory(self, one: Any) -> Any:
        if isinstance(one, list):
            return [self._memory(part) for part in one]
        if not isinstance(one, OnDevice):
            raise RuntimeError(f"NCCL has no tensors of the CPU, got {tuple(one.shape)}")
        if one.device != self.device:
            raise RuntimeError(f"a group of {self.device} has a tensor of {one.device}")
        assert one.is_contiguous()
        return one.inner

    def allreduce(self, tensors: list[Tensor], options: Any) -> Any:
        """Sum over the ranks."""
        return self._begun("allreduce", [tensors], options=options)

    def _allgather_base(self, into: Tensor, tensor: Tensor, options: Any) -> Any:
        assert into.numel() == self.size * tensor.numel()
        return self._begun(
            "allgather", [[list(into.view(self.size, *tensor.shape).unbind())], [tensor]], options=options
        )

    def alltoall_base(self, into: Tensor, tensor: Tensor, receives: list[int], sends: list[int], options: Any) -> Any:
        """Exchange rows."""
        return self._begun("alltoall_base", [into, tensor], receives, sends, options=options)

    def broadcast(self, tensors: list[Tensor], options: Any) -> Any:
        """Send from the root to all."""
        return self._begun("broadcast", [tensors], options=options)

    def send(self, tensors: list[Tensor], target: int, tag: int) -> Any:
        """Send to one rank; the caller does not wait for it to receive."""
        return self._passed("send", tensors, target, tag)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Any:
        """Receive from one rank; what is launched behind the wait for the result reads it."""
        return self._passed("recv", tensors, source, tag)

    def _passed(self, name: str, tensors: list[Tensor], other: int, tag: int) -> Any:
        self._check()
        memory = self._memory(tensors)
        with torch._C._DisableTorchDispatch():
            work = getattr(self._gloo, name)(memory, other, tag)
        self._under_way.append(work)
        return work


class _Done:
    def wait(self) -> bool:
        return True


@contextmanager
def nccl_by_gloo(gpu: FakeCuda) -> Iterator[None]:
    """Let torch have NCCL."""
    NcclByGloo.gpu = gpu
    with ExitStack() as changed:
        changed.enter_context(mock.patch.object(dist, "ProcessGroupNCCL", NcclByGloo, create=True))
        changed.enter_context(mock.patch.object(dist, "is_nccl_available", return_value=True))
        try:
            yield
        finally:
            NcclByGloo.ends.clear()
