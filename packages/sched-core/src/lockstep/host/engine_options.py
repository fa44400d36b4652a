"""Options of an engine with a model, in three layers, each with the options of the layer before.

    ModelOptions      how a model is loaded
    RankOptions       how every rank of an engine runs its part; RankSettings of the runtime inherits them
    EngineOptions     the engine around it; EngineConfig of the runtime and ServeSettings of the server inherit them

This module imports no torch: a server reads its settings before an engine is built.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from lockstep.core.contract.config import PrefetchPolicy, WritePolicy
from lockstep.core.contract.multiplexing import TOKEN_BUDGET
from lockstep.host.grammar_backends import BackendName
from lockstep.host.options import Option
from lockstep.host.quantization import Fp8Activations

KvCacheDtype = Literal["auto", "fp8_e4m3"]
Numerics = Literal["fast", "invariant"]
ModelBackend = Literal["auto", "native", "transformers"]
"""The code that runs a model. auto: our own for the architectures that it has, transformers' for the others."""
GraphMode = Literal["auto", "on", "off", "eager"]
"""auto: graphs where they can run; on: graphs, or an error with the reason; eager: the same padding without capture, to
find faults."""

TransferTransport = Literal["shm", "tcp", "nixl"]
"""shm: memory that engines of one machine share; tcp: to any machine; nixl: UCX and RDMA, by an optional package."""

BATCH_TIMEOUT_S = 300.0  # the first batch may compile kernels


class ModelOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options for loading a model."""

    dtype: Annotated[str, Option("Number type of weights and KV: auto, bfloat16, float16, float32.")] = "auto"
    model_backend: Annotated[
        ModelBackend,
        Option("Code that runs the model: auto (native for the architectures that it has), native, transformers."),
    ] = "auto"
    kv_cache_dtype: Annotated[KvCacheDtype, Option("Number type of KV: auto (as `dtype`) or fp8_e4m3.")] = "auto"
    fp8_activations: Annotated[
        Fp8Activations,
        Option("Round rows to fp8 before products with fp8 weights: auto (as the checkpoint states), on, off."),
    ] = "auto"
    draft_model: Annotated[
        str | None, Option("Folder of a small model, or of an EAGLE-3 head, that proposes drafts.", metavar="DIR")
    ] = None
    max_lora_rank: Annotated[int, Option("Largest rank of an adapter; each slot on the device has room for it.")] = 16


class RankOptions(ModelOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options with which every rank of an engine runs its part of the model."""

    attention_backend: Annotated[str, Option("Attention kernels: auto, flashinfer, triton, cpu, reference.")] = "auto"
    numerics: Annotated[Numerics, Option("Whether a batch may change the results of its requests.")] = "fast"
    swa_full_tokens_ratio: Annotated[
        float | None,
        Option(
            "Pages of layers with sliding windows, as a share of those of the full layers.",
            default="windows use the pages of all layers",
        ),
    ] = None
    mamba_full_memory_ratio: Annotated[
        float, Option("Bytes of the states of layers that keep one, as a multiple of the bytes of KV.")
    ] = 0.9
    mamba_track_interval: Annotated[
        int, Option("Tokens between two checkpoints of a state, from which cached prefixes continue.", metavar="TOKENS")
    ] = 256
    max_mamba_cache_size: Annotated[
        int | None,
        Option(
            "Slots of states, for running requests and checkpoints.",
            metavar="SLOTS",
            default="by the ratio, and with `pages` one or more for each running request",
        ),
    ] = None
    diffusion_threshold: Annotated[
        float | None,
        Option(
            "Of a model that answers in blocks: probability above which a drawn token replaces its mask.",
            metavar="PROBABILITY",
            default="0.95",
        ),
    ] = None
    ep: Annotated[int, Option("Ranks over which the experts of a mixture of experts are divided: 1, or as --tp.")] = 1
    moe_a2a: Annotated[
        bool, Option("With --ep: send each token to the ranks of its experts, instead of summing over all ranks.")
    ] = False
    eplb: Annotated[
        bool, Option("With --ep: place the experts by their load, and move them between ranks while serving.")
    ] = False
    redundant_experts: Annotated[
        int, Option("With --eplb: slots of a layer for further copies of experts, on all ranks together.")
    ] = 0
    eplb_interval: Annotated[int, Option("With --eplb: batches between two placements.")] = 1000
    eplb_imbalance_min: Annotated[
        float, Option("With --eplb: experts stay while the fullest rank has at most this times the mean load.")
    ] = 1.0
    encoder_data_parallel: Annotated[
        bool,
        Option(
            "With --tp: divide pictures, sounds and videos over the ranks to encode them; off: each encodes all.",
            negatable=True,
            default="on",
        ),
    ] = True
    pdmux: Annotated[
        bool, Option("Compute prompts some layers at a time beside decodes; on a CPU: docs/runtime.md.")
    ] = False
    pdmux_token_budget: Annotated[
        int, Option("With --pdmux: new tokens times layers of one launch of a prompt.", metavar="TOKENS")
    ] = TOKEN_BUDGET
    mem_fraction: Annotated[float, Option("Share of a GPU's memory that the engine may use, weights included.")] = 0.9
    cuda_graphs: Annotated[GraphMode, Option("Whether passes replay CUDA graphs.")] = "auto"
    cuda_graph_max_batch: Annotated[
        int | None, Option("Rows of the largest graph.", metavar="ROWS", default="as many as run")
    ] = None
    piecewise_graph_max_tokens: Annotated[
        int | None,
        Option(
            "New tokens of the largest pass that runs in pieces of CUDA graphs, if it is not decodes only; 0: none.",
            metavar="TOKENS",
            default="512",
        ),
    ] = None
    memory_saver: Annotated[
        bool, Option("Keep the addresses of a GPU's weights and KV while their memory is released, for CUDA graphs.")
    ] = False
    logit_processors: Annotated[
        tuple[str, ...],
        Option(
            "Logit processor of an installed package that requests may use; may be repeated.",
            flag="--logit-processor",
            metavar="NAME",
        ),
    ] = ()

    # tiers below the device's cache: docs/tiers.md
    host_cache_gb: Annotated[
        float, Option("Host memory for an engine's KV, on all its ranks together, in 1e9 bytes; 0: none.")
    ] = 0.0
    host_write_policy: Annotated[WritePolicy, Option("When KV is copied to host memory: docs/tiers.md.")] = (
        "write_through"
    )
    load_tokens_min: Annotated[
        int, Option("Fewer tokens that only host memory has are computed again instead of loaded.")
    ] = 10
    storage: Annotated[
        str | None, Option("Folder below host memory for KV, which engines of a model may share.", metavar="DIR")
    ] = None
    storage_gb: Annotated[
        float, Option("With --storage: bytes that all engines of the folder keep in it, in 1e9 bytes.")
    ] = 0.0
    prefetch_policy: Annotated[PrefetchPolicy, Option("How long a request waits for its prefix from storage.")] = (
        "timeout"
    )
    prefetch_tokens_min: Annotated[int, Option("Shorter prefixes are not read from storage.")] = 256

    # KV between prefill and decode engines: docs/distributed.md
    transfer_transport: Annotated[
        TransferTransport, Option("With prefill and decode engines: shm (one machine), tcp, nixl (optional package).")
    ] = "shm"
    transfer_checksums: Annotated[
        bool, Option("With prefill and decode engines: compare checksums of all KV that arrives.")
    ] = False


