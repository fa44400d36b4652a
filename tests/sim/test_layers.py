"""Imports between the packages of the simulator run one way, and no modules of it import each other in a cycle.

Imports under TYPE_CHECKING and inside functions count like any other: a name that a signature needs is a dependency. A
new import that this test refuses has three solutions: move the imported name to a lower package, pass it in as a value,
or, if the layers themselves change, add the pair to ALLOWED.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import lockstep.sim.cost

PACKAGE = "lockstep.sim"
ROOT = Path(lockstep.sim.cost.__file__).parents[1]

# Each package with the packages that it may import, lowest first: a package may import only packages above its own
# line.
ALLOWED = {
    "cost": set[str](),
    "catalogue": {"cost"},
    "workload": {"cost"},
    "metrics": set[str](),
    "scenario": {"cost", "workload", "metrics"},
    "host": {"cost", "workload", "metrics", "scenario"},
    "fast": {"cost", "workload", "metrics", "host"},
    "rerun": {"cost", "workload", "host"},
    "results": {"cost", "workload", "metrics", "host"},
    "report": {"metrics", "results"},
    "run": {"cost", "catalogue", "workload", "metrics", "host", "scenario", "fast", "results", "report"},
    "calibrate": {"cost", "catalogue", "workload", "metrics", "host", "scenario", "results", "run"},
    "cluster": {"cost", "workload", "metrics", "host", "scenario", "fast", "results", "report", "run"},
    "plan": {
        *("cost", "catalogue", "workload", "metrics", "host", "scenario", "results", "report", "run", "cluster"),
    },
    "cli": {
        *("cost", "catalogue", "workload", "metrics", "scenario", "results", "report", "run", "calibrate"),
        *("cluster", "plan"),
    },
    "interface": {"workload", "scenario", "results", "report", "run", "cluster", "plan", "cli"},
}


@cache
def modules() -> dict[str, Path]:
    """Every module of the simulator by its full name; a package by its own."""
    found = {}
    for path in ROOT.rglob("*.py"):
        parts = (*PACKAGE.split("."), *path.relative_to(ROOT).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def imports() -> dict[str, set[str]]:
    """By module, the modules of the simulator that it imports anywhere in its text."""
    found: dict[str, set[str]] = {}
    for module, path in modules().items():
        names = set()
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                names |= {one.name for one in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
                inner = {f"{node.module}.{one.name}" for one in node.names}
                names |= {name if name in modules() else node.module for name in inner}
        found[module] = {name for name in names if name in modules() and name != module}
    return found


def room_of(module: str) -> str:
    """The package of a module; empty for `lockstep.sim` itself."""
    return module.removeprefix(PACKAGE).removeprefix(".").partition(".")[0]


def rooms_between(module: str, imported: str) -> tuple[str, str]:
    return room_of(module), room_of(imported)


def test_every_room_is_in_the_table_and_the_table_runs_one_way() -> None:
    assert {room_of(module) for module in modules()} - {""} == set(ALLOWED)
    order = list(ALLOWED)
    for room, below in ALLOWED.items():
        assert below <= set(order[: order.index(room)]), f"{room} may import a room that is not below it"


def test_rooms_import_only_rooms_below_them() -> None:
    refused = [
        f"{module} imports {imported}"
        for module, found in sorted(imports().items())
        for imported in sorted(found)
        if (pair := rooms_between(module, imported))[0] != pair[1] and pair[1] not in ALLOWED.get(pair[0], set())
    ]
    assert refused == []


def test_no_pair_of_rooms_is_allowed_in_vain() -> None:
    used = {rooms_between(module, imported) for module, found in imports().items() for imported in found}
    assert {(room, below) for room, allowed in ALLOWED.items() for below in allowed} <= used


def test_no_modules_import_each_other_in_a_circle() -> None:
    left = {module: set(found) for module, found in imports().items()}
    while True:
        imported = set().union(*left.values())
        apart = [module for module, found in left.items() if not found & left.keys() or module not in imported]
        if not apart:
            break
        for module in apart:  # it imports none of the rest, or none of the rest imports it: it is in no cycle
            del left[module]
        for found in left.values():
            found &= left.keys()
    assert sorted(left) == []


def test_imports_of_types_and_inside_functions_are_found() -> None:
    """The report is imported inside functions, and a result's intervals under TYPE_CHECKING."""
    assert f"{PACKAGE}.report" in imports()[f"{PACKAGE}.run.run_folder"]
    assert any(f"{PACKAGE}.run.setup" in found for found in imports().values())
