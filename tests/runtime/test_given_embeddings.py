"""Prompts of given embeddings: tokens equal those of the prompt whose embeddings they are."""

from __future__ import annotations

import random
import time
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU runtime is not installed")

from lockstep.core.contract.commands import LaunchBatch  # noqa: E402
from lockstep.core.contract.errors import ConfigError  # noqa: E402
from lockstep.core.contract.events import RequestArrived, RequestRetracted  # noqa: E402
from lockstep.core.journal.replay import fold, replay  # noqa: E402
from lockstep.core.requests.table import prompt_bytes  # noqa: E402
from lockstep.host.media.given import embedded_prompt  # noqa: E402
from lockstep.runtime import LLM, Params  # noqa: E402
from lockstep.runtime.errors import PlanError  # noqa: E402
from lockstep.runtime.outputs import PendingRequest  # noqa: E402
from tests.support.heads import saved_with_mtp  # noqa: E402
from tests.support.mtp import DraftRecorder  # noqa: E402
from tests.support.small_llm import SMALL, requests_with_shared_beginnings  # noqa: E402

KINDS: list[dict[str, Any]] = [{}, {"temperature": 0.8, "seed": 3}, {"n": 2, "logprobs": 2}]
TIGHT: dict[str, Any] = {**SMALL, "device": "cpu", "pages": 60, "dtype": "float32", "retract_every": 5}


def embedded(llm: LLM, ids: list[int]) -> Any:
    return llm.model.embeddings.weight.float()[ids]


@pytest.mark.parametrize("options", [{"overlap_depth": 0, "debug": True}, {"overlap_depth": 2}, {"jump": 1}])
def test_tokens_are_those_of_the_tokens(options: dict[str, Any], tmp_path: Path) -> None:
    if options.pop("jump", 0):
        options = {"speculative_method": "ngram", "num_speculative_tokens": 2}
    asked = requests_with_shared_beginnings(12, KINDS)
    prompts, params = [one for one, _ in asked], [one for _, one in asked]
    retracted = []
    with LLM(**TIGHT, **options, journal=tmp_path) as llm:
        expected = llm.generate(prompts, params)
        llm.host.observe = lambda _, step: retracted.extend(
            one for one in step.decided if isinstance(one, RequestRetracted)
        )
        mixed = [one if number % 3 == 1 else embedded(llm, one) for number, one in enumerate(prompts)]
        given = llm.generate(mixed, params)
        assert [one.token_ids for one in given] == [one.token_ids for one in expected]
        pairs = [(one.others, other.others) for one, other in zip(given, expected, strict=True)]
        assert all([a.token_ids for a in ours] == [b.token_ids for b in theirs] for ours, theirs in pairs)
        assert not any(one.error for one in given)
        assert llm.media is not None
        assert not llm.media.contents  # no request is open
        longest = max(prompts, key=len)
        _, again = (llm.generate(embedded(llm, longest))[0] for _ in range(2))
        assert again.cached_tokens >= len(longest) - 5  # keyed by the content
        assert not llm.generate(embedded(llm, longest) + 1e-3)[0].cached_tokens
    assert retracted
    replay(tmp_path)
    arrived = [event for event, _ in fold(tmp_path) if isinstance(event, RequestArrived) and event.spans]
    assert all(not any(prompt_bytes(one.prompt)) for one in arrived)  # digests only


def test_an_mtp_layer_drafts_from_the_embeddings(tmp_path: Path) -> None:
    ids = [random.Random(4).randrange(3, 300) for _ in range(40)]
    settings = {**TIGHT, "speculative_method": "mtp", "num_speculative_tokens": 2, "chunked_prefill_size": 16}
    with LLM(saved_with_mtp(tmp_path / "model", 5), **settings) as llm:
        recorder = DraftRecorder(llm.host.executor)
        (expected,), (given,) = (llm.generate([one], Params(max_new_tokens=12)) for one in (ids, embedded(llm, ids)))
    assert given.token_ids == expected.token_ids
    of_tokens, of_embeddings = ([draft[1:] for draft in recorder.found if draft[0] == request] for request in (0, 1))
    assert of_tokens == of_embeddings != []


