"""Runs of vLLM under its own scheduler and under Lockstep's, on one engine, with the same requests.

A case is a function of this module that returns the engine's options and its requests. `compare` starts the engine
with vLLM's own scheduler, runs the requests, replaces the scheduler of the idle engine by Lockstep's, and runs them
again: the model, its weights and the workers are the same. Each case runs in a process of its own:

    python tests/vllm/features.py CASE sync|async FOLDER

prints one JSON object (`Outcome`). The process requires an interpreter with vLLM; see `interpreter`.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import util
from itertools import count
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "packages/gpu-runtime/src/lockstep/runtime/demo_model/files"
VOCABULARY = 2000  # token ids of random prompts lie below this

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",  # the models are tiny
    "NUMBA_DISABLE_JIT": "1",  # n-gram drafting: its compilation takes longer than a run
}


@dataclass
class Ask:
    """One request of a case."""

    prompt: Any
    params: Any
    lora: Any = None
    priority: int = 0
    abort_after: int = 0  # output tokens after which the client leaves; 0: it stays


@dataclass
class Case:
    """An engine and its requests."""

    options: dict[str, Any]
    requests: Callable[[Any], list[Ask]]  # given the LLM
    lockstep: dict[str, Any] = field(default_factory=dict)  # settings under `additional_config`
    between: Callable[[Any, int], Any] = lambda _llm, _step: (
        None
    )  # called before each step; what it returns is compared


@dataclass
class Outcome:
    """What a comparison found."""

    requests: int
    differ: list[int]  # numbers of the requests with unequal answers, without ties
    redrawn: list[int]  # numbers of the requests with unequal answers that are drawn at random
    ties: list[float]  # by unequal answer that is a tie: how far apart the logprobs of the two tokens are
    retracted: int  # by Lockstep's scheduler
    running_at_end: int
    tokens: int
    work: tuple[list[int], list[int]]  # of vLLM's own scheduler, and of Lockstep's: as `count_work` has it
    first: list[Any] = field(default_factory=list)  # the first pair of unequal answers
    seconds: tuple[float, float] = (0.0, 0.0)


def interpreter() -> str:
    """Return the interpreter that has vLLM: LOCKSTEP_VLLM_PYTHON, or this one; empty if neither is there."""
    if path := os.environ.get("LOCKSTEP_VLLM_PYTHON", ""):
        return path
    return sys.executable if util.find_spec("vllm") is not None else ""


MISSING = "" if interpreter() else "vLLM is not installed; LOCKSTEP_VLLM_PYTHON may name an interpreter that has it"


def outcome_of(case: str, mode: str, folder: Path, timeout_s: float = 600) -> Outcome:
    """Run a case in a process of its own. Raises: AssertionError with the end of its output if it fails."""
    paths = [ROOT / "packages/sched-core/src", ROOT / "packages/vllm-scheduler/src"]
    environment = os.environ | ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    command = [interpreter(), __file__, case, mode, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return Outcome(**json.loads(done.stdout.splitlines()[-1]))


# ------------------------------------------------------------------------------------------------------------ requests


def token_prompts(number: int, seed: int = 5, longest: int = 120) -> list[dict[str, Any]]:
    """Return random prompts as token ids. Six of ten begin with one of six shared prefixes."""
    rng = random.Random(seed)
    shared = [[rng.randrange(10, VOCABULARY) for _ in range(rng.choice([20, 70, 150]))] for _ in range(6)]
    return [
        {
            "prompt_token_ids": (rng.choice(shared) if rng.random() < 0.6 else [])
            + [rng.randrange(10, VOCABULARY) for _ in range(rng.randrange(1, longest))]
        }
        for _ in range(number)
    ]


def engine_options(model: Path, **options: Any) -> dict[str, Any]:
    """Return options of an engine with 60 blocks of 32 tokens, which forces preemption."""
    usual = {
        "model": str(model),
        "enforce_eager": True,
        "dtype": "float32",
        "max_model_len": 512,
        "block_size": 32,
        "num_gpu_blocks_override": 60,
        "max_num_batched_tokens": 512,
    }
    return usual | options


# -------------------------------------------------------------------------------------------------------------- models


def save_model(
    folder: Path,
    config: Any,
    auto: str = "AutoModelForCausalLM",
    scale: Callable[[str], float] = lambda _: 0.15,
) -> Path:
    """Save a model with random weights and the demo model's tokenizer. Returns its folder.

    `scale`: the standard deviation of a matrix, given its name.
    """
    import shutil

    import torch
    import transformers

    torch.manual_seed(0)
    model = getattr(transformers, auto).from_config(config)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=scale(name))
    model.save_pretrained(folder)
    for file in DEMO.glob("token*"):
        shutil.copy(file, folder / file.name)
    return folder


def small(**changes: Any) -> dict[str, Any]:
    """Return sizes of a small transformer."""
    return {
        "vocab_size": 2048,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
    } | changes


def llama(folder: Path) -> Path:
    """Save a small Llama."""
    import transformers

    return save_model(folder / "llama", transformers.LlamaConfig(**small(head_dim=32)))


def markov(folder: Path) -> Path:
    """Save a small Llama whose next token depends mostly on the newest one, so that simple drafters are often right."""
    import transformers

    return save_model(folder / "markov", transformers.LlamaConfig(**small(head_dim=32)), scale=markov_scale)


def markov_scale(name: str) -> float:
    """Return the standard deviation of a matrix with which a model is as `markov` describes it."""
    return {"embed_tokens": 1.0, "lm_head": 0.15}.get(name.split(".")[-2], 0.06)


def perturbed(model: Path, folder: Path, std: float) -> Path:
    """Save a copy of a model with noise on its weights, a drafter that is right now and then. Returns its folder."""
    import shutil

    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, folder / "perturbed")
    generator = torch.Generator().manual_seed(1)
    tensors = load_file(str(model / "model.safetensors"))
    for name, tensor in tensors.items():
        tensors[name] = tensor + torch.randn(tensor.shape, generator=generator) * std
    save_file(tensors, str(folder / "perturbed/model.safetensors"), metadata={"format": "pt"})
    return folder / "perturbed"


def eagle_head(model: Path, folder: Path) -> Path:
    """Save an EAGLE head of one layer that passes the embedding of the newest token on. Returns its folder."""
    import torch
    from safetensors.torch import save_file

    folder = folder / "eagle"
    folder.mkdir()
    settings = json.loads((model / "config.json").read_text())
    size, inner = settings["hidden_size"], settings["intermediate_size"]
    heads, kv_heads = (settings[f"num_{name}_heads"] * settings["head_dim"] for name in ("attention", "key_value"))
    generator = torch.Generator().manual_seed(2)

    def noise(rows: int, columns: int) -> Any:
        return torch.randn(rows, columns, generator=generator) * 0.06

    layer = "layers.0"
    tensors = {
        "fc.weight": torch.cat((torch.eye(size), torch.zeros(size, size)), dim=1).contiguous(),
        f"{layer}.self_attn.q_proj.weight": noise(heads, size),
        f"{layer}.self_attn.k_proj.weight": noise(kv_heads, size),
        f"{layer}.self_attn.v_proj.weight": noise(kv_heads, size),
        f"{layer}.self_attn.o_proj.weight": noise(size, heads),
        f"{layer}.mlp.gate_proj.weight": noise(inner, size),
        f"{layer}.mlp.up_proj.weight": noise(inner, size),
        f"{layer}.mlp.down_proj.weight": noise(size, inner),
        f"{layer}.post_attention_layernorm.weight": torch.ones(size),
    }
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    settings |= {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def save_adapter(folder: Path, seed: int, hidden: int, heads: int, kv_heads: int, head_dim: int, layers: int) -> str:
    """Save a LoRA adapter of rank 8 on the attention projections, in the layout of peft. Returns its folder."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(layers):
        for name, rows in (
            ("q_proj", heads * head_dim),
            ("k_proj", kv_heads * head_dim),
            ("v_proj", kv_heads * head_dim),
        ):
            key = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{key}.lora_A.weight"] = torch.randn(8, hidden, generator=generator) * 0.2
            tensors[f"{key}.lora_B.weight"] = torch.randn(rows, 8, generator=generator) * 0.2
    save_file(tensors, str(folder / "adapter_model.safetensors"))
    settings = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "k_proj", "v_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(settings | {"bias": "none", "lora_dropout": 0.0}))
    return str(folder)


