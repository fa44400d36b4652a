"""Files of clients, and batches, in a folder for each tenant: they survive the end of a worker and of the server.

    FOLDER/<tenant>/file-<id>.json               what is known of a file
    FOLDER/<tenant>/file-<id>.data               its content
    FOLDER/<tenant>/batch_<id>.json              a batch, as clients see it
    FOLDER/<tenant>/batch_<id>.lock              locked by the worker that runs it
    FOLDER/<tenant>/batch_<id>.cancel            exists once it is to be cancelled
    FOLDER/<tenant>/batch_<id>.output, .error    results so far, a line for each request

A JSON file is replaced as a whole, so a reader of any worker sees one of its states. A file exists once its JSON file
does. Limits (number, bytes, seconds) apply to each tenant.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import IO, Any, Literal

import msgspec

from lockstep.api.endpoints.errors import ApiError

ID = re.compile(r"(?:file-|batch_)[0-9a-f]{32}")
ENDED = ("completed", "failed", "expired", "cancelled")
"""States in which a batch changes no more."""
ABANDONED_S = 3600.0  # age of content without a JSON file, which an interrupted upload has left
COPIED_BYTES = 2**20
NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
Kind = Literal["file-", "batch_"]


class StoredFiles:
    """A worker's access to the files and batches.

    Args:
        folder: made with mode 0700.
        most, bytes_max, kept_s: limits of each tenant: files, and batches; their bytes; seconds until a file expires.
    """

    def __init__(self, folder: Path, *, most: int, bytes_max: int, kept_s: float) -> None:
        self.folder, self.most, self.bytes_max, self.kept_s = folder, most, bytes_max, kept_s
        folder.mkdir(mode=0o700, exist_ok=True, parents=True)

    def of(self, tenant: str) -> Path:
        """Return the folder of a tenant, which may not exist."""
        return self.folder / sha256(tenant.encode("utf-8", "surrogatepass")).hexdigest()[:24]

    # ------------------------------------------------------------------------------------------------------------ files

    def add(
        self, tenant: str, content: IO[bytes], *, name: str, purpose: str, kept_s: float | None = None
    ) -> dict[str, Any]:
        """Store a file, and return what is known of it. Raises ApiError beyond the limits.

        Args:
            content: read from its current position on.
            kept_s: seconds until it expires; None: those of the limits.
        """
        folder = self.of(tenant)
        folder.mkdir(mode=0o700, exist_ok=True)
        self._check_room(folder)
        path = folder / f"file-{secrets.token_hex(16)}.data"
        try:
            with os.fdopen(os.open(path, NEW, 0o600), "wb") as file:
                shutil.copyfileobj(content, file, COPIED_BYTES)
            self.check_bytes(folder)
            return self.publish(path, name=name, purpose=purpose, kept_s=kept_s)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise ApiError(503, f"the file cannot be stored: {error.strerror or error}") from error
        except BaseException:
            path.unlink(missing_ok=True)
            raise

    def publish(self, path: Path, *, name: str, purpose: str, kept_s: float | None = None) -> dict[str, Any]:
        """Make stored content a file of its tenant, and return what is known of it. Raises OSError."""
        now_s = int(time.time())
        kept_s = self.kept_s if kept_s is None else min(kept_s, self.kept_s)
        known = {
            "id": path.stem,
            "object": "file",
            "bytes": path.stat().st_size,
            "created_at": now_s,
            "expires_at": now_s + int(kept_s),
            "filename": name,
            "purpose": purpose,
            "status": "processed",
            "status_details": None,
        }
        self._write(path.with_suffix(".json"), known)
        return known

    def find(self, tenant: str, name: str, kind: Kind) -> dict[str, Any] | None:
        """Return what is known of a file or batch of a tenant; None if there is none, or it has expired."""
        if ID.fullmatch(name) is None or not name.startswith(kind):
            return None
        return self._read(self.of(tenant) / f"{name}.json")

    def all(self, tenant: str, kind: Kind) -> list[dict[str, Any]]:
        """Return what is known of all files or batches of a tenant, oldest first."""
        found = [self._read(path) for path in self.of(tenant).glob(f"{kind}*.json")]
        return sorted((one for one in found if one is not None), key=lambda one: (one["created_at"], one["id"]))

    def open(self, tenant: str, name: str) -> IO[bytes]:
        """Open the content of a file. Raises OSError."""
        return (self.of(tenant) / f"{name}.data").open("rb")

    def remove(self, tenant: str, name: str) -> None:
        """Remove a file."""
        path = self.of(tenant) / f"{name}.json"
        path.unlink(missing_ok=True)
        path.with_suffix(".data").unlink(missing_ok=True)

    def _read(self, path: Path) -> dict[str, Any] | None:
        try:
            known: dict[str, Any] = msgspec.json.decode(path.read_bytes())
        except (OSError, msgspec.DecodeError):
            return None
        if path.name.startswith("file-") and known["expires_at"] <= time.time():
            path.unlink(missing_ok=True)
            path.with_suffix(".data").unlink(missing_ok=True)
            return None
        return known

    def _write(self, path: Path, known: dict[str, Any]) -> None:
        fresh = path.with_suffix(f".{secrets.token_hex(8)}.fresh")
        try:
            with os.fdopen(os.open(fresh, NEW, 0o600), "wb") as file:
                file.write(msgspec.json.encode(known))
            fresh.replace(path)
        finally:
            fresh.unlink(missing_ok=True)

    def _check_room(self, folder: Path) -> None:
        """Remove what expired or was abandoned. Raises ApiError if there are too many files or bytes."""
        now_s = time.time()
        for path in folder.iterdir():
            if path.suffix == ".json" and path.name.startswith("file-"):
                self._read(path)
            elif path.suffix == ".fresh" or (path.suffix == ".data" and not path.with_suffix(".json").exists()):
                with contextlib.suppress(FileNotFoundError):
                    if now_s - path.stat().st_mtime > ABANDONED_S:
                        path.unlink(missing_ok=True)
        if sum(1 for _ in folder.glob("file-*.json")) >= self.most:
            raise ApiError(400, f"{self.most} files are stored, and this key may store no more; delete some", "file")
        self.check_bytes(folder)

    def check_bytes(self, folder: Path) -> None:
        """Raise ApiError if a tenant's files have more bytes than they may."""
        used = 0
        for path in folder.iterdir():
            with contextlib.suppress(FileNotFoundError):
                used += path.stat().st_size
        if used > self.bytes_max:
            message = f"the files of this key have {used} bytes, and limits.files_bytes_max is {self.bytes_max}"
            raise ApiError(400, f"{message}; delete some", "file")

    # ---------------------------------------------------------------------------------------------------------- batches

    def put_batch(self, tenant: str, batch: dict[str, Any]) -> None:
        """Store the state of a batch, and beyond the limit remove batches that ended first. Raises OSError."""
        folder = self.of(tenant)
        folder.mkdir(mode=0o700, exist_ok=True)
        path = folder / f"{batch['id']}.json"
        fresh = not path.exists()
        self._write(path, batch)
        if fresh:
            ended = [one for one in self.all(tenant, "batch_") if one["status"] in ENDED]
            for one in ended[: max(0, len(ended) - self.most)]:
                for left in folder.glob(f"{one['id']}.*"):
                    left.unlink(missing_ok=True)

    def batch_path(self, tenant: str, name: str, suffix: Literal["lock", "cancel", "output", "error"]) -> Path:
        """Return the path of a file of a batch."""
        return self.of(tenant) / f"{name}.{suffix}"

    def abandoned_batches(self) -> Iterator[tuple[dict[str, Any], Callable[[], None]]]:
        """Lock and yield the batches that have not ended and that no worker runs, with what releases their locks."""
        for path in sorted(self.folder.glob("*/batch_*.json")):
            batch = self._read(path)
            if batch is not None and batch["status"] not in ENDED:
                release = self.lock(path.with_suffix(".lock"))
                if release is not None:
                    yield batch, release

    def lock(self, path: Path) -> Callable[[], None] | None:
        """Lock a batch for this worker. Returns what releases the lock; None: another worker has it. Raises OSError."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        return lambda: os.close(descriptor)
