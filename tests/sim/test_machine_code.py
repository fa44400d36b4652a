"""Machine code is made once, kept where only its user may write, and made again when the kept file cannot be used."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

from lockstep.sim.fast import machine_code
from lockstep.sim.fast.state import Arrays

pytest.importorskip("numba")

TEXT = """
define i64 @lockstep_advance(i64 %table, double %took_us) {
  ret i64 42
}
"""


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Two folders for it, and a small function that is compiled."""
    places = [tmp_path / "first", tmp_path / "second"]
    monkeypatch.setattr(machine_code, "_folders", lambda: places)
    monkeypatch.setattr(machine_code, "_made", lambda: TEXT)
    return places


def load() -> int:
    """The output of the machine code, loaded as by a new process."""
    return machine_code.load.__wrapped__()(0, 0.0)


def kept(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.ll")) if folder.is_dir() else []


def test_it_is_made_once(folders: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    assert load() == 42
    (path,) = kept(folders[0])
    assert path.stat().st_mode & 0o077 == 0
    monkeypatch.setattr(machine_code, "_made", lambda: pytest.fail("made again"))
    assert load() == 42


@pytest.mark.skipif(machine_code.fcntl is None, reason="this system has no locks of files")
def test_it_is_made_once_by_several_at_a_time(folders: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A second process, here a thread, begins while the first compiles: it waits, and loads what the first stored."""
    made: list[str] = []
    waits = threading.Event()
    lock, found = machine_code.fcntl.flock, list[int]()
    second = threading.Thread(target=lambda: found.append(load()))

    def flock(*given: object) -> None:
        if threading.current_thread() is second:
            waits.set()
        lock(*given)

    def make() -> str:
        made.append(threading.current_thread().name)
        second.start()
        assert waits.wait(60)
        return TEXT

    monkeypatch.setattr(machine_code.fcntl, "flock", flock)
    monkeypatch.setattr(machine_code, "_made", make)
    assert load() == 42
    second.join(60)
    assert found == [42]
    assert made == [threading.current_thread().name]
    assert len(kept(folders[0])) == 1


def test_what_is_old_goes(folders: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    load()
    (old,) = kept(folders[0])
    monkeypatch.setattr(machine_code, "_digest", lambda _llvm: "another")
    load()
    assert [path.name for path in kept(folders[0])] == ["kernel-another.ll"] != [old.name]


def test_what_is_damaged_is_made_again(folders: list[Path]) -> None:
    load()
    (path,) = kept(folders[0])
    for damage in (b"", TEXT[: len(TEXT) // 2].encode(), bytes(range(256))):
        path.write_bytes(damage)
        assert load() == 42
        assert path.read_text().endswith(TEXT)


def test_what_others_may_have_written_is_not_loaded(folders: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    load()
    (path,) = kept(folders[0])
    others = TEXT.replace("42", "43")
    path.write_text(f"{machine_code._seal(others)}\n{others}")
    assert load() == 43
    path.chmod(0o622)
    assert load() == 42
    path.write_text(f"{machine_code._seal(others)}\n{others}")
    monkeypatch.setattr(machine_code.os, "getuid", lambda: 12345)
    assert path.stat().st_uid == 0 or load() == 42


def test_it_is_kept_in_the_second_place_or_nowhere(folders: list[Path]) -> None:
    folders[0].write_text("no folder")
    assert load() == 42
    assert len(kept(folders[1])) == 1
    shutil.rmtree(folders[1])
    folders[1].write_text("no folder either")
    assert load() == 42


def test_the_digest_follows_the_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import llvmlite.binding as llvm

    before = machine_code._digest(llvm)
    for i, source in enumerate(machine_code.SOURCES):
        other = tmp_path / source.name
        other.write_text(source.read_text() + "\n")
        with monkeypatch.context() as changed:
            changed.setattr(machine_code, "SOURCES", (*machine_code.SOURCES[:i], other, *machine_code.SOURCES[i + 1 :]))
            assert machine_code._digest(llvm) != before


def test_arrays_must_lie_in_one_piece() -> None:
    arrays = Arrays(*[np.zeros((4, 4), np.int64)] * len(Arrays._fields))
    table = machine_code.addresses(arrays)
    assert table.shape == (len(Arrays._fields), 5)
    assert table[3].tolist() == [arrays.running_batch.ctypes.data, 4, 4, 1, 1]
    with pytest.raises(ValueError, match="contiguous"):
        machine_code.addresses(arrays._replace(gaps=np.zeros((4, 4), np.int64)[:, ::2]))


def test_other_machine_code_of_the_process_still_raises() -> None:
    import numba

    machine_code.load()

    def divided(number: int) -> int:
        return 7 // number

    with pytest.raises(ZeroDivisionError):
        numba.njit(divided)(0)
