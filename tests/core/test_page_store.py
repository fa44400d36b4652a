"""Storage in a folder: pages by key, whatever happens to the folder, and whatever other engines use it."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from lockstep.core.contract.errors import ConfigError
from lockstep.host import page_store
from lockstep.host.page_store import FolderStore, StoreCounts, StoreError, open_store

SIZE = 1000
FILE = 64 + SIZE  # with its header


def key_of(name: object) -> bytes:
    return sha256(str(name).encode()).digest()


def page_of(name: object) -> bytes:
    return (sha256(f"page {name}".encode()).digest() * 32)[:SIZE]


def write(store: FolderStore, *names: object, after: object = "") -> None:
    """Write the pages of a path, which are then used."""
    for name in names:
        store.write(key_of(name), memoryview(page_of(name)))
    store.use([key_of(name) for name in names], key_of(after) if after else b"")


def read(store: FolderStore, name: object) -> bytes | None:
    into = bytearray(SIZE)
    return bytes(into) if store.read(key_of(name), memoryview(into)) else None


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*.kv"))


def file_of(folder: Path, name: object) -> Path:
    return folder / key_of(name).hex()[:2] / f"{key_of(name).hex()}.kv"


def test_a_page_is_read_as_it_was_written_also_by_another_engine(tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "deep" / "folder", bytes_max=10**6)
    assert read(store, 1) is None
    write(store, 1, 2)
    other = FolderStore(tmp_path / "deep" / "folder", bytes_max=10**6)
    assert [read(other, name) for name in (1, 2, 3)] == [page_of(1), page_of(2), None]
    write(other, 1)
    assert store.counts == StoreCounts(pages_missed=1, pages_written=2, bytes_stored=2 * FILE)
    assert other.counts == StoreCounts(pages_read=2, pages_missed=1, pages_known=1, bytes_stored=2 * FILE)
    assert not list(tmp_path.rglob("*.tmp"))
    assert all(path.stat().st_mode & 0o077 == 0 for path in files(tmp_path / "deep" / "folder"))


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[500] ^= 4
    path.write_bytes(content)


DAMAGES: dict[str, Any] = {
    "checksum": _flip,
    "bytes": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "expected": lambda path: path.write_bytes(path.read_bytes() + b"1"),
    "has 0 bytes": lambda path: path.write_bytes(b""),
    "header": lambda path: path.write_bytes(b"another file" + path.read_bytes()[12:]),
    "not that of this page": lambda path: path.write_bytes(file_of(path.parents[1], 2).read_bytes()),
}


@pytest.mark.parametrize("reason", DAMAGES)
def test_a_damaged_file_is_a_miss_named_in_the_log_and_written_again(
    reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = FolderStore(tmp_path, bytes_max=10**6)
    write(store, 1, 2)
    path = file_of(tmp_path, 1)
    DAMAGES[reason](path)
    with caplog.at_level(logging.WARNING, "lockstep.host"):
        assert read(store, 1) is None
    assert str(path) in caplog.text
    assert reason in caplog.text
    assert (store.counts.pages_damaged, store.counts.pages_missed, store.counts.pages_read) == (1, 1, 0)
    assert not path.exists()
    write(store, 1)
    assert read(store, 1) == page_of(1)


def test_a_full_disk_fails_a_write_and_is_left_alone_for_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = FolderStore(tmp_path, bytes_max=10**6)
    write(store, 1)
    tries = []

    def full(*_: Any) -> int:
        tries.append(1)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", full)
        for name in (2, 3, 4):
            with pytest.raises(StoreError, match=r"No space left|a short time ago"):
                write(store, name)
    assert len(tries) == 1
    assert caplog.text.count("No space left on device") == 1
    assert store.counts.writes_failed == 3
    assert not list(tmp_path.rglob("*.tmp"))
    assert read(store, 1) == page_of(1)
    with pytest.raises(StoreError, match="a short time ago"):
        write(store, 2)
    monkeypatch.setattr(page_store.time, "monotonic", lambda: time.perf_counter() + 1e9)
    write(store, 2)
    assert read(store, 2) == page_of(2)


@pytest.mark.parametrize("most", [64, 65, 500, FILE - 1])
def test_a_page_is_read_and_written_in_as_many_parts_as_the_system_makes_of_it(
    most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    pread, put = os.pread, os.write

    def preadv(file: int, buffers: Sequence[Any], offset: int) -> int:
        calls.append("read")
        at, part = 0, pread(file, min(most, sum(map(len, buffers))), offset)
        for buffer in buffers:
            piece = part[at : at + len(buffer)]
            memoryview(buffer)[: len(piece)] = piece
            at += len(piece)
        return len(part)

    def write_part(file: int, data: Any) -> int:
        calls.append("write")
        return put(file, bytes(data)[:most])

    monkeypatch.setattr(os, "preadv", preadv)
    monkeypatch.setattr(os, "write", write_part)
    monkeypatch.setattr(os, "writev", lambda file, buffers: write_part(file, b"".join(map(bytes, buffers))))
    store = FolderStore(tmp_path, bytes_max=10**6)
    write(store, 1)
    assert file_of(tmp_path, 1).stat().st_size == FILE
    assert read(store, 1) == page_of(1)
    parts = -(-FILE // most)
    assert calls == ["write"] * parts + ["read"] * parts
    file_of(tmp_path, 1).write_bytes(file_of(tmp_path, 1).read_bytes()[:-1])
    assert read(store, 1) is None
    assert store.counts.pages_damaged == 1


def test_a_header_that_is_written_in_part_is_a_failed_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FolderStore(tmp_path, bytes_max=10**6)
    monkeypatch.setattr(os, "writev", lambda file, buffers: os.write(file, bytes(buffers[0])[:63]))
    with pytest.raises(StoreError, match="the header of a page was written in part"):
        write(store, 1)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_folder_that_is_removed_while_it_is_used_begins_again(tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "kv", bytes_max=10**6)
    write(store, 1)
    file_of(tmp_path / "kv", 1).unlink()
    file_of(tmp_path / "kv", 1).parent.rmdir()
    assert read(store, 1) is None
    write(store, 1)
    assert read(store, 1) == page_of(1)


def test_what_was_used_longest_ago_is_removed_first_and_the_end_of_a_path_before_its_beginning(tmp_path: Path) -> None:
    store = FolderStore(tmp_path, bytes_max=10 * FILE)
    write(store, "a1", "a2", "a3")
    write(store, "b1", "b2", "b3")
    write(store, "c1", "c2", "c3")
    write(store, "a4", after="a3")  # a use of a1, a2 and a3 as well
    write(store, "d1", "d2")
    there = {
        name for name in ("a1", "a2", "a3", "a4", "b1", "b2", "b3", "c1", "c2", "c3", "d1", "d2") if read(store, name)
    }
    assert {"a1", "a2", "a3", "a4", "d1", "d2"} <= there
    assert "b3" not in there
    assert "b2" not in there
    assert store.counts.pages_removed == len(["b3", "b2"]) + ("b1" not in there)
    assert sum(path.stat().st_size for path in files(tmp_path)) <= 10 * FILE
    assert store.counts.bytes_stored == sum(path.stat().st_size for path in files(tmp_path))


def test_a_read_counts_as_use(tmp_path: Path) -> None:
    store = FolderStore(tmp_path, bytes_max=4 * FILE)
    for name in ("a", "b", "c", "d"):
        write(store, name)
    other = FolderStore(tmp_path, bytes_max=4 * FILE)
    other.use([key_of("a")], b"")
    write(store, "e")
    assert read(store, "a") == page_of("a")
    assert read(store, "b") is None


def test_engines_that_write_at_once_keep_to_the_bound_and_never_read_half_a_page(tmp_path: Path) -> None:
    stores = [FolderStore(tmp_path, bytes_max=40 * FILE) for _ in range(3)]
    wrong: list[object] = []

    def work(number: int) -> None:
        for at in range(150):
            write(stores[number], at % 70)
            other = (at * 7 + number) % 70
            found = read(stores[number], other)
            if found not in (None, page_of(other)):
                wrong.append(other)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert sum(store.counts.pages_damaged + store.counts.writes_failed for store in stores) == 0
    assert sum(store.counts.pages_removed for store in stores) > 0
    assert sum(path.stat().st_size for path in files(tmp_path)) <= 40 * FILE * (1 + 3 / 16)


def test_temporary_files_of_ended_engines_are_removed(tmp_path: Path) -> None:
    store = FolderStore(tmp_path, bytes_max=10**6)
    write(store, 1)
    left, new = (file_of(tmp_path, 1).with_name(f".{age}.tmp") for age in ("old", "new"))
    left.write_bytes(b"half a page")
    new.write_bytes(b"half a page")
    os.utime(left, (0, 0))
    write(FolderStore(tmp_path, bytes_max=10**6), 2)
    assert not left.exists()
    assert new.exists()


def test_a_page_above_the_bound_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"1,064 bytes is larger than the bound of 1,000"):
        write(FolderStore(tmp_path, bytes_max=1000), 1)


def test_a_folder_that_cannot_be_made_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"`storage` .*file/kv cannot be made: .*\nhint: choose another folder"):
        open_store(str(tmp_path / "file" / "kv"), page_bytes=SIZE, bytes_max=10**6)


class _Remembering:
    """A store in this process's memory."""

    def __init__(self, address: str, *, page_bytes: int, bytes_max: int) -> None:
        self.about = (address, page_bytes, bytes_max)
        self.counts = StoreCounts()

    def read(self, key: bytes, into: memoryview) -> bool:
        return False

    def write(self, key: bytes, page: memoryview) -> None:
        raise StoreError("it keeps nothing")

    def use(self, keys: Sequence[bytes], after: bytes) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class _Entry:
    def load(self) -> Any:
        return _Remembering


def test_a_package_may_bring_a_store_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"here": [_Entry()], "twice": [_Entry(), _Entry()]}
    monkeypatch.setattr(page_store, "entry_points", lambda group, name: found.get(name, []))
    store = open_store("here://a/b", page_bytes=SIZE, bytes_max=10**6)
    assert isinstance(store, _Remembering)
    assert store.about == ("here://a/b", SIZE, 10**6)
    for scheme, reason in (("nowhere", "no installed package has"), ("twice", "2 installed packages have")):
        with pytest.raises(ConfigError, match=f"`storage` is {scheme}://x, and {reason} a store for {scheme}://"):
            open_store(f"{scheme}://x", page_bytes=SIZE, bytes_max=10**6)
