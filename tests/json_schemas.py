"""JSON Schemas of everything that a command prints or writes with `--json`: docs/schemas/, made from small runs.

    python -m tests.json_schemas        writes them again, deliberately: a change is an entry of CHANGELOG.md

A schema has every field that the runs below have, with its type; the fields of the outermost object are described here.
A program that reads the output must ignore fields that it does not know: a release may add some. The test
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
PREPARED = (
    f"simulate {ENGINE} --slo ttft_p99=500ms --out run",
    f"simulate {ENGINE} --schedule-policy lof --out other",
    f"simulate {ENGINE} --replicas 2 --out cluster",
    f"workload fit {LOAD} -o fitted.json",
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
    "about": "the run: command, versions, seed, model, GPUs, settings, workload and its digest",
    "requests": "counts of requests by their end",
    "latency": "times of requests in microseconds: mean, percentiles, largest",
    "latency_intervals": "intervals of the percentiles",
    "throughput": "rates over the run, and in the steady state",
    "cache": "prompt tokens by where their KV came from",
    "kv": "use of the KV pool",
    "scheduler": "launches, retractions, the waiting queue",
    "device": "busy time of the device, batches",
    "slos": "each bound with its value, its interval and whether it is met",
    "energy": "energy and carbon with a range, and their sources",
    "notes": "assumptions about the model",
    "warnings": "what makes figures doubtful",
}

OUTPUTS = {
    "simulate": JsonOutput(
        (
            f"simulate {ENGINE} --slo ttft_p99=500ms --json",
            f"simulate {ENGINE} --no-intervals --json",
            f"simulate {ENGINE} --replicas 2 --json",
            f"simulate {ENGINE} --prefill-engines 1 --decode-engines 1 --json",
        ),
        OF_A_RUN,
    ),
    "plan": JsonOutput(
        (
            f"plan --model qwen3-8b --gpus h100 --workload {LOAD} --slo ttft_p99=1s --rate 4 --growth 2 --quick"
            " --requests 20 --jobs 1 --json out.json",
            f"plan --model qwen3-8b --gpus h100 --workload {LOAD} --slo ttft_p99=1s --max-gpus 2 --quick"
            " --search prefill_decode=1:1 --requests 20 --jobs 1 --json out.json",
            f"plan --model qwen3-8b --gpus h100 --workload {LOAD} --slo ttft_p99=1us --quick --requests 20 --jobs 1"
            " --json out.json",
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
    "compare": JsonOutput(("compare run other --json out.json",), {}),
    "workload-describe": JsonOutput((f"workload describe {LOAD} --json",), {}),
    "workload-fit": JsonOutput((f"workload fit {LOAD} -o again.json --json",), {}),
    "catalogue-models": JsonOutput(("catalogue models qwen3-8b deepseek-v3 --gpus h100,l4 --json",), {}),
    "catalogue-gpus": JsonOutput(("catalogue gpus --json",), {}),
    "catalogue-engines": JsonOutput(("catalogue engines --json",), {}),
    "replay": JsonOutput(("replay run --json", "journal verify run --json"), {}),
    "replay-what-if": JsonOutput(("replay run --what-if --policy lof --json",), {}),
    "explain-request": JsonOutput(("explain run --request 1 --json",), {}),
    "explain-slowest": JsonOutput(("explain run --slowest ttft 3 --json",), {}),
    "explain-step": JsonOutput(("explain run --step 9 --json",), {}),
    "explain-state": JsonOutput(("explain run --at 9 --json",), {}),
    "diff": JsonOutput(("diff run run --json", "diff run other --json"), {}),
    "export": JsonOutput(("export run --out tables --overwrite --json",), {}),
    "journal-info": JsonOutput(("journal info run --json",), {}),
    "journal-check": JsonOutput(("journal check run --json",), {}),
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
    kinds = sorted({_kind(one) for one in examples})
    found: dict[str, Any] = {"type": kinds[0] if len(kinds) == 1 else kinds}
    if objects := [one for one in examples if isinstance(one, dict)]:
        below = path.lstrip(".")
        if below in maps:
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
    return {str: "string", list: "array", dict: "object"}[type(value)]


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
