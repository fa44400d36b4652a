"""Answers under Lockstep's scheduler and under vLLM's own, family by family: `make vllm-families`.

    python -m tests.vllm.families [FAMILY ...] [--loop sync|async] [--requests 200] [--out FILE]

A family is a kind of model, or of fields of requests. Each runs in two processes, one with vLLM's synchronous loop
and one with its asynchronous loop. A process starts one engine, runs the requests under vLLM's own scheduler, replaces
the scheduler of the idle engine by Lockstep's, and runs them again: model, weights and workers are the same. The
requests have mixed lengths and shared prefixes; some are bound to an expression; they arrive over many passes; some
clients leave; the KV pool is so small that requests are preempted.

Every answer is *equal* (tokens, ends, log probabilities within LOGPROBS_DIFFER), a *tie*, or *different*. It is a tie
if the request, alone in an engine with vLLM's own scheduler, has scores at the first unequal token that are at most TIE
apart: another batch shape rounds floats differently and turns them round. Of an answer that is drawn at random, the
score includes the noise of its seed. If Lockstep's answer equals that of the request alone and the other does not,
*vLLM differs from itself*. The exit status is 1 if an answer is different.

Run it with the interpreter of an environment that has vLLM, and PYTHONPATH as `dev.py vllm-families` sets it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from tests.vllm import features, triton_interpreter
from tests.vllm.features import (
    DEMO,
    ENVIRONMENT,
    Ask,
    eagle_head,
    engine_core,
    engine_options,
    llama,
    make_asynchronous,
    markov,
    perturbed,
    replace_scheduler,
    save_adapter,
    token_prompts,
)
from tests.vllm.media_models import AUDIO_TOKEN, IMAGE_SIDE, blip2, qwen2_audio

ROOT = Path(__file__).resolve().parents[2]
REQUESTS = 200
TIE = 2e-3
"""Largest difference of two scores (log probabilities, or these with noise) that another batch shape turns round."""
LOGPROBS_DIFFER = 5e-3
VECTORS_DIFFER = 1e-4  # of components of embeddings with norm 1
ARRIVE = 8  # requests that arrive before each pass
PASSES_MORE = 1.4  # the most passes under Lockstep for one under vLLM's own scheduler
ENCODED_MORE = 1.25  # likewise multimodal items that the encoder computes
DRAFTS_LESS = 0.85  # the least share of right drafts under Lockstep, for that under vLLM's own scheduler
TIMEOUT_S = 900

Request = Callable[[random.Random, int, dict[str, Any]], Ask]
"""Draws a request: given the generator, its number and its prompt."""


@dataclass
class Sample:
    """One sample of an answer."""

    tokens: list[int] = field(default_factory=list)
    end: tuple[str | None, Any] = (None, None)
    logprobs: list[dict[int, float]] = field(default_factory=list)


@dataclass
class Answer:
    """An answer: its samples, or the pooled vector."""

    samples: list[Sample] = field(default_factory=list)
    prompt_logprobs: list[dict[int, float]] | None = None
    vector: list[float] | None = None
    left: bool = False  # the client left


@dataclass
class Row:
    """What one run of a family found: a row of the table."""

    family: str
    loop: str
    requests: int
    equal: int
    ties: int
    own_wrong: int  # answers of Lockstep that equal those of vLLM alone, unlike those of vLLM's own scheduler
    different: int
    left: int  # clients that left
    tokens: int  # output tokens under Lockstep
    retracted: tuple[int, int]  # under vLLM's own scheduler, under Lockstep's
    cached_tokens: int  # of prompts, under Lockstep
    drafts: tuple[int, int]  # verified and right under Lockstep
    passes: tuple[int, int]  # under vLLM's own scheduler, under Lockstep's
    tie_max: float  # the largest difference of scores of a tie
    seconds: float
    why: list[str] = field(default_factory=list)  # of the first different answers, and what the run fails to show
    own_drafts: tuple[int, int] = (0, 0)  # verified and right under vLLM's own scheduler
    encoded: tuple[int, int] = (0, 0)  # multimodal items, under vLLM's own scheduler, under Lockstep's


# ------------------------------------------------------------------------------------------------------------ requests


REGEX = r"[a-z]{3,8}( [a-z]{2,5}){1,6}\."


def greedy(rng: random.Random, number: int, prompt: dict[str, Any]) -> Ask:
    """Return a greedy request. Every twelfth client leaves; some ignore the end token or have a least length."""
    from vllm import SamplingParams

    length = rng.choice([1, 5, 20, 60, 120])
    least = min(10, length) if rng.random() < 0.2 else 0
    params = SamplingParams(temperature=0, max_tokens=length, min_tokens=least, ignore_eos=rng.random() < 0.3)
    return Ask(prompt, params, abort_after=rng.randrange(1, length) if number % 12 == 11 and length > 1 else 0)


def usual(rng: random.Random, number: int, prompt: dict[str, Any]) -> Ask:
    """Return a greedy request; every twelfth is bound to an expression."""
    from vllm.sampling_params import StructuredOutputsParams

    ask = greedy(rng, number, prompt)
    if number % 12 == 5:
        ask.params.structured_outputs = StructuredOutputsParams(regex=REGEX)
        ask.params.min_tokens = 0
    return ask


def with_logprobs(rng: random.Random, number: int, prompt: dict[str, Any]) -> Ask:
    """Return a greedy request with log probabilities of its tokens, every fourth with those of its prompt."""
    ask = greedy(rng, number, prompt)
    ask.params.logprobs = rng.choice([0, 1, 5, 20])
    if number % 4 == 0:
        ask.params.prompt_logprobs = rng.choice([0, 3])
        ask.params.skip_reading_prefix_cache = True  # vLLM derives it when the parameters are made
    return ask


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "count": {"type": "integer"}},
    "required": ["name", "count"],
    "additionalProperties": False,
}


def structured(rng: random.Random, number: int, prompt: dict[str, Any]) -> Ask:
    """Return a greedy request of which four in five are bound to an expression, a schema or a choice."""
    from vllm.sampling_params import StructuredOutputsParams

    ask = greedy(rng, number, prompt)
    kinds = {0: {"regex": REGEX}, 1: {"json": SCHEMA}, 2: {"choice": ["yes", "no", "perhaps"]}, 3: {"regex": r"\d+"}}
    if kind := kinds.get(number % 5):
        ask.params.structured_outputs = StructuredOutputsParams(**kind)
        ask.params.min_tokens = 0
    return ask


def samples(rng: random.Random, number: int, prompt: dict[str, Any]) -> Ask:
    """Return a request with a seed and one to four samples; every fifth is greedy."""
    from vllm import SamplingParams

    if number % 5 == 0:
        return greedy(rng, number, prompt)
    length = rng.choice([1, 5, 20, 60])
    return Ask(prompt, SamplingParams(n=rng.randrange(1, 5), temperature=0.8, seed=number, max_tokens=length))


def pooled(rng: random.Random, number: int, prompt: dict[str, Any]) -> Ask:
    """Return a request for an embedding. Every twelfth client leaves right after it came."""
    from vllm import PoolingParams

    del rng
    return Ask(prompt, PoolingParams(task="embed"), abort_after=1 if number % 12 == 11 else 0)


def on_adapters(folder: Path) -> Request:
    """Return a drawer of greedy requests on three LoRA adapters."""
    from vllm.lora.request import LoRARequest

    paths = [save_adapter(folder / f"adapter{i}", i, 64, 4, 2, 32, 3) for i in range(3)]

    def request(rng: random.Random, number: int, prompt: dict[str, Any]) -> Ask:
        ask = usual(rng, number, prompt)
        i = rng.randrange(len(paths))
        ask.lora = LoRARequest(f"adapter{i}", i + 1, paths[i])
        return ask

    return request


def about_audio(_: Path) -> Request:
    """Return a drawer of greedy requests about up to three audio clips out of forty."""
    import numpy as np

    drawn = np.random.default_rng(0)
    clips = [drawn.normal(size=int(16_000 * seconds)).astype(np.float32) for seconds in drawn.uniform(0.3, 5, 40)]

    def request(rng: random.Random, number: int, prompt: dict[str, Any]) -> Ask:
        ids = prompt["prompt_token_ids"]
        chosen = [rng.choice(clips) for _ in range(rng.randrange(4))]
        for _ in chosen:
            ids.insert(rng.randrange(len(ids) + 1), AUDIO_TOKEN)
        if chosen:
            prompt["multi_modal_data"] = {"audio": [(clip, 16_000) for clip in chosen]}
        return usual(rng, number, prompt)

    return request


def about_images(_: Path) -> Request:
    """Return a drawer of greedy requests, three of four about one of twelve images."""
    import numpy as np
    from PIL import Image

    drawn = np.random.default_rng(0)
    shape = (IMAGE_SIDE, IMAGE_SIDE, 3)
    images = [Image.fromarray(drawn.integers(0, 256, shape, dtype=np.uint8)) for _ in range(12)]

    def request(rng: random.Random, number: int, prompt: dict[str, Any]) -> Ask:
        if rng.random() < 0.75:
            prompt["multi_modal_data"] = {"image": rng.choice(images)}
        return usual(rng, number, prompt)

    return request


# ------------------------------------------------------------------------------------------------------------ families


def always(request: Request) -> Callable[[Path], Request]:
    """Return a maker of a drawer that requires no files."""
    return lambda _: request


USUAL = ("retracted", "cached_tokens")
DRAFTS = (*USUAL, "drafts")
MEDIA = (*USUAL, "freed")


@dataclass(frozen=True)
class Family:
    """A kind of model or of requests, and how its engine is made."""

    title: str
    options: Callable[[Path], dict[str, Any]]  # of the engine, given a folder for the model
    requests: Callable[[Path], Request] = lambda _: usual  # given a folder for the files that they name
    loops: tuple[str, ...] = ("sync", "async")
    why: str = ""  # why a loop is missing
    longest: int = 120  # tokens of a prompt behind its shared prefix
    lockstep: dict[str, Any] = field(default_factory=dict)  # settings of Lockstep
    shows: tuple[str, ...] = USUAL  # counts that must not be 0
    runner_v2: bool = False  # by vLLM's model runner V2


def tiny(family: str, **options: Any) -> Callable[[Path], dict[str, Any]]:
    """Return the maker of an engine on a model of tests/vllm/tiny_models.py."""

    def make(folder: Path) -> dict[str, Any]:
        from tests.vllm.tiny_models import FAMILIES as MODELS

        return engine_options(features.save_model(folder / family, MODELS[family]()), **options)

    return make


def encoder(folder: Path) -> dict[str, Any]:
    """Return options of an engine on an encoder without KV cache."""
    import transformers

    sizes = features.small(num_attention_heads=2)
    del sizes["num_key_value_heads"], sizes["tie_word_embeddings"]
    model = features.save_model(folder / "bert", transformers.BertConfig(**sizes), auto="AutoModel")
    return engine_options(model, runner="pooling")


def audio(folder: Path) -> dict[str, Any]:
    """Return options of an engine on a small Qwen2-Audio, with passes that split clips."""
    model, limits = qwen2_audio(folder), {"audio": 3}
    return engine_options(model, limit_mm_per_prompt=limits, max_num_batched_tokens=100, max_model_len=1024)


def vision(folder: Path) -> dict[str, Any]:
    """Return options of an engine on a small BLIP-2, with an encoder cache that holds six images."""
    return engine_options(blip2(folder), limit_mm_per_prompt={"image": 1}, max_num_batched_tokens=100)


def drafting(method: str) -> Callable[[Path], dict[str, Any]]:
    """Return the maker of an engine with drafts."""

    def make(folder: Path) -> dict[str, Any]:
        drafts: dict[str, Any] = {"method": method, "num_speculative_tokens": 3}
        if method == "mtp":
            return engine_options(mimo(folder), speculative_config=drafts | {"num_speculative_tokens": 1})
        model = markov(folder)
        if method == "ngram":
            drafts["prompt_lookup_max"] = 3
        else:
            drafts["model"] = str(eagle_head(model, folder) if method == "eagle" else perturbed(model, folder, 0.02))
        return engine_options(model, speculative_config=drafts)

    return make


def mimo(folder: Path) -> Path:
    """Save a small MiMo, a Qwen2 with one layer that predicts the token after the next. Returns its folder.

    The layer passes the embedding of the newest token on, as that of `eagle_head` does.
    """
    import torch
    import transformers
    from safetensors.torch import load_file, save_file

    config = transformers.Qwen2Config(**features.small(hidden_size=128))
    model = features.save_model(folder / "mimo", config, scale=features.markov_scale)
    tensors = load_file(str(model / "model.safetensors"))
    generator = torch.Generator().manual_seed(3)
    size = tensors["model.norm.weight"].shape[0]
    own = "model.mtp_layers.0."
    for name, tensor in list(tensors.items()):  # the layer of the drafter has the shapes of the model's layers
        if name.startswith("model.layers.0."):
            noise = torch.randn(tensor.shape, generator=generator) * 0.06
            tensors[own + name.removeprefix("model.layers.0.")] = torch.ones_like(tensor) if "norm" in name else noise
    tensors |= {f"{own}{name}.weight": torch.ones(size) for name in ("token_layernorm", "hidden_layernorm")}
    tensors[f"{own}final_layernorm.weight"] = torch.ones(size)
    tensors[f"{own}input_proj.weight"] = torch.cat((torch.zeros(size, size), torch.eye(size)), dim=1).contiguous()
    save_file(tensors, str(model / "model.safetensors"), metadata={"format": "pt"})
    settings = json.loads((model / "config.json").read_text())
    settings |= {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    (model / "config.json").write_text(json.dumps(settings))
    return model


def recurrent(name: str, **options: Any) -> Callable[[Path], dict[str, Any]]:
    """Return the maker of an engine on a model with recurrent state, without prefix caching."""

    def make(folder: Path) -> dict[str, Any]:
        from tests.vllm.tiny_models import RECURRENT

        model = features.save_model(folder / name, RECURRENT[name]())
        usual = engine_options(model, enable_prefix_caching=False, max_num_batched_tokens=200)
        del usual["block_size"]  # vLLM chooses one in which a state fits
        return usual | options

    return make


def with_host_tier(folder: Path) -> dict[str, Any]:
    """Return options of an engine with host memory below its KV cache; vLLM's own scheduler does not use it."""
    from lockstep.vllm.host_tier import HostTier
    from lockstep.vllm.tiers import CONNECTOR

    HostTier.refuse_other_schedulers = staticmethod(lambda: None)  # here vLLM's own runs with it, without copies
    tier = {"kv_role": "kv_both", "kv_connector_extra_config": {"host_gb": 0.01}}
    tier |= dict(zip(("kv_connector", "kv_connector_module_path"), CONNECTOR, strict=True))
    return engine_options(llama(folder), kv_transfer_config=tier)


