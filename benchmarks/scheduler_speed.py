"""What the scheduler costs the CPU, on the inputs with which vLLM, SGLang, mini-sglang and nano-vllm were measured.

    w1   steady decode: R requests of 1,024 prompt tokens, 200 steps after 20; a step is one result and one launch
    w2   prefill: 512 requests of 2,560 tokens, G groups sharing 2,048; all steps until all prompts are computed
    w3   closed loop: C requests at any time, 1,024 prompt tokens (512 shared in 32 groups), 64 to 192 out
    w6   the same under memory pressure: C=256, 256 to 768 out, a pool of 196,608 tokens
    w7   w2 with one output token: a request's whole life

Every fact goes through `Engine.step`, digest included, and into a journal: `metered_host.py` names the phases. Figures
are CPU time, user and system, of this process; of several rounds, the median. Prompts are packed int32 before the clock
starts, as a tokeniser would hand them over. "in all" is what the bar is held against: everything but `write`, the
write() after each result. The peers keep no journal, so compare them without `record`. `DecodeRun`, the stand-in for
single steps in uniform stretches, needs requests that ignore EOS; it is shown beside, without a bar. The peers were
measured on another machine, and the bars are for that one; the calibration before each workload gives how this one
compares with it, and a bar that is missed in absolute terms is held against that.

    LOCKSTEP_PEERS=... python benchmarks/scheduler_speed.py [--workload w1 w7] [--rounds 5] [--json FILE]

Exit status 1 if a bar is missed.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # its idle threads spin, and would be counted

import argparse
import gc
import json
import platform
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from calibration import PEERS_CALIBRATION_US, calibrate, show, slowdown
from metered_host import MeteredHost
from peers import load_workloads, packed

from lockstep.core import SchedConfig

Row = dict[str, Any]
"""What one configuration came to: its name and settings, then figures."""

EOS = 2  # the peers' end token; it is compared with every sampled token and never sampled
CHUNK_TOKENS = 8192
COUNTED = ("arrival", "plan", "result", "record", "runs")


class Sizes(NamedTuple):
    """How much of each workload is run."""

    running: tuple[int, ...] = (32, 256, 1024, 4096)
    context_tokens: int = 1024
    warm_steps: int = 20
    steps: int = 200
    prefills: int = 512
    groups: tuple[int, ...] = (64, 1, 512)
    shared_tokens: int = 2048
    closed: tuple[tuple[int, int], ...] = ((64, 1000), (256, 2000))  # (C, requests)
    pressed: tuple[int, int] = (256, 800)
    pressed_pool_tokens: int = 196_608


SMALL = Sizes(
    running=(2, 4),
    context_tokens=40,
    steps=30,
    prefills=4,
    groups=(2,),
    shared_tokens=64,
    closed=((2, 4),),
    pressed=(4, 8),
    pressed_pool_tokens=4096,
)

# ------------------------------------------------------------------------------------- published, on the peers' machine

# us per step at 32, 256 and 1,024 running: schedule and update, or plan, glue and result.
PEERS_STEADY_US = {
    "vLLM": (256 + 121, 1_948 + 959, 8_168 + 4_284),
    "vLLM async": (247 + 154, 1_949 + 1_254, 8_085 + 5_367),
    "SGLang overlap": (88 + 46 + 219, 321 + 83 + 1_711, 968 + 115 + 6_844),
    "SGLang overlap, pages of 64": (122 + 221, 393 + 1_685, 1_199 + 7_158),
    "mini-sglang overlap": (332 + 19 + 136, 2_589 + 90 + 1_283, 10_543 + 380 + 6_209),
    "nano-vllm": (8.8 + 8.1, 71 + 61, 261 + 247),
}
# us per step, both halves of it, and steps, with 64, 1 and 512 groups.
PEERS_PREFILL_STEP_US = {
    "vLLM": (3_464 + 1_203, 4_753 + 1_655, 2_798 + 1_178),
    "SGLang overlap": (1_654 + 888, 2_019 + 1_775, 1_005 + 403),
    "mini-sglang": (870 + 674, 1_111 + 821, 420 + 443),
    "nano-vllm": (1_124 + 280, 1_881 + 298, 47 + 248),
}
PEERS_PREFILL_STEPS = {"vLLM": (50, 34, 166), "SGLang overlap": (48, 34, 160)}
# us per output token with C=64 and C=256.
PEERS_CLOSED_US = {
    "vLLM": (14.7, 15.0),
    "vLLM async": (17.2, 16.6),
    "SGLang": (18.6, 15.4),
    "SGLang overlap": (19.1, 16.3),
    "SGLang overlap, lpm": (17.6, 15.9),
    "mini-sglang": (19.9, 20.3),
    "mini-sglang overlap": (20.8, 19.3),
    "nano-vllm": (1.14, 1.07),
    "nano-vllm, pages of 16": (4.6, 2.4),
}
# Steps with C=256, prefill included.
PEERS_CLOSED_STEPS = {"vLLM": (1_118,), "vLLM async": (1_127,), "SGLang": (1_867,), "SGLang overlap": (1_880,)}
# Retractions, steps and CPU ms in all.
PEERS_PRESSED = {
    "vLLM": (358, 2_212, 5_087),
    "vLLM async": (354, 2_217, 5_495),
    "SGLang": (0, 2_720, 4_600),
    "SGLang, conservativeness 0.1": (22, 2_850, 4_590),
    "nano-vllm, pages of 16": (542, 2_656, 612),
}
# us per request, all phases, with 64, 1 and 512 groups.
PEERS_PREFILL_ONLY_US = {
    "vLLM async": (585, 550, 697),
    "SGLang overlap": (366, 327, 583),
    "SGLang overlap, pages of 64": (443, 385, 843),
    "mini-sglang overlap": (313, 299, 425),
    "nano-vllm": (485, 196, 128),
}

# ------------------------------------------------------------------------------------------------------------ the bars

STEADY_BAR_US = {256: 100.0, 1024: 250.0}  # by running requests
STEADY_GROWTH_BAR = 6.0  # from 256 to 4,096 running
CLOSED_BAR_US = 3.0  # per output token
PREFILL_ONLY_BAR_US = 150.0  # per request


# ------------------------------------------------------------------------------------------------------- the workloads


def steady_decode(host: MeteredHost, prompts: list[bytes], sizes: Sizes, *, runs: bool) -> Row:
    """W1 on a fresh host: CPU us per step, by phase; the median, the 90th percentile and the longest of all steps."""
    steps = sizes.warm_steps + sizes.steps
    for prompt in prompts:
        host.arrive(prompt, steps + 64, ignore_eos=runs)
    while host.engine.waiting or host.engine.prefilling is not None or host.engine.in_flight[0].plan.mode != "decode":
        host.next_batch()
    host.launch()  # every slot is taken; from here a result makes room for the next launch
    for _ in range(sizes.warm_steps):
        host.steady_pair(runs=runs)
    settle()
    host.reset_meter()
    for _ in range(sizes.steps):
        host.steady_pair(runs=runs)
    spent = host.spent_ns
    records = np.array(spent["record"]).reshape(-1, 2).sum(axis=1)
    each = np.array(spent["result"]) + np.array(spent["plan"]) + records
    if runs:
        each += np.array(spent["runs"])
    host.end_run()
    assert host.engine.active == len(prompts), "somebody ended, or was retracted"
    assert host.extends + steps + 2 == host.launches, "these were not decodes alone"
    row = {phase: host.us(phase) / sizes.steps for phase in ("plan", "result", "record", "runs", "write")}
    row["in_all"] = float(each.mean()) / 1e3
    row["p50"] = float(np.median(each)) / 1e3
    row["p90"] = float(np.quantile(each, 0.9)) / 1e3
    row["longest"] = float(each.max()) / 1e3
    return row


def prefill(host: MeteredHost, prompts: list[bytes], max_new_tokens: int) -> Row:
    """W2 and W7 on a fresh host: all requests arrive at once; until all prompts are computed, or all requests ended."""
    settle()
    for prompt in prompts:
        host.arrive(prompt, max_new_tokens)
    if max_new_tokens == 1:
        host.finish_all()
    else:
        while host.engine.waiting or host.engine.prefilling is not None:
            host.next_batch()
        while host.in_flight:
            host.collect()
    total = host.us(*COUNTED)
    row = {phase: host.us(phase) / len(prompts) for phase in ("arrival", "plan", "result", "record", "write")}
    row["in_all"] = total / len(prompts)
    row["steps"] = host.extends
    row["step_us"] = host.us("plan", "result") / host.extends
    return row


def closed_loop(host: MeteredHost, requests: list[tuple[bytes, int]], concurrency: int) -> Row:
    """W3 and W6 on a fresh host: each finished request is followed by the next, until all are done."""
    settle()
    while host.finished < len(requests):
        while host.arrived < min(host.finished + concurrency, len(requests)):
            host.arrive(*requests[host.arrived])
        host.next_batch()
    tokens = sum(max_new_tokens for _, max_new_tokens in requests)
    assert host.streamed_tokens == tokens, f"{host.streamed_tokens} tokens were streamed, expected {tokens}"
    row = {phase: host.us(phase) / 1e3 for phase in ("arrival", "plan", "result", "record", "write")}
    row["in_all"] = host.us(*COUNTED) / 1e3
    row["token_us"] = host.us(*COUNTED) / tokens
    row["steps"] = host.launches
    row["extends"] = host.extends
    row["retractions"] = host.retractions
    row["peak_running"] = host.peak_running
    return row


def settle() -> None:
    """Collect garbage, and let the collector pass over what is alive now, as the peers' drivers do."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def median_of(rounds: int, config: SchedConfig, measure: Callable[[MeteredHost], Row]) -> Row:
    """The median of each figure over so many rounds, each on a host of its own."""
    rows = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory(prefix="lockstep-speed-") as folder:
            host = MeteredHost(config, Path(folder))
            rows.append(measure(host))
            host.journal.close()
    return {figure: statistics.median(row[figure] for row in rows) for figure in rows[0]}


