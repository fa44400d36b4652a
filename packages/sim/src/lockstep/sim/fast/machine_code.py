"""`kernel.advance` as machine code: compiled by numba once, stored as LLVM text, and loaded without numba afterwards.

    advance = bound(arrays)
    why = advance(0.0)

Without numba, `bound` returns the same functions, interpreted: equal in results and slower than the core, for tests.

Compiling takes half a minute and loading a second, so the text is stored: in `__pycache__` beside the source or, if
that is not writable, in the user's cache folder. Of several processes one compiles, and the others wait for it. It is
text, not a pickle, which LLVM parses, verifies and compiles for this processor. It is trusted like the compiled Python
files in those folders: only if its owner is the user or root, and no other user may write to it. Its name follows from
the source, the compiler's version and the processor.
"""

from __future__ import annotations

import ctypes
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from hashlib import blake2b
from importlib.metadata import version
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

from lockstep.core.requests import rules
from lockstep.sim.fast import following, kernel, memory, ordering, routing, state, stretches
from lockstep.sim.fast.state import Arrays

SOURCE = Path(kernel.__file__)
SOURCES = tuple(
    Path(str(module.__file__)) for module in (rules, state, following, memory, ordering, routing, stretches, kernel)
)
"""The modules with compiled functions; each imports functions of earlier ones only."""
ENTRY = "lockstep_advance"

Int64s = NDArray[np.int64]
Advance = Callable[[ctypes.c_void_p, float], int]


@cache
def is_available() -> bool:
    """Return whether numba, which compiles the kernel, is installed."""
    return find_spec("numba") is not None


def bound(arrays: Arrays) -> Callable[[float], int]:
    """Return `kernel.advance` over these arrays: machine code, or interpreted if numba is not installed."""
    if not is_available():
        return interpreted(arrays)
    return partial(load(), addresses(arrays).ctypes.data_as(ctypes.c_void_p))  # the pointer keeps the table alive


def interpreted(arrays: Arrays) -> Callable[[float], int]:
    """Return `kernel.advance` over these arrays, interpreted by Python."""
    records = Arrays(*[array.view(np.recarray) if array.dtype.names else array for array in arrays])
    return lambda took_us: kernel.advance(records, took_us)


def addresses(arrays: Arrays) -> Int64s:
    """Return the address and the shape of each array, int64 [arrays, 5]. The caller keeps the arrays and this alive.

    Raises: ValueError if an array is not contiguous.
    """
    table = np.ones((len(arrays), 5), np.int64)
    for row, array in zip(table, arrays, strict=True):
        if not array.flags.c_contiguous:
            raise ValueError("machine code reads contiguous arrays only")
        row[0] = array.ctypes.data
        row[1 : 1 + array.ndim] = array.shape
    return table


@cache
def load() -> Advance:
    """Return the machine code; it is compiled if it is not stored. Its first argument is the address of `addresses`."""
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    module = llvm.parse_assembly(_text(_name(llvm)))
    module.verify()
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=3
    )
    engine = llvm.create_mcjit_compiler(module, machine)
    never = ctypes.cast(ctypes.CDLL(None).abort, ctypes.c_void_p).value
    for symbol in (*module.functions, *module.global_variables):
        if symbol.is_declaration and not symbol.name.startswith("llvm."):
            engine.add_global_mapping(symbol, never)  # functions by which numba raises errors; this code raises none
    engine.finalize_object()
    _ENGINES.append(engine)
    return ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_double)(engine.get_function_address(ENTRY))


def _text(name: str) -> str:
    """Return the LLVM text that is stored as `name`; made and stored by one process if there is none."""

    def stored() -> str | None:
        return next(filter(None, (_kept(folder / name) for folder in _folders())), None)

    text = stored()
    if text is None:
        with _alone():
            text = stored()  # another process may have made it while this one waited
            if text is None:
                text = _made()
                _keep(name, text)
    return text


@cache
def is_stored() -> bool:
    """Return whether the machine code was compiled before. Otherwise the first `load` takes half a minute."""
    import llvmlite.binding as llvm

    return any(_kept(folder / _name(llvm)) is not None for folder in _folders())


