"""Requests handed over from prefill to decode engines on tensors: every answer is that of one plain engine.

The exact tests run the sum model, whose arithmetic has no rounding: a page of other tokens, or one that is read too
early, gives other tokens. The canary reads the tag of every slot beside, also of those that were sent.
"""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

torch = pytest.importorskip("torch", reason="the GPU runtime is not installed")

from lockstep.core.contract.errors import ConfigError  # noqa: E402
from lockstep.core.contract.events import OpenSession  # noqa: E402
from lockstep.core.journal.records import JournalHeader  # noqa: E402
from lockstep.core.journal.replay import replay  # noqa: E402
from lockstep.core.journal.writer import JournalWriter  # noqa: E402
from lockstep.host.handover.decode import DecodeSide  # noqa: E402
from lockstep.runtime import LLM, Params  # noqa: E402
from lockstep.runtime.llm import demo_folder  # noqa: E402
from tests.support.adapters import write_adapter  # noqa: E402
from tests.support.model_engines import engines  # noqa: E402
from tests.support.pair import Pair, pages_held  # noqa: E402
from tests.support.small_runtime import alone, small_config  # noqa: E402

NEW = 12


def prompts(seed: int, many: int, longest: int = 60) -> list[list[int]]:
    """Prompts of which many share a beginning."""
    rng = random.Random(seed)
    starts = [[rng.randrange(90) for _ in range(rng.randrange(4, 40))] for _ in range(5)]
    made = []
    for _ in range(many):
        start = rng.choice(starts) if rng.random() < 0.7 else []
        more = [rng.randrange(90) for _ in range(rng.randrange(1, 24))]
        made.append((start + more)[:longest])
    return made


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_an_answer_is_that_of_one_engine(transport: str, tmp_path: Path) -> None:
    with Pair(tmp_path, transport=transport) as pair:
        asked = prompts(1, 12)
        answers = [pair.submit(prompt, NEW) for prompt in asked]
        pair.wait(*answers)
        assert [one.tokens for one in answers] == [alone(prompt, NEW) for prompt in asked]
        pair.settle()
        assert pair.receivers[0].counts.done == 12
        assert pair.receivers[0].counts.pages > 12
    assert [pages_held(one) for one in pair.runtimes] == [0, 0]


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "retraction": {"decode": {"retract_every": 5}},
    "few pages": {"decode": {"pages": 30, "num_reserved_decode_tokens": 4}},
    "overlap": {"overlap_depth": 1},
    "no cache": {"radix_cache": False},
    "prefill complete": {"transfer_allocation": "prefill_complete"},
    "drafts": {"speculative_method": "ngram", "num_speculative_tokens": 3},
    "few slots": {"transfer_slots": 2},
}


@pytest.mark.parametrize("name", list(SETTINGS))
def test_two_hundred_requests_equal_one_engine(name: str, tmp_path: Path) -> None:
    settings = {**SETTINGS[name]}
    prefill, decode = ({**settings.pop(side, {})} for side in ("prefill", "decode"))
    kept = [
        JournalWriter.create(
            tmp_path / f"{i}",
            JournalHeader(config=small_config(role=role, **{"radix_cache": True, **settings, **more})),
        )
        for i, (role, more) in enumerate((("prefill", prefill), ("decode", decode), ("decode", decode)))
    ]
    rng = random.Random(7)
    with Pair(tmp_path, decodes=2, prefill=prefill, decode=decode, journals=kept, **settings) as pair:
        asked = prompts(2, 200)
        answers, cancelled = [], set()
        for number, prompt in enumerate(asked):
            answers.append(pair.submit(prompt, NEW, decode=number % 2))
            if rng.random() < 0.1:
                cancelled.add(number)
                pair.decodes[number % 2].host.cancel(answers[-1].request_id)
            if number % 40 == 39:
                pair.wait(*answers)
        pair.wait(*answers)
        for number, (one, prompt) in enumerate(zip(answers, asked, strict=True)):
            right = alone(prompt, NEW)
            if number in cancelled and one.reason == "cancelled":
                assert one.tokens == right[: len(one.tokens)]
            else:
                assert (one.reason, one.tokens) == ("length", right), number
        pair.settle()
        assert sum(one.counts.done for one in pair.receivers) >= 170
    assert [pages_held(one) for one in pair.runtimes] == [0, 0, 0]
    assert all(one.executor.canary is not None and one.executor.canary.slots_verified > 0 for one in pair.runtimes)
    for number, (journal, one) in enumerate(zip(kept, pair.runtimes, strict=True)):
        journal.close()
        assert replay(tmp_path / f"{number}").digest == one.engine.digest


# ------------------------------------------------------------------------------------------------------- a real model

