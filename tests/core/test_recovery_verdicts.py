"""After the end of an engine: the requests to blame, their admission one at a time, and the answers that may go on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from lockstep.core.contract.commands import Step
from lockstep.core.contract.events import (
    BatchFinished,
    LaneReady,
    RequestArrived,
    SamplingParams,
    TokenIds,
)
from lockstep.host.durable import HostImage
from lockstep.host.recovery import KILLED_MAX, Probation, Recovered, RecoveredSample, Verdict, judge, may_go_on

DEPTH = 2  # batches in flight beside the one that runs


def engine_of(outputs: dict[int, int], rows: dict[int, int] | None = None) -> Any:
    """Return the part of an engine that is read here: requests with so many delivered output tokens."""
    requests = {number: SimpleNamespace(request_id=number, row=(rows or {}).get(number, -1)) for number in outputs}
    return SimpleNamespace(
        requests=requests,
        outputs_of=lambda request: outputs[request.request_id],
        config=SimpleNamespace(overlap_depth=DEPTH),
    )


def recovered_of(outputs: dict[int, int], in_flight: tuple[int, ...], image: HostImage, batches: int = 1) -> Recovered:
    unused = cast(Any, None)
    return Recovered(engine_of(outputs), unused, unused, image, in_flight=in_flight, batches=batches)


def test_a_crash_makes_suspects_of_all_that_was_in_flight() -> None:
    """A request that has left the engine since, and one that only waits, are none."""
    image = HostImage()
    found = judge(recovered_of({0: 5, 1: 0, 2: 0}, (0, 1, 7), image), "crashed")
    assert found == Verdict((), {0: 5, 1: 0})


@pytest.mark.parametrize(("batches", "suspects"), [(1, {}), (0, {0: 5, 1: 0})])
def test_a_kill_makes_suspects_only_if_no_batch_was_completed(batches: int, suspects: dict[int, int]) -> None:
    assert judge(recovered_of({0: 5, 1: 0}, (0, 1), HostImage(), batches), "killed") == Verdict((), suspects)


def test_nothing_in_flight_blames_none_and_keeps_the_suspects() -> None:
    image = HostImage(suspects={3: 1, 9: 4})
    assert judge(recovered_of({3: 1}, (), image, 0), "crashed") == Verdict((), {3: 1})


@pytest.mark.parametrize(("outputs", "guilty"), [(4 + DEPTH, True), (5 + DEPTH, False)])
def test_a_suspect_is_guilty_until_it_has_passed_what_was_in_flight(outputs: int, guilty: bool) -> None:
    """Its tokens at the first crash were 4. Once it is past, a second crash makes suspects anew."""
    image = HostImage(suspects={0: 4, 1: 8})
    found = judge(recovered_of({0: outputs, 1: 8, 2: 3}, (0, 2), image), "crashed")
    assert found == (Verdict((0,)) if guilty else Verdict((), {0: outputs, 2: 3}))


def test_of_several_suspects_on_trial_only_these_stay() -> None:
    image = HostImage(suspects={0: 4, 1: 8})
    recovered = recovered_of({0: 4, 1: 9, 2: 3}, (0, 1, 2), image)
    assert judge(recovered, "killed") == Verdict((), {0: 4, 1: 8})
    recovered.batches = 0
    assert judge(recovered, "killed") == Verdict((), {0: 4, 1: 8})
    assert judge(recovered, "crashed") == Verdict((), {0: 4, 1: 9})


def test_kills_with_the_same_suspect_on_trial_are_counted() -> None:
    image = HostImage(suspects={0: 4, 1: 8}, alone={1: KILLED_MAX - 1})
    recovered = recovered_of({0: 4, 1: 8}, (0,), image)
    for times in range(1, KILLED_MAX):
        assert judge(recovered, "killed") == Verdict((), {0: 4, 1: 8})
        assert image.alone == {0: times}
    assert judge(recovered, "killed") == Verdict((0,))


class GivenLimits:
    """The part of a host that `Probation` uses: an engine, and the limits that it was given."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.given: list[int] = []

    def ask(self, control: Any) -> None:
        assert control.name == "max_running_requests"
        self.given.append(control.value)


