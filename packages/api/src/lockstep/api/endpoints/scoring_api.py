"""POST /score and /rerank: probabilities and similarities of texts, without generated tokens.

query + items, label_token_ids    probability of each label as the next token after each item, as in SGLang
text_1, text_2                    similarity of texts: the cosine of their vectors, as in vLLM for such models
query, documents                  the documents by similarity, as in Jina, Cohere and vLLM
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from starlette.responses import Response

from lockstep.api.endpoints.embeddings_api import pooled, prompt_of
from lockstep.api.endpoints.errors import ApiError
from lockstep.api.endpoints.generation import Prompt, check_answers, prompts_of
from lockstep.api.endpoints.http import JsonResponse
from lockstep.api.endpoints.schemas import RerankBody, ScoreBody
from lockstep.api.endpoints.server import GENERATION, Call, Server
from lockstep.host.batches import Float32s

BY_LABELS, BY_VECTORS = ("query", "items", "label_token_ids"), ("text_1", "text_2")


async def score(server: Server, call: Call[ScoreBody]) -> Response:
    """Compute probabilities of labels after texts, or similarities of texts."""
    body = call.body
    labels, vectors = ([name for name in names if getattr(body, name) is not None] for names in (BY_LABELS, BY_VECTORS))
    if bool(labels) == bool(vectors):
        message = (
            "give `query`, `items` and `label_token_ids` to score labels, or `text_1` and `text_2` to compare texts"
        )
        raise ApiError(400, message, (labels or BY_LABELS)[0])
    requested, given = (BY_LABELS, labels) if labels else (BY_VECTORS, vectors)
    for name in requested:
        if name not in given:
            raise ApiError(400, f"`{name}` is missing; `{given[0]}` requires it", name)
    return await (_labels(server, call) if labels else _nearness(server, call))


async def _labels(server: Server, call: Call[ScoreBody]) -> Response:
    body, info, limits = call.body, server.info(), server.limits
    assert body.query is not None
    assert body.items is not None
    name, labels = server.model(body.model), body.label_token_ids or []
    if not info.logprobs:
        raise ApiError(400, "an emulated engine has no logits, so it has no scores", "model")
    if not labels:
        raise ApiError(400, "`label_token_ids` is empty, so there are no labels to score", "label_token_ids")
    if len(labels) > limits.allowed_tokens_max:
        message = f"`label_token_ids` has {len(labels)} ids, at most {limits.allowed_tokens_max} are allowed"
        raise ApiError(400, message, "label_token_ids")
    if max(labels) >= info.vocabulary:
        message = f"`label_token_ids` holds {max(labels)}, but the model has {info.vocabulary} tokens"
        raise ApiError(400, message, "label_token_ids")
    items = prompts_of(body.items, "items")
    check_answers(len(items), 1, limits, "items")
    prompts = [await _judged(server, body, item) for item in items]
    logits, tokens = await pooled(server, call, prompts, "score", "items")
    scores = [label_scores(one, labels, among_labels=body.apply_softmax).tolist() for one in logits]
    return JsonResponse({"object": "scoring", "model": name, "scores": scores, **_used(call, tokens)})


async def _judged(server: Server, body: ScoreBody, item: str | Sequence[int]) -> Prompt:
    """Return query and item as one prompt. Texts are joined before they are tokenised."""
    query = body.query
    if isinstance(query, str) and isinstance(item, str):
        return await prompt_of(server, item + query if body.item_first else query + item, "items")
    if query is not None and not isinstance(query, str) and not isinstance(item, str) and _is_ids(query):
        return Prompt([*item, *query] if body.item_first else [*query, *item])
    raise ApiError(400, "`query` and `items` must both be texts, or both token ids", "query")


def _is_ids(given: Sequence[Any]) -> bool:
    return not given or isinstance(given[0], int)


def label_scores(logits: Float32s, labels: Sequence[int], *, among_labels: bool) -> NDArray[np.float64]:
    """Return the probabilities of some tokens, float64 [labels].

    Args:
        logits: [vocabulary].
        among_labels: normalise over the labels only, instead of the vocabulary.
    """
    exact = logits.astype(np.float64)
    chosen = exact[np.asarray(labels)]
    among = chosen if among_labels else exact
    weights = np.exp(chosen - among.max())
    return np.asarray(weights / np.exp(among - among.max()).sum(), np.float64)


async def _nearness(server: Server, call: Call[ScoreBody]) -> Response:
    body = call.body
    left, right = ([one] if isinstance(one, str) else one for one in (body.text_1, body.text_2))
    assert left is not None
    assert right is not None
    if not left or not right or (len(left) not in (1, len(right))):
        message = f"`text_1` has {len(left)} texts, but must have 1, or as many as `text_2`, which has {len(right)}"
        raise ApiError(400, message, "text_1")
    name = server.model(body.model)
    vectors, tokens = await _unit_vectors(server, call, [*left, *right], "text_2")
    near = (vectors[: len(left)] * vectors[len(left) :]).sum(axis=1)
    data = [{"index": number, "object": "score", "score": value} for number, value in enumerate(near.tolist())]
    result = {"id": f"score-{secrets.token_hex(16)}", "object": "list", "created": int(time.time()), "model": name}
    return JsonResponse({**result, "data": data, **_used(call, tokens)})


# mechanism: vectors (decided)
async def rerank(server: Server, call: Call[RerankBody]) -> Response:
    """Sort documents by similarity to a query, most similar first."""
    body = call.body
    name = server.model(body.model)
    texts = [_document(one, number) for number, one in enumerate(body.documents)]
    if not texts:
        raise ApiError(400, "`documents` is empty", "documents")
    vectors, tokens = await _unit_vectors(server, call, [body.query, *texts], "documents")
    near = vectors[1:] @ vectors[0]
    order = np.argsort(-near, kind="stable")[: body.top_n]
    results = [
        {"index": at, "relevance_score": float(near[at])}
        | ({"document": {"text": texts[at]}} if body.return_documents else {})
        for at in order.tolist()
    ]
    result = {"id": f"rerank-{secrets.token_hex(16)}", "model": name, "results": results}
    return JsonResponse({**result, **_used(call, tokens), "meta": {"billed_units": {"total_tokens": tokens}}})


def _document(given: str | dict[str, Any], number: int) -> str:
    text = given if isinstance(given, str) else given.get("text")
    if not isinstance(text, str):
        raise ApiError(400, f"`documents.{number}` must be a text, or an object with a `text`", "documents")
    return text


async def _unit_vectors(
    server: Server, call: Call[Any], texts: list[str], field: str
) -> tuple[NDArray[np.float64], int]:
    """Return vectors of texts [texts, hidden], each of length 1, and their number of tokens. Raises ApiError."""
    if not server.info().vector_size:
        raise ApiError(400, "an emulated engine has no hidden states, so it has no vectors to compare", "model")
    check_answers(len(texts), 1, server.limits, field)
    prompts = [await prompt_of(server, text, field) for text in texts]
    found, tokens = await pooled(server, call, prompts, "embed", field)
    vectors = np.stack(found).astype(np.float64)
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors / np.where(lengths > 0.0, lengths, 1.0), tokens


def _used(call: Call[Any], tokens: int) -> dict[str, Any]:
    """Return the common fields of the answers: token counts, and the weights version."""
    return {"usage": {"prompt_tokens": tokens, "total_tokens": tokens}, **call.request.scope[GENERATION].weights()}
