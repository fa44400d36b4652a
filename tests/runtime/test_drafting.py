"""Drafts on the device: which are right, their effect on positions, and that no answer changes."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU runtime is not installed")

from safetensors.torch import load_file, save_file  # noqa: E402

from lockstep.core.contract.errors import ConfigError  # noqa: E402
from lockstep.core.contract.events import (  # noqa: E402
    BatchFinished,
    RequestRetracted,
)
from lockstep.core.journal.records import JournalHeader  # noqa: E402
from lockstep.core.journal.replay import fold, replay  # noqa: E402
from lockstep.core.journal.writer import JournalWriter  # noqa: E402
from lockstep.host.drafts import DraftCounts  # noqa: E402
from lockstep.host.loop import HostClock  # noqa: E402
from lockstep.host.recorded import RecordedAnswer, run_recorded  # noqa: E402
from lockstep.host.services import RequestServices  # noqa: E402
from lockstep.runtime import LLM, Params, draft_sources  # noqa: E402
from lockstep.runtime.demo_model import demo_model_folder  # noqa: E402
from lockstep.runtime.drafting import NGRAM_MAX, DraftingRows, NgramDrafter, right_ones  # noqa: E402
from lockstep.runtime.models import build_model  # noqa: E402
from lockstep.runtime.overlap import CpuLane  # noqa: E402
from tests.support.markov import statistic_of_pairs  # noqa: E402
from tests.support.small_runtime import (  # noqa: E402
    CPU,
    SAMPLED,
    VOCABULARY,
    Foreseeing,
    SmallRuntime,
    alone,
    make_executor,
    small_config,
)

NGRAM: dict[str, Any] = {"speculative_method": "ngram"}

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "depth 0": {"overlap_depth": 0},
    "depth 2": {"overlap_depth": 2},
    "many drafts": {"num_speculative_tokens": 9},
    "fewer where they are wrong": {"speculative_min_chance": 0.4},
    "few at a time": {"speculative_max_batch_size": 3},
    "mixed": {"batching": "mixed", "chunked_prefill_size": 8},
    "running first": {"batching": "running_first", "chunked_prefill_size": 8, "overlap_depth": 2},
    "retractions": {"retract_every": 3, "overlap_depth": 1},
    "retractions, depth 0": {"retract_every": 3, "overlap_depth": 0},
    "short of pages": {"pages": 20, "reserve": "on_demand"},
    "small pages": {"page_size": 1, "pages": 200, "chunked_prefill_size": 5},
    "shared in the same step": {"same_step_sharing": True},
}


def random_requests(seed: int, count: int) -> list[tuple[list[int], int]]:
    """Prompts that begin alike, in groups, and lengths."""
    rng = random.Random(seed)
    beginnings = [[rng.randrange(97) for _ in range(rng.randrange(20))] for _ in range(3)]
    return [
        (rng.choice(beginnings) + [rng.randrange(97) for _ in range(rng.randrange(1, 24))], rng.randrange(1, 20))
        for _ in range(count)
    ]


def accepted_counts(runtime: SmallRuntime) -> list[int]:
    """Tokens that verifying and other sampling rows got, of all results."""
    events = [event for event, _ in runtime.steps if isinstance(event, BatchFinished)]
    return [int(count) for event in events for count in np.frombuffer(event.accepted, np.int32)]


@pytest.mark.parametrize("canary", [True, False])
@pytest.mark.parametrize("name", SETTINGS)
def test_every_request_is_answered_as_if_there_were_no_drafts(name: str, canary: bool) -> None:
    runtime = SmallRuntime(
        run_at="launch" if canary else "collection",
        canary=canary,
        drafter=Foreseeing,
        eos_token_ids=(5,),
        **{**NGRAM, **SETTINGS[name]},
    )
    requests = random_requests(len(name), 14)
    answers = [runtime.submit(prompt, count) for prompt, count in requests]
    runtime.run()
    for answer, (prompt, count) in zip(answers, requests, strict=True):
        assert answer.tokens == alone(prompt, count, stops=(5,))
    counts = accepted_counts(runtime)
    assert min(counts) == 1 < max(counts)
    if "retractions" in name:
        assert runtime.decided(RequestRetracted)
    if runtime.config.overlap_depth:
        assert any(plan.starts_after for plan in runtime.plans)


def drafts_of(tokens: list[int], drafts: int) -> list[int]:
    """Drafts by n-grams, in plain Python."""
    last = len(tokens) - 1
    best, place = 0, last
    for at in range(last):
        length = 0
        while length < min(NGRAM_MAX, at + 1) and tokens[at - length] == tokens[last - length]:
            length += 1
        if length and length >= best:
            best, place = length, at
    if place == last:
        return [tokens[-1]] * drafts
    return [tokens[place + 1 + j % (last - place)] for j in range(drafts)]


@pytest.mark.parametrize("words", [2, 4, 30])
def test_ngrams_are_those_of_plain_python(words: int) -> None:
    rng = random.Random(words)
    texts = [[rng.randrange(words) for _ in range(rng.choice((1, 2, 3, 7, 19, 40)))] for _ in range(24)]
    drafter, table = NgramDrafter(25 * 40, 4, CPU), torch.full((24, 10), 240, dtype=torch.int32)
    pages = list(range(240))
    rng.shuffle(pages)
    for row, tokens in enumerate(texts):
        count = -(-len(tokens) // 4)
        table[row, :count] = torch.tensor(pages[10 * row : 10 * row + count], dtype=torch.int32)
        at = torch.arange(len(tokens) - 1)
        slots = table[row][at >> 2].long() * 4 + (at & 3)
        drafter.observe_batch(SimpleNamespace(token_ids=torch.tensor(tokens[:-1], dtype=torch.int64), slots=slots))
    stands = torch.tensor([len(tokens) - 1 for tokens in texts])
    newest = torch.tensor([tokens[-1] for tokens in texts])
    for most in (39, 45):  # the upper bound of all positions may exceed every actual position
        five, host = np.full(24, 5, np.int32), np.full(24, most, np.int32)
        found = drafter.draft(DraftingRows(torch.arange(24), stands, newest, table, five, stands + 5, host))
        assert found.tolist() == [drafts_of(tokens, 5) for tokens in texts]


def test_a_draft_counts_if_all_before_it_do() -> None:
    places = torch.tensor([[0, 1, 2], [3, 3, 3], [4, 5, 6], [7, 8, 8]])
    there = torch.tensor([[True] * 3, [True, False, False], [True] * 3, [True, True, False]])
    fed = torch.tensor([0, 11, 12, 0, 0, 99, 15, 0, 17])  # behind the newest token, the drafts
    tokens = torch.tensor([11, 12, 13, 14, 15, 15, 16, 17, 18], dtype=torch.int32)
    valid = torch.zeros(9, dtype=torch.bool)
    assert right_ones(tokens, valid, fed, places, there).tolist() == [3, 1, 1, 2]
    invalid = valid.clone()
    invalid[[0, 2, 8]] = True  # a row with an invalid first token is reported by it; the tokens behind it are void
    assert right_ones(tokens, invalid, fed, places, there).tolist() == [2, 1, 1, 1]


DEPTHS = [0, 1, 2]


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_journal_replays_strictly_and_its_plans_run_again(depth: int, tmp_path: Path) -> None:
    settings: dict[str, Any] = {**NGRAM, "overlap_depth": depth, "retract_every": 4, "batching": "mixed"}
    config = small_config(**settings)
    with JournalWriter.create(tmp_path, JournalHeader(config=config, host={"kind": "runtime"})) as journal:
        runtime = SmallRuntime(journal=journal, drafter=Foreseeing, **settings)
        asked = random_requests(8, 12)
        for prompt, count in asked:
            runtime.submit(prompt, count)
        runtime.run()
    assert replay(tmp_path).digest == runtime.engine.digest
    executor = make_executor(config, CpuLane(HostClock()), drafter=Foreseeing)
    answers: list[RecordedAnswer] = []
    for event, result in run_recorded(tmp_path, executor, VOCABULARY, answers.append):
        assert result.tokens.tobytes() == event.tokens
        assert (b"" if result.accepted is None else result.accepted.tobytes()) == event.accepted
    for answer in answers:
        assert answer.tokens == alone(answer.prompt.tolist(), len(answer.tokens))


@pytest.mark.parametrize("depth", DEPTHS)
def test_plans_of_a_run_whose_drafts_were_others_run_too(depth: int, tmp_path: Path) -> None:
    """Rows start at the journal's positions, whichever drafts are right here; every slot that they read was written."""
    settings: dict[str, Any] = {**NGRAM, "overlap_depth": depth}
    config = small_config(**settings)
    with JournalWriter.create(tmp_path, JournalHeader(config=config, host={"kind": "runtime"})) as journal:
        runtime = SmallRuntime(journal=journal, drafter=Foreseeing, **settings)
        for prompt, count in random_requests(8, 12):
            runtime.submit(prompt, count)
        runtime.run()
    executor = make_executor(config, CpuLane(HostClock()), canary=False)
    answers: list[RecordedAnswer] = []
    results = list(run_recorded(tmp_path, executor, VOCABULARY, answers.append))
    assert not any(result.error for _, result in results)
    assert len(answers) == 12
    assert sum(len(answer.tokens) for answer in answers) == sum(count for _, count in random_requests(8, 12))


