"""A real model behind the server: answers over HTTP equal answers in this process."""

from __future__ import annotations

import base64
import io
import json
import os
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("fastapi", reason="the server is not installed")
pytest.importorskip("torch", reason="the GPU runtime is not installed")
openai = pytest.importorskip("openai", reason="the OpenAI client is not installed")

from lockstep.api.engines import build_engine  # noqa: E402
from lockstep.api.settings import ServeSettings  # noqa: E402
from lockstep.core.contract.events import RequestArrived, TokenIds  # noqa: E402
from lockstep.core.journal.reader import read_journal  # noqa: E402
from lockstep.core.journal.replay import replay  # noqa: E402
from lockstep.runtime import LLM, Params  # noqa: E402
from lockstep.runtime.demo_model import demo_model_folder  # noqa: E402
from tests.support.live_server import LiveServer, ask_operator, serving  # noqa: E402

ONLY = """
class Only:
    def __init__(self, vocab, device):
        pass

    def check(self, arguments):
        if set(arguments) != {"token"}:
            raise ValueError("it needs a token")

    def __call__(self, logits, rows, positions, arguments):
        for i, one in enumerate(arguments):
            logits[i, one["token"]] = 1e9
        return logits
"""
HELLO = [{"role": "user", "content": "What does len do?"}]
KEY = "sk-a-key-of-an-operator"
OTHER_KEY = "sk-a-key-of-somebody-else"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("demo")
    (folder / "keys.toml").write_text(
        f"[[keys]]\ntenant = 'tests'\nkey = '{KEY}'\nadmin = true\n[[keys]]\ntenant = 'others'\nkey = '{OTHER_KEY}'\n"
    )
    (folder / "only.py").write_text(ONLY)
    about = folder / "only-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: only\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[lockstep.logit_processors]\nonly = only:Only\n")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        yield from started(folder)


def started(folder: Path) -> Iterator[LiveServer]:
    with serving(
        folder / "log",
        *("--logit-processor", "only"),
        *("--journal", str(folder / "run"), "--api-keys", str(folder / "keys.toml")),
        *("--admin-socket", str(folder / "admin"), "--metrics-compat", "vllm", "--metrics-compat", "sglang"),
        *("--profile-dir", str(folder / "traces"), "--batch-timeout-s", "200"),
    ) as made:
        yield made


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=300) as made:
        yield made


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM() as made:
        yield made


