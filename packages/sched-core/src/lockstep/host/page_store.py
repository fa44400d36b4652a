"""Storage below host memory: the bytes of KV pages by key, in a folder or in a store of an installed package.

A folder keeps windows and states of hybrid models as well, each in a file of its own.

    DIR/ab/abcd....kv        64 bytes                               page bytes
                             | magic, length, CRC-32, key, padding | content |

**Keys** are 32 bytes: SHA-256 over what the pages are of (model, weights, number types, page size, layers, rank) and
over the core's chained key of namespace and tokens. Two engines that agree in all of it share the pages of a folder.

**Files** are written under a temporary name and renamed, so a reader finds a whole file or none. A file of the wrong
length, of another key or with another checksum is a miss; it is counted, named in the log, and removed.

**Room.** All engines of a folder together keep to `bytes_max`, measured when an engine starts to write and after every
sixteenth of `bytes_max` that it has written, so several engines may exceed it by such parts for a time. What was used
longest ago is removed first, by the times of the files. A use of a page is a use of all pages in front of it, and marks
the last page of a path as used first, so that a path loses its end before its beginning. One engine at a time removes
files, under a lock of the folder.

**Errors** of the disk never reach a request. A read that fails is a miss. After a failed write nothing is written for
PAUSE_S seconds.

A package names another store under the entry-point group `lockstep.page_stores`, by the scheme of its addresses:

    [project.entry-points."lockstep.page_stores"]
    redis = "my_package:open_store"          # --storage redis://10.0.0.1:6379
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import struct
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Protocol, cast, runtime_checkable

from lockstep.core.contract.errors import ConfigError

log = logging.getLogger("lockstep.host")

GROUP = "lockstep.page_stores"
PAUSE_S = 30.0
STALE_S = 3600.0  # age at which a temporary file belongs to an engine that has ended
SUFFIX, TEMPORARY = ".kv", ".tmp"
KEPT_SHARE = 0.9  # of `bytes_max`, after files were removed
FRONTS_MAX = 1 << 18  # pages whose page in front is remembered, for the order of use

_HEADER = struct.Struct("<8sQI32s12x")
_MAGIC = b"LSKVPG01"


class StoreError(Exception):
    """A page could not be written. Serving continues without it."""


@dataclass(slots=True)
class StoreCounts:
    """Totals of a store since it was opened, by this process."""

    pages_read: int = 0
    pages_missed: int = 0  # asked for and not there, damaged ones included
    pages_damaged: int = 0  # there, but not whole, of another key, or with another checksum
    pages_written: int = 0
    pages_known: int = 0  # to be written, and there already
    writes_failed: int = 0  # pages
    pages_removed: int = 0  # to keep within the bound
    bytes_stored: int = 0  # by all engines, as last measured, with what this one has written since


class PageStore(Protocol):
    """Pages by key. `read` may be called in one thread while `write` is called in another."""

    counts: StoreCounts

    def read(self, key: bytes, into: memoryview) -> bool:
        """Fill `into` with the page of a key. Returns whether it was there, whole and of this key; never raises."""

    def write(self, key: bytes, page: memoryview) -> None:
        """Store a page. Content that is there under a key is equal, and need not be written. Raises StoreError."""

    def use(self, keys: Sequence[bytes], after: bytes) -> None:
        """Mark consecutive pages of a path as used, and the pages in front of them. Never raises.

        Args:
            after: key of the page in front of the first one; b"": unknown, or the path begins with it.
        """

    def close(self) -> None:
        """Release what the store holds."""


@runtime_checkable
class SearchableStore(PageStore, Protocol):
    """A store of contents of several sizes, which a key finds without reading them."""

    def has(self, key: bytes) -> bool:
        """Return whether there is something under a key, which may turn out to be damaged; never raises."""


class StoreFactory(Protocol):
    """The object that an entry point names."""

    def __call__(self, address: str, *, page_bytes: int, bytes_max: int) -> PageStore:
        """Open a store.

        Args:
            address: with its scheme, as given.
            page_bytes: length of every page.
            bytes_max: bytes that the store may keep.
        Raises: ConfigError.
        """


def open_store(address: str, *, page_bytes: int, bytes_max: int, with_blocks: bool = False) -> PageStore:
    """Open the store of `--storage`: a folder, or SCHEME://... for a store of an installed package.

    Args:
        with_blocks: it also keeps windows or states, of other sizes than pages; only folders do.
    Raises: ConfigError if the folder cannot be written to, no package or more than one has the scheme, or the store
        keeps pages alone.
    """
    scheme, colon, _ = address.partition("://")
    if not colon:
        return FolderStore(Path(address), bytes_max=bytes_max)
    if with_blocks:
        raise ConfigError(
            f"`storage` is {address}, but stores of packages keep pages of one size, and this model has windows or "
            "states in pools of their own\nhint: give a folder"
        )
    found = [*entry_points(group=GROUP, name=scheme)]
    if len(found) != 1:
        many = "no installed package has" if not found else f"{len(found)} installed packages have"
        raise ConfigError(
            f"`storage` is {address}, and {many} a store for {scheme}://\n"
            f"hint: give a folder, or install one package with an entry point in {GROUP}"
        )
    factory = cast("StoreFactory", found[0].load())
    return factory(address, page_bytes=page_bytes, bytes_max=bytes_max)


# mechanism: storage (executed)
class FolderStore:
    """Pages as files of a folder, which engines of one machine or of several may share. Safe to use from two threads.

    Raises: ConfigError if the folder cannot be made.
    """

    def __init__(self, folder: Path, *, bytes_max: int) -> None:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"`storage` {folder} cannot be made: {error.strerror or error}\nhint: choose another folder"
            ) from error
        self.folder, self.bytes_max = folder, bytes_max
        self.counts = StoreCounts()
        self._measured = False
        self._unmeasured_bytes = 0  # written since the folder was measured
        self._silent_until_s = 0.0
        self._fronts: dict[bytes, bytes] = {}  # by key: the key of the page in front
        self._lock = threading.Lock()  # guards `_fronts`, which readers and the writer use

    def has(self, key: bytes) -> bool:
        """See `SearchableStore.has`."""
        return os.access(self._path(key), os.R_OK)

    def read(self, key: bytes, into: memoryview) -> bool:
        """See `PageStore.read`."""
        path = self._path(key)
        header = bytearray(_HEADER.size)
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                size = os.preadv(file, [header, into], 0)
                while 0 < size < _HEADER.size + len(into):
                    more = os.preadv(file, [into[size - _HEADER.size :]], size) if size >= _HEADER.size else 0
                    if not more:
                        break
                    size += more
                whole = size == _HEADER.size + len(into) == os.fstat(file).st_size
            finally:
                os.close(file)
        except FileNotFoundError:
            self.counts.pages_missed += 1
            return False
        except OSError as error:
            log.warning("the stored page %s cannot be read: %s", path, error.strerror or error)
            self.counts.pages_missed += 1
            return False
        magic, length, checksum, of = _HEADER.unpack(header)
        wrong = ""
        if not whole:
            wrong = f"it has {size:,} bytes, expected {_HEADER.size + len(into):,}"
        elif magic != _MAGIC or of != key or length != len(into):
            wrong = "its header is not that of this page"
        elif zlib.crc32(into) != checksum:
            wrong = "its checksum is wrong"
        if wrong:
            log.warning("the stored page %s is damaged and is removed: %s", path, wrong)
            self.counts.pages_damaged += 1
            self.counts.pages_missed += 1
            with suppress(OSError):
                path.unlink()
            return False
        self.counts.pages_read += 1
        return True

    def write(self, key: bytes, page: memoryview) -> None:
        """See `PageStore.write`."""
        if time.monotonic() < self._silent_until_s:
            self.counts.writes_failed += 1
            raise StoreError("the folder could not be written to a short time ago")
        path, size = self._path(key), _HEADER.size + len(page)
        try:
            if not self._measured or self._unmeasured_bytes > self.bytes_max // 16:
                self._measure()
            if path.is_file():
                self.counts.pages_known += 1
                return
            if size > self.bytes_max:
                raise StoreError(f"a page of {size:,} bytes is larger than the bound of {self.bytes_max:,}")
            if self.counts.bytes_stored + size > self.bytes_max:
                self._make_room(size)
            self._write(path, key, page)
        except OSError as error:
            self._silent_until_s = time.monotonic() + PAUSE_S
            self.counts.writes_failed += 1
            reason = error.strerror or str(error)
            log.warning("no pages are stored in %s for %.0f s, and serving continues: %s", self.folder, PAUSE_S, reason)
            raise StoreError(reason) from error
        self.counts.pages_written += 1
        self.counts.bytes_stored += size
        self._unmeasured_bytes += size

    def use(self, keys: Sequence[bytes], after: bytes) -> None:
        """See `PageStore.use`."""
        if not keys:
            return
        with self._lock:
            if len(self._fronts) > FRONTS_MAX:
                self._fronts.clear()
            for front, key in zip((after, *keys), keys, strict=False):
                if front:
                    self._fronts[key] = front
            path = [*reversed(keys)]
            front = self._fronts.get(keys[0], b"")
            while front:
                path.append(front)
                front = self._fronts.get(front, b"")
        now_ns = time.time_ns()
        for number, key in enumerate(path):  # from the end of the path to its beginning, which counts as used last
            with suppress(OSError):
                os.utime(self._path(key), ns=(now_ns + 1000 * number, now_ns + 1000 * number))

    def close(self) -> None:
        """Do nothing: no file stays open."""

    # ------------------------------------------------------------------------------------------------------- inside

    def _path(self, key: bytes) -> Path:
        name = key.hex()
        return self.folder / name[:2] / (name + SUFFIX)

    def _write(self, path: Path, key: bytes, page: memoryview) -> None:
        """Write a file under a temporary name, then rename it. Raises OSError."""
        header = _HEADER.pack(_MAGIC, len(page), zlib.crc32(page), key)
        temporary = path.with_name(f".{path.stem}.{secrets.token_hex(8)}{TEMPORARY}")
        try:
            file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            try:
                done = os.writev(file, [header, page])
                while done < len(header) + len(page):
                    rest = page[done - len(header) :] if done >= len(header) else None
                    if rest is None:  # the header itself was cut short
                        raise OSError("the header of a page was written in part")
                    done += os.write(file, rest)
            finally:
                os.close(file)
            temporary.replace(path)
        except OSError:
            with suppress(OSError):
                temporary.unlink()
            raise

    def _files(self) -> Iterator[tuple[int, int, str]]:
        """Yield time of last use in ns, size and path of each stored page. Removes old temporary files."""
        old_s = time.time() - STALE_S
        for part in os.scandir(self.folder):
            if len(part.name) != 2 or not part.is_dir():
                continue
            with os.scandir(part.path) as entries:
                for entry in entries:
                    with suppress(OSError):  # another engine has removed it
                        stat = entry.stat()
                        if entry.name.endswith(SUFFIX):
                            yield stat.st_mtime_ns, stat.st_size, entry.path
                        elif entry.name.endswith(TEMPORARY) and stat.st_mtime < old_s:
                            Path(entry.path).unlink()

    def _measure(self) -> None:
        self.counts.bytes_stored = sum(size for _, size, _ in self._files())
        self._measured, self._unmeasured_bytes = True, 0

    def _make_room(self, size: int) -> None:
        """Remove the files that were used longest ago. Raises OSError."""
        with self._alone():
            files = sorted(self._files())
            total = sum(length for _, length, _ in files)
            most = min(int(KEPT_SHARE * self.bytes_max), self.bytes_max - size)
            if total + size > self.bytes_max:
                for _, length, path in files:
                    if total <= most:
                        break
                    with suppress(FileNotFoundError):
                        Path(path).unlink()
                        self.counts.pages_removed += 1
                    total -= length
        self.counts.bytes_stored, self._unmeasured_bytes = total, 0

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the folder's lock, so that two engines do not remove files at the same time. Raises OSError."""
        file = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
        finally:
            os.close(file)