@pytest.mark.parametrize("depth", DEPTHS)
def test_logprobs_and_hidden_states_are_those_without_drafts(depth: int) -> None:
    def run(**settings: Any) -> list[Any]:
        runtime = SmallRuntime(drafter=Foreseeing, **settings)
        wanted = {"sampling": SAMPLED, "return_hidden_states": True}
        answers = [runtime.submit(prompt, count, **wanted) for prompt, count in random_requests(3, 8)]
        runtime.run()
        return [(one.tokens, one.logprobs, one.extras.hidden_states) for one in answers if one.extras is not None]

    plain, drafted = run(overlap_depth=0), run(overlap_depth=depth, retract_every=5, **NGRAM)
    for (tokens, logprobs, states), (same_tokens, same_logprobs, same_states) in zip(plain, drafted, strict=True):
        assert tokens == same_tokens
        assert len(logprobs) == len(same_logprobs) == len(tokens)
        assert str(logprobs) == str(same_logprobs)
        assert states.keys() == same_states.keys()
        assert all(np.array_equal(state, same_states[position]) for position, state in states.items())


@pytest.mark.parametrize("run_at", ["launch", "collection"])
@pytest.mark.parametrize("depth", DEPTHS)
def test_a_batch_that_fails_ends_its_own_and_no_other_text_changes(depth: int, run_at: Any) -> None:
    runtime = SmallRuntime(run_at=run_at, overlap_depth=depth, max_running_requests=2, drafter=Foreseeing, **NGRAM)
    asked = random_requests(5, 9)
    failing = iter([7, 15])
    fail_next = [next(failing)]

    def fail(batch: Any) -> Exception | None:
        if len(runtime.model.batches) < fail_next[0]:
            return None
        fail_next[0] = next(failing, 1 << 30)
        return RuntimeError("no such kernel")

    runtime.model.fail_at = fail
    answers = [runtime.submit(prompt, count) for prompt, count in asked]
    runtime.run()
    assert {answer.reason for answer in answers} == {"length", "error"}
    for answer, (prompt, count) in zip(answers, asked, strict=True):
        said = alone(prompt, count)
        assert answer.tokens == (said if answer.reason == "length" else said[: len(answer.tokens)])


