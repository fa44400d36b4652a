"""A Triton driver for a GPU that this machine need not have: a launch compiles its kernel, which is not run.

Real launchers can so be called with tensors of the device `meta`, which have shapes and no memory: each kernel is
compiled with the constants, the types and the alignments of that launch. Only one process should do so: kernels that
were imported for the interpreter (TRITON_INTERPRET=1) are not compiled.
"""

# mypy: disable-error-code="import-untyped"

from __future__ import annotations

import io
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime.driver import driver as active

from lockstep.runtime.attention.residency import Machine

MACHINES = {
    80: Machine(sms=108, registers=65_536, shared_bytes=164 << 10, threads=2048, programs=32, warpgroups=False),
    89: Machine(sms=142, registers=65_536, shared_bytes=100 << 10, threads=1536, programs=24, warpgroups=False),
    90: Machine(sms=132, registers=65_536, shared_bytes=228 << 10, threads=2048, programs=32),
    100: Machine(sms=148, registers=65_536, shared_bytes=228 << 10, threads=2048, programs=32),
    120: Machine(sms=170, registers=65_536, shared_bytes=100 << 10, threads=1536, programs=24, warpgroups=False),
}
"""By compute capability: A100, L40S, H100 SXM, B200, RTX 5090. Source: CUDA C++ Programming Guide, table of technical
specifications per compute capability; multiprocessors from the products' data sheets."""

RESERVED_BYTES = 1 << 10  # of shared memory, by the system in each program
PTXAS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")


@dataclass(frozen=True, slots=True)
class Compiled:
    """Resources of one kernel, as compiled for one launch.

    `spilled_bytes` are those of all stores and loads of registers that did not fit; `programs` fit a multiprocessor.
    """

    kernel: str
    capability: int
    registers: int
    stack_bytes: int
    spilled_bytes: int
    shared_bytes: int
    warps: int
    programs: int
    source: Any  # the same object for launches of one compiled kernel
    instructions: tuple[str, ...]  # of products and asynchronous copies, by name
    layouts: tuple[str, ...]  # of products, as Triton writes them

    @property
    def fits(self) -> bool:
        """Whether a program finds the shared memory that it needs."""
        return self.shared_bytes <= MACHINES[self.capability].shared_bytes - RESERVED_BYTES


class Target(DriverBase):
    """The driver. `launches` has the kernel and the grid of each launch, in order."""

    def __init__(self, capability: int) -> None:
        self.capability, self.machine = capability, MACHINES[capability]
        self.launches: list[tuple[Compiled, tuple[int, int, int]]] = []
        self.printed = io.StringIO()
        self.utils = self  # Triton calls different methods of both

    @classmethod
    def is_active(cls) -> bool:
        """Return that no other driver should be looked for."""
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        """Return a name that nothing reads."""
        return ty

    def get_current_target(self) -> GPUTarget:
        """Return the GPU for which kernels are compiled."""
        return GPUTarget("cuda", self.capability, 32)

    def get_active_torch_device(self) -> torch.device:
        """Return the device of the launches' tensors."""
        return torch.device("meta")

    def get_benchmarker(self) -> Any:
        """Raise: nothing can be timed."""
        raise RuntimeError("kernels are compiled here, not run")

    def get_current_device(self) -> int:
        """Return a number of its own for each capability: Triton keeps compiled kernels by it."""
        return self.capability

    def get_current_stream(self, device: int) -> int:
        """Return the default stream."""
        return 0

    def get_device_properties(self, device: int) -> dict[str, int]:
        """Return limits that no kernel exceeds; `Compiled.fits` compares with those of the GPU."""
        return {"max_shared_mem": 1 << 30}

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[Any, ...]:
        """Return the handles of a kernel, here what the assembler reported of it, and its registers."""
        found = PTXAS.findall(self.printed.getvalue())
        self.printed.seek(0)
        self.printed.truncate()
        stack, stores, loads = (int(number) for number in found[-1]) if found else (0, 0, 0)
        registers, stack_found = resources_of(binary)
        return name, (registers, max(stack, stack_found), stores + loads), registers, (stores + loads) // 4, 1024

    def launcher_cls(self, src: Any, metadata: Any) -> Any:
        """Return what takes the place of a launch."""

        def launch(x: int, y: int, z: int, stream: int, function: Any, packed: Any, *rest: Any) -> None:
            self.launches.append((self.compiled(src, metadata, function), (x, y, z)))

        return launch

    def compiled(self, src: Any, metadata: Any, function: tuple[int, int, int]) -> Compiled:
        """Return the resources of a kernel."""
        registers, stack, spilled = function
        kernel = src.fn.device_caches[self.capability][0]
        asm = next((one.asm for one in kernel.values() if one.src is src), {})
        ptx, layouts = asm.get("ptx", ""), asm.get("ttgir", "")
        return Compiled(
            kernel=src.fn.__name__,
            capability=self.capability,
            registers=registers,
            stack_bytes=stack,
            spilled_bytes=spilled,
            shared_bytes=metadata.shared,
            warps=metadata.num_warps,
            programs=self.machine.programs_at_once(registers, metadata.shared, metadata.num_warps),
            source=src,
            instructions=tuple(kind for kind in ("mma.sync", "wgmma", "tcgen05.mma", "cp.async") if kind in ptx),
            layouts=tuple(sorted(set(re.findall(r"#ttg\.nvidia_mma<\{[^}]*\}>", layouts)))),
        )


def resources_of(binary: bytes) -> tuple[int, int]:
    """Return the registers of a thread and its bytes of stack, read from machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin", delete=False) as file:
        file.write(binary)
    try:
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    finally:
        Path(file.name).unlink()
    (usage,) = re.findall(r"REG:(\d+) STACK:(\d+)", found)
    return int(usage[0]), int(usage[1])


@cache
def target(capability: int) -> Target:
    """Return the driver of a capability: one in a process, because compiled kernels keep it."""
    return Target(capability)


@contextmanager
def compiling(capability: int) -> Iterator[Target]:
    """Let all launches inside compile for this capability, from empty caches."""
    here = target(capability)
    here.launches.clear()
    before = active._active
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(here.printed), triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(Path(folder))
        triton.knobs.nvidia.dump_ptxas_log = True
        active.set_active(here)
        try:
            yield here
        finally:
            active._active = before
            triton.knobs.nvidia.dump_ptxas_log = False
