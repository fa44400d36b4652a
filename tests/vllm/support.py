"""Engines of vLLM on tiny models, mixed requests, and the comparison of answers that tests of `lockstep.vllm` share.

Importing this module sets the environment variables that vLLM reads, and does not import vllm or torch.

    with engine(model_folder("mixtral"), scheduler=LOCKSTEP, overlap=True) as llm:
        answers = run(llm, mixed_requests(40, seed=1), aborts={3: 5})
"""

from __future__ import annotations

import atexit
import gc
import importlib.util
import os
import random
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest

HAVE_VLLM = importlib.util.find_spec("vllm") is not None
needs_vllm = pytest.mark.skipif(not HAVE_VLLM, reason="vLLM is not installed here: `make vllm-test`")

for name, value in {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",  # of matrices as small as these, more threads are slower
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_DO_NOT_TRACK": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core runs in this process
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}.items():
    os.environ.setdefault(name, value)

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "packages/gpu-runtime/src/lockstep/runtime/demo_model/files"
VOCAB = 2048  # of the demo model; tiny models use its tokenizer
CONTEXT = 512

OWN = "vllm"
LOCKSTEP = "lockstep.vllm.Scheduler"

SMALL_POOL = {"num_gpu_blocks_override": 60, "max_num_batched_tokens": 512}
"""Options under which `mixed_requests` are retracted: 60 blocks of 32 tokens."""

# ---------------------------------------------------------------------------------------------------------- tiny models


