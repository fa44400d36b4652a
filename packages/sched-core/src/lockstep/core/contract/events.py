"""Events: facts observed by the host, and facts that the core decided from them. Past tense, noun first.

*Observed* events are the source of truth. The host sends them, the journal contains them in full, and a replay derives
the *decided* events from them again, exactly. Events carry data, never behaviour. Every event carries `time_us`: host
time since the journal began, in whole microseconds, never decreasing.

Wire rules (they keep old journals readable): records are msgpack arrays tagged with the type's name; fields are only
ever added at the end, with a default; a field is never renamed, reordered or given another meaning. Arrays of numbers
are stored as packed little-endian bytes, int32 unless stated otherwise. The declaration of each decided event follows
its class: its text, its tallies and the fields that the digest omits (`declarations.py`).
"""

from __future__ import annotations

from typing import Literal

import msgspec

from lockstep.core.contract.declarations import DECLARATIONS, Tally, declares
from lockstep.core.contract.floats import store_floats
from lockstep.core.contract.text import RequestNames, count, milliseconds, shown

RequestId = int
"""Assigned by the host from a counter: strictly increasing, never used twice. A client's own id is only a `label`."""

BatchId = int


class Observed(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False, forbid_unknown_fields=True):
    """A fact observed by the host."""

    time_us: int


class Decided(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False, forbid_unknown_fields=True):
    """A fact that the core decided, which follows from the observed ones."""

    time_us: int


# ------------------------------------------------------------------------------------------------ prompts and requests


