"""Streams with tokens that are known in advance, over an engine that is killed.

An emulated engine's answer follows from prompt, seed and position, so a client can compute it: a token that is lost,
doubled or wrong is detected. Kinds of requests differ in what must continue exactly after a restart: greedy and drawn
requests, several samples, stop texts, `min_tokens`, answers that end at an end token.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.api.emulate import Vocabulary
from lockstep.api.text.plain_text import BYTES, END, FIRST_WORD
from tests.support.live_server import LiveServer, metric

VOCABULARY = 151_936  # of qwen3
MEAN_TOKENS = 60
ARGUMENTS = ("--emulate", "qwen3-0.6b@h200", "--answer-tokens", str(MEAN_TOKENS), "--shutdown-s", "1")
WORDS = Vocabulary(first=FIRST_WORD, count=VOCABULARY - FIRST_WORD, end=END, mean_tokens=MEAN_TOKENS)
KINDS = ("greedy", "greedy", "drawn", "samples", "stop", "min_tokens")
TIMEOUT_S = 120.0  # without a line of the stream
DRAINED_S = 0.05  # messages of the dead engine have arrived by then
POLL_S = 0.02  # between two reads of /metrics
IN_A_ROW = 10  # kills without a token between them; a slow machine could otherwise emit no token for minutes


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A request, and its expected answer."""

    body: dict[str, Any]
    texts: list[str]  # by sample
    reasons: list[str]


def ask(rng: random.Random, name: str, tokens: tuple[int, int], kinds: tuple[str, ...] = KINDS) -> Asked:
    """A request of one of these kinds, with at most so many tokens."""
    prompt = f"{name}: {'x' * rng.randrange(200)}"
    ids = np.frombuffer(prompt.encode(), np.uint8).astype(np.int32)
    assert int(ids.max()) < BYTES
    kind = rng.choice(kinds)
    most = rng.randint(*tokens)
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": most, "temperature": 0, "stream": True}
    samples, least, stop, seed = 1, 0, "", None
    if kind in ("drawn", "samples"):
        seed = rng.randrange(2**31)
        body |= {"temperature": 1, "seed": seed}
    if kind == "samples":
        samples = body["n"] = rng.randint(2, 4)
    if kind == "min_tokens":
        least = body["min_tokens"] = rng.randint(1, most)
    else:
        body["ignore_eos"] = True
    if kind == "stop":
        text, _ = _answer(ids, None, most, 0, ends=False)
        at = rng.choice(text.split())
        stop = body["stop"] = rng.choice((f" {at}", f"{at} ", at[1:]))
    texts, reasons = [], []
    for sample in range(samples):
        own = None if seed is None else seed + sample
        text, reason = _answer(ids, own, most, least, ends=kind == "min_tokens")
        cut = text.find(stop) if stop else -1
        texts.append(text if cut < 0 else text[:cut])
        reasons.append(reason if cut < 0 else "stop")
    return Asked(body=body, texts=texts, reasons=reasons)


def _answer(ids: Any, seed: int | None, most: int, least: int, *, ends: bool) -> tuple[str, str]:
    """The text of an answer, and its finish reason."""
    key = WORDS.key(ids, seed)
    length = max(WORDS.length(key), least + 1)
    words = [f" w{word}" for word in WORDS.tokens_of(np.array([key], np.uint64).repeat(most), np.arange(most)).tolist()]
    if length <= most:
        if ends:
            return "".join(words[: length - 1]), "stop"
        words[length - 1] = ""  # the end, which is passed over
    return "".join(words), "length"


@dataclass
class Tally:
    """The outcomes of all requests."""

    requests: int = 0
    tokens: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    first: list[str] = field(default_factory=list)  # the first of them, in words
    heard_s: float = 0.0  # time of the newest token
    streams_begun: int = 0  # streams with at least one token, in `serve_one`
    lock: threading.Lock = field(default_factory=threading.Lock)

    def fault(self, kind: str, what: str) -> None:
        """Record a fault."""
        with self.lock:
            self.faults[kind] += 1
            if len(self.first) < 10:
                self.first.append(f"{kind}: {what}")


