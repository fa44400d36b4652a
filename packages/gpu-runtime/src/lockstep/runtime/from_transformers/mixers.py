"""Layers of transformers' models that keep a state: linear attention, state space layers, short convolutions.

The library calls them mixers. They read and write the states of one batch of equally long sequences through a cache
object. Here the flat batch of a pass is cut into such groups (`states/view.py`), and the library's code runs once for
each of them, with a cache object whose states are slots of the pool. So chunks, checkpoints and decodes of different
requests need nothing of the library's code but that a state carries over: that is tried first. A layer whose code
ignores the state in front of several tokens (Jamba's scan) computes them one by one, unless they begin a request.

    hidden [1, tokens, hidden] ──groups──> [rows, length, hidden] ──mixer──> ... ──> [1, tokens, hidden]
                                             |              ^
                                             states[writes]  states[reads]
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - its name everywhere

from lockstep.core.contract.errors import ConfigError
from lockstep.runtime.from_transformers.attending import CurrentPass
from lockstep.runtime.states.pool import StateKind, StatePart, StateTensors
from lockstep.runtime.states.view import StateGroup

WRITES = "update_conv_state"
"""The method of the library's cache that every layer with a state calls."""
CACHE_NAMES = ("cache_params", "past_key_values")
CHUNKS, DECODE = (3, 2), (4, 1)  # tokens of the segments in which a state is tried
TOLERANCE = {torch.float32: 1e-4}
OTHER_TOLERANCE = 0.05  # of dtypes with fewer bits; and of decodes, whose formula may differ (Nemotron-H's clamp)

Number = tuple[StateKind, int]