def config(page_size: int, pool_tokens: int, running: int, **settings: Any) -> SchedConfig:
    """What all workloads share."""
    return SchedConfig(
        page_size=page_size,
        pages=pool_tokens // page_size,
        max_running_requests=running,
        chunked_prefill_size=CHUNK_TOKENS,
        eos_token_ids=(EOS,),
        **settings,
    )


# ------------------------------------------------------------------------------------------------------------- reports


class Report:
    """Rows of every workload, and which of them miss their bar."""

    def __init__(self, *, judging: bool) -> None:
        self.judging = judging
        self.rows: list[Row] = []
        self.missed = 0
        self.slowdown = 1.0

    def add(self, row: Row) -> Row:
        self.rows.append(row)
        return row

    def calibrate(self) -> dict[str, float]:
        """See how fast the machine is just now; bars that follow are judged by that."""
        machine = calibrate()
        self.slowdown = slowdown(machine)
        return machine

    def verdict(self, row: Row, figure: str, bar: float | None, *, scaled: bool = True) -> str:
        """The bar of a figure, with how it stands to it.

        Args:
            scaled: the bar is CPU time on the peers' machine, and not a ratio.
        """
        if bar is None or not self.judging:
            return ""
        here = bar * self.slowdown if scaled else bar
        met = row[figure] < here
        row["bar"], row["bar_here"], row["met"] = bar, here, met
        self.missed += not met
        shown = f"bar {bar:g}" if row[figure] < bar or here == bar else f"bar {bar:g}, here {here:.3g}"
        return f"{shown}: {'met' if met else 'MISSED'}"


