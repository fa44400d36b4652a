"""Placeholder ids and the encoder cache."""

from __future__ import annotations

import numpy as np
import pytest

from lockstep.core.contract.commands import EncodeMedia, Step
from lockstep.core.contract.events import PromptSpan
from lockstep.core.features import media
from lockstep.core.features.media import EncoderCache, Placeholders

CAT, DOG, EEL = b"cat", b"dog", b"eel"


def laid(placeholders: Placeholders, *spans: PromptSpan) -> list[int]:
    return np.frombuffer(placeholders.laid(np.arange(6, dtype=np.int32).tobytes(), spans), np.int32).tolist()


def asked(cache: EncoderCache, request_id: int, **tokens: int) -> list[EncodeMedia]:
    cache.ask(request_id, {name.encode(): count for name, count in tokens.items()})
    return served(cache)[1]


def served(cache: EncoderCache) -> tuple[list[int], list[EncodeMedia]]:
    step = Step()
    done = cache.serve(step, 0)
    cache.check_room()
    return done, [command for command in step.commands if isinstance(command, EncodeMedia)]


def test_equal_spans_have_equal_ids_and_no_others() -> None:
    placeholders = Placeholders()
    cat = laid(placeholders, PromptSpan(1, 3, "image", CAT))
    assert cat == [0, -2, -2, 3, 4, 5]
    assert laid(placeholders, PromptSpan(1, 3, "image", CAT, 9)) == cat
    others = [
        PromptSpan(1, 3, "image", DOG),
        PromptSpan(1, 3, "video", CAT),
        PromptSpan(1, 4, "image", CAT),
    ]
    assert [laid(placeholders, span)[1] for span in others] == [-3, -4, -5]


def test_a_content_that_was_forgotten_gets_a_number_never_used_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media, "PLACEHOLDERS_MAX", 2)
    placeholders = Placeholders()
    numbers = [laid(placeholders, PromptSpan(0, 1, "image", digest))[0] for digest in (CAT, DOG, CAT, EEL, CAT, DOG)]
    assert numbers == [-2, -3, -2, -4, -2, -5]


def test_one_encoding_serves_all_requests_for_it() -> None:
    cache = EncoderCache(4)
    assert asked(cache, 1, cat=4) == [EncodeMedia(CAT, 4)]
    assert asked(cache, 2, cat=4) == []
    assert cache.encoded(CAT) == [1, 2]
    cache.ask(3, {CAT: 4})
    assert served(cache) == ([3], [])


def test_all_room_is_taken_at_once_and_in_order() -> None:
    cache = EncoderCache(8)
    asked(cache, 1, cat=5)
    assert asked(cache, 2, dog=2, eel=2) == []
    assert asked(cache, 3, dog=2) == [], "a later request waits behind an earlier one"
    cache.encoded(CAT)
    assert served(cache) == ([], [])
    cache.release(1)
    assert served(cache)[1] == [EncodeMedia(DOG, 2, drop=(CAT,)), EncodeMedia(EEL, 2)]


def test_content_in_the_encoder_keeps_its_room_until_the_answer() -> None:
    cache = EncoderCache(4)
    asked(cache, 1, cat=4)
    cache.release(1)
    assert asked(cache, 2, dog=1) == []
    assert cache.encoded(CAT) == []
    assert served(cache)[1] == [EncodeMedia(DOG, 1, drop=(CAT,))]


def test_output_that_a_batch_in_flight_may_read_keeps_its_room_until_it_is_collected() -> None:
    cache = EncoderCache(4)
    asked(cache, 1, cat=4)
    cache.encoded(CAT)
    cache.release(1, free_after=7)
    assert asked(cache, 2, dog=1) == []
    cache.release_deferred(6)
    assert served(cache)[1] == []
    cache.release_deferred(7)
    assert served(cache)[1] == [EncodeMedia(DOG, 1, drop=(CAT,))]


def test_least_recently_used_goes_first() -> None:
    cache = EncoderCache(3)
    for number, name in enumerate(["cat", "dog", "eel", "cat"]):
        asked(cache, number, **{name: 1})
        if not cache.encodings[name.encode()].ready:
            cache.encoded(name.encode())
        cache.release(number)
    assert asked(cache, 9, fox=2) == [EncodeMedia(b"fox", 2, drop=(DOG, EEL))]


def test_an_encoding_of_another_size_is_another_encoding() -> None:
    cache = EncoderCache(10)
    asked(cache, 1, cat=4)
    assert asked(cache, 2, cat=6) == [], "the answer that is due would be taken for it"
    cache.encoded(CAT)
    assert served(cache)[1] == [], "another request needs the other one"
    cache.release(1)
    assert served(cache)[1] == [EncodeMedia(CAT, 6, drop=(CAT,))]


def test_a_failure_leaves_nothing_behind() -> None:
    cache = EncoderCache(8)
    asked(cache, 1, cat=4, dog=4)
    assert asked(cache, 2, cat=4) == []
    assert cache.failed(CAT) == [1, 2]
    assert not cache.pins
    assert cache.encoded(DOG) == []
    cache.check_room()


def test_with_a_budget_the_encoder_is_asked_for_the_next_when_it_has_time() -> None:
    cache = EncoderCache(None, 8)
    assert asked(cache, 1, cat=4, dog=4, eel=4) == [EncodeMedia(CAT, 4), EncodeMedia(DOG, 4)]
    assert cache.is_encoding(DOG)
    assert not cache.is_encoding(EEL), "nothing asked for it: an answer would be a mistake"
    cache.encoded(DOG)
    assert served(cache)[1] == [EncodeMedia(EEL, 4)]


def test_what_is_larger_than_the_budget_is_encoded_alone() -> None:
    cache = EncoderCache(None, 4)
    assert asked(cache, 1, cat=4, dog=9, eel=1) == [EncodeMedia(CAT, 4)]
    cache.encoded(CAT)
    assert served(cache)[1] == [EncodeMedia(DOG, 9)]
    cache.encoded(DOG)
    assert served(cache)[1] == [EncodeMedia(EEL, 1)]


def test_what_no_request_waits_for_any_more_is_never_encoded() -> None:
    cache = EncoderCache(8, 4)
    asked(cache, 1, cat=4)
    asked(cache, 2, dog=4)
    assert asked(cache, 3, eel=4) == []
    cache.release(2)
    assert served(cache)[1] == [], "the encoder is at cat"
    cache.encoded(CAT)
    assert served(cache)[1] == [EncodeMedia(EEL, 4)]


def test_what_made_room_is_named_with_the_next_order_even_if_it_was_for_another() -> None:
    cache = EncoderCache(8, 4)
    for number, name in enumerate(["cat", "dog"]):
        asked(cache, number, **{name: 4})
        cache.encoded(name.encode())
        cache.release(number)
    asked(cache, 5, fox=4)
    assert asked(cache, 6, eel=4) == [], "dog makes room, and is not named yet"
    cache.release(6)
    cache.encoded(b"fox")
    assert served(cache)[1] == []
    assert asked(cache, 7, gnu=2) == [EncodeMedia(b"gnu", 2, drop=(DOG,))]
