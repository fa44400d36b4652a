"""Compile the attention kernels for GPUs that this machine need not have; prints a JSON line for each.

    python -m tests.runtime.compile_attention 80 90 100

A process of its own because the interpreter, where it is on, replaces the compiler for a whole process.
"""

from __future__ import annotations

import json
import re
import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lockstep.host.engine_options import Numerics
from lockstep.runtime.attention import kernels
from lockstep.runtime.attention.triton_backend import PIECE, decode_tiling, extend_tiling

GROUP, KV_HEADS, PAGE = 4, 8, 16
TYPE = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
POINTERS = "query key value keys values out".split()
POINTER_TYPE = {"page_table rows indptr lengths": "*i32", "slots": "*i64", "parts sums": "*fp32"}
STRIDES = "query_token query_head key_token key_head value_token value_head".split()


def compile_kernel(
    name: str, capability: int, dtype: torch.dtype, head_dim: int, numerics: Numerics, fp8: bool = False
) -> dict[str, object]:
    """The kernel: shared memory in bytes, bytes of PTX and of machine code, layouts and instructions of products.

    Args:
        fp8: KV lies in it.
    """
    kernel = getattr(kernels, name)
    if name == "extend":
        tiling = extend_tiling(head_dim, dtype, GROUP, 4096, numerics)
    else:
        tiling = decode_tiling(head_dim, dtype, GROUP)
    constants = {
        "GROUP": GROUP,
        "KV_HEADS": KV_HEADS,
        "HEADS": GROUP * KV_HEADS,
        "D": head_dim,
        "PAGE": PAGE,
        "BLOCK": triton.next_power_of_2(KV_HEADS * head_dim),
        "BLOCK_M": tiling.BLOCK_M,
        "BLOCK_N": tiling.BLOCK_N,
        "BLOCK_D": triton.next_power_of_2(head_dim),
        "SPLIT": PIECE if numerics == "invariant" else 0,
        "PRECISION": "ieee",
        "AHEAD": 8,
        "FP8": fp8,
    }
    signature = {}
    for argument in kernel.arg_names:
        if argument.isupper():
            signature[argument] = "constexpr"
        elif argument in POINTERS:
            signature[argument] = "*fp8e4nv" if fp8 and argument in ("keys", "values") else TYPE[dtype]
        else:
            found = [kind for names, kind in POINTER_TYPE.items() if argument in names.split()]
            signature[argument] = found[0] if found else "fp32" if argument.endswith("scale") else "i32"
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, argument in enumerate(kernel.arg_names)
        if signature[argument].startswith("*") or argument in STRIDES
    }
    used = {argument: constants[argument] for argument in kernel.arg_names if argument in constants}
    compiled = triton.compile(
        ASTSource(kernel, signature, used, aligned),
        target=GPUTarget("cuda", capability, 32),
        options={
            "num_warps": tiling.num_warps,
            "num_stages": tiling.num_stages,
            "enable_fp_fusion": numerics == "fast",
        },
    )
    ptx, ttgir = compiled.asm["ptx"], compiled.asm["ttgir"]
    return {
        "kernel": name,
        "capability": capability,
        "dtype": str(dtype).removeprefix("torch."),
        "head_dim": head_dim,
        "numerics": numerics,
        "fp8": fp8,
        "shared_bytes": compiled.metadata.shared,
        "ptx_bytes": len(ptx),
        "cubin_bytes": len(compiled.asm["cubin"]),
        "layouts": sorted(set(re.findall(r"#ttg\.nvidia_mma<\{[^}]*\}>", ttgir))),
        "instructions": sorted({kind for kind in ("mma.sync", "wgmma", "tcgen05.mma", "cp.async") if kind in ptx}),
    }


def main(capabilities: list[int]) -> None:
    """Every kernel for each GPU; for Hopper also in fp32, and where additions must keep their order."""
    everything = ("write_kv", "extend", "decode", "decode_split", "merge")
    for capability in capabilities:
        cases = [(name, torch.bfloat16, 128, "fast") for name in everything]
        if capability == 90:
            cases += [(name, torch.bfloat16, 128, "invariant") for name in ("extend", "decode")]
            cases += [("decode", torch.float32, 80, "fast")]
        for name, dtype, head_dim, numerics in cases:
            print(json.dumps(compile_kernel(name, capability, dtype, head_dim, numerics)), flush=True)
        if capability == 90:
            for name in ("write_kv", "decode"):
                print(json.dumps(compile_kernel(name, capability, torch.bfloat16, 128, "fast", fp8=True)), flush=True)


if __name__ == "__main__":
    main([int(argument) for argument in sys.argv[1:]])
