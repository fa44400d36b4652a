"""Options of an engine with a model, in three layers, each with the options of the layer before.

    ModelOptions      how a model is loaded
    RankOptions       how every rank of an engine runs it; RankSettings of the runtime has them
    EngineOptions     the engine around it; EngineConfig of the runtime and ServeSettings of the server have them

Imports no torch: a server reads its settings before an engine is built.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from lockstep.host.grammar_backends import BackendName
from lockstep.host.options import Option
from lockstep.host.quantization import Fp8Activations

KvCacheDtype = Literal["auto", "fp8_e4m3"]
Numerics = Literal["fast", "invariant"]
GraphMode = Literal["auto", "on", "off", "eager"]
"""auto: where they can run; on: or an error with the reason; eager: padded alike but not captured, to find faults."""

BATCH_TIMEOUT_S = 300.0  # the first batch may compile kernels


class ModelOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a model is loaded."""

    dtype: Annotated[str, Option("Of weights and KV: auto, bfloat16, float16, float32.")] = "auto"
    kv_cache_dtype: Annotated[KvCacheDtype, Option("Of KV: auto (that of the model) or fp8_e4m3.")] = "auto"
    fp8_activations: Annotated[
        Fp8Activations,
        Option("Round rows to fp8 where they meet fp8 weights: auto (as the checkpoint has it), on, off."),
    ] = "auto"
    draft_model: Annotated[str | None, Option("Folder of a small model whose guesses are verified.", metavar="DIR")] = (
        None
    )
    max_lora_rank: Annotated[int, Option("Of adapters; each slot on the device has room for it.")] = 16


class RankOptions(ModelOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How every rank of an engine runs its part of the model."""

    attention_backend: Annotated[str, Option("auto, flashinfer, triton, reference.")] = "auto"
    numerics: Annotated[Numerics, Option("Whether a batch may change the results of its requests.")] = "fast"
    mem_fraction: Annotated[float, Option("Of a GPU's memory, all together.")] = 0.9
    cuda_graphs: Annotated[GraphMode, Option("Whether decodes replay CUDA graphs.")] = "auto"
    cuda_graph_max_batch: Annotated[
        int | None, Option("Rows of the largest graph.", metavar="ROWS", default="as many as run")
    ] = None
    logit_processors: Annotated[
        tuple[str, ...],
        Option(
            "Of an installed package, which requests may then use; may be repeated.",
            flag="--logit-processor",
            metavar="NAME",
        ),
    ] = ()


class EngineOptions(RankOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The engine around a model."""

    device: Annotated[str, Option("auto, cpu, cuda, cuda:1, ...")] = "auto"
    tp: Annotated[int, Option("GPUs, or on the CPU processes, that share one copy of the model.")] = 1
    random_weights: Annotated[int | None, Option("Small random weights; only config.json is read.", metavar="SEED")] = (
        None
    )
    seed: Annotated[int, Option("Of requests without one of their own.")] = 0
    grammar_backend: Annotated[BackendName, Option("Library that keeps answers to grammars.")] = "auto"
    batch_timeout_s: Annotated[
        float, Option("Seconds without a result after which an engine with work has failed; 0: never.")
    ] = BATCH_TIMEOUT_S
