"""Which lines of a package may run in a world, by constants that follow from the world's facts.

    gpu = device.type == "cuda"                  False without a GPU
    stream = torch.cuda.Stream() if gpu else None          None
    self._stream = stream                        None, if no other line assigns another value
    if self._stream is not None:                 not reached, nor a function that only such lines name

Values are sets of `None`, `False`, `True` and anything else (`values.py`). They start empty and grow until nothing
changes, as in sparse conditional constant propagation (Wegman and Zadeck, 1991), with variables regardless of order in
their function. A function is reached if a line that may run names it, itself or by an import; a class, if such a line
names it outside of `isinstance` and annotations; a method, if its class is reached and a line names an attribute like
it. Methods and attributes of equal names are not distinguished, so too much is taken as reached, not too little.
Parameters have the values of all calls; those of a function that is passed on, or that another package names, may be
anything.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tests.support.gpu_lines.sources import (
    WITHOUT_FIELDS,
    Class,
    Function,
    FunctionNode,
    Module,
    Sources,
    called,
    last_name,
    place_of,
)
from tests.support.gpu_lines.values import (
    BOOL,
    FALSE,
    NONE,
    NOTHING,
    OTHER,
    TRUE,
    is_none,
    may_fail,
    may_hold,
    negated,
    of_constant,
)

Fact = Callable[[ast.expr], int]
"""Returns the value of an expression in this world; NOTHING: no fact concerns it."""

FOREIGN = frozenset(dir(dict)) | set(dir(list)) | set(dir(str)) | set(dir(set)) | {"read", "write", "result", "group"}
"""Methods of other libraries' objects: a call of one is not resolved by its name."""


@dataclass(frozen=True)
class Outside:
    """What other packages use of this one: `imported` by module and name, and names of attributes."""

    imported: frozenset[tuple[str, str]] = frozenset()
    attributes: frozenset[str] = frozenset()


NOWHERE = Outside()


