"""`lockstep replay TRACE --to URL`: send a workload to an OpenAI-compatible server, each request at its due time.

Open loop: a request is sent when it is due, whether or not the server keeps up. A later turn of a session is due after
the previous answer and the user's think time. The sender's own lateness is measured and reported in every run, because
a late generator distorts the latencies.

Equal prefixes are sent as equal text: each token id becomes a word, always the same one, so that prompts share exactly
the prefixes that they shared in the trace. A later turn that begins with the previous turn continues the real answer of
that turn.

`lockstep bench serve` (bench.py) sends with the same `Sender`, and arrivals as in the simulator.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import sys
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from math import inf
from pathlib import Path
from typing import Any

import click
import msgspec
import numpy as np

from lockstep.core.contract.errors import ConfigError
from lockstep.core.contract.events import RequestArrived, RequestId
from lockstep.host.options import options_of, take, with_flags
from lockstep.sim.host.arrivals import Arrivals
from lockstep.sim.host.closed_loop import ConcurrentSessions
from lockstep.sim.host.ports import NEVER_US
from lockstep.sim.results.text import count, duration
from lockstep.sim.scenario.scenario import Scenario
from lockstep.sim.workload.token_runs import prompt_ids
from lockstep.sim.workload.turns import Turn, Turns
from lockstep.sim.workload.workload import open_workload
from lockstep.tools.http_stream import HttpClient, HttpError, ServerAddress
from lockstep.tools.recorded import journal_workload
from lockstep.tools.runs import print_json, refusals
from lockstep.tools.sender_options import LiveOptions

OF_WORKLOAD = ("rate", "time_window", "limit", "seed")
"""Options of `lockstep simulate` that `lockstep replay --to` has, too."""
EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
AHEAD_US = 1_000_000  # a request is built this long before it is due
TICK_S = 0.1
EARLY_S = 0.002  # a sleep ends this long before the due time; the rest is waited in turns of the event loop
WARM_MAX = 64  # connections opened before the first request
PERCENTILES = (50, 90, 99)

_CONSONANTS, _VOWELS = "bdfgklmnprstvz", "aeiou"
_SYLLABLES = [c + v for c in _CONSONANTS for v in _VOWELS]  # 70


@dataclass
class Sent:
    """The record of one request. Times are microseconds since the first arrival; -1 for events that did not happen."""

    label: str
    due_us: int
    tenant: str = ""
    turn_tokens: int = 0  # tokens of the prompt in the workload
    sent_us: int = -1
    first_us: int = -1
    last_us: int = -1
    messages: int = 0
    output_tokens: int = 0  # counted by the server; without a count, its messages
    prompt_tokens: int = 0  # counted by the server
    cached_tokens: int = -1  # of the prompt, counted by the server
    ended_us: int = -1  # time of the finish reason, or of the last message
    finish_reason: str = ""  # as the server sent it
    status: int = 0  # of HTTP
    error: str = ""
    kind: str = ""  # of the error: "status 503", "timeout", "connection", "stream", "interrupted"
    request_id: RequestId = -1
    message_us: array[int] = field(default_factory=lambda: array("q"), repr=False)
    message_tokens: array[int] = field(
        default_factory=lambda: array("i"), repr=False
    )  # output tokens up to each message; -1 if the server does not report them

    @property
    def late_us(self) -> int:
        return self.sent_us - self.due_us

    def row(self) -> dict[str, Any]:
        """Return all fields except single messages, for a line of JSON."""
        names = (one.name for one in fields(self))
        return {name: getattr(self, name) for name in names if not name.startswith("message_")}


@click.command(context_settings={"show_default": True, "max_content_width": 120})
@click.argument("trace")
@with_flags(click.option, options_of(LiveOptions).values(), kinds={"max_tokens": click.IntRange(1)})
@with_flags(click.option, [options_of(Scenario)[name] for name in OF_WORKLOAD], kinds={"limit": click.IntRange(1)})
def live(trace: str, **options: Any) -> None:
    """Send a workload to an OpenAI-compatible server with its own timing, and report how it was answered.

    TRACE is a run folder, a recorded trace, or gen:... as for `lockstep simulate`. A key goes in OPENAI_API_KEY.
    Ctrl-C stops sending, breaks open answers off and reports what there was. Exit status: 0; 1 if no request was
    answered; 130 after Ctrl-C.

    \b
    lockstep replay conversation_trace.jsonl.gz --to http://127.0.0.1:8000 --time-window 0..300
    lockstep replay gen:n=500,rate=50,input=fixed:100,output=fixed:20 --to http://127.0.0.1:8000
    """
    given = take(LiveOptions, options)
    out = given.out
    with refusals():
        if not 1e-3 <= given.speed <= 1e3:
            raise ConfigError(f"`--speed` must be from 0.001 to 1000, got `{given.speed}`\nhint: 2 halves every gap")
        check_timeout(given.timeout_s)
        if out is not None and out.exists() and not given.overwrite:
            raise click.UsageError(f"{out} exists\nhint: choose another file, or add --overwrite")
        turns = _turns(trace, **options)
        asking = Asking(WORDS, max_tokens=given.max_tokens, ignore_eos=given.ignore_eos)
        turns = _sped(turns, given.speed)
        address = ServerAddress.parse(given.url)
        sender = Sender(address, Arrivals(turns), turns, given.model, asking, given.timeout_s)
        try:
            interrupted = asyncio.run(sender.run())
        except OSError as error:
            raise ConfigError(f"`{given.url}` cannot be reached: {error}\nhint: is the server up?") from error
    if out is not None:
        out.write_text("".join(json.dumps(one.row()) + "\n" for one in sender.sent), "utf-8")
    found = summary(sender.sent, len(turns), sender.span_us)
    if given.as_json:
        print_json({"server": given.url, "model": sender.model, "interrupted": interrupted, **found})
    else:
        for line in summary_lines(found, sender.model, interrupted):
            click.echo(line)
    if interrupted:
        sys.exit(EXIT_INTERRUPTED)
    if not found["answered"]:
        sys.exit(EXIT_FAILED)


def check_timeout(timeout_s: float) -> None:
    """Raise ConfigError unless `timeout_s` is a positive, finite number of seconds."""
    if not 0.0 < timeout_s < inf:
        raise ConfigError(f"`--timeout` must be seconds above 0, got `{timeout_s}`\nhint: 600 is the default")


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


def _sped(turns: Turns, speed: float) -> Turns:
    """Return the turns with every gap and think time divided by `speed`, the first at 0."""
    first_us = turns.arrival_us[turns.by_clock_rows[0]]
    think_us = np.rint(turns.think_us / speed).astype(np.int64)
    return replace(turns, think_us=think_us).at(np.rint((turns.arrival_us - first_us) / speed).astype(np.int64))


def word_of(token: int) -> str:
    """Return the word of a token id. Different ids have different words."""
    syllables = []
    while True:
        token, rest = divmod(token, len(_SYLLABLES))
        syllables.append(_SYLLABLES[rest])
        if not token:
            return "".join(syllables)


def text_of(runs: Sequence[int], start: int = 0) -> str:
    """Return a prompt as words, from token `start` on."""
    return "".join(f" {word_of(token)}" for token in prompt_ids(runs)[start:].tolist())


class Words:
    """Prompts as text. The number of the server's tokens per word depends on its tokenizer."""

    def of(self, runs: Sequence[int], start: int = 0) -> str:
        """Return a prompt from token `start` on."""
        return text_of(runs, start)

    def answer(self, texts: Sequence[str], ids: Sequence[int]) -> str | None:
        """Return an answer as part of a prompt."""
        return "".join(texts)


