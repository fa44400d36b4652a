"""Engines of small real models that share work, all in this process: in two roles, or as data-parallel ranks."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import msgspec

from lockstep.host.handover.decode import DecodeSide
from lockstep.host.handover.prefill import PrefillSide
from lockstep.runtime import LLM, Params, RequestOutput
from lockstep.runtime.data_ranks import DataRank
from lockstep.runtime.engine_config import EngineConfig
from tests.support.small_runtime import SMALL_QWEN3

DENSE: dict[str, Any] = {**SMALL_QWEN3, "num_hidden_layers": 3, "tie_word_embeddings": True}
EXPERTS: dict[str, Any] = {
    **DENSE,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "mlp_only_layers": [1],
}
CPU: dict[str, Any] = {"device": "cpu", "grammar_backend": "none"}
OF_ENGINE: dict[str, Any] = {"page_size": 4, "chunked_prefill_size": 48, "max_running_requests": 12, "pages": 600}
HALVES: dict[str, Any] = {"two_batch_overlap": True, "two_batch_decode_tokens": 2, "two_batch_prefill_tokens": 4}
KINDS: list[dict[str, Any]] = [{}, {}, {"temperature": 1.0, "top_k": 20, "seed": 3}, {"logprobs": 2}]
"""Kinds of requests, in turn."""
ROOMS = 100
"""Rooms of a request to a decode engine, at most."""


def in_rooms(llm: LLM, rooms: Iterator[int], prefills: int = 1) -> None:
    """Give every request to a decode engine a room, and one of the prefill engines 0, 1, ..., in turn.

    Args:
        rooms: first rooms of requests, at least as far apart as a request has samples. Engines share them.
    """
    submit, side = llm.host.submit, llm.handover
    assert isinstance(side, DecodeSide)

    def submit_in_room(request: Any, *sinks: Any, **more: Any) -> int:
        room = next(rooms)
        side.route(room, room // ROOMS % prefills)
        return submit(msgspec.structs.replace(request, transfer_room=room), *sinks, **more)

    llm.host.submit = submit_in_room  # type: ignore[method-assign]


@contextmanager
def engines(folder: Path, prefill: dict[str, Any], decode: dict[str, Any], **both: Any) -> Iterator[tuple[LLM, LLM]]:
    """A prefill and a decode engine; requests to the second one use both.

    Args:
        folder: for the socket between them; its path must be short.
        prefill, decode: options of one engine; `both` are of both.
    """
    address = f"unix:{folder}/kv"
    with (
        LLM(**{**both, **prefill}, role="prefill", hand_over=lambda kv: PrefillSide(kv, address)) as first,
        LLM(**{**both, **decode}, role="decode", hand_over=lambda kv: DecodeSide(kv, lambda _: address)) as second,
    ):
        in_rooms(second, count(step=ROOMS))
        yield first, second


@contextmanager
def ranks_of(
    folder: Path,
    ranks: int,
    place: Path,
    options: dict[str, Any],
    sched: dict[str, Any],
    of_rank: Callable[[int], dict[str, Any]] = lambda _: {},
    **more: Any,
) -> Iterator[list[LLM]]:
    """All ranks of one engine, of which every one starts in a thread of its own, since they wait for each other.

    Args:
        ranks: data-parallel ranks; with 1 the engine has none.
        place: for their sockets, and a journal of each in `rank0`, `rank1`, ...
        options, more: fields of EngineConfig; `sched`: fields of SchedConfig, over those of OF_ENGINE. A `device` of
            `cuda` is that of the first rank, the next one that of the second, ...
        of_rank: returns fields of EngineConfig that differ by rank.
    """
    place.mkdir(exist_ok=True)

    def make(rank: int) -> LLM:
        shared: dict[str, Any] = {"tp": ranks, "attention_dp": ranks, "rank_schedulers": True}
        seat = {**shared, "data_rank": DataRank(rank, ranks, place)} if ranks > 1 else {}
        given: dict[str, Any] = {**CPU, **seat, **options, **more, **of_rank(rank)}
        if given["device"] == "cuda":
            given["device"] = f"cuda:{rank}"
        config = EngineConfig(
            **given,
            journal=place / f"rank{rank}",
            sched={**OF_ENGINE, **sched},
        )
        return LLM(folder, config)

    with ThreadPoolExecutor(ranks) as pool:
        made = list(pool.map(make, range(ranks)))
    try:
        yield made
    finally:
        for llm in made:
            llm.close()


@contextmanager
def ranks_in_roles(
    folder: Path,
    ranks: tuple[int, int],
    place: Path,
    options: dict[str, Any],
    prefill: dict[str, Any],
    decode: dict[str, Any],
) -> Iterator[tuple[list[LLM], list[LLM]]]:
    """A prefill and a decode engine of data-parallel ranks; requests to a decode rank use the prefill ranks in turn.

    Args:
        ranks: of the prefill and of the decode engine; with 1 an engine has none.
        place: for their sockets, and journals in `prefill/rank0`, ..., `decode/rank0`, ...; its path must be short.
        options: fields of EngineConfig; `prefill`, `decode`: fields of SchedConfig.
    """

    def address(number: int) -> str:
        return f"unix:{place}/kv-{number}"

    def sending(rank: int) -> dict[str, Any]:
        return {"hand_over": lambda kv: PrefillSide(kv, address(rank), number=rank)}

    def receiving(rank: int) -> dict[str, Any]:
        return {"hand_over": lambda kv: DecodeSide(kv, address, number=ranks[0] + rank)}

    with (
        ranks_of(folder, ranks[0], place / "prefill", options, {**prefill, "role": "prefill"}, sending) as firsts,
        ranks_of(folder, ranks[1], place / "decode", options, {**decode, "role": "decode"}, receiving) as seconds,
    ):
        rooms = count(step=ROOMS)
        for llm in seconds:
            in_rooms(llm, rooms, ranks[0])
        yield firsts, seconds


def answered_alike(
    llms: list[LLM],
    used: list[int],
    asked: list[tuple[list[int], Params]],
    expected: list[RequestOutput],
    rng: random.Random,
) -> list[RequestOutput]:
    """Send requests to engines, cancel every tenth, and compare the others with the answers of one plain engine.

    Args:
        used: the engine of each request.
        expected: the answer to each, by one plain engine.
    Returns: the answers; those of cancelled requests may be shorter.
    """
    pending = [llms[rank].ask(*one) for rank, one in zip(used, asked, strict=True)]
    cancelled = set(rng.sample(range(len(asked)), len(asked) // 10))
    for number in cancelled:
        llms[used[number]].host.cancel(pending[number].answer.request_id)
    found = [llms[rank].wait(one) for rank, one in zip(used, pending, strict=True)]
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        if number in cancelled and ours.finish_reason == "cancelled":
            assert ours.token_ids == theirs.token_ids[: len(ours.token_ids)], number
        else:
            assert (ours.finish_reason, ours.token_ids) == (theirs.finish_reason, theirs.token_ids), number
    return found
