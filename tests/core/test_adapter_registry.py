"""Adapters and weights of an engine by their sources: where they come from, and what a restarted engine reads again."""

from __future__ import annotations

import os
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lockstep.core.contract.commands import ControlAnswered, ReleaseDeviceMemory, ResumeDeviceMemory, SwapWeights
from lockstep.core.contract.errors import ConfigError
from lockstep.core.contract.events import LoadAdapterControl, MemorySwitched, UnloadAdapterControl, WeightsSwapped
from lockstep.host.adapters import (
    CONFIG,
    TENSORS,
    AdapterRegistry,
    AdaptersLog,
    Entry,
    KnownAdapters,
    folder_of,
    named_folders,
    path_of,
    source_of,
)
from lockstep.host.weights import (
    Folder,
    Group,
    SharedMemory,
    answer_to,
    check_lasting,
    check_stamp,
    named,
    read_source,
    stamp_of,
    write_source,
)

# ------------------------------------------------------------------------------------------------------------- sources

GROUP = Group("train", ("w", "b"), ("bfloat16", "float32"), ((2, 3), (3,)))


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (Folder("/models/a", "12"), "/models/a"),
        (SharedMemory("new"), "shared memory new"),
        (GROUP, "the group train"),
    ],
)
def test_a_source_is_read_as_it_was_written(source: Any, words: str) -> None:
    assert read_source(write_source(source)) == source
    assert named(source) == words


def test_any_other_text_is_the_path_of_a_folder() -> None:
    assert read_source("/models/a") == Folder("/models/a")
    with pytest.raises(ConfigError, match="`source` of new weights cannot be read"):
        read_source("{}")
    assert path_of("/models/a") == "/models/a"
    assert path_of(write_source(Folder("/models/b", "7"))) == "/models/b"
    assert path_of(text := write_source(SharedMemory("new"))) == text


