"""JSON Schemas of everything that a command prints or writes with `--json`: docs/schemas/, made from small runs.

    python -m tests.json_schemas        writes them again, deliberately: a change is an entry of CHANGELOG.md

A schema has every field that the runs below have, with its type; the fields of the outermost object are described here.
A program that reads the output must ignore unknown fields: a release may add some. The test
(tests/test_json_schemas.py) is stricter: its outputs have no field that the schema lacks.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

from lockstep.core.command import main as lockstep

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "schemas"
DIALECT = "https://json-schema.org/draft/2020-12/schema"
LOAD = "gen:n=40,rate=20,input=fixed:300,output=fixed:20"
ENGINE = f"--model qwen3-8b --gpu h100 --workload {LOAD}"
PLAN = f"plan --model qwen3-8b --gpus h100 --workload {LOAD} --quick --requests 20 --jobs 1"
BARE = "--no-trace --no-report"
PREPARED = (
    f"simulate {ENGINE} --slo ttft_p99=500ms {BARE} --out run",
    f"simulate {ENGINE} --max-running-requests 2 --no-intervals {BARE} --out other",
)
"""Command lines that write what the ones below read."""


@dataclass(frozen=True)
class JsonOutput:
    """The JSON of one command: lines that print or write it, and what its outermost fields are.

    Args:
        lines: command lines; the JSON is the file `out.json` if the line names it, else the standard output.
        maps: paths of objects whose keys are names of the input, such as settings; `*` is any element of a list.
    """

    lines: tuple[str, ...]
    fields: Mapping[str, str]
    maps: frozenset[str] = field(default_factory=frozenset)


OF_A_RUN = {
    "about": "the run: command, versions, seed, model, GPU, settings, workload, cost model with sources",
    "requests": "counts of requests by their end",
    "latency": "times of requests: mean, percentiles, largest",
    "throughput": "rates over the run, and in the steady state",
    "cache": "prompt tokens by where their KV came from",
    "kv": "use of the KV pool",
    "scheduler": "retractions, deferrals, the waiting queue",
    "device": "busy time of the device, batches, gaps between decodes",
    "cpu": "simulated time of the scheduler's process",
    "slos": "each bound with its value and whether it is met",
    "energy": "energy and carbon with a range, and their sources",
    "intervals": "intervals of the figures from the error of predicted times",
    "router": "of several engines: how requests were routed",
    "balance": "of several engines: how evenly they were used",
    "engines": "of several engines: the figures of each",
    "transfers": "of prefill and decode engines: transfers of KV",
}
OF_A_COMPARISON = {
    "format": "name of this format",
    "format_version": "version of this format",
    "runs": "the runs, the baseline first",
    "warnings": "why the runs may not be comparable",
    "notes": "what is needed to read the figures",
    "settings": "settings that differ",
    "figures": "each figure in every run",
    "intervals": "intervals of the figures that have one",
    "intervals_note": "meaning of the intervals",
    "pairs": "request by request, where the workload is the same",
}
OF_A_STORY = {
    "request_id": "its number in the journal",
    "label": "its name",
    "tenant": "its tenant",
    "arrived_us": "time of its arrival",
    "ended_us": "time of its end",
    "prompt_tokens": "length of the prompt",
    "output_tokens": "length of the answer so far",
    "queue_us": "arrival to admission",
    "ttft_us": "arrival to the first token",
    "tpot_us": "time per token after the first",
    "e2e_us": "arrival to the end",
    "finish_reason": "why it ended",
    "reject_reason": "why it was rejected",
    "retractions": "how often its KV was given back",
    "waited_us_by_cause": "its waits by cause",
    "waits": "each wait with its cause",
    "told": "the story in sentences",
}
MAPS_OF_A_RUN = frozenset(
    {"about.scheduler", "about.cost_model.constants", "about.calibration.residuals", "about.calibration.unseen"}
)

OUTPUTS = {
    "simulate": JsonOutput(
        (
            f"simulate {ENGINE} --slo ttft_p99=500ms --json",
            f"simulate {ENGINE} --no-intervals --json",
            f"simulate {ENGINE} --no-intervals --replicas 2 --json",
            f"simulate {ENGINE} --no-intervals --prefill-engines 1 --decode-engines 1 --json",
        ),
        OF_A_RUN,
        MAPS_OF_A_RUN,
    ),
    "plan": JsonOutput(
        (
            f"{PLAN} --slo ttft_p99=1s --rate 4 --growth 2 --json out.json",
            f"{PLAN} --slo ttft_p99=1s --max-gpus 2 --search prefill_decode=1:1 --json out.json",
            f"{PLAN} --slo ttft_p99=1us --json out.json",
        ),
        {
            "version": "version of lockstep",
            "commit": "commit of the checkout, if it is one",
            "question": "the question as it was understood",
            "goodput": "meaning of goodput",
            "headline": "the answer in a sentence",
            "forecast": "answers at the loads of --growth",
            "remarks": "what is needed to read the figures, one sentence each",
            "winner": "number of the winning configuration; null: none meets the SLO",
            "serve": "`lockstep serve` lines of the winner, with the model and emulated, each with what it lacks",
            "vllm": "the winner as a command line of vLLM; null without a calibration of vLLM",
            "simulate": "`lockstep simulate` line that repeats the winner's first long run",
            "configurations": "every configuration, with its verdict and all simulated loads",
        },
        frozenset({"question.search", "configurations.*.settings"}),
    ),
    "compare": JsonOutput(("compare run other --json out.json",), OF_A_COMPARISON),
    "workload-describe": JsonOutput(
        (f"workload describe {LOAD} --json", f"workload describe {LOAD},turns=uniform:1:3 --json"),
        {
            "name": "name of the workload",
            "source": "file or generator",
            "format": "format as it was recognised",
            "digest": "digest of the requests",
            "requests": "number of requests",
            "skipped_rows": "invalid rows that were left out",
            "notes": "what was understood, and assumed",
            "arrivals": "rate, bursts, span of the arrivals",
            "prompt": "lengths of prompts",
            "output": "lengths of answers",
            "prompt_only": "requests without output",
            "rank_correlation": "correlation of prompt and output lengths, by rank",
            "sessions": "turns and pauses of sessions",
            "sharing": "prompt tokens that were in an earlier prompt",
            "tenants": "requests by tenant",
            "memory_bytes": "memory of the workload",
        },
    ),
    "workload-fit": JsonOutput(
        (f"workload fit {LOAD} -o again.json --json",),
        {
            "file": "the written file",
            "arrivals_tried": "arrival processes with their likelihood",
            "comparison": "figures of the workload and of the fitted one",
        },
    ),
    "catalogue-models": JsonOutput(
        ("catalogue models qwen3-8b deepseek-v3 --gpus h100,l4 --json",),
        {"models": "parameters, KV bytes per token, weights by type, and what fits on each GPU"},
    ),
    "catalogue-gpus": JsonOutput(
        ("catalogue gpus --json",),
        {"gpus": "rates, memory, links, prices, each with its source"},
        frozenset({"gpus.*.datasheet", "gpus.*.measured", "gpus.*.rates", "gpus.*.usd_per_gpu_hour"}),
    ),
    "catalogue-engines": JsonOutput(("catalogue engines --json",), {"engines": "engines with their releases"}),
    "replay": JsonOutput(
        ("replay run --json", "journal verify run --json", "journal verify run --until 5 --json"),
        {
            "verdict": "equal, not closed, corrupt or diverged",
            "events": "events that were replayed",
            "steps": "steps whose digest is equal",
            "batches": "launched batches",
            "unsealed": "events without a digest",
            "digest": "digest of the last step",
            "closed": "whether the journal has its end",
            "torn_tail": "whether the last record is torn",
            "snapshot_faults": "snapshots that cannot be used",
        },
    ),
    "replay-what-if": JsonOutput(
        ("replay run --what-if --max-running-requests 2 --json",),
        OF_A_COMPARISON
        | {
            "lost_most": "requests whose TTFT rose most, with the causes",
            "won_most": "requests whose TTFT fell most, with the causes",
        },
    ),
    "replay-in-simulator": JsonOutput(
        ("replay run --in-simulator --json",),
        {
            "equal": "whether every step is the recorded one",
            "closed": "whether the journal has its end",
            "steps": "steps of the journal",
            "launches": "launches that are the same",
            "given": "events of the journal that come from outside of scheduler and host, by type",
            "answers": "events of the journal that answer orders, by type",
            "made": "other events, made by the simulated host, by type",
            "drawn_tokens": "tokens that the model drew, in results",
            "slot_waited_us": "the longest time for which a slot was free and the recorded host took in a fact first",
            "difference": "the first step that differs; null: none does",
        },
        frozenset({"given", "answers", "made"}),
    ),
    "explain-request": JsonOutput(("explain run --request 1 --json",), OF_A_STORY),
    "explain-slowest": JsonOutput(
        ("explain run --slowest ttft 3 --json",), {"requests": "the stories of the requests, the slowest first"}
    ),
    "explain-step": JsonOutput(
        ("explain run --step 9 --json", "explain run --step 30 --json"),
        {
            "step": "number of the step",
            "title": "what it did",
            "batch_id": "the launched batch; null: none",
            "parts": "the decisions with their reasons",
        },
    ),
    "explain-state": JsonOutput(
        ("explain run --at 30 --json", "explain run --at end --json"),
        {
            "title": "what the engine was doing",
            "step": "number of the next step",
            "time_us": "time of the last event",
            "ending": "how the journal ends",
            "requests": "open requests with their phase, tokens and pages",
            "in_flight": "batches without a result",
            "last_result": "the last batch with a result",
            "pages": "pages of the pool by their owner",
        },
    ),
    "diff": JsonOutput(
        ("diff run run --json", "diff run other --json"),
        {
            "equal": "whether all decisions are equal",
            "journals": "the two folders",
            "settings": "settings that differ",
            "behaviour_flags": "flags of behaviour that differ",
            "steps": "steps of both",
            "batches": "batches of both",
            "first_differing_input": "the first event that differs",
            "first_differing_decision": "the first decision that differs",
            "matched_requests": "requests of both",
            "matched_by": "id or label",
            "requests_in_one_only": "requests without a counterpart",
            "changes": "changes of the times of matched requests",
        },
    ),
    "export": JsonOutput(
        ("export run --out tables --overwrite --json",),
        {name: f"rows of {name}.parquet" for name in ("steps", "decisions", "batches", "parts", "requests")},
    ),
    "journal-info": JsonOutput(
        ("journal info run --json",),
        {
            "folder": "the folder",
            "header": "settings, seed and host of the run",
            "segments": "files",
            "bytes": "bytes of all files",
            "records": "records of all kinds",
            "events": "observed events",
            "events_by_type": "observed events by type",
            "other_records": "records by kind",
            "duration_us": "time from the first to the last event",
            "end_reason": "why the journal ended",
            "tail": "the state of the last record",
        },
        frozenset({"header.config", "header.host", "events_by_type", "other_records"}),
    ),
    "journal-check": JsonOutput(
        ("journal check run --json",),
        {
            "verdict": "clean, torn or corrupt",
            "closed": "whether the journal has its end",
            "segment": "the last file",
            "offset": "end of the last whole record in it",
            "file_bytes": "bytes of the last file",
            "reason": "what is wrong with the last record",
            "records": "whole records",
            "steps": "steps",
            "chain": "digest of the chain of records",
            "repaired": "whether a torn record was cut off",
            "snapshot_faults": "snapshots that cannot be used",
        },
    ),
}


@contextmanager
def prepared(folder: Path) -> Iterator[None]:
    """Work in a folder with the runs that the command lines read."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        for line in PREPARED:
            with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
                status = lockstep(line.split())
            assert status == 0, line
        yield
    finally:
        os.chdir(before)


