"""`lockstep.vllm.Recorder`: vLLM's own scheduler, recorded. Every decision is vLLM's.

    vllm serve MODEL --scheduler-cls lockstep.vllm.Recorder --additional-config '{"lockstep": {"journal": "runs/own"}}'

The run folder gets `recording.jsonl` (`lockstep.host.recording`): arrivals, plans, results with their durations, ends.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterable
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from lockstep.core.contract.errors import ConfigError
from lockstep.core.journal.records import JournalError
from lockstep.host.recording import Arrived, Ended, PassFinished, Planned, RecordingHeader, RecordingWriter
from lockstep.vllm import versions
from lockstep.vllm.metrics import reported
from lockstep.vllm.recording import device_name
from lockstep.vllm.settings import not_begun, read_settings, run_folder
from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request, RequestStatus

logger = init_logger("vllm.lockstep")


class SchedulerRecorder(Scheduler):
    """vLLM's scheduler with a recording. With asynchronous scheduling an AsyncSchedulerRecorder is made instead."""

    def __new__(cls, *arguments: Any, **options: Any) -> Any:
        config = options["vllm_config"] if "vllm_config" in options else arguments[0]
        return object.__new__(AsyncSchedulerRecorder if config.scheduler_config.async_scheduling else cls)

    def __init__(self, *arguments: Any, **options: Any) -> None:
        """Raises ConfigError without a run folder, or for a vLLM version that is not supported."""
        super().__init__(*arguments, **options)
        version = versions.installed_version()
        versions.check_version(version)
        settings = read_settings(self.vllm_config.additional_config)
        if not settings.journal:
            raise ConfigError("lockstep.vllm.Recorder requires the setting `journal`, a run folder (docs/vllm.md)")
        scheduler = self.vllm_config.scheduler_config
        header = RecordingHeader(
            engine="vllm",
            engine_version=version,
            model=self.vllm_config.model_config.model,
            page_size=self.block_size,
            pages=self.kv_cache_config.num_blocks - 1,
            context_tokens_max=self.vllm_config.model_config.max_model_len,
            max_running_requests=scheduler.max_num_seqs,
            batch_tokens_max=scheduler.max_num_batched_tokens,
            overlap_depth=int(bool(scheduler.async_scheduling)),
            gpu=device_name(),
            tp=self.vllm_config.parallel_config.tensor_parallel_size,
        )
        failed = reported(self.vllm_config.parallel_config.data_parallel_index, _failed)
        try:
            self._writer = RecordingWriter(run_folder(settings, self.vllm_config), header, failed)
        except JournalError as error:
            raise not_begun(error, settings) from None
        self._began = time.monotonic()
        self._key = os.urandom(16)  # of the hashes of blocks
        self._numbers: dict[str, int] = {}  # of open requests
        self._arrived = self._batches = self._free_us = 0
        self._planned: deque[tuple[int, int]] = deque()  # batch and time of each plan without a result, oldest first

    def _now_us(self) -> int:
        return int((time.monotonic() - self._began) * 1e6)

    def add_request(self, request: Request) -> None:
        """Record the arrival."""
        if request.request_id not in self._numbers:  # otherwise the next input of a streaming request
            self._numbers[request.request_id] = self._arrived
            self._arrived += 1
            whole = request.num_prompt_tokens // self.block_size
            record = Arrived(
                time_us=self._now_us(),
                name=request.request_id,
                prompt_tokens=request.num_prompt_tokens,
                max_new_tokens=request.max_tokens,
                priority=request.priority,
                blocks=tuple(self._pseudonym(one) for one in request.block_hashes[:whole]),
            )
            self._writer.append(record)
        super().add_request(request)

    def _pseudonym(self, block_hash: bytes) -> int:
        return int.from_bytes(blake2b(block_hash, key=self._key, digest_size=6).digest(), "little")

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Record the plan."""
        output = super().schedule(throttle_prefills)
        now_us, numbers = self._now_us(), self._numbers
        retracted = tuple(numbers[one] for one in output.preempted_req_ids or () if one in numbers)
        if not output.total_num_scheduled_tokens and not retracted:
            return output
        cached = output.scheduled_cached_reqs
        starts = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        starts |= {one.req_id: one.num_computed_tokens for one in output.scheduled_new_reqs}
        drafts = output.scheduled_spec_decode_tokens
        rows = tuple(
            (numbers[name], starts[name], count, len(drafts.get(name, ())))
            for name, count in output.num_scheduled_tokens.items()
        )
        running, waiting = self.get_request_counts()
        record = Planned(
            time_us=now_us, batch=self._batches, rows=rows, retracted=retracted, running=running, waiting=waiting,
            kv_usage=round(self.get_kv_cache_usage(), 4),
        )  # fmt: skip
        self._writer.append(record)
        if output.total_num_scheduled_tokens:
            self._planned.append((self._batches, now_us))
        self._batches += 1
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Record the result, its duration, and which requests ended by it."""
        now_us = self._now_us()
        requests = [self.requests[one] for one in scheduler_output.num_scheduled_tokens if one in self.requests]
        before = [request.num_output_tokens for request in requests]
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if scheduler_output.total_num_scheduled_tokens:
            batch, planned_us = self._planned.popleft()
            tokens = tuple(
                (self._numbers[request.request_id], request.num_output_tokens - count)
                for request, count in zip(requests, before, strict=True)
                if request.num_output_tokens > count
            )
            started_us = max(planned_us, self._free_us)
            self._free_us = now_us
            self._writer.append(PassFinished(time_us=now_us, batch=batch, started_us=started_us, tokens=tokens))
        for request in requests:
            if request.is_finished():
                self._end(request, now_us)
        return outputs

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus) -> list[Request]:
        """Record which requests vLLM ends: those of clients that left, and those with a stop string."""
        ended: list[Request] = super().finish_requests(request_ids, finished_status)
        now_us = self._now_us()
        for request in ended:
            self._end(request, now_us)
        return ended

    def _end(self, request: Request, now_us: int) -> None:
        if (number := self._numbers.pop(request.request_id, None)) is not None:
            self._writer.append(Ended(time_us=now_us, request=number, reason=str(request.get_finished_reason())))

    def shutdown(self) -> None:
        """Close the recording."""
        super().shutdown()
        self._writer.close()


class AsyncSchedulerRecorder(SchedulerRecorder, AsyncScheduler):
    """vLLM's asynchronous scheduler with a recording."""


def _failed(why: str) -> None:
    logger.error("the recording ends here, serving goes on: %s", why)
