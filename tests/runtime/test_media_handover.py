"""Prompts with pictures between prefill and decode engines: tokens of one plain engine."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from signal import SIGKILL
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the GPU runtime is not installed")
pytest.importorskip("transformers", reason="the models run by transformers' code")
pytest.importorskip("PIL", reason="images are decoded by Pillow")
pytest.importorskip("fastapi", reason="the server is not installed")
httpx2 = pytest.importorskip("httpx2", reason="a client is not installed")

from lockstep.core.contract.commands import EncodeMedia  # noqa: E402
from lockstep.core.contract.events import MediaEncoded, Pause, Resume  # noqa: E402
from lockstep.host.handover import decode as decode_side  # noqa: E402
from lockstep.host.handover.decode import DecodeSide  # noqa: E402
from lockstep.runtime import LLM, Params  # noqa: E402
from tests.support.live_server import LiveServer, metric, serving, until  # noqa: E402
from tests.support.model_engines import engines  # noqa: E402
from tests.support.pictures import conversations, save_family  # noqa: E402

SMALL: dict[str, Any] = {
    "device": "cpu", "grammar_backend": "none", "page_size": 4, "pages": 400, "chunked_prefill_size": 32,
    "max_running_requests": 4, "debug": True, "overlap_depth": 1, "transfer_checksums": True,
    "transfer_failure": "recompute",
}  # fmt: skip
PLAIN = {name: value for name, value in SMALL.items() if not name.startswith("transfer_")}
ASKED = conversations(8, 3)
PARAMS = [Params(max_new_tokens=count, ignore_eos=True) for _, _, count in ASKED]
WITH_PICTURES = [messages for messages, numbers, _ in ASKED if numbers]  # a server joins parts that are text alone
PICTURES = len({number for _, numbers, _ in ASKED for number in numbers})


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """A model with positions of three axes, and its tokens by one plain engine."""
    folder = tmp_path_factory.mktemp("family")
    save_family(folder, "Qwen2.5-VL")
    with LLM(folder, **PLAIN) as llm:
        return folder, [one.token_ids for one in llm.chat([messages for messages, _, _ in ASKED], PARAMS)]


@contextmanager
def pair(
    folder: Path, place: Path, prefill: dict[str, Any], decode: dict[str, Any]
) -> Iterator[tuple[LLM, LLM, list[list[Any]]]]:
    """Prefill and decode engine, and what each has encoded: errors by content."""
    with engines(place, {"model": folder, **prefill}, {"model": folder, **decode}, **SMALL) as (first, second):
        encoded: list[list[Any]] = [[], []]
        for llm, found in zip((first, second), encoded, strict=True):
            watch(llm, found)
        yield first, second, encoded


def watch(llm: LLM, found: list[Any]) -> None:
    llm.host.observe = lambda event, step: found.extend(
        [event] if isinstance(event, MediaEncoded) else [one for one in step.commands if isinstance(one, EncodeMedia)]
    )


def ordered(found: list[Any]) -> int:
    return sum(isinstance(one, EncodeMedia) for one in found)


def answered(llm: LLM) -> list[list[int]]:
    answers = llm.chat([messages for messages, _, _ in ASKED], PARAMS)
    assert not [one.error for one in answers if one.error]
    return [one.token_ids for one in answers]


def counts(llm: LLM) -> tuple[int, int]:
    assert isinstance(llm.handover, DecodeSide)
    return llm.handover.counts.done, llm.handover.counts.failed


@pytest.mark.parametrize("kind", ["plain", "two ranks"])
def test_the_prefill_engine_encodes(kind: str, saved: tuple[Path, list[list[int]]], tmp_path: Path) -> None:
    """Tags of pages are those of contents, since both engines number pictures in another order."""
    folder, expected = saved
    prefill: dict[str, Any] = {"tp": 2} if kind == "two ranks" else {}
    with pair(folder, tmp_path, prefill, {}) as (first, second, encoded):
        first.host.engine.media.placeholders.next += 3  # numbers of contents differ where engines have several others
        assert answered(second) == expected
        assert counts(second) == (len(ASKED), 0)
        assert ordered(encoded[0]) == PICTURES
        assert ordered(encoded[1]) == 0
        assert first.media is not None
        assert second.media is not None
        assert not first.media.contents
        assert not second.media.contents


def test_a_retracted_prompt_is_encoded_by_the_decode_engine(
    saved: tuple[Path, list[list[int]]], tmp_path: Path
) -> None:
    folder, expected = saved
    more = {"retract_every": 3, "num_reserved_decode_tokens": 16, "radix_cache": False}
    with pair(folder, tmp_path, {}, more) as (_, second, encoded):
        assert answered(second) == expected
        assert second.stats().engine.counts.retractions
        assert ordered(encoded[1])
        assert counts(second) == (len(ASKED), 0)


def test_a_picture_that_the_prefill_engine_cannot_encode_is_encoded_by_the_other(
    saved: tuple[Path, list[list[int]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, expected = saved
    with pair(folder, tmp_path, {}, {}) as (first, second, encoded):
        monkeypatch.setattr(first.model.base, "get_image_features", lambda **_: 1 / 0)
        assert answered(second) == expected
        failed = sum(bool(numbers) for _, numbers, _ in ASKED)
        assert counts(second) == (len(ASKED) - failed, failed)
        assert ordered(encoded[1]) == PICTURES


def test_a_picture_that_neither_engine_can_encode_ends_its_request_only(
    saved: tuple[Path, list[list[int]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, expected = saved
    with pair(folder, tmp_path, {}, {}) as (first, second, _):
        for llm in (first, second):
            monkeypatch.setattr(llm.model.base, "get_image_features", lambda **_: 1 / 0)
        answers = second.chat([messages for messages, _, _ in ASKED], PARAMS)
        for one, right, (_, numbers, _) in zip(answers, expected, ASKED, strict=True):
            assert (one.finish_reason, one.token_ids) == (("media", []) if numbers else ("length", right))
        assert second.media is not None
        assert not second.media.contents


def test_contents_that_no_message_can_hold_are_encoded_by_the_decode_engine(
    saved: tuple[Path, list[list[int]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, expected = saved
    monkeypatch.setattr(decode_side, "CONTENTS_BYTES_MAX", 100)
    with pair(folder, tmp_path, {}, {}) as (_, second, encoded):
        assert answered(second) == expected
        assert ordered(encoded[0]) == 0
        assert ordered(encoded[1]) == PICTURES
        assert counts(second)[0] == sum(not numbers for _, numbers, _ in ASKED)


def test_a_prefill_engine_that_is_lost_costs_no_token(saved: tuple[Path, list[list[int]]], tmp_path: Path) -> None:
    """Links end while prompts are computed, and again; each time the decode engine computes what it lacks."""
    folder, expected = saved
    with pair(folder, tmp_path, {}, {}) as (first, second, _):
        asked = [messages for messages, _, _ in ASKED]
        pending = [second.ask(second.chat_prompt(one), params) for one, params in zip(asked, PARAMS, strict=True)]
        assert isinstance(second.handover, DecodeSide)
        for _ in range(3):
            for peer in list(second.handover._peers.values()):
                peer.link.close()
        assert [second.wait(one).token_ids for one in pending] == expected
        first.close()
        assert answered(second) == expected
        assert counts(second)[1]


def test_cancelled_requests_leave_no_content(saved: tuple[Path, list[list[int]]], tmp_path: Path) -> None:
    folder, expected = saved
    with pair(folder, tmp_path, {}, {}) as (first, second, _):
        asked = [messages for messages, _, _ in ASKED]
        pending = [second.ask(second.chat_prompt(one), params) for one, params in zip(asked, PARAMS, strict=True)]
        for one in pending[::2]:
            second.host.cancel(one.answer.request_id)
        for one, right in zip(pending, expected, strict=True):
            answer = second.wait(one)
            assert answer.token_ids == right[: len(answer.token_ids)]
            assert answer.finish_reason == "cancelled" or answer.token_ids == right
        assert answered(second) == expected
        assert first.media is not None
        assert second.media is not None
        assert not first.media.contents
        assert not second.media.contents


def test_after_a_pause_with_retraction_everything_is_computed_again(
    saved: tuple[Path, list[list[int]]], tmp_path: Path
) -> None:
    folder, expected = saved
    with pair(folder, tmp_path, {}, {}) as (_, second, _):
        asked = [messages for messages, _, _ in ASKED]
        pending = [second.ask(second.chat_prompt(one), params) for one, params in zip(asked, PARAMS, strict=True)]
        assert second.host.ask(Pause("retract")).result(60.0).ok
        assert second.host.ask(Resume()).result(60.0).ok
        assert [second.wait(one).token_ids for one in pending] == expected


def test_given_embeddings_go_to_the_prefill_engine(tmp_path: Path) -> None:
    small = {name: value for name, value in SMALL.items() if name != "overlap_depth"}
    ids = [list(range(5 + number, 60 + number)) for number in range(3)]
    with LLM(**{name: value for name, value in small.items() if not name.startswith("transfer_")}) as plain:
        table = plain.model.embeddings.weight.float()
        expected = [one.token_ids for one in plain.generate(ids, Params(max_new_tokens=6, ignore_eos=True))]
    given = [table[one] for one in ids]
    with engines(tmp_path, {}, {}, **small) as (first, second):
        answers = second.generate(given, Params(max_new_tokens=6, ignore_eos=True))
        assert [one.token_ids for one in answers] == expected
        assert counts(second) == (3, 0)
        assert first.stats().engine.counts is not None


def said(server: LiveServer) -> list[str]:
    """The texts of answers to all conversations with pictures, sent at the same time."""

    def ask(messages: list[dict[str, Any]]) -> str:
        body = {"messages": messages, "max_tokens": 60, "temperature": 0, "ignore_eos": True}
        answer = httpx2.post(f"{server.url}/v1/chat/completions", json=body, timeout=240.0)
        assert answer.status_code == 200, answer.text
        text: str = answer.json()["choices"][0]["message"]["content"]
        return text

    with ThreadPoolExecutor(len(WITH_PICTURES)) as pool:
        return list(pool.map(ask, WITH_PICTURES))


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_answers_continue_when_an_engine_of_a_server_is_killed(
    saved: tuple[Path, list[list[int]]], tmp_path: Path
) -> None:
    """The next decode engine gets the contents of open requests again, and encodes what it computes."""
    folder, _ = saved
    with LLM(folder, **PLAIN) as llm:
        given = Params(max_new_tokens=60, ignore_eos=True)
        right = [one.text for one in llm.chat(WITH_PICTURES, given)]
    options = ("--model", str(folder), "--device", "cpu", "--set=page_size=4", "--set=chunked_prefill_size=32")
    roles = ("--prefill-engines", "1", "--decode-engines", "1", "--restarts", "20")
    with serving(tmp_path / "log", *options, *roles) as server:
        assert said(server) == right
        assert metric(server, "lockstep_transfers_total") == len(WITH_PICTURES)
        for number, name in enumerate(("engine 1", "engine 0")):
            killer = threading.Timer(0.1 + 0.2 * number, lambda name=name: os.kill(server.children()[name], SIGKILL))
            killer.start()
            assert said(server) == right
            killer.join()
            until(lambda name=name: name in server.children(), 60)
