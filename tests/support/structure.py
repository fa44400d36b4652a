"""Measures of how the sources hang together: what touches the engine, import cycles, sizes, names, wording.

`measure(root)` reads a checkout and returns one `Figure` per measure; `tests/core/test_structure.py` holds them against
bounds, `benchmarks/structure.py` prints them. Everything is read by `ast` and `tokenize` from the files under
`packages/*/src`, `tools/src` and `tests`; nothing is imported, so any checkout of any age can be measured. Modules are
found by scanning, classes by their names and methods.

**Engine expressions** are what the measures of the engine follow: a parameter, variable or attribute that is annotated
with one of the engine types (alone, as a string, or in a union), a variable that is assigned from a call of such a
class or from another engine expression, and `self.x` where a method of the class assigned an engine expression to it.
The scope is the function with all functions within it.

**Personal words** make a person of a thing of the program: pronouns such as `who` and `nobody`, and the verbs of a
mind, `know`, `want`, `wish`, `hope`, `believe` (`PERSONAL_WORDS`). The verbs of speech, `say`, `tell`, `ask`, `hear`
(`SPEAKING_WORDS`), are counted apart. A docstring, comment or line counts once, however many it contains. Text within
backticks does not count. `REAL_PERSONS` lists the phrases in which the word is right, since a human being is meant or
`whose` is the relative pronoun of a thing. Packages and tools, documents, tests, and the comments of scenarios
(`tests/scenarios`) have figures of their own; the output that a scenario expects is not read.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TypeGuard

ENGINE_TYPES = ("Engine", "Scheduler", "SchedulerView", "SchedulerState")
PACKAGES = ("core", "host", "sim", "runtime", "api", "tools")  # below the namespace `lockstep`
STATE_ROOTS = ("self", "engine", "scheduler", "state", "view")  # variables whose attributes are the engine's state
LINES_MAX = 1_000  # of a file
PARAMETERS_MAX = 8  # of a function; `self` and `cls` do not count
KERNEL_DECORATORS = ("jit", "njit", "cuda_jit")
KERNEL_FILE = re.compile(r"kernels?(_|\.|$)|_kernels?\.py$")

PERSONAL_WORDS = re.compile(
    r"\b(who|whom|whose|whoever|whomever|nobody|somebody|someone|everybody|everyone|anybody|anyone|no one"
    r"|knows?|wants?|wish(es)?|hopes?|believes?)\b",
    re.IGNORECASE,
)
SPEAKING_WORDS = re.compile(r"\b(says?|tells?|told|asks?|hears?|answers? for)\b", re.IGNORECASE)
REAL_PERSONS = re.compile(
    r"\b(a|the|any) (user|operator|reader|person|newcomer)s? who\b|(?<=[a-z0-9`)\]]),? whose\b", re.IGNORECASE
)
"""Phrases that are taken out before `PERSONAL_WORDS` are searched: the word refers to a human being, or `whose` follows
a noun, as a relative pronoun of a thing."""


@dataclass(frozen=True)
class Place:
    """Where something was found."""

    path: str  # relative to the root of the checkout
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"


@dataclass(frozen=True)
class Figure:
    """One measure of a checkout."""

    name: str
    value: int
    meaning: str
    places: tuple[Place, ...] = ()
    of: int | None = None  # what the value is a part of


@dataclass(frozen=True)
class Source:
    """One Python file of a package."""

    path: str  # relative to the root of the checkout
    module: str  # dotted, such as lockstep.core.engine
    text: str
    tree: ast.Module = field(repr=False)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All nodes of its tree."""
        return list(ast.walk(self.tree))

    @property
    def package(self) -> str:
        """Its package below the namespace, such as core."""
        return self.module.split(".")[1]

    def place(self, node: ast.AST, text: str) -> Place:
        return Place(self.path, getattr(node, "lineno", 1), text)


def sources(root: Path) -> list[Source]:
    """Every Python file under packages/*/src and tools/src, in the order of their paths."""
    found = []
    for folder in sorted([*root.glob("packages/*/src"), *root.glob("tools/src")]):
        for file in sorted(folder.rglob("*.py")):
            parts = file.relative_to(folder).with_suffix("").parts
            module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            if module.startswith("lockstep."):
                text = file.read_text()
                found.append(Source(str(file.relative_to(root)), module, text, ast.parse(text)))
    return found


