"""A model as a Hugging Face folder: its settings, its tensors, and all problems with them in one error.

    config.json                      settings
    model.safetensors                all tensors, or
    model.safetensors.index.json     which file holds which tensor: model-00001-of-00004.safetensors, ...

A model requires tensors as a list of `TensorSpec`. `load` compares the whole list with the headers of the files before
it reads the first tensor, and reads only this rank's part of each tensor. No code from a folder can run: tensors come
from safetensors, and the pickles of older folders (`.bin`, `.pt`) are refused.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lockstep.core.contract.errors import ConfigError

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}  # by safetensors' names
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
SHOWN_PROBLEMS = 200
RANDOM_STD = 0.02  # of random weights; the initial standard deviation in the papers of these models
FP8_STD = 64.0  # of random fp8 weights before their scale; 7 * 64 = 448 is the largest e4m3 number


class CheckpointError(ConfigError):
    """A folder, or another source of tensors, that cannot be loaded.

    `problems` holds all problems found, one per line.
    """

    def __init__(self, folder: Path | str, problems: Iterable[str], hint: str = "") -> None:
        self.problems = tuple(problems)
        shown = [f"  {problem}" for problem in self.problems[:SHOWN_PROBLEMS]]
        if more := len(self.problems) - len(shown):
            shown.append(f"  and {more:,} more")
        what = "problem" if len(self.problems) == 1 else "problems"
        text = "\n".join([f"`{folder}` cannot be loaded, {len(self.problems):,} {what}:", *shown])
        super().__init__(text + (f"\nhint: {hint}" if hint else ""))


# ------------------------------------------------------------------------------------------------------ tensors to read


@dataclass(frozen=True, slots=True)
class TensorSplit:
    """The part of a tensor that a tensor-parallel rank keeps: a run of whole units along `dim`.

    units 4, ranks 2    [ 0 1 | 2 3 ]
    units 2, ranks 4    [ 0 | 0 | 1 | 1 ]      with `replicate` (kv heads)
    units None          [ even | even | even, padded ]    for a vocabulary, which the number of ranks need not divide
    """

    dim: int | None = None  # None: every rank keeps all of it
    units: int | None = 1
    replicate: bool = False

    def local(self, total: int, ranks: int, what: str) -> int:
        """Return the length of a rank's part of `total`, padding included.

        Raises ConfigError if the units cannot be split.
        """
        if self.dim is None:
            return total
        if self.units is None:
            return -(-total // ranks)
        if self.units % ranks == 0:
            return total // ranks
        if self.replicate and ranks % self.units == 0:
            return total // self.units
        raise ConfigError(
            f"the {self.units} units of `{what}` cannot be split over {ranks} ranks\n"
            f"hint: choose a number of ranks that divides {self.units}"
        )

    def shard(self, total: int, rank: int, ranks: int) -> slice:
        """Return the rank's part of `total`, without padding."""
        size = self.local(total, ranks, "tensor")
        if self.dim is None:
            return slice(0, total)
        index = rank if self.units is None or self.units % ranks == 0 else rank * self.units // ranks
        return slice(min(index * size, total), min((index + 1) * size, total))


WHOLE = TensorSplit()


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor that a checkpoint must hold, and the destination of this rank's part.

    `into` is a view of a parameter: several tensors of a checkpoint may fill one parameter.
    """

    name: str
    shape: tuple[int, ...]  # in the checkpoint, of all ranks together
    into: Tensor
    split: TensorSplit = WHOLE
    initial: float | None = None  # with random weights: this value everywhere; None draws them
    dtypes: tuple[str, ...] = tuple(DTYPES)  # dtypes that it may be stored in, by safetensors' names
    also: tuple[int, ...] | None = None  # an alternative shape
    optional: bool = False  # if the checkpoint lacks it, the tensor keeps its values
    convert: Callable[[Tensor], Tensor] | None = None  # applied to this rank's stored part; ValueError: the problem


# --------------------------------------------------------------------------------------------------------- the folder


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor as the header of a file describes it."""

    file: str
    shape: tuple[int, ...]
    dtype: str  # safetensors' name

    def __str__(self) -> str:
        return _shaped(self.shape, self.dtype)


