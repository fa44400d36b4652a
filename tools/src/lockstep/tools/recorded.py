"""The requests of a journal, read back as a workload that can be simulated again.

A run that `lockstep simulate` wrote states how to get its workload, which is exact (sim/cli/requested.py). Of any other
journal the requests are read off the events: when each came, its prompt, how many tokens it was given. A request whose
prompt begins with the prompt and the whole answer of an earlier one is that one's next turn: it is sent again when that
answer has ended, as long after it as it was, so that a conversation waits for a slower engine as its user did.

Prompts spelt out as ids become runs of made-up ids that are equal exactly where the ids were, behind equal ones.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.core.contract.commands import StreamTokens
from lockstep.core.contract.errors import ConfigError
from lockstep.core.contract.events import (
    RequestArrived,
    RequestFinished,
    RequestId,
    RequestRejected,
    TokenDigest,
    TokenRuns,
)
from lockstep.core.contract.samples import sample_count
from lockstep.core.kv.radix import RadixCache
from lockstep.core.requests.table import prompt_bytes
from lockstep.sim.workload.samples import with_counts
from lockstep.sim.workload.token_runs import append_run
from lockstep.sim.workload.turns import TurnLabel, Turns, TurnsBuilder, TurnStart, WorkloadError
from lockstep.sim.workload.workload import Workload, workload_digest
from lockstep.tools.runs import Walk

COMPLETE = ("length", "stop", "text_stop", "grammar")  # ends behind which a conversation goes on
_LABEL = re.compile(r"([^0-9{}]*)(0|[1-9][0-9]{0,8})(?:([^0-9{}]+)(0|[1-9][0-9]{0,8}))?")


@dataclass
class RecordedRequest:
    """A request as it was recorded."""

    arrived: RequestArrived
    output_tokens: int = 0
    first_token: int = -1
    ended_us: int = -1
    reason: str = ""


def journal_workload(run: Path) -> Workload:
    """The requests of a journal as a workload. Raises WorkloadError if it has none, or if prompts were not kept."""
    asked = _asked(Walk(run))
    if not asked:
        raise WorkloadError(
            str(run), "no request arrived in this journal", "`lockstep journal info` says what is in it"
        )
    notes = _left_out(asked)
    prompts, outputs = _chained(run, asked)
    after = _follow_ups(asked, prompts, outputs)
    builder = TurnsBuilder()
    origin_us = asked[0].arrived.time_us
    for at, one in enumerate(asked):
        event, leader = one.arrived, after[at]
        if leader >= 0:
            start = TurnStart(after=leader, think_us=event.time_us - asked[leader].ended_us)
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
    turns = _on_adapters(builder.build(), [one.arrived.adapter for one in asked])
    samples = np.array([sample_count(one.arrived) for one in asked], np.int32)
    if (samples > 1).any():
        turns = with_counts(turns, samples)
    turned = sum(leader >= 0 for leader in after)
    if turned:
        notes.append(
            f"{turned:,} requests go on where an earlier answer ended: they are sent as long behind it as they were"
        )
    return Workload(run.name, str(run), "journal", workload_digest(turns), turns, notes=tuple(notes))


def _on_adapters(turns: Turns, names: Sequence[str]) -> Turns:
    """The same turns, each on the adapter of its name; "" is the model alone."""
    if not any(names):
        return turns
    codes = {name: code for code, name in enumerate(dict.fromkeys(names))}
    return replace(turns, adapter=np.array([codes[name] for name in names], np.int32), adapters=tuple(codes))


def _asked(walk: Walk) -> list[RecordedRequest]:
    """Every request in the order of its arrival, with what became of it."""
    found: dict[RequestId, RecordedRequest] = {}
    for _, event, step in walk:
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


def _left_out(asked: Sequence[RecordedRequest]) -> list[str]:
    """Features of the requests that the simulator's workloads lack, one sentence each."""
    notes = []
    counts = Counter(
        name
        for one in asked
        for name in ("priority", "session", "spans", "deadline_us", "finish_by_us", "stop_texts")
        if getattr(one.arrived, name) not in (None, "", ())
    )
    for name, count in counts.items():
        notes.append(f"`{name}` of {count:,} requests is not simulated")
    cut = sum(one.reason in ("cancelled", "timeout", "error", "") for one in asked)
    if cut:
        notes.append(f"{cut:,} requests did not get their whole answer: they are taken to have wanted what they got")
    return notes


