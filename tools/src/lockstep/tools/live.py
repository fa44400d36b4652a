"""`lockstep replay TRACE --to URL`: send a workload to an OpenAI-compatible server, each request at its moment.

Open loop: a request is sent when it is due, whether or not the server keeps up; later turns of a session come after the
answer before them and the user's think time. How far the sender itself was off its schedule is measured and said in
every run, because a generator that lags measures itself.

Equal prefixes are sent as equal text: each token id is a word, always the same one, so that prompts share exactly what
they shared in the trace. A later turn begins with the text of the turn before and with the answer that really came.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np

from lockstep.core.errors import ConfigError
from lockstep.sim.report.text import count, duration
from lockstep.sim.token_runs import prompt_ids
from lockstep.sim.turns import Turn, Turns
from lockstep.sim.workload import open_workload
from lockstep.tools.http_stream import Client, HttpError, Target
from lockstep.tools.recorded import journal_workload
from lockstep.tools.runs import print_json, refusals

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
EARLY_S = 0.002  # a sleep ends so much before the moment; the rest is waited for in turns of the loop
WARM_MAX = 64  # connections opened before the first request
PERCENTILES = (50, 90, 99)

_CONSONANTS, _VOWELS = "bdfgklmnprstvz", "aeiou"
_SYLLABLES = [c + v for c in _CONSONANTS for v in _VOWELS]  # 70


@dataclass
class Sent:
    """What became of one request. Times are microseconds since the first arrival; -1 if it did not happen."""

    label: str
    due_us: int
    sent_us: int = -1
    first_us: int = -1
    last_us: int = -1
    messages: int = 0
    output_tokens: int = 0  # as the server counts; else its messages
    prompt_tokens: int = 0  # as the server counts
    status: int = 0
    error: str = ""

    @property
    def late_us(self) -> int:
        return self.sent_us - self.due_us


@click.command(context_settings={"max_content_width": 120})
@click.argument("trace")
@click.option("--to", "url", required=True, metavar="URL", help="The server, such as http://127.0.0.1:8000.")
@click.option("--model", help="Name to ask for; by default the first that the server offers.")
@click.option("--speed", default=1.0, help="Divides every gap and think time: 2 is twice as fast.", show_default=True)
@click.option("--rate", type=click.FLOAT, help="Requests per second: stretches a trace.")
@click.option("--time-window", metavar="FROM..TO", help="Keep what arrives then, in recorded time.")
@click.option("--limit", type=click.IntRange(1), help="Keep the first so many requests.")
@click.option("--seed", default=7, help="Of a generated workload.", show_default=True)
@click.option("--max-tokens", type=click.IntRange(1), help="Limit of every answer; by default its length in the trace.")
@click.option("--ignore-eos", is_flag=True, help="Ask for answers of exactly that length (not in OpenAI's API).")
@click.option("--timeout", "timeout_s", default=600.0, help="Seconds that one answer may take.", show_default=True)
@click.option("--out", type=click.Path(path_type=Path), metavar="FILE", help="One JSON line per request.")
@click.option("--overwrite", is_flag=True, help="Replace FILE.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of text.")
def live(
    trace: str,
    url: str,
    model: str | None,
    speed: float,
    rate: float | None,
    time_window: str | None,
    limit: int | None,
    seed: int,
    max_tokens: int | None,
    ignore_eos: bool,
    timeout_s: float,
    out: Path | None,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Send a workload to an OpenAI-compatible server with its own timing, and say how it was answered.

    TRACE is a run folder, a recorded trace, or gen:... as for `lockstep simulate`. A key goes in OPENAI_API_KEY.
    Ctrl-C stops sending, breaks open answers off and reports what there was. Exit status: 0; 1 if no request was
    answered; 130 after Ctrl-C.

    \b
    lockstep replay conversation_trace.jsonl.gz --to http://127.0.0.1:8000 --time-window 0..300
    lockstep replay gen:n=500,rate=50,input=fixed:100,output=fixed:20 --to http://127.0.0.1:8000
    """
    with refusals():
        if not 1e-3 <= speed <= 1e3:
            raise ConfigError(f"`--speed` must be from 0.001 to 1000, got `{speed}`\nhint: 2 halves every gap")
        if timeout_s <= 0:
            raise ConfigError(f"`--timeout` must be above 0 seconds, got `{timeout_s}`")
        if out is not None and out.exists() and not overwrite:
            raise click.UsageError(f"{out} exists\nhint: choose another file, or add --overwrite")
        turns = _turns(trace, rate=rate, time_window=time_window, limit=limit, seed=seed)
        sender = Sender(Target.parse(url), turns, model, speed, max_tokens, ignore_eos, timeout_s)
        try:
            interrupted = asyncio.run(sender.run())
        except OSError as error:
            raise ConfigError(f"`{url}` cannot be reached: {error}\nhint: is the server up?") from error
    if out is not None:
        out.write_text("".join(json.dumps(asdict(one)) + "\n" for one in sender.sent), "utf-8")
    found = summary(sender.sent, len(turns), sender.span_us)
    if as_json:
        print_json({"server": url, "model": sender.model, "interrupted": interrupted, **found})
    else:
        for line in summary_lines(found, sender.model, interrupted):
            click.echo(line)
    if interrupted:
        sys.exit(EXIT_INTERRUPTED)
    if not found["answered"]:
        sys.exit(EXIT_FAILED)