def in_stages(folder: Path) -> dict[str, Any]:
    """Return options of an engine with two pipeline stages, as an executor of tests/vllm/stages.py has them."""
    from tests.vllm.stages import STAGES, TwoStages

    stages = {"pipeline_parallel_size": STAGES, "distributed_executor_backend": TwoStages}
    return engine_options(DEMO, **stages)


def in_two_processes(folder: Path) -> dict[str, Any]:
    """Return options of an engine with two workers, each with half of the layers."""
    options = {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}
    return engine_options(llama(folder), **options, worker_cls="tests.vllm.stages.StageWorker")


def on_llama(**options: Any) -> Callable[[Path], dict[str, Any]]:
    """Return the maker of an engine on a small Llama."""
    return lambda folder: engine_options(llama(folder), **options)


STAGES = "Lockstep refuses pipeline stages with asynchronous scheduling by name"
LATENT = "on CPUs vLLM's own answers differ by loop, 29 of 40, and from those of the request alone, 37 of 40"
DRAWS = "a retraction drops the draw in flight, and the generator of vLLM's workers has moved on by then"
NGRAM = "vLLM itself refuses n-gram drafts with asynchronous scheduling"
FAMILIES = {
    "dense": Family("dense, grouped queries (Llama)", on_llama()),
    "trained": Family("dense, trained (the demo model)", lambda _: engine_options(DEMO)),
    "moe": Family("mixture of experts (Mixtral)", tiny("mixtral")),
    "mla": Family(
        "latent attention (DeepSeek-V2)",
        tiny("deepseek"),
        always(greedy),  # a grammar, compiled beside the passes, would change the batches and so these answers
        loops=("sync",),
        why=LATENT,
        shows=("retracted",),
    ),
    "encoder": Family("encoder, pooling (BERT)", encoder, always(pooled), longest=300, shows=()),
    "embedding": Family(
        "decoder, pooling (Llama)",
        on_llama(runner="pooling", convert="embed", max_num_batched_tokens=100, enable_chunked_prefill=True),
        always(pooled),
        longest=300,
        shows=(),  # the core reads no cached prefix for an embedding
    ),
    "windows": Family(
        "sliding windows (Gemma 3)",
        tiny("gemma3", num_gpu_blocks_override=90),
        lockstep={"mean_request_tokens": 160},
    ),
    "mamba": Family("recurrent state only (Mamba-2)", recurrent("mamba2", num_gpu_blocks_override=20), shows=()),
    "hybrid": Family(
        "recurrent state and attention (Granite 4)",
        recurrent("granite", block_size=32, num_gpu_blocks_override=100),
        lockstep={"mean_request_tokens": 64},
        shows=("retracted",),
    ),
    "parallel": Family(
        "recurrent state beside attention (Falcon-H1)",
        recurrent("falcon_h1", block_size=32, num_gpu_blocks_override=100),
        lockstep={"mean_request_tokens": 64},
        shows=("retracted",),
    ),
    "audio": Family("multimodal, audio (Qwen2-Audio)", audio, about_audio, longest=60, shows=MEDIA),
    "vision": Family("multimodal, images (BLIP-2)", vision, about_images, shows=MEDIA),
    "lora": Family(
        "LoRA, three adapters, two at once",
        on_llama(enable_lora=True, max_loras=2, max_lora_rank=8, max_cpu_loras=3),
        on_adapters,
    ),
    "ngram": Family("n-gram drafts", drafting("ngram"), loops=("sync",), why=NGRAM, shows=DRAFTS),
    "draft_model": Family("drafts of a model", drafting("draft_model"), shows=DRAFTS),
    "eagle": Family("drafts of an EAGLE head", drafting("eagle"), shows=DRAFTS),
    "mtp": Family("drafts of an MTP layer (MiMo)", drafting("mtp"), shows=DRAFTS),
    "host_tier": Family("host memory below the KV cache (HostTier)", with_host_tier, shows=(*USUAL, "loaded")),
    "structured": Family("structured output", lambda _: engine_options(DEMO), always(structured)),
    "stages": Family(
        "two pipeline stages, emulated (the demo model)",
        in_stages,
        always(structured),
        loops=("sync",),
        why=STAGES,
        shows=(*USUAL, "in_flight"),
    ),
    "stage_processes": Family(
        "two pipeline stages, a process each (Llama)",
        in_two_processes,
        loops=("sync",),
        why=STAGES,
        shows=(*USUAL, "in_flight"),
    ),
    "samples": Family(
        "n above 1, seeded draws",
        on_llama(max_num_batched_tokens=4096),
        always(samples),
        loops=("sync",),
        why=DRAWS,
    ),
    "samples_roomy": Family(
        "n above 1, seeded draws, without preemption",
        on_llama(max_num_batched_tokens=4096, num_gpu_blocks_override=2_000),
        always(samples),
        shows=("cached_tokens",),
    ),
    "logprobs": Family("log probabilities", on_llama(), always(with_logprobs)),
    "v2_dense": Family(
        "model runner V2: dense (Llama)", tiny("llama"), always(greedy), runner_v2=True
    ),  # without grammars: Triton's interpreter does not run the kernel of their masks
    "v2_draft_model": Family(
        "model runner V2: drafts of a model",
        drafting("draft_model"),
        always(greedy),
        loops=("sync",),
        why="drafts with it and asynchronous scheduling are refused",
        shows=DRAFTS,
        runner_v2=True,
    ),
}


