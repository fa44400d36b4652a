"""Serving points of a public table of measurements, as a file that a fit reads, with a part that is kept aside.

The table is `silicon_sample.csv` of ai-dynamo/aiconfigurator (Apache-2.0; in its wheel of 0.12 under
aiconfigurator_core/systems): TTFT and TPOT of vLLM, SGLang and TensorRT-LLM at a fixed concurrency on H100, H200, B200
and GB200, measured by several campaigns from October 2025 to April 2026.

    python benchmarks/engine_points.py silicon_sample.csv --out engine_points.csv

Left out, with their numbers printed: prefill and decode apart, pipelines, attention shards, models and GPUs that are
not in the catalogue; releases that the campaign uses with drafts alone, and conditions whose repeated measurements
differ by more than SPREAD_MAX, because the table has no column for drafts and rows with drafts take about half the
time; points far slower than one of more users; points whose requests wait for longer than they decode, because a limit
of rows is not stated. Of repeated measurements the median stays. Settings of servers are those of the campaign's public
scripts (`settings_of`).

Two kinds of runs are in the file with a reason in the column `suspect`, so that no fit takes them: runs with drafts by
their day (DRAFTS_SINCE), and runs whose first tokens have the compilation of kernels in them, because the load
generator sent no requests before it measured (WARM_SINCE): first tokens are COLD_MIN times as late as in a later run
under the same load. They are in the draw of the part that is kept aside.

**Kept aside**, on every GPU. Column `aside` is `cell` for all points of a sixth of the cells (GPU, engine, model), and
`layout` for a quarter of the other layouts (with precision and degrees of parallelism), both drawn by hash.
Neither is in a fit. Points of layouts kept aside show what is lost on other layouts of a known model and GPU; points
of cells kept aside, what is lost on a model or an engine that was never measured on the GPU.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

GPUS = {"h100_sxm": "h100", "h200_sxm": "h200", "b200_sxm": "b200", "b300_sxm": "b300", "gb200": "gb200-nvl72"}
BLACKWELL = ("b200", "b300")  # the campaign's scripts for B300 are those for B200, and say so
MODELS = {
    "deepseek-ai/DeepSeek-R1": "deepseek-r1",
    "deepseek-ai/DeepSeek-V3": "deepseek-r1",  # the same network; repeated measurements are merged
    "openai/gpt-oss-120b": "gpt-oss-120b",
    "meta-llama/Llama-3.1-70B": "llama-3.1-70b",
    "meta-llama/Llama-3.1-8B-Instruct": "llama-3.1-8b",
    "nvidia/Llama-3.1-8B-Instruct-FP8": "llama-3.1-8b",
    "Qwen/Qwen3-32B": "qwen3-32b",
    "nvidia/Qwen3-32B-NVFP4": "qwen3-32b",
    "Qwen/Qwen3-235B-A22B-FP8": "qwen3-235b-a22b",
    "MiniMaxAI/MiniMax-M2.5": "minimax-m2.5",
    "Qwen/Qwen3.5-397B-A17B": "qwen3.5-397b-a17b",
    "moonshotai/Kimi-K2.5": "kimi-k2.5",  # its nvfp4 checkpoint alone: 4-bit integers in groups of 32 are not modelled
}
CELLS, LAYOUTS = 6, 4  # one of so many is kept aside, on every GPU
LAYOUTS_MIN = 6  # with fewer layouts on a GPU, points are kept aside instead of layouts
SPREAD_MAX = 1.3  # largest TPOT of one condition by its smallest
FASTER = 0.75  # TPOT of more users by that of fewer, below which a series was not measured on a server at rest
USERS_MAX = 1024
USERS = (4, 16, 64, 256)  # of the campaign, and all on H100
PROMPT, OTHER_USERS = 1024, (8, 64)  # of other campaigns: prompts of this length, or these numbers of users
OUTPUT_LEAST = 500  # tokens of an answer from which waits are compared with decoding
OUTPUT_MAX = 2048  # longer answers take long to simulate, and show nothing that these do not
FIELDS = (
    "engine", "engine_version", "model", "gpu", "tp", "ep", "precision", "isl", "osl", "length_dist", "concurrency",
    "ttft_ms", "tpot_ms", "repeats", "aside", "kv_dtype", "prefill_tokens", "receive_interval", "overlap",
    "extra_users", "suspect",
)  # fmt: skip
DRAFTS_SINCE = "2026-01-12"
"""Day of SemiAnalysisAI/InferenceX's pull request 412, which runs DeepSeek-R1 under DRAFTS_RELEASE with drafts.

