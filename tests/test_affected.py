"""`dev.py test --affected`: a changed file affects the tests that depend on it, and no others."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.affected import REST, ROOT, Digests, affected, changed_since, files_of_tests, functions_of, main, recorded

RADIX = "packages/sched-core/src/lockstep/core/kv/radix.py"
ROOFLINE = "packages/sim/src/lockstep/sim/cost/roofline.py"
RADIX_TEST, TERMS_TEST, PAGES_TEST = (
    "tests/core/test_radix.py",
    "tests/sim/test_cost_terms.py",
    "tests/core/test_pages.py",
)


def test_a_module_affects_the_tests_that_import_it() -> None:
    by_radix, by_roofline = affected([RADIX], {}), affected([ROOFLINE], {})
    assert by_radix[RADIX_TEST] == RADIX
    assert TERMS_TEST in by_roofline
    assert RADIX_TEST not in by_roofline
    assert PAGES_TEST not in by_roofline


def test_a_changed_test_affects_itself_only() -> None:
    assert affected([PAGES_TEST], {}).keys() == {PAGES_TEST}


def test_a_file_that_is_no_module_affects_the_tests_that_name_it() -> None:
    found = affected(["tests/scenarios/radix/capacity.txt"], {})
    assert "tests/test_scenarios.py" in found
    assert PAGES_TEST not in found
    assert "tests/core/test_structure.py" in affected(["docs/scheduling.md"], {})


def test_what_all_tests_depend_on_affects_all() -> None:
    assert affected(["constraints.txt"], {}).keys() == set(files_of_tests())


def test_a_record_narrows_the_choice_to_functions_that_were_run() -> None:
    functions = functions_of((ROOT / RADIX).read_text())
    run: Digests = {
        RADIX: {name: digest for name, (_, digest) in functions.items() if name in ("RadixCache.match", REST)}
    }
    assert RADIX_TEST not in affected([RADIX], {RADIX_TEST: run})
    other: Digests = {RADIX: {**run[RADIX], "RadixCache.match": "of another text"}}
    assert affected([], {RADIX_TEST: other}) == {RADIX_TEST: f"{RADIX}: RadixCache.match"}


def test_a_function_is_told_from_the_rest_of_its_module() -> None:
    before = functions_of("LIMIT = 1\n\ndef f():\n    return 1\n\nclass A:\n    def g(self):\n        return 2\n")
    inside = functions_of(
        "LIMIT = 1\n\ndef f():\n    # why\n    return 3\n\nclass A:\n    def g(self):\n        return 2\n"
    )
    outside = functions_of("LIMIT = 2\n\ndef f():\n    return 1\n\nclass A:\n    def g(self):\n        return 2\n")
    assert before.keys() == {"f", "A.g", REST}
    assert {name for name in before if before[name][1] != inside[name][1]} == {"f"}
    assert {name for name in before if before[name][1] != outside[name][1]} == {REST}


def test_a_record_has_what_a_test_file_runs(tmp_path: Path) -> None:
    found = recorded(PAGES_TEST, tmp_path)
    assert found is not None
    pages = found["packages/sched-core/src/lockstep/core/kv/pages.py"]
    assert "PagePool.alloc" in pages
    assert REST in pages
    assert RADIX not in found or "RadixCache.evict" not in found[RADIX]


def test_an_unknown_commit_is_one_error() -> None:
    with pytest.raises(SystemExit, match="`--base` must name a commit, got `no-such-branch`"):
        changed_since("no-such-branch")


def test_a_list_names_the_reasons(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("tests.affected.changed_since", lambda base: [PAGES_TEST])
    monkeypatch.setattr("tests.affected.read_record", dict)
    monkeypatch.setattr("sys.argv", ["affected", "--list"])
    assert main() == 0
    assert f"  {PAGES_TEST}: {PAGES_TEST}" in capsys.readouterr().out
