"""The structure of the sources gets no worse: each figure of tests/support/structure.py stays within its bound.

`python benchmarks/structure.py` prints the figures, `--details NAME` the places that a figure counts.

To lower a bound, edit its line in `BOUNDS` to the value that the command prints; no other edit is needed. Lower it in
the commit that improves the figure, so that it cannot get worse again. A bound is raised only with a reason in the
commit message. `GOALS` are the intended values; a bound that equals its goal stays.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.structure import Figure, by_file, measure

ROOT = Path(__file__).resolve().parents[2]

BOUNDS = {
    "engine names": 76,
    "engine stores": 0,
    "engine item stores": 0,
    "engine inner stores": 0,
    "guards in engine": 2,
    "guards in memory": 0,
    "cycle in core": 0,
    "cycle in host": 0,
    "cycle in sim": 0,
    "cycle in runtime": 0,
    "cycle in api": 0,
    "cycle in tools": 0,
    "long files": 0,
    "long test files": 0,
    "long signatures": 0,
    "shared class names": 0,
    "surplus classes": 0,
    "personal docstrings": 0,
    "personal comments": 0,
    "personal doc lines": 0,
    "personal test docstrings": 0,
    "personal test comments": 0,
    "personal scenario lines": 0,
    "speaking docstrings": 0,
    "speaking comments": 0,
    "speaking doc lines": 0,
    "speaking test docstrings": 0,
    "speaking test comments": 0,
    "speaking scenario lines": 0,
}
"""The most that each figure may be."""

GOALS = {
    "engine stores": 0,
    "engine item stores": 0,
    "engine inner stores": 0,
    "cycle in core": 0,
    "cycle in host": 0,
    "cycle in sim": 0,
    "cycle in runtime": 0,
    "cycle in api": 0,
    "cycle in tools": 0,
    "long files": 0,
    "long test files": 0,
    "long signatures": 0,
    "personal docstrings": 0,
    "personal comments": 0,
    "personal doc lines": 0,
    "personal test docstrings": 0,
    "personal test comments": 0,
    "personal scenario lines": 0,
    "speaking docstrings": 0,
    "speaking comments": 0,
    "speaking doc lines": 0,
    "speaking test docstrings": 0,
    "speaking test comments": 0,
    "speaking scenario lines": 0,
}
"""What the bounds are lowered to in the end."""

ENGINE = """
class Engine:
    def step(self, event):
        if self.radix is not None and self.config.limit is None and event is not None:
            self.digest = b""
"""
FEATURE = """
from __future__ import annotations
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from lockstep.core.engine import Engine

def pause(engine: Engine, other: Part, request: Request) -> None:
    \"\"\"Pause it, for whoever asked.\"\"\"
    engine.paused = True
    engine.sending += 1
    del engine.chunk
    engine.held[3] = 1
    engine.pool.free = 2
    other.paused = request.paused = engine.ready

class Run:
    def __init__(self, engine: Engine | None) -> None:
        self._engine = engine  # the engine that somebody passed

    def close(self) -> None:
        engine, done = self._engine, 3
        engine.horizon -= done
        done.horizon = 4
"""
TEST = """
def test_pause() -> None:
    \"\"\"Nobody pauses, whose `who` is a name.\"\"\"
    assert pause  # tells the engine
"""
SCENARIO = """# a waits, and says so; b does not,
# and everybody goes on.
add a prompt=1..4

step
----
queue: nobody says `a`
"""


@pytest.fixture(scope="module")
def figures() -> dict[str, Figure]:
    return measure(ROOT)


@pytest.mark.parametrize("name", BOUNDS)
def test_figure_stays_within_its_bound(name: str, figures: dict[str, Figure]) -> None:
    figure, most = figures[name], BOUNDS[name]
    files = "".join(f"\n  {count:5,}  {path}" for path, count in by_file(figure)[:20])
    assert figure.value <= most, (
        f"{figure.value:,} {figure.meaning}, at most {most:,} are allowed; by file:{files}\n"
        f'see: python benchmarks/structure.py --details "{name}"'
    )


def test_goals_have_bounds() -> None:
    assert [name for name, goal in GOALS.items() if BOUNDS[name] < goal] == []


@pytest.fixture
def small(tmp_path: Path) -> dict[str, Figure]:
    """The figures of a checkout of two modules, each of which imports the other, a test and a scenario."""
    folder = tmp_path / "packages" / "sched-core" / "src" / "lockstep" / "core"
    folder.mkdir(parents=True)
    (folder / "engine.py").write_text("from lockstep.core import feature\n" + ENGINE)
    (folder / "feature.py").write_text(FEATURE)
    tests = tmp_path / "tests"
    (tests / "scenarios").mkdir(parents=True)
    (tests / "README.md").write_text("# Tests\n\nA test asks for it.\n")
    (tests / "test_feature.py").write_text(TEST)
    (tests / "scenarios" / "feature.txt").write_text(SCENARIO)
    return measure(tmp_path)


def test_uses_of_an_engine_are_found_through_variables_and_attributes(small: dict[str, Figure]) -> None:
    names = [place.text for place in small["engine names"].places]
    assert names == ["chunk", "held", "horizon", "paused", "pool", "ready", "sending"]
    stores = [place.text for place in small["engine stores"].places]
    assert stores == ["engine.paused", "engine.sending", "engine.chunk", "engine.horizon"]
    assert [place.text for place in small["engine item stores"].places] == ["engine.held[3]"]
    assert [place.text for place in small["engine inner stores"].places] == ["engine.pool.free"]


def test_only_state_that_is_compared_with_none_is_a_guard(small: dict[str, Figure]) -> None:
    guards = [place.text for place in small["guards in engine"].places]
    assert guards == ["self.radix is not None", "self.config.limit is None"]
    assert small["comparisons with None"].value == 3


def test_imports_for_type_checking_close_a_cycle(small: dict[str, Figure]) -> None:
    assert (small["cycle in core"].value, small["cycle in core"].of) == (2, 2)


def test_personal_words_are_found_in_docstrings_and_comments(small: dict[str, Figure]) -> None:
    assert [place.text for place in small["personal docstrings"].places] == ["Pause it, for whoever asked."]
    assert [place.text for place in small["personal comments"].places] == ["the engine that somebody passed"]


def test_words_of_tests_and_scenarios_have_figures_of_their_own(small: dict[str, Figure]) -> None:
    found = {name: [str(place) for place in figure.places] for name, figure in small.items()}
    assert found["personal test docstrings"] == ["tests/test_feature.py:3: Nobody pauses, whose `who` is a name."]
    assert found["speaking test comments"] == ["tests/test_feature.py:4: tells the engine"]
    assert found["personal scenario lines"] == ["tests/scenarios/feature.txt:2: and everybody goes on."]
    assert found["speaking scenario lines"] == ["tests/scenarios/feature.txt:1: a waits, and says so; b does not,"]
    assert small["speaking scenario lines"].of == 2, "the expected output is not prose"
    assert found["speaking doc lines"] == ["tests/README.md:3: A test asks for it."]
    assert found["personal test comments"] == found["speaking test docstrings"] == []
