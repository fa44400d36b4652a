"""What /v1/responses has answered, kept for a while: to be had again, to be gone on from, to be cancelled.

    FOLDER/responses.sqlite     beside the sockets, for all workers of a server; it goes with the server

Bounds are each tenant's own, so that nobody's answers make room for another's: so many answers, so many bytes, so long.
Beyond them those that ended first go. What is on its way stays, for somebody will ask for it: where nothing that ended
can go, nothing more is begun. With an answer stands the whole conversation that led to it, so that what goes on from it
needs nothing older.
"""

from __future__ import annotations

import fcntl
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

log = logging.getLogger("lockstep.worker")

BUSY_S = 1.0  # that another worker may be writing
TABLE = """
CREATE TABLE IF NOT EXISTS responses (
    number INTEGER PRIMARY KEY AUTOINCREMENT, tenant TEXT NOT NULL, id TEXT NOT NULL, ended_s REAL,
    pid INTEGER NOT NULL, bytes INTEGER NOT NULL, said BLOB NOT NULL, input BLOB NOT NULL,
    UNIQUE (tenant, id)
)
"""
OLDEST = """
DELETE FROM responses WHERE number IN (
    SELECT number FROM (
        SELECT number, ended_s, row_number() OVER newest AS nth, sum(bytes) OVER newest AS bytes_so_far
        FROM responses WHERE tenant = :tenant
        WINDOW newest AS (ORDER BY ended_s DESC NULLS FIRST, number DESC ROWS UNBOUNDED PRECEDING)
    ) WHERE ended_s IS NOT NULL AND (nth > :most OR bytes_so_far > :bytes_max OR ended_s < :since_s)
)
"""
UNDER_WAY = "CREATE INDEX IF NOT EXISTS under_way ON responses (tenant, pid, bytes) WHERE ended_s IS NULL"
FAILURE_BYTES = 1024
"""Kept free for one that is on its way, so that there is room at least to say why it failed."""
ABANDONED = "the process that worked on it ended"


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """One answer. `input` has what led to it, answers before it included."""

    said: dict[str, Any]
    input: list[dict[str, Any]]
    over: bool  # nothing more comes of it