# ----------------------------------------------------------------------------------------------------------------- run

NAMES = count()


def run(llm: Any, asks: list[Ask]) -> list[Answer]:
    """Return the answers of requests that arrive ARRIVE before each pass.

    A client that leaves has its part of the answer.
    """
    engine = llm.llm_engine
    names = [f"ask-{next(NAMES)}" for _ in asks]
    numbers = {name: i for i, name in enumerate(names)}
    answers = [Answer() for _ in asks]
    leaving = {name: ask.abort_after for name, ask in zip(names, asks, strict=True) if ask.abort_after}
    arrived = 0
    while arrived < len(asks) or engine.has_unfinished_requests():
        for name, ask in zip(names[arrived : arrived + ARRIVE], asks[arrived : arrived + ARRIVE], strict=True):
            engine.add_request(name, ask.prompt, ask.params.clone(), lora_request=ask.lora)
        arrived += ARRIVE
        for output in engine.step():
            number = numbers[output.request_id]
            answer = answers[number]
            take(answer, output)
            most = leaving.get(output.request_id, 0)
            if most and answer.samples and len(answer.samples[0].tokens) >= most:
                del leaving[output.request_id]
                engine.abort_request([output.request_id])
                leave(answer, most)
        for name in [one for one in leaving if numbers[one] < arrived and is_pooled(asks[numbers[one]])]:
            del leaving[name]
            engine.abort_request([name])
            answers[numbers[name]].left = True
    return answers


