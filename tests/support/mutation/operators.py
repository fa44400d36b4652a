"""The mutants of a module: each is the module with one small change inside one function.

`ARITHMETIC` are changes of comparisons, numbers and operators. `EVERY` also has changes that only Python can run:
statements that are left out, conditions that are negated, truth values, `break` for `continue`.
"""

from __future__ import annotations

import ast
import copy
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
}
MEMBERSHIPS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
SUMS: dict[type[ast.operator], type[ast.operator]] = {ast.Add: ast.Sub, ast.Sub: ast.Add}
PRODUCTS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}
ARITHMETIC, EVERY = "arithmetic", "every"
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


class Place(NamedTuple):
    """A node, and where its parent holds it."""

    node: ast.AST
    owner: ast.AST
    field: str
    index: int  # in a list of the parent; -1: the field itself

    @property
    def is_condition(self) -> bool:
        """Whether the truth of the node decides what runs."""
        return self.field in ("test", "ifs") and not isinstance(self.owner, ast.Assert)

    def replace(self, node: ast.AST) -> None:
        """Put another node in this place. A statement that is left out stays in a branch that never runs.

        So the function keeps its local and outer variables, `__class__` of `super()` among them.
        """
        if isinstance(node, ast.Pass):
            assert isinstance(self.node, ast.stmt)
            node = ast.If(ast.Constant(value=False), [self.node], [])
        ast.copy_location(node, self.node)
        if self.index < 0:
            setattr(self.owner, self.field, node)
        else:
            getattr(self.owner, self.field)[self.index] = node


@dataclass(frozen=True)
class Mutant:
    """One changed place in one module."""

    path: Path
    module: str  # the name of the file in reports
    function: str  # qualified by its class
    number: int  # among the places of its function with the same change
    change: str
    kinds: str  # `ARITHMETIC` or `EVERY`
    at: tuple[int, int, int] = (-1, -1, -1)  # function, place and variant; of a planted one none
    planted: tuple[str, str] = ("", "")  # text before and after
    lines: tuple[int, int] = (0, 0)  # first and last line of the place, from 1
    first_line: int = 0  # of the function, decorators included

    @property
    def name(self) -> str:
        """The name by which the mutant is listed; it does not depend on line numbers."""
        number = f" ({self.number})" if self.number else ""
        return f"{self.module} {self.function}: {self.change}{number}"

    @property
    def line(self) -> int:
        """The first line of the changed place."""
        return self.lines[0]

    @property
    def digest(self) -> str:
        """Identifies the text of the function: a result holds as long as it stays the same."""
        function = _functions(_source(self.path))[self.at[0]][1]
        return blake2b(ast.dump(function).encode(), digest_size=8).hexdigest()

    @property
    def tree(self) -> ast.Module:
        """The syntax tree of the changed module."""
        source = _source(self.path)
        if self.planted[0]:
            return ast.parse(source.replace(*self.planted))
        tree = ast.parse(source)
        function, place, variant = self.at
        where = list(_places(_functions_of(tree)[function][1], self.kinds))[place]
        where.replace(_variants(where, self.kinds)[variant])
        return ast.fix_missing_locations(tree)


def mutants_of(
    path: Path, module: str = "", kinds: str = EVERY, plants: tuple[tuple[str, str], ...] = ()
) -> Iterator[Mutant]:
    """Yield every mutant of a module.

    Args:
        module: its name in reports; default: that of the file.
        plants: constants outside functions that are changed too: text before and after, once in the module.
    """
    module, source = module or path.name, _source(path)
    for before, after in plants:
        assert source.count(before) == 1, before
        yield Mutant(path, module, "planted", 0, f"`{before}` becomes `{after}`", kinds, planted=(before, after))
    seen: dict[tuple[str, str], int] = {}
    for at, (name, function) in enumerate(_functions(source)):
        if kinds == ARITHMETIC and "." in name:
            continue
        first_line = min([function.lineno, *(one.lineno for one in function.decorator_list)])
        for where, place in enumerate(_places(function, kinds)):
            for variant, node in enumerate(_variants(place, kinds)):
                text = f"`{_text(place.node)}` " + (
                    "is left out" if isinstance(node, ast.Pass) else f"becomes `{_text(node)}`"
                )
                number = seen[name, text] = seen.get((name, text), -1) + 1
                line = getattr(place.node, "lineno", 0)
                lines = (line, getattr(place.node, "end_lineno", line))
                at_ = (at, where, variant)
                yield Mutant(path, module, name, number, text, kinds, at_, lines=lines, first_line=first_line)


