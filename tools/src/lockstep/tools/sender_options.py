"""Options of the commands that send requests to a server: `lockstep bench serve`, `lockstep replay TRACE --to URL`.

Options that shape the workload are those of `lockstep simulate` (`sim/scenario/scenario.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from lockstep.host.options import Option


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """The server that requests are sent to."""

    url: Annotated[str, Option("the server, such as http://127.0.0.1:8000", flag="--to", metavar="URL")]
    model: Annotated[
        str | None, Option("name of the model in requests", default="the first that the server offers")
    ] = None
    timeout_s: Annotated[float, Option("seconds that one answer may take", flag="--timeout")] = 600.0


@dataclass(frozen=True, kw_only=True)
class LiveOptions(ServerOptions):
    """Options of `lockstep replay TRACE --to URL`, but for those of the workload."""

    speed: Annotated[float, Option("divides every gap and think time: 2 is twice as fast")] = 1.0
    max_tokens: Annotated[int | None, Option("limit of every answer", default="its length in the trace")] = None
    ignore_eos: Annotated[bool, Option("request answers of exactly that length (not in OpenAI's API)")] = False
    out: Annotated[Path | None, Option("one JSON line per request", metavar="FILE")] = None
    overwrite: Annotated[bool, Option("replace FILE")] = False
    as_json: Annotated[bool, Option("one JSON object instead of text", flag="--json")] = False


@dataclass(frozen=True, kw_only=True)
class BenchOptions(ServerOptions):
    """Options of `lockstep bench serve`, but for those of the workload."""

    prompts: Annotated[
        Literal["auto", "ids", "words"],
        Option("token ids, exactly as long as in the workload, or words; auto: ids where the vocabulary is known"),
    ] = "auto"
    vocab: Annotated[int | None, Option("tokens of the model, for ids", default="as the server reports")] = None
    chat: Annotated[bool, Option("send to /v1/chat/completions, each prompt as one message of words")] = False
    ignore_eos: Annotated[
        bool,
        Option(
            "request answers exactly as long as in the workload (a field of vLLM, SGLang and lockstep, not of OpenAI)",
            negatable=True,
        ),
    ] = True
    body: Annotated[str | None, Option("fields for every request, such as '{\"top_p\": 0.9}'", metavar="JSON")] = None
    out: Annotated[Path | None, Option("write a run folder", metavar="DIR")] = None
    overwrite: Annotated[bool, Option("replace the run in DIR")] = False
    as_json: Annotated[bool, Option("print metrics.json instead of tables", flag="--json")] = False
