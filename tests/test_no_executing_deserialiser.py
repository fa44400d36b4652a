"""Nothing in this repository turns stored or received bytes into code: not the product, not a tool, not a test.

Serving engines were attacked repeatedly through a pickle in a socket, a cache or a debugging tool. Deny-lists
inside an unpickler were bypassed each time, so the rule is that there is none. The source of every file is walked, and
each rule is tried on a planted violation.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("packages", "tools", "tests", "benchmarks", "examples", "docs")

FORBIDDEN_MODULES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "jsonpickle", "joblib", "marshal", "shelve"}

# Dotted names after resolving this file's imports: `from torch import load as l` makes `l` mean `torch.load`.
FORBIDDEN_NAMES = {
    "eval",
    "exec",
    "builtins.eval",
    "builtins.exec",
    "torch.load",
    "torch.serialization.load",
    "yaml.load",
    "yaml.load_all",
    "yaml.full_load",
    "yaml.full_load_all",
    "yaml.unsafe_load",
    "yaml.unsafe_load_all",
    "numpy.lib.npyio.load",
    "numpy.lib.format.read_array",
    "pandas.read_pickle",
}
FORBIDDEN_METHODS = {"recv_pyobj", "send_pyobj", "read_pickle", "to_pickle"}  # of sockets and data frames
IMPORTERS = {"__import__", "importlib.import_module", "pytest.importorskip"}
WORDS = FORBIDDEN_MODULES | FORBIDDEN_METHODS | {name.rpartition(".")[2] for name in FORBIDDEN_NAMES}
ANY_WORD = re.compile(rf"\b({'|'.join(sorted(WORDS))})\b")  # a violation has one; parsing is what takes time


def violations(source: str) -> list[str]:
    """Every deserialiser in `source` that can execute what it reads."""
    if not ANY_WORD.search(source):
        return []
    nodes = list(ast.walk(ast.parse(source)))
    return [f"line {line}: {message}" for line, message in sorted(_findings(nodes, _meanings(nodes)))]


def _findings(nodes: Sequence[ast.AST], meanings: dict[str, str]) -> Iterator[tuple[int, str]]:
    for node in nodes:
        match node:
            case ast.Import(names=names):
                for alias in names:
                    if alias.name.split(".")[0] in FORBIDDEN_MODULES:
                        yield node.lineno, f"imports `{alias.name}`"
            case ast.ImportFrom(module=str(module), level=0):
                if module.split(".")[0] in FORBIDDEN_MODULES:
                    yield node.lineno, f"imports from `{module}`"
                for alias in node.names:
                    if f"{module}.{alias.name}" in FORBIDDEN_NAMES:
                        yield node.lineno, f"imports `{module}.{alias.name}`"
            case ast.Name() | ast.Attribute():
                if (name := _dotted(node, meanings)) in FORBIDDEN_NAMES:
                    yield node.lineno, f"uses `{name}`"
                elif isinstance(node, ast.Attribute) and node.attr in FORBIDDEN_METHODS:
                    yield node.lineno, f"uses `.{node.attr}`"
            case ast.Call(func=func):
                name = _dotted(func, meanings)
                if name == "numpy.load" and not _surely_without_pickle(node):
                    yield node.lineno, "calls `numpy.load` with `allow_pickle`"
                match node.args:
                    case [ast.Constant(value=str(module)), *_] if name in IMPORTERS:
                        if module.split(".")[0] in FORBIDDEN_MODULES:
                            yield node.lineno, f"imports `{module}` by name"


def _surely_without_pickle(call: ast.Call) -> bool:
    """numpy.load refuses pickles by default; it stays so unless `allow_pickle` is given, openly or in ** or *."""
    if len(call.args) > 2 or any(isinstance(argument, ast.Starred) for argument in call.args):
        return False
    for keyword in call.keywords:
        if keyword.arg is None:
            return False
        if keyword.arg == "allow_pickle":
            return isinstance(keyword.value, ast.Constant) and keyword.value.value is False
    return True


def _meanings(nodes: Sequence[ast.AST]) -> dict[str, str]:
    """The dotted path for which each imported name stands."""
    meanings = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.asname:
                    meanings[alias.asname] = alias.name
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                meanings[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return meanings


def _dotted(node: ast.expr, meanings: dict[str, str]) -> str | None:
    if isinstance(node, ast.Name):
        return meanings.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        owner = _dotted(node.value, meanings)
        return f"{owner}.{node.attr}" if owner else None
    return None


def _python_files() -> list[Path]:
    found = [*ROOT.glob("*.py")]
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            if not any(part.startswith(".") for part in path.relative_to(ROOT).parts):
                found.append(path)
    return sorted(found)


def test_the_walk_reaches_every_part_of_the_repository() -> None:
    files = {str(path.relative_to(ROOT)) for path in _python_files()}
    assert {"dev.py", "tests/conftest.py", "packages/sched-core/src/lockstep/core/command.py"} <= files
    assert any(name.startswith("tools/src/") for name in files)


def test_no_file_uses_a_deserialiser_that_executes() -> None:
    found = []
    for path in _python_files():
        found += [f"{path.relative_to(ROOT)} {violation}" for violation in violations(path.read_text(encoding="utf-8"))]
    assert found == [], "\n".join(["use msgspec, JSON or safetensors instead:", *found])


PLANTED = [
    "import pickle",
    "import pickle as p",
    "def f():\n    from pickle import loads",
    "import dill",
    "import cloudpickle",
    "import marshal",
    "import shelve",
    "import joblib",
    "pickle = __import__('pickle')",
    "import importlib\np = importlib.import_module('pickle')",
    "from importlib import import_module\np = import_module('cloudpickle.compat')",
    "import torch\ntorch.load('weights.pt')",
    "import torch\ntorch.load('weights.pt', weights_only=True)",
    "import torch as t\nload = t.load",
    "from torch import load as read",
    "import yaml\nyaml.load(text, Loader=yaml.SafeLoader)",
    "from yaml import unsafe_load",
    "import numpy as np\nnp.load('x.npy', allow_pickle=True)",
    "import numpy as np\nnp.load('x.npy', None, True)",
    "import numpy as np\nnp.load('x.npy', allow_pickle=trusted)",
    "import numpy as np\nnp.load('x.npy', **options)",
    "from numpy import load\nload('x.npy', allow_pickle=True)",
    "import pandas as pd\npd.read_pickle('x')",
    "message = socket.recv_pyobj()",
    "eval('1')",
    "exec('x = 1')",
    "import builtins\nbuiltins.eval('1')",
    "run = eval",
]


@pytest.mark.parametrize("source", PLANTED)
def test_planted_violation_is_found(source: str) -> None:
    assert violations(source)


@pytest.mark.parametrize(
    "source",
    [
        "import numpy as np\nnp.load('x.npy')",
        "import numpy as np\nnp.load('x.npy', mmap_mode='r', allow_pickle=False)",
        "import json\njson.load(file)",
        "import tomllib\ntomllib.load(file)",
        "import yaml\nyaml.safe_load(text)",
        "model.eval()",
        "import ast\nast.literal_eval('1')",
        "import re\nre.compile('x')",
        "# pickle\nname = 'pickle.loads'",
    ],
)
def test_harmless_code_is_left_alone(source: str) -> None:
    assert violations(source) == []
