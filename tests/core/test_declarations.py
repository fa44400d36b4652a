"""A decided event is declared in one place: its digest, text and counters follow from the declaration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_origin

import msgspec
import pytest

from lockstep.core.contract.commands import Step
from lockstep.core.contract.declarations import DECLARATIONS, Tallies, Tally, declares
from lockstep.core.contract.digest import EMPTY_DIGEST, step_digest
from lockstep.core.contract.events import Decided, ObservedEvent, RequestArrived, RequestId, TokenRuns, decided_types
from lockstep.core.contract.render import Names, decided_line
from lockstep.core.contract.stats import Counts
from lockstep.core.contract.text import RequestNames
from lockstep.sim.metrics.fold import MetricsFold


@pytest.fixture(autouse=True)
def only_the_contract_afterwards() -> Iterator[None]:
    before = dict(DECLARATIONS)
    yield
    DECLARATIONS.clear()
    DECLARATIONS.update(before)


def event_of(kind: type[Decided]) -> Decided:
    """A decided event of this type, with a value in each field."""
    values = {"int": 7, "RequestId": 7, "bool": True, "str": "x"}
    fields = {}
    for field in msgspec.structs.fields(kind):
        of = field.type
        name = getattr(of, "__name__", "")
        if name in values:
            fields[field.name] = values[name]
        else:
            fields[field.name] = (("x", 7),) if get_origin(of) is tuple else of.__args__[0]
    return kind(**fields)


def test_an_event_declared_here_is_digested_rendered_and_counted_with_no_other_edit() -> None:
    class PagesPolished(Decided, frozen=True, gc=False):
        """Pages of a request were polished."""

        request_id: RequestId
        pages: int
        cloth: str
        minutes: int = 0

    @declares(
        PagesPolished,
        informative=("minutes",),
        tallies=(Tally("pages_evicted", "pages", by="cloth"), Tally("polishes")),
    )
    def _(event: PagesPolished, names: RequestNames) -> str:
        return f"polished {event.pages} pages of {names.request(event.request_id)}"

    event: Any = PagesPolished(5, 3, 2, "silk", 9)
    assert decided_types()[-1] is PagesPolished

    def digest(*decided: Decided) -> bytes:
        return step_digest(EMPTY_DIGEST, Step(decided=list(decided)))

    assert digest(event) != digest()
    assert digest(event) != digest(msgspec.structs.replace(event, pages=4))
    assert digest(event) == digest(msgspec.structs.replace(event, minutes=1))
    assert digest(event) == digest(msgspec.structs.replace(event, time_us=6))

    names = Names()
    names.observe(arrival())
    assert decided_line(event, names) == "polished 2 pages of a"

    counts = Counts()
    counts.fold([event, event])
    assert counts == Counts(pages_evicted=4)
    tallies = Tallies("pages_evicted", "polishes")
    tallies.fold([event])
    assert (tallies.total("pages_evicted"), tallies.parts("pages_evicted"), tallies.total("polishes")) == (
        2,
        {"silk": 2},
        1,
    )
    metrics = MetricsFold()
    metrics.observe(arrival(), Step(decided=[event], time_us=5))
    assert metrics.result().summary["cache"]["pages_evicted_by_reason"] == {"silk": 2}


def arrival() -> RequestArrived:
    return RequestArrived(time_us=5, request_id=3, prompt=TokenRuns((1, 2)), max_new_tokens=1, label="a")


def test_every_decided_event_is_declared() -> None:
    declared = set(decided_types())
    of_the_contract = {kind for kind in Decided.__subclasses__() if kind.__module__ == Decided.__module__}
    assert of_the_contract <= declared
    assert len(declared) >= 19


@pytest.mark.parametrize("kind", decided_types(), ids=lambda kind: kind.__name__)
def test_every_decided_event_is_digested_and_rendered(kind: type[Decided]) -> None:
    event = event_of(kind)
    assert step_digest(EMPTY_DIGEST, Step(decided=[event])) != step_digest(EMPTY_DIGEST, Step())
    text = decided_line(event, Names())
    assert text
    assert kind.__name__ not in text


@pytest.mark.parametrize("kind", decided_types(), ids=lambda kind: kind.__name__)
def test_fields_that_only_inform_are_the_only_ones_that_the_digest_leaves_out(kind: type[Decided]) -> None:
    event = event_of(kind)
    chain = step_digest(EMPTY_DIGEST, Step(decided=[event]))
    fields = msgspec.structs.fields(kind)
    covered = len(fields) - DECLARATIONS[kind].informative
    for place, field in enumerate(fields):
        value = getattr(event, field.name)
        other = not value if isinstance(value, bool) else value + {int: 1, str: "y", tuple: (("z", 1),)}[type(value)]
        changed = step_digest(EMPTY_DIGEST, Step(decided=[msgspec.structs.replace(event, **{field.name: other})]))
        assert (changed != chain) == (0 < place < covered), field.name


def test_an_undeclared_event_is_refused_by_digest_and_text() -> None:
    class Undeclared(Decided, frozen=True, gc=False):
        pages: int

    with pytest.raises(KeyError, match="Undeclared"):
        step_digest(EMPTY_DIGEST, Step(decided=[Undeclared(0, 1)]))
    with pytest.raises(KeyError, match="Undeclared"):
        decided_line(Undeclared(0, 1), Names())


def test_a_declaration_names_fields_of_its_event() -> None:
    class Odd(Decided, frozen=True, gc=False):
        pages: int

    with pytest.raises(TypeError, match="last fields of Odd"):
        declares(Odd, informative=("time_us",))
    with pytest.raises(TypeError, match="no field `reason`"):
        declares(Odd, tallies=(Tally("odd", by="reason"),))


def test_every_observed_event_is_a_type_of_the_journal() -> None:
    from lockstep.core.contract import events

    kinds = {kind for kind in events.Observed.__subclasses__() if kind.__module__ == events.__name__}
    assert kinds == set(ObservedEvent.__args__)
