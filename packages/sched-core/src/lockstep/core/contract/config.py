"""Scheduler settings: validated on construction, immutable, recorded in the journal's header.

Field names are those of SGLang and vLLM if they have the setting. Defaults are SGLang's unless the comment names
another (docs/scheduling.md lists each with its source). Every limit that admission, clamping and rejection share is a
property here, so that it is computed in one place.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeGuard, get_args

import msgspec

from lockstep.core.contract.cache_tiers import CacheTiers as CacheTiers
from lockstep.core.contract.cache_tiers import PrefetchPolicy as PrefetchPolicy
from lockstep.core.contract.cache_tiers import WritePolicy as WritePolicy
from lockstep.core.contract.diffusion_settings import BlockDiffusion as BlockDiffusion
from lockstep.core.contract.diffusion_settings import check_diffusion
from lockstep.core.contract.draft_settings import DRAFT_SETTINGS as DRAFT_SETTINGS
from lockstep.core.contract.draft_settings import SpeculativeMethod as SpeculativeMethod
from lockstep.core.contract.draft_settings import settle_drafts
from lockstep.core.contract.errors import ConfigError
from lockstep.core.contract.expert_placing import ExpertPlacing as ExpertPlacing
from lockstep.core.contract.floats import store_floats
from lockstep.core.contract.hybrid_memory import HybridMemory as HybridMemory
from lockstep.core.contract.multiplexing import Division as Division
from lockstep.core.contract.multiplexing import Multiplexing as Multiplexing
from lockstep.core.contract.multiplexing import check_multiplexing
from lockstep.core.contract.setting import Setting, one_of
from lockstep.core.contract.two_batch_settings import settle_two_batch

SCHEDULE_POLICIES = ("fcfs", "lpm", "dfs-weight", "lof", "random", "routing-key", "priority", "hrrn", "spf")
"""The policies of the core, each a function in ordering.py. Installed packages provide others: docs/policies.md."""

TruncateInput = Literal["no", "left", "right"]
Requeue = Literal["tail", "front"]
RetractedKv = Literal["free", "cache"]
ChunkUnit = Literal["page", "token"]
Batching = Literal["prefill_first", "mixed", "running_first"]
Reserve = Literal["ratio", "on_demand", "full"]
RetractionPolicy = Literal["length", "newest", "priority"]
PrefixDeduplication = Literal["off", "last", "defer"]
SessionKv = Literal["hold", "evictable"]
Role = Literal["mixed", "prefill", "decode"]
TransferAllocation = Literal["early", "prefill_complete"]
TransferFailure = Literal["fail", "recompute"]

BEHAVIOUR_FLAGS: tuple[str, ...] = ()
"""Named changes of decision rules. A journal whose header lacks a flag is replayed under the old rule."""

OVERLAP_DEPTH_MAX = 2
FLOAT_SETTINGS = (
    "schedule_conservativeness",
    "speculative_min_chance",
    "cache_guarantee",
    "prefill_delayer_token_usage_low_watermark",
    "prefill_delayer_queue_min_ratio",
)
JUMP_FORWARD_TOKENS_MAX = 64


class SchedConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings of one engine's scheduler. Raises ConfigError when settings contradict each other."""

    # memory
    page_size: Annotated[int, Setting("tokens per KV page, a power of two")] = 16
    pages: Annotated[int, Setting("KV pages in the pool", default="what fits beside the weights")] = 4096
    radix_cache: Annotated[bool, Setting("keep the KV of finished prompts for later requests with the same prefix")] = (
        True
    )
    same_step_sharing: Annotated[
        bool, Setting("share a prompt's KV with requests launched after it, before it is computed")
    ] = False
    waiting_prefix_refresh: Annotated[
        int, Setting("launches until cached prefixes of waiting requests count as used again; 0: never")
    ] = 0
    radix_capacity_pages: Annotated[int | None, Setting("unreferenced pages that the radix cache keeps, at most")] = (
        None
    )

    # limits
    context_tokens_max: Annotated[
        int, Setting("prompt and output together, per request", default="the model's context")
    ] = 32768
    max_running_requests: Annotated[int, Setting("requests that hold a row and are not finished")] = 256
    request_rows: Annotated[
        int | None, Setting("rows of the request table; none: max-running-requests x (overlap-depth + 1)")
    ] = None
    max_queued_requests: Annotated[int | None, Setting("waiting requests beyond this are rejected; none: no limit")] = (
        None
    )
    waiting_timeout_us: Annotated[
        int | None, Setting("a request not admitted this long after its arrival is rejected, e.g. 30s")
    ] = None
    running_timeout_us: Annotated[
        int | None, Setting("a request not finished this long after its arrival is ended, e.g. 10min")
    ] = None

    # admission
    schedule_policy: Annotated[
        str, Setting("order of the waiting queue: fcfs, lpm, ...: docs/scheduling.md, docs/policies.md")
    ] = "fcfs"
    schedule_conservativeness: Annotated[
        float, Setting("scales the share of their output limit that running requests reserve")
    ] = 1.0
    chunk_target_us: Annotated[
        int | None, Setting("shorten chunks so that a pass stays under this, as fitted, e.g. 20ms; none: never")
    ] = None
    max_prefill_tokens: Annotated[int, Setting("new tokens that one extend may take")] = 16384
    chunked_prefill_size: Annotated[
        int | None, Setting("new tokens of one extend before a prompt is split; none: never split")
    ] = 8192
    chunk_unit: Annotated[
        ChunkUnit, Setting("unit of both limits of new tokens, and where a prompt may be split: page or token")
    ] = "page"
    retracted_requeue: Annotated[Requeue, Setting("where a retracted request waits: tail (SGLang) or front (vLLM)")] = (
        "tail"
    )
    retracted_kv: Annotated[
        RetractedKv, Setting("KV of a request retracted for pages: free (SGLang), or cache (left to the radix cache)")
    ] = "free"
    batching: Annotated[
        Batching, Setting("prefill_first, mixed (decodes join an extend), or running_first (vLLM's one budget)")
    ] = "prefill_first"
    reserve: Annotated[Reserve, Setting("room left for running requests: ratio, on_demand or full")] = "ratio"
    retraction_policy: Annotated[
        RetractionPolicy, Setting("order of victims: length (fewest outputs), newest or priority")
    ] = "length"
    prefill_max_requests: Annotated[int | None, Setting("requests that one extend may take in; none: no limit")] = None
    # Prompts are split at positions that are multiples of this, however much is cached. So the kernels sum a token's
    # attention in an order that depends on its position only. SGLang aligns lengths of chunks.
    truncation_align_size: Annotated[
        int | None, Setting("prompts are split at multiples of this position; none: at any page")
    ] = None
    decode_look_ahead: Annotated[
        int, Setting("tokens of every running request that must fit before a decode is launched")
    ] = 1
    prefill_decode_interval: Annotated[int, Setting("decodes between two extends while requests decode, at least")] = 0
    retract_every: Annotated[
        int, Setting("decode launches between two forced retractions, for testing; 0: none is forced")
    ] = 0

    # overlap and output
    overlap_depth: Annotated[int, Setting("batches launched beyond the running one: 0, 1 or 2")] = 1
    decode_steps_per_launch: Annotated[
        int, Setting("decodes in one launch (multi-step scheduling); ends and page shortages are seen later")
    ] = 1
    overlap_consecutive_prefills: Annotated[
        bool, Setting("launch an extend behind an extend in flight; no: wait for its result")
    ] = True
    stream_interval: Annotated[int, Setting("tokens between two messages of a streaming request")] = 1
    force_stream_interval: Annotated[int, Setting("tokens between two messages of a request that does not stream")] = 50
    eos_token_ids: Annotated[
        tuple[int, ...], Setting("the model's end tokens, ignored by requests with ignore_eos; may be repeated")
    ] = ()

    # order of the waiting queue
    schedule_policy_version: Annotated[
        str, Setting("version that a policy of an installed package must have", default="the installed one")
    ] = ""
    schedule_seed: Annotated[int, Setting("shuffles the waiting queue under policy random")] = 0
    schedule_low_priority_values_first: Annotated[bool, Setting("under policy priority, 0 goes before 1")] = False
    default_priority_value: Annotated[
        int | None, Setting("priority of requests without one; none: after all others")
    ] = None
    prefix_deduplication: Annotated[
        PrefixDeduplication, Setting("requests with a prefix that another request computes: off, last or defer")
    ] = "off"
    bypass_limit: Annotated[
        int | None, Setting("aging limit: later requests that may be admitted before one; none: any number (SGLang)")
    ] = 256
    # sessions
    session_kv: Annotated[
        SessionKv, Setting("KV of a session between turns: hold (until pages are short) or evictable")
    ] = "hold"
    max_sessions: Annotated[int, Setting("sessions open at once")] = 1024

    # structured output
    grammar_timeout_us: Annotated[
        int | None, Setting("a request with a grammar not compiled by then is rejected; none: no limit")
    ] = None

    # inputs
    max_input_tokens: Annotated[int | None, Setting("longest prompt; none: what the context and the pool hold")] = None
    truncate_input: Annotated[
        TruncateInput, Setting("end of a longer prompt that is cut off: left, right, or no (it is rejected)")
    ] = "no"
    isolate_tenants: Annotated[bool, Setting("prefixes are never shared between tenants")] = False
    encoder_cache_tokens: Annotated[
        int | None, Setting("encoder output of media kept at once, in tokens; none: no limit")
    ] = 16384

    # preemption
    enable_priority_preemption: Annotated[bool, Setting("more important requests displace less important ones")] = False
    priority_preemption_threshold: Annotated[
        int, Setting("difference of priorities beyond which a request is displaced")
    ] = 10

    # drafts: see speculation.py; unset: no drafts, and left out of journals
    speculative_method: Annotated[
        SpeculativeMethod | msgspec.UnsetType,
        Setting("source of drafts: ngram, draft_model, eagle, mtp or none", default="none"),
    ] = msgspec.UNSET
    num_speculative_tokens: Annotated[
        int | msgspec.UnsetType, Setting("drafts of a request in one launch, at most", default="3; 8 in a tree")
    ] = msgspec.UNSET
    speculative_min_chance: Annotated[
        float | msgspec.UnsetType, Setting("drafts less likely to count are left out", default="none is")
    ] = msgspec.UNSET
    speculative_max_batch_size: Annotated[
        int | msgspec.UnsetType, Setting("no drafts while more requests decode", default="no limit")
    ] = msgspec.UNSET
    # trees of drafts, see draft_trees.py; unset: chains
    speculative_topk: Annotated[
        int | msgspec.UnsetType,
        Setting("alternatives drafted behind each token, at most; above 1 drafts are a tree", default="1"),
    ] = msgspec.UNSET
    speculative_num_steps: Annotated[
        int | msgspec.UnsetType, Setting("tokens on a path of a tree of drafts, at most", default="4 in a tree")
    ] = msgspec.UNSET
    # tokens that a grammar forces, see jump_forward.py: of a request in one launch, at most; unset: each by itself
    jump_forward_tokens: Annotated[
        int | msgspec.UnsetType,
        Setting("tokens that a grammar forces, computed in one launch, at most", default="none"),
    ] = msgspec.UNSET

    # adapters
    max_loras: Annotated[
        int | None,
        Setting("adapters on the device, and in one batch, where the base model counts as one; 0, none: no LoRA"),
    ] = None

    # set by hosts that run the base model beside `max_loras` adapters; unset: it counts as one of them
    base_beside_loras: bool | msgspec.UnsetType = msgspec.UNSET  # requests without an adapter always have a place

    # prefill and decode on different engines: docs/distributed.md; unset: mixed, and left out of journals
    role: Annotated[
        Role | msgspec.UnsetType, Setting("prefill or decode, of engines in a cluster; or mixed", default="mixed")
    ] = msgspec.UNSET
    transfer_allocation: Annotated[
        TransferAllocation | msgspec.UnsetType,
        Setting("when a decode engine allocates pages: early or prefill_complete", default="early"),
    ] = msgspec.UNSET
    transfer_failure: Annotated[
        TransferFailure | msgspec.UnsetType,
        Setting("a request without its KV after a transfer: fail or recompute", default="fail"),
    ] = msgspec.UNSET
    num_reserved_decode_tokens: Annotated[
        int | msgspec.UnsetType,
        Setting("tokens reserved for each running request when pages are allocated", default="512"),
    ] = msgspec.UNSET
    transfer_slots: Annotated[
        int | msgspec.UnsetType | None, Setting("metadata slots of transfers", default="twice max-running-requests")
    ] = msgspec.UNSET
    bootstrap_timeout_us: Annotated[
        int | msgspec.UnsetType | None,
        Setting("a transfer fails after this long without a message of the other engine; none: never", default="300s"),
    ] = msgspec.UNSET
    transfer_timeout_us: Annotated[
        int | msgspec.UnsetType | None,
        Setting("a transfer fails if not ended this long after its pages or last part; none: never", default="300s"),
    ] = msgspec.UNSET
    # data-parallel attention: docs/distributed.md; unset: one rank, and left out of journals
    dp_ranks: int | msgspec.UnsetType = msgspec.UNSET  # ranks that run every pass together, each with rows of its own
    dp_rank: int | msgspec.UnsetType = msgspec.UNSET  # which of them this one is
    prefill_delayer: Annotated[
        bool | msgspec.UnsetType, Setting("of ranks: prompts wait until every rank has prompts", default="no")
    ] = msgspec.UNSET
    prefill_delayer_max_delay_passes: Annotated[
        int | msgspec.UnsetType, Setting("passes that prompts wait for other ranks, at most", default="30")
    ] = msgspec.UNSET
    prefill_delayer_max_delay_us: Annotated[
        int | msgspec.UnsetType, Setting("time that prompts wait for other ranks, at most", default="5s")
    ] = msgspec.UNSET
    prefill_delayer_token_usage_low_watermark: Annotated[
        float | msgspec.UnsetType | None,
        Setting("no delay while a rank with prompts uses less of its KV than this share", default="none"),
    ] = msgspec.UNSET
    prefill_delayer_slots: Annotated[
        bool | msgspec.UnsetType,
        Setting("delay also until as many requests can start at once as in recent extends", default="no"),
    ] = msgspec.UNSET
    prefill_delayer_queue_min_ratio: Annotated[
        float | msgspec.UnsetType,
        Setting("delay also until this many requests wait for each running one", default="none"),
    ] = msgspec.UNSET
    prefill_full_skip_passes: Annotated[
        int | msgspec.UnsetType,
        Setting("passes that prompts wait while some ranks are full and others are not", default="0"),
    ] = msgspec.UNSET
    # set by hosts with an executor that extends page tables but cannot change an entry; unset: entries may change
    tables_append_only: bool | msgspec.UnsetType = msgspec.UNSET  # a request keeps pages that the radix cache has twice
    # tiers below the radix cache; unset: none, and left out of journals
    tiers: CacheTiers | msgspec.UnsetType = msgspec.UNSET
    # sliding windows and linear attention; unset: all layers have full attention, and left out of journals
    hybrid: HybridMemory | msgspec.UnsetType = msgspec.UNSET
    # the encoder of media; unset: no limit, and left out of journals
    encoder_budget_tokens: Annotated[
        int | msgspec.UnsetType,
        Setting("encoder tokens of media that are encoded at once, at most", default="no limit"),
    ] = msgspec.UNSET
    # pipeline stages: docs/distributed.md; unset: one running batch, and left out of journals
    pp_size: Annotated[
        int | msgspec.UnsetType,
        Setting("as --pp: stages, and as many microbatches of the running batch", default="one running batch"),
    ] = msgspec.UNSET
    pp_async_batch_depth: Annotated[
        int | msgspec.UnsetType, Setting("further microbatches, for results that are in flight", default="0")
    ] = msgspec.UNSET
    pp_max_micro_batch_size: Annotated[
        int | msgspec.UnsetType,
        Setting("requests in each microbatch", default="max-running-requests shared out over stages"),
    ] = msgspec.UNSET
    pp_dynamic_chunking: Annotated[
        bool | msgspec.UnsetType, Setting("chunks of a prompt that take as long as its first", default="no")
    ] = msgspec.UNSET
    cache_guarantee: Annotated[
        float | msgspec.UnsetType,
        Setting("share of the pages in which every tenant keeps an equal part for its prefixes", default="0"),
    ] = msgspec.UNSET
    # chunks by load; unset: no effect, and left out of journals
    chunked_prefill_size_min: Annotated[
        int | msgspec.UnsetType,
        Setting("chunk beside a full running batch; chunks shrink to it as requests decode", default="no effect"),
    ] = msgspec.UNSET
    # experts that move between ranks by their load; unset: they stay, and left out of journals
    experts: ExpertPlacing | msgspec.UnsetType = msgspec.UNSET
    # the load of experts; unset: it is not measured, and left out of journals
    expert_load_interval: Annotated[
        int | msgspec.UnsetType,
        Setting("batches between two measurements of the tokens routed to each expert; 0: none", default="0"),
    ] = msgspec.UNSET
    # two-batch overlap, see two_batch.py; unset: no batch is split, and left out of journals
    two_batch_overlap: Annotated[
        bool | msgspec.UnsetType,
        Setting("split batches in halves; one half computes while the other communicates", default="no"),
    ] = msgspec.UNSET
    two_batch_decode_tokens: Annotated[
        int | msgspec.UnsetType, Setting("requests from which on a batch of decodes is split", default="32")
    ] = msgspec.UNSET
    two_batch_prefill_tokens: Annotated[
        int | msgspec.UnsetType, Setting("new tokens from which on a batch with prompts is split", default="512")
    ] = msgspec.UNSET
    # prompts by layers beside decodes, see features/multiplexing.py; unset: one stream, and left out of journals
    multiplexing: Multiplexing | msgspec.UnsetType = msgspec.UNSET

    # models that answer in blocks, see diffusion.py; unset: token by token, and left out of journals
    diffusion: BlockDiffusion | msgspec.UnsetType = msgspec.UNSET

    def __post_init__(self) -> None:
        store_floats(self, FLOAT_SETTINGS)
        _require_positive(self)
        if self.page_size & (self.page_size - 1):
            raise ConfigError(f"`page_size` must be a power of two, got `{self.page_size}`\nhint: 16 and 32 are usual")
        if self.overlap_depth not in range(OVERLAP_DEPTH_MAX + 1):
            raise ConfigError(f"`overlap_depth` must be 0, 1 or 2, got `{self.overlap_depth}`")
        settle_drafts(self)
        _settle_jumps(self)
        _settle_guarantee(self)
        _settle_expert_load(self)
        _settle_adapters(self)
        _settle_role(self)
        _settle_ranks(self)
        _settle_stages(self)
        settle_two_batch(self)
        check_multiplexing(self)
        check_diffusion(self)
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise ConfigError(f"`{name}` must be {one_of(choices)}, got `{getattr(self, name)}`")
        _settle_policy(self)
        if not 0 <= self.schedule_seed < 2**63:
            raise ConfigError(f"`schedule_seed` must be 0 to {2**63 - 1}, got `{self.schedule_seed}`")
        if self.bypass_limit is not None and self.bypass_limit < 0:
            raise ConfigError(
                f"`bypass_limit` must be 0 (strict order) or more, got `{self.bypass_limit}`\n"
                "hint: none sets no aging limit"
            )
        if self.enable_priority_preemption and self.schedule_policy != "priority":
            raise ConfigError(
                f"`enable_priority_preemption` is on, but `schedule_policy` is {self.schedule_policy}: a preempted "
                "request could be admitted before the one that it made room for\nhint: take schedule_policy priority"
            )
        if self.enable_priority_preemption and self.retraction_policy != "priority":
            raise ConfigError(
                f"`enable_priority_preemption` is on, but `retraction_policy` is {self.retraction_policy}: at a page "
                "shortage more important requests would be retracted, and admitted again by preemption\n"
                "hint: take retraction_policy priority"
            )
        if self.enable_priority_preemption and self.bypass_limit == 0:
            raise ConfigError(
                "`enable_priority_preemption` is on, but `bypass_limit` 0 admits requests in strict order\n"
                "hint: raise bypass_limit"
            )
        if not 0.0 < self.schedule_conservativeness <= 100.0:
            raise ConfigError(
                f"`schedule_conservativeness` must be above 0 and at most 100, got `{self.schedule_conservativeness}`"
            )
        if self.chunked_prefill_size is not None and self.chunked_prefill_size < self.page_size:
            raise ConfigError(
                f"`chunked_prefill_size` {self.chunked_prefill_size} is less than `page_size` {self.page_size}: "
                "no chunk would ever hold a whole page\nhint: raise chunked_prefill_size or lower page_size"
            )
        if self.chunked_prefill_size is not None and self.max_prefill_tokens < self.page_size:
            raise ConfigError(
                f"`max_prefill_tokens` {self.max_prefill_tokens} is less than `page_size` {self.page_size}: "
                "no extend would ever hold a whole page\nhint: raise max_prefill_tokens or lower page_size"
            )
        if self.chunked_prefill_size_min is not msgspec.UNSET:
            _check_chunk_min(self, self.chunked_prefill_size_min)
        if self.chunk_target_us is not None and self.chunked_prefill_size is None:
            raise ConfigError("`chunk_target_us` shortens chunks, but `chunked_prefill_size` is none: nothing is split")
        align = self.truncation_align_size
        if align is not None:
            _check_alignment(self, align)
        if self.speculates and self.decode_steps_per_launch > 1:
            raise ConfigError(
                f"`speculative_method` is {self.speculative_method}, but `decode_steps_per_launch` is "
                f"{self.decode_steps_per_launch}: a launch either verifies drafts or decodes several times\n"
                "hint: drop one of the two"
            )
        if self.jumps and self.decode_steps_per_launch > 1:
            raise ConfigError(
                f"`jump_forward_tokens` is {self.jump_forward_tokens}, but `decode_steps_per_launch` is "
                f"{self.decode_steps_per_launch}: no request under a grammar decodes several times in a launch\n"
                "hint: drop one of the two"
            )
        if self.request_rows is not None and self.request_rows < self.max_running_requests:
            raise ConfigError(
                f"`request_rows` {self.request_rows} is less than `max_running_requests` {self.max_running_requests}: "
                "every running request holds a row\nhint: leave request_rows unset"
            )
        if not self.radix_cache:
            _check_no_radix_cache(self)
        if self.hybrid is not msgspec.UNSET:
            _check_hybrid(self, self.hybrid)
        if self.keeps_draft_pages and (self.hybrid is not msgspec.UNSET or self.hands_over):
            other = "hybrid" if self.hybrid is not msgspec.UNSET else "role"
            if self.drafts_trees:
                raise ConfigError(
                    f"`speculative_topk` is {self.speculative_topk}: rows keep the pages of refused branches; this is "
                    f"not supported with `{other}`\nhint: speculative_topk 1, for chains"
                )
            raise ConfigError(
                f"`speculative_method` is {self.speculative_method} and `tables_append_only` is on, so that rows keep "
                f"the pages of refused drafts; this is not supported with `{other}`\nhint: drop one of the three"
            )

    @property
    def keeps_duplicates(self) -> bool:
        """Whether a running request keeps its own pages if the radix cache has the same KV in other pages."""
        return self.tables_append_only is True

    @property
    def keeps_draft_pages(self) -> bool:
        """Whether a row keeps the pages of refused drafts for its next positions.

        It does if its table cannot shrink, and with trees, whose drafts reach further than the row can get by them.
        """
        return (self.keeps_duplicates and self.speculates) or self.drafts_trees

    @property
    def drafts_trees(self) -> bool:
        """Whether drafts are trees, with several alternatives behind a token."""
        return self.speculative_topk is not msgspec.UNSET

    @property
    def splits_batches(self) -> bool:
        """Whether large batches run as two halves, one of which computes while the other communicates."""
        return self.two_batch_overlap is True

    @property
    def multiplexes(self) -> bool:
        """Whether prompts are computed by layers on one stream of the device, beside decodes on another."""
        return self.multiplexing is not msgspec.UNSET

    @property
    def block_tokens(self) -> int:
        """Positions of a block of a model that answers in blocks; 0: it answers token by token."""
        return self.diffusion.block_tokens if self.diffusion is not msgspec.UNSET else 0

    @property
    def pool_tokens(self) -> int:
        """KV positions in the whole pool."""
        return self.pages * self.page_size

    @property
    def speculates(self) -> bool:
        """Whether decodes verify drafts."""
        return self.speculative_method is not msgspec.UNSET

    @property
    def drafts_max(self) -> int:
        """The most drafts of a request that one launch verifies."""
        return self.num_speculative_tokens if self.num_speculative_tokens is not msgspec.UNSET else 0

    @property
    def path_max(self) -> int:
        """The most drafts of a request that can be right in one launch."""
        return self.speculative_num_steps if self.speculative_num_steps is not msgspec.UNSET else self.drafts_max

    @property
    def guaranteed_pages(self) -> int:
        """Pages of all tenants' guaranteed parts of the radix cache together; 0 without such parts."""
        return 0 if self.cache_guarantee is msgspec.UNSET else int(self.cache_guarantee * self.pages)

    @property
    def jumps(self) -> bool:
        """Whether tokens that a grammar forces are computed together."""
        return self.jump_forward_tokens is not msgspec.UNSET

    @property
    def forced_max(self) -> int:
        """The most forced tokens of a request that one launch computes."""
        return self.jump_forward_tokens if self.jump_forward_tokens is not msgspec.UNSET else 0

    @property
    def beside_newest_max(self) -> int:
        """The most drafts or forced tokens that one launch computes beside the newest token of a request."""
        return max(self.drafts_max, self.forced_max)

    @property
    def positions_per_decode(self) -> int:
        """The most positions by which one launch moves a request that decodes."""
        return max(1 + self.beside_newest_max, self.decode_steps_per_launch, self.block_tokens)

    @property
    def positions_ahead(self) -> int:
        """The most positions behind the first undelivered one for which decodes may be launched."""
        return (self.overlap_depth + 1) * self.positions_per_decode - 1

    @property
    def states_per_row(self) -> int:
        """States of linear attention that a running request holds: one behind each token that may be its newest."""
        return 1 + self.drafts_max

    @property
    def chunk_unit_tokens(self) -> int:
        """The unit to which new tokens are rounded up when they count against the budgets of an extend."""
        return self.page_size if self.chunk_unit == "page" else 1

    @property
    def split_tokens(self) -> int:
        """The number of tokens at multiples of which a prompt may be split."""
        return self.truncation_align_size or self.chunk_unit_tokens

    @property
    def hands_over(self) -> bool:
        """Whether prompts and outputs run on different engines: the role is prefill or decode."""
        return self.role is not msgspec.UNSET

    @property
    def shares_passes(self) -> bool:
        """Whether the engine is one of several data-parallel ranks, which run every pass together."""
        return self.dp_ranks is not msgspec.UNSET

    @property
    def encoder_budget(self) -> int | None:
        """The most encoder tokens that are encoded at once; None: no limit."""
        return None if self.encoder_budget_tokens is msgspec.UNSET else self.encoder_budget_tokens

    @property
    def ranks_draft_together(self) -> bool:
        """Whether drafts come from passes that all ranks run together. N-gram drafts need no such pass."""
        return self.shares_passes and self.speculates and self.speculative_method != "ngram"

    @property
    def ranks_tell_more(self) -> bool:
        """Whether the counts of ranks have more entries than those that describe the pass."""
        triggers = (self.prefill_delayer_slots, self.prefill_delayer_queue_min_ratio)
        return self.ranks_draft_together or any(value is not msgspec.UNSET for value in triggers)

    @property
    def pipelines(self) -> bool:
        """Whether the engine has a running batch for each of several pipeline stages."""
        return self.pp_size is not msgspec.UNSET

    @property
    def microbatches(self) -> int:
        """The number of running batches."""
        if self.pp_size is msgspec.UNSET or self.pp_async_batch_depth is msgspec.UNSET:
            return 1
        return self.pp_size + self.pp_async_batch_depth

    @property
    def launches_max(self) -> int:
        """The most batches that may be in flight at once."""
        lanes = 2 if self.multiplexes else self.microbatches
        return lanes * (self.overlap_depth + 1)

    @property
    def fits_latency(self) -> bool:
        """Whether a setting needs the durations of passes with prompts."""
        return self.chunk_target_us is not None or self.pp_dynamic_chunking is True

    @property
    def rows_max(self) -> int:
        """Rows of the request table: above the running limit, since a finished request in flight keeps its row."""
        return self.request_rows or self.max_running_requests * (self.overlap_depth + 1)

    @property
    def request_tokens_max(self) -> int:
        """The longest prompt plus output of any request: the one limit that validation and clamping share.

        The last token of an output is never fed back, so a pool of n positions serves n + 1 tokens; n in blocks.
        """
        pool = self.pool_tokens + (self.diffusion is msgspec.UNSET)
        return pool if pool < self.context_tokens_max else self.context_tokens_max

    def prompt_tokens_max(self, with_output: bool) -> int:
        """Return the length of the longest prompt. One token of output must fit behind it if `with_output`."""
        room = self.request_tokens_max - 1 if with_output else min(self.context_tokens_max, self.pool_tokens)
        return room if self.max_input_tokens is None else min(room, self.max_input_tokens)


