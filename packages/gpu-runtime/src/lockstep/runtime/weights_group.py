"""A group of a trainer and engines, over which the trainer, rank 0, sends new weights: gloo, by way of CPU memory.

    trainer                                             engine (docs/features.md, "Live weights")
    group = WeightsGroup("127.0.0.1", 29500, 0, 2)      POST /init_weights_update_group: comes back when all have met
    for tensor in tensors.values():                     POST /update_weights_from_distributed with names, dtypes, shapes
        group.send(tensor)                              receives them in this order, then puts them in place

Torch's global process group is neither used nor touched, on neither side.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore, TCPStore

from lockstep.core.errors import ConfigError
from lockstep.runtime.checkpoint import DTYPES, Stored

NAME = "weights"
TIMEOUT_S = 120.0  # for all to meet, and for one tensor
BY_NAME = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}  # as safetensors have them


class WeightsGroup:
    """One end of a group. Returns once all ends are there.

    Args:
        address, port: where rank 0 is found; it opens the port.
        ranks: of all, rank 0 included.
    Raises: ConfigError if they do not meet.
    """

    def __init__(
        self, address: str, port: int, rank: int, ranks: int, name: str = NAME, timeout_s: float = TIMEOUT_S
    ) -> None:
        self.rank, self.ranks, self.name = rank, ranks, name
        timeout = timedelta(seconds=timeout_s)
        self._options = BroadcastOptions()
        self._options.rootRank, self._options.timeout = 0, timeout
        self._group: Any = None
        self._store: TCPStore | None = None  # rank 0's serves the others

        def meet() -> None:
            store = TCPStore(address, port, ranks, rank == 0, timeout)
            gloo = dist.ProcessGroupGloo._Options()
            loopback = address in ("127.0.0.1", "localhost", "::1")
            if loopback:
                gloo._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
            else:
                gloo._devices = [dist.ProcessGroupGloo.create_default_device()]
            gloo._timeout = timeout
            self._store = store
            self._group = dist.ProcessGroupGloo(PrefixStore(name, store), rank, ranks, gloo)

        self._attempt("to meet", meet)

    def send(self, tensor: Tensor) -> None:
        """To all engines, from rank 0. Raises ConfigError."""
        whole = tensor.detach().cpu().contiguous()
        self._attempt("to send a tensor", lambda: self._group.broadcast([whole], self._options).wait())

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """What rank 0 sends next. Raises ConfigError."""
        tensor = torch.empty(shape, dtype=dtype)
        self._attempt("to receive a tensor", lambda: self._group.broadcast([tensor], self._options).wait())
        return tensor

    def close(self) -> None:
        """Leave."""
        self._group = None
        self._store = None

    def _attempt(self, what: str, run: Callable[[], object]) -> None:
        try:
            run()
        except RuntimeError as error:
            said = str(error).strip().partition("\n")[0][:300]
            raise ConfigError(f"the {self.ranks} ranks of the group {self.name!r} failed {what}: {said}") from error


class Received:
    """Tensors that come over a group, in the order in which they were announced: `checkpoint.Tensors`."""

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
            Stored(self.folder, shape, BY_NAME[dtype.removeprefix("torch.")])
            for dtype, shape in zip(dtypes, shapes, strict=True)
        ]
        self.stored: Mapping[str, Stored] = dict(zip(names, stored, strict=True))
        self._group = group
        self._tensors: dict[str, Tensor] = {}

    def __enter__(self) -> Received:
        return self

    def __exit__(self, *error: object) -> None:
        self._tensors = {}

    def read(self, name: str, dim: int | None = None, part: slice | None = None) -> Tensor:
        """The first that is read finds that all fit, and so receives all."""
        if not self._tensors:
            for one, stored in self.stored.items():
                self._tensors[one] = self._group.receive(stored.shape, DTYPES[stored.dtype])
        tensor = self._tensors[name]
        return tensor if dim is None else tensor[(slice(None),) * dim + (part,)]