def output_of(line: str) -> Any:
    """Return the JSON of a command line, which is run in this process."""
    shown, problems, written = StringIO(), StringIO(), Path("out.json")
    written.unlink(missing_ok=True)
    with redirect_stdout(shown), redirect_stderr(problems):
        status = lockstep(line.split())
    assert status in ((0, 3) if line.startswith("plan") else (0, 1) if line.startswith("diff") else (0,)), (
        f"lockstep {line} ended with {status}: {problems.getvalue()}"
    )
    return json.loads(written.read_text("utf-8") if "out.json" in line else shown.getvalue())


def schema_of(name: str, examples: Sequence[Any]) -> dict[str, Any]:
    """Return the schema of all examples, with the description of the outermost fields."""
    made = OUTPUTS[name]
    schema = _merged(examples, "", made.maps)
    for key, part in schema.get("properties", {}).items():
        described = made.fields.get(key, "")
        if described:
            schema["properties"][key] = {"description": described, **part}
    title = f"lockstep {made.lines[0].split(' --')[0]}"
    return {"$schema": DIALECT, "title": title, **schema}


def _merged(examples: Sequence[Any], path: str, maps: frozenset[str]) -> dict[str, Any]:
    kinds = {_kind(one) for one in examples}
    if "number" in kinds:
        kinds.add("null")  # what was not measured
    found: dict[str, Any] = {} if kinds <= {"null"} else {"type": kinds.pop() if len(kinds) == 1 else sorted(kinds)}
    if objects := [one for one in examples if isinstance(one, dict)]:
        below = path.lstrip(".")
        if below in maps or "_by_" in (last := below.rpartition(".")[2]) or last.startswith("by_"):
            values = [value for one in objects for value in one.values()]
            found["additionalProperties"] = _merged(values, f"{path}.*", maps) if values else True
        else:
            names = dict.fromkeys(name for one in objects for name in one)
            found["properties"] = {
                name: _merged([one[name] for one in objects if name in one], f"{path}.{name}", maps) for name in names
            }
            found["required"] = [name for name in names if all(name in one for one in objects)]
    if lists := [one for one in examples if isinstance(one, list)]:
        items = [item for one in lists for item in one]
        found["items"] = _merged(items, f"{path}.*", maps) if items else True
    return found


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    named: dict[type, str] = {str: "string", list: "array", dict: "object"}
    return named[type(value)]


def main() -> int:
    """Write all schemas. Returns 0."""
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name, prepared(Path(name)):
        for output, made in OUTPUTS.items():
            schema = schema_of(output, [output_of(line) for line in made.lines])
            text = json.dumps(schema, indent=1, ensure_ascii=False) + "\n"
            (FOLDER / f"{output}.json").write_text(text, "utf-8")
            print(f"{output}: {len(text):,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
