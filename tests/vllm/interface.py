"""Compare `lockstep.vllm` with the interfaces of a vLLM that is not installed: `python tests/vllm/interface.py WHEEL`.

WHEEL is a file of vLLM's or its folder `vllm`; without it the installed one is read. Nothing of it is imported: both
sides are read as syntax, so that a release without a wheel for this machine can be checked. Findings are:

- a method of SchedulerInterface that is missing, or takes other parameters
- something that vLLM's engine core calls on a scheduler and the class does not have
- a name that `lockstep.vllm` imports, and the module of vLLM does not define
- a keyword of a class of vLLM, or a field of its outputs, that the class does not have
- an option of vLLM's configuration that `settings.py` reads, and its class does not have
- an option that vLLM's scheduler reads, and that is neither read here nor named in WITHOUT_EFFECT

The exit status is 1 if there is a finding.
"""

from __future__ import annotations

import ast
import sys
import zipfile
from collections.abc import Callable, Iterator
from importlib import util
from pathlib import Path

OURS = Path(__file__).resolve().parents[2] / "packages/vllm-scheduler/src/lockstep/vllm"
INTERFACE = "v1/core/sched/interface.py"
Read = Callable[[str], str]
"""Returns the text of a file of vLLM, by its path in the package; raises KeyError if there is none."""

CONFIGS = {
    "vllm_config": ("config/vllm.py", "VllmConfig"),
    "scheduler_config": ("config/scheduler.py", "SchedulerConfig"),
    "scheduler": ("config/scheduler.py", "SchedulerConfig"),
    "parallel_config": ("config/parallel.py", "ParallelConfig"),
    "parallel": ("config/parallel.py", "ParallelConfig"),
    "model_config": ("config/model.py", "ModelConfig"),
    "model": ("config/model.py", "ModelConfig"),
    "cache_config": ("config/cache.py", "CacheConfig"),
    "lora_config": ("config/lora.py", "LoRAConfig"),
    "speculative": ("config/speculative.py", "SpeculativeConfig"),
    "kv_cache_config": ("v1/kv_cache_interface.py", "KVCacheConfig"),
}
"""Names in `settings.py`, and the classes of vLLM behind them."""

OUTPUTS = {
    ("scheduler.py", "output"): ("v1/core/sched/output.py", "SchedulerOutput"),
    ("plans.py", "output"): ("v1/core/sched/output.py", "SchedulerOutput"),
    ("plans.py", "cached"): ("v1/core/sched/output.py", "CachedRequestData"),
    ("results.py", "output"): ("v1/engine/__init__.py", "EngineCoreOutput"),
    ("results.py", "result"): ("v1/outputs.py", "ModelRunnerOutput"),
}
"""Variables of modules, and the classes of vLLM that their values have."""

SCHEDULERS = ("v1/core/sched/scheduler.py", "v1/core/sched/async_scheduler.py")

WITHOUT_EFFECT = {
    "disable_eagle_block_drop": "the core drops no block behind a hit: the first draft there may be wrong, no answer",
    "ec_manager_config": "its class is read",
    "enable_logging_iteration_details": "vLLM's engine core writes them; encoder inputs are not among them",
    "enable_mamba_shared_prefix_checkpoint": "prefix caching of recurrent state is refused",
    "get_encoder_cache_manager_obj": "a class of another package is refused",
    "is_kv_consumer": "connectors other than HostTier are refused",
    "is_kv_producer": "connectors other than HostTier are refused",
    "kv_cache_metrics_sample": "these metrics are refused",
    "kv_load_failure_policy": "connectors other than HostTier are refused",
    "long_prefill_token_threshold_adaptive": "the threshold itself is refused",
    "max_concurrent_batches": "follows from asynchronous scheduling and stages",
    "max_in_flight_tokens": "follows from other options; the core knows what is in flight",
    "needs_eagle_block_drop": "the core drops no block behind a hit: the first draft there may be wrong, no answer",
    "num_gpu_blocks": "the KV cache configuration has it",
    "num_hash_lookahead_tokens": "the core hashes no blocks",
    "num_lookahead_tokens": "positions behind those of a plan are written to the null block",
    "use_eagle": "the method is read",
    "use_eagle_block_drop": "the core drops no block behind a hit: the first draft there may be wrong, no answer",
}
"""Options that vLLM's scheduler reads, and why they need no counterpart here."""