class StoredResponses:
    """One worker's view of them.

    Args:
        folder: where the file is, or will be.
        most, bytes_max, kept_s: of one tenant: answers, bytes of them, and seconds from when each ended.
        now_s: seconds since 1970.
    """

    def __init__(
        self, folder: Path, *, most: int, bytes_max: int, kept_s: float, now_s: Callable[[], float] = time.time
    ) -> None:
        path = folder / "responses.sqlite"
        self._most, self._bytes_max, self._kept_s, self._now_s = most, bytes_max, kept_s, now_s
        with _alone(folder / "responses.sqlite.lock"):  # workers begin at the same time, and one of them makes it
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            self._base = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None)
            self._base.execute("PRAGMA journal_mode = WAL")  # a worker that is killed leaves it whole
            self._base.execute("PRAGMA synchronous = OFF")  # it need not survive the machine
            self._base.execute(TABLE)
            self._base.execute(UNDER_WAY)

    def close(self) -> None:
        """Give the file up."""
        self._base.close()

    def put(self, tenant: str, said: dict[str, Any], items: Sequence[dict[str, Any]], *, over: bool) -> str:
        """Keep an answer, or one that is on its way. Returns why that cannot be; empty: it is kept."""
        answer, led = msgspec.json.encode(said), msgspec.json.encode(items)
        size = len(answer) + len(led) + (0 if over else FAILURE_BYTES)
        row = (tenant, said["id"], self._now_s() if over else None, os.getpid(), size, answer, led)
        names = "tenant, id, ended_s, pid, bytes, said, input"
        try:
            with self._transaction():
                why = self._no_room(tenant, said["id"], size)
                if not why:
                    self._base.execute(f"INSERT INTO responses ({names}) VALUES (?, ?, ?, ?, ?, ?, ?)", row)
                    self._push_out(tenant)
        except sqlite3.Error as error:
            why = f"the file of stored answers cannot be written to: {error}"
        if why:
            log.warning("response %s is not stored: %s", said["id"], why)
        return why

    def change(self, tenant: str, said: dict[str, Any], *, over: bool) -> None:
        """There is more of one that is on its way; where there is no room for one that ended, it has failed.

        One that was cancelled or deleted stays as it is.
        """
        try:
            with self._transaction():
                self._change(tenant, said, over=over)
        except sqlite3.Error as error:
            log.warning("response %s is not stored: %s", said["id"], error)

    def _change(self, tenant: str, said: dict[str, Any], *, over: bool) -> None:
        answer, key = msgspec.json.encode(said), (tenant, said["id"])
        if not over:  # as large as when it came, but for a word
            change = "UPDATE responses SET said = ? WHERE tenant = ? AND id = ? AND ended_s IS NULL"
            self._base.execute(change, (answer, *key))
            return
        found = self._base.execute(
            "SELECT length(input) FROM responses WHERE tenant = ? AND id = ? AND ended_s IS NULL", key
        ).fetchone()
        if found is None:
            return
        if why := self._no_room(tenant, said["id"], len(answer) + found[0]):
            log.warning("response %s failed: %s", said["id"], why)
            answer = msgspec.json.encode(_failed(said, f"the answer cannot be stored: {why}"))
        self._base.execute(
            "UPDATE responses SET said = ?, ended_s = ?, bytes = ? WHERE tenant = ? AND id = ?",
            (answer, self._now_s(), len(answer) + found[0], *key),
        )
        self._push_out(tenant)

    def _no_room(self, tenant: str, name: str, size: int) -> str:
        """Why so many bytes do not fit beside the other answers that are on their way; empty: they do."""
        if size > self._bytes_max:
            return f"with what led to it, it takes {size} bytes, and limits.responses_bytes_max is {self._bytes_max}"
        self._end_abandoned(tenant)
        others, bytes_of_others = self._base.execute(
            "SELECT count(*), coalesce(sum(bytes), 0) FROM responses WHERE tenant = ? AND ended_s IS NULL AND id != ?",
            (tenant, name),
        ).fetchone()
        if others >= self._most:
            return f"{others} answers are on their way, which are all that this server stores (stored_responses)"
        if bytes_of_others + size > self._bytes_max:
            return (
                f"with what led to it, it takes {size} bytes, others that are on their way {bytes_of_others}, "
                f"and limits.responses_bytes_max is {self._bytes_max}"
            )
        return ""

    def _push_out(self, tenant: str) -> None:
        """Forget what ended long ago, and what ended first where there is too much."""
        bounds = {"most": self._most, "bytes_max": self._bytes_max, "since_s": self._now_s() - self._kept_s}
        self._base.execute(OLDEST, {"tenant": tenant, **bounds})

    def _end_abandoned(self, tenant: str) -> None:
        """What was on its way in workers that are gone has failed."""
        rows = self._base.execute("SELECT DISTINCT pid FROM responses WHERE tenant = ? AND ended_s IS NULL", (tenant,))
        for pid in [pid for (pid,) in rows.fetchall() if not _lives(pid)]:
            under_way = "SELECT number, said FROM responses WHERE tenant = ? AND ended_s IS NULL AND pid = ?"
            for number, said in self._base.execute(under_way, (tenant, pid)).fetchall():
                answer = msgspec.json.encode(_failed(msgspec.json.decode(said), ABANDONED))
                change = "UPDATE responses SET said = ?, ended_s = ?, bytes = ? + length(input) WHERE number = ?"
                self._base.execute(change, (answer, self._now_s(), len(answer), number))

    def get(self, tenant: str, name: str) -> StoredResponse | None:
        """One of this tenant's; None if there is none, or not any more."""
        row = self._row(tenant, name)
        if row is not None and row[2] is None and not _lives(row[3]):
            with suppress(sqlite3.Error), self._transaction():
                self._end_abandoned(tenant)
            row = self._row(tenant, name)
        if row is None:
            return None
        said, items, ended_s, _ = row
        return StoredResponse(msgspec.json.decode(said), msgspec.json.decode(items), ended_s is not None)

    def _row(self, tenant: str, name: str) -> tuple[bytes, bytes, float | None, int] | None:
        row: tuple[bytes, bytes, float | None, int] | None = self._base.execute(
            "SELECT said, input, ended_s, pid FROM responses WHERE tenant = ? AND id = ? "
            "AND (ended_s IS NULL OR ended_s >= ?)",
            (tenant, name, self._now_s() - self._kept_s),
        ).fetchone()
        return row

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """Nobody else writes meanwhile, and all of it is done or nothing."""
        self._base.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._base.execute("COMMIT")
        except BaseException:
            if self._base.in_transaction:
                self._base.execute("ROLLBACK")
            raise

    def remove(self, tenant: str, name: str) -> None:
        """Forget one."""
        self._base.execute("DELETE FROM responses WHERE tenant = ? AND id = ?", (tenant, name))


def _failed(said: dict[str, Any], message: str) -> dict[str, Any]:
    """An answer that came to nothing."""
    error = {"code": "server_error", "message": message}
    kept = {name: value for name, value in said.items() if name != "completed_at"}
    return kept | {"status": "failed", "output": [], "error": error, "incomplete_details": None}


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Nobody else is in here meanwhile."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)  # and with it the lock


def _lives(pid: int) -> bool:
    """Whether there is such a process, which is one of ours."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
