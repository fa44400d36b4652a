"""A module in place of FlashInfer, whose wrappers compute in torch what its documentation describes.

FlashInfer has no kernels for a CPU. Each call is bound to the signatures of the releases that are accepted. A wrapper
for CUDA graphs reads lengths and pages of a replay from its buffers, as the library does.
"""

from __future__ import annotations

import json
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch

from lockstep.runtime import attention, triton_trial
from lockstep.runtime.attention.reference import attend
from lockstep.runtime.attention.rules import LayerRules
from tests.runtime import flashinfer_signatures

NO_COMPILER = "a small kernel could not be run: no compiler"
RELEASES: dict[str, Any] = json.loads(flashinfer_signatures.STORED.read_text())


def fits(wrapper: Wrapper, method: str, *args: Any, **options: Any) -> None:
    """Bind a call to the signatures of all releases. Raises TypeError for one that does not fit."""
    name = f"Batch{'Decode' if wrapper.decode else 'Prefill'}WithPagedKVCacheWrapper"
    for classes in RELEASES.values():
        flashinfer_signatures.signature(classes[name][method]).bind(wrapper, *args, **options)
        masks = set() if wrapper.decode else {"_custom_mask_buf", "_mask_indptr_buf"}
        assert {"_pin_memory_int_workspace_buffer", *masks} <= set(classes[name]["attributes"])
    wrapper.bound.add((name, method))


