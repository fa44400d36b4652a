"""Records of the load of experts: from a core's answer to JSON, and the errors of a server without a record."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from lockstep.api.endpoints import expert_api
from lockstep.api.endpoints.errors import ApiError
from lockstep.api.observability.expert_load import ExpertFold, imbalance_of
from lockstep.api.observability.metrics import Metrics
from lockstep.api.processes.engine_process import EngineProcess
from lockstep.api.processes.wire import Answered, ExpertFigures, Gauges
from lockstep.core.cluster.expert_placement import ExpertLoads
from lockstep.core.contract.commands import ControlAnswered
from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.events import (
    ControlRequested,
    ExpertLoadMeasured,
    LaneReady,
    RecordExpertLoad,
    RequestArrived,
    TokenIds,
)
from lockstep.core.scheduler.engine import Engine


class OneEngine:
    """An engine behind a worker's bridge: a core that launches, a device that reports these counts."""

    gone = False

    def __init__(self, number: int, counts: np.ndarray) -> None:
        self.number, self._counts, self._sent = number, counts, list[Answered]()
        self.engine = Engine(SchedConfig(pages=16, context_tokens_max=128, expert_load_interval=8))
        prompt = TokenIds(np.arange(4, dtype="<i4").tobytes())
        self.engine.step(RequestArrived(0, request_id=0, prompt=prompt, max_new_tokens=4))

    def launch(self) -> None:
        """Launch the prompt, whose load is not measured yet."""
        assert self.engine.step(LaneReady(0)).launched() is not None

    async def ask(self, control: RecordExpertLoad) -> Answered:
        """Answer as the engine process does: the core's answer, through its message."""
        step = self.engine.step(ControlRequested(0, 7, control))
        if not any(isinstance(one, ControlAnswered) for one in step.commands):
            step = self.engine.step(ExpertLoadMeasured(0, len(self._counts), self._counts.tobytes()))
        future: Future[ControlAnswered] = Future()
        future.set_result(next(one for one in step.commands if isinstance(one, ControlAnswered)))
        process = cast("EngineProcess", SimpleNamespace(outbox=SimpleNamespace(answer=self._sent.append)))
        EngineProcess._answer(process, 0, 7, future)
        return self._sent.pop()


def asked(handler: Any, *engines: OneEngine, able: tuple[str, ...] = ("experts",)) -> Any:
    """Return the answer of an endpoint of a server with these engines."""
    server = SimpleNamespace(info=lambda: SimpleNamespace(able=able), bridge=SimpleNamespace(engines=list(engines)))
    call = SimpleNamespace(request=SimpleNamespace(query_params={}))
    return json.loads(asyncio.run(handler(server, call)).body)


COUNTS = np.array([[6, 2, 0, 0], [2, 2, 2, 2]], np.int64)


def test_a_record_is_begun_stopped_and_read() -> None:
    engine = OneEngine(0, COUNTS)
    for handler in (expert_api.stop_record, expert_api.dump_record):
        with pytest.raises(ApiError, match="not being recorded; start a record first") as refused:
            asked(handler, engine)
        assert refused.value.status == 400
    assert asked(expert_api.start_record, engine) == {"success": True, "message": "the load of experts is recorded"}
    assert asked(expert_api.dump_record, engine)["logical_count"] == []
    engine.launch()
    record = {"batches": 1, "duration_s": 0.0, "imbalance": [3.0, 1.0], "logical_count": COUNTS.tolist()}
    assert asked(expert_api.dump_record, engine) == {"success": True, "recording": True, **record}
    assert asked(expert_api.stop_record, engine)["success"]
    assert asked(expert_api.dump_record, engine) == {"success": True, "recording": False, **record}
    again = asked(expert_api.start_record, engine), asked(expert_api.start_record, engine)
    assert again[1]["message"].endswith("the record that was running is dropped")


def test_several_engines_have_a_record_each() -> None:
    engines = [OneEngine(number, COUNTS * (1 + number)) for number in range(2)]
    asked(expert_api.start_record, *engines)
    for engine in engines:
        engine.launch()
    said = asked(expert_api.dump_record, *engines)
    assert [one["engine"] for one in said["engines"]] == [0, 1]
    assert said["engines"][1]["logical_count"] == (2 * COUNTS).tolist()


def test_an_engine_that_counts_nothing_names_the_setting() -> None:
    for handler in (expert_api.start_record, expert_api.stop_record, expert_api.dump_record):
        with pytest.raises(ApiError, match="--set expert_load_interval=100, for models with experts") as refused:
            asked(handler, OneEngine(0, COUNTS), able=())
        assert refused.value.status == 501


def test_figures_are_of_the_newest_measurements() -> None:
    assert imbalance_of(np.array([[3, 1], [0, 0]])) == [1.5, 1.0]
    fold = ExpertFold()
    assert fold.figures(None) is None
    assert fold.figures(ExpertLoads(np.array([[4, 0]]), 1)) == ExpertFigures(1, 4, 2.0)
    assert fold.figures(ExpertLoads(np.array([[5, 1]]), 2)) == ExpertFigures(2, 6, 1.0)
    assert fold.figures(ExpertLoads(np.array([[5, 1]]), 2)) == ExpertFigures(2, 6, 1.0)


def test_metrics_have_the_load_of_experts() -> None:
    metrics = Metrics()
    metrics.name_model("moe")
    gauges = Gauges(0, 0, 16, 0.0, 0, 0, 0, True, experts=ExpertFigures(3, 120, 1.25))
    text = metrics.exposition(gauges).decode()
    assert 'lockstep_expert_tokens_total{engine="0",model_name="moe"} 120.0' in text
    assert 'lockstep_expert_load_imbalance{engine="0",model_name="moe"} 1.25' in text