def test_answers_are_those_of_the_model(client: Any, llm: LLM) -> None:
    (expected,) = llm.chat(HELLO, Params(max_new_tokens=24))
    asked = {"model": "demo", "messages": HELLO, "max_completion_tokens": 24, "temperature": 0}
    said = client.chat.completions.create(**asked).choices[0]
    assert said.message.content == expected.text
    chunks = client.chat.completions.create(**asked, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected.text
    drawn = Params(max_new_tokens=16, temperature=0.9, top_p=0.9, seed=11)
    (text,) = (one.text for one in llm.generate(["Return the"], drawn))
    params = {"max_tokens": 16, "temperature": 0.9, "top_p": 0.9, "seed": 11}
    assert client.completions.create(model="demo", prompt="Return the", **params).choices[0].text == text


def sent(server: LiveServer, path: str, **body: Any) -> tuple[int, Any]:
    """Return status and JSON of an answer."""
    import httpx2

    headers = {"Authorization": f"Bearer {KEY}"}
    answer = httpx2.post(f"{server.url}{path}", json=body, headers=headers, timeout=60)
    return answer.status_code, answer.json()


def as_base64(write: Any) -> str:
    file = io.BytesIO()
    write(file)
    return base64.b64encode(file.getvalue()).decode()


def test_given_embeddings_answer_like_their_tokens(server: LiveServer, llm: LLM) -> None:
    import torch
    from safetensors.torch import save

    table = llm.model.embeddings.weight.float()
    ids, more = llm.text.encode("Returns the number of"), [5, 300, 17] * 25
    rows, wide = table[ids], table[more]  # the second body is read by a text process
    params = {"sampling_params": {"max_new_tokens": 6, "temperature": 0}}

    def said(**prompt: Any) -> Any:
        status, answer = sent(server, "/generate", **prompt, **params)
        assert status == 200, answer
        return [one["output_ids"] for one in answer] if isinstance(answer, list) else answer["output_ids"]

    expected = said(input_ids=[ids, more])
    assert said(input_embeds=rows.tolist()) == expected[0]
    assert said(input_embeds=[rows.tolist(), wide.tolist()]) == expected
    files = [
        as_base64(lambda file: np.save(file, rows.numpy())),
        as_base64(lambda file: np.save(file, np.asfortranarray(wide.double().numpy()))),
        base64.b64encode(save({"x": rows.contiguous()})).decode(),
    ]
    assert said(input_embeds=files) == [*expected, expected[0]]
    half = base64.b64encode(save({"x": wide.to(torch.bfloat16).contiguous()})).decode()
    params_of_vllm = {"max_tokens": 6, "temperature": 0, "return_token_ids": True}
    status, answer = sent(server, "/v1/completions", prompt_embeds=[files[0], half], **params_of_vllm)
    assert status == 200, answer
    first, second = answer["choices"]
    assert first["token_ids"] == expected[0]
    assert first["prompt_token_ids"] is None
    assert len(second["token_ids"]) == 6
    assert answer["usage"]["prompt_tokens"] == len(ids) + len(more)
    (vector,) = (sent(server, "/encode", **one)[1]["embedding"] for one in ({"input_embeds": rows.tolist()},))
    assert np.allclose(vector, sent(server, "/encode", input_ids=ids)[1]["embedding"], atol=1e-4)


ROW = [0.5] * 4


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({"input_embeds": [ROW, ROW]}, "`input_embeds` has rows of 4 numbers, but embeddings of this model have"),
        ({"input_embeds": [ROW, ROW[:3]]}, "at row 1 3 numbers, but 4 at row 0"),
        ({"input_embeds": [[ROW], [ROW, "a"]]}, "in prompt 1 at row 1 no list of numbers"),
        ({"input_embeds": [[1e39, 0.0]]}, "at row 0 a number that is no finite float32"),
        ({"input_embeds": [[True, False]]}, "at row 0 no list of numbers"),
        ({"input_embeds": []}, "should be a list of rows"),
        ({"input_embeds": [[]]}, "at row 0 no list of numbers"),
        ({"input_embeds": "gAJjdG9yY2guX3V0aWxz"}, "files of torch.save are not read"),
        ({"input_embeds": "%"}, "no valid base64"),
        ({"input_embeds": as_base64(lambda file: np.save(file, np.array([{}], object)))}, "give floats"),
        ({"input_embeds": [ROW], "text": "a"}, "give one of `text`, `input_ids` and `input_embeds`"),
        ({"input_embeds": [ROW], "return_logprob": True, "logprob_start_len": 0}, "rows of 4 numbers"),
        ({"input_embeds": [[0.5] * 4] * 20_000}, "rows of 4 numbers"),
        ({"input_embeds": [[0.5] * 4] * 19_999 + [[0.5]]}, "at row 19999 1 numbers"),
        ({"input_embeds": [0.5] * 20_000}, "at row 0 no list of numbers"),
    ],
)
def test_bad_embeddings_are_one_clear_error(server: LiveServer, body: dict[str, Any], why: str) -> None:
    status, answer = sent(server, "/generate", **body)
    assert status == 400, answer
    assert why in answer["error"]["message"], answer
    assert answer["error"]["param"] in ("input_embeds", "text")


def test_logprobs_of_listed_tokens(server: LiveServer) -> None:
    import httpx2

    ids = [300, 5, 17]
    asked: dict[str, Any] = {"text": "Return the", "return_logprob": True, "top_logprobs_num": 20}
    asked["sampling_params"] = {"max_new_tokens": 4, "temperature": 0}

    def said(**more: Any) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {KEY}"}
        answer = httpx2.post(f"{server.url}/generate", json=asked | more, headers=headers, timeout=60)
        assert answer.status_code == 200, answer.text
        meta: dict[str, Any] = answer.json()["meta_info"]
        return meta

    plain, found = said(), said(token_ids_logprob=ids)
    assert found["output_top_logprobs"] == plain["output_top_logprobs"]
    assert [[one[1] for one in place] for place in found["output_token_ids_logprobs"]] == [ids] * 4
    likeliest = [place[0][1] for place in plain["output_top_logprobs"]]
    again = said(token_ids_logprob=likeliest, top_logprobs_num=0)
    for number, place in enumerate(again["output_token_ids_logprobs"]):
        assert place[number][0] == pytest.approx(plain["output_top_logprobs"][number][0][0], abs=1e-5)
    assert "output_top_logprobs" not in again
    for wrong in ({"return_logprob": False}, {"logprob_start_len": 0}, {"token_ids_logprob": [10**6]}):
        more = {"token_ids_logprob": ids, "top_logprobs_num": 0} | wrong
        headers = {"Authorization": f"Bearer {KEY}"}
        refused = httpx2.post(f"{server.url}/generate", json=asked | more, headers=headers, timeout=60)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "token_ids_logprob")


