"""The whole engine with the demo model: every backend, with and without graphs, at every depth of overlap.

Then a small mixture of experts; and what is read off the model: vectors, scores, hidden states.

The truth is the reference backend in fp32, one batch at a time. Another order of additions may turn a tie, so a token
that differs is judged by the truth's own logits: its regret is how far below the best it lies there. In fp32 tokens
must be the same or tie; in half precision their regret must be small.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_check.section import Section
from lockstep.core.contract.errors import ConfigError
from lockstep.core.journal.replay import replay
from lockstep.runtime import LLM, Params
from lockstep.runtime.attention import make
from lockstep.runtime.executor import Executor
from lockstep.runtime.forward import ForwardBatch
from lockstep.runtime.kv_pool import KvPool
from lockstep.runtime.llm import demo_folder
from lockstep.runtime.models import Decoder
from lockstep.runtime.ranks import LeadExecutor
from tests.support.heads import saved_head

REGRET = {"float32": 1e-3, "float16": 0.02, "bfloat16": 0.1}  # of logits, with a spread of about 10
READINGS_FAR = 1e-3  # of what is largest in the same array
TRUTH: dict[str, Any] = {"attention_backend": "reference", "cuda_graphs": "off", "overlap_depth": 0}
SCHED: dict[str, Any] = {"max_running_requests": 16, "chunked_prefill_size": 256, "pages": 1024}
SAMPLED = (
    Params(temperature=0.8, seed=1, ignore_eos=True),
    Params(temperature=0.8, top_k=20, top_p=0.9, min_p=0.02, seed=2, logprobs=2, ignore_eos=True),
    Params(temperature=1.0, repetition_penalty=1.1, frequency_penalty=0.1, logit_bias={3: 0.5}, seed=3),
    Params(min_new_tokens=4, stop_token_ids=(5,), prompt_logprobs=True),
)
BEGINNINGS = (
    "Returns the number of",
    "This function",
    "def ",
    "The list of",
    "If the argument is omitted,",
    "Raises an error",
    "A class is",
    "The following",
)


@dataclass(frozen=True)
class Variant:
    """One way to run the same requests."""

    name: str
    dtype: str = "float32"
    options: dict[str, Any] = field(default_factory=dict)
    watched: bool = False  # a launch that waits for the device is an error


def variants(section: Section) -> Iterator[Variant]:
    """The riskiest first."""
    if not section.gpu:
        for depth, graphs in ((0, "off"), (1, "eager"), (2, "eager")):
            options = {"attention_backend": "reference", "cuda_graphs": graphs, "overlap_depth": depth}
            yield Variant(f"reference, graphs {graphs}, overlap {depth}", options=options)
        several = {"attention_backend": "reference", "cuda_graphs": "eager", "decode_steps_per_launch": 4}
        yield Variant("reference, four steps a launch", options=several)
        for name, options in in_pieces("reference", "eager").items():
            yield Variant(name, options=options)
        yield Variant("reference, no launch may wait", options={"attention_backend": "reference"}, watched=True)
        yield Variant("reference, trees of a head", options={"attention_backend": "reference", **trees(section)})
        return
    for graphs in ("on", "off"):
        for depth in (1, 0, 2):
            options = {"attention_backend": "triton", "cuda_graphs": graphs, "overlap_depth": depth}
            yield Variant(f"triton float32, graphs {graphs}, overlap {depth}", options=options)
    for backend in ("triton", "flashinfer"):
        for graphs in ("on", "off"):
            options = {"attention_backend": backend, "cuda_graphs": graphs}
            yield Variant(f"{backend} bfloat16, graphs {graphs}, overlap 1", "bfloat16", options)
    for backend in ("triton", "flashinfer"):
        options = {"attention_backend": backend, "cuda_graphs": "on"}
        yield Variant(f"{backend} bfloat16, no launch may wait", "bfloat16", options, watched=True)
    with_a_head = trees(section)
    yield Variant("triton float32, trees of a head", options={"attention_backend": "triton", **with_a_head})
    for backend in ("triton", "flashinfer"):
        options = {"attention_backend": backend, **with_a_head}
        yield Variant(f"{backend} bfloat16, trees of a head", "bfloat16", options, watched=backend == "triton")
    for graphs in ("on", "off"):
        several = {"attention_backend": "triton", "cuda_graphs": graphs, "decode_steps_per_launch": 4}
        yield Variant(f"triton float32, graphs {graphs}, four steps a launch", options=several)
    stirred: dict[str, Any] = {"retract_every": 5, "batching": "mixed", "overlap_depth": 2, "debug": True}
    yield Variant(
        "triton float32, mixed, retractions, every KV slot verified", options={**stirred, "attention_backend": "triton"}
    )
    for backend in ("triton", "flashinfer"):
        for name, options in in_pieces(backend, "on").items():
            yield Variant(f"{name}, bfloat16", "bfloat16", options)
    if torch.cuda.device_count() > 1:
        for graphs in ("on", "off"):
            two: dict[str, Any] = {"tp": 2, "attention_backend": "triton", "cuda_graphs": graphs}
            yield Variant(f"triton float32, two ranks, graphs {graphs}", options=two)
        for depth in (0, 1):
            stages: dict[str, Any] = {"pp": 2, "attention_backend": "triton", "overlap_depth": depth}
            yield Variant(f"triton float32, two stages, overlap {depth}", options=stages)
    yield Variant("triton bfloat16, invariant", "bfloat16", {"attention_backend": "triton", "numerics": "invariant"})


def in_pieces(backend: str, graphs: str) -> dict[str, dict[str, Any]]:
    """Engines whose extends, mixed passes and verifications run in pieces of graphs, by name; and one whose do not."""
    usual = {"attention_backend": backend, "cuda_graphs": graphs, "chunked_prefill_size": 64}
    return {
        f"{backend}, mixed passes in pieces": {**usual, "batching": "mixed"},
        f"{backend}, drafts in pieces": {**usual, "speculative_method": "ngram", "num_speculative_tokens": 3},
        f"{backend}, no pieces": {**usual, "batching": "mixed", "piecewise_graph_max_tokens": 0},
    }


def run(section: Section) -> None:
    """Every variant of the demo model, a few of a mixture of experts, and what is read off the model."""
    compare(section, Variant("the truth", options=TRUTH), variants(section))
    experts = {"model": experts_folder(section), "random_weights": 3}
    compare(
        section,
        Variant("the truth of experts", options={**TRUTH, **experts}),
        [replace(one, name=f"experts, {one.name}", options={**one.options, **experts}) for one in few(section)],
    )
    with section.trying("vectors, scores, hidden states"):
        section.needs(5)
        readings(section)
    with section.trying("memory released below graphs"):
        section.needs(10)
        released(section)


def few(section: Section) -> list[Variant]:
    """With graphs and without, in fp32; and whole experts on two GPUs."""
    backend, graphs = ("triton", "on") if section.gpu else ("reference", "eager")
    found = [
        Variant(f"{backend}, graphs {one}", options={"attention_backend": backend, "cuda_graphs": one})
        for one in (graphs, "off")
    ]
    if section.gpu and torch.cuda.device_count() > 1:
        whole = {"tp": 2, "ep": 2, "attention_backend": backend}
        found += [
            Variant(f"{backend}, two ranks, whole experts, graphs {graphs}", options={**whole, "cuda_graphs": graphs})
        ]
        found += [Variant(f"{backend}, two ranks, tokens sent to experts", options={**whole, "moe_a2a": True})]
    return found


def trees(section: Section) -> dict[str, Any]:
    """Options for trees of drafts by a head of EAGLE-3 with random weights, which is hardly ever right."""
    folder = section.part.with_suffix("") / "head"
    folder.parent.mkdir(parents=True, exist_ok=True)
    return {"draft_model": str(saved_head(folder, 1)), "speculative_topk": 3, "num_speculative_tokens": 8}


def experts_folder(section: Section) -> Path:
    """Settings of a small Qwen3-MoE for random weights, with the demo model's tokenizer."""
    folder = section.part.with_suffix("") / "experts"
    shutil.copytree(demo_folder(), folder, ignore=lambda _, names: [one for one in names if "safetensors" in one])
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def readings(section: Section) -> None:
    """What is not drawn, by the fastest way and by the reference."""
    prompts, _ = requests(section)
    fast = {} if section.gpu else {"attention_backend": "reference", "cuda_graphs": "eager"}
    found, wanted = read_off(section, prompts, fast), read_off(section, prompts, TRUTH)
    for name, arrays in found.items():
        pairs = zip(arrays, wanted[name], strict=True)
        far = max(float(np.abs(one - other).max() / np.abs(other).max()) for one, other in pairs)
        section.check(f"{name} as of the reference", far <= READINGS_FAR, f"off by {far:.2g}, {READINGS_FAR} allowed")


