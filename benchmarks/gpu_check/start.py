"""How an engine starts: its memory table, whether that came true, and its message where there is no room."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from benchmarks.gpu_check import shapes
from benchmarks.gpu_check.decode import release
from benchmarks.gpu_check.section import Section
from lockstep.core.contract.errors import ConfigError
from lockstep.runtime import LLM, Params
from lockstep.runtime.executor import Executor
from lockstep.runtime.memory import taken_bytes

MEM_FRACTION = 0.9
BEYOND = 0.01  # of the device, that may be in use beyond the fraction: the driver's own, for kernels loaded later


def run(section: Section) -> None:
    """With the default settings; then with a fraction of the memory that holds the weights but no KV."""
    folder = shapes.model_folder(section)
    with section.trying("start"):
        started(section, folder)
    release(section)
    with section.trying("no room for KV"):
        section.needs(8 if section.gpu else 0)
        refused(section, folder)


def started(section: Section, folder: Path) -> None:
    """The table, and what is in use behind it, with a few tokens made."""
    before = time.perf_counter()
    with LLM(folder, device=str(section.device), random_weights=0, mem_fraction=MEM_FRACTION) as llm:
        section.put("seconds", round(time.perf_counter() - before, 2))
        section.put("table", llm.memory.table().splitlines())
        section.put("backend", llm.attention_backend)
        answers = llm.generate([[5, 6, 7], [8, 9]], Params(max_new_tokens=5, ignore_eos=True))
        section.check("tokens came", all(len(one.token_ids) == 5 for one in answers), "")
        if not section.gpu:
            section.skip("memory in use", "memory is accounted on a GPU only")
            return
        executor = llm.host.executor
        assert isinstance(executor, Executor)
        taken, (_, total) = taken_bytes(section.device), torch.cuda.mem_get_info(section.device)
        share = taken / total
        section.check(
            "memory in use is within the fraction",
            share <= MEM_FRACTION + BEYOND,
            f"{share:.3f} of the device, {MEM_FRACTION} allowed",
        )
        if executor.graphs is None:
            section.check("decodes have graphs", False, "none were captured")
            return
        measured, expected = executor.graphs.bytes, llm.memory.graphs
        section.put(
            "graphs", {"sizes": len(executor.graphs.sizes), "expected_bytes": expected, "measured_bytes": measured}
        )
        section.check(
            "graphs take what was expected, within 512 MiB",
            abs(measured - expected) <= 512 << 20,
            f"{measured >> 20} MiB measured, {expected >> 20} MiB expected",
        )


def refused(section: Section, folder: Path) -> None:
    """The error has the numbers and the way out."""
    if not section.gpu:
        section.skip("no room for KV", "memory is accounted on a GPU only")
        return
    _, total = torch.cuda.mem_get_info(section.device)
    fraction = round(18e9 / total, 3)
    try:
        LLM(folder, device=str(section.device), random_weights=0, mem_fraction=fraction).close()
    except ConfigError as error:
        section.put("refusal", str(error).splitlines())
        said = str(error)
        section.check("a start without room is explained", "KV pages" in said and "hint:" in said, said[:300])
    else:
        section.check("a start without room is explained", False, f"it started with mem_fraction {fraction}")