def sources_of_tests(root: Path) -> list[Source]:
    """Every Python file under tests, in the order of their paths."""
    found = []
    for file in sorted((root / "tests").rglob("*.py")):
        path, text = file.relative_to(root), file.read_text()
        found.append(Source(str(path), ".".join(path.with_suffix("").parts), text, ast.parse(text)))
    return found


def measure(root: Path, engine_types: Iterable[str] = ENGINE_TYPES) -> dict[str, Figure]:
    """Every figure of the checkout at `root`, by its name."""
    found = sources(root)
    core = [source for source in found if source.package == "core"]
    figures = [
        Figure("modules", len(found), "Python files of packages and tools"),
        *engine_figures(core, frozenset(engine_types)),
        *guard_figures(core, frozenset(engine_types)),
        *(cycle_figure(found, package) for package in PACKAGES),
        *size_figures(root),
        parameters_figure(found),
        *class_figures(found),
        *wording_figures(root, found),
    ]
    return {figure.name: figure for figure in figures}


# -------------------------------------------------------------------------------------- what touches the engine's state


@dataclass
class Uses:
    """How the modules of the core use engine expressions."""

    names: dict[str, Place] = field(default_factory=dict)  # of attributes, with the first use
    stores: list[Place] = field(default_factory=list)  # engine.x = ..., += ..., del engine.x
    item_stores: list[Place] = field(default_factory=list)  # engine.x[...] = ...
    inner_stores: list[Place] = field(default_factory=list)  # engine.x.y = ...


def engine_figures(core: list[Source], engine_types: frozenset[str]) -> Iterator[Figure]:
    """Names and stores of the engine outside the modules that define it."""
    uses, homes = Uses(), {source.module for source in engine_homes(core, engine_types)}
    for source in core:
        if source.module not in homes:
            _EngineUses(source, engine_types, uses).visit(source.tree)
    names = tuple(Place(place.path, place.line, name) for name, place in sorted(uses.names.items()))
    yield Figure("engine names", len(names), "attributes of the engine used outside its module", names)
    yield Figure("engine stores", len(uses.stores), "assignments to attributes of the engine", tuple(uses.stores))
    yield Figure("engine item stores", len(uses.item_stores), "the same through a subscript", tuple(uses.item_stores))
    yield Figure(
        "engine inner stores", len(uses.inner_stores), "the same to a part: engine.x.y = ...", tuple(uses.inner_stores)
    )


def engine_homes(core: list[Source], engine_types: frozenset[str]) -> list[Source]:
    """Return the modules that define a class with one of these names and a method `step(self, event)`.

    A class that is used only as a parameter type is no engine, and uses of an engine in its module count.
    """
    return [source for source in core if any(_is_engine(node, engine_types) for node in source.tree.body)]


def _is_engine(node: ast.stmt, engine_types: frozenset[str]) -> bool:
    if not isinstance(node, ast.ClassDef) or node.name not in engine_types or _is_protocol(node):
        return False
    methods = [one for one in node.body if isinstance(one, ast.FunctionDef)]
    return any(
        [one.arg for one in method.args.args] == ["self", "event"] for method in methods if method.name == "step"
    )


def _is_protocol(node: ast.ClassDef) -> bool:
    return any("Protocol" in ast.unparse(base) for base in node.bases)


