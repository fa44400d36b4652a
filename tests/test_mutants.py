"""The runner of mutants: every change is made, takes effect, and is found by the tests of its line or reported."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutants import KNOWN, TARGETS, all_mutants, drawn, known
from tests.support.mutation.live import LiveFunctions, edited_code
from tests.support.mutation.operators import ARITHMETIC, EVERY, mutants_of

MODULE = '''
class Box:
    """A box."""

    def fits(self, size: int = 1) -> bool:
        """Whether it fits."""
        if not size:
            raise ValueError(f"{size + 1}")
        self.last = size
        total = size + 2
        return total <= 3 and size is not None

    async def waits(self) -> None:
        while self.last:
            self.last -= 1
            break


def longest(sizes):
    sizes.sort()
    return max(sizes[-1], 0)
'''
CHANGES = {
    "Box.fits: `not size` becomes `size`",
    "Box.fits: `self.last = size` is left out",
    "Box.fits: `size + 2` becomes `size - 2`",
    "Box.fits: `2` becomes `3`",
    "Box.fits: `total <= 3 and size is not None` becomes `total <= 3 or size is not None`",
    "Box.fits: `total <= 3` becomes `total < 3`",
    "Box.fits: `total <= 3` becomes `total > 3`",
    "Box.fits: `3` becomes `4`",
    "Box.fits: `size is not None` becomes `size is None`",
    "Box.waits: `self.last` becomes `not self.last`",
    "Box.waits: `self.last -= 1` becomes `self.last += 1`",
    "Box.waits: `self.last -= 1` is left out",
    "Box.waits: `1` becomes `2`",
    "Box.waits: `break` becomes `continue`",
    "longest: `sizes.sort()` is left out",
    "longest: `max(sizes[-1], 0)` becomes `min(sizes[-1], 0)`",
    "longest: `-1` becomes `1`",
    "longest: `1` becomes `2`",
    "longest: `0` becomes `1`",
}
OF_NUMBERS = {
    "longest: `max(sizes[-1], 0)` becomes `min(sizes[-1], 0)`",
    "longest: `0` becomes `1`",
    "longest: `1` becomes `2`",
}
RUN = """
import json, sys
from pathlib import Path
from tests.support.mutation.operators import mutants_of
from tests.support.mutation.session import ChangedError, Measuring, Mutating, Tests, run_pytest
folder = Path(sys.argv[1])
assert run_pytest(Measuring(folder / "kept", [folder]), [str(folder / "test_box.py")]) == 0
verdicts = {}
def report(mutant, verdict, by, seconds):
    verdicts[mutant.name] = verdict, by.rpartition("::")[2]
mutants = list(mutants_of(folder / "box.py"))
plugin = Mutating(Tests(folder / "kept"), mutants, report, budget_s=5, cpu_min_s=1, jobs=4)
run_pytest(plugin, [str(folder / "test_box.py")])
(folder / "verdicts.json").write_text(json.dumps(verdicts))
(folder / "box.py").write_text("# a line more\\n" + (folder / "box.py").read_text())
try:
    Tests(folder / "kept").of(mutants[0])
except ChangedError:
    sys.exit(0)
sys.exit("the measured lines of a changed file were used")
"""
SUBJECT = """
def capped(size):
    if size > 10:
        return 10
    return size


def unused():
    return 1


def countdown(size):
    while size > 0:
        size -= 1
    return size
"""
DERIVED = """
class Lidless:
    closed = False

    def close(self):
        self.closed = True


class Lid(Lidless):
    def close(self):
        super().close()
"""
TESTS = """
from box import capped, countdown

def test_small():
    assert capped(3) == 3

def test_large():
    assert capped(30) == 10

def test_down():
    assert countdown(3) == 0
"""


def test_every_kind_of_change_is_made(tmp_path: Path) -> None:
    path = tmp_path / "box.py"
    path.write_text(MODULE)
    made = list(mutants_of(path))
    assert {one.name.removeprefix("box.py ") for one in made} == CHANGES
    sound = ast.dump(ast.parse(MODULE))
    assert len({ast.dump(one.tree) for one in made} | {sound}) == len(made) + 1


def test_compiled_functions_have_changes_of_numbers_only(tmp_path: Path) -> None:
    path = tmp_path / "box.py"
    path.write_text(MODULE)
    assert {one.name.removeprefix("box.py ") for one in mutants_of(path, kinds=ARITHMETIC)} == OF_NUMBERS


def test_a_mutant_takes_effect_wherever_its_function_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "held_box.py").write_text(SUBJECT)
    monkeypatch.syspath_prepend(str(tmp_path))
    import held_box  # type: ignore[import-not-found]

    held = held_box.capped
    (mutant,) = (one for one in mutants_of(tmp_path / "held_box.py") if "`size > 10` becomes `size <= 10`" in one.name)
    LiveFunctions({mutant.path}).mutate(mutant)
    assert held(3) == 10
    with pytest.raises(ValueError, match="capped has 0 times `size < 10`, expected once"):
        edited_code(held, "size < 10", "False")


def test_a_call_of_the_parent_can_be_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "derived_box.py").write_text(DERIVED)
    monkeypatch.syspath_prepend(str(tmp_path))
    import derived_box  # type: ignore[import-not-found]

    (mutant,) = (one for one in mutants_of(tmp_path / "derived_box.py") if "`super().close()` is left out" in one.name)
    LiveFunctions({mutant.path}).mutate(mutant)
    box = derived_box.Lid()
    box.close()
    assert not box.closed


def test_mutants_are_found_by_the_tests_of_their_lines(tmp_path: Path) -> None:
    (tmp_path / "box.py").write_text(SUBJECT)
    (tmp_path / "test_box.py").write_text(TESTS)
    root = Path(__file__).resolve().parent.parent
    command = [sys.executable, "-c", RUN, str(tmp_path)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    verdicts = json.loads((tmp_path / "verdicts.json").read_text())
    assert verdicts["box.py capped: `size > 10` becomes `size <= 10`"][0] == "killed"
    assert verdicts["box.py capped: `10` becomes `11` (1)"] == ["killed", "test_large"]
    assert verdicts["box.py capped: `size > 10` becomes `size >= 10`"][0] == "survived"
    assert verdicts["box.py unused: `1` becomes `2`"][0] == "uncovered"
    assert verdicts["box.py countdown: `size -= 1` becomes `size += 1`"][0] == "timeout"


def test_a_larger_sample_has_the_smaller_one_in_it() -> None:
    mutants = all_mutants(TARGETS["core"], {"kv/radix.py"})
    names = [one.name for one in mutants]
    assert len(set(names)) == len(names)
    assert [one.name for one in drawn(mutants, 5, 3)] == [one.name for one in drawn(mutants, 20, 3)][:5]
    assert [one.name for one in drawn(mutants, 20, 3)] != [one.name for one in drawn(mutants, 20, 4)]


def test_the_tests_of_every_target_exist() -> None:
    root = Path(__file__).resolve().parent.parent
    assert not [path for target in TARGETS.values() for path in target.tests if not (root / path).exists()]


def test_every_listed_mutant_exists_and_has_a_reason() -> None:
    listed = known()
    modules = {name.split()[0] for name in listed}
    there = {one.name for target in TARGETS.values() for one in all_mutants(target, modules)}
    assert listed.keys() <= there, f"{KNOWN.name} names mutants that there are no more: {listed.keys() - there}"
    assert all(listed.values())
    assert EVERY != ARITHMETIC