def is_pooled(ask: Ask) -> bool:
    """Whether a request is for a vector."""
    return type(ask.params).__name__ == "PoolingParams"


def take(answer: Answer, output: Any) -> None:
    """Take in an output of vLLM's front end: cumulative, one sample at a time."""
    if hasattr(output.outputs, "data"):
        answer.vector = output.outputs.data.tolist()
        return
    for one in output.outputs:
        while len(answer.samples) <= one.index:
            answer.samples.append(Sample())
        sample = answer.samples[one.index]
        sample.tokens, sample.end = list(one.token_ids), (one.finish_reason, one.stop_reason)
        sample.logprobs = positions(one.logprobs or ())
    if output.prompt_logprobs is not None:
        answer.prompt_logprobs = positions(output.prompt_logprobs)


def positions(logprobs: Iterable[Any]) -> list[dict[int, float]]:
    """Return log probabilities by token for each position."""
    return [{token: one.logprob for token, one in (position or {}).items()} for position in logprobs]


def leave(answer: Answer, most: int) -> None:
    """Cut an answer to what its client waited for."""
    answer.left = True
    for sample in answer.samples:
        sample.tokens, sample.logprobs, sample.end = sample.tokens[:most], sample.logprobs[:most], ("left", None)


class Counts:
    """Counts of what one scheduler let the workers do."""

    def __init__(self, scheduler: Any) -> None:
        self.passes = self.drafts = self.right = self.retracted = self.in_flight = self.encoded = self.freed = 0
        self._open = 0  # passes without result
        self._schedule = scheduler.schedule
        scheduler.schedule = self._scheduling
        self._update = scheduler.update_from_output
        scheduler.update_from_output = self._counting

    def _scheduling(self, *arguments: Any) -> Any:
        output = self._schedule(*arguments)
        self._open += bool(output.num_scheduled_tokens)
        self.in_flight = max(self.in_flight, self._open)
        return output

    def _counting(self, output: Any, result: Any) -> Any:
        self._open -= bool(output.num_scheduled_tokens)
        self.passes += bool(output.num_scheduled_tokens)
        self.retracted += len(output.preempted_req_ids or ())
        self.encoded += sum(len(inputs) for inputs in output.scheduled_encoder_inputs.values())
        self.freed += len(output.free_encoder_mm_hashes)
        for name, drafts in output.scheduled_spec_decode_tokens.items():
            if drafts and name in result.req_id_to_index:
                self.drafts += len(drafts)
                self.right += max(len(result.sampled_token_ids[result.req_id_to_index[name]]) - 1, 0)
        return self._update(output, result)

    def more_work_than(self, own: Counts) -> list[str]:
        """Return, in words, where this scheduler had the workers do clearly more than the other."""
        found = []
        if self.passes > PASSES_MORE * own.passes:
            found.append(f"{self.passes} passes, and {own.passes} under vLLM's own scheduler")
        if self.encoded > ENCODED_MORE * own.encoded:
            found.append(f"{self.encoded} items are encoded, and {own.encoded} under vLLM's own scheduler")
        if self.right * own.drafts < DRAFTS_LESS * own.right * self.drafts:
            found.append(
                f"{self.right} of {self.drafts} drafts are right, and {own.right} of {own.drafts} under vLLM's"
            )
        return found