@cache
def _source(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@cache
def _functions(source: str) -> list[tuple[str, FunctionNode]]:
    return _functions_of(ast.parse(source))


def _functions_of(tree: ast.Module) -> list[tuple[str, FunctionNode]]:
    """Return functions and methods with their qualified names; functions inside functions belong to the outer one."""
    found: list[tuple[str, FunctionNode]] = []

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for statement in body:
            if isinstance(statement, FunctionNode):
                found.append((prefix + statement.name, statement))
            elif isinstance(statement, ast.ClassDef):
                visit(statement.body, f"{prefix}{statement.name}.")

    visit(tree.body, "")
    return found


def _places(function: FunctionNode, kinds: str) -> Iterator[Place]:
    """Yield the places of a function that can be changed, without docstring, annotations and texts of errors."""
    start = 1 if ast.get_docstring(function) is not None else 0
    for index in range(start, len(function.body)):
        waiting = deque([Place(function.body[index], function, "body", index)])
        while waiting:
            place = waiting.popleft()
            waiting.extend(_children(place.node))
            if _variants(place, kinds):
                yield place


def _children(node: ast.AST) -> Iterator[Place]:
    if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr):
        return
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list"):
            continue
        if isinstance(value, ast.AST):
            yield Place(value, node, field, -1)
        elif isinstance(value, list):
            for index, one in enumerate(value):
                if isinstance(one, ast.AST):
                    yield Place(one, node, field, index)


def _variants(place: Place, kinds: str) -> list[ast.AST]:
    """Return what may stand in a place instead."""
    node = place.node
    found: list[ast.AST] = list(_arithmetic(node))
    if kinds == EVERY:
        if isinstance(node, ast.stmt):
            found += _statements(node)
        elif isinstance(node, ast.expr):
            found += _conditions(node, place.is_condition)
    return found


def _arithmetic(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Compare):
        for operation in COMPARISONS.get(type(node.ops[0]), ()):
            yield ast.Compare(node.left, [operation(), *node.ops[1:]], node.comparators)
    elif isinstance(node, ast.BoolOp):
        yield ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
    elif isinstance(node, ast.BinOp) and type(node.op) in SUMS:
        yield ast.BinOp(node.left, SUMS[type(node.op)](), node.right)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("min", "max"):
        other = ast.copy_location(ast.Name("max" if node.func.id == "min" else "min", ast.Load()), node.func)
        yield ast.Call(other, node.args, node.keywords)
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
        assert isinstance(node.value, int | float)
        yield ast.Constant(node.value + 1)


def _conditions(node: ast.expr, is_condition: bool) -> Iterator[ast.AST]:
    if isinstance(node, ast.Compare):
        for operation in MEMBERSHIPS.get(type(node.ops[0]), ()):
            yield ast.Compare(node.left, [operation(), *node.ops[1:]], node.comparators)
    elif isinstance(node, ast.BinOp) and type(node.op) in PRODUCTS:
        yield ast.BinOp(node.left, PRODUCTS[type(node.op)](), node.right)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield copy.copy(node.operand)
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield ast.Constant(not node.value)
    elif is_condition and not isinstance(node, ast.BoolOp):
        yield ast.UnaryOp(ast.Not(), node)


def _statements(node: ast.stmt) -> Iterator[ast.AST]:
    if isinstance(node, ast.AugAssign):
        if type(node.op) in SUMS:
            yield ast.AugAssign(node.target, SUMS[type(node.op)](), node.value)
        yield ast.Pass()
    elif (
        (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call))
        or (
            isinstance(node, ast.Assign) and all(isinstance(one, ast.Attribute | ast.Subscript) for one in node.targets)
        )
        or isinstance(node, ast.Delete)
    ):
        yield ast.Pass()
    elif isinstance(node, ast.Break | ast.Continue):
        yield ast.Continue() if isinstance(node, ast.Break) else ast.Break()


def _text(node: ast.AST) -> str:
    line, *more = ast.unparse(node).splitlines()
    return f"{line} ..." if more else line