SMALL: dict[str, Any] = {"device": "cpu", "grammar_backend": "none", "page_size": 16, "pages": 70}
SMALL |= {"max_running_requests": 4, "debug": True}
GREEDY = Params(max_new_tokens=8, ignore_eos=True)


def real_prompts(many: int = 24) -> list[list[int]]:
    rng = random.Random(11)
    beginnings = [[rng.randrange(3, 2000) for _ in range(rng.randrange(60, 260))] for _ in range(8)]
    return [rng.choice(beginnings) + [rng.randrange(3, 2000) for _ in range(5)] for _ in range(many)]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    with LLM(**SMALL) as llm:
        return [answer.token_ids for answer in llm.generate(real_prompts(), GREEDY)]


KINDS: dict[str, dict[str, Any]] = {
    "tp 1 to 1": {},
    "tp 2 to 2": {"prefill": {"tp": 2}, "decode": {"tp": 2}},
    "tp 2 to 1": {"prefill": {"tp": 2}},
    "tp 1 to 2": {"decode": {"tp": 2}},
    "pp 2 to 2": {"prefill": {"pp": 2}, "decode": {"pp": 2}, "transfer_checksums": True},
    "pp 2 to 1": {"prefill": {"pp": 2}, "transfer_checksums": True},
    "tp 2 to pp 2": {"prefill": {"tp": 2}, "decode": {"pp": 2}},
    "ngram": {"speculative_method": "ngram", "num_speculative_tokens": 3},
    "draft model": {"speculative_method": "draft_model", "num_speculative_tokens": 3, "draft_model": "demo"},
    "fp8": {"kv_cache_dtype": "fp8_e4m3"},
    "host memory": {"host_cache_gb": 0.05},
    "retraction": {"decode": {"retract_every": 5, "num_reserved_decode_tokens": 16}},
}


@pytest.mark.parametrize("name", list(KINDS))
def test_a_model_answers_as_one_engine(name: str, expected: list[list[int]], tmp_path: Path) -> None:
    both = dict(KINDS[name])
    prefill, decode = both.pop("prefill", {}), both.pop("decode", {})
    if "draft_model" in both:
        both["draft_model"] = str(demo_folder())
    if name == "fp8":
        with LLM(**SMALL, **both) as plain:
            expected = [answer.token_ids for answer in plain.generate(real_prompts(), GREEDY)]
    with engines(tmp_path, prefill, decode, **SMALL, **both) as (_, second):
        answers = second.generate(real_prompts(), GREEDY)
        assert [one.token_ids for one in answers] == expected
        side = second.handover
        assert isinstance(side, DecodeSide)
        assert (side.counts.done, side.counts.failed) == (len(expected), 0)
        assert bool(second.stats().engine.counts.retractions) == ("retract_every" in decode)


def test_logprobs_hidden_states_and_samples_go_with_the_prompt(tmp_path: Path) -> None:
    asked = [
        Params(max_new_tokens=6, logprobs=2, prompt_logprobs=1, ignore_eos=True),
        Params(max_new_tokens=6, hidden_states=True, ignore_eos=True),
        Params(max_new_tokens=6, n=3, temperature=0.8, seed=5, ignore_eos=True),
        Params(max_new_tokens=1, logprobs=1, ignore_eos=True),
        Params(max_new_tokens=30, stop=["e"]),
    ]
    given = real_prompts(len(asked))
    with LLM(**SMALL) as plain:
        right = plain.generate(given, asked)
    with engines(tmp_path, {}, {}, **SMALL) as (_, second):
        answers = second.generate(given, asked)
    for one, other in zip(answers, right, strict=True):
        assert one.token_ids == other.token_ids
        assert [each.token_ids for each in one.others] == [each.token_ids for each in other.others]
        assert one.text == other.text
    assert answers[0].logprobs == pytest.approx(right[0].logprobs, abs=1e-4)
    assert [sorted(one) for one in answers[0].top_logprobs] == [sorted(one) for one in right[0].top_logprobs]
    assert answers[0].prompt_logprobs == pytest.approx(right[0].prompt_logprobs, abs=1e-4)
    states = answers[1].hidden_states, right[1].hidden_states
    assert states[0] is not None
    assert states[1] is not None
    assert states[0].shape == states[1].shape
    assert states[0] == pytest.approx(states[1], abs=1e-3)


def test_an_engine_with_a_role_needs_other_engines() -> None:
    with pytest.raises(ConfigError, match="lockstep serve --prefill-engines 1 --decode-engines 1"):
        LLM(**SMALL, role="decode")


# ------------------------------------------------------------------------------------------------------------ failures