class _EngineUses(ast.NodeVisitor):
    """Collects the uses of engine expressions in one module."""

    def __init__(self, source: Source, engine_types: frozenset[str], uses: Uses) -> None:
        self.source = source
        self.engine_types = engine_types
        self.uses = uses
        self.variables: list[set[str]] = [set()]  # by scope, the names that hold an engine
        self.members: list[set[str]] = []  # by class, the attributes of `self` that hold one

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        members = {
            one.target.id
            for one in node.body
            if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name) and self._is_type(one.annotation)
        }
        self.members.append(members)
        for method in node.body:
            if isinstance(method, ast.FunctionDef):  # attributes before uses, in whatever order methods stand
                self._enter(method)
                for one in ast.walk(method):
                    self._bind(one)
                self.variables.pop()
        self.generic_visit(node)
        self.members.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._enter(node)
        self.generic_visit(node)
        self.variables.pop()

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self.visit_FunctionDef(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        self._bind(node)
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._bind(node)
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if self._is_engine(node.value):
            place = self.source.place(node, ast.unparse(node))
            self.uses.names.setdefault(node.attr, place)
            if not isinstance(node.ctx, ast.Load):
                self.uses.stores.append(place)
        elif not isinstance(node.ctx, ast.Load) and self._is_part(node.value):
            self.uses.inner_stores.append(self.source.place(node, ast.unparse(node)))
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        if not isinstance(node.ctx, ast.Load) and self._is_part(node.value):
            self.uses.item_stores.append(self.source.place(node, ast.unparse(node)))
        self.generic_visit(node)

    def _enter(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        arguments = node.args
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        typed = {one.arg for one in every if self._is_type(one.annotation)}
        self.variables.append((self.variables[-1] - {one.arg for one in every}) | typed)

    def _bind(self, node: ast.AST) -> None:
        """Remember what an assignment makes an engine."""
        if isinstance(node, ast.AnnAssign):
            self._keep(node.target, self._is_type(node.annotation))
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    for one, value in zip(target.elts, node.value.elts, strict=False):
                        self._keep(one, self._is_engine(value))
                else:
                    self._keep(target, self._is_engine(node.value))

    def _keep(self, target: ast.expr, holds: bool) -> None:
        if holds and isinstance(target, ast.Name):
            self.variables[-1].add(target.id)
        elif holds and self.members and _is_of_self(target):
            self.members[-1].add(target.attr)

    def _is_engine(self, node: ast.expr) -> bool:
        if isinstance(node, ast.Name):
            return node.id in self.variables[-1]
        if isinstance(node, ast.Call):
            return isinstance(node.func, ast.Name) and node.func.id in self.engine_types
        return bool(self.members) and _is_of_self(node) and node.attr in self.members[-1]

    def _is_part(self, node: ast.expr) -> bool:
        """Whether it is engine.x, engine.x.y, engine.x[...] and so on."""
        while isinstance(node, ast.Attribute | ast.Subscript):
            node = node.value
            if self._is_engine(node):
                return True
        return False

    def _is_type(self, annotation: ast.expr | None) -> bool:
        """Whether an annotation is an engine type, or a union with one."""
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            annotation = ast.parse(annotation.value, mode="eval").body
        if isinstance(annotation, ast.BinOp):
            return self._is_type(annotation.left) or self._is_type(annotation.right)
        name = annotation.attr if isinstance(annotation, ast.Attribute) else getattr(annotation, "id", None)
        return name in self.engine_types


def _is_of_self(node: ast.expr) -> TypeGuard[ast.Attribute]:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"


# ----------------------------------------------------------------------------------------------------- feature guards


def guard_figures(core: list[Source], engine_types: frozenset[str]) -> Iterator[Figure]:
    """Comparisons of state with None: by the engine, by the files beside it, by memory; and all of the core."""
    homes = engine_homes(core, engine_types)
    folders = {str(Path(home.path).parent) for home in homes}
    beside = [one for one in core if str(Path(one.path).parent) in folders and one not in homes]
    if any(one.module == "lockstep.core" for one in beside):
        beside = []  # the core is one folder: the files beside the engine are all of it
    memory = [one for one in core if any(isinstance(x, ast.ClassDef) and x.name == "Memory" for x in one.tree.body)]
    for name, files, meaning in (
        ("guards in engine", homes, "state compared with None where the engine is defined"),
        ("guards beside engine", beside, "state compared with None in the other files of the engine's folder"),
        ("guards in memory", memory, "state compared with None where class Memory is defined"),
    ):
        places = tuple(place for source in files for place, of_state in none_comparisons(source) if of_state)
        yield Figure(name, len(places), meaning, places)
    every = tuple(place for source in core for place, _ in none_comparisons(source))
    yield Figure("comparisons with None", len(every), "anything compared with None, in all of lockstep.core", every)


def none_comparisons(source: Source) -> Iterator[tuple[Place, bool]]:
    """Every `x is None` and `x is not None`, and whether x is state: an attribute path that begins at `STATE_ROOTS`."""
    for node in source.nodes:
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Is | ast.IsNot):
            value = node.comparators[0]
            if isinstance(value, ast.Constant) and value.value is None:
                root = node.left
                while isinstance(root, ast.Attribute):
                    root = root.value
                of_state = root is not node.left and isinstance(root, ast.Name) and root.id in STATE_ROOTS
                yield source.place(node, ast.unparse(node)), of_state


# ------------------------------------------------------------------------------------------------------ import cycles


def cycle_figure(found: list[Source], package: str) -> Figure:
    """The largest set of modules of a package that import one another, directly or by way of others.

    Imports for type checking and imports within functions count.
    """
    mine = {source.module: source for source in found if source.package == package}
    edges = {module: {one for one in imports(source, mine) if one != module} for module, source in mine.items()}
    largest = max((one for one in strong_components(edges)), key=len, default=[])
    cycle = sorted(largest) if len(largest) > 1 else []
    places = tuple(
        Place(mine[module].path, 1, "imports " + ", ".join(sorted(edges[module] & set(cycle)))) for module in cycle
    )
    return Figure(f"cycle in {package}", len(cycle), "modules in the largest import cycle", places, len(mine))


def imports(source: Source, modules: Iterable[str]) -> set[str]:
    """Those of these modules that a source imports, anywhere in it."""
    modules = set(modules)
    found = set()
    for node in source.nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = _imported_from(source, node)
            for alias in node.names:
                found.add(f"{base}.{alias.name}" if f"{base}.{alias.name}" in modules else base)
    return found & modules


def _imported_from(source: Source, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parts = source.module.split(".")
    if not source.path.endswith("__init__.py"):
        parts = parts[:-1]
    parts = parts[: len(parts) - node.level + 1]
    return ".".join([*parts, *([node.module] if node.module else [])])


def strong_components(edges: dict[str, set[str]]) -> list[list[str]]:
    """Strongly connected components of a graph (Tarjan, with a stack of its own instead of recursion)."""
    numbers: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    components: list[list[str]] = []
    for start in sorted(edges):
        if start in numbers:
            continue
        work = [(start, iter(sorted(edges[start])))]
        numbers[start] = lowest[start] = len(numbers)
        stack.append(start)
        while work:
            node, others = work[-1]
            for other in others:
                if other not in numbers:
                    numbers[other] = lowest[other] = len(numbers)
                    stack.append(other)
                    work.append((other, iter(sorted(edges[other]))))
                    break
                if other in stack:
                    lowest[node] = min(lowest[node], numbers[other])
            else:
                work.pop()
                if work:
                    above = work[-1][0]
                    lowest[above] = min(lowest[above], lowest[node])
                if lowest[node] == numbers[node]:
                    at = stack.index(node)
                    components.append(stack[at:])
                    del stack[at:]
    return components


# ---------------------------------------------------------------------------------------------------- sizes and names


def size_figures(root: Path) -> Iterator[Figure]:
    """Files that are too long."""
    for name, folders in (("long files", ("packages", "tools")), ("long test files", ("tests",))):
        places = []
        for file in sorted(file for folder in folders for file in (root / folder).rglob("*.py")):
            lines = file.read_text().count("\n")
            if lines > LINES_MAX:
                places.append(Place(str(file.relative_to(root)), lines, f"{lines:,} lines"))
        where = "packages and tools" if name == "long files" else "tests"
        yield Figure(name, len(places), f"files of {where} over {LINES_MAX:,} lines", tuple(places))


def parameters_figure(found: list[Source]) -> Figure:
    """Functions with too many parameters, kernels left out; commands of a command line count."""
    places = []
    for source in found:
        if KERNEL_FILE.search(Path(source.path).name):
            continue
        for node in source.nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not _is_kernel(node):
                arguments = node.args
                every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
                count = sum(one.arg not in ("self", "cls") for one in every)
                if count > PARAMETERS_MAX:
                    places.append(source.place(node, f"{node.name} has {count} parameters"))
    return Figure(
        "long signatures", len(places), f"functions over {PARAMETERS_MAX} parameters, kernels left out", tuple(places)
    )


def _is_kernel(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    called = [one.func if isinstance(one, ast.Call) else one for one in node.decorator_list]
    return any(ast.unparse(one).split(".")[-1] in KERNEL_DECORATORS for one in called)


def class_figures(found: list[Source]) -> Iterator[Figure]:
    """Classes that share their name with a class of another module of the packages and tools."""
    homes: dict[str, list[Place]] = defaultdict(list)
    for source in found:
        for node in source.nodes:
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(source.place(node, node.name))
    shared = {name: places for name, places in homes.items() if len({place.path for place in places}) > 1}
    places = tuple(place for name in sorted(shared) for place in shared[name])
    surplus = sum(len({place.path for place in places}) - 1 for places in shared.values())
    yield Figure("shared class names", len(shared), "class names defined in more than one module", places, len(homes))
    yield Figure("surplus classes", surplus, "modules that define a class name beyond the first that does", places)


# ------------------------------------------------------------------------------------------------------------ wording


def wording_figures(root: Path, found: list[Source]) -> Iterator[Figure]:
    """Docstrings, comments and lines of documents and scenarios with words for persons, or with verbs of speech."""
    tests = sources_of_tests(root)
    documents = [*sorted(root.glob("docs/**/*.md")), root / "README.md", root / "ARCHITECTURE.md"]
    documents.append(root / "tests" / "README.md")
    prose: tuple[tuple[str, str, list[Place]], ...] = (
        ("docstrings", "docstrings", [place for source in found for place in docstrings(source)]),
        ("comments", "comments", [place for source in found for place in comments(source)]),
        ("doc lines", "lines of docs/, README and ARCHITECTURE", _lines(root, documents, prose_lines)),
        ("test docstrings", "docstrings of tests", [place for source in tests for place in docstrings(source)]),
        ("test comments", "comments of tests", [place for source in tests for place in comments(source)]),
        (
            "scenario lines",
            "lines of comments in scenarios",
            _lines(root, sorted((root / "tests" / "scenarios").rglob("*.txt")), scenario_lines),
        ),
    )
    for kind, what, words in (
        ("personal", "a word for persons", PERSONAL_WORDS),
        ("speaking", "a verb of speech", SPEAKING_WORDS),
    ):
        for name, meaning, texts in prose:
            places = tuple(place for place in texts if has_word(place.text, words))
            yield Figure(f"{kind} {name}", len(places), f"{meaning} with {what}", places, len(texts))


def _lines(root: Path, files: Iterable[Path], prose: Callable[[str], Iterator[tuple[int, str]]]) -> list[Place]:
    return [
        Place(str(file.relative_to(root)), number, line.strip())
        for file in files
        if file.exists()
        for number, line in prose(file.read_text())
    ]


def scenario_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield the lines of a scenario that are comments, with their numbers."""
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("#"):
            yield number, line.lstrip("# ")


def prose_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield the lines of a page in Markdown, with their numbers, without empty lines and fenced code."""
    fenced = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif line.strip() and not fenced:
            yield number, line


def has_word(text: str, words: re.Pattern[str]) -> bool:
    """Whether a text has one of the words, code and phrases for human beings left out."""
    text = REAL_PERSONS.sub("", re.sub(r"`[^`]*`", "", text))
    return words.search(text) is not None


def docstrings(source: Source) -> Iterator[Place]:
    """Docstrings of the module, its classes and functions; and strings that stand alone below an assignment."""
    for node in source.nodes:
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        for before, one in zip([None, *body], body, strict=False):
            if isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant) and isinstance(one.value.value, str):
                opens = before is None and isinstance(
                    node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
                )
                if opens or isinstance(before, ast.Assign | ast.AnnAssign):
                    yield source.place(one, " ".join(one.value.value.split()))


def comments(source: Source) -> Iterator[Place]:
    """Comments; consecutive lines of comment alone are one."""
    block: list[Place] = []
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type != tokenize.COMMENT:
            continue
        text, alone = token.string.lstrip("#: ").rstrip(), token.line.lstrip().startswith("#")
        if block and alone and token.start[0] == block[-1].line + 1:
            block.append(Place(source.path, token.start[0], text))
            continue
        if block:
            yield Place(source.path, block[0].line, " ".join(one.text for one in block))
        block = [Place(source.path, token.start[0], text)]
    if block:
        yield Place(source.path, block[0].line, " ".join(one.text for one in block))


# ------------------------------------------------------------------------------------------------------------ by file


def by_file(figure: Figure) -> list[tuple[str, int]]:
    """How many places of a figure each file has, most first."""
    counts = Counter(place.path for place in figure.places)
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))