def _chained(run: Path, asked: Sequence[RecordedRequest]) -> tuple[list[list[int]], list[int]]:
    """Prompts as runs of chained ids, and the first id of each output."""
    kinds = {type(one.arrived.prompt) for one in asked}
    if TokenDigest in kinds:
        raise WorkloadError(
            str(run), "its prompts were not kept, only their digests", "record with the tokens to simulate it again"
        )
    plain = kinds == {TokenRuns} and not any(one.arrived.namespace or one.arrived.adapter for one in asked)
    if plain:
        runs = [list(one.arrived.prompt.runs) for one in asked if isinstance(one.arrived.prompt, TokenRuns)]
        ends = [first + count for each in runs for first, count in zip(each[0::2], each[1::2], strict=True)]
        fresh = max(0, *ends, *(one.first_token + one.output_tokens for one in asked))
        outputs = []
        for one in asked:
            outputs.append(one.first_token if one.first_token >= 0 else fresh)
            fresh += one.output_tokens if one.first_token < 0 else 0
        return runs, outputs
    tree = RadixCache(1)
    prompts, outputs, fresh = [], [], 0
    answers = _answers(Walk(run))
    for one in asked:
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
        if len(rest) and (np.diff(rest) != 1).any():  # an answer that others had in part: it cannot be one run
            outputs.append(fresh)
            fresh += len(rest)
        else:
            outputs.append(int(rest[0]) if len(rest) else fresh)
    return prompts, outputs


def _answers(walk: Walk) -> dict[RequestId, bytes]:
    """The tokens that each request was sent, packed int32."""
    parts: dict[RequestId, list[bytes]] = {}
    sent: Counter[RequestId] = Counter()
    for _, _, step in walk:
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
    """Ids as runs of consecutive ones."""
    runs: list[int] = []
    breaks = np.flatnonzero(np.diff(ids) != 1) + 1
    bounds = [0, *breaks.tolist(), len(ids)]
    for start, stop in pairwise(bounds):
        if stop > start:
            append_run(runs, int(ids[start]), stop - start)
    return runs


def _follow_ups(
    asked: Sequence[RecordedRequest], prompts: Sequence[Sequence[int]], outputs: Sequence[int]
) -> list[int]:
    """For each request the one that it is the next turn of, or -1. Ids are chained: a last id stands for all before
    it."""
    ends: list[tuple[int, int]] = []  # of finished requests: (last id of the answer, index), sorted by id
    waiting: list[tuple[int, int, int]] = sorted(
        (one.ended_us, outputs[at] + one.output_tokens - 1, at)
        for at, one in enumerate(asked)
        if one.reason in COMPLETE and one.output_tokens
    )
    waiting.reverse()
    found = []
    for at, one in enumerate(asked):
        while waiting and waiting[-1][0] <= one.arrived.time_us:
            _, last, index = waiting.pop()
            ends.insert(bisect_left(ends, (last, index)), (last, index))
        best, position = (-1, -1), 0
        for first, count in zip(prompts[at][0::2], prompts[at][1::2], strict=True):
            for last, index in ends[bisect_left(ends, (first, -1)) : bisect_left(ends, (first + count, -1))]:
                length = sum(prompts[index][1::2]) + asked[index].output_tokens
                if position + last - first + 1 == length and index != at:
                    best = max(best, (length, index))
            position += count
        found.append(best[1])
    return found


def label_parts(label: str) -> tuple[str, int, int]:
    """A label as a form and two numbers, so that a million labels take little room: `s3t1` is `s{0}t{1}`, 3, 1."""
    match = _LABEL.fullmatch(label)
    if match is None:
        return label.replace("{", "{{").replace("}", "}}"), 0, 0
    before, number, between, part = match.groups()
    return f"{before}{{0}}" + (f"{between}{{1}}" if between else ""), int(number), int(part or 0)


def output_limit(run: Path) -> int | None:
    """The limit of output that requests came with, if some ended before it; None if each was as long as its limit.

    The scheduler reserves by it. The simulator has one limit for all: the largest.
    """
    asked = _asked(Walk(run))
    early = any(one.reason in COMPLETE and one.output_tokens < one.arrived.max_new_tokens for one in asked)
    return max(one.arrived.max_new_tokens for one in asked) if early else None


def scaled(workload: Workload, rate_scale: float) -> Workload:
    """The same requests, with every gap between arrivals divided by `rate_scale`; think times stay."""
    if rate_scale == 1.0:
        return workload
    if not 1e-6 <= rate_scale <= 1e6:
        raise ConfigError(f"`rate_scale` must be from 1e-6 to 1e6, got `{rate_scale}`\nhint: 2 halves every gap")
    arrivals_us = np.rint(workload.turns.arrival_us / rate_scale).astype(np.int64)
    turns = workload.turns.at(arrivals_us)
    return replace(workload, turns=turns, digest=workload_digest(turns))