def test_bad_words_are_left_out_of_an_answer(client: Any, llm: LLM) -> None:
    """The greedy answer without the tokens of words that it would contain; streams are equal."""
    asked = {"model": "demo", "prompt": "Return the", "temperature": 0, "max_tokens": 24}
    plain = client.completions.create(**asked, extra_body={"return_token_ids": True}).choices[0]

    def contains(ids: list[int], text: str) -> bool:
        body = {"prompt": text, "add_special_tokens": False}
        part = client.post("../tokenize", body=body, cast_to=dict)["tokens"]
        return any(ids[at : at + len(part)] == part for at in range(len(ids)))

    spelled = [word for word in dict.fromkeys(plain.text.split()) if contains(plain.token_ids, f" {word}")]
    words = sorted(spelled, key=len)[-3:]
    assert words
    for chosen in (*([word] for word in words), words):
        body = {"bad_words": chosen, "return_token_ids": True}
        said = client.completions.create(**asked, extra_body=body).choices[0]
        assert said.text != plain.text
        for word in chosen:
            assert not contains(said.token_ids, f" {word}")
            assert not contains(said.token_ids, word)
        pieces = client.completions.create(**asked, extra_body=body, stream=True)
        assert "".join(piece.choices[0].text for piece in pieces) == said.text
    kept = client.completions.create(**asked, extra_body={"bad_words": ["zzzzqqq"]}).choices[0].text
    assert kept == plain.text
    chat = {"model": "demo", "messages": HELLO, "temperature": 0, "max_completion_tokens": 24}
    before = client.chat.completions.create(**chat).choices[0].message.content
    word = max(before.split(), key=len)
    after = client.chat.completions.create(**chat, extra_body={"bad_words": [word]}).choices[0].message.content
    assert after != before
    eos = client.completions.create(**asked, extra_body={"bad_words": words, "ignore_eos": True}).usage
    assert eos.completion_tokens == 24
    for wrong, field in (({"bad_words": [""]}, "bad_words"), ({"bad_words": ["a"], "regex": "a+"}, "bad_words")):
        with pytest.raises(openai.BadRequestError) as refused:
            client.completions.create(**asked, extra_body=wrong)
        assert refused.value.param == field


def beams_by_hand(llm: LLM, prompt: list[int], width: int, steps: int, ends: set[int]) -> list[tuple[list[int], float]]:
    """Beam search by whole continuations: the tokens and the summed logprob of each beam, best first."""
    beams, over = [([], 0.0)], []
    for _ in range(steps):
        coming = []
        answers = llm.generate(
            [[*prompt, *tokens] for tokens, _ in beams],
            Params(max_new_tokens=1, logprobs=2 * width, ignore_eos=True, temperature=0),
        )
        for (tokens, total), answer in zip(beams, answers, strict=True):
            for token, value in list(answer.top_logprobs[0].items())[: 2 * width]:
                (over if token in ends else coming).append(([*tokens, token], total + value))
        beams = sorted(coming, key=lambda one: -one[1] / (len(prompt) + len(one[0])))[:width]

    def score(one: tuple[list[int], float]) -> float:
        return one[1] / (len(prompt) + len(one[0]) - (one[0][-1] in ends))

    return sorted([*over, *beams], key=score, reverse=True)[:width]