class TokenIdPrompts:
    """Prompts as token ids of the model, exactly as long as in the workload.

    An id of the workload is mapped to an id from the middle of the vocabulary, away from the special tokens at both
    ends, always to the same one. Several ids of the workload may be mapped to the same id, so different prompts may
    have some ids in common.
    """

    def __init__(self, vocabulary: int) -> None:
        if vocabulary < 16:
            raise ConfigError(f"`vocab` must be at least 16 tokens, got `{vocabulary}`\nhint: the model's vocab_size")
        self._first = vocabulary // 8
        self._count = vocabulary * 3 // 4

    def of(self, runs: Sequence[int], start: int = 0) -> list[int]:
        """Return a prompt from token `start` on."""
        mixed = prompt_ids(runs)[start:].astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):  # splitmix64
            mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
        found: list[int] = (self._first + (mixed >> np.uint64(32)) % np.uint64(self._count)).astype(np.int64).tolist()
        return found

    def answer(self, texts: Sequence[str], ids: Sequence[int]) -> list[int] | None:
        """Return an answer as part of a prompt; None if the server did not report its ids."""
        return list(ids) or None


WORDS = Words()


@dataclass(frozen=True)
class Asking:
    """The form in which a turn is sent to the server."""

    prompts: Words | TokenIdPrompts = WORDS
    chat: bool = False  # send the prompt as one message of a conversation
    max_tokens: int | None = None  # None: the turn's own length
    ignore_eos: bool = False
    fields: Mapping[str, Any] = field(default_factory=dict)  # added to every body; they replace fields of `body`

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    def body(self, model: str, turn: Turn, prompt: str | list[int]) -> bytes:
        """Return the JSON body for a turn."""
        content: dict[str, Any] = {
            "model": model,
            "max_tokens": self.max_tokens or max(turn.output_tokens, 1),
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.chat:
            content["messages"] = [{"role": "user", "content": prompt}]
        else:
            content["prompt"] = prompt
        if isinstance(self.prompts, TokenIdPrompts):
            content["return_token_ids"] = True
        if self.ignore_eos:
            content["ignore_eos"] = True
        return msgspec.json.encode(content | dict(self.fields))


@dataclass(slots=True)
class _Answered:
    """A turn with the text of its real answer, for the turns that continue it."""

    turn: Turn
    text: str | list[int]  # prompt and answer
    to_come: int  # turns after it whose prompts are not built yet


class Sender:
    """Sends every turn at its due time and reads the answers.

    Args:
        arrivals: requests with due times, open loop or closed loop, as for a host of the simulator.
        turns: the turns of `arrivals`.
        model: the model to request; if empty, the first that the server lists.
        tick: called ten times a second, e.g. for a progress bar.
    """

    def __init__(
        self,
        target: ServerAddress,
        arrivals: Arrivals | ConcurrentSessions,
        turns: Turns,
        model: str | None,
        asking: Asking,
        timeout_s: float,
        tick: Callable[[Sender], None] | None = None,
    ) -> None:
        self.client = client_of(target)
        self.arrivals = arrivals
        self.turns = turns
        self.model = model or ""
        self.asking = asking
        self.timeout_s = timeout_s
        self.sent: list[Sent] = []
        self.ended = 0
        self.span_us = 0
        self.lags_us = array("q")  # how late the event loop woke up, ten times a second
        self._tick = tick
        self._begin_s = 0.0
        self._tasks: set[asyncio.Task[None]] = set()
        self._broken: BaseException | None = None  # an error of the sender itself, raised by `run`
        self._under_way = 0  # requests taken from the arrivals and not ended
        self._news = asyncio.Event()
        self._answers: dict[int, _Answered] = {}  # by index of the turn, as long as further turns continue it

    async def run(self) -> bool:
        """Send all requests and wait for the answers. Returns whether Ctrl-C ended it. Raises OSError, ConfigError."""
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            with suppress(NotImplementedError, ValueError, RuntimeError):  # not in the main thread, not on this system
                loop.add_signal_handler(number, stop.set)
        if not self.model:
            self.model = (await models_of(self.client))[0]
        await self.client.warm(min(WARM_MAX, self.arrivals.expected))
        gc.collect()
        gc.freeze()  # otherwise a collection scans all imported objects for 25 ms while requests are due
        self._begin_s = loop.time() + 0.05
        stopping = asyncio.ensure_future(stop.wait())
        sending = asyncio.ensure_future(self._send_all())
        ticking = asyncio.ensure_future(self._tick_on())
        try:
            await asyncio.wait({stopping, sending}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
            return stop.is_set()
        finally:
            for task in (stopping, sending, ticking, *self._tasks):
                task.cancel()
            await asyncio.gather(stopping, sending, ticking, *self._tasks, return_exceptions=True)
            self.span_us = self._now_us()
            gc.unfreeze()
            self.client.close()

    async def _send_all(self) -> None:
        arrivals = self.arrivals
        while True:
            self._news.clear()
            if self._broken is not None:
                raise self._broken
            left_us = arrivals.next_us - AHEAD_US - self._now_us()
            if left_us <= 0:
                due_us, event = arrivals.next_us, arrivals.take(None)
                assert isinstance(event, RequestArrived)  # this sender has no cancellations
                turn = arrivals.open_turns[event.request_id]
                prompt = self._prompt(turn)
                one = Sent(turn.label, due_us, turn.tenant, turn.prompt_tokens, request_id=event.request_id)
                self._under_way += 1
                task = asyncio.ensure_future(
                    self._converse(turn, one, prompt, self.asking.body(self.model, turn, prompt))
                )
                self._tasks.add(task)
                task.add_done_callback(self._over)
                await asyncio.sleep(0)  # lets the loop read and time incoming data
            elif arrivals.next_us == NEVER_US and not self._under_way:
                return
            else:
                wait_s = None if arrivals.next_us == NEVER_US else left_us / 1e6
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._news.wait(), wait_s)

    def _over(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._broken = error
            self._news.set()

    def _prompt(self, turn: Turn) -> str | list[int]:
        """Return the prompt of a turn. If it begins with the previous turn, it continues that turn's real text."""
        prompts = self.asking.prompts
        answered = None if turn.after is None else self._answers.get(turn.after)
        if answered is None:
            return prompts.of(turn.prompt)
        answered.to_come -= 1
        if not answered.to_come:
            del self._answers[answered.turn.index]
        before, ids = answered.turn, prompt_ids(turn.prompt)
        known = before.prompt_tokens + before.output_tokens
        if len(ids) < known or not np.array_equal(ids[: before.prompt_tokens], prompt_ids(before.prompt)):
            return prompts.of(turn.prompt)  # this turn does not continue the previous one
        return answered.text + prompts.of(turn.prompt, known)  # type: ignore[operator]  # both text, or both ids

    async def _converse(self, turn: Turn, one: Sent, prompt: str | list[int], body: bytes) -> None:
        """Send a turn when it is due. Its answer, or its failure, determines the due times of later turns."""
        await self._sleep_until(one.due_us)
        self.sent.append(one)
        answer = await self._ask(one, body)
        self._under_way -= 1
        self.ended += 1
        self._news.set()
        if one.error:
            self.arrivals.broke_off(one.request_id, self._now_us())
        else:
            to_come = len(self.turns.follow_ups(turn.index % len(self.turns)))  # a closed loop plays them several times
            if to_come and answer is not None:
                text = prompt + answer  # type: ignore[operator]  # both text, or both ids
                self._answers[turn.index] = _Answered(turn, text, to_come)
            self.arrivals.answered(one.request_id, one.ended_us)

    async def _tick_on(self) -> None:
        """Measure how late sleeps end, and call `tick`."""
        loop = asyncio.get_running_loop()
        while True:
            due_s = loop.time() + TICK_S
            await asyncio.sleep(TICK_S)
            self.lags_us.append(round((loop.time() - due_s) * 1e6))
            if self._tick is not None:
                self._tick(self)

    async def _ask(self, one: Sent, body: bytes) -> str | list[int] | None:
        """Send one request and read its stream. Returns the answer as part of a prompt; None if that is impossible."""

        def on_sent() -> None:
            one.sent_us = self._now_us()

        texts: list[str] = []
        ids: list[int] = []
        try:
            async with asyncio.timeout(self.timeout_s):
                async with self.client.request("POST", self.asking.path, body, on_sent, one.label) as response:
                    one.status = response.status
                    if response.status != 200:
                        text = b"".join([piece async for piece in response.pieces()])
                        one.error = text[:200].decode("utf-8", "replace") or f"status {response.status}"
                        one.kind = f"status {response.status}"
                        return None
                    async for line in response.lines():
                        if line.startswith(b"data:"):
                            self._take(one, line[5:].strip(), texts, ids)
        except TimeoutError:
            one.error, one.kind = f"no end within {self.timeout_s:g} s", "timeout"
        except (OSError, HttpError, asyncio.IncompleteReadError) as error:
            one.error, one.kind = f"{type(error).__name__}: {error}", "connection"
        except asyncio.CancelledError:
            if not one.error:
                one.error, one.kind = "interrupted", "interrupted"
            raise
        if one.error:
            return None
        one.last_us = one.last_us if one.last_us >= 0 else self._now_us()
        one.ended_us = one.ended_us if one.ended_us >= 0 else one.last_us
        one.output_tokens = one.output_tokens or len(ids) or one.messages
        return self.asking.prompts.answer(texts, ids)

    def _take(self, one: Sent, data: bytes, texts: list[str], ids: list[int]) -> None:
        """Record one server-sent event."""
        if data == b"[DONE]":
            return
        try:
            event = json.loads(data)
        except ValueError:
            one.error, one.kind = f"not JSON: {data[:60]!r}", "stream"
            return
        if not isinstance(event, dict):
            return
        if event.get("error"):
            one.error, one.kind = str(event["error"])[:200], "stream"
            return
        usage = event.get("usage") or {}
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            text = choice.get("text") or delta.get("content") or delta.get("reasoning_content")
            new_ids = choice.get("token_ids") or ()
            if text or new_ids:
                texts.append(text or "")
                ids.extend(new_ids)
                one.messages += 1
                one.last_us = self._now_us()
                if one.first_us < 0:
                    one.first_us = one.last_us
                one.message_us.append(one.last_us)
                one.message_tokens.append(len(ids) or int(usage.get("completion_tokens") or -1))
            if choice.get("finish_reason"):
                one.finish_reason, one.ended_us = str(choice["finish_reason"]), self._now_us()
        one.output_tokens = int(usage.get("completion_tokens") or one.output_tokens)
        one.prompt_tokens = int(usage.get("prompt_tokens") or one.prompt_tokens)
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        one.cached_tokens = one.cached_tokens if cached is None else int(cached)

    def _now_us(self) -> int:
        return round((asyncio.get_running_loop().time() - self._begin_s) * 1e6)

    async def _sleep_until(self, due_us: int) -> None:
        """Wait until `due_us`. The last 2 ms pass in turns of the loop, because a sleep ends a millisecond late."""
        left_s = (due_us - self._now_us()) / 1e6
        if left_s > EARLY_S:
            await asyncio.sleep(left_s - EARLY_S)
        while self._now_us() < due_us:
            await asyncio.sleep(0)


def client_of(target: ServerAddress) -> HttpClient:
    """Return a client with the API key of the environment, if it has one."""
    key = os.environ.get("OPENAI_API_KEY")
    return HttpClient(target, {"Authorization": f"Bearer {key}"} if key else {})


async def models_of(client: HttpClient) -> list[str]:
    """Return the models that a server lists. Raises ConfigError if it lists none, OSError."""
    async with client.request("GET", "/v1/models", b"") as response:
        text = b"".join([piece async for piece in response.pieces()])
    try:
        found = [str(one["id"]) for one in json.loads(text)["data"]]
    except (ValueError, LookupError, TypeError):
        found = []
    if not found:
        raise ConfigError(
            f"the server lists no models: status {response.status}, {text[:80]!r}\nhint: name one by --model"
        )
    return found


# ------------------------------------------------------------------------------------------------------------- figures


def summary(sent: Sequence[Sent], expected: int, span_us: int) -> dict[str, Any]:
    """Return the figures of a run. Times are in microseconds; None without a measurement."""
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
    """Return the figures as lines for a terminal."""
    seconds = max(found["span_us"] / 1e6, 1e-6)
    lines = ["interrupted: the figures end there"] if interrupted else []
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
