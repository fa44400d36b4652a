"""Pseudonyms: equal prefixes stay equal, stop tokens stay, and no token id of a text is left."""

from __future__ import annotations

import numpy as np

from lockstep.core.contract.commands import FinishRequest, StreamTokens
from lockstep.core.contract.events import BatchFinished, RequestArrived, RequestId, TokenIds
from lockstep.vllm.pseudonyms import MARK, TURN, Pseudonyms


def arrived(request_id: RequestId, *ids: int, stops: tuple[int, ...] = (), namespace: str = "") -> RequestArrived:
    prompt = TokenIds(np.array(ids, np.int32).tobytes())
    return RequestArrived(
        time_us=0, request_id=request_id, prompt=prompt, max_new_tokens=16, stop_token_ids=stops, namespace=namespace
    )


def batch(*tokens: int, accepted: tuple[int, ...] = ()) -> BatchFinished:
    counts = np.array(accepted, np.int32).tobytes() if accepted else b""
    return BatchFinished(1, 0, np.array(tokens, np.int32).tobytes(), 0, 1, accepted=counts)


def streamed(**counts: int) -> StreamTokens:
    ids = np.array([int(name[1:]) for name in counts], np.int64)
    values = np.array(list(counts.values()), np.int32)
    return StreamTokens(ids, np.zeros(len(ids), np.int32), values, np.zeros(int(values.sum()), np.int32))


def ids_of(event: RequestArrived) -> list[int]:
    assert isinstance(event.prompt, TokenIds)
    return np.frombuffer(event.prompt.ids, np.int32).tolist()


def tokens_of(event: BatchFinished) -> list[int]:
    return np.frombuffer(event.tokens, np.int32).tolist()


def test_equal_prefixes_stay_equal_and_all_behind_a_difference_differs() -> None:
    names = Pseudonyms()
    first = ids_of(names.arrived(arrived(0, 5, 6, 7, 8)))
    second = ids_of(names.arrived(arrived(1, 5, 6, 9, 8)))
    assert first[:2] == second[:2]
    assert not set(first[2:]) & set(second[2:])
    assert ids_of(names.arrived(arrived(2, 5, 6, 7, 8, 1)))[:4] == first


def test_no_pseudonym_is_a_token_id() -> None:
    names = Pseudonyms()
    assert all(one & MARK for one in ids_of(names.arrived(arrived(0, *range(200)))))
    assert all(one >= 0 for one in ids_of(names.arrived(arrived(1, *range(200)))))  # int32 of the journal


def test_another_journal_has_another_key() -> None:
    assert ids_of(Pseudonyms().arrived(arrived(0, 5, 6))) != ids_of(Pseudonyms().arrived(arrived(0, 5, 6)))


def test_a_namespace_is_hashed_and_its_absence_kept() -> None:
    names = Pseudonyms()
    salted = names.arrived(arrived(0, 5, namespace="a tenant's secret"))
    assert salted.namespace
    assert "secret" not in salted.namespace
    assert names.arrived(arrived(1, 5, namespace="a tenant's secret")).namespace == salted.namespace
    assert names.arrived(arrived(2, 5)).namespace == ""


def test_an_answer_continues_the_prefix_of_its_prompt() -> None:
    """A later prompt that quotes the answer has the pseudonyms that the answer had."""
    names = Pseudonyms()
    prompt = ids_of(names.arrived(arrived(0, 5, 6)))
    answer = tokens_of(names.finished(batch(7), [0], [streamed(r0=1)]))
    answer += tokens_of(names.finished(batch(8), [0], [streamed(r0=1)]))
    assert ids_of(names.arrived(arrived(1, 5, 6, 7, 8))) == prompt + answer


def test_a_stop_token_is_kept_only_for_its_own_request() -> None:
    names = Pseudonyms()
    names.arrived(arrived(0, 5, stops=(2,)))
    names.arrived(arrived(1, 5))
    first, second = tokens_of(names.finished(batch(2, 2), [0, 1], [streamed(r0=1, r1=1)]))
    assert first == 2
    assert second & MARK


def test_tokens_that_are_not_streamed_do_not_move_the_prefix() -> None:
    """Behind an end inside a verification tokens are dropped, and so is a whole result after a retraction."""
    names = Pseudonyms()
    prompt = ids_of(names.arrived(arrived(0, 5)))
    names.finished(batch(9), [0], [])  # dropped: computed again later
    kept = tokens_of(names.finished(batch(6, 7, 8, accepted=(3,)), [0], [streamed(r0=2)]))[:2]
    assert ids_of(names.arrived(arrived(1, 5, 6, 7))) == prompt + kept


def test_ended_requests_are_forgotten() -> None:
    names = Pseudonyms()
    names.arrived(arrived(0, 5, stops=(2,)))
    names.forget([FinishRequest(0, "length", 1, 1, 0)])
    (token,) = tokens_of(names.finished(batch(2), [0], []))
    assert token & MARK


def test_tokens_that_are_dropped_leave_no_trace_in_what_follows() -> None:
    """Of three verified tokens the request keeps one; the next batch continues behind that one."""
    names = Pseudonyms()
    names.arrived(arrived(0, 5, 6))
    names.finished(batch(7, 8, 9, accepted=(3,)), [0], [streamed(r0=1)])
    (following,) = tokens_of(names.finished(batch(10), [0], [streamed(r0=1)]))
    assert ids_of(names.arrived(arrived(1, 5, 6, 7, 10)))[-1] == following


def test_a_long_prompt_is_hashed_in_turns() -> None:
    pauses: list[None] = []
    names = Pseudonyms(pause=lambda: pauses.append(None))
    names.arrived(arrived(0, *range(1_000)))
    names.finished(batch(*range(24)), [0] * 24, [])
    assert len(pauses) == 1_024 // TURN
