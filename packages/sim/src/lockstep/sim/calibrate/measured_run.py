"""What a run with measured batches states of itself, and the cost model that its batches are compared with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol

import msgspec

from lockstep.core.journal.reader import read_journal
from lockstep.core.journal.records import JournalError
from lockstep.host.host_header import RUNTIME, VLLM, HostHeader
from lockstep.host.quantization import KvDtype, WeightsDtype
from lockstep.host.recording import FILE, has_recording, read_recording
from lockstep.sim.catalogue import load_gpu, load_model
from lockstep.sim.cost import CalibrationError, Parallelism
from lockstep.sim.cost.base_model import base_cost_model
from lockstep.sim.cost.hardware import GpuSpec
from lockstep.sim.cost.models import Fp8Activations
from lockstep.sim.cost.stages import PipelineModel
from lockstep.sim.cost.tables import BaseModel
from lockstep.sim.results.batch_times import BatchTimes

PROCESSOR = "cpu-core"  # the entry of the catalogue for a processor


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """The model, the device and the engine of a run, as far as it states them."""

    engine: str
    engine_version: str
    entries: Mapping[str, Any] = field(default_factory=dict)  # model, gpu and the fields of Parallelism
    weights_dtype: WeightsDtype | None = None
    fp8_activations: Fp8Activations = "auto"
    notes: Sequence[str] = ()
    file: Path | None = None  # file or folder with the measurements, for its digest; None: the run itself


class Given(Protocol):
    """Values of a command line that replace those of the run; None: as the run states."""

    @property
    def model(self) -> str | None: ...
    @property
    def gpu(self) -> str | None: ...
    @property
    def weights_dtype(self) -> WeightsDtype | None: ...
    @property
    def kv_dtype(self) -> KvDtype: ...
    @property
    def operators(self) -> Path | None: ...


def described_batches(times: BatchTimes) -> MeasuredRun:
    """Return what the header of a file of batch times states."""
    measured = times.measured
    assert measured is not None, "it is the first line"
    notes = [f"measured on {measured.device}"] if measured.device else []
    weights_dtype: Any = measured.weights_dtype or None
    return MeasuredRun(
        engine=measured.engine,
        engine_version=measured.engine_version,
        entries=msgspec.structs.asdict(measured),
        weights_dtype=weights_dtype,
        notes=[*notes, *measured.notes],
    )


def described_run(run: Path) -> MeasuredRun:
    """Return what the header of a journal, or of a recording of another scheduler, states.

    Raises: CalibrationError if the run is no journal, or was emulated faster than its cost model; JournalError.
    """
    if has_recording(run):
        header, _ = read_recording(run)
        entries = {name: value for name, value in (("model", header.model), ("gpu", header.gpu)) if value}
        return MeasuredRun(
            engine=header.engine,
            engine_version=header.engine_version,
            entries={**entries, "tp": header.tp},
            notes=(f"the scheduler was {header.engine}'s own: requests are simulated under the profile `vllm`",),
            file=run / FILE,
        )
    try:
        journal = read_journal(run)
    except JournalError as error:
        parts = sorted(part.parent.name for part in run.glob("engines/*/journal"))
        place = f"{run}/engines/{parts[0]}: it is a cluster" if parts else "a run folder"
        raise CalibrationError(f"{error}\nhint: give {place}") from error
    host = HostHeader.of(journal.header)
    if host.speed is not None and host.speed != 1.0:
        raise CalibrationError(
            f"{run} was emulated {host.speed:g} times as fast as its cost model says: no device is\n"
            "hint: serve with --speed 1"
        )
    as_they_were = host.kind == RUNTIME and host.fp8_activations is None  # rows met fp8 weights as they were
    of_vllm = host.kind == VLLM
    return MeasuredRun(
        engine="vllm" if of_vllm else "lockstep",
        engine_version=host.vllm or "" if of_vllm else journal.header.core_version,
        entries=host.entries(),
        fp8_activations="off" if as_they_were else "auto",
        file=run / "journal" if (run / "journal").is_dir() else run,
    )


def fit_base(run: Path, about: MeasuredRun, given: Given) -> BaseModel:
    """Return the uncorrected cost model of a run.

    Raises: CalibrationError if neither the run nor the command line names model and GPU, or the run had several stages.
    """
    for name, value in (("model", given.model), ("gpu", given.gpu)):
        if not (value or about.entries.get(name)):
            hint = ", cpu for a processor" if name == "gpu" else ""
            raise CalibrationError(f"{run}: the run does not say its `{name}`\nhint: give --{name}{hint}")
    known = [one.name for one in fields(Parallelism)]
    layout = {name: about.entries[name] for name in known if name in about.entries}
    layout |= {name: value for name in known if (value := getattr(given, name, None)) is not None}
    split = Parallelism(**layout)
    base = base_cost_model(
        load_model(str(given.model or about.entries["model"])),
        load_gpu(str(given.gpu or about.entries["gpu"])),
        split,
        weights_dtype=given.weights_dtype or about.weights_dtype,
        kv_dtype=given.kv_dtype,
        operators=given.operators,
        fp8_activations=about.fp8_activations,
    )
    if isinstance(base, PipelineModel):
        raise CalibrationError(
            f"{run}: batches of a run with pp {split.pp} overlap, so what each took alone is not known\n"
            f"hint: calibrate with a run on one stage{_on_a_processor(base.gpu)}"
        )
    return base


def _on_a_processor(gpu: GpuSpec) -> str:
    """Return what a run on one stage needs to be like a stage, if the stages shared the cores of a processor."""
    if gpu.name != PROCESSOR:
        return ""
    return ", with the threads of one of these stages (OMP_NUM_THREADS), since stages on a CPU share its cores"