def _turns(trace: str, *, seed: int, rate: float | None, time_window: str | None, limit: int | None) -> Turns:
    folder = Path(trace)
    if (folder / "journal").is_dir() or any(folder.glob("*.log")):
        if rate is not None or time_window is not None:
            raise ConfigError(
                "`--rate` and `--time-window` are for traces\nhint: --speed stretches a run, --limit cuts it"
            )
        turns = journal_workload(folder).turns
        return turns if limit is None else turns.head(limit)
    return open_workload(trace, seed=seed, rate=rate, time_window=time_window, limit=limit, digest=False).turns


def word_of(token: int) -> str:
    """A token id as a word, another one for each id."""
    syllables = []
    while True:
        token, rest = divmod(token, len(_SYLLABLES))
        syllables.append(_SYLLABLES[rest])
        if not token:
            return "".join(syllables)


def text_of(runs: Sequence[int], start: int = 0) -> str:
    """A prompt as words, from token `start` on."""
    return "".join(f" {word_of(token)}" for token in prompt_ids(runs)[start:].tolist())


class Sender:
    """Sends every turn at its moment and reads the answers."""

    def __init__(
        self,
        target: Target,
        turns: Turns,
        model: str | None,
        speed: float,
        max_tokens: int | None,
        ignore_eos: bool,
        timeout_s: float,
    ) -> None:
        key = os.environ.get("OPENAI_API_KEY")
        self.client = Client(target, {"Authorization": f"Bearer {key}"} if key else {})
        self.turns = turns
        self.model = model or ""
        self.speed = speed
        self.max_tokens = max_tokens
        self.ignore_eos = ignore_eos
        self.timeout_s = timeout_s
        self.sent: list[Sent] = []
        self.span_us = 0
        self._begin_s = 0.0
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> bool:
        """Send everything and wait for the answers. Returns whether Ctrl-C ended it. Raises OSError, ConfigError."""
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            with suppress(NotImplementedError, ValueError, RuntimeError):  # not in the main thread, not on this system
                loop.add_signal_handler(number, stop.set)
        if not self.model:
            self.model = await self._first_model()
        await self.client.warm(min(WARM_MAX, len(self.turns.by_clock_rows)))
        self._begin_s = loop.time() + 0.05
        stopping = asyncio.ensure_future(stop.wait())
        sending = asyncio.ensure_future(self._send_all())
        try:
            await asyncio.wait({stopping, sending}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
            return stop.is_set()
        finally:
            for task in (stopping, sending, *self._tasks):
                task.cancel()
            await asyncio.gather(stopping, sending, *self._tasks, return_exceptions=True)
            self.span_us = self._now_us()
            self.client.close()

    async def _send_all(self) -> None:
        first_us = int(self.turns.arrival_us[self.turns.by_clock_rows[0]])
        for turn in self.turns.by_clock():
            due_us = round((turn.arrival_us - first_us) / self.speed)
            body = self._body(turn, text_of(turn.prompt))  # before it is due
            await self._sleep_until(due_us)
            self._start(turn, due_us, body, text_of(turn.prompt) if len(self.turns.follow_ups(turn.index)) else "")
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    def _start(self, turn: Turn, due_us: int, body: bytes, text: str) -> None:
        task = asyncio.ensure_future(self._converse(turn, due_us, body, text))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _converse(self, turn: Turn, due_us: int, body: bytes, text: str) -> None:
        """Send a turn; when its answer has ended, think and go on with the turns behind it."""
        one = Sent(turn.label, due_us)
        self.sent.append(one)
        answer = await self._ask(one, body)
        if answer is None:
            return
        for index in self.turns.follow_ups(turn.index):
            following = self.turns[index]
            known = turn.prompt_tokens + turn.output_tokens
            whole = text + answer + text_of(following.prompt, known)
            due_us = one.last_us + round(following.think_us / self.speed)
            body = self._body(following, whole)
            await self._sleep_until(due_us)
            self._start(following, due_us, body, whole)

    async def _ask(self, one: Sent, body: bytes) -> str | None:
        """Send one request and read its stream. None if it was not answered to its end."""

        def on_sent() -> None:
            one.sent_us = self._now_us()

        pieces: list[str] = []
        try:
            async with asyncio.timeout(self.timeout_s):
                async with self.client.request("POST", "/v1/completions", body, on_sent) as response:
                    one.status = response.status
                    if response.status != 200:
                        text = b"".join([piece async for piece in response.pieces()])
                        one.error = text[:200].decode("utf-8", "replace") or f"status {response.status}"
                        return None
                    async for line in response.lines():
                        if line.startswith(b"data:"):
                            self._take(one, line[5:].strip(), pieces)
        except TimeoutError:
            one.error = f"no end within {self.timeout_s:g} s"
        except (OSError, HttpError, asyncio.IncompleteReadError) as error:
            one.error = f"{type(error).__name__}: {error}"
        except asyncio.CancelledError:
            one.error = one.error or "interrupted"
            raise
        if one.error:
            return None
        one.last_us = one.last_us if one.last_us >= 0 else self._now_us()
        one.output_tokens = one.output_tokens or one.messages
        return "".join(pieces)

    def _take(self, one: Sent, data: bytes, pieces: list[str]) -> None:
        """One server-sent event."""
        if data == b"[DONE]":
            return
        try:
            event = json.loads(data)
        except ValueError:
            one.error = f"not JSON: {data[:60]!r}"
            return
        if not isinstance(event, dict):
            return
        if event.get("error"):
            one.error = str(event["error"])[:200]
            return
        for choice in event.get("choices") or ():
            if text := choice.get("text"):
                pieces.append(text)
                one.messages += 1
                one.last_us = self._now_us()
                if one.first_us < 0:
                    one.first_us = one.last_us
        usage = event.get("usage") or {}
        one.output_tokens = int(usage.get("completion_tokens") or one.output_tokens)
        one.prompt_tokens = int(usage.get("prompt_tokens") or one.prompt_tokens)

    def _body(self, turn: Turn, prompt: str) -> bytes:
        content: dict[str, Any] = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": self.max_tokens or max(turn.output_tokens, 1),
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.ignore_eos:
            content["ignore_eos"] = True
        return json.dumps(content).encode()

    async def _first_model(self) -> str:
        async with self.client.request("GET", "/v1/models", b"") as response:
            text = b"".join([piece async for piece in response.pieces()])
        try:
            return str(json.loads(text)["data"][0]["id"])
        except (ValueError, LookupError, TypeError) as error:
            raise ConfigError(
                f"the server lists no models: status {response.status}, {text[:80]!r}\nhint: name one by --model"
            ) from error

    def _now_us(self) -> int:
        return round((asyncio.get_running_loop().time() - self._begin_s) * 1e6)

    async def _sleep_until(self, due_us: int) -> None:
        """Until the moment: most of it asleep, the last bit awake, because a sleep ends a millisecond late."""
        left_s = (due_us - self._now_us()) / 1e6
        if left_s > EARLY_S:
            await asyncio.sleep(left_s - EARLY_S)
        while self._now_us() < due_us:
            await asyncio.sleep(0)


# ------------------------------------------------------------------------------------------------------------- figures


def summary(sent: Sequence[Sent], expected: int, span_us: int) -> dict[str, Any]:
    """Figures of a run; times in microseconds, None where nothing was measured."""
    done = [one for one in sent if one.last_us >= 0 and not one.error]
    gone = [one for one in sent if one.sent_us >= 0]
    tpot = [(o.last_us - o.first_us) / (o.output_tokens - 1) for o in done if o.output_tokens > 1 and o.first_us >= 0]
    return {
        "requests": expected,
        "sent": len(gone),
        "answered": len(done),
        "failed": dict(Counter(one.error[:60] for one in sent if one.error)),
        "span_us": span_us,
        "output_tokens": sum(one.output_tokens for one in done),
        "prompt_tokens": sum(one.prompt_tokens for one in done),
        "late_us": _spread([one.late_us for one in gone]),
        "ttft_us": _spread([one.first_us - one.due_us for one in done if one.first_us >= 0]),
        "tpot_us": _spread(tpot),
        "e2e_us": _spread([one.last_us - one.due_us for one in done]),
    }


def _spread(values: Sequence[float]) -> dict[str, float | None]:
    if not values:
        return {**{f"p{p}": None for p in PERCENTILES}, "max": None}
    at = np.percentile(np.array(values, float), PERCENTILES)
    return {**{f"p{p}": float(value) for p, value in zip(PERCENTILES, at, strict=True)}, "max": float(max(values))}


def summary_lines(found: dict[str, Any], model: str, interrupted: bool) -> list[str]:
    """For a terminal."""
    seconds = max(found["span_us"] / 1e6, 1e-6)
    lines = ["interrupted: the figures are those until then"] if interrupted else []
    lines.append(
        f"{found['answered']:,} of {count(found['requests'], 'request')} answered by {model} in {seconds:,.1f} s, "
        f"{count(found['output_tokens'], 'token')} ({found['output_tokens'] / seconds:,.1f}/s)"
    )
    if found["sent"] < found["requests"]:
        lines.append(f"{found['requests'] - found['sent']:,} were not sent")
    lines += [f"{number:,} failed: {error}" for error, number in found["failed"].items()]
    lines.append(f"{'':<22}{'p50':>10}{'p90':>10}{'p99':>10}{'max':>10}")
    titles = {"ttft_us": "TTFT", "tpot_us": "TPOT", "e2e_us": "end to end", "late_us": "sent after it was due"}
    for name, title in titles.items():
        cells = "".join(f"{duration(value):>10}" for value in found[name].values())
        lines.append(f"{title:<22}{cells}")
    lines.append("times count from when a request was due, not from when it was sent")
    return lines