def test_beam_search(client: Any, llm: LLM) -> None:
    """Equal to a search by hand; one beam is the greedy answer; fields that do not go with it are refused by name."""
    asked = {"model": "demo", "prompt": "Return the", "max_tokens": 6}
    body = {"use_beam_search": True, "return_token_ids": True}
    said = client.completions.create(**asked, n=3, extra_body=body)
    prompt = said.choices[0].prompt_token_ids
    wanted = beams_by_hand(llm, prompt, 3, 6, set(llm.config.eos_token_ids))
    assert [one.token_ids for one in said.choices] == [tokens for tokens, _ in wanted]
    assert [one.index for one in said.choices] == [0, 1, 2]
    assert said.usage.completion_tokens == sum(len(tokens) for tokens, _ in wanted)
    one = client.completions.create(**asked, extra_body=body).choices[0]
    greedy = client.completions.create(**asked, temperature=0).choices[0]
    assert (one.text, one.finish_reason) == (greedy.text, greedy.finish_reason)
    chat = client.chat.completions.create(
        model="demo", messages=HELLO, max_completion_tokens=4, n=2, extra_body={"use_beam_search": True}
    )
    assert len({one.message.content for one in chat.choices}) == 2
    for more, field in (
        ({"stream": True}, "stream"),
        ({"stop": ["a"]}, "stop"),
        ({"regex": "a+"}, "regex"),
        ({"n": 11}, "n"),
        ({"use_beam_search": False, "length_penalty": 2.0}, "length_penalty"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            client.completions.create(**asked, extra_body={**body, **more})
        assert refused.value.param == field


def test_stop_texts_over_the_borders_of_tokens(client: Any, llm: LLM) -> None:
    text = str(llm.generate(["Return the"], Params(max_new_tokens=24))[0].text)
    asked = {"model": "demo", "prompt": "Return the", "temperature": 0, "max_tokens": 24}
    for start in (3, 14, 25):
        stop = text[start : start + 5]
        expected = text[: text.index(stop)]
        said = client.completions.create(**asked, stop=stop).choices[0]
        assert (said.text, said.finish_reason, said.stop_reason) == (expected, "stop", stop)
        pieces = client.completions.create(**asked, stop=stop, stream=True)
        assert "".join(piece.choices[0].text for piece in pieces) == expected


def test_the_engine_stops_at_special_tokens_of_a_format_as_workers_do(tmp_path: Path) -> None:
    for file in demo_model_folder().iterdir():
        shutil.copy(file, tmp_path / file.name)
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_bytes())
    tokenizer["added_tokens"][0]["content"] = "[TOOL_CALLS]"
    vocabulary = tokenizer["model"]["vocab"]
    if "<|endoftext|>" in vocabulary:
        vocabulary["[TOOL_CALLS]"] = vocabulary.pop("<|endoftext|>")
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer), "utf-8")
    unit = build_engine(ServeSettings(model=str(tmp_path), device="cpu", tool_call_parser="mistral", restarts=0))
    try:
        assert unit.host._watch_text is not None
        prompt = TokenIds(np.array([5], "<i4").tobytes())
        asked = RequestArrived(0, request_id=0, prompt=prompt, max_new_tokens=4, stop_texts=("[TOOL_CALLS]",))
        assert unit.host._watch_text(asked).push(0, 0) == (True, 0)
    finally:
        unit.close()


def test_logprobs_of_a_chat(client: Any, llm: LLM) -> None:
    (expected,) = llm.chat(HELLO, Params(max_new_tokens=6, logprobs=3))
    asked = {"model": "demo", "messages": HELLO, "max_completion_tokens": 6, "temperature": 0}
    said = client.chat.completions.create(**asked, logprobs=True, top_logprobs=3).choices[0]
    content = said.logprobs.content
    assert [one.logprob for one in content] == pytest.approx(expected.logprobs, abs=1e-4)
    assert b"".join(bytes(one.bytes) for one in content).decode() == said.message.content
    for one, tops in zip(content, expected.top_logprobs, strict=True):
        assert [top.logprob for top in one.top_logprobs] == pytest.approx(sorted(tops.values(), reverse=True), abs=1e-4)
        assert one.top_logprobs[0].token == one.token  # greedy
    streamed = client.chat.completions.create(**asked, logprobs=True, top_logprobs=3, stream=True)
    pieces = [one for chunk in streamed if chunk.choices[0].logprobs for one in chunk.choices[0].logprobs.content]
    assert [one.token for one in pieces] == [one.token for one in content]


def test_logprobs_of_a_completion_and_its_prompt(client: Any, llm: LLM) -> None:
    (expected,) = llm.generate(["Return the number"], Params(max_new_tokens=4, logprobs=2, prompt_logprobs=0))
    asked = {"model": "demo", "prompt": "Return the number", "max_tokens": 4, "temperature": 0}
    said = client.completions.create(**asked, logprobs=2).choices[0]
    assert said.logprobs.token_logprobs == pytest.approx(expected.logprobs, abs=1e-4)
    assert "".join(said.logprobs.tokens) == said.text
    assert [said.text[offset:][:1] for offset in said.logprobs.text_offset] == [one[:1] for one in said.logprobs.tokens]
    assert all(token in tops for token, tops in zip(said.logprobs.tokens, said.logprobs.top_logprobs, strict=True))
    echoed = client.completions.create(**asked, logprobs=0, echo=True).choices[0]
    first, *others = echoed.logprobs.token_logprobs
    assert first is None
    assert others == pytest.approx([*expected.prompt_logprobs.values(), *expected.logprobs], abs=1e-4)
    assert "".join(echoed.logprobs.tokens) == echoed.text == "Return the number" + said.text


