"""From logits to tokens, for a batch in which every row has its own settings.

The order of operations, per row; a step runs only if some row of the batch needs it:

    0  raw logprobs        if requested, of the model's own distribution: softmax of the unchanged logits
    1  logit processors    those of installed packages that the request named
    2  bias                logit += bias, of the token ids in `logit_bias`
    3  min_new ban         stop tokens get logit -1e30 until min_new_tokens are drawn
    4  mask                -inf for tokens that a grammar, or the request's `allowed_token_ids`, does not allow
    5  penalties           repetition (prompt and output; a positive logit is divided, a negative one multiplied), then
                           frequency x count and presence (output only) are subtracted
    6  greedy rows         temperature 0: the largest logit, of several the lowest id. Done.
    7  temperature         z = (logit - largest) / temperature
    8  top-k               tokens with fewer than k larger ones
    9  top-p               of these, tokens with larger ones that do not yet sum up to top_p of what top-k kept
    10 min-p               tokens at least min_p times as likely as the likeliest
    11 draw                the largest z + Gumbel noise of (seed, position, token id)

Differences to other engines:

- Hugging Face applies top-k, top-p, min-p in this order, too. vLLM V1 applies min-p before top-k and top-p, so that
  top-p is a share of what min-p kept. SGLang applies top-k and top-p jointly, with top-p as a share of everything; with
  min-p it uses the order above.
- Tokens that tie at the border of top-k or top-p are all kept. Engines that sort keep some of them, by their sort.
- Bias is applied before penalties, as in vLLM. The ban is -1e30 instead of -inf: if a mask allows only stop tokens,
  other engines have nothing left to draw; here the mask overrides the ban.
- Logprobs are raw by default, as in vLLM ("raw_logprobs") and in OpenAI's API, with one difference to vLLM, where a
  grammar's mask is already applied. `logprobs="processed"` returns those of the distribution drawn from, after step 10;
  of a greedy row those after step 5.
- A seed gives the same tokens with any other requests in the batch, and on any backend. In other engines it does so
  only at the same place in the same batch, or not with every kernel.

Extreme logits: +inf is always drawn, -inf never; a row with a NaN, or with no allowed token, is invalid. An invalid row
draws token 0, so that a reader of its newest token reads a real token; `invalid` marks it as meaningless.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.core.contract.errors import ConfigError
from lockstep.runtime import triton_trial
from lockstep.runtime.sampling import reference
from lockstep.runtime.sampling.logprobs import Logprobs, logprobs_of, with_listed
from lockstep.runtime.sampling.processors import LogitProcessor
from lockstep.runtime.sampling.table import LOG_MIN_P, MASK, TEMPERATURE, SamplingTable

log = logging.getLogger("lockstep.runtime")

Backend = Literal["auto", "torch", "triton"]
LogprobsMode = Literal["raw", "processed"]


@dataclass(slots=True)
class Sampled:
    """Tokens that one batch drew, on the device.

    For rows without requested logprobs, logprobs are NaN and top ids -1.
    """

    tokens: Tensor  # int32 [samples]
    invalid: Tensor  # bool [samples]
    logprobs: Tensor | None = None  # float32 [samples], if a row requested them
    # int32 [samples, most requested by a row]: the likeliest first, then those that the row lists
    top_ids: Tensor | None = None
    top_logprobs: Tensor | None = None  # float32, the same shape


class Sampler:
    """Draws tokens by the settings in a table.

    Args:
        table: the rows' settings. The names of its `processors` must be those given here.
        backend: "triton" or "torch"; "auto" is Triton on a CUDA device on which it works. Both draw the same tokens.
        logprobs: "raw", of the model's distribution, or "processed", of the distribution drawn from.
        processors: the enabled logit processors, from `processors.load`, in the order in which they apply.
    """

    def __init__(
        self,
        table: SamplingTable,
        *,
        backend: Backend = "auto",
        logprobs: LogprobsMode = "raw",
        processors: Mapping[str, LogitProcessor] | None = None,
    ) -> None:
        if logprobs not in get_args(LogprobsMode):
            raise ConfigError(f"`logprobs` must be raw or processed, got `{logprobs}`\nhint: raw is the model's own")
        self.processors = dict(processors or {})
        if self.processors.keys() != table.processors.keys():
            raise ConfigError(
                f"`processors` must be those of the table: {sorted(table.processors)}, got {sorted(self.processors)}\n"
                "hint: give SamplingTable the names of what processors.load returned"
            )
        self.table, self.logprobs = table, logprobs
        self.backend, self._kernels = _choose(backend, table.device)

    def sample(
        self,
        logits: Tensor,
        rows: Tensor,
        positions: Tensor,
        rows_host: NDArray[np.int32],
        allowed: Tensor | None = None,
    ) -> Sampled:
        """Draw one token for each row, and count it for the row's penalties. Never waits for the device.

        Args:
            logits: float [samples, vocab]. If float32 and contiguous, they are overwritten.
            rows: int32 [samples], of the request table; each at most once, except the padding row and rows without
                penalties.
            positions: int64 [samples], of the token to be drawn: for the first one the length of the prompt.
            rows_host: int32 [samples], the same as `rows`, on the host. Where the device has the padding row instead,
                the row's token is not counted and has no meaning.
            allowed: int32 [samples, ceil(vocab / 32)]: token t may be drawn if bit t % 32 of word t // 32 is set, and
                the row's own mask allows it. None: only the row's own mask applies.
        Raises: ValueError if shapes do not fit together.
        """
        table, kernels = self.table, self._kernels
        self._check(logits, rows, positions, rows_host, allowed)
        table.flush()
        columns = table.columns
        logits = logits.float().contiguous()
        if not len(rows_host):
            empty = torch.empty(0, device=logits.device)
            return Sampled(empty.to(torch.int32), empty.to(torch.bool))

        with_logprobs = np.flatnonzero(table.logprobs[rows_host])
        at_logprobs = self._index(with_logprobs, len(rows_host)) if len(with_logprobs) else None
        raw = logits.index_select(0, at_logprobs) if at_logprobs is not None and self.logprobs == "raw" else None

        for name, process in self.processors.items():
            users = np.flatnonzero(table.processors[name][rows_host])
            if len(users):
                self._process(name, process, logits, rows, positions, rows_host, users)
        if table.edited[rows_host].any():
            kernels.edit_(logits, rows, positions, columns)
        if table.masked[rows_host].any():
            named = columns.masks.index_select(0, columns.ints[:, MASK].index_select(0, rows))
            allowed = named if allowed is None else named & allowed
        if allowed is not None:
            kernels.mask_(logits, allowed)
        penalised = bool(table.penalised[rows_host].any())
        if penalised:
            kernels.penalise_(logits, rows, columns)

        maxima = logits.amax(1)
        random = bool(table.sampled[rows_host].any())
        limited = bool(table.limited[rows_host].any())
        floor = kernels.pivots(logits, rows, columns, maxima) if limited else None
        tokens = kernels.draw(logits, rows, positions, columns, maxima, floor, random)
        if penalised:
            reference.count_(rows, tokens, columns)

        sampled = Sampled(tokens, ~(maxima > -torch.inf))
        if at_logprobs is not None:
            if raw is None:
                raw = self._processed(logits, rows, maxima, floor).index_select(0, at_logprobs)
            top = int(table.top_logprobs[rows_host].max())
            found = logprobs_of(raw, tokens.index_select(0, at_logprobs), top)
            listed = table.listed_tokens(rows_host[with_logprobs])
            if listed is not None:
                found = with_listed(found, raw, table.to_device(listed))
            self._report(sampled, at_logprobs, found)
        return sampled

    def _check(
        self, logits: Tensor, rows: Tensor, positions: Tensor, rows_host: NDArray[np.int32], allowed: Tensor | None
    ) -> None:
        samples, vocab = len(rows_host), self.table.vocab
        shapes: dict[str, tuple[Tensor, tuple[int, ...]]] = {
            "logits": (logits, (samples, vocab)),
            "rows": (rows, (samples,)),
            "positions": (positions, (samples,)),
        }
        if allowed is not None:
            shapes["allowed"] = (allowed, (samples, (vocab + 31) // 32))
        for name, (tensor, expected) in shapes.items():
            if tuple(tensor.shape) != expected:
                raise ValueError(
                    f"`{name}` must be {list(expected)}, got {list(tensor.shape)}: samples, then vocabulary"
                )

    def _process(
        self,
        name: str,
        process: LogitProcessor,
        logits: Tensor,
        rows: Tensor,
        positions: Tensor,
        rows_host: NDArray[np.int32],
        users: NDArray[np.int64],
    ) -> None:
        """Let a processor change the logits of the rows that selected it.

        If it raises, these rows become invalid, and no others.
        """
        at = self._index(users, len(rows_host))
        of_row = self.table.arguments[name]
        arguments = [of_row[row] for row in rows_host[users].tolist()]
        try:
            changed = process(
                logits.index_select(0, at), rows.index_select(0, at), positions.index_select(0, at), arguments
            )
            logits.index_copy_(0, at, changed)
        except Exception:
            log.exception("logit processor `%s` failed: the %d requests that named it end as invalid", name, len(users))
            logits.index_fill_(0, at, torch.nan)

    def _index(self, chosen: NDArray[np.int64], samples: int) -> Tensor:
        """Return the indices of samples on the device; made there if they are all samples, which is the usual case."""
        if len(chosen) == samples:
            return torch.arange(samples, device=self.table.device)
        return self.table.to_device(chosen.astype(np.int64))

    def _processed(self, logits: Tensor, rows: Tensor, maxima: Tensor, floor: Tensor | None) -> Tensor:
        """Return the logits of the distribution that a row was drawn from."""
        reals = self.table.columns.reals[rows.long()]
        z = reference.scaled(logits, reals, maxima)
        kept = z >= reals[:, LOG_MIN_P, None]
        if floor is not None:
            kept &= logits >= floor[:, None]
        z = torch.where(kept, z, -torch.inf)
        return torch.where(reals[:, TEMPERATURE, None] > 0, z, logits)

    @staticmethod
    def _report(sampled: Sampled, at: Tensor, found: Logprobs) -> None:
        """Store the logprobs of the samples that requested them, by sample."""
        samples = len(sampled.tokens)
        device = sampled.tokens.device
        sampled.logprobs = torch.full((samples,), torch.nan, device=device).index_copy_(0, at, found.chosen)
        if found.top_ids is not None and found.top is not None:
            shape = (samples, found.top.shape[1])
            ids = torch.full(shape, -1, dtype=torch.int32, device=device)
            sampled.top_ids = ids.index_copy_(0, at, found.top_ids)
            sampled.top_logprobs = torch.full(shape, torch.nan, device=device).index_copy_(0, at, found.top)


def _choose(backend: str, device: torch.device) -> tuple[str, ModuleType]:
    if backend not in get_args(Backend):
        raise ConfigError(f"`backend` must be auto, torch or triton, got `{backend}`\nhint: auto takes what is fastest")
    if backend == "torch" or (backend == "auto" and device.type != "cuda"):
        return "torch", reference
    if device.type == "cuda" and (why := triton_trial.unavailable_because(device)) is not None:
        if backend == "triton":
            raise ConfigError(f"`backend` triton cannot run here: {why}\nhint: use torch")
        return "torch", reference
    if find_spec("triton") is None:
        raise ConfigError("`backend` triton needs triton, which is not installed\nhint: install it, or use torch")
    from lockstep.runtime.sampling import kernels

    if not kernels.runs_on(device):
        raise ConfigError(
            f"`backend` triton needs a CUDA device, got `{device}`\nhint: use torch, or set TRITON_INTERPRET=1 to test"
        )
    return "triton", kernels
