"""Run vLLM's own tests of its scheduler against `lockstep.vllm.Scheduler`: `python tests/vllm/upstream.py VLLM_TESTS`.

VLLM_TESTS is the folder `tests` of vLLM's sources, of the installed version. Nothing of it is part of this repository.
Run this file with the interpreter of an environment that has vLLM, with PYTHONPATH as `dev.py vllm-test` sets it.

The adapter: `create_scheduler` of tests/v1/core/utils.py and the names `Scheduler` and `AsyncScheduler` in the tests
build Lockstep's scheduler, with the demo model in place of a text model that would be downloaded. Lists `running` and
`waiting`, which are no part of vLLM's interface, are added for reading. Each test runs with vLLM's own scheduler first:
a test that fails there is not counted.

A test applies if it builds a scheduler, requires nothing that Lockstep refuses by name, and reads no
field outside of vLLM's interface. Exit status 1 if an applicable test fails that is not in DIFFERENT.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
DEMO = HERE.parents[1] / "packages/gpu-runtime/src/lockstep/runtime/demo_model/files"
FILES = (
    "test_scheduler.py",
    "test_async_scheduler.py",
    "test_deferred_block_free.py",
    "test_output.py",
    "test_prefix_replay.py",
    "test_priority_preemption_bug.py",
    "test_priority_scheduler_random.py",
    "test_worker_slot_overflow.py",
)
"""Files of tests/v1/core with tests of the scheduler. The remaining files test vLLM's block managers."""

FIELDS = {
    "test_finish_request": "replaces `aux_output_connector`",
    "test_fcfs_mixed_blocked_types_remote_load_drains_first": "sets the status of waiting requests",
    "test_mamba_align_eagle_schedules_encoder_at_boundary": "replaces methods of the scheduler",
    "test_no_spec_decode_padding_up_to_max_model_len": "sets `num_computed_tokens` of a new request",
    "test_no_spec_tokens_scheduled_for_prefill_chunks": "reads `spec_token_ids`",
    "test_pending_hisparse_spill_keeps_scheduler_alive": "replaces a connector",
    "test_priority_scheduling_preemption_victim_selection": "reads the order of `running`",
    "test_priority_scheduling_with_limited_slots": "reads the order of `running`",
    "test_resumable_request_handoff": "requires streaming input, which is refused by request",
    "test_schedule_prefills_gating": "requires --prefill-schedule-interval, which is refused at start",
    "test_schedule_spec_decoding_stats": "reads `spec_token_ids`",
    "test_scheduler_ec_connector_stats": "calls update_from_output without schedule()",
    "test_scheduler_kv_connector_stats": "calls update_from_output without schedule()",
    "test_scheduler_reset_prefix_cache": "replaces a connector",
    "test_stop_via_update_from_output": "fills `running` by hand",
    "test_streaming_pause_does_not_over_admit_worker_slot": "requires streaming input, which is refused by request",
    "test_throttle_defers_inflight_prefill_chunk": "requires --prefill-schedule-interval, which is refused at start",
    "test_update_draft_token_ids_strips_ngram_padding": "reads `spec_token_ids`",
    "test_update_from_output_routes_multi_position_sampling_masks": "fills `running` by hand",
    "test_update_from_output_routes_sampling_masks_by_request": "fills `running` by hand",
}
"""Tests that do not apply and fail without an AttributeError, with the reason."""

ARRIVAL = "equal priorities run in the order of arrival at the engine core, not by the front end's clock"
IN_FLIGHT = "without asynchronous scheduling a second pass waits for the first; vLLM launches it for pipeline stages"
DIFFERENT = {
    "test_draft_slots_budgeted_per_scheduled_request": "slots for drafts are reserved for --max-num-seqs requests",
    "test_pooling_chunked_prefill_can_finish_at_max_model_len": "a pass smaller than a block is refused at start",
    "test_preempt_during_execution": IN_FLIGHT,
    "test_prefix_caching_for_prefill_dedup": "a prefix that the same pass computes is shared from the next pass on",
    "test_priority_scheduling_arrival_time_tiebreaker": ARRIVAL,
    "test_priority_scheduling_equal_priority_preemption": ARRIVAL,
    "test_priority_scheduling_fcfs_fallback": ARRIVAL,
    "test_priority_scheduling_mixed_priority_and_arrival": ARRIVAL,
    "test_priority_scheduling_waiting_queue_order": ARRIVAL,
    "test_schedule_concurrent_batches": IN_FLIGHT,
    "test_update_draft_token_ids_in_output_strips_padding": "asynchronous: requests with grammars have no drafts",
    "test_spec_decode_padding_first_decode_step": "a first decode is not padded to the width of a verification",
    "test_spec_decoding_stats_empty_output": "a sampling row without a token is an error of the workers",
}
"""Applicable tests that fail: decisions in which Lockstep differs from vLLM's scheduler on purpose, with the reason."""

