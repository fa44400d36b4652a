"""Every feature alone, and every two together: each request gets the tokens that one plain engine gives it.

A feature is a line of `FEATURES`: settings, or fields of requests, or another set of engines. Two that the core refuses
together stand in `NEVER`, and the refusal names them.

Pools are too small for all requests at once, every KV cell is checked where it is read, invariants after every event,
and the mark of each feature must show in every pair, unless `UNSEEN` gives the reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import combinations
from typing import Any, Literal

import pytest

from lockstep.core.contract.config import CacheTiers, HybridMemory, Multiplexing, SchedConfig
from lockstep.core.contract.errors import ConfigError
from lockstep.core.contract.events import Control, Grammar, LoadAdapterControl, OpenSession, PromptSpan
from tests.support.featured import Abreast, Ask, Handover, Place, RefusedAtEntry, Solo, play
from tests.support.served import Answer

PAGE_SIZE = 2
POOLS = (8, 12, 1)  # pages beside those of the longest request
Asks = list[Ask]
Where = Literal["solo", "handover", "abreast"]


@dataclass(frozen=True)
class Feature:
    """A feature: settings of every engine, fields of requests, the engines; and the mark of its effect."""

    seen: str = ""  # a mark of `featured.mark`; empty: it has none
    settings: dict[str, Any] = field(default_factory=dict)
    beside: dict[str, Any] = field(default_factory=dict)  # settings under which it shows; any feature's own go first
    hybrid: dict[str, int] = field(default_factory=dict)  # of HybridMemory
    asks: Callable[[Ask], dict[str, Any]] | None = None  # further fields of a request with the feature
    needs: dict[str, Any] = field(default_factory=dict)  # settings without which no engine takes such requests
    controls: tuple[Control, ...] = ()
    where: Where = "solo"
    called: tuple[str, ...] = ()  # names in a refusal beside its settings


TEXT = Grammar("regex", "g", b"g")


def _media(ask: Ask) -> dict[str, Any]:
    if len(ask.prompt) < 4 or "token_type_ids" in ask.about:
        return {}
    return {"spans": (PromptSpan(1, 4, "image", bytes([ask.prompt[0] // 100]) * 32, 3),)}


def _turns(ask: Ask) -> dict[str, Any]:
    """Requests that follow one another are turns; samples have no session."""
    return {"session": f"s{ask.root}"} if ask.root in (0, 2) and "parallel_samples" not in ask.about else {}


def _samples(ask: Ask) -> dict[str, Any]:
    """No request follows samples, and a turn has one answer."""
    return {"parallel_samples": 3} if ask.root not in (0, 2) else {}


TIERS = CacheTiers(host_pages=30, load_tokens_min=1)
STORAGE = CacheTiers(
    host_pages=30, load_tokens_min=1, storage=True, prefetch_tokens_min=1, prefetch_policy="wait_complete"
)
PREEMPTING = {
    "schedule_policy": "priority",
    "retraction_policy": "priority",
    "enable_priority_preemption": True,
    "priority_preemption_threshold": 1,
}

FEATURES: dict[str, Feature] = {
    # batching
    "overlap": Feature("launched behind a batch in flight", {"overlap_depth": 2}),
    "forced retraction": Feature("retracted (forced)", {"retract_every": 3}),
    "mixed batches": Feature("mixed batches", {"batching": "mixed"}),
    "running first": Feature("mixed batches", {"batching": "running_first", "reserve": "on_demand"}),
    "chunks": Feature("prompts split", {"chunked_prefill_size": 4}),
    "aligned chunks": Feature("prompts split", {"truncation_align_size": 4, "chunked_prefill_size": 4}),
    "several steps": Feature("decodes of several steps", {"decode_steps_per_launch": 2}),
    "drafts": Feature("drafts", {"speculative_method": "ngram", "num_speculative_tokens": 3}),
    "jump forward": Feature(
        "forced tokens",
        {"jump_forward_tokens": 4},
        asks=lambda ask: {"grammar": TEXT},
    ),
    "pipeline": Feature("several microbatches in flight", {"pp_size": 2}),
    "halves": Feature(
        "two halves",
        {"two_batch_overlap": True, "two_batch_decode_tokens": 2, "two_batch_prefill_tokens": 3},
    ),
    "layers": Feature("later layers of prompts", {"multiplexing": Multiplexing(layers=3, token_budget=10)}),
    # caching
    "no radix cache": Feature("", {"radix_cache": False}),
    "same-step sharing": Feature(
        "read what a batch in flight writes",
        {"same_step_sharing": True},
        beside={"overlap_depth": 1, "prefill_max_requests": 1},
    ),
    "retracted KV cached": Feature("", {"retracted_kv": "cache"}),
    "tiers": Feature("loads from host memory", {"tiers": TIERS}),
    "storage": Feature("loads from host memory", {"tiers": STORAGE}, called=("tiers.storage",)),
    "windows": Feature("window pages", hybrid={"window_tokens": 5, "window_pages": 9}, called=("hybrid",)),
    "states": Feature("states", hybrid={"state_slots": 6, "checkpoint_tokens": 2}, called=("hybrid",)),
    # engines
    "handover": Feature("parts sent", {"num_reserved_decode_tokens": 1}, where="handover", called=("role",)),
    "late pages": Feature(
        "parts sent",
        {"num_reserved_decode_tokens": 1, "transfer_allocation": "prefill_complete"},
        where="handover",
        called=("role",),
    ),
    "ranks": Feature("proposed", where="abreast", called=("dp_ranks",)),
    "delayer": Feature(
        "prompts waited for other ranks", {"prefill_delayer": True}, where="abreast", called=("dp_ranks",)
    ),
    # requests
    "preemption": Feature("retracted (preempted)", PREEMPTING, asks=lambda ask: {"priority": 2 * ask.key}),
    "media": Feature("media encoded", asks=_media, called=("spans",)),
    "adapters": Feature(
        "adapters loaded",
        asks=lambda ask: {"adapter": ("law", "med")[ask.root // 2 % 2]},
        needs={"max_loras": 2},
        controls=(LoadAdapterControl("law", 1), LoadAdapterControl("med", 1)),
        called=("adapter",),
    ),
    "sessions": Feature(
        "turns behind others", asks=_turns, controls=(OpenSession("s0", 60), OpenSession("s2", 60)), called=("session",)
    ),
    "samples": Feature("", asks=_samples, called=("parallel_samples",)),
    "grammars": Feature("ended (grammar)", asks=lambda ask: {"grammar": TEXT}, called=("grammar",)),
    "prompt logprobs": Feature("prompt logprobs", asks=lambda ask: {"logprob_start": 1}),
}

# The one place that lists the refused pairs.
NEVER: dict[str, tuple[str, ...]] = {
    # feature: the features that contradict it
    "aligned chunks": ("mixed batches", "running first"),
    "no radix cache": ("same-step sharing", "retracted KV cached", "tiers", "storage"),
    "several steps": ("drafts", "jump forward", "ranks", "delayer", "grammars"),
    "delayer": ("handover", "late pages"),
    "halves": ("several steps", "drafts", "jump forward", "pipeline", "windows", "states"),
    "layers": (
        "mixed batches",
        "running first",
        "drafts",
        "jump forward",
        "pipeline",
        "halves",
        "same-step sharing",
        "windows",
        "states",
        "handover",
        "late pages",
        "ranks",
        "delayer",
        "preemption",
    ),
}
REFUSED = {frozenset((name, other)) for name, others in NEVER.items() for other in others}

UNSEEN: dict[frozenset[str], tuple[str, ...]] = {
    # by pair: features without an effect beside the other, or not shown by so few requests
    frozenset({"same-step sharing", "prompt logprobs"}): (
        "same-step sharing",
    ),  # a request with them computes its prompt
    frozenset({"same-step sharing", "delayer"}): ("same-step sharing",),
    frozenset({"preemption", "delayer"}): ("preemption",),
    frozenset({"preemption", "handover"}): ("preemption",),  # no request is preempted on a decode engine
    frozenset({"preemption", "late pages"}): ("preemption",),
}


def requests(features: list[Feature]) -> tuple[list[Ask | None], Asks]:
    """A timeline, and later requests: shared prefixes, stops; of two kinds some requests are both, some only one."""

    def prompt(base: int, tokens: int, behind: int = 0) -> tuple[int, ...]:
        return (*range(100 * base, 100 * base + tokens), *range(900 + 10 * base, 900 + 10 * base + behind))

    def ask(
        key: int, tokens: tuple[int, ...], max_new: int, stops: tuple[int, ...] = (), after: Ask | None = None
    ) -> Ask:
        made = Ask(key, tokens, max_new, stops=stops, after=after)
        for number, feature in enumerate(one for one in features if one.asks is not None):
            if feature.asks is not None and key % 3 != 2 - number:
                made = replace(made, about=made.about | feature.asks(made))
        ends = (None, 4, 6)[key % 3] if "grammar" in made.about else None
        return replace(made, grammar_ends=ends)

    first, second = ask(0, prompt(1, 6, 2), 6), ask(2, prompt(2, 6, 4), 7)
    timeline = [
        first, ask(1, prompt(1, 6, 3), 9, stops=(4,)), None, None, second, ask(3, prompt(2, 6), 10), None, None,
        ask(6, prompt(3, 1), 8, stops=(5,)), None, ask(7, prompt(4, 12), 1), None, None, ask(8, prompt(1, 7), 8),
    ]  # fmt: skip
    fifth = ask(5, prompt(2, 6, 5), 5, after=second)
    ninth = ask(9, prompt(1, 6, 2), 4, after=fifth)
    return timeline, [ask(4, prompt(1, 6, 4), 3, after=first), fifth, ninth, ask(10, prompt(2, 6, 3), 4, after=ninth)]


def all_requests(features: list[Feature]) -> Asks:
    timeline, later = requests(features)
    return [sample for ask in (*timeline, *later) if ask is not None for sample in ask.samples]


def pool_pages(asks: Asks, beside: int) -> int:
    """Each request fits alone, all rarely do; the turns of a session count as one request that grows."""
    lengths = Counter[str]()
    for ask in asks:
        lengths[ask.about.get("session", f"alone {ask.key}")] += len(ask.prompt) + ask.max_new
    return -(-max(lengths.values()) // PAGE_SIZE) + beside


def place_for(features: list[Feature], beside: int, check: bool = False) -> Place:
    """The engines on which two features are combined. Raises ConfigError."""
    settings: dict[str, Any] = {
        "page_size": PAGE_SIZE,
        "pages": pool_pages(all_requests(features), beside),
        "max_running_requests": 4,
        "chunked_prefill_size": 32,
        "overlap_depth": 0,
        "schedule_conservativeness": 0.02,
    }
    hybrid: dict[str, int] = {}
    for feature in features:
        settings |= feature.beside
    for feature in features:
        settings |= feature.settings | feature.needs
        hybrid |= feature.hybrid
    if hybrid:
        settings["hybrid"] = HybridMemory(**hybrid)
    where = {feature.where for feature in features} - {"solo"}
    ranks: list[dict[str, Any]] = [{}]
    if "abreast" in where:
        ranks = [{"dp_ranks": 2, "dp_rank": rank} for rank in range(2)]
    if "handover" in where:
        prefills, decodes = (
            [SchedConfig(**settings, **rank, role=role) for rank in ranks] for role in ("prefill", "decode")
        )
        return Handover(prefills, decodes, ranks=len(ranks) > 1, check=check)
    if "abreast" in where:
        return Abreast([SchedConfig(**settings, **rank) for rank in ranks], check=check)
    return Solo(SchedConfig(**settings), check=check)


def served(place: Place, features: list[Feature]) -> dict[int, Answer]:
    timeline, later = requests(features)
    play(place, timeline, later, [control for feature in features for control in feature.controls])
    return place.answers


@cache
def plain(asking: tuple[str, ...]) -> dict[int, Answer]:
    """The answers of one engine without any feature, compared with the expected ones."""
    features = [FEATURES[name] for name in asking]
    needs = {name: value for feature in features for name, value in feature.needs.items()}
    place = Solo(SchedConfig(page_size=PAGE_SIZE, pages=400, radix_cache=False, overlap_depth=0, **needs))
    answers = served(place, features)
    assert answers == {ask.key: ask.answer for ask in all_requests(features)}
    return answers


def marks_of(names: tuple[str, ...]) -> Counter[str]:
    """Serve the requests with these features, in one pool after the other until each has shown its mark.

    Returns: the marks that were reached.
    Raises: ConfigError or RefusedAtEntry for features that contradict each other, AssertionError for a wrong answer.
    """
    features = [FEATURES[name] for name in names]
    expected = plain(tuple(name for name in names if FEATURES[name].asks is not None))
    marks: Counter[str] = Counter()
    for beside in POOLS:
        place = place_for(features, beside, check=True)
        answers = served(place, features)
        wrong = {key: (answers.get(key), wanted) for key, wanted in expected.items() if answers.get(key) != wanted}
        assert not wrong, f"{' with '.join(names)}, {beside} pages beside the longest: got and wanted {wrong}"
        assert len(answers) == len(expected)
        marks += place.marks
        if not unseen(names, marks) and len(names) > 1:
            break
    return marks


def unseen(names: tuple[str, ...], marks: Counter[str]) -> list[str]:
    """Features whose marks were not reached."""
    return [name for name in names if FEATURES[name].seen and not marks[FEATURES[name].seen]]


@pytest.mark.parametrize("name", FEATURES)
def test_each_feature_alone_gives_what_one_plain_engine_gives(name: str) -> None:
    assert not unseen((name,), marks_of((name,)))


@pytest.mark.parametrize("names", list(combinations(FEATURES, 2)), ids=" + ".join)
def test_each_pair_gives_what_one_plain_engine_gives_or_is_refused(names: tuple[str, str]) -> None:
    listed, together = frozenset(names) in REFUSED, " with ".join(names)
    marks, refusal = tried(names)
    if refusal is not None:
        assert listed, f"{together} is refused, and not in REFUSED: {refusal}"
        assert_clear(names, refusal)
        return
    assert not listed, f"{together} goes: delete it from NEVER"
    quiet = [name for name in unseen(names, marks) if name not in UNSEEN.get(frozenset(names), ())]
    assert not quiet, f"{quiet} was not at work in {together}"


def tried(names: tuple[str, ...]) -> tuple[Counter[str], ConfigError | RefusedAtEntry | None]:
    """The marks that were reached, or why the features contradict each other."""
    try:
        return marks_of(names), None
    except (ConfigError, RefusedAtEntry) as refusal:
        return Counter(), refusal


def assert_clear(names: tuple[str, str], refusal: Exception) -> None:
    """A refusal is one sentence that names the refused features, in the words of both, and for a config the remedy."""
    text = str(refusal)
    spoken = [any(f"`{word}`" in text for word in words(FEATURES[name])) for name in names]
    if isinstance(refusal, ConfigError):
        assert all(spoken), f"it does not name both of {names}: {text}"
        assert text.count("hint: ") == 1, text
    else:
        assert any(spoken), f"it names none of {names}: {text}"
        assert text.startswith(("unsupported: ", "bad_request: ")), text


def words(feature: Feature) -> set[str]:
    """Names of a feature in a refusal."""
    return {*feature.settings, *feature.called}
