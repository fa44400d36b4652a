"""LoRA adapters: vLLM's requests name them, the core counts them, and the workers load them by themselves.

vLLM identifies an adapter by its number in the workers and by name and path in the prefix cache. The core identifies
it by a name and a rising version. Number and name together are the core's name. The version rises with each new path,
and with each request that reloads the adapter in place: KV of older weights is no longer shared.

The workers load an adapter in the first pass that runs it. The core's LoadAdapter is therefore answered at once, and a
load counts as part of that pass. `base_beside_loras` has the core count adapters as the workers do: `max_loras` of
them, and the base model beside.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from lockstep.core.contract.events import LoadAdapterControl

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest


class Version(NamedTuple):
    """The newest version of an adapter, and the folder of its weights."""

    number: int
    path: str


class AdapterNames:
    """The adapters that requests have named so far."""

    def __init__(self) -> None:
        self._versions: dict[str, Version] = {}

    def name_of(self, lora: LoRARequest | None) -> tuple[str, LoadAdapterControl | None]:
        """Return the core's name of an adapter, and the control that makes it available.

        The control is None if the core has the adapter in this version already, or if there is no adapter.
        """
        if lora is None:
            return "", None
        name = f"{lora.lora_int_id}:{lora.lora_name}"
        known = self._versions.get(name)
        if known is not None and known.path == lora.lora_path and not lora.load_inplace:
            return name, None
        version = Version(0 if known is None else known.number + 1, lora.lora_path)
        self._versions[name] = version
        return name, LoadAdapterControl(name, version.number, source=lora.lora_path)
