"""The requests of a journal of the core as turns, so that a recorded run is a workload like any other.

The requests are read from the events: arrival time, prompt, number of output tokens. A request whose prompt begins with
the prompt and the whole answer of an earlier request is the next turn of that request. It is sent again the recorded
time after the end of that answer, so that a conversation waits for a slower engine.

Prompts recorded as token ids become runs of new ids. Two new ids are equal exactly where the recorded ids and all ids
before them are equal. Pseudonyms of a journal of vLLM (docs/vllm.md) have this property, too.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.core.contract.commands import Step, StreamTokens
from lockstep.core.contract.events import (
    ObservedEvent,
    RequestArrived,
    RequestFinished,
    RequestId,
    RequestRejected,
    TokenDigest,
    TokenRuns,
)
from lockstep.core.contract.samples import sample_count
from lockstep.core.journal.replay import fold
from lockstep.core.kv.radix import RadixCache
from lockstep.core.requests.table import prompt_bytes
from lockstep.sim.workload.samples import with_counts
from lockstep.sim.workload.token_runs import append_run
from lockstep.sim.workload.turns import TurnLabel, Turns, TurnsBuilder, TurnStart, WorkloadError

COMPLETE = ("length", "stop", "text_stop", "grammar")  # finish reasons after which a conversation may continue
_LABEL = re.compile(r"([^0-9{}]*)(0|[1-9][0-9]{0,8})(?:([^0-9{}]+)(0|[1-9][0-9]{0,8}))?")


@dataclass
class RecordedRequest:
    """A request of a journal, with its end."""

    arrived: RequestArrived
    output_tokens: int = 0
    first_token: int = -1
    ended_us: int = -1
    reason: str = ""


Steps = Iterable[tuple[ObservedEvent, Step]]


def is_journal(folder: Path) -> bool:
    """Whether a folder holds the journal of one engine: a run folder, or the `journal` folder in it."""
    return (folder / "journal").is_dir() or any(folder.glob("*.log"))


def turns_of_journal(run: Path) -> tuple[Turns, list[str]]:
    """Return the requests of a journal as turns, and a sentence for each property that turns do not have.

    Raises: WorkloadError if it has no requests or no prompts; JournalError, Divergence.
    """
    requests = requests_in(fold(run))
    if not requests:
        raise WorkloadError(str(run), "no request arrived in this journal", "`lockstep journal info` shows its content")
    notes = _left_out(requests)
    prompts, outputs = _chained(run, requests)
    after = _follow_ups(requests, prompts, outputs)
    builder = TurnsBuilder()
    origin_us = requests[0].arrived.time_us
    for at, one in enumerate(requests):
        event, leader = one.arrived, after[at]
        if leader >= 0:
            start = TurnStart(after=leader, think_us=event.time_us - requests[leader].ended_us)
        else:
            start = TurnStart(event.time_us - origin_us)
        builder.append(
            start,
            TurnLabel(*label_parts(event.label or f"r{event.request_id}")),
            prompt=prompts[at],
            prompt_tokens=sum(prompts[at][1::2]),
            output_tokens=one.output_tokens,
            output_first_token=outputs[at],
            tenant=event.tenant,
            grammar=event.grammar.source if event.grammar is not None else "",
        )
    turns = _on_adapters(builder.build(), [one.arrived.adapter for one in requests])
    samples = np.array([sample_count(one.arrived) for one in requests], np.int32)
    if (samples > 1).any():
        turns = with_counts(turns, samples)
    turned = sum(leader >= 0 for leader in after)
    if turned:
        notes.append(f"{turned:,} requests continue an earlier answer: they are sent the recorded time after its end")
    return turns, notes


def _on_adapters(turns: Turns, names: Sequence[str]) -> Turns:
    """Return the turns with the adapters of these names; "" is the base model."""
    if not any(names):
        return turns
    codes = {name: code for code, name in enumerate(dict.fromkeys(names))}
    return replace(turns, adapter=np.array([codes[name] for name in names], np.int32), adapters=tuple(codes))


def requests_in(steps: Steps) -> list[RecordedRequest]:
    """Return all requests in the order of arrival, with their ends."""
    found: dict[RequestId, RecordedRequest] = {}
    for event, step in steps:
        if isinstance(event, RequestArrived):
            found[event.request_id] = RecordedRequest(event, event.max_new_tokens)
        for decided in step.decided:
            one = found.get(getattr(decided, "request_id", -1))
            if one is None:
                continue
            if isinstance(decided, RequestFinished):
                one.ended_us, one.reason = decided.time_us, decided.reason
                if decided.output_tokens:
                    one.output_tokens = decided.output_tokens
            elif isinstance(decided, RequestRejected):
                one.reason = "rejected"
        for command in step.commands:
            if isinstance(command, StreamTokens):
                for i in np.flatnonzero(command.offsets == 0).tolist():
                    one = found.get(int(command.request_ids[i]))
                    if one is not None and one.first_token < 0:
                        one.first_token = int(command.tokens[int(command.token_counts[:i].sum())])
    return list(found.values())


def _left_out(requests: Sequence[RecordedRequest]) -> list[str]:
    """Return one sentence for each feature of the requests that the simulator's workloads do not support."""
    notes = []
    counts = Counter(
        name
        for one in requests
        for name in ("priority", "session", "spans", "deadline_us", "finish_by_us", "stop_texts")
        if getattr(one.arrived, name) not in (None, "", ())
    )
    for name, count in counts.items():
        notes.append(f"`{name}` of {count:,} requests is not simulated")
    cut = sum(one.reason in ("cancelled", "timeout", "error", "") for one in requests)
    if cut:
        notes.append(f"{cut:,} requests have no complete answer: they are simulated with the length that they got")
    return notes