# --------------------------------------------------------------------------------------------------------------- cases


def lora_and_base(folder: Path) -> Case:
    """Two adapters beside the base model.

    vLLM's kernels for CPUs compute rows without an adapter with that of the last slot, so the third slot stays empty.
    """
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    paths = [save_adapter(folder / f"adapter{i}", i, 64, 4, 2, 32, 3) for i in range(2)]

    def requests(_: Any) -> list[Ask]:
        rng = random.Random(7)
        asks = []
        for prompt in token_prompts(120):
            i = rng.randrange(-1, len(paths))
            adapter = LoRARequest(f"adapter{i}", i + 1, paths[i]) if i >= 0 else None
            params = SamplingParams(temperature=0, max_tokens=rng.choice([1, 5, 20, 60]), ignore_eos=rng.random() < 0.3)
            asks.append(Ask(prompt, params, adapter))
        return asks

    return Case(
        engine_options(llama(folder), enable_lora=True, max_loras=3, max_lora_rank=8, max_cpu_loras=3), requests
    )


def mixed_requests(number: int = 120, seed: int = 9) -> Callable[[Any], list[Ask]]:
    """Return greedy requests of mixed lengths; some ignore the end token, and some return logprobs."""
    from vllm import SamplingParams

    def requests(_: Any) -> list[Ask]:
        rng = random.Random(seed)
        asks = []
        for prompt in token_prompts(number, seed):
            length = rng.choice([1, 5, 20, 60, 120])
            params = SamplingParams(
                temperature=0,
                max_tokens=length,
                min_tokens=min(10, length) if rng.random() < 0.2 else 0,
                ignore_eos=rng.random() < 0.3,
                logprobs=3 if rng.random() < 0.1 else None,
            )
            asks.append(Ask(prompt, params))
        return asks

    return requests


