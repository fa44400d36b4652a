"""What the machine can do at best: the figures that everything else is held against."""

from __future__ import annotations

import hashlib
import os
import platform
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from benchmarks.gpu_check.section import Section
from benchmarks.gpu_check.timing import graph_time_us, time_us

PACKAGES = "torch triton flashinfer-python apache-tvm-ffi transformers numpy msgspec simpy tokenizers".split()
COPY_BYTES = 4 << 30
MANY = 200  # small launches in a row


def run(section: Section) -> None:
    """Versions; copy bandwidth, matrix rates, and what a launch costs."""
    with section.trying("versions"):
        section.put("versions", versions())
        section.put("sources", sources_digest())
        section.put("cpu", {"model": cpu_model(), "cores": os.cpu_count()})
    if section.gpu:
        with section.trying("GPU"):
            properties = torch.cuda.get_device_properties(section.device)
            free, total = torch.cuda.mem_get_info(section.device)
            section.put(
                "gpu",
                {
                    "name": properties.name,
                    "capability": f"{properties.major}.{properties.minor}",
                    "sms": properties.multi_processor_count,
                    "memory_gib": round(total / 2**30, 1),
                    "free_gib": round(free / 2**30, 1),
                    "l2_mib": getattr(properties, "L2_cache_size", 0) >> 20,
                    "cuda": torch.version.cuda,
                },
            )
    with section.trying("copy bandwidth"):
        section.put("copy_gbs", round(copy_gbs(section.device, 1 << 24 if section.small else COPY_BYTES), 1))
    with section.trying("matrix rate"):
        size = 256 if section.small else 8192
        dtype = torch.bfloat16 if section.gpu else torch.float32
        a, b = (torch.randn(size, size, device=section.device, dtype=dtype) for _ in range(2))
        us = time_us(lambda: a @ b, section.device)
        section.put("matmul_tflops", round(2 * size**3 / us / 1e6, 1))
    if not section.gpu:
        section.skip("launches", "they are what a GPU has")
        return
    with section.trying("launches"):
        section.put("launch_us", launches_us(section.device))


def versions() -> dict[str, str]:
    """Of everything that could matter."""
    found = {"python": platform.python_version(), "kernel": platform.release()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "absent"
    return found


def sources_digest() -> str:
    """SHA-256 over the runtime's own files: which code this was, where there is no git."""
    import lockstep.runtime.executor as some

    folder = Path(some.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def cpu_model() -> str:
    """As Linux calls it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def copy_gbs(device: torch.device, size: int = COPY_BYTES) -> float:
    """Bytes read and written by a copy on the device, in GB/s: the best of several."""
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best_us = min(time_us(lambda: target.copy_(source), device, repeats=3) for _ in range(3))
    return 2 * size / best_us / 1e3


def launches_us(device: torch.device) -> dict[str, float]:
    """What a small kernel takes: launched one by one, and in a graph; and what a small upload takes."""
    small = torch.zeros(1024, device=device)

    def many() -> None:
        for _ in range(MANY):
            small.add_(1.0)

    found = {"in a graph": round(graph_time_us(many, device) / MANY, 2)}
    many()
    torch.cuda.synchronize(device)
    before = time.perf_counter()
    many()
    found["on the CPU, torch"] = round(1e6 * (time.perf_counter() - before) / MANY, 2)
    torch.cuda.synchronize(device)
    found["on the device, torch"] = round(time_us(many, device) / MANY, 2)
    pinned = torch.zeros(1024, pin_memory=True)
    found["pinned upload of 4 KiB and wait"] = round(time_us(lambda: small.copy_(pinned, non_blocking=True), device), 1)
    return found
