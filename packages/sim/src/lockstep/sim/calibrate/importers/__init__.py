"""Readers of results of load generators and servers, recognised by content.

    read_measurements([Path("result.json"), Path("runs/real")])      # Measurements: runs and points

Each module here reads the files of one family of tools; `read_measurements` chooses by what a file contains, never by
its name. docs/cost-models.md, section 6, lists the formats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.sim.calibrate.importers.bench_serving import is_bench_serving, read_bench_serving
from lockstep.sim.calibrate.importers.fields import Fields, parse_objects
from lockstep.sim.calibrate.importers.guidellm import is_guidellm, read_guidellm
from lockstep.sim.calibrate.importers.inferencex import is_inferencex, read_inferencex
from lockstep.sim.calibrate.importers.nvidia import (
    is_aiperf_record,
    is_profile,
    is_summary,
    read_aiperf,
    read_profile,
    read_summary,
)
from lockstep.sim.calibrate.importers.prometheus import Scrape, is_scrape, measurements_of, read_scrape
from lockstep.sim.calibrate.importers.tables import read_lockstep, read_table
from lockstep.sim.calibrate.load_runs import Measurements
from lockstep.sim.cost import CalibrationError
from lockstep.sim.workload.trace_files import read_bytes, to_text

KNOWN = (
    "known are folders of `lockstep bench serve`, JSON of `vllm bench serve`, JSON lines of SGLang's bench_serving, "
    "benchmarks.json of guidellm, profile_export.jsonl and profile_export_aiperf.json of AIPerf, profile_export.json "
    "and profile_export_genai_perf.json of genai-perf, results of InferenceX, scrapes of vLLM's and SGLang's metrics, "
    "and CSV with a request per row"
)
IN_FOLDERS = ("profile_export.jsonl", "profile_export.json", "benchmarks.json")


@dataclass(frozen=True)
class ReadingOptions:
    """Values for what a file leaves out; None: the file must have it."""

    prompt_tokens: int | None = None
    output_tokens: int | None = None
    scrape_interval_s: float | None = None


def read_measurements(
    paths: Sequence[Path], options: ReadingOptions = ReadingOptions()
) -> tuple[Measurements, dict[str, int]]:
    """Read files and folders; all scrapes among them are of one server, in the order given.

    Returns: the measurements, and by reason the number of results that were left out.
    Raises: CalibrationError with file, line, column or key, and what is expected there; WorkloadError for a file that
        cannot be opened.
    """
    found, scrapes = Measurements(), list[Scrape]()
    left_out: dict[str, int] = {}
    for path in paths:
        if path.is_dir():
            found += _read_folder(path, options, left_out)
            continue
        if not path.exists():
            raise CalibrationError(f"{path}: there is no such file or folder\nhint: {KNOWN}")
        text = to_text(path, read_bytes(path))
        if not text.strip():
            raise CalibrationError(f"{path}: the file is empty\nhint: {KNOWN}")
        if text.lstrip()[0] in "{[":
            found += _read_json(path, text, options, left_out)
        elif is_scrape(text):
            scrapes.append(read_scrape(text, str(path)))
        else:
            found += read_table(text, str(path))
    if scrapes:
        found += measurements_of(scrapes, options.scrape_interval_s)
    return found, left_out


def _read_folder(path: Path, options: ReadingOptions, left_out: dict[str, int]) -> Measurements:
    if (path / "metrics.json").is_file():
        return read_lockstep(path)
    for name in IN_FOLDERS:
        if (path / name).is_file():
            return _read_json(path / name, to_text(path / name, read_bytes(path / name)), options, left_out)
    raise CalibrationError(f"{path}: no results in this folder\nhint: {KNOWN}")


def _read_json(path: Path, text: str, options: ReadingOptions, left_out: dict[str, int]) -> Measurements:
    name = str(path)
    objects = parse_objects(name, text)
    if not objects:
        raise CalibrationError(f"{path}: an empty list\nhint: {KNOWN}")
    if is_aiperf_record(objects[0]):
        return read_aiperf(objects, name, path)
    found = Measurements()
    for number, one in enumerate(objects, 1):
        part = name if len(objects) == 1 else f"{name}, result {number}"
        found += _read_object(one, part, path, options, left_out)
    return found


def _read_object(one: Fields, name: str, path: Path, options: ReadingOptions, left_out: dict[str, int]) -> Measurements:
    if is_guidellm(one):
        return read_guidellm(one, name)
    if is_profile(one):
        return read_profile(one, name, path, options.prompt_tokens)
    if is_summary(one):
        return read_summary(one, name)
    if is_inferencex(one):
        read = read_inferencex(one, name, options.prompt_tokens, options.output_tokens)
        if isinstance(read, Measurements):
            return read
        left_out[read] = left_out.get(read, 0) + 1
        return Measurements()
    if is_bench_serving(one):
        return read_bench_serving(one, name)
    if one.text("format") == "lockstep-metrics" or "about" in one:
        return read_lockstep(path.parent)
    keys = ", ".join(list(one.value)[:8]) or "none"
    raise CalibrationError(f"{one.where}: no known result; its keys are {keys}\nhint: {KNOWN}")