def spoil(pair: Pair, share: float, seed: int = 1) -> list[int]:
    """Change a byte of some of the slots behind their checksums. Returns a list that grows with each."""
    rng, spoiled, own = random.Random(seed), list[int](), pair.transports[0]._own
    stage = own.stage

    def stage_wrongly(number: int, slot: int, pages: Any, block: int = 0) -> int:
        checksum = stage(number, slot, pages, block)
        if rng.random() < share:
            own._stagings[number].slot(slot)[rng.randrange(8)] ^= 1
            spoiled.append(slot)
        return checksum

    own.stage = stage_wrongly  # type: ignore[method-assign]
    return spoiled


@pytest.mark.parametrize("failure", ["recompute", "fail"])
def test_bytes_that_change_on_the_way_are_found(failure: str, tmp_path: Path) -> None:
    with Pair(tmp_path, transfer_failure=failure) as pair:
        spoiled = spoil(pair, 0.2)
        asked = prompts(3, 60)
        answers = [pair.submit(prompt, NEW) for prompt in asked]
        pair.wait(*answers)
        assert len(spoiled) > 3
        for one, prompt in zip(answers, asked, strict=True):
            right = alone(prompt, NEW)
            assert one.tokens == right or (failure == "fail" and one.reason == "transfer" and not one.tokens)
        ended = [one.reason for one in answers]
        assert ("transfer" in ended) == (failure == "fail")
        assert pair.receivers[0].counts.failed > 3
        pair.settle()
    assert [pages_held(one) for one in pair.runtimes] == [0, 0]


@pytest.mark.parametrize("failure", ["recompute", "fail"])
def test_a_link_that_breaks_at_any_time_costs_no_token_and_no_page(failure: str, tmp_path: Path) -> None:
    rng = random.Random(4)
    with Pair(tmp_path, prefills=2, decodes=2, transfer_failure=failure) as pair:
        asked = prompts(5, 120)
        answers = []
        for number, prompt in enumerate(asked):
            answers.append(pair.submit(prompt, NEW, prefill=rng.randrange(2), decode=rng.randrange(2)))
            if number % 6 == 5:
                time.sleep(rng.random() * 0.02)
                for peer in list(pair.receivers[rng.randrange(2)]._peers.values()):
                    peer.link.close()
        pair.wait(*answers)
        broken = 0
        for one, prompt in zip(answers, asked, strict=True):
            broken += one.reason == "transfer"
            assert one.tokens == alone(prompt, NEW) or one.reason == "transfer"
        assert bool(broken) == (failure == "fail")
        assert sum(one.counts.failed for one in pair.receivers) > 5
        pair.settle()
    assert [pages_held(one) for one in pair.runtimes] == [0, 0, 0, 0]


