"""Storage of conversations: a file beside the stored answers, for all workers, bounded for each tenant.

Beyond the limits the conversations that were used longest ago are removed, and each one some time after its last use.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from lockstep.api.endpoints.answer_run import new_hex
from lockstep.api.endpoints.errors import ApiError
from lockstep.api.endpoints.stored_responses import BUSY_S

TABLES = """
CREATE TABLE IF NOT EXISTS conversations (
    tenant TEXT, id TEXT, created_s INTEGER, used_s REAL, bytes INTEGER, metadata BLOB, PRIMARY KEY (tenant, id)
);
CREATE TABLE IF NOT EXISTS items (
    number INTEGER PRIMARY KEY AUTOINCREMENT, tenant TEXT, conversation TEXT, id TEXT, item BLOB,
    UNIQUE (tenant, conversation, id)
);
"""


class StoredConversations:
    """One worker's access to the conversations.

    Args:
        most, bytes_max, kept_s: limits of each tenant.
    """

    def __init__(self, folder: Path, *, most: int, bytes_max: int, kept_s: float) -> None:
        path = folder / "conversations.sqlite"
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        self._most, self._bytes_max, self._kept_s = most, bytes_max, kept_s
        self._base = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None)
        self._base.execute("PRAGMA journal_mode = WAL")
        self._base.execute("PRAGMA synchronous = OFF")
        self._base.executescript(TABLES)

    def close(self) -> None:
        """Close the file."""
        self._base.close()

    def create(self, tenant: str, items: Sequence[dict[str, Any]], metadata: dict[str, str]) -> dict[str, Any]:
        """Store a conversation, and return it. Raises ApiError if it is too large."""
        name, now_s = f"conv_{new_hex(24, 'conversation')}", int(time.time())
        about = msgspec.json.encode(metadata)
        row = (tenant, name, now_s, time.time(), len(about), about)
        self._base.execute("INSERT INTO conversations VALUES (?, ?, ?, ?, ?, ?)", row)
        self.add(tenant, name, items)
        return {"id": name, "object": "conversation", "created_at": now_s, "metadata": metadata}

    def find(self, tenant: str, name: str) -> dict[str, Any] | None:
        """Return a conversation without its items; None without."""
        since_s = time.time() - self._kept_s
        found = self._base.execute(
            "SELECT created_s, metadata FROM conversations WHERE tenant = ? AND id = ? AND used_s >= ?",
            (tenant, name, since_s),
        ).fetchone()
        if found is None:
            return None
        created_s, about = found
        metadata = msgspec.json.decode(about)
        return {"id": name, "object": "conversation", "created_at": created_s, "metadata": metadata}

    def describe(self, tenant: str, name: str, metadata: dict[str, str]) -> None:
        """Replace the metadata of a conversation."""
        change = "UPDATE conversations SET metadata = ? WHERE tenant = ? AND id = ?"
        self._base.execute(change, (msgspec.json.encode(metadata), tenant, name))

    def items(self, tenant: str, name: str) -> list[dict[str, Any]]:
        """Return all items of a conversation, oldest first."""
        rows = self._base.execute(
            "SELECT item FROM items WHERE tenant = ? AND conversation = ? ORDER BY number", (tenant, name)
        )
        return [msgspec.json.decode(item) for (item,) in rows.fetchall()]

    def add(self, tenant: str, name: str, items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Add items, and return them with their ids. Raises ApiError if the conversation would be too large."""
        added = [one if one.get("id") else {"id": f"item_{new_hex(24, 'item')}", **one} for one in items]
        encoded = [msgspec.json.encode(one) for one in added]
        size = sum(map(len, encoded))
        try:
            self._base.execute("BEGIN IMMEDIATE")
            (held,) = self._base.execute(
                "SELECT coalesce(sum(bytes), 0) FROM conversations WHERE tenant = ? AND id = ?", (tenant, name)
            ).fetchone()
            if held + size > self._bytes_max:
                message = f"the conversation would take {held + size} bytes, and limits.responses_bytes_max is "
                raise ApiError(400, f"{message}{self._bytes_max}", "conversation")
            rows = [(tenant, name, one["id"], data) for one, data in zip(added, encoded, strict=True)]
            self._base.executemany(
                "INSERT OR REPLACE INTO items (tenant, conversation, id, item) VALUES (?, ?, ?, ?)", rows
            )
            self._base.execute(
                "UPDATE conversations SET used_s = ?, bytes = bytes + ? WHERE tenant = ? AND id = ?",
                (time.time(), size, tenant, name),
            )
            self._push_out(tenant)
            self._base.execute("COMMIT")
        except BaseException:
            if self._base.in_transaction:
                self._base.execute("ROLLBACK")
            raise
        return added

    def _push_out(self, tenant: str) -> None:
        """Remove expired conversations, and beyond the limits those that were used longest ago."""
        rows = self._base.execute(
            "SELECT id, used_s, bytes FROM conversations WHERE tenant = ? ORDER BY used_s DESC", (tenant,)
        ).fetchall()
        used = 0
        for number, (name, used_s, size) in enumerate(rows):
            used += size
            if number >= self._most or (number and used > self._bytes_max) or time.time() - used_s > self._kept_s:
                self.remove(tenant, name)

    def remove(self, tenant: str, name: str) -> None:
        """Remove a conversation with its items."""
        self._base.execute("DELETE FROM conversations WHERE tenant = ? AND id = ?", (tenant, name))
        self._base.execute("DELETE FROM items WHERE tenant = ? AND conversation = ?", (tenant, name))

    def remove_item(self, tenant: str, name: str, item: str) -> bool:
        """Remove an item. Returns whether it existed."""
        gone = "DELETE FROM items WHERE tenant = ? AND conversation = ? AND id = ?"
        return self._base.execute(gone, (tenant, name, item)).rowcount > 0
