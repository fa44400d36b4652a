"""Media on the device: contents of open requests, output of the encoder, and positions of rows with media.

Given embeddings are contents that need no encoder: a pass uploads the rows that it computes.

    hold(request, contents)      from the request's arrival to its end
    encode(digests, drop)        EncodeMedia: drop outputs, then run the model's encoder; its output is kept
    given(plan)                  at launch: the given embeddings that a plan reads, also if their request ends meanwhile
    rows(plan)                   a pass takes embeddings of its spans from the outputs, or from those given
    take_row, offsets            models with positions of three axes: what they add to the position in the prompt

The scheduler decides when a content is encoded and when its output is dropped. Contents stay as long as any open
request has them, because weights may be replaced, and the output computed again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.core.contract.commands import BatchPlan
from lockstep.core.contract.errors import ConfigError
from lockstep.core.contract.events import PromptSpan, RequestId
from lockstep.host.media.content import GIVEN, EncoderInput
from lockstep.host.media.division import encoder_positions
from lockstep.runtime.errors import DeviceLost, PlanError
from lockstep.runtime.forward import MediaRows
from lockstep.runtime.media_share import EncoderShare, Output
from lockstep.runtime.overlap import StreamLane
from lockstep.runtime.tables import ForwardPass

log = logging.getLogger("lockstep.runtime")

AXES = 3  # time, height, width
Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]


class ContentEncoder(Protocol):
    """The encoder of a model."""

    @property
    def token_bytes(self) -> int:
        """Bytes of the output for one position."""

    def encode(self, content: EncoderInput) -> Output:
        """Return embeddings [positions, hidden] for a content, and those that are added behind the first layers.

        Raises: ConfigError for a content that does not fit the model.
        """

    def places(self, spans: Sequence[tuple[PromptSpan, EncoderInput]], tokens: int) -> Int64s | None:
        """Return positions of three axes, int64 [3, tokens], of a prompt; None: the model has one axis."""


# mechanism: encoder-budget (executed)
class DeviceMedia:
    """Contents, outputs and positions of one engine. All methods are for the host's thread.

    Args:
        encoder: None: the model takes given embeddings only.
        count: rows of the tables.
    """

    def __init__(self, encoder: ContentEncoder | None, lane: StreamLane, count: int) -> None:
        self._encoder, self._lane = encoder, lane
        self.contents: dict[bytes, EncoderInput] = {}
        self._holders: dict[bytes, set[RequestId]] = {}
        self.outputs: dict[bytes, Output] = {}
        self.share: EncoderShare | None = None  # of several ranks that divide contents; None: encode all of them
        self._offsets: list[Int64s | None] = [None] * count  # [3, prompt tokens + 1], by row; the last: of all behind

    # ---------------------------------------------------------------------------------------------------- contents

    def hold(self, request_id: RequestId, contents: Iterable[EncoderInput]) -> None:
        """Keep the contents of a request until `release`."""
        for content in contents:
            self.contents[content.digest] = content
            self._holders.setdefault(content.digest, set()).add(request_id)

    def release(self, request_id: RequestId, spans: Iterable[PromptSpan]) -> None:
        """Forget the contents that no other request has."""
        for span in spans:
            holders = self._holders.get(span.digest)
            if holders is None:
                continue
            holders.discard(request_id)
            if not holders:
                del self._holders[span.digest], self.contents[span.digest]

    def encode(self, digests: Sequence[bytes], drop: Iterable[bytes]) -> list[str]:
        """Drop outputs, then encode contents together.

        Returns: for each of them why it cannot be encoded, or "".
        Raises: DeviceLost; RankLost if the ranks divide them differently.
        """
        for one in drop:
            self.outputs.pop(one, None)
        if self._encoder is None:
            return ["this model has no encoder"] * len(digests)
        asked = list(dict.fromkeys(digests))
        made = [self._made(one) for one in asked] if self.share is None else self._shared(asked)
        failed = dict[bytes, str]()
        for digest, output in zip(asked, made, strict=True):
            if isinstance(output, str):
                failed[digest] = output
                log.warning("media %s cannot be encoded: %s", digest.hex()[:8], output)
            else:
                self.outputs[digest] = output
        return [failed.get(digest, "") for digest in digests]

    def _shared(self, digests: Sequence[bytes]) -> list[Output | str]:
        """Encode this rank's share of contents. Returns the output of all, of other ranks' too."""
        assert self.share is not None
        found = [self.contents.get(digest) for digest in digests]
        owners = self.share.owners([0 if one is None else encoder_positions(one) for one in found])
        own = {i: self._made(digests[i]) for i, owner in enumerate(owners) if owner == self.share.rank}
        with self._lane.stream(), torch.inference_mode():
            return self.share.exchange(digests, owners, own)

    def _made(self, digest: bytes) -> Output | str:
        """Return the encoder's output for a content, or why it cannot be encoded. Raises DeviceLost."""
        content = self.contents.get(digest)
        if content is None:
            return "its content is not here any more"
        assert self._encoder is not None
        try:
            with self._lane.stream(), torch.inference_mode():
                return self._encoder.encode(content)
        except (DeviceLost, PlanError):
            raise
        except Exception as error:  # of the model's code, for a content that its processor made
            self._lane.check()
            why = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
            return why.partition("\n")[0]

    # ------------------------------------------------------------------------------------------------------ passes

    def given(self, plan: BatchPlan) -> dict[bytes, EncoderInput]:
        """Return the given embeddings that a plan reads, by digest. Raises PlanError for media that are not here."""
        found = {}
        for span in plan.media_spans:
            content = self.contents.get(span.digest)
            if content is not None and GIVEN in content.arrays:
                found[span.digest] = content
            elif span.digest not in self.outputs:
                raise PlanError(f"batch {plan.batch_id} reads media {span.digest.hex()[:8]}, which are not here")
        return found

    def rows(self, plan: BatchPlan, one: ForwardPass, given: Mapping[bytes, EncoderInput]) -> MediaRows | None:
        """Return the embeddings that a pass takes in place of tokens. Raises PlanError for output that is not here.

        Args:
            given: what `given` returned at the launch.
        """
        if not plan.media_spans:
            return None
        at: list[Int64s] = []
        parts: list[Tensor] = []
        deeper: list[tuple[Tensor, ...]] = []
        for span in plan.media_spans:
            first = int(one.indptr[span.index]) + span.start - int(one.starts[span.index])
            count = span.stop - span.start
            at.append(np.arange(first, first + count, dtype=np.int64))
            if (content := given.get(span.digest)) is not None:
                parts.append(self._lane.upload(content.arrays[GIVEN].numpy()[span.offset : span.offset + count]))
                deeper.append(())
                continue
            output = self.outputs.get(span.digest)
            if output is None:
                raise PlanError(f"batch {plan.batch_id} reads media {span.digest.hex()[:8]}, which are not encoded")
            parts.append(output[0][span.offset : span.offset + count])
            deeper.append(tuple(layer[span.offset : span.offset + count] for layer in output[1]))
        most = max(map(len, deeper))
        nothing = [(torch.zeros_like(part),) * most for part in parts]
        layers = zip(*(some or none for some, none in zip(deeper, nothing, strict=True)), strict=True)
        return MediaRows(
            self._lane.upload(np.concatenate(at)), torch.cat(parts), tuple(torch.cat(layer) for layer in layers)
        )

    def take_row(self, row: int, spans: Sequence[PromptSpan], prompt_tokens: int) -> None:
        """Store the positions of a row's new request."""
        self._offsets[row] = None
        spans = [span for span in spans if span.kind != "embedding"]  # which has the positions of text
        if self._encoder is None or not spans:
            return
        known = [(span, self.contents[span.digest]) for span in spans if span.digest in self.contents]
        if len(known) < len(spans):  # its request has ended: the results are dropped
            return
        places = self._encoder.places(known, prompt_tokens)
        if places is not None:
            behind = places.max() + 1 if places.size else 0
            whole = np.concatenate((places, np.full((AXES, 1), behind, np.int64)), 1)
            self._offsets[row] = whole - np.arange(prompt_tokens + 1)

    def offsets(self, one: ForwardPass, back: int = 0) -> Tensor | None:
        """Return what the tokens of a pass add to their positions, int64 [3, tokens]; None: nothing.

        Args:
            back: a token of a prompt gets the offset of the token that many places before it.
        """
        rows = one.rows.tolist()
        if all(self._offsets[row] is None for row in rows):
            return None
        given = one.extend_rows - (0 if one.verifying is None else len(one.verifying.rows))
        added = np.zeros((AXES, int(one.indptr[-1])), np.int64)
        for i, row in enumerate(rows):
            of_row = self._offsets[row]
            if of_row is None:
                continue
            first, stop = int(one.indptr[i]), int(one.indptr[i + 1])
            if i >= given:  # decodes, whose positions are behind the prompt wherever they are
                added[:, first:stop] = of_row[:, -1:]
            else:
                places = np.arange(one.starts[i], one.starts[i] + stop - first) - back
                added[:, first:stop] = of_row[:, np.clip(places, 0, of_row.shape[1] - 1)]
        return self._lane.upload(added)

    def offsets_behind(self, rows: Int32s) -> Tensor | None:
        """Return what tokens behind the prompts of rows add to their positions, int64 [3, rows]; None: nothing."""
        found = [self._offsets[row] for row in rows.tolist()]
        if all(one is None for one in found):
            return None
        nothing = np.zeros(AXES, np.int64)
        return self._lane.upload(np.stack([nothing if one is None else one[:, -1] for one in found], 1))
