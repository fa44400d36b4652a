"""NCCL's process group over gloo: the calls of torch's `ProcessGroupNCCL` on the memory of a fake CUDA device.

    with nccl_by_gloo():            torch has NCCL; ranks are threads of this process, see `tests.support.fake_cuda`

A tensor that is not of the device is refused, as NCCL refuses it. Without `asyncOp` a call returns nothing, since
kernels are in order on the caller's stream.
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

from tests.support.fake_cuda import DEVICE, OnDevice

LOOPBACK = "127.0.0.1"


class NcclOptions:
    """`ProcessGroupNCCL.Options`."""

    _timeout = timedelta(0)


class NcclByGloo:
    """One rank's end of a group."""

    Options = NcclOptions
    ends: ClassVar[list[NcclByGloo]] = []  # kept until all ranks are done: the last to leave reads from the others

    def __init__(self, store: Any, rank: int, size: int, options: NcclOptions) -> None:
        assert options._timeout > timedelta(0), "a group without a limit of time"
        gloo = dist.ProcessGroupGloo._Options()
        gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
        gloo._timeout = options._timeout
        self.rank, self.size = rank, size
        self.connected = self.aborted = self.numbered = False
        self._gloo = dist.ProcessGroupGloo(store, rank, size, gloo)
        self.ends.append(self)

    def _set_sequence_number_for_group(self) -> None:
        self.numbered = True

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Connect before the first collective, as all ranks do at the same time."""
        assert self.numbered
        assert device == DEVICE
        with torch._C._DisableTorchDispatch():
            self._gloo.barrier().wait()
        self.connected = True

    def abort(self) -> None:
        """End; no collective may follow."""
        self.aborted = True

    def _begun(self, name: str, tensors: Sequence[Any], *rest: Any, options: Any = None) -> Any:
        assert self.connected
        if self.aborted:
            raise RuntimeError("NCCL communicator was aborted")
        with torch._C._DisableTorchDispatch():
            work = getattr(self._gloo, name)(*(_memory(one) for one in tensors), *rest, *([options] if options else []))
            work.wait()
        return _Done() if options is None or getattr(options, "asyncOp", True) else None

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
        """Send to one rank."""
        return self._begun("send", [tensors], target, tag)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Any:
        """Receive from one rank, once the result is waited for."""
        return _Later(lambda: self._begun("recv", [tensors], source, tag))


class _Done:
    def wait(self) -> bool:
        return True


class _Later:
    def __init__(self, run: Any) -> None:
        self._run = run

    def wait(self) -> None:
        self._run()


def _memory(one: Any) -> Any:
    if isinstance(one, list):
        return [_memory(part) for part in one]
    if not isinstance(one, OnDevice):
        raise RuntimeError(f"NCCL has no tensors of the CPU, got {tuple(one.shape)}")
    assert one.is_contiguous()
    return one.inner


@contextmanager
def nccl_by_gloo() -> Iterator[None]:
    """Let torch have NCCL."""
    with ExitStack() as changed:
        changed.enter_context(mock.patch.object(dist, "ProcessGroupNCCL", NcclByGloo, create=True))
        changed.enter_context(mock.patch.object(dist, "is_nccl_available", return_value=True))
        try:
            yield
        finally:
            NcclByGloo.ends.clear()