def run_w1(workloads: ModuleType, sizes: Sizes, rounds: int, report: Report) -> None:
    print(
        f"w1: steady decode, {sizes.context_tokens:,}-token prompts, overlap depth 1; CPU us per step, "
        f"mean of {sizes.steps} steps"
    )
    print("through      page  running     plan   result   record     runs   in all      p50      p90  longest    write")
    prompts = [packed(tokens) for tokens in workloads.w1_prompts(max(sizes.running), sizes.context_tokens)]
    for runs in (False, True):
        for page_size in (16, 1, 64):
            by_running = {}
            for running in sizes.running:
                settings = config(page_size, running * (sizes.context_tokens + 1024) + CHUNK_TOKENS, running)
                some = prompts[:running]
                row = median_of(
                    rounds, settings, lambda host, some=some, runs=runs: steady_decode(host, some, sizes, runs=runs)
                )
                through = "DecodeRun" if runs else "Engine.step"
                row = report.add({"workload": "w1", "through": through, "page": page_size, "running": running, **row})
                by_running[running] = row
                shown = "".join(
                    f"{row[figure]:9.1f}"
                    for figure in ("plan", "result", "record", "runs", "in_all", "p50", "p90", "longest", "write")
                )
                bar = None if runs else STEADY_BAR_US.get(running)
                print(f"{through:12} {page_size:4} {running:8,}{shown}   {report.verdict(row, 'in_all', bar)}".rstrip())
            if {256, 4096} <= by_running.keys():
                row = by_running[4096]
                row["growth"] = row["in_all"] / by_running[256]["in_all"]
                verdict = "" if runs else report.verdict(row, "growth", STEADY_GROWTH_BAR, scaled=False)
                print(f"{'':26} from 256 to 4,096: {row['growth']:.2f} times   {verdict}".rstrip())
    print_peers(PEERS_STEADY_US, "us per step at 32, 256 and 1,024 running")