# ---------------------------------------------------------------------------------------------------------- comparison


def difference(llm: Any, ask: Ask, own: Answer, ours: Answer) -> tuple[str, float]:
    """Return how two answers differ, "" if they are equal, and the difference of scores of a tie.

    The difference is infinite if it is no tie.
    """
    if is_pooled(ask):
        if own.vector is None or ours.vector is None:  # a client that left before the result
            return ("" if own.left and ours.left else "one has no vector"), float("inf")
        most = max(abs(a - b) for a, b in zip(own.vector, ours.vector, strict=True))
        return ("" if most <= VECTORS_DIFFER else f"vectors are {most:.2e} apart"), float("inf")
    if len(own.samples) != len(ours.samples):
        return f"{len(own.samples)} and {len(ours.samples)} samples", float("inf")
    if not close(own.prompt_logprobs or [], ours.prompt_logprobs or []):
        return "log probabilities of the prompt", float("inf")
    text, largest = "", 0.0
    for index, (one, other) in enumerate(zip(own.samples, ours.samples, strict=True)):
        if one.tokens == other.tokens:
            if one.end != other.end:
                return f"sample {index}: ends {one.end} and {other.end}", float("inf")
            if not close(one.logprobs, other.logprobs):
                return f"sample {index}: log probabilities", float("inf")
            continue
        pairs = enumerate(zip(one.tokens, other.tokens, strict=False))
        at = next((i for i, (a, b) in pairs if a != b), None)
        if at is None:
            return f"sample {index}: {len(one.tokens)} and {len(other.tokens)} tokens", float("inf")
        text = f"sample {index}: token {at} is {one.tokens[at]} and {other.tokens[at]}"
        gap = score_gap(llm, ask, index, one.tokens[:at], (one.tokens[at], other.tokens[at]))
        largest = max(largest, gap)
    return text, largest


