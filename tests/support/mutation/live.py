"""Puts a mutant into effect in this process: its code replaces that of the functions that were imported.

References to a function that other modules or classes hold see the change too, for the function objects stay the same.
"""

from __future__ import annotations

import gc
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType

from tests.support.mutation.operators import Mutant

Key = tuple[str, str, int]  # file, qualified name, first line


class NoFunctionError(Exception):
    """No imported function has the code of the mutant, or its variables differ."""


class LiveFunctions:
    """The functions of some files that this process has imported, by their code."""

    def __init__(self, paths: set[Path]) -> None:
        files = {str(path) for path in paths}
        self._by_code: dict[Key, list[FunctionType]] = {}
        for one in gc.get_objects():
            if type(one) is FunctionType and one.__code__.co_filename in files:
                self._by_code.setdefault(_key(one.__code__), []).append(one)

    def mutate(self, mutant: Mutant) -> None:
        """Give the functions of a mutant its code, for the rest of this process. Raises: NoFunctionError."""
        key = str(mutant.path), mutant.function, mutant.first_line
        code = next(
            (one for one in _codes(compile(mutant.tree, key[0], "exec", dont_inherit=True)) if _key(one) == key), None
        )
        functions = self._by_code.get(key)
        if code is None or not functions:
            raise NoFunctionError(f"{mutant.name}: no function of this process has its code")
        for function in functions:
            if function.__code__.co_freevars != code.co_freevars:
                raise NoFunctionError(f"{mutant.name}: its variables from outside differ")
            function.__code__ = code


def edited_code(function: FunctionType, before: str, after: str) -> CodeType:
    """Return the code of a function with one text of its source replaced. Raises: ValueError unless it occurs once."""
    code = function.__code__
    path = Path(code.co_filename)
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    own = "".join(inspect.getblock(lines[code.co_firstlineno - 1 :]))
    if own.count(before) != 1:
        raise ValueError(f"{code.co_qualname} has {own.count(before)} times `{before}`, expected once")
    above = "".join(lines[: code.co_firstlineno - 1])
    source = above + own.replace(before, after) + "".join(lines)[len(above) + len(own) :]
    return next(one for one in _codes(compile(source, str(path), "exec", dont_inherit=True)) if _key(one) == _key(code))


def _key(code: CodeType) -> Key:
    return code.co_filename, code.co_qualname, code.co_firstlineno


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of functions and methods, not of functions inside them."""
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield one
            yield from _codes(one)
