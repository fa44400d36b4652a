"""Pipeline stages of vLLM on CPUs: an executor that behaves like two stages, and a worker for two processes.

**One process.** vLLM's engine core launches as many batches as there are stages before it takes the oldest result. Here
a batch is computed when its result is taken, whole and in the order of the launches, so every batch but the oldest was
scheduled without the results of those before it. Plans and masks are copied, as they are between processes: vLLM fills
one buffer of masks again and again. The worker holds the whole model and is the last stage. `FirstStage` repeats what
the worker of an earlier stage does: it has the tokens of prompts, and beyond them only those of plans. Each batch is
checked: the first stage must have the tokens that the last stage computes.

**Two processes.** vLLM allocates what a later stage receives in a dummy run. Its CPU worker leaves that out if models
are not compiled, and the first batch fails. `StageWorker` allocates it after loading.
"""

from __future__ import annotations

import copy
from collections import deque
from concurrent.futures import Future
from typing import Any

from vllm.distributed.parallel_state import get_pp_group
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.worker.cpu_worker import CPUWorker

STAGES = 2


class FirstStage:
    """The tokens that the worker of the first stage has, by request."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}

    def take_in(self, output: Any) -> dict[str, tuple[int, list[int]]]:
        """Take in a plan. Returns by request the first position that it computes, and the tokens from there on."""
        starts = {}
        for name in output.finished_req_ids:
            self.tokens.pop(name, None)
        for new in output.scheduled_new_reqs:
            self.tokens[new.req_id] = list(new.prompt_token_ids)
            starts[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for i, name in enumerate(cached.req_ids):
            start, brought, known = cached.num_computed_tokens[i], cached.new_token_ids[i], self.tokens[name]
            missing = start + len(brought) - len(known)
            if missing > 0:
                known += brought[-missing:]
            starts[name] = start
        counts = output.num_scheduled_tokens
        return {name: (start, self.tokens[name][start : start + counts[name]]) for name, start in starts.items()}


class Launched(Future):
    """A batch; it is computed when its result is taken."""

    def __init__(self, executor: TwoStages, output: Any) -> None:
        super().__init__()
        self.executor, self.output = executor, output
        self.inputs = executor.first_stage.take_in(output)
        self.grammar: Any = None

    def result(self, timeout: float | None = None) -> Any:
        """Compute the batches up to this one, and return its result."""
        while not self.done():
            self.executor.run_oldest()
        return super().result(timeout)


class TwoStages(UniProcExecutor):
    """Launches batches without computing them; see the module."""

    supports_pp = True
    in_flight_max = 0

    def _init_executor(self) -> None:
        whole = self.vllm_config
        self.first_stage = FirstStage()
        self.launched: deque[Launched] = deque()
        self.vllm_config = copy.copy(whole)  # of the only worker
        self.vllm_config.parallel_config = copy.copy(whole.parallel_config)
        self.vllm_config.parallel_config.pipeline_parallel_size = 1
        self.vllm_config.parallel_config.world_size = 1
        super()._init_executor()
        self.vllm_config = whole

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        assert non_block
        batch = Launched(self, copy.deepcopy(scheduler_output))
        self.launched.append(batch)
        running = sum(one.output.total_num_scheduled_tokens > 0 for one in self.launched)
        TwoStages.in_flight_max = max(TwoStages.in_flight_max, running)
        return batch

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        batch = self.launched[-1]
        batch.grammar = copy.deepcopy(grammar_output)
        return batch if non_block else batch.result()

    def run_oldest(self) -> None:
        """Compute the oldest batch."""
        batch = self.launched.popleft()
        output = self.collective_rpc("execute_model", args=(batch.output,), single_value=True)
        requests = self.driver_worker.worker.model_runner.requests
        for name, (start, tokens) in batch.inputs.items():
            state = requests[name]
            wanted = [*state.prompt_token_ids, *state.output_token_ids][start : start + len(tokens)]
            assert len(tokens) == batch.output.num_scheduled_tokens[name], (name, start, tokens, wanted)
            assert tokens == wanted, (name, start, tokens, wanted)
        if output is None:
            output = self.collective_rpc("sample_tokens", args=(batch.grammar,), single_value=True)
        batch.set_result(output)


class StageWorker(CPUWorker):
    """A worker of vLLM that has the tensors which a stage receives from the stage before it."""

    def load_model(self, *arguments: Any, **options: Any) -> None:
        """Load the model, and allocate the tensors."""
        super().load_model(*arguments, **options)
        runner = self.model_runner
        if not get_pp_group().is_first_rank:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
            )