class Wrapper:
    """Plans and runs like the two paged wrappers of FlashInfer."""

    decode = True
    pins: ClassVar[bool] = False  # whether memory of plans is pinned, as the library's is
    bound: ClassVar[set[tuple[str, str]]] = set()

    def __init__(self, workspace: torch.Tensor, layout: str, **options: Any) -> None:
        fits(self, "__init__", workspace, layout, **options)
        assert layout == "NHD"
        self.calls = options
        self._pin_memory_int_workspace_buffer = torch.empty(8, dtype=torch.uint8, pin_memory=self.pins)
        self.pinned_used: list[int] = []

    def plan(self, *args: Any, **options: Any) -> None:
        fits(self, "plan", *args, **options)
        self.pinned_used.append(self._pin_memory_int_workspace_buffer.data_ptr())
        args = (None, *args) if self.decode else args
        self.qo_indptr, self.indptr, self.pages, self.last, heads, kv_heads, head_dim, page_size = args
        self.options = options
        assert self.indptr.device.type == "cpu"
        assert {one.dtype for one in (self.indptr, self.pages, self.last)} == {torch.int32}
        assert len(self.pages) == self.indptr[-1]
        if not self.decode:
            assert self.calls["backend"] == "fa2" or not {"custom_mask", "packed_custom_mask"} & options.keys()
            self._custom_mask_buf: torch.Tensor | None = None
            self._mask_indptr_buf: torch.Tensor | None = None
        if self.calls.get("use_cuda_graph"):
            for name, given in (("indptr", self.indptr), ("last_page_len", self.last)):
                buffer = self.calls[f"paged_kv_{name}_buffer"]
                assert len(given) == len(buffer)
                buffer.copy_(given, non_blocking=True)
            assert len(self.pages) <= len(self.calls["paged_kv_indices_buffer"])
            self.calls["paged_kv_indices_buffer"][: len(self.pages)].copy_(self.pages)
        self.shape = heads, kv_heads, head_dim, page_size

    def run(
        self,
        query: torch.Tensor,
        paged: tuple[torch.Tensor, torch.Tensor],
        *,
        out: torch.Tensor,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> torch.Tensor:
        fits(self, "run", query, paged, out=out, k_scale=k_scale, v_scale=v_scale)
        assert {one.dtype for one in paged} == {self.options["kv_data_type"]}
        assert query.dtype == self.options["q_data_type"]
        heads, kv_heads, head_dim, page_size = self.shape
        assert query.shape == out.shape
        assert query.shape[1:] == (heads, head_dim)
        rules = LayerRules(self.options["sm_scale"] * k_scale)
        if self.calls.get("use_cuda_graph"):
            return self._replayed(query, paged, out, rules, v_scale)
        qo_indptr = range(len(self.last) + 1) if self.decode else self.qo_indptr.tolist()
        assert qo_indptr[-1] == len(query)
        for row, last in enumerate(self.last.tolist()):
            pages = self.pages[self.indptr[row].item() : self.indptr[row + 1].item()]
            length = (len(pages) - 1) * page_size + last
            keys, values = (one[pages].reshape(-1, kv_heads, head_dim)[:length] for one in paged)
            at = slice(qo_indptr[row], qo_indptr[row + 1])
            hidden = self._hidden(row, at.stop - at.start, length)
            out[at] = attend(query[at], keys.float(), values.float(), rules, hidden) * v_scale
        return out

    def _hidden(self, row: int, new: int, length: int) -> torch.Tensor | None:
        """Return what a row's mask hides, bool [new, length]; None: the row has none, so it attends causally.

        As the kernel of FA2 reads it: bit `token * length + position` behind the row's first byte, the lowest first.
        """
        if self.decode or self._custom_mask_buf is None:
            assert new == 1 or self.options["causal"]
            return None
        assert self.calls["backend"] == "fa2"
        mask, begins = self._custom_mask_buf, self._mask_indptr_buf
        assert begins is not None
        assert (mask.dtype, begins.dtype) == (torch.uint8, torch.int32)
        assert mask.device == begins.device == self.pages.device
        read = mask[(begins[row] + torch.arange(-(-new * length // 8), device=mask.device)).long()]
        bits = (read[:, None] >> torch.arange(8, device=mask.device)) & 1
        return bits.reshape(-1)[: new * length].reshape(new, length) == 0

    def _replayed(
        self,
        query: torch.Tensor,
        paged: tuple[torch.Tensor, torch.Tensor],
        out: torch.Tensor,
        rules: LayerRules,
        v_scale: float,
    ) -> torch.Tensor:
        """Attend in shapes that do not depend on lengths: those are in the buffers."""
        _, kv_heads, head_dim, page_size = self.shape
        indptr, pages, last = (self.calls[f"paged_kv_{name}_buffer"] for name in ("indptr", "indices", "last_page_len"))
        width = len(pages) // len(last)
        at = (indptr[:-1, None] + torch.arange(width, device=query.device)).clamp(max=len(pages) - 1)
        of_row = pages[at.long()].long()
        lengths = (indptr[1:] - indptr[:-1] - 1) * page_size + last
        behind = torch.arange(width * page_size, device=query.device) >= lengths[:, None]
        keys, values = (
            one[of_row].float().reshape(len(last), -1, kv_heads, head_dim).masked_fill(behind[:, :, None, None], 0.0)
            for one in paged
        )
        for row in range(len(last)):
            found = attend(query[row : row + 1], keys[row], values[row], rules, behind[row : row + 1])
            out[row : row + 1] = found * v_scale
        return out


def flashinfer_module() -> Any:
    """Return a module of the library's name with the wrappers, as if it was installed."""
    module: Any = ModuleType("flashinfer")
    module.__spec__ = ModuleSpec("flashinfer", None)
    module.BatchDecodeWithPagedKVCacheWrapper = Wrapper
    module.BatchPrefillWithPagedKVCacheWrapper = type("Prefill", (Wrapper,), {"decode": False})
    return module


def flashinfer_with_events(patch: pytest.MonkeyPatch) -> ModuleType:
    """Install the module beside CUDA events that happen when they are waited for. Returns it; `Event` counts waits."""
    module: ModuleType = flashinfer_module()
    patch.setitem(sys.modules, "flashinfer", module)

    class Event:
        """An event that happens when it is waited for."""

        waited = 0
        recorded = False

        def synchronize(self) -> None:
            Event.waited += self.recorded

        def record(self) -> None:
            self.recorded = True

    patch.setattr(torch.cuda, "Event", Event)
    module.Event = Event  # type: ignore[attr-defined]  # of the stand-in alone, for tests that count waits
    return module


def flashinfer_alone(patch: pytest.MonkeyPatch) -> ModuleType:
    """Install the module, with a compiler and without Triton: everything is computed by torch. Returns it."""
    module: ModuleType = flashinfer_module()
    patch.setitem(sys.modules, "flashinfer", module)
    patch.setattr(attention, "version", lambda name: "0.7.2")
    patch.setattr(attention, "_has_compiler", lambda: True)
    patch.setattr(triton_trial, "_tried", lambda index: NO_COMPILER)
    patch.setattr(Wrapper, "pins", True)
    return module