SCHEDULER, REPORT = "LOCKSTEP_UPSTREAM_SCHEDULER", "LOCKSTEP_UPSTREAM_REPORT"  # set for the pytest processes only

# --------------------------------------------------------------------------------------------- as a plugin of pytest

_built = 0  # schedulers of Lockstep that the current test built


def pytest_configure(config: Any) -> None:
    """Replace the fixture in the module that the tests import it from."""
    config.addinivalue_line("markers", "cpu_test: of vLLM")
    import tests.v1.core.utils as utils

    original = utils.create_scheduler

    def create_scheduler(model: str = "", **options: Any) -> Any:
        if os.environ[SCHEDULER] == "lockstep" and options.get("scheduler_cls") is None:
            options["scheduler_cls"] = _adapted()
        scheduler = original(model or str(DEMO), **options)
        if hasattr(scheduler, "_output_builder"):
            scheduler._output_builder._v2 = scheduler.use_v2_model_runner
        return scheduler

    utils.create_scheduler = create_scheduler
    _keep_asynchronous()
    _replace_models()


def _keep_asynchronous() -> None:
    """Let a configuration keep its `async_scheduling`, which vLLM's CPU platform switches off."""
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.__dict__["check_and_update_config"].__func__

    def check_and_update_config(cls: Any, config: Any) -> None:
        wanted = config.scheduler_config.async_scheduling
        original(cls, config)
        config.scheduler_config.async_scheduling = bool(wanted)

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)


def _replace_models() -> None:
    """Let configurations of models that would be downloaded be those of the demo model."""
    from vllm.config import ModelConfig

    original = ModelConfig.__init__

    def init(self: Any, *arguments: Any, **options: Any) -> None:
        if str(options.get("model", "")).startswith("facebook/opt"):
            options["model"] = str(DEMO)
        original(self, *arguments, **options)

    ModelConfig.__init__ = init


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Where a test builds a scheduler without the fixture, let it build Lockstep's."""
    if os.environ[SCHEDULER] != "lockstep":
        return
    from vllm.v1.core.sched import async_scheduler, scheduler

    for module in {item.module for item in items}:
        for name, kind in (("Scheduler", scheduler.Scheduler), ("AsyncScheduler", async_scheduler.AsyncScheduler)):
            if getattr(module, name, None) is kind:
                setattr(module, name, _adapted())


@cache
def _adapted() -> type:
    from vllm.v1.request import RequestStatus

    from lockstep.vllm import Scheduler

    class Adapted(Scheduler):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            global _built
            _built += 1
            super().__init__(*arguments, **options)

        @property
        def running(self) -> list[Any]:
            return [one for one in self.requests.values() if one.status == RequestStatus.RUNNING]

        @property
        def waiting(self) -> list[Any]:
            return [one for one in self.requests.values() if one.status != RequestStatus.RUNNING]

    return Adapted


def pytest_runtest_setup(item: Any) -> None:
    global _built
    _built = 0


def pytest_runtest_makereport(item: Any, call: Any) -> None:
    """Append the outcome of a test to the report."""
    if call.when == "teardown" or (call.when == "setup" and call.excinfo is None):
        return
    error = "" if call.excinfo is None else f"{call.excinfo.typename}: {call.excinfo.value}"
    line = {"test": f"{item.path.name}::{item.name}", "built": _built, "error": error}
    with Path(os.environ[REPORT]).open("a") as file:
        file.write(json.dumps(line) + "\n")


# ------------------------------------------------------------------------------------------------------- as a program


