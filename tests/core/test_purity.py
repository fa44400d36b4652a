"""The core is a function of its journal: no clock, no I/O, no randomness, no order that depends on a hash.

These rules are checked on the source, because a violation would show only as a later replay that differs.
Each rule is tried on a planted violation, so that a checker that finds nothing fails too.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from pathlib import Path

import pytest

CORE = Path(__file__).parents[2] / "packages/sched-core/src/lockstep/core"

# The modules that decide nothing, and the names that each may use. Clocks and randomness are granted to no module.
GRANTED = {
    "journal/records.py": {"pathlib", "importlib"},  # names of files, and the version of the package
    "journal/segments.py": {"os", "pathlib", "fcntl"},  # the folder and its lock
    "journal/writer.py": {"os", "pathlib", "threading"},  # files, and a thread that syncs them to disk
    "journal/salvage.py": {"pathlib", "shutil"},  # copies of files
    "journal/reader.py": {"os", "pathlib", "open"},  # files
    "command.py": {"os", "pathlib", "importlib", "print"},  # the command line
    "contract/policies.py": {"importlib"},  # the list of installed policies
    "__init__.py": {"importlib"},  # public names that load their module at first use
}

THIRD_PARTY = {"numpy", "msgspec"}

# Clocks, randomness, I/O, threads, and functions that run data as code.
FORBIDDEN_MODULES = set(
    "time datetime sched calendar random secrets uuid "
    "os io pathlib tempfile shutil glob fileinput logging sqlite3 mmap platform getpass locale warnings "
    "socket select selectors ssl http urllib subprocess multiprocessing signal ctypes "
    "threading concurrent asyncio queue contextvars gc weakref "
    "pickle marshal shelve importlib runpy".split()
)

FORBIDDEN_NAMES = {
    "id": "differs from run to run",
    "hash": "differs from run to run for strings",
    "open": "is I/O",
    "print": "is I/O",
    "input": "is I/O",
    "breakpoint": "is I/O",
    "eval": "runs data as code",
    "exec": "runs data as code",
    "compile": "runs data as code",
    "__import__": "hides an import",
}

# Consumers with a result that does not depend on the order of a set. `sum` is not one: floats.
ORDER_FREE = {"sorted", "set", "frozenset", "len", "min", "max", "any", "all"}
# Consumers that turn the order of a set into data.
ORDER_TAKING = {"list", "tuple", "iter", "enumerate", "zip", "map", "filter", "sum", "reversed", "dict", "deque"}
ORDER_TAKING_METHODS = {"join", "extend", "fromiter", "asarray", "from_iterable", "fromkeys"}


def violations(source: str, granted: AbstractSet[str] = frozenset()) -> list[str]:
    """Every broken rule of one core module."""
    tree = ast.parse(source)
    found = [*_imports(tree, granted), *_names(tree, granted), *_numpy_random(tree), *_set_orders(tree)]
    return [f"line {line}: {message}" for line, message in sorted(found)]


def _imports(tree: ast.Module, granted: AbstractSet[str]) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            yield node.lineno, "a relative import: write `lockstep.core...`, so that its reach is checked"
            continue
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module or ""]
            if node.module == "lockstep":
                modules = [f"lockstep.{alias.name}" for alias in node.names]
        else:
            continue
        for module in modules:
            top = module.split(".")[0]
            own = module == "lockstep.core" or module.startswith("lockstep.core.")
            if not own and top not in THIRD_PARTY and top not in sys.stdlib_module_names:
                yield node.lineno, f"imports `{module}`: the core knows the standard library, numpy and msgspec only"
            elif top in FORBIDDEN_MODULES - granted:
                yield node.lineno, f"imports `{module}`: a clock, I/O, threads, randomness or data run as code"


def _names(tree: ast.Module, granted: AbstractSet[str]) -> Iterator[tuple[int, str]]:
    forbidden = FORBIDDEN_NAMES.keys() - granted
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in forbidden:
            yield node.lineno, f"uses `{node.id}`, which {FORBIDDEN_NAMES[node.id]}"


def _numpy_random(tree: ast.Module) -> Iterator[tuple[int, str]]:
    message = "uses `numpy.random`: the core draws nothing, seeds arrive in events"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "random":
            if isinstance(node.value, ast.Name) and node.value.id in ("np", "numpy"):
                yield node.lineno, message
        elif isinstance(node, ast.Import) and any(alias.name.startswith("numpy.random") for alias in node.names):
            yield node.lineno, message
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            if any(name.startswith("numpy.random") for name in names):
                yield node.lineno, message


def _set_orders(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Places where the order of a set becomes the order of something else.

    Sets are recognised by displays, `set(...)`, set operators, annotations and assignments. Names are taken per
    file, not per scope: two meanings of one name in one file may cost a false alarm, and a rename.
    """
    message = "takes the order of a set, which hashes decide: sort it, or keep a dict"
    names = _set_names(tree)
    order_free = {
        argument
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ORDER_FREE
        for argument in node.args
    }

    def is_set(node: ast.expr) -> bool:
        match node:
            case ast.Set() | ast.SetComp():
                return True
            case ast.Call(func=ast.Name(id="set" | "frozenset")):
                return True
            case ast.Call(func=ast.Attribute(value=owner, attr=method)):
                combining = {"union", "intersection", "difference", "symmetric_difference", "copy"}
                return method in combining and is_set(owner)
            case ast.BinOp(left=left, op=ast.BitOr() | ast.BitAnd() | ast.Sub() | ast.BitXor(), right=right):
                return is_set(left) or is_set(right)
            case ast.IfExp(body=body, orelse=orelse):
                return is_set(body) or is_set(orelse)
            case ast.Name(id=name) | ast.Attribute(attr=name):
                return name in names
        return False

    for node in ast.walk(tree):
        match node:
            case ast.For(iter=source) if is_set(source):
                yield node.lineno, message
            case ast.ListComp() | ast.DictComp() | ast.GeneratorExp() if node not in order_free:
                if any(is_set(generator.iter) for generator in node.generators):
                    yield node.lineno, message
            case ast.Starred(value=value, ctx=ast.Load()) if is_set(value):
                yield node.lineno, message
            case ast.YieldFrom(value=value) if is_set(value):
                yield node.lineno, message
            case ast.Assign(targets=[ast.Tuple() | ast.List()], value=value) if is_set(value):
                yield node.lineno, message
            case ast.Call(func=ast.Attribute(value=owner, attr="pop"), args=[]) if is_set(owner):
                yield node.lineno, message
            case ast.Call(func=ast.Name(id=name), args=args) if name in ORDER_TAKING and any(map(is_set, args)):
                yield node.lineno, message
            case ast.Call(func=ast.Attribute(attr=name), args=args):
                if name in ORDER_TAKING_METHODS and any(map(is_set, args)):
                    yield node.lineno, message