def read_off(section: Section, prompts: list[list[int]], options: dict[str, Any]) -> dict[str, list[Any]]:
    """Vectors, logprobs of labels, and hidden states of prompts with their answers."""
    with LLM(device=str(section.device), dtype="float32", **{**SCHED, **options}) as llm:
        said = llm.generate(list(prompts), Params(max_new_tokens=3, ignore_eos=True, hidden_states=True))
        return {
            "vectors": [one.vector for one in llm.embed(list(prompts))],
            "scores": [np.array(one.logprobs) for one in llm.score(list(prompts), [5, [7, 8], 300])],
            "hidden states": [one.hidden_states for one in said],
        }


def released(section: Section) -> None:
    """Tokens and replays after a release of weights and KV, with graphs on a GPU, and how much the driver got back."""
    prompts, _ = requests(section)
    options = {**SCHED, "cuda_graphs": "on", "memory_saver": True} if section.gpu else {**SCHED, "cuda_graphs": "eager"}
    with LLM(device=str(section.device), dtype="float32", **options) as llm:
        params = Params(max_new_tokens=8, ignore_eos=True)
        before = [one.token_ids for one in llm.generate(list(prompts), params)]
        free = torch.cuda.mem_get_info()[0] if section.gpu else 0
        llm.release_memory()
        if section.gpu:
            given, held = torch.cuda.mem_get_info()[0] - free, llm.memory.weights + llm.memory.kv
            section.check("memory given back below graphs", given >= 0.95 * held, f"{given:,} of {held:,} bytes")
        llm.resume_memory()
        after = [one.token_ids for one in llm.generate(list(prompts), params)]
        section.check("tokens after a release", after == before, f"{len(prompts)} requests, {options['cuda_graphs']}")