def prefill_rows(
    workload: str, workloads: ModuleType, sizes: Sizes, rounds: int, report: Report, max_new_tokens: int
) -> Iterator[Row]:
    """W2 and W7 for each page size and number of groups, measured and added to the report."""
    for page_size in (16, 64, 1):
        for groups in sizes.groups:
            measured = measure_prefill(workloads, sizes, rounds, page_size, groups, max_new_tokens=max_new_tokens)
            yield report.add({"workload": workload, "page": page_size, "groups": groups} | measured)


def run_w2(workloads: ModuleType, sizes: Sizes, rounds: int, report: Report) -> None:
    print(f"w2: prefill alone, {sizes.prefills} requests, 8,192 new tokens a step, overlap depth 1; CPU us")
    print("page  groups    steps   plan + result a step   in all a request")
    for row in prefill_rows("w2", workloads, sizes, rounds, report, max_new_tokens=64):
        print(f"{row['page']:4} {row['groups']:7} {row['steps']:8.0f} {row['step_us']:22.1f} {row['in_all']:18.1f}")
    print_peers(PEERS_PREFILL_STEP_US, "us per step with 64, 1 and 512 groups")
    print_peers(PEERS_PREFILL_STEPS, "steps")


def run_w7(workloads: ModuleType, sizes: Sizes, rounds: int, report: Report) -> None:
    print(f"w7: {sizes.prefills} requests with one output token, overlap depth 1; CPU us per request")
    print("page  groups  arrival     plan   result   record   in all    write    steps")
    for row in prefill_rows("w7", workloads, sizes, rounds, report, max_new_tokens=1):
        shown = "".join(f"{row[figure]:9.1f}" for figure in ("arrival", "plan", "result", "record", "in_all", "write"))
        verdict = report.verdict(row, "in_all", PREFILL_ONLY_BAR_US)
        print(f"{row['page']:4} {row['groups']:7}{shown} {row['steps']:8.0f}   {verdict}".rstrip())
    print_peers(PEERS_PREFILL_ONLY_US, "us per request with 64, 1 and 512 groups")


def measure_prefill(
    workloads: ModuleType, sizes: Sizes, rounds: int, page_size: int, groups: int, *, max_new_tokens: int
) -> Row:
    each = sizes.prefills // groups
    lists = workloads.w2_prompts(groups, each, sizes.shared_tokens, 512)
    prompts = [packed(tokens) for tokens in lists]
    pool_tokens = 2 * sum(len(tokens) for tokens in lists)
    del lists
    settings = config(page_size, pool_tokens, sizes.prefills)
    return median_of(rounds, settings, lambda host: prefill(host, prompts, max_new_tokens))


