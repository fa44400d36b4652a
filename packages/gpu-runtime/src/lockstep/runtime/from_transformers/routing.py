"""The mixtures of experts of transformers' models: modules that are called with each token's experts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

INDICES = ("top_k_index", "router_indices")
"""Names of the argument with the experts of each token, int [tokens, k], in the library's modules."""


class RoutedExperts:
    """The experts of one layer.

    Args:
        name: of the argument with the experts of each token; place: its number, from 0 on.
    """

    def __init__(self, module: nn.Module, name: str, place: int) -> None:
        self._module, self._name, self._place = module, name, place
        self.experts = int(module.num_experts)

    def count_into(self, count: Callable[[Tensor], None]) -> None:
        """Call `count` with the experts of the tokens of every pass from now on."""

        def routed(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            count(kwargs[self._name] if self._name in kwargs else args[self._place])

        self._module.register_forward_pre_hook(routed, with_kwargs=True)


def routed_experts(decoder: nn.Module) -> Iterator[RoutedExperts]:
    """Yield the experts of each layer of a decoder, in the order of the layers."""
    for module in decoder.modules():
        if not isinstance(getattr(module, "num_experts", None), int):
            continue
        names = list(inspect.signature(module.forward).parameters)
        for name in INDICES:
            if name in names:
                yield RoutedExperts(module, name, names.index(name))
