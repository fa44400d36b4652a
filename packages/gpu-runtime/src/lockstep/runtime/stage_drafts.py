"""Drafts of a draft model in an engine of several pipeline stages.

The first stage has the draft model, all its layers and its KV. It has all that drafts are made of: the newest tokens,
which the last stage sends it anyway, and the tokens of every pass. It drafts right before the pass that verifies them,
and sends them ahead of its hidden states. The last stage compares them with the tokens that it draws; stages between
need them for the tags of debug runs only.

    first stage   take over tokens | draft | pass over newest and drafts
                                      `──── drafts ────┐  `── hidden ──┐
    later stages                                  wait for both | pass | (the last one) verify

Which rows draft, and how many, is part of the plan. So a receive is begun at the launch, and a pass without drafts
sends none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from lockstep.host.batches import Int32s
from lockstep.runtime.drafting import Drafter, DraftingRows
from lockstep.runtime.forward import ForwardBatch
from lockstep.runtime.stages import StageLinks
from lockstep.runtime.tables import ForwardPass, VerifyRows


class SentDrafts:
    """The drafter of the first stage, which sends its drafts to the later ones; see `drafting.Drafter`."""

    def __init__(self, drafter: Drafter, links: StageLinks) -> None:
        self.drafter, self.links, self.reads_layers = drafter, links, drafter.reads_layers

    def observe_batch(self, batch: ForwardBatch) -> None:
        """Take in the pass that runs next."""
        self.drafter.observe_batch(batch)

    def computed(self, batch: ForwardBatch, hidden: Tensor) -> None:
        """Take in what the model computed."""
        self.drafter.computed(batch, hidden)

    def moved(self, source: Tensor, target: Tensor) -> None:
        """Move what belongs to the tokens of some slots."""
        self.drafter.moved(source, target)

    def draft(self, drafting: DraftingRows) -> Tensor:
        """Draft, and begin to send the drafts."""
        found = self.drafter.draft(drafting)
        self.links.send_drafts(found.to(torch.int32).contiguous())
        return found


class ReceivedDrafts:
    """The drafter of a later stage: the drafts of the first one, in the order of launches."""

    reads_layers = False

    def __init__(self, links: StageLinks) -> None:
        self.links = links
        self._expected: deque[Callable[[], Tensor]] = deque()

    def expect(self, one: ForwardPass) -> None:
        """Begin to receive the drafts of a pass. Called once for each pass, when it is launched."""
        if one.verifying is not None and (drafted := drafted_of(one.verifying)).any():
            self._expected.append(self.links.expect_drafts(len(drafted), int(drafted.max())))

    def observe_batch(self, batch: ForwardBatch) -> None:
        """Do nothing: the first stage has the draft model."""

    def computed(self, batch: ForwardBatch, hidden: Tensor) -> None:
        """Do nothing."""

    def moved(self, source: Tensor, target: Tensor) -> None:
        """Do nothing."""

    def draft(self, drafting: DraftingRows) -> Tensor:
        """Wait for the drafts of this pass, and return them."""
        return self._expected.popleft()().to(torch.int64)


def drafted_of(verifying: VerifyRows) -> Int32s:
    """Return the drafts of each row that a drafter makes, int32 [rows]: those that no grammar forces."""
    return verifying.drafts - verifying.forced if verifying.forced.size else verifying.drafts
