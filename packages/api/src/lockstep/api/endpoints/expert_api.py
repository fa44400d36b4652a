"""Endpoints about the load of experts, under SGLang's names: a record of it begins, ends, and is read."""

from __future__ import annotations

from typing import Any

import numpy as np
from starlette.responses import Response

from lockstep.api.endpoints.control_api import answer_of, answers_to, needs
from lockstep.api.endpoints.http import JsonResponse
from lockstep.api.endpoints.server import Call, Server
from lockstep.api.observability.expert_load import counts_of, imbalance_of
from lockstep.api.processes.wire import ExpertRecordMessage
from lockstep.core.contract.events import RecordExpertLoad

OTHERWISE = "the tokens of experts are counted with --set expert_load_interval=100, for models with experts"


async def start_record(server: Server, call: Call[None]) -> Response:
    """Begin a record of the tokens routed to each expert; the record before is dropped."""
    needs(server, "experts", OTHERWISE)
    return answer_of(await answers_to(server, call, RecordExpertLoad("start")))


async def stop_record(server: Server, call: Call[None]) -> Response:
    """Stop the record, which is kept until the next one begins."""
    needs(server, "experts", OTHERWISE)
    return answer_of(await answers_to(server, call, RecordExpertLoad("stop")))


async def dump_record(server: Server, call: Call[None]) -> Response:
    """Return the tokens routed to each expert of each layer while the record ran, or since it began."""
    needs(server, "experts", OTHERWISE)
    answered = await answers_to(server, call, RecordExpertLoad("dump"))
    answer_of(answered)  # raises if an engine has no record
    records = [(engine.number, one.experts) for engine, one in answered if one.experts is not None]
    if len(records) == 1:
        return JsonResponse({"success": True, **_shown(records[0][1])})
    return JsonResponse({"success": True, "engines": [{"engine": number, **_shown(one)} for number, one in records]})


def _shown(record: ExpertRecordMessage) -> dict[str, Any]:
    """Return a record as fields of an answer."""
    counts = counts_of(record)
    return {
        "recording": record.recording,
        "duration_s": record.duration_us / 1e6,
        "batches": record.batches,
        "imbalance": [round(one, 4) for one in imbalance_of(counts)] if counts.size else [],
        "logical_count": np.asarray(counts).tolist(),  # SGLang's name: by layer and expert, whatever rank holds it
    }
