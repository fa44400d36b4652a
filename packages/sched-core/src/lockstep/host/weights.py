"""The versions of an engine's weights, their sources, and the version with which each token was drawn.

A version is a number that rises. The core includes it in the keys of cached KV. The origin of weights is a `Source`,
which is text in UpdateWeights and therefore in the journal: a restarted engine loads the weights from it.

    tokens of a request     0 1 2 3 4 | 5 6 7 8       weights were replaced once nothing was in flight
    spans                   (0, v1)     (5, v2)       so every token belongs to exactly one version
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol

import msgspec

from lockstep.core.contract.commands import ReleaseDeviceMemory, ResumeDeviceMemory, SwapWeights
from lockstep.core.contract.errors import ConfigError
from lockstep.core.contract.events import (
    ControlRequested,
    MemorySwitched,
    ObservedEvent,
    RequestId,
    UpdateWeights,
    WeightsSwapped,
)
from lockstep.core.scheduler.engine import Engine

# ------------------------------------------------------------------------------------------------------------- sources


class Folder(msgspec.Struct, frozen=True, tag="folder", tag_field="from", forbid_unknown_fields=True):
    """All tensors of a model, in a Hugging Face folder with safetensors."""

    path: str
    stamp: str = ""  # `stamp_of` at the time of the control request; "": files are not checked


class SharedMemory(msgspec.Struct, frozen=True, tag="shared_memory", tag_field="from", forbid_unknown_fields=True):
    """Some or all tensors of a model, in a safetensors file in shared memory: /dev/shm/NAME. Its creator removes it."""

    name: str


class Group(msgspec.Struct, frozen=True, tag="group", tag_field="from", forbid_unknown_fields=True):
    """Tensors that rank 0 of a torch.distributed group broadcasts, in this order. The engine must be in the group."""

    group: str
    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]


Source = Folder | SharedMemory | Group


def write_source(source: Source) -> str:
    """Return a source as text for UpdateWeights."""
    return msgspec.json.encode(source).decode()


def read_source(text: str) -> Source:
    """Read the text of `write_source`; any other text is the path of a folder. Raises ConfigError."""
    if not text.startswith("{"):
        return Folder(text)
    try:
        source: Source = msgspec.json.decode(text, type=Source)
    except msgspec.DecodeError as error:
        raise ConfigError(f"`source` of new weights cannot be read: {error}") from error
    return source


def named(source: Source) -> str:
    """Return a source in words, for messages."""
    match source:
        case Folder(path):
            return path
        case SharedMemory(name):
            return f"shared memory {name}"
        case Group(group):
            return f"the group {group}"


def stamp_of(folder: Path) -> str:
    """Return a digest of the names, sizes and times of a folder's files, which changes when tensors change.

    Raises: ConfigError if the folder has no config.json.
    """
    if not (folder / "config.json").is_file():
        raise ConfigError(f"`{folder}` has no config.json\nhint: give the absolute path of a Hugging Face folder")
    return stamp_of_files(sorted((*folder.glob("*.safetensors*"), folder / "config.json")))


def stamp_of_files(paths: Iterable[Path]) -> str:
    """Return a digest of the names, sizes and times of files."""
    files = [(path.name, path.stat()) for path in paths]
    stamped = "".join(f"{name} {stat.st_size} {stat.st_mtime_ns}\n" for name, stat in files)
    return blake2b(stamped.encode(), digest_size=8).hexdigest()


def check_stamp(source: Folder) -> None:
    """Raise ConfigError if the files of a folder have changed since its stamp."""
    if source.stamp and stamp_of(Path(source.path)) != source.stamp:
        raise ConfigError(
            f"the files in {source.path} have changed since the update was requested\n"
            "hint: write each version into a folder of its own"
        )


def check_lasting(version: int, source: Source) -> None:
    """Raise ConfigError if the weights of an engine before its restart cannot be loaded again."""
    if not isinstance(source, Folder):
        raise ConfigError(
            f"weights {version} of this engine came from {named(source)}, which ended with the engine\n"
            "hint: start with another journal and update again; weights from a folder are loaded again automatically"
        )
    try:
        check_stamp(source)
    except ConfigError as error:
        raise ConfigError(
            f"weights {version} of this engine came from {source.path}, and cannot be loaded again: "
            f"{str(error).partition(chr(10))[0]}\nhint: restore the folder, or start with another journal"
        ) from error


class WeightLoader(Protocol):
    """Changes weights and memory of a device while no batch is in flight. Called in a separate thread, one at a time.

    After a ConfigError the state is unchanged; any other error ends the engine.
    """

    def load_weights(self, version: int, source: str) -> None:
        """Replace the weights. Raises ConfigError; the previous weights are then still in place."""

    def switch_memory(self, tags: tuple[str, ...], *, released: bool) -> None:
        """Release the memory behind tags, or allocate it again. Raises ConfigError; the memory is then unchanged."""


class WeightsRead(msgspec.Struct, frozen=True):
    """Values of one tensor of the weights."""

    name: str
    version: int
    shape: tuple[int, ...]  # of the whole tensor
    dtype: str
    values: list[Any]  # the first rows, nested like the tensor


# ---------------------------------------------------------------------------------------------------- versions by token


class WeightsLog(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """The weights of a host, present and requested; part of its image in snapshots."""

    version: int = 0  # of the weights in place; 0: those with which the engine started
    source: str = ""  # of the weights in place
    requested: dict[int, str] = msgspec.field(default_factory=dict, name="asked")  # sources of later versions
    spans: dict[
        RequestId, list[tuple[int, int]]
    ] = {}  # (first output token, version) of requests that were open at a change

    def fold(self, engine: Engine, event: ObservedEvent) -> bool:
        """Fold an event that the engine has stepped. Returns whether it changed the weights."""
        if isinstance(event, ControlRequested):
            if isinstance(event.control, UpdateWeights) and any(
                job.control_id == event.control_id and job.control == event.control for job in engine.maintenance.jobs
            ):
                self.requested[event.control.version] = event.control.source
            return False
        version = engine.memory.weights_version
        if not isinstance(event, WeightsSwapped) or version == self.version:
            return False
        self.spans = {one: spans for one, spans in self.spans.items() if one in engine.requests}
        for request in engine.requests.values():
            outputs = engine.outputs_of(request)
            spans = self.spans.setdefault(request.request_id, [(0, self.version)])
            while spans and spans[-1][0] >= outputs:  # no token was drawn with the weights of this span
                spans.pop()
            spans.append((outputs, version))
        self.version, self.source = version, self.requested.get(version, "")
        self.requested = {one: source for one, source in self.requested.items() if one > version}
        return True

    def of(self, request_id: RequestId) -> tuple[tuple[int, int], ...]:
        """Return the spans (first output token, version) of a request that is open, or ended after the last change."""
        return tuple(self.spans.get(request_id, ((0, self.version),)))


MaintenanceAnswer = WeightsSwapped | MemorySwitched


def answer_to(
    order: SwapWeights | ReleaseDeviceMemory | ResumeDeviceMemory, error: str, now_us: int
) -> MaintenanceAnswer:
    """Return the event that answers a command about weights or memory of the device."""
    if isinstance(order, SwapWeights):
        return WeightsSwapped(now_us, order.version, error, order.generation)
    return MemorySwitched(now_us, order.tags, isinstance(order, ReleaseDeviceMemory), error, order.generation)