def _name(llvm: Any) -> str:
    """Return the name of the stored file."""
    return f"{SOURCE.stem}-{_digest(llvm)}.ll"


_ENGINES: list[Any] = []  # LLVM's engines own the machine code, so they are kept alive


def _digest(llvm: Any) -> str:
    """Return the digest of everything that the machine code depends on: sources, compiler, processor."""
    facts = (version("numba"), version("llvmlite"), llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten())
    hashed = blake2b(digest_size=12)
    sources = (path.read_bytes() for path in (*SOURCES, Path(__file__)))
    for fact in (*sources, *(fact.encode() for fact in facts)):
        hashed.update(len(fact).to_bytes(8, "little") + fact)
    return hashed.hexdigest()


# -------------------------------------------------------------------------------------------------------------- storage


def _folders() -> list[Path]:
    """Return the folders in which machine code may be stored, the preferred one first."""
    own = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return [SOURCE.parent / "__pycache__", Path(own).expanduser() / "lockstep"]


def _kept(path: Path) -> str | None:
    """Return the stored text if it is complete and no other user can have written it, else None."""
    try:
        with path.open(encoding="utf-8") as file:
            status = os.fstat(file.fileno())
            owned = not hasattr(os, "getuid") or status.st_uid in (0, os.getuid())
            if not owned or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                return None
            seal, _, text = file.read().partition("\n")
            return text if seal == _seal(text) else None
    except (OSError, UnicodeDecodeError):
        return None


@contextmanager
def _alone() -> Iterator[None]:
    """Context that other processes with the same folder wait for. Without locks of files it does nothing."""
    with ExitStack() as stack:
        for folder in _folders() if fcntl is not None else ():
            try:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                file = stack.enter_context((folder / f"{SOURCE.stem}.lock").open("w"))
                fcntl.flock(file, fcntl.LOCK_EX)
                break
            except OSError:
                continue
        yield


def _seal(text: str) -> str:
    """Return the first line of a stored file, a comment with the digest of the text. It shows damage of the file."""
    return f"; blake2b {blake2b(text.encode(), digest_size=16).hexdigest()}"


def _keep(name: str, text: str) -> None:
    """Store the text in the first writable folder, in place of older files there. Without such a folder do nothing."""
    for folder in _folders():
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=folder, delete=False) as file:
                file.write(f"{_seal(text)}\n{text}")
            for old in folder.glob(f"{SOURCE.stem}-*.ll"):
                old.unlink(missing_ok=True)
            Path(file.name).replace(folder / name)
            return
        except OSError:
            continue


# ---------------------------------------------------------------------------------------------------------- compilation


def _compiled_copy(path: Path, jit: Callable[[FunctionType], Any], shared: dict[str, Any]) -> ModuleType:
    """Return a copy of a module with its functions compiled; the module itself is unchanged.

    Args:
        shared: compiled functions by name, in place of those that the module imports.
    """
    spec = spec_from_file_location(f"lockstep.sim._{path.stem}_to_compile", path)
    assert spec is not None
    assert spec.loader is not None
    copy = module_from_spec(spec)
    spec.loader.exec_module(copy)
    for name, function in list(vars(copy).items()):
        if isinstance(function, np.ndarray) and not function.ndim:
            setattr(copy, name, int(function))  # an operand for columns, see rules.py
        elif isinstance(function, FunctionType):
            setattr(copy, name, jit(function) if function.__module__ == copy.__name__ else shared.get(name, function))
    return copy


