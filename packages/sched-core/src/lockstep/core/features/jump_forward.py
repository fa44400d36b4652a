"""Jump-forward: tokens that a grammar forces are computed together in one launch, without waiting for each.

Behind `{"verdict": "yes", ` a schema may admit only `"percent": `. The host, which has the matchers, reports with each
token the tokens that are forced behind it (`TokensForced`): each is the only token that its mask admits. They are thus
known before they are sampled, and the next launch of the row computes them behind its newest token:

    outputs      s - 1      s      s + 1    s + 2
    | delivered | newest | forced | forced | sampled under the mask behind them |
                 `------ one launch -------'

Such a launch is a verification with drafts that are all right (speculation.py). So ends, streaming, retraction,
snapshots and the tables on the device work as for drafts. Two things differ: nothing is guessed, and the number of
tokens is known before the result, so a batch launched behind it starts at a known position.

Each forced token is drawn as always, by the seed of its position and under a mask that admits it alone. The answer is
therefore the same as without jump-forward. The journal contains the forced tokens, so a replay decides the same.

    result of output n - 1: forced f0 f1 f2      with overlap 1, the batch that samples n is in flight
    next launch                                  s = n + 1: that one will sample f0; this one computes f0 f1 f2

Forced tokens stay in `JumpForward.forced` until they are delivered. A request that leaves its row loses them; the host
reports them again. Like drafts, forced tokens are optional: if pages are short, fewer are computed at once. Rows with
stop texts have none, since the host checks their tokens one by one. A stop token is never forced, since it may end the
answer.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from msgspec import UNSET, Struct, UnsetType

from lockstep.core.contract.checks import fail
from lockstep.core.contract.commands import Step
from lockstep.core.contract.errors import ContractError
from lockstep.core.contract.events import BatchFinished, RequestId, TokensForced
from lockstep.core.features.view import SchedulerView
from lockstep.core.kv.component import Component, Restored
from lockstep.core.kv.facts import Facts
from lockstep.core.requests.batching import InFlight
from lockstep.core.requests.table import NO_IDS, Int32s, Request, RunningBatch


class Forced(NamedTuple):
    """The known next output tokens of a request."""

    first: int  # output number of the first of `tokens`
    tokens: Int32s  # [tokens]

    @property
    def stop(self) -> int:
        """Output number of the first token that is not forced."""
        return self.first + len(self.tokens)


class ForcedPart(Struct):
    """Forced tokens in a snapshot: request, number of the first forced output, ids as packed int32."""

    forced: list[tuple[int, int, bytes]] | UnsetType = UNSET


class JumpForward(Component):
    """The next output tokens that grammars force, of requests that decode."""

    PART = ForcedPart

    def __init__(self, scheduler: SchedulerView) -> None:
        self._scheduler = scheduler
        self.forced: dict[RequestId, Forced] = {}

    def part(self) -> ForcedPart:
        """Return the state for a snapshot."""
        forced = [(request_id, one.first, one.tokens.tobytes()) for request_id, one in self.forced.items()]
        return ForcedPart(forced or UNSET)

    def load(self, part: ForcedPart, restored: Restored) -> None:
        """Take over the state that `part` returned."""
        if part.forced is not UNSET:
            self.forced = {
                request_id: Forced(first, np.frombuffer(ids, np.int32)) for request_id, first, ids in part.forced
            }

    def check_state(self, facts: Facts) -> None:
        """S23: only running requests with a grammar have forced tokens, and these are not delivered yet."""
        for request_id, known in self.forced.items():
            holder = facts.requests.get(request_id)
            if holder is None or holder.row < 0 or holder.grammar is None or holder.watches_text:
                fail(f"S23: {known} is forced for r{request_id}, which does not run with a grammar")
            if known.stop <= self._scheduler.outputs_of(holder):
                fail(f"S23: {known} of {holder.name} was delivered and is still stored as forced")

    def forget(self, request: Request) -> None:
        """Drop the forced tokens of a request that leaves its row; the host reports them again."""
        self.forced.pop(request.request_id, None)

    # ------------------------------------------------------------------------------------------------------ the results

    def learn(self, event: TokensForced, step: Step) -> None:
        """Store reported forced tokens. Raises ContractError, storing nothing, for an invalid report."""
        if not self._scheduler.config.jumps:
            raise ContractError("tokens are forced, but `jump_forward_tokens` is 0")
        if event.generation > self._scheduler.generation:
            raise ContractError(
                f"tokens forced in generation {event.generation}, but this is {self._scheduler.generation}"
            )
        found: dict[RequestId, Forced] = {}
        for request_id, first, ids in event.forced if event.generation == self._scheduler.generation else ():
            request = self._scheduler.requests.get(request_id)
            if request is None or not request.decodes or request.watches_text:
                continue  # the request has ended, has left its row, ends with a batch in flight, or has stop texts
            if request.grammar is None:
                raise ContractError(f"tokens of {request.name} are forced, but it has no grammar")
            if first != (outputs := self._scheduler.outputs_of(request)):
                raise ContractError(f"tokens of {request.name} are forced from output {first} on, but it has {outputs}")
            if not ids or len(ids) % 4 or np.frombuffer(ids, np.int32).min() < 0:
                raise ContractError(f"{ids!r}, forced of {request.name}, are no token ids")
            tokens = np.frombuffer(ids, np.int32)
            if (stops := np.isin(tokens, request.stop_token_ids)).any():
                tokens = tokens[: int(stops.argmax())]
            if tokens.size:
                found[request_id] = Forced(first, tokens)
        self.forced |= found

    def check(self, event: BatchFinished, batch: InFlight) -> None:
        """Raise ContractError if a result has other tokens than the forced ones."""
        if event.error:
            return
        tokens, at = np.frombuffer(event.tokens, np.int32), 0
        counts = np.frombuffer(event.accepted, np.int32) if event.accepted else batch.least
        for i, request in enumerate(batch.samplers.requests):
            got = tokens[at : at + int(counts[i])].tolist()
            at += len(got)
            if batch.samplers.rows[i] in batch.dead or i in event.invalid:
                continue
            number, expected = int(batch.sampled_at[i] - batch.samplers.prompts[i]), batch.forced_of(i)
            known = self.forced.get(request.request_id)
            if not expected and known is not None and known.first <= number < known.stop:
                expected = known.tokens[number - known.first :].tolist()
            if any(token != forced for token, forced in zip(got, expected, strict=False)):
                raise ContractError(
                    f"batch {event.batch_id} has {got} as output {number} and on of {request.name}, "
                    f"which was forced to be {expected}"
                )

    def delivered(self, batch: InFlight) -> None:
        """Drop the forced tokens that were delivered with a collected batch."""
        samplers = batch.samplers
        steps = samplers.ones if batch.steps is None else batch.steps
        for i, outputs in enumerate((batch.sampled_at - samplers.prompts + steps).tolist()):
            known = self.forced.get(samplers.requests[i].request_id)
            if known is not None and known.stop <= outputs and samplers.rows[i] not in batch.dead:
                del self.forced[samplers.requests[i].request_id]

    # ------------------------------------------------------------------------------------------------------- the launch

    # mechanism: jump-forward (decided)
    def counts_of(self, members: RunningBatch, most: Int32s) -> Int32s:
        """Return how many forced tokens each member can compute behind its newest token.

        Args:
            most: int32 [members], upper bounds of the positions of the newest tokens.
        Returns: int32 [members].
        """
        counts = np.zeros(members.size, np.int32)
        for i, request in enumerate(members.requests):
            known = self.forced.get(request.request_id)
            if known is not None:
                number = int(most[i]) + 1 - request.prompt_tokens  # number of the output behind the newest one
                room = request.limit - 2 - int(most[i])  # the last token is never fed back
                counts[i] = max(min(known.stop - number, self._scheduler.config.forced_max, room), 0)
        return counts

    def tokens_of(self, members: RunningBatch, most: Int32s, counts: Int32s) -> Int32s:
        """Return the first `counts` forced tokens of each member behind `most`, end to end. int32 [members] both."""
        parts = [NO_IDS]
        for i in counts.nonzero()[0].tolist():
            request = members.requests[i]
            known = self.forced[request.request_id]
            first = int(most[i]) + 1 - request.prompt_tokens - known.first
            parts.append(known.tokens[first : first + int(counts[i])])
        return np.concatenate(parts)
