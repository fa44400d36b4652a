"""Tokens per second beside the continuous batching of `transformers`, on the same machine and model shape."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_check import shapes
from benchmarks.gpu_check.attention_times import backends
from benchmarks.gpu_check.decode import release
from benchmarks.gpu_check.section import Section
from benchmarks.gpu_check.served import serve

REQUESTS, PROMPT, OUTPUT = 128, 512, 128
NEEDS_S = 45.0  # of the peer, with its start


def run(section: Section) -> None:
    """Ours first, then theirs, with as many requests of the same lengths, all there at the start."""
    count, prompt, output = (3, 12, 6) if section.small else (REQUESTS, PROMPT, OUTPUT)
    section.put("workload", {"requests": count, "prompt_tokens": prompt, "output_tokens": output})
    with section.trying("ours"):
        model = shapes.model(section)
        backend = backends(section, model)[0]
        served = serve(
            section, model, backend, prompt_tokens=[prompt] * count, output_tokens=[output] * count, overlap_depth=1
        )
        del model
        section.put(
            "ours", {"output_tokens_per_s": round(served.output_tokens / served.seconds), "seconds": served.seconds}
        )
        section.check("ours: all tokens came", served.output_tokens == count * output, f"{served.output_tokens} tokens")
    release(section)
    with section.trying("transformers"):
        section.needs(NEEDS_S if section.gpu else 0)
        theirs(section, count, prompt, output)
    if section.figures.get("ours") and section.figures.get("transformers"):
        ours, peer = (section.figures[name]["output_tokens_per_s"] for name in ("ours", "transformers"))
        section.put("ratio", round(ours / peer, 2))


def theirs(section: Section, count: int, prompt: int, output: int) -> None:
    """`generate_batch` of a model of the same shape, with random weights of its own."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is to be fetched, and no time lost in trying
    try:
        import transformers
    except ModuleNotFoundError:
        section.skip("transformers", "it is not installed")
        return
    dtype = torch.float32 if section.small else torch.bfloat16
    config = transformers.Qwen3Config(**{k: v for k, v in shapes.config(section).items() if k != "architectures"})
    if not hasattr(transformers.Qwen3ForCausalLM, "generate_batch"):
        section.skip("transformers", f"{transformers.__version__} has no generate_batch")
        return
    with torch.device(section.device):
        torch.set_default_dtype(dtype)
        try:
            model = transformers.Qwen3ForCausalLM(config).eval()
        finally:
            torch.set_default_dtype(torch.float32)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(3, config.vocab_size, prompt).tolist() for _ in range(count)]
    for attention in ("flash_attention_2", "paged|sdpa", "sdpa"):
        try:
            model.set_attn_implementation(attention)
            result = timed(model, transformers, prompts, output)
        except Exception as error:  # only a trial shows which of them can run here
            section.skip(f"transformers with {attention}", f"{type(error).__name__}: {error}")
            continue
        section.put("transformers", {"version": transformers.__version__, "attention": attention, **result})
        return


def timed(model: Any, transformers: Any, prompts: list[list[int]], output: int) -> dict[str, Any]:
    """A short run to warm up, then the run that counts, with the defaults of `transformers`."""

    def settings(tokens: int) -> Any:
        return transformers.GenerationConfig(
            max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
        )

    options: dict[str, Any] = {"progress_bar": False}
    if model.device.type != "cuda":  # by default it would take most of the memory
        options["continuous_batching_config"] = transformers.ContinuousBatchingConfig(
            page_size=16, num_blocks=64, max_batch_tokens=64, use_cuda_graph=False
        )
    model.generate_batch(prompts[:2], generation_config=settings(3), **options)
    before = time.perf_counter()
    results = model.generate_batch(prompts, generation_config=settings(output), **options)
    seconds = time.perf_counter() - before
    tokens = sum(len(one.generated_tokens) for one in results.values())
    if tokens < output * len(prompts):
        raise RuntimeError(f"it gave {tokens} of {output * len(prompts)} tokens")
    return {"output_tokens_per_s": round(tokens / seconds), "seconds": round(seconds, 3), "output_tokens": tokens}
