"""The time of batches on a share of a device, for an engine that computes prompts beside decodes.

A batch on s of the device's S multiprocessors (SMs) computes at s / S of the device's rates. It reads memory at the
device's rate if s is at least SATURATING_SHARE of S, and proportionally slower below. Latencies and collectives stay
what they are. Each operator takes the larger of both, as ever, so a decode on few SMs takes little longer while memory
limits it, and a prompt takes longer in proportion to the SMs that it gives up.

**Side by side.** Both streams read the same memory. A batch *demands* the share of the memory's rate that it would use
if it ran alone: its memory time over its whole time. If the demands of both streams sum to more than 1, the rate is
divided fairly: a batch that demands less than half gets what it demands, the other one the rest (max-min fairness). A
batch that gets b of a demand d runs at b / d of its speed (`sim/host/streams.py`).

**Layers.** A launch of some of the layers takes that share of the pass. What belongs to a pass as such is added to each
launch (its fixed time, an engine's step) or to the last one alone (logits and sampling).

What the model leaves out: that streams disturb each other in L2, and waves of thread blocks that do not divide by a
share's SMs. Sources: docs/decisions/0138-pd-multiplexing.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec

from lockstep.core.contract.errors import ConfigError
from lockstep.core.contract.multiplexing import Multiplexing
from lockstep.sim.cost.hardware import FRACTIONS, LATENCIES, Constant, GpuSpec, achieved
from lockstep.sim.cost.model import BatchShape, CostModel, Duration
from lockstep.sim.cost.terms import LAUNCH
from lockstep.sim.cost.two_batch import LARGE, ONCE, SplitTerms

SATURATING_SHARE = Constant(
    0.3,
    "estimate: an SM reads 47 bytes per cycle (A100 whitepaper: 5,120 from L2 over 108 SMs), so 40 of the 132 of an "
    "H100 at 1.76 GHz read as much as its memory delivers, 3,350 GB/s",
)
SMS = {
    "A100-80G-SXM": Constant(108, "NVIDIA A100 whitepaper"),
    "H100-SXM": Constant(132, "NVIDIA H100 whitepaper, SXM5"),
    "H200-SXM": Constant(132, "NVIDIA H200 data sheet: the GH100 of an H100 SXM5"),
    "L40S": Constant(142, "NVIDIA Ada architecture whitepaper, AD102 of the L40S"),
    "L4": Constant(58, "NVIDIA L4 data sheet: 7,424 cores of 128 per SM"),
    "B200-SXM": Constant(148, "NVIDIA Blackwell architecture brief: 2 x 74"),
}
MAJORS = {"Ampere": 8, "Ada": 8, "Hopper": 9, "Blackwell": 10}
"""The major compute capability, which decides of how many SMs a green context has a multiple."""
NEVER_LIMITS = 1e6  # factor on a rate that limits nothing


class OnStream(NamedTuple):
    """A launch on a stream: its time if it runs alone, and the share of the memory's rate that it uses then."""

    alone_us: float
    demand: float


def sms_of(gpu: GpuSpec) -> tuple[int, int]:
    """Return the SMs of a GPU and its major compute capability. Raises ConfigError for a GPU without a known number."""
    known, major = SMS.get(gpu.name), MAJORS.get(gpu.arch.split()[0])
    if known is None or major is None:
        raise ConfigError(
            f"`pdmux` divides the SMs of a GPU, and how many {gpu.name} has is not known here\n"
            f"hint: {', '.join(SMS)}; or leave out --pdmux"
        )
    return int(known.value), major


def on_share(gpu: GpuSpec, share: float) -> GpuSpec:
    """Return the GPU with a share of its multiprocessors."""
    return _scaled(gpu, share, min(1.0, share / SATURATING_SHARE.value), latency=1.0)


def memory_alone(gpu: GpuSpec) -> GpuSpec:
    """Return a GPU whose batches take the time in which memory delivers what they read, and no longer."""
    return _scaled(gpu, NEVER_LIMITS, 1.0, latency=0.0)


def _scaled(gpu: GpuSpec, compute: float, memory: float, latency: float) -> GpuSpec:
    measured = dict(gpu.measured)
    for name in (*FRACTIONS, *LATENCIES, *gpu.measured):
        factor = 1.0
        if name.endswith("_tflops"):
            factor = compute
        elif name.endswith("_read_gbs"):
            factor = memory
        elif name in LATENCIES and name.endswith("_us"):
            factor = latency
        if factor == 1.0 or (name in FRACTIONS and name not in measured and FRACTIONS[name][0] not in gpu.datasheet):
            continue
        constant = achieved(gpu, name)
        measured[name] = Constant(constant.value * factor, f"{constant.source}, times {factor:g}")
    return replace(gpu, measured=measured)


