"""Reports of guidellm: benchmarks.json, one run per strategy.

Source: vllm-project/guidellm, src/guidellm/schemas/request_stats.py and info.py at 06cef291, 04fcfd86, and
benchmark/objects.py of releases before 0.4. A benchmark has `config.strategy` (before 0.4 `args.strategy`) with
`type_`, and `requests.successful`. Times of requests are Unix seconds, in `info.timings`; before 0.4 beside the
tokens, as `start_time`, `first_token_time`, `last_token_time`.
"""

from __future__ import annotations

from lockstep.sim.calibrate.importers.fields import Fields
from lockstep.sim.calibrate.load_runs import AnsweredRequests, LoadRun, Measurements, ServerFacts

FORM = "guidellm"
TIMES = ("request_start", "first_token_iteration", "last_token_iteration")
TIMES_BEFORE_04 = ("start_time", "first_token_time", "last_token_time")


def is_guidellm(found: Fields) -> bool:
    """Whether an object is a report of guidellm."""
    return isinstance(found.value.get("benchmarks"), list)


def read_guidellm(found: Fields, name: str) -> Measurements:
    """Read every benchmark of a report. Raises: CalibrationError, which names the key."""
    runs = []
    for number, benchmark in enumerate(found.each("benchmarks")):
        strategy = _strategy(benchmark)
        kind = strategy.text("type_")
        rows = list(benchmark.inner("requests").each("successful"))
        columns: dict[str, list[float]] = {
            column: [] for column in ("sent_s", "ttft_s", "e2e_s", "prompt_tokens", "output_tokens")
        }
        silent = 0
        for row in rows:
            silent += not _add(columns, row)
        concurrency = 1 if kind == "synchronous" else None
        if kind == "concurrent":
            concurrency = int(strategy.number("streams", least=1))
        others = {key: len(benchmark.inner("requests").value.get(key) or []) for key in ("errored", "incomplete")}
        others["without token times"] = silent
        runs.append(
            LoadRun(
                f"{name}, benchmark {number} ({kind})",
                FORM,
                AnsweredRequests.of(f"{benchmark.where}: {benchmark.path}", columns),
                concurrency,
                ServerFacts(model=_model(benchmark, found)),
                {reason: count for reason, count in others.items() if count},
            )
        )
    return Measurements(runs=tuple(runs))


def _strategy(benchmark: Fields) -> Fields:
    for key in ("config", "args"):
        if key in benchmark and "strategy" in benchmark.inner(key):
            return benchmark.inner(key).inner("strategy")
    return benchmark.refuse("config.strategy", None, "an object", "is the report of guidellm 0.2 or later?")


def _add(columns: dict[str, list[float]], row: Fields) -> bool:
    """Add a request; False if it has no token times, as of an endpoint without streaming."""
    is_new = "info" in row
    times, names = (row.inner("info").inner("timings"), TIMES) if is_new else (row, TIMES_BEFORE_04)
    if names[1] not in times or names[2] not in times:
        return False
    sent, first, last = (times.number(name) for name in names)
    columns["sent_s"].append(sent)
    columns["ttft_s"].append(first - sent)
    columns["e2e_s"].append(last - sent)
    for column in ("prompt_tokens", "output_tokens"):
        columns[column].append(row.number(column, least=1))
    return True


def _model(benchmark: Fields, report: Fields) -> str:
    """Return the name of the model, from the backend of the benchmark or the arguments of the report."""
    for holder, keys in ((benchmark, ("config", "backend")), (benchmark, ("args", "backend")), (report, ("args",))):
        found = holder
        for key in keys:
            if not isinstance(found.value.get(key), dict):
                break
            found = found.inner(key)
        else:
            if name := found.text("model"):
                return name
    return ""