def compare(section: Section, truth: Variant, others: Iterable[Variant]) -> None:
    """One way to run a model is the truth for the others."""
    prompts, counts = requests(section)
    with section.trying(truth.name):
        expected, model = answers(section, truth, prompts, counts)
    if truth.name in section.failures:
        return
    for variant in others:
        with section.trying(variant.name):
            section.needs(5)
            if variant.watched and not section.gpu:
                section.skip(variant.name, "to wait for a CPU is not to wait")
                continue
            try:
                found, _ = answers(section, variant, prompts, counts)
            except ConfigError as refusal:
                section.refused(variant.name, refusal)
                continue
            same = sum(a == b for a, b in zip(found, expected, strict=True))
            worst = max(
                (
                    regret(model, prompt, said)
                    for prompt, said, true in zip(prompts, found, expected, strict=True)
                    if said != true
                ),
                default=0.0,
            )
            section.put(f"{variant.name}", {"equal": same, "of": len(expected), "regret": round(worst, 5)})
            allowed = REGRET[variant.dtype]
            detail = f"{same} of {len(expected)} answers equal, largest regret {worst:.2g}, {allowed} allowed"
            section.check(f"tokens: {variant.name}", worst <= allowed, detail)


def requests(section: Section) -> tuple[list[list[int]], list[int]]:
    """Prompts that share beginnings, one longer than a chunk, and the number of output tokens of each."""
    from lockstep.host.text import Text

    text = Text(demo_folder())
    beginnings = [text.encode(one) for one in BEGINNINGS]
    long = [token for one in beginnings for token in one] * (2 if section.small else 12)
    prompts = [*beginnings, long, *(long[: 20 + n] + beginnings[n] for n in range(3 if section.small else 8))]
    longest = 6 if section.small else 40
    return prompts, [longest - n % 5 for n in range(len(prompts))]