def test_an_echoed_prompt_has_the_likeliest_beside_its_tokens(client: Any, llm: LLM) -> None:
    """Evaluation harnesses use this to check that each token is the one that greedy decoding would draw."""
    asked = {"model": "demo", "prompt": "Return the number", "max_tokens": 2, "temperature": 0, "echo": True}
    found = client.completions.create(**asked, logprobs=2, extra_body={"prompt_logprobs": 1}).choices[0]
    (expected,) = llm.generate(["Return the number"], Params(max_new_tokens=2, logprobs=2, prompt_logprobs=2))
    first, *others = found.logprobs.top_logprobs
    assert first is None
    tops = [*expected.prompt_top_logprobs.values(), *expected.top_logprobs]
    for said, own, token, best in zip(
        others, found.logprobs.token_logprobs[1:], found.logprobs.tokens[1:], tops, strict=True
    ):
        assert said[token] == own
        assert len(said) in (2, 3)
        assert max(said.values()) == pytest.approx(max(best.values()), abs=1e-4)
    assert {len(one) for one in found.prompt_logprobs[1:]} <= {1, 2}  # as many as requested
    alone = client.completions.create(**{**asked, "max_tokens": 0}, logprobs=1).choices[0].logprobs
    assert alone.token_logprobs[1:] == pytest.approx(found.logprobs.token_logprobs[1:-2], abs=1e-4)
    assert len(alone.top_logprobs) == len(alone.tokens) == len(found.logprobs.tokens) - 2