def test_suspects_are_admitted_one_at_a_time_and_the_limit_comes_back() -> None:
    finished, nothing = BatchFinished(1, 0), Step()
    outputs, rows = {0: 4, 1: 8, 2: 0, 3: 0}, {0: 0}
    host, image = GivenLimits(engine_of(outputs, rows)), HostImage(suspects={0: 4, 1: 8, 9: 0}, running_max=3)
    probation = Probation(cast(Any, host), image)
    assert host.given == [1]
    assert not probation.over

    def fold(event: Any, running: dict[int, int]) -> list[int]:
        for number, request in host.engine.requests.items():
            request.row = running.get(number, -1)
        del host.given[:]
        probation.fold(event, nothing)
        return host.given

    assert fold(finished, {0: 0}) == []
    assert image.suspects == {0: 4, 1: 8}  # 9 is not in the engine
    outputs[0] += DEPTH
    assert fold(finished, {0: 0}) == []
    outputs[0] += 1
    assert fold(LaneReady(2), {0: 0}) == []
    assert image.suspects == {0: 4, 1: 8}
    assert fold(finished, {0: 0}) == [2]
    assert image.suspects == {1: 8}
    assert fold(finished, {0: 0}) == []  # fewer run than may
    assert fold(finished, {0: 0, 2: 1}) == [3]
    assert fold(finished, {0: 0, 2: 1, 3: 2}) == [3]  # never more than before
    assert fold(finished, {0: 0, 1: 1, 2: 2}) == []  # the next suspect runs
    outputs[1] += DEPTH + 1
    assert fold(finished, {1: 0}) == [3]
    assert probation.over
    assert fold(finished, {1: 0}) == []


def test_without_suspects_nothing_is_limited() -> None:
    host, image = GivenLimits(engine_of({})), HostImage(running_max=7)
    assert Probation(cast(Any, host), image).over
    assert host.given == [7]
    host = GivenLimits(engine_of({}))
    assert Probation(cast(Any, host), HostImage()).over
    assert not host.given


PROMPT = TokenIds(bytes(4 * 10))  # ten tokens


def arrived(**fields: Any) -> RequestArrived:
    return RequestArrived(1, request_id=5, prompt=PROMPT, max_new_tokens=8, **fields)


BESIDE = SamplingParams(top_logprobs=3)


@pytest.mark.parametrize(
    ("fields", "goes_on"),
    [
        ({}, True),
        ({"sampling": SamplingParams()}, True),
        ({"kind": "embed"}, False),
        ({"return_hidden_states": True}, False),
        ({"logprob_start": 8}, False),  # of the last token of the prompt
        ({"logprob_start": 9}, True),  # of the output only
    ],
)
def test_an_answer_goes_on_if_all_of_its_results_are_in_the_journal(fields: dict[str, Any], goes_on: bool) -> None:
    recovered = recovered_of({5: 0}, (), HostImage())
    recovered.answers = {5: RecoveredSample([])}
    assert may_go_on(recovered, arrived(**fields), 5, [0]) == goes_on


@pytest.mark.parametrize("fields", [{"logprob_start": 9}, {"sampling": BESIDE}])
def test_logprobs_of_what_the_sender_lacks_must_be_there(fields: dict[str, Any]) -> None:
    """Of two samples the first runs with 4 output tokens, and the second has ended with 2."""
    kept = (-0.5, np.array([1], np.int32), np.array([-0.1], np.float32))
    recovered = recovered_of({5: 4}, (), HostImage())
    recovered.answers = {
        5: RecoveredSample([7, 7], logprobs=dict.fromkeys((2, 3), kept)),
        6: RecoveredSample([8, 8], logprobs={1: kept}),
    }
    event = arrived(**fields, parallel_samples=2)
    assert may_go_on(recovered, event, 5, [2, 1])
    assert may_go_on(recovered, event, 5, [4, -1])
    assert not may_go_on(recovered, event, 5, [1, 1])
    assert not may_go_on(recovered, event, 5, [2, 0])
    assert may_go_on(recovered, event, 5, [-1, 2])
    del recovered.answers[5].logprobs[3]
    assert not may_go_on(recovered, event, 5, [2, 1])
