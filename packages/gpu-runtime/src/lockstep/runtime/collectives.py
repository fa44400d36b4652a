"""Sums and joins over the ranks of one tensor-parallel group: NCCL between GPUs, gloo between CPU processes.

The group belongs to one engine. torch's global process group is neither used nor changed, so that a program may have
its own, or several engines. Ranks find each other by a file in a private folder, not by a port; gloo's own connections
are bound to the loopback device.

A collective that fails leaves the ranks out of step. This cannot be repaired: the engine ends.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, AllToAllOptions, BroadcastOptions, FileStore

from lockstep.runtime.errors import DeviceLost
from lockstep.runtime.models.layers import Parallel
from lockstep.runtime.turns import TurnTaking

LOOPBACK = "127.0.0.1"
START_S = 300.0  # limit for all ranks to join the group, and to finish loading after the first of them has


class CollectiveFailed(DeviceLost):
    """A collective failed, most likely because another rank has ended."""


class Collectives:
    """This rank's end of the group. The constructor returns once all ranks have joined.

    Args:
        store: a path that is passed to all ranks, in a folder of their own; the file is created.
        timeout_s: limit for one collective on the CPU; with NCCL, the time after which torch itself aborts.
    Raises: CollectiveFailed.
    """

    def __init__(self, store: str, rank: int, ranks: int, device: torch.device, timeout_s: float) -> None:
        self.rank, self.ranks, self.device = rank, ranks, device
        self.turns = TurnTaking()  # of the halves of a batch
        self._reduce, self._gather, self._exchange = dist.AllreduceOptions(), AllgatherOptions(), AllToAllOptions()
        self._broadcast = BroadcastOptions()
        self._options = (self._reduce, self._gather, self._exchange, self._broadcast)
        for options in self._options:
            options.asyncOp = False  # on the caller's stream, not on a stream of the group
            options.timeout = timedelta(seconds=timeout_s)
        self._nccl = device.type == "cuda"
        self._group: Any = None
        self._attempt("meeting", lambda: self._meet(store, timeout_s))

    def parallel(self) -> Parallel:
        """Return this rank's part, with which models are built."""
        functions = (self.all_reduce, self.all_gather, self.all_to_all)
        return Parallel(self.rank, self.ranks, *functions, broadcast=self.broadcast, turns=self.turns)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum over all ranks, with the same bits on each. May overwrite `tensor`."""
        if not tensor.numel():
            return tensor
        tensor = tensor.contiguous()
        self._attempt("sum", lambda: self._group.allreduce([tensor], self._reduce))
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return the [n, k] tensors of all ranks side by side: [n, ranks * k]."""
        rows, columns = tensor.shape
        if not rows:
            return tensor.new_empty(0, self.ranks * columns)
        tensor = tensor.contiguous()
        all_ranks = tensor.new_empty(self.ranks, rows, columns)
        parts = list(all_ranks.unbind())
        if self._nccl:
            flat = all_ranks.view(-1, columns)
            self._attempt("join", lambda: self._group._allgather_base(flat, tensor, self._gather))
        else:
            self._attempt("join", lambda: self._group.allgather([parts], [tensor], self._gather))
        return all_ranks.movedim(0, 1).reshape(rows, self.ranks * columns)

    def gather_rows(self, tensor: Tensor) -> Tensor:
        """Return the [n, k] tensors of all ranks one below the other: [ranks * n, k]."""
        rows, columns = tensor.shape
        all_ranks = tensor.new_empty(self.ranks, rows, columns)
        if rows:
            tensor = tensor.contiguous()
            flat, parts = all_ranks.view(-1, columns), list(all_ranks.unbind())
            if self._nccl:
                self._attempt("join", lambda: self._group._allgather_base(flat, tensor, self._gather))
            else:
                self._attempt("join", lambda: self._group.allgather([parts], [tensor], self._gather))
        return all_ranks.view(-1, columns)

    def all_to_all(self, rows: Tensor, sends: Sequence[int], receives: Sequence[int]) -> Tensor:
        """Send rows to each rank. Every rank calls this, also if it sends and receives nothing.

        Args:
            rows: [sum of sends, k], by receiver. sends, receives: numbers of rows to and from each rank.
        Returns: [sum of receives, k], by sender.
        """
        rows = rows.contiguous()
        got = rows.new_empty(sum(receives), *rows.shape[1:])
        counts = list(receives), list(sends)
        self._attempt("exchange", lambda: self._group.alltoall_base(got, rows, *counts, self._exchange))
        return got

    def broadcast(self, tensor: Tensor, root: int) -> Tensor:
        """Send the tensor of one rank to all, which receive it in theirs, contiguous and of the same shape."""
        if tensor.numel():
            self._broadcast.rootRank = root
            self._attempt("broadcast", lambda: self._group.broadcast([tensor], self._broadcast))
        return tensor

    def abort(self) -> None:
        """Release threads that wait for ranks that have ended. gloo detects the end itself, NCCL's kernels do not."""
        if self._nccl:
            self._group.abort()

    def close(self) -> None:
        """Leave the group, without waiting for the other ranks. No collective may follow."""
        self.abort()
        self._group = None

    def _meet(self, store: str, timeout_s: float) -> None:
        self._group = process_group(store, self.rank, self.ranks, self.device, timeout_s)

    def _attempt(self, what: str, begin: Callable[[], Any]) -> None:
        """Begin a collective and wait: on the CPU until it is done, with NCCL until it is on the stream.

        The other half of a batch, if there is one, continues before this one waits.
        """
        if self._nccl and self._reduce.asyncOp != self.turns.taken:
            for options in self._options:
                options.asyncOp = self.turns.taken  # on a stream of the group, beside what the other half computes
        try:
            work = begin()
            self.turns.pass_on()
            if work is not None:
                work.wait()
        except RuntimeError as error:
            reason = str(error).strip().partition("\n")[0]
            raise CollectiveFailed(
                f"a {what} of the {self.ranks} ranks failed on rank {self.rank}: {reason}"
            ) from error


def process_group(
    store: str, rank: int, ranks: int, device: torch.device, timeout_s: float, host: str = LOOPBACK
) -> Any:
    """Return a process group of torch's, outside of its global ones. Waits for all ranks. Raises RuntimeError.

    Args:
        store: the same for all ranks: a path, whose file is created, or HOST|PORT|NAME of a TCPStore.
        timeout_s: limit for one operation on the CPU; with NCCL, the time after which torch itself aborts.
        host: address of this machine to which gloo is bound.
    """
    shared = _shared(store, ranks)
    timeout = timedelta(seconds=timeout_s)
    if device.type == "cuda":
        if host == LOOPBACK:
            os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # for the first contact only; data use NVLink or PCIe
        # 2: release kernels that wait for a lost rank, but do not end this process; the caller reports the error
        # first.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = timeout
        group = dist.ProcessGroupNCCL(shared, rank, ranks, nccl)
        group._set_sequence_number_for_group()
        group.eager_connect_single_device(device)
        return group
    gloo = dist.ProcessGroupGloo._Options()
    gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    gloo._timeout = timeout
    return dist.ProcessGroupGloo(shared, rank, ranks, gloo)


def _shared(store: str, ranks: int) -> Any:
    """Return the store by which ranks find each other."""
    if "|" not in store:
        shared = FileStore(store, ranks)
        shared.set_timeout(timedelta(seconds=START_S))
        return shared
    host, port, name = store.split("|")
    limit = timedelta(seconds=START_S)
    return dist.PrefixStore(name, dist.TCPStore(host, int(port), wait_for_workers=False, timeout=limit))