class MultiplexedModel:
    """The cost model of an engine with PD multiplexing. Without a share of the device, times are those of the base.

    Args:
        base: on the whole device.
        shares: on each number of SMs that a division has.
        memory: the time in which memory delivers what a batch reads.
    """

    def __init__(self, base: SplitTerms, shares: Mapping[int, SplitTerms], memory: SplitTerms, layers: int) -> None:
        self.base, self.shares, self.memory, self.layers = base, dict(shares), memory, layers
        self._fixed_us = {sms: one.terms_us(LARGE)[LAUNCH] for sms, one in ((None, base), *self.shares.items())}
        self._known: dict[tuple[BatchShape, int | None, tuple[int, int] | None], OnStream] = {}

    @classmethod
    def of(cls, settings: Multiplexing, gpu: GpuSpec, build: Callable[[GpuSpec], CostModel]) -> MultiplexedModel:
        """Build the models of all shares. Raises ConfigError for a cost model without terms, as that of stages."""
        counts = sorted({sms for one in settings.divisions for sms in (one.prefill_sms, one.decode_sms)})
        base, memory = build(gpu), build(memory_alone(gpu))
        shares = {sms: build(on_share(gpu, sms / settings.sms)) for sms in counts}
        for one in (base, memory, *shares.values()):
            if not isinstance(one, SplitTerms):
                raise ConfigError(
                    "`pdmux` needs a cost model that tells operators apart\nhint: leave out --pp, or --pdmux"
                )
        return cls(base, shares, memory, settings.layers)  # type: ignore[arg-type]  # checked above

    def mapped(self, change: Callable[[CostModel], CostModel]) -> MultiplexedModel:
        """Return the model with every part changed alike, as by a calibration."""
        shares = {sms: change(one) for sms, one in self.shares.items()}
        return MultiplexedModel(change(self.base), shares, change(self.memory), self.layers)  # type: ignore[arg-type]

    def batch_us(self, shape: BatchShape) -> Duration:
        """Return the time of a whole pass on the whole device."""
        return self.base.batch_us(shape)

    def terms_us(self, shape: BatchShape) -> dict[str, float]:
        """Return the time of a whole pass on the whole device by term."""
        return self.base.terms_us(shape)

    # mechanism: pd-multiplexing (simulated)
    def on_stream(self, shape: BatchShape, sms: int | None, layers: tuple[int, int] | None) -> OnStream:
        """Return the time of a launch that runs alone, and the memory's rate that it demands.

        Args:
            sms: the SMs that run it; None: all.
            layers: the layers [start:stop) of a split prefill; None: all.
        """
        key = (shape, sms, layers)
        found = self._known.get(key)
        if found is None:
            if len(self._known) > 4096:
                self._known.clear()
            found = self._known[key] = self._on_stream(shape, sms, layers)
        return found

    def _on_stream(self, shape: BatchShape, sms: int | None, layers: tuple[int, int] | None) -> OnStream:
        model, fixed_us = self.base if sms is None else self.shares[sms], self._fixed_us[sms]
        memory_us = sum(us for name, us in self.memory.terms_us(shape).items() if name != LAUNCH)
        if layers is None:
            alone_us = model.batch_us(shape).mean_us
            return OnStream(alone_us, min(1.0, memory_us / alone_us) if alone_us else 0.0)
        share = (layers[1] - layers[0]) / self.layers
        terms = model.terms_us(msgspec.structs.replace(shape, sampled_rows=0))
        of_pass = fixed_us + sum(us for name, us in terms.items() if name in ONCE)
        alone_us = share * (sum(terms.values()) - of_pass) + of_pass
        if layers[1] == self.layers and shape.sampled_rows:
            alone_us += model.batch_us(shape).mean_us - sum(terms.values())
        return OnStream(alone_us, min(1.0, share * memory_us / alone_us))

    def describe(self) -> dict[str, Any]:
        """Return the description of the base, with the shares and the constant of their memory."""
        described = self.base.describe()
        constants = {"saturating_share": {"value": SATURATING_SHARE.value, "source": SATURATING_SHARE.source}}
        return {
            **described,
            "kind": f"{described['kind']}, PD multiplexing",
            "shares": sorted(self.shares),
            "constants": dict(sorted({**described["constants"], **constants}.items())),
        }