def test_a_request_that_leaves_takes_no_embeddings_from_a_batch_in_flight() -> None:
    with LLM(**TIGHT, overlap_depth=1) as llm:
        rows = embedded(llm, [random.Random(1).randrange(3, 300) for _ in range(60)])
        for _ in range(8):
            pending = [llm.ask(rows + number, Params(max_new_tokens=8)) for number in range(4)]
            for one in pending:
                llm.host.cancel(one.answer.request_id)
            for one in pending:
                llm.wait(one)
        assert llm.generate(rows, Params(max_new_tokens=4))[0].token_ids
        assert llm.media is not None
        assert not llm.media.contents


def test_a_vector_of_embeddings_is_that_of_the_tokens() -> None:
    with LLM(**TIGHT) as llm:
        ids = [5, 9, 300, 17, 4] * 6
        (expected,), (given,) = llm.embed([ids]), llm.embed(embedded(llm, ids).numpy())
        assert np.allclose(expected.vector, given.vector, atol=1e-5)


def test_bad_embeddings_are_refused() -> None:
    with LLM(**TIGHT) as llm:
        size = llm.model.embedding_size
        for rows, why in [
            (np.zeros((3, size + 1), np.float32), f"{size + 1} numbers, but those of this model have {size}"),
            (np.full((3, size), np.nan), "at row 0 a number that is no finite float32"),
            (np.full((3, size), 1e39), "at row 0 a number that is no finite float32"),
            (np.zeros((0, size)), "must be numbers"),
            (np.zeros((2, 3, 4, 5)), "must be numbers"),
            (np.zeros((3, size), dtype="S4"), "must be numbers"),
        ]:
            with pytest.raises(ConfigError, match=why):
                llm.generate([rows])
        (refused,) = llm.generate(np.zeros((3, size)), Params(prompt_logprobs=1))
        assert "`prompt_logprobs` are of tokens" in refused.error
        with pytest.raises(ConfigError, match="labels are judged behind texts"):
            llm.score(np.zeros((3, size)), ["a"])
        assert not llm.generate(np.zeros((3, size)))[0].error


def test_a_plan_without_its_embeddings_is_refused() -> None:
    """The embeddings are in no journal, so its plans cannot be executed again."""
    with LLM(**TIGHT) as llm, LLM(**TIGHT) as other:
        prompt = embedded_prompt(np.ones((4, llm.model.embedding_size)))
        half = embedded_prompt(np.ones((4, llm.model.embedding_size), np.float16))
        assert prompt.contents[0].digest == half.contents[0].digest
        launched: list[Any] = []
        llm.host.observe = lambda _, step: launched.extend(one for one in step.commands if isinstance(one, LaunchBatch))
        assert llm.generate([prompt], Params(max_new_tokens=2))[0].token_ids
        with pytest.raises(PlanError, match="which are not here"):
            other.host.executor.launch(launched[0].plan)


def test_embeddings_stay_until_a_request_with_a_failed_sink_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The request still runs when its sink fails, and may be computed again."""
    held: list[int] = []
    with LLM(**TIGHT) as llm:
        rows, media, cancel = embedded(llm, [5] * 20), llm.media, llm.host.cancel
        assert media is not None

        def fails(self: PendingRequest, *_: Any) -> None:
            raise RuntimeError("a sink")

        def cancelled(request_id: int) -> None:
            held.append(len(media.contents))
            cancel(request_id)

        monkeypatch.setattr(PendingRequest, "tokens", fails)
        monkeypatch.setattr(llm.host, "cancel", cancelled)
        llm.ask(rows, Params(max_new_tokens=8), tokens=SimpleQueue())
        deadline = time.monotonic() + 60
        while (not held or media.contents) and time.monotonic() < deadline:
            time.sleep(0.01)
        monkeypatch.undo()
        assert llm.generate([[1, 2, 3]], Params(max_new_tokens=1))[0].token_ids
    assert held == [1]
    assert not media.contents