CHOICES: dict[str, tuple[str, ...]] = {
    "prefix_deduplication": get_args(PrefixDeduplication),
    "session_kv": get_args(SessionKv),
    "retracted_requeue": get_args(Requeue),
    "retracted_kv": get_args(RetractedKv),
    "chunk_unit": get_args(ChunkUnit),
    "batching": get_args(Batching),
    "reserve": get_args(Reserve),
    "retraction_policy": get_args(RetractionPolicy),
    "truncate_input": get_args(TruncateInput),
}


def _check_no_radix_cache(config: SchedConfig) -> None:
    """Raise ConfigError for the settings that need the radix cache; all of them are named at once."""
    needing = {
        "same_step_sharing": (config.same_step_sharing, "is on", "off"),
        "retracted_kv": (config.retracted_kv == "cache", "cache leaves KV to the radix cache", "free"),
        "waiting_prefix_refresh": (bool(config.waiting_prefix_refresh), f"is {config.waiting_prefix_refresh}", "0"),
        "radix_capacity_pages": (config.radix_capacity_pages is not None, "is set", "none"),
        "schedule_policy": (
            config.schedule_policy in ("lpm", "dfs-weight"),
            f"{config.schedule_policy} orders by cached prefix",
            "fcfs",
        ),
        "prefix_deduplication": (
            config.prefix_deduplication != "off",
            f"{config.prefix_deduplication} waits for a prefix to be cached",
            "off",
        ),
        "tiers": (config.tiers is not msgspec.UNSET, "lie below the radix cache", "unset"),
    }
    found = [(name, why, instead) for name, (is_set, why, instead) in needing.items() if is_set]
    if found:
        problem = ", ".join(f"`{name}` {why}" for name, why, _ in found)
        hint = ", ".join(f"{name} {instead}" for name, _, instead in found)
        raise ConfigError(f"{problem}, but `radix_cache` is off\nhint: take {hint}; or turn radix_cache on")