class TensorFile:
    """One open safetensors file. Raises CheckpointError if the file is not in that format.

    Args:
        called: the name of the file in errors.
    """

    def __init__(self, path: Path, called: str) -> None:
        self.folder = called
        self._closing = contextlib.ExitStack()
        try:
            self._file: Any = self._closing.enter_context(safe_open(path, framework="pt"))
            facts = {name: self._file.get_slice(name) for name in self._file.keys()}  # noqa: SIM118, it is no mapping
        except (OSError, SafetensorError) as error:
            self.close()
            raise CheckpointError(called, [str(error)], "write it with safetensors' `save_file`") from None
        self.stored = {
            name: StoredTensor(called, tuple(fact.get_shape()), fact.get_dtype()) for name, fact in facts.items()
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._closing.close()

    def read(self, name: str, dim: int | None = None, part: slice | None = None) -> Tensor:
        """Return a tensor, or a part of it; see `Checkpoint.read`."""
        return _read(self._file, name, dim, part)


def _read(file: Any, name: str, dim: int | None, part: slice | None) -> Tensor:
    view = file.get_slice(name)
    tensor: Tensor
    if dim is not None:
        tensor = view[(slice(None),) * dim + (part,)]
    else:
        tensor = view[:] if view.get_shape() else file.get_tensor(name)  # a single number cannot be sliced
    return tensor


class Checkpoint:
    """An open folder. All headers are read when it is opened, tensors when they are requested.

    Raises: CheckpointError if files are missing, damaged, contradict each other, or are pickles.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = read_config(folder)
        self.stored: dict[str, StoredTensor] = {}
        self._open: dict[str, Any] = {}
        self._closing = contextlib.ExitStack()
        try:
            self._read_headers()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the files. Tensors that were read stay valid."""
        self._closing.close()
        self._open.clear()

    def read(self, name: str, dim: int | None = None, part: slice | None = None) -> Tensor:
        """Return a stored tensor on the CPU, or `part` of it along `dim`: a view of the mapped file, read on use."""
        return _read(self._open[self.stored[name].file], name, dim, part)

    def _read_headers(self) -> None:
        placed, problems = self._files()
        for file, names in placed.items():
            try:
                self._open[file] = self._closing.enter_context(safe_open(self.folder / file, framework="pt"))
                found = set(self._open[file].keys())
                facts = {name: self._open[file].get_slice(name) for name in found}
            except (OSError, SafetensorError) as error:
                problems.append(f"{file}: {error}")
                continue
            for name in sorted(found if names is None else found & names):
                self.stored[name] = StoredTensor(file, tuple(facts[name].get_shape()), facts[name].get_dtype())
            problems += [
                f"{name}: {INDEX} says it is in {file}, which lacks it" for name in sorted((names or found) - found)
            ]
        if problems:
            raise CheckpointError(self.folder, problems, "files that were cut short or mixed up: copy the folder again")

    def _files(self) -> tuple[dict[str, set[str] | None], list[str]]:
        """Return the tensor names expected in each file (None: all that the file holds), and the problems found."""
        if (self.folder / SINGLE).is_file():
            return {SINGLE: None}, []
        if not (self.folder / INDEX).is_file():
            pickles = sorted(path.name for pattern in PICKLES for path in self.folder.glob(pattern))
            if pickles:
                raise CheckpointError(
                    self.folder,
                    [
                        f"{name} is a pickle, which may run code when it is read; only safetensors are read"
                        for name in pickles
                    ],
                    "many models also come as safetensors; transformers' `save_pretrained` writes them",
                )
            raise CheckpointError(self.folder, [f"neither {SINGLE} nor {INDEX} is there"])
        index = read_json(self.folder, INDEX)
        weight_map = index.get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(self.folder, [f"{INDEX} has no `weight_map` of tensors to files"])
        placed: dict[str, set[str] | None] = {}
        for name, file in weight_map.items():
            expected = placed.setdefault(str(file), set())
            assert expected is not None
            expected.add(name)
        problems = []
        for file in sorted(placed):
            if Path(file).name != file:
                problems.append(f"{INDEX} names `{file}`, which is not a file of this folder")
                del placed[file]
            elif not (self.folder / file).is_file():
                problems.append(f"{file} is missing, with {len(placed[file] or ()):,} tensors")
                del placed[file]
        return dict(sorted(placed.items())), problems


def read_config(folder: Path) -> dict[str, Any]:
    """Return the content of config.json. Raises CheckpointError if it cannot be read."""
    if not folder.is_dir():
        raise CheckpointError(folder, ["there is no such folder"], "name a folder with config.json and safetensors")
    return read_json(folder, "config.json")


def read_generation_config(folder: Path) -> dict[str, Any]:
    """Return the content of generation_config.json; empty if there is none.

    Raises CheckpointError if it cannot be read.
    """
    return read_json(folder, "generation_config.json") if (folder / "generation_config.json").exists() else {}


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """Return a JSON object from a file of a folder. Raises CheckpointError."""
    try:
        data = json.loads((folder / name).read_bytes())
    except FileNotFoundError:
        raise CheckpointError(folder, [f"{name} is missing"]) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(folder, [f"{name}: {error}"]) from None
    if not isinstance(data, dict):
        raise CheckpointError(folder, [f"{name} must hold a JSON object, got {type(data).__name__}"])
    return data


# ------------------------------------------------------------------------------------------------------------- filling


class Tensors(Protocol):
    """A source of tensors: a checkpoint, a file, or weights that a trainer sends."""

    @property
    def folder(self) -> Path | str:
        """The name of the source in errors."""

    @property
    def stored(self) -> Mapping[str, StoredTensor]:
        """The stored tensors by name."""

    def read(self, name: str, dim: int | None = None, part: slice | None = None) -> Tensor:
        """Return a tensor, or `part` of it along `dim`."""


def load(
    wanted: Iterable[TensorSpec],
    checkpoint: Tensors,
    *,
    rank: int = 0,
    ranks: int = 1,
    surplus: Callable[[str], bool] = lambda name: False,
) -> None:
    """Fill the tensors of a model from a checkpoint.

    Args:
        surplus: returns whether a checkpoint may hold a name that the model does not need.
    Raises: CheckpointError with every missing, surplus, wrongly shaped or wrongly typed tensor, before any tensor is
        read; or with every tensor that has values outside the range of the model's dtype.
    """
    found = _compared(wanted, checkpoint, surplus, partial=False)
    problems: list[str] = []
    for want in found:
        tensor = _read_part(want, checkpoint, rank, ranks, problems, want.into.device)
        if not problems:
            _place(tensor, want)
    if problems:
        raise CheckpointError(checkpoint.folder, problems, _hint(problems, "load it as bfloat16 or float32"))


@dataclass(frozen=True, slots=True)
class Staged:
    """Tensors that were read and not yet copied into a model, in the model's dtype, on the CPU."""

    parts: list[tuple[Tensor, TensorSpec]]

    def place(self) -> None:
        """Copy the tensors into the model. Nothing is read from the source any more."""
        for tensor, want in self.parts:
            _place(tensor, want)


def stage(
    wanted: Iterable[TensorSpec],
    source: Tensors,
    *,
    rank: int = 0,
    ranks: int = 1,
    surplus: Callable[[str], bool] = lambda name: False,
    partial: bool = False,
) -> Staged:
    """Read and check tensors as `load` does, but leave the model unchanged until `Staged.place`.

    Args:
        partial: whether a subset of the tensors, at least one, suffices.
    """
    found = _compared(wanted, source, surplus, partial=partial)
    problems: list[str] = []
    parts = [(_read_part(want, source, rank, ranks, problems).to(want.into.dtype, copy=True), want) for want in found]
    if problems:
        raise CheckpointError(source.folder, problems, _hint(problems, "start the engine with bfloat16 or float32"))
    return Staged(parts)


def _compared(
    wanted: Iterable[TensorSpec], source: Tensors, surplus: Callable[[str], bool], *, partial: bool
) -> list[TensorSpec]:
    """Return the tensors to read, ordered by file. Raises CheckpointError with all problems."""
    by_name = {want.name: want for want in wanted}
    there = source.stored
    looked_at = [want for want in by_name.values() if not (partial or want.optional) or want.name in there]
    problems = [problem for want in looked_at if (problem := _mismatch(want, there.get(want.name)))]
    problems += [
        f"{name}: not a tensor of this model, found {stored}"
        for name, stored in sorted(there.items())
        if name not in by_name and not surplus(name)
    ]
    if not looked_at and not problems:
        problems.append("there is no tensor in it")
    if problems:
        raise CheckpointError(source.folder, problems, "config.json and the tensors must be of one model")
    return sorted(looked_at, key=lambda want: (there[want.name].file, want.name))


def _read_part(
    want: TensorSpec, source: Tensors, rank: int, ranks: int, problems: list[str], device: torch.device | None = None
) -> Tensor:
    """Return this rank's part of a tensor; add values outside the model's range to `problems`.

    Args:
        device: the device for `TensorSpec.convert`; None: the CPU.
    """
    split = want.split
    if split.dim is None:
        tensor = source.read(want.name)
    else:
        tensor = source.read(want.name, split.dim, split.shard(want.shape[split.dim], rank, ranks))
    if want.into.dtype == torch.float16 and tensor.dtype != torch.float16 and not _fits_float16(tensor):
        problems.append(f"{want.name}: {TOO_LARGE}")
    if want.convert is not None:
        try:
            tensor = want.convert(tensor if device is None else tensor.to(device))
        except ValueError as error:
            problems.append(f"{want.name}: {error}")
    return tensor


TOO_LARGE = "holds values above 65,504, the largest of float16"


def _hint(problems: Iterable[str], narrower: str) -> str:
    return narrower if any(problem.endswith(TOO_LARGE) for problem in problems) else ""


def fill_randomly(wanted: Iterable[TensorSpec], seed: int, *, rank: int = 0, ranks: int = 1) -> None:
    """Fill the tensors of a model with small random values instead of a checkpoint's.

    A tensor's values depend on seed, name, shape and kind of device. They do not depend on other tensors or on the
    number of ranks.
    """
    for want in wanted:
        if want.optional or want.initial is not None:
            if want.initial is not None:
                want.into.fill_(want.initial)
            continue
        digest = hashlib.blake2b(f"{seed}/{want.name}".encode(), digest_size=8).digest()
        generator = torch.Generator(device=want.into.device)
        generator.manual_seed(int.from_bytes(digest, "little") >> 1)
        if want.into.dtype == torch.int32:  # packed integers: every bit is random
            tensor = torch.empty(want.shape, dtype=torch.int32, device=want.into.device)
            tensor.random_(-(2**31), 2**31, generator=generator)
        else:
            tensor = torch.empty(want.shape, dtype=torch.float32, device=want.into.device)
            tensor.normal_(0.0, FP8_STD if want.into.dtype == torch.float8_e4m3fn else RANDOM_STD, generator=generator)
        if want.split.dim is not None:
            part = want.split.shard(want.shape[want.split.dim], rank, ranks)
            tensor = tensor.narrow(want.split.dim, part.start, part.stop - part.start)
        _place(tensor if want.convert is None else want.convert(tensor), want)


def _mismatch(want: TensorSpec, stored: StoredTensor | None) -> str | None:
    expected = _shaped(want.shape, "/".join(want.dtypes))
    if stored is None:
        return f"{want.name}: missing, expected {expected}"
    if stored.shape not in (want.shape, want.also) or stored.dtype not in want.dtypes:
        return f"{want.name}: expected {expected}, found {stored}"
    return None


def _place(tensor: Tensor, want: TensorSpec) -> None:
    """Copy a tensor to its destination; fill the rest of a padded part with zeros."""
    into = want.into
    if into.shape != tensor.shape:
        assert want.split.dim is not None
        assert want.split.units is None
        length = tensor.shape[want.split.dim]
        into.narrow(want.split.dim, length, into.shape[want.split.dim] - length).zero_()
        into = into.narrow(want.split.dim, 0, length)
    into.copy_(tensor)


def _fits_float16(tensor: Tensor) -> bool:
    return bool(tensor.float().abs().max() <= torch.finfo(torch.float16).max) if tensor.numel() else True


def _shaped(shape: tuple[int, ...], dtype: str) -> str:
    return f"[{', '.join(map(str, shape))}] {dtype}"