class RowStates:
    """The states of a group of rows in one layer, under the methods of the library's cache.

    Args:
        before: by kind and number, [rows, *shape]; overwritten. Empty: no token came before.
    """

    def __init__(self, before: dict[Number, Tensor]) -> None:
        self.states = before

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return the last inputs of a convolution, [rows, channels, width]; None before the first token."""
        return self.states.get(("conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return the state of a recurrence; None before the first token."""
        return self.states.get(("recurrent", state_idx))

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> Tensor:
        """Append inputs, [rows, channels, tokens]. Returns the earlier ones with them."""
        before = self.states.get(("conv", state_idx))
        joined = conv_states if before is None else torch.cat((before, conv_states), -1)
        width = conv_kernel_size or conv_states.shape[-1] if before is None else before.shape[-1]
        if joined.shape[-1] < width:
            joined = F.pad(joined, (width - joined.shape[-1], 0))
        self.states["conv", state_idx] = joined[..., joined.shape[-1] - width :]
        return joined

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        """Store the state behind the group's last tokens."""
        self.states["recurrent", state_idx] = recurrent_states
        return recurrent_states

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Return whether there is a state."""
        return bool(self.states)

    def is_recording_past(self, layer_idx: int) -> bool:
        """Return False: earlier states are kept by slots."""
        return False


class Mixer:
    """Runs the library's code of one layer over the groups of a pass. It takes the place of the layer's `forward`."""

    def __init__(self, module: nn.Module, current: CurrentPass) -> None:
        self.name, self.layer = type(module).__name__, getattr(module, "layer_idx", None)
        self.module = module
        self.inner, self.current = module.forward, current
        self.signature = inspect.signature(self.inner)
        self.cache_name = next((one for one in CACHE_NAMES if one in self.signature.parameters), "")
        self.parts: tuple[StatePart, ...] = ()
        self.by_token = False  # several tokens behind a state are computed one by one

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return [1, tokens, hidden] of a flat batch [1, tokens, hidden]."""
        given = self.signature.bind(*args, **kwargs).arguments
        given = {name: one for name, one in given.items() if self.signature.parameters[name].kind is not VAR_KEYWORD}
        hidden: Tensor = given.pop("hidden_states")
        given.pop(self.cache_name, None)
        if given.get("attention_mask") is not None:
            raise ConfigError(f"{self._named} passes a mask of its own")
        if self.current.calls is not None:
            return self._tried(hidden, given)
        batch = self.current.batch
        if batch is None or batch.states is None:  # a trial of memory
            return self._run(hidden, None, given)
        out: Tensor | None = None
        for group in batch.states.groups:
            part = hidden if group.tokens is None else hidden.index_select(1, group.tokens)
            states = RowStates({}) if group.fresh else self._read(batch.states.pool, group)
            found = self._continued(part.view(-1, group.length, part.shape[-1]), states, given)
            self._write(batch.states.pool, group, states)
            if group.tokens is None:
                return found.reshape(1, -1, found.shape[-1])
            if out is None:
                out = found.new_empty(1, hidden.shape[1], found.shape[-1])
            out.index_copy_(1, group.tokens, found.reshape(1, -1, found.shape[-1]))
        return hidden if out is None else out

    @property
    def _named(self) -> str:
        return f"layer {self.layer}, a {self.name},"

    def _run(self, hidden: Tensor, states: RowStates | None, given: dict[str, Any]) -> Tensor:
        found = self.inner(hidden_states=hidden, **{self.cache_name: states}, **given)
        if not isinstance(found, Tensor):
            raise ConfigError(f"{self._named} returns more than its results")
        return found

    def _continued(self, hidden: Tensor, states: RowStates, given: dict[str, Any]) -> Tensor:
        """Compute the tokens of a group, one by one if the library's code needs it."""
        if not self.by_token or not states.states or hidden.shape[1] == 1:
            return self._run(hidden, states, given)
        return torch.cat([self._run(token, states, given) for token in hidden.split(1, 1)], 1)

    def _read(self, pool: StateTensors, group: StateGroup) -> RowStates:
        return RowStates(
            {(part.kind, part.number): pool.tensors[part.key].index_select(0, group.reads) for part in self.parts}
        )

    def _write(self, pool: StateTensors, group: StateGroup, states: RowStates) -> None:
        for part in self.parts:
            left, there = states.states[part.kind, part.number], pool.tensors[part.key]
            left = left.to(part.dtype)
            there.index_copy_(0, group.writes, left)
            if group.kept is not None and group.kept_in is not None:
                there.index_copy_(0, group.kept_in, left.index_select(0, group.kept))

    # -------------------------------------------------------------------------------------------------------- a trial

    def _tried(self, hidden: Tensor, given: dict[str, Any]) -> Tensor:
        """Find the shapes of the layer's states, check that they carry over, and compute every token by itself."""
        if not isinstance(self.layer, int) or not self.cache_name:
            raise ConfigError(f"a {self.name} keeps a state, but has no number of its layer, or takes no cache")
        whole = RowStates({})
        wanted = self._run(hidden, whole, given)
        self.parts = tuple(
            StatePart(self.layer, kind, number, tuple(state.shape[1:]), state.dtype)
            for (kind, number), state in sorted(whole.states.items())
        )
        if not self.parts:
            raise ConfigError(f"{self._named} left no state")
        strict = TOLERANCE.get(hidden.dtype, OTHER_TOLERANCE)
        self.by_token = False  # a trial has two passes
        self.by_token = self._apart_in(CHUNKS, hidden, wanted, whole, given) > strict
        again = self._apart_in(CHUNKS, hidden, wanted, whole, given) if self.by_token else 0.0
        apart = max(again, self._apart_in(DECODE, hidden, wanted, whole, given))
        if not apart <= OTHER_TOLERANCE:
            raise ConfigError(
                f"{self._named} does not carry its state from one part of a prompt to the next: results differ by "
                f"{apart:.2g} of the largest"
            )
        alone = self._run(hidden.transpose(0, 1), self._empty(hidden.shape[1], hidden.device), given)
        return alone.transpose(0, 1)

    def _apart_in(
        self, cuts: tuple[int, ...], hidden: Tensor, wanted: Tensor, whole: RowStates, given: dict[str, Any]
    ) -> float:
        """Return how far the results and states of segments are from those of the whole, as a share of the largest."""
        states = self._empty(1, hidden.device)
        found = torch.cat([self._continued(part, states, given) for part in hidden.split(cuts, 1)], 1)
        return max(_apart(wanted, found), *(_apart(state, states.states[key]) for key, state in whole.states.items()))

    def _empty(self, rows: int, device: torch.device) -> RowStates:
        return RowStates(
            {
                (part.kind, part.number): torch.zeros((rows, *part.shape), dtype=part.dtype, device=device)
                for part in self.parts
            }
        )


VAR_KEYWORD = inspect.Parameter.VAR_KEYWORD


def _apart(wanted: Tensor, found: Tensor) -> float:
    """Return the largest difference, as a share of the largest number."""
    largest = float(wanted.float().abs().max())
    return float((wanted.float() - found.float()).abs().max()) / max(largest, 1e-30)


def keeps_state(kind: type) -> bool:
    """Return whether modules of a class keep states in the library's cache."""
    for member in vars(kind).values():
        code = getattr(inspect.unwrap(member) if callable(member) else member, "__code__", None)
        if code is not None and WRITES in code.co_names:
            return True
    return False


def has_mixers(kind: type) -> bool:
    """Return whether the library's file of a model has layers whose states can be kept in slots."""
    there = vars(sys.modules[kind.__module__]).values()
    return any(isinstance(one, type) and issubclass(one, nn.Module) and keeps_state(one) for one in there)


def take_mixers(model: nn.Module, current: CurrentPass) -> Iterator[Mixer]:
    """Let the layers of a model that keep states run over the groups of a pass, and yield them."""
    for module in model.modules():
        if any(keeps_state(kind) for kind in type(module).__mro__):
            mixer = Mixer(module, current)
            module.forward = mixer
            yield mixer
