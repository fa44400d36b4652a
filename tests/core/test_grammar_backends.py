"""Grammar libraries behind one interface, matchers by row, and trials of grammars in a process of their own."""

from __future__ import annotations

import json
import queue
import random
import re
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tokenizers", reason="no tokenizer is installed")
pytest.importorskip("llguidance", reason="no grammar backend is installed")

import llguidance
from tokenizers import Tokenizer

from lockstep.core.contract.commands import CompileGrammar, RowTaken
from lockstep.core.contract.events import Grammar
from lockstep.host import grammars, llguidance_backend
from lockstep.host.grammar_backends import make_backend
from lockstep.host.grammar_compiler import CompileLimits, GrammarCompiler, GrammarCompilers, make_compilers
from lockstep.host.grammars import CompiledGrammars, GrammarError, GrammarMatchers, make_grammar

ROOT = Path(__file__).resolve().parents[2]
TOKENIZER = ROOT / "packages/gpu-runtime/src/lockstep/runtime/demo_model/files/tokenizer.json"
VOCABULARY = 2048
END, OTHER_END = 2, 0  # <|im_end|>, <|endoftext|>
BACKENDS = [
    pytest.param(name, marks=pytest.mark.skipif(find_spec(name) is None, reason=f"{name} is not installed"))
    for name in ("llguidance", "xgrammar")
]


@pytest.fixture(scope="module")
def words() -> Any:
    return Tokenizer.from_file(str(TOKENIZER))


@pytest.fixture(scope="module", params=BACKENDS)
def compiled(request: pytest.FixtureRequest) -> CompiledGrammars:
    return CompiledGrammars(lambda: make_backend(request.param, TOKENIZER, VOCABULARY, (END, OTHER_END)))


def taken(row: int, request_id: int, grammar: Grammar | None, epoch: int = 1) -> RowTaken:
    return RowTaken(row, request_id, epoch, grammar=grammar)