def outcomes(folder: Path, scheduler: str, timeout_s: float) -> dict[str, dict[str, Any]]:
    """Run the files with one scheduler. Returns by test how many schedulers it built, and its error or ""."""
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.jsonl"
        report.touch()
        sources = [str(Path(one).resolve()) for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one]
        paths = [str(HERE), str(folder.parent), *sources]
        variables = {
            SCHEDULER: scheduler, REPORT: str(report), "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
        }  # fmt: skip
        files = [str(folder / "v1" / "core" / name) for name in FILES if (folder / "v1" / "core" / name).is_file()]
        options = ["-q", "--noconftest", "-c", "/dev/null", "--rootdir", scratch, "-p", "upstream", "--tb=no"]
        command = [sys.executable, "-m", "pytest", *options, "-p", "no:cacheprovider", *files]
        done = subprocess.run(
            command, cwd=scratch, env={**os.environ, **variables}, capture_output=True, text=True, timeout=timeout_s,
            check=False,
        )  # fmt: skip
        found = [json.loads(line) for line in report.read_text().splitlines()]
    if not found:
        sys.exit(f"upstream.py: pytest ran no test:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return {one["test"]: one for one in found}


def exclusion(own: dict[str, Any], ours: dict[str, Any]) -> str:
    """Return why a test does not apply; "" if it does."""
    error = ours["error"]
    if own["error"]:
        if "Skipped" in own["error"]:
            return "skipped by itself"
        if "Invalid repository ID" in own["error"]:
            return "requires a multimodal model that is not here"
        return "fails with vLLM's own scheduler in this environment"
    if not ours["built"]:
        return "builds no scheduler"
    if match := re.search(r"does not support: (.*?)(?: \(hint|;|\n|$)", error):
        return f"requires what is refused at start: {match[1]}"
    if match := re.search(r"NotImplementedError: (?:request \S+: )?(.*)", error):
        return f"requires what is refused: {match[1]}"
    if match := re.search(r"AttributeError: .*attribute '(\w+)'", error):
        return f"reads or replaces a field of vLLM's class: {match[1]}"
    if match := re.search(r"property '(\w+)' of 'Adapted' object has no setter", error):
        return f"reads or replaces a field of vLLM's class: {match[1]}"
    if error:
        return FIELDS.get(name_of(ours["test"]), "")
    return ""


def name_of(test: str) -> str:
    """Return the name of the function of a test."""
    return re.sub(r"\[.*", "", test.partition("::")[2])


def main() -> int:
    parser = argparse.ArgumentParser(description="Run vLLM's own tests of its scheduler against lockstep.vllm.")
    parser.add_argument("tests", type=Path, help="the folder `tests` of vLLM's sources")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for each of the two runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every outcome there as well")
    options = parser.parse_args()
    folder = options.tests.resolve()
    own = outcomes(folder, "vllm", options.timeout)
    ours = outcomes(folder, "lockstep", options.timeout)
    excluded: dict[str, list[str]] = defaultdict(list)
    failed, different, applies, passed = [], defaultdict(list), Counter[str](), Counter[str]()
    for test, outcome in ours.items():
        file = test.partition("::")[0]
        if reason := exclusion(own[test], outcome):
            excluded[reason].append(test)
            continue
        applies[file] += 1
        name = name_of(test)
        if not outcome["error"]:
            passed[file] += 1
        elif name in DIFFERENT:
            different[DIFFERENT[name]].append(test)
        else:
            failed.append((test, outcome["error"]))
    if options.json:
        options.json.write_text(json.dumps({"own": own, "ours": ours, "excluded": excluded}, indent=1))
    total = Counter(test.partition("::")[0] for test in ours)
    for file in total:
        print(f"{file}: {total[file]} tests, {applies[file]} apply, {passed[file]} pass")
    print(f"all: {total.total()} tests, {applies.total()} apply, {passed.total()} pass")
    print("\ndo not apply")
    for reason, tests in sorted(excluded.items(), key=lambda item: -len(item[1])):
        print(f"  {len(tests):4}  {reason}")
    print("\ndiffer on purpose")
    for reason, tests in different.items():
        print(f"  {len(tests):4}  {reason}")
    print("\nfail")
    for test, error in failed:
        print(f"  {test}: {error.splitlines()[0][:200]}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
