"""A BatchPlan of the core as vLLM's SchedulerOutput.

The workers keep a block table per request and append to it. A request that resumes after it was retracted is sent with
its whole table.

**Drafts.** A plan names how many drafts each row verifies. With synchronous scheduling the drafts have come back from
the workers, which may have proposed fewer. With asynchronous scheduling they stay with the workers: each is a
placeholder of -1, and positions are sent as if all drafts in flight were right; the workers correct them. Drafters with
layers of their own write KV some positions behind those of the plan. Where the block table has no entry for these, its
buffer has zeros: the writes go to the null block, and only later drafts of the same pass read them.

Pages of the core are blocks as in `groups.py`: page p is block p + 1, and block 0 is vLLM's null block.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from lockstep.core.contract.errors import ContractError
from lockstep.vllm.groups import FIRST_BLOCK
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

if TYPE_CHECKING:
    from lockstep.core.contract.commands import BatchPlan, PageDeltas
    from lockstep.core.contract.events import RequestId
    from lockstep.vllm.groups import KvGroups
    from lockstep.vllm.media import EncoderInputs
    from lockstep.vllm.requests import Tracked

PLACEHOLDER = -1  # a draft that only the workers have


class OutputBuilder:
    """Turns plans into scheduler outputs. It records which requests ran in the step before, as the workers do."""

    def __init__(
        self,
        *,
        tokens_max: int,
        context_tokens_max: int,
        groups: KvGroups,
        drafts_stay: bool,
        v2_runner: bool,
        sends_tokens: bool = False,
        uses_mrope: bool,
        media: EncoderInputs,
    ) -> None:
        """
        Args:
            tokens_max: the most tokens of one pass for which the workers have buffers.
            context_tokens_max: vLLM's max_model_len.
            groups: KV cache groups of the model.
            drafts_stay: whether drafts stay with the workers, as they do with asynchronous scheduling.
            v2_runner: whether the workers run vLLM's model runner V2, which gets resumed requests as new ones.
            sends_tokens: whether plans have the tokens to be computed, as workers of all pipeline stages but the last
                need them: the last stage has its own samples.
            uses_mrope: whether the model has positions of several dimensions, which the workers compute from the items.
            media: multimodal items, of all requests.
        """
        self._tokens_max = tokens_max
        self._context_tokens_max = context_tokens_max
        self.drafts: dict[str, list[int]] = {}  # by request, proposed by the workers for its next verification
        self._groups = groups
        self._drafts_stay = drafts_stay
        self._v2 = v2_runner
        self._sends_tokens = sends_tokens
        self._uses_mrope = uses_mrope
        self._media = media
        self._ran_before: set[str] = set()

    def forget_previous(self) -> None:
        """Treat the next step as if no request had run in the step before, as the workers do after an empty step."""
        self._ran_before.clear()

    def build(self, plan: BatchPlan, tracked: Mapping[RequestId, Tracked], output: SchedulerOutput) -> None:
        """Fill `output`, an empty SchedulerOutput, with what the plan runs.

        Raises: ContractError for a plan that vLLM's workers cannot carry out.
        """
        groups = self._groups
        if plan.hybrid is not None:
            groups.assign(plan.hybrid)
        blocks = new_blocks(plan.deltas) if plan.deltas.pages.size else {}
        taken = {one.row for one in plan.rows_taken}
        cached = output.scheduled_cached_reqs
        scheduled = output.num_scheduled_tokens
        req_ids, counts, outputs, tables = (
            cached.req_ids, cached.num_computed_tokens, cached.num_output_tokens, cached.new_block_ids
        )  # fmt: skip
        ran_before, extend_rows = self._ran_before, plan.extend_rows
        rows, starts, stops = plan.rows.tolist(), plan.starts.tolist(), plan.stops.tolist()
        if plan.speculation is not None:
            lengths = plan.speculation.draft_lengths.tolist()
            starts[extend_rows:] = [stop - 1 - n for stop, n in zip(stops[extend_rows:], lengths, strict=True)]
            self._add_drafts(lengths, starts[extend_rows:], plan.request_ids[extend_rows:].tolist(), tracked, output)
        drafted = output.scheduled_spec_decode_tokens
        for i, core_id in enumerate(plan.request_ids.tolist()):
            entry = tracked[core_id]
            request_id, row, start = entry.request.request_id, rows[i], starts[i]
            scheduled[request_id] = stops[i] - start if i < extend_rows else 1 + len(drafted.get(request_id, ()))
            if i < extend_rows and entry.request.mm_features:
                self._add_media(entry, start, stops[i], output)
            added = blocks.get(row)
            if row in taken:
                entry.blocks = _whole_table(added, request_id)
                entry.windows = groups.windows_of(entry.blocks)
                entry.state = groups.state_of(row)
                if not entry.sent or self._v2:
                    output.scheduled_new_reqs.append(self._new(entry, start))
                    entry.sent = True
                    continue
                cached.resumed_req_ids.add(request_id)
                table = groups.tables(entry.blocks, entry.windows, entry.state)
            elif added is None:
                table = None
            else:
                first, ids = added
                if first != len(entry.blocks):
                    raise ContractError(
                        f"request {request_id}: the plan changes entry {first} of a block table of "
                        f"{len(entry.blocks)}; vLLM's workers only append"
                    )
                windows = groups.windows_of(ids)
                entry.blocks += ids
                entry.windows += windows
                table = groups.tables(ids, windows)
            req_ids.append(request_id)
            counts.append(start)
            outputs.append(len(entry.outputs) if i < extend_rows else start + 1 - entry.prompt_tokens)
            tables.append(table)
            if self._sends_tokens:
                cached.new_token_ids.append(list(entry.tokens[start : stops[i]]))
            if request_id not in ran_before and not self._v2:
                cached.all_token_ids[request_id] = list(entry.tokens)
        total = sum(scheduled.values())
        if total > self._tokens_max:
            raise ContractError(f"the plan has {total} tokens; vLLM's workers have buffers for {self._tokens_max}")
        output.total_num_scheduled_tokens = total
        self._ran_before = set(scheduled)

    def _add_drafts(
        self,
        lengths: list[int],
        starts: list[int],
        core_ids: list[RequestId],
        tracked: Mapping[RequestId, Tracked],
        output: SchedulerOutput,
    ) -> None:
        """Add the drafts that the plan's verifying rows verify: of those proposed, as many as `lengths` allows.

        A drafter may propose fewer than the plan allows; the row then verifies these.
        """
        for core_id, start, allowed in zip(core_ids, starts, lengths, strict=True):
            request_id = tracked[core_id].request.request_id
            most = max(min(allowed, self._context_tokens_max - start - 2), 0)
            tokens = [PLACEHOLDER] * most if self._drafts_stay else self.drafts.pop(request_id, [])[:most]
            if tokens:
                output.scheduled_spec_decode_tokens[request_id] = tokens

    def _add_media(self, entry: Tracked, start: int, stop: int, output: SchedulerOutput) -> None:
        """Add the multimodal items that the workers encode before they compute these positions."""
        if inputs := self._media.inputs_of(entry, start, stop):
            output.scheduled_encoder_inputs[entry.request.request_id] = inputs

    def _new(self, entry: Tracked, start: int) -> NewRequestData:
        request = entry.request
        request.num_computed_tokens = start
        prefill = list(entry.tokens) if self._v2 else None
        table = self._groups.tables(entry.blocks, entry.windows, entry.state)
        return NewRequestData.from_request(request, table, prefill, uses_mrope=self._uses_mrope)


def _whole_table(added: tuple[int, list[int]] | None, request_id: str) -> list[int]:
    if added is None or added[0] != 0:
        raise ContractError(f"request {request_id}: a row was taken without its whole block table")
    return added[1]


def new_blocks(deltas: PageDeltas) -> dict[int, tuple[int, list[int]]]:
    """Return the changed entries of block tables by row: the first index and the block ids from there on.

    Raises: ContractError if the entries of a row are not consecutive.
    """
    found: dict[int, tuple[int, list[int]]] = {}
    blocks = (deltas.pages + FIRST_BLOCK).tolist()
    at = 0
    for row, first, count in deltas.runs.reshape(-1, 3).tolist():
        ids = blocks[at : at + count]
        at += count
        _add(found, row, first, ids)
    if deltas.opened_rows.size:
        for row, index, block in zip(
            deltas.opened_rows.tolist(), deltas.opened_index.tolist(), blocks[at:], strict=True
        ):
            _add(found, row, index, [block])
    return found


def _add(found: dict[int, tuple[int, list[int]]], row: int, first: int, ids: list[int]) -> None:
    known = found.get(row)
    if known is None:
        found[row] = (first, ids)
    elif known[0] + len(known[1]) == first:
        known[1].extend(ids)
    else:
        raise ContractError(f"row {row}: entries {known[0]}+{len(known[1])} and {first} of a block table in one plan")


def empty_output() -> SchedulerOutput:
    """Return a SchedulerOutput that runs nothing."""
    output = SchedulerOutput.make_empty()
    output.scheduled_cached_reqs = CachedRequestData.make_empty()
    return output
