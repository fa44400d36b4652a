"""How many programs of a compiled kernel a GPU runs at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

WARP = 32
REGISTERS_STEP = 256  # a warp gets registers in units of this many
SHARED_RESERVED_BYTES = 1 << 10  # per program, from compute capability 8.0 on


@dataclass(frozen=True, slots=True)
class Machine:
    """Limits of a GPU; all but `sms` are of one streaming multiprocessor.

    Source: CUDA C++ Programming Guide, technical specifications per compute capability.
    """

    sms: int
    registers: int  # 32 bits each
    shared_bytes: int
    threads: int
    programs: int
    warpgroups: bool = True  # multiplies by groups of warps: 9.0 and 10.0, neither 8.x nor 12.x

    def programs_at_once(self, registers: int, shared_bytes: int, warps: int) -> int:
        """Return the programs that fit a multiprocessor; at least 1.

        Args:
            registers: of one thread. shared_bytes, warps: of one program.
        """
        of_warp = -(-registers * WARP // REGISTERS_STEP) * REGISTERS_STEP
        by_registers = self.registers // max(of_warp * warps, 1)
        by_shared = self.shared_bytes // (shared_bytes + SHARED_RESERVED_BYTES)
        return max(1, min(by_registers, by_shared, self.threads // (WARP * warps), self.programs))


def machine_of(device: torch.device) -> Machine:
    """Return the limits of a CUDA device."""
    found = torch.cuda.get_device_properties(device)
    return Machine(
        sms=found.multi_processor_count,
        registers=found.regs_per_multiprocessor,
        shared_bytes=found.shared_memory_per_multiprocessor,
        threads=found.max_threads_per_multi_processor,
        warpgroups=found.major in (9, 10),
        programs=32 if found.major != 12 and (found.major, found.minor) not in ((8, 6), (8, 9)) else 24,
    )


def programs_of(kernel: Any, machine: Machine) -> int:
    """Return the programs of a kernel that fit a multiprocessor at once.

    Args:
        kernel: a kernel compiled by Triton, as a launch or `warmup` returns it; it is loaded to the device.
    """
    kernel._init_handles()
    return machine.programs_at_once(kernel.n_regs, kernel.metadata.shared, kernel.metadata.num_warps)
