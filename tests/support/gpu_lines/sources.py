"""Modules, classes and functions of a package as the reading of `reached.py` needs them, by `ast`."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.support.gpu_lines.values import NOTHING, OTHER

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
WITHOUT_FIELDS = ("Protocol", "ABC", "Exception", "RuntimeError", "ValueError")  # bases that make no parameters
PLAIN = (
    "staticmethod",
    "classmethod",
    "property",
    "cached_property",
    "contextmanager",
    "cache",
    "abstractmethod",
    "override",
)
KERNEL = "jit"


@dataclass
class Module:
    """A file."""

    name: str  # such as lockstep.runtime.graphs
    path: str
    tree: ast.Module
    reached: bool = False
    is_value: bool = False  # it is passed on: attributes of anything may be its functions
    lines: set[int] = field(default_factory=set)  # of statements that may run


@dataclass
class Class:
    """A class at the top of a module or of another class."""

    name: str
    module: Module
    node: ast.ClassDef
    reached: bool = False  # one may be made

    @property
    def bases(self) -> list[str]:
        """Names of the classes that it extends."""
        return [name for one in self.node.bases if (name := last_name(one))]

    @property
    def is_protocol(self) -> bool:
        """Whether it only describes others."""
        return "Protocol" in [last_name(getattr(one, "value", one)) for one in self.node.bases] + self.bases


@dataclass
class Function:
    """A function or a method; `outer` is the function in which it is defined."""

    name: str
    module: Module
    node: FunctionNode
    owner: Class | None
    outer: Function | None
    reached: bool = False
    open: bool = False  # called from where nothing is read: its parameters may be anything
    variables: dict[str, int] = field(default_factory=dict)
    imported: set[str] = field(default_factory=set)  # variables that it imports
    used: set[str] = field(default_factory=set)  # variables that lines that may run read
    returned: int = NOTHING

    @property
    def decorators(self) -> list[str]:
        """Names of its decorators."""
        return [last_name(called(one)) for one in self.node.decorator_list]

    @property
    def is_kernel(self) -> bool:
        """Whether Triton compiles it."""
        return KERNEL in self.decorators

    @property
    def parameters(self) -> list[str]:
        """Names of parameters that are given by position, without `self`."""
        names = [one.arg for one in [*self.node.args.posonlyargs, *self.node.args.args]]
        bound = self.owner is not None and "staticmethod" not in self.decorators
        return names[1:] if bound else names

    @property
    def is_top(self) -> bool:
        """Whether it is at the top of its module."""
        return self.owner is None and self.outer is None

    @property
    def is_plain(self) -> bool:
        """Whether a call runs its body and has its result."""
        return all(name in PLAIN for name in self.decorators)

    def set(self, name: str, value: int) -> bool:
        """Let a variable have one more value. Returns whether that is new."""
        before = self.variables.get(name, NOTHING)
        self.variables[name] = before | value
        return self.variables[name] != before


def last_name(node: ast.AST | None) -> str:
    """Return `c` of `c` and of `a.b.c`; empty for anything else."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def dotted(node: ast.AST) -> str:
    """Return `a.b.c` of such an expression; empty for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    before = dotted(node.value) if isinstance(node, ast.Attribute) else ""
    return f"{before}.{node.attr}" if before and isinstance(node, ast.Attribute) else ""


def called(node: ast.expr) -> ast.expr:
    """Return what an expression calls, or the expression."""
    return node.func if isinstance(node, ast.Call) else node


class Sources:
    """All of a package by name.

    Args:
        modules: by name, path and text.
    """

    def __init__(self, modules: dict[str, tuple[str, str]]) -> None:
        self.modules = {name: Module(name, path, ast.parse(text)) for name, (path, text) in modules.items()}
        self.classes: dict[str, list[Class]] = defaultdict(list)
        self.functions: dict[str, list[Function]] = defaultdict(list)
        self.by_node: dict[ast.AST, Function | Class] = {}
        self.tops: dict[tuple[str, str], Function | Class] = {}  # of the top of a module, by module and name
        self.imported: dict[str, dict[str, str]] = {}  # by module and name in it: what it stands for, dotted
        self.assigned: set[tuple[str, str]] = set()  # attributes, see `place_of`
        for module in self.modules.values():
            self._read(module, module.tree, None, None)
            self.imported[module.name] = imports_of(module.tree)
            for node in ast.walk(module.tree):
                if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
                    self.assigned.add(place_of(module, node.attr))

        for made in self.every_class():
            for one in made.node.body:
                if isinstance(one, ast.Assign | ast.AnnAssign) and (one.value is not None or self.has_fields(made)):
                    targets = one.targets if isinstance(one, ast.Assign) else [one.target]
                    self.assigned.update(place_of(made.module, last_name(target)) for target in targets)

    def _read(self, module: Module, node: ast.AST, owner: Class | None, outer: Function | None) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                made = Class(child.name, module, child)
                if owner is None and outer is None:
                    self.tops[module.name, child.name] = made
                self.classes[child.name].append(made)
                self.by_node[child] = made
                self._read(module, child, made, outer)
            elif isinstance(child, FunctionNode):
                function = Function(child.name, module, child, owner, outer)
                self.functions[child.name].append(function)
                if function.is_top:
                    self.tops[module.name, child.name] = function
                self.by_node[child] = function
                for one in _parameters(child):
                    function.variables[one] = NOTHING
                given = child.args
                for other in (given.vararg, given.kwarg):
                    if other is not None:
                        function.variables[other.arg] = OTHER
                if owner is not None and "staticmethod" not in function.decorators:
                    first = [*given.posonlyargs, *given.args][:1]
                    function.variables.update((one.arg, OTHER) for one in first)
                self._read(module, child, None, function)
            else:
                self._read(module, child, owner, outer)

    def resolved(self, module: str, name: str) -> Function | Class | Module | None:
        """Return what a name of a module stands for, through imports; None: nothing of this package."""
        if (module, name) in self.tops:
            return self.tops[module, name]
        target = self.imported[module].get(name)
        if target is None or target == f"{module}.{name}":
            return self.modules.get(f"{module}.{name}")
        if target in self.modules:
            return self.modules[target]
        parent, _, last = target.rpartition(".")
        return self.resolved(parent, last) if parent in self.modules else None

    def class_of(self, module: Module, name: str) -> Class | None:
        """Return the class of this package that a name of a module stands for; None: a foreign one."""
        found = self.resolved(module.name, name)
        return found if isinstance(found, Class) else None

    def has_fields(self, one: Class) -> bool:
        """Return whether annotations in a class may be parameters of `__init__`: by a decorator, or a foreign base."""
        if "dataclass" in map(last_name, map(called, one.node.decorator_list)):
            return True
        bases = [(base, self.class_of(one.module, base)) for base in one.bases]
        return any(base not in WITHOUT_FIELDS if found is None else self.has_fields(found) for base, found in bases)

    def every_function(self) -> Iterator[Function]:
        """Yield all functions."""
        for some in self.functions.values():
            yield from some

    def every_class(self) -> Iterator[Class]:
        """Yield all classes."""
        for some in self.classes.values():
            yield from some


def imports_of(tree: ast.Module) -> dict[str, str]:
    """Return the names that a module imports, anywhere in it, with what they stand for."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            found.update((alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Import):
            found.update((alias.asname or alias.name, alias.name) for alias in node.names)
    return found


def _parameters(node: FunctionNode) -> list[str]:
    return [one.arg for one in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]]


def place_of(module: Module, attribute: str) -> tuple[str, str]:
    """Return where an attribute's values are joined: a private one in its module, any other in the package."""
    return (module.name if attribute.startswith("_") else "", attribute)