def sampling(folder: Path) -> Case:
    """Priorities, clients that leave, several samples, and what ends or restricts an answer."""
    from vllm import SamplingParams
    from vllm.sampling_params import RepetitionDetectionParams

    del folder  # the demo model

    def requests(_: Any) -> list[Ask]:
        rng = random.Random(3)
        asks = []
        for number, prompt in enumerate(token_prompts(160)):
            options: dict[str, Any] = {"temperature": 0, "max_tokens": rng.choice([1, 5, 20, 60, 120])}
            match number % 8:
                case 0:
                    options |= {"n": 3, "temperature": 0.8, "seed": number}
                case 1:
                    pattern = RepetitionDetectionParams(max_pattern_size=4, min_pattern_size=1, min_count=2)
                    options |= {"repetition_detection": pattern, "ignore_eos": True, "max_tokens": 120}
                    options["min_tokens"] = rng.choice([0, 30])
                case 2:
                    options["stop_token_ids"] = rng.sample(range(2000), 60)
                case 3:
                    options["bad_words"] = [" the", " a"]
                case 4:
                    options["logit_bias"] = {rng.randrange(2000): 5.0 for _ in range(20)}
                case 5:
                    options["min_tokens"] = options["max_tokens"] // 2
                case 6:
                    options["stop"] = [" the"]
            leaves = rng.choice([1, 7, 20]) if number % 8 == 7 else 0
            asks.append(Ask(prompt, SamplingParams(**options), priority=rng.randrange(-2, 3), abort_after=leaves))
        return asks

    return Case(engine_options(DEMO, scheduling_policy="priority"), requests)


def pauses(folder: Path) -> Case:
    """Pauses of new requests and of all, and resets of the prefix cache while requests wait or run."""
    from vllm.v1.core.sched.interface import PauseState

    states = {5: PauseState.PAUSED_NEW, 9: PauseState.PAUSED_ALL, 14: PauseState.PAUSED_NEW, 300: PauseState.UNPAUSED}

    def between(llm: Any, step: int) -> Any:
        scheduler = engine_core(llm).scheduler
        if step == 299:  # requests that ran have ended, the others wait
            return [scheduler.get_num_unfinished_requests(), scheduler.reset_prefix_cache()]
        if state := states.get(step):
            scheduler.set_pause_state(state)
        elif step in states:
            scheduler.set_pause_state(PauseState.UNPAUSED)
        if step == 310:
            return scheduler.reset_prefix_cache()
        if step == 320:
            return scheduler.reset_prefix_cache(reset_running_requests=True)
        return None

    return Case(engine_options(markov(folder)), mixed_requests(), between=between)


def tensor_parallel(folder: Path) -> Case:
    """Two workers, each with half of the model."""
    options = engine_options(llama(folder), tensor_parallel_size=2, distributed_executor_backend="mp")
    return Case(options, mixed_requests(60))