class EngineOptions(RankOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the engine around a model."""

    device: Annotated[str, Option("Device of the engine: auto, cpu, cuda, cuda:1, ...")] = "auto"
    tp: Annotated[int, Option("GPUs, or on the CPU processes, that share one copy of the model.")] = 1
    pp: Annotated[
        int, Option("Pipeline stages: groups of --tp GPUs, or of processes, with some of the layers each.")
    ] = 1
    attention_dp: Annotated[
        int,
        Option("Data-parallel ranks: GPUs with attention, requests and KV of their own that share all other layers."),
    ] = 1
    rank_schedulers: Annotated[
        bool, Option("With --attention-dp: a scheduler for each rank, which agree on every pass.")
    ] = False
    ray: Annotated[
        str | None,
        Option(
            "Place the stages before the last one on nodes of a Ray cluster: auto, or HOST:PORT.", metavar="ADDRESS"
        ),
    ] = None
    random_weights: Annotated[
        int | None, Option("Use small random weights of this seed; only config.json is read.", metavar="SEED")
    ] = None
    seed: Annotated[int, Option("Seed of requests without a seed.")] = 0
    receive_interval: Annotated[
        int, Option("Decodes between two receptions of requests, at most; every other batch is followed by one.")
    ] = 1
    grammar_backend: Annotated[BackendName, Option("Library that compiles grammars.")] = "auto"
    batch_timeout_s: Annotated[
        float, Option("Seconds without a result after which an engine with work has failed; 0: never.")
    ] = BATCH_TIMEOUT_S
