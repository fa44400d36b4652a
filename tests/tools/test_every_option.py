"""A run under any option of `lockstep simulate` is verified, explained, simulated again and compared.

The options come from the command itself: a new one is tested without a line here, unless it needs another option.
"""

from __future__ import annotations

import shlex
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from lockstep.sim.cli.compare import compare
from lockstep.sim.cli.simulate import simulate
from lockstep.tools.explain import explain
from lockstep.tools.journal import journal
from lockstep.tools.replay import replay

GEN = "gen:n=6,rate=500,input=fixed:40,output=fixed:6"


def of(model: str, more: str = "") -> str:
    return f"--model {model} --gpu h200 --workload {GEN} {more}"


PLAIN = of("qwen3-0.6b")
EXPERTS = of("qwen3-30b-a3b", "--tp 2 --ep 2")
EPLB = f"{EXPERTS} --expert-cv 0.5 --eplb"
RANKS = of("qwen3-30b-a3b", "--tp 2 --attention-dp 2 --rank-schedulers")
WINDOWS = of("gpt-oss-20b", "--hybrid-memory on")
STATES = of("qwen3-next-80b-a3b", "--hybrid-memory on --tp 2")
MEDIA = of("qwen3-vl-8b", "--media image=1x1:64x64")
TIERS = f"{PLAIN} --host-cache-gb 1"
STORAGE = f"{TIERS} --storage-gb 1"
ADAPTERS = f"{PLAIN} --adapters 2 --max-loras 4"
HALVES = f"{PLAIN} --prefill-engines 1 --decode-engines 1"
CLUSTER = f"{PLAIN} --replicas 2"
TABLE = ["gemm_dtype,m,n,k,latency", *(f"bfloat16,{m},{n},{n},0.1" for m in (1, 4096) for n in (512, 65536))]
DRAFTS = f"{PLAIN} --speculative-method ngram"
HEADS = f"{PLAIN} --speculative-method eagle"
FROM_LOG = "--model qwen3-0.6b --gpu h200 --workload LOGFILE"
SUMS = f"{PLAIN} --tp 2"
STAGES = f"{PLAIN} --pp 2 --pp-size 2"

