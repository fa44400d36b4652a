"""A cross-encoder behind the server: scores of pairs, documents in order, labels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("fastapi", reason="the server is not installed")
torch = pytest.importorskip("torch", reason="the GPU runtime is not installed")
pytest.importorskip("transformers", reason="the models run by transformers' code")
httpx2 = pytest.importorskip("httpx2", reason="a client is not installed")

from lockstep.core.journal.replay import replay  # noqa: E402
from tests.support.encoders import reference, save_encoder, some_pairs, tokenizer  # noqa: E402
from tests.support.live_server import LiveServer, serving  # noqa: E402


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LiveServer, Any]]:
    folder = tmp_path_factory.mktemp("encoder")
    model = save_encoder(folder / "model", "Bert")
    options = ("--model", str(folder / "model"), "--dtype", "float32", "--journal", str(folder / "run"))
    with serving(folder / "log", *options) as server:
        yield server, model
    replay(folder / "run")


def sent(server: LiveServer, path: str, **body: Any) -> Any:
    answer = httpx2.post(f"{server.url}{path}", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def expected(model: Any, pairs: list[tuple[str, str]], *, activated: bool = True) -> list[float]:
    logits = torch.cat([reference(model, *pair).logits for pair in pairs])[:, 0]
    found: list[float] = (logits.sigmoid() if activated else logits).tolist()
    return found


def test_scores_of_pairs_are_those_of_transformers(served: tuple[LiveServer, Any]) -> None:
    server, model = served
    pairs = some_pairs()
    firsts, seconds = map(list, zip(*pairs, strict=True))
    said = sent(server, "/v1/score", text_1=firsts, text_2=seconds)
    assert [one["score"] for one in said["data"]] == pytest.approx(expected(model, pairs), abs=1e-5)
    assert said["usage"]["prompt_tokens"] == sum(len(tokenizer()(*pair)["input_ids"]) for pair in pairs)
    raw = sent(server, "/score", text_1=firsts[0], text_2=seconds, use_activation=False)
    wanted = expected(model, [(firsts[0], second) for second in seconds], activated=False)
    assert [one["score"] for one in raw["data"]] == pytest.approx(wanted, abs=1e-4)


def test_documents_are_ordered_by_their_scores(served: tuple[LiveServer, Any]) -> None:
    server, model = served
    query, documents = "a quick dog", [second for _, second in some_pairs()]
    wanted = np.array(expected(model, [(query, one) for one in documents]))
    said = sent(server, "/v1/rerank", query=query, documents=documents, top_n=5)["results"]
    assert [one["index"] for one in said] == np.argsort(-wanted, kind="stable")[:5].tolist()
    assert [one["relevance_score"] for one in said] == pytest.approx(np.sort(wanted)[::-1][:5], abs=1e-5)
    long = " ".join(["dog"] * 3000)  # by a text process, cut to what fits
    cut = sent(server, "/v1/rerank", query=query, documents=[long], truncate_prompt_tokens=-1)
    assert cut["usage"]["prompt_tokens"] == 130
    refused = httpx2.post(f"{server.url}/v1/rerank", json={"query": query, "documents": [long]}, timeout=60)
    assert refused.status_code == 400


def test_labels_of_texts(served: tuple[LiveServer, Any]) -> None:
    server, model = served
    texts = [first for first, _ in some_pairs(4)]
    said = sent(server, "/classify", input=texts)
    wanted = [float(reference(model, text).logits[0, 0].sigmoid()) for text in texts]
    assert [one["probs"][0] for one in said["data"]] == pytest.approx(wanted, abs=1e-5)
    assert {(one["label"], one["num_classes"]) for one in said["data"]} == {("LABEL_0", 1)}
    ids = tokenizer()(texts[0])["input_ids"]
    alone = sent(server, "/v1/classify", input=ids)["data"][0]["probs"]
    assert alone == pytest.approx(said["data"][0]["probs"], abs=1e-6)  # the first answer was in a batch of four


@pytest.mark.parametrize(
    ("path", "body", "why"),
    [
        ("/v1/completions", {"prompt": "a cat"}, "this model serves labels, by /v1/score"),
        ("/score", {"query": "a", "items": ["b"], "label_token_ids": [1]}, "labels of its own"),
        ("/classify", {"input": ["dog " * 131]}, "maximum context length is 130 tokens"),
        ("/v1/rerank", {"query": "a", "documents": ["b"] * 257}, "257 prompts, at most 256"),
    ],
)
def test_what_the_model_cannot_do_is_one_error(
    served: tuple[LiveServer, Any], path: str, body: dict[str, Any], why: str
) -> None:
    answer = httpx2.post(f"{served[0].url}{path}", json=body, timeout=60)
    assert answer.status_code == 400
    assert why in answer.json()["error"]["message"]
