"""What holds where no device is a GPU, and which lines of the runtime that leaves out."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

from tests.support.gpu_lines.reached import Outside, Reached
from tests.support.gpu_lines.sources import Sources, dotted, last_name
from tests.support.gpu_lines.values import FALSE, NOTHING, TRUE

ROOT = Path(__file__).parents[3]
RUNTIME = ROOT / "packages/gpu-runtime/src"
PACKAGE = "lockstep.runtime"
OUTSIDE = ("packages/*/src", "tools/src")
BACKENDS = ("lockstep.runtime.attention.flashinfer_backend", "lockstep.runtime.attention.triton_backend")
"""Chosen by name from a table, `attention.UNAVAILABLE_BECAUSE`, which refuses both on any other device."""
ROOTS = tuple(f"{PACKAGE}.{name}" for name in ("llm", "demo_model.cli", "generate", "sources.widen", "worker"))
"""Modules that are started or imported from outside."""
FALSE_CALLS = ("torch.cuda.is_available", "is_pinned")
REFUSED = {"memory_saver": "memory_saver.check_memory_saver"}
"""Settings that are refused at start on any other device, and where."""
REFUSED_VALUES = {"nccl": "weights_group.check_backend"}


def without_gpu(node: ast.expr) -> int:
    """Return the value of an expression that depends on the kind of device; NOTHING for others.

    Triton's interpreter, which tests use on a CPU, is switched off.
    """
    match node:
        case ast.Compare(left=left, ops=[ast.Eq() | ast.NotEq() as op], comparators=[ast.Constant(value=str(value))]):
            equal, unequal = (TRUE, FALSE) if isinstance(op, ast.Eq) else (FALSE, TRUE)
            if value in ("cuda", "cpu") and isinstance(left, ast.Attribute) and left.attr == "type":
                return equal if value == "cpu" else unequal
            if value in REFUSED_VALUES or (value == "1" and "TRITON_INTERPRET" in ast.unparse(left)):
                return unequal
        case ast.Attribute(attr="is_cuda"):
            return FALSE
        case ast.Attribute(attr=name, ctx=ast.Load()) if name in REFUSED:
            return FALSE
        case ast.Attribute(attr="interpret") if dotted(node).startswith("triton.knobs"):
            return FALSE
        case ast.Call() if dotted(node.func) in FALSE_CALLS or last_name(node.func) in FALSE_CALLS:
            return FALSE
    return NOTHING


def anywhere(node: ast.expr) -> int:
    """Return NOTHING: any device, with or without the interpreter."""
    return NOTHING


def read(root: Path = RUNTIME, package: str = PACKAGE) -> dict[str, tuple[str, str]]:
    """Return the modules of a package below a folder of sources: path and text by name."""
    found = {}
    for path in sorted((root / package.replace(".", "/")).rglob("*.py")):
        name = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        found[name] = str(path), path.read_text(encoding="utf-8")
    return found


def used_outside() -> Outside:
    """Return what other packages import of the runtime, and the names of all attributes that they read."""
    imported: set[tuple[str, str]] = set()
    attributes: set[str] = set()
    for pattern in OUTSIDE:
        for folder in ROOT.glob(pattern):
            for path in folder.rglob("*.py") if folder != RUNTIME else ():
                for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                    if isinstance(node, ast.Attribute):
                        attributes.add(node.attr)
                    elif isinstance(node, ast.ImportFrom) and str(node.module).startswith(PACKAGE):
                        imported.update((str(node.module), alias.name) for alias in node.names)
                    elif isinstance(node, ast.Import):
                        names = [alias.name.rpartition(".") for alias in node.names if alias.name.startswith(PACKAGE)]
                        imported.update((parent, name) for parent, _, name in names)
    return Outside(frozenset(imported), frozenset(attributes))


@dataclass(frozen=True)
class GpuLines:
    """Lines of a file that only a GPU reaches.

    Args:
        lines: first lines of statements.
        kernels: those of Triton's kernels, which are not among `lines`.
    """

    lines: frozenset[int]
    kernels: frozenset[int]


def lines_of_a_gpu(
    modules: dict[str, tuple[str, str]] | None = None,
    roots: tuple[str, ...] = ROOTS,
    outside: Outside | None = None,
    absent: tuple[str, ...] = BACKENDS,
) -> dict[str, GpuLines]:
    """Return by file the lines that may run on some device, and not where there is no GPU.

    Args:
        modules: as `read` returns them; None: the runtime. roots, outside, absent: see `Reached`.
    """
    modules = read() if modules is None else modules
    names = used_outside() if outside is None else outside
    every = Sources(modules)
    anything = Reached(every, anywhere, (), roots, names).lines()
    without = Reached(Sources(modules), without_gpu, absent, roots, names).lines()
    kernels: dict[str, set[int]] = {path: set() for path in anything}
    for one in every.every_function():
        if one.is_kernel and one.module.path in kernels:
            kernels[one.module.path].update(range(one.node.body[0].lineno, (one.node.end_lineno or 0) + 1))
    found = {}
    for path, lines in anything.items():
        only = lines - without.get(path, set())
        found[path] = GpuLines(frozenset(only - kernels[path]), frozenset(only & kernels[path]))
    return found
