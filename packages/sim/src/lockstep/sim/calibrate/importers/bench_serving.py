"""Results of vLLM's `bench serve` and of SGLang's `bench_serving`.

Source: vllm/benchmarks/serve.py at 009e6d4a, python/sglang/bench_serving.py at 0033168f. Both write an object per run
with means in milliseconds and the load: `request_rate`, which is infinite or "inf" if requests wait for nothing but
`max_concurrency`. With --save-detailed (vLLM) or --output-details (SGLang) they add lists with one item per request:
`input_lens`, `output_lens`, `ttfts` and `itls` in seconds, `errors`. `itls` are gaps between messages, whose sum is the
time from the first message to the last. vLLM also writes `start_times`, by a monotonic clock. Failed requests have
output lengths of 0 or a text in `errors`.
"""

from __future__ import annotations

import math
from typing import Any

from lockstep.sim.calibrate.importers.fields import Fields
from lockstep.sim.calibrate.load_runs import (
    AnsweredRequests,
    LoadRun,
    MeasuredPoint,
    Measurements,
    ServerFacts,
)

VLLM, SGLANG = "vLLM bench serve", "SGLang bench_serving"
DETAILED = {VLLM: "run `vllm bench serve` with --save-detailed", SGLANG: "run bench_serving with --output-details"}
BACKENDS = {"vllm": "vllm", "sglang": "sglang", "sglang-native": "sglang", "sglang-oai": "sglang", "trt": "trtllm"}


def is_bench_serving(found: Fields) -> bool:
    """Whether an object has the results of one of the two tools."""
    return "mean_ttft_ms" in found and "request_throughput" in found and "completed" in found


def read_bench_serving(found: Fields, name: str) -> Measurements:
    """Read one run. Raises: CalibrationError, which names the key."""
    form = VLLM if "model_id" in found or "num_prompts" in found else SGLANG
    facts = _facts(found, form)
    rate = _rate(found)
    limit = found.value.get("max_concurrency")
    if limit is not None:
        limit = int(found.number("max_concurrency", least=1))
    if "ttfts" in found and (form == VLLM or math.isinf(rate)):
        requests, left_out = _requests(found, limit)
        if requests.has_clock or math.isinf(rate):
            concurrency = limit if limit is not None and math.isinf(rate) else None
            return Measurements(runs=(LoadRun(name, form, requests, concurrency, facts, left_out),))
    return Measurements(points=(_point(found, name, form, facts, limit if math.isinf(rate) else None),))


def _rate(found: Fields) -> float:
    """Return the requests per second of the load; infinite if requests are not sent by the clock."""
    value = found.value.get("request_rate", math.inf)
    if value in ("inf", None) or value == math.inf:
        return math.inf
    return found.number("request_rate")


def _facts(found: Fields, form: str) -> ServerFacts:
    backend = found.text("backend") or found.text("endpoint_type")
    info = found.value.get("server_info")
    server: dict[str, Any] = info if isinstance(info, dict) else {}
    tp = server.get("tp_size", 0)
    return ServerFacts(
        engine=BACKENDS.get(backend, "vllm" if form == VLLM else ""),
        engine_version=str(server.get("version", "")),
        model=found.text("model_id") or str(server.get("model_path", "")),
        tp=tp if isinstance(tp, int) else 0,
        attention_backend=str(server.get("attention_backend") or ""),
    )


def _requests(found: Fields, limit: int | None) -> tuple[AnsweredRequests, dict[str, int]]:
    """Return the rows of answered requests, and how many others there are.

    Without `start_times`, all requests of an unlimited load are sent at once; those of a closed loop have no times.
    """
    ttfts = found.numbers("ttfts")
    count = len(ttfts)
    prompts, outputs = (found.numbers(key, count) for key in ("input_lens", "output_lens"))
    gaps = found.items("itls", count)
    errors = found.items("errors", count) if "errors" in found else [""] * count
    latencies = found.numbers("latencies", count) if "latencies" in found else None
    starts = found.numbers("start_times", count) if "start_times" in found else None
    columns: dict[str, list[float]] = {name: [] for name in ("ttft_s", "e2e_s", "prompt_tokens", "output_tokens")}
    if starts is not None or limit is None:
        columns["sent_s"] = []
    failed = 0
    for row in range(count):
        if errors[row] or outputs[row] < 1 or ttfts[row] <= 0:
            failed += 1
            continue
        between = Fields({"itls": gaps[row]}, found.where, f"row {row}").numbers("itls")
        columns["ttft_s"].append(ttfts[row])
        columns["e2e_s"].append(latencies[row] if latencies is not None else ttfts[row] + sum(between))
        columns["prompt_tokens"].append(prompts[row])
        columns["output_tokens"].append(outputs[row])
        if "sent_s" in columns:
            columns["sent_s"].append(0.0 if starts is None else starts[row])
    return AnsweredRequests.of(found.where, columns), {"failed": failed} if failed else {}


def _point(found: Fields, name: str, form: str, facts: ServerFacts, limit: int | None) -> MeasuredPoint:
    """Return the means. Without a limit of concurrency, requests in progress follow from Little's law."""
    completed = found.number("completed", least=1)
    prompt = found.number("total_input_tokens", least=1) / completed
    output = found.number("total_output_tokens", least=1) / completed
    ttft_s, tpot_s = (found.number(key, least=1e-9) / 1e3 for key in ("mean_ttft_ms", "mean_tpot_ms"))
    in_progress = float(limit or found.number("request_throughput") * (ttft_s + (output - 1) * tpot_s))
    notes = (f"{name} has means only: for the times of each request {DETAILED[form]}",)
    if form == SGLANG and "ttfts" in found:
        notes = (f"{name} has requests without their times of sending at a rate: only its means were used",)
    return MeasuredPoint(
        name, form, prompt, output, in_progress, ttft_s, tpot_s, int(completed), limit is not None, facts, notes
    )