The same release on eight H200 had a TPOT of 20.2 ms with 16 users on 2025-12-15, and 14.2 on 2026-01-14.
"""
DRAFTS_RELEASE = "1.1.0rc2.post2"
WARM_SINCE = "2026-01-27"
"""Ten days after the same campaign's pull request 480 was opened: from then on two requests per user come first."""
COLD_MIN = 3.0  # times the TTFT of a warm run under the same load, from which first tokens have compilation in them
SLOWER = {"b300_sxm": "b200_sxm"}
"""GPUs that no rate of the data sheet makes slower than another, by which their first tokens are judged, too.

DeepSeek-R1 in fp8 on B300 has one run, of the day its script was added (2026-04-17). With four users on eight GPUs and
prompts of 8,192 tokens first tokens take 2.05 s there, and 0.48 s on B200.
"""
CAMPAIGN = "InferenceX"  # its scripts are public: SemiAnalysisAI/InferenceX, benchmarks/, as of the days of measurement


class Condition(NamedTuple):
    engine: str
    engine_version: str
    model: str
    gpu: str
    tp: int
    ep: int
    precision: str
    isl: int
    osl: int
    length_dist: str
    concurrency: int

    @property
    def cell(self) -> str:
        return f"{self.gpu} {self.engine} {self.model}"

    @property
    def layout(self) -> str:
        return f"{self.cell} {self.precision} tp {self.tp} ep {self.ep}"


def condition_of(row: dict[str, str]) -> Condition | str:
    """Return the condition of a row, or why it is left out."""
    if row["mode"] != "agg":
        return "prefill and decode apart"
    if row["pp_size"] != "1" or row["attention_dp_size"] not in ("", "0", "1"):
        return "pipelines or attention shards"
    if row["system"] not in GPUS or row["model_path"] not in MODELS:
        return "a GPU or model that the catalogue lacks"
    model, precision = MODELS[row["model_path"]], row["precision"] or "bf16"
    if precision == "fp4":
        precision = "mxfp4" if model.startswith("gpt-oss") else "nvfp4"
    elif model.startswith("gpt-oss"):
        return "gpt-oss in another precision than its own"
    elif precision == "int4":
        return "4-bit integers in groups of 32"
    if precision == "nvfp4" and row["system"] in ("h100_sxm", "h200_sxm"):
        return "nvfp4 without its products"
    tp, ep = int(row["tp_size"]), int(row["moe_ep_size"] or 1) or 1
    users, output = int(row["batch_size"]), int(row["osl"])
    if tp > 8 or ep > tp or users > USERS_MAX or output > OUTPUT_MAX:
        return f"more than 8 GPUs, {USERS_MAX} users or {OUTPUT_MAX} tokens of an answer"
    source = row["silicon_data_source"]
    uniform = (
        "db-dump" in source or "measured=" in source or "qwen3.5" in source
    )  # the last repeats the campaign's rows
    if row["backend"] == "trtllm" and model == "deepseek-r1" and row["backend_version"] == "1.2.0rc6.post3":
        return "drafts: the campaign uses this release for them alone"
    return Condition(
        row["backend"], row["backend_version"], model, GPUS[row["system"]], tp, ep, precision, int(row["isl"]),
        output, f"{CAMPAIGN}: uniform in [0.8 N, N]" if uniform else "unknown", users,
    )  # fmt: skip


class Settings(NamedTuple):
    """Settings of a server that its campaign states: the type of KV, tokens of a pass, passes between receptions."""

    kv_dtype: str = ""
    prefill_tokens: int | None = None
    receive_interval: int = 1
    overlap: str = ""  # yes: the scheduler runs beside the GPU, whatever the release does by default
    extra_users: int = 0  # users beyond the requests that the server takes at a time