@pytest.mark.parametrize("depth", DEPTHS)
def test_what_is_no_number_behind_a_draft_ends_its_request_where_it_would_have_without(depth: int) -> None:
    broken = alone([3, 1, 4], 12)[8]
    runtime = SmallRuntime(overlap_depth=depth, drafter=Foreseeing, num_speculative_tokens=5, **NGRAM)
    runtime.model.not_a_number = {broken}
    answers = [runtime.submit([3, 1, 4], 12), *(runtime.submit([one], 12) for one in range(3))]
    runtime.run()
    assert answers[0].reason == "invalid"
    assert answers[0].tokens == alone([3, 1, 4], 12, stops=(broken,))
    assert max(accepted_counts(runtime)) > 1


class Until:
    """Ends a text behind a token, and receives each token once, in order."""

    def __init__(self, prompt: list[int], last: int) -> None:
        self.tokens, self.last, self.prompt = [], last, prompt

    def push(self, number: int, token: int) -> tuple[bool, int]:
        assert number == len(self.tokens)
        self.tokens.append(token)
        return token == self.last, 0


@pytest.mark.parametrize("depth", DEPTHS)
def test_rows_with_stop_texts_go_on_token_by_token_beside_the_others(depth: int) -> None:
    watched, asked = [], random_requests(6, 10)
    ends = [alone(prompt, 12)[7] for prompt, _ in asked]
    by_prompt = {np.array(prompt, np.int32).tobytes(): end for (prompt, _), end in zip(asked, ends, strict=True)}

    def watch(event: Any) -> Until:
        watched.append(Until(event.prompt, by_prompt[event.prompt.ids]))
        return watched[-1]

    services = RequestServices(watch_text=watch)
    runtime = SmallRuntime(overlap_depth=depth, drafter=Foreseeing, requests=services, **NGRAM)
    answers = [
        runtime.submit(prompt, 12, **({"stop_texts": ("end",)} if number % 2 else {}))
        for number, (prompt, _) in enumerate(asked)
    ]
    runtime.run()
    assert len(watched) == 5
    for number, (answer, (prompt, _), end) in enumerate(zip(answers, asked, ends, strict=True)):
        assert answer.tokens == alone(prompt, 12, stops=(end,) if number % 2 else ())
    assert runtime.host.drafts.right


