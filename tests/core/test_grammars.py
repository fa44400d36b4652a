"""Grammars where a scenario would not show it as well: remembered failures, and results that are refused."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from lockstep.core.contract.commands import CompileGrammar, RejectRequest, Step
from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.errors import ContractError
from lockstep.core.contract.events import (
    BatchFinished,
    Grammar,
    GrammarReady,
    LaneReady,
    RequestArrived,
    RequestCancelled,
    TokenRuns,
)
from lockstep.core.features import grammars
from lockstep.core.features.grammars import GRAMMARS_REMEMBERED
from lockstep.core.journal import snapshot
from lockstep.core.scheduler.decode_run import DecodeRun
from lockstep.core.scheduler.engine import Engine

CONFIG = SchedConfig(page_size=2, pages=64, overlap_depth=1)
TOKEN = np.array([5], np.int32).tobytes()


def asks_for(request_id: int, digest: bytes, **fields: object) -> RequestArrived:
    grammar = Grammar("regex", "a+", digest)
    event = RequestArrived(
        time_us=0, request_id=request_id, prompt=TokenRuns((1, 4)), max_new_tokens=50, grammar=grammar
    )
    return msgspec.structs.replace(event, **fields)


def compiles(step: Step) -> list[bytes]:
    return [command.grammar.digest for command in step.commands if isinstance(command, CompileGrammar)]


def running(**fields: object) -> Engine:
    """An engine with one request and a full pipeline, b1 and b2 in flight."""
    engine = Engine(CONFIG)
    engine.step(asks_for(0, b"g", **fields))
    engine.step(GrammarReady(0, b"g"))
    for batch in range(3):
        engine.step(LaneReady(0))
        if batch == 1:
            engine.step(BatchFinished(0, 0, TOKEN))
    assert [batch.plan.batch_id for batch in engine.in_flight] == [1, 2]
    return engine


def test_least_recently_asked_for_is_forgotten_and_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "GRAMMARS_REMEMBERED", 2)
    engine = Engine(CONFIG)
    for request_id, digest in enumerate([b"one", b"two", b"one", b"three"]):
        step = engine.step(asks_for(request_id, digest))
        assert compiles(step) == ([] if request_id == 2 else [digest])
        engine.step(GrammarReady(0, digest))
        engine.step(RequestCancelled(0, request_id))
    assert list(engine.grammars.known) == [b"one", b"three"]
    assert compiles(engine.step(asks_for(4, b"two"))) == [b"two"]


def test_grammar_in_use_is_never_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "GRAMMARS_REMEMBERED", 1)
    engine = Engine(CONFIG)
    engine.step(asks_for(0, b"used"))
    engine.step(GrammarReady(0, b"used"))
    for request_id in range(1, 4):
        engine.step(asks_for(request_id, b"passing %d" % request_id))
        engine.step(RequestCancelled(0, request_id))
    assert list(engine.grammars.known) == [b"used", b"passing 3"]


def test_answer_for_a_forgotten_grammar_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "GRAMMARS_REMEMBERED", 1)
    engine = Engine(CONFIG)
    for request_id, digest in enumerate([b"one", b"two"]):
        engine.step(asks_for(request_id, digest))
        engine.step(RequestCancelled(0, request_id))
    before = list(engine.grammars.known)
    assert not engine.step(GrammarReady(0, b"one", "too late")).decided
    assert list(engine.grammars.known) == before == [b"two"]


def test_memory_is_bounded_whatever_is_asked() -> None:
    engine = Engine(CONFIG)
    for request_id in range(GRAMMARS_REMEMBERED + 100):
        engine.step(asks_for(request_id, b"%d" % request_id))
        engine.step(RequestCancelled(0, request_id))
    assert len(engine.grammars.known) == GRAMMARS_REMEMBERED
    assert not engine.blocked


def test_grammar_without_a_digest_is_refused() -> None:
    engine = Engine(CONFIG)
    (command,) = engine.step(asks_for(0, b"")).commands
    assert isinstance(command, RejectRequest)
    assert command.reason == "bad_request"
    assert "`grammar` has no digest" in command.message


def test_no_run_of_decodes_begins_under_a_grammar_or_with_stop_texts() -> None:
    assert DecodeRun.begin(running()) is None
    assert DecodeRun.begin(running(grammar=None, stop_texts=("END",))) is None
    assert DecodeRun.begin(running(grammar=None)) is not None


@pytest.mark.parametrize(
    ("report", "message"),
    [
        ({"grammar_ended": (1,)}, "names sampling row 1 of 1"),
        ({"text_held": ((1, 1),)}, "names sampling row 1 of 1"),
        ({"text_held": ((0, 3),)}, "holds 3 of 2 tokens of sampling row 0 back"),
        ({"text_held": ((0, -1),)}, "holds -1 of 2 tokens"),
    ],
)
def test_impossible_result_is_refused_and_changes_nothing(report: dict[str, object], message: str) -> None:
    engine = running(stop_texts=("END",))
    before = snapshot.dump(engine)
    with pytest.raises(ContractError, match=message):
        engine.step(msgspec.structs.replace(BatchFinished(0, 1, TOKEN), **report))
    assert snapshot.dump(engine) == before


def test_equal_digests_need_equal_moves_of_matchers() -> None:
    """A digest covers the moves of matchers, and not the tokens, which are observed."""
    one, other, plain = running(), running(), running(grammar=None)
    assert one.digest == other.digest != plain.digest
    other_token = np.array([6], np.int32).tobytes()
    assert one.step(BatchFinished(0, 1, TOKEN)).digest == other.step(BatchFinished(0, 1, other_token)).digest