def run_w3(workloads: ModuleType, sizes: Sizes, rounds: int, report: Report) -> None:
    pool_tokens = 1 << 20
    print(f"w3: closed loop, a pool of {pool_tokens:,} tokens; CPU ms, and us per output token")
    print_closed_header("   C      n  page overlap policy")
    for concurrency, count in sizes.closed:
        requests = [(packed(tokens), out) for tokens, out in workloads.w3_requests(count)]
        for page_size, overlap, policy in (
            (16, 1, "fcfs"),
            (16, 0, "fcfs"),
            (16, 1, "lpm"),
            (1, 1, "fcfs"),
            (1, 0, "fcfs"),
        ):
            settings = config(page_size, pool_tokens, concurrency, overlap_depth=overlap, schedule_policy=policy)
            row = report.add(
                {"workload": "w3", "concurrency": concurrency, "requests": count, "page": page_size}
                | {"overlap": overlap, "policy": policy}
                | median_of(rounds, settings, lambda host, r=requests, c=concurrency: closed_loop(host, r, c))
            )
            verdict = report.verdict(row, "token_us", CLOSED_BAR_US)
            print_closed(f"{concurrency:4} {count:6,} {page_size:5} {overlap:7} {policy:6}", row, verdict)
    print_peers(PEERS_CLOSED_US, "us per output token with C=64 and C=256")
    print_peers(PEERS_CLOSED_STEPS, "steps with C=256")


def run_w6(workloads: ModuleType, sizes: Sizes, rounds: int, report: Report) -> None:
    concurrency, count = sizes.pressed
    pool_tokens = sizes.pressed_pool_tokens
    print(f"w6: closed loop, C={concurrency}, n={count}, a pool of {pool_tokens:,} tokens; CPU ms")
    print_closed_header("page overlap conservativeness")
    requests = [(packed(tokens), out) for tokens, out in workloads.w3_requests(count, lo=256, hi=768)]
    for page_size, overlap, conservativeness in ((16, 1, 1.0), (1, 1, 1.0), (1, 1, 0.1)):
        settings = config(
            page_size,
            pool_tokens,
            concurrency,
            overlap_depth=overlap,
            schedule_conservativeness=conservativeness,
        )
        row = report.add(
            {"workload": "w6", "page": page_size, "overlap": overlap, "conservativeness": conservativeness}
            | median_of(rounds, settings, lambda host: closed_loop(host, requests, concurrency))
        )
        retracted = f"{row['retractions']:.0f} retractions, at most {row['peak_running']:.0f} running"
        print_closed(f"{page_size:4} {overlap:7} {conservativeness:16}", row, retracted)
    print_peers(PEERS_PRESSED, "retractions, steps, CPU ms")


def print_closed_header(settings: str) -> None:
    print(f"{settings}  arrival     plan   result   record   in all    write us/token    steps  extends")


def print_closed(settings: str, row: Row, remark: str) -> None:
    shown = "".join(f"{row[figure]:9.1f}" for figure in ("arrival", "plan", "result", "record", "in_all", "write"))
    steps = f"{row['token_us']:9.2f} {row['steps']:8.0f} {row['extends']:8.0f}"
    print(f"{settings}{shown}{steps}   {remark}".rstrip())


def print_peers(published: dict[str, tuple[float, ...]], what: str) -> None:
    """What the peers need, on their machine."""
    print(f"published: {what}")
    for peer, figures in published.items():
        print(f"  {peer:30}", *(f"{figure:10,.6g}" for figure in figures))
    sys.stdout.flush()


WORKLOADS = {"w1": run_w1, "w2": run_w2, "w3": run_w3, "w6": run_w6, "w7": run_w7}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), help="which; default all")
    parser.add_argument("--rounds", type=int, default=5, help="repetitions; the median counts (default 5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to see that it runs; bars are not judged")
    arguments = parser.parse_args()
    workloads = load_workloads()

    report = Report(judging=not arguments.small)
    machines = {}
    for name in arguments.workload:
        machines[name] = report.calibrate()
        show(machines[name])
        print(flush=True)
        WORKLOADS[name](workloads, SMALL if arguments.small else Sizes(), arguments.rounds, report)
        print()
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result(machines, arguments.rounds, report), indent=1) + "\n")
    if report.missed:
        print(f"{report.missed} bars missed", file=sys.stderr)
    return int(report.missed > 0)


def result(machines: dict[str, dict[str, float]], rounds: int, report: Report) -> dict[str, Any]:
    """All figures as JSON, with how fast the machine was before each workload."""
    rows = [
        {name: round(value, 3) if isinstance(value, float) else value for name, value in row.items()}
        for row in report.rows
    ]
    return {
        "calibration_us": machines,
        "peers_calibration_us": PEERS_CALIBRATION_US,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "cpus": os.cpu_count(),
        "rounds": rounds,
        "rows": rows,
    }


if __name__ == "__main__":
    sys.exit(main())
