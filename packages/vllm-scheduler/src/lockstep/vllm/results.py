"""Results of the workers as an event of the core, and what the core decides from it as outputs for vLLM's clients."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np

from lockstep.core.contract.errors import ContractError
from lockstep.core.contract.events import BatchFinished, FinishReason
from lockstep.vllm.requests import repeats, stop_reason
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.request import RequestStatus

if TYPE_CHECKING:
    from lockstep.core.contract.commands import BatchPlan
    from lockstep.vllm.requests import Tracked
    from vllm.v1.outputs import ModelRunnerOutput

STATUS: dict[FinishReason, RequestStatus] = {
    "length": RequestStatus.FINISHED_LENGTH_CAPPED,
    "out_of_kv": RequestStatus.FINISHED_LENGTH_CAPPED,
    "stop": RequestStatus.FINISHED_STOPPED,
    "text_stop": RequestStatus.FINISHED_REPETITION,  # stop strings are found by vLLM's front end
    "grammar": RequestStatus.FINISHED_STOPPED,
    "computed": RequestStatus.FINISHED_STOPPED,
    "cancelled": RequestStatus.FINISHED_ABORTED,
    "timeout": RequestStatus.FINISHED_ABORTED,
    "invalid": RequestStatus.FINISHED_ERROR,
    "transfer": RequestStatus.FINISHED_ERROR,
    "error": RequestStatus.FINISHED_ERROR,
}
"""vLLM's status of a request that the core finished for a reason."""


class LaunchedBatch:
    """A plan that the workers run, with the requests that it samples for."""

    __slots__ = ("launched_us", "plan", "samplers")

    def __init__(self, plan: BatchPlan, samplers: list[Tracked], launched_us: int) -> None:
        self.plan = plan
        self.samplers = samplers  # in the order of plan.sample_rows
        self.launched_us = launched_us


def batch_finished(
    batch: LaunchedBatch, result: ModelRunnerOutput, started_us: int, now_us: int
) -> tuple[BatchFinished, list[list[int]]]:
    """Return the event that answers the batch, and the sampled tokens of each sampling row.

    Raises: ContractError if a row that samples has no token, or more than one without drafts.
    """
    sampled, index, plan = result.sampled_token_ids, result.req_id_to_index, batch.plan
    names = [entry.request.request_id for entry in batch.samplers]
    tokens = [sampled[index[name]] for name in names]
    counts = [len(row) for row in tokens]
    verifies = plan.speculation is not None
    for name, count in zip(names, counts, strict=True):
        if count != 1 and not (verifies and count):
            raise ContractError(f"request {name}: the workers returned {count} tokens for a row that samples")
    event = BatchFinished(
        time_us=now_us,
        batch_id=plan.batch_id,
        tokens=np.array([token for row in tokens for token in row], np.int32).tobytes(),
        started_us=started_us,
        finished_us=now_us,
        generation=plan.generation,
        accepted=np.array(counts, np.int32).tobytes() if verifies else b"",
        text_stops=tuple(i for i, entry in enumerate(batch.samplers) if entry.detects and repeats(entry, tokens[i])),
    )
    return event, tokens


class ClientOutputs:
    """Outputs for the clients of the engine, collected until vLLM fetches them."""

    def __init__(self) -> None:
        self.by_client: dict[int, list[EngineCoreOutput]] = defaultdict(list)

    def add(
        self,
        entry: Tracked,
        tokens: list[int],
        result: ModelRunnerOutput | None = None,
        status: RequestStatus | None = None,
    ) -> None:
        """Add an output of a request: new tokens, and its end if `status` is given."""
        request = entry.request
        output = EngineCoreOutput(
            request_id=request.request_id,
            new_token_ids=tokens,
            events=request.take_events() if request.events else None,
            trace_headers=request.trace_headers,
        )
        if request.prefill_stats is not None:
            output.prefill_stats = request.take_prefill_stats()
        if result is not None:
            self._add_tensors(output, entry, tokens, result)
        if status is not None:
            request.status = status
            output.finish_reason = request.get_finished_reason()
            if status == RequestStatus.FINISHED_REPETITION:
                output.stop_reason = request.stop_reason = "repetition_detected"
            elif status == RequestStatus.FINISHED_STOPPED and tokens:
                output.stop_reason = request.stop_reason = stop_reason(request.sampling_params, tokens[-1])
        self.by_client[request.client_index].append(output)

    @staticmethod
    def _add_tensors(output: EngineCoreOutput, entry: Tracked, tokens: list[int], result: ModelRunnerOutput) -> None:
        """Add what the workers return beside tokens: logprobs, pooled vectors, NaN counts."""
        request = entry.request
        params, request_id = request.sampling_params, request.request_id
        if result.logprobs is not None and params is not None and params.num_logprobs is not None:
            output.new_logprobs = result.logprobs.slice_request(result.req_id_to_index[request_id], len(tokens))
        output.new_prompt_logprobs_tensors, entry.prompt_logprobs = entry.prompt_logprobs, None
        if result.prompt_token_id_logprobs_dict:
            output.prompt_token_id_logprobs = result.prompt_token_id_logprobs_dict.get(request_id)
        if result.num_nans_in_logits and request_id in result.num_nans_in_logits:
            output.num_nans_in_logits = request.num_nans_in_logits = result.num_nans_in_logits[request_id]
        if result.pooler_output:
            output.pooling_output = result.pooler_output[result.req_id_to_index[request_id]]

    def take(self) -> dict[int, EngineCoreOutputs]:
        """Return the outputs by client, and keep none."""
        taken = {client: EngineCoreOutputs(outputs=outputs) for client, outputs in self.by_client.items()}
        self.by_client = defaultdict(list)
        return taken
