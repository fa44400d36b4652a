"""Signatures of the calls of FlashInfer that the runtime makes, by release, as tests/data/flashinfer.json keeps them.

    pip install --no-deps --target FOLDER flashinfer-python==RELEASE        # for each release
    python -m tests.runtime.flashinfer_signatures FOLDER ...

Sources are parsed, not imported: an import needs a GPU's libraries.
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
from pathlib import Path
from typing import Any

STORED = Path(__file__).parents[1] / "data" / "flashinfer.json"
CLASSES = {"BatchPrefillWithPagedKVCacheWrapper": "prefill.py", "BatchDecodeWithPagedKVCacheWrapper": "decode.py"}
METHODS = {"__init__": "__init__", "plan": "plan", "_plan_impl": "plan", "run": "run"}
ATTRIBUTES = ("_pin_memory_int_workspace_buffer", "_custom_mask_buf", "_mask_indptr_buf")
"""What the runtime replaces behind the constructor or `plan`, where a class has it."""


def parameters(function: ast.FunctionDef) -> str:
    """Return the parameters of a function as text, without types; every default is None."""
    given = function.args
    for one in [*given.posonlyargs, *given.args, *given.kwonlyargs]:
        one.annotation = None
    none = ast.Constant(None)
    given.defaults = [none for _ in given.defaults]
    given.kw_defaults = [default and none for default in given.kw_defaults]
    if given.kwarg is not None:
        given.kwarg.annotation = None
    return ast.unparse(given)


def read(folder: Path) -> tuple[str, dict[str, Any]]:
    """Return the release in a folder, and by class and method its parameters; `plan` that forwards is `_plan_impl`."""
    (about,) = folder.glob("flashinfer_python-*.dist-info")
    classes = {}
    for name, file in CLASSES.items():
        text = (folder / "flashinfer" / file).read_text()
        (found,) = (one for one in ast.parse(text).body if isinstance(one, ast.ClassDef) and one.name == name)
        of_class, body = ast.get_source_segment(text, found) or "", found.body
        methods = {}
        for one in body:
            if isinstance(one, ast.FunctionDef) and one.name in METHODS:  # the last one is that behind overloads
                methods[METHODS[one.name]] = parameters(one)
        classes[name] = {**methods, "attributes": [one for one in ATTRIBUTES if f"self.{one} = " in of_class]}
    return about.name.removeprefix("flashinfer_python-").removesuffix(".dist-info"), classes


def signature(stored: str) -> inspect.Signature:
    """Return stored parameters as a signature."""
    (function,) = ast.parse(f"def stored({stored}): ...").body
    assert isinstance(function, ast.FunctionDef)
    given, kinds = function.args, inspect.Parameter
    without = len(given.args) - len(given.defaults)
    found = [
        kinds(one.arg, kinds.POSITIONAL_OR_KEYWORD, default=kinds.empty if number < without else None)
        for number, one in enumerate(given.args)
    ]
    found += [
        kinds(one.arg, kinds.KEYWORD_ONLY, default=kinds.empty if default is None else None)
        for one, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)
    ]
    return inspect.Signature([*found, *([kinds(given.kwarg.arg, kinds.VAR_KEYWORD)] if given.kwarg else [])])


if __name__ == "__main__":
    releases = dict(read(Path(folder)) for folder in sys.argv[1:])
    STORED.write_text(json.dumps(releases, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {STORED}: {', '.join(releases)}")