def _made() -> str:
    """Compile the kernel and return its LLVM text, optimised for this processor."""
    import numba
    from numba import types
    from numba.core import cgutils
    from numba.core.dispatcher import Dispatcher
    from numba.extending import intrinsic

    # Without reference counts, which numba would change for each array at each call, and without wrappers for Python.
    jit = numba.njit(error_model="numpy", _nrt=False, no_cpython_wrapper=True, no_cfunc_wrapper=True)
    compiled: dict[str, Any] = {}
    for path in SOURCES:
        copy = _compiled_copy(path, jit, compiled)
        compiled |= {name: one for name, one in vars(copy).items() if isinstance(one, Dispatcher)}

    @intrinsic  # type: ignore[untyped-decorator]  # numba has no types
    def at(_context: Any, address: Any) -> Any:
        def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], cgutils.voidptr_t)

        return types.voidptr(address), generate

    carray = numba.carray
    run_t, engine_t, request_t, node_t = state.RUN, state.ENGINE, state.REQUEST, state.NODE
    flight_t, shape_t, deferred_t, block_t = state.FLIGHT, state.SHAPE, state.DEFERRED_ROW, state.BLOCK
    int64, int32, float64 = np.int64, np.int32, np.float64

    def entry(table: Any, took_us: float) -> int:
        t = carray(table, (35, 5))
        arrays = kernel_arrays(
            carray(at(t[0, 0]), (t[0, 1],), run_t),
            carray(at(t[1, 0]), (t[1, 1],), engine_t),
            carray(at(t[2, 0]), (t[2, 1],), request_t),
            carray(at(t[3, 0]), (t[3, 1],), int64),
            carray(at(t[4, 0]), (t[4, 1], t[4, 2]), int64),
            carray(at(t[5, 0]), (t[5, 1], t[5, 2]), int64),
            carray(at(t[6, 0]), (t[6, 1], t[6, 2]), flight_t),
            carray(at(t[7, 0]), (t[7, 1], t[7, 2], t[7, 3]), int64),
            carray(at(t[8, 0]), (t[8, 1], t[8, 2], t[8, 3], t[8, 4]), int64),
            carray(at(t[9, 0]), (t[9, 1],), int32),
            carray(at(t[10, 0]), (t[10, 1],), int64),
            carray(at(t[11, 0]), (t[11, 1], t[11, 2]), node_t),
            carray(at(t[12, 0]), (t[12, 1], t[12, 2]), int32),
            carray(at(t[13, 0]), (t[13, 1], t[13, 2]), int64),
            carray(at(t[14, 0]), (t[14, 1], t[14, 2]), int32),
            carray(at(t[15, 0]), (t[15, 1], t[15, 2]), deferred_t),
            carray(at(t[16, 0]), (t[16, 1], t[16, 2], t[16, 3]), int64),
            carray(at(t[17, 0]), (t[17, 1],), int32),
            carray(at(t[18, 0]), (t[18, 1],), int64),
            carray(at(t[19, 0]), (t[19, 1],), int32),
            carray(at(t[20, 0]), (t[20, 1],), int64),
            carray(at(t[21, 0]), (t[21, 1], t[21, 2]), int32),
            carray(at(t[22, 0]), (t[22, 1],), int32),
            carray(at(t[23, 0]), (t[23, 1], t[23, 2]), block_t),
            carray(at(t[24, 0]), (t[24, 1], t[24, 2]), int32),
            carray(at(t[25, 0]), (t[25, 1], t[25, 2]), int64),
            carray(at(t[26, 0]), (t[26, 1], t[26, 2], t[26, 3]), float64),
            carray(at(t[27, 0]), (t[27, 1],), shape_t),
            carray(at(t[28, 0]), (t[28, 1], t[28, 2], t[28, 3]), int64),
            carray(at(t[29, 0]), (t[29, 1], t[29, 2], t[29, 3]), int64),
            carray(at(t[30, 0]), (t[30, 1], t[30, 2], t[30, 3]), int64),
            carray(at(t[31, 0]), (t[31, 1], t[31, 2], t[31, 3]), int64),
            carray(at(t[32, 0]), (t[32, 1], t[32, 2], t[32, 3]), int64),
            carray(at(t[33, 0]), (t[33, 1], t[33, 2]), int64),
            carray(at(t[34, 0]), (t[34, 1], t[34, 2], t[34, 3]), int64),
        )
        return int(advance(arrays, took_us))

    kernel_arrays, advance = Arrays, compiled["advance"]
    signature = types.int64(types.CPointer(types.int64), types.float64)
    made = numba.cfunc(signature, error_model="numpy")(entry)
    text: str = made._library.get_llvm_str()
    return text.replace(made._wrapper_name, ENTRY)
