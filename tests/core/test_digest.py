"""The digest of commands: which of their fields it covers, and that the digests of old journals stay as they are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from lockstep.core.contract.commands import (
    AfterBatch,
    BatchPlan,
    BlockCopy,
    BlockFetch,
    BlockPasses,
    BlockStore,
    CancelTransfer,
    Command,
    CompileGrammar,
    ControlAnswered,
    CopyToHost,
    Halves,
    HiddenSpan,
    HybridChanges,
    HybridTransfer,
    LaunchBatch,
    LoadAdapter,
    LoadFromHost,
    LogprobSpan,
    MeasureExpertLoad,
    MediaSpan,
    MoveExperts,
    PageDeltas,
    PrefetchFromStorage,
    ProposeBatch,
    Ranks,
    SampleBatch,
    Speculation,
    StartTransfer,
    Step,
    StreamTokens,
    WriteToStorage,
)
from lockstep.core.contract.digest import EMPTY_DIGEST, step_digest
from lockstep.core.contract.events import AdmissionDeferred, Grammar, RequestAdmitted, RequestRetracted


def ids(*values: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array(values, np.int64)


def ints(*values: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array(values, np.int32)


PLAIN = BatchPlan(
    batch_id=4,
    mode="decode",
    rows=ints(1, 2),
    request_ids=ids(7, 8),
    starts=ints(4, 9),
    stops=ints(5, 10),
    token_ids=ints(),
    sample_rows=ints(0, 1),
)
FULL = BatchPlan(
    batch_id=5,
    mode="mixed",
    rows=ints(1, 2, 3),
    request_ids=ids(7, 8, 9),
    starts=ints(4, 9, 0),
    stops=ints(5, 12, 3),
    extend_rows=2,
    token_ids=ints(50, 51),
    sample_rows=ints(0, 2),
    deltas=PageDeltas(ints(3, 4), ints(1, 0, 1), ints(3), ints(2)),
    generation=1,
    microbatch=1,
    starts_after=(AfterBatch(2, 3, 3),),
    hybrid=HybridChanges(*(ints(one) for one in range(8))),
    speculation=Speculation(2, ints(2), "eagle", ints(0), ints(60), ints(0, 1)),
    ranks=Ranks(3, (4, 5), "max_length", use_graph=False, logit_rows=(1, 2), draft_passes=2),
    sample_after=3,
    layers=(0, 4),
    sms=70,
    steps=2,
    pooled_rows=ints(1),
    media_spans=(MediaSpan(0, 4, 5, b"cat", 2),),
    logprob_spans=(LogprobSpan(1, 9, ints(3, 4)),),
    hidden_spans=(HiddenSpan(1, 9),),
    halves=Halves(1, 1),
    blocks=BlockPasses(ints(1, 2, 3), ints(0, 1, 0)),
)
COPIES = (BlockCopy("window", ints(1, 2), ints(3, 4)),)
COMMANDS: tuple[Command, ...] = (
    LaunchBatch(FULL, "deferred"),
    SampleBatch(5, ((7, 2, (50,)),)),
    ProposeBatch(3, (4, 5, 6), None, 1, 1),
    StreamTokens(ids(7, 8), ints(0, 4), ints(2, 1), ints(50, 51, 52)),
    CompileGrammar(Grammar("regex", "a+", b"digest")),
    LoadAdapter("x", 2, 1),
    StartTransfer(7, 8, "", "send", ints(1, 2), 4, 5, False, 8, 1, 2, 3, 4, HybridTransfer(ints(5), 6)),
    CancelTransfer(7),
    CopyToHost(1, ints(1, 2), ints(3, 4), True, 1, COPIES),
    LoadFromHost(2, ints(1, 2), ints(3, 4), 1, COPIES),
    PrefetchFromStorage(
        3,
        (b"a", b"b", b"c"),
        ints(1, 2),
        1,
        (BlockFetch("state", (b"d", b"e", b"f"), (True, False, True), 1, ints(5)),),
        1,
    ),
    WriteToStorage(4, (b"a", b"b", b"c"), ints(1, 2), 1, (BlockStore("state", (b"g",), ints(5)),), b"z"),
    MeasureExpertLoad(1),
    MoveExperts(2, (0, 1), ints(3, 4), 1),
    ControlAnswered(3, True, "why"),
)
LEFT_OUT = {
    "LaunchBatch": {
        "plan.rows",  # of the first batches of a request: the admission has them
        "plan.steps",  # the ends of spans have it
        "plan.token_ids",
        "plan.ids_digest",
        "plan.deltas.opened_rows",
        "plan.deltas.opened_index",
        "plan.speculation.forced_tokens",
        "plan.logprob_spans.targets",
    },
    "SampleBatch": {"grammar_advance"},
    "StreamTokens": {"tokens", "ids_digest"},
    "CompileGrammar": {"grammar.kind", "grammar.source"},
    "ProposeBatch": {"generation"},
    "StartTransfer": {"peer", "after_batch", "weights_version", "cached_tokens", "adapter_version"},
    "CopyToHost": {"generation"},
    "LoadFromHost": {"generation"},
    "PrefetchFromStorage": {"generation", "keys", "blocks.keys"},  # the last key covers those before it
    "WriteToStorage": {"generation", "keys", "after"},
    "MeasureExpertLoad": {"generation"},
    "MoveExperts": {"generation"},
    "ControlAnswered": {"message"},
}
"""Fields that the digest does not cover: observed values, and values that follow from covered ones."""
OTHER_WORDS = {"mixed": "extend", "deferred": "immediate"}


def digest(*commands: Command) -> bytes:
    return step_digest(EMPTY_DIGEST, Step(commands=list(commands)))


def changed(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield a value with one part changed, for each part, and the name of the part."""
    if isinstance(value, bool):
        yield "", not value
    elif isinstance(value, int):
        yield "", value + 1
    elif isinstance(value, str):
        yield "", OTHER_WORDS.get(value, value + "x")
    elif isinstance(value, bytes):
        yield "", value + b"x"
    elif isinstance(value, np.ndarray):
        for at in range(value.size):
            other = value.copy()
            other[at] += 1
            yield "", other
    elif isinstance(value, tuple):
        for at, one in enumerate(value):
            for name, other in changed(one):
                yield name, (*value[:at], other, *value[at + 1 :])
    elif isinstance(value, msgspec.Struct):
        for field in value.__struct_fields__:
            for name, other in changed(getattr(value, field)):
                yield f"{field}.{name}".rstrip("."), msgspec.structs.replace(value, **{field: other})


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: type(command).__name__)
def test_the_digest_covers_every_field_of_a_command_but_those_that_follow_from_others(command: Command) -> None:
    left_out = {name for name, other in changed(command) if digest(other) == digest(command)}
    assert left_out == LEFT_OUT.get(type(command).__name__, set())


