"""The settings of one data-parallel rank, from those of the engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from lockstep.core.contract.config import SchedConfig

DIVIDED = (
    *("max_running_requests", "request_rows", "max_queued_requests", "radix_capacity_pages", "transfer_slots"),
    "pp_max_micro_batch_size",
)
"""Limits of an engine that are divided evenly among its ranks."""


def settings_of_rank(given: Mapping[str, Any], ranks: int, usual: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the settings of each rank: the engine's memory, rows and prefill budgets are divided evenly.

    SGLang divides `chunked_prefill_size` and `max_running_requests` in the same way.

    Args:
        usual: of settings that are not given; None: their defaults. A setting in neither of the two is left out.
    """
    defaults = {field.name: field.default for field in msgspec.structs.fields(SchedConfig)}
    usual = defaults if usual is None else usual
    page_size = given.get("page_size", defaults["page_size"])
    share = dict(given)
    for name in DIVIDED:
        value = given.get(name, usual.get(name))
        if isinstance(value, int):
            share[name] = -(-value // ranks)
    for name in ("chunked_prefill_size", "max_prefill_tokens"):
        value = given.get(name, usual.get(name))
        if value is not None:
            share[name] = max(value // ranks // page_size * page_size, page_size)
    if "pages" in given:
        share["pages"] = given["pages"] // ranks
    tiers = given.get("tiers", msgspec.UNSET)
    if tiers is not msgspec.UNSET:
        share["tiers"] = msgspec.structs.replace(tiers, host_pages=max(tiers.host_pages // ranks, 1))
    return {**share, "dp_ranks": ranks, "dp_rank": 0}
