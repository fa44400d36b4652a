"""Replaces the weights of a serving model, and releases its memory for a time: `lockstep.host.weights.WeightLoader`.

    prepare(source)   compare names, shapes and settings, read everything      on all ranks; the model is not changed
    commit()          copy the new weights over the old ones                   on all ranks, once all have prepared

`prepare` reads into CPU memory. So a file that is cut short or does not fit changes nothing, and no two ranks have
different weights. An update therefore needs the size of the weights once more in CPU memory.

Memory: tensors keep their shapes and lose their storage. The KV is void by then. Weights are kept meanwhile: a GPU's in
CPU memory, a CPU's in an unnamed file of the system's temporary folder. CUDA graphs contain addresses, so with them a
GPU's memory can only be released by a `MemorySaver`, which keeps the addresses.
"""

from __future__ import annotations

import ctypes
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import fields
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from lockstep.core.contract.errors import ConfigError
from lockstep.host.weights import Folder, Group, SharedMemory, Source, WeightsRead, check_stamp, named, read_source
from lockstep.runtime.checkpoint import Checkpoint, CheckpointError, Staged, TensorFile, Tensors, stage
from lockstep.runtime.executor import Executor
from lockstep.runtime.memory_saver import MemorySaver
from lockstep.runtime.models import LanguageModel, ModelSettings, read_settings
from lockstep.runtime.models.packed import pack_matrices, packed_bytes, unpack_matrices
from lockstep.runtime.tiers.identity import digest_of_source
from lockstep.runtime.tiers.mover import HostMover
from lockstep.runtime.weights_group import Backend, Received, WeightsGroup, check_backend

SHARED_MEMORY = Path("/dev/shm")  # the folder of POSIX shared memory on Linux
MAY_DIFFER = frozenset({"dtype", "end_tokens", "context_tokens"})  # settings that are fixed when an engine starts
VALUES_MAX = 1 << 20  # most values that one request can read