def close(own: list[dict[int, float]], ours: list[dict[int, float]]) -> bool:
    """Whether log probabilities of the same tokens are equal but for rounding."""
    return len(own) == len(ours) and all(
        abs(one[token] - other[token]) <= LOGPROBS_DIFFER
        for one, other in zip(own, ours, strict=True)
        for token in one.keys() & other.keys()
    )


def score_gap(llm: Any, ask: Ask, index: int, before: list[int], tokens: tuple[int, int]) -> float:
    """Return how far apart the scores of two next tokens are, computed for the request alone.

    Of a draw, the score of a token is its scaled log probability and the noise of the request's seed. Its difference is
    found by changing the log probabilities until the sampler chooses either token; it is infinite above TIE.
    """
    import torch
    from vllm import SamplingParams

    prompt = {**ask.prompt, "prompt_token_ids": [*ask.prompt["prompt_token_ids"], *before]}
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=-1, ignore_eos=True)
    (answer,) = llm.generate([prompt], [params], use_tqdm=False, lora_request=ask.lora)
    found = {token: one.logprob for token, one in answer.outputs[0].logprobs[0].items()}
    gap = abs(found[tokens[0]] - found[tokens[1]])
    if not ask.params.temperature:
        return gap
    scores = torch.full((max(found) + 1,), -float("inf"))
    scores[list(found)] = torch.tensor(list(found.values())) / ask.params.temperature
    generator = torch.Generator().manual_seed(ask.params.seed + index)
    for _ in range(len(before) + 1):
        seed = torch.randint(0, 2**31, (1,), generator=generator, dtype=torch.long)
    for shift in (TIE / 100, TIE / 10, TIE):
        chosen = []
        for sign in (1, -1):
            changed = scores.clone()
            changed[tokens[0]] += sign * shift / 2
            changed[tokens[1]] -= sign * shift / 2
            chosen.append(int(torch.ops._C.fused_gumbel_argmax(changed.unsqueeze(0), seed)))
        if chosen == list(tokens):
            return shift
    return float("inf")