def _set_names(tree: ast.Module) -> set[str]:
    """Variables, parameters and attributes that this file annotates or first fills as a set."""

    def name_of(target: ast.expr) -> str:
        return target.id if isinstance(target, ast.Name) else target.attr if isinstance(target, ast.Attribute) else ""

    def annotated(annotation: ast.expr | None) -> bool:
        while isinstance(annotation, ast.BinOp):  # set[int] | None
            annotation = annotation.left
        if isinstance(annotation, ast.Subscript):
            annotation = annotation.value
        return isinstance(annotation, ast.Name) and annotation.id in {"set", "frozenset", "AbstractSet"}

    names = set()
    for node in ast.walk(tree):
        match node:
            case ast.AnnAssign(target=target, annotation=annotation) if annotated(annotation):
                names.add(name_of(target))
            case ast.arg(arg=name, annotation=annotation) if annotated(annotation):
                names.add(name)
            case ast.Assign(targets=targets, value=ast.Set() | ast.SetComp()):
                names.update(map(name_of, targets))
            case ast.Assign(targets=targets, value=ast.Call(func=ast.Name(id="set" | "frozenset"))):
                names.update(map(name_of, targets))
    return names - {""}


CORE_FILES = sorted(CORE.rglob("*.py"))


def test_the_core_is_where_this_test_looks() -> None:
    assert (CORE / "__init__.py") in CORE_FILES
    assert all((CORE / name).exists() for name in GRANTED), "a grant for a file that is gone"


@pytest.mark.parametrize("path", CORE_FILES, ids=lambda path: str(path.relative_to(CORE)))
def test_module_of_the_core_is_pure(path: Path) -> None:
    granted = GRANTED.get(path.relative_to(CORE).as_posix(), set())
    assert violations(path.read_text(encoding="utf-8"), granted) == []


