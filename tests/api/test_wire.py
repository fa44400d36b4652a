"""Messages between processes: whole, typed, bounded; and each type has a handler."""

from __future__ import annotations

import contextlib
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("zmq", reason="the server is not installed")
pytest.importorskip("fastapi", reason="the server is not installed")

from lockstep.api.processes import bridge, engine_process, routing, wire
from lockstep.core.contract.events import GetState, RequestArrived, SamplingParams, TokenIds
from lockstep.host.adapters import Entry, KnownAdapters
from lockstep.host.weights import WeightsRead

ABOUT = wire.EngineInfo(
    model="m",
    kind="model",
    vocabulary=10,
    request_tokens_max=100,
    prompt_tokens_max=99,
    eos_token_ids=(2,),
    logprobs=True,
    settings={"page_size": 16},
    device="cpu",
)
REQUEST = RequestArrived(
    0,
    request_id=-1,
    prompt=TokenIds(b"\1\0\0\0"),
    max_new_tokens=5,
    sampling=SamplingParams(temperature=0.5, logit_bias=((1, 2.0),)),
    stop_texts=("é",),
)
TO_ENGINE = [
    wire.Hello(0, 1),
    wire.Submit(1, 7, REQUEST, 5, 6),
    wire.Submit(1, 7, REQUEST, None, None, 3, True, (4, 0)),
    wire.Settled(1, 3),
    wire.Cancel(1, 7),
    wire.CancelLabel(1, "label", "tenant"),
    wire.Ask(1, 8, GetState()),
    wire.ProfileRequest(1, 9, {"steps": 3, "with_stack": True, "activities": ("cpu",)}),
    wire.ProfileRequest(1, 10, None),
    wire.ReadWeights(1, 11, "model.norm.weight", 3),
    wire.CallFunction(1, 11, "warm", b'[[1],{"twice":true}]'),
    wire.JoinGroup(1, 12, "weights", "127.0.0.1", 29500, 1, 2),
    wire.LeaveGroup(1, 13, "weights"),
    wire.LoadLora(1, 14, "tone", "/adapters/tone", True),
    wire.UnloadLora(1, 15, "tone"),
    wire.WorkerGone(1),
    wire.StopEngine(0),
]
TO_WORKER = [
    wire.Welcome(3, 1, ABOUT),
    wire.StepAnswers(
        3,
        b"\7" + bytes(7),
        bytes(4),
        bytes(4),
        b"\1\0\0\0",
        b"\5\0\0\0",
        (wire.LogprobsMessage(0, bytes(4)),),
        (wire.SampleEnded(7, 0, "length", output_tokens=1, weights=((0, 1), (5, 2))),),
        wire.Gauges(0, 1, 10, 0.5, 3, 4, 0, True, tiers=wire.TierFigures((("load", "done", 3),), (("load", 9),), 4, 2)),
    ),
    wire.StepAnswers(
        3,
        b"",
        b"",
        b"",
        b"",
        b"",
        (),
        (),
        wire.Gauges(0, 1, 10, 0.5, 3, 4, 0, True, checks=wire.CheckFigures(2, 1, 0.5)),
    ),
    wire.Answered(3, 8, True, "done"),
    wire.Answered(3, 11, True, weights=WeightsRead("model.norm.weight", 1, (2,), "float32", [0.5, 1.0])),
    wire.Welcome(3, 1, ABOUT, 2, KnownAdapters(4, (Entry("tone", 2, "/adapters/tone"),))),
    wire.AdaptersKnown(3, KnownAdapters(5, ())),
    wire.EngineRestarting(3, 1, "why"),
    wire.EngineGone(3, "why"),
]
TO_ROUTER = [
    wire.Offer(1, 2, 300, (2**63, 2**64 - 1), "a session", "open", "another"),
    wire.Offer(1, 3, 300, tenant="alice", label="a label", priority=-5),
    wire.Offer(1, 4, 300, named=1),
    wire.InputBlocked(1, 5),
    wire.InputReleased(1, 5),
    wire.OfferClosed(1, 2, 30),
    wire.Withdraw("a label"),
    wire.SessionOver("a session"),
    wire.Drained(1, True),
    wire.EngineHere(1, 2, 4096, ("a session",), False),
    wire.EngineLost(1, 3),
    wire.EngineLost(1, None),
    wire.WorkerLost(1),
    wire.PromptOver(7),
    wire.StopRouter(),
]


def test_every_message_survives_a_round_trip() -> None:
    for message in TO_ENGINE:
        assert wire.read_by_engine(wire.encode(message)) == message
    for other in TO_WORKER:
        assert wire.read_by_worker(wire.encode(other), 3) == other
    for another in TO_ROUTER:
        assert wire.read_by_router(wire.encode(another)) == another
    for answer in (
        wire.Routed(3, 2, 1),
        wire.Routed(3, 2, -1, refused="queue_full"),
        wire.Routed(3, 2, 1, prefill=0, room=9),
    ):
        assert wire.read_routed(wire.encode(answer), 3) == answer


def test_every_message_has_one_handler() -> None:
    assert set(engine_process.HANDLERS) == set(get_args(wire.EngineMessage)) == {type(one) for one in TO_ENGINE}
    assert set(bridge.HANDLERS) == set(get_args(wire.WorkerMessage)) == {type(one) for one in TO_WORKER}
    # StopRouter ends the thread that handles the others; PromptOver is for PairRouting
    handled = {*routing.HANDLERS, wire.StopRouter, wire.PromptOver}
    assert handled == set(get_args(wire.RouterMessage)) == {type(one) for one in TO_ROUTER}


@pytest.mark.parametrize(
    ("frame", "said"),
    [
        (b"\x93\xa9Overthrow\x01\x02", "the engine got a message 'Overthrow'"),
        (wire.encode(wire.Hello(0, 1))[:-1], "bytes that are not a message"),
        (b"\x93\xa6Cancel\x01\xa1x", "a message 'Cancel'.*Expected `int`, got `str`"),
        (b"\x94\xa6Cancel\x01\x02\x03", "a message 'Cancel'"),  # a field too many
        (b"\x91\xa6Cancel", "a message 'Cancel'"),
        (b"", "0 bytes that are not a message"),
        (b"\x91" * 5000, "bytes that are not a message"),
        (wire.encode(wire.EngineGone(0, "x")), "a message 'EngineGone'"),  # a message for a worker
    ],
)
def test_unreadable_messages_are_named(frame: bytes, said: str) -> None:
    with pytest.raises(wire.WireError, match=said):
        wire.read_by_engine(frame)


def test_a_message_for_another_worker_is_refused() -> None:
    with pytest.raises(wire.WireError, match="worker 4 got EngineGone for worker 3"):
        wire.read_by_worker(wire.encode(wire.EngineGone(3, "why")), 4)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_an_error(frame: bytes) -> None:
    try:
        message = wire.read_by_engine(frame)
    except wire.WireError:
        return
    assert type(message) in engine_process.HANDLERS


@given(st.sampled_from([*TO_ENGINE, *TO_WORKER]), st.data())
def test_a_damaged_message_is_a_message_or_an_error(message: object, data: st.DataObject) -> None:
    frame = bytearray(wire.encode(message))  # type: ignore[arg-type]
    at = data.draw(st.integers(0, len(frame) - 1))
    frame[at] ^= data.draw(st.integers(1, 255))
    for read in (wire.read_by_engine, lambda one: wire.read_by_worker(one, 3)):
        with contextlib.suppress(wire.WireError):
            read(bytes(frame))
