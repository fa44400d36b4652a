"""What a tagged device keeps: of its rows, of the requests on them, of sessions, and of plans on the stream."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lockstep.core.contract.commands import BatchPlan
from lockstep.core.contract.events import RequestId
from lockstep.core.requests.table import Int32s

BASE = ("", 0)  # the adapter of requests without one


@dataclass
class Row:
    """What the device keeps for one row of the request table."""

    request_id: RequestId
    epoch: int
    slot: int = -1  # of its adapter
    table: list[int] = field(default_factory=list)
    reach: int = 0  # positions that plans have claimed so far, at most
    least: int = 0  # positions that they have claimed at least
    passes: int = 0  # over its newest block; 0: the next pass begins another one
    stands: int = 0  # the first position that is not computed, according to the device
    live: bool = True  # its request has not left yet
    prefix_ids: list[int] = field(default_factory=list)  # the required content of its cells
    newest: tuple[int, int] | None = None  # position and token of the newest sample
    failed: bool = False  # a batch that named it failed; what it computes from then on is garbage
    matcher: list[int] | None = None  # the tokens it has taken in, for a row with a grammar
    hidden_states: bool = False
    weights: int = 0  # when the row was taken; its media were encoded with these or newer ones


@dataclass
class Story:
    """The tokens of a request, from the events and from the executor's own samples."""

    namespace: object  # the key that separates its KV from that of equal tokens
    tokens: list[Any]  # ids; in a span (digest, number of the embedding) instead
    prompt_tokens: int
    session: str = ""
    adapter: tuple[str, int] = BASE
    grammar_ends: int | None = None  # output tokens after which its grammar admits nothing more
    about: list[object] = field(default_factory=list)  # other inputs of its KV, by position of the prompt
    encoder_digests: set[bytes] = field(default_factory=set)
    pooled: bool = False
    ends_with_prompt: bool = False
    logprobs_wanted: range = range(0)  # positions
    hidden_wanted: bool = False
    hidden_from: int = 0  # the positions before it are those kept by its session
    logprobs: list[int] = field(default_factory=list)  # positions whose prompt logprobs were delivered
    hidden: list[int] = field(default_factory=list)


@dataclass
class Kept:
    """The part of a session that is kept: the beginning of a Story."""

    tokens: list[Any] = field(default_factory=list)
    about: list[object] = field(default_factory=list)
    encoder_digests: set[bytes] = field(default_factory=set)

    def first(self, tokens: int | None) -> Kept:
        """Its first tokens; None for all."""
        kept, about = self.tokens[:tokens], self.about[:tokens]
        if len(kept) < len(self.tokens) and isinstance(self.tokens[len(kept)], tuple):
            positions = self.tokens[len(kept)][1]  # of the span that is cut, 0 if it is left out
            for i in range(len(kept) - positions, len(kept)):
                about[i] = (*about[i][:-1], positions)
        digests = {token[0] for token in kept if isinstance(token, tuple)}
        return Kept(kept, about, self.encoder_digests & digests)


@dataclass(eq=False)
class Launched:
    """A plan on the stream, with a copy of its arrays from the moment of its launch."""

    plan: BatchPlan
    copy: bytes
    pages: dict[int, set[int]]  # by row: every page its positions use
    tables: dict[int, list[int]]  # by row: its page table as this plan must see it
    may_sample: bool = True  # it was not deferred, or its SampleBatch has come
    computed: bool = False  # its forward ran
    fed_back: dict[int, list[int]] = field(default_factory=dict)  # by position in the plan: tokens before the last
    executed: bool = False  # and it was sampled
    tokens: Int32s | None = None
    starts: dict[int, int] = field(default_factory=dict)  # by position in the plan: where a verifying row began
    accepted: dict[int, int] = field(default_factory=dict)  # and how many tokens it got
    drafts: dict[int, int] = field(default_factory=dict)  # and how many drafts it verifies; of a tree, its longest path
    right: dict[int, list[int]] = field(default_factory=dict)  # and the numbers of its right drafts, of a tree
    most: dict[int, int] = field(default_factory=dict)  # by row: its last possible position, given the results so far