def test_an_llm_drafts_beside_rows_under_grammars_and_with_stop_texts(tmp_path: Path) -> None:
    """Neither of the two kinds has drafts, each gets its answer of a run without them, and the journal replays."""
    pytest.importorskip("llguidance", reason="no grammar backend is installed")
    listed = "page one is free. page two is free. page three is free. page"
    each = [Params(max_new_tokens=64, ignore_eos=True)]
    each += [Params(max_new_tokens=24, ignore_eos=True, stop=(stop,)) for stop in ("zebra", "e")]
    each += [Params(max_new_tokens=16, ignore_eos=True, grammar=("regex", "( is| free| page){8}"))]
    with LLM(device="cpu") as llm:
        expected = llm.generate([listed] * 4, each)
    with LLM(device="cpu", journal=tmp_path, overlap_depth=1, **NGRAM) as llm:
        found, drafts = llm.generate([listed] * 4, each), llm.stats().drafts
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    assert [one.finish_reason for one in found] == [one.finish_reason for one in expected]
    assert found[2].finish_reason == "text_stop"
    assert drafts.right
    free = {int(step.launched().request_ids[row]) for step, row in _drafted(tmp_path)}
    assert free == {found[0].request_id}


def _drafted(folder: Path) -> list[tuple[Any, int]]:
    """Steps that launched drafts, with the requests of the drafts."""
    found = []
    for _, step in fold(folder):
        plan = step.launched()
        if plan is not None and plan.speculation is not None:
            rows = np.flatnonzero(plan.speculation.drafted()) + plan.extend_rows
            found += [(step, int(row)) for row in rows]
    return found


def test_counts_are_those_of_the_results() -> None:
    runtime = SmallRuntime(overlap_depth=1, drafter=Foreseeing, num_speculative_tokens=4, **NGRAM)
    for prompt, count in random_requests(2, 10):
        runtime.submit(prompt, count)
    runtime.run()
    found = runtime.host.drafts
    plans = {plan.batch_id: plan for plan in runtime.plans if plan.speculation is not None}
    drafts = sum(int(plan.speculation.draft_lengths.sum()) for plan in plans.values() if plan.speculation is not None)
    right = sum(count - 1 for count in accepted_counts(runtime))
    assert (found.drafts, found.right, sum(found.right_by_position)) == (drafts, right, right)
    assert found.verifications == sum(len(plan.rows) - plan.extend_rows for plan in plans.values())
    assert found.accepted_length_mean == 1 + right / found.verifications > 1.2


# ------------------------------------------------------------------------------------------------------ a real model

PHRASES = [
    "The scheduler writes a journal. The scheduler reads a journal. The scheduler",
    "one two three four one two three four one two",
    "A page is free. A page is held. A page is",
    "the end of the end of the",
]


def said(params: Params, **settings: Any) -> tuple[list[tuple[list[int], list[float] | None]], DraftCounts]:
    """The answers of the demo model, and the counts of its drafts."""
    with LLM(device="cpu", max_running_requests=6, dtype="float32", **settings) as llm:
        prompts = [f"{phrase} {number}" * 2 for number in range(2) for phrase in PHRASES]
        answers = llm.generate(prompts, params)
        return [(answer.token_ids, answer.logprobs) for answer in answers], llm.stats().drafts