def serve_one(url: str, asked: Asked, tally: Tally) -> None:
    """Send a request, read its stream to the end, and compare it with the expected answer."""
    host = url.removeprefix("http://")
    texts, reasons, begun, over = [""] * len(asked.texts), [""] * len(asked.texts), False, False
    connection = http.client.HTTPConnection(host, timeout=TIMEOUT_S)
    try:
        connection.request("POST", "/v1/completions", json.dumps(asked.body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            tally.fault("refused", f"{answer.status} {answer.read()[:300]!r} for {asked.body['prompt'][:20]}")
            return
        while line := answer.readline():
            if line == b"data: [DONE]\n":
                over = True
            elif line.startswith(b"data: "):
                said = json.loads(line[6:])
                if "error" in said:
                    tally.fault("error", f"{said['error']['message']} for {asked.body['prompt'][:20]}")
                    return
                for choice in said["choices"]:
                    texts[choice["index"]] += choice["text"]
                    reasons[choice["index"]] = choice["finish_reason"] or reasons[choice["index"]]
                    tally.heard_s = time.monotonic()
                if not begun:
                    with tally.lock:
                        tally.streams_begun += 1
                    begun = True
    except (OSError, http.client.HTTPException) as error:
        tally.fault("broken", f"{type(error).__name__}: {error} for {asked.body['prompt'][:20]}")
        return
    finally:
        connection.close()
    if not over:
        tally.fault("broken", f"no [DONE] for {asked.body['prompt'][:20]}")
        return
    with tally.lock:
        tally.requests += 1
        tally.tokens += sum(text.count(" w") for text in asked.texts)
    for sample, (got, wanted) in enumerate(zip(texts, asked.texts, strict=True)):
        if got != wanted:
            kind, what = difference_of(got, wanted)
            tally.fault(kind, f"sample {sample} of {asked.body}: {what}")
        elif reasons[sample] != asked.reasons[sample]:
            tally.fault("reason", f"{reasons[sample]}, not {asked.reasons[sample]}, for {asked.body}")


def difference_of(got: str, wanted: str) -> tuple[str, str]:
    """Return the kind of a fault, and where a text differs from what it must be."""
    words, expected = re.findall(r" w\d+", got), re.findall(r" w\d+", wanted)
    at = next((i for i, (a, b) in enumerate(zip(got, wanted, strict=False)) if a != b), min(len(got), len(wanted)))
    what = f"{len(got)} characters for {len(wanted)}, from {at} on {got[at : at + 40]!r} for {wanted[at : at + 40]!r}"
    if len(words) > len(expected) or len(set(words)) < len(words):
        return "doubled", what
    return "lost" if set(words) < set(expected) else "wrong", what


Client = Callable[[random.Random, str, Tally], None]
"""Sends one request of that name, drawn from the generator, and adds its outcome to the tally."""


@dataclass
class Outcome:
    """A campaign, as figures."""

    victims: Counter[str] = field(default_factory=Counter)  # kills by the process that was killed
    serving: int = 0  # kills behind a token of the same life of the engine; it was starting in the others
    seconds: float = 0.0
    tally: Tally = field(default_factory=Tally)
    back_s: list[float] = field(default_factory=list)  # from each kill to the next generation's first token
    seeds: list[int] = field(default_factory=list)  # one for each part of the campaign

    @property
    def kills(self) -> int:
        """Number of kills."""
        return self.victims.total()

    def plus(self, more: Outcome) -> Outcome:
        """Return the figures of two parts of a campaign together."""
        one, other = self.tally, more.tally
        return Outcome(
            victims=self.victims + more.victims,
            serving=self.serving + more.serving,
            seconds=self.seconds + more.seconds,
            tally=Tally(
                requests=one.requests + other.requests,
                tokens=one.tokens + other.tokens,
                faults=one.faults + other.faults,
                first=[*one.first, *other.first],
            ),
            back_s=[*self.back_s, *more.back_s],
            seeds=[*self.seeds, *more.seeds],
        )

    def store(self, path: Path, options: Sequence[str]) -> None:
        """Write the figures to a file of results, with the options of the campaign."""
        tally = {name: getattr(self.tally, name) for name in STORED_OF_TALLY}
        values = {"options": list(options), **vars(self), "tally": tally}
        path.with_suffix(".new").write_text(json.dumps(values) + "\n", encoding="utf-8")
        path.with_suffix(".new").replace(path)

    def text(self) -> str:
        """In words."""
        tally, back = self.tally, sorted(self.back_s)
        faults = ", ".join(f"{count} {kind}" for kind, count in sorted(tally.faults.items()))
        verdict = f"FAULTS: {faults}" if faults else "0 lost, 0 doubled, 0 wrong, every stream ended as it should"
        shown = [f"{self.kills} kills in {self.seconds:.0f} s: {tally.requests} requests, {tally.tokens:,} tokens"]
        by_victim = ", ".join(f"{count} of {victim}" for victim, count in sorted(self.victims.items()))
        shown.append(f"{by_victim or 'none'}; {self.serving} behind a token, the others during a start")
        shown.append(verdict)
        if back:
            p99 = back[min(len(back) - 1, round(0.99 * (len(back) - 1)))]
            shown.append(f"kill to next token: median {back[len(back) // 2]:.3f} s, p99 {p99:.3f}, max {back[-1]:.3f}")
        return "\n".join([*shown, *tally.first])


BY_A_KILL = re.compile(r"was ended by SIGKILL|rank \d+ of \d+ ended: ")
"""The reason of an engine's end after a rank was killed: of its stages and `tp`; of data-parallel ranks."""
STORED_OF_TALLY = ("requests", "tokens", "faults", "first")


def stored(path: Path, options: Sequence[str]) -> Outcome:
    """Return the figures in a file of results.

    Raises: ValueError for another file, or for a campaign with other options.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        others, tally = values.pop("options"), Tally(**values.pop("tally"))
        tally.faults = Counter(tally.faults)
        found = Outcome(tally=tally, **values)
        found.victims = Counter(found.victims)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} has no results of a campaign: {error}; name another file, or delete it") from None
    if others != list(options):
        raise ValueError(f"{path} is of a campaign with the options {others}, not {list(options)}; name another file")
    return found


def campaign(
    server: LiveServer,
    *,
    seed: int,
    kills: int,
    streams: int = 32,
    gap_s: tuple[float, float] = (0.05, 1.0),
    tokens: tuple[int, int] = (20, 150),
    progress: Callable[[Outcome], object] = lambda _: None,
    how: signal.Signals = signal.SIGKILL,
    client: Client | None = None,
    prefills: int = 0,
    in_a_row_max: int = IN_A_ROW,
    gap_from_token: bool = False,
) -> Outcome:
    """Kill the engine, or one of several, at random instants, below clients that send one request after another.

    The ranks of an engine with `tp` or `pp` are killed as often as their engine's own process.

    Args:
        streams: number of clients.
        gap_s: shortest and longest time between two kills, in seconds.
        tokens: fewest and most tokens of a request, without `client`.
        progress: called with the figures so far, after every fifth kill.
        prefills: number of prefill engines, which have the first numbers. Their tokens are those of other engines.
        in_a_row_max: kills without a token between them.
        gap_from_token: the gap counts from the first token after a kill, for engines that start more slowly than it: an
            engine would else be killed with its first token each time, and streams would starve.
        client: what each client repeats; None: requests to an emulated engine, whose tokens are computed here.
    """
    rng, tally, enough = random.Random(seed), Tally(), threading.Event()

    def known(own: random.Random, name: str, tally: Tally) -> None:
        serve_one(server.url, ask(own, name, tokens), tally)

    def repeat(number: int) -> None:
        own, count = random.Random(f"{seed} {number}"), 0
        while not enough.is_set():
            (client or known)(own, f"{seed}-{number}-{count}", tally)
            count += 1

    threads = [threading.Thread(target=repeat, args=(number,)) for number in range(streams)]
    for thread in threads:
        thread.start()
    began_s, outcome = time.monotonic(), Outcome(tally=tally, seeds=[seed])
    awaited = dict[str, Awaited]()  # by the name of the engine that was killed
    next_s = began_s + 0.5
    killed, in_a_row = set[int](), 0
    while outcome.kills < kills and server.process.poll() is None and not tally.faults:
        now_s = time.monotonic()
        for name, one in list(awaited.items()):
            if (took_s := one.took_s()) is not None:
                outcome.back_s.append(took_s)
                del awaited[name]
                in_a_row = 0
                if gap_from_token:
                    next_s = now_s + rng.uniform(*gap_s)
        if now_s >= next_s and in_a_row < in_a_row_max:
            engines = sorted((name, pid) for name, pid in server.children().items() if name.startswith("engine"))
            alive = [(name, "", pid) for name, pid in engines]
            for name, pid in engines:
                alive += [(name, f"rank {number} of ", rank) for number, rank in enumerate(ranks_of(pid), 1)]
            name, rank_of, victim = rng.choice(alive) if alive else ("", "", 0)
            if victim and victim not in killed:
                os.kill(victim, how)
                killed.add(victim)
                outcome.victims[f"{rank_of}{name}"] += 1
                outcome.serving += name not in awaited
                in_a_row += 1
                # A kill before the first token of a generation counts from the kill before.
                named = "" if prefills and int(name.removeprefix("engine")) < prefills else name
                awaited.setdefault(name, Awaited(server, named, tally))
                next_s = time.monotonic() + rng.uniform(*gap_s)
                if outcome.kills % 5 == 0:
                    outcome.seconds = time.monotonic() - began_s
                    progress(outcome)
        time.sleep(0.002)
    enough.set()
    for thread in threads:
        thread.join()
    outcome.back_s += [took_s for one in awaited.values() if (took_s := one.took_s()) is not None]
    outcome.seconds = time.monotonic() - began_s
    if server.process.poll() is not None:
        tally.fault("server", f"it ended with {server.process.returncode}")
    return outcome


class Awaited:
    """The first token of an engine after its kill.

    With one engine that is the first token of any stream. With several engines the others continue, so the tokens of
    the killed engine are counted: the server's counter of tokens by engine, read at most every `POLL_S`.
    """

    def __init__(self, server: LiveServer, name: str, tally: Tally) -> None:
        self._server, self._tally, self._killed_s = server, tally, time.monotonic()
        self._number = name.removeprefix("engine").strip()  # empty with one engine
        self._sent: float | None = None  # tokens of the killed generation
        self._next_s = self._killed_s + DRAINED_S

    def took_s(self) -> float | None:
        """Seconds from the kill to the first token; None if there was none yet."""
        if not self._number:
            heard_s = self._tally.heard_s
            return heard_s - self._killed_s if heard_s > self._killed_s + DRAINED_S else None
        if time.monotonic() < self._next_s or self._server.process.poll() is not None:
            return None
        self._next_s = time.monotonic() + POLL_S
        try:
            sent = tokens_of_engine(self._server, self._number)
        except OSError:  # the server is ending, which `campaign` reports
            return None
        if self._sent is None:
            self._sent = sent
        return time.monotonic() - self._killed_s if sent > self._sent else None


def ranks_of(engine: int) -> list[int]:
    """Return the processes of the other ranks of an engine, of its `tp` and its stages, by their start."""
    found = []
    for listed in Path(f"/proc/{engine}/task").glob("*/children"):
        with suppress(OSError):
            for child in map(int, listed.read_text().split()):
                if b"lockstep.runtime.worker" in Path(f"/proc/{child}/cmdline").read_bytes():
                    found.append(child)
    return sorted(found)


def own_failures(log: str) -> list[str]:
    """Return the lines of a server's log about engines that ended otherwise than by a kill of a process of theirs."""
    return [line for line in log.splitlines() if "the engine failed: " in line and BY_A_KILL.search(line) is None]


def tokens_of_engine(server: LiveServer, number: str) -> float:
    """Tokens of answers of one engine that arrived at the API workers."""
    return metric(server, rf'lockstep_generation_tokens_total\{{(?=[^}}]*engine="{number}")[^}}]*')
