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

from collections.abc import Sequence
from typing import Any

from starlette.responses import Response

from lockstep.api.endpoints.errors import ApiError
from lockstep.api.endpoints.http import JsonResponse
from lockstep.api.endpoints.schemas import ConversationBody, ConversationItemsBody, InputItem, MetadataBody
from lockstep.api.endpoints.server import Call, Server
from lockstep.api.endpoints.stored_conversations import StoredConversations

NONE_STORED = "this server stores no conversations (--stored-responses 0)"


def _found(server: Server, call: Call[Any]) -> tuple[StoredConversations, str, dict[str, Any]]:
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


def listed(
    items: list[dict[str, Any]], call: Call[Any], order: str = "desc", *, shown: int = LISTED, most: int = LISTED_MAX
) -> dict[str, Any]:
    """Return a page of items by the parameters `order`, `after` and `limit` of the request. Raises ApiError.

    Args:
        shown, most: default and largest number of items in one list.
    """
    query = call.request.query_params
    order, after, limit = query.get("order", order), query.get("after"), query.get("limit", str(shown))
    if order not in ("asc", "desc"):
        raise ApiError(400, f"`order` must be asc or desc, got {order[:40]!r}", "order")
    if not (limit.isascii() and limit.isdigit() and len(limit) < 9 and 1 <= int(limit) <= most):
        raise ApiError(400, f"`limit` must be 1 to {most}, got {limit[:40]!r}", "limit")
    if order == "desc":
        items = items[::-1]
    if after is not None:
        at = [number for number, one in enumerate(items) if one.get("id") == after]
        if not at:
            raise ApiError(400, f"`after` must be the id of an item, got {after[:80]!r}", "after")
        items = items[at[0] + 1 :]
    page = items[: int(limit)]
    ends = {"first_id": page[0].get("id"), "last_id": page[-1].get("id")} if page else {}
    return {"object": "list", "data": page, "has_more": len(items) > len(page), **ends}