class TokenIds(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """A prompt as packed int32 ids."""

    ids: bytes


class TokenRuns(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """A prompt as runs of consecutive ids: (first, count, first, count, ...). Keeps simulated prompts small."""

    runs: tuple[int, ...]


class TokenDigest(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """The length and digest of a prompt that was not stored (`--journal-content digests`). It cannot be replayed."""

    tokens: int
    digest: bytes


Prompt = TokenIds | TokenRuns | TokenDigest


RequestKind = Literal["generate", "embed", "score"]
"""The result of a prompt: a continuation; one vector pooled over all positions; the result of the last position."""


class PromptSpan(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Positions [start:stop) of a prompt that are not text. The prompt's ids at these positions are ignored."""

    start: int
    stop: int
    kind: Literal["image", "audio", "video", "embedding"]
    digest: bytes  # SHA-256 of the content
    encoder_tokens: int = 0  # input and output of the encoder; 0 when embeddings are given


class SamplingParams(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Parameters with which the executor draws tokens. The core copies them into the plan and reads none of them."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0  # with the position it keys the random stream, so a resumed request draws the same tokens
    logit_bias: tuple[tuple[int, float], ...] = ()
    top_logprobs: int = 0
    logit_processors: tuple[tuple[str, str], ...] = ()  # by name: (name, its arguments as a JSON object)
    allowed_token_ids: tuple[int, ...] = ()  # nothing else is drawn; none: every token may be
    prompt_top_logprobs: int = 0  # likeliest tokens beside each prompt token with a requested logprob
    logprob_token_ids: tuple[int, ...] = ()  # tokens with logprobs of their own at each output position

    @property
    def logprobs_beside(self) -> int:
        """Number of logprobs beside that of each output token: of the likeliest tokens, then of the listed ones."""
        return self.top_logprobs + len(self.logprob_token_ids)

    def __post_init__(self) -> None:
        store_floats(self, FLOAT_PARAMETERS)
        if self.logit_bias:
            biases = tuple((token, float(bias)) for token, bias in self.logit_bias)
            msgspec.structs.force_setattr(self, "logit_bias", biases)


FLOAT_PARAMETERS = ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")


class Grammar(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The grammar that the output must match; compiled by the host, identified in the core by its digest."""

    kind: Literal["json_schema", "regex", "ebnf", "structural_tag", "bad_words"]
    source: str
    digest: bytes


DROP_OUTPUT = -1
"""Value of `session_start`: the turn keeps the session up to the output of its last completed turn."""


class RequestArrived(Observed, frozen=True, gc=False, kw_only=True):
    """A request entered the engine, already tokenised and within the API's own limits."""

    request_id: RequestId
    prompt: Prompt
    max_new_tokens: int
    min_new_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    stream: bool = True
    label: str = ""  # its name in output for people; opaque, bounded by the API
    tenant: str = ""
    priority: int | None = None
    deadline_us: int | None = None  # the request ends if it is not admitted by this time
    finish_by_us: int | None = None  # the request ends if it is not finished by this time
    namespace: str = ""  # the cache salt of the tenant, adapter and weights: prefixes are shared only inside it
    kind: RequestKind = "generate"
    sampling: SamplingParams | None = None
    stop_texts: tuple[str, ...] = ()  # stop strings; the host matches them and reports `text_stops`
    grammar: Grammar | None = None
    adapter: str = ""
    session: str = ""
    spans: tuple[PromptSpan, ...] = ()
    parallel_samples: int = 1  # n takes the ids [request_id, request_id + n): one request per sample
    logprob_start: int | None = None  # logprobs of the prompt tokens behind this position, and of the output
    routing_key: str = ""
    transfer_room: int | None = None  # pairs the prefill and the decode half of a disaggregated request
    # tokens of the session to keep in front of `prompt`; None: all of them, DROP_OUTPUT: without the last turn's output
    session_start: int | None = None
    token_type_ids: bytes = b""  # one byte per prompt token, for models with token types
    return_hidden_states: bool = False  # hidden states of the last layer, of every computed position
    origin: str = ""  # the sender's unique name of the request, which identifies it after a restart
    stop_regexes: tuple[str, ...] = ()  # regular expressions, matched and reported like `stop_texts`
    session_after: str = ""  # label of a completed turn: the session is kept up to its output


class RequestCancelled(Observed, frozen=True, gc=False):
    """The client left. Unknown and finished ids are ignored, since a cancel may be late or repeated."""

    request_id: RequestId


# ------------------------------------------------------------------------------------------- results and other answers


class BatchFinished(Observed, frozen=True, gc=False):
    """A launched batch completed and its results are on the host. Answers one LaunchBatch (and its SampleBatch).

    Batches of one microbatch finish in launch order. `tokens` has one id per sampling row of the plan, in its order;
    with speculation or blocks, `accepted` holds the number of tokens per row and `tokens` that many ids per row. Behind
    the counts `accepted` has, if drafts are trees, the numbers of the right drafts in the plan's tree, row after row.
    """

    batch_id: BatchId
    tokens: bytes = b""
    started_us: int = 0  # time at which the device began the batch ...
    finished_us: int = 0  # ... and ended it; time_us is the time at which the host noticed
    generation: int = 0
    accepted: bytes = b""  # int32 per sampling row, and per right draft of a tree; empty: one token each, no block
    invalid: tuple[int, ...] = ()  # sampling rows (by position) with a token that is NaN or out of range
    text_stops: tuple[int, ...] = ()  # sampling rows with text that contains a stop string
    grammar_ended: tuple[int, ...] = ()  # sampling rows with a grammar that admits no further token
    logprobs: bytes = b""  # float32 per token, where requested
    error: str = ""  # the batch failed as a whole; its requests finish with reason "error"
    # (sampling row, number of newest tokens that may begin a stop text and are not sent yet)
    text_held: tuple[tuple[int, int], ...] = ()
    top_ids: bytes = b""  # int32 [tokens, largest logprobs_beside requested]: the tokens beside each token
    top_logprobs: bytes = b""  # float32 of the same shape


class LaneReady(Observed, frozen=True, gc=False):
    """All pending facts are folded and a launch slot is free: the only event that may launch a batch."""

    microbatch: int = 0


class ClockAdvanced(Observed, frozen=True, gc=False):
    """Time passed. Answers `Step.wake_at_us`, at that time or later."""


class GrammarReady(Observed, frozen=True, gc=False):
    """A grammar was compiled, or could not be. Answers CompileGrammar; the first answer counts."""

    digest: bytes
    error: str = ""


class TokensForced(Observed, frozen=True, gc=False):
    """Grammars admit exactly one continuation of some requests: their next tokens are known before they are sampled.

    Follows the BatchFinished with the tokens before them. Each token is the only one that its mask admits; none of
    them ends its grammar. Requests that have ended are ignored.
    """

    generation: int
    forced: tuple[tuple[RequestId, int, bytes], ...]  # (request, number of its first output that is forced, int32 ids)


class AdapterLoaded(Observed, frozen=True, gc=False):
    """An adapter is on the device, or could not be loaded. Answers LoadAdapter."""

    adapter: str
    version: int
    error: str = ""
    generation: int = 0


class TransferAdvanced(Observed, frozen=True, gc=False):
    """KV moved between engines. Facts that cross engines carry (source, generation, seq) and are idempotent.

    To the sender: "accepted", the receiver has pages. To the receiver: "offered", the prompt is computed. To each side,
    once: "done", "failed" or "link_down"; from then on no other engine reads or writes a page of this engine.
    """

    transfer_id: int  # of the request on this engine
    source: str
    generation: int
    seq: int
    status: Literal["accepted", "moving", "done", "failed", "link_down", "offered"]
    pages_done: int = 0
    first_token: int | None = None  # the prefill engine's sampled token, with status done
    start_tokens: int = 0  # accepted: the receiver already has the positions before
    weights_version: int = 0  # done: of the KV
    cached_tokens: int = 0  # done: of the prompt, found in the radix cache of the prefill engine
    text_stop: bool = False  # of the first token: its text is a stop text,
    text_held: bool = False  # or may begin one, so that it is not sent yet,
    grammar_ended: bool = False  # or the grammar admits nothing behind it


class HostCopyFinished(Observed, frozen=True, gc=False):
    """A copy between device and host memory ended. Answers CopyToHost or LoadFromHost."""

    copy_id: int
    pages_done: int  # the first pages of the copy that are complete; later pages count as not copied
    error: str = ""
    generation: int = 0


class BlocksFound(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Window blocks or state blocks that a prefetch brought into its places of the host pool, from the first on."""

    kind: Literal["window", "state"]
    indices: tuple[int, ...]  # into the keys of the command, ascending


class PrefetchFinished(Observed, frozen=True, gc=False):
    """A prefetch from storage to host memory ended. Answers PrefetchFromStorage."""

    prefetch_id: int
    pages_done: int  # the first pages found, read whole and matching their keys; the rest is a miss
    error: str = ""
    generation: int = 0
    # empty unless all blocks arrived that a request needs to continue after the pages
    blocks: tuple[BlocksFound, ...] = ()


class StorageWritten(Observed, frozen=True, gc=False):
    """A write from host memory to storage ended. Answers WriteToStorage."""

    write_id: int
    pages_done: int
    error: str = ""
    generation: int = 0


class MediaEncoded(Observed, frozen=True, gc=False):
    """An encoder finished one span. Answers EncodeMedia."""

    digest: bytes
    error: str = ""
    generation: int = 0


class Wish(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The report of a data-parallel rank beside its counts, when all ranks decide together which of them extend.

    The first rank's clock counts for all ranks.
    """

    wants: bool  # it could extend, and plans nothing until all ranks have decided
    full: bool  # its running limit is reached, or it has no window page or state slot for one more request
    starved: bool  # it could extend, and uses less of each of its pools than the low watermark
    running: int  # requests that decode; with several microbatches, those of the round's microbatch
    in_flight: int  # batches launched and not delivered, of the same microbatch
    time_us: int


class RanksAgreed(Observed, frozen=True, gc=False):
    """Every data-parallel rank proposed for this round. Answers ProposeBatch; folded equally by every rank.

    `counts` holds, per rank: new tokens, rows of logits (sampled ones, and prompt positions with requested logprobs),
    1 if extending, 1 if a CUDA graph can run. Some settings add passes of a drafter, waiting requests, and the most
    requests that a recent extend took in. `wishes` holds one `Wish` per rank, or is empty.
    """

    round: int
    counts: tuple[tuple[int, ...], ...]
    wishes: tuple[Wish, ...] = ()
    generation: int = 0


class ExpertLoadMeasured(Observed, frozen=True, gc=False):
    """Tokens routed to each expert since the last report: int64 [layers, experts]. Answers MeasureExpertLoad."""

    layers: int
    counts: bytes


class ExpertsMoved(Observed, frozen=True, gc=False):
    """Experts are in their new slots, or could not be moved: then they are where they were. Answers MoveExperts."""

    move_id: int
    error: str = ""
    generation: int = 0


class WeightsSwapped(Observed, frozen=True, gc=False):
    """The weights were loaded, or could not be: then the previous weights are still in place. Answers SwapWeights."""

    version: int
    error: str = ""
    generation: int = 0


class MemorySwitched(Observed, frozen=True, gc=False):
    """Device memory was released or resumed, or could not be.

    Answers ReleaseDeviceMemory and ResumeDeviceMemory.
    """

    tags: tuple[str, ...]
    released: bool
    error: str = ""
    generation: int = 0


class EngineRestarted(Observed, frozen=True, gc=False):
    """The device state is lost: pages, locks and batches in flight are void.

    Unfinished requests wait again, at the front of the waiting queue.
    """

    generation: int


class HostTimeClamped(Observed, frozen=True, gc=False):
    """The host's clock went backwards by `back_us`; the last time was used instead."""

    back_us: int


# ------------------------------------------------------------------------------------------------------------- control


class Flush(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Empty the radix cache. Refused while anything is queued, running or in flight."""


class FlushUnused(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Empty the radix cache. Refused while a request runs or a batch is in flight; requests may wait."""


class Pause(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Stop launching. Running requests keep their pages ("in_place"), are retracted ("retract"), or end ("cancel").

    "admission" stops admission only: running requests go on.
    """

    mode: Literal["in_place", "retract", "cancel", "admission"] = "in_place"


class Resume(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Launch again after a pause."""


class Drain(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Reject new arrivals and answer once every accepted request has ended and nothing uses KV of this engine.

    No batch, transfer or move between cache tiers is left then. Ended by Resume.
    """


class UpdateWeights(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Load weights under a new, higher version; cached KV of older versions no longer matches.

    "wait" admits no request and waits until running requests end; "retract" frees their pages, so that they are
    recomputed; "cancel" ends all requests; "in_place" swaps under running requests: their KV then mixes versions and is
    not shared.
    """

    version: int
    source: str
    mode: Literal["wait", "retract", "cancel", "in_place"] = "wait"


class LoadAdapterControl(msgspec.Struct, frozen=True, array_like=True, tag="LoadAdapter"):
    """Make an adapter, or a newer version of it, available. Pinned, it stays on the device once it is there.

    For a version that is already available, only the pin changes.
    """

    adapter: str
    version: int
    pinned: bool = False
    source: str = ""  # the source of its weights, for the host; the core does not read it


class UnloadAdapterControl(msgspec.Struct, frozen=True, array_like=True, tag="UnloadAdapter"):
    """Withdraw an adapter once no request uses it. Until that is answered, new requests for it are refused."""

    adapter: str


class OpenSession(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Keep the tokens and KV of a conversation between its turns. With `parent` it begins as a copy of that session."""

    session: str
    capacity_tokens: int  # prompt and output of all turns together
    timeout_us: int | None = None  # closed after this time without a turn
    parent: str = ""
    parent_tokens: int | None = None  # leading tokens of the parent to copy; None: all


class CloseSession(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Free a session's KV and delete the session."""

    session: str


class ReleaseMemory(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Release the device memory of `tags` (kv_cache, weights) once nothing runs; no request is admitted meanwhile."""

    tags: tuple[str, ...]


class ResumeMemory(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Take the device memory of `tags` again."""

    tags: tuple[str, ...]


class SwitchRole(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Change the role of an idle engine, without requests, batches in flight and transfers; refused otherwise."""

    role: Literal["mixed", "prefill", "decode"]


class ChangeRole(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Change the role of a prefill or decode engine with requests: new ones are rejected, the others run to their end.

    A request that has not ended `within_us` from now finishes as `transfer`, so that another engine can take it.
    Answered when the role has changed: once batches in flight are delivered and all transfers have ended on both sides.
    """

    role: Literal["mixed", "prefill", "decode"]
    within_us: int


class CancelMany(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Cancel exactly these requests; ids that are unknown or have ended are ignored."""

    request_ids: tuple[RequestId, ...]


class CancelAll(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Cancel every request of the engine."""


class Profile(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Profile the device from now on, for `launches` batches or until stopped."""

    action: Literal["start", "stop"]
    launches: int | None = None


class RecordExpertLoad(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Begin a record of the load of experts, stop it, or answer with its counts."""

    action: Literal["start", "stop", "dump"]


class FreezeGc(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Take the objects that exist now out of garbage collection, once warm-up is over."""


class GetState(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Answer with the engine's statistics."""


class SetState(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Change a setting that may change at run time."""

    name: str
    value: float | int | None


class SlowDown(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Leave at least this time between two launches, for testing; 0 ends it."""

    gap_us: int


Control = (
    Flush
    | FlushUnused
    | Pause
    | Resume
    | Drain
    | UpdateWeights
    | LoadAdapterControl
    | UnloadAdapterControl
    | OpenSession
    | CloseSession
    | ReleaseMemory
    | ResumeMemory
    | SwitchRole
    | ChangeRole
    | CancelMany
    | CancelAll
    | Profile
    | FreezeGc
    | GetState
    | SetState
    | SlowDown
    | RecordExpertLoad
)


class ControlRequested(Observed, frozen=True, gc=False):
    """An operator or a client sent a control request. Answered by one ControlAnswered command."""

    control_id: int
    control: Control


ObservedEvent = (
    RequestArrived
    | RequestCancelled
    | BatchFinished
    | LaneReady
    | ClockAdvanced
    | GrammarReady
    | TokensForced
    | AdapterLoaded
    | TransferAdvanced
    | HostCopyFinished
    | PrefetchFinished
    | MediaEncoded
    | RanksAgreed
    | ExpertLoadMeasured
    | ExpertsMoved
    | EngineRestarted
    | HostTimeClamped
    | ControlRequested
    | WeightsSwapped
    | MemorySwitched
    | StorageWritten
)

# ------------------------------------------------------------------------------------------------------------- decided

FinishReason = Literal[
    "length", "stop", "text_stop", "grammar", "invalid", "cancelled", "timeout", "out_of_kv", "transfer", "error",
    "computed",
]  # fmt: skip
"""Precedence per token: cancelled, invalid, text_stop, stop, grammar, length.

min_new_tokens suppresses text_stop and stop. It does not suppress grammar: no text behind the end of a grammar
matches it.
A request without output ends as "computed" when its prompt is computed.
"""

DeferReason = Literal[
    "running_limit",
    "microbatch",
    "rows",
    "kv_budget",
    "prefill_budget",
    "pages",
    "grammar",
    "adapter",
    "transfer",
    "prefetch",
    "media",
    "proposal_undone",
    "prefix",
    "sample",
    "load",
    "window",
    "state",
]
DEFERRAL_TEXT: dict[DeferReason, str] = {
    "running_limit": "max_running_requests run already",
    "microbatch": "pp_max_micro_batch_size run already in this microbatch",
    "rows": "no row is free",
    "kv_budget": "it does not fit beside what runs",
    "prefill_budget": "this extend is full",
    "pages": "no page is free now",
    "grammar": "its grammar is being compiled",
    "adapter": "there is no place for its adapter yet",
    "transfer": "its KV is on the way",
    "prefetch": "its prefix is being fetched",
    "media": "its media are being encoded",
    "proposal_undone": "the ranks agreed to wait for prompts of others",
    "prefix": "its prefix is being computed",
    "sample": "another sample computes their prompt",
    "load": "its prefix is on the way from host memory",
    "window": "no window page is free for it now",
    "state": "no slot of state is free now",
}

RejectReason = Literal[
    "too_long",
    "bad_request",
    "queue_full",
    "draining",
    "deadline",
    "unsupported",
    "session_closed",
    "grammar",
    "media",
]


class RequestQueued(Decided, frozen=True, gc=False):
    """A request was accepted and waits. `max_new_tokens` is the requested number, as far as context and pool allow.

    For a turn of a session these are its own tokens; TurnStarted has the numbers that include the turns before it.
    """

    request_id: RequestId
    prompt_tokens: int
    max_new_tokens: int
    truncated_tokens: int = 0  # cut off the prompt, see SchedConfig.truncate_input


@declares(RequestQueued)
def _request_queued(event: RequestQueued, names: RequestNames) -> str:
    prompt, most = count(event.prompt_tokens, "prompt token"), count(event.max_new_tokens, "output token")
    cut = f" ({event.truncated_tokens} cut off)" if event.truncated_tokens else ""
    return f"queued {names.request(event.request_id)} with {prompt}{cut}, at most {most}"


class RequestRejected(Decided, frozen=True, gc=False):
    """A request ended before its first admission, and its client did not cancel it."""

    request_id: RequestId
    reason: RejectReason
    message: str


@declares(RequestRejected, tallies=(Tally("rejected", by="reason"),))
def _request_rejected(event: RequestRejected, names: RequestNames) -> str:
    return f"rejected {names.request(event.request_id)} ({event.reason}): {event.message}"


class RequestAdmitted(Decided, frozen=True, gc=False):
    """A waiting request took a row and starts to extend, behind `cached_tokens` found in the radix cache."""

    request_id: RequestId
    row: int
    cached_tokens: int
    new_tokens: int  # still to compute, all chunks together
    waited_us: int  # since it last began to wait
    transferred_tokens: int = 0  # prompt tokens with KV sent by another engine
    host_tokens: int = 0  # cached tokens that were loaded from host memory for it
    storage_tokens: int = 0  # those among `host_tokens` that were fetched from storage
    load_wait_us: int = 0  # part of `waited_us` from the start of its first load or prefetch to the end of the last


@declares(
    RequestAdmitted,
    tallies=(Tally("admitted"), Tally("cached_tokens", "cached_tokens"), Tally("new_tokens", "new_tokens")),
)
def _request_admitted(event: RequestAdmitted, names: RequestNames) -> str:
    waited = f" after {milliseconds(event.waited_us)}" if event.waited_us else ""
    cached = f", {count(event.cached_tokens, 'token')} cached" if event.cached_tokens else ""
    if event.transferred_tokens:
        cached += f", {count(event.transferred_tokens, 'token')} transferred"
    loaded = f", {event.host_tokens} of them from the host" if event.host_tokens else ""
    stored = f" ({event.storage_tokens} from storage)" if event.storage_tokens else ""
    return f"admitted {names.request(event.request_id)}{waited}{cached}{loaded}{stored}"


class AdmissionDeferred(Decided, frozen=True, gc=False):
    """The first request of the waiting queue could not start, or a request may not join the queue yet.

    Decided once, until the deferral reason or the request changes.
    With reason "prefix" only this request is deferred: request `behind` computes the prefix that it needs.
    """

    request_id: RequestId
    reason: DeferReason
    needed_tokens: int = 0
    available_tokens: int = 0
    behind: RequestId = -1
    limit: int = 0  # running_limit, microbatch, rows: the limit that is reached


@declares(AdmissionDeferred, informative=("limit",), tallies=(Tally("deferred", by="reason"),))
def _admission_deferred(event: AdmissionDeferred, names: RequestNames) -> str:
    numbers = f", {event.needed_tokens} tokens wanted, {event.available_tokens} left" if event.needed_tokens else ""
    words = DEFERRAL_TEXT[event.reason] + (f" by {names.request(event.behind)}" if event.behind >= 0 else "")
    return f"deferred {names.request(event.request_id)} ({event.reason}): {words}{numbers}"


class PrefillCompleted(Decided, frozen=True, gc=False):
    """The last chunk of a request's prompt was launched; it decodes from here on."""

    request_id: RequestId
    chunks: int


@declares(PrefillCompleted)
def _prefill_completed(event: PrefillCompleted, names: RequestNames) -> str:
    return f"prefilled {names.request(event.request_id)} in {count(event.chunks, 'chunk')}"


class RequestRetracted(Decided, frozen=True, gc=False):
    """A running request lost its pages: the next decode did not fit, a more important request needs them, or a pause.

    It waits again, keeping its output. On re-admission one extend recomputes the KV of prompt and output.
    """

    request_id: RequestId
    output_tokens: int  # produced so far, all kept
    pages_freed: int  # pages returned to the pool, at once or when the batches in flight that use them are collected
    tokens_discarded: int  # sampled by batches in flight and dropped; drawn again later
    reason: Literal["pages", "forced", "pause", "restart", "prefix_failed", "weights", "preempted"] = "pages"
    beneficiary: RequestId = -1  # preempted: the request that it makes room for
    needed_pages: int = 0  # reason pages: pages that the next decode needed when this request was chosen,
    available_pages: int = 0  # and pages that were available


@declares(
    RequestRetracted,
    informative=("needed_pages", "available_pages"),
    tallies=(Tally("retractions", by="reason"), Tally("tokens_discarded", "tokens_discarded")),
)
def _request_retracted(event: RequestRetracted, names: RequestNames) -> str:
    why = "" if event.reason == "pages" else f" ({event.reason})"
    if event.reason == "preempted":
        why = f" (preempted for {names.request(event.beneficiary)})"
    discarded = f", {count(event.tokens_discarded, 'token')} discarded" if event.tokens_discarded else ""
    outputs, pages = count(event.output_tokens, "output token"), count(event.pages_freed, "page")
    return f"retracted {names.request(event.request_id)} after {outputs}, {pages} back{discarded}{why}"


class RequestFinished(Decided, frozen=True, gc=False):
    """A request ended. Exactly one RequestFinished or RequestRejected closes every request."""

    request_id: RequestId
    reason: FinishReason
    output_tokens: int
    cached_tokens: int  # cached tokens of its prompt at its first admission


@declares(RequestFinished, tallies=(Tally("finished", by="reason"),))
def _request_finished(event: RequestFinished, names: RequestNames) -> str:
    outputs = count(event.output_tokens, "output token")
    return f"finished {names.request(event.request_id)} with {outputs} ({event.reason})"


class PagesEvicted(Decided, frozen=True, gc=False):
    """The radix cache evicted unreferenced pages, because a request needed them or its cap was exceeded."""

    pages: int
    reason: Literal["admission", "decode", "capacity", "flush", "weights", "release"]
    tenants: tuple[tuple[str, int], ...] = ()  # pages by tenant, where tenants have guaranteed parts


@declares(PagesEvicted, informative=("tenants",), tallies=(Tally("pages_evicted", "pages", by="reason"),))
def _pages_evicted(event: PagesEvicted, names: RequestNames) -> str:
    of = ", ".join(f"{pages:,} of {tenant or 'no tenant'}" for tenant, pages in event.tenants)
    return f"evicted {count(event.pages, 'page')} ({event.reason}{f': {of}' if of else ''})"


class DecodeSkipped(Decided, frozen=True, gc=False):
    """The next decode does not fit: it waits until batches in flight free pages, or is left out of a mixed batch."""

    needed_pages: int
    returning_pages: int


@declares(DecodeSkipped, tallies=(Tally("decodes_skipped"),))
def _decode_skipped(event: DecodeSkipped, names: RequestNames) -> str:
    needed = count(event.needed_pages, "page")
    return f"skipped a decode: {needed} short, {event.returning_pages} on the way back"


DelaySituation = Literal["none", "along", "idle", "full", "all", "starved", "mixed", "slots", "queue", "spent", "open"]
"""The situation of the data-parallel ranks that could extend: see data_parallel.py."""


class PrefillNegotiated(Decided, frozen=True, gc=False):
    """All data-parallel ranks decided equally: prompts go ahead in this round, or wait for those of other ranks."""

    round: int
    situation: DelaySituation
    allowed: bool
    wanting: int  # ranks that could extend
    passes: int  # consecutive passes in which prompts have waited
    waited_us: int  # since the first of them, by the first rank's clock


@declares(PrefillNegotiated)
def _prefill_negotiated(event: PrefillNegotiated, names: RequestNames) -> str:
    waited = f" after {count(event.passes, 'pass', 'passes')}" if event.passes else ""
    verdict = f"go ahead{waited}" if event.allowed else f"wait, pass {event.passes}"
    return f"prompts {verdict} ({event.situation}, {count(event.wanting, 'rank')} could extend)"


class TurnStarted(Decided, frozen=True, gc=False):
    """A session is free for this turn, which joins the waiting queue; its prompt begins with the session's tokens."""

    request_id: RequestId
    session: str
    kept_tokens: int
    prompt_tokens: int
    max_new_tokens: int  # the requested number, as far as context, pool and the session's capacity allow


@declares(TurnStarted)
def _turn_started(event: TurnStarted, names: RequestNames) -> str:
    prompt, most = count(event.prompt_tokens, "prompt token"), count(event.max_new_tokens, "output token")
    kept = f", {event.kept_tokens} of the session" if event.kept_tokens else ""
    turn = f"{names.request(event.request_id)} in session {shown(event.session)}"
    return f"started {turn} with {prompt}{kept}, at most {most}"


class SessionYielded(Decided, frozen=True, gc=False):
    """A session's KV is no longer held, because a request needs pages; its tokens are kept."""

    session: str
    pages: int  # pages that are unreferenced from now on


@declares(SessionYielded)
def _session_yielded(event: SessionYielded, names: RequestNames) -> str:
    return f"session {shown(event.session)} yielded {count(event.pages, 'page')}"


class SessionClosed(Decided, frozen=True, gc=False):
    """A session was closed; its tokens and KV are no longer kept."""

    session: str
    tokens: int
    reason: Literal["closed", "timeout"]


@declares(SessionClosed)
def _session_closed(event: SessionClosed, names: RequestNames) -> str:
    return f"closed session {shown(event.session)} with {count(event.tokens, 'token')} ({event.reason})"


class ExpertsPlaced(Decided, frozen=True, gc=False):
    """Experts will move between ranks, because their load is uneven. MoveExperts orders it, some layers at a time."""

    layers: int  # in which experts move
    moves: int  # experts that ranks fetch from others, over all layers
    before_permille: int  # load of the fullest rank over the mean, as a mean over the layers, since the last placement
    after_permille: int  # the same under the new placement


@declares(ExpertsPlaced, informative=("before_permille", "after_permille"), tallies=(Tally("experts_moved", "moves"),))
def _experts_placed(event: ExpertsPlaced, names: RequestNames) -> str:
    before, after = event.before_permille / 1000, event.after_permille / 1000
    moves = f"{count(event.layers, 'layer')}, {count(event.moves, 'move')}"
    return f"place experts by load in {moves}: {before:.2f} to {after:.2f} times the mean"


class AdapterEvicted(Decided, frozen=True, gc=False):
    """An unused adapter was evicted from its slot on the device, which another adapter needs."""

    adapter: str
    version: int
    slot: int


@declares(AdapterEvicted, tallies=(Tally("adapters_evicted"),))
def _adapter_evicted(event: AdapterEvicted, names: RequestNames) -> str:
    return f"evicted {event.adapter} version {event.version} from slot {event.slot}"


TransferState = Literal[
    "bootstrap", "accepted", "waiting", "sending", "in_flight",
    "awaited", "preallocating", "receiving", "ready",
    "quarantined", "over",
]  # fmt: skip
TransferCause = Literal[
    "accepted", "offered", "joined", "part_given", "all_given", "allocated", "done", "failed", "abandoned"
]


class TransferMoved(Decided, frozen=True, gc=False):
    """The transfer of a request changed its state, along one of the two tables in disaggregation.py."""

    request_id: RequestId
    state: TransferState
    cause: TransferCause


@declares(TransferMoved)
def _transfer_moved(event: TransferMoved, names: RequestNames) -> str:
    return f"transfer of {names.request(event.request_id)} is {event.state} ({event.cause})"


TierKind = Literal["write", "load", "prefetch", "store"]
"""Operations from device to host, host to device, storage to host, and host to storage."""

TierOutcome = Literal["done", "partial", "failed", "cancelled", "orphaned", "void"]


class TierOperationStarted(Decided, frozen=True, gc=False):
    """A move of pages between two tiers was ordered. Exactly one TierOperationEnded follows, also after a restart."""

    operation: int
    kind: TierKind
    pages: int
    request_id: RequestId = -1  # load, prefetch: the request that needs the pages


@declares(TierOperationStarted)
def _tier_operation_started(event: TierOperationStarted, names: RequestNames) -> str:
    request = f" for {names.request(event.request_id)}" if event.request_id >= 0 else ""
    return f"began {event.kind} {event.operation} of {count(event.pages, 'page')}{request}"


class TierOperationEnded(Decided, frozen=True, gc=False):
    """A move between tiers ended: complete, in part, or with nothing moved, after a failure or a cancel.

    "orphaned": the pages in front of the moved ones are missing, so that no match would find them. "void": the device,
    the host's memory or the weights that they belong to were lost.
    """

    operation: int
    kind: TierKind
    outcome: TierOutcome
    pages_kept: int  # pages kept in the target tier


@declares(TierOperationEnded)
def _tier_operation_ended(event: TierOperationEnded, names: RequestNames) -> str:
    return f"ended {event.kind} {event.operation} ({event.outcome}), {count(event.pages_kept, 'page')} kept"


class HostPagesEvicted(Decided, frozen=True, gc=False):
    """Unused pages of host memory were evicted to make room for others."""

    pages: int


@declares(HostPagesEvicted, tallies=(Tally("host_pages_evicted", "pages"),))
def _host_pages_evicted(event: HostPagesEvicted, names: RequestNames) -> str:
    return f"evicted {count(event.pages, 'page')} from the host"


class BlocksEvicted(Decided, frozen=True, gc=False, tag="CompanionsEvicted"):
    """Unused window blocks or state blocks were evicted for others; the full pages that they belong to stay cached.

    `kind` names the blocks and their tier: the device, or host memory.
    """

    kind: Literal["window", "state", "host window", "host state"]
    count: int


@declares(BlocksEvicted, tallies=(Tally("blocks_evicted", "count", by="kind"),))
def _blocks_evicted(event: BlocksEvicted, names: RequestNames) -> str:
    what = "window page" if event.kind.endswith("window") else "checkpoint"
    return f"evicted {count(event.count, what)}{' from the host' * event.kind.startswith('host')}"


def decided_types() -> tuple[type[Decided], ...]:
    """Return every type of decided event, in the order of their definitions."""
    return tuple(type_ for type_ in DECLARATIONS if issubclass(type_, Decided))
