"""One small pass of a model of transformers with a stand-in for attention, before it serves.

The pass records what each layer requires of attention: heads, scale, window, cap, sinks. And since the stand-in handles
every token by itself, the results of a token may not depend on the tokens beside it. A model with another mixing of
tokens (a convolution, a state, positions counted along the batch, experts with limited room) is found that way, since
requests share a batch:

    tokens     a b c d e           positions 3 0 7 1 5
    again      d a e c b           positions 1 3 5 7 0          the results must be the same, in the new order
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from lockstep.core.contract.errors import ConfigError
from lockstep.runtime.from_transformers.attending import CURRENT, AttentionCall, CurrentPass
from lockstep.runtime.memory import lacks_memory
from lockstep.runtime.models.settings import ModelSettings

TOKENS = 5
ORDER = (3, 0, 4, 2, 1)
TOLERANCE = {torch.float32: 1e-4}
OTHER_TOLERANCE = 0.05  # of dtypes with fewer bits


def try_out(
    base: nn.Module,
    logits: Callable[[Tensor], Tensor] | None,
    current: CurrentPass,
    settings: ModelSettings,
    dtype: torch.dtype,
    device: torch.device,
    with_states: Sequence[object] = (),
) -> list[AttentionCall]:
    """Run a model twice on a few tokens, and return the call of each layer, in order.

    Args:
        base: the library's model without output projection.
        logits: its output projection; None if it has none.
        with_states: numbers of the layers that keep states, which need not attend.
    Raises: ConfigError if it cannot run on pages and flattened batches, with the reason.
    """
    for module in base.modules():
        setattr(module, CURRENT, current)
    ids = torch.arange(TOKENS, device=device) * 7 % settings.vocab
    positions = torch.tensor([3, 0, 7, 1, 5], device=device) % settings.context_tokens
    order = torch.tensor(ORDER, device=device)
    current.calls = []
    try:
        with torch.inference_mode():
            first = _run(base, ids, positions)
            calls = list(current.calls)
            second = _run(base, ids[order], positions[order])
            if logits is not None and (shape := tuple(logits(first).shape)) != (TOKENS, settings.vocab):
                raise ConfigError(f"the logits of {TOKENS} tokens are {list(shape)}")
    except ConfigError as error:
        raise ConfigError(f"{settings.architecture} cannot run by transformers' code here: {error}") from error
    except Exception as error:  # of the library's code, for a batch of one flat sequence
        if lacks_memory(error):
            raise
        why = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise ConfigError(
            f"{settings.architecture} cannot run by transformers' code here: a small pass failed: {why}"
        ) from error
    finally:
        current.calls = None
    numbers = [call.layer for call in calls]
    name = settings.architecture
    if with_states:
        if not numbers or sorted(set(numbers)) != numbers or len(set(with_states)) != len(with_states):
            kept = ", ".join(map(str, with_states))
            raise ConfigError(
                f"{name} cannot run by transformers' code here: layers {kept} keep states, and by the attention "
                f"interface layers attend as {numbers}; some layer must attend, and none twice"
            )
    elif numbers != list(range(settings.layers)):
        lacking = sorted(set(range(settings.layers)) - set(numbers))
        what = f"layers {', '.join(map(str, lacking))} never attend" if lacking else f"layers attend as {numbers}"
        raise ConfigError(
            f"{name} cannot run by transformers' code here: by the attention interface, {what}; each of its "
            f"{settings.layers} layers must attend once"
        )
    kinds = {(call.heads, call.kv_heads, call.head_dim, call.value_dim, call.latent) for call in calls}
    if len(kinds) > 1:
        raise ConfigError(f"{name} cannot run by transformers' code here: its layers have heads of {len(kinds)} kinds")
    wanted, found = first[order].float(), second.float()
    largest = float(wanted.abs().max())
    apart = float((wanted - found).abs().max())
    if not apart <= TOLERANCE.get(dtype, OTHER_TOLERANCE) * largest:
        raise ConfigError(
            f"{name} cannot run by transformers' code here: the results of a token depend on the tokens beside it in "
            f"the batch, not only by attention (difference {apart:.2g}, largest result {largest:.2g})"
        )
    return calls


def _run(base: nn.Module, ids: Tensor, positions: Tensor) -> Tensor:
    hidden: Tensor = base(input_ids=ids[None], position_ids=positions[None], use_cache=False).last_hidden_state[0]
    return hidden
