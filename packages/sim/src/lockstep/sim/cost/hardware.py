"""GPUs: data-sheet peaks, published measurements, and the rates that a kernel is expected to achieve.

A rate is the measured one if the catalogue has it, else the data sheet's peak times a fraction of this file. It is a
`Constant` in both cases, so that a result can name the source of each of its numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from lockstep.core.contract.errors import ConfigError
from lockstep.sim.cost.errors import CapacityError, CatalogueError


@dataclass(frozen=True, slots=True)
class Constant:
    """A number with its source. The name under which it is stored has the unit."""

    value: float
    source: str


@dataclass(frozen=True, slots=True)
class AllReduce:
    """The lower of two straight lines: direct reads between peers, and NCCL's ring.

    us = latency_us + 2 (n - 1) / n * bytes / rate, for n GPUs.
    """

    direct_latency_us: float
    direct_gbs: float
    ring_latency_us: float
    ring_gbs: float
    source: str


@dataclass(frozen=True, slots=True)
class AllGather:
    """A straight line, for an all-gather and for a reduce-scatter: us = latency_us + (n - 1) / n * bytes / rate.

    `bytes` is the message of all ranks together, n the number of GPUs.
    """

    latency_us: float
    gbs: float
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
    all_gather: Mapping[int, AllGather]  # by number of GPUs
    usd_per_gpu_hour: Mapping[str, Constant]  # owned_hyperscaler, rental_3yr, on_demand_low, on_demand_high, ...
    notes: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()  # further names, in lower case

    @property
    def memory_bytes(self) -> int:
        return int(self.datasheet["memory_bytes"].value)

    @property
    def memory_gbs(self) -> float:
        return self.datasheet["memory_gbs"].value

    @property
    def has_fp4(self) -> bool:
        return "fp4_tflops" in self.datasheet

    @property
    def has_fp8(self) -> bool:
        return "fp8_tflops" in self.datasheet


# Fractions of the data sheet that kernels achieve, for GPUs without measurements: (data-sheet field, fraction, source).
# The fractions are rounded from the measured GPUs of the catalogue, A100, H100, H200, B200 and L40S in that order.
FRACTIONS: dict[str, tuple[str, float, str]] = {
    "bf16_gemm_tflops": ("bf16_tflops", 0.70, "measured: 0.78, 0.74, 0.70, 0.65, 0.52"),
    "fp8_gemm_tflops": ("fp8_tflops", 0.58, "measured: none, 0.61, 0.60, 0.59, 0.42"),
    "fp4_gemm_tflops": ("fp4_tflops", 0.44, "measured: B200 0.44, GB200 0.43, RTX PRO 6000 0.63"),
    "fp4_moe_tflops": ("fp4_tflops", 0.31, "measured: B200 0.31, GB200 0.30, RTX PRO 6000 0.38"),
    "bf16_moe_tflops": ("bf16_tflops", 0.25, "measured: A100 0.30, H100 0.21, L40S 0.27"),
    "fp8_moe_tflops": ("fp8_tflops", 0.27, "measured: H100 0.27"),
    "weight_read_gbs": ("memory_gbs", 0.80, "measured: 0.76, 0.85, 0.83, 0.77, 0.81"),
    "attention_prefill_tflops": ("bf16_tflops", 0.60, "measured: A100 0.64, H100 0.64, H200 0.63, L40S 0.52"),
    "attention_decode_read_gbs": ("memory_gbs", 0.85, "measured: A100 0.54, H100 0.90, H200 0.88, L40S 0.84"),
    "delta_rule_tflops": ("bf16_tflops", 0.045, "measured: H100 0.051, H200 0.042, L40S 0.044"),
    "latent_decode_tflops": ("bf16_tflops", 0.55, "measured: H100 0.56, H200 0.58; L40S, in Triton, 0.11"),
}

MEASURED_ONLY = ("widened_read_gbs",)
"""Rates that have no estimate: a GPU without a measurement does not have this limit."""

# Fractions of the link's rate that transfers between GPUs achieve: (fraction, source).
LINK_FRACTIONS: dict[str, tuple[float, str]] = {
    "dispatch_gbs": (0.58, "DeepEP on 8 GPUs: H100 0.58, H200 0.58"),
    "dispatch_low_latency_gbs": (0.62, "DeepEP on 8 GPUs: H100 0.61, H200 0.63"),
    "combine_gbs": (0.61, "DeepEP on 8 GPUs: H100 0.61, H200 0.61"),
    "combine_low_latency_gbs": (0.55, "DeepEP on 8 GPUs: H100 0.55, H200 0.56"),
    "send_gbs": (0.55, "NCCL all-to-all of 2 GPUs: H100 0.54, H200 0.56"),
}

LATENCIES: dict[str, tuple[float, str]] = {
    "bf16_gemm_latency_us": (3.2, "rounded from A100 4.5, H100 3.2, H200 3.2, L40S 3.1 us"),
    "fp8_gemm_latency_us": (4.9, "rounded from H100 4.9, H200 4.9, L40S 4.0 us"),
    "fp4_gemm_latency_us": (4.9, "rounded from B200 4.9, GB200 4.4, RTX PRO 6000 6.5 us"),
    "attention_prefill_latency_us": (10.0, "rounded from A100 15, H100 11, H200 11, L40S 6 us"),
    "attention_prefill_extra_keys": (250.0, "keys, not us; between A100 163, H100 400, H200 365 and L40S 88"),
    "attention_decode_latency_us": (9.5, "rounded from H100 and H200 9.5 us"),
    "latent_decode_latency_us": (14.5, "rounded from H100 14.2, H200 14.6 us; L40S 20.6"),
    "delta_rule_latency_us": (23.0, "rounded from H100 23.3, H200 23.6 us; L40S 14.0"),
    "delta_rule_chunk_us": (1.3, "rounded from H100 1.3, H200 1.0, L40S 1.7 us"),
    "delta_rule_cached_token_heads": (0.0, "tokens x heads, not us; none on H100 and H200, 40,300 on L40S"),
    "small_kernel_us": (1.7, "rounded from H100 1.7, H200 1.6, L40S 1.7 us"),
    "dispatch_latency_us": (27.0, "DeepEP on 8 GPUs: H100 26.8, H200 27.1 us"),
    "dispatch_low_latency_us": (11.0, "DeepEP on 8 GPUs: H100 11.5, H200 10.2 us"),
    "combine_latency_us": (38.0, "DeepEP on 8 GPUs: H100 38.4, H200 38.1 us"),
    "combine_low_latency_us": (11.0, "DeepEP on 8 GPUs: H100 11.3, H200 10.2 us"),
    "send_latency_us": (8.1, "NCCL all-to-all of 2 GPUs: H100 8.1, H200 8.1 us"),
}

# All-reduce where the catalogue has no table: fractions of the link, from the fits of 8 GPUs (A100, H100, H200) and of
# 2 (L40S: more GPUs share its PCIe paths). ADDING_*: NVLink switches from Hopper on compute the sum themselves.
DIRECT_LINK_FRACTION, DIRECT_LATENCY_US = 0.51, 4.1
RING_LINK_FRACTION, RING_LATENCY_US = 0.72, 68.0
ADDING_LINK_FRACTION, ADDING_LATENCY_US = 0.99, 51.0
ADDING_ARCHS = ("Hopper", "Blackwell")

# Over PCIe alone, by number of GPUs: fractions of the link and latencies of both lines, all from L40S.
PCIE_LINES = {2: (0.60, 5.5, 0.63, 11.4), 4: (0.122, 12.5, 0.160, 10.9), 8: (0.062, 18.7, 0.051, 919.0)}

PRICE_KINDS = ("rental_3yr", "on_demand_low", "on_demand_high", "owned_neocloud", "owned_hyperscaler")
"""Kinds of prices per GPU-hour. Where one is unknown, the first known one stands for it."""

# All-gather and reduce-scatter where the catalogue has no table: fractions of the link, from H100 and H200.
GATHER_LINK_FRACTIONS = {2: 0.46, 4: 0.59, 8: 0.66}  # by number of GPUs; 8 is also for more
GATHER_LATENCIES_US = {2: 6.0, 4: 8.0, 8: 12.0}

# The network between nodes. Not measured: an estimate for 400 Gbit/s per GPU, as in HGX H100 systems.
NETWORK_GBS = Constant(40.0, "estimate: 0.8 of 400 Gbit/s per GPU (InfiniBand NDR, one adapter per GPU)")
NETWORK_LATENCY_US = Constant(15.0, "estimate: one message between nodes, GPU to GPU")
PCIE_GPUS_MAX = 8  # GPUs of one node that has PCIe alone
SCALE_UP_GPUS_MAX = 4096
NETWORK_GBS_RANGE, NETWORK_LATENCY_US_MAX = (0.001, 1e5), 1e6


def network_of(gpu: GpuSpec) -> tuple[Constant, Constant]:
    """Return rate (GB/s per GPU, each way) and latency (us per message) of the network between scale-up domains."""
    sheet = gpu.datasheet
    return sheet.get("network_gbs", NETWORK_GBS), sheet.get("network_latency_us", NETWORK_LATENCY_US)


def in_racks(
    gpu: GpuSpec, domain_gpus: int | None = None, network_gbs: float | None = None, network_us: float | None = None
) -> GpuSpec:
    """Return the GPU in other racks: scale-up domains of another size, or another network between them.

    Raises: ConfigError for values outside their range, and for domains of a GPU without scale-up links.
    """
    if domain_gpus is not None:
        if not 1 <= domain_gpus <= SCALE_UP_GPUS_MAX:
            raise ConfigError(f"`scale_up_gpus` must be from 1 to {SCALE_UP_GPUS_MAX:,}, got `{domain_gpus}`")
        if "scale_up_gbs" not in gpu.datasheet:
            raise ConfigError(
                f"`scale_up_gpus` is {domain_gpus}, but {gpu.name} has PCIe alone and no links that form a domain\n"
                "hint: leave it out"
            )
    low, high = NETWORK_GBS_RANGE
    if network_gbs is not None and not low <= network_gbs <= high:
        raise ConfigError(f"`network_gbs` must be from {low:g} to {high:,.0f} GB/s per GPU, got `{network_gbs:g}`")
    if network_us is not None and not 0 < network_us <= NETWORK_LATENCY_US_MAX:
        raise ConfigError(f"`network_latency` must be above 0 and at most 1s, got `{network_us:g}us`")
    given = {"scale_up_gpus": domain_gpus, "network_gbs": network_gbs, "network_latency_us": network_us}
    changed = {name: Constant(float(value), "given") for name, value in given.items() if value is not None}
    return replace(gpu, datasheet={**gpu.datasheet, **changed}) if changed else gpu


def achieved(gpu: GpuSpec, name: str) -> Constant:
    """Return a rate or latency: the measured median, else the default latency, or data sheet or link times a fraction.

    Raises: CatalogueError if the data sheet lacks the field that a fraction refers to.
    """
    if name in gpu.measured:
        return gpu.measured[name]
    if name in LATENCIES:
        value, why = LATENCIES[name]
        return Constant(value, f"not measured on {gpu.name}: {why}")
    if name in LINK_FRACTIONS:
        fraction, why = LINK_FRACTIONS[name]
        link = link_of(gpu)
        return Constant(link.value * fraction, f"{fraction:g} x link {link.value:g} GB/s ({why}); {link.source}")
    field, fraction, why = FRACTIONS[name]
    if field not in gpu.datasheet:
        raise CatalogueError(f"GPU `{gpu.name}` has no `{field}`, needed for `{name}`")
    peak = gpu.datasheet[field]
    return Constant(peak.value * fraction, f"{fraction:g} x data sheet {peak.value:g} ({why}); {peak.source}")


def all_reduce_of(gpu: GpuSpec, gpus: int) -> AllReduce:
    """Return the all-reduce lines for `gpus` GPUs of one or several scale-up domains.

    Over several domains: a reduce-scatter in each, an all-reduce of each part over the network, an all-gather in each.
    Raises: CapacityError for a number of GPUs beyond one domain that is no multiple of it.
    """
    if (domains := domains_of(gpu, gpus)) > 1:
        size = scale_up_gpus(gpu)
        inside = all_reduce_of(gpu, size)
        network, latency = network_of(gpu)
        across_us = 2 * (domains - 1) * latency.value
        across = 2 * (domains - 1) / domains / size / network.value  # us per kB of the whole message

        def line(latency_us: float, gbs: float) -> tuple[float, float]:
            per_kb = 2 * (size - 1) / size / gbs + across
            return latency_us + across_us, 2 * (gpus - 1) / gpus / per_kb

        (direct_us, direct_gbs), (ring_us, ring_gbs) = (
            line(inside.direct_latency_us, inside.direct_gbs),
            line(inside.ring_latency_us, inside.ring_gbs),
        )
        source = f"{domains} domains of {size}: {inside.source}; between them {network.source}"
        return AllReduce(direct_us, direct_gbs, ring_us, ring_gbs, source)
    for measured_gpus in sorted(gpu.all_reduce):
        if measured_gpus >= gpus:
            return gpu.all_reduce[measured_gpus]
    link = link_of(gpu)
    direct, latency_us, ring, ring_latency_us = (
        DIRECT_LINK_FRACTION, DIRECT_LATENCY_US, RING_LINK_FRACTION, RING_LATENCY_US
    )  # fmt: skip
    fits = "8 A100"
    if "scale_up_gbs" not in gpu.datasheet:
        size = next((size for size in PCIE_LINES if size >= gpus), max(PCIE_LINES))
        direct, latency_us, ring, ring_latency_us = PCIE_LINES[size]
        fits = f"{size} L40S"
    elif gpu.arch.startswith(ADDING_ARCHS):
        ring, ring_latency_us, fits = ADDING_LINK_FRACTION, ADDING_LATENCY_US, "8 H100 and H200"
    return AllReduce(
        latency_us,
        direct * link.value,
        ring_latency_us,
        ring * link.value,
        f"link {link.value:g} GB/s x {direct:g} direct, {ring:g} ring (fits of {fits}); {link.source}",
    )


def all_gather_of(gpu: GpuSpec, gpus: int) -> AllGather:
    """Return the line of all-gather and reduce-scatter for `gpus` GPUs of one or several scale-up domains.

    Over several domains every GPU exchanges its part with those of the other domains over the network, then each domain
    gathers. Raises: CapacityError as `all_reduce_of`.
    """
    if (domains := domains_of(gpu, gpus)) > 1:
        size = scale_up_gpus(gpu)
        inside = all_gather_of(gpu, size)
        network, latency = network_of(gpu)
        per_kb = (size - 1) / size / inside.gbs + (domains - 1) / domains / size / network.value
        return AllGather(
            inside.latency_us + (domains - 1) * latency.value,
            (gpus - 1) / gpus / per_kb,
            f"{domains} domains of {size}: {inside.source}; between them {network.source}",
        )
    for measured_gpus in sorted(gpu.all_gather):
        if measured_gpus >= gpus:
            return gpu.all_gather[measured_gpus]
    link, size = link_of(gpu), next((size for size in GATHER_LINK_FRACTIONS if size >= gpus), 8)
    fraction = GATHER_LINK_FRACTIONS[size]
    return AllGather(
        GATHER_LATENCIES_US[size],
        fraction * link.value,
        f"link {link.value:g} GB/s x {fraction:g} (fits of {size} H100 and H200); {link.source}",
    )


def link_of(gpu: GpuSpec) -> Constant:
    """Return the data sheet's rate between two GPUs of a domain, in GB/s per direction."""
    return gpu.datasheet.get("scale_up_gbs") or gpu.datasheet["pcie_gbs"]