# mechanism: weights-and-memory (executed)
class LiveModel:
    """The weights and the memory of one rank, or of a whole engine."""

    def __init__(self, model: LanguageModel, executor: Executor, mover: HostMover | None = None) -> None:
        self.mover = mover
        self._digest = b""  # of the prepared weights, which names pages in storage
        self.model, self.executor, self.pool = model, executor, executor.attention.pool
        self.version = 0
        self._wanted = list(model.tensors())  # views, which cannot be made while the memory is released
        self._staged: Staged | None = None
        self._groups: dict[str, WeightsGroup] = {}
        self._kept: _ReleasedTensor | None = None  # the weights, while their memory is released
        self._packed = False  # whether they had packed copies when it was
        self._lock = threading.Lock()  # a reader of weights must not see half of an update

    # ------------------------------------------------------------------------------------------------------ weights

    def load_weights(self, version: int, source: str) -> None:
        """Prepare and commit new weights, on an engine with one rank."""
        self.prepare(source)
        self.commit(version)

    def prepare(self, source: str) -> None:
        """Read and check new weights; the current ones stay in use. Raises ConfigError."""
        self._staged = None
        where = read_source(source)
        parallel, model = self.model.parallel, self.model
        with self._opened(where) as tensors, torch.no_grad():
            wanted = model.named_as(tensors.stored.keys(), self._wanted)
            try:
                self._staged = stage(
                    wanted,
                    tensors,
                    rank=parallel.rank,
                    ranks=parallel.ranks,
                    surplus=model.surplus,
                    partial=not isinstance(where, Folder),
                )
            except (OSError, MemoryError, RuntimeError) as error:
                reason = str(error).partition("\n")[0]
                raise CheckpointError(tensors.folder, [f"{type(error).__name__}: {reason}"]) from error
        if self.mover is not None and self.mover.store_counts is not None:
            self._digest = digest_of_source(where)

    @contextmanager
    def _opened(self, source: Source) -> Iterator[Tensors]:
        """Open the source of the tensors. Raises ConfigError."""
        opened: AbstractContextManager[Tensors]
        match source:
            case Folder(path):
                check_stamp(source)
                check_settings(Path(path), self.model.settings, self.model.parallel.ranks)
                opened = Checkpoint(Path(path))
            case SharedMemory(name):
                if Path(name).name != name or not (SHARED_MEMORY / name).is_file():
                    raise ConfigError(f"there is no shared memory called {name!r} in {SHARED_MEMORY}")
                opened = TensorFile(SHARED_MEMORY / name, named(source))
            case Group(name, names, dtypes, shapes):
                if name not in self._groups:
                    raise ConfigError(f"this engine has joined no group {name!r}")
                opened = Received(self._groups[name], names, dtypes, shapes)
        with opened as tensors:
            yield tensors

    def join_group(self, name: str, address: str, port: int, rank: int, ranks: int, backend: Backend = "gloo") -> None:
        """Connect to the group of a trainer, which sends weights. Raises ConfigError."""
        check_backend(backend, self.model.device)
        if self.model.is_part:
            raise ConfigError("an engine of several ranks joins no group\nhint: update it from a folder")
        if name in self._groups:
            raise ConfigError(f"this engine is in the group {name!r} already\nhint: leave it first")
        self._groups[name] = WeightsGroup(address, port, rank, ranks, name, backend=backend, device=self.model.device)

    def leave_group(self, name: str) -> None:
        """Leave a group. Raises ConfigError if this engine has not joined it."""
        if name not in self._groups:
            raise ConfigError(f"this engine has joined no group {name!r}")
        self._groups.pop(name).close()

    def commit(self, version: int) -> None:
        """Copy the prepared weights into the model."""
        staged, self._staged = self._staged, None
        assert staged is not None
        lane = self.executor.lane
        with self._lock, lane.stream(), torch.no_grad():
            staged.place()
            if packed_bytes(self.model):
                pack_matrices(self.model)
            lane.check()  # wait until all weights are in place, before anything is launched
            self.version = version
        if self.mover is not None:
            self.mover.use_weights(self._digest)

    def discard(self) -> None:
        """Drop the prepared weights."""
        self._staged = None

    def read(self, name: str, rows: int) -> WeightsRead:
        """Return the first rows of a tensor, by its name in a checkpoint. Raises ConfigError."""
        if self.model.is_part:
            raise ConfigError(
                "weights are split over the ranks, of which no one has all\nhint: read them without `tp` and `pp`"
            )
        found = {want.name: want.into for want in self._wanted}
        if name not in found:
            raise ConfigError(
                f"`name` is {name!r}, which is no tensor of this model\nhint: {', '.join(list(found)[:3])}"
            )
        tensor = found[name]
        rows = min(rows, len(tensor))
        values = rows * (tensor.numel() // max(len(tensor), 1))
        if values > VALUES_MAX:
            raise ConfigError(
                f"{rows} rows of `{name}` are {values:,} values, at most {VALUES_MAX:,} are read"
                "\nhint: a smaller truncate_size"
            )
        with self._lock:
            if self._weights_released():
                raise ConfigError("the memory of the weights is released\nhint: resume it first")
            some, dtype = tensor[:rows].float().cpu().tolist(), str(tensor.dtype).removeprefix("torch.")
            return WeightsRead(name, self.version, tuple(tensor.shape), dtype, some)

    # ------------------------------------------------------------------------------------------------------- memory

    def switch_memory(self, tags: Sequence[str], *, released: bool) -> None:
        """Release memory, or allocate it again. Raises ConfigError."""
        gpu = self.model.device.type == "cuda"
        captured = self.executor.graphs is not None or self.executor.pieces is not None
        if released and gpu and captured and self.model.saver is None:
            raise ConfigError(
                "memory cannot be given back, as CUDA graphs hold its addresses\n"
                "hint: start with --memory-saver, which keeps them, or with --cuda-graphs off"
            )
        lane = self.executor.lane
        with self._lock, lane.stream(), torch.no_grad():
            lane.check()
            if "kv_cache" in tags and self.executor.canary is not None:
                self.executor.canary.forget()
            if self.model.saver is not None:
                self._switch_in_place(self.model.saver, tags, released=released)
            else:
                self._switch_storage(tags, released=released)
            lane.check()
        if released and gpu:
            torch.cuda.empty_cache()

    def _weights_released(self) -> bool:
        saver = self.model.saver
        return self._kept is not None if saver is None else saver.memory["weights"].is_released

    def _switch_in_place(self, saver: MemorySaver, tags: Sequence[str], *, released: bool) -> None:
        """Release memory, or allocate it again at the same addresses."""
        if released:
            saver.release(tags)
            return
        if "weights" in tags:
            with _room("the weights"):
                saver.resume("weights")
        if "kv_cache" in tags:
            with _room("the KV cache"):
                saver.resume("kv_cache")
            self.pool.clear()

    def _switch_storage(self, tags: Sequence[str], *, released: bool) -> None:
        """Release memory, or allocate it again, at any addresses."""
        if "weights" in tags and released:
            self._packed = unpack_matrices(self.model)
            self._kept = _ReleasedTensor(self.model.parameters())
        elif "weights" in tags and self._kept is not None:
            with _room("the weights"):
                self._kept.put_back()
                if self._packed:
                    pack_matrices(self.model)
            self._kept = None
        if "kv_cache" in tags:
            if released:
                self.pool.release()
            else:
                with _room("the KV cache"):
                    self.pool.resume()

    def close(self) -> None:
        """Drop the pages and the kept weights; their memory is not allocated again."""
        self.pool.close()
        if self._kept is not None:
            self._kept.close()


# -------------------------------------------------------------------------------------------- where they come from


def check_settings(folder: Path, running: ModelSettings, ranks: int = 1) -> None:
    """Raise ConfigError with every setting in which the model of a folder differs from the running one."""
    there = read_settings(folder, ranks, running.backend)
    compared = {
        one.name: (getattr(there, one.name), getattr(running, one.name))
        for one in fields(ModelSettings)
        if one.name not in MAY_DIFFER
    }
    described, runs = map(dict, compared.pop("described"))
    compared |= {name: (described.get(name), runs.get(name)) for name in sorted(described | runs)}
    wrong = [
        f"`{name}` is {new}, and of the model that runs {old}" for name, (new, old) in compared.items() if new != old
    ]
    if wrong:
        raise CheckpointError(folder, wrong, "new weights must be of the same model")


# --------------------------------------------------------------------------------------------------------------- memory


class _ReleasedTensor:
    """The content of tensors whose memory is released. Raises ConfigError if there is no room for it."""

    def __init__(self, tensors: Iterator[Tensor]) -> None:
        by_address = {one.untyped_storage().data_ptr(): one.untyped_storage() for one in tensors}
        self._storages = list(by_address.values())
        self._sizes = [storage.nbytes() for storage in self._storages]
        self._copies: list[Tensor] = []
        self._file: IO[bytes] | None = None
        if self._storages[0].device.type == "cpu":
            try:
                self._file = tempfile.TemporaryFile()  # noqa: SIM115, it lives as long as this
                for storage in self._storages:
                    self._file.write(_in_place(storage))
                self._file.flush()
            except OSError as error:
                if self._file is not None:
                    self._file.close()
                raise ConfigError(
                    f"the weights, {sum(self._sizes):,} bytes, cannot be kept in {tempfile.gettempdir()}: {error}\n"
                    "hint: TMPDIR names another folder"
                ) from error
        else:
            self._copies = [_bytes(storage).cpu() for storage in self._storages]
        for storage in self._storages:
            storage.resize_(0)

    def put_back(self) -> None:
        """Allocate the memory and restore the content.

        Raises RuntimeError without memory; the content is then still kept.
        """
        try:
            for storage, size in zip(self._storages, self._sizes, strict=True):
                storage.resize_(size)
        except RuntimeError:
            for storage in self._storages:
                storage.resize_(0)
            raise
        for number, storage in enumerate(self._storages):
            if self._file is None:
                _bytes(storage).copy_(self._copies[number])
        if self._file is not None:
            self._file.seek(0)
            for storage in self._storages:
                view = _in_place(storage)
                at = 0
                while at < len(view):
                    read = self._file.readinto(view[at:])  # type: ignore[attr-defined]
                    if not read:
                        raise OSError("the file in which the weights were kept is cut short")
                    at += read
        self.close()

    def close(self) -> None:
        """Drop the content."""
        self._copies = []
        if self._file is not None:
            self._file.close()


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _in_place(storage: torch.UntypedStorage) -> memoryview:
    """Return the bytes of a CPU storage. A storage that was viewed as a numpy array could not be resized any more."""
    return memoryview((ctypes.c_ubyte * storage.nbytes()).from_address(storage.data_ptr())).cast("B")


@contextmanager
def _room(what: str) -> Iterator[None]:
    """Raise ConfigError if the memory for `what` cannot be allocated."""
    try:
        yield
    except (torch.cuda.OutOfMemoryError, MemoryError) as error:
        raise ConfigError(
            f"there is no memory for {what} now\nhint: free memory in the processes that use it first"
        ) from error
    except RuntimeError as error:
        if "memory" not in str(error):
            raise
        raise ConfigError(
            f"there is no memory for {what} now\nhint: free memory in the processes that use it first"
        ) from error
