"""A group of a trainer and engines, over which the trainer, rank 0, sends new weights.

With gloo weights are sent through CPU memory, and with NCCL, with a GPU at every end, from GPU to GPU. An engine stores
received tensors in CPU memory until all have arrived: its GPU has no room for the weights twice.

    trainer                                             engine (docs/features.md, "Live weights")
    group = WeightsGroup("127.0.0.1", 29500, 0, 2)      POST /init_weights_update_group: returns when all have joined
    for tensor in tensors.values():                     POST /update_weights_from_distributed with names, dtypes, shapes
        group.send(tensor)                              receives them in this order, then copies them into the model

Torch's global process group is neither used nor changed, on either side.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Literal

import torch
from torch import Tensor
from torch import distributed as dist
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore, TCPStore

from lockstep.core.contract.errors import ConfigError
from lockstep.runtime.checkpoint import DTYPES, StoredTensor

Backend = Literal["gloo", "nccl"]
NAME = "weights"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
TIMEOUT_S = 120.0  # limit for all ends to join, and for one tensor
BY_NAME = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}  # by their names in safetensors


class WeightsGroup:
    """One end of a group. The constructor returns once all ends have joined.

    Args:
        address, port: address of rank 0, which opens the port.
        ranks: number of all ranks, rank 0 included.
        backend: the same at all ends. device: of this end; for NCCL a GPU that no other end uses.
    Raises: ConfigError if an end does not join in time.
    """

    def __init__(
        self,
        address: str,
        port: int,
        rank: int,
        ranks: int,
        name: str = NAME,
        timeout_s: float = TIMEOUT_S,
        *,
        backend: Backend = "gloo",
        device: torch.device | None = None,
    ) -> None:
        self.rank, self.ranks, self.name = rank, ranks, name
        self.device = torch.device("cpu") if backend == "gloo" or device is None else device
        check_backend(backend, self.device)
        timeout = timedelta(seconds=timeout_s)
        self._options = BroadcastOptions()
        self._options.rootRank, self._options.timeout = 0, timeout
        self._group: Any = None
        self._store: TCPStore | None = None  # rank 0's serves the others

        def meet() -> None:
            store = TCPStore(address, port, ranks, rank == 0, timeout)
            if backend == "nccl":
                self._store, self._group = store, _nccl_group(PrefixStore(name, store), self, address, timeout)
                return
            gloo = dist.ProcessGroupGloo._Options()
            if address in LOOPBACK:
                gloo._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
            else:
                gloo._devices = [dist.ProcessGroupGloo.create_default_device()]
            gloo._timeout = timeout
            self._store = store
            self._group = dist.ProcessGroupGloo(PrefixStore(name, store), rank, ranks, gloo)

        self._attempt("to meet", meet)

    def send(self, tensor: Tensor) -> None:
        """Send a tensor to all engines, from rank 0. Raises ConfigError."""
        whole = tensor.detach().to(self.device).contiguous()
        self._attempt("to send a tensor", lambda: self._broadcast(whole))

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the next tensor of rank 0, in CPU memory. Raises ConfigError."""
        tensor = torch.empty(shape, dtype=dtype, device=self.device)
        self._attempt("to receive a tensor", lambda: self._broadcast(tensor))
        return tensor.cpu()

    def close(self) -> None:
        """Leave the group."""
        if self.device.type == "cuda" and self._group is not None:
            self._group.abort()
        self._group = None
        self._store = None

    def _broadcast(self, tensor: Tensor) -> None:
        """Broadcast and wait: NCCL's `wait` only orders the stream, so a GPU is synchronised."""
        self._group.broadcast([tensor], self._options).wait()
        if tensor.device.type == "cuda":
            torch.cuda.current_stream(tensor.device).synchronize()

    def _attempt(self, what: str, run: Callable[[], object]) -> None:
        try:
            run()
        except RuntimeError as error:
            reason = str(error).strip().partition("\n")[0][:300]
            raise ConfigError(f"the {self.ranks} ranks of the group {self.name!r} failed {what}: {reason}") from error


def check_backend(backend: str, device: torch.device) -> None:
    """Raise ConfigError if a group cannot use this backend on this device."""
    if backend == "nccl" and (device.type != "cuda" or not dist.is_nccl_available()):
        why = f"this end is on {device.type}" if device.type != "cuda" else f"torch {torch.__version__} has none"
        raise ConfigError(f"`backend` is nccl, which goes from GPU to GPU, but {why}\nhint: gloo, at every end")


def _nccl_group(store: PrefixStore, end: WeightsGroup, address: str, timeout: timedelta) -> Any:
    """Join an NCCL group, as `Collectives` does. Returns once all ends have joined."""
    if address in LOOPBACK:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # for the first contact only; data use NVLink or PCIe
    # 2: release kernels that wait for a lost end, but do not end this process; the caller reports the error first.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    group = dist.ProcessGroupNCCL(store, end.rank, end.ranks, options)
    group._set_sequence_number_for_group()
    group.eager_connect_single_device(end.device)
    return group


class Received:
    """Tensors received over a group, in the order in which they were announced: `checkpoint.Tensors`."""

    def __init__(
        self, group: WeightsGroup, names: tuple[str, ...], dtypes: tuple[str, ...], shapes: tuple[tuple[int, ...], ...]
    ) -> None:
        self.folder = f"the group {group.name}"
        wrong = [dtype for dtype in dtypes if dtype.removeprefix("torch.") not in BY_NAME]
        if wrong:
            raise ConfigError(f"`dtypes` has {wrong[0][:40]!r}; known are {', '.join(BY_NAME)}")
        if not names or not len(names) == len(dtypes) == len(shapes) == len(set(names)):
            raise ConfigError("`names`, `dtypes` and `shapes` must be equally long, with each name once")
        stored = [
            StoredTensor(self.folder, shape, BY_NAME[dtype.removeprefix("torch.")])
            for dtype, shape in zip(dtypes, shapes, strict=True)
        ]
        self.stored: Mapping[str, StoredTensor] = dict(zip(names, stored, strict=True))
        self._group = group
        self._tensors: dict[str, Tensor] = {}

    def __enter__(self) -> Received:
        return self

    def __exit__(self, *error: object) -> None:
        self._tensors = {}

    def read(self, name: str, dim: int | None = None, part: slice | None = None) -> Tensor:
        """Return a tensor. The first call, made once all tensors are known to fit, receives them all."""
        if not self._tensors:
            for one, stored in self.stored.items():
                self._tensors[one] = self._group.receive(stored.shape, DTYPES[stored.dtype])
        tensor = self._tensors[name]
        return tensor if dim is None else tensor[(slice(None),) * dim + (part,)]