def _check_chunk_min(config: SchedConfig, least: int) -> None:
    """Raise ConfigError for a `chunked_prefill_size_min` that is no chunk between a page and `chunked_prefill_size`."""
    if config.chunked_prefill_size is None:
        raise ConfigError(
            f"`chunked_prefill_size_min` is {least}, but `chunked_prefill_size` is none: nothing is split\n"
            "hint: set chunked_prefill_size"
        )
    if not _is_count(least, config.page_size) or least > config.chunked_prefill_size:
        raise ConfigError(
            f"`chunked_prefill_size_min` must be from `page_size` {config.page_size} to `chunked_prefill_size` "
            f"{config.chunked_prefill_size}, got `{least}`\nhint: an eighth of chunked_prefill_size"
        )


def _check_alignment(config: SchedConfig, align: int) -> None:
    if align % config.page_size:
        raise ConfigError(f"`truncation_align_size` {align} is no multiple of `page_size` {config.page_size}")
    for name in ("chunked_prefill_size", "max_prefill_tokens"):
        limit = getattr(config, name)
        if limit is not None and limit < align:
            raise ConfigError(
                f"`truncation_align_size` {align} exceeds `{name}` {limit}: no prompt could ever be split\n"
                f"hint: raise {name} or lower truncation_align_size"
            )
    if config.batching != "prefill_first":
        raise ConfigError(
            f"`truncation_align_size` needs `batching` prefill_first, got `{config.batching}`: "
            "decodes in the same pass change what is left for the prompt, and with it where it is split\n"
            "hint: take batching prefill_first, or drop truncation_align_size"
        )