def is_right(llm: Any, ask: Ask, ours: Answer) -> bool:
    """Whether an answer equals that of the request alone under vLLM's own scheduler, but for a tie."""
    (alone,) = run(llm, [ask])
    text, gap = difference(llm, ask, alone, ours)
    return not text or gap <= TIE


def compare(name: str, loop: str, folder: Path, requests: int) -> Row:
    """Run a family under both schedulers."""
    from vllm import LLM

    from lockstep.core.invariants import check
    from lockstep.core.journal.replay import replay

    began = time.monotonic()
    family = FAMILIES[name]
    request = family.requests(folder)
    options = {"max_logprobs": -1, **family.options(folder)}
    if "runner" in options:
        del options["max_logprobs"]
    llm = LLM(**options)
    core = engine_core(llm)
    rng = random.Random(9)
    asks = [request(rng, i, one) for i, one in enumerate(token_prompts(requests, 9, family.longest))]
    own_scheduler = core.scheduler
    own_counts = Counts(own_scheduler)
    own = run(llm, asks)
    scheduler = replace_scheduler(llm, {"journal": str(folder / "journal")} | family.lockstep)
    counts = Counts(scheduler)
    features.check_often(scheduler.engine_state(), check, every=64)
    ours = run(llm, asks)
    engine = scheduler.engine_state()
    check(engine)
    why = [f"{len(scheduler.requests)} requests are left"] if scheduler.requests else []
    while scheduler.has_requests():
        core.step_fn()  # the workers free the last requests
    scheduler.shutdown()
    replay(folder / "journal")  # every digest must be equal
    core.scheduler = own_scheduler
    core.reset_prefix_cache()
    core.reset_encoder_cache()
    found = [difference(llm, *one) for one in zip(asks, own, ours, strict=True)]
    ties = [gap for text, gap in found if text and gap <= TIE]
    wrong = [i for i, (text, gap) in enumerate(found) if text and gap > TIE and is_right(llm, asks[i], ours[i])]
    retracted, cached = engine.counts.retractions, engine.counts.cached_tokens
    shown = {"retracted": retracted, "cached_tokens": cached, "drafts": counts.right, "in_flight": counts.in_flight > 1}
    shown |= {"loaded": scheduler._copies.loaded_pages, "freed": counts.freed}
    why += counts.more_work_than(own_counts)
    why += [f"the run shows no {one}" for one in family.shows if not shown[one]]
    why += [
        f"request {i}: {text}, {gap:.5f} apart"
        for i, (text, gap) in enumerate(found)
        if text and gap > TIE and i not in wrong
    ]
    return Row(
        family=name,
        loop=loop,
        requests=len(asks),
        equal=sum(not text for text, _ in found),
        ties=len(ties),
        own_wrong=len(wrong),
        different=sum(bool(text) and gap > TIE for text, gap in found) - len(wrong),
        left=sum(one.left for one in ours),
        tokens=sum(len(sample.tokens) for answer in ours for sample in answer.samples),
        retracted=(own_counts.retracted, retracted),
        cached_tokens=cached,
        drafts=(counts.drafts, counts.right),
        passes=(own_counts.passes, counts.passes),
        tie_max=max(ties, default=0.0),
        seconds=round(time.monotonic() - began, 1),
        why=why[:8],
        own_drafts=(own_counts.drafts, own_counts.right),
        encoded=(own_counts.encoded, counts.encoded),
    )