def test_a_call_without_content_goes_back_as_the_official_client_has_it(client: Any) -> None:
    """The client sends null, or omits it; a template that does not test for null receives an empty text."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    ids = []
    for content in ({"content": ""}, {"content": None}, {}):
        turn = {"role": "assistant", "tool_calls": [call], **content}
        messages = [*HELLO, turn, {"role": "tool", "tool_call_id": "c", "content": "42"}]
        said = client.chat.completions.create(
            model="demo", messages=messages, max_tokens=1, extra_body={"return_token_ids": True}
        )
        ids.append(said.choices[0].prompt_token_ids)
    assert ids[0] == ids[1] == ids[2]
    for wrong in ({"role": "user"}, {"role": "user", "content": None}, {"role": "assistant"}, {"role": "tool"}):
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model="demo", messages=[*HELLO, wrong], max_tokens=1)
        assert caught.value.param == "messages.1.content", wrong
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="demo", messages=HELLO, logprobs=True, top_logprobs=21)
    assert caught.value.param == "top_logprobs"


def test_logprobs_of_a_prompt_with_the_likeliest_in_its_place(client: Any, llm: LLM) -> None:
    (expected,) = llm.generate(["Return the number"], Params(max_new_tokens=1, prompt_logprobs=2))
    asked = {"model": "demo", "max_tokens": 1, "temperature": 0, "extra_body": {"prompt_logprobs": 2}}
    choice = client.completions.create(prompt="Return the number", **asked).choices[0].model_dump()
    first, *others = choice["prompt_logprobs"]
    assert first is None
    ids = expected.prompt_token_ids
    assert len(others) == len(ids) - 1
    for position, said in enumerate(others, 1):
        tops = expected.prompt_top_logprobs[position]
        assert {int(token): one["logprob"] for token, one in said.items() if one["rank"]} == pytest.approx(
            tops, abs=1e-4
        )
        own = said[str(ids[position])]
        assert own["logprob"] == pytest.approx(expected.prompt_logprobs[position], abs=1e-4)
        ranks = sorted(one["rank"] for one in said.values() if one["rank"])
        assert ranks == [1, 2]
        assert own["rank"] is None or said[str(ids[position])]["logprob"] == tops[ids[position]]
    chat = client.chat.completions.create(messages=HELLO, **asked).model_dump()
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    generated = native(
        client,
        "/generate",
        {
            "text": "Return the number",
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": 2,
            "sampling_params": {"max_new_tokens": 1, "temperature": 0},
        },
    )
    about = generated["meta_info"]
    assert [value for value, _, _ in about["input_token_logprobs"][1:]] == pytest.approx(
        list(expected.prompt_logprobs.values()), abs=1e-4
    )
    assert [len(one or ()) for one in about["input_top_logprobs"]] == [0] + [2] * len(others)
    with pytest.raises(openai.BadRequestError, match="prompt_logprobs"):
        client.completions.create(prompt="a", stream=True, **asked)


def native(client: Any, path: str, body: dict[str, Any], expected: int = 200) -> Any:
    import httpx2

    url = str(client.base_url).removesuffix("/v1/") + path
    answer = httpx2.post(url, json=body, headers={"Authorization": f"Bearer {client.api_key}"}, timeout=120)
    assert answer.status_code == expected, answer.text
    return answer.json()


def test_only_allowed_tokens_are_generated(client: Any, llm: LLM) -> None:
    allowed = [300, 301, 302, 7]
    drawn = Params(max_new_tokens=12, temperature=1.0, seed=3, allowed_token_ids=allowed, ignore_eos=True)
    (expected,) = llm.generate(["Return the"], drawn)
    more = {"allowed_token_ids": allowed, "ignore_eos": True, "return_token_ids": True}
    asked: dict[str, Any] = {"model": "demo", "prompt": "Return the", "max_tokens": 12, "seed": 3}
    said = client.completions.create(**asked, extra_body=more).choices[0].model_dump()
    assert said["token_ids"] == expected.token_ids
    assert set(said["token_ids"]) <= set(allowed)
    for bad in ([], [10**6], [-1], [1] * 65537):
        with pytest.raises(openai.BadRequestError, match="allowed_token_ids"):
            client.completions.create(**asked, extra_body={"allowed_token_ids": bad})
    with pytest.raises(openai.BadRequestError, match=r"`logit_processors` names 'mine', .* enabled: only"):
        client.completions.create(**asked, extra_body={"logit_processors": {"mine": {}}})


def test_a_processor_of_an_installed_package(client: Any) -> None:
    asked: dict[str, Any] = {"model": "demo", "prompt": "Return the", "max_tokens": 4, "temperature": 0}
    more = {"logit_processors": {"only": {"token": 300}}, "return_token_ids": True, "ignore_eos": True}
    assert client.completions.create(**asked, extra_body=more).choices[0].model_dump()["token_ids"] == [300] * 4
    with pytest.raises(openai.BadRequestError, match="`only` refuses its arguments: it needs a token"):
        client.completions.create(**asked, extra_body={"logit_processors": {"only": {}}})


def test_embeddings_are_those_of_the_model(client: Any, llm: LLM) -> None:
    texts = ["Return the number", "of all files"]
    expected = [one.vector for one in llm.embed(texts)]
    said = client.embeddings.create(model="demo", input=texts)  # the client requests base64 by default
    assert [one.index for one in said.data] == [0, 1]
    assert [one.object for one in said.data] == ["embedding"] * 2
    for one, vector in zip(said.data, expected, strict=True):
        assert one.embedding == pytest.approx(vector.tolist(), abs=1e-5)
    ids = [llm.embed([text])[0].prompt_token_ids for text in texts]
    assert said.usage.prompt_tokens == said.usage.total_tokens == sum(map(len, ids))
    for given, vectors in ((texts[0], expected[:1]), (ids[1], expected[1:]), (ids, expected)):
        floats = client.embeddings.create(model="demo", input=given, encoding_format="float")
        assert [one.embedding for one in floats.data] == [pytest.approx(v.tolist(), abs=1e-5) for v in vectors]
    size = len(expected[0])
    assert len(client.embeddings.create(model="demo", input="a", dimensions=size).data[0].embedding) == size


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": [10**6]}, "input"),
        ({"input": ["a"] * 257}, "input"),
        ({"input": "a", "dimensions": 3}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": list(range(100)) * 100}, "input"),
        ({"input": "a", "extra_body": {"truncate_prompt_tokens": -2}}, "truncate_prompt_tokens"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_invalid_embeddings(client: Any, asked: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.embeddings.create(model="demo", **asked)
    assert caught.value.body["param"].startswith(param)


def test_scores_are_those_of_the_model(client: Any, llm: LLM) -> None:
    query, items, labels = "Return the", [" number of", " name"], [300, 301, 17]
    asked = {"query": query, "items": items, "label_token_ids": labels}
    expected = np.exp([one.logprobs for one in llm.score([query + item for item in items], labels)])
    said = native(client, "/v1/score", asked)
    assert said["scores"] == [pytest.approx(row.tolist(), rel=1e-3) for row in expected]
    among = native(client, "/score", {**asked, "apply_softmax": True})["scores"]
    assert among == [pytest.approx((row / row.sum()).tolist(), rel=1e-3) for row in expected]
    ids = [one.prompt_token_ids for one in llm.embed([items[0], query])]
    other = np.exp(llm.score([ids[1] + ids[0]], labels)[0].logprobs)
    turned = {"query": ids[0], "items": [ids[1]], "label_token_ids": labels, "item_first": True}
    assert native(client, "/score", turned)["scores"] == [pytest.approx(other.tolist(), rel=1e-3)]


def test_texts_are_compared_and_ordered_by_their_vectors(client: Any, llm: LLM) -> None:
    query, texts = "Return the number", ["of all files", "Return a number", "zebra"]
    vectors = np.stack([one.vector for one in llm.embed([query, *texts])]).astype(float)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    near = vectors[1:] @ vectors[0]
    said = native(client, "/v1/score", {"text_1": query, "text_2": texts})
    assert [one["score"] for one in said["data"]] == pytest.approx(near.tolist(), abs=1e-5)
    documents = [texts[0], {"text": texts[1]}, texts[2]]
    said = native(client, "/v1/rerank", {"query": query, "documents": documents, "top_n": 2})
    best = np.argsort(-near)[:2].tolist()
    assert [one["index"] for one in said["results"]] == best
    assert [one["document"]["text"] for one in said["results"]] == [texts[at] for at in best]
    assert [one["relevance_score"] for one in said["results"]] == pytest.approx(near[best].tolist(), abs=1e-5)


@pytest.mark.parametrize(
    ("path", "asked", "param"),
    [
        ("/score", {}, "query"),
        ("/score", {"query": "a", "text_1": "b"}, "query"),
        ("/score", {"query": "a", "items": ["b"]}, "label_token_ids"),
        ("/score", {"query": "a", "items": ["b"], "label_token_ids": []}, "label_token_ids"),
        ("/score", {"query": "a", "items": ["b"], "label_token_ids": [10**6]}, "label_token_ids"),
        ("/score", {"query": "a", "items": [[3]], "label_token_ids": [1]}, "query"),
        ("/score", {"query": "a", "items": ["b"] * 257, "label_token_ids": [1]}, "items"),
        ("/score", {"text_1": ["a", "b"], "text_2": "c"}, "text_1"),
        ("/score", {"text_1": ["a", ""], "text_2": ["c", "d"]}, "text_2"),
        ("/rerank", {"query": "a", "documents": []}, "documents"),
        ("/rerank", {"query": "a", "documents": [{"title": "b"}]}, "documents"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": 0}, "top_n"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_invalid_scores(client: Any, path: str, asked: dict[str, Any], param: str) -> None:
    error = native(client, path, asked, expected=400)["error"]
    assert error["param"].startswith(param), error


def test_best_of_returns_the_likeliest_answers(client: Any) -> None:
    asked: dict[str, Any] = {"model": "demo", "prompt": ["Return the", "of all"], "max_tokens": 6, "seed": 5}
    every = client.completions.create(**asked, n=4, logprobs=0).choices
    best = client.completions.create(**asked, n=2, best_of=4)
    assert [one.index for one in best.choices] == [0, 1, 2, 3]
    assert best.usage.completion_tokens == sum(len(one.logprobs.tokens) for one in every)
    for prompt in range(2):
        drawn = every[4 * prompt : 4 * prompt + 4]
        drawn.sort(key=lambda one: -float(np.mean(one.logprobs.token_logprobs)))
        assert [one.text for one in best.choices[2 * prompt : 2 * prompt + 2]] == [one.text for one in drawn[:2]]
    assert best.choices[0].logprobs is None
    for more in ({"n": 3, "best_of": 2}, {"best_of": 2, "stream": True}, {"best_of": 10**6}):
        with pytest.raises(openai.BadRequestError, match="best_of"):
            client.completions.create(**asked, **more)


def test_a_key_is_needed(server: LiveServer) -> None:
    stranger = openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0, timeout=300)
    with stranger, pytest.raises(openai.AuthenticationError):
        stranger.models.list()
    assert server.status_of("/metrics") == 401
    assert server.status_of("/health") == 200


def test_tenants_share_no_prefixes(client: Any) -> None:
    asked = {
        "model": "demo",
        "prompt": "Return a list of the names of all of the files in the folder. " * 3,
        "max_tokens": 1,
    }
    cached = [
        one.completions.create(**asked).usage.prompt_tokens_details.cached_tokens
        for one in (client, client, client.with_options(api_key=OTHER_KEY), client.with_options(api_key=OTHER_KEY))
    ]
    assert cached[0] == cached[2] == 0
    assert cached[1] == cached[3] > 0


def test_extreme_settings_affect_no_other_request(client: Any) -> None:
    """Extreme settings of one request leave the answer of a concurrent one unchanged."""
    asked = {"model": "demo", "prompt": "Return the", "temperature": 0, "max_tokens": 40}
    expected = client.completions.create(**asked).choices[0].text
    stream = client.completions.create(**asked, stream=True)
    said = next(stream).choices[0].text
    for more in (
        {"temperature": 1e-300, "top_p": 1e-300, "extra_body": {"top_k": 2**31 - 1, "min_p": 1.0}},
        {"temperature": 2.0, "extra_body": {"repetition_penalty": 1e-5}},
        {"extra_body": {"repetition_penalty": 10, "min_tokens": 8}, "logit_bias": {"2": 100, "0": 100}},
        {"frequency_penalty": -2, "presence_penalty": -2, "seed": 2**63 - 1, "n": 3},
        {"logit_bias": {str(token): -100 for token in range(1024)}, "seed": -(2**63), "n": 2},
        {"prompt": list(range(2048)), "logprobs": 20},
        {"stop": ["\x00", "\ud7ff", "e" * 512], "extra_body": {"stop_token_ids": list(range(64))}},
    ):
        choices = client.completions.create(**{**asked, "max_tokens": 8, "temperature": 1.0, **more}).choices
        assert all(choice.finish_reason in ("length", "stop") for choice in choices)
    assert said + "".join(chunk.choices[0].text for chunk in stream) == expected


def test_figures_under_other_names(client: Any, server: LiveServer) -> None:
    import httpx2

    text = httpx2.get(f"{server.url}/metrics", headers={"Authorization": f"Bearer {KEY}"}, timeout=120).text
    for name in ("vllm:time_to_first_token_seconds_bucket", "vllm:num_requests_running", "sglang:num_running_reqs"):
        assert f"\n{name}{{" in text


def test_operators_have_a_socket_of_their_own(server: LiveServer) -> None:
    path = server.log.parent / "admin"
    assert path.stat().st_mode & 0o777 == 0o600

    post = partial(ask_operator, path)

    assert post("/flush_cache", "wrong")[0] == 401
    assert post("/flush_cache", KEY) == (200, {"success": True, "message": ""})
    status, info = post("/get_server_info", KEY)
    assert (status, info["state"]["running"], info["scheduler"]["page_size"]) == (200, 0, 16)
    assert post("/pause", KEY)[0] == post("/resume", KEY)[0] == 200
    assert post("/v1/completions", KEY)[0] == 404
    assert server.status_of("/flush_cache") == 404
    status, said = post("/start_expert_distribution_record", KEY)
    assert (status, "--set expert_load_interval=100" in said["error"]["message"]) == (501, True)


def test_an_operator_takes_a_profile(client: Any, server: LiveServer) -> None:
    post = partial(ask_operator, server.log.parent / "admin")
    assert post("/stop_profile", KEY)[0] == 400
    assert post("/start_profile", KEY, {"output_dir": "/tmp"})[1]["error"]["param"] == "output_dir"
    assert post("/start_profile", KEY, {"activities": ["GPU"]})[0] == 400
    assert post("/start_profile", KEY, {"num_steps": 3})[0] == 200
    assert post("/start_profile", KEY)[0] == 400  # a profile is already running
    client.completions.create(model="demo", prompt="a", max_tokens=8, extra_body={"ignore_eos": True})
    status, said = post("/stop_profile", KEY)
    assert (status, said["message"]) == (200, "written: trace-01.json.gz")
    assert (server.log.parent / "traces" / "trace-01.json.gz").stat().st_size > 1000
    assert post("/start_profile", KEY)[0] == post("/stop_profile", KEY)[0] == 200


def test_at_last_the_journal_replays(server: LiveServer) -> None:
    assert server.end() == 0
    run = server.log.parent / "run"
    assert read_journal(run).header.host["kind"] == "runtime"
    assert replay(run).steps > 100