def allowed(matchers: GrammarMatchers, row: int) -> set[int]:
    mask = matchers.allowed(np.array([row], np.int32))
    assert mask is not None
    assert mask.shape == (1, VOCABULARY // 32)
    return set(np.flatnonzero(np.unpackbits(mask[0].view(np.uint8), bitorder="little")).tolist())


def test_a_matcher_follows_its_answer_to_the_end(compiled: CompiledGrammars, words: Any) -> None:
    matchers = GrammarMatchers(compiled, VOCABULARY, (END, OTHER_END))
    grammar = make_grammar(
        "json_schema",
        '{"type":"object","properties":{"a":{"enum":[10,"b"]}},"required":["a"],"additionalProperties":false}',
    )
    matchers.take_row(taken(3, 7, grammar))
    answer = words.encode('{"a": "b"}').ids
    for i, token in enumerate(answer):
        may = allowed(matchers, 3)
        assert token in may
        assert not may & {END, OTHER_END}
        assert matchers.ended(3, token) == (i == len(answer) - 1)
        assert allowed(matchers, 3) == may  # computing the mask did not move the matcher
        matchers.advance(7, 1, [token])
    assert len(allowed(matchers, 3)) == VOCABULARY  # not moved again, as if min_new_tokens held back the end
    matchers.advance(7, 1, answer)
    assert matchers.ended(3, answer[0])


def test_any_end_token_ends_where_the_grammar_may(compiled: CompiledGrammars, words: Any) -> None:
    matchers = GrammarMatchers(compiled, VOCABULARY, (END, OTHER_END))
    matchers.take_row(taken(0, 1, make_grammar("regex", "a+")))
    (a,) = words.encode("a").ids
    assert not allowed(matchers, 0) & {END, OTHER_END}
    matchers.advance(1, 1, [a])
    assert {a, END, OTHER_END} <= allowed(matchers, 0)
    assert matchers.ended(0, OTHER_END)
    assert not matchers.ended(0, a)
    matchers.advance(1, 1, [OTHER_END])  # ignore_eos: the end token is drawn, and the grammar is not used any more
    assert matchers.ended(0, a)


def test_what_is_forced_is_all_that_masks_admit(compiled: CompiledGrammars, words: Any) -> None:
    """Token by token: a token is forced if and only if its mask has no other; none of them ends the grammar."""
    fields = {"verdict": {"enum": ["approved", "rejected"]}, "reviewer_name": {"enum": ["Alice Liddell"]}}
    schema = {"type": "object", "properties": fields, "required": [*fields], "additionalProperties": False}
    matchers = GrammarMatchers(compiled, VOCABULARY, (END, OTHER_END))
    found = 0
    for number, (kind, source) in enumerate(
        [
            ("json_schema", json.dumps(schema)),
            ("regex", "(yes|no), because of [a-c] the end"),
            ("regex", "word for word"),
        ]
    ):
        matchers.take_row(taken(0, number, make_grammar(kind, source)))  # type: ignore[arg-type]
        answer: list[int] = []
        forced: list[int] = []  # forced tokens that follow
        while True:
            may = allowed(matchers, 0)
            assert not forced or may == {forced[0]}
            token = max(may, key=lambda one: (one not in (END, OTHER_END), -one))
            answer.append(token)
            if matchers.ended(0, token):
                assert not matchers.forced(0, token)
                assert not forced[1:]
                break
            told = matchers.forced(0, token)
            assert told == forced[1:] or not forced[1:]
            assert len(allowed(matchers, 0)) == len(may)  # computing the mask did not move the matcher
            forced = told
            found += bool(told)
            matchers.advance(number, 1, [token])
            if not told:
                following = allowed(matchers, 0)
                assert len(following) > 1 or matchers.ended(0, next(iter(following)))
            assert len(answer) < 60
    assert found > 5


def test_rows_change_hands_and_older_epochs_reach_no_row(compiled: CompiledGrammars, words: Any) -> None:
    matchers = GrammarMatchers(compiled, VOCABULARY, (END,))
    ab, cd = make_grammar("regex", "a[bQ]"), make_grammar("regex", "c[dQ]")
    a, b, c, q = (words.token_to_id(one) for one in "abcQ")
    matchers.take_row(taken(0, 1, ab))
    matchers.take_row(taken(1, 2, cd))
    matchers.advance(1, 1, [a])
    assert allowed(matchers, 0) == {b, q}
    matchers.take_row(taken(1, 1, ab, epoch=2))  # retracted, and admitted into another row, at its start
    matchers.take_row(taken(0, 2, cd, epoch=2))
    matchers.advance(1, 1, [a])
    matchers.advance(2, 1, [c])
    assert a in allowed(matchers, 1)
    assert c in allowed(matchers, 0)
    matchers.advance(1, 2, [a])
    assert allowed(matchers, 1) == {b, q}
    matchers.take_row(taken(1, 3, None))
    assert len(allowed(matchers, 1)) == VOCABULARY
    assert not matchers.ended(1, a)
    mask = matchers.allowed(np.array([1, 0], np.int32))
    assert mask is not None
    assert (mask[0] == -1).all()
    assert not (mask[1] == -1).any()


def test_a_token_that_it_does_not_admit_ends_one_row_only(compiled: CompiledGrammars, words: Any) -> None:
    matchers = GrammarMatchers(compiled, VOCABULARY, (END,))
    for row in range(2):
        matchers.take_row(taken(row, row + 1, make_grammar("regex", "ab")))
    matchers.advance(1, 1, [words.token_to_id("b")])
    assert allowed(matchers, 0) == set()
    assert len(allowed(matchers, 1)) in range(1, 5)


def test_a_matcher_that_went_back_goes_on_from_there_on_another_lexer(words: Any) -> None:
    backend = make_backend("llguidance", TOKENIZER, VOCABULARY, (END,))
    matcher: Any = backend.compile(make_grammar("regex", "xaaab")).matcher()
    x, a, b = (words.encode(text).ids[0] for text in "xab")
    assert all(matcher.accept(token) for token in (x, a, a, a))
    matcher.rollback(0)
    matcher.rollback(1)
    assert matcher._on_another_lexer(lambda: True)
    assert not matcher.accept(b)
    assert all(matcher.accept(token) for token in (a, b))
    assert matcher.is_done()


ONE, TWO = "<f=one>1</f>", "<f=two>true</f>"


@pytest.mark.parametrize(
    ("options", "ends", "goes_on", "refused"),
    [
        ({}, ("", "a\nb", ONE, f"a {ONE} b", f"{ONE} {TWO}."), (), (ONE + " <f=one>3",)),
        ({"at_least_one": True}, (ONE, f"a {ONE} b", f"{ONE} {TWO}."), ("", "a"), ()),
        ({"stop_after_first": True}, ("", "a", ONE, f"a {TWO}"), (), (f"{ONE} b",)),
        ({"at_least_one": True, "stop_after_first": True}, (ONE, f"a {TWO}"), ("", "a"), (f"{ONE} b",)),
    ],
)
def test_parts_behind_triggers_follow_their_schemas(
    options: dict[str, bool], ends: tuple[str, ...], goes_on: tuple[str, ...], refused: tuple[str, ...], words: Any
) -> None:
    """Texts behind which an answer may end, or may not, and texts that are not admitted."""
    parts = [
        {"begin": "<f=one>", "schema": {"enum": [1, 2]}, "end": "</f>"},
        {"begin": "<f=two>", "schema": {"type": "boolean"}, "end": "</f>"},
        {"begin": "[<|im_start|>", "schema": {"enum": [7]}, "end": ""},
    ]
    tag = {"structures": parts, "triggers": ["<f=", "["], **options}
    grammar = make_grammar("structural_tag", json.dumps(tag))
    library = CompiledGrammars(lambda: make_backend("llguidance", TOKENIZER, VOCABULARY, (END, OTHER_END)))

    def end_of(text: str) -> bool | None:
        matcher = library.get(grammar).matcher()
        for token in words.encode(text).ids:
            if matcher.is_done() or not matcher.accept(token):
                return None
        return matcher.is_done() or matcher.accept(END)

    ends += ("[<|im_start|>7",)
    goes_on += ("<f=", "a <f=one>1", "[", "[<|im_start|>")
    refused += ("<f=one>3", "<f=two>1", "<f=three>", "[a", "[<|im_start|>8")
    assert {text: end_of(text) for text in (*ends, *goes_on, *refused)} == {
        **dict.fromkeys(ends, True),
        **dict.fromkeys(goes_on, False),
        **dict.fromkeys(refused, None),
    }


def test_a_trigger_may_be_a_special_token(words: Any) -> None:
    part = {"begin": "<|im_start|>n", "schema": {"enum": [1]}, "end": ""}
    tag = {"structures": [part], "triggers": ["<|im_start|>"], "stop_after_first": True, "at_least_one": True}
    backend = make_backend("llguidance", TOKENIZER, VOCABULARY, (END, OTHER_END))
    matcher = backend.compile(make_grammar("structural_tag", json.dumps(tag))).matcher()
    assert [matcher.accept(token) for token in words.encode("<|im_start|>").ids] == [True]
    assert not matcher.accept(words.encode("a").ids[0])
    assert all(matcher.accept(token) for token in words.encode("n1").ids)
    assert matcher.is_done()


def test_a_part_belongs_to_the_longest_trigger_that_it_begins_with() -> None:
    assert llguidance_backend._trigger_of("<f=one>", ["<", "<f=", "<f=", "x"]) == 1
    assert llguidance_backend._trigger_of("<g>", ["x", "<", "<f="]) == 1
    backend = make_backend("llguidance", TOKENIZER, VOCABULARY, (END,))
    tag = {"structures": [{"begin": "a", "end": ""}], "triggers": ["b"]}
    with pytest.raises(GrammarError, match="'a' begins with no trigger"):
        backend.compile(make_grammar("structural_tag", json.dumps(tag)))


def test_a_lexer_at_its_limit_fails_for_no_matcher_but_those_that_need_more(
    words: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Matchers of one grammar share the states of a lexer. Ten answers that each fit need three times the limit."""
    limits = llguidance.LLParserLimits(max_lexer_states=300, verbose_errors=False)
    monkeypatch.setattr(llguidance_backend, "LIMITS", limits)
    compiled = CompiledGrammars(lambda: make_backend("llguidance", TOKENIZER, VOCABULARY, (END, OTHER_END)))
    matchers = GrammarMatchers(compiled, VOCABULARY, (END, OTHER_END))
    grammar = make_grammar("regex", "(a|b)*a(a|b){400}|x[a-z]{100}")
    a, b, x = (words.encode(text).ids[0] for text in "abx")
    draw = random.Random(1)
    matchers.take_row(taken(9, 99, grammar))
    matchers.advance(99, 1, [x, a])
    for number in range(10):
        matchers.take_row(taken(3, number, grammar))
        for _ in range(80):
            assert {a, b} <= allowed(matchers, 3)
            matchers.advance(number, 1, [draw.choice((a, b))])
        assert {a, b} <= allowed(matchers, 9)
        matchers.advance(99, 1, [a])


def test_a_request_that_exceeds_a_limit_fails_alone(words: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = llguidance.LLParserLimits(max_lexer_states=300, step_lexer_fuel=2000, verbose_errors=False)
    monkeypatch.setattr(llguidance_backend, "LIMITS", limits)
    compiled = CompiledGrammars(lambda: make_backend("llguidance", TOKENIZER, VOCABULARY, (END, OTHER_END)))
    matchers = GrammarMatchers(compiled, VOCABULARY, (END, OTHER_END))
    grammar = make_grammar("regex", "b((a{1,90}){1,90}){1,90}|x[a-z]{100}")
    a, b, x = (words.encode(text).ids[0] for text in "abx")
    matchers.take_row(taken(9, 99, grammar))
    matchers.advance(99, 1, [x, a])
    for number in range(3):
        matchers.take_row(taken(3, number, grammar))
        matchers.advance(number, 1, [b])
        for _ in range(200):
            may = allowed(matchers, 3)
            if not may:
                break
            assert a in may
            matchers.advance(number, 1, [a])
        assert not may
        assert {a, b} <= allowed(matchers, 9)
    matchers.take_row(taken(3, 50, grammar))
    assert {b, x} <= allowed(matchers, 3)


def test_what_is_kept_is_bounded(compiled: CompiledGrammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "COMPILED_MAX", 4)
    monkeypatch.setattr(grammars, "SOURCE_BYTES_MAX", 40)
    for number in range(8):
        compiled.get(make_grammar("regex", f"a{number}"))
    assert len(compiled) == 4
    compiled.get(make_grammar("regex", "b" * 60))
    assert len(compiled) == 1
    with pytest.raises(GrammarError):
        compiled.get(make_grammar("regex", "("))
    assert len(compiled) == 1


# ------------------------------------------------------------------------------------------------- tried in a process


@pytest.fixture(scope="module")
def hands() -> Iterator[GrammarCompilers]:
    limits = CompileLimits(cpu_s=0.5, memory_bytes=64 * 2**20, source_bytes=2**20, workers=1)
    made = make_compilers("llguidance", TOKENIZER, VOCABULARY, (END,), limits)
    yield made
    made.compiler.close()


def verdict(hands: GrammarCompilers, kind: Any, source: str) -> str:
    answers: queue.Queue[str] = queue.Queue()
    hands.compiler(CompileGrammar(make_grammar(kind, source)), answers.put)
    return answers.get(timeout=300)  # it may take half a second of CPU time, and a new process takes some more


def branching(width: int, depth: int) -> str:
    """A schema that is short, and has width ** depth alternatives once it is multiplied out."""
    either = [{"anyOf": [{"required": [f"a{i}{j}"]} for j in range(width)]} for i in range(depth)]
    return json.dumps({"type": "object", "allOf": either})


TOO_MUCH = "(takes more than 0.5 s of CPU time|takes more than 64 MiB of memory|memory allocation)"
REFUSED: dict[str, tuple[Any, str, str]] = {
    "branching": ("json_schema", branching(10, 7), TOO_MUCH),
    "long pattern": ("json_schema", json.dumps({"type": "string", "pattern": "(a|b)" * 80_000 + "{1,500}"}), TOO_MUCH),
    "nested parentheses": ("regex", "(" * 30_000 + "a" + ")" * 30_000, f"{TOO_MUCH}|invalid regex"),
    "nested groups": ("ebnf", "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000, "recursion"),
    "nested schema": ("json_schema", '{"items":' * 5_000 + "{}" + "}" * 5_000, "recursion"),
    "too long": ("regex", "a" * (2**20 + 1), "1048577 bytes, at most 1048576"),
    "no grammar": ("regex", "(", "invalid regex"),
    "no rule": ("ebnf", "root ::= nothing", "nothing"),
    "no JSON": ("json_schema", "{", "."),
    "unknown keyword": ("json_schema", '{"type":"array","items":{},"uniqueItems":true}', "uniqueItems"),
    "never": ("json_schema", '{"type":"integer","minimum":3,"maximum":2}', "[Uu]nsatisfiable"),
    "elsewhere": ("json_schema", '{"$ref":"http://127.0.0.1/schema"}', "."),
}


@pytest.mark.skipif(sys.platform != "linux", reason="limits of Linux")
def test_an_exploding_grammar_is_refused_within_the_limits_and_the_next_is_compiled(hands: GrammarCompilers) -> None:
    for about, (kind, source, why) in REFUSED.items():
        error = verdict(hands, kind, source)
        assert re.search(why, error), f"{about}: {error}"
        assert "\n" not in error, about
        assert len(error) < 600, about
    assert verdict(hands, "regex", "[ab]c") == ""
    grammar = make_grammar("regex", "[ab]c")
    hands.matchers.take_row(taken(0, 1, grammar))
    assert 0 < len(allowed(hands.matchers, 0)) < VOCABULARY


def test_a_grammar_whose_process_is_ended_meanwhile_has_an_error(hands: GrammarCompilers) -> None:
    """As when an engine ends whose compiler has just taken a grammar."""
    trial = hands.compiler._begin()
    trial.kill()
    assert "its process ended" in trial.compile(make_grammar("regex", "a"))


class FirstTokens:
    """A matcher that admits tokens 3, 7 and 60 at the start, and records what it reads."""

    def __init__(self) -> None:
        self.read: list[int] = []
        self.rolled_back = 0

    def fill(self, mask: Any) -> None:
        mask[:] = np.packbits([token in (3, 7, 60) for token in range(64)], bitorder="little").view(np.int32)

    def accept(self, token: int) -> bool:
        self.read.append(token)
        return token != 7

    def is_done(self) -> bool:
        return False

    def rollback(self, count: int) -> None:
        self.rolled_back += count


def test_first_tokens_are_read_where_a_grammar_is_compiled() -> None:
    """The first one takes 70 ms under a large schema, and must not take them in the engine's thread."""
    matcher = FirstTokens()
    found: Any = SimpleNamespace(matcher=lambda: matcher)
    compiler: Any = SimpleNamespace(
        _settings=SimpleNamespace(vocabulary=64), compiled=SimpleNamespace(get=lambda _: found)
    )
    GrammarCompiler._make_first(compiler, make_grammar("regex", "a"))
    assert (matcher.read, matcher.rolled_back) == ([3, 7, 60], 2)
