"""The GPU host of `lockstep.core`: the scheduler of the simulator, with kernels on a stream as its commands.

The runtime makes no scheduling decision. A host (`lockstep.host.loop`) takes in facts and performs commands; an
executor (`executor.py`) folds each plan into the device's tables and runs it. docs/runtime.md shows how the parts fit
together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.runtime.llm import LLM
    from lockstep.runtime.outputs import OutputDelta, RequestOutput, Scored
    from lockstep.runtime.params import Params

__all__ = ["LLM", "Params", "RequestOutput", "OutputDelta", "Scored"]


def __getattr__(name: str) -> Any:
    """Import the offline API on first use: other parts of the runtime work without it."""
    if name in __all__:
        from lockstep.runtime import llm, outputs, params

        modules = {"LLM": llm, "Params": params}
        return getattr(modules.get(name, outputs), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