def answers(
    section: Section, variant: Variant, prompts: Sequence[list[int]], counts: Sequence[int]
) -> tuple[list[list[int]], Decoder]:
    """The output of a variant, greedily. Its journal must replay."""
    journal = section.part.with_suffix("") / variant.name.replace(" ", "-").replace(",", "")
    options = {**SCHED, **variant.options}
    with LLM(device=str(section.device), dtype=variant.dtype, journal=journal, **options) as llm:
        if variant.watched:
            found = a_wait_is_found(section.device)
            section.check(f"waits are found: {variant.name}", found, "by torch's sync debug mode")
            forbid_waits(llm.host.executor)
        params = [Params(max_new_tokens=count, ignore_eos=True) for count in counts]
        told = llm.generate(list(prompts), params)
        if variant.watched:  # sampling has launches of its own
            others = [replace(SAMPLED[n % len(SAMPLED)], max_new_tokens=8) for n in range(len(prompts))]
            told += llm.generate(list(prompts), others)
        model, executor = llm.model, llm.host.executor
        if isinstance(executor, LeadExecutor):
            executor = executor.executor
        graphs = executor.graphs if isinstance(executor, Executor) else None
        pieces = executor.pieces if isinstance(executor, Executor) else None
    if variant.watched:
        told, sampled = told[: len(prompts)], told[len(prompts) :]
        failed = sorted({one.error for one in sampled if one.error})
        section.check(f"sampled: {variant.name}", not failed, "; ".join(failed) or f"{len(sampled)} answers")
    if ended := sorted({f"{one.finish_reason} {one.error}" for one in told if one.finish_reason != "length"}):
        raise RuntimeError(f"requests ended with: {'; '.join(ended)}")
    replayed = replay(journal)
    section.check(
        f"journal: {variant.name}",
        bool(replayed.steps),
        f"{replayed.steps} steps replay, digest {replayed.digest.hex()}",
    )
    drafts = "speculative_method" in options  # which leave no pass of decodes
    if options["cuda_graphs" if "cuda_graphs" in options else "pages"] in ("on", "eager") and not drafts:
        section.check(
            f"graphs: {variant.name}",
            graphs is not None and graphs.replays > 0,
            f"{graphs.replays if graphs else 0} replays",
        )
    if "in pieces" in variant.name:
        replays = 0 if pieces is None else pieces.replays
        section.check(f"pieces: {variant.name}", replays > 0, f"{replays} passes")
    return [one.token_ids for one in told], model


def forbid_waits(executor: Any) -> None:
    """From now on a launch of this executor fails where it waits for the device; to collect may wait.

    torch counts its own waits only: copies from pageable memory and to the CPU, sizes that lie on the device.
    """
    for name in ("launch", "sample"):
        inner = getattr(executor, name)

        def launching(*given: Any, inner: Any = inner, **options: Any) -> Any:
            torch.cuda.set_sync_debug_mode("error")
            try:
                return inner(*given, **options)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        setattr(executor, name, launching)


def a_wait_is_found(device: torch.device) -> bool:
    """Whether this torch raises where the CPU waits for the device."""
    one = torch.ones(1, device=device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        one.item()
    except RuntimeError:
        return True
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return False


def regret(model: Decoder, prompt: list[int], said: list[int]) -> float:
    """How far a token lies below the best, by the logits of this model behind all before it; of all tokens the most."""
    tokens = torch.tensor(prompt + said[:-1], device=model.device)
    count = len(tokens)
    pool = KvPool(model.layers, count, 1, model.kv_heads, model.head_dim, model.dtype, model.device)
    attention = make("reference", pool, model.heads, scale=model.scale)
    at = torch.arange(count, device=model.device)
    batch = ForwardBatch(
        token_ids=tokens,
        positions=at,
        slots=at,
        rows=torch.zeros(1, dtype=torch.int32, device=model.device),
        indptr=torch.tensor([0, count], dtype=torch.int32, device=model.device),
        lengths=torch.tensor([count], dtype=torch.int32, device=model.device),
        page_table=at.to(torch.int32)[None],
        logits_at=at,
        extend_rows=1,
        starts_host=np.zeros(1, np.int32),
        lengths_host=np.array([count], np.int32),
    )
    with torch.inference_mode():
        attention.plan(batch)
        logits = model.logits(model.forward(batch, attention)[len(prompt) - 1 :])
        chosen = logits.gather(1, torch.tensor(said, device=model.device)[:, None])[:, 0]
        return float((logits.amax(1) - chosen).max())