# --------------------------------------------------------------------------------------------------------- as a program


def row_of(name: str, loop: str, requests: int = REQUESTS) -> Row:
    """Run a family in a process of its own. Raises: RuntimeError with the end of its output if it fails."""
    with tempfile.TemporaryDirectory(prefix="lockstep-vllm-") as folder:
        command = [sys.executable, "-W", "ignore", "-m", "tests.vllm.families", "--one", name, "--loop", loop]
        command += ["--requests", str(requests), "--folder", folder]
        environment = {**os.environ, **ENVIRONMENT}
        if FAMILIES[name].runner_v2:
            environment |= triton_interpreter.ENVIRONMENT
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    if done.returncode:
        raise RuntimeError(f"{name}, {loop}:\n{done.stdout[-2000:]}{done.stderr[-6000:]}")
    return Row(**json.loads(done.stdout.splitlines()[-1]))


COLUMNS: dict[str, Callable[[Row], object]] = {
    "loop": lambda row: row.loop,
    "requests": lambda row: row.requests,
    "equal": lambda row: row.equal,
    "ties": lambda row: row.ties,
    "vLLM differs from itself": lambda row: row.own_wrong,
    "different": lambda row: row.different,
    "clients left": lambda row: row.left,
    "preempted: vLLM, Lockstep": lambda row: "{}, {}".format(*row.retracted),
    "cached tokens": lambda row: f"{row.cached_tokens:,}",
    "drafts right": lambda row: "{1} of {0}".format(*row.drafts) if row.drafts[0] else "",
}
HEADER = f"| family | {' | '.join(COLUMNS)} |\n{'|---' * (len(COLUMNS) + 1)}|"


def line(row: Row) -> str:
    """Return a row as a line of the Markdown table."""
    return f"| {' | '.join([FAMILIES[row.family].title, *(str(value(row)) for value in COLUMNS.values())])} |"


def store(rows: list[Row], path: Path) -> None:
    """Write rows as JSON, and their table beside it as .txt. Rows of other runs that the file has stay there."""
    stored = [Row(**one) for one in json.loads(path.read_text())] if path.exists() else []
    by_run = {(row.family, row.loop): row for row in (*stored, *rows)}
    rows = [by_run[run] for name in FAMILIES for loop in ("sync", "async") if (run := (name, loop)) in by_run]
    path.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    path.with_suffix(".txt").write_text("\n".join([HEADER, *map(line, rows)]) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare answers under vLLM's own scheduler and Lockstep's.")
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=f"all if none is named: {', '.join(FAMILIES)}")
    parser.add_argument("--loop", choices=("sync", "async"), help="one loop instead of both")
    parser.add_argument("--requests", type=int, default=REQUESTS, help=f"of each run; {REQUESTS} if not given")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write rows there, and the table as .txt; others stay")
    parser.add_argument("--one", choices=FAMILIES, help=argparse.SUPPRESS)  # one run in this process
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        if FAMILIES[options.one].runner_v2:
            triton_interpreter.interpret()
        if options.loop == "async":
            make_asynchronous()
        print(json.dumps(asdict(compare(options.one, options.loop, options.folder, options.requests))))
        return 0
    if unknown := [name for name in options.families if name not in FAMILIES]:
        parser.error(f"no family `{unknown[0]}`; families are {', '.join(FAMILIES)}")
    rows, failed = [], []
    print(HEADER)
    for name in options.families or FAMILIES:
        for loop in (options.loop,) if options.loop else FAMILIES[name].loops:
            try:
                row = row_of(name, loop, options.requests)
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                failed.append(f"{name}, {loop}: failed")
                print(f"{name}, {loop}: failed\n{error}", file=sys.stderr, flush=True)
                continue
            rows.append(row)
            if options.out:
                store(rows, options.out)
            print(line(row), flush=True)
            for one in row.why:
                failed.append(f"{name}, {loop}: {one}")
                print(failed[-1], file=sys.stderr, flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