def settings_of(c: Condition) -> Settings:
    """Return the settings of a point, which are those of the campaign's scripts; other campaigns use defaults.

    Llama-3.1-8B under TensorRT-LLM 1.0.0rc3 has one user more than the server takes requests: TTFT rises with the
    length of answers, by the time of an answer over the number of users: 191, 318 and 550 ms with answers of 128, 256
    and 512 tokens for 8 users on one GPU, 108, 150 and 234 ms on eight, where TPOT is 7.5 and 2.8 ms. TTFT of the
    other models of that campaign does not depend on the length of answers.
    """
    if not c.length_dist.startswith(CAMPAIGN):
        waits = (c.engine, c.engine_version, c.model) == ("trtllm", "1.0.0rc3", "llama-3.1-8b")
        fp8_kv = c.engine == "trtllm" and c.precision == "fp8"
        return Settings("fp8" if fp8_kv else "", extra_users=1 if waits else 0)
    key = c.engine, c.model
    short = c.isl == c.osl == 1024
    if c.engine == "vllm" and c.model == "llama-3.1-70b":
        return Settings("fp8", 8192, overlap="yes")
    if key == ("vllm", "gpt-oss-120b"):
        return Settings("fp8" if c.gpu == "b200" and c.engine_version else "bf16", 8192, overlap="yes")
    if key == ("vllm", "minimax-m2.5"):
        later = c.gpu in BLACKWELL and c.engine_version != "0.17.0"
        return Settings("fp8", 2 * c.isl) if later else Settings("bf16", 8192)
    if key == ("vllm", "kimi-k2.5"):
        return Settings("fp8", 8192)  # of the checkpoint: its `kv_cache_scheme` is 8-bit floats
    if key == ("trtllm", "llama-3.1-70b"):
        return Settings("fp8", 16384, 20 if short and c.tp < 8 else 1)
    if key == ("trtllm", "gpt-oss-120b"):
        return Settings("fp8" if c.gpu == "b200" else "bf16", 20000)
    if key == ("trtllm", "deepseek-r1"):
        waits = c.gpu == "b200" and c.precision == "fp8" and c.engine_version.startswith("1.2") and c.concurrency >= 64
        return Settings("fp8", max(8192, (c.concurrency + c.isl + 127) // 64 * 64), 40 if short and waits else 1)
    if key == ("sglang", "deepseek-r1"):
        if c.gpu not in BLACKWELL:
            return Settings("bf16", 32768)
        tokens = 16384 if c.precision == "nvfp4" else 32768 if c.tp == 8 else 8192
        return Settings("fp8", tokens, 30 if c.concurrency >= 16 and (c.precision == "nvfp4" or c.tp == 8) else 10)
    if key == ("sglang", "qwen3.5-397b-a17b"):
        if c.gpu not in BLACKWELL:
            return Settings("fp8", 16384)
        if c.gpu == "b300" and c.precision == "fp8" and c.engine_version != "0.5.9":
            return Settings("fp8", 16384, 10)
        return Settings("bf16" if c.precision == "bf16" else "fp8", 32768, 30 if c.concurrency >= 16 else 10)
    return Settings()


def measured_on(row: dict[str, str]) -> str:
    """Return the day of a measurement, such as 2026-01-14; empty: it is not stated."""
    _, stated, rest = row["silicon_data_source"].partition("measured=")
    return rest[:10] if stated else ""


def same_load(row: dict[str, str]) -> tuple[str, ...]:
    """Return what runs of any release and layout of experts have in common: the load, and what serves it.

    Rows of eight GPUs that share experts state the product of both ways to share them as their number of GPUs.
    """
    gpus, ep = int(row["tp_size"]), int(row["moe_ep_size"] or 1) or 1
    if ep > 1 and gpus == ep * int(row["moe_tp_size"] or 1):
        gpus = ep
    kept = ("backend", "model_path", "system", "precision", "isl", "osl", "batch_size")
    model = MODELS.get(row["model_path"], row["model_path"])
    return (*(row[name] for name in kept if name != "model_path"), model, str(gpus))


def warm_ttft(rows: Sequence[dict[str, str]]) -> dict[tuple[str, ...], float]:
    """Return the least TTFT in ms of the campaign's runs since WARM_SINCE, by what they serve (`same_load`)."""
    found: dict[tuple[str, ...], float] = {}
    for row in rows:
        if row["mode"] == "agg" and measured_on(row) >= WARM_SINCE:
            key = same_load(row)
            found[key] = min(found.get(key, float("inf")), float(row["silicon_ttft_ms"]))
    return found


def suspect_by_day(row: dict[str, str], warm: dict[tuple[str, ...], float]) -> str:
    """Return why a run is suspect because of the day of its measurement; empty: it is not."""
    day = measured_on(row)
    drafts = row["backend"], row["backend_version"], MODELS.get(row["model_path"])
    if drafts == ("trtllm", DRAFTS_RELEASE, "deepseek-r1") and day >= DRAFTS_SINCE:
        return "drafts: the campaign uses them with this release from that day on"
    ttft_ms = float(row["silicon_ttft_ms"])
    if "" < day < WARM_SINCE and ttft_ms > COLD_MIN * warm.get(same_load(row), float("inf")):
        return "compilation in first tokens: later than in a warm run"
    slower = {**row, "system": SLOWER.get(row["system"], "")}
    if ttft_ms > COLD_MIN * warm.get(same_load(slower), float("inf")):
        return "first tokens far later than on a slower GPU under the same load"
    return ""


def is_kept(c: Condition) -> bool:
    """Return whether a point is kept for its number of users and lengths: others are between those that are kept."""
    if c.length_dist.startswith(CAMPAIGN):
        return c.concurrency in USERS or c.gpu == "h100"
    return c.isl == PROMPT or c.concurrency in OTHER_USERS


def place(text: str) -> int:
    """Return the place of a text in an order that is as good as random, and the same everywhere."""
    return int(sha256(text.encode()).hexdigest(), 16)


def unsteady_series(kept: Sequence[Any]) -> set[Any]:
    """Return points that are far slower than one of more users, and their whole series if it has several of them."""
    series: dict[Any, list[Any]] = defaultdict(list)
    for one in kept:
        condition = Condition(*one[: len(Condition._fields)])
        series[condition._replace(concurrency=0)].append(one)
    users, tpot = FIELDS.index("concurrency"), FIELDS.index("tpot_ms")
    found: set[Any] = set()
    for same in series.values():
        rising = sorted(same, key=lambda one: one[users])
        slow = [one for i, one in enumerate(rising) if any(more[tpot] < FASTER * one[tpot] for more in rising[i + 1 :])]
        found.update(slow if len(slow) < 2 else same)
    return found


def put_aside(conditions: Sequence[Condition]) -> dict[Condition, str]:
    """Return which points are kept aside, and with what: `cell`, `layout`, or empty for points of the fit."""
    found = dict.fromkeys(conditions, "")
    for gpu in GPUS.values():
        own = [one for one in conditions if one.gpu == gpu]
        cells = sorted({one.cell for one in own}, key=place)
        aside = set(cells[: len(cells) // CELLS])
        layouts = sorted({one.layout for one in own if one.cell not in aside}, key=place)
        whole = set(layouts[: len(layouts) // LAYOUTS])
        few = len(layouts) < LAYOUTS_MIN  # then points are drawn
        for one in own:
            if one.cell in aside:
                found[one] = "cell"
            elif one.layout in whole or (few and place(str(one)) % LAYOUTS == 0):
                found[one] = "layout"
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path, help="silicon_sample.csv")
    parser.add_argument("--out", type=Path, required=True, help="file of points")
    arguments = parser.parse_args()
    with arguments.table.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    measured: dict[Condition, list[tuple[float, float]]] = defaultdict(list)
    by_day: dict[Condition, str] = {}
    left: Counter[str] = Counter()
    warm = warm_ttft(rows)
    for row in rows:
        condition = condition_of(row)
        if isinstance(condition, str):
            left[condition] += 1
        else:
            measured[condition].append((float(row["silicon_tpot_ms"]), float(row["silicon_ttft_ms"])))
            by_day[condition] = by_day.get(condition) or suspect_by_day(row, warm)
    kept = []
    for condition, values in measured.items():
        tpots = [tpot for tpot, _ in values]
        if max(tpots) > SPREAD_MAX * min(tpots):
            left[f"repeated measurements that differ by more than {SPREAD_MAX}"] += len(values)
            continue
        waits = statistics.median(ttft for _, ttft in values) > statistics.median(tpots) * condition.osl
        if waits and condition.osl >= OUTPUT_LEAST:
            left["requests that wait for longer than they decode: a limit of rows that is not stated"] += len(values)
            continue
        left["repeated measurements, of which the median is kept"] += len(values) - 1
        ttft, tpot = statistics.median(ttft for _, ttft in values), statistics.median(tpots)
        kept.append((*condition, round(ttft, 4), round(tpot, 5), len(values)))
    unsteady = unsteady_series(kept)
    left["TPOT far above that of more users"] = len(unsteady)
    kept = [one for one in kept if one not in unsteady]
    aside = put_aside([Condition(*one[: len(Condition._fields)]) for one in kept])
    stated = []
    for one in kept:
        condition = Condition(*one[: len(Condition._fields)])
        if is_kept(condition):
            stated.append((*one, aside[condition], *settings_of(condition), by_day[condition]))
    left["other numbers of users or lengths than the kept ones"] = len(kept) - len(stated)
    kept = stated
    with arguments.out.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(FIELDS)
        writer.writerows(kept)
    for why, number in left.items():
        print(f"{number} rows left out: {why}", file=sys.stderr)
    marked = Counter(one[FIELDS.index("suspect")] for one in kept if one[FIELDS.index("suspect")])
    for why, number in marked.items():
        print(f"{number} rows marked suspect: {why}", file=sys.stderr)
    print(f"{len(kept)} points: {dict(Counter(one[FIELDS.index('aside')] or 'fit' for one in kept))}")
    for gpu in GPUS.values():
        print(f"  {gpu}: {dict(Counter(one[FIELDS.index('aside')] or 'fit' for one in kept if one[3] == gpu))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