# By flag: the command line beside it, and its value. Other options stand beside PLAIN, with a value of their type.
LINES: dict[str, tuple[str, str]] = {
    "--model": (f"--gpu h200 --workload {GEN}", "qwen3-0.6b"),
    "--gpu": (f"--model qwen3-0.6b --workload {GEN}", "h100"),
    "--workload": ("--model qwen3-0.6b --gpu h200", GEN),
    "--slo": (PLAIN, "ttft_p99=500ms"),
    "--check": (PLAIN, "every"),
    "--ep": (of("qwen3-30b-a3b", "--tp 2"), "2"),
    "--attention-dp": (of("qwen3-30b-a3b", "--tp 2"), "2"),
    "--moe-a2a": (EXPERTS, ""),
    "--expert-cv": (EXPERTS, "0.5"),
    "--expert-load-interval": (EXPERTS, "2"),
    "--eplb": (f"{EXPERTS} --expert-cv 0.5", ""),
    "--redundant-experts": (EPLB, "2"),
    "--eplb-interval": (EPLB, "2"),
    "--eplb-imbalance-min": (EPLB, "1.1"),
    "--expert-drift": (EPLB, "0.5"),
    "--engines": (f"--model qwen3-0.6b --workload {GEN}", "1xh200,1xh100"),
    "--prefill-engines": (f"{PLAIN} --decode-engines 1", "1"),
    "--decode-engines": (f"{PLAIN} --prefill-engines 1", "2"),
    "--router": (CLUSTER, "round_robin"),
    "--router-hop": (CLUSTER, "1ms"),
    "--link-bandwidth": (HALVES, "10"),
    "--link-latency": (HALVES, "1ms"),
    "--placement": (HALVES, "packed"),
    "--network-latency": (PLAIN, "5us"),
    "--router-report-interval": (f"{CLUSTER} --router total_requests", "1ms"),
    "--router-report-delay": (f"{CLUSTER} --router total_requests --router-report-interval 2ms", "1ms"),
    "--autoscale": (CLUSTER, "open_requests=2,minimum=1"),
    "--price": (f"{CLUSTER} --autoscale open_requests=2,minimum=1", "0h=1.0,8h=2.5"),
    "--admission": (CLUSTER, "open=2"),
    "--router-load-bound": (f"{CLUSTER} --router prefix_affinity", "2"),
    "--router-load-floor": (f"{CLUSTER} --router prefix_affinity", "2"),
    "--router-block-tokens": (f"{CLUSTER} --router prefix_affinity", "16"),
    "--router-sessions-max": (f"{CLUSTER} --router session_sticky", "2"),
    "--time-window": (PLAIN, "0..5ms"),
    "--limit": (PLAIN, "3"),
    "--weights-dtype": (PLAIN, "fp8"),
    "--kv-dtype": (PLAIN, "fp8"),
    "--fp8-activations": (f"{PLAIN} --weights-dtype fp8", "on"),
    "--operators": (of("llama-3.1-8b").replace("h200", "h100"), "OPERATORS"),
    "--calibration": (of("llama-3.1-8b").replace("h200", "h100"), "vllm-h100"),
    "--cache-guarantee": (f"{PLAIN} --isolate-tenants", "0.5"),
    "--engine": (PLAIN, "sglang"),
    "--profile": (PLAIN, "vllm"),
    "--acceptance": (DRAFTS, "0.5,0.25"),
    "--acceptance-spread": (DRAFTS, "0.5"),
    "--draft-model": (of("qwen3-8b", "--speculative-method draft_model"), "qwen3-0.6b"),
    "--grammar-forces": (f"{PLAIN} --jump-forward-tokens 4", "0.5x2"),
    "--diffusion-block": (PLAIN, "16"),
    "--diffusion-iterations": (f"{PLAIN} --diffusion-block 16", "4..12"),
    "--media": (of("qwen3-vl-8b"), "image=1x1:64x64"),
    "--mm-encoder-tp-mode": (f"{MEDIA} --tp 2", "data"),
    "--encoder-gpus": (MEDIA, "1"),
    "--adapters": (f"{PLAIN} --max-loras 4", "2"),
    "--max-lora-rank": (ADAPTERS, "32"),
    "--lora-targets": (ADAPTERS, "q_proj,v_proj"),
    "--max-loras": (f"{PLAIN} --adapters 2", "4"),
    "--samples": (PLAIN, "2"),
    "--sample": (FROM_LOG, "spread"),
    "--columns": (FROM_LOG, "arrival=ts,input=prompt_tokens,output=7"),
    "--chars-per-token": (FROM_LOG, "4"),
    "--fail-on-slo": (f"{PLAIN} --slo ttft_p99=500s", ""),
    "--pue": (PLAIN, "1.3"),
    "--rank-schedulers": (of("qwen3-30b-a3b", "--tp 2 --attention-dp 2"), ""),
    "--host-link-gbs": (TIERS, "20"),
    "--host-link-latency": (TIERS, "1ms"),
    "--host-link-latency-spread": (TIERS, "0.5"),
    "--host-write-policy": (TIERS, "write_back"),
    "--load-tokens-min": (TIERS, "2"),
    "--storage-gb": (TIERS, "1"),
    "--storage-gbs": (STORAGE, "2"),
    "--storage-latency": (STORAGE, "1ms"),
    "--storage-latency-spread": (STORAGE, "0.5"),
    "--prefetch-policy": (STORAGE, "wait_complete"),
    "--prefetch-tokens-min": (STORAGE, "16"),
    "--hybrid-memory": (of("gpt-oss-20b"), "on"),
    "--swa-full-tokens-ratio": (WINDOWS, "0.5"),
    "--mamba-full-memory-ratio": (STATES, "0.5"),
    "--mamba-track-interval": (STATES, "128"),
    "--pdmux": (PLAIN, ""),
    "--pdmux-sm-groups": (f"{PLAIN} --pdmux", "4"),
    "--pdmux-decode-divisor": (f"{PLAIN} --pdmux", "16"),
    "--pdmux-divisions": (f"{PLAIN} --pdmux", "112:20:0,96:36:10"),
    "--pdmux-token-budget": (f"{PLAIN} --pdmux", "4096"),
    "--two-batch-overlap": (SUMS, ""),
    "--two-batch-decode-tokens": (f"{SUMS} --two-batch-overlap", "2"),
    "--two-batch-prefill-tokens": (f"{SUMS} --two-batch-overlap", "2"),
    "--page-size": (PLAIN, "8"),
    "--pages": (PLAIN, "64"),
    "--context-tokens-max": (PLAIN, "512"),
    "--max-prefill-tokens": (PLAIN, "64"),
    "--chunked-prefill-size": (PLAIN, "32"),
    "--max-input-tokens": (PLAIN, "64"),
    "--request-rows": (PLAIN, "512"),
    "--truncation-align-size": (f"{PLAIN} --batching prefill_first", "16"),
    "--chunked-prefill-size-min": (PLAIN, "16"),
    "--schedule-policy-version": (f"{PLAIN} --schedule-policy fair", "1.0"),
    "--enable-priority-preemption": (f"{PLAIN} --schedule-policy priority --retraction-policy priority", ""),
    "--radix-capacity-pages": (PLAIN, "8"),
    "--schedule-policy": (PLAIN, "lpm"),
    "--chunk-unit": (PLAIN, "token"),
    "--retracted-requeue": (PLAIN, "front"),
    "--retracted-kv": (PLAIN, "cache"),
    "--batching": (PLAIN, "mixed"),
    "--reserve": (PLAIN, "on_demand"),
    "--retraction-policy": (PLAIN, "newest"),
    "--prefix-deduplication": (PLAIN, "defer"),
    "--session-kv": (f"{PLAIN} --server-sessions", "evictable"),
    "--truncate-input": (f"{PLAIN} --max-input-tokens 32", "left"),
    "--speculative-method": (PLAIN, "ngram"),
    "--num-speculative-tokens": (DRAFTS, "2"),
    "--speculative-min-chance": (DRAFTS, "0.5"),
    "--speculative-max-batch-size": (DRAFTS, "2"),
    "--speculative-topk": (HEADS, "2"),
    "--speculative-num-steps": (f"{HEADS} --speculative-topk 2", "2"),
    "--role": (PLAIN, "mixed"),
    "--transfer-allocation": (HALVES, "prefill_complete"),
    "--transfer-failure": (HALVES, "recompute"),
    "--num-reserved-decode-tokens": (HALVES, "8"),
    "--transfer-slots": (HALVES, "512"),
    "--bootstrap-timeout": (HALVES, "10s"),
    "--transfer-timeout": (HALVES, "10s"),
    "--encoder-cache-tokens": (MEDIA, "64"),
    "--encoder-budget-tokens": (MEDIA, "64"),
    "--prefill-delayer": (RANKS, ""),
    "--prefill-delayer-max-delay-passes": (f"{RANKS} --prefill-delayer", "2"),
    "--prefill-delayer-max-delay": (f"{RANKS} --prefill-delayer", "20ms"),
    "--prefill-delayer-token-usage-low-watermark": (f"{RANKS} --prefill-delayer", "0.5"),
    "--prefill-delayer-slots": (f"{RANKS} --prefill-delayer", ""),
    "--prefill-delayer-queue-min-ratio": (f"{RANKS} --prefill-delayer", "0.5"),
    "--prefill-full-skip-passes": (RANKS, "2"),
    "--pp-size": (f"{PLAIN} --pp 2", "2"),
    "--pp-layer-partition": (f"{PLAIN} --pp 2", "13,15"),
    "--pp-async-batch-depth": (STAGES, "1"),
    "--pp-max-micro-batch-size": (STAGES, "2"),
    "--pp-dynamic-chunking": (STAGES, ""),
}
KINDS = {"integer": "2", "float": "0.5", "duration": "20s"}
LOG = "ts,prompt_tokens,completion_tokens\n0,40,6\n0.01,50,6\n0.02,60,6\n"
NOT_HERE = {"--out", "--json", "--overwrite"}  # the place of the run's files, and the form of its output
NOT_HERE |= {"--save", "--help-all", "--tokenizer"}  # they act while options are parsed; a tokenizer needs a model