class Reached:
    """The lines that may run.

    Args:
        fact: what holds in this world.
        absent: names of modules that this world never imports: an import of one, and what follows it, is not reached.
        roots: names of modules that are started from outside.
        outside: what other packages use.
    """

    def __init__(
        self, sources: Sources, fact: Fact, absent: Iterable[str], roots: Iterable[str], outside: Outside = NOWHERE
    ) -> None:
        self.sources, self._fact, self._absent = sources, fact, frozenset(absent)
        self._named: dict[str, bool] = dict.fromkeys(outside.attributes, True)  # attributes; whether not only called
        self._inner: dict[str, bool] = {}  # variables, likewise: functions within functions
        self._tops: dict[int, bool] = {}  # functions and classes at the top of modules, likewise, by id
        self._attributes: dict[tuple[str, str], int] = {}
        self._changed = self._lenient = False
        self._module: Module
        self._function: Function | None = None
        self._owner: Class | None = None
        self._hidden: list[set[str]] = []  # variables of lambdas and comprehensions
        self._roots = frozenset(roots)
        for name in self._roots:
            self._import(name)
        for module, name in outside.imported:
            self._import(module)
            self._import(f"{module}.{name}")
            if module in sources.modules:
                self._top(sources.resolved(module, name), opens=True)
        while self._pass() or not self._lenient:  # at last, conditions without a value may be anything
            if not self._changed:
                self._lenient = True

    def lines(self) -> dict[str, set[int]]:
        """Return by file the first lines of statements that may run."""
        return {one.path: one.lines for one in self.sources.modules.values() if one.reached}

    # ---------------------------------------------------------------------------------------------------------- passes

    def _pass(self) -> bool:
        """Read everything that is reached once. Returns whether more is reached now, or has more values."""
        self._changed = False
        for module in self.sources.modules.values():
            if module.reached:
                self._module, self._function, self._owner = module, None, None
                self._body(module.tree.body)
        for one in self.sources.every_class():
            of_value = one.module.is_value and one.name in self._named
            if not one.reached and one.module.reached and (id(one) in self._tops or of_value):
                one.reached = self._changed = True
            for base in one.bases if one.reached else ():
                self._top(self.sources.class_of(one.module, base))
        for function in self.sources.every_function():
            if not function.reached and self._is_reached(function):
                function.reached = self._changed = True
            if function.reached:
                self._read(function)
        return self._changed

    def _is_reached(self, function: Function) -> bool:
        if not function.module.reached or (function.outer is not None and not function.outer.reached):
            return False
        owner, registered = function.owner, not (function.is_plain or function.is_kernel)
        if owner is None:
            of_value = function.module.is_value and function.name in self._named
            named = id(function) in self._tops or of_value if function.is_top else function.name in self._inner
            return registered or named
        if owner.is_protocol or not owner.reached:
            return False
        return registered or function.name in self._named or is_special(function.name) or self._is_foreign(owner)

    def _is_foreign(self, owner: Class) -> bool:
        """Whether a class extends one of another package, which may call any method."""
        bases = [base for base in owner.bases if base not in WITHOUT_FIELDS]
        return any(self.sources.class_of(owner.module, base) is None for base in bases)

    def _is_open(self, function: Function) -> bool:
        """Whether a function is called from where nothing is read."""
        if function.owner is None:
            opened = self._tops.get(id(function)) if function.is_top else self._inner.get(function.name)
            return bool(opened) or not function.is_plain or (function.is_top and function.module.is_value)
        if function.name == "__init__":
            return bool(self._tops.get(id(function.owner)))
        called = is_special(function.name) or self._is_foreign(function.owner) or not function.is_plain
        return called or bool(self._named.get(function.name))

    def _read(self, function: Function) -> None:
        self._module, self._function, self._owner = function.module, function, function.owner
        if not function.open and self._is_open(function):
            function.open = self._changed = True
        given = function.node.args
        named = [*given.posonlyargs, *given.args, *given.kwonlyargs]
        if function.open:
            for one in named:
                self._set(one.arg, OTHER)
        if self._body(function.node.body):
            self._return(NONE)
        if function.is_kernel or "contextmanager" in function.decorators or _yields(function.node):
            self._return(OTHER)

    def _return(self, value: int) -> None:
        assert self._function is not None
        if self._function.returned | value != self._function.returned:
            self._function.returned |= value
            self._changed = True

    # ------------------------------------------------------------------------------------------------------ statements

    def _body(self, statements: list[ast.stmt]) -> bool:
        """Read statements up to the first behind which nothing runs. Returns whether the end is reached."""
        return all(self._statement(one) for one in statements)

    def _line(self, number: int) -> None:
        if number not in self._module.lines:
            self._module.lines.add(number)
            self._changed = True

    def _statement(self, node: ast.stmt) -> bool:
        """Read a statement. Returns whether the next one may run."""
        if isinstance(node, ast.ImportFrom | ast.Import) and self._is_absent(node):
            return False
        self._line(node.lineno)
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self._define(node)
            case ast.ClassDef():
                self._class(node)
            case ast.If():
                value = FALSE if self._is_not_started(node.test) else self._condition(node.test)
                ends = [self._body(node.body)] if may_hold(value) else []
                ends += [self._body(node.orelse)] if may_fail(value) else []
                return any(ends)
            case ast.While():
                value = self._condition(node.test)
                if may_hold(value):
                    self._body(node.body)
                return may_fail(value) or _breaks(node.body)
            case ast.For() | ast.AsyncFor():
                self._value(node.iter)
                self._assign(node.target, OTHER)
                self._body(node.body)
                self._body(node.orelse)
            case ast.With() | ast.AsyncWith():
                for item in node.items:
                    self._value(item.context_expr)
                    if item.optional_vars is not None:
                        self._assign(item.optional_vars, OTHER)
                suppresses = any(last_name(called(one.context_expr)) == "suppress" for one in node.items)
                return self._body(node.body) or suppresses
            case ast.Try():
                ends = [self._body(node.body) and self._body(node.orelse)]
                for handler in node.handlers:
                    self._line(handler.lineno)
                    if handler.name:
                        self._set(handler.name, OTHER)
                    ends.append(self._body(handler.body))
                return self._body(node.finalbody) and any(ends)
            case ast.Match():
                return self._match(node)
            case ast.Return():
                self._return(NONE if node.value is None else self._value(node.value))
                return False
            case ast.Raise():
                for one in (node.exc, node.cause):
                    if one is not None:
                        self._value(one)
                return False
            case ast.Break() | ast.Continue():
                return False
            case ast.Import() | ast.ImportFrom():
                self._imports(node)
            case ast.Assign():
                for target in node.targets:
                    self._assign_from(target, node.value)
            case ast.AnnAssign():
                if node.value is not None:
                    self._assign_from(node.target, node.value)
                if self._in_class_body and self._owner is not None and self.sources.has_fields(self._owner):
                    self._attribute(last_name(node.target), OTHER)
            case ast.AugAssign():
                self._value(node.value)
                self._assign(node.target, OTHER)
            case ast.Assert():
                self._condition(node.test)
            case ast.Nonlocal():
                for function in self._around():
                    for name in set(node.names) & function.variables.keys():
                        self._changed |= function.set(name, OTHER)
            case _:
                for child in ast.iter_child_nodes(node):
                    if isinstance(child, ast.expr):
                        self._value(child)
        return True

    def _is_not_started(self, node: ast.expr) -> bool:
        """Whether a condition is that the module is the program, and no root."""
        return ast.unparse(node) == "__name__ == '__main__'" and self._module.name not in self._roots

    def _match(self, node: ast.Match) -> bool:
        self._value(node.subject)
        ends, whole = [], False
        for case in node.cases:
            for one in ast.walk(case.pattern):
                if isinstance(one, ast.MatchAs | ast.MatchStar) and one.name:
                    self._set(one.name, OTHER)
            value = OTHER if case.guard is None else self._condition(case.guard)
            whole |= case.guard is None and isinstance(case.pattern, ast.MatchAs) and case.pattern.pattern is None
            if may_hold(value):
                ends.append(self._body(case.body))
        return any(ends) or not whole

    def _around(self) -> Iterator[Function]:
        """Yield the functions in which this one is defined."""
        function = self._function and self._function.outer
        while function is not None:
            yield function
            function = function.outer

    @property
    def _in_class_body(self) -> bool:
        return self._function is None and self._owner is not None

    def _define(self, node: FunctionNode) -> None:
        function = self.sources.by_node[node]
        assert isinstance(function, Function)
        for one in node.decorator_list:
            self._line(one.lineno)
            self._value(one)
        given = node.args
        positional = [*given.posonlyargs, *given.args]
        for argument, default in [
            *zip(positional[len(positional) - len(given.defaults) :], given.defaults, strict=True),
            *zip(given.kwonlyargs, given.kw_defaults, strict=True),
        ]:
            if default is not None:
                self._changed |= function.set(argument.arg, self._value(default))

    def _class(self, node: ast.ClassDef) -> None:
        made = self.sources.by_node[node]
        assert isinstance(made, Class)
        for one in node.decorator_list:
            self._line(one.lineno)
            self._value(one)
        function, owner = self._function, self._owner
        self._function, self._owner = None, made
        self._body(node.body)
        self._function, self._owner = function, owner

    # --------------------------------------------------------------------------------------------------------- imports

    def _targets(self, node: ast.Import | ast.ImportFrom) -> list[str]:
        if isinstance(node, ast.Import):
            return [one.name for one in node.names]
        return [str(node.module), *(f"{node.module}.{one.name}" for one in node.names)]

    def _is_absent(self, node: ast.Import | ast.ImportFrom) -> bool:
        return any(name in self._absent for name in self._targets(node))

    def _imports(self, node: ast.Import | ast.ImportFrom) -> None:
        for name in self._targets(node):
            self._import(name)
        for alias in node.names:
            if alias.asname:
                self._top(self.sources.resolved(self._module.name, alias.asname), opens=True)
        if self._function is not None:
            self._function.imported.update(alias.asname or alias.name.partition(".")[0] for alias in node.names)

    def _import_any(self, beginning: ast.expr) -> None:
        """Import all modules whose names have this beginning."""
        text = beginning.value if isinstance(beginning, ast.Constant) else None
        for name, module in self.sources.modules.items():
            if isinstance(text, str) and name.startswith(text):
                self._import(name)
                self._pass_on(module)

    def _import(self, name: str) -> None:
        parts = name.split(".")
        for number in range(1, len(parts) + 1):
            module = self.sources.modules.get(".".join(parts[:number]))
            if module is not None and not module.reached and module.name not in self._absent:
                module.reached = self._changed = True

    # ------------------------------------------------------------------------------------------------------ assignment

    def _assign_from(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            for one, of_it in zip(target.elts, value.elts, strict=True):
                self._assign(one, OTHER if isinstance(of_it, ast.Starred) else self._value(of_it))
        else:
            self._assign(target, self._value(value))

    def _assign(self, target: ast.expr, value: int) -> None:
        match target:
            case ast.Name():
                if self._in_class_body:
                    self._attribute(target.id, value)
                else:
                    self._set(target.id, value)
            case ast.Attribute():
                self._value(target.value)
                self._attribute(target.attr, value)
            case ast.Tuple() | ast.List():
                for one in target.elts:
                    self._assign(one, OTHER)
            case ast.Starred():
                self._assign(target.value, OTHER)
            case ast.Subscript():
                self._value(target.value)
                self._value(target.slice)

    def _set(self, name: str, value: int) -> None:
        if self._function is not None and self._function.set(name, value):
            self._changed = True

    def _attribute(self, name: str, value: int) -> None:
        place = place_of(self._module, name)
        before = self._attributes.get(place, NOTHING)
        if before | value != before:
            self._attributes[place] = before | value
            self._changed = True

    def _note(self, names: dict[Any, bool], key: Any, *, opens: bool) -> None:
        if key not in names or (opens and not names[key]):
            names[key] = opens or names.get(key, False)
            self._changed = True

    def _top(self, found: Function | Class | Module | None, *, opens: bool = False) -> None:
        """Note that a function or class at the top of a module is named."""
        if isinstance(found, Function | Class):
            self._note(self._tops, id(found), opens=opens)

    # ----------------------------------------------------------------------------------------------------- expressions

    def _condition(self, node: ast.expr) -> int:
        value = self._value(node)
        return OTHER if value == NOTHING and self._lenient else value

    def _value(self, node: ast.expr) -> int:
        """Read an expression: note what it names, return what it may be."""
        if fact := self._fact(node):
            return fact
        match node:
            case ast.Constant():
                return of_constant(node.value)
            case ast.Name():
                return self._variable(node.id)
            case ast.Attribute():
                self._base(node)
                return self._read_attribute(node)
            case ast.BoolOp():
                return self._joined(node)
            case ast.UnaryOp(op=ast.Not()):
                return negated(self._value(node.operand))
            case ast.IfExp():
                value, found = self._condition(node.test), NOTHING
                if may_hold(value):
                    found |= self._value(node.body)
                if may_fail(value):
                    found |= self._value(node.orelse)
                return found
            case ast.Compare():
                values = [self._value(one) for one in [node.left, *node.comparators]]
                if len(values) == 2 and isinstance(node.ops[0], ast.Is | ast.IsNot) and values[1] == NONE:
                    found = is_none(values[0])
                    return found if isinstance(node.ops[0], ast.Is) else negated(found)
                return BOOL
            case ast.NamedExpr():
                value = self._value(node.value)
                self._assign(node.target, value)
                return value
            case ast.Call():
                return self._call(node)
            case ast.Lambda():
                with self._hiding(one.arg for one in ast.walk(node.args) if isinstance(one, ast.arg)):
                    self._value(node.body)
                return OTHER
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
                self._comprehension(node)
                return OTHER
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self._value(child)
        return OTHER

    def _joined(self, node: ast.BoolOp) -> int:
        found, over = NOTHING, isinstance(node.op, ast.And)
        for one in node.values[:-1]:
            value = self._condition(one)
            ends, goes_on = (may_fail(value), may_hold(value)) if over else (may_hold(value), may_fail(value))
            if ends:
                found |= value & (NONE | FALSE | OTHER if over else TRUE | OTHER)
            if not goes_on:
                return found
        return found | self._value(node.values[-1])

    def _comprehension(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> None:
        names = [one.id for part in node.generators for one in ast.walk(part.target) if isinstance(one, ast.Name)]
        with self._hiding(names):
            for part in node.generators:
                self._value(part.iter)
                if not all(may_hold(self._condition(one)) for one in part.ifs):
                    return
            for one in (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,):
                self._value(one)

    @contextmanager
    def _hiding(self, names: Iterable[str]) -> Iterator[None]:
        self._hidden.append(set(names))
        try:
            yield
        finally:
            self._hidden.pop()

    def _variable(self, name: str, *, is_called: bool = False) -> int:
        if any(name in some for some in self._hidden):
            return OTHER
        function = self._binding(name)
        if function is not None:
            if name not in function.used:
                function.used.add(name)
                self._changed = True
            return function.variables[name]
        self._note(self._inner, name, opens=not is_called)
        found = self.sources.resolved(self._module.name, name)
        self._top(found, opens=not is_called)
        if isinstance(found, Module):
            self._pass_on(found)
        return OTHER

    def _pass_on(self, module: Module) -> None:
        if not module.is_value:
            module.is_value = self._changed = True

    def _base(self, node: ast.Attribute) -> None:
        """Read what an attribute is of, unless it is a module of this package."""
        if not (isinstance(node.value, ast.Name) and isinstance(self._resolved(node.value), Module)):
            self._value(node.value)

    def _binding(self, name: str) -> Function | None:
        """Return the function around this place of which a name is a variable; None: it is of the module."""
        function = self._function
        while function is not None:
            if name in function.imported:
                return None
            if name in function.variables:
                return function
            function = function.outer
        return None

    def _read_attribute(self, node: ast.Attribute, *, is_called: bool = False) -> int:
        found = self._resolved(node)
        if found is not None:
            self._top(found, opens=not is_called)
            return OTHER
        name = node.attr
        self._note(self._named, name, opens=not is_called)
        place = place_of(self._module, name)
        getters = [one for one in self.sources.functions.get(name, ()) if "property" in one.decorators]
        if getters and not any(one.owner is not None and one.owner.is_protocol for one in getters):
            return self._results(getters) | self._attributes.get(place, NOTHING)
        if getters or place not in self.sources.assigned:
            return OTHER
        return self._attributes.get(place, NOTHING)

    def _resolved(self, node: ast.expr) -> Function | Class | Module | None:
        """Return what a name, or an attribute of a module, stands for in this package; None: anything else."""
        name = node.value if isinstance(node, ast.Attribute) else node
        if isinstance(name, ast.Name) and self._binding(name.id) is not None:
            return None
        if isinstance(node, ast.Name):
            return self.sources.resolved(self._module.name, node.id)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = self.sources.resolved(self._module.name, node.value.id)
            return self.sources.resolved(module.name, node.attr) if isinstance(module, Module) else None
        return None

    def _results(self, functions: list[Function]) -> int:
        found = NOTHING
        for one in functions:
            found |= one.returned
        return found

    def _call(self, node: ast.Call) -> int:
        name = last_name(node.func)
        if isinstance(node.func, ast.Name):
            if name == "isinstance" and len(node.args) == 2:
                return self._is_instance(node)
            if name == "bool" and len(node.args) == 1:
                return negated(negated(self._value(node.args[0])))
            self._variable(name, is_called=True)
        elif isinstance(node.func, ast.Attribute):
            self._base(node.func)
            self._read_attribute(node.func, is_called=True)
        else:
            self._value(node.func)
        some = self._called(name, node.func)
        arguments = [self._argument(one, some, place) for place, one in enumerate(node.args)]
        keywords = {one.arg: self._argument(one.value, some, one.arg) for one in node.keywords}
        if name == "import_module" and isinstance(node.args[0], ast.JoinedStr):
            self._import_any(node.args[0].values[0])
        for one in node.args:
            if isinstance(one, ast.Constant) and isinstance(one.value, str):
                self._note(self._named, one.value, opens=True)  # getattr and its like
        spread = None in keywords or any(isinstance(one, ast.Starred) for one in node.args)
        for function in some:
            if spread:
                if not function.open:
                    function.open = self._changed = True
                continue
            given = dict(zip(function.parameters, arguments, strict=False))
            for parameter, value in [*given.items(), *keywords.items()]:
                if parameter is not None and parameter in function.variables:
                    self._changed |= function.set(parameter, value)
        functions = [one for one in some if one.name == name]
        exact = isinstance(self._resolved(node.func), Function)
        if not functions or not all(one.is_plain for one in functions) or (name in FOREIGN and not exact):
            return OTHER
        if any(one.owner is not None and one.owner.is_protocol for one in functions) and len(functions) == 1:
            return OTHER
        return self._results(functions)

    def _argument(self, node: ast.expr, functions: list[Function], place: int | str | None) -> int:
        """Return what an argument may be. A lambda's body runs only if the called function reads the parameter."""
        if isinstance(node, ast.Lambda) and functions and all(one.is_plain and one.owner is None for one in functions):
            # Another function of this name may have fewer parameters: it is not the one that is called.
            called = [one for one in functions if not isinstance(place, int) or place < len(one.parameters)]
            names = [one.parameters[place] if isinstance(place, int) else place for one in called]
            if called and not any(name in one.used for name, one in zip(names, called, strict=True)):
                return OTHER
        return self._value(node)

    def _called(self, name: str, node: ast.expr) -> list[Function]:
        """Return the functions that a call may run: the one that is named, a constructor, or methods of this name."""
        found = self._resolved(node)
        if name in ("cls", "type") and self._owner is not None:
            found = self._owner
        if isinstance(found, Function):
            return [found]
        if isinstance(found, Class):
            return self._constructors(found)
        some = self.sources.functions.get(name, ())
        if name == "__init__":  # of a base
            return [one for one in some if self._opened(one)]
        is_method = isinstance(node, ast.Attribute)
        return [one for one in some if not one.is_top and (one.owner is not None) == is_method]

    def _constructors(self, one: Class) -> list[Function]:
        own = [made for made in self.sources.functions.get("__init__", ()) if made.owner is one]
        bases = [base for name in one.bases if (base := self.sources.class_of(one.module, name)) is not None]
        return own or [made for base in bases for made in self._constructors(base)]

    def _opened(self, function: Function) -> bool:
        if self._owner is not None and function.owner is not None and function.owner.name in self._owner.bases:
            if not function.open:
                function.open = self._changed = True
            return True
        return False

    def _is_instance(self, node: ast.Call) -> int:
        """Return whether an object may be of a class: not of one of ours of which none is made."""
        self._value(node.args[0])
        given = node.args[1]
        of_union = ast.walk(given) if isinstance(given, ast.BinOp | ast.Tuple) else [given]
        found = [self._resolved(one) for one in of_union if isinstance(one, ast.Name | ast.Attribute)]
        known = [one for one in found if isinstance(one, Class)]
        if len(known) < len(found) or any(one.is_protocol for one in known):
            return BOOL
        return BOOL if any(one.reached for one in known) else FALSE


def is_special(name: str) -> bool:
    """Whether Python itself calls a method of this name, beside the constructor."""
    return name.startswith("__") and name.endswith("__")


def _breaks(body: list[ast.stmt]) -> bool:
    return any(isinstance(one, ast.Break) for statement in body for one in ast.walk(statement))


def _yields(node: FunctionNode) -> bool:
    return any(isinstance(one, ast.Yield | ast.YieldFrom) for one in ast.walk(node))