def _chained(run: Path, requests: Sequence[RecordedRequest]) -> tuple[list[list[int]], list[int]]:
    """Return prompts as runs of ids, and the first id of each output."""
    kinds = {type(one.arrived.prompt) for one in requests}
    if TokenDigest in kinds:
        raise WorkloadError(
            str(run), "its prompts are not recorded, only their digests", "record with the tokens to simulate it again"
        )
    plain = kinds == {TokenRuns} and not any(one.arrived.namespace or one.arrived.adapter for one in requests)
    if plain:
        runs = [list(one.arrived.prompt.runs) for one in requests if isinstance(one.arrived.prompt, TokenRuns)]
        ends = [first + count for each in runs for first, count in zip(each[0::2], each[1::2], strict=True)]
        fresh = max(0, *ends, *(one.first_token + one.output_tokens for one in requests))
        outputs = []
        for one in requests:
            outputs.append(one.first_token if one.first_token >= 0 else fresh)
            fresh += one.output_tokens if one.first_token < 0 else 0
        return runs, outputs
    tree = RadixCache(1)
    prompts, outputs, fresh = [], [], 0
    answers = _answers(fold(run))
    for one in requests:
        event = one.arrived
        prompt, namespace = prompt_bytes(event.prompt), f"{event.namespace}\0{event.adapter}"
        tokens = prompt + answers.get(event.request_id, b"")
        most = len(tokens) // 4
        match = tree.match(namespace, tokens, most)
        known = tree.pages_of(match.node)[: match.pages] if match.node is not None else np.empty(0, np.int32)
        ids = np.concatenate((known, np.arange(fresh, fresh + most - len(known), dtype=np.int32)))
        fresh += most - len(known)
        tree.insert(namespace, tokens, ids)
        length = len(prompt) // 4
        prompts.append(_runs(ids[:length]))
        rest = ids[length:]
        if len(rest) and (np.diff(rest) != 1).any():  # part of the answer equals an earlier one: it cannot be one run
            outputs.append(fresh)
            fresh += len(rest)
        else:
            outputs.append(int(rest[0]) if len(rest) else fresh)
    return prompts, outputs


def _answers(steps: Steps) -> dict[RequestId, bytes]:
    """Return the output tokens of each request, packed int32."""
    parts: dict[RequestId, list[bytes]] = {}
    sent: Counter[RequestId] = Counter()
    for _, step in steps:
        for command in step.commands:
            if isinstance(command, StreamTokens):
                columns = (command.request_ids, command.offsets, command.token_counts)
                at = 0
                for request_id, offset, count in zip(*(column.tolist() for column in columns), strict=True):
                    new = command.tokens[at + max(sent[request_id] - offset, 0) : at + count]
                    parts.setdefault(request_id, []).append(new.astype(np.int32).tobytes())
                    sent[request_id] = max(sent[request_id], offset + count)
                    at += count
    return {request_id: b"".join(pieces) for request_id, pieces in parts.items()}


def _runs(ids: np.ndarray[Any, np.dtype[np.int32]]) -> list[int]:
    """Return ids as runs (first id, count) of consecutive ids."""
    runs: list[int] = []
    breaks = np.flatnonzero(np.diff(ids) != 1) + 1
    bounds = [0, *breaks.tolist(), len(ids)]
    for start, stop in pairwise(bounds):
        if stop > start:
            append_run(runs, int(ids[start]), stop - start)
    return runs


def _follow_ups(
    requests: Sequence[RecordedRequest], prompts: Sequence[Sequence[int]], outputs: Sequence[int]
) -> list[int]:
    """Return for each request the index of the request whose next turn it is, or -1.

    An id identifies all ids before it, so comparing the last id of an answer is enough.
    """
    ends: list[tuple[int, int]] = []  # of finished requests: (last id of the answer, index), sorted by id
    waiting: list[tuple[int, int, int]] = sorted(
        (one.ended_us, outputs[at] + one.output_tokens - 1, at)
        for at, one in enumerate(requests)
        if one.reason in COMPLETE and one.output_tokens
    )
    waiting.reverse()
    found = []
    for at, one in enumerate(requests):
        while waiting and waiting[-1][0] <= one.arrived.time_us:
            _, last, index = waiting.pop()
            ends.insert(bisect_left(ends, (last, index)), (last, index))
        best, position = (-1, -1), 0
        for first, count in zip(prompts[at][0::2], prompts[at][1::2], strict=True):
            for last, index in ends[bisect_left(ends, (first, -1)) : bisect_left(ends, (first + count, -1))]:
                length = sum(prompts[index][1::2]) + requests[index].output_tokens
                if position + last - first + 1 == length and index != at:
                    best = max(best, (length, index))
            position += count
        found.append(best[1])
    return found


def label_parts(label: str) -> tuple[str, int, int]:
    """Split a label into a form and two numbers, so that many labels take little memory: `s3t1` is `s{0}t{1}`, 3, 1."""
    match = _LABEL.fullmatch(label)
    if match is None:
        return label.replace("{", "{{").replace("}", "}}"), 0, 0
    before, number, between, part = match.groups()
    return f"{before}{{0}}" + (f"{between}{{1}}" if between else ""), int(number), int(part or 0)
