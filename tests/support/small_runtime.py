"""A runtime with a model so small that its arithmetic is exact, and every token depends on every one before it.

The model's "attention" adds up the values that lie in the KV pool for all positions of a row, weighted by position, as
whole numbers in float64. The next token is that sum modulo the vocabulary. So a row that reads a wrong page, or the
right page too early, draws another token, and no rounding depends on the other rows of the batch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.core import invariants
from lockstep.core.contract.commands import BatchPlan, FinishRequest, RejectRequest, RowTaken, Step
from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.events import ObservedEvent, RequestArrived, SamplingParams, TokenIds
from lockstep.core.journal.sinks import NoJournal
from lockstep.core.scheduler.engine import Engine
from lockstep.host.batches import Int32s, RowContext
from lockstep.host.loop import (
    NO_DEVICE_SERVICES,
    NO_REQUEST_SERVICES,
    HostClock,
    ResultExtras,
    RuntimeHost,
    TokenLogprobs,
)
from lockstep.host.services import DeviceServices, RequestServices
from lockstep.runtime.canary import Canary
from lockstep.runtime.draft_tree import TreeShape
from lockstep.runtime.drafting import DraftingRows, NgramDrafter
from lockstep.runtime.executor import Executor, LookAhead, Matchers, RunnableModel
from lockstep.runtime.forward import ForwardBatch
from lockstep.runtime.graphs import DecodeGraphs, Recorder
from lockstep.runtime.kv_pool import KvPool
from lockstep.runtime.overlap import CpuLane, WhenToRun
from lockstep.runtime.pieces import PieceGraphs, PieceRecorder
from lockstep.runtime.sampling import Sampled
from lockstep.runtime.tables import DeviceTables

VOCABULARY = 97
CPU = torch.device("cpu")
SMALL_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "hidden_act": "silu",
    "eos_token_id": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "dtype": "float32",
}
"""The config.json of a real model of the smallest size."""


class SumAttention:
    """Adds up all values of a row up to each new token's position."""

    name = "sum"
    graphs = True
    exact_lengths = False

    def __init__(self, pool: KvPool) -> None:
        self.pool = pool

    def plan(self, batch: ForwardBatch, graph: bool = False) -> None:
        """In a graph every row reads its whole page table: replays may differ only in the contents of tensors."""
        self._longest = batch.page_table.shape[1] * self.pool.page_size if graph else batch.longest
        counts = torch.from_numpy((batch.lengths_host - batch.starts_host).astype(np.int64))
        self._of_row = torch.arange(batch.count).repeat_interleave(counts)

    def run(self, layer: int, query: Tensor, key: Tensor, value: Tensor, batch: ForwardBatch) -> Tensor:
        self.pool.write(layer, key, value, batch)
        positions = torch.arange(self._longest)
        pages = batch.page_table[batch.rows.long()][:, positions // self.pool.page_size].long()
        values = self.pool.values[layer].view(-1)[pages * self.pool.page_size + positions % self.pool.page_size]
        upto = (values * (positions % 31 + 1)).cumsum(1)
        if batch.tree is None:
            return upto[self._of_row, batch.positions][:, None, None]
        at, numbers, shape = (
            batch.positions.clone(),
            torch.from_numpy(batch.tree.numbers.astype(np.int64)),
            batch.tree.shape,
        )
        depths, of_trees = torch.from_numpy(shape.depths.astype(np.int64)), len(at) - len(numbers)
        stands = at[of_trees:] - depths[numbers]
        at[of_trees:] = stands - 1
        total = upto[self._of_row, at.clamp(min=0)]
        sees = torch.from_numpy(shape.sees)[numbers]
        for place in range(len(numbers)):  # the tokens on the path of each, weighted by their positions
            seen = sees[place].nonzero()[:, 0]
            weights = (stands[place] + depths[seen]) % 31 + 1
            total[of_trees + place] += (values[self._of_row[of_trees + place], stands[place] + seen] * weights).sum()
        return total[:, None, None]


class SumModel:
    """The next token is the sum over all values before it, modulo the vocabulary."""

    def __init__(self) -> None:
        self.fail_at: Callable[[ForwardBatch], Exception | None] = lambda batch: None
        self.not_a_number: set[int] = set()  # tokens behind which the logits are no numbers
        self.batches: list[ForwardBatch] = []

    def forward(self, batch: ForwardBatch, attention: Any) -> Tensor:
        self.batches.append(batch)
        if (error := self.fail_at(batch)) is not None:
            raise error
        values = (batch.token_ids * 7919 + batch.positions * 104729 + 13) % 65537
        new = values.to(torch.float64)[:, None, None]
        total = attention.run(0, new, new, new, batch)
        return torch.cat((total[:, :, 0], batch.token_ids[:, None].to(torch.float64)), 1)

    def logits(self, hidden: Tensor) -> Tensor:
        best = hidden[:, :1] % VOCABULARY
        logits = -((torch.arange(VOCABULARY) - best).abs()).to(torch.float32)
        for token in self.not_a_number:
            logits[hidden[:, 1] == token] = torch.nan
        return logits


def next_token(tokens: Sequence[int]) -> int:
    """Return the token that `SumModel` computes after these tokens."""
    total = sum((token * 7919 + p * 104729 + 13) % 65537 * (p % 31 + 1) for p, token in enumerate(tokens))
    return total % VOCABULARY


def alone(prompt: Sequence[int], count: int, stops: Sequence[int] = ()) -> list[int]:
    """The answer to a request that is the only one, without any cache: greedy, up to a stop."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
        if tokens[-1] in stops:
            break
    return tokens[len(prompt) :]


class Foreseeing(NgramDrafter):
    """Drafts the tokens that `SumModel` will compute, wrong after a number that follows from row and position."""

    def draft(self, drafting: DraftingRows) -> Tensor:
        rows, stands, newest, page_table, drafts, reach, stands_host, _ = drafting
        assert (stands <= torch.from_numpy(stands_host)).all()
        assert (reach - stands).tolist() == drafts.tolist()
        guesses = []
        for row, stand, token in zip(rows.tolist(), stands.tolist(), newest.tolist(), strict=True):
            at = torch.arange(stand)
            slots = (page_table[row][at >> self.page_shift].long() << self.page_shift) + (at & self.page_mask)
            tokens = [*self.tokens[slots].tolist(), token]
            for number in range(int(drafts.max())):
                wrong = number >= (row * 7 + stand * 5 + stand // 3) % 5
                tokens.append((next_token(tokens) + wrong) % VOCABULARY)
            guesses.append(tokens[stand + 1 :])
        return torch.tensor(guesses)


class ForeseeingTree(Foreseeing):
    """Drafts trees with the tokens that `SumModel` will compute among the alternatives, at some of the places."""

    def draft_tree(self, drafting: DraftingRows, shape: TreeShape) -> Tensor:
        rows, stands, newest, page_table, *_ = drafting
        guesses = []
        for row, stand, token in zip(rows.tolist(), stands.tolist(), newest.tolist(), strict=True):
            at = torch.arange(stand)
            slots = (page_table[row][at >> self.page_shift].long() << self.page_shift) + (at & self.page_mask)
            paths = {0: [*self.tokens[slots].tolist(), token]}
            seen: dict[int, int] = {}
            for number, parent in enumerate(shape.parents.tolist(), 1):
                rank = seen[parent] = seen.get(parent, -1) + 1
                path = paths[parent]
                right = (row * 7 + stand * 5 + len(path)) % 4
                paths[number] = [*path, (next_token(path) + (rank - right)) % VOCABULARY]
            guesses.append([paths[number][-1] for number in range(1, 1 + len(shape.parents))])
        return torch.tensor(guesses)


class GreedySampler:
    """The likeliest token that is allowed; ties go to the lowest id."""

    def __init__(self) -> None:
        self.taken: list[tuple[RowTaken, RowContext]] = []

    def take_row(self, taken: RowTaken, context: RowContext) -> None:
        self.taken.append((taken, context))

    def remembers(self, rows_host: Int32s) -> bool:
        return False

    def sample(
        self, logits: Tensor, rows: Tensor, positions: Tensor, rows_host: Int32s, allowed: Tensor | None
    ) -> Sampled:
        if allowed is not None:
            ids = torch.arange(VOCABULARY)
            logits = logits.masked_fill(allowed[:, ids // 32] >> ids % 32 & 1 == 0, -torch.inf)
        tokens = logits.nan_to_num().argmax(1)
        logprobs = logits.log_softmax(1)
        tops = logprobs.topk(2)
        chosen = logprobs.gather(1, tokens[:, None])[:, 0]
        return Sampled(tokens.int(), logits.isnan().any(1), chosen, tops.indices.int(), tops.values)


@dataclass
class Answer:
    """A sink that keeps all tokens, and refuses tokens that no client may receive."""

    request_id: int = -1
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    messages: int = 0
    end: FinishRequest | RejectRequest | None = None
    extras: ResultExtras | None = None
    failure: str = ""
    on_tokens: Callable[[int, list[int], TokenLogprobs | None], None] | None = None
    over: threading.Event = field(default_factory=threading.Event)

    def take(self, offset: int, tokens: list[int], logprobs: TokenLogprobs | None) -> None:
        assert offset == len(self.tokens), "a gap or a repeat"
        assert not self.over.is_set(), "tokens behind the end"
        self.tokens += tokens
        self.messages += 1
        if logprobs is not None:
            self.logprobs += logprobs.logprobs.tolist()

    def finished(self, end: FinishRequest, extras: ResultExtras) -> None:
        self._ends()
        self.end, self.extras = end, extras

    def rejected(self, end: RejectRequest) -> None:
        self._ends()
        self.end = end

    def failed(self, message: str) -> None:
        self._ends()
        self.failure = message

    def _ends(self) -> None:
        assert not self.over.is_set(), "a second end"
        self.over.set()

    @property
    def reason(self) -> str:
        return self.failure or (self.end.reason if self.end is not None else "open")


def request(prompt: Sequence[int], count: int, **more: Any) -> RequestArrived:
    """A request for this number of tokens behind this prompt."""
    return RequestArrived(
        0, request_id=-1, prompt=TokenIds(np.array(prompt, np.int32).tobytes()), max_new_tokens=count, **more
    )


def small_config(**settings: Any) -> SchedConfig:
    """Settings, with small defaults."""
    small = {"page_size": 4, "pages": 64, "context_tokens_max": 96, "max_running_requests": 8}
    return SchedConfig(**{**small, "chunked_prefill_size": 16, **settings})


class SmallRuntime:
    """Engine, executor and host over the small model.

    Args:
        settings: of SchedConfig, over small ones.
    """

    def __init__(
        self,
        *,
        run_at: WhenToRun = "launch",
        canary: bool = True,
        journal: Any = None,
        matchers: Matchers | None = None,
        clock: HostClock | None = None,
        check: bool = True,
        graphs: Recorder | None = None,
        graph_sizes: Sequence[int] = (1, 2, 4, 8),
        pieces: PieceRecorder | None = None,
        piece_sizes: Sequence[int] = (4, 8, 16, 32),
        requests: RequestServices = NO_REQUEST_SERVICES,
        device: DeviceServices = NO_DEVICE_SERVICES,
        drafter: type[NgramDrafter] = NgramDrafter,
        **settings: Any,
    ) -> None:
        self.config = small_config(**settings)
        self.engine = Engine(self.config)
        self.clock = clock or HostClock()
        lane = CpuLane(self.clock, run_at=run_at)
        self.executor = make_executor(
            self.config,
            lane,
            canary=canary,
            matchers=matchers,
            graphs=graphs,
            graph_sizes=graph_sizes,
            drafter=drafter,
            pieces=pieces,
            piece_sizes=piece_sizes,
        )
        self.model: SumModel = self.executor.model  # type: ignore[assignment]
        self.steps: list[tuple[ObservedEvent, Step]] = []
        self.plans: list[BatchPlan] = []
        self._check = check
        self.host = RuntimeHost(
            self.engine,
            self.executor,
            NoJournal() if journal is None else journal,
            self.clock,
            requests=requests,
            device=device,
            observe=self._observe,
        )
        self.deepest = 0  # batches in flight at once

    def _observe(self, event: ObservedEvent, step: Step) -> None:
        self.steps.append((event, step))
        plan = step.launched()
        if plan is not None:
            self.plans.append(plan)
        self.deepest = max(self.deepest, len(self.engine.in_flight))
        if self._check:
            invariants.check(self.engine)

    def submit(self, prompt: Sequence[int], count: int, **more: Any) -> Answer:
        answer = Answer()
        answer.request_id = self.host.submit(request(prompt, count, **more), Ends(answer))
        return answer

    def run(self) -> None:
        self.host.run(until_idle=True)

    def decided(self, kind: type) -> list[Any]:
        return [event for _, step in self.steps for event in step.decided if isinstance(event, kind)]


class Ends:
    """`host.Sink` of an Answer."""

    def __init__(self, answer: Answer) -> None:
        self.tokens = lambda *what: (answer.on_tokens or answer.take)(*what)
        self.finished = answer.finished
        self.rejected = answer.rejected
        self.failed = answer.failed


def make_executor(
    config: SchedConfig,
    lane: CpuLane,
    *,
    canary: bool = True,
    matchers: Matchers | None = None,
    graphs: Recorder | None = None,
    graph_sizes: Sequence[int] = (1, 2, 4, 8),
    drafter: type[NgramDrafter] = NgramDrafter,
    pieces: PieceRecorder | None = None,
    piece_sizes: Sequence[int] = (4, 8, 16, 32),
) -> Executor:
    """The executor over the small model.

    With `graphs` its decodes are padded to `graph_sizes` rows and recorded, with `pieces` other passes to `piece_sizes`
    tokens.
    """
    pool = KvPool(1, config.pages, config.page_size, 1, 1, torch.float64, CPU)
    context = config.context_tokens_max if graphs is not None else None
    tables = DeviceTables(
        config.rows_max,
        config.pages,
        config.page_size,
        CPU,
        context_tokens=context,
        debug=True,
        speculates=config.speculates or config.jumps,
    )
    watching = None
    if canary:
        watching = Canary(config.rows_max, config.pages, config.page_size, config.context_tokens_max, CPU)
    model, attention, decodes = SumModel(), SumAttention(pool), None
    if graphs is not None:
        decodes = DecodeGraphs(model, attention, tables, graph_sizes, graphs)
        decodes.prepare(lane)
    cut = None
    if pieces is not None:
        cut = PieceGraphs(model, attention, piece_sizes, pieces, lane.upload)
        cut.prepare(lane)
    drafts = drafter((config.pages + 1) * config.page_size, config.page_size, CPU) if config.speculates else None
    return Executor(
        RunnableModel(model, attention, decodes, pieces=cut),
        GreedySampler(),
        tables,
        lane,
        matchers=matchers,
        canary=watching,
        ahead=LookAhead(drafts, jumps=config.jumps),
    )


SAMPLED = SamplingParams(top_logprobs=1)