@cache
def _tiny_models() -> Path:
    """The folder of all tiny models, made by a process of its own on first use: vLLM's own imports stay as they are."""
    folder = Path(tempfile.mkdtemp(prefix="lockstep-vllm-models-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    subprocess.run([sys.executable, "-W", "ignore", "-m", "tests.vllm.tiny_models", str(folder)], cwd=ROOT, check=True)
    return folder


def model_folder(family: str) -> Path:
    """Return the folder of a model: "demo", or a family of tests/vllm/tiny_models.py."""
    return DEMO if family == "demo" else _tiny_models() / family


# -------------------------------------------------------------------------------------------------------------- engines


@contextmanager
def engine(
    model: Path,
    *,
    scheduler: str = LOCKSTEP,
    overlap: bool = False,
    settings: Mapping[str, Any] | None = None,
    **options: Any,
) -> Iterator[Any]:
    """A vLLM engine (`vllm.LLM`) in this process, shut down at the end.

    Args:
        scheduler: OWN for vLLM's own scheduler, otherwise the path of a class.
        overlap: whether vLLM schedules asynchronously. Its CPU platform switches that off; here it is switched on.
        settings: settings of Lockstep (`lockstep.vllm.settings`).
        options: arguments of `vllm.LLM`, over small defaults.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from vllm import LLM
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        values = {
            "enforce_eager": True, "dtype": "float32", "max_model_len": CONTEXT, "block_size": 32, "seed": 0,
            "max_num_seqs": 64, "disable_hybrid_kv_cache_manager": True, **options,
        }  # fmt: skip
        if scheduler != OWN:
            values["scheduler_cls"] = scheduler
            if settings:
                values["additional_config"] = {"lockstep": dict(settings)}
        if (ffi := sys.modules.get("llvmlite.binding.ffi")) is not None:
            # vLLM searches the attributes of all modules for its kernels and calls `get` on what llvmlite returns.
            ffi._lib_fn_wrapper.get = lambda self, name: None
        with _overlapping(overlap):
            llm = LLM(str(model), **values)
        try:
            yield llm
        finally:
            llm.llm_engine.engine_core.shutdown()
            del llm
            gc.collect()
            cleanup_dist_env_and_memory()


@contextmanager
def _overlapping(overlap: bool) -> Iterator[None]:
    """Let engines that begin inside schedule asynchronously, or not."""
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.__dict__["check_and_update_config"]

    def changed(cls: Any, config: Any) -> None:
        original.__func__(cls, config)
        config.scheduler_config.async_scheduling = overlap

    CpuPlatform.check_and_update_config = classmethod(changed)
    try:
        yield
    finally:
        CpuPlatform.check_and_update_config = original


def scheduler_of(llm: Any) -> Any:
    """Return the scheduler object of an engine."""
    return llm.llm_engine.engine_core.engine_core.scheduler


def assert_idle(llm: Any) -> None:
    """Assert that Lockstep's scheduler has no request left, and that every invariant of the core holds."""
    from lockstep.core.invariants import check

    scheduler = scheduler_of(llm)
    check(scheduler.engine_state())
    assert not scheduler.requests
    assert scheduler.get_kv_cache_usage() == 0


# ------------------------------------------------------------------------------------------------------------- requests


@dataclass(frozen=True)
class Asked:
    """A request: the ids of its prompt, the fields of its SamplingParams, and what else `add_request` receives."""

    prompt: tuple[int, ...]
    params: dict[str, Any] = field(default_factory=dict)
    regex: str = ""  # structured output
    extra: dict[str, Any] = field(default_factory=dict)  # lora_request, priority, ...

    @property
    def greedy(self) -> bool:
        """Whether float rounding alone can change the answer: no draws, no grammar."""
        return self.params.get("temperature", 0) == 0 and not self.regex

    def sampling(self) -> Any:
        """Return its vllm.SamplingParams."""
        from vllm import SamplingParams
        from vllm.sampling_params import StructuredOutputsParams

        structured = StructuredOutputsParams(regex=self.regex) if self.regex else None
        return SamplingParams(**{"temperature": 0, "structured_outputs": structured, **self.params})


@dataclass
class Answer:
    """An answer: of each of its n samples tokens, reason and stop reason; log probabilities, rounded."""

    tokens: list[list[int]] = field(default_factory=list)
    ends: list[tuple[str | None, Any]] = field(default_factory=list)
    logprobs: list[list[dict[int, float]]] = field(default_factory=list)
    prompt_logprobs: int | None = None  # positions that have some


REGEX = r"[a-z]{3,8}( [a-z]{2,5}){1,6}\."


def mixed_requests(count: int, *, seed: int, structured: bool = True) -> list[Asked]:
    """Return greedy requests of mixed lengths with shared prefixes, logprobs, stop strings, structured output."""
    rng = random.Random(seed)
    shared = [[rng.randrange(10, VOCAB) for _ in range(rng.choice([20, 70, 150]))] for _ in range(6)]
    requests = []
    for _ in range(count):
        prefix = rng.choice(shared) if rng.random() < 0.6 else []
        prompt = prefix + [rng.randrange(10, VOCAB) for _ in range(rng.randrange(1, 120))]
        params: dict[str, Any] = {"max_tokens": rng.choice([1, 5, 20, 60, 120])}
        if rng.random() < 0.2:
            params["min_tokens"] = min(10, params["max_tokens"])
        if rng.random() < 0.2:
            params["ignore_eos"] = True
        if rng.random() < 0.1:
            params["logprobs"] = 3
        if rng.random() < 0.05:
            params["prompt_logprobs"] = 2
        if rng.random() < 0.1:
            params["stop"] = [" the"]
        regex = REGEX if rng.random() < 0.1 else ""
        requests.append(Asked(tuple(prompt), params, regex if structured else ""))
    return requests


def run(llm: Any, requests: Sequence[Asked], aborts: Mapping[int, int] | None = None) -> list[Answer]:
    """Send requests all at once and step the engine until all have ended. Returns the answers in order.

    Args:
        aborts: by number of a request, the output tokens after which it is aborted. Its answer is cut to so many.
    """
    engine, open_ = llm.llm_engine, dict(aborts or {})
    answers = [Answer() for _ in requests]
    for number, request in enumerate(requests):
        prompt = {"prompt_token_ids": list(request.prompt)}
        engine.add_request(str(number), prompt, request.sampling(), **request.extra)
    while engine.has_unfinished_requests():
        for output in engine.step():
            answer = answers[int(output.request_id)]
            _take(answer, output)
            number = int(output.request_id)
            if number in open_ and len(answer.tokens[0]) >= open_[number]:
                engine.abort_request([output.request_id])
                answer.tokens = [answer.tokens[0][: open_.pop(number)]]
                answer.ends, answer.logprobs = [("abort", None)], [[]]
    return answers


def _take(answer: Answer, output: Any) -> None:
    """Keep the newest state of a vllm.RequestOutput; outputs are cumulative, one sample at a time."""
    for sample in output.outputs:
        while len(answer.tokens) <= sample.index:
            answer.tokens.append([])
            answer.ends.append((None, None))
            answer.logprobs.append([])
        answer.tokens[sample.index] = list(sample.token_ids)
        answer.ends[sample.index] = (sample.finish_reason, sample.stop_reason)
        if sample.logprobs is not None:
            answer.logprobs[sample.index] = [
                {token: one.logprob for token, one in position.items()} for position in sample.logprobs
            ]
    if output.prompt_logprobs is not None:
        answer.prompt_logprobs = len(output.prompt_logprobs)


# ----------------------------------------------------------------------------------------------------------- comparison

TIE_GAP = 2e-3
"""The largest difference of log probabilities of two tokens for which float rounding may choose either."""

LOGPROBS_DIFFER = 5e-3  # the most by which log probabilities of equal tokens differ


def different(requests: Sequence[Asked], ours: Sequence[Answer], own: Sequence[Answer]) -> list[int]:
    """Return the numbers of requests whose answers differ: in tokens, ends, or log probabilities."""
    return [number for number in range(len(requests)) if not _equal(ours[number], own[number])]


def _equal(ours: Answer, own: Answer) -> bool:
    if (ours.tokens, ours.ends, ours.prompt_logprobs) != (own.tokens, own.ends, own.prompt_logprobs):
        return False
    for our_positions, own_positions in zip(ours.logprobs, own.logprobs, strict=True):
        if len(our_positions) != len(own_positions):
            return False
        for token, our, other in zip(_flat(ours.tokens), our_positions, own_positions, strict=False):
            del token
            if any(abs(our[one] - other[one]) > LOGPROBS_DIFFER for one in our.keys() & other.keys()):
                return False
    return True


def _flat(tokens: Sequence[Sequence[int]]) -> list[int]:
    return [token for sample in tokens for token in sample]


def not_tied(llm: Any, requests: Sequence[Asked], ours: Sequence[Answer], own: Sequence[Answer]) -> list[str]:
    """Return, in words, the differing answers that float rounding does not explain. Empty: all differences are ties.

    A difference is a tie if the request is greedy and, by this engine alone in a batch of one, the two tokens at the
    first difference have log probabilities at most TIE_GAP apart.
    """
    found = []
    for number in different(requests, ours, own):
        request = requests[number]
        if not request.greedy:
            found.append(f"request {number}: not greedy: {ours[number]} {own[number]}")
            continue
        ours_tokens, own_tokens = ours[number].tokens[0], own[number].tokens[0]
        at = next((i for i, pair in enumerate(zip(ours_tokens, own_tokens, strict=False)) if len(set(pair)) == 2), -1)
        if at < 0:
            found.append(f"request {number}: equal tokens, other ends: {ours[number].ends} {own[number].ends}")
            continue
        gap = token_gap(llm, [*request.prompt, *own_tokens[:at]], ours_tokens[at], own_tokens[at])
        if gap > TIE_GAP:
            found.append(f"request {number}: token {at} is {ours_tokens[at]} or {own_tokens[at]}, {gap:.5f} apart")
    return found


def token_gap(llm: Any, prompt: list[int], first: int, second: int) -> float:
    """Return the difference of the log probabilities of two next tokens, computed alone; infinite beyond the top 20."""
    (answer,) = run(llm, [Asked(tuple(prompt), {"max_tokens": 1, "logprobs": 20})])
    (position,) = answer.logprobs[0]
    if first not in position or second not in position:
        return float("inf")
    return abs(position[first] - position[second])