def scale_up_gpus(gpu: GpuSpec) -> int:
    """Return how many GPUs are connected without a network: the NVLink domain, or with PCIe alone a node."""
    domain = int(gpu.datasheet["scale_up_gpus"].value)
    return domain if "scale_up_gbs" in gpu.datasheet else max(domain, PCIE_GPUS_MAX)


def domains_of(gpu: GpuSpec, gpus: int) -> int:
    """Return how many scale-up domains `gpus` GPUs span. Raises CapacityError beyond one unless they fill each."""
    size = scale_up_gpus(gpu)
    if gpus > size and gpus % size:
        raise CapacityError(
            f"tp {gpus} spans scale-up domains of {size} {gpu.name}, and does not fill them\n"
            f"hint: --tp {gpus // size * size} or {(gpus // size + 1) * size}"
        )
    return max(gpus // size, 1)


REQUIRED = ("bf16_tflops", "memory_bytes", "memory_gbs", "pcie_gbs", "scale_up_gpus")
ALL_REDUCE_FIELDS = ("direct_latency_us", "direct_gbs", "ring_latency_us", "ring_gbs")
ALL_GATHER_FIELDS = ("latency_us", "gbs")
COLLECTIVES = {"all_reduce": ALL_REDUCE_FIELDS, "all_gather": ALL_GATHER_FIELDS}


def gpu_from_json(data: Mapping[str, Any], where: str) -> GpuSpec:
    """Build a GpuSpec from a catalogue entry. Raises CatalogueError with the field and its value."""
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
            if field not in COLLECTIVES and (
                isinstance(value, bool) or not isinstance(value, int | float) or value <= 0
            ):
                raise CatalogueError(f"{where}: `{section}.{field}` must be a number above 0, got `{value}`")
        return {f: Constant(v, source_of(section, f)) for f, v in table.items() if f not in COLLECTIVES}

    datasheet = constants("datasheet")
    for field in REQUIRED:
        if field not in datasheet:
            raise CatalogueError(f"{where}: `datasheet.{field}` is missing")
    measured = constants("measured")
    for field in measured:
        if all(field not in known for known in (FRACTIONS, LATENCIES, LINK_FRACTIONS, MEASURED_ONLY)):
            raise CatalogueError(
                f"{where}: `measured.{field}` is not a rate of the cost model\n"
                f"hint: one of {', '.join((*FRACTIONS, *LATENCIES, *LINK_FRACTIONS, *MEASURED_ONLY, *COLLECTIVES))}"
            )

    def lines(field: str) -> dict[int, dict[str, float]]:
        found: dict[int, dict[str, float]] = {}
        for gpus, fit in (data.get("measured", {}).get(field) or {}).items():
            if not str(gpus).isdecimal() or not isinstance(fit, dict) or set(fit) != set(COLLECTIVES[field]):
                raise CatalogueError(
                    f"{where}: `measured.{field}.{gpus}` must be a number of GPUs with {', '.join(COLLECTIVES[field])}"
                )
            for name, value in fit.items():
                if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
                    raise CatalogueError(
                        f"{where}: `measured.{field}.{gpus}.{name}` must be a number above 0, got `{value}`"
                    )
            found[int(gpus)] = fit
        return found

    reduce_source, gather_source = source_of("measured", "all_reduce"), source_of("measured", "all_gather")
    return GpuSpec(
        name=name,
        vendor=str(data.get("vendor", "unknown")),
        arch=str(data.get("arch", "unknown")),
        datasheet=datasheet,
        measured=measured,
        all_reduce={gpus: AllReduce(**fit, source=reduce_source) for gpus, fit in lines("all_reduce").items()},
        all_gather={gpus: AllGather(**fit, source=gather_source) for gpus, fit in lines("all_gather").items()},
        usd_per_gpu_hour=constants("usd_per_gpu_hour"),
        notes=tuple(str(note) for note in data.get("notes", ())),
        aliases=tuple(str(alias).lower() for alias in data.get("aliases", ())),
    )
