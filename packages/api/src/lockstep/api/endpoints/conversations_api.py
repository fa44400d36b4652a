"""/v1/conversations: OpenAI's stored conversations, which responses read and extend.

    POST /v1/conversations {"items", "metadata"}          a conversation
    POST /v1/responses {"conversation": ID, "input"}      its items precede the input; input and output are added
    GET, POST /v1/conversations/{id}/items                its items, in pages; more items
    GET, DELETE /v1/conversations/{id}/items/{item_id}    one item

Conversations are in a file beside the stored answers, for all workers; private to the key's tenant and bounded: as many
as `--stored-responses`, together at most `limits.responses_bytes_max`. Beyond that the one that was used longest ago is
removed; each is removed `limits.response_kept_s` after its last use.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from starlette.responses import Response

from lockstep.api.endpoints.answer_run import new_hex
from lockstep.api.endpoints.errors import ApiError
from lockstep.api.endpoints.http import JsonResponse
from lockstep.api.endpoints.schemas import ConversationBody, ConversationItemsBody, InputItem, MetadataBody
from lockstep.api.endpoints.server import Call, Server
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
NONE_STORED = "this server stores no conversations (--stored-responses 0)"
ITEMS_AT_ONCE = 20
"""Most items that one request adds, as at OpenAI."""


class Conversations:
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


def _found(server: Server, call: Call[Any]) -> tuple[Conversations, str, dict[str, Any]]:
    """Return the store, and id and fields of the conversation of the request's path. Raises ApiError, 404."""
    name = str(call.request.path_params["conversation_id"])
    if server.conversations is None:
        raise ApiError(404, NONE_STORED)
    found = server.conversations.find(call.tenant, name)
    if found is None:
        raise ApiError(404, f"there is no conversation {name[:80]!r} here, or it has expired")
    return server.conversations, name, found


def _items(items: Sequence[InputItem]) -> list[dict[str, Any]]:
    return [{"type": one.type, **one.model_dump(exclude_unset=True)} for one in items]


async def create(server: Server, call: Call[ConversationBody]) -> Response:
    """Create a conversation."""
    if server.conversations is None:
        raise ApiError(400, NONE_STORED)
    body = call.body
    return JsonResponse(server.conversations.create(call.tenant, _items(body.items or ()), body.metadata or {}))


async def conversation(server: Server, call: Call[None]) -> Response:
    """Describe a conversation."""
    return JsonResponse(_found(server, call)[2])


async def describe(server: Server, call: Call[MetadataBody]) -> Response:
    """Replace the metadata of a conversation."""
    store, name, found = _found(server, call)
    store.describe(call.tenant, name, call.body.metadata or {})
    return JsonResponse(found | {"metadata": call.body.metadata or {}})


async def delete(server: Server, call: Call[None]) -> Response:
    """Delete a conversation."""
    store, name, _ = _found(server, call)
    store.remove(call.tenant, name)
    return JsonResponse({"id": name, "object": "conversation.deleted", "deleted": True})


async def add_items(server: Server, call: Call[ConversationItemsBody]) -> Response:
    """Add items to a conversation."""
    store, name, _ = _found(server, call)
    return JsonResponse(listed(store.add(call.tenant, name, _items(call.body.items)), call, order="asc"))


async def list_items(server: Server, call: Call[None]) -> Response:
    """List the items of a conversation, newest first or by `order`."""
    store, name, _ = _found(server, call)
    return JsonResponse(listed(store.items(call.tenant, name), call))


async def item(server: Server, call: Call[None]) -> Response:
    """Return one item of a conversation."""
    store, name, _ = _found(server, call)
    wanted = str(call.request.path_params["item_id"])
    for one in store.items(call.tenant, name):
        if one.get("id") == wanted:
            return JsonResponse(one)
    raise ApiError(404, f"there is no item {wanted[:80]!r} in this conversation")


async def delete_item(server: Server, call: Call[None]) -> Response:
    """Delete one item of a conversation."""
    store, name, found = _found(server, call)
    wanted = str(call.request.path_params["item_id"])
    if not store.remove_item(call.tenant, name, wanted):
        raise ApiError(404, f"there is no item {wanted[:80]!r} in this conversation")
    return JsonResponse(found)


LISTED, LISTED_MAX = 20, 100
"""Default and largest number of items in one list, as at OpenAI."""


def listed(items: list[dict[str, Any]], call: Call[Any], order: str = "desc") -> dict[str, Any]:
    """Return a page of items by the parameters `order`, `after` and `limit` of the request. Raises ApiError."""
    query = call.request.query_params
    order, after, limit = query.get("order", order), query.get("after"), query.get("limit", str(LISTED))
    if order not in ("asc", "desc"):
        raise ApiError(400, f"`order` must be asc or desc, got {order[:40]!r}", "order")
    if not (limit.isascii() and limit.isdigit() and len(limit) < 4 and 1 <= int(limit) <= LISTED_MAX):
        raise ApiError(400, f"`limit` must be 1 to {LISTED_MAX}, got {limit[:40]!r}", "limit")
    if order == "desc":
        items = items[::-1]
    if after is not None:
        at = [number for number, one in enumerate(items) if one.get("id") == after]
        if not at:
            raise ApiError(400, f"`after` must be the id of an item, got {after[:80]!r}", "after")
        items = items[at[0] + 1 :]
    shown = items[: int(limit)]
    ends = {"first_id": shown[0].get("id"), "last_id": shown[-1].get("id")} if shown else {}
    return {"object": "list", "data": shown, "has_more": len(items) > len(shown), **ends}