def test_a_stamp_changes_with_the_tensors_of_a_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        stamp_of(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    stamps = [stamp_of(tmp_path)]
    (tmp_path / "model.safetensors").write_bytes(b"1")
    stamps.append(stamp_of(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"12")
    stamps.append(stamp_of(tmp_path))
    os.utime(tmp_path / "model.safetensors", ns=(0, 5))
    stamps.append(stamp_of(tmp_path))
    (tmp_path / "notes.txt").write_text("not read")
    assert stamp_of(tmp_path) == stamps[-1]
    assert len(set(stamps)) == 4
    check_stamp(Folder(str(tmp_path)))
    check_stamp(Folder(str(tmp_path), stamps[-1]))
    with pytest.raises(ConfigError, match="have changed since the update was requested"):
        check_stamp(Folder(str(tmp_path), stamps[0]))


def test_weights_that_ended_with_their_engine_cannot_be_loaded_again(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    check_lasting(3, Folder(str(tmp_path), stamp_of(tmp_path)))
    with pytest.raises(ConfigError, match="weights 3 of this engine came from the group train, which ended"):
        check_lasting(3, GROUP)
    with pytest.raises(
        ConfigError, match=r"cannot be loaded again: the files in .* have changed since .*\nhint: restore"
    ):
        check_lasting(3, Folder(str(tmp_path), "other"))


def test_an_order_about_the_device_has_one_answer() -> None:
    assert answer_to(SwapWeights(4, "x", 2), "", 9) == WeightsSwapped(9, 4, "", 2)
    assert answer_to(ReleaseDeviceMemory(("kv",), 2), "no", 9) == MemorySwitched(9, ("kv",), True, "no", 2)
    assert answer_to(ResumeDeviceMemory(("kv",), 2), "", 9) == MemorySwitched(9, ("kv",), False, "", 2)


# ------------------------------------------------------------------------------------------------------------ adapters


def adapter(folder: Path, size: int = 1) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / CONFIG).write_text("{}")
    (folder / TENSORS).write_bytes(bytes(size))
    return folder


def test_the_folder_of_an_adapter_must_stay_as_it_was_loaded(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"has no {CONFIG}"):
        source_of(tmp_path / "law")
    source = source_of(adapter(tmp_path / "law"))
    assert folder_of(source) == tmp_path / "law"
    assert folder_of(str(tmp_path / "law")) == tmp_path / "law"  # of an old journal, without a stamp
    adapter(tmp_path / "law", 2)
    with pytest.raises(ConfigError, match="have changed since the adapter was loaded"):
        folder_of(source)
    with pytest.raises(ConfigError, match="an adapter comes from a folder"):
        folder_of(write_source(SharedMemory("new")))


def test_named_adapters_of_a_command_line() -> None:
    assert named_folders(["law=/a", "art=/b=c"]) == {"law": "/a", "art": "/b=c"}
    for wrong in ("law", "=/a", "law="):
        with pytest.raises(ConfigError, match=f"`lora` needs NAME=PATH, got `{wrong}`"):
            named_folders([wrong])
    with pytest.raises(ConfigError, match="`lora` has law twice"):
        named_folders(["law=/a", "law=/b"])


def test_the_newest_version_of_each_name_is_announced() -> None:
    log = AdaptersLog({"law": {1: "/a", 3: "/c", 2: "/b"}, "art": {5: "/d"}, "none": {}})
    assert log.newest() == {"law": (3, "/c"), "art": (5, "/d")}
    assert log.entries() == (Entry("law", 3, "/c"), Entry("art", 5, "/d"))
    before = KnownAdapters(6, (Entry("loading", 1, "/e"), Entry("law", 1, "/a"), Entry("gone", 1, "/f")))
    after = before.next(log, ["gone"])
    assert after.revision == 7
    assert set(after.entries) == {Entry("loading", 1, "/e"), Entry("law", 3, "/c"), Entry("art", 5, "/d")}


class NotedCache:
    """A cache of adapters that keeps the calls. Folders in `broken` cannot be read."""

    def __init__(self, broken: tuple[str, ...] = ()) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.broken = broken

    def read(self, name: str, version: int, source: str) -> None:
        if source in self.broken:
            raise ConfigError(f"{source} is\nno adapter\nhint: give another")
        self.calls.append(("read", name, version, source))

    def lack(self, name: str, version: int, why: str) -> None:
        self.calls.append(("lack", name, version, why))

    def forget(self, name: str, version: int | None = None) -> None:
        self.calls.append(("forget", name, version))


class AnsweringHost:
    """A host whose engine answers each control request with `message`: "" for done."""

    def __init__(self, versions: dict[str, int], registered: tuple[str, ...], log: AdaptersLog, message: str) -> None:
        known = SimpleNamespace(present=True, versions=versions, registered=dict.fromkeys(registered))
        self.engine = SimpleNamespace(memory=SimpleNamespace(adapters=known))
        self.adapters, self.adapters_log, self.message = KnownAdapters(), log, message
        self.asked: list[Any] = []
        self.failed: list[str] = []

    def ask(self, control: Any, answered: Any = None) -> Future[ControlAnswered]:
        self.asked.append(control)
        future: Future[ControlAnswered] = Future()
        future.set_result(ControlAnswered(0, not self.message, self.message))
        if answered is not None:
            future.add_done_callback(answered)
        return future

    def fail(self, message: str) -> None:
        self.failed.append(message)


def registry_of(
    versions: dict[str, int] | None = None,
    registered: tuple[str, ...] = (),
    sources: dict[str, dict[int, str]] | None = None,
    message: str = "",
    broken: tuple[str, ...] = (),
) -> tuple[AdapterRegistry, AnsweringHost, NotedCache]:
    host, cache = AnsweringHost(versions or {}, registered, AdaptersLog(sources or {}), message), NotedCache(broken)
    return AdapterRegistry(cast(Any, host), cast(Any, cache), str), host, cache


def test_an_adapter_is_read_before_the_engine_knows_it() -> None:
    registry, host, cache = registry_of({"law": 4})
    assert registry.load("law", "/a") == 5
    assert registry.load("art", "/b", pinned=True) == 1
    assert host.asked == [LoadAdapterControl("law", 5, False, "/a"), LoadAdapterControl("art", 1, True, "/b")]
    assert cache.calls == [("read", "law", 5, "/a"), ("read", "art", 1, "/b")]
    registry.unload("law")
    assert host.asked[2:] == [UnloadAdapterControl("law")]


def test_a_refused_adapter_is_forgotten() -> None:
    registry, host, cache = registry_of(message="no slot", broken=("/c",))
    with pytest.raises(ConfigError, match="no slot"):
        registry.load("law", "/a")
    assert cache.calls == [("read", "law", 1, "/a"), ("forget", "law", 1)]
    with pytest.raises(ConfigError, match="no slot"):
        registry.unload("law")
    with pytest.raises(ConfigError, match="no adapter"):
        registry.load("law", "/c")
    assert len(host.asked) == 2
    host.engine.memory.adapters.present = False
    with pytest.raises(ConfigError, match="LoRA is off"):
        AdapterRegistry(cast(Any, host), cast(Any, cache), str)


def test_a_restarted_engine_reads_its_adapters_again_and_skips_those_named_at_the_start() -> None:
    registry, host, cache = registry_of(
        {"law": 2, "old": 1}, ("law",), {"law": {1: "/a1", 2: "/a2"}, "bad": {1: "/c"}}, broken=("/c",)
    )
    registry.begin({"law": "/a3", "old": "/b", "bad": "/c", "new": "/n"}, restarted=True)
    assert cache.calls == [
        ("read", "law", 1, "/a1"),
        ("read", "law", 2, "/a2"),
        ("lack", "bad", 1, "/c is; no adapter"),
        ("read", "new", 1, "/n"),
    ]
    # of a journal without content: "bad" is not registered, and is registered again with its source
    assert host.asked == [LoadAdapterControl("bad", 1, False, "/c"), LoadAdapterControl("new", 1, False, "/n")]
    assert host.adapters_log.sources == {"law": {1: "/a1", 2: "/a2"}}
    assert host.adapters.entries == (Entry("bad", 1, "/c"), Entry("new", 1, "/n"))
    assert not host.failed


def test_a_server_that_starts_registers_what_is_named_and_new() -> None:
    registry, host, cache = registry_of({"law": 2, "art": 7}, ("law", "art"), {"law": {2: "/a"}, "art": {9: "/b"}})
    host.adapters = KnownAdapters(3, (Entry("law", 2, "/a"), Entry("art", 9, "/b")))
    registry.begin({"law": "/a", "art": "/c", "new": "/n"}, restarted=False)
    assert cache.calls[2:] == [("read", "art", 10, "/c"), ("read", "new", 1, "/n")]
    assert host.asked == [LoadAdapterControl("art", 10, False, "/c"), LoadAdapterControl("new", 1, False, "/n")]
    entries = (Entry("law", 2, "/a"), Entry("art", 10, "/c"), Entry("new", 1, "/n"))
    assert host.adapters == KnownAdapters(3, entries)


def test_a_named_adapter_that_the_engine_refuses_ends_the_engine() -> None:
    registry, host, _ = registry_of(message="too many")
    registry.begin({"law": "/a"}, restarted=False)
    assert host.failed == ["adapter 'law' cannot be loaded: too many"]