CASES: dict[str, Callable[[Path], Case]] = {
    one.__name__: one for one in (lora_and_base, sampling, pauses, tensor_parallel)
}


# ---------------------------------------------------------------------------------------------------------- comparison


def make_asynchronous() -> None:
    """Let vLLM schedule asynchronously on CPUs, where its platform class switches this off."""
    from vllm.platforms.cpu import CpuPlatform

    usual = CpuPlatform.check_and_update_config.__func__

    def patched(cls: Any, config: Any) -> None:
        usual(cls, config)
        config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(patched)


def engine_core(llm: Any) -> Any:
    """Return vLLM's engine core, which runs in this process."""
    return llm.llm_engine.engine_core.engine_core


def replace_scheduler(llm: Any, settings: dict[str, Any]) -> Any:
    """Replace the scheduler of an idle engine by Lockstep's. Returns it."""
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

    from lockstep.vllm.scheduler import Scheduler

    core = engine_core(llm)
    while core.scheduler.has_requests():
        core.step_fn()  # the workers free the last requests
    own, config = core.scheduler, core.vllm_config
    config.additional_config = {"lockstep": settings}
    block_size, hash_block_size = resolve_kv_cache_block_sizes(own.kv_cache_config, config)
    core.scheduler = Scheduler(
        vllm_config=config,
        kv_cache_config=own.kv_cache_config,
        structured_output_manager=core.structured_output_manager,
        block_size=block_size,
        hash_block_size=hash_block_size,
        include_finished_set=False,
        log_stats=core.log_stats,
    )
    return core.scheduler


def run(llm: Any, asks: list[Ask], between: Callable[[Any, int], Any]) -> list[Any]:
    """Return the answers of these requests, in builtins, and behind them what `between` returned."""
    prompts = [ask.prompt for ask in asks]
    if type(asks[0].params).__name__ == "PoolingParams":
        done = llm.embed(prompts, pooling_params=[ask.params for ask in asks], use_tqdm=False)
        return [[round(x, 4) for x in one.outputs.embedding] for one in done]
    found: list[Any] = []
    answers = [
        [[list(one.token_ids), one.finish_reason, one.stop_reason, logprobs_of(one.logprobs)] for one in answer.outputs]
        + [None if answer.prompt_logprobs is None else logprobs_of(answer.prompt_logprobs)]
        for answer in generated(llm, asks, between, found)
    ]
    return answers + found


def generated(llm: Any, asks: list[Ask], between: Callable[[Any, int], Any], found: list[Any]) -> list[Any]:
    """Return the outputs of requests to a model that generates, in order.

    A request whose client leaves counts as far as the client waited. `found` receives what `between` returns.
    """
    engine = llm.llm_engine
    names = [f"ask-{next(NUMBERS)}" for _ in asks]
    for name, ask in zip(names, asks, strict=True):
        engine.add_request(name, ask.prompt, ask.params.clone(), lora_request=ask.lora, priority=ask.priority)
    waits = {name: ask.abort_after for name, ask in zip(names, asks, strict=True) if ask.abort_after}
    answers: dict[str, Any] = {}
    step = 0
    while engine.has_unfinished_requests():
        if (value := between(llm, step)) is not None:
            found.append([[[], value, None, None], None])
        step += 1
        for answer in engine.step():
            most = waits.get(answer.request_id, 0)
            if answer.finished or (most and len(answer.outputs[0].token_ids) >= most):
                answers[answer.request_id] = answer
            if most and len(answer.outputs[0].token_ids) >= most:
                del waits[answer.request_id]
                engine.abort_request([answer.request_id])
                one = answer.outputs[0]
                one.token_ids, one.finish_reason, one.stop_reason = one.token_ids[:most], "left", None
    return [answers[name] for name in names]


NUMBERS = count()


def logprobs_of(positions: Any) -> Any:
    """Return logprobs to two decimals, by position, largest first."""
    if positions is None:
        return None
    return [sorted((round(x.logprob, 2) for x in (one or {}).values()), reverse=True) for one in positions]


