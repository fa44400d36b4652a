"""Lockstep: an LLM-serving engine whose scheduler is a deterministic function of a journal.

    import lockstep

    run = lockstep.simulate(model="qwen3-8b", gpu="h200", workload="gen:n=500,rate=4", slo="ttft_p99=500ms")
    run.requests                          # polars frame, one row per request
    run.figures                           # polars frame, every figure with its interval
    run.report()                          # the report, shown inline by a notebook
    other = lockstep.simulate(model="qwen3-8b", gpu="h100", workload="gen:n=500,rate=4")
    lockstep.compare(run, other).figures
    lockstep.plan(model="qwen3-8b", gpus="h100,h200", workload="gen:rate=4", slo="ttft_p99=500ms", rate=40).headline

Every option of `lockstep simulate` and `lockstep plan` is a keyword with the same name: `--schedule-policy lpm` is
`schedule_policy="lpm"`, a flag `--no-trace` is `trace=False`, and a repeated option takes a list. The commands' own
parsers read them, so values and messages are the same. Bad values raise `ConfigError`, `WorkloadError` or another error
of the commands, with the field, the value and a remedy.

Everything else is in the packages `lockstep.core`, `lockstep.host`, `lockstep.sim`, `lockstep.tools`, `lockstep.api`,
`lockstep.runtime` and `lockstep.vllm`. They are distributions of their own, share this package, and work without it.
docs/python.md describes the interface.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import extend_path
from typing import TYPE_CHECKING, Any

__path__ = extend_path(__path__, __name__)

if TYPE_CHECKING:
    from lockstep.core.contract.errors import ConfigError, LockstepError
    from lockstep.sim.interface.page import HtmlPage as Report
    from lockstep.sim.interface.plans import PlanResult as Plan
    from lockstep.sim.interface.plans import plan
    from lockstep.sim.interface.runs import ComparedFolders as Comparison
    from lockstep.sim.interface.runs import RunFolder as Run
    from lockstep.sim.interface.runs import compare, open_run, simulate
    from lockstep.sim.interface.workloads import WorkloadFrame as Workload
    from lockstep.tools.interface import Explanation, explain

__all__ = [
    "simulate", "plan", "compare", "explain", "open_run",
    "Workload", "Run", "Plan", "Comparison", "Explanation", "Report",
    "LockstepError", "ConfigError",
]  # fmt: skip

PLACES = {
    "simulate": "lockstep.sim.interface.runs:simulate",
    "plan": "lockstep.sim.interface.plans:plan",
    "compare": "lockstep.sim.interface.runs:compare",
    "explain": "lockstep.tools.interface:explain",
    "open_run": "lockstep.sim.interface.runs:open_run",
    "Workload": "lockstep.sim.interface.workloads:WorkloadFrame",
    "Run": "lockstep.sim.interface.runs:RunFolder",
    "Plan": "lockstep.sim.interface.plans:PlanResult",
    "Comparison": "lockstep.sim.interface.runs:ComparedFolders",
    "Explanation": "lockstep.tools.interface:Explanation",
    "Report": "lockstep.sim.interface.page:HtmlPage",
    "LockstepError": "lockstep.core.contract.errors:LockstepError",
    "ConfigError": "lockstep.core.contract.errors:ConfigError",
}
"""Where each public name is defined. Its first use imports it, so `import lockstep.core` loads no simulator."""


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("lockstep-core")
    if name not in PLACES:
        raise AttributeError(f"module `lockstep` has no attribute `{name}`")
    module, _, attribute = PLACES[name].partition(":")
    globals()[name] = value = getattr(import_module(module), attribute)
    return value


def __dir__() -> list[str]:
    return sorted((*globals(), *__all__, "__version__"))