def line_of(option: click.Parameter) -> str:
    flag = option.opts[0]
    beside, value = LINES.get(flag, (PLAIN, ""))
    if getattr(option, "is_flag", False):
        return f"{beside} {flag}"
    if not value:
        value = KINDS[option.type.name.removesuffix("|none")]
    return f"{beside} {flag} {value}"


OPTIONS = [one for one in simulate.params if isinstance(one, click.Option) and one.opts[0] not in NOT_HERE]


def done(command: click.Command, *words: str) -> None:
    """Run a command that must succeed."""
    result = CliRunner().invoke(command, list(words))
    assert result.exit_code == 0, f"{command.name} {shlex.join(words)}\n{result.output}{result.exception!r}"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The run with which every other one is compared."""
    run = str(tmp_path_factory.mktemp("runs") / "plain")
    done(simulate, *shlex.split(PLAIN), "--no-trace", "--no-report", "--no-intervals", "--out", run)
    return run


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.opts[0][2:])
def test_a_run_is_verified_explained_repeated_and_compared(option: click.Parameter, plain: str, tmp_path: Path) -> None:
    run, tables = str(tmp_path / "run"), tmp_path / "tables"
    tables.mkdir()
    (tables / "gemm_perf.csv").write_text("\n".join(TABLE) + "\n", encoding="utf-8")
    (tmp_path / "log.csv").write_text(LOG)
    line = line_of(option).replace("OPERATORS", str(tables)).replace("LOGFILE", str(tmp_path / "log.csv"))
    files = [] if option.opts[0] in ("--trace", "--report") else ["--no-trace", "--no-report"]
    once = [] if option.opts[0] == "--intervals" else ["--no-intervals"]
    done(simulate, *shlex.split(line), *files, *once, "--out", run)
    done(journal, "verify", run)
    halves = (tmp_path / "run/decode").is_dir()  # then several engines have request 0
    done(explain, f"{run}/engines/0" if halves else run, "--request", "0")
    done(replay, run, "--what-if", "--chunked-prefill-size", "16")
    done(compare, plain, run)