def count_work(llm: Any) -> list[int]:
    """Count passes, verified drafts and accepted drafts, encoded items and freed items. Returns the list of counts."""
    counts = [0, 0, 0, 0, 0]
    core = engine_core(llm)
    update = core.scheduler.update_from_output

    def counting(output: Any, result: Any) -> Any:
        counts[0] += bool(output.num_scheduled_tokens)
        counts[3] += sum(len(inputs) for inputs in output.scheduled_encoder_inputs.values())
        counts[4] += len(output.free_encoder_mm_hashes)
        for name, drafts in output.scheduled_spec_decode_tokens.items():
            if drafts and name in result.req_id_to_index:
                counts[1] += len(drafts)
                counts[2] += max(len(result.sampled_token_ids[result.req_id_to_index[name]]) - 1, 0)
        return update(output, result)

    core.scheduler.update_from_output = counting
    return counts


TIE = 2e-3
"""Largest difference of two logprobs that another batch shape may turn round."""


def gap_at_divergence(llm: Any, ask: Ask, own: Any, ours: Any) -> float:
    """Return the difference of the logprobs of the two tokens with which unequal answers begin to differ.

    The logprobs come from a run of the request by itself behind the tokens that both answers share. The result is
    infinite if the answers differ in anything but tokens that were drawn greedily.
    """
    from vllm import SamplingParams

    for one, other in zip(own[:-1], ours[:-1], strict=True):
        pairs = enumerate(zip(one[0], other[0], strict=False))
        at = next((i for i, (a, b) in pairs if a != b), None)
        if at is None or ask.params.temperature:
            continue
        prompt = {"prompt_token_ids": [*ask.prompt["prompt_token_ids"], *one[0][:at]]}
        params = SamplingParams(temperature=0, max_tokens=1, logprobs=20, ignore_eos=True)
        (answer,) = llm.generate([prompt], [params], use_tqdm=False, lora_request=ask.lora)
        found = answer.outputs[0].logprobs[0]
        if one[0][at] in found and other[0][at] in found:
            return abs(found[one[0][at]].logprob - found[other[0][at]].logprob)
    return float("inf")


def check_often(engine: Any, check: Callable[[Any], None], every: int = 16) -> None:
    """Check the core's invariants after every so many of its events."""
    step, events = engine.step, [0]

    def checked(event: Any) -> Any:
        result = step(event)
        events[0] += 1
        if events[0] % every == 0:
            check(engine)
        return result

    engine.step = checked


def compare(case: Case, folder: Path) -> Outcome:
    """Run a case under both schedulers."""
    import time

    from vllm import LLM

    from lockstep.core.invariants import check
    from lockstep.core.journal.replay import replay

    llm = LLM(**case.options)
    asks = case.requests(llm)
    own_work = count_work(llm)
    began = time.monotonic()
    own = run(llm, asks, case.between)
    own_s = time.monotonic() - began
    scheduler = replace_scheduler(llm, {"journal": str(folder / "journal")} | case.lockstep)
    work = count_work(llm)
    began = time.monotonic()
    check_often(scheduler.engine_state(), check)
    ours = run(llm, asks, case.between)
    ours_s = time.monotonic() - began
    engine = scheduler.engine_state()
    check(engine)
    left = len(scheduler.requests)
    unequal = [i for i, (one, other) in enumerate(zip(own, ours, strict=True)) if one != other]
    gaps = {i: gap_at_divergence(llm, asks[i], own[i], ours[i]) if i < len(asks) else float("inf") for i in unequal}
    drawn = [i for i in unequal if i < len(asks) and getattr(asks[i].params, "temperature", 0)]
    differ = [i for i in unequal if gaps[i] > TIE and i not in drawn]
    scheduler.shutdown()
    replay(folder / "journal")  # every digest must be equal
    tokens = sum(len(one[0]) for answer in ours for one in answer[:-1]) if isinstance(ours[0][0], list) else 0
    return Outcome(
        requests=len(asks),
        differ=differ,
        redrawn=drawn,
        ties=[round(gaps[i], 6) for i in unequal if gaps[i] <= TIE],
        retracted=engine.counts.retractions,
        running_at_end=left,
        tokens=tokens,
        work=(own_work, work),
        first=[own[differ[0]], ours[differ[0]]] if differ else [],
        seconds=(round(own_s, 2), round(ours_s, 2)),
    )


def main() -> None:
    """Run the case that the command line names."""
    case, mode, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    os.environ.update(ENVIRONMENT)
    if mode == "async":
        make_asynchronous()
    print(json.dumps(vars(compare(CASES[case](folder), folder))))


if __name__ == "__main__":
    main()
