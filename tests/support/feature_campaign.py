"""Greedy requests to engines with features, each alone and two together: every answer is that of one plain engine.

Prompts share beginnings in groups, running requests are retracted by force, and about one request in ten is cancelled
at a random time. The canary of each engine checks the tag of every KV slot before it is read, and the journal of each
engine is replayed at the end. A check fails too if nothing came of its features: no draft was right, no page came back
from host memory, no batch was split.

Ranks and halves add up in another order than one engine. So a request is used only if the plain engine's choice was
clear at every token: the two likeliest tokens differ by CLEAR in logprob at least.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from lockstep.core.contract.errors import LockstepError
from lockstep.core.contract.events import BatchFinished, CloseSession, OpenSession
from lockstep.core.journal.replay import fold, replay
from lockstep.host.cache_moves import BlockKind
from lockstep.host.handover.decode import DecodeSide
from lockstep.runtime import LLM, Params
from lockstep.runtime.llm import demo_folder
from lockstep.runtime.outputs import PendingRequest, RequestOutput
from tests.support.adapters import write_adapter
from tests.support.architectures import SMALL, TRACK_INTERVAL, WINDOW_SHARE, save_architecture
from tests.support.model_engines import CPU, DENSE, EXPERTS, HALVES, engines, ranks_in_roles, ranks_of
from tests.support.small_llm import write_weights

Kind = Literal["demo", "adapters", "sessions", "dense", "experts", "windows", "states"]
Layout = Literal["one", "roles", "ranks", "ranks in roles"]

CLEAR = 2e-3  # of logprobs; ranks in float32 differ by less than a tenth of it
RARE = ("host tokens", "storage tokens", "windows loaded", "states loaded")
MANY = 60  # requests, from which on what is rare must happen
ABORTED = 0.1  # share of requests
TOGETHER = 16  # requests that are sent at the same time
TURNS = 5
SESSIONS_OPEN = 8  # at the same time
SESSION_TOKENS = 480
ANSWER_S = 300.0  # an answer that takes longer is a fault
LONGEST_S = 2.0  # from sending some requests to the last cancel among them

DEMO: dict[str, Any] = {
    **CPU, "dtype": "float32", "page_size": 16, "pages": 30, "chunked_prefill_size": 64, "max_running_requests": 6,
}  # fmt: skip
TINY: dict[str, Any] = {**CPU, "page_size": 4, "pages": 100, "chunked_prefill_size": 16, "max_running_requests": 6}
SMALLEST = int(SMALL["vocab_size"])
VOCABULARIES: dict[Kind, int] = {"dense": 300, "experts": 300, "windows": SMALLEST, "states": SMALLEST}
DEBUG: dict[str, Any] = {"debug": True}
"""Options of every engine but the plain one."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Features that run together.

    Args:
        name: the pair, as in the table of docs/distributed.md, or a feature.
        variant: which of the cases with this name it is.
        layout: one engine; a prefill and a decode engine; data-parallel ranks, of which each is an engine; a prefill
            and a decode engine with `attention_dp` ranks each.
        options: of all engines; `prefill` and `decode` add to them.
        overlaps: depths of overlap, each a check of its own.
    """

    name: str
    variant: str = ""
    kind: Kind = "demo"
    layout: Layout = "one"
    options: dict[str, Any] = field(default_factory=dict)
    prefill: dict[str, Any] = field(default_factory=dict)
    decode: dict[str, Any] = field(default_factory=dict)
    ranks: int = 2
    overlaps: tuple[int, ...] = (1, 2)
    retract_every: int = 4

    @property
    def title(self) -> str:
        """The name with the variant."""
        return f"{self.name} ({self.variant})" if self.variant else self.name


TIERS: dict[str, Any] = {"host_cache_gb": 0.02, "load_tokens_min": 16}
STORED: dict[str, Any] = {**TIERS, "storage": "", "storage_gb": 0.2, "prefetch_tokens_min": 16}
STORED["prefetch_policy"] = "wait_complete"
NGRAM: dict[str, Any] = {"speculative_method": "ngram", "num_speculative_tokens": 3}
DRAFTER: dict[str, Any] = {"speculative_method": "draft_model", "num_speculative_tokens": 3, "draft_model": "demo"}
ADAPTERS: dict[str, Any] = {"max_loras": 2}
ALL_TO_ALL: dict[str, Any] = {"ep": 2, "moe_a2a": True}
DELAYER: dict[str, Any] = {"prefill_delayer": True, "prefill_delayer_max_delay_passes": 4}
POLICIES = ("write_through", "write_through_selective", "write_back")
POOLS: dict[Kind, tuple[str, dict[str, Any]]] = {
    "windows": ("Gemma 3", {"swa_full_tokens_ratio": WINDOW_SHARE}),
    "states": ("Qwen3.5", {"mamba_track_interval": TRACK_INTERVAL}),
}
"""Models with pools beside full attention: architecture, and options of the engines that are checked."""
ROLES, STAGES, RANKS = "prefill and decode engines", "stages", "data-parallel attention"


def both(**options: Any) -> dict[str, Any]:
    """Fields of a case whose prefill and decode engines are split alike."""
    return {"layout": "roles", "prefill": options, "decode": options}


ALONE: list[Case] = [
    Case(name="plain", overlaps=(0, 1, 2)),
    *(Case(name="tiers", variant=policy, options={**STORED, "host_write_policy": policy}) for policy in POLICIES),
    Case(name=ROLES, layout="roles"),
    Case(name=STAGES, options={"pp": 2}),
    Case(name="ranks", options={"tp": 2}),
    Case(name=RANKS, kind="dense", layout="ranks"),
    Case(name="experts on ranks", kind="experts", options={"tp": 2, "ep": 2}),
    Case(name="sessions", kind="sessions"),
    Case(name="adapters", kind="adapters", options=ADAPTERS),
    Case(name="drafts", variant="ngram", options=NGRAM),
    Case(name="drafts", variant="draft model", options=DRAFTER),
    Case(name="halves", options={"tp": 2, **HALVES}),
]
PAIRS: list[Case] = [
    Case(name=f"tiers, {ROLES}", layout="roles", options=TIERS),
    Case(name=f"{ROLES}, stages", variant="alike", **both(pp=2)),
    Case(name=f"{ROLES}, stages", variant="2 to 1", layout="roles", prefill={"pp": 2}),
    Case(name=f"{ROLES}, stages", variant="tp 2 to pp 2", layout="roles", prefill={"tp": 2}, decode={"pp": 2}),
    *(
        Case(
            name=f"{RANKS}, {ROLES}", variant=f"{first} to {second}", kind="dense", layout="ranks in roles",
            prefill={"attention_dp": first}, decode={"attention_dp": second},
        )
        for first, second in ((2, 2), (2, 1), (1, 2))
    ),
    *(
        Case(name=f"{ROLES}, pools of {kind}", variant=variant, kind=kind, layout="roles",
             options={**options, **more}, prefill=prefill, decode=decode)
        for kind, (_, options) in POOLS.items()
        for variant, more, prefill, decode in (
            ("one rank", {}, {}, {}),
            ("drafts", NGRAM, {}, {}),
            ("tp 2 to 2", {}, {"tp": 2}, {"tp": 2}),
            ("tp 2 to 1", {}, {"tp": 2}, {}),
        )
    ),
    Case(name=f"{ROLES}, `tp` of another size", variant="2 to 1", layout="roles", prefill={"tp": 2}),
    Case(name=f"{ROLES}, `tp` of another size", variant="1 to 2", layout="roles", decode={"tp": 2}),
    Case(
        name=f"{RANKS}, experts", variant="delayer", kind="experts", layout="ranks", ranks=3,
        options={"ep": 3, **DELAYER},
    ),
    Case(name=f"{RANKS}, experts", variant="all-to-all", kind="experts", layout="ranks", options=ALL_TO_ALL),
    Case(name="stages, overlap of 1 and 2", variant="2 stages", options={"pp": 2}),
    Case(
        name="stages, overlap of 1 and 2", variant="4 stages, mixed",
        options={"pp": 4, "pp_async_batch_depth": 1, "batching": "mixed", "reserve": "on_demand"}
        | {"max_running_requests": 12}, retract_every=2,
    ),
    *(
        Case(name="tiers, overlap of 1 and 2, several steps, drafts", variant=f"several steps, {policy}",
             options={**TIERS, "host_write_policy": policy, "decode_steps_per_launch": 3}, retract_every=2)
        for policy in POLICIES
    ),
    Case(name="tiers, overlap of 1 and 2, several steps, drafts", variant="drafts", options={**TIERS, **NGRAM}),
    Case(name="tiers, sessions", kind="sessions", options={**TIERS, "session_kv": "evictable"}),
    Case(name="tiers, ranks or stages", variant="ranks", options={**STORED, "tp": 2}),
    Case(name="tiers, ranks or stages", variant="stages", options={**STORED, "pp": 2}),
    *(
        Case(name=f"tiers, pools of {kind}", variant=variant, kind=kind,
             options={**options, **STORED, "load_tokens_min": 4, "prefetch_tokens_min": 4, "pages": 60, **more})
        for kind, (_, options) in POOLS.items()
        for variant, more in (
            *((policy, {"host_write_policy": policy}) for policy in POLICIES),
            ("drafts", NGRAM),
            ("ranks", {"tp": 2}),
        )
    ),
    Case(name=f"sessions, {ROLES}", kind="sessions", layout="roles"),
    Case(name="adapters, tiers", kind="adapters", options={**ADAPTERS, **STORED}),
    Case(name=f"adapters, {ROLES}", kind="adapters", layout="roles", options=ADAPTERS),
    Case(name="adapters, stages", kind="adapters", options={**ADAPTERS, "pp": 2}),
    Case(name="adapters, ranks", kind="adapters", options={**ADAPTERS, "tp": 2}),
    Case(name="adapters, drafts", variant="ngram", kind="adapters", options={**ADAPTERS, **NGRAM}),
    Case(name="adapters, drafts", variant="draft model", kind="adapters", options={**ADAPTERS, **DRAFTER}),
    Case(name="adapters, halves", kind="adapters", options={**ADAPTERS, "tp": 2, **HALVES}),
    Case(name="drafts, tiers", variant="ngram", options={**NGRAM, **STORED}),
    Case(name="drafts, tiers", variant="draft model", options={**DRAFTER, **STORED}),
    Case(name=f"drafts, {ROLES}", variant="ngram", layout="roles", options=NGRAM),
    Case(name=f"drafts, {ROLES}", variant="draft model", layout="roles", options=DRAFTER),
    Case(name="drafts, stages", variant="ngram", options={"pp": 2, "tp": 2, **NGRAM}),
    Case(name="drafts, stages", variant="draft model", options={"pp": 2, **DRAFTER}),
    Case(
        name="drafts, stages", variant="draft model, 4 stages, mixed",
        options={"pp": 4, "pp_async_batch_depth": 1, "batching": "mixed", "reserve": "on_demand", **DRAFTER}
        | {"max_running_requests": 12}, retract_every=2,
    ),
    Case(name="drafts, stages, tiers", options={"pp": 2, **DRAFTER, **STORED}),
    Case(
        name=f"drafts, stages, {ROLES}", layout="roles", options=DRAFTER, prefill={"pp": 2}, decode={"pp": 2},
    ),
    Case(name=f"drafts, {RANKS}", kind="dense", layout="ranks", options=DRAFTER),
    Case(
        name=f"drafts, {RANKS} with experts", kind="experts", layout="ranks",
        options={**ALL_TO_ALL, **NGRAM, "batching": "mixed"},
    ),
    Case(name="halves, experts on ranks", kind="experts", options={"tp": 2, "ep": 2, **HALVES}),
    Case(
        name=f"halves, {RANKS}, experts by all-to-all", kind="experts", layout="ranks",
        options={**ALL_TO_ALL, **HALVES, "batching": "mixed"},
    ),
]  # fmt: skip
CASES = [*ALONE, *PAIRS]


# ------------------------------------------------------------------------------------------------------------ requests


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A request, and the answer of one plain engine."""

    prompt: list[int]
    right: list[int]
    adapter: str = ""
    session: str = ""  # `prompt` is then what the turn adds

    @property
    def params(self) -> Params:
        """Parameters of the request."""
        return Params(max_new_tokens=len(self.right), ignore_eos=True, adapter=self.adapter)


