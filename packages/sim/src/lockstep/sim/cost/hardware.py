"""GPUs: data-sheet peaks, medians measured by others, and what a kernel can be expected to achieve.

A rate is taken from measurements where the catalogue has one, otherwise from the data sheet times a fraction stated
here. Either way it travels as a `Constant`, so that a result can say where each of its numbers came from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.sim.cost.errors import CapacityError, CatalogueError


@dataclass(frozen=True, slots=True)
class Constant:
    """A number and whence it came. The unit is in the name it is stored under."""

    value: float
    source: str


@dataclass(frozen=True, slots=True)
class AllReduce:
    """Two straight lines, whichever is lower: direct reads between peers, and NCCL's ring.

    us = latency_us + 2 (n - 1) / n * bytes / rate, for n GPUs.
    """

    direct_latency_us: float
    direct_gbs: float
    ring_latency_us: float
    ring_gbs: float
    source: str


@dataclass(frozen=True, slots=True)
class GpuSpec:
    """One GPU of the catalogue. Dense rates (no 2:4 sparsity); tera is 1e12, giga is 1e9."""

    name: str
    vendor: str
    arch: str
    datasheet: Mapping[str, Constant]  # bf16_tflops, fp8_tflops, memory_bytes, memory_gbs, scale_up_gbs, pcie_gbs, ...
    measured: Mapping[str, Constant]  # medians over operator tables, named as in FRACTIONS and LATENCIES
    all_reduce: Mapping[int, AllReduce]  # by number of GPUs
    usd_per_gpu_hour: Mapping[str, Constant]  # owned_hyperscaler, rental_3yr, on_demand_low, on_demand_high, ...
    notes: tuple[str, ...] = ()

    @property
    def memory_bytes(self) -> int:
        return int(self.datasheet["memory_bytes"].value)

    @property
    def memory_gbs(self) -> float:
        return self.datasheet["memory_gbs"].value

    @property
    def has_fp8(self) -> bool:
        return "fp8_tflops" in self.datasheet


# What a kernel achieves of the data sheet, for GPUs nobody measured: (data-sheet field, fraction, why this fraction).
# The fractions are rounded from the measured GPUs of the catalogue, A100, H100, H200, B200 and L40S in that order.
FRACTIONS: dict[str, tuple[str, float, str]] = {
    "bf16_gemm_tflops": ("bf16_tflops", 0.70, "measured: 0.78, 0.74, 0.70, 0.65, 0.52"),
    "fp8_gemm_tflops": ("fp8_tflops", 0.58, "measured: none, 0.61, 0.60, 0.59, 0.42"),
    "bf16_moe_tflops": ("bf16_tflops", 0.25, "measured: A100 0.30, H100 0.21, L40S 0.27"),
    "fp8_moe_tflops": ("fp8_tflops", 0.27, "measured: H100 0.27"),
    "weight_read_gbs": ("memory_gbs", 0.80, "measured: 0.76, 0.85, 0.83, 0.77, 0.81"),
    "attention_prefill_tflops": ("bf16_tflops", 0.60, "measured: A100 0.64, H100 0.64, H200 0.63, L40S 0.52"),
    "attention_decode_read_gbs": ("memory_gbs", 0.85, "measured: A100 0.54, H100 0.90, H200 0.88, L40S 0.84"),
    "delta_rule_tflops": ("bf16_tflops", 0.17, "H100 chunk_gated_delta_rule, 32,768 tokens in 1.06 ms: 0.17 to 0.2"),
}

LATENCIES: dict[str, tuple[float, str]] = {
    "bf16_gemm_latency_us": (3.2, "rounded from A100 4.5, H100 3.2, H200 3.2, L40S 3.1 us"),
    "fp8_gemm_latency_us": (4.9, "rounded from H100 4.9, H200 4.9, L40S 4.0 us"),
    "attention_prefill_latency_us": (10.0, "rounded from A100 15, H100 11, H200 11, L40S 6 us"),
    "attention_prefill_extra_keys": (250.0, "keys, not us; between A100 163, H100 400, H200 365 and L40S 88"),
    "attention_decode_latency_us": (9.5, "rounded from H100 and H200 9.5 us"),
    "small_kernel_us": (1.7, "rounded from H100 1.7, H200 1.6, L40S 1.7 us"),
}

# All-reduce where the catalogue has no table: fractions of the link, from the 8-GPU H100 and H200 fits.
DIRECT_LINK_FRACTION, DIRECT_LATENCY_US = 0.21, 4.2
RING_LINK_FRACTION, RING_LATENCY_US = 0.70, 13.8
PCIE_GPUS_MAX = 8  # GPUs of one node, which is as far as tensor parallelism over PCIe is modelled


def achieved(gpu: GpuSpec, name: str) -> Constant:
    """Return a rate or latency: the measured median, else the data sheet times its fraction, else the usual value."""
    if name in gpu.measured:
        return gpu.measured[name]
    if name in LATENCIES:
        value, why = LATENCIES[name]
        return Constant(value, f"not measured on {gpu.name}: {why}")
    field, fraction, why = FRACTIONS[name]
    if field not in gpu.datasheet:
        raise CatalogueError(f"GPU `{gpu.name}` has no `{field}`, needed for `{name}`")
    peak = gpu.datasheet[field]
    return Constant(peak.value * fraction, f"{fraction:g} x data sheet {peak.value:g} ({why}); {peak.source}")


def all_reduce_of(gpu: GpuSpec, gpus: int) -> AllReduce:
    """Return the all-reduce lines for `gpus` GPUs of one scale-up domain. Raises CapacityError beyond the domain."""
    if gpus > scale_up_gpus(gpu):
        raise CapacityError(
            f"tp {gpus} needs {gpus} {gpu.name} in one scale-up domain, which holds {scale_up_gpus(gpu)}\n"
            "hint: lower --tp, or choose a GPU with a larger domain; tensor parallelism across nodes is not modelled"
        )
    for measured_gpus in sorted(gpu.all_reduce):
        if measured_gpus >= gpus:
            return gpu.all_reduce[measured_gpus]
    link = gpu.datasheet.get("scale_up_gbs") or gpu.datasheet["pcie_gbs"]
    return AllReduce(
        DIRECT_LATENCY_US,
        DIRECT_LINK_FRACTION * link.value,
        RING_LATENCY_US,
        RING_LINK_FRACTION * link.value,
        f"link {link.value:g} GB/s x {DIRECT_LINK_FRACTION:g} direct, {RING_LINK_FRACTION:g} ring "
        f"(fits of 8 H100 and H200); {link.source}",
    )


def scale_up_gpus(gpu: GpuSpec) -> int:
    """Return how many GPUs tensor parallelism may span: the NVLink domain, or a node where there is only PCIe."""
    domain = int(gpu.datasheet["scale_up_gpus"].value)
    return domain if "scale_up_gbs" in gpu.datasheet else max(domain, PCIE_GPUS_MAX)


REQUIRED = ("bf16_tflops", "memory_bytes", "memory_gbs", "pcie_gbs", "scale_up_gpus")
ALL_REDUCE_FIELDS = ("direct_latency_us", "direct_gbs", "ring_latency_us", "ring_gbs")


def gpu_from_json(data: Mapping[str, Any], where: str) -> GpuSpec:
    """Build a GpuSpec from a catalogue entry. Raises CatalogueError naming the field and its value."""
    name = data.get("name")
    if not isinstance(name, str) or not name:
        raise CatalogueError(f"{where}: `name` must be a text, got `{name}`")
    sources = data.get("sources", {})
    if not isinstance(sources, dict):
        raise CatalogueError(f"{where}: `sources` must map a section or `section.field` to text, got `{sources}`")

    def source_of(section: str, field: str) -> str:
        return str(sources.get(f"{section}.{field}", sources.get(section, where)))

    def constants(section: str) -> dict[str, Constant]:
        table = data.get(section, {})
        if not isinstance(table, dict):
            raise CatalogueError(f"{where}: `{section}` must be an object, got `{table}`")
        for field, value in table.items():
            if field != "all_reduce" and (isinstance(value, bool) or not isinstance(value, int | float) or value <= 0):
                raise CatalogueError(f"{where}: `{section}.{field}` must be a number above 0, got `{value}`")
        return {f: Constant(v, source_of(section, f)) for f, v in table.items() if f != "all_reduce"}

    datasheet = constants("datasheet")
    for field in REQUIRED:
        if field not in datasheet:
            raise CatalogueError(f"{where}: `datasheet.{field}` is missing")
    measured = constants("measured")
    for field in measured:
        if field not in FRACTIONS and field not in LATENCIES:
            raise CatalogueError(
                f"{where}: `measured.{field}` is not a rate the cost model knows\n"
                f"hint: one of {', '.join((*FRACTIONS, *LATENCIES, 'all_reduce'))}"
            )
    all_reduce: dict[int, AllReduce] = {}
    for gpus, fit in (data.get("measured", {}).get("all_reduce") or {}).items():
        if not str(gpus).isdecimal() or not isinstance(fit, dict) or set(fit) != set(ALL_REDUCE_FIELDS):
            raise CatalogueError(
                f"{where}: `measured.all_reduce.{gpus}` must be a number of GPUs with {', '.join(ALL_REDUCE_FIELDS)}"
            )
        for field, value in fit.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
                raise CatalogueError(
                    f"{where}: `measured.all_reduce.{gpus}.{field}` must be a number above 0, got `{value}`"
                )
        all_reduce[int(gpus)] = AllReduce(**fit, source=source_of("measured", "all_reduce"))
    return GpuSpec(
        name=name,
        vendor=str(data.get("vendor", "unknown")),
        arch=str(data.get("arch", "unknown")),
        datasheet=datasheet,
        measured=measured,
        all_reduce=all_reduce,
        usd_per_gpu_hour=constants("usd_per_gpu_hour"),
        notes=tuple(str(note) for note in data.get("notes", ())),
    )