def reader(path: Path | None) -> Read:
    """Return what reads files of vLLM from a wheel or a folder; of the installed one if there is no path."""
    if path is None:
        spec = util.find_spec("vllm")
        if spec is None or not spec.submodule_search_locations:
            raise SystemExit("interface.py: vLLM is not installed\nhint: name a wheel, or its folder `vllm`")
        path = Path(next(iter(spec.submodule_search_locations)))
    if path.is_dir():
        folder = path

        def of_folder(name: str) -> str:
            if not (folder / name).is_file():
                raise KeyError(name)
            return (folder / name).read_text()

        return of_folder
    wheel = zipfile.ZipFile(path)
    return lambda name: wheel.read(f"vllm/{name}").decode()


def classes(text: str) -> dict[str, ast.ClassDef]:
    """Return the classes of a module."""
    return {node.name: node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)}


def methods(node: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    """Return the methods of a class."""
    return {one.name: one for one in node.body if isinstance(one, ast.FunctionDef)}


def members(node: ast.ClassDef) -> set[str]:
    """Return what an instance of a class has: methods, properties, fields, and what methods assign to self."""
    found = set(methods(node))
    for one in ast.walk(node):
        if isinstance(one, ast.AnnAssign | ast.Assign):
            for target in [one.target] if isinstance(one, ast.AnnAssign) else one.targets:
                if isinstance(target, ast.Name):
                    found.add(target.id)
                if (
                    isinstance(target, ast.Attribute)
                    and isinstance(target.value, ast.Name)
                    and target.value.id == "self"
                ):
                    found.add(target.attr)
    return found


def parameters(function: ast.FunctionDef) -> tuple[list[str], list[str]]:
    """Return the names of parameters, and of those that a caller must give."""
    positional = [one.arg for one in [*function.args.posonlyargs, *function.args.args]]
    required = positional[: len(positional) - len(function.args.defaults)]
    keywords = [one.arg for one in function.args.kwonlyargs]
    required += [name for name, value in zip(keywords, function.args.kw_defaults, strict=True) if value is None]
    return positional + keywords, required


def methods_that_differ(read: Read, own: ast.ClassDef) -> Iterator[str]:
    """Compare the methods of SchedulerInterface with those of the class."""
    ours = methods(own)
    for name, wanted in methods(classes(read(INTERFACE))["SchedulerInterface"]).items():
        abstract = any(isinstance(one, ast.Name) and one.id == "abstractmethod" for one in wanted.decorator_list)
        if name not in ours:
            if abstract:
                yield f"SchedulerInterface.{name} is missing"
            continue
        (names, _), (our_names, required) = parameters(wanted), parameters(ours[name])
        if lacking := [one for one in names if one not in our_names]:
            yield f"{name}: no parameter `{lacking[0]}`"
        if unknown := [one for one in required if one not in names]:
            yield f"{name}: vLLM does not give `{unknown[0]}`"


def calls_that_are_missing(read: Read, own: ast.ClassDef) -> Iterator[str]:
    """Compare what vLLM's engine core uses of `self.scheduler` with the class."""
    has = members(own) | members(classes(read(INTERFACE))["SchedulerInterface"])
    used = {
        node.attr
        for node in ast.walk(ast.parse(read("v1/engine/core.py")))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Attribute)
        and node.value.attr == "scheduler"
        and isinstance(node.value.value, ast.Name)
        and node.value.value.id == "self"
    }
    for name in sorted(used - has):
        yield f"vLLM's engine core uses `scheduler.{name}`"