class Models:
    """Models, adapters, and the requests of each kind with their answers, which one plain engine computes once."""

    def __init__(self, folder: Path, *, seed: int, requests: int) -> None:
        self.folder, self._seed, self._requests = folder, seed, requests
        self._wanted: dict[Kind, list[Wanted]] = {}
        self._made: dict[str, Path] = {}

    def options(self, kind: Kind) -> dict[str, Any]:
        """Return the options of every engine for requests of a kind."""
        if kind in POOLS or kind in ("dense", "experts"):
            return {**TINY, "model": self._model(kind)}
        return {**DEMO, **({"lora": self._adapters()} if kind == "adapters" else {})}

    def _model(self, kind: Kind) -> Path:
        if kind not in self._made and kind in POOLS:
            save_architecture(self.folder / kind, POOLS[kind][0])
            self._made[kind] = self.folder / kind
        elif kind not in self._made:
            (self.folder / kind).mkdir()
            self._made[kind] = write_weights(self.folder / kind, DENSE if kind == "dense" else EXPERTS)
        return self._made[kind]

    def _adapters(self) -> dict[str, Path]:
        """Return three adapters, of which two have a slot at a time."""
        for number in range(3):
            if f"a{number}" not in self._made:
                self._made[f"a{number}"] = write_adapter(self.folder / f"a{number}", number, rank=2 + 3 * number)
        return {name: self._made[name] for name in ("a0", "a1", "a2")}

    def wanted(self, kind: Kind) -> list[Wanted]:
        """Return the requests of a kind, `requests` of them, in the order in which they are sent."""
        if kind not in self._wanted:
            rng = random.Random(f"{self._seed} {kind}")
            with LLM(**self.options(kind)) as plain:
                found = _turns(plain, rng, self._requests) if kind == "sessions" else self._drawn(plain, rng, kind)
            if len({tuple(one.right) for one in found}) <= len(found) // 2:
                raise ValueError(f"most answers of the {kind} requests are alike, so that little would be learnt")
            self._wanted[kind] = found
        return self._wanted[kind]

    def _drawn(self, plain: LLM, rng: random.Random, kind: Kind) -> list[Wanted]:
        """Draw requests that share beginnings until enough of them have a clear answer."""
        tiny, vocabulary = kind in POOLS or kind in ("dense", "experts"), VOCABULARIES.get(kind, 2000)
        starts = [_beginning(rng, vocabulary, (8, 40) if tiny else (40, 130)) for _ in range(self._groups)]
        found: list[Wanted] = []
        while len(found) < self._requests:
            drawn = []
            for _ in range(self._requests + 4):
                ends = [rng.randrange(3, vocabulary) for _ in range(rng.randrange(1, 20))]
                adapter = rng.choice(("", "a0", "a1", "a2")) if kind == "adapters" else ""
                drawn.append((rng.choice(starts) + ends, adapter, rng.randrange(4, 17)))
            answers = plain.generate([one for one, _, _ in drawn], [_choosing(most, name) for _, name, most in drawn])
            found += [
                Wanted(prompt=prompt, right=answer.token_ids, adapter=adapter)
                for (prompt, adapter, _), answer in zip(drawn, answers, strict=True)
                if is_clear(answer)
            ]
        return found[: self._requests]

    @property
    def _groups(self) -> int:
        return max(4, self._requests // 12)


def _beginning(rng: random.Random, vocabulary: int, lengths: tuple[int, int]) -> list[int]:
    """Draw the beginning of prompts; half of them repeat a phrase, which drafts can foresee."""
    length = rng.randrange(*lengths)
    phrase = [rng.randrange(3, vocabulary) for _ in range(rng.choice((length, rng.randrange(3, 9))))]
    return (phrase * length)[:length]


def _choosing(most: int, adapter: str = "") -> Params:
    return Params(max_new_tokens=most, ignore_eos=True, logprobs=2, adapter=adapter)


def is_clear(answer: RequestOutput) -> bool:
    """Return whether no two tokens nearly tie anywhere in an answer with the logprobs of two tokens."""
    if answer.error:
        raise LockstepError(f"the plain engine: {answer.error}")
    likeliest = [sorted(one.values())[-2:] for one in answer.top_logprobs]
    return all(first - second >= CLEAR for second, first in likeliest)


def _turns(plain: LLM, rng: random.Random, count: int) -> list[Wanted]:
    """Draw the turns of conversations. Each is answered as the whole conversation, without a session.

    Returns: SESSIONS_OPEN conversations, turn by turn, then the next ones.
    """
    sessions = -(-count // TURNS)
    starts = [_beginning(rng, 2000, (20, 80)) for _ in range(max(2, sessions // 6))]
    talks: list[list[Wanted]] = []
    while len(talks) < sessions:
        drawn: list[list[Wanted]] = [[] for _ in range(sessions)]
        said: list[list[int]] = [[] for _ in drawn]
        clear = [True] * sessions
        for turn in range(TURNS):
            own = [[rng.randrange(3, 2000) for _ in range(rng.randrange(3, 20))] for _ in drawn]
            if turn == 0:
                own = [rng.choice(starts) + one for one in own]
            said = [before + more for before, more in zip(said, own, strict=True)]
            answers = plain.generate(said, [_choosing(rng.randrange(4, 13)) for _ in drawn])
            for number, answer in enumerate(answers):
                clear[number] = clear[number] and is_clear(answer)
                drawn[number].append(Wanted(prompt=own[number], right=answer.token_ids, session="?"))
                said[number] = said[number] + answer.token_ids
        talks += [talk for talk, right in zip(drawn, clear, strict=True) if right]
    named = [[replace(turn, session=f"s{number}") for turn in talk] for number, talk in enumerate(talks[:sessions])]
    opened = [named[at : at + SESSIONS_OPEN] for at in range(0, sessions, SESSIONS_OPEN)]
    return [talk[turn] for some in opened for turn in range(TURNS) for talk in some]


# -------------------------------------------------------------------------------------------------------------- checks


@dataclass(kw_only=True)
class Outcome:
    """What a check saw. It failed if there are any faults."""

    case: Case
    overlap: int
    requests: int = 0
    ended: int = 0
    aborted: int = 0
    marks: dict[str, int] = field(default_factory=dict)  # what must have happened at least once
    slots: list[int] = field(default_factory=list)  # verified by the canary of each engine
    journals: int = 0  # replayed to the digest of their engine
    seconds: float = 0.0
    faults: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The case, its variant and the depth of overlap."""
        return label(self.case, self.overlap)

    def judge(self) -> None:
        """Add a fault for everything that should have happened and did not."""
        self.faults += [
            f"{mark}: none"
            for mark, count in self.marks.items()
            if not count and (mark not in RARE or self.requests >= MANY)
        ]
        self.faults += [
            f"engine {number}: the canary verified no slot" for number, one in enumerate(self.slots) if not one
        ]
        if self.journals != len(self.slots):
            self.faults.append(f"{self.journals} of {len(self.slots)} journals were replayed")
        if not self.aborted and self.requests >= MANY:
            self.faults.append("no request was aborted")
        if self.ended + self.aborted != self.requests:
            self.faults.append(f"{self.ended} ended and {self.aborted} aborted of {self.requests}")


def label(case: Case, overlap: int) -> str:
    """Return the name of a check."""
    return f"{case.title}, overlap {overlap}"


@dataclass
class Running:
    """The engines of a check. Requests go to those of `asked`."""

    engines: list[LLM]
    asked: list[LLM]


@contextmanager
def running(case: Case, models: Models, overlap: int, place: Path) -> Iterator[Running]:
    """Run the engines of a case, with a journal each in a folder of `place`."""
    given: dict[str, Any] = {**models.options(case.kind), **DEBUG, **case.options, "overlap_depth": overlap}
    if "draft_model" in given:
        given["draft_model"] = str(given.get("model", demo_folder()))
    if "storage" in given:
        given["storage"] = str(models.folder / f"kv of {case.title}")  # kept for the next depth of overlap
    forced = {"retract_every": case.retract_every}
    if case.layout == "roles":
        forced["num_reserved_decode_tokens"] = 16  # by default one request would reserve the whole pool
        sides = ({**case.prefill, "journal": place / "prefill"}, {**case.decode, **forced, "journal": place / "decode"})
        with engines(place, *sides, **given) as (first, second):
            yield Running([first, second], [second])
    elif case.layout == "ranks":
        folder, of_engine = given.pop("model"), {name: given.pop(name) for name in _OF_CONFIG if name in given}
        with ranks_of(folder, case.ranks, place, of_engine, {**given, **forced}) as llms:
            yield Running(llms, llms)
    elif case.layout == "ranks in roles":
        folder, of_engine = given.pop("model"), {name: given.pop(name) for name in _OF_CONFIG if name in given}
        ranks = (case.prefill["attention_dp"], case.decode["attention_dp"])
        given["num_reserved_decode_tokens"] = 16
        with ranks_in_roles(folder, ranks, place, of_engine, given, {**given, **forced}) as (firsts, seconds):
            yield Running([*firsts, *seconds], seconds)
    else:
        split = {"rank_timeout_s": ANSWER_S} if {"tp", "pp"} & given.keys() else {}
        with LLM(**given, **forced, **split, journal=place / "engine") as llm:
            yield Running([llm], [llm])


_OF_CONFIG = (
    "device",
    "grammar_backend",
    "debug",
    "ep",
    "moe_a2a",
    "draft_model",
)  # options of a rank that SchedConfig does not have


def check(case: Case, models: Models, overlap: int, seed: int, place: Path) -> Outcome:
    """Run the requests of a case once. Errors of the engines are faults."""
    wanted = models.wanted(case.kind)
    outcome = Outcome(case=case, overlap=overlap, requests=len(wanted))
    began = time.monotonic()
    try:
        with running(case, models, overlap, place) as made:
            _serve(made, wanted, random.Random(f"{seed} {label(case, overlap)}"), outcome)
            _settle(made)
            outcome.slots = [slots_verified(llm) for llm in made.engines]
            outcome.marks = _marks(case, overlap, made)
        steps = []
        for llm in made.engines:
            assert llm._journal is not None
            folder = llm._journal.folder.parent
            if replay(folder).digest == llm.host.engine.digest:
                outcome.journals += 1
            steps.append(list(fold(folder)))
        outcome.marks |= _marks_of_steps(case, overlap, steps)
    except (LockstepError, Unsettled) as error:
        outcome.faults.append(f"{type(error).__name__}: {error}")
    else:
        outcome.judge()
    outcome.seconds = time.monotonic() - began
    return outcome


class Unsettled(Exception):
    """An answer did not come, or pages stayed in use after the last one."""


def slots_verified(llm: LLM) -> int:
    """Return the KV slots that an engine's canary has verified: that of its first rank, if it has several."""
    canary = llm._live.executor.canary
    return 0 if canary is None else canary.slots_verified


def _serve(made: Running, wanted: Sequence[Wanted], rng: random.Random, outcome: Outcome) -> None:
    """Send all requests, some at a time, cancel some of them, and compare the answers."""
    of_sessions = bool(wanted[0].session)
    may_end = range(len(wanted))
    if of_sessions:  # after a turn that was cut short the conversation would be another
        may_end = [number for number, one in enumerate(wanted) if _last_turn(wanted, number)]
    leaving = set(rng.sample(may_end, min(len(may_end), max(1, round(ABORTED * len(wanted))))))
    lasts = 0.3  # seconds that some requests take together
    at = 0
    while at < len(wanted):
        some = range(at, _stop(wanted, at))
        to = {number: made.asked[min(rng.randrange(2 * len(made.asked)), len(made.asked) - 1)] for number in some}
        if of_sessions:
            _open(made, wanted, some)
        began = time.monotonic()
        pending = {number: _ask(to[number], wanted[number]) for number in some}
        for moment, number in sorted((rng.random() * lasts, number) for number in some if number in leaving):
            time.sleep(max(0.0, began + moment - time.monotonic()))
            to[number].host.cancel(pending[number].answer.request_id)
        for number, one in pending.items():
            if not one.over.wait(ANSWER_S):
                raise Unsettled(f"request {number} is open after {ANSWER_S:.0f} s")
            _compare(number, to[number].wait(one), wanted[number], number in leaving, outcome)
        lasts = min(LONGEST_S, time.monotonic() - began)
        if of_sessions:
            _close(made, wanted, some)
        at = some.stop


def _compare(number: int, answer: RequestOutput, wanted: Wanted, may_leave: bool, outcome: Outcome) -> None:
    right = wanted.right
    if may_leave and answer.finish_reason == "cancelled":
        outcome.aborted += 1
        right = right[: len(answer.token_ids)]
    else:
        outcome.ended += 1
        if answer.finish_reason != "length":
            outcome.faults.append(f"request {number} ended with `{answer.finish_reason}`: {answer.error}")
    if answer.token_ids != right:
        outcome.faults.append(f"request {number}: tokens {answer.token_ids}, one plain engine gives {right}")


def _stop(wanted: Sequence[Wanted], at: int) -> int:
    """Return the end of the requests from `at` on that may run together: of a session there is one turn."""
    seen: set[str] = set()
    for number in range(at, min(at + TOGETHER, len(wanted))):
        if wanted[number].session and wanted[number].session in seen:
            return number
        seen.add(wanted[number].session)
    return min(at + TOGETHER, len(wanted))


def _last_turn(wanted: Sequence[Wanted], number: int) -> bool:
    return all(one.session != wanted[number].session for one in wanted[number + 1 :])


def _ask(llm: LLM, wanted: Wanted) -> PendingRequest:
    request = llm._request(wanted.prompt, wanted.params, "generate")
    return llm._send(msgspec.structs.replace(request, session=wanted.session), wanted.params)


def _open(made: Running, wanted: Sequence[Wanted], some: range) -> None:
    """Open the sessions whose first turn is among some requests."""
    before = {one.session for one in wanted[: some.start]}
    for number in some:
        if wanted[number].session not in before:
            made.asked[0]._ordered(OpenSession(wanted[number].session, SESSION_TOKENS))


def _close(made: Running, wanted: Sequence[Wanted], some: range) -> None:
    """Close the sessions whose last turn is among some requests that have ended."""
    for number in some:
        if _last_turn(wanted, number):
            made.asked[0]._ordered(CloseSession(wanted[number].session))


def _settle(made: Running) -> None:
    """Wait until no engine has a page in use or a request. Raises Unsettled."""
    until = time.monotonic() + 30.0
    for llm in made.engines:
        while True:
            stats = llm.stats().engine
            used = stats.pages - stats.pages_free - stats.pages_cached
            if not used and not stats.in_flight and not llm.host.engine.requests:
                break
            if time.monotonic() > until:
                raise Unsettled(f"{used} pages and {len(llm.host.engine.requests)} requests are left at the end")
            time.sleep(0.01)


def _marks(case: Case, overlap: int, made: Running) -> dict[str, int]:
    """Count what must have happened, from the state of the engines."""
    stats = [llm.stats() for llm in made.engines]
    marks = {"retractions": sum(one.engine.counts.retractions for one in stats)}
    if "host_cache_gb" in case.options:
        marks["host tokens"] = sum(one.tiers.host_tokens for one in stats)
        if case.kind in POOLS:
            marks[f"{case.kind} loaded"] = sum(one.tiers.blocks["load", case.kind.rstrip("s")] for one in stats)
    if "storage" in case.options:
        if overlap == case.overlaps[0]:
            marks["pages stored"] = sum(one.store.pages_written for one in stats if one.store is not None)
        else:
            marks["storage tokens"] = sum(one.tiers.storage_tokens for one in stats)
    if "speculative_method" in case.options:
        marks["drafts kept"] = sum(one.drafts.right for one in stats)
    if "roles" in case.layout:
        sides = [llm.handover for llm in made.asked]
        marks["handed over"] = sum(side.counts.done for side in sides if isinstance(side, DecodeSide))
        if case.kind in POOLS:
            block: BlockKind = "window" if case.kind == "windows" else "state"
            marks[case.kind] = sum(side.counts.blocks[block] for side in sides if isinstance(side, DecodeSide))
    return marks


def _marks_of_steps(case: Case, overlap: int, steps: Sequence[list[Any]]) -> dict[str, int]:
    """Count what must have happened, from the steps of each engine."""
    plans = [plan for some in steps for _, step in some if (plan := step.launched()) is not None]
    marks: Counter[str] = Counter()
    if overlap:
        marks["overlapped"] = max(most_in_flight(some) for some in steps) - 1
    if max(some.get("pp", 1) for some in (case.options, case.prefill, case.decode)) > 1:
        marks["of later microbatches"] = sum(plan.microbatch > 0 for plan in plans)
    if "two_batch_overlap" in case.options:
        marks["split"] = sum(plan.halves is not None for plan in plans)
    if "ranks" in case.layout:
        marks["idle passes"] = sum(plan.mode == "idle" for plan in plans)
    return dict(marks)


def most_in_flight(steps: Sequence[Any]) -> int:
    """Return the largest number of batches that were in flight at the same time."""
    most = now = 0
    for event, step in steps:
        now += (step.launched() is not None) - isinstance(event, BatchFinished)
        most = max(most, now)
    return most


def table(outcomes: Sequence[Outcome]) -> str:
    """Return one line for each check."""
    heads = ("pair", "requests", "ended", "aborted", "slots verified", "journals", "seconds", "seen")
    rows = [
        (
            one.name, str(one.requests), str(one.ended), str(one.aborted), " + ".join(f"{n:,}" for n in one.slots),
            str(one.journals), f"{one.seconds:.1f}", ", ".join(f"{mark} {n:,}" for mark, n in one.marks.items()),
        )
        for one in outcomes
    ]  # fmt: skip
    widths = [max(len(row[column]) for row in [heads, *rows]) for column in range(len(heads))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in [heads, *rows]]
    return "\n".join(line.rstrip() for line in lines)


def campaign(
    cases: Sequence[Case], models: Models, *, seed: int, place: Path, progress: Callable[[Outcome], object]
) -> list[Outcome]:
    """Check cases, each at every depth of overlap."""
    outcomes = []
    for case in cases:
        for overlap in case.overlaps:
            run = place / str(len(outcomes))
            run.mkdir()
            outcomes.append(check(case, models, overlap, seed, run))
            progress(outcomes[-1])
    return outcomes
