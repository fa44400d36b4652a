"""The comparison with vLLM's interfaces finds what a release changes, and nothing in the installed one."""

from __future__ import annotations

import pytest

from tests.vllm.interface import Read, findings, reader
from tests.vllm.support import needs_vllm

pytestmark = needs_vllm


def changed(name: str, before: str, after: str) -> Read:
    """Return a reader of the installed vLLM with a change in one file."""
    read = reader(None)
    assert before in read(name)
    return lambda other: read(other).replace(before, after) if other == name else read(other)


def test_the_installed_vllm_fits() -> None:
    assert findings(reader(None)) == []


@pytest.mark.parametrize(
    ("name", "before", "after", "finding"),
    [
        (
            "v1/core/sched/interface.py", "def has_finished_requests(", "def has_open_requests(",
            "SchedulerInterface.has_open_requests is missing",
        ),
        (
            "v1/core/sched/interface.py", "reset_running_requests: bool", "reset_all: bool",
            "reset_prefix_cache: no parameter `reset_all`",
        ),
        (
            "v1/engine/core.py", "self.scheduler.get_request_counts()", "self.scheduler.counts()",
            "uses `scheduler.counts`",
        ),
        (
            "v1/core/sched/output.py", "free_encoder_mm_hashes:", "freed:",
            "scheduler.py: SchedulerOutput has no `free_encoder_mm_hashes`",
        ),
        (
            "config/scheduler.py", "prefill_schedule_interval", "prefill_interval",
            "settings.py: SchedulerConfig has no `prefill_schedule_interval`",
        ),
        (
            "v1/core/sched/scheduler.py", "self.scheduler_config.watermark", "self.scheduler_config.low_watermark",
            "reads the option `scheduler_config.low_watermark`, which is neither read nor refused",
        ),
        ("v1/metrics/stats.py", "num_waiting_reqs", "waiting", "SchedulerStats has no field `num_waiting_reqs`"),
        ("v1/request.py", "class Request:", "class Query:", "`vllm.v1.request` has no `Request`"),
    ],
)  # fmt: skip
def test_changes_of_vllm_are_found(name: str, before: str, after: str, finding: str) -> None:
    assert any(finding in one for one in findings(changed(name, before, after)))