def defined(read: Read, module: str, name: str) -> ast.AST | None:
    """Return what defines a name in a module of vLLM; None if nothing does."""
    base = module.removeprefix("vllm").removeprefix(".").replace(".", "/")
    for path in (f"{base}.py", f"{base}/__init__.py" if base else "__init__.py"):
        try:
            tree = ast.parse(read(path))
        except KeyError:
            continue
        for node in ast.walk(tree):
            match node:
                case ast.ClassDef(name=found) | ast.FunctionDef(name=found) | ast.Name(id=found, ctx=ast.Store()):
                    pass
                case ast.alias():
                    found = node.asname or node.name
                case ast.Constant(value=str(found)) if path.endswith("__init__.py"):  # imported on first use
                    pass
                case _:
                    continue
            if found == name:
                return node
    return None


def imports_that_are_missing(read: Read, file: str, tree: ast.Module) -> Iterator[str]:
    """Compare the imports of one of our modules, and the keywords of calls of what it imports, with vLLM."""
    imported: dict[str, ast.AST] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
            for alias in node.names:
                found = defined(read, node.module or "", alias.name)
                if found is None:
                    yield f"{file}: `{node.module}` has no `{alias.name}`"
                else:
                    imported[alias.name] = found
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            target = imported.get(node.func.id)
            if isinstance(target, ast.ClassDef):
                known = members(target)
                for keyword in node.keywords:
                    if keyword.arg and keyword.arg not in known:
                        yield f"{file}: {node.func.id} has no field `{keyword.arg}`"


def fields_that_are_missing(read: Read, file: str, tree: ast.Module) -> Iterator[str]:
    """Compare the attributes of variables with the classes of vLLM that their values have."""
    table = {name: where for (module, name), where in OUTPUTS.items() if module == file}
    if file == "settings.py":
        table |= CONFIGS
    known = {name: members(classes(read(path))[kind]) for name, (path, kind) in table.items()}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            name = owner_of(node)
            if name in known and node.attr not in known[name]:
                yield f"{file}: {table[name][1]} has no `{node.attr}`"


def owner_of(node: ast.Attribute) -> str:
    """Return the name of what has an attribute: of a variable, or of an attribute itself; else empty."""
    owner = node.value
    return owner.id if isinstance(owner, ast.Name) else owner.attr if isinstance(owner, ast.Attribute) else ""


def options_that_are_ignored(read: Read) -> Iterator[str]:
    """Compare the options that vLLM's scheduler reads with what this package reads."""
    read_here = {
        node.attr
        for path in OURS.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
    }
    for file in SCHEDULERS:
        for node in ast.walk(ast.parse(read(file))):
            if isinstance(node, ast.Attribute):
                owner = node.value
                name = (
                    owner.id if isinstance(owner, ast.Name) else owner.attr if isinstance(owner, ast.Attribute) else ""
                )
                known = node.attr in read_here or node.attr in WITHOUT_EFFECT
                if name.endswith("_config") and name != "kv_cache_config" and not known:
                    yield f"vLLM's scheduler reads the option `{name}.{node.attr}`, which is neither read nor refused"


def findings(read: Read) -> list[str]:
    """Return all differences, in words."""
    own = classes((OURS / "scheduler.py").read_text())["Scheduler"]
    found = [*methods_that_differ(read, own), *calls_that_are_missing(read, own), *options_that_are_ignored(read)]
    for path in sorted(OURS.glob("*.py")):
        tree = ast.parse(path.read_text())
        found += imports_that_are_missing(read, path.name, tree)
        found += fields_that_are_missing(read, path.name, tree)
    return list(dict.fromkeys(found))


def main() -> int:
    found = findings(reader(Path(sys.argv[1]) if len(sys.argv) > 1 else None))
    for one in found:
        print(one)
    print(f"{len(found)} findings")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
