"""Storage of answers of /v1/responses, which can be fetched again, continued, or cancelled.

    FOLDER/responses.sqlite     for all workers of a server; beside its journal, or removed with the server

Limits (number of answers, bytes, seconds) apply to each tenant separately, so a tenant's answers never displace those
of another tenant. Beyond them the answers that ended first are removed. An answer in progress is never removed, since
its client will fetch it: if no ended answer can be removed, no new answer is stored. Each answer is stored with the
whole conversation before it, so a continuation needs no older answer.
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

BUSY_S = 1.0  # longest wait for the lock of the file
TABLE = """
CREATE TABLE IF NOT EXISTS responses (
    number INTEGER PRIMARY KEY AUTOINCREMENT, tenant TEXT NOT NULL, id TEXT NOT NULL, ended_s REAL,
    pid INTEGER NOT NULL, bytes INTEGER NOT NULL, response BLOB NOT NULL, input BLOB NOT NULL,
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
"""Bytes reserved for an answer in progress, so that at least the message of its failure fits."""
ABANDONED = "the process that generated the answer ended"


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A stored answer. `input` is its whole input, earlier answers included."""

    response: dict[str, Any]
    input: list[dict[str, Any]]
    over: bool  # whether the answer has ended


class StoredResponses:
    """One worker's access to the stored answers.

    Args:
        folder: folder of the file, which is created if missing.
        most, bytes_max, kept_s: limits per tenant: number of answers, their bytes, seconds after the end of each.
        now_s: returns seconds since 1970.
    """

    def __init__(
        self, folder: Path, *, most: int, bytes_max: int, kept_s: float, now_s: Callable[[], float] = time.time
    ) -> None:
        path = folder / "responses.sqlite"
        self._most, self._bytes_max, self._kept_s, self._now_s = most, bytes_max, kept_s, now_s
        # workers start at the same time, and one of them creates the file
        with _alone(folder / "responses.sqlite.lock"):
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            self._base = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None)
            self._base.execute("PRAGMA journal_mode = WAL")  # the file remains intact when a worker is killed
            self._base.execute("PRAGMA synchronous = OFF")  # the data need not survive a crash of the machine
            self._base.execute(TABLE)
            self._base.execute(UNDER_WAY)

    def close(self) -> None:
        """Close the file."""
        self._base.close()

    def put(
        self,
        tenant: str,
        response: dict[str, Any],
        items: Sequence[dict[str, Any]],
        *,
        over: bool,
        lasting: bool = False,
    ) -> str:
        """Store an answer, complete or in progress. Returns why that is not possible; empty: it is stored.

        Args:
            lasting: another worker will continue it if this one ends.
        """
        answer, source = msgspec.json.encode(response), msgspec.json.encode(items)
        size = len(answer) + len(source) + (0 if over else FAILURE_BYTES)
        row = (
            tenant,
            response["id"],
            self._now_s() if over else None,
            0 if lasting else os.getpid(),
            size,
            answer,
            source,
        )
        names = "tenant, id, ended_s, pid, bytes, response, input"
        try:
            with self._transaction():
                why = self._no_room(tenant, response["id"], size)
                if not why:
                    self._base.execute(f"INSERT OR REPLACE INTO responses ({names}) VALUES (?, ?, ?, ?, ?, ?, ?)", row)
                    self._push_out(tenant)
        except sqlite3.Error as error:
            why = f"the file of stored answers cannot be written to: {error}"
        if why:
            log.warning("response %s is not stored: %s", response["id"], why)
        return why

    def change(self, tenant: str, response: dict[str, Any], *, over: bool) -> None:
        """Update an answer in progress. An answer that ended (`over`) and does not fit is stored as failed.

        An answer that was cancelled or deleted is not changed.
        """
        try:
            with self._transaction():
                self._change(tenant, response, over=over)
        except sqlite3.Error as error:
            log.warning("response %s is not stored: %s", response["id"], error)

    def _change(self, tenant: str, response: dict[str, Any], *, over: bool) -> None:
        answer, key = msgspec.json.encode(response), (tenant, response["id"])
        if not over:  # only the status changes, so the recorded size remains valid
            change = "UPDATE responses SET response = ? WHERE tenant = ? AND id = ? AND ended_s IS NULL"
            self._base.execute(change, (answer, *key))
            return
        found = self._base.execute(
            "SELECT length(input) FROM responses WHERE tenant = ? AND id = ? AND ended_s IS NULL", key
        ).fetchone()
        if found is None:
            return
        if why := self._no_room(tenant, response["id"], len(answer) + found[0]):
            log.warning("response %s failed: %s", response["id"], why)
            answer = msgspec.json.encode(_failed(response, f"the answer cannot be stored: {why}"))
        self._base.execute(
            "UPDATE responses SET response = ?, ended_s = ?, bytes = ? WHERE tenant = ? AND id = ?",
            (answer, self._now_s(), len(answer) + found[0], *key),
        )
        self._push_out(tenant)

    def _no_room(self, tenant: str, name: str, size: int) -> str:
        """Return why `size` bytes do not fit beside the other answers in progress; empty: they fit."""
        if size > self._bytes_max:
            return f"with its conversation it takes {size} bytes, and limits.responses_bytes_max is {self._bytes_max}"
        self._end_abandoned(tenant)
        others, bytes_of_others = self._base.execute(
            "SELECT count(*), coalesce(sum(bytes), 0) FROM responses WHERE tenant = ? AND ended_s IS NULL AND id != ?",
            (tenant, name),
        ).fetchone()
        if others >= self._most:
            return f"{others} answers are in progress, and this server stores no more (stored_responses)"
        if bytes_of_others + size > self._bytes_max:
            return (
                f"with its conversation it takes {size} bytes, other answers in progress take {bytes_of_others}, "
                f"and limits.responses_bytes_max is {self._bytes_max}"
            )
        return ""

    def _push_out(self, tenant: str) -> None:
        """Remove expired answers, and beyond the limits the answers that ended first."""
        bounds = {"most": self._most, "bytes_max": self._bytes_max, "since_s": self._now_s() - self._kept_s}
        self._base.execute(OLDEST, {"tenant": tenant, **bounds})

    def _end_abandoned(self, tenant: str) -> None:
        """Mark answers in progress as failed if their worker has ended."""
        rows = self._base.execute("SELECT DISTINCT pid FROM responses WHERE tenant = ? AND ended_s IS NULL", (tenant,))
        for pid in [pid for (pid,) in rows.fetchall() if not _is_running(pid)]:
            under_way = "SELECT number, response FROM responses WHERE tenant = ? AND ended_s IS NULL AND pid = ?"
            for number, response in self._base.execute(under_way, (tenant, pid)).fetchall():
                answer = msgspec.json.encode(_failed(msgspec.json.decode(response), ABANDONED))
                change = "UPDATE responses SET response = ?, ended_s = ?, bytes = ? + length(input) WHERE number = ?"
                self._base.execute(change, (answer, self._now_s(), len(answer), number))

    def get(self, tenant: str, name: str) -> StoredResponse | None:
        """Return an answer of this tenant; None if it does not exist or has expired."""
        row = self._row(tenant, name)
        if row is not None and row[2] is None and not _is_running(row[3]):
            with suppress(sqlite3.Error), self._transaction():
                self._end_abandoned(tenant)
            row = self._row(tenant, name)
        if row is None:
            return None
        response, items, ended_s, _ = row
        return StoredResponse(msgspec.json.decode(response), msgspec.json.decode(items), ended_s is not None)

    def _row(self, tenant: str, name: str) -> tuple[bytes, bytes, float | None, int] | None:
        row: tuple[bytes, bytes, float | None, int] | None = self._base.execute(
            "SELECT response, input, ended_s, pid FROM responses WHERE tenant = ? AND id = ? "
            "AND (ended_s IS NULL OR ended_s >= ?)",
            (tenant, name, self._now_s() - self._kept_s),
        ).fetchone()
        return row

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """Run a transaction without concurrent writers, committed as a whole or not at all."""
        self._base.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._base.execute("COMMIT")
        except BaseException:
            if self._base.in_transaction:
                self._base.execute("ROLLBACK")
            raise

    def remove(self, tenant: str, name: str) -> None:
        """Remove an answer."""
        self._base.execute("DELETE FROM responses WHERE tenant = ? AND id = ?", (tenant, name))


def _failed(response: dict[str, Any], message: str) -> dict[str, Any]:
    """Return an answer with status failed and this message."""
    error = {"code": "server_error", "message": message}
    kept = {name: value for name, value in response.items() if name != "completed_at"}
    return kept | {"status": "failed", "output": [], "error": error, "incomplete_details": None}


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Hold an exclusive lock of a file."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)  # releases the lock as well


def _is_running(pid: int) -> bool:
    """Return whether a process with this id runs; true for 0, an answer that outlives its worker."""
    if pid == 0:
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
