"""The surroundings of a request change when it is served, never its answer.

A timeline of arrivals and passes of the host's loop is changed in a way that must not matter: a further request joins,
arrivals of one instant change places, one batch of arrivals becomes two. Every request must get the answer that its own
fields determine.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.core.contract.config import SchedConfig
from tests.support.served import Answer, Asked, Moment, Served, serve

STRANGER = 1000  # the key of the request that joins
AMPLE_PAGES = 512

Instant = list[Asked]


@st.composite
def requested_of(draw: st.DrawFn, key: int) -> Asked:
    """One request; the first tokens of its prompt may also begin other prompts."""
    base = draw(st.sampled_from([100, 200]))
    max_new = draw(st.integers(1, 12))
    return Asked(
        key=key,
        prompt=tuple(range(base, base + draw(st.integers(1, 10)))),
        max_new=max_new,
        min_new=draw(st.integers(0, max_new)),
        stops=tuple(draw(st.lists(st.integers(0, 11), max_size=2, unique=True))),
        stream=draw(st.booleans()),
    )


@st.composite
def instants(draw: st.DrawFn) -> list[Instant]:
    """Batches of arrivals, each observed by the host at one instant."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    keys = iter(range(sum(sizes)))
    return [[draw(requested_of(next(keys))) for _ in range(size)] for size in sizes]


@st.composite
def configs(draw: st.DrawFn) -> SchedConfig:
    """Any schedule, with a pool that is ample or just large enough for each request alone."""
    page_size = draw(st.sampled_from([1, 2, 4]))
    radix = draw(st.booleans())
    smallest = -(-22 // page_size)  # the longest prompt and output of `requested_of`
    return SchedConfig(
        page_size=page_size,
        pages=draw(st.one_of(st.just(AMPLE_PAGES), st.integers(smallest, smallest + 12))),
        radix_cache=radix,
        schedule_policy=draw(st.sampled_from(["fcfs", "lpm"])) if radix else "fcfs",
        schedule_conservativeness=draw(st.sampled_from([0.02, 1.0])),
        chunked_prefill_size=draw(st.sampled_from([None, page_size, 3 * page_size])),
        max_running_requests=draw(st.sampled_from([1, 3, 16])),
        retracted_requeue=draw(st.sampled_from(["tail", "front"])),
        retract_every=draw(st.sampled_from([0, 3])),
        retracted_kv=draw(st.sampled_from(["free", "cache"])) if radix else "free",
        chunk_unit=draw(st.sampled_from(["page", "token"])),
        overlap_depth=draw(st.sampled_from([0, 1, 2])),
        stream_interval=draw(st.sampled_from([1, 3])),
    )


def timeline(batches: list[Instant], passes: int) -> list[Moment]:
    """Passes of the host's loop after each batch."""
    moments: list[Moment] = []
    for batch in batches:
        moments += [*batch, *[None] * passes]
    return moments


def answers(served: Served) -> dict[int, Answer]:
    """The answers of all requests but the one that joins."""
    return {key: answer for key, answer in served.answers.items() if key != STRANGER}


def expected(batches: list[Instant]) -> dict[int, Answer]:
    return {asked.key: asked.answer for batch in batches for asked in batch}


passes = st.integers(1, 4)


@given(configs(), instants(), passes, requested_of(STRANGER), st.data())
@settings(max_examples=60)
def test_a_further_request_changes_no_tokens(
    config: SchedConfig, batches: list[Instant], passes: int, stranger: Asked, data: st.DataObject
) -> None:
    moments = timeline(batches, passes)
    at = data.draw(st.integers(0, len(moments)), label="the stranger comes at")
    joined = serve(config, [*moments[:at], stranger, *moments[at:]], check=True)
    assert answers(joined) == answers(serve(config, moments)) == expected(batches)


@given(configs(), instants(), passes, st.randoms(use_true_random=False))
@settings(max_examples=60)
def test_the_order_within_an_instant_changes_no_tokens(
    config: SchedConfig, batches: list[Instant], passes: int, random: Random
) -> None:
    shuffled = [random.sample(batch, len(batch)) for batch in batches]
    assert answers(serve(config, timeline(shuffled, passes), check=True)) == expected(batches)


@given(configs(), instants(), passes, st.data())
@settings(max_examples=60)
def test_splitting_an_instant_changes_no_tokens(
    config: SchedConfig, batches: list[Instant], passes: int, data: st.DataObject
) -> None:
    split: list[Moment] = []
    for batch in batches:
        at = data.draw(st.integers(0, len(batch)), label="split behind")
        split += [*batch[:at], None, *batch[at:], *[None] * passes]
    assert answers(serve(config, split, check=True)) == expected(batches)


@given(configs(), instants(), passes)
@settings(max_examples=30)
def test_an_ample_pool_and_no_sharing_change_no_tokens(
    config: SchedConfig, batches: list[Instant], passes: int
) -> None:
    """The plainest engine gives the same answers."""
    plain = SchedConfig(page_size=1, pages=4096, radix_cache=False, overlap_depth=0, chunked_prefill_size=None)
    moments = timeline(batches, passes)
    assert serve(config, moments).answers == serve(plain, moments).answers


def test_a_wrong_token_would_be_noticed() -> None:
    """The comparison can fail: the same request under another key gets other tokens."""
    asked = Asked(key=0, prompt=(1, 2, 3), max_new=3)
    config = SchedConfig(page_size=2, pages=16)
    assert serve(config, [asked]).answers[0] == asked.answer
    assert serve(config, [replace(asked, key=1)]).answers[1] != asked.answer