PLANTED = {
    "torch": ("import torch", "imports `torch`"),
    "the simulator": ("from lockstep.sim import host", "imports `lockstep.sim`"),
    "the simulator by the back door": ("from lockstep import sim", "imports `lockstep.sim`"),
    "a relative import": ("from ..sim import host", "a relative import"),
    "a neighbour's name": ("import lockstep.core_extras", "imports `lockstep.core_extras`"),
    "a clock": ("import time", "imports `time`"),
    "a clock inside a function": ("def f():\n    from time import monotonic", "line 2: imports `time`"),
    "a calendar clock": ("from datetime import datetime\nnow = datetime.now()", "imports `datetime`"),
    "randomness": ("import random", "imports `random`"),
    "secrets": ("import secrets", "imports `secrets`"),
    "uuid": ("from uuid import uuid4", "imports `uuid`"),
    "the environment": ("import os", "imports `os`"),
    "a path": ("import os.path", "imports `os.path`"),
    "threads": ("import threading", "imports `threading`"),
    "processes": ("from concurrent.futures import ThreadPoolExecutor", "imports `concurrent.futures`"),
    "asyncio": ("import asyncio", "imports `asyncio`"),
    "a socket": ("import socket", "imports `socket`"),
    "a subprocess": ("import subprocess", "imports `subprocess`"),
    "io": ("import io", "imports `io`"),
    "pickle": ("import pickle", "imports `pickle`"),
    "open": ("text = open('x').read()", "uses `open`"),
    "print": ("print('admitted')", "uses `print`"),
    "id": ("key = id(request)", "uses `id`"),
    "id as a key": ("rows.sort(key=id)", "uses `id`"),
    "hash": ("bucket = hash(name) % 8", "uses `hash`"),
    "eval": ("value = eval('1 + 1')", "uses `eval`"),
    "exec": ("exec('x = 1')", "uses `exec`"),
    "a hidden import": ("clock = __import__('time')", "uses `__import__`"),
    "numpy's randomness": ("import numpy as np\nrow = np.random.default_rng()", "uses `numpy.random`"),
    "numpy's randomness by name": ("from numpy import random as draw", "uses `numpy.random`"),
    "numpy's randomness as a module": ("import numpy.random", "uses `numpy.random`"),
    "a loop over a display": ("for row in {3, 1}:\n    launch(row)", "the order of a set"),
    "a loop over set()": ("for row in set(rows):\n    launch(row)", "the order of a set"),
    "a loop over a difference": ("for row in set(rows) - done:\n    launch(row)", "the order of a set"),
    "a loop over a variable": ("rows = {1, 2}\nfor row in rows:\n    launch(row)", "the order of a set"),
    "a loop over a parameter": ("def f(rows: set[int]):\n    for row in rows:\n        g(row)", "the order of a set"),
    "a loop over an attribute": (
        "class T:\n    rows: frozenset[int]\n    def f(self):\n        for row in self.rows:\n            launch(row)",
        "the order of a set",
    ),
    "a comprehension": ("rows = [row for row in frozenset(rows)]", "the order of a set"),
    "a generator that is summed": ("total = sum(weight[row] for row in {1, 2})", "the order of a set"),
    "a list of a set": ("rows = list({1, 2})", "the order of a set"),
    "a star": ("rows = [*set(rows)]", "the order of a set"),
    "an unpacking": ("first, second = {1, 2}", "the order of a set"),
    "a pop": ("rows = set()\nrow = rows.pop()", "the order of a set"),
    "a join": ("text = ' '.join({'a', 'b'})", "the order of a set"),
    "an array": ("rows = np.fromiter(set(rows), int)", "the order of a set"),
}


@pytest.mark.parametrize(("source", "expected"), PLANTED.values(), ids=PLANTED)
def test_planted_violation_is_found(source: str, expected: str) -> None:
    assert any(expected in found for found in violations(source)), violations(source)


HARMLESS = {
    "allowed imports": "import numpy as np\nimport msgspec\nfrom lockstep.core.contract import errors\nimport heapq",
    "sorted": "for row in sorted(set(rows)):\n    launch(row)",
    "membership": "done = {1, 2}\nfresh = [row for row in rows if row not in done]",
    "order-free consumers": "rows = {1, 2}\nok = len(rows) + max(rows) + any(row > 1 for row in rows)",
    "a set of a set": "rows = {row + 1 for row in set(rows)}",
    "popping a list": "rows = [1]\nrow = rows.pop()",
    "a dict's order": "for name, pages in {'a': 1}.items():\n    launch(name, pages)",
    "own hash method": "class Key:\n    def __hash__(self) -> int:\n        return self.value",
}


@pytest.mark.parametrize("source", HARMLESS.values(), ids=HARMLESS)
def test_harmless_code_is_left_alone(source: str) -> None:
    assert violations(source) == []


def test_granted_module_may_use_what_it_was_granted_and_nothing_else() -> None:
    granted = {"os", "open"}
    assert violations("import os\nfile = open('journal')", granted) == []
    for source in ["import time", "import random", "import pickle", "import torch", "print(1)", "exec('1')", "id(1)"]:
        assert len(violations(source, granted)) == 1, source


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("lockstep.core", ["torch", "simpy", "click", "rich", "polars", "pydantic", "lockstep.sim"]),
        ("lockstep.host", ["torch", "simpy", "click", "polars", "fastapi", "lockstep.sim", "lockstep.runtime"]),
        ("lockstep.sim", ["torch", "triton", "fastapi", "lockstep.runtime", "lockstep.api"]),
    ],
)
def test_importing_a_package_leaves_the_heavy_ones_alone(module: str, unwanted: list[str]) -> None:
    """Every module of the package is imported, in a fresh interpreter: an import can hide in any of them."""
    code = (
        "import importlib, pkgutil, sys\n"
        f"package = importlib.import_module({module!r})\n"
        f"for found in pkgutil.walk_packages(package.__path__, {module + '.'!r}):\n"
        "    if not found.name.endswith('__main__'):\n"
        "        importlib.import_module(found.name)\n"
        f"print(*[name for name in {unwanted!r} if name in sys.modules])\n"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.split() == []