@pytest.mark.parametrize(
    ("commands", "known"),
    [
        ((LaunchBatch(PLAIN),), "75caad505478dbe22a40f491061adcf4"),
        (COMMANDS, "540fdc9fac9ec276aff7aa132d538d51"),
    ],
    ids=["plain", "full"],
)
def test_digests_of_old_journals_stay_as_they_are(commands: tuple[Command, ...], known: str) -> None:
    assert digest(*commands).hex() == known


def test_a_decided_event_leaves_out_its_last_fields_with_default_values_only() -> None:
    events = (
        RequestAdmitted(1, 2, 3, 4, 5, 6),
        RequestAdmitted(1, 2, 3, 4, 5, 6, 0, 7),
        RequestAdmitted(1, 2, 3, 4, 5, 6, 7, 0, 8),
        RequestAdmitted(1, 2, 3, 4, 5, 6, 0, 0, 0, 9),
        AdmissionDeferred(1, 2, "kv_budget", 3, 4, 0),
        AdmissionDeferred(1, 2, "kv_budget", 3, 4),
        AdmissionDeferred(1, 2, "kv_budget", 3, 0, 0),
        AdmissionDeferred(1, 2, "kv_budget", 3),
        RequestRetracted(1, 2, 3, 4, -1, "pages"),
        RequestRetracted(1, 2, 3, 4, 9, "pages"),
    )
    step = Step(decided=list(events))
    assert step_digest(EMPTY_DIGEST, step).hex() == "2e95f533220220d57c2766cc3afbe4e6"
    assert len({step_digest(EMPTY_DIGEST, Step(decided=[event])) for event in events}) == len(events)
