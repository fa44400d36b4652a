"""The golden scenarios under tests/scenarios/. `--update` writes their expected output; then read the diff."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from tests.support.records import check, is_spelt_out, play, read, record
from tests.support.scenario import parse, run_file, unparse

FOLDER = Path(__file__).parent / "scenarios"
FILES = sorted(FOLDER.rglob("*.txt"))


def name_of(path: Path) -> str:
    return path.relative_to(FOLDER).with_suffix("").as_posix()


SPELT_OUT = [path for path in FILES if is_spelt_out(path.read_text())]
SCENARIOS = [path for path in FILES if path not in SPELT_OUT]


@pytest.mark.parametrize("path", SCENARIOS, ids=name_of)
def test_scenario(path: Path, request: pytest.FixtureRequest) -> None:
    difference, _ = run_file(path, update=request.config.getoption("--update"))
    if difference:
        name = name_of(path)
        pytest.fail(
            f"{name} prints something else than it expects:\n\n{difference}\n\n"
            f"If you can say why each line moved: pytest tests/test_scenarios.py -k {name.split('/')[-1]} --update",
            pytrace=False,
        )


@pytest.mark.parametrize("path", SCENARIOS, ids=name_of)
def test_every_scenario_is_written_as_update_would_write_it(path: Path) -> None:
    assert unparse(parse(path.read_text())) == path.read_text()


@pytest.mark.parametrize("path", SPELT_OUT, ids=name_of)
def test_contract_has_types_for_sequence(path: Path) -> None:
    sequence = read(path.read_text())
    assert sequence.exchanges
    check(sequence)
    play(sequence)


def test_record_names_what_the_contract_does_not_have() -> None:
    with pytest.raises(ValueError, match="no type `BatchVanished`"):
        record("BatchVanished(time_us=0)")
    with pytest.raises(TypeError, match="LaneReady has no field lane"):
        record("LaneReady(time_us=0, lane=1)")
    with pytest.raises(msgspec.ValidationError, match="Expected `int`"):
        record("LaneReady(time_us=0.5)")


def test_every_scenario_named_in_the_guides_exists() -> None:
    subjects = "|".join(sorted({path.parent.name for path in FILES}))
    for guide in (FOLDER.parent / "README.md", FOLDER.parent.parent / "docs" / "contract.md"):
        for name in re.findall(rf"`((?:{subjects})/[\w*]+)(?:\.txt)?`", guide.read_text()):
            assert list(FOLDER.glob(f"{name}.txt")), f"{guide.name} names {name}, which does not exist"