def _check_hybrid(config: SchedConfig, hybrid: HybridMemory) -> None:
    if hybrid.window_tokens:
        least = hybrid.row_pages_max(config.page_size, config.positions_ahead)
        least += -(-config.split_tokens // config.page_size)
        if hybrid.window_pages < least:
            raise ConfigError(
                f"`hybrid.window_pages` must be at least {least} for windows of {hybrid.window_tokens} tokens in pages "
                f"of {config.page_size}: one request's window and a chunk; got `{hybrid.window_pages}`"
            )
        if config.chunked_prefill_size is None:
            raise ConfigError(
                "`hybrid.window_tokens` is set, but `chunked_prefill_size` is none: every page of a prompt would need "
                "a window page at once\nhint: set chunked_prefill_size"
            )
    if hybrid.state_slots:
        if not hybrid.checkpoint_tokens or hybrid.checkpoint_tokens % config.page_size:
            raise ConfigError(
                f"`hybrid.checkpoint_tokens` must be a multiple of `page_size` {config.page_size}, "
                f"got `{hybrid.checkpoint_tokens}`"
            )
        if hybrid.state_slots < 1 + config.states_per_row:
            raise ConfigError(
                f"`hybrid.state_slots` must be at least {1 + config.states_per_row} with `num_speculative_tokens` "
                f"{config.drafts_max}: a request has a state behind each draft, and may start from a checkpoint; "
                f"got `{hybrid.state_slots}`\nhint: raise state_slots or lower num_speculative_tokens"
            )


def _settle_jumps(config: SchedConfig) -> None:
    """Check `jump_forward_tokens`. 0 becomes unset, so that journals do not contain it."""
    most = config.jump_forward_tokens
    if most is msgspec.UNSET:
        return
    if not isinstance(most, int) or isinstance(most, bool) or not 0 <= most <= JUMP_FORWARD_TOKENS_MAX:
        raise ConfigError(
            f"`jump_forward_tokens` must be a whole number from 0 to {JUMP_FORWARD_TOKENS_MAX}, got `{most}`\n"
            "hint: 16 is more than most grammars force at once; 0 computes each token by itself"
        )
    if not most:
        msgspec.structs.force_setattr(config, "jump_forward_tokens", msgspec.UNSET)


def _settle_guarantee(config: SchedConfig) -> None:
    """Check `cache_guarantee`. 0 becomes unset, so that journals do not contain it."""
    share = config.cache_guarantee
    if share is msgspec.UNSET:
        return
    if not isinstance(share, float) or not 0.0 <= share <= 1.0:
        raise ConfigError(f"`cache_guarantee` must be from 0 to 1, got `{share}`\nhint: 0.5 is half of the pages")
    if not share:
        msgspec.structs.force_setattr(config, "cache_guarantee", msgspec.UNSET)
    elif not (config.isolate_tenants and config.radix_cache):
        raise ConfigError(
            f"`cache_guarantee` is {share}, which needs `isolate_tenants` and `radix_cache`\nhint: set them"
        )


def _settle_expert_load(config: SchedConfig) -> None:
    """Check `expert_load_interval`. 0 becomes unset, so that journals do not contain it."""
    interval = config.expert_load_interval
    if config.experts is not msgspec.UNSET and not interval:
        raise ConfigError("`experts` are placed by their load, but `expert_load_interval` is 0\nhint: set it to 100")
    if interval is msgspec.UNSET:
        return
    if not isinstance(interval, int) or isinstance(interval, bool) or interval < 0:
        raise ConfigError(
            f"`expert_load_interval` must be a whole number of batches, or 0 for none, got `{interval}`\n"
            "hint: 100 costs little"
        )
    if not interval:
        msgspec.structs.force_setattr(config, "expert_load_interval", msgspec.UNSET)


def _settle_adapters(config: SchedConfig) -> None:
    """Check `base_beside_loras`; false is unset, so that journals do not have it."""
    beside, most = config.base_beside_loras, config.max_loras
    if beside is False:
        msgspec.structs.force_setattr(config, "base_beside_loras", msgspec.UNSET)
    elif beside is not msgspec.UNSET and not (beside is True and most):
        raise ConfigError(f"`base_beside_loras` must be false, or true with `max_loras`; got `{beside}` with `{most}`")


TRANSFER_SETTINGS: dict[str, Any] = {
    "transfer_allocation": "early",
    "transfer_failure": "fail",
    "num_reserved_decode_tokens": 512,
    "transfer_slots": None,
    "bootstrap_timeout_us": 300_000_000,
    "transfer_timeout_us": 300_000_000,
}
"""Defaults of a prefill or a decode engine: SGLang's values. Other engines have none of these settings."""


def _settle_role(config: SchedConfig) -> None:
    """Fill in each transfer setting if a role is set; without a role all of them stay unset."""
    if config.role == "mixed":
        msgspec.structs.force_setattr(config, "role", msgspec.UNSET)
    for name, usual in TRANSFER_SETTINGS.items():
        value = getattr(config, name)
        if config.role is msgspec.UNSET and value is not msgspec.UNSET:
            raise ConfigError(
                f"`{name}` is {value}, but `role` is mixed: nothing is handed over\nhint: take role prefill or decode"
            )
        if config.role is not msgspec.UNSET and value is msgspec.UNSET:
            msgspec.structs.force_setattr(config, name, usual)
    if config.role is msgspec.UNSET:
        return
    for name, choices in (
        ("role", get_args(Role)),
        ("transfer_allocation", get_args(TransferAllocation)),
        ("transfer_failure", get_args(TransferFailure)),
    ):
        if getattr(config, name) not in choices:
            raise ConfigError(f"`{name}` must be {one_of(choices)}, got `{getattr(config, name)}`")
    for name, least in (
        ("num_reserved_decode_tokens", 0),
        ("transfer_slots", 1),
        ("bootstrap_timeout_us", 1),
        ("transfer_timeout_us", 1),
    ):
        value = getattr(config, name)
        if name == "transfer_slots" and value is None:
            msgspec.structs.force_setattr(config, name, 2 * config.max_running_requests)
            continue
        never = value is None and name.endswith("_timeout_us")
        if not never and (not isinstance(value, int) or isinstance(value, bool) or value < least):
            raise ConfigError(f"`{name}` must be a whole number of at least {least}, got `{value}`")


RANK_SETTINGS: dict[str, Any] = {"dp_rank": 0, "prefill_delayer": False, "prefill_full_skip_passes": 0}
"""Defaults of one of several data-parallel ranks. Other engines have none of these settings."""

DELAYER_SETTINGS: dict[str, Any] = {
    "prefill_delayer_max_delay_passes": 30,
    "prefill_delayer_max_delay_us": 5_000_000,
    "prefill_delayer_token_usage_low_watermark": None,
}
"""Defaults of a prefill delayer: SGLang's values."""

TRIGGER_SETTINGS = ("prefill_delayer_slots", "prefill_delayer_queue_min_ratio")
"""Rules by which a prefill delayer waits for more prompts although every rank has prompts. Unset: no such rule."""

OF_RANKS = (*(name for name in RANK_SETTINGS if name != "dp_rank"), *DELAYER_SETTINGS, *TRIGGER_SETTINGS)
"""Settings of schedulers of data-parallel ranks that an operator gives; the number of the rank is given by its host."""


def _settle_ranks(config: SchedConfig) -> None:
    """Fill in each setting of data-parallel ranks if there are several; with one rank all of them stay unset."""
    ranks = config.dp_ranks
    if ranks == 1:
        msgspec.structs.force_setattr(config, "dp_ranks", msgspec.UNSET)
        if config.dp_rank == 0:
            msgspec.structs.force_setattr(config, "dp_rank", msgspec.UNSET)
    elif ranks is not msgspec.UNSET and (not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1):
        raise ConfigError(f"`dp_ranks` must be a whole number of at least 1, got `{ranks}`")
    for name, usual in RANK_SETTINGS.items():
        _settle_one(config, name, usual, config.shares_passes, "there is one rank", "take dp_ranks 2 or more")
    delays = config.prefill_delayer is True
    for name, usual in DELAYER_SETTINGS.items():
        _settle_one(config, name, usual, delays, "nothing delays prompts", "turn prefill_delayer on")
    if config.prefill_delayer_slots is False:
        msgspec.structs.force_setattr(config, "prefill_delayer_slots", msgspec.UNSET)
    for name in TRIGGER_SETTINGS:
        if getattr(config, name) is not msgspec.UNSET:
            _settle_one(config, name, None, delays, "nothing delays prompts", "turn prefill_delayer on")
    if not config.shares_passes:
        return
    if not isinstance(config.prefill_delayer, bool):
        raise ConfigError(f"`prefill_delayer` must be true or false, got `{config.prefill_delayer}`")
    least = {"dp_rank": 0, "prefill_full_skip_passes": 0}
    least |= {"prefill_delayer_max_delay_passes": 1, "prefill_delayer_max_delay_us": 1} if delays else {}
    for name, smallest in least.items():
        value = getattr(config, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < smallest:
            raise ConfigError(f"`{name}` must be a whole number of at least {smallest}, got `{value}`")
    assert config.dp_ranks is not msgspec.UNSET
    assert config.dp_rank is not msgspec.UNSET
    if config.dp_rank >= config.dp_ranks:
        raise ConfigError(f"`dp_rank` {config.dp_rank} is none of {config.dp_ranks} ranks, which count from 0")
    low = config.prefill_delayer_token_usage_low_watermark
    if low is not msgspec.UNSET and low is not None and not 0.0 < low <= 1.0:
        raise ConfigError(
            f"`prefill_delayer_token_usage_low_watermark` must be above 0 and at most 1, got `{low}`\n"
            "hint: leave it out for no watermark"
        )
    if config.prefill_delayer_slots not in (True, msgspec.UNSET):
        raise ConfigError(f"`prefill_delayer_slots` must be true or false, got `{config.prefill_delayer_slots}`")
    ratio = config.prefill_delayer_queue_min_ratio
    if ratio is not msgspec.UNSET and not 0.0 < ratio <= 1.0:
        raise ConfigError(
            f"`prefill_delayer_queue_min_ratio` must be above 0 and at most 1, got `{ratio}`\n"
            "hint: 0.1 to 0.5 are usual; leave it out for no such rule"
        )
    if config.decode_steps_per_launch > 1:
        raise ConfigError(
            f"`dp_ranks` is {config.dp_ranks}, but `decode_steps_per_launch` is {config.decode_steps_per_launch}: "
            "ranks agree on every pass\nhint: drop one of the two"
        )
    for name in ("prefill_delayer", "prefill_full_skip_passes"):
        if config.hands_over and getattr(config, name):
            raise ConfigError(
                f"`{name}` is {getattr(config, name)}, but `role` is {config.role}: prompts and decodes are on "
                "different engines, so neither waits for the other\nhint: drop one of the two"
            )


STAGE_SETTINGS: dict[str, Any] = {"pp_async_batch_depth": 0, "pp_dynamic_chunking": False}
"""Defaults of an engine with microbatches: SGLang's values. Other engines have none of these settings."""

STAGES_ONLY = ("pp_size", "pp_max_micro_batch_size", *STAGE_SETTINGS)
"""All settings of pipeline stages."""

PP_SIZE_MAX = 64


def _settle_stages(config: SchedConfig) -> None:
    """Fill in each setting of pipeline stages if there are several; with one stage all of them stay unset."""
    if config.pp_size == 1:
        msgspec.structs.force_setattr(config, "pp_size", msgspec.UNSET)
    why, hint = "there is one stage", "take pp_size 2 or more"
    for name, usual in STAGE_SETTINGS.items():
        _settle_one(config, name, usual, config.pipelines, why, hint)
    share = max(config.max_running_requests // config.pp_size, 1) if _is_count(config.pp_size, 2) else 1
    _settle_one(config, "pp_max_micro_batch_size", share, config.pipelines, why, hint)
    if not config.pipelines:
        return
    for name, least, most in (
        ("pp_size", 2, PP_SIZE_MAX),
        ("pp_async_batch_depth", 0, PP_SIZE_MAX),
        ("pp_max_micro_batch_size", 1, None),
    ):
        value = getattr(config, name)
        if not _is_count(value, least) or (most is not None and value > most):
            upper = f" and at most {most}" if most is not None else ""
            raise ConfigError(f"`{name}` must be a whole number of at least {least}{upper}, got `{value}`")
    if not isinstance(config.pp_dynamic_chunking, bool):
        raise ConfigError(f"`pp_dynamic_chunking` must be true or false, got `{config.pp_dynamic_chunking}`")
    if config.pp_dynamic_chunking and config.chunked_prefill_size is None:
        raise ConfigError(
            "`pp_dynamic_chunking` shortens chunks, but `chunked_prefill_size` is none: nothing is split\n"
            "hint: set chunked_prefill_size"
        )
    if config.pp_dynamic_chunking and config.truncation_align_size is not None:
        raise ConfigError(
            f"`truncation_align_size` is {config.truncation_align_size}, but `pp_dynamic_chunking` is on: where a "
            "prompt is split would depend on what passes took\nhint: drop one of the two"
        )
    if not config.overlap_consecutive_prefills:
        raise ConfigError(
            "`overlap_consecutive_prefills` is False, but with `pp_size` every microbatch has launches of its own: "
            "their extends follow each other through the stages\nhint: drop one of the two"
        )


def _is_count(value: object, least: int) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _settle_one(config: SchedConfig, name: str, usual: object, there: bool, why: str, hint: str) -> None:
    """Fill in a setting of a feature that is configured; refuse a setting of a feature that is not."""
    value = getattr(config, name)
    if not there and value is not msgspec.UNSET:
        raise ConfigError(f"`{name}` is {value}, but {why}\nhint: {hint}, or drop it")
    if there and value is msgspec.UNSET:
        msgspec.structs.force_setattr(config, name, usual)


def _settle_policy(config: SchedConfig) -> None:
    """Record the version of a policy from an installed package, so that a journal's header identifies it."""
    if config.schedule_policy in SCHEDULE_POLICIES:
        if config.schedule_policy_version:
            raise ConfigError(
                f"`schedule_policy_version` is {config.schedule_policy_version}, but `schedule_policy` "
                f"{config.schedule_policy} is the core's own\nhint: drop schedule_policy_version"
            )
    elif not config.schedule_policy_version:
        from lockstep.core.contract.policies import installed_version  # imports package metadata: only where needed

        version = installed_version(config.schedule_policy, SCHEDULE_POLICIES)
        msgspec.structs.force_setattr(config, "schedule_policy_version", version)


def _require_positive(config: SchedConfig) -> None:
    at_least_one = (
        "page_size pages context_tokens_max max_running_requests request_rows max_queued_requests waiting_timeout_us "
        "running_timeout_us max_prefill_tokens chunked_prefill_size stream_interval force_stream_interval "
        "radix_capacity_pages prefill_max_requests truncation_align_size chunk_target_us decode_look_ahead "
        "decode_steps_per_launch max_sessions grammar_timeout_us max_input_tokens encoder_cache_tokens"
    ).split()
    for name in at_least_one:
        value = getattr(config, name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ConfigError(f"`{name}` must be a whole number of at least 1, got `{value}`")
    budget = config.encoder_budget_tokens
    if budget is not msgspec.UNSET and (not isinstance(budget, int) or isinstance(budget, bool) or budget < 1):
        raise ConfigError(
            f"`encoder_budget_tokens` must be a whole number of at least 1, got `{budget}`\n"
            "hint: leave it out for no limit"
        )
    for name in ("retract_every", "prefill_decode_interval", "waiting_prefix_refresh"):
        value = getattr(config, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ConfigError(f"`{name}` must be a whole number, 0 (never) or more, got `{value}`")
    for name, zero in (("max_loras", "no LoRA"), ("priority_preemption_threshold", "any difference")):
        value = getattr(config, name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
            raise ConfigError(f"`{name}` must be a whole number, 0 ({zero}) or more, got `{value}`")
    if config.context_tokens_max < 2:
        raise ConfigError("`context_tokens_max` must be at least 2: one prompt token and one output token, got `1`")
    for token in config.eos_token_ids:
        if not 0 <= token < 2**31:
            raise ConfigError(f"`eos_token_ids` must be token ids, 0 to {2**31 - 1}, got `{token}`")
    if len(config.eos_token_ids) > 64:
        raise ConfigError(f"`eos_token_ids` has {len(config.eos_token_ids)} ids, at most 64 are allowed")