KINDS = {
    "greedy": Params(max_new_tokens=20),
    "drawn": Params(max_new_tokens=20, temperature=0.4, top_p=0.9, seed=5, logprobs=1),
    "penalised": Params(
        max_new_tokens=20, temperature=0.3, seed=3, frequency_penalty=0.1, repetition_penalty=1.1, min_new_tokens=18
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_real_model_answers_as_without_drafts(kind: str) -> None:
    """Drawn tokens too: each is drawn by its seed and position, and a draft is right if it is that token."""
    plain, none = said(KINDS[kind])
    assert not none.verifications
    for settings in ({"overlap_depth": 0}, {"overlap_depth": 1, "retract_every": 7}):
        drafted, counts = said(KINDS[kind], num_speculative_tokens=4, **settings, **NGRAM)
        assert [tokens for tokens, _ in drafted] == [tokens for tokens, _ in plain]
        assert counts.right > 2
        for (_, logprobs), (_, expected) in zip(drafted, plain, strict=True):
            assert logprobs == pytest.approx(expected, abs=1e-4) if expected is not None else logprobs is None


@pytest.mark.parametrize("depth", [0, 1])
def test_a_model_that_drafts_for_itself_is_right_and_one_that_reports_something_else_does_no_harm(
    depth: int, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"overlap_depth": depth, "retract_every": 5}
    params = Params(max_new_tokens=9, ignore_eos=True)
    plain, _ = said(params)
    folder = demo_model_folder()
    drafted, counts = said(params, draft_model=folder, **settings)
    assert [tokens for tokens, _ in drafted] == [tokens for tokens, _ in plain]
    assert counts.acceptance_ratio > 0.99  # all but those where two tokens almost tie
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    tensors = load_file(other / "model.safetensors")
    save_file({name: tensor.roll(1, 0) for name, tensor in tensors.items()}, other / "model.safetensors")
    wrong, counts = said(params, draft_model=other, **settings)
    assert [tokens for tokens, _ in wrong] == [tokens for tokens, _ in plain]
    assert counts.acceptance_ratio < 0.3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"speculative_method": "draft_model"}, "no `draft_model` is given"),
        ({"speculative_method": "eagle"}, "is eagle, but no `draft_model` is given"),
        ({"speculative_method": "mtp"}, "mtp.fc.weight: missing"),
        ({"speculative_method": "mtp", "tp": 2}, "is mtp, but 2 processes run the model"),
        ({"speculative_method": "ngram", "draft_model": "x"}, "`draft_model` is x, but `speculative_method` is ngram"),
        ({"draft_model": "x", "tp": 2}, "`draft_model` is x, but `tp` is 2"),
    ],
)
def test_a_model_that_cannot_draft_is_one_error(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(device="cpu", **settings)


@pytest.mark.parametrize("what", ["vocab_size", "max_position_embeddings"])
def test_a_draft_model_that_does_not_fit_is_one_error(what: str, tmp_path: Path) -> None:
    config = json.loads((demo_model_folder() / "config.json").read_text())
    config[what] //= 2
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps({**config, **small}))
    model = build_model({**config, **small}, random_weights_seed=1)
    monkey = {"vocab_size": "tokens, the model", "max_position_embeddings": "tokens, but `context_tokens_max` is"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(draft_sources, "build_model", lambda at, *a, **b: model)
        with pytest.raises(ConfigError, match=monkey[what]):
            LLM(device="cpu", draft_model=tmp_path)


def test_drawn_tokens_have_the_models_chances() -> None:
    """Chi-square over 2,000 seeds: of each pair of consecutive tokens, with many right drafts."""
    runtime = SmallRuntime(
        check=False, canary=False, max_running_requests=200, pages=2000, overlap_depth=1, num_speculative_tokens=5,
        chunked_prefill_size=800, **NGRAM
    )  # fmt: skip
    statistic = statistic_of_pairs(runtime, 2000)
    assert statistic < 32.9  # of 12 degrees of freedom: exceeded by chance once in a thousand
    assert runtime.host.drafts.right > 5000
    assert runtime.host.drafts.accepted_length_mean > 1.4
