"""The versions of an engine's weights, their sources, and the version with which each token was drawn.

A version is a number that rises; the core puts it into the keys of cached KV. The origin of weights is a `Source`,
which travels as text in UpdateWeights and so is in the journal: an engine that begins again loads the weights from
there.

    tokens of a request     0 1 2 3 4 | 5 6 7 8       weights were replaced once nothing was in flight
    spans                   (0, v1)     (5, v2)       so every token belongs to exactly one version
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol

import msgspec

from lockstep.core.contract.errors import ConfigError
from lockstep.core.contract.events import ControlRequested, ObservedEvent, RequestId, UpdateWeights, WeightsSwapped
from lockstep.core.scheduler.engine import Engine

# ------------------------------------------------------------------------------------------------------- where they lie


class Folder(msgspec.Struct, frozen=True, tag="folder", tag_field="from", forbid_unknown_fields=True):
    """All tensors of a model, in a Hugging Face folder with safetensors."""

    path: str
    stamp: str = ""  # of its files when it was named, see `stamp_of`; "" where they are not checked


class SharedMemory(msgspec.Struct, frozen=True, tag="shared_memory", tag_field="from", forbid_unknown_fields=True):
    """Some tensors or all, as a safetensors file in shared memory: /dev/shm/NAME. Its creator removes it."""

    name: str


class Group(msgspec.Struct, frozen=True, tag="group", tag_field="from", forbid_unknown_fields=True):
    """Tensors that rank 0 of a torch.distributed group broadcasts, in this order; the engine has joined before."""

    group: str
    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]


Source = Folder | SharedMemory | Group


def write_source(source: Source) -> str:
    """A source as UpdateWeights has it."""
    return msgspec.json.encode(source).decode()


def read_source(text: str) -> Source:
    """What `write_source` wrote; other text is a folder. Raises ConfigError."""
    if not text.startswith("{"):
        return Folder(text)
    try:
        source: Source = msgspec.json.decode(text, type=Source)
    except msgspec.DecodeError as error:
        raise ConfigError(f"`source` of new weights cannot be read: {error}") from error
    return source


def named(source: Source) -> str:
    """A source in words."""
    match source:
        case Folder(path):
            return path
        case SharedMemory(name):
            return f"shared memory {name}"
        case Group(group):
            return f"the group {group}"


def stamp_of(folder: Path) -> str:
    """What tells whether a folder's tensors are those of before, without reading them: names, sizes and times of files.

    Raises: ConfigError if it is no folder of a model.
    """
    if not (folder / "config.json").is_file():
        raise ConfigError(f"`{folder}` has no config.json\nhint: give a Hugging Face folder, by its whole path")
    return stamp_of_files(sorted((*folder.glob("*.safetensors*"), folder / "config.json")))


def stamp_of_files(paths: Iterable[Path]) -> str:
    """A digest of their names, sizes and times."""
    files = [(path.name, path.stat()) for path in paths]
    stamped = "".join(f"{name} {stat.st_size} {stat.st_mtime_ns}\n" for name, stat in files)
    return blake2b(stamped.encode(), digest_size=8).hexdigest()


def check_stamp(source: Folder) -> None:
    """Raise ConfigError where the files of a folder are not those that there were when it was named."""
    if source.stamp and stamp_of(Path(source.path)) != source.stamp:
        raise ConfigError(
            f"the files in {source.path} are not those that were there when the update was asked for\n"
            "hint: write each version into a folder of its own"
        )


def check_lasting(version: int, source: Source) -> None:
    """Raise ConfigError where weights are gone that an engine had before it began again."""
    if not isinstance(source, Folder):
        raise ConfigError(
            f"weights {version}, which this engine had, came from {named(source)} and ended with it\n"
            "hint: begin with another journal and update again; weights from a folder are loaded again by themselves"
        )
    try:
        check_stamp(source)
    except ConfigError as error:
        raise ConfigError(
            f"weights {version}, which this engine had, came from {source.path}, and cannot be loaded again: "
            f"{str(error).partition(chr(10))[0]}\nhint: put the folder back as it was, or begin with another journal"
        ) from error


class WeightLoader(Protocol):
    """What a host can do to its device while nothing is in flight. Called in a thread of its own, one at a time.

    After a ConfigError the state is unchanged; any other error ends the engine.
    """

    def load_weights(self, version: int, source: str) -> None:
        """Put other weights in place. Raises ConfigError; then those before are in place."""

    def switch_memory(self, tags: tuple[str, ...], *, released: bool) -> None:
        """Give the memory behind tags back, or take it again. Raises ConfigError; then it is as it was."""


class WeightsRead(msgspec.Struct, frozen=True):
    """Values of one tensor."""

    name: str
    version: int
    shape: tuple[int, ...]  # of all of it
    dtype: str
    values: list[Any]  # its first rows, nested as it is


# ---------------------------------------------------------------------------------------------------- versions by token


class WeightsLog(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """The weights of a host; part of its image in snapshots."""

    version: int = 0  # in place; 0: those that the engine began with
    source: str = ""  # of these
    requested: dict[int, str] = msgspec.field(default_factory=dict, name="asked")  # sources of later versions
    spans: dict[
        RequestId, list[tuple[int, int]]
    ] = {}  # (first output token, version) of requests that were open at a change

    def fold(self, engine: Engine, event: ObservedEvent) -> bool:
        """Follow an event that the engine has stepped. Returns whether there are other weights since."""
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
            while spans and spans[-1][0] >= outputs:  # no token was drawn with those
                spans.pop()
            spans.append((outputs, version))
        self.version, self.source = version, self.requested.get(version, "")
        self.requested = {one: source for one, source in self.requested.items() if one > version}
        return True

    def of(self, request_id: RequestId) -> tuple[tuple[int, int], ...]:
        """(first output token, version) of a request that is open, or ended since weights were last replaced."""
        return tuple(self.spans.get(request_id, ((0, self.version),)))