def test_a_prefill_engine_that_fails_keeps_no_request_waiting(tmp_path: Path) -> None:
    """Its links end with it, although its process goes on: nothing else would ever report its end."""

    def launch(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("planted")

    limits = {"transfer_timeout_us": 600_000_000, "bootstrap_timeout_us": 600_000_000}
    with Pair(tmp_path, prefills=2, transfer_failure="recompute", decode=limits) as pair:
        pair.prefills[0].executor.launch = launch  # type: ignore[method-assign]
        asked = prompts(5, 40)
        answers = [pair.submit(prompt, NEW, prefill=number % 2) for number, prompt in enumerate(asked)]
        while not pair.errors:
            time.sleep(0.01)
        assert isinstance(pair.errors.pop(), ZeroDivisionError)
        pair.wait(*answers, seconds=60.0)
        assert [one.tokens for one in answers] == [alone(prompt, NEW) for prompt in asked]
        assert pair.receivers[0].counts.failed == len(asked) // 2


@pytest.mark.parametrize("failure", ["recompute", "fail"])
def test_a_transfer_that_stalls_ends_by_its_time_limit_and_its_pages_with_the_link(
    failure: str, tmp_path: Path
) -> None:
    limits: dict[str, Any] = {"transfer_timeout_us": 200_000, "transfer_failure": failure}
    with Pair(tmp_path, decode=limits) as pair:
        begun, stuck, own = threading.Event(), threading.Event(), pair.transports[0]._own
        stage = own.stage

        def stall(*order: Any) -> int:
            begun.set()
            assert stuck.wait(60.0)
            return stage(*order)

        own.stage = stall  # type: ignore[method-assign]
        for prompt in prompts(6, 20):
            answer = pair.submit(prompt, NEW)
            pair.wait(answer, seconds=30.0)
            assert (answer.reason, answer.tokens) == (
                ("length", alone(prompt, NEW)) if failure == "recompute" else ("transfer", [])
            )
            if begun.is_set():  # on busy cores the time limit may pass before the prompt is computed
                break
        assert pair.sides[0].busy, "the prefill engine still reads the pages"
        assert pair.prefills[0].engine.transfers.all
        stuck.set()
        pair.settle()
    assert [pages_held(one) for one in pair.runtimes] == [0, 0]


def test_a_prefill_engine_that_is_not_there_costs_no_token(tmp_path: Path) -> None:
    with Pair(tmp_path, transfer_failure="recompute") as pair:
        prompt = prompts(7, 1)[0]
        answer = pair.submit(prompt, NEW, prefill=9)
        pair.wait(answer)
        assert answer.tokens == alone(prompt, NEW)
        pair.settle()


def test_a_room_whose_pages_are_never_taken_ends_by_its_time_limit(tmp_path: Path) -> None:
    """The decode engine has no pages to give, since one request has all of them for long."""
    limits: dict[str, Any] = {"bootstrap_timeout_us": 200_000}
    few: dict[str, Any] = {"pages": 24, "num_reserved_decode_tokens": 0, "transfer_failure": "fail"}
    with Pair(tmp_path, prefill=limits, decode=few) as pair:
        first = pair.submit(list(range(20)), 70)
        second = pair.submit(list(range(30, 80)), 40)
        pair.wait(second, seconds=20.0)
        assert (second.reason, second.tokens) in (("transfer", []), ("length", alone(list(range(30, 80)), 40)))
        pair.wait(first)
        assert first.tokens == alone(list(range(20)), 70)
        pair.settle()
    assert [pages_held(one) for one in pair.runtimes] == [0, 0]


def test_engines_of_different_models_hand_nothing_over(tmp_path: Path) -> None:
    with Pair(tmp_path, transfer_failure="recompute") as pair:
        own = pair.transports[1]._own
        own.layout = pair.transports[1].layout = msgspec.structs.replace(own.layout, model="another")
        prompt = prompts(8, 1)[0]
        answer = pair.submit(prompt, NEW)
        pair.wait(answer)
        assert answer.tokens == alone(prompt, NEW)
        assert pair.receivers[0].counts.done == 0
        pair.settle()


# ---------------------------------------------------------------------------------------------------- kinds of requests


def test_turns_of_a_session_are_computed_with_all_of_it(tmp_path: Path) -> None:
    with Pair(tmp_path) as pair:
        assert pair.decodes[0].host.ask(OpenSession("s", 90)).result(10.0).ok
        said: list[int] = []
        for own in ([3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8, 9, 7, 9]):
            answer = pair.submit(own, NEW, session="s")
            pair.wait(answer)
            said += own
            assert answer.tokens == alone(said, NEW)
            said += answer.tokens
        later = [pair.submit(own, 4, session="s") for own in ([1, 2], [3, 4])]  # the second waits for the first
        pair.wait(*later)
        for own, answer in zip(([1, 2], [3, 4]), later, strict=True):
            said += own
            assert answer.tokens == alone(said, 4)
            said += answer.tokens
        pair.settle()
        assert pair.receivers[0].counts.done == 5


def test_adapters_and_grammars_go_over(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "adapter", 3)
    both: dict[str, Any] = {"lora": {"a": folder}, "grammar_backend": "auto"}
    asked = [
        Params(max_new_tokens=8, ignore_eos=True, adapter="a"),
        Params(max_new_tokens=8, ignore_eos=True),
        Params(max_new_tokens=12, grammar=("regex", "[0-9]{6}")),
        Params(max_new_tokens=12, grammar=("regex", "[a-c]")),
    ]
    given = real_prompts(len(asked))
    with LLM(**{**SMALL, **both}) as plain:
        right = [one.token_ids for one in plain.generate(given, asked)]
    with engines(tmp_path, {}, {}, **{**SMALL, **both}) as (_, second):
        answers = second.generate(given, asked)
        assert [one.token_ids for one in answers] == right
        side = second.handover
        assert isinstance(side, DecodeSide)
        assert (side.counts.done, side.counts.failed) == (4, 0)


def test_ranks_connect_again_while_they_work(expected: list[list[int]], tmp_path: Path) -> None:
    """The other ranks open new staging memory between batches, and the thread of the host does not wait for them."""
    ranks: dict[str, Any] = {"tp": 2}
    with engines(tmp_path, ranks, ranks, **SMALL, transfer_failure="recompute") as (_, second):
        side = second.handover
        assert isinstance(side, DecodeSide)
        over = threading.Event()

        def cut() -> None:
            while not over.wait(0.4):
                for peer in list(side._peers.values()):
                    peer.link.close()

        thread = threading.Thread(target=cut)
        thread.start()
        found = [answer.token_ids for answer in second.generate(real_prompts(), GREEDY)]
        over.set()
        thread.join()
        assert found == expected
        assert side.counts.done + side.counts.failed == len(expected)
